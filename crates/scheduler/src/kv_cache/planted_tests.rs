//! A planted fault is seen: by the integrity check, and by a reader of the block.

use crate::{BlockHashChain, CacheGroup, KvCacheConfig, KvLayout, PagedKvCache, PrefixHit, RequestId, SequenceId};

fn cache() -> PagedKvCache {
    PagedKvCache::new(KvCacheConfig {
        num_blocks: 4,
        block_size: 4,
        groups: vec![CacheGroup::Full],
        layout: KvLayout::Paged,
        max_seq_len: 16,
        prefill_chunk_size: 16,
        prefix_cache: true,
    })
}

fn id(request: u64) -> SequenceId {
    SequenceId { request: RequestId(request), choice: 0 }
}

/// Two sequences share a block; the first ends; a third takes every block it can get. Whether it was
/// handed the block that the second still reads.
fn shared_block_is_reused(mut cache: PagedKvCache) -> (bool, bool) {
    let (tokens, mut chain) = ([1, 2, 3, 4, 5], BlockHashChain::with_salt(None));
    cache.start_sequence(id(1), PrefixHit::default()).unwrap();
    cache.extend(id(1), 0, 4, &mut Vec::new()).unwrap();
    cache.mark_computed(id(1), &mut chain, &tokens, 4);
    let hit = cache.lookup_prefix(&mut chain, &tokens);
    assert_eq!(hit.num_tokens, 4);
    cache.start_sequence(id(2), hit).unwrap();
    cache.free_sequence(id(1));
    cache.start_sequence(id(3), PrefixHit::default()).unwrap();
    let num_tokens = cache.num_available() * 4;
    cache.extend(id(3), 0, num_tokens, &mut Vec::new()).unwrap();
    let shared = cache.block_tables(id(2), 4)[0][0];
    let reused = cache.block_tables(id(3), num_tokens)[0].contains(&shared);
    (reused, cache.check_integrity().is_ok())
}

#[test]
fn a_shared_block_is_kept_while_one_owner_is_left() {
    assert_eq!(shared_block_is_reused(cache()), (false, true));
}

#[test]
fn with_the_planted_fault_it_is_reused_and_the_check_says_so() {
    let mut faulty = cache();
    faulty.plant_early_block_reuse();
    assert_eq!(shared_block_is_reused(faulty), (true, false));
}
