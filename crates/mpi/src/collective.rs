//! The collective between ranks that are processes, over MPI. Decides who sums what in which order; the same
//! sums in the same order as between threads, so that results are equal to the last bit.
//!
//! Small tensors go whole to every rank of the stage, and each rank sums all of them (one round); large ones
//! are cut into one slice for each rank, which sums its slice and sends the sum to all (two rounds). Sums run
//! in rank order, element by element, on both ways. No call blocks inside MPI: a lost rank ends every wait.
//!
//! Shape letters: `R` rows, `n` columns of one rank.

use crate::error::ProcessError;
use crate::outbox::Outbox;
use crate::patience::Patience;
use crate::transfer::{Channel, Progress, Transfer};
use pagemill_backend::{BackendError, Collective, Tensor, host_elements, host_elements_mut};
use pagemill_engine::ParallelMode;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Elements up to which a sum goes whole to every rank: 64 KiB.
const WHOLE_ELEMS: usize = 16 << 10;

const TAG_PART: i32 = 1;
const TAG_SUM: i32 = 2;
const TAG_COLUMNS: i32 = 3;
const TAG_HIDDEN: i32 = 4;

/// One rank's way to the others.
pub struct MpiCollective {
    channel: Channel,
    mode: ParallelMode,
    stage: usize,
    rank: usize,
    patience: Patience,
    ending: Arc<Ending>,
    /// One pair for each rank of the stage; this rank's own hold its sums.
    buffers: Mutex<Buffers>,
    /// To the next stage; none on the last.
    outbox: Option<Outbox>,
}

/// Memory that is kept from call to call: it grows to the largest tensor, in the rehearsal.
struct Buffers {
    outgoing: Vec<Vec<f32>>,
    incoming: Vec<Vec<f32>>,
    hidden: Vec<f32>,
    sum: Vec<f32>,
    /// Under way during a call.
    receives: Vec<Option<Transfer<f32>>>,
    sends: Vec<Option<Transfer<f32>>>,
}

/// The end of a world, and why. Set once.
#[derive(Default)]
pub(crate) struct Ending {
    is_set: AtomicBool,
    reason: OnceLock<String>,
}

impl Ending {
    /// Sets it; the first reason stays.
    pub(crate) fn set(&self, reason: &str) {
        self.reason.get_or_init(|| reason.to_owned());
        self.is_set.store(true, Ordering::Release);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.is_set.load(Ordering::Acquire)
    }

    fn reason(&self) -> &str {
        self.reason.get().map_or("", String::as_str)
    }
}

impl MpiCollective {
    /// Rank `world_rank` of `mode`, stage by stage.
    ///
    /// # Errors
    /// The system gave no thread.
    pub(crate) fn new(
        channel: Channel,
        mode: ParallelMode,
        world_rank: usize,
        patience: Patience,
    ) -> Result<Self, ProcessError> {
        let (stage, rank) = (world_rank / mode.tensor_parallel, world_rank % mode.tensor_parallel);
        let ending = Arc::new(Ending::default());
        let outbox = (stage + 1 < mode.pipeline_parallel)
            .then(|| {
                let to = world_rank + mode.tensor_parallel;
                Outbox::open(channel, to, TAG_HIDDEN, patience, Arc::clone(&ending))
            })
            .transpose()?;
        let empty = || vec![Vec::new(); mode.tensor_parallel];
        let buffers = Buffers {
            outgoing: empty(),
            incoming: empty(),
            hidden: Vec::new(),
            sum: Vec::new(),
            receives: Vec::with_capacity(mode.tensor_parallel),
            sends: Vec::with_capacity(mode.tensor_parallel),
        };
        Ok(Self { channel, mode, stage, rank, patience, ending, buffers: Mutex::new(buffers), outbox })
    }

    /// Whether every message of this rank is through: false once a world has ended in the middle of one.
    #[must_use]
    pub fn is_orderly(&self) -> bool {
        !self.ending.is_set()
    }

    fn world_rank(&self, rank: usize) -> usize {
        self.stage * self.mode.tensor_parallel + rank
    }

    /// The other ranks of the stage.
    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.rank;
        (0..self.mode.tensor_parallel).filter(move |rank| *rank != own)
    }

    fn error(op: &'static str, detail: impl std::fmt::Display) -> BackendError {
        BackendError::Collective { op, detail: detail.to_string() }
    }

    fn called_off(&self, op: &'static str) -> BackendError {
        Self::error(op, self.ending.reason())
    }

    /// MPI refused: the other calls of this rank fail from now on, too.
    fn refused(&self, op: &'static str, error: &ProcessError) -> BackendError {
        self.ending.set(&format!("{op}: {error}"));
        Self::error(op, error)
    }

    /// Sends `outgoing[rank]` to every other rank of the stage and receives `incoming_len` elements of each
    /// into `incoming[rank]`.
    fn exchange(
        &self,
        op: &'static str,
        tag: i32,
        buffers: &mut Buffers,
        incoming_len: usize,
    ) -> Result<(), BackendError> {
        if self.ending.is_set() {
            return Err(self.called_off(op));
        }
        let refused = |error: ProcessError| self.refused(op, &error);
        let Buffers { outgoing, incoming, receives, sends, .. } = buffers;
        // Empty, unless a call before this one failed; then there is no further call.
        receives.clear();
        sends.clear();
        for rank in self.peers() {
            let buffer = std::mem::take(&mut incoming[rank]);
            let transfer = self.channel.receive(buffer, incoming_len, self.world_rank(rank), tag);
            receives.push(Some(transfer.map_err(refused)?));
        }
        for rank in self.peers() {
            let buffer = std::mem::take(&mut outgoing[rank]);
            sends.push(Some(self.channel.send(buffer, self.world_rank(rank), tag).map_err(refused)?));
        }
        for poll in 0u32.. {
            let mut is_pending = false;
            for (rank, transfer) in self.peers().zip(&mut *receives) {
                is_pending |= advance(transfer, &mut incoming[rank]).map_err(refused)?;
            }
            for (rank, transfer) in self.peers().zip(&mut *sends) {
                is_pending |= advance(transfer, &mut outgoing[rank]).map_err(refused)?;
            }
            if !is_pending {
                break;
            }
            if self.ending.is_set() {
                return Err(self.called_off(op));
            }
            self.patience.pause(poll);
        }
        for rank in self.peers() {
            let got = incoming[rank].len();
            if got != incoming_len {
                let detail = format!("rank {rank} sent {got} elements, {incoming_len} were expected");
                return Err(self.refused(op, &ProcessError::Mpi { detail }));
            }
        }
        Ok(())
    }

    fn sum_whole(&self, x: &mut [f32], buffers: &mut Buffers) -> Result<(), BackendError> {
        self.peers().for_each(|rank| fill(&mut buffers.outgoing[rank], x));
        self.exchange("all_reduce", TAG_PART, buffers, x.len())?;
        self.sum_in_order(x, buffers);
        Ok(())
    }

    /// `x` is this rank's part and becomes the sum of all ranks' parts, the others' being in `incoming`.
    fn sum_in_order(&self, x: &mut [f32], buffers: &mut Buffers) {
        let Buffers { incoming, sum, .. } = buffers;
        for (rank, received) in incoming.iter().enumerate().take(self.mode.tensor_parallel) {
            let part = if rank == self.rank { &*x } else { &received[..] };
            if rank == 0 {
                fill(sum, part);
            } else {
                sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
            }
        }
        x.copy_from_slice(sum);
    }

    fn sum_in_slices(&self, x: &mut [f32], buffers: &mut Buffers) -> Result<(), BackendError> {
        let (len, num_ranks) = (x.len(), self.mode.tensor_parallel);
        let slice = |rank: usize| slice_of(len, num_ranks, rank);
        let own = slice(self.rank);
        self.peers().for_each(|rank| fill(&mut buffers.outgoing[rank], &x[slice(rank)]));
        self.exchange("all_reduce", TAG_PART, buffers, own.len())?;
        self.sum_in_order(&mut x[own.clone()], buffers);
        // The last slices may be shorter; padded, all messages of a round are equally long.
        let longest = slice(0).len();
        for rank in self.peers() {
            let outgoing = &mut buffers.outgoing[rank];
            fill(outgoing, &x[own.clone()]);
            outgoing.resize(longest, 0.0);
        }
        self.exchange("all_reduce", TAG_SUM, buffers, longest)?;
        for rank in self.peers() {
            let slice = slice(rank);
            let len = slice.len();
            x[slice].copy_from_slice(&buffers.incoming[rank][..len]);
        }
        Ok(())
    }
}

/// Elements that `rank` of `num_ranks` sums of `len`.
fn slice_of(len: usize, num_ranks: usize, rank: usize) -> Range<usize> {
    let each = len.div_ceil(num_ranks);
    (rank * each).min(len)..((rank + 1) * each).min(len)
}

fn fill(buffer: &mut Vec<f32>, x: &[f32]) {
    buffer.clear();
    if buffer.capacity() < x.len() {
        buffer.reserve_exact(x.len());
    }
    buffer.extend_from_slice(x);
}

/// Polls a transfer that may be over; whether it is still under way. Its buffer goes to `place`.
fn advance(transfer: &mut Option<Transfer<f32>>, place: &mut Vec<f32>) -> Result<bool, ProcessError> {
    let Some(under_way) = transfer.take() else { return Ok(false) };
    match under_way.poll()? {
        Progress::Done(buffer) => *place = buffer,
        Progress::Pending(pending) => *transfer = Some(pending),
    }
    Ok(transfer.is_some())
}

impl Collective for MpiCollective {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.mode.tensor_parallel
    }

    fn all_reduce(&self, x: &mut Tensor) -> Result<(), BackendError> {
        let x = host_elements_mut("all_reduce", x)?;
        if self.mode.tensor_parallel == 1 {
            return Ok(());
        }
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        if x.len() <= WHOLE_ELEMS { self.sum_whole(x, &mut buffers) } else { self.sum_in_slices(x, &mut buffers) }
    }

    fn all_gather_cols(&self, x: &Tensor, out: &mut Tensor) -> Result<(), BackendError> {
        const OP: &str = "all_gather_cols";
        let (rows, cols, num_ranks) = (x.rows(), x.cols(), self.mode.tensor_parallel);
        if (out.rows(), out.cols()) != (rows, cols * num_ranks) {
            let (expected, got) = ((rows, cols * num_ranks), (out.rows(), out.cols()));
            let shape = |(rows, cols): (usize, usize)| format!("[{rows}, {cols}]");
            return Err(BackendError::Shape { op: OP, expected: shape(expected), got: shape(got) });
        }
        let x = host_elements(OP, x)?;
        let out = host_elements_mut(OP, out)?;
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        self.peers().for_each(|rank| fill(&mut buffers.outgoing[rank], x));
        self.exchange(OP, TAG_COLUMNS, &mut buffers, x.len())?;
        for rank in 0..num_ranks {
            let part = if rank == self.rank { x } else { &buffers.incoming[rank][..] };
            let places = out.chunks_exact_mut((cols * num_ranks).max(1));
            for (row, out) in part.chunks_exact(cols.max(1)).zip(places) {
                out[rank * cols..(rank + 1) * cols].copy_from_slice(row);
            }
        }
        Ok(())
    }

    fn send(&self, x: &Tensor, peer: usize) -> Result<(), BackendError> {
        const OP: &str = "send";
        let Some(outbox) = self.outbox.as_ref().filter(|_| peer == self.stage + 1) else {
            return Err(Self::error(OP, format!("stage {} has no link to stage {peer}", self.stage)));
        };
        if outbox.push(host_elements(OP, x)?) { Ok(()) } else { Err(self.called_off(OP)) }
    }

    fn recv(&self, out: &mut Tensor, peer: usize) -> Result<(), BackendError> {
        const OP: &str = "recv";
        if peer + 1 != self.stage {
            return Err(Self::error(OP, format!("stage {} has no link to stage {peer}", self.stage)));
        }
        let shape = format!("[{}, {}]", out.rows(), out.cols());
        let out = host_elements_mut(OP, out)?;
        let refused = |error: ProcessError| self.refused(OP, &error);
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let from = self.world_rank(self.rank) - self.mode.tensor_parallel;
        let buffer = std::mem::take(&mut buffers.hidden);
        let mut transfer = Some(self.channel.receive(buffer, out.len(), from, TAG_HIDDEN).map_err(refused)?);
        for poll in 0u32.. {
            if !advance(&mut transfer, &mut buffers.hidden).map_err(refused)? {
                break;
            }
            if self.ending.is_set() {
                return Err(self.called_off(OP));
            }
            self.patience.pause(poll);
        }
        if buffers.hidden.len() != out.len() {
            let detail = format!("{} elements came for {shape}", buffers.hidden.len());
            return Err(self.refused(OP, &ProcessError::Mpi { detail }));
        }
        out.copy_from_slice(&buffers.hidden);
        Ok(())
    }

    fn abort(&self, reason: &str) {
        self.ending.set(reason);
    }
}
