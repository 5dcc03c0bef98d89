//! What the prefix cache finds, and what it must not.

use pagemill_scheduler::*;

use crate::support::*;

fn run_alone(house: &mut House, spec: &RequestSpec) -> usize {
    house.submit(spec.clone()).unwrap();
    house.run(300);
    house.assert_solo(spec);
    house.finished[&first(spec.id.0)].1
}

#[test]
fn d42_prompts_that_are_prefixes_of_cached_ones() {
    let mut house = House::new(scheduler_config(), cache_config(100, 16));
    let long = prompt(7, 101);
    let mut cached = Vec::new();
    for (id, len) in [100, 50, 17, 16, 15, 1, 100, 101].into_iter().enumerate() {
        cached.push(run_alone(&mut house, &request(id as u64, long[..len].to_vec(), 5)));
    }
    // Whole blocks only, and never the whole prompt.
    assert_eq!(cached, [0, 48, 16, 0, 0, 0, 96, 96]);
    house.assert_idle();
}

#[test]
fn d43_a_prefix_of_exactly_one_block_beside_cold_requests() {
    let mut house = House::small(60);
    let shared = prompt(1, 4);
    run_alone(&mut house, &request(0, [shared.clone(), prompt(2, 3)].concat(), 4));
    for round in 1..10u64 {
        let specs: Vec<_> = (0..3)
            .map(|i| {
                let head = if i == 1 { shared.clone() } else { prompt(100 + round as u32 * 8 + i, 4) };
                let tail = prompt(1_000 + round as u32 * 8 + i, 5);
                request(round * 10 + u64::from(i), [head, tail].concat(), 6)
            })
            .collect();
        for spec in &specs {
            house.submit(spec.clone()).unwrap();
        }
        house.run(100);
        for spec in &specs {
            house.assert_solo(spec);
        }
        assert_eq!(house.finished[&first(round * 10 + 1)].1, 4);
        assert_eq!(house.finished[&first(round * 10)].1, 0);
    }
}

#[test]
fn d44_cached_conversations_never_leak_into_fresh_ones() {
    let config = SchedulerConfig { max_batch_size: 2, ..scheduler_config() };
    let mut house = House::new(config, cache_config(24, 4));
    for id in 0..20 {
        run_alone(&mut house, &request(id, prompt(id as u32, 13), 6));
    }
    for round in 0..20 {
        let specs = [100 + 2 * round, 101 + 2 * round].map(|id| request(id, prompt(id as u32, 13), 6));
        for spec in &specs {
            house.submit(spec.clone()).unwrap();
        }
        house.run(100);
        for spec in &specs {
            house.assert_solo(spec);
            assert_eq!(house.finished[&first(spec.id.0)].1, 0, "nothing of a fresh prompt is cached");
        }
    }
    assert!(house.kv.stats().evictions > 0);
}

#[test]
fn d45_prompt_logprobs_do_not_read_the_cache_but_fill_it() {
    let mut house = House::small(60);
    for id in 0..2 {
        let spec = RequestSpec { prompt_logprobs: true, ..request(id, prompt(1, 20), 1) };
        assert_eq!(run_alone(&mut house, &spec), 0);
        assert_eq!(house.logprob_positions[&first(id)], (1..20).collect::<Vec<_>>());
    }
    assert_eq!(run_alone(&mut house, &request(2, prompt(1, 20), 1)), 16);
}

#[test]
fn the_plan_flags_every_chunk_with_prompt_logprobs() {
    let config = SchedulerConfig { prefill_chunk_size: 8, ..scheduler_config() };
    let mut house = House::new(config, cache_config(60, 4));
    house.submit(RequestSpec { prompt_logprobs: true, ..request(1, prompt(1, 20), 3) }).unwrap();
    let mut flags = Vec::new();
    while let Some(plan) = house.schedule() {
        flags.push(plan.sequences[0].prompt_logprobs);
        house.apply();
    }
    assert_eq!(flags, [true, true, true, false, false]);
}

#[test]
fn salts_share_nothing() {
    let mut house = House::small(60);
    let salted = |id, salt: Option<&str>| RequestSpec {
        cache_salt: salt.map(|salt| salt.as_bytes().to_vec()),
        ..request(id, prompt(1, 20), 2)
    };
    assert_eq!(run_alone(&mut house, &salted(1, Some("a"))), 0);
    assert_eq!(run_alone(&mut house, &salted(2, Some("b"))), 0);
    assert_eq!(run_alone(&mut house, &salted(3, None)), 0);
    assert_eq!(run_alone(&mut house, &salted(4, Some(""))), 0);
    assert_eq!(run_alone(&mut house, &salted(5, Some("a"))), 16);
    assert_eq!(run_alone(&mut house, &salted(6, None)), 16);
}

#[test]
fn a_conversation_finds_its_own_answer() {
    let mut house = House::small(60);
    let start = request(1, prompt(1, 10), 11);
    run_alone(&mut house, &start);
    let next = [start.prompt, house.tokens[&first(1)].clone(), prompt(2, 5)].concat();
    // Of 21 tokens the last was never computed: 20 tokens are 5 blocks.
    assert_eq!(run_alone(&mut house, &request(2, next, 4)), 20);
}

#[test]
fn blocks_are_findable_only_once_computed() {
    let mut house = House::small(60);
    let specs = [request(1, prompt(1, 20), 3), request(2, prompt(1, 20), 3)];
    for spec in &specs {
        house.submit(spec.clone()).unwrap();
    }
    // Both are scheduled in one step: neither may read what the other has yet to compute.
    let plan = house.schedule().unwrap();
    assert_eq!(plan.sequences.iter().map(|s| s.start).collect::<Vec<_>>(), [0, 0]);
    house.apply();
    house.run(20);
    for spec in &specs {
        house.assert_solo(spec);
    }
    // The duplicate blocks of the second were never named: one copy is cached.
    assert_eq!(house.kv.stats().num_cached, 5);
    house.assert_idle();
}

#[test]
fn a_running_sequence_shares_its_blocks() {
    let mut house = House::small(60);
    let specs = [request(1, prompt(1, 20), 30), request(2, prompt(1, 20), 3)];
    house.submit(specs[0].clone()).unwrap();
    house.step();
    let owned = house.kv.stats().num_owned;
    house.submit(specs[1].clone()).unwrap();
    house.step();
    assert!(house.kv.stats().num_owned <= owned + 3);
    house.run(100);
    for spec in &specs {
        house.assert_solo(spec);
    }
    assert_eq!(house.finished[&first(2)].1, 16);
}

#[test]
fn the_tail_of_a_chain_is_evicted_before_its_head() {
    let mut house = House::small(12);
    run_alone(&mut house, &request(1, prompt(1, 33), 1));
    assert_eq!(house.kv.stats().num_cached, 8);
    // Takes 8 blocks: 4 free ones and the last 4 of the first request's chain.
    run_alone(&mut house, &request(2, prompt(2, 31), 1));
    assert_eq!(run_alone(&mut house, &request(3, prompt(1, 33), 1)), 16);
}

#[test]
fn switched_off_it_finds_nothing() {
    let mut house = House::new(scheduler_config(), KvCacheConfig { prefix_cache: false, ..cache_config(60, 4) });
    for id in 0..2 {
        assert_eq!(run_alone(&mut house, &request(id, prompt(1, 20), 2)), 0);
    }
    assert_eq!(house.kv.stats().num_free, 60);
}

fn mixed(window: usize) -> KvCacheConfig {
    let groups = vec![CacheGroup::Full, CacheGroup::SlidingWindow { window }];
    KvCacheConfig { groups, ..cache_config(120, 4) }
}

#[test]
fn mixed_groups_hit_where_every_group_can_go_on() {
    let mut house = House::new(scheduler_config(), mixed(6));
    let long = prompt(1, 40);
    run_alone(&mut house, &request(1, long.clone(), 4));
    for (id, len) in [(2, 40), (3, 21), (4, 9), (5, 5), (6, 4)] {
        let cached = run_alone(&mut house, &request(id, long[..len].to_vec(), 4));
        assert_eq!(cached, (len - 1) / 4 * 4);
    }
}

#[test]
fn mixed_groups_fall_back_to_where_the_window_is_still_cached() {
    // The window's blocks go back to the pool first, so pressure evicts them first.
    let mut house = House::new(scheduler_config(), KvCacheConfig { num_blocks: 30, ..mixed(6) });
    let long = prompt(1, 41);
    run_alone(&mut house, &request(1, long.clone(), 1));
    let mut cached = Vec::new();
    for id in 2..8 {
        run_alone(&mut house, &request(id, prompt(id as u32, 13), 1));
        cached.push(run_alone(&mut house, &request(100 + id, long[..40].to_vec(), 1)));
    }
    assert!(cached.iter().all(|cached| cached % 4 == 0 && *cached < 40));
    house.assert_idle();
}
