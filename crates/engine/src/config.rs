//! The engine's part of the configuration: validated and immutable once the engine is built.

use pagemill_backend::DType;
use pagemill_model::ParallelMode;
use pagemill_scheduler::KvLayout;

/// Settings of an engine. `None` means: derived from the model and the memory, and printed.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Sequences in one step at most.
    pub max_batch_size: Option<usize>,
    /// Tokens in a sequence at most; `None`: the model's.
    pub max_seq_len: Option<usize>,
    /// Tokens in one step at most.
    pub max_batch_tokens: Option<usize>,
    /// Prompt tokens of one request in one step at most.
    pub prefill_chunk_size: usize,
    /// Tokens at most in a step of several sequences; a prompt alone, while nobody decodes, may have up to
    /// `max_batch_tokens`. `None`: such steps are no different.
    pub mixed_batch_tokens: Option<usize>,
    /// `false`: the classic static batch.
    pub continuous_batching: bool,
    /// Tokens in a KV block: 16, 32, 64, 128 or 256.
    pub block_size: usize,
    /// KV element type: F16 or F32.
    pub kv_dtype: DType,
    /// Paged, or contiguous reservation as a baseline.
    pub kv_layout: KvLayout,
    /// Bytes of the KV pool; `None`: measured.
    pub kv_cache_bytes: Option<u64>,
    /// Whether finished prompts stay findable.
    pub prefix_cache: bool,
    /// Requests waiting at most.
    pub max_waiting: usize,
    /// Microseconds after which a waiting request gains one level of priority.
    pub ageing_us: u64,
    /// Microseconds a static batch waits to fill.
    pub static_batch_wait_us: u64,
    /// Ranks that the model is laid out over.
    pub parallel: ParallelMode,
    /// Steps in flight; `None`: one for a single stage, else measured at start.
    pub micro_batches: Option<usize>,
    /// Plan each step while the one before runs, where the ranks can.
    pub plan_ahead: bool,
    /// Run `check_integrity` after every step (tests) rather than only at idle.
    pub check_every_step: bool,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_batch_size: None,
            max_seq_len: None,
            max_batch_tokens: None,
            prefill_chunk_size: 512,
            mixed_batch_tokens: None,
            continuous_batching: true,
            block_size: 16,
            kv_dtype: DType::F16,
            kv_layout: KvLayout::Paged,
            kv_cache_bytes: None,
            prefix_cache: true,
            max_waiting: 1024,
            ageing_us: 5_000_000,
            static_batch_wait_us: 50_000,
            parallel: ParallelMode::SOLO,
            micro_batches: None,
            plan_ahead: true,
            check_every_step: false,
        }
    }
}
