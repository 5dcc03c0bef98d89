//! Paged attention: which thread computes which rows, and in what order partial results are joined.
//! The arithmetic of one span is the vector file's business.
//!
//! A row is one (token, query head). Its positions are cut into spans at fixed multiples of [`SPAN`]
//! *of the absolute position*, and spans into tiles of 16 positions. Within a span a row's softmax is
//! plain (maximum, exponentials, sum, weighted V in order of position); spans are joined in order by
//! rescaling. So a row's arithmetic depends on its own position, window and cache only: not on block
//! size, chunking, batch, threads, nor on whether spans were computed by one thread or by several.
//!
//! ```text
//! positions  0 ........ 256 ........ 512 .. p        row (token at p, head h)
//! spans      [ span 0  )[ span 1   )[ span 2 ]       each: max m, sum l, weighted V o[E]
//! join       ((s0 + s1) + s2), then out = o / l
//! ```

use super::check::{ensure, shape_error};
use super::isa::{Isa, Vectors};
use super::kv_layout::{KvLayer, TILE};
use super::linear::OutMatrix;
use super::memory::AlignedBytes;
use super::pool::{SendPtr, ThreadPool};
use super::reference::{self, AttentionRow};
use crate::{AttentionParams, BackendError, BatchLayout, GroupLayout};
use std::cell::RefCell;
use std::cmp::Reverse;
use std::ops::Range;

/// Positions of one span.
pub(crate) const SPAN: usize = 256;
/// Tiles of one span.
pub(crate) const SPAN_TILES: usize = SPAN / TILE;
/// Rows (tokens of a sequence × heads of a KV group) that share each load of K and V.
const ROWS_PER_ITEM: usize = 48;
/// Items wanted for each thread before spans are no longer given to different threads.
const ITEMS_PER_THREAD: usize = 4;
/// Pieces for each thread that the spans are then cut into: more even out better, fewer fetch ahead better.
const PARTS_PER_THREAD: usize = 8;
/// Floats kept for partial results of split rows (16 MiB of address space, touched as needed). A step
/// that would need more is not split.
const PARTIAL_FLOATS: usize = 4 << 20;

/// One attention call with everything checked.
pub(crate) struct AttentionTask<'a> {
    /// `[T, H * E]`.
    pub(crate) q: &'a [f32],
    pub(crate) params: &'a AttentionParams,
    /// `[H]`, if there are any.
    pub(crate) sinks: Option<&'a [f32]>,
    pub(crate) layout: &'a BatchLayout,
    pub(crate) group: &'a GroupLayout,
    pub(crate) kv: KvLayer,
    /// `[T, H * E]`.
    pub(crate) out: OutMatrix,
}

/// Memory kept from call to call.
#[derive(Default)]
pub(crate) struct AttentionScratch {
    items: Vec<WorkItem>,
    joins: Vec<WorkItem>,
    partials: Option<AlignedBytes>,
}

impl AttentionScratch {
    /// Bytes held for partial results.
    pub(crate) fn len_bytes(&self) -> usize {
        self.partials.as_ref().map_or(0, AlignedBytes::len)
    }
}

/// Rows of one sequence and one KV head, over a range of spans.
#[derive(Clone, Debug, PartialEq, Eq)]
struct WorkItem {
    seq_idx: usize,
    kv_head: usize,
    /// Index in the batch.
    first_token: usize,
    num_tokens: usize,
    /// Position of the first token.
    first_position: usize,
    spans: Range<usize>,
    /// Where partial results of the first span begin (those of the others follow), for split rows.
    partial_start: Option<usize>,
}

impl WorkItem {
    fn cost(&self) -> usize {
        self.num_tokens * self.spans.len()
    }
}

/// What one span computes: `num_tokens * heads_per_kv` rows against up to [`SPAN`] positions.
pub(crate) struct SpanInput {
    /// Row (token 0, head 0) `[E]`; heads follow one another.
    pub(crate) q: *const f32,
    /// Elements from a token's rows to the next token's.
    pub(crate) q_token_stride: usize,
    pub(crate) num_tokens: usize,
    pub(crate) heads_per_kv: usize,
    pub(crate) head_dim: usize,
    pub(crate) scale: f32,
    pub(crate) is_f16: bool,
    /// Position of token 0.
    pub(crate) first_position: usize,
    /// First position of the span.
    pub(crate) span_start: usize,
    pub(crate) window: Option<usize>,
    /// K tiles `[E, TILE]`; null outside what the rows see.
    pub(crate) k_tiles: [*const u8; SPAN_TILES],
    /// V tiles `[TILE, E]`.
    pub(crate) v_tiles: [*const u8; SPAN_TILES],
    /// K tiles of the item's next span, to be fetched ahead; null where there are none.
    pub(crate) next_k_tiles: [*const u8; SPAN_TILES],
}

impl SpanInput {
    /// Positions, relative to the span, that `token` sees. May be empty.
    pub(crate) fn visible(&self, token: usize) -> Range<usize> {
        let end = self.first_position + token + 1;
        let begin = self.window.map_or(0, |window| end.saturating_sub(window));
        let relative = |position: usize| position.clamp(self.span_start, self.span_start + SPAN) - self.span_start;
        relative(begin)..relative(end).max(relative(begin))
    }

    /// Rows.
    pub(crate) fn num_rows(&self) -> usize {
        self.num_tokens * self.heads_per_kv
    }

    /// The query row `[E]`.
    pub(crate) fn q_row(&self, row: usize) -> *const f32 {
        let (token, head) = (row / self.heads_per_kv, row % self.heads_per_kv);
        self.q.wrapping_add(token * self.q_token_stride + head * self.head_dim)
    }
}

/// Softmax state of rows over some positions, in scratch. A row that saw nothing has sum 0.
#[derive(Clone, Copy)]
pub(crate) struct RowState {
    /// `[rows]` greatest scaled score, in the unit of the kernels that made it.
    pub(crate) max: *mut f32,
    /// `[rows]` sum of exponentials.
    pub(crate) sum: *mut f32,
    /// `[rows, E]` sum of exponential × V.
    pub(crate) acc: *mut f32,
}

impl RowState {
    /// Floats that the state of `rows` rows takes.
    fn len(rows: usize, head_dim: usize) -> usize {
        (2 * rows).next_multiple_of(16) + rows * head_dim
    }

    /// A state laid out from `base`.
    ///
    /// # Safety
    /// `Self::len(rows, _)` floats from `base` are valid and unshared.
    unsafe fn at(base: *mut f32, rows: usize) -> Self {
        // SAFETY: inside the range given.
        unsafe { Self { max: base, sum: base.add(rows), acc: base.add((2 * rows).next_multiple_of(16)) } }
    }
}

/// Vector kernels of one instruction set. Head sizes are multiples of 16.
pub(crate) struct AttentionKernels {
    /// Floats of scratch that `span` needs for so many rows.
    pub(crate) scratch_floats: fn(rows: usize) -> usize,
    /// Fills `state` for one span.
    ///
    /// # Safety
    /// All pointers are valid for the rows and positions that `SpanInput::visible` names, `scratch` for
    /// `scratch_floats`.
    pub(crate) span: unsafe fn(input: &SpanInput, scratch: *mut f32, state: RowState),
    /// The exponential of a difference of two maxima, in their unit.
    ///
    /// # Safety
    /// The machine has the set.
    pub(crate) exp: unsafe fn(f32) -> f32,
    /// `a = a * scale_a + b * scale_b`, one fused operation after the second product.
    ///
    /// # Safety
    /// `a` and `b` are valid for `head_dim` floats.
    pub(crate) blend: unsafe fn(a: *mut f32, scale_a: f32, b: *const f32, scale_b: f32, head_dim: usize),
    /// `out = acc / sum` of one row.
    ///
    /// # Safety
    /// `acc` and `out` are valid for `head_dim` floats.
    pub(crate) finish: unsafe fn(acc: *const f32, sum: f32, out: *mut f32, head_dim: usize),
}

/// The vector kernels for a layer; they know neither soft caps nor sinks.
fn kernels(isa: Isa, params: &AttentionParams) -> Option<&'static AttentionKernels> {
    let head_dim = params.head_dim;
    match isa.vectors() {
        _ if !head_dim.is_multiple_of(TILE) || params.soft_cap.is_some() || params.sinks.is_some() => None,
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx512 if head_dim <= super::avx512_attention::MAX_HEAD_DIM => Some(&super::avx512_attention::KERNELS),
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx2 | Vectors::Avx512 => Some(&super::avx2_attention::KERNELS),
        #[cfg(target_arch = "aarch64")]
        Vectors::Neon => Some(&super::neon_attention::KERNELS),
        _ => None,
    }
}

thread_local! {
    /// Scores and states of the item that this thread works on; grows while warming up.
    static ITEM_SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Runs the op.
pub(crate) fn run(
    pool: &ThreadPool,
    isa: Isa,
    task: &AttentionTask<'_>,
    scratch: &mut AttentionScratch,
) -> Result<(), BackendError> {
    let Some(kernels) = prepare(pool, isa, task, scratch)? else {
        let items = &scratch.items;
        return pool.run(items.len(), &|idx| scalar_item(task, &items[idx]));
    };
    scratch.items.sort_unstable_by_key(|item| Reverse(item.cost()));
    let AttentionScratch { items, joins, partials } = scratch;
    let partials = SendPtr(partials.as_mut().map_or(std::ptr::null_mut(), |bytes| bytes.as_mut_ptr().cast::<f32>()));
    pool.run(items.len(), &|idx| vector_item(kernels, task, &items[idx], partials))?;
    pool.run(joins.len(), &|idx| join_item(kernels, task, &joins[idx], partials))
}

/// Plans the op's items and takes the scratch for them. The vector kernels that will run them, if any do.
pub(crate) fn prepare(
    pool: &ThreadPool,
    isa: Isa,
    task: &AttentionTask<'_>,
    scratch: &mut AttentionScratch,
) -> Result<Option<&'static AttentionKernels>, BackendError> {
    let kernels = kernels(isa, task.params);
    plan_items(task, scratch)?;
    if kernels.is_some() {
        let num_partials = split_spans(task.params, pool.num_threads(), scratch);
        if num_partials > 0 && scratch.partials.is_none() {
            scratch.partials = Some(AlignedBytes::zeroed(PARTIAL_FLOATS * 4, "attention partial sums")?);
        }
    }
    Ok(kernels)
}

/// One item for each (sequence, KV head, tile of query tokens); checks the tables on the way.
fn plan_items(task: &AttentionTask<'_>, scratch: &mut AttentionScratch) -> Result<(), BackendError> {
    let AttentionTask { params, layout, kv, .. } = task;
    let heads_per_kv = params.num_heads / params.num_kv_heads;
    let tokens_per_item = (ROWS_PER_ITEM / heads_per_kv).max(1);
    scratch.items.clear();
    scratch.joins.clear();
    let mut next_token = 0;
    for seq_idx in 0..layout.num_seqs() {
        let (start, end) = (layout.query_start[seq_idx] as usize, layout.query_start[seq_idx + 1] as usize);
        let seq_len = layout.seq_lens[seq_idx] as usize;
        // `upload_batch` saw to this; it is asked again because rows are written through pointers.
        let in_batch = start == next_token && start <= end && end <= layout.num_tokens() && end - start <= seq_len;
        ensure("attention", in_batch, || {
            ("tokens packed end to end".into(), format!("sequence {seq_idx}: tokens {start}..{end} of {seq_len}"))
        })?;
        next_token = end;
        if start == end {
            continue;
        }
        let first_position = seq_len - (end - start);
        let see_from = visible_begin(first_position, params.window);
        let table = sequence_table(task, seq_idx);
        let used = see_from / kv.block_size()..seq_len.div_ceil(kv.block_size());
        let in_pool = table.get(used).is_some_and(|used| used.iter().all(|&block| (block as usize) < kv.num_blocks()));
        ensure("attention", in_pool, || {
            (format!("sequence {seq_idx}: a block for each position in sight"), format!("{table:?}"))
        })?;
        for first_token in (start..end).step_by(tokens_per_item) {
            let num_tokens = tokens_per_item.min(end - first_token);
            let position = first_position + first_token - start;
            let spans = visible_begin(position, params.window) / SPAN..(position + num_tokens).div_ceil(SPAN);
            scratch.items.extend((0..params.num_kv_heads).map(|kv_head| WorkItem {
                seq_idx,
                kv_head,
                first_token,
                num_tokens,
                first_position: position,
                spans: spans.clone(),
                partial_start: None,
            }));
        }
    }
    if scratch.items.iter().any(|item| item.spans.is_empty()) {
        return Err(shape_error("attention", "rows that see at least one position", "none"));
    }
    Ok(())
}

/// The first position that the token at `position` sees.
fn visible_begin(position: usize, window: Option<usize>) -> usize {
    window.map_or(0, |window| (position + 1).saturating_sub(window))
}

fn sequence_table<'a>(task: &AttentionTask<'a>, seq_idx: usize) -> &'a [u32] {
    let starts = &task.group.block_table_start;
    &task.group.block_table[starts[seq_idx] as usize..starts[seq_idx + 1] as usize]
}

/// When there are too few items for the threads, gives the spans of a row to several items, in pieces of
/// a few neighbours, and notes what to join: span by span, as one item would. Returns the floats of
/// partial results.
fn split_spans(params: &AttentionParams, num_threads: usize, scratch: &mut AttentionScratch) -> usize {
    let rows_per_token = params.num_heads / params.num_kv_heads;
    let state_len = |item: &WorkItem| RowState::len(item.num_tokens * rows_per_token, params.head_dim);
    let total: usize =
        scratch.items.iter().filter(|item| item.spans.len() > 1).map(|item| item.spans.len() * state_len(item)).sum();
    if num_threads == 1 || scratch.items.len() >= num_threads * ITEMS_PER_THREAD || total > PARTIAL_FLOATS {
        return 0;
    }
    let num_spans: usize = scratch.items.iter().map(|item| item.spans.len()).sum();
    let spans_per_part = (num_spans / (num_threads * PARTS_PER_THREAD)).max(1);
    let mut next = 0;
    for idx in 0..scratch.items.len() {
        let item = scratch.items[idx].clone();
        if item.spans.len() == 1 {
            continue;
        }
        let len = state_len(&item);
        let part = |nth: usize| WorkItem {
            spans: item.spans.start + nth..item.spans.end.min(item.spans.start + nth + spans_per_part),
            partial_start: Some(next + nth * len),
            ..item.clone()
        };
        let mut parts = (0..item.spans.len()).step_by(spans_per_part).map(part);
        scratch.items[idx] = parts.next().unwrap_or_else(|| item.clone());
        scratch.items.extend(parts);
        next += item.spans.len() * len;
        scratch.joins.push(WorkItem { partial_start: Some(next - item.spans.len() * len), ..item });
    }
    next
}

fn scalar_item(task: &AttentionTask<'_>, item: &WorkItem) {
    let &AttentionParams { num_heads, num_kv_heads, head_dim, scale, window, soft_cap, .. } = task.params;
    let heads_per_kv = num_heads / num_kv_heads;
    let table = sequence_table(task, item.seq_idx);
    ITEM_SCRATCH.with_borrow_mut(|scores| {
        for token in 0..item.num_tokens {
            let position = item.first_position + token;
            for head in item.kv_head * heads_per_kv..(item.kv_head + 1) * heads_per_kv {
                let cols = head * head_dim..(head + 1) * head_dim;
                let row = item.first_token + token;
                let q = &task.q[row * num_heads * head_dim..][cols.clone()];
                // SAFETY: items own disjoint (tokens, heads) of the output, whose shape was checked.
                let out = unsafe { task.out.row_mut(row, cols) };
                let row = AttentionRow {
                    q,
                    kv: &task.kv,
                    kv_head: item.kv_head,
                    table,
                    positions: visible_begin(position, window)..position + 1,
                    scale,
                    soft_cap,
                    sink: task.sinks.map(|sinks| sinks[head]),
                };
                reference::attention_row(&row, scores, out);
            }
        }
    });
}

/// Runs `work` with at least `len` floats of this thread's scratch.
fn with_scratch(len: usize, work: impl FnOnce(*mut f32)) {
    ITEM_SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < len {
            scratch.resize(len, 0.0);
        }
        work(scratch.as_mut_ptr());
    });
}

fn vector_item(kernels: &AttentionKernels, task: &AttentionTask<'_>, item: &WorkItem, partials: SendPtr<f32>) {
    let AttentionParams { num_heads, num_kv_heads, head_dim, .. } = *task.params;
    let rows = item.num_tokens * (num_heads / num_kv_heads);
    let state_len = RowState::len(rows, head_dim);
    let span_len = (kernels.scratch_floats)(rows);
    with_scratch(span_len + 2 * state_len, |scratch| {
        // SAFETY: `scratch` holds a span's scratch and two states; a split item's partial states are a
        // range of their own inside the partials (see `split_spans`); the span's pointers come from a checked
        // table.
        unsafe {
            let states = scratch.add(span_len);
            if let Some(start) = item.partial_start {
                for (nth, span) in item.spans.clone().enumerate() {
                    let state = RowState::at(partials.get().add(start + nth * state_len), rows);
                    (kernels.span)(&span_input(task, item, span), scratch, state);
                }
                return;
            }
            let total = RowState::at(states, rows);
            let later = RowState::at(states.add(state_len), rows);
            (kernels.span)(&span_input(task, item, item.spans.start), scratch, total);
            for span in item.spans.start + 1..item.spans.end {
                (kernels.span)(&span_input(task, item, span), scratch, later);
                join_states(kernels, total, later, rows, head_dim);
            }
            finish_rows(kernels, task, item, total);
        }
    });
}

fn join_item(kernels: &AttentionKernels, task: &AttentionTask<'_>, item: &WorkItem, partials: SendPtr<f32>) {
    let AttentionParams { num_heads, num_kv_heads, head_dim, .. } = *task.params;
    let rows = item.num_tokens * (num_heads / num_kv_heads);
    let state_len = RowState::len(rows, head_dim);
    let start = item.partial_start.unwrap_or(0);
    // SAFETY: the partial states of this item's spans lie one after another from `start`, all written
    // by the job before this one, and no other join reads them.
    unsafe {
        let state = |nth: usize| RowState::at(partials.get().add(start + nth * state_len), rows);
        for nth in 1..item.spans.len() {
            join_states(kernels, state(0), state(nth), rows, head_dim);
        }
        finish_rows(kernels, task, item, state(0));
    }
}

/// Joins the state of a later span into that of earlier ones.
///
/// # Safety
/// Both states are valid for `rows` rows of `head_dim`.
unsafe fn join_states(kernels: &AttentionKernels, earlier: RowState, later: RowState, rows: usize, head_dim: usize) {
    for row in 0..rows {
        // SAFETY: both states hold `rows` rows.
        unsafe {
            let (max_a, max_b) = (*earlier.max.add(row), *later.max.add(row));
            let (sum_a, sum_b) = (*earlier.sum.add(row), *later.sum.add(row));
            if sum_b == 0.0 {
                continue;
            }
            // A row that saw nothing so far takes the later state as it is: bit for bit what a
            // computation that begins at this span gives.
            let (scale_a, scale_b, max) = if sum_a == 0.0 {
                (0.0, 1.0, max_b)
            } else {
                let max = if max_a > max_b { max_a } else { max_b };
                ((kernels.exp)(max_a - max), (kernels.exp)(max_b - max), max)
            };
            *earlier.max.add(row) = max;
            *earlier.sum.add(row) = sum_a * scale_a + sum_b * scale_b;
            let (a, b) = (earlier.acc.add(row * head_dim), later.acc.add(row * head_dim));
            (kernels.blend)(a, scale_a, b, scale_b, head_dim);
        }
    }
}

/// # Safety
/// `state` is valid for the item's rows.
unsafe fn finish_rows(kernels: &AttentionKernels, task: &AttentionTask<'_>, item: &WorkItem, state: RowState) {
    let AttentionParams { num_heads, num_kv_heads, head_dim, .. } = *task.params;
    let heads_per_kv = num_heads / num_kv_heads;
    for row in 0..item.num_tokens * heads_per_kv {
        let (token, head) = (row / heads_per_kv, item.kv_head * heads_per_kv + row % heads_per_kv);
        // SAFETY: items own disjoint (tokens, heads) of the output, whose shape was checked.
        unsafe {
            let out = task.out.at(item.first_token + token, head * head_dim);
            (kernels.finish)(state.acc.add(row * head_dim), *state.sum.add(row), out, head_dim);
        }
    }
}

/// Looks up the tiles of one span in the block table: the only place that walks it.
fn span_input(task: &AttentionTask<'_>, item: &WorkItem, span: usize) -> SpanInput {
    let AttentionParams { num_heads, num_kv_heads, head_dim, scale, window, .. } = *task.params;
    let heads_per_kv = num_heads / num_kv_heads;
    let table = sequence_table(task, item.seq_idx);
    let span_start = span * SPAN;
    let begin = visible_begin(item.first_position, window).max(span_start);
    let end = item.first_position + item.num_tokens;
    let mut k_tiles = [std::ptr::null(); 2 * SPAN_TILES];
    let mut v_tiles = [std::ptr::null(); SPAN_TILES];
    let spans_ahead = (item.spans.end - span).min(2);
    for position in (begin - begin % TILE..end.min(span_start + spans_ahead * SPAN)).step_by(TILE) {
        let block = table[position / task.kv.block_size()] as usize;
        let offset = position % task.kv.block_size();
        let nth = (position - span_start) / TILE;
        k_tiles[nth] = task.kv.k_tile(block, item.kv_head, offset);
        if nth < SPAN_TILES {
            v_tiles[nth] = task.kv.v_rows(block, item.kv_head, offset);
        }
    }
    let (k_tiles, next_k_tiles) = k_tiles.split_at(SPAN_TILES);
    SpanInput {
        q: task.q[item.first_token * num_heads * head_dim + item.kv_head * heads_per_kv * head_dim..].as_ptr(),
        q_token_stride: num_heads * head_dim,
        num_tokens: item.num_tokens,
        heads_per_kv,
        head_dim,
        scale,
        is_f16: task.kv.is_f16(),
        first_position: item.first_position,
        span_start,
        window,
        k_tiles: std::array::from_fn(|nth| k_tiles[nth]),
        v_tiles,
        next_k_tiles: std::array::from_fn(|nth| next_k_tiles[nth]),
    }
}
