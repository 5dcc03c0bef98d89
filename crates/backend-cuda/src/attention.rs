//! Rope, the way of K and V into the pool, and attention over it. Decides which kernel runs; the step's metadata
//! was checked when it was uploaded. Callers have checked shapes.
//!
//! Attention of bf16 activations over 16-bit pools runs `attention_decode` for sequences with one new token and
//! `attention_prefill` (or `attention_prefill_any`) for the others, where they have the shape; all else runs
//! `attention_plain`.

mod rope_kv;

use rope_kv::HeadsKernels;
pub(crate) use rope_kv::HeadsTask;

use crate::batch::CudaBatch;
use crate::check::{Elem, View};
use crate::device::Device;
use crate::images::Kernels;
use crate::kernels::attention_decode::DecodeParams;
use crate::kernels::attention_plan::{DecodePlace, Heads, LayerKind, PlanPlace, PrefillPlace, supports_block_size};
use crate::kernels::attention_prefill::{KvMap, PrefillParams, PrefillVariant};
use crate::kernels::decode_forms::DecodeVariant;
use crate::kernels::{ActivationType, Half};
use crate::memory::DeviceMemory;
use crate::rope_angles::AngleTables;
use crate::rows::{Function, by_elem};
use crate::tensor_map::{MapShape, tensor_map};
use pagemill_backend::{AttentionParams, BackendError, DType, DeviceBuffer, KvPoolSpec};
use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Largest head of attention_plain.cu.
const MAX_HEAD_DIM: usize = 512;
/// `WARPS` in attention_plain.cu.
const PLAIN_WARPS: u32 = 4;

/// `PlainAttentionArgs` in attention_plain.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct PlainAttentionArgs {
    q: u64,
    pool: u64,
    out: u64,
    positions: u64,
    token_seq: u64,
    table_start: u64,
    tables: u64,
    num_heads: u32,
    num_kv_heads: u32,
    head_dim: u32,
    block_size: u32,
    window: u32,
    scale: f32,
    soft_cap: f32,
    sinks: u64,
}

/// KV element types, in the order of kernel tables.
const KV_TYPES: [(DType, &str); 3] = [(DType::F32, "f32"), (DType::F16, "f16"), (DType::BF16, "bf16")];

/// Kernels by the activations' type, then the pool's.
type ByElemAndKv = [[Function; 3]; 2];

fn by_elem_and_kv(kernels: &Kernels, name: &str) -> Result<ByElemAndKv, BackendError> {
    let by_kv = |elem: &str| -> Result<[Function; 3], BackendError> {
        let [a, b, c] = KV_TYPES.map(|(_, kv)| kernels.get(&format!("{name}_{elem}_{kv}")).map(Function));
        Ok([a?, b?, c?])
    };
    Ok([by_kv("f32")?, by_kv("bf16")?])
}

/// How often each attention kernel was launched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttentionLaunches {
    /// `attention_plain`.
    pub plain: u64,
    /// `attention_decode`.
    pub decode: u64,
    /// `attention_prefill`: warpgroup products and the copy engine.
    pub prefill: u64,
    /// `attention_prefill_any`.
    pub prefill_any: u64,
}

/// [`AttentionLaunches`] while they are counted.
#[derive(Default)]
struct LaunchCounts {
    plain: AtomicU64,
    decode: AtomicU64,
    prefill: AtomicU64,
    prefill_any: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// One tensor of a pool.
pub(crate) struct PoolTensor {
    memory: DeviceMemory,
    map: Option<[u64; 16]>,
}

impl PoolTensor {
    /// Where it lies.
    pub(crate) fn address(&self) -> u64 {
        self.memory.address()
    }

    /// See [`LayerPool::map`].
    pub(crate) fn map(&self) -> Option<&[u64; 16]> {
        self.map.as_ref()
    }
}

impl DeviceBuffer for PoolTensor {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn len_bytes(&self) -> usize {
        self.memory.len()
    }
}

/// Where pieces of a sequence leave their results. Launches follow each other, so layers share it.
struct DecodeScratch {
    heads: Heads,
    /// `partial_out`, `partial_max_sum`, `arrivals`, for the most slots that a plan has.
    memory: DeviceMemory,
    max_sum: u64,
    arrivals: u64,
}

/// The attention kernels of one device.
pub(crate) struct AttentionOps {
    device: Arc<Device>,
    rope: [Function; 2],
    rope_angles: Function,
    angles: Mutex<AngleTables>,
    kv_write: ByElemAndKv,
    heads: HeadsKernels,
    plain: ByElemAndKv,
    decode: Vec<(DecodeVariant, Function)>,
    prefill: Vec<(PrefillVariant, Function)>,
    scratch: Mutex<Vec<DecodeScratch>>,
    /// Whether `attention_prefill` has a body: its kernels are empty on other chips.
    is_hopper: bool,
    /// Whether only kernels run in which a row's sums follow from its own position and window.
    deterministic: bool,
    counts: LaunchCounts,
}

/// One layer's pool tensor.
#[derive(Clone, Copy)]
pub(crate) struct LayerPool<'a> {
    pub(crate) spec: &'a KvPoolSpec,
    pub(crate) address: u64,
    /// `CUtensorMap`, where there is a kernel that reads the pool through it.
    pub(crate) map: Option<&'a [u64; 16]>,
}

/// Attention of q `[T, H * E]` into out `[T, H * E]`, both of one type.
pub(crate) struct AttentionTask<'a> {
    pub(crate) q: View,
    pub(crate) out: View,
    pub(crate) params: &'a AttentionParams,
    /// f32 `[H]`, if there are any.
    pub(crate) sinks: Option<u64>,
    pub(crate) num_tokens: usize,
}

impl AttentionTask<'_> {
    fn heads(&self) -> Heads {
        Heads {
            num_heads: word(self.params.num_heads),
            num_kv_heads: word(self.params.num_kv_heads),
            num_kv_heads_max: word(self.params.num_kv_heads_max),
            head_dim: word(self.params.head_dim),
        }
    }
}

/// As the fast kernels name a pool's elements; `None` where they read none such.
fn half(dtype: DType) -> Option<Half> {
    match dtype {
        DType::BF16 => Some(Half::Bf16),
        DType::F16 => Some(Half::F16),
        _ => None,
    }
}

/// A shape that was checked to fit 32 bits when its pool or batch was made.
#[allow(clippy::cast_possible_truncation)] // see above
fn word(count: usize) -> u32 {
    count as u32
}

impl AttentionOps {
    /// Looks the kernels up.
    pub(crate) fn new(device: &Arc<Device>, kernels: &Kernels, deterministic: bool) -> Result<Self, BackendError> {
        let is_hopper = kernels.are_for_hopper();
        Ok(Self {
            device: Arc::clone(device),
            rope: by_elem(kernels, "rope")?,
            rope_angles: Function(kernels.get("rope_angles")?),
            angles: Mutex::default(),
            kv_write: by_elem_and_kv(kernels, "kv_write")?,
            heads: HeadsKernels::new(kernels)?,
            plain: by_elem_and_kv(kernels, "attention_plain")?,
            decode: DecodeVariant::all(is_hopper)
                .into_iter()
                .map(|variant| {
                    let (name, shared, percent) = (variant.name(), variant.shared_bytes(), variant.shared_percent());
                    Ok((variant, Function(kernels.get_with_carveout(&name, shared, percent)?)))
                })
                .collect::<Result<_, BackendError>>()?,
            prefill: PrefillVariant::all(is_hopper)
                .into_iter()
                .map(|variant| {
                    Ok((variant, Function(kernels.get_with_shared(&variant.name(), variant.shared_bytes())?)))
                })
                .collect::<Result<_, BackendError>>()?,
            scratch: Mutex::default(),
            is_hopper,
            deterministic,
            counts: LaunchCounts::default(),
        })
    }

    /// Bytes held for pieces' results.
    pub(crate) fn len_bytes(&self) -> usize {
        let scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        scratch.iter().map(|held| held.memory.len()).sum()
    }

    /// Launches so far.
    pub(crate) fn launches(&self) -> AttentionLaunches {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let LaunchCounts { plain, decode, prefill, prefill_any } = &self.counts;
        AttentionLaunches {
            plain: read(plain),
            decode: read(decode),
            prefill: read(prefill),
            prefill_any: read(prefill_any),
        }
    }

    /// A pool tensor over this memory, with its map for the copy engine.
    pub(crate) fn pool_tensor(&self, memory: DeviceMemory, spec: &KvPoolSpec) -> Result<PoolTensor, BackendError> {
        let map = self.kv_map(memory.address(), spec)?;
        Ok(PoolTensor { memory, map })
    }

    /// `CUtensorMap` of a pool tensor; `None` where no kernel would read it.
    fn kv_map(&self, address: u64, spec: &KvPoolSpec) -> Result<Option<[u64; 16]>, BackendError> {
        let (head_dim, block_size) = (word(spec.head_dim), word(spec.block_size));
        let Some(kv) = half(spec.dtype) else {
            return Ok(None);
        };
        let is_read = PrefillVariant::select(kv, head_dim, self.is_hopper).is_some_and(|variant| variant.needs_map());
        let KvMap { dims, stride_bytes, box_dims } =
            KvMap::new(spec.num_blocks as u64, word(spec.num_kv_heads), block_size, head_dim);
        // The kernel counts rows in 31 bits.
        let is_counted = i32::try_from(dims[1]).is_ok_and(|rows| rows > 0);
        if !is_read || !is_counted || !supports_block_size(block_size) {
            return Ok(None);
        }
        let shape = MapShape { dims, stride_bytes, box_dims };
        tensor_map(&self.device, address, kv, &shape, "the KV pool").map(Some)
    }

    /// Refuses pools that no kernel reads, when they are allocated.
    pub(crate) fn check_pool(&self, spec: &KvPoolSpec) -> Result<(), BackendError> {
        let unsupported = |detail: String| {
            Err(BackendError::Unsupported { device: self.device.label(), op: "attention", dtype: spec.dtype, detail })
        };
        if !KV_TYPES.iter().any(|(dtype, _)| *dtype == spec.dtype) {
            return unsupported("KV is kept in F16, BF16 or F32".into());
        }
        if spec.head_dim == 0 || spec.head_dim > MAX_HEAD_DIM {
            return unsupported(format!("heads of {} elements; at most {MAX_HEAD_DIM}", spec.head_dim));
        }
        let slots = spec.num_blocks.checked_mul(spec.block_size).is_some_and(|slots| u32::try_from(slots).is_ok());
        let heads = u32::try_from(spec.num_kv_heads.saturating_mul(spec.head_dim)).is_ok();
        if !slots || !heads || spec.block_size == 0 {
            return unsupported(format!("a pool beyond 32-bit slots: {spec:?}"));
        }
        Ok(())
    }

    /// What a plan is made for; `None` where only the plain kernel serves.
    pub(crate) fn kind(&self, task: &AttentionTask<'_>, batch: &CudaBatch, pool: LayerPool<'_>) -> Option<LayerKind> {
        let kv = half(pool.spec.dtype).filter(|_| task.q.elem == Elem::Bf16)?;
        // The kernels count positions in 31 bits; a window beyond sees everything.
        i32::try_from(batch.max_seq_len).ok()?;
        let window = task.params.window.and_then(|window| i32::try_from(window).ok());
        let window = window.map(i32::unsigned_abs);
        let block_size = word(pool.spec.block_size);
        let kind = LayerKind::select(task.params.group_idx, window, task.heads(), kv, block_size, pool.map.is_some())?;
        Some(if self.deterministic { kind.batch_invariant() } else { kind })
    }

    /// Attention over the pool: by the plan's kernels, without a plan by the plain one.
    pub(crate) fn attention(
        &self,
        task: &AttentionTask<'_>,
        batch: &CudaBatch,
        plan: Option<PlanPlace>,
        pool: LayerPool<'_>,
    ) -> Result<(), BackendError> {
        let Some(PlanPlace { kind, decode, prefill }) = plan else {
            return self.attention_plain(task, batch, pool);
        };
        // Prompts first: decodes may start beside them.
        if let Some(place) = prefill {
            self.attention_prefill(task, batch, (&kind, place), pool)?;
        }
        if let Some(place) = decode {
            self.attention_decode(task, batch, (&kind, place), pool)?;
        }
        Ok(())
    }

    /// Attention of the sequences with one new token.
    fn attention_decode(
        &self,
        task: &AttentionTask<'_>,
        batch: &CudaBatch,
        (kind, place): (&LayerKind, DecodePlace),
        pool: LayerPool<'_>,
    ) -> Result<(), BackendError> {
        let Heads { num_heads, num_kv_heads, head_dim, .. } = kind.heads;
        let function = self.decode.iter().find(|(variant, _)| *variant == place.variant);
        let (_, function) =
            function.ok_or_else(|| self.device.broken(format!("no kernel {}", place.variant.name())))?;
        let launch = place.variant.launch(kind.heads.counts(), place.units);
        let mut held = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let scratch = self.decode_scratch(&mut held, kind, launch.grid.1)?;
        let args = DecodeParams {
            q: task.q.address,
            out: task.out.address,
            kv: pool.address,
            block_table: batch.tables,
            pieces: place.pieces,
            piece_start: place.piece_start,
            partial_out: scratch.memory.address(),
            partial_max_sum: scratch.max_sum,
            arrivals: scratch.arrivals,
            sinks: task.sinks.unwrap_or(0),
            scale: task.params.scale,
            soft_cap: task.params.soft_cap.unwrap_or(0.0),
            window: kind.window.unwrap_or(0),
            num_heads,
            num_kv_heads,
            block_size_log2: pool.spec.block_size.trailing_zeros(),
            q_stride: num_heads * head_dim,
            out_stride: num_heads * head_dim,
            q_type: ActivationType::Bf16 as u32,
            out_type: ActivationType::Bf16 as u32,
        };
        count(&self.counts.decode);
        // SAFETY: the struct is the kernel's; the op checked both shapes, and that every position in sight has a
        // block inside the pool, which is what the plan's pieces walk over; the scratch holds the most slots of a
        // plan for so many thread blocks. Ahead of its wait the kernel reads the plan, tables, and keys of all tokens but
        // the newest: of earlier steps, or of this one where they were written before the batch was uploaded. Those
        // were there before the kernel that precedes it could start: a kernel starts, or lets its successor start, only
        // when all before it are done.
        unsafe { self.device.launch_overlapped(function.0, launch.grid, launch.threads, launch.shared_bytes, &args) }
    }

    /// The place of pieces' results, with `grid_y` counters a slot; allocates only while warming up.
    fn decode_scratch<'a>(
        &self,
        held: &'a mut Vec<DecodeScratch>,
        kind: &LayerKind,
        grid_y: u32,
    ) -> Result<&'a DecodeScratch, BackendError> {
        let heads = kind.heads;
        if let Some(at) = held.iter().position(|held| held.heads == heads) {
            return Ok(&held[at]);
        }
        let slots = kind.max_decode_slots(word(self.device.num_multiprocessors())) as usize;
        let rows = slots * heads.num_heads as usize;
        let (out_bytes, max_sum_bytes) = (rows * heads.head_dim as usize * 4, rows * 8);
        // The kernel leaves its counters of arrivals at zero.
        let len = out_bytes + max_sum_bytes + slots * grid_y as usize * 4;
        let memory = DeviceMemory::zeroed(&self.device, len, "partial results of attention")?;
        let max_sum = memory.address() + out_bytes as u64;
        let arrivals = max_sum + max_sum_bytes as u64;
        held.push(DecodeScratch { heads, memory, max_sum, arrivals });
        Ok(&held[held.len() - 1])
    }

    /// Attention of the sequences with more new tokens.
    fn attention_prefill(
        &self,
        task: &AttentionTask<'_>,
        batch: &CudaBatch,
        (kind, place): (&LayerKind, PrefillPlace),
        pool: LayerPool<'_>,
    ) -> Result<(), BackendError> {
        let Heads { num_heads, num_kv_heads, head_dim, .. } = kind.heads;
        let function = self.prefill.iter().find(|(variant, _)| *variant == kind.prefill);
        let (_, function) = function.ok_or_else(|| self.device.broken(format!("no kernel {}", kind.prefill.name())))?;
        let launch = kind.prefill.launch(place.num_work, word(self.device.num_multiprocessors()));
        if i32::try_from(launch.grid.0).is_err() {
            return Err(self.device.broken("attention over more than 2^31 tiles"));
        }
        let args = PrefillParams {
            // Read only by a kernel that was selected because the pool has one.
            kv_map: pool.map.copied().unwrap_or_default(),
            q: task.q.address,
            out: task.out.address,
            kv: pool.address,
            block_table: batch.tables,
            tiles: place.tiles,
            work: place.work,
            work_start: place.work_start,
            sinks: task.sinks.unwrap_or(0),
            scale: task.params.scale,
            soft_cap: task.params.soft_cap.unwrap_or(0.0),
            window: kind.window.unwrap_or(0),
            num_heads,
            num_kv_heads,
            block_size_log2: pool.spec.block_size.trailing_zeros(),
            q_stride: num_heads * head_dim,
            out_stride: num_heads * head_dim,
            q_type: ActivationType::Bf16 as u32,
            out_type: ActivationType::Bf16 as u32,
        };
        count(if kind.prefill.needs_map() { &self.counts.prefill } else { &self.counts.prefill_any });
        // SAFETY: the struct is the kernel's; the op checked both shapes, and that every position in sight has a
        // block inside the pool; the work was shared out over as many thread blocks as are launched. Each waits before
        // it reads anything but its argument, and lets its successor begin then.
        unsafe { self.device.launch_overlapped(function.0, launch.grid, launch.threads, launch.shared_bytes, &args) }
    }

    /// Attention of any shape.
    fn attention_plain(
        &self,
        task: &AttentionTask<'_>,
        batch: &CudaBatch,
        pool: LayerPool<'_>,
    ) -> Result<(), BackendError> {
        let AttentionTask { q, out, params, sinks, num_tokens } = *task;
        let group = batch.groups[params.group_idx];
        let args = PlainAttentionArgs {
            q: q.address,
            pool: pool.address,
            out: out.address,
            positions: batch.positions,
            token_seq: batch.token_seq,
            table_start: group.table_start,
            tables: batch.tables,
            num_heads: word(params.num_heads),
            num_kv_heads: word(params.num_kv_heads),
            head_dim: word(params.head_dim),
            block_size: word(pool.spec.block_size),
            // A window beyond 32 bits sees everything.
            window: params.window.map_or(0, |window| u32::try_from(window).unwrap_or(0)),
            scale: params.scale,
            soft_cap: params.soft_cap.unwrap_or(0.0),
            sinks: sinks.unwrap_or(0),
        };
        let rows = num_tokens.checked_mul(params.num_heads).and_then(|rows| i32::try_from(rows).ok());
        let rows = rows.ok_or_else(|| self.device.broken("attention over more than 2^31 query heads"))?;
        let shared = PLAIN_WARPS * (args.head_dim + 2) * 4;
        count(&self.counts.plain);
        let function = self.plain[q.elem as usize][self.kv_idx(pool.spec)?];
        // SAFETY: the struct is the kernel's; the op checked both shapes, and that every position in sight has
        // a block inside the pool.
        unsafe { self.device.launch(function.0, (rows.unsigned_abs(), 1), PLAIN_WARPS * 32, shared, &args) }
    }

    fn kv_idx(&self, spec: &KvPoolSpec) -> Result<usize, BackendError> {
        KV_TYPES
            .iter()
            .position(|(dtype, _)| *dtype == spec.dtype)
            .ok_or_else(|| self.device.broken(format!("a KV pool of {}", spec.dtype)))
    }
}
