//! Fused ops give, bit for bit, what the plain ops give one after the other, on every instruction set of this
//! machine and however many rows there are.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use pagemill_backend::{
    Activation, ActivationMode, Addend, AttentionParams, Backend, BackendError, BatchLayout, CpuBackend, CpuConfig,
    DType, DeviceBatch, GroupLayout, HeadTransform, Isa, KvPool, KvPoolSpec, LinearInput, LinearPart, LinearWeights,
    MlpWeights, Norm, Qkv, RopeStyle, RopeTable, Tensor, Weight, WeightDesc, composed,
};
use support::{Random, backends, bits, host, poisoned, tensor};

const ROWS: [usize; 6] = [1, 5, 12, 13, 40, 150];
const COLS: usize = 96;

fn backends_of_both_modes() -> impl Iterator<Item = CpuBackend> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available()).flat_map(|isa| {
        [ActivationMode::Int8, ActivationMode::F32].map(|activations| {
            CpuBackend::new(CpuConfig { num_threads: Some(3), isa: Some(isa), activations }).unwrap()
        })
    })
}

/// A weight `[rows, COLS]`, `Q8_0` (whose blocks are a scale of 1/16 and any bytes) or `F32`.
fn weight(backend: &CpuBackend, dtype: DType, rows: usize, random: &mut Random) -> Weight {
    let stored: Vec<u8> = match dtype {
        DType::Q8_0 => {
            let blocks = (0..rows * COLS / 32).flat_map(|_| {
                let scale = half::f16::from_f32(0.0625).to_le_bytes();
                scale.into_iter().chain((0..32).map(|_| random.below(256) as u8)).collect::<Vec<_>>()
            });
            blocks.collect()
        }
        _ => random.normal(rows * COLS).iter().flat_map(|x| x.to_le_bytes()).collect(),
    };
    let row_bytes = dtype.row_bytes(COLS).unwrap();
    let desc = WeightDesc { name: "w".into(), dtype, rows, cols: COLS };
    backend
        .load_weight(desc, &mut |first, num, out| {
            out.copy_from_slice(&stored[first * row_bytes..(first + num) * row_bytes]);
            Ok(())
        })
        .unwrap()
}

/// Every kind of input, from tensors made anew: the bits of all products, and of the residual.
fn products(
    backend: &CpuBackend,
    kind: usize,
    rows: usize,
    dtypes: &[DType],
    op: impl Fn(LinearInput<'_>, &mut [LinearPart<'_>]) -> Result<(), BackendError>,
) -> Vec<Vec<u32>> {
    let mut random = Random::new(11 + kind as u64);
    let mut x = || tensor(backend, rows, COLS, &random.normal(rows * COLS));
    let (a, b) = (x(), x());
    let mut residual = x();
    let mut vector = |name| backend.load_vector(name, &random.normal(COLS)).unwrap();
    let (first, second) = (vector("first"), vector("second"));
    let norm = Norm { weight: &second, eps: 1e-5 };
    let inner = Norm { weight: &first, eps: 1e-6 };
    let input = match kind {
        0 => LinearInput::Plain(&a),
        1 => LinearInput::Normed { x: &a, norm },
        2 => LinearInput::AddNormed { residual: &mut residual, addend: Addend { x: &a, norm: None }, norm },
        3 => LinearInput::AddNormed { residual: &mut residual, addend: Addend { x: &a, norm: Some(inner) }, norm },
        4 => LinearInput::Gated { gate: &a, up: &b, act: Activation::Silu },
        _ => LinearInput::Gated { gate: &a, up: &b, act: Activation::GeluTanh },
    };
    let weights: Vec<Weight> = dtypes.iter().map(|&dtype| weight(backend, dtype, 37, &mut random)).collect();
    let mut outs: Vec<Tensor> = weights.iter().map(|weight| poisoned(backend, rows, weight.rows())).collect();
    let mut parts: Vec<LinearPart<'_>> =
        weights.iter().zip(&mut outs).map(|(weight, out)| LinearPart { weight, bias: None, out }).collect();
    op(input, &mut parts).unwrap();
    outs.push(residual);
    outs.iter().map(|out| bits(&host(backend, out))).collect()
}

#[test]
fn fused_linear_gives_the_bits_of_the_plain_ops() {
    use DType::{F32, Q8_0};
    for backend in backends_of_both_modes() {
        for kind in 0..6 {
            for rows in ROWS {
                // More parts than one job takes, too: the rows are made, and the residual is added to, once.
                for dtypes in [&[Q8_0][..], &[F32], &[Q8_0, F32, Q8_0], &[Q8_0; 11], &[]] {
                    let plain = products(&backend, kind, rows, dtypes, |x, parts| composed::linear(&backend, x, parts));
                    let fused = products(&backend, kind, rows, dtypes, |x, parts| backend.fused_linear(x, parts));
                    assert!(plain == fused, "{}: kind {kind}, {rows} rows, {dtypes:?}", backend.info().description);
                    assert!(plain.iter().flatten().all(|&x| f32::from_bits(x).is_finite()));
                }
            }
        }
    }
}

#[test]
fn gated_mlp_gives_the_bits_of_the_plain_ops() {
    for backend in backends_of_both_modes() {
        for dtype in [DType::Q8_0, DType::F32] {
            for rows in ROWS {
                let mut random = Random::new(17);
                let weights = [COLS, COLS, 37].map(|n| weight(&backend, dtype, n, &mut random));
                let bias = backend.load_vector("bias", &random.normal(COLS)).unwrap();
                let x = tensor(&backend, rows, COLS, &random.normal(rows * COLS));
                let [gate, up, down] = [(&weights[0], Some(&bias)), (&weights[1], None), (&weights[2], None)]
                    .map(|(weight, bias)| LinearWeights { weight, bias });
                let mlp = MlpWeights { gate, up, down, act: Activation::Silu };
                let fused = backend.gated_mlp(LinearInput::Plain(&x), &mlp).unwrap();
                let product = |layer: LinearWeights<'_>, x: &Tensor| {
                    let mut out = poisoned(&backend, rows, layer.weight.rows());
                    backend.linear(x, &mut [layer.part(&mut out)]).unwrap();
                    out
                };
                let mut inner = poisoned(&backend, rows, COLS);
                backend.gated_activation(&product(gate, &x), &product(up, &x), mlp.act, &mut inner).unwrap();
                let plain = product(down, &inner);
                assert!(bits(&host(&backend, &fused)) == bits(&host(&backend, &plain)), "{dtype}, {rows} rows");
            }
        }
    }
}

#[test]
fn fused_linear_refuses_wrong_shapes() {
    for backend in backends() {
        let t = |rows, cols| tensor(&backend, rows, cols, &vec![1.0; rows * cols]);
        let weight = weight(&backend, DType::F32, 4, &mut Random::new(1));
        let refused = |input: LinearInput<'_>| {
            let mut out = t(2, 4);
            let part = LinearPart { weight: &weight, bias: None, out: &mut out };
            let error = backend.fused_linear(input, &mut [part]).unwrap_err();
            assert!(matches!(error, BackendError::Shape { .. }), "{error}");
        };
        let (x, narrow, short, right, wrong) = (t(2, COLS), t(2, 32), t(1, COLS), t(1, COLS), t(1, 32));
        let norm = |weight| Norm { weight, eps: 1e-5 };
        refused(LinearInput::Plain(&narrow));
        refused(LinearInput::Normed { x: &x, norm: norm(&wrong) });
        refused(LinearInput::Normed { x: &short, norm: norm(&right) });
        refused(LinearInput::Gated { gate: &x, up: &short, act: Activation::Silu });
        let mut residual = t(2, COLS);
        let before = bits(&host(&backend, &residual));
        for (x, first, weight) in
            [(&short, None, &right), (&x, Some(norm(&wrong)), &right), (&x, Some(norm(&right)), &wrong)]
        {
            let addend = Addend { x, norm: first };
            refused(LinearInput::AddNormed { residual: &mut residual, addend, norm: norm(weight) });
        }
        assert_eq!(bits(&host(&backend, &residual)), before, "a refused op leaves the residual alone");
    }
}

#[derive(Clone, Copy, Debug)]
struct Heads {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    pairs: usize,
    style: RopeStyle,
    normed: bool,
    dtype: DType,
}

type RopeKvWrite<'a> = dyn Fn(Qkv, &HeadTransform<'_>, &AttentionParams, &DeviceBatch, &mut KvPool) -> Tensor + 'a;

/// Bits of the turned q, and of attention with it over what lies in the cache then: one sequence of `tokens`, in steps
/// of `chunk`, its blocks in falling order.
fn attended(backend: &CpuBackend, shape: Heads, tokens: usize, chunk: usize, op: &RopeKvWrite<'_>) -> Vec<u32> {
    let Heads { heads, kv_heads, head_dim, pairs, style, normed, dtype } = shape;
    let mut random = Random::new(3);
    let num_blocks = tokens.div_ceil(16);
    let spec = KvPoolSpec { num_blocks, block_size: 16, layers_per_group: 1, num_kv_heads: kv_heads, head_dim, dtype };
    let mut pool = backend.alloc_kv(&spec).unwrap();
    let params = AttentionParams {
        num_heads: heads,
        num_kv_heads: kv_heads,
        num_kv_heads_max: kv_heads,
        head_dim,
        scale: 0.125,
        window: None,
        soft_cap: None,
        sinks: None,
        group_idx: 0,
        layer_in_group: 0,
    };
    let inv_freq = (0..pairs).map(|i| 1e4_f32.powf(-(i as f32) / pairs as f32)).collect();
    let rope = RopeTable { inv_freq, magnitude: 1.0, style };
    let norms = [1, 2].map(|_| backend.load_vector("norm", &random.normal(head_dim)).unwrap());
    let norm = |idx: usize| normed.then_some(Norm { weight: &norms[idx], eps: 1e-6 });
    let transform = HeadTransform { q_norm: norm(0), k_norm: norm(1), rope: &rope };
    let rows = [heads, kv_heads, kv_heads].map(|heads| random.normal(tokens * heads * head_dim));
    let mut out = Vec::new();
    for first in (0..tokens).step_by(chunk) {
        let end = tokens.min(first + chunk);
        let block_table: Vec<u32> = (0..num_blocks as u32).rev().collect();
        let slot = |position: usize| block_table[position / 16] * 16 + (position % 16) as u32;
        let layout = BatchLayout {
            query_start: vec![0, (end - first) as u32],
            seq_lens: vec![end as u32],
            positions: (first as u32..end as u32).collect(),
            groups: vec![GroupLayout {
                slot_mapping: (first..end).map(slot).collect(),
                block_table_start: vec![0, num_blocks as u32],
                block_table,
            }],
        };
        let batch = backend.upload_batch(layout, &spec).unwrap();
        let [q, k, v] = [(&rows[0], heads), (&rows[1], kv_heads), (&rows[2], kv_heads)].map(|(x, heads)| {
            let cols = heads * head_dim;
            tensor(backend, end - first, cols, &x[first * cols..end * cols])
        });
        let q = op(Qkv { q, k, v }, &transform, &params, &batch, &mut pool);
        out.extend(bits(&host(backend, &q)));
        let mut attended = poisoned(backend, q.rows(), q.cols());
        backend.attention(&q, &params, &batch, &pool, &mut attended).unwrap();
        out.extend(bits(&host(backend, &attended)));
    }
    out
}

#[test]
fn rope_kv_write_gives_the_bits_of_the_plain_ops() {
    let shape = Heads {
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        pairs: 32,
        style: RopeStyle::Half,
        normed: false,
        dtype: DType::F16,
    };
    let shapes = [
        shape,
        Heads { style: RopeStyle::Interleaved, dtype: DType::F32, ..shape },
        Heads { heads: 4, kv_heads: 1, head_dim: 256, pairs: 128, normed: true, ..shape },
        Heads { heads: 4, kv_heads: 2, head_dim: 48, pairs: 16, normed: true, ..shape },
        Heads { pairs: 0, ..shape },
    ];
    for backend in backends() {
        for shape in shapes {
            for (tokens, chunk) in [(1, 1), (21, 21), (150, 150), (150, 13)] {
                let plain = attended(&backend, shape, tokens, chunk, &|qkv, transform, params, batch, kv| {
                    composed::rope_kv_write(&backend, qkv, transform, params, batch, kv).unwrap()
                });
                let fused = attended(&backend, shape, tokens, chunk, &|qkv, transform, params, batch, kv| {
                    backend.rope_kv_write(qkv, transform, params, batch, kv).unwrap()
                });
                assert!(plain == fused, "{}: {shape:?}, {tokens} by {chunk}", backend.info().description);
                assert!(plain.iter().all(|&x| f32::from_bits(x).is_finite()));
            }
        }
    }
}

#[test]
fn rope_kv_write_refuses_wrong_shapes() {
    for backend in backends() {
        let spec = KvPoolSpec {
            num_blocks: 1,
            block_size: 16,
            layers_per_group: 1,
            num_kv_heads: 1,
            head_dim: 32,
            dtype: DType::F16,
        };
        let mut pool = backend.alloc_kv(&spec).unwrap();
        let params = AttentionParams {
            num_heads: 2,
            num_kv_heads: 1,
            num_kv_heads_max: 1,
            head_dim: 32,
            scale: 1.0,
            window: None,
            soft_cap: None,
            sinks: None,
            group_idx: 0,
            layer_in_group: 0,
        };
        let t = |rows, cols| tensor(&backend, rows, cols, &vec![1.0; rows * cols]);
        let weights = [t(1, 32), t(1, 16)];
        let rope = |pairs| RopeTable { inv_freq: vec![1.0; pairs], magnitude: 1.0, style: RopeStyle::Half };
        let mut refused = |q, k, v, slot, norm: usize, pairs| {
            let group = GroupLayout { slot_mapping: vec![slot], ..Default::default() };
            let layout = BatchLayout { positions: vec![0], groups: vec![group], ..Default::default() };
            let batch = DeviceBatch { layout, device: None };
            let norm = Some(Norm { weight: &weights[norm], eps: 1e-5 });
            let transform = HeadTransform { q_norm: None, k_norm: norm, rope: &rope(pairs) };
            backend.rope_kv_write(Qkv { q, k, v }, &transform, &params, &batch, &mut pool).is_err()
        };
        assert!(!refused(t(1, 64), t(1, 32), t(1, 32), 0, 0, 16));
        assert!(refused(t(1, 32), t(1, 32), t(1, 32), 0, 0, 16), "q");
        assert!(refused(t(1, 64), t(2, 32), t(1, 32), 0, 0, 16), "k");
        assert!(refused(t(1, 64), t(1, 32), t(1, 64), 0, 0, 16), "v");
        assert!(refused(t(1, 64), t(1, 32), t(1, 32), 16, 0, 16), "slot");
        assert!(refused(t(1, 64), t(1, 32), t(1, 32), 0, 1, 16), "norm");
        assert!(refused(t(1, 64), t(1, 32), t(1, 32), 0, 0, 17), "pairs");
    }
}
