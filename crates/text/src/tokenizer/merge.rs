//! The merge loop of byte-pair encoding, shared by both kinds of vocabulary.
//!
//! It decides the order of merges: always the adjacent pair of the best rank, leftmost on ties, found through a
//! priority queue, so that n symbols take O(n log n) whatever the text. It does not know where ranks come from ([`Join`] does).

use super::queue::{Candidate, Queue};

/// Marks the absence of a neighbour, and the id of a symbol that no token stands for.
pub(super) const NONE: u32 = u32::MAX;

/// One symbol of the text being merged: a half-open byte interval and the token that stands for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Symbol {
    /// First byte, relative to the text being merged.
    pub start: u32,
    /// Length in bytes; 0 once the symbol has been merged into its left neighbour.
    pub len: u32,
    /// Token id, or [`NONE`].
    pub id: u32,
    previous: u32,
    next: u32,
}

/// What two adjacent symbols merge into.
#[derive(Clone, Copy, Debug)]
pub(super) struct Joined {
    /// Smaller is merged sooner.
    pub rank: u32,
    /// The token of the merged symbol.
    pub id: u32,
}

/// The rules of one vocabulary.
pub(super) trait Join {
    /// What `left` and `right`, which are neighbours in `text`, merge into, if anything.
    fn join(&self, text: &[u8], left: &Symbol, right: &Symbol) -> Option<Joined>;
}

/// Buffers of the merge loop, kept from word to word so that a text allocates them once.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    symbols: Vec<Symbol>,
    queue: Queue,
}

impl Workspace {
    /// Forgets the last word.
    pub fn clear(&mut self) {
        self.symbols.clear();
    }

    /// Appends a symbol of `len` bytes that starts where the last one ended.
    pub fn push(&mut self, len: u32, id: u32) {
        let index = self.len();
        let start = self.symbols.last().map_or(0, |last| last.start + last.len);
        if let Some(last) = self.symbols.last_mut() {
            last.next = index;
        }
        let previous = index.checked_sub(1).unwrap_or(NONE);
        self.symbols.push(Symbol { start, len, id, previous, next: NONE });
    }

    /// Number of symbols pushed; the tokenizer accepts no text of more bytes than 32 bits count.
    #[allow(clippy::cast_possible_truncation, reason = "a symbol has at least one byte, and texts are shorter")]
    fn len(&self) -> u32 {
        self.symbols.len() as u32
    }

    /// Merges until no rule applies. `text` is the text that the pushed symbols cover.
    pub fn merge(&mut self, text: &[u8], rules: &impl Join) {
        self.queue.reset(self.symbols.len());
        for left in 1..self.len() {
            self.propose(text, rules, left - 1, left);
        }
        while let Some(candidate) = self.queue.pop() {
            let left = self.symbols[candidate.left as usize];
            if left.len == 0 || left.next == NONE {
                continue;
            }
            let right = self.symbols[left.next as usize];
            // A symbol only ever grows to the right, so a pair of the same start and the same total length is the
            // very pair that was proposed.
            if left.len + right.len != candidate.len {
                continue;
            }
            self.symbols[left.next as usize].len = 0;
            let merged = &mut self.symbols[candidate.left as usize];
            merged.len = candidate.len;
            merged.id = candidate.id;
            merged.next = right.next;
            if left.previous != NONE {
                self.propose(text, rules, left.previous, candidate.left);
            }
            if right.next != NONE {
                self.symbols[right.next as usize].previous = candidate.left;
                self.propose(text, rules, candidate.left, right.next);
            }
        }
    }

    fn propose(&mut self, text: &[u8], rules: &impl Join, left: u32, right: u32) {
        let (l, r) = (&self.symbols[left as usize], &self.symbols[right as usize]);
        if let Some(Joined { rank, id }) = rules.join(text, l, r) {
            self.queue.push(Candidate { rank, left, len: l.len + r.len, id });
        }
    }

    /// The symbols that are left, in order.
    pub fn symbols(&self) -> impl Iterator<Item = &Symbol> {
        self.symbols.iter().filter(|symbol| symbol.len > 0)
    }
}
