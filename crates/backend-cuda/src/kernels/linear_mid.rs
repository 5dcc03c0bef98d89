//! Dense products of up to 128 tokens on Hopper: when our kernel is taken, which compiled form takes how many tokens,
//! and the launch. Knows nothing of where buffers lie. Kernel: `kernels/linear_mid.cu`.

use super::{Half, Launch};

/// Products of one x that a launch takes at most.
pub(crate) const MAX_PARTS: usize = 3;
/// Tokens that a launch takes at most.
pub(crate) const MAX_TOKENS: u32 = 128;
/// Into how many parts C is cut: thread blocks of a cluster.
pub(crate) const RANKS: u32 = 2;
/// Rows of W in a slab, and elements of C in a panel: a box that the copy engine brings.
pub(crate) const SLAB_ROWS: u32 = 64;
/// See [`SLAB_ROWS`].
pub(crate) const PANEL_COLS: u32 = 64;
/// Fewer are `linear_small`'s.
const MIN_TOKENS: usize = 9;
/// Up to so many this kernel beats the library by itself, without sparing launches.
const FASTER_ALONE: usize = 64;
const THREADS: u32 = 288;
/// Weights lie on multiples of so many bytes, and rows do; x does in any case, as all temporaries.
const ALIGNMENT: u64 = 16;

/// The kernel's argument: `LinearMidParams`. Addresses are the device's.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct LinearMidParams {
    /// `CUtensorMap` of x `[M, C]`, boxes of a panel's columns and [`LinearMidVariant::columns`] rows.
    pub(crate) x_map: [u64; 16],
    /// Of each part's weight `[N, C]`, boxes of a panel of a slab; gated: of gate and up.
    pub(crate) w_map: [[u64; 16]; MAX_PARTS],
    /// Behind the last, `n` is 0. Gated: one.
    pub(crate) parts: [LinearMidPart; MAX_PARTS],
    /// Tokens.
    pub(crate) m: u32,
    /// [`num_slabs`].
    pub(crate) num_slabs: u32,
    /// Of C.
    pub(crate) num_panels: u32,
    /// `ActivationType` of every y: F32 or BF16.
    pub(crate) y_type: u32,
    /// `GateActivation`; read by the gated form.
    pub(crate) activation: u32,
}

/// A product of x: `LinearMidPart` of the kernel.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct LinearMidPart {
    /// f32 `[N]`, or 0; gated: 0.
    pub(crate) bias: u64,
    /// `[M, y_stride]`.
    pub(crate) y: u64,
    /// Output features.
    pub(crate) n: u32,
    /// Elements from row to row of y.
    pub(crate) y_stride: u32,
}

const _: () = assert!(size_of::<LinearMidPart>() == 24 && size_of::<LinearMidParams>() == 640);
const _: () = assert!(std::mem::offset_of!(LinearMidParams, m) == 584);

/// Slabs of all parts (gated: of the gate) for their outputs; `None` where there are none, or the kernel could not
/// share them out in 32 bits.
pub(crate) fn num_slabs(outputs: &[u32]) -> Option<u32> {
    let slabs = outputs.iter().map(|n| n.div_ceil(SLAB_ROWS)).sum::<u32>();
    (slabs > 0 && slabs < 1 << 20).then_some(slabs)
}

/// Whether the copy engine can read a weight of `c` columns at this address, and an x of as many.
pub(crate) fn is_readable(weight: u64, c: u32) -> bool {
    weight.is_multiple_of(ALIGNMENT) && (u64::from(c) * 2).is_multiple_of(ALIGNMENT)
}

/// Whether this kernel takes less time than the others for products of one x, of these outputs (unused ones are 0) and `c`
/// inputs. The library has a launch for each of them; it wins where it needs but one, unless that has many rows.
pub(crate) fn is_faster(num_tokens: usize, outputs: [usize; MAX_PARTS], c: usize) -> bool {
    let most = match outputs {
        [_, second, _] if second > 0 => MAX_TOKENS as usize,
        [n, ..] if n >= 2 * c => FASTER_ALONE,
        _ => 0,
    };
    (MIN_TOKENS..=most).contains(&num_tokens)
}

/// The same of gate, up and the activation, which the library needs three launches for.
pub(crate) fn is_faster_gated(num_tokens: usize) -> bool {
    (MIN_TOKENS..=FASTER_ALONE).contains(&num_tokens)
}

/// A compiled form of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearMidVariant {
    weight: Half,
    /// Columns of the product: tokens that it takes at most.
    columns: u32,
    gated: bool,
}

/// How a number of columns is compiled: the kernel's template arguments.
struct Form {
    columns: u32,
    /// Stages of the ring of weights.
    stages: u32,
    /// Panels of x that are kept.
    x_slots: u32,
}

/// Measured best (`kernels/NOTES.md`). Ascending.
const FORMS: [Form; 4] = [
    Form { columns: 16, stages: 9, x_slots: 32 },
    Form { columns: 32, stages: 8, x_slots: 16 },
    Form { columns: 64, stages: 7, x_slots: 7 },
    Form { columns: MAX_TOKENS, stages: 5, x_slots: 5 },
];

impl LinearMidVariant {
    /// Every compiled form.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        [Half::Bf16, Half::F16].into_iter().flat_map(|weight| {
            let form = move |form: &Form, gated| Self { weight, columns: form.columns, gated };
            FORMS.iter().flat_map(move |of| [form(of, false), form(of, true)])
        })
    }

    /// The form for `m` tokens, at most [`MAX_TOKENS`]: whichever it is, a row has the same sums.
    pub(crate) fn for_tokens(weight: Half, m: u32, gated: bool) -> Option<Self> {
        let form = FORMS.iter().find(|form| m <= form.columns).filter(|_| m > 0)?;
        Some(Self { weight, columns: form.columns, gated })
    }

    fn form(&self) -> &'static Form {
        FORMS.iter().find(|form| form.columns == self.columns).unwrap_or(&FORMS[FORMS.len() - 1])
    }

    /// The kernel's name.
    pub(crate) fn name(&self) -> String {
        let gated = if self.gated { "gated_" } else { "" };
        format!("linear_mid_{gated}{}_m{}", self.weight.name(), self.columns)
    }

    /// Tokens that it takes at most.
    pub(crate) fn columns(&self) -> u32 {
        self.columns
    }

    /// Bytes of `MidShared`, and room to align it.
    pub(crate) fn shared_bytes(&self) -> u32 {
        let form = self.form();
        let weights = form.stages * 2 * SLAB_ROWS * PANEL_COLS * 2;
        let x = form.x_slots * self.columns * PANEL_COLS * 2;
        let sums = 2 * SLAB_ROWS * self.columns * 4;
        let barriers = (2 * form.stages + form.x_slots + 2) * 8;
        weights + x + sums + barriers + 1024
    }

    /// The launch over `num_slabs` slabs, at most `max_clusters` clusters of thread blocks at once.
    pub(crate) fn launch(&self, num_slabs: u32, max_clusters: u32) -> Launch {
        Launch { grid: (RANKS * num_slabs.min(max_clusters), 1), threads: THREADS, shared_bytes: self.shared_bytes() }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap is a failed test
mod tests {
    use super::*;

    #[test]
    fn slabs_are_shared_out() {
        // q, k and v of an 8B Llama.
        let qkv = num_slabs(&[4096, 1024, 1024]).unwrap();
        assert_eq!(qkv, 96);
        let variant = LinearMidVariant::for_tokens(Half::Bf16, 8, false).unwrap();
        assert_eq!(variant.launch(qkv, 66).grid, (132, 1));
        assert_eq!(num_slabs(&[1, 0, 0]), Some(1));
        assert_eq!(variant.launch(1, 66).grid, (2, 1), "no cluster is without work");
        assert_eq!(num_slabs(&[17, 1, 300]), Some(1 + 1 + 5), "a slab belongs to one part");
        assert_eq!(num_slabs(&[0, 0, 0]), None);
        assert_eq!(num_slabs(&[u32::MAX, 1, 1]), None);
    }

    #[test]
    fn the_narrowest_form_takes_the_tokens() {
        let of = |m| LinearMidVariant::for_tokens(Half::Bf16, m, false).map(|variant| variant.name());
        assert_eq!(of(0), None);
        assert_eq!(of(1).unwrap(), "linear_mid_bf16_m16");
        assert_eq!(of(17).unwrap(), "linear_mid_bf16_m32");
        assert_eq!(of(MAX_TOKENS).unwrap(), "linear_mid_bf16_m128");
        assert_eq!(of(MAX_TOKENS + 1), None);
        assert_eq!(LinearMidVariant::for_tokens(Half::F16, 64, true).unwrap().name(), "linear_mid_gated_f16_m64");
    }

    #[test]
    fn every_form_fits_a_multiprocessor() {
        for variant in LinearMidVariant::all() {
            assert!(variant.shared_bytes() <= 227 << 10, "{variant:?}");
            assert!(variant.columns() <= 256 && variant.columns().is_multiple_of(16), "{variant:?}: a box of x");
            assert!(variant.form().stages <= variant.form().x_slots, "{variant:?}: a stage has a slot of x");
        }
        assert_eq!(LinearMidVariant::all().count(), 2 * 2 * FORMS.len());
    }

    #[test]
    fn taken_where_it_is_the_fastest() {
        let of_three = |tokens| is_faster(tokens, [4096, 1024, 1024], 4096);
        assert!(!of_three(8) && of_three(9) && of_three(128) && !of_three(129));
        let head = |tokens| is_faster(tokens, [128_256, 0, 0], 4096);
        assert!(!head(8) && head(9) && head(64) && !head(65));
        assert!(!is_faster(32, [4096, 0, 0], 4096), "one product of few rows is the library's");
        assert!(is_faster_gated(9) && is_faster_gated(64) && !is_faster_gated(8) && !is_faster_gated(65));
    }

    #[test]
    fn what_the_copy_engine_reads() {
        assert!(is_readable(0x210, 104) && is_readable(0x100, 8));
        assert!(!is_readable(0x210, 100) && !is_readable(0x208, 64) && !is_readable(0x202, 64));
    }
}
