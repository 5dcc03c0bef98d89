//! The plan for hardware that is not here: from flags to a question that the capacity room answers. Measures this
//! machine's CPU where nothing else was said; decides no number itself.

use super::sizes;
use crate::config::{engine_config, parse_bytes};
use crate::devices;
use crate::settings::EngineSettings;
use anyhow::{Result, bail};
use clap::Args;
use pagemill_backend::cpu::ceilings;
use pagemill_backend::{Backend, CpuBackend, CpuConfig};
use pagemill_capacity::device::CpuFigures;
use pagemill_capacity::{CapacityPlan, Device, KvType, Question, WeightType};
use std::time::Duration;

/// Tokens of a GPU's KV block, where nothing was said.
const GPU_BLOCK_SIZE: usize = 64;
/// The request whose latency is predicted, where nothing was said.
const PROMPT_TOKENS: usize = 512;
const GEN_TOKENS: usize = 128;

/// How often, how long and over how many bytes a CPU is measured.
const ATTEMPTS: usize = 3;
const MEASURE: Duration = Duration::from_millis(100);
const MEASURE_LEAST: usize = 1 << 20;
const MEASURE_MOST: usize = 512 << 20;

/// What only the plan for other hardware takes.
#[derive(Args, Clone, Default)]
#[command(next_help_heading = "Other hardware")]
pub struct CapacityArgs {
    /// Type of the weights: bf16, f16, f32, fp8, int8, int4, q8_0, q4_k, … [default: the model's]
    #[arg(long, value_name = "TYPE")]
    dtype: Option<String>,
    /// Ranks of one host: decides which messages cross hosts [default: 8; cpu: 1]
    #[arg(long, visible_alias = "ranks-per-host", value_name = "N")]
    gpus_per_host: Option<usize>,
    /// Prompt tokens of the request whose latency is predicted [default: 512]
    #[arg(long, value_name = "TOKENS")]
    prompt_tokens: Option<usize>,
    /// Answer tokens of that request [default: 128]
    #[arg(long, value_name = "TOKENS")]
    gen_tokens: Option<usize>,
    /// Batch sizes to show [default: 1,8,64,256]
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    batch_sizes: Vec<usize>,
    /// Say how many requests at once get this many tokens a second each
    #[arg(long, value_name = "N")]
    tokens_per_second: Option<f64>,
    /// Bytes a second from the memory of a cpu, such as 40GB [default: measured here]
    #[arg(long, value_name = "BYTES")]
    memory_bandwidth: Option<String>,
    /// f32 operations a second of a cpu, such as 1.5e12 [default: measured here]
    #[arg(long, value_name = "N")]
    flops: Option<f64>,
}

impl CapacityArgs {
    /// Whether anything was said that has no meaning for the plan of this machine.
    pub fn is_asked_for(&self, engine: &EngineSettings) -> bool {
        let elsewhere = engine
            .device
            .as_deref()
            .is_some_and(|device| !["cpu", "auto"].contains(&device) && !devices::names_gpu(device));
        let ranks = [engine.tensor_parallel, engine.pipeline_parallel].into_iter().flatten().any(|ranks| ranks != 1);
        let Self { dtype, gpus_per_host, prompt_tokens, gen_tokens, batch_sizes, tokens_per_second, .. } = self;
        elsewhere
            || ranks
            || dtype.is_some()
            || [gpus_per_host, prompt_tokens, gen_tokens].into_iter().any(Option::is_some)
            || !batch_sizes.is_empty()
            || [tokens_per_second, &self.flops].into_iter().any(Option::is_some)
            || self.memory_bandwidth.is_some()
    }
}

/// Works out the plan.
///
/// # Errors
/// One sentence: the key and what is wrong with its value, or by how much the model does not fit.
pub fn plan(model: &str, args: &CapacityArgs, engine: EngineSettings, memory: Option<&str>) -> Result<CapacityPlan> {
    let kv = KvType::named(engine.kv_dtype.as_deref().unwrap_or("f16"))?;
    let named_device = engine.device.clone().filter(|name| name != "auto");
    let (tensor_parallel, pipeline_parallel) =
        (engine.tensor_parallel.unwrap_or(1), engine.pipeline_parallel.unwrap_or(1));
    let block_size = engine.block_size;
    // The rest of the settings is checked as everywhere; these mean more here than this version's engine takes.
    let config = engine_config(EngineSettings {
        kv_dtype: None,
        device: None,
        tensor_parallel: None,
        pipeline_parallel: None,
        ..engine
    })?;
    if let Some(speed) = args.tokens_per_second
        && !(speed.is_finite() && speed > 0.0)
    {
        bail!("tokens_per_second = {speed}: must be above 0");
    }
    // A wrong name of the device or of a type is told before anything is read, fetched or measured.
    let known_device = match named_device.as_deref().filter(|name| !name.eq_ignore_ascii_case("cpu")) {
        Some(name) => Some(published(name, args)?),
        None => None,
    };
    let dtype = args.dtype.as_deref().map(WeightType::named).transpose()?;
    let sizes = sizes::read(model, dtype.is_some())?;
    let weights = dtype.unwrap_or(sizes.weights);
    let memory_bytes = memory.map(|text| parse_bytes(text, "memory")).transpose()?;
    let mut device = match known_device {
        Some(device) => device,
        None => Device::cpu(&cpu_figures(args, weights.bytes(sizes.shape.num_parameters()), config.cpu)?),
    };
    device.memory_bytes = memory_bytes.unwrap_or(device.memory_bytes);
    device.ranks_per_host = args.gpus_per_host.unwrap_or(device.ranks_per_host);
    let question = Question {
        weights,
        shape: sizes.shape,
        kv,
        tensor_parallel,
        pipeline_parallel,
        max_seq_len: config.engine.max_seq_len,
        max_batch_size: config.engine.max_batch_size,
        block_size: block_size.unwrap_or(if device.shared_memory { config.engine.block_size } else { GPU_BLOCK_SIZE }),
        prefill_chunk_size: config.engine.prefill_chunk_size,
        prompt_tokens: args.prompt_tokens.unwrap_or(PROMPT_TOKENS),
        gen_tokens: args.gen_tokens.unwrap_or(GEN_TOKENS),
        batch_sizes: args.batch_sizes.clone(),
        micro_batches: config.engine.micro_batches,
        wished_tokens_per_s: args.tokens_per_second,
        device,
    };
    Ok(CapacityPlan::new(&question)?)
}

/// Hardware by its published figures.
fn published(name: &str, args: &CapacityArgs) -> Result<Device> {
    let device = Device::named(name)?;
    for (key, given) in [("memory_bandwidth", args.memory_bandwidth.is_some()), ("flops", args.flops.is_some())] {
        if given {
            bail!("{key}: {name} has its published figure; only cpu takes one");
        }
    }
    Ok(device)
}

/// What was given, and measurements of this machine for the rest: the best of a few, as others may use it too. Bytes
/// are read from a buffer as large as the weights, as large caches hold small models whole.
fn cpu_figures(args: &CapacityArgs, weight_bytes: u64, cpu: CpuConfig) -> Result<CpuFigures> {
    let bandwidth = args.memory_bandwidth.as_deref().map(|text| parse_bytes(text, "memory_bandwidth")).transpose()?;
    if let Some(flops) = args.flops
        && !(flops.is_finite() && flops > 0.0)
    {
        bail!("flops = {flops}: must be above 0");
    }
    let backend = CpuBackend::new(cpu)?;
    let (isa, threads) = (backend.isa(), backend.info().num_units);
    let available = backend.info().memory_available_bytes;
    let most = usize::try_from(available / 4).unwrap_or(usize::MAX).clamp(MEASURE_LEAST, MEASURE_MOST);
    let buffer = usize::try_from(weight_bytes).unwrap_or(usize::MAX).clamp(MEASURE_LEAST, most);
    let memory_bytes_per_s = match bandwidth {
        Some(bytes) => bytes as f64,
        None => best(|| Some(ceilings::read_bytes_per_second(isa, threads, buffer, MEASURE))).unwrap_or(1.0),
    };
    let (f32_flops_per_s, int8_flops_per_s) = match args.flops {
        Some(flops) => (flops, None),
        // Without a measuring loop for this instruction set: one operation for every byte read.
        None => (
            best(|| ceilings::f32_ops_per_second(isa, threads, MEASURE)).unwrap_or(memory_bytes_per_s),
            best(|| ceilings::int8_ops_per_second(isa, threads, MEASURE)),
        ),
    };
    Ok(CpuFigures {
        memory_bytes: available,
        memory_bytes_per_s,
        f32_flops_per_s,
        int8_flops_per_s,
        given: bandwidth.is_some() && args.flops.is_some(),
    })
}

fn best(measure: impl Fn() -> Option<f64>) -> Option<f64> {
    (0..ATTEMPTS).filter_map(|_| measure()).reduce(f64::max)
}
