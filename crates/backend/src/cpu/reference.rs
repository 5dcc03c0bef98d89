//! Plain scalar forms of every kernel: the meaning that vector kernels are tested against, and what
//! runs on machines without them. Written to be read; threads and checks are elsewhere.

use super::kv_layout::KvLayer;
use crate::Activation;
use half::f16;
use std::ops::Range;

/// `residual[i] += x[i]`.
pub(crate) fn add(residual: &mut [f32], x: &[f32]) {
    residual.iter_mut().zip(x).for_each(|(r, x)| *r += x);
}

/// `x[i] *= factor`.
pub(crate) fn scale(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}

/// `out = x / sqrt(mean(x²) + eps) * weight`.
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let sum_of_squares: f32 = x.iter().map(|x| x * x).sum();
    let inverse_rms = 1.0 / (sum_of_squares / x.len() as f32 + eps).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * inverse_rms * weight;
    }
}

/// `out[i] = act(gate[i]) * up[i]`.
pub(crate) fn gated_activation(act: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    let activate: fn(f32) -> f32 = match act {
        Activation::Silu => silu,
        Activation::GeluTanh => gelu_tanh,
    };
    for ((out, &gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = activate(gate) * up;
    }
}

/// `x * sigmoid(x)`.
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// `x / 2 * (1 + tanh(u))` with `u = sqrt(2/pi) * (x + 0.044715 x³)`, written with the identity
/// `(1 + tanh(u)) / 2 = sigmoid(2u)`, which does not cancel for negative x.
pub(crate) fn gelu_tanh(x: f32) -> f32 {
    x / (1.0 + (-2.0 * gelu_argument(x)).exp())
}

/// The argument of GELU's tanh.
pub(crate) fn gelu_argument(x: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    SQRT_2_OVER_PI * x * (1.0 + 0.044_715 * x * x)
}

/// `x = cap * tanh(x / cap)`.
pub(crate) fn soft_cap(x: &mut [f32], cap: f32) {
    x.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
}

/// Rotates the pairs `(low[i], high[i])` by the angle whose cosine and sine are `cos[i]`, `sin[i]`.
pub(crate) fn rotate_halves(low: &mut [f32], high: &mut [f32], cos: &[f32], sin: &[f32]) {
    for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*low, *high) = (*low * cos - *high * sin, *high * cos + *low * sin);
    }
}

/// Rotates the pairs `(x[2i], x[2i + 1])`.
pub(crate) fn rotate_pairs(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    for ((pair, cos), sin) in x.chunks_exact_mut(2).zip(cos).zip(sin) {
        (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin);
    }
}

/// Rounds to f16, saturating at its largest finite value; NaN stays NaN.
pub(crate) fn to_f16(x: &[f32], out: &mut [f16]) {
    let limit = f16::MAX.to_f32();
    out.iter_mut().zip(x).for_each(|(out, x)| *out = f16::from_f32(x.clamp(-limit, limit)));
}

/// `x · w` in order.
pub(crate) fn dot(x: &[f32], w: impl Iterator<Item = f32>) -> f32 {
    x.iter().zip(w).map(|(x, w)| x * w).sum()
}

/// One query head, and what it sees.
pub(crate) struct AttentionRow<'a> {
    /// `[E]`.
    pub(crate) q: &'a [f32],
    pub(crate) kv: &'a KvLayer,
    pub(crate) kv_head: usize,
    /// The sequence's block table.
    pub(crate) table: &'a [u32],
    /// Positions seen.
    pub(crate) positions: Range<usize>,
    pub(crate) scale: f32,
    pub(crate) soft_cap: Option<f32>,
    /// The head's, as a score.
    pub(crate) sink: Option<f32>,
}

/// Attention of one row into `out` `[E]`. `scores` is scratch.
pub(crate) fn attention_row(row: &AttentionRow<'_>, scores: &mut Vec<f32>, out: &mut [f32]) {
    let &AttentionRow { q, kv, kv_head, table, scale, soft_cap, sink, .. } = row;
    let positions = || row.positions.clone();
    let place = |position: usize| {
        let block = table[position / kv.block_size()] as usize;
        (block, position % kv.block_size())
    };
    scores.clear();
    scores.extend(positions().map(|position| {
        let (block, offset) = place(position);
        let dot: f32 = q.iter().enumerate().map(|(e, q)| q * kv.read_k(block, kv_head, offset, e)).sum();
        match soft_cap {
            Some(cap) => cap * (dot * scale / cap).tanh(),
            None => dot * scale,
        }
    }));
    let max = scores.iter().copied().fold(sink.unwrap_or(f32::NEG_INFINITY), f32::max);
    let mut sum = sink.map_or(0.0, |sink| (sink - max).exp());
    for score in scores.iter_mut() {
        *score = (*score - max).exp();
        sum += *score;
    }
    out.fill(0.0);
    for (position, weight) in positions().zip(scores.iter()) {
        let (block, offset) = place(position);
        for (e, out) in out.iter_mut().enumerate() {
            *out += weight * kv.read_v(block, kv_head, offset, e);
        }
    }
    out.iter_mut().for_each(|out| *out /= sum);
}
