//! Products of one input, checked; and those that leave their sums in planes, which whoever reads the output adds up.

use super::CudaBackend;
use crate::check::{View, view, view_f32};
use crate::linear::{Matrix, Product};
use crate::loading::cuda_weight;
use pagemill_backend::check::{ensure, ensure_shape};
use pagemill_backend::{Backend, BackendError, LinearPart, Tensor, Weight};

pub(super) fn matrix<'a>(op: &'static str, weight: &'a Weight) -> Result<Matrix<'a>, BackendError> {
    Ok(Matrix { weight: cuda_weight(op, weight)?, rows: weight.rows(), cols: weight.cols() })
}

/// What [`Backend::linear`] is asked for, if the shapes fit: `x` `[T, C]`, weights `[N, C]`, outputs `[T, N]`, biases `[1, N]`.
pub(super) fn checked<'a>(x: &Tensor, parts: &[LinearPart<'a>]) -> Result<Vec<Product<'a>>, BackendError> {
    const OP: &str = "linear";
    let (num_tokens, cols) = (x.rows(), x.cols());
    let check = |part: &LinearPart<'a>| {
        let rows = part.weight.rows();
        ensure(OP, part.weight.cols() == cols, || {
            (format!("x with {} columns for {}", part.weight.cols(), part.weight.name()), cols.to_string())
        })?;
        ensure_shape(OP, "out", part.out, num_tokens, rows)?;
        part.bias.map_or(Ok(()), |bias| ensure_shape(OP, "bias", bias, 1, rows))?;
        let bias = part.bias.map(|bias| view_f32(OP, bias)).transpose()?;
        Ok(Product { matrix: matrix(OP, part.weight)?, bias, out: view(OP, part.out)? })
    };
    parts.iter().map(check).collect()
}

impl CudaBackend {
    /// Whether the product of `x` `[T, C]` has been taken so; `out` `[T, N]` is its output.
    pub(super) fn leaves_planes(
        &self,
        x: View,
        num_tokens: usize,
        product: &Product<'_>,
        out: &mut Tensor,
    ) -> Result<bool, BackendError> {
        let Some(task) = self.linear.planes_of(num_tokens, product) else { return Ok(false) };
        let is_taken = task.num_tokens == num_tokens;
        if !is_taken && !self.device.is_rehearsing() {
            return Ok(false);
        }
        let planes = self.temp(task.num_planes as usize * task.num_tokens, product.matrix.rows)?;
        if !is_taken {
            // Too many tokens: in a rehearsal, what fewer take is kept for the workspace to have room for it later.
            self.hold_planes(out, planes)?;
            return Ok(false);
        }
        self.linear.run_in_planes(&self.rows, x, &task, product, view_f32("linear", &planes)?)?;
        self.hold_planes(out, planes)?;
        Ok(true)
    }
}
