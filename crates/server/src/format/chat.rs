//! Answers of `/v1/chat/completions`.

use super::{AnswerFormat, AnswerMeta, token_text, write_event};
use crate::answer::{Answer, Output};
use crate::choice::{Delta, Finish, TokenEntry};
use crate::wire::Usage;
use crate::wire::chat::{
    AnswerMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatLogprobs, ChatTokenLogprob,
    ChatTopLogprob,
};
use bytes::BytesMut;
use pagemill_text::Tokenizer;
use std::sync::Arc;

/// Writes chat answers.
pub(crate) struct ChatFormat {
    meta: AnswerMeta,
    tokenizer: Arc<Tokenizer>,
    /// For each choice, whether its first event, which tells the role, has been written.
    opened: Vec<bool>,
}

impl ChatFormat {
    pub(crate) fn new(meta: AnswerMeta, tokenizer: Arc<Tokenizer>, num_choices: usize) -> Self {
        Self { meta, tokenizer, opened: vec![false; num_choices] }
    }

    fn logprobs(&self, entries: Vec<TokenEntry>) -> Option<ChatLogprobs> {
        self.meta.top_logprobs?;
        let content = entries.into_iter().filter_map(|entry| {
            let logprobs = entry.logprobs?;
            let top = logprobs.top.iter().map(|&(token, logprob)| ChatTopLogprob {
                token: token_text(&self.tokenizer, token),
                logprob,
                bytes: self.tokenizer.token_bytes(token).to_vec(),
            });
            Some(ChatTokenLogprob {
                token: token_text(&self.tokenizer, entry.token),
                logprob: logprobs.logprob,
                bytes: self.tokenizer.token_bytes(entry.token).to_vec(),
                top_logprobs: top.collect(),
            })
        });
        Some(ChatLogprobs { content: content.collect(), refusal: None })
    }

    fn write_chunk(
        &self,
        out: &mut BytesMut,
        choice: ChatChunkChoice,
        prompt: Option<&[u32]>,
    ) -> serde_json::Result<()> {
        let chunk = ChatChunk {
            id: &self.meta.id,
            object: "chat.completion.chunk",
            created: self.meta.created,
            model: &self.meta.model,
            choices: vec![choice],
            usage: self.meta.no_usage(),
            prompt_token_ids: prompt,
        };
        write_event(out, &chunk)
    }
}

impl AnswerFormat for ChatFormat {
    fn whole(&self, answer: &Answer, choices: Vec<(Delta, Finish)>) -> serde_json::Result<String> {
        let choices = choices.into_iter().enumerate().map(|(index, (delta, finish))| ChatChoice {
            index,
            message: AnswerMessage { role: "assistant", content: delta.text, refusal: None },
            logprobs: self.logprobs(delta.entries),
            finish_reason: finish.as_str(),
            token_ids: self.meta.return_token_ids.then_some(delta.token_ids),
        });
        serde_json::to_string(&ChatCompletion {
            id: &self.meta.id,
            object: "chat.completion",
            created: self.meta.created,
            model: &self.meta.model,
            choices: choices.collect(),
            usage: answer.usage(),
            prompt_token_ids: self.meta.return_token_ids.then(|| answer.prompt_ids(0)),
        })
    }

    fn events(&mut self, answer: &Answer, output: Output, out: &mut BytesMut) -> serde_json::Result<()> {
        let index = output.index;
        let wants_ids = self.meta.return_token_ids;
        if let Some(opened) = self.opened.get_mut(index)
            && !std::mem::replace(opened, true)
        {
            let delta = ChatDelta { role: Some("assistant"), content: Some(String::new()) };
            let first = ChatChunkChoice { index, delta, logprobs: None, finish_reason: None, token_ids: None };
            self.write_chunk(out, first, wants_ids.then(|| answer.prompt_ids(index)))?;
        }
        if !output.delta.is_empty() {
            let choice = ChatChunkChoice {
                index,
                delta: ChatDelta { role: None, content: Some(output.delta.text) },
                logprobs: self.logprobs(output.delta.entries),
                finish_reason: None,
                token_ids: wants_ids.then_some(output.delta.token_ids),
            };
            self.write_chunk(out, choice, None)?;
        }
        if let Some(finish) = output.finish {
            let choice = ChatChunkChoice {
                index,
                delta: ChatDelta::default(),
                logprobs: None,
                finish_reason: Some(finish.as_str()),
                token_ids: None,
            };
            self.write_chunk(out, choice, None)?;
        }
        Ok(())
    }

    fn usage_event(&self, usage: Usage, out: &mut BytesMut) -> serde_json::Result<()> {
        let chunk = ChatChunk {
            id: &self.meta.id,
            object: "chat.completion.chunk",
            created: self.meta.created,
            model: &self.meta.model,
            choices: Vec::new(),
            usage: Some(Some(usage)),
            prompt_token_ids: None,
        };
        write_event(out, &chunk)
    }
}
