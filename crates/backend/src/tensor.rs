//! Tensors and weights: shapes and dtypes over bytes that a device owns. Knows no op.

use crate::DType;
use std::any::Any;

/// Bytes on a device. A backend downcasts its own buffers with [`DeviceBuffer::as_any`]; a buffer of
/// another backend is a caller's fault and is refused as a shape error.
pub trait DeviceBuffer: Send + Sync {
    /// For the owning backend's downcast.
    fn as_any(&self) -> &dyn Any;
    /// For the owning backend's downcast.
    fn as_any_mut(&mut self) -> &mut dyn Any;
    /// Size in bytes.
    fn len_bytes(&self) -> usize;
}

/// A dense row-major matrix `[rows, cols]` of activations. Every activation in the engine is one:
/// tokens are packed end to end, so the row is always a token (or a token's head).
/// A tensor from [`crate::Backend::temp`] gives its buffer back to the workspace when dropped.
pub struct Tensor {
    rows: usize,
    cols: usize,
    dtype: DType,
    buffer: Box<dyn DeviceBuffer>,
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[{}, {}] {}", self.rows, self.cols, self.dtype)
    }
}

impl Tensor {
    /// Wraps a buffer of at least `rows * cols` elements of the float type `dtype`.
    #[must_use]
    pub fn from_buffer(rows: usize, cols: usize, dtype: DType, buffer: Box<dyn DeviceBuffer>) -> Self {
        debug_assert!(!dtype.is_quantized());
        assert!(rows * cols * dtype.block_bytes() <= buffer.len_bytes(), "buffer smaller than its tensor");
        Self { rows, cols, dtype, buffer }
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns (elements of a row).
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The same elements seen as `[rows, cols]`. Free: rows are dense.
    ///
    /// # Panics
    /// When the element counts differ: a fault of the calling code, never of input.
    #[must_use]
    pub fn reshaped(mut self, rows: usize, cols: usize) -> Self {
        assert_eq!(rows * cols, self.rows * self.cols, "reshape changes the element count");
        self.rows = rows;
        self.cols = cols;
        self
    }

    /// The device's buffer, for the backend that made it.
    #[must_use]
    pub fn buffer(&self) -> &dyn DeviceBuffer {
        self.buffer.as_ref()
    }

    /// The device's buffer, for the backend that made it.
    pub fn buffer_mut(&mut self) -> &mut dyn DeviceBuffer {
        self.buffer.as_mut()
    }
}

/// A weight matrix `[rows = N output features, cols = C input features]` in the layout that its
/// backend chose at load (as stored, or repacked). Immutable.
pub struct Weight {
    name: String,
    rows: usize,
    cols: usize,
    dtype: DType,
    buffer: Box<dyn DeviceBuffer>,
}

impl Weight {
    /// Wraps a backend's own layout of `name`.
    #[must_use]
    pub fn from_buffer(name: String, rows: usize, cols: usize, dtype: DType, buffer: Box<dyn DeviceBuffer>) -> Self {
        Self { name, rows, cols, dtype, buffer }
    }

    /// Tensor name as spelled in the checkpoint.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Output features.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Type as stored in the file.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device's buffer, for the backend that made it.
    #[must_use]
    pub fn buffer(&self) -> &dyn DeviceBuffer {
        self.buffer.as_ref()
    }

    /// Bytes held on the device.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.buffer.len_bytes()
    }
}
