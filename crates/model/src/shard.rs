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
    /// More ranks than KV heads, of which each cannot have as many ranks as any other; or no rank.
    #[error(
        "{num_heads} query heads and {num_kv_heads} KV heads do not divide over {world_size} ranks; possible are {}",
        possible_ranks(*num_heads, *num_kv_heads)
    )]
    Heads { num_heads: usize, num_kv_heads: usize, world_size: usize },
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

    /// Cuts heads so that each query head meets its KV head on its own rank. `num_kv_heads` divides `num_heads`.
    ///
    /// With KV heads for all ranks, a rank has whole KV heads and the query heads that read them; ranks differ by at
    /// most one KV head, the first ones having more. With fewer KV heads than ranks, equally many ranks share each, and
    /// each of them has equally many of its query heads.
    pub(crate) fn heads(self, num_heads: usize, num_kv_heads: usize) -> Result<HeadShard, ShardError> {
        let Shard { rank, world_size } = self;
        if !may_cut_heads(num_heads, num_kv_heads, world_size) {
            return Err(ShardError::Heads { num_heads, num_kv_heads, world_size });
        }
        if world_size <= num_kv_heads {
            let (kv_heads, group) = (self.share(num_kv_heads), num_heads / num_kv_heads);
            return Ok(HeadShard { heads: kv_heads.start * group..kv_heads.end * group, kv_heads });
        }
        let kv_head = rank / (world_size / num_kv_heads);
        Ok(HeadShard { heads: self.share(num_heads), kv_heads: kv_head..kv_head + 1 })
    }

    /// KV heads of the rank that has most.
    pub(crate) fn most_kv_heads(self, num_kv_heads: usize) -> usize {
        num_kv_heads.div_ceil(self.world_size)
    }

    /// Cuts `len` features into contiguous ranges whose borders are multiples of `granule` (the
    /// quantisation block of the weight that is cut by columns). Ranks differ by at most one granule.
    pub(crate) fn features(self, len: usize, granule: usize) -> Result<Range<usize>, ShardError> {
        let world_size = self.world_size;
        let pieces = len / granule;
        if !len.is_multiple_of(granule) || pieces < world_size {
            return Err(ShardError::Features { len, granule, world_size });
        }
        let own = self.share(pieces);
        Ok(own.start * granule..own.end * granule)
    }

    /// This rank's part of `0..count`. Ranks differ by at most one; the first ones have more.
    fn share(self, count: usize) -> Range<usize> {
        let (each, spare) = (count / self.world_size, count % self.world_size);
        let start = |rank: usize| rank * each + rank.min(spare);
        start(self.rank)..start(self.rank + 1)
    }
}

/// The heads of each of `world_size` ranks.
pub(crate) fn head_shards(
    num_heads: usize,
    num_kv_heads: usize,
    world_size: usize,
) -> Result<Vec<HeadShard>, ShardError> {
    if world_size == 0 {
        return Err(ShardError::Heads { num_heads, num_kv_heads, world_size });
    }
    (0..world_size).map(|rank| Shard { rank, world_size }.heads(num_heads, num_kv_heads)).collect()
}

/// Whether heads can be cut over so many ranks.
fn may_cut_heads(num_heads: usize, num_kv_heads: usize, world_size: usize) -> bool {
    (1..=num_kv_heads).contains(&world_size)
        || (world_size > num_kv_heads
            && num_heads.is_multiple_of(world_size)
            && world_size.is_multiple_of(num_kv_heads))
}

/// The numbers of ranks that heads can be cut over: `1 to 8, 16, 32, 64`.
fn possible_ranks(num_heads: usize, num_kv_heads: usize) -> String {
    let copied = (num_kv_heads + 1..=num_heads).filter(|ranks| may_cut_heads(num_heads, num_kv_heads, *ranks));
    let whole = match num_kv_heads {
        0..=2 => (1..=num_kv_heads).map(|ranks| ranks.to_string()).collect(),
        _ => vec![format!("1 to {num_kv_heads}")],
    };
    whole.into_iter().chain(copied.map(|ranks| ranks.to_string())).collect::<Vec<_>>().join(", ")
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
        for (num_heads, num_kv_heads, world_size) in [
            (64, 8, 4),
            (64, 8, 8),
            (32, 2, 8),
            (4, 1, 4),
            (4, 1, 2),
            (8, 8, 8),
            // Not as many heads on each rank.
            (9, 3, 2),
            (14, 2, 2),
            (6, 3, 2),
            (12, 3, 2),
            (40, 10, 4),
            (4, 4, 3),
            (64, 8, 3),
            (64, 8, 7),
            (7, 7, 5),
        ] {
            let group = num_heads / num_kv_heads;
            let mut next_head = 0;
            let cuts: Vec<HeadShard> =
                ranks(world_size).map(|shard| shard.heads(num_heads, num_kv_heads).expect("divides")).collect();
            let counts = || cuts.iter().map(|cut| cut.kv_heads.len());
            assert!(counts().max() <= counts().min().map(|least| least + 1), "{cuts:?}");
            let most = Shard { rank: 0, world_size }.most_kv_heads(num_kv_heads);
            assert_eq!(counts().max(), Some(most), "{cuts:?}");
            assert!(counts().sum::<usize>() == num_kv_heads.max(world_size), "{cuts:?}");
            for cut in cuts {
                assert_eq!(cut.heads.start, next_head, "heads are disjoint and in order");
                assert!(!cut.heads.is_empty());
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
    fn first_ranks_have_more_whole_groups() {
        let nine: Vec<_> = ranks(2).map(|shard| shard.heads(9, 3).expect("divides")).collect();
        assert_eq!(nine, [HeadShard { heads: 0..6, kv_heads: 0..2 }, HeadShard { heads: 6..9, kv_heads: 2..3 }]);
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
        let four = Shard { rank: 0, world_size: 4 };
        let none = Shard { rank: 0, world_size: 0 };
        let refused = |shard: Shard, num_heads, num_kv_heads| {
            shard.heads(num_heads, num_kv_heads).expect_err("cannot be cut").to_string()
        };
        assert_eq!(
            refused(four, 12, 3),
            "12 query heads and 3 KV heads do not divide over 4 ranks; possible are 1 to 3, 6, 12"
        );
        // Four ranks would be two for each KV head, of whose 7 query heads they cannot have equally many.
        assert_eq!(
            refused(four, 14, 2),
            "14 query heads and 2 KV heads do not divide over 4 ranks; possible are 1, 2, 14"
        );
        assert!(refused(none, 64, 8).ends_with("over 0 ranks; possible are 1 to 8, 16, 32, 64"));
        assert!(refused(four, 3, 1).ends_with("possible are 1, 3"));
        assert_eq!(four.features(512, 256), Err(ShardError::Features { len: 512, granule: 256, world_size: 4 }));
        assert_eq!(two.features(100, 32), Err(ShardError::Features { len: 100, granule: 32, world_size: 2 }));
    }
}
