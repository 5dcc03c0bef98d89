//! The one error of this room. Decides how a fault in a file is worded: which file, which field (a metadata key, a
//! tensor, a JSON field), at which byte. Does not know who asked, nor what the caller does about it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Result of every function of this crate.
pub type Result<T> = std::result::Result<T, FormatError>;

/// A model file that cannot be read, is malformed, or holds what Pagemill does not take.
///
/// Reads as one sentence: `model.gguf: tensor 'output.weight': <what is wrong> (at byte 1234)`. Text that comes from
/// the file is shortened and its control characters are escaped, so the message is safe to print.
pub struct FormatError(Box<Report>);

struct Report {
    file: PathBuf,
    field: Option<String>,
    offset: Option<u64>,
    kind: FormatErrorKind,
}

/// What is wrong, without the place.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatErrorKind {
    /// The operating system refused.
    #[error("cannot read: {0}")]
    Io(#[source] io::Error),
    /// A member of a model folder, or the model itself, does not exist.
    #[error("not found; {hint}")]
    MissingFile {
        /// What the user can do about it.
        hint: String,
    },
    /// The path is neither a GGUF file nor a Hugging Face folder.
    #[error("{found}; expected a GGUF file, or a folder with config.json, tokenizer.json and *.safetensors")]
    NotAModel {
        /// What was found instead.
        found: String,
    },
    /// The file does not start as its format does.
    #[error("not a GGUF file: it starts with {found:02x?} instead of \"GGUF\"{hint}")]
    WrongMagic {
        /// The first four bytes.
        found: [u8; 4],
        /// Which format it looks like, when it is a known one; empty otherwise.
        hint: &'static str,
    },
    /// A format version that Pagemill does not read.
    #[error("GGUF version {found} is not supported (2 and 3 are)")]
    UnsupportedVersion {
        /// The version in the file.
        found: u32,
    },
    /// The file was written for a big-endian machine.
    #[error("this is a big-endian GGUF file; only little-endian files are supported")]
    BigEndian,
    /// The file is one part of a model split over several files.
    #[error("this is part {part} of a GGUF model split into {count} files; merge them into one file first")]
    SplitGguf {
        /// Counted from 1.
        part: u64,
        /// How many files there are.
        count: u64,
    },
    /// The bytes end before the thing that was announced.
    #[error("{what} needs {needed} bytes but only {remaining} remain: the file is truncated or malformed")]
    Truncated {
        /// The thing being read.
        what: &'static str,
        /// Bytes it takes, at least.
        needed: u64,
        /// Bytes left in the file.
        remaining: u64,
    },
    /// A count, length or depth above what any sane file holds.
    #[error("{what} is {found}, above the limit of {limit}")]
    LimitExceeded {
        /// The quantity.
        what: &'static str,
        /// Its value in the file.
        found: u64,
        /// The greatest value taken.
        limit: u64,
    },
    /// Not enough memory for a size that the file justifies.
    #[error("cannot allocate {bytes} bytes")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: u64,
    },
    /// Text that is not UTF-8.
    #[error("{what} is not valid UTF-8")]
    InvalidUtf8 {
        /// The text.
        what: &'static str,
    },
    /// A boolean byte other than 0 and 1.
    #[error("boolean byte is {found}, expected 0 or 1")]
    InvalidBool {
        /// The byte in the file.
        found: u8,
    },
    /// A metadata value type id that GGUF does not define.
    #[error("unknown metadata value type {found}")]
    UnknownValueType {
        /// The id in the file.
        found: u32,
    },
    /// An array of arrays, which no known key uses.
    #[error("arrays of arrays are not supported")]
    NestedArray,
    /// The same metadata key or JSON field twice.
    #[error("appears more than once")]
    DuplicateKey,
    /// The same tensor twice.
    #[error("appears more than once (also in {other})")]
    DuplicateTensor {
        /// The file of the first one.
        other: String,
    },
    /// A field is absent and has no default.
    #[error("missing (expected {expected})")]
    MissingField {
        /// The type that was looked for.
        expected: &'static str,
    },
    /// A field has another type, or a value outside the type.
    #[error("expected {expected}, found {found}")]
    WrongType {
        /// The type that was looked for.
        expected: &'static str,
        /// Type and value in the file, shortened.
        found: String,
    },
    /// `general.alignment` is no usable power of two.
    #[error("alignment {found} is not a power of two from 8 to 65536")]
    InvalidAlignment {
        /// The value in the file.
        found: u64,
    },
    /// A shape that cannot be: no dimension, a zero, an overflow, a row that is no whole number of blocks.
    #[error("invalid shape: {reason}")]
    InvalidShape {
        /// Which rule it breaks.
        reason: String,
    },
    /// A tensor's data does not start at a multiple of the file's alignment.
    #[error("data offset {found} is not a multiple of the alignment {alignment}")]
    MisalignedTensor {
        /// Offset within the data section.
        found: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor's data lies (partly) behind the end of the file.
    #[error(
        "data occupies bytes {begin}..{end} but the file ends at {file_len}: it is truncated or the download is incomplete"
    )]
    TensorBeyondEnd {
        /// First byte, from the start of the file.
        begin: u64,
        /// One past the last byte.
        end: u64,
        /// The file's length.
        file_len: u64,
    },
    /// Two tensors share bytes.
    #[error("data overlaps that of tensor '{other}'")]
    OverlappingTensor {
        /// The tensor that lies before it.
        other: String,
    },
    /// Bytes of the data section belong to no tensor, where the format forbids that.
    #[error("bytes {begin}..{end} of the data section belong to no tensor")]
    Hole {
        /// First byte, from the start of the data section.
        begin: u64,
        /// One past the last byte.
        end: u64,
    },
    /// The byte range in a safetensors header is not what shape and dtype take.
    #[error("shape {shape:?} of {dtype} takes {expected} bytes but the header gives it {found}")]
    ByteRangeMismatch {
        /// Dimensions, row-major.
        shape: Vec<usize>,
        /// Element type.
        dtype: &'static str,
        /// Bytes that shape and type take.
        expected: u64,
        /// Bytes between the two offsets.
        found: u64,
    },
    /// A tensor type id or dtype whose size is not known, so that the file cannot be checked.
    #[error("unknown tensor type {found}")]
    UnknownTensorType {
        /// Id or name in the file.
        found: String,
    },
    /// A known tensor type that Pagemill does not compute with.
    #[error("tensor type {name} is not supported")]
    UnsupportedTensorType {
        /// The type's name.
        name: &'static str,
    },
    /// No tensor of that name.
    #[error("no such tensor{hint}")]
    MissingTensor {
        /// Where it was expected, when an index says so; empty otherwise.
        hint: String,
    },
    /// A read asked for rows that the tensor has not, or brought a buffer of another size.
    #[error("invalid read: {reason}")]
    InvalidRead {
        /// What does not fit.
        reason: String,
    },
    /// The file became shorter after it was opened.
    #[error("bytes {begin}..{end} cannot be read any more: the file was truncated after it was opened")]
    FileShrank {
        /// First byte wanted.
        begin: u64,
        /// One past the last byte wanted.
        end: u64,
    },
    /// Text that is not the JSON that was expected.
    #[error("invalid JSON: {reason}")]
    Json {
        /// The parser's words, with line and column.
        reason: String,
    },
    /// A value that is well formed but means nothing here.
    #[error("{reason}")]
    Invalid {
        /// What is wrong with it.
        reason: String,
    },
}

impl FormatError {
    pub(crate) fn new(file: &Path, kind: FormatErrorKind) -> Self {
        Self(Box::new(Report { file: file.to_path_buf(), field: None, offset: None, kind }))
    }

    /// Names the field, unless a more precise one is already named.
    pub(crate) fn in_field(mut self, field: &str) -> Self {
        self.0.field.get_or_insert_with(|| printable(field));
        self
    }

    /// Names the tensor, unless a more precise field is already named.
    pub(crate) fn in_tensor(mut self, tensor: &str) -> Self {
        self.0.field.get_or_insert_with(|| format!("tensor '{}'", printable(tensor)));
        self
    }

    /// Says at which byte of the file, unless that is already known.
    pub(crate) fn at(mut self, offset: u64) -> Self {
        self.0.offset.get_or_insert(offset);
        self
    }

    /// The file that is at fault.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.0.file
    }

    /// The metadata key, JSON field or tensor at fault.
    #[must_use]
    pub fn field(&self) -> Option<&str> {
        self.0.field.as_deref()
    }

    /// The byte at which the fault was met, from the start of the file.
    #[must_use]
    pub fn offset(&self) -> Option<u64> {
        self.0.offset
    }

    /// What is wrong.
    #[must_use]
    pub fn kind(&self) -> &FormatErrorKind {
        &self.0.kind
    }
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.0.file.display())?;
        if let Some(field) = &self.0.field {
            write!(f, "{field}: ")?;
        }
        write!(f, "{}", self.0.kind)?;
        match self.0.offset {
            Some(offset) => write!(f, " (at byte {offset})"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FormatError({self})")
    }
}

impl std::error::Error for FormatError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.0.kind)
    }
}

/// Text from a file as it may be shown: at most 120 characters, control characters escaped.
pub(crate) fn printable(text: &str) -> String {
    const SHOWN_CHARS: usize = 120;
    let mut shown = String::new();
    for (idx, char) in text.chars().enumerate() {
        if idx == SHOWN_CHARS {
            shown.push('…');
            break;
        }
        if char.is_control() {
            shown.extend(char.escape_debug());
        } else {
            shown.push(char);
        }
    }
    shown
}
