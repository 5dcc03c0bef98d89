//! `pagemill plan MODEL`: what will fit, before anything is allocated. Decides which of two plans is asked for: the
//! one of this machine, as the engine would make it, or the one of hardware that is not here.

mod capacity;
mod sizes;

use crate::{ModelArgs, devices, loading, models, settings::ServerSettings};
use anyhow::Result;
use clap::Args;
use indicatif::HumanCount;
use pagemill_engine::{MemoryPlan, plan_memory};
use pagemill_model::ModelSpec;
use std::io::Write;

/// Arguments of `pagemill plan`.
#[derive(Args)]
#[command(
    mut_arg("device", |arg| arg.help("Hardware to plan for: this machine, cpu, a100-40g, a100-80g, h100-80g, h200, l4, \
        l40s or rtx-4090 [default: this machine]")),
    mut_arg("kv_dtype", |arg| arg.help("KV element type: f16 or f32; for other hardware also bf16, fp8 or int8 \
        [default: f16]"))
)]
pub struct PlanArgs {
    /// GGUF file, Hugging Face folder or repository (owner/name), or a name that `pagemill pull --list` shows; for
    /// other hardware also a config.json or a known shape such as llama-2-70b [default: smollm2-135m]
    model: Option<String>,
    /// Plan for this much memory (of a rank), such as 8GiB [default: what this machine has free, or the device has]
    #[arg(long, value_name = "BYTES")]
    memory: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    capacity: capacity::CapacityArgs,
    #[command(flatten)]
    shared: ModelArgs,
}

/// Plans.
pub fn plan(args: PlanArgs) -> Result<()> {
    let (file_model, engine, _) = args.shared.merge(ServerSettings::default())?;
    let model = args.model.or(file_model).unwrap_or_else(|| models::catalogue::DEFAULT.to_owned());
    if args.capacity.is_asked_for(&engine) || sizes::are_all_there_is(&model) {
        let plan = capacity::plan(&model, &args.capacity, engine, args.memory.as_deref())?;
        return print(args.json, &plan, || Ok(serde_json::to_value(&plan)?));
    }
    let config = crate::config::engine_config(engine)?;
    let mut memory = devices::memory(&config)?;
    if let Some(text) = &args.memory {
        memory.available_bytes = crate::config::parse_bytes(text, "memory")?;
    }
    let path = models::resolve(&model)?;
    let spec = loading::read_spec(&path)?;
    let plan = plan_memory(&spec, &config.engine, memory)?;
    let head = format!("{model}: {}, {} parameters", spec.architecture, HumanCount(spec.num_parameters));
    print(args.json, &format!("{head}\n{plan}"), || Ok(json(&model, &spec, &plan)))
}

/// Prints text, or the JSON of the same.
fn print(as_json: bool, text: &dyn std::fmt::Display, value: impl FnOnce() -> Result<serde_json::Value>) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if as_json {
        writeln!(out, "{}", value()?)?
    } else {
        writeln!(out, "{text}")?
    }
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
