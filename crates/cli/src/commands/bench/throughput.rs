//! `pagemill bench throughput`: the same requests through a static batch, through continuous batching over
//! contiguous KV, and through continuous batching over paged KV, at equal KV memory; or through the one arrangement
//! that a server runs.

mod served;

use super::driver::{Job, RunResult, host_json, run};
use super::workload::{Lengths, Random, conversation_like, draw, quantile, random_prompt, read_trace};
use crate::config::Config;
use crate::loading;
use crate::{ModelArgs, models::catalogue, settings::ServerSettings};
use anyhow::{Result, bail};
use clap::Args;
use pagemill_engine::HostTime;
use pagemill_scheduler::KvLayout;
use std::io::Write;
use std::path::PathBuf;

/// Arguments of `pagemill bench throughput`.
#[derive(Args)]
pub struct ThroughputArgs {
    /// GGUF file, Hugging Face folder or repository (owner/name), or a name that `pagemill pull --list` shows [default: smollm2-135m]
    model: Option<String>,
    #[command(flatten)]
    shared: ModelArgs,
    /// Azure LLM inference trace (CSV) to draw lengths from [default: a log-normal with its medians]
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Requests
    #[arg(long, default_value_t = 64)]
    requests: usize,
    /// Multiplies the trace's lengths, to fit the model and the machine
    #[arg(long, default_value_t = 0.125)]
    length_scale: f64,
    /// Prompt tokens of every request, instead of a trace's
    #[arg(long, requires = "gen_tokens", conflicts_with_all = ["trace", "length_scale"], value_name = "N")]
    prompt_tokens: Option<usize>,
    /// Tokens to generate for every request
    #[arg(long, requires = "prompt_tokens", value_name = "N")]
    gen_tokens: Option<usize>,
    /// Only the arrangement that `serve` runs, with its limits and all the memory that it would take
    #[arg(long)]
    as_served: bool,
    /// Requests per second (Poisson); 0: all at once
    #[arg(long, default_value_t = 0.0)]
    rate: f64,
    /// Runs of each arrangement, alternating; the median is printed
    #[arg(long, default_value_t = 1)]
    runs: usize,
    /// Seed of lengths and prompts
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// One arrangement of the engine.
struct Arm {
    name: &'static str,
    continuous: bool,
    layout: KvLayout,
}

const ARMS: [Arm; 4] = [
    Arm { name: "static, contiguous KV", continuous: false, layout: KvLayout::Contiguous },
    Arm { name: "static, paged KV", continuous: false, layout: KvLayout::Paged },
    Arm { name: "continuous, contiguous KV", continuous: true, layout: KvLayout::Contiguous },
    Arm { name: "continuous, paged KV", continuous: true, layout: KvLayout::Paged },
];

/// Figures of one arrangement over its runs.
#[derive(Default)]
struct Figures {
    tok_s: Vec<f64>,
    latency_s: Vec<f64>,
    first_token_s: Vec<f64>,
    inter_token_s: Vec<f64>,
    peak_kv_bytes: u64,
    kv_bytes_per_sequence: Vec<f64>,
    peak_running: usize,
    preemptions: u64,
    padding_tokens: u64,
    host: HostTime,
}

/// Measures.
pub fn throughput(args: ThroughputArgs) -> Result<()> {
    if args.requests == 0
        || args.runs == 0
        || !is_positive(args.length_scale)
        || !(args.rate == 0.0 || is_positive(args.rate))
    {
        bail!("requests and runs must be at least 1, length_scale above 0, rate not below 0");
    }
    let (file_model, engine, _) = args.shared.clone().merge(ServerSettings::default())?;
    let model = args.model.clone().or(file_model).unwrap_or_else(|| catalogue::DEFAULT.to_owned());
    let mut config = crate::config::engine_config(engine)?;
    config.engine.prefix_cache = false;
    config.engine.max_waiting = config.engine.max_waiting.max(args.requests);
    let workload = Workload::read(&args)?;
    if args.as_served {
        return served::served(&args, &workload, &model, &config);
    }
    compare(&args, &workload, &model, config)
}

/// Runs all arrangements on a pool that is tight enough for the layout to matter.
fn compare(args: &ThroughputArgs, workload: &Workload, model: &str, mut config: Config) -> Result<()> {
    config.engine.max_batch_size.get_or_insert(16);
    let spec = pagemill_model::read_spec(&loading::open(model, &config)?)?;
    // What contiguous reservation has to set aside: the model's context on the scale of the lengths.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    let scaled_context = ((spec.max_seq_len as f64 * args.length_scale.min(1.0)) as usize).max(64);
    let max_seq_len = *config.engine.max_seq_len.get_or_insert(scaled_context);
    if config.engine.kv_cache_bytes.is_none() {
        // Room for four reserved sequences.
        config.engine.kv_cache_bytes = Some(4 * spec.kv_bytes(max_seq_len, config.engine.kv_dtype.block_bytes()));
    }
    let mut figures: Vec<Figures> = ARMS.iter().map(|_| Figures::default()).collect();
    let mut device = String::new();
    for run_idx in 0..args.runs {
        let lengths = workload.lengths(args, run_idx, max_seq_len);
        for (arm, figures) in ARMS.iter().zip(&mut figures) {
            device = measure(args, arm, &config, model, &lengths, run_idx, figures)?;
        }
    }
    print(args, workload, model, &device, &config, &figures)
}

/// Where the requests' lengths come from.
enum Workload {
    /// Drawn from these rows.
    Drawn { rows: Vec<Lengths>, name: String },
    /// All the same.
    Fixed(Lengths),
}

impl Workload {
    fn read(args: &ThroughputArgs) -> Result<Self> {
        if let (Some(prompt), Some(generated)) = (args.prompt_tokens, args.gen_tokens) {
            if prompt == 0 || generated == 0 {
                bail!("prompt_tokens and gen_tokens must be at least 1");
            }
            return Ok(Self::Fixed(Lengths { prompt, generated }));
        }
        Ok(match &args.trace {
            Some(path) => Self::Drawn { rows: read_trace(path)?, name: path.display().to_string() },
            None => Self::Drawn {
                rows: conversation_like(&mut Random::new(args.seed ^ 0xA5), 4096),
                name: "log-normal".to_owned(),
            },
        })
    }

    /// The lengths of one run.
    fn lengths(&self, args: &ThroughputArgs, run_idx: usize, max_seq_len: usize) -> Vec<Lengths> {
        match self {
            Self::Fixed(lengths) => vec![*lengths; args.requests],
            Self::Drawn { rows, .. } => {
                let mut random = Random::new(args.seed + run_idx as u64);
                draw(&mut random, rows, args.requests, args.length_scale, max_seq_len)
            }
        }
    }
}

impl std::fmt::Display for Workload {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Drawn { name, .. } => out.write_str(name),
            Self::Fixed(Lengths { prompt, generated }) => write!(out, "{prompt} in, {generated} out"),
        }
    }
}

fn is_positive(value: f64) -> bool {
    value.is_finite() && value > 0.0
}

fn measure(
    args: &ThroughputArgs,
    arm: &Arm,
    config: &Config,
    model: &str,
    lengths: &[Lengths],
    run_idx: usize,
    figures: &mut Figures,
) -> Result<String> {
    let mut config = config.clone();
    config.engine.continuous_batching = arm.continuous;
    config.engine.kv_layout = arm.layout;
    let loaded = loading::load_engine(model, &config, loading::Show::Nothing)?;
    let mut random = Random::new(args.seed ^ 0x5EED ^ run_idx as u64);
    run(&loaded.handle, vec![warm_up_job(&mut random, loaded.spec.vocab_size)])?;
    let before = loaded.handle.status();
    let jobs = jobs(&mut random, lengths, args.rate, loaded.spec.vocab_size);
    let result = run(&loaded.handle, jobs)?;
    loaded.handle.shutdown();
    figures.add(&result, &before, loaded.plan.block_bytes);
    Ok(loaded.device)
}

/// A short request that is not measured.
fn warm_up_job(random: &mut Random, vocab_size: usize) -> Job {
    Job { prompt: random_prompt(random, 32, vocab_size), generated: 8, arrival: 0.0, priority: 0 }
}

/// Random prompts of these lengths; `rate` requests a second, 0: all at once.
fn jobs(random: &mut Random, lengths: &[Lengths], rate: f64, vocab_size: usize) -> Vec<Job> {
    let mut arrival = 0.0;
    let job = |length: &Lengths| {
        if rate > 0.0 {
            arrival -= (1.0 - random.unit()).ln() / rate;
        }
        let prompt = random_prompt(random, length.prompt, vocab_size);
        Job { prompt, generated: length.generated, arrival, priority: 0 }
    };
    lengths.iter().map(job).collect()
}

impl Figures {
    #[allow(clippy::cast_precision_loss)] // counts and bytes for display
    fn add(&mut self, result: &RunResult, before: &pagemill_engine::EngineStatus, block_bytes: u64) {
        let generated: usize = result.timelines.iter().map(|t| t.tokens.len()).sum();
        self.tok_s.push(generated as f64 / result.wall);
        self.latency_s.extend(result.timelines.iter().map(super::driver::Timeline::latency));
        self.first_token_s.extend(result.timelines.iter().map(super::driver::Timeline::first_token));
        for timeline in &result.timelines {
            self.inter_token_s.extend(timeline.tokens.windows(2).map(|w| w[1] - w[0]));
        }
        self.peak_kv_bytes = self.peak_kv_bytes.max(result.peak_owned_blocks as u64 * block_bytes);
        self.kv_bytes_per_sequence.push(result.mean_blocks_per_sequence * block_bytes as f64);
        self.peak_running = self.peak_running.max(result.peak_running);
        let after = &result.status.scheduler;
        self.preemptions += after.preemptions - before.scheduler.preemptions;
        self.host = self.host.plus(&result.status.host.since(&before.host));
        self.padding_tokens += after.padding_tokens - before.scheduler.padding_tokens;
    }

    fn median_tok_s(&self) -> f64 {
        at(&self.tok_s, 0.5)
    }
}

fn at(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    quantile(&sorted, q)
}

#[allow(clippy::cast_precision_loss)] // bytes for display
fn print(
    args: &ThroughputArgs,
    workload: &Workload,
    model: &str,
    device: &str,
    config: &Config,
    figures: &[Figures],
) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let trace = workload.to_string();
    let engine = &config.engine;
    if args.json {
        let arms: Vec<serde_json::Value> = ARMS.iter().zip(figures).map(|(arm, f)| arm_json(arm, f)).collect();
        let report = serde_json::json!({
            "bench": "throughput", "model": model, "device": device, "trace": trace, "requests": args.requests,
            "length_scale": args.length_scale, "rate": args.rate, "runs": args.runs, "seed": args.seed,
            "max_batch_size": engine.max_batch_size, "max_seq_len": engine.max_seq_len,
            "kv_cache_bytes": engine.kv_cache_bytes, "kv_dtype": engine.kv_dtype.name(),
            "block_size": engine.block_size, "arms": arms,
        });
        writeln!(out, "{report}")?;
        return Ok(());
    }
    writeln!(
        out,
        "{model} on {device}; {} requests, lengths from {trace} × {}, {}; batch ≤ {}, context {}, KV pool {:.1} MiB {}",
        args.requests,
        args.length_scale,
        if args.rate > 0.0 { format!("{} requests/s", args.rate) } else { "all at once".to_owned() },
        engine.max_batch_size.unwrap_or(0),
        engine.max_seq_len.unwrap_or(0),
        engine.kv_cache_bytes.unwrap_or(0) as f64 / 1_048_576.0,
        engine.kv_dtype,
    )?;
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::UTF8_FULL_CONDENSED);
    table.set_header([
        "",
        "tok/s",
        "latency s P50",
        "P99",
        "first token s P50",
        "P99",
        "inter-token ms P99",
        "KV peak MiB",
        "KV KiB/sequence",
        "most at once",
        "preempted",
        "padding tokens",
    ]);
    for (arm, f) in ARMS.iter().zip(figures) {
        table.add_row([
            arm.name.to_owned(),
            format!("{:.1}", f.median_tok_s()),
            format!("{:.2}", at(&f.latency_s, 0.5)),
            format!("{:.2}", at(&f.latency_s, 0.99)),
            format!("{:.2}", at(&f.first_token_s, 0.5)),
            format!("{:.2}", at(&f.first_token_s, 0.99)),
            format!("{:.0}", at(&f.inter_token_s, 0.99) * 1e3),
            format!("{:.1}", f.peak_kv_bytes as f64 / 1_048_576.0),
            format!("{:.0}", at(&f.kv_bytes_per_sequence, 0.5) / 1024.0),
            f.peak_running.to_string(),
            f.preemptions.to_string(),
            f.padding_tokens.to_string(),
        ]);
    }
    writeln!(out, "{table}")?;
    for (arm, f) in ARMS.iter().zip(figures) {
        writeln!(out, "{}: {}", arm.name, f.host)?;
    }
    let [static_contiguous, static_paged, contiguous, paged] = figures else {
        return Ok(());
    };
    writeln!(
        out,
        "continuous / static throughput (paged KV): {:.2}x",
        paged.median_tok_s() / static_paged.median_tok_s()
    )?;
    writeln!(
        out,
        "continuous paged / static contiguous throughput: {:.2}x",
        paged.median_tok_s() / static_contiguous.median_tok_s()
    )?;
    writeln!(
        out,
        "paged / contiguous (continuous): throughput {:.2}x, KV bytes a sequence {:.0} %, sequences at once {:.1}x",
        paged.median_tok_s() / contiguous.median_tok_s(),
        100.0 * at(&paged.kv_bytes_per_sequence, 0.5) / at(&contiguous.kv_bytes_per_sequence, 0.5),
        paged.peak_running as f64 / contiguous.peak_running.max(1) as f64
    )?;
    Ok(())
}

fn arm_json(arm: &Arm, f: &Figures) -> serde_json::Value {
    serde_json::json!({
        "arm": arm.name, "tok_s": f.tok_s, "tok_s_median": f.median_tok_s(),
        "latency_s_p50": at(&f.latency_s, 0.5), "latency_s_p99": at(&f.latency_s, 0.99),
        "first_token_s_p50": at(&f.first_token_s, 0.5), "first_token_s_p99": at(&f.first_token_s, 0.99),
        "inter_token_s_p99": at(&f.inter_token_s, 0.99), "peak_kv_bytes": f.peak_kv_bytes,
        "kv_bytes_per_sequence": at(&f.kv_bytes_per_sequence, 0.5), "peak_running": f.peak_running,
        "preemptions": f.preemptions, "padding_tokens": f.padding_tokens, "host": host_json(&f.host),
    })
}
