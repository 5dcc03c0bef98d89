//! What comes back to the host: logits row by row, or only the column of each row's largest. Decides on how many
//! threads rows are visited; knows no request.

use crate::device::Device;
use crate::images::Kernels;
use crate::memory::Workspace;
use crate::rows::Function;
use crate::staging::Readback;
use cudarc::driver::result;
use pagemill_backend::BackendError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Threads that visit rows at most.
const MAX_VISITORS: usize = 16;
const ARGMAX_THREADS: u32 = 256;
/// Columns of a row that one block reads at least.
const ARGMAX_COLUMNS: u32 = 8192;
/// What the kernel writes for a row that holds a NaN.
const NOT_A_NUMBER: u64 = u64::MAX;

/// `ArgmaxArgs` in rows.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct ArgmaxArgs {
    x: u64,
    best: u64,
    cols: u32,
}

/// The way back of one device.
pub(crate) struct Results {
    device: Arc<Device>,
    workspace: Arc<Workspace>,
    argmax: Function,
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
            argmax: Function(kernels.get("argmax_f32")?),
            readback: Mutex::new(Readback::new(device)),
        })
    }

    /// The column of each row's largest element of x `[rows, cols]`, f32.
    pub(crate) fn argmax(&self, x: u64, cols: u32, out: &mut [Option<u32>]) -> Result<(), BackendError> {
        let rows = u32::try_from(out.len()).map_err(|_| self.device.broken("more rows than fit 32 bits"))?;
        let ranks = self.workspace.take(out.len() * 8)?;
        // SAFETY: a word of eight bytes for each row.
        unsafe { result::memset_d8_async(ranks.address(), 0, out.len() * 8, self.device.stream()) }
            .map_err(|error| self.device.fault("zeroing memory", error))?;
        let args = ArgmaxArgs { x, best: ranks.address(), cols };
        let across = cols.div_ceil(ARGMAX_COLUMNS);
        // SAFETY: the struct is the kernel's; the op checked that x has a row for each of `out`.
        unsafe { self.device.launch(self.argmax.0, (rows, across), ARGMAX_THREADS, 0, &args) }?;
        let mut readback = self.readback.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the words were zeroed and the kernel has written them.
        let halves = unsafe { readback.read(ranks.address(), out.len() * 2) }?;
        for (out, halves) in out.iter_mut().zip(halves.chunks_exact(2)) {
            let (low, high) = (halves[0].to_bits(), halves[1].to_bits());
            let rank = u64::from(high) << 32 | u64::from(low);
            *out = (rank != NOT_A_NUMBER).then_some(u32::MAX - low);
        }
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
