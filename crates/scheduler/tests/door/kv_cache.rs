//! Layouts, windows and accounting of the cache.

use pagemill_scheduler::*;

use crate::support::*;

fn windowed(groups: Vec<CacheGroup>, num_blocks: usize, chunk: usize) -> House {
    let config = SchedulerConfig { prefill_chunk_size: chunk, ..scheduler_config() };
    House::new(config, KvCacheConfig { groups, prefill_chunk_size: chunk, ..cache_config(num_blocks, 4) })
}

#[test]
fn d47_windows_at_every_length_prefill_and_decode() {
    for window in [1, 2, 3, 4, 5, 8, 9, 32] {
        for len in [1, 3, 4, 5, 31, 32, 33, 64, 150] {
            let mut house = windowed(vec![CacheGroup::SlidingWindow { window }], 60, 16);
            let spec = request(1, prompt(1, len), 20);
            house.submit(spec.clone()).unwrap();
            house.run(60);
            house.assert_solo(&spec);
            house.assert_idle();
        }
    }
}

#[test]
fn blocks_behind_the_window_go_back_and_the_bound_holds() {
    for (window, chunk) in [(1, 1), (5, 1), (6, 7), (16, 16), (33, 64), (7, 64)] {
        let groups = vec![CacheGroup::Full, CacheGroup::SlidingWindow { window }];
        let mut house = windowed(groups, 200, chunk);
        let spec = request(1, prompt(1, 150), 50);
        let bound = house.kv.blocks_needed(200);
        assert_eq!(bound, 50 + ((window + chunk - 2).div_ceil(4) + 1).min(50), "the stated formula");
        house.submit(spec.clone()).unwrap();
        let mut most = 0;
        while let Some(plan) = house.schedule() {
            let held = house.kv.stats().num_owned;
            assert!(held <= bound, "window {window}, chunk {chunk}: {held} blocks held, {bound} stated");
            let reached = plan.sequences[0].start + plan.sequences[0].token_ids.len();
            let expected_none = (plan.sequences[0].start + 1).saturating_sub(window) / 4;
            let none = plan.sequences[0].block_tables[1].iter().filter(|&&block| block == BlockId::NONE).count();
            assert_eq!(none, expected_none);
            most = most.max(plan.sequences[0].block_tables[1].len() - none);
            assert_eq!(plan.sequences[0].block_tables[1].len(), reached.div_ceil(4));
            house.apply();
        }
        assert!(most + 1 >= bound - 50, "the bound is tight: {most} of {}", bound - 50);
        house.assert_solo(&spec);
        house.assert_idle();
    }
}

#[test]
fn a_window_lets_long_sequences_into_a_small_pool() {
    // 150 tokens would need 38 blocks; with a window of 8 and chunks of 8 they hold 5.
    let mut house = windowed(vec![CacheGroup::SlidingWindow { window: 8 }], 5, 8);
    assert_eq!(house.kv.blocks_needed(150), 5);
    let spec = request(1, prompt(1, 100), 50);
    house.submit(spec.clone()).unwrap();
    house.run(100);
    house.assert_solo(&spec);
    assert_eq!(house.scheduler.stats().preemptions, 0);
}

#[test]
fn contiguous_reserves_whole_sequences() {
    let cache = KvCacheConfig { layout: KvLayout::Contiguous, max_seq_len: 64, ..cache_config(50, 4) };
    let config = SchedulerConfig { max_seq_len: 64, ..scheduler_config() };
    let mut house = House::new(config, cache);
    assert_eq!(house.kv.blocks_needed(1), 16);
    let specs: Vec<_> = (1..=5).map(|id| request(id, prompt(1, 6), 8)).collect();
    for spec in &specs {
        house.submit(spec.clone()).unwrap();
    }
    let plan = house.schedule().unwrap();
    assert_eq!(plan.sequences.len(), 3, "50 blocks hold three reservations of 16");
    assert_eq!(house.kv.stats().num_owned, 48);
    assert_eq!(plan.sequences[0].block_tables[0].len(), 2, "the plan carries what the step reads");
    house.apply();
    house.run(60);
    for spec in &specs {
        house.assert_solo(spec);
        assert_eq!(house.finished[&first(spec.id.0)].1, 0);
    }
    let stats = house.scheduler.stats();
    assert_eq!((stats.preemptions, stats.peak_running), (0, 3));
    house.assert_idle();
}

#[test]
fn contiguous_refuses_when_no_reservation_fits() {
    let cache = KvCacheConfig { layout: KvLayout::Contiguous, ..cache_config(50, 4) };
    let mut house = House::new(scheduler_config(), cache);
    let refusal = house.submit(request(1, prompt(1, 6), 8)).unwrap_err();
    assert_eq!(refusal, Refusal::NeverFits { needed: 256, available: 50, block_size: 4 });
}

#[test]
fn contiguous_keeps_what_lies_behind_a_window() {
    let groups = vec![CacheGroup::Full, CacheGroup::SlidingWindow { window: 5 }];
    let cache = KvCacheConfig { layout: KvLayout::Contiguous, groups, max_seq_len: 64, ..cache_config(40, 4) };
    let mut house = House::new(SchedulerConfig { max_seq_len: 64, ..scheduler_config() }, cache);
    let spec = request(1, prompt(1, 30), 20);
    house.submit(spec.clone()).unwrap();
    while let Some(plan) = house.schedule() {
        assert!(plan.sequences[0].block_tables.iter().all(|table| !table.contains(&BlockId::NONE)));
        assert_eq!(house.kv.stats().num_owned, 32);
        house.apply();
    }
    house.assert_solo(&spec);
    house.assert_idle();
}

#[test]
fn clearing_the_prefix_cache_leaves_running_sequences_alone() {
    let mut house = House::small(60);
    let specs = [request(1, prompt(1, 20), 3), request(2, prompt(2, 20), 30)];
    for spec in &specs {
        house.submit(spec.clone()).unwrap();
    }
    for _ in 0..5 {
        house.step();
    }
    assert_eq!(house.kv.stats().num_cached, 5);
    house.kv.clear_prefix_cache();
    house.kv.check_integrity().unwrap();
    assert_eq!(house.kv.stats().num_cached, 0);
    house.run(60);
    house.assert_solo(&specs[1]);
    house.assert_idle();
}

#[test]
fn hit_counters_count_tokens() {
    let mut house = House::small(60);
    for id in 1..=2 {
        house.submit(request(id, prompt(1, 20), 3)).unwrap();
        house.run(10);
    }
    let stats = house.kv.stats();
    assert_eq!((stats.prefix_queries, stats.prefix_hits), (40, 16));
}

#[test]
fn what_could_be_written_before_a_fork_is_copied_after_it_by_whoever_writes_first() {
    for writer in [0, 1] {
        let mut cache = PagedKvCache::new(cache_config(8, 4));
        let (ids, mut copies) = ([first(1), choice(1, 1)], Vec::new());
        cache.start_sequence(ids[0], PrefixHit::default()).unwrap();
        cache.extend(ids[0], 0, 6, &mut copies).unwrap();
        cache.extend(ids[0], 6, 7, &mut copies).unwrap();
        assert_eq!(copies, [], "its block is its own");
        cache.fork(ids[0], ids[1]);
        let before = cache.block_tables(ids[0], 7);
        cache.extend(ids[writer], 7, 8, &mut copies).unwrap();
        let after = cache.block_tables(ids[writer], 8);
        assert_eq!(copies, [BlockCopy { src: before[0][1], dst: after[0][1] }]);
        cache.extend(ids[1 - writer], 7, 8, &mut copies).unwrap();
        assert_eq!((copies.len(), cache.block_tables(ids[1 - writer], 8)), (1, before), "the last one keeps it");
        cache.check_integrity().unwrap();
    }
}
