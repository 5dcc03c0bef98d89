//! Dense products of up to 16 tokens: when our kernel is taken instead of the library's, and its launch. Knows
//! nothing of where buffers lie. Kernel: `kernels/linear_small.cu`.

use super::{Half, Launch, shared_percent};

/// Products of one x that a launch takes at most.
pub(crate) const MAX_PARTS: usize = 3;
/// x and the weights lie on multiples of so many bytes; rows do too, as `C` is a multiple of 32.
const ALIGNMENT: u64 = 16;

/// The kernel's argument: `LinearParams`. Addresses are the device's.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct LinearParams {
    /// `[M, x_stride]` in the weight's type; rows on 16-byte boundaries.
    pub(crate) x: u64,
    /// `[N, C]`; gated: the gate's rows.
    pub(crate) w: u64,
    /// Gated: up's rows `[N, C]`; else 0.
    pub(crate) w_up: u64,
    /// f32 `[N]`, or 0; not in the gated form.
    pub(crate) bias: u64,
    /// `[M, y_stride]` of `y_type`, added, or 0 (with more parts: 0); may be `y`.
    pub(crate) residual: u64,
    /// `[M, y_stride]` of `y_type`.
    pub(crate) y: u64,
    /// Tokens.
    pub(crate) m: u32,
    /// Output features.
    pub(crate) n: u32,
    /// Input features.
    pub(crate) c: u32,
    /// Elements from row to row of x.
    pub(crate) x_stride: u32,
    /// Elements from row to row of y and residual.
    pub(crate) y_stride: u32,
    /// `ActivationType` of y and residual.
    pub(crate) y_type: u32,
    /// `GateActivation`; read by the gated form.
    pub(crate) activation: u32,
    /// Further products of the same x, of the same types; not in the gated form.
    pub(crate) more: [LinearPart; MAX_PARTS - 1],
}

/// A further product: `LinearPart` of the kernel.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct LinearPart {
    /// `[N, C]`.
    pub(crate) w: u64,
    /// f32 `[N]`, or 0.
    pub(crate) bias: u64,
    /// `[M, y_stride]`.
    pub(crate) y: u64,
    /// Output features. 0: there is no such part, and none after it.
    pub(crate) n: u32,
    /// Elements from row to row of y.
    pub(crate) y_stride: u32,
}

const _: () = assert!(size_of::<LinearPart>() == 32 && size_of::<LinearParams>() == 144);
const _: () = assert!(std::mem::offset_of!(LinearParams, m) == 48 && std::mem::offset_of!(LinearParams, more) == 80);

/// Whether x and a weight at these addresses can be read 16 bytes at a time.
pub(crate) fn is_aligned(x: u64, weight: u64) -> bool {
    x.is_multiple_of(ALIGNMENT) && weight.is_multiple_of(ALIGNMENT)
}

/// A compiled form of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearVariant {
    weight: Half,
    /// Columns of the product: 8 or 16 tokens.
    columns: u32,
    gated: bool,
}

impl LinearVariant {
    /// Every compiled form.
    pub(crate) const ALL: [Self; 6] = {
        const fn form(weight: Half, columns: u32, gated: bool) -> LinearVariant {
            LinearVariant { weight, columns, gated }
        }
        use Half::{Bf16, F16};
        [
            form(Bf16, 8, false),
            form(Bf16, 16, false),
            form(Bf16, 8, true),
            form(F16, 8, false),
            form(F16, 16, false),
            form(F16, 8, true),
        ]
    };

    /// The variant for `m` tokens, `n` outputs and `c` input features; `None`: leave it to the library. The same
    /// variant serves every `m` up to its columns, and a row's sums do not depend on `m` within it.
    ///
    /// With more than 8 tokens x weighs as much in L2 as the weights: only where `n` is no larger than `c` is the
    /// library slower (`kernels/NOTES.md`).
    pub(crate) fn select(weight: Half, m: u32, n: u32, c: u32) -> Option<Self> {
        if n == 0 || c == 0 || !c.is_multiple_of(32) {
            return None;
        }
        let columns = match m {
            1..=8 => 8,
            9..=16 if n <= c => 16,
            _ => return None,
        };
        Some(Self { weight, columns, gated: false })
    }

    /// The variant for a gate, an up projection and the activation between them.
    pub(crate) fn select_gated(weight: Half, m: u32, n: u32, c: u32) -> Option<Self> {
        Self::select(weight, m, n, c).filter(|plain| plain.columns == 8).map(|plain| Self { gated: true, ..plain })
    }

    /// The kernel's name.
    pub(crate) fn name(&self) -> String {
        let gated = if self.gated { "gated_" } else { "" };
        format!("linear_small_{gated}{}_m{}", self.weight.name(), self.columns)
    }

    /// Thread blocks on a multiprocessor, and threads of each.
    fn resident(&self) -> (u32, u32) {
        if self.columns == 8 { (1, 512) } else { (2, 256) }
    }

    /// The part of a multiprocessor's memory that the kernel wants as shared memory (partial sums, twice), in percent:
    /// weights go straight to registers, and what of them is on its way (128 KB) should have room in the L1 cache.
    pub(crate) fn shared_percent(&self) -> u32 {
        let (blocks, threads) = self.resident();
        shared_percent(blocks, 2 * (threads / 32) * (self.columns / 8) * 128 * 4)
    }

    /// The launch for the parts' outputs: as many thread blocks as stay resident, each taking tiles in turn.
    pub(crate) fn launch(&self, outputs: impl IntoIterator<Item = u32>, num_sms: u32) -> Launch {
        let per_tile = if self.gated { 8 } else { 16 };
        let tiles = outputs.into_iter().map(|n| n.div_ceil(per_tile)).sum::<u32>();
        let (blocks_per_sm, threads) = self.resident();
        Launch { grid: (tiles.min(num_sms * blocks_per_sm), 1), threads, shared_bytes: 0 }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap is a failed test
mod tests {
    use super::*;

    #[test]
    fn variants_and_their_launches() {
        let v = LinearVariant::select(Half::Bf16, 1, 6144, 4096).unwrap();
        assert_eq!(v.name(), "linear_small_bf16_m8");
        assert_eq!(v.launch([6144], 132), Launch { grid: (132, 1), threads: 512, shared_bytes: 0 });
        assert_eq!(v.launch([100], 132).grid, (7, 1));
        assert_eq!(v.launch([1000, 17, 1], 132).grid, (63 + 2 + 1, 1), "a tile belongs to one part");
        let wide = LinearVariant::select(Half::F16, 9, 896, 896).unwrap();
        assert_eq!(wide.name(), "linear_small_f16_m16");
        assert_eq!(wide.launch([14_336], 132), Launch { grid: (264, 1), threads: 256, shared_bytes: 0 });
        let gated = LinearVariant::select_gated(Half::F16, 8, 14_336, 896).unwrap();
        assert_eq!(gated.name(), "linear_small_gated_f16_m8");
        assert_eq!(gated.launch([100], 132).grid, (13, 1));
    }

    #[test]
    fn one_variant_serves_up_to_eight_tokens() {
        let of = |m| LinearVariant::select(Half::Bf16, m, 14_336, 4096);
        assert!((2..=8).all(|m| of(m).is_some() && of(m) == of(1)));
    }

    #[test]
    fn more_than_eight_tokens_only_where_the_library_is_slower() {
        let takes = |m, n, c| LinearVariant::select(Half::Bf16, m, n, c).is_some();
        assert!(takes(9, 4096, 4096) && takes(16, 4096, 14_336));
        assert!(!takes(9, 14_336, 4096) && !takes(16, 128_256, 4096) && !takes(17, 4096, 4096));
        assert!(LinearVariant::select_gated(Half::Bf16, 8, 14_336, 4096).is_some());
        assert!(LinearVariant::select_gated(Half::Bf16, 9, 4096, 4096).is_none());
    }

    #[test]
    fn what_the_kernel_cannot_do_is_left_to_the_library() {
        let takes = |m, n, c| LinearVariant::select(Half::Bf16, m, n, c).is_some();
        assert!(takes(1, 1, 32));
        assert!(!takes(1, 1, 4100) && !takes(0, 1, 32) && !takes(1, 0, 32) && !takes(1, 1, 0));
        assert!(is_aligned(0x100, 0x210) && !is_aligned(0x108, 0x200) && !is_aligned(0x100, 0x202));
    }

    #[test]
    fn every_selected_variant_is_compiled() {
        for weight in [Half::Bf16, Half::F16] {
            for m in 1..=16 {
                assert!(LinearVariant::ALL.contains(&LinearVariant::select(weight, m, 32, 32).unwrap()));
                let gated = LinearVariant::select_gated(weight, m, 32, 32);
                assert!(gated.is_none_or(|gated| LinearVariant::ALL.contains(&gated)));
            }
        }
    }
}
