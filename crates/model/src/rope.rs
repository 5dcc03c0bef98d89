//! Rotary frequencies: from settings to a [`RopeTable`]. Pure functions; knows no file and no device.
//!
//! RoPE is arXiv 2104.09864; linear interpolation arXiv 2306.15595; YaRN arXiv 2309.00071; the llama3
//! scaling is the one published with Llama 3.1. The formulas are transformers' (version 5), worked in
//! f64 and rounded once.

use pagemill_backend::{RopeStyle, RopeTable};
use std::f64::consts::{PI, TAU};

/// How the frequencies are stretched beyond the context that the model was trained on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RopeScaling {
    /// As trained.
    Default,
    /// All frequencies divided by `factor`.
    Linear {
        /// Context stretch.
        factor: f64,
    },
    /// Low frequencies divided by `factor`, high ones kept, a ramp between.
    Llama3 {
        /// Context stretch.
        factor: f64,
        /// Wavelengths longer than `original_len / low_freq_factor` are stretched in full.
        low_freq_factor: f64,
        /// Wavelengths shorter than `original_len / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Positions of the original training.
        original_len: f64,
    },
    /// A ramp over dimensions, and cos and sin multiplied by `magnitude`.
    Yarn {
        /// Context stretch.
        factor: f64,
        /// Positions of the original training.
        original_len: f64,
        /// Dimensions turning more often than this are kept.
        beta_fast: f64,
        /// Dimensions turning less often than this are stretched in full.
        beta_slow: f64,
        /// Whether the ramp's ends are rounded to whole dimensions.
        truncate: bool,
        /// The attention factor.
        magnitude: f64,
    },
}

/// Rope of one kind of layer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RopeSettings {
    /// The base of the frequencies.
    pub theta: f64,
    /// Elements of a head that turn: even, at most the head's size.
    pub rotary_dim: usize,
    /// Stretch.
    pub scaling: RopeScaling,
    /// Multiplies cos and sin besides yarn's own factor (GGUF's `attn_factor`; 1 elsewhere).
    pub magnitude: f64,
}

/// YaRN's attention factor for a stretch of `factor`: `0.1 · mscale · ln(factor) + 1`, 1 when not
/// stretched.
#[must_use]
pub(crate) fn yarn_magnitude(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

impl RopeSettings {
    /// The table that the rope op reads. `divisors`, one a frequency, divide the result (GGUF stores
    /// llama3's scaling that way, in `rope_freqs.weight`).
    #[must_use]
    pub(crate) fn table(&self, style: RopeStyle, divisors: Option<&[f32]>) -> RopeTable {
        let half = self.rotary_dim / 2;
        let magnitude = match self.scaling {
            RopeScaling::Yarn { magnitude, .. } => magnitude * self.magnitude,
            _ => self.magnitude,
        };
        let inv_freq = (0..half)
            .map(|i| {
                let scaled = self.scaled(i, self.unscaled(i));
                round(scaled / divisors.map_or(1.0, |d| f64::from(d[i])))
            })
            .collect();
        RopeTable { inv_freq, magnitude: round(magnitude), style }
    }

    /// `theta ^ (-2i / rotary_dim)`.
    fn unscaled(&self, i: usize) -> f64 {
        self.theta.powf(-2.0 * i as f64 / self.rotary_dim as f64)
    }

    fn scaled(&self, i: usize, freq: f64) -> f64 {
        match self.scaling {
            RopeScaling::Default => freq,
            RopeScaling::Linear { factor } => freq / factor,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len } => {
                let wavelength = TAU / freq;
                if wavelength < original_len / high_freq_factor {
                    freq
                } else if wavelength > original_len / low_freq_factor {
                    freq / factor
                } else {
                    let kept = (original_len / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - kept) * freq / factor + kept * freq
                }
            }
            RopeScaling::Yarn { factor, .. } => {
                let (low, high) = self.yarn_ramp();
                let stretched = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                freq / factor * stretched + freq * (1.0 - stretched)
            }
        }
    }

    /// Where yarn's ramp over dimensions begins and ends.
    fn yarn_ramp(&self) -> (f64, f64) {
        let RopeScaling::Yarn { original_len, beta_fast, beta_slow, truncate, .. } = self.scaling else {
            return (0.0, 1.0);
        };
        let dim = self.rotary_dim as f64;
        let turning = |rotations: f64| dim * (original_len / (rotations * 2.0 * PI)).ln() / (2.0 * self.theta.ln());
        let (mut low, mut high) = (turning(beta_fast), turning(beta_slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high { (low, high + 0.001) } else { (low, high) }
    }
}

/// The one place where frequencies become f32.
#[allow(clippy::cast_possible_truncation)] // rounding to f32 is the purpose
fn round(x: f64) -> f32 {
    x as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(theta: f64, rotary_dim: usize, scaling: RopeScaling) -> RopeSettings {
        RopeSettings { theta, rotary_dim, scaling, magnitude: 1.0 }
    }

    fn check(settings: &RopeSettings, expected: &[f32], magnitude: f32) {
        let table = settings.table(RopeStyle::Half, None);
        assert_eq!(table.inv_freq.len(), settings.rotary_dim / 2);
        for (i, (got, want)) in table.inv_freq.iter().zip(expected).enumerate() {
            assert!((got - want).abs() <= 2e-6 * want.abs(), "frequency {i}: expected {want}, got {got}");
        }
        assert!((table.magnitude - magnitude).abs() < 1e-6, "magnitude {}", table.magnitude);
    }

    #[test]
    fn default_and_linear() {
        check(&settings(10_000.0, 8, RopeScaling::Default), &[1.0, 0.1, 0.01, 0.001], 1.0);
        check(&settings(10_000.0, 8, RopeScaling::Linear { factor: 4.0 }), &[0.25, 0.025, 0.0025, 0.000_25], 1.0);
    }

    #[test]
    fn llama3_keeps_high_ramps_middle_and_divides_low() {
        // Wavelengths 2π · {1, 10, 100, 1000}; original 512: kept below 128, divided above 512.
        let scaling =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_len: 512.0 };
        let ramp = settings(10_000.0, 8, scaling);
        check(&ramp, &[1.0, 0.1, 0.01 / 8.0, 0.001 / 8.0], 1.0);

        let scaling =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_len: 1024.0 };
        let kept = (1024.0 / (TAU * 100.0) - 1.0) / 3.0;
        #[allow(clippy::cast_possible_truncation)] // a test's expectation
        let middle = ((1.0 - kept) * 0.01 / 8.0 + kept * 0.01) as f32;
        check(&settings(10_000.0, 8, scaling), &[1.0, 0.1, middle, 0.001 / 8.0], 1.0);
    }

    #[test]
    fn yarn_ramps_between_whole_dimensions() {
        let scaling = |truncate| RopeScaling::Yarn {
            factor: 4.0,
            original_len: 1024.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate,
            magnitude: yarn_magnitude(4.0, 1.0),
        };
        // dim 32, base 10000: turning(32) = 2.828 → 2, turning(1) = 8.848 → 9.
        let ramp = settings(10_000.0, 32, scaling(true));
        assert_eq!(ramp.yarn_ramp(), (2.0, 9.0));
        let expected: Vec<f32> = (0..16)
            .map(|i| {
                let freq = 10_000f64.powf(-f64::from(i) / 16.0);
                let stretched = ((f64::from(i) - 2.0) / 7.0).clamp(0.0, 1.0);
                round(freq * (1.0 - stretched) + freq / 4.0 * stretched)
            })
            .collect();
        check(&ramp, &expected, 1.138_629_4);
        let (low, high) = settings(10_000.0, 32, scaling(false)).yarn_ramp();
        assert!((low - 2.828).abs() < 1e-3 && (high - 8.848).abs() < 1e-3, "{low} {high}");
    }

    #[test]
    fn yarn_ramp_of_no_width_is_no_division_by_zero() {
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            original_len: 6.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            magnitude: 1.0,
        };
        let table = settings(10_000.0, 32, scaling).table(RopeStyle::Half, None);
        assert!(table.inv_freq.iter().all(|f| f.is_finite() && *f > 0.0));
    }

    #[test]
    fn yarn_magnitude_follows_the_paper() {
        assert!((yarn_magnitude(4.0, 1.0) - 1.138_629_436).abs() < 1e-9);
        assert!((yarn_magnitude(0.5, 1.0) - 1.0).abs() < 1e-12);
        assert!((yarn_magnitude(40.0, 0.707) - (0.1 * 0.707 * 40f64.ln() + 1.0)).abs() < 1e-12);
    }

    #[test]
    fn divisors_divide() {
        let table = settings(10_000.0, 4, RopeScaling::Default).table(RopeStyle::Interleaved, Some(&[1.0, 8.0]));
        assert_eq!(table.inv_freq, [1.0, 0.01 / 8.0]);
        assert_eq!(table.style, RopeStyle::Interleaved);
    }
}
