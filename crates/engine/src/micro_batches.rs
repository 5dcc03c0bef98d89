//! How many steps are in flight: begins at four, or the number of stages, and grows until the measured
//! throughput stops rising. Measures with decodes over the pool before anybody owns a block of it; knows
//! no scheduler.

use crate::executor::{MicroBatchSample, StartedRequest};
use crate::limits::Limits;
use crate::pipeline::{MAX_MICRO_BATCHES, PipelineExecutor};
use crate::{EngineConfig, EngineError, Executor, SamplingParams, StepInput};
use pagemill_scheduler::{BlockId, RequestId, ScheduledSequence, SequenceId, StepPlan};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The first number tried, where there are not more stages.
const FIRST: usize = 4;
/// A further micro-batch must bring so much, in hundredths, to be worth a longer queue.
const WORTH_PERCENT: f64 = 2.0;
/// Time for one number: enough for a small model to be repeatable, and at least two rounds of any.
const MEASURED: Duration = Duration::from_millis(40);
const ROUNDS_MIN: usize = 2;
const ROUNDS_MAX: usize = 64;
/// Not used by the engine, which counts from 1.
const REQUEST: RequestId = RequestId(0);

/// Settles how many steps `executor` keeps in flight.
///
/// # Errors
/// `micro_batches` out of range; a rank that failed.
pub(crate) fn settle(
    executor: &mut PipelineExecutor,
    config: &EngineConfig,
    limits: &Limits,
    num_blocks: usize,
) -> Result<(), EngineError> {
    let num_stages = executor.num_stages();
    if let Some(count) = config.micro_batches {
        if !(1..=MAX_MICRO_BATCHES).contains(&count) {
            let detail = format!("{count} is not in 1..={MAX_MICRO_BATCHES}");
            return Err(EngineError::Config { key: "micro_batches", detail });
        }
        executor.set_max_in_flight(count);
        return Ok(());
    }
    let num_sequences = limits.max_batch_size.min(num_blocks / limits.groups.len().max(1));
    if num_stages == 1 || !config.continuous_batching || num_sequences == 0 {
        executor.set_max_in_flight(num_stages);
        return Ok(());
    }
    let mut load = Load { block_size: config.block_size, num_groups: limits.groups.len(), num_sequences, step: 0 };
    let mut samples: Vec<MicroBatchSample> = Vec::new();
    let mut best: Option<MicroBatchSample> = None;
    let largest = num_sequences.clamp(num_stages, MAX_MICRO_BATCHES);
    let mut count = FIRST.max(num_stages).min(largest);
    load.begin(executor)?;
    loop {
        executor.set_max_in_flight(count);
        let sample = load.measure(executor, count)?;
        samples.push(sample);
        let rises = best.is_none_or(|best| sample.tokens_per_s > best.tokens_per_s * (1.0 + WORTH_PERCENT / 100.0));
        if rises {
            best = Some(sample);
        }
        let next = (count * 3).div_ceil(2).min(largest);
        if !rises || next == count {
            break;
        }
        count = next;
    }
    load.end(executor)?;
    executor.set_max_in_flight(best.map_or(count, |best| best.micro_batches));
    executor.finish_tuning(&samples);
    Ok(())
}

/// Sequences that decode one token each, over and over.
struct Load {
    block_size: usize,
    num_groups: usize,
    num_sequences: usize,
    step: u64,
}

impl Load {
    fn sequence(&self, at: usize) -> ScheduledSequence {
        let index = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let id = SequenceId { request: REQUEST, choice: index(at) };
        ScheduledSequence {
            id,
            token_ids: vec![0],
            // The block is read whole and its last slot written.
            start: self.block_size - 1,
            block_tables: (0..self.num_groups)
                .map(|group| vec![BlockId(index(at * self.num_groups + group))])
                .collect(),
            drawn_idx: None,
            sample: vec![id],
            prompt_logprobs: false,
            num_padding: 0,
        }
    }

    fn input(&mut self, sequences: Vec<ScheduledSequence>) -> StepInput {
        self.step += 1;
        let plan = StepPlan { step: self.step, sequences, ..StepPlan::default() };
        StepInput { plan, ..StepInput::default() }
    }

    /// Micro-batch `index` of `count`.
    fn share(&mut self, index: usize, count: usize) -> StepInput {
        let range = index * self.num_sequences / count..(index + 1) * self.num_sequences / count;
        let sequences = range.map(|at| self.sequence(at)).collect();
        self.input(sequences)
    }

    /// Makes the request known.
    fn begin(&mut self, executor: &mut PipelineExecutor) -> Result<(), EngineError> {
        let sequence = self.sequence(0);
        let mut input = self.input(vec![sequence]);
        let sampling = Arc::new(SamplingParams::default());
        input.started.push(StartedRequest { id: REQUEST, prompt: vec![0].into(), sampling });
        executor.submit(input)?;
        executor.collect().map(|_| ())
    }

    /// Has the ranks forget it.
    fn end(&mut self, executor: &mut PipelineExecutor) -> Result<(), EngineError> {
        let sequence = ScheduledSequence { sample: Vec::new(), ..self.sequence(0) };
        let mut input = self.input(vec![sequence]);
        input.ended.push(REQUEST);
        executor.submit(input)?;
        executor.collect().map(|_| ())
    }

    /// Tokens per second with `count` steps always in flight.
    fn measure(&mut self, executor: &mut PipelineExecutor, count: usize) -> Result<MicroBatchSample, EngineError> {
        let count = count.min(self.num_sequences);
        for index in 0..count {
            executor.submit(self.share(index, count))?;
        }
        let started = Instant::now();
        let mut num_tokens = 0usize;
        let mut round = 0;
        while round < ROUNDS_MIN || (started.elapsed() < MEASURED && round < ROUNDS_MAX) {
            for index in 0..count {
                num_tokens += executor.collect()?.sampled.len();
                executor.submit(self.share(index, count))?;
            }
            round += 1;
        }
        let seconds = started.elapsed().as_secs_f64();
        for _ in 0..count {
            executor.collect()?;
        }
        #[allow(clippy::cast_precision_loss)] // a count of tokens
        let tokens_per_s = num_tokens as f64 / seconds.max(1e-9);
        Ok(MicroBatchSample { micro_batches: executor.max_in_flight(), tokens_per_s })
    }
}
