//! `/v1/chat/completions` and `/v1/completions`: from a body to an answer, in the order a reader expects:
//! read, resolve, validate, tokenise, submit, answer.

use crate::answer::Answer;
use crate::body::{discard, read_json};
use crate::error::ApiError;
use crate::format::{AnswerFormat, AnswerMeta, ChatFormat, CompletionFormat};
use crate::generation::Generation;
use crate::prompt::Preparation;
use crate::state::{InFlightGuard, ServerState};
use crate::stream::EventStream;
use crate::validate::{Delivery, ValidRequest, validate_chat, validate_completion};
use crate::wire::chat::ChatRequest;
use crate::wire::completion::CompletionRequest;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use pagemill_text::Tokenizer;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::time::Instant;

/// `POST /v1/chat/completions`.
pub(crate) async fn chat(State(state): State<Arc<ServerState>>, request: Request) -> Result<Response, ApiError> {
    let call = Call::enter(state, request).await?;
    let (call, wire) = call.read::<ChatRequest>().await?;
    let model = call.state.model()?;
    let name = model.resolve(wire.model.as_deref())?.to_owned();
    let valid = validate_chat(wire, &model.served.facts, call.state.limits())?;
    call.answer(valid, &name, "chatcmpl-", ChatFormat::new).await
}

/// `POST /v1/completions`.
pub(crate) async fn completions(State(state): State<Arc<ServerState>>, request: Request) -> Result<Response, ApiError> {
    let call = Call::enter(state, request).await?;
    let (call, wire) = call.read::<CompletionRequest>().await?;
    let model = call.state.model()?;
    let name = model.resolve(wire.model.as_deref())?.to_owned();
    let valid = validate_completion(wire, &model.served.facts, call.state.limits())?;
    call.answer(valid, &name, "cmpl-", CompletionFormat::new).await
}

/// A request that was let in; `B` is what is left of its body.
struct Call<B> {
    state: Arc<ServerState>,
    in_flight: InFlightGuard,
    arrival: Instant,
    body: B,
}

impl Call<Request> {
    async fn enter(state: Arc<ServerState>, request: Request) -> Result<Self, ApiError> {
        match state.enter() {
            Ok(in_flight) => Ok(Self { state, in_flight, arrival: Instant::now(), body: request }),
            Err(error) => {
                discard(request);
                Err(error)
            }
        }
    }

    async fn read<T: DeserializeOwned + Send + 'static>(self) -> Result<(Call<()>, T), ApiError> {
        let Self { state, in_flight, arrival, body } = self;
        let wire = read_json(body, state.limits(), state.config.io_timeout).await?;
        Ok((Call { state, in_flight, arrival, body: () }, wire))
    }
}

impl Call<()> {
    async fn answer<F: AnswerFormat>(
        self,
        valid: ValidRequest,
        model_name: &str,
        id_prefix: &str,
        format: fn(AnswerMeta, Arc<Tokenizer>, usize) -> F,
    ) -> Result<Response, ApiError> {
        let Self { state, in_flight, arrival, .. } = self;
        let ValidRequest { prompt, options } = valid;
        let model = state.model()?;
        let preparation = Preparation { echo: options.echo, min_room: usize::from(options.max_tokens != Some(0)) };
        let prompts = state.prepare(prompt, preparation).await?;
        let generation = Generation::start(model, &prompts, &options, in_flight).await?;
        let mut answer = Answer::new(model, prompts, &options, arrival)?;
        let meta = AnswerMeta::new(id_prefix, model_name, &options);
        let format = format(meta, Arc::clone(&model.served.tokenizer), answer.num_choices());
        match options.delivery {
            Delivery::Whole => {
                let choices = answer.collect(generation).await?;
                let json = format
                    .whole(&answer, choices)
                    .map_err(|error| ApiError::internal(format!("The answer could not be written: {error}.")))?;
                Ok(json_response(json))
            }
            Delivery::Stream { include_usage } => {
                let keepalive = state.config.sse_keepalive;
                let events = EventStream::new(generation, answer, format, include_usage, keepalive);
                Ok(event_response(Body::from_stream(events)))
            }
        }
    }
}

/// A JSON answer.
pub(crate) fn json_response(json: String) -> Response {
    ([(CONTENT_TYPE, HeaderValue::from_static("application/json"))], json).into_response()
}

fn event_response(body: Body) -> Response {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Asks reverse proxies not to hold events back.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
