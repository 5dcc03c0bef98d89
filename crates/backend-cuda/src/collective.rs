//! Collectives between ranks, each with a GPU of its own: threads of one process, or a process each (`process`).
//! Decides which way a tensor takes: small sums in one launch over peer memory where the GPUs of a process reach one
//! another (`one_shot`), everything else by NCCL; hidden states between stages beside what is computed (`link`). Knows
//! no model.
//!
//! Ranks may also share a GPU, to try a layout out where there are too few: NCCL refuses that, so everything goes
//! over device memory then. What waits there takes room from what it waits for: no layout to serve with.
//!
//! A call returns when its work is on the rank's stream; only [`Collective::recv`] waits. While the backend rehearses
//! nothing is exchanged: ranks allocate then, each in its own time, and a kernel that waits for a peer could make the
//! driver of both wait.

mod inbox;
mod link;
mod nccl;
mod one_shot;
mod process;
mod verdict;

use crate::CudaBackend;
use crate::check::{Elem, View, view, view_f32};
use crate::device::Device;
use crate::images::Kernels;
use crate::memory::DeviceMemory;
use crate::rows::Function;
use cudarc::driver::{result, sys};
use link::{Incoming, Outgoing, Place};
use nccl::{Communicator, DataType, Range};
use one_shot::{AddNorm, OneShot, Part};
use pagemill_backend::check::{ensure, ensure_shape};
use pagemill_backend::{BackendError, Collective, Norm, Tensor};
pub use process::{Seat, WorldIds};
use std::sync::Arc;
use verdict::{Verdict, Watchdog};

/// Bytes of the sums that are tried at start: NCCL connects for each size's way when it first comes.
const TRIAL_BYTES: [usize; 4] = [4 << 10, 1 << 20, 8 << 20, 64 << 20];

/// Which way a sum takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumBy {
    /// One launch over peer memory.
    OneShot,
    /// NCCL.
    Nccl,
}

/// `MarkArgs` in all_reduce.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct MarkArgs {
    word: u64,
}

/// One rank's way to the others.
pub struct CudaCollective {
    // Fields are dropped in this order: the watch before what it watches over.
    _watchdog: Arc<Watchdog>,
    verdict: Arc<Verdict>,
    one_shot: Option<OneShot>,
    /// Between the ranks of the stage; none where a stage of several has one rank, or ranks share a GPU.
    communicator: Option<Arc<Communicator>>,
    outgoing: Option<Outgoing>,
    incoming: Option<Incoming>,
    mark: Function,
    mark_address: u64,
    device: Arc<Device>,
    backend: Arc<CudaBackend>,
    stage: usize,
    rank: usize,
    ranks_per_stage: usize,
}

impl Drop for CudaCollective {
    fn drop(&mut self) {
        // NCCL lets go of a communicator only when no recorded step refers to it.
        self.backend.forget_records();
    }
}

impl CudaCollective {
    /// The ranks of a world as threads of this process, on `backends`, stage by stage of `ranks_per_stage` each,
    /// connected and tried. Blocks for a second or so.
    ///
    /// # Errors
    /// No NCCL; GPUs that cannot be connected.
    pub fn world(backends: &[Arc<CudaBackend>], ranks_per_stage: usize) -> Result<Vec<Self>, BackendError> {
        let refuse = |detail: String| Err(BackendError::Collective { op: "ranks", detail });
        if ranks_per_stage == 0 || backends.is_empty() || !backends.len().is_multiple_of(ranks_per_stage) {
            return refuse(format!("{} ranks make no stages of {ranks_per_stage}", backends.len()));
        }
        let devices: Vec<Arc<Device>> = backends.iter().map(|backend| Arc::clone(backend.device())).collect();
        let shares = |at: usize| devices[..at].iter().any(|other| other.ordinal() == devices[at].ordinal());
        let share_gpu = (0..devices.len()).any(shares);
        if share_gpu {
            devices.iter().for_each(|device| device.free_late());
        }
        let verdict = Arc::new(Verdict::new(&devices, 0, Arc::default())?);
        let mut communicators = Vec::new();
        let mut ranks = Vec::with_capacity(backends.len());
        let is_alone = backends.len() == 1;
        for (stage, (backends, devices)) in
            backends.chunks(ranks_per_stage).zip(devices.chunks(ranks_per_stage)).enumerate()
        {
            let first_rank = stage * ranks_per_stage;
            let mut ends: Vec<Option<Arc<Communicator>>> = vec![None; ranks_per_stage];
            if (ranks_per_stage > 1 || is_alone) && !share_gpu {
                ends = Communicator::connect(devices)?.into_iter().map(Arc::new).map(Some).collect();
                communicators.extend(ends.iter().flatten().cloned());
            }
            let kernels: Vec<&Kernels> = backends.iter().map(|backend| backend.kernels()).collect();
            let one_shots = OneShot::connect(devices, &kernels, &verdict, first_rank)?;
            let mut one_shots = one_shots.into_iter().flatten();
            for (rank, (backend, communicator)) in backends.iter().zip(ends).enumerate() {
                ranks.push(Unwatched {
                    one_shot: one_shots.next(),
                    communicator,
                    outgoing: None,
                    incoming: None,
                    backend: Arc::clone(backend),
                    stage,
                    rank,
                });
            }
        }
        for from in 0..backends.len().saturating_sub(ranks_per_stage) {
            let to = from + ranks_per_stage;
            let place = |at: usize| Place { device: &devices[at], workspace: backends[at].temporaries() };
            let (outgoing, incoming, ends) = link::connect(&place(from), &place(to), &verdict)?;
            communicators.extend(ends);
            ranks[from].outgoing = Some(outgoing);
            ranks[to].incoming = Some(incoming);
        }
        let watchdog = Arc::new(Watchdog::start(&verdict, backends.len(), communicators)?);
        let world = ranks
            .into_iter()
            .enumerate()
            .map(|(at, rank)| rank.watched(at, ranks_per_stage, &verdict, &watchdog))
            .collect::<Result<Vec<_>, _>>()?;
        try_all(&world)?;
        Ok(world)
    }

    /// This rank's stage.
    #[must_use]
    pub fn stage(&self) -> usize {
        self.stage
    }

    /// `x` becomes the sum of all ranks' `x`, on the way given. False, and nothing done, where there is no such way
    /// for `x`: on every rank of the stage alike.
    ///
    /// # Errors
    /// As [`Collective::all_reduce`].
    pub fn all_reduce_by(&self, way: SumBy, x: &mut Tensor) -> Result<bool, BackendError> {
        const OP: &str = "all_reduce";
        self.verdict.check(OP)?;
        let part = part(OP, x)?;
        match (way, &self.one_shot, &self.communicator) {
            (SumBy::OneShot, Some(one_shot), _) => one_shot.sum(part),
            (SumBy::Nccl, _, Some(communicator)) => {
                // SAFETY: the tensor's own range, which only ops on this stream use.
                self.marked(|stream| unsafe { communicator.all_reduce(range_of(part), stream.cast()) })?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Enqueues a collective of NCCL between two marks, by which the watch knows how long it takes.
    fn marked(&self, enqueue: impl FnOnce(sys::CUstream) -> Result<(), BackendError>) -> Result<(), BackendError> {
        self.mark()?;
        enqueue(self.device.stream())?;
        self.mark()
    }

    /// Columns at `from` beside zeros, summed over ranks that share a GPU.
    fn gather_by_sum(&self, from: u64, out: &mut Tensor) -> Result<(), BackendError> {
        let (to, rows) = (view_f32("all_gather_cols", out)?, out.rows());
        let pitch = out.cols() * 4;
        let row_bytes = pitch / self.ranks_per_stage;
        self.device.bind()?;
        // SAFETY: the tensor's own elements.
        unsafe { result::memset_d8_async(to, 0, rows * pitch, self.device.stream()) }
            .map_err(|error| self.device.fault("zeroing memory", error))?;
        self.copy_columns(from, to + (self.rank * row_bytes) as u64, rows, row_bytes, pitch)?;
        self.all_reduce(out)
    }

    fn mark(&self) -> Result<(), BackendError> {
        let args = MarkArgs { word: self.mark_address };
        // SAFETY: the struct is the kernel's; the word is this rank's and lives as long as the verdict.
        unsafe { self.device.launch(self.mark.0, (1, 1), 1, 0, &args) }
    }

    fn ensure_beside(&self, op: &'static str, peer: usize, is_beside: bool) -> Result<(), BackendError> {
        ensure(op, is_beside, || (format!("a stage beside {}", self.stage), format!("stage {peer}")))
    }

    /// Columns at `from` `[R, n]` to `to` columns of a tensor of `pitch` bytes a row. Both f32.
    fn copy_columns(
        &self,
        from: u64,
        to: u64,
        rows: usize,
        row_bytes: usize,
        pitch: usize,
    ) -> Result<(), BackendError> {
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcHost: std::ptr::null(),
            srcDevice: from,
            srcArray: std::ptr::null_mut(),
            srcPitch: row_bytes,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: std::ptr::null_mut(),
            dstDevice: to,
            dstArray: std::ptr::null_mut(),
            dstPitch: pitch,
            WidthInBytes: row_bytes,
            Height: rows,
        };
        self.device.bind()?;
        // SAFETY: the caller's ranges: `rows` rows of `row_bytes`, `pitch` apart where they go.
        unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, self.device.stream()) }
            .result()
            .map_err(|error| self.device.fault("copying columns", error))
    }
}

impl Collective for CudaCollective {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.ranks_per_stage
    }

    fn all_reduce(&self, x: &mut Tensor) -> Result<(), BackendError> {
        const OP: &str = "all_reduce";
        self.verdict.check(OP)?;
        if self.device.is_rehearsing() || x.rows() * x.cols() == 0 {
            return part(OP, x).map(|_| ());
        }
        if self.all_reduce_by(SumBy::OneShot, x)? || self.all_reduce_by(SumBy::Nccl, x)? {
            return Ok(());
        }
        match &self.one_shot {
            Some(one_shot) => one_shot.sum_in_pieces(part(OP, x)?),
            None if self.ranks_per_stage == 1 => Ok(()),
            None => {
                Err(BackendError::Collective { op: OP, detail: "the stage's GPUs do not reach one another".into() })
            }
        }
    }

    fn all_reduce_add_norm(
        &self,
        x: &mut Tensor,
        residual: &mut Tensor,
        norm: Norm<'_>,
        out: &mut Tensor,
    ) -> Result<bool, BackendError> {
        const OP: &str = "all_reduce_add_norm";
        self.verdict.check(OP)?;
        let Some(one_shot) = &self.one_shot else { return Ok(false) };
        let (rows, cols) = (x.rows(), x.cols());
        ensure_shape(OP, "residual", residual, rows, cols)?;
        ensure_shape(OP, "weight", norm.weight, 1, cols)?;
        ensure_shape(OP, "out", out, rows, cols)?;
        let (part, place) = (part(OP, x)?, view(OP, out)?);
        if self.device.is_rehearsing() || part.x.elem != place.elem {
            return Ok(false);
        }
        let (residual, weight) = (view_f32(OP, residual)?, view_f32(OP, norm.weight)?);
        one_shot.sum_add_norm(part, &AddNorm { residual, weight, out: place.address, eps: norm.eps })
    }

    fn all_gather_cols(&self, x: &Tensor, out: &mut Tensor) -> Result<(), BackendError> {
        const OP: &str = "all_gather_cols";
        self.verdict.check(OP)?;
        let (rows, cols) = (x.rows(), x.cols());
        ensure_shape(OP, "out", out, rows, cols * self.ranks_per_stage)?;
        let (from, to) = (view_f32(OP, x)?, view_f32(OP, out)?);
        let (len, row_bytes) = (rows * cols * 4, cols * 4);
        if self.communicator.is_none() && self.ranks_per_stage > 1 {
            return self.gather_by_sum(from, out);
        }
        // Ranks one after the other, as they come; where there is one row, that is the result.
        let gathered = (rows > 1).then(|| self.backend.temporaries().take(len * self.ranks_per_stage)).transpose()?;
        let Some(communicator) = self.communicator.as_ref().filter(|_| len > 0 && !self.device.is_rehearsing()) else {
            return match self.ranks_per_stage {
                1 => self.copy_columns(from, to, rows, row_bytes, row_bytes),
                _ => Ok(()),
            };
        };
        let landing = gathered.as_ref().map_or(to, |gathered| gathered.address());
        let range = Range { address: from, count: rows * cols, data_type: DataType::F32 };
        // SAFETY: x's own elements, and room for those of all ranks, which only ops on this stream use.
        self.marked(|stream| unsafe { communicator.all_gather(range, landing, stream.cast()) })?;
        if gathered.is_some() {
            for rank in 0..self.ranks_per_stage {
                let (from, to) = (landing + (rank * len) as u64, to + (rank * row_bytes) as u64);
                self.copy_columns(from, to, rows, row_bytes, row_bytes * self.ranks_per_stage)?;
            }
        }
        Ok(())
    }

    fn send(&self, x: &Tensor, peer: usize) -> Result<(), BackendError> {
        const OP: &str = "send";
        self.verdict.check(OP)?;
        self.ensure_beside(OP, peer, peer == self.stage + 1)?;
        match &self.outgoing {
            Some(outgoing) => outgoing.send(x, view_f32(OP, x)?),
            None => self.ensure_beside(OP, peer, false),
        }
    }

    fn recv(&self, out: &mut Tensor, peer: usize) -> Result<(), BackendError> {
        const OP: &str = "recv";
        self.verdict.check(OP)?;
        self.ensure_beside(OP, peer, peer + 1 == self.stage)?;
        match &self.incoming {
            Some(incoming) => incoming.recv(out, view_f32(OP, out)?),
            None => self.ensure_beside(OP, peer, false),
        }
    }

    fn abort(&self, reason: &str) {
        self.verdict.pass(reason);
    }
}

fn part(op: &'static str, x: &Tensor) -> Result<Part, BackendError> {
    Ok(Part { x: view(op, x)?, rows: x.rows(), cols: x.cols() })
}

fn range_of(part: Part) -> Range {
    let View { address, elem } = part.x;
    let data_type = match elem {
        Elem::F32 => DataType::F32,
        Elem::Bf16 => DataType::Bf16,
    };
    Range { address, count: part.rows * part.cols, data_type }
}

/// A rank that is connected.
struct Unwatched {
    one_shot: Option<OneShot>,
    communicator: Option<Arc<Communicator>>,
    outgoing: Option<Outgoing>,
    incoming: Option<Incoming>,
    backend: Arc<CudaBackend>,
    stage: usize,
    rank: usize,
}

impl Unwatched {
    /// Rank `at` of those of this process.
    fn watched(
        self,
        at: usize,
        ranks_per_stage: usize,
        verdict: &Arc<Verdict>,
        watchdog: &Arc<Watchdog>,
    ) -> Result<CudaCollective, BackendError> {
        Ok(CudaCollective {
            _watchdog: Arc::clone(watchdog),
            verdict: Arc::clone(verdict),
            one_shot: self.one_shot,
            communicator: self.communicator,
            outgoing: self.outgoing,
            incoming: self.incoming,
            mark: Function(self.backend.kernels().get("mark_collective")?),
            mark_address: verdict.mark_address(at),
            device: Arc::clone(self.backend.device()),
            backend: self.backend,
            stage: self.stage,
            rank: self.rank,
            ranks_per_stage,
        })
    }
}

/// Every way once, on all ranks at the same time: what cannot work fails at start, and what NCCL sets up at the
/// first call is there when a step is recorded.
fn try_all(world: &[CudaCollective]) -> Result<(), BackendError> {
    let outcomes: Vec<Result<(), BackendError>> = std::thread::scope(|scope| {
        let tries: Vec<_> = world
            .iter()
            .map(|rank| scope.spawn(move || rank.try_ways().inspect_err(|error| rank.abort(&error.to_string()))))
            .collect();
        let panicked = || BackendError::Collective { op: "ranks", detail: "a rank panicked while it was tried".into() };
        tries.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(panicked()))).collect()
    });
    outcomes.into_iter().collect()
}

impl CudaCollective {
    fn try_ways(&self) -> Result<(), BackendError> {
        let most = TRIAL_BYTES.iter().copied().max().unwrap_or(0);
        if let Some(communicator) = &self.communicator {
            let memory = DeviceMemory::zeroed(&self.device, most, "trying out collectives")?;
            let gathered = DeviceMemory::take(&self.device, most * self.ranks_per_stage, "trying out collectives")?;
            for bytes in TRIAL_BYTES {
                for (elem, size) in [(DataType::F32, 4), (DataType::Bf16, 2)] {
                    let range = Range { address: memory.address(), count: bytes / size, data_type: elem };
                    // SAFETY: ranges of their own, kept until the wait below.
                    self.marked(|stream| unsafe { communicator.all_reduce(range, stream.cast()) })?;
                }
                let range = Range { address: memory.address(), count: bytes / 4, data_type: DataType::F32 };
                // SAFETY: as above.
                self.marked(|stream| unsafe { communicator.all_gather(range, gathered.address(), stream.cast()) })?;
            }
            self.device.synchronize()?;
        }
        let buffer = self.backend.temporaries().take(4096)?;
        let mut x = Tensor::from_buffer(1, 1024, pagemill_backend::DType::F32, Box::new(buffer));
        if self.incoming.is_some() {
            self.recv(&mut x, self.stage - 1)?;
        }
        if self.outgoing.is_some() {
            self.send(&x, self.stage + 1)?;
        }
        self.device.synchronize()
    }
}
