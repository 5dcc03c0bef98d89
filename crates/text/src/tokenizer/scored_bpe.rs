//! SentencePiece BPE, the `llama` tokenizer model of GGUF files.
//!
//! It decides how a fragment without special tokens becomes ids: spaces become `▁`, then the adjacent pair whose
//! joined token has the best score is merged until none is left; characters without a token fall back to bytes.
//! It does not know special tokens, nor whether a space is to be put in front.

use std::collections::HashMap;

use super::merge::{Join, Joined, NONE, Symbol, Workspace};
use crate::TextError;

/// What SentencePiece writes for a space: U+2581.
pub(super) const SPACE: &str = "\u{2581}";

/// A token that text may become, as the model needs it.
pub(super) struct ScoredToken<'a> {
    pub text: &'a str,
    pub id: u32,
    pub score: f32,
}

/// A scored BPE model.
#[derive(Debug)]
pub(super) struct ScoredBpe {
    pieces: Pieces,
    /// Token `<0xXX>` of each byte, or [`NONE`].
    byte_ids: [u32; 256],
    unknown: Option<u32>,
    /// No token holds a `▁` after another character, so that words can be merged one by one with the same result.
    words_are_independent: bool,
}

#[derive(Debug)]
struct Pieces {
    by_text: HashMap<Box<[u8]>, Joined>,
    len_max: u32,
}

impl Join for Pieces {
    fn join(&self, text: &[u8], left: &Symbol, right: &Symbol) -> Option<Joined> {
        let len = left.len + right.len;
        if len > self.len_max {
            return None;
        }
        self.by_text.get(&text[left.start as usize..(left.start + len) as usize]).copied()
    }
}

impl ScoredBpe {
    /// Builds the model from the tokens that text may become, and the byte tokens.
    pub fn new<'a>(
        tokens: impl Iterator<Item = ScoredToken<'a>>,
        byte_ids: [u32; 256],
        unknown: Option<u32>,
    ) -> Result<Self, TextError> {
        let mut tokens: Vec<ScoredToken<'a>> = tokens.filter(|token| !token.text.is_empty()).collect();
        tokens.sort_by(|a, b| b.score.total_cmp(&a.score));
        let mut by_text = HashMap::with_capacity(tokens.len());
        let mut len_max = 0;
        let (mut rank, mut last_score) = (0, None);
        for token in &tokens {
            if last_score.is_some_and(|score: f32| score.total_cmp(&token.score).is_ne()) {
                rank += 1;
            }
            last_score = Some(token.score);
            let len = u32::try_from(token.text.len()).map_err(|_| TextError::BadVocabulary {
                field: "tokenizer.ggml.tokens",
                detail: format!("token {} is {} bytes long", token.id, token.text.len()),
            })?;
            len_max = len_max.max(len);
            by_text.entry(token.text.as_bytes().into()).or_insert(Joined { rank, id: token.id });
        }
        let words_are_independent = tokens.iter().all(|token| !token.text.trim_start_matches(SPACE).contains(SPACE));
        Ok(Self { pieces: Pieces { by_text, len_max }, byte_ids, unknown, words_are_independent })
    }

    /// Appends the ids of `text`, in which spaces have become `▁`.
    ///
    /// # Errors
    /// A character that neither a token nor byte tokens cover, in a vocabulary without an unknown token.
    pub fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TextError> {
        let mut workspace = Workspace::default();
        let mut rest = text;
        while !rest.is_empty() {
            let (word, tail) = rest.split_at(if self.words_are_independent { word_len(rest) } else { rest.len() });
            self.encode_word(word, text.len() - rest.len(), &mut workspace, ids)?;
            rest = tail;
        }
        Ok(())
    }

    fn encode_word(
        &self,
        word: &str,
        offset: usize,
        workspace: &mut Workspace,
        ids: &mut Vec<u32>,
    ) -> Result<(), TextError> {
        workspace.clear();
        let mut buffer = [0_u8; 4];
        for c in word.chars() {
            let bytes = c.encode_utf8(&mut buffer).as_bytes();
            let id = self.pieces.by_text.get(bytes).map_or(NONE, |piece| piece.id);
            let len = [1, 2, 3, 4][bytes.len() - 1];
            workspace.push(len, id);
        }
        workspace.merge(word.as_bytes(), &self.pieces);
        for symbol in workspace.symbols() {
            if symbol.id != NONE {
                ids.push(symbol.id);
                continue;
            }
            let start = symbol.start as usize;
            let bytes = &word.as_bytes()[start..start + symbol.len as usize];
            if bytes.iter().all(|&byte| self.byte_ids[usize::from(byte)] != NONE) {
                ids.extend(bytes.iter().map(|&byte| self.byte_ids[usize::from(byte)]));
            } else {
                ids.push(self.unknown.ok_or(TextError::Unencodable { byte: bytes[0], offset: offset + start })?);
            }
        }
        Ok(())
    }
}

/// Length of the first word: a run of `▁`, then everything up to the next `▁`.
fn word_len(text: &str) -> usize {
    let spaces = text.len() - text.trim_start_matches(SPACE).len();
    text[spaces..].find(SPACE).map_or(text.len(), |at| spaces + at)
}
