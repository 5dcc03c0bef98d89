//! The executor of the simulator: a KV memory of one word a slot, read and written through block tables
//! alone, so that a wrong, stale or foreign block changes the next token at once. Also judges the plans
//! it is given; knows nothing of the scheduler's reasons.

use crate::Draw;
use crate::draw::mix;
use crate::fake_model::{FakeModel, digest, first_read, kept_by, logprob_of, state_of, weighed};
use pagemill_engine::{EngineError, Executor, RequestId, StartedRequest, StepInput};
use pagemill_scheduler::{BlockId, SampledToken, ScheduledSequence, StepOutput, StepPlan, TokenLogprobs};
use std::collections::{BTreeMap, VecDeque};

/// What plans may ask for.
#[derive(Clone, Copy, Debug)]
pub struct ExecutorLimits {
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Tokens in a block.
    pub block_size: usize,
    /// Sequences in a plan.
    pub max_batch_size: usize,
    /// Tokens in a plan, padding included.
    pub max_batch_tokens: usize,
    /// Tokens of one sequence in a plan.
    pub prefill_chunk_size: usize,
    /// Plans in flight at once.
    pub max_in_flight: usize,
}

/// A step that is lost as a whole, as if the device had failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepFault {
    /// Submitting this step fails.
    Submit(u64),
    /// Collecting this step fails.
    Collect(u64),
}

/// Who touches a block in the plan at hand.
#[derive(Clone, Copy, Debug, Default)]
struct Touch {
    step: u64,
    sequence_idx: usize,
    group_idx: usize,
    written: bool,
}

/// What the executor keeps of a request it was told of.
struct LiveRequest {
    started: StartedRequest,
    /// Positions of its first choice that plans have covered.
    num_planned: usize,
}

struct InFlight {
    output: StepOutput,
    plan: StepPlan,
    requests: Vec<RequestId>,
}

/// See the module.
pub struct FakeExecutor {
    model: FakeModel,
    limits: ExecutorLimits,
    step_fault: Option<StepFault>,
    slots: Vec<u64>,
    touched: Vec<Touch>,
    live: BTreeMap<RequestId, LiveRequest>,
    in_flight: VecDeque<InFlight>,
    /// Of the step collected last.
    spent_plan: Option<StepPlan>,
    /// Whether it fills in draws, and then when a step is about to end before its output is there.
    ahead: Option<Draw>,
    /// What the newest plan drew.
    drawn: Vec<SampledToken>,
    num_planned_on_ends: u64,
    faults: Vec<String>,
    num_reclaimed_seen: u64,
    step_fault_happened: bool,
}

impl FakeExecutor {
    /// An executor with an empty memory.
    #[must_use]
    pub fn new(model: FakeModel, limits: ExecutorLimits, step_fault: Option<StepFault>) -> Self {
        Self {
            model,
            limits,
            step_fault,
            slots: vec![0; limits.num_blocks * limits.block_size],
            touched: vec![Touch::default(); limits.num_blocks],
            live: BTreeMap::new(),
            in_flight: VecDeque::new(),
            spent_plan: None,
            ahead: None,
            drawn: Vec::new(),
            num_planned_on_ends: 0,
            faults: Vec::new(),
            num_reclaimed_seen: 0,
            step_fault_happened: false,
        }
    }

    /// One that fills in draws; `draw` says when a step is about to end before its output is there.
    #[must_use]
    pub fn planned_ahead(mut self, draw: Draw) -> Self {
        self.ahead = Some(draw);
        self
    }

    /// Sequences planned on a token that ended them.
    #[must_use]
    pub fn num_planned_on_ends(&self) -> u64 {
        self.num_planned_on_ends
    }

    /// What was wrong with the plans so far.
    #[must_use]
    pub fn faults(&self) -> &[String] {
        &self.faults
    }

    /// Table entries seen whose block had gone back to the pool behind a window.
    #[must_use]
    pub fn num_reclaimed_seen(&self) -> u64 {
        self.num_reclaimed_seen
    }

    /// Whether the planted [`StepFault`] has happened.
    #[must_use]
    pub fn step_fault_happened(&self) -> bool {
        self.step_fault_happened
    }

    /// Whether a plan in flight holds a request.
    #[must_use]
    pub fn is_in_flight(&self, id: RequestId) -> bool {
        self.in_flight.iter().any(|step| step.requests.contains(&id))
    }

    /// Whether a request's prompt has been planned in part.
    #[must_use]
    pub fn is_in_mid_prefill(&self, id: RequestId) -> bool {
        self.live
            .get(&id)
            .is_some_and(|request| request.num_planned > 0 && request.num_planned < request.started.prompt.len())
    }

    /// Requests it was told of that have not been reported as ended.
    pub fn live_requests(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.live.keys().copied()
    }

    fn find(&mut self, fault: String) {
        // The first few tell enough.
        if self.faults.len() < 8 {
            self.faults.push(fault);
        }
    }

    fn hear_of_requests(&mut self, input: &mut StepInput) {
        for started in input.started.drain(..) {
            let id = started.id;
            let request = LiveRequest { started, num_planned: 0 };
            if self.live.insert(id, request).is_some() {
                self.find(format!("{id:?} started twice"));
            }
        }
        for id in &input.ended {
            if self.live.remove(id).is_none() {
                self.find(format!("{id:?} ended without having started"));
            }
        }
        for id in &input.ended_sequences {
            if input.plan.sequences.iter().any(|sequence| sequence.id == *id) {
                self.find(format!("{id:?} is planned after its end"));
            }
        }
    }

    /// The plan keeps within the limits, and what one sequence writes no other touches.
    fn judge(&mut self, plan: &StepPlan) {
        let ExecutorLimits { max_batch_size, max_batch_tokens, prefill_chunk_size, .. } = self.limits;
        let num_padding: usize = plan.sequences.iter().map(|sequence| sequence.num_padding).sum();
        let (num_sequences, num_tokens) = (plan.sequences.len(), plan.num_tokens() + num_padding);
        if num_sequences == 0 || num_sequences > max_batch_size || num_tokens > max_batch_tokens {
            self.find(format!("step {}: {num_sequences} sequences, {num_tokens} tokens", plan.step));
        }
        let mut prompts_began = false;
        for (sequence_idx, sequence) in plan.sequences.iter().enumerate() {
            let (id, len) = (sequence.id, sequence.token_ids.len());
            if len == 0 || len > prefill_chunk_size {
                self.find(format!("step {}: {id:?} computes {len} tokens", plan.step));
            }
            let Some(request) = self.live.get_mut(&id.request) else {
                self.find(format!("step {}: {id:?} is planned while not live", plan.step));
                continue;
            };
            if id.choice == 0 {
                request.num_planned = sequence.start + len;
            }
            // One token that nothing is drawn from is a chunk: what was generated is computed again.
            let draws_next = len == 1 && !sequence.sample.is_empty();
            let decodes = draws_next && sequence.start >= request.started.prompt.len();
            if decodes && prompts_began {
                self.find(format!("step {}: {id:?} decodes behind a prompt", plan.step));
            }
            prompts_began |= !decodes;
            self.judge_tables(plan.step, sequence_idx, sequence);
        }
    }

    fn judge_tables(&mut self, step: u64, sequence_idx: usize, sequence: &ScheduledSequence) {
        let first_written = sequence.start / self.limits.block_size;
        for (group_idx, table) in sequence.block_tables.iter().enumerate() {
            for (block_idx, &block) in table.iter().enumerate() {
                if block == BlockId::NONE {
                    self.num_reclaimed_seen += 1;
                    continue;
                }
                let written = block_idx >= first_written;
                let Some(touch) = self.touched.get_mut(block.0 as usize) else {
                    self.find(format!("step {step}: {:?} holds {block:?}, which does not exist", sequence.id));
                    continue;
                };
                let last = *touch;
                *touch =
                    Touch { step, sequence_idx, group_idx, written: written || (last.step == step && last.written) };
                let is_same = last.sequence_idx == sequence_idx && last.group_idx == group_idx;
                if last.step == step && (is_same || last.group_idx != group_idx || last.written || written) {
                    self.find(format!(
                        "step {step}: {:?} and sequence {} of the plan both hold {block:?}",
                        sequence.id, last.sequence_idx
                    ));
                }
            }
        }
    }

    /// The sum over positions `[first, end)` of one group's table.
    fn sum(&self, table: &[BlockId], first: usize, end: usize) -> u64 {
        let block_size = self.limits.block_size;
        let mut sum = 0u64;
        let mut position = first;
        while position < end {
            let block_end = ((position / block_size + 1) * block_size).min(end);
            let slots = self.slots_of(table, position, block_end - position);
            for (position, &kept) in (position..block_end).zip(slots) {
                sum = sum.wrapping_add(weighed(position, kept));
            }
            if slots.is_empty() {
                // Nothing is there: a value that nothing else gives.
                sum = mix(sum, position as u64);
            }
            position = block_end;
        }
        sum
    }

    /// `len` slots from `position` on, all in one block; none if the table has no such block.
    fn slots_of(&self, table: &[BlockId], position: usize, len: usize) -> &[u64] {
        let block_size = self.limits.block_size;
        let first = table
            .get(position / block_size)
            .filter(|&&block| block != BlockId::NONE)
            .map(|block| block.0 as usize * block_size + position % block_size);
        first.and_then(|first| self.slots.get(first..first + len)).unwrap_or(&[])
    }

    /// The digest of what `position` reads before `end`.
    fn read(&self, sequence: &ScheduledSequence, position: usize, end: usize) -> u64 {
        let tables = self.model.groups.iter().zip(&sequence.block_tables);
        digest(tables.map(|(&group, table)| self.sum(table, first_read(group, position), end)))
    }

    fn write(&mut self, sequence: &ScheduledSequence, position: usize, state: u64) {
        let block_size = self.limits.block_size;
        for (group_idx, table) in sequence.block_tables.iter().enumerate() {
            let block = table.get(position / block_size).copied().unwrap_or(BlockId::NONE);
            match self.slots.get_mut(block.0 as usize * block_size + position % block_size) {
                Some(slot) => *slot = kept_by(group_idx, state),
                None => self.find(format!("{:?} writes position {position} to {block:?}", sequence.id)),
            }
        }
    }

    /// Fills in the token that the plan before drew, if that is the sequence's.
    fn fill_in(&mut self, sequence: &mut ScheduledSequence) {
        let Some(idx) = sequence.drawn_idx else { return };
        let drawn = self.drawn.get(idx as usize).filter(|drawn| drawn.id == sequence.id);
        let (Some(SampledToken { token, .. }), Some(last)) = (drawn.cloned(), sequence.token_ids.last_mut()) else {
            return self.find(format!("{:?} is planned on draw {idx}, which is not its own", sequence.id));
        };
        *last = *token.as_ref().unwrap_or(&0);
        let Some(StartedRequest { prompt, sampling, .. }) =
            self.live.get(&sequence.id.request).map(|request| &request.started)
        else {
            return;
        };
        let generated = (sequence.start + 1).saturating_sub(prompt.len());
        let stops = |token| generated >= sampling.min_tokens && sampling.stop_token_ids.contains(token);
        self.num_planned_on_ends += u64::from(token.as_ref().map_or(true, stops));
    }

    /// Computes and writes a sequence's states; says prompt log-probabilities when they are wanted.
    fn compute(&mut self, sequence: &ScheduledSequence, output: &mut StepOutput) {
        let mut logprobs = Vec::new();
        let prompt_len = self.live.get(&sequence.id.request).map_or(0, |request| request.started.prompt.len());
        for (position, &token) in (sequence.start..).zip(&sequence.token_ids) {
            let state = state_of(token, position, self.read(sequence, position, position));
            self.write(sequence, position, state);
            if sequence.prompt_logprobs && position + 1 < prompt_len {
                logprobs.push(entry_of(logprob_of(state)));
            }
        }
        if !logprobs.is_empty() {
            output.prompt_logprobs.push((sequence.id, sequence.start + 1, logprobs));
        }
    }

    /// Draws the tokens that a sequence asks for, reading everything again after all have written.
    fn sample(&self, sequence: &ScheduledSequence, output: &mut StepOutput) {
        let Some(request) = self.live.get(&sequence.id.request) else {
            return;
        };
        let end = sequence.start + sequence.token_ids.len();
        let visible = self.read(sequence, end - 1, end);
        let StartedRequest { prompt, sampling, .. } = &request.started;
        for &id in &sequence.sample {
            let generated = end.saturating_sub(prompt.len());
            output.sampled.push(SampledToken {
                id,
                token: self.model.next_token(visible, sampling, id.choice, generated),
                logprobs: sampling.logprobs.map(|_| entry_of(logprob_of(visible))),
            });
        }
    }

    fn run(&mut self, plan: &mut StepPlan) -> StepOutput {
        for sequence in &mut plan.sequences {
            self.fill_in(sequence);
        }
        let block_size = self.limits.block_size;
        for copy in &plan.block_copies {
            let src = copy.src.0 as usize * block_size;
            self.slots.copy_within(src..src + block_size, copy.dst.0 as usize * block_size);
        }
        let mut output = StepOutput { step: plan.step, ..StepOutput::default() };
        for sequence in &plan.sequences {
            self.compute(sequence, &mut output);
        }
        for sequence in plan.sequences.iter().filter(|sequence| !sequence.sample.is_empty()) {
            self.sample(sequence, &mut output);
        }
        self.drawn.clone_from(&output.sampled);
        // A plan goes back as it came.
        for sequence in plan.sequences.iter_mut().filter(|sequence| sequence.drawn_idx.is_some()) {
            sequence.token_ids.iter_mut().last().into_iter().for_each(|token| *token = 0);
        }
        output
    }

    fn fail_step(&mut self) -> EngineError {
        self.step_fault_happened = true;
        EngineError::Internal("the device is lost".to_owned())
    }
}

fn entry_of(logprob: f32) -> TokenLogprobs {
    TokenLogprobs { logprob, rank: 1, top: Vec::new() }
}

impl Executor for FakeExecutor {
    fn submit(&mut self, mut input: StepInput) -> Result<(), EngineError> {
        if self.step_fault == Some(StepFault::Submit(input.plan.step)) {
            return Err(self.fail_step());
        }
        if self.in_flight.len() >= self.limits.max_in_flight + usize::from(self.ahead.is_some()) {
            self.find(format!("step {} is one too many in flight", input.plan.step));
        }
        self.hear_of_requests(&mut input);
        self.judge(&input.plan);
        let output = self.run(&mut input.plan);
        let requests = input.plan.sequences.iter().map(|sequence| sequence.id.request).collect();
        self.in_flight.push_back(InFlight { output, plan: input.plan, requests });
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput, EngineError> {
        let Some(step) = self.in_flight.pop_front() else {
            return Err(EngineError::Internal("collected more than was submitted".to_owned()));
        };
        if self.step_fault == Some(StepFault::Collect(step.output.step)) {
            return Err(self.fail_step());
        }
        self.spent_plan = Some(step.plan);
        Ok(step.output)
    }

    fn take_spent_plan(&mut self) -> Option<StepPlan> {
        self.spent_plan.take()
    }

    fn max_in_flight(&self) -> usize {
        self.limits.max_in_flight
    }

    fn fills_in_draws(&self) -> bool {
        self.ahead.is_some()
    }

    fn await_planning(&mut self) -> Result<bool, EngineError> {
        Ok(self.ahead.as_mut().is_some_and(|draw| !draw.one_in(4)))
    }
}
