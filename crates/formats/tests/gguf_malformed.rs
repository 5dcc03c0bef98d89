//! Malformed GGUF headers, one by one: each gives its own typed error at the right place, and costs nothing.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::time::{Duration, Instant};

use pagemill_formats::gguf;
use pagemill_formats::testing::{GgufWriter, Image};
use pagemill_formats::{FormatError, FormatErrorKind as Kind};

const HUGE: [u64; 4] = [1 << 63, u64::MAX, (1 << 63) - 1, 1 << 40];

/// Parses what must not parse, in well under a second.
fn refuse(bytes: &[u8]) -> FormatError {
    let started = Instant::now();
    let error = gguf::parse(bytes, bytes.len() as u64, Path::new("bad.gguf")).unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(1), "{error}");
    assert_eq!(error.file(), Path::new("bad.gguf"));
    error
}

macro_rules! assert_refused {
    ($bytes:expr, $pattern:pat, field: $field:expr, at: $offset:expr) => {{
        let error = refuse(&$bytes);
        assert!(matches!(error.kind(), $pattern), "{error}");
        assert_eq!(error.field(), $field, "{error}");
        assert_eq!(error.offset(), Some($offset as u64), "{error}");
    }};
}

fn sample() -> Image {
    GgufWriter::default()
        .alignment(32)
        .str("general.architecture", "llama")
        .bool("flag", true)
        .strings("tokens", &["a", "bc"])
        .f32s("scores", &[1.0, 2.0])
        .array("bools", 7, 2, vec![0, 1])
        .f32_tensor("first", &[2, 4], &[1.0; 8])
        .f32_tensor("second", &[8], &[2.0; 8])
        .image()
}

#[test]
fn the_sample_itself_is_well_formed() {
    let bytes = sample().bytes;
    gguf::parse(&*bytes, bytes.len() as u64, Path::new("good.gguf")).unwrap();
}

#[test]
fn truncation_at_every_byte() {
    let bytes = sample().bytes;
    for len in 0..bytes.len() {
        let error = refuse(&bytes[..len]);
        assert!(matches!(error.kind(), Kind::Truncated { .. } | Kind::TensorBeyondEnd { .. }), "{len}: {error}");
        assert!(error.offset().unwrap() <= len as u64, "{len}: {error}");
    }
}

#[test]
fn a_reader_shorter_than_its_length_is_an_error_too() {
    let bytes = sample().bytes;
    for len in 0..sample().offset("first/data") - 32 {
        let error = gguf::parse(&bytes[..len], bytes.len() as u64, Path::new("bad.gguf")).unwrap_err();
        assert!(matches!(error.kind(), Kind::FileShrank { .. }), "{len}: {error}");
    }
}

#[test]
fn truncated_data_names_the_tensor_and_the_sizes() {
    let image = sample();
    let error = refuse(&image.bytes[..image.bytes.len() - 1]);
    assert_eq!(error.field(), Some("tensor 'second'"));
    let (begin, end) = (image.offset("second/data"), image.bytes.len());
    let expected = format!("bytes {begin}..{end} but the file ends at {}", end - 1);
    assert!(error.to_string().contains(&expected), "{error}");
}

#[test]
fn wrong_magic() {
    for (magic, hint) in [
        (b"GGML", ""),
        (b"\0\0\0\0", ""),
        (b"ggjt", ""),
        (b"tjgg", "before GGUF"),
        (b"FUGG", "big-endian"),
        (b"PK\x03\x04", "PyTorch"),
        (b"vers", "LFS"),
        (b"<!DO", "web page"),
    ] {
        let mut bytes = sample().bytes;
        bytes[..4].copy_from_slice(magic);
        let error = refuse(&bytes);
        assert!(matches!(error.kind(), Kind::WrongMagic { .. }) && error.to_string().contains(hint), "{error}");
    }
}

#[test]
fn versions_that_are_not_read() {
    for version in [0u32, 1, 4, 100, u32::MAX] {
        let bytes = sample().with("version", 0, &version.to_le_bytes());
        assert_refused!(bytes, Kind::UnsupportedVersion { .. }, field: Some("version"), at: 4);
    }
    for version in [1u32, 2, 3] {
        let bytes = sample().with("version", 0, &version.to_be_bytes());
        assert_refused!(bytes, Kind::BigEndian, field: Some("version"), at: 4);
    }
}

#[test]
fn counts_beyond_reason() {
    for count in HUGE {
        let bytes = sample().with("n_tensors", 0, &count.to_le_bytes());
        assert_refused!(bytes, Kind::LimitExceeded { .. }, field: Some("number of tensors"), at: 8);
        let bytes = sample().with("n_kv", 0, &count.to_le_bytes());
        assert_refused!(bytes, Kind::LimitExceeded { .. }, field: Some("number of metadata keys"), at: 16);
    }
    // Within the limits, but more than the bytes can hold.
    let bytes = sample().with("n_tensors", 0, &60_000u64.to_le_bytes());
    assert_refused!(bytes, Kind::Truncated { .. }, field: Some("number of tensors"), at: 8);
    let bytes = sample().with("n_kv", 0, &16_000u64.to_le_bytes());
    assert_refused!(bytes, Kind::Truncated { .. }, field: Some("number of metadata keys"), at: 16);
}

#[test]
fn one_entry_too_many_or_too_few() {
    for (mark, count) in [("n_kv", 5u64), ("n_kv", 7), ("n_tensors", 3)] {
        refuse(&sample().with(mark, 0, &count.to_le_bytes()));
    }
}

#[test]
fn string_lengths() {
    let image = sample();
    for length in HUGE {
        let length = length.to_le_bytes();
        let at = image.offset("flag/len");
        assert_refused!(image.with("flag/len", 0, &length), Kind::Truncated { .. },
            field: Some("metadata key after 'general.architecture'"), at: at);
        let at = image.offset("general.architecture/value");
        assert_refused!(image.with("general.architecture/value", 0, &length), Kind::Truncated { .. },
            field: Some("general.architecture"), at: at);
        let at = image.offset("tokens/value") + 12;
        assert_refused!(image.with("tokens/value", 12, &length), Kind::Truncated { .. },
            field: Some("tokens"), at: at);
        let at = image.offset("second/len");
        assert_refused!(image.with("second/len", 0, &length), Kind::Truncated { .. },
            field: Some("tensor name after 'first'"), at: at);
    }
}

#[test]
fn names_that_are_too_long_or_empty() {
    let long = "k".repeat(65_536);
    let error = refuse(&GgufWriter::default().u32(&long, 1).build());
    assert!(matches!(error.kind(), Kind::LimitExceeded { .. }), "{error}");
    let error = refuse(&GgufWriter::default().f32_tensor(&long, &[1], &[0.0]).build());
    assert!(matches!(error.kind(), Kind::LimitExceeded { .. }), "{error}");
    for image in [GgufWriter::default().u32("", 1), GgufWriter::default().f32_tensor("", &[8], &[0.0; 8])] {
        assert!(matches!(refuse(&image.build()).kind(), Kind::Invalid { .. }));
    }
}

#[test]
fn array_lengths() {
    for array in ["tokens", "scores", "bools"] {
        for length in HUGE {
            let bytes = sample().with(&format!("{array}/value"), 4, &length.to_le_bytes());
            let error = refuse(&bytes);
            assert!(matches!(error.kind(), Kind::Truncated { .. }), "{error}");
            assert_eq!(error.field(), Some(array));
        }
    }
}

#[test]
fn value_types() {
    let image = sample();
    for type_id in [13u32, 255, u32::MAX] {
        let id = type_id.to_le_bytes();
        let at = image.offset("flag/type");
        assert_refused!(image.with("flag/type", 0, &id), Kind::UnknownValueType { .. }, field: Some("flag"), at: at);
        let at = image.offset("scores/value");
        assert_refused!(image.with("scores/value", 0, &id), Kind::UnknownValueType { .. },
            field: Some("scores"), at: at);
    }
    let at = image.offset("flag/value");
    assert_refused!(image.with("flag/value", 0, &[2]), Kind::InvalidBool { found: 2 }, field: Some("flag"), at: at);
    let at = image.offset("bools/value") + 13;
    assert_refused!(image.with("bools/value", 13, &[255]), Kind::InvalidBool { found: 255 },
        field: Some("bools"), at: at);
}

#[test]
fn nested_arrays_are_refused_at_any_depth() {
    let mut items = Vec::new();
    for _ in 0..100_000 {
        items.extend(9u32.to_le_bytes());
        items.extend(1u64.to_le_bytes());
    }
    let bytes = GgufWriter::default().array("bomb", 9, 1, items).build();
    assert_refused!(bytes, Kind::NestedArray, field: Some("bomb"), at: 24 + 12 + 4);
}

#[test]
fn invalid_utf8() {
    let image = sample();
    let at = image.offset("flag/len") + 9;
    assert_refused!(image.with("flag/len", 9, &[0xff]), Kind::InvalidUtf8 { .. },
        field: Some("metadata key after 'general.architecture'"), at: at);
    let at = image.offset("general.architecture/value") + 8;
    assert_refused!(image.with("general.architecture/value", 8, &[0x80]), Kind::InvalidUtf8 { .. },
        field: Some("general.architecture"), at: at);
    let at = image.offset("second/len") + 8;
    assert_refused!(image.with("second/len", 8, &[0xc0]), Kind::InvalidUtf8 { .. },
        field: Some("tensor name after 'first'"), at: at);
    // A character must not span two strings of an array: "a" + "bc" becomes C3 + A4 63.
    let mut bytes = image.with("tokens/value", 20, &[0xc3]);
    bytes[image.offset("tokens/value") + 29] = 0xa4;
    let at = image.offset("tokens/value") + 20;
    assert_refused!(bytes, Kind::InvalidUtf8 { .. }, field: Some("tokens"), at: at);
}

#[test]
fn duplicates() {
    let image = GgufWriter::default().u32("key", 1).u32("other", 2).u32("key", 3).image();
    let second = image.offset("key/len");
    assert_refused!(image.bytes, Kind::DuplicateKey, field: Some("key"), at: second);
    let image = GgufWriter::default()
        .f32_tensor("w", &[8], &[0.0; 8])
        .f32_tensor("v", &[8], &[0.0; 8])
        .f32_tensor("w", &[8], &[0.0; 8])
        .image();
    let second = image.offset("w/len");
    assert_refused!(image.bytes, Kind::DuplicateTensor { .. }, field: Some("tensor 'w'"), at: second);
}

#[test]
fn dimensions() {
    let image = sample();
    let at = image.offset("first/n_dims");
    for num_dims in [0u32, 5, 1 << 31, u32::MAX] {
        let bytes = image.with("first/n_dims", 0, &num_dims.to_le_bytes());
        assert_refused!(bytes, Kind::InvalidShape { .. }, field: Some("tensor 'first'"), at: at);
    }
    let bytes = image.with("first/dim1", 0, &0u64.to_le_bytes());
    assert_refused!(bytes, Kind::InvalidShape { .. }, field: Some("tensor 'first'"), at: image.offset("first/dim1"));
    for dim in HUGE {
        let error = refuse(&image.with("first/dim0", 0, &dim.to_le_bytes()));
        assert!(matches!(error.kind(), Kind::InvalidShape { .. } | Kind::TensorBeyondEnd { .. }), "{error}");
        assert_eq!(error.field(), Some("tensor 'first'"));
    }
    // The product wraps to zero; then the element count fits and the bytes overflow.
    for dims in [[1u64 << 32, 1 << 32], [1 << 31, 1 << 32]] {
        let mut bytes = image.with("first/dim0", 0, &dims[0].to_le_bytes());
        let dim1 = image.offset("first/dim1");
        bytes[dim1..dim1 + 8].copy_from_slice(&dims[1].to_le_bytes());
        assert_refused!(bytes, Kind::InvalidShape { .. }, field: Some("tensor 'first'"), at: at);
    }
}

#[test]
fn tensor_types() {
    let image = sample();
    for type_id in [4u32, 5, 42, 1 << 31, u32::MAX] {
        let bytes = image.with("first/type", 0, &type_id.to_le_bytes());
        assert_refused!(bytes, Kind::UnknownTensorType { .. }, field: Some("tensor 'first'"), at: image.offset("first/type"));
    }
    // Rows of 4 elements are no whole Q4_0 block.
    let bytes = image.with("first/type", 0, &2u32.to_le_bytes());
    assert_refused!(bytes, Kind::InvalidShape { .. }, field: Some("tensor 'first'"), at: image.offset("first/n_dims"));
}

#[test]
fn tensor_offsets() {
    let image = sample();
    let at = image.offset("second/len");
    let second = Some("tensor 'second'");
    for offset in [1u64, 31, 33, u64::MAX] {
        let bytes = image.with("second/offset", 0, &offset.to_le_bytes());
        assert_refused!(bytes, Kind::MisalignedTensor { .. }, field: second, at: at);
    }
    for offset in [64u64, 1 << 32, 1 << 63, u64::MAX - 31] {
        let bytes = image.with("second/offset", 0, &offset.to_le_bytes());
        assert_refused!(bytes, Kind::TensorBeyondEnd { .. }, field: second, at: at);
    }
    let bytes = image.with("second/offset", 0, &0u64.to_le_bytes());
    assert_refused!(bytes, Kind::OverlappingTensor { .. }, field: second, at: at);
    // Overlap by the last block only, with the later tensor first in the file.
    let image =
        GgufWriter::default().f32_tensor("late", &[8], &[0.0; 8]).f32_tensor("early", &[16], &[0.0; 16]).image();
    let mut bytes = image.with("late/offset", 0, &32u64.to_le_bytes());
    let early = image.offset("early/offset");
    bytes[early..early + 8].copy_from_slice(&0u64.to_le_bytes());
    assert_refused!(bytes, Kind::OverlappingTensor { .. }, field: Some("tensor 'late'"), at: image.offset("late/len"));
}

#[test]
fn alignments() {
    let image = sample();
    for alignment in [0u32, 1, 3, 4, 33, 1 << 17, 1 << 31, u32::MAX] {
        let bytes = image.with("general.alignment/value", 0, &alignment.to_le_bytes());
        assert_refused!(bytes, Kind::InvalidAlignment { .. }, field: Some("general.alignment"), at: 24);
    }
    let error = refuse(&GgufWriter::default().str("general.alignment", "32").build());
    assert!(matches!(error.kind(), Kind::WrongType { .. }), "{error}");
}

#[test]
fn parts_of_a_split_model() {
    let bytes = GgufWriter::default().u32("split.no", 1).u32("split.count", 3).build();
    let error = refuse(&bytes);
    assert!(matches!(error.kind(), Kind::SplitGguf { part: 2, count: 3 }), "{error}");
    assert!(error.to_string().contains("part 2 of a GGUF model split into 3 files"), "{error}");
    let bytes = GgufWriter::default().u32("split.no", 0).u32("split.count", 1).build();
    gguf::parse(&*bytes, bytes.len() as u64, Path::new("good.gguf")).unwrap();
}

#[test]
fn control_characters_from_a_file_do_not_reach_the_terminal() {
    let bytes = GgufWriter::default().raw("\x1b[2J\n", 77, vec![0; 8]).build();
    let text = refuse(&bytes).to_string();
    assert!(!text.contains('\x1b') && !text.contains('\n'), "{text}");
    let bytes = GgufWriter::default().raw(&"x".repeat(5000), 77, vec![0; 8]).build();
    assert!(refuse(&bytes).to_string().len() < 400);
}
