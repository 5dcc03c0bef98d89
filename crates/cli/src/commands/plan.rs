//! `pagemill plan MODEL`: what will fit, before anything is allocated.

use crate::{ModelArgs, loading, models, settings::ServerSettings};
use anyhow::Result;
use clap::Args;
use indicatif::HumanCount;
use pagemill_backend::{Backend, CpuBackend};
use pagemill_engine::{MemoryPlan, plan_memory};
use pagemill_model::ModelSpec;
use std::io::Write;

/// Arguments of `pagemill plan`.
#[derive(Args)]
pub struct PlanArgs {
    /// GGUF file, Hugging Face folder or repository (owner/name), or a name that `pagemill pull --list` shows [default: smollm2-135m]
    model: Option<String>,
    /// Plan for this much memory, such as 8GiB [default: what this machine has free]
    #[arg(long, value_name = "BYTES")]
    memory: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    shared: ModelArgs,
}

/// Plans.
pub fn plan(args: PlanArgs) -> Result<()> {
    let (file_model, engine, _) = args.shared.merge(ServerSettings::default())?;
    let model = args.model.or(file_model).unwrap_or_else(|| models::catalogue::DEFAULT.to_owned());
    let config = crate::config::engine_config(engine)?;
    let available = match &args.memory {
        Some(text) => crate::config::parse_bytes(text, "memory")?,
        None => CpuBackend::new(config.cpu)?.info().memory_available_bytes,
    };
    let path = models::resolve(&model)?;
    let spec = loading::read_spec(&path)?;
    let plan = plan_memory(&spec, &config.engine, available)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", json(&model, &spec, &plan))?;
        return Ok(());
    }
    writeln!(out, "{model}: {}, {} parameters", spec.architecture, HumanCount(spec.num_parameters))?;
    writeln!(out, "{plan}")?;
    Ok(())
}

fn json(model: &str, spec: &ModelSpec, plan: &MemoryPlan) -> serde_json::Value {
    serde_json::json!({
        "model": model, "architecture": spec.architecture, "parameters": spec.num_parameters,
        "available_bytes": plan.available_bytes, "weight_bytes": plan.weight_bytes,
        "workspace_bytes": plan.workspace_bytes, "reserve_bytes": plan.reserve_bytes,
        "kv_pool_bytes": plan.kv_pool_bytes, "block_bytes": plan.block_bytes, "num_blocks": plan.num_blocks,
        "block_size": plan.block_size, "kv_sequence_bytes": plan.kv.sequence_bytes, "max_seq_len": plan.max_seq_len, "max_batch_size": plan.max_batch_size,
        "full_length_sequences": plan.full_length_sequences,
    })
}
