//! The proof that every block is free, cached or owned, exactly once. Decides nothing; reads all.

use super::pool::Place;
use super::{BlockId, BlockKey, IntegrityError, KvLayout, PagedKvCache};

impl PagedKvCache {
    /// Proves that every block is free, cached or owned, exactly once, and that reference counts,
    /// tables and hashes agree. Cost: linear in blocks and table entries.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        self.blocks.pool.check_lists().map_err(IntegrityError)?;
        self.check_tables()?;
        self.check_index()
    }

    fn check_tables(&self) -> Result<(), IntegrityError> {
        let mut owners = vec![0u32; self.blocks.pool.num_blocks()];
        for (id, table, marks) in self.tables.iter() {
            if table.groups.len() != self.config.groups.len() {
                return broken(format!("{id:?} has {} tables", table.groups.len()));
            }
            let len = table.groups[0].blocks.len();
            if marks.writable.end > len * self.config.block_size {
                return broken(format!("{id:?} may write {:?} to {len} blocks", marks.writable));
            }
            for (group_idx, group) in table.groups.iter().enumerate() {
                if group.blocks.len() != len || group.first_live > len || table.num_registered > len {
                    return broken(format!("{id:?} group {group_idx}: {} entries, others {len}", group.blocks.len()));
                }
                if self.config.layout == KvLayout::Contiguous && len != self.reserved_blocks() {
                    return broken(format!("{id:?} reserves {len} blocks, not {}", self.reserved_blocks()));
                }
                for (entry, &block) in group.blocks.iter().enumerate() {
                    if (block == BlockId::NONE) != (entry < group.first_live) {
                        return broken(format!("{id:?} group {group_idx} entry {entry} is {block:?}"));
                    }
                    if block == BlockId::NONE {
                        continue;
                    }
                    match owners.get_mut(block.0 as usize) {
                        Some(count) => *count += 1,
                        None => return broken(format!("{id:?} owns {block:?}, which does not exist")),
                    }
                }
            }
        }
        for (block, &owners) in (0u32..).zip(&owners) {
            let meta = self.blocks.pool.meta(BlockId(block));
            if meta.ref_count != owners {
                return broken(format!("block {block} counts {} owners; tables name {owners}", meta.ref_count));
            }
        }
        Ok(())
    }

    fn check_index(&self) -> Result<(), IntegrityError> {
        let mut named = 0;
        for block in (0u32..).take(self.blocks.pool.num_blocks()).map(BlockId) {
            let meta = self.blocks.pool.meta(block);
            let Some(key) = meta.key else { continue };
            named += 1;
            if self.blocks.index.find(key) != Some(block) {
                return broken(format!(
                    "{block:?} is named {key:?}; the index finds {:?}",
                    self.blocks.index.find(key)
                ));
            }
            if meta.place == Place::Free {
                return broken(format!("{block:?} is free and named {key:?}"));
            }
        }
        if named != self.blocks.index.len() {
            return broken(format!("the index holds {} names; {named} blocks have one", self.blocks.index.len()));
        }
        self.check_groups_of_names()
    }

    /// A named block serves one cache group only.
    fn check_groups_of_names(&self) -> Result<(), IntegrityError> {
        for (id, table, _) in self.tables.iter() {
            for (group_idx, group) in (0u32..).zip(&table.groups) {
                for &block in group.live() {
                    let key: Option<BlockKey> = self.blocks.pool.meta(block).key;
                    if key.is_some_and(|key| key.group != group_idx) {
                        return broken(format!("{id:?} group {group_idx} holds {block:?}, named {key:?}"));
                    }
                }
            }
        }
        Ok(())
    }
}

fn broken(what: String) -> Result<(), IntegrityError> {
    Err(IntegrityError(what))
}
