//! A fake executor and a harness that drives scheduler, cache and executor to the end.
//!
//! The executor's KV entry of a position mixes the token with every entry that the position may read,
//! so a wrong, stale or foreign block changes the next token at once. [`solo`] computes the same
//! stream from the tokens alone.

use std::collections::{BTreeMap, VecDeque};

use pagemill_scheduler::*;

pub const VOCABULARY: u64 = 50_000;

pub fn mix(a: u64, b: u64) -> u64 {
    let mut x = a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// First position that position `p` reads.
fn first_read(group: CacheGroup, p: usize) -> usize {
    match group {
        CacheGroup::Full => 0,
        CacheGroup::SlidingWindow { window } => (p + 1).saturating_sub(window),
    }
}

fn entry_of(token: u32, position: usize, read: impl Iterator<Item = u64>) -> u64 {
    read.fold(mix(u64::from(token), position as u64), mix)
}

pub fn sample(entry: u64, choice: u32) -> u32 {
    (mix(entry, u64::from(choice)) % VOCABULARY) as u32
}

/// What a choice generates when it runs alone, without any cache.
pub fn solo(groups: &[CacheGroup], prompt: &[u32], max_tokens: usize, choice: u32) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    let mut entries: Vec<u64> = Vec::new();
    while tokens.len() < prompt.len() + max_tokens {
        for p in entries.len()..tokens.len() {
            let read = groups.iter().flat_map(|&group| entries[first_read(group, p)..p].iter().copied());
            let entry = entry_of(tokens[p], p, read);
            entries.push(entry);
        }
        tokens.push(sample(*entries.last().unwrap(), choice));
    }
    tokens[prompt.len()..].to_vec()
}

/// Simulated KV memory, one entry a slot.
pub struct Memory {
    groups: Vec<CacheGroup>,
    block_size: usize,
    slots: Vec<Option<u64>>,
    /// What the plan before drew.
    drawn: Vec<(SequenceId, u32)>,
}

impl Memory {
    fn new(config: &KvCacheConfig) -> Self {
        let slots = vec![None; config.num_blocks * config.block_size];
        Self { groups: config.groups.clone(), block_size: config.block_size, slots, drawn: Vec::new() }
    }

    fn slot(&mut self, table: &[BlockId], position: usize) -> &mut Option<u64> {
        let block = table[position / self.block_size];
        assert_ne!(block, BlockId::NONE, "position {position} was reclaimed while it is needed");
        &mut self.slots[block.0 as usize * self.block_size + position % self.block_size]
    }

    pub fn run(&mut self, plan: &StepPlan) -> StepOutput {
        for copy in &plan.block_copies {
            let src = copy.src.0 as usize * self.block_size;
            self.slots.copy_within(src..src + self.block_size, copy.dst.0 as usize * self.block_size);
        }
        let mut output = StepOutput { step: plan.step, ..StepOutput::default() };
        for sequence in &plan.sequences {
            let mut last = 0;
            let mut token_ids = sequence.token_ids.clone();
            if let Some(idx) = sequence.drawn_idx {
                let (owner, token) = self.drawn[idx as usize];
                assert_eq!((owner, token_ids.pop()), (sequence.id, Some(0)), "another's draw");
                token_ids.push(token);
            }
            for (offset, &token) in token_ids.iter().enumerate() {
                last = self.compute(sequence, token, sequence.start + offset);
            }
            for &id in &sequence.sample {
                output.sampled.push(SampledToken { id, token: Ok(sample(last, id.choice)), logprobs: None });
            }
            if sequence.prompt_logprobs {
                let start = sequence.start + 1;
                let one = TokenLogprobs { logprob: -1.0, rank: 1, top: Vec::new() };
                output.prompt_logprobs.push((sequence.id, start, vec![one; sequence.token_ids.len()]));
            }
        }
        let drawn = output.sampled.iter().map(|sampled| (sampled.id, sampled.token.clone().unwrap_or(0)));
        self.drawn = drawn.collect();
        output
    }

    fn compute(&mut self, sequence: &ScheduledSequence, token: u32, position: usize) -> u64 {
        let mut read = Vec::new();
        for (group, table) in self.groups.clone().into_iter().zip(&sequence.block_tables) {
            for p in first_read(group, position)..position {
                read.push(self.slot(table, p).expect("a read of a slot never written"));
            }
        }
        let entry = entry_of(token, position, read.into_iter());
        for table in &sequence.block_tables {
            *self.slot(table, position) = Some(entry);
        }
        entry
    }
}

/// Scheduler, cache, executor and what came out.
pub struct House {
    pub scheduler: DynamicBatchScheduler,
    pub kv: PagedKvCache,
    pub memory: Memory,
    pub now: Time,
    pub in_flight: VecDeque<StepPlan>,
    pub tokens: BTreeMap<SequenceId, Vec<u32>>,
    pub finished: BTreeMap<SequenceId, (FinishReason, usize)>,
    pub logprob_positions: BTreeMap<SequenceId, Vec<usize>>,
    pub steps: usize,
}

pub fn cache_config(num_blocks: usize, block_size: usize) -> KvCacheConfig {
    KvCacheConfig {
        num_blocks,
        block_size,
        groups: vec![CacheGroup::Full],
        layout: KvLayout::Paged,
        max_seq_len: 1024,
        prefill_chunk_size: 64,
        prefix_cache: true,
    }
}

pub fn scheduler_config() -> SchedulerConfig {
    SchedulerConfig {
        max_batch_size: 8,
        max_batch_tokens: 64,
        prefill_chunk_size: 64,
        mixed_batch_tokens: None,
        max_seq_len: 1024,
        max_waiting: 100,
        ageing_us: 1_000_000,
        continuous_batching: true,
        static_batch_wait_us: 1_000,
        micro_batches: 1,
        plan_ahead: false,
        num_stages: 1,
    }
}

pub fn request(id: u64, prompt: Vec<u32>, max_tokens: usize) -> RequestSpec {
    RequestSpec {
        id: RequestId(id),
        prompt,
        max_tokens,
        min_tokens: 0,
        stop_token_ids: Vec::new(),
        n: 1,
        priority: 0,
        cache_salt: None,
        prompt_logprobs: false,
        arrival: Time(id),
    }
}

/// `len` tokens that no other seed gives.
pub fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len).map(|i| (mix(u64::from(seed), i as u64) % VOCABULARY) as u32).collect()
}

pub fn first(id: u64) -> SequenceId {
    choice(id, 0)
}

pub fn choice(id: u64, choice: u32) -> SequenceId {
    SequenceId { request: RequestId(id), choice }
}

impl House {
    pub fn new(scheduler: SchedulerConfig, cache: KvCacheConfig) -> Self {
        Self {
            scheduler: DynamicBatchScheduler::new(scheduler),
            memory: Memory::new(&cache),
            kv: PagedKvCache::new(cache),
            now: Time(0),
            in_flight: VecDeque::new(),
            tokens: BTreeMap::new(),
            finished: BTreeMap::new(),
            logprob_positions: BTreeMap::new(),
            steps: 0,
        }
    }

    pub fn small(num_blocks: usize) -> Self {
        Self::new(scheduler_config(), cache_config(num_blocks, 4))
    }

    pub fn submit(&mut self, request: RequestSpec) -> Admission {
        self.scheduler.submit(request, &self.kv)
    }

    /// Plans a step and leaves it in flight. `None` if nothing can run.
    pub fn schedule(&mut self) -> Option<StepPlan> {
        self.now.0 += 100;
        let plan = self.scheduler.schedule(&mut self.kv, self.now);
        self.kv.check_integrity().unwrap();
        if plan.is_empty() {
            return None;
        }
        self.check_plan(&plan);
        self.in_flight.push_back(plan.clone());
        Some(plan)
    }

    /// Limits hold, and nothing is written that a step in flight still reads.
    fn check_plan(&self, plan: &StepPlan) {
        let config = self.scheduler.config();
        assert!(plan.sequences.len() <= config.max_batch_size);
        let padding: usize = plan.sequences.iter().map(|s| s.num_padding).sum();
        let block_size = self.kv.config().block_size;
        let is_decode = |sequence: &ScheduledSequence| {
            sequence.token_ids.len() == 1
                && !sequence.sample.is_empty()
                && (self.tokens.contains_key(&sequence.id) || sequence.drawn_idx.is_some())
        };
        let is_undisturbed = !plan.sequences.iter().any(is_decode);
        let most = match config.mixed_batch_tokens {
            Some(mixed) if !is_undisturbed || plan.sequences.len() > 1 => mixed,
            _ => config.max_batch_tokens,
        };
        assert!(plan.num_tokens() + padding <= most, "{plan:?}");
        let mut chunk_seen = false;
        for (at, sequence) in plan.sequences.iter().enumerate() {
            let is_decode = is_decode(sequence);
            assert!(!(is_decode && chunk_seen), "a decode comes after a prompt chunk");
            chunk_seen |= !is_decode;
            let may_be_larger = is_undisturbed && at == 0;
            let chunk = if may_be_larger { config.largest_chunk() } else { config.prefill_chunk_size };
            assert!(sequence.token_ids.len() <= chunk);
            let end = sequence.start + sequence.token_ids.len();
            for table in &sequence.block_tables {
                for written in &table[sequence.start / block_size..end.div_ceil(block_size)] {
                    self.assert_not_in_flight(*written, sequence.id);
                }
            }
        }
    }

    /// Steps run in order, so a choice may write in place what its siblings' copies have read before.
    fn assert_not_in_flight(&self, written: BlockId, id: SequenceId) {
        let block_size = self.kv.config().block_size;
        for plan in &self.in_flight {
            for other in plan.sequences.iter().filter(|other| other.id != id) {
                let end = (other.start + other.token_ids.len()).div_ceil(block_size);
                for (group, table) in self.kv.config().groups.iter().zip(&other.block_tables) {
                    let read = &table[first_read(*group, other.start) / block_size..end];
                    assert!(!read.contains(&written), "{written:?} is still read by {:?}", other.id);
                    let copied = |copy: &&BlockCopy| copy.src == written && read.contains(&copy.dst);
                    let copy = plan.block_copies.iter().find(copied);
                    assert!(copy.is_none() || other.id.request == id.request, "{copy:?} is still to be made");
                }
            }
        }
    }

    /// Runs and applies the oldest step in flight.
    pub fn apply(&mut self) -> Vec<Event> {
        let plan = self.in_flight.pop_front().expect("a step in flight");
        let output = self.memory.run(&plan);
        self.scheduler.reuse(plan);
        self.apply_output(output)
    }

    pub fn apply_output(&mut self, output: StepOutput) -> Vec<Event> {
        let events = self.scheduler.apply(&mut self.kv, output, self.now);
        self.kv.check_integrity().unwrap();
        for event in events.clone() {
            match event {
                Event::Token { id, token, .. } => {
                    assert!(!self.finished.contains_key(&id), "{id:?} goes on after its end");
                    self.tokens.entry(id).or_default().push(token);
                }
                Event::PromptLogprobs { id, start, logprobs } => {
                    self.logprob_positions.entry(id).or_default().extend(start..start + logprobs.len());
                }
                Event::Finished { id, reason, num_cached_tokens } => {
                    assert!(self.finished.insert(id, (reason, num_cached_tokens)).is_none(), "{id:?} ended twice");
                }
            }
        }
        events
    }

    /// One whole step; whether anything ran.
    pub fn step(&mut self) -> bool {
        let ran = self.schedule().is_some();
        if ran {
            self.steps += 1;
            self.apply();
        }
        ran
    }

    /// Runs until nothing is left to do.
    pub fn run(&mut self, max_steps: usize) {
        for _ in 0..max_steps {
            if !self.scheduler.has_work() {
                return;
            }
            if !self.step() {
                self.now = self.scheduler.next_wakeup().expect("something waits, so something must run");
            }
        }
        assert!(!self.scheduler.has_work(), "not done after {max_steps} steps: {:?}", self.scheduler.stats());
    }

    /// Every choice of the request has exactly the tokens it gets alone.
    pub fn assert_solo(&self, spec: &RequestSpec) {
        for c in 0..spec.n {
            let expected = solo(&self.kv.config().groups, &spec.prompt, spec.max_tokens, c);
            assert_eq!(self.tokens.get(&choice(spec.id.0, c)), Some(&expected), "request {} choice {c}", spec.id.0);
            assert_eq!(self.finished[&choice(spec.id.0, c)].0, FinishReason::Length);
        }
    }

    /// Nothing is owned; clearing the cache frees all.
    pub fn assert_idle(&mut self) {
        assert!(!self.scheduler.has_work());
        let stats = self.scheduler.stats();
        assert_eq!((stats.num_running, stats.num_waiting), (0, 0));
        assert_eq!(self.kv.stats().num_owned, 0);
        self.kv.clear_prefix_cache();
        self.kv.check_integrity().unwrap();
        assert_eq!(self.kv.stats().num_free, self.kv.stats().num_blocks);
    }
}
