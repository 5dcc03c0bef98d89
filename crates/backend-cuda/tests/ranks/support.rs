//! What these tests share: worlds of GPUs, ranks on threads, seeded numbers.

use pagemill_backend::{Backend, Tensor};
use pagemill_backend_cuda::{Activations, CudaBackend, CudaCollective, CudaConfig};
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

/// Past the test harness, which would hold it back.
pub fn say(line: &str) {
    writeln!(std::io::stderr(), "{line}").unwrap();
}

/// One test at a time: ranks that wait on a GPU take room from those of other tests. Held to a test's end.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    static EAGER: Once = Once::new();
    let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Ranks that share a GPU: a kernel that is loaded late would wait for those that wait for it.
    // SAFETY: once, before the driver is loaded, and under the standard library's lock.
    EAGER.call_once(|| unsafe { std::env::set_var("CUDA_MODULE_LOADING", "EAGER") });
    guard
}

/// GPUs for `count` ranks: one each, or all on the first where there are fewer. `None`, said, where there is none.
fn ordinals(count: usize) -> Option<Vec<usize>> {
    let found = CudaBackend::count_devices().unwrap();
    if found == 0 {
        say("no GPU on this machine: not tested here");
        return None;
    }
    if found < count {
        say(&format!("{count} ranks share the one GPU that there is"));
        return Some(vec![0; count]);
    }
    Some((0..count).collect())
}

/// A rank and its device.
pub struct Rank {
    pub backend: Arc<CudaBackend>,
    pub collective: Arc<CudaCollective>,
}

/// Ranks on GPUs, stage by stage, or `None` where there is no GPU or no NCCL.
pub fn world(stages: usize, ranks_per_stage: usize, activations: Activations) -> Option<Vec<Rank>> {
    let open = |ordinal| Arc::new(CudaBackend::new(CudaConfig { ordinal, activations, deterministic: false }).unwrap());
    let backends: Vec<Arc<CudaBackend>> = ordinals(stages * ranks_per_stage)?.into_iter().map(open).collect();
    match CudaCollective::world(&backends, ranks_per_stage) {
        Ok(world) => {
            let ranks = backends.into_iter().zip(world);
            Some(ranks.map(|(backend, rank)| Rank { backend, collective: Arc::new(rank) }).collect())
        }
        Err(error) if error.to_string().contains("no libnccl.so.2") => {
            say(&format!("{error}: not tested here"));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Whether NCCL cannot be used.
pub fn share_a_gpu(ranks: &[Rank]) -> bool {
    ranks.len() > CudaBackend::count_devices().unwrap()
}

/// Calls `work` with each rank on a thread of its own: the results in rank order.
pub fn on_all<T: Send>(ranks: &[Rank], work: impl Fn(usize, &Rank) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = ranks.iter().enumerate().map(|(at, rank)| scope.spawn(move || work(at, rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// An activation with these elements.
pub fn activation(backend: &dyn Backend, rows: usize, cols: usize, data: &[f32]) -> Tensor {
    let mut x = backend.activation(rows, cols).unwrap();
    backend.copy_from_host(data, &mut x).unwrap();
    x
}

/// An f32 tensor with these elements.
pub fn tensor(backend: &dyn Backend, rows: usize, cols: usize, data: &[f32]) -> Tensor {
    let mut x = backend.temp(rows, cols).unwrap();
    backend.copy_from_host(data, &mut x).unwrap();
    x
}

/// The elements.
pub fn host(backend: &dyn Backend, x: &Tensor) -> Vec<f32> {
    let mut out = vec![0.0; x.rows() * x.cols()];
    backend.to_host(x, &mut out).unwrap();
    out
}

/// As the device's activations hold it.
pub fn rounded(activations: Activations, x: f32) -> f32 {
    match activations {
        Activations::F32 => x,
        Activations::Bf16 => half::bf16::from_f32(x).to_f32(),
    }
}

/// Numbers between -1 and 1, the same for the same seed (xorshift64*).
pub fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..count)
        .map(|_| {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// The bits, for comparisons.
pub fn bits(data: &[f32]) -> Vec<u32> {
    data.iter().map(|x| x.to_bits()).collect()
}
