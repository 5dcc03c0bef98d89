//! Scheduler: pure decisions. Which tokens run in the next step ([`DynamicBatchScheduler`]) and which
//! block holds which tokens ([`PagedKvCache`]).
//!
//! This room never sees a clock, a thread, a tensor or I/O: time comes in as an argument, and the same
//! calls give the same plans. Token ids are numbers to it; it never sees text.

#![forbid(unsafe_code)]

mod id_hash;
mod kv_cache;
mod plan;
mod request;
mod scheduler;

pub use kv_cache::{
    BlockHashChain, BlockId, CacheGroup, IntegrityError, KvCacheConfig, KvCacheStats, KvLayout, OutOfBlocks,
    PagedKvCache, PrefixHit,
};
pub use plan::{BlockCopy, Event, FinishReason, SampledToken, ScheduledSequence, StepOutput, StepPlan, TokenLogprobs};
pub use request::{Admission, Refusal, RequestId, RequestSpec, SequenceId, Time};
pub use scheduler::{DynamicBatchScheduler, SchedulerConfig, SchedulerStats};
