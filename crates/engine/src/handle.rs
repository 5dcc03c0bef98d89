//! The way in: a cheap, cloneable handle over a bounded queue to the engine's own thread. Decides when
//! the engine steps, when it sleeps and how it stops; what a step does is `engine`'s.
//!
//! Requests travel through a bounded channel. What ends them (abort, finish, drain, shutdown) goes
//! beside it, so that a full queue can never hold an ending back.

use crate::clock::MonotonicClock;
use crate::pipeline::panic_message;
use crate::sink::{ChannelSink, Generation};
use crate::{Executor, HostTime, InferenceEngine, MemoryPlan, PipelineStatus, Request, SubmitError};
use crossbeam_channel::{Receiver, Sender, TryRecvError, TrySendError, bounded, select};
use pagemill_scheduler::{KvCacheStats, Refusal, RequestId, SchedulerStats, SequenceId, Time};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;

/// Submissions on their way to the engine's thread; it takes all of them between two steps.
const QUEUE_CAPACITY: usize = 1024;

/// How often a thread that has only waiting requests looks whether their listeners are still there.
const WAITING_POLL: Duration = Duration::from_millis(10);

/// How often an idle engine looks whether its ranks are still there.
const IDLE_POLL: Duration = Duration::from_millis(500);

/// What the engine says about itself; refreshed after every step, read without stopping it.
#[derive(Clone, Debug, Default)]
pub struct EngineStatus {
    /// Scheduler gauges and counters.
    pub scheduler: SchedulerStats,
    /// Cache gauges and counters.
    pub kv_cache: KvCacheStats,
    /// Memory by purpose.
    pub memory: MemoryPlan,
    /// Steps run since start.
    pub steps: u64,
    /// Time since the step loop last moved, while there is work (0 when idle).
    pub stalled_for_us: u64,
    /// `Some`: the engine has stopped, and why.
    pub stopped: Option<String>,
    /// Requests aborted because their listener was gone or too slow.
    pub aborted: u64,
    /// Microseconds spent in scheduling since start.
    pub schedule_us: u64,
    /// Microseconds spent in executing since start.
    pub execute_us: u64,
    /// What the host did for the steps.
    pub host: HostTime,
    /// Times the workspace grew after warm-up (0, or something is wrong).
    pub workspace_grown: u64,
    /// How busy the ranks are.
    pub pipeline: PipelineStatus,
}

type SubmitResult = Result<RequestId, SubmitError>;

/// Answers a submission exactly once, come what may: when it is lost on the way, the engine has stopped.
struct Reply(Option<Box<dyn FnOnce(SubmitResult) + Send>>);

impl Reply {
    fn send(mut self, result: SubmitResult) {
        if let Some(reply) = self.0.take() {
            reply(result);
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(reply) = self.0.take() {
            reply(Err(SubmitError::Stopped("it stopped before the request was taken".into())));
        }
    }
}

struct Submission {
    request: Request,
    reply: Reply,
}

/// Ends asked for since the last step. Each id at most once; emptied between steps.
#[derive(Default)]
struct Endings {
    aborts: BTreeSet<RequestId>,
    finished: BTreeSet<SequenceId>,
}

/// What handles and the engine's thread share.
struct Shared {
    clock: MonotonicClock,
    status: Mutex<EngineStatus>,
    endings: Mutex<Endings>,
    draining: AtomicBool,
    stopping: AtomicBool,
    has_work: AtomicBool,
    /// When the step loop last moved, on `clock`.
    moved_at_us: AtomicU64,
    /// The thread that sinks are told on, where it is their own.
    delivery_thread: Option<ThreadId>,
}

impl Shared {
    fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A handle to a running engine. When the last one goes, the engine finishes its requests and ends.
#[derive(Clone)]
pub struct EngineHandle {
    shared: Arc<Shared>,
    submissions: Sender<Submission>,
    /// Holds at most one token: "look at the endings and flags".
    wake: Sender<()>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl EngineHandle {
    /// Gives an engine its own thread, and its sinks another. Should the system refuse the first, the handle says so
    /// in `status().stopped` and in every answer.
    #[must_use]
    pub fn spawn<E: Executor + 'static>(engine: InferenceEngine<E>) -> Self {
        let engine = engine.telling_on_a_thread();
        let (submissions, submission_receiver) = bounded(QUEUE_CAPACITY);
        let (wake, wake_receiver) = bounded(1);
        let shared = Arc::new(Shared {
            clock: MonotonicClock::start(),
            status: Mutex::new(engine.status()),
            endings: Mutex::default(),
            draining: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            has_work: AtomicBool::new(false),
            moved_at_us: AtomicU64::new(0),
            delivery_thread: engine.delivery_thread(),
        });
        let step_loop =
            StepLoop { engine, shared: Arc::clone(&shared), submissions: submission_receiver, wake: wake_receiver };
        let thread = std::thread::Builder::new().name("pagemill-engine".into()).spawn(move || step_loop.run());
        let thread = thread
            .map_err(|error| {
                Shared::lock(&shared.status).stopped = Some(format!("no thread for the engine: {error}"));
            })
            .ok();
        Self { shared, submissions, wake, thread: Arc::new(Mutex::new(thread)) }
    }

    /// Queues a request; returns once the scheduler has accepted or refused it (microseconds to one
    /// step). Blocks, so it must not be called from a sink or a reply; asynchronous callers use
    /// [`EngineHandle::submit_with`].
    ///
    /// # Errors
    /// Why it was not taken.
    pub fn submit(&self, request: Request) -> Result<RequestId, SubmitError> {
        let (sender, receiver) = bounded(1);
        self.submit_with(
            request,
            Box::new(move |result| {
                // The channel has room for the one answer.
                let _ = sender.try_send(result);
            }),
        );
        receiver.recv().unwrap_or_else(|_| Err(SubmitError::Stopped("it gave no answer".into())))
    }

    /// Queues a request without waiting. `reply` is called exactly once: on the engine's thread, or
    /// before this returns when the queue is full, the engine drains or has stopped. It must not block.
    pub fn submit_with(&self, request: Request, reply: Box<dyn FnOnce(Result<RequestId, SubmitError>) + Send>) {
        let reply = Reply(Some(reply));
        let stopped = Shared::lock(&self.shared.status).stopped.clone();
        if let Some(why) = stopped {
            return reply.send(Err(SubmitError::Stopped(why)));
        }
        if self.shared.draining.load(Ordering::Acquire) {
            return reply.send(Err(SubmitError::Draining));
        }
        match self.submissions.try_send(Submission { request, reply }) {
            Ok(()) => {}
            Err(TrySendError::Full(lost)) => {
                lost.reply.send(Err(Refusal::QueueFull { limit: QUEUE_CAPACITY }.into()));
            }
            // Its reply says so when it drops.
            Err(TrySendError::Disconnected(_)) => {}
        }
    }

    /// Submits a request and waits for all it says. Its own sink is replaced.
    ///
    /// # Errors
    /// Why it was not taken, or why it failed.
    pub fn generate(&self, request: Request) -> Result<Generation, SubmitError> {
        let n = request.n;
        // Every event there can be: a token a choice, prompt log-probabilities a chunk, the ends.
        let capacity = request.max_tokens.saturating_add(2).saturating_mul(n as usize) + request.prompt.len();
        let (sink, events) = ChannelSink::new(capacity.min(1 << 16));
        self.submit(Request { sink: Box::new(sink), ..request })?;
        events.gather(n).map_err(SubmitError::Stopped)
    }

    /// Ends a request within one step. Never blocks; unknown ids are ignored.
    pub fn abort(&self, id: RequestId) {
        Shared::lock(&self.shared.endings).aborts.insert(id);
        self.wake_up();
    }

    /// Ends one choice within one step (stop string found): no event comes for it any more. Never
    /// blocks; unknown ids are ignored.
    pub fn finish_sequence(&self, id: SequenceId) {
        Shared::lock(&self.shared.endings).finished.insert(id);
        self.wake_up();
    }

    /// Gauges, counters, health.
    #[must_use]
    pub fn status(&self) -> EngineStatus {
        let mut status = Shared::lock(&self.shared.status).clone();
        if status.stopped.is_none() && self.shared.has_work.load(Ordering::Acquire) {
            let moved_at = self.shared.moved_at_us.load(Ordering::Acquire);
            status.stalled_for_us = self.shared.clock.now_us().saturating_sub(moved_at);
        }
        status
    }

    /// Refuses new requests from now on; running ones finish. `status` shows when nothing is left.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Release);
        self.wake_up();
    }

    /// Whether nothing waits and nothing runs.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.submissions.is_empty() && !self.shared.has_work.load(Ordering::Acquire)
    }

    /// Stops the thread after the current step: live requests hear `Failed`. Waits for it, unless it is
    /// called on that thread or the sinks'.
    pub fn shutdown(&self) {
        self.shared.draining.store(true, Ordering::Release);
        self.shared.stopping.store(true, Ordering::Release);
        self.wake_up();
        let mut held = Shared::lock(&self.thread);
        let current = std::thread::current().id();
        let on_engine_thread = held.as_ref().is_some_and(|thread| thread.thread().id() == current);
        let on_own_thread = on_engine_thread || self.shared.delivery_thread == Some(current);
        if !on_own_thread && let Some(thread) = held.take() {
            // Its panics are caught and told through `status`.
            let _ = thread.join();
        }
    }

    fn wake_up(&self) {
        // Full means that it will look anyway; disconnected, that nobody is left to look.
        let _ = self.wake.try_send(());
    }
}

/// Why the step loop ended.
enum End {
    /// Nobody can submit any more, and everything is done.
    Abandoned,
    /// `shutdown` was called.
    Shutdown,
    /// A step failed, or the engine panicked.
    Broken(String),
}

/// What runs on the engine's thread.
struct StepLoop<E: Executor> {
    engine: InferenceEngine<E>,
    shared: Arc<Shared>,
    submissions: Receiver<Submission>,
    wake: Receiver<()>,
}

impl<E: Executor> StepLoop<E> {
    fn run(mut self) {
        // After a panic only sinks are told; the broken parts are never used again.
        let end = catch_unwind(AssertUnwindSafe(|| self.run_until_end()))
            .unwrap_or_else(|panic| End::Broken(format!("the engine panicked: {}", panic_message(&*panic))));
        let (why, message) = match end {
            End::Abandoned => ("nobody holds it any more".to_owned(), String::new()),
            End::Shutdown => ("the server is shutting down".to_owned(), "the server is shutting down".to_owned()),
            End::Broken(why) => (why.clone(), format!("the engine has stopped: {why}")),
        };
        {
            let mut status = Shared::lock(&self.shared.status);
            status.stopped = Some(why.clone());
        }
        self.shared.has_work.store(false, Ordering::Release);
        // A sink is foreign code; if it panics here, the thread ends all the same.
        let _ = catch_unwind(AssertUnwindSafe(|| self.engine.fail_all(&message)));
        for submission in self.submissions.try_iter() {
            submission.reply.send(Err(SubmitError::Stopped(why.clone())));
        }
    }

    fn run_until_end(&mut self) -> End {
        loop {
            let abandoned = self.take_submissions();
            self.take_endings();
            if self.shared.stopping.load(Ordering::Acquire) {
                return End::Shutdown;
            }
            // From here on the loop owes a move.
            self.stamp();
            let ran = match self.engine.step(self.shared.clock.now()) {
                Ok(ran) => ran,
                Err(error) => return End::Broken(error.to_string()),
            };
            self.publish(ran);
            if !ran {
                if abandoned && !self.engine.has_work() {
                    return End::Abandoned;
                }
                if let Some(submission) = self.sleep(abandoned) {
                    self.take(submission);
                }
            }
        }
    }

    /// Takes what has been queued; true when no handle is left to queue more.
    fn take_submissions(&mut self) -> bool {
        for _ in 0..QUEUE_CAPACITY {
            match self.submissions.try_recv() {
                Ok(submission) => self.take(submission),
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => return true,
            }
        }
        false
    }

    fn take(&mut self, submission: Submission) {
        let result = if self.shared.draining.load(Ordering::Acquire) {
            Err(SubmitError::Draining)
        } else {
            self.engine.submit(submission.request, self.shared.clock.now())
        };
        submission.reply.send(result);
    }

    fn take_endings(&mut self) {
        let endings = std::mem::take(&mut *Shared::lock(&self.shared.endings));
        for id in endings.finished {
            self.engine.finish_sequence(id);
        }
        for id in endings.aborts {
            self.engine.abort(id);
        }
    }

    fn stamp(&self) {
        // Work that just arrived after an idle time is not stalled since then.
        if !self.shared.has_work.load(Ordering::Acquire) {
            self.shared.moved_at_us.store(self.shared.clock.now_us(), Ordering::Release);
        }
        self.shared.has_work.store(self.engine.has_work(), Ordering::Release);
    }

    fn publish(&self, ran: bool) {
        let status = self.engine.status();
        *Shared::lock(&self.shared.status) = status;
        let waits_on_purpose = self.engine.next_wakeup().is_some();
        if ran || waits_on_purpose {
            self.shared.moved_at_us.store(self.shared.clock.now_us(), Ordering::Release);
        }
        self.shared.has_work.store(self.engine.has_work(), Ordering::Release);
    }

    /// Waits for something to do: up to the next look at the ranks when idle, else until the scheduler's wake-up and with a
    /// glance at the sinks of waiting requests now and then.
    fn sleep(&self, abandoned: bool) -> Option<Submission> {
        let timeout = if self.engine.has_work() {
            let Time(now) = self.shared.clock.now();
            self.engine
                .next_wakeup()
                .map_or(WAITING_POLL, |Time(at)| Duration::from_micros(at.saturating_sub(now)).min(WAITING_POLL))
        } else {
            IDLE_POLL
        };
        if abandoned {
            std::thread::sleep(timeout.min(WAITING_POLL));
            return None;
        }
        // A closed channel ends the wait as well: the loop finds out why.
        select! {
            recv(self.submissions) -> submission => submission.ok(),
            recv(self.wake) -> _ => None,
            default(timeout) => None,
        }
    }
}
