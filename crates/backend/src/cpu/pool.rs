//! The persistent thread pool of one CPU backend. Decides who runs which chunk of a job and when
//! threads sleep; knows nothing of what a job computes.
//!
//! A forward is bracketed by [`ThreadPool::begin_forward`] and [`ThreadPool::end_forward`]. Between
//! the two, workers spin a bounded while for the next job; otherwise they are parked and use no CPU.
//! Jobs are correct in either state, only slower to start when workers sleep. A worker that the OS
//! does not run in time misses the job and the caller does its share: nobody waits for a thread that
//! has not begun. Chunks are claimed one by one from a counter, so results must not depend on who
//! runs a chunk, and they do not, as chunks write disjoint places.

use crate::BackendError;
use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};

/// Polls with a pause instruction before a waiting thread yields: 100 to 250 microseconds. A thread often waits that
/// long for the last tile of another; where the machine is shared, a yield costs a time slice, and the next small op is
/// then over before the thread comes back.
const SPINS_BEFORE_YIELD: u32 = 5_000;
/// Yields after that before a worker parks: the machine may be shared with other threads. Waking a parked worker
/// takes longer than a small op, and within a forward a worker often waits for another's last tile (some 100
/// microseconds): it should still be there for what follows.
const YIELDS_BEFORE_PARK: u32 = 1_000;

/// Low half of the gate: workers inside the job. High half: epoch, odd while a job is open.
const INSIDE_MASK: u64 = 0xffff_ffff;
const EPOCH_ONE: u64 = 1 << 32;

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// The job being run. Written by the caller while the gate is closed and nobody is inside.
#[derive(Clone, Copy)]
struct Job {
    task: *const Task<'static>,
    num_chunks: usize,
}

/// A value on a cache line of its own.
#[repr(align(128))]
struct Padded<T>(T);

struct Shared {
    gate: Padded<AtomicU64>,
    next_chunk: Padded<AtomicUsize>,
    job: UnsafeCell<Option<Job>>,
    in_forward: AtomicBool,
    shutdown: AtomicBool,
    num_parked: Padded<AtomicUsize>,
    first_panic: Mutex<Option<String>>,
}

// SAFETY: `job` is the only field that is not Sync by itself; the gate protocol (see `run`) gives
// the caller sole access while it is closed and empty, and read access to those inside.
unsafe impl Sync for Shared {}
// SAFETY: the task pointer is only followed inside a job, while its referent is borrowed by `run`.
unsafe impl Send for Shared {}

/// A pool of `num_threads - 1` workers and the calling thread.
pub(crate) struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<Thread>,
    handles: Vec<JoinHandle<()>>,
    /// Held by the thread whose job is running; anyone else (a nested or concurrent job) runs alone.
    running: Mutex<()>,
}

impl ThreadPool {
    /// Starts the workers.
    ///
    /// # Errors
    /// When the OS refuses a thread.
    pub(crate) fn new(num_threads: usize) -> Result<Self, BackendError> {
        let shared = Arc::new(Shared {
            gate: Padded(AtomicU64::new(0)),
            next_chunk: Padded(AtomicUsize::new(0)),
            job: UnsafeCell::new(None),
            in_forward: AtomicBool::new(false),
            shutdown: AtomicBool::new(false),
            num_parked: Padded(AtomicUsize::new(0)),
            first_panic: Mutex::new(None),
        });
        let mut pool = Self { shared, workers: Vec::new(), handles: Vec::new(), running: Mutex::new(()) };
        for worker_idx in 1..num_threads.max(1) {
            let shared = Arc::clone(&pool.shared);
            let handle = std::thread::Builder::new()
                .name(format!("pagemill-cpu-{worker_idx}"))
                .spawn(move || shared.work())
                .map_err(|error| device_error(&format!("cannot start compute thread {worker_idx}: {error}")))?;
            pool.workers.push(handle.thread().clone());
            pool.handles.push(handle);
        }
        Ok(pool)
    }

    /// Threads that take part in a job, the caller among them.
    pub(crate) fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Wakes the workers; they spin for jobs until [`Self::end_forward`] (or a bounded idle time).
    pub(crate) fn begin_forward(&self) {
        self.shared.in_forward.store(true, Ordering::SeqCst);
        self.wake_parked();
    }

    /// Lets the workers sleep. Calls need not be balanced.
    pub(crate) fn end_forward(&self) {
        self.shared.in_forward.store(false, Ordering::SeqCst);
    }

    /// Calls `task(0..num_chunks)`, each once, on all threads; returns when all are done. A job
    /// within a job, or beside another caller's, runs on the calling thread alone.
    ///
    /// # Errors
    /// [`BackendError::Device`] with the message of the first panic of a chunk; chunks not yet begun
    /// are then dropped.
    pub(crate) fn run(&self, num_chunks: usize, task: &Task<'_>) -> Result<(), BackendError> {
        if num_chunks == 0 {
            return Ok(());
        }
        let guard = if num_chunks == 1 || self.workers.is_empty() { None } else { self.running.try_lock().ok() };
        if guard.is_none() {
            return catch_unwind(AssertUnwindSafe(|| (0..num_chunks).for_each(task)))
                .map_err(|panic| device_error(&panic_text(panic.as_ref())));
        }
        let shared = &*self.shared;
        let task: *const Task<'_> = task;
        // SAFETY: only the lifetime changes; the pointer is not followed after `run` returns, since
        // the gate is closed and empty by then.
        let task: *const Task<'static> = unsafe { std::mem::transmute(task) };
        // SAFETY: the gate is closed and nobody is inside (the end of the last `run` saw to it), and
        // `running` is held: this thread alone touches the job.
        unsafe { *shared.job.get() = Some(Job { task, num_chunks }) };
        shared.next_chunk.0.store(0, Ordering::Relaxed);
        shared.gate.0.fetch_add(EPOCH_ONE, Ordering::SeqCst);
        if shared.num_parked.0.load(Ordering::SeqCst) > 0 {
            self.wake_parked();
        }
        shared.run_chunks(Job { task, num_chunks });
        // Close: later arrivals stay out. Then wait for those inside to finish their chunk.
        shared.gate.0.fetch_add(EPOCH_ONE, Ordering::SeqCst);
        let mut waits = 0;
        while shared.gate.0.load(Ordering::Acquire) & INSIDE_MASK != 0 {
            relax(&mut waits);
        }
        let panicked = shared.first_panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        panicked.map_or(Ok(()), |text| Err(device_error(&text)))
    }

    /// [`Self::run`] over the rows of `out` (`cols` wide) in pieces of `rows_per_chunk`: `task` gets
    /// the index of the first row of a piece and the piece.
    pub(crate) fn run_rows(
        &self,
        out: &mut [f32],
        cols: usize,
        rows_per_chunk: usize,
        task: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) -> Result<(), BackendError> {
        if cols == 0 || out.is_empty() {
            return Ok(());
        }
        let piece = cols * rows_per_chunk.max(1);
        let len = out.len();
        let base = SendPtr(out.as_mut_ptr());
        self.run(len.div_ceil(piece), &|chunk| {
            let start = chunk * piece;
            let end = (start + piece).min(len);
            // SAFETY: pieces of different chunks are disjoint and inside `out`, which `run_rows`
            // borrows until all chunks are done.
            let rows = unsafe { std::slice::from_raw_parts_mut(base.get().add(start), end - start) };
            task(start / cols, rows);
        })
    }

    fn wake_parked(&self) {
        if self.shared.num_parked.0.load(Ordering::SeqCst) > 0 {
            self.workers.iter().for_each(Thread::unpark);
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.shutdown.store(true, Ordering::SeqCst);
        self.workers.iter().for_each(Thread::unpark);
        for handle in self.handles.drain(..) {
            // A worker catches every panic of a task, so this join cannot fail in a way that matters.
            drop(handle.join());
        }
    }
}

impl Shared {
    /// A worker's life.
    fn work(&self) {
        let mut seen_epoch = 0;
        while !self.shutdown.load(Ordering::SeqCst) {
            if self.enter(&mut seen_epoch) {
                // SAFETY: this worker is counted inside an open gate, so the caller keeps the job
                // (and what its task borrows) until the count is given back below.
                if let Some(job) = unsafe { *self.job.get() } {
                    self.run_chunks(job);
                }
                self.gate.0.fetch_sub(1, Ordering::Release);
            } else {
                self.wait_for_epoch(seen_epoch);
            }
        }
    }

    /// Counts this worker in, if a job that it has not seen is open.
    fn enter(&self, seen_epoch: &mut u64) -> bool {
        let mut gate = self.gate.0.load(Ordering::SeqCst);
        loop {
            let epoch = gate >> 32;
            if epoch & 1 == 0 || epoch == *seen_epoch {
                return false;
            }
            match self.gate.0.compare_exchange_weak(gate, gate + 1, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => {
                    *seen_epoch = epoch;
                    return true;
                }
                Err(now) => gate = now,
            }
        }
    }

    /// Whether there is something to do for a worker whose last job was `seen_epoch`.
    fn has_news(&self, seen_epoch: u64) -> bool {
        let epoch = self.gate.0.load(Ordering::SeqCst) >> 32;
        (epoch & 1 == 1 && epoch != seen_epoch) || self.shutdown.load(Ordering::Relaxed)
    }

    /// Spins while a forward runs, then yields, then parks.
    fn wait_for_epoch(&self, seen_epoch: u64) {
        let mut waits = 0;
        while self.in_forward.load(Ordering::Relaxed) && waits < SPINS_BEFORE_YIELD + YIELDS_BEFORE_PARK {
            if self.has_news(seen_epoch) {
                return;
            }
            relax(&mut waits);
        }
        // Announce first, look again second: a job published in between is either seen here or its
        // publisher sees the announcement and unparks.
        self.num_parked.0.fetch_add(1, Ordering::SeqCst);
        if !self.has_news(seen_epoch) {
            std::thread::park();
        }
        self.num_parked.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// Claims and runs chunks until none is left. Never unwinds.
    fn run_chunks(&self, job: Job) {
        // SAFETY: see the callers: the task is borrowed by `run`, which waits for this.
        let task = unsafe { &*job.task };
        let result = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let chunk = self.next_chunk.0.fetch_add(1, Ordering::Relaxed);
                if chunk >= job.num_chunks {
                    break;
                }
                task(chunk);
            }
        }));
        if let Err(panic) = result {
            self.next_chunk.0.store(job.num_chunks, Ordering::Relaxed);
            let mut first = self.first_panic.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert_with(|| panic_text(panic.as_ref()));
        }
    }
}

/// One wait of a growing kind: a pause while the wait is young, then the rest of the time slice.
fn relax(waits: &mut u32) {
    if *waits < SPINS_BEFORE_YIELD {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
    *waits = waits.saturating_add(1);
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("a kernel panicked: {}", text.unwrap_or("(no message)"))
}

fn device_error(detail: &str) -> BackendError {
    BackendError::Device { device: "cpu".into(), detail: detail.to_owned() }
}

/// A pointer that chunks of one job share; each dereferences its own disjoint part.
#[derive(Clone, Copy)]
pub(crate) struct SendPtr<T>(pub(crate) *mut T);

impl<T> SendPtr<T> {
    /// The pointer (a method, so that closures capture the wrapper and not its field).
    pub(crate) fn get(self) -> *mut T {
        self.0
    }
}

// SAFETY: the wrapper only carries the address; each use states why its part is disjoint.
unsafe impl<T> Send for SendPtr<T> {}
// SAFETY: as for Send.
unsafe impl<T> Sync for SendPtr<T> {}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn counts(pool: &ThreadPool, num_chunks: usize) -> Vec<usize> {
        let counters: Vec<AtomicUsize> = (0..num_chunks).map(|_| AtomicUsize::new(0)).collect();
        pool.run(num_chunks, &|chunk| {
            counters[chunk].fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
        counters.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn every_chunk_runs_once() {
        for num_threads in [1, 2, 5] {
            let pool = ThreadPool::new(num_threads).unwrap();
            for round in 0..2_000 {
                if round % 100 == 0 {
                    pool.begin_forward();
                } else if round % 50 == 0 {
                    pool.end_forward();
                }
                let num_chunks = round % 13;
                assert_eq!(counts(&pool, num_chunks), vec![1; num_chunks]);
            }
        }
    }

    #[test]
    fn nested_jobs_run_on_their_thread() {
        let pool = ThreadPool::new(3).unwrap();
        let total = AtomicUsize::new(0);
        pool.run(8, &|_| {
            let me = std::thread::current().id();
            pool.run(8, &|_| {
                assert_eq!(std::thread::current().id(), me);
                total.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
        })
        .unwrap();
        assert_eq!(total.into_inner(), 64);
    }

    #[test]
    fn a_panic_is_an_error_and_the_pool_lives_on() {
        let pool = ThreadPool::new(2).unwrap();
        for num_chunks in [1, 16] {
            let error = pool.run(num_chunks, &|chunk| assert!(chunk != 0, "chunk zero")).unwrap_err();
            assert!(matches!(&error, BackendError::Device { detail, .. } if detail.contains("chunk zero")), "{error}");
            assert_eq!(counts(&pool, 9), vec![1; 9]);
        }
    }

    #[test]
    fn unbalanced_brackets_are_harmless() {
        let pool = ThreadPool::new(2).unwrap();
        pool.end_forward();
        pool.begin_forward();
        pool.begin_forward();
        assert_eq!(counts(&pool, 5), vec![1; 5]);
        pool.end_forward();
        pool.end_forward();
        assert_eq!(counts(&pool, 5), vec![1; 5]);
    }

    #[test]
    fn callers_on_several_threads_do_not_mix() {
        let pool = ThreadPool::new(2).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..500).for_each(|round| assert_eq!(counts(&pool, round % 7), vec![1; round % 7])));
            }
        });
    }

    /// CPU time of the pool's threads, found by name, in clock ticks.
    #[cfg(target_os = "linux")]
    fn worker_ticks() -> u64 {
        std::fs::read_dir("/proc/self/task")
            .unwrap()
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("stat")).ok())
            .filter(|stat| stat.contains("(pagemill-cpu-7)"))
            .map(|stat| {
                let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
                fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
            })
            .sum()
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn idle_workers_use_no_cpu() {
        // Eight threads, so that no other test has a worker of the watched name.
        let pool = ThreadPool::new(8).unwrap();
        pool.begin_forward();
        counts(&pool, 64);
        // Even a forward that was never ended comes to rest.
        std::thread::sleep(Duration::from_millis(300));
        let before = worker_ticks();
        std::thread::sleep(Duration::from_millis(500));
        assert!(worker_ticks() - before <= 1, "a parked worker took CPU time");
        assert_eq!(counts(&pool, 64), vec![1; 64]);
    }
}
