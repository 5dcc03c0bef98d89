//! The header of a GGUF file, front to back: magic, counts, metadata, tensor entries. Decides what is refused before
//! it costs memory. Does not read weights.

use std::io::Read;
use std::path::Path;

use crate::error::{FormatError, FormatErrorKind, Result};
use crate::gguf::metadata::{Entry, Metadata};
use crate::gguf::tokenizer::GgufTokenizer;
use crate::gguf::value::{Value, read_string};
use crate::source::{Source, reserve};
use crate::tensor::{Holes, TensorInfo, TensorTable, check_layout, num_elements};
use crate::tensor_type::StoredType;

/// Far above any real file (under 100 keys), and it keeps the table of a hostile one small.
const MAX_METADATA_KEYS: u64 = 16_384;
/// The largest models have a few thousand.
const MAX_TENSORS: u64 = 65_536;
/// The format's own limit on keys; taken for tensor names too.
const MAX_NAME_BYTES: u64 = 65_535;
const MAX_DIMS: u32 = 4;
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_ALIGNMENT: u64 = 65_536;
/// Key length, one byte of key, type, one byte of value.
const MIN_ENTRY_BYTES: u64 = 8 + 1 + 4 + 1;
/// Name length, one byte of name, number of dimensions, one dimension, type, offset.
const MIN_TENSOR_BYTES: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// What the header of a GGUF file says.
#[derive(Debug)]
pub struct GgufHeader {
    /// 2 or 3.
    pub version: u32,
    /// All keys and values.
    pub metadata: Metadata,
    /// In file order; checked against each other and against the file's length.
    pub tensors: TensorTable,
}

impl GgufHeader {
    /// The tokenizer's data, borrowed from the metadata.
    ///
    /// # Errors
    /// A key is missing, of the wrong type, or inconsistent with the vocabulary.
    pub fn tokenizer(&self) -> Result<GgufTokenizer<'_>> {
        GgufTokenizer::extract(&self.metadata)
    }
}

pub(crate) fn parse<R: Read>(mut source: Source<'_, R>) -> Result<GgufHeader> {
    let source = &mut source;
    let version = read_version(source)?;
    let (num_tensors, num_keys) = read_counts(source)?;
    let metadata = read_metadata(source, num_keys)?;
    refuse_split(&metadata)?;
    let alignment = read_alignment(&metadata)?;
    let mut tensors = read_tensors(source, num_tensors)?;
    place_tensors(source, &mut tensors, alignment)?;
    let tensors = TensorTable::new(tensors, &[source.file()])?;
    Ok(GgufHeader { version, metadata, tensors })
}

fn read_version<R: Read>(source: &mut Source<'_, R>) -> Result<u32> {
    let file = source.file();
    let found: [u8; 4] = source.array("magic")?;
    if &found != b"GGUF" {
        let kind = FormatErrorKind::WrongMagic { found, hint: magic_hint(&found) };
        return Err(FormatError::new(file, kind).at(0));
    }
    let version = source.u32("version")?;
    let kind = match version {
        2 | 3 => return Ok(version),
        _ if (1..=3).contains(&version.swap_bytes()) => FormatErrorKind::BigEndian,
        found => FormatErrorKind::UnsupportedVersion { found },
    };
    Err(FormatError::new(file, kind).in_field("version").at(4))
}

/// What a file of another format probably is.
fn magic_hint(magic: &[u8; 4]) -> &'static str {
    match magic {
        b"lmgg" | b"fmgg" | b"tjgg" | b"algg" => " (a GGML file from before GGUF: convert it)",
        b"FUGG" => " (a big-endian GGUF file)",
        [b'P', b'K', 3, 4] => " (a zip or PyTorch file)",
        [0x1f, 0x8b, ..] => " (a gzip file: unpack it)",
        b"vers" => " (a Git LFS pointer: the weights were not downloaded)",
        b"<!DO" | b"<htm" => " (a web page: the download failed)",
        _ => "",
    }
}

fn read_counts<R: Read>(source: &mut Source<'_, R>) -> Result<(u64, u64)> {
    let (tensors_at, keys_at) = (source.position(), source.position() + 8);
    let num_tensors = source.u64("number of tensors")?;
    let num_keys = source.u64("number of metadata keys")?;
    let limits = [
        ("number of tensors", num_tensors, MAX_TENSORS, MIN_TENSOR_BYTES, tensors_at),
        ("number of metadata keys", num_keys, MAX_METADATA_KEYS, MIN_ENTRY_BYTES, keys_at),
    ];
    for (what, found, limit, min_bytes, offset) in limits {
        let error = |kind| FormatError::new(source.file(), kind).in_field(what).at(offset);
        if found > limit {
            return Err(error(FormatErrorKind::LimitExceeded { what: "the count", found, limit }));
        }
        let (needed, remaining) = (found * min_bytes, source.remaining());
        if needed > remaining {
            return Err(error(FormatErrorKind::Truncated { what: "a list of that many", needed, remaining }));
        }
    }
    Ok((num_tensors, num_keys))
}

fn read_metadata<R: Read>(source: &mut Source<'_, R>, num_keys: u64) -> Result<Metadata> {
    let mut entries = Vec::new();
    reserve(&mut entries, source.size(num_keys)?).map_err(|kind| source.error(kind))?;
    for _ in 0..num_keys {
        let offset = source.position();
        let key = read_string(source, "metadata key", MAX_NAME_BYTES)
            .map_err(|error| error.in_field(&after("metadata key", entries.last().map(|entry: &Entry| &*entry.key))))?;
        if key.is_empty() {
            let kind = FormatErrorKind::Invalid { reason: "a metadata key is empty".to_owned() };
            return Err(FormatError::new(source.file(), kind).at(offset));
        }
        let value = Value::read(source).map_err(|error| error.in_field(&key))?;
        entries.push(Entry { key, value, offset });
    }
    Metadata::new(source.file(), entries)
}

/// Names an entry whose own name could not be read.
fn after(what: &str, previous: Option<&str>) -> String {
    match previous {
        Some(previous) => format!("{what} after '{previous}'"),
        None => format!("first {what}"),
    }
}

fn refuse_split(metadata: &Metadata) -> Result<()> {
    let count = metadata.get_u64("split.count")?.unwrap_or(1);
    if count > 1 {
        let part = metadata.get_u64("split.no")?.unwrap_or(0).saturating_add(1);
        return Err(metadata.error("split.count", FormatErrorKind::SplitGguf { part, count }));
    }
    Ok(())
}

fn read_alignment(metadata: &Metadata) -> Result<u64> {
    const KEY: &str = "general.alignment";
    let alignment = metadata.get_u64(KEY)?.unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() || !(8..=MAX_ALIGNMENT).contains(&alignment) {
        return Err(metadata.error(KEY, FormatErrorKind::InvalidAlignment { found: alignment }));
    }
    Ok(alignment)
}

fn read_tensors<R: Read>(source: &mut Source<'_, R>, num_tensors: u64) -> Result<Vec<TensorInfo>> {
    source.expect("tensor entries", num_tensors, MIN_TENSOR_BYTES)?;
    let mut tensors: Vec<TensorInfo> = Vec::new();
    reserve(&mut tensors, source.size(num_tensors)?).map_err(|kind| source.error(kind))?;
    for _ in 0..num_tensors {
        let begin = source.position();
        let name = read_string(source, "tensor name", MAX_NAME_BYTES)
            .map_err(|error| error.in_field(&after("tensor name", tensors.last().map(|tensor| &*tensor.name))))?;
        if name.is_empty() {
            let kind = FormatErrorKind::Invalid { reason: "a tensor's name is empty".to_owned() };
            return Err(FormatError::new(source.file(), kind).at(begin));
        }
        tensors.push(read_tensor(source, &name, begin).map_err(|error| error.in_tensor(&name))?);
    }
    Ok(tensors)
}

/// Reads what follows a tensor's name. `offset` still counts from the data section.
fn read_tensor<R: Read>(source: &mut Source<'_, R>, name: &str, header_offset: u64) -> Result<TensorInfo> {
    let begin = source.position();
    let file = source.file();
    let error = |kind, offset| FormatError::new(file, kind).at(offset);
    let num_dims = source.u32("number of dimensions")?;
    if num_dims == 0 || num_dims > MAX_DIMS {
        let reason = format!("{num_dims} dimensions, expected 1 to {MAX_DIMS}");
        return Err(error(FormatErrorKind::InvalidShape { reason }, begin));
    }
    let mut shape = Vec::with_capacity(num_dims as usize);
    for _ in 0..num_dims {
        let at = source.position();
        let dim = source.u64("dimension")?;
        let invalid = |what| error(FormatErrorKind::InvalidShape { reason: format!("a dimension is {what}") }, at);
        match usize::try_from(dim) {
            Ok(0) => return Err(invalid("zero")),
            Ok(dim) => shape.push(dim),
            Err(_) => return Err(invalid("too large")),
        }
    }
    shape.reverse(); // GGUF writes the contiguous dimension first.
    let type_at = source.position();
    let type_id = source.u32("tensor type")?;
    let Some(stored) = StoredType::from_gguf_id(type_id) else {
        return Err(error(FormatErrorKind::UnknownTensorType { found: type_id.to_string() }, type_at));
    };
    let num_bytes = num_bytes(&shape, stored).map_err(|kind| error(kind, begin))?;
    let offset = source.u64("tensor offset")?;
    let (name, shape) = (name.into(), shape.into_boxed_slice());
    Ok(TensorInfo { name, shape, offset, num_bytes, header_offset, file_idx: 0, stored })
}

/// Bytes of a tensor whose rows are each a whole number of blocks.
fn num_bytes(shape: &[usize], stored: StoredType) -> std::result::Result<u64, FormatErrorKind> {
    let elems = num_elements(shape)?;
    let cols = shape.last().copied().unwrap_or(1) as u64;
    if !cols.is_multiple_of(u64::from(stored.block_elems())) {
        let reason = format!("{cols} columns are no whole number of {stored} blocks of {}", stored.block_elems());
        return Err(FormatErrorKind::InvalidShape { reason });
    }
    let overflow = || FormatErrorKind::InvalidShape { reason: format!("{shape:?} of {stored} overflows") };
    stored.bytes_of(elems).ok_or_else(overflow)
}

/// Turns offsets within the data section into offsets within the file, and checks them.
fn place_tensors<R: Read>(source: &Source<'_, R>, tensors: &mut [TensorInfo], alignment: u64) -> Result<()> {
    let file: &Path = source.file();
    // Both stay far from overflow: the position is below the limit on headers.
    let data_begin = source.position().next_multiple_of(alignment);
    for tensor in &mut *tensors {
        if !tensor.offset.is_multiple_of(alignment) {
            let kind = FormatErrorKind::MisalignedTensor { found: tensor.offset, alignment };
            return Err(FormatError::new(file, kind).in_tensor(&tensor.name).at(tensor.header_offset));
        }
        tensor.offset = data_begin.saturating_add(tensor.offset);
    }
    check_layout(file, tensors, data_begin, source.length(), Holes::Allowed)
}
