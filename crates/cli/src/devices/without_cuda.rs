//! GPUs in a build without the feature `cuda`: none, and a sentence when one is asked for.

use super::{SumTask, SumTimes};
use crate::config::Config;
use anyhow::{Result, bail};
use pagemill_backend::Backend;
use pagemill_engine::RankContext;
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

/// Opens a GPU for each rank.
pub fn open_ranks(ordinals: &[usize], _config: &Config) -> Result<Vec<RankContext>> {
    bail!("device = cuda: {NONE}; {} ranks were to run on GPUs", ordinals.len())
}

/// Times sums over GPUs.
pub fn time_sums(_ordinals: &[usize], _config: &Config, _task: &SumTask) -> Result<Vec<SumTimes>> {
    bail!("{NONE}")
}
