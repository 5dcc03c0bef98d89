//! Several plans in flight.

use pagemill_scheduler::*;

use crate::support::*;

/// Runs with up to `depth` plans in flight; aborts what `abort` names after so many steps.
fn run_pipelined(house: &mut House, depth: usize, abort: &[(usize, u64)]) {
    for step in 0..2_000 {
        for (_, id) in abort.iter().filter(|(at, _)| *at == step) {
            house.scheduler.abort(RequestId(*id), &mut house.kv);
            house.kv.check_integrity().unwrap();
        }
        while house.in_flight.len() < depth && house.schedule().is_some() {}
        if house.in_flight.is_empty() {
            break;
        }
        house.apply();
    }
    assert!(house.in_flight.is_empty() && !house.scheduler.has_work());
}

#[test]
fn chunks_of_one_prompt_may_be_in_flight_together_and_decodes_not() {
    let config = SchedulerConfig { prefill_chunk_size: 8, ..scheduler_config() };
    let mut house = House::new(config, cache_config(60, 4));
    let spec = request(1, prompt(1, 20), 3);
    house.submit(spec.clone()).unwrap();
    let starts: Vec<usize> = std::iter::from_fn(|| house.schedule()).map(|plan| plan.sequences[0].start).collect();
    assert_eq!(starts, [0, 8, 16], "the next token is not known before the last chunk is applied");
    for _ in 0..3 {
        house.apply();
    }
    run_pipelined(&mut house, 2, &[]);
    house.assert_solo(&spec);
    house.assert_idle();
}

#[test]
fn three_plans_in_flight_with_pressure_windows_choices_and_aborts() {
    for groups in [
        vec![CacheGroup::Full],
        vec![CacheGroup::SlidingWindow { window: 7 }],
        vec![CacheGroup::Full, CacheGroup::SlidingWindow { window: 9 }],
    ] {
        let config = SchedulerConfig { prefill_chunk_size: 8, max_batch_tokens: 12, ..scheduler_config() };
        let cache = KvCacheConfig { groups, prefill_chunk_size: 8, ..cache_config(20, 4) };
        let mut house = House::new(config, cache);
        let specs: Vec<_> = (0..12u64)
            .map(|id| {
                let tokens = [prompt(id as u32 % 2, 12), prompt(50 + id as u32, id as usize)].concat();
                RequestSpec { n: 1 + id as u32 % 3, ..request(id, tokens, 10 + id as usize) }
            })
            .collect();
        for spec in &specs {
            house.submit(spec.clone()).unwrap();
        }
        run_pipelined(&mut house, 3, &[(1, 0), (7, 4), (20, 8)]);
        for spec in specs.iter().filter(|spec| ![0, 4, 8].contains(&spec.id.0)) {
            house.assert_solo(spec);
        }
        assert!(house.scheduler.stats().preemptions > 0);
        house.assert_idle();
    }
}

#[test]
fn blocks_of_an_aborted_sequence_stay_until_its_step_is_applied() {
    let mut house = House::small(10);
    house.submit(request(1, prompt(1, 30), 4)).unwrap();
    house.schedule();
    house.scheduler.abort(RequestId(1), &mut house.kv);
    let next = request(2, prompt(2, 30), 4);
    house.submit(next.clone()).unwrap();
    assert_eq!(house.schedule(), None, "the pool is still being written");
    assert!(house.scheduler.has_work());
    house.apply();
    house.run(20);
    house.assert_solo(&next);
}
