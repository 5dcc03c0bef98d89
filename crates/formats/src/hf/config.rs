//! `config.json`. Decides how the generations of the file are read as one: `torch_dtype` or `dtype`, a nested
//! `text_config` or none, both forms of rope settings. Does not know which fields an architecture needs; it keeps all.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::Result;
use crate::hf::rope::RopeSettings;
use crate::json::{self, JsonFields};

const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Fields that [`HfConfig`] and [`RopeSettings`] have read, so that no architecture needs to list them.
const READ_HERE: &[&str] = &[
    "architectures",
    "model_type",
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
];

/// Fields that tools leave behind and that no forward pass reads.
const BOOKKEEPING: &[&str] = &[
    "_name_or_path",
    "transformers_version",
    "use_cache",
    "initializer_range",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "attention_dropout",
    "pretraining_tp",
];

/// What is taken from the outer object when `text_config` has no value of its own.
const INHERITED: &[&str] =
    &["architectures", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"];

/// A parsed `config.json`.
#[derive(Clone, Debug)]
pub struct HfConfig {
    /// `model_type` of the text model: `llama`, `qwen3`, `gemma3_text`, …
    pub model_type: String,
    /// `model_type` around a nested `text_config`: `gemma3`, …
    pub outer_model_type: Option<String>,
    /// Class names: `LlamaForCausalLM`, …
    pub architectures: Vec<String>,
    /// `dtype` or `torch_dtype`: `bfloat16`, …
    pub dtype: Option<String>,
    /// Begin of text.
    pub bos_token_id: Option<u32>,
    /// End of text; one or several.
    pub eos_token_ids: Vec<u32>,
    /// Padding.
    pub pad_token_id: Option<u32>,
    /// Rotary position settings, from either form on disk.
    pub rope: RopeSettings,
    fields: JsonFields,
}

impl HfConfig {
    /// Reads a file of at most 1 MiB.
    ///
    /// # Errors
    /// The file cannot be read or is malformed, or a field has another type than expected.
    pub fn open(path: &Path) -> Result<Self> {
        let bytes = json::read_limited(path, MAX_CONFIG_BYTES, "expected the model's config.json")?;
        Self::parse(&bytes, path)
    }

    /// Parses the text of a file. `file` is only named in errors.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn parse(bytes: &[u8], file: &Path) -> Result<Self> {
        let outer = JsonFields::new(file, "", json::parse_object(bytes, file)?);
        let (fields, outer_model_type) = match outer.get_object("text_config")? {
            Some(inner) => {
                let merged = inherit(inner.raw().clone(), outer.raw());
                let outer_model_type = outer.get_str("model_type")?.map(str::to_owned);
                (JsonFields::new(file, "text_config.", merged), outer_model_type)
            }
            None => (outer, None),
        };
        let dtype = match fields.get_str("dtype")? {
            Some(dtype) => Some(dtype),
            None => fields.get_str("torch_dtype")?,
        };
        Ok(Self {
            model_type: fields.require_str("model_type")?.to_owned(),
            outer_model_type,
            architectures: owned(fields.get_strings("architectures")?),
            dtype: dtype.map(str::to_owned),
            bos_token_id: fields.get_token_id("bos_token_id")?,
            eos_token_ids: fields.get_token_ids("eos_token_id")?,
            pad_token_id: fields.get_token_id("pad_token_id")?,
            rope: RopeSettings::read(&fields)?,
            fields,
        })
    }

    /// All fields of the text model, with typed access.
    #[must_use]
    pub fn fields(&self) -> &JsonFields {
        &self.fields
    }

    /// Fields that are set, that this type has not read itself, that are no bookkeeping, and that are not in `known`:
    /// an architecture refuses to load when any is left.
    pub fn unknown_fields<'a>(&'a self, known: &'a [&'a str]) -> impl Iterator<Item = (&'a str, &'a Value)> {
        self.fields.unknown_fields(known).filter(|(key, _)| !READ_HERE.contains(key) && !BOOKKEEPING.contains(key))
    }
}

fn inherit(mut inner: Map<String, Value>, outer: &Map<String, Value>) -> Map<String, Value> {
    for key in INHERITED {
        if inner.get(*key).is_none_or(Value::is_null)
            && let Some(value) = outer.get(*key)
        {
            inner.insert((*key).to_owned(), value.clone());
        }
    }
    inner
}

fn owned(strings: Option<Vec<&str>>) -> Vec<String> {
    strings.unwrap_or_default().into_iter().map(str::to_owned).collect()
}
