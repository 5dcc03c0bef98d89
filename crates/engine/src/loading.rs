//! From a checkpoint to a running engine: load, warm up, measure, size the KV pool, join the parts.
//! And the same sums without a device, for `pagemill plan`.

use crate::limits::{Limits, pool_spec};
use crate::memory::{KvDemand, KvFactors, size_kv_pool};
use crate::pipeline::PipelineExecutor;
use crate::warm_up::largest_step;
use crate::worker::{PaddingBlocks, Worker};
use crate::{EngineConfig, EngineError, InferenceEngine, MemoryPlan, UnifiedMemoryAllocator};
use pagemill_backend::{Backend, DeviceInfo, SoloCollective};
use pagemill_model::{Checkpoint, LoadProgress, ModelSpec, RankContext};
use pagemill_scheduler::{DynamicBatchScheduler, PagedKvCache};
use std::sync::Arc;

/// What [`build_engine`] made.
pub struct BuiltEngine {
    /// Ready to be given to [`crate::EngineHandle::spawn`].
    pub engine: InferenceEngine<PipelineExecutor>,
    /// The model's shapes and limits; the limits in force are in `plan`.
    pub spec: ModelSpec,
    /// Memory and limits as measured.
    pub plan: MemoryPlan,
}

/// Loads a model and builds its engine. Blocking: seconds.
///
/// The KV pool is sized by measurement: after the weights are loaded, the largest step is rehearsed once on
/// a pool that holds just that step; what it leaves in the workspace is what any later step needs.
///
/// # Errors
/// A configuration that cannot work, a model that cannot be loaded, not enough memory.
pub fn build_engine(
    checkpoint: &Checkpoint,
    backend: Arc<dyn Backend>,
    config: &EngineConfig,
    progress: &dyn Fn(LoadProgress),
) -> Result<BuiltEngine, EngineError> {
    let spec = pagemill_model::read_spec(checkpoint)?;
    let mut limits = Limits::resolve(&spec, config)?;
    let info = backend.info();
    let memory = DeviceMemory::of(&info, backend.logits_rows());
    let rank = RankContext { backend: Arc::clone(&backend), collective: Arc::new(SoloCollective) };
    let model = pagemill_model::load(checkpoint, &rank, progress)?;
    let weight_bytes = model.weight_bytes();

    let largest = largest_step(&limits, config.block_size, backend.logits_rows());
    let warm_up_pool = backend.alloc_kv(&pool_spec(&spec, config, largest.num_blocks))?;
    let mut worker =
        Worker::new(Arc::clone(&backend), model, warm_up_pool, PaddingBlocks::default(), limits.max_batch_tokens);
    backend.rehearse(true);
    let rehearsed = worker.run(largest.input);
    backend.rehearse(false);
    rehearsed?;

    let workspace_bytes = backend.workspace().0 as u64;
    let plan = size(&spec, config, &mut limits, Measured { memory, weight_bytes, workspace_bytes })?;
    let padding =
        PaddingBlocks { first: block_count(plan.num_blocks)?, count: block_count(limits.padding_blocks(config))? };
    let pool = pool_spec(&spec, config, plan.num_blocks + limits.padding_blocks(config));
    worker.finish_warm_up(backend.alloc_kv(&pool)?, padding);

    let engine = InferenceEngine::new(
        DynamicBatchScheduler::new(limits.scheduler_config(config)),
        PagedKvCache::new(limits.cache_config(config, plan.num_blocks)),
        PipelineExecutor::start(worker)?,
        UnifiedMemoryAllocator::new(plan),
    );
    let engine = if config.check_every_step { engine.checked_every_step() } else { engine };
    Ok(BuiltEngine { engine, spec, plan })
}

/// The plan that [`build_engine`] would arrive at with that memory, weights as they are
/// stored and the workspace estimated. Reads nothing, allocates nothing.
///
/// # Errors
/// As [`build_engine`], for configuration and memory.
pub fn plan_memory(spec: &ModelSpec, config: &EngineConfig, memory: DeviceMemory) -> Result<MemoryPlan, EngineError> {
    let mut limits = Limits::resolve(spec, config)?;
    let workspace_bytes = estimate_workspace(spec, limits.max_batch_tokens, memory.logits_rows);
    size(spec, config, &mut limits, Measured { memory, weight_bytes: spec.stored_bytes, workspace_bytes })
}

/// What the plan needs to know of a device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceMemory {
    /// Bytes that this process may take.
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

struct Measured {
    memory: DeviceMemory,
    weight_bytes: u64,
    workspace_bytes: u64,
}

/// Sizes the pool and lets the limits follow: `max_seq_len` shrinks to what fits, and an automatic
/// `max_batch_size` to the number of sequences for which the pool has a block in every group.
fn size(
    spec: &ModelSpec,
    config: &EngineConfig,
    limits: &mut Limits,
    measured: Measured,
) -> Result<MemoryPlan, EngineError> {
    let elem_bytes = config.kv_dtype.block_bytes();
    let filled = MemoryPlan {
        available_bytes: measured.memory.available_bytes,
        weight_bytes: measured.weight_bytes,
        workspace_bytes: measured.workspace_bytes,
        block_bytes: pool_spec(spec, config, 1).block_bytes() as u64,
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

fn block_count(count: usize) -> Result<u32, EngineError> {
    u32::try_from(count).map_err(|_| EngineError::Memory(format!("{count} KV blocks exceed 32-bit block ids")))
}
