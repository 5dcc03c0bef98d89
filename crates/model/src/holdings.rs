//! What a stage's ranks hold of a checkpoint, and whether a model allows a layout at all: answered from
//! names, shapes and types before a weight is read.

use crate::decoder::DecoderSpec;
use crate::made_up;
use crate::names::Spelling;
use crate::shard::{Shard, ShardError, head_shards};
use crate::stage::{Costs, balance};
use crate::weights::dtype_of;
use crate::{ModelError, ParallelMode, Stage};
use pagemill_backend::DType;
use pagemill_formats::{TensorInfo, Weights};

/// Tokens of a step for which the embedding is counted, a row each: it is looked up, not read whole.
const EMBEDDED_TOKENS: u64 = 64;

/// A stage's part of one model.
#[derive(Clone, Copy)]
pub(crate) struct Holdings<'a> {
    pub(crate) stage: &'a Stage,
    pub(crate) num_layers: usize,
    pub(crate) tied_embeddings: bool,
}

impl Holdings<'_> {
    /// Whether the embedding is held.
    pub(crate) fn has_embedding(&self) -> bool {
        self.stage.is_first() || (self.stage.is_last() && self.tied_embeddings)
    }

    /// Whether other stages hold this tensor, and this one does not.
    pub(crate) fn is_elsewhere(&self, spelling: Spelling, name: &str) -> bool {
        match spelling.layer_of(name) {
            Some(layer) => layer < self.num_layers && !self.stage.layers.contains(&layer),
            None if name == spelling.outer("model.embed_tokens", "weight") => !self.has_embedding(),
            None => {
                !self.stage.is_last()
                    && ["model.norm", "lm_head"].iter().any(|module| name == spelling.outer(module, "weight"))
            }
        }
    }
}

/// The stages of `mode`, balanced by the bytes of weights that a step reads, each at `byte_cost` of its type.
///
/// # Errors
/// [`ModelError::Parallel`] naming the numbers that do not fit together.
pub(crate) fn plan_stages(
    spec: &DecoderSpec,
    weights: &Weights,
    spelling: Spelling,
    mode: ParallelMode,
    byte_cost: &dyn Fn(DType) -> u64,
) -> Result<Vec<Stage>, ModelError> {
    check_tensor_parallel(spec, weights, spelling, mode.tensor_parallel)?;
    let count = mode.pipeline_parallel;
    balance(&costs(spec, weights, spelling, byte_cost), count).ok_or_else(|| ModelError::Parallel {
        key: "pipeline_parallel",
        value: count,
        detail: match count {
            0 => "a pipeline has at least one stage".into(),
            _ => format!("{} layers do not make {count} stages of at least one layer", spec.layer_kinds.len()),
        },
    })
}

fn costs(spec: &DecoderSpec, weights: &Weights, spelling: Spelling, byte_cost: &dyn Fn(DType) -> u64) -> Costs {
    if weights.made_up_type().is_some() {
        return made_up_costs(spec);
    }
    let cost = |info: &TensorInfo| {
        let byte_cost = info.tensor_type().map_or(0, |tensor_type| byte_cost(dtype_of(tensor_type)));
        info.num_bytes().saturating_mul(byte_cost)
    };
    let outer = |module| weights.get(&spelling.outer(module, "weight")).map_or(0, cost);
    let embedding = outer("model.embed_tokens");
    let mut layers = vec![0u64; spec.layer_kinds.len()];
    for info in weights.tensors() {
        if let Some(sum) = spelling.layer_of(info.name()).and_then(|layer| layers.get_mut(layer)) {
            *sum = sum.saturating_add(cost(info));
        }
    }
    Costs {
        layers,
        embedding: embedding / (spec.vocab_size.max(1) as u64) * EMBEDDED_TOKENS,
        head: if spec.tied_embeddings { embedding } else { outer("lm_head") },
    }
}

/// The same where there are no tensors to look at: all matrices are of one type, so that elements will do.
fn made_up_costs(spec: &DecoderSpec) -> Costs {
    Costs {
        layers: vec![made_up::layer_parameters(spec); spec.layer_kinds.len()],
        embedding: spec.hidden_size as u64 * EMBEDDED_TOKENS,
        head: made_up::vocabulary_parameters(spec),
    }
}

/// The cuts that loading makes: heads of every rank, features of the last, all on quantisation borders.
fn check_tensor_parallel(
    spec: &DecoderSpec,
    weights: &Weights,
    spelling: Spelling,
    world_size: usize,
) -> Result<(), ModelError> {
    let refuse = |detail: String| ModelError::Parallel { key: "tensor_parallel", value: world_size, detail };
    if world_size == 0 {
        return Err(refuse("a stage has at least one rank".into()));
    }
    if world_size == 1 {
        return Ok(());
    }
    let heads =
        head_shards(spec.num_heads, spec.num_kv_heads, world_size).map_err(|error| refuse(error.to_string()))?;
    let last = Shard { rank: world_size - 1, world_size };
    for layer in 0..spec.layer_kinds.len() {
        let granule = |module: &str| {
            let name = spelling.in_layer(layer, module, "weight");
            let info = weights.get(&name)?;
            Some((name, dtype_of(info.tensor_type()?).block_elems()))
        };
        if let Some((name, granule)) = granule("self_attn.o_proj")
            && let Some(rank) = heads.iter().position(|own| !(own.heads.end * spec.head_dim).is_multiple_of(granule))
        {
            return Err(refuse(format!(
                "the {} heads of {} features of rank {rank} do not end on the blocks of {granule} of {name}",
                heads[rank].heads.len(),
                spec.head_dim
            )));
        }
        if let Some((name, granule)) = granule("mlp.down_proj") {
            last.features(spec.intermediate_size, granule)
                .map_err(|error: ShardError| refuse(format!("{name}: {error}")))?;
        }
    }
    Ok(())
}
