//! What the server tells about itself: models, health, metrics, version, its own description.

use crate::error::ApiError;
use crate::generate::json_response;
use crate::metrics::CONTENT_TYPE as METRICS_TYPE;
use crate::openapi::DOCUMENT;
use crate::state::{ReadyModel, ServerState};
use crate::wire::{ModelCard, ModelList};
use axum::extract::{Path, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use std::sync::Arc;

/// `GET /v1/models`.
pub(crate) async fn models(State(state): State<Arc<ServerState>>) -> Result<Response, ApiError> {
    let model = state.model()?;
    let data = model.served.names.iter().map(|name| card(model, name)).collect();
    to_json(&ModelList { object: "list", data })
}

/// `GET /v1/models/{id}`.
pub(crate) async fn model(State(state): State<Arc<ServerState>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let model = state.model()?;
    to_json(&card(model, model.resolve(Some(&id))?))
}

/// `GET /health`. Reads shared state only: it answers however busy the engine and the queues are (D63).
pub(crate) async fn health(State(state): State<Arc<ServerState>>) -> Result<Response, ApiError> {
    state.health()?;
    Ok(json_response(r#"{"status":"ok"}"#.to_owned()))
}

/// `GET /metrics`.
pub(crate) async fn metrics(State(state): State<Arc<ServerState>>) -> Result<Response, ApiError> {
    let text = state.metrics.render().map_err(|_| ApiError::internal("The metrics could not be written."))?;
    Ok(([(CONTENT_TYPE, METRICS_TYPE)], text).into_response())
}

/// `GET /version`.
pub(crate) async fn version() -> Response {
    json_response(format!(r#"{{"version":"{}"}}"#, env!("CARGO_PKG_VERSION")))
}

/// `GET /openapi.json`.
pub(crate) async fn openapi() -> Response {
    json_response(DOCUMENT.to_owned())
}

fn card(model: &ReadyModel, name: &str) -> ModelCard {
    ModelCard {
        id: name.to_owned(),
        object: "model",
        created: model.created,
        owned_by: "pagemill",
        max_model_len: model.served.facts.max_seq_len,
    }
}

/// Any answer as JSON.
///
/// # Errors
/// 500 when it does not serialise.
pub(crate) fn to_json(value: &impl Serialize) -> Result<Response, ApiError> {
    serde_json::to_string(value)
        .map(json_response)
        .map_err(|error| ApiError::internal(format!("The answer could not be written: {error}.")))
}
