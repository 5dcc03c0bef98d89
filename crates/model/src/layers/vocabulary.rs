//! The two ends of a decoder: embedding in, logits out. Decides which stage holds which, whether they
//! share a weight, and how the vocabulary is cut: by rows, where they divide evenly over the ranks.

use crate::decoder::DecoderSpec;
use crate::holdings::Holdings;
use crate::weights::{Cut, Module, WeightReader};
use crate::{ModelError, RankContext};
use pagemill_backend::{BackendError, LinearInput, LinearPart, Tensor, Weight};
use std::ops::Range;
use std::sync::Arc;

/// Embedding and head, as far as this rank's stage holds them.
pub(crate) struct Vocabulary {
    /// This rank's rows; on the first stage.
    embedding: Option<Arc<Weight>>,
    /// This rank's rows; on the last stage. Where both ends are tied and here, the same weight.
    head: Option<Arc<Weight>>,
    /// Token ids whose rows this rank holds.
    rows: Range<usize>,
    vocab_size: usize,
    hidden_size: usize,
    embedding_scale: f32,
    soft_cap: Option<f32>,
}

impl Vocabulary {
    /// Reads what the stage needs of `model.embed_tokens` and, unless tied, `lm_head`.
    pub(crate) fn load(
        weights: &WeightReader<'_>,
        spec: &DecoderSpec,
        holdings: Holdings<'_>,
    ) -> Result<Self, ModelError> {
        let rows = own_rows(weights, spec.vocab_size);
        let load = |module| {
            let shape = [spec.vocab_size, spec.hidden_size];
            weights.matrix(Module::Outer(module), shape, &Cut::Rows(rows.clone())).map(Arc::new)
        };
        let table = holdings.has_embedding().then(|| load("model.embed_tokens")).transpose()?;
        let head = match (holdings.stage.is_last(), spec.tied_embeddings) {
            (false, _) => None,
            (true, true) => table.clone(),
            (true, false) => Some(load("lm_head")?),
        };
        Ok(Self {
            embedding: table.filter(|_| holdings.stage.is_first()),
            head,
            rows,
            vocab_size: spec.vocab_size,
            hidden_size: spec.hidden_size,
            embedding_scale: spec.embedding_scale,
            soft_cap: spec.final_soft_cap,
        })
    }

    /// Embeddings `[T, D]` of `ids`, the same on every rank.
    pub(crate) fn embed(&self, rank: &RankContext, ids: &[u32]) -> Result<Tensor, ModelError> {
        let embedding = self.embedding.as_ref().ok_or_else(|| not_here("embed", "the first stage"))?;
        let mut out = rank.backend.temp(ids.len(), self.hidden_size)?;
        if self.is_whole() {
            rank.backend.embed(embedding, ids, self.embedding_scale, &mut out)?;
            return Ok(out);
        }
        if let Some(id) = ids.iter().find(|&&id| id as usize >= self.vocab_size) {
            let expected = format!("token ids below {}", self.vocab_size);
            return Err(BackendError::Shape { op: "embed", expected, got: id.to_string() }.into());
        }
        // Each row is one rank's, and zero on all others: the sum is exact.
        rank.backend.embed_part(embedding, self.rows.start, ids, self.embedding_scale, &mut out)?;
        rank.collective.all_reduce(&mut out)?;
        Ok(out)
    }

    /// Logits `[R, V]` of `x` `[R, D]`, the same on every rank.
    pub(crate) fn logits(&self, rank: &RankContext, x: LinearInput<'_>) -> Result<Tensor, ModelError> {
        let head = self.head.as_deref().ok_or_else(|| not_here("logits", "the last stage"))?;
        let mut out = rank.backend.temp(x.rows(), head.rows())?;
        rank.backend.fused_linear(x, &mut [LinearPart { weight: head, bias: None, out: &mut out }])?;
        if !self.is_whole() {
            let mut gathered = rank.backend.temp(out.rows(), self.vocab_size)?;
            rank.collective.all_gather_cols(&out, &mut gathered)?;
            out = gathered;
        }
        if let Some(cap) = self.soft_cap {
            rank.backend.soft_cap(&mut out, cap)?;
        }
        Ok(out)
    }

    fn is_whole(&self) -> bool {
        self.rows.len() == self.vocab_size
    }
}

/// The error of asking a stage for what another holds: a fault of the caller's code.
fn not_here(op: &'static str, place: &str) -> ModelError {
    BackendError::Shape { op, expected: place.into(), got: "another stage".into() }.into()
}

/// This rank's rows of the vocabulary. All of them where the ranks' shares would differ: a gather needs
/// equal shares.
fn own_rows(weights: &WeightReader<'_>, vocab_size: usize) -> Range<usize> {
    let shard = weights.shard();
    match shard.features(vocab_size, 1) {
        Ok(rows) if vocab_size.is_multiple_of(shard.world_size) => rows,
        _ => 0..vocab_size,
    }
}
