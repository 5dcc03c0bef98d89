//! Products with GGUF-quantised weights: the repacked layout, which variant runs, and its launch. Knows nothing
//! of files or of where buffers lie. Kernels: `kernels/linear_quant.cu`, whose head explains the layout's use.
//!
//! Letters: N output features, C input features. A tile is 16 rows by 128 elements of C; tiles lie
//! `[N / 16][C / 128]`. Inside a tile, lane `(g, c)` of a warp owns rows `g` and `g + 8`, and of each strip of 32
//! elements the eight `8c .. 8c + 8` (Q6_K: `4c .. 4c + 4` of either half). Rows behind N and elements behind C
//! have scale 0.
//!
//! | bytes of a tile | what |
//! |---|---|
//! | 1,024 | low four bits: `[row half][lane][strip]` words; element 2i of the eight at bit 4i, 2i + 1 at 16 + 4i |
//! | Q8_0: 1,024 | high four bits of (q + 128), likewise |
//! | Q6_K: 512 | top two bits: `[row half][lane][strip / 2]` words; at bit 8 (strip % 2) + 2i, and 16 more |
//! | Q4_0, Q8_0: 128 | d, f16 `[16 rows][4 strips]` |
//! | Q4_1: 256 | (d, m), f16 pairs `[16][4]` |
//! | Q4_K: 64 + 64 + 64 | (d, dmin) `[16]`, six-bit scales as bytes `[16][4]`, six-bit minima `[16][4]` |
//! | Q6_K: 128 + 32 | scales i8 `[16][8]`, d f16 `[16]` |

#![allow(clippy::cast_possible_truncation)] // bit fields narrower than their type, and byte counts of one tile

use super::Launch;

/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = 16;
/// Elements of C in a tile.
pub(crate) const TILE_COLS: usize = 128;
const STRIP: usize = 32;
/// Bytes of the low-bits plane, and of one row half of it.
const PLANE_BYTES: usize = 1024;
const HALF_PLANE_BYTES: usize = 512;

/// GGUF block formats with a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// Elements and bytes of a GGUF block.
    pub(crate) fn block(self) -> (usize, usize) {
        match self {
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q8_0 => (32, 34),
            Self::Q4K => (256, 144),
            Self::Q6K => (256, 210),
        }
    }

    /// Bytes of a repacked tile: `TILE_BYTES` in the kernel.
    pub(crate) fn tile_bytes(self) -> usize {
        match self {
            Self::Q4_0 => 1152,
            Self::Q4_1 => 1280,
            Self::Q8_0 => 2176,
            Self::Q4K => 1216,
            Self::Q6K => 1696,
        }
    }

    /// As kernel names spell it.
    fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q8_0 => "q8_0",
            Self::Q4K => "q4_k",
            Self::Q6K => "q6_k",
        }
    }

    /// Bytes of a repacked matrix.
    pub(crate) fn matrix_bytes(self, rows: usize, cols: usize) -> usize {
        rows.div_ceil(TILE_ROWS) * cols.div_ceil(TILE_COLS) * self.tile_bytes()
    }
}

/// Where row `row` of the gate (or of up) of `num_rows` rows goes in the matrix that the gated kernel reads:
/// tiles of eight gate rows, then eight up rows.
pub(crate) fn gated_row(row: usize, is_up: bool) -> usize {
    row / 8 * 16 + row % 8 + if is_up { 8 } else { 0 }
}

/// Repacks one row of GGUF blocks into the tiles of its 16 rows: `tiles` is `[C / 128]` tiles, zeroed before
/// their first row comes; `row_in_tile` is 0..16. Rows of different tiles may be repacked at once. `row` holds
/// whole blocks; cost: a few operations for every eight elements.
pub(crate) fn repack_row(format: QuantFormat, row: &[u8], row_in_tile: usize, tiles: &mut [u8]) {
    let (block_len, block_bytes) = format.block();
    debug_assert_eq!(row.len() % block_bytes, 0);
    let strips_of_block = block_len / STRIP;
    for (block_idx, block) in row.chunks_exact(block_bytes).enumerate() {
        for sub in 0..strips_of_block {
            let strip = block_idx * strips_of_block + sub;
            let start = strip / 4 * format.tile_bytes();
            let tile = &mut tiles[start..start + format.tile_bytes()];
            let place = Place { row: row_in_tile, strip: strip % 4 };
            place.quants(format, block, sub, tile);
            place.scales(format, block, sub, tile);
        }
    }
}

/// One row's strip inside a tile.
#[derive(Clone, Copy)]
struct Place {
    row: usize,
    strip: usize,
}

impl Place {
    /// Byte of lane `c`'s word in a plane.
    fn word(self, lane_c: usize) -> usize {
        self.row / 8 * HALF_PLANE_BYTES + (self.row % 8 * 4 + lane_c) * 16 + self.strip * 4
    }

    fn quants(self, format: QuantFormat, block: &[u8], sub: usize, tile: &mut [u8]) {
        for lane_c in 0..4 {
            let at = self.word(lane_c);
            let eight = eight_quants(format, block, sub, lane_c);
            put(tile, at, &spread_low(eight).to_le_bytes());
            match format {
                QuantFormat::Q8_0 => put(tile, PLANE_BYTES + at, &spread_low(eight >> 4).to_le_bytes()),
                QuantFormat::Q6K => {
                    let at = PLANE_BYTES + self.row / 8 * 256 + (self.row % 8 * 4 + lane_c) * 8 + self.strip / 2 * 4;
                    let word = spread_top(eight) << (self.strip % 2 * 8);
                    for (to, byte) in tile[at..at + 4].iter_mut().zip(word.to_le_bytes()) {
                        *to |= byte;
                    }
                }
                QuantFormat::Q4_0 | QuantFormat::Q4_1 | QuantFormat::Q4K => {}
            }
        }
    }

    fn scales(self, format: QuantFormat, block: &[u8], sub: usize, tile: &mut [u8]) {
        let Self { row, strip } = self;
        match format {
            QuantFormat::Q4_0 => put(tile, PLANE_BYTES + row * 8 + strip * 2, &block[..2]),
            QuantFormat::Q8_0 => put(tile, 2 * PLANE_BYTES + row * 8 + strip * 2, &block[..2]),
            QuantFormat::Q4_1 => put(tile, PLANE_BYTES + row * 16 + strip * 4, &block[..4]),
            QuantFormat::Q4K => {
                let (scale, min) = six_bit_scale(&block[4..16], sub);
                put(tile, PLANE_BYTES + row * 4, &block[..4]);
                tile[PLANE_BYTES + 64 + row * 4 + strip] = scale;
                tile[PLANE_BYTES + 128 + row * 4 + strip] = min;
            }
            QuantFormat::Q6K => {
                put(tile, PLANE_BYTES + 512 + row * 8 + strip * 2, &block[192 + sub * 2..194 + sub * 2]);
                put(tile, PLANE_BYTES + 640 + row * 2, &block[208..210]);
            }
        }
    }
}

fn put(tile: &mut [u8], at: usize, bytes: &[u8]) {
    tile[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Bytes `at .. at + 8` as one number, the first in the lowest byte.
fn eight_bytes(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

/// Bytes `at .. at + 4`, then `at + 16 .. at + 20`.
fn two_fours(bytes: &[u8], at: usize) -> u64 {
    eight_bytes(bytes, at) & 0xffff_ffff | eight_bytes(bytes, at + 12) & 0xffff_ffff_0000_0000
}

const LOW_NIBBLES: u64 = 0x0f0f_0f0f_0f0f_0f0f;
const LOW_PAIRS: u64 = 0x0303_0303_0303_0303;

/// Lane `c`'s eight unsigned quants of strip `sub` of a block, one a byte.
fn eight_quants(format: QuantFormat, block: &[u8], sub: usize, lane_c: usize) -> u64 {
    match format {
        QuantFormat::Q4_0 | QuantFormat::Q4_1 => {
            let first = if format == QuantFormat::Q4_0 { 2 } else { 4 };
            // Elements 0..16 are the low nibbles, 16..32 the high ones.
            eight_bytes(block, first + lane_c % 2 * 8) >> (lane_c / 2 * 4) & LOW_NIBBLES
        }
        QuantFormat::Q8_0 => eight_bytes(block, 2 + lane_c * 8) ^ 0x8080_8080_8080_8080,
        QuantFormat::Q4K => eight_bytes(block, 16 + sub / 2 * 32 + lane_c * 8) >> (sub % 2 * 4) & LOW_NIBBLES,
        QuantFormat::Q6K => {
            let (half, quarter) = (sub / 4, sub % 4);
            let low = two_fours(block, half * 64 + quarter % 2 * 32 + lane_c * 4) >> (quarter / 2 * 4) & LOW_NIBBLES;
            let top = two_fours(block, 128 + half * 32 + lane_c * 4) >> (quarter * 2) & LOW_PAIRS;
            low | top << 4
        }
    }
}

/// Low four bits of byte 2i to bit 4i, of byte 2i + 1 to bit 16 + 4i.
fn spread_low(eight: u64) -> u32 {
    let gather = |x: u64| (x | x >> 12 | x >> 24 | x >> 36) as u32 & 0xffff;
    let even = eight & 0x000f_000f_000f_000f;
    let odd = eight >> 8 & 0x000f_000f_000f_000f;
    gather(even) | gather(odd) << 16
}

/// Bits 4 and 5 of byte 2i to bits 2i and 2i + 1, of byte 2i + 1 to 16 further.
fn spread_top(eight: u64) -> u32 {
    let gather = |x: u64| (x | x >> 14 | x >> 28 | x >> 42) as u32 & 0xff;
    let even = eight >> 4 & 0x0003_0003_0003_0003;
    let odd = eight >> 12 & 0x0003_0003_0003_0003;
    gather(even) | gather(odd) << 16
}

/// Scale and minimum of strip `sub` of a Q4_K block from its twelve packed bytes.
fn six_bit_scale(packed: &[u8], sub: usize) -> (u8, u8) {
    if sub < 4 {
        (packed[sub] & 63, packed[sub + 4] & 63)
    } else {
        (packed[sub + 4] & 15 | packed[sub - 4] >> 6 << 4, packed[sub + 4] >> 4 | packed[sub] >> 6 << 4)
    }
}

/// The kernels' argument: `QuantParams`. Addresses are the device's.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct QuantParams {
    /// bf16 `[M, x_stride]`; rows on 16-byte boundaries.
    pub(crate) x: u64,
    /// Repacked tiles.
    pub(crate) w: u64,
    /// f32 `[N]`, or 0; not in the gated form.
    pub(crate) bias: u64,
    /// `[M, y_stride]` of `y_type`, added, or 0; may be `y`.
    pub(crate) residual: u64,
    /// `[M, y_stride]` of `y_type`.
    pub(crate) y: u64,
    /// Tokens.
    pub(crate) m: u32,
    /// Outputs; the gated form reads 2 N rows.
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
}

const _: () = assert!(size_of::<QuantParams>() == 72);

/// A compiled form of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QuantVariant {
    format: QuantFormat,
    /// Tokens of a thread block: 8, 16 or 64.
    columns: u32,
    gated: bool,
}

impl QuantVariant {
    /// Above this many tokens, `dequantise_*` into bf16 scratch and a library product are faster together
    /// (measured at the 8B Llama shapes: about even at 100 tokens, twice as fast at 256).
    pub(crate) const MAX_TOKENS: u32 = 64;

    /// The variant for `m` tokens; `None`: dequantise first.
    pub(crate) fn select(format: QuantFormat, m: u32, gated: bool) -> Option<Self> {
        let columns = match m {
            1..=8 => 8,
            9..=16 => 16,
            17..=Self::MAX_TOKENS => 64,
            _ => return None,
        };
        Some(Self { format, columns, gated })
    }

    /// The kernel's name.
    pub(crate) fn name(&self) -> String {
        let gated = if self.gated { "gated_" } else { "" };
        format!("linear_quant_{gated}{}_m{}", self.format.name(), self.columns)
    }

    /// The launch for `m` tokens and `n` outputs.
    pub(crate) fn launch(&self, m: u32, n: u32, num_sms: u32) -> Launch {
        let w_rows = if self.gated { n.div_ceil(8) * 16 } else { n };
        let tile_bytes = self.format.tile_bytes() as u32;
        if self.columns == 64 {
            // Two k groups of four stages: 64 tokens of 256 bytes, and a tile for each of four warps.
            let shared_bytes = 2 * 4 * (64 * 256 + 4 * tile_bytes);
            return Launch { grid: (w_rows.div_ceil(64), m.div_ceil(64)), threads: 256, shared_bytes };
        }
        // Thread blocks stay, two on each multiprocessor, and take row tiles in turn. Each of their eight warps
        // has a ring of tiles, and its sums twice.
        let ring = if matches!(self.format, QuantFormat::Q8_0 | QuantFormat::Q6K) { 5 } else { 8 };
        let shared_bytes = 8 * (ring * tile_bytes + self.columns / 8 * 1024);
        Launch { grid: (w_rows.div_ceil(16).min(2 * num_sms), 1), threads: 256, shared_bytes }
    }
}

/// Name and launch of the kernel that writes a repacked matrix as bf16 rows; arguments: tiles, out, rows, cols.
pub(crate) fn dequantise(format: QuantFormat, rows: u32, cols: u32) -> (String, Launch) {
    let tiles = rows.div_ceil(TILE_ROWS as u32) * cols.div_ceil(TILE_COLS as u32);
    (format!("dequantise_{}", format.name()), Launch { grid: (tiles.div_ceil(8), 1), threads: 256, shared_bytes: 0 })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap is a failed test
mod tests {
    use super::*;

    const FORMATS: [QuantFormat; 5] =
        [QuantFormat::Q4_0, QuantFormat::Q4_1, QuantFormat::Q8_0, QuantFormat::Q4K, QuantFormat::Q6K];

    struct Random(u64);
    impl Random {
        fn byte(&mut self) -> u8 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 56) as u8
        }
    }

    /// Element `i` of a row, straight from the GGUF description: unsigned quant, and the bytes of its scales.
    fn stored(format: QuantFormat, row: &[u8], i: usize) -> (u8, Vec<u8>) {
        let (len, bytes) = format.block();
        let block = &row[i / len * bytes..][..bytes];
        let i = i % len;
        match format {
            QuantFormat::Q4_0 => (block[2 + i % 16] >> (i / 16 * 4) & 15, block[..2].to_vec()),
            QuantFormat::Q4_1 => (block[4 + i % 16] >> (i / 16 * 4) & 15, block[..4].to_vec()),
            QuantFormat::Q8_0 => (block[2 + i].wrapping_add(128), block[..2].to_vec()),
            QuantFormat::Q4K => {
                let (scale, min) = six_bit_scale(&block[4..16], i / 32);
                let quant = block[16 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
                (quant, [&block[..4], &[scale, min]].concat())
            }
            QuantFormat::Q6K => {
                let (half, quarter, l) = (i / 128, i / 32 % 4, i % 32);
                let low = block[half * 64 + quarter % 2 * 32 + l] >> (quarter / 2 * 4) & 15;
                let top = block[128 + half * 32 + l] >> (quarter * 2) & 3;
                (low | top << 4, [&block[208..210], &[block[192 + i / 16]]].concat())
            }
        }
    }

    /// The same from a repacked tile, as the kernel reads it.
    fn read(format: QuantFormat, tile: &[u8], row: usize, i: usize) -> (u8, Vec<u8>) {
        let (strip, k) = (i / 32, i % 32);
        let (lane_c, e) = if format == QuantFormat::Q6K { (k % 16 / 4, k / 16 * 4 + k % 4) } else { (k / 8, k % 8) };
        let lane = row % 8 * 4 + lane_c;
        let word = |at: usize| u32::from_le_bytes(tile[at..at + 4].try_into().unwrap());
        let nibble =
            |plane: usize| (word(plane + row / 8 * 512 + lane * 16 + strip * 4) >> (e / 2 * 4 + e % 2 * 16) & 15) as u8;
        let bytes = |at: usize, len: usize| tile[at..at + len].to_vec();
        match format {
            QuantFormat::Q4_0 => (nibble(0), bytes(1024 + row * 8 + strip * 2, 2)),
            QuantFormat::Q4_1 => (nibble(0), bytes(1024 + row * 16 + strip * 4, 4)),
            QuantFormat::Q8_0 => (nibble(0) | nibble(1024) << 4, bytes(2048 + row * 8 + strip * 2, 2)),
            QuantFormat::Q4K => {
                let scales = [tile[1088 + row * 4 + strip], tile[1152 + row * 4 + strip]];
                (nibble(0), [bytes(1024 + row * 4, 4), scales.to_vec()].concat())
            }
            QuantFormat::Q6K => {
                let top = word(1024 + row / 8 * 256 + lane * 8 + strip / 2 * 4)
                    >> (strip % 2 * 8 + e / 2 * 2 + e % 2 * 16)
                    & 3;
                let scale = tile[1536 + row * 8 + i / 16];
                (nibble(0) | (top as u8) << 4, [bytes(1664 + row * 2, 2), vec![scale]].concat())
            }
        }
    }

    #[test]
    fn every_element_and_scale_survives_repacking() {
        let mut random = Random(3);
        for format in FORMATS {
            let (len, bytes) = format.block();
            let cols = if len == 32 { 416 } else { 768 };
            let k_tiles = cols / len * len / TILE_COLS + usize::from(cols % TILE_COLS != 0);
            let rows: Vec<Vec<u8>> =
                (0..16).map(|_| (0..cols / len * bytes).map(|_| random.byte()).collect()).collect();
            let mut tiles = vec![0; k_tiles * format.tile_bytes()];
            assert_eq!(tiles.len(), format.matrix_bytes(16, cols));
            for (row_in_tile, row) in rows.iter().enumerate() {
                repack_row(format, row, row_in_tile, &mut tiles);
            }
            for (row_in_tile, row) in rows.iter().enumerate() {
                for i in 0..cols {
                    let tile = &tiles[i / 128 * format.tile_bytes()..][..format.tile_bytes()];
                    assert_eq!(
                        read(format, tile, row_in_tile, i % 128),
                        stored(format, row, i),
                        "{format:?} row {row_in_tile} element {i}"
                    );
                }
            }
        }
    }

    #[test]
    fn what_lies_behind_the_last_column_has_scale_zero() {
        let mut tiles = vec![0; QuantFormat::Q4_0.tile_bytes()];
        repack_row(QuantFormat::Q4_0, &[0xff; 18], 5, &mut tiles);
        assert_eq!(read(QuantFormat::Q4_0, &tiles, 5, 31), (15, vec![0xff, 0xff]));
        assert_eq!(read(QuantFormat::Q4_0, &tiles, 5, 32), (0, vec![0, 0]));
        assert_eq!(read(QuantFormat::Q4_0, &tiles, 4, 0), (0, vec![0, 0]));
    }

    #[test]
    fn gate_and_up_rows_share_tiles() {
        assert_eq!(
            [gated_row(0, false), gated_row(7, false), gated_row(0, true), gated_row(9, false), gated_row(9, true)],
            [0, 7, 8, 17, 25]
        );
    }

    #[test]
    fn variants_and_their_launches() {
        let v = QuantVariant::select(QuantFormat::Q4K, 1, true).unwrap();
        assert_eq!(v.name(), "linear_quant_gated_q4_k_m8");
        assert_eq!(
            v.launch(1, 14_336, 132),
            Launch { grid: (264, 1), threads: 256, shared_bytes: 8 * (8 * 1216 + 1024) }
        );
        let v = QuantVariant::select(QuantFormat::Q6K, 64, false).unwrap();
        assert_eq!(v.name(), "linear_quant_q6_k_m64");
        assert_eq!(v.launch(64, 100, 132), Launch { grid: (2, 1), threads: 256, shared_bytes: 185_344 });
        assert!(QuantVariant::select(QuantFormat::Q8_0, 65, false).is_none());
        assert_eq!(
            dequantise(QuantFormat::Q8_0, 100, 576),
            ("dequantise_q8_0".into(), Launch { grid: (5, 1), threads: 256, shared_bytes: 0 })
        );
    }
}
