//! `PagedKvCache`: which block holds which tokens. Owns tables, reference counts and names; does not
//! know which sequence should run, nor when a step has been computed: the scheduler says so.

mod blocks;
mod integrity;
#[cfg(any(test, feature = "planted-bugs"))]
mod planted;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod planted_tests;
mod pool;
mod prefix_index;
mod table;
mod tables;

use crate::{BlockCopy, SequenceId};
use blocks::Blocks;
use pool::{BlockPool, Place};
pub use prefix_index::BlockHashChain;
use prefix_index::{BlockKey, PrefixIndex};
use table::{BlockTable, GroupTable};
use tables::Tables;
pub(crate) use tables::{TableRef, TableSlot};

/// A block of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

impl BlockId {
    /// A table entry whose block went back to the pool (behind a sliding window). Never read.
    pub const NONE: BlockId = BlockId(u32::MAX);
}

/// The kind of state that a group of layers keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheGroup {
    /// Every position.
    Full,
    /// Position `p` reads `(p - window, p]`: blocks wholly behind it go back to the pool.
    SlidingWindow {
        /// Positions that a token reads, its own included; at least 1.
        window: usize,
    },
}

/// How blocks are handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvLayout {
    /// Blocks as they are needed.
    Paged,
    /// `max_seq_len` reserved for each sequence when it starts, in every group: the baseline that
    /// benches compare with. No sharing, no prefix cache, no reclamation behind a window.
    Contiguous,
}

/// Shape and policy of the cache.
#[derive(Clone, Debug)]
pub struct KvCacheConfig {
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Tokens in a block.
    pub block_size: usize,
    /// The model's cache groups; they share the pool.
    pub groups: Vec<CacheGroup>,
    /// Blocks as needed, or whole sequences reserved.
    pub layout: KvLayout,
    /// Tokens in the longest sequence (what `Contiguous` reserves).
    pub max_seq_len: usize,
    /// Most tokens of one sequence in one step; bounds what a sliding-window group holds.
    pub prefill_chunk_size: usize,
    /// Whether finished prompts stay findable.
    pub prefix_cache: bool,
}

/// Counters and gauges of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvCacheStats {
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Blocks that no sequence owns and no hash names.
    pub num_free: usize,
    /// Blocks that no sequence owns but that the prefix cache can still find (evictable).
    pub num_cached: usize,
    /// Blocks owned by at least one sequence.
    pub num_owned: usize,
    /// Prompt tokens looked up in the prefix cache since start.
    pub prefix_queries: u64,
    /// Of these, tokens found.
    pub prefix_hits: u64,
    /// Cached blocks that had to make room.
    pub evictions: u64,
    /// Blocks copied on write.
    pub copies_on_write: u64,
}

/// A broken invariant: the process must stop, since going on could show one user another's text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("KV cache integrity: {0}")]
pub struct IntegrityError(pub String);

/// Not enough blocks are free or evictable; nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{needed} KV blocks are needed and {available} are available")]
pub struct OutOfBlocks {
    /// Blocks asked for.
    pub needed: usize,
    /// Blocks free or evictable.
    pub available: usize,
}

/// What the prefix cache holds of a sequence's leading blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixHit {
    /// Leading tokens that need not be computed: a multiple of the block size, below the number of tokens.
    pub num_tokens: usize,
    /// Cached blocks the sequence would own, over all groups.
    pub num_blocks: usize,
    /// Of these, blocks that nobody owns now (they stop being available).
    pub num_unowned: usize,
    /// Tokens that were looked up.
    queried: usize,
    /// For each group: entries of the table, `NONE` for blocks behind its window.
    entries: Vec<Vec<BlockId>>,
}

/// Blocks, their tables, their reference counts and their hashes.
#[derive(Debug)]
pub struct PagedKvCache {
    config: KvCacheConfig,
    blocks: Blocks,
    /// Iterated by nothing but the integrity check.
    tables: Tables,
    prefix_queries: u64,
    prefix_hits: u64,
}

impl PagedKvCache {
    /// An empty cache.
    ///
    /// # Panics
    /// On a configuration that describes no cache (no block size, no group, an empty window, more
    /// blocks than ids); configurations are validated before they come here.
    #[must_use]
    pub fn new(config: KvCacheConfig) -> Self {
        assert!(config.block_size > 0 && config.prefill_chunk_size > 0, "a block and a chunk hold at least one token");
        assert!(!config.groups.is_empty(), "a model has at least one cache group");
        assert!(!config.groups.contains(&CacheGroup::SlidingWindow { window: 0 }), "a window holds at least one token");
        let num_blocks = u32::try_from(config.num_blocks).unwrap_or(u32::MAX);
        assert!(num_blocks < u32::MAX, "block ids are 32 bits wide");
        Self {
            blocks: Blocks {
                pool: BlockPool::new(num_blocks),
                index: PrefixIndex::with_capacity(if config.prefix_cache { config.num_blocks } else { 0 }),
                num_evictions: 0,
                num_copies_on_write: 0,
            },
            tables: Tables::default(),
            prefix_queries: 0,
            prefix_hits: 0,
            config,
        }
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &KvCacheConfig {
        &self.config
    }

    /// Gauges and counters. Cheap.
    #[must_use]
    pub fn stats(&self) -> KvCacheStats {
        KvCacheStats {
            num_blocks: self.blocks.pool.num_blocks(),
            num_free: self.blocks.pool.num_free(),
            num_cached: self.blocks.pool.num_cached(),
            num_owned: self.blocks.pool.num_blocks() - self.blocks.pool.num_available(),
            prefix_queries: self.prefix_queries,
            prefix_hits: self.prefix_hits,
            evictions: self.blocks.num_evictions,
            copies_on_write: self.blocks.num_copies_on_write,
        }
    }

    /// Forgets every cached prefix that no sequence owns.
    pub fn clear_prefix_cache(&mut self) {
        while let Some(key) = self.blocks.pool.forget_oldest_cached() {
            self.blocks.index.remove(key);
        }
    }

    /// Blocks that a sequence of `num_tokens` tokens holds at most, over all groups.
    ///
    /// A full group: `ceil(num_tokens / block_size)`. A sliding-window group never more than
    /// `ceil((window + chunk - 2) / block_size) + 1`, with `chunk = min(prefill_chunk_size, num_tokens)`.
    /// `Contiguous`: `ceil(max_seq_len / block_size)` for each group, whatever `num_tokens`.
    #[must_use]
    pub fn blocks_needed(&self, num_tokens: usize) -> usize {
        self.blocks_to_reach(0, num_tokens)
    }

    /// Blocks that a sequence holds at most on its way from `num_computed` to `num_tokens` tokens.
    pub(crate) fn blocks_to_reach(&self, num_computed: usize, num_tokens: usize) -> usize {
        let KvCacheConfig { groups, block_size, prefill_chunk_size, .. } = &self.config;
        if self.config.layout == KvLayout::Contiguous {
            return groups.len() * self.reserved_blocks();
        }
        let chunk = num_tokens.saturating_sub(num_computed).clamp(1, *prefill_chunk_size);
        groups.iter().map(|group| group.blocks_held_at_most(num_tokens, chunk, *block_size)).sum()
    }

    /// Blocks of one group of one sequence under [`KvLayout::Contiguous`].
    fn reserved_blocks(&self) -> usize {
        self.config.max_seq_len.div_ceil(self.config.block_size)
    }

    /// Blocks free or evictable.
    #[must_use]
    pub fn num_available(&self) -> usize {
        self.blocks.pool.num_available()
    }

    /// Blocks that a sequence holds now, over all groups; 0 for one that has no table.
    #[must_use]
    pub fn num_held(&self, id: SequenceId) -> usize {
        self.tables.find(id).map_or(0, |at| self.tables.table(at).num_held())
    }

    /// Whether [`Self::fork`] works under this layout.
    #[must_use]
    pub fn can_fork(&self) -> bool {
        self.config.layout == KvLayout::Paged
    }

    /// The longest cached prefix of `tokens`, leaving at least the last token to compute: the largest
    /// number `n` of leading blocks such that full groups have all `n` and sliding-window groups have
    /// every block that position `n * block_size` reads. Changes nothing.
    ///
    /// Cost: hashing of blocks that `chain` does not know yet, then one look-up a block and group.
    #[must_use]
    pub fn lookup_prefix(&self, chain: &mut BlockHashChain, tokens: &[u32]) -> PrefixHit {
        let KvCacheConfig { groups, block_size, .. } = &self.config;
        if !self.reads_prefixes() || tokens.is_empty() {
            return PrefixHit::default();
        }
        let limit = (tokens.len() - 1) / block_size;
        // Consecutive cached blocks of each group that end at the block being looked at.
        let mut runs = vec![0usize; groups.len()];
        let mut best = 0;
        for block_idx in 0..limit {
            let hash = chain.extend_to(tokens, *block_size, block_idx + 1)[block_idx];
            for (group, run) in (0u32..).zip(runs.iter_mut()) {
                *run = if self.blocks.index.find(BlockKey { hash, group }).is_some() { *run + 1 } else { 0 };
            }
            let n = block_idx + 1;
            let serves = |(group, run): (&CacheGroup, &usize)| {
                n - group.first_block_read(n * block_size, *block_size).min(n) <= *run
            };
            if groups.iter().zip(&runs).all(serves) {
                best = n;
            }
            if groups.iter().zip(&runs).any(|(group, &run)| *group == CacheGroup::Full && run < n) {
                break;
            }
        }
        let hit = self.hit_of(chain.extend_to(tokens, *block_size, best));
        PrefixHit { queried: tokens.len(), ..hit }
    }

    /// The hit on exactly the blocks that `hashes` name.
    fn hit_of(&self, hashes: &[u128]) -> PrefixHit {
        let block_size = self.config.block_size;
        let mut hit = PrefixHit { num_tokens: hashes.len() * block_size, ..PrefixHit::default() };
        for (group_idx, group) in (0u32..).zip(&self.config.groups) {
            let first = group.first_block_read(hit.num_tokens, block_size);
            let mut entries = vec![BlockId::NONE; first.min(hashes.len())];
            for &hash in hashes.iter().skip(first) {
                let Some(block) = self.blocks.index.find(BlockKey { hash, group: group_idx }) else {
                    panic!("the prefix index lost a block during a look-up");
                };
                hit.num_blocks += 1;
                hit.num_unowned += usize::from(self.blocks.pool.meta(block).place == Place::Cached);
                entries.push(block);
            }
            hit.entries.push(entries);
        }
        hit
    }

    fn reads_prefixes(&self) -> bool {
        self.config.prefix_cache && self.config.layout == KvLayout::Paged
    }

    /// Gives a sequence its tables: the hit's blocks, or its whole reservation. The hit must come
    /// from a look-up with no change to the cache since; the default hit means a cold start.
    pub fn start_sequence(&mut self, id: SequenceId, hit: PrefixHit) -> Result<(), OutOfBlocks> {
        assert!(self.tables.find(id).is_none(), "{id:?} already holds blocks");
        let mut table = BlockTable { groups: vec![GroupTable::default(); self.config.groups.len()], num_registered: 0 };
        if self.config.layout == KvLayout::Contiguous {
            self.reserve(&mut table)?;
        }
        for (group, entries) in table.groups.iter_mut().zip(hit.entries) {
            for &block in entries.iter().filter(|&&block| block != BlockId::NONE) {
                self.blocks.pool.share(block);
            }
            group.first_live = entries.iter().take_while(|&&block| block == BlockId::NONE).count();
            group.blocks = entries;
        }
        table.num_registered = hit.num_tokens / self.config.block_size;
        self.prefix_queries += hit.queried as u64;
        self.prefix_hits += hit.num_tokens as u64;
        self.tables.insert(id, table);
        Ok(())
    }

    fn reserve(&mut self, table: &mut BlockTable) -> Result<(), OutOfBlocks> {
        let reserved = self.reserved_blocks();
        self.blocks.require(reserved * table.groups.len())?;
        for group in &mut table.groups {
            group.blocks = (0..reserved).map(|_| self.blocks.take()).collect();
        }
        Ok(())
    }

    /// Makes positions `[start, end)` of a sequence writable: new blocks where the table ends, a copy
    /// where a block is shared (appended to `copies`; each source keeps its bytes until
    /// [`Self::release_copies`]). All or nothing.
    pub fn extend(
        &mut self,
        id: SequenceId,
        start: usize,
        end: usize,
        copies: &mut Vec<BlockCopy>,
    ) -> Result<(), OutOfBlocks> {
        self.extend_at(self.table_of(id), start, end, copies)
    }

    /// As [`Self::extend`]. Most steps of a decode write to a block that the step before wrote to: nothing to do.
    pub(crate) fn extend_at(
        &mut self,
        at: TableRef,
        start: usize,
        end: usize,
        copies: &mut Vec<BlockCopy>,
    ) -> Result<(), OutOfBlocks> {
        let writable = &self.tables.marks(at).writable;
        if writable.start <= start && end <= writable.end {
            return Ok(());
        }
        let block_size = self.config.block_size;
        let (first_block, end_block) = (start / block_size, end.div_ceil(block_size));
        let (table, marks) = self.tables.both_mut(at);
        self.blocks.extend(table, (first_block, end_block), copies)?;
        marks.writable = start..end_block * block_size;
        Ok(())
    }

    /// The step that made these copies is done: their sources may be reused.
    pub fn release_copies(&mut self, copies: &[BlockCopy]) {
        for copy in copies {
            self.blocks.pool.unpin(copy.src);
        }
    }

    /// A sequence's tables for a step that ends at `num_tokens` tokens, one for each group. Allocates.
    #[must_use]
    pub fn block_tables(&self, id: SequenceId, num_tokens: usize) -> Vec<Vec<BlockId>> {
        let mut tables = Vec::new();
        self.write_block_tables(self.table_of(id), num_tokens, &mut tables);
        tables
    }

    /// As [`Self::block_tables`], over `tables` and into their memory.
    pub(crate) fn write_block_tables(&self, at: TableRef, num_tokens: usize, tables: &mut Vec<Vec<BlockId>>) {
        tables.iter_mut().for_each(Vec::clear);
        tables.resize_with(self.config.groups.len(), Vec::new);
        self.append_block_tables(at, num_tokens, tables);
    }

    /// As [`Self::block_tables`], to `tables` that hold its first entries.
    pub(crate) fn append_block_tables(&self, at: TableRef, num_tokens: usize, tables: &mut [Vec<BlockId>]) {
        let num_blocks = num_tokens.div_ceil(self.config.block_size);
        for (table, group) in tables.iter_mut().zip(&self.tables.table(at).groups) {
            table.extend_from_slice(&group.blocks[table.len()..num_blocks]);
        }
    }

    /// Where the sequence's table is.
    ///
    /// # Panics
    /// When it holds none.
    pub(crate) fn table_of(&self, id: SequenceId) -> TableRef {
        let Some(at) = self.tables.find(id) else {
            panic!("{id:?} holds no table");
        };
        at
    }

    /// The first `num_computed` of `tokens` have been computed, by steps that are all done: their full
    /// blocks become findable, and blocks wholly behind the window of the next token go back.
    ///
    /// Of two sequences that computed the same block, the first keeps the name.
    pub fn mark_computed(&mut self, id: SequenceId, chain: &mut BlockHashChain, tokens: &[u32], num_computed: usize) {
        self.mark_computed_at(self.table_of(id), chain, tokens, num_computed);
    }

    /// As [`Self::mark_computed`]; whether blocks went back, so that entries of the table changed.
    pub(crate) fn mark_computed_at(
        &mut self,
        at: TableRef,
        chain: &mut BlockHashChain,
        tokens: &[u32],
        num_computed: usize,
    ) -> bool {
        if num_computed < self.tables.marks(at).due_at {
            return false;
        }
        let reads_prefixes = self.reads_prefixes();
        let KvCacheConfig { groups, block_size, layout, .. } = &self.config;
        let (table, marks) = self.tables.both_mut(at);
        let num_full = num_computed / block_size;
        if reads_prefixes && num_full > table.num_registered {
            self.blocks.register(table, chain.extend_to(tokens, *block_size, num_full));
        }
        let reclaimed = *layout == KvLayout::Paged && self.blocks.reclaim(table, groups, num_computed, *block_size);
        marks.due_at = usize::MAX;
        if reads_prefixes {
            marks.due_at = (table.num_registered + 1) * block_size;
        }
        if *layout == KvLayout::Paged {
            let reclaims = table.groups.iter().zip(groups).map(|(table, group)| table.reclaims_at(*group, *block_size));
            marks.due_at = reclaims.fold(marks.due_at, usize::min);
        }
        reclaimed
    }

    /// `child` shares all blocks of `parent`, a last partial one included; the first to write copies.
    ///
    /// # Panics
    /// Under [`KvLayout::Contiguous`], which shares nothing: ask [`Self::can_fork`].
    pub fn fork(&mut self, parent: SequenceId, child: SequenceId) {
        assert!(self.can_fork(), "a contiguous layout shares no blocks");
        let parent = self.table_of(parent);
        let (table, marks) = self.tables.both_mut(parent);
        marks.writable = 0..0;
        let table = table.clone();
        for block in table.groups.iter().flat_map(GroupTable::live) {
            self.blocks.pool.share(*block);
        }
        self.tables.insert(child, table);
    }

    /// Takes a sequence's tables away. Named blocks stay findable until they are evicted, the end of
    /// the sequence before its beginning. No step in flight may read or write them.
    pub fn free_sequence(&mut self, id: SequenceId) {
        let Some(table) = self.tables.remove(id) else {
            panic!("{id:?} holds no table");
        };
        let num_blocks = table.groups.first().map_or(0, |group| group.blocks.len());
        for block_idx in (0..num_blocks).rev() {
            for group in table.groups.iter().filter(|group| block_idx >= group.first_live) {
                self.blocks.pool.release(group.blocks[block_idx]);
            }
        }
    }
}
