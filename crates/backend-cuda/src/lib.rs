//! NVIDIA GPUs behind the ops contract: the only room that knows a GPU.
//!
//! Everything here is behind the feature `cuda`. With it, the driver is loaded when it is first asked for, so
//! that the same binary runs where there is none: ask [`CudaBackend::count_devices`] first.
//!
//! Read in this order: `device` (driver, context, stream) → `memory` and `staging` (who owns which bytes, how
//! they get there) → `images` (kernels) → `planes` (sums that are pending) → `batch`, `rows`, `attention`, `linear`, `sampling`
//! (the ops) → `graphs` (recorded forwards) → `backend` (the contract) → `collective` (ranks on several GPUs).
//!
//! Kernels lie in `kernels/*.cu`, one image for each file and architecture. Host arguments of a kernel are one
//! `repr(C)` struct passed by value, whose fields repeat those in the `.cu` file.
//!
//! Shape letters are those of `pagemill_backend`.

#![cfg(feature = "cuda")]

mod attention;
mod backend;
mod batch;
mod check;
mod collective;
mod device;
mod graphs;
mod images;
mod kernels;
mod linear;
mod loading;
mod matmul;
mod memory;
mod meter;
mod planes;
mod rope_angles;
mod rows;
mod sampling;
mod staging;
mod tensor_map;

pub use attention::AttentionLaunches;
pub use backend::{Activations, CudaBackend, CudaConfig};
pub use collective::{CudaCollective, SumBy};
