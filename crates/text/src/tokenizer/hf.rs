//! Vocabularies in the form of a `tokenizer.json`.
//!
//! It decides which parts of the file Pagemill computes itself (added tokens, the bytes of each token) and hands
//! normalising, pre-tokenising and the model to the `tokenizers` library. It refuses decoders whose token bytes it
//! does not know. It does not read files.

use std::collections::BTreeSet;
use std::ops::Range;

use serde_json::Value;
use tokenizers::tokenizer::normalizer::Range as NormalizedRange;
use tokenizers::tokenizer::{
    Model, NormalizedString, Normalizer, OffsetReferential, OffsetType, PostProcessor, PreTokenizedString,
    PreTokenizer, Token,
};

use super::added::{AddedToken, AddedTokens, Fragment, LiteralGuard, Special};
use super::byte_bpe::ByteAlphabet;
use super::gguf::byte_token;
use super::{Engine, SpecialIds, Tokenizer, Vocabulary};
use crate::TextError;

/// What `tokenizer_config.json` says beside the `tokenizer.json`.
#[derive(Clone, Debug, Default)]
pub struct HfTokenizerOptions {
    /// Text of the beginning-of-sequence token.
    pub bos_token: Option<String>,
    /// Text of the end-of-sequence token.
    pub eos_token: Option<String>,
    /// Text of the unknown token.
    pub unk_token: Option<String>,
    /// Text of the padding token.
    pub pad_token: Option<String>,
    /// Whether prompts get a BOS; `None` asks the file's post-processor.
    pub add_bos_token: Option<bool>,
    /// Whether texts get an EOS.
    pub add_eos_token: Option<bool>,
    /// Further ids that end an answer, from `generation_config.json`.
    pub eos_token_ids: Vec<u32>,
}

/// The library's part of the pipeline.
#[derive(Debug)]
pub(super) struct Library {
    tokenizer: tokenizers::Tokenizer,
    /// Added tokens that are looked for after normalising.
    normalized: AddedTokens,
}

/// A fragment as the library wants it: text, and its token if it is one.
type Piece = (NormalizedString, Option<Vec<Token>>);

impl Library {
    /// The ids of a whole text, already cut at the added tokens that are looked for before normalising.
    pub fn encode(
        &self,
        text: &str,
        fragments: &[Fragment],
        special: Special,
        guards: &[usize],
    ) -> Result<Vec<u32>, TextError> {
        let mut pieces = PreTokenizedString::from(text);
        self.pre_tokenize(&mut pieces, fragments, special, guards)
            .and_then(|()| pieces.tokenize(|piece| self.tokenizer.get_model().tokenize(piece.get())))
            .map_err(|error| TextError::Encode { detail: error.to_string() })?;
        let splits = pieces.get_splits(OffsetReferential::Normalized, OffsetType::None);
        let tokens = splits.iter().filter_map(|(_, _, tokens)| tokens.as_ref());
        Ok(tokens.flatten().map(|token| token.id).collect())
    }

    fn pre_tokenize(
        &self,
        pieces: &mut PreTokenizedString,
        fragments: &[Fragment],
        special: Special,
        guards: &[usize],
    ) -> tokenizers::Result<()> {
        pieces.split(|_, whole| Ok(cut(&whole, fragments)))?;
        pieces.split(|_, mut piece| {
            if let Some(normalizer) = self.tokenizer.get_normalizer() {
                normalizer.normalize(&mut piece)?;
            }
            if self.normalized.is_empty() {
                return Ok(vec![(piece, None)]);
            }
            let guards = normalized_guards(&piece, guards);
            let fragments = self.normalized.partition(piece.get(), special, &guards);
            Ok(cut(&piece, &fragments))
        })?;
        match self.tokenizer.get_pre_tokenizer() {
            Some(pre_tokenizer) => pre_tokenizer.pre_tokenize(pieces),
            None => Ok(()),
        }
    }
}

/// The fragments of `whole`; ranges are in its normalised form.
fn cut(whole: &NormalizedString, fragments: &[Fragment]) -> Vec<Piece> {
    let slice = |range: &Range<usize>| whole.slice(NormalizedRange::Normalized(range.clone()));
    let piece = |fragment: &Fragment| match fragment {
        Fragment::Text(range) => slice(range).map(|text| (text, None)),
        Fragment::Token(id, range) => slice(range).map(|text| {
            let value = text.get().to_owned();
            let len = value.len();
            (text, Some(vec![Token::new(*id, value, (0, len))]))
        }),
    };
    fragments.iter().filter_map(piece).collect()
}

/// Where the guards of the original text stand in the normalised `piece`.
fn normalized_guards(piece: &NormalizedString, guards: &[usize]) -> Vec<usize> {
    let (start, end) = piece.offsets_original();
    let inside = guards.iter().filter(|&&guard| start <= guard && guard < end);
    let places = inside.filter_map(|&guard| {
        let at = guard - start;
        piece.convert_offsets(NormalizedRange::Original(at..at + 1)).map(|range| range.start)
    });
    places.collect()
}

pub(super) fn build(tokenizer_json: &[u8], options: &HfTokenizerOptions) -> Result<Tokenizer, TextError> {
    let bad = |detail: String| TextError::BadTokenizerJson { detail };
    let json: Value = serde_json::from_slice(tokenizer_json).map_err(|error| bad(error.to_string()))?;
    let decoder = TokenDecoder::read(&json)?;
    let library = tokenizers::Tokenizer::from_bytes(tokenizer_json).map_err(|error| bad(error.to_string()))?;
    let (raw, normalized) = added_tokens(&library, &json)?;
    let raw_added = AddedTokens::new(raw)?;
    let normalized_added = AddedTokens::new(normalized)?;
    let guard = LiteralGuard::new(raw_added.special_literals().chain(normalized_added.special_literals()))?;
    let vocabulary = token_bytes(&library, &decoder)?;
    let ids = special_ids(&library, options, vocabulary.special.len())?;
    Ok(Tokenizer {
        engine: Engine::Library(Box::new(Library { tokenizer: library, normalized: normalized_added })),
        added: raw_added,
        guard,
        vocabulary,
        ids,
        drops_leading_space: decoder.drops_leading_space,
    })
}

/// The added tokens that are looked for before normalising, and those looked for after (in normalised form).
fn added_tokens(
    library: &tokenizers::Tokenizer,
    json: &Value,
) -> Result<(Vec<AddedToken>, Vec<AddedToken>), TextError> {
    let (mut raw, mut normalized) = (Vec::new(), Vec::new());
    for (index, entry) in json["added_tokens"].as_array().into_iter().flatten().enumerate() {
        let bad = |what: &str| TextError::BadTokenizerJson { detail: format!("added_tokens[{index}]: {what}") };
        let flag = |name: &str| entry[name].as_bool().unwrap_or(false);
        let mut content = entry["content"].as_str().ok_or_else(|| bad("content is missing"))?.to_owned();
        // The library may have renumbered a token that its model knows under another id, so it is asked.
        let id = library.token_to_id(&content).ok_or_else(|| bad("has no id"))?;
        let is_normalized = flag("normalized");
        if let (true, Some(normalizer)) = (is_normalized, library.get_normalizer()) {
            let mut form = NormalizedString::from(content.as_str());
            normalizer.normalize(&mut form).map_err(|error| bad(&error.to_string()))?;
            form.get().clone_into(&mut content);
        }
        let token = AddedToken {
            id,
            content,
            special: flag("special"),
            lstrip: flag("lstrip"),
            rstrip: flag("rstrip"),
            single_word: flag("single_word"),
        };
        if is_normalized { &mut normalized } else { &mut raw }.push(token);
    }
    Ok((raw, normalized))
}

/// How the file's decoder turns token texts into bytes.
struct TokenDecoder {
    byte_level: Option<ByteAlphabet>,
    /// The text that stands for a space.
    space: Option<String>,
    byte_fallback: bool,
    drops_leading_space: bool,
}

impl TokenDecoder {
    fn read(json: &Value) -> Result<Self, TextError> {
        let mut decoder = Self { byte_level: None, space: None, byte_fallback: false, drops_leading_space: false };
        let described = &json["decoder"];
        let steps = match described["type"].as_str() {
            Some("Sequence") => described["decoders"].as_array().map(Vec::as_slice).unwrap_or_default(),
            _ => std::slice::from_ref(described),
        };
        for step in steps {
            decoder.add(step)?;
        }
        Ok(decoder)
    }

    fn add(&mut self, step: &Value) -> Result<(), TextError> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        match step["type"].as_str() {
            Some("ByteLevel") => self.byte_level = Some(ByteAlphabet::new()),
            Some("Fuse") => {}
            Some("ByteFallback") => self.byte_fallback = true,
            Some("Replace") if step["content"] == " " && step["pattern"]["String"].is_string() => {
                self.space = Some(text(&step["pattern"]["String"]));
            }
            Some("Strip") if step["content"] == " " && step["start"] == 1 && step["stop"] == 0 => {
                self.drops_leading_space = true;
            }
            Some("Metaspace") => {
                self.space = Some(text(&step["replacement"]));
                let scheme = step["prepend_scheme"].as_str();
                self.drops_leading_space =
                    scheme.map_or(step["add_prefix_space"].as_bool().unwrap_or(true), |scheme| scheme != "never");
            }
            _ => {
                let detail = format!("decoder step {step} is not supported");
                return Err(TextError::BadTokenizerJson { detail });
            }
        }
        Ok(())
    }

    fn bytes(&self, token: &str) -> Vec<u8> {
        if let Some(alphabet) = &self.byte_level {
            return alphabet.decode(token);
        }
        if let Some(byte) = byte_token(token).filter(|_| self.byte_fallback) {
            return vec![byte];
        }
        match &self.space {
            Some(space) => token.replace(space.as_str(), " ").into_bytes(),
            None => token.as_bytes().to_vec(),
        }
    }
}

fn token_bytes(library: &tokenizers::Tokenizer, decoder: &TokenDecoder) -> Result<Vocabulary, TextError> {
    let added = library.get_added_tokens_decoder();
    let highest = library.get_vocab(true).into_values().max().unwrap_or(0);
    // Ids may have gaps, but a file that claims ids far beyond its tokens is no vocabulary.
    let limit = library.get_vocab_size(true).saturating_mul(4).saturating_add(1 << 16);
    if highest as usize > limit {
        let detail = format!("highest token id {highest} for {} tokens", library.get_vocab_size(true));
        return Err(TextError::BadTokenizerJson { detail });
    }
    let mut table = Vocabulary::with_capacity(highest as usize + 1);
    for id in 0..=highest {
        match (added.get(&id), library.id_to_token(id)) {
            (Some(token), _) => table.push(token.content.as_bytes(), token.special),
            (None, Some(text)) => table.push(&decoder.bytes(&text), false),
            (None, None) => table.push(b"", false),
        }
    }
    Ok(table)
}

fn special_ids(
    library: &tokenizers::Tokenizer,
    options: &HfTokenizerOptions,
    num_tokens: usize,
) -> Result<SpecialIds, TextError> {
    let id = |name: &str, text: &Option<String>| match text {
        None => Ok(None),
        Some(text) => library.token_to_id(text).map(Some).ok_or_else(|| TextError::BadTokenizerJson {
            detail: format!("{name} {text:?} of tokenizer_config.json is no token"),
        }),
    };
    let bos = id("bos_token", &options.bos_token)?;
    let eos = id("eos_token", &options.eos_token)?;
    let in_vocabulary = options.eos_token_ids.iter().copied().filter(|&id| (id as usize) < num_tokens);
    let mut end_of_generation: BTreeSet<u32> = in_vocabulary.collect();
    end_of_generation.extend(eos);
    Ok(SpecialIds {
        bos,
        eos,
        unknown: id("unk_token", &options.unk_token)?,
        pad: id("pad_token", &options.pad_token)?,
        end_of_generation,
        add_bos: bos.is_some() && options.add_bos_token.unwrap_or_else(|| adds_in_front(library, bos)),
        add_eos: options.add_eos_token.unwrap_or(false),
    })
}

/// Whether the file's post-processor puts `bos` in front of a text.
fn adds_in_front(library: &tokenizers::Tokenizer, bos: Option<u32>) -> bool {
    let Some(processor) = library.get_post_processor() else {
        return false;
    };
    let processed = processor.process(tokenizers::Encoding::default(), None, true);
    processed.is_ok_and(|encoding| encoding.get_ids().first().copied() == bos && bos.is_some())
}
