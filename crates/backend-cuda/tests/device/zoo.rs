//! The zoo through the whole engine on the device, against its float32 golden outputs: in f32 as close as on the
//! CPU, in bf16 as close as bf16 is. Then chunking and company: how far they move results is asserted and printed,
//! as products of another number of tokens are summed in another order.

use crate::support::has_gpu;
use pagemill_backend::DType;
use pagemill_backend_cuda::{Activations, CudaBackend, CudaConfig};
use pagemill_engine::{ChannelSink, EngineConfig, EngineHandle, Generation, Request, SamplingParams, build_engine};
use pagemill_formats::Checkpoint;
use serde_json::Value;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

const NAMES: [&str; 7] = ["llama", "llama3-rope", "llama-yarn", "mistral-swa", "qwen2", "qwen3", "gemma3"];
const GREEDY_TOKENS: usize = 48;

/// How far results may be from the golden ones.
struct Limits {
    /// Of a log-probability among the twenty likeliest.
    logprob: f64,
    /// Greedy tokens may part where the golden margin is below this.
    margin: f64,
    /// Of the document's negative log-likelihood, as a share.
    document: f64,
}

fn limits(activations: Activations) -> Limits {
    match activations {
        Activations::F32 => Limits { logprob: 2e-3, margin: 1e-3, document: 1e-4 },
        Activations::Bf16 => Limits { logprob: 0.25, margin: 0.25, document: 0.01 },
    }
}

/// The tree's zoo, or that of the folder the test is run in (the binary may have travelled).
pub(crate) fn folder(name: &str) -> PathBuf {
    let built = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../testkit/zoo");
    let zoo = if built.exists() { built } else { PathBuf::from("crates/testkit/zoo") };
    zoo.join(name)
}

fn start(name: &str, activations: Activations, kv_dtype: DType, chunk: usize) -> EngineHandle {
    start_on(name, CudaConfig { ordinal: 0, activations, deterministic: false }, kv_dtype, chunk)
}

fn start_on(name: &str, device: CudaConfig, kv_dtype: DType, chunk: usize) -> EngineHandle {
    let checkpoint = Checkpoint::open(&folder(name)).unwrap();
    let backend = Arc::new(CudaBackend::new(device).unwrap());
    let config = EngineConfig {
        kv_dtype,
        prefill_chunk_size: chunk,
        max_batch_size: Some(16),
        max_seq_len: Some(1536),
        kv_cache_bytes: Some(64 << 20),
        check_every_step: true,
        ..EngineConfig::default()
    };
    EngineHandle::spawn(build_engine(&checkpoint, backend, &config, &|_| {}).unwrap().engine)
}

fn stop(handle: &EngineHandle) {
    let status = handle.status();
    handle.shutdown();
    assert_eq!(status.workspace_grown, 0, "the warm-up did not cover the largest step");
    assert_eq!(status.stopped, None);
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

pub(crate) fn request(
    prompt: &[u32],
    max_tokens: usize,
    sampling: SamplingParams,
) -> (Request, pagemill_engine::EventReceiver) {
    let (sink, events) = ChannelSink::new(prompt.len() + max_tokens + 8);
    let request = Request {
        prompt: prompt.to_vec(),
        max_tokens,
        n: 1,
        sampling,
        priority: 0,
        cache_salt: None,
        sink: Box::new(sink),
    };
    (request, events)
}

fn greedy(logprobs: Option<u32>) -> SamplingParams {
    SamplingParams { logprobs, ..SamplingParams::default() }
}

fn generate(handle: &EngineHandle, prompt: &[u32], max_tokens: usize, sampling: SamplingParams) -> Generation {
    handle.generate(request(prompt, max_tokens, sampling).0).unwrap()
}

/// Checks a golden prompt; gives the largest difference of a log-probability.
fn check_prompt(name: &str, prompt: &Value, result: &Generation, limits: &Limits) -> f64 {
    let completion = &result.choices[0];
    let mut worst = 0.0f64;
    for entry in prompt["top20_logprobs_after_prompt"].as_array().unwrap() {
        let (id, want) = (entry[0].as_u64().unwrap() as u32, entry[1].as_f64().unwrap());
        // A token at the edge of the twenty may have been pushed out by one as likely.
        let top = &completion.logprobs[0].top;
        let got = top.iter().find(|(token, _)| *token == id).or(top.last()).unwrap().1;
        worst = worst.max((f64::from(got) - want).abs());
    }
    assert!(worst < limits.logprob, "{name}, {}: log-probabilities differ by {worst}", prompt["text"]);
    check_tokens(name, prompt, &completion.tokens, limits);
    worst
}

/// Greedy tokens are the golden ones up to where two were about as likely.
fn check_tokens(name: &str, prompt: &Value, tokens: &[u32], limits: &Limits) {
    let margins: Vec<f64> = prompt["greedy_margin"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
    for (at, (got, want)) in tokens.iter().zip(ids(&prompt["greedy_ids"])).enumerate() {
        if *got != want {
            let margin = margins[at];
            assert!(margin <= limits.margin, "{name}: token {at} is {got}, not {want} (margin {margin})");
            break; // From here on the texts part rightly.
        }
    }
    assert_eq!(tokens.len(), GREEDY_TOKENS);
}

fn check_document(name: &str, golden: &Value, handle: &EngineHandle, limits: &Limits) -> f64 {
    let document = ids(&golden["document"]["ids"]);
    let sampling = SamplingParams { prompt_logprobs: Some(0), ..SamplingParams::default() };
    let score = generate(handle, &document, 0, sampling);
    let nll: f64 = score.prompt_logprobs.iter().map(|entry| -f64::from(entry.logprob)).sum();
    let want = golden["document"]["sum_nll"].as_f64().unwrap();
    let error = (nll - want).abs() / want;
    assert!(error < limits.document, "{name}: document NLL {nll}, golden {want}");
    error
}

/// Golden prompts twice (the second time every decode step is a recorded one) and the document.
fn check_golden(activations: Activations, kv_dtype: DType) {
    if !has_gpu() {
        return;
    }
    let limits = limits(activations);
    for name in NAMES {
        let golden: Value = serde_json::from_slice(&std::fs::read(folder(name).join("golden.json")).unwrap()).unwrap();
        let handle = start(name, activations, kv_dtype, 512);
        let mut worst = 0.0f64;
        for prompt in golden["prompts"].as_array().unwrap() {
            let first = generate(&handle, &ids(&prompt["ids"]), GREEDY_TOKENS, greedy(Some(20)));
            worst = worst.max(check_prompt(name, prompt, &first, &limits));
            // Without log-probabilities the device chooses tokens itself.
            let again = generate(&handle, &ids(&prompt["ids"]), GREEDY_TOKENS, greedy(None));
            check_tokens(&format!("{name}, recorded"), prompt, &again.choices[0].tokens, &limits);
            // In bf16 a prefix hit is another cut of the prompt, and rounds elsewhere.
            if activations == Activations::F32 {
                assert_eq!(again.choices[0].tokens, first.choices[0].tokens, "{name}: recorded steps differ");
            }
        }
        let document = check_document(name, &golden, &handle, &limits);
        stop(&handle);
        let line =
            format!("{name} {activations:?} KV {kv_dtype}: log-probability {worst:.2e}, document {document:.2e}");
        writeln!(std::io::stderr(), "{line}").unwrap();
    }
}

#[test]
fn golden_in_f32() {
    check_golden(Activations::F32, DType::F32);
}

#[test]
fn golden_in_bf16() {
    check_golden(Activations::Bf16, DType::F16);
}

/// The largest difference of a reported log-probability up to where tokens part.
fn distance(a: &Generation, b: &Generation) -> (f64, bool) {
    let (a, b) = (&a.choices[0], &b.choices[0]);
    let mut worst = 0.0f64;
    for at in 0..a.tokens.len().min(b.tokens.len()) {
        worst = worst.max((f64::from(a.logprobs[at].logprob) - f64::from(b.logprobs[at].logprob)).abs());
        if a.tokens[at] != b.tokens[at] {
            return (worst, false);
        }
    }
    (worst, true)
}

/// Sixteen pieces of a model's document, of 1 to 200 tokens.
fn sixteen_prompts(name: &str) -> Vec<Vec<u32>> {
    let golden: Value = serde_json::from_slice(&std::fs::read(folder(name).join("golden.json")).unwrap()).unwrap();
    let document = ids(&golden["document"]["ids"]);
    (0..16).map(|i| document[i * 40..i * 40 + [1, 15, 16, 17, 63, 64, 65, 200][i % 8]].to_vec()).collect()
}

/// One after the other.
fn each_alone(handle: &EngineHandle, prompts: &[Vec<u32>]) -> Vec<Generation> {
    prompts.iter().map(|prompt| generate(handle, prompt, 24, greedy(Some(1)))).collect()
}

/// All at once.
fn all_together(handle: &EngineHandle, prompts: &[Vec<u32>]) -> Vec<Generation> {
    let submit = |prompt: &Vec<u32>| {
        let (request, events) = request(prompt, 24, greedy(Some(1)));
        handle.submit(request).unwrap();
        events
    };
    let ears: Vec<_> = prompts.iter().map(submit).collect();
    ears.iter().map(|events| events.gather(1).unwrap()).collect()
}

/// Sixteen prompts alone, in chunks of seven, and all at once.
fn check_company(activations: Activations, kv_dtype: DType, most: f64) {
    if !has_gpu() {
        return;
    }
    for name in ["llama", "mistral-swa", "qwen3", "gemma3"] {
        let prompts = sixteen_prompts(name);
        let handle = start(name, activations, kv_dtype, 512);
        let alone = each_alone(&handle, &prompts);
        let together = all_together(&handle, &prompts);
        stop(&handle);
        let handle = start(name, activations, kv_dtype, 7);
        let chunked = each_alone(&handle, &prompts);
        stop(&handle);
        for (what, others) in [("together", &together), ("in chunks of 7", &chunked)] {
            let distances: Vec<(f64, bool)> = alone.iter().zip(others).map(|(a, b)| distance(a, b)).collect();
            let worst = distances.iter().map(|(worst, _)| *worst).fold(0.0, f64::max);
            let parted = distances.iter().filter(|(_, same)| !same).count();
            let line = format!("{name} {activations:?} {what}: log-probability {worst:.2e}, {parted} of 16 texts part");
            writeln!(std::io::stderr(), "{line}").unwrap();
            assert!(worst < most, "{line}");
        }
    }
}

/// A deterministic device: the same tokens and the same bits of their log-probabilities alone, again after prefix
/// hits, together, in chunks of seven, together in such chunks, and in chunks of one, whose steps compute the last
/// layer for every row.
#[test]
fn company_changes_no_bit_of_a_deterministic_device() {
    if !has_gpu() {
        return;
    }
    let bits = |results: &[Generation]| -> Vec<Vec<(u32, u32)>> {
        let of_one = |result: &Generation| {
            let choice = &result.choices[0];
            choice.tokens.iter().zip(&choice.logprobs).map(|(&token, entry)| (token, entry.logprob.to_bits())).collect()
        };
        results.iter().map(of_one).collect()
    };
    for (activations, kv_dtype) in
        [(Activations::Bf16, DType::F16), (Activations::Bf16, DType::BF16), (Activations::F32, DType::F32)]
    {
        for name in NAMES {
            let prompts = sixteen_prompts(name);
            let device = CudaConfig { ordinal: 0, activations, deterministic: true };
            let handle = start_on(name, device, kv_dtype, 512);
            let alone = bits(&each_alone(&handle, &prompts));
            let again = bits(&each_alone(&handle, &prompts));
            let together = bits(&all_together(&handle, &prompts));
            stop(&handle);
            let handle = start_on(name, device, kv_dtype, 7);
            let together_chunked = bits(&all_together(&handle, &prompts));
            let chunked = bits(&each_alone(&handle, &prompts));
            stop(&handle);
            let handle = start_on(name, device, kv_dtype, 1);
            let one_by_one = bits(&all_together(&handle, &prompts));
            stop(&handle);
            assert!(alone.iter().all(|tokens| !tokens.is_empty()));
            for (what, others) in [
                ("after prefix hits", again),
                ("together", together),
                ("in chunks of 7", chunked),
                ("together in chunks of 7", together_chunked),
                ("together in chunks of 1", one_by_one),
            ] {
                let parted: Vec<usize> = (0..prompts.len()).filter(|&idx| alone[idx] != others[idx]).collect();
                assert!(parted.is_empty(), "{name} {activations:?} over {kv_dtype}, {what}: {parted:?} differ");
            }
        }
    }
}

#[test]
fn company_in_f32() {
    check_company(Activations::F32, DType::F32, 2e-3);
}

#[test]
fn company_in_bf16() {
    check_company(Activations::Bf16, DType::F16, 0.25);
}
