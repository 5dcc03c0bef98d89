//! A GGUF header of any bytes gives a header or an error; what is accepted can be used in every way.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use pagemill_formats::gguf;

fuzz_target!(|bytes: &[u8]| {
    let header = match gguf::parse(bytes, bytes.len() as u64, Path::new("fuzz")) {
        Ok(header) => header,
        Err(error) => {
            assert!(error.to_string().starts_with("fuzz: "));
            return;
        }
    };
    for (key, value) in header.metadata.iter() {
        assert_eq!(
            header.metadata.get(key).map(ToString::to_string),
            Some(value.to_string())
        );
        let _ = header.metadata.get_u32_per_layer(key, 2);
        let _ = header.metadata.get_i32s(key);
        if let Ok(Some(strings)) = header.metadata.get_strings(key) {
            assert!((0..strings.len()).all(|idx| strings.get(idx).is_some()));
        }
    }
    let _ = header.tokenizer();
    let mut total = 0;
    for tensor in header.tensors.as_slice() {
        assert!(header.tensors.get(tensor.name()).is_some());
        assert_eq!(tensor.row_bytes() * tensor.num_rows() as u64, tensor.num_bytes());
        total += tensor.num_bytes();
    }
    assert!(total <= bytes.len() as u64);
});
