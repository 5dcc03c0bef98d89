//! The gated MLP: `down(act(gate(x)) * up(x))`, cut over ranks by its inner features.

use super::linear::{PartialSum, Projection, RowLinear};
use super::{LayerReader, StepContext};
use crate::ModelError;
use crate::weights::Bias;
use pagemill_backend::{Activation, LinearInput, MlpWeights};

/// `mlp.gate_proj`, `mlp.up_proj`, `mlp.down_proj`.
pub(crate) struct GatedMlp {
    gate: Projection,
    up: Projection,
    down: RowLinear,
    activation: Activation,
}

impl GatedMlp {
    /// Reads this rank's features; the cut lies on block borders of `down`.
    pub(crate) fn load(layer: &LayerReader<'_>, activation: Activation, bias: Bias) -> Result<Self, ModelError> {
        let (hidden_size, intermediate_size) = (layer.spec.hidden_size, layer.spec.intermediate_size);
        let down = layer.module("mlp.down_proj");
        let features = match layer.weights.shard() {
            shard if shard.world_size == 1 => 0..intermediate_size,
            shard => shard
                .features(intermediate_size, layer.weights.block_elems(down)?)
                .map_err(|error| layer.weights.uncut(down, &error))?,
        };
        let load = |name: &str| {
            let shape = [intermediate_size, hidden_size];
            Projection::load(layer.weights, layer.module(name), shape, features.clone(), bias)
        };
        Ok(Self {
            gate: load("mlp.gate_proj")?,
            up: load("mlp.up_proj")?,
            down: RowLinear::load(layer, down, intermediate_size, features.clone(), bias)?,
            activation,
        })
    }

    /// `x` `[T, D]` to this rank's part of `[T, D]`.
    pub(crate) fn forward(&self, cx: &StepContext<'_>, x: LinearInput<'_>) -> Result<PartialSum, ModelError> {
        let mlp = MlpWeights {
            gate: self.gate.weights(),
            up: self.up.weights(),
            down: self.down.weights(),
            act: self.activation,
        };
        Ok(PartialSum(cx.backend().gated_mlp(x, &mlp)?))
    }
}
