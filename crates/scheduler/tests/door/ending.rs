//! How sequences end, and that nothing is left of them.

use pagemill_scheduler::*;

use crate::support::*;

#[test]
fn d40_abort_between_any_two_chunks_leaks_nothing() {
    let config = SchedulerConfig { max_seq_len: 2048, ..scheduler_config() };
    let mut house = House::new(config, KvCacheConfig { max_seq_len: 2048, ..cache_config(600, 4) });
    for k in 0..34 {
        house.submit(request(k, prompt(k as u32, 2_000), 4)).unwrap();
        for _ in 0..k {
            house.step();
        }
        // Once between steps, once with a step in flight.
        if k % 2 == 1 {
            house.schedule();
            house.scheduler.abort(RequestId(k), &mut house.kv);
            house.kv.check_integrity().unwrap();
            if !house.in_flight.is_empty() {
                assert!(house.kv.stats().num_owned > 0, "a step in flight still writes them");
                assert_eq!(house.apply(), []);
            }
        } else {
            house.scheduler.abort(RequestId(k), &mut house.kv);
        }
        house.assert_idle();
    }
}

#[test]
fn abort_of_a_waiting_an_unknown_and_an_ended_request() {
    let config = SchedulerConfig { max_batch_size: 1, ..scheduler_config() };
    let mut house = House::new(config, cache_config(60, 4));
    for id in 1..=2 {
        house.submit(request(id, prompt(id as u32, 5), 3)).unwrap();
    }
    house.step();
    house.scheduler.abort(RequestId(2), &mut house.kv);
    house.scheduler.abort(RequestId(99), &mut house.kv);
    house.run(20);
    house.scheduler.abort(RequestId(1), &mut house.kv);
    house.scheduler.finish_sequence(first(1), &mut house.kv);
    assert_eq!(house.finished.len(), 1);
    house.assert_idle();
}

#[test]
fn tokens_of_an_aborted_request_in_flight_are_ignored() {
    let mut house = House::small(60);
    let other = request(2, prompt(2, 10), 5);
    house.submit(RequestSpec { n: 3, ..request(1, prompt(1, 10), 5) }).unwrap();
    house.submit(other.clone()).unwrap();
    house.schedule();
    house.scheduler.abort(RequestId(1), &mut house.kv);
    let events = house.apply();
    assert!(events.iter().all(|event| matches!(event, Event::Token { id, .. } if *id == first(2))));
    house.run(20);
    house.assert_solo(&other);
    house.assert_idle();
}

#[test]
fn finishing_before_the_first_token_ends_all_choices() {
    let mut house = House::small(60);
    house.submit(RequestSpec { n: 3, ..request(1, prompt(1, 10), 5) }).unwrap();
    house.scheduler.finish_sequence(first(1), &mut house.kv);
    house.assert_idle();
}

#[test]
fn stop_tokens_end_a_sequence_but_not_before_min_tokens() {
    let base = request(1, prompt(1, 10), 20);
    let alone = solo(&[CacheGroup::Full], &base.prompt, 20, 0);
    for (id, min_tokens, reason, len) in [
        (1, 0, FinishReason::Stop(alone[4]), 5),
        (2, 5, FinishReason::Stop(alone[4]), 5),
        (3, 6, FinishReason::Length, 20),
    ] {
        let mut house = House::small(60);
        let spec = RequestSpec { id: RequestId(id), min_tokens, stop_token_ids: vec![alone[4]], ..base.clone() };
        house.submit(spec).unwrap();
        house.run(30);
        assert_eq!(house.finished[&first(id)].0, reason);
        assert_eq!(house.tokens[&first(id)], alone[..len], "the stop token is part of the sequence");
        house.assert_idle();
    }
}

#[test]
fn d18_no_tokens_wanted() {
    let mut house = House::small(60);
    house.submit(RequestSpec { prompt_logprobs: true, n: 2, ..request(1, prompt(1, 70), 0) }).unwrap();
    house.run(5);
    assert_eq!(house.steps, 2);
    assert!(house.tokens.is_empty());
    assert_eq!(house.finished[&choice(1, 0)].0, FinishReason::Length);
    assert_eq!(house.finished[&choice(1, 1)].0, FinishReason::Length);
    assert_eq!(house.logprob_positions[&first(1)], (1..70).collect::<Vec<_>>());
    house.assert_idle();
}

#[test]
fn a_full_context_ends_with_length() {
    let config = SchedulerConfig { max_seq_len: 12, ..scheduler_config() };
    let mut house = House::new(config, cache_config(60, 4));
    let spec = request(1, prompt(1, 8), 4);
    house.submit(spec.clone()).unwrap();
    house.run(10);
    house.assert_solo(&spec);
}

#[test]
fn a_failure_ends_its_sequence_alone() {
    let mut house = House::small(60);
    let other = request(2, prompt(2, 10), 5);
    house.submit(RequestSpec { n: 2, ..request(1, prompt(1, 10), 5) }).unwrap();
    house.submit(other.clone()).unwrap();
    house.step();
    let plan = house.schedule().unwrap();
    house.in_flight.clear();
    let mut output = house.memory.run(&plan);
    output.sampled[1].token = Err("NaN logits".into());
    house.apply_output(output);
    assert_eq!(house.finished[&choice(1, 1)].0, FinishReason::Failed("NaN logits".into()));
    house.run(20);
    assert_eq!(house.finished[&choice(1, 0)].0, FinishReason::Length);
    house.assert_solo(&other);
    house.assert_idle();
}

#[test]
#[should_panic(expected = "oldest step in flight")]
fn output_of_another_step_is_loud() {
    let mut house = House::small(60);
    house.submit(request(1, prompt(1, 10), 5)).unwrap();
    house.schedule();
    house.apply_output(StepOutput { step: 7, ..StepOutput::default() });
}

#[test]
#[should_panic(expected = "asked for 1 samples")]
fn a_token_for_somebody_else_is_loud() {
    let mut house = House::small(60);
    house.submit(request(1, prompt(1, 10), 5)).unwrap();
    let plan = house.schedule().unwrap();
    let mut output = house.memory.run(&plan);
    output.sampled[0].id = first(2);
    house.apply_output(output);
}

#[test]
fn counters_count() {
    let mut house = House::small(60);
    house.submit(RequestSpec { n: 2, ..request(1, prompt(1, 10), 5) }).unwrap();
    house.run(20);
    let stats = house.scheduler.stats();
    assert_eq!((stats.prompt_tokens, stats.generated_tokens, stats.padding_tokens), (10, 10, 0));
    assert_eq!(stats.peak_running, 2);
}
