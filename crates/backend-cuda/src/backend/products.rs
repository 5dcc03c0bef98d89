//! Products that leave their sums in planes, which whoever reads the output adds up.

use super::CudaBackend;
use crate::check::{View, view_f32};
use crate::linear::Product;
use pagemill_backend::{Backend, BackendError, Tensor};

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
        let planes = self.temp(task.num_planes as usize * task.num_tokens, product.matrix.rows)?;
        if task.num_tokens < num_tokens {
            // Too many: planes were taken only for the workspace to have room for fewer tokens' later.
            return Ok(false);
        }
        self.linear.run_in_planes(&self.rows, x, &task, product, view_f32("linear", &planes)?)?;
        self.hold_planes(out, planes)?;
        Ok(true)
    }
}
