//! Steps that a device is given before the host knows what the step before draws: the tokens go from one to the next on
//! the device, so that it need not wait for the host between them.

use crate::sampling::{RowOutcome, RowTask};
use crate::{BackendError, DeviceBatch, Tensor};

/// Steps whose outcomes may be on their way at once: the one that runs and the one behind it.
pub const MAX_QUEUED_STEPS: usize = 2;

/// A token of the step at hand that the step queued before draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AwaitedToken {
    /// Which of the step's tokens.
    pub token: u32,
    /// Which of the tasks of the step before draws it.
    pub task: u32,
}

/// A device that takes steps ahead. A step is its forward, run again from a record, and its sampling tasks; the host
/// takes outcomes in the order in which it queued steps, [`MAX_QUEUED_STEPS`] at most being on their way.
pub trait StepsAhead {
    /// Whether the forward of such a batch is recorded.
    ///
    /// # Errors
    /// A batch of another device.
    fn is_recorded(&self, batch: &DeviceBatch) -> Result<bool, BackendError>;

    /// Runs the recorded forward over `ids` `[T]`, with the tokens `awaited` taken from the tasks queued last: their
    /// ids do not count, and where nothing could be drawn 0 stands for the token. Hidden states `[T, D]`, not computed
    /// yet. Returns at once.
    ///
    /// # Errors
    /// A forward that is not recorded; awaited tokens or tasks that are not there; the device's faults.
    fn replay_awaiting(
        &self,
        ids: &[u32],
        awaited: &[AwaitedToken],
        batch: &DeviceBatch,
    ) -> Result<Tensor, BackendError>;

    /// As [`crate::Backend::sample_rows`] of tasks without reports, but returns at once; the outcomes are taken with
    /// [`Self::take_sampled`].
    ///
    /// # Errors
    /// Tasks of rows that are not there, or with a report; more than [`MAX_QUEUED_STEPS`] on their way.
    fn queue_sampling(&self, logits: &Tensor, tasks: &[RowTask<'_>]) -> Result<(), BackendError>;

    /// Whether the outcomes queued first are there.
    ///
    /// # Errors
    /// What went wrong on the device.
    fn is_sampled(&self) -> Result<bool, BackendError>;

    /// Waits for the outcomes queued first, and puts them into `outcomes` (cleared first).
    ///
    /// # Errors
    /// None are on their way; what went wrong on the device.
    fn take_sampled(&self, outcomes: &mut Vec<Option<RowOutcome>>) -> Result<(), BackendError>;
}
