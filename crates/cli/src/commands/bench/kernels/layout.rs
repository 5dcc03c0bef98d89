//! Batches to time attention on: sequences of one length on consecutive blocks.

use anyhow::{Result, anyhow};
use pagemill_backend::{BatchLayout, GroupLayout};
use std::ops::Range;

/// Sequences of one length, each with as many blocks as `capacity` tokens take.
#[derive(Clone, Copy)]
pub struct Sequences {
    /// How many.
    pub count: usize,
    /// Tokens that each has blocks for.
    pub capacity: usize,
    /// Tokens of a block.
    pub block_size: usize,
}

impl Sequences {
    fn blocks_each(&self) -> usize {
        self.capacity.div_ceil(self.block_size)
    }

    /// Blocks of all of them.
    pub fn num_blocks(&self) -> usize {
        self.count * self.blocks_each()
    }

    /// A step that computes the tokens at `positions` of each, all before them being cached.
    pub fn step(&self, positions: Range<usize>) -> Result<BatchLayout> {
        let mut layout = BatchLayout { query_start: vec![0], ..BatchLayout::default() };
        let mut group = GroupLayout { block_table_start: vec![0], ..GroupLayout::default() };
        let id = |n: usize| u32::try_from(n).map_err(|_| anyhow!("{n} does not fit the layout"));
        for sequence in 0..self.count {
            let first_block = sequence * self.blocks_each();
            for block in 0..positions.end.div_ceil(self.block_size) {
                group.block_table.push(id(first_block + block)?);
            }
            for position in positions.clone() {
                layout.positions.push(id(position)?);
                group.slot_mapping.push(id(first_block * self.block_size + position)?);
            }
            layout.seq_lens.push(id(positions.end)?);
            layout.query_start.push(id(layout.positions.len())?);
            group.block_table_start.push(id(group.block_table.len())?);
        }
        layout.groups.push(group);
        Ok(layout)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_step_ends_at_its_positions() {
        let sequences = Sequences { count: 2, capacity: 70, block_size: 32 };
        let layout = sequences.step(37..40).unwrap();
        assert_eq!(layout.positions, [37, 38, 39, 37, 38, 39]);
        assert_eq!(layout.query_start, [0, 3, 6]);
        assert_eq!(layout.seq_lens, [40, 40]);
        let group = &layout.groups[0];
        assert_eq!(group.block_table, [0, 1, 3, 4]);
        assert_eq!(group.slot_mapping, [37, 38, 39, 96 + 37, 96 + 38, 96 + 39]);
        assert_eq!(group.block_table_start, [0, 2, 4]);
        assert_eq!(sequences.num_blocks(), 6);
    }
}
