//! The seam between deciding and computing. Two implementations: the pipeline of ranks, and the
//! simulator's fake.

use crate::{EngineError, SamplingParams};
use pagemill_scheduler::{RequestId, SequenceId, StepOutput, StepPlan};
use std::sync::Arc;

/// A request's data that ranks keep while it lives.
#[derive(Clone, Debug)]
pub struct StartedRequest {
    /// Its identity.
    pub id: RequestId,
    /// Prompt token ids (the sampler's penalties need them).
    pub prompt: Arc<[u32]>,
    /// How its tokens are chosen.
    pub sampling: Arc<SamplingParams>,
}

/// One step's work: the plan and what changed since the last one.
#[derive(Clone, Debug, Default)]
pub struct StepInput {
    /// What to compute.
    pub plan: StepPlan,
    /// Requests that appear in a plan for the first time.
    pub started: Vec<StartedRequest>,
    /// Requests that will not appear again.
    pub ended: Vec<RequestId>,
    /// Single choices that will not appear again.
    pub ended_sequences: Vec<SequenceId>,
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

    /// Steps that may be in flight at once (1: submit, collect, submit, …).
    fn max_in_flight(&self) -> usize {
        1
    }

    /// Times that a rank's workspace grew after warm-up, as of the last step collected.
    fn workspace_grown(&self) -> u64 {
        0
    }
}
