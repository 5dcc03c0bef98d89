//! The random number of one token: a counter-based hash of (seed, choice, position in the output).
//! Nothing else enters, so neither the batch, nor a preemption, nor the other choices can change it.

/// A number in [0, 1) with 53 random bits.
pub(crate) fn uniform(seed: u64, choice: u32, position: usize) -> f64 {
    let mut state = mix(seed ^ 0x9e37_79b9_7f4a_7c15);
    state = mix(state ^ u64::from(choice).wrapping_mul(0xd1b5_4a32_d192_ed03));
    state = mix(state.wrapping_add((position as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    (state >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// A bijection that spreads every input bit over all output bits (Stafford's variant 13 of the
/// MurmurHash3 finaliser, as in SplitMix64).
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
mod tests {
    use super::*;

    /// Chi-square over 64 cells along each of the three coordinates: the 99.99 % quantile at 63
    /// degrees of freedom is 113.
    #[test]
    fn draws_are_uniform_along_every_coordinate() {
        let along: [(&str, &dyn Fn(u64) -> f64); 3] = [
            ("seed", &|i| uniform(i, 0, 0)),
            ("choice", &|i| uniform(42, i as u32, 3)),
            ("position", &|i| uniform(42, 1, i as usize)),
        ];
        for (name, draw) in along {
            let mut cells = [0u32; 64];
            let count = 64_000;
            for i in 0..count {
                let u = draw(i);
                assert!((0.0..1.0).contains(&u));
                cells[(u * 64.0) as usize] += 1;
            }
            let expected = count as f64 / 64.0;
            let chi2: f64 = cells.iter().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum();
            assert!(chi2 < 113.0, "{name}: chi-square {chi2}");
        }
    }

    #[test]
    fn neighbouring_draws_do_not_correlate() {
        let n = 50_000;
        type Pair<'a> = &'a dyn Fn(u64) -> (f64, f64);
        let pairs: [(&str, Pair<'_>); 3] = [
            ("seed", &|i| (uniform(i, 0, 0), uniform(i + 1, 0, 0))),
            ("choice", &|i| (uniform(i, 0, 5), uniform(i, 1, 5))),
            ("position", &|i| (uniform(7, 0, i as usize), uniform(7, 0, i as usize + 1))),
        ];
        for (name, pair) in pairs {
            let covariance: f64 = (0..n).map(pair).map(|(a, b)| (a - 0.5) * (b - 0.5)).sum::<f64>() / n as f64;
            // Standard deviation 1/12/sqrt(n) = 3.7e-4.
            assert!(covariance.abs() < 1.5e-3, "{name}: covariance {covariance}");
        }
    }
}
