//! The residual stream: what flows past the blocks. Decides when the sum over ranks is taken, and when an addition is
//! fused with the norm that follows it.

use super::linear::PartialSum;
use super::{RmsNorm, StepContext};
use crate::ModelError;
use pagemill_backend::{Addend, LinearInput, Tensor};

/// Hidden states `[T, D]` and a block's output that is not added yet.
pub(crate) struct ResidualStream<'m> {
    residual: Tensor,
    pending: Option<Contribution<'m>>,
    /// What the last norm added, or its result: kept until its product has read it.
    read: Option<Contribution<'m>>,
}

/// A block's output `[T, D]`, of which this rank has a part, and the norm that the sum goes through before it is
/// added.
struct Contribution<'m> {
    x: Tensor,
    norm: Option<&'m RmsNorm>,
}

impl Contribution<'_> {
    fn addend(&self) -> Addend<'_> {
        Addend { x: &self.x, norm: self.norm.map(RmsNorm::params) }
    }

    /// Takes the sum over ranks, and adds it.
    fn add_to(mut self, cx: &StepContext<'_>, residual: &mut Tensor) -> Result<(), ModelError> {
        let backend = cx.backend();
        cx.rank.collective.all_reduce(&mut self.x)?;
        let Some(norm) = self.norm.map(RmsNorm::params) else {
            return Ok(backend.add(residual, &self.x)?);
        };
        let mut normed = backend.activation(self.x.rows(), self.x.cols())?;
        backend.rms_norm(&self.x, norm.weight, norm.eps, &mut normed)?;
        Ok(backend.add(residual, &normed)?)
    }

    /// Takes the sum over ranks, adds it and norms the stream in one go, where the ranks can do that: the norm.
    fn add_and_norm(
        &mut self,
        cx: &StepContext<'_>,
        residual: &mut Tensor,
        norm: &RmsNorm,
    ) -> Result<Option<Tensor>, ModelError> {
        let collective = &cx.rank.collective;
        if self.norm.is_some() || collective.world_size() == 1 {
            return Ok(None);
        }
        let mut out = cx.backend().activation(self.x.rows(), self.x.cols())?;
        let is_done = collective.all_reduce_add_norm(&mut self.x, residual, norm.params(), &mut out)?;
        Ok(is_done.then_some(out))
    }
}

impl<'m> ResidualStream<'m> {
    /// Begins with the embeddings, or with the states of the stage before.
    pub(crate) fn new(residual: Tensor) -> Self {
        Self { residual, pending: None, read: None }
    }

    /// Adds a block's output `[T, D]`, at the latest with the next norm.
    pub(crate) fn add(&mut self, cx: &StepContext<'_>, x: PartialSum) -> Result<(), ModelError> {
        self.push(cx, Contribution { x: x.0, norm: None })
    }

    /// Adds the norm of a block's output `[T, D]`, at the latest with the next norm.
    pub(crate) fn add_normed(
        &mut self,
        cx: &StepContext<'_>,
        x: PartialSum,
        norm: &'m RmsNorm,
    ) -> Result<(), ModelError> {
        self.push(cx, Contribution { x: x.0, norm: Some(norm) })
    }

    fn push(&mut self, cx: &StepContext<'_>, contribution: Contribution<'m>) -> Result<(), ModelError> {
        self.read = None;
        if let Some(earlier) = self.pending.replace(contribution) {
            earlier.add_to(cx, &mut self.residual)?;
        }
        Ok(())
    }

    /// The norm of the stream `[T, D]`, to be made by the one product that reads it, or made already with the sum
    /// over ranks.
    pub(crate) fn normed<'a>(
        &'a mut self,
        cx: &StepContext<'_>,
        norm: &'a RmsNorm,
    ) -> Result<LinearInput<'a>, ModelError> {
        self.read = self.pending.take();
        let residual = &mut self.residual;
        let Some(added) = &mut self.read else {
            return Ok(LinearInput::Normed { x: residual, norm: norm.params() });
        };
        if let Some(made) = added.add_and_norm(cx, residual, norm)? {
            added.x = made;
            return Ok(LinearInput::Plain(&added.x));
        }
        cx.rank.collective.all_reduce(&mut added.x)?;
        Ok(LinearInput::AddNormed { residual, addend: added.addend(), norm: norm.params() })
    }

    /// Goes on with the rows `rows` alone, in this order, when a product has read the last norm.
    pub(crate) fn keep_rows(&mut self, cx: &StepContext<'_>, rows: &[u32]) -> Result<(), ModelError> {
        self.read = None;
        if let Some(contribution) = self.pending.take() {
            contribution.add_to(cx, &mut self.residual)?;
        }
        let mut kept = cx.backend().temp(rows.len(), self.residual.cols())?;
        cx.backend().gather_rows(&self.residual, rows, &mut kept)?;
        self.residual = kept;
        Ok(())
    }

    /// The stream with everything added, `[T, D]`.
    pub(crate) fn finish(mut self, cx: &StepContext<'_>) -> Result<Tensor, ModelError> {
        if let Some(contribution) = self.pending.take() {
            contribution.add_to(cx, &mut self.residual)?;
        }
        Ok(self.residual)
    }
}
