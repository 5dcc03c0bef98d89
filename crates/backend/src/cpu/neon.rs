//! f32 row kernels for NEON, and the vector exponential that attention shares. What the compiler vectorises by
//! itself (NEON is part of every aarch64 target) is `reference`'s.

use super::kernels::RowKernels;
use super::reference;
use crate::Activation;
use half::f16;
use std::arch::aarch64::*;
use std::arch::asm;

/// Lanes of a register.
pub(crate) const LANES: usize = 4;

/// The table of this file.
pub(crate) static ROW_KERNELS: RowKernels = RowKernels {
    add: reference::add,
    scale: reference::scale,
    rms_norm: |x, weight, eps, out| {
        // SAFETY: the table is only handed out for an Isa that this machine has; likewise below.
        unsafe { rms_norm(x, weight, eps, out) }
    },
    gated_activation: |act, gate, up, out| {
        // SAFETY: as above.
        unsafe {
            match act {
                Activation::Silu => gated::<false>(gate, up, out),
                Activation::GeluTanh => gated::<true>(gate, up, out),
            }
        }
    },
    rotate_halves: reference::rotate_halves,
    rotate_pairs: reference::rotate_pairs,
    to_f16: |x, out| {
        // SAFETY: as above.
        unsafe { to_f16(x, out) }
    },
};

/// Asks for the line at `at`, whatever address that is. A hint.
#[inline(always)]
pub(crate) fn prefetch(at: *const u8) {
    // SAFETY: a prefetch reads nothing that a program can see and does not fault.
    unsafe { asm!("prfm pldl1keep, [{}]", in(reg) at, options(nostack, readonly, preserves_flags)) };
}

/// Sum of the lanes, in a fixed order.
#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn sum_lanes(x: float32x4_t) -> f32 {
    let pairs = vadd_f32(vget_low_f32(x), vget_high_f32(x));
    vget_lane_f32::<0>(pairs) + vget_lane_f32::<1>(pairs)
}

/// `e^x` within about 1 ulp for -87.3 <= x <= 88.3; 0 below, clamped above; NaN stays NaN. Cephes'
/// expf: `x = n ln 2 + r`, a polynomial in r, n into the exponent.
#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn exp(x: float32x4_t) -> float32x4_t {
    let low = vdupq_n_f32(-87.336_54);
    let too_low = vcltq_f32(x, low);
    // Minimum and maximum pass a NaN on.
    let x = vminq_f32(vdupq_n_f32(88.37), vmaxq_f32(low, x));
    let n = vrndnq_f32(vmulq_n_f32(x, std::f32::consts::LOG2_E));
    let r = vfmsq_f32(x, n, vdupq_n_f32(0.693_359_4));
    let r = vfmsq_f32(r, n, vdupq_n_f32(-2.121_944_4e-4));
    let mut p = vdupq_n_f32(1.987_569_1e-4);
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = vfmaq_f32(vdupq_n_f32(coefficient), p, r);
    }
    let p = vaddq_f32(vfmaq_f32(r, vmulq_f32(r, r), p), vdupq_n_f32(1.0));
    let exponent = vshlq_n_s32::<23>(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)));
    let value = vmulq_f32(p, vreinterpretq_f32_s32(exponent));
    vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), too_low))
}

/// [`exp`] of one number: the same bits.
#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn exp_one(x: f32) -> f32 {
    vgetq_lane_f32::<0>(exp(vdupq_n_f32(x)))
}

#[target_feature(enable = "neon")]
fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    // Eight sums side by side hide the latency of the multiply-add.
    let mut sums = [vdupq_n_f32(0.0); 8];
    let mut pieces = x.chunks_exact(8 * LANES);
    for piece in &mut pieces {
        for (lane_group, sum) in sums.iter_mut().enumerate() {
            // SAFETY: `piece` holds eight registers.
            let x = unsafe { vld1q_f32(piece.as_ptr().add(lane_group * LANES)) };
            *sum = vfmaq_f32(*sum, x, x);
        }
    }
    let tail: f32 = pieces.remainder().iter().map(|x| x * x).sum();
    let pairs = |a: usize, b: usize| vaddq_f32(vaddq_f32(sums[a], sums[a + 1]), vaddq_f32(sums[b], sums[b + 1]));
    let total = vaddq_f32(pairs(0, 2), pairs(4, 6));
    let inverse_rms = 1.0 / ((sum_lanes(total) + tail) / x.len() as f32 + eps).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * inverse_rms * weight;
    }
}

/// Both activations are `x * sigmoid(y)`, with y = x or twice the argument of GELU's tanh.
#[target_feature(enable = "neon")]
fn gated<const GELU: bool>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    let len = out.len().min(gate.len()).min(up.len());
    let whole = len - len % LANES;
    for i in (0..whole).step_by(LANES) {
        // SAFETY: `i + LANES <= len`, within all three.
        unsafe {
            let value = gate4::<GELU>(vld1q_f32(gate.as_ptr().add(i)));
            vst1q_f32(out.as_mut_ptr().add(i), vmulq_f32(value, vld1q_f32(up.as_ptr().add(i))));
        }
    }
    // The last few go through the same arithmetic: an element's bits do not depend on its place.
    let mut rest = [[0.0; LANES]; 2];
    let num_rest = len - whole;
    rest[0][..num_rest].copy_from_slice(&gate[whole..len]);
    rest[1][..num_rest].copy_from_slice(&up[whole..len]);
    let mut last = [0.0; LANES];
    // SAFETY: arrays of one register each.
    unsafe {
        let value = gate4::<GELU>(vld1q_f32(rest[0].as_ptr()));
        vst1q_f32(last.as_mut_ptr(), vmulq_f32(value, vld1q_f32(rest[1].as_ptr())));
    }
    out[whole..len].copy_from_slice(&last[..num_rest]);
}

#[inline]
#[target_feature(enable = "neon")]
fn gate4<const GELU: bool>(x: float32x4_t) -> float32x4_t {
    let one = vdupq_n_f32(1.0);
    let y = if GELU {
        // 2 sqrt(2/pi) x (1 + 0.044715 x²).
        let inner = vfmaq_f32(one, vmulq_f32(x, x), vdupq_n_f32(0.044_715));
        vmulq_f32(vmulq_n_f32(x, 1.595_769_2), inner)
    } else {
        x
    };
    vdivq_f32(x, vaddq_f32(one, exp(vnegq_f32(y))))
}

#[target_feature(enable = "neon")]
fn to_f16(x: &[f32], out: &mut [f16]) {
    let len = out.len().min(x.len());
    let whole = len - len % LANES;
    let limit = vdupq_n_f32(65_504.0);
    let negative = vdupq_n_f32(-65_504.0);
    for i in (0..whole).step_by(LANES) {
        // SAFETY: `i + LANES <= len`, within both. Minimum and maximum pass a NaN on.
        unsafe {
            let value = vminq_f32(limit, vmaxq_f32(negative, vld1q_f32(x.as_ptr().add(i))));
            vst1_u16(out.as_mut_ptr().add(i).cast(), vreinterpret_u16_f16(vcvt_f16_f32(value)));
        }
    }
    reference::to_f16(&x[whole..len], &mut out[whole..len]);
}
