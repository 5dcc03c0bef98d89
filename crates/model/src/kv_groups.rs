//! Cache groups: which layers share a block table. A pure function of the layers' kinds; knows no
//! block and no tensor.
//!
//! A block of the pool spans `layers_per_group` tensors, whichever group owns it. So groups should be
//! of one size: a group with fewer layers than the largest wastes the rest of each of its blocks.

use crate::{KvGroupSpec, KvKind};
use std::ops::Range;

/// Groups `kinds[layer]` so that the groups share one pool of equal pages and least is wasted.
///
/// The size of a group is tried from the layers of the scarcest kind downwards: 15 sliding and 3 full
/// layers make six groups of 3, 2 and 1 make three groups of 1, one kind makes one group. A smaller
/// size wastes less but adds block tables, so a size is taken as soon as at most one slot in ten is
/// wasted, else the one that wastes least.
///
/// A group's layers are consecutive among the layers of its kind.
#[must_use]
pub(crate) fn group_layers(kinds: &[KvKind]) -> Vec<KvGroupSpec> {
    let mut by_kind: Vec<(KvKind, Vec<usize>)> = Vec::new();
    for (layer, &kind) in kinds.iter().enumerate() {
        match by_kind.iter_mut().find(|(k, _)| *k == kind) {
            Some((_, layers)) => layers.push(layer),
            None => by_kind.push((kind, vec![layer])),
        }
    }
    let counts: Vec<usize> = by_kind.iter().map(|(_, layers)| layers.len()).collect();
    let group_size = group_size(&counts);
    by_kind
        .into_iter()
        .flat_map(|(kind, layers)| {
            chunks(layers.len(), group_size)
                .map(|range| KvGroupSpec { kind, layers: layers[range].to_vec() })
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Layers of a full group for kinds of `counts` layers each.
fn group_size(counts: &[usize]) -> usize {
    let scarcest = counts.iter().copied().min().unwrap_or(0);
    let total: usize = counts.iter().sum();
    let wasted = |size: usize| counts.iter().map(|n| n.div_ceil(size) * size - n).sum::<usize>();
    (1..=scarcest).rev().find(|&size| wasted(size) * 10 <= total).unwrap_or(1)
}

/// `0..len` in pieces of `size`, the last one shorter where it must be.
fn chunks(len: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(size.max(1)).map(move |start| start..(start + size).min(len))
}

/// Where a layer's K and V live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KvPlace {
    /// Cache group.
    pub group_idx: usize,
    /// Pool tensor.
    pub layer_in_group: usize,
}

/// The places of the layers `stage`, in order. A stage's pool has tensors for its own layers only, so
/// layers are counted within their group from the stage's first one on.
#[must_use]
pub(crate) fn places(groups: &[KvGroupSpec], stage: Range<usize>) -> Vec<KvPlace> {
    let mut places = vec![KvPlace { group_idx: 0, layer_in_group: 0 }; stage.len()];
    for (group_idx, group) in groups.iter().enumerate() {
        let here = group.layers.iter().filter(|layer| stage.contains(layer));
        for (layer_in_group, &layer) in here.enumerate() {
            places[layer - stage.start] = KvPlace { group_idx, layer_in_group };
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLIDING: KvKind = KvKind::SlidingWindow { window: 512 };

    /// Every `period`-th layer is full.
    fn pattern(num_layers: usize, period: usize) -> Vec<KvKind> {
        (1..=num_layers).map(|i| if i.is_multiple_of(period) { KvKind::Full } else { SLIDING }).collect()
    }

    fn check(kinds: &[KvKind], expected_sizes: &[usize]) {
        let groups = group_layers(kinds);
        let mut sizes: Vec<usize> = groups.iter().map(|g| g.layers.len()).collect();
        sizes.sort_unstable();
        assert_eq!(sizes, expected_sizes);
        let mut seen: Vec<usize> = groups.iter().flat_map(|g| g.layers.clone()).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..kinds.len()).collect::<Vec<_>>(), "every layer in exactly one group");
        let places = places(&groups, 0..kinds.len());
        for (layer, place) in places.iter().enumerate() {
            assert_eq!(groups[place.group_idx].layers[place.layer_in_group], layer);
            assert_eq!(groups[place.group_idx].kind, kinds[layer]);
            assert!(groups[place.group_idx].layers.is_sorted());
        }
    }

    #[test]
    fn a_stage_counts_its_own_layers() {
        let groups = group_layers(&[KvKind::Full; 6]);
        let places = places(&groups, 2..5);
        assert_eq!(places.iter().map(|place| place.layer_in_group).collect::<Vec<_>>(), [0, 1, 2]);
        let groups = group_layers(&pattern(3, 3));
        let places: Vec<_> = (1..3).flat_map(|layer| super::places(&groups, layer..layer + 1)).collect();
        assert_eq!(places, [1, 2].map(|group_idx| KvPlace { group_idx, layer_in_group: 0 }));
    }

    #[test]
    fn equal_kinds_make_one_group() {
        check(&[KvKind::Full; 30], &[30]);
        check(&[SLIDING; 2], &[2]);
        check(&[], &[]);
    }

    #[test]
    fn mixed_kinds_make_groups_of_one_size() {
        check(&pattern(18, 6), &[3; 6]);
        check(&pattern(3, 3), &[1; 3]);
        check(&pattern(26, 2), &[13; 2]);
    }

    #[test]
    fn a_few_spare_slots_are_better_than_many_tables() {
        // 22 sliding, 4 full: groups of 4 waste 2 slots of 28.
        check(&pattern(26, 6), &[2, 4, 4, 4, 4, 4, 4]);
        // 5 sliding, 4 full: groups of 4 would waste 3 of 12; groups of 3 waste 1 + 2; of 2, 1.
        let kinds =
            [SLIDING, SLIDING, SLIDING, SLIDING, SLIDING, KvKind::Full, KvKind::Full, KvKind::Full, KvKind::Full];
        check(&kinds, &[1; 9]);
    }
}
