//! Plans made while the plan before is in flight, on tokens that it draws.

use pagemill_scheduler::*;

use crate::support::*;

fn ahead() -> SchedulerConfig {
    SchedulerConfig { plan_ahead: true, ..scheduler_config() }
}

/// Runs with the next plan always made before the output of the one before is applied.
fn run_ahead(house: &mut House, max_steps: usize) {
    for _ in 0..max_steps {
        while house.in_flight.len() < 2 && house.schedule().is_some() {}
        if house.in_flight.is_empty() {
            return;
        }
        house.steps += 1;
        house.apply();
    }
    panic!("not done after {max_steps} steps: {:?}", house.scheduler.stats());
}

fn drawn(plan: &StepPlan) -> Vec<(u64, Option<u32>)> {
    plan.sequences.iter().map(|sequence| (sequence.id.request.0, sequence.drawn_idx)).collect()
}

#[test]
fn the_next_token_is_named_by_its_place_among_the_draws() {
    let mut house = House::new(ahead(), cache_config(60, 4));
    let specs = [request(1, prompt(1, 6), 3), request(2, prompt(2, 60), 3), request(3, prompt(3, 5), 2)];
    for spec in &specs {
        house.submit(spec.clone()).unwrap();
    }
    // The budget of 64 leaves the second prompt unfinished: it draws nothing.
    assert_eq!(drawn(&house.schedule().unwrap()), [(1, None), (2, None)]);
    assert_eq!(drawn(&house.schedule().unwrap()), [(1, Some(0)), (2, None), (3, None)]);
    house.apply();
    // The third draw before was the third's first token, and the first ends with what it draws now.
    let plan = house.schedule().unwrap();
    assert_eq!(drawn(&plan), [(1, Some(0)), (2, Some(1)), (3, Some(2))]);
    assert!(plan.sequences.iter().all(|sequence| sequence.token_ids == [0]));
    house.apply();
    assert_eq!(drawn(&house.schedule().unwrap()), [(2, Some(1))], "the others' lengths are known");
    run_ahead(&mut house, 20);
    specs.iter().for_each(|spec| house.assert_solo(spec));
    house.assert_idle();
}

#[test]
fn no_step_is_wasted_where_lengths_end_sequences() {
    let mut house = House::new(ahead(), cache_config(60, 4));
    let spec = request(1, prompt(1, 6), 9);
    house.submit(spec.clone()).unwrap();
    run_ahead(&mut house, 20);
    assert_eq!(house.steps, 9);
    house.assert_solo(&spec);
    house.assert_idle();
}

#[test]
fn a_sequence_that_ends_by_surprise_keeps_its_blocks_until_the_plan_ahead_is_applied() {
    let mut house = House::new(ahead(), cache_config(8, 4));
    let stop = solo(&house.kv.config().groups.clone(), &prompt(1, 7), 3, 0)[2];
    house.submit(RequestSpec { stop_token_ids: vec![stop], ..request(1, prompt(1, 7), 20) }).unwrap();
    while house.tokens.get(&first(1)).is_none_or(|tokens| tokens.len() < 2) {
        while house.in_flight.len() < 2 && house.schedule().is_some() {}
        house.apply();
    }
    let plan = house.schedule().unwrap();
    assert_eq!((plan.sequences[0].start, plan.sequences[0].drawn_idx), (9, Some(0)));
    let events = house.apply();
    assert!(matches!(events[1], Event::Finished { reason: FinishReason::Stop(token), .. } if token == stop));
    assert_eq!((house.kv.stats().num_owned, house.scheduler.has_work()), (3, true), "a plan still writes them");
    let next = request(2, prompt(2, 30), 2);
    house.submit(next.clone()).unwrap();
    assert_eq!(house.schedule(), None);
    assert_eq!(house.apply(), [], "what it drew is nobody's");
    assert_eq!(house.tokens[&first(1)].len(), 3);
    run_ahead(&mut house, 20);
    house.assert_solo(&next);
    house.assert_idle();
}

#[test]
fn choices_are_planned_once_they_have_parted() {
    let mut house = House::new(ahead(), cache_config(60, 4));
    let spec = RequestSpec { n: 3, ..request(1, prompt(1, 6), 4) };
    house.submit(spec.clone()).unwrap();
    assert_eq!(house.schedule().unwrap().sequences[0].sample.len(), 3);
    assert_eq!(house.schedule(), None, "two of its choices hold nothing yet");
    house.apply();
    assert_eq!(drawn(&house.schedule().unwrap()), [(1, None); 3]);
    assert_eq!(drawn(&house.schedule().unwrap()), [(1, Some(0)), (1, Some(1)), (1, Some(2))]);
    run_ahead(&mut house, 20);
    house.assert_solo(&spec);
    house.assert_idle();
}

#[test]
fn the_place_of_one_that_leaves_is_free_for_the_plan_ahead() {
    let mut house = House::new(SchedulerConfig { max_batch_size: 1, ..ahead() }, cache_config(60, 4));
    let specs = [request(1, prompt(1, 6), 2), request(2, prompt(2, 6), 2)];
    for spec in &specs {
        house.submit(spec.clone()).unwrap();
    }
    house.schedule();
    assert_eq!(drawn(&house.schedule().unwrap()), [(1, Some(0))]);
    house.apply();
    assert_eq!(drawn(&house.schedule().unwrap()), [(2, None)]);
    run_ahead(&mut house, 20);
    assert_eq!(house.steps, 3, "and one before");
    specs.iter().for_each(|spec| house.assert_solo(spec));
    house.assert_idle();
}

#[test]
fn where_blocks_are_short_the_next_plan_waits_and_takes_them_from_the_last() {
    let mut house = House::new(ahead(), cache_config(7, 4));
    let specs = [request(1, prompt(1, 6), 12), request(2, prompt(2, 7), 12)];
    for spec in &specs {
        house.submit(spec.clone()).unwrap();
    }
    let (mut passed_over, mut num_waits) = (false, 0);
    while house.scheduler.has_work() {
        if passed_over {
            assert_eq!((house.in_flight.len(), house.schedule()), (1, None));
            (passed_over, num_waits) = (false, num_waits + 1);
        }
        while house.in_flight.len() < 2 && !passed_over {
            let runs_ahead = !house.in_flight.is_empty();
            let Some(plan) = house.schedule() else { break };
            let goes_on = house.tokens.get(&first(1)).is_none_or(|tokens| tokens.len() < 10);
            passed_over = goes_on && plan.sequences[0].id != first(1);
            assert!(runs_ahead || !passed_over, "it takes the last one's blocks");
        }
        house.apply();
    }
    assert!(house.scheduler.stats().preemptions > 0 && num_waits > 0);
    specs.iter().for_each(|spec| house.assert_solo(spec));
    house.assert_idle();
}
