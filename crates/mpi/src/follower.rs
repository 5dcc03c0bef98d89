//! A rank that is not rank 0: loads its share, then runs the steps that rank 0 sends until it is told to end
//! or rank 0 is lost. Decides what its own failure means for the others; knows no scheduler.

use crate::addresses::host_name;
use crate::error::ProcessError;
use crate::frame::{Counters, Frame};
use crate::leader::Abort;
use crate::link::{FrameReceiver, FrameSender, HEARTBEAT_EVERY};
use crate::rendezvous::{Invitation, RankIdentity, knock};
use crossbeam_channel::{Receiver, Sender, bounded};
use pagemill_engine::{
    Checkpoint, EngineConfig, EngineError, LoadProgress, LoadedRank, MeterReader, RankContext, RankMemory, StepInput,
};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Steps that wait for this rank at most: rank 0 has fewer in flight.
const MAX_WAITING_STEPS: usize = 64;

/// How long the last steps may take once rank 0 has said that it ends.
const LAST_STEPS: Duration = Duration::from_secs(2);

/// A rank that is not rank 0.
pub struct Follower {
    shared: Arc<Shared>,
    own: RankIdentity,
    /// Closed when the world ends.
    steps: Receiver<Arc<StepInput>>,
    pool: Receiver<u64>,
}

/// What its threads share.
struct Shared {
    sender: FrameSender,
    /// Ends every wait of this rank for others.
    abort: Abort,
    end: Mutex<Option<End>>,
    meter: OnceLock<MeterReader>,
    /// Set when this rank's work is over, however it ended.
    is_done: AtomicBool,
}

/// How the world ended.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    /// Rank 0 said so.
    Shutdown,
    /// Rank 0 is gone, or said that somebody is.
    Lost(String),
}

/// Looks at a follower from another thread.
#[derive(Clone)]
pub struct FollowerWatch(Arc<Shared>);

impl Follower {
    /// Finds rank 0 and begins to listen. `abort` ends the waits of this process's rank for the reason given: it is
    /// called when the world ends, at any time from now on.
    ///
    /// # Errors
    /// Rank 0 cannot be reached, or refuses this rank.
    pub fn join(
        invitation: &Invitation,
        own: RankIdentity,
        abort: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Self, ProcessError> {
        let (sender, receiver) = knock(invitation, &own)?;
        let (step_sender, steps) = bounded(MAX_WAITING_STEPS);
        let (pool_sender, pool) = bounded(1);
        let shared = Arc::new(Shared {
            sender,
            abort: Box::new(abort),
            end: Mutex::default(),
            meter: OnceLock::new(),
            is_done: AtomicBool::new(false),
        });
        let (listener, speaker) = (Arc::clone(&shared), Arc::clone(&shared));
        spawn("pagemill-listen", move || listener.listen(receiver, step_sender, pool_sender))?;
        spawn("pagemill-heartbeat", move || speaker.beat())?;
        Ok(Self { shared, own, steps, pool })
    }

    /// To see from other threads how it goes.
    #[must_use]
    pub fn watch(&self) -> FollowerWatch {
        FollowerWatch(Arc::clone(&self.shared))
    }

    /// Connects this rank with the others (`connect`), loads its share, and runs steps on this thread until rank 0 ends
    /// in order.
    ///
    /// # Errors
    /// Why this rank or another one cannot go on. Rank 0 has been told by then.
    pub fn run(
        self,
        checkpoint: &Checkpoint,
        connect: impl FnOnce() -> Result<RankContext, ProcessError>,
        config: &EngineConfig,
        progress: &dyn Fn(LoadProgress),
    ) -> Result<(), ProcessError> {
        // The context goes when rank 0 has been told: taking a device down may wait for other ranks.
        let (_cx, result) = match connect() {
            Ok(cx) => {
                let result = self.work(checkpoint, &cx, config, progress);
                (Some(cx), result)
            }
            Err(error) => (None, Err(error)),
        };
        self.shared.is_done.store(true, Ordering::Release);
        let end = self.shared.end();
        let outcome = match (result, end) {
            // Steps end only after the world has: see `finish`.
            (_, Some(End::Shutdown)) | (Ok(()), None) => Ok(()),
            // What ended the world says more than what followed from it here.
            (_, Some(End::Lost(reason))) => Err(ProcessError::Lost { reason }),
            (Err(error), None) => {
                self.tell(&error);
                Err(error)
            }
        };
        self.shared.sender.close();
        outcome
    }

    fn work(
        &self,
        checkpoint: &Checkpoint,
        cx: &RankContext,
        config: &EngineConfig,
        progress: &dyn Fn(LoadProgress),
    ) -> Result<(), ProcessError> {
        let rank = LoadedRank::load(checkpoint, cx, self.own.rank, config, progress)?;
        let RankMemory { available_bytes, weight_bytes, workspace_bytes, .. } = rank.memory_of(host_name());
        self.say(&Frame::Loaded { available_bytes, weight_bytes, workspace_bytes })?;
        // Closed: the world has ended.
        let Ok(num_blocks) = self.pool.recv() else { return Ok(()) };
        let num_blocks = usize::try_from(num_blocks)
            .map_err(|_| EngineError::Memory(format!("{num_blocks} KV blocks exceed this machine's addresses")))?;
        let mut rank = rank.settle(num_blocks)?;
        // Set once, here.
        let _ = self.shared.meter.set(rank.meter());
        self.say(&Frame::Ready)?;
        for step in &self.steps {
            // At once: see `run`.
            let output = rank.run(&step).inspect_err(|error| self.tell(error))?;
            if rank.is_output_rank() {
                self.say(&Frame::Output { output, counters: self.shared.counters() })?;
            }
        }
        // Giving a device's memory back may take longer than the last steps may.
        self.shared.is_done.store(true, Ordering::Release);
        Ok(())
    }

    /// Tells rank 0 why this rank cannot go on; the first word counts.
    fn tell(&self, error: &dyn std::fmt::Display) {
        let reason = format!("rank {} on {}: {error}", self.own.rank, host_name());
        (self.shared.abort)(&reason);
        // If rank 0 cannot be told, it finds the connection closed.
        let _ = self.shared.sender.send(&Frame::Error { reason });
    }

    fn say(&self, frame: &Frame) -> Result<(), ProcessError> {
        self.shared
            .sender
            .send(frame)
            .map_err(|error| ProcessError::Lost { reason: format!("rank 0 is lost: {error}") })
    }
}

impl FollowerWatch {
    /// Whether a rank was lost.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        matches!(self.0.end(), Some(End::Lost(_)))
    }
}

impl Shared {
    fn end(&self) -> Option<End> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the end, once, then ends every wait: for steps and the pool's size, which come over `waits`, at
    /// once; for other ranks at once where somebody is lost, else after the last steps. Whoever is woken finds
    /// the end set.
    fn finish(&self, end: End, waits: (Sender<Arc<StepInput>>, Sender<u64>)) {
        let deadline = Instant::now() + LAST_STEPS;
        let is_orderly = end == End::Shutdown;
        let reason = match &end {
            End::Shutdown => "the server is shutting down".to_owned(),
            End::Lost(reason) => reason.clone(),
        };
        self.end.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(end);
        drop(waits);
        while is_orderly && !self.is_done.load(Ordering::Acquire) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        if !self.is_done.load(Ordering::Acquire) {
            (self.abort)(&reason);
        }
    }

    fn counters(&self) -> Counters {
        let (busy_us, workspace_grown) = self.meter.get().map(MeterReader::read).unwrap_or_default();
        Counters { busy_us, workspace_grown }
    }

    /// Says twice a second that this process lives.
    fn beat(&self) {
        while self.end().is_none() && self.sender.send(&Frame::Heartbeat(self.counters())).is_ok() {
            std::thread::sleep(HEARTBEAT_EVERY);
        }
    }

    /// Takes what rank 0 says until the world ends; then no more steps come.
    fn listen(&self, mut receiver: FrameReceiver, steps: Sender<Arc<StepInput>>, pool: Sender<u64>) {
        let end = loop {
            match receiver.receive() {
                Ok(Frame::Step(step)) => {
                    // Full: rank 0 breaks its word; closed: this rank has failed and says so itself.
                    if steps.try_send(step).is_err() {
                        break End::Lost("this rank runs no more steps".into());
                    }
                }
                Ok(Frame::Heartbeat(_)) => {}
                Ok(Frame::Pool { num_blocks }) if pool.try_send(num_blocks).is_ok() => {}
                Ok(Frame::Shutdown) => break End::Shutdown,
                Ok(Frame::Error { reason }) => break End::Lost(reason),
                Ok(_) => break End::Lost("rank 0 sent a frame out of turn".into()),
                Err(error) => break End::Lost(format!("rank 0 is lost: {error}")),
            }
        };
        self.finish(end, (steps, pool));
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), ProcessError> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(body)
        .map(|_| ())
        .map_err(|source| ProcessError::System { what: "starting a thread for this rank", source })
}
