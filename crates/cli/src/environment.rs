//! The one place that reads environment variables other than through a flag.

use anyhow::{Context, Result};
use std::ffi::OsStr;
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

/// Whether a variable is set, and to nothing.
#[must_use]
pub fn is_empty(name: &OsStr) -> bool {
    std::env::var_os(name).is_some_and(|v| v.is_empty())
}

/// Whether a variable is set to `value`.
#[must_use]
pub fn holds(name: &str, value: &str) -> bool {
    std::env::var_os(name).is_some_and(|v| v == value)
}

/// `HF_ENDPOINT`: another server that speaks the Hugging Face API.
#[cfg(feature = "hub")]
#[must_use]
pub fn hub_endpoint() -> Option<String> {
    std::env::var("HF_ENDPOINT").ok().filter(|v| !v.is_empty())
}

/// `HF_TOKEN`: for private repositories.
#[cfg(feature = "hub")]
#[must_use]
pub fn hub_token() -> Option<String> {
    std::env::var("HF_TOKEN").ok().filter(|v| !v.is_empty())
}
