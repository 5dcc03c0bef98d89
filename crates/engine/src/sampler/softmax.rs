//! Passes over one row of logits: the largest value, and sums of exponentials. Every pass visits the
//! row in one fixed order, so a result depends on the row alone; sums run in eight f32 lanes over
//! chunks of [`CHUNK`] and are joined in f64.
//!
//! Shape letters: `V` vocabulary.

use pagemill_backend::sampling::exp_neg;

/// Elements summed in f32 before the sum is joined in f64.
pub(crate) const CHUNK: usize = CHUNK_IDS as usize;

/// The same as a distance between token ids.
pub(crate) const CHUNK_IDS: u32 = 64;

/// A row that cannot be sampled from: it holds NaN or +∞, or nothing but −∞.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadRow;

/// The largest of `row` `[V]`. One pass.
pub(crate) fn row_max(row: &[f32]) -> Result<f32, BadRow> {
    let mut lanes = [f32::NEG_INFINITY; 8];
    let mut bad = [false; 8];
    let chunks = row.chunks_exact(8);
    let tail = chunks.remainder();
    for chunk in chunks {
        for lane in 0..8 {
            bad[lane] |= chunk[lane].is_nan() | (chunk[lane] == f32::INFINITY);
            lanes[lane] = if chunk[lane] > lanes[lane] { chunk[lane] } else { lanes[lane] };
        }
    }
    for (lane, &x) in tail.iter().enumerate() {
        bad[lane] |= x.is_nan() | (x == f32::INFINITY);
        lanes[lane] = if x > lanes[lane] { x } else { lanes[lane] };
    }
    let max = lanes.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if bad.contains(&true) || max == f32::NEG_INFINITY { Err(BadRow) } else { Ok(max) }
}

/// `Σ exp((x - max) * inv_t)` over one chunk of at most [`CHUNK`] elements.
#[inline]
pub(crate) fn chunk_sum_exp(chunk: &[f32], max: f32, inv_t: f32) -> f64 {
    let mut lanes = [0.0f32; 8];
    let exact = chunk.chunks_exact(8);
    let tail = exact.remainder();
    for part in exact {
        for lane in 0..8 {
            lanes[lane] += exp_neg((part[lane] - max) * inv_t);
        }
    }
    for (lane, &x) in tail.iter().enumerate() {
        lanes[lane] += exp_neg((x - max) * inv_t);
    }
    lanes.iter().map(|&lane| f64::from(lane)).sum()
}

/// `Σ exp((x - max) * inv_t)` over `row` `[V]`; `max` is the row's largest. One pass.
pub(crate) fn sum_exp(row: &[f32], max: f32, inv_t: f32) -> f64 {
    row.chunks(CHUNK).map(|chunk| chunk_sum_exp(chunk, max, inv_t)).sum()
}

/// `ln Σ exp(x)` over `row` `[V]`; `max` is the row's largest. One pass.
pub(crate) fn log_sum_exp(row: &[f32], max: f32) -> f64 {
    f64::from(max) + sum_exp(row, max, 1.0).ln()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::cast_possible_truncation)]
mod tests {
    use super::*;

    #[test]
    fn exponential_is_accurate_over_its_range() {
        let mut worst = 0.0f64;
        for i in 0..=870_000 {
            let x = -(i as f32) * 1e-4;
            let want = f64::from(x).exp();
            worst = worst.max((f64::from(exp_neg(x)) - want).abs() / want);
        }
        assert!(worst < 3e-7, "relative error {worst}");
        assert_eq!(exp_neg(0.0), 1.0);
        assert_eq!(exp_neg(-87.5), 0.0);
        assert_eq!(exp_neg(f32::NEG_INFINITY), 0.0);
    }

    #[test]
    fn exponential_never_rises_as_x_falls() {
        let mut last = exp_neg(0.0);
        for i in 1..200_000 {
            let next = exp_neg(-(i as f32) * 3e-4);
            assert!(next <= last, "at {i}");
            last = next;
        }
    }

    #[test]
    fn bad_rows_are_told_from_good_ones() {
        for len in [1usize, 7, 8, 9, 100] {
            let good = vec![-1.5f32; len];
            assert_eq!(row_max(&good), Ok(-1.5));
            assert_eq!(row_max(&vec![f32::NEG_INFINITY; len]), Err(BadRow));
            for at in 0..len {
                for poison in [f32::NAN, f32::INFINITY] {
                    let mut row = good.clone();
                    row[at] = poison;
                    assert_eq!(row_max(&row), Err(BadRow), "{poison} at {at} of {len}");
                }
                let mut row = vec![f32::NEG_INFINITY; len];
                row[at] = -3.0e38;
                assert_eq!(row_max(&row), Ok(-3.0e38));
            }
        }
        assert_eq!(row_max(&[]), Err(BadRow));
    }

    #[test]
    fn log_sum_exp_matches_f64() {
        let row: Vec<f32> = (0..50_001).map(|i| ((i * 7919 % 1000) as f32) * 0.03 - 15.0).collect();
        let max = row_max(&row).unwrap();
        let want = f64::from(max) + row.iter().map(|&x| (f64::from(x) - f64::from(max)).exp()).sum::<f64>().ln();
        assert!((log_sum_exp(&row, max) - want).abs() < 1e-6);
    }
}
