//! `pagemill bench ranks`: what a pipeline's stages do with and without bubble filling, the curve that the
//! number of micro-batches was chosen from, and what a sum over tensor-parallel ranks costs.

use super::driver::{Job, RunResult, run, run_over};
use super::workload::{Random, quantile, random_prompt};
use crate::config::Config;
use crate::devices::{self, Device, SumTask};
use crate::loading::{self, LoadedEngine};
use crate::{ModelArgs, models::catalogue, settings::ServerSettings};
use anyhow::{Context, Result, bail};
use clap::Args;
use pagemill_backend::{Backend, Collective, CpuBackend, CpuConfig, SharedCollective};
use pagemill_engine::PipelineStatus;
use std::io::Write;
use std::time::Instant;

/// Offline work, as `service_tier` batch has it.
const FILLER_PRIORITY: i32 = -1000;
/// Rows of the tensors that are summed.
const SUM_ROWS: [usize; 4] = [1, 16, 128, 512];
/// Sums of one size.
const SUM_CALLS: usize = 300;

/// Arguments of `pagemill bench ranks`.
#[derive(Args)]
pub struct RanksArgs {
    /// GGUF file, Hugging Face folder or repository (owner/name), or a name that `pagemill pull --list` shows [default: smollm2-135m]
    model: Option<String>,
    #[command(flatten)]
    shared: ModelArgs,
    /// Interactive requests at a time: fewer than stages leave bubbles
    #[arg(long, default_value_t = 1)]
    interactive: usize,
    /// Requests that fill bubbles
    #[arg(long, default_value_t = 8)]
    fillers: usize,
    /// Prompt tokens of each
    #[arg(long, default_value_t = 32)]
    prompt: usize,
    /// Tokens that each interactive request generates
    #[arg(long, default_value_t = 128)]
    tokens: usize,
    /// Runs of each arrangement, alternating
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
}

/// One arrangement over its runs.
#[derive(Default)]
struct Figures {
    inter_token_s: Vec<f64>,
    tokens_per_s: Vec<f64>,
    filler_tokens: u64,
    active_us: u64,
    busy_us: Vec<u64>,
}

impl Figures {
    #[allow(clippy::cast_precision_loss)] // counts of tokens
    fn add(&mut self, before: &PipelineStatus, filler_tokens_before: u64, result: &RunResult) {
        for timeline in &result.timelines {
            self.inter_token_s.extend(timeline.tokens.windows(2).map(|pair| pair[1] - pair[0]));
        }
        let generated: usize = result.timelines.iter().map(|timeline| timeline.tokens.len()).sum();
        self.tokens_per_s.push(generated as f64 / result.wall);
        let after = &result.status.pipeline;
        self.filler_tokens += result.status.scheduler.filler_tokens - filler_tokens_before;
        self.active_us += after.active_us - before.active_us;
        self.busy_us.resize(after.stages.len(), 0);
        for ((sum, after), before) in self.busy_us.iter_mut().zip(&after.stages).zip(&before.stages) {
            *sum += after.busy_us - before.busy_us;
        }
    }

    #[allow(clippy::cast_precision_loss)] // microseconds
    fn busy_shares(&self) -> Vec<f64> {
        self.busy_us.iter().map(|busy| *busy as f64 / self.active_us.max(1) as f64).collect()
    }

    fn inter_token(&self, q: f64) -> f64 {
        at(&self.inter_token_s, q)
    }
}

/// What a sum costs.
struct Sum {
    rows: usize,
    bytes: usize,
    median_us: f64,
}

/// Measures.
pub fn ranks(args: RanksArgs) -> Result<()> {
    if args.interactive == 0 || args.runs == 0 || args.prompt == 0 || args.tokens < 2 {
        bail!("interactive, runs and prompt must be at least 1, tokens at least 2");
    }
    let (file_model, engine, _) = args.shared.clone().merge(ServerSettings::default())?;
    let model = args.model.clone().or(file_model).unwrap_or_else(|| catalogue::DEFAULT.to_owned());
    let is_given = engine.pipeline_parallel.is_some() || engine.tensor_parallel.is_some();
    let mut config = crate::config::engine_config(engine)?;
    if !is_given {
        config.engine.parallel.pipeline_parallel = 2;
    }
    config.engine.prefix_cache = false;
    let loaded = loading::load_engine(&model, &config, loading::Show::Nothing)?;
    let tuned = loaded.handle.status().pipeline;
    let mut figures = [Figures::default(), Figures::default()];
    // The first steps of a process pay for what later ones find, and fillers begin before anybody knows what
    // they cost the others.
    for fills in [false, true] {
        measure(&args, &loaded, fills)?;
    }
    for _ in 0..args.runs {
        for (fills, figures) in [false, true].into_iter().zip(&mut figures) {
            let before = loaded.handle.status();
            let result = measure(&args, &loaded, fills)?;
            figures.add(&before.pipeline, before.scheduler.filler_tokens, &result);
        }
    }
    loaded.handle.shutdown();
    let sums = measure_sums(&config, loaded.spec.hidden_size)?;
    let report = Report {
        args: &args,
        model: &model,
        config: &config,
        loaded: &loaded,
        tuned: &tuned,
        figures: &figures,
        sums: &sums,
    };
    if args.json { report.print_json() } else { report.print_tables() }
}

/// The interactive requests, over fillers that outlast them or over nothing.
fn measure(args: &RanksArgs, loaded: &LoadedEngine, fills: bool) -> Result<RunResult> {
    let mut random = Random::new(7);
    let mut job = |generated, priority| Job {
        prompt: random_prompt(&mut random, args.prompt, loaded.spec.vocab_size),
        generated,
        arrival: 0.0,
        priority,
    };
    let room = loaded.plan.max_seq_len.saturating_sub(args.prompt);
    let jobs = (0..args.interactive).map(|_| job(args.tokens.min(room), 0)).collect();
    if !fills {
        return run(&loaded.handle, jobs);
    }
    let background = (0..args.fillers).map(|_| job((args.tokens * 4).min(room), FILLER_PRIORITY)).collect();
    let result = run_over(&loaded.handle, jobs, background);
    while !loaded.handle.is_idle() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    result
}

/// Sums of hidden states over the tensor-parallel ranks (on the CPU two, where there is one), each on a thread.
fn measure_sums(config: &Config, hidden_size: usize) -> Result<Vec<Sum>> {
    if config.device != Device::Cpu {
        return measure_sums_of_gpus(config, hidden_size);
    }
    let num_ranks = config.engine.parallel.tensor_parallel.max(2);
    let world = SharedCollective::world(num_ranks, 1);
    let cpu = CpuConfig { num_threads: Some(1), ..config.cpu };
    let mut outcomes: Vec<Result<Vec<Sum>>> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            world.into_iter().map(|rank| scope.spawn(move || sum_on(&rank, cpu, hidden_size))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| bail!("a rank panicked"))).collect()
    });
    outcomes.swap_remove(0)
}

/// The faster way of each size; none of one rank.
fn measure_sums_of_gpus(config: &Config, cols: usize) -> Result<Vec<Sum>> {
    if config.engine.parallel.tensor_parallel == 1 || config.engine.parallel.pipeline_parallel > 1 {
        return Ok(Vec::new());
    }
    let task = SumTask { cols, rows: SUM_ROWS.to_vec(), calls: u32::try_from(SUM_CALLS)? };
    let times = devices::time_sums(config, &task)?.into_iter().zip(SUM_ROWS);
    let sums = times.map(|(time, rows)| {
        let ways = [time.one_shot_us, time.nccl_us];
        Sum { rows, bytes: time.bytes, median_us: ways.into_iter().flatten().fold(f64::INFINITY, f64::min) }
    });
    Ok(sums.filter(|sum| sum.median_us.is_finite()).collect())
}

#[allow(clippy::cast_precision_loss)] // microseconds
fn sum_on(rank: &SharedCollective, cpu: CpuConfig, hidden_size: usize) -> Result<Vec<Sum>> {
    // A rank that gives up must not leave the others waiting.
    let outcome = (|| {
        let backend = CpuBackend::new(cpu)?;
        SUM_ROWS
            .iter()
            .map(|&rows| {
                let mut x = backend.temp(rows, hidden_size)?;
                backend.copy_from_host(&vec![0.0; rows * hidden_size], &mut x)?;
                let mut times = Vec::with_capacity(SUM_CALLS);
                for _ in 0..SUM_CALLS {
                    let started = Instant::now();
                    rank.all_reduce(&mut x)?;
                    times.push(started.elapsed().as_secs_f64() * 1e6);
                }
                Ok(Sum { rows, bytes: rows * hidden_size * 4, median_us: at(&times, 0.5) })
            })
            .collect::<Result<Vec<Sum>, pagemill_backend::BackendError>>()
    })();
    outcome.inspect_err(|error| rank.abort(&error.to_string())).context("summing over ranks")
}

fn at(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    quantile(&sorted, q)
}

struct Report<'a> {
    args: &'a RanksArgs,
    model: &'a str,
    config: &'a Config,
    loaded: &'a LoadedEngine,
    tuned: &'a PipelineStatus,
    figures: &'a [Figures; 2],
    sums: &'a [Sum],
}

impl Report<'_> {
    /// Said wherever ranks share cores.
    fn caution(&self) -> Option<String> {
        if self.config.device != Device::Cpu {
            return None;
        }
        let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let num_ranks = self.config.engine.parallel.num_ranks();
        (num_cores < 2 * num_ranks || num_cores < 8).then(|| {
            format!(
                "{num_ranks} ranks on {num_cores} cores: these figures show how the pipeline behaves, not what it gains; \
                 a stage counts as busy while it waits for a core"
            )
        })
    }

    fn print_tables(&self) -> Result<()> {
        let mut out = std::io::stdout().lock();
        let mode = self.config.engine.parallel;
        writeln!(out, "{} on {}: {mode}", self.model, self.loaded.device)?;
        if let Some(caution) = self.caution() {
            writeln!(out, "{caution}")?;
        }
        if let Some(text) = crate::ranks::describe(self.tuned) {
            writeln!(out, "{text}")?;
        }
        let mut table = new_table();
        table.set_header(["micro-batches", "decode tok/s", ""]);
        for sample in self.tuned.tuning.iter() {
            let chosen = if sample.micro_batches == self.tuned.micro_batches { "chosen" } else { "" };
            table.add_row([sample.micro_batches.to_string(), format!("{:.0}", sample.tokens_per_s), chosen.to_owned()]);
        }
        if !self.tuned.tuning.is_empty() {
            writeln!(out, "{table}")?;
        }
        self.print_bubbles(&mut out)?;
        if self.sums.is_empty() {
            return Ok(());
        }
        let mut table = new_table();
        table.set_header(["all-reduce of rows", "KiB", "µs (median)"]);
        for sum in self.sums {
            table.add_row([sum.rows.to_string(), (sum.bytes / 1024).to_string(), format!("{:.1}", sum.median_us)]);
        }
        writeln!(out, "{} ranks sum hidden states", mode.tensor_parallel.max(2))?;
        writeln!(out, "{table}")?;
        Ok(())
    }

    fn print_bubbles(&self, out: &mut impl Write) -> Result<()> {
        let [without, with] = self.figures;
        let mut header = vec!["".to_owned()];
        header.extend((0..without.busy_us.len()).map(|stage| format!("stage {stage} busy")));
        header.extend(["tok/s", "inter-token ms P50", "P99", "filler tokens"].map(str::to_owned));
        let mut table = new_table();
        table.set_header(header);
        for (name, figures) in [("interactive alone", without), ("bubbles filled", with)] {
            let mut row = vec![name.to_owned()];
            row.extend(figures.busy_shares().into_iter().map(|share| format!("{:.0} %", share * 100.0)));
            row.push(format!("{:.1}", at(&figures.tokens_per_s, 0.5)));
            row.push(format!("{:.2}", figures.inter_token(0.5) * 1e3));
            row.push(format!("{:.2}", figures.inter_token(0.99) * 1e3));
            row.push(figures.filler_tokens.to_string());
            table.add_row(row);
        }
        let RanksArgs { interactive, fillers, .. } = self.args;
        writeln!(
            out,
            "{interactive} interactive requests at a time, {fillers} of priority {FILLER_PRIORITY} behind them"
        )?;
        writeln!(out, "{table}")?;
        let ratio = |q| with.inter_token(q) / without.inter_token(q);
        writeln!(out, "inter-token time, filled / alone: P50 {:.2}x, P99 {:.2}x", ratio(0.5), ratio(0.99))?;
        Ok(())
    }

    fn print_json(&self) -> Result<()> {
        let mode = self.config.engine.parallel;
        let arm = |figures: &Figures| {
            serde_json::json!({
                "stage_busy_share": figures.busy_shares(), "tok_s": figures.tokens_per_s,
                "inter_token_s_p50": figures.inter_token(0.5), "inter_token_s_p99": figures.inter_token(0.99),
                "filler_tokens": figures.filler_tokens,
            })
        };
        let tuning: Vec<_> = self
            .tuned
            .tuning
            .iter()
            .map(|s| serde_json::json!({"micro_batches": s.micro_batches, "tok_s": s.tokens_per_s}))
            .collect();
        let sums: Vec<_> = self
            .sums
            .iter()
            .map(|s| serde_json::json!({"rows": s.rows, "bytes": s.bytes, "median_us": s.median_us}))
            .collect();
        let report = serde_json::json!({
            "bench": "ranks", "model": self.model, "device": self.loaded.device, "caution": self.caution(),
            "tensor_parallel": mode.tensor_parallel, "pipeline_parallel": mode.pipeline_parallel,
            "stage_layers": self.tuned.stages.iter().map(|stage| stage.num_layers).collect::<Vec<_>>(),
            "micro_batches": self.tuned.micro_batches, "micro_batch_tuning": tuning,
            "interactive": self.args.interactive, "fillers": self.args.fillers, "runs": self.args.runs,
            "alone": arm(&self.figures[0]), "filled": arm(&self.figures[1]), "all_reduce": sums,
        });
        writeln!(std::io::stdout().lock(), "{report}")?;
        Ok(())
    }
}

fn new_table() -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::UTF8_FULL_CONDENSED);
    table
}
