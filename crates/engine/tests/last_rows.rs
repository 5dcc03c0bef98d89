//! Random mixed loads in chunks, whose steps compute the last layer for the wanted rows alone, against the same loads
//! in chunks of one token, whose steps want every row: tokens and log-probabilities are equal, to the bit.
#![allow(clippy::unwrap_used)]

mod random;

use pagemill_backend::{ActivationMode, CpuBackend, CpuConfig, SharedCollective};
use pagemill_engine::{
    ChannelSink, Checkpoint, EngineConfig, EventReceiver, Generation, ParallelMode, RankContext, Request,
    SamplingParams, build_engine_on,
};
use pagemill_scheduler::Time;
use random::Random;
use std::path::Path;
use std::sync::Arc;

const MAX_TOKENS: u32 = 12;
const NUM_REQUESTS: u64 = 14;
const MAX_SEQ_LEN: usize = 256;

/// A request, and the step before which it comes.
struct Arrival {
    step: u64,
    request: Request,
    events: EventReceiver,
}

/// Short and long prompts, one choice and several, greedy and drawn, now and then with the prompt's log-probabilities.
fn load(seed: u64) -> Vec<Arrival> {
    let mut random = Random(seed | 1 << 40);
    let arrival = |nth: u64| {
        let len = if random.below(3) == 0 { 1 + random.below(4) } else { 1 + random.below(150) };
        let prompt: Vec<u32> = (0..len).map(|_| 3 + random.below(200)).collect();
        let max_tokens = 1 + random.below(MAX_TOKENS) as usize;
        let (sink, events) = ChannelSink::new(prompt.len() + 4 * max_tokens + 8);
        let sampling = SamplingParams {
            temperature: if random.below(2) == 0 { 0.0 } else { 0.9 },
            repetition_penalty: if random.below(3) == 0 { 1.2 } else { 1.0 },
            seed: nth,
            logprobs: Some(2),
            prompt_logprobs: (random.below(5) == 0).then_some(1),
            ..SamplingParams::default()
        };
        let n = 1 + random.below(3);
        let request = Request { prompt, max_tokens, n, sampling, priority: 0, cache_salt: None, sink: Box::new(sink) };
        Arrival { step: u64::from(random.below(30)), request, events }
    };
    (0..NUM_REQUESTS).map(arrival).collect()
}

fn ranks(mode: ParallelMode) -> Vec<RankContext> {
    let cpu = CpuConfig { num_threads: Some(1), activations: ActivationMode::F32, ..CpuConfig::default() };
    let rank =
        |collective| RankContext { backend: Arc::new(CpuBackend::new(cpu).unwrap()), collective: Arc::new(collective) };
    SharedCollective::world(mode.tensor_parallel, mode.pipeline_parallel).into_iter().map(rank).collect()
}

fn run(name: &str, config: &EngineConfig, seed: u64) -> Vec<(u32, Generation)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/zoo").join(name);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let mut engine = build_engine_on(&checkpoint, ranks(config.parallel), config, &|_| {}).unwrap().engine;
    let (mut ears, mut coming) = (Vec::new(), Vec::new());
    for Arrival { step, request, events } in load(seed) {
        ears.push((request.n, events));
        coming.push((step, request));
    }
    let mut now = 0;
    while engine.has_work() || !coming.is_empty() {
        let is_here = |(step, _): &mut (u64, Request)| *step <= now;
        for (_, request) in coming.extract_if(.., is_here) {
            engine.submit(request, Time(now)).unwrap();
        }
        now += 1;
        if engine.has_work() {
            engine.step(Time(now)).unwrap();
        }
    }
    let status = engine.status();
    assert_eq!(status.workspace_grown, 0, "the warm-up did not cover the largest step");
    assert_eq!(status.kv_cache.num_owned, 0);
    ears.into_iter().map(|(n, events)| (n, events.gather(n).unwrap())).collect()
}

fn config(parallel: ParallelMode, chunk: usize) -> EngineConfig {
    EngineConfig {
        parallel,
        micro_batches: (parallel.pipeline_parallel > 1).then_some(2),
        prefill_chunk_size: chunk,
        max_batch_size: Some(8),
        max_seq_len: Some(MAX_SEQ_LEN),
        kv_cache_bytes: Some(32 << 20),
        check_every_step: true,
        ..EngineConfig::default()
    }
}

#[track_caller]
fn assert_same(what: &str, got: &[(u32, Generation)], want: &[(u32, Generation)]) {
    let bits = |entries: &[pagemill_engine::TokenLogprobs]| -> Vec<u32> {
        let of_entry = |entry: &pagemill_engine::TokenLogprobs| {
            entry.top.iter().map(|top| top.1).chain([entry.logprob]).map(f32::to_bits).collect::<Vec<_>>()
        };
        entries.iter().flat_map(of_entry).collect()
    };
    assert_eq!(got.len(), want.len());
    for (at, ((n, got), (_, want))) in got.iter().zip(want).enumerate() {
        assert_eq!((got.choices.len(), want.choices.len()), (*n as usize, *n as usize), "{what}, request {at}");
        assert_eq!(bits(&got.prompt_logprobs), bits(&want.prompt_logprobs), "{what}, request {at}: the prompt");
        for (got, want) in got.choices.iter().zip(&want.choices) {
            assert!(!want.tokens.is_empty(), "{what}, request {at}");
            assert_eq!(got.tokens, want.tokens, "{what}, request {at}");
            assert_eq!(bits(&got.logprobs), bits(&want.logprobs), "{what}, request {at}");
        }
    }
}

/// Loads of `seeds` on ranks of `mode`, in chunks of one token, of some, and of whole prompts.
fn check(name: &str, mode: ParallelMode, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let want = run(name, &config(mode, 1), seed);
        for chunk in [24, 160] {
            let got = run(name, &config(mode, chunk), seed);
            assert_same(&format!("{name}, {mode}, chunks of {chunk}, load {seed}"), &got, &want);
        }
    }
}

const fn layout(tensor_parallel: usize, pipeline_parallel: usize) -> ParallelMode {
    ParallelMode { tensor_parallel, pipeline_parallel }
}

#[test]
fn every_architecture_on_one_rank() {
    for name in ["llama", "llama3-rope", "llama-yarn", "mistral-swa", "qwen2", "qwen3", "gemma3"] {
        check(name, layout(1, 1), 1..3);
    }
}

#[test]
fn two_tensor_parallel_ranks() {
    check("llama", layout(2, 1), 3..5);
    check("qwen3", layout(2, 1), 5..6);
}

#[test]
fn two_stages() {
    check("mistral-swa", layout(1, 2), 6..8);
    check("qwen2", layout(1, 2), 8..9);
}

#[test]
fn two_stages_of_two_ranks() {
    check("llama", layout(2, 2), 9..11);
}

#[test]
fn a_static_batch() {
    let want = run("qwen3", &config(layout(1, 1), 1), 11);
    let config = EngineConfig { continuous_batching: false, static_batch_wait_us: 5, ..config(layout(1, 1), 160) };
    assert_same("a static batch", &run("qwen3", &config, 11), &want);
}
