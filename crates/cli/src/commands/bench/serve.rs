//! `pagemill bench serve`: requests over HTTP against an OpenAI server: Pagemill's own, started here on a
//! free port, or any other one. Prints throughput, time to first token and inter-token times.

use super::load::{self, Ask, Job, Outcome, Pacing, Timeline};
use super::own_server::OwnServer;
use super::workload::{Lengths, Random, draw, quantile, read_trace};
use super::{http::Server, load::words};
use crate::{ModelArgs, models::catalogue, settings::ServerSettings};
use anyhow::{Result, bail};
use clap::Args;
use std::io::Write;
use std::path::PathBuf;

/// Arguments of `pagemill bench serve`.
#[derive(Args)]
pub struct ServeArgs {
    /// GGUF file, Hugging Face folder or repository (owner/name), or a name that `pagemill pull --list` shows; served by this process [default: smollm2-135m]
    #[arg(conflicts_with = "url")]
    model: Option<String>,
    #[command(flatten)]
    shared: ModelArgs,
    /// Another server instead (http://HOST:PORT)
    #[arg(long)]
    url: Option<String>,
    /// The model's name at that server [default: the first it lists]
    #[arg(long, visible_alias = "model", value_name = "NAME", requires = "url")]
    model_name: Option<String>,
    /// That server's key
    #[arg(long, env = "PAGEMILL_BENCH_API_KEY", value_name = "KEY", requires = "url", hide_env_values = true)]
    api_key: Option<String>,
    /// Requests
    #[arg(long, default_value_t = 64)]
    requests: usize,
    /// Words of each prompt (about a token each)
    #[arg(long, default_value_t = 200)]
    prompt_tokens: usize,
    /// Tokens to generate for each
    #[arg(long, default_value_t = 64)]
    gen_tokens: usize,
    /// Requests in flight
    #[arg(long, default_value_t = 16)]
    concurrency: usize,
    /// Requests per second (Poisson) instead of a number in flight
    #[arg(long, conflicts_with = "concurrency")]
    rate: Option<f64>,
    /// Azure LLM inference trace (CSV) to draw lengths from
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt_tokens", "gen_tokens"])]
    trace: Option<PathBuf>,
    /// Multiplies the trace's lengths, to fit the model and the machine
    #[arg(long, default_value_t = 0.125, requires = "trace")]
    length_scale: f64,
    /// Words in front of every prompt that are the same in all
    #[arg(long, default_value_t = 0, value_name = "WORDS")]
    shared_prefix: usize,
    /// Send the shared words once before, so that a prefix cache has them
    #[arg(long, requires = "shared_prefix")]
    prime: bool,
    /// Send only what the OpenAI API defines (answers may then end early: `ignore_eos` is no part of it)
    #[arg(long)]
    strict: bool,
    /// Seed of lengths, prompts and arrivals
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// Longest sequence that lengths from a trace are cut to when the server's own limit is not known.
const TRACE_SEQ_LEN: usize = 2048;

/// Measures.
pub fn serve(args: ServeArgs) -> Result<()> {
    validate(&args)?;
    match args.url.clone() {
        Some(url) => {
            let server = Server::parse(&url, args.api_key.clone())?;
            let model = args.model_name.clone().map_or_else(|| load::first_model(&server), Ok)?;
            measure(&args, &server, &Target { model, on: url, max_seq_len: TRACE_SEQ_LEN })
        }
        None => {
            let (file_model, engine, _) = args.shared.clone().merge(ServerSettings::default())?;
            let model = args.model.clone().or(file_model).unwrap_or_else(|| catalogue::DEFAULT.to_owned());
            let mut config = crate::config::engine_config(engine)?;
            config.engine.max_waiting = config.engine.max_waiting.max(args.requests);
            let own = OwnServer::start(&model, &config)?;
            let target = Target {
                model: load::first_model(&own.server)?,
                on: format!("this process, {}", own.device),
                max_seq_len: own.max_seq_len.min(TRACE_SEQ_LEN),
            };
            let outcome = measure(&args, &own.server, &target);
            own.stop()?;
            outcome
        }
    }
}

/// Threads are started for all requests of an open loop; this many are no slip of the hand.
const OPEN_REQUESTS_MAX: usize = 4096;

fn validate(args: &ServeArgs) -> Result<()> {
    if args.requests == 0 || args.prompt_tokens == 0 || args.gen_tokens == 0 || args.concurrency == 0 {
        bail!("requests, prompt_tokens, gen_tokens and concurrency must be at least 1");
    }
    let is_positive = |value: f64| value.is_finite() && value > 0.0;
    if !is_positive(args.length_scale) || args.rate.is_some_and(|rate| !is_positive(rate)) {
        bail!("rate and length_scale must be above 0");
    }
    if args.rate.is_some() && args.requests > OPEN_REQUESTS_MAX {
        bail!("requests = {}: must be at most {OPEN_REQUESTS_MAX} with a rate", args.requests);
    }
    Ok(())
}

/// The server under load.
struct Target {
    model: String,
    on: String,
    max_seq_len: usize,
}

fn measure(args: &ServeArgs, server: &Server, target: &Target) -> Result<()> {
    let ask = Ask { model: target.model.clone(), ignore_eos: !args.strict };
    let mut random = Random::new(args.seed);
    // Prompts of other words than the measured ones, so that no cache profits.
    let warm_up = vec![Job { prompt: words(&mut random, 32), generated: 4, arrival: 0.0 }];
    succeed(load::run(server, &ask, &warm_up, Pacing::Closed(1))?)?;
    let lengths = lengths(args, target, &mut random)?;
    let jobs = load::jobs(&mut random, &lengths, args.shared_prefix, args.rate);
    if args.prime {
        let prefix = jobs[0].prompt.split(' ').take(args.shared_prefix).collect::<Vec<_>>().join(" ");
        let prime = vec![Job { prompt: prefix, generated: 1, arrival: 0.0 }];
        succeed(load::run(server, &ask, &prime, Pacing::Closed(1))?)?;
    }
    let pacing = if args.rate.is_some() { Pacing::Open } else { Pacing::Closed(args.concurrency) };
    let outcomes = load::run(server, &ask, &jobs, pacing)?;
    let figures = Figures::of(&outcomes);
    print(args, target, &figures)?;
    match &figures.first_error {
        Some(error) if figures.completed == 0 => bail!("no request succeeded; the first failed with: {error}"),
        _ => Ok(()),
    }
}

fn lengths(args: &ServeArgs, target: &Target, random: &mut Random) -> Result<Vec<Lengths>> {
    let Some(trace) = &args.trace else {
        return Ok(vec![Lengths { prompt: args.prompt_tokens, generated: args.gen_tokens }; args.requests]);
    };
    let room = target.max_seq_len.saturating_sub(args.shared_prefix).max(8);
    // A word is a token for most vocabularies, but not for all: some room is left.
    Ok(draw(random, &read_trace(trace)?, args.requests, args.length_scale, room * 3 / 4))
}

fn succeed(outcomes: Vec<Outcome>) -> Result<()> {
    outcomes.into_iter().try_for_each(|outcome| outcome.map(|_| ()).map_err(|e| anyhow::anyhow!("warming up: {e}")))
}

/// What the outcomes say.
#[derive(Debug, Default)]
struct Figures {
    completed: usize,
    errors: usize,
    first_error: Option<String>,
    /// Seconds from the first request to the last answer's end.
    wall_s: f64,
    output_tokens: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    ttft_ms: Vec<f64>,
    inter_token_ms: Vec<f64>,
    latency_ms: Vec<f64>,
}

impl Figures {
    fn of(outcomes: &[Outcome]) -> Self {
        let mut figures = Self::default();
        let mut began = f64::MAX;
        for outcome in outcomes {
            match outcome {
                Ok(timeline) => {
                    began = began.min(timeline.submitted);
                    figures.add(timeline);
                }
                Err(error) => {
                    figures.errors += 1;
                    figures.first_error.get_or_insert_with(|| error.clone());
                }
            }
        }
        figures.wall_s = (figures.wall_s - began).max(0.0);
        for values in [&mut figures.ttft_ms, &mut figures.inter_token_ms, &mut figures.latency_ms] {
            values.sort_by(f64::total_cmp);
        }
        figures
    }

    fn add(&mut self, timeline: &Timeline) {
        self.completed += 1;
        self.wall_s = self.wall_s.max(timeline.ended);
        self.output_tokens += timeline.output_tokens;
        self.prompt_tokens += timeline.prompt_tokens;
        self.cached_tokens += timeline.cached_tokens;
        self.ttft_ms.extend(timeline.events.first().map(|t| (t - timeline.submitted) * 1e3));
        self.inter_token_ms.extend(timeline.events.windows(2).map(|w| (w[1] - w[0]) * 1e3));
        self.latency_ms.push((timeline.ended - timeline.submitted) * 1e3);
    }

    fn per_second(&self, count: f64) -> f64 {
        if self.wall_s > 0.0 { count / self.wall_s } else { 0.0 }
    }

    #[allow(clippy::cast_precision_loss)] // counts
    fn requests_per_second(&self) -> f64 {
        self.per_second(self.completed as f64)
    }

    #[allow(clippy::cast_precision_loss)] // counts
    fn output_tokens_per_second(&self) -> f64 {
        self.per_second(self.output_tokens as f64)
    }
}

fn print(args: &ServeArgs, target: &Target, f: &Figures) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", report(args, target, f))?;
        return Ok(());
    }
    let pacing = match args.rate {
        Some(rate) => format!("{rate} a second"),
        None => format!("{} at a time", args.concurrency),
    };
    let lengths = match &args.trace {
        Some(trace) => format!("lengths from {} × {}", trace.display(), args.length_scale),
        None => format!("{} words in, {} tokens out", args.prompt_tokens, args.gen_tokens),
    };
    let shared = match (args.shared_prefix, args.prime) {
        (0, _) => String::new(),
        (n, false) => format!(", {n} shared words in front"),
        (n, true) => format!(", {n} shared words in front, sent once before"),
    };
    writeln!(out, "{} on {}; {} requests, {lengths}{shared}; {pacing}", target.model, target.on, args.requests)?;
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::UTF8_FULL_CONDENSED);
    table.set_header([
        "requests/s",
        "output tok/s",
        "first token ms P50",
        "P99",
        "inter-token ms P50",
        "P99",
        "latency s P50",
        "P99",
        "errors",
    ]);
    table.add_row([
        format!("{:.2}", f.requests_per_second()),
        format!("{:.1}", f.output_tokens_per_second()),
        format!("{:.0}", quantile(&f.ttft_ms, 0.5)),
        format!("{:.0}", quantile(&f.ttft_ms, 0.99)),
        format!("{:.1}", quantile(&f.inter_token_ms, 0.5)),
        format!("{:.1}", quantile(&f.inter_token_ms, 0.99)),
        format!("{:.2}", quantile(&f.latency_ms, 0.5) / 1e3),
        format!("{:.2}", quantile(&f.latency_ms, 0.99) / 1e3),
        f.errors.to_string(),
    ]);
    writeln!(out, "{table}")?;
    writeln!(
        out,
        "prompt tokens {} ({} of them cached), output tokens {}, {:.2} s",
        f.prompt_tokens, f.cached_tokens, f.output_tokens, f.wall_s
    )?;
    if let Some(error) = &f.first_error {
        writeln!(out, "first error: {error}")?;
    }
    Ok(())
}

fn report(args: &ServeArgs, target: &Target, f: &Figures) -> serde_json::Value {
    let pair = |values: &[f64]| serde_json::json!({"p50": quantile(values, 0.5), "p99": quantile(values, 0.99)});
    let concurrency = args.rate.is_none().then_some(args.concurrency);
    serde_json::json!({
        "bench": "serve", "model": target.model, "on": target.on, "requests": args.requests,
        "prompt_words": args.prompt_tokens, "gen_tokens": args.gen_tokens, "concurrency": concurrency,
        "rate": args.rate, "trace": args.trace, "length_scale": args.trace.as_ref().map(|_| args.length_scale),
        "shared_prefix": args.shared_prefix, "primed": args.prime, "seed": args.seed,
        "completed": f.completed, "errors": f.errors, "first_error": f.first_error, "wall_s": f.wall_s,
        "requests_per_s": f.requests_per_second(), "output_tok_s": f.output_tokens_per_second(),
        "prompt_tokens": f.prompt_tokens, "cached_tokens": f.cached_tokens, "output_tokens": f.output_tokens,
        "ttft_ms": pair(&f.ttft_ms), "inter_token_ms": pair(&f.inter_token_ms), "latency_ms": pair(&f.latency_ms),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_known_times() {
        let timeline = |submitted: f64| Timeline {
            submitted,
            events: vec![submitted + 0.5, submitted + 0.6, submitted + 0.8],
            ended: submitted + 1.0,
            prompt_tokens: 10,
            cached_tokens: 4,
            output_tokens: 3,
        };
        let outcomes = [Ok(timeline(1.0)), Err("full".to_owned()), Ok(timeline(2.0))];
        let f = Figures::of(&outcomes);
        assert_eq!((f.completed, f.errors, f.first_error.as_deref()), (2, 1, Some("full")));
        assert_eq!((f.prompt_tokens, f.cached_tokens, f.output_tokens), (20, 8, 6));
        assert!((f.wall_s - 2.0).abs() < 1e-9 && (f.output_tokens_per_second() - 3.0).abs() < 1e-9);
        assert!((quantile(&f.ttft_ms, 0.5) - 500.0).abs() < 1e-6);
        assert!((quantile(&f.inter_token_ms, 0.99) - 200.0).abs() < 1e-6);
        assert!((quantile(&f.latency_ms, 0.5) - 1000.0).abs() < 1e-6);
    }
}
