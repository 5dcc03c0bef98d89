//! The ragged batch of one step as every attention op reads it: tokens packed end to end, never
//! padded.

use crate::check::{ensure_batch, shape_error};
use crate::{BackendError, DeviceBuffer, KvPoolSpec};

/// Where one cache group's tokens live in the pool, for one step.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct GroupLayout {
    /// `[T]` slot = block_id * block_size + offset, where this step's K and V of each token go.
    pub slot_mapping: Vec<u32>,
    /// Block tables of all sequences, end to end. Entry `j` of a sequence's table holds positions
    /// `[j * block_size, (j + 1) * block_size)`. Entries wholly behind a sliding window may hold
    /// `u32::MAX` and must not be read.
    pub block_table: Vec<u32>,
    /// `[S + 1]` where each sequence's table starts in `block_table`.
    pub block_table_start: Vec<u32>,
}

/// The batch of one step.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct BatchLayout {
    /// `[S + 1]` where each sequence's tokens start in the packed batch; the last entry is `T`.
    pub query_start: Vec<u32>,
    /// `[S]` tokens in the KV cache of each sequence once this step's are written.
    pub seq_lens: Vec<u32>,
    /// `[T]` position of each token in its sequence. Tokens of a sequence are consecutive and end
    /// at `seq_lens - 1`.
    pub positions: Vec<u32>,
    /// One for each cache group of the model.
    pub groups: Vec<GroupLayout>,
}

impl GroupLayout {
    /// `block_table` and `block_table_start` of `seqs` alone.
    fn tables_of(&self, seqs: &[u32]) -> (Vec<u32>, Vec<u32>) {
        let (mut tables, mut starts, mut end) = (Vec::new(), vec![0], 0);
        for seq in seqs.iter().map(|&seq| seq as usize) {
            let (first, last) = (self.block_table_start[seq], self.block_table_start[seq + 1]);
            tables.extend_from_slice(&self.block_table[first as usize..last as usize]);
            end += last - first;
            starts.push(end);
        }
        (tables, starts)
    }
}

impl Clone for GroupLayout {
    fn clone(&self) -> Self {
        let mut copy = Self::default();
        copy.clone_from(self);
        copy
    }

    /// In the memory that is there.
    fn clone_from(&mut self, source: &Self) {
        let Self { slot_mapping, block_table, block_table_start } = self;
        slot_mapping.clone_from(&source.slot_mapping);
        block_table.clone_from(&source.block_table);
        block_table_start.clone_from(&source.block_table_start);
    }
}

impl Clone for BatchLayout {
    fn clone(&self) -> Self {
        let mut copy = Self::default();
        copy.clone_from(self);
        copy
    }

    /// In the memory that is there.
    fn clone_from(&mut self, source: &Self) {
        let Self { query_start, seq_lens, positions, groups } = self;
        query_start.clone_from(&source.query_start);
        seq_lens.clone_from(&source.seq_lens);
        positions.clone_from(&source.positions);
        groups.clone_from(&source.groups);
    }
}

impl BatchLayout {
    /// Sequences in the batch.
    #[must_use]
    pub fn num_seqs(&self) -> usize {
        self.seq_lens.len()
    }

    /// Tokens in the batch.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.positions.len()
    }

    /// Row of the last token of each of `seqs`.
    ///
    /// # Errors
    /// [`BackendError::Shape`] where one of them has no token in the batch.
    pub fn last_rows(&self, seqs: &[u32]) -> Result<Vec<u32>, BackendError> {
        let last_row = |&seq: &u32| match self.query_start.get(seq as usize..)? {
            [first, end, ..] if first < end => Some(end - 1),
            _ => None,
        };
        let missing =
            |seq: &u32| shape_error("last_rows", "a token of each sequence", format!("none of sequence {seq}"));
        seqs.iter().map(|seq| last_row(seq).ok_or_else(|| missing(seq))).collect()
    }

    /// The batch of the last token of each of `seqs` alone, which sees there what it sees here. Copies their block
    /// tables.
    ///
    /// # Errors
    /// As [`Self::last_rows`].
    pub fn last_tokens(&self, seqs: &[u32]) -> Result<Self, BackendError> {
        let rows = self.last_rows(seqs)?;
        let of_rows = |all: &[u32]| rows.iter().map(|&row| all[row as usize]).collect();
        Ok(Self {
            query_start: (0..).take(seqs.len() + 1).collect(),
            seq_lens: seqs.iter().map(|&seq| self.seq_lens[seq as usize]).collect(),
            positions: of_rows(&self.positions),
            groups: self
                .groups
                .iter()
                .map(|group| {
                    let (block_table, block_table_start) = group.tables_of(seqs);
                    GroupLayout { slot_mapping: of_rows(&group.slot_mapping), block_table, block_table_start }
                })
                .collect(),
        })
    }
}

/// A layout in which everything holds that kernels take for granted, for pools of one shape. Checking reads all of it, so
/// it is done where the layout is made, which may be long before the step.
#[derive(Clone, Debug)]
pub struct CheckedLayout {
    layout: BatchLayout,
    num_blocks: usize,
    block_size: usize,
}

impl CheckedLayout {
    /// Checks a layout as [`crate::Backend::upload_batch`] does.
    ///
    /// # Errors
    /// [`BackendError::Shape`], naming the field.
    pub fn new(layout: BatchLayout, kv: &KvPoolSpec) -> Result<Self, BackendError> {
        ensure_batch(&layout, kv)?;
        Ok(Self { layout, num_blocks: kv.num_blocks, block_size: kv.block_size })
    }

    /// The layout, for a pool of this shape: what was found for one of another shape is not taken on trust.
    ///
    /// # Errors
    /// As [`Self::new`], where the shape is another.
    pub fn into_layout_for(self, kv: &KvPoolSpec) -> Result<BatchLayout, BackendError> {
        if (self.num_blocks, self.block_size) != (kv.num_blocks, kv.block_size) {
            ensure_batch(&self.layout, kv)?;
        }
        Ok(self.layout)
    }

    /// A copy, in the memory of `spare`.
    #[must_use]
    pub fn copy_into(&self, mut spare: BatchLayout) -> Self {
        spare.clone_from(&self.layout);
        Self { layout: spare, ..*self }
    }

    /// The layout, to be changed.
    #[must_use]
    pub fn into_layout(self) -> BatchLayout {
        self.layout
    }
}

/// A layout together with the device's copy of it (none on the CPU), made once a step by
/// [`crate::Backend::upload_batch`].
pub struct DeviceBatch {
    /// The host's layout.
    pub layout: BatchLayout,
    /// The device's copy, if the device has memory of its own.
    pub device: Option<Box<dyn DeviceBuffer>>,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Three sequences of 3, 1 and 2 tokens, the second one's table partly behind a window.
    fn batch() -> BatchLayout {
        BatchLayout {
            query_start: vec![0, 3, 4, 6],
            seq_lens: vec![5, 9, 2],
            positions: vec![2, 3, 4, 8, 0, 1],
            groups: vec![GroupLayout {
                slot_mapping: vec![2, 3, 12, 20, 28, 29],
                block_table: vec![0, 3, u32::MAX, 9, 5, 7],
                block_table_start: vec![0, 2, 5, 6],
            }],
        }
    }

    #[test]
    fn last_tokens_keep_their_places_and_tables() {
        let last = batch().last_tokens(&[1, 0]).unwrap();
        assert_eq!(batch().last_rows(&[1, 0]).unwrap(), [3, 2]);
        assert_eq!(
            last,
            BatchLayout {
                query_start: vec![0, 1, 2],
                seq_lens: vec![9, 5],
                positions: vec![8, 4],
                groups: vec![GroupLayout {
                    slot_mapping: vec![20, 12],
                    block_table: vec![u32::MAX, 9, 5, 0, 3],
                    block_table_start: vec![0, 3, 5],
                }],
            }
        );
        let pool = KvPoolSpec {
            num_blocks: 10,
            block_size: 4,
            layers_per_group: 1,
            num_kv_heads: 1,
            head_dim: 8,
            dtype: crate::DType::F32,
        };
        ensure_batch(&batch(), &pool).unwrap();
        ensure_batch(&last, &pool).unwrap();
        assert_eq!(batch().last_tokens(&[]).unwrap().num_seqs(), 0);
    }

    #[test]
    fn a_sequence_without_a_token_has_no_last_one() {
        let mut batch = batch();
        batch.query_start[2] = 3;
        for seq in [1, 3, u32::MAX] {
            let error = batch.last_tokens(&[0, seq]).unwrap_err().to_string();
            assert!(error.contains(&format!("none of sequence {seq}")), "{error}");
        }
    }
}
