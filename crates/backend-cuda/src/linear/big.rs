//! Products of many tokens by `linear_big.cu`: which of them it takes, and its launches. Callers have checked shapes.
//!
//! Not where results must be deterministic: those are `linear_mid`'s, whatever the number of tokens.

use super::clusters::ClusterKernels;
use super::{Inputs, LinearOps, Matrix, Product, activation_type, first_alike, half_of, word};
use crate::check::Elem;
use crate::device::Device;
use crate::images::Kernels;
use crate::kernels::Half;
use crate::kernels::linear_big::{
    self, LinearBigParams, LinearBigPart, LinearBigVariant, MAX_PARTS, PANEL_COLS, RANKS, STORED_TOKENS, STRIP,
    TILE_TOKENS, Tiles, W_ROWS,
};
use crate::tensor_map::{MapShape, tensor_map};
use pagemill_backend::BackendError;

/// The kernel's forms.
pub(crate) type BigKernels = ClusterKernels<LinearBigVariant>;

impl BigKernels {
    /// `None` on chips that the kernel is not for.
    ///
    /// # Errors
    /// A kernel that this build lacks or the driver refuses.
    pub(crate) fn new(device: &Device, kernels: &Kernels) -> Result<Option<Self>, BackendError> {
        let launch = linear_big::launch(u32::MAX, word(device.num_multiprocessors()) / RANKS);
        Self::load(device, kernels, RANKS, LinearBigVariant::ALL.map(|variant| (variant, variant.name(), launch)))
    }
}

/// Products of one x, as the kernel is told of them.
struct BigTask<'a> {
    variant: LinearBigVariant,
    /// `[T, C]` in the weights' type.
    x: u64,
    num_tokens: usize,
    cols: u32,
    /// `[N, C]` each.
    weights: &'a [Matrix<'a>],
    /// `num_tiles` are filled in at the launch.
    parts: [LinearBigPart; MAX_PARTS],
    elem: Elem,
}

impl LinearOps {
    /// The type of a product's weight, where `linear_big` reads it.
    fn big_weight(&self, matrix: Matrix<'_>) -> Option<Half> {
        let half = half_of(matrix.weight.dtype).filter(|_| self.big.is_some() && !self.deterministic)?;
        linear_big::is_reachable(matrix.weight.address(), matrix.rows, matrix.cols).then_some(half)
    }

    /// By which form `linear_big` takes how many of the first products in one launch.
    pub(super) fn big_launch(&self, num_tokens: usize, products: &[Product<'_>]) -> Option<(LinearBigVariant, usize)> {
        let (half, count) = first_alike(products, MAX_PARTS, |product| self.big_weight(product.matrix))?;
        let outputs = std::array::from_fn(|nth| products[..count].get(nth).map_or(0, |of| word(of.matrix.rows)));
        let variant = LinearBigVariant { weight: half };
        let form = self.big.as_ref()?.form(&variant)?;
        linear_big::is_faster(num_tokens, outputs, form.max_clusters).then_some((variant, count))
    }

    /// Products that [`Self::big_launch`] counted, biases included.
    pub(super) fn big_products(
        &self,
        inputs: &mut Inputs<'_>,
        variant: LinearBigVariant,
        num_tokens: usize,
        products: &[Product<'_>],
    ) -> Result<(), BackendError> {
        let Some(first) = products.first() else { return Ok(()) };
        let mut parts = [LinearBigPart::default(); MAX_PARTS];
        for (part, product) in parts.iter_mut().zip(products) {
            let (bias, n) = (product.bias.unwrap_or(0), word(product.matrix.rows));
            *part = LinearBigPart { bias, y: product.out.address, n, num_tiles: 0 };
        }
        let weights: Vec<Matrix<'_>> = products.iter().map(|product| product.matrix).collect();
        self.run_big(BigTask {
            variant,
            x: inputs.as_type(first.matrix.weight.dtype)?,
            num_tokens,
            cols: word(first.matrix.cols),
            weights: &weights,
            parts,
            elem: first.out.elem,
        })
    }

    fn run_big(&self, task: BigTask<'_>) -> Result<(), BackendError> {
        let broken = || self.device.broken("a product that linear_big does not take");
        let big = self.big.as_ref().ok_or_else(broken)?;
        let BigTask { variant, num_tokens, mut parts, elem, .. } = task;
        let form = big.form(&variant).ok_or_else(broken)?;
        let map = |address: u64, element: Half, [rows, cols]: [u64; 2], box_rows: u32| {
            let shape = MapShape { dims: [cols, rows], stride_bytes: cols * 2, box_dims: [PANEL_COLS, box_rows] };
            tensor_map(&self.device, address, element, &shape, "a product")
        };
        let cols = u64::from(task.cols);
        let mut w_map = [[0; 16]; MAX_PARTS];
        for (w_map, matrix) in w_map.iter_mut().zip(task.weights) {
            let shape = [matrix.rows as u64, cols];
            *w_map = map(matrix.weight.address(), variant.weight, shape, W_ROWS)?;
        }
        let tiles = Tiles::new(word(num_tokens), parts.map(|part| part.n));
        let mut y_map = [[0; 16]; MAX_PARTS];
        for ((part, y_map), num_tiles) in parts.iter_mut().zip(&mut y_map).zip(tiles.of_parts) {
            part.num_tiles = num_tiles;
            if num_tiles > 0 && elem == Elem::Bf16 {
                *y_map = map(part.y, Half::Bf16, [num_tokens as u64, u64::from(part.n)], STORED_TOKENS)?;
            }
        }
        let args = LinearBigParams {
            x_map: map(task.x, variant.weight, [num_tokens as u64, cols], TILE_TOKENS)?,
            w_map,
            y_map,
            parts,
            num_tokens: word(num_tokens),
            num_feature_groups: tiles.feature_groups,
            num_panels: task.cols.div_ceil(PANEL_COLS),
            strip: STRIP,
            y_type: activation_type(elem),
            activation: 0,
        };
        let launch = linear_big::launch(tiles.count(), form.max_clusters);
        big.count_launch();
        // SAFETY: the struct is the kernel's; the op checked the shapes of x, weights, biases and outputs. Before its
        // wait the kernel reads weights only, which nothing writes after they are loaded; it writes, and lets its
        // successor begin, behind it.
        unsafe {
            self.device.launch_overlapped(form.function.0, launch.grid, launch.threads, launch.shared_bytes, &args)
        }
    }
}
