//! The zoo's models against their goldens, and the promises about chunks and batches, bit for bit.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)] // tests

mod harness;

use harness::{Rig, ZOO, check_goldens, golden, ids, zoo};
use pagemill_backend::{ActivationMode, DType};
use pagemill_formats::Checkpoint;
use pagemill_model::{KvKind, LoadProgress, ParallelMode, load, plan_stages, read_spec};
use std::cell::RefCell;

#[test]
fn llama() {
    check_goldens("llama", &zoo("llama"));
}

#[test]
fn llama3_rope() {
    check_goldens("llama3-rope", &zoo("llama3-rope"));
}

#[test]
fn llama_yarn() {
    check_goldens("llama-yarn", &zoo("llama-yarn"));
}

#[test]
fn mistral_swa() {
    check_goldens("mistral-swa", &zoo("mistral-swa"));
}

#[test]
fn qwen2() {
    check_goldens("qwen2", &zoo("qwen2"));
}

#[test]
fn qwen3() {
    check_goldens("qwen3", &zoo("qwen3"));
}

#[test]
fn gemma3() {
    check_goldens("gemma3", &zoo("gemma3"));
}

/// Hidden states and logits of the document's beginning in steps of `chunk` tokens, as bits.
fn bits_in_chunks(name: &str, tokens: &[u32], chunk: usize) -> Vec<Vec<u32>> {
    let mut rig = Rig::zoo(name, tokens.len());
    let mut sequence = rig.sequence();
    let mut bits = Vec::new();
    for piece in tokens.chunks(chunk) {
        let hidden = rig.step(&mut [(&mut sequence, piece)]);
        let rows: Vec<u32> = (0..piece.len() as u32).collect();
        for (hidden, logits) in rig.rows(&hidden).iter().zip(rig.logits(&hidden, &rows)) {
            bits.push(hidden.iter().chain(&logits).map(|x| x.to_bits()).collect());
        }
    }
    bits
}

#[test]
fn chunk_sizes_change_no_bit() {
    for name in ZOO {
        let tokens = &ids(&golden(name)["document"]["ids"])[..600];
        let whole = bits_in_chunks(name, tokens, 512);
        for chunk in [1, 7] {
            let pieces = bits_in_chunks(name, tokens, chunk);
            let differing = (0..tokens.len()).find(|row| whole[*row] != pieces[*row]);
            assert_eq!(differing, None, "{name}: first row that differs in chunks of {chunk}");
        }
    }
}

#[test]
fn a_mixed_batch_changes_no_bit() {
    for name in ZOO {
        let document = ids(&golden(name)["document"]["ids"]);
        // Sixteen sequences of 1 to 121 tokens, in three steps of uneven pieces.
        let lengths: Vec<usize> = (0..16).map(|i| 1 + i * 8).collect();
        let alone: Vec<_> = lengths.iter().map(|n| bits_in_chunks(name, &document[..*n], 512)).collect();
        let mut rig = Rig::zoo(name, 16 * 128);
        let mut sequences: Vec<_> = lengths.iter().map(|_| rig.sequence()).collect();
        let mut rows_seen = 0;
        for step in 1..=3 {
            let end = |i: usize| {
                if i % 5 < step { lengths[i] * step / 3 } else { lengths[i] * (step - 1) / 3 }
            };
            let mut planned = Vec::new();
            let mut work = Vec::new();
            for (i, sequence) in sequences.iter_mut().enumerate() {
                let (start, end) = (sequence.len, if step == 3 { lengths[i] } else { end(i) });
                if start < end {
                    planned.extend((start..end).map(|position| (i, position)));
                    work.push((sequence, &document[start..end]));
                }
            }
            let hidden = rig.step(&mut work);
            let all: Vec<u32> = (0..hidden.rows() as u32).collect();
            let logits = rig.logits(&hidden, &all);
            for ((owner, position), (hidden, logits)) in planned.iter().zip(rig.rows(&hidden).iter().zip(&logits)) {
                let got: Vec<u32> = hidden.iter().chain(logits).map(|x| x.to_bits()).collect();
                assert!(got == alone[*owner][*position], "{name}: sequence {owner}, position {position}");
                rows_seen += 1;
            }
        }
        assert_eq!(rows_seen, lengths.iter().sum::<usize>(), "{name}: every token was compared");
    }
}

#[test]
fn logits_of_chosen_rows_are_those_rows() {
    let mut rig = Rig::zoo("qwen3", 64);
    let tokens = &ids(&golden("qwen3")["document"]["ids"])[..40];
    let mut sequence = rig.sequence();
    let hidden = rig.step(&mut [(&mut sequence, tokens)]);
    let all = rig.logits(&hidden, &(0..40).collect::<Vec<_>>());
    let some = rig.logits(&hidden, &[39, 0, 17, 17]);
    assert_eq!(some, [39, 0, 17, 17].map(|row: usize| all[row].clone()));
}

#[test]
fn workspace_stops_growing() {
    let mut rig = Rig::zoo("gemma3", 2048);
    let document = ids(&golden("gemma3")["document"]["ids"]);
    let run = |rig: &mut Rig| {
        let mut sequence = rig.sequence();
        let hidden = rig.step(&mut [(&mut sequence, &document[..512])]);
        rig.logits(&hidden, &[511]);
    };
    run(&mut rig);
    let held = rig.cx.backend.workspace();
    run(&mut rig);
    assert_eq!(rig.cx.backend.workspace(), held);
}

#[test]
fn half_precision_cache_stays_close() {
    for name in ["llama", "gemma3"] {
        let document = ids(&golden(name)["document"]["ids"]);
        let mut nll = [DType::F32, DType::F16].map(|dtype| {
            let mut rig = Rig::new(&zoo(name), ActivationMode::default(), dtype, document.len());
            let mut sequence = rig.sequence();
            let logprobs = rig.logprobs(&mut sequence, &document[..document.len() - 1], 512);
            logprobs.iter().zip(&document[1..]).map(|(row, next)| -row[*next as usize]).sum::<f64>()
        });
        nll.sort_unstable_by(f64::total_cmp);
        assert!(nll[1] / nll[0] - 1.0 < 1e-3, "{name}: {nll:?}");
    }
}

#[test]
fn specs_state_the_shapes() {
    for name in ZOO {
        let checkpoint = Checkpoint::open(&zoo(name)).unwrap();
        let spec = read_spec(&checkpoint).unwrap();
        let golden = golden(name);
        assert_eq!(spec.num_parameters, golden["num_params"].as_u64().unwrap(), "{name}");
        assert_eq!((spec.hidden_size, spec.vocab_size, spec.max_seq_len), (128, 512, 4096), "{name}");
        let mut layers: Vec<usize> = spec.kv_groups.iter().flat_map(|group| group.layers.clone()).collect();
        layers.sort_unstable();
        assert_eq!(layers, (0..spec.num_layers).collect::<Vec<_>>(), "{name}");
    }
    let gemma = read_spec(&Checkpoint::open(&zoo("gemma3")).unwrap()).unwrap();
    let kinds: Vec<_> = gemma.kv_groups.iter().map(|group| group.kind).collect();
    let sliding = KvKind::SlidingWindow { window: 64 };
    assert_eq!(kinds, [sliding, sliding, KvKind::Full]);
    assert_eq!((gemma.num_kv_heads, gemma.head_dim, gemma.tied_embeddings), (1, 64, true));
    let mistral = read_spec(&Checkpoint::open(&zoo("mistral-swa")).unwrap()).unwrap();
    assert_eq!(mistral.kv_groups.len(), 1);
    assert_eq!(mistral.kv_groups[0].kind, KvKind::SlidingWindow { window: 96 });
}

#[test]
fn progress_rises_to_the_whole() {
    let checkpoint = Checkpoint::open(&zoo("llama")).unwrap();
    let seen: RefCell<Vec<LoadProgress>> = RefCell::default();
    let cx = harness::context(ActivationMode::default());
    let model = load(&checkpoint, &cx, &|progress| seen.borrow_mut().push(progress)).unwrap();
    let seen = seen.into_inner();
    assert!(seen.is_sorted_by_key(|progress| progress.bytes_done));
    assert_eq!(seen.last().unwrap().bytes_done, model.spec().stored_bytes);
    assert!(seen.iter().all(|progress| progress.bytes_total == model.spec().stored_bytes));
    assert!(model.weight_bytes() >= model.spec().stored_bytes);
}

/// A configuration alone has no tensors to count bytes of.
#[test]
fn stages_of_made_up_weights_are_those_of_the_real_ones() {
    for name in ["llama", "qwen3", "gemma3"] {
        let real = Checkpoint::open(&zoo(name)).unwrap();
        let made_up = Checkpoint::open_config(&zoo(name), None).unwrap();
        for pipeline_parallel in 1..=read_spec(&real).unwrap().num_layers {
            let mode = ParallelMode { tensor_parallel: 1, pipeline_parallel };
            let cuts = |checkpoint| -> Vec<_> {
                plan_stages(checkpoint, mode).unwrap().into_iter().map(|stage| stage.layers).collect()
            };
            assert_eq!(cuts(&made_up), cuts(&real), "{name}, {mode}");
        }
    }
}
