//! Rope, and the way of K and V into the pool.

use super::{AttentionOps, ByElemAndKv, LayerPool, by_elem_and_kv, word};
use crate::batch::{CudaBatch, GroupPlace};
use crate::check::View;
use crate::images::Kernels;
use pagemill_backend::{BackendError, RopeStyle, RopeTable};
use std::sync::PoisonError;

/// `MAX_PAIRS` in rope_kv.cu.
const MAX_PAIRS: usize = 256;
/// `HEAD_WARPS` in rope_kv.cu.
const HEAD_WARPS: u32 = 8;
/// Elements of a head that a lane of the forms in halves has.
const ELEMENTS_A_LANE: u32 = 8;
/// Blocks up to which a token's heads are spread over several: two on each multiprocessor of a large chip.
const FEW_BLOCKS: u32 = 264;

/// `RopeArgs` in rope_kv.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct RopeArgs {
    x: u64,
    positions: u64,
    num_heads: u32,
    head_dim: u32,
    pairs: u32,
    interleaved: u32,
    magnitude: f32,
    inv_freq: [f32; MAX_PAIRS],
}

/// `KvWriteArgs` in rope_kv.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct KvWriteArgs {
    k: u64,
    v: u64,
    slots: u64,
    pool: u64,
    num_kv_heads: u32,
    head_dim: u32,
    block_size: u32,
}

/// `HeadsArgs` in rope_kv.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct HeadsArgs {
    q: u64,
    k: u64,
    v: u64,
    q_norm: u64,
    k_norm: u64,
    angles: u64,
    slots: u64,
    pool: u64,
    num_heads: u32,
    num_kv_heads: u32,
    head_dim: u32,
    block_size: u32,
    pairs: u32,
    interleaved: u32,
    q_eps: f32,
    k_eps: f32,
    num_tokens: u32,
    token_warps_log2: u32,
}

/// `AnglesArgs` in rope_kv.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct AnglesArgs {
    angles: u64,
    positions: u64,
    pairs: u32,
    magnitude: f32,
    inv_freq: [f32; MAX_PAIRS],
}

/// Heads on their way to attention: views of q `[T, H * E]`, k and v `[T, K * E]`, all of one type.
pub(crate) struct HeadsTask<'a> {
    pub(crate) q: View,
    pub(crate) k: View,
    pub(crate) v: View,
    /// f32 `[E]` and its epsilon.
    pub(crate) q_norm: Option<(u64, f32)>,
    /// f32 `[E]` and its epsilon.
    pub(crate) k_norm: Option<(u64, f32)>,
    pub(crate) rope: &'a RopeTable,
    pub(crate) num_tokens: u32,
    pub(crate) num_heads: u32,
}

/// The kernels of heads on their way to attention.
pub(super) struct HeadsKernels {
    /// Heads that [`turns_in_halves`].
    in_halves: ByElemAndKv,
    /// The same with a norm before.
    normed_in_halves: ByElemAndKv,
    /// Heads of any size, with norms or without.
    any: ByElemAndKv,
}

impl HeadsKernels {
    /// Looks them up.
    pub(super) fn new(kernels: &Kernels) -> Result<Self, BackendError> {
        Ok(Self {
            in_halves: by_elem_and_kv(kernels, "heads_in_halves")?,
            normed_in_halves: by_elem_and_kv(kernels, "heads_normed_in_halves")?,
            any: by_elem_and_kv(kernels, "heads")?,
        })
    }
}

/// Whether a few lanes, a power of two, hold a head that turns as a whole.
fn turns_in_halves(head_dim: u32, pairs: u32) -> bool {
    head_dim == 2 * pairs && head_dim.is_power_of_two() && (ELEMENTS_A_LANE..=32 * ELEMENTS_A_LANE).contains(&head_dim)
}

/// Warps that share a token's heads, as a power of two: the more tokens, the more units of heads has a warp, in threes
/// that are on their way at once (measured, NOTES.md).
fn token_warps_log2(num_tokens: u32, head_dim: u32, all_heads: u32) -> u32 {
    let units = all_heads.div_ceil((32 * ELEMENTS_A_LANE / head_dim).max(1));
    let share = match num_tokens {
        0..=128 => 1,
        129..=256 => 2,
        257..=1024 => 3,
        _ => 6,
    };
    units.div_ceil(share).next_power_of_two().trailing_zeros()
}

/// Blocks over which a token's heads are spread: one head a warp for few tokens.
fn heads_across(num_tokens: u32, all_heads: u32) -> u32 {
    FEW_BLOCKS.div_ceil(num_tokens.max(1)).min(all_heads.div_ceil(HEAD_WARPS))
}

impl AttentionOps {
    /// Rotates `x` `[T, heads * E]` in place.
    pub(crate) fn rope(
        &self,
        x: View,
        (num_tokens, num_heads, head_dim): (u32, u32, u32),
        table: &RopeTable,
        batch: &CudaBatch,
    ) -> Result<(), BackendError> {
        let (pairs, inv_freq) = self.frequencies(table, x)?;
        let args = RopeArgs {
            x: x.address,
            positions: batch.positions,
            num_heads,
            head_dim,
            pairs,
            interleaved: u32::from(table.style == RopeStyle::Interleaved),
            magnitude: table.magnitude,
            inv_freq,
        };
        let work = num_heads.saturating_mul(args.pairs);
        let threads = work.next_multiple_of(32).clamp(32, 512);
        // SAFETY: the struct is the kernel's; the op checked x `[T, heads * E]` and that pairs fit a head; the
        // batch holds T positions.
        unsafe { self.device.launch(self.rope[x.elem as usize].0, (num_tokens, 1), threads, 0, &args) }
    }

    /// Number of pairs, and the frequencies as kernels take them.
    fn frequencies(&self, table: &RopeTable, x: View) -> Result<(u32, [f32; MAX_PAIRS]), BackendError> {
        let pairs = table.inv_freq.len();
        if pairs > MAX_PAIRS {
            return Err(BackendError::Unsupported {
                device: self.device.label(),
                op: "rope",
                dtype: x.elem.dtype(),
                detail: format!("{pairs} pairs of a head; at most {MAX_PAIRS}"),
            });
        }
        let mut inv_freq = [0.0; MAX_PAIRS];
        inv_freq[..pairs].copy_from_slice(&table.inv_freq);
        Ok((word(pairs), inv_freq))
    }

    /// The step's angles `[T, 2, pairs]`: as its first layer with these frequencies left them, else made anew.
    fn angles(
        &self,
        table: &RopeTable,
        (pairs, inv_freq): (u32, [f32; MAX_PAIRS]),
        num_tokens: u32,
        batch: &CudaBatch,
    ) -> Result<u64, BackendError> {
        let mut held = self.angles.lock().unwrap_or_else(PoisonError::into_inner);
        let (address, current) = held.place(&self.device, table, num_tokens, batch.serial)?;
        if !current {
            let args =
                AnglesArgs { angles: address, positions: batch.positions, pairs, magnitude: table.magnitude, inv_freq };
            let threads = pairs.next_multiple_of(32).clamp(32, 256);
            // SAFETY: the struct is the kernel's; the place holds T rows, and the batch T positions.
            unsafe { self.device.launch(self.rope_angles.0, (num_tokens, 1), threads, 0, &args) }?;
        }
        Ok(address)
    }

    /// Norms (where given) and rotates q in place and k, and writes k and v to their slots.
    pub(crate) fn heads(
        &self,
        task: &HeadsTask<'_>,
        batch: &CudaBatch,
        group: GroupPlace,
        pool: LayerPool<'_>,
    ) -> Result<(), BackendError> {
        let (pairs, inv_freq) = self.frequencies(task.rope, task.q)?;
        let angles = self.angles(task.rope, (pairs, inv_freq), task.num_tokens, batch)?;
        let mut args = HeadsArgs {
            q: task.q.address,
            k: task.k.address,
            v: task.v.address,
            q_norm: task.q_norm.map_or(0, |(weight, _)| weight),
            k_norm: task.k_norm.map_or(0, |(weight, _)| weight),
            angles,
            slots: group.slots,
            pool: pool.address,
            num_heads: task.num_heads,
            num_kv_heads: word(pool.spec.num_kv_heads),
            head_dim: word(pool.spec.head_dim),
            block_size: word(pool.spec.block_size),
            pairs,
            interleaved: u32::from(task.rope.style == RopeStyle::Interleaved),
            q_eps: task.q_norm.map_or(0.0, |(_, eps)| eps),
            k_eps: task.k_norm.map_or(0.0, |(_, eps)| eps),
            num_tokens: task.num_tokens,
            token_warps_log2: 0,
        };
        let all_heads = args.num_heads + 2 * args.num_kv_heads;
        let (forms, grid) = if turns_in_halves(args.head_dim, pairs) {
            args.token_warps_log2 = token_warps_log2(args.num_tokens, args.head_dim, all_heads);
            let is_normed = args.q_norm != 0 || args.k_norm != 0;
            let forms = if is_normed { &self.heads.normed_in_halves } else { &self.heads.in_halves };
            let warps = u64::from(args.num_tokens) << args.token_warps_log2;
            (forms, (u32::try_from(warps.div_ceil(u64::from(HEAD_WARPS))).unwrap_or(u32::MAX), 1))
        } else {
            (&self.heads.any, (args.num_tokens, heads_across(args.num_tokens, all_heads)))
        };
        let function = forms[task.q.elem as usize][self.kv_idx(pool.spec)?];
        // SAFETY: the struct is the kernel's; the op checked the shapes, that pairs fit a head and heads the pool,
        // whose size was checked against the kernel's limit; the batch's slots lie inside the pool. It waits
        // before it reads anything but norms' weights; the kernel behind it reads no key or value of this step, and
        // nothing else that a kernel of this step writes, before its own wait.
        unsafe { self.device.launch_overlapped(function.0, grid, HEAD_WARPS * 32, 0, &args) }
    }

    /// Writes k and v `[T, K * E]` to their slots.
    pub(crate) fn kv_write(
        &self,
        k: View,
        v: View,
        num_tokens: u32,
        group: GroupPlace,
        pool: LayerPool<'_>,
    ) -> Result<(), BackendError> {
        let args = KvWriteArgs {
            k: k.address,
            v: v.address,
            slots: group.slots,
            pool: pool.address,
            num_kv_heads: word(pool.spec.num_kv_heads),
            head_dim: word(pool.spec.head_dim),
            block_size: word(pool.spec.block_size),
        };
        let threads = (args.num_kv_heads * args.head_dim).next_multiple_of(32).clamp(32, 512);
        let function = self.kv_write[k.elem as usize][self.kv_idx(pool.spec)?];
        // SAFETY: the struct is the kernel's; the op checked both shapes, and the batch's slots lie inside the
        // pool: they were checked against its size.
        unsafe { self.device.launch(function.0, (num_tokens, 1), threads, 0, &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_in_halves_turn_as_a_whole() {
        assert!([8, 64, 128, 256].into_iter().all(|head_dim| turns_in_halves(head_dim, head_dim / 2)));
        for (head_dim, pairs) in [(128, 32), (80, 40), (512, 256), (4, 2)] {
            assert!(!turns_in_halves(head_dim, pairs), "{head_dim}, {pairs} pairs");
        }
    }

    #[test]
    fn warps_share_a_token() {
        for (tokens, head_dim, heads, log2) in [
            (1, 128, 48, 5),
            (256, 128, 48, 4),
            (1000, 128, 48, 3),
            (4096, 128, 48, 2),
            (1, 64, 15, 2),
            (1, 256, 6, 3),
            (1, 8, 3, 0),
        ] {
            assert_eq!(token_warps_log2(tokens, head_dim, heads), log2, "{tokens} tokens, {heads} heads of {head_dim}");
        }
    }

    #[test]
    fn few_tokens_have_a_warp_for_each_head() {
        for (tokens, across) in [(0, 6), (1, 6), (32, 6), (64, 5), (256, 2), (2048, 1)] {
            assert_eq!(heads_across(tokens, 48), across, "{tokens} tokens");
        }
    }
}
