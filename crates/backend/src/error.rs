//! The one error type of this crate.

use crate::DType;

/// What an op, a load or an allocation can refuse. All of these are answered at load or before a
/// step's first op; a step that passed its checks does not fail half way.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the fields are what the variant names
pub enum BackendError {
    /// An op was called with tensors that do not fit together: a fault of the caller's code.
    #[error("{op}: expected {expected}, got {got}")]
    Shape { op: &'static str, expected: String, got: String },
    /// The device lacks this op for this dtype or size. Never run elsewhere in silence.
    #[error("{device} cannot run {op} on {dtype} ({detail})")]
    Unsupported { device: String, op: &'static str, dtype: DType, detail: String },
    /// The allocation was refused.
    #[error("{device}: no memory for {what} ({bytes} bytes)")]
    OutOfMemory { device: String, what: String, bytes: usize },
    /// Filling a weight from its file failed.
    #[error("reading weight {name}: {source}")]
    WeightRead { name: String, source: Box<dyn std::error::Error + Send + Sync> },
    /// The device or its threads failed: the engine must stop.
    #[error("{device}: {detail}")]
    Device { device: String, detail: String },
    /// A collective failed or its peer is gone.
    #[error("collective {op}: {detail}")]
    Collective { op: &'static str, detail: String },
}
