//! The ragged batch of one step as every attention op reads it: tokens packed end to end, never
//! padded.

use crate::DeviceBuffer;

/// Where one cache group's tokens live in the pool, for one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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

/// A layout together with the device's copy of it (none on the CPU), made once a step by
/// [`crate::Backend::upload_batch`].
pub struct DeviceBatch {
    /// The host's layout.
    pub layout: BatchLayout,
    /// The device's copy, if the device has memory of its own.
    pub device: Option<Box<dyn DeviceBuffer>>,
}
