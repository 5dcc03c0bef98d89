//! From a validated prompt to token ids: rendering and tokenising, off the event loop and a bounded number
//! at a time. Refuses what leaves no room in the context, the hopeless cases without tokenising them.

use crate::error::ApiError;
use crate::state::{ReadyModel, ServerState};
use crate::validate::{ChatMessage, Conversation, PromptSource};
use pagemill_text::{ChatInput, Detokenizer, LocalTime, RenderedPrompt, Special, TextError, TextPosition, Tokenizer};
use serde_json::Value;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// A prompt that may be submitted.
#[derive(Debug, Clone)]
pub(crate) struct PreparedPrompt {
    /// At least one id, at most `max_seq_len`.
    pub(crate) ids: Vec<u32>,
    /// Its text as an answer repeats it; only when echo was asked for.
    pub(crate) echo: Option<EchoedPrompt>,
}

/// A prompt's text and where its tokens stand in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EchoedPrompt {
    /// The text.
    pub(crate) text: String,
    /// For each token, the characters of all text before it.
    pub(crate) token_offsets: Vec<usize>,
}

/// What a prompt is prepared for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Preparation {
    /// The answer repeats the prompt.
    pub(crate) echo: bool,
    /// Tokens that must fit behind the prompt: 0 when nothing is to be generated, 1 otherwise.
    pub(crate) min_room: usize,
}

impl ServerState {
    /// Tokenises every prompt of a request.
    ///
    /// # Errors
    /// 400: too long, empty where there is no BOS, refused by the template.
    pub(crate) async fn prepare(
        self: &Arc<Self>,
        source: PromptSource,
        preparation: Preparation,
    ) -> Result<Vec<PreparedPrompt>, ApiError> {
        let param = source.param();
        let PromptSource::Ids(lists) = source else {
            return self.off_loop(move |model| prepare_texts(model, &source, preparation)).await;
        };
        if !preparation.echo {
            let model = self.model()?;
            return lists.into_iter().map(|ids| finish(model, ids, None, preparation, param)).collect();
        }
        self.off_loop(move |model| lists.into_iter().map(|ids| finish(model, ids, None, preparation, param)).collect())
            .await
    }

    /// The ids of a text or a conversation, whatever their number, for `/tokenize`.
    ///
    /// # Errors
    /// 400 as for [`ServerState::prepare`], but for the length.
    pub(crate) async fn tokenize(self: &Arc<Self>, source: PromptSource) -> Result<Vec<u32>, ApiError> {
        self.off_loop(move |model| match &source {
            PromptSource::Chat(conversation) => encode_conversation(model, conversation),
            PromptSource::Texts { texts, add_special_tokens } => {
                let text = texts.first().map_or("", String::as_str);
                encode_text(&model.served.tokenizer, text, *add_special_tokens)
            }
            PromptSource::Ids(lists) => Ok(lists.concat()),
        })
        .await
    }

    /// Runs `work` on a blocking thread once a permit is free.
    pub(crate) async fn off_loop<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&ReadyModel) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let _permit = self.tokenizing.acquire().await.map_err(|_| ApiError::draining())?;
        let state = Arc::clone(self);
        tokio::task::spawn_blocking(move || work(state.model()?))
            .await
            .unwrap_or_else(|_| Err(ApiError::internal("Tokenising the request failed.")))
    }
}

fn prepare_texts(
    model: &ReadyModel,
    source: &PromptSource,
    preparation: Preparation,
) -> Result<Vec<PreparedPrompt>, ApiError> {
    let param = source.param();
    match source {
        PromptSource::Chat(conversation) => {
            let bytes = conversation.messages.iter().map(|m| m.content.len()).sum();
            refuse_hopeless(model, bytes, param)?;
            let ids = encode_conversation(model, conversation)?;
            Ok(vec![finish(model, ids, None, preparation, param)?])
        }
        PromptSource::Texts { texts, add_special_tokens } => texts
            .iter()
            .map(|text| {
                refuse_hopeless(model, text.len(), param)?;
                let ids = encode_text(&model.served.tokenizer, text, *add_special_tokens)?;
                finish(model, ids, Some(text), preparation, param)
            })
            .collect(),
        PromptSource::Ids(_) => Err(ApiError::internal("Token ids need no tokenising.")),
    }
}

/// A text with more bytes than a full context of longest tokens cannot fit (D36).
fn refuse_hopeless(model: &ReadyModel, text_bytes: usize, param: &str) -> Result<(), ApiError> {
    let max_seq_len = model.served.facts.max_seq_len;
    if text_bytes > max_seq_len.saturating_add(1).saturating_mul(model.max_token_bytes) {
        return Err(ApiError::context_length(
            format!(
                "This model's maximum context length is {max_seq_len} tokens. Your prompt of {text_bytes} bytes \
                 exceeds it whatever its tokens are."
            ),
            param,
        ));
    }
    Ok(())
}

/// Checks the length; an empty prompt becomes the BOS where the model has one (D20).
fn finish(
    model: &ReadyModel,
    mut ids: Vec<u32>,
    text: Option<&str>,
    preparation: Preparation,
    param: &str,
) -> Result<PreparedPrompt, ApiError> {
    if ids.is_empty() {
        let bos = model.served.tokenizer.bos().ok_or_else(|| {
            ApiError::bad_field(param, "The prompt is empty, and this model has no token to begin a text with.")
        })?;
        ids.push(bos);
    }
    let max_seq_len = model.served.facts.max_seq_len;
    if ids.len().saturating_add(preparation.min_room) > max_seq_len {
        return Err(ApiError::context_length(
            format!(
                "This model's maximum context length is {max_seq_len} tokens. However, your prompt holds {} tokens, \
                 which leaves no room for an answer. Please shorten it.",
                ids.len()
            ),
            param,
        ));
    }
    let echo = preparation.echo.then(|| echoed(&model.served.tokenizer, &ids, text));
    Ok(PreparedPrompt { ids, echo })
}

/// The prompt's text: as sent, or decoded when ids were sent. Offsets come from decoding token by token.
fn echoed(tokenizer: &Arc<Tokenizer>, ids: &[u32], sent: Option<&str>) -> EchoedPrompt {
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), TextPosition::Start);
    if sent.is_none() {
        detokenizer = detokenizer.with_special_tokens();
    }
    let (mut decoded, mut num_chars) = (String::new(), 0);
    let mut token_offsets = Vec::with_capacity(ids.len());
    for &id in ids {
        token_offsets.push(num_chars);
        let piece = detokenizer.push(id);
        num_chars += piece.chars().count();
        decoded.push_str(&piece);
    }
    decoded.push_str(&detokenizer.flush());
    let text = sent.map_or(decoded, str::to_owned);
    // A vocabulary that normalises text may decode it a little longer than it was.
    let len = text.chars().count();
    token_offsets.iter_mut().for_each(|offset| *offset = (*offset).min(len));
    EchoedPrompt { text, token_offsets }
}

fn encode_text(tokenizer: &Tokenizer, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, ApiError> {
    let ids =
        if add_special_tokens { tokenizer.encode_completion(text) } else { tokenizer.encode(text, Special::Parse) };
    ids.map_err(|error| describe(&error, "prompt"))
}

fn encode_conversation(model: &ReadyModel, conversation: &Conversation) -> Result<Vec<u32>, ApiError> {
    let rendered = render(model, conversation)?;
    model.served.tokenizer.encode_prompt(&rendered).map_err(|error| describe(&error, "messages"))
}

fn render(model: &ReadyModel, conversation: &Conversation) -> Result<RenderedPrompt, ApiError> {
    let template = model.served.template.as_ref().ok_or_else(|| describe(&TextError::NoTemplate, "messages"))?;
    let messages: Vec<Value> = conversation.messages.iter().map(as_value).collect();
    let input = ChatInput {
        messages: &messages,
        tools: None,
        add_generation_prompt: conversation.add_generation_prompt,
        extra: Some(&conversation.template_kwargs),
        now: LocalTime::from_unix_seconds(unix_seconds()),
    };
    let mut rendered =
        template.render(&input, model.served.tokenizer.guard()).map_err(|error| describe(&error, "messages"))?;
    if conversation.continue_final_message {
        leave_open(&mut rendered, conversation)?;
    }
    Ok(rendered)
}

/// Cuts a rendered prompt behind the last message's content, so that the model goes on with it.
fn leave_open(rendered: &mut RenderedPrompt, conversation: &Conversation) -> Result<(), ApiError> {
    let content = conversation.messages.last().map_or("", |m| m.content.as_str());
    let end = [content, content.trim_end(), content.trim()]
        .iter()
        .filter(|c| !c.is_empty())
        .find_map(|c| rendered.text.rfind(c).map(|at| at + c.len()))
        .ok_or_else(|| {
            ApiError::bad_field(
                "continue_final_message",
                "The chat template changes the last message or drops it: it cannot be continued.",
            )
        })?;
    rendered.text.truncate(end);
    Ok(())
}

/// Now, for templates that tell the date.
fn unix_seconds() -> i64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX)
}

fn as_value(message: &ChatMessage) -> Value {
    let mut object = message.extra.clone();
    object.insert("role".to_owned(), message.role.into());
    object.insert("content".to_owned(), message.content.clone().into());
    Value::Object(object)
}

/// 400 with the text room's own words (D25), or 500 when the model's files are to blame.
fn describe(error: &TextError, param: &str) -> ApiError {
    if error.is_callers_fault() {
        ApiError::bad_field(param, error.to_string())
    } else {
        ApiError::internal(error.to_string())
    }
}
