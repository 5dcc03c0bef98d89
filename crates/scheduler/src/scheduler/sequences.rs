//! All live sequences, each in a slot: whoever holds one from step to step (the order of precedence, a plan in flight)
//! finds it by its place, without a look-up. A slot is used again when its sequence is gone, so every use says whose it
//! should be. Knows nothing of what a sequence is doing.

use std::collections::HashMap;

use super::sequence::Sequence;
use super::waiting::Rank;
use crate::id_hash::HashById;
use crate::{RequestId, SequenceId};

/// A place among the live sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Slot(u32);

/// Where a sequence is, for as long as it lives. Two words without a gap, so that it is copied as such.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SequenceRef {
    request: RequestId,
    choice: u32,
    slot: Slot,
}

impl SequenceRef {
    /// The sequence of `id`, which has been in `slot` since it came.
    pub(super) fn new(id: SequenceId, slot: Slot) -> Self {
        Self { request: id.request, choice: id.choice, slot }
    }

    pub(super) fn id(self) -> SequenceId {
        SequenceId { request: self.request, choice: self.choice }
    }
}

/// Sequences by slot and by id.
#[derive(Debug, Default)]
pub(super) struct Sequences {
    slots: Vec<Option<Sequence>>,
    free: Vec<Slot>,
    by_id: HashMap<SequenceId, Slot, HashById>,
}

impl Sequences {
    /// Takes a sequence in; its rank then says where it is.
    ///
    /// # Panics
    /// When its id is in use, or more than 2^32 are live.
    pub(super) fn insert(&mut self, mut sequence: Sequence) -> Rank {
        let slot = self.free.pop().unwrap_or_else(|| {
            let Ok(slot) = u32::try_from(self.slots.len()) else { panic!("more sequences than slots") };
            self.slots.push(None);
            Slot(slot)
        });
        sequence.rank.slot = slot;
        let rank = sequence.rank;
        assert!(self.by_id.insert(sequence.id, slot).is_none(), "{:?} lives twice", sequence.id);
        self.slots[slot.0 as usize] = Some(sequence);
        rank
    }

    pub(super) fn remove(&mut self, at: SequenceRef) {
        self.get(at);
        self.by_id.remove(&at.id());
        self.slots[at.slot.0 as usize] = None;
        self.free.push(at.slot);
    }

    pub(super) fn find(&self, id: SequenceId) -> Option<SequenceRef> {
        self.by_id.get(&id).map(|&slot| SequenceRef::new(id, slot))
    }

    /// # Panics
    /// When the sequence is not there any more: another's tokens are not for it.
    pub(super) fn get(&self, at: SequenceRef) -> &Sequence {
        match &self.slots[at.slot.0 as usize] {
            Some(sequence) if sequence.id == at.id() => sequence,
            _ => self.not_live(at),
        }
    }

    /// # Panics
    /// As [`Self::get`].
    pub(super) fn get_mut(&mut self, at: SequenceRef) -> &mut Sequence {
        self.get(at);
        let Some(sequence) = &mut self.slots[at.slot.0 as usize] else { unreachable!("it was just there") };
        sequence
    }

    #[cold]
    fn not_live(&self, at: SequenceRef) -> ! {
        let found = self.slots[at.slot.0 as usize].as_ref().map(|sequence| sequence.id);
        panic!("{:?} is scheduled but not live: its slot holds {found:?}", at.id());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{RequestSpec, Time};
    use std::mem::offset_of;

    fn sequence(request: u64) -> Sequence {
        let spec = RequestSpec {
            id: RequestId(request),
            prompt: vec![1, 2, 3],
            max_tokens: 5,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            n: 1,
            priority: 0,
            cache_salt: None,
            prompt_logprobs: false,
            arrival: Time(request),
        };
        Sequence::first_choice(spec, 1000)
    }

    #[test]
    fn a_slot_is_used_again_and_found_by_its_new_sequence() {
        let mut sequences = Sequences::default();
        let first = sequences.insert(sequence(1)).place();
        let second = sequences.insert(sequence(2)).place();
        sequences.remove(first);
        let third = sequences.insert(sequence(3)).place();
        assert_eq!((third.slot, sequences.find(first.id())), (first.slot, None));
        for at in [second, third] {
            assert_eq!((sequences.get(at).id, sequences.find(at.id())), (at.id(), Some(at)));
        }
    }

    #[test]
    #[should_panic(expected = "is scheduled but not live: its slot holds Some")]
    fn a_slot_that_another_sequence_has_now_is_refused() {
        let mut sequences = Sequences::default();
        let first = sequences.insert(sequence(1)).place();
        sequences.remove(first);
        sequences.insert(sequence(2));
        sequences.get_mut(first);
    }

    #[test]
    fn what_every_step_reads_of_a_sequence_lies_together() {
        assert_eq!((align_of::<Sequence>(), size_of::<Sequence>()), (128, 256));
        assert!(offset_of!(Sequence, rank) <= 128);
        assert_eq!(size_of::<Option<Sequence>>(), size_of::<Sequence>());
    }
}
