//! What a Hugging Face folder says about its tokenizer, as plain data: `tokenizer.json` unread, the few fields of
//! `tokenizer_config.json` that matter when serving, and the chat template wherever it is. Does not know how any
//! tokenizer works.

use std::path::Path;

use serde_json::Value;

use crate::error::{FormatErrorKind, Result};
use crate::gguf::NamedTemplate;
use crate::json::{self, JsonFields};

const MAX_TOKENIZER_BYTES: u64 = 256 << 20;
const MAX_CONFIG_BYTES: u64 = 32 << 20;
const MAX_TEMPLATE_BYTES: u64 = 4 << 20;

const FIELDS: &[&str] = &[
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "add_bos_token",
    "add_eos_token",
    "model_max_length",
    "tokenizer_class",
    "clean_up_tokenization_spaces",
    "chat_template",
];

/// A parsed `tokenizer_config.json`; `None` where the file is silent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenizerConfig {
    /// Begin of text.
    pub bos_token: Option<String>,
    /// End of text.
    pub eos_token: Option<String>,
    /// Stands for what cannot be encoded.
    pub unk_token: Option<String>,
    /// Padding.
    pub pad_token: Option<String>,
    /// Whether encoding starts with `bos_token`.
    pub add_bos_token: Option<bool>,
    /// Whether encoding ends with `eos_token`.
    pub add_eos_token: Option<bool>,
    /// Longest input in tokens; the files' "very large" placeholder is `None`.
    pub model_max_length: Option<u64>,
    /// `LlamaTokenizerFast`, …
    pub tokenizer_class: Option<String>,
    /// Whether decoding drops spaces before punctuation.
    pub clean_up_tokenization_spaces: Option<bool>,
    /// The chat template, Jinja source: the string, or the one named `default` of a list.
    pub chat_template: Option<String>,
    /// All templates when the file has a list of named ones.
    pub named_templates: Vec<NamedTemplate>,
}

impl TokenizerConfig {
    /// Reads a file of at most 32 MiB.
    ///
    /// # Errors
    /// The file cannot be read or is malformed, or a field has another type than expected.
    pub fn open(path: &Path) -> Result<Self> {
        Self::parse(&json::read_limited(path, MAX_CONFIG_BYTES, "expected a tokenizer_config.json")?, path)
    }

    /// Parses the text of a file. `file` is only named in errors.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn parse(bytes: &[u8], file: &Path) -> Result<Self> {
        let fields = JsonFields::new(file, "", json::parse_selected(bytes, file, FIELDS)?);
        let named_templates = named_templates(&fields)?;
        let chat_template = match fields.get("chat_template") {
            Some(Value::Array(_)) => {
                let default = named_templates.iter().find(|named| named.name == "default");
                default.map(|named| named.template.clone())
            }
            _ => fields.get_str("chat_template")?.map(str::to_owned),
        };
        Ok(Self {
            bos_token: special_token(&fields, "bos_token")?,
            eos_token: special_token(&fields, "eos_token")?,
            unk_token: special_token(&fields, "unk_token")?,
            pad_token: special_token(&fields, "pad_token")?,
            add_bos_token: fields.get_bool("add_bos_token")?,
            add_eos_token: fields.get_bool("add_eos_token")?,
            model_max_length: max_length(&fields)?,
            tokenizer_class: fields.get_str("tokenizer_class")?.map(str::to_owned),
            clean_up_tokenization_spaces: fields.get_bool("clean_up_tokenization_spaces")?,
            chat_template,
            named_templates,
        })
    }
}

/// A token as text, or as an object with the text in `content`.
fn special_token(fields: &JsonFields, key: &str) -> Result<Option<String>> {
    match fields.get(key) {
        Some(Value::Object(_)) => {
            let object = fields.get_object(key)?;
            object.map(|object| object.require_str("content").map(str::to_owned)).transpose()
        }
        _ => Ok(fields.get_str(key)?.map(str::to_owned)),
    }
}

fn max_length(fields: &JsonFields) -> Result<Option<u64>> {
    const KEY: &str = "model_max_length";
    match fields.get(KEY).and_then(Value::as_u64) {
        Some(length) => Ok(Some(length)),
        // 1e30, written as an integer that no machine word holds, means "no limit"; anything but a number is refused.
        None => fields.get_f64(KEY).map(|_| None),
    }
}

fn named_templates(fields: &JsonFields) -> Result<Vec<NamedTemplate>> {
    const KEY: &str = "chat_template";
    let Some(Value::Array(items)) = fields.get(KEY) else {
        return Ok(Vec::new());
    };
    let mut templates: Vec<NamedTemplate> = Vec::new();
    for item in items {
        let text = |key: &str| item.get(key).and_then(Value::as_str).map(str::to_owned);
        let (Some(name), Some(template)) = (text("name"), text("template")) else {
            let expected = "list of objects with name and template";
            let found = crate::error::printable(&item.to_string());
            return Err(fields.error(KEY, FormatErrorKind::WrongType { expected, found }));
        };
        if templates.len() == 64 || templates.iter().any(|known| known.name == name) {
            return Err(fields.invalid(KEY, "lists a name twice, or more than 64 templates"));
        }
        templates.push(NamedTemplate { name, template });
    }
    Ok(templates)
}

/// Everything a folder has about its tokenizer.
#[derive(Clone, Debug)]
pub struct HfTokenizer {
    /// The bytes of `tokenizer.json`, unparsed.
    pub tokenizer_json: Vec<u8>,
    /// `tokenizer_config.json`; all `None` when there is no such file.
    pub config: TokenizerConfig,
    /// Jinja source: `chat_template.jinja`, which wins when it is there, or that of the config.
    pub chat_template: Option<String>,
}

impl HfTokenizer {
    /// Reads a folder's tokenizer files.
    ///
    /// # Errors
    /// `tokenizer.json` is missing, or a file is unreadable, too large or malformed.
    pub fn open(folder: &Path) -> Result<Self> {
        let tokenizer_json = json::read_limited(&folder.join("tokenizer.json"), MAX_TOKENIZER_BYTES, TOKENIZER_HINT)?;
        let config_path = folder.join("tokenizer_config.json");
        let config = match config_path.exists() {
            true => TokenizerConfig::open(&config_path)?,
            false => TokenizerConfig::default(),
        };
        let template_path = folder.join("chat_template.jinja");
        let chat_template = match template_path.exists() {
            true => Some(read_text(&template_path)?),
            false => config.chat_template.clone(),
        };
        Ok(Self { tokenizer_json, config, chat_template })
    }
}

pub(crate) const TOKENIZER_HINT: &str = "a model folder needs tokenizer.json: download it from the model's repository \
                                         (a tokenizer.model alone is not enough)";

fn read_text(path: &Path) -> Result<String> {
    let bytes = json::read_limited(path, MAX_TEMPLATE_BYTES, "expected a chat template")?;
    String::from_utf8(bytes).map_err(|error| {
        let kind = FormatErrorKind::InvalidUtf8 { what: "chat template" };
        crate::FormatError::new(path, kind).at(error.utf8_error().valid_up_to() as u64)
    })
}
