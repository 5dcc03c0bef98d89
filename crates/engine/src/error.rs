//! Errors, in three classes: the caller's fault, out of capacity, ours.

use pagemill_scheduler::Refusal;

/// Why a request was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The scheduler's answer: the caller's fault, or a full queue (see [`Refusal`]).
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The engine is draining: no new requests.
    #[error("the server is shutting down")]
    Draining,
    /// The engine stopped.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
}

/// What stops an engine or keeps it from starting.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the fields are what the variant names
pub enum EngineError {
    /// A configuration that cannot work; names the key.
    #[error("{key}: {detail}")]
    Config {
        /// As it is spelled in the configuration.
        key: &'static str,
        /// What is wrong with its value.
        detail: String,
    },
    /// The model could not be loaded or run.
    #[error(transparent)]
    Model(#[from] pagemill_model::ModelError),
    /// The device failed.
    #[error(transparent)]
    Backend(#[from] pagemill_backend::BackendError),
    /// Not enough memory for even one sequence.
    #[error("not enough memory: {0}")]
    Memory(String),
    /// A broken invariant or a lost thread: the engine stops.
    #[error("engine: {0}")]
    Internal(String),
}
