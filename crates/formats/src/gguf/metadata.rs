//! The key-value table of a GGUF file with typed access. Decides how a missing, mistyped or out-of-range value is
//! reported. Knows no key.

use std::path::{Path, PathBuf};

use crate::error::{FormatError, FormatErrorKind, Result};
use crate::gguf::value::{Array, StringArray, Value};

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) key: Box<str>,
    pub(crate) value: Value,
    /// Where the entry begins in the file.
    pub(crate) offset: u64,
}

/// All metadata of a file, in file order; found by key by binary search.
///
/// `get_*` answer `None` when the key is absent and an error when it has another type; `require_*` also make absence an
/// error. Every error names file, key and byte.
#[derive(Debug)]
pub struct Metadata {
    file: PathBuf,
    entries: Vec<Entry>,
    by_key: Vec<u32>,
}

impl Metadata {
    pub(crate) fn new(file: &Path, entries: Vec<Entry>) -> Result<Self> {
        let mut by_key: Vec<u32> = (0u32..).take(entries.len()).collect();
        by_key.sort_unstable_by_key(|idx| (&*entries[*idx as usize].key, *idx));
        for pair in by_key.windows(2) {
            let (first, second) = (&entries[pair[0] as usize], &entries[pair[1] as usize]);
            if first.key == second.key {
                let error = FormatError::new(file, FormatErrorKind::DuplicateKey);
                return Err(error.in_field(&second.key).at(second.offset));
            }
        }
        Ok(Self { file: file.to_path_buf(), entries, by_key })
    }

    /// The file it was read from.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Keys and values in file order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|entry| (&*entry.key, &entry.value))
    }

    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entry(key).map(|entry| &entry.value)
    }

    fn entry(&self, key: &str) -> Option<&Entry> {
        let found = self.by_key.binary_search_by_key(&key, |idx| &*self.entries[*idx as usize].key).ok()?;
        self.entries.get(self.by_key[found] as usize)
    }

    /// An error about a key, for checks that only the caller can make.
    pub(crate) fn error(&self, key: &str, kind: FormatErrorKind) -> FormatError {
        let error = FormatError::new(&self.file, kind).in_field(key);
        match self.entry(key) {
            Some(entry) => error.at(entry.offset),
            None => error,
        }
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let converted = convert(value);
        if converted.is_none() {
            return Err(self.error(key, FormatErrorKind::WrongType { expected, found: value.describe() }));
        }
        Ok(converted)
    }

    fn required<T>(&self, key: &str, expected: &'static str, found: Result<Option<T>>) -> Result<T> {
        found?.ok_or_else(|| self.error(key, FormatErrorKind::MissingField { expected }))
    }

    /// An integer of any width that fits in 32 bits, unsigned.
    ///
    /// # Errors
    /// Another type, negative, or too large.
    pub fn get_u32(&self, key: &str) -> Result<Option<u32>> {
        self.typed(key, U32, |value| value.as_integer().and_then(|value| u32::try_from(value).ok()))
    }

    /// As [`get_u32`](Self::get_u32), for a key that must be there.
    ///
    /// # Errors
    /// Also when the key is missing.
    pub fn require_u32(&self, key: &str) -> Result<u32> {
        self.required(key, U32, self.get_u32(key))
    }

    /// An integer of any width that fits in 64 bits, unsigned.
    ///
    /// # Errors
    /// Another type, or negative.
    pub fn get_u64(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, U64, |value| value.as_integer().and_then(|value| u64::try_from(value).ok()))
    }

    /// A float of either width.
    ///
    /// # Errors
    /// Another type.
    pub fn get_f64(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, FLOAT, |value| match value {
            Value::F32(value) => Some(f64::from(*value)),
            Value::F64(value) => Some(*value),
            _ => None,
        })
    }

    /// As [`get_f64`](Self::get_f64), for a key that must be there.
    ///
    /// # Errors
    /// Also when the key is missing.
    pub fn require_f64(&self, key: &str) -> Result<f64> {
        self.required(key, FLOAT, self.get_f64(key))
    }

    /// A boolean.
    ///
    /// # Errors
    /// Another type.
    pub fn get_bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "boolean", |value| if let Value::Bool(value) = value { Some(*value) } else { None })
    }

    /// A string.
    ///
    /// # Errors
    /// Another type.
    pub fn get_str(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, STRING, |value| if let Value::String(value) = value { Some(&**value) } else { None })
    }

    /// As [`get_str`](Self::get_str), for a key that must be there.
    ///
    /// # Errors
    /// Also when the key is missing.
    pub fn require_str(&self, key: &str) -> Result<&str> {
        self.required(key, STRING, self.get_str(key))
    }

    /// An array of strings.
    ///
    /// # Errors
    /// Another type.
    pub fn get_strings(&self, key: &str) -> Result<Option<&StringArray>> {
        self.typed(key, STRINGS, |value| match value {
            Value::Array(array) => match &**array {
                Array::String(items) => Some(items),
                _ => None,
            },
            _ => None,
        })
    }

    /// As [`get_strings`](Self::get_strings), for a key that must be there.
    ///
    /// # Errors
    /// Also when the key is missing.
    pub fn require_strings(&self, key: &str) -> Result<&StringArray> {
        self.required(key, STRINGS, self.get_strings(key))
    }

    /// An array of 32-bit floats.
    ///
    /// # Errors
    /// Another type.
    pub fn get_f32s(&self, key: &str) -> Result<Option<&[f32]>> {
        self.typed(key, "array of f32", |value| match value {
            Value::Array(array) => match &**array {
                Array::F32(items) => Some(&**items),
                _ => None,
            },
            _ => None,
        })
    }

    /// An array of integers of any width that all fit in `i32`. Allocates.
    ///
    /// # Errors
    /// Another type, or an element that does not fit.
    pub fn get_i32s(&self, key: &str) -> Result<Option<Vec<i32>>> {
        self.typed(key, "array of integers", |value| match value {
            Value::Array(array) => match &**array {
                Array::I32(items) => Some(items.clone()),
                array => {
                    let integer = |idx| array.number(idx).and_then(|value| value.as_integer());
                    (0..array.len()).map(|idx| i32::try_from(integer(idx)?).ok()).collect()
                }
            },
            _ => None,
        })
    }

    /// A value that some files give once and others per layer: the integer repeated `num_layers` times, or an array
    /// of exactly that length.
    ///
    /// # Errors
    /// Another type, another length, negative, or too large.
    pub fn get_u32_per_layer(&self, key: &str, num_layers: usize) -> Result<Option<Vec<u32>>> {
        match self.get(key) {
            Some(Value::Array(array)) => {
                let integer = |idx| array.number(idx).and_then(|value| value.as_integer());
                let items: Option<Vec<u32>> = (0..array.len()).map(|idx| u32::try_from(integer(idx)?).ok()).collect();
                match items {
                    Some(items) if items.len() == num_layers => Ok(Some(items)),
                    _ => {
                        let found = Value::Array(array.clone()).describe();
                        let expected = "unsigned integer, or one for each layer";
                        Err(self.error(key, FormatErrorKind::WrongType { expected, found }))
                    }
                }
            }
            _ => Ok(self.get_u32(key)?.map(|value| vec![value; num_layers])),
        }
    }
}

const U32: &str = "unsigned 32-bit integer";
const U64: &str = "unsigned integer";
const FLOAT: &str = "float";
const STRING: &str = "string";
const STRINGS: &str = "array of strings";
