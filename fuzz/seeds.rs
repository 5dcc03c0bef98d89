//! Writes well-formed files into `corpus/<target>`, for the fuzzer to start from.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use pagemill_formats::testing::{GgufWriter, SafetensorsWriter};
use pagemill_mpi::frame::{Counters, Frame, Gpu, Hello};

const CONFIGS: [&str; 4] = [
    r#"{"model_type":"llama","architectures":["A"],"torch_dtype":"float16","eos_token_id":[1,2],"rope_theta":1e4,
        "rope_scaling":{"rope_type":"llama3","factor":8.0}}"#,
    r#"{"model_type":"gemma3","text_config":{"model_type":"gemma3_text","rope_parameters":{"full_attention":
        {"rope_theta":1e6,"rope_type":"default"},"sliding_attention":{"rope_theta":1e4}}},"eos_token_id":1}"#,
    r#"{"bos_token":{"content":"<s>"},"eos_token":"</s>","chat_template":[{"name":"default","template":"t"}],
        "model_max_length":1000000000000000019884624838656,"add_bos_token":true}"#,
    r#"{"metadata":{"total_size":8},"weight_map":{"a":"one.safetensors","b":"two.safetensors"}}"#,
];

fn main() -> io::Result<()> {
    let gguf = GgufWriter::default()
        .str("general.architecture", "llama")
        .str("tokenizer.ggml.model", "gpt2")
        .strings("tokenizer.ggml.tokens", &["a", "bc", "ä"])
        .f32s("tokenizer.ggml.scores", &[1.0, 2.0, 3.0])
        .i32s("tokenizer.ggml.token_type", &[1, 1, 1])
        .u32("tokenizer.ggml.eos_token_id", 2)
        .bool("tokenizer.ggml.add_bos_token", true)
        .strings("tokenizer.chat_templates", &["rag"])
        .str("tokenizer.chat_template.rag", "t")
        .array("bools", 7, 2, vec![0, 1])
        .array("doubles", 12, 1, vec![0; 8]);
    let tensors = |writer: GgufWriter| {
        writer
            .f32_tensor("first", &[2, 4], &[1.0; 8])
            .tensor("second", 2, &[2, 32], vec![3; 36])
            .build()
    };
    write("gguf", "plain", &tensors(gguf.clone()))?;
    write("gguf", "aligned", &tensors(gguf.alignment(8).version(2)))?;
    let safetensors = SafetensorsWriter::default()
        .f32_tensor("first", &[2, 2], &[1.0; 4])
        .tensor("second", "BF16", &[3], &[0; 6])
        .tensor("third", "F4", &[2, 0], &[]);
    write("safetensors", "plain", &safetensors.build())?;
    for (idx, config) in CONFIGS.iter().enumerate() {
        write("hf_config", &idx.to_string(), config.as_bytes())?;
    }
    let frames = [
        Frame::Hello(Hello {
            token: [1; 16],
            world_size: 4,
            rank: 1,
            fingerprint: [2; 32],
            gpu: Some(Gpu { uuid: [3; 16], is_shared: false }),
            host: "b".into(),
        }),
        Frame::Step(Arc::default()),
        Frame::Output { output: Default::default(), counters: Counters::default() },
        Frame::Error { reason: "rank 2 is lost".into() },
    ];
    for (idx, frame) in frames.iter().enumerate() {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes).expect("within every cap");
        write("frame", &idx.to_string(), &bytes)?;
    }
    Ok(())
}

fn write(target: &str, name: &str, bytes: &[u8]) -> io::Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    fs::create_dir_all(&folder)?;
    fs::write(folder.join(name), bytes)
}
