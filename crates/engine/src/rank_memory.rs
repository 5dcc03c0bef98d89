//! Memory over all ranks as if it were one host's. Pure sums; knows no model.

use std::collections::BTreeMap;

/// What a rank takes of its host's memory, or of its device's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankMemory {
    /// Whose memory it is, by name: ranks of one host share the host's, those on GPUs have one each.
    pub host: String,
    /// What the process could take before it loaded, in bytes; whoever asked first, before anybody had.
    pub available_bytes: u64,
    /// Weights on its device, in bytes.
    pub weight_bytes: u64,
    /// Workspace after the rehearsal, in bytes.
    pub workspace_bytes: u64,
}

/// The memory that all ranks' weights, workspaces and pools may be counted against as if it were one
/// host's: with it the pools get as many blocks as the host with the least room has memory for. On one
/// host that is what the host has.
pub(crate) fn room_for_all(ranks: &[RankMemory], block_bytes: &[u64]) -> u64 {
    #[derive(Default)]
    struct Host {
        available: u64,
        taken: u64,
        block: u64,
    }
    let mut hosts: BTreeMap<&str, Host> = BTreeMap::new();
    for (rank, block) in ranks.iter().zip(block_bytes) {
        let host = hosts.entry(&rank.host).or_default();
        // Who asks later may see what others have begun to load, which is counted as taken.
        host.available = host.available.max(rank.available_bytes);
        host.taken = host.taken.saturating_add(rank.weight_bytes).saturating_add(rank.workspace_bytes);
        host.block = host.block.saturating_add(*block);
    }
    let taken: u64 = hosts.values().map(|host| host.taken).fold(0, u64::saturating_add);
    let block: u64 = hosts.values().map(|host| host.block).fold(0, u64::saturating_add);
    let left = hosts.values().map(|host| {
        let left = host.available.saturating_sub(host.taken);
        u128::from(left) * u128::from(block) / u128::from(host.block.max(1))
    });
    let left = left.min().unwrap_or(0);
    taken.saturating_add(u64::try_from(left).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(host: &str, available_bytes: u64, weight_bytes: u64) -> RankMemory {
        RankMemory { host: host.into(), available_bytes, weight_bytes, workspace_bytes: 10 }
    }

    #[test]
    fn one_host_gives_what_it_has() {
        let ranks = [rank("a", 1000, 90), rank("a", 910, 190)];
        assert_eq!(room_for_all(&ranks, &[4, 6]), 1000);
    }

    #[test]
    fn the_host_with_the_least_room_decides() {
        // 900 and 300 are left for ranks whose blocks are equal: twice 300 for both.
        let ranks = [rank("a", 1000, 90), rank("b", 500, 190)];
        assert_eq!(room_for_all(&ranks, &[8, 8]), 100 + 200 + 600);
        // With a third of the block, b's 300 are worth 900.
        assert_eq!(room_for_all(&ranks, &[16, 8]), 100 + 200 + 900);
        // A host that is full leaves nothing for anybody.
        assert_eq!(room_for_all(&[rank("a", 1000, 90), rank("b", 100, 190)], &[8, 8]), 300);
        assert_eq!(room_for_all(&[], &[]), 0);
    }
}
