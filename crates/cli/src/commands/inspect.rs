//! `pagemill inspect FILE`: architecture, tensors, types, sizes, tokenizer, template, and the memory it will need.

use crate::config;
use crate::settings::EngineSettings;
use crate::{devices, models};
use anyhow::Result;
use clap::Args;
use indicatif::{BinaryBytes, HumanCount};
use pagemill_engine::plan_memory;
use pagemill_formats::gguf::{GgufFile, Value};
use pagemill_formats::hf::HfFolder;
use pagemill_formats::{Checkpoint, StoredType, TensorInfo};
use pagemill_server::TextAssets;
use std::collections::BTreeMap;
use std::io::Write;

/// Arguments of `pagemill inspect`.
#[derive(Args)]
pub struct InspectArgs {
    /// GGUF file, Hugging Face folder or repository (owner/name), or a name that `pagemill pull --list` shows
    file: String,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// Print the chat template
    #[arg(long)]
    template: bool,
}

/// Shows.
pub fn inspect(args: &InspectArgs) -> Result<()> {
    let path = models::resolve(&args.file)?;
    let checkpoint = Checkpoint::open(&path)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", path.display())?;
    match &checkpoint {
        Checkpoint::Gguf(file) => describe_gguf(file, &mut out)?,
        Checkpoint::HuggingFace(folder) => describe_folder(folder, &mut out)?,
        // Opened with its weights or not at all.
        Checkpoint::ConfigOnly(_) => {}
    }
    describe_types(&checkpoint, &mut out)?;
    if args.tensors {
        list_tensors(&checkpoint, &mut out)?;
    }
    describe_text(&checkpoint, args.template, &mut out)?;
    describe_needs(&checkpoint, &mut out)
}

fn describe_gguf(file: &GgufFile, out: &mut impl Write) -> Result<()> {
    writeln!(out, "GGUF version {}", file.version())?;
    for (key, value) in file.metadata().iter() {
        writeln!(out, "  {key} = {}", short(value))?;
    }
    Ok(())
}

/// A value on one line.
fn short(value: &Value) -> String {
    match value {
        Value::String(text) => {
            let line: String = text.chars().take(100).flat_map(char::escape_debug).collect();
            if text.chars().nth(100).is_some() {
                format!("\"{line}…\" ({} bytes)", text.len())
            } else {
                format!("\"{line}\"")
            }
        }
        Value::Array(array) => format!("[{} items]", array.len()),
        other => other.to_string(),
    }
}

fn describe_folder(folder: &HfFolder, out: &mut impl Write) -> Result<()> {
    let config = folder.config();
    writeln!(out, "Hugging Face folder: {} ({})", config.architectures.join(", "), config.model_type)?;
    for (key, value) in config.fields().raw() {
        writeln!(out, "  {key} = {value}")?;
    }
    let generation = folder.generation();
    writeln!(out, "generation_config.json:")?;
    writeln!(out, "  eos_token_id = {:?}", generation.eos_token_ids)?;
    let numbers = [
        ("temperature", generation.temperature),
        ("top_p", generation.top_p),
        ("min_p", generation.min_p),
        ("repetition_penalty", generation.repetition_penalty),
    ];
    for (name, value) in numbers {
        if let Some(value) = value {
            writeln!(out, "  {name} = {value}")?;
        }
    }
    Ok(())
}

fn describe_types(checkpoint: &Checkpoint, out: &mut impl Write) -> Result<()> {
    let mut by_type: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for tensor in checkpoint.weights().tensors() {
        let entry = by_type.entry(tensor.stored_type().name()).or_default();
        entry.0 += 1;
        entry.1 += tensor.num_bytes();
    }
    let weights = checkpoint.weights();
    writeln!(out, "{} tensors, {}:", weights.tensors().len(), BinaryBytes(weights.total_bytes()))?;
    for (name, (count, bytes)) in by_type {
        writeln!(out, "  {name:<6} {count:>5} tensors {:>12}", BinaryBytes(bytes).to_string())?;
    }
    Ok(())
}

fn list_tensors(checkpoint: &Checkpoint, out: &mut impl Write) -> Result<()> {
    for tensor in checkpoint.weights().tensors() {
        writeln!(
            out,
            "  {:<48} {:<6} {:?} {}",
            tensor.name(),
            tensor.stored_type().name(),
            tensor.shape(),
            BinaryBytes(tensor.num_bytes())
        )?;
    }
    Ok(())
}

fn describe_text(checkpoint: &Checkpoint, whole_template: bool, out: &mut impl Write) -> Result<()> {
    let assets = match TextAssets::from_checkpoint(checkpoint) {
        Ok(assets) => assets,
        Err(e) => {
            writeln!(out, "tokenizer: cannot be used: {e}")?;
            return Ok(());
        }
    };
    let tokenizer = &assets.tokenizer;
    let name = |id: u32| format!("{id} {:?}", String::from_utf8_lossy(tokenizer.token_bytes(id)));
    writeln!(out, "tokenizer: {} tokens", HumanCount(tokenizer.vocab_size() as u64))?;
    if let Some(bos) = tokenizer.bos() {
        writeln!(out, "  begin: {}{}", name(bos), if tokenizer.add_bos() { ", put before texts" } else { "" })?;
    }
    let ends: Vec<String> = assets.eos_token_ids.iter().map(|&id| name(id)).collect();
    writeln!(out, "  end: {}", ends.join(", "))?;
    match &assets.template {
        None => writeln!(out, "chat template: none")?,
        Some(template) if whole_template => writeln!(out, "chat template:\n{}", template.source())?,
        Some(template) => writeln!(out, "chat template: {} bytes (--template shows it)", template.source().len())?,
    }
    Ok(())
}

fn describe_needs(checkpoint: &Checkpoint, out: &mut impl Write) -> Result<()> {
    let spec = match pagemill_model::read_spec(checkpoint) {
        Ok(spec) => spec,
        Err(e) => {
            writeln!(out, "this version cannot run it: {e}")?;
            return Ok(());
        }
    };
    let refused = |t: &&TensorInfo| matches!(t.stored_type(), StoredType::Refused(_));
    if let Some(tensor) = checkpoint.weights().tensors().iter().find(refused) {
        let (name, ty) = (tensor.name(), tensor.stored_type().name());
        writeln!(out, "this version cannot run it: {name} is stored as {ty}, which it does not compute with")?;
        return Ok(());
    }
    writeln!(
        out,
        "{} layers, hidden {}, {} heads ({} KV) of {}, vocabulary {}, context {}, {} parameters",
        spec.num_layers,
        spec.hidden_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.vocab_size,
        spec.max_seq_len,
        HumanCount(spec.num_parameters)
    )?;
    let config = config::engine_config(EngineSettings::default())?;
    match plan_memory(&spec, &config.engine, devices::memory(&config)?) {
        Ok(plan) => writeln!(out, "{plan}")?,
        Err(e) => writeln!(out, "{e}")?,
    }
    Ok(())
}
