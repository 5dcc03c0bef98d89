//! Steps planned while the one before runs, through real ranks: every token and log-probability is the one that
//! comes without, to the bit, also where sequences end by surprise.
#![allow(clippy::unwrap_used)]

use pagemill_backend::{ActivationMode, CpuBackend, CpuConfig, SharedCollective};
use pagemill_engine::{
    ChannelSink, Checkpoint, EngineConfig, EventReceiver, FinishReason, Generation, HostTime, ParallelMode,
    RankContext, Request, SamplingParams, build_engine_on,
};
use pagemill_scheduler::Time;
use std::path::Path;
use std::sync::Arc;

const MAX_TOKENS: usize = 40;
const NUM_REQUESTS: u32 = 10;

fn ranks(mode: ParallelMode) -> Vec<RankContext> {
    let cpu = CpuConfig { num_threads: Some(1), activations: ActivationMode::F32, ..CpuConfig::default() };
    let rank =
        |collective| RankContext { backend: Arc::new(CpuBackend::new(cpu).unwrap()), collective: Arc::new(collective) };
    SharedCollective::world(mode.tensor_parallel, mode.pipeline_parallel).into_iter().map(rank).collect()
}

/// Greedy and drawn, penalised and not, one choice and two.
fn request(at: u32, stop_token_ids: &[u32]) -> (Request, EventReceiver) {
    let prompt: Vec<u32> = (0..7 + 9 * at).map(|i| 3 + (i * 37 + at * 11) % 200).collect();
    let n = 1 + at % 2;
    let (sink, events) = ChannelSink::new(prompt.len() + 3 * MAX_TOKENS);
    let sampling = SamplingParams {
        temperature: if at.is_multiple_of(3) { 0.0 } else { 1.0 },
        repetition_penalty: if at.is_multiple_of(4) { 1.2 } else { 1.0 },
        seed: u64::from(at),
        logprobs: Some(1),
        prompt_logprobs: at.is_multiple_of(5).then_some(0),
        stop_token_ids: stop_token_ids.to_vec(),
        ..SamplingParams::default()
    };
    let sink = Box::new(sink);
    (Request { prompt, max_tokens: MAX_TOKENS, n, sampling, priority: 0, cache_salt: None, sink }, events)
}

/// What all requests hear, `stops[i]` ending the `i`-th.
fn run(mode: ParallelMode, plan_ahead: bool, stops: &[Vec<u32>]) -> (Vec<Generation>, HostTime) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/zoo/llama");
    let config = EngineConfig {
        parallel: mode,
        plan_ahead,
        prefill_chunk_size: 16,
        max_batch_size: Some(6),
        max_seq_len: Some(256),
        kv_cache_bytes: Some(16 << 20),
        check_every_step: true,
        ..EngineConfig::default()
    };
    let mut engine =
        build_engine_on(&Checkpoint::open(&folder).unwrap(), ranks(mode), &config, &|_| {}).unwrap().engine;
    let submit = |(at, stops): (u32, &Vec<u32>)| {
        let (request, events) = request(at, stops);
        let n = request.n;
        engine.submit(request, Time(0)).unwrap();
        (events, n)
    };
    let ears: Vec<_> = (0..NUM_REQUESTS).zip(stops).map(submit).collect();
    for now in 1.. {
        if !engine.has_work() {
            break;
        }
        engine.step(Time(now)).unwrap();
    }
    (ears.iter().map(|(events, n)| events.gather(*n).unwrap()).collect(), engine.status().host)
}

fn check(mode: ParallelMode) {
    let none = vec![Vec::new(); NUM_REQUESTS as usize];
    let (free, host) = run(mode, false, &none);
    assert_eq!(host.steps_ahead, 0);
    // Two of three requests stop at a token that they would say half-way.
    let stop_of = |(at, heard): (usize, &Generation)| {
        if at.is_multiple_of(3) { Vec::new() } else { vec![heard.choices[0].tokens[MAX_TOKENS / 2]] }
    };
    let stops: Vec<Vec<u32>> = free.iter().enumerate().map(stop_of).collect();
    for stops in [none, stops] {
        let (want, _) = run(mode, false, &stops);
        let mut steps_ahead = 0;
        // On a busy machine a tiny model's step is over before the next one can be planned.
        for _ in 0..20 {
            let (got, host) = run(mode, true, &stops);
            for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_eq!(format!("{got:?}"), format!("{want:?}"), "{mode}, request {at}");
                let why = got.choices[0].finish.as_ref().map(|(why, _)| why);
                let stopped = matches!(why, Some(FinishReason::Stop(_)));
                assert_eq!(stopped, !stops[at].is_empty(), "{mode}, request {at}");
            }
            steps_ahead += host.steps_ahead;
            if steps_ahead > 10 {
                break;
            }
        }
        assert!(steps_ahead > 10, "{mode}: {steps_ahead} steps planned ahead");
    }
}

#[test]
fn one_rank() {
    check(ParallelMode::SOLO);
}

#[test]
fn ranks_beside_the_one_that_samples_are_told_its_draws() {
    check(ParallelMode { tensor_parallel: 2, pipeline_parallel: 1 });
}

#[test]
fn a_pipeline_plans_no_sequence_ahead() {
    let mode = ParallelMode { tensor_parallel: 1, pipeline_parallel: 2 };
    let none = vec![Vec::new(); NUM_REQUESTS as usize];
    assert_eq!(run(mode, true, &none).1.steps_ahead, 0);
}
