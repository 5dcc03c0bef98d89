//! Who is part of a step that is planned while the one before runs.
#![allow(clippy::unwrap_used)]

use pagemill_engine::{
    ChannelSink, EventReceiver, InferenceEngine, MemoryPlan, Request, SamplingParams, UnifiedMemoryAllocator,
};
use pagemill_scheduler::{
    CacheGroup, DynamicBatchScheduler, KvCacheConfig, KvLayout, PagedKvCache, RequestId, SchedulerConfig, Time,
};
use pagemill_testkit::{Draw, ExecutorLimits, FakeExecutor, FakeModel};

fn engine() -> InferenceEngine<FakeExecutor> {
    let scheduler = SchedulerConfig {
        max_batch_size: 4,
        max_batch_tokens: 64,
        prefill_chunk_size: 32,
        mixed_batch_tokens: None,
        max_seq_len: 200,
        max_waiting: 10,
        ageing_us: 0,
        continuous_batching: true,
        static_batch_wait_us: 0,
        micro_batches: 1,
        plan_ahead: true,
        num_stages: 1,
    };
    let kv_cache = KvCacheConfig {
        num_blocks: 64,
        block_size: 16,
        groups: vec![CacheGroup::Full],
        layout: KvLayout::Paged,
        max_seq_len: 200,
        prefill_chunk_size: 32,
        prefix_cache: true,
    };
    let limits = ExecutorLimits {
        num_blocks: 64,
        block_size: 16,
        max_batch_size: 4,
        max_batch_tokens: 64,
        prefill_chunk_size: 32,
        max_in_flight: 1,
    };
    let model = FakeModel { groups: kv_cache.groups.clone(), fails_one_in: None };
    let executor = FakeExecutor::new(model, limits, None).planned_ahead(Draw::from_seed(1));
    let memory = UnifiedMemoryAllocator::new(MemoryPlan { num_blocks: 64, ..MemoryPlan::default() });
    InferenceEngine::new(DynamicBatchScheduler::new(scheduler), PagedKvCache::new(kv_cache), executor, memory)
}

fn submit(engine: &mut InferenceEngine<FakeExecutor>, max_tokens: usize) -> (RequestId, EventReceiver) {
    let (sink, events) = ChannelSink::new(200);
    let request = Request {
        prompt: vec![7; 20],
        max_tokens,
        n: 1,
        sampling: SamplingParams::default(),
        priority: 0,
        cache_salt: None,
        sink: Box::new(sink),
    };
    (engine.submit(request, Time(0)).unwrap(), events)
}

/// Steps until the next plan is due while one runs.
fn step_until_due(engine: &mut InferenceEngine<FakeExecutor>) {
    for _ in 0..50 {
        let before = engine.status().steps;
        assert!(engine.step(Time(0)).unwrap());
        if engine.status().steps == before {
            return;
        }
    }
    panic!("no step was about to end");
}

#[test]
fn who_came_before_a_step_was_about_to_end_is_in_the_next_one() {
    let mut engine = engine();
    let (first, _ear) = submit(&mut engine, 100);
    step_until_due(&mut engine);
    let (second, _other_ear) = submit(&mut engine, 10);
    assert!(engine.step(Time(0)).unwrap());
    let executor = engine.parts().2;
    assert!(executor.is_in_flight(first) && executor.is_in_flight(second));
    assert_eq!(engine.status().host.steps_ahead, 1);
}

#[test]
fn who_was_aborted_before_is_not() {
    let mut engine = engine();
    let (first, _ear) = submit(&mut engine, 100);
    let (second, _other_ear) = submit(&mut engine, 100);
    step_until_due(&mut engine);
    engine.abort(first);
    assert!(engine.step(Time(0)).unwrap());
    let executor = engine.parts().2;
    assert!(!executor.is_in_flight(first) && executor.is_in_flight(second));
}

#[test]
fn nothing_is_planned_ahead_of_nothing() {
    let mut engine = engine();
    assert!(!engine.step(Time(0)).unwrap());
    let _ear = submit(&mut engine, 1);
    while engine.step(Time(0)).unwrap() {}
    let status = engine.status();
    assert_eq!((status.steps, status.host.steps_ahead, engine.has_work()), (1, 0, false));
}
