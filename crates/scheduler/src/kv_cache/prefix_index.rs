//! Names of full blocks and the index from name to block. Decides when two blocks hold the same
//! state; does not know who owns a block.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::BlockId;

/// A full block's name: 128 bits of a chained hash over everything up to its end, and the cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BlockKey {
    pub(super) hash: u128,
    pub(super) group: u32,
}

/// The chained hashes of one sequence's full blocks:
/// `hash[k] = H(key: hash[k - 1], tokens of block k)`, with the salt in front of the first. The hash before is BLAKE3's
/// key, so that a block of 16 tokens is one compression.
///
/// A sequence's tokens only grow, so a chain stays valid for its whole life, over preemptions too.
/// The chain is the same for all cache groups.
#[derive(Clone, Debug)]
pub struct BlockHashChain {
    root: u128,
    hashes: Vec<u128>,
}

impl BlockHashChain {
    /// An empty chain. Sequences with different salts share nothing; no salt differs from every salt.
    #[must_use]
    pub fn with_salt(salt: Option<&[u8]>) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"pagemill kv block chain");
        if let Some(salt) = salt {
            hasher.update(b"salt");
            hasher.update(salt);
        }
        Self { root: truncate(&hasher), hashes: Vec::new() }
    }

    /// The hashes of the first `num_blocks` blocks of `tokens`; hashes only those not known yet.
    pub(super) fn extend_to(&mut self, tokens: &[u32], block_size: usize, num_blocks: usize) -> &[u128] {
        while self.hashes.len() < num_blocks {
            let start = self.hashes.len() * block_size;
            let parent = self.hashes.last().copied().unwrap_or(self.root);
            let mut key = *b"pagemill kv block chain, a block";
            key[..16].copy_from_slice(&parent.to_le_bytes());
            let mut hasher = blake3::Hasher::new_keyed(&key);
            let mut bytes = [0u8; 64];
            for part in tokens[start..start + block_size].chunks(16) {
                for (slot, token) in bytes.chunks_exact_mut(4).zip(part) {
                    slot.copy_from_slice(&token.to_le_bytes());
                }
                hasher.update(&bytes[..part.len() * 4]);
            }
            self.hashes.push(truncate(&hasher));
        }
        &self.hashes[..num_blocks]
    }
}

fn truncate(hasher: &blake3::Hasher) -> u128 {
    let mut bytes = [0u8; 16];
    bytes.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    u128::from_le_bytes(bytes)
}

/// Which block has which name. Never iterated to decide anything.
#[derive(Debug)]
pub(super) struct PrefixIndex {
    blocks: HashMap<BlockKey, BlockId>,
}

impl PrefixIndex {
    /// Room for every block of the pool, so that it never grows.
    pub(super) fn with_capacity(num_blocks: usize) -> Self {
        Self { blocks: HashMap::with_capacity(num_blocks) }
    }

    pub(super) fn find(&self, key: BlockKey) -> Option<BlockId> {
        self.blocks.get(&key).copied()
    }

    /// Gives a block its name; false where another one has it.
    pub(super) fn insert(&mut self, key: BlockKey, block: BlockId) -> bool {
        match self.blocks.entry(key) {
            Entry::Occupied(_) => false,
            Entry::Vacant(entry) => {
                entry.insert(block);
                true
            }
        }
    }

    pub(super) fn remove(&mut self, key: BlockKey) {
        let old = self.blocks.remove(&key);
        assert!(old.is_some(), "the prefix index lost the name of a cached block");
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }
}
