//! Steps that the device is given before the host knows the draws of the one before.

use crate::sampling::{sample, task_rows};
use crate::support::{ACTIVATIONS, Random, gpu, has_gpu, tensor};
use crate::zoo::{folder, request};
use pagemill_backend::sampling::{Choice, Draw, LogitEdits, RowTask};
use pagemill_backend::{Backend, MAX_QUEUED_STEPS, StepsAhead};
use pagemill_backend_cuda::{Activations, CudaBackend, CudaConfig};
use pagemill_engine::{EngineConfig, EngineHandle, Generation, HostTime, SamplingParams, build_engine};
use pagemill_formats::Checkpoint;
use std::sync::Arc;

const MAX_TOKENS: usize = 60;

/// Tasks of every row: the first token, or draws of several kinds, some with an edit.
fn tasks(num_rows: usize, plain: bool) -> Vec<RowTask<'static>> {
    let draw = |row: usize| Draw {
        inv_temperature: 1.25,
        top_k: (row % 3 == 1).then_some(40),
        top_p: if row % 4 == 2 { 0.8 } else { 1.0 },
        min_p: 0.0,
        uniform: (row as f64 * 0.37) % 1.0,
    };
    let edits = |row: usize| LogitEdits {
        bias: if row % 5 == 3 { &[(2, 7.5), (11, -3.0)] } else { &[] },
        ..LogitEdits::default()
    };
    let task = |row| match plain {
        true => RowTask { row, choice: Choice::Largest, edits: LogitEdits::default(), num_top: None },
        false => RowTask { row, choice: Choice::Draw(draw(row)), edits: edits(row), num_top: None },
    };
    (0..num_rows).map(task).collect()
}

#[test]
fn queued_outcomes_come_in_order_and_are_those_of_a_step_waited_for() {
    for activations in ACTIVATIONS {
        let Some(gpu) = gpu(activations) else { return };
        let gpu: &dyn Backend = &gpu;
        let mut random = Random::new(5);
        for cols in [7, 1000, 4096] {
            let ahead: &dyn StepsAhead = gpu.steps_ahead(cols).unwrap();
            let rows = task_rows(&mut random, cols);
            let logits: Vec<_> =
                [rows.len(), 3, 1].map(|count| tensor(gpu, count, cols, &rows[..count].concat())).into();
            let mut outcomes = vec![None];
            for plain in [[true, true, true], [false, false, false], [true, false, true], [false, true, false]] {
                let steps: Vec<_> =
                    logits.iter().zip(plain).map(|(logits, plain)| (logits, tasks(logits.rows(), plain))).collect();
                let want: Vec<_> = steps.iter().map(|(logits, tasks)| sample(gpu, logits, tasks)).collect();
                ahead.queue_sampling(steps[0].0, &steps[0].1).unwrap();
                ahead.queue_sampling(steps[1].0, &steps[1].1).unwrap();
                assert_eq!(MAX_QUEUED_STEPS, 2);
                ahead.queue_sampling(steps[2].0, &steps[2].1).unwrap_err();
                ahead.take_sampled(&mut outcomes).unwrap();
                assert_eq!(outcomes, want[0], "{cols} {plain:?}");
                ahead.queue_sampling(steps[2].0, &steps[2].1).unwrap();
                ahead.take_sampled(&mut outcomes).unwrap();
                assert_eq!(outcomes, want[1], "{cols} {plain:?}");
                while !ahead.is_sampled().unwrap() {}
                ahead.take_sampled(&mut outcomes).unwrap();
                assert_eq!(outcomes, want[2], "{cols} {plain:?}");
                ahead.take_sampled(&mut outcomes).unwrap_err();
                ahead.is_sampled().unwrap_err();
            }
            let with_report = RowTask { num_top: Some(1), ..tasks(1, true)[0] };
            ahead.queue_sampling(&logits[2], &[with_report]).unwrap_err();
            ahead.queue_sampling(&logits[2], &tasks(2, true)).unwrap_err();
            ahead.queue_sampling(&logits[2], &[]).unwrap_err();
        }
        assert!(gpu.steps_ahead(1 << 30).is_none(), "rows that the device does not sample");
    }
}

/// Greedy and drawn, penalised now and then, one choice and two; ended by a stop token, or by their length.
fn sampling(at: u32, stop_token_ids: &[u32]) -> SamplingParams {
    SamplingParams {
        temperature: if at.is_multiple_of(3) { 0.0 } else { 0.9 },
        top_p: if at.is_multiple_of(2) { 1.0 } else { 0.9 },
        frequency_penalty: if at == 7 { 0.5 } else { 0.0 },
        min_tokens: if at.is_multiple_of(4) { 5 } else { 0 },
        seed: u64::from(at),
        stop_token_ids: stop_token_ids.to_vec(),
        ..SamplingParams::default()
    }
}

/// What all requests hear, `stops[i]` ending the `i`-th.
fn run(plan_ahead: bool, stops: &[Vec<u32>]) -> (Vec<Generation>, HostTime) {
    let device = CudaConfig { ordinal: 0, activations: Activations::Bf16, deterministic: true };
    let config = EngineConfig {
        plan_ahead,
        prefill_chunk_size: 32,
        max_batch_size: Some(6),
        max_seq_len: Some(512),
        kv_cache_bytes: Some(2 << 20),
        check_every_step: true,
        ..EngineConfig::default()
    };
    let checkpoint = Checkpoint::open(&folder("llama")).unwrap();
    let backend = Arc::new(CudaBackend::new(device).unwrap());
    let handle = EngineHandle::spawn(build_engine(&checkpoint, backend, &config, &|_| {}).unwrap().engine);
    let ears: Vec<_> = (0u32..)
        .zip(stops)
        .map(|(at, stops)| {
            let prompt: Vec<u32> = (0..1 + 9 * at).map(|i| 3 + (i * 37 + at * 11) % 200).collect();
            let (mut request, events) = request(&prompt, 3 * MAX_TOKENS, sampling(at, stops));
            (request.max_tokens, request.n) = (MAX_TOKENS, 1 + at % 2);
            let n = request.n;
            handle.submit(request).unwrap();
            (events, n)
        })
        .collect();
    let heard = ears.iter().map(|(events, n)| events.gather(*n).unwrap()).collect();
    let status = handle.status();
    handle.shutdown();
    assert_eq!((status.workspace_grown, status.stopped), (0, None));
    (heard, status.host)
}

#[test]
fn tokens_are_those_of_steps_that_wait_for_each_other() {
    if !has_gpu() {
        return;
    }
    let none = vec![Vec::new(); 14];
    let (free, host) = run(false, &none);
    assert_eq!(host.steps_queued, 0);
    let stop_of = |(at, heard): (usize, &Generation)| {
        if at.is_multiple_of(3) { Vec::new() } else { vec![heard.choices[0].tokens[MAX_TOKENS / 2]] }
    };
    let stops: Vec<Vec<u32>> = free.iter().enumerate().map(stop_of).collect();
    for stops in [none, stops] {
        let (want, _) = run(false, &stops);
        for _ in 0..3 {
            let (got, host) = run(true, &stops);
            assert!(host.steps_queued > 20, "{host}");
            for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_eq!(format!("{got:?}"), format!("{want:?}"), "request {at}");
            }
        }
    }
}
