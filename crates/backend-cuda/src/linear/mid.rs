//! Products of up to 128 tokens at a time by `linear_mid.cu`: which of them it takes, and its launches. Callers have
//! checked shapes.
//!
//! Products with fewer rows than a tile for each multiprocessor (a layer's output and down projections) leave their sums
//! in planes, so that all multiprocessors have rows enough; whoever reads the output adds them up.
//!
//! Where results must be deterministic it takes all products of 16-bit weights that the copy engine reads, in pieces
//! where there are more tokens and without planes: a row's bits then do not depend on its company.

use super::{GatedProduct, Inputs, LinearOps, Matrix, Product, activation_type, first_alike, half_of, word};
use crate::check::{Elem, View};
use crate::device::Device;
use crate::images::Kernels;
use crate::kernels::linear_mid::{
    self, LinearMidParams, LinearMidPart, LinearMidVariant, MAX_PARTS, MAX_TOKENS, MidShape, PANEL_COLS,
};
use crate::kernels::{GateActivation, Half};
use crate::rows::{Function, RowOps};
use crate::tensor_map::{MapShape, tensor_map};
use pagemill_backend::BackendError;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// The kernel's forms.
pub(crate) struct MidKernels {
    functions: HashMap<LinearMidVariant, Function>,
    num_multiprocessors: u32,
    launches: AtomicU64,
}

impl MidKernels {
    /// `None` on chips that the kernel is not for.
    ///
    /// # Errors
    /// A kernel that this build lacks or the driver refuses.
    pub(crate) fn new(device: &Device, kernels: &Kernels) -> Result<Option<Self>, BackendError> {
        if !kernels.are_for_hopper() {
            return Ok(None);
        }
        let functions = LinearMidVariant::all()
            .map(|variant| {
                Ok((variant, Function(kernels.get_with_shared(&variant.name(), linear_mid::MOST_SHARED_BYTES)?)))
            })
            .collect::<Result<_, BackendError>>()?;
        let num_multiprocessors = word(device.num_multiprocessors());
        Ok(Some(Self { functions, num_multiprocessors, launches: AtomicU64::new(0) }))
    }

    /// Launches so far, recorded ones counted once.
    pub(crate) fn launches(&self) -> u64 {
        self.launches.load(Ordering::Relaxed)
    }
}

/// How a product leaves its sums in planes.
pub(crate) struct PlanesTask {
    weight: Half,
    pub(crate) num_planes: u32,
    /// Of a launch at most.
    pub(crate) num_tokens: usize,
}

/// Products of one x, as the kernel is told of them.
struct MidTask<'a> {
    weight: Half,
    /// `[T, C]` in the weights' type.
    x: u64,
    num_tokens: usize,
    cols: u32,
    /// `[N, C]` each; gated: gate and up.
    weights: &'a [Matrix<'a>],
    /// Outputs of the first token.
    parts: [LinearMidPart; MAX_PARTS],
    elem: Elem,
    /// 1, or of an f32 output that lies plane after plane.
    num_planes: u32,
    gate: Option<GateActivation>,
}

fn part_of(bias: Option<u64>, y: u64, n: u32) -> LinearMidPart {
    LinearMidPart { bias: bias.unwrap_or(0), y, n, y_stride: n, ..Default::default() }
}

impl LinearOps {
    /// The type of a weight that `linear_mid` reads.
    fn mid_weight(&self, matrix: Matrix<'_>) -> Option<Half> {
        let half = half_of(matrix.weight.dtype).filter(|_| self.mid.is_some())?;
        let is_readable = linear_mid::is_readable(matrix.weight.address(), word(matrix.cols));
        (is_readable && linear_mid::is_countable(&[word(matrix.rows); MAX_PARTS])).then_some(half)
    }

    /// How many of the first products `linear_mid` takes in one launch.
    pub(super) fn mid_launch(&self, num_tokens: usize, products: &[Product<'_>]) -> Option<(Half, usize)> {
        let (half, count) = first_alike(products, MAX_PARTS, |product| self.mid_weight(product.matrix))?;
        let outputs = std::array::from_fn(|nth| products[..count].get(nth).map_or(0, |product| product.matrix.rows));
        let is_chosen = self.deterministic || linear_mid::is_faster(num_tokens, outputs, products.first()?.matrix.cols);
        is_chosen.then_some((half, count))
    }

    /// Products that [`Self::mid_launch`] counted, biases included.
    pub(super) fn mid_products(
        &self,
        inputs: &mut Inputs<'_>,
        weight: Half,
        num_tokens: usize,
        products: &[Product<'_>],
    ) -> Result<(), BackendError> {
        let Some(first) = products.first() else { return Ok(()) };
        let mut parts = [LinearMidPart::default(); MAX_PARTS];
        for (part, product) in parts.iter_mut().zip(products) {
            let n = word(product.matrix.rows);
            *part = part_of(product.bias, product.out.address, n);
        }
        let weights: Vec<Matrix<'_>> = products.iter().map(|product| product.matrix).collect();
        self.run_mid(&MidTask {
            weight,
            x: inputs.as_type(first.matrix.weight.dtype)?,
            num_tokens,
            cols: word(first.matrix.cols),
            weights: &weights,
            parts,
            elem: first.out.elem,
            num_planes: 1,
            gate: None,
        })
    }

    /// How `linear_mid` leaves the product's sums in planes, where that is the fastest: for so many tokens, or for the most
    /// that it takes so where there are more. Not for one rank of several, whose sums of ranks read elements.
    pub(crate) fn planes_of(&self, num_tokens: usize, product: &Product<'_>) -> Option<PlanesTask> {
        let Matrix { rows, cols, .. } = product.matrix;
        let weight = self.mid_weight(product.matrix).filter(|_| !self.deterministic && !self.device.is_rank())?;
        let num_planes = linear_mid::num_planes(word(rows), word(cols), self.mid.as_ref()?.num_multiprocessors);
        let num_tokens = linear_mid::tokens_in_planes(num_tokens)?;
        (num_planes > 1).then_some(PlanesTask { weight, num_planes, num_tokens })
    }

    /// The product of `x` `[T, C]` as [`Self::planes_of`] said, to f32 `planes` `[P, T, N]`; a bias is part of the first.
    pub(crate) fn run_in_planes(
        &self,
        rows: &RowOps,
        x: View,
        task: &PlanesTask,
        product: &Product<'_>,
        planes: u64,
    ) -> Result<(), BackendError> {
        let Matrix { weight, rows: n, cols } = product.matrix;
        let mut inputs = Inputs { ops: self, rows, x, count: task.num_tokens * cols, converted: Vec::new() };
        self.run_mid(&MidTask {
            weight: task.weight,
            x: inputs.as_type(weight.dtype)?,
            num_tokens: task.num_tokens,
            cols: word(cols),
            weights: &[product.matrix],
            parts: [part_of(product.bias, planes, word(n)), LinearMidPart::default(), LinearMidPart::default()],
            elem: Elem::F32,
            num_planes: task.num_planes,
            gate: None,
        })
    }

    /// The type of gate and up, if `linear_mid` takes them together for so many tokens.
    pub(super) fn mid_gated(&self, num_tokens: usize, gate: Matrix<'_>, up: Matrix<'_>) -> Option<Half> {
        let alike = (gate.rows, gate.cols) == (up.rows, up.cols) && gate.weight.dtype == up.weight.dtype;
        let (gate, up) = (self.mid_weight(gate), self.mid_weight(up));
        let is_chosen = self.deterministic || linear_mid::is_faster_gated(num_tokens);
        gate.filter(|_| alike && up == gate && is_chosen)
    }

    /// `act(x · gateᵀ) * (x · upᵀ)` of what [`Self::mid_gated`] takes.
    pub(super) fn mid_gated_product(
        &self,
        inputs: &mut Inputs<'_>,
        weight: Half,
        num_tokens: usize,
        product: &GatedProduct<'_>,
    ) -> Result<(), BackendError> {
        let GatedProduct { gate, up, act, out } = *product;
        let n = word(gate.rows);
        let part = part_of(None, out.address, n);
        self.run_mid(&MidTask {
            weight,
            x: inputs.as_type(gate.weight.dtype)?,
            num_tokens,
            cols: word(gate.cols),
            weights: &[gate, up],
            parts: [part, LinearMidPart::default(), LinearMidPart::default()],
            elem: out.elem,
            num_planes: 1,
            gate: Some(act.into()),
        })
    }

    /// Launches a task, in pieces of as many tokens as a launch takes.
    fn run_mid(&self, task: &MidTask<'_>) -> Result<(), BackendError> {
        let piece = MAX_TOKENS as usize;
        for first in (0..task.num_tokens).step_by(piece) {
            self.run_mid_piece(task, first, piece.min(task.num_tokens - first))?;
        }
        Ok(())
    }

    fn run_mid_piece(&self, task: &MidTask<'_>, first: usize, num_tokens: usize) -> Result<(), BackendError> {
        let broken = || self.device.broken("a product that linear_mid does not take");
        let mid = self.mid.as_ref().ok_or_else(broken)?;
        let products = MidShape {
            weight: task.weight,
            gated: task.gate.is_some(),
            m: word(num_tokens),
            outputs: task.parts.map(|part| part.n),
            num_planes: task.num_planes,
        };
        let (variant, cut) = LinearMidVariant::of_products(&products, mid.num_multiprocessors).ok_or_else(broken)?;
        let function = mid.functions.get(&variant).ok_or_else(broken)?;
        let map = |address: u64, rows: usize, box_rows: u32| {
            let shape = MapShape {
                dims: [u64::from(task.cols), rows as u64],
                stride_bytes: u64::from(task.cols) * 2,
                box_dims: [PANEL_COLS, box_rows],
            };
            tensor_map(&self.device, address, task.weight, &shape, "a product")
        };
        let mut w_map = [[0; 16]; MAX_PARTS];
        for (nth, (w_map, matrix)) in w_map.iter_mut().zip(task.weights).enumerate() {
            *w_map = map(matrix.weight.address(), matrix.rows, cut.box_rows[if products.gated { 0 } else { nth }])?;
        }
        let row_bytes = |part: &LinearMidPart| part.y_stride as usize * task.elem.dtype().block_bytes();
        let mut parts = task.parts;
        for (nth, part) in parts.iter_mut().enumerate() {
            part.y += (first * row_bytes(part)) as u64;
            (part.num_shares, part.box_rows, part.pairs) = (cut.shares[nth], cut.box_rows[nth], cut.pairs[nth]);
        }
        let args = LinearMidParams {
            x_map: map(task.x + first as u64 * u64::from(task.cols) * 2, num_tokens, variant.columns())?,
            w_map,
            parts,
            plane_stride: (task.num_tokens * row_bytes(&task.parts[0])) as u64,
            cuts: linear_mid::cuts(task.cols, cut.num_planes),
            m: word(num_tokens),
            num_passes: cut.num_passes,
            num_panels: task.cols.div_ceil(PANEL_COLS),
            tile_rows: cut.tile_rows,
            w_slots: cut.w_slots,
            x_slots: cut.x_slots,
            y_type: activation_type(task.elem),
            activation: task.gate.map_or(0, |gate| gate as u32),
        };
        let launch = variant.launch(&cut);
        mid.launches.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the struct is the kernel's; the op checked the shapes of x, weights, biases and outputs. Before its
        // wait the kernel reads weights only, which nothing writes after they are loaded; it writes, and lets its
        // successor begin, behind it.
        unsafe { self.device.launch_overlapped(function.0, launch.grid, launch.threads, launch.shared_bytes, &args) }
    }
}
