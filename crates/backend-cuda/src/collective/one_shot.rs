//! Sums in one launch over peer memory (`kernels/all_reduce.cu`). Decides which sums are taken so; the arithmetic is
//! in the kernel.

use super::inbox::Inbox;
use super::verdict::{PATIENCE, Verdict};
use crate::check::{Elem, View};
use crate::device::Device;
use crate::images::Kernels;
use crate::memory::DeviceMemory;
use crate::rows::{Function, by_elem, norm_threads};
use pagemill_backend::BackendError;
use std::sync::Arc;

/// These repeat all_reduce.cu.
const MAX_RANKS: usize = 8;
const MAX_BLOCKS: usize = 128;
const MAX_PACKS: usize = 2048;
const PACK: usize = 4;
const MAX_THREADS: u32 = 512;
/// Of two parities and two lines of 16 bytes for each pack.
const INBOX_BYTES_PER_RANK: usize = 2 * MAX_BLOCKS * MAX_PACKS * 2 * 16;

/// Bytes of a sum at most: beyond, sending everything to everybody costs more than NCCL's way.
const MAX_BYTES: usize = 512 << 10;
/// Elements of a block of a sum without a norm at least.
const MIN_PER_BLOCK: usize = 1024;
/// Blocks of a launch where ranks share a GPU: those that wait must leave room for what they wait for.
const MAX_BLOCKS_SHARED: usize = 32;

/// `ReduceArgs` in all_reduce.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct ReduceArgs {
    inboxes: [u64; MAX_RANKS],
    calls: u64,
    halt: u64,
    report: u64,
    x: u64,
    residual: u64,
    weight: u64,
    out: u64,
    patience_ns: u64,
    count: u32,
    per_block: u32,
    rank: u32,
    num_ranks: u32,
    eps: f32,
}

/// What is summed: `[rows, cols]`.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub(crate) x: View,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

/// Where the sum goes besides: `[rows, cols]` each.
pub(crate) struct AddNorm {
    /// f32.
    pub(crate) residual: u64,
    /// f32 `[cols]`.
    pub(crate) weight: u64,
    /// Of the part's type.
    pub(crate) out: u64,
    pub(crate) eps: f32,
}

/// One rank's end.
pub(crate) struct OneShot {
    device: Arc<Device>,
    sum: [Function; 2],
    sum_add_norm: [Function; 2],
    /// By rank of the stage.
    inboxes: Arc<Vec<Inbox>>,
    calls: DeviceMemory,
    verdict: Arc<Verdict>,
    rank: usize,
    report: u64,
    max_blocks: usize,
}

/// Blocks, and elements of each, of a sum of `count` elements.
fn cut(count: usize, max_blocks: usize) -> (usize, usize) {
    let per_block = count.div_ceil(max_blocks).max(MIN_PER_BLOCK).next_multiple_of(PACK);
    (count.div_ceil(per_block), per_block)
}

/// Whether a sum of so many elements of this type is taken in one launch.
fn takes(elem: Elem, count: usize, max_blocks: usize) -> bool {
    let bytes = count * elem.dtype().block_bytes();
    (1..=MAX_BYTES).contains(&bytes) && count.is_multiple_of(PACK) && cut(count, max_blocks).1 <= PACK * MAX_PACKS
}

/// Whether rows are summed, added and normed in one launch.
fn takes_rows(elem: Elem, rows: usize, cols: usize, max_blocks: usize) -> bool {
    (1..=max_blocks).contains(&rows)
        && cols.is_multiple_of(PACK)
        && (1..=PACK * MAX_PACKS).contains(&cols)
        && rows * cols * elem.dtype().block_bytes() <= MAX_BYTES
}

impl OneShot {
    /// The ends of the ranks of a stage, on `devices`; `None` where they cannot reach one another. `first_rank` is
    /// the stage's first in the world.
    pub(crate) fn connect(
        devices: &[Arc<Device>],
        kernels: &[&Kernels],
        verdict: &Arc<Verdict>,
        first_rank: usize,
    ) -> Result<Option<Vec<Self>>, BackendError> {
        if !(2..=MAX_RANKS).contains(&devices.len()) {
            return Ok(None);
        }
        for from in devices {
            for to in devices {
                if !from.reaches(to)? {
                    return Ok(None);
                }
            }
        }
        let shares = |at: usize| devices[..at].iter().any(|other| other.ordinal() == devices[at].ordinal());
        let max_blocks = if (0..devices.len()).any(shares) { MAX_BLOCKS_SHARED } else { MAX_BLOCKS };
        let len = INBOX_BYTES_PER_RANK * devices.len();
        let inboxes = devices.iter().map(|device| Inbox::take(device, len, devices));
        let inboxes = Arc::new(inboxes.collect::<Result<Vec<_>, _>>()?);
        let end = |(rank, (device, kernels)): (usize, (&Arc<Device>, &&Kernels))| {
            let calls = DeviceMemory::zeroed(device, MAX_BLOCKS * 4, "counts of sums")?;
            device.synchronize()?;
            Ok(Self {
                device: Arc::clone(device),
                sum: by_elem(kernels, "all_reduce")?,
                sum_add_norm: by_elem(kernels, "all_reduce_add_norm")?,
                inboxes: Arc::clone(&inboxes),
                calls,
                verdict: Arc::clone(verdict),
                rank,
                report: verdict.report_address(first_rank + rank),
                max_blocks,
            })
        };
        devices.iter().zip(kernels).enumerate().map(end).collect::<Result<_, _>>().map(Some)
    }

    /// `x` becomes the sum, if it is taken so.
    pub(crate) fn sum(&self, part: Part) -> Result<bool, BackendError> {
        let count = part.rows * part.cols;
        if !takes(part.x.elem, count, self.max_blocks) {
            return Ok(false);
        }
        let (blocks, per_block) = cut(count, self.max_blocks);
        let args = self.args(part, per_block);
        let threads = word(per_block.div_ceil(PACK).next_multiple_of(32)).min(MAX_THREADS);
        self.launch(self.sum[part.x.elem as usize], blocks, threads, &args)?;
        Ok(true)
    }

    /// `x` becomes the sum, however large, in as many launches as that takes.
    pub(crate) fn sum_in_pieces(&self, part: Part) -> Result<(), BackendError> {
        let (count, size) = (part.rows * part.cols, part.x.elem.dtype().block_bytes());
        let most = (MAX_BYTES / size).min(self.max_blocks * PACK * MAX_PACKS);
        for first in (0..count).step_by(most) {
            let x = View { address: part.x.address + (first * size) as u64, elem: part.x.elem };
            if !self.sum(Part { x, rows: 1, cols: most.min(count - first) })? {
                let detail = format!("ranks that share a GPU sum multiples of {PACK} elements, not {count}");
                return Err(BackendError::Collective { op: "all_reduce", detail });
            }
        }
        Ok(())
    }

    /// `residual += sum`, then the norm, if it is taken so.
    pub(crate) fn sum_add_norm(&self, part: Part, task: &AddNorm) -> Result<bool, BackendError> {
        if !takes_rows(part.x.elem, part.rows, part.cols, self.max_blocks) {
            return Ok(false);
        }
        let AddNorm { residual, weight, out, eps } = *task;
        let args = ReduceArgs { residual, weight, out, eps, ..self.args(part, part.cols) };
        self.launch(self.sum_add_norm[part.x.elem as usize], part.rows, norm_threads(word(part.cols)), &args)?;
        Ok(true)
    }

    fn args(&self, part: Part, per_block: usize) -> ReduceArgs {
        let mut inboxes = [0; MAX_RANKS];
        inboxes.iter_mut().zip(self.inboxes.iter()).for_each(|(address, inbox)| *address = inbox.address());
        ReduceArgs {
            inboxes,
            calls: self.calls.address(),
            halt: self.verdict.halt_address(),
            report: self.report,
            x: part.x.address,
            residual: 0,
            weight: 0,
            out: 0,
            patience_ns: u64::try_from(PATIENCE.as_nanos()).unwrap_or(u64::MAX),
            count: word(part.rows * part.cols),
            per_block: word(per_block),
            rank: word(self.rank),
            num_ranks: word(self.inboxes.len()),
            eps: 0.0,
        }
    }

    fn launch(&self, function: Function, blocks: usize, threads: u32, args: &ReduceArgs) -> Result<(), BackendError> {
        // SAFETY: the struct is the kernel's, which waits before it reads and lets its successor begin then; the op
        // checked that every tensor has `count` elements of the type that picked the kernel; blocks, elements of a
        // block and threads are within what inboxes and counts have room for, by `takes` and `takes_rows`.
        unsafe { self.device.launch_overlapped(function.0, (word(blocks), 1), threads, 0, args) }
    }
}

/// Counts here are below `MAX_BYTES`.
fn word(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sum_fits_its_blocks() {
        for (elem, most) in Elem::ALL.into_iter().flat_map(|elem| [(elem, MAX_BLOCKS), (elem, MAX_BLOCKS_SHARED)]) {
            for count in (4..=262_144).step_by(4).chain([262_148, 1 << 20]) {
                let bytes = count * elem.dtype().block_bytes();
                assert_eq!(takes(elem, count, most), bytes <= MAX_BYTES, "{count}");
                let (blocks, per_block) = cut(count, most);
                if takes(elem, count, most) {
                    assert!(blocks <= most && per_block <= PACK * MAX_PACKS, "{count}");
                    assert!((blocks - 1) * per_block < count && blocks * per_block >= count, "{count}");
                }
            }
            assert!(!takes(elem, 0, most) && !takes(elem, 6, most));
        }
    }

    #[test]
    fn rows_are_whole_and_few() {
        let takes_rows = |elem, rows, cols| takes_rows(elem, rows, cols, MAX_BLOCKS);
        assert!(
            takes_rows(Elem::Bf16, 1, 4096) && takes_rows(Elem::Bf16, 64, 4096) && takes_rows(Elem::Bf16, 32, 8192)
        );
        assert!(!takes_rows(Elem::Bf16, 65, 4096), "beyond the bytes of a sum");
        assert!(!takes_rows(Elem::F32, 129, 64), "beyond the blocks");
        assert!(!takes_rows(Elem::F32, 1, 8196), "beyond a block's packs");
        assert!(!takes_rows(Elem::F32, 1, 66) && !takes_rows(Elem::F32, 0, 64));
        // A thread has four packs at most.
        assert!((norm_threads(8192) * 4) as usize >= MAX_PACKS && norm_threads(8192) <= MAX_THREADS);
        for cols in (4..=8192).step_by(4) {
            assert!(norm_threads(cols) * 4 * 4 >= cols, "{cols}");
        }
    }
}
