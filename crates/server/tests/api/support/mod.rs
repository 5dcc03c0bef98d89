//! Starts a server on a free port with a zoo model behind it, and stops it again.

mod client;

pub use client::{Client, sse_events};

use pagemill_backend::{CpuBackend, CpuConfig, SoloCollective};
use pagemill_engine::{EngineConfig, EngineHandle, RankContext, build_engine_on};
use pagemill_formats::Checkpoint;
use pagemill_server::{Drained, ModelFacts, ServedModel, ServerConfig, ServerState, TextAssets, bind, serve};
use serde_json::Value;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// The name under which tests serve their model.
pub const MODEL: &str = "zoo";

/// What a test changes about its server.
pub struct Setup {
    pub zoo: &'static str,
    pub server: ServerConfig,
    pub engine: EngineConfig,
    /// Changes what the files say about text.
    pub customize: fn(&mut TextAssets),
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            zoo: "llama",
            customize: |_| {},
            server: ServerConfig { port: 0, drain_timeout: Duration::from_secs(20), ..ServerConfig::default() },
            engine: EngineConfig {
                max_seq_len: Some(512),
                kv_cache_bytes: Some(24 << 20),
                max_batch_size: Some(32),
                max_batch_tokens: Some(256),
                prefill_chunk_size: 64,
                check_every_step: true,
                ..EngineConfig::default()
            },
        }
    }
}

impl Setup {
    /// With a context long enough for answers that take seconds.
    pub fn long() -> Self {
        let mut setup = Self::default();
        setup.engine.max_seq_len = Some(4096);
        setup.engine.kv_cache_bytes = Some(64 << 20);
        setup
    }
}

/// A running server; dropping it shuts it down and checks that it came to an end.
pub struct TestServer {
    pub address: SocketAddr,
    pub state: Arc<ServerState>,
    /// `None` while no model is loaded.
    pub engine: Option<EngineHandle>,
    shutdown: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Drained>>,
}

impl TestServer {
    /// With the default setup.
    pub fn start() -> Self {
        Self::with(Setup::default())
    }

    /// With a model.
    pub fn with(setup: Setup) -> Self {
        let mut server = Self::without_model(setup.server.clone());
        server.load(&setup);
        server
    }

    /// Without one, as while it loads.
    pub fn without_model(config: ServerConfig) -> Self {
        let listener = bind(&config).unwrap();
        let address = listener.local_addr();
        let state = ServerState::new(config);
        let (shutdown, asked) = oneshot::channel::<()>();
        let serving = Arc::clone(&state);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            let drained = runtime.block_on(serve(listener, serving, async {
                let _ = asked.await;
            }));
            drained.unwrap()
        });
        Self { address, state, engine: None, shutdown: Some(shutdown), thread: Some(thread) }
    }

    /// Loads the model and opens the server.
    pub fn load(&mut self, setup: &Setup) {
        let backend = Arc::new(CpuBackend::new(CpuConfig { num_threads: Some(1), ..CpuConfig::default() }).unwrap());
        self.load_on(setup, vec![RankContext { backend, collective: Arc::new(SoloCollective) }]);
    }

    /// The same over ranks of the caller's.
    pub fn load_on(&mut self, setup: &Setup, ranks: Vec<RankContext>) {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../testkit/zoo").join(setup.zoo);
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let mut assets = TextAssets::from_checkpoint(&checkpoint).unwrap();
        (setup.customize)(&mut assets);
        let built = build_engine_on(&checkpoint, ranks, &setup.engine, &|_| {}).unwrap();
        let facts = ModelFacts {
            vocab_size: built.spec.vocab_size,
            max_seq_len: built.plan.max_seq_len,
            eos_token_ids: assets.eos_token_ids,
            defaults: assets.defaults,
        };
        let engine = EngineHandle::spawn(built.engine);
        self.engine = Some(engine.clone());
        let served = ServedModel {
            names: vec![MODEL.to_owned(), "zoo/alias".to_owned()],
            engine,
            tokenizer: assets.tokenizer,
            template: assets.template,
            facts,
        };
        assert!(self.state.set_model(served).is_ok());
    }

    /// A client of this server.
    pub fn client(&self) -> Client {
        Client::new(self.address)
    }

    /// Posts JSON; the answer's status and JSON.
    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let reply = self.client().post(path, body);
        (reply.status, reply.json())
    }

    /// Posts JSON and expects success.
    pub fn ok(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.post(path, body);
        assert_eq!(status, 200, "{body} gave {answer}");
        answer
    }

    /// Posts JSON and expects an error object; its status, `param` and message.
    pub fn refused(&self, path: &str, body: &Value) -> (u16, String, String) {
        let reply = self.client().post(path, body);
        assert_eq!(reply.header("content-type"), Some("application/json"));
        let answer = reply.json();
        let error = answer["error"].as_object().unwrap_or_else(|| panic!("{body} gave {answer}"));
        assert!(error.contains_key("param") && error.contains_key("code") && error["type"].is_string());
        let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
        (reply.status, text("param"), text("message"))
    }

    /// Waits until nothing runs or waits and every block is free or cached.
    pub fn wait_idle(&self, limit: Duration) {
        let engine = self.engine.as_ref().unwrap();
        wait_until(limit, "the engine to come to rest", || {
            let status = engine.status();
            engine.is_idle()
                && status.scheduler.num_running == 0
                && status.scheduler.num_waiting == 0
                && status.kv_cache.num_owned == 0
        });
        assert_eq!(engine.status().stopped, None);
    }

    /// Asks for shutdown without waiting.
    pub fn begin_shutdown(&mut self) {
        if let Some(shutdown) = self.shutdown.take() {
            let _ = shutdown.send(());
        }
    }

    /// Shuts down and waits for the end.
    pub fn stop(mut self) -> Drained {
        self.begin_shutdown();
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.begin_shutdown();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !std::thread::panicking()
        {
            panic!("the server's thread panicked");
        }
        if let Some(engine) = self.engine.take() {
            engine.shutdown();
        }
    }
}

/// Waits for a condition.
pub fn wait_until(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < limit, "waited {limit:?} for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
