//! Ranks and stages: which layers a stage has, which hosts its ranks are on. Refuses what cannot be cut.
//!
//! Rank `stage × tp + i` is the `i`-th of its stage; hosts are filled in that order.

use crate::{CapacityError, DecoderShape, WeightType};
use serde::Serialize;
use std::ops::Range;

/// Ranks at most, of all stages together.
pub const MAX_RANKS: usize = 4096;

/// How the model is cut.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Layout {
    /// Ranks of a stage.
    pub tp: usize,
    /// Stages.
    pub pp: usize,
    /// Ranks of a host.
    pub ranks_per_host: usize,
    /// Layers of each stage.
    pub stages: Vec<Range<usize>>,
}

impl Layout {
    /// Cuts `shape`, its stages balanced by the bytes that a decode step reads (the head counts, the embedding does
    /// not: of it, a step reads a row a token).
    ///
    /// # Errors
    /// The heads cannot be cut so, there are more stages than layers, or a count is out of range.
    pub fn new(
        shape: &DecoderShape,
        weights: &WeightType,
        tp: usize,
        pp: usize,
        ranks_per_host: usize,
    ) -> Result<Self, CapacityError> {
        shape.check()?;
        let layers = shape.layers.len();
        range("pipeline_parallel", pp, layers, format!("{} has {layers} layers", shape.name))?;
        range("tensor_parallel", tp, shape.num_heads, format!("{} has {} query heads", shape.name, shape.num_heads))?;
        range("gpus_per_host", ranks_per_host, MAX_RANKS, "ranks of one host".to_owned())?;
        range("tensor_parallel × pipeline_parallel", tp * pp, MAX_RANKS, "ranks of one model".to_owned())?;
        let possible = shape.possible_tensor_parallel();
        if !possible.contains(&tp) {
            let allowed = listed(&possible);
            return Err(CapacityError::Heads { tp, heads: shape.num_heads, kv_heads: shape.num_kv_heads, allowed });
        }
        let layer_bytes = weights.bytes(shape.attention_parameters() + shape.mlp_parameters()).max(1);
        let head_in_layers = weights.vocabulary_bytes(shape.vocabulary_parameters()) as f64 / layer_bytes as f64;
        Ok(Self { tp, pp, ranks_per_host, stages: balanced(layers, pp, head_in_layers) })
    }

    /// Ranks of all stages.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.tp * self.pp
    }

    /// Hosts that the ranks of `stage` are on.
    #[must_use]
    pub fn hosts_of(&self, stage: usize) -> usize {
        let host = |rank: usize| rank / self.ranks_per_host;
        host((stage + 1) * self.tp - 1) - host(stage * self.tp) + 1
    }

    /// Whether any rank of `stage` sends to another host: to the next stage, or from the last to the first.
    #[must_use]
    pub fn send_leaves_host(&self, stage: usize) -> bool {
        let next = (stage + 1) % self.pp;
        let host = |stage: usize, i: usize| (stage * self.tp + i) / self.ranks_per_host;
        (0..self.tp).any(|i| host(stage, i) != host(next, i))
    }
}

/// Ascending numbers, those that follow on one another in short: `1 to 8, 16, 32`.
fn listed(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b);
    let text = |run: &[usize]| match *run {
        [first, .., last] if run.len() > 2 => vec![format!("{first} to {last}")],
        _ => run.iter().map(ToString::to_string).collect(),
    };
    runs.flat_map(text).collect::<Vec<_>>().join(", ")
}

/// Refuses a count outside `1..=most`.
pub(crate) fn range(key: &'static str, value: usize, most: usize, why: String) -> Result<(), CapacityError> {
    if (1..=most).contains(&value) {
        return Ok(());
    }
    Err(CapacityError::Range { key, value, least: 1, most, why })
}

/// `0..layers` in `pp` pieces such that the costliest is cheapest, where a layer costs 1 and the last piece costs
/// `head` more; of equals, the most even.
fn balanced(layers: usize, pp: usize, head: f64) -> Vec<Range<usize>> {
    if pp == 1 {
        return std::iter::once(0..layers).collect();
    }
    let cost = |last: usize| ((layers - last).div_ceil(pp - 1) as f64).max(last as f64 + head);
    // From the even split downwards: the head only ever takes layers away from the last stage.
    let mut last = layers / pp;
    for fewer in (1..last).rev() {
        if cost(fewer) < cost(last) {
            last = fewer;
        }
    }
    let (rest, others) = (layers - last, pp - 1);
    let border = |stage: usize| stage * (rest / others) + stage.min(rest % others);
    (0..others).map(|stage| border(stage)..border(stage + 1)).chain(std::iter::once(rest..layers)).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::known;

    fn layout(model: &str, tp: usize, pp: usize, per_host: usize) -> Result<Layout, CapacityError> {
        Layout::new(&known::shape(model).unwrap(), &WeightType::named("bf16").unwrap(), tp, pp, per_host)
    }

    #[test]
    fn stages_cover_all_layers_and_spare_the_last_for_the_head() {
        for (layers, pp, head) in [(80, 2, 0.3), (32, 4, 1.2), (18, 2, 30.0), (7, 7, 0.5), (30, 4, 2.0), (126, 16, 0.7)]
        {
            let stages = balanced(layers, pp, head);
            assert_eq!(stages.len(), pp);
            let mut next = 0;
            for stage in &stages {
                assert_eq!(stage.start, next);
                assert!(!stage.is_empty(), "{stages:?}");
                next = stage.end;
            }
            assert_eq!(next, layers);
            // No other length of the last stage is cheaper.
            let cost = |last: usize| ((layers - last).div_ceil(pp - 1) as f64).max(last as f64 + head);
            let best = (1..=layers + 1 - pp).map(cost).fold(f64::INFINITY, f64::min);
            assert!(cost(stages[pp - 1].len()) <= best, "{stages:?}");
        }
        assert_eq!(balanced(80, 2, 0.3), [0..40, 40..80]);
        assert_eq!(balanced(32, 2, 2.4), [0..17, 17..32]);
    }

    #[test]
    fn hosts_are_filled_in_order() {
        let two_hosts = layout("llama-2-70b", 8, 2, 8).unwrap();
        assert_eq!((two_hosts.hosts_of(0), two_hosts.hosts_of(1)), (1, 1));
        assert!(two_hosts.send_leaves_host(0) && two_hosts.send_leaves_host(1));
        let small_hosts = layout("llama-2-70b", 8, 2, 4).unwrap();
        assert_eq!((small_hosts.hosts_of(0), small_hosts.hosts_of(1)), (2, 2));
        let one_host = layout("llama-2-70b", 4, 2, 8).unwrap();
        assert!(!one_host.send_leaves_host(0) && !one_host.send_leaves_host(1));
        // Rank 3 of each host begins a stage: 0..3 | 3..6 over hosts of 4.
        let odd = layout("smollm2-135m", 3, 2, 4).unwrap();
        assert_eq!((odd.hosts_of(0), odd.hosts_of(1)), (1, 2));
    }

    #[test]
    fn what_cannot_be_cut_is_refused_with_what_can() {
        let error = layout("qwen2.5-0.5b", 4, 1, 8).unwrap_err().to_string();
        assert!(error.contains("14 query heads and 2 KV heads") && error.contains("1, 2, 14 are possible"), "{error}");
        let error = layout("llama-2-70b", 12, 1, 8).unwrap_err().to_string();
        assert!(error.contains("1 to 8, 16, 32, 64 are possible"), "{error}");
        // Any number that leaves no rank without a KV head.
        for tp in 1..=8 {
            assert!(layout("llama-2-70b", tp, 1, 8).is_ok(), "{tp}");
        }
        let error = layout("llama-2-7b", 1, 33, 8).unwrap_err().to_string();
        assert!(error.starts_with("pipeline_parallel = 33: must be in 1..=32 (llama-2-7b has 32 layers)"), "{error}");
        for (tp, pp, per_host) in [(0, 1, 8), (1, 0, 8), (1, 1, 0), (65, 1, 8), (64, 80, 8)] {
            assert!(matches!(layout("llama-2-70b", tp, pp, per_host), Err(CapacityError::Range { .. })), "{tp} {pp}");
        }
    }
}
