//! Rope, and attention over the paged cache. Decides where a layer's K and V go; the pool and the
//! tables come with the step.

use super::{HeadNorm, LayerReader, StepContext};
use crate::rope::RopeSettings;
use crate::{KvKind, ModelError};
use pagemill_backend::{AttentionParams, HeadTransform, Qkv, RopeStyle, RopeTable, Tensor};

/// Rotary position embedding of one layer.
pub(crate) struct Rope {
    table: RopeTable,
}

impl Rope {
    /// The table of `settings`, with the file's own divisors where it has them.
    pub(crate) fn load(layer: &LayerReader<'_>, settings: &RopeSettings, style: RopeStyle) -> Result<Self, ModelError> {
        let divisors = layer.weights.rope_divisors(settings.rotary_dim / 2)?;
        Ok(Self { table: settings.table(style, divisors.as_deref()) })
    }

    /// The table of `settings` alone.
    pub(crate) fn from_settings(settings: &RopeSettings, style: RopeStyle) -> Self {
        Self { table: settings.table(style, None) }
    }

    /// Turns heads as they are.
    pub(crate) fn of_heads(&self) -> HeadTransform<'_> {
        HeadTransform { q_norm: None, k_norm: None, rope: &self.table }
    }

    /// Turns heads of q and k after their norms.
    pub(crate) fn of_normed_heads<'a>(&'a self, q_norm: &'a HeadNorm, k_norm: &'a HeadNorm) -> HeadTransform<'a> {
        HeadTransform { q_norm: Some(q_norm.params()), k_norm: Some(k_norm.params()), rope: &self.table }
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
        let shard = layer.weights.shard();
        let uncut = |error| layer.weights.uncut(layer.module("self_attn.q_proj"), &error);
        let heads = shard.heads(spec.num_heads, spec.num_kv_heads).map_err(uncut)?;
        let window = match layer.kind() {
            KvKind::Full => None,
            KvKind::SlidingWindow { window } => Some(window),
        };
        Ok(Self {
            params: AttentionParams {
                num_heads: heads.heads.len(),
                num_kv_heads: heads.kv_heads.len(),
                num_kv_heads_max: shard.most_kv_heads(spec.num_kv_heads),
                head_dim: spec.head_dim,
                scale,
                window,
                soft_cap: None,
                sinks: None,
                group_idx: layer.place.group_idx,
                layer_in_group: layer.place.layer_in_group,
            },
        })
    }

    /// Norms and turns q and k as `transform` says, and writes k and v to the cache; gives q `[T, H * E]`.
    pub(crate) fn write_kv(
        &self,
        cx: &mut StepContext<'_>,
        qkv: Qkv,
        transform: &HeadTransform<'_>,
    ) -> Result<Tensor, ModelError> {
        Ok(cx.rank.backend.rope_kv_write(qkv, transform, &self.params, cx.batch, cx.kv)?)
    }

    /// Reads the cache with q `[T, H * E]`; gives as much.
    pub(crate) fn forward(&self, cx: &StepContext<'_>, q: Tensor) -> Result<Tensor, ModelError> {
        let backend = cx.backend();
        let mut out = backend.activation(q.rows(), q.cols())?;
        backend.attention(&q, &self.params, cx.batch, cx.kv, &mut out)?;
        Ok(out)
    }
}
