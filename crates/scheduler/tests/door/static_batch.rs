//! The classic static batch.

use pagemill_scheduler::*;

use crate::support::*;

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_batch_size: 4,
        max_batch_tokens: 400,
        continuous_batching: false,
        static_batch_wait_us: 5_000,
        ..scheduler_config()
    }
}

fn house() -> House {
    House::new(config(), KvCacheConfig { prefix_cache: false, ..cache_config(200, 4) })
}

fn ids(plan: &StepPlan) -> Vec<u64> {
    plan.sequences.iter().map(|s| s.id.request.0).collect()
}

#[test]
fn waits_for_a_full_batch_or_for_the_limit() {
    let mut house = house();
    for id in 1..=3 {
        house.submit(request(id, prompt(id as u32, 5), 2)).unwrap();
    }
    assert_eq!(house.schedule(), None);
    assert_eq!(house.scheduler.next_wakeup(), Some(Time(5_001)));
    house.submit(request(4, prompt(4, 5), 2)).unwrap();
    assert_eq!(ids(&house.schedule().unwrap()), [1, 2, 3, 4]);
    house.apply();
    house.run(10);
    house.submit(request(5, prompt(5, 5), 2)).unwrap();
    house.now = Time(5_100);
    assert_eq!(ids(&house.schedule().unwrap()), [5]);
    house.apply();
    house.run(10);
    house.assert_idle();
}

#[test]
fn pads_to_the_longest_and_runs_until_the_longest_ends() {
    let mut house = house();
    let specs: Vec<_> = [(1, 3, 2), (2, 10, 6), (3, 7, 4), (4, 10, 1)]
        .map(|(id, len, max_tokens)| request(id, prompt(id as u32, len), max_tokens))
        .into();
    for spec in &specs {
        house.submit(spec.clone()).unwrap();
    }
    let plan = house.schedule().unwrap();
    let padding: Vec<_> = plan.sequences.iter().map(|s| (s.id.request.0, s.num_padding)).collect();
    assert_eq!(padding, [(1, 7), (2, 0), (3, 3), (4, 0)]);
    house.apply();
    house.submit(request(5, prompt(5, 5), 2)).unwrap();
    house.now.0 += 100_000;
    let mut padding = Vec::new();
    while !house.finished.contains_key(&first(2)) {
        let plan = house.schedule().unwrap();
        assert!(!ids(&plan).contains(&5), "nobody joins a running batch");
        assert_eq!(plan.num_tokens() + plan.sequences.iter().map(|s| s.num_padding).sum::<usize>(), 4);
        padding.push(4 - plan.num_tokens());
        house.apply();
    }
    assert_eq!(padding, [1, 2, 2, 3, 3]);
    assert_eq!(house.scheduler.stats().padding_tokens, 10 + 11);
    for spec in &specs {
        house.assert_solo(spec);
    }
    house.run(10);
    assert!(house.finished.contains_key(&first(5)));
    house.assert_idle();
}

#[test]
fn long_prompts_keep_to_the_budget_in_columns() {
    let limits = SchedulerConfig { max_batch_tokens: 40, ..config() };
    let mut house = House::new(limits, KvCacheConfig { prefix_cache: false, ..cache_config(200, 4) });
    let specs: Vec<_> =
        [(1, 3), (2, 35), (3, 12), (4, 35)].map(|(id, len)| request(id, prompt(id as u32, len), 3)).into();
    for spec in &specs {
        house.submit(spec.clone()).unwrap();
    }
    let mut sampled_at = Vec::new();
    while let Some(plan) = house.schedule() {
        sampled_at.push(plan.sequences.iter().filter(|s| !s.sample.is_empty()).count());
        house.apply();
    }
    // Prompts are aligned on the right, so that all answers begin together.
    assert_eq!(sampled_at, [0, 0, 0, 4, 4, 4]);
    assert_eq!(house.scheduler.stats().padding_tokens, 4 * 35 - (3 + 35 + 12 + 35));
    for spec in &specs {
        house.assert_solo(spec);
    }
}

#[test]
fn groups_requests_of_similar_length_around_the_first() {
    let mut house = house();
    for (id, len) in [(1, 20), (2, 60), (3, 5), (4, 21), (5, 50), (6, 22), (7, 6), (8, 19)] {
        house.submit(request(id, prompt(id as u32, len), 2)).unwrap();
    }
    let mut batches = Vec::new();
    while house.scheduler.has_work() {
        let Some(plan) = house.schedule() else {
            house.now.0 += 5_000;
            continue;
        };
        if plan.sequences[0].start == 0 {
            batches.push(ids(&plan));
        }
        house.apply();
    }
    assert_eq!(batches[0], [1, 4, 6, 8]);
    assert_eq!(batches[1], [2, 3, 5, 7]);
    house.assert_idle();
}

#[test]
fn reserves_so_that_nobody_is_preempted() {
    let mut house = House::new(config(), cache_config(12, 4));
    let specs: Vec<_> = (1..=4).map(|id| request(id, prompt(id as u32, 6), 14)).collect();
    for spec in &specs {
        house.submit(spec.clone()).unwrap();
    }
    assert_eq!(house.schedule().unwrap().sequences.len(), 2, "12 blocks hold two sequences of 5");
    house.apply();
    house.run(200);
    for spec in &specs {
        house.assert_solo(spec);
    }
    assert_eq!(house.scheduler.stats().preemptions, 0);
    house.assert_idle();
}

#[test]
fn choices_take_slots_and_those_without_one_join_a_later_batch() {
    for layout in [KvLayout::Paged, KvLayout::Contiguous] {
        let mut house = House::new(config(), KvCacheConfig { layout, max_seq_len: 64, ..cache_config(64, 4) });
        let specs =
            [RequestSpec { n: 3, ..request(1, prompt(1, 6), 5) }, RequestSpec { n: 3, ..request(2, prompt(2, 9), 7) }];
        for spec in &specs {
            house.submit(spec.clone()).unwrap();
        }
        house.run(300);
        for spec in &specs {
            house.assert_solo(spec);
        }
        house.assert_idle();
    }
}

#[test]
fn an_aborted_member_leaves_padding() {
    let mut house = house();
    for id in 1..=4 {
        house.submit(request(id, prompt(id as u32, 5), 4)).unwrap();
    }
    house.step();
    house.scheduler.abort(RequestId(2), &mut house.kv);
    let plan = house.schedule().unwrap();
    assert_eq!(ids(&plan), [1, 3, 4]);
    assert_eq!(plan.sequences[0].num_padding, 1);
    house.apply();
    house.run(10);
    house.assert_idle();
}
