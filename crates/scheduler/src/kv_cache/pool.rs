//! The block pool: decides which block is handed out next and when a block may be reused. Knows
//! reference counts, pins and the two lists of unowned blocks; knows neither sequences nor tokens.

use super::{BlockId, BlockKey};

/// End of a list.
const NIL: u32 = u32::MAX;

/// Where a block is. A block is in exactly one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In the free list: nobody owns it and no hash names it.
    Free,
    /// In the LRU list: nobody owns it, but the prefix index still finds it.
    Cached,
    /// Some table refers to it, or a step in flight still reads it.
    Owned,
}

/// What the pool knows about a block.
#[derive(Clone, Debug)]
pub(super) struct BlockMeta {
    /// Table entries that refer to it.
    pub(super) ref_count: u32,
    /// Steps in flight that copy from it.
    pub(super) pins: u32,
    /// Its name in the prefix index, if it has one.
    pub(super) key: Option<BlockKey>,
    pub(super) place: Place,
    prev: u32,
    next: u32,
}

/// A doubly linked list threaded through [`BlockMeta`] by index.
#[derive(Clone, Copy, Debug)]
struct List {
    head: u32,
    tail: u32,
    len: usize,
}

impl List {
    const EMPTY: List = List { head: NIL, tail: NIL, len: 0 };
}

/// All blocks. Every operation but construction is O(1).
#[derive(Debug)]
pub(super) struct BlockPool {
    blocks: Vec<BlockMeta>,
    /// Taken from the head; last freed, first taken, since its memory is likeliest still warm.
    free: List,
    /// Evicted from the head; the least recently released is there.
    cached: List,
    /// A fault planted by a test: sharing an owned block does not count the new owner.
    pub(super) skips_share_count: bool,
}

/// A block that was handed out, and the name that it lost.
pub(super) struct Taken {
    pub(super) block: BlockId,
    pub(super) evicted: Option<BlockKey>,
}

impl BlockPool {
    pub(super) fn new(num_blocks: u32) -> Self {
        let meta = BlockMeta { ref_count: 0, pins: 0, key: None, place: Place::Owned, prev: NIL, next: NIL };
        let mut pool = Self {
            blocks: vec![meta; num_blocks as usize],
            free: List::EMPTY,
            cached: List::EMPTY,
            skips_share_count: false,
        };
        for block in (0..num_blocks).rev() {
            pool.park(BlockId(block));
        }
        pool
    }

    pub(super) fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn num_free(&self) -> usize {
        self.free.len
    }

    pub(super) fn num_cached(&self) -> usize {
        self.cached.len
    }

    /// Blocks that [`Self::take`] can still hand out.
    pub(super) fn num_available(&self) -> usize {
        self.free.len + self.cached.len
    }

    pub(super) fn meta(&self, block: BlockId) -> &BlockMeta {
        &self.blocks[block.0 as usize]
    }

    fn meta_mut(&mut self, block: BlockId) -> &mut BlockMeta {
        &mut self.blocks[block.0 as usize]
    }

    /// A block for one new owner: a free one, else the least recently used cached one.
    pub(super) fn take(&mut self) -> Option<Taken> {
        let head = if self.free.len > 0 { self.free.head } else { self.cached.head };
        if head == NIL {
            return None;
        }
        let block = BlockId(head);
        self.unlink(block);
        let meta = self.meta_mut(block);
        assert!(meta.ref_count == 0 && meta.pins == 0, "block {head} was handed out while it is in use: {meta:?}");
        meta.ref_count = 1;
        let evicted = meta.key.take();
        Some(Taken { block, evicted })
    }

    /// One more owner of a block that is owned or cached.
    pub(super) fn share(&mut self, block: BlockId) {
        let meta = self.meta(block);
        if self.skips_share_count && meta.place != Place::Cached {
            return;
        }
        assert!(meta.place != Place::Free, "block {} was shared while it is free", block.0);
        if meta.place == Place::Cached {
            self.unlink(block);
        }
        self.meta_mut(block).ref_count += 1;
    }

    /// One owner less; the last one gives it back.
    pub(super) fn release(&mut self, block: BlockId) {
        if self.skips_share_count && self.meta(block).ref_count == 0 {
            return;
        }
        let meta = self.meta_mut(block);
        assert!(meta.ref_count > 0, "block {} was released by nobody's owner: {meta:?}", block.0);
        meta.ref_count -= 1;
        self.park_if_unused(block);
    }

    /// Keeps an owned block's bytes until [`Self::unpin`], whoever releases it meanwhile.
    pub(super) fn pin(&mut self, block: BlockId) {
        let meta = self.meta_mut(block);
        assert!(meta.place == Place::Owned, "block {} was pinned while nobody owns it", block.0);
        meta.pins += 1;
    }

    /// Ends one [`Self::pin`].
    pub(super) fn unpin(&mut self, block: BlockId) {
        let meta = self.meta_mut(block);
        assert!(meta.pins > 0, "block {} was unpinned more often than pinned", block.0);
        meta.pins -= 1;
        self.park_if_unused(block);
    }

    /// Names an owned block.
    pub(super) fn set_key(&mut self, block: BlockId, key: BlockKey) {
        let meta = self.meta_mut(block);
        assert!(meta.place == Place::Owned && meta.key.is_none(), "block {} cannot be named: {meta:?}", block.0);
        meta.key = Some(key);
    }

    /// Takes the name from the least recently used cached block and frees it.
    pub(super) fn forget_oldest_cached(&mut self) -> Option<BlockKey> {
        if self.cached.head == NIL {
            return None;
        }
        let block = BlockId(self.cached.head);
        self.unlink(block);
        let key = self.meta_mut(block).key.take();
        self.park(block);
        key
    }

    fn park_if_unused(&mut self, block: BlockId) {
        let meta = self.meta(block);
        if meta.ref_count == 0 && meta.pins == 0 {
            self.park(block);
        }
    }

    /// Puts an unowned block into the list it belongs to.
    fn park(&mut self, block: BlockId) {
        if self.meta(block).key.is_some() {
            self.push_back_cached(block);
        } else {
            self.push_front_free(block);
        }
    }

    fn push_front_free(&mut self, block: BlockId) {
        let head = self.free.head;
        let meta = self.meta_mut(block);
        assert!(meta.place == Place::Owned, "block {} was freed twice", block.0);
        meta.place = Place::Free;
        meta.prev = NIL;
        meta.next = head;
        match head {
            NIL => self.free.tail = block.0,
            head => self.blocks[head as usize].prev = block.0,
        }
        self.free.head = block.0;
        self.free.len += 1;
    }

    fn push_back_cached(&mut self, block: BlockId) {
        let tail = self.cached.tail;
        let meta = self.meta_mut(block);
        assert!(meta.place == Place::Owned, "block {} was freed twice", block.0);
        meta.place = Place::Cached;
        meta.prev = tail;
        meta.next = NIL;
        match tail {
            NIL => self.cached.head = block.0,
            tail => self.blocks[tail as usize].next = block.0,
        }
        self.cached.tail = block.0;
        self.cached.len += 1;
    }

    /// Takes a block out of its list; it counts as owned from here on.
    fn unlink(&mut self, block: BlockId) {
        let meta = self.meta_mut(block);
        let (prev, next, place) = (meta.prev, meta.next, meta.place);
        meta.place = Place::Owned;
        meta.prev = NIL;
        meta.next = NIL;
        if prev != NIL {
            self.blocks[prev as usize].next = next;
        }
        if next != NIL {
            self.blocks[next as usize].prev = prev;
        }
        let list = match place {
            Place::Free => &mut self.free,
            Place::Cached => &mut self.cached,
            Place::Owned => panic!("block {} is in no list", block.0),
        };
        if prev == NIL {
            list.head = next;
        }
        if next == NIL {
            list.tail = prev;
        }
        list.len -= 1;
    }

    /// Walks both lists and counts every block once. Returns what is wrong, if anything.
    pub(super) fn check_lists(&self) -> Result<(), String> {
        let mut seen = vec![false; self.blocks.len()];
        for (name, list, place) in [("free", self.free, Place::Free), ("cached", self.cached, Place::Cached)] {
            let (mut at, mut prev, mut len) = (list.head, NIL, 0);
            while at != NIL {
                let Some(meta) = self.blocks.get(at as usize) else {
                    return Err(format!("the {name} list links to block {at}, which does not exist"));
                };
                if std::mem::replace(&mut seen[at as usize], true) {
                    return Err(format!("block {at} is in a list twice"));
                }
                if meta.place != place || meta.prev != prev || meta.ref_count != 0 || meta.pins != 0 {
                    return Err(format!("block {at} in the {name} list (after {prev}) is {meta:?}"));
                }
                if meta.key.is_some() != (place == Place::Cached) {
                    return Err(format!("block {at} in the {name} list has the key {:?}", meta.key));
                }
                (prev, at, len) = (at, meta.next, len + 1);
            }
            if list.tail != prev || list.len != len {
                return Err(format!("the {name} list ends at {prev} after {len} blocks, but says {list:?}"));
            }
        }
        for (block, meta) in self.blocks.iter().enumerate() {
            if (meta.place != Place::Owned) != seen[block] {
                return Err(format!("block {block} says {:?}, but the lists say otherwise", meta.place));
            }
            if meta.place == Place::Owned && meta.ref_count == 0 && meta.pins == 0 {
                return Err(format!("block {block} leaked: nobody owns it and it is in no list"));
            }
        }
        Ok(())
    }
}
