//! Attention over the paged cache, and how K and V get there: decodes of several sequences, and a prompt's chunk.
//!
//! Shape letters: `T` tokens, `H` query heads, `K` KV heads, `E` head size, `L` context.

use super::layout::Sequences;
use super::measure::{Calls, Cost, Measure};
use anyhow::Result;
use pagemill_backend::{
    AttentionParams, BackendError, DType, HeadTransform, KvPool, KvPoolSpec, Launching, Qkv, RopeStyle, RopeTable,
};
use pagemill_model::ModelSpec;

/// Steps of more tokens than this are a prompt's chunk, of fewer as many decodes.
pub const DECODES_MAX: usize = 256;
/// Bytes that the pool may take on the host, and on a device with memory of its own.
const POOL_BYTES_MAX: usize = 512 << 20;
const POOL_BYTES_MAX_APART: usize = 40 << 30;
/// Layers that a pool has at most.
const LAYERS_MAX: usize = 64;
/// Tokens that are written to the cache at once before it is read.
const FILL_TOKENS: usize = 8192;

/// How the model caches.
#[derive(Clone, Copy)]
pub struct Caching {
    /// Tokens of a block.
    pub block_size: usize,
    /// Element type.
    pub dtype: DType,
}

/// A step to time.
#[derive(Clone, Copy)]
struct Step {
    /// Sequences in it.
    sequences: usize,
    /// Tokens of each.
    tokens: usize,
    /// Tokens of each once the step is done.
    context: usize,
}

impl Step {
    fn name(self) -> String {
        let Self { sequences, tokens, context } = self;
        match (sequences, tokens) {
            (1, 1) => format!("decode, L {context}"),
            (1, tokens) => format!("prefill T {tokens}, L {context}"),
            (sequences, _) => format!("decode of {sequences}, L {context}"),
        }
    }
}

/// All steps of `tokens` tokens: from the beginning, and at the end of each context.
pub fn attention(
    measure: &mut Measure<'_>,
    spec: &ModelSpec,
    caching: Caching,
    tokens: usize,
    contexts: &[usize],
) -> Result<()> {
    if tokens <= DECODES_MAX {
        return contexts.iter().try_for_each(|&context| {
            time_step(measure, spec, caching, Step { sequences: tokens, tokens: 1, context })
        });
    }
    let longer = contexts.iter().copied().filter(|&context| context > tokens);
    [tokens]
        .into_iter()
        .chain(longer)
        .try_for_each(|context| time_step(measure, spec, caching, Step { sequences: 1, tokens, context }))
}

/// A pool of one layer for such sequences.
fn layer_pool(spec: &ModelSpec, caching: Caching, sequences: Sequences) -> KvPoolSpec {
    KvPoolSpec {
        num_blocks: sequences.num_blocks(),
        block_size: caching.block_size,
        layers_per_group: 1,
        num_kv_heads: spec.num_kv_heads,
        head_dim: spec.head_dim,
        dtype: caching.dtype,
    }
}

fn time_step(measure: &mut Measure<'_>, spec: &ModelSpec, caching: Caching, step: Step) -> Result<()> {
    let sequences = Sequences { count: step.sequences, capacity: step.context, block_size: caching.block_size };
    let one = layer_pool(spec, caching, sequences);
    let most = if measure.is_apart() { POOL_BYTES_MAX_APART } else { POOL_BYTES_MAX };
    let layer_bytes = one.pool_bytes().max(1);
    let name = format!("attention ({} KV)", caching.dtype);
    if layer_bytes > most {
        let why = format!("one layer's KV takes {layer_bytes} bytes; at most {most} are taken for this");
        measure.leave_out(name, step.name(), why);
        return Ok(());
    }
    let layers = measure.data_sets(layer_bytes, spec.num_layers).min(most / layer_bytes).clamp(1, LAYERS_MAX);
    let pool_spec = KvPoolSpec { layers_per_group: layers, ..one };
    let mut kv = match measure.backend.alloc_kv(&pool_spec) {
        Ok(kv) => kv,
        Err(error @ (BackendError::OutOfMemory { .. } | BackendError::Unsupported { .. })) => {
            measure.leave_out(name, step.name(), error.to_string());
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    fill(measure, spec, sequences, &mut kv)?;
    read(measure, spec, sequences, step, &kv, name)
}

/// Writes random K and V to every position.
fn fill(measure: &mut Measure<'_>, spec: &ModelSpec, sequences: Sequences, kv: &mut KvPool) -> Result<()> {
    let cols = spec.num_kv_heads * spec.head_dim;
    let at_once = (FILL_TOKENS / sequences.count).clamp(1, sequences.capacity);
    let tokens = sequences.count * at_once;
    let (k, v) = (measure.activation(tokens, cols)?, measure.activation(tokens, cols)?);
    let layers = kv.spec().layers_per_group;
    for first in (0..sequences.capacity).step_by(at_once) {
        // The last piece overlaps the one before it, so that all are of one length.
        let first = first.min(sequences.capacity - at_once);
        let layout = sequences.step(first..first + at_once)?;
        let batch = measure.backend.upload_batch(layout, kv.spec())?;
        for layer in 0..layers {
            measure.backend.kv_write(&k, &v, &params(spec, layer), &batch, kv)?;
        }
    }
    Ok(())
}

fn read(
    measure: &mut Measure<'_>,
    spec: &ModelSpec,
    sequences: Sequences,
    step: Step,
    kv: &KvPool,
    op: String,
) -> Result<()> {
    let backend = measure.backend;
    let layout = sequences.step(step.context - step.tokens..step.context)?;
    let batch = backend.upload_batch(layout, kv.spec())?;
    let (tokens, cols) = (batch.layout.num_tokens(), spec.num_heads * spec.head_dim);
    let q = measure.activation(tokens, cols)?;
    let mut out = backend.activation(tokens, cols)?;
    let visible: usize = batch.layout.positions.iter().map(|&p| p as usize + 1).sum();
    let cached = step.sequences * step.context * 2 * spec.num_kv_heads * spec.head_dim;
    let calls = kv.spec().layers_per_group;
    let cost = Cost {
        op,
        shape: step.name(),
        bytes: cached * kv.spec().dtype.block_bytes() + 2 * tokens * cols * measure.activation_bytes,
        // q·k and p·v, a multiplication and an addition each.
        ops: 4 * visible * cols,
        arithmetic: measure.float_arithmetic(),
        calls,
        data_sets: calls,
    };
    measure.add(cost, Calls::On(Launching::Recorded), |layer| {
        backend.attention(&q, &params(spec, layer), &batch, kv, &mut out)
    })
}

fn params(spec: &ModelSpec, layer: usize) -> AttentionParams {
    #[allow(clippy::cast_precision_loss)] // a head's size
    let scale = (spec.head_dim as f32).sqrt().recip();
    AttentionParams {
        num_heads: spec.num_heads,
        num_kv_heads: spec.num_kv_heads,
        num_kv_heads_max: spec.num_kv_heads,
        head_dim: spec.head_dim,
        scale,
        window: None,
        soft_cap: None,
        sinks: None,
        group_idx: 0,
        layer_in_group: layer,
    }
}

/// Turning q and k by their positions and writing K and V, in one op: a prompt's first `tokens` tokens, or as many
/// decodes.
pub fn rope_kv_write(measure: &mut Measure<'_>, spec: &ModelSpec, caching: Caching, tokens: usize) -> Result<()> {
    let count = if tokens <= DECODES_MAX { tokens } else { 1 };
    let each = tokens / count;
    let sequences = Sequences { count, capacity: each, block_size: caching.block_size };
    let one = layer_pool(spec, caching, sequences);
    let calls = spec.num_layers.min(LAYERS_MAX);
    let backend = measure.backend;
    let mut kv = backend.alloc_kv(&KvPoolSpec { layers_per_group: calls, ..one })?;
    let batch = backend.upload_batch(sequences.step(0..each)?, kv.spec())?;
    let (q_cols, kv_cols) = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim);
    let mut q = Some(measure.activation(tokens, q_cols)?);
    for (style, name) in [(RopeStyle::Half, "halves"), (RopeStyle::Interleaved, "interleaved")] {
        #[allow(clippy::cast_precision_loss)] // a head's size
        let inv_freq = (0..spec.head_dim / 2).map(|i| 1e4_f32.powf(-2.0 * i as f32 / spec.head_dim as f32)).collect();
        let table = RopeTable { inv_freq, magnitude: 1.0, style };
        let cost = Cost {
            op: format!("rope_kv_write ({name}, {} KV)", caching.dtype),
            shape: format!("T {tokens}: {q_cols} + 2 × {kv_cols}"),
            bytes: tokens
                * (2 * (q_cols + kv_cols) * measure.activation_bytes + 2 * kv_cols * caching.dtype.block_bytes()),
            ops: 0,
            arithmetic: measure.float_arithmetic(),
            calls,
            data_sets: 1,
        };
        measure.add(cost, Calls::On(Launching::Recorded), |layer| {
            let turned = match q.take() {
                Some(q) => q,
                None => backend.activation(tokens, q_cols)?,
            };
            let (k, v) = (backend.activation(tokens, kv_cols)?, backend.activation(tokens, kv_cols)?);
            let transform = HeadTransform { q_norm: None, k_norm: None, rope: &table };
            q = Some(backend.rope_kv_write(
                Qkv { q: turned, k, v },
                &transform,
                &params(spec, layer),
                &batch,
                &mut kv,
            )?);
            Ok(())
        })?;
    }
    Ok(())
}
