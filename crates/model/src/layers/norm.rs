//! RMS norms: over a token's hidden state, and over each head (Qwen 3, Gemma 3). Each rank keeps the
//! whole weight.

use super::{LayerReader, StepContext};
use crate::ModelError;
use crate::decoder::DecoderSpec;
use crate::weights::{Module, WeightReader};
use pagemill_backend::{Backend, Tensor};

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

    /// `x` `[rows, D]` to `[rows, D]`.
    pub(crate) fn forward(&self, backend: &dyn Backend, x: &Tensor) -> Result<Tensor, ModelError> {
        let mut out = backend.activation(x.rows(), x.cols())?;
        backend.rms_norm(x, &self.weight, self.eps, &mut out)?;
        Ok(out)
    }

    /// `residual += x`, then the norm of `residual`. All `[T, D]`.
    pub(crate) fn forward_after_add(
        &self,
        backend: &dyn Backend,
        residual: &mut Tensor,
        x: &Tensor,
    ) -> Result<Tensor, ModelError> {
        let mut out = backend.activation(residual.rows(), residual.cols())?;
        backend.add_rms_norm(residual, x, &self.weight, self.eps, &mut out)?;
        Ok(out)
    }
}

/// An [`RmsNorm`] over each head by itself.
pub(crate) struct HeadNorm(RmsNorm);

impl HeadNorm {
    /// Reads the norm `name` `[E]` of a layer.
    pub(crate) fn load(layer: &LayerReader<'_>, name: &str) -> Result<Self, ModelError> {
        RmsNorm::load_sized(layer.weights, layer.spec, layer.module(name), layer.spec.head_dim).map(Self)
    }

    /// `x` `[T, heads * E]` to the same shape.
    pub(crate) fn forward(&self, cx: &StepContext<'_>, x: Tensor) -> Result<Tensor, ModelError> {
        let (rows, cols) = (x.rows(), x.cols());
        let head_dim = self.0.weight.cols();
        let heads = x.reshaped(rows * (cols / head_dim), head_dim); // [T * heads, E]
        Ok(self.0.forward(cx.backend(), &heads)?.reshaped(rows, cols))
    }
}
