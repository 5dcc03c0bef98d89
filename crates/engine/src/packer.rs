//! From each plan to its batch where steps are packed one after the other in one place: most of a decode's batch is the
//! one before, so block tables are copied from there in long runs, and a plan's own tables are only read where they
//! have grown. The batch is the one that [`BatchBuilder::pack`] gives. Pure copying; knows no thread.

use crate::EngineError;
use crate::layout::{BatchBuilder, Packing};
use pagemill_backend::{BatchLayout, GroupLayout};
use pagemill_scheduler::{ScheduledSequence, SequenceId, StepPlan};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// How far a sequence is looked for in the batch before: past those that have left since.
const LOOK_AHEAD: usize = 8;

/// Batches whose memory is kept: more are never on their way at once for a rank.
const MAX_SPARES: usize = 16;

/// Batches that ranks are done with, for their memory.
#[derive(Clone, Default)]
pub(crate) struct SpentBatches(Arc<Mutex<Vec<BatchBuilder>>>);

impl SpentBatches {
    /// Gives one back.
    pub(crate) fn put(&self, batch: BatchBuilder) {
        let mut spares = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if spares.len() < MAX_SPARES {
            spares.push(batch);
        }
    }

    /// One of any content.
    pub(crate) fn take(&self) -> BatchBuilder {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }
}

/// Packs plans, and remembers the last one's batch.
pub(crate) struct Packer {
    packing: Packing,
    last: Packed,
    /// For each group what is still to be copied of its last `block_table`.
    runs: Vec<Range<usize>>,
}

/// A batch that was packed.
#[derive(Default)]
struct Packed {
    /// The plan's step; 0: there is no batch that another may be made of.
    step: u64,
    /// `[S]`.
    ids: Vec<SequenceId>,
    layout: BatchLayout,
}

impl Packer {
    /// One that has packed nothing.
    pub(crate) fn new(packing: Packing) -> Self {
        Self { packing, last: Packed::default(), runs: vec![0..0; packing.num_groups] }
    }

    /// Packs a plan into `batch`, over what it held.
    ///
    /// # Errors
    /// As [`BatchBuilder::pack`].
    pub(crate) fn pack(&mut self, plan: &StepPlan, batch: &mut BatchBuilder) -> Result<(), EngineError> {
        let last_step = std::mem::take(&mut self.last.step);
        let is_known = plan.tables_since.len() == plan.sequences.len() && last_step < plan.step;
        batch.clear(self.packing.num_groups);
        self.runs.iter_mut().for_each(|run| *run = 0..0);
        let mut next_idx = 0;
        for (at, sequence) in plan.sequences.iter().enumerate() {
            let has_only_grown = is_known && plan.tables_since[at] <= last_step;
            match self.last.find(sequence.id, next_idx).filter(|_| has_only_grown) {
                Some(last_idx) => {
                    next_idx = last_idx + 1;
                    self.push_grown(sequence, last_idx, batch)?;
                }
                None => {
                    self.finish_runs(batch);
                    batch.push(sequence, self.packing.block_size)?;
                }
            }
        }
        self.finish_runs(batch);
        self.remember(plan, batch);
        Ok(())
    }

    /// Packs a sequence whose tables begin with those that sequence `last_idx` of the last batch had.
    fn push_grown(
        &mut self,
        sequence: &ScheduledSequence,
        last_idx: usize,
        batch: &mut BatchBuilder,
    ) -> Result<(), EngineError> {
        let block_size = self.packing.block_size;
        let last = &self.last.layout;
        let (last_end, start, end) =
            (last.seq_lens[last_idx] as usize, sequence.start, sequence.start + sequence.token_ids.len());
        // One token more in the same block.
        let is_next_slot = start == last_end && start + 1 == end && !start.is_multiple_of(block_size);
        batch.push_tokens(sequence)?;
        for (group_idx, (last_group, run)) in last.groups.iter().zip(&mut self.runs).enumerate() {
            if is_next_slot {
                let last_slot = last_group.slot_mapping[last.query_start[last_idx + 1] as usize - 1];
                batch.layout.groups[group_idx].slot_mapping.push(last_slot + 1);
            } else {
                batch.push_slots(group_idx, sequence, block_size)?;
            }
            let entries = entries_of(last_group, last_idx);
            let (num_entries, num_last) = (end.div_ceil(block_size), entries.len());
            let group = &mut batch.layout.groups[group_idx];
            if run.end != entries.start {
                finish_run(run, last_group, group);
                run.start = entries.start;
            }
            run.end = entries.end;
            if num_entries > num_last {
                finish_run(run, last_group, group);
                // `push_slots` has read behind them.
                let grown = sequence.block_tables[group_idx].get(num_last..).unwrap_or_default();
                group.block_table.extend(grown.iter().map(|block| block.0));
            }
            batch.end_table(group_idx, run.len())?;
        }
        batch.push_positions(start, end - start)
    }

    /// Copies what is left to be copied.
    fn finish_runs(&mut self, batch: &mut BatchBuilder) {
        let groups = self.last.layout.groups.iter().zip(&mut batch.layout.groups);
        for (run, (last, group)) in self.runs.iter_mut().zip(groups) {
            finish_run(run, last, group);
        }
    }

    /// Keeps a copy of the batch: the batch itself goes to a rank.
    fn remember(&mut self, plan: &StepPlan, batch: &BatchBuilder) {
        let Packed { step, ids, layout } = &mut self.last;
        *step = plan.step;
        ids.clear();
        ids.extend(plan.sequences.iter().map(|sequence| sequence.id));
        layout.clone_from(&batch.layout);
    }
}

impl Packed {
    /// A sequence's place, if it is at `from` or shortly behind.
    fn find(&self, id: SequenceId, from: usize) -> Option<usize> {
        let ids = self.ids.get(from..)?;
        ids.iter().take(LOOK_AHEAD).position(|last| *last == id).map(|distance| from + distance)
    }
}

/// A sequence's entries in its group's `block_table`.
fn entries_of(group: &GroupLayout, seq: usize) -> Range<usize> {
    group.block_table_start[seq] as usize..group.block_table_start[seq + 1] as usize
}

fn finish_run(run: &mut Range<usize>, last: &GroupLayout, group: &mut GroupLayout) {
    group.block_table.extend_from_slice(&last.block_table[run.clone()]);
    run.start = run.end;
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use pagemill_scheduler::{
        CacheGroup, DynamicBatchScheduler, KvCacheConfig, KvLayout, PagedKvCache, RequestId, RequestSpec, SampledToken,
        SchedulerConfig, StepOutput, Time,
    };
    use std::collections::VecDeque;

    const BLOCK_SIZE: usize = 4;

    struct Random(u64);

    impl Random {
        fn below(&mut self, end: u32) -> u32 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            u32::try_from((self.0 >> 11) % u64::from(end)).unwrap()
        }
    }

    fn scheduler_and_cache(random: &mut Random) -> (DynamicBatchScheduler, PagedKvCache) {
        let window = |random: &mut Random| CacheGroup::SlidingWindow { window: 1 + random.below(12) as usize };
        let groups = match random.below(3) {
            0 => vec![CacheGroup::Full],
            1 => vec![window(random)],
            _ => vec![CacheGroup::Full, window(random)],
        };
        let kv_cache = PagedKvCache::new(KvCacheConfig {
            num_blocks: 24 * groups.len() + random.below(60) as usize,
            block_size: BLOCK_SIZE,
            groups,
            layout: KvLayout::Paged,
            max_seq_len: 64,
            prefill_chunk_size: 8,
            prefix_cache: random.below(2) == 0,
        });
        let scheduler = DynamicBatchScheduler::new(SchedulerConfig {
            max_batch_size: 6,
            max_batch_tokens: 20,
            prefill_chunk_size: 8,
            mixed_batch_tokens: None,
            max_seq_len: 64,
            max_waiting: 100,
            ageing_us: 10,
            continuous_batching: true,
            static_batch_wait_us: 0,
            micro_batches: 1,
            plan_ahead: true,
            num_stages: 1,
        });
        (scheduler, kv_cache)
    }

    fn request(id: u64, random: &mut Random) -> RequestSpec {
        let prompt: Vec<u32> = (0..1 + random.below(20)).map(|at| at % 3).collect();
        RequestSpec {
            id: RequestId(id),
            prompt,
            max_tokens: 1 + random.below(30) as usize,
            min_tokens: 0,
            stop_token_ids: vec![7],
            n: 1 + random.below(2),
            priority: i32::from(random.below(3) == 0),
            cache_salt: None,
            prompt_logprobs: false,
            arrival: Time(id),
        }
    }

    fn outputs(plan: &StepPlan, random: &mut Random) -> StepOutput {
        let ids = plan.sequences.iter().flat_map(|sequence| sequence.sample.iter().copied());
        let sampled = ids.map(|id| SampledToken { id, token: Ok(random.below(40)), logprobs: None });
        StepOutput { step: plan.step, sampled: sampled.collect(), prompt_logprobs: Vec::new() }
    }

    /// Packs every plan of a random history both ways; sequences packed from the batch before.
    fn check(seed: u64) -> usize {
        let mut random = Random(seed | 1 << 40);
        let (mut scheduler, mut kv_cache) = scheduler_and_cache(&mut random);
        let packing = Packing { num_groups: kv_cache.config().groups.len(), block_size: BLOCK_SIZE };
        let (mut packer, mut in_place, mut from_scratch) =
            (Packer::new(packing), BatchBuilder::default(), BatchBuilder::default());
        let mut in_flight: VecDeque<StepPlan> = VecDeque::new();
        let mut num_grown = 0;
        for step in 0..200u32 {
            if random.below(4) == 0 {
                let _ = scheduler.submit(request(u64::from(step), &mut random), &kv_cache);
            }
            if random.below(20) == 0 {
                scheduler.abort(RequestId(random.below(step + 1).into()), &mut kv_cache);
            }
            if in_flight.len() < 2 {
                let plan = scheduler.schedule(&mut kv_cache, Time(step.into()));
                if !plan.is_empty() {
                    num_grown += plan.tables_since.iter().filter(|&&since| since < plan.step).count();
                    packer.pack(&plan, &mut in_place).unwrap();
                    from_scratch.pack(&plan, packing).unwrap();
                    assert_eq!(format!("{in_place:?}"), format!("{from_scratch:?}"), "seed {seed}, step {step}");
                    in_flight.push_back(plan);
                }
            }
            if (in_flight.len() == 2 || random.below(2) == 0)
                && let Some(plan) = in_flight.pop_front()
            {
                let output = outputs(&plan, &mut random);
                scheduler.reuse(plan);
                scheduler.apply(&mut kv_cache, output, Time(step.into()));
            }
        }
        num_grown
    }

    #[test]
    fn a_batch_made_of_the_last_one_is_the_one_made_of_the_plan() {
        let num_grown: usize = (0..400).map(check).sum();
        assert!(num_grown > 50_000, "{num_grown} sequences could be packed from the batch before");
    }

    #[test]
    fn a_plan_of_which_nothing_is_known_is_packed_whole() {
        let mut random = Random(5);
        let (mut scheduler, mut kv_cache) = scheduler_and_cache(&mut random);
        scheduler.submit(request(1, &mut random), &kv_cache).unwrap();
        let plan = scheduler.schedule(&mut kv_cache, Time(0));
        let packing = Packing { num_groups: kv_cache.config().groups.len(), block_size: BLOCK_SIZE };
        let (mut packer, mut batch) = (Packer::new(packing), BatchBuilder::default());
        packer.pack(&plan, &mut batch).unwrap();
        // As warm-ups do: a later step, other blocks, and no word about them.
        let mut other = StepPlan { step: plan.step + 1, tables_since: Vec::new(), ..plan };
        for table in other.sequences.iter_mut().flat_map(|sequence| &mut sequence.block_tables) {
            table.iter_mut().for_each(|block| block.0 ^= 1);
        }
        packer.pack(&other, &mut batch).unwrap();
        let mut whole = BatchBuilder::default();
        whole.pack(&other, packing).unwrap();
        assert_eq!(batch.layout, whole.layout);
    }
}
