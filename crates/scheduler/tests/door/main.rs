//! Tests at the crate's door: requests go in, plans come out, a fake executor reads and writes a
//! simulated KV memory through the plans' block tables.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, missing_docs)]

mod admission;
mod ahead;
mod choices;
mod ending;
mod kv_cache;
mod micro_batches;
mod model_check;
mod pipelined;
mod preemption;
mod prefix_cache;
mod reuse;
mod static_batch;
mod support;
