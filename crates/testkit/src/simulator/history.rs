//! One history: drives the real engine turn by turn (arrivals, clients that act, one step, time) and
//! looks at everything that must hold between turns and at the end.

use super::listener::Listener;
use super::setup::{Setup, name_of};
use super::{Coverage, Fault, HistoryReport, Scrutiny, SimulatorOptions};
use crate::workload::{Fate, PlannedRequest};
use crate::{Draw, Expected, FakeClock, FakeExecutor};
use pagemill_engine::{
    EngineError, InferenceEngine, MemoryPlan, Request, SamplingParams, SequenceId, SubmitError, UnifiedMemoryAllocator,
};
use pagemill_scheduler::{CacheGroup, DynamicBatchScheduler, KvLayout, PagedKvCache};

/// A history while it runs.
pub(super) struct History {
    setup: Setup,
    scrutiny: Scrutiny,
    engine: InferenceEngine<FakeExecutor>,
    clock: FakeClock,
    draw: Draw,
    listeners: Vec<Listener>,
    /// Index of the request that arrives next.
    next_request: usize,
    /// Calls of `step`, and those that ran something.
    calls: u64,
    steps: u64,
    lost_device: bool,
    coverage: Coverage,
    bound_used_permille: u64,
}

impl History {
    pub(super) fn new(setup: Setup, options: SimulatorOptions) -> Self {
        let mut kv_cache = PagedKvCache::new(setup.kv_cache.clone());
        if let Some(prepare) = options.prepare_cache {
            prepare(&mut kv_cache);
        }
        let memory =
            UnifiedMemoryAllocator::new(MemoryPlan { num_blocks: setup.kv_cache.num_blocks, ..MemoryPlan::default() });
        let executor = FakeExecutor::new(setup.model.clone(), setup.executor, setup.step_fault);
        let executor = if setup.scheduler.plan_ahead { executor.planned_ahead(setup.draw.clone()) } else { executor };
        let engine =
            InferenceEngine::new(DynamicBatchScheduler::new(setup.scheduler.clone()), kv_cache, executor, memory);
        Self {
            scrutiny: options.scrutiny,
            engine,
            clock: FakeClock::default(),
            draw: setup.draw.clone(),
            listeners: Vec::new(),
            next_request: 0,
            calls: 0,
            steps: 0,
            lost_device: false,
            coverage: Coverage::default(),
            bound_used_permille: 0,
            setup,
        }
    }

    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    /// Runs to the end, then proves that nothing is left.
    pub(super) fn run(&mut self) -> Result<(), Fault> {
        while self.turn()? {}
        if self.lost_device {
            return Ok(());
        }
        self.check_rest()?;
        self.check_executor_forgets()
    }

    pub(super) fn report(&self) -> HistoryReport {
        let (scheduler, kv_cache, executor, _) = self.engine.parts();
        let (scheduler, kv_cache) = (scheduler.stats(), kv_cache.stats());
        HistoryReport {
            coverage: Coverage {
                histories: 1,
                ahead_histories: u64::from(self.setup.scheduler.plan_ahead),
                steps_ahead: self.engine.status().host.steps_ahead,
                planned_on_ends: executor.num_planned_on_ends(),
                ahead_preemptions: if self.setup.scheduler.plan_ahead { scheduler.preemptions } else { 0 },
                pipelined_histories: u64::from(self.setup.executor.max_in_flight > 1),
                contiguous_histories: u64::from(self.setup.kv_cache.layout == KvLayout::Contiguous),
                steps: self.steps,
                requests: self.listeners.len() as u64,
                lost_steps: u64::from(self.lost_device),
                preemptions: scheduler.preemptions,
                pipelined_preemptions: if self.setup.executor.max_in_flight > 1 { scheduler.preemptions } else { 0 },
                filler_tokens: scheduler.filler_tokens,
                padding_tokens: scheduler.padding_tokens,
                evictions: kv_cache.evictions,
                copies_on_write: kv_cache.copies_on_write,
                prefix_hit_tokens: kv_cache.prefix_hits,
                reclaimed_entries: executor.num_reclaimed_seen(),
                ..self.coverage
            },
            bound_used_permille: self.bound_used_permille,
        }
    }

    /// One turn; false when all is over.
    fn turn(&mut self) -> Result<bool, Fault> {
        self.submit_due()?;
        if self.let_clients_act() {
            self.look_inside()?;
        }
        let stepped = self.engine.step(self.clock.now());
        self.calls += 1;
        self.steps = self.engine.status().steps;
        for listener in &mut self.listeners {
            listener.listen(&mut self.coverage)?;
        }
        let ran = match stepped {
            Ok(ran) => ran,
            Err(error) => return self.stop(&error).map(|()| false),
        };
        self.look_inside()?;
        self.check_bounds()?;
        if !ran {
            return self.sleep();
        }
        self.clock.advance_us(self.draw.between(0, self.setup.step_us_max) as u64);
        Ok(true)
    }

    /// Lets time pass until something can happen; false when nothing ever will.
    fn sleep(&mut self) -> Result<bool, Fault> {
        let wakeup = self.engine.next_wakeup().filter(|&time| time > self.clock.now());
        if self.engine.has_work() && wakeup.is_none() {
            return Err(Fault::Stuck);
        }
        let arrival = self.setup.requests.get(self.next_request).map(|next| next.arrival);
        match arrival.into_iter().chain(wakeup).min() {
            Some(time) => self.clock.advance_to(time),
            None => return Ok(false),
        }
        Ok(true)
    }

    fn submit_due(&mut self) -> Result<(), Fault> {
        while let Some(request) = self.setup.requests.get(self.next_request) {
            if request.arrival > self.clock.now() {
                break;
            }
            let request = request.clone();
            self.next_request += 1;
            self.submit(request)?;
        }
        Ok(())
    }

    fn submit(&mut self, request: PlannedRequest) -> Result<(), Fault> {
        let before = self.engine.status();
        let reasons = self.setup.reasons_to_refuse(&request, before.scheduler.num_waiting);
        let expected = if reasons.is_empty() {
            self.setup.model.expected(&request, self.setup.scheduler.max_seq_len)
        } else {
            Expected { prompt_logprobs: Vec::new(), choices: Vec::new() }
        };
        let (mut listener, sink) = Listener::new(request.clone(), expected);
        let submitted = self.engine.submit(
            Request {
                prompt: request.prompt,
                max_tokens: request.max_tokens,
                n: request.n,
                sampling: request.sampling,
                priority: request.priority,
                cache_salt: request.cache_salt,
                sink: Box::new(sink),
            },
            self.clock.now(),
        );
        match submitted {
            Ok(id) if reasons.is_empty() => {
                listener.id = id;
                self.admit(listener);
                Ok(())
            }
            Err(SubmitError::Refused(refusal)) if reasons.contains(&name_of(&refusal)) => {
                let after = self.engine.status();
                if after.scheduler != before.scheduler || after.kv_cache != before.kv_cache || !listener.is_forgotten()
                {
                    return Err(Fault::Leak(format!("something of a refused request remains: {refusal}")));
                }
                self.coverage.refusals += 1;
                Ok(())
            }
            answer => Err(Fault::Admission(format!("{answer:?}; reasons to refuse it: {reasons:?}"))),
        }
    }

    /// Notes a new client, and how long it and those behind it may have to wait.
    fn admit(&mut self, mut listener: Listener) {
        let work = self.setup.work(&listener.request);
        // Work may be lost to a preemption and done again; plans in flight each take a step.
        let work_bound = 2 * work * self.setup.executor.max_in_flight as u64;
        listener.virtual_arrival = self.setup.virtual_arrival(&listener.request, self.clock.now());
        listener.submitted = (self.calls, self.steps);
        listener.bound = work_bound;
        for other in self.listeners.iter_mut().filter(|other| !other.over) {
            let other_bound = 2 * self.setup.work(&other.request) * self.setup.executor.max_in_flight as u64;
            listener.bound += other_bound;
            if self.setup.waits_for_all() || listener.virtual_arrival <= other.virtual_arrival {
                other.bound += work_bound;
            }
        }
        self.listeners.push(listener);
    }

    /// Clients abort, go away or find their stop string; whether any did.
    fn let_clients_act(&mut self) -> bool {
        let mut acted = false;
        for at in 0..self.listeners.len() {
            let listener = &self.listeners[at];
            if !listener.over {
                acted |= match listener.request.fate {
                    Fate::LeftAlone | Fate::FullAfter(_) => false,
                    Fate::AbortedAfter(calls) => self.calls >= listener.submitted.0 + calls && self.abort(at),
                    Fate::ClosesAfter(events) => listener.num_heard() >= events && self.close(at),
                    Fate::StopString { choice, after } => {
                        listener.num_tokens(choice) >= after
                            && !listener.has_ended(choice)
                            && self.stop_choice(at, choice)
                    }
                };
            }
        }
        acted
    }

    fn abort(&mut self, at: usize) -> bool {
        self.note_departure(at);
        self.coverage.aborts += 1;
        self.listeners[at].over = true;
        self.engine.abort(self.listeners[at].id);
        true
    }

    fn close(&mut self, at: usize) -> bool {
        self.note_departure(at);
        self.coverage.closed_sinks += 1;
        self.listeners[at].close();
        true
    }

    fn stop_choice(&mut self, at: usize, choice: u32) -> bool {
        self.coverage.stop_strings += 1;
        let request = self.listeners[at].id;
        self.listeners[at].stop(choice);
        self.engine.finish_sequence(SequenceId { request, choice });
        true
    }

    fn note_departure(&mut self, at: usize) {
        let (id, executor) = (self.listeners[at].id, self.engine.parts().2);
        self.coverage.aborts_in_flight += u64::from(executor.is_in_flight(id));
        self.coverage.aborts_in_mid_prefill += u64::from(executor.is_in_mid_prefill(id));
    }

    /// The engine has stopped: rightly if the device was lost, and then every client is told.
    fn stop(&mut self, error: &EngineError) -> Result<(), Fault> {
        if !self.engine.parts().2.step_fault_happened() {
            return Err(Fault::Engine(error.to_string()));
        }
        self.lost_device = true;
        self.engine.fail_all(&error.to_string());
        for listener in &mut self.listeners {
            listener.listen_to_failure(&mut self.coverage)?;
            if !listener.is_forgotten() {
                return Err(listener.wrong("its sink is still held".to_owned()));
            }
        }
        Ok(())
    }

    fn look_inside(&self) -> Result<(), Fault> {
        if self.scrutiny == Scrutiny::HeardOnly {
            return Ok(());
        }
        let (_, kv_cache, executor, _) = self.engine.parts();
        if let Some(fault) = executor.faults().first() {
            return Err(Fault::Plan(fault.clone()));
        }
        kv_cache.check_integrity().map_err(|error| Fault::Integrity(error.to_string()))
    }

    fn check_bounds(&mut self) -> Result<(), Fault> {
        for listener in self.listeners.iter().filter(|listener| !listener.over) {
            let (steps, bound) = (self.steps - listener.submitted.1, listener.bound);
            if steps > bound {
                return Err(Fault::Unbounded { request: listener.id.0, steps, bound });
            }
            self.bound_used_permille = self.bound_used_permille.max(steps * 1000 / bound.max(1));
        }
        Ok(())
    }

    /// All is over: every client has its answer, no block is owned, every gauge is at zero.
    fn check_rest(&mut self) -> Result<(), Fault> {
        for listener in &self.listeners {
            if !listener.over {
                return Err(listener.wrong("the engine came to rest without an answer".to_owned()));
            }
            if !listener.is_forgotten() {
                return Err(listener.wrong("its sink is still held".to_owned()));
            }
            self.check_cached_tokens(listener)?;
        }
        let status = self.engine.status();
        let (scheduler, kv_cache) = (status.scheduler, status.kv_cache);
        if (scheduler.num_running, scheduler.num_waiting) != (0, 0) {
            return Err(Fault::Leak(format!("at rest: {scheduler:?}")));
        }
        if kv_cache.num_owned != 0 || kv_cache.num_free + kv_cache.num_cached != kv_cache.num_blocks {
            return Err(Fault::Leak(format!("at rest: {kv_cache:?}")));
        }
        let heard = self.coverage.tokens_heard;
        let some_unheard = self.coverage.full_sinks > 0;
        if scheduler.generated_tokens < heard || (scheduler.generated_tokens > heard && !some_unheard) {
            return Err(Fault::Leak(format!("{} tokens were counted, {heard} heard", scheduler.generated_tokens)));
        }
        self.engine.clear_prefix_cache();
        let emptied = self.engine.status().kv_cache;
        if emptied.num_free != emptied.num_blocks {
            return Err(Fault::Leak(format!("without cached prefixes: {emptied:?}")));
        }
        self.look_inside()
    }

    /// What came from the prefix cache was computed for a request of the same salt, in whole blocks.
    fn check_cached_tokens(&self, listener: &Listener) -> Result<(), Fault> {
        let (cached, prompt) = (listener.cached_tokens(), &listener.request.prompt);
        let others = self
            .listeners
            .iter()
            .filter(|other| other.id != listener.id && other.request.cache_salt == listener.request.cache_salt);
        let reach = others
            .flat_map(|other| {
                other.expected.choices.iter().map(|choice| {
                    let sequence = other.request.prompt.iter().chain(&choice.tokens);
                    prompt.iter().zip(sequence).take_while(|(a, b)| a == b).count()
                })
            })
            .max()
            .unwrap_or(0);
        let config = &self.setup.kv_cache;
        // A token that reads only itself needs nothing of what came before: all of it is a hit.
        let needs_no_past = CacheGroup::SlidingWindow { window: 1 };
        let reach = if config.groups.iter().all(|&group| group == needs_no_past) { prompt.len() } else { reach };
        let may_hit = config.prefix_cache
            && config.layout == KvLayout::Paged
            && listener.request.sampling.prompt_logprobs.is_none();
        let limit = if may_hit { reach.min(prompt.len().saturating_sub(1)) } else { 0 };
        if cached > limit || cached % config.block_size != 0 {
            return Err(listener.wrong(format!("{cached} cached prompt tokens; at most {limit} could be")));
        }
        Ok(())
    }

    /// With one more request's plan, the executor has heard of every end.
    fn check_executor_forgets(&mut self) -> Result<(), Fault> {
        self.setup.requests.push(PlannedRequest {
            arrival: self.clock.now(),
            prompt: vec![1],
            max_tokens: 1,
            n: 1,
            priority: 0,
            cache_salt: None,
            sampling: SamplingParams::default(),
            fate: Fate::LeftAlone,
        });
        let num_listeners = self.listeners.len();
        while self.turn()? {}
        if self.lost_device || self.listeners.len() == num_listeners {
            return Ok(());
        }
        let probe = self.listeners.last().map(|listener| listener.id);
        let kept: Vec<_> = self.engine.parts().2.live_requests().filter(|id| Some(*id) != probe).collect();
        if kept.is_empty() { Ok(()) } else { Err(Fault::Leak(format!("the executor still keeps {kept:?}"))) }
    }
}
