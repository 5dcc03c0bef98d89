//! A small deterministic executor and what the engine's tests ask of it. The next token is a hash of
//! every token that the sequence sees through its block table, so a wrong or stale block changes the
//! stream. (The simulator with random histories lives in the testkit.)
#![allow(dead_code, clippy::unwrap_used, clippy::cast_possible_truncation)]

use pagemill_engine::{
    ChannelSink, EngineError, EventReceiver, Executor, InferenceEngine, MemoryPlan, Request, SamplingParams, StepInput,
    UnifiedMemoryAllocator,
};
use pagemill_scheduler::{
    CacheGroup, DynamicBatchScheduler, KvCacheConfig, KvLayout, PagedKvCache, RequestId, SampledToken,
    ScheduledSequence, SchedulerConfig, StepOutput, TokenLogprobs,
};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};

pub const BLOCK_SIZE: usize = 16;
pub const VOCAB: u64 = 1000;

/// What goes wrong, and when.
#[derive(Default)]
pub struct Script {
    /// Submitting this step fails.
    pub fail_at_step: Option<u64>,
    /// Running this step panics.
    pub panic_at_step: Option<u64>,
    /// This choice of this request gets no token from its third on.
    pub nan_for: Option<(RequestId, u32)>,
    /// Steps wait for a token from here before they run.
    pub gate: Option<crossbeam_channel::Receiver<()>>,
    /// Plans in flight at most; 0 means 1.
    pub max_in_flight: usize,
}

/// What the executor was told, for assertions from outside.
#[derive(Debug, Default)]
pub struct Seen {
    pub started: HashSet<RequestId>,
    pub ended: HashSet<RequestId>,
    pub most_in_flight: usize,
}

pub struct FakeExecutor {
    script: Script,
    slots: Vec<u32>,
    lengths: HashMap<RequestId, usize>,
    outputs: VecDeque<StepOutput>,
    sampled: HashMap<(RequestId, u32), u32>,
    pub seen: Arc<Mutex<Seen>>,
}

impl FakeExecutor {
    pub fn new(num_blocks: usize, script: Script) -> Self {
        Self {
            script,
            slots: vec![u32::MAX; num_blocks * BLOCK_SIZE],
            lengths: HashMap::new(),
            outputs: VecDeque::new(),
            sampled: HashMap::new(),
            seen: Arc::default(),
        }
    }

    fn slot(sequence: &ScheduledSequence, position: usize) -> usize {
        sequence.block_tables[0][position / BLOCK_SIZE].0 as usize * BLOCK_SIZE + position % BLOCK_SIZE
    }

    fn run_sequence(&mut self, sequence: &ScheduledSequence, output: &mut StepOutput) {
        for (offset, &token) in sequence.token_ids.iter().enumerate() {
            let slot = Self::slot(sequence, sequence.start + offset);
            self.slots[slot] = token;
        }
        let end = sequence.start + sequence.token_ids.len();
        let visible: Vec<u32> = (0..end).map(|position| self.slots[Self::slot(sequence, position)]).collect();
        if sequence.prompt_logprobs {
            let prompt_len = self.lengths[&sequence.id.request];
            let entry = TokenLogprobs { logprob: -1.0, rank: 1, top: vec![] };
            let count = (end + 1).min(prompt_len).saturating_sub(sequence.start + 1);
            output.prompt_logprobs.push((sequence.id, sequence.start + 1, vec![entry; count]));
        }
        for &id in &sequence.sample {
            let count = self.sampled.entry((id.request, id.choice)).or_default();
            *count += 1;
            let broken = self.script.nan_for == Some((id.request, id.choice)) && *count >= 3;
            let token = if broken { Err("no logits".to_owned()) } else { Ok(next_token(&visible, id.choice)) };
            output.sampled.push(SampledToken { id, token, logprobs: None });
        }
    }
}

/// The token that follows `visible` in choice `choice`.
pub fn next_token(visible: &[u32], choice: u32) -> u32 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64 ^ u64::from(choice);
    for &token in visible {
        hash = (hash ^ u64::from(token)).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
    }
    (hash % VOCAB) as u32
}

/// What choice `choice` of a request says when nothing disturbs it.
pub fn expected(prompt: &[u32], choice: u32, len: usize) -> Vec<u32> {
    let mut visible = prompt.to_vec();
    for _ in 0..len {
        visible.push(next_token(&visible, choice));
    }
    visible.split_off(prompt.len())
}

impl Executor for FakeExecutor {
    fn submit(&mut self, input: StepInput) -> Result<(), EngineError> {
        if let Some(gate) = &self.script.gate {
            let _ = gate.recv();
        }
        let plan = &input.plan;
        if self.script.fail_at_step == Some(plan.step) {
            return Err(EngineError::Internal("the device is on fire".into()));
        }
        assert!(self.script.panic_at_step != Some(plan.step), "planted panic");
        {
            let mut seen = self.seen.lock().unwrap();
            for request in &input.started {
                assert!(seen.started.insert(request.id), "{:?} started twice", request.id);
                self.lengths.insert(request.id, request.prompt.len());
            }
            for id in &input.ended {
                assert!(seen.started.contains(id), "{id:?} ended without a start");
                assert!(seen.ended.insert(*id), "{id:?} ended twice");
            }
            for sequence in &plan.sequences {
                let id = sequence.id.request;
                assert!(seen.started.contains(&id) && !seen.ended.contains(&id), "{id:?} planned while not live");
            }
            for id in &input.ended_sequences {
                assert!(plan.sequences.iter().all(|s| s.id != *id), "{id:?} planned after its end");
            }
        }
        let mut output = StepOutput { step: plan.step, ..StepOutput::default() };
        for copy in &plan.block_copies {
            let (src, dst) = (copy.src.0 as usize * BLOCK_SIZE, copy.dst.0 as usize * BLOCK_SIZE);
            self.slots.copy_within(src..src + BLOCK_SIZE, dst);
        }
        for sequence in &plan.sequences {
            self.run_sequence(sequence, &mut output);
        }
        self.outputs.push_back(output);
        let mut seen = self.seen.lock().unwrap();
        seen.most_in_flight = seen.most_in_flight.max(self.outputs.len());
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput, EngineError> {
        self.outputs.pop_front().ok_or_else(|| EngineError::Internal("collected more than was submitted".into()))
    }

    fn max_in_flight(&self) -> usize {
        self.script.max_in_flight.max(1)
    }
}

/// Limits of the engines under test.
pub struct Sizes {
    pub num_blocks: usize,
    pub max_batch_size: usize,
    pub prefill_chunk_size: usize,
    pub max_waiting: usize,
}

impl Default for Sizes {
    fn default() -> Self {
        Self { num_blocks: 64, max_batch_size: 8, prefill_chunk_size: 20, max_waiting: 100 }
    }
}

pub fn engine(sizes: &Sizes, script: Script) -> InferenceEngine<FakeExecutor> {
    let scheduler = DynamicBatchScheduler::new(SchedulerConfig {
        max_batch_size: sizes.max_batch_size,
        max_batch_tokens: sizes.prefill_chunk_size + sizes.max_batch_size,
        prefill_chunk_size: sizes.prefill_chunk_size,
        mixed_batch_tokens: None,
        max_seq_len: 512,
        max_waiting: sizes.max_waiting,
        ageing_us: 1_000_000,
        continuous_batching: true,
        static_batch_wait_us: 0,
        micro_batches: 1,
        plan_ahead: false,
        num_stages: 1,
    });
    let kv_cache = PagedKvCache::new(KvCacheConfig {
        num_blocks: sizes.num_blocks,
        block_size: BLOCK_SIZE,
        groups: vec![CacheGroup::Full],
        layout: KvLayout::Paged,
        max_seq_len: 512,
        prefill_chunk_size: sizes.prefill_chunk_size,
        prefix_cache: true,
    });
    let memory = UnifiedMemoryAllocator::new(MemoryPlan { num_blocks: sizes.num_blocks, ..MemoryPlan::default() });
    let executor = FakeExecutor::new(sizes.num_blocks, script);
    InferenceEngine::new(scheduler, kv_cache, executor, memory).checked_every_step()
}

/// A request and the ear that hears it.
pub fn request(prompt: &[u32], max_tokens: usize, n: u32) -> (Request, EventReceiver) {
    request_with_room(prompt, max_tokens, n, 10_000)
}

pub fn request_with_room(prompt: &[u32], max_tokens: usize, n: u32, room: usize) -> (Request, EventReceiver) {
    let (sink, events) = ChannelSink::new(room);
    let request = Request {
        prompt: prompt.to_vec(),
        max_tokens,
        n,
        sampling: SamplingParams::default(),
        priority: 0,
        cache_salt: None,
        sink: Box::new(sink),
    };
    (request, events)
}

/// A prompt of `len` tokens that no other `seed` shares a prefix with.
pub fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (seed * 131 + i * 7) % VOCAB as u32).collect()
}
