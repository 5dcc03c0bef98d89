//! Qwen 3 (arXiv 2505.09388): Llama with an RMS norm over each head of q and k before the rotation, a
//! head size of its own, and no biases unless `attention_bias` says so. Windows as in Qwen 2.
//!
//! GGUF files keep each head's halves apart, as transformers does.
//!
//! Shape letters: `T` tokens, `D` hidden size, `H` query heads, `K` KV heads, `E` head size.

use crate::ModelError;
use crate::config::{Dialect, RawConfig};
use crate::decoder::{Architecture, DecoderLayer, DecoderSpec};
use crate::layers::{
    GatedMlp, HeadNorm, LayerReader, PagedAttention, QkvLinear, ResidualStream, RmsNorm, Rope, RowLinear, StepContext,
};
use crate::names::{self, NameTable};
use crate::rope::RopeSettings;
use crate::weights::Bias;
use pagemill_backend::{Activation, LinearInput, RopeStyle, Tensor};
use serde::Deserialize;

#[derive(Deserialize)]
struct Config {
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: Option<usize>,
    intermediate_size: usize,
    vocab_size: usize,
    max_position_embeddings: usize,
    rms_norm_eps: f32,
    hidden_act: Option<String>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    use_sliding_window: bool,
    sliding_window: Option<usize>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    #[serde(default)]
    tie_word_embeddings: bool,
}

/// A Qwen 3.
pub(super) struct Qwen3 {
    spec: DecoderSpec,
    rope: RopeSettings,
    activation: Activation,
    attention_bias: Bias,
}

impl Architecture for Qwen3 {
    type Layer = Layer;
    const NAMES: &'static NameTable = &names::LLAMA;

    fn read(raw: &RawConfig) -> Result<Self, ModelError> {
        let config: Config = raw.read()?;
        let head_dim = config.head_dim.unwrap_or(128);
        let window = config.sliding_window.filter(|_| config.use_sliding_window);
        let first_sliding = config.max_window_layers.unwrap_or(28);
        Ok(Self {
            rope: raw.rope(head_dim, 10_000.0)?,
            activation: raw.activation("hidden_act", config.hidden_act.as_deref().unwrap_or("silu"))?,
            attention_bias: match raw.dialect() {
                Dialect::Gguf => Bias::AsStored,
                Dialect::HuggingFace if config.attention_bias => Bias::Required,
                Dialect::HuggingFace => Bias::None,
            },
            spec: DecoderSpec {
                hidden_size: config.hidden_size,
                num_heads: config.num_attention_heads,
                num_kv_heads: config.num_key_value_heads,
                head_dim,
                intermediate_size: config.intermediate_size,
                vocab_size: config.vocab_size,
                max_seq_len: config.max_position_embeddings,
                tied_embeddings: config.tie_word_embeddings,
                norm_eps: config.rms_norm_eps,
                norm_offset: 0.0,
                embedding_scale: 1.0,
                final_soft_cap: None,
                layer_kinds: raw.layer_kinds(
                    config.num_hidden_layers,
                    config.layer_types.as_deref(),
                    window,
                    |layer| window.is_some() && layer >= first_sliding,
                )?,
            },
        })
    }

    fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    fn load_layer(&self, layer: &LayerReader<'_>) -> Result<Layer, ModelError> {
        Ok(Layer {
            input_norm: RmsNorm::load(layer, "input_layernorm")?,
            qkv: QkvLinear::load(layer, self.attention_bias)?,
            q_norm: HeadNorm::load(layer, "self_attn.q_norm")?,
            k_norm: HeadNorm::load(layer, "self_attn.k_norm")?,
            rope: Rope::load(layer, &self.rope, RopeStyle::Half)?,
            attention: PagedAttention::load(layer, (self.spec.head_dim as f32).powf(-0.5))?,
            output: RowLinear::load_attention_output(layer, self.attention_bias)?,
            mlp_norm: RmsNorm::load(layer, "post_attention_layernorm")?,
            mlp: GatedMlp::load(layer, self.activation, Bias::None)?,
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
    mlp_norm: RmsNorm,
    mlp: GatedMlp,
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
        stream.add(cx, x)?;
        let x = stream.normed(cx, &self.mlp_norm)?;
        let x = self.mlp.forward(cx, x)?; // this rank's part of [T, D]
        stream.add(cx, x)
    }
}
