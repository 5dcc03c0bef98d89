//! safetensors checkpoints: one file, or shards listed by `model.safetensors.index.json`. Decides that every tensor is
//! in exactly one place and that its bytes are there. Does not know what any tensor is for.

mod header;
mod index;

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

pub use index::ShardIndex;

use crate::error::{FormatError, FormatErrorKind, Result};
use crate::tensor::{TensorInfo, TensorTable};
use crate::weights::{WeightFile, Weights};

/// Opens a single safetensors file: reads and checks the header, leaves the weights on disk.
///
/// # Errors
/// The file cannot be read, or is malformed or truncated.
pub fn open(path: &Path) -> Result<Weights> {
    let mut tensors = Vec::new();
    let file = open_shard(path, "expected a safetensors file", 0, &mut tensors)?;
    let table = TensorTable::new(tensors, &[path])?;
    Ok(Weights::new(path, vec![file], table))
}

/// Opens all shards that an index lists, and checks that each holds what the index says.
///
/// # Errors
/// The index or a shard is missing or malformed; a tensor is missing from its shard, or is in two.
pub fn open_sharded(index_path: &Path) -> Result<Weights> {
    let index = ShardIndex::open(index_path)?;
    let folder = index_path.parent().unwrap_or(Path::new(""));
    let (mut files, mut tensors) = (Vec::new(), Vec::new());
    for (file_idx, shard) in (0u32..).zip(index.shards()) {
        let path = folder.join(shard);
        let hint = format!("{} lists it, so the download is incomplete", index_path.display());
        files.push(open_shard(&path, &hint, file_idx, &mut tensors)?);
    }
    let paths: Vec<&Path> = files.iter().map(WeightFile::path).collect();
    let table = TensorTable::new(tensors, &paths)?;
    let weights = Weights::new(index_path, files, table);
    for (name, shard_idx) in index.tensors() {
        let found = weights.get(name);
        if found.is_none_or(|tensor| tensor.file_idx != shard_idx) {
            let shard = folder.join(&index.shards()[shard_idx as usize]);
            let hint = format!(", but {} says it is in this file", index_path.display());
            return Err(FormatError::new(&shard, FormatErrorKind::MissingTensor { hint }).in_tensor(name));
        }
    }
    Ok(weights)
}

fn open_shard(path: &Path, hint: &str, file_idx: u32, into: &mut Vec<TensorInfo>) -> Result<WeightFile> {
    let file = WeightFile::open(path, hint)?;
    let reader: BufReader<&File> = BufReader::with_capacity(256 << 10, file.file());
    let mut tensors = header::parse(reader, file.len(), path)?;
    for tensor in &mut tensors {
        tensor.file_idx = file_idx;
    }
    if into.is_empty() {
        *into = tensors;
    } else {
        into.append(&mut tensors);
    }
    Ok(file)
}

/// Parses a header from any reader of `length` bytes. `file` is only named in errors.
///
/// # Errors
/// The header is malformed, or does not fit the length.
pub fn parse<R: Read>(reader: R, length: u64, file: &Path) -> Result<TensorTable> {
    TensorTable::new(header::parse(reader, length, file)?, &[file])
}
