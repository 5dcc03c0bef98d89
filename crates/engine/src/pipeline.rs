//! `PipelineExecutor`: one worker thread for each rank of this process, fed through bounded channels, ranks
//! of other processes behind one more channel, and outputs from the last stage's first rank. Knows threads,
//! their ends and how long each was busy; what a step computes is `worker`'s.

use crate::draws::join_draws;
use crate::executor::{MicroBatchSample, PipelineStatus, StageStatus};
use crate::layout::{BatchBuilder, Packing};
use crate::packer::{Packer, SpentBatches};
use crate::remote::{OutputSender, RemoteRanks};
use crate::step_times::StepTimes;
use crate::worker::Worker;
use crate::{EngineError, Executor, RankHostTime, StepInput};
use crossbeam_channel::{Receiver, RecvTimeoutError, Select, Sender, TryRecvError, bounded};
use pagemill_backend::{Collective, KvPoolSpec};
use pagemill_model::{ParallelMode, Stage};
use pagemill_scheduler::{StepOutput, StepPlan};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Steps in flight at most, whatever the tuning finds.
pub(crate) const MAX_MICRO_BATCHES: usize = 32;

/// How often a waiting `collect` looks for a rank that failed without a word to the others.
const FAILURE_POLL: Duration = Duration::from_millis(100);

/// How long before a step is expected back the engine stops sleeping, where it may spin, and for how long it
/// does so at most.
const WATCH_BEFORE: Duration = Duration::from_micros(300);
const WATCH_FOR: Duration = Duration::from_micros(900);

/// How long before a step is expected to end the next one is planned: longer than planning takes, and no longer
/// than need be, since what arrives later waits for one step more. And the part of the step by which it may end
/// sooner than expected.
const PLAN_BEFORE: Duration = Duration::from_micros(300);
const PLAN_BEFORE_PART: u32 = 32;

/// How long a rank on a device of its own looks for the next step before it sleeps: longer than the engine takes
/// to plan it.
const WATCH_FOR_INPUT: Duration = Duration::from_micros(300);

/// How long an executor that ends waits for what other processes still compute.
const LAST_OUTPUTS: Duration = Duration::from_secs(2);

/// Runs plans on the ranks' worker threads.
pub struct PipelineExecutor {
    /// Stage by stage.
    ranks: Vec<RankThread>,
    packer: Packer,
    /// The shape of the first rank's pool; others differ in heads only.
    pool: KvPoolSpec,
    /// Batches that ranks of this process are done with.
    spent_batches: SpentBatches,
    /// Nanoseconds spent on packing batches here.
    packing_ns: u64,
    /// Plans for the ranks of other processes.
    remote_inputs: Option<Sender<Arc<StepInput>>>,
    /// From the last stage's first rank.
    outputs: Receiver<Result<StepOutput, EngineError>>,
    /// What the first rank to fail said.
    failure: Arc<OnceLock<String>>,
    /// To end every wait of every rank.
    collective: Arc<dyn Collective>,
    max_in_flight: usize,
    /// Oldest first. Kept here so that what a plan holds is freed on this thread, while ranks compute.
    in_flight: VecDeque<Arc<StepInput>>,
    /// Of the step collected last.
    spent_plan: Option<StepPlan>,
    /// Since when the oldest one has run.
    running_since: Instant,
    step_times: StepTimes,
    /// Since when something has been in flight.
    active_since: Option<Instant>,
    active: Duration,
    tuning: Arc<[MicroBatchSample]>,
    watch: Watch,
}

/// The executor's ends of the ways to the ranks and back.
struct Channels {
    remote_inputs: Option<Sender<Arc<StepInput>>>,
    outputs: Receiver<Result<StepOutput, EngineError>>,
    failure: Arc<OnceLock<String>>,
    spent_batches: SpentBatches,
}

/// When the engine looks for a step's output instead of sleeping until it is woken, which takes tens of
/// microseconds. Where ranks compute on the host's cores, never: they need them.
struct Watch {
    is_allowed: bool,
    /// How long the last waits took, smoothed.
    expected: Duration,
}

/// A step on its way to a rank of this process. Where steps are planned ahead its batch is packed on the engine's
/// thread, while the step before runs: all that is left to do between the two is to fill in the draws.
struct RankStep {
    input: Arc<StepInput>,
    packed: Option<BatchBuilder>,
}

/// A worker's own thread, or what is known of a rank elsewhere. A thread ends when its input closes, at its
/// first error, and at a panic.
struct RankThread {
    /// `None` for a rank of another process, and while dropping.
    inputs: Option<Sender<RankStep>>,
    thread: Option<JoinHandle<()>>,
    meter: Arc<RankMeter>,
    stage: usize,
    rank: usize,
    num_layers: usize,
    /// Its meter's busy time when the tuning ended.
    busy_us_at_start: u64,
}

/// What a rank counts, read from outside while it works.
#[derive(Default)]
pub(crate) struct RankMeter {
    /// Microseconds in steps, without waiting for the stages beside it.
    pub(crate) busy_us: AtomicU64,
    /// Times the workspace grew since the warm-up.
    pub(crate) workspace_grown: AtomicU64,
    /// As in [`crate::HostTime`].
    pub(crate) layout_ns: AtomicU64,
    /// As in [`crate::HostTime`].
    pub(crate) exposed_ns: AtomicU64,
    /// As in [`crate::HostTime`].
    pub(crate) steps_queued: AtomicU64,
}

/// One rank's thread, and what it reports to.
struct RankLoop {
    worker: Worker,
    /// `stage 1, rank 0`.
    name: String,
    inputs: Receiver<RankStep>,
    /// On the last stage's first rank.
    outputs: Option<OutputSender>,
    failure: Arc<OnceLock<String>>,
    collective: Arc<dyn Collective>,
    may_spin: bool,
}

impl PipelineExecutor {
    /// Starts a thread for each of `workers`, stage by stage.
    ///
    /// # Errors
    /// The system gave no thread, or there is no worker.
    pub(crate) fn start(mut workers: Vec<Worker>) -> Result<Self, EngineError> {
        join_draws(&mut workers);
        let first = workers.first().map(|worker| (worker.collective(), (worker.packing(), worker.pool().clone())));
        let (collective, batches) = first.ok_or_else(|| EngineError::Internal("an engine without ranks".into()))?;
        let (output_sender, outputs) = bounded(MAX_MICRO_BATCHES + 1);
        let failure = Arc::new(OnceLock::new());
        let may_spin = workers.iter().all(|worker| !worker.shares_cores());
        let spent_batches = SpentBatches::default();
        workers.iter_mut().for_each(|worker| worker.set_spent_batches(spent_batches.clone()));
        let ranks = workers
            .into_iter()
            .enumerate()
            .map(|(at, worker)| RankThread::start(at, worker, &output_sender, &failure))
            .collect::<Result<_, _>>()?;
        let channels = Channels { remote_inputs: None, outputs, failure, spent_batches };
        Ok(Self::over(ranks, batches, channels, collective, may_spin))
    }

    /// Starts a thread for `worker`, rank 0 of `mode`, beside the ranks behind `remote`.
    ///
    /// # Errors
    /// The system gave no thread, or the ranks are not the mode's.
    pub(crate) fn start_among(
        worker: Worker,
        remote: RemoteRanks,
        stages: &[Stage],
        mode: ParallelMode,
    ) -> Result<Self, EngineError> {
        let RemoteRanks { inputs, output_sender, outputs, failure, meters } = remote;
        if meters.len() + 1 != mode.num_ranks() || stages.len() != mode.pipeline_parallel {
            let detail = format!("{} ranks elsewhere and one here for {mode}", meters.len());
            return Err(EngineError::Config { key: "tensor_parallel, pipeline_parallel", detail });
        }
        let (collective, may_spin) = (worker.collective(), !worker.shares_cores());
        let batches = (worker.packing(), worker.pool().clone());
        let mut ranks = vec![RankThread::start(0, worker, &output_sender, &failure)?];
        ranks.extend(meters.into_iter().zip(1..).map(|(meter, at)| {
            let (stage, rank) = (at / mode.tensor_parallel, at % mode.tensor_parallel);
            let num_layers = stages[stage].layers.len();
            RankThread { inputs: None, thread: None, meter, stage, rank, num_layers, busy_us_at_start: 0 }
        }));
        let channels =
            Channels { remote_inputs: Some(inputs), outputs, failure, spent_batches: SpentBatches::default() };
        Ok(Self::over(ranks, batches, channels, collective, may_spin))
    }

    fn over(
        ranks: Vec<RankThread>,
        (packing, pool): (Packing, KvPoolSpec),
        channels: Channels,
        collective: Arc<dyn Collective>,
        may_spin: bool,
    ) -> Self {
        let Channels { remote_inputs, outputs, failure, spent_batches } = channels;
        Self {
            ranks,
            packer: Packer::new(packing),
            pool,
            spent_batches,
            packing_ns: 0,
            remote_inputs,
            outputs,
            failure,
            collective,
            max_in_flight: 1,
            in_flight: VecDeque::new(),
            spent_plan: None,
            running_since: Instant::now(),
            step_times: StepTimes::new(),
            active_since: None,
            active: Duration::ZERO,
            tuning: Arc::new([]),
            watch: Watch { is_allowed: may_spin, expected: Duration::ZERO },
        }
    }

    /// Stages of the pipeline.
    pub(crate) fn num_stages(&self) -> usize {
        self.ranks.last().map_or(1, |rank| rank.stage + 1)
    }

    /// Allows so many steps in flight; nothing is in flight.
    pub(crate) fn set_max_in_flight(&mut self, count: usize) {
        self.max_in_flight = count.clamp(1, MAX_MICRO_BATCHES);
    }

    /// Keeps what the tuning measured, and starts counting busy times from here.
    pub(crate) fn finish_tuning(&mut self, samples: &[MicroBatchSample]) {
        self.tuning = samples.into();
        self.active = Duration::ZERO;
        for rank in &mut self.ranks {
            rank.busy_us_at_start = rank.meter.busy_us.load(Ordering::Relaxed);
        }
    }

    /// Lets what is in flight come home, so that the other processes can end in order.
    fn await_last_outputs(&mut self) {
        let deadline = Instant::now() + LAST_OUTPUTS;
        while !self.in_flight.is_empty() && self.failure.get().is_none() {
            match self.outputs.recv_timeout(FAILURE_POLL) {
                Ok(Ok(_)) => drop(self.in_flight.pop_front()),
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                Ok(Err(_)) | Err(_) => return,
            }
        }
    }

    /// The step's batch, where steps are planned ahead.
    fn packed_ahead(&mut self, input: &StepInput) -> Result<Option<BatchBuilder>, EngineError> {
        if !self.fills_in_draws() {
            return Ok(None);
        }
        let started = Instant::now();
        let mut batch = self.spent_batches.take();
        self.packer.pack(&input.plan, &mut batch)?;
        batch.check(&self.pool)?;
        self.packing_ns += u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        Ok(Some(batch))
    }

    fn lost_rank(&self) -> EngineError {
        EngineError::Internal(self.failure.get().cloned().unwrap_or_else(|| "a rank's thread is gone".into()))
    }
}

impl Executor for PipelineExecutor {
    fn submit(&mut self, input: StepInput) -> Result<(), EngineError> {
        let input = Arc::new(input);
        let mut packed = self.packed_ahead(&input)?;
        let failed = || self.failure.get().is_some();
        // Those that are farther away first.
        if let Some(inputs) = &self.remote_inputs
            && (failed() || inputs.send(Arc::clone(&input)).is_err())
        {
            return Err(self.lost_rank());
        }
        let copy_for_another = |batch: &BatchBuilder| {
            let mut copy = self.spent_batches.take();
            copy.copy_from(batch);
            copy
        };
        let mut channels = self.ranks.iter().filter_map(|rank| rank.inputs.as_ref()).peekable();
        while let Some(inputs) = channels.next() {
            let packed = if channels.peek().is_none() { packed.take() } else { packed.as_ref().map(copy_for_another) };
            if failed() || inputs.send(RankStep { input: Arc::clone(&input), packed }).is_err() {
                return Err(self.lost_rank());
            }
        }
        if self.in_flight.is_empty() {
            self.running_since = Instant::now();
            self.active_since.get_or_insert(self.running_since);
        }
        self.in_flight.push_back(input);
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput, EngineError> {
        let started = Instant::now();
        let output = loop {
            match self.watch.receive(&self.outputs) {
                Ok(Ok(output)) => break output,
                // The first failure says more than what followed from it.
                Ok(Err(error)) => return Err(self.failure.get().cloned().map_or(error, EngineError::Internal)),
                Err(RecvTimeoutError::Timeout) if self.failure.get().is_none() => {}
                Err(_) => return Err(self.lost_rank()),
            }
        };
        self.watch.expected = (self.watch.expected * 3 + started.elapsed()) / 4;
        let now = Instant::now();
        if let Some(input) = self.in_flight.pop_front() {
            self.step_times.record(input.plan.num_tokens(), now - self.running_since);
            // Ranks let go of a step before the last of them hands over its output; some may be later.
            self.spent_plan = Arc::into_inner(input).map(|input| input.plan);
        }
        self.running_since = now;
        if self.in_flight.is_empty()
            && let Some(since) = self.active_since.take()
        {
            self.active += since.elapsed();
        }
        Ok(output)
    }

    fn take_spent_plan(&mut self) -> Option<StepPlan> {
        self.spent_plan.take()
    }

    fn check(&self) -> Result<(), EngineError> {
        self.failure.get().map_or(Ok(()), |_| Err(self.lost_rank()))
    }

    fn max_in_flight(&self) -> usize {
        self.max_in_flight
    }

    fn leaves_cores(&self) -> bool {
        self.watch.is_allowed
    }

    fn fills_in_draws(&self) -> bool {
        // Draws stay within a process and a stage.
        self.remote_inputs.is_none() && self.num_stages() == 1 && self.max_in_flight == 1
    }

    fn await_planning(&mut self) -> Result<bool, EngineError> {
        let num_tokens = self.in_flight.front().map_or(0, |input| input.plan.num_tokens());
        let Some(expected) = self.step_times.expected(num_tokens) else { return Ok(false) };
        let due = self.running_since + expected.saturating_sub(PLAN_BEFORE + expected / PLAN_BEFORE_PART);
        let mut output = Select::new();
        output.recv(&self.outputs);
        Ok(output.ready_deadline(due).is_err())
    }

    fn rank_host_time(&self) -> RankHostTime {
        self.ranks.first().map_or_else(RankHostTime::default, |rank| RankHostTime {
            layout_ns: rank.meter.layout_ns.load(Ordering::Relaxed) + self.packing_ns,
            exposed_ns: rank.meter.exposed_ns.load(Ordering::Relaxed),
            steps_queued: rank.meter.steps_queued.load(Ordering::Relaxed),
        })
    }

    fn workspace_grown(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.meter.workspace_grown.load(Ordering::Relaxed)).sum()
    }

    fn pipeline_status(&self) -> PipelineStatus {
        let active = self.active + self.active_since.map_or(Duration::ZERO, |since| since.elapsed());
        let stages = self.ranks.iter().filter(|rank| rank.rank == 0).map(|rank| StageStatus {
            num_layers: rank.num_layers,
            busy_us: rank.meter.busy_us.load(Ordering::Relaxed).saturating_sub(rank.busy_us_at_start),
        });
        PipelineStatus {
            num_ranks: self.ranks.len(),
            micro_batches: self.max_in_flight,
            active_us: u64::try_from(active.as_micros()).unwrap_or(u64::MAX),
            stages: stages.collect(),
            tuning: Arc::clone(&self.tuning),
        }
    }
}

impl Watch {
    /// Sleeps until the next output comes, but for a while about when it is expected.
    fn receive<T>(&self, outputs: &Receiver<T>) -> Result<T, RecvTimeoutError> {
        if self.is_allowed {
            match outputs.recv_timeout(self.expected.saturating_sub(WATCH_BEFORE)) {
                Err(RecvTimeoutError::Timeout) => {}
                found => return found,
            }
            if let Some(found) = watch_for(outputs, WATCH_FOR) {
                return found.map_err(|_| RecvTimeoutError::Disconnected);
            }
        }
        outputs.recv_timeout(FAILURE_POLL)
    }
}

/// What comes within `time`, without sleeping.
pub(crate) fn watch_for<T>(receiver: &Receiver<T>, time: Duration) -> Option<Result<T, TryRecvError>> {
    let started = Instant::now();
    while started.elapsed() < time {
        match receiver.try_recv() {
            Err(TryRecvError::Empty) => std::hint::spin_loop(),
            found => return Some(found),
        }
    }
    None
}

impl Drop for PipelineExecutor {
    fn drop(&mut self) {
        if self.remote_inputs.is_some() {
            self.await_last_outputs();
        }
        if !self.in_flight.is_empty() {
            self.collective.abort("the engine has stopped");
        }
        self.remote_inputs = None;
        // All inputs first: a rank may wait for another one.
        self.ranks.iter_mut().for_each(|rank| rank.inputs = None);
        for rank in &mut self.ranks {
            if let Some(thread) = rank.thread.take() {
                // Its panics are caught and told as errors; there is nothing left to hear.
                let _ = thread.join();
            }
        }
    }
}

impl RankThread {
    fn start(
        at: usize,
        worker: Worker,
        outputs: &OutputSender,
        failure: &Arc<OnceLock<String>>,
    ) -> Result<Self, EngineError> {
        let (input_sender, inputs) = bounded(MAX_MICRO_BATCHES);
        let (stage, rank) = (worker.stage().index, worker.rank());
        let name = format!("stage {stage}, rank {rank}");
        let (meter, num_layers) = (worker.meter(), worker.stage().layers.len());
        let rank_loop = RankLoop {
            outputs: worker.is_output_rank().then(|| outputs.clone()),
            collective: worker.collective(),
            may_spin: !worker.shares_cores(),
            worker,
            inputs,
            failure: Arc::clone(failure),
            name: name.clone(),
        };
        let thread = std::thread::Builder::new()
            .name(format!("pagemill-rank-{at}"))
            .spawn(move || rank_loop.run())
            .map_err(|error| EngineError::Internal(format!("no thread for {name}: {error}")))?;
        let inputs = Some(input_sender);
        Ok(Self { inputs, thread: Some(thread), meter, stage, rank, num_layers, busy_us_at_start: 0 })
    }
}

/// What a rank does next.
enum Next {
    Step(Box<RankStep>),
    /// The draws of the step that its device was given first are there.
    Sampled,
    End,
}

impl RankLoop {
    fn next(&self) -> Next {
        if self.worker.has_queued() {
            return self.watch_device();
        }
        let found = if self.may_spin { watch_for(&self.inputs, WATCH_FOR_INPUT) } else { None };
        match found {
            Some(found) => found.map_or(Next::End, |step| Next::Step(step.into())),
            None => self.inputs.recv().map_or(Next::End, |step| Next::Step(step.into())),
        }
    }

    /// What comes first: another step, or the end of the one on the device.
    fn watch_device(&self) -> Next {
        loop {
            match self.inputs.try_recv() {
                Ok(step) => return Next::Step(step.into()),
                Err(TryRecvError::Disconnected) => return Next::End,
                Err(TryRecvError::Empty) => {}
            }
            // What went wrong is told where the draws are taken.
            if self.worker.is_sampled().unwrap_or(true) {
                return Next::Sampled;
            }
            std::hint::spin_loop();
        }
    }

    fn run(mut self) {
        loop {
            let went_on = match self.next() {
                Next::Step(step) => self.step(*step),
                Next::Sampled => self.hand_over(Worker::take_queued),
                Next::End => return,
            };
            if !went_on {
                return;
            }
        }
    }

    /// Gives the device a step if it takes it behind the one that it has, or runs it when that is through. False: the
    /// rank has failed, or nobody listens.
    fn step(&mut self, step: RankStep) -> bool {
        let RankStep { input, mut packed } = step;
        let had_queued = self.worker.has_queued();
        let queued = match caught(|| self.worker.queue(&input, &mut packed)) {
            Ok(queued) => queued,
            Err(error) => return self.hand_over(|_| Err(error)),
        };
        if had_queued && !self.hand_over(Worker::take_queued) {
            return false;
        }
        // The executor keeps another input, whose end costs the ranks no time.
        queued || self.hand_over(move |worker| worker.run(&input, packed))
    }

    /// Hands over the output of what `work` does. False: it failed, or nobody listens.
    fn hand_over(&mut self, work: impl FnOnce(&mut Worker) -> Result<StepOutput, EngineError>) -> bool {
        let result = caught(|| work(&mut self.worker));
        if let Err(error) = &result {
            let reason = format!("{}: {error}", self.name);
            self.collective.abort(self.failure.get_or_init(|| reason));
        }
        let has_failed = result.is_err();
        let is_heard = self.outputs.as_ref().is_none_or(|outputs| outputs.send(result).is_ok());
        is_heard && !has_failed
    }
}

/// Runs a rank's part of a step; a panic is its error. The rank is not used again after one, so a half-changed one is
/// never seen.
pub(crate) fn run_caught(
    worker: &mut Worker,
    input: &StepInput,
    packed: Option<BatchBuilder>,
) -> Result<StepOutput, EngineError> {
    caught(|| worker.run(input, packed))
}

/// What `work` gives; a panic is its error. What it changes is not used again after one.
fn caught<T>(work: impl FnOnce() -> Result<T, EngineError>) -> Result<T, EngineError> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(EngineError::Internal(format!("panicked: {}", panic_message(&*panic)))))
}

/// What a panic said.
pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
