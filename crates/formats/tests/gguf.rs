//! Well-formed GGUF files: every value type, typed access, layout, reading.
#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::path::Path;

use pagemill_formats::gguf::{self, Array, GgufFile, GgufHeader, Value};
use pagemill_formats::testing::GgufWriter;
use pagemill_formats::{FormatErrorKind, StoredType, TensorType};

fn parse(bytes: &[u8]) -> GgufHeader {
    gguf::parse(bytes, bytes.len() as u64, Path::new("test.gguf")).unwrap()
}

fn on_disk(bytes: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn tokenizer_keys() -> GgufWriter {
    GgufWriter::default()
        .str("general.architecture", "llama")
        .str("tokenizer.ggml.model", "gpt2")
        .str("tokenizer.ggml.pre", "smollm")
        .strings("tokenizer.ggml.tokens", &["<s>", "ä", "", "b c"])
        .f32s("tokenizer.ggml.scores", &[0.0, -1.0, -2.0, -3.0])
        .i32s("tokenizer.ggml.token_type", &[3, 1, 1, 1])
        .strings("tokenizer.ggml.merges", &["b c"])
        .u32("tokenizer.ggml.bos_token_id", 0)
        .u32("tokenizer.ggml.eos_token_id", 3)
        .bool("tokenizer.ggml.add_bos_token", true)
        .strings("tokenizer.chat_templates", &["tool_use"])
        .str("tokenizer.chat_template", "{{ messages }}")
        .str("tokenizer.chat_template.tool_use", "{{ tools }}")
}

#[test]
fn every_scalar_type_is_read() {
    let bytes = GgufWriter::default()
        .raw("u8", 0, vec![200])
        .raw("i8", 1, vec![0xff])
        .raw("u16", 2, 40_000u16.to_le_bytes().to_vec())
        .raw("i16", 3, (-2i16).to_le_bytes().to_vec())
        .u32("u32", 7)
        .raw("i32", 5, (-3i32).to_le_bytes().to_vec())
        .f32("f32", 0.5)
        .bool("bool", true)
        .str("str", "héllo")
        .raw("u64", 10, u64::MAX.to_le_bytes().to_vec())
        .raw("i64", 11, i64::MIN.to_le_bytes().to_vec())
        .raw("f64", 12, 0.25f64.to_le_bytes().to_vec())
        .build();
    let metadata = parse(&bytes).metadata;
    let expected = [
        ("u8", Value::U8(200)),
        ("i8", Value::I8(-1)),
        ("u16", Value::U16(40_000)),
        ("i16", Value::I16(-2)),
        ("u32", Value::U32(7)),
        ("i32", Value::I32(-3)),
        ("f32", Value::F32(0.5)),
        ("bool", Value::Bool(true)),
        ("str", Value::String("héllo".into())),
        ("u64", Value::U64(u64::MAX)),
        ("i64", Value::I64(i64::MIN)),
        ("f64", Value::F64(0.25)),
    ];
    assert_eq!(metadata.iter().len(), expected.len());
    for ((key, value), (expected_key, expected)) in metadata.iter().zip(&expected) {
        assert_eq!((key, value), (*expected_key, expected));
    }
}

#[test]
fn every_array_type_is_read() {
    let two = |bytes: &[u8]| [bytes, bytes].concat();
    let bytes = GgufWriter::default()
        .array("0", 0, 2, two(&[9]))
        .array("1", 1, 2, two(&[0xfe]))
        .array("2", 2, 2, two(&9u16.to_le_bytes()))
        .array("3", 3, 2, two(&(-9i16).to_le_bytes()))
        .array("4", 4, 2, two(&9u32.to_le_bytes()))
        .array("5", 5, 2, two(&(-9i32).to_le_bytes()))
        .array("6", 6, 2, two(&1.5f32.to_le_bytes()))
        .array("7", 7, 2, vec![0, 1])
        .strings("8", &["a", "ß"])
        .array("10", 10, 2, two(&9u64.to_le_bytes()))
        .array("11", 11, 2, two(&(-9i64).to_le_bytes()))
        .array("12", 12, 2, two(&2.5f64.to_le_bytes()))
        .array("none", 4, 0, vec![])
        .build();
    let metadata = parse(&bytes).metadata;
    let array = |key: &str| match metadata.get(key) {
        Some(Value::Array(array)) => (**array).clone(),
        other => panic!("{key}: {other:?}"),
    };
    assert_eq!(array("0"), Array::U8(vec![9; 2]));
    assert_eq!(array("1"), Array::I8(vec![-2; 2]));
    assert_eq!(array("2"), Array::U16(vec![9; 2]));
    assert_eq!(array("3"), Array::I16(vec![-9; 2]));
    assert_eq!(array("4"), Array::U32(vec![9; 2]));
    assert_eq!(array("5"), Array::I32(vec![-9; 2]));
    assert_eq!(array("6"), Array::F32(vec![1.5; 2]));
    assert_eq!(array("7"), Array::Bool(vec![false, true]));
    assert_eq!(metadata.require_strings("8").unwrap().iter().collect::<Vec<_>>(), ["a", "ß"]);
    assert_eq!(array("10"), Array::U64(vec![9; 2]));
    assert_eq!(array("11"), Array::I64(vec![-9; 2]));
    assert_eq!(array("12"), Array::F64(vec![2.5; 2]));
    assert!(array("none").is_empty());
}

#[test]
fn arrays_longer_than_the_read_buffer_are_whole() {
    let values: Vec<i32> = (0..5000).collect();
    let metadata = parse(&GgufWriter::default().i32s("long", &values).build()).metadata;
    assert_eq!(metadata.get_i32s("long").unwrap().unwrap(), values);
}

#[test]
fn getters_name_key_and_types() {
    let bytes = GgufWriter::default().str("a", "x").raw("negative", 5, (-1i32).to_le_bytes().to_vec()).build();
    let metadata = parse(&bytes).metadata;
    let error = metadata.require_u32("a").unwrap_err();
    assert_eq!(error.field(), Some("a"));
    assert_eq!(error.offset(), Some(24));
    assert_eq!(error.to_string(), "test.gguf: a: expected unsigned 32-bit integer, found string \"x\" (at byte 24)");
    let error = metadata.get_u32("negative").unwrap_err();
    assert!(error.to_string().contains("found integer -1"), "{error}");
    let error = metadata.require_f64("absent").unwrap_err();
    assert_eq!(error.to_string(), "test.gguf: absent: missing (expected float)");
    assert_eq!(metadata.get_bool("absent").unwrap(), None);
}

#[test]
fn per_layer_values_come_as_one_or_as_many() {
    let bytes = GgufWriter::default().u32("one", 3).i32s("many", &[1, 2]).i32s("bad", &[1, -2]).build();
    let metadata = parse(&bytes).metadata;
    assert_eq!(metadata.get_u32_per_layer("one", 2).unwrap(), Some(vec![3, 3]));
    assert_eq!(metadata.get_u32_per_layer("many", 2).unwrap(), Some(vec![1, 2]));
    assert_eq!(metadata.get_u32_per_layer("none", 2).unwrap(), None);
    for (key, layers) in [("many", 3), ("bad", 2)] {
        let error = metadata.get_u32_per_layer(key, layers).unwrap_err();
        assert!(matches!(error.kind(), FormatErrorKind::WrongType { .. }), "{error}");
    }
}

#[test]
fn versions_2_and_3_and_alignments_are_read() {
    for version in [2, 3] {
        for alignment in [8, 16, 32, 64, 4096] {
            let bytes = GgufWriter::default()
                .version(version)
                .alignment(alignment)
                .f32_tensor("a", &[3], &[1.0, 2.0, 3.0])
                .f32_tensor("b", &[2], &[4.0, 5.0])
                .build();
            let file = on_disk(&bytes);
            let gguf = GgufFile::open(file.path()).unwrap();
            assert_eq!(gguf.version(), version);
            let mut b = [0; 8];
            gguf.weights().read_all("b", &mut b).unwrap();
            assert_eq!(b, [4.0f32.to_le_bytes(), 5.0f32.to_le_bytes()].concat()[..]);
        }
    }
}

#[test]
fn shapes_are_row_major_and_rows_are_read_in_place() {
    let data: Vec<u8> = (0u8..8 * 18).collect();
    let bytes = GgufWriter::default().tensor("w", 2, &[2, 2, 64], data.clone()).build();
    let file = on_disk(&bytes);
    let gguf = GgufFile::open(file.path()).unwrap();
    let (tensor, ty) = gguf.weights().loadable("w").unwrap();
    assert_eq!(ty, TensorType::Q4_0);
    assert_eq!(tensor.shape(), [2, 2, 64]);
    assert_eq!((tensor.num_rows(), tensor.num_cols(), tensor.row_bytes(), tensor.num_bytes()), (4, 64, 36, 144));
    let mut rows = [0; 72];
    gguf.weights().read_rows("w", 1, 2, &mut rows).unwrap();
    assert_eq!(rows, data[36..108]);
    gguf.weights().read_rows("w", 4, 0, &mut []).unwrap();
    let mut part = [0; 18];
    gguf.weights().read_in_row("w", 3, 18, &mut part).unwrap();
    assert_eq!(part, data[126..144]);
}

#[test]
fn reads_outside_a_tensor_are_refused() {
    let bytes = GgufWriter::default().f32_tensor("w", &[2, 2], &[1.0; 4]).build();
    let file = on_disk(&bytes);
    let gguf = GgufFile::open(file.path()).unwrap();
    let weights = gguf.weights();
    let mut buffer = [0; 16];
    for (first, rows, bytes) in [(0, 3, 16), (2, 1, 8), (usize::MAX, 1, 8), (1, usize::MAX, 16), (0, 1, 16), (0, 2, 8)]
    {
        let error = weights.read_rows("w", first, rows, &mut buffer[..bytes]).unwrap_err();
        assert!(matches!(error.kind(), FormatErrorKind::InvalidRead { .. }), "{error}");
    }
    for (row, first_byte, bytes) in [(2, 0, 4), (1, 4, 8), (0, 0, 9), (usize::MAX, 0, 8), (1, usize::MAX, 8)] {
        let error = weights.read_in_row("w", row, first_byte, &mut buffer[..bytes]).unwrap_err();
        assert!(matches!(error.kind(), FormatErrorKind::InvalidRead { .. }), "{error}");
    }
    assert!(matches!(weights.read_all("w", &mut buffer[..4]).unwrap_err().kind(), FormatErrorKind::InvalidRead { .. }));
    let error = weights.read_all("absent", &mut buffer).unwrap_err();
    assert!(matches!(error.kind(), FormatErrorKind::MissingTensor { .. }), "{error}");
    assert_eq!(error.field(), Some("tensor 'absent'"));
}

#[test]
fn unsupported_types_are_listed_and_refused_by_name() {
    let bytes = GgufWriter::default().tensor("experts", 39, &[2, 32], vec![0; 34]).build();
    let file = on_disk(&bytes);
    let gguf = GgufFile::open(file.path()).unwrap();
    let tensor = &gguf.weights().tensors()[0];
    assert_eq!((tensor.stored_type().name(), tensor.num_bytes()), ("MXFP4", 34));
    let error = gguf.weights().read_all("experts", &mut [0; 34]).unwrap_err();
    assert!(error.to_string().contains("tensor 'experts': tensor type MXFP4 is not supported"), "{error}");
}

#[test]
fn type_ids_are_unique_and_round_trip() {
    for ty in TensorType::ALL {
        assert_eq!(StoredType::from_gguf_id(ty.gguf_id()), Some(StoredType::Loadable(ty)));
    }
    let names: Vec<_> = (0..64).filter_map(StoredType::from_gguf_id).map(StoredType::name).collect();
    let unique: std::collections::HashSet<_> = names.iter().collect();
    assert_eq!((names.len(), unique.len()), (39, 39));
    assert_eq!(StoredType::from_gguf_id(4), None);
}

#[test]
fn tokenizer_data_is_extracted() {
    let file = on_disk(&tokenizer_keys().build());
    let gguf = GgufFile::open(file.path()).unwrap();
    assert_eq!(gguf.architecture().unwrap(), "llama");
    let tokenizer = gguf.tokenizer().unwrap();
    assert_eq!((tokenizer.model, tokenizer.pre), ("gpt2", Some("smollm")));
    assert_eq!(tokenizer.tokens.iter().collect::<Vec<_>>(), ["<s>", "ä", "", "b c"]);
    assert_eq!(tokenizer.tokens.get(1), Some("ä"));
    assert_eq!(tokenizer.tokens.get(4), None);
    assert_eq!(tokenizer.scores, Some(&[0.0, -1.0, -2.0, -3.0][..]));
    assert_eq!(tokenizer.token_types, Some(vec![3, 1, 1, 1]));
    assert_eq!((tokenizer.bos_id, tokenizer.eos_id, tokenizer.padding_id), (Some(0), Some(3), None));
    assert_eq!((tokenizer.add_bos, tokenizer.add_eos), (Some(true), None));
    assert_eq!(tokenizer.chat_template, Some("{{ messages }}"));
    assert_eq!(tokenizer.named_templates[0].template, "{{ tools }}");
}

#[test]
fn inconsistent_tokenizers_are_refused() {
    let error_of = |writer: GgufWriter| {
        let file = on_disk(&writer.build());
        let gguf = GgufFile::open(file.path()).unwrap();
        gguf.tokenizer().unwrap_err()
    };
    let base = || GgufWriter::default().str("tokenizer.ggml.model", "llama");
    let two = || base().strings("tokenizer.ggml.tokens", &["a", "b"]);
    let cases = [
        (base(), "tokenizer.ggml.tokens"),
        (GgufWriter::default().strings("tokenizer.ggml.tokens", &["a"]), "tokenizer.ggml.model"),
        (two().f32s("tokenizer.ggml.scores", &[0.0]), "tokenizer.ggml.scores"),
        (two().i32s("tokenizer.ggml.token_type", &[1, 1, 1]), "tokenizer.ggml.token_type"),
        (two().u32("tokenizer.ggml.eos_token_id", 2), "tokenizer.ggml.eos_token_id"),
        (two().u32("tokenizer.ggml.add_bos_token", 1), "tokenizer.ggml.add_bos_token"),
        (two().strings("tokenizer.chat_templates", &["rag"]), "tokenizer.chat_template.rag"),
    ];
    for (writer, field) in cases {
        assert_eq!(error_of(writer).field(), Some(field));
    }
}

#[test]
fn many_threads_read_at_once() {
    let values: Vec<f32> = (0..4096).map(|value| value as f32).collect();
    let file = on_disk(&GgufWriter::default().f32_tensor("w", &[64, 64], &values).build());
    let gguf = GgufFile::open(file.path()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (gguf, values) = (&gguf, &values);
            scope.spawn(move || {
                for round in 0..50 {
                    let row = (thread * 7 + round) % 64;
                    let mut bytes = [0; 256];
                    gguf.weights().read_rows("w", row, 1, &mut bytes).unwrap();
                    let expected: Vec<u8> =
                        values[row * 64..][..64].iter().flat_map(|value| value.to_le_bytes()).collect();
                    assert_eq!(bytes, expected[..]);
                }
            });
        }
    });
}

#[test]
fn a_file_that_shrinks_after_opening_is_reported() {
    let mut file = on_disk(&GgufWriter::default().f32_tensor("w", &[64, 64], &[1.0; 4096]).build());
    let gguf = GgufFile::open(file.path()).unwrap();
    file.as_file_mut().set_len(1000).unwrap();
    let error = gguf.weights().read_all("w", &mut vec![0; 16_384]).unwrap_err();
    assert!(matches!(error.kind(), FormatErrorKind::FileShrank { .. }), "{error}");
    assert_eq!(error.field(), Some("tensor 'w'"));
}
