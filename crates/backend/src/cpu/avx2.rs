//! f32 row kernels for AVX2 + FMA, and the vector exponential that attention shares. Everything here
//! runs only after [`super::Isa::detect`] found AVX2, FMA and F16C.

use super::kernels::RowKernels;
use super::reference;
use crate::Activation;
use half::f16;
use std::arch::x86_64::*;

/// Lanes of a register.
pub(crate) const LANES: usize = 8;

/// The table of this file.
pub(crate) static ROW_KERNELS: RowKernels = RowKernels {
    add: |residual, x| {
        // SAFETY: the table is only handed out for an Isa that this machine has; likewise below.
        unsafe { add(residual, x) }
    },
    scale: |x, factor| {
        // SAFETY: as above.
        unsafe { scale(x, factor) }
    },
    rms_norm: |x, weight, eps, out| {
        // SAFETY: as above.
        unsafe { rms_norm(x, weight, eps, out) }
    },
    gated_activation: |act, gate, up, out| {
        // SAFETY: as above.
        unsafe { gated_activation(act, gate, up, out) }
    },
    rotate_halves: |low, high, cos, sin| {
        // SAFETY: as above.
        unsafe { rotate_halves(low, high, cos, sin) }
    },
    rotate_pairs: |x, cos, sin| {
        // SAFETY: as above.
        unsafe { rotate_pairs(x, cos, sin) }
    },
    to_f16: |x, out| {
        // SAFETY: as above.
        unsafe { to_f16(x, out) }
    },
};

/// Sum of the lanes, in a fixed order.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn sum_lanes(x: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}

/// Greatest lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn max_lane(x: __m256) -> f32 {
    let four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
}

/// `e^x` within about 1 ulp for -87.3 <= x <= 88.3; 0 below, clamped above; NaN stays NaN. Cephes'
/// expf: `x = n ln 2 + r`, a polynomial in r, n into the exponent.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn exp(x: __m256) -> __m256 {
    let low = _mm256_set1_ps(-87.336_54);
    let too_low = _mm256_cmp_ps::<_CMP_LT_OQ>(x, low);
    // The clamped operand comes second: a NaN there comes through.
    let x = _mm256_min_ps(_mm256_set1_ps(88.37), _mm256_max_ps(low, x));
    let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
        x,
        _mm256_set1_ps(std::f32::consts::LOG2_E),
    ));
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693_359_4), x);
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.121_944_4e-4), r);
    let mut p = _mm256_set1_ps(1.987_569_1e-4);
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(coefficient));
    }
    let p = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(r, r), p, r), _mm256_set1_ps(1.0));
    let exponent = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)));
    _mm256_andnot_ps(too_low, _mm256_mul_ps(p, _mm256_castsi256_ps(exponent)))
}

/// [`exp`] of one number: the same bits.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn exp_one(x: f32) -> f32 {
    _mm256_cvtss_f32(exp(_mm256_set1_ps(x)))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn add(residual: &mut [f32], x: &[f32]) {
    reference::add(residual, x);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn scale(x: &mut [f32], factor: f32) {
    reference::scale(x, factor);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    // Four sums side by side hide the latency of the multiply-add.
    let mut sums = [_mm256_setzero_ps(); 4];
    let mut pieces = x.chunks_exact(4 * LANES);
    for piece in &mut pieces {
        for (lane_group, sum) in sums.iter_mut().enumerate() {
            // SAFETY: `piece` holds four registers.
            let x = unsafe { _mm256_loadu_ps(piece.as_ptr().add(lane_group * LANES)) };
            *sum = _mm256_fmadd_ps(x, x, *sum);
        }
    }
    let tail: f32 = pieces.remainder().iter().map(|x| x * x).sum();
    let pairs = _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3]));
    let inverse_rms = 1.0 / ((sum_lanes(pairs) + tail) / x.len() as f32 + eps).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * inverse_rms * weight;
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn gated_activation(act: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    match act {
        Activation::Silu => gated::<false>(gate, up, out),
        Activation::GeluTanh => gated::<true>(gate, up, out),
    }
}

/// Both activations are `x * sigmoid(y)`, with y = x or twice the argument of GELU's tanh.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn gated<const GELU: bool>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    let len = out.len().min(gate.len()).min(up.len());
    let whole = len - len % LANES;
    for i in (0..whole).step_by(LANES) {
        // SAFETY: `i + LANES <= len`, within all three.
        unsafe {
            let value = gate8::<GELU>(_mm256_loadu_ps(gate.as_ptr().add(i)));
            let value = _mm256_mul_ps(value, _mm256_loadu_ps(up.as_ptr().add(i)));
            _mm256_storeu_ps(out.as_mut_ptr().add(i), value);
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
        let value = gate8::<GELU>(_mm256_loadu_ps(rest[0].as_ptr()));
        _mm256_storeu_ps(last.as_mut_ptr(), _mm256_mul_ps(value, _mm256_loadu_ps(rest[1].as_ptr())));
    }
    out[whole..len].copy_from_slice(&last[..num_rest]);
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn gate8<const GELU: bool>(x: __m256) -> __m256 {
    let one = _mm256_set1_ps(1.0);
    let y = if GELU {
        // 2 sqrt(2/pi) x (1 + 0.044715 x²).
        let inner = _mm256_fmadd_ps(_mm256_mul_ps(x, x), _mm256_set1_ps(0.044_715), one);
        _mm256_mul_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.595_769_2)), inner)
    } else {
        x
    };
    _mm256_div_ps(x, _mm256_add_ps(one, exp(_mm256_sub_ps(_mm256_setzero_ps(), y))))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn rotate_halves(low: &mut [f32], high: &mut [f32], cos: &[f32], sin: &[f32]) {
    reference::rotate_halves(low, high, cos, sin);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn rotate_pairs(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    reference::rotate_pairs(x, cos, sin);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn to_f16(x: &[f32], out: &mut [f16]) {
    let len = out.len().min(x.len());
    let whole = len - len % LANES;
    let limit = _mm256_set1_ps(65_504.0);
    let negative = _mm256_set1_ps(-65_504.0);
    for i in (0..whole).step_by(LANES) {
        // SAFETY: `i + LANES <= len`, within both. The data is the second operand, so that NaN stays.
        unsafe {
            let value = _mm256_loadu_ps(x.as_ptr().add(i));
            let value = _mm256_min_ps(limit, _mm256_max_ps(negative, value));
            let halves = _mm256_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(value);
            _mm_storeu_si128(out.as_mut_ptr().add(i).cast(), halves);
        }
    }
    reference::to_f16(&x[whole..len], &mut out[whole..len]);
}
