//! Load on an OpenAI server: sends completions as a closed loop or as Poisson arrivals and times each
//! streamed event. One plain thread for each request in flight. Does not know whose server it is.

use super::http::Server;
use super::workload::{Lengths, Random};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Stack of a client thread: it holds one answer's line at a time.
const STACK_BYTES: usize = 512 << 10;

/// Words of prompts: short and common, so that most vocabularies have one token for each.
const WORDS: [&str; 64] = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money",
    "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side",
    "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law",
    "car",
];

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pacing {
    /// This many in flight all the time.
    Closed(usize),
    /// At the times the requests carry.
    Open,
}

/// What every request asks for.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The model's name at the server.
    pub model: String,
    /// Send `ignore_eos`, which is no field of the OpenAI API itself.
    pub ignore_eos: bool,
}

/// One request to send.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// The prompt.
    pub prompt: String,
    /// Tokens to generate.
    pub generated: usize,
    /// Seconds after the start at which it arrives, in open pacing.
    pub arrival: f64,
}

/// What became of a request; times in seconds from the start of the run.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// When it was due (open) or sent (closed).
    pub submitted: f64,
    /// When each event with text or tokens came.
    pub events: Vec<f64>,
    /// When the stream ended.
    pub ended: f64,
    /// Prompt tokens, as the server counted.
    pub prompt_tokens: u64,
    /// Of these, found in a prefix cache, if the server says so.
    pub cached_tokens: u64,
    /// Generated tokens as the server counted, else the events.
    pub output_tokens: u64,
}

/// A request's end: its times, or why it failed.
pub type Outcome = Result<Timeline, String>;

/// Distinct random prompts of about these lengths, the first `shared` words the same in all.
pub fn jobs(random: &mut Random, lengths: &[Lengths], shared: usize, rate: Option<f64>) -> Vec<Job> {
    let prefix = words(random, shared);
    let mut arrival = 0.0;
    let job = |length: &Lengths| {
        if let Some(rate) = rate {
            arrival -= (1.0 - random.unit()).ln() / rate;
        }
        let own = words(random, length.prompt);
        let prompt = if prefix.is_empty() { own } else { format!("{prefix} {own}") };
        Job { prompt, generated: length.generated, arrival }
    };
    lengths.iter().map(job).collect()
}

/// `count` random words.
pub fn words(random: &mut Random, count: usize) -> String {
    let mut text = String::with_capacity(count * 7);
    for i in 0..count {
        if i > 0 {
            text.push(' ');
        }
        #[allow(clippy::cast_possible_truncation)] // below the number of words
        text.push_str(WORDS[random.below(WORDS.len() as u64) as usize]);
    }
    text
}

/// The first model that the server lists.
///
/// # Errors
/// No answer, or none that lists a model.
pub fn first_model(server: &Server) -> Result<String> {
    let answer = server.send("GET", "/v1/models", "")?;
    let (status, text) = (answer.status, answer.text()?);
    let list: Value = serde_json::from_str(&text).with_context(|| format!("/v1/models answered {status}"))?;
    let name = list.pointer("/data/0/id").and_then(Value::as_str);
    Ok(name.with_context(|| format!("/v1/models answered {status} and lists no model; give --model-name"))?.to_owned())
}

/// Sends all jobs and waits for their ends; outcomes in the jobs' order.
///
/// # Errors
/// A thread cannot be started. A request that fails is an outcome.
pub fn run(server: &Server, ask: &Ask, jobs: &[Job], pacing: Pacing) -> Result<Vec<Outcome>> {
    let threads = match pacing {
        Pacing::Closed(concurrency) => concurrency.min(jobs.len()),
        Pacing::Open => jobs.len(),
    };
    let outcomes: Mutex<Vec<Outcome>> = Mutex::new(vec![Err("not sent".into()); jobs.len()]);
    let next = AtomicUsize::new(0);
    let start = Instant::now();
    let client = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = jobs.get(index) else { return };
            if pacing == Pacing::Open
                && let Some(wait) = Duration::from_secs_f64(job.arrival).checked_sub(start.elapsed())
            {
                std::thread::sleep(wait);
            }
            let due = (pacing == Pacing::Open).then_some(job.arrival);
            let outcome = complete(server, ask, job, start, due).map_err(|e| format!("{e:#}"));
            outcomes.lock().unwrap_or_else(PoisonError::into_inner)[index] = outcome;
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let builder = std::thread::Builder::new().name("client".into()).stack_size(STACK_BYTES);
            builder.spawn_scoped(scope, client).context("starting a client thread")?;
        }
        anyhow::Ok(())
    })?;
    Ok(outcomes.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// One streamed completion.
fn complete(server: &Server, ask: &Ask, job: &Job, start: Instant, due: Option<f64>) -> Result<Timeline> {
    let mut body = json!({
        "model": ask.model, "prompt": job.prompt, "max_tokens": job.generated, "temperature": 0.0, "stream": true,
        "stream_options": {"include_usage": true},
    });
    if ask.ignore_eos {
        body["ignore_eos"] = Value::Bool(true);
    }
    let body = body.to_string();
    let submitted = due.unwrap_or_else(|| start.elapsed().as_secs_f64());
    let mut timeline = Timeline { submitted, ..Timeline::default() };
    let answer = server.send("POST", "/v1/completions", &body)?;
    let status = answer.status;
    if status != 200 {
        bail!("status {status}: {}", answer.text()?.trim());
    }
    answer.events(|data| {
        let now = start.elapsed().as_secs_f64();
        if data != "[DONE]" {
            let event: Value = serde_json::from_str(data).with_context(|| format!("event {data:?}"))?;
            timeline.record(&event, now)?;
        }
        Ok(())
    })?;
    if timeline.events.is_empty() {
        bail!("no token came");
    }
    if timeline.output_tokens == 0 {
        timeline.output_tokens = timeline.events.len() as u64;
    }
    timeline.ended = start.elapsed().as_secs_f64();
    Ok(timeline)
}

impl Timeline {
    fn record(&mut self, event: &Value, now: f64) -> Result<()> {
        if let Some(error) = event.get("error").filter(|e| !e.is_null()) {
            bail!("{error}");
        }
        let choice = event.pointer("/choices/0");
        // The event that says why the answer ended may have no text; every other one is a token's.
        let has_text = choice.and_then(|c| c.get("text")).and_then(Value::as_str).is_some_and(|t| !t.is_empty());
        let is_last = choice.and_then(|c| c.get("finish_reason")).is_some_and(|r| !r.is_null());
        if choice.is_some() && (has_text || !is_last) {
            self.events.push(now);
        }
        let count = |pointer: &str| event.pointer(pointer).and_then(Value::as_u64);
        if let Some(tokens) = count("/usage/completion_tokens") {
            self.output_tokens = tokens;
            self.prompt_tokens = count("/usage/prompt_tokens").unwrap_or(0);
            self.cached_tokens = count("/usage/prompt_tokens_details/cached_tokens").unwrap_or(0);
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn prompts_are_distinct_and_share_their_prefix() {
        let lengths = [Lengths { prompt: 20, generated: 4 }; 8];
        let jobs = jobs(&mut Random::new(3), &lengths, 10, Some(2.0));
        let first: Vec<&str> = jobs[0].prompt.split(' ').collect();
        assert_eq!(first.len(), 30);
        for pair in jobs.windows(2) {
            assert!(pair[1].prompt.split(' ').take(10).eq(first[..10].iter().copied()));
            assert!(pair[0].prompt != pair[1].prompt && pair[0].arrival < pair[1].arrival);
        }
    }

    #[test]
    fn events_are_told_apart() {
        let mut timeline = Timeline::default();
        for (at, event) in [
            (1.0, json!({"choices": [{"text": "a", "finish_reason": null}]})),
            (2.0, json!({"choices": [{"text": "", "finish_reason": null}]})),
            (3.0, json!({"choices": [{"text": "", "finish_reason": "length"}]})),
            (
                4.0,
                json!({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2,
                    "prompt_tokens_details": {"cached_tokens": 5}}}),
            ),
        ] {
            timeline.record(&event, at).unwrap();
        }
        assert_eq!(timeline.events, [1.0, 2.0]);
        assert_eq!((timeline.prompt_tokens, timeline.cached_tokens, timeline.output_tokens), (7, 5, 2));
        let refused = timeline.record(&json!({"error": {"message": "full"}}), 5.0).unwrap_err().to_string();
        assert!(refused.contains("full"), "{refused}");
    }

    /// A server that answers each connection with `answer`.
    fn serve(answer: &str, connections: usize) -> Server {
        let answer = answer.to_owned();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming().take(connections) {
                let mut stream = stream.unwrap();
                let mut seen = Vec::new();
                let mut piece = [0; 4096];
                while !seen.ends_with(b"}") {
                    let n = stream.read(&mut piece).unwrap();
                    seen.extend_from_slice(&piece[..n]);
                }
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        Server::parse(&url, None).unwrap()
    }

    fn outcomes(answer: &str, pacing: Pacing) -> Vec<Outcome> {
        let lengths = [Lengths { prompt: 5, generated: 2 }; 4];
        let jobs = jobs(&mut Random::new(1), &lengths, 0, Some(1000.0));
        let ask = Ask { model: "m".into(), ignore_eos: true };
        run(&serve(answer, 4), &ask, &jobs, pacing).unwrap()
    }

    #[test]
    fn a_stream_is_timed_and_a_refusal_is_an_outcome() {
        // Events and chunks need not end together.
        let pieces = [
            "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"c",
            "hoices\":[{\"text\":\"b\"}]}\n\ndata: [",
            "DONE]\n\n",
        ];
        let chunks: String = pieces.iter().map(|piece| format!("{:x}\r\n{piece}\r\n", piece.len())).collect();
        let stream = format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}0\r\n\r\n");
        for pacing in [Pacing::Closed(2), Pacing::Open] {
            for outcome in outcomes(&stream, pacing) {
                let timeline = outcome.unwrap();
                assert_eq!((timeline.events.len(), timeline.output_tokens), (2, 2));
                assert!(timeline.submitted <= timeline.events[0] && timeline.events[1] <= timeline.ended);
            }
        }
        let full = "HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfull";
        for outcome in outcomes(full, Pacing::Closed(4)) {
            assert_eq!(outcome.unwrap_err(), "status 429: full");
        }
    }
}
