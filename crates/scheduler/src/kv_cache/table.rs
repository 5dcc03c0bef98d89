//! Block tables and the arithmetic of windows: which block a position lies in, which blocks a
//! position reads, how many blocks a sequence can hold. Knows nothing of the pool.
//!
//! Positions are `[0, num_tokens)`; block `j` holds `[j * block_size, (j + 1) * block_size)`;
//! under a window of `w`, position `p` reads `[p - w + 1, p]`.

use super::{BlockId, CacheGroup};

/// One cache group's table of one sequence.
#[derive(Clone, Debug, Default)]
pub(super) struct GroupTable {
    /// Entry `j` for block `j`; [`BlockId::NONE`] for `j < first_live`.
    pub(super) blocks: Vec<BlockId>,
    /// First entry that is still held.
    pub(super) first_live: usize,
}

impl GroupTable {
    pub(super) fn live(&self) -> &[BlockId] {
        &self.blocks[self.first_live..]
    }

    /// The first position behind whose window more lies than now.
    pub(super) fn reclaims_at(&self, kind: CacheGroup, block_size: usize) -> usize {
        match kind {
            CacheGroup::Full => usize::MAX,
            CacheGroup::SlidingWindow { window } => ((self.first_live + 1) * block_size).saturating_add(window - 1),
        }
    }
}

/// One sequence's tables.
#[derive(Clone, Debug, Default)]
pub(super) struct BlockTable {
    /// One for each cache group.
    pub(super) groups: Vec<GroupTable>,
    /// Leading blocks whose content has been computed and offered to the prefix index.
    pub(super) num_registered: usize,
}

impl BlockTable {
    pub(super) fn num_held(&self) -> usize {
        self.groups.iter().map(|group| group.live().len()).sum()
    }
}

impl CacheGroup {
    /// First block that the token at `position` reads.
    pub(super) fn first_block_read(self, position: usize, block_size: usize) -> usize {
        match self {
            CacheGroup::Full => 0,
            CacheGroup::SlidingWindow { window } => (position + 1).saturating_sub(window) / block_size,
        }
    }

    /// Blocks held at most on the way to `num_tokens` tokens, computing at most `chunk` tokens at a
    /// time: a step at `start` touches `[start - window + 1, start + chunk)`, and `len` positions
    /// overlap at most `ceil((len - 1) / block_size) + 1` blocks.
    pub(super) fn blocks_held_at_most(self, num_tokens: usize, chunk: usize, block_size: usize) -> usize {
        let all = num_tokens.div_ceil(block_size);
        match self {
            CacheGroup::Full => all,
            CacheGroup::SlidingWindow { window } => {
                let touched = window.saturating_sub(1).saturating_add(chunk.clamp(1, num_tokens.max(1)));
                all.min((touched - 1).div_ceil(block_size) + 1)
            }
        }
    }
}
