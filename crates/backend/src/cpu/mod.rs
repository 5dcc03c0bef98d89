//! The CPU device: a thread pool, recycled memory, and one kernel table picked at run time. This file
//! checks what an op is given and hands it on; the arithmetic is in the files below. It does not know
//! models, requests or schedules, and reads no environment variables.
//!
//! Every result row depends on its own input row only and is summed in a fixed order, so that
//! threads, batch and chunking never change a bit (see [`crate::ops`]).

#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
// spans are for vector kernels only
mod attention;
#[doc(hidden)]
pub mod ceilings;
mod check;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
// so is the choice of instruction set
mod float_linear;
mod fused;
mod host;
mod isa;
mod kernels;
mod kv_layout;
mod linear;
mod memory;
mod pool;
mod quant;
mod reference;
mod rendezvous;
mod rope;
mod shared_collective;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx2_attention;
#[cfg(target_arch = "x86_64")]
mod avx2_linear;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_attention;
#[cfg(target_arch = "x86_64")]
mod avx512_linear;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "aarch64")]
mod neon_attention;
#[cfg(target_arch = "aarch64")]
mod neon_linear;

pub use check::{elements as host_elements, elements_mut as host_elements_mut};
pub use isa::Isa;
#[doc(hidden)]
pub use quant::bench_access;
pub use shared_collective::SharedCollective;

use crate::{
    Activation, AttentionParams, Backend, BackendError, BatchLayout, BlockCopy, CheckedLayout, DType, DeviceBatch,
    DeviceBuffer, DeviceInfo, HeadTransform, KvPool, KvPoolSpec, LinearInput, LinearPart, Qkv, ReadRows, RopeTable,
    Tensor, Weight, WeightDesc,
};
use attention::{AttentionScratch, AttentionTask};
use check::{
    cpu_buffer, elements, elements_mut, ensure, ensure_attention, ensure_rope, ensure_shape, ensure_slots, shape_error,
};
use float_linear::FloatWeight;
use kernels::RowKernels;
use kv_layout::KvLayer;
use linear::{CpuWeight, OutMatrix};
use memory::{AlignedBytes, CpuBuffer, WeightMemory, Workspace, checked_bytes};
use pool::ThreadPool;
use quant::{PackedWeight, QuantizedActivations};
use rope::AngleTables;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes read at a time from a weight's file.
const LOAD_PIECE_BYTES: usize = 8 << 20;
/// The same of a quantised weight, packed piece by piece.
const PACK_PIECE_BYTES: usize = 1 << 20;
/// Elements of a row-wise op that one chunk handles at least: below this, threads cost more than
/// they bring.
const MIN_CHUNK_ELEMS: usize = 4 << 10;

/// How activations enter products with quantised weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationMode {
    /// Rounded to int8 in small blocks: int8 × int8 → int32 → f32. The fast way.
    #[default]
    Int8,
    /// Kept in f32, weights widened exactly: slower, for accuracy comparisons.
    F32,
}

/// What a [`CpuBackend`] is made from.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuConfig {
    /// Compute threads, the calling one among them. Default: the cores this process may use
    /// (affinity and cgroup quota respected).
    pub num_threads: Option<usize>,
    /// How activations enter products with quantised weights.
    pub activations: ActivationMode,
    /// Kernels to use instead of the best of this machine.
    pub isa: Option<Isa>,
}

/// The CPU as a device.
pub struct CpuBackend {
    isa: Isa,
    activations: ActivationMode,
    pool: ThreadPool,
    rows: &'static RowKernels,
    workspace: Arc<Workspace>,
    weights: WeightMemory,
    /// Part of a weight as it is stored, while it is loaded.
    staging: Mutex<Vec<u8>>,
    quantized: Mutex<QuantizedActivations>,
    attention: Mutex<AttentionScratch>,
    angles: Mutex<AngleTables>,
    /// See [`Backend::rehearse`].
    rehearsing: AtomicBool,
}

impl CpuBackend {
    /// Picks the kernels and starts the threads.
    ///
    /// # Errors
    /// [`BackendError::Device`] when the machine lacks the instruction set asked for, no thread was
    /// asked for, or a thread cannot be started.
    pub fn new(config: CpuConfig) -> Result<Self, BackendError> {
        let isa = config.isa.unwrap_or_else(Isa::detect);
        let refuse = |detail: String| Err(BackendError::Device { device: "cpu".into(), detail });
        if !isa.is_available() {
            return refuse(format!("this machine lacks {}; its best is {}", isa.name(), Isa::detect().name()));
        }
        let num_threads = config.num_threads.unwrap_or_else(host::usable_cores);
        if num_threads == 0 {
            return refuse("at least one compute thread is needed".into());
        }
        Ok(Self {
            isa,
            activations: config.activations,
            pool: ThreadPool::new(num_threads)?,
            rows: kernels::row_kernels(isa),
            workspace: Arc::default(),
            weights: WeightMemory::default(),
            staging: Mutex::default(),
            quantized: Mutex::default(),
            attention: Mutex::default(),
            angles: Mutex::default(),
            rehearsing: AtomicBool::new(false),
        })
    }

    /// The instruction set in use.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    fn buffer(&self, what: &str, bytes: usize) -> Result<Box<dyn DeviceBuffer>, BackendError> {
        Ok(Box::new(CpuBuffer::owned(AlignedBytes::zeroed(bytes, what)?)))
    }

    /// Reads a quantised weight in pieces that stay in a second-level cache until they are packed.
    fn load_packed(&self, desc: &WeightDesc, read: &mut ReadRows<'_>) -> Result<PackedWeight, BackendError> {
        let mut weight = PackedWeight::new(&self.weights, desc, self.isa, self.activations)?;
        let (row_bytes, row_tile) = (weight.row_bytes(), weight.row_tile());
        let rows_per_piece = (PACK_PIECE_BYTES / (row_bytes * row_tile)).max(1) * row_tile;
        let mut piece = lock(&self.staging);
        for first in (0..desc.rows).step_by(rows_per_piece) {
            let rows = rows_per_piece.min(desc.rows - first);
            piece.resize(rows * row_bytes, 0);
            read_rows(desc, read, first, row_bytes, &mut piece)?;
            weight.pack(&self.pool, first, &piece)?;
        }
        Ok(weight)
    }

    /// Rows a chunk of a row-wise op takes.
    fn rows_per_chunk(&self, rows: usize, cols: usize) -> usize {
        let even = rows.div_ceil(self.pool.num_threads() * 4);
        even.max(MIN_CHUNK_ELEMS / cols.max(1)).max(1)
    }

    /// Calls `task(first_row, rows)` over pieces of `out` `[rows, cols]` on all threads.
    fn by_rows(
        &self,
        out: &mut [f32],
        cols: usize,
        task: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) -> Result<(), BackendError> {
        let rows = out.len() / cols.max(1);
        self.pool.run_rows(out, cols, self.rows_per_chunk(rows, cols), task)
    }
}

/// Fills `piece` with rows of `row_bytes` from `first` on.
fn read_rows(
    desc: &WeightDesc,
    read: &mut ReadRows<'_>,
    first: usize,
    row_bytes: usize,
    piece: &mut [u8],
) -> Result<(), BackendError> {
    read(first, piece.len() / row_bytes.max(1), piece)
        .map_err(|source| BackendError::WeightRead { name: desc.name.clone(), source })
}

/// Locks what only a panicking op could have poisoned; its contents are scratch.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn cpu_weight<'a>(op: &'static str, weight: &'a Weight) -> Result<&'a CpuWeight, BackendError> {
    weight
        .buffer()
        .as_any()
        .downcast_ref()
        .ok_or_else(|| shape_error(op, "a weight of the cpu device", format!("{} of another device", weight.name())))
}

impl Backend for CpuBackend {
    fn info(&self) -> DeviceInfo {
        let num_threads = self.pool.num_threads();
        let plural = if num_threads == 1 { "thread" } else { "threads" };
        DeviceInfo {
            description: format!("cpu ({}, {num_threads} {plural})", self.isa.name()),
            isa: self.isa.name(),
            num_units: num_threads,
            memory_available_bytes: host::available_memory_bytes(),
            shares_memory: true,
        }
    }

    fn load_weight(&self, desc: WeightDesc, read: &mut ReadRows<'_>) -> Result<Weight, BackendError> {
        let total = checked_bytes(&desc.name, desc.dtype, desc.rows, desc.cols)?;
        let weight = if desc.dtype.is_quantized() {
            self.pool.begin_forward();
            let packed = self.load_packed(&desc, read);
            self.pool.end_forward();
            CpuWeight::Quantized(packed?)
        } else {
            let mut stored = AlignedBytes::zeroed(total, &desc.name)?;
            let row_bytes = desc.dtype.row_bytes(desc.cols).unwrap_or(0);
            let rows_per_piece = (LOAD_PIECE_BYTES / row_bytes.max(1)).max(1);
            let pieces = stored.as_mut_slice().chunks_mut((rows_per_piece * row_bytes).max(1));
            for (piece_idx, piece) in pieces.enumerate() {
                read_rows(&desc, read, piece_idx * rows_per_piece, row_bytes, piece)?;
            }
            CpuWeight::Float(FloatWeight::new(desc.dtype, desc.cols, stored, self.isa))
        };
        let WeightDesc { name, dtype, rows, cols } = desc;
        Ok(Weight::from_buffer(name, rows, cols, dtype, Box::new(weight)))
    }

    fn load_vector(&self, name: &str, data: &[f32]) -> Result<Tensor, BackendError> {
        let buffer = self.buffer(name, checked_bytes(name, DType::F32, 1, data.len())?)?;
        let mut tensor = Tensor::from_buffer(1, data.len(), DType::F32, buffer);
        elements_mut("load_vector", &mut tensor)?.copy_from_slice(data);
        Ok(tensor)
    }

    fn temp(&self, rows: usize, cols: usize) -> Result<Tensor, BackendError> {
        let buffer = self.workspace.take(checked_bytes("temporary", DType::F32, rows, cols)?)?;
        Ok(Tensor::from_buffer(rows, cols, DType::F32, Box::new(buffer)))
    }

    fn rehearse(&self, on: bool) {
        self.rehearsing.store(on, Ordering::Relaxed);
    }

    fn workspace(&self) -> (usize, u64) {
        let (temporaries, growths) = self.workspace.held();
        let scratch =
            lock(&self.quantized).len_bytes() + lock(&self.attention).len_bytes() + lock(&self.angles).len_bytes();
        (temporaries + scratch, growths)
    }

    fn alloc_kv(&self, spec: &KvPoolSpec) -> Result<KvPool, BackendError> {
        let cols = [spec.block_size, spec.num_kv_heads, spec.head_dim]
            .into_iter()
            .try_fold(2_usize, usize::checked_mul)
            .ok_or_else(|| shape_error("alloc_kv", "a block that fits in memory", format!("{spec:?}")))?;
        let bytes = checked_bytes("KV pool", spec.dtype, spec.num_blocks, cols)?;
        let layers =
            (0..spec.layers_per_group).map(|_| self.buffer("the KV pool", bytes)).collect::<Result<Vec<_>, _>>()?;
        let mut pool = KvPool::from_buffers(spec.clone(), layers);
        for layer_idx in 0..spec.layers_per_group {
            kv_layer_mut("alloc_kv", &mut pool, layer_idx)?;
        }
        Ok(pool)
    }

    fn copy_blocks(&self, kv: &mut KvPool, copies: &[BlockCopy]) -> Result<(), BackendError> {
        const OP: &str = "copy_blocks";
        let num_blocks = kv.spec().num_blocks;
        for copy in copies {
            ensure(OP, (copy.src.max(copy.dst) as usize) < num_blocks, || {
                (format!("blocks below {num_blocks}"), format!("{} to {}", copy.src, copy.dst))
            })?;
        }
        for layer_idx in 0..kv.spec().layers_per_group {
            let layer = kv_layer_mut(OP, kv, layer_idx)?;
            for copy in copies {
                // SAFETY: the pool is borrowed mutably and both blocks were checked.
                unsafe { layer.copy_block(copy.src as usize, copy.dst as usize) };
            }
        }
        Ok(())
    }

    fn upload_batch(&self, layout: BatchLayout, kv: &KvPoolSpec) -> Result<DeviceBatch, BackendError> {
        self.upload_checked(CheckedLayout::new(layout, kv)?, kv)
    }

    fn upload_checked(&self, layout: CheckedLayout, kv: &KvPoolSpec) -> Result<DeviceBatch, BackendError> {
        Ok(DeviceBatch { layout: layout.into_layout_for(kv)?, device: None })
    }

    fn begin_forward(&self) {
        self.pool.begin_forward();
    }

    fn end_forward(&self) {
        self.pool.end_forward();
    }

    fn embed(&self, table: &Weight, ids: &[u32], scale: f32, out: &mut Tensor) -> Result<(), BackendError> {
        const OP: &str = "embed";
        ensure_shape(OP, "out", out, ids.len(), table.cols())?;
        if let Some(id) = ids.iter().find(|&&id| id as usize >= table.rows()) {
            return Err(shape_error(OP, format!("token ids below {}", table.rows()), id.to_string()));
        }
        self.embed_part(table, 0, ids, scale, out)
    }

    fn embed_part(
        &self,
        table: &Weight,
        first_id: usize,
        ids: &[u32],
        scale: f32,
        out: &mut Tensor,
    ) -> Result<(), BackendError> {
        const OP: &str = "embed_part";
        ensure_shape(OP, "out", out, ids.len(), table.cols())?;
        let (cols, weight) = (table.cols(), cpu_weight(OP, table)?);
        self.by_rows(elements_mut(OP, out)?, cols, &|first, rows| {
            for (row, &id) in rows.chunks_exact_mut(cols).zip(&ids[first..]) {
                match (id as usize).checked_sub(first_id).filter(|&at| at < table.rows()) {
                    Some(at) => weight.dequantize_row(at, row),
                    None => row.fill(0.0),
                }
                if scale != 1.0 {
                    (self.rows.scale)(row, scale);
                }
            }
        })
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32, out: &mut Tensor) -> Result<(), BackendError> {
        const OP: &str = "rms_norm";
        let cols = x.cols();
        ensure_shape(OP, "weight", weight, 1, cols)?;
        ensure_shape(OP, "out", out, x.rows(), cols)?;
        let (x, weight) = (elements(OP, x)?, elements(OP, weight)?);
        self.by_rows(elements_mut(OP, out)?, cols, &|first, rows| {
            for (out, x) in rows.chunks_exact_mut(cols).zip(x[first * cols..].chunks_exact(cols)) {
                (self.rows.rms_norm)(x, weight, eps, out);
            }
        })
    }

    fn add_rms_norm(
        &self,
        residual: &mut Tensor,
        x: &Tensor,
        weight: &Tensor,
        eps: f32,
        out: &mut Tensor,
    ) -> Result<(), BackendError> {
        const OP: &str = "add_rms_norm";
        let (num_rows, cols) = (x.rows(), x.cols());
        ensure_shape(OP, "residual", residual, num_rows, cols)?;
        ensure_shape(OP, "weight", weight, 1, cols)?;
        ensure_shape(OP, "out", out, num_rows, cols)?;
        let (x, weight) = (elements(OP, x)?, elements(OP, weight)?);
        let out = OutMatrix::new(elements_mut(OP, out)?, cols);
        self.by_rows(elements_mut(OP, residual)?, cols, &|first, rows| {
            for (row, residual) in rows.chunks_exact_mut(cols).enumerate() {
                let row = first + row;
                (self.rows.add)(residual, &x[row * cols..(row + 1) * cols]);
                // SAFETY: chunks own disjoint rows, and `out` has the shape of `residual`.
                (self.rows.rms_norm)(residual, weight, eps, unsafe { out.row_mut(row, 0..cols) });
            }
        })
    }

    fn add(&self, residual: &mut Tensor, x: &Tensor) -> Result<(), BackendError> {
        const OP: &str = "add";
        let cols = x.cols();
        ensure_shape(OP, "residual", residual, x.rows(), cols)?;
        let x = elements(OP, x)?;
        self.by_rows(elements_mut(OP, residual)?, cols, &|first, rows| {
            (self.rows.add)(rows, &x[first * cols..first * cols + rows.len()]);
        })
    }

    fn linear(&self, x: &Tensor, parts: &mut [LinearPart<'_>]) -> Result<(), BackendError> {
        self.run_linear("linear", LinearInput::Plain(x), parts)
    }

    fn fused_linear(&self, input: LinearInput<'_>, parts: &mut [LinearPart<'_>]) -> Result<(), BackendError> {
        self.run_linear("fused_linear", input, parts)
    }

    fn rope(
        &self,
        x: &mut Tensor,
        head_dim: usize,
        table: &RopeTable,
        batch: &DeviceBatch,
    ) -> Result<(), BackendError> {
        const OP: &str = "rope";
        let (cols, pairs) = (x.cols(), table.inv_freq.len());
        ensure_rope(OP, cols, head_dim, table)?;
        ensure_shape(OP, "x", x, batch.layout.num_tokens(), cols)?;
        let x = elements_mut(OP, x)?;
        if pairs == 0 {
            return Ok(());
        }
        let mut angles = lock(&self.angles);
        let angles = angles.get(&self.pool, table, &batch.layout.positions)?;
        self.by_rows(x, cols, &|first, rows| {
            for (row, angles) in rows.chunks_exact_mut(cols).zip(angles[first * 2 * pairs..].chunks_exact(2 * pairs)) {
                row.chunks_exact_mut(head_dim).for_each(|head| rope::rotate(self.rows, table.style, angles, head));
            }
        })
    }

    fn kv_write(
        &self,
        k: &Tensor,
        v: &Tensor,
        params: &AttentionParams,
        batch: &DeviceBatch,
        kv: &mut KvPool,
    ) -> Result<(), BackendError> {
        const OP: &str = "kv_write";
        ensure_attention(OP, params, batch, kv.spec())?;
        let slots = &batch.layout.groups[params.group_idx].slot_mapping;
        let cols = params.num_kv_heads * params.head_dim;
        ensure_shape(OP, "k", k, slots.len(), cols)?;
        ensure_shape(OP, "v", v, slots.len(), cols)?;
        ensure_slots(OP, slots, kv.spec())?;
        let (k, v) = (elements(OP, k)?, elements(OP, v)?);
        let layer = kv_layer_mut(OP, kv, params.layer_in_group)?;
        // Split by head and not by token: even two tokens that name one slot (a fault of the caller)
        // are then written by one thread, one after the other.
        let head_dim = params.head_dim;
        let heads_per_chunk = if slots.len() * cols < MIN_CHUNK_ELEMS { params.num_kv_heads } else { 1 };
        self.pool.run(params.num_kv_heads / heads_per_chunk, &|chunk| {
            for ((&slot, k), v) in slots.iter().zip(k.chunks_exact(cols)).zip(v.chunks_exact(cols)) {
                for kv_head in chunk * heads_per_chunk..(chunk + 1) * heads_per_chunk {
                    let head = kv_head * head_dim..(kv_head + 1) * head_dim;
                    // SAFETY: the pool is borrowed mutably, the slot was checked, and chunks write
                    // different heads.
                    unsafe {
                        layer.write_head(slot as usize, kv_head, &k[head.clone()], &v[head], self.rows.to_f16);
                    }
                }
            }
        })
    }

    fn rope_kv_write(
        &self,
        qkv: Qkv,
        transform: &HeadTransform<'_>,
        params: &AttentionParams,
        batch: &DeviceBatch,
        kv: &mut KvPool,
    ) -> Result<Tensor, BackendError> {
        self.run_rope_kv_write(qkv, transform, params, batch, kv)
    }

    fn attention(
        &self,
        q: &Tensor,
        params: &AttentionParams,
        batch: &DeviceBatch,
        kv: &KvPool,
        out: &mut Tensor,
    ) -> Result<(), BackendError> {
        const OP: &str = "attention";
        ensure_attention(OP, params, batch, kv.spec())?;
        let cols = params.num_heads * params.head_dim;
        let num_tokens = batch.layout.num_tokens();
        ensure_shape(OP, "q", q, num_tokens, cols)?;
        ensure_shape(OP, "out", out, num_tokens, cols)?;
        let bytes = cpu_buffer(OP, kv.layer(params.layer_in_group))?.bytes();
        let task = AttentionTask {
            q: elements(OP, q)?,
            params,
            sinks: params.sinks.as_deref().map(|sinks| elements(OP, sinks)).transpose()?,
            layout: &batch.layout,
            group: &batch.layout.groups[params.group_idx],
            kv: KvLayer::new(OP, kv.spec(), bytes)?,
            out: OutMatrix::new(elements_mut(OP, out)?, cols),
        };
        let scratch = &mut lock(&self.attention);
        if self.rehearsing.load(Ordering::Relaxed) {
            return attention::prepare(&self.pool, self.isa, &task, scratch).map(|_| ());
        }
        attention::run(&self.pool, self.isa, &task, scratch)
    }

    fn gated_activation(
        &self,
        gate: &Tensor,
        up: &Tensor,
        act: Activation,
        out: &mut Tensor,
    ) -> Result<(), BackendError> {
        const OP: &str = "gated_activation";
        let cols = gate.cols();
        ensure_shape(OP, "up", up, gate.rows(), cols)?;
        ensure_shape(OP, "out", out, gate.rows(), cols)?;
        let (gate, up) = (elements(OP, gate)?, elements(OP, up)?);
        self.by_rows(elements_mut(OP, out)?, cols, &|first, rows| {
            let range = first * cols..first * cols + rows.len();
            (self.rows.gated_activation)(act, &gate[range.clone()], &up[range], rows);
        })
    }

    fn gather_rows(&self, x: &Tensor, rows: &[u32], out: &mut Tensor) -> Result<(), BackendError> {
        const OP: &str = "gather_rows";
        let cols = x.cols();
        ensure_shape(OP, "out", out, rows.len(), cols)?;
        if let Some(row) = rows.iter().find(|&&row| row as usize >= x.rows()) {
            return Err(shape_error(OP, format!("rows below {}", x.rows()), row.to_string()));
        }
        let x = elements(OP, x)?;
        self.by_rows(elements_mut(OP, out)?, cols, &|first, out| {
            for (out, &row) in out.chunks_exact_mut(cols).zip(&rows[first..]) {
                out.copy_from_slice(&x[row as usize * cols..(row as usize + 1) * cols]);
            }
        })
    }

    fn scale(&self, x: &mut Tensor, scale: f32) -> Result<(), BackendError> {
        let cols = x.cols();
        self.by_rows(elements_mut("scale", x)?, cols, &|_, rows| (self.rows.scale)(rows, scale))
    }

    fn soft_cap(&self, x: &mut Tensor, cap: f32) -> Result<(), BackendError> {
        let cols = x.cols();
        self.by_rows(elements_mut("soft_cap", x)?, cols, &|_, rows| reference::soft_cap(rows, cap))
    }

    fn to_host(&self, x: &Tensor, out: &mut [f32]) -> Result<(), BackendError> {
        const OP: &str = "to_host";
        let x = elements(OP, x)?;
        ensure(OP, x.len() == out.len(), || (format!("{} elements", x.len()), out.len().to_string()))?;
        out.copy_from_slice(x);
        Ok(())
    }

    fn for_each_row(&self, x: &mut Tensor, visit: &(dyn Fn(usize, &mut [f32]) + Sync)) -> Result<(), BackendError> {
        let cols = x.cols();
        self.pool.run_rows(elements_mut("for_each_row", x)?, cols, 1, visit)
    }

    fn copy_from_host(&self, data: &[f32], x: &mut Tensor) -> Result<(), BackendError> {
        const OP: &str = "copy_from_host";
        let x = elements_mut(OP, x)?;
        ensure(OP, x.len() == data.len(), || (format!("{} elements", x.len()), data.len().to_string()))?;
        x.copy_from_slice(data);
        Ok(())
    }
}

/// Pool tensor `layer_idx`, for writing.
fn kv_layer_mut(op: &'static str, kv: &mut KvPool, layer_idx: usize) -> Result<KvLayer, BackendError> {
    let spec = kv.spec().clone();
    let buffer = kv.layer_mut(layer_idx).as_any_mut().downcast_mut::<CpuBuffer>().and_then(CpuBuffer::bytes_mut);
    match buffer {
        Some(bytes) => KvLayer::new_mut(op, &spec, bytes),
        None => Err(shape_error(op, "a KV pool of the cpu device", "one of another device")),
    }
}
