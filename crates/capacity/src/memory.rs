//! Bytes of a rank: weights by kind, workspace, reserve, and the sequences that fit in what is left.

use crate::{CapacityError, DecoderShape, Device, KvType, LayerKv, Layout, Mlp, WeightType};
use serde::Serialize;

/// Share of the memory that is left alone: a tenth. On a GPU it also holds the driver's context, the libraries'
/// workspaces and the buffers of collectives.
const RESERVE_DIVISOR: u64 = 10;

/// Share of what is then left that the KV pool takes where the memory is everybody's.
const SHARED_MEMORY_DIVISOR: u64 = 2;

/// The limits of a step that the workspace is sized for, and of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Sequences in a step at most.
    pub max_batch_size: usize,
    /// Tokens in a step at most.
    pub max_batch_tokens: usize,
    /// Tokens in a KV block.
    pub block_size: usize,
}

/// Bytes of one rank of a stage: of the first, which has most where ranks differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankMemory {
    /// Stage.
    pub stage: usize,
    /// First layer.
    pub layers_start: usize,
    /// Behind the last layer.
    pub layers_end: usize,
    /// Its share of the embedding.
    pub embedding_bytes: u64,
    /// Its share of the attention projections.
    pub attention_bytes: u64,
    /// Its share of the feed-forward parts.
    pub mlp_bytes: u64,
    /// Norms and biases, on every rank.
    pub norm_bytes: u64,
    /// Its share of the head; 0 where it is the embedding that is there already.
    pub head_bytes: u64,
    /// Sum of the above.
    pub weight_bytes: u64,
    /// Temporaries of the largest step, estimated.
    pub workspace_bytes: u64,
    /// Left alone.
    pub reserve_bytes: u64,
    /// What the KV pool can take.
    pub kv_pool_bytes: u64,
    /// KV bytes of one more token, while every window is still filling.
    pub kv_bytes_per_token: u64,
}

/// Everything that bytes depend on.
#[derive(Clone, Copy, Debug)]
pub struct MemoryModel<'a> {
    /// The model.
    pub shape: &'a DecoderShape,
    /// Stored how.
    pub weights: &'a WeightType,
    /// KV stored how.
    pub kv: KvType,
    /// Where.
    pub device: &'a Device,
    /// A step's limits.
    pub limits: Limits,
}

impl MemoryModel<'_> {
    /// Bytes of the first rank of `stage`: where KV heads do not divide evenly, the one that has most, and whose pool
    /// has the fewest blocks.
    #[must_use]
    pub fn rank(&self, layout: &Layout, stage: usize) -> RankMemory {
        let (shape, weights, tp) = (self.shape, self.weights, layout.tp as u64);
        let layers = layout.stages[stage].clone();
        let count = layers.len() as u64;
        let (first, last) = (stage == 0, stage + 1 == layout.pp);
        // Where KV heads are copied, or do not divide evenly, this rank has more than its share of the attention.
        let heads = (2 * shape.heads_per_rank(layout.tp) + 2 * shape.kv_heads_per_rank(layout.tp)) as u64;
        let attention = (shape.hidden_size * shape.head_dim) as u64 * heads;
        let router = shape.router_parameters();
        let mlp = (shape.mlp_parameters() - router).div_ceil(tp) + router;
        let vocabulary =
            weights.vocabulary_bytes((shape.vocabulary_rows_per_rank(layout.tp) * shape.hidden_size) as u64);
        let has_copy = shape.tied_embeddings && first && last;
        let mut rank = RankMemory {
            stage,
            layers_start: layers.start,
            layers_end: layers.end,
            embedding_bytes: if first { vocabulary } else { 0 },
            attention_bytes: weights.bytes(count * attention),
            mlp_bytes: weights.bytes(count * mlp),
            norm_bytes: 2
                * (count * shape.small_parameters_per_layer + if last { shape.hidden_size as u64 } else { 0 }),
            head_bytes: if last && !has_copy { vocabulary } else { 0 },
            weight_bytes: 0,
            workspace_bytes: self.workspace(layout, last),
            reserve_bytes: self.device.memory_bytes / RESERVE_DIVISOR,
            kv_pool_bytes: 0,
            kv_bytes_per_token: count.saturating_mul(self.layer_token_bytes(layout.tp)),
        };
        rank.weight_bytes =
            [rank.embedding_bytes, rank.attention_bytes, rank.mlp_bytes, rank.norm_bytes, rank.head_bytes]
                .into_iter()
                .fold(0, u64::saturating_add);
        let taken = rank.weight_bytes.saturating_add(rank.workspace_bytes).saturating_add(rank.reserve_bytes);
        let left = self.device.memory_bytes.saturating_sub(taken);
        rank.kv_pool_bytes = if self.device.shared_memory { left / SHARED_MEMORY_DIVISOR } else { left };
        rank
    }

    /// K and V of one token in one layer of the first rank: `2 × kv_heads × head_dim × bytes`.
    fn layer_token_bytes(&self, tp: usize) -> u64 {
        2 * self.shape.kv_heads_per_rank(tp) as u64 * self.kv.head_bytes(self.shape.head_dim)
    }

    /// KV bytes of one sequence of `tokens` tokens on a rank of `stage`: whole blocks; of a window layer, the blocks
    /// that the window can touch.
    #[must_use]
    pub fn sequence_bytes(&self, layout: &Layout, stage: usize, tokens: usize) -> u64 {
        let block = self.limits.block_size.max(1);
        let blocks = |tokens: usize| tokens.div_ceil(block).saturating_mul(block) as u64;
        let kept = |layer: &LayerKv| match *layer {
            LayerKv::Full => blocks(tokens),
            LayerKv::Window(window) => blocks(tokens).min(blocks(window) + block as u64),
        };
        let positions = self.shape.layers[layout.stages[stage].clone()].iter().map(kept).fold(0, u64::saturating_add);
        positions.saturating_mul(self.layer_token_bytes(layout.tp))
    }

    /// Sequences of `tokens` tokens that fit at once: on the fullest rank.
    #[must_use]
    pub fn sequences(&self, layout: &Layout, tokens: usize) -> u64 {
        let fit = |stage: usize| {
            self.rank(layout, stage).kv_pool_bytes / self.sequence_bytes(layout, stage, tokens.max(1)).max(1)
        };
        (0..layout.pp).map(fit).min().unwrap_or(0)
    }

    /// The longest sequence that fits alone, at most the model's own.
    #[must_use]
    pub fn longest_sequence(&self, layout: &Layout) -> usize {
        // [0, lo] fits, [hi, ..) does not.
        let (mut lo, mut hi) = (0, self.shape.max_seq_len.saturating_add(1));
        while hi - lo > 1 {
            let mid = lo + (hi - lo) / 2;
            if self.sequences(layout, mid) > 0 { lo = mid } else { hi = mid }
        }
        lo
    }

    /// Refuses a layout on which not even one sequence of `tokens` tokens fits.
    ///
    /// # Errors
    /// [`CapacityError::DoesNotFit`]: by how much on the fullest rank, and the fewest ranks that would do.
    pub fn check(&self, layout: &Layout, tokens: usize) -> Result<(), CapacityError> {
        if self.sequences(layout, tokens) > 0 {
            return Ok(());
        }
        let needed = |stage: usize| {
            let rank = self.rank(layout, stage);
            let shared = if self.device.shared_memory { SHARED_MEMORY_DIVISOR } else { 1 };
            let kv_bytes = self.sequence_bytes(layout, stage, tokens);
            let fixed = rank.weight_bytes.saturating_add(rank.workspace_bytes).saturating_add(rank.reserve_bytes);
            (fixed.saturating_add(kv_bytes.saturating_mul(shared)), kv_bytes, rank)
        };
        let fullest = (0..layout.pp).map(needed).max_by_key(|(bytes, ..)| *bytes);
        let Some((needed_bytes, kv_bytes, rank)) = fullest else { return Ok(()) };
        Err(CapacityError::DoesNotFit {
            stage: rank.stage,
            needed_bytes,
            weight_bytes: rank.weight_bytes,
            workspace_bytes: rank.workspace_bytes,
            reserve_bytes: rank.reserve_bytes,
            kv_bytes,
            available_bytes: self.device.memory_bytes,
            tokens,
            smallest: self.smallest(layout.ranks_per_host, tokens),
        })
    }

    /// The fewest ranks `(tp, pp)` on which one sequence of `tokens` tokens fits; of equals, the fewest stages among
    /// those whose ranks of a stage share a host.
    fn smallest(&self, ranks_per_host: usize, tokens: usize) -> Option<(usize, usize)> {
        const RANKS_TRIED: usize = 1024;
        let mut candidates: Vec<(usize, usize)> = self
            .shape
            .possible_tensor_parallel()
            .into_iter()
            .flat_map(|tp| (1..=self.shape.layers.len()).map(move |pp| (tp, pp)))
            .filter(|(tp, pp)| tp * pp <= RANKS_TRIED)
            .collect();
        candidates.sort_by_key(|&(tp, pp)| (tp * pp, tp > ranks_per_host, pp));
        candidates.into_iter().find(|&(tp, pp)| {
            Layout::new(self.shape, self.weights, tp, pp, ranks_per_host)
                .is_ok_and(|layout| self.sequences(&layout, tokens) > 0)
        })
    }

    /// Temporaries of one layer over a step's tokens (residual, normed and projected hidden states; q, k, v and the
    /// attention's output; gate, up and their product), and f32 logits of a step's sequences: the rank's share, and
    /// on the last stage all of them.
    fn workspace(&self, layout: &Layout, last: bool) -> u64 {
        let (shape, tp) = (self.shape, layout.tp as f64);
        let features = match shape.mlp {
            Mlp::Dense { intermediate_size } => intermediate_size,
            Mlp::Experts { experts_per_token, intermediate_size, shared_intermediate_size, .. } => {
                experts_per_token * intermediate_size + shared_intermediate_size
            }
        };
        let heads = 2 * (shape.heads_per_rank(layout.tp) + shape.kv_heads_per_rank(layout.tp)) * shape.head_dim;
        let a_token = 3.0 * shape.hidden_size as f64 + heads as f64 + (3 * features) as f64 / tp;
        let hidden = self.limits.max_batch_tokens as f64 * a_token * self.device.activation_bytes();
        let own = if shape.gathers_logits(layout.tp) { shape.vocabulary_rows_per_rank(layout.tp) } else { 0 };
        let logits = self.limits.max_batch_size as f64 * (own + shape.vocab_size) as f64 * 4.0;
        whole_bytes(hidden + if last { logits } else { 0.0 })
    }
}

/// Rounds up; negative never happens, infinity stays the largest.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // `as` saturates, which is what is wanted here
pub(crate) fn whole_bytes(bytes: f64) -> u64 {
    bytes.ceil() as u64
}

/// Bytes in the largest binary unit that keeps one digit before the point.
pub(crate) struct Bytes(pub(crate) u64);

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let text = if unit == 0 { format!("{value} B") } else { format!("{value:.2} {}", UNITS[unit]) };
        f.pad(&text)
    }
}
