//! Pre-tokenizers: how byte-level BPE cuts text into words before merging.
//!
//! It decides the rules behind each value of `tokenizer.ggml.pre`, and refuses a value it does not know: a guessed
//! rule gives wrong tokens without a sound.
//!
//! The published rules use the look-ahead `\s+(?!\S)`: a run of white space leaves its last character to the word
//! that follows. Here the run is matched whole and shortened afterwards ([`Run`]), so that a linear-time engine
//! without look-ahead can do it; a test compares both forms.

use regex::Regex;

use crate::TextError;

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";
const LLAMA3: &str = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const QWEN2: &str = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const QWEN35: &str = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";

/// What becomes of a run of white space that is followed by something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    /// It stays whole.
    Whole,
    /// It gives up its last character.
    LeavesOne,
    /// It gives up its last character, unless it ends in a line break (then another rule matched it).
    LeavesOneUnlessLineBreak,
}

#[derive(Debug)]
struct Stage {
    regex: Regex,
    run: Run,
}

/// The rules of one pre-tokenizer: each stage cuts the pieces of the stage before.
#[derive(Debug)]
pub(super) struct Splitter {
    stages: Vec<Stage>,
    whole_words_first: bool,
    adds_bos: bool,
}

impl Splitter {
    /// The rules that `pre`, a value of `tokenizer.ggml.pre`, stands for.
    ///
    /// # Errors
    /// [`TextError::UnknownPreTokenizer`] for a value that is not listed here, or none at all.
    pub fn named(pre: Option<&str>) -> Result<Self, TextError> {
        use Run::{LeavesOne, LeavesOneUnlessLineBreak, Whole};
        let digits_then_gpt2: &[(&str, Run)] = &[(r"\p{N}", Whole), (GPT2, LeavesOne)];
        let rules: &[(&str, Run)] = match pre {
            Some("smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b") => {
                digits_then_gpt2
            }
            Some("gpt-2" | "gpt2" | "phi-2" | "mpt" | "olmo" | "jais" | "exaone4" | "trillion") => &[(GPT2, LeavesOne)],
            Some("llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "dbrx" | "smaug-bpe") => {
                &[(LLAMA3, LeavesOneUnlessLineBreak)]
            }
            Some("qwen2" | "stablelm2" | "deepseek-r1-qwen" | "megrez" | "hunyuan") => {
                &[(QWEN2, LeavesOneUnlessLineBreak)]
            }
            Some("qwen35") => &[(QWEN35, LeavesOneUnlessLineBreak)],
            Some("falcon") => &[(r"[\p{P}\$\+<=>\^~\|`]+", Whole), (GPT2, LeavesOne), ("[0-9][0-9][0-9]", Whole)],
            Some("deepseek-coder") => &[
                (r"[\r\n]", Whole),
                (r"\s?\p{L}+", Whole),
                (r"\s?\p{P}+", Whole),
                ("[一-龥ࠀ-一가-\u{D7FF}]+", Whole),
                (r"\p{N}", Whole),
            ],
            Some("default") => {
                &[(r"[\p{P}\$\+<=>\^~\|]+", Whole), (GPT2, LeavesOne), (r"\p{N}+", Whole), ("[0-9][0-9][0-9]", Whole)]
            }
            other => {
                let pre = other.map_or_else(|| "(missing)".to_owned(), |name| format!("{name:?}"));
                return Err(TextError::UnknownPreTokenizer { pre });
            }
        };
        let is_llama3 = rules.first().is_some_and(|(pattern, _)| *pattern == LLAMA3);
        let named_like_llama3 = is_llama3 && !matches!(pre, Some("dbrx" | "smaug-bpe"));
        let stages = rules.iter().map(|&(pattern, run)| stage(pattern, run)).collect::<Result<_, _>>()?;
        Ok(Self { stages, whole_words_first: named_like_llama3, adds_bos: named_like_llama3 })
    }

    /// Whether a word that is a token stays one token, whatever the merges would make of it.
    pub fn whole_words_first(&self) -> bool {
        self.whole_words_first
    }

    /// Whether files with this pre-tokenizer want a BOS where they do not say so.
    pub fn adds_bos(&self) -> bool {
        self.adds_bos
    }

    /// Calls `found` with each word of `text`, in order; together they are the text.
    pub fn split<'t>(&self, text: &'t str, found: &mut impl FnMut(&'t str)) {
        split_stages(&self.stages, text, found);
    }
}

fn stage(pattern: &str, run: Run) -> Result<Stage, TextError> {
    let regex = Regex::new(pattern).map_err(|error| TextError::BadVocabulary {
        field: "tokenizer.ggml.pre",
        detail: format!("splitting rule does not compile: {error}"),
    })?;
    Ok(Stage { regex, run })
}

fn split_stages<'t>(stages: &[Stage], text: &'t str, found: &mut dyn FnMut(&'t str)) {
    let Some((stage, later)) = stages.split_first() else {
        if !text.is_empty() {
            found(text);
        }
        return;
    };
    let mut done = 0;
    let mut from = 0;
    while let Some(matched) = stage.regex.find_at(text, from) {
        let end = shortened_end(stage.run, text, matched.as_str(), matched.end());
        split_stages(later, &text[done..matched.start()], found);
        split_stages(later, &text[matched.start()..end], found);
        done = end;
        from = end;
    }
    split_stages(later, &text[done..], found);
}

/// Where a match that ends at `end` really ends, by the rule for runs of white space.
fn shortened_end(run: Run, text: &str, matched: &str, end: usize) -> usize {
    if run == Run::Whole || end == text.len() {
        return end;
    }
    let Some(last) = matched.chars().next_back() else {
        return end;
    };
    if !last.is_whitespace() || last.len_utf8() == matched.len() || !matched.chars().all(char::is_whitespace) {
        return end;
    }
    if run == Run::LeavesOneUnlessLineBreak && matches!(last, '\r' | '\n') {
        return end;
    }
    end - last.len_utf8()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::cast_possible_truncation)]
mod tests {
    use super::*;

    /// The rules as published, with look-ahead, for comparison.
    fn published(rules: &[fancy_regex::Regex], text: &str) -> Vec<String> {
        let mut pieces = vec![text.to_owned()];
        for regex in rules {
            let mut next = Vec::new();
            for piece in pieces {
                let mut done = 0;
                for found in regex.find_iter(&piece) {
                    let found = found.unwrap();
                    next.push(piece[done..found.start()].to_owned());
                    next.push(found.as_str().to_owned());
                    done = found.end();
                }
                next.push(piece[done..].to_owned());
            }
            pieces = next.into_iter().filter(|piece| !piece.is_empty()).collect();
        }
        pieces
    }

    fn check(pre: &str, rules: &[&str]) {
        let splitter = Splitter::named(Some(pre)).unwrap();
        let rules: Vec<_> = rules.iter().map(|rule| fancy_regex::Regex::new(rule).unwrap()).collect();
        let alphabet = [
            " ", "\n", "\t", "\r", "a", "B", "é", "'", "s", "LL", "7", "½", "漢", "\u{301}", "!", "\u{a0}", "\u{3000}",
            "😀", "`", "$", "\u{85}",
        ];
        let mut seed = 42_u64;
        for _ in 0..20_000 {
            let mut text = String::new();
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            for i in 0..(seed >> 60) {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(i | 1);
                text.push_str(alphabet[(seed >> 33) as usize % alphabet.len()]);
            }
            let mut ours = Vec::new();
            splitter.split(&text, &mut |word| ours.push(word.to_owned()));
            assert_eq!(ours, published(&rules, &text), "{pre}: {text:?}");
        }
    }

    const GPT2_PUBLISHED: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";

    #[test]
    fn rules_cut_like_the_published_ones() {
        check("gpt-2", &[GPT2_PUBLISHED]);
        check("smollm", &[r"\p{N}", GPT2_PUBLISHED]);
        check("falcon", &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2_PUBLISHED, "[0-9][0-9][0-9]"]);
        check(
            "llama-bpe",
            &[
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ],
        );
        check(
            "qwen2",
            &[
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ],
        );
        check(
            "qwen35",
            &[
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ],
        );
    }

    #[test]
    fn llama3_cuts_by_hand() {
        let splitter = Splitter::named(Some("llama-bpe")).unwrap();
        let mut words = Vec::new();
        splitter.split("It'S  12345\n\n x\tfoo  ", &mut |word| words.push(word));
        assert_eq!(words, ["It", "'S", " ", " ", "123", "45", "\n\n", " x", "\tfoo", "  "]);
    }

    #[test]
    fn unknown_rules_are_refused_by_name() {
        let message = Splitter::named(Some("no-such-rule")).unwrap_err().to_string();
        assert!(message.contains("no-such-rule"), "{message}");
        assert!(Splitter::named(None).is_err());
    }
}
