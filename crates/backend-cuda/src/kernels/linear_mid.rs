//! Dense products of up to 128 tokens on Hopper: when our kernel is taken, which compiled form takes a product, how its
//! rows and C are cut, and the launch. Knows nothing of where buffers lie. Kernel: `kernels/linear_mid.cu`.

use super::{Half, Launch};

/// Products of one x that a launch takes at most.
pub(crate) const MAX_PARTS: usize = 3;
/// Tokens that a launch takes at most.
pub(crate) const MAX_TOKENS: u32 = 128;
/// Elements of C in a panel: the columns of a box that the copy engine brings.
pub(crate) const PANEL_COLS: u32 = 64;
/// Rows of W in a tile.
const TILE_ROWS: u32 = 64;
/// Bytes of a panel's row.
const PANEL_BYTES: u32 = PANEL_COLS * 2;
/// Stages of a ring at most: `MAX_SLOTS` of the kernel.
const MAX_SLOTS: u32 = 16;
/// Threads that bring weights and x.
const FEEDERS: u32 = 64;
/// Of a multiprocessor's shared memory, what rings may take: a thread block's most, less its barriers and room to align.
const RING_BYTES: u32 = (227 << 10) - 512 - ALIGN_BYTES;
/// Where rings begin is a multiple of this.
const ALIGN_BYTES: u32 = 1024;
/// Rows of a share at least: fewer are not worth a thread block that reads all of x.
const LEAST_ROWS: u32 = 16;
/// Fewer are `linear_small`'s.
const MIN_TOKENS: usize = 9;
/// Up to so many this kernel beats the library by itself, without sparing launches.
const FASTER_ALONE: usize = 64;
/// Weights lie on multiples of so many bytes, and rows do; x does in any case, as all temporaries.
const ALIGNMENT: u64 = 16;

/// The kernel's argument: `LinearMidParams`. Addresses are the device's.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(128))]
pub(crate) struct LinearMidParams {
    /// `CUtensorMap` of x `[M, C]`, boxes of a panel's columns and [`LinearMidVariant::x_box_rows`].
    pub(crate) x_map: [u64; 16],
    /// Of each part's weight `[N, C]`, boxes of a panel's columns and the part's `box_rows`; gated: of gate and up.
    pub(crate) w_map: [[u64; 16]; MAX_PARTS],
    /// Behind the last, `num_shares` is 0. Gated: one.
    pub(crate) parts: [LinearMidPart; MAX_PARTS],
    /// Bytes of y from plane to plane.
    pub(crate) plane_stride: u64,
    /// Tokens.
    pub(crate) m: u32,
    /// [`Cut::num_shares`].
    pub(crate) num_shares: u32,
    /// [`Cut::num_passes`].
    pub(crate) num_passes: u32,
    /// [`Cut::num_planes`].
    pub(crate) num_planes: u32,
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
}

const _: () = assert!(size_of::<LinearMidPart>() == 32 && size_of::<LinearMidParams>() == 768);
const _: () = assert!(std::mem::offset_of!(LinearMidParams, m) == 616);

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
    (MIN_TOKENS..=FASTER_ALONE).contains(&num_tokens)
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
    /// Warpgroups that multiply, and the tiles that each of them has at once.
    warpgroups: u32,
    tiles: u32,
    /// Panels of a stage.
    panels: u32,
    /// Thread blocks that share x.
    cluster: u32,
    /// One tile of the gate, one of up.
    gated: bool,
}

/// How a launch cuts its work. Shares are of whole rows; each is taken in passes of as many rows as a form has tiles for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Shares of each part.
    pub(crate) shares: [u32; MAX_PARTS],
    /// Rows of each part's largest pass.
    pub(crate) box_rows: [u32; MAX_PARTS],
    /// Of all parts, and some of none: a multiple of a cluster's thread blocks.
    pub(crate) num_shares: u32,
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

/// Rows of the largest of `runs` runs that `n` rows are cut into, at even rows.
fn largest_run(n: u32, runs: u32) -> u32 {
    2 * n.div_ceil(2).div_ceil(runs)
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
        TILE_ROWS * self.warpgroups * if self.gated { 1 } else { self.tiles }
    }

    fn cut(&self, outputs: &[u32; MAX_PARTS], num_planes: u32, most_blocks: u32) -> Option<Cut> {
        let whole_clusters = |count: u32| count / self.cluster * self.cluster;
        let most = whole_clusters(most_blocks / num_planes.max(1));
        if most == 0 || !is_countable(outputs) {
            return None;
        }
        let shares = share_out(outputs, most);
        let of_parts = || outputs.iter().copied().zip(shares).filter(|&(n, _)| n > 0);
        let fits = |passes: u32| of_parts().all(|(n, shares)| largest_run(n, shares * passes) <= self.rows());
        let at_least = of_parts().map(|(n, shares)| n.div_ceil(shares).div_ceil(self.rows())).max()?;
        // Even rows may ask for one pass more, hardly for two.
        let num_passes = (at_least..at_least + 8).find(|&passes| fits(passes))?;
        let mut box_rows = [0; MAX_PARTS];
        for (rows, (n, shares)) in box_rows.iter_mut().zip(outputs.iter().zip(shares)).filter(|(_, (&n, _))| n > 0) {
            *rows = largest_run(*n, shares * num_passes);
        }
        let tile_rows = box_rows.iter().max()?.next_multiple_of(8);
        let w_bytes = self.panels * tile_rows * PANEL_BYTES * if self.gated { 2 } else { 1 };
        let x_bytes = self.panels * self.columns * PANEL_BYTES;
        // x comes from L2, sooner than weights do: six of ten as many stages.
        let w_slots = (10 * RING_BYTES / (10 * w_bytes + 6 * x_bytes)).min(MAX_SLOTS);
        let x_slots = ((RING_BYTES - w_slots * w_bytes) / x_bytes).min(w_slots);
        let num_shares = shares.iter().sum::<u32>().next_multiple_of(self.cluster);
        Some(Cut { shares, box_rows, num_shares, num_passes, num_planes, tile_rows, w_slots, x_slots })
    }
}
