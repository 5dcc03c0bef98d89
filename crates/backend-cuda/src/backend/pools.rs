//! What an attention op finds of a pool and of a batch's plans.

use super::{CudaBackend, lock};
use crate::attention::{AttentionLaunches, LayerPool, PoolTensor};
use crate::batch::device_batch;
use crate::kernels::attention_plan::{LayerKind, PlanPlace};
use pagemill_backend::check::shape_error;
use pagemill_backend::{BackendError, DeviceBatch, KvPool};

impl CudaBackend {
    pub(super) fn pool_layer<'a>(
        &self,
        op: &'static str,
        kv: &'a KvPool,
        layer_idx: usize,
    ) -> Result<LayerPool<'a>, BackendError> {
        let tensor = kv.layer(layer_idx).as_any().downcast_ref::<PoolTensor>();
        let tensor = tensor.ok_or_else(|| shape_error(op, "a KV pool of the cuda device", "one of another device"))?;
        Ok(LayerPool { spec: kv.spec(), address: tensor.address(), map: tensor.map() })
    }

    /// The batch's plan for a kind of layers, made if this is the first time; `None` if that cannot be done now.
    pub(super) fn attention_plan(
        &self,
        op: &'static str,
        kind: LayerKind,
        batch: &DeviceBatch,
    ) -> Result<Option<PlanPlace>, BackendError> {
        let device = device_batch(op, batch)?;
        if let Some(place) = device.plan(&kind) {
            return Ok(Some(place));
        }
        // An upload would become part of the record. The step before a recorded one has met all kinds, unless it
        // failed.
        if lock(&self.records).is_recording() {
            return Ok(None);
        }
        lock(&self.batch).add_plan(kind, &batch.layout, device).map(Some)
    }

    /// How often each of the attention kernels was launched, each launch of a recorded step counted once. For tests
    /// and diagnosis.
    pub fn attention_launches(&self) -> AttentionLaunches {
        self.attention.launches()
    }
}
