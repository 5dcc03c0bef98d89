//! `pagemill bench kernels`: what this machine can do at most, and how near every op comes to it at a
//! model's own shapes, through the same ops that a forward calls. Weights are all layers' in turn, so that they
//! come from where they would come from in a decode step; on a GPU, as many layers as its caches cannot hold.

mod attention;
mod ceilings;
mod layout;
mod measure;
mod products;
mod report;
mod rows;
mod weights;

use crate::devices::{self, Device};
use crate::{ModelArgs, loading, models::catalogue, settings::ServerSettings};
use anyhow::{Context, Result, bail};
use attention::Caching;
use ceilings::Ceilings;
use clap::Args;
use measure::{Arithmetic, Measure};
use pagemill_backend::{ActivationMode, CpuBackend};
use pagemill_engine::ParallelMode;
use pagemill_formats::Checkpoint;
use pagemill_model::ModelSpec;
use std::time::Duration;
use weights::{ModelWeights, Wanted};

/// Arguments of `pagemill bench kernels`.
#[derive(Args)]
pub struct KernelsArgs {
    /// GGUF file, Hugging Face folder or repository (owner/name), or a name that `pagemill pull --list` shows [default: smollm2-135m]
    model: Option<String>,
    #[command(flatten)]
    shared: ModelArgs,
    /// Tokens in a step; several, separated by commas. In attention up to 256 are as many decodes, more a prompt's
    /// chunk [default: 1,16,512; on a GPU 1,8,64,256,2048,8192]
    #[arg(long, value_delimiter = ',')]
    tokens: Vec<usize>,
    /// Context lengths of attention; several, separated by commas [default: 512,4096; on a GPU 512,4096,32768]
    #[arg(long, value_delimiter = ',')]
    contexts: Vec<usize>,
    /// Milliseconds to spend on each figure at least [default: 150; on a GPU 20]
    #[arg(long, value_name = "MS")]
    duration: Option<u64>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// Longest context and step that a pool and workspace are made for.
const TOKENS_MAX: usize = 65_536;

/// What is measured unless it is said.
struct Defaults {
    tokens: &'static [usize],
    contexts: &'static [usize],
    duration_ms: u64,
}

const ON_HOST: Defaults = Defaults { tokens: &[1, 16, 512], contexts: &[512, 4096], duration_ms: 150 };
const ON_GPU: Defaults =
    Defaults { tokens: &[1, 8, 64, 256, 2048, 8192], contexts: &[512, 4096, 32_768], duration_ms: 20 };

/// What is measured.
struct Plan {
    tokens: Vec<usize>,
    contexts: Vec<usize>,
    duration: Duration,
    caching: Caching,
}

/// Measures.
pub fn kernels(args: KernelsArgs) -> Result<()> {
    let (file_model, engine, _) = args.shared.clone().merge(ServerSettings::default())?;
    let model = args.model.clone().or(file_model).unwrap_or_else(|| catalogue::DEFAULT.to_owned());
    let config = crate::config::engine_config(engine)?;
    if config.engine.parallel != ParallelMode::SOLO {
        bail!("tensor_parallel, pipeline_parallel: kernels are measured on one rank");
    }
    let defaults = if config.device == Device::Cpu { &ON_HOST } else { &ON_GPU };
    let or_default = |given: &[usize], default: &[usize]| if given.is_empty() { default } else { given }.to_vec();
    let plan = Plan {
        tokens: or_default(&args.tokens, defaults.tokens),
        contexts: or_default(&args.contexts, defaults.contexts),
        duration: Duration::from_millis(args.duration.unwrap_or(defaults.duration_ms)),
        caching: Caching { block_size: config.engine.block_size, dtype: config.engine.kv_dtype },
    };
    let in_range = |n: &usize| (1..=TOKENS_MAX).contains(n);
    if !plan.tokens.iter().all(in_range) || !plan.contexts.iter().all(in_range) || plan.duration.is_zero() {
        bail!("tokens and contexts must lie in 1 to {TOKENS_MAX}, duration be at least 1");
    }
    let checkpoint = loading::open(&model, &config)?;
    let spec = pagemill_model::read_spec(&checkpoint)?;
    if config.device == Device::Cpu {
        let backend = CpuBackend::new(config.cpu).context("starting the CPU device")?;
        let quantized = match config.cpu.activations {
            ActivationMode::Int8 => Arithmetic::Int8,
            ActivationMode::F32 => Arithmetic::F32,
        };
        let mut measure = Measure::new(&backend, plan.duration, quantized)?;
        let weights = load(&measure, &checkpoint, &spec)?;
        let ceilings = Ceilings::of_host(&backend, weights.len_bytes(), plan.duration);
        run(&mut measure, &plan, &spec, &weights)?;
        return report::print(&args, &model, &config, &ceilings, &measure);
    }
    let backend = devices::open(&config)?;
    let meter = backend.meter().context("this device has no clock of its own")?;
    // Quantised weights are widened on their way into the product.
    let quantized = match config.cpu.activations {
        ActivationMode::Int8 => Arithmetic::Bf16,
        ActivationMode::F32 => Arithmetic::F32,
    };
    let mut measure = Measure::new(backend.as_ref(), plan.duration, quantized)?;
    let ceilings = Ceilings::of_device(&measure, meter)?;
    let weights = load(&measure, &checkpoint, &spec)?;
    run(&mut measure, &plan, &spec, &weights)?;
    report::print(&args, &model, &config, &ceilings, &measure)
}

fn load(measure: &Measure<'_>, checkpoint: &Checkpoint, spec: &ModelSpec) -> Result<ModelWeights> {
    let num_layers = measure.data_sets(ModelWeights::smallest_product_bytes(spec), spec.num_layers);
    ModelWeights::load(checkpoint, Wanted { spec, num_layers }, measure.backend)
}

fn run(measure: &mut Measure<'_>, plan: &Plan, spec: &ModelSpec, weights: &ModelWeights) -> Result<()> {
    for &tokens in &plan.tokens {
        products::products(measure, spec, weights, tokens)?;
    }
    for &tokens in &plan.tokens {
        attention::attention(measure, spec, plan.caching, tokens, &plan.contexts)?;
    }
    for &tokens in &plan.tokens {
        rows::rows(measure, spec, weights, plan.caching, tokens)?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use pagemill_backend::{CpuConfig, DType};

    #[test]
    fn every_op_runs_at_the_shapes_of_small_models() {
        for name in ["llama", "qwen3", "gemma3"] {
            let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/zoo").join(name);
            let (checkpoint, spec) = (Checkpoint::open(&path).unwrap(), loading::read_spec(&path).unwrap());
            let backend = CpuBackend::new(CpuConfig { num_threads: Some(1), ..CpuConfig::default() }).unwrap();
            let mut measure = Measure::new(&backend, Duration::from_micros(1), Arithmetic::Int8).unwrap();
            let weights = load(&measure, &checkpoint, &spec).unwrap();
            assert_eq!((weights.layers.len(), weights.head().rows()), (spec.num_layers, spec.vocab_size), "{name}");
            let plan = Plan {
                tokens: vec![3, 300],
                contexts: vec![33, 400],
                duration: Duration::from_micros(1),
                caching: Caching { block_size: 16, dtype: DType::F16 },
            };
            run(&mut measure, &plan, &spec, &weights).unwrap();
            // Seven products; three decodes at two contexts, a chunk at its own and at a longer one; eight row ops.
            assert_eq!(measure.rows.len(), 2 * 7 + 2 + 2 + 2 * 8, "{name}");
            assert!(measure.rows.iter().all(|r| r.seconds > 0.0 && r.bytes > 0.0 && r.ops >= 0.0), "{name}");
            // The host reads logits where they lie.
            let left_out: Vec<&str> = measure.left_out.iter().map(|left| left.op.as_str()).collect();
            assert_eq!(left_out, ["sample_rows"; 2], "{name}");
        }
    }

    #[test]
    fn made_up_weights_have_the_models_shapes() {
        let folder = tempfile::tempdir().unwrap();
        let zoo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/zoo/llama/config.json");
        std::fs::copy(zoo, folder.path().join("config.json")).unwrap();
        let checkpoint = Checkpoint::open_config(folder.path(), None).unwrap();
        let spec = pagemill_model::read_spec(&checkpoint).unwrap();
        let backend = CpuBackend::new(CpuConfig { num_threads: Some(1), ..CpuConfig::default() }).unwrap();
        let wanted = Wanted { spec: &spec, num_layers: spec.num_layers + 1 };
        let weights = ModelWeights::load(&checkpoint, wanted, &backend).unwrap();
        assert_eq!(weights.layers.len(), spec.num_layers + 1);
        let down = &weights.layers[spec.num_layers].down;
        assert_eq!((down.rows(), down.cols()), (spec.hidden_size, spec.intermediate_size));
    }
}
