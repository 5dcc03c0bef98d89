//! The ragged batch of one step as every attention op reads it: tokens packed end to end, never
//! padded.

use crate::check::ensure_batch;
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
