//! Faults that tests plant to show that they would be caught. Compiled for tests only.

use super::PagedKvCache;

impl PagedKvCache {
    /// From here on, a block that is shared (prefix hit on a running sequence's block, fork) does not
    /// count its new owner, so that it goes back to the pool, or is written in place, while the other
    /// owner still reads it. The cache keeps quiet about it, so that the tokens must show it;
    /// [`Self::check_integrity`] still tells the truth.
    pub fn plant_early_block_reuse(&mut self) {
        self.blocks.pool.skips_share_count = true;
    }
}
