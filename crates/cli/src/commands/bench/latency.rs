//! `pagemill bench latency`: prefill speed, decode speed and inter-token times at given batch sizes.

use super::drawing::DrawingArgs;
use super::driver::{Job, RunResult, host_json, run, run_drawing};
use super::workload::{Random, quantile, random_prompt};
use crate::devices;
use crate::loading::{self, Home};
use crate::processes::{self, Part};
use crate::{ModelArgs, models::catalogue, settings::ServerSettings};
use anyhow::{Result, bail};
use clap::Args;
use pagemill_engine::HostTime;
use std::io::Write;
use std::time::{Duration, Instant};

/// Arguments of `pagemill bench latency`.
#[derive(Args)]
pub struct LatencyArgs {
    /// GGUF file, Hugging Face folder or repository (owner/name), or a name that `pagemill pull --list` shows [default: smollm2-135m]
    model: Option<String>,
    #[command(flatten)]
    shared: ModelArgs,
    /// Prompt tokens of each sequence
    #[arg(long, default_value_t = 512)]
    prompt_tokens: usize,
    /// Tokens to generate for each sequence
    #[arg(long, default_value_t = 128)]
    gen_tokens: usize,
    /// Sequences at once; several, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "1")]
    batch_size: Vec<usize>,
    /// Runs; the median is printed (one more warms up)
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Seed of the random prompts
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    drawing: DrawingArgs,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

struct Row {
    batch_size: usize,
    prefill_tok_s: Vec<f64>,
    decode_tok_s: Vec<f64>,
    inter_token_ms: Vec<f64>,
    first_token_ms: Vec<f64>,
    /// Of the runs that count.
    host: HostTime,
}

/// Measures.
pub fn latency(args: LatencyArgs) -> Result<()> {
    if args.runs == 0 || args.gen_tokens < 2 || args.prompt_tokens == 0 || args.batch_size.contains(&0) {
        bail!("runs, prompt_tokens and batch_size must be at least 1, gen_tokens at least 2");
    }
    let begun = Instant::now();
    let (file_model, engine, _) = args.shared.clone().merge(ServerSettings::default())?;
    let model = args.model.clone().or(file_model).unwrap_or_else(|| catalogue::DEFAULT.to_owned());
    let mut config = crate::config::engine_config_among(processes::count()?, engine)?;
    let largest = args.batch_size.iter().copied().max().unwrap_or(1);
    config.engine.max_batch_size.get_or_insert(largest);
    config.engine.prefix_cache = false;
    config.engine.max_seq_len.get_or_insert(args.prompt_tokens + args.gen_tokens + 16);
    let leading = match processes::join(&config, 0)? {
        Part::Following(following) => return following.run(&model, &config),
        Part::Leading(leading) => Some(leading),
        Part::Alone => None,
    };
    let home = leading.as_ref().map_or(Home::Threads, Home::Processes);
    let loaded = loading::load_engine_in(home, &model, &config, loading::Show::Nothing)?;
    let mut random = Random::new(args.seed);
    let start = Start::measure(begun, &args, &loaded, &mut random)?;
    let mut rows = Vec::new();
    for &batch_size in &args.batch_size {
        rows.push(measure(&args, &loaded, batch_size, &mut random)?);
    }
    loaded.handle.shutdown();
    leading.map_or(Ok(()), |leading| leading.end())?;
    print(&args, &model, &config, &loaded, &start, &rows)
}

/// Milliseconds from the command's beginning to the first token of the first request, by part.
struct Start {
    total: f64,
    parts: Vec<(&'static str, f64)>,
}

impl Start {
    /// Sends the first request: one sequence, one token.
    fn measure(
        begun: Instant,
        args: &LatencyArgs,
        loaded: &loading::LoadedEngine,
        random: &mut Random,
    ) -> Result<Self> {
        let prompt = random_prompt(random, args.prompt_tokens, loaded.spec.vocab_size);
        let result = run(&loaded.handle, vec![Job { prompt, generated: 1, arrival: 0.0, priority: 0 }])?;
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let total = ms(begun.elapsed());
        let times = &loaded.times;
        let mut parts = vec![
            ("device", ms(loaded.device_time)),
            ("weights", ms(times.weights)),
            ("rehearsal", ms(times.rehearsal)),
            ("pool", ms(times.pool)),
            ("first_token", result.wall * 1e3),
        ];
        parts.push(("other", total - parts.iter().map(|(_, ms)| ms).sum::<f64>()));
        Ok(Self { total, parts })
    }

    fn json(&self) -> serde_json::Value {
        let parts = self.parts.iter().map(|&(name, ms)| (name.to_owned(), ms.into()));
        serde_json::Value::Object([("total".to_owned(), self.total.into())].into_iter().chain(parts).collect())
    }
}

fn measure(args: &LatencyArgs, loaded: &loading::LoadedEngine, batch_size: usize, random: &mut Random) -> Result<Row> {
    let mut row = Row {
        batch_size,
        prefill_tok_s: Vec::new(),
        decode_tok_s: Vec::new(),
        inter_token_ms: Vec::new(),
        first_token_ms: Vec::new(),
        host: HostTime::default(),
    };
    let mut warm = HostTime::default();
    let params = args.drawing.params(args.seed)?;
    for round in 0..=args.runs {
        let jobs = (0..batch_size)
            .map(|_| Job {
                prompt: random_prompt(random, args.prompt_tokens, loaded.spec.vocab_size),
                generated: args.gen_tokens,
                arrival: 0.0,
                priority: 0,
            })
            .collect();
        let result = run_drawing(&loaded.handle, jobs, &params)?;
        if round > 0 {
            record(&mut row, args, &result);
        } else {
            warm = result.status.host;
        }
        row.host = result.status.host.since(&warm);
    }
    Ok(row)
}

/// Prefill: all prompt tokens until the last sequence's first token. Decode: from then on, until the
/// first sequence ends, so that the batch is full all the time.
#[allow(clippy::cast_precision_loss)] // token counts
fn record(row: &mut Row, args: &LatencyArgs, result: &RunResult) {
    let start = result.timelines.iter().map(|t| t.submitted).fold(f64::MAX, f64::min);
    let prefill_end = result.timelines.iter().filter_map(|t| t.tokens.first().copied()).fold(0.0, f64::max);
    let first_end = result.timelines.iter().filter_map(|t| t.tokens.last().copied()).fold(f64::MAX, f64::min);
    row.prefill_tok_s.push((args.prompt_tokens * row.batch_size) as f64 / (prefill_end - start));
    let decoded: usize = result
        .timelines
        .iter()
        .map(|t| t.tokens.iter().filter(|&&at| at > prefill_end && at <= first_end).count())
        .sum();
    if decoded > 0 && first_end > prefill_end {
        row.decode_tok_s.push(decoded as f64 / (first_end - prefill_end));
    }
    for timeline in &result.timelines {
        row.first_token_ms.push(timeline.first_token() * 1e3);
        let steady = timeline.tokens.iter().filter(|&&at| at >= prefill_end);
        row.inter_token_ms.extend(steady.clone().zip(steady.skip(1)).map(|(a, b)| (b - a) * 1e3));
    }
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values
}

fn print(
    args: &LatencyArgs,
    model: &str,
    config: &crate::config::Config,
    loaded: &loading::LoadedEngine,
    start: &Start,
    rows: &[Row],
) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if args.json {
        let rows: Vec<serde_json::Value> = rows.iter().map(row_json).collect();
        let report = serde_json::json!({
            "bench": "latency", "model": model, "device": loaded.device, "activations": devices::activations(config),
            "kv_dtype": config.engine.kv_dtype.name(), "prompt_tokens": args.prompt_tokens,
            "gen_tokens": args.gen_tokens, "runs": args.runs, "seed": args.seed, "drawing": args.drawing.json(),
            "start_ms": start.json(),
            "rows": rows,
        });
        writeln!(out, "{report}")?;
        return Ok(());
    }
    writeln!(
        out,
        "{model} on {}; {} activations, {} KV; {} prompt tokens, {} generated; median of {} runs (least - most)",
        loaded.device,
        devices::activations(config),
        config.engine.kv_dtype,
        args.prompt_tokens,
        args.gen_tokens,
        args.runs
    )?;
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::UTF8_FULL_CONDENSED);
    table.set_header(["batch", "prefill tok/s", "decode tok/s", "first token ms", "inter-token ms P50", "P99"]);
    for row in rows {
        let itl = sorted(&row.inter_token_ms);
        table.add_row([
            row.batch_size.to_string(),
            spread(&row.prefill_tok_s),
            spread(&row.decode_tok_s),
            spread(&row.first_token_ms),
            format!("{:.2}", quantile(&itl, 0.5)),
            format!("{:.2}", quantile(&itl, 0.99)),
        ]);
    }
    writeln!(out, "{table}")?;
    for row in rows {
        writeln!(out, "batch {}: {}", row.batch_size, row.host)?;
    }
    let parts: Vec<String> = start.parts.iter().map(|(name, ms)| format!("{name} {ms:.0}")).collect();
    writeln!(out, "from the start to the first token: {:.0} ms ({})", start.total, parts.join(", "))?;
    Ok(())
}

fn row_json(row: &Row) -> serde_json::Value {
    let itl = sorted(&row.inter_token_ms);
    serde_json::json!({
        "batch_size": row.batch_size,
        "prefill_tok_s": row.prefill_tok_s, "decode_tok_s": row.decode_tok_s,
        "prefill_tok_s_median": quantile(&sorted(&row.prefill_tok_s), 0.5),
        "decode_tok_s_median": quantile(&sorted(&row.decode_tok_s), 0.5),
        "first_token_ms_median": quantile(&sorted(&row.first_token_ms), 0.5),
        "inter_token_ms_p50": quantile(&itl, 0.5), "inter_token_ms_p99": quantile(&itl, 0.99),
        "host": host_json(&row.host),
    })
}

fn spread(values: &[f64]) -> String {
    let values = sorted(values);
    match (values.first(), values.last()) {
        (Some(least), Some(most)) => format!("{:.1} ({least:.1} - {most:.1})", quantile(&values, 0.5)),
        _ => "-".to_owned(),
    }
}
