//! [`CudaBackend`]: one GPU behind the ops contract. This file checks what an op is given and hands it on; the
//! arithmetic is in the kernels. It does not know models, requests or schedules, and reads no environment
//! variables.
//!
//! Matrices are multiplied with bf16 inputs and f32 sums; the residual stream, norms, softmax and logits are f32.
//! With [`Activations::F32`] everything is f32, for comparisons.
//!
//! A row's bits depend on its own input only in every op but [`Backend::linear`] and [`Backend::gated_mlp`]. There they
//! do for up to 8 tokens, unless a weight is f32 or its rows are no multiple of 32 elements; else cuBLASLt picks its
//! algorithm by the number of tokens. A quantised weight has kernels of its own for 1, up to 8, 16, 32 and 128 tokens.
//! [`Backend::attention`] of bf16 over a 16-bit cache is the other exception: where a sequence's keys are cut follows
//! from the lengths of all, so that every multiprocessor has work. With [`CudaConfig::deterministic`] there is no
//! exception.

mod ahead;
mod embedding;
mod launches;
mod planes;
mod pools;
mod products;
mod ranks;
mod records;
mod temporaries;
mod weights;

use crate::attention::{AttentionOps, AttentionTask, HeadsTask};
use crate::batch::{BatchMemory, device_batch, ensure_covered};
use crate::check::{Elem, Summand, View, summand, to_u32, view, view_f32};
use crate::device::{self, Device};
use crate::graphs::Records;
use crate::images::Kernels;
use crate::linear::{GatedProduct, LinearOps};
use crate::loading::upload;
use crate::memory::{CudaBuffer, DeviceMemory, Workspace, checked_bytes};
use crate::planes::PlaneOps;
use crate::rows::{NormTask, RowOps};
use crate::sampling::Results;
use crate::staging::PieceUploader;
use cudarc::driver::result;
use pagemill_backend::check::{ensure, ensure_attention, ensure_rope, ensure_shape, shape_error};
use pagemill_backend::sampling::{RowOutcome, RowTask};
use pagemill_backend::{
    Activation, AttentionParams, Backend, BackendError, BatchLayout, BlockCopy, CheckedLayout, DType, DeviceBatch,
    DeviceInfo, DeviceMeter, HeadTransform, KvPool, KvPoolSpec, LinearInput, LinearPart, MlpWeights, Norm, Qkv,
    ReadRows, RopeTable, StepsAhead, Tensor, Weight, WeightDesc, composed,
};
use products::matrix;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Rows of logits at once: a large batch's, at half a megabyte each for a large vocabulary.
const LOGITS_ROWS: usize = 256;

/// In which type values flow between the ops of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// bf16, on tensor cores.
    #[default]
    Bf16,
    /// f32; float weights are widened. Slow, for accuracy comparisons.
    F32,
}

/// What a [`CudaBackend`] is made from.
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaConfig {
    /// Which GPU, as the driver counts them.
    pub ordinal: usize,
    /// In which type values flow between ops.
    pub activations: Activations,
    /// Whether a row's bits depend on its own sequence only, whatever the batch around it and however its prompt was
    /// cut into chunks; slower.
    pub deterministic: bool,
}

/// A GPU as a device. Serves one model and one KV pool: what it records of a forward holds for both.
pub struct CudaBackend {
    // Fields are dropped in this order: what uses the device before the device.
    records: Mutex<Records>,
    rows: RowOps,
    planes: Arc<PlaneOps>,
    attention: AttentionOps,
    linear: LinearOps,
    results: Results,
    batch: Mutex<BatchMemory>,
    /// Made at the first weight, dropped with the first batch.
    pieces: Mutex<Option<PieceUploader>>,
    workspace: Arc<Workspace>,
    kernels: Kernels,
    activations: Activations,
    device: Arc<Device>,
}

/// Locks what only a panicking op could have poisoned; its contents are scratch.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CudaBackend {
    /// GPUs that the driver shows; 0 where there is no driver.
    ///
    /// # Errors
    /// A driver that is there but does not start, in its own words.
    pub fn count_devices() -> Result<usize, BackendError> {
        device::count_devices()
    }

    /// Opens a GPU and loads its kernels.
    ///
    /// # Errors
    /// There is no such GPU, no kernel for it in this build, or no cuBLASLt.
    pub fn new(config: CudaConfig) -> Result<Self, BackendError> {
        let begun = Instant::now();
        let device = Arc::new(Device::open(config.ordinal)?);
        let opened = begun.elapsed();
        let kernels = Kernels::load(&device)?;
        let workspace = Workspace::new(&device);
        let loaded = begun.elapsed();
        let linear = LinearOps::new(&device, &kernels, &workspace, config.deterministic)?;
        let products = begun.elapsed();
        let backend = Self {
            records: Mutex::new(Records::new(&device)),
            rows: RowOps::new(&device, &kernels)?,
            planes: PlaneOps::new(&device, &kernels)?,
            attention: AttentionOps::new(&device, &kernels, config.deterministic)?,
            linear,
            results: Results::new(&device, &kernels, &workspace)?,
            batch: Mutex::new(BatchMemory::new(&device, &kernels)?),
            pieces: Mutex::default(),
            workspace,
            kernels,
            activations: config.activations,
            device,
        };
        tracing::debug!(
            driver = ?opened, kernels = ?(loaded - opened), cublaslt = ?(products - loaded),
            rest = ?(begun.elapsed() - products), "{} opened", backend.device.label()
        );
        Ok(backend)
    }

    /// The GPU's own number, the same for every process.
    ///
    /// # Errors
    /// The driver's.
    pub fn uuid(&self) -> Result<[u8; 16], BackendError> {
        self.device.uuid()
    }

    /// Recorded steps are recorded again when they are needed.
    pub(crate) fn forget_records(&self) {
        lock(&self.records).clear();
    }

    /// `out = rms_norm(x)` of checked tensors, with the addition before it where there is a residual.
    fn norm(
        &self,
        op: &'static str,
        x: &Tensor,
        residual: Option<u64>,
        weight: &Tensor,
        eps: f32,
        out: &Tensor,
    ) -> Result<(), BackendError> {
        ensure_shape(op, "weight", weight, 1, x.cols())?;
        ensure_shape(op, "out", out, x.rows(), x.cols())?;
        let cols = to_u32(op, "columns", x.cols())?;
        let adds_planes = residual.is_some() && self.rows.norm_adds_planes(cols);
        self.rows.norm(&NormTask {
            x: if adds_planes { summand(op, x)? } else { Summand::Elements(view(op, x)?) },
            residual,
            weight: view_f32(op, weight)?,
            out: view(op, out)?,
            rows: to_u32(op, "rows", x.rows())?,
            cols,
            eps,
        })
    }
}

/// Both have the same element type.
fn ensure_same_elem(op: &'static str, a: View, b: View) -> Result<(), BackendError> {
    ensure(op, a.elem == b.elem, || (a.elem.dtype().to_string(), b.elem.dtype().to_string()))
}

impl Backend for CudaBackend {
    fn info(&self) -> DeviceInfo {
        let (target, num_units) = (self.kernels.target(), self.device.num_multiprocessors());
        DeviceInfo {
            description: format!(
                "{} ({}, {target}, {num_units} multiprocessors)",
                self.device.label(),
                self.device.name()
            ),
            isa: target,
            num_units,
            memory_available_bytes: self.device.memory_info().map_or(0, |(free, _)| free as u64),
            shares_memory: false,
        }
    }

    fn meter(&self) -> Option<&dyn DeviceMeter> {
        Some(self)
    }

    fn load_weight(&self, desc: WeightDesc, read: &mut ReadRows<'_>) -> Result<Weight, BackendError> {
        // Tensor cores take bf16: where everything is f32, weights are read as they are stored.
        let packed = (self.activations == Activations::Bf16).then(|| self.linear.packed());
        self.take_weight(desc, |pieces, desc| upload(&self.device, pieces, packed, desc, read))
    }

    fn load_repeated(&self, desc: WeightDesc, supply: &[u8]) -> Result<Weight, BackendError> {
        self.take_repeated(desc, supply)
    }

    fn load_vector(&self, name: &str, data: &[f32]) -> Result<Tensor, BackendError> {
        let memory = Arc::new(self.upload_floats(name, data)?);
        Ok(Tensor::from_buffer(1, data.len(), DType::F32, Box::new(CudaBuffer::over(memory))))
    }

    fn temp(&self, rows: usize, cols: usize) -> Result<Tensor, BackendError> {
        self.temporary(rows, cols, Elem::F32)
    }

    fn activation(&self, rows: usize, cols: usize) -> Result<Tensor, BackendError> {
        let elem = match self.activations {
            Activations::Bf16 => Elem::Bf16,
            Activations::F32 => Elem::F32,
        };
        self.temporary(rows, cols, elem)
    }

    fn logits_rows(&self) -> usize {
        LOGITS_ROWS
    }

    fn workspace(&self) -> (usize, u64) {
        let (temporaries, growths) = self.workspace.held();
        let kept = self.linear.len_bytes() + lock(&self.batch).len_bytes() + lock(&self.records).len_bytes();
        (temporaries + kept + self.attention.len_bytes() + self.results.len_bytes(), growths)
    }

    fn alloc_kv(&self, spec: &KvPoolSpec) -> Result<KvPool, BackendError> {
        self.attention.check_pool(spec)?;
        lock(&self.records).clear();
        lock(&self.batch).forget_plans();
        let cols = [spec.block_size, spec.num_kv_heads, spec.head_dim]
            .into_iter()
            .try_fold(2_usize, usize::checked_mul)
            .ok_or_else(|| shape_error("alloc_kv", "a block that fits in memory", format!("{spec:?}")))?;
        let bytes = checked_bytes("KV pool", spec.dtype, spec.num_blocks, cols)?;
        let layers = (0..spec.layers_per_group)
            .map(|_| {
                let memory = DeviceMemory::zeroed(&self.device, bytes, "the KV pool")?;
                Ok(Box::new(self.attention.pool_tensor(memory, spec)?) as _)
            })
            .collect::<Result<Vec<_>, BackendError>>()?;
        Ok(KvPool::from_buffers(spec.clone(), layers))
    }

    fn copy_blocks(&self, kv: &mut KvPool, copies: &[BlockCopy]) -> Result<(), BackendError> {
        const OP: &str = "copy_blocks";
        let spec = kv.spec();
        for copy in copies {
            ensure(OP, (copy.src.max(copy.dst) as usize) < spec.num_blocks, || {
                (format!("blocks below {}", spec.num_blocks), format!("{} to {}", copy.src, copy.dst))
            })?;
        }
        let block_bytes = spec.block_bytes() / spec.layers_per_group.max(1);
        self.device.bind()?;
        for layer_idx in 0..spec.layers_per_group {
            let base = self.pool_layer(OP, kv, layer_idx)?.address;
            let place = |block: u32| base + u64::from(block) * block_bytes as u64;
            for copy in copies.iter().filter(|copy| copy.src != copy.dst) {
                // SAFETY: both blocks lie inside the pool, which is borrowed mutably, and do not overlap.
                unsafe {
                    result::memcpy_dtod_async(place(copy.dst), place(copy.src), block_bytes, self.device.stream())
                }
                .map_err(|error| self.device.fault("copying KV blocks", error))?;
            }
        }
        Ok(())
    }

    fn upload_batch(&self, layout: BatchLayout, kv: &KvPoolSpec) -> Result<DeviceBatch, BackendError> {
        self.upload_checked(CheckedLayout::new(layout, kv)?, kv)
    }

    fn upload_checked(&self, layout: CheckedLayout, kv: &KvPoolSpec) -> Result<DeviceBatch, BackendError> {
        let layout = layout.into_layout_for(kv)?;
        // The model is loaded: weights need no way in any more.
        lock(&self.pieces).take();
        let device = lock(&self.batch).upload(&layout)?;
        Ok(DeviceBatch { layout, device: Some(Box::new(device)) })
    }

    fn wait(&self) -> Result<(), BackendError> {
        self.device.synchronize()
    }

    fn rehearse(&self, on: bool) {
        self.device.set_rehearsing(on);
    }

    fn begin_forward(&self) {}

    fn end_forward(&self) {}

    fn replay(&self, ids: &[u32], batch: &DeviceBatch) -> Result<Option<Tensor>, BackendError> {
        self.replay_or_record(ids, batch)
    }

    fn end_recording(&self, hidden: Tensor) -> Result<Tensor, BackendError> {
        self.keep_record(hidden)
    }

    fn steps_ahead(&self, vocab_size: usize) -> Option<&dyn StepsAhead> {
        let takes = |cols| self.results.takes_ahead(cols);
        u32::try_from(vocab_size).is_ok_and(takes).then_some(self as &dyn StepsAhead)
    }

    fn embed(&self, table: &Weight, ids: &[u32], scale: f32, out: &mut Tensor) -> Result<(), BackendError> {
        const OP: &str = "embed";
        if let Some(id) = ids.iter().find(|&&id| id as usize >= table.rows()) {
            return Err(shape_error(OP, format!("token ids below {}", table.rows()), id.to_string()));
        }
        self.embed_rows(OP, table, 0, ids, scale, out)
    }

    fn embed_part(
        &self,
        table: &Weight,
        first_id: usize,
        ids: &[u32],
        scale: f32,
        out: &mut Tensor,
    ) -> Result<(), BackendError> {
        self.embed_rows("embed_part", table, first_id, ids, scale, out)
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32, out: &mut Tensor) -> Result<(), BackendError> {
        self.norm("rms_norm", x, None, weight, eps, out)
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
        ensure_shape(OP, "residual", residual, x.rows(), x.cols())?;
        self.norm(OP, x, Some(view_f32(OP, residual)?), weight, eps, out)
    }

    fn add(&self, residual: &mut Tensor, x: &Tensor) -> Result<(), BackendError> {
        const OP: &str = "add";
        ensure_shape(OP, "residual", residual, x.rows(), x.cols())?;
        let residual = view_f32(OP, residual)?;
        match summand(OP, x)? {
            Summand::Elements(x_place) => self.rows.add(residual, x_place, x.rows() * x.cols()),
            Summand::Planes(planes) => self.planes.add(planes, residual),
        }
    }

    fn linear(&self, x: &Tensor, parts: &mut [LinearPart<'_>]) -> Result<(), BackendError> {
        const OP: &str = "linear";
        let (num_tokens, cols) = (x.rows(), x.cols());
        let products = products::checked(x, parts)?;
        to_u32(OP, "tokens", num_tokens)?;
        if num_tokens == 0 {
            return Ok(());
        }
        let x = view(OP, x)?;
        if let ([part], [product]) = (&mut *parts, &products[..])
            && self.leaves_planes(x, num_tokens, product, part.out)?
        {
            return Ok(());
        }
        self.linear.run(&self.rows, x, num_tokens, cols, &products)
    }

    /// Gate, up and the activation between them in one kernel where there is one for them.
    fn gated_mlp(&self, input: LinearInput<'_>, mlp: &MlpWeights<'_>) -> Result<Tensor, BackendError> {
        const OP: &str = "gated_mlp";
        let (num_tokens, cols) = (input.rows(), input.cols());
        let (gate, up) = (matrix(OP, mlp.gate.weight)?, matrix(OP, mlp.up.weight)?);
        let has_bias = mlp.gate.bias.is_some() || mlp.up.bias.is_some();
        if has_bias || gate.cols != cols || !self.linear.takes_gated(num_tokens, gate, up) {
            return composed::gated_mlp(self, input, mlp);
        }
        let x = composed::rows(self, input)?;
        let inner = self.activation(num_tokens, gate.rows)?; // [T, F]
        let product = GatedProduct { gate, up, act: mlp.act, out: view(OP, &inner)? };
        self.linear.gated(&self.rows, view(OP, &x)?, num_tokens, &product)?;
        let mut out = self.activation(num_tokens, mlp.down.weight.rows())?; // [T, D]
        self.linear(&inner, &mut [mlp.down.part(&mut out)])?;
        Ok(out)
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
        if pairs == 0 {
            return Ok(());
        }
        let sizes =
            (to_u32(OP, "tokens", x.rows())?, to_u32(OP, "heads", cols / head_dim)?, to_u32(OP, "elements", head_dim)?);
        self.attention.rope(view(OP, x)?, sizes, table, device_batch(OP, batch)?)
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
        let num_tokens = batch.layout.groups[params.group_idx].slot_mapping.len();
        let cols = params.num_kv_heads * params.head_dim;
        ensure_shape(OP, "k", k, num_tokens, cols)?;
        ensure_shape(OP, "v", v, num_tokens, cols)?;
        let (k, v) = (view(OP, k)?, view(OP, v)?);
        ensure_same_elem(OP, k, v)?;
        let group = device_batch(OP, batch)?.groups[params.group_idx];
        let pool = self.pool_layer(OP, kv, params.layer_in_group)?;
        self.attention.kv_write(k, v, to_u32(OP, "tokens", num_tokens)?, group, pool)
    }

    fn rope_kv_write(
        &self,
        qkv: Qkv,
        transform: &HeadTransform<'_>,
        params: &AttentionParams,
        batch: &DeviceBatch,
        kv: &mut KvPool,
    ) -> Result<Tensor, BackendError> {
        const OP: &str = "rope_kv_write";
        let Qkv { q, k, v } = qkv;
        ensure_attention(OP, params, batch, kv.spec())?;
        let num_tokens = batch.layout.groups[params.group_idx].slot_mapping.len();
        let (q_cols, kv_cols) = (params.num_heads * params.head_dim, params.num_kv_heads * params.head_dim);
        ensure_shape(OP, "q", &q, num_tokens, q_cols)?;
        ensure_shape(OP, "k", &k, num_tokens, kv_cols)?;
        ensure_shape(OP, "v", &v, num_tokens, kv_cols)?;
        ensure_rope(OP, q_cols, params.head_dim, transform.rope)?;
        let norm = |norm: Option<Norm<'_>>| {
            let placed = norm.map(|norm| {
                ensure_shape(OP, "norm", norm.weight, 1, params.head_dim)?;
                Ok::<_, BackendError>((view_f32(OP, norm.weight)?, norm.eps))
            });
            placed.transpose()
        };
        let task = HeadsTask {
            q: view(OP, &q)?,
            k: view(OP, &k)?,
            v: view(OP, &v)?,
            q_norm: norm(transform.q_norm)?,
            k_norm: norm(transform.k_norm)?,
            rope: transform.rope,
            num_tokens: to_u32(OP, "tokens", num_tokens)?,
            num_heads: to_u32(OP, "heads", params.num_heads)?,
        };
        ensure_same_elem(OP, task.q, task.k)?;
        ensure_same_elem(OP, task.q, task.v)?;
        let device = device_batch(OP, batch)?;
        let pool = self.pool_layer(OP, kv, params.layer_in_group)?;
        self.attention.heads(&task, device, device.groups[params.group_idx], pool)?;
        Ok(q)
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
        let (cols, num_tokens) = (params.num_heads * params.head_dim, batch.layout.num_tokens());
        ensure_shape(OP, "q", q, num_tokens, cols)?;
        ensure_shape(OP, "out", out, num_tokens, cols)?;
        let (q, out) = (view(OP, q)?, view(OP, out)?);
        ensure_same_elem(OP, q, out)?;
        ensure_covered(OP, batch, params.group_idx, params.window, kv.spec().block_size)?;
        let sinks = params.sinks.as_deref().map(|sinks| view_f32(OP, sinks)).transpose()?;
        let task = AttentionTask { q, out, params, sinks, num_tokens };
        let (device, pool) = (device_batch(OP, batch)?, self.pool_layer(OP, kv, params.layer_in_group)?);
        let plan = match self.attention.kind(&task, device, pool) {
            Some(kind) => self.attention_plan(OP, kind, batch)?,
            None => None,
        };
        self.attention.attention(&task, device, plan, pool)
    }

    fn gated_activation(
        &self,
        gate: &Tensor,
        up: &Tensor,
        act: Activation,
        out: &mut Tensor,
    ) -> Result<(), BackendError> {
        const OP: &str = "gated_activation";
        ensure_shape(OP, "up", up, gate.rows(), gate.cols())?;
        ensure_shape(OP, "out", out, gate.rows(), gate.cols())?;
        let count = gate.rows() * gate.cols();
        let (gate, up, out) = (view(OP, gate)?, view(OP, up)?, view(OP, out)?);
        ensure_same_elem(OP, gate, up)?;
        ensure_same_elem(OP, gate, out)?;
        self.rows.gated(act, gate, up, out, count)
    }

    fn gather_rows(&self, x: &Tensor, rows: &[u32], out: &mut Tensor) -> Result<(), BackendError> {
        const OP: &str = "gather_rows";
        let cols = x.cols();
        ensure_shape(OP, "out", out, rows.len(), cols)?;
        if let Some(row) = rows.iter().find(|&&row| row as usize >= x.rows()) {
            return Err(shape_error(OP, format!("rows below {}", x.rows()), row.to_string()));
        }
        let (x, out) = (view(OP, x)?, view(OP, out)?);
        ensure_same_elem(OP, x, out)?;
        let num_rows = to_u32(OP, "rows", rows.len())?;
        let rows = lock(&self.batch).upload_ids(OP, rows)?;
        self.rows.gather(x, rows, num_rows, cols, out)
    }

    fn scale(&self, x: &mut Tensor, scale: f32) -> Result<(), BackendError> {
        self.rows.scale(view("scale", x)?, scale, x.rows() * x.cols())
    }

    fn soft_cap(&self, x: &mut Tensor, cap: f32) -> Result<(), BackendError> {
        self.rows.soft_cap(view("soft_cap", x)?, cap, x.rows() * x.cols())
    }

    fn sample_rows(
        &self,
        logits: &Tensor,
        tasks: &[RowTask<'_>],
        outcomes: &mut Vec<Option<RowOutcome>>,
    ) -> Result<bool, BackendError> {
        const OP: &str = "sample_rows";
        let (rows, cols) = (logits.rows(), to_u32(OP, "columns", logits.cols())?);
        ensure(OP, cols > 0 && tasks.iter().all(|task| task.row < rows), || {
            ("tasks of its rows, which have a column".into(), format!("[{rows}, {cols}]"))
        })?;
        self.results.sample(view_f32(OP, logits)?, (rows, cols), tasks, outcomes)
    }

    fn to_host(&self, x: &Tensor, out: &mut [f32]) -> Result<(), BackendError> {
        const OP: &str = "to_host";
        let count = x.rows() * x.cols();
        ensure(OP, count == out.len(), || (format!("{count} elements"), out.len().to_string()))?;
        let (address, _wide) = self.in_f32(OP, x)?;
        self.results.to_host(address, out)
    }

    fn for_each_row(&self, x: &mut Tensor, visit: &(dyn Fn(usize, &mut [f32]) + Sync)) -> Result<(), BackendError> {
        let (address, _wide) = self.in_f32("for_each_row", x)?;
        self.results.visit(address, x.rows(), x.cols(), visit)
    }

    fn copy_from_host(&self, data: &[f32], x: &mut Tensor) -> Result<(), BackendError> {
        const OP: &str = "copy_from_host";
        let count = x.rows() * x.cols();
        ensure(OP, count == data.len(), || (format!("{count} elements"), data.len().to_string()))?;
        let place = view(OP, x)?;
        if place.elem == Elem::F32 {
            return self.write_floats(data, place.address);
        }
        let wide = self.workspace.take(count * 4)?;
        self.write_floats(data, wide.address())?;
        let wide = View { address: wide.address(), elem: Elem::F32 };
        self.rows.convert(wide, DType::BF16, place.address, count)
    }
}
