//! Plans that come back change no plan: a scheduler that gets every plan back plans what one does that gets none.

use pagemill_scheduler::*;
use std::collections::VecDeque;

use crate::support::*;

/// What happens to both alike.
struct Twins {
    with: (DynamicBatchScheduler, PagedKvCache),
    without: (DynamicBatchScheduler, PagedKvCache),
    in_flight: VecDeque<StepPlan>,
}

impl Twins {
    fn new(config: &SchedulerConfig, cache: &KvCacheConfig) -> Self {
        let one = || (DynamicBatchScheduler::new(config.clone()), PagedKvCache::new(cache.clone()));
        Self { with: one(), without: one(), in_flight: VecDeque::new() }
    }

    fn each(&mut self) -> [&mut (DynamicBatchScheduler, PagedKvCache); 2] {
        [&mut self.with, &mut self.without]
    }

    /// Whether a plan was made.
    fn schedule(&mut self, now: Time) -> bool {
        let [plan, expected] = self.each().map(|(scheduler, cache)| scheduler.schedule(cache, now));
        assert_eq!(plan, expected);
        for (sequence, &since) in plan.sequences.iter().zip(&plan.tables_since) {
            assert!(since <= plan.step);
            for before in self.in_flight.iter().filter(|before| before.step >= since) {
                for same in before.sequences.iter().filter(|other| other.id == sequence.id) {
                    let begins = |(table, before): (&Vec<BlockId>, &Vec<BlockId>)| table.starts_with(before);
                    assert!(sequence.block_tables.iter().zip(&same.block_tables).all(begins), "{plan:?}\n{before:?}");
                }
            }
        }
        assert_eq!(plan.tables_since.len(), plan.sequences.len());
        if plan.is_empty() {
            return false;
        }
        self.in_flight.push_back(plan);
        true
    }

    fn apply(&mut self, random: u64, now: Time) {
        let Some(plan) = self.in_flight.pop_front() else { return };
        let ids: Vec<SequenceId> = plan.sequences.iter().flat_map(|sequence| sequence.sample.clone()).collect();
        let draw = |id: SequenceId| mix(random, id.request.0 * 8 + u64::from(id.choice)) % 40;
        let sampled: Vec<SampledToken> =
            ids.iter().map(|&id| SampledToken { id, token: Ok(draw(id) as u32), logprobs: None }).collect();
        let output = StepOutput { step: plan.step, sampled, prompt_logprobs: Vec::new() };
        self.with.0.reuse(plan);
        let [events, expected] = self.each().map(|(scheduler, cache)| scheduler.apply(cache, output.clone(), now));
        assert_eq!(events, expected);
        self.with.1.check_integrity().unwrap();
    }
}

fn request_of(seed: u64, at: u64) -> RequestSpec {
    let random = |what: u64, end: u64| mix(mix(seed, at), what) % end;
    let prompt = (0..=random(0, 20)).map(|at| (at % 3) as u32).collect();
    RequestSpec {
        stop_token_ids: vec![3, 7, 35],
        min_tokens: random(1, 4) as usize,
        n: 1 + random(2, 3) as u32,
        priority: random(3, 3) as i32,
        prompt_logprobs: false,
        ..request(at, prompt, 1 + random(4, 30) as usize)
    }
}

/// The most plans in flight: two ahead of outputs, or several that hold different sequences.
fn run(seed: u64, config: &SchedulerConfig, depth: usize) {
    let random = |step: u64, what: u64, end: u64| mix(mix(seed, step), what) % end;
    let window = CacheGroup::SlidingWindow { window: 1 + random(0, 0, 12) as usize };
    let groups = [vec![CacheGroup::Full], vec![window], vec![CacheGroup::Full, window]];
    let groups = groups[random(0, 1, 3) as usize].clone();
    let num_blocks = 16 * groups.len() + random(0, 2, 60) as usize;
    let cache = KvCacheConfig { groups, prefix_cache: random(0, 3, 2) == 0, ..cache_config(num_blocks, 4) };
    let mut twins = Twins::new(config, &cache);
    for step in 1..150 {
        let now = Time(step * 10);
        if random(step, 1, 3) == 0 {
            let spec = request_of(seed, step);
            let [taken, expected] = twins.each().map(|(scheduler, cache)| scheduler.submit(spec.clone(), cache));
            assert_eq!(taken, expected);
        }
        if random(step, 2, 12) == 0 {
            let id = RequestId(random(step, 3, step));
            twins.each().into_iter().for_each(|(scheduler, cache)| scheduler.abort(id, cache));
        }
        if random(step, 4, 12) == 0 {
            let id = choice(random(step, 5, step), random(step, 6, 2) as u32);
            twins.each().into_iter().for_each(|(scheduler, cache)| scheduler.finish_sequence(id, cache));
        }
        let planned = twins.in_flight.len() < depth && twins.schedule(now);
        if !planned || twins.in_flight.len() == depth || random(step, 7, 3) == 0 {
            twins.apply(mix(seed, step), now);
        }
    }
}

#[test]
fn plans_made_of_spent_ones_are_the_same() {
    let small = SchedulerConfig { prefill_chunk_size: 8, max_batch_tokens: 20, ..scheduler_config() };
    for seed in 0..150 {
        run(seed, &SchedulerConfig { plan_ahead: true, ..small.clone() }, 2);
        run(seed, &small, 1);
        run(seed, &SchedulerConfig { micro_batches: 3, num_stages: 3, ..small.clone() }, 3);
    }
}
