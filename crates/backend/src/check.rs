//! Checks in front of every op that are the same on every device: shapes, dtypes and the step's batch
//! metadata. Every backend calls them before it takes a pointer. Knows no memory.

use crate::{AttentionParams, BackendError, BatchLayout, DType, DeviceBatch, KvPoolSpec, RopeTable, Tensor};

/// A shape error of `op`.
#[must_use]
pub fn shape_error(op: &'static str, expected: impl Into<String>, got: impl Into<String>) -> BackendError {
    BackendError::Shape { op, expected: expected.into(), got: got.into() }
}

/// `Ok` when `holds`, else the shape error that `describe` gives as (expected, got).
///
/// # Errors
/// [`BackendError::Shape`], naming `op`.
pub fn ensure(op: &'static str, holds: bool, describe: impl FnOnce() -> (String, String)) -> Result<(), BackendError> {
    if holds {
        return Ok(());
    }
    let (expected, got) = describe();
    Err(BackendError::Shape { op, expected, got })
}

/// `x` holds f32.
///
/// # Errors
/// [`BackendError::Shape`], naming `op`.
pub fn ensure_f32(op: &'static str, x: &Tensor) -> Result<(), BackendError> {
    ensure(op, x.dtype() == DType::F32, || ("an F32 tensor".into(), x.dtype().to_string()))
}

/// `x` is `[rows, cols]`.
///
/// # Errors
/// [`BackendError::Shape`], naming `op`.
pub fn ensure_shape(op: &'static str, what: &str, x: &Tensor, rows: usize, cols: usize) -> Result<(), BackendError> {
    ensure(op, x.rows() == rows && x.cols() == cols, || {
        (format!("{what} [{rows}, {cols}]"), format!("[{}, {}]", x.rows(), x.cols()))
    })
}

/// Head counts and sizes fit together, and the pool and the batch have what `params` names.
///
/// # Errors
/// [`BackendError::Shape`], naming `op`.
pub fn ensure_attention(
    op: &'static str,
    params: &AttentionParams,
    batch: &DeviceBatch,
    spec: &KvPoolSpec,
) -> Result<(), BackendError> {
    let &AttentionParams { num_heads, num_kv_heads, head_dim, group_idx, layer_in_group, window, soft_cap, .. } =
        params;
    ensure(op, num_kv_heads > 0 && num_heads.is_multiple_of(num_kv_heads) && num_heads > 0, || {
        ("KV heads dividing the query heads".into(), format!("{num_heads} query heads, {num_kv_heads} KV heads"))
    })?;
    ensure(op, num_kv_heads == spec.num_kv_heads && head_dim == spec.head_dim, || {
        (
            format!("{} KV heads of {} elements, as in the pool", spec.num_kv_heads, spec.head_dim),
            format!("{num_kv_heads} of {head_dim}"),
        )
    })?;
    ensure(op, num_kv_heads <= params.num_kv_heads_max, || {
        (format!("at most {} KV heads on a rank", params.num_kv_heads_max), num_kv_heads.to_string())
    })?;
    ensure(op, layer_in_group < spec.layers_per_group, || {
        (format!("a pool tensor below {}", spec.layers_per_group), layer_in_group.to_string())
    })?;
    ensure(op, group_idx < batch.layout.groups.len(), || {
        (format!("a cache group below {}", batch.layout.groups.len()), group_idx.to_string())
    })?;
    ensure(op, window != Some(0), || ("a window of at least one token".into(), "0".into()))?;
    let is_cap = |cap: f32| cap.is_finite() && cap > 0.0;
    ensure(op, soft_cap.is_none_or(is_cap), || ("a soft cap above 0".into(), format!("{soft_cap:?}")))?;
    params.sinks.as_ref().map_or(Ok(()), |sinks| {
        ensure_shape(op, "sinks", sinks, 1, num_heads)?;
        ensure_f32(op, sinks)
    })
}

/// `cols` are whole heads, and a head has as many elements as are rotated.
///
/// # Errors
/// [`BackendError::Shape`], naming `op`.
pub fn ensure_rope(op: &'static str, cols: usize, head_dim: usize, table: &RopeTable) -> Result<(), BackendError> {
    let pairs = table.inv_freq.len();
    ensure(op, head_dim > 0 && cols.is_multiple_of(head_dim) && 2 * pairs <= head_dim, || {
        (format!("whole heads of at least {} elements", 2 * pairs), format!("{cols} columns, heads of {head_dim}"))
    })
}

/// Every slot is inside the pool. (`upload_batch` saw to this; it is asked again because K and V are written through
/// pointers.)
///
/// # Errors
/// [`BackendError::Shape`], naming `op`.
pub fn ensure_slots(op: &'static str, slots: &[u32], spec: &KvPoolSpec) -> Result<(), BackendError> {
    let num_slots = spec.num_blocks * spec.block_size;
    ensure(op, slots.iter().all(|&slot| (slot as usize) < num_slots), || {
        (format!("slots below {num_slots}"), format!("{slots:?}"))
    })
}

/// Everything the kernels take for granted about a batch: see [`crate::Backend::upload_batch`].
///
/// # Errors
/// [`BackendError::Shape`], naming the field.
pub fn ensure_batch(layout: &BatchLayout, spec: &KvPoolSpec) -> Result<(), BackendError> {
    const OP: &str = "upload_batch";
    let BatchLayout { query_start, seq_lens, positions, groups } = layout;
    let (num_seqs, num_tokens) = (layout.num_seqs(), layout.num_tokens());
    ensure_offsets("query_start", query_start, num_seqs, num_tokens)?;
    for seq in 0..num_seqs {
        let (first, last) = (query_start[seq] as usize, query_start[seq + 1] as usize);
        let seq_len = seq_lens[seq] as usize;
        ensure(OP, last - first <= seq_len, || {
            (format!("sequence {seq}: at most seq_len {seq_len} tokens"), (last - first).to_string())
        })?;
        let first_position = seq_len - (last - first);
        for (offset, &position) in positions[first..last].iter().enumerate() {
            ensure(OP, position as usize == first_position + offset, || {
                (
                    format!("sequence {seq}: position {} of token {}", first_position + offset, first + offset),
                    position.to_string(),
                )
            })?;
        }
    }
    for (group_idx, group) in groups.iter().enumerate() {
        ensure(OP, group.slot_mapping.len() == num_tokens, || {
            (format!("group {group_idx}: {num_tokens} slots"), group.slot_mapping.len().to_string())
        })?;
        let num_slots = spec.num_blocks * spec.block_size;
        let end = index_end(num_slots);
        if let Some(slot) = find(&group.slot_mapping, |slot| (slot >= end) | (slot == u32::MAX)) {
            return Err(shape_error(OP, format!("group {group_idx}: slots below {num_slots}"), slot.to_string()));
        }
        ensure_offsets("block_table_start", &group.block_table_start, num_seqs, group.block_table.len())?;
        let end = index_end(spec.num_blocks);
        // `u32::MAX`, behind a window, becomes 0.
        if let Some(block) = find(&group.block_table, |block| block.wrapping_add(1) > end) {
            return Err(shape_error(
                OP,
                format!("group {group_idx}: blocks below {}", spec.num_blocks),
                block.to_string(),
            ));
        }
        for (seq, (starts, &seq_len)) in group.block_table_start.windows(2).zip(seq_lens).enumerate() {
            let entries = (starts[1] - starts[0]) as usize;
            let needed = (seq_len as usize).div_ceil(spec.block_size);
            ensure(OP, entries >= needed, || {
                (format!("group {group_idx}, sequence {seq}: at least {needed} blocks"), entries.to_string())
            })?;
        }
    }
    Ok(())
}

/// The first index behind `len` of something, as far as 32 bits can tell.
fn index_end(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

/// The first of `indices` that `is_outside`. A step has tens of thousands of them and none is: a chunk is looked at as a
/// whole, so that several are compared at once.
fn find(indices: &[u32], is_outside: impl Fn(u32) -> bool) -> Option<u32> {
    const CHUNK: usize = 256;
    let has_any = |chunk: &&[u32]| chunk.iter().fold(0, |any, &index| any | u32::from(is_outside(index))) != 0;
    indices.chunks(CHUNK).find(has_any)?.iter().copied().find(|&index| is_outside(index))
}

/// `starts` is `[count + 1]`, begins at 0, never falls and ends at `end`.
fn ensure_offsets(what: &str, starts: &[u32], count: usize, end: usize) -> Result<(), BackendError> {
    const OP: &str = "upload_batch";
    ensure(OP, starts.len() == count + 1, || (format!("{} entries in {what}", count + 1), starts.len().to_string()))?;
    ensure(OP, starts[0] == 0 && starts[count] as usize == end, || {
        (format!("{what} from 0 to {end}"), format!("{} to {}", starts[0], starts[count]))
    })?;
    ensure(OP, starts.is_sorted(), || (format!("{what} that never falls"), format!("{starts:?}")))
}
