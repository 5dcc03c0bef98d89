//! A checkpoint's configuration as one map of fields under transformers' names, whichever file it came
//! from, and the reader that turns it into an architecture's `Config`. Decides which fields are known;
//! knows no architecture.
//!
//! A field that changes the maths and is not understood is an error: an architecture's `Config` lists
//! what it reads, [`HARMLESS`] what no architecture need read, and anything else must be absent, null,
//! false, 0 or empty.

mod gguf;
mod rope;

use crate::{KvKind, ModelError};
use pagemill_backend::Activation;
use pagemill_formats::hf::HfConfig;
use rope::RawRope;
use serde::Deserialize;
use serde::de::value::MapDeserializer;
use serde::de::{Deserializer, Visitor};
use serde_json::{Map, Value};
use std::cell::Cell;

/// Who wrote the checkpoint: decides spelling and layout conventions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// config.json and safetensors.
    HuggingFace,
    /// A GGUF file.
    Gguf,
}

/// Fields that describe training, generation defaults or the file itself, never the forward pass.
const HARMLESS: &[&str] = &[
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_implementation",
    "do_sample",
    "dtype",
    "eos_token_id",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "label2id",
    "max_length",
    "max_new_tokens",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "repetition_penalty",
    "return_dict",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "use_cache",
];

/// Fields that the rope reader reads for every architecture.
const ROPE_FIELDS: &[&str] =
    &["partial_rotary_factor", "rope_local_base_freq", "rope_parameters", "rope_scaling", "rope_theta"];

/// The greatest size (layers, features, heads, rows, positions) that a configuration may state. Keeps
/// every product of two sizes inside u64 and refuses nonsense early.
const MAX_SIZE: usize = 1 << 31;

/// A configuration's fields, before an architecture has read them.
pub(crate) struct RawConfig {
    path: String,
    dialect: Dialect,
    architecture: String,
    /// Tensors in the checkpoint: no model has more layers.
    num_tensors: usize,
    /// Under transformers' names; null fields are left out.
    fields: Map<String, Value>,
    rope: RawRope,
}

impl RawConfig {
    /// Wraps a config.json; `num_tensors` bounds the layers.
    pub(crate) fn from_hf(architecture: String, config: &HfConfig, num_tensors: usize) -> Self {
        let fields = config.fields().raw().iter().filter(|(_, value)| !value.is_null());
        Self {
            path: config.fields().file().display().to_string(),
            dialect: Dialect::HuggingFace,
            architecture,
            num_tensors,
            fields: fields.map(|(key, value)| (key.clone(), value.clone())).collect(),
            rope: RawRope::from(&config.rope),
        }
    }

    /// Who wrote the file.
    pub(crate) fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// The file, for messages.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// As the checkpoint spells it.
    pub(crate) fn architecture(&self) -> &str {
        &self.architecture
    }

    /// A field's value, if it is there and not null.
    pub(crate) fn get(&self, field: &str) -> Option<&Value> {
        self.fields.get(field)
    }

    /// Reads an architecture's `Config` and refuses every field it does not read.
    ///
    /// # Errors
    /// A field is missing, has the wrong type, or is unknown; the error names it.
    pub(crate) fn read<'a, T: Deserialize<'a>>(&'a self) -> Result<T, ModelError> {
        let (known, last_key) = (Cell::new(&[][..]), Cell::new(""));
        let reader = FieldReader { fields: &self.fields, known: &known, last_key: &last_key };
        let config = T::deserialize(reader).map_err(|error| {
            let detail = error.to_string();
            match missing_field(&detail) {
                Some(field) => self.bad(field, "missing"),
                None => self.bad(last_key.get(), &detail),
            }
        })?;
        let is_known = |field: &str| [known.get(), HARMLESS, ROPE_FIELDS].iter().any(|list| list.contains(&field));
        match self.fields.iter().find(|(field, value)| !is_known(field) && !is_off(value)) {
            Some((field, value)) => {
                Err(self.unsupported(field, value, "the field is not understood and may change the result"))
            }
            None => Ok(config),
        }
    }

    /// An error for a value that is understood but not computed. `value` is shortened.
    pub(crate) fn unsupported(&self, field: &str, value: &dyn std::fmt::Display, detail: &str) -> ModelError {
        ModelError::UnsupportedField {
            path: self.path.clone(),
            field: self.spelled(field),
            value: shortened(&value.to_string()),
            detail: detail.into(),
        }
    }

    /// An error for a field that is missing or makes no sense.
    pub(crate) fn bad(&self, field: &str, detail: &str) -> ModelError {
        ModelError::BadField { path: self.path.clone(), field: self.spelled(field), detail: shortened(detail) }
    }

    /// A field's name as this file spells it.
    fn spelled(&self, field: &str) -> String {
        match self.dialect {
            Dialect::HuggingFace => field.into(),
            Dialect::Gguf => gguf::spelled(&self.architecture, field),
        }
    }

    /// The gate's activation by transformers' name.
    pub(crate) fn activation(&self, field: &str, name: &str) -> Result<Activation, ModelError> {
        match name {
            "silu" | "swish" => Ok(Activation::Silu),
            "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
            _ => Err(self.unsupported(field, &name, "supported activations are silu and gelu_pytorch_tanh")),
        }
    }

    /// The kind of every layer where all keep every position.
    pub(crate) fn full_layers(&self, num_layers: usize) -> Result<Vec<KvKind>, ModelError> {
        self.layer_kinds(num_layers, None, None, |_| false)
    }

    /// The kind of every layer: by `layer_types` where the file has them, else by `is_sliding`.
    pub(crate) fn layer_kinds(
        &self,
        num_layers: usize,
        layer_types: Option<&[String]>,
        window: Option<usize>,
        is_sliding: impl Fn(usize) -> bool,
    ) -> Result<Vec<KvKind>, ModelError> {
        if num_layers == 0 || num_layers > self.num_tensors {
            let detail = format!("{num_layers} layers in a file of {} tensors", self.num_tensors);
            return Err(self.bad("num_hidden_layers", &detail));
        }
        if let Some(types) = layer_types
            && types.len() != num_layers
        {
            return Err(self.bad("layer_types", &format!("{} entries for {num_layers} layers", types.len())));
        }
        if window == Some(0) {
            return Err(self.bad("sliding_window", "must not be 0"));
        }
        (0..num_layers)
            .map(|layer| {
                let sliding = match layer_types.map(|types| types[layer].as_str()) {
                    Some("sliding_attention") => true,
                    Some("full_attention") => false,
                    Some(other) => {
                        let detail = "supported are full_attention and sliding_attention";
                        return Err(self.unsupported(&format!("layer_types[{layer}]"), &other, detail));
                    }
                    None => is_sliding(layer),
                };
                match (sliding, window) {
                    (false, _) => Ok(KvKind::Full),
                    (true, Some(window)) => Ok(KvKind::SlidingWindow { window }),
                    (true, None) => Err(self.bad("sliding_window", &format!("missing, but layer {layer} slides"))),
                }
            })
            .collect()
    }

    /// Refuses a size that is 0 or absurd.
    pub(crate) fn check_size(&self, field: &str, size: usize) -> Result<(), ModelError> {
        if size == 0 || size > MAX_SIZE {
            return Err(self.bad(field, &format!("{size} is outside 1..={MAX_SIZE}")));
        }
        Ok(())
    }
}

/// Whether an unknown field says "not used".
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::Bool(true) => false,
    }
}

/// The field that serde reports as missing.
fn missing_field(message: &str) -> Option<&str> {
    message.strip_prefix("missing field `")?.split('`').next()
}

/// Text from a file as it may be shown.
fn shortened(text: &str) -> String {
    const SHOWN_CHARS: usize = 120;
    let mut shown: String = text.chars().take(SHOWN_CHARS).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().nth(SHOWN_CHARS).is_some() {
        shown.push('…');
    }
    shown
}

/// Deserialises a struct from fields while noting which fields the struct has and which one is being
/// read, so that errors can name it.
struct FieldReader<'a, 'n> {
    fields: &'a Map<String, Value>,
    known: &'n Cell<&'static [&'static str]>,
    last_key: &'n Cell<&'a str>,
}

impl<'de> Deserializer<'de> for FieldReader<'de, '_> {
    type Error = serde_json::Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        self.known.set(fields);
        self.deserialize_any(visitor)
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        let entries = self.fields.iter().map(|(key, value)| {
            self.last_key.set(key);
            (key.as_str(), value)
        });
        visitor.visit_map(MapDeserializer::new(entries))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;
    use std::path::Path;

    /// The fields of a config.json given as a JSON object.
    pub(crate) fn raw(mut fields: Value) -> RawConfig {
        fields["model_type"] = "test".into();
        let config = HfConfig::parse(fields.to_string().as_bytes(), Path::new("config.json")).unwrap();
        RawConfig::from_hf("TestForCausalLM".into(), &config, 100)
    }

    #[derive(Debug, Deserialize)]
    struct Sample {
        hidden_size: usize,
        #[serde(default)]
        attention_bias: bool,
        window: Option<usize>,
    }

    fn check(fields: Value, expected: &str) {
        let error = raw(fields).read::<Sample>().unwrap_err().to_string();
        assert!(error.contains(expected), "expected {expected:?} in {error:?}");
    }

    #[test]
    fn known_harmless_and_switched_off_fields_pass() {
        let config = raw(json!({
            "hidden_size": 8, "window": null, "attention_bias": null, "torch_dtype": "bfloat16",
            "rope_theta": 1e4, "novel": false, "other": null, "list": [], "map": {}, "num_experts": 0
        }));
        let sample: Sample = config.read().unwrap();
        assert_eq!((sample.hidden_size, sample.attention_bias, sample.window), (8, false, None));
    }

    #[test]
    fn errors_name_the_field() {
        check(json!({}), "config.json: hidden_size: missing");
        check(json!({"hidden_size": "x"}), "config.json: hidden_size: invalid type: string");
        check(json!({"hidden_size": -1}), "config.json: hidden_size: ");
        check(json!({"hidden_size": 8, "attention_bias": 3}), "attention_bias: ");
        check(json!({"hidden_size": 8, "logit_scale": 0.5}), "logit_scale = 0.5 is not supported");
        check(json!({"hidden_size": 8, "quantization_config": {"bits": 4}}), "quantization_config = {\"bits\":4}");
        check(json!({"hidden_size": 8, "use_novel_norm": true}), "use_novel_norm = true");
    }

    #[test]
    fn layer_kinds_by_list_and_by_rule() {
        let config = raw(json!({}));
        let types = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let sliding = KvKind::SlidingWindow { window: 4 };
        let listed = types(&["sliding_attention", "full_attention"]);
        assert_eq!(config.layer_kinds(2, Some(&listed), Some(4), |_| false).unwrap(), [sliding, KvKind::Full]);
        assert_eq!(config.layer_kinds(2, None, Some(4), |i| i == 1).unwrap(), [KvKind::Full, sliding]);
        for (types, window, expected) in [
            (types(&["full_attention"]), None, "layer_types: 1 entries for 2 layers"),
            (types(&["full_attention", "chunked_attention"]), None, "layer_types[1] = chunked_attention"),
            (listed.clone(), None, "sliding_window: missing"),
            (listed.clone(), Some(0), "sliding_window: must not be 0"),
        ] {
            let error = config.layer_kinds(2, Some(&types), window, |_| false).unwrap_err().to_string();
            assert!(error.contains(expected), "expected {expected:?} in {error:?}");
        }
    }

    #[test]
    fn activations_by_name() {
        let config = raw(json!({}));
        assert_eq!(config.activation("hidden_act", "silu").unwrap(), Activation::Silu);
        assert_eq!(config.activation("hidden_act", "gelu_pytorch_tanh").unwrap(), Activation::GeluTanh);
        let error = config.activation("hidden_act", "relu2").unwrap_err().to_string();
        assert!(error.contains("hidden_act = relu2 is not supported"), "{error}");
    }
}
