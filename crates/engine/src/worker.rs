//! One rank's work on a step: block copies, its stage's layers over the packed batch, and on the last
//! stage logits in tiles and a token for every sequence that asks. Knows tensors and requests'
//! parameters; decides nothing about what runs.
//!
//! Shape letters: `T` tokens in the step, `D` hidden size, `R` rows of a tile, `V` vocabulary.

mod queued;

use crate::draws::Draws;
use crate::layout::{BatchBuilder, Packing};
use crate::packer::SpentBatches;
use crate::pipeline::RankMeter;
use crate::sampler::{
    Drawn, RequestState, RequestTable, RowScratch, choice_task, drawn, prompt_logprobs, prompt_row, prompt_task,
    sample_row,
};
use crate::wanted_rows::WantedRows;
use crate::{EngineError, StepInput};
use pagemill_backend::sampling::RowTask;
use pagemill_backend::{Backend, BackendError, BlockCopy, Collective, KvPool, KvPoolSpec, Tensor};
use pagemill_model::{CausalLm, ModelInput, OutputRows, RankContext, Stage};
use pagemill_scheduler::{SampledToken, ScheduledSequence, SequenceId, StepOutput, StepPlan, TokenLogprobs};
use queued::QueuedSteps;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Blocks behind the scheduler's pool that only padding writes to (static batches). Padding tokens are
/// computed as sequences of their own, one in each block: they cost what tokens cost in every linear
/// layer (but, beside prompts, behind the last one's K and V), but attend to at most a block of one another, and their
/// logits are left out. So a static batch is a little cheaper here than where it pads rows of a matrix: the baseline is
/// flattered, never wronged.
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
    /// Where batches go that were packed elsewhere.
    spent_batches: SpentBatches,
    draws: Draws,
    /// What the step before drew, not yet in the requests' pasts.
    drawn: Vec<(SequenceId, u32)>,
    queued: QueuedSteps,
    copies: Vec<BlockCopy>,
    /// What the last layer gives of the batch at hand.
    wanted: WantedRows,
    rows: Vec<u32>,
    row_jobs: Vec<RowJob>,
    /// One for each thread that has sampled at the same time as others.
    scratches: Mutex<Vec<RowScratch>>,
    /// `Backend::workspace`'s count when the warm-up ended.
    growths_at_start: u64,
    /// Time of the step at hand spent waiting for other stages.
    waited: Duration,
    host: HostMarks,
    meter: Arc<RankMeter>,
}

/// A row of the hidden states whose logits are wanted.
#[derive(Clone, Copy, Debug)]
struct RowJob {
    /// Row of the hidden states.
    row: u32,
    sequence_idx: usize,
    /// Position and id of the prompt token that the row predicts, when its log-probability is wanted.
    prompt_token: Option<(usize, u32)>,
    /// Whether the sequence's `sample` draws from it.
    samples: bool,
}

#[derive(Debug, Default)]
struct RowResult {
    /// What the first choice of the row draws.
    first: Option<Drawn>,
    /// What the others draw, where several choices part at this row.
    others: Vec<Drawn>,
    prompt: Option<TokenLogprobs>,
}

/// Points in time from which the host's share of a step is told.
#[derive(Clone, Copy, Debug, Default)]
struct HostMarks {
    /// The step before left its draws in the host's hands.
    drawn: Option<Instant>,
    /// The batch is on the device.
    packed: Option<Instant>,
    /// The device has begun.
    launched: Option<Instant>,
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
            spent_batches: SpentBatches::default(),
            draws: Draws::default(),
            drawn: Vec::new(),
            queued: QueuedSteps::default(),
            copies: Vec::new(),
            wanted: WantedRows::default(),
            rows: Vec::new(),
            row_jobs: Vec::new(),
            scratches: Mutex::default(),
            growths_at_start: 0,
            waited: Duration::ZERO,
            host: HostMarks::default(),
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

    /// How it knows the draws of the step before.
    pub(crate) fn set_draws(&mut self, draws: Draws) {
        self.draws = draws;
    }

    /// Where its batches go once it is done with them.
    pub(crate) fn set_spent_batches(&mut self, spent_batches: SpentBatches) {
        self.spent_batches = spent_batches;
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
        self.drawn.clear();
        self.growths_at_start = self.cx.backend.workspace().1;
        self.meter = Arc::default();
    }

    /// The shape of its pool.
    pub(crate) fn pool(&self) -> &KvPoolSpec {
        self.kv.spec()
    }

    /// How its batches are packed.
    pub(crate) fn packing(&self) -> Packing {
        Packing { num_groups: self.model.spec().kv_groups.len(), block_size: self.kv.spec().block_size }
    }

    /// Runs this rank's part of one step, whose plan may have been `packed` already. Only the rank that samples has
    /// anything in its output.
    ///
    /// # Errors
    /// The device or another rank failed, or the plan contradicts itself: the engine must stop.
    pub(crate) fn run(&mut self, input: &StepInput, packed: Option<BatchBuilder>) -> Result<StepOutput, EngineError> {
        let started = Instant::now();
        self.waited = Duration::ZERO;
        let drawn_before = self.host.drawn.take().filter(|_| !input.after_idle);
        (self.host.packed, self.host.launched) = (None, None);
        let output = self.compute(input, packed);
        self.count_host_time(started, drawn_before);
        self.count_step(started.elapsed().saturating_sub(self.waited));
        output
    }

    /// Counts a step that kept the rank `busy` so long.
    fn count_step(&self, busy: Duration) {
        self.meter.busy_us.fetch_add(u64::try_from(busy.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
        let grown = self.cx.backend.workspace().1 - self.growths_at_start;
        self.meter.workspace_grown.store(grown, Ordering::Relaxed);
    }

    /// Counts the host's share of a step that began at `started`; `drawn_before`: when the draws of the step before
    /// were there, if this one could have followed at once.
    fn count_host_time(&self, started: Instant, drawn_before: Option<Instant>) {
        let add = |counter: &AtomicU64, from: Option<Instant>, to: Option<Instant>| {
            let time = from.zip(to).map_or(Duration::ZERO, |(from, to)| to.saturating_duration_since(from));
            counter.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        };
        add(&self.meter.layout_ns, Some(started), self.host.packed);
        if self.stage().count == 1 {
            add(&self.meter.exposed_ns, drawn_before, self.host.launched);
        }
    }

    fn compute(&mut self, input: &StepInput, packed: Option<BatchBuilder>) -> Result<StepOutput, EngineError> {
        let plan = &input.plan;
        self.draws.begin_step()?;
        let sampled = Vec::with_capacity(if self.is_output_rank() { plan.sequences.len() } else { 0 });
        let mut output = StepOutput { step: plan.step, sampled, ..StepOutput::default() };
        self.copy_blocks(plan)?;
        let mut spent = None;
        match packed {
            Some(batch) => spent = Some(std::mem::replace(&mut self.batch, batch)),
            None => self.batch.pack(plan, self.packing())?,
        }
        self.batch.fill_in(&self.draws)?;
        self.wanted.choose(plan, self.batch.num_tokens());
        let mut num_padding = self.batch.num_padding;
        num_padding -= self.push_padding(num_padding)?;
        self.pass(|worker, hidden| {
            spent.into_iter().for_each(|batch| worker.spent_batches.put(batch));
            worker.update_requests(input)?;
            worker.read_logits(plan, hidden, &mut output)
        })?;
        self.draws.end_step(&output);
        self.wanted = WantedRows::default();
        while num_padding > 0 {
            self.batch.clear(self.packing().num_groups);
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

    /// Runs the stage's layers over the packed batch: hidden states `[T, D]`, on the last stage of the wanted rows.
    fn forward(&mut self, incoming: Option<Tensor>) -> Result<Tensor, EngineError> {
        let (backend, pool) = (self.cx.backend.as_ref(), self.kv.spec());
        let batch = match self.batch.checked.take() {
            Some(layout) => backend.upload_checked(layout, pool)?,
            None => backend.upload_batch(std::mem::take(&mut self.batch.layout), pool)?,
        };
        let packed = *self.host.packed.get_or_insert_with(Instant::now);
        self.host.launched.get_or_insert(packed);
        let input = ModelInput { token_ids: &self.batch.token_ids, batch: &batch, output: self.wanted.output() };
        // A record gives all rows.
        let replayed = match input.output {
            OutputRows::All if incoming.is_none() => backend.replay(input.token_ids, &batch)?,
            _ => None,
        };
        let hidden = match (replayed, incoming) {
            (Some(hidden), _) => {
                self.host.launched = Some(Instant::now());
                hidden
            }
            (None, Some(incoming)) => self.model.forward_from(incoming, &input, &mut self.kv)?,
            (None, None) => backend.end_recording(self.model.forward(&input, &mut self.kv)?)?,
        };
        self.batch.layout = batch.layout;
        Ok(hidden)
    }

    /// Takes into the requests' pasts what the step before drew, then what has begun and ended since. Not before the
    /// layers are launched, which need none of it: a device need not wait for this.
    fn update_requests(&mut self, input: &StepInput) -> Result<(), EngineError> {
        self.take_in_draws()?;
        self.end_requests();
        self.requests.update(&input.started, &input.ended, &input.ended_sequences);
        Ok(())
    }

    /// Takes into the requests' pasts what was drawn last.
    fn take_in_draws(&mut self) -> Result<(), EngineError> {
        for (id, token) in self.drawn.drain(..) {
            let request = self
                .requests
                .get_mut(id.request)
                .ok_or_else(|| EngineError::Internal(format!("request {} samples but never started", id.request.0)))?;
            request.choice_mut(id.choice).push(token);
        }
        Ok(())
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
            self.host.drawn = Some(Instant::now());
            drop(logits);
            for (job, result) in tile.iter().zip(results) {
                self.record(&plan.sequences[job.sequence_idx], job, result, output);
            }
        }
        jobs.clear();
        self.row_jobs = jobs;
        Ok(())
    }

    /// Lists the rows whose logits are wanted, in the plan's order.
    fn list_rows(&self, plan: &StepPlan, jobs: &mut Vec<RowJob>) -> Result<(), EngineError> {
        jobs.clear();
        if let OutputRows::LastOf(seqs) = self.wanted.output() {
            let job = |(row, &seq)| RowJob { row, sequence_idx: seq as usize, prompt_token: None, samples: true };
            jobs.extend((0..).zip(seqs).map(job));
            return Ok(());
        }
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

    /// Samples a tile's rows `[R, V]`: on the device if it takes them, else on as many threads as it likes.
    fn visit_tile(&self, plan: &StepPlan, tile: &[RowJob], logits: &mut Tensor) -> Result<Vec<RowResult>, EngineError> {
        let requests: Vec<&RequestState> =
            tile.iter().map(|job| self.request(&plan.sequences[job.sequence_idx])).collect::<Result<_, _>>()?;
        if let Some(results) = self.sample_on_device(plan, tile, &requests, logits)? {
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
                let mut drawn = sample_row(row, request, choices, &mut scratch).into_iter();
                result.first = drawn.next();
                result.others = drawn.collect();
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

    /// A tile's results from a device that samples where the logits are; `None` from one that does not take them.
    fn sample_on_device(
        &self,
        plan: &StepPlan,
        tile: &[RowJob],
        requests: &[&RequestState],
        logits: &Tensor,
    ) -> Result<Option<Vec<RowResult>>, EngineError> {
        let choices = |job: &RowJob| {
            let sample = if job.samples { plan.sequences[job.sequence_idx].sample.as_slice() } else { &[] };
            sample.iter().map(|id| id.choice)
        };
        let mut tasks: Vec<RowTask<'_>> = Vec::with_capacity(tile.len());
        for (row, (job, &request)) in tile.iter().zip(requests).enumerate() {
            tasks.extend(job.prompt_token.map(|(_, token)| prompt_task(row, request, token)));
            tasks.extend(choices(job).map(|choice| choice_task(row, request, choice, 0)));
        }
        let mut outcomes = Vec::with_capacity(tasks.len());
        if !self.cx.backend.sample_rows(logits, &tasks, &mut outcomes)? {
            return Ok(None);
        }
        let mut outcomes = outcomes.into_iter();
        let mut next =
            || outcomes.next().ok_or_else(|| EngineError::Internal("the device left a row of logits out".into()));
        let results = tile.iter().map(|job| {
            let prompt = job.prompt_token.map(|_| next().map(prompt_logprobs)).transpose()?;
            let mut choices = choices(job);
            let first = choices.next().map(|_| next().map(drawn)).transpose()?;
            let others = choices.map(|_| next().map(drawn)).collect::<Result<_, _>>()?;
            Ok(RowResult { first, others, prompt })
        });
        results.collect::<Result<_, _>>().map(Some)
    }

    fn take_scratch(&self) -> RowScratch {
        let held = self.scratches.lock().unwrap_or_else(PoisonError::into_inner).pop();
        held.unwrap_or_else(|| RowScratch::with_vocab(self.model.spec().vocab_size))
    }

    /// Puts a row's result into the step's output, and sets it aside for the choices' pasts.
    fn record(&mut self, sequence: &ScheduledSequence, job: &RowJob, result: RowResult, output: &mut StepOutput) {
        if let (Some((position, _)), Some(logprobs)) = (job.prompt_token, result.prompt) {
            match output.prompt_logprobs.last_mut() {
                Some((id, _, entries)) if *id == sequence.id => entries.push(logprobs),
                _ => output.prompt_logprobs.push((sequence.id, position, vec![logprobs])),
            }
        }
        for (&id, drawn) in sequence.sample.iter().zip(result.first.into_iter().chain(result.others)) {
            self.record_draw(id, drawn, output);
        }
    }

    /// Puts what a choice drew into the step's output, and sets it aside for its past.
    fn record_draw(&mut self, id: SequenceId, drawn: Drawn, output: &mut StepOutput) {
        self.drawn.extend(drawn.token.as_ref().ok().map(|&token| (id, token)));
        output.sampled.push(SampledToken { id, token: drawn.token, logprobs: drawn.logprobs });
    }
}
