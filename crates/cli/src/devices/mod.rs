//! Where the model runs: from `--device` to backends, one for each rank. Decides what `auto` means, which GPU a rank
//! has, and which defaults of the engine follow from the device.

#[cfg_attr(feature = "cuda", path = "cuda.rs")]
#[cfg_attr(not(feature = "cuda"), path = "without_cuda.rs")]
pub mod gpu;

use crate::config::Config;
use anyhow::{Context, Result, bail};
use pagemill_backend::{ActivationMode, Backend, CpuBackend, SharedCollective, SoloCollective};
use pagemill_engine::{DeviceMemory, EngineConfig, ParallelMode, RankContext};
use std::sync::Arc;

/// The device of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {
    /// This machine's cores.
    Cpu,
    /// NVIDIA GPUs, as the driver counts them: one for each rank of this process, rank 0's first; where each rank is a
    /// process, those that the processes of this host share out.
    Cuda(Vec<usize>),
}

/// Which ranks GPUs of this machine are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ranks {
    /// So many, all in this process.
    Threads(usize),
    /// One in this process, and others in processes of this host or of other ones.
    Processes,
}

impl Device {
    /// Reads `auto`, `cpu`, `cuda`, `cuda:N` or, for several ranks, `cuda:N,M`. Ranks take GPUs in order: of `cuda`
    /// the first ones. `auto` is that where this build knows GPUs and there is one. Which one a process takes is
    /// [`gpu_of_process`]'s.
    ///
    /// # Errors
    /// One sentence: what the key may be, or why there is no such device.
    pub fn parse(text: Option<&str>, ranks: Ranks) -> Result<Self> {
        let name = match text {
            None | Some("auto") => match gpu::count() {
                Ok(0) => return Ok(Self::Cpu),
                Ok(_) => "auto",
                Err(error) => {
                    tracing::warn!("{error:#}; running on the CPU");
                    return Ok(Self::Cpu);
                }
            },
            Some("cpu") => return Ok(Self::Cpu),
            Some(name) if names_gpu(name) => name,
            Some(name) => bail!("device = {name}: must be auto, cpu, cuda or cuda:N, and cuda:N,M for two ranks"),
        };
        let count = gpu::count().with_context(|| format!("device = {name}"))?;
        if count == 0 {
            bail!("device = {name}: {}", gpu::NONE);
        }
        let named = match listed(name) {
            Some(Listed::These(ordinals)) => Some(ordinals),
            _ => None,
        };
        if let Some(missing) = named.iter().flatten().find(|&&ordinal| ordinal >= count) {
            bail!("device = {name}: there is no GPU {missing}: this machine has {count}, counted from 0");
        }
        let Ranks::Threads(num_ranks) = ranks else { return Ok(Self::Cuda(named.unwrap_or((0..count).collect()))) };
        let ordinals = named.unwrap_or((0..num_ranks.min(count)).collect());
        if ordinals.len() != num_ranks {
            bail!("device = {name}: {} GPU(s) for {num_ranks} rank(s)", ordinals.len());
        }
        if (0..ordinals.len()).any(|at| ordinals[..at].contains(&ordinals[at])) {
            tracing::warn!(
                "device = {name}: ranks share a GPU, to try a layout out; that is slower than one rank, and needs \
                 CUDA_MODULE_LOADING=EAGER in the environment"
            );
        }
        Ok(Self::Cuda(ordinals))
    }

    /// The engine's defaults there. A GPU wants larger steps: more tokens cost it little more time. Of 2048, 4096 and
    /// 8192 tokens, measured (docs/gpu-log.md), 4096 gives nearly the throughput of 8192 and stalls decodes half as
    /// long; where nobody decodes, nobody is stalled.
    pub fn engine_defaults(&self) -> EngineConfig {
        let defaults = EngineConfig::default();
        match self {
            Self::Cpu => defaults,
            Self::Cuda(_) => {
                EngineConfig { block_size: 64, prefill_chunk_size: 4096, max_batch_size: Some(256), ..defaults }
            }
        }
    }

    /// Tokens of a step there, at most and where somebody decodes, in place of what was not `asked` for: the engine's
    /// own rule (a whole chunk and a full batch of decodes) does not serve. On a GPU decodes take their tokens from the
    /// chunk's: products are cut into tiles, and a few tokens more than a round number cost another round of tiles over
    /// the whole chip.
    pub fn step_sizes(&self, asked: AskedSizes, max_batch_size: Option<usize>) -> StepSizes {
        let EngineConfig { prefill_chunk_size: chunk, .. } = self.engine_defaults();
        let prefill_chunk_size = asked.prefill_chunk_size.unwrap_or(chunk);
        let of_chunks = |chunk: usize| chunk.max(max_batch_size.unwrap_or(0));
        match (self, asked) {
            (Self::Cuda(_), AskedSizes { prefill_chunk_size: None, max_batch_tokens: None }) => StepSizes {
                prefill_chunk_size,
                max_batch_tokens: Some(of_chunks(2 * chunk)),
                mixed_batch_tokens: Some(of_chunks(chunk)),
            },
            (Self::Cuda(_), AskedSizes { max_batch_tokens: None, .. }) => StepSizes {
                prefill_chunk_size,
                max_batch_tokens: Some(of_chunks(prefill_chunk_size)),
                mixed_batch_tokens: None,
            },
            _ => StepSizes { prefill_chunk_size, max_batch_tokens: asked.max_batch_tokens, mixed_batch_tokens: None },
        }
    }
}

/// What was configured of a step's sizes.
#[derive(Clone, Copy, Debug, Default)]
pub struct AskedSizes {
    pub prefill_chunk_size: Option<usize>,
    pub max_batch_tokens: Option<usize>,
}

/// As the engine's configuration has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSizes {
    pub prefill_chunk_size: usize,
    pub max_batch_tokens: Option<usize>,
    pub mixed_batch_tokens: Option<usize>,
}

/// Whether `text` names GPUs of this machine, whatever it has.
pub fn names_gpu(text: &str) -> bool {
    listed(text).is_some()
}

/// Which GPUs a text names.
enum Listed {
    /// As many as are needed.
    First,
    /// These.
    These(Vec<usize>),
}

fn listed(text: &str) -> Option<Listed> {
    match text.strip_prefix("cuda")? {
        "" => Some(Listed::First),
        rest => rest.strip_prefix(':')?.split(',').map(|n| n.parse().ok()).collect::<Option<_>>().map(Listed::These),
    }
}

/// The GPU of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "mpi"), allow(dead_code))] // one process is always alone
pub struct ChosenGpu {
    /// As the driver counts it.
    pub ordinal: usize,
    /// Whether it was named for several processes.
    pub is_shared: bool,
}

/// Which of a host's `ordinals` is that of its process `local_rank` of `local_size`: the one at its place, or the only
/// one, which other hosts, or a wrapper of each process, have named differently.
///
/// # Errors
/// One sentence where there are too few.
#[cfg_attr(not(feature = "mpi"), allow(dead_code))] // one process is always alone
pub fn gpu_of_process(ordinals: &[usize], local_rank: usize, local_size: usize) -> Result<ChosenGpu> {
    let ordinal = match (ordinals, ordinals.get(local_rank)) {
        ([only], _) => *only,
        (_, Some(ordinal)) if local_size <= ordinals.len() => *ordinal,
        _ => bail!(
            "device: {local_size} processes on this host for {} GPUs: each process needs one (--device cuda takes the \
             host's in order, --device cuda:N,M these)",
            ordinals.len()
        ),
    };
    let is_shared = ordinals.iter().filter(|other| **other == ordinal).count() > 1;
    Ok(ChosenGpu { ordinal, is_shared })
}

/// Opens the device of a configuration, of several the first rank's.
///
/// # Errors
/// One sentence about the device.
pub fn open(config: &Config) -> Result<Arc<dyn Backend>> {
    match &config.device {
        Device::Cpu => Ok(Arc::new(CpuBackend::new(config.cpu).context("starting the CPU device")?)),
        Device::Cuda(ordinals) => gpu::open(ordinals.first().copied().unwrap_or(0), config),
    }
}

/// Opens a device for each of the configuration's ranks, stage by stage, and connects them.
///
/// # Errors
/// One sentence about a device, or about what connects them.
pub fn open_ranks(config: &Config) -> Result<Vec<RankContext>> {
    let mode = config.engine.parallel;
    if let Device::Cuda(ordinals) = &config.device {
        return gpu::open_ranks(ordinals, config);
    }
    if mode == ParallelMode::SOLO {
        return Ok(vec![RankContext { backend: open(config)?, collective: Arc::new(SoloCollective) }]);
    }
    let world = SharedCollective::world(mode.tensor_parallel, mode.pipeline_parallel);
    let devices = config.cpu.divided(mode.num_ranks());
    let opened = devices.into_iter().zip(world).map(|(cpu, collective)| {
        let backend = CpuBackend::new(cpu).context("starting the CPU device")?;
        Ok(RankContext { backend: Arc::new(backend), collective: Arc::new(collective) })
    });
    opened.collect()
}

/// Sums to be timed: bf16 of `rows` rows each.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))] // nobody reads them there
pub struct SumTask {
    /// Elements of a row.
    pub cols: usize,
    /// Rows of each size.
    pub rows: Vec<usize>,
    /// Calls of one size, one after the other; a tenth of them above 1,024 rows.
    pub calls: u32,
}

/// Microseconds a call, `None` where a size is not taken that way.
pub struct SumTimes {
    /// Of the tensor on one rank.
    pub bytes: usize,
    /// One launch over peer memory.
    pub one_shot_us: Option<f64>,
    /// NCCL.
    pub nccl_us: Option<f64>,
    /// One launch that also adds to the residual stream and norms it.
    pub fused_us: Option<f64>,
    /// The sum as the engine chooses its way, then the addition with the norm.
    pub apart_us: Option<f64>,
}

/// Times sums over the GPUs of a configuration, one rank on each.
///
/// # Errors
/// The configuration has no GPUs, or they cannot be connected.
pub fn time_sums(config: &Config, task: &SumTask) -> Result<Vec<SumTimes>> {
    match &config.device {
        Device::Cpu => bail!("all-reduce is measured between GPUs (--device cuda --tensor-parallel N)"),
        Device::Cuda(ordinals) => gpu::time_sums(ordinals, config, task),
    }
}

/// What the memory plan needs to know of the device.
///
/// # Errors
/// As [`open`].
pub fn memory(config: &Config) -> Result<DeviceMemory> {
    let backend = open(config)?;
    let mut memory = DeviceMemory::of(&backend.info(), backend.logits_rows());
    if let Device::Cuda(ordinals) = &config.device {
        // The smallest decides for all.
        for &ordinal in ordinals.iter().skip(1) {
            let info = gpu::open(ordinal, config)?.info();
            memory.available_bytes = memory.available_bytes.min(info.memory_available_bytes);
        }
    }
    Ok(memory)
}

/// How activations enter products there, for reports.
pub fn activations(config: &Config) -> &'static str {
    match (&config.device, config.cpu.activations) {
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
        let sizes = |device: Device, chunk, most, batch| {
            let asked = AskedSizes { prefill_chunk_size: chunk, max_batch_tokens: most };
            let StepSizes { prefill_chunk_size, max_batch_tokens, mixed_batch_tokens } =
                device.step_sizes(asked, batch);
            (prefill_chunk_size, max_batch_tokens, mixed_batch_tokens)
        };
        let cuda = || Device::Cuda(vec![0]);
        assert_eq!(sizes(Device::Cpu, None, None, Some(64)), (512, None, None));
        assert_eq!(sizes(Device::Cpu, Some(7), Some(90), Some(64)), (7, Some(90), None));
        assert_eq!(sizes(cuda(), None, None, Some(256)), (4096, Some(8192), Some(4096)));
        assert_eq!(sizes(cuda(), None, None, Some(5000)), (4096, Some(8192), Some(5000)));
        assert_eq!(sizes(cuda(), None, None, Some(9000)), (4096, Some(9000), Some(9000)));
        assert_eq!(sizes(cuda(), Some(128), None, Some(256)), (128, Some(256), None));
        assert_eq!(sizes(cuda(), Some(128), None, None), (128, Some(128), None));
        assert_eq!(sizes(cuda(), None, Some(2048), Some(256)), (4096, Some(2048), None));
    }

    #[test]
    fn devices_are_named() {
        assert_eq!(Device::parse(Some("cpu"), Ranks::Threads(4)).unwrap(), Device::Cpu);
        assert_eq!(Device::parse(Some("cpu"), Ranks::Processes).unwrap(), Device::Cpu);
        assert!(names_gpu("cuda") && names_gpu("cuda:3") && names_gpu("cuda:3,0"));
        for text in ["gpu", "cuda:", "cuda:-1", "cuda1", "CPU", "", "cuda:1,", "cuda:,1", "cuda:1;2"] {
            assert!(!names_gpu(text));
            let message = Device::parse(Some(text), Ranks::Threads(1)).unwrap_err().to_string();
            assert!(message.contains("auto, cpu, cuda or cuda:N"), "{message}");
        }
        for (text, num_ranks) in [("cuda:99", 1), ("cuda:98,99", 2), ("cuda", 99), ("cuda:0", 99)] {
            let message = format!("{:#}", Device::parse(Some(text), Ranks::Threads(num_ranks)).unwrap_err());
            assert!(message.starts_with(&format!("device = {text}: ")), "{message}");
        }
        let message = format!("{:#}", Device::parse(Some("cuda:0,99"), Ranks::Processes).unwrap_err());
        assert!(message.starts_with("device = cuda:0,99: "), "{message}");
    }

    #[test]
    fn processes_of_a_host_share_its_gpus_out() {
        let choose = |ordinals: &[usize], local_rank, local_size| {
            let chosen = gpu_of_process(ordinals, local_rank, local_size).map_err(|error| error.to_string())?;
            Ok::<_, String>((chosen.ordinal, chosen.is_shared))
        };
        assert_eq!(choose(&[0, 1, 2, 3], 2, 3), Ok((2, false)));
        assert_eq!(choose(&[3, 1], 0, 2), Ok((3, false)));
        assert_eq!(choose(&[3, 1], 1, 2), Ok((1, false)));
        // The only one is taken whatever the place; whether that is another process's too, rank 0 sees.
        assert_eq!(choose(&[5], 3, 4), Ok((5, false)));
        assert_eq!(choose(&[0, 0], 1, 2), Ok((0, true)));
        assert_eq!(choose(&[0, 1, 0], 1, 3), Ok((1, false)));
        for (ordinals, local_rank, local_size) in [(&[0, 1][..], 2, 3), (&[0, 1], 0, 3), (&[], 0, 1)] {
            let message = choose(ordinals, local_rank, local_size).unwrap_err();
            let part = format!("{local_size} processes on this host for {} GPUs", ordinals.len());
            assert!(message.contains(&part), "{message}");
        }
    }
}
