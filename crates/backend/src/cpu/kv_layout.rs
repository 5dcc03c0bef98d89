//! Where K and V of a token lie inside a pool tensor `[num_blocks, 2, K, block_size, E]`.
//!
//! V is stored as named: `block_size` rows of `E`. K is stored transposed in tiles of
//! [`TILE`] tokens: `[block_size / TILE, E, TILE]`, so that one vector register holds the same element
//! of consecutive tokens and q·k needs no horizontal sums. Only the CPU kernels read these bytes;
//! copying whole blocks does not care.

use super::check::ensure;
use super::memory::AlignedBytes;
use crate::{BackendError, DType, KvPoolSpec};
use half::f16;

/// Tokens of one K tile. Every block size is a multiple, so a tile never straddles blocks.
pub(crate) const TILE: usize = 16;

/// One pool tensor, seen by kernels.
#[derive(Clone, Copy)]
pub(crate) struct KvLayer {
    base: *mut u8,
    num_blocks: usize,
    block_size: usize,
    num_kv_heads: usize,
    head_dim: usize,
    is_f16: bool,
}

// SAFETY: a plain view; those who write through it (`write`, one token a chunk) do so at disjoint
// slots while holding the pool mutably, those who read hold it shared.
unsafe impl Send for KvLayer {}
// SAFETY: as for Send.
unsafe impl Sync for KvLayer {}

impl KvLayer {
    /// A view for reading.
    pub(crate) fn new(op: &'static str, spec: &KvPoolSpec, bytes: &AlignedBytes) -> Result<Self, BackendError> {
        Self::over(op, spec, bytes.as_ptr().cast_mut(), bytes.len())
    }

    /// A view for writing.
    pub(crate) fn new_mut(op: &'static str, spec: &KvPoolSpec, bytes: &mut AlignedBytes) -> Result<Self, BackendError> {
        Self::over(op, spec, bytes.as_mut_ptr(), bytes.len())
    }

    fn over(op: &'static str, spec: &KvPoolSpec, base: *mut u8, len: usize) -> Result<Self, BackendError> {
        let KvPoolSpec { num_blocks, block_size, num_kv_heads, head_dim, dtype, .. } = *spec;
        ensure(op, matches!(dtype, DType::F16 | DType::F32), || ("a pool of F16 or F32".into(), dtype.to_string()))?;
        ensure(op, block_size > 0 && block_size.is_multiple_of(TILE), || {
            (format!("a block size in multiples of {TILE}"), block_size.to_string())
        })?;
        let view = Self { base, num_blocks, block_size, num_kv_heads, head_dim, is_f16: dtype == DType::F16 };
        ensure(op, num_blocks * view.block_bytes() <= len, || {
            (format!("a pool tensor of {} bytes", num_blocks * view.block_bytes()), len.to_string())
        })?;
        Ok(view)
    }

    /// Bytes of one block in this pool tensor.
    pub(crate) fn block_bytes(&self) -> usize {
        2 * self.num_kv_heads * self.half_bytes()
    }

    /// Bytes of one head's K (or V) in one block.
    fn half_bytes(&self) -> usize {
        self.block_size * self.head_dim * self.elem_bytes()
    }

    /// Bytes of one element.
    pub(crate) fn elem_bytes(&self) -> usize {
        if self.is_f16 { 2 } else { 4 }
    }

    /// Whether elements are f16 (else f32).
    pub(crate) fn is_f16(&self) -> bool {
        self.is_f16
    }

    /// Tokens in a block.
    pub(crate) fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks in the pool.
    pub(crate) fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// K of `TILE` tokens from `offset` (a multiple of `TILE`) of a block: `[E, TILE]`.
    pub(crate) fn k_tile(&self, block: usize, kv_head: usize, offset: usize) -> *const u8 {
        self.head_start(block, 0, kv_head).wrapping_add(offset * self.head_dim * self.elem_bytes())
    }

    /// V of the tokens from `offset` of a block: `[.., E]`.
    pub(crate) fn v_rows(&self, block: usize, kv_head: usize, offset: usize) -> *const u8 {
        self.head_start(block, 1, kv_head).wrapping_add(offset * self.head_dim * self.elem_bytes())
    }

    fn head_start(&self, block: usize, k_or_v: usize, kv_head: usize) -> *mut u8 {
        debug_assert!(block < self.num_blocks && kv_head < self.num_kv_heads);
        self.base.wrapping_add(((block * 2 + k_or_v) * self.num_kv_heads + kv_head) * self.half_bytes())
    }

    /// Element `e` of K.
    pub(crate) fn read_k(&self, block: usize, kv_head: usize, offset: usize, e: usize) -> f32 {
        let tile = self.k_tile(block, kv_head, offset - offset % TILE);
        self.read(tile, e * TILE + offset % TILE)
    }

    /// Element `e` of V.
    pub(crate) fn read_v(&self, block: usize, kv_head: usize, offset: usize, e: usize) -> f32 {
        self.read(self.v_rows(block, kv_head, offset), e)
    }

    fn read(&self, base: *const u8, idx: usize) -> f32 {
        // SAFETY: the caller's block, head and offset are inside the pool (asserted in debug builds,
        // checked by the op), and `idx` inside the head; elements are aligned as the pool is.
        unsafe {
            if self.is_f16 { base.cast::<f16>().add(idx).read().to_f32() } else { base.cast::<f32>().add(idx).read() }
        }
    }

    /// Stores one head's K and V `[E]` of one token at `slot`. f16 saturates at its largest finite
    /// value (that is `to_f16`'s part): an infinity in the cache would turn later rows into NaN.
    ///
    /// # Safety
    /// The view was made by `new_mut`, `slot` is inside the pool, and nobody else touches this head of
    /// the slot now.
    pub(crate) unsafe fn write_head(
        &self,
        slot: usize,
        kv_head: usize,
        k: &[f32],
        v: &[f32],
        to_f16: fn(&[f32], &mut [f16]),
    ) {
        let (block, offset) = (slot / self.block_size, slot % self.block_size);
        let lane = offset % TILE;
        let k_base = self.k_tile(block, kv_head, offset - lane).cast_mut();
        let v_base = self.v_rows(block, kv_head, offset).cast_mut();
        debug_assert!(k.len() == self.head_dim && v.len() == self.head_dim);
        // SAFETY: `E` elements from `v_base`, and every TILE-th of `E * TILE` from `k_base`, belong to
        // this head of the slot, by this function's contract.
        unsafe {
            if self.is_f16 {
                to_f16(v, std::slice::from_raw_parts_mut(v_base.cast(), v.len()));
                let mut halves = [f16::ZERO; 64];
                for (nth, piece) in k.chunks(halves.len()).enumerate() {
                    to_f16(piece, &mut halves[..piece.len()]);
                    for (e, half) in halves[..piece.len()].iter().enumerate() {
                        k_base.cast::<f16>().add((nth * halves.len() + e) * TILE + lane).write(*half);
                    }
                }
            } else {
                std::slice::from_raw_parts_mut(v_base.cast(), v.len()).copy_from_slice(v);
                for (e, k) in k.iter().enumerate() {
                    k_base.cast::<f32>().add(e * TILE + lane).write(*k);
                }
            }
        }
    }

    /// Copies block `src` over block `dst`.
    ///
    /// # Safety
    /// The view was made by `new_mut` and nobody else touches the pool; both blocks are inside.
    pub(crate) unsafe fn copy_block(&self, src: usize, dst: usize) {
        let bytes = self.block_bytes();
        // SAFETY: both inside the pool by contract; `copy` allows them to be the same block.
        unsafe {
            std::ptr::copy(self.base.add(src * bytes), self.base.add(dst * bytes), bytes);
        }
    }
}
