//! GGUF files, versions 2 and 3, little-endian. Decides what a well-formed header is; every count, length and offset in
//! it is checked against the bytes that remain. Does not know what any metadata key means to a model.

mod header;
mod metadata;
mod tokenizer;
mod value;

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

pub use header::GgufHeader;
pub use metadata::Metadata;
pub use tokenizer::{GgufTokenizer, NamedTemplate};
pub use value::{Array, StringArray, Value};

use crate::error::Result;
use crate::weights::{WeightFile, Weights};

/// An open GGUF file: its metadata in memory, its weights on disk.
#[derive(Debug)]
pub struct GgufFile {
    version: u32,
    metadata: Metadata,
    weights: Weights,
}

impl GgufFile {
    /// Reads and checks the header; the weights stay on disk. Memory: at most twice the header's bytes.
    ///
    /// # Errors
    /// The file cannot be read, is malformed or truncated, or is one part of a split model.
    pub fn open(path: &Path) -> Result<Self> {
        let file = WeightFile::open(path, "expected a GGUF file")?;
        let reader: BufReader<&File> = BufReader::with_capacity(256 << 10, file.file());
        let GgufHeader { version, metadata, tensors } = parse(reader, file.len(), path)?;
        let weights = Weights::new(path, vec![file], tensors);
        Ok(Self { version, metadata, weights })
    }

    /// The format's version: 2 or 3.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// All keys and values.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Tensors and their bytes.
    #[must_use]
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// `general.architecture`.
    ///
    /// # Errors
    /// The key is missing or no string.
    pub fn architecture(&self) -> Result<&str> {
        self.metadata.require_str("general.architecture")
    }

    /// The tokenizer's data, borrowed from the metadata.
    ///
    /// # Errors
    /// A key is missing, of the wrong type, or inconsistent with the vocabulary.
    pub fn tokenizer(&self) -> Result<GgufTokenizer<'_>> {
        GgufTokenizer::extract(&self.metadata)
    }
}

/// Parses a header from any reader of `length` bytes. `file` is only named in errors.
///
/// # Errors
/// As [`GgufFile::open`].
pub fn parse<R: Read>(reader: R, length: u64, file: &Path) -> Result<GgufHeader> {
    header::parse(crate::source::Source::new(reader, length, file))
}
