//! The table of f32 row kernels: one entry an op, picked once for an [`Isa`].

use super::isa::{Isa, Vectors};
use super::reference;
use crate::Activation;
use half::f16;

#[allow(clippy::type_complexity)] // a plain function, named for its one use
/// See [`RowKernels::gated_activation`].
type GatedKernel = fn(act: Activation, gate: &[f32], up: &[f32], out: &mut [f32]);

#[allow(clippy::type_complexity)] // a plain function, named for its one use
/// See [`RowKernels::rotate_halves`].
type RotateHalvesKernel = fn(low: &mut [f32], high: &mut [f32], cos: &[f32], sin: &[f32]);

/// Row kernels of one instruction set. Each works on whole rows; a row's result depends on that row
/// only. Slices of one call have equal lengths.
pub(crate) struct RowKernels {
    /// `residual += x`.
    pub(crate) add: fn(residual: &mut [f32], x: &[f32]),
    /// `x *= factor`.
    pub(crate) scale: fn(x: &mut [f32], factor: f32),
    /// `out = x / sqrt(mean(x²) + eps) * weight`.
    pub(crate) rms_norm: fn(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]),
    /// `out = act(gate) * up`.
    pub(crate) gated_activation: GatedKernel,
    /// Rotates `(low[i], high[i])`.
    pub(crate) rotate_halves: RotateHalvesKernel,
    /// Rotates `(x[2i], x[2i + 1])`.
    pub(crate) rotate_pairs: fn(x: &mut [f32], cos: &[f32], sin: &[f32]),
    /// Rounds to f16, saturating.
    pub(crate) to_f16: fn(x: &[f32], out: &mut [f16]),
}

static SCALAR: RowKernels = RowKernels {
    add: reference::add,
    scale: reference::scale,
    rms_norm: reference::rms_norm,
    gated_activation: reference::gated_activation,
    rotate_halves: reference::rotate_halves,
    rotate_pairs: reference::rotate_pairs,
    to_f16: reference::to_f16,
};

/// The table for `isa`, which this machine has.
pub(crate) fn row_kernels(isa: Isa) -> &'static RowKernels {
    match isa.vectors() {
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx2 => &super::avx2::ROW_KERNELS,
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx512 => &super::avx512::ROW_KERNELS,
        #[cfg(target_arch = "aarch64")]
        Vectors::Neon => &super::neon::ROW_KERNELS,
        _ => &SCALAR,
    }
}
