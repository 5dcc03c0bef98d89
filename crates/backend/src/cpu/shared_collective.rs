//! Collectives between ranks that are threads of one process, over the memory they share. Decides who
//! sums what and where hidden states wait between stages; knows no model and no request.
//!
//! Sums run in rank order, element by element, on both ways: small tensors are copied to a mailbox and
//! summed by every rank (one meeting), large ones are summed where they lie, each rank a slice for all
//! (two meetings, no copy). A failed rank ends every wait of every other with an error.

use super::CpuConfig;
use super::check::{elements, elements_mut, shape_error};
use super::host;
use super::rendezvous::{Abort, Bell, MeetingPoint, Patience};
use crate::{BackendError, Collective, Tensor};
use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Elements up to which a sum goes through mailboxes: 64 KiB.
const MAILBOX_ELEMS: usize = 16 << 10;
/// Elements that a rank sums at a time where they lie.
const SUM_BLOCK: usize = 1 << 10;
/// Elements of a cache line: slices of different ranks share none.
const LINE_ELEMS: usize = 16;
/// Hidden states that may wait between two stages.
const LINK_DEPTH: usize = 4;

/// One rank's way to the others.
pub struct SharedCollective {
    world: Arc<World>,
    stage: usize,
    rank: usize,
}

struct World {
    tensor_parallel: usize,
    stages: Vec<StagePlace>,
    /// From stage `s` to `s + 1`, rank `r`: `links[s * tensor_parallel + r]`.
    links: Vec<Link>,
    patience: Patience,
    abort: Abort,
}

/// What the ranks of one stage share.
struct StagePlace {
    meeting: MeetingPoint,
    /// By rank.
    posts: Vec<Post>,
}

/// What ranks do together; all must do the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    SumByMail,
    SumInPlace,
    Gather,
}

/// What a rank shows the others of its stage during a call. What is there twice alternates from call to
/// call: a rank shows the next call's while others still look at this one's, but it is two calls on only
/// after all have met at the next.
struct Post {
    /// Calls of this rank so far.
    round: AtomicUsize,
    /// What it does, and with how many elements: `len * 4 + kind`.
    shown: [AtomicUsize; 2],
    data: AtomicPtr<f32>,
    mailboxes: [Mailbox; 2],
}

/// Written by its rank before a meeting, read by all after it. Its rank writes it again only after the
/// next meeting but one, when all have read.
struct Mailbox(UnsafeCell<Box<[f32]>>);

// SAFETY: `SharedCollective::sum_by_mail` keeps to the order above.
unsafe impl Sync for Mailbox {}

impl CpuConfig {
    /// The same for each of `num_ranks` ranks that share the threads out, the first ones the rest; at
    /// least one each.
    #[must_use]
    pub fn divided(self, num_ranks: usize) -> Vec<Self> {
        let total = self.num_threads.unwrap_or_else(host::usable_cores);
        let num_ranks = num_ranks.max(1);
        let share = |rank| total / num_ranks + usize::from(rank < total % num_ranks);
        (0..num_ranks).map(|rank| Self { num_threads: Some(share(rank).max(1)), ..self }).collect()
    }
}

impl Post {
    fn new() -> Self {
        let mailbox = || Mailbox(UnsafeCell::new(vec![0.0; MAILBOX_ELEMS].into_boxed_slice()));
        Self {
            round: AtomicUsize::new(0),
            shown: [AtomicUsize::new(0), AtomicUsize::new(0)],
            data: AtomicPtr::new(std::ptr::null_mut()),
            mailboxes: [mailbox(), mailbox()],
        }
    }
}

impl SharedCollective {
    /// The ranks of a world of `num_stages` stages of `ranks_per_stage` ranks, stage by stage. They wait
    /// for one another by spinning shortly where each has a core of its own.
    #[must_use]
    pub fn world(ranks_per_stage: usize, num_stages: usize) -> Vec<Self> {
        let num_ranks = ranks_per_stage * num_stages;
        let place = |_| StagePlace {
            meeting: MeetingPoint::new(u32::try_from(ranks_per_stage).unwrap_or(u32::MAX)),
            posts: (0..ranks_per_stage).map(|_| Post::new()).collect(),
        };
        let world = Arc::new(World {
            tensor_parallel: ranks_per_stage,
            stages: (0..num_stages).map(place).collect(),
            links: (0..num_stages.saturating_sub(1) * ranks_per_stage).map(|_| Link::new()).collect(),
            patience: Patience::of(num_ranks, host::usable_cores()),
            abort: Abort::default(),
        });
        (0..num_ranks)
            .map(|at| Self { world: Arc::clone(&world), stage: at / ranks_per_stage, rank: at % ranks_per_stage })
            .collect()
    }

    /// This rank's stage.
    #[must_use]
    pub fn stage(&self) -> usize {
        self.stage
    }

    fn place(&self) -> &StagePlace {
        &self.world.stages[self.stage]
    }

    fn called_off(&self, op: &'static str) -> BackendError {
        BackendError::Collective { op, detail: self.world.abort.reason().to_owned() }
    }

    fn meet(&self, op: &'static str) -> Result<(), BackendError> {
        let World { patience, abort, .. } = &*self.world;
        self.place().meeting.meet(*patience, abort).map_err(|_| self.called_off(op))
    }

    /// The link into or out of this stage.
    fn link(&self, op: &'static str, peer: usize, from: usize, to: usize) -> Result<&Link, BackendError> {
        let at = from * self.world.tensor_parallel + self.rank;
        self.world.links.get(at).filter(|_| to == from + 1).ok_or_else(|| BackendError::Collective {
            op,
            detail: format!("stage {} has no link to stage {peer}", self.stage),
        })
    }

    /// Shows what this rank is about to do; the parity of the call.
    fn show(&self, kind: Kind, len: usize) -> usize {
        let own = &self.place().posts[self.rank];
        let parity = own.round.fetch_add(1, Ordering::Relaxed) % 2;
        own.shown[parity].store(len * 4 + kind as usize, Ordering::Relaxed);
        parity
    }

    /// After a meeting: every rank does the same with as many elements. All ranks find the same.
    fn check_agreement(&self, op: &'static str, parity: usize) -> Result<(), BackendError> {
        let shown = || self.place().posts.iter().map(|post| post.shown[parity].load(Ordering::Relaxed));
        let own = self.place().posts[self.rank].shown[parity].load(Ordering::Relaxed);
        if shown().all(|other| other == own) {
            return Ok(());
        }
        let described: Vec<_> = shown().map(|shown| format!("{} (call kind {})", shown / 4, shown % 4)).collect();
        Err(shape_error(op, "the same call with as many elements on every rank", described.join(", ")))
    }

    fn sum_by_mail(&self, x: &mut [f32]) -> Result<(), BackendError> {
        const OP: &str = "all_reduce";
        let place = self.place();
        let parity = self.show(Kind::SumByMail, x.len());
        {
            // SAFETY: this rank alone writes its mailboxes, and those who read this one did so before
            // the last meeting: see `Mailbox`.
            let mailbox = unsafe { &mut *place.posts[self.rank].mailboxes[parity].0.get() };
            mailbox[..x.len()].copy_from_slice(x);
        }
        self.meet(OP)?;
        self.check_agreement(OP, parity)?;
        for (rank, post) in place.posts.iter().enumerate() {
            // SAFETY: written before the meeting, and not again before the next one.
            let mailbox = unsafe { &*post.mailboxes[parity].0.get() };
            if rank == 0 {
                x.copy_from_slice(&mailbox[..x.len()]);
            } else {
                x.iter_mut().zip(&mailbox[..]).for_each(|(sum, x)| *sum += x);
            }
        }
        Ok(())
    }

    fn sum_in_place(&self, x: &mut [f32]) -> Result<(), BackendError> {
        const OP: &str = "all_reduce";
        let len = x.len();
        self.exchange(OP, Kind::SumInPlace, x.as_mut_ptr(), len, |parts| {
            let each = len.div_ceil(parts.len()).next_multiple_of(LINE_ELEMS);
            let (start, end) = ((self.rank * each).min(len), ((self.rank + 1) * each).min(len));
            let mut sum = [0.0f32; SUM_BLOCK];
            for at in (start..end).step_by(SUM_BLOCK) {
                let sum = &mut sum[..SUM_BLOCK.min(end - at)];
                for (rank, part) in parts.iter().enumerate() {
                    // SAFETY: `exchange` gives live ranges of `len` elements, of which this rank alone
                    // touches `start..end` of every rank's.
                    let part =
                        unsafe { std::slice::from_raw_parts(part.data.load(Ordering::Relaxed).add(at), sum.len()) };
                    if rank == 0 {
                        sum.copy_from_slice(part);
                    } else {
                        sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
                    }
                }
                for part in parts {
                    // SAFETY: as above.
                    let part =
                        unsafe { std::slice::from_raw_parts_mut(part.data.load(Ordering::Relaxed).add(at), sum.len()) };
                    part.copy_from_slice(sum);
                }
            }
        })
    }

    /// Shows `len` elements at `data` to all ranks of the stage, calls `work` with what all show, and
    /// comes back when all have done their work: until then every rank's range stays borrowed by its own
    /// call. Nothing that can fail or wait may happen in `work`.
    fn exchange(
        &self,
        op: &'static str,
        kind: Kind,
        data: *mut f32,
        len: usize,
        work: impl FnOnce(&[Post]),
    ) -> Result<(), BackendError> {
        let place = self.place();
        place.posts[self.rank].data.store(data, Ordering::Relaxed);
        let parity = self.show(kind, len);
        self.meet(op)?;
        // All agree or nobody touches anything.
        self.check_agreement(op, parity)?;
        work(&place.posts);
        place.meeting.meet_again(self.world.patience);
        Ok(())
    }
}

impl Collective for SharedCollective {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world.tensor_parallel
    }

    fn all_reduce(&self, x: &mut Tensor) -> Result<(), BackendError> {
        let x = elements_mut("all_reduce", x)?;
        match x.len() {
            _ if self.world.tensor_parallel == 1 => Ok(()),
            len if len <= MAILBOX_ELEMS => self.sum_by_mail(x),
            _ => self.sum_in_place(x),
        }
    }

    fn all_gather_cols(&self, x: &Tensor, out: &mut Tensor) -> Result<(), BackendError> {
        const OP: &str = "all_gather_cols";
        let (rows, cols, world_size) = (x.rows(), x.cols(), self.world.tensor_parallel);
        super::check::ensure_shape(OP, "out", out, rows, cols * world_size)?;
        let x = elements(OP, x)?;
        let out = elements_mut(OP, out)?;
        // The others only read what is shown.
        let len = x.len();
        self.exchange(OP, Kind::Gather, x.as_ptr().cast_mut(), len, |parts| {
            for (rank, part) in parts.iter().enumerate() {
                // SAFETY: `exchange` gives live ranges of `len` elements, which nobody writes.
                let part = unsafe { std::slice::from_raw_parts(part.data.load(Ordering::Relaxed), len) };
                let places = out.chunks_exact_mut((cols * world_size).max(1));
                for (row, out) in part.chunks_exact(cols.max(1)).zip(places) {
                    out[rank * cols..(rank + 1) * cols].copy_from_slice(row);
                }
            }
        })
    }

    fn send(&self, x: &Tensor, peer: usize) -> Result<(), BackendError> {
        const OP: &str = "send";
        let link = self.link(OP, peer, self.stage, peer)?;
        link.push(elements(OP, x)?, &self.world).ok_or_else(|| self.called_off(OP))
    }

    fn recv(&self, out: &mut Tensor, peer: usize) -> Result<(), BackendError> {
        const OP: &str = "recv";
        let link = self.link(OP, peer, peer, self.stage)?;
        match link.pop(elements_mut(OP, out)?, &self.world) {
            Some(Ok(())) => Ok(()),
            Some(Err(sent)) => Err(shape_error(
                OP,
                format!("{sent} elements, as were sent"),
                format!("[{}, {}]", out.rows(), out.cols()),
            )),
            None => Err(self.called_off(OP)),
        }
    }

    fn abort(&self, reason: &str) {
        self.world.abort.set(reason);
        self.world.stages.iter().for_each(|place| place.meeting.wake());
        self.world.links.iter().for_each(|link| link.bell.ring());
    }
}

/// Hidden states on their way from one rank to the next stage's: a bounded queue of buffers that go
/// round. One thread sends, one receives.
struct Link {
    queue: Mutex<Queue>,
    num_free: AtomicUsize,
    num_full: AtomicUsize,
    bell: Bell,
}

struct Queue {
    free: Vec<Vec<f32>>,
    full: VecDeque<Vec<f32>>,
}

impl Link {
    fn new() -> Self {
        let queue = Queue { free: vec![Vec::new(); LINK_DEPTH], full: VecDeque::with_capacity(LINK_DEPTH) };
        Self {
            queue: Mutex::new(queue),
            num_free: AtomicUsize::new(LINK_DEPTH),
            num_full: AtomicUsize::new(0),
            bell: Bell::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for something to count; `None` when the world has ended.
    fn wait_for(&self, count: &AtomicUsize, world: &World) -> Option<()> {
        self.bell.wait_until(world.patience, || count.load(Ordering::Acquire) > 0 || world.abort.is_set());
        (!world.abort.is_set()).then_some(())
    }

    fn push(&self, x: &[f32], world: &World) -> Option<()> {
        self.wait_for(&self.num_free, world)?;
        let mut buffer = {
            let mut queue = self.lock();
            // The largest step grows all of them at once: the warm-up's, when all are here.
            for free in queue.free.iter_mut().filter(|free| free.capacity() < x.len()) {
                free.reserve_exact(x.len() - free.len());
            }
            queue.free.pop()?
        };
        self.num_free.fetch_sub(1, Ordering::AcqRel);
        buffer.clear();
        buffer.extend_from_slice(x);
        self.lock().full.push_back(buffer);
        self.num_full.fetch_add(1, Ordering::AcqRel);
        self.bell.ring();
        Some(())
    }

    /// Fills `out`; `Err` with the number of elements that came, if it is another.
    fn pop(&self, out: &mut [f32], world: &World) -> Option<Result<(), usize>> {
        self.wait_for(&self.num_full, world)?;
        let buffer = self.lock().full.pop_front()?;
        self.num_full.fetch_sub(1, Ordering::AcqRel);
        let len = buffer.len();
        if len == out.len() {
            out.copy_from_slice(&buffer);
        }
        self.lock().free.push(buffer);
        self.num_free.fetch_add(1, Ordering::AcqRel);
        self.bell.ring();
        Some(if len == out.len() { Ok(()) } else { Err(len) })
    }
}
