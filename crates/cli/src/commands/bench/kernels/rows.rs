//! The ops that work on rows: embedding, norms, the gate, what surrounds the logits.

use super::attention::{self, Caching};
use super::measure::{Calls, Cost, Measure};
use super::products::logits_rows;
use super::weights::ModelWeights;
use anyhow::Result;
use pagemill_backend::sampling::{Choice, LogitEdits, RowTask};
use pagemill_backend::{Activation, Launching, Weight};
use pagemill_model::ModelSpec;

/// Bytes of an f32.
const F32: usize = 4;
/// Calls of a pass.
const CALLS: usize = 32;

/// All of them over so many tokens.
pub fn rows(
    measure: &mut Measure<'_>,
    spec: &ModelSpec,
    weights: &ModelWeights,
    caching: Caching,
    tokens: usize,
) -> Result<()> {
    embed(measure, &weights.embedding, tokens)?;
    norms(measure, spec.hidden_size, tokens)?;
    attention::rope_kv_write(measure, spec, caching, tokens)?;
    gate(measure, spec.intermediate_size, tokens)?;
    choice(measure, spec, tokens)
}

fn cost(measure: &Measure<'_>, op: &str, tokens: usize, cols: usize, bytes_per_elem: usize, ops: usize) -> Cost {
    Cost {
        op: op.to_owned(),
        shape: format!("T {tokens}: {cols}"),
        bytes: tokens * cols * bytes_per_elem,
        ops: tokens * cols * ops,
        arithmetic: measure.float_arithmetic(),
        calls: CALLS,
        data_sets: 1,
    }
}

fn embed(measure: &mut Measure<'_>, table: &Weight, tokens: usize) -> Result<()> {
    let (backend, cols) = (measure.backend, table.cols());
    let ids = measure.random_ids(tokens, table.rows());
    let mut out = backend.temp(tokens, cols)?;
    let stored = table.dtype().row_bytes(cols).unwrap_or(0) * tokens;
    let mut cost = cost(measure, &format!("embed ({})", table.dtype()), tokens, cols, F32, 0);
    cost.bytes += stored;
    // It uploads the ids, which is counted.
    measure.add(cost, Calls::On(Launching::Queued), |_| backend.embed(table, &ids, 1.0, &mut out))
}

fn norms(measure: &mut Measure<'_>, cols: usize, tokens: usize) -> Result<()> {
    let (backend, flowing) = (measure.backend, measure.activation_bytes);
    let (x, mut residual) = (measure.activation(tokens, cols)?, measure.residual(tokens, cols)?);
    let mut out = backend.activation(tokens, cols)?;
    let weight = backend.load_vector("norm", &vec![1.0; cols])?;
    let norm = cost(measure, "rms_norm", tokens, cols, 2 * flowing, 4);
    measure.add(norm, Calls::On(Launching::Recorded), |_| backend.rms_norm(&x, &weight, 1e-5, &mut out))?;
    // The residual is read and written.
    let norm = cost(measure, "add_rms_norm", tokens, cols, 2 * F32 + 2 * flowing, 5);
    measure
        .add(norm, Calls::On(Launching::Recorded), |_| backend.add_rms_norm(&mut residual, &x, &weight, 1e-5, &mut out))
}

fn gate(measure: &mut Measure<'_>, cols: usize, tokens: usize) -> Result<()> {
    let (backend, flowing) = (measure.backend, measure.activation_bytes);
    let (gate, up) = (measure.activation(tokens, cols)?, measure.activation(tokens, cols)?);
    let mut out = backend.activation(tokens, cols)?;
    for (act, name) in [(Activation::Silu, "silu gate × up"), (Activation::GeluTanh, "gelu gate × up")] {
        let cost = cost(measure, name, tokens, cols, 3 * flowing, 0);
        measure.add(cost, Calls::On(Launching::Recorded), |_| backend.gated_activation(&gate, &up, act, &mut out))?;
    }
    Ok(())
}

/// What stands before and behind the head: the rows whose logits are wanted, and the choice of a token.
fn choice(measure: &mut Measure<'_>, spec: &ModelSpec, tokens: usize) -> Result<()> {
    let (backend, cols) = (measure.backend, spec.hidden_size);
    let rows = logits_rows(measure, tokens, spec.vocab_size);
    let hidden = measure.residual(tokens, cols)?;
    let mut wanted = backend.temp(rows, cols)?;
    let ids = measure.random_ids(rows, tokens);
    let gather = cost(measure, "gather_rows", rows, cols, 2 * F32, 0);
    // It uploads the rows' numbers, which is counted.
    measure.add(gather, Calls::On(Launching::Queued), |_| backend.gather_rows(&hidden, &ids, &mut wanted))?;

    let logits = measure.residual(rows, spec.vocab_size)?;
    let plain = |row| RowTask { row, choice: Choice::Largest, edits: LogitEdits::default(), num_top: None };
    let (tasks, mut outcomes): (Vec<RowTask<'_>>, _) = ((0..rows).map(plain).collect(), Vec::new());
    if !backend.sample_rows(&logits, &tasks, &mut outcomes)? {
        let why = "this device leaves the choice to the host, which reads rows where they lie";
        measure.leave_out("sample_rows", format!("T {rows}: {}", spec.vocab_size), why);
        return Ok(());
    }
    let largest = cost(measure, "sample_rows (largest), and the wait for it", rows, spec.vocab_size, F32, 0);
    measure.add(largest, Calls::Waiting, |_| backend.sample_rows(&logits, &tasks, &mut outcomes).map(drop))?;
    // What comes back is two words a row.
    let (words, mut read) = (measure.residual(rows, 2)?, vec![0.0; rows * 2]);
    let wait = cost(measure, "reading as much as that gives, and the wait", rows, 2, F32, 0);
    measure.add(wait, Calls::Waiting, |_| backend.to_host(&words, &mut read))?;
    measure.add_difference("sample_rows (largest) without the wait");
    Ok(())
}
