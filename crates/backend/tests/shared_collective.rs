//! Collectives between threads: sums and gathers against plain loops, hidden states in order, and the
//! end of a world.
#![allow(clippy::unwrap_used, clippy::cast_precision_loss, clippy::cast_possible_truncation)] // tests

use pagemill_backend::{Backend, BackendError, Collective, CpuBackend, CpuConfig, SharedCollective, Tensor};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

fn backend() -> CpuBackend {
    CpuBackend::new(CpuConfig { num_threads: Some(1), ..CpuConfig::default() }).unwrap()
}

/// Values whose sum depends on its order.
fn value(rank: usize, round: usize, at: usize) -> f32 {
    let sign = if (at + rank).is_multiple_of(2) { 1.0 } else { -1.0 };
    sign * (1.0 + at as f32) * 10f32.powi((rank as i32 * 3 + round as i32) % 7)
}

fn tensor(backend: &CpuBackend, rows: usize, cols: usize, value: impl Fn(usize) -> f32) -> Tensor {
    let mut tensor = backend.temp(rows, cols).unwrap();
    let data: Vec<f32> = (0..rows * cols).map(value).collect();
    backend.copy_from_host(&data, &mut tensor).unwrap();
    tensor
}

fn host(backend: &CpuBackend, tensor: &Tensor) -> Vec<f32> {
    let mut data = vec![0.0; tensor.rows() * tensor.cols()];
    backend.to_host(tensor, &mut data).unwrap();
    data
}

/// Runs `body` on every rank, each on a thread and a device of its own.
fn on_ranks<T: Send>(world: Vec<SharedCollective>, body: impl Fn(&CpuBackend, SharedCollective) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = world.into_iter().map(|rank| scope.spawn(|| body(&backend(), rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn sums_run_in_rank_order_at_every_size() {
    // Through mailboxes, on the border, and in place with slices that do not come out even.
    let sizes = [(1, 1), (3, 7), (1, 576), (16, 1024), (17, 1024), (33, 1111)];
    for num_ranks in [2, 3, 4] {
        on_ranks(SharedCollective::world(num_ranks, 1), |backend, ranks| {
            for (round, (rows, cols)) in sizes.into_iter().cycle().take(30).enumerate() {
                let mut x = tensor(backend, rows, cols, |at| value(ranks.rank(), round, at));
                ranks.all_reduce(&mut x).unwrap();
                for (at, got) in host(backend, &x).into_iter().enumerate() {
                    let want = (1..num_ranks).fold(value(0, round, at), |sum, rank| sum + value(rank, round, at));
                    assert_eq!(got.to_bits(), want.to_bits(), "{num_ranks} ranks, {rows} x {cols}, element {at}");
                }
            }
        });
    }
}

#[test]
fn columns_come_in_rank_order() {
    on_ranks(SharedCollective::world(3, 1), |backend, ranks| {
        for (rows, cols) in [(1, 5), (4, 3), (0, 3), (32, 170)] {
            let x = tensor(backend, rows, cols, |at| value(ranks.rank(), 0, at));
            let mut out = backend.temp(rows, cols * 3).unwrap();
            ranks.all_gather_cols(&x, &mut out).unwrap();
            let want: Vec<f32> = (0..rows)
                .flat_map(|row| (0..3 * cols).map(move |at| value(at / cols, 0, row * cols + at % cols)))
                .collect();
            assert_eq!(host(backend, &out), want);
        }
    });
}

#[test]
fn hidden_states_arrive_in_order_between_equal_ranks() {
    const ROUNDS: usize = 200;
    on_ranks(SharedCollective::world(2, 3), |backend, ranks| {
        for round in 0..ROUNDS {
            let rows = 1 + round % 5;
            let fresh = tensor(backend, rows, 64, |at| value(ranks.rank(), round, at));
            let mut x = tensor(backend, rows, 64, |_| 0.0);
            match ranks.stage() {
                0 => ranks.send(&fresh, 1).unwrap(),
                1 => {
                    ranks.recv(&mut x, 0).unwrap();
                    ranks.send(&x, 2).unwrap();
                }
                _ => {
                    ranks.recv(&mut x, 1).unwrap();
                    assert_eq!(host(backend, &x), host(backend, &fresh));
                }
            }
        }
        let error = ranks.send(&backend.temp(1, 1).unwrap(), 5).unwrap_err().to_string();
        assert!(error.contains("no link to stage 5"), "{error}");
    });
}

#[test]
fn a_tensor_of_another_size_is_refused() {
    on_ranks(SharedCollective::world(1, 2), |backend, ranks| {
        let x = tensor(backend, 3, 2, |at| at as f32);
        if ranks.stage() == 0 {
            ranks.send(&x, 1).unwrap();
            return ranks.send(&x, 1).unwrap();
        }
        let error = ranks.recv(&mut backend.temp(2, 2).unwrap(), 0).unwrap_err().to_string();
        assert!(error.contains("6 elements") && error.contains("[2, 2]"), "{error}");
        let mut right = backend.temp(3, 2).unwrap();
        ranks.recv(&mut right, 0).unwrap();
        assert_eq!(host(backend, &right), host(backend, &x));
    });
}

/// What a lost rank must not leave waiting.
#[test]
fn an_abort_ends_every_wait() {
    let started = Instant::now();
    for what in ["sum by mail", "sum in place", "gather", "send", "recv"] {
        let num_waiting = AtomicUsize::new(0);
        let errors = on_ranks(SharedCollective::world(3, 2), |backend, ranks| {
            if ranks.rank() == 2 && ranks.stage() == 1 {
                while num_waiting.load(Ordering::SeqCst) < 5 {
                    std::thread::yield_now();
                }
                std::thread::sleep(Duration::from_millis(5));
                ranks.abort("rank 5 is lost");
                ranks.abort("a later reason");
                return ranks.all_reduce(&mut backend.temp(1, 1).unwrap()).unwrap_err();
            }
            num_waiting.fetch_add(1, Ordering::SeqCst);
            do_until_error(what, backend, &ranks)
        });
        for error in errors {
            assert!(matches!(&error, BackendError::Collective { detail, .. } if detail == "rank 5 is lost"), "{error}");
        }
    }
    assert!(started.elapsed() < Duration::from_secs(5));
}

/// Does `what` until it fails, for want of the rank that is lost: stage 0 is ahead, then its links are
/// full; stage 1 waits for its third rank, or for hidden states that never come.
fn do_until_error(what: &str, backend: &CpuBackend, ranks: &SharedCollective) -> BackendError {
    loop {
        let done = match (what, ranks.stage()) {
            ("sum in place", _) => ranks.all_reduce(&mut backend.temp(40, 1024).unwrap()),
            ("gather", _) => ranks.all_gather_cols(&backend.temp(2, 4).unwrap(), &mut backend.temp(2, 12).unwrap()),
            ("send", 0) => ranks.send(&backend.temp(1, 1).unwrap(), 1),
            ("recv", 1) => ranks.recv(&mut backend.temp(1, 1).unwrap(), 0),
            _ => ranks.all_reduce(&mut backend.temp(1, 64).unwrap()),
        };
        if let Err(error) = done {
            return error;
        }
    }
}

#[test]
fn ranks_out_of_step_are_an_error_on_all() {
    let errors = on_ranks(SharedCollective::world(2, 1), |backend, ranks| {
        let cols = 4 + ranks.rank();
        let by_mail = ranks.all_reduce(&mut backend.temp(1, cols).unwrap()).unwrap_err();
        let mixed = match ranks.rank() {
            0 => ranks.all_reduce(&mut backend.temp(64, 1024).unwrap()).unwrap_err(),
            _ => ranks
                .all_gather_cols(&backend.temp(64, 1024).unwrap(), &mut backend.temp(64, 2048).unwrap())
                .unwrap_err(),
        };
        (by_mail.to_string(), mixed.to_string())
    });
    for (by_mail, mixed) in errors {
        assert!(by_mail.contains("4 (call kind 0), 5 (call kind 0)"), "{by_mail}");
        assert!(mixed.contains("65536 (call kind 1), 65536 (call kind 2)"), "{mixed}");
    }
}

#[test]
fn threads_are_shared_out() {
    let shares = |threads, ranks| -> Vec<usize> {
        let whole = CpuConfig { num_threads: Some(threads), ..CpuConfig::default() };
        whole.divided(ranks).into_iter().map(|config| config.num_threads.unwrap()).collect()
    };
    assert_eq!(shares(8, 3), [3, 3, 2]);
    assert_eq!(shares(2, 4), [1, 1, 1, 1]);
    assert_eq!(shares(5, 1), [5]);
    let _: Arc<dyn Collective> = Arc::new(SharedCollective::world(1, 1).remove(0));
}
