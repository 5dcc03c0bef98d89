//! The layers' cuts: ranks that each hold a share of the weights give what one rank gives.
#![allow(clippy::unwrap_used)] // tests

mod harness;

use harness::regrouped::regrouped;
use harness::{Rig, golden, ids, zoo};
use pagemill_backend::{ActivationMode, Backend, BackendError, Collective, CpuBackend, CpuConfig, DType, Tensor};
use pagemill_formats::Checkpoint;
use pagemill_model::{ParallelMode, RankContext, load, load_stage, plan_stages, read_spec};
use std::path::Path;
use std::sync::{Arc, Barrier, Mutex};

/// What the ranks of one stage share.
struct Exchange {
    barrier: Barrier,
    contributions: Mutex<Vec<Vec<f32>>>,
}

/// One rank's collective: everyone writes down what it has, then reads what all have.
struct Local {
    rank: usize,
    world_size: usize,
    backend: Arc<CpuBackend>,
    exchange: Arc<Exchange>,
}

impl Local {
    /// The contributions of all ranks, in rank order.
    fn exchange(&self, x: &Tensor) -> Result<Vec<Vec<f32>>, BackendError> {
        let mut mine = vec![0.0; x.rows() * x.cols()];
        self.backend.to_host(x, &mut mine)?;
        self.exchange.contributions.lock().unwrap()[self.rank] = mine;
        self.exchange.barrier.wait();
        let all = self.exchange.contributions.lock().unwrap().clone();
        self.exchange.barrier.wait();
        Ok(all)
    }
}

impl Collective for Local {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_reduce(&self, x: &mut Tensor) -> Result<(), BackendError> {
        let mut parts = self.exchange(x)?.into_iter();
        let mut sum = parts.next().unwrap();
        for part in parts {
            sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
        }
        self.backend.copy_from_host(&sum, x)
    }

    fn all_gather_cols(&self, x: &Tensor, out: &mut Tensor) -> Result<(), BackendError> {
        let parts = self.exchange(x)?;
        let rows = |row: usize| parts.iter().flat_map(move |part| &part[row * x.cols()..(row + 1) * x.cols()]);
        let gathered: Vec<f32> = (0..x.rows()).flat_map(rows).copied().collect();
        self.backend.copy_from_host(&gathered, out)
    }

    fn send(&self, _x: &Tensor, _peer: usize) -> Result<(), BackendError> {
        Err(BackendError::Collective { op: "send", detail: "one stage only".into() })
    }

    fn recv(&self, _out: &mut Tensor, _peer: usize) -> Result<(), BackendError> {
        Err(BackendError::Collective { op: "recv", detail: "one stage only".into() })
    }
}

fn ranks(world_size: usize) -> Vec<RankContext> {
    let exchange = Arc::new(Exchange {
        barrier: Barrier::new(world_size),
        contributions: Mutex::new(vec![Vec::new(); world_size]),
    });
    (0..world_size)
        .map(|rank| {
            let config = CpuConfig { num_threads: Some(1), ..CpuConfig::default() };
            let backend = Arc::new(CpuBackend::new(config).unwrap());
            let collective = Local { rank, world_size, backend: backend.clone(), exchange: exchange.clone() };
            RankContext { backend, collective: Arc::new(collective) }
        })
        .collect()
}

/// Log-probabilities of the document's beginning, from every rank.
fn logprobs(model: &Path, world_size: usize, tokens: &[u32]) -> Vec<Vec<Vec<f64>>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks(world_size)
            .into_iter()
            .map(|cx| {
                scope.spawn(move || {
                    let mut rig = Rig::with_context(model, cx, DType::F32, tokens.len());
                    let mut sequence = rig.sequence();
                    rig.logprobs(&mut sequence, tokens, 64)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn two_and_four_ranks_give_what_one_gives() {
    for name in harness::ZOO {
        let tokens = &ids(&golden(name)["document"]["ids"])[..150];
        let solo = logprobs(&zoo(name), 1, tokens).remove(0);
        for world_size in [2, 4] {
            check_ranks(name, &zoo(name), world_size, tokens, &solo);
        }
    }
}

fn check_ranks(name: &str, model: &Path, world_size: usize, tokens: &[u32], solo: &[Vec<f64>]) {
    let ranks = logprobs(model, world_size, tokens);
    assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{name}: ranks agree bit for bit");
    let differences = ranks[0].iter().flatten().zip(solo.iter().flatten()).map(|(a, b)| (a - b).abs());
    let worst = differences.fold(0.0, f64::max);
    assert!(worst < 5e-4, "{name} on {world_size} ranks: log-probabilities differ by {worst}");
}

/// Three KV heads over two ranks, four over three, and such as do not come out even with one rank either.
#[test]
fn ranks_of_unlike_numbers_of_heads_give_what_one_gives() {
    for name in harness::ZOO {
        let tokens = &ids(&golden(name)["document"]["ids"])[..150];
        let as_trained = logprobs(&zoo(name), 1, tokens).remove(0);
        let has_one_kv_head = name == "gemma3";
        let layouts: [(&[usize], &[usize]); 2] = match has_one_kv_head {
            true => [(&[0, 0, 0], &[1, 2, 3]), (&[0; 4], &[3])],
            false => [(&[0, 1, 0], &[1, 2, 3]), (&[0, 1, 1, 0], &[3])],
        };
        for (kv_heads, worlds) in layouts {
            let folder = regrouped(&zoo(name), kv_heads);
            for &world_size in worlds {
                let what = format!("{name} of {} KV heads", kv_heads.len());
                check_ranks(&what, folder.path(), world_size, tokens, &as_trained);
            }
        }
    }
}

#[test]
fn ranks_hold_shares_of_the_weights() {
    let checkpoint = Checkpoint::open(&zoo("llama")).unwrap();
    let bytes = |world_size: usize| -> Vec<u64> {
        ranks(world_size).iter().map(|cx| load(&checkpoint, cx, &|_| {}).unwrap().weight_bytes()).collect()
    };
    let (solo, pair) = (bytes(1)[0], bytes(2));
    assert_eq!(pair[0], pair[1]);
    // The embedding and the norms are whole on each rank; all else is halved.
    assert!(pair[0] < solo * 6 / 10, "{} of {solo} bytes", pair[0]);
    // Of three KV heads of 32 features, with two query heads each, the first rank has two.
    let folder = regrouped(&zoo("llama"), &[0, 1, 0]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let spec = read_spec(&checkpoint).unwrap();
    assert_eq!((spec.kv_heads_by_rank(2).unwrap(), spec.kv_heads_by_rank(6).unwrap()), (vec![2, 1], vec![1; 6]));
    let pair: Vec<u64> = ranks(2).iter().map(|cx| load(&checkpoint, cx, &|_| {}).unwrap().weight_bytes()).collect();
    let kv_head_bytes = spec.num_layers as u64 * 32 * (2 + 1 + 1 + 2) * 128 * 4;
    assert_eq!(pair[0], pair[1] + kv_head_bytes);
}

/// Stages read and hold their own layers; a tied embedding is on both ends.
#[test]
fn stages_hold_their_own_part() {
    for (name, is_tied) in [("llama", false), ("gemma3", true)] {
        let checkpoint = Checkpoint::open(&zoo(name)).unwrap();
        let spec = read_spec(&checkpoint).unwrap();
        let stages = plan_stages(&checkpoint, ParallelMode { tensor_parallel: 1, pipeline_parallel: 2 }).unwrap();
        let cx = harness::context(ActivationMode::default());
        let whole = load(&checkpoint, &cx, &|_| {}).unwrap().weight_bytes();
        let (mut held, mut read) = (0, 0);
        for stage in &stages {
            let last = std::cell::Cell::new(0);
            let model = load_stage(&checkpoint, &cx, stage, &|progress| last.set(progress.bytes_done)).unwrap();
            assert_eq!((model.stage(), model.spec()), (stage, &spec));
            held += model.weight_bytes();
            read += last.get();
        }
        let embedding = checkpoint.weights().get("model.embed_tokens.weight").unwrap().num_bytes();
        let twice = if is_tied { embedding } else { 0 };
        assert_eq!((held, read), (whole + twice, spec.stored_bytes + twice), "{name}");
    }
}

#[test]
fn a_cut_that_cannot_be_made_names_the_tensor() {
    let checkpoint = Checkpoint::open(&zoo("llama")).unwrap();
    let error = load(&checkpoint, &ranks(3)[0], &|_| {}).map(|_| ()).unwrap_err().to_string();
    assert!(
        error.contains("\"model.layers.0.self_attn.q_proj.weight\": 4 query heads and 2 KV heads do not divide over 3"),
        "{error}"
    );
}
