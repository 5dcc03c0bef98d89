//! GPUs in a build with the feature `cuda`.

use anyhow::Result;
use pagemill_backend::{ActivationMode, Backend, Collective, SoloCollective};
use pagemill_backend_cuda::{Activations, CudaBackend, CudaCollective, CudaConfig};
use pagemill_engine::RankContext;
use std::sync::Arc;

/// Why there is none.
pub const NONE: &str = "no NVIDIA driver or no GPU on this machine";

/// GPUs of this machine; 0 where there is no driver.
pub fn count() -> Result<usize> {
    Ok(CudaBackend::count_devices()?)
}

fn open_one(ordinal: usize, activations: ActivationMode) -> Result<CudaBackend> {
    let activations = match activations {
        ActivationMode::Int8 => Activations::Bf16,
        ActivationMode::F32 => Activations::F32,
    };
    Ok(CudaBackend::new(CudaConfig { ordinal, activations })?)
}

/// Opens GPU `ordinal`.
pub fn open(ordinal: usize, activations: ActivationMode) -> Result<Arc<dyn Backend>> {
    Ok(Arc::new(open_one(ordinal, activations)?))
}

/// Opens a GPU for each rank, stage by stage, and connects them.
pub fn open_ranks(ordinals: &[usize], activations: ActivationMode, ranks_per_stage: usize) -> Result<Vec<RankContext>> {
    let backends: Vec<Arc<CudaBackend>> =
        ordinals.iter().map(|&ordinal| Ok(Arc::new(open_one(ordinal, activations)?))).collect::<Result<_>>()?;
    let collectives: Vec<Arc<dyn Collective>> = match backends.len() {
        1 => vec![Arc::new(SoloCollective)],
        _ => CudaCollective::world(&backends, ranks_per_stage)?.into_iter().map(|rank| Arc::new(rank) as _).collect(),
    };
    let ranks = backends.into_iter().zip(collectives);
    Ok(ranks.map(|(backend, collective)| RankContext { backend, collective }).collect())
}
