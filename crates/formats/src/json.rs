//! JSON files of a model folder: bounded size and depth, no key twice, and typed access that names the field in every
//! error. Knows no field.

use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde::de::{DeserializeOwned, DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::error::{FormatError, FormatErrorKind, Result, printable};

const MAX_DEPTH: u32 = 64;

/// Reads a regular file of at most `limit` bytes.
pub(crate) fn read_limited(path: &Path, limit: u64, hint: &str) -> Result<Vec<u8>> {
    let io_error = |error: std::io::Error| {
        let kind = match error.kind() {
            ErrorKind::NotFound => FormatErrorKind::MissingFile { hint: hint.to_owned() },
            _ => FormatErrorKind::Io(error),
        };
        FormatError::new(path, kind)
    };
    let metadata = std::fs::metadata(path).map_err(io_error)?;
    let invalid = |reason: &str| Err(FormatError::new(path, FormatErrorKind::Invalid { reason: reason.to_owned() }));
    if !metadata.is_file() {
        return invalid("not a regular file");
    }
    let too_large = |found| {
        let kind = FormatErrorKind::LimitExceeded { what: "file size in bytes", found, limit };
        Err(FormatError::new(path, kind))
    };
    if metadata.len() > limit {
        return too_large(metadata.len());
    }
    let mut bytes = Vec::new();
    let expected = usize::try_from(metadata.len()).unwrap_or(usize::MAX);
    crate::source::reserve(&mut bytes, expected.saturating_add(1)).map_err(|kind| FormatError::new(path, kind))?;
    let file = File::open(path).map_err(io_error)?;
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(io_error)?;
    match bytes.len() as u64 {
        found if found > limit => too_large(found),
        _ => Ok(bytes),
    }
}

/// The parser's complaint as an error of this crate.
pub(crate) fn error(file: &Path, error: &serde_json::Error) -> FormatError {
    FormatError::new(file, FormatErrorKind::Json { reason: printable(&error.to_string()) })
}

/// Parses an object, refusing a key that appears twice at any level and nesting deeper than 64.
pub(crate) fn parse_object(bytes: &[u8], file: &Path) -> Result<Map<String, Value>> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value = Strict { depth: 0 }.deserialize(&mut json).and_then(|value| json.end().map(|()| value));
    match value.map_err(|fault| error(file, &fault))? {
        Value::Object(map) => Ok(map),
        _ => Err(FormatError::new(file, FormatErrorKind::Json { reason: "expected an object".to_owned() })),
    }
}

/// Builds a [`Value`]; serde's own map would keep the last of two equal keys without a word.
struct Strict {
    depth: u32,
}

impl Strict {
    fn deeper<E: serde::de::Error>(&self) -> std::result::Result<Strict, E> {
        match self.depth {
            MAX_DEPTH => Err(E::custom(format!("nested deeper than {MAX_DEPTH} levels"))),
            depth => Ok(Strict { depth: depth + 1 }),
        }
    }
}

impl<'de> DeserializeSeed<'de> for Strict {
    type Value = Value;

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> std::result::Result<Value, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> std::result::Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(self.deeper()?)? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value_seed(self.deeper()?)?;
            if object.contains_key(&key) {
                return Err(A::Error::custom(format!("key '{}' appears more than once", printable(&key))));
            }
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}

/// Parses an object and keeps only the `wanted` fields, so that a large file costs little memory.
pub(crate) fn parse_selected(bytes: &[u8], file: &Path, wanted: &[&str]) -> Result<Map<String, Value>> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let map = Selected { wanted }.deserialize(&mut json).and_then(|map| json.end().map(|()| map));
    map.map_err(|fault| error(file, &fault))
}

struct Selected<'w> {
    wanted: &'w [&'w str],
}

impl<'de> DeserializeSeed<'de> for Selected<'_> {
    type Value = Map<String, Value>;

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> std::result::Result<Self::Value, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Selected<'_> {
    type Value = Map<String, Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            if !self.wanted.contains(&key.as_str()) {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let value = map.next_value_seed(Strict { depth: 1 })?;
            if object.contains_key(&key) {
                return Err(A::Error::custom(format!("key '{}' appears more than once", printable(&key))));
            }
            object.insert(key, value);
        }
        Ok(object)
    }
}

/// A JSON object with typed getters. `null` counts as absent, as it does in the files' own tools.
///
/// `get_*` answer `None` when the field is absent and an error when it has another type; `require_*` also make absence
/// an error. Every error names the file and the field.
#[derive(Clone, Debug)]
pub struct JsonFields {
    file: PathBuf,
    /// Path of this object within the file, with a dot behind it; empty at the top.
    prefix: String,
    map: Map<String, Value>,
}

impl JsonFields {
    pub(crate) fn new(file: &Path, prefix: &str, map: Map<String, Value>) -> Self {
        Self { file: file.to_path_buf(), prefix: prefix.to_owned(), map }
    }

    /// The same object less some fields.
    pub(crate) fn without(mut self, keys: &[&str]) -> Self {
        self.map.retain(|key, _| !keys.contains(&key.as_str()));
        self
    }

    /// The file it was read from.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The raw object.
    #[must_use]
    pub fn raw(&self) -> &Map<String, Value> {
        &self.map
    }

    /// The raw value of a field; `None` for `null` too.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub(crate) fn error(&self, key: &str, kind: FormatErrorKind) -> FormatError {
        FormatError::new(&self.file, kind).in_field(&format!("{}{key}", self.prefix))
    }

    /// An error about the value of a field, for checks that only the caller can make; names file and field.
    #[must_use]
    pub fn invalid(&self, key: &str, reason: &str) -> FormatError {
        self.error(key, FormatErrorKind::Invalid { reason: reason.to_owned() })
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
            return Err(self.error(key, FormatErrorKind::WrongType { expected, found: printable(&value.to_string()) }));
        }
        Ok(converted)
    }

    fn required<T>(&self, key: &str, expected: &'static str, found: Result<Option<T>>) -> Result<T> {
        found?.ok_or_else(|| self.error(key, FormatErrorKind::MissingField { expected }))
    }

    /// An unsigned integer.
    ///
    /// # Errors
    /// Another type, or negative.
    pub fn get_usize(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, UNSIGNED, |value| value.as_u64().and_then(|value| usize::try_from(value).ok()))
    }

    /// As [`get_usize`](Self::get_usize), for a field that must be there.
    ///
    /// # Errors
    /// Also when the field is missing.
    pub fn require_usize(&self, key: &str) -> Result<usize> {
        self.required(key, UNSIGNED, self.get_usize(key))
    }

    /// A number, integer or not.
    ///
    /// # Errors
    /// Another type.
    pub fn get_f64(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, NUMBER, Value::as_f64)
    }

    /// As [`get_f64`](Self::get_f64), for a field that must be there.
    ///
    /// # Errors
    /// Also when the field is missing.
    pub fn require_f64(&self, key: &str) -> Result<f64> {
        self.required(key, NUMBER, self.get_f64(key))
    }

    /// A boolean.
    ///
    /// # Errors
    /// Another type.
    pub fn get_bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "boolean", Value::as_bool)
    }

    /// A string.
    ///
    /// # Errors
    /// Another type.
    pub fn get_str(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, STRING, Value::as_str)
    }

    /// As [`get_str`](Self::get_str), for a field that must be there.
    ///
    /// # Errors
    /// Also when the field is missing.
    pub fn require_str(&self, key: &str) -> Result<&str> {
        self.required(key, STRING, self.get_str(key))
    }

    /// A list of strings.
    ///
    /// # Errors
    /// Another type.
    pub fn get_strings(&self, key: &str) -> Result<Option<Vec<&str>>> {
        self.typed(key, "list of strings", |value| value.as_array()?.iter().map(Value::as_str).collect())
    }

    /// A token id. The files' own tools write -1 for "none", which is absent here.
    ///
    /// # Errors
    /// Another type, another negative number, or more than 32 bits.
    pub fn get_token_id(&self, key: &str) -> Result<Option<u32>> {
        if self.get(key).and_then(Value::as_i64) == Some(-1) {
            return Ok(None);
        }
        self.typed(key, "token id", token_id)
    }

    /// Token ids, written as one id or as a list; empty when absent.
    ///
    /// # Errors
    /// Another type, or an element that is no token id.
    pub fn get_token_ids(&self, key: &str) -> Result<Vec<u32>> {
        match self.get(key) {
            Some(Value::Array(_)) => {
                let ids = self.typed(key, "list of token ids", |value| {
                    value.as_array()?.iter().map(token_id).collect::<Option<Vec<u32>>>()
                });
                Ok(ids?.unwrap_or_default())
            }
            _ => Ok(self.get_token_id(key)?.into_iter().collect()),
        }
    }

    /// An object.
    ///
    /// # Errors
    /// Another type.
    pub fn get_object(&self, key: &str) -> Result<Option<JsonFields>> {
        let map = self.typed(key, "object", Value::as_object)?;
        Ok(map.map(|map| Self::new(&self.file, &format!("{}{key}.", self.prefix), map.clone())))
    }

    /// The whole object as a struct of the caller's.
    ///
    /// # Errors
    /// A field is missing or of another type; names the file and the field where serde does.
    pub fn deserialize<T: DeserializeOwned>(&self) -> Result<T> {
        T::deserialize(&self.map).map_err(|fault| error(&self.file, &fault))
    }

    /// Fields that are set and not in `known`, in file order: what the caller does not understand.
    pub fn unknown_fields<'a>(&'a self, known: &'a [&'a str]) -> impl Iterator<Item = (&'a str, &'a Value)> {
        let unknown = move |(key, value): &(&str, &Value)| !value.is_null() && !known.contains(key);
        self.map.iter().map(|(key, value)| (key.as_str(), value)).filter(unknown)
    }
}

fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|value| u32::try_from(value).ok())
}

const UNSIGNED: &str = "unsigned integer";
const NUMBER: &str = "number";
const STRING: &str = "string";
