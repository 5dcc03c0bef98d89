//! Ops that make rows and use them while they are in the cache: products over normed or gated rows, and heads on
//! their way to attention. Decides what a thread does to a row and how rows are dealt out; the arithmetic is the row
//! kernels' and the quantiser's, so that bits are those of the plain ops.

use super::check::{elements, elements_mut, ensure, ensure_attention, ensure_rope, ensure_shape, ensure_slots};
use super::kernels::RowKernels;
use super::kv_layout::{KvLayer, TILE};
use super::linear::{self, CheckedPart, OutMatrix};
use super::quant::{Activations, QuantizedActivations};
use super::{CpuBackend, MIN_CHUNK_ELEMS, cpu_weight, kv_layer_mut, lock, rope};
use crate::{
    Activation, AttentionParams, Backend, BackendError, DeviceBatch, HeadTransform, KvPool, LinearInput, LinearPart,
    Norm, Qkv, RopeStyle, Tensor,
};
use std::cell::RefCell;
use std::sync::atomic::Ordering;

thread_local! {
    /// The row or head that this thread works on; grows while warming up.
    static ROW_SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Runs `work` with `len` floats of this thread's scratch, contents undefined.
fn with_row_scratch(len: usize, work: impl FnOnce(&mut [f32])) {
    ROW_SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < len {
            scratch.resize(len, 0.0);
        }
        work(&mut scratch[..len]);
    });
}

/// A [`Norm`] with its shape checked.
#[derive(Clone, Copy)]
struct RowNorm<'a> {
    weight: &'a [f32],
    eps: f32,
}

impl<'a> RowNorm<'a> {
    fn check(op: &'static str, norm: Norm<'a>, cols: usize) -> Result<Self, BackendError> {
        ensure_shape(op, "norm weight", norm.weight, 1, cols)?;
        Ok(Self { weight: elements(op, norm.weight)?, eps: norm.eps })
    }

    fn check_any(op: &'static str, norm: Option<Norm<'a>>, cols: usize) -> Result<Option<Self>, BackendError> {
        norm.map(|norm| Self::check(op, norm, cols)).transpose()
    }

    fn apply(self, kernels: &RowKernels, x: &[f32], out: &mut [f32]) {
        (kernels.rms_norm)(x, self.weight, self.eps, out);
    }
}

/// A [`LinearInput`] with its shapes checked, rows of `cols`.
enum RowSource<'a> {
    Plain(&'a [f32]),
    Normed { x: &'a [f32], norm: RowNorm<'a> },
    AddNormed { residual: OutMatrix, x: &'a [f32], x_norm: Option<RowNorm<'a>>, norm: RowNorm<'a> },
    Gated { gate: &'a [f32], up: &'a [f32], act: Activation },
}

impl<'a> RowSource<'a> {
    fn check(op: &'static str, input: LinearInput<'a>) -> Result<Self, BackendError> {
        let (rows, cols) = (input.rows(), input.cols());
        Ok(match input {
            LinearInput::Plain(x) => RowSource::Plain(elements(op, x)?),
            LinearInput::Normed { x, norm } => {
                RowSource::Normed { x: elements(op, x)?, norm: RowNorm::check(op, norm, cols)? }
            }
            LinearInput::AddNormed { residual, addend, norm } => {
                ensure_shape(op, "addend", addend.x, rows, cols)?;
                RowSource::AddNormed {
                    residual: OutMatrix::new(elements_mut(op, residual)?, cols),
                    x: elements(op, addend.x)?,
                    x_norm: RowNorm::check_any(op, addend.norm, cols)?,
                    norm: RowNorm::check(op, norm, cols)?,
                }
            }
            LinearInput::Gated { gate, up, act } => {
                ensure_shape(op, "up", up, rows, cols)?;
                RowSource::Gated { gate: elements(op, gate)?, up: elements(op, up)?, act }
            }
        })
    }

    /// The rows, where they lie in memory as they are.
    fn plain(&self) -> Option<&'a [f32]> {
        match self {
            RowSource::Plain(x) => Some(x),
            _ => None,
        }
    }

    /// Makes row `row` in `out` `[cols]`.
    ///
    /// # Safety
    /// Nobody else touches this row of the residual now; called once a row.
    unsafe fn make(&self, kernels: &RowKernels, row: usize, out: &mut [f32]) {
        let cols = out.len();
        let of = |x: &'a [f32]| &x[row * cols..(row + 1) * cols];
        match *self {
            RowSource::Plain(x) => out.copy_from_slice(of(x)),
            RowSource::Normed { x, norm } => norm.apply(kernels, of(x), out),
            RowSource::AddNormed { residual, x, x_norm, norm } => {
                // SAFETY: inside the residual, whose shape is that of `x`; unshared by contract.
                let residual = unsafe { residual.row_mut(row, 0..cols) };
                match x_norm {
                    Some(x_norm) => {
                        x_norm.apply(kernels, of(x), out);
                        (kernels.add)(residual, out);
                    }
                    None => (kernels.add)(residual, of(x)),
                }
                norm.apply(kernels, residual, out);
            }
            RowSource::Gated { gate, up, act } => (kernels.gated_activation)(act, of(gate), of(up), out),
        }
    }
}

impl CpuBackend {
    /// Makes the rows of `input`, as f32, quantised or both, whichever the parts' weights read; then the products.
    pub(super) fn run_linear(
        &self,
        op: &'static str,
        input: LinearInput<'_>,
        parts: &mut [LinearPart<'_>],
    ) -> Result<(), BackendError> {
        let (num_tokens, cols) = (input.rows(), input.cols());
        let (mut any_quantized, mut any_float) = (false, false);
        for part in &*parts {
            let rows = part.weight.rows();
            ensure(op, part.weight.cols() == cols, || {
                (format!("x with {} columns for {}", part.weight.cols(), part.weight.name()), cols.to_string())
            })?;
            ensure_shape(op, "out", part.out, num_tokens, rows)?;
            part.bias.map_or(Ok(()), |bias| ensure_shape(op, "bias", bias, 1, rows))?;
            let wants_quantized = cpu_weight(op, part.weight)?.wants_quantized();
            any_quantized |= wants_quantized;
            any_float |= !wants_quantized;
        }
        let source = RowSource::check(op, input)?;
        let mut made = match any_float && source.plain().is_none() {
            true => Some(self.temp(num_tokens, cols)?),
            false => None,
        };
        let quantized = &mut *lock(&self.quantized);
        if any_quantized {
            quantized.prepare(num_tokens, cols)?;
        }
        if self.rehearsing.load(Ordering::Relaxed) || num_tokens == 0 {
            return Ok(());
        }
        let floats = made.as_mut().map(|made| elements_mut(op, made)).transpose()?;
        self.make_rows(&source, num_tokens, cols, floats, any_quantized.then_some(quantized))?;
        let x = match &made {
            Some(made) => elements(op, made)?,
            None => source.plain().unwrap_or(&[]),
        };
        for parts in parts.chunks_mut(linear::MAX_PARTS) {
            let mut checked: [Option<CheckedPart<'_>>; linear::MAX_PARTS] = [const { None }; linear::MAX_PARTS];
            for (checked, part) in checked.iter_mut().zip(parts) {
                let rows = part.weight.rows();
                *checked = Some(CheckedPart {
                    weight: cpu_weight(op, part.weight)?,
                    rows,
                    bias: part.bias.map(|bias| elements(op, bias)).transpose()?,
                    out: OutMatrix::new(elements_mut(op, part.out)?, rows),
                });
            }
            linear::run(&self.pool, Activations { x, quantized }, num_tokens, cols, &checked)?;
        }
        Ok(())
    }

    /// Makes all rows into `floats` `[T, C]`, if it is wanted, and into `quantized`, if that is; what already lies
    /// where it is read from is left there.
    fn make_rows(
        &self,
        source: &RowSource<'_>,
        num_tokens: usize,
        cols: usize,
        floats: Option<&mut [f32]>,
        quantized: Option<&QuantizedActivations>,
    ) -> Result<(), BackendError> {
        if floats.is_none() && quantized.is_none() {
            // Nobody reads the rows, but a sum into the residual is still due.
            if !matches!(source, RowSource::AddNormed { .. }) {
                return Ok(());
            }
        }
        let floats = floats.map(|floats| OutMatrix::new(floats, cols));
        let rows_per_chunk = self.rows_per_chunk(num_tokens, cols);
        self.pool.run(num_tokens.div_ceil(rows_per_chunk), &|chunk| {
            let rows = chunk * rows_per_chunk..((chunk + 1) * rows_per_chunk).min(num_tokens);
            with_row_scratch(cols, |scratch| {
                for row in rows {
                    // SAFETY: chunks are disjoint row ranges inside all of these matrices, and readers only come
                    // after this job.
                    unsafe {
                        let made = match (source.plain(), floats) {
                            (Some(x), _) => &x[row * cols..(row + 1) * cols],
                            (None, Some(floats)) => {
                                let out = floats.row_mut(row, 0..cols);
                                source.make(self.rows, row, out);
                                out
                            }
                            (None, None) => {
                                source.make(self.rows, row, scratch);
                                &*scratch
                            }
                        };
                        if let Some(quantized) = quantized {
                            quantized.quantize_row(row, made);
                        }
                    }
                }
            });
        })
    }

    /// See [`crate::Backend::rope_kv_write`].
    pub(super) fn run_rope_kv_write(
        &self,
        qkv: Qkv,
        transform: &HeadTransform<'_>,
        params: &AttentionParams,
        batch: &DeviceBatch,
        kv: &mut KvPool,
    ) -> Result<Tensor, BackendError> {
        const OP: &str = "rope_kv_write";
        let Qkv { mut q, k, v } = qkv;
        ensure_attention(OP, params, batch, kv.spec())?;
        let &AttentionParams { num_heads, num_kv_heads, head_dim, .. } = params;
        let slots = &batch.layout.groups[params.group_idx].slot_mapping;
        ensure_slots(OP, slots, kv.spec())?;
        ensure_rope(OP, num_heads * head_dim, head_dim, transform.rope)?;
        ensure_shape(OP, "q", &q, slots.len(), num_heads * head_dim)?;
        ensure_shape(OP, "k", &k, slots.len(), num_kv_heads * head_dim)?;
        ensure_shape(OP, "v", &v, slots.len(), num_kv_heads * head_dim)?;
        let positions = &batch.layout.positions;
        ensure(OP, positions.len() == slots.len(), || {
            (format!("{} positions", slots.len()), positions.len().to_string())
        })?;
        let mut angles = lock(&self.angles);
        let task = HeadTask {
            kernels: self.rows,
            q: OutMatrix::new(elements_mut(OP, &mut q)?, num_heads * head_dim),
            k: elements(OP, &k)?,
            v: elements(OP, &v)?,
            q_norm: RowNorm::check_any(OP, transform.q_norm, head_dim)?,
            k_norm: RowNorm::check_any(OP, transform.k_norm, head_dim)?,
            angles: angles.get(&self.pool, transform.rope, positions)?,
            num_angles: 2 * transform.rope.inv_freq.len(),
            style: transform.rope.style,
            head_dim,
            slots,
            cache: kv_layer_mut(OP, kv, params.layer_in_group)?,
        };
        let elems = slots.len() * (num_heads + 2 * num_kv_heads) * head_dim;
        let num_chunks = (elems / MIN_CHUNK_ELEMS).clamp(1, self.pool.num_threads() * 4);
        // Split by K tile: a tile's cache lines have one writer, and even two tokens that name one slot (a fault of
        // the caller) are written by one thread, one after the other.
        self.pool.run(num_chunks, &|chunk| {
            with_row_scratch(head_dim, |scratch| {
                for (token, &slot) in slots.iter().enumerate() {
                    if slot as usize / TILE % num_chunks == chunk {
                        // SAFETY: a token, and a slot, belong to one chunk; slots were checked and the pool is
                        // borrowed mutably.
                        unsafe { task.run_token(token, scratch) };
                    }
                }
            });
        })?;
        Ok(q)
    }
}

/// One call of `rope_kv_write` with everything checked.
struct HeadTask<'a> {
    kernels: &'static RowKernels,
    /// `[T, H * E]`.
    q: OutMatrix,
    /// `[T, K * E]`.
    k: &'a [f32],
    /// `[T, K * E]`.
    v: &'a [f32],
    q_norm: Option<RowNorm<'a>>,
    k_norm: Option<RowNorm<'a>>,
    /// `[T, num_angles]`: cosines, then sines.
    angles: &'a [f32],
    num_angles: usize,
    style: RopeStyle,
    head_dim: usize,
    /// `[T]`.
    slots: &'a [u32],
    cache: KvLayer,
}

impl HeadTask<'_> {
    /// All heads of one token. `scratch` holds a head.
    ///
    /// # Safety
    /// Nobody else touches this token's q or its slot now; the slot is inside the pool.
    unsafe fn run_token(&self, token: usize, scratch: &mut [f32]) {
        let head_dim = self.head_dim;
        let angles = &self.angles[token * self.num_angles..(token + 1) * self.num_angles];
        let q_cols = self.q.row_stride();
        // SAFETY: the token is inside q, and unshared by contract.
        let q = unsafe { self.q.row_mut(token, 0..q_cols) };
        for head in q.chunks_exact_mut(head_dim) {
            if let Some(norm) = self.q_norm {
                norm.apply(self.kernels, head, scratch);
                head.copy_from_slice(scratch);
            }
            rope::rotate(self.kernels, self.style, angles, head);
        }
        let kv_cols = self.k.len() / self.slots.len();
        let kv = token * kv_cols..(token + 1) * kv_cols;
        let heads = self.k[kv.clone()].chunks_exact(head_dim).zip(self.v[kv].chunks_exact(head_dim));
        for (kv_head, (k, v)) in heads.enumerate() {
            match self.k_norm {
                Some(norm) => norm.apply(self.kernels, k, scratch),
                None => scratch.copy_from_slice(k),
            }
            rope::rotate(self.kernels, self.style, angles, scratch);
            // SAFETY: the cache was made for writing; the slot is inside it and unshared by contract.
            unsafe { self.cache.write_head(self.slots[token] as usize, kv_head, scratch, v, self.kernels.to_f16) };
        }
    }
}
