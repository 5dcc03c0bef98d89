//! GPUs in a build with the feature `cuda`.

use anyhow::Result;
use pagemill_backend::{ActivationMode, Backend};
use pagemill_backend_cuda::{Activations, CudaBackend, CudaConfig};
use std::sync::Arc;

/// Why there is none.
pub const NONE: &str = "no NVIDIA driver or no GPU on this machine";

/// GPUs of this machine; 0 where there is no driver.
pub fn count() -> Result<usize> {
    Ok(CudaBackend::count_devices()?)
}

/// Opens GPU `ordinal`.
pub fn open(ordinal: usize, activations: ActivationMode) -> Result<Arc<dyn Backend>> {
    let activations = match activations {
        ActivationMode::Int8 => Activations::Bf16,
        ActivationMode::F32 => Activations::F32,
    };
    Ok(Arc::new(CudaBackend::new(CudaConfig { ordinal, activations, deterministic: false })?))
}
