//! GGUF metadata under transformers' field names, so that an architecture reads one `Config` whichever
//! file it came from. Decides which `{architecture}.*` keys are known; knows no architecture.

use super::rope::RawRope;
use super::{Dialect, RawConfig};
use crate::ModelError;
use pagemill_formats::gguf::{Array, Metadata, Value as GgufValue};
use pagemill_formats::{TensorInfo, Weights};
use serde_json::{Map, Number, Value};

/// Keys after `{architecture}.` and the fields they become; a dot descends into an object.
const FIELDS: &[(&str, &str)] = &[
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.sliding_window", "sliding_window"),
    ("attention.sliding_window_pattern", "sliding_window_pattern"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("block_count", "num_hidden_layers"),
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("rope.freq_base", "rope_parameters.rope_theta"),
    ("rope.freq_base_swa", "rope_local_base_freq"),
    ("rope.scaling.attn_factor", "rope_parameters.magnitude"),
    ("rope.scaling.factor", "rope_parameters.factor"),
    ("rope.scaling.finetuned", "rope_parameters.finetuned"),
    ("rope.scaling.original_context_length", "rope_parameters.original_max_position_embeddings"),
    ("rope.scaling.type", "rope_parameters.rope_type"),
    ("rope.scaling.yarn_attn_factor", "rope_parameters.magnitude"),
    ("rope.scaling.yarn_beta_fast", "rope_parameters.beta_fast"),
    ("rope.scaling.yarn_beta_slow", "rope_parameters.beta_slow"),
];

/// Keys that must be there: no architecture has a default for them.
const REQUIRED: &[&str] = &[
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
];

/// Keys that are read here or say nothing about the maths.
const READ_HERE: &[&str] =
    &["attention.value_length", "expert_used_count", "rope.dimension_count", "tensor_data_layout", "vocab_size"];

/// A field's key, for messages.
pub(super) fn spelled(architecture: &str, field: &str) -> String {
    let field = field.replace("rope_scaling.", "rope_parameters.");
    let key = match field.as_str() {
        "rope_theta" => Some("rope.freq_base"),
        "partial_rotary_factor" => Some("rope.dimension_count"),
        _ => FIELDS.iter().find(|(_, f)| *f == field).map(|(key, _)| *key),
    };
    match key {
        Some(key) => format!("{architecture}.{key}"),
        None => field,
    }
}

impl RawConfig {
    /// Reads the metadata of a GGUF file, and from its tensors what no key says: the vocabulary with its
    /// padding, and whether the head is the embedding.
    ///
    /// # Errors
    /// A key of the architecture is unknown, missing, or of the wrong type.
    pub(crate) fn from_gguf(architecture: String, metadata: &Metadata, weights: &Weights) -> Result<Self, ModelError> {
        let vocab_size = weights.get("token_embd.weight").map_or(0, TensorInfo::num_rows);
        let tied = weights.get("output.weight").is_none();
        let mut raw = Self {
            path: metadata.file().display().to_string(),
            dialect: Dialect::Gguf,
            architecture,
            num_tensors: weights.tensors().len(),
            fields: Map::from_iter([
                ("vocab_size".to_owned(), vocab_size.into()),
                ("tie_word_embeddings".to_owned(), tied.into()),
            ]),
            rope: RawRope::Uniform(Map::new()),
        };
        let prefix = format!("{}.", raw.architecture);
        let keys: Vec<(&str, &GgufValue)> =
            metadata.iter().filter_map(|(key, value)| Some((key.strip_prefix(&prefix)?, value))).collect();
        for key in REQUIRED {
            if !keys.iter().any(|(k, _)| k == key) {
                return Err(raw.bad(&format!("{prefix}{key}"), "missing"));
            }
        }
        for (key, value) in &keys {
            let value = raw.json(&format!("{prefix}{key}"), value)?;
            match FIELDS.iter().find(|(k, _)| k == key) {
                Some((_, field)) => insert(&mut raw.fields, field, value),
                None if READ_HERE.contains(key) => {}
                // Unknown fields are refused by the reader, unless they are switched off.
                None => insert(&mut raw.fields, &format!("{prefix}{key}"), value),
            }
        }
        raw.fill_heads(metadata, &prefix)?;
        raw.fill_layer_types();
        raw.split_rope();
        Ok(raw)
    }

    /// What GGUF leaves out of the heads' shape: transformers' defaults differ between architectures,
    /// GGUF's do not.
    fn fill_heads(&mut self, metadata: &Metadata, prefix: &str) -> Result<(), ModelError> {
        let heads = self.fields.get("num_attention_heads").and_then(Value::as_u64);
        let hidden = self.fields.get("hidden_size").and_then(Value::as_u64);
        let (Some(heads @ 1..), Some(hidden)) = (heads, hidden) else {
            return Err(self.bad("num_attention_heads", "must be one number above 0 for all layers"));
        };
        self.fields.entry("num_key_value_heads").or_insert_with(|| heads.into());
        let head_dim =
            self.fields.entry("head_dim").or_insert_with(|| (hidden / heads).into()).as_u64().unwrap_or_default();
        if let Some(value_dim) = metadata.get_u64(&format!("{prefix}attention.value_length"))?
            && value_dim != head_dim
        {
            let detail = format!("keys have {head_dim} elements; K and V must be alike");
            return Err(self.unsupported(&format!("{prefix}attention.value_length"), &value_dim, &detail));
        }
        if let Some(rotary) = metadata.get_u64(&format!("{prefix}rope.dimension_count"))?
            && rotary != head_dim
        {
            let partial = rotary as f64 / head_dim.max(1) as f64;
            insert(&mut self.fields, "partial_rotary_factor", partial.into());
        }
        Ok(())
    }

    /// A pattern given as one flag a layer becomes `layer_types`.
    fn fill_layer_types(&mut self) {
        let Some(Value::Array(flags)) = self.fields.get("sliding_window_pattern") else {
            return;
        };
        let name = |flag: &Value| match flag {
            Value::Bool(true) => "sliding_attention".into(),
            Value::Bool(false) => "full_attention".into(),
            other => other.clone(),
        };
        let types: Vec<Value> = flags.iter().map(name).collect();
        self.fields.remove("sliding_window_pattern");
        self.fields.insert("layer_types".into(), Value::Array(types));
    }

    /// Takes the rope settings out of the fields. A second base makes one set for each layer type; only
    /// the layers of full attention are stretched.
    fn split_rope(&mut self) {
        let mut uniform = match self.fields.remove("rope_parameters") {
            Some(Value::Object(map)) => map,
            _ => Map::new(),
        };
        if uniform.get("rope_type").is_some_and(|kind| kind == "none") {
            uniform.remove("rope_type");
        }
        self.rope = match self.fields.remove("rope_local_base_freq") {
            None => RawRope::Uniform(uniform),
            Some(theta) => RawRope::PerLayerType(vec![
                ("full_attention".into(), uniform),
                ("sliding_attention".into(), Map::from_iter([("rope_theta".to_owned(), theta)])),
            ]),
        };
    }

    /// A metadata value as JSON. Arrays that say the same for every layer become that one number.
    fn json(&self, key: &str, value: &GgufValue) -> Result<Value, ModelError> {
        let float = |x: f64| match Number::from_f64(x) {
            Some(number) => Ok(Value::Number(number)),
            None => Err(self.bad(key, &format!("{x} is no number"))),
        };
        Ok(match value {
            GgufValue::U8(x) => (*x).into(),
            GgufValue::I8(x) => (*x).into(),
            GgufValue::U16(x) => (*x).into(),
            GgufValue::I16(x) => (*x).into(),
            GgufValue::U32(x) => (*x).into(),
            GgufValue::I32(x) => (*x).into(),
            GgufValue::U64(x) => (*x).into(),
            GgufValue::I64(x) => (*x).into(),
            GgufValue::F32(x) => float(f64::from(*x))?,
            GgufValue::F64(x) => float(*x)?,
            GgufValue::Bool(x) => (*x).into(),
            GgufValue::String(x) => x.to_string().into(),
            GgufValue::Array(items) => match items.as_ref() {
                Array::Bool(flags) => flags.clone().into(),
                Array::U32(items) => uniform(items.iter().map(|x| i64::from(*x))),
                Array::I32(items) => uniform(items.iter().map(|x| i64::from(*x))),
                other => return Err(self.unsupported(key, &format!("array of {}", other.len()), "not understood")),
            },
        })
    }
}

/// One number where all are equal, else all of them.
fn uniform(items: impl Iterator<Item = i64> + Clone) -> Value {
    let mut rest = items.clone();
    match rest.next() {
        Some(first) if rest.all(|x| x == first) => first.into(),
        _ => items.collect::<Vec<_>>().into(),
    }
}

/// Sets `field`, in the object before its dot where it has one and the object is `rope_parameters`.
fn insert(fields: &mut Map<String, Value>, field: &str, value: Value) {
    match field.strip_prefix("rope_parameters.") {
        Some(inner) => {
            let rope = fields.entry("rope_parameters").or_insert_with(|| Value::Object(Map::new()));
            if let Value::Object(rope) = rope {
                rope.insert(inner.into(), value);
            }
        }
        None => {
            fields.insert(field.into(), value);
        }
    }
}
