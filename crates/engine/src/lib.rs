//! Engine: the step loop, the executor and its workers, the sampler, the memory manager.
//!
//! This room sees token ids only: never text, never HTTP, never a wall clock outside `clock`. One
//! thread owns the scheduler and the KV cache; everybody else talks to it through [`EngineHandle`].
//!
//! Read in this order: [`handle`] (the way in) → [`engine`] (the step loop) → [`executor`] (the seam)
//! → `pipeline` → `worker` → `sampler`.

#![forbid(unsafe_code)]

mod clock;
pub mod config;
mod delivery;
mod draws;
pub mod engine;
pub mod error;
pub mod executor;
pub mod handle;
pub mod host_time;
mod layout;
mod limits;
pub mod loading;
pub mod lone_rank;
pub mod memory;
mod micro_batches;
mod packer;
pub mod pipeline;
mod rank_memory;
mod ranks;
pub mod remote;
pub mod request;
mod requests;
mod sampler;
pub mod sampling;
pub mod sink;
mod stage_costs;
mod step_times;
mod wanted_rows;
mod warm_up;
mod worker;

pub use config::EngineConfig;
pub use engine::InferenceEngine;
pub use error::{EngineError, SubmitError};
pub use executor::{Executor, MicroBatchSample, PipelineStatus, StageStatus, StartedRequest, StepInput};
pub use handle::{EngineHandle, EngineStatus};
pub use host_time::{HostTime, RankHostTime};
pub use loading::{BuiltEngine, DeviceMemory, StartTimes, build_engine, build_engine_on, plan_memory};
pub use lone_rank::{LoadedRank, MeterReader, SettledRank};
pub use memory::{KvFactors, MemoryPlan, UnifiedMemoryAllocator};
pub use pipeline::PipelineExecutor;
pub use rank_memory::RankMemory;
pub use remote::{NextStep, RemoteEnds, RemoteRanks};
pub use request::{EngineEvent, EventSink, Request, SinkClosed, Usage};
pub use sampling::SamplingParams;
pub use sink::{ChannelSink, Completion, EventReceiver, Generation, RecvTimeoutError};

pub use pagemill_model::{Checkpoint, LoadProgress, ParallelMode, RankContext};
pub use pagemill_scheduler::{FinishReason, Refusal, RequestId, SequenceId, TokenLogprobs};
