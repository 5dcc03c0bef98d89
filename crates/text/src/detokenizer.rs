//! Text from tokens as they arrive.
//!
//! It decides when bytes may be shown: a character is held back until its last byte is there, and bytes that can
//! never become a character turn into U+FFFD. The pieces joined are exactly the text of all tokens decoded at once.
//! It does not know stop strings.

use std::sync::Arc;

use crate::Tokenizer;

/// Where a token stands in its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextPosition {
    /// At the very start, where some vocabularies' encoders had put a space that decoding drops.
    Start,
    /// After other text, such as a prompt.
    Middle,
}

/// Turns the tokens of one answer into text, token by token.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    position: TextPosition,
    skip_special: bool,
    buffer: Utf8Buffer,
}

impl Detokenizer {
    /// A detokenizer that leaves control tokens out of the text. An answer stands after its prompt, so its position
    /// is [`TextPosition::Middle`].
    pub fn new(tokenizer: Arc<Tokenizer>, position: TextPosition) -> Self {
        Self { tokenizer, position, skip_special: true, buffer: Utf8Buffer::default() }
    }

    /// The same, with control tokens written out (`skip_special_tokens: false`).
    pub fn with_special_tokens(mut self) -> Self {
        self.skip_special = false;
        self
    }

    /// The text that `id` completes, which may be empty. Allocates only if there is text.
    pub fn push(&mut self, id: u32) -> String {
        let mut text = String::new();
        let bytes = self.tokenizer.text_bytes(id, self.skip_special, &mut self.position);
        self.buffer.push(bytes, &mut text);
        text
    }

    /// The end of the answer: an unfinished character becomes U+FFFD.
    pub fn flush(&mut self) -> String {
        let mut text = String::new();
        self.buffer.flush(&mut text);
        text
    }
}

/// Bytes that wait for the rest of their character; at most three.
#[derive(Clone, Debug, Default)]
pub(crate) struct Utf8Buffer {
    pending: Vec<u8>,
}

impl Utf8Buffer {
    /// Appends to `text` every character that `bytes` complete.
    pub fn push(&mut self, bytes: &[u8], text: &mut String) {
        if self.pending.is_empty()
            && let Ok(whole) = std::str::from_utf8(bytes)
        {
            text.push_str(whole);
            return;
        }
        self.pending.extend_from_slice(bytes);
        let mut done = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            done += chunk.valid().len();
            if chunk.invalid().is_empty() {
                continue;
            }
            let at_end = done + chunk.invalid().len() == self.pending.len();
            if at_end && is_unfinished(chunk.invalid()) {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            done += chunk.invalid().len();
        }
        self.pending.drain(..done);
    }

    /// Gives up on the bytes that still wait.
    pub fn flush(&mut self, text: &mut String) {
        if !self.pending.is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
            self.pending.clear();
        }
    }
}

/// Whether more bytes could make a character of `bytes`.
fn is_unfinished(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::cast_possible_truncation)]
mod tests {
    use super::*;

    /// However the bytes are cut, the pieces joined are the lossy decoding of the whole.
    #[test]
    fn every_cut_of_every_short_sequence_joins_to_the_whole() {
        let bytes = [b'a', 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xED, 0xA0, 0xFF, 0xF4, 0x90];
        let mut seed = 7_u64;
        for _ in 0..50_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let len = (seed >> 61) as usize;
            let text: Vec<u8> = (0..len).map(|i| bytes[(seed >> (4 * i + 8)) as usize % bytes.len()]).collect();
            let mut buffer = Utf8Buffer::default();
            let mut joined = String::new();
            for (i, byte) in text.iter().enumerate() {
                buffer.push(std::slice::from_ref(byte), &mut joined);
                assert!(text.starts_with(joined.as_bytes()) || joined.contains('\u{FFFD}'), "{text:?} at {i}");
            }
            buffer.flush(&mut joined);
            assert_eq!(joined, String::from_utf8_lossy(&text), "{text:?}");
        }
    }
}
