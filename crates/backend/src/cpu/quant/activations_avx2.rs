//! The quantiser of activations for AVX2: the arithmetic of `activations`, to the bit.

use super::activations::{ActBlock, BlockScale, FINE_BITS, FineBlock, outlier_limit};
use super::layout::BLOCK_COLS;
use std::arch::x86_64::*;

/// Quantises a row with the same bits as the scalar code.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn quantize_row(x: &[f32], blocks: &mut [ActBlock], fine: &mut [FineBlock]) {
    let mut squares = [_mm256_setzero_ps(); 4];
    for x in x.chunks_exact(BLOCK_COLS) {
        for (i, squares) in squares.iter_mut().enumerate() {
            // SAFETY: `x` has 32 values.
            let v = unsafe { _mm256_loadu_ps(x.as_ptr().add(8 * i)) };
            // Not fused: the scalar code runs on machines without.
            *squares = _mm256_add_ps(*squares, _mm256_mul_ps(v, v));
        }
    }
    let mut lanes = [0.0f32; 32];
    for (lanes, squares) in lanes.chunks_exact_mut(8).zip(squares) {
        // SAFETY: eight lanes.
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), squares) };
    }
    let limit = outlier_limit(lanes, x.len());
    for ((x, block), fine) in x.chunks_exact(BLOCK_COLS).zip(blocks).zip(fine) {
        // SAFETY: `x` has 32 values.
        unsafe { quantize_block(x.as_ptr(), limit, block, fine) };
    }
}

#[target_feature(enable = "avx2")]
#[inline]
unsafe fn quantize_block(x: *const f32, limit: f32, block: &mut ActBlock, fine: &mut FineBlock) {
    let magnitude = _mm256_set1_epi32(0x7fff_ffff);
    // SAFETY: the caller has 32 values there.
    let v: [__m256; 4] = std::array::from_fn(|i| unsafe { _mm256_loadu_ps(x.add(8 * i)) });
    let bits = v.map(|v| _mm256_and_si256(_mm256_castps_si256(v), magnitude));
    let max = _mm256_max_epu32(_mm256_max_epu32(bits[0], bits[1]), _mm256_max_epu32(bits[2], bits[3]));
    let max = _mm_max_epu32(_mm256_castsi256_si128(max), _mm256_extracti128_si256::<1>(max));
    let max = _mm_max_epu32(max, _mm_shuffle_epi32::<0b1110>(max));
    let max = _mm_max_epu32(max, _mm_shuffle_epi32::<0b01>(max));
    let scale = BlockScale::new(_mm_cvtsi128_si32(max).cast_unsigned(), limit);
    *fine = [0; 32];
    if scale.inverse == 0.0 {
        block.q = [0; 32];
        block.set_scale(scale, [0, 0]);
        return;
    }
    let steps = v.map(|v| _mm256_mul_ps(v, _mm256_set1_ps(scale.inverse)));
    let codes = steps.map(|steps| _mm256_cvtps_epi32(steps));
    let mut sum_q = sum_halves(codes);
    // SAFETY: both have 32 bytes.
    unsafe { _mm256_storeu_si256(block.q.as_mut_ptr().cast(), pack_bytes(codes)) };
    if scale.shift > 0 {
        let finer = _mm256_set1_ps((1u32 << FINE_BITS) as f32);
        let rest: [__m256i; 4] = std::array::from_fn(|i| {
            let rest = _mm256_sub_ps(steps[i], _mm256_cvtepi32_ps(codes[i]));
            let rest = _mm256_cvtps_epi32(_mm256_mul_ps(rest, finer));
            _mm256_max_epi32(_mm256_min_epi32(rest, _mm256_set1_epi32(127)), _mm256_set1_epi32(-127))
        });
        let sum_rest = sum_halves(rest);
        sum_q = std::array::from_fn(|half| (sum_q[half] << scale.shift) + sum_rest[half]);
        // SAFETY: as above.
        unsafe { _mm256_storeu_si256(fine.as_mut_ptr().cast(), pack_bytes(rest)) };
    }
    block.set_scale(scale, sum_q);
}

/// 32 codes as bytes, in order.
#[target_feature(enable = "avx2")]
#[inline]
fn pack_bytes(codes: [__m256i; 4]) -> __m256i {
    let (low, high) = (_mm256_packs_epi32(codes[0], codes[1]), _mm256_packs_epi32(codes[2], codes[3]));
    // The packs work in each 128-bit lane; this puts the four-byte runs back in order.
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order)
}

#[target_feature(enable = "avx2")]
#[inline]
fn sum_halves(codes: [__m256i; 4]) -> [i32; 2] {
    [sum_codes(codes[0], codes[1]), sum_codes(codes[2], codes[3])]
}

#[target_feature(enable = "avx2")]
#[inline]
fn sum_codes(a: __m256i, b: __m256i) -> i32 {
    let eight = _mm256_add_epi32(a, b);
    let four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
    let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b1110>(four));
    _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b01>(two)))
}
