//! Which tokens remain: top_k, top_p and min_p as cuts through the order "larger logit first, lower id
//! first on ties". Nothing here sorts the vocabulary: a cut is found by one or two passes over the row
//! and a selection among the few that could matter.
//!
//! Shape letters: `V` vocabulary.

use super::softmax::{CHUNK, CHUNK_IDS, chunk_sum_exp, sum_exp};
use pagemill_backend::sampling::exp_neg;
use std::cmp::Ordering;

/// A token with its logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Candidate {
    /// Its logit after bias and penalties.
    pub(crate) logit: f32,
    /// Its id.
    pub(crate) id: u32,
}

/// Larger logit first, lower id first on ties.
pub(crate) fn best_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.id.cmp(&b.id))
}

/// The last candidate that remains: everything at least as good in [`best_first`] order remains too.
pub(crate) type Cut = Candidate;

/// The cut behind which nothing lies.
pub(crate) const NO_CUT: Cut = Candidate { logit: f32::NEG_INFINITY, id: u32::MAX };

impl Cut {
    /// Whether a token remains.
    #[inline]
    pub(crate) fn keeps(&self, logit: f32, id: u32) -> bool {
        logit > self.logit || (logit == self.logit && id <= self.id)
    }
}

/// Calls `visit` for every token of `row` that `cut` keeps, in the order of ids. Chunks whose largest
/// logit is behind the cut are skipped.
fn for_each_kept(row: &[f32], cut: &Cut, mut visit: impl FnMut(Candidate)) {
    let mut first_id = 0u32;
    for chunk in row.chunks(CHUNK) {
        if chunk.iter().copied().fold(f32::NEG_INFINITY, f32::max) >= cut.logit {
            for (id, &logit) in (first_id..).zip(chunk) {
                if cut.keeps(logit, id) {
                    visit(Candidate { logit, id });
                }
            }
        }
        first_id = first_id.saturating_add(CHUNK_IDS);
    }
}

/// The cut that keeps the `k` best of `row` `[V]`. One pass with a rising floor: `scratch` never holds
/// more than `k + max(k, 256)` candidates.
pub(crate) fn top_k_cut(row: &[f32], k: usize, scratch: &mut Vec<Candidate>) -> Cut {
    if k == 0 || k >= row.len() {
        return NO_CUT;
    }
    let capacity = k.saturating_add(k.max(256));
    scratch.clear();
    let mut floor = None;
    let mut first_id = 0u32;
    for chunk in row.chunks(CHUNK) {
        let best = chunk.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // Later ids lose ties, so only a strictly larger logit can push another out.
        if floor.is_none_or(|floor| best > floor) {
            for (id, &logit) in (first_id..).zip(chunk) {
                if floor.is_none_or(|floor| logit > floor) {
                    scratch.push(Candidate { logit, id });
                }
                if scratch.len() == capacity {
                    scratch.select_nth_unstable_by(k - 1, best_first);
                    scratch.truncate(k);
                    floor = Some(scratch[k - 1].logit);
                }
            }
        }
        first_id = first_id.saturating_add(CHUNK_IDS);
    }
    *scratch.select_nth_unstable_by(k - 1, best_first).1
}

/// The temperature's softmax over a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Softmax {
    /// The row's largest logit.
    pub(crate) max: f32,
    /// `1 / temperature`.
    pub(crate) inv_t: f32,
}

impl Softmax {
    /// Unnormalised probability of a logit: 1 for the largest.
    #[inline]
    pub(crate) fn weight(&self, logit: f32) -> f32 {
        exp_neg((logit - self.max) * self.inv_t)
    }
}

/// The cut that keeps the smallest set of tokens whose share of what `cut` keeps reaches `p` in (0, 1).
///
/// Tokens lighter than `(1 - p) / count` of the whole weigh less than `1 - p` together, so none of them
/// is needed: only heavier ones are gathered, and the cut among them is found by halving.
pub(crate) fn top_p_cut(row: &[f32], cut: Cut, p: f32, softmax: Softmax, scratch: &mut Vec<Candidate>) -> Cut {
    let (total, count) = if cut == NO_CUT {
        (sum_exp(row, softmax.max, softmax.inv_t), row.len())
    } else {
        let (mut total, mut count) = (0.0, 0);
        for_each_kept(row, &cut, |c| {
            total += f64::from(softmax.weight(c.logit));
            count += 1;
        });
        (total, count)
    };
    // A little lower than the bound, for the rounding of weights.
    let light = 0.99 * (1.0 - f64::from(p)) * total / count.max(1) as f64;
    scratch.clear();
    for_each_kept(row, &cut, |c| {
        if f64::from(softmax.weight(c.logit)) >= light {
            scratch.push(c);
        }
    });
    mass_cut(scratch, f64::from(p) * total, |c| f64::from(softmax.weight(c.logit))).unwrap_or(cut)
}

/// The last of the fewest best candidates whose weights sum to at least `target` (all of them, if they
/// do not reach it). Expected cost: linear.
fn mass_cut(candidates: &mut [Candidate], target: f64, weight: impl Fn(&Candidate) -> f64) -> Option<Cut> {
    // The cut lies in [lo, hi). [0, lo) are the best `lo`; they weigh `before`, which is below target.
    let (mut lo, mut hi) = (0, candidates.len());
    let mut before = 0.0;
    while hi - lo > 1 {
        let mid = lo + (hi - lo) / 2;
        candidates[lo..hi].select_nth_unstable_by(mid - lo, best_first);
        let mass = before + candidates[lo..mid].iter().map(&weight).sum::<f64>();
        if mass >= target {
            hi = mid;
        } else {
            before = mass;
            lo = mid;
        }
    }
    candidates.get(lo).copied()
}

/// What a draw chooses from: tokens that the cut keeps and whose weight is at least `min_weight`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept {
    /// top_k and top_p.
    pub(crate) cut: Cut,
    /// min_p: the largest weight is 1. 0 keeps all.
    pub(crate) min_weight: f32,
    /// Weights.
    pub(crate) softmax: Softmax,
}

impl Kept {
    #[inline]
    fn weight(&self, logit: f32, id: u32) -> f32 {
        let weight = self.softmax.weight(logit);
        if weight >= self.min_weight && self.cut.keeps(logit, id) { weight } else { 0.0 }
    }

    fn chunk_mass(&self, chunk: &[f32], first_id: u32) -> f64 {
        if self.cut == NO_CUT && self.min_weight <= 0.0 {
            return chunk_sum_exp(chunk, self.softmax.max, self.softmax.inv_t);
        }
        if chunk.iter().copied().fold(f32::NEG_INFINITY, f32::max) < self.cut.logit {
            return 0.0;
        }
        (first_id..).zip(chunk).map(|(id, &logit)| f64::from(self.weight(logit, id))).sum()
    }

    /// The token at share `u` in [0, 1) of the kept mass, laid out in the order of ids. Two passes, the
    /// second on average half a one. A token of weight 0 is never drawn. The row's largest logit has
    /// weight 1 and is always kept, so there is always one to draw.
    pub(crate) fn draw(&self, row: &[f32], u: f64) -> u32 {
        let chunks = || (0u32..).step_by(CHUNK).zip(row.chunks(CHUNK));
        let total: f64 = chunks().map(|(first_id, chunk)| self.chunk_mass(chunk, first_id)).sum();
        let target = u * total;
        let mut before = 0.0;
        let mut last = (0, row);
        for (first_id, chunk) in chunks() {
            let mass = self.chunk_mass(chunk, first_id);
            if mass > 0.0 {
                last = (first_id, chunk);
                if before + mass > target {
                    break;
                }
                before += mass;
            }
        }
        self.draw_in_chunk(last.1, last.0, target - before)
    }

    /// The first token at which the chunk's running mass exceeds `target`, else its last kept one.
    fn draw_in_chunk(&self, chunk: &[f32], first_id: u32, target: f64) -> u32 {
        let mut mass = 0.0;
        let mut last = first_id;
        for (id, &logit) in (first_id..).zip(chunk) {
            let weight = self.weight(logit, id);
            if weight > 0.0 {
                mass += f64::from(weight);
                last = id;
                if mass > target {
                    break;
                }
            }
        }
        last
    }
}
