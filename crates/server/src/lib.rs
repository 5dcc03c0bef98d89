//! Server: the OpenAI HTTP API. The only room that knows tokio, axum and wire JSON; it never sees a tensor.
//!
//! A request goes `routes` → `generate` → `body` (bytes to JSON) → `wire` (JSON to structs) → `validate` →
//! `prompt` (template and tokens, off the event loop) → `generation` (the engine's queue and its events) →
//! `answer` and `choice` (events to text) → `format` (text to JSON) → `stream`, or one JSON body.
//!
//! The program binds the port first ([`bind`]), starts [`serve`], loads the model meanwhile and hands it over
//! with [`ServerState::set_model`]. Until then `/health` and every route that needs a model say 503.

#![forbid(unsafe_code)]

mod answer;
mod assets;
mod auth;
mod body;
mod choice;
mod config;
mod error;
mod format;
mod generate;
mod generation;
mod info;
mod listener;
mod metrics;
mod openapi;
mod prompt;
mod routes;
mod runtime;
mod serve;
mod state;
mod stream;
mod tokens;
mod validate;
mod wire;

pub use assets::{AssetsError, TextAssets};
pub use config::{Limits, MAX_ERROR_BYTES, SamplingDefaults, ServerConfig};
pub use listener::{BindError, BoundListener, bind};
pub use runtime::{RunningServer, RuntimeError, spawn};
pub use serve::{Drained, ServeError, serve};
pub use state::{ServedModel, ServerState};
pub use validate::ModelFacts;
