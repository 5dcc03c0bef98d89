//! `pagemill pull MODEL`: fetches a model into the cache.

use crate::models::{ModelRef, cache::Cache, catalogue, pull as fetch};
use anyhow::{Context, Result};
use clap::Args;
use std::io::Write;

/// Arguments of `pagemill pull`.
#[derive(Args)]
pub struct PullArgs {
    /// A name of the catalogue, or a Hugging Face repository (owner/name[@revision])
    #[arg(default_value = catalogue::DEFAULT)]
    model: String,
    /// List the named models
    #[arg(long)]
    list: bool,
}

/// Fetches, or lists.
pub fn pull(args: &PullArgs) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if args.list {
        for entry in catalogue::CATALOGUE {
            writeln!(out, "{:<16} {}", entry.name, entry.summary)?;
        }
        return Ok(());
    }
    let model = ModelRef::parse(&args.model)?;
    let cache = Cache::open()?;
    let already = cache.find(&model).is_some();
    let path = fetch::pull(&cache, &model).with_context(|| format!("fetching {}", args.model))?;
    let what = if already { "already here" } else { "fetched" };
    writeln!(out, "{} {what}: {}", args.model, path.display())?;
    Ok(())
}
