//! The KV pool's storage on a device. Knows blocks and slots; which request owns one is the
//! scheduler's business.

use crate::{DType, DeviceBuffer};

/// Shape of a KV pool. Layers form cache groups; groups share the pool's block ids, and layer `j` of
/// every group stores into pool tensor `j`. So the pool has `layers_per_group` tensors, and a block
/// id is owned by one group of one sequence at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvPoolSpec {
    /// Blocks in the pool (ids `0..num_blocks`).
    pub num_blocks: usize,
    /// Tokens in a block: 16, 32, 64, 128 or 256.
    pub block_size: usize,
    /// Pool tensors: the number of layers of the largest group.
    pub layers_per_group: usize,
    /// KV heads held by this rank.
    pub num_kv_heads: usize,
    /// Elements of one head (K and V alike).
    pub head_dim: usize,
    /// Element type: F16, BF16 (on devices that have it) or F32.
    pub dtype: DType,
}

impl KvPoolSpec {
    /// Bytes of one block over all pool tensors:
    /// `2 × layers_per_group × kv_heads × head_dim × block_size × bytes`.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        2 * self.layers_per_group * self.num_kv_heads * self.head_dim * self.block_size * self.dtype.block_bytes()
    }

    /// Bytes of the whole pool.
    #[must_use]
    pub fn pool_bytes(&self) -> usize {
        self.block_bytes() * self.num_blocks
    }
}

/// Copy one whole block over all pool tensors, before anything else in the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Block id read.
    pub src: u32,
    /// Block id written.
    pub dst: u32,
}

/// The pool's bytes: per pool tensor one buffer `[num_blocks, 2 (K, V), K, block_size, E]`.
pub struct KvPool {
    spec: KvPoolSpec,
    layers: Vec<Box<dyn DeviceBuffer>>,
}

impl KvPool {
    /// Wraps a backend's buffers, one for each pool tensor.
    #[must_use]
    pub fn from_buffers(spec: KvPoolSpec, layers: Vec<Box<dyn DeviceBuffer>>) -> Self {
        assert_eq!(spec.layers_per_group, layers.len(), "one buffer for each pool tensor");
        Self { spec, layers }
    }

    /// The pool's shape.
    #[must_use]
    pub fn spec(&self) -> &KvPoolSpec {
        &self.spec
    }

    /// Pool tensor `layer_idx`, for the backend that made it.
    #[must_use]
    pub fn layer(&self, layer_idx: usize) -> &dyn DeviceBuffer {
        self.layers[layer_idx].as_ref()
    }

    /// Pool tensor `layer_idx`, for the backend that made it.
    pub fn layer_mut(&mut self, layer_idx: usize) -> &mut dyn DeviceBuffer {
        self.layers[layer_idx].as_mut()
    }
}
