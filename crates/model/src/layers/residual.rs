//! The residual stream: what flows past the blocks. Decides when an addition is fused with the norm
//! that follows it.

use super::{RmsNorm, StepContext};
use crate::ModelError;
use pagemill_backend::Tensor;

/// Hidden states `[T, D]` and a block's output that is not added yet.
pub(crate) struct ResidualStream {
    residual: Tensor,
    pending: Option<Tensor>,
}

impl ResidualStream {
    /// Begins with the embeddings, or with the states of the stage before.
    pub(crate) fn new(residual: Tensor) -> Self {
        Self { residual, pending: None }
    }

    /// Adds a block's output `[T, D]`, at the latest with the next norm.
    pub(crate) fn add(&mut self, cx: &StepContext<'_>, x: Tensor) -> Result<(), ModelError> {
        if let Some(earlier) = self.pending.replace(x) {
            cx.backend().add(&mut self.residual, &earlier)?;
        }
        Ok(())
    }

    /// The norm of the stream, `[T, D]`.
    pub(crate) fn normed(&mut self, cx: &StepContext<'_>, norm: &RmsNorm) -> Result<Tensor, ModelError> {
        match self.pending.take() {
            Some(x) => norm.forward_after_add(cx.backend(), &mut self.residual, &x),
            None => norm.forward(cx.backend(), &self.residual),
        }
    }

    /// The stream with everything added, `[T, D]`.
    pub(crate) fn finish(mut self, cx: &StepContext<'_>) -> Result<Tensor, ModelError> {
        if let Some(x) = self.pending.take() {
            cx.backend().add(&mut self.residual, &x)?;
        }
        Ok(self.residual)
    }
}
