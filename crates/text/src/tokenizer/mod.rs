//! The tokenizer: one type over every kind of vocabulary.
//!
//! It decides how a text with special tokens is cut up, when a BOS is put in front, and which bytes each id stands
//! for. How plain text becomes ids is decided by the engines below it: [`byte_bpe`] and [`scored_bpe`] for GGUF
//! vocabularies, [`hf`] for a `tokenizer.json`. It does not know where vocabularies come from.

mod added;
mod byte_bpe;
mod gguf;
mod hf;
mod merge;
mod queue;
mod scored_bpe;
mod split;

use std::collections::BTreeSet;

pub use added::{LiteralGuard, Special};
pub use gguf::GgufVocabulary;
pub use hf::HfTokenizerOptions;

use crate::TextError;
use crate::chat::RenderedPrompt;
use crate::detokenizer::{TextPosition, Utf8Buffer};
use added::{AddedTokens, Fragment};
use byte_bpe::ByteBpe;
use hf::Library;
use scored_bpe::ScoredBpe;

/// The longest text accepted, in bytes: offsets are counted in 32 bits.
const TEXT_LEN_MAX: usize = 1 << 30;

/// Turns text into token ids and back. Immutable, without locks: share it through an `Arc`.
#[derive(Debug)]
pub struct Tokenizer {
    engine: Engine,
    added: AddedTokens,
    guard: LiteralGuard,
    vocabulary: Vocabulary,
    ids: SpecialIds,
    /// Decoding a text drops one space in front, because encoding put one there.
    drops_leading_space: bool,
}

#[derive(Debug)]
enum Engine {
    ByteBpe(ByteBpe),
    ScoredBpe { model: ScoredBpe, adds_space_prefix: bool },
    Library(Box<Library>),
}

/// Ids with a role, and the defaults that go with them.
#[derive(Debug, Default)]
struct SpecialIds {
    bos: Option<u32>,
    eos: Option<u32>,
    unknown: Option<u32>,
    pad: Option<u32>,
    end_of_generation: BTreeSet<u32>,
    add_bos: bool,
    add_eos: bool,
}

/// The bytes of each token, end to end, and what kind each is.
#[derive(Debug, Default)]
struct Vocabulary {
    bytes: Vec<u8>,
    /// `num_tokens + 1` offsets into `bytes`.
    offsets: Vec<usize>,
    /// A control token, left out of text when special tokens are skipped.
    special: Vec<bool>,
}

impl Vocabulary {
    fn with_capacity(num_tokens: usize) -> Self {
        let mut offsets = Vec::with_capacity(num_tokens + 1);
        offsets.push(0);
        Self { bytes: Vec::with_capacity(num_tokens * 8), offsets, special: Vec::with_capacity(num_tokens) }
    }

    fn push(&mut self, bytes: &[u8], special: bool) {
        self.bytes.extend_from_slice(bytes);
        self.offsets.push(self.bytes.len());
        self.special.push(special);
    }

    fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match (self.offsets.get(id), self.offsets.get(id + 1)) {
            (Some(&start), Some(&end)) => &self.bytes[start..end],
            _ => &[],
        }
    }
}

impl Tokenizer {
    /// Builds a tokenizer from the vocabulary of a GGUF file. Costs one pass over the vocabulary and a few maps of
    /// its size.
    ///
    /// # Errors
    /// An unknown tokenizer model or pre-tokenizer (by name), or arrays that do not fit together.
    pub fn from_gguf(vocabulary: GgufVocabulary) -> Result<Self, TextError> {
        gguf::build(&vocabulary)
    }

    /// Builds a tokenizer from the bytes of a `tokenizer.json`.
    ///
    /// # Errors
    /// JSON that the format does not allow, or a decoder whose token bytes are not known.
    pub fn from_hf(tokenizer_json: &[u8], options: &HfTokenizerOptions) -> Result<Self, TextError> {
        hf::build(tokenizer_json, options)
    }

    /// The ids of `text`, without BOS or EOS. Linear in the text, up to a logarithm.
    ///
    /// # Errors
    /// Text that the vocabulary cannot express, or that is longer than 1 GiB.
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>, TextError> {
        self.encode_guarded(text, special, &[])
    }

    /// The ids of a text completion's prompt: control tokens are parsed, a BOS stands in front where the model wants
    /// one, and only one even if the text starts with it.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_completion(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let mut ids = self.encode(text, Special::Parse)?;
        if let Some(bos) = self.ids.bos.filter(|&bos| self.ids.add_bos && ids.first() != Some(&bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// The ids of a rendered conversation: what the template wrote is parsed, what users wrote stays plain text. The
    /// template alone decides about the BOS, as in the reference, so there is never a second one.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_prompt(&self, prompt: &RenderedPrompt) -> Result<Vec<u32>, TextError> {
        self.encode_guarded(&prompt.text, Special::Parse, &prompt.guards)
    }

    fn encode_guarded(&self, text: &str, special: Special, guards: &[usize]) -> Result<Vec<u32>, TextError> {
        if text.len() > TEXT_LEN_MAX {
            return Err(TextError::TextTooLong { len: text.len(), max: TEXT_LEN_MAX });
        }
        let fragments = self.added.partition(text, special, guards);
        if let Engine::Library(library) = &self.engine {
            return library.encode(text, &fragments, special, guards);
        }
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut after_token = true;
        for fragment in fragments {
            match fragment {
                Fragment::Token(id, _) => ids.push(id),
                Fragment::Text(ref range) => self.encode_fragment(&text[range.clone()], after_token, &mut ids)?,
            }
            after_token = matches!(fragment, Fragment::Token(..));
        }
        Ok(ids)
    }

    /// Appends the ids of text between added tokens. `after_token`: at the start, or right after an added token.
    fn encode_fragment(&self, text: &str, after_token: bool, ids: &mut Vec<u32>) -> Result<(), TextError> {
        match &self.engine {
            Engine::ByteBpe(model) => {
                model.encode(text, ids);
                Ok(())
            }
            Engine::ScoredBpe { model, adds_space_prefix } => {
                let prefix = if *adds_space_prefix && after_token { scored_bpe::SPACE } else { "" };
                let mut spaced = String::with_capacity(text.len() + text.len() / 4 + 3);
                spaced.push_str(prefix);
                for part in text.split_inclusive(' ') {
                    match part.strip_suffix(' ') {
                        Some(word) => {
                            spaced.push_str(word);
                            spaced.push_str(scored_bpe::SPACE);
                        }
                        None => spaced.push_str(part),
                    }
                }
                model.encode(&spaced, ids)
            }
            // `encode_guarded` hands the library whole texts, because its normalisers look at the text's start.
            Engine::Library(_) => Ok(()),
        }
    }

    /// The text of `ids` from the start of a text. Bytes that are no UTF-8 become U+FFFD; ids beyond the vocabulary
    /// (padding rows of the output matrix) are empty.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut buffer = Utf8Buffer::default();
        let mut text = String::new();
        let mut position = TextPosition::Start;
        for &id in ids {
            buffer.push(self.text_bytes(id, skip_special, &mut position), &mut text);
        }
        buffer.flush(&mut text);
        text
    }

    /// The bytes that `id` adds to a text at `position`, which moves on.
    pub(crate) fn text_bytes(&self, id: u32, skip_special: bool, position: &mut TextPosition) -> &[u8] {
        let bytes = self.token_bytes(id);
        if self.is_special(id) {
            return if skip_special { &[] } else { bytes };
        }
        let at_start = std::mem::replace(position, TextPosition::Middle) == TextPosition::Start;
        match bytes.strip_prefix(b" ") {
            Some(rest) if at_start && self.drops_leading_space => rest,
            _ => bytes,
        }
    }

    /// The exact bytes of a token wherever it stands but at the very start of a text; empty beyond the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.vocabulary.get(id)
    }

    /// Whether `id` is a control token, which does not belong to the text.
    pub fn is_special(&self, id: u32) -> bool {
        self.vocabulary.special.get(id as usize).copied().unwrap_or(false)
    }

    /// Number of ids that stand for something; the model's output may be wider.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.special.len()
    }

    /// The beginning-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.ids.bos
    }

    /// The end-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        self.ids.eos
    }

    /// The unknown token.
    pub fn unknown(&self) -> Option<u32> {
        self.ids.unknown
    }

    /// The padding token.
    pub fn pad(&self) -> Option<u32> {
        self.ids.pad
    }

    /// Every token that ends an answer, in rising order: end of sequence, of turn and of message.
    pub fn end_of_generation(&self) -> impl Iterator<Item = u32> {
        self.ids.end_of_generation.iter().copied()
    }

    /// Whether a plain prompt gets a BOS in front.
    pub fn add_bos(&self) -> bool {
        self.ids.add_bos && self.ids.bos.is_some()
    }

    /// Whether the vocabulary's author wants an EOS behind a plain text (for training; prompts never get one).
    pub fn add_eos(&self) -> bool {
        self.ids.add_eos && self.ids.eos.is_some()
    }

    /// What a chat template needs to keep users from writing control tokens.
    pub fn guard(&self) -> &LiteralGuard {
        &self.guard
    }
}
