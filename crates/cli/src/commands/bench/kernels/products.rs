//! The products of a layer as its forward calls them, all layers in turn, and the final one.
//!
//! Shape letters: `T` tokens, `D` hidden size, `F` features inside the MLP, `N` output features, `V` vocabulary.

use super::measure::{Calls, Cost, Measure};
use super::weights::{LayerWeights, ModelWeights};
use anyhow::Result;
use pagemill_backend::{
    Activation, Addend, Launching, LinearInput, LinearPart, LinearWeights, MlpWeights, Norm, Tensor, Weight,
};
use pagemill_model::ModelSpec;

/// Bytes of an f32.
const F32: usize = 4;
/// Logits of more rows than fit in this are made in pieces by the engine; no more are measured at once.
const LOGITS_BYTES_MAX: usize = 256 << 20;
const EPS: f32 = 1e-5;

/// All products over so many tokens.
pub fn products(measure: &mut Measure<'_>, spec: &ModelSpec, weights: &ModelWeights, tokens: usize) -> Result<()> {
    let layers = &weights.layers;
    let of = |parts: fn(&LayerWeights) -> Vec<&Weight>| layers.iter().map(parts).collect::<Vec<_>>();
    let qkv = of(|layer| layer.qkv.iter().collect());
    product(measure, "qkv", tokens, &qkv)?;
    normed_product(measure, "add, norm, qkv", tokens, &qkv)?;
    product(measure, "attention output", tokens, &of(|layer| vec![&layer.output]))?;
    mlp(measure, spec, layers, tokens)?;
    product(measure, "gate, up", tokens, &of(|layer| layer.gate_up.iter().collect()))?;
    product(measure, "down", tokens, &of(|layer| vec![&layer.down]))?;
    let rows = logits_rows(measure, tokens, spec.vocab_size);
    head(measure, weights.head(), rows)
}

/// Rows of logits that are computed at once of so many.
pub fn logits_rows(measure: &Measure<'_>, tokens: usize, vocab_size: usize) -> usize {
    let fitting = (LOGITS_BYTES_MAX / F32 / vocab_size.max(1)).max(1);
    let at_once = if measure.is_apart() { measure.backend.logits_rows().min(fitting) } else { fitting };
    tokens.min(at_once)
}

/// What a product over `layers` costs. Layers may be stored in different types: bytes are their mean.
fn cost(measure: &Measure<'_>, name: &str, tokens: usize, layers: &[Vec<&Weight>]) -> Cost {
    let first = &layers[0];
    let (cols, num_out) = (first[0].cols(), first.iter().map(|w| w.rows()).sum::<usize>());
    let outs: Vec<String> = first.iter().map(|w| w.rows().to_string()).collect();
    let weight_bytes = layers.iter().flatten().map(|w| w.len_bytes()).sum::<usize>() / layers.len();
    let calls = measure.product_calls(tokens, layers.len());
    Cost {
        op: format!("linear {name} ({})", dtypes(layers)),
        shape: format!("T {tokens}: {cols} → {}", outs.join(" + ")),
        bytes: weight_bytes + tokens * (cols + num_out) * measure.activation_bytes,
        ops: 2 * tokens * cols * num_out,
        arithmetic: measure.arithmetic(first[0].dtype()),
        calls,
        data_sets: calls,
    }
}

fn parts<'a>(weights: &[&'a Weight], outs: &'a mut [Tensor]) -> Vec<LinearPart<'a>> {
    weights.iter().zip(outs).map(|(&weight, out)| LinearPart { weight, bias: None, out }).collect()
}

/// Places for what a layer's products give.
fn outputs(measure: &Measure<'_>, tokens: usize, weights: &[&Weight]) -> Result<Vec<Tensor>> {
    let out = |weight: &&Weight| measure.backend.activation(tokens, weight.rows());
    Ok(weights.iter().map(out).collect::<Result<_, _>>()?)
}

/// One linear of several parts, on each layer's weights in turn.
fn product(measure: &mut Measure<'_>, name: &str, tokens: usize, layers: &[Vec<&Weight>]) -> Result<()> {
    let x = measure.activation(tokens, layers[0][0].cols())?;
    let mut outs = outputs(measure, tokens, &layers[0])?;
    let (backend, cost) = (measure.backend, cost(measure, name, tokens, layers));
    measure.add(cost, Calls::On(Launching::Recorded), |layer| {
        backend.fused_linear(LinearInput::Plain(&x), &mut parts(&layers[layer], &mut outs))
    })
}

/// The same behind the addition and the norm that a layer begins with.
fn normed_product(measure: &mut Measure<'_>, name: &str, tokens: usize, layers: &[Vec<&Weight>]) -> Result<()> {
    let cols = layers[0][0].cols();
    let (x, mut residual) = (measure.activation(tokens, cols)?, measure.residual(tokens, cols)?);
    let mut outs = outputs(measure, tokens, &layers[0])?;
    let backend = measure.backend;
    let weight = backend.load_vector("norm", &vec![1.0; cols])?;
    let mut cost = cost(measure, name, tokens, layers);
    // The residual is read and written.
    cost.bytes += 2 * tokens * cols * F32;
    measure.add(cost, Calls::On(Launching::Recorded), |layer| {
        let norm = Norm { weight: &weight, eps: EPS };
        let addend = Addend { x: &x, norm: None };
        let input = LinearInput::AddNormed { residual: &mut residual, addend, norm };
        backend.fused_linear(input, &mut parts(&layers[layer], &mut outs))
    })
}

/// Gate, up, the activation and down in one op.
fn mlp(measure: &mut Measure<'_>, spec: &ModelSpec, layers: &[LayerWeights], tokens: usize) -> Result<()> {
    let all: Vec<Vec<&Weight>> = layers.iter().map(|l| vec![&l.gate_up[0], &l.gate_up[1], &l.down]).collect();
    let (hidden, inner) = (spec.hidden_size, spec.intermediate_size);
    let x = measure.activation(tokens, hidden)?;
    let mut cost = cost(measure, "gated MLP", tokens, &all);
    cost.shape = format!("T {tokens}: {hidden} → 2 × {inner} → {hidden}");
    // What lies between the products need not leave the chip.
    let weight_bytes = cost.bytes - tokens * (hidden + 2 * inner + hidden) * measure.activation_bytes;
    cost.bytes = weight_bytes + 2 * tokens * hidden * measure.activation_bytes;
    cost.ops = 6 * tokens * hidden * inner;
    let backend = measure.backend;
    measure.add(cost, Calls::On(Launching::Recorded), |layer| {
        let linear = |weight| LinearWeights { weight, bias: None };
        let [gate, up] = &layers[layer].gate_up;
        let mlp =
            MlpWeights { gate: linear(gate), up: linear(up), down: linear(&layers[layer].down), act: Activation::Silu };
        backend.gated_mlp(LinearInput::Plain(&x), &mlp).map(drop)
    })
}

/// The final product, always on the same weights: a vocabulary is larger than caches. Logits are f32.
fn head(measure: &mut Measure<'_>, weight: &Weight, tokens: usize) -> Result<()> {
    let x = measure.activation(tokens, weight.cols())?;
    let mut logits = measure.backend.temp(tokens, weight.rows())?;
    let mut cost = cost(measure, "head", tokens, &[vec![weight]]);
    cost.bytes = weight.len_bytes() + tokens * (weight.cols() * measure.activation_bytes + weight.rows() * F32);
    let backend = measure.backend;
    measure.add(cost, Calls::On(Launching::Recorded), |_| {
        backend.fused_linear(LinearInput::Plain(&x), &mut [LinearPart { weight, bias: None, out: &mut logits }])
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
