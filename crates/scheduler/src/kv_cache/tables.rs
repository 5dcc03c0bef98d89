//! All tables, each in a slot: whoever uses one at every step finds it by its place, without a look-up. Beside each lies
//! how far nothing is to be done for it, so that most steps of a decode touch no table at all. Decides nothing about
//! blocks.

use std::collections::HashMap;
use std::ops::Range;

use super::table::BlockTable;
use crate::id_hash::HashById;
use crate::{RequestId, SequenceId};

/// A table's place. Another sequence's may be there later, so every use says whose it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TableSlot(u32);

/// Where a sequence's table is, for as long as the sequence holds one. Two words without a gap, so that it is copied as
/// such.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TableRef {
    request: RequestId,
    choice: u32,
    slot: TableSlot,
}

impl TableRef {
    /// The table of `id`, which has been in `slot` since the sequence began to hold it.
    pub(crate) fn new(id: SequenceId, slot: TableSlot) -> Self {
        Self { request: id.request, choice: id.choice, slot }
    }

    fn id(self) -> SequenceId {
        SequenceId { request: self.request, choice: self.choice }
    }

    pub(crate) fn slot(self) -> TableSlot {
        self.slot
    }

    fn idx(self) -> usize {
        self.slot.0 as usize
    }
}

/// What is known of a table without a look at it.
#[derive(Clone, Debug, Default)]
pub(super) struct Marks {
    /// Whose it is; `None`: the slot is free.
    owner: Option<SequenceId>,
    /// Positions that are known to lie in blocks that no other sequence has. Those before the next one to be computed
    /// may be shared since.
    pub(super) writable: Range<usize>,
    /// With fewer tokens computed, no block gets a name and none goes back.
    pub(super) due_at: usize,
}

/// Tables by slot and by sequence.
#[derive(Debug, Default)]
pub(super) struct Tables {
    marks: Vec<Marks>,
    /// Aligned with `marks`.
    tables: Vec<BlockTable>,
    free: Vec<u32>,
    by_id: HashMap<SequenceId, u32, HashById>,
}

impl Tables {
    /// # Panics
    /// When the sequence has a table, or there are more than 2^32.
    pub(super) fn insert(&mut self, id: SequenceId, table: BlockTable) {
        let marks = Marks { owner: Some(id), ..Marks::default() };
        let slot = if let Some(slot) = self.free.pop() {
            self.marks[slot as usize] = marks;
            self.tables[slot as usize] = table;
            slot
        } else {
            let Ok(slot) = u32::try_from(self.tables.len()) else { panic!("more block tables than slots") };
            self.marks.push(marks);
            self.tables.push(table);
            slot
        };
        assert!(self.by_id.insert(id, slot).is_none(), "{id:?} already holds blocks");
    }

    pub(super) fn remove(&mut self, id: SequenceId) -> Option<BlockTable> {
        let slot = self.by_id.remove(&id)?;
        self.marks[slot as usize] = Marks::default();
        self.free.push(slot);
        Some(std::mem::take(&mut self.tables[slot as usize]))
    }

    pub(super) fn find(&self, id: SequenceId) -> Option<TableRef> {
        self.by_id.get(&id).map(|&slot| TableRef::new(id, TableSlot(slot)))
    }

    /// # Panics
    /// When the sequence holds no table there any more.
    pub(super) fn marks(&self, at: TableRef) -> &Marks {
        let marks = &self.marks[at.idx()];
        assert!(marks.owner == Some(at.id()), "{:?} holds no table: its place is {:?}'s", at.id(), marks.owner);
        marks
    }

    /// # Panics
    /// As [`Self::marks`].
    pub(super) fn table(&self, at: TableRef) -> &BlockTable {
        self.marks(at);
        &self.tables[at.idx()]
    }

    /// # Panics
    /// As [`Self::marks`].
    pub(super) fn both_mut(&mut self, at: TableRef) -> (&mut BlockTable, &mut Marks) {
        self.marks(at);
        (&mut self.tables[at.idx()], &mut self.marks[at.idx()])
    }

    /// In no order that means anything.
    pub(super) fn iter(&self) -> impl Iterator<Item = (SequenceId, &BlockTable, &Marks)> {
        let held = |(marks, table)| -> Option<(SequenceId, &BlockTable, &Marks)> {
            let marks: &Marks = marks;
            marks.owner.map(|id| (id, table, marks))
        };
        self.marks.iter().zip(&self.tables).filter_map(held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(request: u64) -> SequenceId {
        SequenceId { request: RequestId(request), choice: 0 }
    }

    #[test]
    #[should_panic(expected = "holds no table")]
    fn a_place_that_another_sequence_has_now_is_refused() {
        let mut tables = Tables::default();
        tables.insert(id(1), BlockTable::default());
        let first = tables.find(id(1));
        assert!(tables.remove(id(1)).is_some());
        tables.insert(id(2), BlockTable { num_registered: 7, ..BlockTable::default() });
        let second = tables.find(id(2));
        assert_eq!(second.map(|at| tables.table(at).num_registered), Some(7));
        assert_eq!(first.map(TableRef::slot), second.map(TableRef::slot), "the slot is used again");
        first.map(|at| tables.table(at).num_registered);
    }
}
