//! The whole answer: bytes of every rank, messages, times, and the number of micro-batches. Fills in what was not
//! said, refuses what cannot be.

use crate::layout::range;
use crate::memory::{Limits, MemoryModel, RankMemory};
use crate::pipeline::{DecodeStep, MICRO_BATCHES_START, Prefill};
use crate::traffic::{TokenTraffic, Traffic};
use crate::{CapacityError, DecoderShape, Device, KvType, Layout, Predictor, WeightType};
use serde::Serialize;

/// Sequences in a step at most, where nothing was said: on a CPU the engine's rule, on a GPU what keeps it busy.
const AUTO_BATCH_SIZE: (usize, usize) = (64, 256);

/// Batch sizes that are shown, where nothing was said, up to the largest step.
const BATCHES_SHOWN: [usize; 4] = [1, 8, 64, 256];

/// Sequences and tokens that a question may name at most.
const COUNT_MOST: usize = 1 << 20;

/// Batches that a wished speed is looked for in.
const BATCHES_SEARCHED: usize = 4096;

/// What is asked.
#[derive(Clone, Debug)]
pub struct Question {
    /// The model.
    pub shape: DecoderShape,
    /// Weights stored how.
    pub weights: WeightType,
    /// KV stored how.
    pub kv: KvType,
    /// On what.
    pub device: Device,
    /// Ranks of a stage.
    pub tensor_parallel: usize,
    /// Stages.
    pub pipeline_parallel: usize,
    /// Tokens in a sequence at most; `None`: the model's, or what fits.
    pub max_seq_len: Option<usize>,
    /// Sequences in a step at most.
    pub max_batch_size: Option<usize>,
    /// Tokens in a KV block.
    pub block_size: usize,
    /// Prompt tokens of one request in one step at most.
    pub prefill_chunk_size: usize,
    /// Tokens of the prompt of the request whose latency is predicted.
    pub prompt_tokens: usize,
    /// Tokens of its answer.
    pub gen_tokens: usize,
    /// Batch sizes to show; empty: a few.
    pub batch_sizes: Vec<usize>,
    /// Micro-batches; `None`: by the engine's rule.
    pub micro_batches: Option<usize>,
    /// Tokens a second that every request shall get: the plan then says for how many requests at once.
    pub wished_tokens_per_s: Option<f64>,
}

/// A decode step and what it means for the stated request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The step.
    #[serde(flatten)]
    pub step: DecodeStep,
    /// Whether so many sequences of prompt and answer fit in the KV pool.
    pub fits: bool,
    /// Seconds from a request's arrival to its last token, when its prompt is not queued behind others.
    pub end_to_end_s: f64,
}

/// What is predicted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CapacityPlan {
    /// The model.
    pub model: String,
    /// All weights.
    pub parameters: u64,
    /// Type of the weights.
    pub weights: WeightType,
    /// Type of K and V.
    pub kv_dtype: KvType,
    /// Hardware and its figures.
    pub device: Device,
    /// Ranks and stages.
    pub layout: Layout,
    /// A step's limits.
    pub limits: Limits,
    /// Bytes of the first rank of each stage.
    pub ranks: Vec<RankMemory>,
    /// Whether the ranks of a stage have unlike numbers of heads; the first has most.
    pub ranks_differ: bool,
    /// Tokens in a sequence at most.
    pub max_seq_len: usize,
    /// KV bytes of such a sequence on the first rank of each stage.
    pub kv_sequence_bytes: Vec<u64>,
    /// Sequences of `max_seq_len` tokens that fit at once.
    pub full_length_sequences: u64,
    /// Sequences of the stated request that fit at once.
    pub request_sequences: u64,
    /// Messages of one token.
    pub traffic: TokenTraffic,
    /// Tokens of the stated request's prompt.
    pub prompt_tokens: usize,
    /// Tokens of its answer.
    pub gen_tokens: usize,
    /// The stated prompt, alone.
    pub prefill: Prefill,
    /// Decode steps by batch size.
    pub decode: Vec<Row>,
    /// The largest step that fits, by number of micro-batches; empty where there is one stage.
    pub micro_batches: Vec<DecodeStep>,
    /// The number that the engine's rule settles on there.
    pub micro_batches_chosen: usize,
    /// The largest step in which each request gets the wished speed.
    pub wished: Option<Wish>,
}

/// A wished speed, and the requests that get it at once.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Wish {
    /// Tokens a second of each request.
    pub tokens_per_s: f64,
    /// The largest such step with as many micro-batches as asked for, or as the engine's rule picks; `None`: not even
    /// one request gets it.
    pub step: Option<Row>,
    /// The largest such step with only as many micro-batches as stages.
    pub step_at_fewest: Option<Row>,
}

impl CapacityPlan {
    /// Works everything out. Reads nothing; takes milliseconds.
    ///
    /// # Errors
    /// [`CapacityError`]: the model cannot be cut so, a value is out of range, or not even one sequence fits.
    pub fn new(question: &Question) -> Result<Self, CapacityError> {
        let layout = check(question)?;
        let limits = limits(question);
        let Question { shape, weights, kv, device, prompt_tokens, gen_tokens, .. } = question;
        let memory = MemoryModel { shape, weights, kv: *kv, device, limits };
        let request_tokens = prompt_tokens + gen_tokens;
        memory.check(&layout, question.max_seq_len.unwrap_or(request_tokens))?;
        let max_seq_len = question.max_seq_len.unwrap_or_else(|| memory.longest_sequence(&layout));
        let request_sequences = memory.sequences(&layout, request_tokens);
        let predictor = Predictor { shape, weights, kv: *kv, device, layout: &layout };
        let prefill = predictor.prefill(1, *prompt_tokens, question.prefill_chunk_size);
        let context = prompt_tokens + gen_tokens / 2;
        let row = |step: DecodeStep| Row {
            step,
            fits: step.batch as u64 <= request_sequences,
            end_to_end_s: prefill.seconds + (gen_tokens - 1) as f64 * step.step_s,
        };
        let micro =
            |batch: usize| question.micro_batches.unwrap_or_else(|| predictor.choose_micro_batches(batch, context));
        let largest = usize::try_from(request_sequences).unwrap_or(usize::MAX).min(limits.max_batch_size);
        let wished = question.wished_tokens_per_s.map(|tokens_per_s| {
            let most = largest.min(BATCHES_SEARCHED);
            let find = |number: Option<usize>| predictor.largest_batch(tokens_per_s, context, most, number).map(row);
            let fewest = question.micro_batches.unwrap_or(layout.pp);
            Wish { tokens_per_s, step: find(question.micro_batches), step_at_fewest: find(Some(fewest)) }
        });
        Ok(Self {
            model: shape.name.clone(),
            parameters: shape.num_parameters(),
            weights: weights.clone(),
            kv_dtype: *kv,
            device: device.clone(),
            limits,
            ranks_differ: layout.tp < shape.num_kv_heads && !shape.num_kv_heads.is_multiple_of(layout.tp),
            ranks: (0..layout.pp).map(|stage| memory.rank(&layout, stage)).collect(),
            max_seq_len,
            kv_sequence_bytes: (0..layout.pp).map(|s| memory.sequence_bytes(&layout, s, max_seq_len)).collect(),
            full_length_sequences: memory.sequences(&layout, max_seq_len),
            request_sequences,
            traffic: Traffic { device, layout: &layout }.of_a_token(shape),
            prompt_tokens: *prompt_tokens,
            gen_tokens: *gen_tokens,
            prefill,
            decode: shown(question, &limits)
                .into_iter()
                .map(|batch| row(predictor.decode(batch, context, micro(batch))))
                .collect(),
            micro_batches: curve(&predictor, largest, context, micro(largest)),
            micro_batches_chosen: predictor.decode(largest, context, micro(largest)).micro_batches,
            wished,
            layout,
        })
    }
}

/// Refuses values out of range; cuts the model.
fn check(question: &Question) -> Result<Layout, CapacityError> {
    let Question { shape, weights, device, .. } = question;
    let layout =
        Layout::new(shape, weights, question.tensor_parallel, question.pipeline_parallel, device.ranks_per_host)?;
    let positions = format!("{} was made for {} positions", shape.name, shape.max_seq_len);
    if let Some(tokens) = question.max_seq_len {
        range("max_seq_len", tokens, shape.max_seq_len, positions.clone())?;
    }
    let longest = question.max_seq_len.unwrap_or(shape.max_seq_len);
    range("prompt_tokens", question.prompt_tokens, longest, positions.clone())?;
    range("gen_tokens", question.gen_tokens, longest, positions.clone())?;
    let request = question.prompt_tokens + question.gen_tokens;
    range("prompt_tokens + gen_tokens", request, longest, format!("a sequence has at most {longest} tokens"))?;
    range("block_size", question.block_size, COUNT_MOST, "tokens of a KV block".to_owned())?;
    range("prefill_chunk_size", question.prefill_chunk_size, COUNT_MOST, "tokens of a step".to_owned())?;
    let batches = question.batch_sizes.iter().map(|batch| ("batch_sizes", *batch));
    for (key, batch) in question.max_batch_size.map(|batch| ("max_batch_size", batch)).into_iter().chain(batches) {
        range(key, batch, COUNT_MOST, "sequences of a step".to_owned())?;
    }
    if let Some(micro_batches) = question.micro_batches {
        range("micro_batches", micro_batches, COUNT_MOST, "parts of a step".to_owned())?;
    }
    Ok(layout)
}

/// The engine's rule: a whole prompt chunk fits beside a full batch of decodes.
fn limits(question: &Question) -> Limits {
    let (cpu, gpu) = AUTO_BATCH_SIZE;
    let automatic = if question.device.shared_memory { cpu } else { gpu };
    let max_batch_size = question.max_batch_size.unwrap_or(automatic);
    Limits {
        max_batch_size,
        max_batch_tokens: question.prefill_chunk_size + max_batch_size,
        block_size: question.block_size,
    }
}

/// Batch sizes to show, ascending.
fn shown(question: &Question, limits: &Limits) -> Vec<usize> {
    let mut batches = question.batch_sizes.clone();
    if batches.is_empty() {
        batches.extend(BATCHES_SHOWN.into_iter().filter(|batch| *batch < limits.max_batch_size));
        batches.push(limits.max_batch_size);
    }
    batches.sort_unstable();
    batches.dedup();
    batches
}

/// The step by number of micro-batches: the stages, what the engine begins with and its doublings, and what was chosen.
fn curve(predictor: &Predictor<'_>, batch: usize, context: usize, chosen: usize) -> Vec<DecodeStep> {
    let stages = predictor.layout.pp;
    if stages == 1 {
        return Vec::new();
    }
    let start = MICRO_BATCHES_START.max(stages);
    let mut numbers = vec![1, stages, start, 2 * start, 4 * start, chosen];
    numbers.retain(|number| *number <= batch);
    numbers.sort_unstable();
    numbers.dedup();
    numbers.into_iter().map(|number| predictor.decode(batch, context, number)).collect()
}
