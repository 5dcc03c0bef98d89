//! From a checkpoint to everything about its text: tokenizer, chat template, end tokens, sampling defaults.
//! The one place where the files' data becomes the plain structs that the text room takes.

use crate::SamplingDefaults;
use pagemill_formats::gguf::{GgufFile, GgufTokenizer};
use pagemill_formats::hf::HfFolder;
use pagemill_formats::{Checkpoint, FormatError};
use pagemill_text::{ChatTemplate, GgufVocabulary, HfTokenizerOptions, TemplateTokens, TextError, Tokenizer};
use std::sync::Arc;

/// What a model's files say about text.
pub struct TextAssets {
    /// The vocabulary.
    pub tokenizer: Arc<Tokenizer>,
    /// The chat template, when the model has one.
    pub template: Option<ChatTemplate>,
    /// Tokens that end an answer, ascending.
    pub eos_token_ids: Vec<u32>,
    /// The model's own sampling values (`generation_config.json`).
    pub defaults: SamplingDefaults,
}

/// Why a model's text assets cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AssetsError {
    /// The files.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// What they hold.
    #[error("{path}: {source}")]
    Text {
        /// The model's file or folder.
        path: String,
        /// What is wrong with it.
        source: TextError,
    },
    /// A configuration alone.
    #[error(
        "{path}: a configuration without a tokenizer has no text; with made-up weights only benches of token ids run"
    )]
    NoText {
        /// The configuration's file.
        path: String,
    },
    /// A sampling default that no request could ask for.
    #[error("{path}: generation_config.json: {field} = {value}: {detail}")]
    Default {
        /// The model's folder.
        path: String,
        /// The field.
        field: &'static str,
        /// As it stands there.
        value: f64,
        /// What it may be.
        detail: &'static str,
    },
}

impl TextAssets {
    /// Reads tokenizer, template and defaults. Costs some passes over the vocabulary.
    ///
    /// # Errors
    /// [`AssetsError`] naming the file and the field.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self, AssetsError> {
        match checkpoint {
            Checkpoint::Gguf(file) => from_gguf(file),
            Checkpoint::HuggingFace(folder) => from_folder(folder),
            Checkpoint::ConfigOnly(only) => {
                Err(AssetsError::NoText { path: only.config().fields().file().display().to_string() })
            }
        }
    }
}

fn from_gguf(file: &GgufFile) -> Result<TextAssets, AssetsError> {
    let found = file.tokenizer()?;
    let path = || file.metadata().file().display().to_string();
    let text_error = |source| AssetsError::Text { path: path(), source };
    let text_of = |id: Option<u32>| id.and_then(|id| found.tokens.get(id as usize)).map(str::to_owned);
    let tokens = TemplateTokens {
        bos: text_of(found.bos_id),
        eos: text_of(found.eos_id),
        unknown: text_of(found.unknown_id),
        pad: text_of(found.padding_id),
    };
    let template = found.chat_template.map(|source| ChatTemplate::new(Some(source), tokens));
    let template = template.transpose().map_err(text_error)?;
    let tokenizer = Tokenizer::from_gguf(vocabulary(&found)).map_err(text_error)?;
    let mut eos_token_ids: Vec<u32> = tokenizer.end_of_generation().collect();
    eos_token_ids.sort_unstable();
    Ok(TextAssets { tokenizer: Arc::new(tokenizer), template, eos_token_ids, defaults: SamplingDefaults::default() })
}

fn vocabulary(found: &GgufTokenizer<'_>) -> GgufVocabulary {
    GgufVocabulary {
        model: found.model.to_owned(),
        pre: found.pre.map(str::to_owned),
        tokens: found.tokens.iter().map(str::to_owned).collect(),
        scores: found.scores.map(<[f32]>::to_vec).unwrap_or_default(),
        token_types: found.token_types.clone().unwrap_or_default(),
        merges: found.merges.map(|m| m.iter().map(str::to_owned).collect()).unwrap_or_default(),
        bos: found.bos_id,
        eos: found.eos_id,
        eot: found.eot_id,
        eom: found.eom_id,
        unknown: found.unknown_id,
        pad: found.padding_id,
        add_bos: found.add_bos,
        add_eos: found.add_eos,
        add_space_prefix: found.add_space_prefix,
    }
}

fn from_folder(folder: &HfFolder) -> Result<TextAssets, AssetsError> {
    let found = folder.tokenizer()?;
    let path = folder.path().display().to_string();
    let text_error = |source| AssetsError::Text { path: path.clone(), source };
    let generation = folder.generation();
    // generation_config.json wins over config.json, as in the reference.
    let eos =
        if generation.eos_token_ids.is_empty() { &folder.config().eos_token_ids } else { &generation.eos_token_ids };
    let config = &found.config;
    let options = HfTokenizerOptions {
        bos_token: config.bos_token.clone(),
        eos_token: config.eos_token.clone(),
        unk_token: config.unk_token.clone(),
        pad_token: config.pad_token.clone(),
        add_bos_token: config.add_bos_token,
        add_eos_token: config.add_eos_token,
        eos_token_ids: eos.clone(),
    };
    let tokens = TemplateTokens {
        bos: config.bos_token.clone(),
        eos: config.eos_token.clone(),
        unknown: config.unk_token.clone(),
        pad: config.pad_token.clone(),
    };
    let template = found.chat_template.as_deref().map(|source| ChatTemplate::new(Some(source), tokens));
    let template = template.transpose().map_err(text_error)?;
    let tokenizer = Tokenizer::from_hf(&found.tokenizer_json, &options).map_err(text_error)?;
    let mut eos_token_ids: Vec<u32> = tokenizer.end_of_generation().collect();
    eos_token_ids.sort_unstable();
    let defaults = sampling_defaults(folder, &path)?;
    Ok(TextAssets { tokenizer: Arc::new(tokenizer), template, eos_token_ids, defaults })
}

/// `do_sample: false` means that the authors decode greedily.
fn sampling_defaults(folder: &HfFolder, path: &str) -> Result<SamplingDefaults, AssetsError> {
    let g = folder.generation();
    let greedy = (g.do_sample == Some(false)).then_some(0.0);
    Ok(SamplingDefaults {
        temperature: checked(path, "temperature", greedy.or(g.temperature), 0.0, 2.0, "must lie in 0 to 2")?,
        top_k: g.top_k.filter(|&k| k > 0).and_then(|k| u32::try_from(k).ok()),
        top_p: checked(path, "top_p", g.top_p, f64::MIN_POSITIVE, 1.0, "must lie above 0 and not above 1")?,
        min_p: checked(path, "min_p", g.min_p, 0.0, 1.0, "must lie in 0 to 1")?,
        repetition_penalty: checked(
            path,
            "repetition_penalty",
            g.repetition_penalty,
            f64::MIN_POSITIVE,
            f64::from(f32::MAX),
            "must be above 0",
        )?,
    })
}

fn checked(
    path: &str,
    field: &'static str,
    value: Option<f64>,
    least: f64,
    most: f64,
    detail: &'static str,
) -> Result<Option<f32>, AssetsError> {
    match value {
        None => Ok(None),
        #[allow(clippy::cast_possible_truncation)] // rounds; the range was checked
        Some(v) if (least..=most).contains(&v) => Ok(Some(v as f32)),
        Some(value) => Err(AssetsError::Default { path: path.to_owned(), field, value, detail }),
    }
}
