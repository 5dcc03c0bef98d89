//! `/tokenize` and `/detokenize`: what the model sees of a text, and back. The engine is not asked.

use crate::body::{discard, read_json};
use crate::error::ApiError;
use crate::info::to_json;
use crate::state::ServerState;
use crate::validate::{PromptSource, token_ids, validate_conversation};
use crate::wire::tokens::{DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse};
use axum::extract::{Request, State};
use axum::response::Response;
use serde::de::DeserializeOwned;
use std::sync::Arc;

/// `POST /tokenize`.
pub(crate) async fn tokenize(State(state): State<Arc<ServerState>>, request: Request) -> Result<Response, ApiError> {
    let wire: TokenizeRequest = read(&state, request).await?;
    let model = state.model()?;
    model.resolve(wire.model.as_deref())?;
    let source = match (wire.prompt, wire.messages) {
        (Some(text), None) => {
            for (name, is_set) in [
                ("add_generation_prompt", wire.add_generation_prompt.is_some()),
                ("continue_final_message", wire.continue_final_message.is_some()),
                ("chat_template_kwargs", wire.chat_template_kwargs.is_some()),
            ] {
                if is_set {
                    return Err(ApiError::bad_field(name, format!("'{name}' is only allowed with 'messages'.")));
                }
            }
            PromptSource::Texts { texts: vec![text], add_special_tokens: wire.add_special_tokens.unwrap_or(true) }
        }
        (None, Some(messages)) => {
            if wire.add_special_tokens == Some(true) {
                return Err(ApiError::bad_field(
                    "add_special_tokens",
                    "'add_special_tokens' is only allowed with 'prompt': a chat template writes its own.",
                ));
            }
            PromptSource::Chat(validate_conversation(
                messages,
                wire.add_generation_prompt,
                wire.continue_final_message,
                wire.chat_template_kwargs,
            )?)
        }
        _ => {
            return Err(ApiError::bad_field("prompt", "Exactly one of 'prompt' and 'messages' is required."));
        }
    };
    let tokens = state.tokenize(source).await?;
    let token_strs = wire
        .return_token_strs
        .unwrap_or(false)
        .then(|| tokens.iter().map(|&id| token_string(&state, id)).collect::<Result<_, _>>())
        .transpose()?;
    to_json(&TokenizeResponse {
        count: tokens.len(),
        max_model_len: model.served.facts.max_seq_len,
        tokens,
        token_strs,
    })
}

/// `POST /detokenize`.
pub(crate) async fn detokenize(State(state): State<Arc<ServerState>>, request: Request) -> Result<Response, ApiError> {
    let wire: DetokenizeRequest = read(&state, request).await?;
    let model = state.model()?;
    model.resolve(wire.model.as_deref())?;
    let ids = token_ids(&wire.tokens, model.served.facts.vocab_size, "tokens")?;
    let skip_special = wire.skip_special_tokens.unwrap_or(false);
    let prompt = state.off_loop(move |model| Ok(model.served.tokenizer.decode(&ids, skip_special))).await?;
    to_json(&DetokenizeResponse { prompt })
}

async fn read<T: DeserializeOwned + Send + 'static>(state: &ServerState, request: Request) -> Result<T, ApiError> {
    if let Err(error) = state.model() {
        discard(request);
        return Err(error);
    }
    read_json(request, state.limits(), state.config.io_timeout).await
}

fn token_string(state: &ServerState, id: u32) -> Result<String, ApiError> {
    Ok(String::from_utf8_lossy(state.model()?.served.tokenizer.token_bytes(id)).into_owned())
}
