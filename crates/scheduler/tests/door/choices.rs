//! `n` choices of one prompt: shared blocks, copy on write, room in the batch.

use pagemill_scheduler::*;

use crate::support::*;

#[test]
fn choices_share_the_prompt_and_part_on_write() {
    let mut house = House::small(60);
    let spec = RequestSpec { n: 3, ..request(1, prompt(1, 10), 6) };
    house.submit(spec.clone()).unwrap();
    let plan = house.schedule().unwrap();
    assert_eq!(plan.sequences.len(), 1, "the prompt is computed once");
    assert_eq!(plan.sequences[0].sample, [choice(1, 0), choice(1, 1), choice(1, 2)]);
    house.apply();
    assert_eq!(house.kv.stats().num_owned, 3, "all share the prompt's three blocks");
    let plan = house.schedule().unwrap();
    assert_eq!(plan.sequences.len(), 3);
    // Two copy the partial block, the last one writes in place.
    assert_eq!(plan.block_copies.len(), 2);
    assert_eq!(house.kv.stats().num_owned, 5);
    house.apply();
    house.run(20);
    house.assert_solo(&spec);
    assert_eq!(house.kv.stats().copies_on_write, 2);
    house.assert_idle();
}

#[test]
fn every_cache_group_copies() {
    let groups = vec![CacheGroup::Full, CacheGroup::SlidingWindow { window: 5 }];
    let mut house = House::new(scheduler_config(), KvCacheConfig { groups, ..cache_config(60, 4) });
    let spec = RequestSpec { n: 2, ..request(1, prompt(1, 10), 9) };
    house.submit(spec.clone()).unwrap();
    house.step();
    assert_eq!(house.schedule().unwrap().block_copies.len(), 2);
    house.apply();
    house.run(20);
    house.assert_solo(&spec);
    house.assert_idle();
}

#[test]
fn a_prompt_that_ends_with_its_block_needs_no_copy() {
    let mut house = House::small(60);
    let spec = RequestSpec { n: 4, ..request(1, prompt(1, 8), 6) };
    house.submit(spec.clone()).unwrap();
    house.run(20);
    house.assert_solo(&spec);
    assert_eq!(house.kv.stats().copies_on_write, 0);
}

#[test]
fn choices_that_find_no_room_wait_and_recompute() {
    let config = SchedulerConfig { max_batch_size: 4, ..scheduler_config() };
    let mut house = House::new(config, cache_config(60, 4));
    let running = request(1, prompt(1, 5), 20);
    let spec = RequestSpec { n: 4, ..request(2, prompt(2, 10), 6) };
    house.submit(running.clone()).unwrap();
    house.submit(spec.clone()).unwrap();
    house.step();
    let stats = house.scheduler.stats();
    assert_eq!((stats.num_running, stats.num_waiting), (4, 1));
    house.run(60);
    house.assert_solo(&running);
    house.assert_solo(&spec);
    let cached: Vec<_> = (0..4).map(|c| house.finished[&choice(2, c)].1).collect();
    assert_eq!(cached, [0; 4], "the first prefill found nothing");
    house.assert_idle();
}

#[test]
fn many_choices_in_a_tiny_pool_all_finish() {
    let mut house = House::small(9);
    let spec = RequestSpec { n: 8, ..request(1, prompt(1, 10), 20) };
    house.submit(spec.clone()).unwrap();
    house.run(500);
    house.assert_solo(&spec);
    assert!(house.scheduler.stats().preemptions > 0);
    house.assert_idle();
}

#[test]
fn choices_that_end_with_their_first_token() {
    let mut house = House::small(60);
    let spec = RequestSpec { n: 3, ..request(1, prompt(1, 10), 1) };
    house.submit(spec.clone()).unwrap();
    house.run(3);
    house.assert_solo(&spec);
    house.assert_idle();
    // One of three stops at once, the parent among the others and then alone.
    for (id, stopping) in [(2, 0), (3, 1)] {
        let base = request(id, prompt(id as u32, 10), 5);
        let token = solo(&[CacheGroup::Full], &base.prompt, 1, stopping)[0];
        house.submit(RequestSpec { n: 3, stop_token_ids: vec![token], ..base }).unwrap();
        house.run(20);
        for c in 0..3 {
            let expected = if c == stopping { FinishReason::Stop(token) } else { FinishReason::Length };
            assert_eq!(house.finished[&choice(id, c)].0, expected);
        }
        house.assert_idle();
    }
}

#[test]
fn one_choice_may_end_alone() {
    let mut house = House::small(60);
    let spec = RequestSpec { n: 3, ..request(1, prompt(1, 10), 8) };
    house.submit(spec.clone()).unwrap();
    house.step();
    house.step();
    house.scheduler.finish_sequence(choice(1, 1), &mut house.kv);
    house.kv.check_integrity().unwrap();
    house.run(20);
    assert_eq!(house.tokens[&choice(1, 1)].len(), 2);
    assert!(!house.finished.contains_key(&choice(1, 1)), "no event for what the caller ended");
    for c in [0, 2] {
        assert_eq!(house.tokens[&choice(1, c)], solo(&[CacheGroup::Full], &spec.prompt, 8, c));
    }
    house.assert_idle();
}
