//! Gate and up of some hundred tokens by `linear_wide.cu`: which of them it takes, and its launches. Callers have checked
//! shapes.
//!
//! Not where results must be deterministic: those are `linear_mid`'s, whatever the number of tokens.

use super::clusters::ClusterKernels;
use super::{GatedProduct, Inputs, LinearOps, Matrix, activation_type, half_of, word};
use crate::device::Device;
use crate::images::Kernels;
use crate::kernels::GateActivation;
use crate::kernels::linear_wide::{
    self, LinearWideParams, LinearWideVariant, PANEL_COLS, RANKS, TILE_FEATURES, shared_tokens, token_tiles,
};
use crate::tensor_map::{MapShape, tensor_map};
use pagemill_backend::BackendError;

/// The kernel's forms.
pub(crate) type WideKernels = ClusterKernels<LinearWideVariant>;

impl WideKernels {
    /// `None` on chips that the kernel is not for.
    ///
    /// # Errors
    /// A kernel that this build lacks or the driver refuses.
    pub(crate) fn new(device: &Device, kernels: &Kernels) -> Result<Option<Self>, BackendError> {
        let launch = linear_wide::launch(1, word(device.num_multiprocessors()) * TILE_FEATURES);
        Self::load(device, kernels, RANKS, LinearWideVariant::ALL.map(|variant| (variant, variant.name(), launch)))
    }
}

impl LinearOps {
    /// The form that takes gate and up together for so many tokens, if one does.
    pub(super) fn wide_gated(&self, num_tokens: usize, gate: Matrix<'_>, up: Matrix<'_>) -> Option<LinearWideVariant> {
        let wide = self.wide.as_ref().filter(|_| !self.deterministic)?;
        let is_alike = (gate.rows, gate.cols) == (up.rows, up.cols) && gate.weight.dtype == up.weight.dtype;
        let is_reachable = |of: Matrix<'_>| linear_wide::is_reachable(of.weight.address(), of.rows, of.cols);
        let variant = LinearWideVariant { weight: half_of(gate.weight.dtype)? };
        let max_clusters = wide.form(&variant)?.max_clusters;
        let is_chosen = linear_wide::is_faster(num_tokens, word(gate.rows), max_clusters);
        (is_alike && is_reachable(gate) && is_reachable(up) && is_chosen).then_some(variant)
    }

    /// `act(x · gateᵀ) * (x · upᵀ)` of what [`Self::wide_gated`] takes.
    pub(super) fn wide_gated_product(
        &self,
        inputs: &mut Inputs<'_>,
        variant: LinearWideVariant,
        num_tokens: usize,
        product: &GatedProduct<'_>,
    ) -> Result<(), BackendError> {
        let broken = || self.device.broken("a product that linear_wide does not take");
        let wide = self.wide.as_ref().ok_or_else(broken)?;
        let form = wide.form(&variant).ok_or_else(broken)?;
        let GatedProduct { gate, up, act, out } = *product;
        let (n, cols, x_rows) = (word(gate.rows), gate.cols as u64, shared_tokens(word(num_tokens)));
        let map = |address: u64, rows: usize, box_rows: u32| {
            let dims = [cols, rows as u64];
            let shape = MapShape { dims, stride_bytes: cols * 2, box_dims: [PANEL_COLS, box_rows] };
            tensor_map(&self.device, address, variant.weight, &shape, "a product")
        };
        let args = LinearWideParams {
            x_map: map(inputs.as_type(gate.weight.dtype)?, num_tokens, x_rows)?,
            w_map: [
                map(gate.weight.address(), gate.rows, TILE_FEATURES)?,
                map(up.weight.address(), up.rows, TILE_FEATURES)?,
            ],
            y: out.address,
            n,
            num_tokens: word(num_tokens),
            num_token_tiles: token_tiles(word(num_tokens)),
            x_rows,
            num_panels: word(gate.cols).div_ceil(PANEL_COLS),
            y_type: activation_type(out.elem),
            activation: GateActivation::from(act) as u32,
            unused: [0; 23],
        };
        let launch = linear_wide::launch(word(num_tokens), n);
        wide.count_launch();
        // SAFETY: the struct is the kernel's; gate and up were found alike, and the op checked the shapes of x and out.
        // Before its wait the kernel reads weights only, which nothing writes after they are loaded; it writes, and lets
        // its successor begin, behind it.
        unsafe {
            self.device.launch_overlapped(form.function.0, launch.grid, launch.threads, launch.shared_bytes, &args)
        }
    }
}
