//! Freed blocks kept whole for the next allocation of their size.
//!
//! Most allocations ask for a size that was freed a moment ago. Joining the freed block with its
//! neighbours only to cut it out again costs several cache lines; handing it over costs one. What
//! is kept here is little and goes back to the books before anything is mapped.

use super::core::UNIT;

/// Sizes up to this many units have a list each: 16 KiB.
const CLASSES: usize = 64;
/// Blocks a list keeps.
const DEPTH: usize = 32;
/// Bytes that all lists keep together.
const BYTES: u64 = 2 << 20;

/// A freed block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kept {
    pub(super) addr: u64,
    pub(super) len: u64,
    pub(super) hint: u32,
}

/// The lists, and one larger block.
///
/// A larger block is kept only if it is the latest that first fit gave, and nothing was freed since:
/// then first fit would give the same place again, and keeping it changes no layout. Keeping any
/// block of the size last freed cost up to 2 % of footprint on recorded traces.
#[derive(Debug)]
pub(super) struct Quick {
    lists: Vec<Vec<Kept>>,
    pair: Option<Kept>,
    latest: u64,
    bytes: u64,
    blocks: u64,
}

impl Default for Quick {
    fn default() -> Self {
        Self {
            lists: vec![Vec::new(); CLASSES + 1],
            pair: None,
            latest: 0,
            bytes: 0,
            blocks: 0,
        }
    }
}

impl Quick {
    /// Bytes kept.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes + self.pair.map_or(0, |k| k.len)
    }

    /// Blocks kept.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks + u64::from(self.pair.is_some())
    }

    /// Bytes of the longest block kept.
    pub(super) fn largest(&self) -> u64 {
        let longest = self.lists.iter().filter_map(|list| list.last());
        let longest = longest.chain(&self.pair).map(|kept| kept.len);
        longest.max().unwrap_or(0)
    }

    /// A kept block of exactly the units that `size` takes, at a multiple of `align`. The second
    /// value is a larger block that must go to the books first, since it is no match: whoever asks
    /// for another size may need its bytes.
    #[inline]
    pub(super) fn take(&mut self, size: u64, align: u64) -> (Option<Kept>, Option<Kept>) {
        let units = size.div_ceil(UNIT);
        if let Some(list) = self
            .lists
            .get_mut(units as usize)
            .filter(|_| units <= CLASSES as u64)
        {
            let fits = list.last().is_some_and(|k| k.addr & (align - 1) == 0);
            let kept = if fits { list.pop() } else { None };
            if let Some(kept) = kept {
                self.bytes -= kept.len;
                self.blocks -= 1;
            }
            return (kept, None);
        }
        match self.pair.take() {
            Some(k) if k.len == units * UNIT && k.addr & (align - 1) == 0 => {
                self.latest = k.addr;
                (Some(k), None)
            }
            other => (None, other),
        }
    }

    /// Says that first fit just gave this place to a larger block.
    #[inline]
    pub(super) fn placed(&mut self, len: u64, addr: u64) {
        if len > CLASSES as u64 * UNIT {
            self.latest = addr;
        }
    }

    /// Says that larger memory was freed or taken some other way.
    #[inline]
    pub(super) fn disturbed(&mut self) {
        self.latest = 0;
    }

    /// Keeps a block, or gives back the one that must go to the books instead.
    #[inline]
    pub(super) fn keep(&mut self, kept: Kept) -> Option<Kept> {
        let units = kept.len / UNIT;
        if units > CLASSES as u64 {
            if kept.addr == self.latest && self.pair.is_none() {
                self.pair = Some(kept);
                return None;
            }
            return Some(kept);
        }
        let list = &mut self.lists[units as usize];
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
        self.latest = 0;
        if self.blocks() == 0 {
            return Vec::new();
        }
        let mut all: Vec<Kept> = self.lists.iter_mut().flat_map(|l| l.drain(..)).collect();
        all.extend(self.pair.take());
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
        let mut quick = Quick::default();
        assert!(quick.keep(kept(512, 512)).is_none());
        assert!(quick.keep(kept(1024, 512)).is_none());
        assert!(quick.take(1024, 256).0.is_none());
        assert_eq!(quick.take(300, 256).0.map(|k| k.addr), Some(1024));
        assert!(quick.take(512, 4096).0.is_none());
        assert_eq!((quick.bytes(), quick.blocks()), (512, 1));
        assert_eq!(quick.drain().len(), 1);
        assert_eq!((quick.bytes(), quick.blocks()), (0, 0));
    }

    #[test]
    fn a_larger_block_is_kept_only_while_first_fit_would_give_it_again() {
        let mut quick = Quick::default();
        let large = 1 << 20;
        quick.placed(large, 7 * large);
        assert!(quick.keep(kept(large, large)).is_some());
        assert!(quick.keep(kept(7 * large, large)).is_none());
        assert_eq!(quick.take(large, 256).0.map(|k| k.addr), Some(7 * large));
        assert!(quick.keep(kept(7 * large, large)).is_none());
        let (found, out) = quick.take(2 * large, 256);
        assert!(found.is_none() && out.is_some_and(|k| k.addr == 7 * large));
        quick.disturbed();
        assert!(quick.keep(kept(7 * large, large)).is_some());
        assert_eq!(quick.blocks(), 0);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut quick = Quick::default();
        let out: usize = (0..100)
            .filter_map(|i| quick.keep(kept(i * 16384, 16384)))
            .count();
        assert_eq!(out, 100 - DEPTH);
        assert!(quick.bytes() <= BYTES);
    }
}
