//! Ranks on GPUs: collectives against sums taken on the host, and the zoo over two GPUs against its golden outputs
//! and against one GPU. Where there are too few GPUs, or no NCCL, each test says so and ends.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]
#![allow(clippy::explicit_write)] // the harness would hold back what eprintln! says

mod collectives;
mod support;
mod zoo;
