//! What several test files need: where data lies, and a reader for the metadata of GGUF files that trusts them.

#![allow(dead_code, clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use pagemill_text::{GgufVocabulary, HfTokenizerOptions, Tokenizer};
use serde_json::Value;

/// A file of the shared test data, or `None` (said on stderr) where that folder is not there.
pub fn shared(path: &str) -> Option<PathBuf> {
    present(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared").join(path))
}

/// A real model's file, from the folder that `PAGEMILL_TEST_MODELS` names.
pub fn model(name: &str) -> Option<PathBuf> {
    match std::env::var_os("PAGEMILL_TEST_MODELS") {
        Some(folder) => present(Path::new(&folder).join(name)),
        None => {
            eprintln!("SKIPPED {name}: PAGEMILL_TEST_MODELS is not set");
            None
        }
    }
}

fn present(path: PathBuf) -> Option<PathBuf> {
    if path.exists() {
        return Some(path);
    }
    eprintln!("SKIPPED {}: not there", path.display());
    None
}

pub fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

pub fn json_lines(path: &Path) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

/// The tokenizer of a zoo model, from its Hugging Face files.
pub fn zoo(name: &str) -> (PathBuf, Tokenizer) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/zoo").join(name);
    let config = json(&folder.join("tokenizer_config.json"));
    let text = |name: &str| config[name].as_str().map(str::to_owned);
    let options = HfTokenizerOptions {
        bos_token: text("bos_token"),
        eos_token: text("eos_token"),
        unk_token: text("unk_token"),
        pad_token: text("pad_token"),
        ..HfTokenizerOptions::default()
    };
    let tokenizer = Tokenizer::from_hf(&std::fs::read(folder.join("tokenizer.json")).unwrap(), &options).unwrap();
    (folder, tokenizer)
}

/// The vocabulary of one of the vocabulary-only files (`gpt-2`, `phi-3`, `qwen2`).
pub fn vocabulary(name: &str) -> Option<GgufVocabulary> {
    if name == "qwen2" {
        let path = shared("data/tokenizers/qwen2.vocab.gguf.gz")?;
        let Ok(unpacked) = std::process::Command::new("gzip").arg("-dc").arg(path).output() else {
            eprintln!("SKIPPED {name}: no gzip here");
            return None;
        };
        return Some(gguf_vocabulary(&unpacked.stdout));
    }
    let path = shared(&format!("data/tokenizers/{name}.vocab.gguf"))?;
    Some(gguf_vocabulary(&std::fs::read(path).unwrap()))
}

pub fn model_vocabulary(name: &str) -> Option<GgufVocabulary> {
    let path = model(name)?;
    // Metadata stands in front; tensors, which are most of the file, are not read.
    let mut start = vec![0; 32 << 20];
    let mut file = std::fs::File::open(path).unwrap();
    let mut len = 0;
    while let Ok(read @ 1..) = std::io::Read::read(&mut file, &mut start[len..]) {
        len += read;
    }
    Some(gguf_vocabulary(&start[..len]))
}

#[derive(Debug)]
enum Field {
    Text(String),
    Texts(Vec<String>),
    Numbers(Vec<f64>),
}

pub fn gguf_vocabulary(bytes: &[u8]) -> GgufVocabulary {
    let fields = gguf_fields(bytes);
    let name = |key: &str| format!("tokenizer.ggml.{key}");
    let text = |key: &str| {
        if let Some(Field::Text(text)) = fields.get(&name(key)) { Some(text.clone()) } else { None }
    };
    let texts = |key: &str| {
        if let Some(Field::Texts(t)) = fields.get(&name(key)) { t.clone() } else { Vec::new() }
    };
    let numbers = |key: &str| {
        if let Some(Field::Numbers(n)) = fields.get(&name(key)) { n.clone() } else { Vec::new() }
    };
    let id = |key: &str| numbers(key).first().map(|id| *id as u32);
    let flag = |key: &str| numbers(key).first().map(|flag| *flag != 0.0);
    GgufVocabulary {
        model: text("model").unwrap(),
        pre: text("pre"),
        tokens: texts("tokens"),
        scores: numbers("scores").iter().map(|score| *score as f32).collect(),
        token_types: numbers("token_type").iter().map(|kind| *kind as i32).collect(),
        merges: texts("merges"),
        bos: id("bos_token_id"),
        eos: id("eos_token_id"),
        eot: id("eot_token_id"),
        eom: id("eom_token_id"),
        unknown: id("unknown_token_id"),
        pad: id("padding_token_id"),
        add_bos: flag("add_bos_token"),
        add_eos: flag("add_eos_token"),
        add_space_prefix: flag("add_space_prefix"),
    }
}

/// The `tokenizer.chat_template` of a GGUF file.
pub fn gguf_chat_template(name: &str) -> Option<String> {
    let bytes = std::fs::read(model(name)?).unwrap();
    match gguf_fields(&bytes).remove("tokenizer.chat_template") {
        Some(Field::Text(text)) => Some(text),
        _ => None,
    }
}

fn gguf_fields(bytes: &[u8]) -> HashMap<String, Field> {
    let mut at = 16;
    let count = u64_at(bytes, &mut at);
    (0..count)
        .map(|_| {
            let key = text_at(bytes, &mut at);
            let kind = u32_at(bytes, &mut at);
            (key, field_at(bytes, &mut at, kind))
        })
        .collect()
}

fn field_at(bytes: &[u8], at: &mut usize, kind: u32) -> Field {
    match kind {
        8 => Field::Text(text_at(bytes, at)),
        9 => {
            let kind = u32_at(bytes, at);
            let len = u64_at(bytes, at);
            match kind {
                8 => Field::Texts((0..len).map(|_| text_at(bytes, at)).collect()),
                _ => Field::Numbers((0..len).map(|_| number_at(bytes, at, kind)).collect()),
            }
        }
        kind => Field::Numbers(vec![number_at(bytes, at, kind)]),
    }
}

fn take<const N: usize>(bytes: &[u8], at: &mut usize) -> [u8; N] {
    *at += N;
    bytes[*at - N..*at].try_into().unwrap()
}

fn u32_at(bytes: &[u8], at: &mut usize) -> u32 {
    u32::from_le_bytes(take(bytes, at))
}

fn u64_at(bytes: &[u8], at: &mut usize) -> u64 {
    u64::from_le_bytes(take(bytes, at))
}

fn text_at(bytes: &[u8], at: &mut usize) -> String {
    let len = usize::try_from(u64_at(bytes, at)).unwrap();
    *at += len;
    String::from_utf8_lossy(&bytes[*at - len..*at]).into_owned()
}

fn number_at(bytes: &[u8], at: &mut usize, kind: u32) -> f64 {
    match kind {
        0 | 7 => take::<1>(bytes, at)[0].into(),
        1 => i8::from_le_bytes(take(bytes, at)).into(),
        2 => u16::from_le_bytes(take(bytes, at)).into(),
        3 => i16::from_le_bytes(take(bytes, at)).into(),
        4 => u32_at(bytes, at).into(),
        5 => i32::from_le_bytes(take(bytes, at)).into(),
        6 => f32::from_le_bytes(take(bytes, at)).into(),
        10 => u64_at(bytes, at) as f64,
        11 => i64::from_le_bytes(take(bytes, at)) as f64,
        12 => f64::from_le_bytes(take(bytes, at)),
        other => panic!("GGUF type {other}"),
    }
}
