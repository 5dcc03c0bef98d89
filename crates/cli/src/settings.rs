//! What a person typed: flags, `PAGEMILL_*` variables and TOML keys, which share their names. Flags win
//! over variables, variables over the file. Nothing is validated here beyond its syntax: that is
//! [`crate::config`]'s work.

use clap::Args;
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Settings of the engine, with the names that other engines use accepted as aliases.
#[derive(Args, Clone, Debug, Default, Deserialize)]
#[command(next_help_heading = "Engine")]
#[serde(deny_unknown_fields, default)]
pub struct EngineSettings {
    /// Sequences in one step at most [default: derived from memory]
    #[arg(long, env = "PAGEMILL_MAX_BATCH_SIZE", visible_aliases = ["max-num-seqs", "parallel"], value_name = "N")]
    pub max_batch_size: Option<usize>,
    /// Tokens in a sequence at most [default: the model's]
    #[arg(long, env = "PAGEMILL_MAX_SEQ_LEN", visible_aliases = ["max-model-len", "ctx-size"], value_name = "TOKENS")]
    pub max_seq_len: Option<usize>,
    /// Tokens in one step at most [default: derived]
    #[arg(long, env = "PAGEMILL_MAX_BATCH_TOKENS", visible_alias = "max-num-batched-tokens", value_name = "TOKENS")]
    pub max_batch_tokens: Option<usize>,
    /// Prompt tokens of one request in one step at most [default: 512, on a GPU 4096, and
    /// 8192 for the first in order while nobody decodes]
    #[arg(long, env = "PAGEMILL_PREFILL_CHUNK_SIZE", visible_alias = "ubatch-size", value_name = "TOKENS")]
    pub prefill_chunk_size: Option<usize>,
    /// `false` runs classic static batches: the baseline that benches compare with [default: true]
    #[arg(long, env = "PAGEMILL_CONTINUOUS_BATCHING", num_args = 0..=1, default_missing_value = "true", require_equals = true, value_name = "BOOL")]
    pub continuous_batching: Option<bool>,
    /// `false` plans each step after the one before has ended, as a baseline [default: true]
    #[arg(long, env = "PAGEMILL_PLAN_AHEAD", num_args = 0..=1, default_missing_value = "true", require_equals = true, value_name = "BOOL")]
    pub plan_ahead: Option<bool>,
    /// Tokens in a KV block: 16, 32, 64, 128 or 256 [default: 16, on a GPU 64]
    #[arg(long, env = "PAGEMILL_BLOCK_SIZE", value_name = "TOKENS")]
    pub block_size: Option<usize>,
    /// KV element type: f16 or f32, on a GPU also bf16 [default: f16]
    #[arg(long, env = "PAGEMILL_KV_DTYPE", visible_alias = "kv-cache-dtype", value_name = "TYPE")]
    pub kv_dtype: Option<String>,
    /// `paged`, or `contiguous`: reserve max_seq_len for each sequence, as a baseline [default: paged]
    #[arg(long, env = "PAGEMILL_KV_LAYOUT", value_name = "LAYOUT")]
    pub kv_layout: Option<String>,
    /// Bytes of the KV pool, such as 512MiB [default: measured]
    #[arg(long, env = "PAGEMILL_KV_CACHE_BYTES", visible_alias = "kv-cache-memory-bytes", value_name = "BYTES")]
    pub kv_cache_bytes: Option<String>,
    /// Share finished prompts between requests [default: true]
    #[arg(long, env = "PAGEMILL_PREFIX_CACHE", visible_alias = "enable-prefix-caching", num_args = 0..=1, default_missing_value = "true", require_equals = true, value_name = "BOOL")]
    pub prefix_cache: Option<bool>,
    /// The same as --prefix-cache=false
    #[arg(long, hide = true)]
    #[serde(skip)]
    pub no_enable_prefix_caching: bool,
    /// Requests waiting at most; more get 429 [default: 1024]
    #[arg(long, env = "PAGEMILL_MAX_WAITING", value_name = "N")]
    pub max_waiting: Option<usize>,
    /// Ranks that share each layer; -tp is short for it, too [default: 1]
    #[arg(long, env = "PAGEMILL_TENSOR_PARALLEL", visible_aliases = ["tensor-parallel-size", "tp"], value_name = "N")]
    pub tensor_parallel: Option<usize>,
    /// Stages that share the layers out; -pp is short for it, too [default: 1]
    #[arg(long, env = "PAGEMILL_PIPELINE_PARALLEL", visible_aliases = ["pipeline-parallel-size", "pp"], value_name = "M")]
    pub pipeline_parallel: Option<usize>,
    /// Steps in flight in the pipeline, or `auto`: measured at start, from 4 upwards [default: auto]
    #[arg(long, env = "PAGEMILL_MICRO_BATCHES", value_name = "N|auto")]
    #[serde(deserialize_with = "text_or_number")]
    pub micro_batches: Option<String>,
    /// Weight type to convert to; only `as-stored` in this version
    #[arg(long, env = "PAGEMILL_QUANTIZATION", value_name = "TYPE")]
    pub quantization: Option<String>,
    /// Compute threads [default: the cores this process may use]
    #[arg(short = 't', long, env = "PAGEMILL_THREADS", value_name = "N")]
    pub threads: Option<usize>,
    /// What weights are multiplied with: on the CPU int8 (quantised weights) or f32 (exact, slower), on a GPU bf16 or f32
    /// [default: int8, on a GPU bf16]
    #[arg(long, env = "PAGEMILL_ACTIVATIONS", value_name = "TYPE")]
    pub activations: Option<String>,
    /// Instruction set: auto, scalar, avx2, avx-vnni, avx512-vnni, avx512-amx, neon or neon-dot [default: auto]
    #[arg(long, env = "PAGEMILL_ISA", value_name = "SET")]
    pub isa: Option<String>,
    /// On GPUs: the same tokens, bit for bit, in whatever batch, chunks and after whatever prefix hits a request runs;
    /// slower. On the CPU this always holds [default: false]
    #[arg(long, env = "PAGEMILL_DETERMINISTIC", num_args = 0..=1, default_missing_value = "true", require_equals = true, value_name = "BOOL")]
    pub deterministic: Option<bool>,
    /// Where the model runs: auto (a GPU where there is one), cpu or cuda:N [default: auto]
    #[arg(long, env = "PAGEMILL_DEVICE", value_name = "DEVICE")]
    pub device: Option<String>,
    /// Where weights come from: auto (the model's files), or dummy: MODEL is a config.json and its weights are made
    /// up, for benches [default: auto]
    #[arg(long, env = "PAGEMILL_LOAD_FORMAT", value_name = "FORMAT")]
    pub load_format: Option<String>,
    /// Type of made-up weights, such as q4_k [default: the one that config.json states]
    #[arg(long, env = "PAGEMILL_DUMMY_TYPE", value_name = "TYPE")]
    pub dummy_type: Option<String>,
}

/// Settings of the server.
#[derive(Args, Clone, Debug, Default, Deserialize)]
#[command(next_help_heading = "Server")]
#[serde(deny_unknown_fields, default)]
pub struct ServerSettings {
    /// Address to listen on [default: 127.0.0.1]
    #[arg(long, env = "PAGEMILL_HOST")]
    pub host: Option<String>,
    /// Port to listen on; 0 picks a free one [default: 8000]
    #[arg(long, env = "PAGEMILL_PORT")]
    pub port: Option<u16>,
    /// Key that clients must send; may be given several times
    #[arg(long, env = "PAGEMILL_API_KEY", value_name = "KEY", hide_env_values = true)]
    #[serde(deserialize_with = "one_or_more")]
    pub api_key: Option<Vec<String>>,
    /// Web origin allowed by CORS (`*` for all); may be given several times [default: none]
    #[arg(long, env = "PAGEMILL_CORS_ORIGIN", value_name = "ORIGIN", visible_alias = "allowed-origins")]
    #[serde(deserialize_with = "one_or_more")]
    pub cors_origin: Option<Vec<String>>,
    /// Name under which the model is served [default: MODEL's]
    #[arg(long, env = "PAGEMILL_SERVED_MODEL_NAME", visible_alias = "alias", value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// Seconds that running answers get to finish after SIGTERM [default: 60]
    #[arg(long, env = "PAGEMILL_DRAIN_TIMEOUT", value_name = "SECONDS")]
    pub drain_timeout: Option<u64>,
    /// Seconds between comments on a silent stream; 0: none [default: 0]
    #[arg(long, env = "PAGEMILL_SSE_KEEP_ALIVE", value_name = "SECONDS")]
    pub sse_keep_alive: Option<u64>,
    /// Port on which rank 0 lets the other processes in, under mpirun; 0 picks a free one [default: 0]
    #[arg(long, env = "PAGEMILL_RANK_PORT", value_name = "PORT")]
    pub rank_port: Option<u16>,
}

/// What a flag may be given several times for, a file may write as one text or as a list.
fn one_or_more<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<String>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a text or a list of texts")]
    enum Written {
        One(String),
        More(Vec<String>),
    }
    Ok(Some(match Written::deserialize(deserializer)? {
        Written::One(text) => vec![text],
        Written::More(texts) => texts,
    }))
}

/// A number or a word.
fn text_or_number<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a number or a text")]
    enum Written {
        Number(u64),
        Text(String),
    }
    Ok(Some(match Written::deserialize(deserializer)? {
        Written::Number(number) => number.to_string(),
        Written::Text(text) => text,
    }))
}

/// The TOML file: one flat table with the flags' names, underscores for dashes.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct File {
    model: Option<String>,
    #[serde(flatten)]
    rest: toml::Table,
}

/// Everything a file may set.
#[derive(Debug, Default)]
pub struct FileSettings {
    /// `model = "..."`.
    pub model: Option<String>,
    /// The engine's keys.
    pub engine: EngineSettings,
    /// The server's keys.
    pub server: ServerSettings,
}

/// What is wrong with a settings file.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the fields are what the variant names
pub enum SettingsError {
    /// It cannot be read.
    #[error("{path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    /// It is no TOML, or a key has the wrong type, or a key is unknown.
    #[error("{path}: {detail}")]
    Content { path: PathBuf, detail: String },
}

/// Reads a settings file. Unknown keys are refused by name.
///
/// # Errors
/// [`SettingsError`] naming the file and the key.
pub fn read_file(path: &Path) -> Result<FileSettings, SettingsError> {
    let text = std::fs::read_to_string(path).map_err(|source| SettingsError::Read { path: path.to_owned(), source })?;
    parse_file(&text).map_err(|detail| SettingsError::Content { path: path.to_owned(), detail })
}

fn parse_file(text: &str) -> Result<FileSettings, String> {
    let file: File = toml::from_str(text).map_err(|e| match e.span() {
        Some(span) => format!("line {}: {}", text[..span.start.min(text.len())].lines().count().max(1), e.message()),
        None => e.message().to_owned(),
    })?;
    let server_keys =
        ["host", "port", "api_key", "cors_origin", "served_model_name", "drain_timeout", "sse_keep_alive", "rank_port"];
    let (server, engine): (toml::Table, toml::Table) =
        file.rest.into_iter().partition(|(key, _)| server_keys.contains(&key.as_str()));
    Ok(FileSettings { model: file.model, engine: read_table(engine)?, server: read_table(server)? })
}

/// Reads a table; a fault names its key.
fn read_table<T: serde::de::DeserializeOwned>(table: toml::Table) -> Result<T, String> {
    serde_path_to_error::deserialize(table).map_err(|e| {
        let key = e.path().to_string();
        let fault = e.inner().message();
        if key == "." || fault.contains(&format!("`{key}`")) { fault.to_owned() } else { format!("{key}: {fault}") }
    })
}

impl EngineSettings {
    /// `self` where set, else `file`.
    #[must_use]
    pub fn or(self, file: Self) -> Self {
        Self {
            max_batch_size: self.max_batch_size.or(file.max_batch_size),
            max_seq_len: self.max_seq_len.or(file.max_seq_len),
            max_batch_tokens: self.max_batch_tokens.or(file.max_batch_tokens),
            prefill_chunk_size: self.prefill_chunk_size.or(file.prefill_chunk_size),
            continuous_batching: self.continuous_batching.or(file.continuous_batching),
            plan_ahead: self.plan_ahead.or(file.plan_ahead),
            block_size: self.block_size.or(file.block_size),
            kv_dtype: self.kv_dtype.or(file.kv_dtype),
            kv_layout: self.kv_layout.or(file.kv_layout),
            kv_cache_bytes: self.kv_cache_bytes.or(file.kv_cache_bytes),
            prefix_cache: self.no_enable_prefix_caching.then_some(false).or(self.prefix_cache).or(file.prefix_cache),
            no_enable_prefix_caching: self.no_enable_prefix_caching,
            max_waiting: self.max_waiting.or(file.max_waiting),
            tensor_parallel: self.tensor_parallel.or(file.tensor_parallel),
            pipeline_parallel: self.pipeline_parallel.or(file.pipeline_parallel),
            micro_batches: self.micro_batches.or(file.micro_batches),
            quantization: self.quantization.or(file.quantization),
            threads: self.threads.or(file.threads),
            activations: self.activations.or(file.activations),
            isa: self.isa.or(file.isa),
            deterministic: self.deterministic.or(file.deterministic),
            device: self.device.or(file.device),
            load_format: self.load_format.or(file.load_format),
            dummy_type: self.dummy_type.or(file.dummy_type),
        }
    }
}

impl ServerSettings {
    /// `self` where set, else `file`.
    #[must_use]
    pub fn or(self, file: Self) -> Self {
        Self {
            host: self.host.or(file.host),
            port: self.port.or(file.port),
            api_key: self.api_key.or(file.api_key),
            cors_origin: self.cors_origin.or(file.cors_origin),
            served_model_name: self.served_model_name.or(file.served_model_name),
            drain_timeout: self.drain_timeout.or(file.drain_timeout),
            sse_keep_alive: self.sse_keep_alive.or(file.sse_keep_alive),
            rank_port: self.rank_port.or(file.rank_port),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_sets_what_flags_leave_open() {
        let file = parse_file("model = \"m.gguf\"\nblock_size = 32\nport = 9000\nkv_dtype = \"f32\"\n").unwrap();
        assert_eq!(file.model.as_deref(), Some("m.gguf"));
        let merged = EngineSettings { block_size: Some(64), ..Default::default() }.or(file.engine);
        assert_eq!((merged.block_size, merged.kv_dtype.as_deref()), (Some(64), Some("f32")));
        assert_eq!(ServerSettings::default().or(file.server).port, Some(9000));
    }

    #[test]
    fn one_key_or_a_list() {
        for (text, keys) in [("api_key = \"a\"", vec!["a"]), ("api_key = [\"a\", \"b\"]", vec!["a", "b"])] {
            let file = parse_file(text).unwrap();
            assert_eq!(file.server.api_key.unwrap(), keys);
        }
        let wrong = parse_file("api_key = 7").unwrap_err();
        assert_eq!(wrong, "api_key: expected a text or a list of texts");
    }

    #[test]
    fn deterministic_is_a_flag_or_a_key() {
        #[derive(clap::Parser)]
        struct Flags {
            #[command(flatten)]
            engine: EngineSettings,
        }
        let typed = |flags: &[&str]| {
            <Flags as clap::Parser>::try_parse_from([&["pagemill"], flags].concat())
                .map(|flags| flags.engine.deterministic)
        };
        assert_eq!(typed(&["--deterministic"]).unwrap(), Some(true));
        assert_eq!(typed(&["--deterministic=false"]).unwrap(), Some(false));
        assert!(typed(&["--deterministic=maybe"]).is_err());
        let file = || parse_file("deterministic = true\n").unwrap().engine;
        assert_eq!(EngineSettings::default().or(file()).deterministic, Some(true));
        let off = EngineSettings { deterministic: Some(false), ..Default::default() };
        assert_eq!(off.or(file()).deterministic, Some(false));
        assert!(parse_file("deterministic = 1\n").unwrap_err().starts_with("deterministic: invalid type"));
    }

    #[test]
    fn a_number_or_auto() {
        for (text, written) in [("micro_batches = 6", "6"), ("micro_batches = \"auto\"", "auto")] {
            assert_eq!(parse_file(text).unwrap().engine.micro_batches.as_deref(), Some(written));
        }
        let wrong = parse_file("micro_batches = [1]").unwrap_err();
        assert_eq!(wrong, "micro_batches: expected a number or a text");
    }

    #[test]
    fn unknown_keys_and_wrong_types_are_named() {
        let unknown = parse_file("blok_size = 32\n").unwrap_err();
        assert!(unknown.contains("blok_size"), "{unknown}");
        let wrong = parse_file("port = \"high\"\n").unwrap_err();
        assert!(wrong.starts_with("port: invalid type"), "{wrong}");
        let wrong = parse_file("block_size = [1]\n").unwrap_err();
        assert!(wrong.starts_with("block_size: invalid type"), "{wrong}");
        let broken = parse_file("# a\nblock_size = 16\nport = \n").unwrap_err();
        assert!(broken.starts_with("line 3: ") && !broken.contains('\n'), "{broken}");
    }
}
