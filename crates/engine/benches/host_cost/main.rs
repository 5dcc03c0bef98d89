//! What the host does for a step in steady decode, on a device whose step costs nothing: `cargo bench -p
//! pagemill-engine --bench host_cost [-- SEQUENCES STEPS] [warm|cold|ranks|ahead]`. Runs for each number of sequences:
//!
//! - *warm*: the engine's thread and the sinks', an executor that answers at once; scheduling, applying and delivering.
//! - *cold*: as *warm*, but the core's caches are emptied where the device would compute, as they are behind a step of
//!   milliseconds.
//! - *ranks*: the engine as it is, with a rank's thread and a free device of 2 ms a step; all parts, and what of them
//!   lies between two steps.
//! - *ahead*: as *ranks*, on a device that takes a step before the draws of the one before are known.
//!
//! Medians over steps, in microseconds. On a busy machine, compare binaries that ran in turn.
#![allow(clippy::unwrap_used)]

mod echo_executor;
mod free_device;

use echo_executor::EchoExecutor;
use free_device::FreeDevice;
use pagemill_backend::SoloCollective;
use pagemill_engine::{
    Checkpoint, EngineConfig, EngineEvent, EventSink, Executor, HostTime, InferenceEngine, MemoryPlan, RankContext,
    Request, SamplingParams, SinkClosed, UnifiedMemoryAllocator, build_engine_on,
};
use pagemill_scheduler::{
    CacheGroup, DynamicBatchScheduler, KvCacheConfig, KvLayout, PagedKvCache, SchedulerConfig, Time,
};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tokens of the longest prompt; others are shorter by up to a block, so that as many begin a block in each step.
const PROMPT_LEN: usize = 1000;
const BLOCK_SIZE: usize = 16;
/// Room for a prompt and 600 tokens: steps and warm-up must fit.
const BLOCKS_A_SEQUENCE: usize = 100;
const MAX_SEQ_LEN: usize = BLOCKS_A_SEQUENCE * BLOCK_SIZE;
/// A stop token that no executor here draws.
const NEVER_DRAWN: u32 = 500;
/// Steps before any counts.
const WARM_UP: usize = 40;
/// Times that the batch is filled with other prompts before: then all memory has been used, and every block has a name.
const ROUNDS_BEFORE: usize = 3;

/// Of the free device.
const STEP: Duration = Duration::from_millis(2);

/// Notes when each token came, as `bench latency` does.
struct NotingSink {
    start: Instant,
    tokens: Vec<f64>,
}

impl EventSink for NotingSink {
    fn send(&mut self, _event: EngineEvent) -> Result<(), SinkClosed> {
        self.tokens.push(self.start.elapsed().as_secs_f64());
        Ok(())
    }

    fn is_closed(&self) -> bool {
        false
    }
}

fn request(at: usize, num_tokens: usize) -> Request {
    let prompt =
        (0..PROMPT_LEN - at % BLOCK_SIZE).map(|i| u32::try_from((at * 131 + i * 7 + i * at) % 499).unwrap()).collect();
    Request {
        prompt,
        max_tokens: num_tokens,
        n: 1,
        sampling: SamplingParams { stop_token_ids: vec![NEVER_DRAWN], ..SamplingParams::default() },
        priority: 0,
        cache_salt: None,
        sink: Box::new(NotingSink { start: Instant::now(), tokens: Vec::with_capacity(num_tokens) }),
    }
}

fn alone(num_sequences: usize, empties_caches: bool) -> InferenceEngine<EchoExecutor> {
    let kv_cache = PagedKvCache::new(KvCacheConfig {
        num_blocks: num_sequences * BLOCKS_A_SEQUENCE,
        block_size: BLOCK_SIZE,
        groups: vec![CacheGroup::Full],
        layout: KvLayout::Paged,
        max_seq_len: MAX_SEQ_LEN,
        prefill_chunk_size: 512,
        prefix_cache: true,
    });
    let scheduler = DynamicBatchScheduler::new(SchedulerConfig {
        max_batch_size: num_sequences,
        max_batch_tokens: 8192,
        prefill_chunk_size: 512,
        mixed_batch_tokens: None,
        max_seq_len: MAX_SEQ_LEN,
        max_waiting: 1024,
        ageing_us: 5_000_000,
        continuous_batching: true,
        static_batch_wait_us: 0,
        micro_batches: 1,
        plan_ahead: true,
        num_stages: 1,
    });
    let memory = UnifiedMemoryAllocator::new(MemoryPlan::default());
    InferenceEngine::new(scheduler, kv_cache, EchoExecutor::new(empties_caches), memory).telling_on_a_thread()
}

fn with_ranks(num_sequences: usize, takes_ahead: bool) -> InferenceEngine {
    // A block of the zoo's model: keys and values of 4 layers, 2 heads of 32 elements, 16 tokens, 2 bytes.
    let block_bytes = 2 * 4 * 2 * 32 * BLOCK_SIZE as u64 * 2;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/zoo/llama");
    let config = EngineConfig {
        max_batch_size: Some(num_sequences),
        max_seq_len: Some(MAX_SEQ_LEN),
        max_batch_tokens: Some(8192),
        kv_cache_bytes: Some(block_bytes * (num_sequences * BLOCKS_A_SEQUENCE) as u64),
        ..EngineConfig::default()
    };
    let rank = RankContext {
        backend: Arc::new(FreeDevice::new(STEP, takes_ahead, Duration::ZERO)),
        collective: Arc::new(SoloCollective),
    };
    build_engine_on(&Checkpoint::open(&folder).unwrap(), vec![rank], &config, &|_| {})
        .unwrap()
        .engine
        .telling_on_a_thread()
}

/// Steps until all decode, then `num_steps` more; medians of what each cost.
fn measure<E: Executor>(engine: &mut InferenceEngine<E>, num_sequences: usize, num_steps: usize) -> String {
    let mut now = 0;
    for at in 0..num_sequences * ROUNDS_BEFORE {
        engine.submit(request(at, WARM_UP), Time(0)).unwrap();
    }
    while engine.has_work() {
        now += 1;
        engine.step(Time(now)).unwrap();
    }
    let generated_before = engine.status().scheduler.generated_tokens;
    for at in (num_sequences * ROUNDS_BEFORE..).take(num_sequences) {
        engine.submit(request(at, num_steps + 2 * WARM_UP), Time(0)).unwrap();
    }
    let mut step = |engine: &mut InferenceEngine<E>| {
        let before = engine.status().host;
        loop {
            now += 1;
            assert!(engine.step(Time(now)).unwrap());
            let host = engine.status().host;
            if host.steps > before.steps {
                return host.since(&before);
            }
        }
    };
    while engine.status().scheduler.generated_tokens - generated_before < (num_sequences * WARM_UP) as u64 {
        step(engine);
    }
    let steps: Vec<HostTime> = (0..num_steps).map(|_| step(engine)).collect();
    let median = |part: fn(&HostTime) -> u64| {
        let mut values: Vec<u64> = steps.iter().map(part).collect();
        values.sort_unstable();
        format!("{:7.1}", f64::from(u32::try_from(values[values.len() / 2]).unwrap()) / 1e3)
    };
    let num_ahead: u64 = steps.iter().map(|host| host.steps_ahead).sum();
    let num_queued: u64 = steps.iter().map(|host| host.steps_queued).sum();
    format!(
        "{} {} {} {} {} {}   {num_ahead} of {num_steps} planned ahead, {num_queued} queued",
        median(|host| host.schedule_ns),
        median(|host| host.layout_ns),
        median(|host| host.apply_ns),
        median(|host| host.deliver_ns),
        median(HostTime::total_ns),
        median(|host| host.exposed_ns)
    )
}

fn main() {
    let numbers: Vec<usize> = std::env::args().filter_map(|word| word.parse().ok()).collect();
    let batches = numbers.first().map_or(vec![1, 64, 256], |&batch| vec![batch]);
    let num_steps = numbers.get(1).copied().unwrap_or(400);
    let is_wanted = |run: &str| {
        let mut named =
            std::env::args().filter(|word| ["warm", "cold", "ranks", "ahead"].contains(&word.as_str())).peekable();
        named.peek().is_none() || named.any(|word| word == run)
    };
    println!("            schedule  layout   apply deliver   total  not hidden");
    for batch in batches {
        for run in ["warm", "cold"].into_iter().filter(|run| is_wanted(run)) {
            println!("{batch:4} {run}   {}", measure(&mut alone(batch, run == "cold"), batch, num_steps));
        }
        for (run, takes_ahead) in [("ranks", false), ("ahead", true)] {
            if is_wanted(run) {
                println!("{batch:4} {run}  {}", measure(&mut with_ranks(batch, takes_ahead), batch, num_steps));
            }
        }
    }
}
