//! The one place that reads environment variables which are not flags.

use anyhow::{Context, Result};
use std::path::PathBuf;

/// Folder of fetched models: `PAGEMILL_CACHE`, else `$XDG_CACHE_HOME/pagemill`, else
/// `~/.cache/pagemill`.
///
/// # Errors
/// None of the three variables is set.
pub fn cache_folder() -> Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    set("PAGEMILL_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|p| p.join("pagemill")))
        .or_else(|| set("HOME").map(|p| p.join(".cache").join("pagemill")))
        .context("no cache folder: set PAGEMILL_CACHE, XDG_CACHE_HOME or HOME")
}

/// `HF_ENDPOINT`: another server that speaks the Hugging Face API.
#[must_use]
pub fn hub_endpoint() -> Option<String> {
    std::env::var("HF_ENDPOINT").ok().filter(|v| !v.is_empty())
}

/// `HF_TOKEN`: for private repositories.
#[must_use]
pub fn hub_token() -> Option<String> {
    std::env::var("HF_TOKEN").ok().filter(|v| !v.is_empty())
}
