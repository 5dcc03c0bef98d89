//! What comes back to the host: what was chosen of each row, or whole rows. Decides which kernel chooses, and on how
//! many threads rows are visited; knows no request.

mod tasks;

use crate::device::Device;
use crate::images::Kernels;
use crate::memory::Workspace;
use crate::rows::Function;
use crate::staging::Readback;
use cudarc::driver::result;
use pagemill_backend::BackendError;
use pagemill_backend::sampling::{Choice, RowOutcome, RowTask};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tasks::TaskSampler;

/// Threads that visit rows at most.
const MAX_VISITORS: usize = 16;
/// `LARGEST_THREADS` in sampling.cu.
const LARGEST_THREADS: u32 = 256;
/// Columns of a row that one thread block reads: `LARGEST_COLUMNS`.
const LARGEST_COLUMNS: u32 = 8192;
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

/// The way back of one device.
pub(crate) struct Results {
    device: Arc<Device>,
    workspace: Arc<Workspace>,
    largest: Function,
    tasks: TaskSampler,
    readback: Mutex<Readback>,
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
        })
    }

    /// Bytes held.
    pub(crate) fn len_bytes(&self) -> usize {
        self.tasks.len_bytes()
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
        let is_plain = |(row, task): (usize, &RowTask<'_>)| {
            task.row == row && task.choice == Choice::Largest && task.edits.is_empty() && task.num_top.is_none()
        };
        if tasks.len() == rows && tasks.iter().enumerate().all(is_plain) {
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
        // SAFETY: a word of eight bytes for each row.
        unsafe { result::memset_d8_async(best.address(), 0xff, rows * 8, self.device.stream()) }
            .map_err(|error| self.device.fault("setting memory", error))?;
        let args = LargestArgs { x, best: best.address(), cols };
        let grid_rows = u32::try_from(rows).map_err(|_| self.device.broken("more rows than fit 32 bits"))?;
        let across = cols.div_ceil(LARGEST_COLUMNS);
        // SAFETY: the struct is the kernel's; the op checked that x has so many rows.
        unsafe { self.device.launch(self.largest.0, (grid_rows, across), LARGEST_THREADS, 0, &args) }?;
        let mut readback = self.readback.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the words were set and the kernel has written them.
        let halves = unsafe { readback.read(best.address(), rows * 2) }?;
        outcomes.extend(halves.chunks_exact(2).map(|halves| {
            let (low, high) = (halves[0].to_bits(), halves[1].to_bits());
            let is_finite = high > BEFORE_FINITE && high < BEHIND_FINITE;
            is_finite.then_some(RowOutcome { token: low, report: None })
        }));
        Ok(())
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
