//! The text room: everything between characters and token ids.
//!
//! It decides how text becomes ids ([`Tokenizer`]), how ids become text as they arrive ([`Detokenizer`]), where a
//! stop string ends an answer ([`StopMatcher`]) and how a conversation becomes one prompt ([`ChatTemplate`]).
//!
//! It knows nothing of models, tensors, files, HTTP or clocks: vocabularies and templates arrive as plain structs and
//! bytes, and the time of day is an argument. Nothing here locks or keeps state between calls, so one [`Tokenizer`]
//! and one [`ChatTemplate`] behind an `Arc` serve every thread.

#![forbid(unsafe_code)]

mod chat;
mod detokenizer;
mod error;
mod stop;
mod tokenizer;

pub use chat::{ChatInput, ChatTemplate, ContentFormat, LocalTime, RenderedPrompt, TemplateTokens};
pub use detokenizer::{Detokenizer, TextPosition};
pub use error::TextError;
pub use stop::{StopMatcher, StopProgress};
pub use tokenizer::{GgufVocabulary, HfTokenizerOptions, LiteralGuard, Special, Tokenizer};
