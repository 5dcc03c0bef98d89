//! Hugging Face folders and the choice between formats: what is read, and what is said when a member is missing.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

use pagemill_formats::hf::{GenerationConfig, HfConfig, RopeSettings, TokenizerConfig};
use pagemill_formats::testing::{GgufWriter, SafetensorsWriter};
use pagemill_formats::{Checkpoint, FormatErrorKind as Kind};

const CONFIG: &str = r#"{"model_type":"llama","architectures":["LlamaForCausalLM"],"torch_dtype":"float16",
    "hidden_size":8,"eos_token_id":[1,2],"bos_token_id":null,"pad_token_id":-1,"rope_theta":500000.0,
    "rope_scaling":{"type":"llama3","factor":8.0},"use_cache":true,"odd_multiplier":2.0,"logit_cap":null}"#;

fn model_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let put = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
    put("config.json", CONFIG.as_bytes());
    put("tokenizer.json", b"{}");
    put("model.safetensors", &SafetensorsWriter::default().f32_tensor("w", &[2], &[1.0, 2.0]).build());
    folder
}

fn sharded_folder(index: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = model_folder();
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    for (shard, name) in [("one.safetensors", "a"), ("two.safetensors", "b")] {
        let bytes = SafetensorsWriter::default().f32_tensor(name, &[1], &[3.0]).build();
        fs::write(folder.path().join(shard), bytes).unwrap();
    }
    let path = folder.path().join("model.safetensors.index.json");
    fs::write(&path, index).unwrap();
    (folder, path)
}

const INDEX: &str = r#"{"metadata":{"total_size":8},"weight_map":{"a":"one.safetensors","b":"two.safetensors"}}"#;

fn config(text: &str) -> pagemill_formats::Result<HfConfig> {
    HfConfig::parse(text.as_bytes(), Path::new("config.json"))
}

#[test]
fn a_folder_is_read() {
    let folder = model_folder();
    let Checkpoint::HuggingFace(model) = Checkpoint::open(folder.path()).unwrap() else { panic!("not a folder") };
    assert_eq!(model.config().model_type, "llama");
    assert_eq!(model.generation(), &GenerationConfig::default());
    let mut bytes = [0; 8];
    model.weights().read_all("w", &mut bytes).unwrap();
    assert_eq!(bytes[4..], 2.0f32.to_le_bytes());
    let tokenizer = model.tokenizer().unwrap();
    assert_eq!((&*tokenizer.tokenizer_json, tokenizer.chat_template), (&b"{}"[..], None));
}

#[test]
fn chat_template_file_wins_over_the_config() {
    let folder = model_folder();
    let put = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    put("tokenizer_config.json", r#"{"chat_template":"from config"}"#);
    let Checkpoint::HuggingFace(model) = Checkpoint::open(folder.path()).unwrap() else { panic!("not a folder") };
    assert_eq!(model.tokenizer().unwrap().chat_template.as_deref(), Some("from config"));
    put("chat_template.jinja", "from file");
    assert_eq!(model.tokenizer().unwrap().chat_template.as_deref(), Some("from file"));
    fs::write(folder.path().join("chat_template.jinja"), b"a\xff").unwrap();
    assert!(matches!(model.tokenizer().unwrap_err().kind(), Kind::InvalidUtf8 { .. }));
}

#[test]
fn missing_members_are_named_with_a_hint() {
    for (member, hint) in [
        ("config.json", "needs config.json"),
        ("tokenizer.json", "needs tokenizer.json"),
        ("model.safetensors", "needs model.safetensors"),
    ] {
        let folder = model_folder();
        fs::remove_file(folder.path().join(member)).unwrap();
        let error = Checkpoint::open(folder.path()).unwrap_err();
        assert!(matches!(error.kind(), Kind::MissingFile { .. }), "{error}");
        assert_eq!(error.file(), folder.path().join(member));
        assert!(error.to_string().contains(hint), "{error}");
    }
    let folder = model_folder();
    fs::rename(folder.path().join("model.safetensors"), folder.path().join("pytorch_model.bin")).unwrap();
    let error = Checkpoint::open(folder.path()).unwrap_err();
    assert!(error.to_string().contains("convert them to safetensors"), "{error}");
}

#[test]
fn paths_that_are_no_model_say_what_was_expected() {
    let folder = tempfile::tempdir().unwrap();
    let refuse = |path: &Path| Checkpoint::open(path).unwrap_err().to_string();
    assert!(refuse(&folder.path().join("absent")).contains("not found; expected a GGUF file, or a folder with"));
    assert!(refuse(folder.path()).contains("holds no model; expected a GGUF file, or a folder with"));
    fs::write(folder.path().join("some.gguf"), GgufWriter::default().build()).unwrap();
    assert!(refuse(folder.path()).contains("name the file instead, such as some.gguf"));
    assert!(matches!(Checkpoint::open(&folder.path().join("some.gguf")).unwrap(), Checkpoint::Gguf(_)));
    fs::write(folder.path().join("model.safetensors"), b"").unwrap();
    assert!(refuse(&folder.path().join("model.safetensors")).contains("name the folder instead"));
    fs::write(folder.path().join("text"), b"hello world").unwrap();
    assert!(refuse(&folder.path().join("text")).contains("not a GGUF file"));
    fs::write(folder.path().join("empty"), b"").unwrap();
    assert!(refuse(&folder.path().join("empty")).contains("truncated"));
    assert!(refuse(Path::new("/dev/null")).contains("not a regular file"));
}

#[test]
fn shards_are_read_as_one() {
    let (folder, _) = sharded_folder(INDEX);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let weights = checkpoint.weights();
    assert_eq!(weights.tensors().len(), 2);
    let tensor = weights.get("b").unwrap();
    assert_eq!(weights.file_of(tensor), folder.path().join("two.safetensors"));
    weights.read_all("b", &mut [0; 4]).unwrap();
}

#[test]
fn broken_shards_are_named() {
    let (folder, index) = sharded_folder(INDEX);
    fs::remove_file(folder.path().join("two.safetensors")).unwrap();
    let error = Checkpoint::open(folder.path()).unwrap_err();
    assert_eq!(error.file(), folder.path().join("two.safetensors"));
    assert!(error.to_string().contains(&index.display().to_string()), "{error}");

    // A tensor that its shard does not hold, or that only another shard holds.
    for wrong in [r#""c":"two.safetensors""#, r#""b":"one.safetensors","x":"two.safetensors""#] {
        let (folder, _) = sharded_folder(&INDEX.replace(r#""b":"two.safetensors""#, wrong));
        let error = Checkpoint::open(folder.path()).unwrap_err();
        assert!(matches!(error.kind(), Kind::MissingTensor { .. }) && error.field().is_some(), "{error}");
        assert!(error.to_string().contains("safetensors.index.json says it is in this file"), "{error}");
    }

    let (folder, _) = sharded_folder(INDEX);
    fs::copy(folder.path().join("one.safetensors"), folder.path().join("two.safetensors")).unwrap();
    let error = Checkpoint::open(folder.path()).unwrap_err();
    assert!(matches!(error.kind(), Kind::DuplicateTensor { .. }), "{error}");
    assert!(error.to_string().contains("tensor 'a'") && error.to_string().contains("one.safetensors"), "{error}");

    let (folder, _) = sharded_folder(INDEX);
    let shard = folder.path().join("two.safetensors");
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    let error = Checkpoint::open(folder.path()).unwrap_err();
    assert!(matches!(error.kind(), Kind::TensorBeyondEnd { .. }) && error.file() == shard, "{error}");
}

#[test]
fn malformed_indices() {
    for index in [
        "",
        "[]",
        "{}",
        r#"{"weight_map":[]}"#,
        r#"{"weight_map":{}}"#,
        r#"{"weight_map":{"a":1}}"#,
        r#"{"weight_map":{"a":"one.safetensors","a":"two.safetensors"}}"#,
        r#"{"weight_map":{"a":"../one.safetensors"}}"#,
        r#"{"weight_map":{"a":"/etc/passwd"}}"#,
        r#"{"weight_map":{"a":".."}}"#,
        r#"{"weight_map":{"a":""}}"#,
    ] {
        let (folder, path) = sharded_folder(index);
        let error = Checkpoint::open(folder.path()).unwrap_err();
        assert_eq!(error.file(), path, "{error}");
    }
}

#[test]
fn config_fields_are_typed() {
    let config = config(CONFIG).unwrap();
    assert_eq!(config.architectures, ["LlamaForCausalLM"]);
    assert_eq!(config.dtype.as_deref(), Some("float16"));
    assert_eq!(config.eos_token_ids, [1, 2]);
    assert_eq!((config.bos_token_id, config.pad_token_id), (None, None));
    assert_eq!(config.fields().require_usize("hidden_size").unwrap(), 8);
    assert_eq!(config.fields().get_f64("hidden_size").unwrap(), Some(8.0));
    let error = config.fields().require_usize("num_layers").unwrap_err();
    assert_eq!(error.to_string(), "config.json: num_layers: missing (expected unsigned integer)");
    let error = config.fields().get_bool("hidden_size").unwrap_err();
    assert_eq!(error.to_string(), "config.json: hidden_size: expected boolean, found 8");
    let unknown: Vec<_> = config.unknown_fields(&["hidden_size"]).map(|(key, _)| key).collect();
    assert_eq!(unknown, ["odd_multiplier"]);
    #[derive(serde::Deserialize)]
    struct Own {
        hidden_size: usize,
    }
    assert_eq!(config.fields().deserialize::<Own>().unwrap().hidden_size, 8);
}

#[test]
fn rope_in_the_older_form() {
    let RopeSettings::Uniform(rope) = config(CONFIG).unwrap().rope else { panic!("uniform") };
    assert_eq!((&*rope.rope_type, rope.theta), ("llama3", Some(500_000.0)));
    assert_eq!(rope.fields.require_f64("factor").unwrap(), 8.0);
    assert_eq!(rope.fields.unknown_fields(&["factor"]).count(), 0);
    let error = rope.fields.require_f64("low_freq_factor").unwrap_err();
    assert_eq!(error.field(), Some("rope_scaling.low_freq_factor"));

    let plain = config(r#"{"model_type":"llama","rope_scaling":null}"#).unwrap().rope;
    let RopeSettings::Uniform(rope) = plain else { panic!("uniform") };
    assert_eq!((&*rope.rope_type, rope.theta), ("default", None));

    let gemma = r#"{"model_type":"gemma3_text","rope_theta":1e6,"rope_local_base_freq":1e4,
        "rope_scaling":{"rope_type":"linear","factor":8.0}}"#;
    let RopeSettings::PerLayerType(layers) = config(gemma).unwrap().rope else { panic!("per layer type") };
    let seen: Vec<_> = layers.iter().map(|(name, rope)| (&**name, &*rope.rope_type, rope.theta)).collect();
    let expected = [("full_attention", "linear", Some(1e6)), ("sliding_attention", "default", Some(1e4))];
    assert_eq!(seen, expected);
}

#[test]
fn rope_in_the_newer_form() {
    let flat = r#"{"model_type":"llama","rope_theta":7.0,"rope_parameters":{"rope_type":"yarn","factor":4.0}}"#;
    let RopeSettings::Uniform(rope) = config(flat).unwrap().rope else { panic!("uniform") };
    assert_eq!((&*rope.rope_type, rope.theta), ("yarn", Some(7.0)));
    let layers = r#"{"model_type":"g","rope_parameters":{
        "full_attention":{"rope_theta":1e6,"rope_type":"default"},"sliding_attention":{"rope_theta":1e4}}}"#;
    let RopeSettings::PerLayerType(layers) = config(layers).unwrap().rope else { panic!("per layer type") };
    assert_eq!(layers.iter().map(|(_, rope)| rope.theta).collect::<Vec<_>>(), [Some(1e6), Some(1e4)]);
}

#[test]
fn contradictions_in_rope_settings_are_refused() {
    for (text, field) in [
        (r#"{"rope_scaling":{"type":"su","rope_type":"yarn"}}"#, "rope_scaling.type"),
        (r#"{"rope_scaling":{"type":"yarn"},"rope_parameters":{"rope_type":"llama3"}}"#, "rope_scaling"),
        (r#"{"rope_scaling":7}"#, "rope_scaling"),
        (r#"{"rope_parameters":{"full_attention":{},"factor":2}}"#, "rope_parameters.factor"),
        (r#"{"rope_theta":"big"}"#, "rope_theta"),
    ] {
        let error = config(&text.replacen('{', r#"{"model_type":"m","#, 1)).unwrap_err();
        assert_eq!(error.field(), Some(field), "{error}");
    }
}

#[test]
fn nested_text_config_is_flattened() {
    let config = config(
        r#"{"model_type":"gemma3","architectures":["Gemma3ForConditionalGeneration"],"eos_token_id":[1,106],
            "torch_dtype":"bfloat16","text_config":{"model_type":"gemma3_text","hidden_size":640},
            "vision_config":{"hidden_size":1152}}"#,
    )
    .unwrap();
    assert_eq!((&*config.model_type, config.outer_model_type.as_deref()), ("gemma3_text", Some("gemma3")));
    assert_eq!(config.eos_token_ids, [1, 106]);
    assert_eq!(config.dtype.as_deref(), Some("bfloat16"));
    assert_eq!(config.fields().require_usize("hidden_size").unwrap(), 640);
    let error = config.fields().require_usize("head_dim").unwrap_err();
    assert_eq!(error.field(), Some("text_config.head_dim"));
}

#[test]
fn malformed_json_is_refused() {
    let deep = format!(r#"{{"model_type":"m","x":{}{}}}"#, "[".repeat(65), "]".repeat(65));
    let bomb = format!(r#"{{"x":{}"#, "[".repeat(500_000));
    let cases = ["", "[]", "{", r#"{"a":1,"a":2}"#, r#"{"x":{"a":1,"a":2}}"#, r#"{"x":NaN}"#, "{} {}", &deep, &bomb];
    for text in cases {
        let error = config(text).unwrap_err();
        assert!(matches!(error.kind(), Kind::Json { .. }), "{error}");
        assert!(GenerationConfig::parse(text.as_bytes(), Path::new("g")).is_err());
    }
    for (text, field) in [
        (r#"{}"#, "model_type"),
        (r#"{"model_type":7}"#, "model_type"),
        (r#"{"model_type":"m","eos_token_id":"x"}"#, "eos_token_id"),
        (r#"{"model_type":"m","eos_token_id":[1,-1]}"#, "eos_token_id"),
        (r#"{"model_type":"m","eos_token_id":4294967296}"#, "eos_token_id"),
        (r#"{"model_type":"m","architectures":[1]}"#, "architectures"),
        (r#"{"model_type":"m","text_config":[]}"#, "text_config"),
    ] {
        assert_eq!(config(text).unwrap_err().field(), Some(field));
    }
}

#[test]
fn files_above_their_limit_are_not_read() {
    let folder = model_folder();
    let file = fs::File::create(folder.path().join("config.json")).unwrap();
    file.set_len(1 << 40).unwrap();
    let error = Checkpoint::open(folder.path()).unwrap_err();
    assert!(matches!(error.kind(), Kind::LimitExceeded { .. }), "{error}");
}

#[test]
fn generation_config_is_typed() {
    let text = br#"{"eos_token_id":[2,5],"do_sample":true,"temperature":0.6,"top_k":20,"top_p":0.95,"min_p":null,
        "repetition_penalty":1.1,"max_length":2048,"bos_token_id":1,"anything_else":{"x":[]}}"#;
    let generation = GenerationConfig::parse(text, Path::new("generation_config.json")).unwrap();
    let expected = GenerationConfig {
        bos_token_id: Some(1),
        eos_token_ids: vec![2, 5],
        do_sample: Some(true),
        temperature: Some(0.6),
        top_k: Some(20),
        top_p: Some(0.95),
        repetition_penalty: Some(1.1),
        max_length: Some(2048),
        ..GenerationConfig::default()
    };
    assert_eq!(generation, expected);
    for (text, field) in [(r#"{"temperature":"hot"}"#, "temperature"), (r#"{"top_k":-1}"#, "top_k")] {
        let error = GenerationConfig::parse(text.as_bytes(), Path::new("g")).unwrap_err();
        assert_eq!(error.field(), Some(field));
    }
}

#[test]
fn tokenizer_config_in_its_forms() {
    let parse = |text: &str| TokenizerConfig::parse(text.as_bytes(), Path::new("tokenizer_config.json"));
    let config = parse(
        r#"{"bos_token":{"content":"<s>","lstrip":false},"eos_token":"</s>","unk_token":null,"add_bos_token":true,
            "model_max_length":1000000000000000019884624838656,"added_tokens_decoder":{"0":{"content":"x"}},
            "chat_template":[{"name":"default","template":"D"},{"name":"rag","template":"R"}]}"#,
    )
    .unwrap();
    assert_eq!(config.bos_token.as_deref(), Some("<s>"));
    assert_eq!(config.eos_token.as_deref(), Some("</s>"));
    assert_eq!((config.unk_token, config.add_bos_token, config.model_max_length), (None, Some(true), None));
    assert_eq!((config.chat_template.as_deref(), config.named_templates.len()), (Some("D"), 2));
    assert_eq!(parse(r#"{"model_max_length":8192}"#).unwrap().model_max_length, Some(8192));
    for (text, field) in [
        (r#"{"bos_token":7}"#, "bos_token"),
        (r#"{"bos_token":{"lstrip":true}}"#, "bos_token.content"),
        (r#"{"chat_template":[{"name":"x"}]}"#, "chat_template"),
        (r#"{"chat_template":[{"name":"x","template":""},{"name":"x","template":""}]}"#, "chat_template"),
        (r#"{"chat_template":{}}"#, "chat_template"),
        (r#"{"model_max_length":"long"}"#, "model_max_length"),
    ] {
        assert_eq!(parse(text).unwrap_err().field(), Some(field));
    }
    assert!(matches!(parse(r#"{"bos_token":"a","bos_token":"b"}"#).unwrap_err().kind(), Kind::Json { .. }));
}
