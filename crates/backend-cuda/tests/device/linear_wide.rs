//! Gate and up of more than a hundred tokens in one kernel, against the one that takes any number of them on a
//! deterministic device (which `linear_mid` checks against the CPU).

use crate::linear::{HALVES, bits, halves, levelled, load};
use crate::support::{Random, activation, assert_close, deterministic_gpu, gpu, host, poisoned, rounded};
use pagemill_backend::{Activation, Backend, DType, LinearInput, LinearWeights, MlpWeights, Tensor, Weight};
use pagemill_backend_cuda::{Activations, CudaBackend};

/// Two warpgroups with 128 tokens each and with less, boxes that end with the tokens and behind them, tiles that share tokens.
const TOKENS: [usize; 8] = [129, 136, 192, 193, 255, 256, 417, 512];
/// Outputs that are looked at.
const SEEN: usize = 512;

/// Gate, up `[F, C]` and down `[SEEN, F]`, which picks the first outputs, the last, and some between.
struct Mlp {
    weights: [Weight; 3],
    inner: usize,
}

impl Mlp {
    fn new(backend: &CudaBackend, dtype: DType, inner: usize, cols: usize) -> Self {
        let mut random = Random::new((inner + cols) as u64);
        let [gate, up] = [0; 2].map(|_| levelled(dtype, inner, cols, &mut random));
        let mut picks = vec![0.0; SEEN * inner];
        for (nth, row) in picks.chunks_mut(inner).enumerate() {
            let picked = match nth {
                0..128 => nth,
                128..256 => inner - 1 - (nth - 128),
                _ => random.below(inner),
            };
            row[picked] = 1.0;
        }
        let weights = [
            load(backend, dtype, inner, cols, &gate),
            load(backend, dtype, inner, cols, &up),
            load(backend, dtype, SEEN, inner, &halves(dtype, &picks)),
        ];
        Self { weights, inner }
    }

    /// What is picked, and how often the kernel was launched for it. An output that is not written is NaN, and so is
    /// every pick of its row.
    fn run(&self, backend: &CudaBackend, act: Activation, x: &Tensor) -> (Vec<f32>, u64) {
        let [gate, up, down] = self.weights.each_ref().map(|weight| LinearWeights { weight, bias: None });
        drop(poisoned(backend, x.rows(), self.inner));
        let before = backend.wide_product_launches();
        let out = backend.gated_mlp(LinearInput::Plain(x), &MlpWeights { gate, up, down, act }).unwrap();
        (host(backend, &out), backend.wide_product_launches() - before)
    }
}

/// Ends inside of a tile and of a cluster, parts of a panel, one panel, fewer panels than slots, many.
#[test]
fn gated_layers_of_many_tokens() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let Some(other) = deterministic_gpu(Activations::Bf16) else { return };
    for dtype in HALVES {
        for (inner, cols) in [(14_336, 2048), (13_320, 904), (14_784, 64), (13_448, 136)] {
            let (mlp, reference) = (Mlp::new(&gpu, dtype, inner, cols), Mlp::new(&other, dtype, inner, cols));
            let mut random = Random::new(cols as u64);
            for tokens in TOKENS {
                let x = rounded(Activations::Bf16, &random.normal(tokens * cols));
                for act in [Activation::Silu, Activation::GeluTanh] {
                    let what = format!("{dtype} {act:?}, {tokens} tokens, {cols} to {inner}");
                    let (got, launches) = mlp.run(&gpu, act, &activation(&gpu, tokens, cols, &x));
                    let (want, none) = reference.run(&other, act, &activation(&other, tokens, cols, &x));
                    assert_eq!((launches, none), (1, 0), "{what}");
                    assert_close(&got, &want, 1.0 / 64.0, &what);
                }
            }
        }
    }
}

#[test]
fn a_row_of_many_has_the_same_bits_in_any_company() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let (inner, cols) = (14_336, 904);
    let mlp = Mlp::new(&gpu, DType::BF16, inner, cols);
    let x = Random::new(1).normal(512 * cols);
    let run = |first: usize, count: usize| {
        let x = activation(&gpu, count, cols, &x[first * cols..(first + count) * cols]);
        bits(&mlp.run(&gpu, Activation::Silu, &x).0)
    };
    let all = run(0, 512);
    for (first, count) in [(0, 129), (383, 129), (156, 200), (3, 193), (260, 136), (0, 256), (1, 417), (62, 450)] {
        assert!(run(first, count) == all[first * SEEN..(first + count) * SEEN], "{count} tokens from {first}");
    }
}

/// Outputs that do not fill the chip, or that rows of 16 bytes do not reach, and other numbers of tokens.
#[test]
fn gated_layers_that_others_take() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    for (inner, cols, tokens) in
        [(4096, 64, 200), (14_332, 64, 200), (14_336, 64, 128), (14_336, 64, 257), (14_336, 64, 513)]
    {
        let mlp = Mlp::new(&gpu, DType::BF16, inner, cols);
        let x = activation(&gpu, tokens, cols, &Random::new(2).normal(tokens * cols));
        assert_eq!(mlp.run(&gpu, Activation::Silu, &x).1, 0, "{tokens} tokens, {cols} to {inner}");
    }
}

/// Each kernel begins while the one before it still runs: it must not read, nor overwrite, too early.
#[test]
fn overlapped_gated_layers_wait_for_one_another() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let mlp = Mlp::new(&gpu, DType::BF16, 14_336, SEEN);
    for tokens in [150, 256] {
        let start = Random::new(4).normal(tokens * SEEN);
        let run = |between: &dyn Fn(&Tensor)| {
            let mut x = activation(&gpu, tokens, SEEN, &start);
            for _ in 0..6 {
                let [gate, up, down] = mlp.weights.each_ref().map(|weight| LinearWeights { weight, bias: None });
                let of = MlpWeights { gate, up, down, act: Activation::Silu };
                x = gpu.gated_mlp(LinearInput::Plain(&x), &of).unwrap();
                between(&x);
            }
            bits(&host(&gpu, &x))
        };
        let want = run(&|x| drop(host(&gpu, x)));
        assert!(want.iter().all(|&x| f32::from_bits(x).is_finite()));
        for round in 0..10 {
            assert!(run(&|_| ()) == want, "{tokens} tokens, round {round}");
        }
    }
}
