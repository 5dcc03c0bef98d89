//! Seeded workloads: what clients ask for, when, and what becomes of them while they are answered.
//! Prompts share prefixes, as chats and system prompts do. Knows no engine.

use crate::Draw;
use crate::fake_model::{FakeModel, VOCAB_SIZE};
use pagemill_engine::SamplingParams;
use pagemill_scheduler::Time;

/// Shared prefixes that prompts of one workload begin with.
const NUM_SHARED: usize = 3;

/// How a client leaves, or does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Listens to the end.
    LeftAlone,
    /// Aborted by id after so many calls of the step loop.
    AbortedAfter(u64),
    /// Its connection closes once it has heard so many events.
    ClosesAfter(usize),
    /// Its buffer holds so many events, and nobody reads it.
    FullAfter(usize),
    /// A stop string is found in one choice after so many of its tokens.
    StopString {
        /// The choice.
        choice: u32,
        /// Tokens heard by then; 0: at the next look.
        after: usize,
    },
}

/// One request of a workload.
#[derive(Clone, Debug)]
pub struct PlannedRequest {
    /// When it is submitted.
    pub arrival: Time,
    /// Prompt token ids; now and then none, or too many.
    pub prompt: Vec<u32>,
    /// Most tokens for each choice.
    pub max_tokens: usize,
    /// Choices.
    pub n: u32,
    /// As the scheduler's.
    pub priority: i32,
    /// As the scheduler's.
    pub cache_salt: Option<Vec<u8>>,
    /// Stop tokens, minimum, log-probabilities and seed; the fake model reads no other field.
    pub sampling: SamplingParams,
    /// What becomes of its client.
    pub fate: Fate,
}

/// Bounds of a workload.
#[derive(Clone, Copy, Debug)]
pub struct WorkloadLimits {
    /// Requests at most.
    pub max_requests: usize,
    /// Tokens of a sequence; some requests exceed it.
    pub max_seq_len: usize,
    /// Sequences in a batch; some requests want more choices.
    pub max_batch_size: usize,
}

/// Draws a workload, in order of arrival.
#[must_use]
pub fn draw_workload(draw: &mut Draw, limits: WorkloadLimits, model: &FakeModel) -> Vec<PlannedRequest> {
    let shared: Vec<Vec<u32>> = (0..NUM_SHARED).map(|_| draw_tokens(draw, limits.max_seq_len)).collect();
    let spacing_us = draw.pick(&[0, 0, 300, 3_000]);
    let mut arrival_us = 0;
    let num_requests = draw.between(1, limits.max_requests);
    let mut requests = Vec::with_capacity(num_requests);
    for request_idx in 0..num_requests {
        arrival_us += draw.between(0, spacing_us) as u64;
        let mut request = draw_request(draw, limits, &shared, request_idx);
        request.arrival = Time(arrival_us);
        draw_stop_tokens(draw, &mut request, limits.max_seq_len, model);
        requests.push(request);
    }
    requests
}

fn draw_tokens(draw: &mut Draw, len: usize) -> Vec<u32> {
    (0..len).map(|_| u32::try_from(draw.word() % VOCAB_SIZE).unwrap_or(0)).collect()
}

fn draw_request(draw: &mut Draw, limits: WorkloadLimits, shared: &[Vec<u32>], request_idx: usize) -> PlannedRequest {
    let max_seq_len = limits.max_seq_len;
    let max_tokens = match draw.between(0, 15) {
        0 => 0,
        1 => 1,
        2 => max_seq_len,
        _ => draw.between(1, (max_seq_len / 2).max(1)),
    };
    let n = if draw.one_in(3) { draw.between(2, 4) } else { 1 };
    let n = if draw.one_in(100) { limits.max_batch_size + 1 } else { n };
    let n = u32::try_from(n).unwrap_or(1);
    let cache_salt = match draw.between(0, 9) {
        0 => Some(b"a".to_vec()),
        1 => Some(b"b".to_vec()),
        2 => Some(format!("request {request_idx}").into_bytes()),
        _ => None,
    };
    PlannedRequest {
        arrival: Time(0),
        prompt: draw_prompt(draw, max_seq_len, max_tokens, shared),
        max_tokens,
        n,
        priority: draw.pick(&[0, 0, 0, 0, 1, 2, -1, -1]),
        cache_salt,
        sampling: SamplingParams {
            seed: draw.word(),
            logprobs: draw.one_in(4).then_some(0),
            prompt_logprobs: draw.one_in(8).then_some(0),
            min_tokens: if draw.one_in(4) { draw.between(1, 12).min(max_tokens) } else { 0 },
            ..SamplingParams::default()
        },
        fate: draw_fate(draw, n, max_tokens),
    }
}

/// A prompt that mostly leaves room for `max_tokens`, with a shared beginning as often as not.
fn draw_prompt(draw: &mut Draw, max_seq_len: usize, max_tokens: usize, shared: &[Vec<u32>]) -> Vec<u32> {
    if draw.one_in(80) {
        return Vec::new();
    }
    let room = max_seq_len.saturating_sub(max_tokens).max(1);
    let len = if draw.one_in(60) { max_seq_len + 1 } else { draw.between(1, room) };
    let mut prompt = shared[draw.between(0, shared.len() - 1)].clone();
    let num_shared = match draw.between(0, 3) {
        0 => 0,
        1 => draw.between(0, len),
        _ => len,
    };
    prompt.truncate(num_shared.min(len));
    let fresh = len - prompt.len();
    prompt.extend(draw_tokens(draw, fresh));
    prompt
}

fn draw_fate(draw: &mut Draw, n: u32, max_tokens: usize) -> Fate {
    let after = draw.between(0, max_tokens);
    match draw.between(0, 15) {
        0 | 1 => Fate::AbortedAfter(draw.between(0, 30) as u64),
        2 => Fate::ClosesAfter(after),
        3 => Fate::FullAfter(after),
        4 | 5 => Fate::StopString { choice: u32::try_from(draw.between(0, n as usize - 1)).unwrap_or(0), after },
        _ => Fate::LeftAlone,
    }
}

/// One request in three has a stop token that one of its choices would say.
fn draw_stop_tokens(draw: &mut Draw, request: &mut PlannedRequest, max_seq_len: usize, model: &FakeModel) {
    if request.prompt.is_empty() || !draw.one_in(3) {
        return;
    }
    let expected = model.expected(request, max_seq_len);
    let choice = &expected.choices[draw.between(0, expected.choices.len() - 1)];
    if !choice.tokens.is_empty() {
        let mut stops = vec![draw.pick(&choice.tokens), draw.pick(&choice.tokens)];
        stops.sort_unstable();
        stops.dedup();
        request.sampling.stop_token_ids = stops;
    }
}
