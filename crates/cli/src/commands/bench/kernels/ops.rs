//! Every op of a forward at a model's shapes, with what each has to move and to compute.
//!
//! Shape letters: `T` tokens, `D` hidden size, `F` features inside the MLP, `H` query heads, `K` KV heads,
//! `E` head size, `V` vocabulary, `L` context.

use super::measure::{Arithmetic, Cost, Measure};
use super::weights::ModelWeights;
use anyhow::{Result, anyhow};
use pagemill_backend::{
    Activation, AttentionParams, Backend, BatchLayout, DType, DeviceBatch, GroupLayout, KvPool, KvPoolSpec, LinearPart,
    RopeStyle, RopeTable, Tensor, Weight,
};
use pagemill_model::ModelSpec;

/// Bytes of an f32.
const F32: usize = 4;
/// Logits of more rows than fit in this are made in pieces by the engine; no more are measured at once.
const LOGITS_BYTES_MAX: usize = 128 << 20;
/// Tokens of a block of the pool.
const BLOCK_SIZE: usize = 32;
/// Tokens of a prefill chunk.
const CHUNK: usize = 512;
/// Sequences of a batched decode.
const DECODES: usize = 16;
/// Bytes that the pool may take: more layers than fit take turns.
const POOL_BYTES_MAX: usize = 512 << 20;

/// The products of a layer, all layers in turn, and the final one.
pub fn linear(measure: &mut Measure<'_>, weights: &ModelWeights, tokens: usize) -> Result<()> {
    let layers = &weights.layers;
    products(measure, "qkv", tokens, &layers.iter().map(|l| l.qkv.iter().collect()).collect::<Vec<_>>())?;
    products(measure, "attention output", tokens, &layers.iter().map(|l| vec![&l.output]).collect::<Vec<_>>())?;
    products(measure, "gate, up", tokens, &layers.iter().map(|l| l.gate_up.iter().collect()).collect::<Vec<_>>())?;
    products(measure, "down", tokens, &layers.iter().map(|l| vec![&l.down]).collect::<Vec<_>>())?;
    let head = weights.head();
    let rows = tokens.min((LOGITS_BYTES_MAX / F32 / head.rows().max(1)).max(1));
    products(measure, "head", rows, &[vec![head]])
}

/// One linear of several parts, on each layer's weights in turn. Layers may be stored in different types:
/// bytes are their mean.
fn products(measure: &mut Measure<'_>, name: &str, tokens: usize, layers: &[Vec<&Weight>]) -> Result<()> {
    let Some(first) = layers.first() else { return Ok(()) };
    let (cols, rows): (usize, Vec<usize>) = (first[0].cols(), first.iter().map(|w| w.rows()).collect());
    let x = measure.random(tokens, cols)?;
    let mut outs = rows.iter().map(|&n| measure.backend.temp(tokens, n)).collect::<Result<Vec<Tensor>, _>>()?;
    let num_out: usize = rows.iter().sum();
    let weight_bytes = layers.iter().flatten().map(|w| w.len_bytes()).sum::<usize>() / layers.len();
    let backend = measure.backend;
    let cost = Cost {
        op: format!("linear {name} ({})", dtypes(layers)),
        shape: format!("T {tokens}: {cols} → {}", rows.iter().map(usize::to_string).collect::<Vec<_>>().join(" + ")),
        bytes: weight_bytes + tokens * (cols + num_out) * F32,
        ops: 2 * tokens * cols * num_out,
        arithmetic: measure.arithmetic(first[0].dtype()),
        calls: layers.len(),
        data_sets: layers.len(),
    };
    measure.add(cost, |layer| {
        let mut parts: Vec<LinearPart<'_>> =
            layers[layer].iter().zip(&mut outs).map(|(&weight, out)| LinearPart { weight, bias: None, out }).collect();
        Ok(backend.linear(&x, &mut parts)?)
    })
}

/// The types of the weights, each once.
fn dtypes(layers: &[Vec<&Weight>]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for weight in layers.iter().flatten() {
        if !names.contains(&weight.dtype().name()) {
            names.push(weight.dtype().name());
        }
    }
    names.join(", ")
}

/// Attention over full contexts, and writing K and V: one decode, a batch of them, a prefill chunk at the
/// context's end.
pub fn attention(measure: &mut Measure<'_>, spec: &ModelSpec, dtype: DType, contexts: &[usize]) -> Result<()> {
    let longest = contexts.iter().copied().max().unwrap_or(0);
    let tokens_max = contexts.iter().map(|&l| l.max(if l == longest { l } else { DECODES * l })).max().unwrap_or(0);
    let one = KvPoolSpec {
        num_blocks: tokens_max.div_ceil(BLOCK_SIZE) + DECODES,
        block_size: BLOCK_SIZE,
        layers_per_group: 1,
        num_kv_heads: spec.num_kv_heads,
        head_dim: spec.head_dim,
        dtype,
    };
    let layers = spec.num_layers.clamp(1, (POOL_BYTES_MAX / one.pool_bytes().max(1)).max(1));
    let pool_spec = KvPoolSpec { layers_per_group: layers, ..one };
    let mut kv = measure.backend.alloc_kv(&pool_spec)?;
    for &context in contexts {
        let mut steps = vec![(1, 1), (1, CHUNK.min(context))];
        if context * DECODES <= tokens_max {
            steps.push((DECODES, 1));
        }
        for (sequences, tokens) in steps {
            let batch = measure.backend.upload_batch(layout(sequences, tokens, context)?, kv.spec())?;
            write_kv(measure, spec, &batch, &mut kv, context)?;
            read_kv(measure, spec, &batch, &kv, context)?;
        }
    }
    Ok(())
}

fn params(spec: &ModelSpec, layer: usize) -> AttentionParams {
    #[allow(clippy::cast_precision_loss)] // a head's size
    let scale = (spec.head_dim as f32).sqrt().recip();
    AttentionParams {
        num_heads: spec.num_heads,
        num_kv_heads: spec.num_kv_heads,
        head_dim: spec.head_dim,
        scale,
        window: None,
        soft_cap: None,
        sinks: None,
        group_idx: 0,
        layer_in_group: layer,
    }
}

fn step_name(batch: &DeviceBatch, context: usize) -> String {
    match (batch.layout.num_seqs(), batch.layout.num_tokens()) {
        (1, 1) => format!("decode, L {context}"),
        (1, tokens) => format!("prefill T {tokens}, L {context}"),
        (sequences, _) => format!("decode of {sequences}, L {context}"),
    }
}

/// Writes this step's K and V; fills the pool with something for [`read_kv`] as well.
fn write_kv(
    measure: &mut Measure<'_>,
    spec: &ModelSpec,
    batch: &DeviceBatch,
    kv: &mut KvPool,
    context: usize,
) -> Result<()> {
    let (tokens, cols) = (batch.layout.num_tokens(), spec.num_kv_heads * spec.head_dim);
    let (k, v) = (measure.random(tokens, cols)?, measure.random(tokens, cols)?);
    let (backend, calls) = (measure.backend, kv.spec().layers_per_group);
    let cost = Cost {
        op: format!("kv_write ({})", kv.spec().dtype),
        shape: step_name(batch, context),
        bytes: 2 * tokens * cols * (F32 + kv.spec().dtype.block_bytes()),
        ops: 0,
        arithmetic: Arithmetic::F32,
        calls,
        data_sets: calls,
    };
    measure.add(cost, |layer| Ok(backend.kv_write(&k, &v, &params(spec, layer), batch, kv)?))
}

fn read_kv(
    measure: &mut Measure<'_>,
    spec: &ModelSpec,
    batch: &DeviceBatch,
    kv: &KvPool,
    context: usize,
) -> Result<()> {
    let (tokens, cols) = (batch.layout.num_tokens(), spec.num_heads * spec.head_dim);
    let q = measure.random(tokens, cols)?;
    let mut out = measure.backend.temp(tokens, cols)?;
    let visible: usize = batch.layout.positions.iter().map(|&p| p as usize + 1).sum();
    let cached = batch.layout.num_seqs() * context * 2 * spec.num_kv_heads * spec.head_dim;
    let (backend, calls) = (measure.backend, kv.spec().layers_per_group);
    let cost = Cost {
        op: format!("attention ({} KV)", kv.spec().dtype),
        shape: step_name(batch, context),
        bytes: cached * kv.spec().dtype.block_bytes() + 2 * tokens * cols * F32,
        // q·k and p·v, a multiplication and an addition each.
        ops: 4 * visible * cols,
        arithmetic: Arithmetic::F32,
        calls,
        data_sets: calls,
    };
    measure.add(cost, |layer| Ok(backend.attention(&q, &params(spec, layer), batch, kv, &mut out)?))
}

/// The last `tokens` tokens of each of `sequences` sequences of `context` tokens, on consecutive blocks.
fn layout(sequences: usize, tokens: usize, context: usize) -> Result<BatchLayout> {
    let mut layout = BatchLayout { query_start: vec![0], ..BatchLayout::default() };
    let mut group = GroupLayout { block_table_start: vec![0], ..GroupLayout::default() };
    let blocks = context.div_ceil(BLOCK_SIZE);
    let id = |n: usize| u32::try_from(n).map_err(|_| anyhow!("{n} does not fit the layout"));
    for sequence in 0..sequences {
        for block in 0..blocks {
            group.block_table.push(id(sequence * blocks + block)?);
        }
        for position in context - tokens..context {
            layout.positions.push(id(position)?);
            group.slot_mapping.push(id(sequence * blocks * BLOCK_SIZE + position)?);
        }
        layout.seq_lens.push(id(context)?);
        layout.query_start.push(id(layout.positions.len())?);
        group.block_table_start.push(id(group.block_table.len())?);
    }
    layout.groups.push(group);
    Ok(layout)
}

/// The ops that work on rows: embedding, norms, rope, the gate.
pub fn rows(measure: &mut Measure<'_>, spec: &ModelSpec, weights: &ModelWeights, tokens: usize) -> Result<()> {
    embed(measure, &weights.embedding, tokens)?;
    norms(measure, spec.hidden_size, tokens)?;
    rope(measure, spec, tokens)?;
    gate(measure, spec.intermediate_size, tokens)
}

fn cost(op: &str, tokens: usize, cols: usize, bytes_per_elem: usize, ops_per_elem: usize) -> Cost {
    Cost {
        op: op.to_owned(),
        shape: format!("T {tokens}: {cols}"),
        bytes: tokens * cols * bytes_per_elem,
        ops: tokens * cols * ops_per_elem,
        arithmetic: Arithmetic::F32,
        calls: if tokens < 64 { 64 } else { 8 },
        data_sets: 1,
    }
}

fn embed(measure: &mut Measure<'_>, table: &Weight, tokens: usize) -> Result<()> {
    let (backend, cols) = (measure.backend, table.cols());
    let ids = measure.random_ids(tokens, table.rows());
    let mut out = backend.temp(tokens, cols)?;
    let stored = table.dtype().row_bytes(cols).unwrap_or(0) * tokens;
    let mut cost = cost(&format!("embed ({})", table.dtype()), tokens, cols, F32, 0);
    cost.bytes += stored;
    measure.add(cost, |_| Ok(backend.embed(table, &ids, 1.0, &mut out)?))
}

fn norms(measure: &mut Measure<'_>, cols: usize, tokens: usize) -> Result<()> {
    let backend = measure.backend;
    let (x, mut residual) = (measure.random(tokens, cols)?, measure.random(tokens, cols)?);
    let mut out = backend.temp(tokens, cols)?;
    let weight = backend.load_vector("norm", &vec![1.0; cols])?;
    measure.add(cost("rms_norm", tokens, cols, 2 * F32, 4), |_| Ok(backend.rms_norm(&x, &weight, 1e-5, &mut out)?))?;
    measure.add(cost("add_rms_norm", tokens, cols, 4 * F32, 5), |_| {
        Ok(backend.add_rms_norm(&mut residual, &x, &weight, 1e-5, &mut out)?)
    })
}

fn rope(measure: &mut Measure<'_>, spec: &ModelSpec, tokens: usize) -> Result<()> {
    let (backend, cols) = (measure.backend, spec.num_heads * spec.head_dim);
    let pool = KvPoolSpec {
        num_blocks: tokens.div_ceil(BLOCK_SIZE),
        block_size: BLOCK_SIZE,
        layers_per_group: 1,
        num_kv_heads: spec.num_kv_heads,
        head_dim: spec.head_dim,
        dtype: DType::F16,
    };
    let batch = backend.upload_batch(layout(1, tokens, tokens)?, &pool)?;
    let mut x = measure.random(tokens, cols)?;
    #[allow(clippy::cast_precision_loss)] // a head's size
    let inv_freq = (0..spec.head_dim / 2).map(|i| 1e4_f32.powf(-2.0 * i as f32 / spec.head_dim as f32)).collect();
    for (style, name) in [(RopeStyle::Half, "rope (halves)"), (RopeStyle::Interleaved, "rope (interleaved)")] {
        let table = RopeTable { inv_freq: Vec::clone(&inv_freq), magnitude: 1.0, style };
        let cost = cost(name, tokens, cols, 2 * F32, 3);
        measure.add(cost, |_| Ok(backend.rope(&mut x, spec.head_dim, &table, &batch)?))?;
    }
    Ok(())
}

fn gate(measure: &mut Measure<'_>, cols: usize, tokens: usize) -> Result<()> {
    let backend = measure.backend;
    let (gate, up) = (measure.random(tokens, cols)?, measure.random(tokens, cols)?);
    let mut out = backend.temp(tokens, cols)?;
    for (act, name) in [(Activation::Silu, "silu gate × up"), (Activation::GeluTanh, "gelu gate × up")] {
        let cost = cost(name, tokens, cols, 3 * F32, 0);
        measure.add(cost, |_| Ok(backend.gated_activation(&gate, &up, act, &mut out)?))?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use pagemill_backend::{ActivationMode, CpuBackend, CpuConfig};
    use pagemill_formats::Checkpoint;
    use std::time::Duration;

    #[test]
    fn every_op_runs_at_the_shapes_of_small_models() {
        for name in ["llama", "qwen3", "gemma3"] {
            let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/zoo").join(name);
            let (checkpoint, spec) = (Checkpoint::open(&path).unwrap(), crate::loading::read_spec(&path).unwrap());
            let backend = CpuBackend::new(CpuConfig { num_threads: Some(1), ..CpuConfig::default() }).unwrap();
            let weights = ModelWeights::load(&checkpoint, &spec, &backend).unwrap();
            assert_eq!((weights.layers.len(), weights.head().rows()), (spec.num_layers, spec.vocab_size), "{name}");
            let mut measure = Measure::new(&backend, Duration::from_micros(1), ActivationMode::Int8);
            linear(&mut measure, &weights, 3).unwrap();
            attention(&mut measure, &spec, DType::F16, &[33, 70]).unwrap();
            rows(&mut measure, &spec, &weights, 3).unwrap();
            // Five products; K, V and attention of a decode and a chunk at two contexts, of a batch at one; rows.
            assert_eq!(measure.rows.len(), 5 + 2 * 5 + 7, "{name}");
            assert!(measure.rows.iter().all(|r| r.seconds > 0.0 && r.bytes > 0.0 && r.ops >= 0.0), "{name}");
        }
    }

    #[test]
    fn a_layout_ends_at_its_context() {
        let layout = layout(2, 3, 40).unwrap();
        assert_eq!(layout.positions, [37, 38, 39, 37, 38, 39]);
        assert_eq!(layout.query_start, [0, 3, 6]);
        let group = &layout.groups[0];
        assert_eq!(group.block_table, [0, 1, 2, 3]);
        assert_eq!(group.slot_mapping, [37, 38, 39, 64 + 37, 64 + 38, 64 + 39]);
        assert_eq!(group.block_table_start, [0, 2, 4]);
    }
}
