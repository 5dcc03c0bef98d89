//! Seconds of whole steps: stages one after another, micro-batches between them, and the time that stages idle.
//! Decides how many micro-batches are predicted to be best.
//!
//! Decoding with `m` micro-batches in flight: each token of a sequence needs the token before it, so a micro-batch
//! comes round once in `max(m × slowest stage, way through all stages and back)`. A lone prompt in `c` chunks: the
//! classic fill and drain, in which a share `(p − 1) / (c + p − 1)` of equal stages idles (Huang et al. 2019).

use crate::roofline::{Roofline, Seconds, Work};
use crate::traffic::Traffic;
use crate::{DecoderShape, Device, KvType, Layout, WeightType};
use serde::Serialize;

/// Micro-batches that the engine begins with, where there are several stages.
pub const MICRO_BATCHES_START: usize = 4;

/// Micro-batches at most.
pub const MICRO_BATCHES_MOST: usize = 64;

/// A further micro-batch must raise the throughput by this much to be kept.
const WORTH_IT: f64 = 1.01;

/// Chunks of a prompt that are worked out one by one; of more, as many are taken evenly and scaled up.
const CHUNKS_WORKED_OUT: usize = 256;

/// One token for each of `batch` sequences.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DecodeStep {
    /// Sequences.
    pub batch: usize,
    /// Tokens in the cache of each.
    pub context_tokens: usize,
    /// Micro-batches in flight.
    pub micro_batches: usize,
    /// Seconds between two tokens of a request.
    pub step_s: f64,
    /// Tokens a second of one request.
    pub tokens_per_s_per_request: f64,
    /// Tokens a second of all.
    pub tokens_per_s: f64,
    /// Share of the stages' time in which they wait.
    pub bubble_share: f64,
    /// The way of one micro-batch through all stages, without the sends.
    pub way: Seconds,
    /// Seconds of the sends on that way, the token's return included.
    pub sends_s: f64,
}

/// Prompts, chunk after chunk, with nothing else running.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prefill {
    /// Prompts.
    pub prompts: usize,
    /// Tokens of each.
    pub prompt_tokens: usize,
    /// Tokens of a chunk at most.
    pub chunk_tokens: usize,
    /// Steps.
    pub chunks: usize,
    /// Seconds until the last prompt's first token.
    pub seconds: f64,
    /// Prompt tokens a second.
    pub tokens_per_s: f64,
    /// Share of the stages' time in which they wait.
    pub bubble_share: f64,
}

/// Predicts times of one model on one layout of one device.
#[derive(Clone, Copy, Debug)]
pub struct Predictor<'a> {
    /// The model.
    pub shape: &'a DecoderShape,
    /// Stored how.
    pub weights: &'a WeightType,
    /// KV stored how.
    pub kv: KvType,
    /// Where.
    pub device: &'a Device,
    /// Cut how.
    pub layout: &'a Layout,
}

impl Predictor<'_> {
    fn roofline(&self) -> Roofline<'_> {
        let Self { shape, weights, kv, device, layout } = *self;
        Roofline { shape, weights, kv, device, layout }
    }

    /// Bytes of the hidden states of `tokens` tokens.
    fn hidden_bytes(&self, tokens: usize) -> f64 {
        tokens as f64 * self.shape.hidden_size as f64 * self.device.activation_bytes()
    }

    /// Seconds of the sends between all stages.
    fn sends_s(&self, tokens: usize) -> f64 {
        let traffic = Traffic { device: self.device, layout: self.layout };
        (0..self.layout.pp - 1).map(|stage| traffic.send_s(stage, self.hidden_bytes(tokens))).sum()
    }

    /// A step of `batch` sequences (at least 1) with `context` tokens each, cut into `micro_batches` (at most one a
    /// sequence; one where there is one stage).
    #[must_use]
    pub fn decode(&self, batch: usize, context: usize, micro_batches: usize) -> DecodeStep {
        let batch = batch.max(1);
        let micro_batches = if self.layout.pp == 1 { 1 } else { micro_batches.clamp(1, batch) };
        let sequences = batch.div_ceil(micro_batches);
        let work = Work { sequences, new_tokens: 1, past: context.saturating_sub(1), sampled: sequences };
        let (mut way, mut slowest) = (Seconds::default(), 0.0f64);
        for stage in 0..self.layout.pp {
            let seconds = self.roofline().stage(stage, &work);
            slowest = slowest.max(seconds.total());
            way.add(&seconds);
        }
        let traffic = Traffic { device: self.device, layout: self.layout };
        let sends_s = self.sends_s(sequences) + traffic.send_s(self.layout.pp - 1, 4.0 * sequences as f64);
        let in_flight = micro_batches as f64;
        let step_s = (in_flight * slowest).max(way.total() + sends_s);
        DecodeStep {
            batch,
            context_tokens: context,
            micro_batches,
            step_s,
            tokens_per_s_per_request: 1.0 / step_s,
            tokens_per_s: batch as f64 / step_s,
            bubble_share: (1.0 - in_flight * way.total() / (self.layout.pp as f64 * step_s)).max(0.0),
            way,
            sends_s,
        }
    }

    /// `prompts` prompts of `prompt` tokens in chunks of at most `chunk`, with nothing else running. Short prompts
    /// share a chunk.
    #[must_use]
    pub fn prefill(&self, prompts: usize, prompt: usize, chunk: usize) -> Prefill {
        let (prompts, prompt, chunk) = (prompts.max(1), prompt.max(1), chunk.max(1));
        let together = (chunk / prompt).clamp(1, prompts);
        let chunks_each = prompt.div_ceil(chunk);
        let rounds = prompts.div_ceil(together);
        let worked_out = chunks_each.min(CHUNKS_WORKED_OUT);
        let (mut busy, mut slowest_sum, mut last) = (0.0, 0.0, (0.0, 0.0));
        for i in 0..worked_out {
            // Evenly from the first chunk to the last.
            let index = if worked_out == 1 { 0 } else { i * (chunks_each - 1) / (worked_out - 1) };
            let past = index * chunk;
            let is_last = index + 1 == chunks_each;
            let work = Work {
                sequences: together,
                new_tokens: chunk.min(prompt - past),
                past,
                sampled: if is_last { together } else { 0 },
            };
            let stages: Vec<f64> =
                (0..self.layout.pp).map(|stage| self.roofline().stage(stage, &work).total()).collect();
            let (way, slowest) = (stages.iter().sum::<f64>(), stages.iter().copied().fold(0.0, f64::max));
            busy += way;
            slowest_sum += slowest;
            last = (way, slowest);
        }
        let scale = rounds as f64 * chunks_each as f64 / worked_out as f64;
        let seconds = slowest_sum * scale + (last.0 - last.1) + self.sends_s(together * chunk.min(prompt));
        Prefill {
            prompts,
            prompt_tokens: prompt,
            chunk_tokens: chunk,
            chunks: rounds * chunks_each,
            seconds,
            tokens_per_s: prompts as f64 * prompt as f64 / seconds,
            bubble_share: (1.0 - busy * scale / (self.layout.pp as f64 * seconds)).max(0.0),
        }
    }

    /// The number that the engine's rule settles on: from 4 (or the stages, if more) upward, as long as one more
    /// raises the throughput.
    #[must_use]
    pub fn choose_micro_batches(&self, batch: usize, context: usize) -> usize {
        if self.layout.pp == 1 {
            return 1;
        }
        let most = MICRO_BATCHES_MOST.max(self.layout.pp).min(batch.max(1));
        let throughput = |micro_batches: usize| self.decode(batch, context, micro_batches).tokens_per_s;
        let mut chosen = MICRO_BATCHES_START.max(self.layout.pp).min(most);
        while chosen < most && throughput(chosen + 1) > WORTH_IT * throughput(chosen) {
            chosen += 1;
        }
        chosen
    }

    /// The most sequences in one step for which every request still gets `tokens_per_s`, at most `most`; `micro_batches`
    /// as given or as the engine's rule picks them.
    #[must_use]
    pub fn largest_batch(
        &self,
        tokens_per_s: f64,
        context: usize,
        most: usize,
        micro_batches: Option<usize>,
    ) -> Option<DecodeStep> {
        (1..=most)
            .rev()
            .map(|batch| {
                let micro_batches = micro_batches.unwrap_or_else(|| self.choose_micro_batches(batch, context));
                self.decode(batch, context, micro_batches)
            })
            .find(|step| step.tokens_per_s_per_request >= tokens_per_s)
    }
}
