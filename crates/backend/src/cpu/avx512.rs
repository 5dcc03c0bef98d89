//! f32 row kernels for AVX-512: those that gain by the width. The rest of the table is AVX2's. An element of a gated
//! activation has the bits that AVX2 gives it; a norm sums in 64 lanes instead of 32.

use super::avx2;
use super::kernels::RowKernels;
use crate::Activation;
use std::arch::x86_64::*;

/// Lanes of a register.
const LANES: usize = 16;

/// The table of this file.
pub(crate) static ROW_KERNELS: RowKernels = RowKernels {
    add: |residual, x| {
        // SAFETY: the table is only handed out for an Isa that this machine has; likewise below.
        unsafe { add(residual, x) }
    },
    rms_norm: |x, weight, eps, out| {
        // SAFETY: as above.
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
    ..avx2::ROW_KERNELS
};

/// The first `count` lanes.
#[inline]
fn first_lanes(count: usize) -> __mmask16 {
    #[allow(clippy::cast_possible_truncation)] // sixteen bits at most
    let mask = ((1_u32 << count.min(LANES)) - 1) as __mmask16;
    mask
}

/// `out = f(a, b)`, sixteen elements at a time, the last few masked: whole registers are stored as such, since a
/// masked store is not handed on to the load that soon follows.
#[inline(always)]
unsafe fn map2(a: *const f32, b: *const f32, out: *mut f32, len: usize, f: impl Fn(__m512, __m512) -> __m512) {
    let whole = len - len % LANES;
    // SAFETY: the caller has `len` elements in all three; the mask leaves out those beyond. AVX-512 F is there.
    unsafe {
        for i in (0..whole).step_by(LANES) {
            _mm512_storeu_ps(out.add(i), f(_mm512_loadu_ps(a.add(i)), _mm512_loadu_ps(b.add(i))));
        }
        if whole < len {
            let rest = first_lanes(len - whole);
            let (a, b) = (_mm512_maskz_loadu_ps(rest, a.add(whole)), _mm512_maskz_loadu_ps(rest, b.add(whole)));
            _mm512_mask_storeu_ps(out.add(whole), rest, f(a, b));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn add(residual: &mut [f32], x: &[f32]) {
    let (len, to) = (residual.len().min(x.len()), residual.as_mut_ptr());
    // SAFETY: `len` elements of both; each is read before it is written.
    unsafe { map2(to, x.as_ptr(), to, len, |a, b| _mm512_add_ps(a, b)) };
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    // Four sums side by side hide the latency of the multiply-add.
    let mut sums = [_mm512_setzero_ps(); 4];
    let mut pieces = x.chunks_exact(4 * LANES);
    for piece in &mut pieces {
        for (nth, sum) in sums.iter_mut().enumerate() {
            // SAFETY: `piece` holds four registers.
            let x = unsafe { _mm512_loadu_ps(piece.as_ptr().add(nth * LANES)) };
            *sum = _mm512_fmadd_ps(x, x, *sum);
        }
    }
    for (piece, sum) in pieces.remainder().chunks(LANES).zip(&mut sums) {
        // SAFETY: masked to the piece.
        let x = unsafe { _mm512_maskz_loadu_ps(first_lanes(piece.len()), piece.as_ptr()) };
        *sum = _mm512_fmadd_ps(x, x, *sum);
    }
    let sum = _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
    let halves = _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps::<1>(sum));
    let inverse_rms = 1.0 / (avx2::sum_lanes(halves) / x.len() as f32 + eps).sqrt();
    let factor = _mm512_set1_ps(inverse_rms);
    let len = x.len().min(weight.len()).min(out.len());
    // SAFETY: `len` elements of all three.
    unsafe {
        map2(x.as_ptr(), weight.as_ptr(), out.as_mut_ptr(), len, |x, weight| {
            _mm512_mul_ps(_mm512_mul_ps(x, factor), weight)
        });
    }
}

/// Both activations are `x * sigmoid(y)`, with y = x or twice the argument of GELU's tanh.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn gated<const GELU: bool>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    let len = out.len().min(gate.len()).min(up.len());
    // SAFETY: `len` elements of all three.
    unsafe {
        map2(gate.as_ptr(), up.as_ptr(), out.as_mut_ptr(), len, |gate, up| _mm512_mul_ps(gate16::<GELU>(gate), up));
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn gate16<const GELU: bool>(x: __m512) -> __m512 {
    let one = _mm512_set1_ps(1.0);
    let y = if GELU {
        // 2 sqrt(2/pi) x (1 + 0.044715 x²).
        let inner = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044_715), one);
        _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.595_769_2)), inner)
    } else {
        x
    };
    _mm512_div_ps(x, _mm512_add_ps(one, exp(_mm512_sub_ps(_mm512_setzero_ps(), y))))
}

/// [`avx2::exp`], the same bits in every lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn exp(x: __m512) -> __m512 {
    let low = _mm512_set1_ps(-87.336_54);
    let counts = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, low);
    // The clamped operand comes second: a NaN there comes through.
    let x = _mm512_min_ps(_mm512_set1_ps(88.37), _mm512_max_ps(low, x));
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm512_mul_ps(
        x,
        _mm512_set1_ps(std::f32::consts::LOG2_E),
    ));
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693_359_4), x);
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.121_944_4e-4), r);
    let mut p = _mm512_set1_ps(1.987_569_1e-4);
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(coefficient));
    }
    let p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(r, r), p, r), _mm512_set1_ps(1.0));
    let exponent = _mm512_slli_epi32::<23>(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)));
    _mm512_maskz_mul_ps(counts, p, _mm512_castsi512_ps(exponent))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    #[test]
    fn a_gated_element_has_the_bits_of_avx2_wherever_it_lies() {
        if !Isa::Avx512Vnni.is_available() {
            return;
        }
        let mut gate: Vec<f32> = (-3000..3000).map(|i| i as f32 * 0.037).collect();
        gate.extend([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e-40, 3e38, -3e38]);
        let up: Vec<f32> = (0..gate.len()).map(|i| 0.3 + i as f32 * 1e-3).collect();
        for act in [Activation::Silu, Activation::GeluTanh] {
            for first in [0, 1, 7, 5990] {
                let (gate, up) = (&gate[first..], &up[first..]);
                let mut narrow = vec![0.0; gate.len()];
                (avx2::ROW_KERNELS.gated_activation)(act, gate, up, &mut narrow);
                let mut wide = vec![0.0; gate.len()];
                (ROW_KERNELS.gated_activation)(act, gate, up, &mut wide);
                for ((wide, narrow), gate) in wide.iter().zip(&narrow).zip(gate) {
                    assert!(
                        wide.to_bits() == narrow.to_bits() || (wide.is_nan() && narrow.is_nan()),
                        "{act:?}({gate}): {wide}, not {narrow}"
                    );
                }
            }
        }
    }
}
