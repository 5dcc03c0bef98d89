//! One body per op, run on every instruction set of this machine against an f64 reference: the error
//! is at most twice that of the plain f32 form. Outputs are poisoned with NaN first.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use half::{bf16, f16};
use pagemill_backend::{
    Activation, Backend, BackendError, BatchLayout, CpuBackend, CpuConfig, DType, DeviceBatch, KvPoolSpec, LinearPart,
    RopeStyle, RopeTable, Tensor, WeightDesc,
};
use support::{Random, assert_close, backends, bits, host, poisoned, tensor};

const SIZES: [(usize, usize); 5] = [(1, 1), (1, 576), (17, 37), (3, 4097), (4097, 64)];

#[test]
fn rms_norm_and_add() {
    for backend in backends() {
        let mut random = Random::new(1);
        for (rows, cols) in SIZES {
            let (x, r, w) = (random.normal(rows * cols), random.normal(rows * cols), random.normal(cols));
            let weight = backend.load_vector("norm", &w).unwrap();
            let mut out = poisoned(&backend, rows, cols);
            backend.rms_norm(&tensor(&backend, rows, cols, &x), &weight, 1e-5, &mut out).unwrap();
            check_norm(&x, &w, cols, &host(&backend, &out));

            let mut residual = tensor(&backend, rows, cols, &r);
            backend.add(&mut residual, &tensor(&backend, rows, cols, &x)).unwrap();
            let sum: Vec<f32> = x.iter().zip(&r).map(|(x, r)| x + r).collect();
            assert_eq!(bits(&host(&backend, &residual)), bits(&sum));

            let mut residual = tensor(&backend, rows, cols, &r);
            let mut out = poisoned(&backend, rows, cols);
            let x = tensor(&backend, rows, cols, &x);
            backend.add_rms_norm(&mut residual, &x, &weight, 1e-5, &mut out).unwrap();
            assert_eq!(bits(&host(&backend, &residual)), bits(&sum));
            check_norm(&sum, &w, cols, &host(&backend, &out));
        }
    }
}

fn check_norm(x: &[f32], w: &[f32], cols: usize, got: &[f32]) {
    for (x, got) in x.chunks(cols).zip(got.chunks(cols)) {
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / cols as f64;
        let exact: Vec<f64> =
            x.iter().zip(w).map(|(&x, &w)| f64::from(x) / (mean + f64::from(1e-5_f32)).sqrt() * f64::from(w)).collect();
        let sum: f32 = x.iter().map(|x| x * x).sum();
        let inverse = 1.0 / (sum / cols as f32 + 1e-5).sqrt();
        let naive: Vec<f32> = x.iter().zip(w).map(|(x, w)| x * inverse * w).collect();
        assert_close(got, &naive, &exact, "rms_norm");
    }
}

#[test]
fn gated_activations() {
    for backend in backends() {
        let mut random = Random::new(2);
        for (rows, cols) in SIZES {
            let mut gate = random.normal(rows * cols);
            gate.iter_mut().for_each(|x| *x *= 6.0);
            for (place, extreme) in [-200.0, -30.0, 0.0, 100.0].into_iter().enumerate() {
                if let Some(x) = gate.get_mut(place * 3) {
                    *x = extreme;
                }
            }
            let up = random.normal(rows * cols);
            for act in [Activation::Silu, Activation::GeluTanh] {
                let mut out = poisoned(&backend, rows, cols);
                let (gate_t, up_t) = (tensor(&backend, rows, cols, &gate), tensor(&backend, rows, cols, &up));
                backend.gated_activation(&gate_t, &up_t, act, &mut out).unwrap();
                for ((got, &gate), &up) in host(&backend, &out).iter().zip(&gate).zip(&up) {
                    let (x, u) = (f64::from(gate), f64::from(up));
                    let y = match act {
                        Activation::Silu => x,
                        Activation::GeluTanh => 2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3)),
                    };
                    let exact = x / (1.0 + (-y).exp()) * u;
                    // A few ulps, plus what an ulp of the exponent's argument moves.
                    let bound = (4.0 + 2.0 * y.abs()) * f64::from(f32::EPSILON) * exact.abs() + 1e-35;
                    assert!((f64::from(*got) - exact).abs() <= bound, "{act:?}({gate}) * {up}: {got}, not {exact}");
                }
            }
        }
    }
}

#[test]
fn rope_turns_pairs_by_the_f32_angle() {
    for backend in backends() {
        let mut random = Random::new(3);
        for style in [RopeStyle::Half, RopeStyle::Interleaved] {
            for (heads, head_dim, pairs, magnitude) in
                [(9, 64, 32, 1.0), (1, 80, 20, 1.25), (3, 96, 48, 1.0), (2, 6, 3, 1.0)]
            {
                let inv_freq: Vec<f32> = (0..pairs).map(|i| 1e4_f32.powf(-(i as f32) / pairs as f32)).collect();
                let table = RopeTable { inv_freq, magnitude, style };
                // Positions 8191 - 16 ..= 8191 of one sequence, then 0..3 of another.
                let positions: Vec<u32> = (8175..8192).chain(0..3).collect();
                let batch = DeviceBatch {
                    layout: BatchLayout { positions: positions.clone(), ..Default::default() },
                    device: None,
                };
                let x = random.normal(positions.len() * heads * head_dim);
                let mut turned = tensor(&backend, positions.len(), heads * head_dim, &x);
                backend.rope(&mut turned, head_dim, &table, &batch).unwrap();
                let exact = rope_f64(&x, heads, head_dim, &positions, &table);
                for (got, exact) in host(&backend, &turned).iter().zip(exact) {
                    assert!((f64::from(*got) - exact).abs() < 2e-6, "{got} is not {exact}");
                }
            }
        }
    }
}

fn rope_f64(x: &[f32], heads: usize, head_dim: usize, positions: &[u32], table: &RopeTable) -> Vec<f64> {
    let pairs = table.inv_freq.len();
    let mut out: Vec<f64> = x.iter().copied().map(f64::from).collect();
    for (token, &position) in positions.iter().enumerate() {
        for head in 0..heads {
            let row = &mut out[(token * heads + head) * head_dim..][..head_dim];
            for i in 0..pairs {
                let angle = f64::from(position as f32 * table.inv_freq[i]);
                let (sin, cos) = angle.sin_cos();
                let m = f64::from(table.magnitude);
                let (a, b) = match table.style {
                    RopeStyle::Half => (i, i + pairs),
                    RopeStyle::Interleaved => (2 * i, 2 * i + 1),
                };
                (row[a], row[b]) = (m * (row[a] * cos - row[b] * sin), m * (row[b] * cos + row[a] * sin));
            }
        }
    }
    out
}

/// Stored bytes of `values` in a float type, and what they mean.
fn store(dtype: DType, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    match dtype {
        DType::F16 => {
            let halves: Vec<f16> = values.iter().map(|&x| f16::from_f32(x)).collect();
            (halves.iter().flat_map(|x| x.to_le_bytes()).collect(), halves.iter().map(|x| x.to_f32()).collect())
        }
        DType::BF16 => {
            let halves: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
            (halves.iter().flat_map(|x| x.to_le_bytes()).collect(), halves.iter().map(|x| x.to_f32()).collect())
        }
        _ => (values.iter().flat_map(|x| x.to_le_bytes()).collect(), values.to_vec()),
    }
}

fn load(backend: &CpuBackend, dtype: DType, rows: usize, cols: usize, bytes: &[u8]) -> pagemill_backend::Weight {
    let desc = WeightDesc { name: "w".into(), dtype, rows, cols };
    let row_bytes = dtype.row_bytes(cols).unwrap();
    let mut next_row = 0;
    let weight = backend
        .load_weight(desc, &mut |first, num, out| {
            assert_eq!((first, out.len()), (next_row, num * row_bytes));
            next_row += num;
            out.copy_from_slice(&bytes[first * row_bytes..(first + num) * row_bytes]);
            Ok(())
        })
        .unwrap();
    assert_eq!(next_row, rows);
    weight
}

#[test]
fn linear_over_float_weights() {
    for backend in backends() {
        let mut random = Random::new(4);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (tokens, rows, cols) in [(1, 1, 1), (1, 67, 576), (17, 130, 37), (65, 64, 1025), (4097, 5, 24)] {
                let (bytes, w) = store(dtype, &random.normal(rows * cols));
                let x = random.normal(tokens * cols);
                let bias = random.normal(rows);
                let weight = load(&backend, dtype, rows, cols, &bytes);
                let bias_t = backend.load_vector("bias", &bias).unwrap();
                let x_t = tensor(&backend, tokens, cols, &x);
                let (mut plain, mut biased) = (poisoned(&backend, tokens, rows), poisoned(&backend, tokens, rows));
                let mut parts = [
                    LinearPart { weight: &weight, bias: None, out: &mut plain },
                    LinearPart { weight: &weight, bias: Some(&bias_t), out: &mut biased },
                ];
                backend.linear(&x_t, &mut parts).unwrap();
                let (plain, biased) = (host(&backend, &plain), host(&backend, &biased));
                for token in 0..tokens {
                    let x = &x[token * cols..(token + 1) * cols];
                    let rows_of_w = || w.chunks(cols);
                    let exact: Vec<f64> = rows_of_w()
                        .map(|w| x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum())
                        .collect();
                    let naive: Vec<f32> = rows_of_w().map(|w| x.iter().zip(w).map(|(x, w)| x * w).sum()).collect();
                    let got = &plain[token * rows..(token + 1) * rows];
                    assert_close(got, &naive, &exact, &format!("linear {dtype} {tokens}x{rows}x{cols}"));
                    let with_bias: Vec<f32> = got.iter().zip(&bias).map(|(y, b)| y + b).collect();
                    assert_eq!(bits(&with_bias), bits(&biased[token * rows..(token + 1) * rows]));
                }
            }
        }
    }
}

#[test]
fn linear_rows_do_not_depend_on_the_batch() {
    let (tokens, rows, cols) = (67, 203, 133);
    for isa_backend in backends() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let mut random = Random::new(5);
            let (bytes, _) = store(dtype, &random.normal(rows * cols));
            let x = random.normal(tokens * cols);
            let product = |backend: &CpuBackend, x: &[f32]| {
                let weight = load(backend, dtype, rows, cols, &bytes);
                let mut out = poisoned(backend, x.len() / cols, rows);
                let x = tensor(backend, x.len() / cols, cols, x);
                backend.linear(&x, &mut [LinearPart { weight: &weight, bias: None, out: &mut out }]).unwrap();
                bits(&host(backend, &out))
            };
            let all = product(&isa_backend, &x);
            let other_threads =
                CpuBackend::new(CpuConfig { num_threads: Some(5), isa: Some(isa_backend.isa()), ..Default::default() })
                    .unwrap();
            assert_eq!(product(&other_threads, &x), all);
            for (first, end) in [(0, 1), (66, 67), (3, 5), (10, 50)] {
                assert_eq!(product(&isa_backend, &x[first * cols..end * cols]), all[first * rows..end * rows]);
            }
        }
    }
}

#[test]
fn embed_gather_scale_cap_and_rows() {
    for backend in backends() {
        let mut random = Random::new(6);
        let (vocab, cols) = (301, 65);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let (bytes, w) = store(dtype, &random.normal(vocab * cols));
            let table = load(&backend, dtype, vocab, cols, &bytes);
            let ids: Vec<u32> = (0..1000).map(|_| random.below(vocab) as u32).collect();
            let mut out = poisoned(&backend, ids.len(), cols);
            backend.embed(&table, &ids, 1.5, &mut out).unwrap();
            let expected: Vec<f32> =
                ids.iter().flat_map(|&id| &w[id as usize * cols..(id as usize + 1) * cols]).map(|x| x * 1.5).collect();
            assert_eq!(bits(&host(&backend, &out)), bits(&expected));
            let error = backend.embed(&table, &[301], 1.0, &mut poisoned(&backend, 1, cols)).unwrap_err();
            assert!(error.to_string().contains("token ids below 301"), "{error}");

            // Parts of the vocabulary, each without the others' rows, add up to the whole.
            let mut sum = vec![0.0f32; ids.len() * cols];
            for rows in [0..100, 100..301] {
                let row_bytes = bytes.len() / vocab;
                let part = &bytes[rows.start * row_bytes..rows.end * row_bytes];
                let part = load(&backend, dtype, rows.len(), cols, part);
                let mut some = poisoned(&backend, ids.len(), cols);
                backend.embed_part(&part, rows.start, &ids, 1.5, &mut some).unwrap();
                let some = host(&backend, &some);
                for (row, id) in some.chunks_exact(cols).zip(&ids) {
                    assert!(rows.contains(&(*id as usize)) || row.iter().all(|x| *x == 0.0));
                }
                sum.iter_mut().zip(&some).for_each(|(sum, x)| *sum += x);
            }
            assert_eq!(sum, expected);

            let mut gathered = poisoned(&backend, 3, cols);
            backend.gather_rows(&out, &[999, 0, 999], &mut gathered).unwrap();
            let gathered = host(&backend, &gathered);
            assert_eq!(bits(&gathered[..cols]), bits(&expected[999 * cols..]));
            assert_eq!(bits(&gathered[cols..2 * cols]), bits(&expected[..cols]));
            assert!(backend.gather_rows(&out, &[1000], &mut poisoned(&backend, 1, cols)).is_err());

            backend.scale(&mut out, 0.5).unwrap();
            backend.soft_cap(&mut out, 2.0).unwrap();
            for (got, x) in host(&backend, &out).iter().zip(&expected) {
                let exact = 2.0 * (f64::from(*x) * 0.5 / 2.0).tanh();
                assert!((f64::from(*got) - exact).abs() <= 4e-7 * exact.abs() + 1e-37);
            }
            backend
                .for_each_row(&mut out, &|idx, row| {
                    assert_eq!(row.len(), cols);
                    row.fill(idx as f32);
                })
                .unwrap();
            assert!(host(&backend, &out).chunks(cols).enumerate().all(|(i, row)| row.iter().all(|&x| x == i as f32)));
        }
    }
}

#[test]
fn a_panicking_visit_is_an_error() {
    for backend in backends() {
        let mut x = tensor(&backend, 4, 2, &[0.0; 8]);
        let error = backend.for_each_row(&mut x, &|idx, _| assert!(idx != 2, "row two")).unwrap_err();
        assert!(matches!(error, BackendError::Device { .. }), "{error}");
        backend.for_each_row(&mut x, &|_, row| row.fill(1.0)).unwrap();
        assert_eq!(host(&backend, &x), [1.0; 8]);
    }
}

#[test]
fn wrong_shapes_are_refused() {
    for backend in backends() {
        let t = |rows, cols| tensor(&backend, rows, cols, &vec![0.0; rows * cols]);
        let shape = |result: Result<(), BackendError>| {
            let error = result.unwrap_err();
            assert!(matches!(error, BackendError::Shape { .. }), "{error}");
        };
        shape(backend.add(&mut t(2, 3), &t(3, 2)));
        shape(backend.rms_norm(&t(2, 3), &t(1, 2), 1e-5, &mut t(2, 3)));
        shape(backend.rms_norm(&t(2, 3), &t(1, 3), 1e-5, &mut t(2, 4)));
        shape(backend.gated_activation(&t(2, 3), &t(2, 4), Activation::Silu, &mut t(2, 3)));
        shape(backend.to_host(&t(2, 3), &mut [0.0; 5]));
        shape(backend.copy_from_host(&[0.0; 5], &mut t(2, 3)));
        let weight = load(&backend, DType::F32, 4, 3, &[0; 48]);
        shape(backend.linear(&t(2, 2), &mut [LinearPart { weight: &weight, bias: None, out: &mut t(2, 4) }]));
        shape(backend.linear(&t(2, 3), &mut [LinearPart { weight: &weight, bias: None, out: &mut t(2, 3) }]));
        assert!(backend.temp(usize::MAX / 2, 8).is_err());
    }
}

#[test]
fn a_failed_read_names_the_weight() {
    for backend in backends() {
        let desc = WeightDesc { name: "blk.3.up".into(), dtype: DType::F16, rows: 2, cols: 2 };
        let error = backend.load_weight(desc, &mut |_, _, _| Err("short file".into())).map(|_| ()).unwrap_err();
        assert_eq!(error.to_string(), "reading weight blk.3.up: short file");
        let desc = WeightDesc { name: "odd".into(), dtype: DType::Q4_0, rows: 1, cols: 33 };
        assert!(backend.load_weight(desc, &mut |_, _, _| Ok(())).is_err());
    }
}

#[test]
fn the_workspace_stops_growing() {
    for backend in backends() {
        let step = |tokens: usize| {
            let x = backend.temp(tokens, 576).unwrap();
            let wide: Vec<Tensor> = (0..3).map(|_| backend.temp(tokens, 1536).unwrap()).collect();
            drop(x);
            (backend.temp(1, 49_152).unwrap(), wide)
        };
        drop(step(512));
        let warm = backend.workspace();
        for tokens in [1, 512, 3, 511, 64, 1, 512] {
            drop(step(tokens));
            assert_eq!(backend.workspace(), warm, "grew at {tokens} tokens");
        }
    }
}

#[test]
fn upload_batch_refuses_what_kernels_take_for_granted() {
    let backend = CpuBackend::new(CpuConfig::default()).unwrap();
    let spec = KvPoolSpec {
        num_blocks: 4,
        block_size: 16,
        layers_per_group: 1,
        num_kv_heads: 1,
        head_dim: 32,
        dtype: DType::F16,
    };
    let good = BatchLayout {
        query_start: vec![0, 2, 3],
        seq_lens: vec![18, 1],
        positions: vec![16, 17, 0],
        groups: vec![pagemill_backend::GroupLayout {
            slot_mapping: vec![48, 49, 0],
            block_table: vec![u32::MAX, 3, 0],
            block_table_start: vec![0, 2, 3],
        }],
    };
    assert!(backend.upload_batch(good.clone(), &spec).is_ok());
    assert!(backend.upload_batch(BatchLayout { query_start: vec![0], ..Default::default() }, &spec).is_ok());
    let spoil = |change: &dyn Fn(&mut BatchLayout)| {
        let mut layout = good.clone();
        change(&mut layout);
        let error = backend.upload_batch(layout, &spec).map(|_| ()).unwrap_err();
        assert!(matches!(error, BackendError::Shape { op: "upload_batch", .. }), "{error}");
    };
    spoil(&|l| l.query_start = vec![]);
    spoil(&|l| l.query_start[0] = 1);
    spoil(&|l| l.query_start = vec![0, 4, 3]);
    spoil(&|l| l.query_start[2] = 4);
    spoil(&|l| l.positions[1] = 18);
    spoil(&|l| l.seq_lens[0] = 19);
    spoil(&|l| l.seq_lens[1] = 0);
    spoil(&|l| l.groups[0].slot_mapping[0] = 64);
    spoil(&|l| l.groups[0].slot_mapping.truncate(2));
    spoil(&|l| l.groups[0].block_table[1] = 4);
    spoil(&|l| l.groups[0].block_table_start[1] = 1);
    spoil(&|l| l.groups[0].block_table_start = vec![0, 3]);
    spoil(&|l| l.seq_lens[0] = 33);
}
