//! The seam between deciding and computing. Two implementations: the pipeline of ranks, and the
//! simulator's fake.

use crate::{EngineError, RankHostTime, SamplingParams};
use pagemill_scheduler::{RequestId, SequenceId, StepOutput, StepPlan};
use std::sync::Arc;

/// A request's data that ranks keep while it lives.
#[derive(Clone, Debug, PartialEq)]
pub struct StartedRequest {
    /// Its identity.
    pub id: RequestId,
    /// Prompt token ids (the sampler's penalties need them).
    pub prompt: Arc<[u32]>,
    /// How its tokens are chosen.
    pub sampling: Arc<SamplingParams>,
}

/// One step's work: the plan and what changed since the last one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepInput {
    /// What to compute.
    pub plan: StepPlan,
    /// Requests that appear in a plan for the first time.
    pub started: Vec<StartedRequest>,
    /// Requests that will not appear again.
    pub ended: Vec<RequestId>,
    /// Single choices that will not appear again.
    pub ended_sequences: Vec<SequenceId>,
    /// There was nothing to run before it: the time since the step before is nobody's fault.
    pub after_idle: bool,
}

/// One measurement of the tuning at start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MicroBatchSample {
    /// Steps in flight.
    pub micro_batches: usize,
    /// Decoded tokens per second.
    pub tokens_per_s: f64,
}

/// One stage of the pipeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageStatus {
    /// Layers that it holds.
    pub num_layers: usize,
    /// Microseconds in steps since start, without waiting for the stages beside it.
    pub busy_us: u64,
}

/// How busy the ranks are.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PipelineStatus {
    /// Ranks in all.
    pub num_ranks: usize,
    /// Steps in flight at most.
    pub micro_batches: usize,
    /// Microseconds with at least one step in flight since start.
    pub active_us: u64,
    /// Its stages, in order.
    pub stages: Vec<StageStatus>,
    /// What the tuning at start measured; empty where the number of micro-batches was given or follows
    /// from a single stage.
    pub tuning: Arc<[MicroBatchSample]>,
}

impl PipelineStatus {
    /// The share of the active time in which a stage had nothing to do, 0 to 1: its bubbles.
    #[must_use]
    #[allow(clippy::cast_precision_loss)] // microseconds
    pub fn idle_share(&self, stage: &StageStatus) -> f64 {
        if self.active_us == 0 { 0.0 } else { (1.0 - stage.busy_us as f64 / self.active_us as f64).clamp(0.0, 1.0) }
    }
}

/// Runs plans on every rank. `submit` and `collect` are two calls so that several plans can be in
/// flight: outputs come back in the order of submission.
pub trait Executor: Send {
    /// Starts a step. Does not wait for it.
    ///
    /// # Errors
    /// A lost rank or device: the engine stops.
    fn submit(&mut self, input: StepInput) -> Result<(), EngineError>;

    /// Waits for the oldest step in flight.
    ///
    /// # Errors
    /// As `submit`.
    fn collect(&mut self) -> Result<StepOutput, EngineError>;

    /// The plan of the step collected last, as it came, once, if nothing holds it any more: the next one is made of it.
    fn take_spent_plan(&mut self) -> Option<StepPlan> {
        None
    }

    /// Whether all ranks are there; asked now and then while nothing is in flight.
    ///
    /// # Errors
    /// As `submit`.
    fn check(&self) -> Result<(), EngineError> {
        Ok(())
    }

    /// Steps that may be in flight at once (1: submit, collect, submit, …).
    fn max_in_flight(&self) -> usize {
        1
    }

    /// Whether plans may name tokens that the plan before them draws
    /// ([`pagemill_scheduler::ScheduledSequence::drawn_idx`]). If so, one plan more than `max_in_flight` is taken.
    fn fills_in_draws(&self) -> bool {
        false
    }

    /// Whether steps leave the host's cores alone, so that a thread beside the engine's takes nothing from them.
    fn leaves_cores(&self) -> bool {
        true
    }

    /// With a step in flight: waits until it is about to end, or its output is there. True: the next one is to be
    /// planned now, while it runs. Asked only where [`Self::fills_in_draws`].
    ///
    /// # Errors
    /// As `submit`.
    fn await_planning(&mut self) -> Result<bool, EngineError> {
        Ok(false)
    }

    /// What the first rank's host has spent on steps since start.
    fn rank_host_time(&self) -> RankHostTime {
        RankHostTime::default()
    }

    /// Times that a rank's workspace grew after warm-up, as of the last step collected.
    fn workspace_grown(&self) -> u64 {
        0
    }

    /// How busy the ranks are.
    fn pipeline_status(&self) -> PipelineStatus {
        PipelineStatus::default()
    }
}
