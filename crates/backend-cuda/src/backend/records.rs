//! Forwards that are recorded, and run again.

use super::{CudaBackend, lock};
use crate::batch::{CudaBatch, device_batch};
use crate::check::view;
use crate::graphs::{HIDDEN, Next, RecordKey, is_recordable};
use pagemill_backend::check::ensure;
use pagemill_backend::{BackendError, DeviceBatch, Tensor};

impl CudaBackend {
    /// See `Backend::replay`.
    pub(super) fn replay_or_record(&self, ids: &[u32], batch: &DeviceBatch) -> Result<Option<Tensor>, BackendError> {
        const OP: &str = "replay";
        let Some(key) = record_key(OP, batch)?.filter(|key| key.num_tokens == ids.len()) else { return Ok(None) };
        lock(&self.batch).upload_ids(OP, ids)?;
        match lock(&self.records).begin(key)? {
            Next::Done(hidden) => Ok(Some(hidden)),
            Next::Run | Next::Record => Ok(None),
        }
    }

    /// See `Backend::end_recording`.
    pub(super) fn keep_record(&self, hidden: Tensor) -> Result<Tensor, BackendError> {
        const OP: &str = "end_recording";
        let mut records = lock(&self.records);
        if !records.is_recording() {
            return Ok(hidden);
        }
        ensure(OP, hidden.dtype() == HIDDEN, || (HIDDEN.to_string(), hidden.dtype().to_string()))?;
        let address = view(OP, &hidden)?.address;
        records.end(&hidden, address)
    }
}

/// What a batch's forward is recorded under, if it may be.
pub(super) fn record_key(op: &'static str, batch: &DeviceBatch) -> Result<Option<RecordKey>, BackendError> {
    if !is_recordable(&batch.layout) {
        return Ok(None);
    }
    let CudaBatch { moves, decode_variants, .. } = device_batch(op, batch)?;
    Ok(Some(RecordKey {
        num_tokens: batch.layout.num_tokens(),
        decode_variants: decode_variants.clone(),
        batch_moves: *moves,
    }))
}
