//! `InferenceEngine`: one step at a time. Decides when plans are made, run and told; which tokens run
//! is the scheduler's decision, how they are computed the executor's. Knows no thread and no text.

use crate::clock::MonotonicClock;
use crate::delivery::{Delivery, Notice};
use crate::executor::StartedRequest;
use crate::handle::EngineStatus;
use crate::pipeline::PipelineExecutor;
use crate::request::LiveRequest;
use crate::requests::ByRequest;
use crate::{EngineError, Executor, HostTime, RankHostTime, Request, StepInput, SubmitError, UnifiedMemoryAllocator};
use pagemill_scheduler::{
    DynamicBatchScheduler, Event, PagedKvCache, RequestId, RequestSpec, SequenceId, StepPlan, Time,
};
use std::sync::Arc;
use std::thread::ThreadId;

/// The engine. Owned by one thread; generic so that the simulator can drive it with a fake executor.
pub struct InferenceEngine<E: Executor = PipelineExecutor> {
    scheduler: DynamicBatchScheduler,       // which tokens run next
    kv_cache: PagedKvCache,                 // which block holds which tokens
    executor: E,                            // runs a plan on every rank
    memory_manager: UnifiedMemoryAllocator, // owns every device byte
    requests: ByRequest<LiveRequest>,
    /// Live requests that no plan has named yet.
    num_unstarted: usize,
    delivery: Delivery,
    next_id: u64,
    /// What the executor hears with the next plan.
    ended: Vec<RequestId>,
    ended_sequences: Vec<SequenceId>,
    in_flight: usize,
    /// The step in flight is about to end: the next one is to be planned now.
    plan_is_due: bool,
    /// Nothing could run when last looked.
    was_idle: bool,
    checks: IntegrityChecks,
    counters: Counters,
}

/// When `check_integrity` runs.
#[derive(Clone, Copy, Debug, Default)]
struct IntegrityChecks {
    every_step: bool,
    /// Blocks moved since the last check.
    due: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counters {
    steps: u64,
    aborted: u64,
    steps_ahead: u64,
    schedule_ns: u64,
    execute_ns: u64,
    apply_ns: u64,
    deliver_ns: u64,
}

impl<E: Executor> InferenceEngine<E> {
    /// Joins the four parts. The KV cache's integrity is proved whenever the engine falls idle.
    #[must_use]
    pub fn new(
        scheduler: DynamicBatchScheduler,
        kv_cache: PagedKvCache,
        executor: E,
        memory_manager: UnifiedMemoryAllocator,
    ) -> Self {
        Self {
            scheduler,
            kv_cache,
            executor,
            memory_manager,
            requests: ByRequest::default(),
            num_unstarted: 0,
            delivery: Delivery::here(),
            next_id: 1,
            ended: Vec::new(),
            ended_sequences: Vec::new(),
            in_flight: 0,
            plan_is_due: false,
            was_idle: true,
            checks: IntegrityChecks::default(),
            counters: Counters::default(),
        }
    }

    /// Proves the KV cache's integrity after every step as well (tests; cost linear in blocks).
    #[must_use]
    pub fn checked_every_step(mut self) -> Self {
        self.checks.every_step = true;
        self
    }

    /// Tells sinks on a thread of their own: a step's events are on their way when [`Self::step`] returns, and a sink
    /// that does not take them ends its request with the step after. Without, and where steps are computed on the host's
    /// cores (such a thread would take one from them), all that happens within the step.
    #[must_use]
    pub fn telling_on_a_thread(mut self) -> Self {
        if self.executor.leaves_cores() {
            self.delivery = self.delivery.onto_thread();
        }
        self
    }

    /// The thread that sinks are told on, if it is their own.
    pub(crate) fn delivery_thread(&self) -> Option<ThreadId> {
        self.delivery.thread_id()
    }

    /// Queues a request.
    ///
    /// # Errors
    /// Why it was not taken; its sink hears nothing.
    pub fn submit(&mut self, request: Request, now: Time) -> Result<RequestId, SubmitError> {
        let id = RequestId(self.next_id);
        let prompt: Arc<[u32]> = request.prompt.as_slice().into();
        let spec = RequestSpec {
            id,
            prompt: request.prompt,
            max_tokens: request.max_tokens,
            min_tokens: request.sampling.min_tokens,
            stop_token_ids: request.sampling.stop_token_ids.clone(),
            n: request.n,
            priority: request.priority,
            cache_salt: request.cache_salt,
            prompt_logprobs: request.sampling.prompt_logprobs.is_some(),
            arrival: now,
        };
        self.scheduler.submit(spec, &self.kv_cache)?;
        self.next_id += 1;
        self.requests.push(id, LiveRequest::new(prompt, Arc::new(request.sampling), request.n));
        self.num_unstarted += 1;
        self.delivery.tell(id, Notice::Opened(request.sink));
        Ok(id)
    }

    /// Ends a request and frees its blocks (when no step in flight reads them). Its sink hears nothing
    /// more. Unknown ids are ignored: it may just have ended.
    pub fn abort(&mut self, id: RequestId) {
        if let Some(request) = self.requests.remove(id) {
            self.delivery.tell(id, Notice::Closed);
            self.scheduler.abort(id, &mut self.kv_cache);
            self.checks.due = true;
            if request.started {
                self.ended.push(id);
            } else {
                self.num_unstarted -= 1;
            }
        }
    }

    /// Ends one choice: the server found its stop string. No event comes for it any more. Before the
    /// request's first token its choices are still one, so this ends all of them.
    pub fn finish_sequence(&mut self, id: SequenceId) {
        let Some(request) = self.requests.get_mut(id.request) else {
            return;
        };
        if !request.end_choice(id.choice) {
            return;
        }
        if !request.is_live() || !request.has_tokens() {
            self.abort(id.request);
        } else {
            self.scheduler.finish_sequence(id, &mut self.kv_cache);
            self.checks.due = true;
            self.ended_sequences.push(id);
        }
    }

    /// Runs one step: schedule, submit, collect, apply, deliver. Returns whether anything ran.
    ///
    /// Where the executor lets it plan ahead, it returns once more in the middle of a step, when that is about to
    /// end: what the caller has taken in by the next call is part of the plan that follows.
    ///
    /// # Errors
    /// A lost device or a broken invariant: the engine must stop.
    pub fn step(&mut self, now: Time) -> Result<bool, EngineError> {
        self.delivery.check()?;
        self.delivery.look();
        self.abort_unheard();
        self.delivery.flush();
        let ahead = std::mem::take(&mut self.plan_is_due);
        self.submit_plans(now, ahead)?;
        self.was_idle = self.in_flight == 0;
        if self.was_idle {
            self.executor.check()?;
            self.check_integrity_if(!self.scheduler.has_work())?;
            return Ok(false);
        }
        let clock = MonotonicClock::start();
        if !ahead && self.in_flight == 1 && self.scheduler.config().plan_ahead {
            self.plan_is_due = self.executor.await_planning()?;
        }
        if self.plan_is_due {
            self.counters.execute_ns += clock.now_ns();
            return Ok(true);
        }
        let output = self.executor.collect()?;
        self.in_flight -= 1;
        let collected_ns = clock.now_ns();
        if let Some(plan) = self.executor.take_spent_plan() {
            self.scheduler.reuse(plan);
        }
        let events = self.scheduler.apply(&mut self.kv_cache, output, now);
        let applied_ns = clock.now_ns();
        self.checks.due = true;
        self.deliver(events)?;
        self.counters.steps += 1;
        self.counters.execute_ns += collected_ns;
        self.counters.apply_ns += applied_ns - collected_ns;
        self.counters.deliver_ns += clock.now_ns() - applied_ns;
        self.check_integrity_if(self.checks.every_step || !self.scheduler.has_work())?;
        Ok(true)
    }

    /// Hands the executor as many plans as it takes at once, and one more `ahead`.
    fn submit_plans(&mut self, now: Time, ahead: bool) -> Result<(), EngineError> {
        while self.in_flight < self.executor.max_in_flight() + usize::from(ahead) {
            let clock = MonotonicClock::start();
            let plan = self.scheduler.schedule(&mut self.kv_cache, now);
            let input = if plan.is_empty() { None } else { Some(self.step_input(plan)?) };
            let scheduled_ns = clock.now_ns();
            self.counters.schedule_ns += scheduled_ns;
            let Some(input) = input else { break };
            self.executor.submit(input)?;
            self.counters.execute_ns += clock.now_ns() - scheduled_ns;
            self.counters.steps_ahead += u64::from(ahead);
            self.in_flight += 1;
        }
        Ok(())
    }

    /// The plan with what the ranks need to hear beside it.
    fn step_input(&mut self, plan: StepPlan) -> Result<StepInput, EngineError> {
        let mut started = Vec::new();
        // Those that begin come behind those that decode.
        for sequence in plan.sequences.iter().rev() {
            if self.num_unstarted == 0 {
                break;
            }
            let id = sequence.id.request;
            let request = self.requests.get_mut(id).ok_or_else(|| {
                EngineError::Internal(format!("step {} plans request {}, which is not live", plan.step, id.0))
            })?;
            if !std::mem::replace(&mut request.started, true) {
                self.num_unstarted -= 1;
                started.push(StartedRequest {
                    id,
                    prompt: Arc::clone(&request.prompt),
                    sampling: Arc::clone(&request.sampling),
                });
            }
        }
        started.reverse();
        Ok(StepInput {
            plan,
            started,
            ended: std::mem::take(&mut self.ended),
            ended_sequences: std::mem::take(&mut self.ended_sequences),
            after_idle: self.was_idle,
        })
    }

    /// Aborts requests whose listeners are gone or too slow.
    fn abort_unheard(&mut self) {
        for id in self.delivery.take_lost() {
            if self.requests.contains(id) {
                self.counters.aborted += 1;
                self.abort(id);
            }
        }
    }

    /// Tells sinks what happened; a sink that does not take its event loses its request.
    fn deliver(&mut self, events: Vec<Event>) -> Result<(), EngineError> {
        let mut events = events.into_iter();
        while let Some(event) = events.next() {
            let (id, finished) = match &event {
                Event::Token { id, .. } | Event::PromptLogprobs { id, .. } => (*id, false),
                Event::Finished { id, .. } => (*id, true),
            };
            let request = self.requests.get_mut(id.request).ok_or_else(|| {
                EngineError::Internal(format!("an event names request {}, which is not live", id.request.0))
            })?;
            if matches!(event, Event::Token { .. })
                && !request.has_tokens()
                && let Some(cached_tokens) = cached_tokens(&self.scheduler, id, events.as_slice().first())
            {
                self.delivery.tell(id.request, Notice::PromptComputed { cached_tokens });
            }
            self.delivery.tell(id.request, Notice::Event(request.record(event)));
            if finished {
                if request.is_live() {
                    self.ended_sequences.push(id);
                } else {
                    self.requests.remove(id.request);
                    self.delivery.tell(id.request, Notice::Closed);
                    self.ended.push(id.request);
                }
            }
        }
        self.delivery.flush();
        self.abort_unheard();
        Ok(())
    }

    fn check_integrity_if(&mut self, now: bool) -> Result<(), EngineError> {
        if now && self.checks.due {
            self.checks.due = false;
            self.kv_cache.check_integrity().map_err(|error| EngineError::Internal(error.to_string()))?;
        }
        Ok(())
    }

    /// Tells every live request that it ends because of us, and forgets it. For an engine that stops.
    pub fn fail_all(&mut self, message: &str) {
        self.requests = ByRequest::default();
        self.num_unstarted = 0;
        self.delivery.fail_all(message);
    }

    /// Whether anything waits, runs or is in flight.
    #[must_use]
    pub fn has_work(&self) -> bool {
        self.in_flight > 0 || self.scheduler.has_work()
    }

    /// When to step again although `step` ran nothing. See [`DynamicBatchScheduler::next_wakeup`].
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Time> {
        self.scheduler.next_wakeup()
    }

    /// Gauges and counters. `stalled_for_us` and `stopped` are the handle's to fill in.
    #[must_use]
    pub fn status(&self) -> EngineStatus {
        EngineStatus {
            scheduler: self.scheduler.stats(),
            kv_cache: self.kv_cache.stats(),
            memory: *self.memory_manager.plan(),
            steps: self.counters.steps,
            aborted: self.counters.aborted,
            schedule_us: self.counters.schedule_ns / 1000,
            execute_us: self.counters.execute_ns / 1000,
            host: self.host_time(),
            workspace_grown: self.executor.workspace_grown(),
            pipeline: self.executor.pipeline_status(),
            ..EngineStatus::default()
        }
    }

    fn host_time(&self) -> HostTime {
        let Counters { steps, steps_ahead, schedule_ns, apply_ns, deliver_ns, .. } = self.counters;
        let RankHostTime { layout_ns, exposed_ns, steps_queued } = self.executor.rank_host_time();
        HostTime { steps, steps_ahead, steps_queued, schedule_ns, layout_ns, apply_ns, deliver_ns, exposed_ns }
    }

    /// Gauges, counters and integrity, for tests and metrics.
    #[must_use]
    pub fn parts(&self) -> (&DynamicBatchScheduler, &PagedKvCache, &E, &UnifiedMemoryAllocator) {
        (&self.scheduler, &self.kv_cache, &self.executor, &self.memory_manager)
    }

    /// Forgets every cached prefix that no sequence owns.
    pub fn clear_prefix_cache(&mut self) {
        self.kv_cache.clear_prefix_cache();
        self.checks.due = true;
    }
}

/// Prompt tokens that a choice's prefill found in the prefix cache. The scheduler has forgotten a choice
/// that its first token ended; then the end, which follows the token, tells it.
fn cached_tokens(scheduler: &DynamicBatchScheduler, id: SequenceId, next: Option<&Event>) -> Option<usize> {
    let at_the_end = match next {
        Some(Event::Finished { id: ended, num_cached_tokens, .. }) if *ended == id => Some(*num_cached_tokens),
        _ => None,
    };
    scheduler.num_cached_tokens(id).or(at_the_end)
}
