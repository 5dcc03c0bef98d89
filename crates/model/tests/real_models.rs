//! SmolLM2 and Gemma 3 against their exact float32 log-probabilities. Runs where `PAGEMILL_TEST_MODELS`
//! names a folder with the two GGUF files and the reference outputs are at hand; else says so.
#![allow(clippy::unwrap_used)] // tests

mod harness;

use harness::{Rig, argmax, ids};
use pagemill_backend::{ActivationMode, DType};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The model's file and its reference, where both are there.
fn inputs(file: &str, reference: &str) -> Option<(PathBuf, Value)> {
    let Some(folder) = std::env::var_os("PAGEMILL_TEST_MODELS") else {
        println!("SKIPPED {file}: PAGEMILL_TEST_MODELS is not set");
        return None;
    };
    let path = Path::new(&folder).join(file);
    let reference = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/reference").join(reference);
    if !path.exists() || !reference.exists() {
        println!("SKIPPED {file}: {} or {} is not there", path.display(), reference.display());
        return None;
    }
    Some((path, serde_json::from_slice(&std::fs::read(reference).unwrap()).unwrap()))
}

/// The largest error among the top ten, over all prompts, with activations of one kind.
fn worst_error(path: &Path, reference: &Value, activations: ActivationMode) -> f64 {
    let mut worst: f64 = 0.0;
    for prompt in reference["prompts"].as_array().unwrap() {
        let tokens = ids(&prompt["prompt_ids"]);
        let mut rig = Rig::new(path, activations, DType::F32, tokens.len());
        let mut sequence = rig.sequence();
        let last = rig.logprobs(&mut sequence, &tokens, 512).pop().unwrap();
        let top = prompt["top10_f32"].as_array().unwrap();
        for entry in top {
            let id = usize::try_from(entry["id"].as_u64().unwrap()).unwrap();
            worst = worst.max((last[id] - entry["logprob"].as_f64().unwrap()).abs());
        }
        if activations == ActivationMode::F32 {
            assert_eq!(u64::from(argmax(&last)), top[0]["id"].as_u64().unwrap(), "{}", prompt["prompt"]);
        }
    }
    worst
}

fn check(file: &str, reference: &str) {
    let Some((path, reference)) = inputs(file, reference) else {
        return;
    };
    let exact = worst_error(&path, &reference, ActivationMode::F32);
    let quantised = worst_error(&path, &reference, ActivationMode::Int8);
    println!("{file}: largest error {exact:.5} with f32 activations, {quantised:.5} with int8");
    assert!(exact < 0.02, "{file}: {exact} with f32 activations");
    assert!(quantised < 0.2, "{file}: {quantised} with int8 activations");
}

#[test]
fn smollm2() {
    check("SmolLM2-135M-Instruct.Q4_1.gguf", "top10_f32_smollm2-135m-instruct-q4_1.json");
}

#[test]
fn gemma3() {
    check("gemma-3-270m-q4_k_m.gguf", "top10_f32_gemma-3-270m-q4_k_m.json");
}
