//! What is taken, what is refused, and in which order.

use pagemill_scheduler::*;

use crate::support::*;

#[test]
fn d39_a_request_that_can_never_fit_is_refused_at_once() {
    let mut house = House::new(
        SchedulerConfig { max_seq_len: 2048, ..scheduler_config() },
        KvCacheConfig { max_seq_len: 2048, ..cache_config(49, 16) },
    );
    let refusal = house.submit(request(1, prompt(1, 1000), 8)).unwrap_err();
    assert_eq!(refusal, Refusal::NeverFits { needed: 63, available: 49, block_size: 16 });
    assert!(!house.scheduler.has_work());
    // What fits exactly is taken, and runs.
    let fits = request(2, prompt(2, 49 * 16 - 8), 8);
    house.submit(fits.clone()).unwrap();
    house.run(100);
    house.assert_solo(&fits);
}

#[test]
fn limits_are_refused_by_name() {
    let mut house = House::small(100);
    assert_eq!(house.submit(request(1, vec![], 4)), Err(Refusal::EmptyPrompt));
    let many = RequestSpec { n: 9, ..request(1, vec![1], 4) };
    assert_eq!(house.submit(many), Err(Refusal::TooManyChoices { n: 9, max_batch_size: 8 }));
    let long = request(1, prompt(1, 1000), 25);
    assert_eq!(house.submit(long), Err(Refusal::TooLong { tokens: 1025, max_seq_len: 1024 }));
    let overflow = request(1, prompt(1, 10), usize::MAX);
    assert_eq!(house.submit(overflow), Err(Refusal::TooLong { tokens: usize::MAX, max_seq_len: 1024 }));
}

#[test]
fn the_queue_is_bounded_and_gauges_are_true() {
    let config = SchedulerConfig { max_batch_size: 1, max_waiting: 9, ..scheduler_config() };
    let mut house = House::new(config, cache_config(100, 4));
    house.submit(request(0, prompt(0, 5), 3)).unwrap();
    house.step();
    for id in 1..10 {
        house.submit(request(id, prompt(id as u32, 5), 3)).unwrap();
    }
    assert_eq!(house.submit(request(10, prompt(10, 5), 3)), Err(Refusal::QueueFull { limit: 9 }));
    house.step();
    let stats = house.scheduler.stats();
    assert_eq!((stats.num_running, stats.num_waiting), (1, 9));
    house.run(100);
    assert_eq!(house.finished.len(), 10);
    assert_eq!(house.scheduler.stats().peak_running, 1);
    house.assert_idle();
}

#[test]
#[should_panic(expected = "is in use")]
fn d62_an_id_in_use_is_loud() {
    let mut house = House::small(10);
    house.submit(request(1, vec![1], 4)).unwrap();
    let _ = house.submit(request(1, vec![2], 4));
}

#[test]
fn higher_priority_runs_first_and_equals_in_order_of_arrival() {
    let config = SchedulerConfig { max_batch_size: 1, ..scheduler_config() };
    let mut house = House::new(config, cache_config(100, 4));
    for (id, priority) in [(1, 0), (2, -1), (3, 5), (4, 0)] {
        house.submit(RequestSpec { priority, ..request(id, prompt(id as u32, 5), 2) }).unwrap();
    }
    let mut order = Vec::new();
    while let Some(plan) = house.schedule() {
        let id = plan.sequences[0].id.request.0;
        if order.last() != Some(&id) {
            order.push(id);
        }
        house.apply();
    }
    assert_eq!(order, [3, 1, 4, 2]);
}

#[test]
fn ageing_lets_a_low_priority_request_past_an_endless_stream() {
    let config = SchedulerConfig { max_batch_size: 1, ageing_us: 1_000, ..scheduler_config() };
    let mut house = House::new(config, cache_config(100, 4));
    house.submit(RequestSpec { priority: -3, arrival: Time(0), ..request(0, prompt(0, 5), 2) }).unwrap();
    let mut id = 1;
    while !house.finished.contains_key(&first(0)) {
        // Keep two urgent requests waiting at all times.
        while house.scheduler.stats().num_waiting < 3 {
            let urgent = RequestSpec { priority: 2, arrival: house.now, ..request(id, prompt(id as u32, 5), 2) };
            house.submit(urgent).unwrap();
            id += 1;
        }
        house.step();
        assert!(house.now <= Time(8_000), "five levels take 5,000 µs; the request still waits");
    }
    assert!(house.now > Time(3_000), "it came before requests of higher effective priority");
}

#[test]
fn a_long_prompt_is_chunked_and_never_stalls_decodes() {
    let config = SchedulerConfig { prefill_chunk_size: 16, max_batch_tokens: 20, ..scheduler_config() };
    let mut house = House::new(config, cache_config(200, 4));
    let short = request(1, prompt(1, 3), 40);
    let long = request(2, prompt(2, 100), 3);
    house.submit(short.clone()).unwrap();
    house.step();
    house.submit(long.clone()).unwrap();
    let mut chunks = Vec::new();
    while !house.finished.contains_key(&first(2)) {
        let plan = house.schedule().unwrap();
        assert_eq!(plan.sequences[0].id, first(1), "the decode goes on in every step, and first");
        for sequence in &plan.sequences[1..] {
            chunks.push(sequence.token_ids.len());
            assert_eq!(sequence.sample.is_empty(), sequence.start + sequence.token_ids.len() < 100);
        }
        house.apply();
    }
    assert_eq!(chunks, [16, 16, 16, 16, 16, 16, 4, 1, 1]);
    assert_eq!(house.scheduler.stats().mixed_steps, 7, "a prompt alone, or decodes alone, is no mixed step");
    house.run(100);
    house.assert_solo(&short);
    house.assert_solo(&long);
}

#[test]
fn a_prompt_alone_may_have_a_larger_step() {
    let config = SchedulerConfig { prefill_chunk_size: 16, mixed_batch_tokens: Some(20), ..scheduler_config() };
    let mut house = House::new(config, cache_config(200, 4));
    let requests = [(1, 100, 60), (2, 100, 3), (3, 30, 3)];
    let requests = requests.map(|(id, len, max_tokens)| request(id, prompt(id as u32, len), max_tokens));
    let lens = |plan: &StepPlan| plan.sequences.iter().map(|sequence| sequence.token_ids.len()).collect::<Vec<_>>();
    house.submit(requests[0].clone()).unwrap();
    for alone in [64, 36] {
        assert_eq!(lens(&house.schedule().unwrap()), [alone]);
        house.apply();
    }
    house.submit(requests[1].clone()).unwrap();
    house.submit(requests[2].clone()).unwrap();
    for chunks in [&[1, 16, 3][..], &[1, 16, 3], &[1, 16, 3]] {
        assert_eq!(lens(&house.schedule().unwrap()), chunks, "the first one decodes");
        house.apply();
    }
    house.run(100);
    requests.iter().for_each(|request| house.assert_solo(request));
    let together = [request(4, prompt(4, 30), 2), request(5, prompt(5, 30), 2), request(6, prompt(6, 30), 2)];
    together.iter().for_each(|request| house.submit(request.clone()).unwrap());
    assert_eq!(lens(&house.schedule().unwrap()), [30], "the first in order is longer than 20, so the others wait");
    house.apply();
    assert_eq!(lens(&house.schedule().unwrap()), [1, 16, 3], "and then they stay within 20");
    house.apply();
    house.run(100);
    let short = [request(7, prompt(7, 9), 2), request(8, prompt(8, 9), 2), request(9, prompt(9, 9), 2)];
    short.iter().for_each(|request| house.submit(request.clone()).unwrap());
    assert_eq!(lens(&house.schedule().unwrap()), [9, 9, 2], "short ones come no later than before");
    house.apply();
    house.run(100);
    short.iter().for_each(|request| house.assert_solo(request));
    together.iter().for_each(|request| house.assert_solo(request));
}

#[test]
fn prompts_share_the_step_budget() {
    let mut house = House::small(100);
    for id in 1..=3 {
        house.submit(request(id, prompt(id as u32, 30), 2)).unwrap();
    }
    let plan = house.schedule().unwrap();
    let lens: Vec<usize> = plan.sequences.iter().map(|s| s.token_ids.len()).collect();
    assert_eq!(lens, [30, 30, 4]);
    house.apply();
    house.run(20);
    house.assert_idle();
}

#[test]
fn the_same_calls_give_the_same_plans() {
    let plans = || {
        let mut house = House::small(24);
        let mut plans = Vec::new();
        for id in 0..12 {
            let shared = prompt(id as u32 % 3, 9);
            house.submit(RequestSpec { n: 1 + id as u32 % 3, ..request(id, shared, 7) }).unwrap();
        }
        while let Some(plan) = house.schedule() {
            plans.push(plan);
            house.apply();
        }
        plans
    };
    assert_eq!(plans(), plans());
}
