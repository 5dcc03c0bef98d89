//! Mistral 7B (arXiv 2310.06825): Llama without biases, with a sliding window in every layer: position
//! `p` sees `(p - sliding_window, p]`. A null `sliding_window` (since v0.2) means full attention.
//!
//! GGUF files of Mistral call themselves `llama` and state no window.

use super::llama::{Layer, Llama};
use crate::ModelError;
use crate::config::RawConfig;
use crate::decoder::{Architecture, DecoderSpec};
use crate::layers::LayerReader;
use crate::names::{self, NameTable};
use crate::weights::Bias;
use pagemill_backend::RopeStyle;
use serde::Deserialize;

#[derive(Deserialize)]
struct Config {
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    intermediate_size: usize,
    vocab_size: usize,
    max_position_embeddings: usize,
    rms_norm_eps: f32,
    hidden_act: Option<String>,
    sliding_window: Option<usize>,
    layer_types: Option<Vec<String>>,
    #[serde(default)]
    tie_word_embeddings: bool,
}

/// A Mistral.
pub(super) struct Mistral(Llama);

impl Architecture for Mistral {
    type Layer = Layer;
    const NAMES: &'static NameTable = &names::LLAMA;

    fn read(raw: &RawConfig) -> Result<Self, ModelError> {
        let config: Config = raw.read()?;
        let head_dim = config.head_dim.unwrap_or(config.hidden_size / config.num_attention_heads.max(1));
        let window = config.sliding_window;
        Ok(Self(Llama {
            rope: raw.rope(head_dim, 10_000.0)?,
            rope_style: RopeStyle::Half,
            activation: raw.activation("hidden_act", config.hidden_act.as_deref().unwrap_or("silu"))?,
            qkv_bias: Bias::None,
            output_bias: Bias::None,
            mlp_bias: Bias::None,
            spec: DecoderSpec {
                hidden_size: config.hidden_size,
                num_heads: config.num_attention_heads,
                num_kv_heads: config.num_key_value_heads.unwrap_or(config.num_attention_heads),
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
                    |_| window.is_some(),
                )?,
            },
        }))
    }

    fn spec(&self) -> &DecoderSpec {
        &self.0.spec
    }

    fn load_layer(&self, layer: &LayerReader<'_>) -> Result<Layer, ModelError> {
        Layer::load(&self.0, layer)
    }
}
