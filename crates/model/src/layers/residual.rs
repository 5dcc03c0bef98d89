//! The residual stream: what flows past the blocks. Decides when an addition is fused with the norm
//! that follows it.

use super::{RmsNorm, StepContext};
use crate::ModelError;
use pagemill_backend::{Addend, LinearInput, Tensor};

/// Hidden states `[T, D]` and a block's output that is not added yet.
pub(crate) struct ResidualStream<'m> {
    residual: Tensor,
    pending: Option<Contribution<'m>>,
    /// What the last norm added: kept until its product has read it.
    added: Option<Contribution<'m>>,
}

/// A block's output `[T, D]`, and the norm that it goes through before it is added.
struct Contribution<'m> {
    x: Tensor,
    norm: Option<&'m RmsNorm>,
}

impl Contribution<'_> {
    fn addend(&self) -> Addend<'_> {
        Addend { x: &self.x, norm: self.norm.map(RmsNorm::params) }
    }

    fn add_to(&self, cx: &StepContext<'_>, residual: &mut Tensor) -> Result<(), ModelError> {
        let backend = cx.backend();
        let Some(norm) = self.norm.map(RmsNorm::params) else {
            return Ok(backend.add(residual, &self.x)?);
        };
        let mut normed = backend.activation(self.x.rows(), self.x.cols())?;
        backend.rms_norm(&self.x, norm.weight, norm.eps, &mut normed)?;
        Ok(backend.add(residual, &normed)?)
    }
}

impl<'m> ResidualStream<'m> {
    /// Begins with the embeddings, or with the states of the stage before.
    pub(crate) fn new(residual: Tensor) -> Self {
        Self { residual, pending: None, added: None }
    }

    /// Adds a block's output `[T, D]`, at the latest with the next norm.
    pub(crate) fn add(&mut self, cx: &StepContext<'_>, x: Tensor) -> Result<(), ModelError> {
        self.push(cx, Contribution { x, norm: None })
    }

    /// Adds the norm of a block's output `[T, D]`, at the latest with the next norm.
    pub(crate) fn add_normed(&mut self, cx: &StepContext<'_>, x: Tensor, norm: &'m RmsNorm) -> Result<(), ModelError> {
        self.push(cx, Contribution { x, norm: Some(norm) })
    }

    fn push(&mut self, cx: &StepContext<'_>, contribution: Contribution<'m>) -> Result<(), ModelError> {
        self.added = None;
        if let Some(earlier) = self.pending.replace(contribution) {
            earlier.add_to(cx, &mut self.residual)?;
        }
        Ok(())
    }

    /// The norm of the stream `[T, D]`, to be made by the one product that reads it.
    pub(crate) fn normed<'a>(&'a mut self, norm: &'a RmsNorm) -> LinearInput<'a> {
        self.added = self.pending.take();
        let (residual, norm) = (&mut self.residual, norm.params());
        match &self.added {
            Some(added) => LinearInput::AddNormed { residual, addend: added.addend(), norm },
            None => LinearInput::Normed { x: residual, norm },
        }
    }

    /// The stream with everything added, `[T, D]`.
    pub(crate) fn finish(mut self, cx: &StepContext<'_>) -> Result<Tensor, ModelError> {
        if let Some(contribution) = self.pending.take() {
            contribution.add_to(cx, &mut self.residual)?;
        }
        Ok(self.residual)
    }
}
