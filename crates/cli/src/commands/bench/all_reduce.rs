//! `pagemill bench all-reduce`: what a sum over GPUs costs, by its size and by the way it takes.

use crate::devices::{self, SumTask, SumTimes};
use crate::settings::EngineSettings;
use anyhow::{Result, bail};
use clap::Args;
use std::io::Write;

/// Elements of a row: 8 KiB of bf16.
const COLS: usize = 4096;

/// Arguments of `pagemill bench all-reduce`.
#[derive(Args)]
pub struct AllReduceArgs {
    /// GPUs: cuda, or a list such as cuda:0,1
    #[arg(long, default_value = "cuda")]
    device: String,
    /// Ranks, one a GPU
    #[arg(long, default_value_t = 2)]
    tensor_parallel: usize,
    /// Largest tensor, in rows of 8 KiB; sizes are powers of two
    #[arg(long, default_value_t = 32_768)]
    rows: usize,
    /// Calls of one size, one after the other; a tenth of them above 8 MiB
    #[arg(long, default_value_t = 200)]
    calls: u32,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// Measures.
pub fn all_reduce(args: &AllReduceArgs) -> Result<()> {
    if args.rows == 0 || args.calls == 0 {
        bail!("rows and calls must be at least 1");
    }
    let settings = EngineSettings {
        device: Some(args.device.clone()),
        tensor_parallel: Some(args.tensor_parallel),
        ..EngineSettings::default()
    };
    let config = crate::config::engine_config(settings)?;
    let rows = (0..usize::BITS).map(|power| 1_usize << power).take_while(|&rows| rows <= args.rows).collect();
    let times = devices::time_sums(&config, &SumTask { cols: COLS, rows, calls: args.calls })?;
    let mut out = std::io::stdout().lock();
    if args.json {
        let rows: Vec<_> = times.iter().map(row_json).collect();
        let report = serde_json::json!({
            "bench": "all-reduce", "ranks": args.tensor_parallel, "calls": args.calls, "cols": COLS, "sizes": rows,
        });
        writeln!(out, "{report}")?;
        return Ok(());
    }
    writeln!(
        out,
        "sums of bf16 over {} GPUs; µs a call of {} one after the other, the best of 3 rounds",
        args.tensor_parallel, args.calls
    )?;
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::UTF8_FULL_CONDENSED);
    table.set_header(["KiB", "one launch", "NCCL", "NCCL GB/s", "sum, add and norm: one launch", "two"]);
    let text = |us: Option<f64>| us.map_or_else(|| "-".to_owned(), |us| format!("{us:.1}"));
    for time in &times {
        table.add_row([
            (time.bytes / 1024).to_string(),
            text(time.one_shot_us),
            text(time.nccl_us),
            text(bandwidth(time)),
            text(time.fused_us),
            text(time.apart_us),
        ]);
    }
    writeln!(out, "{table}")?;
    Ok(())
}

/// Bytes of a rank's tensor over the time, in GB/s.
#[allow(clippy::cast_precision_loss)] // bytes
fn bandwidth(time: &SumTimes) -> Option<f64> {
    time.nccl_us.map(|us| time.bytes as f64 / us / 1e3)
}

fn row_json(time: &SumTimes) -> serde_json::Value {
    serde_json::json!({
        "bytes": time.bytes, "one_shot_us": time.one_shot_us, "nccl_us": time.nccl_us, "nccl_gb_s": bandwidth(time),
        "fused_us": time.fused_us, "apart_us": time.apart_us,
    })
}
