//! The order of precedence among all live sequences, and the queue of those that hold no blocks.
//!
//! A waiting request's effective priority is `priority + (now - arrival) / ageing_us`. All requests
//! age at the same rate, so which of two comes first never changes:
//! `p1 + (now - a1) / g > p2 + (now - a2) / g` exactly when `a1 - p1 * g < a2 - p2 * g`. The right-hand
//! side is the request's *virtual arrival*: the queue is sorted by it once and needs no clock.
//!
//! Nothing starves: only the finitely many requests with an earlier virtual arrival ever come before
//! a request, at admission and at preemption alike, and the first of all live requests always runs.

use std::collections::BTreeSet;

use super::sequences::{SequenceRef, Slot};
use crate::{RequestSpec, SequenceId, Time};

/// Place of a sequence in the order of precedence: the lowest runs first and is preempted last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    /// `arrival - priority * ageing_us`, in microseconds.
    virtual_arrival: i128,
    pub(super) arrival: Time,
    pub(super) id: SequenceId,
    /// Of negative priority.
    pub(super) is_offline: bool,
    /// Where the sequence is, once it is among the live ones. Decides no order: ids are unique.
    pub(super) slot: Slot,
}

impl Rank {
    pub(super) fn of(spec: &RequestSpec, id: SequenceId, ageing_us: u64) -> Self {
        let virtual_arrival = i128::from(spec.arrival.0) - i128::from(spec.priority) * i128::from(ageing_us);
        Self { virtual_arrival, arrival: spec.arrival, id, is_offline: spec.priority < 0, slot: Slot::default() }
    }

    /// Where the sequence is.
    pub(super) fn place(self) -> SequenceRef {
        SequenceRef::new(self.id, self.slot)
    }
}

/// Sequences that hold no blocks, in order of precedence.
#[derive(Debug, Default)]
pub(super) struct WaitingQueue {
    ranks: BTreeSet<Rank>,
}

impl WaitingQueue {
    pub(super) fn len(&self) -> usize {
        self.ranks.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    pub(super) fn first(&self) -> Option<Rank> {
        self.ranks.first().copied()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Rank> + '_ {
        self.ranks.iter().copied()
    }

    pub(super) fn insert(&mut self, rank: Rank) {
        assert!(self.ranks.insert(rank), "{:?} was queued twice", rank.id);
    }

    /// Whether it was there.
    pub(super) fn remove(&mut self, rank: &Rank) -> bool {
        self.ranks.remove(rank)
    }

    /// Arrival of the request that has waited longest.
    pub(super) fn oldest_arrival(&self) -> Option<Time> {
        self.ranks.iter().map(|rank| rank.arrival).min()
    }
}
