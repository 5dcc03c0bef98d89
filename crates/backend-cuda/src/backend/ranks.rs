//! What other files of this room, the collectives of ranks among them, may see of a backend.

use super::CudaBackend;
use crate::device::Device;
use crate::images::Kernels;
use crate::memory::Workspace;
use std::sync::Arc;

impl CudaBackend {
    /// The device that ops run on.
    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Its kernels.
    pub(crate) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Where temporaries come from.
    pub(crate) fn temporaries(&self) -> &Arc<Workspace> {
        &self.workspace
    }
}
