//! A Hugging Face model folder as a whole. Decides which members must be there and which weights file is taken.

use std::path::{Path, PathBuf};

use crate::error::{FormatError, FormatErrorKind, Result};
use crate::hf::tokenizer::TOKENIZER_HINT;
use crate::hf::{GenerationConfig, HfConfig, HfTokenizer};
use crate::safetensors;
use crate::weights::Weights;

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// An open model folder.
#[derive(Debug)]
pub struct HfFolder {
    path: PathBuf,
    config: HfConfig,
    generation: GenerationConfig,
    weights: Weights,
}

impl HfFolder {
    /// Reads the configuration and the headers of the weights; checks that the tokenizer is there.
    ///
    /// # Errors
    /// A member is missing (the error names it and says what to do), unreadable or malformed.
    pub fn open(path: &Path) -> Result<Self> {
        let config_path = path.join("config.json");
        if !config_path.exists() {
            let hint = "a model folder needs config.json: download it from the model's repository".to_owned();
            return Err(FormatError::new(&config_path, FormatErrorKind::MissingFile { hint }));
        }
        let config = HfConfig::open(&config_path)?;
        let tokenizer_path = path.join("tokenizer.json");
        if !tokenizer_path.exists() {
            let hint = TOKENIZER_HINT.to_owned();
            return Err(FormatError::new(&tokenizer_path, FormatErrorKind::MissingFile { hint }));
        }
        let generation_path = path.join("generation_config.json");
        let generation = match generation_path.exists() {
            true => GenerationConfig::open(&generation_path)?,
            false => GenerationConfig::default(),
        };
        let weights = open_weights(path)?;
        Ok(Self { path: path.to_path_buf(), config, generation, weights })
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `config.json`.
    #[must_use]
    pub fn config(&self) -> &HfConfig {
        &self.config
    }

    /// `generation_config.json`; empty when there is no such file.
    #[must_use]
    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
    }

    /// Tensors and their bytes.
    #[must_use]
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Reads the tokenizer's files, up to 256 MiB, anew at each call.
    ///
    /// # Errors
    /// As [`HfTokenizer::open`].
    pub fn tokenizer(&self) -> Result<HfTokenizer> {
        HfTokenizer::open(&self.path)
    }
}

/// One file when there is one (as the reference implementation does), else the shards of the index.
fn open_weights(folder: &Path) -> Result<Weights> {
    let single = folder.join(SINGLE_FILE);
    if single.exists() {
        return safetensors::open(&single);
    }
    let index = folder.join(INDEX_FILE);
    if index.exists() {
        return safetensors::open_sharded(&index);
    }
    let has_pytorch = file_names(folder).iter().any(|name| name.ends_with(".bin") || name.ends_with(".pth"));
    let hint = match has_pytorch {
        true => "the folder has PyTorch weights only, which can run code when loaded: convert them to safetensors",
        false => "a model folder needs model.safetensors, or model.safetensors.index.json and the shards it lists",
    };
    Err(FormatError::new(&single, FormatErrorKind::MissingFile { hint: hint.to_owned() }))
}

/// Names in a folder, for hints; empty when it cannot be read.
pub(crate) fn file_names(folder: &Path) -> Vec<String> {
    const MOST: usize = 1000;
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    entries.flatten().take(MOST).filter_map(|entry| entry.file_name().into_string().ok()).collect()
}
