//! Layouts over ranks: every zoo model at every layout of 1, 2 and 4 tensor-parallel ranks and 1 and 2
//! stages, against the single rank.
//!
//! A pipeline computes the same sums in the same order: its log-probabilities are equal bit for bit.
//! Tensor-parallel ranks sum partial products in rank order: every run of one `tensor_parallel` is equal
//! bit for bit to every other (alone, mixed, in chunks, on prefix hits, preempted, with any number of
//! stages), and differs from the single rank's by rounding alone. Tokens are the same; a log-probability
//! may differ by [`ROUNDING`].
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

#[path = "../../model/tests/harness/regrouped.rs"]
mod regrouped;

use pagemill_backend::{ActivationMode, CpuBackend, CpuConfig, DType, SharedCollective};
use pagemill_engine::{
    BuiltEngine, ChannelSink, DeviceMemory, EngineConfig, EngineHandle, EventReceiver, Generation, ParallelMode,
    RankContext, Request, SamplingParams, build_engine_on, plan_memory,
};
use pagemill_formats::Checkpoint;
use pagemill_scheduler::Time;
use regrouped::regrouped;
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;

const GREEDY_TOKENS: usize = 32;

/// Log-probabilities of different sum orders differ by less.
const ROUNDING: f32 = 5e-4;

fn zoo_folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../testkit/zoo").join(name)
}

fn checkpoint(name: &str) -> (Checkpoint, Value) {
    let folder = zoo_folder(name);
    let golden = serde_json::from_slice(&std::fs::read(folder.join("golden.json")).unwrap()).unwrap();
    (Checkpoint::open(&folder).unwrap(), golden)
}

fn ranks(mode: ParallelMode) -> Vec<RankContext> {
    let cpu = CpuConfig { num_threads: Some(1), activations: ActivationMode::F32, ..CpuConfig::default() };
    let world = SharedCollective::world(mode.tensor_parallel, mode.pipeline_parallel);
    let rank =
        |collective| RankContext { backend: Arc::new(CpuBackend::new(cpu).unwrap()), collective: Arc::new(collective) };
    world.into_iter().map(rank).collect()
}

fn config(mode: ParallelMode) -> EngineConfig {
    EngineConfig {
        parallel: mode,
        // The least that keeps two stages busy, and more than there are stages.
        micro_batches: (mode.pipeline_parallel > 1).then_some(3),
        kv_dtype: DType::F32,
        prefill_chunk_size: 32,
        max_batch_size: Some(16),
        max_seq_len: Some(512),
        kv_cache_bytes: Some(32 << 20),
        check_every_step: true,
        ..EngineConfig::default()
    }
}

fn build(checkpoint: &Checkpoint, config: &EngineConfig) -> BuiltEngine {
    build_engine_on(checkpoint, ranks(config.parallel), config, &|_| {}).unwrap()
}

/// The golden prompts, and slices of the document: 12 in all, one beyond every sliding window.
fn prompts(golden: &Value) -> Vec<Vec<u32>> {
    let ids = |value: &Value| -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let document = ids(&golden["document"]["ids"]);
    let mut prompts: Vec<Vec<u32>> =
        golden["prompts"].as_array().unwrap().iter().map(|prompt| ids(&prompt["ids"])).collect();
    for (i, len) in [1, 16, 33, 64, 97, 150].into_iter().enumerate() {
        prompts.push(document[i * 50..i * 50 + len].to_vec());
    }
    prompts
}

fn greedy(prompt: &[u32]) -> (Request, EventReceiver) {
    let (sink, events) = ChannelSink::new(prompt.len() + GREEDY_TOKENS + 8);
    let request = Request {
        prompt: prompt.to_vec(),
        max_tokens: GREEDY_TOKENS,
        n: 1,
        sampling: SamplingParams { logprobs: Some(4), ..SamplingParams::default() },
        priority: 0,
        cache_salt: None,
        sink: Box::new(sink),
    };
    (request, events)
}

/// All requests at once, stepped by hand: nothing depends on this machine's speed.
fn run_together(built: &mut BuiltEngine, prompts: &[Vec<u32>]) -> Vec<Generation> {
    let engine = &mut built.engine;
    let ears: Vec<EventReceiver> = prompts
        .iter()
        .map(|prompt| {
            let (request, events) = greedy(prompt);
            engine.submit(request, Time(0)).unwrap();
            events
        })
        .collect();
    let mut now = 0;
    while engine.has_work() {
        now += 1;
        engine.step(Time(now)).unwrap();
    }
    assert_eq!(engine.status().workspace_grown, 0, "the warm-up did not cover the largest step");
    assert_eq!(engine.status().kv_cache.num_owned, 0);
    ears.iter().map(|events| events.gather(1).unwrap()).collect()
}

fn run_alone(checkpoint: &Checkpoint, mode: ParallelMode, prompts: &[Vec<u32>]) -> Vec<Generation> {
    let config = EngineConfig { prefix_cache: false, prefill_chunk_size: 512, ..config(mode) };
    let mut built = build(checkpoint, &config);
    prompts.iter().map(|prompt| run_together(&mut built, std::slice::from_ref(prompt)).remove(0)).collect()
}

fn assert_bits(what: &str, got: &[Generation], want: &[Generation]) {
    assert_eq!(got.len(), want.len());
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let (got, want) = (&got.choices[0], &want.choices[0]);
        assert_eq!(got.tokens, want.tokens, "{what}, request {at}");
        let bits = |entries: &[pagemill_engine::TokenLogprobs]| -> Vec<u32> {
            entries
                .iter()
                .flat_map(|entry| entry.top.iter().map(|top| top.1).chain([entry.logprob]))
                .map(f32::to_bits)
                .collect()
        };
        assert_eq!(bits(&got.logprobs), bits(&want.logprobs), "{what}, request {at}");
    }
}

/// Tokens are the same, log-probabilities within [`ROUNDING`].
fn assert_tokens(what: &str, got: &[Generation], want: &[Generation]) {
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let (got, want) = (&got.choices[0], &want.choices[0]);
        assert_eq!(got.tokens, want.tokens, "{what}, request {at}");
        for (got, want) in got.logprobs.iter().zip(&want.logprobs) {
            let difference = (got.logprob - want.logprob).abs();
            assert!(difference < ROUNDING, "{what}, request {at}: log-probabilities differ by {difference}");
        }
    }
}

fn check_preemption(
    what: &str,
    checkpoint: &Checkpoint,
    mode: ParallelMode,
    prompts: &[Vec<u32>],
    want: &[Generation],
) {
    let longest = prompts.iter().map(Vec::len).max().unwrap() + GREEDY_TOKENS;
    let roomy = build(checkpoint, &config(mode)).plan;
    let blocks = 2 * longest.div_ceil(16) + 4; // No zoo model of this build keeps more than two groups whole.
    let tiny = EngineConfig {
        kv_cache_bytes: Some(roomy.block_bytes * blocks as u64),
        max_seq_len: Some(longest),
        ..config(mode)
    };
    let mut built = build(checkpoint, &tiny);
    assert_bits(&format!("{what}, preempted"), &run_together(&mut built, prompts), want);
    assert!(built.engine.status().scheduler.preemptions > 0, "{what}: the pool was not tiny enough");
}

fn check_layouts(name: &str) {
    let (checkpoint, golden) = checkpoint(name);
    let prompts = prompts(&golden);
    let solo = run_alone(&checkpoint, ParallelMode::SOLO, &prompts);
    check_layouts_of(name, &checkpoint, &prompts, &solo, &[1, 2, 4]);
}

/// As [`check_layouts`], with one KV head more, whose heads do not come out even on two ranks.
fn check_uneven_layouts(name: &str) {
    let (trained, golden) = checkpoint(name);
    let prompts = prompts(&golden);
    let solo = run_alone(&trained, ParallelMode::SOLO, &prompts);
    let (_folder, checkpoint) = with_three_kv_heads(name);
    check_layouts_of(&format!("{name} of three KV heads"), &checkpoint, &prompts, &solo, &[2, 3]);
}

fn with_three_kv_heads(name: &str) -> (tempfile::TempDir, Checkpoint) {
    let folder = regrouped(&zoo_folder(name), &[0, 1, 0]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    (folder, checkpoint)
}

fn check_layouts_of(
    name: &str,
    checkpoint: &Checkpoint,
    prompts: &[Vec<u32>],
    solo: &[Generation],
    tensor_parallel: &[usize],
) {
    for &tensor_parallel in tensor_parallel {
        let one_stage = ParallelMode { tensor_parallel, pipeline_parallel: 1 };
        let alone = if tensor_parallel == 1 { solo.to_vec() } else { run_alone(checkpoint, one_stage, prompts) };
        assert_tokens(&format!("{name}, {tensor_parallel} ranks"), &alone, solo);
        for pipeline_parallel in [1, 2] {
            let mode = ParallelMode { tensor_parallel, pipeline_parallel };
            if mode == ParallelMode::SOLO {
                continue; // `zoo.rs`.
            }
            let what = format!("{name}, {mode}");
            let mut built = build(checkpoint, &config(mode));
            assert_bits(&format!("{what}, mixed"), &run_together(&mut built, prompts), &alone);
            let again = run_together(&mut built, prompts);
            assert_bits(&format!("{what}, with prefix hits"), &again, &alone);
            let cached: usize = again.iter().map(|run| run.choices[0].finish.as_ref().unwrap().1.cached_tokens).sum();
            assert!(cached > 100, "{what}: {cached} tokens were found in the prefix cache");
            check_preemption(&what, checkpoint, mode, prompts, &alone);
        }
    }
}

macro_rules! zoo {
    ($($test:ident: $name:literal,)*) => {$(
        #[test]
        fn $test() {
            check_layouts($name);
        }
    )*};
}

zoo! {
    llama: "llama",
    llama3_rope: "llama3-rope",
    llama_yarn: "llama-yarn",
    mistral_swa: "mistral-swa",
    qwen2: "qwen2",
    qwen3: "qwen3",
    gemma3: "gemma3",
}

#[test]
fn llama_of_three_kv_heads() {
    check_uneven_layouts("llama");
}

#[test]
fn qwen3_of_three_kv_heads() {
    check_uneven_layouts("qwen3");
}

#[test]
fn ranks_of_unlike_numbers_of_heads_share_weights_and_pool() {
    let (_folder, checkpoint) = with_three_kv_heads("llama");
    let plan_of =
        |tensor_parallel| build(&checkpoint, &config(ParallelMode { tensor_parallel, pipeline_parallel: 1 })).plan;
    let (solo, pair) = (plan_of(1), plan_of(2));
    assert_eq!((pair.block_bytes, pair.num_blocks), (solo.block_bytes, solo.num_blocks));
    assert!(pair.weight_bytes >= solo.weight_bytes && pair.weight_bytes < solo.weight_bytes * 102 / 100);

    // On devices of their own, two ranks have no more blocks than the one with two of the three heads has room for.
    let spec = pagemill_model::read_spec(&checkpoint).unwrap();
    let blocks = |tensor_parallel, available_bytes| {
        let config = EngineConfig {
            parallel: ParallelMode { tensor_parallel, pipeline_parallel: 1 },
            max_batch_size: Some(1 << 12),
            ..EngineConfig::default()
        };
        plan_memory(&spec, &config, DeviceMemory { available_bytes, is_shared: false, logits_rows: 64 }).unwrap()
    };
    let (pair, thrice) = (blocks(2, 1 << 30), blocks(3, 1 << 30));
    assert_eq!(pair.block_bytes, thrice.block_bytes, "three heads in all");
    let on_first = pair.num_blocks as u64 * pair.block_bytes / 3 * 2;
    let left = (1 << 30) - (pair.weight_bytes + pair.workspace_bytes) / 2;
    assert!(on_first <= left * 9 / 10, "{on_first} of {left}");
    assert!(on_first >= left * 8 / 10, "{on_first} of {left}");
    let no_cut =
        EngineConfig { parallel: ParallelMode { tensor_parallel: 5, pipeline_parallel: 1 }, ..EngineConfig::default() };
    let memory = DeviceMemory { available_bytes: 1 << 30, is_shared: false, logits_rows: 64 };
    let refused = plan_memory(&spec, &no_cut, memory).err().unwrap().to_string();
    assert!(refused.contains("6 query heads and 3 KV heads do not divide over 5 ranks"), "{refused}");
}

#[test]
fn ranks_share_weights_and_pool() {
    let (checkpoint, _) = checkpoint("llama");
    let config_of = |tensor_parallel, pipeline_parallel| config(ParallelMode { tensor_parallel, pipeline_parallel });
    let solo = build(&checkpoint, &config(ParallelMode::SOLO)).plan;
    let both = build(&checkpoint, &config_of(2, 2));
    assert_eq!(both.stages.iter().map(|stage| stage.layers.clone()).collect::<Vec<_>>(), [0..2, 2..4]);
    // Only the norms are held twice.
    assert!(both.plan.weight_bytes >= solo.weight_bytes && both.plan.weight_bytes < solo.weight_bytes * 102 / 100);
    assert_eq!(both.plan.block_bytes, solo.block_bytes);
    assert_eq!(both.plan.num_blocks, solo.num_blocks);
    assert!(both.plan.to_string().contains("2 tensor-parallel × 2 pipeline-parallel; bytes are sums"));
    // Two KV heads on four ranks: each is there twice.
    assert_eq!(build(&checkpoint, &config_of(4, 1)).plan.block_bytes, 2 * solo.block_bytes);
}

#[test]
fn the_number_of_micro_batches_is_measured_or_given() {
    let (checkpoint, _) = checkpoint("llama");
    let two_stages = config(ParallelMode { tensor_parallel: 1, pipeline_parallel: 2 });
    let status = |config: &EngineConfig| build(&checkpoint, config).engine.status().pipeline;
    let given = status(&EngineConfig { micro_batches: Some(7), ..two_stages.clone() });
    assert_eq!((given.micro_batches, given.tuning.len(), given.stages.len()), (7, 0, 2));
    let measured = status(&EngineConfig { micro_batches: None, ..two_stages.clone() });
    let curve = &measured.tuning;
    assert_eq!(curve[0].micro_batches, 4);
    assert!(curve.windows(2).all(|pair| pair[0].micro_batches < pair[1].micro_batches));
    assert!(curve.iter().all(|sample| sample.tokens_per_s > 0.0));
    let best = curve.iter().find(|sample| sample.micro_batches == measured.micro_batches).unwrap();
    assert!(curve.iter().all(|sample| sample.tokens_per_s <= best.tokens_per_s * 1.03), "{curve:?}");
    assert_eq!(status(&config(ParallelMode::SOLO)).micro_batches, 1);
    let error = build_engine_on(
        &checkpoint,
        ranks(two_stages.parallel),
        &EngineConfig { micro_batches: Some(33), ..two_stages },
        &|_| {},
    );
    assert_eq!(error.err().unwrap().to_string(), "micro_batches: 33 is not in 1..=32");
}

#[test]
fn stages_know_how_busy_they_were() {
    let (checkpoint, golden) = checkpoint("llama");
    let mut built = build(&checkpoint, &config(ParallelMode { tensor_parallel: 1, pipeline_parallel: 2 }));
    run_together(&mut built, &prompts(&golden));
    let pipeline = built.engine.status().pipeline;
    assert!(pipeline.active_us > 0 && pipeline.stages.len() == 2);
    for stage in &pipeline.stages {
        let idle = pipeline.idle_share(stage);
        assert!(stage.busy_us > 0 && (0.0..1.0).contains(&idle), "{pipeline:?}");
    }
}

#[test]
fn layouts_that_cannot_be_are_refused_in_a_sentence() {
    let (checkpoint, _) = checkpoint("llama");
    let refused = |tensor_parallel, pipeline_parallel| {
        let mode = ParallelMode { tensor_parallel, pipeline_parallel };
        build_engine_on(&checkpoint, ranks(mode), &config(mode), &|_| {}).err().unwrap().to_string()
    };
    assert_eq!(
        refused(3, 1),
        "tensor_parallel = 3: 4 query heads and 2 KV heads do not divide over 3 ranks; possible are 1, 2, 4"
    );
    assert_eq!(refused(1, 5), "pipeline_parallel = 5: 4 layers do not make 5 stages of at least one layer");
    let one_for_two = config(ParallelMode { tensor_parallel: 2, pipeline_parallel: 1 });
    let error = build_engine_on(&checkpoint, ranks(ParallelMode::SOLO), &one_for_two, &|_| {}).err().unwrap();
    assert!(error.to_string().contains("1 ranks were given for 2 tensor-parallel"), "{error}");
}

/// Drawn tokens and several choices, over ranks of which only one samples.
#[test]
fn sampled_choices_are_those_of_one_rank() {
    let (checkpoint, golden) = checkpoint("qwen3");
    let sampling = SamplingParams {
        temperature: 0.8,
        top_p: 0.95,
        seed: 42,
        frequency_penalty: 0.3,
        repetition_penalty: 1.1,
        ..SamplingParams::default()
    };
    let texts = |mode: ParallelMode| -> Vec<Vec<u32>> {
        let handle = EngineHandle::spawn(build(&checkpoint, &config(mode)).engine);
        let prompt = prompts(&golden).remove(0);
        let request = Request { n: 3, sampling: sampling.clone(), ..greedy(&prompt).0 };
        let run = handle.generate(request).unwrap();
        handle.shutdown();
        run.choices.into_iter().map(|choice| choice.tokens).collect()
    };
    let solo = texts(ParallelMode::SOLO);
    assert_eq!(texts(ParallelMode { tensor_parallel: 1, pipeline_parallel: 2 }), solo);
    assert_eq!(texts(ParallelMode { tensor_parallel: 2, pipeline_parallel: 2 }), solo);
}
