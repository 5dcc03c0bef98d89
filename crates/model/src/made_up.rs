//! Weights that are made up, where there is a configuration and no checkpoint: uniform numbers of the spread that
//! models start training from, so that activations stay finite and a device does the work that real weights
//! would give it. In a quantised type the quants are random and all scales alike. Knows no architecture.

use crate::decoder::DecoderSpec;
use half::f16;
use pagemill_backend::DType;
use std::cell::Cell;

/// Layers that a configuration without weights may state.
pub(crate) const MAX_LAYERS: usize = 1 << 12;
/// Elements that a weight repeats; less three, or three blocks of a quantised type, so that its rows do not line up.
const SUPPLY_ELEMS: usize = 1 << 20;
/// Elements between the places of two weights that are loaded one after the other.
const STRIDE_ELEMS: usize = 77_777;
/// Deviation of the usual initialisation.
const DEVIATION: f32 = 0.02;

/// A supply of numbers.
pub(crate) struct MadeUp {
    /// Their type.
    pub(crate) dtype: DType,
    /// Two supplies: each weight takes its own from another place.
    pool: Vec<u8>,
    /// Blocks of a supply.
    supply_blocks: usize,
    /// Where the next weight's supply starts, in blocks.
    next: Cell<usize>,
}

impl MadeUp {
    /// Draws the supply.
    pub(crate) fn new(dtype: DType) -> Self {
        let supply_blocks = SUPPLY_ELEMS / dtype.block_elems() - 3;
        let mut random = Random(0x9E37_79B9_7F4A_7C15);
        let mut pool = vec![0; 2 * supply_blocks * dtype.block_bytes()];
        for block in pool.chunks_exact_mut(dtype.block_bytes()) {
            match dtype {
                DType::F32 => block.copy_from_slice(&random.number().to_le_bytes()),
                DType::F16 => block.copy_from_slice(&f16::from_f32(random.number()).to_le_bytes()),
                DType::BF16 => block.copy_from_slice(&half::bf16::from_f32(random.number()).to_le_bytes()),
                _ => {
                    block.iter_mut().for_each(|byte| *byte = random.byte());
                    set_scales(dtype, block);
                }
            }
        }
        Self { dtype, pool, supply_blocks, next: Cell::new(0) }
    }

    /// The numbers of the next weight, whole blocks of them, to be repeated.
    pub(crate) fn supply(&self) -> &[u8] {
        let start = self.next.get();
        let stride = STRIDE_ELEMS.div_ceil(self.dtype.block_elems());
        self.next.set((start + stride) % self.supply_blocks);
        let block_bytes = self.dtype.block_bytes();
        &self.pool[start * block_bytes..(start + self.supply_blocks) * block_bytes]
    }

    /// A vector: ones for a norm, nothing for a bias.
    pub(crate) fn vector(name: &str, len: usize) -> Vec<f32> {
        let value = if name.ends_with(".bias") { 0.0 } else { 1.0 };
        vec![value; len]
    }
}

/// A small generator (xorshift64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[7]
    }

    /// Uniform, of deviation `DEVIATION`: uniform in [-1, 1) times the root of 3 has deviation 1.
    fn number(&mut self) -> f32 {
        let unit = (self.next() >> 40) as f32 / (1_u32 << 23) as f32 - 1.0;
        unit * 3.0_f32.sqrt() * DEVIATION
    }
}

/// Deviation of uniform quants of so many values.
fn spread(num_values: f32) -> f32 {
    ((num_values * num_values - 1.0) / 12.0).sqrt()
}

/// Gives a block of random quants the scales, and minima where there are such, with which its numbers have deviation
/// `DEVIATION` and mean 0, or nearly so (a type without minima has one value more below 0 than above).
fn set_scales(dtype: DType, block: &mut [u8]) {
    let mut put = |at: usize, scale: f32| block[at..at + 2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    let mut put_both = |at: usize, d: f32, m: f32| {
        put(at, d);
        put(at + 2, m);
    };
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => {}
        DType::Q4_0 => put(0, DEVIATION / spread(16.0)),
        DType::Q5_0 => put(0, DEVIATION / spread(32.0)),
        DType::Q8_0 => put(0, DEVIATION / spread(256.0)),
        DType::Q4_1 => put_both(0, DEVIATION / spread(16.0), -7.5 * DEVIATION / spread(16.0)),
        DType::Q5_1 => put_both(0, DEVIATION / spread(32.0), -15.5 * DEVIATION / spread(32.0)),
        DType::Q2_K => {
            // 8 q - 12, in one byte.
            let d = DEVIATION / (8.0 * spread(4.0));
            put_both(80, d, d);
            block[..16].fill(12 << 4 | 8);
        }
        DType::Q3_K => {
            // Six-bit scales of 48, from which 32 is taken: low four bits, then the upper ones.
            put(108, DEVIATION / (16.0 * spread(8.0)));
            block[96..104].fill(0);
            block[104..108].fill(0xff);
        }
        DType::Q4_K => {
            // 8 q - 60.
            let d = DEVIATION / (8.0 * spread(16.0));
            put_both(0, d, d);
            set_six_bits(&mut block[4..16], 8, 60);
        }
        DType::Q5_K => {
            // 4 q - 62.
            let d = DEVIATION / (4.0 * spread(32.0));
            put_both(0, d, d);
            set_six_bits(&mut block[4..16], 4, 62);
        }
        DType::Q6_K => {
            put(208, DEVIATION / (32.0 * spread(64.0)));
            block[192..208].fill(32);
        }
    }
}

/// Eight six-bit scales and minima, all alike, in twelve bytes: of the last four the low four bits share a byte, and
/// their upper ones lie above the first four.
fn set_six_bits(packed: &mut [u8], scale: u8, minimum: u8) {
    packed[..4].fill(scale | scale >> 4 << 6);
    packed[4..8].fill(minimum | minimum >> 4 << 6);
    packed[8..12].fill(scale & 15 | minimum << 4);
}

/// Elements of all matrices of such a decoder.
pub(crate) fn num_parameters(spec: &DecoderSpec) -> u64 {
    let ends = if spec.tied_embeddings { 1 } else { 2 };
    ends * vocabulary_parameters(spec) + spec.layer_kinds.len() as u64 * layer_parameters(spec)
}

/// Elements of a layer's matrices.
pub(crate) fn layer_parameters(spec: &DecoderSpec) -> u64 {
    let d = spec.hidden_size as u64;
    let attention = d * spec.head_dim as u64 * (2 * spec.num_heads + 2 * spec.num_kv_heads) as u64;
    attention + 3 * d * spec.intermediate_size as u64
}

/// Elements of the embedding, or of the head.
pub(crate) fn vocabulary_parameters(spec: &DecoderSpec) -> u64 {
    spec.vocab_size as u64 * spec.hidden_size as u64
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap is a failed test
mod tests {
    use super::*;
    use pagemill_backend::{Backend, CpuBackend, CpuConfig, WeightDesc};

    #[test]
    fn no_two_supplies_are_alike() {
        for dtype in DType::ALL {
            let made_up = MadeUp::new(dtype);
            let (first, second) = (made_up.supply(), made_up.supply());
            assert_eq!(first.len(), (SUPPLY_ELEMS / dtype.block_elems() - 3) * dtype.block_bytes());
            assert_eq!(first.len(), second.len());
            assert_ne!(first, second, "{dtype}");
        }
    }

    #[test]
    fn numbers_have_the_spread_and_no_mean_in_every_type() {
        let backend = CpuBackend::new(CpuConfig::default()).unwrap();
        for dtype in DType::ALL {
            let (rows, cols) = (16, 1024);
            let made_up = MadeUp::new(dtype);
            let desc = WeightDesc { name: "w".into(), dtype, rows, cols };
            let weight = backend.load_repeated(desc, made_up.supply()).unwrap();
            let mut table = backend.temp(rows, cols).unwrap();
            backend.embed(&weight, &(0..16).collect::<Vec<u32>>(), 1.0, &mut table).unwrap();
            let mut values = vec![0.0; rows * cols];
            backend.to_host(&table, &mut values).unwrap();
            let count = values.len() as f32;
            let mean = values.iter().sum::<f32>() / count;
            let deviation = (values.iter().map(|x| x * x).sum::<f32>() / count).sqrt();
            assert!((deviation / DEVIATION - 1.0).abs() < 0.05, "{dtype}: deviation {deviation}");
            // Half a step of the coarsest type without minima (eight values), and chance.
            assert!(mean.abs() < 0.3 * DEVIATION, "{dtype}: mean {mean}");
        }
    }

    #[test]
    fn supplies_go_round() {
        let made_up = MadeUp::new(DType::BF16);
        let starts: Vec<usize> = (0..100).map(|_| made_up.supply().as_ptr().addr()).collect();
        assert!(starts.iter().all(|start| starts.iter().filter(|other| *other == start).count() == 1));
    }
}
