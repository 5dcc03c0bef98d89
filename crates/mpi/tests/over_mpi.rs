//! Ranks as processes under `mpirun`, on this host: sums and gathers against plain loops, hidden states in
//! order, the end of every wait, a whole engine against one rank in one process, and the loss of a rank.
//!
//! Starts itself again under mpirun, once for each case. Without mpirun it says so and passes.
#![allow(clippy::unwrap_used, clippy::cast_precision_loss)] // tests

use pagemill_backend::{Backend, Collective, CpuBackend, CpuConfig, SharedCollective, Tensor};
use pagemill_engine::{
    ChannelSink, Checkpoint, Completion, EngineConfig, EngineHandle, EventReceiver, Generation, ParallelMode,
    RankContext, Request, SamplingParams, TokenLogprobs, build_engine_on,
};
use pagemill_mpi::{Follower, Leader, MpiCollective, RankIdentity, Reception, Session, World};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Name, tensor-parallel and pipeline-parallel ranks, and whether a rank dies on the way.
const CASES: [(&str, usize, usize, bool); 10] = [
    ("sums", 2, 1, false),
    ("sums", 3, 1, false),
    ("sums", 4, 1, false),
    ("columns", 3, 1, false),
    ("hidden", 2, 2, false),
    ("waits", 2, 2, true),
    ("ids", 3, 1, false),
    ("engine", 2, 1, false),
    ("engine", 2, 2, false),
    ("loss", 2, 2, true),
];
const LIMIT: Duration = Duration::from_secs(5);
const DONE: &str = "rank 0 is content";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [case, tensor_parallel, pipeline_parallel] = arguments.as_slice()
        && std::env::var_os("OMPI_COMM_WORLD_SIZE").is_some()
    {
        let number = |text: &String| text.parse().unwrap();
        let (tensor_parallel, pipeline_parallel) = (number(tensor_parallel), number(pipeline_parallel));
        child(case, ParallelMode { tensor_parallel, pipeline_parallel });
        return ExitCode::SUCCESS;
    }
    if Command::new("mpirun").arg("--version").output().is_err() {
        println!("over_mpi: there is no mpirun here, so nothing was tested: 0 passed, 0 failed");
        return ExitCode::SUCCESS;
    }
    let filter = arguments.iter().find(|argument| !argument.starts_with('-'));
    let chosen = CASES.iter().filter(|(case, ..)| filter.is_none_or(|filter| case.contains(filter.as_str())));
    let (mut passed, mut failed) = (0, 0);
    for case in chosen {
        if parent(case) { passed += 1 } else { failed += 1 }
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn parent(&(case, tensor_parallel, pipeline_parallel, has_loss): &(&str, usize, usize, bool)) -> bool {
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]);
    command.args(["--mca", "mpi_yield_when_idle", "1"]);
    if has_loss {
        // Survivors get so many seconds before mpirun ends them.
        command.args(["--mca", "odls_base_sigkill_timeout", "2"]);
    }
    command.arg("-np").arg((tensor_parallel * pipeline_parallel).to_string());
    command.arg(std::env::current_exe().unwrap()).arg(case);
    let started = Instant::now();
    let output = command.arg(tensor_parallel.to_string()).arg(pipeline_parallel.to_string()).output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    // A world that loses a rank fails as a whole, whatever its rank 0 says.
    let is_good = stdout.contains(DONE) && output.status.success() != has_loss;
    let took = started.elapsed().as_secs_f64();
    println!("{case} {tensor_parallel} x {pipeline_parallel}: {} ({took:.1} s)", if is_good { "ok" } else { "FAILED" });
    if !is_good {
        println!("{}\n{stdout}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    is_good
}

fn child(case: &str, mode: ParallelMode) {
    // As the program does: mpirun's first word after a loss is no end, so that rank 0 can tell its clients.
    let is_asked_to_end = Arc::new(std::sync::atomic::AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGTERM, is_asked_to_end).unwrap();
    let world = World::from_environment(&|name| std::env::var(name).ok(), mode).unwrap().unwrap();
    let session = Session::start(world).unwrap();
    let collective = Arc::new(session.collective(mode).unwrap());
    match case {
        "sums" => sums(&collective),
        "columns" => columns(&collective),
        "hidden" => hidden(&collective, world.rank, mode),
        "waits" => waits(collective, world.rank),
        "ids" => ids(&session),
        "engine" => engine(&session, &collective, mode),
        "loss" => loss(&session, &collective, mode),
        other => panic!("no case {other}"),
    }
    if world.rank == 0 {
        println!("{DONE}");
    }
    session.finish();
}

fn backend() -> CpuBackend {
    CpuBackend::new(CpuConfig { num_threads: Some(1), ..CpuConfig::default() }).unwrap()
}

/// Values whose sum depends on its order.
#[allow(clippy::cast_possible_truncation)] // a handful of ranks and rounds
fn value(rank: usize, round: usize, at: usize) -> f32 {
    let sign = if (at + rank).is_multiple_of(2) { 1.0 } else { -1.0 };
    sign * (1.0 + at as f32) * 10f32.powi((rank as i32 * 3 + round as i32) % 7)
}

fn tensor(backend: &CpuBackend, rows: usize, cols: usize, value: impl Fn(usize) -> f32) -> Tensor {
    let mut tensor = backend.temp(rows, cols).unwrap();
    let data: Vec<f32> = (0..rows * cols).map(value).collect();
    backend.copy_from_host(&data, &mut tensor).unwrap();
    tensor
}

fn host(backend: &CpuBackend, tensor: &Tensor) -> Vec<f32> {
    let mut data = vec![0.0; tensor.rows() * tensor.cols()];
    backend.to_host(tensor, &mut data).unwrap();
    data
}

fn sums(collective: &MpiCollective) {
    // Whole, on the border, in slices that come out even and that do not, and with a rank without a slice.
    let sizes = [(1, 1), (3, 7), (1, 576), (16, 1024), (17, 1024), (33, 1111), (129, 1000)];
    let backend = backend();
    let num_ranks = collective.world_size();
    for (round, (rows, cols)) in sizes.into_iter().cycle().take(40).enumerate() {
        let mut x = tensor(&backend, rows, cols, |at| value(collective.rank(), round, at));
        collective.all_reduce(&mut x).unwrap();
        for (at, got) in host(&backend, &x).into_iter().enumerate() {
            let want = (1..num_ranks).fold(value(0, round, at), |sum, rank| sum + value(rank, round, at));
            assert_eq!(got.to_bits(), want.to_bits(), "{num_ranks} ranks, {rows} x {cols}, element {at}");
        }
    }
}

fn columns(collective: &MpiCollective) {
    let backend = backend();
    for (rows, cols) in [(1, 5), (4, 3), (0, 3), (32, 1700)] {
        let x = tensor(&backend, rows, cols, |at| value(collective.rank(), 0, at));
        let mut out = backend.temp(rows, cols * 3).unwrap();
        collective.all_gather_cols(&x, &mut out).unwrap();
        let of_row = |row: usize| (0..3 * cols).map(move |at| value(at / cols, 0, row * cols + at % cols));
        let want: Vec<f32> = (0..rows).flat_map(of_row).collect();
        assert_eq!(host(&backend, &out), want);
    }
}

fn hidden(collective: &MpiCollective, rank: usize, mode: ParallelMode) {
    let backend = backend();
    let stage = rank / mode.tensor_parallel;
    for round in 0..200 {
        // Some short enough for MPI to send at once, some not.
        let (rows, cols) = (1 + round % 5, if round % 3 == 0 { 40_000 } else { 64 });
        let fresh = tensor(&backend, rows, cols, |at| value(collective.rank(), round, at));
        if stage == 0 {
            collective.send(&fresh, 1).unwrap();
        } else {
            let mut x = tensor(&backend, rows, cols, |_| 0.0);
            collective.recv(&mut x, 0).unwrap();
            assert_eq!(host(&backend, &x), host(&backend, &fresh));
        }
    }
    let error = collective.send(&backend.temp(1, 1).unwrap(), 5).unwrap_err().to_string();
    assert!(error.contains("no link to stage 5"), "{error}");
}

/// All have what rank 0 hands out; whoever waits for more can be called off.
fn ids(session: &Session) {
    let want: Vec<u8> = (0..7 * 128).map(|at: u32| at.to_le_bytes()[0]).collect();
    let stay = || None;
    if session.world().rank == 0 {
        session.hand_out_ids(&want, &stay).unwrap();
    } else {
        assert_eq!(session.ids(want.len(), &stay).unwrap(), want);
    }
    if session.world().rank == 0 {
        // When the others have given up; so that MPI can end in order.
        std::thread::sleep(Duration::from_millis(500));
        session.hand_out_ids(&want[..128], &stay).unwrap();
    } else {
        let called_off = || Some("rank 2 is lost".to_owned());
        let error = session.ids(128, &called_off).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("rank 2 is lost"), "{error}");
    }
}

/// Every rank waits for something that never comes, until it is called off.
fn waits(collective: Arc<MpiCollective>, rank: usize) {
    let backend = backend();
    let other = Arc::clone(&collective);
    let caller = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(500));
        other.abort("rank 3 is lost");
        other.abort("a later reason");
    });
    let started = Instant::now();
    let error = match rank {
        0 => loop {
            // Long messages that nobody takes fill the outbox.
            if let Err(error) = collective.send(&backend.temp(40, 1024).unwrap(), 1) {
                break error;
            }
        },
        // From rank 1, which sends nothing.
        3 => collective.recv(&mut backend.temp(1, 8).unwrap(), 0).unwrap_err(),
        // Its peer is elsewhere.
        _ => collective.all_reduce(&mut backend.temp(40, 1024).unwrap()).unwrap_err(),
    };
    assert!(error.to_string().contains("rank 3 is lost"), "{error}");
    assert!(started.elapsed() < LIMIT);
    caller.join().unwrap();
    if rank == 0 {
        println!("{DONE}");
    }
    // Messages are still under way: MPI cannot end in order.
    std::process::exit(1);
}

fn checkpoint() -> Checkpoint {
    Checkpoint::open(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../testkit/zoo/llama")).unwrap()
}

fn config(parallel: ParallelMode) -> EngineConfig {
    EngineConfig { parallel, kv_cache_bytes: Some(32 << 20), micro_batches: Some(3), ..EngineConfig::default() }
}

fn request(prompt: &[u32], max_tokens: usize, seed: u64) -> Request {
    let temperature = if seed == 0 { 0.0 } else { 0.8 };
    Request {
        prompt: prompt.to_vec(),
        max_tokens,
        n: 1,
        sampling: SamplingParams { temperature, seed, logprobs: Some(2), ..SamplingParams::default() },
        priority: 0,
        cache_salt: None,
        sink: Box::new(ChannelSink::new(1).0),
    }
}

/// Tokens and log-probabilities of a few requests at once.
fn answers(handle: &EngineHandle) -> Vec<(Vec<u32>, Vec<TokenLogprobs>)> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6u32)
            .map(|at| {
                let prompt: Vec<u32> = (1..20 + 3 * at).map(|token| token % 50 + 1).collect();
                scope.spawn(move || handle.generate(request(&prompt, 40, u64::from(at % 3))).unwrap())
            })
            .collect();
        let choice = |mut generation: Generation| generation.choices.remove(0);
        let answer = |choice: Completion| (choice.tokens, choice.logprobs);
        threads.into_iter().map(|thread| answer(choice(thread.join().unwrap()))).collect()
    })
}

/// Brings the world up: the engine on rank 0; the others run until it ends.
fn bring_up(
    session: &Session,
    collective: &Arc<MpiCollective>,
    mode: ParallelMode,
    follow: impl FnOnce(Follower, RankContext),
) -> Option<(EngineHandle, pagemill_mpi::leader::Watch)> {
    let world = session.world();
    let own = RankIdentity { rank: world.rank, world_size: world.size, fingerprint: [1; 32], gpu: None };
    let cx = RankContext { backend: Arc::new(backend()), collective: Arc::<MpiCollective>::clone(collective) };
    let aborted = Arc::clone(collective);
    let abort = move |reason: &str| aborted.abort(reason);
    if world.rank == 0 {
        let reception = Reception::open(0).unwrap();
        session.invite(reception.invitation()).unwrap();
        let leader = Leader::admit(reception, &own, abort).unwrap();
        let (built, watch) = leader.build(&checkpoint(), || Ok(cx), &config(mode), &|_| {}).unwrap();
        return Some((EngineHandle::spawn(built.engine), watch));
    }
    let invitation = session.invitation().unwrap();
    follow(Follower::join(&invitation, own, abort).unwrap(), cx);
    None
}

fn engine(session: &Session, collective: &Arc<MpiCollective>, mode: ParallelMode) {
    let follow = |follower: Follower, cx: RankContext| {
        follower.run(&checkpoint(), || Ok(cx), &config(mode), &|_| {}).unwrap();
    };
    let Some((handle, watch)) = bring_up(session, collective, mode, follow) else { return };
    let found = answers(&handle);
    let status = handle.status();
    assert_eq!((status.pipeline.num_ranks, status.workspace_grown), (mode.num_ranks(), 0));
    handle.shutdown();
    watch.wait().unwrap();
    assert!(collective.is_orderly());
    // The same ranks as threads of this process give the same bits.
    let ranks = SharedCollective::world(mode.tensor_parallel, mode.pipeline_parallel);
    let ranks =
        ranks.into_iter().map(|ranks| RankContext { backend: Arc::new(backend()), collective: Arc::new(ranks) });
    let threads = build_engine_on(&checkpoint(), ranks.collect(), &config(mode), &|_| {}).unwrap();
    assert_eq!(found, answers(&EngineHandle::spawn(threads.engine)));
}

fn endless(handle: &EngineHandle) -> EventReceiver {
    let (sink, events) = ChannelSink::new(8192);
    handle.submit(Request { sink: Box::new(sink), ..request(&[1, 2, 3], 4000, 0) }).unwrap();
    events
}

/// Rank 3 dies in the middle of its work.
fn loss(session: &Session, collective: &Arc<MpiCollective>, mode: ParallelMode) {
    let is_mortal = session.world().rank == 3;
    let follow = |follower: Follower, cx: RankContext| {
        if is_mortal {
            std::thread::spawn(|| {
                std::thread::sleep(Duration::from_secs(4));
                std::process::abort();
            });
        }
        let error = follower.run(&checkpoint(), || Ok(cx), &config(mode), &|_| {}).unwrap_err().to_string();
        assert!(error.contains("rank 3") && error.contains("is lost"), "{error}");
        std::process::exit(1);
    };
    let Some((handle, watch)) = bring_up(session, collective, mode, follow) else { return };
    // Until the loss there is always something in flight.
    let lost_at = loop {
        let ears: Vec<EventReceiver> = (0..4).map(|_| endless(&handle)).collect();
        let outcomes: Vec<_> = ears.into_iter().map(|events| events.gather(1)).collect();
        if let Some(reason) = watch.failure() {
            assert!(reason.contains("rank 3") && reason.contains("is lost"), "{reason}");
            assert!(outcomes.iter().any(Result::is_err));
            break Instant::now();
        }
    };
    assert!(handle.status().stopped.is_some());
    handle.shutdown();
    assert!(watch.wait().is_err());
    assert!(lost_at.elapsed() < LIMIT);
    println!("{DONE}");
    std::process::exit(1);
}
