//! How ranks talk. One rank needs none of it; the calls are there from the first day so that layers
//! own their sharding.

use crate::{BackendError, Norm, Tensor};

/// Collectives between the tensor-parallel ranks of a stage and the stages of a pipeline. Every rank
/// calls the same collectives in the same order; sums run in rank order, so results are
/// reproducible. Errors mean a lost rank: the engine must stop.
pub trait Collective: Send + Sync {
    /// This rank's index within its stage, `0..world_size`.
    fn rank(&self) -> usize;
    /// Ranks in the stage.
    fn world_size(&self) -> usize;
    /// `x` becomes the sum of all ranks' `x`, element by element. Blocks, on a device with a stream only what
    /// comes later there.
    fn all_reduce(&self, x: &mut Tensor) -> Result<(), BackendError>;
    /// `residual += the sum of all ranks' x`, then `out = norm of residual`, in one go and with the bits of
    /// [`Collective::all_reduce`] and [`crate::Backend::add_rms_norm`]; `x` is undefined then. False, and nothing
    /// done, where that is not faster than the two: on every rank alike. All `[rows, cols]`.
    fn all_reduce_add_norm(
        &self,
        _x: &mut Tensor,
        _residual: &mut Tensor,
        _norm: Norm<'_>,
        _out: &mut Tensor,
    ) -> Result<bool, BackendError> {
        Ok(false)
    }
    /// Columns of all ranks side by side, in rank order: `[R, n]` each gives `[R, n * world_size]`.
    fn all_gather_cols(&self, x: &Tensor, out: &mut Tensor) -> Result<(), BackendError>;
    /// Sends hidden states to the stage `peer`.
    fn send(&self, x: &Tensor, peer: usize) -> Result<(), BackendError>;
    /// Receives hidden states from the stage `peer`.
    fn recv(&self, out: &mut Tensor, peer: usize) -> Result<(), BackendError>;
    /// This rank cannot go on: every call of every rank that waits now or comes later fails with
    /// `reason`. Never blocks. The first reason stays.
    fn abort(&self, _reason: &str) {}
}

/// The collective of a single rank: sums and gathers are the identity.
#[derive(Clone, Copy, Debug, Default)]
pub struct SoloCollective;

impl Collective for SoloCollective {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn all_reduce(&self, _x: &mut Tensor) -> Result<(), BackendError> {
        Ok(())
    }

    fn all_gather_cols(&self, _x: &Tensor, _out: &mut Tensor) -> Result<(), BackendError> {
        Err(BackendError::Collective { op: "all_gather_cols", detail: "a single rank keeps its own columns".into() })
    }

    fn send(&self, _x: &Tensor, peer: usize) -> Result<(), BackendError> {
        Err(BackendError::Collective { op: "send", detail: format!("a single rank has no peer {peer}") })
    }

    fn recv(&self, _out: &mut Tensor, peer: usize) -> Result<(), BackendError> {
        Err(BackendError::Collective { op: "recv", detail: format!("a single rank has no peer {peer}") })
    }
}
