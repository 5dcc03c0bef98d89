//! The quantiser of activations for AVX-512: the arithmetic of `activations`, to the bit.

use super::activations::{ActRows, BlockScale, BlockSums, Codes, FINE_BITS, quantize_row_with};
use std::arch::x86_64::*;

/// Quantises a row.
///
/// # Safety
/// The processor has AVX-512 F and BW; as [`quantize_row_with`].
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn quantize_row(acts: ActRows, x: &[f32]) {
    // SAFETY: this function's contract; blocks hold 32 values.
    unsafe { quantize_row_with(acts, x, |x, codes| quantize_block(x, codes)) };
}

/// # Safety
/// `x` holds 32 values.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn quantize_block(x: &[f32], out: &mut Codes) -> BlockSums {
    let magnitude = _mm512_set1_epi32(0x7fff_ffff);
    // SAFETY: the caller has 32 values there.
    let v: [__m512; 2] = std::array::from_fn(|i| unsafe { _mm512_loadu_ps(x.as_ptr().add(16 * i)) });
    let bits = v.map(|v| _mm512_and_si512(_mm512_castps_si512(v), magnitude));
    let scale = BlockScale::new(_mm512_reduce_max_epu32(_mm512_max_epu32(bits[0], bits[1])));
    if scale.inverse == 0.0 {
        out.0 = [0; 64];
        return scale.with_sums([0, 0]);
    }
    let codes = v.map(|v| _mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(scale.inverse))));
    let high = codes.map(|c| _mm512_srai_epi32::<FINE_BITS>(_mm512_add_epi32(c, _mm512_set1_epi32(4))));
    let low: [__m512i; 2] =
        std::array::from_fn(|i| _mm512_sub_epi32(codes[i], _mm512_slli_epi32::<FINE_BITS>(high[i])));
    // Packing in 128-bit lanes leaves four columns of each part in every lane: their words are put right at the end.
    let halves: [__m512i; 2] = std::array::from_fn(|i| _mm512_packs_epi32(high[i], low[i]));
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(halves[0], halves[1]));
    // SAFETY: 64 bytes, aligned.
    unsafe { _mm512_store_si512(out.0.as_mut_ptr().cast(), bytes) };
    scale.with_sums(sum_codes(codes))
}

/// Sums of both halves, side by side: the lower 256 bits are the first's.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn sum_codes([first, second]: [__m512i; 2]) -> [i32; 2] {
    let eight = _mm512_add_epi32(
        _mm512_shuffle_i64x2::<0b01_00_01_00>(first, second),
        _mm512_shuffle_i64x2::<0b11_10_11_10>(first, second),
    );
    let four = _mm512_add_epi32(eight, _mm512_shuffle_i64x2::<0b10_11_00_01>(eight, eight));
    let two = _mm512_add_epi32(four, _mm512_shuffle_epi32::<0b01_00_11_10>(four));
    let one = _mm512_add_epi32(two, _mm512_shuffle_epi32::<0b10_11_00_01>(two));
    [_mm512_cvtsi512_si32(one), _mm_cvtsi128_si32(_mm512_extracti32x4_epi32::<2>(one))]
}
