//! Capacity: what a model needs, and how fast it would run, on hardware that is not here.
//!
//! Pure arithmetic: shapes and published figures in, bytes and seconds out. This room never sees a file, a
//! tensor, a clock or a device, and depends on no other room. `docs/capacity.md` has the formulas with their
//! sources, and predicted against measured figures.
//!
//! Read in this order: [`shape`] (the model) → [`device`] (the hardware) → [`layout`] (ranks and stages) →
//! [`memory`] (bytes) → `traffic` (messages) → `roofline` (seconds of a layer) → [`pipeline`] (seconds of a step)
//! → [`plan`] (everything at once) → `report` (as text).

#![forbid(unsafe_code)]

pub mod device;
pub mod dtype;
pub mod error;
pub mod known;
pub mod layout;
pub mod memory;
pub mod pipeline;
pub mod plan;
mod report;
mod roofline;
pub mod shape;
pub mod traffic;

pub use device::{Device, Efficiency, Link};
pub use dtype::{KvType, WeightType};
pub use error::CapacityError;
pub use layout::Layout;
pub use pipeline::Predictor;
pub use plan::{CapacityPlan, Question};
pub use shape::{DecoderShape, LayerKv, Mlp};
