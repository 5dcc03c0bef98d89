//! GPUs in a build with the feature `cuda`.

use super::{SumTask, SumTimes};
use crate::config::Config;
use anyhow::{Result, anyhow};
use pagemill_backend::{ActivationMode, Backend, BackendError, Collective, Norm, SoloCollective};
use pagemill_backend_cuda::{Activations, CudaBackend, CudaCollective, CudaConfig, SumBy};
use pagemill_engine::RankContext;
use std::sync::Arc;
use std::time::Instant;

/// Why there is none.
pub const NONE: &str = "no NVIDIA driver or no GPU on this machine";

/// GPUs of this machine; 0 where there is no driver.
pub fn count() -> Result<usize> {
    Ok(CudaBackend::count_devices()?)
}

/// Opens GPU `ordinal`, as what it is.
pub fn open_one(ordinal: usize, config: &Config) -> Result<CudaBackend> {
    let activations = match config.cpu.activations {
        ActivationMode::Int8 => Activations::Bf16,
        ActivationMode::F32 => Activations::F32,
    };
    Ok(CudaBackend::new(CudaConfig { ordinal, activations, deterministic: config.deterministic })?)
}

/// Opens GPU `ordinal`.
pub fn open(ordinal: usize, config: &Config) -> Result<Arc<dyn Backend>> {
    Ok(Arc::new(open_one(ordinal, config)?))
}

/// Opens a GPU for each rank, stage by stage, and connects them.
pub fn open_ranks(ordinals: &[usize], config: &Config) -> Result<Vec<RankContext>> {
    let backends: Vec<Arc<CudaBackend>> =
        ordinals.iter().map(|&ordinal| Ok(Arc::new(open_one(ordinal, config)?))).collect::<Result<_>>()?;
    let collectives: Vec<Arc<dyn Collective>> = match backends.len() {
        1 => vec![Arc::new(SoloCollective)],
        _ => CudaCollective::world(&backends, config.engine.parallel.tensor_parallel)?
            .into_iter()
            .map(|rank| Arc::new(rank) as _)
            .collect(),
    };
    let ranks = backends.into_iter().zip(collectives);
    Ok(ranks.map(|(backend, collective)| RankContext { backend, collective }).collect())
}

/// Times sums over GPUs, each way that there is for each size.
pub fn time_sums(ordinals: &[usize], config: &Config, task: &SumTask) -> Result<Vec<SumTimes>> {
    let open = |&ordinal| Ok(Arc::new(open_one(ordinal, config)?));
    let backends: Vec<Arc<CudaBackend>> = ordinals.iter().map(open).collect::<Result<_>>()?;
    let world = CudaCollective::world(&backends, ordinals.len())?;
    let mut outcomes: Vec<Result<Vec<SumTimes>>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = backends
            .iter()
            .zip(&world)
            .map(|(backend, rank)| {
                // A rank that gives up must not leave the others waiting.
                let give_up = |error: &BackendError| rank.abort(&error.to_string());
                scope.spawn(move || Ok(time_on(backend, rank, task).inspect_err(give_up)?))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| Err(anyhow!("a rank panicked")))).collect()
    });
    let first = outcomes.swap_remove(0);
    outcomes.into_iter().try_for_each(|outcome| outcome.map(|_| ()))?;
    first
}

fn time_on(backend: &CudaBackend, rank: &CudaCollective, task: &SumTask) -> Result<Vec<SumTimes>, BackendError> {
    let SumTask { cols, ref rows, calls } = *task;
    let weight = backend.load_vector("a norm to measure with", &vec![1.0; cols])?;
    let mut times = Vec::with_capacity(rows.len());
    for &rows in rows {
        let mut x = backend.activation(rows, cols)?;
        backend.copy_from_host(&vec![0.0; rows * cols], &mut x)?;
        let (mut residual, mut out) = (backend.temp(rows, cols)?, backend.activation(rows, cols)?);
        backend.copy_from_host(&vec![0.0; rows * cols], &mut residual)?;
        let calls = if rows > 1024 { calls.div_ceil(10) } else { calls };
        // The first round pays for what the others find; each ends on all ranks at the same time.
        let time = |call: &mut dyn FnMut() -> Result<bool, BackendError>| {
            let mut best = f64::INFINITY;
            for round in 0..4 {
                backend.wait()?;
                let started = Instant::now();
                for _ in 0..calls {
                    if !call()? {
                        return Ok(None);
                    }
                }
                backend.wait()?;
                if round > 0 {
                    best = best.min(started.elapsed().as_secs_f64() * 1e6 / f64::from(calls));
                }
            }
            Ok::<_, BackendError>(Some(best))
        };
        let one_shot_us = time(&mut || rank.all_reduce_by(SumBy::OneShot, &mut x))?;
        let nccl_us = time(&mut || rank.all_reduce_by(SumBy::Nccl, &mut x))?;
        let norm = Norm { weight: &weight, eps: 1e-5 };
        let fused_us = time(&mut || rank.all_reduce_add_norm(&mut x, &mut residual, norm, &mut out))?;
        let apart_us = time(&mut || {
            rank.all_reduce(&mut x)?;
            backend.add_rms_norm(&mut residual, &x, &weight, 1e-5, &mut out)?;
            Ok(true)
        })?;
        times.push(SumTimes { bytes: rows * cols * 2, one_shot_us, nccl_us, fused_us, apart_us });
    }
    Ok(times)
}
