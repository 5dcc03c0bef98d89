//! `UnifiedMemoryAllocator`: every device byte by purpose, measured rather than guessed. Decides how
//! many KV blocks there are and how long a sequence may be; allocates nothing itself.

use crate::EngineError;
use pagemill_model::ParallelMode;

/// Share of the available memory that is left alone: a tenth.
const RESERVE_DIVISOR: u64 = 10;

/// Share of what is then left that a measured KV pool takes at most on a device whose memory is also
/// everybody else's: a half.
const SHARED_MEMORY_DIVISOR: u64 = 2;

/// What the memory is used for, in bytes over all ranks; printed once at start (see its `Display`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Device memory this process could take before loading.
    pub available_bytes: u64,
    /// Weights as laid out on the device.
    pub weight_bytes: u64,
    /// Workspace after one largest step (or its estimate, in a plan made without running one).
    pub workspace_bytes: u64,
    /// Left alone, for the rest of the process and the machine.
    pub reserve_bytes: u64,
    /// KV pool.
    pub kv_pool_bytes: u64,
    /// Bytes of one block over all layers.
    pub block_bytes: u64,
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Tokens in a block.
    pub block_size: usize,
    /// Sequences of `max_seq_len` tokens that fit at once.
    pub full_length_sequences: usize,
    /// Tokens in a sequence at most.
    pub max_seq_len: usize,
    /// The model's own limit; larger than `max_seq_len` when memory or the configuration is smaller.
    pub model_seq_len: usize,
    /// Sequences in one step at most.
    pub max_batch_size: usize,
    /// Tokens in one step at most.
    pub max_batch_tokens: usize,
    /// The factors of the KV formula.
    pub kv: KvFactors,
    /// The ranks over which all of these are summed.
    pub parallel: ParallelMode,
}

/// `KV = 2 × layers × kv_heads × head_dim × tokens × bytes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvFactors {
    /// Decoder layers.
    pub layers: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Bytes of an element.
    pub elem_bytes: usize,
    /// KV bytes of one sequence of `max_seq_len` tokens, window layers counted up to their window.
    pub sequence_bytes: u64,
}

impl std::fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let KvFactors { layers, kv_heads, head_dim, elem_bytes, sequence_bytes } = self.kv;
        writeln!(f, "memory available  {:>12}", Bytes(self.available_bytes))?;
        writeln!(f, "  weights         {:>12}", Bytes(self.weight_bytes))?;
        writeln!(
            f,
            "  workspace       {:>12}  one step of {} tokens",
            Bytes(self.workspace_bytes),
            self.max_batch_tokens
        )?;
        writeln!(f, "  reserve         {:>12}", Bytes(self.reserve_bytes))?;
        writeln!(
            f,
            "  KV pool         {:>12}  {} blocks of {} tokens, {} each",
            Bytes(self.kv_pool_bytes),
            self.num_blocks,
            self.block_size,
            Bytes(self.block_bytes)
        )?;
        writeln!(
            f,
            "KV of a sequence  {:>12}  2 × {layers} layers × {kv_heads} heads × {head_dim} × {} tokens × {elem_bytes} bytes{}",
            Bytes(sequence_bytes),
            self.max_seq_len,
            if sequence_bytes < self.full_attention_bytes() { ", less behind sliding windows" } else { "" }
        )?;
        if self.parallel != ParallelMode::SOLO {
            writeln!(
                f,
                "ranks             {:>12}  {}; bytes are sums over all",
                self.parallel.num_ranks(),
                self.parallel
            )?;
        }
        write!(
            f,
            "fits {} sequences of {} tokens; steps of at most {} sequences",
            self.full_length_sequences, self.max_seq_len, self.max_batch_size
        )?;
        if self.max_seq_len < self.model_seq_len {
            write!(f, " (the model itself allows {} tokens)", self.model_seq_len)?;
        }
        Ok(())
    }
}

impl MemoryPlan {
    fn full_attention_bytes(&self) -> u64 {
        let KvFactors { layers, kv_heads, head_dim, elem_bytes, .. } = self.kv;
        2 * (layers * kv_heads * head_dim * elem_bytes) as u64 * self.max_seq_len as u64
    }
}

/// Bytes in the largest binary unit that keeps one digit before the point.
struct Bytes(u64);

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let text = if unit == 0 { format!("{value} B") } else { format!("{value:.1} {}", UNITS[unit]) };
        f.pad(&text)
    }
}

const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];

/// Owns the sums. See [`MemoryPlan`].
pub struct UnifiedMemoryAllocator {
    plan: MemoryPlan,
}

impl UnifiedMemoryAllocator {
    /// Keeps a plan that is in force.
    #[must_use]
    pub fn new(plan: MemoryPlan) -> Self {
        Self { plan }
    }

    /// The plan in force.
    #[must_use]
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }
}

/// What is known when the KV pool is sized.
pub(crate) struct KvDemand<'a> {
    /// Filled in but for the KV pool's size: bytes available, of weights and of workspace, `block_bytes`,
    /// limits. `max_seq_len` is the wish.
    pub(crate) measured: MemoryPlan,
    /// Blocks that a sequence of so many tokens holds at most, when no sequence is longer.
    pub(crate) blocks_needed: &'a dyn Fn(usize) -> usize,
    /// Whether the device's memory is also everybody else's.
    pub(crate) shares_memory: bool,
    /// Blocks behind the pool that only padding uses.
    pub(crate) padding_blocks: usize,
    /// `kv_cache_bytes`, when configured.
    pub(crate) configured_bytes: Option<u64>,
    /// Whether the user gave `max_seq_len`, so that it may not shrink.
    pub(crate) fixed_seq_len: bool,
}

/// Sizes the KV pool. With `left = available − weights − workspace − reserve` and a reserve of a tenth
/// of what was available, the pool is the smallest of what `max_batch_size` sequences of `max_seq_len`
/// tokens can use and half of `left` (all of it, on a device with memory of its own); or exactly what was configured, if that can be had.
///
/// # Errors
/// [`EngineError::Memory`] when not even one sequence fits; or, if `max_seq_len` was not the user's own
/// wish, when not even one block for each group does: otherwise it shrinks to what fits.
pub(crate) fn size_kv_pool(demand: &KvDemand<'_>) -> Result<MemoryPlan, EngineError> {
    let mut plan = demand.measured;
    plan.reserve_bytes = plan.available_bytes / RESERVE_DIVISOR;
    let unused = plan.available_bytes.saturating_sub(plan.weight_bytes).saturating_sub(plan.workspace_bytes);
    let padding_bytes = demand.padding_blocks as u64 * plan.block_bytes;
    let bytes = match demand.configured_bytes {
        Some(bytes) if bytes.saturating_add(padding_bytes) > unused => {
            return Err(EngineError::Memory(format!(
                "kv_cache_bytes asks for {}, but of {} available, weights ({}) and workspace ({}) leave {}",
                Bytes(bytes),
                Bytes(plan.available_bytes),
                Bytes(plan.weight_bytes),
                Bytes(plan.workspace_bytes),
                Bytes(unused)
            )));
        }
        Some(bytes) => bytes,
        None => {
            let left = unused.saturating_sub(plan.reserve_bytes).saturating_sub(padding_bytes);
            let usable = (demand.blocks_needed)(plan.max_seq_len).saturating_mul(plan.max_batch_size);
            let ours = if demand.shares_memory { left / SHARED_MEMORY_DIVISOR } else { left };
            ours.min(plan.block_bytes.saturating_mul(usable as u64))
        }
    };
    // Block ids are 32 bits wide and the last one stands for "none".
    let most = u64::from(u32::MAX) / plan.block_size.max(1) as u64 - 1;
    plan.num_blocks = usize::try_from((bytes / plan.block_bytes).min(most)).unwrap_or(usize::MAX);
    plan.kv_pool_bytes = plan.num_blocks as u64 * plan.block_bytes;
    fit_seq_len(&mut plan, demand)?;
    plan.full_length_sequences = plan.num_blocks / (demand.blocks_needed)(plan.max_seq_len).max(1);
    Ok(plan)
}

/// Keeps `max_seq_len`, or shrinks it to the longest sequence that the pool holds.
fn fit_seq_len(plan: &mut MemoryPlan, demand: &KvDemand<'_>) -> Result<(), EngineError> {
    let fits = |tokens: usize| (demand.blocks_needed)(tokens) <= plan.num_blocks;
    if fits(plan.max_seq_len) {
        return Ok(());
    }
    if demand.fixed_seq_len || !fits(1) {
        let tokens = if demand.fixed_seq_len { plan.max_seq_len } else { 1 };
        return Err(EngineError::Memory(format!(
            "a sequence of {tokens} tokens needs {} KV blocks ({}), but the pool holds {} ({}); raise kv_cache_bytes or \
             lower max_seq_len",
            (demand.blocks_needed)(tokens),
            Bytes((demand.blocks_needed)(tokens) as u64 * plan.block_bytes),
            plan.num_blocks,
            Bytes(plan.kv_pool_bytes)
        )));
    }
    // [1, lo] fits, [hi, ..) does not.
    let (mut lo, mut hi) = (1, plan.max_seq_len);
    while hi - lo > 1 {
        let mid = lo + (hi - lo) / 2;
        if fits(mid) {
            lo = mid;
        } else {
            hi = mid;
        }
    }
    plan.max_seq_len = lo;
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn measured(available: u64) -> MemoryPlan {
        MemoryPlan {
            available_bytes: available,
            weight_bytes: 100 * MIB,
            workspace_bytes: 20 * MIB,
            block_bytes: MIB,
            block_size: 16,
            max_seq_len: 1024,
            model_seq_len: 1024,
            max_batch_size: 4,
            max_batch_tokens: 516,
            kv: KvFactors { layers: 32, kv_heads: 8, head_dim: 64, elem_bytes: 2, sequence_bytes: 64 * MIB },
            ..MemoryPlan::default()
        }
    }

    fn demand(available: u64) -> KvDemand<'static> {
        KvDemand {
            measured: measured(available),
            blocks_needed: &|tokens: usize| tokens.div_ceil(16),
            shares_memory: true,
            padding_blocks: 0,
            configured_bytes: None,
            fixed_seq_len: false,
        }
    }

    #[test]
    fn takes_no_more_than_the_batch_can_use() {
        let plan = size_kv_pool(&demand(10_000 * MIB)).unwrap();
        assert_eq!((plan.num_blocks, plan.full_length_sequences), (256, 4));
        assert_eq!(plan.reserve_bytes, 1000 * MIB);
    }

    #[test]
    fn takes_half_of_what_is_left() {
        let plan = size_kv_pool(&demand(400 * MIB)).unwrap();
        // 400 - 100 - 20 - 40 = 240
        assert_eq!((plan.num_blocks, plan.full_length_sequences, plan.max_seq_len), (120, 1, 1024));
        assert_eq!(plan.kv_pool_bytes, 120 * MIB);
    }

    #[test]
    fn takes_all_that_is_left_of_memory_of_its_own() {
        let plan = size_kv_pool(&KvDemand { shares_memory: false, ..demand(400 * MIB) }).unwrap();
        assert_eq!((plan.num_blocks, plan.kv_pool_bytes), (240, 240 * MIB));
    }

    #[test]
    fn shrinks_a_default_length_and_refuses_a_wished_one() {
        let small = demand(200 * MIB); // 200 - 120 - 20 = 60: 30 blocks
        let plan = size_kv_pool(&small).unwrap();
        assert_eq!((plan.num_blocks, plan.max_seq_len, plan.full_length_sequences), (30, 480, 1));
        assert!(plan.to_string().contains("the model itself allows 1024 tokens"), "{plan}");
        let error = size_kv_pool(&KvDemand { fixed_seq_len: true, ..small }).unwrap_err().to_string();
        assert!(error.contains("1024 tokens needs 64 KV blocks"), "{error}");
        let error = size_kv_pool(&demand(120 * MIB)).unwrap_err().to_string();
        assert!(error.contains("pool holds 0"), "{error}");
    }

    #[test]
    fn takes_what_was_configured_or_says_why_not() {
        let plan = size_kv_pool(&KvDemand { configured_bytes: Some(7 * MIB + 3), ..demand(400 * MIB) }).unwrap();
        assert_eq!((plan.num_blocks, plan.max_seq_len), (7, 112));
        let too_much = KvDemand { configured_bytes: Some(300 * MIB), ..demand(400 * MIB) };
        let error = size_kv_pool(&too_much).unwrap_err().to_string();
        assert!(error.contains("kv_cache_bytes asks for 300.0 MiB") && error.contains("leave 280.0 MiB"), "{error}");
        assert!(size_kv_pool(&KvDemand { configured_bytes: Some(u64::MAX), ..demand(400 * MIB) }).is_err());
    }

    #[test]
    fn the_block_shows_every_number() {
        let text = size_kv_pool(&demand(400 * MIB)).unwrap().to_string();
        for part in ["400.0 MiB", "100.0 MiB", "120 blocks of 16 tokens", "2 × 32 layers × 8 heads × 64 × 1024 tokens"]
        {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }
}
