//! Plans, outputs and ends over real connections, with ranks on threads and their tensors in shared memory: all
//! but MPI itself, so it runs everywhere.
#![allow(clippy::unwrap_used)] // tests

use pagemill_backend::{BackendError, Collective, CpuBackend, CpuConfig, SharedCollective, Tensor};
use pagemill_engine::{
    ChannelSink, Checkpoint, EngineConfig, EngineHandle, EventReceiver, Generation, ParallelMode, RankContext, Request,
    SamplingParams, build_engine_on,
};
use pagemill_mpi::leader::Watch;
use pagemill_mpi::{Follower, Invitation, Leader, ProcessError, RankIdentity, Reception};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MODE: ParallelMode = ParallelMode { tensor_parallel: 2, pipeline_parallel: 2 };
const LIMIT: Duration = Duration::from_secs(5);

/// Ranks of which one fails once its calls are used up.
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

fn backend() -> Arc<CpuBackend> {
    Arc::new(CpuBackend::new(CpuConfig { num_threads: Some(1), ..CpuConfig::default() }).unwrap())
}

fn checkpoint() -> Checkpoint {
    Checkpoint::open(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../testkit/zoo/llama")).unwrap()
}

fn config() -> EngineConfig {
    EngineConfig { parallel: MODE, kv_cache_bytes: Some(32 << 20), micro_batches: Some(3), ..EngineConfig::default() }
}

fn identity(rank: usize) -> RankIdentity {
    RankIdentity { rank, world_size: MODE.num_ranks(), fingerprint: [3; 32], gpu: None }
}

fn aborting(cx: &RankContext) -> impl Fn(&str) + Send + Sync + 'static {
    let collective = Arc::clone(&cx.collective);
    move |reason| collective.abort(reason)
}

/// A connection that the test can cut.
struct Cable {
    address: SocketAddr,
    ends: Arc<Mutex<Vec<TcpStream>>>,
}

impl Cable {
    /// Passes one connection on to `door`.
    fn to(door: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let ends: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
        let kept = Arc::clone(&ends);
        std::thread::spawn(move || {
            let (near, _) = listener.accept().unwrap();
            let far = TcpStream::connect(door).unwrap();
            kept.lock().unwrap().extend([near.try_clone().unwrap(), far.try_clone().unwrap()]);
            let (mut from_near, mut to_far) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from_near, &mut to_far));
            let (mut from_far, mut to_near) = (far, near);
            std::io::copy(&mut from_far, &mut to_near)
        });
        Self { address, ends }
    }

    fn cut(&self) {
        for end in self.ends.lock().unwrap().iter() {
            // Whoever has closed it is welcome.
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

/// Brings a world up, whose rank `mortal` has `calls_left`; what `body` makes of it and of rank 2's cable, and
/// how the followers ended.
fn in_world<T: Send>(
    mortal: usize,
    calls_left: &Arc<AtomicI64>,
    body: impl FnOnce(Result<(EngineHandle, Watch), ProcessError>, &Cable) -> T + Send,
) -> (T, Vec<Result<(), ProcessError>>) {
    let reception = Reception::open(0).unwrap();
    let invitation = reception.invitation().clone();
    let cable = Cable::to(*invitation.addresses.last().unwrap());
    let over_cable = Invitation { addresses: vec![cable.address], ..invitation.clone() };
    let ranks = SharedCollective::world(MODE.tensor_parallel, MODE.pipeline_parallel);
    let mut contexts: Vec<RankContext> = ranks
        .into_iter()
        .enumerate()
        .map(|(at, inner)| {
            let calls_left = if at == mortal { Arc::clone(calls_left) } else { Arc::new(AtomicI64::new(i64::MAX)) };
            RankContext { backend: backend(), collective: Arc::new(Mortal { inner, calls_left }) }
        })
        .collect();
    let own = contexts.remove(0);
    std::thread::scope(|scope| {
        let (invitation, over_cable) = (&invitation, &over_cable);
        let followers: Vec<_> = contexts
            .into_iter()
            .zip(1..)
            .map(|(cx, rank)| {
                let invitation = if rank == 2 { over_cable } else { invitation };
                scope.spawn(move || {
                    let follower = Follower::join(invitation, identity(rank), aborting(&cx))?;
                    follower.run(&checkpoint(), || Ok(cx), &config(), &|_| {})
                })
            })
            .collect();
        let leader = Leader::admit(reception, &identity(0), aborting(&own)).unwrap();
        let built = leader.build(&checkpoint(), || Ok(own), &config(), &|_| {});
        let outcome = body(built.map(|(built, watch)| (EngineHandle::spawn(built.engine), watch)), &cable);
        (outcome, followers.into_iter().map(|follower| follower.join().unwrap()).collect())
    })
}

fn request(seed: u64, max_tokens: usize, sink: ChannelSink) -> Request {
    Request {
        prompt: (1..30).map(|token| token + u32::try_from(seed).unwrap()).collect(),
        max_tokens,
        n: 1 + u32::from(seed == 2),
        sampling: SamplingParams { temperature: 0.7, seed, logprobs: Some(3), ..SamplingParams::default() },
        priority: 0,
        cache_salt: None,
        sink: Box::new(sink),
    }
}

fn answers(handle: &EngineHandle) -> Vec<Generation> {
    std::thread::scope(|scope| {
        let ask = |seed| scope.spawn(move || handle.generate(request(seed, 30, ChannelSink::new(1).0)).unwrap());
        let threads: Vec<_> = (0..5).map(ask).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn answers_equal_those_of_threads_and_all_end_in_order() {
    let (found, ends) = in_world(0, &Arc::new(AtomicI64::new(i64::MAX)), |built, _| {
        let (handle, watch) = built.unwrap();
        let found = answers(&handle);
        let status = handle.status();
        assert_eq!((status.pipeline.num_ranks, status.pipeline.stages.len()), (4, 2));
        assert!(status.pipeline.stages.iter().all(|stage| stage.num_layers > 0));
        assert_eq!(status.workspace_grown, 0);
        handle.shutdown();
        watch.wait().unwrap();
        found
    });
    assert!(ends.iter().all(Result::is_ok), "{ends:?}");
    let ranks = SharedCollective::world(MODE.tensor_parallel, MODE.pipeline_parallel);
    let context = |ranks| RankContext { backend: backend(), collective: Arc::new(ranks) };
    let built = build_engine_on(&checkpoint(), ranks.into_iter().map(context).collect(), &config(), &|_| {}).unwrap();
    assert_eq!(found, answers(&EngineHandle::spawn(built.engine)));
}

#[test]
fn a_rank_that_fails_ends_all() {
    for mortal in 0..MODE.num_ranks() {
        let calls_left = Arc::new(AtomicI64::new(i64::MAX));
        let (took, ends) = in_world(mortal, &calls_left, |built, _| {
            let (handle, watch) = built.unwrap();
            let ears: Vec<EventReceiver> = (0..4)
                .map(|seed| {
                    let (sink, events) = ChannelSink::new(8192);
                    handle.submit(request(seed, 4000, sink)).unwrap();
                    events
                })
                .collect();
            while handle.status().scheduler.generated_tokens < 30 {
                std::thread::yield_now();
            }
            calls_left.store(3, Ordering::SeqCst);
            let lost_at = Instant::now();
            for (events, n) in ears.into_iter().zip([1, 1, 2, 1]) {
                let error = events.gather(n).unwrap_err();
                assert!(error.contains("the test ends this rank"), "{error}");
            }
            assert!(handle.status().stopped.is_some());
            handle.shutdown();
            assert!(watch.wait().is_err());
            lost_at.elapsed()
        });
        assert!(took < LIMIT, "{took:?}");
        for end in ends {
            let error = end.unwrap_err().to_string();
            assert!(error.contains("the test ends this rank"), "rank {mortal}: {error}");
        }
    }
}

/// Nothing is in flight: the engine notices all the same.
#[test]
fn a_loss_is_noticed_by_an_idle_engine() {
    let started = Instant::now();
    let (reason, ends) = in_world(0, &Arc::new(AtomicI64::new(i64::MAX)), |built, cable| {
        let (handle, watch) = built.unwrap();
        let lost_at = Instant::now();
        cable.cut();
        while handle.status().stopped.is_none() {
            assert!(lost_at.elapsed() < LIMIT);
            std::thread::sleep(Duration::from_millis(5));
        }
        handle.shutdown();
        assert!(watch.wait().is_err());
        handle.status().stopped.unwrap()
    });
    assert!(reason.contains("rank 2 on ") && reason.contains("is lost"), "{reason}");
    assert!(ends.iter().all(Result::is_err), "{ends:?}");
    assert!(started.elapsed() < 4 * LIMIT);
}

#[test]
fn a_rank_that_cannot_start_keeps_all_from_starting() {
    for mortal in [0, 3] {
        let (error, ends) = in_world(mortal, &Arc::new(AtomicI64::new(4)), |built, _| built.err().unwrap().to_string());
        assert!(error.contains("the test ends this rank"), "{error}");
        for end in ends {
            let error = end.unwrap_err().to_string();
            assert!(error.contains("the test ends this rank"), "rank {mortal}: {error}");
        }
    }
}
