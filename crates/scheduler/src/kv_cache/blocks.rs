//! Pool and prefix index together: what is done to the blocks of one table, so that a block's name and
//! its place never disagree. Does not know whose table it is.

use super::pool::{BlockPool, Place};
use super::prefix_index::{BlockKey, PrefixIndex};
use super::table::BlockTable;
use super::{BlockId, CacheGroup, OutOfBlocks};
use crate::BlockCopy;

/// All blocks and their names.
#[derive(Debug)]
pub(super) struct Blocks {
    pub(super) pool: BlockPool,
    pub(super) index: PrefixIndex,
    pub(super) num_evictions: u64,
    pub(super) num_copies_on_write: u64,
}

impl Blocks {
    pub(super) fn require(&self, needed: usize) -> Result<(), OutOfBlocks> {
        let available = self.pool.num_available();
        if needed > available { Err(OutOfBlocks { needed, available }) } else { Ok(()) }
    }

    /// A block, after [`Self::require`] has said that there is one.
    pub(super) fn take(&mut self) -> BlockId {
        let Some(taken) = self.pool.take() else {
            panic!("the pool ran out of blocks that it had promised");
        };
        if let Some(key) = taken.evicted {
            self.index.remove(key);
            self.num_evictions += 1;
        }
        taken.block
    }

    fn is_shared(&self, block: BlockId) -> bool {
        self.pool.meta(block).ref_count > 1
    }

    fn copy_on_write(&mut self, src: BlockId, copies: &mut Vec<BlockCopy>) -> BlockId {
        let dst = self.take();
        copies.push(BlockCopy { src, dst });
        self.pool.pin(src);
        self.pool.release(src);
        self.num_copies_on_write += 1;
        dst
    }

    /// Makes blocks `[first, end)` of every group writable: new ones where the table ends, copies of
    /// shared ones. All or nothing.
    pub(super) fn extend(
        &mut self,
        table: &mut BlockTable,
        (first, end): (usize, usize),
        copies: &mut Vec<BlockCopy>,
    ) -> Result<(), OutOfBlocks> {
        let mut needed = 0;
        for group in &table.groups {
            let len = group.blocks.len();
            assert!(first >= group.first_live && first <= len, "block {first} lies outside its table: {group:?}");
            needed += end.saturating_sub(len);
            needed += group.blocks[first..end.min(len)].iter().filter(|&&block| self.is_shared(block)).count();
        }
        if needed == 0 {
            return Ok(());
        }
        self.require(needed)?;
        for group in &mut table.groups {
            let len = group.blocks.len();
            for entry in &mut group.blocks[first..end.min(len)] {
                if self.is_shared(*entry) {
                    *entry = self.copy_on_write(*entry, copies);
                }
            }
            while group.blocks.len() < end {
                group.blocks.push(self.take());
            }
        }
        Ok(())
    }

    /// Names the table's blocks from the first unregistered one on. Of two blocks with the same
    /// content the first keeps the name.
    pub(super) fn register(&mut self, table: &mut BlockTable, hashes: &[u128]) {
        for (group_idx, group) in (0u32..).zip(&table.groups) {
            for (block_idx, &hash) in hashes.iter().enumerate().skip(table.num_registered.max(group.first_live)) {
                let (block, key) = (group.blocks[block_idx], BlockKey { hash, group: group_idx });
                if self.pool.skips_share_count && self.pool.meta(block).place != Place::Owned {
                    continue;
                }
                if self.pool.meta(block).key.is_none() && self.index.insert(key, block) {
                    self.pool.set_key(block, key);
                }
            }
        }
        table.num_registered = hashes.len();
    }

    /// Gives back what lies wholly behind the window of the token at `position`; whether anything does.
    pub(super) fn reclaim(
        &mut self,
        table: &mut BlockTable,
        kinds: &[CacheGroup],
        position: usize,
        block_size: usize,
    ) -> bool {
        let mut reclaimed = false;
        for (group, kind) in table.groups.iter_mut().zip(kinds) {
            let first = kind.first_block_read(position, block_size).min(group.blocks.len());
            if first <= group.first_live {
                continue;
            }
            for entry in group.blocks[group.first_live..first].iter_mut().rev() {
                self.pool.release(std::mem::replace(entry, BlockId::NONE));
            }
            group.first_live = first;
            reclaimed = true;
        }
        reclaimed
    }
}
