//! From what was typed to what is valid: each room's immutable part of the configuration. Every message
//! names the key.

use crate::devices::{AskedSizes, Device, Ranks, StepSizes};
use crate::settings::{EngineSettings, ServerSettings};
use anyhow::{Context, Result, bail};
use pagemill_backend::{ActivationMode, CpuConfig, DType, Isa};
use pagemill_engine::{EngineConfig, ParallelMode};
use pagemill_formats::TensorType;
use pagemill_scheduler::KvLayout;

/// The parts of a valid configuration that concern model and engine.
#[derive(Clone, Debug)]
pub struct Config {
    /// The engine's part.
    pub engine: EngineConfig,
    /// Where the model runs.
    pub device: Device,
    /// The CPU's part.
    pub cpu: CpuConfig,
    /// Whether a GPU's results must not depend on batch, chunks or prefix hits; on the CPU they never do.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // the CPU always is
    pub deterministic: bool,
    /// Where weights come from.
    pub load_format: LoadFormat,
}

/// Where weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadFormat {
    /// The model's files.
    Stored,
    /// Made up from the configuration alone, for benches; in this type, or `None`: in the one that it states.
    Dummy(Option<TensorType>),
}

/// Validates the engine's settings, for ranks that are threads of this process.
///
/// # Errors
/// One sentence naming the key.
pub fn engine_config(settings: EngineSettings) -> Result<Config> {
    engine_config_among(1, settings)
}

/// The same where each rank is one of `num_processes` processes, unless there is only one.
///
/// # Errors
/// As [`engine_config`].
pub fn engine_config_among(num_processes: usize, settings: EngineSettings) -> Result<Config> {
    let parallel = parallel_mode(settings.tensor_parallel, settings.pipeline_parallel)?;
    if let Some(q) = settings.quantization.as_deref()
        && !["as-stored", "as_stored", "none"].contains(&q)
    {
        bail!("quantization = {q}: this version runs weights as they are stored (as-stored)");
    }
    let ranks = if num_processes == 1 { Ranks::Threads(parallel.num_ranks()) } else { Ranks::Processes };
    let device = Device::parse(settings.device.as_deref(), ranks)?;
    let defaults = device.engine_defaults();
    let max_batch_size = positive(settings.max_batch_size, "max_batch_size")?.or(defaults.max_batch_size);
    let asked = AskedSizes {
        prefill_chunk_size: positive(settings.prefill_chunk_size, "prefill_chunk_size")?,
        max_batch_tokens: positive(settings.max_batch_tokens, "max_batch_tokens")?,
    };
    let StepSizes { prefill_chunk_size, max_batch_tokens, mixed_batch_tokens } =
        device.step_sizes(asked, max_batch_size);
    let engine = EngineConfig {
        max_batch_size,
        max_seq_len: positive(settings.max_seq_len, "max_seq_len")?,
        max_batch_tokens,
        mixed_batch_tokens,
        prefill_chunk_size,
        continuous_batching: settings.continuous_batching.unwrap_or(defaults.continuous_batching),
        plan_ahead: settings.plan_ahead.unwrap_or(defaults.plan_ahead),
        block_size: block_size(settings.block_size.unwrap_or(defaults.block_size))?,
        kv_dtype: kv_dtype(settings.kv_dtype.as_deref(), &device)?,
        kv_layout: kv_layout(settings.kv_layout.as_deref())?,
        kv_cache_bytes: settings.kv_cache_bytes.as_deref().map(|s| parse_bytes(s, "kv_cache_bytes")).transpose()?,
        prefix_cache: settings.prefix_cache.unwrap_or(defaults.prefix_cache),
        max_waiting: positive(settings.max_waiting, "max_waiting")?.unwrap_or(defaults.max_waiting),
        parallel,
        micro_batches: micro_batches(settings.micro_batches.as_deref())?,
        ..defaults
    };
    if let (Some(tokens), Some(batch)) = (engine.max_batch_tokens, engine.max_batch_size)
        && tokens < batch
    {
        bail!("max_batch_tokens = {tokens}: must be at least max_batch_size ({batch})");
    }
    let cpu = CpuConfig {
        num_threads: threads(settings.threads)?,
        activations: activations(settings.activations.as_deref(), &device)?,
        isa: isa(settings.isa.as_deref())?,
    };
    let load_format = load_format(settings.load_format.as_deref(), settings.dummy_type.as_deref())?;
    let deterministic = settings.deterministic.unwrap_or(false);
    Ok(Config { engine, device, cpu, deterministic, load_format })
}

/// More ranks in one process than any machine has cores.
const RANKS_MAX: usize = 256;

fn parallel_mode(tensor_parallel: Option<usize>, pipeline_parallel: Option<usize>) -> Result<ParallelMode> {
    let tensor_parallel = positive(tensor_parallel, "tensor_parallel")?.unwrap_or(1);
    let pipeline_parallel = positive(pipeline_parallel, "pipeline_parallel")?.unwrap_or(1);
    if tensor_parallel.checked_mul(pipeline_parallel).is_none_or(|ranks| ranks > RANKS_MAX) {
        bail!(
            "tensor_parallel = {tensor_parallel}: with pipeline_parallel = {pipeline_parallel} there would be more than {RANKS_MAX} ranks"
        );
    }
    Ok(ParallelMode { tensor_parallel, pipeline_parallel })
}

fn micro_batches(text: Option<&str>) -> Result<Option<usize>> {
    match text {
        None | Some("auto") => Ok(None),
        Some(text) => match text.parse() {
            Ok(count @ 1..=32) => Ok(Some(count)),
            _ => bail!("micro_batches = {text}: must be auto or a number from 1 to 32"),
        },
    }
}

fn positive(value: Option<usize>, key: &str) -> Result<Option<usize>> {
    if value == Some(0) {
        bail!("{key} = 0: must be at least 1");
    }
    Ok(value)
}

/// More than any machine has cores; a slip of the hand must not start a million threads.
const THREADS_MAX: usize = 1024;

fn threads(value: Option<usize>) -> Result<Option<usize>> {
    match positive(value, "threads")? {
        Some(n) if n > THREADS_MAX => bail!("threads = {n}: must be at most {THREADS_MAX}"),
        value => Ok(value),
    }
}

fn block_size(value: usize) -> Result<usize> {
    if [16, 32, 64, 128, 256].contains(&value) {
        return Ok(value);
    }
    bail!("block_size = {value}: must be 16, 32, 64, 128 or 256")
}

fn load_format(text: Option<&str>, dummy_type: Option<&str>) -> Result<LoadFormat> {
    let known = |name: &str| TensorType::ALL.into_iter().find(|known| known.name().eq_ignore_ascii_case(name));
    match (text, dummy_type) {
        (Some("dummy"), None) => Ok(LoadFormat::Dummy(None)),
        (Some("dummy"), Some(name)) => match known(name) {
            Some(dummy_type) => Ok(LoadFormat::Dummy(Some(dummy_type))),
            None => {
                let names: Vec<&str> = TensorType::ALL.iter().map(|known| known.name()).collect();
                bail!("dummy_type = {name}: must be one of {}", names.join(", "))
            }
        },
        (None | Some("auto"), None) => Ok(LoadFormat::Stored),
        (None | Some("auto"), Some(_)) => bail!("dummy_type is for load_format = dummy"),
        (Some(other), _) => bail!("load_format = {other}: must be auto or dummy"),
    }
}

fn kv_dtype(text: Option<&str>, device: &Device) -> Result<DType> {
    match text {
        None | Some("f16" | "auto" | "float16") => Ok(DType::F16),
        Some("bf16" | "bfloat16") if *device != Device::Cpu => Ok(DType::BF16),
        Some("f32" | "float32") => Ok(DType::F32),
        Some(other) => bail!("kv_dtype = {other}: this version keeps KV in f16 or f32, on a GPU also in bf16"),
    }
}

fn kv_layout(text: Option<&str>) -> Result<KvLayout> {
    match text {
        None | Some("paged") => Ok(KvLayout::Paged),
        Some("contiguous") => Ok(KvLayout::Contiguous),
        Some(other) => bail!("kv_layout = {other}: must be paged or contiguous"),
    }
}

/// What the device would do unasked is `Int8`, whatever its name there.
fn activations(text: Option<&str>, device: &Device) -> Result<ActivationMode> {
    let (unasked, place) = match device {
        Device::Cpu => ("int8", "the CPU"),
        Device::Cuda(_) => ("bf16", "a GPU"),
    };
    match text {
        Some("f32") => Ok(ActivationMode::F32),
        Some(other) if other != unasked => bail!("activations = {other}: must be {unasked} or f32 on {place}"),
        _ => Ok(ActivationMode::Int8),
    }
}

fn isa(text: Option<&str>) -> Result<Option<Isa>> {
    match text {
        None | Some("auto") => Ok(None),
        Some(name) => {
            let names = || Isa::ALL.map(Isa::name).join(", ");
            let isa = Isa::ALL.into_iter().find(|i| i.name() == name);
            let isa = isa.with_context(|| format!("isa = {name}: must be auto or one of {}", names()))?;
            if !isa.is_available() {
                bail!("isa = {name}: this machine cannot run it; the best it has is {}", Isa::detect().name());
            }
            Ok(Some(isa))
        }
    }
}

/// Reads `512`, `512KiB`, `1.5GiB`, `2GB` as bytes.
///
/// # Errors
/// One sentence naming `key`.
pub fn parse_bytes(text: &str, key: &str) -> Result<u64> {
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let factor: f64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kib" => 1024.0,
        "kb" => 1e3,
        "m" | "mib" => 1_048_576.0,
        "mb" => 1e6,
        "g" | "gib" => 1_073_741_824.0,
        "gb" => 1e9,
        "t" | "tib" => 1_099_511_627_776.0,
        "tb" => 1e12,
        _ if number.is_empty() => bail!("{key} = {text}: not a size; write bytes, or a number with KiB, MiB or GiB"),
        _ => bail!("{key} = {text}: unknown unit {}; write bytes, KiB, MiB, GiB or TiB", unit.trim()),
    };
    let Ok(value) = number.parse::<f64>() else {
        bail!("{key} = {text}: not a size; write bytes, or a number with KiB, MiB or GiB");
    };
    let bytes = value * factor;
    if !(1.0..=1e18).contains(&bytes) {
        bail!("{key} = {text}: must lie between 1 byte and 1e18 bytes");
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // range checked above
    Ok(bytes as u64)
}

/// The server's settings with defaults filled in.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// Address.
    pub host: String,
    /// Port; 0 picks one.
    pub port: u16,
    /// Keys; empty: none needed.
    pub api_keys: Vec<String>,
    /// CORS origins; empty: no CORS.
    pub cors_origins: Vec<String>,
    /// Seconds for running answers after SIGTERM.
    pub drain_timeout_s: u64,
    /// Seconds between SSE comments; `None`: none.
    pub sse_keep_alive_s: Option<u64>,
    /// Port for the other ranks' processes; 0 picks one.
    pub rank_port: u16,
}

/// Validates the server's settings.
///
/// # Errors
/// One sentence naming the key.
pub fn serve_config(settings: &ServerSettings) -> Result<ServeConfig> {
    let api_keys = settings.api_key.clone().unwrap_or_default();
    if api_keys.iter().any(String::is_empty) {
        bail!("api_key: an empty key would let everybody in; leave the flag out to need no key");
    }
    for origin in settings.cors_origin.iter().flatten() {
        if !is_origin(origin) {
            bail!("cors_origin = {origin}: must be * or scheme://host[:port], such as https://chat.example.org");
        }
    }
    if settings.host.as_deref() == Some("") {
        bail!("host: must not be empty; 0.0.0.0 or :: listens on every address");
    }
    if settings.served_model_name.as_deref().is_some_and(|name| name.trim().is_empty()) {
        bail!("served_model_name: must not be empty");
    }
    Ok(ServeConfig {
        host: settings.host.clone().unwrap_or_else(|| "127.0.0.1".to_owned()),
        port: settings.port.unwrap_or(8000),
        api_keys,
        cors_origins: settings.cors_origin.clone().unwrap_or_default(),
        drain_timeout_s: settings.drain_timeout.unwrap_or(60),
        sse_keep_alive_s: settings.sse_keep_alive.filter(|&s| s > 0),
        rank_port: settings.rank_port.unwrap_or(0),
    })
}

/// Browsers send an origin as scheme, host and port: anything else would never match.
fn is_origin(text: &str) -> bool {
    let host = |rest: &str| !rest.is_empty() && !rest.contains(['/', '?', '#', '@']);
    let visible = text.chars().all(|c| c.is_ascii_graphic());
    text == "*"
        || text == "null"
        || (visible && text.split_once("://").is_some_and(|(scheme, rest)| !scheme.is_empty() && host(rest)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_units() {
        for (text, bytes) in [
            ("512", 512),
            ("1KiB", 1024),
            ("1.5 GiB", 1_610_612_736),
            ("2GB", 2_000_000_000),
            ("1TB", 1_000_000_000_000),
        ] {
            assert_eq!(parse_bytes(text, "k").unwrap(), bytes, "{text}");
        }
        for text in ["", "GiB", "junk", "1XB", "-5", "0", "1e30", "1..2"] {
            let message = format!("{:#}", parse_bytes(text, "kv_cache_bytes").unwrap_err());
            assert!(message.contains("kv_cache_bytes"), "{text}: {message}");
        }
    }

    #[test]
    fn made_up_weights_have_any_type() {
        assert_eq!(load_format(None, None).unwrap(), LoadFormat::Stored);
        assert_eq!(load_format(Some("dummy"), None).unwrap(), LoadFormat::Dummy(None));
        assert_eq!(load_format(Some("dummy"), Some("q4_k")).unwrap(), LoadFormat::Dummy(Some(TensorType::Q4_K)));
        for (format, dummy_type, key) in [
            (Some("dummy"), Some("q9"), "dummy_type"),
            (None, Some("q4_k"), "dummy_type"),
            (Some("auto"), Some("q4_k"), "dummy_type"),
            (Some("made-up"), None, "load_format"),
        ] {
            let message = load_format(format, dummy_type).unwrap_err().to_string();
            assert!(message.starts_with(key), "{message}");
        }
    }

    #[test]
    fn what_the_server_cannot_use_is_refused() {
        let origins = |origin: &str| ServerSettings { cors_origin: Some(vec![origin.into()]), ..Default::default() };
        for origin in ["*", "null", "https://chat.example.org", "http://localhost:3000", "app://x"] {
            assert!(serve_config(&origins(origin)).is_ok(), "{origin}");
        }
        for origin in ["", "localhost:3000", "https://", "https://a.b/", "https://a b", "*.example.org"] {
            let message = serve_config(&origins(origin)).unwrap_err().to_string();
            assert!(message.starts_with("cors_origin = "), "{message}");
        }
        let empty = || Some(String::new());
        for (settings, key) in [
            (ServerSettings { host: empty(), ..Default::default() }, "host"),
            (ServerSettings { served_model_name: empty(), ..Default::default() }, "served_model_name"),
            (ServerSettings { api_key: Some(vec![String::new()]), ..Default::default() }, "api_key"),
        ] {
            assert!(serve_config(&settings).unwrap_err().to_string().starts_with(key), "{key}");
        }
    }

    #[test]
    fn every_refusal_names_its_key() {
        let cases = [
            (EngineSettings { block_size: Some(17), ..Default::default() }, "block_size"),
            (EngineSettings { kv_dtype: Some("int3".into()), ..Default::default() }, "kv_dtype"),
            (EngineSettings { kv_layout: Some("heap".into()), ..Default::default() }, "kv_layout"),
            (EngineSettings { max_batch_size: Some(0), ..Default::default() }, "max_batch_size"),
            (EngineSettings { tensor_parallel: Some(0), ..Default::default() }, "tensor_parallel"),
            (EngineSettings { tensor_parallel: Some(usize::MAX), ..Default::default() }, "tensor_parallel = "),
            (EngineSettings { pipeline_parallel: Some(300), ..Default::default() }, "tensor_parallel = 1: with"),
            (EngineSettings { micro_batches: Some("many".into()), ..Default::default() }, "micro_batches"),
            (EngineSettings { micro_batches: Some("0".into()), ..Default::default() }, "micro_batches"),
            (EngineSettings { activations: Some("f8".into()), ..Default::default() }, "activations"),
            (EngineSettings { isa: Some("sse9".into()), ..Default::default() }, "isa"),
            (EngineSettings { device: Some("tpu".into()), ..Default::default() }, "device"),
            (EngineSettings { threads: Some(1_000_000), ..Default::default() }, "threads"),
            (EngineSettings { quantization: Some("int1".into()), ..Default::default() }, "quantization"),
        ];
        for (settings, key) in cases {
            let message = format!("{:#}", engine_config(settings).unwrap_err());
            assert!(message.starts_with(key), "{key}: {message}");
        }
        assert!(engine_config(EngineSettings::default()).is_ok());
    }

    #[test]
    fn activations_are_named_as_the_device_has_them() {
        let (cpu, gpu) = (Device::Cpu, Device::Cuda(vec![0]));
        for (device, own, others) in [(cpu, "int8", "bf16"), (gpu, "bf16", "int8")] {
            assert_eq!(activations(None, &device).unwrap(), activations(Some(own), &device).unwrap());
            assert_eq!(activations(Some("f32"), &device).unwrap(), ActivationMode::F32);
            let message = activations(Some(others), &device).unwrap_err().to_string();
            assert!(message.contains(&format!("activations = {others}: must be {own} or f32 on")), "{message}");
        }
    }
}
