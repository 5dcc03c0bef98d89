//! Rope, and attention over the paged cache. Decides where a layer's K and V go; the pool and the
//! tables come with the step.

use super::{LayerReader, StepContext};
use crate::rope::RopeSettings;
use crate::{KvKind, ModelError};
use pagemill_backend::{AttentionParams, RopeStyle, RopeTable, Tensor};

/// Rotary position embedding of one layer.
pub(crate) struct Rope {
    table: RopeTable,
    head_dim: usize,
}

impl Rope {
    /// The table of `settings`, with the file's own divisors where it has them.
    pub(crate) fn load(layer: &LayerReader<'_>, settings: &RopeSettings, style: RopeStyle) -> Result<Self, ModelError> {
        let divisors = layer.weights.rope_divisors(settings.rotary_dim / 2)?;
        Ok(Self { table: settings.table(style, divisors.as_deref()), head_dim: layer.spec.head_dim })
    }

    /// The table of `settings` alone.
    pub(crate) fn from_settings(layer: &LayerReader<'_>, settings: &RopeSettings, style: RopeStyle) -> Self {
        Self { table: settings.table(style, None), head_dim: layer.spec.head_dim }
    }

    /// Turns q `[T, H * E]` and k `[T, K * E]` by their positions.
    pub(crate) fn forward(
        &self,
        cx: &StepContext<'_>,
        mut q: Tensor,
        mut k: Tensor,
    ) -> Result<(Tensor, Tensor), ModelError> {
        cx.backend().rope(&mut q, self.head_dim, &self.table, cx.batch)?;
        cx.backend().rope(&mut k, self.head_dim, &self.table, cx.batch)?;
        Ok((q, k))
    }
}

/// Causal attention of one layer over the KV blocks where they lie.
pub(crate) struct PagedAttention {
    params: AttentionParams,
}

impl PagedAttention {
    /// Attention of this rank's heads; `scale` multiplies q·k.
    pub(crate) fn load(layer: &LayerReader<'_>, scale: f32) -> Result<Self, ModelError> {
        let spec = layer.spec;
        let heads = layer
            .weights
            .shard()
            .heads(spec.num_heads, spec.num_kv_heads)
            .map_err(|error| layer.weights.uncut(layer.module("self_attn.q_proj"), &error))?;
        let window = match layer.kind() {
            KvKind::Full => None,
            KvKind::SlidingWindow { window } => Some(window),
        };
        Ok(Self {
            params: AttentionParams {
                num_heads: heads.heads.len(),
                num_kv_heads: heads.kv_heads.len(),
                head_dim: spec.head_dim,
                scale,
                window,
                group_idx: layer.place.group_idx,
                layer_in_group: layer.place.layer_in_group,
            },
        })
    }

    /// Writes k and v `[T, K * E]` to the cache, then reads it with q `[T, H * E]`; gives `[T, H * E]`.
    pub(crate) fn forward(
        &self,
        cx: &mut StepContext<'_>,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> Result<Tensor, ModelError> {
        let backend = cx.rank.backend.as_ref();
        backend.kv_write(k, v, &self.params, cx.batch, cx.kv)?;
        let mut out = backend.activation(q.rows(), q.cols())?;
        backend.attention(q, &self.params, cx.batch, cx.kv, &mut out)?;
        Ok(out)
    }
}
