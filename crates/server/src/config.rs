//! What the server is told at start: address, keys, limits, timeouts. Validated by the CLI, immutable here.
//! Knows nothing of models; those come later, in a [`crate::ServedModel`].

use std::time::Duration;

/// Error texts are cut here, in bytes of UTF-8, so that a hostile request cannot be echoed at length.
pub const MAX_ERROR_BYTES: usize = 4096;

/// Settings of the HTTP server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Address or name to listen on: `127.0.0.1`, `::1`, `[::1]`, `localhost`.
    pub host: String,
    /// TCP port; 0 lets the system choose.
    pub port: u16,
    /// Accepted bearer keys; empty: no key is asked for. `/health`, `/version` and `/metrics` are always open.
    pub api_keys: Vec<String>,
    /// Origins that browsers may call from; `*` allows every origin, empty switches CORS headers off.
    pub cors_origins: Vec<String>,
    /// Bounds on what a request may hold.
    pub limits: Limits,
    /// How long running requests may go on after shutdown was asked for.
    pub drain_timeout: Duration,
    /// A `: keep-alive` comment goes out when a stream was silent for this long; `None`: never.
    pub sse_keepalive: Option<Duration>,
    /// `/health` says 503 when the engine has work and its step loop has not moved for this long.
    pub stall_timeout: Duration,
    /// A connection that sends no header, no body byte, or takes no byte of an answer for this long is closed.
    pub io_timeout: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 8000,
            api_keys: Vec::new(),
            cors_origins: Vec::new(),
            limits: Limits::default(),
            drain_timeout: Duration::from_secs(60),
            sse_keepalive: None,
            stall_timeout: Duration::from_secs(30),
            io_timeout: Duration::from_secs(60),
        }
    }
}

/// Bounds on one request. Whatever exceeds one is refused with 400 (413 and 431 for bytes).
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of a request body.
    pub body_bytes: usize,
    /// Bytes of request line and headers.
    pub header_bytes: usize,
    /// Nesting of JSON arrays and objects.
    pub json_depth: usize,
    /// `n`.
    pub choices: u32,
    /// Prompts × `n` of one call.
    pub total_choices: usize,
    /// Stop strings of one request.
    pub stop_strings: usize,
    /// Bytes of one stop string.
    pub stop_bytes: usize,
    /// `stop_token_ids` of one request.
    pub stop_token_ids: usize,
    /// Entries of `logit_bias`.
    pub logit_bias: usize,
    /// `top_logprobs` of chat requests.
    pub top_logprobs: u32,
    /// `logprobs` of completion requests.
    pub completion_logprobs: u32,
    /// Generation requests in flight at once, streams included; more are answered 429.
    pub concurrent_requests: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 32 << 20,
            header_bytes: 64 << 10,
            json_depth: 64,
            choices: 128,
            total_choices: 1024,
            stop_strings: 16,
            stop_bytes: 1024,
            stop_token_ids: 1024,
            logit_bias: 1024,
            top_logprobs: 20,
            completion_logprobs: 5,
            concurrent_requests: 4096,
        }
    }
}

/// Sampling values that hold when a request names none: the model's `generation_config.json`, or the
/// command line's. `None`: the OpenAI API's own default.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// In [0, 2].
    pub temperature: Option<f32>,
    /// At least 1.
    pub top_k: Option<u32>,
    /// In (0, 1].
    pub top_p: Option<f32>,
    /// In [0, 1].
    pub min_p: Option<f32>,
    /// Above 0.
    pub repetition_penalty: Option<f32>,
}
