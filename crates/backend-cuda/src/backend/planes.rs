//! How a product leaves its result in planes.

use super::CudaBackend;
use crate::check::{cuda_buffer_mut, to_u32, view_f32};
use crate::planes::{Planes, PlanesView};
use pagemill_backend::check::ensure;
use pagemill_backend::{BackendError, Tensor};

impl CudaBackend {
    /// `x` `[T, N]` becomes the sum `((plane 0 + plane 1) + plane 2) + …` of `planes`, f32 `[P * T, N]`, plane after
    /// plane, each whole. [`pagemill_backend::Backend::add_rms_norm`] and [`pagemill_backend::Backend::add`] read the
    /// planes themselves, unrounded; every other reader has the sum rounded to `x`'s type first. `x` keeps the planes'
    /// memory until then, or until it is dropped.
    ///
    /// While the backend rehearses the planes may be of any number of rows: `x` keeps them, and nobody reads them.
    ///
    /// # Errors
    /// Planes of other columns, or no whole planes; a tensor of another device.
    pub fn hold_planes(&self, x: &mut Tensor, planes: Tensor) -> Result<(), BackendError> {
        const OP: &str = "hold_planes";
        let (rows, cols) = (x.rows(), x.cols());
        if self.device.is_rehearsing() {
            cuda_buffer_mut(OP, x)?.keep(planes);
            return Ok(());
        }
        let whole = planes.cols() == cols && rows > 0 && planes.rows() > 0 && planes.rows().is_multiple_of(rows);
        ensure(OP, whole, || {
            (format!("planes of [{rows}, {cols}]"), format!("[{}, {}]", planes.rows(), planes.cols()))
        })?;
        let view = PlanesView {
            address: view_f32(OP, &planes)?,
            num_planes: to_u32(OP, "planes", planes.rows() / rows)?,
            count: rows * cols,
        };
        cuda_buffer_mut(OP, x)?.hold(Planes::new(planes, view, &self.planes));
        Ok(())
    }
}
