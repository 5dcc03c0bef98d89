//! Byte-level BPE, the `gpt2` tokenizer model of GGUF files.
//!
//! It decides how a fragment without special tokens becomes ids: split into words by the pre-tokenizer, then merge
//! the bytes of each word by the ranks of the merge list. It does not know special tokens.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::merge::{Join, Joined, NONE, Symbol, Workspace};
use super::split::Splitter;
use crate::TextError;

/// The 256 characters that stand for bytes in byte-level vocabularies: printable Latin-1 stands for itself, the other
/// bytes are numbered upward from U+0100.
pub(super) fn byte_characters() -> [char; 256] {
    let mut table = ['\0'; 256];
    let mut next = 0x100_u32;
    for byte in 0..=255_u8 {
        table[usize::from(byte)] = match byte {
            b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
            _ => {
                next += 1;
                char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
            }
        };
    }
    table
}

/// Turns token texts of a byte-level vocabulary into the bytes they stand for.
pub(super) struct ByteAlphabet {
    bytes: HashMap<char, u8>,
}

impl ByteAlphabet {
    pub fn new() -> Self {
        Self { bytes: byte_characters().into_iter().zip(0..=255).collect() }
    }

    /// The bytes of `token`; a token with a character outside the alphabet stands for its own UTF-8, as in the
    /// reference decoder.
    pub fn decode(&self, token: &str) -> Vec<u8> {
        let bytes: Option<Vec<u8>> = token.chars().map(|c| self.bytes.get(&c).copied()).collect();
        bytes.unwrap_or_else(|| token.as_bytes().to_vec())
    }
}

/// A byte-level BPE model.
#[derive(Debug)]
pub(super) struct ByteBpe {
    splitter: Splitter,
    /// Token of each single byte, or [`NONE`].
    byte_ids: [u32; 256],
    merges: Merges,
    /// Words that are tokens by themselves whatever the merges say; only where the pre-tokenizer's rules want it.
    whole_words: Option<HashMap<Box<[u8]>, u32>>,
}

/// What each pair of tokens merges into, by [`pair`].
#[derive(Debug)]
struct Merges(HashMap<u64, Joined, BuildHasherDefault<PairHasher>>);

/// Both ids in one word.
fn pair(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

impl Join for Merges {
    fn join(&self, _: &[u8], left: &Symbol, right: &Symbol) -> Option<Joined> {
        self.0.get(&pair(left.id, right.id)).copied()
    }
}

/// Hashes one [`pair`] by a multiplication. Texts only look pairs up, so none can fill the map with collisions.
#[derive(Debug, Default)]
struct PairHasher(u64);

impl Hasher for PairHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, word: u64) {
        let product = (self.0 ^ word ^ 0x9E37_79B9_7F4A_7C15).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        // The map looks at the lowest bits, into which multiplication carries nothing from above.
        self.0 = product ^ product >> 32;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl ByteBpe {
    /// Builds the model. `tokens` maps token text to id; `merges` are the lines `left right` in order of rank.
    ///
    /// # Errors
    /// A merge that is not two tokens, or whose result is no token.
    pub fn new(splitter: Splitter, tokens: &HashMap<&str, u32>, merges: &[String]) -> Result<Self, TextError> {
        let mut ranks = HashMap::with_capacity_and_hasher(merges.len(), BuildHasherDefault::default());
        let mut joined = String::new();
        for (index, line) in merges.iter().enumerate() {
            let bad = |detail: &str| TextError::BadVocabulary {
                field: "tokenizer.ggml.merges",
                detail: format!("entry {index}: {line:?} {detail}"),
            };
            // A token may itself begin with a space, so the separator is sought from the second character on.
            let first_len = line.chars().next().map_or(0, char::len_utf8);
            let space = line[first_len..].find(' ').map(|at| at + first_len).ok_or_else(|| bad("has no separator"))?;
            let (left, right) = (&line[..space], &line[space + 1..]);
            joined.clear();
            joined.push_str(left);
            joined.push_str(right);
            let id = |text: &str| tokens.get(text).copied().ok_or_else(|| bad(&format!("needs token {text:?}")));
            let rank = u32::try_from(index).map_err(|_| bad("is one too many"))?;
            ranks.entry(pair(id(left)?, id(right)?)).or_insert(Joined { rank, id: id(&joined)? });
        }
        let mut byte_ids = [NONE; 256];
        let mut buffer = [0_u8; 4];
        for (slot, c) in byte_ids.iter_mut().zip(byte_characters()) {
            if let Some(&id) = tokens.get(&*c.encode_utf8(&mut buffer)) {
                *slot = id;
            }
        }
        let whole_words = splitter.whole_words_first().then(|| {
            let alphabet = ByteAlphabet::new();
            tokens.iter().map(|(text, &id)| (alphabet.decode(text).into_boxed_slice(), id)).collect()
        });
        Ok(Self { splitter, byte_ids, merges: Merges(ranks), whole_words })
    }

    /// Appends the ids of `text`, which holds no special tokens. A byte without a token (some vocabularies lack a few
    /// control characters) leaves nothing behind, as in the reference: the unknown token of such files is a control
    /// token, which a user's text must not become.
    pub fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        let mut workspace = Workspace::default();
        self.splitter.split(text, &mut |word| self.encode_word(word.as_bytes(), &mut workspace, ids));
    }

    fn encode_word(&self, word: &[u8], workspace: &mut Workspace, ids: &mut Vec<u32>) {
        if let Some(&id) = self.whole_words.as_ref().and_then(|words| words.get(word)) {
            ids.push(id);
            return;
        }
        workspace.clear();
        for &byte in word {
            workspace.push(1, self.byte_ids[usize::from(byte)]);
        }
        workspace.merge(word, &self.merges);
        ids.extend(workspace.symbols().map(|symbol| symbol.id).filter(|&id| id != NONE));
    }
}
