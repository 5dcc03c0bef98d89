//! Plans as a whole: bytes against sums by hand, what fits, refusals, micro-batches, and that the text shows units.

#![allow(missing_docs, clippy::unwrap_used)]

use pagemill_capacity::device::CpuFigures;
use pagemill_capacity::{CapacityError, CapacityPlan, Device, KvType, Predictor, Question, WeightType, known};

const GIB: u64 = 1 << 30;

fn question(model: &str, dtype: &str, device: &str, tp: usize, pp: usize) -> Question {
    Question {
        shape: known::shape(model).unwrap(),
        weights: WeightType::named(dtype).unwrap(),
        kv: KvType::F16,
        device: Device::named(device).unwrap(),
        tensor_parallel: tp,
        pipeline_parallel: pp,
        max_seq_len: None,
        max_batch_size: None,
        block_size: 16,
        prefill_chunk_size: 512,
        prompt_tokens: 512,
        gen_tokens: 128,
        batch_sizes: Vec::new(),
        micro_batches: None,
        wished_tokens_per_s: None,
    }
}

#[test]
fn bytes_of_llama_2_70b_over_sixteen_ranks_by_hand() {
    let plan = CapacityPlan::new(&question("llama-2-70b", "bf16", "a100-80g", 8, 2)).unwrap();
    assert_eq!((plan.ranks.len(), plan.layout.ranks()), (2, 16));
    for (stage, rank) in plan.ranks.iter().enumerate() {
        assert_eq!((rank.layers_start, rank.layers_end), (40 * stage, 40 * stage + 40));
        // q and o: 8 of 64 heads of 128; k and v: 1 of 8.
        assert_eq!(rank.attention_bytes, 40 * 8192 * 128 * (8 + 8 + 1 + 1) * 2);
        assert_eq!(rank.mlp_bytes, 40 * 3 * 8192 * (28_672 / 8) * 2);
        assert_eq!(rank.norm_bytes, (40 * 2 * 8192 + if stage == 1 { 8192 } else { 0 }) * 2);
        let vocabulary = 32_000 * 8192 / 8 * 2;
        assert_eq!((rank.embedding_bytes, rank.head_bytes), if stage == 0 { (vocabulary, 0) } else { (0, vocabulary) });
        // 2 × 40 layers × 1 head × 128 × 2 bytes.
        assert_eq!(rank.kv_bytes_per_token, 2 * 40 * 128 * 2);
        assert_eq!(rank.reserve_bytes, 8 * GIB);
        let sum = rank.weight_bytes + rank.workspace_bytes + rank.reserve_bytes + rank.kv_pool_bytes;
        assert_eq!(sum, 80 * GIB, "every byte has a place");
    }
    // All ranks together hold all weights once, but the norms eight times.
    let total: u64 = plan.ranks.iter().map(|rank| 8 * (rank.weight_bytes - rank.norm_bytes)).sum();
    assert_eq!(total, 2 * (plan.parameters - 80 * 2 * 8192 - 8192));
    assert_eq!(plan.kv_sequence_bytes, [4096 * 20_480; 2]);
    let pool = plan.ranks.iter().map(|rank| rank.kv_pool_bytes).min().unwrap();
    assert_eq!(plan.full_length_sequences, pool / (4096 * 20_480));
    assert_eq!(plan.request_sequences, pool / (640 * 20_480));
}

#[test]
fn copied_kv_heads_types_windows_and_tied_heads_by_hand() {
    // 4 KV heads over 28 ranks of one head each: every rank has a copy of one.
    let plan = CapacityPlan::new(&question("qwen2.5-7b", "fp8", "h100-80g", 28, 1)).unwrap();
    let rank = &plan.ranks[0];
    assert_eq!(rank.attention_bytes, 28 * 3584 * 128 * (2 + 2));
    assert_eq!(rank.kv_bytes_per_token, 28 * 2 * 128 * 2);
    // Embedding and head stay bf16, and whole: their rows do not divide over 28 ranks.
    assert_eq!(rank.embedding_bytes, 152_064 * 3584 * 2);
    assert_eq!(rank.embedding_bytes, rank.head_bytes);

    let int4 = CapacityPlan::new(&question("llama-3.1-8b", "q4", "l4", 1, 1)).unwrap();
    assert_eq!(int4.ranks[0].mlp_bytes, 32 * 3 * 4096 * 14_336 / 128 * 66);

    // Gemma 3: tied on one rank, copied to the last of two stages; 15 of 18 layers keep 512 tokens and a block.
    let mut gemma = question("gemma-3-270m", "bf16", "l4", 1, 1);
    gemma.max_seq_len = Some(32_768);
    let plan = CapacityPlan::new(&gemma).unwrap();
    assert_eq!((plan.ranks[0].head_bytes, plan.ranks[0].weight_bytes), (0, 2 * 268_098_176));
    assert_eq!(plan.kv_sequence_bytes, [(3 * 32_768 + 15 * 528) * 2 * 256 * 2]);
    gemma.pipeline_parallel = 2;
    let plan = CapacityPlan::new(&gemma).unwrap();
    assert_eq!(plan.ranks[1].head_bytes, 262_144 * 640 * 2);
    assert_eq!(plan.ranks[1].layers_end - plan.ranks[1].layers_start, 1, "the head is worth 30 layers");

    let mut kv = question("llama-3.1-8b", "bf16", "h200", 1, 1);
    for (kv_type, head_bytes) in [(KvType::F32, 512), (KvType::Bf16, 256), (KvType::Fp8, 128), (KvType::Int8, 132)] {
        kv.kv = kv_type;
        let plan = CapacityPlan::new(&kv).unwrap();
        assert_eq!(plan.ranks[0].kv_bytes_per_token, 32 * 8 * 2 * head_bytes, "{kv_type:?}");
    }
}

/// SmolLM2's 9 query and 3 KV heads of 64 over two ranks: the first has 6 and 2, and is the one that is shown.
#[test]
fn of_ranks_of_unlike_numbers_of_heads_the_one_with_most_by_hand() {
    let plan = CapacityPlan::new(&question("smollm2-135m", "bf16", "l4", 2, 1)).unwrap();
    let rank = &plan.ranks[0];
    assert_eq!(rank.attention_bytes, 30 * 576 * 64 * (6 + 6 + 2 + 2) * 2);
    assert_eq!(rank.kv_bytes_per_token, 30 * 2 * 2 * 64 * 2);
    assert!(plan.ranks_differ && plan.to_string().contains("memory of the first rank of a stage, which has most\n"));
    let even = CapacityPlan::new(&question("smollm2-135m", "bf16", "l4", 3, 1)).unwrap();
    assert_eq!(even.ranks[0].attention_bytes, 30 * 576 * 64 * (3 + 3 + 1 + 1) * 2);
    assert!(!even.ranks_differ && even.to_string().contains("memory of a rank\n"));
    // Each of nine has a query head and a copy of a KV head.
    let copied = CapacityPlan::new(&question("smollm2-135m", "bf16", "l4", 9, 1)).unwrap();
    assert_eq!(copied.ranks[0].attention_bytes, 30 * 576 * 64 * (1 + 1 + 1 + 1) * 2);
    assert!(!copied.ranks_differ);

    let mut odd = question("smollm2-135m", "bf16", "l4", 1, 1);
    odd.shape.num_kv_heads = 2;
    let error = CapacityPlan::new(&odd).unwrap_err().to_string();
    assert_eq!(error, "smollm2-135m: num_key_value_heads = 2 does not divide num_attention_heads = 9");
}

#[test]
fn what_does_not_fit_is_told_by_how_much_and_what_would_do() {
    let error = CapacityPlan::new(&question("llama-2-70b", "bf16", "a100-80g", 1, 1)).unwrap_err();
    let CapacityError::DoesNotFit { needed_bytes, weight_bytes, available_bytes, smallest, .. } = error.clone() else {
        panic!("{error}");
    };
    assert_eq!((weight_bytes, available_bytes), (2 * 68_976_648_192, 80 * GIB));
    assert!(needed_bytes > weight_bytes + 8 * GIB);
    // Two ranks have 144 GiB beside their reserve: enough for 128.5 GiB of weights.
    assert_eq!(smallest, Some((2, 1)));
    let text = error.to_string();
    assert!(text.contains("GiB are missing") && text.contains("--tp 2 --pp 1"), "{text}");
    assert!(CapacityPlan::new(&question("llama-2-70b", "bf16", "a100-80g", 2, 1)).is_ok());

    // The fewest ranks are the fewest: nothing with one rank less fits, and the advice itself does.
    for (model, device) in [("llama-3.1-405b", "a100-80g"), ("llama-3.1-70b", "l4"), ("llama-2-13b", "rtx-4090")] {
        let Err(CapacityError::DoesNotFit { smallest: Some((tp, pp)), .. }) =
            CapacityPlan::new(&question(model, "bf16", device, 1, 1))
        else {
            panic!("{model} fits one {device}");
        };
        assert!(CapacityPlan::new(&question(model, "bf16", device, tp, pp)).is_ok(), "{model} {tp} {pp}");
        for fewer in 1..tp * pp {
            for tp in known::shape(model).unwrap().possible_tensor_parallel() {
                if fewer % tp == 0 {
                    assert!(
                        CapacityPlan::new(&question(model, "bf16", device, tp, fewer / tp)).is_err(),
                        "{tp} {fewer}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_length_shrinks_unless_it_was_asked_for() {
    let plan = CapacityPlan::new(&question("llama-3.1-8b", "bf16", "l4", 1, 1)).unwrap();
    assert!(plan.max_seq_len < 131_072 && plan.full_length_sequences == 1, "{}", plan.max_seq_len);
    let mut longer = question("llama-3.1-8b", "bf16", "l4", 1, 1);
    longer.max_seq_len = Some(plan.max_seq_len);
    assert!(CapacityPlan::new(&longer).is_ok());
    longer.max_seq_len = Some(plan.max_seq_len + 16);
    assert!(matches!(CapacityPlan::new(&longer), Err(CapacityError::DoesNotFit { .. })));
}

#[test]
fn values_out_of_range_are_named() {
    let base = || question("llama-2-70b", "bf16", "a100-80g", 8, 2);
    let cases: [(&str, Question); 8] = [
        ("batch_sizes = 0", Question { batch_sizes: vec![1, 0], ..base() }),
        ("max_seq_len = 5000: must be in 1..=4096", Question { max_seq_len: Some(5000), ..base() }),
        ("prompt_tokens = 0", Question { prompt_tokens: 0, ..base() }),
        ("gen_tokens = 0", Question { gen_tokens: 0, ..base() }),
        ("prompt_tokens + gen_tokens = 4128: must be in 1..=4096", Question { prompt_tokens: 4000, ..base() }),
        ("max_batch_size = 0", Question { max_batch_size: Some(0), ..base() }),
        ("micro_batches = 0", Question { micro_batches: Some(0), ..base() }),
        ("tensor_parallel = 12: 64 query heads", Question { tensor_parallel: 12, ..base() }),
    ];
    for (expected, question) in cases {
        let error = CapacityPlan::new(&question).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{expected}: {error}");
    }
}

#[test]
fn micro_batches_fill_the_pipeline() {
    let mut question = question("llama-2-70b", "bf16", "a100-80g", 8, 2);
    question.max_batch_size = Some(64);
    let plan = CapacityPlan::new(&question).unwrap();
    assert!(plan.micro_batches_chosen >= 4, "from 4 upward");
    let by = |m: usize| plan.micro_batches.iter().find(|step| step.micro_batches == m).unwrap();
    // One micro-batch leaves one of two stages idle, and the sends beside it; four leave what the head costs.
    assert!((0.49..0.55).contains(&by(1).bubble_share), "{:?}", by(1));
    assert!(by(2).bubble_share < 0.05 && by(4).bubble_share < 0.05);
    for step in &plan.micro_batches {
        assert!((step.tokens_per_s - step.tokens_per_s_per_request * 64.0).abs() < 1e-6);
    }
    // Few sequences make few micro-batches, and one stage makes one.
    assert_eq!(plan.decode[0].step.micro_batches, 1);
    question.pipeline_parallel = 1;
    let plan = CapacityPlan::new(&question).unwrap();
    assert!(plan.micro_batches.is_empty() && plan.decode.iter().all(|row| row.step.micro_batches == 1));
    question.pipeline_parallel = 8;
    assert!(CapacityPlan::new(&question).unwrap().micro_batches_chosen >= 8, "at least the stages");
    question.micro_batches = Some(3);
    assert_eq!(CapacityPlan::new(&question).unwrap().micro_batches_chosen, 3);
}

#[test]
fn a_compute_bound_step_gains_from_more_micro_batches_until_the_bubble_is_gone() {
    let question = question("llama-2-70b", "bf16", "a100-80g", 8, 4);
    let layout = pagemill_capacity::Layout::new(&question.shape, &question.weights, 8, 4, 8).unwrap();
    let predictor = Predictor {
        shape: &question.shape,
        weights: &question.weights,
        kv: question.kv,
        device: &question.device,
        layout: &layout,
    };
    // Fill and drain of a lone prompt: (p - 1) / (c + p - 1) idle, if all chunks cost alike.
    for chunks in [1, 4, 8] {
        let prefill = predictor.prefill(1, 512 * chunks, 512);
        let ideal = 3.0 / (chunks as f64 + 3.0);
        assert_eq!(prefill.chunks, chunks);
        assert!((prefill.bubble_share - ideal).abs() < 0.04, "{chunks}: {} {ideal}", prefill.bubble_share);
    }
    // Of very many chunks, 256 are worked out: one chunk more than that changes little, twice the prompt at most
    // quadruples the time.
    let seconds = |chunks: usize| predictor.prefill(1, 512 * chunks, 512).seconds;
    assert!((1.0..1.02).contains(&(seconds(257) / seconds(256))), "{} {}", seconds(256), seconds(257));
    assert!((2.0..4.0).contains(&(seconds(600) / seconds(300))), "{} {}", seconds(300), seconds(600));
    // Large steps cost by the sequence: four micro-batches fill four stages, up to what sampling adds to the last.
    let (one, four) = (predictor.decode(2048, 512, 1), predictor.decode(2048, 512, 4));
    assert!((0.74..0.8).contains(&one.bubble_share) && four.bubble_share < 0.35, "{one:?} {four:?}");
    assert!(four.tokens_per_s > 1.3 * one.tokens_per_s, "{one:?} {four:?}");
}

#[test]
fn a_wished_speed_says_for_how_many() {
    let mut question = question("llama-2-70b", "bf16", "a100-80g", 8, 2);
    question.micro_batches = Some(2);
    question.wished_tokens_per_s = Some(45.0);
    let plan = CapacityPlan::new(&question).unwrap();
    let step = plan.wished.unwrap().step.unwrap().step;
    assert!(step.tokens_per_s_per_request >= 45.0 && step.batch > 64);
    // The engine's rule begins with four, each of which reads the weights again; with two it would be as above.
    question.micro_batches = None;
    let plan = CapacityPlan::new(&question).unwrap();
    let wish = plan.wished.unwrap();
    assert!(wish.step.unwrap().step.batch < step.batch);
    assert_eq!(wish.step_at_fewest.unwrap().step, step);
    assert!(plan.to_string().contains("with 2 micro-batches, for each of at most"), "{plan}");
    question.wished_tokens_per_s = Some(1e6);
    let plan = CapacityPlan::new(&question).unwrap();
    assert_eq!(plan.wished.unwrap().step_at_fewest, None);
    assert!(plan.to_string().contains("not even one request"));
}

#[test]
fn the_text_shows_units_and_what_is_assumed() {
    let text = CapacityPlan::new(&question("llama-2-70b", "bf16", "a100-80g", 8, 2)).unwrap().to_string();
    for part in [
        "68,976,648,192 parameters",
        "tensor parallel 8 × pipeline parallel 2",
        "160 × 16.00 KiB",
        "between hosts",
        "KV of a token          20.00 KiB",
        "tokens/s each",
        "512 in + 128 out",
        "micro-batches at batch 256: ",
        "calibrated",
        "assumed",
        "estimated: workspace",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    let single = CapacityPlan::new(&question("llama-3.1-8b", "bf16", "h200", 1, 1)).unwrap().to_string();
    assert!(single.contains("there is one rank") && !single.contains("micro-batches at"), "{single}");
}

#[test]
fn a_cpu_is_what_was_measured_or_given() {
    let figures = CpuFigures {
        memory_bytes: 16 * GIB,
        memory_bytes_per_s: 20e9,
        f32_flops_per_s: 200e9,
        int8_flops_per_s: Some(800e9),
        given: true,
    };
    let mut question = question("smollm2-135m", "q4_1", "l4", 1, 1);
    question.device = Device::cpu(&figures);
    let plan = CapacityPlan::new(&question).unwrap();
    // 84 MB of weights at no more than 20 GB/s.
    assert!(plan.decode[0].step.step_s > 134.5e6 * 0.625 / 20e9, "{:?}", plan.decode[0]);
    let left = plan.ranks[0].weight_bytes + plan.ranks[0].workspace_bytes + plan.ranks[0].reserve_bytes;
    assert_eq!(plan.ranks[0].kv_pool_bytes, (16 * GIB - left) / 2, "the memory is everybody's");
    assert!(plan.to_string().contains("as given"));
}
