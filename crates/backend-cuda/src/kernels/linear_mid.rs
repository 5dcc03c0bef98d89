//! Dense products of up to 128 tokens on Hopper: when our kernel is taken, which compiled form takes a product, how its
//! rows and C are cut, and the launch. Knows nothing of where buffers lie. Kernel: `kernels/linear_mid.cu`.

use super::{Half, Launch, MULTIPROCESSOR_BYTES, SYSTEM_BYTES};

/// Products of one x that a launch takes at most.
pub(crate) const MAX_PARTS: usize = 3;
/// Tokens that a launch takes at most.
pub(crate) const MAX_TOKENS: u32 = 128;
/// Elements of C in a panel: the columns of a box that the copy engine brings.
pub(crate) const PANEL_COLS: u32 = 64;
/// C is cut at multiples of so many: `CUT_PANELS` of the kernel.
const CUT_COLS: u32 = 4 * PANEL_COLS;
/// Planes at most: what reads them has as many more bytes to read.
const MAX_PLANES: u32 = 8;
/// Rows of W in a tile.
const TILE_ROWS: u32 = 64;
/// Bytes of a panel's row.
const PANEL_BYTES: u32 = PANEL_COLS * 2;
/// Stages of a ring at most: `MAX_SLOTS` of the kernel.
const MAX_SLOTS: u32 = 16;
/// Threads that bring weights and x.
const FEEDERS: u32 = 64;
/// Of a multiprocessor's shared memory, what rings may take: all, less barriers, room to align, and what a norm's thread
/// block needs beside them, both with what the driver adds.
const RING_BYTES: u32 = MULTIPROCESSOR_BYTES - (SYSTEM_BYTES + 512 + ALIGN_BYTES) - (SYSTEM_BYTES + 256);
/// Shared memory of a launch at most.
pub(crate) const MOST_SHARED_BYTES: u32 = RING_BYTES + ALIGN_BYTES;
/// Where rings begin is a multiple of this.
const ALIGN_BYTES: u32 = 1024;
/// Rows of a share at least: fewer are not worth a thread block that reads all of x.
const LEAST_ROWS: u32 = 16;
/// Fewer are `linear_small`'s.
const MIN_TOKENS: usize = 9;
/// The same of products that leave planes.
const MIN_TOKENS_IN_PLANES: usize = 17;
/// Up to so many this kernel beats the library by itself, without sparing launches.
const FASTER_ALONE: usize = 64;
/// Weights lie on multiples of so many bytes, and rows do; x does in any case, as all temporaries.
const ALIGNMENT: u64 = 16;

/// The kernel's argument: `LinearMidParams`. Addresses are the device's.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(128))]
pub(crate) struct LinearMidParams {
    /// `CUtensorMap` of x `[M, C]`, boxes of a panel's columns and [`LinearMidVariant::columns`] rows.
    pub(crate) x_map: [u64; 16],
    /// Of each part's weight `[N, C]`, boxes of a panel's columns and the part's `box_rows`; gated: of gate and up.
    pub(crate) w_map: [[u64; 16]; MAX_PARTS],
    /// Behind the last, `num_shares` is 0. Gated: one.
    pub(crate) parts: [LinearMidPart; MAX_PARTS],
    /// Bytes of y from plane to plane.
    pub(crate) plane_stride: u64,
    /// Of C, by planes: the grid's y.
    pub(crate) cuts: EvenCut,
    /// Tokens.
    pub(crate) m: u32,
    /// [`Cut::num_passes`].
    pub(crate) num_passes: u32,
    /// Of C.
    pub(crate) num_panels: u32,
    /// [`Cut::tile_rows`].
    pub(crate) tile_rows: u32,
    /// [`Cut::w_slots`].
    pub(crate) w_slots: u32,
    /// [`Cut::x_slots`].
    pub(crate) x_slots: u32,
    /// `ActivationType` of every y: F32 or BF16.
    pub(crate) y_type: u32,
    /// `GateActivation`; read by the gated form.
    pub(crate) activation: u32,
}

/// Units given to several runs: `quotient` to each, and one more to the first `remainder`. `EvenCut` of the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct EvenCut {
    quotient: u32,
    remainder: u32,
}

impl EvenCut {
    /// `units` for `runs` runs, of which there is one at least.
    fn new(units: u32, runs: u32) -> Self {
        Self { quotient: units / runs.max(1), remainder: units % runs.max(1) }
    }

    /// Units of the largest run.
    fn largest(self) -> u32 {
        self.quotient + u32::from(self.remainder > 0)
    }
}

/// A product of x: `LinearMidPart` of the kernel.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct LinearMidPart {
    /// f32 `[N]`, or 0; gated: 0.
    pub(crate) bias: u64,
    /// `[planes, M, y_stride]`.
    pub(crate) y: u64,
    /// Output features.
    pub(crate) n: u32,
    /// Elements from row to row of y.
    pub(crate) y_stride: u32,
    /// [`Cut::shares`] of it.
    pub(crate) num_shares: u32,
    /// [`Cut::box_rows`] of it.
    pub(crate) box_rows: u32,
    /// [`Cut::pairs`] of it.
    pub(crate) pairs: EvenCut,
}

const _: () = assert!(size_of::<LinearMidPart>() == 40 && size_of::<LinearMidParams>() == 768);
const _: () = assert!(std::mem::offset_of!(LinearMidParams, m) == 648);

/// Whether the copy engine can read a weight of `c` columns at this address, and an x of as many.
pub(crate) fn is_readable(weight: u64, c: u32) -> bool {
    weight.is_multiple_of(ALIGNMENT) && (u64::from(c) * 2).is_multiple_of(ALIGNMENT)
}

/// Whether the kernel counts so many outputs, of all parts.
pub(crate) fn is_countable(outputs: &[u32]) -> bool {
    let all = outputs.iter().map(|&n| u64::from(n)).sum::<u64>();
    (1..1 << 26).contains(&all)
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
    (MIN_TOKENS..=MAX_TOKENS as usize).contains(&num_tokens)
}

/// How many of so many tokens are taken in planes, if any are: all of them, or as many as a launch takes.
pub(crate) fn tokens_in_planes(num_tokens: usize) -> Option<usize> {
    (num_tokens >= MIN_TOKENS_IN_PLANES).then_some(num_tokens.min(MAX_TOKENS as usize))
}

/// Ranges that C is cut into where the kernel leaves its sums in planes, `[planes, M, N]`: as many as give every
/// multiprocessor a share of a tile's rows. Follows from the shape alone, so that a row's sums do not depend on M.
pub(crate) fn num_planes(n: u32, c: u32, num_multiprocessors: u32) -> u32 {
    let cuts = c.div_ceil(CUT_COLS);
    (num_multiprocessors * TILE_ROWS / n.max(1)).clamp(1, MAX_PLANES).min(cuts.max(1))
}

/// Where `c` columns are cut into planes.
pub(crate) fn cuts(c: u32, num_planes: u32) -> EvenCut {
    EvenCut::new(c.div_ceil(CUT_COLS), num_planes)
}

/// A compiled form of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearMidVariant {
    weight: Half,
    form: Form,
}

/// How a form is compiled: the kernel's template arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Form {
    /// Columns of the product: tokens that it takes at most.
    columns: u32,
    /// Warpgroups that multiply.
    warpgroups: u32,
    /// Tiles that each of them has at once; gated: one of the gate, one of up. 0: they have one together, each for half of
    /// the tokens.
    tiles: u32,
    /// Panels of a stage.
    panels: u32,
    gated: bool,
}

impl Form {
    /// For shares of up to a tile's rows.
    const fn narrow(columns: u32) -> Self {
        Self { columns, warpgroups: 2, tiles: 0, panels: 4, gated: false }
    }

    /// For larger shares.
    const fn wide(columns: u32) -> Self {
        Self { columns, warpgroups: 2, tiles: 2, panels: 1, gated: false }
    }

    const fn gated_narrow(columns: u32) -> Self {
        Self { panels: 2, gated: true, ..Self::narrow(columns) }
    }

    const fn gated_wide(columns: u32) -> Self {
        Self { gated: true, ..Self::wide(columns) }
    }

    const fn all(columns: u32) -> [Self; 4] {
        [Self::narrow(columns), Self::wide(columns), Self::gated_narrow(columns), Self::gated_wide(columns)]
    }
}

/// Measured best (`kernels/NOTES.md`). By columns; of as many the narrow one first.
const FORMS: [[Form; 4]; 4] = [Form::all(16), Form::all(32), Form::all(64), Form::all(MAX_TOKENS)];

/// What a launch is to do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MidShape {
    pub(crate) weight: Half,
    /// Gate and up, of as many outputs as the first part has.
    pub(crate) gated: bool,
    /// Tokens.
    pub(crate) m: u32,
    /// Of each part; of unused ones 0.
    pub(crate) outputs: [u32; MAX_PARTS],
    /// Ranges that C is cut into.
    pub(crate) num_planes: u32,
}

/// How a launch cuts its work: rows into shares, each a thread block's, and C into planes. A share is taken in passes of
/// as many rows as the form has tiles for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Shares of each part.
    pub(crate) shares: [u32; MAX_PARTS],
    /// Pairs of each part's rows, by passes of all its shares: they begin at even rows.
    pub(crate) pairs: [EvenCut; MAX_PARTS],
    /// Rows of each part's largest pass.
    pub(crate) box_rows: [u32; MAX_PARTS],
    /// Of every share.
    pub(crate) num_passes: u32,
    /// Ranges of C.
    pub(crate) num_planes: u32,
    /// Rows that a panel of weights has room for; gated: of each of both.
    pub(crate) tile_rows: u32,
    /// Stages of the ring of weights.
    pub(crate) w_slots: u32,
    /// Stages of the ring of x.
    pub(crate) x_slots: u32,
}

impl Cut {
    /// Of all parts.
    pub(crate) fn num_shares(&self) -> u32 {
        self.shares.iter().sum()
    }
}

/// `most` shares, or as many as are worth it, given to the parts in proportion to their outputs: each that has any gets
/// one at least.
fn share_out(outputs: &[u32; MAX_PARTS], most: u32) -> [u32; MAX_PARTS] {
    let mut rows_left = outputs.iter().map(|&n| u64::from(n)).sum::<u64>();
    let mut parts_left = outputs.iter().filter(|&&n| n > 0).count() as u64;
    let mut left = u64::from(most).min(rows_left.div_ceil(u64::from(LEAST_ROWS))).max(parts_left);
    outputs.map(|n| {
        if n == 0 {
            return 0;
        }
        parts_left -= 1;
        let own = (u64::from(n) * left + rows_left / 2) / rows_left;
        let own = own.clamp(1, left - parts_left);
        (rows_left, left) = (rows_left - u64::from(n), left - own);
        u32::try_from(own).unwrap_or(most)
    })
}

impl Form {
    /// Rows of a pass at most; gated: of each of both.
    fn rows(&self) -> u32 {
        TILE_ROWS * (self.warpgroups * self.tiles / if self.gated { 2 } else { 1 }).max(1)
    }

    /// Bytes of a stage of weights, and of one of x.
    fn stage_bytes(&self, tile_rows: u32) -> (u32, u32) {
        let boxes = if self.gated { 2 } else { 1 };
        (self.panels * boxes * tile_rows * PANEL_BYTES, self.panels * self.columns * PANEL_BYTES)
    }

    /// `outputs` of each part (unused ones are 0) for at most `most_blocks` thread blocks; `None` where there is nothing
    /// to do, or more than the kernel counts.
    fn cut(&self, outputs: &[u32; MAX_PARTS], num_planes: u32, most_blocks: u32) -> Option<Cut> {
        if !is_countable(outputs) || num_planes == 0 {
            return None;
        }
        let shares = share_out(outputs, (most_blocks / num_planes).max(1));
        let pairs_by = |passes: u32| -> [EvenCut; MAX_PARTS] {
            std::array::from_fn(|part| EvenCut::new(outputs[part].div_ceil(2), shares[part] * passes))
        };
        let largest = |passes: u32| pairs_by(passes).iter().map(|pairs| 2 * pairs.largest()).max();
        let least =
            outputs.iter().zip(shares).map(|(n, shares)| n.div_ceil(shares.max(1)).div_ceil(self.rows())).max()?;
        // That passes begin at even rows asks for one more at most.
        let num_passes = if largest(least)? <= self.rows() { least } else { least + 1 };
        let pairs = pairs_by(num_passes);
        let box_rows = pairs.map(|pairs| 2 * pairs.largest());
        let tile_rows = box_rows.iter().max()?.next_multiple_of(8);
        let (w_bytes, x_bytes) = self.stage_bytes(tile_rows);
        // x comes from L2, sooner than weights do: six of ten as many stages.
        let w_slots = (10 * RING_BYTES / (10 * w_bytes + 6 * x_bytes)).min(MAX_SLOTS);
        let x_slots = ((RING_BYTES - w_slots * w_bytes) / x_bytes).min(w_slots);
        Some(Cut { shares, pairs, box_rows, num_passes, num_planes, tile_rows, w_slots, x_slots })
    }
}

impl LinearMidVariant {
    /// Every compiled form.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        [Half::Bf16, Half::F16]
            .into_iter()
            .flat_map(|weight| FORMS.into_iter().flatten().map(move |form| Self { weight, form }))
    }

    /// The form for a launch, and its cut, on so many multiprocessors: the narrowest, of those the one with the fewest
    /// passes. Whichever it is, a row has the same sums at the same number of planes.
    pub(crate) fn of_products(products: &MidShape, num_multiprocessors: u32) -> Option<(Self, Cut)> {
        let MidShape { weight, gated, m, outputs, num_planes } = *products;
        let forms = FORMS.iter().find(|forms| (1..=forms[0].columns).contains(&m))?;
        forms
            .iter()
            .filter(|form| form.gated == gated)
            .filter_map(|&form| Some((Self { weight, form }, form.cut(&outputs, num_planes, num_multiprocessors)?)))
            .min_by_key(|(_, cut)| cut.num_passes)
    }

    /// The kernel's name.
    pub(crate) fn name(&self) -> String {
        let Form { columns, warpgroups, tiles, gated, .. } = self.form;
        let gated = if gated { "gated_" } else { "" };
        format!("linear_mid_{gated}{}_m{columns}_w{warpgroups}_t{tiles}", self.weight.name())
    }

    /// Tokens that it takes at most: rows of a box of x.
    pub(crate) fn columns(&self) -> u32 {
        self.form.columns
    }

    /// The launch of a cut.
    pub(crate) fn launch(&self, cut: &Cut) -> Launch {
        let (w_bytes, x_bytes) = self.form.stage_bytes(cut.tile_rows);
        Launch {
            grid: (cut.num_shares(), cut.num_planes),
            threads: self.form.warpgroups * 128 + FEEDERS,
            shared_bytes: cut.w_slots * w_bytes + cut.x_slots * x_bytes + ALIGN_BYTES,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap is a failed test
mod tests {
    use super::*;

    fn of(m: u32, outputs: [u32; MAX_PARTS], gated: bool, num_planes: u32) -> (LinearMidVariant, Cut) {
        let products = MidShape { weight: Half::Bf16, gated, m, outputs, num_planes };
        LinearMidVariant::of_products(&products, 132).unwrap()
    }

    #[test]
    fn rows_are_shared_out_evenly() {
        // Of an 8B Llama: q, k and v; gate and up; down in planes; the head.
        let (variant, cut) = of(64, [4096, 1024, 1024], false, 1);
        assert_eq!((cut.shares, cut.box_rows, cut.num_passes), ([88, 22, 22], [48, 48, 48], 1));
        assert_eq!(variant.launch(&cut).grid, (132, 1));
        let (_, cut) = of(64, [14_336, 0, 0], true, 1);
        assert_eq!((cut.shares, cut.box_rows, cut.tile_rows), ([132, 0, 0], [110, 0, 0], 112));
        let (variant, cut) = of(64, [4096, 0, 0], false, num_planes(4096, 14_336, 132));
        assert_eq!((cut.shares, cut.box_rows, cut.num_planes), ([66, 0, 0], [64, 0, 0], 2));
        assert_eq!(variant.launch(&cut).grid, (66, 2));
        let (_, cut) = of(64, [128_256, 0, 0], false, 1);
        assert_eq!((cut.shares, cut.box_rows, cut.num_passes), ([132, 0, 0], [244, 0, 0], 4));
        // No share is without rows, none of a few, and a part has one at least.
        assert_eq!(of(1, [1, 0, 0], false, 1).1.shares, [1, 0, 0]);
        assert_eq!(of(1, [300, 1, 17], false, 1).1.shares, [18, 1, 1]);
        let products = |outputs| MidShape { weight: Half::F16, gated: false, m: 1, outputs, num_planes: 1 };
        assert_eq!(LinearMidVariant::of_products(&products([0; 3]), 132), None);
        assert_eq!(LinearMidVariant::of_products(&products([u32::MAX, 1, 1]), 132), None);
    }

    #[test]
    fn every_cut_has_all_rows_and_fits_a_multiprocessor() {
        for form in FORMS.into_iter().flatten() {
            for n in (1..400).chain([896, 4864, 14_335, 40_000, 151_936, 1 << 25]) {
                for (outputs, num_planes, blocks) in
                    [([n, 0, 0], 1, 132), ([n, 0, 0], 8, 132), ([n, n / 3, 40], 1, 114), ([n, 5, 0], 1, 1)]
                {
                    let what = format!("{form:?}, {outputs:?}, {num_planes} planes");
                    let cut = form.cut(&outputs, num_planes, blocks).unwrap();
                    for (part, &n) in outputs.iter().enumerate() {
                        let EvenCut { quotient, remainder } = cut.pairs[part];
                        let runs = cut.shares[part] * cut.num_passes;
                        assert_eq!(runs * quotient + remainder.min(runs), n.div_ceil(2), "{what}");
                        assert!(cut.box_rows[part] <= cut.tile_rows.min(form.rows()), "{what}");
                    }
                    assert!(cut.box_rows.iter().all(|&rows| rows <= 256), "{what}: a box of weights");
                    assert!(cut.x_slots >= 2 && cut.w_slots >= 2 && cut.w_slots <= MAX_SLOTS, "{what}: {cut:?}");
                    let variant = LinearMidVariant { weight: Half::Bf16, form };
                    let launch = variant.launch(&cut);
                    assert!(launch.shared_bytes <= MOST_SHARED_BYTES, "{what}");
                    // A tile with fewer rows is read to its end.
                    let (_, x_bytes) = form.stage_bytes(cut.tile_rows);
                    assert!(cut.x_slots * x_bytes >= TILE_ROWS * PANEL_BYTES, "{what}");
                }
            }
        }
    }

    #[test]
    fn the_narrowest_form_takes_the_tokens() {
        let of = |m, n, gated| of(m, [n, 0, 0], gated, 1).0.name();
        assert_eq!(of(1, 4096, false), "linear_mid_bf16_m16_w2_t0");
        assert_eq!(of(17, 4096, false), "linear_mid_bf16_m32_w2_t0");
        assert_eq!(of(MAX_TOKENS, 128_256, false), "linear_mid_bf16_m128_w2_t2");
        assert_eq!(of(64, 14_336, true), "linear_mid_gated_bf16_m64_w2_t2");
        assert_eq!(of(64, 4864, true), "linear_mid_gated_bf16_m64_w2_t0");
        let products = MidShape { weight: Half::F16, gated: false, m: 129, outputs: [64, 0, 0], num_planes: 1 };
        assert_eq!(LinearMidVariant::of_products(&products, 132), None);
        assert_eq!(LinearMidVariant::all().count(), 2 * 4 * FORMS.len());
    }

    #[test]
    fn planes_follow_from_the_shape() {
        assert_eq!(num_planes(4096, 4096, 132), 2);
        assert_eq!(num_planes(4096, 14_336, 132), 2);
        assert_eq!(num_planes(2048, 8192, 132), 4);
        assert_eq!(num_planes(8192, 28_672, 132), 1);
        assert_eq!(num_planes(896, 896, 132), 4, "of 14 panels");
        assert_eq!((num_planes(896, 4864, 132), num_planes(1, 1, 132)), (MAX_PLANES, 1));
    }

    #[test]
    fn taken_where_it_is_the_fastest() {
        let of_three = |tokens| is_faster(tokens, [4096, 1024, 1024], 4096);
        assert!(!of_three(8) && of_three(9) && of_three(128) && !of_three(129));
        let head = |tokens| is_faster(tokens, [128_256, 0, 0], 4096);
        assert!(!head(8) && head(9) && head(64) && !head(65));
        assert!(!is_faster(32, [4096, 0, 0], 4096), "one product of few rows is the library's");
        assert!(is_faster_gated(9) && is_faster_gated(128) && !is_faster_gated(8) && !is_faster_gated(129));
        assert_eq!([16, 17, 128, 129].map(tokens_in_planes), [None, Some(17), Some(128), Some(128)]);
    }

    #[test]
    fn what_the_copy_engine_reads() {
        assert!(is_readable(0x210, 104) && is_readable(0x100, 8));
        assert!(!is_readable(0x210, 100) && !is_readable(0x208, 64) && !is_readable(0x202, 64));
    }
}
