//! The largest step, run once before the KV pool is sized: it makes the workspace grow to what any
//! later step can need. Knows limits and shapes; measures nothing itself.

use crate::executor::StartedRequest;
use crate::limits::Limits;
use crate::{SamplingParams, StepInput};
use pagemill_scheduler::{BlockId, RequestId, ScheduledSequence, SequenceId, StepPlan};
use std::sync::Arc;

/// A step of `max_batch_tokens` tokens and the blocks it writes.
pub(crate) struct LargestStep {
    /// The step; its block ids are below `num_blocks`.
    pub(crate) input: StepInput,
    /// Blocks that a pool must have for it.
    pub(crate) num_blocks: usize,
}

/// Builds the step: a prompt whose log-probabilities fill a tile of logits, as many decodes as a batch
/// holds (the first at the last position of the longest sequence), and prompts for the rest.
/// `logits_rows` is the size of a tile.
pub(crate) fn largest_step(limits: &Limits, block_size: usize, logits_rows: usize) -> LargestStep {
    let mut builder = Builder { limits, block_size, next_block: 0, sequences: Vec::new() };
    let mut left = limits.max_batch_tokens;
    let prompt_len = (logits_rows + 1).min(left).min(limits.max_seq_len);
    builder.push(prompt_len, 0);
    builder.sequences[0].prompt_logprobs = true;
    left -= prompt_len;
    for decode in 0..limits.max_batch_size.min(left) {
        let start = if decode == 0 { limits.max_seq_len - 1 } else { 0 };
        builder.push(1, start);
        if let Some(sequence) = builder.sequences.last_mut() {
            sequence.sample = vec![sequence.id];
        }
        left -= 1;
    }
    while left > 0 {
        let len = left.min(limits.max_seq_len);
        builder.push(len, 0);
        left -= len;
    }
    let sampling = SamplingParams {
        temperature: 1.0,
        top_k: Some(1000),
        top_p: 0.9,
        logprobs: Some(20),
        prompt_logprobs: Some(20),
        ..SamplingParams::default()
    };
    let started = StartedRequest { id: RequestId(0), prompt: vec![0; prompt_len].into(), sampling: Arc::new(sampling) };
    LargestStep {
        num_blocks: builder.next_block as usize,
        input: StepInput {
            plan: StepPlan { sequences: builder.sequences, ..StepPlan::default() },
            started: vec![started],
            ..StepInput::default()
        },
    }
}

struct Builder<'a> {
    limits: &'a Limits,
    block_size: usize,
    next_block: u32,
    sequences: Vec<ScheduledSequence>,
}

impl Builder<'_> {
    /// A sequence of `len` tokens from `start`. Written positions have blocks of their own; everything
    /// before them is read from the first of these.
    fn push(&mut self, len: usize, start: usize) {
        let first_written = start / self.block_size;
        let num_entries = (start + len).div_ceil(self.block_size);
        let block_tables = (0..self.limits.groups.len())
            .map(|_| {
                let mut table = vec![BlockId(self.next_block); first_written];
                for _ in first_written..num_entries {
                    table.push(BlockId(self.next_block));
                    self.next_block += 1;
                }
                table
            })
            .collect();
        let choice = u32::try_from(self.sequences.len()).unwrap_or(u32::MAX);
        self.sequences.push(ScheduledSequence {
            id: SequenceId { request: RequestId(0), choice },
            token_ids: vec![0; len],
            start,
            block_tables,
            drawn_idx: None,
            sample: Vec::new(),
            prompt_logprobs: false,
            num_padding: 0,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemill_scheduler::CacheGroup;

    #[test]
    fn fills_the_token_budget_exactly() {
        for (max_batch_size, max_batch_tokens, max_seq_len) in
            [(1, 1, 1), (4, 4, 64), (64, 576, 8192), (64, 576, 100), (2, 40, 33), (300, 300, 20)]
        {
            let groups = vec![CacheGroup::Full, CacheGroup::SlidingWindow { window: 8 }];
            let limits = Limits { max_batch_size, max_batch_tokens, max_seq_len, groups };
            let step = largest_step(&limits, 16, 32);
            assert_eq!(step.input.plan.num_tokens(), max_batch_tokens);
            for sequence in &step.input.plan.sequences {
                let end = sequence.start + sequence.token_ids.len();
                assert!(end <= max_seq_len);
                for table in &sequence.block_tables {
                    assert!(table.len() * 16 >= end);
                    assert!(table.iter().all(|block| (block.0 as usize) < step.num_blocks));
                }
            }
        }
    }
}
