//! Freed blocks kept whole for the next allocation of their size.
//!
//! Most allocations ask for a size that was freed a moment ago. Joining the freed block with its
//! neighbours only to cut it out again costs several cache lines; handing it over costs one. What
//! is kept here is little and goes back to the books before anything is mapped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::core::UNIT;
use super::magazine::{CLASSES, Flag};

/// Blocks that the list of a length keeps.
const DEPTH: usize = 64;
/// Bytes that all lists keep together.
const BYTES: u64 = 8 << 20;

/// A freed block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kept {
    pub(super) addr: u64,
    pub(super) len: u64,
    pub(super) hint: u32,
}

#[inline]
fn is_large(len: u64) -> bool {
    len > CLASSES as u64 * UNIT
}

/// One larger freed block, which threads hand on without the lane's lock. The books show it as live.
///
/// It is kept only if it is the latest that first fit gave, and nothing was freed since: then first
/// fit would give the same place again, and keeping it changes no layout. Keeping any block of the
/// size last freed cost up to 2 % of footprint on recorded traces.
#[derive(Default, Debug)]
#[repr(align(128))]
pub(super) struct Pair {
    flag: Flag,
    /// The block that first fit gave last; 0 if none, or if another place may be lower now.
    latest: AtomicU64,
    len: AtomicU64,
    hint: AtomicU32,
    /// The kept block, or 0. `len` and `hint` are its own, or those of the latest.
    kept: AtomicU64,
    allocs: AtomicU64,
}

impl Pair {
    /// The kept block if it has exactly the units that `size` takes, for a caller that asked for one.
    #[inline]
    pub(super) fn take(&self, size: u64, align: u64) -> Option<Kept> {
        if self.kept.load(Relaxed) == 0 || !self.flag.try_enter() {
            return None;
        }
        let found = self.get().filter(|k| k.fits(size, align));
        if found.is_some() {
            self.latest.store(self.kept.load(Relaxed), Relaxed);
            self.kept.store(0, Relaxed);
            let allocs = self.allocs.load(Relaxed).wrapping_add(1);
            self.allocs.store(allocs, Relaxed);
        }
        self.flag.leave();
        found
    }

    /// Keeps a block if it is the latest.
    #[inline]
    pub(super) fn put(&self, addr: u64) -> bool {
        if self.latest.load(Relaxed) != addr || !self.flag.try_enter() {
            return false;
        }
        let keeps = self.latest.load(Relaxed) == addr && self.kept.load(Relaxed) == 0;
        if keeps {
            self.kept.store(addr, Relaxed);
        }
        self.flag.leave();
        keeps
    }

    /// The kept block. Only with the flag.
    #[inline]
    fn get(&self) -> Option<Kept> {
        (self.kept.load(Relaxed) != 0).then(|| Kept {
            addr: self.kept.load(Relaxed),
            len: self.len.load(Relaxed),
            hint: self.hint.load(Relaxed),
        })
    }

    /// The kept block, to look at.
    pub(super) fn peek(&self) -> Option<Kept> {
        self.flag.enter();
        let found = self.get();
        self.flag.leave();
        found
    }

    /// Takes the kept block out, if any; says that `next` is the latest from now on.
    #[inline]
    fn renew(&self, next: Option<Kept>) -> Option<Kept> {
        self.flag.enter();
        let found = self.get();
        self.kept.store(0, Relaxed);
        self.latest.store(next.map_or(0, |k| k.addr), Relaxed);
        if let Some(next) = next {
            self.len.store(next.len, Relaxed);
            self.hint.store(next.hint, Relaxed);
        }
        self.flag.leave();
        found
    }

    /// Takes the kept block out.
    #[inline]
    fn claim(&self) -> Option<Kept> {
        // What is freed after this look was not free before.
        match self.kept.load(Relaxed) {
            0 => None,
            _ => self.renew(None),
        }
    }

    /// Allocations served.
    pub(super) fn allocs(&self) -> u64 {
        self.allocs.load(Relaxed)
    }
}

impl Kept {
    #[inline]
    fn fits(&self, size: u64, align: u64) -> bool {
        self.len == size.div_ceil(UNIT) * UNIT && self.addr & (align - 1) == 0
    }
}

/// The lists, and one larger block.
#[derive(Debug)]
pub(super) struct Quick {
    lists: Vec<Vec<Kept>>,
    pair: Arc<Pair>,
    bytes: u64,
    blocks: u64,
}

impl Quick {
    pub(super) fn new(pair: Arc<Pair>) -> Self {
        Self {
            lists: vec![Vec::new(); CLASSES + 1],
            pair,
            bytes: 0,
            blocks: 0,
        }
    }

    pub(super) fn pair(&self) -> &Pair {
        &self.pair
    }

    /// Bytes and blocks of the lists.
    pub(super) fn sums(&self) -> (u64, u64) {
        (self.bytes, self.blocks)
    }

    /// Bytes of the longest block of the lists.
    pub(super) fn largest(&self) -> u64 {
        let longest = self.lists.iter().rev().find_map(|list| list.last());
        longest.map_or(0, |kept| kept.len)
    }

    /// A kept block of exactly the units that `size` takes, at a multiple of `align`. The second
    /// value is a larger block that must go to the books first, since it is no match: whoever asks
    /// for another size may need its bytes.
    #[inline]
    pub(super) fn take(&mut self, size: u64, align: u64) -> (Option<Kept>, Option<Kept>) {
        if is_large(size) {
            return match self.pair.claim() {
                Some(k) if k.fits(size, align) => {
                    let none = self.pair.renew(Some(k));
                    (Some(k), none)
                }
                other => (None, other),
            };
        }
        let list = &mut self.lists[size.div_ceil(UNIT) as usize];
        let fits = list.last().is_some_and(|k| k.addr & (align - 1) == 0);
        let kept = if fits { list.pop() } else { None };
        if let Some(kept) = kept {
            self.bytes -= kept.len;
            self.blocks -= 1;
        }
        (kept, None)
    }

    /// Says that first fit just gave this place to a larger block. A block that another thread freed
    /// meanwhile must go to the books.
    #[inline]
    #[must_use]
    pub(super) fn placed(&mut self, block: Kept) -> Option<Kept> {
        match is_large(block.len) {
            true => self.pair.renew(Some(block)),
            false => None,
        }
    }

    /// Says that larger memory was freed or taken some other way. A block that is kept stays.
    #[inline]
    pub(super) fn disturbed(&mut self) {
        self.pair.latest.store(0, Relaxed);
    }

    /// Keeps a block, or gives back the one that must go to the books instead.
    #[inline]
    pub(super) fn keep(&mut self, kept: Kept) -> Option<Kept> {
        if is_large(kept.len) {
            return (!self.pair.put(kept.addr)).then_some(kept);
        }
        let list = &mut self.lists[(kept.len / UNIT) as usize];
        if list.len() >= DEPTH || self.bytes + kept.len > BYTES {
            return Some(kept);
        }
        list.push(kept);
        self.bytes += kept.len;
        self.blocks += 1;
        None
    }

    /// Everything, for the books.
    pub(super) fn drain(&mut self) -> Vec<Kept> {
        let large = self.pair.renew(None);
        let lists = self.lists.iter_mut().filter(|_| self.blocks > 0);
        let all = lists.flat_map(|l| l.drain(..)).chain(large).collect();
        (self.bytes, self.blocks) = (0, 0);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(addr: u64, len: u64) -> Kept {
        Kept { addr, len, hint: 0 }
    }

    #[test]
    fn the_same_size_comes_back_last_in_first_out() {
        let mut quick = Quick::new(Arc::default());
        assert!(quick.keep(kept(512, 512)).is_none());
        assert!(quick.keep(kept(1024, 512)).is_none());
        assert!(quick.take(1024, 256).0.is_none());
        assert_eq!(quick.take(300, 256).0.map(|k| k.addr), Some(1024));
        assert!(quick.take(512, 4096).0.is_none());
        assert_eq!(quick.sums(), (512, 1));
        assert_eq!(quick.drain().len(), 1);
        assert_eq!(quick.sums(), (0, 0));
    }

    #[test]
    fn a_larger_block_is_kept_only_while_first_fit_would_give_it_again() {
        let mut quick = Quick::new(Arc::default());
        let large = 1 << 20;
        assert!(quick.placed(kept(7 * large, large)).is_none());
        assert!(quick.keep(kept(large, large)).is_some());
        assert!(quick.keep(kept(7 * large, large)).is_none());
        assert_eq!(quick.take(large, 256).0.map(|k| k.addr), Some(7 * large));
        assert!(quick.keep(kept(7 * large, large)).is_none());
        let (found, out) = quick.take(2 * large, 256);
        assert!(found.is_none() && out.is_some_and(|k| k.addr == 7 * large));
        assert!(quick.placed(kept(7 * large, large)).is_none());
        quick.disturbed();
        assert!(quick.keep(kept(7 * large, large)).is_some());
        assert!(quick.sums().1 == 0 && quick.pair().peek().is_none());
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut quick = Quick::new(Arc::default());
        let out: usize = (0..100)
            .filter_map(|i| quick.keep(kept(i * 16384, 16384)))
            .count();
        assert_eq!(out, 100 - DEPTH);
        assert!(quick.sums().0 <= BYTES);
    }
}
