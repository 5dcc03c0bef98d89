//! Vocabularies of GGUF files.
//!
//! It decides what the `tokenizer.ggml.*` fields mean: which engine they ask for, which tokens are added tokens, which
//! bytes each token stands for, and the defaults of fields that are missing. It does not read files.

use std::collections::{BTreeSet, HashMap};

use super::added::{AddedToken, AddedTokens, LiteralGuard};
use super::byte_bpe::{ByteAlphabet, ByteBpe};
use super::merge::NONE;
use super::scored_bpe::{SPACE, ScoredBpe, ScoredToken};
use super::split::Splitter;
use super::{Engine, SpecialIds, Tokenizer, Vocabulary};
use crate::TextError;

/// The tokenizer fields of a GGUF file, as they stand there.
#[derive(Clone, Debug, Default)]
pub struct GgufVocabulary {
    /// `tokenizer.ggml.model`: `gpt2` or `llama`.
    pub model: String,
    /// `tokenizer.ggml.pre`: how `gpt2` cuts text into words.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`, by id.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.scores`, by id; only `llama` needs them.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.token_type`, by id: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte. Empty
    /// means that all are normal.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.merges`, best first; only `gpt2` needs them.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<u32>,
    /// `tokenizer.ggml.eot_token_id`: end of turn.
    pub eot: Option<u32>,
    /// `tokenizer.ggml.eom_token_id`: end of message.
    pub eom: Option<u32>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unknown: Option<u32>,
    /// `tokenizer.ggml.padding_token_id`.
    pub pad: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`.
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`.
    pub add_space_prefix: Option<bool>,
}

/// The kinds of token that a GGUF file tells apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
    /// A filler row, `[PAD151646]`, which stands for nothing.
    Filler,
}

/// Control tokens that end an answer in some family of models, for files that name only one of theirs.
const END_OF_GENERATION: [&str; 11] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
];

pub(super) fn build(vocabulary: &GgufVocabulary) -> Result<Tokenizer, TextError> {
    let kinds = kinds(vocabulary)?;
    let is_byte_level = match vocabulary.model.as_str() {
        "gpt2" => true,
        "llama" => false,
        model => {
            return Err(TextError::UnknownModel { model: model.to_owned() });
        }
    };
    let (engine, add_bos, adds_space_prefix) = if is_byte_level {
        let splitter = Splitter::named(vocabulary.pre.as_deref())?;
        let add_bos = splitter.adds_bos();
        (Engine::ByteBpe(byte_bpe(vocabulary, splitter)?), add_bos, false)
    } else {
        let adds_space_prefix = vocabulary.add_space_prefix.unwrap_or(true);
        (Engine::ScoredBpe { model: scored_bpe(vocabulary, &kinds)?, adds_space_prefix }, true, adds_space_prefix)
    };
    let added = AddedTokens::new(added_tokens(vocabulary, &kinds))?;
    Ok(Tokenizer {
        engine,
        guard: LiteralGuard::new(added.special_literals())?,
        added,
        vocabulary: token_bytes(vocabulary, &kinds, is_byte_level),
        ids: special_ids(vocabulary, &kinds, add_bos)?,
        drops_leading_space: adds_space_prefix,
    })
}

fn kinds(vocabulary: &GgufVocabulary) -> Result<Vec<Kind>, TextError> {
    let num_tokens = vocabulary.tokens.len();
    if num_tokens == 0 || u32::try_from(num_tokens).is_err() {
        let detail = format!("{num_tokens} tokens");
        return Err(TextError::BadVocabulary { field: "tokenizer.ggml.tokens", detail });
    }
    if !vocabulary.token_types.is_empty() && vocabulary.token_types.len() != num_tokens {
        let detail = format!("{} entries for {num_tokens} tokens", vocabulary.token_types.len());
        return Err(TextError::BadVocabulary { field: "tokenizer.ggml.token_type", detail });
    }
    let kind = |(id, token): (usize, &String)| match vocabulary.token_types.get(id) {
        Some(4 | 5) if *token == format!("[PAD{id}]") => Ok(Kind::Filler),
        None | Some(1) => Ok(Kind::Normal),
        Some(2) => Ok(Kind::Unknown),
        Some(3) => Ok(Kind::Control),
        // Some files call the token that ends an answer user-defined; a user must not be able to write it.
        Some(4) if ends_answer(vocabulary, id, token) => Ok(Kind::Control),
        Some(4) => Ok(Kind::UserDefined),
        Some(5) => Ok(Kind::Unused),
        Some(6) => Ok(Kind::Byte),
        Some(other) => Err(TextError::BadVocabulary {
            field: "tokenizer.ggml.token_type",
            detail: format!("entry {id} is {other}, expected 1 to 6"),
        }),
    };
    vocabulary.tokens.iter().enumerate().map(kind).collect()
}

fn ends_answer(vocabulary: &GgufVocabulary, id: usize, token: &str) -> bool {
    let named = [vocabulary.eos, vocabulary.eot, vocabulary.eom];
    named.iter().flatten().any(|&named| named as usize == id) || END_OF_GENERATION.contains(&token)
}

/// Ids that [`kinds`] has shown to fit in 32 bits, with their texts and kinds.
fn by_id<'a>(vocabulary: &'a GgufVocabulary, kinds: &'a [Kind]) -> impl Iterator<Item = (u32, &'a str, Kind)> {
    (0..).zip(&vocabulary.tokens).zip(kinds).map(|((id, text), &kind)| (id, text.as_str(), kind))
}

fn byte_bpe(vocabulary: &GgufVocabulary, splitter: Splitter) -> Result<ByteBpe, TextError> {
    let mut ids = HashMap::with_capacity(vocabulary.tokens.len());
    for (id, text) in (0_u32..).zip(&vocabulary.tokens) {
        ids.entry(text.as_str()).or_insert(id);
    }
    if vocabulary.merges.is_empty() {
        let detail = "missing, but the gpt2 model needs it".to_owned();
        return Err(TextError::BadVocabulary { field: "tokenizer.ggml.merges", detail });
    }
    ByteBpe::new(splitter, &ids, &vocabulary.merges)
}

fn scored_bpe(vocabulary: &GgufVocabulary, kinds: &[Kind]) -> Result<ScoredBpe, TextError> {
    if vocabulary.scores.len() != vocabulary.tokens.len() {
        let detail = format!("{} entries for {} tokens", vocabulary.scores.len(), vocabulary.tokens.len());
        return Err(TextError::BadVocabulary { field: "tokenizer.ggml.scores", detail });
    }
    let mut byte_ids = [NONE; 256];
    for (id, text, kind) in by_id(vocabulary, kinds) {
        if kind == Kind::Byte {
            let byte = byte_token(text).ok_or_else(|| TextError::BadVocabulary {
                field: "tokenizer.ggml.tokens",
                detail: format!("token {id} is of type byte but reads {text:?}, expected <0xXX>"),
            })?;
            byte_ids[usize::from(byte)] = id;
        }
    }
    let mergeable = by_id(vocabulary, kinds)
        .filter(|(_, _, kind)| matches!(kind, Kind::Normal | Kind::UserDefined | Kind::Unused))
        .zip_scores(&vocabulary.scores);
    ScoredBpe::new(mergeable, byte_ids, vocabulary.unknown)
}

/// Adds each token's score.
trait ZipScores<'a>: Iterator<Item = (u32, &'a str, Kind)> + Sized {
    fn zip_scores(self, scores: &'a [f32]) -> impl Iterator<Item = ScoredToken<'a>> {
        self.map(|(id, text, _)| ScoredToken { text, id, score: scores[id as usize] })
    }
}

impl<'a, I: Iterator<Item = (u32, &'a str, Kind)>> ZipScores<'a> for I {}

/// The byte that `<0xXX>` stands for.
pub(super) fn byte_token(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

fn added_tokens(vocabulary: &GgufVocabulary, kinds: &[Kind]) -> Vec<AddedToken> {
    by_id(vocabulary, kinds)
        .filter(|(_, _, kind)| matches!(kind, Kind::Unknown | Kind::Control | Kind::UserDefined))
        .map(|(id, text, kind)| AddedToken {
            id,
            content: text.to_owned(),
            special: kind != Kind::UserDefined,
            lstrip: false,
            rstrip: false,
            single_word: false,
        })
        .collect()
}

fn token_bytes(vocabulary: &GgufVocabulary, kinds: &[Kind], is_byte_level: bool) -> Vocabulary {
    let alphabet = ByteAlphabet::new();
    let mut table = Vocabulary::with_capacity(kinds.len());
    for (_, text, kind) in by_id(vocabulary, kinds) {
        match kind {
            Kind::Filler => table.push(b"", false),
            Kind::Byte => match byte_token(text) {
                Some(byte) => table.push(&[byte], false),
                None => table.push(text.as_bytes(), false),
            },
            Kind::Control | Kind::Unknown => table.push(text.as_bytes(), true),
            Kind::UserDefined if is_byte_level => table.push(text.as_bytes(), false),
            Kind::Normal | Kind::Unused if is_byte_level => table.push(&alphabet.decode(text), false),
            Kind::Normal | Kind::Unused | Kind::UserDefined => {
                table.push(text.replace(SPACE, " ").as_bytes(), false);
            }
        }
    }
    table
}

fn special_ids(vocabulary: &GgufVocabulary, kinds: &[Kind], add_bos: bool) -> Result<SpecialIds, TextError> {
    let checked = |field: &'static str, id: Option<u32>| match id {
        Some(id) if id as usize >= kinds.len() => {
            Err(TextError::BadVocabulary { field, detail: format!("id {id} is beyond the {} tokens", kinds.len()) })
        }
        id => Ok(id),
    };
    let eos = checked("tokenizer.ggml.eos_token_id", vocabulary.eos)?;
    let eot = checked("tokenizer.ggml.eot_token_id", vocabulary.eot)?;
    let eom = checked("tokenizer.ggml.eom_token_id", vocabulary.eom)?;
    let mut end_of_generation: BTreeSet<u32> = [eos, eot, eom].into_iter().flatten().collect();
    let named = by_id(vocabulary, kinds)
        .filter(|(_, text, kind)| *kind == Kind::Control && END_OF_GENERATION.contains(text))
        .map(|(id, _, _)| id);
    end_of_generation.extend(named);
    Ok(SpecialIds {
        bos: checked("tokenizer.ggml.bos_token_id", vocabulary.bos)?,
        eos,
        unknown: checked("tokenizer.ggml.unknown_token_id", vocabulary.unknown)?,
        pad: checked("tokenizer.ggml.padding_token_id", vocabulary.pad)?,
        end_of_generation,
        add_bos: vocabulary.add_bos.unwrap_or(add_bos),
        add_eos: vocabulary.add_eos.unwrap_or(false),
    })
}
