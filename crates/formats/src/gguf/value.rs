//! Metadata values and their wire types. Arrays are kept as plain vectors of their element type, and all strings of an
//! array share one buffer: a vocabulary of 262,144 tokens is two allocations. Knows no key.

use std::fmt;
use std::io::Read;

use crate::error::{FormatError, FormatErrorKind, Result, printable};
use crate::source::{Source, reserve};

/// Longest string outside of arrays. Chat templates, the longest in use, stay under 64 KiB.
const MAX_STRING_BYTES: u64 = 16 << 20;

/// The bytes a string takes at least: its length.
const MIN_STRING_BYTES: u64 = 8;

/// One metadata value.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // each variant is its own name
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(Box<str>),
    Array(Box<Array>),
}

/// An array of one element type.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // each variant is its own name
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    String(StringArray),
}

/// Many strings in one buffer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StringArray {
    text: String,
    ends: Vec<usize>,
}

impl StringArray {
    /// Number of strings.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no string.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The string of that index.
    #[must_use]
    pub fn get(&self, idx: usize) -> Option<&str> {
        let end = *self.ends.get(idx)?;
        let begin = if idx == 0 { 0 } else { *self.ends.get(idx - 1)? };
        self.text.get(begin..end)
    }

    /// All strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.len()).map(|idx| self.get(idx).unwrap_or_default())
    }

    /// Reads `count` strings. Each is bounded by what the strings after it need at least.
    fn read<R: Read>(source: &mut Source<'_, R>, count: u64) -> Result<Self> {
        const WHAT: &str = "array of strings";
        source.expect(WHAT, count, MIN_STRING_BYTES)?;
        let array_begin = source.position();
        let mut ends = Vec::new();
        reserve(&mut ends, source.size(count)?).map_err(|kind| source.error(kind))?;
        let mut text = Vec::new();
        for following in (0..count).rev() {
            let begin = source.position();
            let bytes = source.u64("string length")?;
            source.expect(WHAT, following, MIN_STRING_BYTES)?;
            let most = source.remaining() - following * MIN_STRING_BYTES;
            if bytes > most {
                let kind = FormatErrorKind::Truncated { what: "string", needed: bytes, remaining: most };
                return Err(FormatError::new(source.file(), kind).at(begin));
            }
            source.append("string", bytes, &mut text)?;
            ends.push(text.len());
        }
        Self::validate(text, ends).map_err(|(idx, text_offset)| {
            let lengths_before = (idx as u64 + 1) * MIN_STRING_BYTES;
            let kind = FormatErrorKind::InvalidUtf8 { what: "string" };
            FormatError::new(source.file(), kind).at(array_begin + lengths_before + text_offset as u64)
        })
    }

    /// Checks the text as a whole, which is several times faster than string by string, and then that no character
    /// spans two strings. Answers the string and the byte of the text that are at fault.
    fn validate(text: Vec<u8>, ends: Vec<usize>) -> std::result::Result<Self, (usize, usize)> {
        let mut text = String::from_utf8(text).map_err(|error| {
            let valid_bytes = error.utf8_error().valid_up_to();
            (ends.partition_point(|end| *end <= valid_bytes), valid_bytes)
        })?;
        if let Some(idx) = ends.iter().position(|end| !text.is_char_boundary(*end)) {
            return Err((idx, text.floor_char_boundary(ends[idx])));
        }
        text.shrink_to_fit();
        Ok(Self { text, ends })
    }
}

impl Array {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Array::U8(items) => items.len(),
            Array::I8(items) => items.len(),
            Array::U16(items) => items.len(),
            Array::I16(items) => items.len(),
            Array::U32(items) => items.len(),
            Array::I32(items) => items.len(),
            Array::U64(items) => items.len(),
            Array::I64(items) => items.len(),
            Array::F32(items) => items.len(),
            Array::F64(items) => items.len(),
            Array::Bool(items) => items.len(),
            Array::String(items) => items.len(),
        }
    }

    /// Whether there is no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn element_name(&self) -> &'static str {
        match self {
            Array::U8(_) => "u8",
            Array::I8(_) => "i8",
            Array::U16(_) => "u16",
            Array::I16(_) => "i16",
            Array::U32(_) => "u32",
            Array::I32(_) => "i32",
            Array::U64(_) => "u64",
            Array::I64(_) => "i64",
            Array::F32(_) => "f32",
            Array::F64(_) => "f64",
            Array::Bool(_) => "bool",
            Array::String(_) => "string",
        }
    }

    /// An array's element as a value; numbers and booleans only.
    pub(crate) fn number(&self, idx: usize) -> Option<Value> {
        Some(match self {
            Array::U8(items) => Value::U8(*items.get(idx)?),
            Array::I8(items) => Value::I8(*items.get(idx)?),
            Array::U16(items) => Value::U16(*items.get(idx)?),
            Array::I16(items) => Value::I16(*items.get(idx)?),
            Array::U32(items) => Value::U32(*items.get(idx)?),
            Array::I32(items) => Value::I32(*items.get(idx)?),
            Array::U64(items) => Value::U64(*items.get(idx)?),
            Array::I64(items) => Value::I64(*items.get(idx)?),
            Array::F32(items) => Value::F32(*items.get(idx)?),
            Array::F64(items) => Value::F64(*items.get(idx)?),
            Array::Bool(items) => Value::Bool(*items.get(idx)?),
            Array::String(_) => return None,
        })
    }

    fn read<R: Read>(source: &mut Source<'_, R>) -> Result<Self> {
        let begin = source.position();
        let type_id = source.u32("array element type")?;
        let count = source.u64("array length")?;
        Ok(match type_id {
            0 => Array::U8(numbers(source, count, |[byte]: [u8; 1]| byte)?),
            1 => Array::I8(numbers(source, count, i8::from_le_bytes)?),
            2 => Array::U16(numbers(source, count, u16::from_le_bytes)?),
            3 => Array::I16(numbers(source, count, i16::from_le_bytes)?),
            4 => Array::U32(numbers(source, count, u32::from_le_bytes)?),
            5 => Array::I32(numbers(source, count, i32::from_le_bytes)?),
            6 => Array::F32(numbers(source, count, f32::from_le_bytes)?),
            7 => Array::Bool(booleans(source, count)?),
            8 => Array::String(StringArray::read(source, count)?),
            9 => return Err(FormatError::new(source.file(), FormatErrorKind::NestedArray).at(begin)),
            10 => Array::U64(numbers(source, count, u64::from_le_bytes)?),
            11 => Array::I64(numbers(source, count, i64::from_le_bytes)?),
            12 => Array::F64(numbers(source, count, f64::from_le_bytes)?),
            found => {
                return Err(FormatError::new(source.file(), FormatErrorKind::UnknownValueType { found }).at(begin));
            }
        })
    }
}

/// `count` little-endian numbers of `N` bytes, read through a small buffer.
fn numbers<R: Read, T, const N: usize>(
    source: &mut Source<'_, R>,
    count: u64,
    decode: impl Fn([u8; N]) -> T,
) -> Result<Vec<T>> {
    const WHAT: &str = "array";
    source.expect(WHAT, count, N as u64)?;
    let mut left = source.size(count)?;
    let mut items = Vec::new();
    reserve(&mut items, left).map_err(|kind| source.error(kind))?;
    let mut buffer = [[0; N]; 512];
    while left > 0 {
        let chunk = &mut buffer[..left.min(512)];
        source.fill(WHAT, chunk.as_flattened_mut())?;
        items.extend(chunk.iter().map(|bytes| decode(*bytes)));
        left -= chunk.len();
    }
    Ok(items)
}

fn booleans<R: Read>(source: &mut Source<'_, R>, count: u64) -> Result<Vec<bool>> {
    let begin = source.position();
    let bytes = numbers(source, count, |[byte]: [u8; 1]| byte)?;
    if let Some(idx) = bytes.iter().position(|byte| *byte > 1) {
        let kind = FormatErrorKind::InvalidBool { found: bytes[idx] };
        return Err(FormatError::new(source.file(), kind).at(begin + idx as u64));
    }
    Ok(bytes.into_iter().map(|byte| byte == 1).collect())
}

/// A length-prefixed string of at most `limit` bytes.
pub(crate) fn read_string<R: Read>(source: &mut Source<'_, R>, what: &'static str, limit: u64) -> Result<Box<str>> {
    let begin = source.position();
    let bytes = source.u64("string length")?;
    let remaining = source.remaining();
    let kind = if bytes > remaining {
        FormatErrorKind::Truncated { what, needed: bytes, remaining }
    } else if bytes > limit {
        FormatErrorKind::LimitExceeded { what, found: bytes, limit }
    } else {
        return source.string(what, bytes);
    };
    Err(FormatError::new(source.file(), kind).at(begin))
}

impl Value {
    /// Reads a type id and the value behind it.
    pub(crate) fn read<R: Read>(source: &mut Source<'_, R>) -> Result<Self> {
        const WHAT: &str = "metadata value";
        let begin = source.position();
        let type_id = source.u32("metadata value type")?;
        Ok(match type_id {
            0 => Value::U8(u8::from_le_bytes(source.array(WHAT)?)),
            1 => Value::I8(i8::from_le_bytes(source.array(WHAT)?)),
            2 => Value::U16(u16::from_le_bytes(source.array(WHAT)?)),
            3 => Value::I16(i16::from_le_bytes(source.array(WHAT)?)),
            4 => Value::U32(u32::from_le_bytes(source.array(WHAT)?)),
            5 => Value::I32(i32::from_le_bytes(source.array(WHAT)?)),
            6 => Value::F32(f32::from_le_bytes(source.array(WHAT)?)),
            7 => match source.array(WHAT)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [found] => {
                    let kind = FormatErrorKind::InvalidBool { found };
                    return Err(FormatError::new(source.file(), kind).at(begin + 4));
                }
            },
            8 => Value::String(read_string(source, "string", MAX_STRING_BYTES)?),
            9 => Value::Array(Box::new(Array::read(source)?)),
            10 => Value::U64(u64::from_le_bytes(source.array(WHAT)?)),
            11 => Value::I64(i64::from_le_bytes(source.array(WHAT)?)),
            12 => Value::F64(f64::from_le_bytes(source.array(WHAT)?)),
            found => {
                return Err(FormatError::new(source.file(), FormatErrorKind::UnknownValueType { found }).at(begin));
            }
        })
    }

    /// The value as an integer, whatever its width; `None` for other types.
    #[must_use]
    pub fn as_integer(&self) -> Option<i128> {
        match self {
            Value::U8(value) => Some((*value).into()),
            Value::I8(value) => Some((*value).into()),
            Value::U16(value) => Some((*value).into()),
            Value::I16(value) => Some((*value).into()),
            Value::U32(value) => Some((*value).into()),
            Value::I32(value) => Some((*value).into()),
            Value::U64(value) => Some((*value).into()),
            Value::I64(value) => Some((*value).into()),
            _ => None,
        }
    }

    /// Type and value in a few words, for error messages.
    pub(crate) fn describe(&self) -> String {
        match self {
            Value::F32(_) | Value::F64(_) => format!("float {self}"),
            Value::Bool(_) => format!("boolean {self}"),
            Value::String(_) => format!("string {self}"),
            Value::Array(_) => format!("array {self}"),
            _ => format!("integer {self}"),
        }
    }
}

/// Short: long strings are cut, arrays give element type and length.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::F32(value) => write!(f, "{value}"),
            Value::F64(value) => write!(f, "{value}"),
            Value::Bool(value) => write!(f, "{value}"),
            Value::String(value) => write!(f, "\"{}\"", printable(value)),
            Value::Array(array) => write!(f, "[{}; {}]", array.element_name(), array.len()),
            _ => write!(f, "{}", self.as_integer().unwrap_or_default()),
        }
    }
}
