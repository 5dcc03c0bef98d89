//! Ranks in processes of their own, as the executor of rank 0 sees them: one channel of plans to all of
//! them, one channel of outputs back, and a meter for each. Knows no socket and no frame: a transport
//! holds the other ends.

use crate::pipeline::{MAX_MICRO_BATCHES, RankMeter};
use crate::{EngineError, StepInput};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use pagemill_scheduler::StepOutput;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A step's outputs on their way to the executor.
pub(crate) type OutputSender = Sender<Result<StepOutput, EngineError>>;

/// The executor's ends.
pub struct RemoteRanks {
    pub(crate) inputs: Sender<Arc<StepInput>>,
    pub(crate) output_sender: OutputSender,
    pub(crate) outputs: Receiver<Result<StepOutput, EngineError>>,
    pub(crate) failure: Arc<OnceLock<String>>,
    /// Of ranks `1..`, in order.
    pub(crate) meters: Vec<Arc<RankMeter>>,
}

/// The transport's ends; cheap to clone, so that threads may share them.
#[derive(Clone)]
pub struct RemoteEnds {
    inputs: Receiver<Arc<StepInput>>,
    outputs: OutputSender,
    failure: Arc<OnceLock<String>>,
    meters: Arc<[Arc<RankMeter>]>,
}

/// What came of waiting for a plan.
#[derive(Debug)]
pub enum NextStep {
    /// The next one.
    Step(Arc<StepInput>),
    /// None came within the time.
    Nothing,
    /// The engine has ended: no more will come.
    Ended,
}

impl RemoteRanks {
    /// Ends for `num_remote` ranks in other processes: ranks `1..=num_remote` of the world.
    #[must_use]
    pub fn new(num_remote: usize) -> (Self, RemoteEnds) {
        let (inputs, input_receiver) = bounded(MAX_MICRO_BATCHES);
        let (output_sender, outputs) = bounded(MAX_MICRO_BATCHES + 1);
        let failure = Arc::new(OnceLock::new());
        let meters: Vec<Arc<RankMeter>> = (0..num_remote).map(|_| Arc::default()).collect();
        let ends = RemoteEnds {
            inputs: input_receiver,
            outputs: output_sender.clone(),
            failure: Arc::clone(&failure),
            meters: meters.clone().into(),
        };
        (Self { inputs, output_sender, outputs, failure, meters }, ends)
    }
}

impl RemoteEnds {
    /// Waits for a plan, `timeout` at most.
    #[must_use]
    pub fn next_step(&self, timeout: Duration) -> NextStep {
        match self.inputs.recv_timeout(timeout) {
            Ok(step) => NextStep::Step(step),
            Err(RecvTimeoutError::Timeout) => NextStep::Nothing,
            Err(RecvTimeoutError::Disconnected) => NextStep::Ended,
        }
    }

    /// Hands the executor a step's output, in the order of the plans. False: nobody listens any more, or
    /// more outputs came than plans can be in flight.
    #[must_use]
    pub fn output(&self, output: StepOutput) -> bool {
        self.outputs.try_send(Ok(output)).is_ok()
    }

    /// Rank `rank`'s counters, as it told them: microseconds in steps, and growths of its workspace.
    pub fn count(&self, rank: usize, busy_us: u64, workspace_grown: u64) {
        if let Some(meter) = rank.checked_sub(1).and_then(|at| self.meters.get(at)) {
            meter.busy_us.store(busy_us, Ordering::Relaxed);
            meter.workspace_grown.store(workspace_grown, Ordering::Relaxed);
        }
    }

    /// A rank is lost: the engine stops with `reason`, whether or not a step is in flight. The first
    /// reason stays.
    pub fn fail(&self, reason: &str) {
        self.failure.get_or_init(|| reason.to_owned());
    }

    /// Why a rank failed, if one did: another process's, or this one's own.
    #[must_use]
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }
}
