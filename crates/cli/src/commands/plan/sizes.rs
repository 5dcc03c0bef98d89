//! The sizes of MODEL for a plan: of a known shape, of a config.json without weights, or of a model that is here or
//! can be fetched. Knows no hardware.

use crate::{loading, models};
use anyhow::{Result, bail};
use pagemill_capacity::{DecoderShape, LayerKv, Mlp, WeightType, known};
use pagemill_formats::hf::HfConfig;
use pagemill_model::{KvKind, ModelSpec};
use std::path::{Path, PathBuf};

/// Sizes, and the type that the weights have.
pub struct Sizes {
    /// The model.
    pub shape: DecoderShape,
    /// As published or stored.
    pub weights: WeightType,
}

/// Whether MODEL names sizes without weights, so that only the plan for other hardware can mean it.
pub fn are_all_there_is(model: &str) -> bool {
    let path = Path::new(model);
    if path.exists() {
        return config_file(path).is_some();
    }
    models::catalogue::find(model).is_none() && known::shape(model).is_ok()
}

/// Reads the sizes of MODEL. `typed` says that the weights' type is given, so that the model's need not be understood.
///
/// # Errors
/// One sentence: the field that is missing or not understood, or what MODEL may be.
pub fn read(model: &str, typed: bool) -> Result<Sizes> {
    let path = Path::new(model);
    if let Some(file) = config_file(path) {
        return of_config(&HfConfig::open(&file)?, model, typed);
    }
    if !path.exists() {
        if let Ok(shape) = known::shape(model) {
            return Ok(Sizes { shape, weights: WeightType::named("bf16")? });
        }
        let may_be_elsewhere =
            models::catalogue::find(model).is_some() || model.contains('/') || model.ends_with(".gguf");
        if !may_be_elsewhere {
            bail!(
                "{model}: not a file, not a folder, and not a known shape. MODEL is a GGUF file, a Hugging Face folder \
                 or its config.json, a Hugging Face repository (owner/name), one of {}, or one of the shapes {}",
                models::catalogue::names(),
                known::names()
            );
        }
    }
    let spec = loading::read_spec(&models::resolve(model)?)?;
    Ok(Sizes { weights: WeightType::as_stored(spec.num_parameters, spec.stored_bytes), shape: of_spec(&spec, model) })
}

/// The configuration at `path`, if that is all there is: a JSON file, or a folder with config.json and no weights.
fn config_file(path: &Path) -> Option<PathBuf> {
    if path.is_file() {
        return path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json")).then(|| path.to_owned());
    }
    let holds_weights =
        |folder: &Path| {
            let entries = std::fs::read_dir(folder).ok()?;
            Some(entries.flatten().any(|e| {
                Path::new(&e.file_name()).extension().is_some_and(|ext| ext == "safetensors" || ext == "gguf")
            }))
        };
    let config = path.join("config.json");
    (config.is_file() && holds_weights(path) == Some(false)).then_some(config)
}

/// The sizes that a loaded model would have; norms and biases are what its weights leave over.
fn of_spec(spec: &ModelSpec, name: &str) -> DecoderShape {
    let mut layers = vec![LayerKv::Full; spec.num_layers];
    for group in &spec.kv_groups {
        if let KvKind::SlidingWindow { window } = group.kind {
            for &layer in &group.layers {
                layers[layer] = LayerKv::Window(window);
            }
        }
    }
    let mut shape = DecoderShape {
        name: name.to_owned(),
        hidden_size: spec.hidden_size,
        num_heads: spec.num_heads,
        num_kv_heads: spec.num_kv_heads,
        head_dim: spec.head_dim,
        mlp: Mlp::Dense { intermediate_size: spec.intermediate_size },
        vocab_size: spec.vocab_size,
        max_seq_len: spec.max_seq_len,
        tied_embeddings: spec.tied_embeddings,
        small_parameters_per_layer: 0,
        layers,
    };
    let rest = spec.num_parameters.saturating_sub(shape.num_parameters());
    shape.small_parameters_per_layer = rest / spec.num_layers.max(1) as u64;
    shape
}

/// Architectures whose sizes are understood.
const MODEL_TYPES: [&str; 7] = ["gemma3_text", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"];

/// The sizes in a config.json.
fn of_config(config: &HfConfig, name: &str, typed: bool) -> Result<Sizes> {
    let (fields, kind) = (config.fields(), config.model_type.as_str());
    if !MODEL_TYPES.contains(&kind) {
        bail!("{name}: model_type = {kind}: its sizes are not understood; known are {}", MODEL_TYPES.join(", "));
    }
    let gemma = kind == "gemma3_text";
    let (hidden_size, num_heads) = (fields.require_usize("hidden_size")?, fields.require_usize("num_attention_heads")?);
    let num_kv_heads = fields.get_usize("num_key_value_heads")?.unwrap_or(if gemma { 4 } else { num_heads });
    let derived_head = if gemma { 256 } else { hidden_size / num_heads.max(1) };
    let head_dim = fields.get_usize("head_dim")?.unwrap_or(derived_head);
    let mlp = mlp(config, name)?;
    let norms = hidden_size.saturating_mul(if gemma { 4 } else { 2 });
    let small = match kind {
        "qwen2" => {
            norms.saturating_add(num_heads.saturating_add(num_kv_heads.saturating_mul(2)).saturating_mul(head_dim))
        }
        "gemma3_text" | "qwen3" | "qwen3_moe" => norms.saturating_add(head_dim.saturating_mul(2)),
        _ => norms,
    };
    let shape = DecoderShape {
        name: name.to_owned(),
        hidden_size,
        num_heads,
        num_kv_heads,
        head_dim,
        mlp,
        vocab_size: fields.require_usize("vocab_size")?,
        max_seq_len: fields.require_usize("max_position_embeddings")?,
        tied_embeddings: fields.get_bool("tie_word_embeddings")?.unwrap_or(gemma),
        layers: layers(config, name)?,
        small_parameters_per_layer: small as u64,
    };
    shape.check()?;
    Ok(Sizes { shape, weights: if typed { WeightType::named("bf16")? } else { weight_type(config, name)? } })
}

/// The feed-forward part; a mixture must have it in every layer.
fn mlp(config: &HfConfig, name: &str) -> Result<Mlp> {
    let fields = config.fields();
    let (experts, features) = match config.model_type.as_str() {
        "mixtral" => ("num_local_experts", "intermediate_size"),
        "qwen3_moe" => ("num_experts", "moe_intermediate_size"),
        _ => return Ok(Mlp::Dense { intermediate_size: fields.require_usize("intermediate_size")? }),
    };
    let dense_layers = fields.get("mlp_only_layers").is_some_and(|list| list.as_array().is_none_or(|l| !l.is_empty()));
    if dense_layers || fields.get_usize("decoder_sparse_step")?.unwrap_or(1) != 1 {
        bail!(
            "{name}: mlp_only_layers, decoder_sparse_step: layers with and without experts in one model are not planned"
        );
    }
    Ok(Mlp::Experts {
        num_experts: fields.require_usize(experts)?,
        experts_per_token: fields.require_usize("num_experts_per_tok")?,
        intermediate_size: fields.require_usize(features)?,
        shared_intermediate_size: 0,
    })
}

/// Layers at most: a configuration must not make a long list.
const LAYERS_MOST: usize = 1024;

/// What every layer keeps: by `layer_types` where the file has them, else by the architecture's rule.
fn layers(config: &HfConfig, name: &str) -> Result<Vec<LayerKv>> {
    let fields = config.fields();
    let count = fields.require_usize("num_hidden_layers")?;
    if count > LAYERS_MOST {
        bail!("{name}: num_hidden_layers = {count}: must be at most {LAYERS_MOST}");
    }
    let window = fields.get_usize("sliding_window")?;
    let used = match config.model_type.as_str() {
        "qwen2" | "qwen3" | "qwen3_moe" => fields.get_bool("use_sliding_window")?.unwrap_or(false),
        "llama" => false,
        _ => true,
    };
    let Some(window) = window.filter(|_| used) else { return Ok(vec![LayerKv::Full; count]) };
    let types = fields.get_strings("layer_types")?;
    if let Some(types) = &types
        && types.len() != count
    {
        bail!("{name}: layer_types: {} entries for {count} layers", types.len());
    }
    let pattern = match fields.get_usize("sliding_window_pattern")? {
        Some(pattern) => pattern,
        None => fields.get_usize("_sliding_window_pattern")?.unwrap_or(6),
    };
    let first = fields.get_usize("max_window_layers")?.unwrap_or(28);
    let slides = |layer: usize| match (&types, config.model_type.as_str()) {
        (Some(types), _) => types[layer] == "sliding_attention",
        (None, "gemma3_text") => pattern == 0 || !(layer + 1).is_multiple_of(pattern),
        (None, "qwen2" | "qwen3" | "qwen3_moe") => layer >= first,
        (None, _) => true,
    };
    Ok((0..count).map(|layer| if slides(layer) { LayerKv::Window(window) } else { LayerKv::Full }).collect())
}

/// The type that the file states for its weights.
fn weight_type(config: &HfConfig, name: &str) -> Result<WeightType> {
    if let Some(quantised) = config.fields().get_object("quantization_config")? {
        let method = quantised.get_str("quant_method")?.unwrap_or("");
        let bits = quantised.get_usize("bits")?;
        return Ok(WeightType::named(match (method, bits) {
            ("fp8", _) => "fp8",
            ("gptq" | "awq", Some(4)) => "int4",
            ("gptq" | "awq", Some(8)) => "int8",
            _ => bail!(
                "{name}: quantization_config.quant_method = {method}: not understood; say the weights' type with --dtype"
            ),
        })?);
    }
    Ok(WeightType::named(config.dtype.as_deref().unwrap_or("bf16"))?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn sizes(config: &Value) -> Result<Sizes> {
        of_config(&HfConfig::parse(config.to_string().as_bytes(), Path::new("config.json"))?, "config.json", false)
    }

    fn llama() -> Value {
        json!({"model_type": "llama", "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
               "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 32000, "torch_dtype": "float16",
               "max_position_embeddings": 4096, "rms_norm_eps": 1e-5})
    }

    #[test]
    fn a_configuration_has_the_known_shape() {
        let found = sizes(&llama()).unwrap();
        let known = known::shape("llama-2-70b").unwrap();
        assert_eq!(DecoderShape { name: known.name.clone(), ..found.shape }, known);
        assert_eq!(found.weights, WeightType::named("f16").unwrap());
        let mut fp8 = llama();
        fp8["quantization_config"] = json!({"quant_method": "fp8", "activation_scheme": "dynamic"});
        assert_eq!(sizes(&fp8).unwrap().weights.name, "fp8");
    }

    #[test]
    fn windows_and_experts_have_the_known_shape() {
        let gemma = json!({"model_type": "gemma3_text", "hidden_size": 640, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 2048, "num_hidden_layers": 18,
            "vocab_size": 262144, "max_position_embeddings": 32768, "sliding_window": 512});
        let known = known::shape("gemma-3-270m").unwrap();
        assert_eq!(DecoderShape { name: known.name.clone(), ..sizes(&gemma).unwrap().shape }, known);
        let qwen = json!({"model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
            "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "vocab_size": 151936,
            "max_position_embeddings": 40960, "mlp_only_layers": [], "decoder_sparse_step": 1, "sliding_window": null});
        let known = known::shape("qwen3-30b-a3b").unwrap();
        assert_eq!(DecoderShape { name: known.name.clone(), ..sizes(&qwen).unwrap().shape }, known);
        let mut mixed = qwen;
        mixed["mlp_only_layers"] = json!([0]);
        assert!(sizes(&mixed).err().unwrap().to_string().contains("mlp_only_layers"));
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for (field, value, expected) in [
            ("model_type", json!("mamba"), "model_type = mamba"),
            ("num_hidden_layers", json!(1_000_000), "num_hidden_layers = 1000000"),
            ("num_hidden_layers", json!(0), "num_hidden_layers = 0"),
            ("num_attention_heads", json!(0), "num_attention_heads = 0"),
            ("hidden_size", json!(1u64 << 62), "hidden_size = "),
            ("num_key_value_heads", json!(65), "num_key_value_heads = 65"),
            ("vocab_size", json!("many"), "vocab_size"),
            ("torch_dtype", json!("int3"), "dtype = int3"),
            ("quantization_config", json!({"quant_method": "novel"}), "quant_method = novel"),
        ] {
            let mut config = llama();
            config[field] = value;
            let error = sizes(&config).err().unwrap().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
        let mut missing = llama();
        missing.as_object_mut().unwrap().remove("vocab_size");
        assert!(sizes(&missing).err().unwrap().to_string().contains("vocab_size"));
    }
}
