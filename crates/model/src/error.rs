//! The one error type of this crate.

/// What loading or running a model can refuse.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the fields are what the variant names
pub enum ModelError {
    /// The file or folder could not be read.
    #[error(transparent)]
    Format(#[from] pagemill_formats::FormatError),
    /// A device refused.
    #[error(transparent)]
    Backend(#[from] pagemill_backend::BackendError),
    /// An architecture that Pagemill does not compute.
    #[error("architecture {architecture:?} is not supported; supported are {supported}")]
    UnknownArchitecture {
        /// As the checkpoint spells it.
        architecture: String,
        /// The names that are known for this kind of file.
        supported: String,
    },
    /// A configuration field with a value that changes the maths and is not understood.
    #[error("{path}: {field} = {value} is not supported ({detail})")]
    UnsupportedField {
        /// The configuration's file.
        path: String,
        /// As the file spells it.
        field: String,
        /// As the file has it, shortened.
        value: String,
        /// Why, or what would be supported.
        detail: String,
    },
    /// A field that must be there is not, or makes no sense.
    #[error("{path}: {field}: {detail}")]
    BadField {
        /// The configuration's file.
        path: String,
        /// As the file spells it.
        field: String,
        /// What is wrong.
        detail: String,
    },
    /// A layout over ranks that the model does not allow.
    #[error("{key} = {value}: {detail}")]
    Parallel {
        /// `tensor_parallel` or `pipeline_parallel`.
        key: &'static str,
        /// What was asked for.
        value: usize,
        /// The numbers that do not fit together.
        detail: String,
    },
    /// A tensor is missing, has the wrong shape, or is not used by this architecture.
    #[error("{path}: tensor {tensor:?}: {detail}")]
    Tensor {
        /// The tensor's file, or the configuration's where the tensor is missing.
        path: String,
        /// As the checkpoint spells it.
        tensor: String,
        /// What is wrong.
        detail: String,
    },
}
