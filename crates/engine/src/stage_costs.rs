//! Where a pipeline's stages are cut: measures what a decode pays for a byte of a weight of each type on this
//! device, so that a head of another type than the layers counts for the time it takes. Only ranks that are
//! threads of one process measure; processes must agree without a word, and count bytes.

use crate::EngineError;
use pagemill_backend::{Backend, BackendError, DType, LinearPart, WeightDesc};
use pagemill_model::{Checkpoint, ModelError, ParallelMode, Stage, matrix_types, plan_stages, plan_stages_by};
use std::time::Instant;

/// Bytes of the matrix that is multiplied with: more than the caches of one core hold.
const MATRIX_BYTES: usize = 16 << 20;
/// Its input features: whole blocks of every type.
const COLS: usize = 2048;
/// Products, of which the fastest counts: others may use the machine.
const RUNS: usize = 4;

/// The stages of `mode`, balanced by measured time where there are several, and weights of several types.
///
/// # Errors
/// A layout that the model does not allow; a device that cannot multiply with a type of the model.
pub(crate) fn plan(
    checkpoint: &Checkpoint,
    mode: ParallelMode,
    backend: &dyn Backend,
) -> Result<Vec<Stage>, EngineError> {
    // What is refused is refused before anything is measured.
    let by_bytes = plan_stages(checkpoint, mode)?;
    let types = matrix_types(checkpoint);
    if mode.pipeline_parallel == 1 || types.len() < 2 {
        return Ok(by_bytes);
    }
    let costs: Vec<(DType, u64)> = types
        .into_iter()
        .map(|dtype| Ok((dtype, picoseconds_per_byte(backend, dtype)?)))
        .collect::<Result<_, BackendError>>()
        .map_err(ModelError::from)?;
    let byte_cost = |dtype| costs.iter().find(|(measured, _)| *measured == dtype).map_or(0, |(_, cost)| *cost);
    Ok(plan_stages_by(checkpoint, mode, &byte_cost)?)
}

/// A product of one row with a matrix of zeros.
fn picoseconds_per_byte(backend: &dyn Backend, dtype: DType) -> Result<u64, BackendError> {
    let row_bytes = dtype.row_bytes(COLS).unwrap_or(COLS);
    let rows = (MATRIX_BYTES / row_bytes).max(1);
    let desc = WeightDesc { name: format!("a matrix of {dtype} to measure with"), dtype, rows, cols: COLS };
    let weight = backend.load_weight(desc, &mut |_, _, bytes| {
        bytes.fill(0);
        Ok(())
    })?;
    let mut x = backend.activation(1, COLS)?;
    backend.copy_from_host(&vec![1.0; COLS], &mut x)?;
    let mut out = backend.temp(1, rows)?;
    let mut last = vec![0.0; rows];
    let mut best = u128::MAX;
    for _ in 0..RUNS {
        let started = Instant::now();
        backend.begin_forward();
        let product = backend.linear(&x, &mut [LinearPart { weight: &weight, bias: None, out: &mut out }]);
        backend.end_forward();
        product?;
        // A device may still be at it.
        backend.to_host(&out, &mut last)?;
        best = best.min(started.elapsed().as_nanos());
    }
    Ok(u64::try_from(best * 1000 / (rows * row_bytes) as u128).unwrap_or(u64::MAX).max(1))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use pagemill_backend::{CpuBackend, CpuConfig};

    #[test]
    fn a_byte_costs_something_of_every_type() {
        let backend = CpuBackend::new(CpuConfig { num_threads: Some(1), ..CpuConfig::default() }).unwrap();
        for dtype in DType::ALL {
            let cost = picoseconds_per_byte(&backend, dtype).unwrap();
            assert!(cost > 0 && cost < u64::MAX, "{dtype}: {cost} ps");
        }
    }
}
