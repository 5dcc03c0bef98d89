//! What comes back to the host: what was chosen of each row, or whole rows. Decides which kernel chooses, and on how
//! many threads rows are visited; knows no request.

mod queue;
mod tasks;

use crate::device::Device;
use crate::images::Kernels;
use crate::memory::{DeviceMemory, Workspace};
use crate::rows::Function;
use crate::staging::Readback;
use cudarc::driver::result;
use pagemill_backend::BackendError;
use pagemill_backend::sampling::{Choice, RowOutcome, RowTask};
pub(crate) use queue::StepWords;
use queue::{Draws, Form, Queue};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tasks::{OUTCOME_WORDS, TaskSampler, bare_outcome, make_room};

/// Threads that visit rows at most.
const MAX_VISITORS: usize = 16;
/// `LARGEST_THREADS` in sampling.cu.
const LARGEST_THREADS: u32 = 256;
/// Columns of a row that one thread block reads: `LARGEST_COLUMNS`.
const LARGEST_COLUMNS: u32 = 8192;
/// Room for what `largest_f32` leaves at first: of a large batch.
const FIRST_BEST_BYTES: usize = 1 << 12;
/// The places (`place_of` in sampling_team.cuh) of +∞ and of -∞; NaN lies before.
const BEFORE_FINITE: u32 = 0x007f_ffff;
const BEHIND_FINITE: u32 = 0xff80_0000;

/// `LargestArgs` in sampling.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct LargestArgs {
    x: u64,
    best: u64,
    cols: u32,
}

/// Whether the tasks are the first token of each row, in order, and nothing else.
fn are_largest(tasks: &[RowTask<'_>], rows: usize) -> bool {
    let is_plain = |(row, task): (usize, &RowTask<'_>)| {
        task.row == row && task.choice == Choice::Largest && task.edits.is_empty() && task.num_top.is_none()
    };
    tasks.len() == rows && tasks.iter().enumerate().all(is_plain)
}

/// What `largest_f32` leaves of a row.
fn largest_outcome(words: &[f32]) -> Option<RowOutcome> {
    let (token, place) = (words[0].to_bits(), words[1].to_bits());
    let is_finite = place > BEFORE_FINITE && place < BEHIND_FINITE;
    is_finite.then_some(RowOutcome { token, report: None })
}

/// The way back of one device.
pub(crate) struct Results {
    device: Arc<Device>,
    workspace: Arc<Workspace>,
    largest: Function,
    tasks: TaskSampler,
    readback: Mutex<Readback>,
    ahead: Mutex<Ahead>,
}

/// Of steps that the host has queued and whose draws it has not taken.
struct Ahead {
    queue: Queue,
    /// What `largest_f32` leaves.
    best: DeviceMemory,
}

impl Results {
    /// Looks the kernel up.
    pub(crate) fn new(
        device: &Arc<Device>,
        kernels: &Kernels,
        workspace: &Arc<Workspace>,
    ) -> Result<Self, BackendError> {
        Ok(Self {
            device: Arc::clone(device),
            workspace: Arc::clone(workspace),
            largest: Function(kernels.get("largest_f32")?),
            tasks: TaskSampler::new(device, kernels)?,
            readback: Mutex::new(Readback::new(device)),
            ahead: Mutex::new(Ahead {
                queue: Queue::new(device, kernels)?,
                best: DeviceMemory::take(device, FIRST_BEST_BYTES, "sampling")?,
            }),
        })
    }

    /// Bytes held.
    pub(crate) fn len_bytes(&self) -> usize {
        self.tasks.len_bytes() + self.ahead().best.len()
    }

    /// Runs the tasks over logits `[rows, cols]`, f32; every task's row is below `rows`. False: not taken.
    pub(crate) fn sample(
        &self,
        logits: u64,
        (rows, cols): (usize, u32),
        tasks: &[RowTask<'_>],
        outcomes: &mut Vec<Option<RowOutcome>>,
    ) -> Result<bool, BackendError> {
        outcomes.clear();
        if tasks.is_empty() {
            return Ok(true);
        }
        if are_largest(tasks, rows) {
            return self.largest(logits, cols, rows, outcomes).map(|()| true);
        }
        self.tasks.run(logits, cols, tasks, outcomes)
    }

    /// The first of every row of x `[rows, cols]`, f32.
    fn largest(
        &self,
        x: u64,
        cols: u32,
        rows: usize,
        outcomes: &mut Vec<Option<RowOutcome>>,
    ) -> Result<(), BackendError> {
        let best = self.workspace.take(rows * 8)?;
        self.launch_largest(x, cols, rows, best.address())?;
        let mut readback = self.readback.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the words were set and the kernel has written them.
        let words = unsafe { readback.read(best.address(), rows * 2) }?;
        outcomes.extend(words.chunks_exact(2).map(largest_outcome));
        Ok(())
    }

    /// Queues the search for the first of every row of x `[rows, cols]`, f32, into `rows` words of eight bytes at `best`.
    fn launch_largest(&self, x: u64, cols: u32, rows: usize, best: u64) -> Result<(), BackendError> {
        self.device.bind()?;
        // SAFETY: a word of eight bytes for each row.
        unsafe { result::memset_d8_async(best, 0xff, rows * 8, self.device.stream()) }
            .map_err(|error| self.device.fault("setting memory", error))?;
        let args = LargestArgs { x, best, cols };
        let grid_rows = u32::try_from(rows).map_err(|_| self.device.broken("more rows than fit 32 bits"))?;
        let across = cols.div_ceil(LARGEST_COLUMNS);
        // SAFETY: the struct is the kernel's; the op checked that x has so many rows.
        unsafe { self.device.launch(self.largest.0, (grid_rows, across), LARGEST_THREADS, 0, &args) }
    }

    fn ahead(&self) -> MutexGuard<'_, Ahead> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether tasks without reports over rows of so many columns can be queued.
    pub(crate) fn takes_ahead(&self, cols: u32) -> bool {
        self.tasks.takes_cols(cols)
    }

    /// As [`Self::sample`], of tasks without reports, but returns at once.
    pub(crate) fn queue(
        &self,
        logits: u64,
        (rows, cols): (usize, u32),
        tasks: &[RowTask<'_>],
    ) -> Result<(), BackendError> {
        let mut ahead = self.ahead();
        let Ahead { queue, best } = &mut *ahead;
        queue.ensure_room()?;
        let (address, form) = if are_largest(tasks, rows) {
            make_room(&self.device, best, rows * 8)?;
            self.launch_largest(logits, cols, rows, best.address())?;
            (best.address(), Form::Largest)
        } else {
            let address = self.tasks.queue(logits, cols, tasks)?;
            let not_taken = || self.device.broken(format!("rows of {cols} columns cannot be sampled ahead"));
            (address.ok_or_else(not_taken)?, Form::Outcome)
        };
        // SAFETY: the kernels above leave the draws there, and only those of a later step overwrite them.
        unsafe { queue.push(Draws { address, form, num_tasks: tasks.len() }) }
    }

    /// Whether the outcomes queued first are there.
    pub(crate) fn is_sampled(&self) -> Result<bool, BackendError> {
        self.ahead().queue.is_ready()
    }

    /// Waits for the outcomes queued first.
    pub(crate) fn take_sampled(&self, outcomes: &mut Vec<Option<RowOutcome>>) -> Result<(), BackendError> {
        outcomes.clear();
        self.ahead().queue.pop(|form, words| match form {
            Form::Largest => outcomes.extend(words.chunks_exact(2).map(largest_outcome)),
            Form::Outcome => outcomes.extend(words.chunks_exact(OUTCOME_WORDS).map(bare_outcome)),
        })
    }

    /// Brings the ids of the next step, with draws of the tasks queued last in their places.
    ///
    /// # Safety
    /// As [`Queue::begin_step`].
    pub(crate) unsafe fn begin_step(&self, words: StepWords) -> Result<(), BackendError> {
        // SAFETY: this function's contract.
        unsafe { self.ahead().queue.begin_step(words) }
    }

    /// Copies f32 elements to the host.
    pub(crate) fn to_host(&self, x: u64, out: &mut [f32]) -> Result<(), BackendError> {
        let mut readback = self.readback.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the op checked that x has as many elements as `out`.
        out.copy_from_slice(unsafe { readback.read(x, out.len()) }?);
        Ok(())
    }

    /// Calls `visit` for each row of x `[rows, cols]` in a copy on the host.
    pub(crate) fn visit(
        &self,
        x: u64,
        rows: usize,
        cols: usize,
        visit: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) -> Result<(), BackendError> {
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        let mut readback = self.readback.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the op gave x's own shape.
        let floats = unsafe { readback.read(x, rows * cols) }?;
        let visitors = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_VISITORS).min(rows);
        if visitors == 1 {
            floats.chunks_exact_mut(cols).enumerate().for_each(|(idx, row)| visit(idx, row));
            return Ok(());
        }
        let next = AtomicUsize::new(0);
        let taken: Vec<Mutex<&mut [f32]>> = floats.chunks_exact_mut(cols).map(Mutex::new).collect();
        std::thread::scope(|scope| {
            for _ in 0..visitors {
                scope.spawn(|| {
                    while let Some((idx, row)) =
                        Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|idx| taken.get(idx).map(|row| (idx, row)))
                    {
                        visit(idx, &mut row.lock().unwrap_or_else(PoisonError::into_inner));
                    }
                });
            }
        });
        Ok(())
    }
}
