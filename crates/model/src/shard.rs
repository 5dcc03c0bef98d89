//! How a weight is cut over tensor-parallel ranks: pure arithmetic over counts. Knows no tensor.
//!
//! Row-cut ("column parallel") layers give each rank some output features; column-cut ("row
//! parallel") layers give each rank some input features, and the ranks' products are summed.

use std::ops::Range;

/// This rank among its stage's ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shard {
    /// `0..world_size`.
    pub rank: usize,
    /// Ranks in the stage.
    pub world_size: usize,
}

/// Why a cut cannot be made.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum ShardError {
    /// Query heads must divide evenly.
    #[error("{num_heads} query heads do not divide over {world_size} ranks")]
    QueryHeads { num_heads: usize, world_size: usize },
    /// KV heads must divide over the ranks, or the ranks over them.
    #[error("{num_kv_heads} KV heads and {world_size} ranks: neither divides the other")]
    KvHeads { num_kv_heads: usize, world_size: usize },
    /// Some rank would be left without features.
    #[error("{len} features in pieces of {granule} do not cover {world_size} ranks")]
    Features { len: usize, granule: usize, world_size: usize },
}

/// The heads of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeadShard {
    /// Query heads.
    pub heads: Range<usize>,
    /// KV heads; the same head on several ranks where there are fewer heads than ranks.
    pub kv_heads: Range<usize>,
}

impl Shard {
    /// The single rank.
    #[cfg(test)]
    pub(crate) const SOLO: Shard = Shard { rank: 0, world_size: 1 };

    /// Cuts heads so that each query head meets its KV head on its own rank.
    pub(crate) fn heads(self, num_heads: usize, num_kv_heads: usize) -> Result<HeadShard, ShardError> {
        let Shard { rank, world_size } = self;
        if !num_heads.is_multiple_of(world_size) {
            return Err(ShardError::QueryHeads { num_heads, world_size });
        }
        let heads_per_rank = num_heads / world_size;
        let heads = rank * heads_per_rank..(rank + 1) * heads_per_rank;
        let kv_heads = if num_kv_heads.is_multiple_of(world_size) {
            let per_rank = num_kv_heads / world_size;
            rank * per_rank..(rank + 1) * per_rank
        } else if world_size.is_multiple_of(num_kv_heads) {
            let ranks_per_head = world_size / num_kv_heads;
            rank / ranks_per_head..rank / ranks_per_head + 1
        } else {
            return Err(ShardError::KvHeads { num_kv_heads, world_size });
        };
        Ok(HeadShard { heads, kv_heads })
    }

    /// Cuts `len` features into contiguous ranges whose borders are multiples of `granule` (the
    /// quantisation block of the weight that is cut by columns). Ranks differ by at most one granule.
    pub(crate) fn features(self, len: usize, granule: usize) -> Result<Range<usize>, ShardError> {
        let Shard { rank, world_size } = self;
        let pieces = len / granule;
        if !len.is_multiple_of(granule) || pieces < world_size {
            return Err(ShardError::Features { len, granule, world_size });
        }
        let (each, spare) = (pieces / world_size, pieces % world_size);
        let start = |rank: usize| (rank * each + rank.min(spare)) * granule;
        Ok(start(rank)..start(rank + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(world_size: usize) -> impl Iterator<Item = Shard> {
        (0..world_size).map(move |rank| Shard { rank, world_size })
    }

    #[test]
    fn a_single_rank_has_everything() {
        assert_eq!(Shard::SOLO.heads(9, 3), Ok(HeadShard { heads: 0..9, kv_heads: 0..3 }));
        assert_eq!(Shard::SOLO.features(1536, 256), Ok(0..1536));
    }

    #[test]
    fn every_query_head_meets_its_kv_head() {
        for (num_heads, num_kv_heads, world_size) in
            [(64, 8, 4), (64, 8, 8), (32, 2, 8), (4, 1, 4), (4, 1, 2), (8, 8, 8)]
        {
            let group = num_heads / num_kv_heads;
            let mut next_head = 0;
            for shard in ranks(world_size) {
                let cut = shard.heads(num_heads, num_kv_heads).expect("divides");
                assert_eq!(cut.heads.start, next_head, "heads are disjoint and in order");
                next_head = cut.heads.end;
                for (i, head) in cut.heads.clone().enumerate() {
                    // Locally, head i reads KV head i / (local heads / local KV heads).
                    let local_group = cut.heads.len() / cut.kv_heads.len();
                    assert_eq!(cut.kv_heads.start + i / local_group, head / group);
                }
            }
            assert_eq!(next_head, num_heads);
        }
    }

    #[test]
    fn features_are_cut_on_borders_and_cover_all() {
        for (len, granule, world_size) in [(1536, 256, 4), (1536, 32, 4), (256, 1, 3), (2048, 256, 8), (96, 32, 2)] {
            let mut next = 0;
            for shard in ranks(world_size) {
                let range = shard.features(len, granule).expect("cuts");
                assert_eq!(range.start, next);
                assert!(range.start.is_multiple_of(granule) && !range.is_empty());
                next = range.end;
            }
            assert_eq!(next, len);
        }
    }

    #[test]
    fn impossible_cuts_are_refused() {
        let two = Shard { rank: 1, world_size: 2 };
        assert_eq!(two.heads(9, 3), Err(ShardError::QueryHeads { num_heads: 9, world_size: 2 }));
        let four = Shard { rank: 0, world_size: 4 };
        assert_eq!(four.heads(12, 3), Err(ShardError::KvHeads { num_kv_heads: 3, world_size: 4 }));
        assert_eq!(four.features(512, 256), Err(ShardError::Features { len: 512, granule: 256, world_size: 4 }));
        assert_eq!(two.features(100, 32), Err(ShardError::Features { len: 100, granule: 32, world_size: 2 }));
    }
}
