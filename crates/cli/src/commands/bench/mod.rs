//! `pagemill bench`: measures the engine, and prints what exactly was measured beside every figure.

mod all_reduce;
mod drawing;
mod driver;
mod http;
mod kernels;
mod latency;
mod load;
mod own_server;
mod perplexity;
mod ranks;
mod serve;
mod throughput;
mod workload;

use crate::processes;
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
    /// Requests over HTTP against this server or another one
    Serve(serve::ServeArgs),
    /// Every op at a model's shapes, beside what this machine can do at most
    Kernels(kernels::KernelsArgs),
    /// Stages of a pipeline with and without bubble filling, micro-batch tuning, all-reduce cost
    Ranks(ranks::RanksArgs),
    /// Sums over GPUs: in one launch over peer memory, and by NCCL
    AllReduce(all_reduce::AllReduceArgs),
    /// How well the served model predicts a text, by llama.cpp's protocol
    Perplexity(perplexity::PerplexityArgs),
}

/// Runs one of them.
pub fn bench(args: BenchArgs) -> Result<()> {
    let alone = match args.bench {
        // The one joins the other processes; of the other there may be many against one server.
        Bench::Latency(_) | Bench::Serve(_) => None,
        Bench::Throughput(_) => Some("bench throughput"),
        Bench::Kernels(_) => Some("bench kernels"),
        Bench::Ranks(_) => Some("bench ranks"),
        Bench::AllReduce(_) => Some("bench all-reduce"),
        Bench::Perplexity(_) => Some("bench perplexity"),
    };
    alone.map_or(Ok(()), processes::ensure_alone)?;
    match args.bench {
        Bench::Latency(args) => latency::latency(args),
        Bench::Throughput(args) => throughput::throughput(args),
        Bench::Serve(args) => serve::serve(args),
        Bench::Kernels(args) => kernels::kernels(args),
        Bench::Ranks(args) => ranks::ranks(args),
        Bench::AllReduce(args) => all_reduce::all_reduce(&args),
        Bench::Perplexity(args) => perplexity::perplexity(args),
    }
}
