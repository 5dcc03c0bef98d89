//! What a GGUF file says about its tokenizer, as plain data. Decides that lists agree in length and ids lie in the
//! vocabulary. Does not know how any tokenizer works.

use crate::error::{FormatErrorKind, Result};
use crate::gguf::metadata::Metadata;
use crate::gguf::value::StringArray;

/// Models come with two or three.
const MAX_TEMPLATES: usize = 64;

/// A chat template of a model that has several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedTemplate {
    /// `default`, `tool_use`, `rag`, …
    pub name: String,
    /// Jinja source.
    pub template: String,
}

/// The tokenizer section of a GGUF file. V is the vocabulary size.
#[derive(Clone, Debug)]
pub struct GgufTokenizer<'a> {
    /// `tokenizer.ggml.model`: `gpt2`, `llama`, …
    pub model: &'a str,
    /// `tokenizer.ggml.pre`: the name of the pre-tokenizer.
    pub pre: Option<&'a str>,
    /// [V] token texts by id.
    pub tokens: &'a StringArray,
    /// [V] merge priorities, for scored BPE.
    pub scores: Option<&'a [f32]>,
    /// [V] 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
    pub token_types: Option<Vec<i32>>,
    /// Pairs separated by a space, best first, for BPE.
    pub merges: Option<&'a StringArray>,
    /// Begin of text.
    pub bos_id: Option<u32>,
    /// End of text.
    pub eos_id: Option<u32>,
    /// End of turn.
    pub eot_id: Option<u32>,
    /// End of message.
    pub eom_id: Option<u32>,
    /// Stands for what cannot be encoded.
    pub unknown_id: Option<u32>,
    /// Padding.
    pub padding_id: Option<u32>,
    /// Separator.
    pub separator_id: Option<u32>,
    /// Whether encoding starts with `bos_id`.
    pub add_bos: Option<bool>,
    /// Whether encoding ends with `eos_id`.
    pub add_eos: Option<bool>,
    /// Whether a space is put before the text.
    pub add_space_prefix: Option<bool>,
    /// Whether runs of white space are collapsed.
    pub remove_extra_whitespaces: Option<bool>,
    /// `tokenizer.chat_template`, Jinja source.
    pub chat_template: Option<&'a str>,
    /// `tokenizer.chat_template.NAME` for every name in `tokenizer.chat_templates`.
    pub named_templates: Vec<NamedTemplate>,
}

impl<'a> GgufTokenizer<'a> {
    pub(crate) fn extract(metadata: &'a Metadata) -> Result<Self> {
        let tokens = metadata.require_strings("tokenizer.ggml.tokens")?;
        let scores = metadata.get_f32s("tokenizer.ggml.scores")?;
        let token_types = metadata.get_i32s("tokenizer.ggml.token_type")?;
        let lengths = [
            ("tokenizer.ggml.scores", scores.map(<[f32]>::len)),
            ("tokenizer.ggml.token_type", token_types.as_ref().map(Vec::len)),
        ];
        for (key, found) in lengths {
            if let Some(found) = found.filter(|found| *found != tokens.len()) {
                let reason = format!("{found} entries for a vocabulary of {} tokens", tokens.len());
                return Err(metadata.error(key, FormatErrorKind::Invalid { reason }));
            }
        }
        let id = |key: &str| token_id(metadata, key, tokens.len());
        Ok(Self {
            model: metadata.require_str("tokenizer.ggml.model")?,
            pre: metadata.get_str("tokenizer.ggml.pre")?,
            tokens,
            scores,
            token_types,
            merges: metadata.get_strings("tokenizer.ggml.merges")?,
            bos_id: id("tokenizer.ggml.bos_token_id")?,
            eos_id: id("tokenizer.ggml.eos_token_id")?,
            eot_id: id("tokenizer.ggml.eot_token_id")?,
            eom_id: id("tokenizer.ggml.eom_token_id")?,
            unknown_id: id("tokenizer.ggml.unknown_token_id")?,
            padding_id: id("tokenizer.ggml.padding_token_id")?,
            separator_id: id("tokenizer.ggml.seperator_token_id")?, // so spelled in the format
            add_bos: metadata.get_bool("tokenizer.ggml.add_bos_token")?,
            add_eos: metadata.get_bool("tokenizer.ggml.add_eos_token")?,
            add_space_prefix: metadata.get_bool("tokenizer.ggml.add_space_prefix")?,
            remove_extra_whitespaces: metadata.get_bool("tokenizer.ggml.remove_extra_whitespaces")?,
            chat_template: metadata.get_str("tokenizer.chat_template")?,
            named_templates: named_templates(metadata)?,
        })
    }
}

fn token_id(metadata: &Metadata, key: &str, vocab_size: usize) -> Result<Option<u32>> {
    let Some(id) = metadata.get_u32(key)? else {
        return Ok(None);
    };
    if id as usize >= vocab_size {
        let reason = format!("token id {id} is outside the vocabulary of {vocab_size} tokens");
        return Err(metadata.error(key, FormatErrorKind::Invalid { reason }));
    }
    Ok(Some(id))
}

fn named_templates(metadata: &Metadata) -> Result<Vec<NamedTemplate>> {
    let Some(names) = metadata.get_strings("tokenizer.chat_templates")? else {
        return Ok(Vec::new());
    };
    if names.len() > MAX_TEMPLATES {
        let (found, limit) = (names.len() as u64, MAX_TEMPLATES as u64);
        let kind = FormatErrorKind::LimitExceeded { what: "number of chat templates", found, limit };
        return Err(metadata.error("tokenizer.chat_templates", kind));
    }
    let mut templates = Vec::new();
    for name in names.iter() {
        if templates.iter().any(|known: &NamedTemplate| known.name == name) {
            let reason = format!("names the template '{}' twice", crate::error::printable(name));
            return Err(metadata.error("tokenizer.chat_templates", FormatErrorKind::Invalid { reason }));
        }
        let template = metadata.require_str(&format!("tokenizer.chat_template.{name}"))?;
        templates.push(NamedTemplate { name: name.to_owned(), template: template.to_owned() });
    }
    Ok(templates)
}
