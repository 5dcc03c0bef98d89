//! When blocks run out.

use pagemill_scheduler::*;

use crate::support::*;

#[test]
fn d41_two_generations_that_do_not_fit_together_both_finish() {
    // Each needs 126 blocks; 200 are there.
    let mut house = House::small(200);
    let specs = [request(1, prompt(1, 4), 500), request(2, prompt(2, 4), 500)];
    for spec in &specs {
        house.submit(spec.clone()).unwrap();
    }
    house.run(1_500);
    for spec in &specs {
        house.assert_solo(spec);
    }
    let stats = house.scheduler.stats();
    assert!((1..=2).contains(&stats.preemptions), "{stats:?}");
    house.assert_idle();
}

#[test]
fn d75_exhaustion_ends_nobody() {
    // A pool of 1,024 tokens, four generations of 400.
    let mut house = House::new(scheduler_config(), cache_config(64, 16));
    let specs: Vec<_> = (1..=4).map(|id| request(id, prompt(id as u32, 10), 400)).collect();
    for spec in &specs {
        house.submit(spec.clone()).unwrap();
    }
    house.run(2_000);
    for spec in &specs {
        house.assert_solo(spec);
    }
    assert!(house.scheduler.stats().preemptions > 0);
    house.assert_idle();
}

#[test]
fn the_lowest_priority_and_youngest_is_preempted_and_the_first_never() {
    let mut house = House::small(30);
    let specs = [
        RequestSpec { priority: 0, ..request(1, prompt(1, 8), 60) },
        RequestSpec { priority: 1, ..request(2, prompt(2, 8), 60) },
        RequestSpec { priority: 0, ..request(3, prompt(3, 8), 60) },
        RequestSpec { priority: -1, ..request(4, prompt(4, 8), 60) },
    ];
    for spec in &specs {
        house.submit(spec.clone()).unwrap();
    }
    let mut left = Vec::new();
    let mut running: Vec<u64> = Vec::new();
    while let Some(plan) = house.schedule() {
        let now: Vec<u64> = plan.sequences.iter().map(|s| s.id.request.0).collect();
        let preempted = |id: &u64| !now.contains(id) && !house.finished.contains_key(&first(*id));
        left.extend(running.iter().copied().filter(preempted));
        running = now;
        house.apply();
    }
    for spec in &specs {
        house.assert_solo(spec);
    }
    assert!(left.starts_with(&[4, 3]), "they left in the order {left:?}");
    assert!(!left.contains(&2), "the first of all was never preempted");
}

#[test]
fn a_preempted_sequence_finds_its_blocks_again() {
    let mut house = House::small(20);
    let specs = [request(1, prompt(1, 8), 40), request(2, prompt(2, 24), 30)];
    for spec in &specs {
        house.submit(spec.clone()).unwrap();
    }
    house.run(500);
    for spec in &specs {
        house.assert_solo(spec);
    }
    assert!(house.scheduler.stats().preemptions > 0);
    assert!(house.kv.stats().prefix_hits > 0);
    assert_eq!(house.finished[&first(2)].1, 0, "cached tokens are those of the first prefill");
}

#[test]
fn a_lone_request_may_fill_the_pool() {
    let mut house = House::small(10);
    let spec = request(1, prompt(1, 30), 10);
    house.submit(spec.clone()).unwrap();
    house.run(50);
    house.assert_solo(&spec);
    assert_eq!(house.scheduler.stats().preemptions, 0);
}

#[test]
fn prompt_logprobs_are_not_repeated_after_a_preemption() {
    // Chunks of 1: preempted in the middle of its prompt. Chunks of 7: after it.
    for chunk in [1, 7] {
        let config = SchedulerConfig { max_batch_tokens: 8, prefill_chunk_size: chunk, ..scheduler_config() };
        let mut house = House::new(config, KvCacheConfig { prefix_cache: false, ..cache_config(14, 4) });
        let first_spec = request(1, prompt(1, 4), 44);
        let asking = RequestSpec { prompt_logprobs: true, ..request(2, prompt(2, 30), 12) };
        house.submit(first_spec.clone()).unwrap();
        house.submit(asking.clone()).unwrap();
        house.run(500);
        house.assert_solo(&first_spec);
        house.assert_solo(&asking);
        assert!(house.scheduler.stats().preemptions > 0);
        assert_eq!(house.logprob_positions[&first(2)], (1..30).collect::<Vec<_>>());
    }
}
