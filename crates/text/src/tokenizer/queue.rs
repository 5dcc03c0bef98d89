//! The queue of pairs that may be merged.
//!
//! It decides nothing but order: rank first, then position. Short words use a heap. In a long word a heap of a
//! million entries misses the cache at every step, so candidates are kept in one list per rank instead: lists are
//! taken in order of rank, and are nearly sorted by position already.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// A pair that may be merged. Ordered by rank, then by position; the other fields never decide, because two
/// candidates of one rank and position differ only if one of them is stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate {
    /// Smaller is merged sooner.
    pub rank: u32,
    /// Index of the left symbol.
    pub left: u32,
    /// Length of both symbols together, in bytes.
    pub len: u32,
    /// Token of the merged symbol.
    pub id: u32,
}

/// A priority queue of candidates.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Every candidate of a short word; in a long one, those that came too late for the list of their rank.
    heap: BinaryHeap<Reverse<Candidate>>,
    lists: Option<RankLists>,
}

/// Candidates by rank. Ranks up to that of the list being emptied go to the heap, higher ones wait here.
#[derive(Debug, Default)]
struct RankLists {
    waiting: BTreeMap<u32, Vec<Candidate>>,
    /// Candidates of rank `rank`, sorted by position, of which the first `taken` are gone.
    current: Vec<Candidate>,
    taken: usize,
    rank: Option<u32>,
}

impl Queue {
    /// Empties the queue and prepares it for a word of this many symbols.
    pub fn reset(&mut self, num_symbols: usize) {
        const LONG_WORD: usize = 1024;
        self.heap.clear();
        self.lists = (num_symbols > LONG_WORD).then(RankLists::default);
    }

    /// Adds a candidate. O(log n).
    pub fn push(&mut self, candidate: Candidate) {
        match &mut self.lists {
            Some(lists) if lists.rank.is_none_or(|rank| candidate.rank > rank) => {
                lists.waiting.entry(candidate.rank).or_default().push(candidate);
            }
            _ => self.heap.push(Reverse(candidate)),
        }
    }

    /// Takes the best candidate. O(log n), over all calls.
    pub fn pop(&mut self) -> Option<Candidate> {
        let Some(lists) = &mut self.lists else {
            return self.heap.pop().map(|Reverse(candidate)| candidate);
        };
        if lists.taken == lists.current.len() && self.heap.is_empty() {
            let (rank, mut list) = lists.waiting.pop_first()?;
            list.sort();
            *lists =
                RankLists { waiting: std::mem::take(&mut lists.waiting), current: list, taken: 0, rank: Some(rank) };
        }
        match (lists.current.get(lists.taken), self.heap.peek()) {
            (Some(next), Some(Reverse(late))) if late < next => {}
            (Some(next), _) => {
                lists.taken += 1;
                return Some(*next);
            }
            (None, _) => {}
        }
        self.heap.pop().map(|Reverse(candidate)| candidate)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::cast_possible_truncation)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_heap_give_the_same_order() {
        let mut seed = 5_u64;
        let mut random = move |n: u32| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 40) as u32 % n
        };
        let (mut short, mut long) = (Queue::default(), Queue::default());
        short.reset(10);
        long.reset(1 << 20);
        for round in 0..20_000 {
            if random(5) < 3 - (round > 10_000) as u32 {
                let candidate = Candidate { rank: random(20), left: random(1000), len: random(9), id: 0 };
                short.push(candidate);
                long.push(candidate);
            } else {
                assert_eq!(short.pop(), long.pop(), "round {round}");
            }
        }
        while let Some(candidate) = short.pop() {
            assert_eq!(Some(candidate), long.pop());
        }
        assert_eq!(long.pop(), None);
    }
}
