//! A forward reader of untrusted bytes that always knows its position and how many bytes remain. Decides that nothing
//! is read or allocated before the remaining bytes justify it. Does not know any format.

use std::io::{ErrorKind, Read};
use std::path::Path;

use crate::error::{FormatError, FormatErrorKind, Result};

/// No header is larger than this, whatever length the file claims (a sparse file claims what it likes).
const MAX_HEADER_BYTES: u64 = 1 << 30;

/// Bytes of `length` read front to back.
pub(crate) struct Source<'f, R> {
    reader: R,
    position: u64,
    length: u64,
    file: &'f Path,
}

impl<'f, R: Read> Source<'f, R> {
    pub(crate) fn new(reader: R, length: u64, file: &'f Path) -> Self {
        Self { reader, position: 0, length, file }
    }

    pub(crate) fn file(&self) -> &'f Path {
        self.file
    }

    /// Bytes read so far.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Length of the whole file in bytes.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Bytes not yet read.
    pub(crate) fn remaining(&self) -> u64 {
        self.length.saturating_sub(self.position)
    }

    /// An error at the present position.
    pub(crate) fn error(&self, kind: FormatErrorKind) -> FormatError {
        FormatError::new(self.file, kind).at(self.position)
    }

    /// Fails unless `count` items of at least `min_bytes` each can still follow.
    pub(crate) fn expect(&self, what: &'static str, count: u64, min_bytes: u64) -> Result<()> {
        let needed = count.saturating_mul(min_bytes);
        if needed > self.remaining() {
            return Err(self.error(FormatErrorKind::Truncated { what, needed, remaining: self.remaining() }));
        }
        let header_bytes = self.position.saturating_add(needed);
        if header_bytes > MAX_HEADER_BYTES {
            let what = "header size in bytes";
            return Err(self.error(FormatErrorKind::LimitExceeded {
                what,
                found: header_bytes,
                limit: MAX_HEADER_BYTES,
            }));
        }
        Ok(())
    }

    /// Fills `into`.
    pub(crate) fn fill(&mut self, what: &'static str, into: &mut [u8]) -> Result<()> {
        let needed = into.len() as u64;
        self.expect(what, needed, 1)?;
        self.reader.read_exact(into).map_err(|error| {
            self.error(match error.kind() {
                ErrorKind::UnexpectedEof => {
                    FormatErrorKind::FileShrank { begin: self.position, end: self.position.saturating_add(needed) }
                }
                _ => FormatErrorKind::Io(error),
            })
        })?;
        self.position += needed;
        Ok(())
    }

    pub(crate) fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(what, &mut bytes)?;
        Ok(bytes)
    }

    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn u64(&mut self, what: &'static str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// Appends `count` bytes to `into`. Its capacity grows by doubling, but never past what the file can still fill.
    pub(crate) fn append(&mut self, what: &'static str, count: u64, into: &mut Vec<u8>) -> Result<()> {
        self.expect(what, count, 1)?;
        let start = into.len();
        let count = self.size(count)?;
        if into.capacity() - start < count {
            let could_follow = usize::try_from(self.remaining()).unwrap_or(usize::MAX);
            let extra = count.max(into.capacity().min(could_follow));
            reserve(into, extra).map_err(|kind| self.error(kind))?;
        }
        into.resize(start + count, 0);
        self.fill(what, &mut into[start..])
    }

    /// A string of `count` bytes, which the caller has bounded.
    pub(crate) fn string(&mut self, what: &'static str, count: u64) -> Result<Box<str>> {
        let begin = self.position;
        let mut bytes = Vec::new();
        self.append(what, count, &mut bytes)?;
        let text = String::from_utf8(bytes).map_err(|error| {
            let valid_bytes = error.utf8_error().valid_up_to() as u64;
            FormatError::new(self.file, FormatErrorKind::InvalidUtf8 { what }).at(begin + valid_bytes)
        })?;
        Ok(text.into_boxed_str())
    }

    /// A count as the machine's own size type.
    pub(crate) fn size(&self, count: u64) -> Result<usize> {
        usize::try_from(count).map_err(|_| self.error(FormatErrorKind::OutOfMemory { bytes: count }))
    }
}

/// Room for exactly `extra` more elements, or an error instead of an abort.
pub(crate) fn reserve<T>(into: &mut Vec<T>, extra: usize) -> std::result::Result<(), FormatErrorKind> {
    let bytes = extra.saturating_mul(size_of::<T>()) as u64;
    into.try_reserve_exact(extra).map_err(|_| FormatErrorKind::OutOfMemory { bytes })
}
