//! Quantised weights in the layout of `kernels::linear_quant`: repacking at load, widening, embedding rows, and
//! products. Decides which form of `linear_quant.cu` takes a product. Callers have checked shapes.
//!
//! | tokens | way |
//! |---|---|
//! | 1 | `linear_quant_one.cu`, where C is a multiple of 256 |
//! | up to 128 | `linear_quant.cu` |
//! | more | widened to bf16 in pieces, then cuBLASLt |
//!
//! The first two take up to three products of one input and format at once, and gate, up and the activation between
//! them at once. A form that asks for more shared memory than the chip has is left out, and the last way taken
//! instead; where cuBLASLt has no algorithm, eight tokens at a time go the first two. Every chip has the forms for one
//! and eight. Deterministic products all go the last way.

use super::{GatedProduct, Inputs, LinearOps, Lookup, Matrix, Product, activation_type, first_alike, word};
use crate::device::Device;
use crate::images::Kernels;
use crate::kernels::linear_quant::{
    MAX_PARTS, QuantFormat, QuantParams, QuantPart, QuantShape, QuantTask, QuantVariant, TILE_ROWS, tile_launch,
};
use crate::kernels::{GateActivation, Launch};
use crate::rows::Function;
use cudarc::driver::{result, sys};
use pagemill_backend::{BackendError, DType};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Tokens at a time of the last way.
const FEWEST_COLUMNS: usize = 8;
/// Dynamic shared memory that a kernel may have without asking.
const SHARED_BYTES_UNASKED: u32 = 48 << 10;

/// `RepackArgs` in packed_weights.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct RepackArgs {
    stored: u64,
    tiles: u64,
    row_bytes: u64,
    rows: u32,
    cols: u32,
}

/// `WidenPackedArgs` in packed_weights.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct WidenPackedArgs {
    tiles: u64,
    out: u64,
    rows: u32,
    cols: u32,
}

/// `EmbedPackedArgs` in packed_weights.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct EmbedPackedArgs {
    tiles: u64,
    ids: u64,
    out: u64,
    cols: u32,
    scale: f32,
    first_id: u32,
    num_rows: u32,
}

/// The kernels of one format.
struct FormatKernels {
    repack: Function,
    widen: Function,
    embed: Function,
}

/// The kernels of all formats.
pub(crate) struct PackedKernels {
    device: Arc<Device>,
    formats: HashMap<QuantFormat, FormatKernels>,
    /// Those that the chip has shared memory for.
    products: HashMap<QuantVariant, Function>,
    product_launches: AtomicU64,
}

/// Stored rows on the device, on their way into tiles.
#[derive(Clone, Copy)]
pub(crate) struct StoredRows {
    pub(crate) address: u64,
    pub(crate) row_bytes: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

impl PackedKernels {
    /// Looks the kernels up.
    pub(crate) fn new(device: &Arc<Device>, kernels: &Kernels) -> Result<Self, BackendError> {
        let mut formats = HashMap::new();
        for format in QuantFormat::ALL {
            let function = |op: &str| kernels.get(&format!("{op}_{}", format.name())).map(Function);
            let of_format = FormatKernels {
                repack: function("repack")?,
                widen: function("widen_packed")?,
                embed: function("embed_packed")?,
            };
            formats.insert(format, of_format);
        }
        let mut products = HashMap::new();
        for variant in QuantVariant::all() {
            let function = Function(kernels.get(&variant.name())?);
            if allow_shared_bytes(device, function, variant.shared_bytes())? {
                products.insert(variant, function);
            }
        }
        Ok(Self { device: Arc::clone(device), formats, products, product_launches: AtomicU64::new(0) })
    }

    /// Launches of `linear_quant` so far, recorded ones counted once.
    pub(crate) fn product_launches(&self) -> u64 {
        self.product_launches.load(Ordering::Relaxed)
    }

    fn format(&self, format: QuantFormat) -> Result<&FormatKernels, BackendError> {
        self.formats.get(&format).ok_or_else(|| self.device.broken(format!("no kernels for {}", format.name())))
    }

    /// Repacks rows whose first goes to a tile's first; `tiles` is where that tile lies.
    ///
    /// # Safety
    /// `stored` holds what it says, and from `tiles` on there is room for the rows' tiles; only this device's stream
    /// uses either.
    pub(crate) unsafe fn repack(
        &self,
        format: QuantFormat,
        stored: StoredRows,
        tiles: u64,
    ) -> Result<(), BackendError> {
        let StoredRows { address, row_bytes, rows, cols } = stored;
        let args =
            RepackArgs { stored: address, tiles, row_bytes: row_bytes as u64, rows: word(rows), cols: word(cols) };
        let launch = self.tile_launch(rows, cols)?;
        let function = self.format(format)?.repack;
        // SAFETY: the struct is the kernel's; memory is the caller's promise.
        unsafe { self.device.launch(function.0, launch.grid, launch.threads, launch.shared_bytes, &args) }
    }

    fn tile_launch(&self, rows: usize, cols: usize) -> Result<Launch, BackendError> {
        tile_launch(rows, cols).ok_or_else(|| self.device.broken(format!("too many tiles: {rows} x {cols}")))
    }

    /// The form for so many tokens, if there is one and the chip has room for it.
    fn select(&self, matrix: Matrix<'_>, num_tokens: usize, gated: bool) -> Option<QuantVariant> {
        let shape = QuantShape { m: u32::try_from(num_tokens).ok()?, n: word(matrix.rows), c: word(matrix.cols) };
        QuantVariant::select(format_of(matrix)?, shape, gated, word(self.device.num_multiprocessors()))
            .filter(|variant| self.products.contains_key(variant))
    }

    /// # Safety
    /// The addresses of `args` hold what its fields say, on this device's stream; `task` repeats them.
    unsafe fn launch(
        &self,
        variant: QuantVariant,
        task: QuantTask<'_>,
        args: &QuantParams,
    ) -> Result<(), BackendError> {
        let function = self.products.get(&variant).ok_or_else(|| self.device.broken(variant.name()))?;
        let launch = variant.launch(task, word(self.device.num_multiprocessors()));
        self.product_launches.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the struct is the kernel's; memory is the caller's promise. Before its wait the kernel reads weights
        // only, which nothing writes after they are loaded; it writes, and lets its successor begin, behind it.
        unsafe { self.device.launch_overlapped(function.0, launch.grid, launch.threads, launch.shared_bytes, args) }
    }
}

/// Lets `function` have so much dynamic shared memory; false where the chip has not so much.
fn allow_shared_bytes(device: &Device, function: Function, shared_bytes: u32) -> Result<bool, BackendError> {
    if shared_bytes <= SHARED_BYTES_UNASKED {
        return Ok(true);
    }
    let limit = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    device.bind()?;
    // SAFETY: a function of a loaded module.
    let answer = unsafe { result::function::set_function_attribute(function.0, limit, shared_bytes.cast_signed()) };
    match answer {
        Ok(()) => Ok(true),
        Err(error) if error.0 == sys::CUresult::CUDA_ERROR_INVALID_VALUE => Ok(false),
        Err(error) => Err(device.fault("giving a kernel its shared memory", error)),
    }
}

/// The format of a matrix that was repacked.
fn format_of(matrix: Matrix<'_>) -> Option<QuantFormat> {
    matrix.weight.packed
}

impl LinearOps {
    /// The products at the front of `products` that one launch takes, and its form.
    pub(super) fn packed_launch(&self, num_tokens: usize, products: &[Product<'_>]) -> Option<(QuantVariant, usize)> {
        // Forms for different numbers of tokens sum in different orders.
        let of = |product: &Product<'_>| {
            self.packed.select(product.matrix, num_tokens, false).filter(|_| !self.deterministic)
        };
        first_alike(products, MAX_PARTS, of)
    }

    /// At most `MAX_PARTS` products of one format and output type for tokens `tokens`, biases included.
    pub(super) fn packed_products(
        &self,
        inputs: &mut Inputs<'_>,
        variant: QuantVariant,
        tokens: Range<usize>,
        products: &[Product<'_>],
    ) -> Result<(), BackendError> {
        let [first, others @ ..] = products else { return Ok(()) };
        let cols = first.matrix.cols;
        let part = |product: &Product<'_>| {
            let row_bytes = product.matrix.rows * product.out.elem.dtype().block_bytes();
            QuantPart {
                w: product.matrix.weight.address(),
                bias: product.bias.unwrap_or(0),
                y: product.out.address + (tokens.start * row_bytes) as u64,
                n: word(product.matrix.rows),
                y_stride: word(product.matrix.rows),
            }
        };
        let QuantPart { w, bias, y, n, y_stride } = part(first);
        let mut more = [QuantPart::default(); MAX_PARTS - 1];
        for (more, product) in more.iter_mut().zip(others) {
            *more = part(product);
        }
        let x_row_bytes = cols * DType::BF16.block_bytes();
        let args = QuantParams {
            x: inputs.as_type(DType::BF16)? + (tokens.start * x_row_bytes) as u64,
            w,
            w_up: 0,
            bias,
            residual: 0,
            y,
            m: word(tokens.len()),
            n,
            c: word(cols),
            x_stride: word(cols),
            y_stride,
            y_type: activation_type(first.out.elem),
            activation: 0,
            more,
        };
        let task = QuantTask { num_tokens: args.m, outputs: &[n, more[0].n, more[1].n] };
        // SAFETY: the op checked the shapes of x, weights, biases and outputs; the products share x, and one variant
        // means one format. Tensors lie on multiples of 256 bytes, and rows of x are multiples of 64.
        unsafe { self.packed.launch(variant, task, &args) }
    }

    /// A product whatever its number of tokens, eight at a time, without its bias.
    pub(super) fn packed_in_eights(
        &self,
        inputs: &mut Inputs<'_>,
        num_tokens: usize,
        product: &Product<'_>,
    ) -> Result<(), BackendError> {
        let product = Product { bias: None, ..*product };
        for first in (0..num_tokens).step_by(FEWEST_COLUMNS) {
            let tokens = first..num_tokens.min(first + FEWEST_COLUMNS);
            let variant = self
                .packed
                .select(product.matrix, tokens.len(), false)
                .ok_or_else(|| self.device.broken("a product that no kernel takes"))?;
            self.packed_products(inputs, variant, tokens, &[product])?;
        }
        Ok(())
    }

    /// The form that takes gate and up, if one does.
    pub(super) fn packed_gated_variant(
        &self,
        num_tokens: usize,
        gate: Matrix<'_>,
        up: Matrix<'_>,
    ) -> Option<QuantVariant> {
        let alike = (gate.rows, gate.cols, format_of(gate)) == (up.rows, up.cols, format_of(up));
        self.packed.select(gate, num_tokens, true).filter(|_| alike && !self.deterministic)
    }

    /// `out = act(x · gateᵀ) * (x · upᵀ)`.
    pub(super) fn packed_gated(
        &self,
        inputs: &mut Inputs<'_>,
        variant: QuantVariant,
        num_tokens: usize,
        product: &GatedProduct<'_>,
    ) -> Result<(), BackendError> {
        let GatedProduct { gate, up, act, out } = *product;
        let args = QuantParams {
            x: inputs.as_type(DType::BF16)?,
            w: gate.weight.address(),
            w_up: up.weight.address(),
            bias: 0,
            residual: 0,
            y: out.address,
            m: word(num_tokens),
            n: word(gate.rows),
            c: word(gate.cols),
            x_stride: word(gate.cols),
            y_stride: word(gate.rows),
            y_type: activation_type(out.elem),
            activation: GateActivation::from(act) as u32,
            more: Default::default(),
        };
        let task = QuantTask { num_tokens: args.m, outputs: &[args.n] };
        // SAFETY: gate and up were found alike; the op checked the shapes of x and out, which lie as in
        // `packed_products`.
        unsafe { self.packed.launch(variant, task, &args) }
    }

    /// Rows `rows` of a repacked matrix as bf16 at `out`; the first is a tile's first.
    pub(super) fn widen_packed(
        &self,
        format: QuantFormat,
        matrix: Matrix<'_>,
        rows: Range<usize>,
        out: u64,
    ) -> Result<(), BackendError> {
        debug_assert!(rows.start.is_multiple_of(TILE_ROWS));
        let before = format.matrix_bytes(rows.start, matrix.cols).unwrap_or(0) as u64;
        let args = WidenPackedArgs {
            tiles: matrix.weight.address() + before,
            out,
            rows: word(rows.len()),
            cols: word(matrix.cols),
        };
        let launch = self.packed.tile_launch(rows.len(), matrix.cols)?;
        let function = self.packed.format(format)?.widen;
        // SAFETY: the struct is the kernel's; the rows lie inside the matrix and `out` has room for them.
        unsafe { self.device.launch(function.0, launch.grid, launch.threads, launch.shared_bytes, &args) }
    }

    /// `out[t] = table[ids[t] - first_id] * scale` in f32, of a repacked table.
    pub(super) fn embed_packed(
        &self,
        format: QuantFormat,
        table: Matrix<'_>,
        lookup: &Lookup,
        out: u64,
    ) -> Result<(), BackendError> {
        let args = EmbedPackedArgs {
            tiles: table.weight.address(),
            ids: lookup.ids,
            out,
            cols: word(table.cols),
            scale: lookup.scale,
            first_id: lookup.first_id,
            num_rows: word(table.rows),
        };
        let function = self.packed.format(format)?.embed;
        // SAFETY: the struct is the kernel's, which reads the table's own rows only; the op checked the shape of `out`.
        unsafe { self.device.launch(function.0, (lookup.num_tokens, 1), 256, 0, &args) }
    }
}
