//! Ceilings and ops as a table or as JSON.

use super::KernelsArgs;
use super::ceilings::{Ceilings, Reading};
use super::measure::{Measure, Row};
use crate::config::Config;
use crate::devices;
use anyhow::Result;
use std::io::Write;

/// Prints all of it.
pub fn print(
    args: &KernelsArgs,
    model: &str,
    config: &Config,
    ceilings: &Ceilings,
    measure: &Measure<'_>,
) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let device = measure.backend.info().description;
    let activations = devices::activations(config);
    if args.json {
        let rows: Vec<serde_json::Value> = measure.rows.iter().map(|row| row_json(ceilings, row)).collect();
        let left_out: Vec<serde_json::Value> = measure
            .left_out
            .iter()
            .map(|left| serde_json::json!({"op": left.op, "shape": left.shape, "why": left.why}))
            .collect();
        let read = |reading: Option<Reading>| {
            reading.map(|r| serde_json::json!({"bytes_per_s": r.bytes_per_second, "buffer_bytes": r.buffer_bytes}))
        };
        let report = serde_json::json!({
            "bench": "kernels", "model": model, "device": device, "activations": activations,
            "kv_dtype": config.engine.kv_dtype.name(), "block_size": config.engine.block_size,
            "ceilings": {
                "memory_read": read(ceilings.memory), "weights_read": read(ceilings.weights),
                "cache_read": read(ceilings.cache), "f32_ops_per_s": ceilings.f32_ops,
                "bf16_ops_per_s": ceilings.bf16_ops, "int8_ops_per_s": ceilings.int8_ops,
                "launch_us": ceilings.launch_seconds.map(|s| s * 1e6),
            },
            "ops": rows, "left_out": left_out,
        });
        writeln!(out, "{report}")?;
        return Ok(());
    }
    writeln!(
        out,
        "{model} on {device}; {activations} activations, {} KV in blocks of {}",
        config.engine.kv_dtype, config.engine.block_size
    )?;
    writeln!(out, "ceilings of this machine:")?;
    for line in ceiling_lines(ceilings, measure.is_apart()) {
        writeln!(out, "  {line}")?;
    }
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::UTF8_FULL_CONDENSED);
    table.set_header(["op", "shape", "µs", "GB/s", "Gop/s", "of the ceiling"]);
    for row in &measure.rows {
        let share = ceilings.share(row);
        table.add_row([
            row.op.clone(),
            row.shape.clone(),
            format!("{:.1}", row.seconds * 1e6),
            format!("{:.1}", row.bytes_per_second() / 1e9),
            if row.ops > 0.0 { format!("{:.1}", row.ops_per_second() / 1e9) } else { "-".into() },
            format!("{:.0} % ({})", share.share * 100.0, share.of),
        ]);
    }
    writeln!(out, "{table}")?;
    for left in &measure.left_out {
        writeln!(out, "not measured: {} ({}): {}", left.op, left.shape, left.why)?;
    }
    Ok(())
}

/// One line for each limit; those that a host has and nobody could measure are named.
fn ceiling_lines(ceilings: &Ceilings, is_apart: bool) -> Vec<String> {
    let mut lines = Vec::new();
    for (what, reading) in [
        ("reading memory", ceilings.memory),
        ("reading as much as the weights", ceilings.weights),
        ("reading from the threads' own caches", ceilings.cache),
    ] {
        if let Some(Reading { bytes_per_second, buffer_bytes }) = reading {
            lines.push(format!("{what}: {:.1} GB/s over {:.1} MB", bytes_per_second / 1e9, mega(buffer_bytes)));
        }
    }
    let on_host = [("f32 multiply-add", ceilings.f32_ops), ("int8 multiply-add", ceilings.int8_ops)];
    let apart = [("bf16 product of 8192 × 8192 × 8192", ceilings.bf16_ops)];
    for &(what, rate) in if is_apart { &apart[..] } else { &on_host[..] } {
        let rate = rate.map_or_else(|| "not measured in this type".into(), |r| format!("{:.0} Gop/s", r / 1e9));
        lines.push(format!("{what}: {rate}"));
    }
    if let Some(seconds) = ceilings.launch_seconds {
        lines.push(format!("a kernel that does nothing, recorded among others: {:.2} µs", seconds * 1e6));
    }
    lines
}

#[allow(clippy::cast_precision_loss)] // for display
fn mega(bytes: usize) -> f64 {
    bytes as f64 / 1e6
}

fn row_json(ceilings: &Ceilings, row: &Row) -> serde_json::Value {
    let share = ceilings.share(row);
    serde_json::json!({
        "op": row.op, "shape": row.shape, "us": row.seconds * 1e6, "bytes": row.bytes, "ops": row.ops,
        "bytes_per_s": row.bytes_per_second(), "ops_per_s": row.ops_per_second(),
        "share": share.share, "share_of": share.of,
    })
}
