//! A model on disk, whichever way it is stored. Decides what a path is; everything else is in the two formats.

use std::path::Path;

use crate::error::{FormatError, FormatErrorKind, Result};
use crate::gguf::GgufFile;
use crate::hf::{HfConfig, HfFolder};
use crate::tensor_type::TensorType;
use crate::weights::Weights;

/// An open model: a GGUF file or a Hugging Face folder.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // there is one per process
pub enum Checkpoint {
    /// One file with everything.
    Gguf(GgufFile),
    /// A folder with configuration, tokenizer and safetensors.
    HuggingFace(HfFolder),
    /// A configuration alone: its weights are made up, to measure speed with.
    ConfigOnly(ConfigOnly),
}

/// A `config.json` whose weights are made up.
#[derive(Debug)]
pub struct ConfigOnly {
    config: HfConfig,
    weights: Weights,
}

impl ConfigOnly {
    /// `config.json`.
    #[must_use]
    pub fn config(&self) -> &HfConfig {
        &self.config
    }
}

impl Checkpoint {
    /// Opens a model: headers and configuration are read and checked, weights stay on disk.
    ///
    /// # Errors
    /// The path does not exist or is neither kind of model (the error says what was expected); a member is missing;
    /// anything in it is malformed, truncated or unsupported.
    pub fn open(path: &Path) -> Result<Self> {
        let metadata = std::fs::metadata(path).map_err(|error| {
            let kind = match error.kind() {
                std::io::ErrorKind::NotFound => FormatErrorKind::MissingFile {
                    hint: "expected a GGUF file, or a folder with config.json, tokenizer.json and *.safetensors".into(),
                },
                _ => FormatErrorKind::Io(error),
            };
            FormatError::new(path, kind)
        })?;
        if metadata.is_dir() {
            refuse_other_folder(path)?;
            return HfFolder::open(path).map(Self::HuggingFace);
        }
        if let Some(extension @ ("safetensors" | "json")) = path.extension().and_then(|extension| extension.to_str()) {
            let found = format!("this is one {extension} file of a model folder: name the folder instead");
            return Err(FormatError::new(path, FormatErrorKind::NotAModel { found }));
        }
        GgufFile::open(path).map(Self::Gguf)
    }

    /// Opens only the configuration at `path`, a `config.json` (of any name) or a folder that holds one. Weights are
    /// to be made up: in `made_up`, or in the type that it states (bf16 when it states none).
    ///
    /// # Errors
    /// The file is missing or malformed, or states a type of weights that Pagemill does not load.
    pub fn open_config(path: &Path, made_up: Option<TensorType>) -> Result<Self> {
        let file = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
        let config = HfConfig::open(&file)?;
        let made_up = match (made_up, config.dtype.as_deref()) {
            (Some(made_up), _) => made_up,
            (None, None | Some("bfloat16")) => TensorType::BF16,
            (None, Some("float16")) => TensorType::F16,
            (None, Some("float32")) => TensorType::F32,
            (None, Some(other)) => {
                let reason = format!("weights of {other} cannot be made up; bfloat16, float16 and float32 can");
                return Err(FormatError::new(&file, FormatErrorKind::Invalid { reason }));
            }
        };
        Ok(Self::ConfigOnly(ConfigOnly { config, weights: Weights::made_up(&file, made_up)? }))
    }

    /// Tensors and their bytes.
    #[must_use]
    pub fn weights(&self) -> &Weights {
        match self {
            Checkpoint::Gguf(file) => file.weights(),
            Checkpoint::HuggingFace(folder) => folder.weights(),
            Checkpoint::ConfigOnly(only) => &only.weights,
        }
    }
}

/// A folder without config.json: says what else it seems to be.
fn refuse_other_folder(path: &Path) -> Result<()> {
    if path.join("config.json").exists() {
        return Ok(());
    }
    let names = crate::hf::file_names(path);
    let model_like = |name: &String| name.ends_with(".safetensors") || name == "tokenizer.json";
    let found = match names.iter().find(|name| name.ends_with(".gguf")) {
        Some(name) => format!("this folder holds GGUF files: name the file instead, such as {name}"),
        // A model folder with one member missing: HfFolder names that member.
        None if names.iter().any(model_like) => return Ok(()),
        None => "this folder holds no model".to_owned(),
    };
    Err(FormatError::new(path, FormatErrorKind::NotAModel { found }))
}
