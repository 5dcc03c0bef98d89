//! Shares of a pipeline's micro-batches, and requests that only fill its bubbles.

use pagemill_scheduler::*;

use crate::support::*;

fn pipeline(micro_batches: usize, num_stages: usize) -> SchedulerConfig {
    SchedulerConfig { max_batch_size: 16, max_batch_tokens: 256, micro_batches, num_stages, ..scheduler_config() }
}

fn offline(id: u64, prompt: Vec<u32>, max_tokens: usize) -> RequestSpec {
    RequestSpec { priority: -1, ..request(id, prompt, max_tokens) }
}

/// Sizes of the plans that fit in flight.
fn fill(house: &mut House, depth: usize) -> Vec<usize> {
    let mut sizes = Vec::new();
    while house.in_flight.len() < depth {
        let Some(plan) = house.schedule() else { break };
        sizes.push(plan.sequences.len());
    }
    sizes
}

fn drain(house: &mut House) {
    while !house.in_flight.is_empty() {
        house.apply();
    }
}

fn requests_of(plan: &StepPlan) -> Vec<u64> {
    plan.sequences.iter().map(|sequence| sequence.id.request.0).collect()
}

#[test]
fn decodes_are_shared_out_evenly_and_stay_so() {
    let mut house = House::new(pipeline(4, 4), cache_config(200, 4));
    let specs: Vec<_> = (0..10u64).map(|id| request(id, prompt(id as u32, 3), 12)).collect();
    for spec in &specs {
        house.submit(spec.clone()).unwrap();
    }
    assert_eq!(fill(&mut house, 4), [10], "30 prompt tokens are not worth cutting");
    drain(&mut house);
    assert_eq!(fill(&mut house, 4), [3, 3, 3, 1]);
    for _ in 0..8 {
        house.apply();
        let sizes = fill(&mut house, 4);
        assert!(sizes.len() == 1 && sizes[0] <= 3, "{sizes:?}");
        let in_flight: usize = house.in_flight.iter().map(|plan| plan.sequences.len()).sum();
        assert_eq!(in_flight, 10, "everybody is in flight");
    }
    run_down(&mut house, 4);
    specs.iter().for_each(|spec| house.assert_solo(spec));
    house.assert_idle();
}

fn run_down(house: &mut House, depth: usize) {
    for _ in 0..2_000 {
        fill(house, depth);
        if house.in_flight.is_empty() {
            break;
        }
        house.apply();
    }
    assert!(!house.scheduler.has_work());
}

#[test]
fn prompts_are_cut_for_all_micro_batches() {
    let config = SchedulerConfig { prefill_chunk_size: 256, max_batch_tokens: 300, ..pipeline(4, 2) };
    let mut house = House::new(config, KvCacheConfig { prefill_chunk_size: 256, ..cache_config(400, 4) });
    let spec = request(1, prompt(1, 600), 2);
    house.submit(spec.clone()).unwrap();
    let tokens: Vec<usize> = std::iter::from_fn(|| house.schedule()).map(|plan| plan.num_tokens()).collect();
    assert_eq!(tokens, [150, 113, 85, 64, 64, 64, 60]);
    drain(&mut house);
    run_down(&mut house, 4);
    house.assert_solo(&spec);
    house.assert_idle();
}

#[test]
fn a_long_prompt_takes_no_decodes_place() {
    let mut house = House::new(pipeline(4, 2), cache_config(400, 4));
    for id in 0..3u64 {
        house.submit(request(id, prompt(id as u32, 3), 20)).unwrap();
    }
    fill(&mut house, 4);
    drain(&mut house);
    house.submit(RequestSpec { priority: 1, ..request(9, prompt(9, 500), 2) }).unwrap();
    let plans: Vec<Vec<u64>> = (0..3).map(|_| requests_of(&house.schedule().unwrap())).collect();
    assert_eq!(plans, [[0, 9], [1, 9], [2, 9]]);
    drain(&mut house);
    run_down(&mut house, 4);
    house.assert_idle();
}

#[test]
fn fillers_run_only_where_a_stage_would_idle() {
    let mut house = House::new(pipeline(4, 2), cache_config(400, 4));
    house.submit(request(1, prompt(1, 4), 30)).unwrap();
    fill(&mut house, 4);
    drain(&mut house);
    let fillers: Vec<_> = (10..14u64).map(|id| offline(id, prompt(id as u32, 40), 3)).collect();
    for spec in &fillers {
        house.submit(spec.clone()).unwrap();
    }
    // One decode keeps one of two stages busy: the other is filled with as little as a decode costs.
    let first = house.schedule().unwrap();
    assert_eq!(requests_of(&first), [1]);
    let filling = house.schedule().unwrap();
    assert!(requests_of(&filling).iter().all(|id| *id >= 10) && filling.num_tokens() <= 4, "{filling:?}");
    assert_eq!(house.schedule(), None, "no stage would idle");
    for _ in 0..6 {
        house.apply();
        fill(&mut house, 4);
        let steps: Vec<_> = house.in_flight.iter().map(requests_of).collect();
        assert!(steps.len() == 2 && steps.iter().any(|ids| ids == &[1]), "{steps:?}");
    }
    // Two decodes keep both stages busy.
    house.submit(request(2, prompt(2, 4), 30)).unwrap();
    drain(&mut house);
    fill(&mut house, 4);
    drain(&mut house);
    assert_eq!(fill(&mut house, 4), [1, 1]);
    assert!(house.in_flight.iter().all(|plan| requests_of(plan).iter().all(|id| *id < 10)));
    run_down(&mut house, 4);
    fillers.iter().for_each(|spec| house.assert_solo(spec));
    assert!(house.scheduler.stats().filler_tokens > 0);
    house.assert_idle();
}

#[test]
fn fillers_that_slow_the_others_down_wait() {
    for (us_beside, range) in [(100_000, 0.7..1.0), (120_000, 0.0..0.2)] {
        let mut house = House::new(pipeline(4, 2), cache_config(400, 4));
        house.submit(request(1, prompt(1, 4), 400)).unwrap();
        fill(&mut house, 4);
        drain(&mut house);
        for id in 10..14u64 {
            house.submit(offline(id, prompt(id as u32, 4), 300)).unwrap();
        }
        let (mut num_decodes, mut num_filled) = (0, 0);
        while num_decodes < 300 {
            fill(&mut house, 4);
            let is_decode = requests_of(&house.in_flight[0]) == [1];
            let is_filled = house.in_flight.len() == 2;
            if is_decode {
                num_decodes += 1;
                num_filled += i32::from(is_filled);
                house.now = Time(house.now.0 + if is_filled { us_beside } else { 100_000 });
            }
            house.apply();
        }
        let share = f64::from(num_filled) / f64::from(num_decodes);
        assert!(range.contains(&share), "{us_beside}: {share}");
    }
}

#[test]
fn fillers_alone_have_the_pipeline_to_themselves() {
    let mut house = House::new(pipeline(2, 2), cache_config(400, 4));
    let specs: Vec<_> = (1..5u64).map(|id| offline(id, prompt(id as u32, 30), 5)).collect();
    for spec in &specs {
        house.submit(spec.clone()).unwrap();
    }
    assert_eq!(fill(&mut house, 2), [3, 2], "64 tokens each, a prompt begun in the first");
    run_down(&mut house, 2);
    specs.iter().for_each(|spec| house.assert_solo(spec));
    assert_eq!(house.scheduler.stats().filler_tokens, 0);
}

#[test]
fn fillers_make_room_for_others() {
    // Room for one sequence of 40 tokens and little more.
    let mut house = House::new(pipeline(2, 2), cache_config(14, 4));
    let filler = offline(1, prompt(1, 40), 8);
    house.submit(filler.clone()).unwrap();
    fill(&mut house, 2);
    drain(&mut house);
    let interactive = request(2, prompt(2, 30), 6);
    house.submit(interactive.clone()).unwrap();
    assert_eq!(requests_of(&house.schedule().unwrap()), [2], "at once");
    assert_eq!(house.scheduler.stats().preemptions, 1);
    house.kv.check_integrity().unwrap();
    run_down(&mut house, 2);
    house.assert_solo(&interactive);
    house.assert_solo(&filler);
    house.assert_idle();
}

#[test]
fn a_filler_ends_although_others_keep_coming() {
    let mut house = House::new(SchedulerConfig { ageing_us: 2_000, ..pipeline(2, 2) }, cache_config(400, 4));
    house.submit(RequestSpec { arrival: Time(0), ..offline(0, prompt(0, 20), 10) }).unwrap();
    // Always so many that no stage would idle.
    let mut next = 1u64;
    for _ in 0..600 {
        while house.scheduler.stats().num_running + house.scheduler.stats().num_waiting < 5 {
            let arrival = house.now;
            house.submit(RequestSpec { arrival, ..request(next, prompt(next as u32, 8), 6) }).unwrap();
            next += 1;
        }
        fill(&mut house, 2);
        house.apply();
        if house.finished.contains_key(&first(0)) {
            assert!(next > 6, "the others did keep coming");
            return;
        }
    }
    panic!("the filler never ran");
}
