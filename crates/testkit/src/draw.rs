//! Seeded draws: the same seed gives the same numbers on every machine. Not for secrets.

/// A stream of numbers drawn from a seed (splitmix64).
#[derive(Clone, Debug)]
pub struct Draw {
    state: u64,
}

/// Mixes two words into one; every bit of both matters.
#[must_use]
pub fn mix(a: u64, b: u64) -> u64 {
    let mut x = a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Draw {
    /// The stream of a seed; neighbouring seeds have unrelated streams.
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        Self { state: mix(seed, 0x5eed) }
    }

    /// 64 bits.
    pub fn word(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state, 1)
    }

    /// A number in `low..=high`.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        let span = (high.saturating_sub(low) as u64).saturating_add(1);
        // Below `span`, which came from a `usize`.
        #[allow(clippy::cast_possible_truncation)]
        let offset = (self.word() % span) as usize;
        low + offset
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.between(1, n) == 1
    }

    /// One of `options`, which is not empty.
    pub fn pick<T: Copy>(&mut self, options: &[T]) -> T {
        options[self.between(0, options.len() - 1)]
    }
}
