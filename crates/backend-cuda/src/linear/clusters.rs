//! Kernels of Hopper whose thread blocks work in clusters: their forms, how many clusters of each are there at once, and
//! how often they were launched. Knows no product.

use crate::device::Device;
use crate::images::Kernels;
use crate::kernels::Launch;
use crate::rows::Function;
use pagemill_backend::BackendError;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicU64, Ordering};

/// A form of a kernel.
#[derive(Clone, Copy)]
pub(super) struct ClusterForm {
    pub(super) function: Function,
    /// Clusters that are there at once.
    pub(super) max_clusters: u32,
}

/// A kernel's forms, by variant.
pub(crate) struct ClusterKernels<V> {
    forms: HashMap<V, ClusterForm>,
    launches: AtomicU64,
}

impl<V: Eq + Hash> ClusterKernels<V> {
    /// Looks the forms up, each with its name and a launch of it, in clusters of `ranks` thread blocks. `None` on chips that
    /// the kernel is not for.
    ///
    /// # Errors
    /// A kernel that this build lacks or the driver refuses.
    pub(super) fn load(
        device: &Device,
        kernels: &Kernels,
        ranks: u32,
        named: impl IntoIterator<Item = (V, String, Launch)>,
    ) -> Result<Option<Self>, BackendError> {
        if !kernels.are_for_hopper() {
            return Ok(None);
        }
        let mut forms = HashMap::new();
        for (variant, name, launch) in named {
            let function = kernels.get_with_shared(&name, launch.shared_bytes)?;
            let max_clusters = device.max_clusters(function, ranks, &launch)?;
            forms.insert(variant, ClusterForm { function: Function(function), max_clusters });
        }
        let is_usable = forms.values().all(|form| form.max_clusters > 0);
        Ok(is_usable.then(|| Self { forms, launches: AtomicU64::new(0) }))
    }

    /// A variant's form.
    pub(super) fn form(&self, variant: &V) -> Option<ClusterForm> {
        self.forms.get(variant).copied()
    }

    /// A launch is about to be queued.
    pub(super) fn count_launch(&self) {
        self.launches.fetch_add(1, Ordering::Relaxed);
    }

    /// Launches so far, recorded ones counted once.
    pub(crate) fn launches(&self) -> u64 {
        self.launches.load(Ordering::Relaxed)
    }
}
