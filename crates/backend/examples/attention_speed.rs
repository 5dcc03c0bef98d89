//! Measures attention on this machine, by one thread: GFLOP/s (4 · heads · E for each position seen) and,
//! for decode, the cache's GB/s. Steps go through several pool tensors, as a model's layers do, so that the
//! cache comes from beyond the second level. Times are the thread's processor time, so that other work on the
//! machine counts only by what it does to caches; best of several passes; all instruction sets in one run.
//!
//! `cargo run --release -p pagemill-backend --example attention_speed`

use pagemill_backend::cpu::Isa;
use pagemill_backend::{
    AttentionParams, Backend, BackendError, BatchLayout, CpuBackend, CpuConfig, DType, GroupLayout, KvPool, KvPoolSpec,
};
use std::time::Instant;

/// (query heads, KV heads, E).
const SHAPES: [(usize, usize, usize); 3] = [(9, 3, 64), (32, 8, 128), (4, 1, 256)];
const CONTEXTS: [usize; 3] = [512, 2048, 8192];
const BLOCK_SIZE: usize = 32;
const PREFILL_TOKENS: usize = 512;
/// Bytes of cache that a pass goes through, roughly.
const CACHE_BYTES: usize = 32 << 20;

struct Bench {
    backend: CpuBackend,
    shape: (usize, usize, usize),
    context: usize,
    pool: KvPool,
}

impl Bench {
    fn new(isa: Isa, shape: (usize, usize, usize), context: usize) -> Result<Self, BackendError> {
        let backend = CpuBackend::new(CpuConfig { isa: Some(isa), num_threads: Some(1), ..Default::default() })?;
        let (_, num_kv_heads, head_dim) = shape;
        let layer_bytes = 4 * num_kv_heads * head_dim * context;
        let spec = KvPoolSpec {
            num_blocks: context / BLOCK_SIZE,
            block_size: BLOCK_SIZE,
            layers_per_group: (CACHE_BYTES / layer_bytes).clamp(2, 30),
            num_kv_heads,
            head_dim,
            dtype: DType::F16,
        };
        let mut bench = Self { pool: backend.alloc_kv(&spec)?, backend, shape, context };
        let cols = num_kv_heads * head_dim;
        let mut rows = bench.backend.temp(context, cols)?;
        let values: Vec<f32> = (0_u16..=u16::MAX).cycle().map(noise).take(context * cols).collect();
        bench.backend.copy_from_host(&values, &mut rows)?;
        let batch = bench.backend.upload_batch(bench.layout(context), &spec)?;
        for layer in 0..spec.layers_per_group {
            bench.backend.kv_write(&rows, &rows, &bench.params(layer), &batch, &mut bench.pool)?;
        }
        Ok(bench)
    }

    fn params(&self, layer_in_group: usize) -> AttentionParams {
        let (num_heads, num_kv_heads, head_dim) = self.shape;
        let scale = 1.0 / (head_dim as f32).sqrt();
        AttentionParams {
            num_heads,
            num_kv_heads,
            num_kv_heads_max: num_kv_heads,
            head_dim,
            scale,
            window: None,
            soft_cap: None,
            sinks: None,
            group_idx: 0,
            layer_in_group,
        }
    }

    /// The last `tokens` of the context as one step; blocks in reverse order.
    fn layout(&self, tokens: usize) -> BatchLayout {
        let wide = |x: usize| u32::try_from(x).unwrap_or(u32::MAX);
        let blocks: Vec<u32> = (0..wide(self.context / BLOCK_SIZE)).rev().collect();
        let slot = |p: usize| blocks[p / BLOCK_SIZE] * wide(BLOCK_SIZE) + wide(p % BLOCK_SIZE);
        let positions = self.context - tokens..self.context;
        BatchLayout {
            query_start: vec![0, wide(tokens)],
            seq_lens: vec![wide(self.context)],
            groups: vec![GroupLayout {
                slot_mapping: positions.clone().map(slot).collect(),
                block_table_start: vec![0, wide(blocks.len())],
                block_table: blocks,
            }],
            positions: positions.map(wide).collect(),
        }
    }

    /// Seconds of one layer's attention for the last `tokens` of the context.
    fn seconds(&self, tokens: usize) -> Result<f64, BackendError> {
        let (num_heads, _, head_dim) = self.shape;
        let cols = num_heads * head_dim;
        let batch = self.backend.upload_batch(self.layout(tokens), self.pool.spec())?;
        let mut q = self.backend.temp(tokens, cols)?;
        let values: Vec<f32> = (0_u16..=u16::MAX).rev().cycle().map(noise).take(tokens * cols).collect();
        self.backend.copy_from_host(&values, &mut q)?;
        let mut out = self.backend.temp(tokens, cols)?;
        let mut best = vec![f64::MAX; self.pool.spec().layers_per_group];
        let started = Instant::now();
        let mut passes = 0;
        while passes < 2 || started.elapsed().as_secs_f64() < 0.25 {
            for (layer, best) in best.iter_mut().enumerate() {
                let start = thread_seconds();
                self.backend.attention(&q, &self.params(layer), &batch, &self.pool, &mut out)?;
                *best = best.min(thread_seconds() - start);
            }
            passes += 1;
        }
        Ok(best.iter().sum::<f64>() / best.len() as f64)
    }

    fn print(&self) -> Result<(), BackendError> {
        let (num_heads, num_kv_heads, head_dim) = self.shape;
        let per_position = (4 * num_heads * head_dim) as f64;
        let decode = self.seconds(1)?;
        let context = self.context as f64;
        let gbps = (4 * num_kv_heads * head_dim) as f64 * context / decode / 1e9;
        let tokens = PREFILL_TOKENS as f64;
        let seen = tokens * (context - tokens) + tokens * (tokens + 1.0) / 2.0;
        let prefill = per_position * seen / self.seconds(PREFILL_TOKENS)? / 1e9;
        println!(
            "{:12} {num_heads:4} {num_kv_heads:3} {head_dim:4} {:8}   {:7.1} {gbps:7.1}   {prefill:7.1}",
            self.backend.isa().name(),
            self.context,
            per_position * context / decode / 1e9,
        );
        Ok(())
    }
}

/// Processor time that this thread has taken.
fn thread_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place to write to.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// A value in about -1..1 without a pattern of small period.
fn noise(i: u16) -> f32 {
    f32::from(i.wrapping_mul(40_503) ^ (i >> 3)) / 32_768.0 - 1.0
}

fn main() -> Result<(), BackendError> {
    println!("isa             H   K    E  context   decode GFLOP/s, GB/s   prefill (512 tokens) GFLOP/s");
    for shape in SHAPES {
        for context in CONTEXTS {
            for isa in [Isa::Avx2, Isa::Avx512Vnni].into_iter().filter(|isa| isa.is_available()) {
                Bench::new(isa, shape, context)?.print()?;
            }
        }
    }
    Ok(())
}
