//! Sampling as an op: what a device that chooses tokens where the logits are is asked, and what it answers. Knows no
//! request: seeds have become numbers, and a sequence's past has become lists of ids.
//!
//! The order of tokens is "larger logit first, lower id first on ties"; zeros of both signs are equal. A token's weight
//! is [`exp_neg`]`((logit - max) * inv_temperature)`, in f32 after edits. [`reference`] says what every device gives, bit
//! for bit: sums of weights are sums of integers, in units of 2^-44 ([`units_of`]), so they do not depend on the order
//! of additions. A sampler that adds weights up as floats gives the same tokens, except where a draw or the cut of
//! `top_p` lies within rounding of a boundary.
//!
//! Shape letters: `R` rows, `V` vocabulary.

mod reference;

pub use reference::reference;

/// How a task's token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choice {
    /// The first in order.
    Largest,
    /// At random.
    Draw(Draw),
    /// It is known already, and only looked at. Any id; one that is `V` or more has a logit of -∞.
    Given(u32),
}

/// A draw: `top_k`, then `top_p` of what is left, then `min_p`, then the token at share `uniform` of the weights that
/// remain, laid out in the order of ids.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Multiplies logits; finite, not below 0.
    pub inv_temperature: f32,
    /// Keeps the `k` first in order; `None` and 0 keep all.
    pub top_k: Option<u32>,
    /// Keeps the fewest first in order whose share of the weight reaches `p` in (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// Drops tokens that weigh less than this, the first in order weighing 1.
    pub min_p: f32,
    /// In [0, 1).
    pub uniform: f64,
}

/// Changes to single logits before the choice, in the order of these fields; results are clamped to finite values. Each
/// list's ids are distinct; ids that are `V` or more are passed over.
#[derive(Clone, Copy, Debug)]
pub struct LogitEdits<'a> {
    /// Added.
    pub bias: &'a [(u32, f32)],
    /// Multiplies negative and divides other logits of `prompt_ids` and of `output_counts`, once; 1: off.
    pub repetition_penalty: f32,
    /// Ascending; empty where the repetition penalty is off.
    pub prompt_ids: &'a [u32],
    /// Ids that were generated, and how often.
    pub output_counts: &'a [(u32, u32)],
    /// Subtracted from the logits of `output_counts`.
    pub presence_penalty: f32,
    /// Subtracted from them times their count.
    pub frequency_penalty: f32,
    /// These become `f32::MIN`.
    pub masked: &'a [u32],
}

impl LogitEdits<'_> {
    /// Whether they change nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bias.is_empty() && self.prompt_ids.is_empty() && self.output_counts.is_empty() && self.masked.is_empty()
    }
}

impl Default for LogitEdits<'_> {
    fn default() -> Self {
        Self {
            bias: &[],
            repetition_penalty: 1.0,
            prompt_ids: &[],
            output_counts: &[],
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            masked: &[],
        }
    }
}

/// One token wanted of one row. Several tasks may have the same row.
#[derive(Clone, Copy, Debug)]
pub struct RowTask<'a> {
    /// Below `R`.
    pub row: usize,
    /// Which token.
    pub choice: Choice,
    /// Made for this task only, before the choice. [`Choice::Given`] has none.
    pub edits: LogitEdits<'a>,
    /// Reports what the unedited row says of the token, with this many of its first in order (all, if there are
    /// fewer).
    pub num_top: Option<u32>,
}

/// What an unedited row says of a token.
#[derive(Clone, Debug, PartialEq)]
pub struct RowReport {
    /// `ln Σ exp(logit)` over the row.
    pub log_sum: f64,
    /// The token's logit.
    pub logit: f32,
    /// The token's rank in order, from 1.
    pub rank: u32,
    /// The first in order, with their logits.
    pub top: Vec<(u32, f32)>,
}

/// What a task got.
#[derive(Clone, Debug, PartialEq)]
pub struct RowOutcome {
    /// The token.
    pub token: u32,
    /// Where the task asked for it.
    pub report: Option<RowReport>,
}

/// `e^x` for `x ≤ 0`, relative error below 3e-7 (Cephes' `expf` polynomial); 0 below −87, where f32
/// would soon be subnormal. Free of branches so that loops over it vectorise, free of fused
/// multiply-adds so that every machine gives the same bits.
#[inline]
#[must_use]
pub fn exp_neg(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    let clamped = x.max(-87.0);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN2_HI - n * LN2_LO;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let y = p * r * r + r + 1.0;
    // The low mantissa bits of `shifted` are n: moved into the exponent they are 2^n.
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x < -87.0 { 0.0 } else { y * scale }
}

/// A unit of weight.
pub const UNIT: f64 = 1.0 / (1_u64 << 44) as f64;

/// A weight in [0, 1] in units of 2^-44, rounded down. Sums of 2^19 weights fit 64 bits.
#[must_use]
pub fn units_of(weight: f32) -> u64 {
    let bits = weight.to_bits();
    let mantissa = u64::from(bits & 0x007f_ffff | 0x0080_0000);
    (mantissa << 21) >> 127_u32.saturating_sub(bits >> 23).min(63)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_weights_rounded_down() {
        assert_eq!(units_of(1.0), 1 << 44);
        assert_eq!(units_of(0.0), 0);
        for weight in [0.5_f32, 0.3, 1e-3, 7e-9, 1e-13, 6e-14, 5e-14, 1e-20, 1e-38] {
            let exact = f64::from(weight) / UNIT;
            assert!((units_of(weight) as f64 - exact.floor()).abs() < 0.5, "{weight}");
        }
    }

    #[test]
    fn lists_make_edits() {
        assert!(LogitEdits::default().is_empty());
        let bias = [(3, 1.0)];
        assert!(!LogitEdits { bias: &bias, ..LogitEdits::default() }.is_empty());
        assert!(!LogitEdits { masked: &[1], ..LogitEdits::default() }.is_empty());
        // A penalty of ids that there are none of.
        assert!(LogitEdits { presence_penalty: 1.0, ..LogitEdits::default() }.is_empty());
    }
}
