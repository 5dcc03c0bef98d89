//! One choice of an answer: its tokens become text, stop strings end it, log-probabilities travel with the
//! text they belong to. The same for streams and whole answers, so the two cannot differ. Knows no JSON.

use crate::error::ApiError;
use crate::prompt::EchoedPrompt;
use crate::validate::GenerationOptions;
use pagemill_engine::{FinishReason, TokenLogprobs};
use pagemill_text::{Detokenizer, StopMatcher, TextPosition, Tokenizer};
use std::collections::VecDeque;
use std::sync::Arc;

/// A token whose text has been shown.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TokenEntry {
    /// The token.
    pub(crate) token: u32,
    /// Characters of all text before it, an echoed prompt included.
    pub(crate) text_offset: usize,
    /// `None`: a prompt's first token.
    pub(crate) logprobs: Option<TokenLogprobs>,
}

/// What an event adds to a choice.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Delta {
    /// Text to be shown.
    pub(crate) text: String,
    /// Tokens to be shown, when log-probabilities were asked for.
    pub(crate) entries: Vec<TokenEntry>,
    /// Tokens as generated, when they were asked for.
    pub(crate) token_ids: Vec<u32>,
}

impl Delta {
    /// Nothing to tell.
    pub(crate) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.entries.is_empty() && self.token_ids.is_empty()
    }

    /// Adds what came later.
    pub(crate) fn append(&mut self, later: Self) {
        self.text.push_str(&later.text);
        self.entries.extend(later.entries);
        self.token_ids.extend(later.token_ids);
    }
}

/// How a choice ended, in the API's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finish {
    /// An end token, a stop token or a stop string.
    Stop,
    /// `max_tokens`, or the context is full.
    Length,
}

impl Finish {
    /// As `finish_reason` spells it.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// The state of one choice.
pub(crate) struct Choice {
    detokenizer: Detokenizer,
    stops: StopMatcher,
    stop_token_ids: Arc<[u32]>,
    min_tokens: usize,
    include_stop: bool,
    wants_entries: bool,
    wants_ids: bool,
    /// Generated tokens.
    num_tokens: usize,
    /// Bytes of text that tokens have made, shown or held back; positions in it order the entries.
    made_bytes: usize,
    /// Bytes of it that have been shown.
    shown_bytes: usize,
    /// Characters made, an echoed prompt's included.
    made_chars: usize,
    /// Tokens whose text has not been shown: (where it begins in the made text, the token).
    held: VecDeque<(usize, TokenEntry)>,
    finish: Option<Finish>,
}

impl Choice {
    /// A choice that has heard nothing yet. `stops` was compiled from the request's stop strings.
    pub(crate) fn new(
        tokenizer: &Arc<Tokenizer>,
        options: &GenerationOptions,
        stops: StopMatcher,
        stop_token_ids: Arc<[u32]>,
        echo: Option<&EchoedPrompt>,
    ) -> Self {
        let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), TextPosition::Middle);
        if !options.skip_special_tokens {
            detokenizer = detokenizer.with_special_tokens();
        }
        let stops = if options.include_stop_str_in_output { stops.including_stop_string() } else { stops };
        Self {
            detokenizer,
            stops,
            stop_token_ids,
            min_tokens: options.sampling.min_tokens,
            include_stop: options.include_stop_str_in_output,
            wants_entries: options.logprobs.is_some(),
            wants_ids: options.return_token_ids,
            num_tokens: 0,
            made_bytes: 0,
            shown_bytes: 0,
            made_chars: echo.map_or(0, |e| e.text.chars().count()),
            held: VecDeque::new(),
            finish: None,
        }
    }

    /// Generated tokens, the one that ended the choice included.
    pub(crate) fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// How it ended, once it has.
    pub(crate) fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// Takes a token. [`Choice::finish`] tells whether a stop string was completed.
    pub(crate) fn on_token(&mut self, token: u32, logprobs: Option<TokenLogprobs>) -> Delta {
        self.num_tokens += 1;
        let token_ids = if self.wants_ids { vec![token] } else { Vec::new() };
        // The token that ends an answer is not part of its text.
        if !self.include_stop && self.stop_token_ids.binary_search(&token).is_ok() {
            return Delta { token_ids, ..Delta::default() };
        }
        if self.wants_entries {
            let entry = TokenEntry { token, text_offset: self.made_chars, logprobs };
            self.held.push_back((self.made_bytes, entry));
        }
        let piece = self.detokenizer.push(token);
        // Stop strings count from the first token after `min_tokens` on (D05).
        if self.num_tokens <= self.min_tokens {
            self.stops.disable()
        } else {
            self.stops.enable()
        }
        let text = self.match_stops(&piece);
        let entries = self.release();
        if self.finish.is_some() {
            self.held.clear();
        }
        Delta { text, entries, token_ids }
    }

    /// Takes the engine's word that the choice has ended; what was held back is text after all.
    ///
    /// # Errors
    /// 500 when the engine could not go on with this choice.
    pub(crate) fn on_finished(&mut self, reason: FinishReason) -> Result<Delta, ApiError> {
        let finish = match reason {
            FinishReason::Stop(_) => Finish::Stop,
            FinishReason::Length => Finish::Length,
            FinishReason::Failed(message) => return Err(ApiError::internal(format!("Generation failed: {message}."))),
        };
        let rest = self.detokenizer.flush();
        let mut text = self.match_stops(&rest);
        let mut entries = self.release();
        if self.finish.is_none() {
            text.push_str(&self.stops.finish());
            entries.extend(self.held.drain(..).map(|(_, entry)| entry));
            self.finish = Some(finish);
        }
        Ok(Delta { text, entries, token_ids: Vec::new() })
    }

    fn match_stops(&mut self, piece: &str) -> String {
        self.made_bytes += piece.len();
        self.made_chars += piece.chars().count();
        let progress = self.stops.push(piece);
        self.shown_bytes += progress.text.len();
        if progress.matched.is_some() {
            self.finish = Some(Finish::Stop);
        }
        progress.text
    }

    /// The tokens of which at least one byte has been shown.
    fn release(&mut self) -> Vec<TokenEntry> {
        let shown = self.held.iter().take_while(|(start, _)| *start < self.shown_bytes).count();
        self.held.drain(..shown).map(|(_, entry)| entry).collect()
    }
}
