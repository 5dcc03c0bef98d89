//! The cache against a naive model, and the scheduler under random pressure.
//!
//! The model is a map of sequence to tokens. A simulated memory holds the token and position of each
//! slot; after every operation each position that may be read, read through the table, gives the
//! model's token.

use std::collections::BTreeMap;

use pagemill_scheduler::*;
use proptest::prelude::*;

use crate::support::*;

#[derive(Clone, Debug)]
enum Op {
    Start { prompt: u8, len: usize },
    Compute { pick: usize, num_tokens: usize },
    Generate { pick: usize, token: u32 },
    Fork { pick: usize },
    Free { pick: usize },
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0u8..3, 1usize..30).prop_map(|(prompt, len)| Op::Start { prompt, len }),
        8 => (any::<usize>(), 1usize..9).prop_map(|(pick, num_tokens)| Op::Compute { pick, num_tokens }),
        4 => (any::<usize>(), 0u32..2).prop_map(|(pick, token)| Op::Generate { pick, token }),
        2 => any::<usize>().prop_map(|pick| Op::Fork { pick }),
        2 => any::<usize>().prop_map(|pick| Op::Free { pick }),
        1 => Just(Op::Clear),
    ]
}

struct Model {
    kv: PagedKvCache,
    /// Tokens, and how many of them are in the cache.
    sequences: BTreeMap<SequenceId, (Vec<u32>, usize, BlockHashChain)>,
    slots: Vec<Option<(u32, usize)>>,
    next_id: u64,
}

impl Model {
    fn new(groups: Vec<CacheGroup>) -> Self {
        let config = KvCacheConfig { groups, prefill_chunk_size: 8, ..cache_config(40, 4) };
        Self { slots: vec![None; 160], kv: PagedKvCache::new(config), sequences: BTreeMap::new(), next_id: 0 }
    }

    fn pick(&self, pick: usize) -> Option<SequenceId> {
        let len = self.sequences.len();
        (len > 0).then(|| *self.sequences.keys().nth(pick % len).unwrap())
    }

    fn new_id(&mut self) -> SequenceId {
        self.next_id += 1;
        first(self.next_id)
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Start { prompt, len } => self.start(prompt, len),
            Op::Compute { pick, num_tokens } => self.compute(pick, num_tokens),
            Op::Generate { pick, token } => {
                if let Some(id) = self.pick(pick) {
                    self.sequences.get_mut(&id).unwrap().0.push(token);
                }
            }
            Op::Fork { pick } => {
                if let Some(id) = self.pick(pick) {
                    let child = self.new_id();
                    self.kv.fork(id, child);
                    self.sequences.insert(child, self.sequences[&id].clone());
                }
            }
            Op::Free { pick } => {
                if let Some(id) = self.pick(pick) {
                    self.kv.free_sequence(id);
                    self.sequences.remove(&id);
                }
            }
            Op::Clear => self.kv.clear_prefix_cache(),
        }
    }

    fn start(&mut self, seed: u8, len: usize) {
        let id = self.new_id();
        let tokens = prompt(u32::from(seed), len);
        let mut chain = BlockHashChain::with_salt(None);
        let hit = self.kv.lookup_prefix(&mut chain, &tokens);
        let num_cached = hit.num_tokens;
        assert!(num_cached < len && num_cached.is_multiple_of(4));
        self.kv.start_sequence(id, hit).unwrap();
        self.sequences.insert(id, (tokens, num_cached, chain));
    }

    fn compute(&mut self, pick: usize, num_tokens: usize) {
        let Some(id) = self.pick(pick) else { return };
        let (tokens, start, mut chain) = self.sequences[&id].clone();
        let end = tokens.len().min(start + num_tokens);
        let mut copies = Vec::new();
        let before = self.kv.num_available();
        if start == end {
            return;
        }
        if let Err(error) = self.kv.extend(id, start, end, &mut copies) {
            assert_eq!((self.kv.num_available(), copies.len()), (before, 0), "all or nothing: {error}");
            assert!(error.needed > before);
            return;
        }
        for copy in &copies {
            self.slots.copy_within(copy.src.0 as usize * 4..copy.src.0 as usize * 4 + 4, copy.dst.0 as usize * 4);
        }
        for table in self.kv.block_tables(id, end) {
            for position in start..end {
                self.slots[table[position / 4].0 as usize * 4 + position % 4] = Some((tokens[position], position));
            }
        }
        self.kv.release_copies(&copies);
        self.kv.mark_computed(id, &mut chain, &tokens, end);
        self.sequences.insert(id, (tokens, end, chain));
    }

    fn check(&self) {
        self.kv.check_integrity().unwrap();
        let mut most_owned = 0;
        for (id, (tokens, num_computed, _)) in &self.sequences {
            most_owned += self.kv.num_held(*id);
            let tables = self.kv.block_tables(*id, *num_computed);
            for (group, table) in self.kv.config().groups.iter().zip(&tables) {
                let from = match *group {
                    CacheGroup::Full => 0,
                    CacheGroup::SlidingWindow { window } => (num_computed + 1).saturating_sub(window),
                };
                for position in from..*num_computed {
                    let slot = self.slots[table[position / 4].0 as usize * 4 + position % 4];
                    assert_eq!(slot, Some((tokens[position], position)), "{id:?} {group:?}");
                }
            }
        }
        let stats = self.kv.stats();
        assert_eq!(stats.num_free + stats.num_cached + stats.num_owned, 40);
        assert!(stats.num_owned <= most_owned);
    }
}

fn run_model(groups: Vec<CacheGroup>, ops: &[Op]) {
    let mut model = Model::new(groups);
    for op in ops {
        model.apply(op);
        model.check();
    }
    while let Some(id) = model.pick(0) {
        model.kv.free_sequence(id);
        model.sequences.remove(&id);
        model.check();
    }
    model.kv.clear_prefix_cache();
    assert_eq!(model.kv.stats().num_free, 40);
}

#[derive(Clone, Debug)]
struct Load {
    num_blocks: usize,
    chunk: usize,
    batch_tokens: usize,
    window: Option<usize>,
    depth: usize,
    plan_ahead: bool,
    continuous: bool,
    requests: Vec<(u32, usize, usize, u32, i32)>,
}

fn load() -> impl Strategy<Value = Load> {
    let one = (0u32..4, 1usize..25, 1usize..25, 1u32..4, -2i32..3);
    (
        24usize..60,
        1usize..12,
        8usize..24,
        prop::option::of(1usize..12),
        1usize..4,
        any::<bool>(),
        prop::bool::weighted(0.8),
        prop::collection::vec(one, 1..14),
    )
        .prop_map(|(num_blocks, chunk, batch_tokens, window, depth, plan_ahead, continuous, requests)| Load {
            num_blocks,
            chunk,
            batch_tokens,
            window,
            depth: if plan_ahead { 2 } else { depth },
            plan_ahead,
            continuous,
            requests,
        })
}

fn run_load(load: &Load) {
    let groups = match load.window {
        None => vec![CacheGroup::Full],
        Some(window) => vec![CacheGroup::Full, CacheGroup::SlidingWindow { window }],
    };
    let config = SchedulerConfig {
        prefill_chunk_size: load.chunk,
        max_batch_tokens: load.batch_tokens,
        mixed_batch_tokens: (load.continuous && load.chunk.is_multiple_of(2)).then_some((load.batch_tokens / 2).max(8)),
        continuous_batching: load.continuous,
        plan_ahead: load.plan_ahead,
        ..scheduler_config()
    };
    let cache =
        KvCacheConfig { groups, prefill_chunk_size: config.largest_chunk(), ..cache_config(load.num_blocks, 4) };
    let mut house = House::new(config, cache);
    let mut waiting: Vec<RequestSpec> = Vec::new();
    for (id, &(seed, len, max_tokens, n, priority)) in (0u64..).zip(&load.requests) {
        waiting.push(RequestSpec { n, priority, ..request(id, prompt(seed, len), max_tokens) });
    }
    let specs = waiting.clone();
    waiting.reverse();
    for _ in 0..20_000 {
        if let Some(mut spec) = waiting.pop() {
            spec.arrival = house.now;
            house.submit(spec).unwrap();
        }
        while house.in_flight.len() < load.depth && house.schedule().is_some() {}
        if !house.in_flight.is_empty() {
            house.apply();
        } else if waiting.is_empty() && !house.scheduler.has_work() {
            break;
        } else if let Some(at) = house.scheduler.next_wakeup() {
            house.now = house.now.max(at);
        } else {
            assert!(!waiting.is_empty(), "stuck: {:?}", house.scheduler.stats());
        }
    }
    for spec in &specs {
        house.assert_solo(spec);
    }
    house.assert_idle();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn full_group_agrees_with_the_model(ops in prop::collection::vec(op(), 1..120)) {
        run_model(vec![CacheGroup::Full], &ops);
    }

    #[test]
    fn sliding_group_agrees_with_the_model(window in 1usize..14, ops in prop::collection::vec(op(), 1..120)) {
        run_model(vec![CacheGroup::SlidingWindow { window }], &ops);
    }

    #[test]
    fn mixed_groups_agree_with_the_model(window in 1usize..14, ops in prop::collection::vec(op(), 1..120)) {
        run_model(vec![CacheGroup::Full, CacheGroup::SlidingWindow { window }], &ops);
    }

    #[test]
    fn every_stream_equals_the_one_it_gets_alone(load in load()) {
        run_load(&load);
    }
}
