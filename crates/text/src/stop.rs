//! Stop strings, matched as the text arrives.
//!
//! It decides how much of an answer may be shown: a suffix that could still become a stop string is held back, and
//! the first stop string to be completed ends the answer (of several completed at the same character, the longest).
//! The result depends on the text alone, not on how it is cut into pieces. It does not know tokens; holding stop
//! strings off for the first `min_tokens` is the caller's decision ([`StopMatcher::disable`]).

use std::sync::Arc;

use crate::TextError;

/// What one piece of text led to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopProgress {
    /// Text that may be shown now.
    pub text: String,
    /// Index of the stop string that ended the answer; no more text must be pushed then.
    pub matched: Option<usize>,
}

/// Watches one answer for any of several stop strings. Linear in the text whatever the stop strings are. A clone
/// shares the compiled strings.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    automaton: Arc<Automaton>,
    state: usize,
    /// Text that may be the start of a stop string; as long as the state is deep.
    held: String,
    enabled: bool,
    includes_stop_string: bool,
}

impl StopMatcher {
    /// Compiles `stops`; an empty list never matches and holds nothing back.
    ///
    /// # Errors
    /// [`TextError::EmptyStopString`] for a string without characters.
    pub fn new(stops: &[String]) -> Result<Self, TextError> {
        let automaton = Arc::new(Automaton::new(stops)?);
        Ok(Self { automaton, state: 0, held: String::new(), enabled: true, includes_stop_string: false })
    }

    /// Shows the stop string that ended the answer, too (`include_stop_str_in_output`).
    pub fn including_stop_string(mut self) -> Self {
        self.includes_stop_string = true;
        self
    }

    /// Until [`StopMatcher::enable`], text passes freely. A stop string that begins in such text does not match.
    pub fn disable(&mut self) {
        self.enabled = false;
    }

    /// Ends the effect of [`StopMatcher::disable`] for the text that follows.
    pub fn enable(&mut self) {
        self.enabled = true;
    }

    /// Takes the next piece of the answer.
    pub fn push(&mut self, piece: &str) -> StopProgress {
        if !self.enabled {
            self.state = 0;
            let mut text = std::mem::take(&mut self.held);
            text.push_str(piece);
            return StopProgress { text, matched: None };
        }
        let mut text = std::mem::take(&mut self.held);
        let held_len = text.len();
        text.push_str(piece);
        for (offset, &byte) in piece.as_bytes().iter().enumerate() {
            self.state = self.automaton.step(self.state, byte);
            let Some((index, len)) = self.automaton.nodes[self.state].matched else {
                continue;
            };
            let end = held_len + offset + 1;
            text.truncate(if self.includes_stop_string { end } else { end - len });
            self.state = 0;
            return StopProgress { text, matched: Some(index) };
        }
        self.held = text.split_off(text.len() - self.automaton.nodes[self.state].depth);
        StopProgress { text, matched: None }
    }

    /// The answer has ended otherwise: what was held back is text after all.
    pub fn finish(&mut self) -> String {
        self.state = 0;
        std::mem::take(&mut self.held)
    }
}

/// Aho and Corasick's automaton over the bytes of the stop strings.
#[derive(Debug)]
struct Automaton {
    nodes: Vec<Node>,
}

#[derive(Debug, Default)]
struct Node {
    children: Vec<(u8, usize)>,
    /// The node of the longest proper suffix that is also a prefix of a stop string.
    fallback: usize,
    /// Length of the prefix that this node stands for, in bytes.
    depth: usize,
    /// The longest stop string that ends here: its index and its length in bytes.
    matched: Option<(usize, usize)>,
}

impl Automaton {
    fn new(stops: &[String]) -> Result<Self, TextError> {
        let mut automaton = Self { nodes: vec![Node::default()] };
        for (index, stop) in stops.iter().enumerate() {
            if stop.is_empty() {
                return Err(TextError::EmptyStopString { index });
            }
            let node = stop.bytes().fold(0, |node, byte| automaton.child_or_insert(node, byte));
            automaton.nodes[node].matched.get_or_insert((index, stop.len()));
        }
        automaton.link();
        Ok(automaton)
    }

    fn child(&self, node: usize, byte: u8) -> Option<usize> {
        self.nodes[node].children.iter().find(|(label, _)| *label == byte).map(|&(_, child)| child)
    }

    fn child_or_insert(&mut self, node: usize, byte: u8) -> usize {
        if let Some(child) = self.child(node, byte) {
            return child;
        }
        let child = self.nodes.len();
        self.nodes.push(Node { depth: self.nodes[node].depth + 1, ..Node::default() });
        self.nodes[node].children.push((byte, child));
        child
    }

    /// Sets fallbacks in order of depth, so that a node's fallback is ready before its children need it.
    fn link(&mut self) {
        let mut order: Vec<usize> = vec![0];
        let mut next = 0;
        while next < order.len() {
            let node = order[next];
            next += 1;
            for (byte, child) in self.nodes[node].children.clone() {
                if node != 0 {
                    self.nodes[child].fallback = self.step(self.nodes[node].fallback, byte);
                }
                let inherited = self.nodes[self.nodes[child].fallback].matched;
                let matched = &mut self.nodes[child].matched;
                *matched = matched.or(inherited);
                order.push(child);
            }
        }
    }

    fn step(&self, mut node: usize, byte: u8) -> usize {
        loop {
            if let Some(child) = self.child(node, byte) {
                return child;
            }
            if node == 0 {
                return 0;
            }
            node = self.nodes[node].fallback;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::cast_possible_truncation)]
mod tests {
    use super::*;

    fn matcher(stops: &[&str]) -> StopMatcher {
        StopMatcher::new(&stops.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>()).unwrap()
    }

    fn run(mut matcher: StopMatcher, pieces: &[&str]) -> (String, Option<usize>) {
        let mut shown = String::new();
        for piece in pieces {
            let progress = matcher.push(piece);
            shown.push_str(&progress.text);
            if progress.matched.is_some() {
                return (shown, progress.matched);
            }
        }
        shown.push_str(&matcher.finish());
        (shown, None)
    }

    #[test]
    fn no_character_of_a_stop_string_is_shown() {
        let mut alphabet = matcher(&["DEFGHIJ"]);
        for piece in [" DE", "F", "GH", "I"] {
            assert!(!alphabet.push(piece).text.contains('D'));
        }
        assert_eq!(alphabet.push("JKL"), StopProgress { text: String::new(), matched: Some(0) });
        assert_eq!(run(matcher(&["DEFGHIJ"]), &["D", "DEF", "GX"]), ("DDEFGX".into(), None));
    }

    #[test]
    fn overlaps_and_options() {
        assert_eq!(run(matcher(&["aab"]), &["aa", "ab", "c"]), ("a".into(), Some(0)));
        assert_eq!(run(matcher(&["bcd", "xabcd"]), &["xab", "cd"]), (String::new(), Some(1)));
        assert_eq!(run(matcher(&["xabcde", "bc"]), &["xabcde"]), ("xa".into(), Some(1)));
        assert_eq!(run(matcher(&["\n"]).including_stop_string(), &["a", "b\nc"]), ("ab\n".into(), Some(0)));
        assert_eq!(run(matcher(&[]), &["a", "b"]), ("ab".into(), None));
        assert_eq!(run(matcher(&["漢字"]), &["漢", "漢字"]), ("漢".into(), Some(0)));
        assert!(matches!(StopMatcher::new(&["a".into(), String::new()]), Err(TextError::EmptyStopString { index: 1 })));
    }

    #[test]
    fn disabled_text_neither_matches_nor_begins_a_match() {
        let mut stops = matcher(&["ab"]);
        stops.disable();
        assert_eq!(stops.push("aba"), StopProgress { text: "aba".into(), matched: None });
        stops.enable();
        assert_eq!(stops.push("b"), StopProgress { text: "b".into(), matched: None });
        assert_eq!(stops.push("ab"), StopProgress { text: String::new(), matched: Some(0) });
    }

    /// Against a matcher that looks at the whole text after each character.
    #[test]
    fn equals_the_naive_matcher_for_every_cut() {
        let mut seed = 99_u64;
        let mut random = move |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % n
        };
        for _ in 0..20_000 {
            let mut word =
                |max: u64| (0..=random(max)).map(|_| ['a', 'b', 'é'][random(3) as usize]).collect::<String>();
            let stops = [word(3), word(4), word(2)];
            let text = word(12);
            let mut expected = (text.clone(), None);
            for (at, c) in text.char_indices() {
                let seen = &text[..at + c.len_utf8()];
                if let Some(stop) = stops.iter().filter(|s| seen.ends_with(s.as_str())).max_by_key(|s| s.len()) {
                    let index = stops.iter().position(|s| s == stop);
                    expected = (seen[..seen.len() - stop.len()].to_owned(), index);
                    break;
                }
            }
            let mut pieces = vec![String::new()];
            for c in text.chars() {
                if random(2) == 0 {
                    pieces.push(String::new());
                }
                pieces.last_mut().unwrap().push(c);
            }
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            assert_eq!(run(matcher(&stops), &pieces), expected, "{stops:?} in {pieces:?}");
        }
    }
}
