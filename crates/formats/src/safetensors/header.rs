//! The header of one safetensors file: eight bytes of length, then a JSON object of entries, then the data. Decides
//! what is refused before it costs memory: the JSON is parsed as it streams past, entry by entry, never held whole.

use std::cell::Cell;
use std::fmt;
use std::io::{self, Read};
use std::path::Path;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::error::{FormatError, FormatErrorKind, Result};
use crate::source::{Source, reserve};
use crate::tensor::{Holes, TensorInfo, check_layout, num_elements};
use crate::tensor_type::StoredType;

/// The format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// `"a":{"dtype":"F4","shape":[],"data_offsets":[0,0]},` and the braces: no entry is shorter.
const MIN_ENTRY_BYTES: u64 = 50;
/// The largest models have under 100,000, spread over many files.
const MAX_TENSORS: usize = 131_072;
/// Convolutions have five.
const MAX_DIMS: usize = 8;
/// Longest run without a quotation mark: bounds what one string can make the JSON parser hold.
const MAX_STRING_BYTES: u32 = 1 << 20;
const MAX_NAME_BYTES: usize = 65_535;
const METADATA: &str = "__metadata__";

/// Parses and checks a header. The tensors carry file index 0.
pub(crate) fn parse<R: Read>(mut reader: R, length: u64, file: &Path) -> Result<Vec<TensorInfo>> {
    let mut source = Source::new(&mut reader, length, file);
    let header_bytes = source.u64("header length")?;
    let what = "header length";
    let kind = if header_bytes > source.remaining() {
        Some(FormatErrorKind::Truncated { what: "header", needed: header_bytes, remaining: source.remaining() })
    } else if header_bytes > MAX_HEADER_BYTES {
        Some(FormatErrorKind::LimitExceeded { what: "the length", found: header_bytes, limit: MAX_HEADER_BYTES })
    } else {
        None
    };
    if let Some(kind) = kind {
        return Err(FormatError::new(file, kind).in_field(what).at(0));
    }
    let data_begin = source.position() + header_bytes;
    let mut tensors = parse_entries(reader, header_bytes, file)?;
    for tensor in &mut tensors {
        check_size(tensor)
            .map_err(|kind| FormatError::new(file, kind).in_tensor(&tensor.name).at(tensor.header_offset))?;
        tensor.offset = data_begin.saturating_add(tensor.offset);
    }
    check_layout(file, &tensors, data_begin, length, Holes::Refused)?;
    Ok(tensors)
}

/// Shape times element size must be the byte range.
fn check_size(tensor: &TensorInfo) -> std::result::Result<(), FormatErrorKind> {
    let elems = num_elements(&tensor.shape)?;
    let Some(expected) = tensor.stored.bytes_of(elems) else {
        let reason = format!("{:?} of {} overflows or is no whole number of bytes", tensor.shape, tensor.stored);
        return Err(FormatErrorKind::InvalidShape { reason });
    };
    if expected != tensor.num_bytes {
        let (shape, dtype) = (tensor.shape.to_vec(), tensor.stored.name());
        return Err(FormatErrorKind::ByteRangeMismatch { shape, dtype, expected, found: tensor.num_bytes });
    }
    Ok(())
}

fn parse_entries<R: Read>(reader: R, header_bytes: u64, file: &Path) -> Result<Vec<TensorInfo>> {
    let position = Cell::new(8);
    let mut entries = Entries { tensors: Vec::new(), position: &position, problem: None };
    let most = usize::try_from(header_bytes / MIN_ENTRY_BYTES).unwrap_or(usize::MAX);
    reserve(&mut entries.tensors, most.min(MAX_TENSORS)).map_err(|kind| FormatError::new(file, kind))?;
    let reader = HeaderReader { reader, left: header_bytes, position: &position, unquoted_bytes: 0, escaped: false };
    let mut json = serde_json::Deserializer::from_reader(reader);
    let parsed = entries.deserialize(&mut json).and_then(|()| json.end());
    if let Some((name, kind)) = entries.problem {
        return Err(FormatError::new(file, kind).in_tensor(&name).at(position.get()));
    }
    parsed.map_err(|error| {
        let kind = match error.classify() {
            serde_json::error::Category::Io if error.io_error_kind() != Some(io::ErrorKind::InvalidData) => {
                FormatErrorKind::Io(error.into())
            }
            _ => FormatErrorKind::Json { reason: crate::error::printable(&error.to_string()) },
        };
        FormatError::new(file, kind).in_field("header").at(position.get())
    })?;
    // Shrinking may hold both copies for a moment, so it must be worth it.
    if entries.tensors.len() < entries.tensors.capacity() / 2 {
        entries.tensors.shrink_to_fit();
    }
    Ok(entries.tensors)
}

/// Hands out the header's bytes and no more, and counts them.
struct HeaderReader<'p, R> {
    reader: R,
    left: u64,
    position: &'p Cell<u64>,
    unquoted_bytes: u32,
    /// The last byte was a backslash that was not itself escaped.
    escaped: bool,
}

impl<R: Read> Read for HeaderReader<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(into.len());
        let read = self.reader.read(&mut into[..most])?;
        if read == 0 && most > 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file was truncated while it was read"));
        }
        for byte in &into[..read] {
            match byte {
                b'"' if !self.escaped => self.unquoted_bytes = 0,
                _ => self.unquoted_bytes += 1,
            }
            self.escaped = *byte == b'\\' && !self.escaped;
            if self.unquoted_bytes > MAX_STRING_BYTES {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a string is longer than 1 MiB"));
            }
        }
        self.left -= read as u64;
        self.position.set(self.position.get() + read as u64);
        Ok(read)
    }
}

/// Collects entries; a fault that JSON itself does not know is kept in `problem` with the tensor's name.
struct Entries<'p> {
    tensors: Vec<TensorInfo>,
    position: &'p Cell<u64>,
    problem: Option<(String, FormatErrorKind)>,
}

impl<'de> DeserializeSeed<'de> for &mut Entries<'_> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> std::result::Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Entries<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
        let mut has_metadata = false;
        while let Some(Name(name)) = map.next_key()? {
            if &*name == METADATA {
                map.next_value::<IgnoredAny>()?;
                if std::mem::replace(&mut has_metadata, true) {
                    self.problem = Some((name.into(), FormatErrorKind::DuplicateKey));
                    return Err(A::Error::custom("duplicate"));
                }
                continue;
            }
            let RawEntry { dtype, shape, data_offsets: (begin, end) } = map.next_value()?;
            let num_tensors = self.tensors.len() as u64 + 1;
            let kind = match (dtype.0, end.checked_sub(begin)) {
                _ if num_tensors > MAX_TENSORS as u64 => FormatErrorKind::LimitExceeded {
                    what: "number of tensors",
                    found: num_tensors,
                    limit: MAX_TENSORS as u64,
                },
                (Ok(stored), Some(num_bytes)) => {
                    let header_offset = self.position.get();
                    let (offset, shape) = (begin, shape.0);
                    let tensor = TensorInfo { name, shape, offset, num_bytes, header_offset, file_idx: 0, stored };
                    self.tensors.push(tensor);
                    continue;
                }
                (Err(found), _) => FormatErrorKind::UnknownTensorType { found },
                (_, None) => FormatErrorKind::Invalid { reason: format!("data offsets {begin}..{end} run backwards") },
            };
            self.problem = Some((name.into(), kind));
            return Err(A::Error::custom("problem"));
        }
        Ok(())
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    dtype: Dtype,
    shape: Shape,
    data_offsets: (u64, u64),
}

/// A name of bounded length.
struct Name(Box<str>);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: serde::Deserializer<'de>>(json: D) -> std::result::Result<Self, D::Error> {
        struct NameVisitor;
        impl Visitor<'_> for NameVisitor {
            type Value = Name;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a tensor name of at most {MAX_NAME_BYTES} bytes")
            }

            fn visit_str<E: serde::de::Error>(self, name: &str) -> std::result::Result<Name, E> {
                if name.len() > MAX_NAME_BYTES {
                    return Err(E::invalid_length(name.len(), &self));
                }
                Ok(Name(name.into()))
            }
        }
        json.deserialize_str(NameVisitor)
    }
}

/// A dtype, or the unknown name.
struct Dtype(std::result::Result<StoredType, String>);

impl<'de> Deserialize<'de> for Dtype {
    fn deserialize<D: serde::Deserializer<'de>>(json: D) -> std::result::Result<Self, D::Error> {
        struct DtypeVisitor;
        impl Visitor<'_> for DtypeVisitor {
            type Value = Dtype;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a dtype")
            }

            fn visit_str<E: serde::de::Error>(self, name: &str) -> std::result::Result<Dtype, E> {
                Ok(Dtype(StoredType::from_safetensors_name(name).ok_or_else(|| crate::error::printable(name))))
            }
        }
        json.deserialize_str(DtypeVisitor)
    }
}

/// At most [`MAX_DIMS`] dimensions.
struct Shape(Box<[usize]>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: serde::Deserializer<'de>>(json: D) -> std::result::Result<Self, D::Error> {
        struct ShapeVisitor;
        impl<'de> Visitor<'de> for ShapeVisitor {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a shape of at most {MAX_DIMS} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Shape, A::Error> {
                let (mut dims, mut num_dims) = ([0; MAX_DIMS], 0);
                while let Some(dim) = seq.next_element::<usize>()? {
                    let Some(slot) = dims.get_mut(num_dims) else {
                        return Err(A::Error::invalid_length(num_dims + 1, &self));
                    };
                    *slot = dim;
                    num_dims += 1;
                }
                Ok(Shape(dims[..num_dims].into()))
            }
        }
        json.deserialize_seq(ShapeVisitor)
    }
}
