//! The quantiser of activations for AVX2: the arithmetic of `activations`, to the bit.

use super::activations::{ActRows, BlockScale, BlockSums, Codes, FINE_BITS, quantize_row_with};
use std::arch::x86_64::*;

/// Quantises a row.
///
/// # Safety
/// The processor has AVX2; as [`quantize_row_with`].
#[target_feature(enable = "avx2")]
pub(super) unsafe fn quantize_row(acts: ActRows, x: &[f32]) {
    // SAFETY: this function's contract; blocks hold 32 values.
    unsafe { quantize_row_with(acts, x, |x, codes| quantize_block(x, codes)) };
}

/// # Safety
/// `x` holds 32 values.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn quantize_block(x: &[f32], out: &mut Codes) -> BlockSums {
    let magnitude = _mm256_set1_epi32(0x7fff_ffff);
    // SAFETY: the caller has 32 values there.
    let v: [__m256; 4] = std::array::from_fn(|i| unsafe { _mm256_loadu_ps(x.as_ptr().add(8 * i)) });
    let bits = v.map(|v| _mm256_and_si256(_mm256_castps_si256(v), magnitude));
    let max = _mm256_max_epu32(_mm256_max_epu32(bits[0], bits[1]), _mm256_max_epu32(bits[2], bits[3]));
    let max = _mm_max_epu32(_mm256_castsi256_si128(max), _mm256_extracti128_si256::<1>(max));
    let max = _mm_max_epu32(max, _mm_shuffle_epi32::<0b1110>(max));
    let max = _mm_max_epu32(max, _mm_shuffle_epi32::<0b01>(max));
    let scale = BlockScale::new(_mm_cvtsi128_si32(max).cast_unsigned());
    if scale.inverse == 0.0 {
        out.0 = [0; 64];
        return scale.with_sums([0, 0]);
    }
    let codes = v.map(|v| _mm256_cvtps_epi32(_mm256_mul_ps(v, _mm256_set1_ps(scale.inverse))));
    // Pairs of vectors as i16, in the order that packing in 128-bit lanes leaves; bytes are put right at the end.
    let codes16 = [_mm256_packs_epi32(codes[0], codes[1]), _mm256_packs_epi32(codes[2], codes[3])];
    let high = codes16.map(|c| _mm256_srai_epi16::<{ FINE_BITS as i32 }>(_mm256_add_epi16(c, _mm256_set1_epi16(4))));
    let low: [__m256i; 2] =
        std::array::from_fn(|i| _mm256_sub_epi16(codes16[i], _mm256_slli_epi16::<{ FINE_BITS as i32 }>(high[i])));
    let (high, low) = (in_order(high), in_order(low));
    // SAFETY: 64 bytes, aligned.
    unsafe {
        let to = out.0.as_mut_ptr().cast::<__m256i>();
        _mm256_store_si256(to, _mm256_permute2x128_si256::<0x20>(high, low));
        _mm256_store_si256(to.add(1), _mm256_permute2x128_si256::<0x31>(high, low));
    }
    scale.with_sums(codes16.map(|codes| sum_codes(codes)))
}

/// 32 codes as bytes, in order.
#[target_feature(enable = "avx2")]
#[inline]
fn in_order(codes: [__m256i; 2]) -> __m256i {
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_permutevar8x32_epi32(_mm256_packs_epi16(codes[0], codes[1]), order)
}

#[target_feature(enable = "avx2")]
#[inline]
fn sum_codes(sixteen: __m256i) -> i32 {
    let eight = _mm256_madd_epi16(sixteen, _mm256_set1_epi16(1));
    let four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
    let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b1110>(four));
    _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b01>(two)))
}
