//! Random damage to well-formed files: the answer is a model or a typed error, never a panic, and what is accepted is
//! consistent.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use pagemill_formats::hf::{GenerationConfig, HfConfig, TokenizerConfig};
use pagemill_formats::testing::{GgufWriter, SafetensorsWriter};
use pagemill_formats::{TensorInfo, gguf, safetensors};
use proptest::prelude::*;

fn gguf_sample() -> Vec<u8> {
    GgufWriter::default()
        .alignment(32)
        .str("general.architecture", "llama")
        .bool("flag", true)
        .strings("tokenizer.ggml.tokens", &["a", "bc", "ä"])
        .f32s("tokenizer.ggml.scores", &[1.0, 2.0, 3.0])
        .i32s("tokenizer.ggml.token_type", &[1, 1, 1])
        .f32_tensor("first", &[2, 4], &[1.0; 8])
        .tensor("second", 2, &[2, 32], vec![3; 36])
        .build()
}

fn safetensors_sample() -> Vec<u8> {
    SafetensorsWriter::default().f32_tensor("first", &[2, 2], &[1.0; 4]).tensor("second", "BF16", &[3], &[0; 6]).build()
}

/// (position, new byte) pairs, and a length to cut to.
fn damage() -> impl Strategy<Value = (Vec<(prop::sample::Index, u8)>, prop::sample::Index)> {
    let byte = prop_oneof![Just(0u8), Just(1), Just(0x7f), Just(0x80), Just(0xff), any::<u8>()];
    (prop::collection::vec((any::<prop::sample::Index>(), byte), 1..6), any::<prop::sample::Index>())
}

fn damaged(mut bytes: Vec<u8>, changes: &[(prop::sample::Index, u8)], cut: Option<&prop::sample::Index>) -> Vec<u8> {
    for (position, byte) in changes {
        let position = position.index(bytes.len());
        bytes[position] = *byte;
    }
    if let Some(cut) = cut {
        bytes.truncate(cut.index(bytes.len() + 1));
    }
    bytes
}

/// What a consumer relies on.
fn assert_consistent(tensors: &[TensorInfo], file_len: usize) {
    for tensor in tensors {
        assert!(tensor.num_bytes() <= file_len as u64);
        if tensor.tensor_type().is_some() {
            assert_eq!(tensor.row_bytes() * tensor.num_rows() as u64, tensor.num_bytes());
        }
    }
    let total: u64 = tensors.iter().map(TensorInfo::num_bytes).sum();
    assert!(total <= file_len as u64);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gguf_survives_damage((changes, cut) in damage(), is_cut in any::<bool>()) {
        let bytes = damaged(gguf_sample(), &changes, is_cut.then_some(&cut));
        match gguf::parse(&*bytes, bytes.len() as u64, Path::new("bad")) {
            Ok(header) => {
                assert_consistent(header.tensors.as_slice(), bytes.len());
                for (key, value) in header.metadata.iter() {
                    prop_assert_eq!(header.metadata.get(key).map(ToString::to_string), Some(value.to_string()));
                }
            }
            Err(error) => prop_assert!(error.to_string().starts_with("bad: ")),
        }
    }

    #[test]
    fn safetensors_survives_damage((changes, cut) in damage(), is_cut in any::<bool>()) {
        let bytes = damaged(safetensors_sample(), &changes, is_cut.then_some(&cut));
        match safetensors::parse(&*bytes, bytes.len() as u64, Path::new("bad")) {
            Ok(table) => assert_consistent(table.as_slice(), bytes.len()),
            Err(error) => prop_assert!(error.to_string().starts_with("bad: ")),
        }
    }

    #[test]
    fn json_members_survive_damage((changes, cut) in damage(), is_cut in any::<bool>()) {
        let sample = br#"{"model_type":"m","eos_token_id":[1,2],"rope_parameters":{"a":{"rope_theta":1.0}},
            "text_config":{"rope_scaling":{"type":"x"}},"chat_template":[{"name":"default","template":"t"}]}"#;
        let bytes = damaged(sample.to_vec(), &changes, is_cut.then_some(&cut));
        let file = Path::new("bad");
        let errors = [
            HfConfig::parse(&bytes, file).err(),
            GenerationConfig::parse(&bytes, file).err(),
            TokenizerConfig::parse(&bytes, file).err(),
            safetensors::ShardIndex::parse(&bytes, file).err(),
        ];
        for error in errors.into_iter().flatten() {
            prop_assert!(error.to_string().starts_with("bad: "));
        }
    }

    #[test]
    fn anything_at_all(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let with_magic = [b"GGUF\x03\0\0\0", &*bytes].concat();
        for bytes in [&bytes, &with_magic] {
            let _ = gguf::parse(&**bytes, bytes.len() as u64, Path::new("bad"));
            let _ = safetensors::parse(&**bytes, bytes.len() as u64, Path::new("bad"));
        }
    }
}
