//! An executor that draws the same token for everybody at once, and empties the core's caches where a device would
//! compute.

use pagemill_engine::{EngineError, Executor, StepInput};
use pagemill_scheduler::{SampledToken, StepOutput, StepPlan};
use std::collections::VecDeque;
use std::hint::black_box;

/// Twice what a core's own caches hold.
const CACHE_WORDS: usize = 1 << 20;

pub struct EchoExecutor {
    /// Read to empty the caches; `None`: they stay as they are.
    others: Option<Vec<u64>>,
    in_flight: VecDeque<StepPlan>,
    spent_plan: Option<StepPlan>,
}

impl EchoExecutor {
    pub fn new(empties_caches: bool) -> Self {
        let others = empties_caches.then(|| (0..CACHE_WORDS as u64).collect());
        Self { others, in_flight: VecDeque::new(), spent_plan: None }
    }

    fn empty_caches(&mut self) {
        if let Some(words) = &mut self.others {
            words.iter_mut().step_by(8).for_each(|word| *word = word.wrapping_add(1));
            black_box(words);
        }
    }
}

impl Executor for EchoExecutor {
    fn submit(&mut self, input: StepInput) -> Result<(), EngineError> {
        self.in_flight.push_back(input.plan);
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput, EngineError> {
        let plan = self.in_flight.pop_front().ok_or_else(|| EngineError::Internal("nothing is in flight".into()))?;
        self.empty_caches();
        let ids = plan.sequences.iter().flat_map(|sequence| &sequence.sample);
        let sampled = ids.map(|&id| SampledToken { id, token: Ok(7), logprobs: None }).collect();
        let output = StepOutput { step: plan.step, sampled, prompt_logprobs: Vec::new() };
        self.spent_plan = Some(plan);
        Ok(output)
    }

    fn take_spent_plan(&mut self) -> Option<StepPlan> {
        self.spent_plan.take()
    }

    fn fills_in_draws(&self) -> bool {
        true
    }

    fn await_planning(&mut self) -> Result<bool, EngineError> {
        self.empty_caches();
        Ok(true)
    }
}
