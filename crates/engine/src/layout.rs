//! From a plan to the ragged batch that attention reads: positions, slots and block tables, packed end
//! to end. Pure arithmetic over vectors that are reused from step to step.
//!
//! ```text
//! sequence s owns tokens  [query_start[s], query_start[s + 1])   of the batch
//!                entries  [block_table_start[s], ..[s + 1])      of each group's block_table
//! position p lives in     entry p / block_size, offset p % block_size
//! ```

use crate::EngineError;
use crate::draws::Draws;
use pagemill_backend::{AwaitedToken, BackendError, BatchLayout, CheckedLayout, KvPoolSpec};
use pagemill_scheduler::{BlockId, ScheduledSequence, StepPlan};
use std::ops::Range;

/// What packing needs to know of a rank's pool; the same on all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packing {
    /// Cache groups.
    pub(crate) num_groups: usize,
    /// Tokens in a block.
    pub(crate) block_size: usize,
}

/// The batch being packed, with its token ids.
#[derive(Clone, Debug, Default)]
pub(crate) struct BatchBuilder {
    /// `[T]`, aligned with `layout.positions`.
    pub(crate) token_ids: Vec<u32>,
    /// The rest of the batch; empty while it is `checked`.
    pub(crate) layout: BatchLayout,
    /// The rest of the batch, once it was checked and until it is uploaded or changed.
    pub(crate) checked: Option<CheckedLayout>,
    /// Tokens that the step before draws, as (place among `token_ids`, place among its draws): 0 stands for them
    /// until [`Self::fill_in`].
    awaited: Vec<(usize, u32)>,
    /// Padding slots that the plan asks for and [`Self::push_padding`] packs.
    pub(crate) num_padding: usize,
}

impl BatchBuilder {
    /// Packs all of a plan's sequences, over what was packed before.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub(crate) fn pack(&mut self, plan: &StepPlan, packing: Packing) -> Result<(), EngineError> {
        self.clear(packing.num_groups);
        plan.sequences.iter().try_for_each(|sequence| self.push(sequence, packing.block_size))
    }

    /// Becomes a copy of another batch, in its own memory.
    pub(crate) fn copy_from(&mut self, other: &Self) {
        self.uncheck();
        self.token_ids.clone_from(&other.token_ids);
        self.awaited.clone_from(&other.awaited);
        self.num_padding = other.num_padding;
        match &other.checked {
            Some(checked) => self.checked = Some(checked.copy_into(std::mem::take(&mut self.layout))),
            None => self.layout.clone_from(&other.layout),
        }
    }

    /// Has the layout checked for a pool, so that nobody has to at the upload.
    ///
    /// # Errors
    /// What kernels could not take for granted.
    pub(crate) fn check(&mut self, pool: &KvPoolSpec) -> Result<(), BackendError> {
        self.checked = Some(CheckedLayout::new(std::mem::take(&mut self.layout), pool)?);
        Ok(())
    }

    /// Makes the layout one that may be changed.
    fn uncheck(&mut self) {
        if let Some(checked) = self.checked.take() {
            self.layout = checked.into_layout();
        }
    }

    /// Puts the tokens that the step before drew in their places.
    ///
    /// # Errors
    /// [`EngineError::Internal`] when one is not known.
    pub(crate) fn fill_in(&mut self, draws: &Draws) -> Result<(), EngineError> {
        for (at, idx) in self.awaited.drain(..) {
            self.token_ids[at] = draws.token(idx).ok_or_else(|| {
                EngineError::Internal(format!("token {at} of the batch: draw {idx} of the step before is unknown"))
            })?;
        }
        Ok(())
    }

    /// Gives the places of tokens that the step before draws to a device that knows them: they stay 0 here.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub(crate) fn take_awaited(&mut self, awaited: &mut Vec<AwaitedToken>) -> Result<(), EngineError> {
        for (at, task) in self.awaited.drain(..) {
            awaited.push(AwaitedToken { token: to_u32(at)?, task });
        }
        Ok(())
    }

    /// Empties the batch, keeping its vectors.
    pub(crate) fn clear(&mut self, num_groups: usize) {
        self.uncheck();
        self.token_ids.clear();
        self.awaited.clear();
        self.num_padding = 0;
        let layout = &mut self.layout;
        layout.query_start.clear();
        layout.query_start.push(0);
        layout.seq_lens.clear();
        layout.positions.clear();
        layout.groups.resize_with(num_groups, Default::default);
        for group in &mut layout.groups {
            group.slot_mapping.clear();
            group.block_table.clear();
            group.block_table_start.clear();
            group.block_table_start.push(0);
        }
    }

    /// Tokens packed so far.
    pub(crate) fn num_tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// Packs a sequence's tokens; one that the step before draws is to be filled in.
    ///
    /// # Errors
    /// [`EngineError::Internal`] when the plan contradicts itself: wrong number of tables, a table that
    /// does not cover its tokens, sizes beyond u32.
    pub(crate) fn push(&mut self, sequence: &ScheduledSequence, block_size: usize) -> Result<(), EngineError> {
        let len = sequence.token_ids.len();
        if sequence.block_tables.len() != self.layout.groups.len() || len == 0 {
            return Err(EngineError::Internal(format!(
                "plan of {:?}: {} block tables for {} cache groups, {len} tokens",
                sequence.id,
                sequence.block_tables.len(),
                self.layout.groups.len()
            )));
        }
        self.push_tokens(sequence)?;
        for (group_idx, table) in sequence.block_tables.iter().enumerate() {
            self.push_slots(group_idx, sequence, block_size)?;
            self.layout.groups[group_idx].block_table.extend(table.iter().map(|block| block.0));
            self.end_table(group_idx, 0)?;
        }
        self.push_positions(sequence.start, len)
    }

    /// Packs a sequence's token ids, at least one; places for those that the step before draws.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub(crate) fn push_tokens(&mut self, sequence: &ScheduledSequence) -> Result<(), EngineError> {
        if sequence.token_ids.is_empty() {
            return Err(EngineError::Internal(format!("plan of {:?}: 0 tokens", sequence.id)));
        }
        match sequence.drawn_idx {
            // Known to be 0: the plan need not be read.
            Some(_) if sequence.token_ids.len() == 1 => self.token_ids.push(0),
            _ => self.token_ids.extend_from_slice(&sequence.token_ids),
        }
        self.awaited.extend(sequence.drawn_idx.map(|idx| (self.token_ids.len() - 1, idx)));
        self.num_padding += sequence.num_padding;
        Ok(())
    }

    /// Packs the slots of a sequence's tokens in one of its groups.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub(crate) fn push_slots(
        &mut self,
        group_idx: usize,
        sequence: &ScheduledSequence,
        block_size: usize,
    ) -> Result<(), EngineError> {
        let table = sequence.block_tables.get(group_idx).map_or(&[][..], Vec::as_slice);
        let positions = sequence.start..sequence.start + sequence.token_ids.len();
        self.push_slots_of(group_idx, table, positions, block_size).map_err(|detail| {
            EngineError::Internal(format!("plan of {:?}, cache group {group_idx}: {detail}", sequence.id))
        })
    }

    /// The next sequence's table of a group is complete but for `num_missing` entries that are still to be packed.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub(crate) fn end_table(&mut self, group_idx: usize, num_missing: usize) -> Result<(), EngineError> {
        let group = &mut self.layout.groups[group_idx];
        group.block_table_start.push(to_u32(group.block_table.len() + num_missing)?);
        Ok(())
    }

    /// Packs `len ≤ block_size` padding tokens as a sequence of their own that lives in `block`, in
    /// every group: they read nothing but one another, and nobody reads them.
    pub(crate) fn push_padding(&mut self, block: u32, len: usize, block_size: usize) -> Result<(), EngineError> {
        self.uncheck();
        self.token_ids.extend(std::iter::repeat_n(0, len));
        for group_idx in 0..self.layout.groups.len() {
            self.push_slots_of(group_idx, &[BlockId(block)], 0..len, block_size)
                .map_err(|detail| EngineError::Internal(format!("padding block {block}: {detail}")))?;
            self.layout.groups[group_idx].block_table.push(block);
            self.end_table(group_idx, 0)?;
        }
        self.push_positions(0, len)
    }

    /// Ends a sequence: the positions of its tokens.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub(crate) fn push_positions(&mut self, start: usize, len: usize) -> Result<(), EngineError> {
        let (start, end) = (to_u32(start)?, to_u32(start + len)?);
        self.layout.positions.extend(start..end);
        self.layout.seq_lens.push(end);
        self.layout.query_start.push(to_u32(self.layout.positions.len())?);
        Ok(())
    }

    fn push_slots_of(
        &mut self,
        group_idx: usize,
        table: &[BlockId],
        positions: Range<usize>,
        block_size: usize,
    ) -> Result<(), String> {
        let slots = &mut self.layout.groups[group_idx].slot_mapping;
        for position in positions {
            let block = table.get(position / block_size).copied().unwrap_or(BlockId::NONE);
            let slot = (block != BlockId::NONE)
                .then(|| u64::from(block.0) * block_size as u64 + (position % block_size) as u64)
                .and_then(|slot| u32::try_from(slot).ok())
                .ok_or_else(|| format!("position {position} has no slot ({block:?})"))?;
            slots.push(slot);
        }
        Ok(())
    }
}

fn to_u32(value: usize) -> Result<u32, EngineError> {
    u32::try_from(value).map_err(|_| EngineError::Internal(format!("{value} does not fit a batch's 32-bit index")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use pagemill_scheduler::{RequestId, SampledToken, SequenceId, StepOutput};

    fn sequence(start: usize, tokens: &[u32], tables: &[&[u32]]) -> ScheduledSequence {
        ScheduledSequence {
            id: SequenceId { request: RequestId(1), choice: 0 },
            token_ids: tokens.to_vec(),
            start,
            block_tables: tables.iter().map(|table| table.iter().map(|&b| BlockId(b)).collect()).collect(),
            drawn_idx: None,
            sample: vec![],
            prompt_logprobs: false,
            num_padding: 0,
        }
    }

    #[test]
    fn packs_sequences_end_to_end() {
        let mut batch = BatchBuilder::default();
        for _ in 0..2 {
            batch.clear(2);
            batch.push(&sequence(15, &[7, 8, 9], &[&[4, 2], &[u32::MAX - 1, 3]]), 16).unwrap_err();
            batch.clear(2);
            batch.push(&sequence(15, &[7, 8, 9], &[&[4, 2], &[5, 3]]), 16).unwrap();
            batch.push(&sequence(33, &[6], &[&[9, 8, 1], &[u32::MAX, 7, 0]]), 16).unwrap();
            batch.push_padding(11, 2, 16).unwrap();
        }
        assert_eq!(batch.token_ids, [7, 8, 9, 6, 0, 0]);
        let layout = &batch.layout;
        assert_eq!(layout.query_start, [0, 3, 4, 6]);
        assert_eq!(layout.seq_lens, [18, 34, 2]);
        assert_eq!(layout.positions, [15, 16, 17, 33, 0, 1]);
        assert_eq!(layout.groups[0].slot_mapping, [4 * 16 + 15, 2 * 16, 2 * 16 + 1, 16 + 1, 11 * 16, 11 * 16 + 1]);
        assert_eq!(layout.groups[0].block_table, [4, 2, 9, 8, 1, 11]);
        assert_eq!(layout.groups[1].block_table, [5, 3, u32::MAX, 7, 0, 11]);
        assert_eq!(layout.groups[1].block_table_start, [0, 2, 5, 6]);
    }

    #[test]
    fn draws_are_filled_in_where_they_are_awaited() {
        let awaiting = |start, tokens: &[u32], idx| ScheduledSequence {
            drawn_idx: Some(idx),
            ..sequence(start, tokens, &[&[1, 2]])
        };
        let sequences = vec![awaiting(9, &[0], 1), sequence(3, &[7], &[&[5]]), awaiting(16, &[8, 0], 0)];
        let plan = StepPlan { step: 1, sequences, ..StepPlan::default() };
        let mut batch = BatchBuilder::default();
        batch.pack(&plan, Packing { num_groups: 1, block_size: 16 }).unwrap();
        assert_eq!(batch.token_ids, [0, 7, 8, 0]);
        let error = batch.clone().fill_in(&Draws::default()).unwrap_err().to_string();
        assert!(error.contains("token 0 of the batch: draw 1"), "{error}");
        let mut draws = Draws::default();
        let drawn = [41, 42].map(|token| SampledToken { id: plan.sequences[0].id, token: Ok(token), logprobs: None });
        draws.end_step(&StepOutput { sampled: drawn.to_vec(), ..StepOutput::default() });
        batch.fill_in(&draws).unwrap();
        assert_eq!(batch.token_ids, [42, 7, 8, 41]);
    }

    #[test]
    fn refuses_plans_that_contradict_themselves() {
        for (bad, what) in [
            (sequence(0, &[1], &[]), "0 block tables"),
            (sequence(0, &[], &[&[1]]), "0 tokens"),
            (sequence(16, &[1], &[&[1]]), "position 16 has no slot"),
            (sequence(0, &[1], &[&[u32::MAX]]), "position 0 has no slot"),
            (sequence(0, &[1], &[&[u32::MAX - 1]]), "position 0 has no slot"),
        ] {
            let mut batch = BatchBuilder::default();
            batch.clear(1);
            let error = batch.push(&bad, 16).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
    }
}
