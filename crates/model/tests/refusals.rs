//! What must not load: every field, tensor and name that changes the result and is not computed is
//! refused, and the message names it.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)] // tests

mod harness;

use harness::zoo;
use pagemill_formats::testing::SafetensorsWriter;
use pagemill_formats::{Checkpoint, TensorInfo};
use pagemill_model::read_spec;
use serde_json::{Value, json};
use std::path::Path;

/// A copy of a zoo model with fields of its config.json set (null removes one).
fn with_config(name: &str, changes: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(zoo(name)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    std::fs::write(&path, config.to_string()).unwrap();
    folder
}

fn message(path: &Path) -> String {
    match Checkpoint::open(path).map_err(|error| error.to_string()) {
        Err(message) => message,
        Ok(_) => harness::load(path).map(|_| ()).unwrap_err().to_string(),
    }
}

fn refused(name: &str, changes: Value, expected: &str) {
    let folder = with_config(name, &changes);
    let message = message(folder.path());
    assert!(message.contains(expected), "{name} {changes}: expected {expected:?} in {message:?}");
    assert!(message.contains("config.json"), "the file is named: {message:?}");
    let spec = Checkpoint::open(folder.path()).map(|checkpoint| read_spec(&checkpoint).is_err());
    assert!(spec.unwrap_or(true), "read_spec refuses what load refuses: {name} {changes}");
}

fn accepted(name: &str, changes: &Value) {
    let folder = with_config(name, changes);
    if let Err(error) = harness::load(folder.path()) {
        panic!("{name} {changes}: {error}");
    }
}

#[test]
fn unknown_architectures_are_named() {
    let folder = with_config("llama", &json!({"architectures": ["MambaForCausalLM"]}));
    let message = message(folder.path());
    assert!(message.contains("\"MambaForCausalLM\" is not supported"), "{message}");
    assert!(message.contains("LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"), "{message}");
}

#[test]
fn fields_that_change_the_result_are_named() {
    for name in harness::ZOO {
        refused(name, json!({"logit_scale": 0.0625}), "logit_scale = 0.0625");
        refused(name, json!({"quantization_config": {"quant_method": "fp8"}}), "quantization_config = ");
        refused(name, json!({"num_experts": 8}), "num_experts = 8");
        refused(name, json!({"embedding_multiplier": 12.0}), "embedding_multiplier = 12.0");
    }
    refused("llama", json!({"sliding_window": 64}), "sliding_window = 64");
    refused("mistral-swa", json!({"attention_bias": true}), "attention_bias = true");
    refused("gemma3", json!({"attn_logit_softcapping": 50.0}), "attn_logit_softcapping = 50.0");
    refused("gemma3", json!({"use_bidirectional_attention": true}), "use_bidirectional_attention = true");
    refused("gemma3", json!({"final_logit_softcapping": -1.0}), "final_logit_softcapping: -1 must be above 0");
    refused("gemma3", json!({"query_pre_attn_scalar": 0}), "query_pre_attn_scalar");
}

#[test]
fn activations_and_rope_types_are_named() {
    refused("llama", json!({"hidden_act": "relu"}), "hidden_act = relu");
    refused("gemma3", json!({"hidden_activation": "gelu"}), "hidden_activation = gelu");
    let longrope = json!({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}});
    refused("llama", longrope, "rope_parameters.rope_type = \"longrope\"");
    let dynamic = json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}});
    refused("qwen2", dynamic, "rope_scaling.rope_type = \"dynamic\"");
    let mrope = json!({"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}});
    refused("qwen2", mrope, "rope_scaling.mrope_section = [16,24,24]");
    let missing = json!({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}});
    refused("gemma3", missing, "rope_parameters.sliding_attention: missing");
}

#[test]
fn sizes_that_make_no_sense_are_named() {
    refused("llama", json!({"hidden_size": null}), "hidden_size: missing");
    refused("llama", json!({"hidden_size": "128"}), "hidden_size: invalid type");
    refused("llama", json!({"hidden_size": 0}), "hidden_size: 0 is outside");
    refused("llama", json!({"num_hidden_layers": 1_000_000_000}), "num_hidden_layers: 1000000000 layers");
    refused("llama", json!({"num_hidden_layers": 0}), "num_hidden_layers: 0 layers");
    refused("llama", json!({"num_attention_heads": 0}), "num_attention_heads: 0 is outside");
    refused("llama", json!({"num_key_value_heads": 3}), "num_key_value_heads: 3 does not divide 4");
    refused("llama", json!({"head_dim": 33}), "33");
    refused("llama", json!({"vocab_size": 1u64 << 40}), "vocab_size: 1099511627776 is outside");
    refused("llama", json!({"rms_norm_eps": 0.0}), "rms_norm_eps: 0 must be above 0");
    refused("qwen3", json!({"layer_types": ["full_attention"]}), "layer_types: 1 entries for 2 layers");
    let chunked = json!({"layer_types": ["full_attention", "chunked_attention"]});
    refused("qwen3", chunked, "layer_types[1] = chunked_attention");
    let unmeant = json!({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64});
    refused("qwen2", unmeant, "sliding_window: missing, but layer 1 slides");
}

#[test]
fn harmless_fields_pass() {
    accepted(
        "llama",
        &json!({"logit_scale": null, "torch_dtype": "float16", "use_cache": false, "novel_switch": false}),
    );
    accepted("mistral-swa", &json!({"sliding_window": null}));
    accepted("qwen2", &json!({"sliding_window": 64, "max_window_layers": 1}));
    accepted("gemma3", &json!({"use_bidirectional_attention": false, "final_logit_softcapping": 30.0}));
}

#[test]
fn windows_of_some_layers_only() {
    let changes =
        json!({"use_sliding_window": true, "sliding_window": 64, "max_window_layers": 1, "layer_types": null});
    let folder = with_config("qwen2", &changes);
    let spec = read_spec(&Checkpoint::open(folder.path()).unwrap()).unwrap();
    let layers: Vec<_> = spec.kv_groups.iter().map(|group| (group.kind, group.layers.clone())).collect();
    let sliding = pagemill_model::KvKind::SlidingWindow { window: 64 };
    assert_eq!(layers, [(pagemill_model::KvKind::Full, vec![0]), (sliding, vec![1])]);
}

/// What a test does to a tensor.
enum Edit {
    Keep,
    Drop,
    Rename(&'static str),
    Shape(Vec<u64>),
}

/// A zoo model with its tensors edited and `extra` ones added, and its config changed.
fn with_tensors(
    name: &str,
    changes: &Value,
    edit: impl Fn(&TensorInfo) -> Edit,
    extra: &[(&str, &[u64])],
) -> tempfile::TempDir {
    let folder = with_config(name, changes);
    let checkpoint = Checkpoint::open(&zoo(name)).unwrap();
    let mut writer = SafetensorsWriter::default();
    for info in checkpoint.weights().tensors() {
        let mut bytes = vec![0; info.num_bytes() as usize];
        checkpoint.weights().read_all(info.name(), &mut bytes).unwrap();
        let shape: Vec<u64> = info.shape().iter().map(|dim| *dim as u64).collect();
        let dtype = info.tensor_type().unwrap().name();
        writer = match edit(info) {
            Edit::Keep => writer.tensor(info.name(), dtype, &shape, &bytes),
            Edit::Drop => writer,
            Edit::Rename(other) => writer.tensor(other, dtype, &shape, &bytes),
            Edit::Shape(shape) => writer.tensor(info.name(), dtype, &shape, &bytes),
        };
    }
    for (name, shape) in extra {
        writer = writer.f32_tensor(name, shape, &vec![0.5; shape.iter().product::<u64>() as usize]);
    }
    std::fs::write(folder.path().join("model.safetensors"), writer.build()).unwrap();
    folder
}

#[test]
fn every_missing_tensor_is_named() {
    for name in harness::ZOO {
        let checkpoint = Checkpoint::open(&zoo(name)).unwrap();
        let names = checkpoint.weights().tensors().iter().map(|info| info.name().to_owned());
        for missing in names.filter(|name| !name.contains("layers.0.")) {
            let edit = |info: &TensorInfo| if info.name() == missing { Edit::Drop } else { Edit::Keep };
            let folder = with_tensors(name, &json!({}), edit, &[]);
            let message = message(folder.path());
            assert!(message.contains(&format!("tensor {missing:?}: missing")), "{name}: {message}");
        }
    }
}

#[test]
fn every_misshaped_tensor_is_named() {
    for name in ["llama-yarn", "gemma3"] {
        let checkpoint = Checkpoint::open(&zoo(name)).unwrap();
        let tensors: Vec<_> =
            checkpoint.weights().tensors().iter().map(|info| (info.name().to_owned(), info.shape().to_vec())).collect();
        for (wrong, shape) in tensors.iter().filter(|(name, _)| !name.contains("layers.0.")) {
            // The same bytes under another shape.
            let other: Vec<u64> = match shape.as_slice() {
                [len] => vec![2, *len as u64 / 2],
                [rows, cols] => vec![*rows as u64 * 2, *cols as u64 / 2],
                _ => unreachable!(),
            };
            let edit = |info: &TensorInfo| {
                if info.name() == wrong { Edit::Shape(other.clone()) } else { Edit::Keep }
            };
            let folder = with_tensors(name, &json!({}), edit, &[]);
            let message = message(folder.path());
            let expected = format!("tensor {wrong:?}: expected shape {shape:?}, got {other:?}");
            assert!(message.contains(&expected), "{name}: expected {expected:?} in {message:?}");
            assert!(message.contains("model.safetensors"), "{message}");
        }
    }
}

#[test]
fn unknown_tensors_are_named() {
    let keep = |_: &TensorInfo| Edit::Keep;
    for extra in ["model.layers.0.self_attn.sinks", "model.layers.0.self_attn.q_proj.bias", "visual.patch.weight"] {
        let folder = with_tensors("llama", &json!({}), keep, &[(extra, &[128])]);
        let message = message(folder.path());
        assert!(message.contains(&format!("tensor {extra:?}: not used by this architecture")), "{message}");
    }
    let rename = |info: &TensorInfo| match info.name() {
        "model.norm.weight" => Edit::Rename("model.final_norm.weight"),
        _ => Edit::Keep,
    };
    let folder = with_tensors("llama", &json!({}), rename, &[]);
    assert!(message(folder.path()).contains("\"model.norm.weight\": missing"));
}

#[test]
fn harmless_tensors_pass_and_change_nothing() {
    let keep = |_: &TensorInfo| Edit::Keep;
    let extra: [(&str, &[u64]); 2] =
        [("lm_head.weight", &[512, 128]), ("model.layers.0.self_attn.rotary_emb.inv_freq", &[16])];
    let folder = with_tensors("llama3-rope", &json!({}), keep, &extra);
    harness::check_goldens("llama3-rope", folder.path());
}

#[test]
fn an_untied_head_must_be_there_and_is_used() {
    let folder = with_config("llama3-rope", &json!({"tie_word_embeddings": false}));
    assert!(message(folder.path()).contains("\"lm_head.weight\": missing"));
    let folder = with_config("llama", &json!({"tie_word_embeddings": true}));
    let model = harness::load(folder.path()).unwrap();
    assert!(model.spec().tied_embeddings);
}

#[test]
fn a_decoder_inside_a_vision_model() {
    // gemma-3-4b's form: the text model's fields nested, its tensors under another root, a vision tower.
    let config: Value = serde_json::from_slice(&std::fs::read(zoo("gemma3").join("config.json")).unwrap()).unwrap();
    let mut text = config.clone();
    text.as_object_mut().unwrap().remove("architectures");
    let folder = with_config("gemma3", &json!({}));
    let outer = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
        "vision_config": {"hidden_size": 8}, "mm_tokens_per_image": 256
    });
    std::fs::write(folder.path().join("config.json"), outer.to_string()).unwrap();
    let checkpoint = Checkpoint::open(&zoo("gemma3")).unwrap();
    let mut writer = SafetensorsWriter::default();
    for info in checkpoint.weights().tensors() {
        let mut bytes = vec![0; info.num_bytes() as usize];
        checkpoint.weights().read_all(info.name(), &mut bytes).unwrap();
        let shape: Vec<u64> = info.shape().iter().map(|dim| *dim as u64).collect();
        writer = writer.tensor(
            &format!("language_model.{}", info.name()),
            info.tensor_type().unwrap().name(),
            &shape,
            &bytes,
        );
    }
    writer = writer.f32_tensor("vision_tower.embeddings.weight", &[2], &[0.0; 2]);
    std::fs::write(folder.path().join("model.safetensors"), writer.build()).unwrap();
    harness::check_goldens("gemma3", folder.path());
}
