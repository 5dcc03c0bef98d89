//! Dense products of up to 16 tokens: when our kernel is taken instead of the library's, and its launch. Knows
//! nothing of where buffers lie. Kernel: `kernels/linear_small.cu`.

use super::{Half, Launch};

/// Most tokens the kernel takes.
pub(crate) const MAX_TOKENS: u32 = 16;

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
    /// `[M, y_stride]` of `y_type`, added, or 0; may be `y`.
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
}

const _: () = assert!(size_of::<LinearParams>() == 80);

/// A compiled form of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinearVariant {
    weight: Half,
    /// Columns of the product: 8 or 16 tokens.
    columns: u32,
    gated: bool,
}

impl LinearVariant {
    /// The variant for `m` tokens and `c` input features; `None`: leave it to the library. The same variant
    /// serves every `m` up to its columns, and a row's sums do not depend on `m` within it.
    pub(crate) fn select(weight: Half, m: u32, c: u32, gated: bool) -> Option<Self> {
        if m == 0 || m > MAX_TOKENS || !c.is_multiple_of(32) {
            return None;
        }
        Some(Self { weight, columns: if m <= 8 { 8 } else { 16 }, gated })
    }

    /// The kernel's name.
    pub(crate) fn name(&self) -> String {
        let gated = if self.gated { "gated_" } else { "" };
        format!("linear_small_{gated}{}_m{}", self.weight.name(), self.columns)
    }

    /// The launch for `n` outputs: as many thread blocks as stay resident, each taking tiles in turn.
    pub(crate) fn launch(&self, n: u32, num_sms: u32) -> Launch {
        let tiles = n.div_ceil(if self.gated { 8 } else { 16 });
        let (blocks_per_sm, threads) = if self.columns == 8 { (1, 512) } else { (2, 256) };
        Launch { grid: (tiles.min(num_sms * blocks_per_sm), 1), threads, shared_bytes: 0 }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap is a failed test
mod tests {
    use super::*;

    #[test]
    fn variants_and_their_launches() {
        let v = LinearVariant::select(Half::Bf16, 1, 4096, false).unwrap();
        assert_eq!(v.name(), "linear_small_bf16_m8");
        assert_eq!(v.launch(6144, 132), Launch { grid: (132, 1), threads: 512, shared_bytes: 0 });
        assert_eq!(v.launch(100, 132).grid, (7, 1));
        let gated = LinearVariant::select(Half::F16, 9, 896, true).unwrap();
        assert_eq!(gated.name(), "linear_small_gated_f16_m16");
        assert_eq!(gated.launch(14_336, 132), Launch { grid: (264, 1), threads: 256, shared_bytes: 0 });
    }

    #[test]
    fn what_the_kernel_cannot_do_is_left_to_the_library() {
        assert_eq!(LinearVariant::select(Half::Bf16, 17, 4096, false), None);
        assert_eq!(LinearVariant::select(Half::Bf16, 1, 4100, false), None);
        assert_eq!(LinearVariant::select(Half::Bf16, 0, 4096, false), None);
    }
}
