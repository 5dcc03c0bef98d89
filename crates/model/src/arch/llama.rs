//! Llama (arXiv 2302.13971, 2307.09288, 2407.21783): pre-norm decoder, grouped-query attention, rotary
//! positions, SiLU-gated MLP. The architecture that the others are told apart from.
//!
//! Config fields beyond the shapes: `attention_bias` (q, k, v and o), `mlp_bias`, rope of type default,
//! linear, llama3 or yarn. GGUF files hold q and k with each head's halves interleaved, state biases
//! only by their tensors, and also come from Mistral models.
//!
//! Shape letters: `T` tokens, `D` hidden size, `H` query heads, `K` KV heads, `E` head size.

use crate::ModelError;
use crate::config::{Dialect, RawConfig};
use crate::decoder::{Architecture, DecoderLayer, DecoderSpec};
use crate::layers::{
    GatedMlp, LayerReader, PagedAttention, QkvLinear, ResidualStream, RmsNorm, Rope, RowLinear, StepContext,
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
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    intermediate_size: usize,
    vocab_size: usize,
    max_position_embeddings: usize,
    rms_norm_eps: f32,
    hidden_act: Option<String>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    tie_word_embeddings: bool,
}

/// A Llama, and what its layers are built from; Mistral and Qwen 2 build the same layers.
pub(super) struct Llama {
    pub spec: DecoderSpec,
    pub rope: RopeSettings,
    pub rope_style: RopeStyle,
    pub activation: Activation,
    pub qkv_bias: Bias,
    pub output_bias: Bias,
    pub mlp_bias: Bias,
}

impl Architecture for Llama {
    type Layer = Layer;
    const NAMES: &'static NameTable = &names::LLAMA;

    fn read(raw: &RawConfig) -> Result<Self, ModelError> {
        let config: Config = raw.read()?;
        let head_dim = config.head_dim.unwrap_or(config.hidden_size / config.num_attention_heads.max(1));
        let (rope_style, bias): (_, fn(bool) -> Bias) = match raw.dialect() {
            Dialect::HuggingFace => (RopeStyle::Half, |stated| if stated { Bias::Required } else { Bias::None }),
            Dialect::Gguf => (RopeStyle::Interleaved, |_| Bias::AsStored),
        };
        let activation = raw.activation("hidden_act", config.hidden_act.as_deref().unwrap_or("silu"))?;
        Ok(Self {
            rope: raw.rope(head_dim, 10_000.0)?,
            rope_style,
            activation,
            qkv_bias: bias(config.attention_bias),
            output_bias: bias(config.attention_bias),
            mlp_bias: bias(config.mlp_bias),
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
                layer_kinds: raw.full_layers(config.num_hidden_layers)?,
            },
        })
    }

    fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    fn load_layer(&self, layer: &LayerReader<'_>) -> Result<Layer, ModelError> {
        Layer::load(self, layer)
    }
}

/// One layer.
pub(super) struct Layer {
    input_norm: RmsNorm,
    qkv: QkvLinear,
    rope: Rope,
    attention: PagedAttention,
    output: RowLinear,
    mlp_norm: RmsNorm,
    mlp: GatedMlp,
}

impl Layer {
    pub(super) fn load(llama: &Llama, layer: &LayerReader<'_>) -> Result<Self, ModelError> {
        Ok(Self {
            input_norm: RmsNorm::load(layer, "input_layernorm")?,
            qkv: QkvLinear::load(layer, llama.qkv_bias)?,
            rope: Rope::load(layer, &llama.rope, llama.rope_style)?,
            attention: PagedAttention::load(layer, (llama.spec.head_dim as f32).powf(-0.5))?,
            output: RowLinear::load_attention_output(layer, llama.output_bias)?,
            mlp_norm: RmsNorm::load(layer, "post_attention_layernorm")?,
            mlp: GatedMlp::load(layer, llama.activation, llama.mlp_bias)?,
        })
    }
}

impl DecoderLayer for Layer {
    fn write_kv(&self, cx: &mut StepContext<'_>, stream: &mut ResidualStream<'_>) -> Result<Tensor, ModelError> {
        let x = stream.normed(cx, &self.input_norm)?; // [T, D]
        let qkv = self.qkv.forward(cx, x)?; // [T, H * E], [T, K * E], [T, K * E]
        let heads = self.rope.of_heads();
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
