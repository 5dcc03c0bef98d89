//! Sums, gathers and transfers against the host's, to the bit, and what happens when a rank is lost.

use crate::support::{Rank, activation, alone, bits, host, numbers, on_all, rounded, say, share_a_gpu, tensor, world};
use pagemill_backend::{Backend, Collective, Norm};
use pagemill_backend_cuda::{Activations, SumBy};
use std::time::{Duration, Instant};

const BOTH: [Activations; 2] = [Activations::F32, Activations::Bf16];
/// Rows and columns of what is summed: odd and even, small, at the ends of what one launch takes, and beyond.
const SHAPES: [(usize, usize); 10] =
    [(1, 4), (1, 64), (3, 100), (1, 4096), (17, 1000), (64, 4096), (65, 4096), (128, 64), (130, 2052), (7, 33)];

fn part(rank: usize, round: usize, activations: Activations, count: usize) -> Vec<f32> {
    let data = numbers((rank * 1000 + round) as u64 + 1, count);
    data.into_iter().map(|x| rounded(activations, x)).collect()
}

/// In rank order, in f32, rounded at the end.
fn sum(num_ranks: usize, round: usize, activations: Activations, count: usize) -> Vec<f32> {
    let mut sum = part(0, round, activations, count);
    for rank in 1..num_ranks {
        sum.iter_mut().zip(part(rank, round, activations, count)).for_each(|(sum, x)| *sum += x);
    }
    sum.into_iter().map(|x| rounded(activations, x)).collect()
}

fn check_sums(ranks: &[Rank], activations: Activations) {
    for way in [None, Some(SumBy::OneShot), Some(SumBy::Nccl)] {
        if way == Some(SumBy::Nccl) && share_a_gpu(ranks) {
            continue;
        }
        for (rows, cols) in SHAPES {
            if !(rows * cols).is_multiple_of(4) && share_a_gpu(ranks) {
                continue; // refused there
            }
            let results = on_all(ranks, |at, rank| {
                // Several in a row, so that inboxes come round again while others still read.
                (0..5)
                    .map(|round| {
                        let data = part(at, round, activations, rows * cols);
                        let mut x = activation(&*rank.backend, rows, cols, &data);
                        let is_taken = match way {
                            None => rank.collective.all_reduce(&mut x).map(|()| true),
                            Some(way) => rank.collective.all_reduce_by(way, &mut x),
                        };
                        is_taken.unwrap().then(|| host(&*rank.backend, &x))
                    })
                    .collect::<Vec<_>>()
            });
            for (at, rounds) in results.iter().enumerate() {
                for (round, got) in rounds.iter().enumerate() {
                    let Some(got) = got else {
                        assert_eq!(way, Some(SumBy::OneShot), "the other ways take everything");
                        continue;
                    };
                    let want = sum(ranks.len(), round, activations, rows * cols);
                    // Two parts have one sum; of more, NCCL takes another order.
                    if ranks.len() <= 2 || way == Some(SumBy::OneShot) {
                        assert_eq!(bits(got), bits(&want), "{way:?} {rows} x {cols}, rank {at}, round {round}");
                    }
                    assert_eq!(bits(got), bits(results[0][round].as_ref().unwrap()), "ranks differ");
                }
            }
        }
    }
}

#[test]
fn one_rank_over_nccl() {
    let _alone = alone();
    for activations in BOTH {
        let Some(ranks) = world(1, 1, activations) else { return };
        check_sums(&ranks, activations);
        let data = numbers(1, 12);
        let rank = &ranks[0];
        let x = tensor(&*rank.backend, 3, 4, &data);
        let mut out = tensor(&*rank.backend, 3, 4, &[f32::NAN; 12]);
        rank.collective.all_gather_cols(&x, &mut out).unwrap();
        assert_eq!(host(&*rank.backend, &out), data);
    }
}

#[test]
fn two_ranks_sum_to_the_bit() {
    let _alone = alone();
    for activations in BOTH {
        let Some(ranks) = world(1, 2, activations) else { return };
        check_sums(&ranks, activations);
    }
}

/// One launch against the sum, then the addition with the norm: the same bits, on both ranks.
#[test]
fn sums_are_added_and_normed() {
    let _alone = alone();
    for activations in BOTH {
        let Some(ranks) = world(1, 2, activations) else { return };
        for (rows, cols) in [(1, 64), (1, 4096), (5, 2880), (16, 8192), (64, 4096), (33, 100), (2, 8196), (129, 64)] {
            let results = on_all(&ranks, |at, rank| {
                let backend = &*rank.backend;
                let weight = backend.load_vector("norm", &numbers(9, cols)).unwrap();
                let before = numbers(7, rows * cols);
                let apart = {
                    let mut x = activation(backend, rows, cols, &part(at, 0, activations, rows * cols));
                    let mut residual = tensor(backend, rows, cols, &before);
                    let mut out = activation(backend, rows, cols, &vec![f32::NAN; rows * cols]);
                    rank.collective.all_reduce(&mut x).unwrap();
                    backend.add_rms_norm(&mut residual, &x, &weight, 1e-5, &mut out).unwrap();
                    (bits(&host(backend, &residual)), bits(&host(backend, &out)))
                };
                let mut x = activation(backend, rows, cols, &part(at, 0, activations, rows * cols));
                let mut residual = tensor(backend, rows, cols, &before);
                let mut out = activation(backend, rows, cols, &vec![f32::NAN; rows * cols]);
                let norm = Norm { weight: &weight, eps: 1e-5 };
                let is_taken = rank.collective.all_reduce_add_norm(&mut x, &mut residual, norm, &mut out).unwrap();
                let fused = (bits(&host(backend, &residual)), bits(&host(backend, &out)));
                (is_taken, apart, fused)
            });
            let (is_taken, apart, _) = &results[0];
            for (taken, own, fused) in &results {
                assert_eq!(taken, is_taken);
                assert_eq!(own, apart, "{rows} x {cols}: ranks differ");
                if *taken {
                    assert_eq!(fused, apart, "{activations:?} {rows} x {cols}: one launch differs from two");
                }
            }
            let size = if activations == Activations::F32 { 4 } else { 2 };
            let fits = cols <= 8192 && rows <= 128 && rows * cols * size <= 512 << 10;
            say(&format!("{activations:?} {rows} x {cols}: in one launch {is_taken}"));
            assert!(fits || !is_taken);
        }
    }
}

/// Many sums in a row with nothing between them: nobody overwrites what a peer still reads.
#[test]
fn sums_follow_each_other_closely() {
    let _alone = alone();
    let Some(ranks) = world(1, 2, Activations::F32) else { return };
    let (rows, cols, calls) = (4, 4096, 2000);
    let results = on_all(&ranks, |at, rank| {
        let mut x = tensor(&*rank.backend, rows, cols, &vec![(at + 1) as f32; rows * cols]);
        for call in 0..calls {
            rank.collective.all_reduce(&mut x).unwrap();
            // Back to what each began with, but for the rounding: the sum is 3 on both.
            rank.backend.scale(&mut x, (at + 1) as f32 / 3.0).unwrap();
            if call % 97 == at {
                rank.backend.wait().unwrap();
            }
        }
        host(&*rank.backend, &x)
    });
    for (at, got) in results.iter().enumerate() {
        let want = (at + 1) as f32;
        assert!(got.iter().all(|x| (x - want).abs() < 1e-3), "rank {at}: {:?}", &got[..4]);
    }
}

#[test]
fn columns_come_in_rank_order() {
    let _alone = alone();
    let Some(ranks) = world(1, 2, Activations::Bf16) else { return };
    for (rows, cols) in [(1, 6), (1, 64128), (8, 33), (256, 100)] {
        let results = on_all(&ranks, |at, rank| {
            let x = tensor(&*rank.backend, rows, cols, &numbers(at as u64, rows * cols));
            let mut out = tensor(&*rank.backend, rows, 2 * cols, &vec![f32::NAN; 2 * rows * cols]);
            rank.collective.all_gather_cols(&x, &mut out).unwrap();
            host(&*rank.backend, &out)
        });
        let parts = [numbers(0, rows * cols), numbers(1, rows * cols)];
        let want: Vec<f32> = (0..rows)
            .flat_map(|row| parts.iter().flat_map(move |p| p[row * cols..(row + 1) * cols].to_vec()))
            .collect();
        for got in results {
            assert_eq!(bits(&got), bits(&want), "{rows} x {cols}");
        }
    }
}

#[test]
fn hidden_states_arrive_in_order() {
    let _alone = alone();
    let Some(ranks) = world(2, 1, Activations::Bf16) else { return };
    let shapes = [(1, 64), (512, 4096), (3, 64), (1, 64), (64, 512), (64, 512), (2, 4)];
    let results = on_all(&ranks, |stage, rank| {
        let backend = &*rank.backend;
        shapes
            .iter()
            .enumerate()
            .map(|(round, &(rows, cols))| {
                if stage == 0 {
                    let x = tensor(backend, rows, cols, &numbers(round as u64, rows * cols));
                    rank.collective.send(&x, 1).unwrap();
                    return vec![];
                }
                let mut x = tensor(backend, rows, cols, &vec![f32::NAN; rows * cols]);
                rank.collective.recv(&mut x, 0).unwrap();
                host(backend, &x)
            })
            .collect::<Vec<_>>()
    });
    for (round, (rows, cols)) in shapes.into_iter().enumerate() {
        assert_eq!(bits(&results[1][round]), bits(&numbers(round as u64, rows * cols)), "round {round}");
    }
    assert!(ranks[0].collective.recv(&mut tensor(&*ranks[0].backend, 1, 4, &[0.0; 4]), 1).is_err());
    assert!(ranks[0].collective.send(&tensor(&*ranks[0].backend, 1, 4, &[0.0; 4]), 2).is_err());
}

/// Both kinds of sums: the other rank is told of the loss while its GPU waits.
#[test]
fn a_lost_rank_ends_the_others_waits() {
    let _alone = alone();
    for (rows, what) in [(1, "one launch"), (4096, "NCCL")] {
        let Some(ranks) = world(1, 2, Activations::Bf16) else { return };
        let started = Instant::now();
        let mut late = activation(&*ranks[0].backend, 1, 64, &[1.0; 64]);
        let outcomes = on_all(&ranks, |at, rank| {
            if at == 1 {
                std::thread::sleep(Duration::from_millis(300));
                rank.collective.abort("rank 1 is out of paper");
                return rank.backend.wait().map_err(|error| error.to_string());
            }
            let mut x = activation(&*rank.backend, rows, 4096, &vec![1.0; rows * 4096]);
            rank.collective.all_reduce(&mut x).unwrap();
            rank.backend.wait().map_err(|error| error.to_string())
        });
        for outcome in outcomes {
            let error = outcome.unwrap_err();
            assert!(error.contains("rank 1 is out of paper"), "{what}: {error}");
        }
        assert!(started.elapsed() < Duration::from_secs(5), "{what}: {:?}", started.elapsed());
        assert!(ranks[0].collective.all_reduce(&mut late).is_err(), "{what}: called again");
    }
}

/// A rank that never comes: the wait ends by itself, with a sentence.
#[test]
fn a_rank_that_hangs_is_told() {
    let _alone = alone();
    for (rows, what) in [(1, "all-reduce"), (4096, "a collective")] {
        let Some(ranks) = world(1, 2, Activations::Bf16) else { return };
        let started = Instant::now();
        let mut x = activation(&*ranks[0].backend, rows, 4096, &vec![1.0; rows * 4096]);
        ranks[0].collective.all_reduce(&mut x).unwrap();
        // The watch carries the verdict out a little later than the kernel gives up.
        let error = loop {
            match ranks[0].backend.wait() {
                Err(error) => break error.to_string(),
                Ok(()) => std::thread::sleep(Duration::from_millis(5)),
            }
            assert!(started.elapsed() < Duration::from_secs(10), "{what}: nobody was told");
        };
        assert!(started.elapsed() < Duration::from_secs(10), "{what}: {:?}", started.elapsed());
        assert!(error.contains(what) || share_a_gpu(&ranks), "{error}");
        assert!(error.contains("rank 0") && error.contains("8 s"), "{error}");
        say(&format!("{what}: {error} after {:?}", started.elapsed()));
    }
}
