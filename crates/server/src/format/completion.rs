//! Answers of `/v1/completions`.

use super::{AnswerFormat, AnswerMeta, token_text, write_event};
use crate::answer::{Answer, Output};
use crate::choice::{Delta, Finish, TokenEntry};
use crate::wire::Usage;
use crate::wire::completion::{Completion, CompletionChoice, CompletionLogprobs};
use bytes::BytesMut;
use pagemill_text::Tokenizer;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Writes completions.
pub(crate) struct CompletionFormat {
    meta: AnswerMeta,
    tokenizer: Arc<Tokenizer>,
    /// For each choice, whether its first event has been written.
    opened: Vec<bool>,
}

impl CompletionFormat {
    pub(crate) fn new(meta: AnswerMeta, tokenizer: Arc<Tokenizer>, num_choices: usize) -> Self {
        Self { meta, tokenizer, opened: vec![false; num_choices] }
    }

    fn logprobs(&self, entries: Vec<TokenEntry>) -> Option<CompletionLogprobs> {
        self.meta.top_logprobs?;
        let mut lists = CompletionLogprobs::default();
        for entry in entries {
            let token = token_text(&self.tokenizer, entry.token);
            lists.token_logprobs.push(entry.logprobs.as_ref().map(|l| l.logprob));
            lists.top_logprobs.push(entry.logprobs.map(|l| {
                let mut top = BTreeMap::new();
                // Best first: where two tokens have one text, the likelier stays. The chosen one always does.
                for (id, logprob) in l.top {
                    top.entry(token_text(&self.tokenizer, id)).or_insert(logprob);
                }
                top.entry(token.clone()).or_insert(l.logprob);
                top
            }));
            lists.tokens.push(token);
            lists.text_offset.push(entry.text_offset);
        }
        Some(lists)
    }

    fn choice<'a>(
        &self,
        index: usize,
        delta: Delta,
        finish: Option<Finish>,
        prompt: Option<&'a [u32]>,
    ) -> CompletionChoice<'a> {
        CompletionChoice {
            text: delta.text,
            index,
            logprobs: self.logprobs(delta.entries),
            finish_reason: finish.map(Finish::as_str),
            token_ids: self.meta.return_token_ids.then_some(delta.token_ids),
            prompt_token_ids: prompt,
        }
    }

    fn envelope<'a>(&'a self, choices: Vec<CompletionChoice<'a>>, usage: Option<Option<Usage>>) -> Completion<'a> {
        Completion {
            id: &self.meta.id,
            object: "text_completion",
            created: self.meta.created,
            model: &self.meta.model,
            choices,
            usage,
        }
    }
}

impl AnswerFormat for CompletionFormat {
    fn whole(&self, answer: &Answer, choices: Vec<(Delta, Finish)>) -> serde_json::Result<String> {
        let choices = choices.into_iter().enumerate().map(|(index, (delta, finish))| {
            let prompt = self.meta.return_token_ids.then(|| answer.prompt_ids(index));
            self.choice(index, delta, Some(finish), prompt)
        });
        serde_json::to_string(&self.envelope(choices.collect(), Some(Some(answer.usage()))))
    }

    fn events(&mut self, answer: &Answer, output: Output, out: &mut BytesMut) -> serde_json::Result<()> {
        let is_first = self.opened.get_mut(output.index).is_some_and(|opened| !std::mem::replace(opened, true));
        let prompt = (is_first && self.meta.return_token_ids).then(|| answer.prompt_ids(output.index));
        let choice = self.choice(output.index, output.delta, output.finish, prompt);
        write_event(out, &self.envelope(vec![choice], self.meta.no_usage()))
    }

    fn usage_event(&self, usage: Usage, out: &mut BytesMut) -> serde_json::Result<()> {
        write_event(out, &self.envelope(Vec::new(), Some(Some(usage))))
    }
}
