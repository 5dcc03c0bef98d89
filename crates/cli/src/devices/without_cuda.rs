//! GPUs in a build without the feature `cuda`: none, and a sentence when one is asked for.

use crate::config::Config;
use anyhow::{Result, bail};
use pagemill_backend::Backend;
use std::sync::Arc;

/// Why there is none.
pub const NONE: &str = "this build has no GPU support; build with --features cuda";

/// GPUs of this machine that this build can use.
#[allow(clippy::unnecessary_wraps)] // the other build's form
pub fn count() -> Result<usize> {
    Ok(0)
}

/// Opens GPU `ordinal`.
pub fn open(ordinal: usize, _config: &Config) -> Result<Arc<dyn Backend>> {
    bail!("device = cuda:{ordinal}: {NONE}")
}
