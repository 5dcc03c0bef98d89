//! From a checkpoint to a running engine: load, warm up, measure, size the KV pool, join the parts.
//! And the same sums without a device, for `pagemill plan`.

use crate::limits::Limits;
use crate::memory::{KvDemand, KvFactors, size_kv_pool};
use crate::micro_batches;
use crate::pipeline::PipelineExecutor;
use crate::rank_memory::{RankMemory, room_for_all};
use crate::ranks::BringUp;
use crate::stage_costs;
use crate::worker::{PaddingBlocks, Worker};
use crate::{EngineConfig, EngineError, InferenceEngine, MemoryPlan, UnifiedMemoryAllocator};
use pagemill_backend::{Backend, DeviceInfo, SoloCollective};
use pagemill_model::{Checkpoint, LoadProgress, ModelSpec, RankContext, Stage};
use pagemill_scheduler::{DynamicBatchScheduler, PagedKvCache};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What [`build_engine`] made.
pub struct BuiltEngine {
    /// Ready to be given to [`crate::EngineHandle::spawn`].
    pub engine: InferenceEngine<PipelineExecutor>,
    /// The model's shapes and limits; the limits in force are in `plan`.
    pub spec: ModelSpec,
    /// Memory and limits as measured.
    pub plan: MemoryPlan,
    /// The layers of each stage.
    pub stages: Vec<Stage>,
    /// What starting took; nothing where ranks are processes, which are not timed.
    pub times: StartTimes,
}

/// Where the time of a start goes: of the slowest rank, where there are several.
#[derive(Clone, Copy, Debug, Default)]
pub struct StartTimes {
    /// Reading weights onto the device.
    pub weights: Duration,
    /// The largest step, on a pool that holds just it.
    pub rehearsal: Duration,
    /// Allocating the pool, starting the ranks' threads, and tuning micro-batches.
    pub pool: Duration,
}

/// Loads a model on one device and builds its engine. See [`build_engine_on`].
///
/// # Errors
/// As [`build_engine_on`].
pub fn build_engine(
    checkpoint: &Checkpoint,
    backend: Arc<dyn Backend>,
    config: &EngineConfig,
    progress: &dyn Fn(LoadProgress),
) -> Result<BuiltEngine, EngineError> {
    let rank = RankContext { backend, collective: Arc::new(SoloCollective) };
    build_engine_on(checkpoint, vec![rank], config, progress)
}

/// Loads a model over `ranks`, stage by stage, each on a thread of its own from now on, and builds its
/// engine. Blocking: seconds.
///
/// The KV pools are sized by measurement: after the weights are loaded, the largest step is rehearsed once
/// on pools that hold just that step; what it leaves in the workspaces is what any later step needs.
/// Block ids mean the same on every rank, so the ranks' pools have equally many blocks.
///
/// # Errors
/// A configuration that cannot work, a layout that the model does not allow, a model that cannot be
/// loaded, not enough memory.
pub fn build_engine_on(
    checkpoint: &Checkpoint,
    ranks: Vec<RankContext>,
    config: &EngineConfig,
    progress: &dyn Fn(LoadProgress),
) -> Result<BuiltEngine, EngineError> {
    check_ranks(&ranks, config)?;
    let spec = pagemill_model::read_spec(checkpoint)?;
    let mut limits = Limits::resolve(&spec, config)?;
    let Some(backend) = ranks.first().map(|rank| &rank.backend) else {
        return Err(EngineError::Internal("a model on no rank".into()));
    };
    let stages = stage_costs::plan(checkpoint, config.parallel, &**backend)?;
    let memory = DeviceMemory::of(&backend.info(), backend.logits_rows());
    // Before anything is loaded.
    let devices: Vec<DeviceInfo> = ranks.iter().map(|rank| rank.backend.info()).collect();

    let bring_up = BringUp { checkpoint, spec: &spec, config, limits: &limits, stages: &stages };
    let ready = bring_up.run(ranks, progress)?;
    let slowest = |of: fn(&StartTimes) -> Duration| ready.iter().map(|rank| of(&rank.times)).max().unwrap_or_default();
    let (weights, rehearsal) = (slowest(|times| times.weights), slowest(|times| times.rehearsal));
    let settling = Instant::now();
    let rank_memory: Vec<RankMemory> = ready
        .iter()
        .zip(devices)
        .map(|(rank, device)| RankMemory {
            // All share one host's memory, or have a device's, which its description names.
            host: if memory.is_shared { String::new() } else { device.description },
            available_bytes: device.memory_available_bytes,
            weight_bytes: rank.weight_bytes,
            workspace_bytes: rank.workspace_bytes,
        })
        .collect();
    let plan = size_for_all(&spec, config, &stages, &mut limits, memory, &rank_memory)?;
    let mut workers: Vec<Worker> = ready.into_iter().map(|rank| rank.worker).collect();
    let num_padding = limits.padding_blocks(config);
    let padding = PaddingBlocks { first: block_count(plan.num_blocks)?, count: block_count(num_padding)? };
    for worker in &mut workers {
        let pool = worker.alloc_kv(plan.num_blocks + num_padding)?;
        worker.finish_warm_up(pool, padding);
    }
    let mut executor = PipelineExecutor::start(workers)?;
    micro_batches::settle(&mut executor, config, &limits, plan.num_blocks)?;
    let times = StartTimes { weights, rehearsal, pool: settling.elapsed() };
    Ok(BuiltEngine { times, ..join_parts(executor, config, &limits, spec, plan, stages) })
}

/// Puts the engine together around an executor that is ready.
pub(crate) fn join_parts(
    executor: PipelineExecutor,
    config: &EngineConfig,
    limits: &Limits,
    spec: ModelSpec,
    plan: MemoryPlan,
    stages: Vec<Stage>,
) -> BuiltEngine {
    let engine = InferenceEngine::new(
        DynamicBatchScheduler::new(limits.scheduler_config(config, &executor)),
        PagedKvCache::new(limits.cache_config(config, plan.num_blocks)),
        executor,
        UnifiedMemoryAllocator::new(plan),
    );
    let engine = if config.check_every_step { engine.checked_every_step() } else { engine };
    BuiltEngine { engine, spec, plan, stages, times: StartTimes::default() }
}

/// As many ranks as the configuration lays the model out over, in equal stages.
fn check_ranks(ranks: &[RankContext], config: &EngineConfig) -> Result<(), EngineError> {
    let mode = config.parallel;
    let are_placed = ranks.iter().enumerate().all(|(at, rank)| {
        let collective = &rank.collective;
        collective.world_size() == mode.tensor_parallel && collective.rank() == at % mode.tensor_parallel
    });
    if mode.num_ranks() == 0 || ranks.len() != mode.num_ranks() || !are_placed {
        let detail = format!("{} ranks were given for {mode}, stage by stage", ranks.len());
        return Err(EngineError::Config { key: "tensor_parallel, pipeline_parallel", detail });
    }
    Ok(())
}

/// The plan that [`build_engine`] would arrive at with that memory, weights as they are
/// stored and the workspace estimated. Reads nothing, allocates nothing. Stages are taken to be of
/// equally many layers, and weights and workspace to be shared evenly; what tensor-parallel ranks hold twice is not
/// counted twice.
///
/// # Errors
/// As [`build_engine`], for configuration, heads and memory.
pub fn plan_memory(spec: &ModelSpec, config: &EngineConfig, memory: DeviceMemory) -> Result<MemoryPlan, EngineError> {
    let mut limits = Limits::resolve(spec, config)?;
    let (count, num_layers) = (config.parallel.pipeline_parallel, spec.num_layers);
    if count == 0 || count > num_layers {
        let detail = format!("{num_layers} layers do not make {count} stages of at least one layer");
        return Err(EngineError::Config { key: "pipeline_parallel", detail });
    }
    let layers = |index: usize| index * num_layers / count..(index + 1) * num_layers / count;
    let stages: Vec<Stage> = (0..count).map(|index| Stage { index, count, layers: layers(index) }).collect();
    let workspace_bytes = estimate_workspace(spec, limits.max_batch_tokens, memory.logits_rows) * count as u64;
    let num_ranks = config.parallel.num_ranks();
    if memory.is_shared || num_ranks == 1 {
        let measured = Measured { memory, weight_bytes: spec.stored_bytes, workspace_bytes };
        return size(spec, config, &stages, &mut limits, measured);
    }
    // Ranks on devices of their own are taken to have as much each.
    let share = |bytes: u64, rank: usize| even_share(bytes, rank, num_ranks);
    let ranks: Vec<RankMemory> = (0..num_ranks)
        .map(|rank| RankMemory {
            host: rank.to_string(),
            available_bytes: memory.available_bytes,
            weight_bytes: share(spec.stored_bytes, rank),
            workspace_bytes: share(workspace_bytes, rank),
        })
        .collect();
    size_for_all(spec, config, &stages, &mut limits, memory, &ranks)
}

/// The part of `bytes` that is `rank`'s of `num_ranks`, such that all parts are all of it.
fn even_share(bytes: u64, rank: usize, num_ranks: usize) -> u64 {
    let (rank, num_ranks) = (rank as u64, num_ranks as u64);
    bytes / num_ranks + u64::from(rank < bytes % num_ranks)
}

/// What the plan needs to know of a device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceMemory {
    /// Bytes that this process may take, of each device where they are not shared.
    pub available_bytes: u64,
    /// Whether they are also everybody else's.
    pub is_shared: bool,
    /// Rows of logits computed at once.
    pub logits_rows: usize,
}

impl DeviceMemory {
    /// A device's own account; `logits_rows` is its `Backend::logits_rows`.
    #[must_use]
    pub fn of(info: &DeviceInfo, logits_rows: usize) -> Self {
        Self { available_bytes: info.memory_available_bytes, is_shared: info.shares_memory, logits_rows }
    }
}

/// Over all ranks.
pub(crate) struct Measured {
    pub(crate) memory: DeviceMemory,
    pub(crate) weight_bytes: u64,
    pub(crate) workspace_bytes: u64,
}

/// Sizes the pool and lets the limits follow: `max_seq_len` shrinks to what fits, and an automatic
/// `max_batch_size` to the number of sequences for which the pool has a block in every group.
pub(crate) fn size(
    spec: &ModelSpec,
    config: &EngineConfig,
    stages: &[Stage],
    limits: &mut Limits,
    measured: Measured,
) -> Result<MemoryPlan, EngineError> {
    let block_bytes = Limits::rank_block_bytes(spec, config, stages)?.iter().sum();
    let elem_bytes = config.kv_dtype.block_bytes();
    let filled = MemoryPlan {
        available_bytes: measured.memory.available_bytes,
        weight_bytes: measured.weight_bytes,
        workspace_bytes: measured.workspace_bytes,
        block_bytes,
        block_size: config.block_size,
        max_seq_len: limits.max_seq_len,
        model_seq_len: spec.max_seq_len,
        max_batch_size: limits.max_batch_size,
        max_batch_tokens: limits.max_batch_tokens,
        kv: KvFactors {
            layers: spec.num_layers,
            kv_heads: spec.num_kv_heads,
            head_dim: spec.head_dim,
            elem_bytes,
            sequence_bytes: 0,
        },
        parallel: config.parallel,
        ..MemoryPlan::default()
    };
    let demanding = limits.clone();
    let mut plan = size_kv_pool(&KvDemand {
        measured: filled,
        shares_memory: measured.memory.is_shared,
        blocks_needed: &|tokens| demanding.blocks_needed(config, tokens),
        padding_blocks: limits.padding_blocks(config),
        configured_bytes: config.kv_cache_bytes,
        fixed_seq_len: config.max_seq_len.is_some(),
    })?;
    if config.max_batch_size.is_none() {
        let holdable = plan.num_blocks / limits.groups.len().max(1);
        limits.max_batch_size = limits.max_batch_size.min(holdable.max(1));
    }
    limits.max_seq_len = plan.max_seq_len;
    plan.max_batch_size = limits.max_batch_size;
    plan.kv.sequence_bytes = spec.kv_bytes(plan.max_seq_len, elem_bytes);
    Ok(plan)
}

/// The same from what every rank has measured, in rank order. Block ids mean the same everywhere, so the host or
/// device with the least room decides for all.
pub(crate) fn size_for_all(
    spec: &ModelSpec,
    config: &EngineConfig,
    stages: &[Stage],
    limits: &mut Limits,
    memory: DeviceMemory,
    ranks: &[RankMemory],
) -> Result<MemoryPlan, EngineError> {
    let block_bytes = Limits::rank_block_bytes(spec, config, stages)?;
    let measured = Measured {
        memory: DeviceMemory { available_bytes: room_for_all(ranks, &block_bytes), ..memory },
        weight_bytes: ranks.iter().map(|rank| rank.weight_bytes).sum(),
        workspace_bytes: ranks.iter().map(|rank| rank.workspace_bytes).sum(),
    };
    size(spec, config, stages, limits, measured)
}

/// f32 temporaries of a layer over `T` tokens (residual, normed and projected hidden states, q, k, v,
/// attention, gate, up and their product, and the activations quantised to a quarter of the widest),
/// and one tile of logits.
fn estimate_workspace(spec: &ModelSpec, max_batch_tokens: usize, logits_rows: usize) -> u64 {
    let (d, f) = (spec.hidden_size as u64, spec.intermediate_size as u64);
    let q = (spec.num_heads * spec.head_dim) as u64;
    let kv = (spec.num_kv_heads * spec.head_dim) as u64;
    let elements_per_token = 3 * d + 2 * q + 2 * kv + 3 * f + d.max(f).max(q) / 4;
    let tile = logits_rows.min(max_batch_tokens) as u64 * (spec.vocab_size as u64 + d);
    4 * (max_batch_tokens as u64 * elements_per_token + tile)
}

pub(crate) fn block_count(count: usize) -> Result<u32, EngineError> {
    u32::try_from(count).map_err(|_| EngineError::Memory(format!("{count} KV blocks exceed 32-bit block ids")))
}
