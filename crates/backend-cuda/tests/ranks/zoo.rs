//! The zoo over two GPUs, tensor and pipeline parallel, against its float32 golden outputs and against one GPU.

use crate::support::{alone, say, world};
use pagemill_backend::{DType, SoloCollective};
use pagemill_backend_cuda::{Activations, CudaBackend, CudaConfig};
use pagemill_engine::{
    ChannelSink, EngineConfig, EngineHandle, Generation, ParallelMode, RankContext, Request, SamplingParams,
    build_engine_on,
};
use pagemill_formats::Checkpoint;
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;

const NAMES: [&str; 7] = ["llama", "llama3-rope", "llama-yarn", "mistral-swa", "qwen2", "qwen3", "gemma3"];
const GREEDY_TOKENS: usize = 48;
/// How far a log-probability may be from the golden one, and how close two tokens are that may change places.
const LIMITS: [(Activations, DType, f64, f64); 2] =
    [(Activations::F32, DType::F32, 2e-3, 1e-3), (Activations::Bf16, DType::F16, 0.25, 0.25)];

/// The tree's zoo, or that of the folder the test is run in (the binary may have travelled).
fn folder(name: &str) -> PathBuf {
    let built = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../testkit/zoo");
    let zoo = if built.exists() { built } else { PathBuf::from("crates/testkit/zoo") };
    zoo.join(name)
}

/// An engine over `mode`, or `None` where there is no GPU or no NCCL.
fn start(name: &str, mode: ParallelMode, activations: Activations, kv_dtype: DType) -> Option<EngineHandle> {
    let checkpoint = Checkpoint::open(&folder(name)).unwrap();
    let contexts = if mode == ParallelMode::SOLO {
        let backend = Arc::new(CudaBackend::new(CudaConfig { ordinal: 0, activations, deterministic: false }).unwrap());
        vec![RankContext { backend, collective: Arc::new(SoloCollective) }]
    } else {
        let ranks = world(mode.pipeline_parallel, mode.tensor_parallel, activations)?;
        ranks.into_iter().map(|rank| RankContext { backend: rank.backend, collective: rank.collective }).collect()
    };
    let config = EngineConfig {
        kv_dtype,
        max_batch_size: Some(16),
        max_seq_len: Some(1536),
        kv_cache_bytes: Some(64 << 20),
        check_every_step: true,
        parallel: mode,
        ..EngineConfig::default()
    };
    Some(EngineHandle::spawn(build_engine_on(&checkpoint, contexts, &config, &|_| {}).unwrap().engine))
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn generate(handle: &EngineHandle, prompt: &[u32], logprobs: Option<u32>) -> Generation {
    let (sink, _events) = ChannelSink::new(prompt.len() + GREEDY_TOKENS + 8);
    let request = Request {
        prompt: prompt.to_vec(),
        max_tokens: GREEDY_TOKENS,
        n: 1,
        sampling: SamplingParams { logprobs, ..SamplingParams::default() },
        priority: 0,
        cache_salt: None,
        sink: Box::new(sink),
    };
    handle.generate(request).unwrap()
}

/// Greedy tokens are `want` up to where two were about as likely.
fn check_tokens(what: &str, prompt: &Value, got: &[u32], want: &[u32], most: f64) {
    let margins: Vec<f64> = prompt["greedy_margin"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
    assert_eq!(got.len(), GREEDY_TOKENS, "{what}");
    if let Some(at) = got.iter().zip(want).position(|(got, want)| got != want) {
        assert!(margins[at] <= most, "{what}: token {at} is {}, not {} (margin {})", got[at], want[at], margins[at]);
    }
}

fn check_over(mode: ParallelMode) {
    let _alone = alone();
    for (activations, kv_dtype, most, margin) in LIMITS {
        for name in NAMES {
            let golden: Value =
                serde_json::from_slice(&std::fs::read(folder(name).join("golden.json")).unwrap()).unwrap();
            let Some(handle) = start(name, mode, activations, kv_dtype) else { return };
            let Some(alone) = start(name, ParallelMode::SOLO, activations, kv_dtype) else { return };
            let (mut worst, mut num_same, mut num_prompts) = (0.0f64, 0, 0);
            for prompt in golden["prompts"].as_array().unwrap() {
                let what = format!("{name} {activations:?} over {mode}");
                let text = ids(&prompt["ids"]);
                let first = generate(&handle, &text, Some(20));
                for entry in prompt["top20_logprobs_after_prompt"].as_array().unwrap() {
                    let (id, want) = (entry[0].as_u64().unwrap() as u32, entry[1].as_f64().unwrap());
                    let top = &first.choices[0].logprobs[0].top;
                    let got = top.iter().find(|(token, _)| *token == id).or(top.last()).unwrap().1;
                    worst = worst.max((f64::from(got) - want).abs());
                }
                check_tokens(&what, prompt, &first.choices[0].tokens, &ids(&prompt["greedy_ids"]), margin);
                // By now decode steps are recorded ones.
                let again = generate(&handle, &text, None);
                check_tokens(&what, prompt, &again.choices[0].tokens, &ids(&prompt["greedy_ids"]), margin);
                let solo = generate(&alone, &text, None);
                check_tokens(&what, prompt, &again.choices[0].tokens, &solo.choices[0].tokens, margin);
                num_same += usize::from(again.choices[0].tokens == solo.choices[0].tokens);
                num_prompts += 1;
            }
            for handle in [handle, alone] {
                let status = handle.status();
                handle.shutdown();
                assert_eq!(status.workspace_grown, 0, "{name}: the warm-up did not cover the largest step");
                assert_eq!(status.stopped, None);
            }
            say(&format!(
                "{name} {activations:?} over {mode}: log-probability {worst:.2e}, {num_same} of {num_prompts} texts are \
                 one GPU's"
            ));
            assert!(worst < most, "{name}: log-probabilities differ by {worst}");
        }
    }
}

#[test]
fn tensor_parallel() {
    check_over(ParallelMode { tensor_parallel: 2, pipeline_parallel: 1 });
}

#[test]
fn pipeline_parallel() {
    check_over(ParallelMode { tensor_parallel: 1, pipeline_parallel: 2 });
}
