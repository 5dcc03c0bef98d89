//! One rank of a model in a process of its own: loads its share and rehearses beside the others, says
//! what memory it took, allocates the pool that rank 0 decides on, and runs steps. On rank 0 it becomes
//! an engine. Knows no transport: what ranks tell each other before the first step is the caller's.

use crate::limits::Limits;
use crate::loading::{DeviceMemory, block_count, join_parts, size_for_all};
use crate::micro_batches;
use crate::pipeline::{PipelineExecutor, RankMeter, run_caught};
use crate::rank_memory::RankMemory;
use crate::ranks::BringUp;
use crate::remote::RemoteRanks;
use crate::worker::{PaddingBlocks, Worker};
use crate::{BuiltEngine, EngineConfig, EngineError, MemoryPlan, StepInput};
use pagemill_model::{Checkpoint, LoadProgress, ModelSpec, RankContext, Stage};
use pagemill_scheduler::StepOutput;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A rank that has loaded its share and rehearsed the largest step with the others.
pub struct LoadedRank {
    worker: Worker,
    spec: ModelSpec,
    config: EngineConfig,
    limits: Limits,
    stages: Vec<Stage>,
    memory: DeviceMemory,
    weight_bytes: u64,
    workspace_bytes: u64,
}

/// A rank that can run steps.
pub struct SettledRank(LoadedRank);

impl LoadedRank {
    /// Loads rank `rank` of the world that `config.parallel` lays out, stage by stage, on this thread.
    /// Blocks for seconds, and needs all other ranks to do the same at the same time.
    ///
    /// # Errors
    /// As [`crate::build_engine_on`]; a rank that is not the collective's.
    pub fn load(
        checkpoint: &Checkpoint,
        cx: &RankContext,
        rank: usize,
        config: &EngineConfig,
        progress: &dyn Fn(LoadProgress),
    ) -> Result<Self, EngineError> {
        let mode = config.parallel;
        let is_placed = rank < mode.num_ranks()
            && cx.collective.world_size() == mode.tensor_parallel
            && cx.collective.rank() == rank % mode.tensor_parallel;
        if !is_placed {
            let detail = format!("rank {rank} has no such place in {mode}");
            return Err(EngineError::Config { key: "tensor_parallel, pipeline_parallel", detail });
        }
        let spec = pagemill_model::read_spec(checkpoint)?;
        let stages = pagemill_model::plan_stages(checkpoint, mode)?;
        let limits = Limits::resolve(&spec, config)?;
        let bring_up = BringUp { checkpoint, spec: &spec, config, limits: &limits, stages: &stages };
        let memory = DeviceMemory::of(&cx.backend.info(), cx.backend.logits_rows());
        let ready = bring_up.run_one(cx, &stages[rank / mode.tensor_parallel], progress)?;
        Ok(Self {
            worker: ready.worker,
            memory,
            weight_bytes: ready.weight_bytes,
            workspace_bytes: ready.workspace_bytes,
            config: config.clone(),
            spec,
            limits,
            stages,
        })
    }

    /// What this rank takes of the memory of `host`, or of the device that is named so.
    #[must_use]
    pub fn memory_of(&self, host: String) -> RankMemory {
        RankMemory {
            host,
            available_bytes: self.memory.available_bytes,
            weight_bytes: self.weight_bytes,
            workspace_bytes: self.workspace_bytes,
        }
    }

    /// On rank 0: sizes the pools from what all ranks measured, in rank order. Block ids mean the same
    /// everywhere, so the host with the least room decides for all.
    ///
    /// # Errors
    /// Not enough memory; another number of ranks than the configuration's.
    pub fn size(&mut self, ranks: &[RankMemory]) -> Result<MemoryPlan, EngineError> {
        let num_ranks = self.config.parallel.num_ranks();
        if ranks.len() != num_ranks {
            return Err(EngineError::Internal(format!("{} of {num_ranks} ranks told their memory", ranks.len())));
        }
        size_for_all(&self.spec, &self.config, &self.stages, &mut self.limits, self.memory, ranks)
    }

    /// Allocates the pool of `num_blocks` blocks: the plan's, the same on every rank.
    ///
    /// # Errors
    /// No memory for it.
    pub fn settle(mut self, num_blocks: usize) -> Result<SettledRank, EngineError> {
        let num_padding = self.limits.padding_blocks(&self.config);
        let padding = PaddingBlocks { first: block_count(num_blocks)?, count: block_count(num_padding)? };
        let pool = self.worker.alloc_kv(num_blocks + num_padding)?;
        self.worker.finish_warm_up(pool, padding);
        Ok(SettledRank(self))
    }
}

impl SettledRank {
    /// Whether its outputs are the engine's: the last stage's first rank.
    #[must_use]
    pub fn is_output_rank(&self) -> bool {
        self.0.worker.is_output_rank()
    }

    /// Runs this rank's part of a step; all ranks run the same steps in the same order.
    ///
    /// # Errors
    /// The device or another rank failed, or this one panicked: it must stop.
    pub fn run(&mut self, input: &StepInput) -> Result<StepOutput, EngineError> {
        run_caught(&mut self.0.worker, input, None)
    }

    /// Reads its counters from other threads.
    #[must_use]
    pub fn meter(&self) -> MeterReader {
        MeterReader(self.0.worker.meter())
    }

    /// On rank 0: starts its thread beside the ranks behind `remote` and builds the engine. `plan` is what
    /// [`LoadedRank::size`] gave.
    ///
    /// # Errors
    /// A lost rank; `micro_batches` out of range.
    pub fn into_engine(self, plan: MemoryPlan, remote: RemoteRanks) -> Result<BuiltEngine, EngineError> {
        let LoadedRank { worker, spec, config, limits, stages, .. } = self.0;
        let mut executor = PipelineExecutor::start_among(worker, remote, &stages, config.parallel)?;
        micro_batches::settle(&mut executor, &config, &limits, plan.num_blocks)?;
        Ok(join_parts(executor, &config, &limits, spec, plan, stages))
    }
}

/// A rank's counters.
#[derive(Clone)]
pub struct MeterReader(Arc<RankMeter>);

impl MeterReader {
    /// Microseconds in steps without waiting for other stages, and growths of the workspace.
    #[must_use]
    pub fn read(&self) -> (u64, u64) {
        (self.0.busy_us.load(Ordering::Relaxed), self.0.workspace_grown.load(Ordering::Relaxed))
    }
}
