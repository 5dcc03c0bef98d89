//! `DynamicBatchScheduler`: which tokens run in the next step. Holds every live sequence and moves it
//! between waiting and running; `continuous` and `static_batch` decide what runs, `apply` what
//! a step's output means. Knows no clock, no thread and no tensor; blocks are `PagedKvCache`'s.

mod ahead;
mod apply;
mod continuous;
mod filler_governor;
mod micro_batch;
mod sequence;
mod sequences;
mod spent;
mod static_batch;
mod step;
mod waiting;

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU64;

use crate::id_hash::HashById;
use crate::{Admission, PagedKvCache, Refusal, RequestId, RequestSpec, SequenceId, StepPlan, Time};
use filler_governor::FillerGovernor;
use sequence::Sequence;
use sequences::{SequenceRef, Sequences};
use spent::SpentMemory;
use static_batch::StaticBatch;
use step::{InFlightStep, StepBuilder, StepRecord};
use waiting::{Rank, WaitingQueue};

/// Limits and policy.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Sequences in one step at most.
    pub max_batch_size: usize,
    /// Tokens in one step at most (`max_batch_tokens`), at least `max_batch_size`.
    pub max_batch_tokens: usize,
    /// Prompt tokens of one request in one step at most.
    pub prefill_chunk_size: usize,
    /// Tokens at most in a step of several sequences, at least `max_batch_size`. A prompt that has a step to itself,
    /// while nobody decodes, may then have up to `max_batch_tokens` there: it stalls no answer. `None`, and in static
    /// batches: such steps are no different.
    pub mixed_batch_tokens: Option<usize>,
    /// Tokens in a sequence at most.
    pub max_seq_len: usize,
    /// Sequences waiting at most (preempted ones included); more requests are refused with `QueueFull`.
    pub max_waiting: usize,
    /// A waiting request gains one level of priority each time this passes (microseconds). 0: order of
    /// arrival alone.
    pub ageing_us: u64,
    /// `false`: the classic static batch (wait for a full batch or `static_batch_wait_us`, pad prompts
    /// to the longest, run until the longest ends, then take the next batch).
    pub continuous_batching: bool,
    /// How long a static batch waits to fill (microseconds).
    pub static_batch_wait_us: u64,
    /// Steps in flight that the plans are to be cut for, at least 1: each takes about such a part of what
    /// is ready.
    pub micro_batches: usize,
    /// Whether a sequence may be planned on the token that the plan in flight draws for it
    /// ([`crate::ScheduledSequence::drawn_idx`]). Two plans are in flight at most then.
    pub plan_ahead: bool,
    /// Stages of the pipeline that runs the plans, at least 1. From 2 on, sequences of negative priority
    /// only fill its bubbles while others live (continuous batching).
    pub num_stages: usize,
}

impl SchedulerConfig {
    /// Prompt tokens of one request in one step at most, whether anybody decodes or not.
    #[must_use]
    pub fn largest_chunk(&self) -> usize {
        self.mixed_batch_tokens.map_or(self.prefill_chunk_size, |_| self.prefill_chunk_size.max(self.max_batch_tokens))
    }
}

/// Counters and gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    /// Sequences that hold blocks.
    pub num_running: usize,
    /// Requests (or preempted sequences) that wait.
    pub num_waiting: usize,
    /// Preemptions since start.
    pub preemptions: u64,
    /// Prompt tokens computed since start (recomputed ones included).
    pub prompt_tokens: u64,
    /// Tokens generated since start.
    pub generated_tokens: u64,
    /// Padding slots computed since start (static batches only).
    pub padding_tokens: u64,
    /// Tokens computed since start where a stage would have idled.
    pub filler_tokens: u64,
    /// Steps since start that computed prompt chunks beside decodes.
    pub mixed_steps: u64,
    /// Most sequences running at once since start.
    pub peak_running: usize,
}

/// Choices of a request that have not ended.
#[derive(Clone, Copy, Debug)]
struct LiveRequest {
    num_choices: u32,
    num_live: u32,
}

/// Continuous batching with request-level preemption.
#[derive(Debug)]
pub struct DynamicBatchScheduler {
    config: SchedulerConfig,
    /// Never iterated.
    sequences: Sequences,
    requests: HashMap<RequestId, LiveRequest, HashById>,
    waiting: WaitingQueue,
    /// Sequences that hold blocks and have not ended, in order of precedence.
    running: Vec<Rank>,
    /// Sequences that ended while a step in flight held them.
    num_ending: usize,
    in_flight: VecDeque<InFlightStep>,
    governor: FillerGovernor,
    /// The last decode step that came home, if it was no filling one and has not been timed.
    finished_decode: Option<StepRecord>,
    static_batch: Option<StaticBatch>,
    /// A running sequence found no blocks for the newest plan, or took others'.
    blocks_were_short: bool,
    /// Running sequences that end with the plan in flight, whatever it draws; as of the plan being made.
    num_leaving: usize,
    /// What plans that are done leave to the next one.
    spent: SpentMemory,
    /// Number of the newest plan.
    step: u64,
    counters: SchedulerStats,
}

impl DynamicBatchScheduler {
    /// An idle scheduler.
    ///
    /// # Panics
    /// On limits that let nothing run (zero sequences, tokens or chunk, or fewer tokens than sequences
    /// in a step); configurations are validated before they come here.
    #[must_use]
    pub fn new(config: SchedulerConfig) -> Self {
        assert!(config.max_batch_size > 0 && config.prefill_chunk_size > 0, "a step computes at least one token");
        let least =
            config.mixed_batch_tokens.map_or(config.max_batch_tokens, |tokens| tokens.min(config.max_batch_tokens));
        assert!(least >= config.max_batch_size, "a step has room for one token of each sequence");
        Self {
            config,
            sequences: Sequences::default(),
            requests: HashMap::default(),
            waiting: WaitingQueue::default(),
            running: Vec::new(),
            num_ending: 0,
            in_flight: VecDeque::new(),
            governor: FillerGovernor::new(),
            finished_decode: None,
            static_batch: None,
            blocks_were_short: false,
            num_leaving: 0,
            spent: SpentMemory::default(),
            step: 0,
            counters: SchedulerStats::default(),
        }
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Queues a request, or says why not. Nothing is kept of a refused one.
    ///
    /// The request must fit the empty pool with one choice: choices need not all run at the same time,
    /// since those that find no room wait and are recomputed.
    ///
    /// # Panics
    /// When the id is in use or `n` is 0 (the engine gives ids and validates requests), or when the cache
    /// was sized for smaller chunks than this scheduler's.
    pub fn submit(&mut self, request: RequestSpec, kv_cache: &PagedKvCache) -> Admission {
        assert!(request.n > 0, "{:?} asks for no choice", request.id);
        assert!(!self.requests.contains_key(&request.id), "{:?} is in use", request.id);
        let (chunk, sized_for) = (self.config.largest_chunk(), kv_cache.config().prefill_chunk_size);
        assert!(chunk <= sized_for, "chunks of {chunk} tokens; the KV cache counts on {sized_for} at most");
        self.check_limits(&request, kv_cache)?;
        let live = LiveRequest { num_choices: request.n, num_live: request.n };
        self.requests.insert(request.id, live);
        let rank = self.sequences.insert(Sequence::first_choice(request, self.config.ageing_us));
        self.waiting.insert(rank);
        Ok(())
    }

    fn check_limits(&self, request: &RequestSpec, kv_cache: &PagedKvCache) -> Admission {
        let SchedulerConfig { max_batch_size, max_seq_len, max_waiting, .. } = self.config;
        if request.prompt.is_empty() {
            return Err(Refusal::EmptyPrompt);
        }
        if request.n as usize > max_batch_size {
            return Err(Refusal::TooManyChoices { n: request.n, max_batch_size });
        }
        let tokens = request.prompt.len().saturating_add(request.max_tokens);
        if tokens > max_seq_len {
            return Err(Refusal::TooLong { tokens, max_seq_len });
        }
        let (needed, available) = (kv_cache.blocks_needed(tokens), kv_cache.config().num_blocks);
        if needed > available {
            return Err(Refusal::NeverFits { needed, available, block_size: kv_cache.config().block_size });
        }
        if self.waiting.len() >= max_waiting {
            return Err(Refusal::QueueFull { limit: max_waiting });
        }
        Ok(())
    }

    /// Ends every choice of a request at once: blocks are freed now, or when the steps in flight that
    /// read or write them have been applied. Tokens of steps in flight are ignored when they arrive.
    /// Unknown ids are ignored (it may just have ended). No event.
    pub fn abort(&mut self, id: RequestId, kv_cache: &mut PagedKvCache) {
        let num_choices = self.requests.get(&id).map_or(0, |request| request.num_choices);
        for choice in 0..num_choices {
            self.end_sequence(SequenceId { request: id, choice }, kv_cache);
        }
        self.requests.remove(&id);
    }

    /// Ends one choice (its stop string was found), as [`Self::abort`] does. No event. Before the
    /// request's first token all choices are still one sequence, so this ends all of them.
    pub fn finish_sequence(&mut self, id: SequenceId, kv_cache: &mut PagedKvCache) {
        if self.find(id).is_some_and(|sequence| sequence.num_unforked > 0) {
            self.abort(id.request, kv_cache);
        } else {
            self.end_sequence(id, kv_cache);
        }
    }

    /// Prompt tokens that a live choice's first prefill found in the prefix cache; `None` before it, and
    /// once the choice has ended.
    #[must_use]
    pub fn num_cached_tokens(&self, id: SequenceId) -> Option<usize> {
        self.find(id).and_then(Sequence::num_cached_tokens)
    }

    /// The next step; empty when nothing can run. An empty plan repeats the last step's number and
    /// has no output to apply.
    ///
    /// May be called again before the output of earlier plans is applied: a sequence whose next token
    /// is not known yet is left out, or under `plan_ahead` planned on it. Outputs are applied in the order
    /// of the plans.
    pub fn schedule(&mut self, kv_cache: &mut PagedKvCache, now: Time) -> StepPlan {
        self.time_decode(now);
        if self.must_wait_for_output() {
            return self.empty_plan();
        }
        let mut step = StepBuilder::new(NonZeroU64::MIN.saturating_add(self.step), self.spent.take());
        self.count_leaving();
        if self.config.continuous_batching {
            self.fill_continuous(&mut step, kv_cache);
        } else {
            self.fill_static(&mut step, kv_cache, now);
        }
        self.counters.peak_running = self.counters.peak_running.max(self.running.len());
        self.counters.padding_tokens += step.num_padding as u64;
        self.counters.mixed_steps += u64::from(step.is_mixed());
        if step.is_empty() {
            self.spent.put(step.into_spent());
            return self.empty_plan();
        }
        self.step += 1;
        let (plan, mut in_flight) = step.finish(now);
        let record = &mut in_flight.record;
        if record.is_filler {
            self.counters.filler_tokens += record.num_tokens as u64;
            self.in_flight.iter_mut().for_each(|step| step.record.is_beside_filler = true);
        } else {
            record.is_beside_filler = self.in_flight.iter().any(|step| step.record.is_filler);
        }
        self.note_draws(&in_flight);
        self.in_flight.push_back(in_flight);
        plan
    }

    /// Takes back a plan that nobody reads any more, as it was: the next one is made of it, so that steady decoding
    /// allocates nothing for a sequence and writes only what is new. No plan is another for it. Prompt chunks, which are
    /// long, are let go.
    pub fn reuse(&mut self, plan: StepPlan) {
        self.spent.put_plan(plan);
    }

    fn empty_plan(&self) -> StepPlan {
        StepPlan { step: self.step, ..StepPlan::default() }
    }

    /// Whether anything waits, runs, or is still in flight.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.waiting.is_empty() || !self.running.is_empty() || self.num_ending > 0
    }

    /// When `schedule` gave nothing although something waits: the time at which to ask again (a
    /// static batch filling up). `None` when only new input can change that.
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Time> {
        if self.config.continuous_batching || !self.running.is_empty() || !self.in_flight.is_empty() {
            return None;
        }
        self.static_batch_due()
    }

    /// Gauges and counters. Cheap.
    #[must_use]
    pub fn stats(&self) -> SchedulerStats {
        SchedulerStats {
            num_running: self.running.len() + self.num_ending,
            num_waiting: self.waiting.len(),
            ..self.counters
        }
    }

    fn find(&self, id: SequenceId) -> Option<&Sequence> {
        self.sequences.find(id).map(|at| self.sequences.get(at))
    }

    fn sequence(&self, at: SequenceRef) -> &Sequence {
        self.sequences.get(at)
    }

    fn sequence_mut(&mut self, at: SequenceRef) -> &mut Sequence {
        self.sequences.get_mut(at)
    }

    fn insert_running(&mut self, rank: Rank) {
        match self.running.binary_search(&rank) {
            Ok(_) => panic!("{:?} runs twice", rank.id),
            Err(at) => self.running.insert(at, rank),
        }
    }

    /// Ends a sequence wherever it is; unknown and already ended ones are left alone.
    fn end_sequence(&mut self, id: SequenceId, kv_cache: &mut PagedKvCache) {
        let Some(at) = self.sequences.find(id) else { return };
        let sequence = self.sequences.get_mut(at);
        if sequence.ended {
            return;
        }
        let (rank, in_flight) = (sequence.rank, sequence.num_in_flight > 0);
        sequence.ended = true;
        if let Ok(rank_idx) = self.running.binary_search(&rank) {
            self.running.remove(rank_idx);
            if in_flight {
                self.num_ending += 1;
            } else {
                kv_cache.free_sequence(id);
            }
        } else {
            assert!(self.waiting.remove(&rank), "{id:?} neither runs nor waits");
        }
        if !in_flight {
            self.sequences.remove(at);
        }
        self.count_ended(id.request);
    }

    /// One choice of a request less.
    fn count_ended(&mut self, id: RequestId) {
        if let Some(request) = self.requests.get_mut(&id) {
            request.num_live -= 1;
            if request.num_live == 0 {
                self.requests.remove(&id);
            }
        }
    }
}
