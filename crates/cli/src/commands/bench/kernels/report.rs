//! Ceilings and ops as a table or as JSON.

use super::KernelsArgs;
use super::ceilings::Ceilings;
use super::measure::Row;
use crate::config::Config;
use anyhow::Result;
use std::io::Write;

/// Prints all of it.
pub fn print(
    args: &KernelsArgs,
    model: &str,
    device: &str,
    config: &Config,
    ceilings: &Ceilings,
    rows: &[Row],
) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let activations = format!("{:?}", config.cpu.activations).to_lowercase();
    if args.json {
        let rows: Vec<serde_json::Value> = rows.iter().map(|row| row_json(ceilings, row)).collect();
        let read = |(rate, bytes): (f64, usize)| serde_json::json!({"bytes_per_s": rate, "buffer_bytes": bytes});
        let report = serde_json::json!({
            "bench": "kernels", "model": model, "device": device, "activations": activations,
            "kv_dtype": config.engine.kv_dtype.name(),
            "ceilings": {
                "memory_read": read(ceilings.memory), "weights_read": read(ceilings.weights),
                "cache_read": read(ceilings.cache), "f32_ops_per_s": ceilings.f32_ops,
                "int8_ops_per_s": ceilings.int8_ops,
            },
            "ops": rows,
        });
        writeln!(out, "{report}")?;
        return Ok(());
    }
    writeln!(out, "{model} on {device}; {activations} activations, {} KV", config.engine.kv_dtype)?;
    writeln!(out, "ceilings of this machine, all threads:")?;
    for (what, (rate, bytes)) in [
        ("reading memory", ceilings.memory),
        ("reading as much as the weights", ceilings.weights),
        ("reading from the threads' own caches", ceilings.cache),
    ] {
        writeln!(out, "  {what}: {:.1} GB/s over {:.1} MB", rate / 1e9, mega(bytes))?;
    }
    for (what, rate) in [("f32 multiply-add", ceilings.f32_ops), ("int8 multiply-add", ceilings.int8_ops)] {
        let rate =
            rate.map_or_else(|| "not measured on this instruction set".into(), |r| format!("{:.0} Gop/s", r / 1e9));
        writeln!(out, "  {what}: {rate}")?;
    }
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::UTF8_FULL_CONDENSED);
    table.set_header(["op", "shape", "µs", "GB/s", "Gop/s", "of the ceiling"]);
    for row in rows {
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
    Ok(())
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
