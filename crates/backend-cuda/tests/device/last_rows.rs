//! Attention of the last tokens of a step's sequences, by a smaller batch that takes the place of the step's on the
//! device while the step is under way.

use crate::attention::{FAST_HEADS, NO_EXTRAS, Sequence, Shape, closeness, packed, pool, sequences, step};
use crate::support::{activation, assert_close, deterministic_gpu, gpu, host, poisoned};
use pagemill_backend::{Backend, DType, KvPool};
use pagemill_backend_cuda::{Activations, CudaBackend};

/// Sequences of the step: (length, tokens that are new). Decodes, whole prompts, and a chunk of one.
const STEP: [(usize, usize); 6] = [(300, 300), (1, 1), (513, 200), (70, 1), (64, 33), (1200, 129)];

/// What the tokens of `wanted` alone see of one step over their pasts, and what all tokens see. Nothing waits in between.
fn rows(gpu: &CudaBackend, shape: Shape, pool: &mut KvPool, seqs: &[Sequence], wanted: &[u32]) -> (Vec<f32>, Vec<f32>) {
    let chunks = |of: fn((usize, usize)) -> (usize, usize)| -> Vec<_> {
        let chunk = |(seq, sizes)| {
            let (first, count) = of(sizes);
            (seq, first, count)
        };
        STEP.into_iter().enumerate().map(chunk).filter(|(_, _, count)| *count > 0).collect()
    };
    step(gpu, shape, pool, seqs, &chunks(|(len, new)| (0, len - new)));
    let (layout, q, k, v) = packed(shape, seqs, &chunks(|(len, new)| (len - new, new)));
    let (q_cols, kv_cols) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let tokens = layout.num_tokens();
    let [q, k, v] = [(q, q_cols), (k, kv_cols), (v, kv_cols)].map(|(x, cols)| activation(gpu, tokens, cols, &x));
    let (mut some, mut all) = (poisoned(gpu, wanted.len(), q_cols), poisoned(gpu, tokens, q_cols));
    let mut gathered = poisoned(gpu, wanted.len(), q_cols);
    let params = shape.params(gpu);

    let batch = gpu.upload_batch(layout, pool.spec()).unwrap();
    gpu.kv_write(&k, &v, &params, &batch, pool).unwrap();
    let last = gpu.upload_batch(batch.layout.last_tokens(wanted).unwrap(), pool.spec()).unwrap();
    gpu.gather_rows(&q, &batch.layout.last_rows(wanted).unwrap(), &mut gathered).unwrap();
    gpu.attention(&gathered, &params, &last, pool, &mut some).unwrap();
    let batch = gpu.upload_batch(batch.layout, pool.spec()).unwrap();
    gpu.attention(&q, &params, &batch, pool, &mut all).unwrap();

    let all = host(gpu, &all);
    let of_wanted = batch.layout.last_rows(wanted).unwrap().into_iter().flat_map(|row| {
        let first = row as usize * q_cols;
        all[first..first + q_cols].to_vec()
    });
    (host(gpu, &some), of_wanted.collect())
}

/// All heads and windows; on a new pool each, so that keys that are not written yet are NaN.
fn check(gpu: &CudaBackend, same: impl Fn(&[f32], &[f32], DType, &str)) {
    let lens = STEP.map(|(len, _)| len);
    for (nth, (heads, kv_heads, head_dim)) in FAST_HEADS.into_iter().enumerate() {
        let block_size = [16, 32, 128][nth % 3];
        for (window, kv) in [(None, DType::F16), (Some(37), DType::BF16), (Some(200), DType::F16), (None, DType::BF16)]
        {
            let shape = Shape { heads, kv_heads, head_dim, window, block_size, extras: NO_EXTRAS };
            let (seqs, blocks) = sequences(shape, &lens, Activations::Bf16, kv);
            for wanted in [&[0, 1, 2, 3, 4, 5][..], &[5, 2], &[1]] {
                let (some, of_all) = rows(gpu, shape, &mut pool(gpu, shape, blocks, kv), &seqs, wanted);
                assert_eq!(some.len(), wanted.len() * heads * head_dim);
                same(&some, &of_all, kv, &format!("{shape:?} over {kv}, {wanted:?}"));
            }
        }
    }
}

#[test]
fn last_tokens_see_alone_what_they_see_in_the_step() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    check(&gpu, |some, all, kv, what| assert_close(some, all, closeness(Activations::Bf16, kv), what));
}

#[test]
fn last_tokens_are_the_same_bits_on_a_deterministic_device() {
    let Some(gpu) = deterministic_gpu(Activations::Bf16) else { return };
    check(&gpu, |some, all, _, what| assert!(some == all, "{what}"));
}
