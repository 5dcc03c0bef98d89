//! safetensors: reading, and malformed headers one by one.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::time::{Duration, Instant};

use pagemill_formats::safetensors;
use pagemill_formats::testing::{SafetensorsWriter, safetensors_image};
use pagemill_formats::{FormatError, FormatErrorKind as Kind, TensorType};

fn refuse(bytes: &[u8]) -> FormatError {
    let started = Instant::now();
    let error = safetensors::parse(bytes, bytes.len() as u64, Path::new("bad.safetensors")).unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(2), "{error}");
    assert_eq!(error.file(), Path::new("bad.safetensors"));
    error
}

/// Refuses a header over `data_bytes` bytes of data.
fn refuse_header(header: &str, data_bytes: usize) -> FormatError {
    refuse(&safetensors_image(header, &vec![0; data_bytes]))
}

macro_rules! assert_kind {
    ($error:expr, $pattern:pat, $field:expr) => {{
        let error = $error;
        assert!(matches!(error.kind(), $pattern), "{error}");
        assert_eq!(error.field(), Some($field), "{error}");
        assert!(error.offset().is_some(), "{error}");
    }};
}

fn sample() -> Vec<u8> {
    SafetensorsWriter::default()
        .f32_tensor("norm", &[2], &[1.0, 2.0])
        .tensor("w", "BF16", &[2, 3], &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
        .tensor("ids", "I64", &[], &[7; 8])
        .tensor("empty", "F16", &[0, 4], &[])
        .build()
}

#[test]
fn tensors_are_listed_and_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, sample()).unwrap();
    let weights = safetensors::open(&path).unwrap();
    let (tensor, ty) = weights.loadable("w").unwrap();
    assert_eq!((ty, tensor.shape(), tensor.row_bytes(), tensor.num_rows()), (TensorType::BF16, &[2, 3][..], 6, 2));
    let mut row = [0; 6];
    weights.read_rows("w", 1, 1, &mut row).unwrap();
    assert_eq!(row, [7, 8, 9, 10, 11, 12]);
    let ids = weights.get("ids").unwrap();
    assert_eq!((ids.num_rows(), ids.num_cols(), ids.row_bytes()), (1, 1, 8));
    assert_kind_of_read(weights.read_all("ids", &mut [0; 8]).unwrap_err());
    weights.read_all("empty", &mut []).unwrap();
    assert_eq!(weights.total_bytes(), 8 + 12 + 8);
}

fn assert_kind_of_read(error: FormatError) {
    assert!(error.to_string().contains("tensor 'ids': tensor type I64 is not supported"), "{error}");
}

#[test]
fn metadata_and_padding_are_accepted() {
    let header =
        r#"{"__metadata__":{"format":"pt","n":"\"}"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}     "#;
    let bytes = safetensors_image(header, &[0; 4]);
    let table = safetensors::parse(&*bytes, bytes.len() as u64, Path::new("good")).unwrap();
    assert_eq!(table.as_slice().len(), 1);
    let escaped = header.replace(r#""a""#, r#""\u0061\"""#);
    let bytes = safetensors_image(&escaped, &[0; 4]);
    let table = safetensors::parse(&*bytes, bytes.len() as u64, Path::new("good")).unwrap();
    assert!(table.get("a\"").is_some());
}

#[test]
fn truncation_at_every_byte() {
    let bytes = sample();
    for len in 0..bytes.len() {
        let error = refuse(&bytes[..len]);
        assert!(matches!(error.kind(), Kind::Truncated { .. } | Kind::TensorBeyondEnd { .. }), "{len}: {error}");
    }
}

#[test]
fn a_reader_shorter_than_its_length_is_an_error_too() {
    let bytes = sample();
    let header_bytes = 8 + usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    for len in 0..header_bytes {
        safetensors::parse(&bytes[..len], bytes.len() as u64, Path::new("bad")).unwrap_err();
    }
}

#[test]
fn header_lengths() {
    for length in [1u64 << 63, u64::MAX, (1 << 63) - 1, 1 << 40, 10_000] {
        let mut bytes = sample();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        assert_kind!(refuse(&bytes), Kind::Truncated { .. }, "header length");
    }
    let huge = 100_000_001u64;
    let reader = std::io::Read::chain(std::io::Cursor::new(huge.to_le_bytes()), std::io::repeat(b' '));
    let error = safetensors::parse(reader, huge + 8, Path::new("bad")).unwrap_err();
    assert_kind!(error, Kind::LimitExceeded { .. }, "header length");
    for length in [0u64, 1, 5] {
        let mut bytes = sample();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        assert_kind!(refuse(&bytes), Kind::Json { .. } | Kind::Hole { .. }, "header");
    }
}

#[test]
fn headers_that_are_no_object_of_tensors() {
    let cases = [
        "",
        "[]",
        "7",
        "null",
        "\"x\"",
        "{",
        "{}x",
        "{}{}",
        "{\"a\":7}",
        "{\"a\":null}",
        "{\"a\":{}}",
        r#"{"a":{"dtype":"F32","shape":[1]}}"#,
        r#"{"a":{"dtype":"F32","data_offsets":[0,4]}}"#,
        r#"{"a":{"shape":[1],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"extra":1}}"#,
        r#"{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":1,"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[-1,3]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551616]}}"#,
        r#"{"a":{"dtype":32,"shape":[1],"data_offsets":[0,4]}}"#,
    ];
    for header in cases {
        let error = refuse_header(header, 4);
        assert!(matches!(error.kind(), Kind::Json { .. }), "{header}: {error}");
        assert_eq!(error.field(), Some("header"));
    }
}

#[test]
fn invalid_utf8_in_a_name() {
    let mut bytes = safetensors_image(r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#, &[0; 4]);
    bytes[10] = 0xff;
    assert_kind!(refuse(&bytes), Kind::Json { .. }, "header");
    let header = r#"{"\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    assert_kind!(refuse_header(header, 4), Kind::Json { .. }, "header");
}

#[test]
fn duplicates() {
    let header = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
    assert_kind!(refuse_header(header, 8), Kind::DuplicateTensor { .. }, "tensor 'a'");
    let header = r#"{"__metadata__":{},"__metadata__":{}}"#;
    assert_kind!(refuse_header(header, 0), Kind::DuplicateKey, "tensor '__metadata__'");
}

#[test]
fn dtypes_of_unknown_size() {
    let header = r#"{"a":{"dtype":"F3","shape":[1],"data_offsets":[0,4]}}"#;
    let error = refuse_header(header, 4);
    assert!(error.to_string().contains("tensor 'a': unknown tensor type F3"), "{error}");
    for dtype in ["Q4_0", "IQ4_NL", "f32", ""] {
        let header = header.replace("F3", dtype);
        assert_kind!(refuse_header(&header, 4), Kind::UnknownTensorType { .. }, "tensor 'a'");
    }
}

#[test]
fn byte_ranges() {
    let one = |shape: &str, begin: u64, end: u64| {
        format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[{begin},{end}]}}}}"#)
    };
    assert_kind!(refuse_header(&one("[2]", 0, 4), 4), Kind::ByteRangeMismatch { .. }, "tensor 'a'");
    assert_kind!(refuse_header(&one("[]", 0, 8), 8), Kind::ByteRangeMismatch { .. }, "tensor 'a'");
    assert_kind!(refuse_header(&one("[0]", 0, 4), 4), Kind::ByteRangeMismatch { .. }, "tensor 'a'");
    assert_kind!(refuse_header(&one("[1]", 8, 4), 8), Kind::Invalid { .. }, "tensor 'a'");
    assert_kind!(refuse_header(&one("[1]", 4, 8), 4), Kind::TensorBeyondEnd { .. }, "tensor 'a'");
    let far = u64::MAX - 4;
    assert_kind!(refuse_header(&one("[1]", far, u64::MAX), 4), Kind::TensorBeyondEnd { .. }, "tensor 'a'");
    for shape in
        ["[9223372036854775808]", "[18446744073709551615]", "[4294967296,4294967296]", "[0,4294967296,4294967296]"]
    {
        let error = refuse_header(&one(shape, 0, 4), 4);
        assert!(matches!(error.kind(), Kind::InvalidShape { .. }), "{error}");
    }
}

#[test]
fn overlaps_and_holes() {
    let two = |first: (u64, u64), second: (u64, u64)| {
        format!(
            r#"{{"a":{{"dtype":"U8","shape":[{}],"data_offsets":[{},{}]}},"b":{{"dtype":"U8","shape":[{}],"data_offsets":[{},{}]}}}}"#,
            first.1 - first.0,
            first.0,
            first.1,
            second.1 - second.0,
            second.0,
            second.1
        )
    };
    let good = safetensors_image(&two((4, 8), (0, 4)), &[0; 8]);
    safetensors::parse(&*good, good.len() as u64, Path::new("good")).unwrap();
    assert_kind!(refuse_header(&two((0, 8), (4, 8)), 8), Kind::OverlappingTensor { .. }, "tensor 'b'");
    assert_kind!(refuse_header(&two((0, 8), (0, 8)), 8), Kind::OverlappingTensor { .. }, "tensor 'b'");
    assert_kind!(refuse_header(&two((0, 4), (5, 8)), 8), Kind::Hole { begin: 4, end: 5 }, "tensor 'b'");
    assert_kind!(refuse_header(&two((1, 4), (4, 8)), 8), Kind::Hole { begin: 0, end: 1 }, "tensor 'a'");
    let error = refuse_header(&two((0, 4), (4, 8)), 9);
    assert!(matches!(error.kind(), Kind::Hole { begin: 8, end: 9 }), "{error}");
}

#[test]
fn deep_nesting_does_not_overflow_the_stack() {
    let deep = format!("{}{}", "[".repeat(1_000_000), "]".repeat(1_000_000));
    for header in [deep.clone(), format!(r#"{{"__metadata__":{deep}}}"#), format!(r#"{{"a":{deep}}}"#)] {
        let error = refuse_header(&header, 0);
        assert!(matches!(error.kind(), Kind::Json { .. }), "{error}");
    }
}

#[test]
fn too_many_tensors() {
    let entries: Vec<String> =
        (0..131_073).map(|idx| format!(r#""{idx}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#)).collect();
    let error = refuse_header(&format!("{{{}}}", entries.join(",")), 0);
    assert_kind!(error, Kind::LimitExceeded { .. }, "tensor '131072'");
}

#[test]
fn strings_without_end_are_cut_off() {
    for string in ["x".repeat(1 << 21), "\\\"".repeat(1 << 20), "\\\\\\\"".repeat(1 << 19)] {
        let error = refuse_header(&format!(r#"{{"{string}":0}}"#), 0);
        assert!(matches!(error.kind(), Kind::Json { .. }) && error.to_string().contains("1 MiB"), "{error}");
    }
    let error = refuse_header(
        &format!(r#"{{"{}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#, "x".repeat(65_536)),
        4,
    );
    assert!(matches!(error.kind(), Kind::Json { .. }), "{error}");
}
