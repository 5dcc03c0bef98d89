//! `PipelineExecutor`: one worker thread for each rank, fed and read through bounded channels. Today
//! there is one rank. Knows threads and their ends; what a step computes is `worker`'s.

use crate::worker::Worker;
use crate::{EngineError, Executor, StepInput};
use crossbeam_channel::{Receiver, Sender, bounded};
use pagemill_scheduler::StepOutput;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

/// Steps in flight: with a single stage the next plan needs the last one's tokens.
const MAX_IN_FLIGHT: usize = 1;

/// Runs plans on the ranks' worker threads.
pub struct PipelineExecutor {
    rank: RankThread,
    workspace_grown: u64,
}

/// A worker's own thread. Ends when its input closes, at its first error, and at a panic.
struct RankThread {
    /// `None` only while dropping.
    inputs: Option<Sender<StepInput>>,
    replies: Receiver<Result<Reply, EngineError>>,
    thread: Option<JoinHandle<()>>,
}

struct Reply {
    output: StepOutput,
    workspace_grown: u64,
}

impl PipelineExecutor {
    /// Starts the worker's thread.
    ///
    /// # Errors
    /// The system gave no thread.
    pub(crate) fn start(worker: Worker) -> Result<Self, EngineError> {
        let (input_sender, inputs) = bounded(MAX_IN_FLIGHT);
        let (reply_sender, replies) = bounded(MAX_IN_FLIGHT);
        let thread = std::thread::Builder::new()
            .name("pagemill-rank-0".into())
            .spawn(move || run_rank(worker, &inputs, &reply_sender))
            .map_err(|error| EngineError::Internal(format!("no thread for rank 0: {error}")))?;
        let rank = RankThread { inputs: Some(input_sender), replies, thread: Some(thread) };
        Ok(Self { rank, workspace_grown: 0 })
    }
}

impl Executor for PipelineExecutor {
    fn submit(&mut self, input: StepInput) -> Result<(), EngineError> {
        let sent = self.rank.inputs.as_ref().is_some_and(|inputs| inputs.send(input).is_ok());
        if sent { Ok(()) } else { Err(lost_rank()) }
    }

    fn collect(&mut self) -> Result<StepOutput, EngineError> {
        let reply = self.rank.replies.recv().map_err(|_| lost_rank())??;
        self.workspace_grown = reply.workspace_grown;
        Ok(reply.output)
    }

    fn max_in_flight(&self) -> usize {
        MAX_IN_FLIGHT
    }

    fn workspace_grown(&self) -> u64 {
        self.workspace_grown
    }
}

impl Drop for RankThread {
    fn drop(&mut self) {
        self.inputs = None;
        if let Some(thread) = self.thread.take() {
            // Its panics are caught and told as errors; there is nothing left to hear.
            let _ = thread.join();
        }
    }
}

fn lost_rank() -> EngineError {
    EngineError::Internal("the worker thread of rank 0 is gone".into())
}

fn run_rank(mut worker: Worker, inputs: &Receiver<StepInput>, replies: &Sender<Result<Reply, EngineError>>) {
    for input in inputs {
        // The worker is not used again after a panic, so a half-changed one is never seen.
        let result = catch_unwind(AssertUnwindSafe(|| worker.run(input)))
            .unwrap_or_else(|panic| Err(EngineError::Internal(format!("rank 0 panicked: {}", panic_message(&*panic)))))
            .map(|output| Reply { output, workspace_grown: worker.workspace_grown() });
        let failed = result.is_err();
        if replies.send(result).is_err() || failed {
            return;
        }
    }
}

/// What a panic said.
pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
