//! From what was configured to the engine's limits: every `None` gets a value by a stated rule, every
//! value is checked against the model. Knows no memory: sizes come in `memory`.

use crate::{EngineConfig, EngineError, Executor};
use pagemill_backend::{DType, KvPoolSpec};
use pagemill_model::{KvKind, ModelSpec, Stage};
use pagemill_scheduler::{CacheGroup, KvCacheConfig, PagedKvCache, SchedulerConfig};

/// `max_batch_size` when it is not configured: more rows than this gain little on a CPU. Sized pools that
/// have fewer blocks than 64 sequences need at least lower it.
const AUTO_BATCH_SIZE: usize = 64;

/// Resolved limits of one model under one configuration.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) max_batch_size: usize,
    pub(crate) max_batch_tokens: usize,
    pub(crate) max_seq_len: usize,
    pub(crate) groups: Vec<CacheGroup>,
}

impl Limits {
    /// Rules: `max_batch_size` 64; `max_seq_len` the model's; `max_batch_tokens` =
    /// `prefill_chunk_size + max_batch_size`, so that a whole prompt chunk fits beside a full batch of
    /// decodes.
    ///
    /// # Errors
    /// [`EngineError::Config`] naming the key.
    pub(crate) fn resolve(spec: &ModelSpec, config: &EngineConfig) -> Result<Self, EngineError> {
        check_values(spec, config)?;
        let max_batch_size = config.max_batch_size.unwrap_or(AUTO_BATCH_SIZE);
        let max_batch_tokens = config.max_batch_tokens.unwrap_or(config.prefill_chunk_size + max_batch_size);
        for (key, tokens) in [
            ("max_batch_tokens", max_batch_tokens),
            ("mixed_batch_tokens", config.mixed_batch_tokens.unwrap_or(max_batch_tokens)),
        ] {
            if tokens < max_batch_size {
                return Err(bad(key, format!("{tokens} is less than max_batch_size ({max_batch_size})")));
            }
        }
        let groups = spec
            .kv_groups
            .iter()
            .map(|group| match group.kind {
                KvKind::Full => CacheGroup::Full,
                KvKind::SlidingWindow { window } => CacheGroup::SlidingWindow { window },
            })
            .collect();
        let max_seq_len = config.max_seq_len.unwrap_or(spec.max_seq_len);
        Ok(Self { max_batch_size, max_batch_tokens, max_seq_len, groups })
    }

    /// The scheduler's part, for ranks that run its plans.
    pub(crate) fn scheduler_config(&self, config: &EngineConfig, ranks: &impl Executor) -> SchedulerConfig {
        SchedulerConfig {
            micro_batches: ranks.max_in_flight(),
            // A static batch goes on in step: where one member's end is not known, nobody's next token is planned.
            plan_ahead: config.plan_ahead && config.continuous_batching && ranks.fills_in_draws(),
            ..self.scheduler_limits(config)
        }
    }

    /// The same for ranks of which nothing is known: a step at a time.
    fn scheduler_limits(&self, config: &EngineConfig) -> SchedulerConfig {
        SchedulerConfig {
            micro_batches: 1,
            plan_ahead: false,
            num_stages: config.parallel.pipeline_parallel,
            max_batch_size: self.max_batch_size,
            max_batch_tokens: self.max_batch_tokens,
            prefill_chunk_size: config.prefill_chunk_size,
            mixed_batch_tokens: config.mixed_batch_tokens,
            max_seq_len: self.max_seq_len,
            max_waiting: config.max_waiting,
            ageing_us: config.ageing_us,
            continuous_batching: config.continuous_batching,
            static_batch_wait_us: config.static_batch_wait_us,
        }
    }

    /// The cache's part.
    pub(crate) fn cache_config(&self, config: &EngineConfig, num_blocks: usize) -> KvCacheConfig {
        KvCacheConfig {
            num_blocks,
            block_size: config.block_size,
            groups: self.groups.clone(),
            layout: config.kv_layout,
            max_seq_len: self.max_seq_len,
            prefill_chunk_size: self.scheduler_limits(config).largest_chunk(),
            prefix_cache: config.prefix_cache,
        }
    }

    /// Blocks that a sequence of `tokens` tokens holds at most, when none is longer.
    pub(crate) fn blocks_needed(&self, config: &EngineConfig, tokens: usize) -> usize {
        let limits = Self { max_seq_len: tokens, ..self.clone() };
        PagedKvCache::new(limits.cache_config(config, 1)).blocks_needed(tokens)
    }

    /// Bytes of one block on every rank of `stages`, in rank order.
    ///
    /// # Errors
    /// Heads that cannot be cut over so many ranks.
    pub(crate) fn rank_block_bytes(
        spec: &ModelSpec,
        config: &EngineConfig,
        stages: &[Stage],
    ) -> Result<Vec<u64>, EngineError> {
        let kv_heads = spec.kv_heads_by_rank(config.parallel.tensor_parallel)?;
        let block_bytes = |stage, num_kv_heads| block_spec(spec, config, stage, num_kv_heads).block_bytes() as u64;
        let of_stage = |stage| kv_heads.iter().map(move |&num_kv_heads| block_bytes(stage, num_kv_heads));
        Ok(stages.iter().flat_map(of_stage).collect())
    }

    /// Blocks behind the pool that only a static batch's padding uses: enough for one whole step.
    pub(crate) fn padding_blocks(&self, config: &EngineConfig) -> usize {
        if config.continuous_batching { 0 } else { self.max_batch_tokens.div_ceil(config.block_size) }
    }
}

/// A pool of one block on a rank of `stage` that holds so many KV heads.
pub(crate) fn block_spec(spec: &ModelSpec, config: &EngineConfig, stage: &Stage, num_kv_heads: usize) -> KvPoolSpec {
    KvPoolSpec {
        num_blocks: 1,
        block_size: config.block_size,
        layers_per_group: stage.layers_per_group(spec),
        num_kv_heads,
        head_dim: spec.head_dim,
        dtype: config.kv_dtype,
    }
}

fn check_values(spec: &ModelSpec, config: &EngineConfig) -> Result<(), EngineError> {
    if ![16, 32, 64, 128, 256].contains(&config.block_size) {
        return Err(bad("block_size", format!("{} is none of 16, 32, 64, 128, 256", config.block_size)));
    }
    if ![DType::F16, DType::BF16, DType::F32].contains(&config.kv_dtype) {
        return Err(bad("kv_dtype", format!("{} is none of F16, BF16, F32", config.kv_dtype)));
    }
    if config.prefill_chunk_size == 0 || config.prefill_chunk_size > 1 << 20 {
        return Err(bad("prefill_chunk_size", format!("{} is not in 1..=1048576", config.prefill_chunk_size)));
    }
    for (key, value) in [("max_batch_size", config.max_batch_size), ("max_batch_tokens", config.max_batch_tokens)] {
        if let Some(value) = value.filter(|value| !(1..=1 << 20).contains(value)) {
            return Err(bad(key, format!("{value} is not in 1..=1048576")));
        }
    }
    if let Some(tokens) = config.max_seq_len.filter(|tokens| !(1..=spec.max_seq_len).contains(tokens)) {
        return Err(bad(
            "max_seq_len",
            format!("{tokens} is not in 1..={}, the positions that the model was made for", spec.max_seq_len),
        ));
    }
    Ok(())
}

fn bad(key: &'static str, detail: String) -> EngineError {
    EngineError::Config { key, detail }
}
