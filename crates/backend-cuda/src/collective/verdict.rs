//! When ranks give up: the first failure of any of them ends every wait of all, on the host and on the GPUs. Watches
//! over waits that last too long and over NCCL's own faults. Knows no tensor.
//!
//! A wait can only last when a rank has stopped working without a word: ranks run the same ops at the same time.

use super::nccl::Communicator;
use crate::device::Device;
use crate::memory::PinnedMemory;
use pagemill_backend::BackendError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a rank waits for another one inside a collective.
pub(crate) const PATIENCE: Duration = Duration::from_secs(8);
/// How often the watch looks.
const PERIOD: Duration = Duration::from_millis(20);
/// How long it keeps a fault of NCCL's to itself: that a process has died is told by whoever watches over processes, by
/// name, but NCCL may notice first.
const NAMING: Duration = Duration::from_millis(300);
/// How long it tries to abort communicators that a thread is in a call of.
const ABORT_FOR: Duration = Duration::from_secs(1);

/// Words of the page that host and kernels share, a cache line apart.
const WORDS_PER_LINE: usize = 32;
const HALT: usize = 0;

/// Why the ranks have given up, if they have, and the words by which kernels hear and tell of it. Of the ranks of this
/// process: whoever watches over other processes passes it by the reason that it was made with.
pub(crate) struct Verdict {
    reason: Arc<OnceLock<String>>,
    /// This process's first rank in the world; the others follow.
    first_rank: usize,
    /// `[1 + 2 * ranks]` lines: halt, then for each rank whom it waited for in vain, and how often it has gone into
    /// and come out of a collective of NCCL.
    words: PinnedMemory,
}

fn report_word(rank: usize) -> usize {
    (1 + 2 * rank) * WORDS_PER_LINE
}

fn mark_word(rank: usize) -> usize {
    (2 + 2 * rank) * WORDS_PER_LINE
}

impl Verdict {
    /// For the ranks on `devices`, of which the first is `first_rank` of the world. None yet, unless `reason` is there.
    pub(crate) fn new(
        devices: &[Arc<Device>],
        first_rank: usize,
        reason: Arc<OnceLock<String>>,
    ) -> Result<Self, BackendError> {
        let Some(first) = devices.first() else {
            return Err(BackendError::Collective { op: "ranks", detail: "there are none".into() });
        };
        let len = (1 + 2 * devices.len()) * WORDS_PER_LINE * 4;
        devices.iter().for_each(|device| device.join(&reason));
        Ok(Self { reason, first_rank, words: PinnedMemory::take(first, len, "what ranks tell one another")? })
    }

    /// Ends every wait with `reason`, unless one was given before. Never blocks.
    pub(crate) fn pass(&self, reason: &str) {
        self.reason.get_or_init(|| reason.to_owned());
        self.halt();
    }

    /// Lets no kernel wait any more.
    fn halt(&self) {
        self.words.word(HALT).store(1, Ordering::Release);
    }

    /// Why, if it has been passed.
    pub(crate) fn reason(&self) -> Option<&str> {
        self.reason.get().map(String::as_str)
    }

    /// An error once it has been passed.
    pub(crate) fn check(&self, op: &'static str) -> Result<(), BackendError> {
        match self.reason() {
            Some(reason) => Err(BackendError::Collective { op, detail: reason.to_owned() }),
            None => Ok(()),
        }
    }

    /// Where kernels see that nobody may wait any more.
    pub(crate) fn halt_address(&self) -> u64 {
        self.words.word_address(HALT)
    }

    /// Where kernels of this process's rank `rank` tell whom they waited for in vain: 1 + the rank within the stage.
    pub(crate) fn report_address(&self, rank: usize) -> u64 {
        self.words.word_address(report_word(rank))
    }

    /// Where this process's rank `rank` counts its ways into and out of NCCL's collectives.
    pub(crate) fn mark_address(&self, rank: usize) -> u64 {
        self.words.word_address(mark_word(rank))
    }

    fn report(&self, rank: usize) -> u32 {
        self.words.word(report_word(rank)).load(Ordering::Acquire)
    }

    fn mark(&self, rank: usize) -> u32 {
        self.words.word(mark_word(rank)).load(Ordering::Acquire)
    }
}

/// A thread that passes the verdict on ranks that hang, and carries it out. Ends with this value.
pub(crate) struct Watchdog {
    stop: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Watchdog {
    /// Watches over `num_ranks` ranks and their communicators.
    ///
    /// # Errors
    /// The system gave no thread.
    pub(crate) fn start(
        verdict: &Arc<Verdict>,
        num_ranks: usize,
        communicators: Vec<Arc<Communicator>>,
    ) -> Result<Self, BackendError> {
        let stop = Arc::new(AtomicBool::new(false));
        let watch = Watch {
            verdict: Arc::clone(verdict),
            communicators,
            inside: vec![Inside { mark: 0, since: Instant::now() }; num_ranks],
            faulty_since: None,
        };
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("pagemill-watch".into())
            .spawn(move || watch.run(&stopped))
            .map_err(|error| BackendError::Collective { op: "watch", detail: format!("no thread: {error}") })?;
        Ok(Self { stop, thread: Mutex::new(Some(thread)) })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            thread.thread().unpark();
            // It does not panic, and nothing can be done if it did.
            let _ = thread.join();
        }
    }
}

/// A rank's last known mark, and since when it has been that.
#[derive(Clone, Copy)]
struct Inside {
    mark: u32,
    since: Instant,
}

struct Watch {
    verdict: Arc<Verdict>,
    communicators: Vec<Arc<Communicator>>,
    inside: Vec<Inside>,
    /// When NCCL first told a fault.
    faulty_since: Option<Instant>,
}

impl Watch {
    fn run(mut self, stop: &AtomicBool) {
        loop {
            if let Some(reason) = self.find_fault() {
                self.verdict.pass(&reason);
            }
            if self.verdict.reason().is_some() {
                self.carry_out();
                return;
            }
            // Looked at last: what was passed before is carried out.
            if stop.load(Ordering::Acquire) {
                return;
            }
            std::thread::park_timeout(PERIOD);
        }
    }

    fn find_fault(&mut self) -> Option<String> {
        let now = Instant::now();
        for (at, inside) in self.inside.iter_mut().enumerate() {
            let (rank, report) = (self.verdict.first_rank + at, self.verdict.report(at));
            if report != 0 {
                return Some(format!(
                    "rank {rank} waited {} s in an all-reduce for rank {} of its stage",
                    PATIENCE.as_secs(),
                    report - 1
                ));
            }
            let mark = self.verdict.mark(at);
            if mark != inside.mark {
                *inside = Inside { mark, since: now };
            } else if !mark.is_multiple_of(2) && now.duration_since(inside.since) > PATIENCE {
                return Some(format!("a collective of rank {rank} has not ended within {} s", PATIENCE.as_secs()));
            }
        }
        let fault = self.communicators.iter().find_map(|communicator| communicator.async_fault())?;
        let since = *self.faulty_since.get_or_insert(now);
        (now.duration_since(since) >= NAMING).then(|| fault.to_string())
    }

    /// Ends NCCL's kernels; those of this crate see the halt themselves.
    fn carry_out(&mut self) {
        self.verdict.halt();
        let started = Instant::now();
        while !self.communicators.is_empty() && started.elapsed() < ABORT_FOR {
            self.communicators.retain(|communicator| !communicator.try_abort());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
