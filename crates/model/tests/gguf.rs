//! The same models as GGUF files: rewritten the way llama.cpp's converter does it (q and k permuted for
//! Llama, `1 + w` norms for Gemma, its own keys and names), they must meet the same goldens.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)] // tests

mod harness;

use harness::{check_goldens, zoo};
use pagemill_backend::DType;
use pagemill_formats::testing::GgufWriter;
use pagemill_formats::{Checkpoint, TensorType, Weights};
use pagemill_model::{
    KvKind, ModelError, ModelSpec, ParallelMode, Stage, matrix_types, plan_stages, plan_stages_by, read_spec,
};
use std::path::PathBuf;

const OUTER: [(&str, &str); 3] =
    [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")];
const LLAMA: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// What the converter does to a tensor of one architecture.
#[derive(Clone, Copy, PartialEq)]
enum Family {
    Llama,
    Qwen,
    Gemma,
}

fn gguf_name(hf: &str, family: Family) -> String {
    let (module, kind) = hf.rsplit_once('.').unwrap();
    if let Some((_, outer)) = OUTER.iter().find(|(name, _)| *name == module) {
        return format!("{outer}.{kind}");
    }
    let (layer, module) = module.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
    let inner = match (family, module) {
        (Family::Gemma, "post_attention_layernorm") => "post_attention_norm",
        _ => LLAMA.iter().find(|(name, _)| *name == module).unwrap().1,
    };
    format!("blk.{layer}.{inner}.{kind}")
}

fn floats(weights: &Weights, name: &str) -> Vec<f32> {
    let (info, tensor_type) = weights.loadable(name).unwrap();
    let mut bytes = vec![0; info.num_bytes() as usize];
    weights.read_all(name, &mut bytes).unwrap();
    let halves = bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match tensor_type {
        TensorType::F16 => halves.map(|b| half::f16::from_le_bytes(b).to_f32()).collect(),
        TensorType::BF16 => halves.map(|b| half::bf16::from_le_bytes(b).to_f32()).collect(),
        TensorType::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
        other => panic!("{other:?}"),
    }
}

/// Interleaves the halves of each head: row `j * E/2 + i` of a head becomes row `2 * i + j`.
fn permuted(values: &[f32], head_dim: usize, row_len: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(values.len());
    for head in values.chunks_exact(head_dim * row_len) {
        for i in 0..head_dim / 2 {
            for j in 0..2 {
                let row = j * head_dim / 2 + i;
                out.extend_from_slice(&head[row * row_len..(row + 1) * row_len]);
            }
        }
    }
    out
}

/// The keys and tensors of the zoo model `name` as GGUF.
fn convert(name: &str, architecture: &str, family: Family) -> GgufWriter {
    let checkpoint = Checkpoint::open(&zoo(name)).unwrap();
    let (spec, weights) = (read_spec(&checkpoint).unwrap(), checkpoint.weights());
    let mut writer = keys(architecture, &spec);
    for info in weights.tensors() {
        let mut values = floats(weights, info.name());
        let row_len = if info.shape().len() == 2 { info.num_cols() } else { 1 };
        let is_qk = info.name().contains("q_proj") || info.name().contains("k_proj");
        if family == Family::Llama && is_qk {
            values = permuted(&values, spec.head_dim, row_len);
        }
        if family == Family::Gemma && info.name().ends_with("norm.weight") {
            values.iter_mut().for_each(|x| *x += 1.0);
        }
        let shape: Vec<u64> = info.shape().iter().map(|dim| *dim as u64).collect();
        writer = writer.f32_tensor(&gguf_name(info.name(), family), &shape, &values);
    }
    writer
}

fn keys(architecture: &str, spec: &ModelSpec) -> GgufWriter {
    let key = |suffix: &str| format!("{architecture}.{suffix}");
    GgufWriter::default()
        .str("general.architecture", architecture)
        .u32(&key("block_count"), spec.num_layers as u32)
        .u32(&key("context_length"), spec.max_seq_len as u32)
        .u32(&key("embedding_length"), spec.hidden_size as u32)
        .u32(&key("feed_forward_length"), spec.intermediate_size as u32)
        .u32(&key("attention.head_count"), spec.num_heads as u32)
        .u32(&key("attention.head_count_kv"), spec.num_kv_heads as u32)
        .u32(&key("attention.key_length"), spec.head_dim as u32)
        .u32(&key("attention.value_length"), spec.head_dim as u32)
        .f32(&key("attention.layer_norm_rms_epsilon"), 1e-6)
}

/// Writes the file; it lives as long as the folder.
fn write(writer: &GgufWriter) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, writer.build()).unwrap();
    (folder, path)
}

fn check(name: &str, writer: &GgufWriter) {
    let (_folder, path) = write(writer);
    check_goldens(name, &path);
}

#[test]
fn llama() {
    let writer = convert("llama", "llama", Family::Llama);
    check("llama", &writer.f32("llama.rope.freq_base", 1e4).u32("llama.rope.dimension_count", 32));
}

#[test]
fn llama_with_rope_divisors() {
    // As the converter works them out from factor 8, low 1, high 4, original 512, base 500000.
    let divisors: Vec<f32> = (0..16)
        .map(|i| {
            let wavelength = 2.0 * std::f64::consts::PI * 500_000f64.powf(f64::from(i) / 16.0);
            if wavelength < 512.0 / 4.0 {
                1.0
            } else if wavelength > 512.0 {
                8.0
            } else {
                let kept = (512.0 / wavelength - 1.0) / 3.0;
                (1.0 / ((1.0 - kept) / 8.0 + kept)) as f32
            }
        })
        .collect();
    let writer = convert("llama3-rope", "llama", Family::Llama).f32("llama.rope.freq_base", 5e5).f32_tensor(
        "rope_freqs.weight",
        &[16],
        &divisors,
    );
    check("llama3-rope", &writer);
}

#[test]
fn llama_with_yarn_and_biases() {
    let writer = convert("llama-yarn", "llama", Family::Llama)
        .f32("llama.rope.freq_base", 1e4)
        .str("llama.rope.scaling.type", "yarn")
        .f32("llama.rope.scaling.factor", 4.0)
        .u32("llama.rope.scaling.original_context_length", 1024)
        .bool("llama.rope.scaling.finetuned", true);
    check("llama-yarn", &writer);
}

#[test]
fn qwen2() {
    check("qwen2", &convert("qwen2", "qwen2", Family::Qwen).f32("qwen2.rope.freq_base", 1e6));
}

#[test]
fn qwen3() {
    check("qwen3", &convert("qwen3", "qwen3", Family::Qwen).f32("qwen3.rope.freq_base", 1e6));
}

fn gemma() -> GgufWriter {
    convert("gemma3", "gemma3", Family::Gemma)
        .f32("gemma3.rope.freq_base", 1e6)
        .u32("gemma3.attention.sliding_window", 64)
}

#[test]
fn gemma3_with_a_period() {
    check("gemma3", &gemma().u32("gemma3.attention.sliding_window_pattern", 3));
}

#[test]
fn gemma3_with_a_flag_for_each_layer() {
    let writer = gemma().array("gemma3.attention.sliding_window_pattern", 7, 3, vec![1, 1, 0]);
    check("gemma3", &writer.f32("gemma3.rope.freq_base_swa", 1e4));
}

#[test]
fn gemma3_slides_in_five_of_six_layers_unless_told() {
    let (_folder, path) = write(&gemma());
    let spec = read_spec(&Checkpoint::open(&path).unwrap()).unwrap();
    assert_eq!(spec.kv_groups.len(), 1);
    assert_eq!(spec.kv_groups[0].kind, KvKind::SlidingWindow { window: 64 });
}

fn refused(writer: &GgufWriter, expected: &str) {
    let (_folder, path) = write(writer);
    let error: ModelError = harness::load(&path).map(|_| ()).unwrap_err();
    let message = error.to_string();
    assert!(message.contains(expected), "expected {expected:?} in {message:?}");
}

#[test]
fn keys_that_are_not_understood_are_refused_by_name() {
    let llama = || convert("llama", "llama", Family::Llama);
    refused(&llama().u32("llama.expert_count", 8), "llama.expert_count = 8 is not supported");
    refused(&llama().f32("llama.logit_scale", 0.5), "llama.logit_scale = 0.5");
    refused(&llama().u32("llama.attention.sliding_window", 64), "llama.attention.sliding_window = 64");
    refused(&llama().str("llama.rope.scaling.type", "longrope"), "llama.rope.scaling.type = \"longrope\"");
    refused(&llama().str("llama.rope.scaling.type", "linear"), "llama.rope.scaling.factor: missing");
    refused(&llama().u32("llama.rope.dimension_count", 33), "llama.rope.dimension_count");
    refused(&llama().f32("llama.rope.freq_base", f32::NAN), "llama.rope.freq_base");
    refused(&llama().strings("llama.tags", &["x"]), "llama.tags");
    let softcap = gemma().f32("gemma3.attn_logit_softcapping", 50.0);
    refused(&softcap, "gemma3.attn_logit_softcapping = 50");
}

#[test]
fn shapes_that_are_not_computed_are_refused() {
    let checkpoint = Checkpoint::open(&zoo("llama")).unwrap();
    let spec = read_spec(&checkpoint).unwrap();
    let missing = GgufWriter::default().str("general.architecture", "llama").u32("llama.block_count", 4);
    refused(&missing, "llama.attention.head_count: missing");
    refused(&keys("llama", &spec), "llama.block_count: 4 layers in a file of 0 tensors");
    refused(
        &keys("mamba", &spec),
        "architecture \"mamba\" is not supported; supported are llama, qwen2, qwen3, gemma3",
    );
    let other_value = GgufWriter::default()
        .str("general.architecture", "llama")
        .u32("llama.block_count", 1)
        .u32("llama.context_length", 8)
        .u32("llama.embedding_length", 8)
        .u32("llama.feed_forward_length", 8)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-6);
    refused(
        &other_value.clone().u32("llama.attention.head_count", 2).u32("llama.attention.value_length", 8),
        "llama.attention.value_length = 8 is not supported",
    );
    refused(
        &other_value.clone().i32s("llama.attention.head_count", &[2, 4]),
        "llama.attention.head_count: must be one number",
    );
    refused(
        &other_value.u32("llama.attention.head_count", 0),
        "llama.attention.head_count: must be one number above 0",
    );
}

#[test]
fn tensors_are_accounted_for() {
    let llama = || convert("llama", "llama", Family::Llama);
    refused(&llama().f32_tensor("blk.0.attn_sinks.weight", &[4], &[0.0; 4]), "\"blk.0.attn_sinks.weight\": not used");
    refused(
        &llama().f32_tensor("rope_freqs.weight", &[8], &[1.0; 8]),
        "\"rope_freqs.weight\": expected shape [16], got [8]",
    );
    refused(&llama().f32_tensor("rope_freqs.weight", &[16], &[0.0; 16]), "\"rope_freqs.weight\": holds a divisor");
    refused(&gemma().f32_tensor("rope_freqs.weight", &[32], &[1.0; 32]), "\"rope_freqs.weight\": not used");
}

/// A head of another type than the layers counts for the time that its bytes take.
#[test]
fn stages_are_balanced_by_the_cost_of_each_types_bytes() {
    let checkpoint = Checkpoint::open(&zoo("llama")).unwrap();
    let spec = read_spec(&checkpoint).unwrap();
    // 256 KiB of f32 head, and four layers of 18 KiB of Q4_K each.
    let writer = keys("llama", &spec).f32("llama.rope.freq_base", 1e4).f32_tensor(
        "token_embd.weight",
        &[512, 128],
        &vec![0.0; 512 * 128],
    );
    let down = |writer: GgufWriter, layer| {
        writer.tensor(&format!("blk.{layer}.ffn_down.weight"), 12, &[128, 256], vec![0; 128 * 144])
    };
    let (_folder, path) = write(&(0..spec.num_layers).fold(writer, down));
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(matrix_types(&checkpoint), [DType::F32, DType::Q4_K]);
    let mode = ParallelMode { tensor_parallel: 1, pipeline_parallel: 2 };
    let first = |stages: Vec<Stage>| stages[0].layers.len();
    assert_eq!(first(plan_stages(&checkpoint, mode).unwrap()), 3, "the head has the most bytes");
    let dear = |dtype| if dtype == DType::Q4_K { 100 } else { 1 };
    assert_eq!(first(plan_stages_by(&checkpoint, mode, &dear).unwrap()), 2, "but its bytes are cheap");
}

/// Blocks of 256 cannot be cut where two ranks would share one; whatever else divides.
#[test]
fn quantisation_borders_refuse_a_layout() {
    let checkpoint = Checkpoint::open(&zoo("llama")).unwrap();
    let spec = read_spec(&checkpoint).unwrap();
    let with_spec = |spec: &ModelSpec, name: &str, shape: &[u64], bytes: usize| {
        let embedding = vec![0.0; 512 * 128];
        let writer = keys("llama", spec).f32("llama.rope.freq_base", 1e4).f32_tensor(
            "token_embd.weight",
            &[512, 128],
            &embedding,
        );
        let norm = |writer: GgufWriter, layer| {
            writer.f32_tensor(&format!("blk.{layer}.attn_norm.weight"), &[128], &[1.0; 128])
        };
        let writer = (0..spec.num_layers).fold(writer, norm);
        let q4_k = 12;
        write(&writer.tensor(name, q4_k, shape, vec![0; bytes]))
    };
    let with = |name: &str, shape: &[u64], bytes: usize| with_spec(&spec, name, shape, bytes);
    let plan = |path: &PathBuf, tensor_parallel| {
        let mode = ParallelMode { tensor_parallel, pipeline_parallel: 2 };
        plan_stages(&Checkpoint::open(path).unwrap(), mode)
    };
    let (_folder, path) = with("blk.1.ffn_down.weight", &[128, 256], 128 * 144);
    assert_eq!(plan(&path, 1).unwrap().len(), 2);
    assert_eq!(
        plan(&path, 2).unwrap_err().to_string(),
        "tensor_parallel = 2: blk.1.ffn_down.weight: 256 features in pieces of 256 do not cover 2 ranks"
    );
    let (_folder, path) = with("blk.3.attn_output.weight", &[128, 256], 128 * 144);
    assert_eq!(
        plan(&path, 2).unwrap_err().to_string(),
        "tensor_parallel = 2: the 2 heads of 32 features of rank 0 do not end on the blocks of 256 of \
         blk.3.attn_output.weight"
    );
    // Four KV heads with two query heads each over three ranks: 256, 128 and 128 features.
    let wide = ModelSpec { num_heads: 8, num_kv_heads: 4, head_dim: 64, ..spec.clone() };
    let (_folder, path) = with_spec(&wide, "blk.3.attn_output.weight", &[128, 512], 256 * 144);
    assert_eq!(plan(&path, 2).unwrap().len(), 2);
    assert_eq!(
        plan(&path, 3).unwrap_err().to_string(),
        "tensor_parallel = 3: the 2 heads of 64 features of rank 1 do not end on the blocks of 256 of \
         blk.3.attn_output.weight"
    );
}
