//! Drives a model without an engine: block tables in scrambled order, packed batches, log-probabilities.
//! Each test file uses a part of it.
#![allow(dead_code, missing_docs)]
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)] // tests

pub mod regrouped;

use pagemill_backend::{
    ActivationMode, BatchLayout, CpuBackend, CpuConfig, DType, GroupLayout, KvPool, KvPoolSpec, SoloCollective, Tensor,
};
use pagemill_formats::Checkpoint;
use pagemill_model::{CausalLm, ModelError, ModelInput, ModelSpec, OutputRows, RankContext};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub const ZOO: [&str; 7] = ["llama", "llama3-rope", "llama-yarn", "mistral-swa", "qwen2", "qwen3", "gemma3"];
const BLOCK_SIZE: usize = 16;

pub fn zoo(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/zoo").join(name)
}

pub fn golden(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(zoo(name).join("golden.json")).unwrap()).unwrap()
}

pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

pub fn context(activations: ActivationMode) -> RankContext {
    let backend = CpuBackend::new(CpuConfig { activations, num_threads: Some(2), ..CpuConfig::default() }).unwrap();
    RankContext { backend: Arc::new(backend), collective: Arc::new(SoloCollective) }
}

pub fn load(path: &Path) -> Result<Box<dyn CausalLm>, ModelError> {
    pagemill_model::load(&Checkpoint::open(path)?, &context(ActivationMode::default()), &|_| {})
}

/// A model, its pool, and blocks handed out in an order that nothing may rely on.
pub struct Rig {
    pub model: Box<dyn CausalLm>,
    pub cx: RankContext,
    kv: KvPool,
    free_blocks: Vec<u32>,
}

/// One sequence's tables.
pub struct Sequence {
    tables: Vec<Vec<u32>>,
    pub len: usize,
}

impl Rig {
    /// A model with room for `tokens` tokens.
    pub fn new(path: &Path, activations: ActivationMode, kv_dtype: DType, tokens: usize) -> Self {
        Self::with_context(path, context(activations), kv_dtype, tokens)
    }

    /// A model on a device of the caller's.
    pub fn with_context(path: &Path, cx: RankContext, kv_dtype: DType, tokens: usize) -> Self {
        let model = pagemill_model::load(&Checkpoint::open(path).unwrap(), &cx, &|_| {}).unwrap();
        let spec = model.spec();
        let num_blocks = tokens.div_ceil(BLOCK_SIZE) * spec.kv_groups.len();
        let pool = KvPoolSpec {
            num_blocks,
            block_size: BLOCK_SIZE,
            layers_per_group: spec.layers_per_group(),
            num_kv_heads: spec.kv_heads_by_rank(cx.collective.world_size()).unwrap()[cx.collective.rank()],
            head_dim: spec.head_dim,
            dtype: kv_dtype,
        };
        let kv = cx.backend.alloc_kv(&pool).unwrap();
        let mut free_blocks: Vec<u32> = (0..num_blocks as u32).collect();
        let mut state = 0x9e37_79b9_u64;
        for i in (1..free_blocks.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            free_blocks.swap(i, (state >> 33) as usize % (i + 1));
        }
        Self { model, cx, kv, free_blocks }
    }

    pub fn zoo(name: &str, tokens: usize) -> Self {
        Self::new(&zoo(name), ActivationMode::default(), DType::F32, tokens)
    }

    pub fn spec(&self) -> &ModelSpec {
        self.model.spec()
    }

    pub fn sequence(&self) -> Sequence {
        Sequence { tables: vec![Vec::new(); self.spec().kv_groups.len()], len: 0 }
    }

    /// Runs one step of several sequences; hidden states `[T, D]`.
    pub fn step(&mut self, work: &mut [(&mut Sequence, &[u32])]) -> Tensor {
        self.step_for(work, OutputRows::All)
    }

    /// Runs one step of several sequences; hidden states `[R, D]`.
    pub fn step_for(&mut self, work: &mut [(&mut Sequence, &[u32])], output: OutputRows<'_>) -> Tensor {
        let num_groups = self.spec().kv_groups.len();
        let empty = GroupLayout { block_table_start: vec![0], ..GroupLayout::default() };
        let mut layout =
            BatchLayout { query_start: vec![0], groups: vec![empty; num_groups], ..BatchLayout::default() };
        let mut token_ids = Vec::new();
        for (sequence, tokens) in work {
            let (start, end) = (sequence.len, sequence.len + tokens.len());
            token_ids.extend_from_slice(tokens);
            layout.positions.extend(start as u32..end as u32);
            layout.query_start.push(token_ids.len() as u32);
            layout.seq_lens.push(end as u32);
            for (table, group) in sequence.tables.iter_mut().zip(&mut layout.groups) {
                while table.len() * BLOCK_SIZE < end {
                    table.push(self.free_blocks.pop().unwrap());
                }
                let slot = |p: usize| table[p / BLOCK_SIZE] * BLOCK_SIZE as u32 + (p % BLOCK_SIZE) as u32;
                group.slot_mapping.extend((start..end).map(slot));
                group.block_table.extend_from_slice(table);
                group.block_table_start.push(group.block_table.len() as u32);
            }
            sequence.len = end;
        }
        let backend = &self.cx.backend;
        let batch = backend.upload_batch(layout, self.kv.spec()).unwrap();
        backend.begin_forward();
        let input = ModelInput { token_ids: &token_ids, batch: &batch, output };
        let hidden = self.model.forward(&input, &mut self.kv).unwrap();
        backend.end_forward();
        hidden
    }

    /// The rows of `x` on the host.
    pub fn rows(&self, x: &Tensor) -> Vec<Vec<f32>> {
        let mut flat = vec![0.0; x.rows() * x.cols()];
        self.cx.backend.to_host(x, &mut flat).unwrap();
        flat.chunks_exact(x.cols()).map(<[f32]>::to_vec).collect()
    }

    /// Logits of the rows `rows` of `hidden`.
    pub fn logits(&self, hidden: &Tensor, rows: &[u32]) -> Vec<Vec<f32>> {
        let backend = &self.cx.backend;
        backend.begin_forward();
        let logits = self.model.logits(hidden, rows).unwrap();
        backend.end_forward();
        self.rows(&logits)
    }

    /// Log-probabilities after each of `tokens`, fed in steps of `chunk` tokens.
    pub fn logprobs(&mut self, sequence: &mut Sequence, tokens: &[u32], chunk: usize) -> Vec<Vec<f64>> {
        let mut all = Vec::new();
        for piece in tokens.chunks(chunk) {
            let hidden = self.step(&mut [(sequence, piece)]);
            let rows: Vec<u32> = (0..piece.len() as u32).collect();
            all.extend(self.logits(&hidden, &rows).iter().map(|row| log_softmax(row)));
        }
        all
    }
}

pub fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    logits.iter().map(|x| f64::from(x - max) - sum.ln()).collect()
}

pub fn argmax(row: &[f64]) -> u32 {
    (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap() as u32
}

/// Checks everything that a golden file states about a model.
pub fn check_goldens(name: &str, path: &Path) {
    let golden = golden(name);
    let prompts = golden["prompts"].as_array().unwrap().iter().chain(golden["chat"].as_array().unwrap());
    for prompt in prompts {
        check_prompt(name, path, prompt);
    }
    let document = &golden["document"];
    let tokens = ids(&document["ids"]);
    let mut rig = Rig::new(path, ActivationMode::default(), DType::F32, tokens.len());
    let mut sequence = rig.sequence();
    let logprobs = rig.logprobs(&mut sequence, &tokens[..tokens.len() - 1], 512);
    let nll: Vec<f64> = logprobs.iter().zip(&tokens[1..]).map(|(row, next)| -row[*next as usize]).collect();
    let (sum, expected): (f64, f64) = (nll.iter().sum(), document["sum_nll"].as_f64().unwrap());
    println!("{name}: document NLL {sum:.6}, golden {expected:.6}, relative {:.2e}", (sum / expected - 1.0).abs());
    assert!((sum / expected - 1.0).abs() < 1e-4, "{name}: NLL {sum}, golden {expected}");
    for (i, expected) in document["nll_every_64"].as_array().unwrap().iter().enumerate() {
        let expected = expected.as_f64().unwrap();
        assert!((nll[i * 64] - expected).abs() < 2e-3, "{name}: term {}: {} vs {expected}", i * 64, nll[i * 64]);
    }
}

fn check_prompt(name: &str, path: &Path, prompt: &Value) {
    let tokens = ids(&prompt["ids"]);
    let greedy = ids(&prompt["greedy_ids"]);
    let mut rig = Rig::new(path, ActivationMode::default(), DType::F32, tokens.len() + greedy.len());
    let mut sequence = rig.sequence();
    let mut last = rig.logprobs(&mut sequence, &tokens, 512).pop().unwrap();
    let top = prompt["top20_logprobs_after_prompt"].as_array().unwrap();
    let worst = top
        .iter()
        .map(|pair| (last[pair[0].as_u64().unwrap() as usize] - pair[1].as_f64().unwrap()).abs())
        .fold(0.0, f64::max);
    assert!(worst < 2e-3, "{name}: top-20 log-probabilities differ by {worst}");
    let margins = prompt["greedy_margin"].as_array().unwrap();
    for (step, (expected, margin)) in greedy.iter().zip(margins).enumerate() {
        if margin.as_f64().unwrap() > 1e-3 {
            assert_eq!(argmax(&last), *expected, "{name}: greedy token {step}");
        }
        last = rig.logprobs(&mut sequence, &[*expected], 1).pop().unwrap();
    }
}
