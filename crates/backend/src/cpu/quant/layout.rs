//! The layout that the kernels read, one for every type and instruction set, and its (un)packing.
//!
//! A weight `[N, C]` is cut into **panels** of 16 rows, so that one vector lane belongs to one output
//! feature: no horizontal sums, and the activations are broadcast. A panel holds three regions, each
//! read front to back:
//!
//! ```text
//! [0, quant_bytes)          C/32 blocks of 64 * bits bytes: the codes of 16 rows x 32 columns
//! [.., + scale_bytes)       one record a group (16 or 32 columns): scales (and minima) of 16 rows
//! [.., + super_bytes)       K-quants: one record a super-block of 256 columns: f16 d (and dmin)
//! ```
//!
//! The codes of a block are eight **operands** of 64 bytes: byte `4r + j` of operand `i` belongs to
//! row `r`, column `4i + j`. That is what the byte dot products of AVX2, VNNI and AMX take. Codes
//! narrower than a byte are stored as bit planes over the operands: a 4-bit plane keeps operands `i` and
//! `i + 4` in the nibbles of its vector `i`; a 2-bit plane keeps operand `i` at bits `2 (i % 4)` of
//! vector `i / 4`; a 1-bit plane keeps operand `i` at bit `i`. 5 = 4 + 1, 6 = 4 + 2, 3 = 2 + 1 bits.
//!
//! Bytes per weight against those stored: equal for Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q6_K; Q4_K
//! 148/144, Q5_K 180/176, Q3_K 114/110 (their 6-bit scales become bytes). N is padded to 16.

use super::stored::StoredBlock;
use crate::DType;
use half::f16;

/// Rows of a panel.
pub(super) const PANEL_ROWS: usize = 16;
/// Columns of a block.
pub(super) const BLOCK_COLS: usize = 32;
/// Columns of a K-quant's super-block.
const SUPER_COLS: usize = 256;

/// How a group's scale and minimum are stored; `[16]` is one entry a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ScaleKind {
    /// f16 d `[16]`.
    Half,
    /// f16 d `[16]`, f16 m `[16]`.
    HalfPair,
    /// u8 scale `[16]`, u8 minimum `[16]`; super: f16 d `[16]`, f16 dmin `[16]`.
    BytePair,
    /// u8 (scale, minimum in nibbles) `[16]`; super: f16 d `[16]`, f16 dmin `[16]`.
    NibblePair,
    /// i8 scale `[16]`; super: f16 d `[16]`.
    Signed,
}

impl ScaleKind {
    /// Bytes of a group's record.
    pub(super) const fn bytes(self) -> usize {
        match self {
            ScaleKind::Half | ScaleKind::BytePair => 32,
            ScaleKind::HalfPair => 64,
            ScaleKind::NibblePair | ScaleKind::Signed => 16,
        }
    }

    /// Bytes of a super-block's record.
    pub(super) const fn super_bytes(self) -> usize {
        match self {
            ScaleKind::Half | ScaleKind::HalfPair => 0,
            ScaleKind::BytePair | ScaleKind::NibblePair => 64,
            ScaleKind::Signed => 32,
        }
    }

    /// Whether there is a minimum: `value = d q + m`, not `d (q - zero)`.
    pub(super) const fn has_min(self) -> bool {
        matches!(self, ScaleKind::HalfPair | ScaleKind::BytePair | ScaleKind::NibblePair)
    }
}

/// Geometry of one type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// Width of a code.
    pub(super) bits: usize,
    /// Columns that share a scale: 16 or 32.
    pub(super) group: usize,
    /// The code nearest to the middle, a power of two: what the integer products subtract, so that the
    /// activations' rounding errors meet small factors. In symmetric types the code of the value zero.
    pub(super) log2_zero: u32,
    /// How scales are stored.
    pub(super) scale: ScaleKind,
}

impl Layout {
    /// Geometry of `dtype`; `None` for the float types.
    pub(super) const fn of(dtype: DType) -> Option<Self> {
        let (bits, group, log2_zero, scale) = match dtype {
            DType::Q4_0 => (4, 32, 3, ScaleKind::Half),
            DType::Q4_1 => (4, 32, 3, ScaleKind::HalfPair),
            DType::Q5_0 => (5, 32, 4, ScaleKind::Half),
            DType::Q5_1 => (5, 32, 4, ScaleKind::HalfPair),
            DType::Q8_0 => (8, 32, 7, ScaleKind::Half),
            DType::Q2_K => (2, 16, 1, ScaleKind::NibblePair),
            DType::Q3_K => (3, 16, 2, ScaleKind::Signed),
            DType::Q4_K => (4, 32, 3, ScaleKind::BytePair),
            DType::Q5_K => (5, 32, 4, ScaleKind::BytePair),
            DType::Q6_K => (6, 16, 5, ScaleKind::Signed),
            DType::F32 | DType::F16 | DType::BF16 => return None,
        };
        Some(Self { bits, group, log2_zero, scale })
    }

    /// Groups of a block: 1 or 2.
    pub(super) const fn groups(self) -> usize {
        BLOCK_COLS / self.group
    }

    /// Bytes of a block's codes.
    pub(super) const fn block_bytes(self) -> usize {
        64 * self.bits
    }
}

/// A type as a type, so that kernels are compiled once for each.
pub(super) trait Format {
    /// The type.
    const DTYPE: DType;
    /// Geometry.
    const LAYOUT: Layout;
}

/// Runs `$body` with `$F` naming the [`Format`] of `$dtype`; `$float` for float types.
macro_rules! with_format {
    ($dtype:expr, $F:ident => $body:expr, float => $float:expr) => {{
        use crate::cpu::quant::layout::formats;
        macro_rules! arm {
            ($name:ident) => {{
                type $F = formats::$name;
                $body
            }};
        }
        match $dtype {
            crate::DType::Q4_0 => arm!(Q4_0),
            crate::DType::Q4_1 => arm!(Q4_1),
            crate::DType::Q5_0 => arm!(Q5_0),
            crate::DType::Q5_1 => arm!(Q5_1),
            crate::DType::Q8_0 => arm!(Q8_0),
            crate::DType::Q2_K => arm!(Q2_K),
            crate::DType::Q3_K => arm!(Q3_K),
            crate::DType::Q4_K => arm!(Q4_K),
            crate::DType::Q5_K => arm!(Q5_K),
            crate::DType::Q6_K => arm!(Q6_K),
            crate::DType::F32 | crate::DType::F16 | crate::DType::BF16 => $float,
        }
    }};
}
pub(super) use with_format;

/// The types, spelled as GGUF spells them.
#[allow(non_camel_case_types)]
pub(super) mod formats {
    use super::{Format, Layout};
    use crate::DType;

    macro_rules! format {
        ($($name:ident),*) => {$(
            pub(crate) struct $name;
            impl Format for $name {
                const DTYPE: DType = DType::$name;
                const LAYOUT: Layout = match Layout::of(DType::$name) {
                    Some(layout) => layout,
                    None => unreachable!(),
                };
            }
        )*};
    }
    format!(Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K);
}

/// Where things lie in a panel of `cols` columns.
#[derive(Clone, Copy, Debug)]
pub(super) struct PanelShape {
    /// Blocks of 32 columns.
    pub(super) num_blocks: usize,
    /// Start of the groups' records.
    pub(super) scales_at: usize,
    /// Start of the super-blocks' records.
    pub(super) supers_at: usize,
    /// Bytes of a panel, a multiple of 64.
    pub(super) bytes: usize,
}

impl PanelShape {
    /// `None` when the size overflows.
    pub(super) fn new(layout: Layout, cols: usize) -> Option<Self> {
        let num_blocks = cols / BLOCK_COLS;
        let scales_at = num_blocks.checked_mul(layout.block_bytes())?;
        let scale_bytes =
            (num_blocks * layout.groups()).checked_mul(layout.scale.bytes())?.checked_next_multiple_of(64)?;
        let supers_at = scales_at.checked_add(scale_bytes)?;
        let super_bytes = (cols / SUPER_COLS).checked_mul(layout.scale.super_bytes())?;
        let bytes = supers_at.checked_add(super_bytes)?.checked_next_multiple_of(64)?;
        Some(Self { num_blocks, scales_at, supers_at, bytes })
    }
}

/// Packs 16 rows into `panel` (zeroed); `stored` holds them as in the file, fewer at the end of a weight:
/// absent ones stay zeros.
pub(super) fn pack_panel<F: Format>(shape: PanelShape, stored: &[u8], panel: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        unsafe { pack_panel_avx2::<F>(shape, stored, panel) };
        return;
    }
    pack_panel_inline::<F>(shape, stored, panel);
}

/// The same loops, compiled for wider vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn pack_panel_avx2<F: Format>(shape: PanelShape, stored: &[u8], panel: &mut [u8]) {
    pack_panel_inline::<F>(shape, stored, panel);
}

#[inline(always)]
fn pack_panel_inline<F: Format>(shape: PanelShape, stored: &[u8], panel: &mut [u8]) {
    let (dtype, layout) = (F::DTYPE, F::LAYOUT);
    let blocks_per_stored = dtype.block_elems() / BLOCK_COLS;
    let num_stored = shape.num_blocks / blocks_per_stored;
    let row_bytes = num_stored * dtype.block_bytes();
    let mut rows = [const { StoredBlock::ZERO }; PANEL_ROWS];
    for stored_idx in 0..num_stored {
        for (block, row) in rows.iter_mut().zip(stored.chunks_exact(row_bytes)) {
            block.read(dtype, &row[stored_idx * dtype.block_bytes()..][..dtype.block_bytes()]);
        }
        for sub in 0..blocks_per_stored {
            let block_idx = stored_idx * blocks_per_stored + sub;
            let operands = interleave(&rows, sub * BLOCK_COLS);
            let at = block_idx * layout.block_bytes();
            write_planes::<F>(&operands, &mut panel[at..at + layout.block_bytes()]);
            for g in 0..layout.groups() {
                let group_idx = block_idx * layout.groups() + g;
                let at = shape.scales_at + group_idx * layout.scale.bytes();
                let record = &mut panel[at..at + layout.scale.bytes()];
                write_scales(layout.scale, &rows, sub * layout.groups() + g, record);
            }
        }
        let at = shape.supers_at + stored_idx * layout.scale.super_bytes();
        for (r, block) in rows.iter().enumerate() {
            if layout.scale.super_bytes() > 0 {
                panel[at + 2 * r..at + 2 * r + 2].copy_from_slice(&block.d.to_le_bytes());
            }
            if layout.scale.super_bytes() > 32 {
                panel[at + 32 + 2 * r..at + 34 + 2 * r].copy_from_slice(&block.m.to_le_bytes());
            }
        }
    }
}

#[inline(always)]
fn interleave(rows: &[StoredBlock; PANEL_ROWS], first_col: usize) -> [[u8; 64]; 8] {
    let mut operands = [[0u8; 64]; 8];
    for (r, row) in rows.iter().enumerate() {
        let codes = &row.codes[first_col..first_col + BLOCK_COLS];
        for (operand, codes) in operands.iter_mut().zip(codes.chunks_exact(4)) {
            operand[4 * r..4 * r + 4].copy_from_slice(codes);
        }
    }
    operands
}

/// Ors `WIDTH` bits of each operand, from bit `FROM`, into a plane (see the head of this file).
#[inline(always)]
fn write_plane<const FROM: usize, const WIDTH: usize>(operands: &[[u8; 64]; 8], plane: &mut [u8]) {
    let mask = (1u8 << WIDTH) - 1;
    // Operands of one vector, and how far apart they are: 4-bit planes pair operands i and i + 4.
    let (per_vector, step) = (8 / WIDTH, if WIDTH == 4 { 4 } else { 1 });
    for (vector, out) in plane.chunks_exact_mut(64).take(WIDTH).enumerate() {
        let first = if WIDTH == 2 { 4 * vector } else { vector };
        let mut merged = [0u8; 64];
        for k in 0..per_vector {
            let operand = &operands[first + k * step];
            for (merged, code) in merged.iter_mut().zip(operand) {
                *merged |= ((code >> FROM) & mask) << (k * WIDTH);
            }
        }
        out.copy_from_slice(&merged);
    }
}

#[inline(always)]
fn write_planes<F: Format>(operands: &[[u8; 64]; 8], block: &mut [u8]) {
    match F::LAYOUT.bits {
        2 => write_plane::<0, 2>(operands, block),
        3 => {
            write_plane::<0, 2>(operands, &mut block[..128]);
            write_plane::<2, 1>(operands, &mut block[128..]);
        }
        4 => write_plane::<0, 4>(operands, block),
        5 => {
            write_plane::<0, 4>(operands, &mut block[..256]);
            write_plane::<4, 1>(operands, &mut block[256..]);
        }
        6 => {
            write_plane::<0, 4>(operands, &mut block[..256]);
            write_plane::<4, 2>(operands, &mut block[256..]);
        }
        _ => block.copy_from_slice(operands.as_flattened()),
    }
}

/// The code at operand `i`, byte `b` of a block: the inverse of `write_planes`.
#[inline]
pub(super) fn code_at(bits: usize, block: &[u8], i: usize, b: usize) -> u8 {
    let four = |plane: &[u8]| (plane[64 * (i % 4) + b] >> (4 * (i / 4))) & 15;
    let two = |plane: &[u8]| (plane[64 * (i / 4) + b] >> (2 * (i % 4))) & 3;
    let one = |plane: &[u8]| (plane[b] >> i) & 1;
    match bits {
        2 => two(block),
        3 => two(block) | (one(&block[128..]) << 2),
        4 => four(block),
        5 => four(block) | (one(&block[256..]) << 4),
        6 => four(block) | (two(&block[256..]) << 4),
        _ => block[64 * i + b],
    }
}

#[inline(always)]
fn write_scales(kind: ScaleKind, stored: &[StoredBlock; PANEL_ROWS], group_in_stored: usize, record: &mut [u8]) {
    for (r, block) in stored.iter().enumerate() {
        let (scale, min) = (block.sub_scale[group_in_stored], block.sub_min[group_in_stored]);
        match kind {
            ScaleKind::Half => record[2 * r..2 * r + 2].copy_from_slice(&block.d.to_le_bytes()),
            ScaleKind::HalfPair => {
                record[2 * r..2 * r + 2].copy_from_slice(&block.d.to_le_bytes());
                record[32 + 2 * r..34 + 2 * r].copy_from_slice(&block.m.to_le_bytes());
            }
            ScaleKind::BytePair => {
                record[r] = scale;
                record[16 + r] = min;
            }
            ScaleKind::NibblePair => record[r] = scale | (min << 4),
            ScaleKind::Signed => record[r] = scale,
        }
    }
}

/// Scale and minimum of row `r` of group `group_idx`, in f32 and exact (`value = d q + m`; for
/// symmetric types `m` is `-d zero`).
pub(super) fn scale_at(layout: Layout, shape: PanelShape, panel: &[u8], group_idx: usize, r: usize) -> (f32, f32) {
    let record = &panel[shape.scales_at + group_idx * layout.scale.bytes()..];
    let super_at = shape.supers_at + group_idx * layout.group / SUPER_COLS * layout.scale.super_bytes();
    let super_half = |at: usize| half_at(panel, super_at + at + 2 * r);
    let zero = (1u32 << layout.log2_zero) as f32;
    match layout.scale {
        ScaleKind::Half => {
            let d = half_at(record, 2 * r);
            (d, -d * zero)
        }
        ScaleKind::HalfPair => (half_at(record, 2 * r), half_at(record, 32 + 2 * r)),
        ScaleKind::BytePair => (super_half(0) * f32::from(record[r]), -(super_half(32) * f32::from(record[16 + r]))),
        ScaleKind::NibblePair => {
            (super_half(0) * f32::from(record[r] & 15), -(super_half(32) * f32::from(record[r] >> 4)))
        }
        ScaleKind::Signed => {
            let d = super_half(0) * f32::from(record[r].cast_signed());
            (d, -d * zero)
        }
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_bits(u16::from_le_bytes([bytes[at], bytes[at + 1]])).to_f32()
}

/// The exact values of row `r` of a panel, `out` `[C]`.
pub(super) fn dequantize_row<F: Format>(shape: PanelShape, panel: &[u8], r: usize, out: &mut [f32]) {
    let layout = F::LAYOUT;
    for (block_idx, values) in out.chunks_exact_mut(BLOCK_COLS).enumerate() {
        let block = &panel[block_idx * layout.block_bytes()..][..layout.block_bytes()];
        for (g, values) in values.chunks_exact_mut(layout.group).enumerate() {
            let (d, m) = scale_at(layout, shape, panel, block_idx * layout.groups() + g, r);
            for (k, value) in values.iter_mut().enumerate() {
                let col = g * layout.group + k;
                // `d q` is exact (at most 11 + 8 + 8 bits); the sum rounds once.
                *value = d * f32::from(code_at(layout.bits, block, col / 4, 4 * r + col % 4)) + m;
            }
        }
    }
}
