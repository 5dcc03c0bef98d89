//! The fields that frames are made of: numbers, flags, texts, lists. Decides what a field's bytes are and
//! when there are too few or too many; knows no frame.

use super::FrameError;

/// Appends fields.
pub(super) struct Writer<'a> {
    bytes: &'a mut Vec<u8>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(bytes: &'a mut Vec<u8>) -> Self {
        Self { bytes }
    }

    pub(super) fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    pub(super) fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    pub(super) fn f32(&mut self, value: f32) {
        self.bytes(&value.to_le_bytes());
    }

    pub(super) fn size(&mut self, value: usize) {
        self.u64(value as u64);
    }

    pub(super) fn flag(&mut self, value: bool) {
        self.u8(u8::from(value));
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The length of a list.
    pub(super) fn count(&mut self, field: &'static str, count: usize, max: usize) -> Result<(), FrameError> {
        match u32::try_from(count) {
            Ok(short) if count <= max => {
                self.u32(short);
                Ok(())
            }
            _ => Err(FrameError::TooLong { field, got: count as u64, max: max as u64 }),
        }
    }

    pub(super) fn text(&mut self, field: &'static str, text: &str, max: usize) -> Result<(), FrameError> {
        self.count(field, text.len(), max)?;
        self.bytes(text.as_bytes());
        Ok(())
    }

    pub(super) fn list_u32(
        &mut self,
        field: &'static str,
        values: impl ExactSizeIterator<Item = u32>,
        max: usize,
    ) -> Result<(), FrameError> {
        self.count(field, values.len(), max)?;
        values.for_each(|value| self.u32(value));
        Ok(())
    }

    pub(super) fn option_u32(&mut self, value: Option<u32>) {
        self.flag(value.is_some());
        if let Some(value) = value {
            self.u32(value);
        }
    }
}

/// Takes fields off.
pub(super) struct Reader<'a> {
    left: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { left: bytes }
    }

    /// Nothing may be left.
    pub(super) fn finish(self) -> Result<(), FrameError> {
        if self.left.is_empty() { Ok(()) } else { Err(FrameError::Trailing { bytes: self.left.len() }) }
    }

    fn take(&mut self, field: &'static str, count: usize) -> Result<&'a [u8], FrameError> {
        let truncated = FrameError::Truncated { field, needed: count, left: self.left.len() };
        let (taken, left) = self.left.split_at_checked(count).ok_or(truncated)?;
        self.left = left;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], FrameError> {
        let truncated = FrameError::Truncated { field, needed: N, left: self.left.len() };
        let (taken, left) = self.left.split_first_chunk::<N>().ok_or(truncated)?;
        self.left = left;
        Ok(*taken)
    }

    pub(super) fn u8(&mut self, field: &'static str) -> Result<u8, FrameError> {
        self.array::<1>(field).map(|[byte]| byte)
    }

    pub(super) fn u16(&mut self, field: &'static str) -> Result<u16, FrameError> {
        self.array(field).map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self, field: &'static str) -> Result<u32, FrameError> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, field: &'static str) -> Result<u64, FrameError> {
        self.array(field).map(u64::from_le_bytes)
    }

    pub(super) fn f32(&mut self, field: &'static str) -> Result<f32, FrameError> {
        self.array(field).map(f32::from_le_bytes)
    }

    pub(super) fn size(&mut self, field: &'static str) -> Result<usize, FrameError> {
        let got = self.u64(field)?;
        usize::try_from(got).map_err(|_| FrameError::Value { field, got })
    }

    pub(super) fn flag(&mut self, field: &'static str) -> Result<bool, FrameError> {
        match self.u8(field)? {
            0 => Ok(false),
            1 => Ok(true),
            got => Err(FrameError::Value { field, got: got.into() }),
        }
    }

    /// The length of a list whose elements take at least `element_bytes` each: all of them must still be
    /// there, so that what is reserved for them is paid for in bytes.
    pub(super) fn count(&mut self, field: &'static str, max: usize, element_bytes: usize) -> Result<usize, FrameError> {
        let count = self.u32(field)? as usize;
        if count > max {
            return Err(FrameError::TooLong { field, got: count as u64, max: max as u64 });
        }
        let needed = count.saturating_mul(element_bytes);
        if needed > self.left.len() {
            return Err(FrameError::Truncated { field, needed, left: self.left.len() });
        }
        Ok(count)
    }

    pub(super) fn text(&mut self, field: &'static str, max: usize) -> Result<String, FrameError> {
        let count = self.count(field, max, 1)?;
        let bytes = self.take(field, count)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| FrameError::Text { field })
    }

    pub(super) fn list_u32(&mut self, field: &'static str, max: usize) -> Result<Vec<u32>, FrameError> {
        let count = self.count(field, max, 4)?;
        let bytes = self.take(field, count * 4)?;
        Ok(bytes.as_chunks().0.iter().map(|chunk| u32::from_le_bytes(*chunk)).collect())
    }

    /// A list whose elements take at least `element_bytes` each.
    pub(super) fn list<T>(
        &mut self,
        field: &'static str,
        max: usize,
        element_bytes: usize,
        mut read: impl FnMut(&mut Self) -> Result<T, FrameError>,
    ) -> Result<Vec<T>, FrameError> {
        let count = self.count(field, max, element_bytes)?;
        (0..count).map(|_| read(self)).collect()
    }

    pub(super) fn option_u32(&mut self, field: &'static str) -> Result<Option<u32>, FrameError> {
        self.flag(field)?.then(|| self.u32(field)).transpose()
    }
}
