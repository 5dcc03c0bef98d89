//! Products with GGUF-quantised weights: the repacked layout, which variant runs, and its launch. Knows nothing
//! of files or of where buffers lie. Kernels: `kernels/packed_weights.cu`, which repacks, and
//! `kernels/linear_quant.cu`, whose head explains the layout's use.
//!
//! Letters: N output features, C input features. A tile is 16 rows by 128 elements of C; tiles lie
//! `[N / 16][C / 128]`. A tile is two halves of 8 rows, each in one piece. Inside a half, lane `(g, c)` of a warp owns
//! row `g`, and of each strip of 32 elements the eight `8c .. 8c + 8` (Q6_K: `4c .. 4c + 4` of either half). Rows
//! behind N and elements behind C are zeros with scale 0.
//!
//! | bytes of a half | what |
//! |---|---|
//! | 512 | low four bits: `[lane][strip]` words; element 2i of the eight at bit 4i, 2i + 1 at 16 + 4i |
//! | Q8_0: 512 | high four bits of (q + 128), likewise |
//! | Q6_K: 256 | top two bits: `[lane][strip / 2]` words; at bit 8 (strip % 2) + 2i, and 16 more |
//! | Q4_0, Q8_0: 64 | d, f16 `[8 rows][4 strips]` |
//! | Q4_1: 128 | (d, m), f16 pairs `[8][4]` |
//! | Q4_K: 32 + 32 + 32 | (d, dmin) `[8]`, six-bit scales as bytes `[8][4]`, six-bit minima `[8][4]` |
//! | Q6_K: 64 + 16 | scales i8 `[8][8]`, d f16 `[8]` |

use super::Launch;
use pagemill_backend::DType;

/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = 16;
/// Elements of C in a tile.
const TILE_COLS: usize = 128;
/// Products of one x that a launch takes at most.
pub(crate) const MAX_PARTS: usize = 3;
/// Elements of C that the form for one token takes at once.
const ONE_TOKEN_COLS: u32 = 256;
/// Warps of a thread block, each with a tile at a time, of the kernels that read or write a whole matrix.
const TILES_PER_BLOCK: u32 = 8;

/// GGUF block formats with a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum QuantFormat {
    /// 32 elements: d, nibbles; (q - 8) d.
    Q4_0,
    /// 32 elements: d, m, nibbles; q d + m.
    Q4_1,
    /// 32 elements: d, bytes; q d.
    Q8_0,
    /// 256 elements: d, dmin, eight six-bit scales and minima, nibbles.
    Q4K,
    /// 256 elements: six bits an element, sixteen i8 scales, d.
    Q6K,
}

impl QuantFormat {
    /// Every format.
    pub(crate) const ALL: [Self; 5] = [Self::Q4_0, Self::Q4_1, Self::Q8_0, Self::Q4K, Self::Q6K];

    /// The format that weights stored as `dtype` are repacked to; `None`: they stay as they are.
    pub(crate) fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::Q4_0 => Some(Self::Q4_0),
            DType::Q4_1 => Some(Self::Q4_1),
            DType::Q8_0 => Some(Self::Q8_0),
            DType::Q4_K => Some(Self::Q4K),
            DType::Q6_K => Some(Self::Q6K),
            _ => None,
        }
    }

    /// Bytes of a repacked tile: twice `HALF_BYTES` in the kernel.
    pub(crate) fn tile_bytes(self) -> u32 {
        match self {
            Self::Q4_0 => 1152,
            Self::Q4_1 => 1280,
            Self::Q8_0 => 2176,
            Self::Q4K => 1216,
            Self::Q6K => 1696,
        }
    }

    /// As kernel names spell it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q8_0 => "q8_0",
            Self::Q4K => "q4_k",
            Self::Q6K => "q6_k",
        }
    }

    /// Bytes of a repacked matrix; `None` where they do not fit in memory.
    pub(crate) fn matrix_bytes(self, rows: usize, cols: usize) -> Option<usize> {
        let tiles = rows.div_ceil(TILE_ROWS).checked_mul(cols.div_ceil(TILE_COLS))?;
        tiles.checked_mul(self.tile_bytes() as usize)
    }
}

/// The launch of a kernel that goes through a matrix tile by tile (`repack`, `widen_packed`); `None`: more tiles than
/// a grid has room for.
pub(crate) fn tile_launch(rows: usize, cols: usize) -> Option<Launch> {
    let tiles = rows.div_ceil(TILE_ROWS).checked_mul(cols.div_ceil(TILE_COLS))?;
    let blocks = u32::try_from(tiles.div_ceil(TILES_PER_BLOCK as usize)).ok().filter(|&n| i32::try_from(n).is_ok())?;
    Some(Launch { grid: (blocks, 1), threads: TILES_PER_BLOCK * 32, shared_bytes: 0 })
}

/// The kernels' argument: `QuantParams`. Addresses are the device's.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct QuantParams {
    /// bf16 `[M, x_stride]`; rows on 16-byte boundaries.
    pub(crate) x: u64,
    /// Repacked tiles of `[N, C]`; gated: the gate's.
    pub(crate) w: u64,
    /// Gated: up's, likewise; else 0.
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
    /// Input features, a multiple of 32.
    pub(crate) c: u32,
    /// Elements from row to row of x.
    pub(crate) x_stride: u32,
    /// Elements from row to row of y and residual.
    pub(crate) y_stride: u32,
    /// `ActivationType` of y and residual.
    pub(crate) y_type: u32,
    /// `GateActivation`; read by the gated form.
    pub(crate) activation: u32,
    /// Further products of the same x, with weights of the same format; not in the gated form.
    pub(crate) more: [QuantPart; MAX_PARTS - 1],
}

/// A further product: `QuantPart` of the kernel.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct QuantPart {
    /// Repacked tiles of `[N, C]`.
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

const _: () = assert!(size_of::<QuantPart>() == 32 && size_of::<QuantParams>() == 144);
const _: () = assert!(std::mem::offset_of!(QuantParams, m) == 48 && std::mem::offset_of!(QuantParams, more) == 80);

/// What a launch multiplies: tokens, and the parts' output features.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuantTask<'a> {
    /// M.
    pub(crate) num_tokens: u32,
    /// N of each part.
    pub(crate) outputs: &'a [u32],
}

/// One product: y `[M, N]` = x `[M, C]` · W `[N, C]`ᵀ.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuantShape {
    /// M, tokens.
    pub(crate) m: u32,
    /// N, output features.
    pub(crate) n: u32,
    /// C, input features.
    pub(crate) c: u32,
}

/// A compiled form of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct QuantVariant {
    format: QuantFormat,
    /// Tokens of a thread block: 1, 8, 16, 32 or 64.
    columns: u32,
    /// 32 rows a thread block instead of 64, of the two largest forms without a gate.
    narrow: bool,
    gated: bool,
}

impl QuantVariant {
    /// Above this many tokens, widening into bf16 scratch and a library product are taken to be faster together. At the
    /// 8B Llama shape in Q4_K a step of 128 tokens took 16 ms so, of which products by our kernel are 10; at 256 those
    /// are 21.
    const MAX_TOKENS: u32 = 128;
    /// Row tiles and k groups of a thread block of the two largest forms: wide, and narrow.
    const WIDE: (u32, u32) = (4, 2);
    const NARROW: (u32, u32) = (2, 4);

    /// Every compiled form.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let forms = [1, 8, 16, 32, 64].into_iter().flat_map(|columns| {
            let form = move |gated, narrow| (columns, narrow, gated);
            [form(false, false), form(true, false)].into_iter().chain((columns >= 32).then(|| form(false, true)))
        });
        forms
            .flat_map(|(columns, narrow, gated)| QuantFormat::ALL.map(|format| Self { format, columns, narrow, gated }))
    }

    /// The variant for a product on a chip of so many multiprocessors; `None`: widen first. A row's sums depend on the
    /// variant only, not on `m` within it.
    pub(crate) fn select(format: QuantFormat, shape: QuantShape, gated: bool, num_sms: u32) -> Option<Self> {
        let columns = match shape.m {
            1 if shape.c.is_multiple_of(ONE_TOKEN_COLS) => 1,
            1..=8 => 8,
            9..=16 => 16,
            17..=32 => 32,
            // Beyond 64 a thread block for each 64.
            33..=Self::MAX_TOKENS => 64,
            _ => return None,
        };
        // Where twice as many thread blocks still run at once.
        let blocks = u64::from(shape.n.div_ceil(Self::WIDE.0 * 16)) * u64::from(shape.m.div_ceil(columns));
        let narrow = !gated && columns >= 32 && 2 * blocks <= u64::from(num_sms);
        Some(Self { format, columns, narrow, gated })
    }

    /// The kernel's name.
    pub(crate) fn name(&self) -> String {
        let gated = if self.gated { "gated_" } else { "" };
        let narrow = if self.narrow { "_narrow" } else { "" };
        format!("linear_quant_{gated}{}_m{}{narrow}", self.format.name(), self.columns)
    }

    fn row_tiles_and_k_groups(&self) -> (u32, u32) {
        if self.narrow { Self::NARROW } else { Self::WIDE }
    }

    /// Whether the format has more than four bits: its rings are shorter.
    fn is_large(&self) -> bool {
        matches!(self.format, QuantFormat::Q8_0 | QuantFormat::Q6K)
    }

    /// Dynamic shared memory of a thread block, in bytes.
    pub(crate) fn shared_bytes(&self) -> u32 {
        let tile_bytes = self.format.tile_bytes();
        // Each of eight warps has a ring of tiles (for one token, of two tiles), and its sums twice. The larger forms
        // have stages instead: of each k group its tokens of 256 bytes, and a tile for each of its warps.
        let ring = |tiles: u32, sum_bytes: u32| 8 * (tiles * tile_bytes + 2 * sum_bytes);
        let stages = |count: u32| {
            let (row_tiles, k_groups) = self.row_tiles_and_k_groups();
            k_groups * count * (self.columns * 256 + row_tiles * tile_bytes)
        };
        match self.columns {
            1 if self.format == QuantFormat::Q8_0 => ring(2 * 3, 64),
            1 if self.format == QuantFormat::Q6K => ring(2 * 4, 64),
            1 => ring(2 * 5, 64),
            8 | 16 => ring(if self.is_large() { 5 } else { 8 }, self.columns / 8 * 512),
            32 => stages(3),
            _ if !self.narrow => stages(4),
            _ => stages(if self.is_large() { 2 } else { 3 }),
        }
    }

    /// The launch for a task.
    pub(crate) fn launch(&self, task: QuantTask<'_>, num_sms: u32) -> Launch {
        let rows_per_tile = if self.gated { 8 } else { 16 };
        let blocks_of = |rows: u32| task.outputs.iter().map(|n| n.div_ceil(rows)).sum::<u32>();
        let grid = if self.columns >= 32 {
            let (row_tiles, _) = self.row_tiles_and_k_groups();
            (blocks_of(rows_per_tile * row_tiles), task.num_tokens.div_ceil(self.columns))
        } else {
            // Thread blocks stay, two on each multiprocessor, and take row tiles in turn.
            (blocks_of(rows_per_tile).min(2 * num_sms), 1)
        };
        Launch { grid, threads: 256, shared_bytes: self.shared_bytes() }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap is a failed test
mod tests {
    use super::*;

    fn launch(variant: QuantVariant, num_tokens: u32, outputs: &[u32]) -> Launch {
        variant.launch(QuantTask { num_tokens, outputs }, 132)
    }

    /// Bits of a tile's 2,048 elements and their scales, as the table above has them.
    #[test]
    fn tiles_hold_their_elements_and_scales() {
        let of = |format: QuantFormat, quant_bits: u32, scale_bytes_a_row: u32| {
            assert_eq!(format.tile_bytes(), 2048 * quant_bits / 8 + 16 * scale_bytes_a_row, "{format:?}");
            assert_eq!(format.tile_bytes() / 2 % 16, 0, "{format:?}: halves are copied 16 bytes at a time");
        };
        of(QuantFormat::Q4_0, 4, 4 * 2);
        of(QuantFormat::Q4_1, 4, 4 * 4);
        of(QuantFormat::Q8_0, 8, 4 * 2);
        of(QuantFormat::Q4K, 4, 4 + 4 + 4);
        of(QuantFormat::Q6K, 6, 8 + 2);
    }

    #[test]
    fn a_matrix_is_whole_tiles() {
        let bytes = |rows, cols| QuantFormat::Q4_0.matrix_bytes(rows, cols);
        assert_eq!(bytes(1, 32), Some(1152));
        assert_eq!(bytes(16, 128), Some(1152));
        assert_eq!(bytes(17, 128), Some(2 * 1152));
        assert_eq!(bytes(33, 160), Some(3 * 2 * 1152));
        assert_eq!(bytes(0, 128), Some(0));
        assert_eq!(bytes(usize::MAX, 1 << 20), None);
    }

    #[test]
    fn a_warp_takes_a_tile() {
        let blocks = |rows, cols| tile_launch(rows, cols).map(|launch| (launch.grid, launch.threads));
        assert_eq!(blocks(100, 576), Some(((5, 1), 256)), "7 by 5 tiles, 8 a block");
        assert_eq!(blocks(1, 32), Some(((1, 1), 256)));
        assert_eq!(blocks(usize::MAX, 1 << 10), None);
        assert_eq!(blocks(1 << 31, 1 << 14), None, "a grid has 31 bits");
    }

    #[test]
    fn types_with_a_layout_are_repacked() {
        let packed: Vec<DType> = DType::ALL.into_iter().filter(|&dtype| QuantFormat::of(dtype).is_some()).collect();
        assert_eq!(packed, [DType::Q4_0, DType::Q4_1, DType::Q8_0, DType::Q4_K, DType::Q6_K]);
        assert!(packed.iter().all(|dtype| dtype.is_quantized()));
    }

    fn select(format: QuantFormat, (m, n, c): (u32, u32, u32), gated: bool) -> Option<QuantVariant> {
        QuantVariant::select(format, QuantShape { m, n, c }, gated, 132)
    }

    #[test]
    fn variants_of_few_tokens_and_their_launches() {
        let v = select(QuantFormat::Q4K, (1, 14_336, 4096), true).unwrap();
        assert_eq!(v.name(), "linear_quant_gated_q4_k_m1");
        let shared_bytes = 8 * (5 * 2432 + 128);
        assert_eq!(launch(v, 1, &[14_336]), Launch { grid: (264, 1), threads: 256, shared_bytes });
        let v = select(QuantFormat::Q4K, (2, 14_336, 4096), true).unwrap();
        assert_eq!(v.name(), "linear_quant_gated_q4_k_m8");
        let shared_bytes = 8 * (8 * 1216 + 1024);
        assert_eq!(launch(v, 2, &[14_336]), Launch { grid: (264, 1), threads: 256, shared_bytes });
        assert_eq!(launch(v, 2, &[100]).grid, (13, 1), "tiles of eight outputs");
        let v = select(QuantFormat::Q8_0, (16, 1000, 32), false).unwrap();
        assert_eq!(v.name(), "linear_quant_q8_0_m16");
        assert_eq!(launch(v, 16, &[1000, 17, 1]).grid, (63 + 2 + 1, 1), "a tile belongs to one part");
    }

    #[test]
    fn variants_of_more_tokens_and_their_launches() {
        let v = select(QuantFormat::Q6K, (64, 14_336, 256), false).unwrap();
        assert_eq!(v.name(), "linear_quant_q6_k_m64");
        assert_eq!(launch(v, 64, &[14_336]), Launch { grid: (224, 1), threads: 256, shared_bytes: 185_344 });
        let v = select(QuantFormat::Q6K, (17, 4096, 256), false).unwrap();
        assert_eq!(v.name(), "linear_quant_q6_k_m32_narrow");
        assert_eq!(launch(v, 17, &[4096, 33]).grid, (128 + 2, 1));
        assert_eq!(select(QuantFormat::Q6K, (17, 4352, 256), false).unwrap().name(), "linear_quant_q6_k_m32");
        assert_eq!(select(QuantFormat::Q6K, (65, 4096, 256), false).unwrap().name(), "linear_quant_q6_k_m64");
        let v = select(QuantFormat::Q4_0, (33, 100, 32), true).unwrap();
        assert_eq!(v.name(), "linear_quant_gated_q4_0_m64");
        assert_eq!(launch(v, 33, &[100]).grid, (4, 1));
        assert_eq!(launch(v, 65, &[100]).grid, (4, 2));
    }

    #[test]
    fn a_variant_serves_every_number_of_tokens_up_to_its_columns() {
        let columns = |m, c| select(QuantFormat::Q4_1, (m, 64, c), false).map(|v| v.columns);
        let tokens = [1, 2, 8, 9, 16, 17, 32, 33, 128];
        assert_eq!(tokens.map(|m| columns(m, 512)), [1, 8, 8, 16, 16, 32, 32, 64, 64].map(Some));
        assert_eq!(columns(1, 576), Some(8), "a part of a pair of tiles");
        assert!(columns(0, 512).is_none() && columns(129, 512).is_none());
    }

    /// A multiprocessor of compute capability 9 has 228 KiB of shared memory, of which each thread block costs one more
    /// than it asks for.
    #[test]
    fn thread_blocks_fit_a_multiprocessor() {
        for variant in QuantVariant::all() {
            let blocks = if variant.columns == 64 || variant.narrow { 1 } else { 2 };
            assert!(blocks * (variant.shared_bytes() + 1024) <= 228 << 10, "{}", variant.name());
        }
    }

    #[test]
    fn every_selected_variant_is_compiled() {
        let all: Vec<QuantVariant> = QuantVariant::all().collect();
        for format in QuantFormat::ALL {
            for (gated, n, c) in [(false, 256, 256), (true, 256, 256), (false, 50_000, 32), (true, 50_000, 32)] {
                assert!((1..=128).all(|m| all.contains(&select(format, (m, n, c), gated).unwrap())));
            }
        }
    }
}
