//! Model: the decoder and its layers, one small file per architecture, weight loading.
//!
//! This room turns a checkpoint into a [`CausalLm`] and runs its layers through the ops contract. It
//! never asks which backend it runs on, never sees a request, and never sees text.

#![forbid(unsafe_code)]

mod arch;
mod config;
mod decoder;
mod error;
mod holdings;
mod kv_groups;
mod layers;
mod made_up;
mod names;
mod rope;
mod shard;
mod spec;
mod stage;
mod weights;

pub use error::ModelError;
pub use spec::{KvGroupSpec, KvKind, ModelSpec};
pub use stage::{ParallelMode, Stage};

use arch::Entry;
use config::{Dialect, RawConfig};
use pagemill_backend::{Backend, Collective, DType, DeviceBatch, KvPool, Tensor};
pub use pagemill_formats::Checkpoint;
use std::sync::Arc;

/// What a forward runs on: the rank's device and its peers.
#[derive(Clone)]
pub struct RankContext {
    /// The rank's device.
    pub backend: Arc<dyn Backend>,
    /// The rank's peers.
    pub collective: Arc<dyn Collective>,
}

/// The tokens of one step.
pub struct ModelInput<'a> {
    /// `[T]` token ids, each `< vocab_size`.
    pub token_ids: &'a [u32],
    /// Positions, slots and block tables.
    pub batch: &'a DeviceBatch,
    /// Whose hidden states the model's last layer gives.
    pub output: OutputRows<'a>,
}

/// Tokens of a step whose hidden states are read once all layers have run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputRows<'a> {
    /// All: `R = T`.
    All,
    /// The last token of each of these sequences of the batch, in this order: `R` of them, maybe none. The model's
    /// last layer writes K and V of all tokens and computes the rest for these alone.
    LastOf(&'a [u32]),
}

/// A loaded decoder (this rank's share of it).
pub trait CausalLm: Send + Sync {
    /// Shapes and limits.
    fn spec(&self) -> &ModelSpec;

    /// The layers that this rank's stage holds.
    fn stage(&self) -> &Stage;

    /// On the first stage: embeds the tokens and runs the stage's layers. Writes K and V of the step's
    /// tokens to `kv` and returns the hidden states after the stage's last layer (before the final norm):
    /// `[T, D]`, on the last stage `[R, D]` of the input's `output`.
    fn forward(&self, input: &ModelInput<'_>, kv: &mut KvPool) -> Result<Tensor, ModelError>;

    /// On a later stage: the same from the hidden states `[T, D]` of the stage before.
    fn forward_from(&self, hidden: Tensor, input: &ModelInput<'_>, kv: &mut KvPool) -> Result<Tensor, ModelError>;

    /// On the last stage: logits in f32 `[R, V]` of the rows `rows` of `hidden`: final norm, head, caps
    /// and scales. The same on every rank of the stage.
    fn logits(&self, hidden: &Tensor, rows: &[u32]) -> Result<Tensor, ModelError>;

    /// Bytes of weights on this rank's device.
    fn weight_bytes(&self) -> u64;
}

/// Reads shapes and limits without loading weights; refuses what [`load`] would refuse by
/// configuration (unknown architecture, rope type, activation, a field that changes the maths).
///
/// # Errors
/// [`ModelError`] naming the field.
pub fn read_spec(checkpoint: &Checkpoint) -> Result<ModelSpec, ModelError> {
    let (entry, raw) = identify(checkpoint)?;
    (entry.read_spec)(&raw, checkpoint.weights())
}

/// Lays the model out over the ranks of `mode`: its stages, in order, balanced by the bytes that a step
/// reads of their weights. Reads no weight.
///
/// # Errors
/// [`ModelError::Parallel`] when heads, layers or quantisation blocks do not divide so; and as
/// [`read_spec`].
pub fn plan_stages(checkpoint: &Checkpoint, mode: ParallelMode) -> Result<Vec<Stage>, ModelError> {
    plan_stages_by(checkpoint, mode, &|_| 1)
}

/// As [`plan_stages`], balanced by time: `byte_cost` says what a step pays for a byte of a weight of each type,
/// in any unit.
///
/// # Errors
/// As [`plan_stages`].
pub fn plan_stages_by(
    checkpoint: &Checkpoint,
    mode: ParallelMode,
    byte_cost: &dyn Fn(DType) -> u64,
) -> Result<Vec<Stage>, ModelError> {
    let (entry, raw) = identify(checkpoint)?;
    (entry.plan_stages)(&raw, checkpoint.weights(), mode, byte_cost)
}

/// The types of a checkpoint's matrices, each once.
#[must_use]
pub fn matrix_types(checkpoint: &Checkpoint) -> Vec<DType> {
    let matrices = checkpoint.weights().tensors().iter().filter(|info| info.num_rows() > 1);
    let mut types: Vec<DType> = Vec::new();
    for dtype in matrices.filter_map(|info| info.tensor_type()).map(weights::dtype_of) {
        if !types.contains(&dtype) {
            types.push(dtype);
        }
    }
    types
}

/// Loads this rank's share of the weights of a model of one stage.
///
/// # Errors
/// [`ModelError`] naming the tensor, the field or the file.
pub fn load(
    checkpoint: &Checkpoint,
    cx: &RankContext,
    progress: &dyn Fn(LoadProgress),
) -> Result<Box<dyn CausalLm>, ModelError> {
    let (entry, raw) = identify(checkpoint)?;
    let spec = (entry.read_spec)(&raw, checkpoint.weights())?;
    (entry.load)(&raw, checkpoint.weights(), cx, &Stage::whole(spec.num_layers), progress)
}

/// Loads this rank's share of the weights of `stage`, one of [`plan_stages`]'. Nothing that other stages
/// hold is read.
///
/// # Errors
/// As [`load`].
pub fn load_stage(
    checkpoint: &Checkpoint,
    cx: &RankContext,
    stage: &Stage,
    progress: &dyn Fn(LoadProgress),
) -> Result<Box<dyn CausalLm>, ModelError> {
    let (entry, raw) = identify(checkpoint)?;
    (entry.load)(&raw, checkpoint.weights(), cx, stage, progress)
}

/// The architecture's entry in the table, and the configuration that it will read.
fn identify(checkpoint: &Checkpoint) -> Result<(&'static Entry, RawConfig), ModelError> {
    let weights = checkpoint.weights();
    match checkpoint {
        Checkpoint::Gguf(file) => {
            let name = file.architecture()?;
            let entry = arch::find(Dialect::Gguf, name)?;
            Ok((entry, RawConfig::from_gguf(name.into(), file.metadata(), weights)?))
        }
        Checkpoint::HuggingFace(folder) => {
            let config = folder.config();
            let name = config.architectures.first().map_or(config.model_type.as_str(), String::as_str);
            let entry = arch::find(Dialect::HuggingFace, name)?;
            Ok((entry, RawConfig::from_hf(name.into(), config, weights.tensors().len())))
        }
        Checkpoint::ConfigOnly(only) => {
            let config = only.config();
            let name = config.architectures.first().map_or(config.model_type.as_str(), String::as_str);
            let entry = arch::find(Dialect::HuggingFace, name)?;
            Ok((entry, RawConfig::from_hf(name.into(), config, made_up::MAX_LAYERS)))
        }
    }
}

/// How far loading is.
#[derive(Clone, Copy, Debug)]
pub struct LoadProgress {
    /// Bytes read so far.
    pub bytes_done: u64,
    /// Bytes in all.
    pub bytes_total: u64,
}
