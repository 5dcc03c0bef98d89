//! Brings the ranks up: each loads its share on a thread of its own and rehearses the largest step
//! together with the others. Decides what a failure of one means for all; sizes nothing.

use crate::limits::{Limits, block_spec};
use crate::loading::StartTimes;
use crate::pipeline::panic_message;
use crate::warm_up::{LargestStep, largest_step};
use crate::worker::{PaddingBlocks, Worker};
use crate::{EngineConfig, EngineError};
use pagemill_backend::KvPoolSpec;
use pagemill_model::{CausalLm, Checkpoint, LoadProgress, ModelSpec, RankContext, Stage};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often progress is told while several ranks load.
const PROGRESS_PERIOD: Duration = Duration::from_millis(20);

/// Rehearsals of a rank among others. A stage of few layers has not used every buffer in every place
/// after the first.
const REHEARSALS: usize = 3;

/// What every rank is brought up from.
pub(crate) struct BringUp<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) spec: &'a ModelSpec,
    pub(crate) config: &'a EngineConfig,
    pub(crate) limits: &'a Limits,
    pub(crate) stages: &'a [Stage],
}

/// A rank that has loaded and rehearsed.
pub(crate) struct ReadyRank {
    pub(crate) worker: Worker,
    pub(crate) weight_bytes: u64,
    pub(crate) workspace_bytes: u64,
    /// Of its weights and its rehearsal.
    pub(crate) times: StartTimes,
}

/// A rank's share of the model.
struct Loaded {
    model: Box<dyn CausalLm>,
    /// How long loading took.
    took: Duration,
}

/// Bytes read so far, and in all.
#[derive(Default)]
struct Progress {
    done: AtomicU64,
    total: AtomicU64,
}

impl BringUp<'_> {
    /// Loads all ranks, stage by stage in `contexts`. One rank loads on the calling thread.
    ///
    /// # Errors
    /// The first rank's that failed; the others are woken and give up.
    pub(crate) fn run(
        &self,
        contexts: Vec<RankContext>,
        progress: &dyn Fn(LoadProgress),
    ) -> Result<Vec<ReadyRank>, EngineError> {
        let logits_rows = contexts.iter().map(|cx| cx.backend.logits_rows()).max().unwrap_or(1);
        let largest = largest_step(self.limits, self.config.block_size, logits_rows);
        if let ([cx], [stage]) = (contexts.as_slice(), self.stages) {
            return Ok(vec![self.bring_up(cx, stage, &largest, progress)?]);
        }
        let ranks_per_stage = contexts.len() / self.stages.len().max(1);
        let stage = |at: usize| &self.stages[at / ranks_per_stage];
        let counters: Vec<Progress> = contexts.iter().map(|_| Progress::default()).collect();
        let jobs = contexts.into_iter().enumerate().map(|(at, cx)| (at, cx, &counters[at]));
        let load = |(at, cx, counter): (usize, RankContext, &Progress)| {
            let tell = |progress: LoadProgress| {
                counter.total.store(progress.bytes_total, Ordering::Relaxed);
                counter.done.store(progress.bytes_done, Ordering::Relaxed);
            };
            let begun = Instant::now();
            let model = caught(&cx, &format!("rank {at}"), || {
                Ok(pagemill_model::load_stage(self.checkpoint, &cx, stage(at), &tell)?)
            })?;
            Ok((at, cx, Loaded { model, took: begun.elapsed() }))
        };
        // Ranks on GPUs wait for one another only for so long: all have loaded before any computes.
        let loaded = on_threads(jobs.collect(), load, &|| tell(&counters, progress))?;
        let rehearse = |(at, cx, loaded): (usize, RankContext, Loaded)| {
            caught(&cx, &format!("rank {at}"), || self.rehearse(&cx, loaded, stage(at), &largest))
        };
        on_threads(loaded, rehearse, &|| {})
    }

    /// Loads one rank, whose peers are brought up elsewhere at the same time, on the calling thread.
    ///
    /// # Errors
    /// Its own failure or a peer's; its peers are woken and give up.
    pub(crate) fn run_one(
        &self,
        cx: &RankContext,
        stage: &Stage,
        progress: &dyn Fn(LoadProgress),
    ) -> Result<ReadyRank, EngineError> {
        let largest = largest_step(self.limits, self.config.block_size, cx.backend.logits_rows());
        caught(cx, "a rank", || self.bring_up(cx, stage, &largest, progress))
    }

    /// Loads one rank and rehearses.
    fn bring_up(
        &self,
        cx: &RankContext,
        stage: &Stage,
        largest: &LargestStep,
        progress: &dyn Fn(LoadProgress),
    ) -> Result<ReadyRank, EngineError> {
        let begun = Instant::now();
        let model = pagemill_model::load_stage(self.checkpoint, cx, stage, progress)?;
        self.rehearse(cx, Loaded { model, took: begun.elapsed() }, stage, largest)
    }

    /// Rehearses the largest step on a pool that holds just that step: what it leaves in the workspace is what any
    /// later step needs.
    fn rehearse(
        &self,
        cx: &RankContext,
        loaded: Loaded,
        stage: &Stage,
        largest: &LargestStep,
    ) -> Result<ReadyRank, EngineError> {
        let begun = Instant::now();
        let Loaded { model, took: weights } = loaded;
        let weight_bytes = model.weight_bytes();
        let ranks_per_stage = cx.collective.world_size();
        let num_kv_heads = self.spec.kv_heads_by_rank(ranks_per_stage)?[cx.collective.rank()];
        let block = block_spec(self.spec, self.config, stage, num_kv_heads);
        let pool = cx.backend.alloc_kv(&KvPoolSpec { num_blocks: largest.num_blocks, ..block })?;
        let mut worker = Worker::new(cx.clone(), model, pool, PaddingBlocks::default(), self.limits.max_batch_tokens);
        // The same number on every rank: they rehearse together.
        let times = if ranks_per_stage * stage.count == 1 { 1 } else { REHEARSALS };
        cx.backend.rehearse(true);
        let rehearsed = (0..times).try_for_each(|_| worker.run(&largest.input, None).map(|_| ()));
        cx.backend.rehearse(false);
        rehearsed?;
        let times = StartTimes { weights, rehearsal: begun.elapsed(), ..StartTimes::default() };
        Ok(ReadyRank { worker, weight_bytes, workspace_bytes: cx.backend.workspace().0 as u64, times })
    }
}

/// Does each job on a thread of its own, and `tell`s now and then meanwhile.
///
/// # Errors
/// The first one's that failed.
fn on_threads<J: Send, T: Send>(
    jobs: Vec<J>,
    work: impl Fn(J) -> Result<T, EngineError> + Sync,
    tell: &dyn Fn(),
) -> Result<Vec<T>, EngineError> {
    let first_error: Mutex<Option<EngineError>> = Mutex::new(None);
    let num_left = AtomicUsize::new(jobs.len());
    let done: Vec<Option<T>> = std::thread::scope(|scope| {
        let (work, first_error, num_left) = (&work, &first_error, &num_left);
        let start = |job: J| {
            scope.spawn(move || {
                let result = work(job);
                let keep_first = |error| {
                    first_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                };
                let done = result.map_err(keep_first).ok();
                num_left.fetch_sub(1, Ordering::Release);
                done
            })
        };
        let threads: Vec<_> = jobs.into_iter().map(start).collect();
        while num_left.load(Ordering::Acquire) > 0 {
            std::thread::sleep(PROGRESS_PERIOD);
            tell();
        }
        // A rank's panics are caught inside.
        threads.into_iter().map(|thread| thread.join().ok().flatten()).collect()
    });
    if let Some(error) = first_error.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    let gone = || EngineError::Internal("a rank ended while it was starting".into());
    done.into_iter().map(|rank| rank.ok_or_else(gone)).collect()
}

/// What `work` of the rank that messages call `who` gives; where it fails or panics, the others are woken and give up.
fn caught<T>(cx: &RankContext, who: &str, work: impl FnOnce() -> Result<T, EngineError>) -> Result<T, EngineError> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(panicked(&*panic)))
        .inspect_err(|error| cx.collective.abort(&format!("{who} could not start: {error}")))
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> EngineError {
    EngineError::Internal(format!("a rank panicked while loading: {}", panic_message(panic)))
}

fn tell(counters: &[Progress], progress: &dyn Fn(LoadProgress)) {
    let sum = |of: fn(&Progress) -> &AtomicU64| counters.iter().map(|c| of(c).load(Ordering::Relaxed)).sum::<u64>();
    // The totals last: a rank states its own before it counts anything.
    let bytes_done = sum(|counter| &counter.done);
    progress(LoadProgress { bytes_done, bytes_total: sum(|counter| &counter.total) });
}
