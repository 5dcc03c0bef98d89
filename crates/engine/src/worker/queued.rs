//! Decodes that a rank gives its device before the draws of the step before are in the host's hands: the tokens go from
//! one to the next there, and the device has no gap between them. Only where one rank has the whole model, its device
//! takes steps ahead, and nobody's next choice depends on what the tokens on their way are.

use super::Worker;
use crate::layout::BatchBuilder;
use crate::sampler::{choice_task, drawn};
use crate::{EngineError, StepInput};
use pagemill_backend::sampling::RowTask;
use pagemill_backend::{AwaitedToken, MAX_QUEUED_STEPS, StepsAhead};
use pagemill_scheduler::{RequestId, ScheduledSequence, SequenceId, StepOutput, StepPlan};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Steps on the device whose draws have not been taken, and what waits for them.
#[derive(Default)]
pub(super) struct QueuedSteps {
    /// Oldest first.
    steps: VecDeque<QueuedStep>,
    /// Requests and choices that ended before the step queued last, which draws on their way are still recorded for.
    ended: Vec<RequestId>,
    ended_sequences: Vec<SequenceId>,
    /// When draws were taken last.
    taken: Option<Instant>,
    /// Scratch.
    awaited: Vec<AwaitedToken>,
}

/// A step on the device.
struct QueuedStep {
    input: Arc<StepInput>,
    started: Instant,
}

impl Worker {
    /// Whether draws on the device are still to be taken.
    pub(crate) fn has_queued(&self) -> bool {
        !self.queued.steps.is_empty()
    }

    /// Gives the device a step, behind the one that it may have. False: it is one to [`Self::run`], once the draws of
    /// what is queued have been taken; `packed` is then as it was.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub(crate) fn queue(
        &mut self,
        input: &Arc<StepInput>,
        packed: &mut Option<BatchBuilder>,
    ) -> Result<bool, EngineError> {
        let backend = Arc::clone(&self.cx.backend);
        let Some(ahead) = backend.steps_ahead(self.model.spec().vocab_size) else { return Ok(false) };
        let is_alone = self.stage().count == 1 && self.cx.collective.world_size() == 1;
        if !is_alone || self.queued.steps.len() == MAX_QUEUED_STEPS || !self.may_queue(input) {
            return Ok(false);
        }
        let started = Instant::now();
        let Some(mut batch) = packed.take_if(|batch| batch.num_padding == 0) else { return Ok(false) };
        let Some(layout) = batch.checked.take() else {
            *packed = Some(batch);
            return Ok(false);
        };
        let waits = self.has_queued();
        let is_late = waits && ahead.is_sampled()?;
        let on_device = backend.upload_checked(layout, self.kv.spec())?;
        if !ahead.is_recorded(&on_device)? {
            batch.layout = on_device.layout;
            *packed = Some(batch);
            return Ok(false);
        }
        self.spent_batches.put(std::mem::replace(&mut self.batch, batch));
        self.host.packed = Some(Instant::now());
        // Since when the device has had nothing to do.
        let drawn_before = self.host.drawn.take().filter(|_| !waits && !input.after_idle);
        let idle_since = drawn_before.or(is_late.then_some(started));
        self.queued.awaited.clear();
        if waits {
            self.batch.take_awaited(&mut self.queued.awaited)?;
        } else {
            self.batch.fill_in(&self.draws)?;
        }
        self.copy_blocks(&input.plan)?;
        let hidden = ahead.replay_awaiting(&self.batch.token_ids, &self.queued.awaited, &on_device)?;
        self.host.launched = Some(Instant::now());
        self.batch.layout = on_device.layout;
        self.begin_requests(input, waits)?;
        self.rows.clear();
        self.rows.extend((0u32..).take(input.plan.sequences.len()));
        let logits = self.model.logits(&hidden, &self.rows)?;
        ahead.queue_sampling(&logits, &self.tasks(&input.plan, waits)?)?;
        self.count_host_time(started, idle_since);
        self.meter.steps_queued.fetch_add(u64::from(waits), Ordering::Relaxed);
        self.queued.steps.push_back(QueuedStep { input: Arc::clone(input), started });
        Ok(true)
    }

    /// Whether the draws that were queued first are there.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn is_sampled(&self) -> Result<bool, EngineError> {
        Ok(self.steps_ahead()?.is_sampled()?)
    }

    /// Waits for the step that was queued first: its output.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn take_queued(&mut self) -> Result<StepOutput, EngineError> {
        let mut outcomes = Vec::new();
        self.steps_ahead()?.take_sampled(&mut outcomes)?;
        let now = Instant::now();
        self.host.drawn = Some(now);
        let step = self.queued.steps.pop_front().ok_or_else(|| EngineError::Internal("no step is queued".into()))?;
        let plan = &step.input.plan;
        if outcomes.len() != plan.sequences.len() {
            return Err(EngineError::Internal("the device left a row of logits out".into()));
        }
        let sampled = Vec::with_capacity(outcomes.len());
        let mut output = StepOutput { step: plan.step, sampled, ..StepOutput::default() };
        let ids = plan.sequences.iter().flat_map(|sequence| &sequence.sample);
        for (&id, outcome) in ids.zip(outcomes) {
            self.record_draw(id, drawn(outcome), &mut output);
        }
        self.draws.end_step(&output);
        // The device was busy with it since it began, or since the one before ended.
        let since = self.queued.taken.replace(now).map_or(step.started, |taken| taken.max(step.started));
        self.count_step(now.saturating_duration_since(since));
        Ok(output)
    }

    fn steps_ahead(&self) -> Result<&dyn StepsAhead, EngineError> {
        let ahead = self.cx.backend.steps_ahead(self.model.spec().vocab_size);
        ahead.ok_or_else(|| EngineError::Internal("this device takes no steps ahead".into()))
    }

    /// Whether every sequence has one token, draws once, and chooses by what is known when the step is queued.
    fn may_queue(&self, input: &StepInput) -> bool {
        let sequences = &input.plan.sequences;
        let is_decode = |sequence: &ScheduledSequence| {
            sequence.token_ids.len() == 1 && sequence.sample.len() == 1 && !sequence.prompt_logprobs
        };
        let knows_choice = |sequence: &ScheduledSequence| match self.requests.get(sequence.id.request) {
            Some(request) => request.params.chooses_unaware(),
            None => {
                let started = input.started.iter().find(|started| started.id == sequence.id.request);
                started.is_some_and(|started| started.sampling.chooses_unaware())
            }
        };
        (1..=self.cx.backend.logits_rows()).contains(&sequences.len())
            && sequences.iter().all(is_decode)
            && sequences.iter().all(knows_choice)
    }

    /// As [`Worker::update_requests`]; but where draws are on their way, requests end only behind them.
    fn begin_requests(&mut self, input: &StepInput, waits: bool) -> Result<(), EngineError> {
        if !waits {
            return self.update_requests(input);
        }
        self.take_in_draws()?;
        self.end_requests();
        self.queued.ended.extend_from_slice(&input.ended);
        self.queued.ended_sequences.extend_from_slice(&input.ended_sequences);
        self.requests.update(&input.started, &[], &[]);
        Ok(())
    }

    /// Forgets those whose last draws have come since they ended.
    pub(super) fn end_requests(&mut self) {
        let QueuedSteps { ended, ended_sequences, .. } = &mut self.queued;
        self.requests.update(&[], ended, ended_sequences);
        ended.clear();
        ended_sequences.clear();
    }

    /// The plan's tasks, one for each sequence. `waits`: the tokens of the step before are not in the requests' pasts.
    fn tasks(&self, plan: &StepPlan, waits: bool) -> Result<Vec<RowTask<'_>>, EngineError> {
        let tasks = plan.sequences.iter().enumerate().map(|(row, sequence)| {
            let choice = sequence.sample.first().map_or(0, |id| id.choice);
            let num_awaited = usize::from(waits && sequence.drawn_idx.is_some());
            Ok(choice_task(row, self.request(sequence)?, choice, num_awaited))
        });
        tasks.collect()
    }
}
