//! The GPU of a rank that is a process, in a build without the feature `cuda`: there is none.

use crate::config::Config;
use crate::devices::gpu::NONE;
use anyhow::{Result, bail};
use pagemill_backend::BackendError;
use pagemill_engine::{ParallelMode, RankContext};
use std::sync::{Arc, OnceLock};

/// There is none.
pub enum RankGpu {}

impl RankGpu {
    /// Opens GPU `ordinal`.
    pub fn open(ordinal: usize, _config: &Config) -> Result<Self> {
        bail!("device = cuda:{ordinal}: {NONE}")
    }

    /// Never called.
    pub fn description(&self) -> String {
        match *self {}
    }

    /// Never called.
    pub fn uuid(&self) -> Result<[u8; 16]> {
        match *self {}
    }

    /// Never called.
    pub fn connect(
        self,
        _rank: usize,
        _mode: ParallelMode,
        _ids: &[u8],
        _ended: &Arc<OnceLock<String>>,
    ) -> Result<RankContext, BackendError> {
        match self {}
    }
}

/// Nobody connects by them.
#[allow(clippy::unnecessary_wraps)] // the other build's form
pub fn make_ids(_mode: ParallelMode) -> Result<Vec<u8>, BackendError> {
    Ok(Vec::new())
}

/// Nobody connects by them.
pub fn num_id_bytes(_mode: ParallelMode) -> usize {
    0
}
