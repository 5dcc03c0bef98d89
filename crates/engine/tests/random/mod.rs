//! Numbers that a seed decides.

/// The state, which is not 0.
pub struct Random(pub u64);

impl Random {
    /// One of `0..end`.
    pub fn below(&mut self, end: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from((self.0 >> 11) % u64::from(end)).unwrap()
    }
}
