//! What all requests share: configuration, the model once it is there, who is in flight, whether the server
//! drains. Knows no endpoint.

use crate::auth::ApiKeys;
use crate::error::ApiError;
use crate::metrics::{Metrics, ModelMetrics};
use crate::validate::ModelFacts;
use crate::{Limits, ServerConfig};
use pagemill_engine::EngineHandle;
use pagemill_text::{ChatTemplate, Tokenizer};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{Notify, Semaphore};

/// A model that answers requests.
pub struct ServedModel {
    /// Names it answers to; the first is shown. At least one.
    pub names: Vec<String>,
    /// The way into its engine.
    pub engine: EngineHandle,
    /// Its vocabulary.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template; without one, chat requests are refused.
    pub template: Option<ChatTemplate>,
    /// Limits and defaults.
    pub facts: ModelFacts,
}

/// A model and what is kept for it.
pub(crate) struct ReadyModel {
    pub(crate) served: ServedModel,
    pub(crate) metrics: ModelMetrics,
    /// Seconds since 1970 at which it became ready.
    pub(crate) created: u64,
    /// Bytes of the longest token: a text of more than `max_seq_len` times as many cannot fit.
    pub(crate) max_token_bytes: usize,
}

impl ReadyModel {
    /// The name shown in lists and used when a request names none.
    pub(crate) fn name(&self) -> &str {
        self.served.names.first().map_or("", String::as_str)
    }

    /// The name to answer with, if this is the model that a request means. Absent and empty mean this model.
    ///
    /// # Errors
    /// 404.
    pub(crate) fn resolve<'a>(&'a self, asked: Option<&'a str>) -> Result<&'a str, ApiError> {
        match asked {
            None | Some("") => Ok(self.name()),
            Some(name) if self.served.names.iter().any(|n| n == name) => Ok(name),
            Some(name) => Err(ApiError::model_not_found(crate::error::clip(name, 256))),
        }
    }
}

/// The server's state, shared by the program (which fills in the model) and [`crate::serve`].
pub struct ServerState {
    pub(crate) config: ServerConfig,
    pub(crate) keys: ApiKeys,
    pub(crate) metrics: Metrics,
    /// Texts tokenised at once; more wait their turn, off the event loop's back.
    pub(crate) tokenizing: Semaphore,
    model: Arc<OnceLock<ReadyModel>>,
    draining: AtomicBool,
    in_flight: Arc<InFlight>,
}

impl ServerState {
    /// A server without a model: `/health` says 503 until [`ServerState::set_model`].
    #[must_use]
    pub fn new(config: ServerConfig) -> Arc<Self> {
        let model = Arc::new(OnceLock::new());
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Arc::new(Self {
            keys: ApiKeys::new(&config.api_keys),
            metrics: Metrics::new(Arc::clone(&model)),
            tokenizing: Semaphore::new(threads.clamp(1, 8)),
            model,
            draining: AtomicBool::new(false),
            in_flight: Arc::new(InFlight { count: AtomicUsize::new(0), changed: Notify::new() }),
            config,
        })
    }

    /// Opens the server for requests. Costs one pass over the vocabulary.
    ///
    /// # Errors
    /// The model back, when there already is one.
    pub fn set_model(&self, served: ServedModel) -> Result<(), Box<ServedModel>> {
        let num_tokens = u32::try_from(served.tokenizer.vocab_size()).unwrap_or(u32::MAX);
        let max_token_bytes =
            (0..num_tokens).map(|id| served.tokenizer.token_bytes(id).len()).max().unwrap_or(1).max(1);
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
        let metrics = self.metrics.for_model(served.names.first().map_or("", String::as_str));
        let ready = ReadyModel { served, metrics, created, max_token_bytes };
        self.model.set(ready).map_err(|ready| Box::new(ready.served))
    }

    /// Bounds on requests.
    pub(crate) fn limits(&self) -> &Limits {
        &self.config.limits
    }

    /// The model.
    ///
    /// # Errors
    /// 503 while it loads.
    pub(crate) fn model(&self) -> Result<&ReadyModel, ApiError> {
        self.model.get().ok_or_else(|| ApiError::unavailable("The model is still loading.", "model_loading"))
    }

    /// Counts a generation request in, for as long as the guard lives.
    ///
    /// # Errors
    /// 503 while the server drains or loads, 429 when too many are in flight.
    pub(crate) fn enter(&self) -> Result<InFlightGuard, ApiError> {
        // Counted before the flag is read, so that a drain that saw zero lets nobody slip in behind it.
        let guard = InFlightGuard { in_flight: Arc::clone(&self.in_flight) };
        let others = self.in_flight.count.fetch_add(1, Ordering::SeqCst);
        self.model()?;
        if self.draining.load(Ordering::SeqCst) {
            return Err(ApiError::draining());
        }
        let limit = self.limits().concurrent_requests;
        if others >= limit {
            return Err(ApiError::too_many_requests(format!("{limit} requests are in flight. Try again later.")));
        }
        Ok(guard)
    }

    /// Whether requests can be served now.
    ///
    /// # Errors
    /// 503 saying why not.
    pub(crate) fn health(&self) -> Result<(), ApiError> {
        if self.draining.load(Ordering::SeqCst) {
            return Err(ApiError::unavailable("The server is shutting down.", "shutting_down"));
        }
        let status = self.model()?.served.engine.status();
        if let Some(reason) = status.stopped {
            return Err(ApiError::unavailable(format!("The engine has stopped: {reason}"), "engine_stopped"));
        }
        let stalled = Duration::from_micros(status.stalled_for_us);
        if stalled > self.config.stall_timeout {
            let message = format!("The engine has not moved for {} s.", stalled.as_secs());
            return Err(ApiError::unavailable(message, "engine_stalled"));
        }
        Ok(())
    }

    /// Refuses new requests from now on.
    pub(crate) fn begin_drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
        if let Some(model) = self.model.get() {
            model.served.engine.drain();
        }
    }

    /// Generation requests in flight.
    pub(crate) fn num_in_flight(&self) -> usize {
        self.in_flight.count.load(Ordering::SeqCst)
    }

    /// Waits until no generation request is in flight.
    pub(crate) async fn idle(&self) {
        loop {
            let changed = self.in_flight.changed.notified();
            tokio::pin!(changed);
            // Registered before the count is read: a change in between is not missed.
            changed.as_mut().enable();
            if self.num_in_flight() == 0 {
                return;
            }
            changed.await;
        }
    }
}

struct InFlight {
    count: AtomicUsize,
    changed: Notify,
}

/// One generation request in flight.
pub(crate) struct InFlightGuard {
    in_flight: Arc<InFlight>,
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        if self.in_flight.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.in_flight.changed.notify_waiters();
        }
    }
}
