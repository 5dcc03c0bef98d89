//! Seconds of one stage over one set of sequences: for every product the larger of its bytes over the bandwidth and
//! its operations over their rate (the roofline of Williams, Waterman and Patterson 2009), plus what each launch
//! costs. Knows no pipeline.
//!
//! Shape letters: `T` tokens of the step on this rank, `D` hidden size, `H` query heads, `K` KV heads, `E` head size,
//! `I` MLP features, `V` vocabulary; `H`, `K`, `I`, `V` here are the rank's own: of the first of its stage, which has
//! most, and for which the others wait.

use crate::dtype::Arithmetic;
use crate::traffic::Traffic;
use crate::{DecoderShape, Device, KvType, LayerKv, Layout, Mlp, WeightType};
use serde::Serialize;

/// Sequences of one step, all alike.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    /// Sequences.
    pub(crate) sequences: usize,
    /// New tokens of each.
    pub(crate) new_tokens: usize,
    /// Tokens of each that are in the cache already.
    pub(crate) past: usize,
    /// Sequences whose next token is sampled.
    pub(crate) sampled: usize,
}

/// Seconds by what they are spent on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Seconds {
    /// Products with weights.
    pub products_s: f64,
    /// Attention over the cache.
    pub attention_s: f64,
    /// Norms, rope, KV writes, activations, scheduling and sampling.
    pub other_s: f64,
    /// All-reduces and all-gathers.
    pub collectives_s: f64,
}

impl Seconds {
    /// All of it: nothing is assumed to overlap.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.products_s + self.attention_s + self.other_s + self.collectives_s
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.products_s += other.products_s;
        self.attention_s += other.attention_s;
        self.other_s += other.other_s;
        self.collectives_s += other.collectives_s;
    }
}

/// Small kernels of a layer beside its products and its attention: two norms, rope, KV write, activation.
const SMALL_KERNELS: f64 = 5.0;

/// Bytes moved for each logit: written in f32, read by the sampler twice.
const LOGIT_BYTES: f64 = 12.0;

/// Model, types, hardware and cut.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Roofline<'a> {
    pub(crate) shape: &'a DecoderShape,
    pub(crate) weights: &'a WeightType,
    pub(crate) kv: KvType,
    pub(crate) device: &'a Device,
    pub(crate) layout: &'a Layout,
}

impl Roofline<'_> {
    /// Seconds of `stage` over `work`.
    pub(crate) fn stage(&self, stage: usize, work: &Work) -> Seconds {
        let layers = &self.shape.layers[self.layout.stages[stage].clone()];
        let count = layers.len() as f64;
        let tokens = (work.sequences * work.new_tokens) as f64;
        let hidden_bytes = tokens * self.shape.hidden_size as f64 * self.device.activation_bytes();
        let mut seconds = Seconds {
            products_s: count * (self.attention_products(tokens) + self.mlp_products(tokens)),
            attention_s: layers.iter().map(|layer| self.attention(*layer, work)).sum(),
            other_s: count * self.small_kernels(tokens),
            collectives_s: count * 2.0 * self.traffic().all_reduce_s(stage, hidden_bytes),
        };
        if stage == 0 {
            seconds.other_s += self.device.efficiency.kernel_s;
        }
        if stage + 1 == self.layout.pp {
            seconds.add(&self.head(stage, work));
        }
        seconds
    }

    fn traffic(&self) -> Traffic<'_> {
        Traffic { device: self.device, layout: self.layout }
    }

    /// One product of `tokens` rows with `parameters` weights of `bytes` bytes.
    fn product(&self, parameters: f64, bytes: f64, tokens: f64, arithmetic: Arithmetic) -> f64 {
        let read = bytes / self.device.read_bytes_per_s();
        let multiply = 2.0 * parameters * tokens / self.device.products_per_s(arithmetic);
        self.device.efficiency.product_s + read.max(multiply)
    }

    /// A product with weights of the layers.
    fn layer_product(&self, parameters: f64, tokens: f64) -> f64 {
        self.product(parameters, parameters * self.weights.bits() / 8.0, tokens, self.weights.arithmetic)
    }

    /// q, k and v at once, and the output projection.
    fn attention_products(&self, tokens: f64) -> f64 {
        let (shape, tp) = (self.shape, self.layout.tp);
        let head = (shape.hidden_size * shape.head_dim) as f64;
        let (heads, kv_heads) = (shape.heads_per_rank(tp) as f64, shape.kv_heads_per_rank(tp) as f64);
        self.layer_product(head * (heads + 2.0 * kv_heads), tokens) + self.layer_product(head * heads, tokens)
    }

    /// Gate and up at once, and down. Of experts, those are read that any token visits: of `n`, with each token
    /// visiting `k`, `n (1 − (1 − k / n)^T)` if the router spreads evenly.
    fn mlp_products(&self, tokens: f64) -> f64 {
        let (hidden, tp) = (self.shape.hidden_size as f64, self.layout.tp as f64);
        let gated = |features: usize| hidden * features as f64 / tp;
        let dense = |features: usize| {
            self.layer_product(2.0 * gated(features), tokens) + self.layer_product(gated(features), tokens)
        };
        match self.shape.mlp {
            Mlp::Dense { intermediate_size } => dense(intermediate_size),
            Mlp::Experts { num_experts, experts_per_token, intermediate_size, shared_intermediate_size } => {
                let (all, visited) = (num_experts as f64, experts_per_token as f64);
                let read = all * (1.0 - (1.0 - visited / all).powf(tokens.max(1.0)));
                let grouped = |matrices: f64| {
                    let parameters = matrices * gated(intermediate_size);
                    let bytes = parameters * read * self.weights.bits() / 8.0;
                    self.product(parameters * visited, bytes, tokens, self.weights.arithmetic)
                };
                let shared = if shared_intermediate_size > 0 { dense(shared_intermediate_size) } else { 0.0 };
                self.layer_product(hidden * all, tokens) + grouped(2.0) + grouped(1.0) + shared
            }
        }
    }

    /// Attention of one layer: its KV bytes, or `4 × H × E` operations for each pair of positions.
    fn attention(&self, layer: LayerKv, work: &Work) -> f64 {
        let window = match layer {
            LayerKv::Full => usize::MAX,
            LayerKv::Window(window) => window,
        };
        let (shape, tp) = (self.shape, self.layout.tp);
        let sequences = work.sequences as f64;
        let read = (work.past + work.new_tokens).min(window.saturating_add(work.new_tokens - 1)) as f64;
        let kv_bytes =
            sequences * read * 2.0 * (shape.kv_heads_per_rank(tp) as u64 * self.kv.head_bytes(shape.head_dim)) as f64;
        let operations = sequences
            * pairs(work.past, work.new_tokens, window)
            * 4.0
            * (shape.heads_per_rank(tp) * shape.head_dim) as f64;
        let rate = self.device.half_flops_per_s * self.device.efficiency.attention;
        self.device.efficiency.kernel_s + (kv_bytes / self.device.kv_bytes_per_s()).max(operations / rate)
    }

    /// Launches, and the activations that pass through memory: `8 D + 2 (H + 2 K) E + 2 H E + 3 I` elements a token,
    /// and for FP8 products their inputs once more, read as they are and written in one byte.
    fn small_kernels(&self, tokens: f64) -> f64 {
        let (shape, tp) = (self.shape, self.layout.tp as f64);
        let hidden = shape.hidden_size as f64;
        let heads = (shape.heads_per_rank(self.layout.tp) * shape.head_dim) as f64;
        let kv_heads = (shape.kv_heads_per_rank(self.layout.tp) * shape.head_dim) as f64;
        let features = match shape.mlp {
            Mlp::Dense { intermediate_size } => intermediate_size as f64,
            Mlp::Experts { experts_per_token, intermediate_size, shared_intermediate_size, .. } => {
                (experts_per_token * intermediate_size + shared_intermediate_size) as f64
            }
        } / tp;
        let elements = 8.0 * hidden + 2.0 * (heads + 2.0 * kv_heads) + 2.0 * heads + 3.0 * features;
        let mut bytes = elements * self.device.activation_bytes();
        if self.weights.arithmetic == Arithmetic::Fp8 && self.device.has_fp8() {
            bytes += 3.0 * (2.0 * hidden + heads + features);
        }
        SMALL_KERNELS * self.device.efficiency.kernel_s + tokens * bytes / self.device.read_bytes_per_s()
    }

    /// Final norm, head, gathering of logits, sampling and the scheduler's share.
    fn head(&self, stage: usize, work: &Work) -> Seconds {
        let efficiency = &self.device.efficiency;
        let rows = work.sampled as f64;
        if work.sampled == 0 {
            return Seconds::default();
        }
        let own_rows = self.shape.vocabulary_rows_per_rank(self.layout.tp);
        let parameters = (own_rows * self.shape.hidden_size) as u64;
        let bytes = self.weights.vocabulary_bytes(parameters) as f64;
        let is_gathered = self.shape.gathers_logits(self.layout.tp);
        let logits = rows * self.shape.vocab_size as f64;
        Seconds {
            products_s: self.product(parameters as f64, bytes, rows, self.weights.vocabulary_arithmetic()),
            attention_s: 0.0,
            other_s: 2.0 * efficiency.kernel_s
                + logits * LOGIT_BYTES / self.device.read_bytes_per_s()
                + rows * efficiency.sequence_s,
            collectives_s: if is_gathered { self.traffic().all_gather_s(stage, logits * 4.0) } else { 0.0 },
        }
    }
}

/// Pairs of a new position and a position that it sees, itself included, when each sees at most `window`.
fn pairs(past: usize, new_tokens: usize, window: usize) -> f64 {
    // The first `growing` new positions see everything before them.
    let growing = new_tokens.min(window.saturating_sub(past));
    let (past, growing_f) = (past as f64, growing as f64);
    let full = growing_f * past + growing_f * (growing_f + 1.0) / 2.0;
    let rest = new_tokens - growing;
    if rest == 0 { full } else { full + rest as f64 * window as f64 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::known;

    #[test]
    fn pairs_are_counted_as_one_by_one() {
        for past in [0usize, 1, 5, 40] {
            for new_tokens in [1usize, 2, 7, 33] {
                for window in [1usize, 4, 16, 1000, usize::MAX] {
                    let counted: usize = (past + 1..=past + new_tokens).map(|seen| seen.min(window)).sum();
                    let found = pairs(past, new_tokens, window);
                    assert!((found - counted as f64).abs() < 1e-9, "{past} {new_tokens} {window}: {found} {counted}");
                }
            }
        }
    }

    #[test]
    fn a_product_is_bound_by_bytes_or_by_operations() {
        let shape = known::shape("llama-3.1-8b").unwrap();
        let weights = WeightType::named("bf16").unwrap();
        let device = Device::named("h200").unwrap();
        let layout = Layout::new(&shape, &weights, 1, 1, 8).unwrap();
        let roofline = Roofline { shape: &shape, weights: &weights, kv: KvType::F16, device: &device, layout: &layout };
        let bytes_s = 2e9 / (4.8e12 * 0.93);
        let near = |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 1e-9, "{found} {expected}");
        near(roofline.layer_product(1e9, 1.0), 5.5e-6 + bytes_s);
        near(roofline.layer_product(1e9, 100.0), 5.5e-6 + bytes_s);
        near(roofline.layer_product(1e9, 1000.0), 5.5e-6 + 2e12 / (989.4e12 * 0.68));
    }

    #[test]
    fn of_experts_only_the_visited_are_read() {
        let shape = known::shape("qwen3-30b-a3b").unwrap();
        let weights = WeightType::named("bf16").unwrap();
        let device = Device::named("h200").unwrap();
        let layout = Layout::new(&shape, &weights, 1, 1, 8).unwrap();
        let roofline = Roofline { shape: &shape, weights: &weights, kv: KvType::F16, device: &device, layout: &layout };
        let read_s = |tokens: f64| roofline.mlp_products(tokens) - 3.0 * 5.5e-6;
        // One token reads the router and 8 of 128 experts; very many read all of them.
        let expert = 3.0 * 2048.0 * 768.0 * 2.0;
        let by_hand = |experts: f64| (experts * expert + 2048.0 * 128.0 * 2.0) / (4.8e12 * 0.93);
        assert!((read_s(1.0) / by_hand(8.0) - 1.0).abs() < 1e-6);
        assert!((read_s(200.0) / by_hand(128.0) - 1.0).abs() < 1e-3, "{} {}", read_s(200.0), by_hand(128.0));
    }
}
