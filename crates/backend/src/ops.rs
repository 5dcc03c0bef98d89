//! The ops contract: everything a decoder needs from a device, and nothing more.
//!
//! Rules every implementation keeps:
//! - A row of a result depends only on its own row of the input (and, in attention, on its own
//!   sequence's cache): never on how many other rows there are, nor on how a sequence's tokens were
//!   split over steps. On the CPU this holds bit for bit.
//! - Softmax, norms, RoPE angles and logits are f32.
//! - Ops allocate nothing after warm-up, except [`Backend::temp`], which recycles.
//! - Shapes and dtypes are checked before a pointer is taken.
//! - A fused op ([`Backend::fused_linear`], [`Backend::rope_kv_write`]) gives the bits that the plain ops give one
//!   after the other: [`composed`](crate::composed) says which, and is what a backend runs that does not fuse.
//!   Only [`Backend::gated_mlp`] may leave out roundings to an activation's type on the way.
//! - A product's result may stay in parts until it is read: added to a residual it is then not rounded to its type
//!   first; every other reader finds it rounded.

use crate::sampling::{RowOutcome, RowTask};
use crate::{
    BackendError, BatchLayout, BlockCopy, CheckedLayout, DType, DeviceBatch, DeviceMeter, KvPool, KvPoolSpec,
    StepsAhead, Tensor, Weight, composed,
};
use std::sync::Arc;

/// What a device says about itself.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// For messages: `cpu (avx2, 2 threads)`.
    pub description: String,
    /// The instruction set or architecture its kernels were picked for: `scalar`, `avx2`, `sm_90a`.
    pub isa: &'static str,
    /// Compute threads, or multiprocessors.
    pub num_units: usize,
    /// Bytes of memory that this process may still take.
    pub memory_available_bytes: u64,
    /// Whether that memory is also everybody else's on this machine (the CPU's is), so that a pool should
    /// not take all of it.
    pub shares_memory: bool,
}

/// A weight about to be loaded.
#[derive(Clone, Debug)]
pub struct WeightDesc {
    /// Name as spelled in the checkpoint, for messages.
    pub name: String,
    /// Type as stored; the bytes given are in this type, row-major, rows of `dtype.row_bytes(cols)`.
    pub dtype: DType,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
}

/// Fills the stored bytes of `num_rows` rows from `first_row`: `read(first_row, num_rows, bytes)`.
pub type ReadRows<'a> = dyn FnMut(usize, usize, &mut [u8]) -> Result<(), ReadError> + 'a;

/// Rows of `supply` over and over, which is not empty.
pub fn repeating(supply: &[u8]) -> impl FnMut(usize, usize, &mut [u8]) -> Result<(), ReadError> + '_ {
    let mut next = 0;
    move |_, _, mut bytes| {
        while !bytes.is_empty() {
            let piece = &supply[next..supply.len().min(next + bytes.len())];
            let (now, later) = bytes.split_at_mut(piece.len());
            now.copy_from_slice(piece);
            next = (next + piece.len()) % supply.len();
            bytes = later;
        }
        Ok(())
    }
}

/// Why a weight's bytes could not be read; the file's own error.
pub type ReadError = Box<dyn std::error::Error + Send + Sync>;

/// One product of [`Backend::linear`].
pub struct LinearPart<'a> {
    /// `[N, C]`.
    pub weight: &'a Weight,
    /// `[1, N]` in f32, added to every row.
    pub bias: Option<&'a Tensor>,
    /// `[T, N]`.
    pub out: &'a mut Tensor,
}

/// The gate's activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// The tanh form of GELU.
    GeluTanh,
}

/// A linear layer's parameters.
#[derive(Clone, Copy)]
pub struct LinearWeights<'a> {
    /// `[N, C]`.
    pub weight: &'a Weight,
    /// `[1, N]` in f32, added to every row.
    pub bias: Option<&'a Tensor>,
}

impl<'a> LinearWeights<'a> {
    /// The product with them, into `out` `[T, N]`.
    pub fn part<'b>(self, out: &'b mut Tensor) -> LinearPart<'b>
    where
        'a: 'b,
    {
        LinearPart { weight: self.weight, bias: self.bias, out }
    }
}

/// A gated MLP: `down(act(gate(x)) * up(x))`.
#[derive(Clone, Copy)]
pub struct MlpWeights<'a> {
    /// `[F, C]`.
    pub gate: LinearWeights<'a>,
    /// `[F, C]`.
    pub up: LinearWeights<'a>,
    /// `[D, F]`.
    pub down: LinearWeights<'a>,
    /// The gate's activation.
    pub act: Activation,
}

/// An RMS norm: `x / rms(x) * weight`.
#[derive(Clone, Copy)]
pub struct Norm<'a> {
    /// `[1, cols]`.
    pub weight: &'a Tensor,
    /// Added to the mean of squares.
    pub eps: f32,
}

/// What is added to a residual stream.
#[derive(Clone, Copy)]
pub struct Addend<'a> {
    /// `[T, C]`.
    pub x: &'a Tensor,
    /// The norm that `x` goes through first, if any.
    pub norm: Option<Norm<'a>>,
}

/// What a product reads, `[T, C]`. All but the first are made on the way: a backend may keep a row where it is
/// made (in registers, or only quantised), since nobody else reads it.
#[must_use = "the rows, and the sum into the residual, are only made by the product that takes this"]
pub enum LinearInput<'a> {
    /// The rows as they are.
    Plain(&'a Tensor),
    /// The norm of `x`.
    Normed {
        /// `[T, C]`.
        x: &'a Tensor,
        /// Over `C`.
        norm: Norm<'a>,
    },
    /// `residual += addend`, then the norm of `residual`.
    AddNormed {
        /// `[T, C]`, left as the sum.
        residual: &'a mut Tensor,
        /// `[T, C]`.
        addend: Addend<'a>,
        /// Over `C`.
        norm: Norm<'a>,
    },
    /// `act(gate) * up`, element by element.
    Gated {
        /// `[T, C]`.
        gate: &'a Tensor,
        /// `[T, C]`.
        up: &'a Tensor,
        /// The gate's activation.
        act: Activation,
    },
}

impl LinearInput<'_> {
    /// The tensor whose shape the input has.
    fn shaped(&self) -> &Tensor {
        match self {
            LinearInput::Plain(x) | LinearInput::Normed { x, .. } | LinearInput::Gated { gate: x, .. } => x,
            LinearInput::AddNormed { residual, .. } => residual,
        }
    }

    /// `T`.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shaped().rows()
    }

    /// `C`.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.shaped().cols()
    }
}

/// Heads of a step's tokens, as the projections give them.
pub struct Qkv {
    /// `[T, H * E]`.
    pub q: Tensor,
    /// `[T, K * E]`.
    pub k: Tensor,
    /// `[T, K * E]`.
    pub v: Tensor,
}

/// What happens to each head of q and k before attention: the norm, then the rotation.
#[derive(Clone, Copy)]
pub struct HeadTransform<'a> {
    /// Over `E`, for q.
    pub q_norm: Option<Norm<'a>>,
    /// Over `E`, for k.
    pub k_norm: Option<Norm<'a>>,
    /// Rotation by the token's position.
    pub rope: &'a RopeTable,
}

/// How a head's elements pair up for the rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Elements `i` and `i + E/2` (Hugging Face checkpoints; GGUF of Qwen, Gemma).
    Half,
    /// Elements `2i` and `2i + 1` (GGUF of Llama and Mistral, whose q and k rows are permuted).
    Interleaved,
}

/// Rotary frequencies of one kind of layer, already scaled (llama3, yarn, linear).
#[derive(Clone, Debug)]
pub struct RopeTable {
    /// `[rotary_dim / 2]` radians a position.
    pub inv_freq: Vec<f32>,
    /// Multiplies cos and sin (yarn's attention factor; 1 elsewhere).
    pub magnitude: f32,
    /// Pairing.
    pub style: RopeStyle,
}

/// What one attention layer computes.
#[derive(Clone, Debug)]
pub struct AttentionParams {
    /// Query heads on this rank.
    pub num_heads: usize,
    /// KV heads on this rank; divides `num_heads`.
    pub num_kv_heads: usize,
    /// KV heads on the rank that has most of those that run this layer together. Where a device chooses a kernel by
    /// heads, it may choose by these, so that all ranks choose alike.
    pub num_kv_heads_max: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Multiplies q·k.
    pub scale: f32,
    /// `Some(w)`: position `p` sees positions `(p - w, p]` only.
    pub window: Option<usize>,
    /// `Some(c)`: a score `s` (the scaled q·k) becomes `c * tanh(s / c)`. Above 0.
    pub soft_cap: Option<f32>,
    /// `[1, H]` in f32, this rank's heads: a score of each head that takes part in the softmax's sum and in
    /// nothing else, as of one more position whose V is zero.
    pub sinks: Option<Arc<Tensor>>,
    /// Which cache group's tables and slots to use.
    pub group_idx: usize,
    /// Which pool tensor holds this layer.
    pub layer_in_group: usize,
}

/// A device. One instance a rank; ops of one instance are called by one thread at a time.
pub trait Backend: Send + Sync {
    /// Description, kernels picked, memory.
    fn info(&self) -> DeviceInfo;

    /// How the device times its own work, where the host's clock cannot.
    fn meter(&self) -> Option<&dyn DeviceMeter> {
        None
    }

    /// Takes a weight. `read` fills the stored bytes of `num_rows` rows from `first_row` into the
    /// slice it is given; it is called for ascending, disjoint row ranges covering all rows, so that
    /// a backend may repack in pieces. Refuses dtypes and sizes it has no kernel for, by name.
    fn load_weight(&self, desc: WeightDesc, read: &mut ReadRows<'_>) -> Result<Weight, BackendError>;

    /// Takes a weight whose stored bytes, row after row, are `supply` over and over: one that is made up. `supply` is
    /// not empty, whole blocks of the type. A device of its own memory copies it there, instead of having the host
    /// write every byte.
    fn load_repeated(&self, desc: WeightDesc, supply: &[u8]) -> Result<Weight, BackendError> {
        self.load_weight(desc, &mut repeating(supply))
    }

    /// A small f32 vector `[1, n]` that lives as long as the model (norm weights, biases).
    fn load_vector(&self, name: &str, data: &[f32]) -> Result<Tensor, BackendError>;

    /// An f32 workspace tensor, contents undefined; recycled on drop. Allocates only while warming up.
    fn temp(&self, rows: usize, cols: usize) -> Result<Tensor, BackendError>;

    /// A workspace tensor for what flows between two ops of a layer: like [`Backend::temp`], but of the
    /// element type that this device prefers there (bf16 where matrices are multiplied in bf16). Every op
    /// takes and gives either type. The residual stream and the logits stay in f32.
    fn activation(&self, rows: usize, cols: usize) -> Result<Tensor, BackendError> {
        self.temp(rows, cols)
    }

    /// Rows of logits that are worth computing at once: more cost workspace, fewer read the head again.
    fn logits_rows(&self) -> usize {
        32
    }

    /// While on, ops check their shapes and take every buffer that they would take, but the costly ones may
    /// leave their arithmetic out: results are undefined. Sizes the workspace without paying for a step.
    /// A backend that ignores it computes as always.
    fn rehearse(&self, _on: bool) {}

    /// Bytes the workspace holds now, and how often it had to grow since start.
    fn workspace(&self) -> (usize, u64);

    /// Allocates a zeroed pool.
    fn alloc_kv(&self, spec: &KvPoolSpec) -> Result<KvPool, BackendError>;

    /// Copies whole blocks over all pool tensors, in order.
    fn copy_blocks(&self, kv: &mut KvPool, copies: &[BlockCopy]) -> Result<(), BackendError>;

    /// Makes the step's layout readable by the device. Checks it: monotone `query_start`, every slot
    /// and block inside the pool. Here, and in [`CheckedLayout`], batch metadata is validated, and nowhere else.
    fn upload_batch(&self, layout: BatchLayout, kv: &KvPoolSpec) -> Result<DeviceBatch, BackendError>;

    /// As [`Backend::upload_batch`], of a layout that was checked before. A device whose own memory it goes to need not
    /// read it twice.
    fn upload_checked(&self, layout: CheckedLayout, kv: &KvPoolSpec) -> Result<DeviceBatch, BackendError> {
        self.upload_batch(layout.into_layout(), kv)
    }

    /// Waits until what was begun on this device is done, where ops return before that. For ranks whose results
    /// nobody reads: how long they compute is then known.
    fn wait(&self) -> Result<(), BackendError> {
        Ok(())
    }

    /// Brackets a forward: wakes the threads (or opens a stream section). Ops outside work, slower.
    fn begin_forward(&self);

    /// Ends what `begin_forward` began.
    fn end_forward(&self);

    /// Runs a forward that this device has recorded, over the tokens and batch given: its hidden states, or
    /// `None` when there is no such record and the caller must run the ops. A device may then record them,
    /// up to [`Backend::end_recording`].
    fn replay(&self, _ids: &[u32], _batch: &DeviceBatch) -> Result<Option<Tensor>, BackendError> {
        Ok(None)
    }

    /// The ops of the forward that [`Backend::replay`] had no record of are through, with this result.
    /// Gives the hidden states, computed.
    fn end_recording(&self, hidden: Tensor) -> Result<Tensor, BackendError> {
        Ok(hidden)
    }

    /// The device as one that takes steps ahead, if it samples rows of `vocab_size` logits itself.
    fn steps_ahead(&self, _vocab_size: usize) -> Option<&dyn StepsAhead> {
        None
    }

    /// `out[t] = table[ids[t]] * scale`; `table` `[V, D]`, `out` `[T, D]`. Ids are `< V`.
    fn embed(&self, table: &Weight, ids: &[u32], scale: f32, out: &mut Tensor) -> Result<(), BackendError>;

    /// As [`Backend::embed`], of a table that holds the rows of the ids `first_id..first_id + V` only:
    /// the rows of `out` of all other ids become zero. Every rank of a stage has a part of the
    /// vocabulary, so that the sum over ranks is the embedding.
    fn embed_part(
        &self,
        _table: &Weight,
        _first_id: usize,
        _ids: &[u32],
        _scale: f32,
        _out: &mut Tensor,
    ) -> Result<(), BackendError> {
        let device = self.info().description;
        let detail = "this device does not cut the vocabulary".into();
        Err(BackendError::Unsupported { device, op: "embed_part", dtype: DType::F32, detail })
    }

    /// `out = x / rms(x) * weight`, row by row; `weight` `[1, cols]`. `x` and `out` `[rows, cols]`.
    fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32, out: &mut Tensor) -> Result<(), BackendError>;

    /// `residual += x`, then `out = rms_norm(residual)`. All `[rows, cols]`.
    fn add_rms_norm(
        &self,
        residual: &mut Tensor,
        x: &Tensor,
        weight: &Tensor,
        eps: f32,
        out: &mut Tensor,
    ) -> Result<(), BackendError>;

    /// `residual += x`. Both `[rows, cols]`.
    fn add(&self, residual: &mut Tensor, x: &Tensor) -> Result<(), BackendError>;

    /// `part.out = x · part.weightᵀ (+ bias)` for every part; `x` `[T, C]` is quantised once for all.
    fn linear(&self, x: &Tensor, parts: &mut [LinearPart<'_>]) -> Result<(), BackendError>;

    /// [`Self::linear`] over rows that are made on the way, once for all parts.
    fn fused_linear(&self, input: LinearInput<'_>, parts: &mut [LinearPart<'_>]) -> Result<(), BackendError> {
        composed::linear(self, input, parts)
    }

    /// `down(act(gate(x)) * up(x))` over rows that are made on the way: `[T, D]`.
    fn gated_mlp(&self, input: LinearInput<'_>, mlp: &MlpWeights<'_>) -> Result<Tensor, BackendError> {
        composed::gated_mlp(self, input, mlp)
    }

    /// Rotates the first `2 * inv_freq.len()` elements of every head of `x` `[T, heads * E]` in place.
    fn rope(&self, x: &mut Tensor, head_dim: usize, table: &RopeTable, batch: &DeviceBatch)
    -> Result<(), BackendError>;

    /// Writes `k` and `v` `[T, K * E]` to the slots of `params.group_idx`.
    fn kv_write(
        &self,
        k: &Tensor,
        v: &Tensor,
        params: &AttentionParams,
        batch: &DeviceBatch,
        kv: &mut KvPool,
    ) -> Result<(), BackendError>;

    /// Norms (where given) and rotates each head of q and k by its token's position, and writes k and v to the slots
    /// of `params.group_idx`. Gives q `[T, H * E]`; what is left of k and v is recycled.
    fn rope_kv_write(
        &self,
        qkv: Qkv,
        transform: &HeadTransform<'_>,
        params: &AttentionParams,
        batch: &DeviceBatch,
        kv: &mut KvPool,
    ) -> Result<Tensor, BackendError> {
        composed::rope_kv_write(self, qkv, transform, params, batch, kv)
    }

    /// Causal attention of `q` `[T, H * E]` over the cached blocks where they lie (this step's
    /// tokens are already written). `out` `[T, H * E]`.
    fn attention(
        &self,
        q: &Tensor,
        params: &AttentionParams,
        batch: &DeviceBatch,
        kv: &KvPool,
        out: &mut Tensor,
    ) -> Result<(), BackendError>;

    /// `out = act(gate) * up`, element by element; `out` may not alias. All `[T, F]`.
    fn gated_activation(
        &self,
        gate: &Tensor,
        up: &Tensor,
        act: Activation,
        out: &mut Tensor,
    ) -> Result<(), BackendError>;

    /// `out[i] = x[rows[i]]`.
    fn gather_rows(&self, x: &Tensor, rows: &[u32], out: &mut Tensor) -> Result<(), BackendError>;

    /// `x *= scale` (granite's multipliers, gemma's embedding scale when not folded).
    fn scale(&self, x: &mut Tensor, scale: f32) -> Result<(), BackendError>;

    /// `x = cap * tanh(x / cap)`.
    fn soft_cap(&self, x: &mut Tensor, cap: f32) -> Result<(), BackendError>;

    /// What each task gets of its row of `logits` `[R, V]`, in f32, into `outcomes` (cleared first): `None` for a row
    /// that holds NaN or +∞, or nothing but −∞. Logits are left as they are. False, and nothing done, where the host is
    /// to do it with [`Backend::for_each_row`]: it reads rows as fast as the device, or the device does not take these
    /// tasks. Waits for the device once; a few bytes a task come back.
    fn sample_rows(
        &self,
        _logits: &Tensor,
        _tasks: &[RowTask<'_>],
        _outcomes: &mut Vec<Option<RowOutcome>>,
    ) -> Result<bool, BackendError> {
        Ok(false)
    }

    /// Copies `x` to the host, row-major, into `out` (`rows * cols` long). Waits for the device.
    fn to_host(&self, x: &Tensor, out: &mut [f32]) -> Result<(), BackendError>;

    /// Calls `visit(row_index, row)` for each row of `x` in place where the device shares memory with
    /// the host, else over a staging copy. Rows may be visited on several threads at once.
    fn for_each_row(&self, x: &mut Tensor, visit: &(dyn Fn(usize, &mut [f32]) + Sync)) -> Result<(), BackendError>;

    /// Fills `x` from the host.
    fn copy_from_host(&self, data: &[f32], x: &mut Tensor) -> Result<(), BackendError>;
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::repeating;

    #[test]
    fn a_supply_goes_on_where_it_stopped() {
        let mut read = repeating(&[1, 2, 3]);
        let (mut first, mut second) = ([0; 4], [0; 7]);
        read(0, 1, &mut first).unwrap();
        read(1, 1, &mut second).unwrap();
        assert_eq!((first, second), ([1, 2, 3, 1], [2, 3, 1, 2, 3, 1, 2]));
    }
}
