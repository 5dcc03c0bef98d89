//! `inspect` and `plan`: what they show is what is in the file, and their sums are right.

use crate::binary::{assert_refused, run, zoo};
use pagemill_formats::testing::GgufWriter;
use serde_json::Value;

fn plan(flags: &[&str]) -> Value {
    let model = zoo("llama").display().to_string();
    let said = run(&[&["plan", &model, "--json"], flags].concat());
    assert_eq!(said.code, Some(0), "{}", said.err);
    serde_json::from_str(&said.out).unwrap()
}

#[test]
fn plan_counts_as_by_hand() {
    // The zoo's llama: 4 layers, 2 KV heads of 32, BF16 weights.
    let (layers, kv_heads, head_dim) = (4u64, 2u64, 32u64);
    for (dtype, elem_bytes) in [("f16", 2u64), ("f32", 4)] {
        let flags = ["--kv-dtype", dtype, "--max-seq-len", "1000", "--block-size", "32", "--kv-cache-bytes", "4MiB"];
        let plan = plan(&flags);
        let per_token = 2 * layers * kv_heads * head_dim * elem_bytes;
        assert_eq!(plan["block_bytes"], 32 * per_token);
        assert_eq!(plan["num_blocks"], 4 * 1024 * 1024 / (32 * per_token));
        assert_eq!(plan["kv_sequence_bytes"], 1000 * per_token);
        // A sequence takes whole blocks: 1000 tokens are 32 blocks of 32.
        assert_eq!(plan["full_length_sequences"], 4 * 1024 * 1024 / (32 * 32 * per_token));
        assert_eq!((plan["max_seq_len"].as_u64(), plan["block_size"].as_u64()), (Some(1000), Some(32)));
    }
    let (hidden, intermediate, vocab) = (128u64, 256u64, 512u64);
    let layer = 2 * hidden * hidden + 2 * hidden * kv_heads * head_dim + 3 * hidden * intermediate + 2 * hidden;
    let parameters = 2 * vocab * hidden + layers * layer + hidden;
    let plan = plan(&[]);
    assert_eq!(plan["parameters"], parameters);
    assert_eq!(plan["weight_bytes"], 2 * parameters);
}

#[test]
fn plan_fits_the_memory_it_is_given() {
    let plan = plan(&["--memory", "64MiB"]);
    let bytes = |key: &str| plan[key].as_u64().unwrap();
    assert_eq!(bytes("available_bytes"), 64 << 20);
    let taken = bytes("weight_bytes") + bytes("workspace_bytes") + bytes("reserve_bytes") + bytes("kv_pool_bytes");
    assert!(taken <= 64 << 20, "{plan}");
    let model = zoo("llama").display().to_string();
    assert_refused(&run(&["plan", &model, "--memory", "1KiB"]), &["not enough memory"]);
    assert_refused(&run(&["plan", &model, "--memory", "lots"]), &["memory = lots"]);
}

#[test]
fn plan_prints_the_formula() {
    let said = run(&["plan", &zoo("llama").display().to_string(), "--max-seq-len", "2048"]);
    assert!(said.out.contains("2 × 4 layers × 2 heads × 32 × 2048 tokens × 2 bytes"), "{}", said.out);
    assert_eq!(said.out.matches('×').count(), 5, "the formula stands there once: {}", said.out);
}

#[test]
fn inspect_shows_a_folder() {
    let said = run(&["inspect", &zoo("gemma3").display().to_string(), "--tensors", "--template"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    for part in [
        "Gemma3ForCausalLM",
        "sliding_window = 64",
        "41 tensors",
        "BF16",
        "model.layers.0.self_attn.q_proj.weight",
        "tokenizer: 512 tokens",
        "<|im_start|>",
        "3 layers, hidden 128",
        "eos_token_id = [2]",
        "KV pool",
    ] {
        assert!(said.out.contains(part), "{part:?} is not in {}", said.out);
    }
}

fn inspect_gguf(writer: GgufWriter) -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiny.gguf");
    std::fs::write(&file, writer.build()).unwrap();
    let said = run(&["inspect", "--tensors", &file.display().to_string()]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    said.out
}

#[test]
fn inspect_shows_a_gguf_file() {
    let out = inspect_gguf(
        GgufWriter::default()
            .str("general.architecture", "llama")
            .str("general.name", "line\nbreak \u{1b}[31m")
            .strings("tokenizer.ggml.tokens", &["a", "b"])
            .f32_tensor("token_embd.weight", &[4, 32], &[0.5; 128]),
    );
    for part in
        ["GGUF version 3", "general.architecture = \"llama\"", "[2 items]", "1 tensors", "token_embd.weight", "[4, 32]"]
    {
        assert!(out.contains(part), "{part:?} is not in {out}");
    }
    assert!(out.contains("line\\nbreak") && !out.contains('\u{1b}'), "a file's text cannot steer the terminal: {out}");
}

#[test]
fn inspect_shows_what_it_cannot_run_and_says_why() {
    // Type 20 is IQ4_NL: 18 bytes for 32 values.
    let iq4 = |architecture: &str| {
        GgufWriter::default()
            .str("general.architecture", architecture)
            .u32("llama.block_count", 1)
            .u32("llama.context_length", 64)
            .u32("llama.embedding_length", 32)
            .u32("llama.feed_forward_length", 32)
            .u32("llama.attention.head_count", 1)
            .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
            .tensor("token_embd.weight", 20, &[4, 32], vec![0; 4 * 18])
    };
    let out = inspect_gguf(iq4("llama"));
    assert!(out.contains("IQ4_NL") && out.contains("this version cannot run it: "), "{out}");
    let out = inspect_gguf(iq4("megatron9"));
    assert!(out.contains("this version cannot run it: ") && out.contains("megatron9"), "{out}");
}
