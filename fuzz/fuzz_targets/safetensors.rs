//! A safetensors header of any bytes gives a table or an error; what is accepted covers its data exactly.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use pagemill_formats::safetensors;

fuzz_target!(|bytes: &[u8]| {
    let table = match safetensors::parse(bytes, bytes.len() as u64, Path::new("fuzz")) {
        Ok(table) => table,
        Err(error) => {
            assert!(error.to_string().starts_with("fuzz: "));
            return;
        }
    };
    let mut total = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("the parser read them"));
    for tensor in table.as_slice() {
        assert!(table.get(tensor.name()).is_some());
        total += tensor.num_bytes();
    }
    assert_eq!(total, bytes.len() as u64);
});
