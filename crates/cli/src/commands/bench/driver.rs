//! Drives an engine with a list of requests and records when each token came. Knows no HTTP.

use anyhow::{Context, Result, bail};
use pagemill_engine::{
    EngineEvent, EngineHandle, EngineStatus, EventSink, HostTime, Request, RequestId, SamplingParams, SinkClosed,
    SubmitError,
};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// One request's times, in seconds from the start of the run.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// When it was submitted.
    pub submitted: f64,
    /// When each token came.
    pub tokens: Vec<f64>,
}

impl Timeline {
    /// Seconds from submission to the last token.
    pub fn latency(&self) -> f64 {
        self.tokens.last().map_or(0.0, |t| t - self.submitted)
    }

    /// Seconds from submission to the first token.
    pub fn first_token(&self) -> f64 {
        self.tokens.first().map_or(0.0, |t| t - self.submitted)
    }
}

/// What a run gave.
#[derive(Clone, Debug, Default)]
pub struct RunResult {
    /// Seconds from the first submission to the last token.
    pub wall: f64,
    /// One for each request.
    pub timelines: Vec<Timeline>,
    /// Most blocks owned by sequences at once (sampled every few milliseconds).
    pub peak_owned_blocks: usize,
    /// Most sequences holding blocks at once.
    pub peak_running: usize,
    /// Mean over the samples of owned blocks / running sequences.
    pub mean_blocks_per_sequence: f64,
    /// The engine's counters at the end.
    pub status: EngineStatus,
}

/// One request to send: prompt and number of tokens to generate (end tokens are ignored).
pub struct Job {
    /// Token ids.
    pub prompt: Vec<u32>,
    /// Tokens to generate.
    pub generated: usize,
    /// Seconds after the start at which it arrives.
    pub arrival: f64,
    /// As the engine's: higher runs first.
    pub priority: i32,
}

/// The host's share of the steps, in microseconds a step.
pub fn host_json(host: &HostTime) -> serde_json::Value {
    let us = |sum_ns| host.us_a_step(sum_ns);
    serde_json::json!({
        "steps": host.steps, "steps_ahead": host.steps_ahead, "us_a_step": us(host.total_ns()),
        "schedule_us": us(host.schedule_ns), "layout_us": us(host.layout_ns), "apply_us": us(host.apply_ns),
        "deliver_us": us(host.deliver_ns), "not_hidden_us": us(host.exposed_ns),
    })
}

/// Sends all jobs at their times and waits for their ends.
///
/// # Errors
/// A request that was refused or failed: a benchmark with holes is no benchmark.
pub fn run(handle: &EngineHandle, jobs: Vec<Job>) -> Result<RunResult> {
    run_over(handle, jobs, Vec::new())
}

/// As [`run`], with tokens drawn by `sampling`.
///
/// # Errors
/// As [`run`].
pub fn run_drawing(handle: &EngineHandle, jobs: Vec<Job>, sampling: &SamplingParams) -> Result<RunResult> {
    run_measured(handle, jobs, sampling)
}

/// As [`run`], with `background` sent before and aborted after: it is not measured, and need not end.
///
/// # Errors
/// As [`run`].
pub fn run_over(handle: &EngineHandle, jobs: Vec<Job>, background: Vec<Job>) -> Result<RunResult> {
    let (unheard, _ears) = channel();
    let greedy = SamplingParams::default();
    let background = submit_all(handle, background, &greedy, Instant::now(), &unheard)?;
    let result = run_measured(handle, jobs, &greedy);
    background.into_iter().for_each(|id| handle.abort(id));
    result
}

fn run_measured(handle: &EngineHandle, jobs: Vec<Job>, sampling: &SamplingParams) -> Result<RunResult> {
    let start = Instant::now();
    let (sender, receiver) = channel();
    let expected = jobs.len();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| watch_blocks(handle, &done));
        let outcome = submit_all(handle, jobs, sampling, start, &sender).and_then(|_| gather(&receiver, expected));
        done.store(true, Ordering::Release);
        let blocks = watcher.join().map_err(|_| anyhow::anyhow!("the watching thread failed"))?;
        let timelines = outcome?;
        let wall = timelines.iter().filter_map(|t| t.tokens.last().copied()).fold(0.0, f64::max);
        let status = handle.status();
        Ok(RunResult {
            wall,
            timelines,
            peak_owned_blocks: blocks.peak_owned,
            peak_running: blocks.peak_running,
            mean_blocks_per_sequence: blocks.mean_per_sequence(),
            status,
        })
    })
}

/// Submissions under way at once: fewer than the engine's queue holds.
const MAX_UNANSWERED: usize = 512;

fn submit_all(
    handle: &EngineHandle,
    jobs: Vec<Job>,
    sampling: &SamplingParams,
    start: Instant,
    sender: &Sender<Outcome>,
) -> Result<Vec<RequestId>> {
    let (replier, replies) = channel();
    let mut ids = Vec::with_capacity(jobs.len());
    let answer = || {
        let (index, reply): (usize, Result<RequestId, SubmitError>) = replies.recv().context("the engine stopped")?;
        reply.with_context(|| format!("request {index}"))
    };
    let num_jobs = jobs.len();
    for (index, job) in jobs.into_iter().enumerate() {
        let due = Duration::from_secs_f64(job.arrival);
        if let Some(wait) = due.checked_sub(start.elapsed()) {
            std::thread::sleep(wait);
        }
        let submitted = if job.arrival > 0.0 { job.arrival } else { start.elapsed().as_secs_f64() };
        let sink = RecordingSink {
            index,
            start,
            timeline: Timeline { submitted, tokens: Vec::with_capacity(job.generated) },
            sender: sender.clone(),
        };
        let request = Request {
            prompt: job.prompt,
            max_tokens: job.generated,
            n: 1,
            sampling: sampling.clone(),
            priority: job.priority,
            cache_salt: None,
            sink: Box::new(sink),
        };
        // An answer comes between two steps: waiting for each would let one request in a step.
        let replier = replier.clone();
        handle.submit_with(
            request,
            Box::new(move |reply| {
                // Nobody listens any more when another request was refused.
                let _ = replier.send((index, reply));
            }),
        );
        if index + 1 - ids.len() >= MAX_UNANSWERED {
            ids.push(answer()?);
        }
    }
    while ids.len() < num_jobs {
        ids.push(answer()?);
    }
    Ok(ids)
}

fn gather(receiver: &Receiver<Outcome>, expected: usize) -> Result<Vec<Timeline>> {
    let mut timelines = vec![Timeline::default(); expected];
    for _ in 0..expected {
        let (index, outcome) = receiver.recv().context("the engine stopped")?;
        match outcome {
            Ok(timeline) => timelines[index] = timeline,
            Err(message) => bail!("request {index}: {message}"),
        }
    }
    Ok(timelines)
}

#[derive(Default)]
struct BlockWatch {
    peak_owned: usize,
    peak_running: usize,
    per_sequence_sum: f64,
    samples: u64,
}

impl BlockWatch {
    #[allow(clippy::cast_precision_loss)] // counts of samples
    fn mean_per_sequence(&self) -> f64 {
        if self.samples == 0 { 0.0 } else { self.per_sequence_sum / self.samples as f64 }
    }
}

#[allow(clippy::cast_precision_loss)] // block counts
fn watch_blocks(handle: &EngineHandle, done: &AtomicBool) -> BlockWatch {
    let mut watch = BlockWatch::default();
    while !done.load(Ordering::Acquire) {
        let status = handle.status();
        let (owned, running) = (status.kv_cache.num_owned, status.scheduler.num_running);
        watch.peak_owned = watch.peak_owned.max(owned);
        watch.peak_running = watch.peak_running.max(running);
        if running > 0 {
            watch.per_sequence_sum += owned as f64 / running as f64;
            watch.samples += 1;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    watch
}

type Outcome = (usize, Result<Timeline, String>);

struct RecordingSink {
    index: usize,
    start: Instant,
    timeline: Timeline,
    sender: Sender<Outcome>,
}

impl EventSink for RecordingSink {
    fn send(&mut self, event: EngineEvent) -> Result<(), SinkClosed> {
        let outcome = match event {
            EngineEvent::Token { .. } => {
                self.timeline.tokens.push(self.start.elapsed().as_secs_f64());
                return Ok(());
            }
            EngineEvent::PromptLogprobs { .. } => return Ok(()),
            EngineEvent::Finished { reason: pagemill_engine::FinishReason::Failed(why), .. } => Err(why),
            EngineEvent::Finished { .. } => Ok(std::mem::take(&mut self.timeline)),
            EngineEvent::Failed { message } => Err(message),
        };
        self.sender.send((self.index, outcome)).map_err(|_| SinkClosed)
    }

    fn is_closed(&self) -> bool {
        false
    }
}
