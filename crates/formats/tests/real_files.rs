//! Files that other tools wrote: the zoo's folders, and vocabulary files when the shared data is there.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use pagemill_formats::gguf::GgufFile;
use pagemill_formats::hf::RopeSettings;
use pagemill_formats::{Checkpoint, TensorType};

fn from_workspace(path: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    if !path.exists() {
        println!("skipped: {} is not there", path.display());
        return None;
    }
    Some(path)
}

#[test]
fn zoo_folders_open() {
    let expected = [
        ("llama", "llama", false),
        ("llama3-rope", "llama", false),
        ("llama-yarn", "llama", false),
        ("mistral-swa", "mistral", false),
        ("qwen2", "qwen2", false),
        ("qwen3", "qwen3", false),
        ("gemma3", "gemma3_text", true),
    ];
    for (name, model_type, by_layer_type) in expected {
        let Some(path) = from_workspace(&format!("crates/testkit/zoo/{name}")) else {
            continue;
        };
        let Checkpoint::HuggingFace(folder) = Checkpoint::open(&path).unwrap() else { panic!("{name}: not a folder") };
        assert_eq!(folder.config().model_type, model_type);
        assert_eq!(matches!(folder.config().rope, RopeSettings::PerLayerType(_)), by_layer_type);
        assert_eq!(folder.generation().eos_token_ids, [2]);
        let tokenizer = folder.tokenizer().unwrap();
        assert!(tokenizer.chat_template.is_some() && tokenizer.config.eos_token.as_deref() == Some("<|im_end|>"));
        let (embedding, _) = folder.weights().loadable("model.embed_tokens.weight").unwrap();
        assert_eq!(embedding.shape(), [512, 128]);
        let total: u64 = folder.weights().tensors().iter().map(|tensor| tensor.num_bytes()).sum();
        assert_eq!(total, folder.weights().total_bytes());
        for tensor in folder.weights().tensors() {
            assert!(matches!(tensor.tensor_type(), Some(TensorType::BF16 | TensorType::F32 | TensorType::F16)));
            let mut bytes = vec![0; usize::try_from(tensor.num_bytes()).unwrap()];
            folder.weights().read_all(tensor.name(), &mut bytes).unwrap();
            assert!(bytes.iter().any(|byte| *byte != 0), "{name}: {} is all zero", tensor.name());
        }
    }
}

#[test]
fn vocabulary_files_open() {
    let expected = [("gpt-2", "gpt2", 50_257, 11), ("phi-3", "llama", 32_064, 1)];
    for (name, model, vocab_size, bos_or_first) in expected {
        let Some(path) = from_workspace(&format!("../shared/data/tokenizers/{name}.vocab.gguf")) else {
            continue;
        };
        let gguf = GgufFile::open(&path).unwrap();
        let tokenizer = gguf.tokenizer().unwrap();
        assert_eq!((tokenizer.model, tokenizer.tokens.len()), (model, vocab_size));
        assert_eq!(tokenizer.token_types.map(|types| types.len()), Some(vocab_size));
        assert!(tokenizer.bos_id.is_none_or(|id| id == bos_or_first || id == 50_256));
        assert_eq!(gguf.weights().tensors().len(), 0);
    }
}
