//! The two ends of a decoder: embedding in, logits out. Decides whether they share a weight and how
//! the head is cut: a head of its own by rows, where they divide evenly over the ranks; a shared one
//! not at all.

use crate::decoder::DecoderSpec;
use crate::weights::{Cut, Module, WeightReader};
use crate::{ModelError, RankContext};
use pagemill_backend::{LinearInput, LinearPart, Tensor, Weight};

/// Embedding and head.
pub(crate) struct Vocabulary {
    embedding: Weight,
    /// `None`: the embedding is the head.
    head: Option<Weight>,
    embedding_scale: f32,
    soft_cap: Option<f32>,
}

impl Vocabulary {
    /// Reads `model.embed_tokens` and, unless tied, `lm_head`.
    pub(crate) fn load(weights: &WeightReader<'_>, spec: &DecoderSpec) -> Result<Self, ModelError> {
        let shape = [spec.vocab_size, spec.hidden_size];
        let embedding = weights.matrix(Module::Outer("model.embed_tokens"), shape, &Cut::Whole)?;
        let head = match spec.tied_embeddings {
            true => None,
            false => Some(weights.matrix(Module::Outer("lm_head"), shape, &head_cut(weights, spec.vocab_size))?),
        };
        Ok(Self { embedding, head, embedding_scale: spec.embedding_scale, soft_cap: spec.final_soft_cap })
    }

    /// Embeddings `[T, D]` of `ids`.
    pub(crate) fn embed(&self, rank: &RankContext, ids: &[u32]) -> Result<Tensor, ModelError> {
        let mut out = rank.backend.temp(ids.len(), self.embedding.cols())?;
        rank.backend.embed(&self.embedding, ids, self.embedding_scale, &mut out)?;
        Ok(out)
    }

    /// Logits `[R, V]` of `x` `[R, D]`, the same on every rank.
    pub(crate) fn logits(&self, rank: &RankContext, x: LinearInput<'_>) -> Result<Tensor, ModelError> {
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        let mut out = rank.backend.temp(x.rows(), head.rows())?;
        rank.backend.fused_linear(x, &mut [LinearPart { weight: head, bias: None, out: &mut out }])?;
        if head.rows() < self.embedding.rows() {
            let mut gathered = rank.backend.temp(out.rows(), self.embedding.rows())?;
            rank.collective.all_gather_cols(&out, &mut gathered)?;
            out = gathered;
        }
        if let Some(cap) = self.soft_cap {
            rank.backend.soft_cap(&mut out, cap)?;
        }
        Ok(out)
    }
}

/// This rank's rows of the head. All of them where the ranks' shares would differ: a gather needs
/// equal shares.
fn head_cut(weights: &WeightReader<'_>, vocab_size: usize) -> Cut {
    let shard = weights.shard();
    match shard.features(vocab_size, 1) {
        Ok(rows) if vocab_size.is_multiple_of(shard.world_size) => Cut::Rows(rows),
        _ => Cut::Whole,
    }
}
