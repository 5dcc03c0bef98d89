//! The requests through the engine as `serve` runs it: continuous batching over paged KV, the device's own limits,
//! all the memory that a server would take. Says how full its steps were.

use super::super::driver::{RunResult, Timeline, host_json, run};
use super::{ThroughputArgs, Workload, at, jobs, warm_up_job};
use crate::commands::bench::workload::{Lengths, Random};
use crate::config::Config;
use crate::{devices, loading};
use anyhow::Result;
use pagemill_engine::{EngineStatus, HostTime};
use pagemill_scheduler::SchedulerStats;
use std::io::Write;

/// What one run gave.
struct Served {
    wall_s: f64,
    prompt_tokens: usize,
    output_tokens: usize,
    steps: u64,
    /// Steps of prompt chunks beside decodes.
    mixed_steps: u64,
    /// Tokens that the steps computed, recomputed ones included.
    computed_tokens: u64,
    first_token_ms: Vec<f64>,
    inter_token_ms: Vec<f64>,
    peak_running: usize,
    preemptions: u64,
    host: HostTime,
}

/// Measures and prints.
pub(super) fn served(args: &ThroughputArgs, workload: &Workload, model: &str, config: &Config) -> Result<()> {
    let loaded = loading::load_engine(model, config, loading::Show::Nothing)?;
    let vocab_size = loaded.spec.vocab_size;
    run(&loaded.handle, vec![warm_up_job(&mut Random::new(args.seed), vocab_size)])?;
    let mut runs = Vec::new();
    for run_idx in 0..args.runs {
        let lengths = workload.lengths(args, run_idx, loaded.plan.max_seq_len);
        let mut random = Random::new(args.seed ^ 0x5EED ^ run_idx as u64);
        let jobs = jobs(&mut random, &lengths, args.rate, vocab_size);
        let before = loaded.handle.status();
        let result = run(&loaded.handle, jobs)?;
        runs.push(Served::of(&lengths, &before, &result));
    }
    loaded.handle.shutdown();
    print(args, workload, model, config, &loaded, &runs)
}

impl Served {
    fn of(lengths: &[Lengths], before: &EngineStatus, result: &RunResult) -> Self {
        let (now, was) = (&result.status.scheduler, &before.scheduler);
        let since = |of: fn(&SchedulerStats) -> u64| of(now) - of(was);
        // A request's first token comes from its prompt's last, which is counted as such.
        let decoded = since(|s| s.generated_tokens).saturating_sub(lengths.len() as u64);
        let timelines = &result.timelines;
        Self {
            wall_s: result.wall,
            prompt_tokens: lengths.iter().map(|l| l.prompt).sum(),
            output_tokens: timelines.iter().map(|t| t.tokens.len()).sum(),
            steps: result.status.steps - before.steps,
            mixed_steps: since(|s| s.mixed_steps),
            computed_tokens: since(|s| s.prompt_tokens) + decoded,
            first_token_ms: timelines.iter().map(|t| Timeline::first_token(t) * 1e3).collect(),
            inter_token_ms: timelines.iter().flat_map(|t| t.tokens.windows(2)).map(|w| (w[1] - w[0]) * 1e3).collect(),
            peak_running: result.peak_running,
            preemptions: since(|s| s.preemptions),
            host: result.status.host.since(&before.host),
        }
    }

    #[allow(clippy::cast_precision_loss)] // token counts
    fn total_tok_s(&self) -> f64 {
        (self.prompt_tokens + self.output_tokens) as f64 / self.wall_s
    }

    #[allow(clippy::cast_precision_loss)] // token counts
    fn output_tok_s(&self) -> f64 {
        self.output_tokens as f64 / self.wall_s
    }

    #[allow(clippy::cast_precision_loss)] // token counts
    fn tokens_per_step(&self) -> f64 {
        self.computed_tokens as f64 / self.steps.max(1) as f64
    }

    fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "wall_s": self.wall_s, "total_tok_s": self.total_tok_s(), "output_tok_s": self.output_tok_s(),
            "steps": self.steps, "mixed_steps": self.mixed_steps, "tokens_per_step": self.tokens_per_step(),
            "first_token_ms_p50": at(&self.first_token_ms, 0.5), "first_token_ms_p99": at(&self.first_token_ms, 0.99),
            "inter_token_ms_p50": at(&self.inter_token_ms, 0.5), "inter_token_ms_p99": at(&self.inter_token_ms, 0.99),
            "peak_running": self.peak_running, "preemptions": self.preemptions,
            "host": host_json(&self.host),
        })
    }
}

fn print(
    args: &ThroughputArgs,
    workload: &Workload,
    model: &str,
    config: &Config,
    loaded: &loading::LoadedEngine,
    runs: &[Served],
) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let median = |of: fn(&Served) -> f64| at(&runs.iter().map(of).collect::<Vec<_>>(), 0.5);
    let (total, output) = (median(Served::total_tok_s), median(Served::output_tok_s));
    let plan = &loaded.plan;
    if args.json {
        let report = serde_json::json!({
            "bench": "throughput", "as_served": true, "model": model, "device": loaded.device,
            "activations": devices::activations(config), "kv_dtype": config.engine.kv_dtype.name(),
            "lengths": workload.to_string(), "requests": args.requests, "rate": args.rate, "seed": args.seed,
            "prefill_chunk_size": config.engine.prefill_chunk_size, "max_batch_size": plan.max_batch_size,
            "max_batch_tokens": plan.max_batch_tokens, "total_tok_s_median": total, "output_tok_s_median": output,
            "runs": runs.iter().map(Served::json).collect::<Vec<_>>(),
        });
        writeln!(out, "{report}")?;
        return Ok(());
    }
    writeln!(
        out,
        "{model} on {}; {} activations, {} KV; {} requests of {workload}, {}; at most {} sequences and {} tokens a step, \
         chunks of {}",
        loaded.device,
        devices::activations(config),
        config.engine.kv_dtype,
        args.requests,
        if args.rate > 0.0 { format!("{} requests/s", args.rate) } else { "all at once".to_owned() },
        plan.max_batch_size,
        plan.max_batch_tokens,
        config.engine.prefill_chunk_size,
    )?;
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::UTF8_FULL_CONDENSED);
    table.set_header([
        "total tok/s",
        "output tok/s",
        "steps",
        "mixed",
        "tokens a step",
        "first token ms P50",
        "P99",
        "inter-token ms P50",
        "P99",
        "most at once",
        "preempted",
    ]);
    for run in runs {
        table.add_row([
            format!("{:.0}", run.total_tok_s()),
            format!("{:.0}", run.output_tok_s()),
            run.steps.to_string(),
            run.mixed_steps.to_string(),
            format!("{:.1}", run.tokens_per_step()),
            format!("{:.1}", at(&run.first_token_ms, 0.5)),
            format!("{:.1}", at(&run.first_token_ms, 0.99)),
            format!("{:.2}", at(&run.inter_token_ms, 0.5)),
            format!("{:.2}", at(&run.inter_token_ms, 0.99)),
            run.peak_running.to_string(),
            run.preemptions.to_string(),
        ]);
    }
    writeln!(out, "{table}")?;
    let host = runs.iter().fold(HostTime::default(), |sum, run| sum.plus(&run.host));
    writeln!(out, "{host}")?;
    writeln!(out, "median: {total:.0} tok/s in and out, {output:.0} tok/s out")?;
    Ok(())
}
