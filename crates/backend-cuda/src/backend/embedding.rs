//! Embedding rows, of a whole vocabulary or of a rank's part of it.

use super::{CudaBackend, lock, matrix};
use crate::check::{to_u32, view_f32};
use crate::linear::Lookup;
use pagemill_backend::check::ensure_shape;
use pagemill_backend::{BackendError, Tensor, Weight};

impl CudaBackend {
    /// `out[t] = table[ids[t] - first_id] * scale`; rows of ids that the table lacks become zero.
    pub(super) fn embed_rows(
        &self,
        op: &'static str,
        table: &Weight,
        first_id: usize,
        ids: &[u32],
        scale: f32,
        out: &Tensor,
    ) -> Result<(), BackendError> {
        ensure_shape(op, "out", out, ids.len(), table.cols())?;
        let first_id = to_u32(op, "token ids", first_id)?;
        let num_tokens = to_u32(op, "tokens", ids.len())?;
        // A recorded step's ids are uploaded before it runs.
        let ids = if lock(&self.records).is_recording() {
            lock(&self.batch).ids_address()
        } else {
            lock(&self.batch).upload_ids(op, ids)?
        };
        self.linear.embed(matrix(op, table)?, &Lookup { ids, num_tokens, first_id, scale }, view_f32(op, out)?)
    }
}
