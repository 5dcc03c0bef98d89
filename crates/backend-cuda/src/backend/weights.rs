//! A weight's way in: as stored or repeated, then widened where everything is computed in f32.

use super::{Activations, CudaBackend, lock};
use crate::linear::Matrix;
use crate::loading::{CudaWeight, upload_repeated};
use crate::staging::PieceUploader;
use pagemill_backend::{Backend, BackendError, DType, Weight, WeightDesc, repeating};

impl CudaBackend {
    /// A weight whose stored bytes are `supply` over and over. What is quantised may be kept in another form than it is
    /// stored in: it takes the way of every weight.
    pub(super) fn take_repeated(&self, desc: WeightDesc, supply: &[u8]) -> Result<Weight, BackendError> {
        if desc.dtype.is_quantized() {
            return self.load_weight(desc, &mut repeating(supply));
        }
        self.take_weight(desc, |pieces, desc| upload_repeated(&self.device, pieces, desc, supply))
    }

    /// A weight whose stored bytes `upload` brings to the device.
    pub(super) fn take_weight(
        &self,
        desc: WeightDesc,
        upload: impl FnOnce(&mut PieceUploader, &WeightDesc) -> Result<CudaWeight, BackendError>,
    ) -> Result<Weight, BackendError> {
        self.linear.check_weight(&desc.name, desc.dtype, desc.rows, desc.cols)?;
        lock(&self.records).clear();
        let mut pieces = lock(&self.pieces);
        let pieces = match pieces.as_mut() {
            Some(pieces) => pieces,
            None => pieces.insert(PieceUploader::new(&self.device)?),
        };
        let stored = upload(pieces, &desc)?;
        let WeightDesc { name, dtype, rows, cols } = desc;
        let is_narrow = matches!(dtype, DType::F16 | DType::BF16);
        let weight = if self.activations == Activations::F32 && is_narrow {
            self.linear.widened(Matrix { weight: &stored, rows, cols }, &name)?
        } else {
            stored
        };
        Ok(Weight::from_buffer(name, rows, cols, dtype, Box::new(weight)))
    }
}
