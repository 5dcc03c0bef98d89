//! Where the model runs: from `--device` to a backend. Decides what `auto` means, and which defaults of the engine
//! follow from the device.

#[cfg_attr(feature = "cuda", path = "cuda.rs")]
#[cfg_attr(not(feature = "cuda"), path = "without_cuda.rs")]
mod gpu;

use crate::config::Config;
use anyhow::{Context, Result, bail};
use pagemill_backend::{ActivationMode, Backend, CpuBackend};
use pagemill_engine::{DeviceMemory, EngineConfig};
use std::sync::Arc;

/// The device of a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// This machine's cores.
    Cpu,
    /// An NVIDIA GPU, as the driver counts them.
    Cuda(usize),
}

impl Device {
    /// Reads `auto`, `cpu`, `cuda` or `cuda:N`. `auto` is the first GPU where this build knows GPUs and there is one.
    ///
    /// # Errors
    /// One sentence: what the key may be, or why there is no such device.
    pub fn parse(text: Option<&str>) -> Result<Self> {
        match text {
            None | Some("auto") => match gpu::count() {
                Ok(0) => Ok(Self::Cpu),
                Ok(_) => Ok(Self::Cuda(0)),
                Err(error) => {
                    tracing::warn!("{error:#}; running on the CPU");
                    Ok(Self::Cpu)
                }
            },
            Some("cpu") => Ok(Self::Cpu),
            Some(name) => {
                let Some(ordinal) = ordinal(name) else {
                    bail!("device = {name}: must be auto, cpu or cuda:N");
                };
                match gpu::count().with_context(|| format!("device = {name}"))? {
                    0 => bail!("device = {name}: {}", gpu::NONE),
                    count if ordinal >= count => {
                        bail!("device = {name}: this machine has {count} GPU(s), counted from 0")
                    }
                    _ => Ok(Self::Cuda(ordinal)),
                }
            }
        }
    }

    /// The engine's defaults there. A GPU wants larger steps: more tokens cost it little more time. Of 2048, 4096 and
    /// 8192 tokens, measured (docs/gpu-log.md), 4096 gives nearly the throughput of 8192 and stalls decodes half as
    /// long.
    pub fn engine_defaults(self) -> EngineConfig {
        let defaults = EngineConfig::default();
        match self {
            Self::Cpu => defaults,
            Self::Cuda(_) => {
                EngineConfig { block_size: 64, prefill_chunk_size: 4096, max_batch_size: Some(256), ..defaults }
            }
        }
    }

    /// Tokens of a step there, where the engine's own rule (a whole chunk and a full batch of decodes) does not serve.
    /// On a GPU decodes take their tokens from the chunk's: products are cut into tiles, and a few tokens more than a
    /// round number cost another round of tiles over the whole chip.
    pub fn max_batch_tokens(self, prefill_chunk_size: usize, max_batch_size: Option<usize>) -> Option<usize> {
        match self {
            Self::Cpu => None,
            Self::Cuda(_) => Some(prefill_chunk_size.max(max_batch_size.unwrap_or(0))),
        }
    }
}

/// Whether `text` names a GPU of this machine, whatever it has.
pub fn names_gpu(text: &str) -> bool {
    ordinal(text).is_some()
}

/// `cuda` is `cuda:0`.
fn ordinal(text: &str) -> Option<usize> {
    match text.strip_prefix("cuda")? {
        "" => Some(0),
        rest => rest.strip_prefix(':')?.parse().ok(),
    }
}

/// Opens the device of a configuration.
///
/// # Errors
/// One sentence about the device.
pub fn open(config: &Config) -> Result<Arc<dyn Backend>> {
    match config.device {
        Device::Cpu => Ok(Arc::new(CpuBackend::new(config.cpu).context("starting the CPU device")?)),
        Device::Cuda(ordinal) => gpu::open(ordinal, config),
    }
}

/// What the memory plan needs to know of the device.
///
/// # Errors
/// As [`open`].
pub fn memory(config: &Config) -> Result<DeviceMemory> {
    let backend = open(config)?;
    Ok(DeviceMemory::of(&backend.info(), backend.logits_rows()))
}

/// How activations enter products there, for reports.
pub fn activations(config: &Config) -> &'static str {
    match (config.device, config.cpu.activations) {
        (_, ActivationMode::F32) => "f32",
        (Device::Cpu, ActivationMode::Int8) => "int8",
        (Device::Cuda(_), ActivationMode::Int8) => "bf16",
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_gpus_step_is_a_chunk_and_has_room_for_a_batch() {
        assert_eq!(Device::Cpu.max_batch_tokens(512, Some(64)), None);
        assert_eq!(Device::Cuda(0).max_batch_tokens(4096, Some(256)), Some(4096));
        assert_eq!(Device::Cuda(0).max_batch_tokens(128, Some(256)), Some(256));
        assert_eq!(Device::Cuda(0).max_batch_tokens(128, None), Some(128));
    }

    #[test]
    fn devices_are_named() {
        assert_eq!(Device::parse(Some("cpu")).unwrap(), Device::Cpu);
        assert!(names_gpu("cuda") && names_gpu("cuda:3"));
        for text in ["gpu", "cuda:", "cuda:-1", "cuda1", "CPU", ""] {
            assert!(!names_gpu(text));
            let message = Device::parse(Some(text)).unwrap_err().to_string();
            assert!(message.contains("auto, cpu or cuda:N"), "{message}");
        }
        let message = format!("{:#}", Device::parse(Some("cuda:99")).unwrap_err());
        assert!(message.starts_with("device = cuda:99: "), "{message}");
    }
}
