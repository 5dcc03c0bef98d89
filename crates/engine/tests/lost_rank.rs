//! A rank that fails or panics in the middle of a step: every request ends with an error, the engine says
//! that it has stopped and why, and nothing hangs.
#![allow(clippy::unwrap_used)]

use pagemill_backend::{BackendError, Collective, CpuBackend, CpuConfig, SharedCollective, Tensor};
use pagemill_engine::{
    ChannelSink, EngineConfig, EngineHandle, EventReceiver, ParallelMode, RankContext, Request, SamplingParams,
    SubmitError, build_engine_on,
};
use pagemill_formats::Checkpoint;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

const MODE: ParallelMode = ParallelMode { tensor_parallel: 2, pipeline_parallel: 2 };
const LIMIT: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug)]
enum Loss {
    Error,
    Panic,
}

/// Ranks that work until `calls_left` of one of them is used up.
struct Mortal {
    inner: SharedCollective,
    calls_left: Arc<AtomicI64>,
    loss: Loss,
}

impl Mortal {
    fn live(&self) -> Result<(), BackendError> {
        if self.calls_left.fetch_sub(1, Ordering::SeqCst) > 0 {
            return Ok(());
        }
        match self.loss {
            Loss::Panic => panic!("the test ends this rank"),
            Loss::Error => {
                Err(BackendError::Device { device: "test".into(), detail: "the test ends this rank".into() })
            }
        }
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
        self.live()?;
        self.inner.all_reduce(x)
    }
    fn all_gather_cols(&self, x: &Tensor, out: &mut Tensor) -> Result<(), BackendError> {
        self.live()?;
        self.inner.all_gather_cols(x, out)
    }
    fn send(&self, x: &Tensor, peer: usize) -> Result<(), BackendError> {
        self.live()?;
        self.inner.send(x, peer)
    }
    fn recv(&self, out: &mut Tensor, peer: usize) -> Result<(), BackendError> {
        self.live()?;
        self.inner.recv(out, peer)
    }
    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
}

/// Four ranks; rank `mortal` is lost once its counter, which is given back, runs out.
fn ranks(mortal: usize, loss: Loss) -> (Vec<RankContext>, Arc<AtomicI64>) {
    let counter = Arc::new(AtomicI64::new(i64::MAX));
    let world = SharedCollective::world(MODE.tensor_parallel, MODE.pipeline_parallel);
    let contexts = world.into_iter().enumerate().map(|(at, inner)| {
        let calls_left = if at == mortal { Arc::clone(&counter) } else { Arc::new(AtomicI64::new(i64::MAX)) };
        let cpu = CpuConfig { num_threads: Some(1), ..CpuConfig::default() };
        RankContext {
            backend: Arc::new(CpuBackend::new(cpu).unwrap()),
            collective: Arc::new(Mortal { inner, calls_left, loss }),
        }
    });
    (contexts.collect(), counter)
}

fn checkpoint() -> Checkpoint {
    Checkpoint::open(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../testkit/zoo/llama")).unwrap()
}

fn config() -> EngineConfig {
    EngineConfig { parallel: MODE, kv_cache_bytes: Some(32 << 20), micro_batches: Some(4), ..EngineConfig::default() }
}

fn endless() -> (Request, EventReceiver) {
    let (sink, events) = ChannelSink::new(8192);
    let request = Request {
        prompt: vec![1, 2, 3],
        max_tokens: 4000,
        n: 1,
        sampling: SamplingParams::default(),
        priority: 0,
        cache_salt: None,
        sink: Box::new(sink),
    };
    (request, events)
}

#[test]
fn every_request_ends_and_the_engine_says_why() {
    for mortal in 0..MODE.num_ranks() {
        for loss in [Loss::Error, Loss::Panic] {
            let (contexts, counter) = ranks(mortal, loss);
            let built = build_engine_on(&checkpoint(), contexts, &config(), &|_| {}).unwrap();
            let handle = EngineHandle::spawn(built.engine);
            let ears: Vec<EventReceiver> = (0..6)
                .map(|_| {
                    let (request, events) = endless();
                    handle.submit(request).unwrap();
                    events
                })
                .collect();
            while handle.status().scheduler.generated_tokens < 30 {
                std::thread::yield_now();
            }
            counter.store(3, Ordering::SeqCst);
            let lost_at = Instant::now();
            for events in ears {
                let error = events.gather(1).unwrap_err();
                assert!(error.contains("the test ends this rank"), "{error}");
            }
            let status = handle.status();
            assert!(lost_at.elapsed() < LIMIT, "rank {mortal}, {loss:?}: took {:?}", lost_at.elapsed());
            let why = status.stopped.expect("the engine has stopped");
            let name = format!("stage {}, rank {}: ", mortal / 2, mortal % 2);
            assert!(why.contains(&name), "{why}");
            assert!(matches!(handle.submit(endless().0), Err(SubmitError::Stopped(_))));
            handle.shutdown();
            assert!(lost_at.elapsed() < LIMIT);
        }
    }
}

#[test]
fn a_rank_that_cannot_start_keeps_the_engine_from_starting() {
    for mortal in 0..MODE.num_ranks() {
        for loss in [Loss::Error, Loss::Panic] {
            let started = Instant::now();
            let (contexts, counter) = ranks(mortal, loss);
            // In the middle of the rehearsal.
            counter.store(4, Ordering::SeqCst);
            let error = build_engine_on(&checkpoint(), contexts, &config(), &|_| {}).err().unwrap().to_string();
            assert!(error.contains("the test ends this rank"), "{error}");
            assert!(started.elapsed() < LIMIT);
        }
    }
}

#[test]
fn an_engine_that_is_dropped_in_mid_pipeline_ends() {
    let (contexts, _) = ranks(0, Loss::Error);
    let built = build_engine_on(&checkpoint(), contexts, &config(), &|_| {}).unwrap();
    let handle = EngineHandle::spawn(built.engine);
    let (request, events) = endless();
    handle.submit(request).unwrap();
    while handle.status().scheduler.generated_tokens < 10 {
        std::thread::yield_now();
    }
    let stopped_at = Instant::now();
    handle.shutdown();
    assert!(events.gather(1).is_err());
    assert!(stopped_at.elapsed() < LIMIT);
}
