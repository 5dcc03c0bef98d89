//! Integer products with AVX-VNNI: `vpdpbusd` on 256 bits multiplies unsigned weight codes with signed activation
//! codes straight into i32 (no saturation). The loops around them are `avx2`'s.

use super::activations::{ActRows, Codes, FINE_BITS};
use super::avx2::{self, Products};
use super::layout::Format;
use super::tile::{Chunk, OutRows, Panel, Start};
use std::arch::x86_64::*;

/// AVX2, FMA, F16C, AVX-VNNI.
pub(super) struct AvxVnni;

/// `sum` and the products of a group's operands with one plane of activation codes, each in its lane.
///
/// # Safety
/// `codes` is a group's high codes or its low ones.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
#[inline]
unsafe fn add_dot(mut sum: __m256i, q: &[__m256i], codes: *const i8) -> __m256i {
    for (i, &q) in q.iter().enumerate() {
        // SAFETY: four codes an operand.
        let operand = unsafe { _mm256_set1_epi32(codes.add(Codes::at(4 * i)).cast::<i32>().read_unaligned()) };
        sum = _mm256_dpbusd_avx_epi32(sum, q, operand);
    }
    sum
}

impl Products for AvxVnni {
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    #[inline]
    unsafe fn dots<F: Format, const T: usize>(q: &[__m256i; 8], acts: ActRows, block: usize, g: usize) -> [__m256i; T] {
        let q = &q[g * F::LAYOUT.group / 4..(g + 1) * F::LAYOUT.group / 4];
        let mut dots = [_mm256_setzero_si256(); T];
        for (t, dot) in dots.iter_mut().enumerate() {
            // SAFETY: as promised to this method; the groups' codes lie 32 apart where there are two.
            unsafe {
                let codes = acts.codes(t, block).add(32 * g);
                let start = _mm256_set1_epi32(acts.neg_sum_q::<F>(t, block, g) << F::LAYOUT.log2_zero);
                let high = add_dot(_mm256_setzero_si256(), q, codes);
                let low = add_dot(start, q, codes.add(Codes::LOW));
                *dot = _mm256_add_epi32(_mm256_slli_epi32::<{ FINE_BITS as i32 }>(high), low);
            }
        }
        dots
    }

    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    unsafe fn few_rows<F: Format, const T: usize>(panel: Panel, acts: ActRows, out: OutRows) {
        // SAFETY: as promised to this method.
        unsafe { avx2::few_rows::<Self, F, T>(panel, acts, out) };
    }

    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    unsafe fn many_rows<F: Format, const T: usize>(
        chunk: &Chunk,
        num_blocks: usize,
        acts: ActRows,
        out: OutRows,
        start: Start,
    ) {
        // SAFETY: as promised to this method.
        unsafe { avx2::many_rows::<Self, F, T>(chunk, num_blocks, acts, out, start) };
    }
}
