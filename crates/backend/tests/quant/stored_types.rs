//! Slow, element-by-element readings of every stored type, written from the format's definition and
//! sharing nothing with the code under test; random blocks; and simple quantisers.

use half::f16;
use pagemill_backend::DType;

/// The ten quantised types.
pub const QUANTIZED: [DType; 10] = [
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
];

fn half_at(block: &[u8], at: usize) -> f64 {
    f64::from(f16::from_bits(u16::from_le_bytes([block[at], block[at + 1]])).to_f32())
}

fn symmetric(scale: f64, code: u8, zero: u8) -> f64 {
    scale * (f64::from(code) - f64::from(zero))
}

fn affine(scale: f64, code: u8, min: f64) -> f64 {
    scale * f64::from(code) + min
}

/// Element `e` of a block.
pub fn element(dtype: DType, block: &[u8], e: usize) -> f64 {
    let nibble = |from: usize| {
        if e < 16 { block[from + e] & 0x0f } else { block[from + e - 16] >> 4 }
    };
    let fifth = |from: usize| {
        if block[from + e / 8] & (1 << (e % 8)) != 0 { 16 } else { 0 }
    };
    match dtype {
        DType::Q4_0 => symmetric(half_at(block, 0), nibble(2), 8),
        DType::Q4_1 => affine(half_at(block, 0), nibble(4), half_at(block, 2)),
        DType::Q5_0 => symmetric(half_at(block, 0), nibble(6) + fifth(2), 16),
        DType::Q5_1 => affine(half_at(block, 0), nibble(8) + fifth(4), half_at(block, 2)),
        DType::Q8_0 => half_at(block, 0) * f64::from(block[2 + e] as i8),
        DType::Q2_K => {
            let pair = block[e / 16];
            let byte = block[16 + (e / 128) * 32 + e % 32];
            let code = (byte >> [0, 2, 4, 6][(e / 32) % 4]) % 4;
            affine(half_at(block, 80) * f64::from(pair % 16), code, -half_at(block, 82) * f64::from(pair / 16))
        }
        DType::Q3_K => {
            let byte = block[32 + (e / 128) * 32 + e % 32];
            let low = (byte >> [0, 2, 4, 6][(e / 32) % 4]) % 4;
            let high = if block[e % 32] & (1 << (e / 32)) != 0 { 4 } else { 0 };
            symmetric(half_at(block, 108) * f64::from(q3_k_scale(&block[96..108], e / 16)), low + high, 4)
        }
        DType::Q4_K | DType::Q5_K => {
            let (scale, min) = six_bit_pair(&block[4..16], e / 32);
            let (scale, min) = (half_at(block, 0) * f64::from(scale), -half_at(block, 2) * f64::from(min));
            let codes_at = if dtype == DType::Q4_K { 16 } else { 48 };
            let byte = block[codes_at + (e / 64) * 32 + e % 32];
            let code = if (e / 32).is_multiple_of(2) { byte % 16 } else { byte / 16 };
            if dtype == DType::Q4_K {
                return affine(scale, code, min);
            }
            let high = if block[16 + e % 32] & (1 << (e / 32)) != 0 { 16 } else { 0 };
            affine(scale, code + high, min)
        }
        DType::Q6_K => {
            let scale = half_at(block, 208) * f64::from(block[192 + e / 16] as i8);
            let (half, quarter, l) = (e / 128, (e / 32) % 4, e % 32);
            let byte = block[half * 64 + l + if quarter % 2 == 1 { 32 } else { 0 }];
            let low = if quarter < 2 { byte % 16 } else { byte / 16 };
            let high = (block[128 + half * 32 + l] >> (2 * quarter)) % 4;
            symmetric(scale, low + 16 * high, 32)
        }
        DType::F32 | DType::F16 | DType::BF16 => panic!("{dtype} is not quantised"),
    }
}

/// Scale `j` (of 16) of a Q3_K block: 4 low bits in bytes 0..8, 2 high bits in bytes 8..12.
fn q3_k_scale(packed: &[u8], j: usize) -> i32 {
    let low = match j {
        0..8 => packed[j] % 16,
        _ => packed[j - 8] / 16,
    };
    let high = match j {
        0..4 => packed[8 + j],
        4..8 => packed[4 + j] >> 2,
        8..12 => packed[j] >> 4,
        _ => packed[j - 4] >> 6,
    } % 4;
    i32::from(low) + 16 * i32::from(high) - 32
}

/// Scale and minimum `j` (of 8) of a Q4_K or Q5_K block.
fn six_bit_pair(packed: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (packed[j] % 64, packed[j + 4] % 64)
    } else {
        (packed[j + 4] % 16 + packed[j - 4] / 64 * 16, packed[j + 4] / 16 + packed[j] / 64 * 16)
    }
}

/// All elements of a matrix of `cols` columns.
pub fn elements(dtype: DType, cols: usize, stored: &[u8]) -> Vec<f64> {
    assert!(cols.is_multiple_of(dtype.block_elems()));
    stored
        .chunks_exact(dtype.block_bytes())
        .flat_map(|block| (0..dtype.block_elems()).map(move |e| element(dtype, block, e)))
        .collect()
}

/// Deterministic random numbers.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    /// In [-1, 1).
    pub fn unit(&mut self) -> f32 {
        (self.bits() % (1 << 24)) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Roughly normal with rare values 30 times as large, as activations of language models are.
    pub fn heavy_tailed(&mut self) -> f32 {
        let normal: f32 = (0..6).map(|_| self.unit()).sum::<f32>() * 0.7;
        if self.bits().is_multiple_of(200) { normal * 30.0 } else { normal }
    }
}

/// Where a block keeps its f16 scale, and its f16 minimum if it has one.
fn halves_at(dtype: DType) -> (usize, Option<usize>) {
    match dtype {
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => (0, Some(2)),
        DType::Q2_K => (80, Some(82)),
        DType::Q3_K => (108, None),
        DType::Q6_K => (208, None),
        _ => (0, None),
    }
}

/// Sets the scale and minimum of every block.
pub fn set_halves(dtype: DType, stored: &mut [u8], mut halves: impl FnMut() -> (f32, f32)) {
    let (scale_at, min_at) = halves_at(dtype);
    for block in stored.chunks_exact_mut(dtype.block_bytes()) {
        let (scale, min) = halves();
        block[scale_at..scale_at + 2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
        if let Some(at) = min_at {
            block[at..at + 2].copy_from_slice(&f16::from_f32(min).to_le_bytes());
        }
    }
}

/// `rows` rows of random codes and moderate scales.
pub fn random_weight(dtype: DType, rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
    let mut stored = vec![0u8; rows * dtype.row_bytes(cols).unwrap()];
    stored.fill_with(|| (random.bits() >> 8) as u8);
    set_halves(dtype, &mut stored, || (random.unit() * 0.1, random.unit() * 0.5));
    stored
}

/// A simple quantiser of the legacy types: nearest code on the grid of the block's range.
pub fn quantize(dtype: DType, x: &[f32]) -> Vec<u8> {
    x.chunks_exact(32).flat_map(|x| quantize_block(dtype, x)).collect()
}

fn quantize_block(dtype: DType, x: &[f32]) -> Vec<u8> {
    let (min, max) = x.iter().fold((f32::MAX, f32::MIN), |(lo, hi), &v| (lo.min(v), hi.max(v)));
    let amax = max.max(-min);
    let (levels, middle) = match dtype {
        DType::Q4_0 | DType::Q4_1 => (15u8, 8u8),
        DType::Q5_0 | DType::Q5_1 => (31, 16),
        _ => (127, 0),
    };
    let affine = matches!(dtype, DType::Q4_1 | DType::Q5_1);
    let scale = if affine {
        (max - min) / f32::from(levels)
    } else if dtype == DType::Q8_0 {
        amax / 127.0
    } else {
        amax / f32::from(levels - middle)
    };
    let scale = f16::from_f32(scale);
    let min = f16::from_f32(min);
    let step = scale.to_f32().max(f32::MIN_POSITIVE);
    let mut block = scale.to_le_bytes().to_vec();
    if dtype == DType::Q8_0 {
        block.extend(x.iter().map(|v| (v / step).round().clamp(-127.0, 127.0) as i8 as u8));
        return block;
    }
    let offset = if affine { -min.to_f32() } else { step * f32::from(middle) };
    let codes: Vec<u8> = x.iter().map(|v| ((v + offset) / step).round().clamp(0.0, f32::from(levels)) as u8).collect();
    if affine {
        block.extend(min.to_le_bytes());
    }
    if levels == 31 {
        let bits = codes.iter().enumerate().fold(0u32, |bits, (j, &c)| bits | u32::from(c >> 4) << j);
        block.extend(bits.to_le_bytes());
    }
    block.extend((0..16).map(|j| (codes[j] & 15) | ((codes[j + 16] & 15) << 4)));
    block
}
