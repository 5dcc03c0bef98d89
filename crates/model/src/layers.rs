//! The blocks that architectures are built of. Each owns its weights, its cut over the ranks and its
//! device calls; an architecture file only says which blocks follow each other.
//!
//! Shape letters: `T` tokens in the step, `D` hidden size, `H` query heads, `K` KV heads, `E` head size
//! (`H` and `K` of this rank), `F` features inside the MLP (of this rank), `V` vocabulary, `R` rows
//! whose logits are wanted.

mod attention;
mod linear;
mod mlp;
mod norm;
mod residual;
mod vocabulary;

pub(crate) use attention::{PagedAttention, Rope};
pub(crate) use linear::{QkvLinear, RowLinear};
pub(crate) use mlp::GatedMlp;
pub(crate) use norm::{HeadNorm, RmsNorm};
pub(crate) use residual::ResidualStream;
pub(crate) use vocabulary::Vocabulary;

use crate::decoder::DecoderSpec;
use crate::kv_groups::KvPlace;
use crate::weights::{Module, WeightReader};
use crate::{KvKind, RankContext};
use pagemill_backend::{Backend, DeviceBatch, KvPool};

/// What a layer's forward runs on.
pub(crate) struct StepContext<'a> {
    /// Device and peers.
    pub rank: &'a RankContext,
    /// Positions, slots and block tables of the step.
    pub batch: &'a DeviceBatch,
    /// Where K and V go.
    pub kv: &'a mut KvPool,
}

impl StepContext<'_> {
    /// The device.
    pub(crate) fn backend(&self) -> &dyn Backend {
        self.rank.backend.as_ref()
    }
}

/// What a layer is loaded from.
pub(crate) struct LayerReader<'a> {
    /// The checkpoint.
    pub weights: &'a WeightReader<'a>,
    /// Shapes of the model.
    pub spec: &'a DecoderSpec,
    /// Which layer.
    pub layer_idx: usize,
    /// Where its K and V go.
    pub place: KvPlace,
}

impl LayerReader<'_> {
    /// A module of this layer by transformers' name.
    pub(crate) fn module<'m>(&self, name: &'m str) -> Module<'m> {
        Module::InLayer(self.layer_idx, name)
    }

    /// What this layer keeps.
    pub(crate) fn kind(&self) -> KvKind {
        self.spec.layer_kinds[self.layer_idx]
    }
}
