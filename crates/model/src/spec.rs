//! Shapes and limits of a decoder, as every other room needs them. Knows no weights.

use crate::ModelError;
use crate::shard::head_shards;

/// The kind of KV state a layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the fields are what the variant names
pub enum KvKind {
    /// Every position.
    Full,
    /// The last `window` positions: position `p` reads `(p - window, p]`.
    SlidingWindow {
        /// Positions kept, the newest included.
        window: usize,
    },
}

/// Layers that share one block table. All groups of a model hold at most `layers_per_group` layers and
/// share one pool; layer `layers[j]` stores into pool tensor `j`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGroupSpec {
    /// What its layers keep.
    pub kind: KvKind,
    /// Layer indices, ascending.
    pub layers: Vec<usize>,
}

/// Shapes and limits of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// As the checkpoint spells it: `LlamaForCausalLM`, or GGUF's `llama`.
    pub architecture: String,
    /// Decoder layers.
    pub num_layers: usize,
    /// `D`.
    pub hidden_size: usize,
    /// `H`.
    pub num_heads: usize,
    /// `K`.
    pub num_kv_heads: usize,
    /// `E`.
    pub head_dim: usize,
    /// Features inside the MLP.
    pub intermediate_size: usize,
    /// `V`: rows of the embedding, padding rows included.
    pub vocab_size: usize,
    /// Positions that the model was made for.
    pub max_seq_len: usize,
    /// Whether the head is the embedding.
    pub tied_embeddings: bool,
    /// Cache groups; every layer is in exactly one.
    pub kv_groups: Vec<KvGroupSpec>,
    /// Elements of all weights.
    pub num_parameters: u64,
    /// Bytes of all weights as stored.
    pub stored_bytes: u64,
}

impl ModelSpec {
    /// Layers of the largest cache group: tensors of the KV pool.
    #[must_use]
    pub fn layers_per_group(&self) -> usize {
        self.kv_groups.iter().map(|g| g.layers.len()).max().unwrap_or(0)
    }

    /// KV heads that each of a stage's `world_size` ranks holds, in rank order: its share, or a copy of one where
    /// there are more ranks than heads.
    ///
    /// # Errors
    /// [`ModelError::Parallel`] when the heads cannot be cut so.
    pub fn kv_heads_by_rank(&self, world_size: usize) -> Result<Vec<usize>, ModelError> {
        match head_shards(self.num_heads, self.num_kv_heads, world_size) {
            Ok(ranks) => Ok(ranks.into_iter().map(|rank| rank.kv_heads.len()).collect()),
            Err(error) => {
                Err(ModelError::Parallel { key: "tensor_parallel", value: world_size, detail: error.to_string() })
            }
        }
    }

    /// KV bytes of one sequence of `tokens` tokens in element size `elem_bytes`, window layers counted
    /// up to their window: `2 × layers × kv_heads × head_dim × tokens × bytes`.
    #[must_use]
    pub fn kv_bytes(&self, tokens: usize, elem_bytes: usize) -> u64 {
        let per_layer_token = 2 * self.num_kv_heads * self.head_dim * elem_bytes;
        self.kv_groups
            .iter()
            .map(|g| {
                let kept = match g.kind {
                    KvKind::Full => tokens,
                    KvKind::SlidingWindow { window } => tokens.min(window),
                };
                (g.layers.len() * kept) as u64 * per_layer_token as u64
            })
            .sum()
    }
}
