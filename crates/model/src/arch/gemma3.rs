//! Gemma 3 (arXiv 2503.19786), text part: Llama with norms after as well as before both blocks, RMS
//! norms over each head of q and k, norm weights stored as `w` for a factor of `1 + w`, embeddings times
//! `sqrt(D)`, a tanh-GELU gate, and sliding layers with a rope of their own among the full ones.
//!
//! Refused: capped attention scores, bidirectional attention. GGUF files store `1 + w`, state neither
//! the pattern (every 6th layer is full) nor the sliding layers' rope base (10000), and leave the
//! attention scale to the size of the model.
//!
//! Shape letters: `T` tokens, `D` hidden size, `H` query heads, `K` KV heads, `E` head size.

use crate::config::{Dialect, RawConfig};
use crate::decoder::{Architecture, DecoderLayer, DecoderSpec};
use crate::layers::{
    GatedMlp, HeadNorm, LayerReader, PagedAttention, QkvLinear, ResidualStream, RmsNorm, Rope, RowLinear, StepContext,
};
use crate::names::{self, NameTable};
use crate::rope::{RopeScaling, RopeSettings};
use crate::weights::Bias;
use crate::{KvKind, ModelError};
use pagemill_backend::{Activation, LinearInput, RopeStyle, Tensor};
use serde::Deserialize;

/// What released files leave out has the default of transformers.
#[derive(Deserialize)]
struct Config {
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    intermediate_size: usize,
    vocab_size: Option<usize>,
    max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f32>,
    hidden_activation: Option<String>,
    query_pre_attn_scalar: Option<f32>,
    sliding_window: Option<usize>,
    sliding_window_pattern: Option<usize>,
    _sliding_window_pattern: Option<usize>,
    layer_types: Option<Vec<String>>,
    #[serde(default)]
    attention_bias: bool,
    final_logit_softcapping: Option<f32>,
    tie_word_embeddings: Option<bool>,
}

/// A Gemma 3.
pub(super) struct Gemma3 {
    spec: DecoderSpec,
    full_rope: RopeSettings,
    sliding_rope: RopeSettings,
    activation: Activation,
    attention_bias: Bias,
    attention_scale: f32,
}

impl Architecture for Gemma3 {
    type Layer = Layer;
    const NAMES: &'static NameTable = &names::GEMMA3;

    fn read(raw: &RawConfig) -> Result<Self, ModelError> {
        let config: Config = raw.read()?;
        let (head_dim, num_heads) = (config.head_dim.unwrap_or(256), config.num_attention_heads.unwrap_or(8));
        let query_scalar = config.query_pre_attn_scalar.unwrap_or(match raw.dialect() {
            Dialect::HuggingFace => 256.0,
            // Only the 27B model, known by its 62 layers, differs from its head size.
            Dialect::Gguf if config.num_hidden_layers == 62 => config.hidden_size as f32 / num_heads.max(1) as f32,
            Dialect::Gguf => head_dim as f32,
        });
        if !(query_scalar.is_finite() && query_scalar > 0.0) {
            return Err(raw.bad("query_pre_attn_scalar", &format!("{query_scalar} must be above 0")));
        }
        let pattern = config.sliding_window_pattern.or(config._sliding_window_pattern).unwrap_or(6);
        let window = Some(config.sliding_window.unwrap_or(4096));
        let is_sliding = |layer: usize| pattern == 0 || !(layer + 1).is_multiple_of(pattern);
        let full_rope = raw.rope_of("full_attention", head_dim, 1e6)?.map_or_else(|| raw.rope(head_dim, 1e6), Ok)?;
        let unscaled = RopeSettings { theta: 1e4, scaling: RopeScaling::Default, magnitude: 1.0, ..full_rope.clone() };
        let (layers, types) = (config.num_hidden_layers, config.layer_types.as_deref());
        let activation = config.hidden_activation.as_deref().unwrap_or("gelu_pytorch_tanh");
        Ok(Self {
            sliding_rope: raw.rope_of("sliding_attention", head_dim, 1e4)?.unwrap_or(unscaled),
            full_rope,
            activation: raw.activation("hidden_activation", activation)?,
            attention_bias: if config.attention_bias { Bias::Required } else { Bias::None },
            attention_scale: query_scalar.powf(-0.5),
            spec: DecoderSpec {
                hidden_size: config.hidden_size,
                num_heads,
                num_kv_heads: config.num_key_value_heads.unwrap_or(4),
                head_dim,
                intermediate_size: config.intermediate_size,
                vocab_size: config.vocab_size.unwrap_or(262_208),
                max_seq_len: config.max_position_embeddings.unwrap_or(131_072),
                tied_embeddings: config.tie_word_embeddings.unwrap_or(true),
                norm_eps: config.rms_norm_eps.unwrap_or(1e-6),
                norm_offset: if raw.dialect() == Dialect::Gguf { 0.0 } else { 1.0 },
                embedding_scale: (config.hidden_size as f32).sqrt(),
                final_soft_cap: config.final_logit_softcapping,
                layer_kinds: raw.layer_kinds(layers, types, window, is_sliding)?,
            },
        })
    }

    fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    fn load_layer(&self, layer: &LayerReader<'_>) -> Result<Layer, ModelError> {
        let rope = match layer.kind() {
            KvKind::Full => &self.full_rope,
            KvKind::SlidingWindow { .. } => &self.sliding_rope,
        };
        Ok(Layer {
            input_norm: RmsNorm::load(layer, "input_layernorm")?,
            qkv: QkvLinear::load(layer, self.attention_bias)?,
            q_norm: HeadNorm::load(layer, "self_attn.q_norm")?,
            k_norm: HeadNorm::load(layer, "self_attn.k_norm")?,
            rope: Rope::from_settings(rope, RopeStyle::Half),
            attention: PagedAttention::load(layer, self.attention_scale)?,
            output: RowLinear::load_attention_output(layer, self.attention_bias)?,
            attention_post_norm: RmsNorm::load(layer, "post_attention_layernorm")?,
            mlp_norm: RmsNorm::load(layer, "pre_feedforward_layernorm")?,
            mlp: GatedMlp::load(layer, self.activation, Bias::None)?,
            mlp_post_norm: RmsNorm::load(layer, "post_feedforward_layernorm")?,
        })
    }
}

/// One layer.
pub(super) struct Layer {
    input_norm: RmsNorm,
    qkv: QkvLinear,
    q_norm: HeadNorm,
    k_norm: HeadNorm,
    rope: Rope,
    attention: PagedAttention,
    output: RowLinear,
    attention_post_norm: RmsNorm,
    mlp_norm: RmsNorm,
    mlp: GatedMlp,
    mlp_post_norm: RmsNorm,
}

impl DecoderLayer for Layer {
    fn write_kv(&self, cx: &mut StepContext<'_>, stream: &mut ResidualStream<'_>) -> Result<Tensor, ModelError> {
        let x = stream.normed(cx, &self.input_norm)?; // [T, D]
        let qkv = self.qkv.forward(cx, x)?; // [T, H * E], [T, K * E], [T, K * E]
        let heads = self.rope.of_normed_heads(&self.q_norm, &self.k_norm);
        self.attention.write_kv(cx, qkv, &heads) // [T, H * E]; k and v are in the cache
    }

    fn attend<'m>(
        &'m self,
        cx: &StepContext<'_>,
        q: Tensor,
        stream: &mut ResidualStream<'m>,
    ) -> Result<(), ModelError> {
        let x = self.attention.forward(cx, q)?; // [T, H * E]
        let x = self.output.forward(cx, LinearInput::Plain(&x))?; // this rank's part of [T, D]
        stream.add_normed(cx, x, &self.attention_post_norm)?;
        let x = stream.normed(cx, &self.mlp_norm)?;
        let x = self.mlp.forward(cx, x)?; // this rank's part of [T, D]
        stream.add_normed(cx, x, &self.mlp_post_norm)
    }
}
