//! A device that takes a given time for every step and computes nothing: it checks what is uploaded and copies it once,
//! as a device of its own memory does. What it draws follows from the token in front alone: the first column of what
//! flows through a model is that token, and no layer changes it. Takes steps ahead, if it is told to.

use pagemill_backend::sampling::{Choice, Draw, RowOutcome, RowTask};
use pagemill_backend::{
    Activation, AttentionParams, AwaitedToken, Backend, BackendError, BatchLayout, BlockCopy, CheckedLayout,
    CpuBackend, CpuConfig, DeviceBatch, DeviceBuffer, DeviceInfo, KvPool, KvPoolSpec, LinearPart, MAX_QUEUED_STEPS,
    ReadRows, RopeTable, StepsAhead, Tensor, Weight, WeightDesc, host_elements, host_elements_mut,
};
use std::any::Any;
use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Of the zoo's llama.
const HIDDEN_SIZE: usize = 128;

pub struct FreeDevice {
    /// Holds what must exist.
    host: CpuBackend,
    /// Where uploads go.
    pinned: Mutex<Vec<u32>>,
    step: Duration,
    takes_ahead: bool,
    /// How much longer a step takes than its time, unless another is queued behind it.
    patience: Duration,
    queue: Mutex<Queue>,
}

/// Outcomes on their way, oldest first, and when they are there.
#[derive(Default)]
struct Queue {
    steps: VecDeque<(Instant, Vec<Option<RowOutcome>>)>,
    /// Of the step queued last.
    last: Vec<Option<RowOutcome>>,
}

impl FreeDevice {
    pub fn new(step: Duration, takes_ahead: bool, patience: Duration) -> Self {
        let config = CpuConfig { num_threads: Some(1), ..CpuConfig::default() };
        let host = CpuBackend::new(config).unwrap();
        Self { host, pinned: Mutex::default(), step, takes_ahead, patience, queue: Mutex::default() }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hidden states of these tokens.
    fn hidden(&self, ids: &[u32]) -> Result<Tensor, BackendError> {
        let mut hidden = self.host.temp(ids.len(), HIDDEN_SIZE)?;
        let rows = host_elements_mut("hidden", &mut hidden).unwrap().chunks_exact_mut(HIDDEN_SIZE);
        rows.zip(ids).for_each(|(row, &id)| row[0] = id as f32);
        Ok(hidden)
    }

    fn copy(&self, words: &[&[u32]]) {
        let mut pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        pinned.clear();
        words.iter().for_each(|words| pinned.extend_from_slice(words));
        black_box(&*pinned);
    }
}

type Done = Result<(), BackendError>;

impl Backend for FreeDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { shares_memory: false, ..self.host.info() }
    }

    fn load_weight(&self, desc: WeightDesc, read: &mut ReadRows<'_>) -> Result<Weight, BackendError> {
        self.host.load_weight(desc, read)
    }

    fn load_vector(&self, name: &str, data: &[f32]) -> Result<Tensor, BackendError> {
        self.host.load_vector(name, data)
    }

    fn temp(&self, rows: usize, cols: usize) -> Result<Tensor, BackendError> {
        self.host.temp(rows, cols)
    }

    fn logits_rows(&self) -> usize {
        1024
    }

    fn workspace(&self) -> (usize, u64) {
        self.host.workspace()
    }

    fn alloc_kv(&self, spec: &KvPoolSpec) -> Result<KvPool, BackendError> {
        let layers = (0..spec.layers_per_group).map(|_| Box::new(NoBytes) as _);
        Ok(KvPool::from_buffers(spec.clone(), layers.collect()))
    }

    fn copy_blocks(&self, _kv: &mut KvPool, _copies: &[BlockCopy]) -> Done {
        Ok(())
    }

    fn upload_batch(&self, layout: BatchLayout, kv: &KvPoolSpec) -> Result<DeviceBatch, BackendError> {
        self.upload_checked(CheckedLayout::new(layout, kv)?, kv)
    }

    fn upload_checked(&self, layout: CheckedLayout, kv: &KvPoolSpec) -> Result<DeviceBatch, BackendError> {
        let layout = layout.into_layout_for(kv)?;
        let group = &layout.groups[0];
        self.copy(&[&layout.positions, &group.slot_mapping, &group.block_table_start, &group.block_table]);
        Ok(DeviceBatch { layout, device: None })
    }

    fn begin_forward(&self) {}

    fn end_forward(&self) {}

    fn replay(&self, ids: &[u32], _batch: &DeviceBatch) -> Result<Option<Tensor>, BackendError> {
        self.copy(&[ids]);
        self.hidden(ids).map(Some)
    }

    fn steps_ahead(&self, _vocab_size: usize) -> Option<&dyn StepsAhead> {
        self.takes_ahead.then_some(self as _)
    }

    fn embed(&self, _table: &Weight, ids: &[u32], _scale: f32, out: &mut Tensor) -> Done {
        *out = self.hidden(ids)?;
        Ok(())
    }

    fn rms_norm(&self, x: &Tensor, _weight: &Tensor, _eps: f32, out: &mut Tensor) -> Done {
        copy_first_column(x, out);
        Ok(())
    }

    fn add_rms_norm(&self, _: &mut Tensor, _x: &Tensor, _weight: &Tensor, _eps: f32, _out: &mut Tensor) -> Done {
        Ok(())
    }

    fn add(&self, _residual: &mut Tensor, _x: &Tensor) -> Done {
        Ok(())
    }

    fn linear(&self, x: &Tensor, parts: &mut [LinearPart<'_>]) -> Done {
        parts.iter_mut().for_each(|part| copy_first_column(x, part.out));
        Ok(())
    }

    fn rope(&self, _x: &mut Tensor, _head_dim: usize, _table: &RopeTable, _batch: &DeviceBatch) -> Done {
        Ok(())
    }

    fn kv_write(
        &self,
        _k: &Tensor,
        _v: &Tensor,
        _params: &AttentionParams,
        _batch: &DeviceBatch,
        _kv: &mut KvPool,
    ) -> Done {
        Ok(())
    }

    fn attention(
        &self,
        _q: &Tensor,
        _params: &AttentionParams,
        _batch: &DeviceBatch,
        _kv: &KvPool,
        _out: &mut Tensor,
    ) -> Done {
        Ok(())
    }

    fn gated_activation(&self, _gate: &Tensor, _up: &Tensor, _act: Activation, _out: &mut Tensor) -> Done {
        Ok(())
    }

    fn gather_rows(&self, x: &Tensor, rows: &[u32], out: &mut Tensor) -> Done {
        self.host.gather_rows(x, rows, out)
    }

    fn scale(&self, _x: &mut Tensor, _scale: f32) -> Done {
        Ok(())
    }

    fn soft_cap(&self, _x: &mut Tensor, _cap: f32) -> Done {
        Ok(())
    }

    fn sample_rows(
        &self,
        logits: &Tensor,
        tasks: &[RowTask<'_>],
        outcomes: &mut Vec<Option<RowOutcome>>,
    ) -> Result<bool, BackendError> {
        std::thread::sleep(self.step);
        *outcomes = draw(logits, tasks);
        Ok(true)
    }

    fn to_host(&self, x: &Tensor, out: &mut [f32]) -> Done {
        self.host.to_host(x, out)
    }

    fn for_each_row(&self, x: &mut Tensor, visit: &(dyn Fn(usize, &mut [f32]) + Sync)) -> Done {
        self.host.for_each_row(x, visit)
    }

    fn copy_from_host(&self, data: &[f32], x: &mut Tensor) -> Done {
        self.host.copy_from_host(data, x)
    }
}

impl StepsAhead for FreeDevice {
    fn is_recorded(&self, _batch: &DeviceBatch) -> Result<bool, BackendError> {
        Ok(true)
    }

    fn replay_awaiting(
        &self,
        ids: &[u32],
        awaited: &[AwaitedToken],
        _batch: &DeviceBatch,
    ) -> Result<Tensor, BackendError> {
        self.copy(&[ids]);
        let (mut ids, queue) = (ids.to_vec(), self.queue());
        for &AwaitedToken { token, task } in awaited {
            ids[token as usize] = queue.last[task as usize].as_ref().map_or(0, |outcome| outcome.token);
        }
        self.hidden(&ids)
    }

    fn queue_sampling(&self, logits: &Tensor, tasks: &[RowTask<'_>]) -> Done {
        let mut queue = self.queue();
        assert!(queue.steps.len() < MAX_QUEUED_STEPS, "more steps than may be on their way");
        queue.last = draw(logits, tasks);
        let begins = queue.steps.back().map_or_else(Instant::now, |(at, _)| (*at).max(Instant::now()));
        let outcomes = queue.last.clone();
        queue.steps.push_back((begins + self.step, outcomes));
        Ok(())
    }

    fn is_sampled(&self) -> Result<bool, BackendError> {
        let queue = self.queue();
        let patience = if queue.steps.len() > 1 { Duration::ZERO } else { self.patience };
        Ok(queue.steps.front().unwrap().0 + patience <= Instant::now())
    }

    fn take_sampled(&self, outcomes: &mut Vec<Option<RowOutcome>>) -> Done {
        let (at, drawn) = self.queue().steps.pop_front().unwrap();
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
        *outcomes = drawn;
        Ok(())
    }
}

fn copy_first_column(x: &Tensor, out: &mut Tensor) {
    let (x_cols, cols) = (x.cols(), out.cols());
    let x = host_elements("x", x).unwrap().chunks_exact(x_cols);
    host_elements_mut("out", out).unwrap().chunks_exact_mut(cols).zip(x).for_each(|(out, x)| out[0] = x[0]);
}

/// Depends on the token in front, on the random number, and on what penalties and masks ask for.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // of small numbers
fn draw(logits: &Tensor, tasks: &[RowTask<'_>]) -> Vec<Option<RowOutcome>> {
    let (rows, cols) = (host_elements("logits", logits).unwrap(), logits.cols());
    let outcome = |task: &RowTask<'_>| {
        let Choice::Draw(Draw { uniform, .. }) = task.choice else { return rows[task.row * cols] as u32 + 1 };
        let edits = task.edits.output_counts.len() + task.edits.masked.len();
        rows[task.row * cols] as u32 + 3 + (uniform * 50.0) as u32 + edits as u32
    };
    tasks.iter().map(|task| Some(RowOutcome { token: outcome(task) % 499, report: None })).collect()
}

/// Memory of a pool that nobody reads.
struct NoBytes;

impl DeviceBuffer for NoBytes {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn len_bytes(&self) -> usize {
        0
    }
}
