//! One rank's work on a step: block copies, its stage's layers over the packed batch, and on the last
//! stage logits in tiles and a token for every sequence that asks. Knows tensors and requests'
//! parameters; decides nothing about what runs.
//!
//! Shape letters: `T` tokens in the step, `D` hidden size, `R` rows of a tile, `V` vocabulary.

use crate::layout::BatchBuilder;
use crate::pipeline::RankMeter;
use crate::sampler::{Drawn, RequestState, RequestTable, RowScratch, is_plain_greedy, prompt_row, sample_row};
use crate::{EngineError, StepInput};
use pagemill_backend::{Backend, BackendError, BlockCopy, Collective, KvPool, KvPoolSpec, Tensor};
use pagemill_model::{CausalLm, ModelInput, RankContext, Stage};
use pagemill_scheduler::{SampledToken, ScheduledSequence, StepOutput, StepPlan, TokenLogprobs};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Blocks behind the scheduler's pool that only padding writes to (static batches). Padding tokens are
/// computed as sequences of their own, one in each block: they cost what tokens cost in every linear
/// layer, but attend to at most a block of one another, and their logits are left out. So a static
/// batch is a little cheaper here than where it pads rows of a matrix: the baseline is flattered,
/// never wronged.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PaddingBlocks {
    /// The first one's id.
    pub(crate) first: u32,
    /// How many; 0 under continuous batching.
    pub(crate) count: u32,
}

/// A rank: its device, its share of the model, its KV pool, and what it knows of live requests.
pub(crate) struct Worker {
    cx: RankContext,
    model: Box<dyn CausalLm>,
    kv: KvPool,
    padding: PaddingBlocks,
    max_batch_tokens: usize,
    requests: RequestTable,
    batch: BatchBuilder,
    copies: Vec<BlockCopy>,
    rows: Vec<u32>,
    row_jobs: Vec<RowJob>,
    /// One for each thread that has sampled at the same time as others.
    scratches: Mutex<Vec<RowScratch>>,
    /// `Backend::workspace`'s count when the warm-up ended.
    growths_at_start: u64,
    /// Time of the step at hand spent waiting for other stages.
    waited: Duration,
    meter: Arc<RankMeter>,
}

/// A row of the hidden states whose logits are wanted.
#[derive(Clone, Copy, Debug)]
struct RowJob {
    /// Row of the batch.
    row: u32,
    sequence_idx: usize,
    /// Position and id of the prompt token that the row predicts, when its log-probability is wanted.
    prompt_token: Option<(usize, u32)>,
    /// Whether the sequence's `sample` draws from it.
    samples: bool,
}

#[derive(Debug, Default)]
struct RowResult {
    drawn: Vec<Drawn>,
    prompt: Option<TokenLogprobs>,
}

/// Keeps the backend's threads awake while it lives.
struct Forward<'a>(&'a dyn Backend);

impl<'a> Forward<'a> {
    fn begin(backend: &'a dyn Backend) -> Self {
        backend.begin_forward();
        Self(backend)
    }
}

impl Drop for Forward<'_> {
    fn drop(&mut self) {
        self.0.end_forward();
    }
}

impl Worker {
    /// A rank with `kv` as its pool: the scheduler's blocks, then `padding`.
    pub(crate) fn new(
        cx: RankContext,
        model: Box<dyn CausalLm>,
        kv: KvPool,
        padding: PaddingBlocks,
        max_batch_tokens: usize,
    ) -> Self {
        Self {
            cx,
            model,
            kv,
            padding,
            max_batch_tokens,
            requests: RequestTable::default(),
            batch: BatchBuilder::default(),
            copies: Vec::new(),
            rows: Vec::new(),
            row_jobs: Vec::new(),
            scratches: Mutex::default(),
            growths_at_start: 0,
            waited: Duration::ZERO,
            meter: Arc::default(),
        }
    }

    /// Its stage.
    pub(crate) fn stage(&self) -> &Stage {
        self.model.stage()
    }

    /// Its place among its stage's ranks.
    pub(crate) fn rank(&self) -> usize {
        self.cx.collective.rank()
    }

    /// Its peers.
    pub(crate) fn collective(&self) -> Arc<dyn Collective> {
        Arc::clone(&self.cx.collective)
    }

    /// Whether it computes on the host's cores rather than on a device of its own.
    pub(crate) fn shares_cores(&self) -> bool {
        self.cx.backend.info().shares_memory
    }

    /// What it counts.
    pub(crate) fn meter(&self) -> Arc<RankMeter> {
        Arc::clone(&self.meter)
    }

    /// Whether it is the one that samples.
    pub(crate) fn is_output_rank(&self) -> bool {
        self.stage().is_last() && self.rank() == 0
    }

    /// A pool of the shape of its own, with `num_blocks` blocks.
    ///
    /// # Errors
    /// No memory for it.
    pub(crate) fn alloc_kv(&self, num_blocks: usize) -> Result<KvPool, EngineError> {
        Ok(self.cx.backend.alloc_kv(&KvPoolSpec { num_blocks, ..self.kv.spec().clone() })?)
    }

    /// The warm-up is over: exchanges its pool for the real one, forgets its requests, and counts the
    /// workspace's growth from here.
    pub(crate) fn finish_warm_up(&mut self, kv: KvPool, padding: PaddingBlocks) {
        self.kv = kv;
        self.padding = padding;
        self.requests = RequestTable::default();
        self.growths_at_start = self.cx.backend.workspace().1;
        self.meter = Arc::default();
    }

    /// Runs this rank's part of one step. Only the rank that samples has anything in its output.
    ///
    /// # Errors
    /// The device or another rank failed, or the plan contradicts itself: the engine must stop.
    pub(crate) fn run(&mut self, input: &StepInput) -> Result<StepOutput, EngineError> {
        let started = Instant::now();
        self.waited = Duration::ZERO;
        let output = self.compute(input);
        let busy = started.elapsed().saturating_sub(self.waited);
        self.meter.busy_us.fetch_add(u64::try_from(busy.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
        let grown = self.cx.backend.workspace().1 - self.growths_at_start;
        self.meter.workspace_grown.store(grown, Ordering::Relaxed);
        output
    }

    fn compute(&mut self, input: &StepInput) -> Result<StepOutput, EngineError> {
        let plan = &input.plan;
        let mut output = StepOutput { step: plan.step, ..StepOutput::default() };
        if self.stage().is_last() {
            self.requests.update(&input.started, &input.ended, &input.ended_sequences);
        }
        let mut num_padding: usize = plan.sequences.iter().map(|s| s.num_padding).sum();
        self.copy_blocks(plan)?;
        self.batch.clear(self.model.spec().kv_groups.len());
        for sequence in &plan.sequences {
            self.batch.push(sequence, self.kv.spec().block_size)?;
        }
        num_padding -= self.push_padding(num_padding)?;
        self.pass(|worker, hidden| worker.read_logits(plan, hidden, &mut output))?;
        while num_padding > 0 {
            self.batch.clear(self.model.spec().kv_groups.len());
            num_padding -= self.push_padding(num_padding)?;
            self.pass(|_, _| Ok(()))?;
        }
        Ok(output)
    }

    /// Runs the packed batch through this stage: hidden states in from the stage before and out to the
    /// next, or on the last to `read`.
    fn pass(&mut self, read: impl FnOnce(&mut Self, &Tensor) -> Result<(), EngineError>) -> Result<(), EngineError> {
        let incoming = self.receive()?;
        let backend = Arc::clone(&self.cx.backend);
        let forward = Forward::begin(backend.as_ref());
        let hidden = self.forward(incoming)?;
        if self.stage().is_last() {
            read(self, &hidden)?;
            // What this rank is busy with ends with its device, whether anybody reads the result or not.
            return if self.is_output_rank() { Ok(()) } else { Ok(backend.wait()?) };
        }
        drop(forward);
        backend.wait()?;
        let peer = self.stage().index + 1;
        self.waiting(|cx| cx.collective.send(&hidden, peer))
    }

    /// Hidden states `[T, D]` of the stage before; none on the first.
    fn receive(&mut self) -> Result<Option<Tensor>, EngineError> {
        let Some(peer) = self.stage().index.checked_sub(1) else { return Ok(None) };
        let mut hidden = self.cx.backend.temp(self.batch.num_tokens(), self.model.spec().hidden_size)?;
        self.waiting(|cx| cx.collective.recv(&mut hidden, peer))?;
        Ok(Some(hidden))
    }

    fn waiting(&mut self, transfer: impl FnOnce(&RankContext) -> Result<(), BackendError>) -> Result<(), EngineError> {
        let started = Instant::now();
        transfer(&self.cx)?;
        self.waited += started.elapsed();
        Ok(())
    }

    fn copy_blocks(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        if plan.block_copies.is_empty() {
            return Ok(());
        }
        self.copies.clear();
        self.copies.extend(plan.block_copies.iter().map(|copy| BlockCopy { src: copy.src.0, dst: copy.dst.0 }));
        Ok(self.cx.backend.copy_blocks(&mut self.kv, &self.copies)?)
    }

    /// Packs as many of `wanted` padding tokens as the step and the padding blocks have room for.
    /// Returns how many: at least one, unless none is wanted or the real tokens fill the step.
    fn push_padding(&mut self, wanted: usize) -> Result<usize, EngineError> {
        if wanted > 0 && self.padding.count == 0 {
            return Err(EngineError::Internal(format!("{wanted} padding tokens planned, no block for them")));
        }
        let block_size = self.kv.spec().block_size;
        let room = self.max_batch_tokens.saturating_sub(self.batch.num_tokens());
        let count = wanted.min(room).min(self.padding.count as usize * block_size);
        let mut left = count;
        for block in self.padding.first.. {
            if left == 0 {
                break;
            }
            let len = left.min(block_size);
            self.batch.push_padding(block, len, block_size)?;
            left -= len;
        }
        Ok(count)
    }

    /// Runs the stage's layers over the packed batch: hidden states `[T, D]`.
    fn forward(&mut self, incoming: Option<Tensor>) -> Result<Tensor, EngineError> {
        let layout = std::mem::take(&mut self.batch.layout);
        let batch = self.cx.backend.upload_batch(layout, self.kv.spec())?;
        let input = ModelInput { token_ids: &self.batch.token_ids, batch: &batch };
        let hidden = match incoming {
            Some(incoming) => self.model.forward_from(incoming, &input, &mut self.kv)?,
            None => match self.cx.backend.replay(input.token_ids, &batch)? {
                Some(hidden) => hidden,
                None => self.cx.backend.end_recording(self.model.forward(&input, &mut self.kv)?)?,
            },
        };
        self.batch.layout = batch.layout;
        Ok(hidden)
    }

    /// Computes the logits that the plan asks for, tile by tile, and samples from them on one rank.
    fn read_logits(&mut self, plan: &StepPlan, hidden: &Tensor, output: &mut StepOutput) -> Result<(), EngineError> {
        let mut jobs = std::mem::take(&mut self.row_jobs);
        self.list_rows(plan, &mut jobs)?;
        // Bounds the workspace when a whole prompt's log-probabilities are wanted, or many sequences sample
        // over a large vocabulary.
        for tile in jobs.chunks(self.cx.backend.logits_rows().max(1)) {
            self.rows.clear();
            self.rows.extend(tile.iter().map(|job| job.row));
            let mut logits = self.model.logits(hidden, &self.rows)?;
            if !self.is_output_rank() {
                continue;
            }
            let results = self.visit_tile(plan, tile, &mut logits)?;
            drop(logits);
            for (job, result) in tile.iter().zip(results) {
                self.record(&plan.sequences[job.sequence_idx], job, result, output)?;
            }
        }
        jobs.clear();
        self.row_jobs = jobs;
        Ok(())
    }

    /// Lists the rows whose logits are wanted, in the plan's order.
    fn list_rows(&self, plan: &StepPlan, jobs: &mut Vec<RowJob>) -> Result<(), EngineError> {
        jobs.clear();
        for (sequence_idx, sequence) in plan.sequences.iter().enumerate() {
            let first = self.batch.layout.query_start[sequence_idx];
            let last = self.batch.layout.query_start[sequence_idx + 1] - 1;
            if sequence.prompt_logprobs {
                let prompt = &self.request(sequence)?.prompt;
                for (row, position) in (first..=last).zip(sequence.start + 1..) {
                    let Some(&token) = prompt.get(position) else { break };
                    jobs.push(RowJob { row, sequence_idx, prompt_token: Some((position, token)), samples: false });
                }
            }
            if !sequence.sample.is_empty() {
                match jobs.last_mut().filter(|job| job.row == last && job.sequence_idx == sequence_idx) {
                    Some(job) => job.samples = true,
                    None => jobs.push(RowJob { row: last, sequence_idx, prompt_token: None, samples: true }),
                }
            }
        }
        Ok(())
    }

    fn request(&self, sequence: &ScheduledSequence) -> Result<&RequestState, EngineError> {
        self.requests.get(sequence.id.request).ok_or_else(|| {
            EngineError::Internal(format!("request {} was planned but never started", sequence.id.request.0))
        })
    }

    /// Samples a tile's rows `[R, V]`, on as many threads as the backend likes.
    fn visit_tile(&self, plan: &StepPlan, tile: &[RowJob], logits: &mut Tensor) -> Result<Vec<RowResult>, EngineError> {
        let requests: Vec<&RequestState> =
            tile.iter().map(|job| self.request(&plan.sequences[job.sequence_idx])).collect::<Result<_, _>>()?;
        if let Some(results) = self.choose_greedily(plan, tile, &requests, logits)? {
            return Ok(results);
        }
        let slots: Vec<OnceLock<RowResult>> = tile.iter().map(|_| OnceLock::new()).collect();
        self.cx.backend.for_each_row(logits, &|row_idx, row| {
            let (Some(job), Some(request), Some(slot)) = (tile.get(row_idx), requests.get(row_idx), slots.get(row_idx))
            else {
                return;
            };
            let mut scratch = self.take_scratch();
            let mut result = RowResult::default();
            if let Some((_, token)) = job.prompt_token {
                let num_top = request.params.prompt_logprobs.unwrap_or(0);
                result.prompt = Some(prompt_row(row, token, num_top, &mut scratch));
            }
            if job.samples {
                let choices = plan.sequences[job.sequence_idx].sample.iter().map(|id| id.choice);
                result.drawn = sample_row(row, request, choices, &mut scratch);
            }
            self.scratches.lock().unwrap_or_else(PoisonError::into_inner).push(scratch);
            // A row is visited once; a second visit would change nothing.
            let _ = slot.set(result);
        })?;
        slots
            .into_iter()
            .map(|slot| slot.into_inner().ok_or_else(|| EngineError::Internal("a row of logits was not read".into())))
            .collect()
    }

    /// A tile's results where every row only asks for its likeliest token and the device finds it without
    /// the host reading the row.
    fn choose_greedily(
        &self,
        plan: &StepPlan,
        tile: &[RowJob],
        requests: &[&RequestState],
        logits: &Tensor,
    ) -> Result<Option<Vec<RowResult>>, EngineError> {
        let choices = |job: &RowJob| plan.sequences[job.sequence_idx].sample.iter().map(|id| id.choice);
        let plain = tile.iter().zip(requests).all(|(job, request)| {
            job.samples && job.prompt_token.is_none() && choices(job).all(|choice| is_plain_greedy(request, choice))
        });
        let mut largest = vec![None; tile.len()];
        if !plain || !self.cx.backend.argmax_rows(logits, &mut largest)? {
            return Ok(None);
        }
        let results = tile.iter().zip(largest).map(|(job, token)| {
            let drawn = choices(job).map(|_| Drawn::greedy(token)).collect();
            RowResult { drawn, prompt: None }
        });
        Ok(Some(results.collect()))
    }

    fn take_scratch(&self) -> RowScratch {
        let held = self.scratches.lock().unwrap_or_else(PoisonError::into_inner).pop();
        held.unwrap_or_else(|| RowScratch::with_vocab(self.model.spec().vocab_size))
    }

    /// Puts a row's result into the step's output and into the choices' pasts.
    fn record(
        &mut self,
        sequence: &ScheduledSequence,
        job: &RowJob,
        result: RowResult,
        output: &mut StepOutput,
    ) -> Result<(), EngineError> {
        if let (Some((position, _)), Some(logprobs)) = (job.prompt_token, result.prompt) {
            match output.prompt_logprobs.last_mut() {
                Some((id, _, entries)) if *id == sequence.id => entries.push(logprobs),
                _ => output.prompt_logprobs.push((sequence.id, position, vec![logprobs])),
            }
        }
        for (&id, drawn) in sequence.sample.iter().zip(result.drawn) {
            if let Ok(token) = drawn.token {
                let request = self.requests.get_mut(id.request).ok_or_else(|| {
                    EngineError::Internal(format!("request {} samples but never started", id.request.0))
                })?;
                request.choice_mut(id.choice).push(token);
            }
            output.sampled.push(SampledToken { id, token: drawn.token, logprobs: drawn.logprobs });
        }
        Ok(())
    }
}
