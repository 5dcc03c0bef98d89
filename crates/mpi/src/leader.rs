//! Rank 0 towards the other processes: sends them plans, takes their outputs and counters, and watches over
//! them. Decides when a rank counts as lost, and what follows from it for all; what a plan holds is the
//! scheduler's.

use crate::addresses::host_name;
use crate::error::{LinkError, ProcessError};
use crate::frame::Frame;
use crate::link::{FrameReceiver, FrameSender, HEARTBEAT_EVERY};
use crate::rendezvous::{Admitted, RankIdentity, Reception};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use pagemill_engine::{
    BuiltEngine, Checkpoint, EngineConfig, LoadProgress, LoadedRank, NextStep, RankContext, RankMemory, RemoteEnds,
    RemoteRanks,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

const POLL: Duration = Duration::from_millis(50);

/// Ends every wait of this process's rank for others, for the reason given: `Collective::abort` where there is one
/// already.
pub(crate) type Abort = Box<dyn Fn(&str) + Send + Sync>;

/// Rank 0 while the world comes up.
pub struct Leader {
    shared: Arc<Shared>,
    remote: RemoteRanks,
    /// What ranks say on their way up: which rank, what.
    milestones: Receiver<(usize, Frame)>,
    /// In rank order: the host, or the GPU, whose memory each takes.
    memories: Vec<String>,
    watch: Watch,
}

/// Rank 0's threads towards the others: they run until the engine ends or a rank is lost.
pub struct Watch {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// What the threads share.
struct Shared {
    senders: Vec<FrameSender>,
    /// `rank 2 on host b`.
    names: Vec<String>,
    /// Ends every wait of this process's own rank.
    abort: Abort,
    ends: RemoteEnds,
    /// The engine stands: its end is everybody's. Before, the end of its channels is that of a failed start, and
    /// [`Leader::build`] says why.
    is_built: AtomicBool,
    /// Everybody has been told to end: what closes from now on is not lost.
    has_ended: AtomicBool,
    is_failing: AtomicBool,
}

impl Leader {
    /// Waits until all other ranks have come in, and begins to watch over them. `abort` ends the waits of this
    /// process's rank for the reason given: it is called when another one is lost, at any time from now on.
    ///
    /// # Errors
    /// A rank that does not come, or that loads something else.
    pub fn admit(
        reception: Reception,
        own: &RankIdentity,
        abort: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Self, ProcessError> {
        let admitted = reception.admit(own)?;
        let (remote, ends) = RemoteRanks::new(admitted.len());
        let (milestone_sender, milestones) = bounded(2 * admitted.len().max(1));
        let others = admitted.iter().map(|rank| (rank.hello.gpu, rank.hello.host.clone()));
        let all = std::iter::once((own.gpu, host_name())).chain(others);
        let memories = all.map(|(gpu, host)| gpu.map_or(host, |gpu| gpu.name())).collect();
        let names = admitted.iter().map(|rank| format!("rank {} on {}", rank.hello.rank, rank.hello.host)).collect();
        let (senders, receivers): (Vec<_>, Vec<_>) =
            admitted.into_iter().map(|Admitted { sender, receiver, .. }| (sender, receiver)).unzip();
        let shared = Arc::new(Shared {
            senders,
            names,
            abort: Box::new(abort),
            ends,
            is_built: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            is_failing: AtomicBool::new(false),
        });
        let mut watch = Watch { shared: Arc::clone(&shared), threads: Vec::new() };
        let speaker = Arc::clone(&shared);
        watch.spawn("pagemill-plans".into(), move || speaker.speak())?;
        for (receiver, rank) in receivers.into_iter().zip(1..) {
            let (listener, sender) = (Arc::clone(&shared), milestone_sender.clone());
            watch.spawn(format!("pagemill-rank-{rank}"), move || listener.listen(rank, receiver, &sender))?;
        }
        Ok(Self { shared, remote, milestones, memories, watch })
    }

    /// To end the world while it comes up: see [`Stop`].
    #[must_use]
    pub fn stop(&self) -> Stop {
        Stop(Arc::clone(&self.shared))
    }

    /// Connects rank 0 with the others (`connect`), loads its share beside theirs, sizes the pools and builds the
    /// engine. Blocks for seconds.
    ///
    /// # Errors
    /// Whatever keeps any rank from starting; the others are told.
    pub fn build(
        self,
        checkpoint: &Checkpoint,
        connect: impl FnOnce() -> Result<RankContext, ProcessError>,
        config: &EngineConfig,
        progress: &dyn Fn(LoadProgress),
    ) -> Result<(BuiltEngine, Watch), ProcessError> {
        let shared = Arc::clone(&self.shared);
        // The context goes when the others have been told: taking a device down may wait for them.
        let (_cx, built) = match connect() {
            Ok(cx) => {
                let built = self.build_untold(checkpoint, &cx, config, progress);
                (Some(cx), built)
            }
            Err(error) => (None, Err(error)),
        };
        built.map_err(|error| {
            // What was heard from another rank first is the cause, and has been told.
            let reason = shared.ends.failure().map(str::to_owned);
            shared.fail(&format!("rank 0 on {}: {error}", host_name()), None);
            reason.map_or(error, |reason| ProcessError::Lost { reason })
        })
    }

    fn build_untold(
        self,
        checkpoint: &Checkpoint,
        cx: &RankContext,
        config: &EngineConfig,
        progress: &dyn Fn(LoadProgress),
    ) -> Result<(BuiltEngine, Watch), ProcessError> {
        let mut rank = LoadedRank::load(checkpoint, cx, 0, config, progress)?;
        let memories = self.memories(&rank)?;
        let plan = rank.size(&memories)?;
        let num_blocks = plan.num_blocks as u64;
        self.shared.tell(&Frame::Pool { num_blocks });
        let rank = rank.settle(plan.num_blocks)?;
        self.gather("ready", |frame| matches!(frame, Frame::Ready).then_some(()))?;
        let built = rank.into_engine(plan, self.remote)?;
        self.shared.is_built.store(true, Ordering::Release);
        Ok((built, self.watch))
    }

    /// All ranks' memory, in rank order.
    fn memories(&self, own: &LoadedRank) -> Result<Vec<RankMemory>, ProcessError> {
        let others = self.gather("loaded", |frame| match frame {
            Frame::Loaded { available_bytes, weight_bytes, workspace_bytes } => {
                Some(RankMemory { host: String::new(), available_bytes, weight_bytes, workspace_bytes })
            }
            _ => None,
        })?;
        let all = std::iter::once(own.memory_of(String::new())).chain(others);
        Ok(self.memories.iter().zip(all).map(|(host, rank)| RankMemory { host: host.clone(), ..rank }).collect())
    }

    /// One milestone of every other rank, in rank order. Waits as long as all are alive.
    fn gather<T>(&self, expected: &'static str, read: impl Fn(Frame) -> Option<T>) -> Result<Vec<T>, ProcessError> {
        let mut found: Vec<Option<T>> = self.shared.senders.iter().map(|_| None).collect();
        while found.iter().any(Option::is_none) {
            match self.milestones.recv_timeout(POLL) {
                Ok((rank, frame)) => {
                    let got = frame_name(&frame);
                    let place = found.get_mut(rank - 1).filter(|place| place.is_none());
                    match place.zip(read(frame)) {
                        Some((place, value)) => *place = Some(value),
                        None => return Err(ProcessError::OutOfTurn { rank, expected, got: got.into() }),
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    if let Some(reason) = self.shared.ends.failure() {
                        return Err(ProcessError::Lost { reason: reason.to_owned() });
                    }
                }
            }
        }
        Ok(found.into_iter().flatten().collect())
    }
}

/// Ends a world that is still coming up, and looks at it from other threads.
#[derive(Clone)]
pub struct Stop(Arc<Shared>);

impl Stop {
    /// The other processes end in order.
    pub fn stop(&self) {
        self.0.shut_down();
    }

    /// Whether a rank failed.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.0.ends.failure().is_some()
    }
}

impl Watch {
    fn spawn(&mut self, name: String, body: impl FnOnce() + Send + 'static) -> Result<(), ProcessError> {
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(body)
            .map_err(|source| ProcessError::System { what: "starting a thread for a rank", source })?;
        self.threads.push(thread);
        Ok(())
    }

    /// Why a rank failed, if one did.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        self.shared.ends.failure().map(str::to_owned)
    }

    /// After the engine has ended: waits until the others have closed their connections, a few seconds at
    /// most.
    ///
    /// # Errors
    /// Why they did not all end in order.
    pub fn wait(self) -> Result<(), ProcessError> {
        let lost = |reason: String| Err(ProcessError::Lost { reason });
        for thread in self.threads {
            // Nothing in them panics; if something did, the end is not in order.
            if thread.join().is_err() {
                return lost("a thread that watched a rank panicked".into());
            }
        }
        self.shared.ends.failure().map_or(Ok(()), |reason| lost(reason.to_owned()))
    }
}

impl Shared {
    /// Sends plans as the engine makes them, and heartbeats while it makes none.
    fn speak(&self) {
        let mut bytes = Vec::new();
        loop {
            let frame = match self.ends.next_step(HEARTBEAT_EVERY) {
                NextStep::Step(step) => Frame::Step(step),
                NextStep::Nothing => Frame::Heartbeat(crate::frame::Counters::default()),
                NextStep::Ended => break,
            };
            if self.has_ended.load(Ordering::Acquire) {
                return;
            }
            if let Err(error) = frame.encode(&mut bytes) {
                self.fail(&format!("rank 0 on {}: a step cannot be sent: {error}", host_name()), None);
                return;
            }
            for (at, sender) in self.senders.iter().enumerate() {
                if let Err(error) = sender.send_encoded(&bytes) {
                    self.lose(at + 1, &error);
                    return;
                }
            }
        }
        match self.ends.failure() {
            Some(reason) => self.fail(reason, None),
            None if self.is_built.load(Ordering::Acquire) => self.shut_down(),
            None => {}
        }
    }

    /// Takes what rank `rank` says until its connection ends.
    fn listen(&self, rank: usize, mut receiver: FrameReceiver, milestones: &Sender<(usize, Frame)>) {
        loop {
            let frame = match receiver.receive() {
                Ok(frame) => frame,
                Err(error) => return self.lose(rank, &error),
            };
            let is_in_turn = match frame {
                Frame::Heartbeat(counters) => {
                    self.ends.count(rank, counters.busy_us, counters.workspace_grown);
                    true
                }
                Frame::Output { output, counters } => {
                    self.ends.count(rank, counters.busy_us, counters.workspace_grown);
                    self.ends.output(output) || self.is_over()
                }
                Frame::Loaded { .. } | Frame::Ready => milestones.try_send((rank, frame)).is_ok() || self.is_over(),
                Frame::Error { reason } => return self.fail(&reason, Some(rank)),
                Frame::Hello(_) | Frame::Welcome { .. } | Frame::Pool { .. } | Frame::Step(_) | Frame::Shutdown => {
                    false
                }
            };
            if !is_in_turn {
                let name = &self.names[rank - 1];
                return self.fail(&format!("{name} sent a frame out of turn"), Some(rank));
            }
        }
    }

    fn is_over(&self) -> bool {
        self.has_ended.load(Ordering::Acquire) || self.ends.failure().is_some()
    }

    fn lose(&self, rank: usize, error: &LinkError) {
        if !self.has_ended.load(Ordering::Acquire) {
            self.fail(&format!("{} is lost: {error}", self.names[rank - 1]), Some(rank));
        }
    }

    /// The end of the world, for `reason`: the engine, this process's own rank and all others hear of it,
    /// rank `last` last: it may not listen any more.
    fn fail(&self, reason: &str, last: Option<usize>) {
        if self.has_ended.load(Ordering::Acquire) || self.is_failing.swap(true, Ordering::AcqRel) {
            return;
        }
        self.ends.fail(reason);
        (self.abort)(reason);
        let last = last.map(|rank| rank - 1);
        let others = (0..self.senders.len()).filter(|at| Some(*at) != last);
        for at in others.chain(last) {
            // Whoever cannot be told finds the connection closed.
            let _ = self.senders[at].send(&Frame::Error { reason: reason.to_owned() });
            self.senders[at].close();
        }
    }

    fn shut_down(&self) {
        if !self.has_ended.swap(true, Ordering::AcqRel) {
            for sender in &self.senders {
                // Whoever is gone needs no word.
                let _ = sender.send(&Frame::Shutdown);
            }
        }
    }

    fn tell(&self, frame: &Frame) {
        for (at, sender) in self.senders.iter().enumerate() {
            if let Err(error) = sender.send(frame) {
                self.lose(at + 1, &error);
            }
        }
    }
}

fn frame_name(frame: &Frame) -> &'static str {
    match frame {
        Frame::Loaded { .. } => "loaded",
        Frame::Ready => "ready",
        _ => "another frame",
    }
}
