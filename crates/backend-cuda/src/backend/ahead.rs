//! Steps queued before the draws of the one before are known to the host.

use super::records::record_key;
use super::{CudaBackend, lock};
use crate::check::{to_u32, view_f32};
use crate::sampling::StepWords;
use pagemill_backend::check::ensure;
use pagemill_backend::sampling::{RowOutcome, RowTask};
use pagemill_backend::{AwaitedToken, BackendError, DeviceBatch, StepsAhead, Tensor};

impl StepsAhead for CudaBackend {
    fn is_recorded(&self, batch: &DeviceBatch) -> Result<bool, BackendError> {
        let key = record_key("is_recorded", batch)?;
        Ok(key.is_some_and(|key| lock(&self.records).has(&key)))
    }

    fn replay_awaiting(
        &self,
        ids: &[u32],
        awaited: &[AwaitedToken],
        batch: &DeviceBatch,
    ) -> Result<Tensor, BackendError> {
        const OP: &str = "replay_awaiting";
        let (num_tokens, are_ids) = (batch.layout.num_tokens(), |at: u32| (at as usize) < ids.len());
        ensure(OP, ids.len() == num_tokens && awaited.iter().all(|awaited| are_ids(awaited.token)), || {
            (format!("{num_tokens} ids, and awaited ones among them"), ids.len().to_string())
        })?;
        let mut memory = lock(&self.batch);
        let (from, awaited_place) = memory.stage_awaiting(OP, ids, awaited)?;
        let words = StepWords {
            from,
            awaited: awaited_place,
            ids: memory.ids_address(),
            num_ids: ids.len(),
            num_awaited: awaited.len(),
            largest_task: awaited.iter().map(|awaited| awaited.task).max(),
        };
        // SAFETY: both lists were just staged in a ring that is not used again before the stream was waited for, and
        // the places were checked above; the range for ids has room for the most that can be staged.
        unsafe { self.results.begin_step(words) }?;
        drop(memory);
        let hidden = match record_key(OP, batch)? {
            Some(key) => lock(&self.records).run(&key)?,
            None => None,
        };
        hidden.ok_or_else(|| self.device.broken("a step that is not recorded cannot be run ahead"))
    }

    fn queue_sampling(&self, logits: &Tensor, tasks: &[RowTask<'_>]) -> Result<(), BackendError> {
        const OP: &str = "queue_sampling";
        let (rows, cols) = (logits.rows(), to_u32(OP, "columns", logits.cols())?);
        let is_fit = |task: &RowTask<'_>| task.row < rows && task.num_top.is_none();
        ensure(OP, cols > 0 && !tasks.is_empty() && tasks.iter().all(is_fit), || {
            ("tasks without reports of its rows, which have a column".into(), format!("[{rows}, {cols}]"))
        })?;
        self.results.queue(view_f32(OP, logits)?, (rows, cols), tasks)
    }

    fn is_sampled(&self) -> Result<bool, BackendError> {
        self.results.is_sampled()
    }

    fn take_sampled(&self, outcomes: &mut Vec<Option<RowOutcome>>) -> Result<(), BackendError> {
        self.results.take_sampled(outcomes)
    }
}
