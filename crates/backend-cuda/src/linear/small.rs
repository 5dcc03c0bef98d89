//! Products of few tokens by `linear_small.cu`: which of them it takes, and its launches. Callers have checked shapes.

use super::{Inputs, LinearOps, Matrix, Product, activation_type, half_of, word};
use crate::check::View;
use crate::kernels::linear_small::{self, LinearParams, LinearPart, LinearVariant};
use pagemill_backend::BackendError;
use std::sync::atomic::Ordering;

impl LinearOps {
    /// The form of `linear_small` that takes the product, if one does.
    pub(super) fn small_variant(&self, x: View, num_tokens: usize, product: &Product<'_>) -> Option<LinearVariant> {
        let Matrix { weight, rows, cols } = product.matrix;
        let half = half_of(weight.dtype).filter(|_| !self.deterministic)?;
        let is_aligned = linear_small::is_aligned(x.address, weight.address());
        LinearVariant::select(half, u32::try_from(num_tokens).ok()?, word(rows), word(cols)).filter(|_| is_aligned)
    }

    /// The form that takes gate and up, if one does.
    pub(super) fn gated_variant(&self, num_tokens: usize, gate: Matrix<'_>, up: Matrix<'_>) -> Option<LinearVariant> {
        let half = half_of(gate.weight.dtype).filter(|_| !self.deterministic)?;
        let alike = (gate.rows, gate.cols) == (up.rows, up.cols) && gate.weight.dtype == up.weight.dtype;
        let is_aligned = linear_small::is_aligned(gate.weight.address(), up.weight.address());
        let num_tokens = u32::try_from(num_tokens).ok()?;
        LinearVariant::select_gated(half, num_tokens, word(gate.rows), word(gate.cols)).filter(|_| alike && is_aligned)
    }

    /// At most `MAX_PARTS` products of one variant and output type, biases included.
    pub(super) fn small_products(
        &self,
        inputs: &mut Inputs<'_>,
        variant: LinearVariant,
        num_tokens: usize,
        products: &[Product<'_>],
    ) -> Result<(), BackendError> {
        let [first, others @ ..] = products else { return Ok(()) };
        let part = |product: &Product<'_>| LinearPart {
            w: product.matrix.weight.address(),
            bias: product.bias.unwrap_or(0),
            y: product.out.address,
            n: word(product.matrix.rows),
            y_stride: word(product.matrix.rows),
        };
        let LinearPart { w, bias, y, n, y_stride } = part(first);
        let mut more = [LinearPart::default(); linear_small::MAX_PARTS - 1];
        for (more, product) in more.iter_mut().zip(others) {
            *more = part(product);
        }
        let args = LinearParams {
            x: inputs.as_type(first.matrix.weight.dtype)?,
            w,
            w_up: 0,
            bias,
            residual: 0,
            y,
            m: word(num_tokens),
            n,
            c: word(first.matrix.cols),
            x_stride: word(first.matrix.cols),
            y_stride,
            y_type: activation_type(first.out.elem),
            activation: 0,
            more,
        };
        // SAFETY: the op checked the shapes of x, weights, biases and outputs; the products share x, and one variant
        // means one type of weight.
        unsafe { self.launch_small(variant, &[n, more[0].n, more[1].n], &args) }
    }

    /// # Safety
    /// The addresses of `args` hold what its fields say, on this device's stream; `outputs` are its parts' `n`.
    pub(super) unsafe fn launch_small(
        &self,
        variant: LinearVariant,
        outputs: &[u32],
        args: &LinearParams,
    ) -> Result<(), BackendError> {
        let function = self.small.get(&variant).ok_or_else(|| self.device.broken(variant.name()))?;
        let num_sms = word(self.device.num_multiprocessors());
        let launch = variant.launch(outputs.iter().copied(), num_sms);
        self.small_launches.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the struct is the kernel's; memory is the caller's promise. Before its wait the kernel reads weights
        // only, which nothing writes after they are loaded; it writes, and lets its successor begin, behind it.
        unsafe { self.device.launch_overlapped(function.0, launch.grid, launch.threads, launch.shared_bytes, args) }
    }
}
