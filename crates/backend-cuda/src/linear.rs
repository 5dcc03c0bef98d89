//! Products with weights, and weights row by row: decides by the stored type and the number of tokens which way a
//! product takes. Callers have checked shapes.
//!
//! | weight | few tokens | some | more |
//! |---|---|---|---|
//! | F16, BF16 | `linear_small.cu` | `linear_mid.cu` where it is faster, else cuBLASLt | `linear_big.cu` or `linear_wide.cu` (gate and up) where it is faster, else cuBLASLt |
//! | F32 | cuBLASLt | cuBLASLt | cuBLASLt |
//! | quantised, repacked at load | see `packed` | see `packed` | see `packed` |
//! | quantised, as stored | widened in registers | widened to bf16 in pieces, then cuBLASLt | the same |
//!
//! Our kernels take up to three products of one input at once. How many tokens are few, some and more `kernels::linear_small`,
//! `kernels::linear_mid`, `kernels::linear_big` and `kernels::linear_wide` say for the first row; 8 are few elsewhere. What they cannot read is cuBLASLt's. A shape
//! that cuBLASLt has no algorithm for, and quantised weights under f32 activations, are read as stored, whatever their
//! number of tokens. Deterministic products of 16-bit weights are `linear_mid`'s for any number of tokens, where the
//! chip has it and the copy engine reads them.

mod big;
mod clusters;
mod mid;
pub(crate) mod packed;
mod small;
mod wide;

use self::packed::PackedKernels;
use crate::check::{Elem, View};
use crate::device::Device;
use crate::images::Kernels;
use crate::kernels::linear_small::{self, LinearParams, LinearVariant};
use crate::kernels::{ActivationType, GateActivation, Half};
use crate::loading::CudaWeight;
use crate::matmul::{Matmul, Shape};
use crate::memory::{CudaBuffer, DeviceMemory, Workspace};
use crate::rows::{Function, RowOps};
use pagemill_backend::{Activation, BackendError, DType};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use self::big::BigKernels;
use self::mid::MidKernels;
use self::wide::WideKernels;

/// `FEW_ROWS` in weights_plain.cu.
const FEW_TOKENS: usize = 8;
/// Output features that one block of the few-token kernel computes: its warps.
const FEATURES_PER_BLOCK: u32 = 8;
/// Widened weights at once.
const WIDENED_BYTES: usize = 64 << 20;
/// Rows of a widened piece are a multiple of this, so that every piece of the output is as well aligned as
/// cuBLASLt likes.
const PIECE_ROWS: usize = 128;

/// `EmbedArgs` in weights_plain.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct EmbedArgs {
    table: u64,
    ids: u64,
    out: u64,
    row_bytes: u64,
    cols: u32,
    scale: f32,
    first_id: u32,
    num_rows: u32,
}

/// Threads for a row of an embedding: with all of it on its way at once, where that is possible.
fn embed_threads(cols: usize) -> u32 {
    word(cols.div_ceil(4)).next_multiple_of(32).clamp(64, 1024)
}

/// Which rows of an embedding are wanted; ids are on the device.
pub(crate) struct Lookup {
    /// `[num_tokens]`.
    pub(crate) ids: u64,
    pub(crate) num_tokens: u32,
    /// The id of the table's first row. Rows of ids that the table lacks become zero.
    pub(crate) first_id: u32,
    pub(crate) scale: f32,
}

/// `WidenArgs` in weights_plain.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct WidenArgs {
    weight: u64,
    out: u64,
    row_bytes: u64,
    cols: u32,
}

/// `FewRowsArgs` in weights_plain.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct FewRowsArgs {
    x: u64,
    weight: u64,
    out: u64,
    row_bytes: u64,
    num_rows: u32,
    cols: u32,
    num_tokens: u32,
}

/// The kernels of one stored type.
struct StoredOps {
    embed: Function,
    widen_f32: Function,
    widen_bf16: Function,
    /// By input, then output.
    few_rows: [[Function; 2]; 2],
}

/// A matrix on the device: `[rows, cols]` of `weight`'s type.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(crate) weight: &'a CudaWeight,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

impl Matrix<'_> {
    fn row_bytes(&self) -> usize {
        self.weight.dtype.row_bytes(self.cols).unwrap_or(0)
    }
}

/// The products of one device.
pub(crate) struct LinearOps {
    device: Arc<Device>,
    workspace: Arc<Workspace>,
    stored: HashMap<DType, StoredOps>,
    small: HashMap<LinearVariant, Function>,
    small_launches: AtomicU64,
    packed: PackedKernels,
    mid: Option<MidKernels>,
    big: Option<BigKernels>,
    wide: Option<WideKernels>,
    matmul: Mutex<Matmul>,
    /// Whether a product's algorithm must not follow from the number of tokens.
    deterministic: bool,
}

/// The input of a call, converted at most once to each type.
struct Inputs<'a> {
    ops: &'a LinearOps,
    rows: &'a RowOps,
    x: View,
    count: usize,
    converted: Vec<(DType, CudaBuffer)>,
}

impl Inputs<'_> {
    /// The address of `x` as `dtype`.
    fn as_type(&mut self, dtype: DType) -> Result<u64, BackendError> {
        if self.x.elem.dtype() == dtype {
            return Ok(self.x.address);
        }
        if let Some((_, held)) = self.converted.iter().find(|(held, _)| *held == dtype) {
            return Ok(held.address());
        }
        let buffer = self.ops.workspace.take(self.count * dtype.block_bytes())?;
        self.rows.convert(self.x, dtype, buffer.address(), self.count)?;
        let address = buffer.address();
        self.converted.push((dtype, buffer));
        Ok(address)
    }
}

/// `act(x · gateᵀ) * (x · upᵀ)` in one launch.
#[derive(Clone, Copy)]
pub(crate) struct GatedProduct<'a> {
    pub(crate) gate: Matrix<'a>,
    pub(crate) up: Matrix<'a>,
    pub(crate) act: Activation,
    /// `[T, N]`.
    pub(crate) out: View,
}

/// The weight's type, where `linear_small` reads it.
fn half_of(dtype: DType) -> Option<Half> {
    match dtype {
        DType::BF16 => Some(Half::Bf16),
        DType::F16 => Some(Half::F16),
        _ => None,
    }
}

/// An output's type, as the kernels are told it.
fn activation_type(elem: Elem) -> u32 {
    match elem {
        Elem::F32 => ActivationType::F32 as u32,
        Elem::Bf16 => ActivationType::Bf16 as u32,
    }
}

/// A product's place.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) matrix: Matrix<'a>,
    /// f32 `[N]`.
    pub(crate) bias: Option<u64>,
    /// `[T, N]`.
    pub(crate) out: View,
}

#[allow(clippy::cast_possible_truncation)] // rows and columns were checked when the weight was loaded
fn word(count: usize) -> u32 {
    count as u32
}

/// The kind of the first product, and how many of the first, at most `most`, are of it and of one output type; `None`:
/// the first is of no kind.
fn first_alike<K: PartialEq>(
    products: &[Product<'_>],
    most: usize,
    kind: impl Fn(&Product<'_>) -> Option<K>,
) -> Option<(K, usize)> {
    let (first, others) = products.split_first()?;
    let first_kind = kind(first)?;
    let joins = |other: &&Product<'_>| other.out.elem == first.out.elem && kind(other).as_ref() == Some(&first_kind);
    let count = 1 + others.iter().take(most - 1).take_while(joins).count();
    Some((first_kind, count))
}

impl LinearOps {
    /// Looks the kernels up and loads cuBLASLt.
    pub(crate) fn new(
        device: &Arc<Device>,
        kernels: &Kernels,
        workspace: &Arc<Workspace>,
        deterministic: bool,
    ) -> Result<Self, BackendError> {
        let mut stored = HashMap::new();
        for dtype in DType::ALL {
            let name = dtype.name();
            let function = |name: String| kernels.get(&name).map(Function);
            let few = |x: &str, out: &str| function(format!("few_rows_{name}_{x}_{out}"));
            let ops = StoredOps {
                embed: function(format!("embed_{name}_f32"))?,
                widen_f32: function(format!("widen_{name}_f32"))?,
                widen_bf16: function(format!("widen_{name}_bf16"))?,
                few_rows: [[few("f32", "f32")?, few("f32", "bf16")?], [few("bf16", "f32")?, few("bf16", "bf16")?]],
            };
            stored.insert(dtype, ops);
        }
        let small = LinearVariant::ALL
            .into_iter()
            .map(|variant| {
                let percent = Some(variant.shared_percent());
                Ok((variant, Function(kernels.get_with_carveout(&variant.name(), 0, percent)?)))
            })
            .collect::<Result<_, BackendError>>()?;
        Ok(Self {
            device: Arc::clone(device),
            workspace: Arc::clone(workspace),
            stored,
            small,
            small_launches: AtomicU64::new(0),
            packed: PackedKernels::new(device, kernels)?,
            mid: MidKernels::new(device, kernels)?,
            big: BigKernels::new(device, kernels)?,
            wide: WideKernels::new(device, kernels)?,
            matmul: Mutex::new(Matmul::new(device, deterministic)?),
            deterministic,
        })
    }

    /// Launches of `linear_small` so far, recorded ones counted once.
    pub(crate) fn small_launches(&self) -> u64 {
        self.small_launches.load(Ordering::Relaxed)
    }

    /// The kernels of quantised weights that are repacked at load.
    pub(crate) fn packed(&self) -> &PackedKernels {
        &self.packed
    }

    /// The same of `linear_mid`.
    pub(crate) fn mid_launches(&self) -> u64 {
        self.mid.as_ref().map_or(0, MidKernels::launches)
    }

    /// The same of `linear_big`.
    pub(crate) fn big_launches(&self) -> u64 {
        self.big.as_ref().map_or(0, BigKernels::launches)
    }

    /// The same of `linear_wide`.
    pub(crate) fn wide_launches(&self) -> u64 {
        self.wide.as_ref().map_or(0, WideKernels::launches)
    }

    /// Bytes that cuBLASLt holds.
    pub(crate) fn len_bytes(&self) -> usize {
        self.matmul.lock().unwrap_or_else(PoisonError::into_inner).len_bytes()
    }

    /// Refuses what no kernel reads.
    pub(crate) fn check_weight(&self, name: &str, dtype: DType, rows: usize, cols: usize) -> Result<(), BackendError> {
        let fits = |count: usize| i32::try_from(count).is_ok();
        if fits(rows) && fits(cols) && self.stored.contains_key(&dtype) {
            return Ok(());
        }
        Err(BackendError::Unsupported {
            device: self.device.label(),
            op: "linear",
            dtype,
            detail: format!("{name}: {rows} x {cols}"),
        })
    }

    fn stored(&self, dtype: DType) -> Result<&StoredOps, BackendError> {
        self.stored.get(&dtype).ok_or_else(|| self.device.broken(format!("a weight of {dtype}")))
    }

    /// `out[t] = table[ids[t] - first_id] * scale` in f32.
    pub(crate) fn embed(&self, table: Matrix<'_>, lookup: &Lookup, out: u64) -> Result<(), BackendError> {
        if let Some(format) = table.weight.packed {
            return self.embed_packed(format, table, lookup, out);
        }
        let args = EmbedArgs {
            table: table.weight.address(),
            ids: lookup.ids,
            out,
            row_bytes: table.row_bytes() as u64,
            cols: word(table.cols),
            scale: lookup.scale,
            first_id: lookup.first_id,
            num_rows: word(table.rows),
        };
        let function = self.stored(table.weight.dtype)?.embed;
        // SAFETY: the struct is the kernel's, which reads the table's own rows only; the op checked the shape of `out`.
        unsafe { self.device.launch(function.0, (lookup.num_tokens, 1), embed_threads(table.cols), 0, &args) }
    }

    /// Widens a float weight to f32.
    pub(crate) fn widened(&self, stored: Matrix<'_>, name: &str) -> Result<CudaWeight, BackendError> {
        let wide = DeviceMemory::take(&self.device, stored.rows * stored.cols * 4, name)?;
        self.widen(stored, 0..stored.rows, DType::F32, wide.address())?;
        // The stored form goes away behind this.
        self.device.synchronize()?;
        Ok(CudaWeight::new(wide, DType::F32))
    }

    /// Rows `rows` of a matrix as `to` (F32 or BF16; repacked ones BF16) at `out`.
    fn widen(&self, matrix: Matrix<'_>, rows: std::ops::Range<usize>, to: DType, out: u64) -> Result<(), BackendError> {
        if let Some(format) = matrix.weight.packed {
            return self.widen_packed(format, matrix, rows, out);
        }
        let row_bytes = matrix.row_bytes() as u64;
        let args = WidenArgs {
            weight: matrix.weight.address() + rows.start as u64 * row_bytes,
            out,
            row_bytes,
            cols: word(matrix.cols),
        };
        let ops = self.stored(matrix.weight.dtype)?;
        let function = if to == DType::F32 { ops.widen_f32 } else { ops.widen_bf16 };
        let across = args.cols.div_ceil(256 * 8).clamp(1, 64);
        // SAFETY: the struct is the kernel's; the rows lie inside the matrix and `out` has room for them.
        unsafe { self.device.launch(function.0, (word(rows.len()), across), 256, 0, &args) }
    }

    /// `out = x · weightᵀ (+ bias)` for every product; `x` `[T, C]`.
    pub(crate) fn run(
        &self,
        rows: &RowOps,
        x: View,
        num_tokens: usize,
        cols: usize,
        products: &[Product<'_>],
    ) -> Result<(), BackendError> {
        let mut inputs = Inputs { ops: self, rows, x, count: num_tokens * cols, converted: Vec::new() };
        let mut rest = products;
        while let [product, others @ ..] = rest {
            if let Some((variant, count)) = self.packed_launch(num_tokens, rest) {
                self.packed_products(&mut inputs, variant, 0..num_tokens, &rest[..count])?;
                rest = &rest[count..];
                continue;
            }
            if let Some((weight, count)) = self.mid_launch(num_tokens, rest) {
                self.mid_products(&mut inputs, weight, num_tokens, &rest[..count])?;
                rest = &rest[count..];
                continue;
            }
            if let Some((variant, count)) = self.big_launch(num_tokens, rest) {
                self.big_products(&mut inputs, variant, num_tokens, &rest[..count])?;
                rest = &rest[count..];
                continue;
            }
            let small = |product: &Product<'_>| self.small_variant(x, num_tokens, product);
            if let Some((variant, count)) = first_alike(rest, linear_small::MAX_PARTS, small) {
                self.small_products(&mut inputs, variant, num_tokens, &rest[..count])?;
                rest = &rest[count..];
                continue;
            }
            rest = others;
            let done = if product.matrix.weight.packed.is_some() {
                self.widened_product(&mut inputs, num_tokens, product)?
            } else if product.matrix.weight.dtype.is_quantized() {
                (num_tokens > FEW_TOKENS || self.deterministic)
                    && x.elem == Elem::Bf16
                    && self.widened_product(&mut inputs, num_tokens, product)?
            } else {
                self.dense_product(&mut inputs, num_tokens, product)?
            };
            if !done && product.matrix.weight.packed.is_some() {
                self.packed_in_eights(&mut inputs, num_tokens, product)?;
            } else if !done {
                self.plain_product(x, num_tokens, product)?;
            }
            if let Some(bias) = product.bias {
                rows.add_bias(bias, product.out, word(num_tokens), word(product.matrix.rows))?;
            }
        }
        Ok(())
    }

    /// Whether [`Self::gated`] takes these weights for so many tokens.
    pub(crate) fn takes_gated(&self, num_tokens: usize, gate: Matrix<'_>, up: Matrix<'_>) -> bool {
        self.packed_gated_variant(num_tokens, gate, up).is_some()
            || self.mid_gated(num_tokens, gate, up).is_some()
            || self.wide_gated(num_tokens, gate, up).is_some()
            || self.gated_variant(num_tokens, gate, up).is_some()
    }

    /// `out = act(x · gateᵀ) * (x · upᵀ)`, of what [`Self::takes_gated`]; `x` `[T, C]`.
    pub(crate) fn gated(
        &self,
        rows: &RowOps,
        x: View,
        num_tokens: usize,
        product: &GatedProduct<'_>,
    ) -> Result<(), BackendError> {
        let GatedProduct { gate, up, act, out } = *product;
        let mut inputs = Inputs { ops: self, rows, x, count: num_tokens * gate.cols, converted: Vec::new() };
        if let Some(variant) = self.packed_gated_variant(num_tokens, gate, up) {
            return self.packed_gated(&mut inputs, variant, num_tokens, product);
        }
        if let Some(weight) = self.mid_gated(num_tokens, gate, up) {
            return self.mid_gated_product(&mut inputs, weight, num_tokens, product);
        }
        if let Some(variant) = self.wide_gated(num_tokens, gate, up) {
            return self.wide_gated_product(&mut inputs, variant, num_tokens, product);
        }
        let variant = self
            .gated_variant(num_tokens, gate, up)
            .filter(|_| linear_small::is_aligned(x.address, gate.weight.address()))
            .ok_or_else(|| self.device.broken("a gated product that no kernel takes"))?;
        let args = LinearParams {
            x: inputs.as_type(gate.weight.dtype)?,
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
        // SAFETY: gate and up were found alike; the op checked the shapes of x and out.
        unsafe { self.launch_small(variant, &[args.n], &args) }
    }

    /// By cuBLASLt; false when it cannot.
    fn dense_product(
        &self,
        inputs: &mut Inputs<'_>,
        num_tokens: usize,
        product: &Product<'_>,
    ) -> Result<bool, BackendError> {
        let (matrix, out) = (product.matrix, product.out);
        let input = matrix.weight.dtype;
        let x = inputs.as_type(input)?;
        let direct = out.elem == Elem::F32 || input == DType::BF16;
        let output = if direct { out.elem.dtype() } else { DType::F32 };
        let shape = Shape { num_tokens, rows: matrix.rows, cols: matrix.cols, out_stride: matrix.rows, input, output };
        if direct {
            return self.multiply(shape, matrix.weight.address(), x, out.address);
        }
        let wide = self.workspace.take(num_tokens * matrix.rows * 4)?;
        let done = self.multiply(shape, matrix.weight.address(), x, wide.address())?;
        if done {
            let wide = View { address: wide.address(), elem: Elem::F32 };
            inputs.rows.convert(wide, out.elem.dtype(), out.address, num_tokens * matrix.rows)?;
        }
        Ok(done)
    }

    /// A quantised weight, widened piece by piece; false when cuBLASLt cannot.
    fn widened_product(
        &self,
        inputs: &mut Inputs<'_>,
        num_tokens: usize,
        product: &Product<'_>,
    ) -> Result<bool, BackendError> {
        let (matrix, out) = (product.matrix, product.out);
        let x = inputs.as_type(DType::BF16)?;
        let rows_per_piece = (WIDENED_BYTES / (matrix.cols * 2) / PIECE_ROWS).max(1) * PIECE_ROWS;
        let piece = self.workspace.take(rows_per_piece.min(matrix.rows) * matrix.cols * 2)?;
        for first in (0..matrix.rows).step_by(rows_per_piece) {
            let rows = rows_per_piece.min(matrix.rows - first);
            self.widen(matrix, first..first + rows, DType::BF16, piece.address())?;
            let shape = Shape {
                num_tokens,
                rows,
                cols: matrix.cols,
                out_stride: matrix.rows,
                input: DType::BF16,
                output: out.elem.dtype(),
            };
            let at = out.address + (first * out.elem.dtype().block_bytes()) as u64;
            if !self.multiply(shape, piece.address(), x, at)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn multiply(&self, shape: Shape, weight: u64, x: u64, out: u64) -> Result<bool, BackendError> {
        let mut matmul = self.matmul.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the callers' buffers have the shape's sizes, and this device's stream orders their uses.
        unsafe { matmul.run(shape, weight, x, out) }
    }

    /// Weights read as they are stored, for a few tokens at a time.
    fn plain_product(&self, x: View, num_tokens: usize, product: &Product<'_>) -> Result<(), BackendError> {
        let (matrix, out) = (product.matrix, product.out);
        let function = self.stored(matrix.weight.dtype)?.few_rows[x.elem as usize][out.elem as usize];
        let (x_row, out_row) =
            (matrix.cols * x.elem.dtype().block_bytes(), matrix.rows * out.elem.dtype().block_bytes());
        for first in (0..num_tokens).step_by(FEW_TOKENS) {
            let args = FewRowsArgs {
                x: x.address + (first * x_row) as u64,
                weight: matrix.weight.address(),
                out: out.address + (first * out_row) as u64,
                row_bytes: matrix.row_bytes() as u64,
                num_rows: word(matrix.rows),
                cols: word(matrix.cols),
                num_tokens: word(FEW_TOKENS.min(num_tokens - first)),
            };
            let blocks = args.num_rows.div_ceil(FEATURES_PER_BLOCK);
            // SAFETY: the struct is the kernel's; the op checked the shapes of x, weight and out.
            unsafe { self.device.launch(function.0, (blocks, 1), FEATURES_PER_BLOCK * 32, 0, &args) }?;
        }
        Ok(())
    }
}
