//! The requests of a benchmark: lengths from a trace or from a fixed distribution, distinct random
//! prompts. The same seed gives the same requests.

use anyhow::{Context, Result, bail};
use std::path::Path;

/// A small, fixed generator (SplitMix64), so that results name a seed and nothing else.
pub struct Random(u64);

impl Random {
    /// Starts at `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number in `0..bound` (`bound` > 0).
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound
    }

    /// A number in [0, 1).
    #[allow(clippy::cast_precision_loss)] // 53 bits are exact
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A number of the normal distribution with deviation 1.
    pub fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.unit()).ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }
}

/// Tokens in and out of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    /// Prompt tokens.
    pub prompt: usize,
    /// Generated tokens.
    pub generated: usize,
}

/// Reads (ContextTokens, GeneratedTokens) rows of an Azure LLM inference trace.
///
/// # Errors
/// The file and line that cannot be read.
pub fn read_trace(path: &Path) -> Result<Vec<Lengths>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let mut rows = Vec::new();
    for (number, line) in text.lines().enumerate().skip(1) {
        let mut fields = line.split(',').skip(1).map(|f| f.trim().parse::<usize>());
        let (Some(Ok(prompt)), Some(Ok(generated))) = (fields.next(), fields.next()) else {
            bail!("{}:{}: expected TIMESTAMP,ContextTokens,GeneratedTokens", path.display(), number + 1);
        };
        rows.push(Lengths { prompt, generated });
    }
    if rows.is_empty() {
        bail!("{}: no rows", path.display());
    }
    Ok(rows)
}

/// Lengths when no trace is given: log-normal with the medians and spreads of the Azure 2023
/// conversation trace (prompt median 1,020, output median 129; log standard deviations 0.99 and 0.86).
pub fn conversation_like(random: &mut Random, count: usize) -> Vec<Lengths> {
    let mut log_normal = |median: f64, sigma: f64| {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a positive length
        let length = (median * (sigma * random.normal()).exp()).round().clamp(1.0, 1e6) as usize;
        length
    };
    (0..count).map(|_| Lengths { prompt: log_normal(1020.0, 0.99), generated: log_normal(129.0, 0.86) }).collect()
}

/// Draws `count` rows, scales them and clips them to `max_seq_len`.
pub fn draw(random: &mut Random, rows: &[Lengths], count: usize, scale: f64, max_seq_len: usize) -> Vec<Lengths> {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)] // lengths are small
    let scaled = |n: usize| ((n as f64 * scale).round() as usize).max(1);
    (0..count)
        .map(|_| {
            #[allow(clippy::cast_possible_truncation)] // below the number of rows
            let row = rows[random.below(rows.len() as u64) as usize];
            let prompt = scaled(row.prompt).min(max_seq_len * 3 / 4).max(1);
            let generated = scaled(row.generated).min(max_seq_len - prompt).max(1);
            Lengths { prompt, generated }
        })
        .collect()
}

/// `length` random token ids below `vocab_size`.
pub fn random_prompt(random: &mut Random, length: usize, vocab_size: usize) -> Vec<u32> {
    #[allow(clippy::cast_possible_truncation)] // vocabularies fit u32
    (0..length).map(|_| random.below(vocab_size as u64) as u32).collect()
}

/// The `q`-quantile (0..=1) of `sorted` by nearest rank; 0 when empty.
#[must_use]
pub fn quantile(sorted: &[f64], q: f64) -> f64 {
    if sorted.is_empty() {
        return 0.0;
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)] // an index
    let index = ((sorted.len() as f64 * q).ceil() as usize).clamp(1, sorted.len()) - 1;
    sorted[index]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_reproducible_and_fit() {
        let rows = conversation_like(&mut Random::new(1), 500);
        let a = draw(&mut Random::new(2), &rows, 200, 0.125, 512);
        assert_eq!(a, draw(&mut Random::new(2), &rows, 200, 0.125, 512));
        assert!(a.iter().all(|l| l.prompt >= 1 && l.generated >= 1 && l.prompt + l.generated <= 512));
    }

    #[test]
    fn quantiles_use_the_nearest_rank() {
        let sorted = [1.0, 2.0, 3.0, 4.0];
        assert_eq!((quantile(&sorted, 0.5), quantile(&sorted, 0.99), quantile(&[], 0.5)), (2.0, 4.0, 0.0));
    }

    #[test]
    fn a_bad_trace_row_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "T,C,G\n1,2,3\n1,x,3\n").unwrap();
        let message = read_trace(file.path()).unwrap_err().to_string();
        assert!(message.contains(":3:"), "{message}");
    }
}
