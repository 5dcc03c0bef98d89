//! Steps that a device is given before the draws of the one before are known to the host: every token is the one that
//! comes without, whatever ends, begins, forks or asks for its past meanwhile.
#![allow(clippy::unwrap_used)]

#[path = "../benches/host_cost/free_device.rs"]
mod free_device;
mod random;

use free_device::FreeDevice;
use pagemill_backend::SoloCollective;
use pagemill_engine::{
    ChannelSink, Checkpoint, EngineConfig, EventReceiver, FinishReason, Generation, HostTime, InferenceEngine,
    PipelineExecutor, RankContext, Request, RequestId, SamplingParams, build_engine_on,
};
use pagemill_scheduler::Time;
use random::Random;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const NUM_REQUESTS: u32 = 40;
const STEP: Duration = Duration::from_micros(100);
/// Longer than planning a step takes, on a busy machine too.
const PATIENCE: Duration = Duration::from_millis(10);

fn engine(takes_ahead: bool, plan_ahead: bool) -> InferenceEngine<PipelineExecutor> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/zoo/llama");
    let config = EngineConfig {
        plan_ahead,
        block_size: 16,
        prefill_chunk_size: 16,
        max_batch_size: Some(6),
        max_seq_len: Some(80),
        // So few that sequences are preempted.
        kv_cache_bytes: Some(9 * 16 * 4 * 2 * 2 * 32 * 2),
        check_every_step: true,
        ..EngineConfig::default()
    };
    let backend = Arc::new(FreeDevice::new(STEP, takes_ahead, PATIENCE));
    let rank = RankContext { backend, collective: Arc::new(SoloCollective) };
    build_engine_on(&Checkpoint::open(&folder).unwrap(), vec![rank], &config, &|_| {}).unwrap().engine
}

/// Of every kind that the sampler treats differently. What a request says depends on itself alone.
fn request(at: u32, stop_token_ids: &[u32]) -> (Request, EventReceiver) {
    let mut random = Random((u64::from(at) + 1) << 20);
    let prompt: Vec<u32> = (0..1 + random.below(30)).map(|_| random.below(500)).collect();
    let max_tokens = 1 + random.below(40) as usize;
    let n = 1 + random.below(2);
    let (sink, events) = ChannelSink::new(prompt.len() + 4 * max_tokens + 4);
    let sampling = SamplingParams {
        temperature: if random.below(3) == 0 { 0.0 } else { 1.0 },
        // Few enough that most steps have none.
        frequency_penalty: if at.is_multiple_of(20) { 0.5 } else { 0.0 },
        min_tokens: if random.below(2) == 0 { 0 } else { max_tokens / 2 },
        seed: u64::from(at),
        stop_token_ids: stop_token_ids.to_vec(),
        ..SamplingParams::default()
    };
    (Request { prompt, max_tokens, n, sampling, priority: 0, cache_salt: None, sink: Box::new(sink) }, events)
}

/// Requests come a few at a time; what each hears. Those of `aborted` end after some steps of theirs.
fn run(
    mut engine: InferenceEngine<PipelineExecutor>,
    stops: &[Vec<u32>],
    aborted: &[u32],
) -> (Vec<Option<Generation>>, HostTime, u64) {
    let mut ears = Vec::new();
    let mut ends: Vec<(u64, RequestId)> = Vec::new();
    let (mut next, mut now) = (0, 0);
    while next < NUM_REQUESTS || engine.has_work() {
        now += 1;
        if now % 7 == 1 {
            for at in (next..NUM_REQUESTS).take(3) {
                let (request, events) = request(at, &stops[at as usize]);
                let n = request.n;
                let id = engine.submit(request, Time(now)).unwrap();
                if aborted.contains(&at) {
                    ends.push((now + 5 + u64::from(at), id));
                }
                ears.push((events, n));
                next += 1;
            }
        }
        for (_, id) in ends.extract_if(.., |(end, _)| *end <= now) {
            engine.abort(id);
        }
        engine.step(Time(now)).unwrap();
    }
    let status = engine.status();
    let gather = |(at, (events, n)): (usize, &(EventReceiver, u32))| {
        (!aborted.contains(&u32::try_from(at).unwrap())).then(|| events.gather(*n).unwrap())
    };
    (ears.iter().enumerate().map(gather).collect(), status.host, status.scheduler.preemptions)
}

#[test]
fn tokens_are_those_of_steps_that_wait_for_each_other() {
    let none = vec![Vec::new(); NUM_REQUESTS as usize];
    let (free, host, _) = run(engine(true, false), &none, &[]);
    assert_eq!(host.steps_queued, 0, "nothing is planned ahead");
    let stop_of = |(at, heard): (usize, &Option<Generation>)| {
        let tokens = &heard.as_ref().unwrap().choices[0].tokens;
        if at.is_multiple_of(3) { Vec::new() } else { vec![tokens[tokens.len() / 2]] }
    };
    let stops: Vec<Vec<u32>> = free.iter().enumerate().map(stop_of).collect();
    for (stops, aborted) in [(&none, &[][..]), (&stops, &[]), (&stops, &[4, 5, 11, 20, 33])] {
        let (want, host, _) = run(engine(false, true), stops, aborted);
        assert_eq!(host.steps_queued, 0, "the device takes none");
        let (mut num_queued, mut num_preempted, mut num_stopped) = (0, 0, 0);
        for _ in 0..5 {
            let (got, host, preempted) = run(engine(true, true), stops, aborted);
            for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_eq!(format!("{got:?}"), format!("{want:?}"), "request {at}");
                let finish = got.as_ref().and_then(|got| got.choices[0].finish.as_ref());
                num_stopped += usize::from(matches!(finish, Some((FinishReason::Stop(_), _))));
            }
            num_queued += host.steps_queued;
            num_preempted += preempted;
            if num_queued > 100 && num_preempted > 0 {
                break;
            }
        }
        assert!(num_queued > 100, "{num_queued} steps were queued behind the one before");
        assert!(num_preempted > 0, "the pool was to be too small");
        assert_eq!(num_stopped > 0, !stops[1].is_empty());
    }
}
