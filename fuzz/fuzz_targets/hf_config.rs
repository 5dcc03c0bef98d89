//! The JSON members of a model folder: any bytes give a value or an error.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use pagemill_formats::hf::{GenerationConfig, HfConfig, TokenizerConfig};
use pagemill_formats::safetensors::ShardIndex;

fuzz_target!(|bytes: &[u8]| {
    let file = Path::new("fuzz");
    if let Ok(config) = HfConfig::parse(bytes, file) {
        for (key, _) in config.unknown_fields(&[]) {
            let _ = config.fields().get_usize(key);
            let _ = config.fields().get_f64(key);
            let _ = config.fields().get_token_ids(key);
            let _ = config.fields().get_object(key);
        }
    }
    let _ = GenerationConfig::parse(bytes, file);
    let _ = TokenizerConfig::parse(bytes, file);
    if let Ok(index) = ShardIndex::parse(bytes, file) {
        assert!(
            index
                .tensors()
                .all(|(_, shard_idx)| index.shards().get(shard_idx as usize).is_some())
        );
        assert!(index.shards().iter().all(|shard| !shard.contains('/')));
    }
});
