//! Weights that are made up, where there is a configuration and no checkpoint: uniform numbers of the spread that
//! models start training from, so that activations stay finite and a device does the work that real weights
//! would give it. Knows no architecture.

use crate::decoder::DecoderSpec;
use pagemill_backend::DType;
use std::cell::Cell;

/// Layers that a configuration without weights may state.
pub(crate) const MAX_LAYERS: usize = 1 << 12;
/// Elements that a weight repeats; odd, so that its rows do not line up.
const SUPPLY_ELEMS: usize = (1 << 20) - 3;
/// Elements made up once; each weight takes its supply from another place.
const POOL_ELEMS: usize = 2 * SUPPLY_ELEMS;
/// Elements between the places of two weights that are loaded one after the other; odd.
const STRIDE_ELEMS: usize = 77_777;
/// Deviation of the usual initialisation.
const DEVIATION: f32 = 0.02;

/// A supply of numbers.
pub(crate) struct MadeUp {
    /// Their type.
    pub(crate) dtype: DType,
    pool: Vec<u8>,
    /// Where the next weight's supply starts, in elements.
    next: Cell<usize>,
}

impl MadeUp {
    /// Draws the supply, in a float type.
    pub(crate) fn new(dtype: DType) -> Self {
        let elem_bytes = dtype.block_bytes();
        let mut pool = Vec::with_capacity(POOL_ELEMS * elem_bytes);
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        for _ in 0..POOL_ELEMS {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // Uniform in [-1, 1) times the root of 3 has deviation 1.
            let unit = (state >> 40) as f32 / (1_u32 << 23) as f32 - 1.0;
            let value = unit * 3.0_f32.sqrt() * DEVIATION;
            match dtype {
                DType::BF16 => pool.extend(half::bf16::from_f32(value).to_le_bytes()),
                DType::F16 => pool.extend(half::f16::from_f32(value).to_le_bytes()),
                _ => pool.extend(value.to_le_bytes()),
            }
        }
        Self { dtype, pool, next: Cell::new(0) }
    }

    /// The numbers of the next weight, to be repeated.
    pub(crate) fn supply(&self) -> &[u8] {
        let start = self.next.get();
        self.next.set((start + STRIDE_ELEMS) % (POOL_ELEMS - SUPPLY_ELEMS));
        let elem_bytes = self.dtype.block_bytes();
        &self.pool[start * elem_bytes..(start + SUPPLY_ELEMS) * elem_bytes]
    }

    /// A vector: ones for a norm, nothing for a bias.
    pub(crate) fn vector(name: &str, len: usize) -> Vec<f32> {
        let value = if name.ends_with(".bias") { 0.0 } else { 1.0 };
        vec![value; len]
    }
}

/// Elements of all matrices of such a decoder.
pub(crate) fn num_parameters(spec: &DecoderSpec) -> u64 {
    let d = spec.hidden_size as u64;
    let attention = d * spec.head_dim as u64 * (2 * spec.num_heads + 2 * spec.num_kv_heads) as u64;
    let mlp = 3 * d * spec.intermediate_size as u64;
    let ends = if spec.tied_embeddings { 1 } else { 2 };
    ends * spec.vocab_size as u64 * d + spec.layer_kinds.len() as u64 * (attention + mlp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_finite_of_the_spread_and_not_the_same_twice() {
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            let made_up = MadeUp::new(dtype);
            let (first, second) = (made_up.supply(), made_up.supply());
            assert_eq!(first.len(), SUPPLY_ELEMS * dtype.block_bytes());
            assert_ne!(first, second);
            let values: Vec<f32> = match dtype {
                DType::BF16 => {
                    first.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
                }
                DType::F16 => first.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
                _ => first.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            };
            let variance = values.iter().map(|x| x * x).sum::<f32>() / values.len() as f32;
            assert!((variance.sqrt() / DEVIATION - 1.0).abs() < 0.1, "{dtype}: {variance}");
        }
    }

    #[test]
    fn supplies_go_round() {
        let made_up = MadeUp::new(DType::BF16);
        let starts: Vec<usize> = (0..100).map(|_| made_up.supply().as_ptr().addr()).collect();
        assert!(starts.iter().all(|start| starts.iter().filter(|other| *other == start).count() == 1));
    }
}
