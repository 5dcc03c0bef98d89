//! `plan` for hardware that is not here: flags reach the plan, and what cannot be is refused with one sentence.

use crate::binary::{assert_refused, run, zoo};
use serde_json::Value;

fn plan(arguments: &[&str]) -> Value {
    let said = run(&[&["plan", "--json"], arguments].concat());
    assert_eq!(said.code, Some(0), "{}", said.err);
    serde_json::from_str(&said.out).unwrap()
}

const SIXTEEN_A100: [&str; 7] = ["--tp", "8", "--pp", "2", "--device", "a100-80g", "llama-2-70b"];

#[test]
fn sixteen_a100s_as_the_manual_says() {
    let said = run(&[&["plan"], &SIXTEEN_A100[..]].concat());
    assert_eq!(said.code, Some(0), "{}", said.err);
    for part in ["68,976,648,192 parameters", "tensor parallel 8 × pipeline parallel 2", "all-reduce  160 × 16.00 KiB"]
    {
        assert!(said.out.contains(part), "{part:?} is not in {}", said.out);
    }
    let plan = plan(&SIXTEEN_A100);
    assert_eq!(plan["ranks"].as_array().unwrap().len(), 2);
    assert_eq!(plan["ranks"][0]["kv_bytes_per_token"], 2 * 40 * 128 * 2);
    assert_eq!(plan["traffic"]["all_reduces"], 160);
    assert!(plan["micro_batches_chosen"].as_u64().unwrap() >= 4);
    assert!(plan["decode"][0]["tokens_per_s_per_request"].as_f64().unwrap() > 45.0);
}

#[test]
fn every_flag_reaches_the_plan() {
    let flags = [
        "--dtype",
        "fp8",
        "--kv-cache-dtype",
        "fp8",
        "--max-seq-len",
        "2048",
        "--max-batch-size",
        "32",
        "--prompt-tokens",
        "100",
        "--gen-tokens",
        "50",
        "--batch-sizes",
        "2,16",
        "--gpus-per-host",
        "4",
        "--tokens-per-second",
        "10",
        "--memory",
        "70GiB",
        "--block-size",
        "32",
        "--prefill-chunk-size",
        "256",
    ];
    let plan = plan(&[&SIXTEEN_A100[..], &flags].concat());
    assert_eq!(plan["weights"]["name"], "fp8");
    assert_eq!(plan["kv_dtype"], "fp8");
    assert_eq!((plan["max_seq_len"].as_u64(), plan["limits"]["max_batch_size"].as_u64()), (Some(2048), Some(32)));
    assert_eq!((plan["prompt_tokens"].as_u64(), plan["gen_tokens"].as_u64()), (Some(100), Some(50)));
    let batches: Vec<u64> =
        plan["decode"].as_array().unwrap().iter().map(|row| row["batch"].as_u64().unwrap()).collect();
    assert_eq!(batches, [2, 16]);
    assert_eq!(plan["traffic"]["hosts_per_stage"], 2);
    assert_eq!(plan["device"]["memory_bytes"], 70u64 << 30);
    assert_eq!(
        (plan["limits"]["block_size"].as_u64(), plan["prefill"]["chunk_tokens"].as_u64()),
        (Some(32), Some(256))
    );
    assert!(plan["wished"]["step"]["batch"].as_u64().unwrap() >= 1);
}

#[test]
fn a_model_that_is_here_and_its_config_agree() {
    let folder = zoo("gemma3").display().to_string();
    let config = zoo("gemma3").join("config.json").display().to_string();
    let (here, sizes) = (plan(&[&folder, "--device", "h200"]), plan(&[&config, "--device", "h200"]));
    assert_eq!(here["parameters"], sizes["parameters"]);
    assert_eq!(here["ranks"], sizes["ranks"]);
    assert_eq!(here["weights"]["name"], "as stored");
    // Without other hardware, a model that is here has the plan of this machine, which counts the same bytes.
    let llama = zoo("llama").display().to_string();
    let (local, elsewhere) = (plan(&[&llama]), plan(&[&llama, "--device", "h200"]));
    assert_eq!(local["weight_bytes"], elsewhere["ranks"][0]["weight_bytes"]);
    let block_bytes = local["block_bytes"].as_u64().unwrap();
    let token_bytes = elsewhere["ranks"][0]["kv_bytes_per_token"].as_u64().unwrap();
    assert_eq!(block_bytes, token_bytes * local["block_size"].as_u64().unwrap());
}

#[test]
fn a_cpu_is_measured_or_given() {
    let given =
        plan(&["smollm2-135m", "--device", "cpu", "--dtype", "q4_1", "--memory-bandwidth", "20GB", "--flops", "2e11"]);
    assert_eq!(given["device"]["memory_bytes_per_s"], 20e9);
    let step = given["decode"][0]["step_s"].as_f64().unwrap();
    assert!(step > 84e6 / 20e9 && step < 0.1, "{step}");
    let measured = plan(&["qwen2.5-0.5b", "--device", "cpu", "--memory", "32GiB"]);
    assert!(measured["device"]["memory_bytes_per_s"].as_f64().unwrap() > 1e8);
}

#[test]
fn what_cannot_be_is_one_sentence() {
    let cases: [(&[&str], &[&str]); 12] = [
        (&["llama-2-70b", "--device", "tpu"], &["device = tpu", "a100-80g", "rtx-4090", "cpu"]),
        (&["llama-9", "--device", "h200"], &["llama-9", "llama-2-70b", "smollm2-135m"]),
        (&["llama-2-70b", "--device", "h200", "--dtype", "int3"], &["dtype = int3", "q4_k"]),
        (&["llama-2-70b", "--device", "h200", "--kv-dtype", "int2"], &["kv_dtype = int2", "fp8"]),
        (&["llama-2-70b", "--device", "l4"], &["does not fit", "GiB are missing", "--tp"]),
        (&["llama-2-70b", "--tp", "12", "--device", "h200"], &["tensor_parallel = 12", "1 to 8, 16, 32, 64"]),
        (&["llama-2-7b", "--pp", "33", "--device", "h200"], &["pipeline_parallel = 33", "1..=32"]),
        (&["llama-2-7b", "--tp", "0", "--device", "h200"], &["tensor_parallel = 0"]),
        (&["llama-2-7b", "--max-seq-len", "9999", "--device", "h200"], &["max_seq_len = 9999", "4096"]),
        (&["llama-2-7b", "--flops", "1e12", "--device", "h200"], &["flops", "only cpu"]),
        (&["llama-2-7b", "--tokens-per-second", "-1", "--device", "h200"], &["tokens_per_second = -1"]),
        (&["llama-2-7b", "--block-size", "17", "--device", "h200"], &["block_size = 17"]),
    ];
    for (arguments, parts) in cases {
        assert_refused(&run(&[&["plan"], arguments].concat()), parts);
    }
}

#[test]
fn shared_configurations_are_planned() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/configs");
    let Ok(entries) = std::fs::read_dir(&folder) else {
        eprintln!("{} is not there: nothing to plan", folder.display());
        return;
    };
    for entry in entries.flatten() {
        let config = entry.path().display().to_string();
        let plan = plan(&[&config, "--device", "h200"]);
        let is_fp8 = config.contains("fp8");
        assert_eq!(plan["weights"]["name"], if is_fp8 { "fp8" } else { "bf16" }, "{config}");
        assert!(plan["decode"][0]["tokens_per_s"].as_f64().unwrap() > 10.0, "{config}");
    }
}
