//! The GPU of a rank that is a process, in a build with the feature `cuda`.

use crate::config::Config;
use crate::devices::gpu;
use anyhow::Result;
use pagemill_backend::{Backend, BackendError};
use pagemill_backend_cuda::{CudaBackend, CudaCollective, Seat, WorldIds};
use pagemill_engine::{ParallelMode, RankContext};
use std::sync::{Arc, OnceLock};

/// One that is open, and not connected to others.
pub struct RankGpu(Arc<CudaBackend>);

impl RankGpu {
    /// Opens GPU `ordinal`.
    pub fn open(ordinal: usize, config: &Config) -> Result<Self> {
        Ok(Self(Arc::new(gpu::open_one(ordinal, config)?)))
    }

    /// What it says about itself.
    pub fn description(&self) -> String {
        self.0.info().description
    }

    /// Its own number.
    pub fn uuid(&self) -> Result<[u8; 16]> {
        Ok(self.0.uuid()?)
    }

    /// Connects it with those of the other ranks, as rank `rank` of `mode`. Every wait ends when somebody sets `ended`.
    pub fn connect(
        self,
        rank: usize,
        mode: ParallelMode,
        ids: &[u8],
        ended: &Arc<OnceLock<String>>,
    ) -> Result<RankContext, BackendError> {
        let seat = seat(rank, mode);
        let collective = CudaCollective::join(&self.0, seat, &WorldIds::from_bytes(seat, ids)?, ended)?;
        Ok(RankContext { backend: self.0, collective: Arc::new(collective) })
    }
}

/// New ids for all ranks of `mode` to connect by.
pub fn make_ids(mode: ParallelMode) -> Result<Vec<u8>, BackendError> {
    WorldIds::make(seat(0, mode)).map(|ids| ids.to_bytes())
}

/// Bytes of such ids.
pub fn num_id_bytes(mode: ParallelMode) -> usize {
    WorldIds::num_bytes(seat(0, mode))
}

fn seat(rank: usize, mode: ParallelMode) -> Seat {
    Seat { rank, ranks_per_stage: mode.tensor_parallel, num_stages: mode.pipeline_parallel }
}
