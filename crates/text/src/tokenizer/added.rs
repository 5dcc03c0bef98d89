//! Added tokens: the literals that are cut out of a text before the model of the vocabulary sees it.
//!
//! It decides where such literals stand (leftmost, then longest), which of them a caller may write ([`Special`]) and
//! which occurrences are spoken by a user and must stay plain text (guards). It does not know how the text between
//! them becomes ids.

use std::ops::Range;

use aho_corasick::{AhoCorasick, AhoCorasickBuilder, Anchored, Input, MatchKind};

use crate::TextError;

/// Whether literals of control tokens in a text become those tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// `<|im_end|>` becomes the control token: for text that the operator or a template wrote.
    Parse,
    /// `<|im_end|>` stays ten characters: for text that a user wrote. Added tokens that are not control tokens
    /// (such as runs of line breaks, or `<tool_call>` in some vocabularies) are found all the same.
    Plain,
}

/// One added token.
#[derive(Clone, Debug)]
pub(super) struct AddedToken {
    pub id: u32,
    pub content: String,
    /// A control token: found by [`Special::Parse`] only.
    pub special: bool,
    /// Swallows white space before it.
    pub lstrip: bool,
    /// Swallows white space after it.
    pub rstrip: bool,
    /// Found only where no letter, digit or underscore touches it.
    pub single_word: bool,
}

/// A stretch of text: an added token, or text for the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fragment {
    Token(u32, Range<usize>),
    Text(Range<usize>),
}

/// A set of added tokens, ready to search.
#[derive(Debug, Default)]
pub(super) struct AddedTokens {
    tokens: Vec<AddedToken>,
    every: Option<Searcher>,
    plain: Option<Searcher>,
}

#[derive(Debug)]
struct Searcher {
    automaton: AhoCorasick,
    /// Index into `tokens` of each pattern.
    tokens: Vec<usize>,
}

impl AddedTokens {
    pub fn new(tokens: Vec<AddedToken>) -> Result<Self, TextError> {
        let tokens: Vec<AddedToken> = tokens.into_iter().filter(|token| !token.content.is_empty()).collect();
        let every = Searcher::new(&tokens, |_| true)?;
        let plain = Searcher::new(&tokens, |token| !token.special)?;
        Ok(Self { tokens, every, plain })
    }

    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The control tokens' literals.
    pub fn special_literals(&self) -> impl Iterator<Item = &str> {
        self.tokens.iter().filter(|token| token.special).map(|token| token.content.as_str())
    }

    /// Cuts `text` into fragments that together cover it (but for white space that tokens swallow). A control token
    /// with one of `guards` (sorted byte offsets) strictly inside is not found.
    pub fn partition(&self, text: &str, special: Special, guards: &[usize]) -> Vec<Fragment> {
        let searcher = match special {
            Special::Parse => self.every.as_ref(),
            Special::Plain => self.plain.as_ref(),
        };
        let mut fragments = Vec::new();
        let mut done = 0;
        let mut from = 0;
        while let Some((token, found)) = searcher.and_then(|s| s.find(&self.tokens, text, from)) {
            from = found.end;
            if token.special && is_guarded(guards, &found) {
                from = next_boundary(text, found.start);
                continue;
            }
            if token.single_word && touches_word(text, &found) {
                continue;
            }
            let start = if token.lstrip { text[done..found.start].trim_end().len() + done } else { found.start };
            let end = if token.rstrip { text.len() - text[found.end..].trim_start().len() } else { found.end };
            if done < start {
                fragments.push(Fragment::Text(done..start));
            }
            fragments.push(Fragment::Token(token.id, start..end));
            done = end;
            from = end;
        }
        if done < text.len() {
            fragments.push(Fragment::Text(done..text.len()));
        }
        fragments
    }
}

impl Searcher {
    fn new(tokens: &[AddedToken], wanted: impl Fn(&AddedToken) -> bool) -> Result<Option<Self>, TextError> {
        let indices: Vec<usize> = (0..tokens.len()).filter(|&i| wanted(&tokens[i])).collect();
        if indices.is_empty() {
            return Ok(None);
        }
        let automaton = AhoCorasickBuilder::new()
            .match_kind(MatchKind::LeftmostLongest)
            .build(indices.iter().map(|&i| &tokens[i].content))
            .map_err(|error| TextError::BadVocabulary { field: "added tokens", detail: error.to_string() })?;
        Ok(Some(Self { automaton, tokens: indices }))
    }

    fn find<'a>(&self, tokens: &'a [AddedToken], text: &str, from: usize) -> Option<(&'a AddedToken, Range<usize>)> {
        let found = self.automaton.find(Input::new(text).range(from..).anchored(Anchored::No))?;
        Some((&tokens[self.tokens[found.pattern().as_usize()]], found.range()))
    }
}

fn is_guarded(guards: &[usize], found: &Range<usize>) -> bool {
    let first_inside = guards.partition_point(|&guard| guard <= found.start);
    guards.get(first_inside).is_some_and(|&guard| guard < found.end)
}

fn next_boundary(text: &str, at: usize) -> usize {
    at + text[at..].chars().next().map_or(1, char::len_utf8)
}

fn touches_word(text: &str, found: &Range<usize>) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    text[..found.start].chars().next_back().is_some_and(is_word)
        || text[found.end..].chars().next().is_some_and(is_word)
}

/// Finds the literals of control tokens in what users write, so that a chat template can mark them as plain text.
#[derive(Debug)]
pub struct LiteralGuard {
    automaton: Option<AhoCorasick>,
}

impl LiteralGuard {
    /// A guard for these literals.
    ///
    /// # Errors
    /// Literals too many or too long for one search automaton.
    pub fn for_literals<'a>(literals: impl IntoIterator<Item = &'a str>) -> Result<Self, TextError> {
        Self::new(literals.into_iter())
    }

    pub(super) fn new<'a>(literals: impl Iterator<Item = &'a str>) -> Result<Self, TextError> {
        let literals: Vec<&str> = literals.collect();
        if literals.is_empty() {
            return Ok(Self { automaton: None });
        }
        let automaton = AhoCorasickBuilder::new()
            .match_kind(MatchKind::Standard)
            .build(literals)
            .map_err(|error| TextError::BadVocabulary { field: "added tokens", detail: error.to_string() })?;
        Ok(Self { automaton: Some(automaton) })
    }

    /// A guard that finds nothing, for templates that are rendered without a tokenizer.
    pub fn none() -> Self {
        Self { automaton: None }
    }

    /// Whether `text` holds any literal. Linear in `text`.
    pub(crate) fn is_needed(&self, text: &str) -> bool {
        self.automaton.as_ref().is_some_and(|automaton| automaton.is_match(text))
    }

    /// A copy of `text` with `mark` put after the first character of every literal in it, overlapping ones included.
    pub(crate) fn mark(&self, text: &str, mark: char) -> String {
        let Some(automaton) = &self.automaton else {
            return text.to_owned();
        };
        let mut places: Vec<usize> =
            automaton.find_overlapping_iter(text).map(|found| next_boundary(text, found.start())).collect();
        places.sort_unstable();
        places.dedup();
        let mut marked = String::with_capacity(text.len() + places.len() * mark.len_utf8());
        let mut done = 0;
        for place in places {
            marked.push_str(&text[done..place]);
            marked.push(mark);
            done = place;
        }
        marked.push_str(&text[done..]);
        marked
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn token(id: u32, content: &str, special: bool) -> AddedToken {
        AddedToken { id, content: content.into(), special, lstrip: false, rstrip: false, single_word: false }
    }

    fn ids(fragments: &[Fragment]) -> Vec<u32> {
        let id = |f: &Fragment| {
            if let Fragment::Token(id, _) = f { Some(*id) } else { None }
        };
        fragments.iter().filter_map(id).collect()
    }

    #[test]
    fn longest_literal_wins_and_plain_hides_control_tokens() {
        let tokens = vec![token(1, "<s>", true), token(2, "\n", false), token(3, "\n\n", false)];
        let added = AddedTokens::new(tokens).unwrap();
        assert_eq!(ids(&added.partition("a<s>\n\n\nb", Special::Parse, &[])), [1, 3, 2]);
        assert_eq!(ids(&added.partition("a<s>\n\n\nb", Special::Plain, &[])), [3, 2]);
        assert_eq!(added.partition("", Special::Parse, &[]), []);
    }

    #[test]
    fn guards_hide_one_occurrence_and_no_other() {
        let added = AddedTokens::new(vec![token(1, "<s>", true), token(2, "s><s", true)]).unwrap();
        assert_eq!(ids(&added.partition("<s><s>", Special::Parse, &[])), [1, 1]);
        assert_eq!(ids(&added.partition("<s>|<s>", Special::Parse, &[1])), [1]);
        assert_eq!(ids(&added.partition("<s>|<s>", Special::Parse, &[0, 3, 4, 7])), [1, 1]);
    }

    #[test]
    fn strip_and_single_word_flags() {
        let mut tokens = vec![token(1, "<m>", true), token(2, "day", false)];
        (tokens[0].lstrip, tokens[0].rstrip, tokens[1].single_word) = (true, true, true);
        let added = AddedTokens::new(tokens).unwrap();
        let expected = [Fragment::Text(0..1), Fragment::Token(1, 1..8), Fragment::Text(8..14)];
        assert_eq!(added.partition("a  <m>  sunday", Special::Parse, &[]), expected);
        assert_eq!(ids(&added.partition("a day", Special::Plain, &[])), [2]);
    }

    #[test]
    fn marking_is_complete_for_overlapping_literals() {
        let guard = LiteralGuard::new(["<s>", "s><"].into_iter()).unwrap();
        assert_eq!(guard.mark("a<s><s>", '#'), "a<#s#><#s>");
        assert!(!guard.is_needed("plain < s >"));
    }
}
