//! Parsers over untrusted bytes: GGUF, safetensors, and the JSON members of a Hugging Face model folder.
//!
//! This room turns files into checked, plain data and reads weights where they lie. Every count, length and offset is
//! held against the bytes that remain before it is believed; memory is bounded by the input; every fault is a
//! [`FormatError`] that names file, field and byte. It knows no tensor operation, no backend, no tokenizer algorithm,
//! and no meaning of any configuration field.
//!
//! Start at [`Checkpoint::open`].

#![forbid(unsafe_code)]

mod checkpoint;
mod error;
pub mod gguf;
pub mod hf;
mod json;
pub mod safetensors;
mod source;
mod tensor;
mod tensor_type;
#[cfg(feature = "testing")]
pub mod testing;
mod weights;

pub use checkpoint::{Checkpoint, ConfigOnly};
pub use error::{FormatError, FormatErrorKind, Result};
pub use json::JsonFields;
pub use tensor::{TensorInfo, TensorTable};
pub use tensor_type::{RefusedType, StoredType, TensorType};
pub use weights::Weights;
