//! `generation_config.json`: the model's own end-of-text ids and sampling defaults. Decides types only; what a default
//! does is the sampler's business.

use std::path::Path;

use crate::error::Result;
use crate::json::{self, JsonFields};

const MAX_BYTES: u64 = 1 << 20;

/// A parsed `generation_config.json`; `None` where the file is silent. Fields it does not list are ignored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Begin of text.
    pub bos_token_id: Option<u32>,
    /// End of text; one or several.
    pub eos_token_ids: Vec<u32>,
    /// Padding.
    pub pad_token_id: Option<u32>,
    /// Whether the authors sample (or decode greedily).
    pub do_sample: Option<bool>,
    /// Divides the logits.
    pub temperature: Option<f64>,
    /// Keep this many tokens; 0 keeps all.
    pub top_k: Option<usize>,
    /// Keep the smallest set of this probability.
    pub top_p: Option<f64>,
    /// Keep tokens of at least this share of the best one's probability.
    pub min_p: Option<f64>,
    /// Divides the logits of tokens seen.
    pub repetition_penalty: Option<f64>,
    /// Prompt and answer together, in tokens.
    pub max_length: Option<usize>,
    /// The answer alone, in tokens.
    pub max_new_tokens: Option<usize>,
}

impl GenerationConfig {
    /// Reads a file of at most 1 MiB.
    ///
    /// # Errors
    /// The file cannot be read or is malformed, or a field has another type than expected.
    pub fn open(path: &Path) -> Result<Self> {
        Self::parse(&json::read_limited(path, MAX_BYTES, "expected a generation_config.json")?, path)
    }

    /// Parses the text of a file. `file` is only named in errors.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn parse(bytes: &[u8], file: &Path) -> Result<Self> {
        let fields = JsonFields::new(file, "", json::parse_object(bytes, file)?);
        Ok(Self {
            bos_token_id: fields.get_token_id("bos_token_id")?,
            eos_token_ids: fields.get_token_ids("eos_token_id")?,
            pad_token_id: fields.get_token_id("pad_token_id")?,
            do_sample: fields.get_bool("do_sample")?,
            temperature: fields.get_f64("temperature")?,
            top_k: fields.get_usize("top_k")?,
            top_p: fields.get_f64("top_p")?,
            min_p: fields.get_f64("min_p")?,
            repetition_penalty: fields.get_f64("repetition_penalty")?,
            max_length: fields.get_usize("max_length")?,
            max_new_tokens: fields.get_usize("max_new_tokens")?,
        })
    }
}
