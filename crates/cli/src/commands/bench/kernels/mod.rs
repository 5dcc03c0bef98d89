//! `pagemill bench kernels`: what this machine can do at most, and how near every op comes to it at a
//! model's own shapes, through the same ops that a forward calls. Weights are the model's own, all layers
//! in turn, so that they come from where they would come from in a decode step.

mod ceilings;
mod measure;
mod ops;
mod report;
mod weights;

use crate::{ModelArgs, loading, models, models::catalogue, settings::ServerSettings};
use anyhow::{Context, Result, bail};
use ceilings::Ceilings;
use clap::Args;
use measure::Measure;
use pagemill_backend::{Backend, CpuBackend};
use pagemill_formats::Checkpoint;
use std::time::Duration;
use weights::ModelWeights;

/// Arguments of `pagemill bench kernels`.
#[derive(Args)]
pub struct KernelsArgs {
    /// GGUF file, Hugging Face folder or repository (owner/name), or a name that `pagemill pull --list` shows [default: smollm2-135m]
    model: Option<String>,
    #[command(flatten)]
    shared: ModelArgs,
    /// Tokens in a step; several, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "1,16,512")]
    tokens: Vec<usize>,
    /// Context lengths of attention; several, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "512,4096")]
    contexts: Vec<usize>,
    /// Milliseconds to spend on each figure at least
    #[arg(long, default_value_t = 150, value_name = "MS")]
    duration: u64,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// Longest context and step that a pool and workspace are made for.
const TOKENS_MAX: usize = 65_536;

/// Measures.
pub fn kernels(args: KernelsArgs) -> Result<()> {
    let in_range = |n: &usize| (1..=TOKENS_MAX).contains(n);
    if !args.tokens.iter().all(in_range) || !args.contexts.iter().all(in_range) || args.duration == 0 {
        bail!("tokens and contexts must lie in 1 to {TOKENS_MAX}, duration be at least 1");
    }
    let (file_model, engine, _) = args.shared.clone().merge(ServerSettings::default())?;
    let model = args.model.clone().or(file_model).unwrap_or_else(|| catalogue::DEFAULT.to_owned());
    let config = crate::config::engine_config(engine)?;
    let path = models::resolve(&model)?;
    let spec = loading::read_spec(&path)?;
    let checkpoint = Checkpoint::open(&path)?;
    let backend = CpuBackend::new(config.cpu).context("starting the CPU device")?;
    let duration = Duration::from_millis(args.duration);
    let weights = ModelWeights::load(&checkpoint, &spec, &backend)?;
    let ceilings = Ceilings::measure(&backend, weights.len_bytes(), duration);
    let mut measure = Measure::new(&backend, duration, config.cpu.activations);
    for &tokens in &args.tokens {
        ops::linear(&mut measure, &weights, tokens)?;
    }
    ops::attention(&mut measure, &spec, config.engine.kv_dtype, &args.contexts)?;
    for &tokens in &args.tokens {
        ops::rows(&mut measure, &spec, &weights, tokens)?;
    }
    let device = backend.info().description;
    report::print(&args, &model, &device, &config, &ceilings, &measure.rows)
}
