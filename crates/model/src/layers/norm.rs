//! RMS norms: over a token's hidden state, and over each head (Qwen 3, Gemma 3). Each rank keeps the
//! whole weight.

use super::LayerReader;
use crate::ModelError;
use crate::decoder::DecoderSpec;
use crate::weights::{Module, WeightReader};
use pagemill_backend::{LinearInput, Norm, Tensor};

/// `x / rms(x) * weight` (arXiv 1910.07467).
pub(crate) struct RmsNorm {
    weight: Tensor,
    eps: f32,
}

impl RmsNorm {
    /// Reads the norm `name` of a layer.
    pub(crate) fn load(layer: &LayerReader<'_>, name: &str) -> Result<Self, ModelError> {
        Self::load_outer(layer.weights, layer.spec, layer.module(name))
    }

    /// Reads a norm over `D`.
    pub(crate) fn load_outer(
        weights: &WeightReader<'_>,
        spec: &DecoderSpec,
        module: Module<'_>,
    ) -> Result<Self, ModelError> {
        Self::load_sized(weights, spec, module, spec.hidden_size)
    }

    fn load_sized(
        weights: &WeightReader<'_>,
        spec: &DecoderSpec,
        module: Module<'_>,
        len: usize,
    ) -> Result<Self, ModelError> {
        Ok(Self { weight: weights.vector(module, len, spec.norm_offset)?, eps: spec.norm_eps })
    }

    /// As the device's ops take it.
    pub(crate) fn params(&self) -> Norm<'_> {
        Norm { weight: &self.weight, eps: self.eps }
    }

    /// The norm of `x` `[rows, D]`, to be made by the product that reads it.
    pub(crate) fn of<'a>(&'a self, x: &'a Tensor) -> LinearInput<'a> {
        LinearInput::Normed { x, norm: self.params() }
    }
}

/// An [`RmsNorm`] over each head by itself.
pub(crate) struct HeadNorm(RmsNorm);

impl HeadNorm {
    /// Reads the norm `name` `[E]` of a layer.
    pub(crate) fn load(layer: &LayerReader<'_>, name: &str) -> Result<Self, ModelError> {
        RmsNorm::load_sized(layer.weights, layer.spec, layer.module(name), layer.spec.head_dim).map(Self)
    }

    /// As the device's ops take it.
    pub(crate) fn params(&self) -> Norm<'_> {
        self.0.params()
    }
}
