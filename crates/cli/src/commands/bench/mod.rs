//! `pagemill bench`: measures the engine, and prints what exactly was measured beside every figure.

mod driver;
mod latency;
mod throughput;
mod workload;

use anyhow::Result;
use clap::{Args, Subcommand};

/// Arguments of `pagemill bench`.
#[derive(Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// Prefill and decode speed of one sequence or of a batch
    Latency(latency::LatencyArgs),
    /// Static against continuous batching, contiguous against paged KV, on conversation-like lengths
    Throughput(throughput::ThroughputArgs),
}

/// Runs one of them.
pub fn bench(args: BenchArgs) -> Result<()> {
    match args.bench {
        Bench::Latency(args) => latency::latency(args),
        Bench::Throughput(args) => throughput::throughput(args),
    }
}
