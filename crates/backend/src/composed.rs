//! Fused ops as the plain ops that they stand for, one after the other: what a fused op means, to the bit, and what
//! a backend runs that does not fuse it. Knows no device.

use crate::{
    AttentionParams, Backend, BackendError, DeviceBatch, HeadTransform, KvPool, LinearInput, LinearPart, MlpWeights,
    Norm, Qkv, Tensor,
};
use std::ops::Deref;

/// The rows of a [`LinearInput`].
pub enum Rows<'a> {
    /// They were there.
    Plain(&'a Tensor),
    /// They were made.
    Made(Tensor),
}

impl Deref for Rows<'_> {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        match self {
            Rows::Plain(x) => x,
            Rows::Made(x) => x,
        }
    }
}

/// Makes the rows of an input, and its sum. Takes one activation of the input's shape, or two for a normed addend.
///
/// # Errors
/// Those of the plain ops.
pub fn rows<'a, B: Backend + ?Sized>(backend: &B, input: LinearInput<'a>) -> Result<Rows<'a>, BackendError> {
    let (rows, cols) = (input.rows(), input.cols());
    let made = match input {
        LinearInput::Plain(x) => return Ok(Rows::Plain(x)),
        LinearInput::Normed { x, norm } => normed(backend, x, norm)?,
        LinearInput::AddNormed { residual, addend, norm } => {
            let mut out = backend.activation(rows, cols)?;
            match addend.norm {
                Some(first) => {
                    let x = normed(backend, addend.x, first)?;
                    backend.add_rms_norm(residual, &x, norm.weight, norm.eps, &mut out)?;
                }
                None => backend.add_rms_norm(residual, addend.x, norm.weight, norm.eps, &mut out)?,
            }
            out
        }
        LinearInput::Gated { gate, up, act } => {
            let mut out = backend.activation(rows, cols)?;
            backend.gated_activation(gate, up, act, &mut out)?;
            out
        }
    };
    Ok(Rows::Made(made))
}

/// [`Backend::fused_linear`]. Takes what [`rows`] takes.
///
/// # Errors
/// Those of the plain ops.
pub fn linear<B: Backend + ?Sized>(
    backend: &B,
    input: LinearInput<'_>,
    parts: &mut [LinearPart<'_>],
) -> Result<(), BackendError> {
    let x = rows(backend, input)?;
    backend.linear(&x, parts)
}

/// [`Backend::gated_mlp`]: two products, then one of what they make. Takes activations for all three.
///
/// # Errors
/// Those of the two products.
pub fn gated_mlp<B: Backend + ?Sized>(
    backend: &B,
    input: LinearInput<'_>,
    mlp: &MlpWeights<'_>,
) -> Result<Tensor, BackendError> {
    let num_tokens = input.rows();
    let mut gate = backend.activation(num_tokens, mlp.gate.weight.rows())?; // [T, F]
    let mut up = backend.activation(num_tokens, mlp.up.weight.rows())?; // [T, F]
    backend.fused_linear(input, &mut [mlp.gate.part(&mut gate), mlp.up.part(&mut up)])?;
    let mut out = backend.activation(num_tokens, mlp.down.weight.rows())?; // [T, D]
    let inner = LinearInput::Gated { gate: &gate, up: &up, act: mlp.act };
    backend.fused_linear(inner, &mut [mlp.down.part(&mut out)])?;
    Ok(out)
}

/// [`Backend::rope_kv_write`]. Takes an activation of q's and of k's shape where they are normed.
///
/// # Errors
/// Those of the plain ops.
pub fn rope_kv_write<B: Backend + ?Sized>(
    backend: &B,
    qkv: Qkv,
    transform: &HeadTransform<'_>,
    params: &AttentionParams,
    batch: &DeviceBatch,
    kv: &mut KvPool,
) -> Result<Tensor, BackendError> {
    let Qkv { q, k, v } = qkv;
    let turned = |x: Tensor, norm: Option<Norm<'_>>| {
        let mut x = match norm {
            Some(norm) => normed_heads(backend, x, norm)?,
            None => x,
        };
        backend.rope(&mut x, params.head_dim, transform.rope, batch)?;
        Ok(x)
    };
    let q = turned(q, transform.q_norm)?;
    let k = turned(k, transform.k_norm)?;
    backend.kv_write(&k, &v, params, batch, kv)?;
    Ok(q)
}

fn normed<B: Backend + ?Sized>(backend: &B, x: &Tensor, norm: Norm<'_>) -> Result<Tensor, BackendError> {
    let mut out = backend.activation(x.rows(), x.cols())?;
    backend.rms_norm(x, norm.weight, norm.eps, &mut out)?;
    Ok(out)
}

/// The norm of each head of `x` `[T, heads * E]` by itself.
fn normed_heads<B: Backend + ?Sized>(backend: &B, x: Tensor, norm: Norm<'_>) -> Result<Tensor, BackendError> {
    let (rows, cols, head_dim) = (x.rows(), x.cols(), norm.weight.cols());
    if head_dim == 0 || !cols.is_multiple_of(head_dim) {
        let expected = format!("whole heads of {head_dim}");
        return Err(BackendError::Shape { op: "rope_kv_write", expected, got: format!("{cols} columns") });
    }
    let heads = x.reshaped(rows * (cols / head_dim), head_dim); // [T * heads, E]
    Ok(normed(backend, &heads, norm)?.reshaped(rows, cols))
}
