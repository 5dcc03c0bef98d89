//! How a model is laid out over ranks: tensor-parallel ranks within stages, and stages as ranges of
//! layers of about equal cost. Pure arithmetic over counts; knows no tensor and no device.

use crate::ModelSpec;
use std::ops::Range;

/// Ranks of an engine: `tensor_parallel` ranks share each layer, `pipeline_parallel` stages share the
/// layers out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParallelMode {
    /// Ranks in a stage, at least 1.
    pub tensor_parallel: usize,
    /// Stages, at least 1.
    pub pipeline_parallel: usize,
}

impl ParallelMode {
    /// One rank.
    pub const SOLO: Self = Self { tensor_parallel: 1, pipeline_parallel: 1 };

    /// Ranks in all.
    #[must_use]
    pub fn num_ranks(self) -> usize {
        self.tensor_parallel * self.pipeline_parallel
    }
}

impl Default for ParallelMode {
    fn default() -> Self {
        Self::SOLO
    }
}

impl std::fmt::Display for ParallelMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} tensor-parallel × {} pipeline-parallel", self.tensor_parallel, self.pipeline_parallel)
    }
}

/// One stage of a pipeline: the layers that its ranks hold. The first stage also holds the embedding,
/// the last the final norm and the head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// `0..count`.
    pub index: usize,
    /// Stages in the pipeline.
    pub count: usize,
    /// Decoder layers, at least one.
    pub layers: Range<usize>,
}

impl Stage {
    /// The only stage of a model of `num_layers` layers.
    #[must_use]
    pub fn whole(num_layers: usize) -> Self {
        Self { index: 0, count: 1, layers: 0..num_layers }
    }

    /// Whether token ids enter here.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.index == 0
    }

    /// Whether logits leave here.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.index + 1 == self.count
    }

    /// Tensors of this stage's KV pool: its layers in the cache group that has most of them here. Block
    /// ids are the same on every stage.
    #[must_use]
    pub fn layers_per_group(&self, spec: &ModelSpec) -> usize {
        let here = |layers: &[usize]| layers.iter().filter(|layer| self.layers.contains(layer)).count();
        spec.kv_groups.iter().map(|group| here(&group.layers)).max().unwrap_or(0)
    }
}

/// What a step costs, in any unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Costs {
    /// Each layer.
    pub layers: Vec<u64>,
    /// What the first stage does beside its layers.
    pub embedding: u64,
    /// What the last stage does beside its layers.
    pub head: u64,
}

/// Cuts the layers into `count` stages so that the dearest stage costs least; `None` when there are
/// fewer layers than stages. `O(count × layers²)`.
pub(crate) fn balance(costs: &Costs, count: usize) -> Option<Vec<Stage>> {
    let num_layers = costs.layers.len();
    if count == 0 || num_layers < count {
        return None;
    }
    // sums[i]: cost of the layers before i.
    let mut sums = vec![0u64];
    for cost in &costs.layers {
        sums.push(sums[sums.len() - 1].saturating_add(*cost));
    }
    let stage_cost = |index: usize, layers: Range<usize>| {
        let ends = if index == 0 { costs.embedding } else { 0 } + if index + 1 == count { costs.head } else { 0 };
        ends.saturating_add(sums[layers.end] - sums[layers.start])
    };
    // best[end] of stage k: the dearest of stages 0..=k over layers 0..end, and where stage k starts.
    let mut best: Vec<Option<u64>> = (0..=num_layers).map(|end| (end > 0).then(|| stage_cost(0, 0..end))).collect();
    let mut starts = vec![vec![0; num_layers + 1]];
    for index in 1..count {
        let mut next = vec![None; num_layers + 1];
        let mut from = vec![0; num_layers + 1];
        for end in index + 1..=num_layers {
            for (start, before) in best.iter().enumerate().take(end).skip(index) {
                let Some(before) = *before else { continue };
                let dearest = before.max(stage_cost(index, start..end));
                if next[end].is_none_or(|found| dearest < found) {
                    (next[end], from[end]) = (Some(dearest), start);
                }
            }
        }
        best = next;
        starts.push(from);
    }
    let mut stages = Vec::with_capacity(count);
    let mut end = num_layers;
    for index in (0..count).rev() {
        let start = starts[index][end];
        stages.push(Stage { index, count, layers: start..end });
        end = start;
    }
    stages.reverse();
    Some(stages)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn cut(layers: Vec<u64>, embedding: u64, head: u64, count: usize) -> Vec<usize> {
        let stages = balance(&Costs { layers, embedding, head }, count).unwrap();
        assert!(stages.iter().all(|stage| !stage.layers.is_empty() && stage.count == count));
        assert_eq!(stages[0].layers.start, 0);
        assert!(stages.windows(2).all(|pair| pair[0].layers.end == pair[1].layers.start));
        assert!(stages[0].is_first() && stages[count - 1].is_last());
        stages.iter().map(|stage| stage.layers.len()).collect()
    }

    #[test]
    fn equal_layers_are_shared_evenly() {
        assert_eq!(cut(vec![10; 8], 0, 0, 4), [2, 2, 2, 2]);
        assert_eq!(cut(vec![10; 4], 0, 0, 1), [4]);
        assert_eq!(cut(vec![10; 3], 0, 0, 3), [1, 1, 1]);
    }

    #[test]
    fn a_dear_head_takes_the_place_of_layers() {
        assert_eq!(cut(vec![10; 10], 0, 40, 2), [7, 3]);
        // However dear: a stage has a layer.
        assert_eq!(cut(vec![10; 4], 0, 1000, 2).len(), 2);
        assert_eq!(cut(vec![10; 10], 40, 0, 2), [3, 7]);
    }

    #[test]
    fn uneven_layers_are_cut_by_cost() {
        assert_eq!(cut(vec![100, 1, 1, 1, 1, 96], 0, 0, 2)[0], 1);
        // The optimum, checked against every cut.
        let layers = vec![3, 9, 2, 7, 7, 1, 4, 8, 5];
        let stages = balance(&Costs { layers: layers.clone(), embedding: 2, head: 6 }, 3).unwrap();
        let cost = |a: usize, b: usize| layers[a..b].iter().sum::<u64>();
        let dearest = |i: usize, j: usize| (cost(0, i) + 2).max(cost(i, j)).max(cost(j, 9) + 6);
        let least = (1..8).flat_map(|i| (i + 1..9).map(move |j| (i, j))).map(|(i, j)| dearest(i, j)).min().unwrap();
        assert_eq!(dearest(stages[0].layers.end, stages[1].layers.end), least);
    }

    #[test]
    fn fewer_layers_than_stages_cannot_be_cut() {
        assert_eq!(balance(&Costs { layers: vec![1; 2], embedding: 0, head: 0 }, 3), None);
    }
}
