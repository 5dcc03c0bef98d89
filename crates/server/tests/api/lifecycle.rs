//! Coming up, going down, and clients that go away.

use crate::support::{Client, Setup, TestServer, wait_until};
use pagemill_backend::{BackendError, Collective, CpuBackend, CpuConfig, SharedCollective, Tensor};
use pagemill_engine::{ParallelMode, RankContext};
use pagemill_server::ServerConfig;
use serde_json::{Value, json};
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

const TEXT: &str = "/v1/completions";
const JSON: (&str, &str) = ("content-type", "application/json");

fn long_answer(stream: bool) -> String {
    json!({"prompt": "Once", "max_tokens": 4000, "ignore_eos": true, "stream": stream}).to_string()
}

fn is_running(server: &TestServer, count: usize) -> bool {
    server.engine.as_ref().unwrap().status().scheduler.num_running == count
}

#[test]
fn d64_health_tells_the_truth() {
    let mut server = TestServer::without_model(ServerConfig { port: 0, ..ServerConfig::default() });
    let loading = server.client().get("/health");
    assert_eq!((loading.status, &loading.json()["error"]["code"]), (503, &json!("model_loading")));
    for path in ["/v1/models", "/v1/models/zoo"] {
        assert_eq!(server.client().get(path).status, 503);
    }
    for path in ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"] {
        assert_eq!(server.post(path, &json!({"prompt": "a"})).0, 503);
    }
    assert_eq!(server.client().get("/version").status, 200);
    server.load(&Setup::long());
    assert_eq!(server.client().get("/health").status, 200);
    // The engine stops under a running stream: the client hears of it, health says so, nothing hangs.
    let mut client = server.client();
    client.send("POST", TEXT, &[JSON], long_answer(true).as_bytes());
    wait_until(Duration::from_secs(5), "the stream to run", || is_running(&server, 1));
    server.engine.as_ref().unwrap().shutdown();
    let text = client.reply().text();
    let last = text.trim_end().rsplit("\n\n").next().unwrap();
    let error: Value = serde_json::from_str(last.strip_prefix("data: ").unwrap()).unwrap();
    assert!(error["error"]["message"].is_string(), "{error}");
    let health = server.client().get("/health");
    assert_eq!((health.status, &health.json()["error"]["code"]), (503, &json!("engine_stopped")));
    assert_eq!(server.post(TEXT, &json!({"prompt": "a"})).0, 503);
}

#[test]
fn d37_a_client_that_goes_away_frees_its_blocks() {
    let server = TestServer::with(Setup::long());
    for stream in [false, true] {
        for _ in 0..5 {
            let mut client = server.client();
            client.send("POST", TEXT, &[JSON], long_answer(stream).as_bytes());
            wait_until(Duration::from_secs(5), "the request to run", || is_running(&server, 1));
            drop(client);
            server.wait_idle(Duration::from_secs(1));
        }
    }
}

#[test]
fn d37_a_waiting_request_goes_with_its_client() {
    let mut setup = Setup::long();
    setup.engine.max_batch_size = Some(1);
    let server = TestServer::with(setup);
    let mut running = server.client();
    running.send("POST", TEXT, &[JSON], long_answer(true).as_bytes());
    wait_until(Duration::from_secs(5), "the first to run", || is_running(&server, 1));
    let mut waiting = server.client();
    waiting.send("POST", TEXT, &[JSON], long_answer(false).as_bytes());
    let num_waiting = || server.engine.as_ref().unwrap().status().scheduler.num_waiting;
    wait_until(Duration::from_secs(5), "the second to wait", || num_waiting() == 1);
    drop(waiting);
    wait_until(Duration::from_secs(1), "the second to go", || num_waiting() == 0);
    assert!(is_running(&server, 1));
}

#[test]
fn d38_a_client_that_does_not_read_loses_its_request_and_nobody_else_does() {
    let server = TestServer::with(Setup::long());
    let golden = json!({"prompt": "Once", "max_tokens": 8, "temperature": 0});
    let before = server.ok(TEXT, &golden)["choices"].clone();
    // Log-probabilities make the events so large that no socket buffer holds them all.
    let request = json!({"prompt": "Once", "max_tokens": 4000, "ignore_eos": true, "stream": true, "logprobs": 5, "n": 8,
        "seed": 1});
    let mut client = server.client();
    client.send("POST", TEXT, &[JSON], request.to_string().as_bytes());
    let aborted = || server.engine.as_ref().unwrap().status().aborted;
    wait_until(Duration::from_secs(60), "the engine to give the request up", || aborted() > 0);
    assert_eq!(server.ok(TEXT, &golden)["choices"], before);
    server.wait_idle(Duration::from_secs(5));
}

#[test]
fn d65_running_answers_finish_and_new_ones_are_refused() {
    let mut server = TestServer::with(Setup::long());
    let request = json!({"prompt": "Once", "max_tokens": 600, "ignore_eos": true, "stream": true}).to_string();
    let mut streams: Vec<_> = (0..6).map(|_| server.client()).collect();
    for client in &mut streams {
        client.send("POST", TEXT, &[JSON], request.as_bytes());
    }
    let mut idle = server.client();
    assert_eq!(idle.get("/health").status, 200);
    wait_until(Duration::from_secs(10), "all to run", || is_running(&server, 6));
    server.begin_shutdown();
    wait_until(Duration::from_secs(2), "the port to close", || std::net::TcpStream::connect(server.address).is_err());
    let refused = idle.post(TEXT, &json!({"prompt": "a"}));
    assert_eq!((refused.status, refused.header("connection")), (503, Some("close")));
    for mut client in streams {
        let reply = client.reply();
        let text = reply.text();
        assert!(text.ends_with("data: [DONE]\n\n"), "{}", &text[text.len().saturating_sub(300)..]);
        assert!(text.contains("\"finish_reason\":\"length\""));
    }
    assert_eq!(server.stop().aborted, 0);
}

#[test]
fn d65_draining_ends_when_its_time_is_over() {
    let mut setup = Setup::long();
    setup.server.drain_timeout = Duration::from_millis(100);
    let server = TestServer::with(setup);
    let engine = server.engine.clone().unwrap();
    let mut client = server.client();
    client.send("POST", TEXT, &[JSON], long_answer(true).as_bytes());
    wait_until(Duration::from_secs(5), "the stream to run", || is_running(&server, 1));
    let start = Instant::now();
    assert_eq!(server.stop().aborted, 1);
    assert!(start.elapsed() < Duration::from_secs(5));
    wait_until(Duration::from_secs(1), "the blocks to come back", || {
        let status = engine.status();
        status.stopped.is_some() || status.kv_cache.num_owned == 0
    });
}

#[test]
fn d66_gauges_follow_the_truth() {
    let mut setup = Setup::long();
    setup.engine.max_batch_size = Some(1);
    let server = TestServer::with(setup);
    let mut clients: Vec<_> = (0..10).map(|_| server.client()).collect();
    for client in &mut clients {
        client.send("POST", TEXT, &[JSON], long_answer(false).as_bytes());
    }
    let gauge = |name: &str| {
        let text = server.client().get("/metrics").text();
        let line =
            text.lines().find(|l| l.starts_with(&format!("{name}{{"))).unwrap_or_else(|| panic!("{name} in {text}"));
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    for prefix in ["vllm:", "pagemill_"] {
        wait_until(Duration::from_secs(5), "one to run and nine to wait", || {
            (gauge(&format!("{prefix}num_requests_running")), gauge(&format!("{prefix}num_requests_waiting")))
                == (1.0, 9.0)
        });
    }
    assert!(gauge("vllm:kv_cache_usage_perc") > 0.0);
    drop(clients);
    wait_until(Duration::from_secs(5), "both to be 0", || {
        (gauge("vllm:num_requests_running"), gauge("vllm:num_requests_waiting")) == (0.0, 0.0)
    });
    server.ok(TEXT, &json!({"prompt": "a", "max_tokens": 3, "ignore_eos": true}));
    assert!(gauge("vllm:generation_tokens_total") >= 3.0);
    assert!(gauge("vllm:time_to_first_token_seconds_count") >= 1.0);
    assert!(gauge("vllm:e2e_request_latency_seconds_count") >= 1.0);
    assert!(gauge("vllm:prefix_cache_queries_total") >= 1.0);
}

#[test]
fn d63_health_is_quick_behind_a_thousand_open_streams() {
    let mut setup = Setup::long();
    setup.engine.max_waiting = 2000;
    let server = TestServer::with(setup);
    let mut clients = Vec::new();
    for _ in 0..1000 {
        let Ok(socket) = std::net::TcpStream::connect(server.address) else {
            println!("skipped: this process may not open 1,000 sockets");
            return;
        };
        let mut client = Client::on(socket);
        client.send("POST", TEXT, &[JSON], long_answer(true).as_bytes());
        clients.push(client);
    }
    let mut times: Vec<Duration> = (0..50)
        .map(|_| {
            let start = Instant::now();
            assert_eq!(server.client().get("/health").status, 200);
            std::thread::sleep(Duration::from_millis(10));
            start.elapsed() - Duration::from_millis(10)
        })
        .collect();
    times.sort();
    assert!(times[48] < Duration::from_millis(100), "{times:?}");
    drop(clients);
    server.wait_idle(Duration::from_secs(20));
}

#[test]
fn a_stream_survives_a_pause_in_reading() {
    let server = TestServer::with(Setup::long());
    let request = json!({"prompt": "Once", "max_tokens": 300, "ignore_eos": true, "stream": true});
    let mut client = server.client();
    client.send("POST", TEXT, &[JSON], request.to_string().as_bytes());
    let mut first = [0; 64];
    client.socket.read_exact(&mut first).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let mut rest = Vec::new();
    let mut block = [0; 4096];
    while !rest.ends_with(b"\r\n0\r\n\r\n") {
        let count = client.socket.read(&mut block).unwrap();
        rest.extend_from_slice(&block[..count]);
    }
    assert!(String::from_utf8(rest).unwrap().contains("data: [DONE]"));
}

/// Ranks of which one fails once its counter runs out.
struct Mortal {
    inner: SharedCollective,
    calls_left: Arc<AtomicI64>,
}

impl Mortal {
    fn live(&self) -> Result<(), BackendError> {
        let is_alive = self.calls_left.fetch_sub(1, Ordering::SeqCst) > 0;
        let lost = || BackendError::Device { device: "test".into(), detail: "the test ends this rank".into() };
        is_alive.then_some(()).ok_or_else(lost)
    }
}

impl Collective for Mortal {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn world_size(&self) -> usize {
        self.inner.world_size()
    }
    fn all_reduce(&self, x: &mut Tensor) -> Result<(), BackendError> {
        self.live().and_then(|()| self.inner.all_reduce(x))
    }
    fn all_gather_cols(&self, x: &Tensor, out: &mut Tensor) -> Result<(), BackendError> {
        self.live().and_then(|()| self.inner.all_gather_cols(x, out))
    }
    fn send(&self, x: &Tensor, peer: usize) -> Result<(), BackendError> {
        self.live().and_then(|()| self.inner.send(x, peer))
    }
    fn recv(&self, out: &mut Tensor, peer: usize) -> Result<(), BackendError> {
        self.live().and_then(|()| self.inner.recv(out, peer))
    }
    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
}

#[test]
fn a_lost_rank_ends_every_request_and_shows_in_health() {
    let mut setup = Setup::long();
    let parallel = ParallelMode { tensor_parallel: 2, pipeline_parallel: 2 };
    setup.engine.parallel = parallel;
    setup.engine.micro_batches = Some(3);
    let calls_left = Arc::new(AtomicI64::new(i64::MAX));
    let world = SharedCollective::world(parallel.tensor_parallel, parallel.pipeline_parallel);
    let ranks = world.into_iter().enumerate().map(|(at, inner)| {
        let backend = CpuBackend::new(CpuConfig { num_threads: Some(1), ..CpuConfig::default() }).unwrap();
        let calls_left = if at == 1 { Arc::clone(&calls_left) } else { Arc::new(AtomicI64::new(i64::MAX)) };
        RankContext { backend: Arc::new(backend), collective: Arc::new(Mortal { inner, calls_left }) }
    });
    let mut server = TestServer::without_model(setup.server.clone());
    server.load_on(&setup, ranks.collect());
    let metrics = server.client().get("/metrics").text();
    for line in [
        r#"pagemill_ranks{model_name="zoo"} 4"#,
        r#"pagemill_micro_batches{model_name="zoo"} 3"#,
        r#"pagemill_stage_idle_share{model_name="zoo",stage="1"} "#,
        r#"pagemill_stage_busy_microseconds_total{model_name="zoo",stage="0"} "#,
    ] {
        assert!(metrics.contains(line), "{line}\nin\n{metrics}");
    }
    let mut clients: Vec<_> = [true, false, true].into_iter().map(|stream| (stream, server.client())).collect();
    for (stream, client) in &mut clients {
        client.send("POST", TEXT, &[JSON], long_answer(*stream).as_bytes());
    }
    wait_until(Duration::from_secs(10), "all to run", || is_running(&server, 3));
    calls_left.store(2, Ordering::SeqCst);
    let lost_at = Instant::now();
    for (stream, mut client) in clients {
        let reply = client.reply();
        let text = reply.text();
        let error: Value = if stream {
            let last = text.trim_end().rsplit("\n\n").next().unwrap();
            serde_json::from_str(last.strip_prefix("data: ").unwrap()).unwrap()
        } else {
            assert_eq!(reply.status, 503, "{text}");
            reply.json()
        };
        assert_eq!(error["error"]["code"], "engine_stopped", "{error}");
    }
    assert!(lost_at.elapsed() < Duration::from_secs(5), "took {:?}", lost_at.elapsed());
    let health = server.client().get("/health");
    assert_eq!((health.status, &health.json()["error"]["code"]), (503, &json!("engine_stopped")));
    let (status, refused) = server.post(TEXT, &json!({"prompt": "a"}));
    assert_eq!(status, 503, "{refused}");
    let stopped = server.engine.as_ref().unwrap().status().stopped.unwrap();
    assert!(stopped.contains("stage 0, rank 1") && stopped.contains("the test ends this rank"), "{stopped}");
}
