//! The sizes of a decoder, as far as bytes and floating-point operations depend on them. Knows no weights.
//!
//! Shape letters: `D` hidden size, `H` query heads, `K` KV heads, `E` head size, `I` MLP features, `V` vocabulary.

use crate::CapacityError;
use serde::Serialize;

/// Features at most; larger sizes are a fault of the file. With these bounds, counts of weights fit 64 bits.
const MAX_SIZE: usize = 1 << 20;
/// Layers at most, and experts.
const MAX_COUNT: usize = 1 << 10;
/// Heads at most, and elements of one.
const MAX_HEADS: usize = 1 << 14;
/// Rows of the vocabulary at most.
const MAX_VOCABULARY: usize = 1 << 22;
/// Positions at most.
const MAX_POSITIONS: usize = 1 << 30;

/// What a layer keeps of the past.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerKv {
    /// Every position.
    Full,
    /// The last positions, the newest included.
    Window(usize),
}

/// The feed-forward part of every layer (gate, up and down).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mlp {
    /// One gated MLP.
    Dense {
        /// `I`.
        intermediate_size: usize,
    },
    /// A router and experts.
    Experts {
        /// Experts in a layer.
        num_experts: usize,
        /// Experts that a token visits.
        experts_per_token: usize,
        /// `I` of an expert.
        intermediate_size: usize,
        /// `I` of the expert that every token visits; 0: none.
        shared_intermediate_size: usize,
    },
}

/// A decoder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DecoderShape {
    /// For messages.
    pub name: String,
    /// `D`.
    pub hidden_size: usize,
    /// `H`.
    pub num_heads: usize,
    /// `K`.
    pub num_kv_heads: usize,
    /// `E`.
    pub head_dim: usize,
    /// Feed-forward part.
    pub mlp: Mlp,
    /// `V`.
    pub vocab_size: usize,
    /// Positions that the model was made for.
    pub max_seq_len: usize,
    /// Whether the head is the embedding.
    pub tied_embeddings: bool,
    /// What each layer keeps.
    pub layers: Vec<LayerKv>,
    /// Norm weights and biases of a layer.
    pub small_parameters_per_layer: u64,
}

impl DecoderShape {
    /// Refuses sizes that are 0 or absurd, and KV heads that do not divide the query heads.
    ///
    /// # Errors
    /// [`CapacityError::Shape`] or [`CapacityError::HeadGroups`], naming the field.
    pub fn check(&self) -> Result<(), CapacityError> {
        let mut sizes = vec![
            ("hidden_size", self.hidden_size, MAX_SIZE),
            ("num_attention_heads", self.num_heads, MAX_HEADS),
            ("num_key_value_heads", self.num_kv_heads, self.num_heads),
            ("head_dim", self.head_dim, MAX_HEADS),
            ("vocab_size", self.vocab_size, MAX_VOCABULARY),
            ("max_position_embeddings", self.max_seq_len, MAX_POSITIONS),
            ("num_hidden_layers", self.layers.len(), MAX_COUNT),
        ];
        match self.mlp {
            Mlp::Dense { intermediate_size } => sizes.push(("intermediate_size", intermediate_size, MAX_SIZE)),
            Mlp::Experts { num_experts, experts_per_token, intermediate_size, shared_intermediate_size } => {
                sizes.push(("num_experts", num_experts, MAX_COUNT));
                sizes.push(("num_experts_per_tok", experts_per_token, num_experts));
                sizes.push(("moe_intermediate_size", intermediate_size, MAX_SIZE));
                sizes.push(("shared_expert_intermediate_size", shared_intermediate_size.max(1), MAX_SIZE));
            }
        }
        for layer in &self.layers {
            if let LayerKv::Window(window) = *layer {
                sizes.push(("sliding_window", window, MAX_POSITIONS));
            }
        }
        match sizes.into_iter().find(|&(_, value, most)| value == 0 || value > most) {
            Some((field, value, most)) => Err(CapacityError::Shape { model: self.name.clone(), field, value, most }),
            None if !self.num_heads.is_multiple_of(self.num_kv_heads) => Err(CapacityError::HeadGroups {
                model: self.name.clone(),
                heads: self.num_heads,
                kv_heads: self.num_kv_heads,
            }),
            None => Ok(()),
        }
    }

    /// Weights of all attention projections of a layer: `D × (2 H + 2 K) × E`.
    #[must_use]
    pub fn attention_parameters(&self) -> u64 {
        (self.hidden_size * self.head_dim) as u64 * (2 * self.num_heads + 2 * self.num_kv_heads) as u64
    }

    /// Weights of the feed-forward part of a layer, router included.
    #[must_use]
    pub fn mlp_parameters(&self) -> u64 {
        let gated = |features: usize| 3 * self.hidden_size as u64 * features as u64;
        match self.mlp {
            Mlp::Dense { intermediate_size } => gated(intermediate_size),
            Mlp::Experts { num_experts, intermediate_size, shared_intermediate_size, .. } => {
                num_experts as u64 * gated(intermediate_size)
                    + gated(shared_intermediate_size)
                    + self.router_parameters()
            }
        }
    }

    /// Weights of a layer's router.
    #[must_use]
    pub fn router_parameters(&self) -> u64 {
        match self.mlp {
            Mlp::Dense { .. } => 0,
            Mlp::Experts { num_experts, .. } => (self.hidden_size * num_experts) as u64,
        }
    }

    /// Weights of the embedding, and of the head: `V × D`.
    #[must_use]
    pub fn vocabulary_parameters(&self) -> u64 {
        self.vocab_size as u64 * self.hidden_size as u64
    }

    /// All weights.
    #[must_use]
    pub fn num_parameters(&self) -> u64 {
        let layer = self.attention_parameters() + self.mlp_parameters() + self.small_parameters_per_layer;
        let vocabulary = if self.tied_embeddings { 1 } else { 2 } * self.vocabulary_parameters();
        self.layers.len() as u64 * layer + vocabulary + self.hidden_size as u64
    }

    /// KV heads of the first of `tp` ranks, which has most: its share, or a copy of one where there are more ranks than
    /// heads.
    #[must_use]
    pub fn kv_heads_per_rank(&self, tp: usize) -> usize {
        self.num_kv_heads.div_ceil(tp.max(1))
    }

    /// Query heads of the first of `tp` ranks, which has most: those that read its KV heads, or a share of them where
    /// there are more ranks than KV heads.
    #[must_use]
    pub fn heads_per_rank(&self, tp: usize) -> usize {
        if tp > self.num_kv_heads {
            return self.num_heads.div_ceil(tp);
        }
        self.kv_heads_per_rank(tp) * (self.num_heads / self.num_kv_heads.max(1))
    }

    /// Rows of the embedding and of the head that each of `tp` ranks holds: its share where they divide evenly, else all,
    /// as the engine does.
    #[must_use]
    pub fn vocabulary_rows_per_rank(&self, tp: usize) -> usize {
        if self.vocab_size.is_multiple_of(tp) { self.vocab_size / tp } else { self.vocab_size }
    }

    /// Whether each of `tp` ranks has only its share of the logits, so that they are gathered.
    #[must_use]
    pub fn gathers_logits(&self, tp: usize) -> bool {
        self.vocabulary_rows_per_rank(tp) < self.vocab_size
    }

    /// Numbers of ranks that heads can be cut over, ascending: as many as there are KV heads at most, or equally many
    /// ranks for each KV head, with equally many of its query heads each.
    #[must_use]
    pub fn possible_tensor_parallel(&self) -> Vec<usize> {
        let copied = |tp: usize| self.num_heads.is_multiple_of(tp) && tp.is_multiple_of(self.num_kv_heads);
        (1..=self.num_heads).filter(|&tp| tp <= self.num_kv_heads || copied(tp)).collect()
    }
}
