//! Dense products of many tokens on Hopper: when our kernel is taken, in which compiled form, how its tiles are shared
//! out, and the launch. Knows nothing of where buffers lie. Kernel: `kernels/linear_big.cu`.

use super::{Half, Launch};

/// Products of one x that a launch takes at most.
pub(crate) const MAX_PARTS: usize = 3;
/// Tokens of a tile.
pub(crate) const TILE_TOKENS: u32 = 128;
/// Elements of C in a box that the copy engine brings, and features in one that it stores.
pub(crate) const PANEL_COLS: u32 = 64;
/// Tokens in a box that the copy engine stores.
pub(crate) const STORED_TOKENS: u32 = 64;
const THREADS: u32 = 384;
/// Rows of y lie on multiples of so many bytes, as those of the weights and x.
const ALIGNMENT: u64 = 16;
/// Tiles along the tokens that are taken side by side: with as many along the features, what is at work together reads
/// the fewest rows of x and W.
const STRIP_TILES: u32 = 16;

/// The kernel's argument: `LinearBigParams`. Addresses are the device's.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct LinearBigParams {
    /// `CUtensorMap` of x `[T, C]`, boxes of [`PANEL_COLS`] and [`LinearBigVariant::x_rows`].
    pub(crate) x_map: [u64; 16],
    /// Of each part's weight `[N, C]`, boxes of [`PANEL_COLS`] and [`LinearBigVariant::w_rows`]; gated: of gate and up.
    pub(crate) w_map: [[u64; 16]; MAX_PARTS],
    /// Of each part's y `[T, N]`, boxes of [`PANEL_COLS`] and [`STORED_TOKENS`]; read where y is BF16.
    pub(crate) y_map: [[u64; 16]; MAX_PARTS],
    /// Behind the last, no tiles. Gated: one.
    pub(crate) parts: [LinearBigPart; MAX_PARTS],
    /// T.
    pub(crate) num_tokens: u32,
    /// [`Tiles::feature_groups`].
    pub(crate) num_feature_groups: u32,
    /// Of C.
    pub(crate) num_panels: u32,
    /// [`Tiles::strip`].
    pub(crate) strip: u32,
    /// `ActivationType` of every y: F32 or BF16.
    pub(crate) y_type: u32,
    /// `GateActivation`; read by the gated form.
    pub(crate) activation: u32,
}

/// A product of x: `LinearBigPart` of the kernel.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct LinearBigPart {
    /// f32 `[N]`, or 0; gated: 0.
    pub(crate) bias: u64,
    /// `[T, N]`.
    pub(crate) y: u64,
    /// Output features.
    pub(crate) n: u32,
    /// Of [`Tiles::of_parts`].
    pub(crate) num_tiles: u32,
}

const _: () = assert!(size_of::<LinearBigPart>() == 24 && size_of::<LinearBigParams>() == 1024);
const _: () = assert!(std::mem::offset_of!(LinearBigParams, num_tokens) == 968);

/// Whether the copy engine can read a weight `[n, c]` at this address, and write such a y; x lies on a multiple of 16 in
/// any case, as all temporaries.
pub(crate) fn is_reachable(weight: u64, n: usize, c: usize) -> bool {
    let is_aligned = |elements: usize| (elements as u64 * 2).is_multiple_of(ALIGNMENT);
    weight.is_multiple_of(ALIGNMENT) && is_aligned(n) && is_aligned(c)
}

/// A compiled form of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearBigVariant {
    weight: Half,
    /// Rows of W in a tile: features, or (gated) half of them.
    columns: u32,
    gated: bool,
}

/// How a number of columns is compiled: the kernel's template arguments.
struct Form {
    columns: u32,
    stages: u32,
    /// Thread blocks of a cluster along the tokens and along the features: two at most.
    token_ranks: u32,
    feature_ranks: u32,
}

/// Measured best (`kernels/NOTES.md`).
const FORMS: [Form; 2] = [
    Form { columns: 128, stages: 6, token_ranks: 2, feature_ranks: 2 },
    Form { columns: 256, stages: 4, token_ranks: 2, feature_ranks: 1 },
];

/// How products are cut into tiles, and those shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tiles {
    /// Along the features of each part.
    pub(crate) of_parts: [u32; MAX_PARTS],
    /// Clusters' tiles along the features of all parts.
    pub(crate) feature_groups: u32,
    /// The same along the tokens.
    pub(crate) token_groups: u32,
    /// So many groups of tokens are taken side by side.
    pub(crate) strip: u32,
}

impl Tiles {
    /// Clusters' tiles.
    fn count(&self) -> u32 {
        self.feature_groups.saturating_mul(self.token_groups)
    }
}

impl LinearBigVariant {
    /// Every compiled form.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        [Half::Bf16, Half::F16].into_iter().flat_map(|weight| {
            let form = move |form: &Form, gated| Self { weight, columns: form.columns, gated };
            FORMS.iter().flat_map(move |of| [form(of, false), form(of, true)])
        })
    }

    fn form(&self) -> &'static Form {
        FORMS.iter().find(|form| form.columns == self.columns).unwrap_or(&FORMS[FORMS.len() - 1])
    }

    /// The kernel's name.
    pub(crate) fn name(&self) -> String {
        let gated = if self.gated { "gated_" } else { "" };
        format!("linear_big_{gated}{}_n{}", self.weight.name(), self.columns)
    }

    /// The weights' type.
    pub(crate) fn weight(&self) -> Half {
        self.weight
    }

    /// Thread blocks of a cluster.
    pub(crate) fn ranks(&self) -> u32 {
        self.form().token_ranks * self.form().feature_ranks
    }

    /// Rows of a box of x.
    pub(crate) fn x_rows(&self) -> u32 {
        TILE_TOKENS / self.form().feature_ranks
    }

    /// Rows of a box of W.
    pub(crate) fn w_rows(&self) -> u32 {
        self.columns / 2
    }

    /// The tiles of outputs (unused ones are 0; gated: the first only) for so many tokens.
    pub(crate) fn tiles(&self, num_tokens: u32, outputs: [u32; MAX_PARTS]) -> Tiles {
        let form = self.form();
        let features = if self.gated { self.columns / 2 } else { self.columns };
        let of_parts = outputs.map(|n| n.div_ceil(features));
        Tiles {
            of_parts,
            feature_groups: of_parts.iter().fold(0_u32, |sum, &tiles| sum.saturating_add(tiles)).div_ceil(form.feature_ranks),
            token_groups: num_tokens.div_ceil(TILE_TOKENS * form.token_ranks),
            strip: STRIP_TILES / form.token_ranks,
        }
    }

    /// Bytes of `BigShared`, and room to align it.
    pub(crate) fn shared_bytes(&self) -> u32 {
        let form = self.form();
        let stage = (TILE_TOKENS + form.columns) * PANEL_COLS * 2;
        let stored = 4 * STORED_TOKENS * PANEL_COLS * 2;
        form.stages * (stage + 2 * 8) + stored + 1024
    }

    /// The launch over `tiles`, at most `max_clusters` clusters of thread blocks at once.
    pub(crate) fn launch(&self, tiles: &Tiles, max_clusters: u32) -> Launch {
        let clusters = tiles.count().min(max_clusters);
        Launch { grid: (self.ranks() * clusters, 1), threads: THREADS, shared_bytes: self.shared_bytes() }
    }
}
