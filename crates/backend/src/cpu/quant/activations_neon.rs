//! The quantiser of activations for NEON: the arithmetic of `activations`, to the bit.

use super::activations::{ActRows, BlockScale, BlockSums, Codes, FINE_BITS, quantize_row_with};
use std::arch::aarch64::*;

/// Quantises a row.
///
/// # Safety
/// As [`quantize_row_with`].
#[target_feature(enable = "neon")]
pub(super) unsafe fn quantize_row(acts: ActRows, x: &[f32]) {
    // SAFETY: this function's contract; blocks hold 32 values.
    unsafe { quantize_row_with(acts, x, |x, codes| quantize_block(x, codes)) };
}

/// # Safety
/// `x` holds 32 values.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn quantize_block(x: &[f32], out: &mut Codes) -> BlockSums {
    let mut v = [vdupq_n_f32(0.0); 8];
    let mut max = vdupq_n_u32(0);
    for (i, v) in v.iter_mut().enumerate() {
        // SAFETY: the caller has 32 values there.
        *v = unsafe { vld1q_f32(x.as_ptr().add(4 * i)) };
        // Magnitudes as integers order like the floats, with NaN above infinity.
        max = vmaxq_u32(max, vandq_u32(vreinterpretq_u32_f32(*v), vdupq_n_u32(0x7fff_ffff)));
    }
    let scale = BlockScale::new(vmaxvq_u32(max));
    if scale.inverse == 0.0 {
        out.0 = [0; 64];
        return scale.with_sums([0, 0]);
    }
    let mut sum_q = [0; 2];
    for (half, sum) in sum_q.iter_mut().enumerate() {
        let mut codes = [vdupq_n_s32(0); 4];
        for (code, v) in codes.iter_mut().zip(&v[4 * half..]) {
            *code = vcvtnq_s32_f32(vmulq_n_f32(*v, scale.inverse));
        }
        *sum = vaddvq_s32(vaddq_s32(vaddq_s32(codes[0], codes[1]), vaddq_s32(codes[2], codes[3])));
        let codes16 = [
            vcombine_s16(vmovn_s32(codes[0]), vmovn_s32(codes[1])),
            vcombine_s16(vmovn_s32(codes[2]), vmovn_s32(codes[3])),
        ];
        let mut planes = [[vdup_n_s8(0); 2]; 2];
        for (i, &code) in codes16.iter().enumerate() {
            let high = vshrq_n_s16::<{ FINE_BITS as i32 }>(vaddq_s16(code, vdupq_n_s16(4)));
            planes[0][i] = vmovn_s16(high);
            planes[1][i] = vmovn_s16(vsubq_s16(code, vshlq_n_s16::<{ FINE_BITS as i32 }>(high)));
        }
        // SAFETY: both planes of 16 columns lie in the block's 64 bytes.
        unsafe {
            let to = out.0.as_mut_ptr().add(Codes::at(16 * half));
            vst1q_s8(to, vcombine_s8(planes[0][0], planes[0][1]));
            vst1q_s8(to.add(Codes::LOW), vcombine_s8(planes[1][0], planes[1][1]));
        }
    }
    scale.with_sums(sum_q)
}
