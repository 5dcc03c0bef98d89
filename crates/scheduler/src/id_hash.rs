//! The hash of maps keyed by ids that the engine gives. No client chooses these keys, so the maps need
//! no keyed hash; a step looks up a few for each sequence, so it should cost little.

use std::hash::{BuildHasherDefault, Hasher};

/// Builds [`IdHasher`].
pub(crate) type HashById = BuildHasherDefault<IdHasher>;

/// Multiply and fold: one multiplication a word.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct IdHasher(u64);

impl IdHasher {
    fn add(&mut self, word: u64) {
        let mixed = (self.0 ^ word ^ 0x243f_6a88_85a3_08d3).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0u8; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.add(u64::from_le_bytes(word));
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.add(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        self.add(value);
    }
}
