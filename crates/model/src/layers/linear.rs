//! Linear layers and their cuts: Q, K and V by heads, and the projections back to `D` by input
//! features. One device call for all products of one input, so that it is quantised once.

use super::{LayerReader, StepContext};
use crate::ModelError;
use crate::RankContext;
use crate::weights::{Bias, Cut, Module, WeightReader};
use pagemill_backend::{LinearInput, LinearPart, LinearWeights, Qkv, Tensor, Weight};
use std::ops::Range;

/// A weight cut by rows, with its bias.
pub(super) struct Projection {
    weight: Weight,
    bias: Option<Tensor>,
}

impl Projection {
    /// Rows `rows` of the module `[shape]`.
    pub(super) fn load(
        weights: &WeightReader<'_>,
        module: Module<'_>,
        shape: [usize; 2],
        rows: Range<usize>,
        bias: Bias,
    ) -> Result<Self, ModelError> {
        let weight = weights.matrix(module, shape, &Cut::Rows(rows.clone()))?;
        Ok(Self { weight, bias: weights.bias(module, shape[0], rows, bias)? })
    }

    /// A place for the product with `x` of `num_rows` rows.
    pub(super) fn output(&self, rank: &RankContext, num_rows: usize) -> Result<Tensor, ModelError> {
        Ok(rank.backend.activation(num_rows, self.weight.rows())?)
    }

    /// This product as a part of one device call.
    pub(super) fn part<'a>(&'a self, out: &'a mut Tensor) -> LinearPart<'a> {
        self.weights().part(out)
    }

    /// As the device's ops take it.
    pub(super) fn weights(&self) -> LinearWeights<'_> {
        LinearWeights { weight: &self.weight, bias: self.bias.as_ref() }
    }
}

/// Q, K and V of one layer: this rank's query heads and the KV heads that they read.
pub(crate) struct QkvLinear {
    q: Projection,
    k: Projection,
    v: Projection,
}

impl QkvLinear {
    /// Reads `self_attn.{q,k,v}_proj`.
    pub(crate) fn load(layer: &LayerReader<'_>, bias: Bias) -> Result<Self, ModelError> {
        let spec = layer.spec;
        let cut = layer
            .weights
            .shard()
            .heads(spec.num_heads, spec.num_kv_heads)
            .map_err(|error| layer.weights.uncut(layer.module("self_attn.q_proj"), &error))?;
        let load = |name: &str, num_heads: usize, heads: &Range<usize>| {
            let rows = heads.start * spec.head_dim..heads.end * spec.head_dim;
            let shape = [num_heads * spec.head_dim, spec.hidden_size];
            Projection::load(layer.weights, layer.module(name), shape, rows, bias)
        };
        Ok(Self {
            q: load("self_attn.q_proj", spec.num_heads, &cut.heads)?,
            k: load("self_attn.k_proj", spec.num_kv_heads, &cut.kv_heads)?,
            v: load("self_attn.v_proj", spec.num_kv_heads, &cut.kv_heads)?,
        })
    }

    /// `x` `[T, D]` to q `[T, H * E]`, k and v `[T, K * E]`.
    pub(crate) fn forward(&self, cx: &StepContext<'_>, x: LinearInput<'_>) -> Result<Qkv, ModelError> {
        let mut q = self.q.output(cx.rank, x.rows())?;
        let mut k = self.k.output(cx.rank, x.rows())?;
        let mut v = self.v.output(cx.rank, x.rows())?;
        cx.backend().fused_linear(x, &mut [self.q.part(&mut q), self.k.part(&mut k), self.v.part(&mut v)])?;
        Ok(Qkv { q, k, v })
    }
}

/// This rank's part of a sum over the ranks of its stage. The residual stream takes the sum when it adds it.
#[must_use = "the sum over ranks is not taken yet"]
pub(crate) struct PartialSum(pub(super) Tensor);

/// A projection back to `D`: each rank has some input features, and the products are summed.
pub(crate) struct RowLinear {
    weight: Weight,
    bias: Option<Tensor>,
}

impl RowLinear {
    /// `self_attn.o_proj`, cut at this rank's heads.
    pub(crate) fn load_attention_output(layer: &LayerReader<'_>, bias: Bias) -> Result<Self, ModelError> {
        let (spec, module) = (layer.spec, layer.module("self_attn.o_proj"));
        let uncut = |error| layer.weights.uncut(module, &error);
        let heads = layer.weights.shard().heads(spec.num_heads, spec.num_kv_heads).map_err(uncut)?.heads;
        let cols = heads.start * spec.head_dim..heads.end * spec.head_dim;
        Self::load(layer, module, spec.num_heads * spec.head_dim, cols, bias)
    }

    /// Columns `cols` of `module` `[D, num_cols]`.
    pub(super) fn load(
        layer: &LayerReader<'_>,
        module: Module<'_>,
        num_cols: usize,
        cols: Range<usize>,
        bias: Bias,
    ) -> Result<Self, ModelError> {
        let hidden_size = layer.spec.hidden_size;
        let weight = layer.weights.matrix(module, [hidden_size, num_cols], &Cut::Cols(cols))?;
        let bias = layer.weights.bias(module, hidden_size, 0..hidden_size, bias)?;
        // The sum over ranks must hold the bias once.
        let bias = bias.filter(|_| layer.weights.shard().rank == 0);
        Ok(Self { weight, bias })
    }

    /// `x` `[T, this rank's features]` to this rank's part of `[T, D]`.
    pub(crate) fn forward(&self, cx: &StepContext<'_>, x: LinearInput<'_>) -> Result<PartialSum, ModelError> {
        let mut out = cx.backend().activation(x.rows(), self.weight.rows())?;
        cx.backend().fused_linear(x, &mut [self.weights().part(&mut out)])?;
        Ok(PartialSum(out))
    }

    /// As the device's ops take it; what they give is this rank's share of the sum.
    pub(super) fn weights(&self) -> LinearWeights<'_> {
        LinearWeights { weight: &self.weight, bias: self.bias.as_ref() }
    }
}
