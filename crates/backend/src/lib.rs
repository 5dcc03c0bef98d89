//! Backend: tensors, the ops contract every device implements, collectives, and the CPU device.
//!
//! This room knows shapes, dtypes and bytes. It does not know what a request, a layer name or an
//! architecture is, and it never decides what runs next.
//!
//! Shape letters used in this crate: `T` tokens in a step, `S` sequences in a step, `D` hidden size,
//! `H` query heads, `K` KV heads, `E` head size, `N` output features, `C` input features
//! (columns of a weight row), `V` vocabulary, `R` rows whose logits are wanted.

pub mod ahead;
pub mod batch;
pub mod check;
pub mod collective;
pub mod composed;
pub mod cpu;
pub mod dtype;
pub mod error;
pub mod kv;
pub mod meter;
pub mod ops;
pub mod sampling;
pub mod tensor;

pub use ahead::{AwaitedToken, MAX_QUEUED_STEPS, StepsAhead};
pub use batch::{BatchLayout, CheckedLayout, DeviceBatch, GroupLayout};
pub use collective::{Collective, SoloCollective};
pub use cpu::{ActivationMode, CpuBackend, CpuConfig, Isa, SharedCollective, host_elements, host_elements_mut};
pub use dtype::DType;
pub use error::BackendError;
pub use kv::{BlockCopy, KvPool, KvPoolSpec};
pub use meter::{DeviceMeter, Launching};
pub use ops::{
    Activation, Addend, AttentionParams, Backend, DeviceInfo, HeadTransform, LinearInput, LinearPart, LinearWeights,
    MlpWeights, Norm, Qkv, ReadError, ReadRows, RopeStyle, RopeTable, WeightDesc, repeating,
};
pub use tensor::{DeviceBuffer, Tensor, Weight};
