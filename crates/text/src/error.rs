//! What can go wrong between text and tokens, one enum for the crate.
//!
//! It does not know how errors become HTTP statuses; [`TextError::is_callers_fault`] tells the server which side is
//! to blame.

/// An error of the text room.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The vocabulary names a tokenizer model that Pagemill does not compute.
    #[error("tokenizer model {model:?} is not supported (supported: \"gpt2\", \"llama\")")]
    UnknownModel {
        /// The value of `tokenizer.ggml.model`.
        model: String,
    },
    /// The vocabulary names a pre-tokenizer whose splitting rules are not known.
    #[error("tokenizer.ggml.pre: pre-tokenizer {pre} is not supported, and guessing would give wrong tokens")]
    UnknownPreTokenizer {
        /// The value of `tokenizer.ggml.pre`, quoted, or `(missing)`.
        pre: String,
    },
    /// A vocabulary whose parts do not fit together.
    #[error("vocabulary: {field}: {detail}")]
    BadVocabulary {
        /// The metadata field at fault.
        field: &'static str,
        /// What was expected and what was found.
        detail: String,
    },
    /// A `tokenizer.json` that cannot be used.
    #[error("tokenizer.json: {detail}")]
    BadTokenizerJson {
        /// What was expected and what was found.
        detail: String,
    },
    /// Text that the vocabulary has no token for.
    #[error("the vocabulary has no token for byte 0x{byte:02X} at byte {offset} of the text, and no unknown token")]
    Unencodable {
        /// The byte that no token covers.
        byte: u8,
        /// Its offset in the fragment being encoded, in bytes.
        offset: usize,
    },
    /// Text longer than the tokenizer's offsets can count.
    #[error("text of {len} bytes is too long to tokenise (at most {max})")]
    TextTooLong {
        /// Length of the text in bytes.
        len: usize,
        /// The greatest length accepted, in bytes.
        max: usize,
    },
    /// The library behind a `tokenizer.json` failed on this text.
    #[error("tokenising failed: {detail}")]
    Encode {
        /// The library's own words.
        detail: String,
    },
    /// A stop string without a single character, which would match everywhere.
    #[error("stop string {index} is empty")]
    EmptyStopString {
        /// Its place in the request's list, from 0.
        index: usize,
    },
    /// The model has no chat template, so it cannot hold a conversation.
    #[error("this model has no chat template; use text completions, or start the server with a template")]
    NoTemplate,
    /// The conversation holds every character that could mark a control token's literal as plain text.
    #[error("the messages use every private-use character of Unicode's planes 15 and 16; at least one must be left")]
    NoMarkLeft,
    /// The template does not parse.
    #[error("chat template: line {line}: {detail}")]
    TemplateSyntax {
        /// Line of the template, from 1; 0 when unknown.
        line: usize,
        /// The parser's own words.
        detail: String,
    },
    /// The template itself refused these messages through `raise_exception`.
    #[error("{message}")]
    TemplateRaised {
        /// The template's own message.
        message: String,
    },
    /// The template failed on these messages.
    #[error("chat template: line {line}: {detail}")]
    TemplateFailed {
        /// Line of the template, from 1; 0 when unknown.
        line: usize,
        /// The engine's own words.
        detail: String,
    },
    /// The template ran for longer than any honest template needs.
    #[error("chat template: stopped after {fuel} steps")]
    TemplateOutOfFuel {
        /// The number of steps that were allowed.
        fuel: u64,
    },
    /// The template wrote more than any honest prompt holds.
    #[error("chat template: stopped after writing {limit} bytes")]
    TemplateOutputTooLong {
        /// The greatest prompt length, in bytes.
        limit: usize,
    },
}

impl TextError {
    /// Whether the request caused this error (answer 400), rather than the model's files (refuse to load).
    pub fn is_callers_fault(&self) -> bool {
        matches!(
            self,
            Self::Unencodable { .. }
                | Self::TextTooLong { .. }
                | Self::Encode { .. }
                | Self::EmptyStopString { .. }
                | Self::NoTemplate
                | Self::NoMarkLeft
                | Self::TemplateRaised { .. }
                | Self::TemplateFailed { .. }
                | Self::TemplateOutOfFuel { .. }
                | Self::TemplateOutputTooLong { .. }
        )
    }
}
