//! A step of which only some rows are wanted gives those rows of the whole step, bit for bit, and leaves the same cache.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)] // tests

mod harness;

use harness::{Rig, Sequence, ZOO, golden, ids};
use pagemill_backend::Tensor;
use pagemill_model::OutputRows;

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % end
    }
}

/// A model, its sequences, and the document that all of them read.
struct Side {
    rig: Rig,
    sequences: Vec<Sequence>,
}

impl Side {
    fn new(name: &str, num_sequences: usize, tokens: usize) -> Self {
        let rig = Rig::zoo(name, num_sequences * tokens.next_multiple_of(16));
        let sequences = (0..num_sequences).map(|_| rig.sequence()).collect();
        Self { rig, sequences }
    }

    /// The next `counts[i]` tokens of each sequence that has any: hidden states of `output`.
    fn step(&mut self, document: &[u32], counts: &[usize], output: OutputRows<'_>) -> Tensor {
        let mut work: Vec<_> = self
            .sequences
            .iter_mut()
            .zip(counts)
            .filter(|(_, count)| **count > 0)
            .map(|(sequence, &count)| {
                let tokens = &document[sequence.len..sequence.len + count];
                (sequence, tokens)
            })
            .collect();
        self.rig.step_for(&mut work, output)
    }

    fn bits(&self, x: &Tensor) -> Vec<Vec<u32>> {
        self.rig.rows(x).iter().map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
    }
}

const NUM_SEQUENCES: usize = 6;
const MAX_TOKENS: usize = 400;

/// How many tokens each sequence has next: decodes, chunks on both sides of every window, pauses.
fn next_counts(random: &mut Random, sequences: &[Sequence]) -> Vec<usize> {
    let next = |sequence: &Sequence| {
        let count = match random.below(4) {
            0 => 0,
            1 => 1,
            2 => 1 + random.below(20),
            _ => 1 + random.below(150),
        };
        count.min(MAX_TOKENS - sequence.len)
    };
    sequences.iter().map(next).collect()
}

/// Runs random steps both ways; gives how many rows were compared.
fn check(name: &str, seed: u64) -> usize {
    let mut random = Random(seed | 1 << 40);
    let document = &ids(&golden(name)["document"]["ids"])[..MAX_TOKENS];
    let [mut whole, mut tail] = [(); 2].map(|()| Side::new(name, NUM_SEQUENCES, MAX_TOKENS));
    let mut num_compared = 0;
    for step in 0..12 {
        let counts = next_counts(&mut random, &whole.sequences);
        let ends: Vec<usize> = counts
            .iter()
            .filter(|count| **count > 0)
            .scan(0, |end, count| {
                *end += count;
                Some(*end)
            })
            .collect();
        if ends.is_empty() {
            continue;
        }
        // From none to all, in an order of its own.
        let mut wanted: Vec<u32> = (0..ends.len() as u32).filter(|_| random.below(3) > 0).collect();
        if random.below(2) == 0 {
            wanted.reverse();
        }
        let all = whole.step(document, &counts, OutputRows::All);
        let some = tail.step(document, &counts, OutputRows::LastOf(&wanted));
        assert_eq!((some.rows(), some.cols()), (wanted.len(), all.cols()), "{name}, seed {seed}, step {step}");
        let all = whole.bits(&all);
        for (got, seq) in tail.bits(&some).iter().zip(&wanted) {
            let want = &all[ends[*seq as usize] - 1];
            assert!(got == want, "{name}, seed {seed}, step {step}: sequence {seq} of {counts:?}");
            num_compared += 1;
        }
    }
    num_compared
}

#[test]
fn wanted_rows_are_those_of_the_whole_step() {
    for name in ZOO {
        let num_compared: usize = (1..4).map(|seed| check(name, seed)).sum();
        assert!(num_compared > 50, "{name}: {num_compared} rows were compared");
    }
}

/// Chunks whose rows nobody reads leave K and V of the last layer too.
#[test]
fn chunks_without_rows_leave_the_cache_of_whole_ones() {
    for name in ZOO {
        let document = &ids(&golden(name)["document"]["ids"])[..MAX_TOKENS];
        let [mut whole, mut tail] = [(); 2].map(|()| Side::new(name, 1, MAX_TOKENS));
        for count in [100, 1, 130, 60] {
            whole.step(document, &[count], OutputRows::All);
            let none = tail.step(document, &[count], OutputRows::LastOf(&[]));
            assert_eq!(none.rows(), 0, "{name}");
        }
        let want = whole.step(document, &[7], OutputRows::All);
        let got = tail.step(document, &[7], OutputRows::LastOf(&[0]));
        assert!(tail.bits(&got) == whole.bits(&want)[6..], "{name}");
        assert_eq!(tail.rig.logits(&got, &[0]), whole.rig.logits(&want, &[6]), "{name}");
    }
}

#[test]
fn a_smaller_step_grows_no_workspace() {
    for name in ZOO {
        let document = &ids(&golden(name)["document"]["ids"])[..MAX_TOKENS];
        let mut side = Side::new(name, NUM_SEQUENCES, MAX_TOKENS);
        let hidden = side.step(document, &[200, 1, 1, 1, 1, 1], OutputRows::All);
        side.rig.logits(&hidden, &[0, 1, 2, 3, 4, 5]);
        drop(hidden);
        let growths = side.rig.cx.backend.workspace().1;
        for wanted in [&[0, 1, 2, 3, 4, 5][..], &[0], &[]] {
            let hidden = side.step(document, &[50, 1, 1, 1, 1, 1], OutputRows::LastOf(wanted));
            let rows: Vec<u32> = (0..wanted.len() as u32).collect();
            side.rig.logits(&hidden, &rows);
        }
        assert_eq!(side.rig.cx.backend.workspace().1, growths, "{name}");
    }
}
