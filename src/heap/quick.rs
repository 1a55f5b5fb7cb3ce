//! Freed blocks kept whole for the next allocation of their size.
//!
//! Most allocations ask for a size that was freed a moment ago. Joining the freed block with its
//! neighbours only to cut it out again costs several cache lines; handing it over costs none of the
//! block's own: the books are not touched, and show what is kept here as live. It is little, and goes back
//! to them before anything is mapped.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};

use super::core::UNIT;
use super::gate::{Gate, Stop, look_until};
use super::magazine::{CLASSES, Slot};
use super::seat::seat;

/// Blocks that the list of a length keeps. How often a list runs empty or full, which costs several cache
/// lines that nobody else has touched for long, falls with its square.
const DEPTH: usize = 512;
/// Bytes that all lists keep together, at least.
const BYTES: u64 = 8 << 20;
/// Of so many live bytes one more is kept.
const SHARE: u64 = 128;

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

/// A lock that is only tried on the hot path. While one thread alone comes, it is a gate of that thread, which costs it
/// no exchange; from when a second one comes with the lane's lock, a flag for all.
#[derive(Debug)]
struct Bias {
    gate: Gate,
    is_shared: AtomicBool,
    flag: AtomicBool,
}

/// How a thread got in.
enum Way<'a> {
    Gate,
    Flag,
    /// The owner of the gate is kept out meanwhile.
    Stop(Stop<'a>),
}

impl Bias {
    #[inline]
    fn try_enter(&self, seat: u32) -> Option<Way<'_>> {
        if self.gate.enter(seat) {
            if !self.is_shared.load(Relaxed) {
                return Some(Way::Gate);
            }
            self.gate.leave();
        }
        self.try_flag()
    }

    #[inline]
    fn try_flag(&self) -> Option<Way<'_>> {
        let is_free = self.is_shared.load(Acquire)
            && !self.flag.load(Relaxed)
            && !self.flag.swap(true, Acquire);
        is_free.then_some(Way::Flag)
    }

    /// For one who must know, and has the lane's lock. If it `stays`, it comes as the owner does, or as one of many.
    /// `None` only if the system refuses a barrier.
    fn enter(&self, stays: bool) -> Option<Way<'_>> {
        if !self.is_shared.load(Relaxed) {
            let seat = seat();
            let is_own = self.gate.enter(seat);
            if is_own || stays && self.gate.claim(seat) && self.gate.enter(seat) {
                return Some(Way::Gate);
            }
            let stop = Stop::new([&self.gate].into_iter(), seat)?;
            if !stays {
                return Some(Way::Stop(stop));
            }
            // Its owner finds out when it comes next.
            self.is_shared.store(true, Release);
        }
        let mut way = None;
        look_until(|| {
            way = self.try_flag();
            way.is_some()
        });
        way
    }

    /// As new. Only while nobody else has it.
    fn reset(&self) {
        self.gate.disown();
        self.is_shared.store(false, Relaxed);
    }

    #[inline]
    fn leave(&self, way: Way<'_>) {
        match way {
            Way::Gate => self.gate.leave(),
            Way::Flag => self.flag.store(false, Release),
            Way::Stop(stop) => drop(stop),
        }
    }
}

impl Default for Bias {
    fn default() -> Self {
        Self {
            gate: Gate::new(),
            is_shared: AtomicBool::new(false),
            flag: AtomicBool::new(false),
        }
    }
}

/// One larger freed block, which threads hand on without the lane's lock. The books show it as live.
///
/// It is kept only if it is the latest that first fit gave, and nothing was freed since: then first
/// fit would give the same place again, and keeping it changes no layout. Keeping any block of the
/// size last freed cost up to 2 % of footprint on recorded traces.
#[derive(Default, Debug)]
#[repr(align(128))]
pub(super) struct Pair {
    bias: Bias,
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
    pub(super) fn take(&self, seat: u32, size: u64, align: u64) -> Option<Kept> {
        if self.kept.load(Relaxed) == 0 {
            return None;
        }
        let way = self.bias.try_enter(seat)?;
        let found = self.get().filter(|k| k.fits(size, align));
        if found.is_some() {
            self.latest.store(self.kept.load(Relaxed), Relaxed);
            self.kept.store(0, Relaxed);
            let allocs = self.allocs.load(Relaxed).wrapping_add(1);
            self.allocs.store(allocs, Relaxed);
        }
        self.bias.leave(way);
        found
    }

    /// Keeps a block if it is the latest and `may` says yes.
    #[inline]
    pub(super) fn put(&self, seat: u32, addr: u64, may: impl FnOnce() -> bool) -> bool {
        if self.latest.load(Relaxed) != addr {
            return false;
        }
        let Some(way) = self.bias.try_enter(seat) else {
            return false;
        };
        let keeps = self.latest.load(Relaxed) == addr && self.kept.load(Relaxed) == 0 && may();
        if keeps {
            self.kept.store(addr, Relaxed);
        }
        self.bias.leave(way);
        keeps
    }

    /// The kept block. Only for one who is inside.
    #[inline]
    fn get(&self) -> Option<Kept> {
        (self.kept.load(Relaxed) != 0).then(|| Kept {
            addr: self.kept.load(Relaxed),
            len: self.len.load(Relaxed),
            hint: self.hint.load(Relaxed),
        })
    }

    /// The kept block, to look at. Only with the lane's lock.
    pub(super) fn peek(&self) -> Option<Kept> {
        let way = self.bias.enter(false)?;
        let found = self.get();
        self.bias.leave(way);
        found
    }

    /// Takes the kept block out, if any; says that `next` is the latest from now on. Only with the lane's lock.
    #[inline]
    fn renew(&self, next: Option<Kept>) -> Option<Kept> {
        let way = self.bias.enter(next.is_some())?;
        let found = self.get();
        self.kept.store(0, Relaxed);
        self.latest.store(next.map_or(0, |k| k.addr), Relaxed);
        if let Some(next) = next {
            self.len.store(next.len, Relaxed);
            self.hint.store(next.hint, Relaxed);
        }
        self.bias.leave(way);
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

    /// As new. Only while nobody else has it.
    pub(super) fn reset(&self) {
        self.bias.reset();
        self.latest.store(0, Relaxed);
        self.kept.store(0, Relaxed);
        self.allocs.store(0, Relaxed);
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
    lists: Vec<Vec<Slot>>,
    pair: &'static Pair,
    bytes: u64,
}

impl Quick {
    pub(super) fn new(pair: &'static Pair) -> Self {
        Self {
            lists: vec![Vec::new(); CLASSES + 1],
            pair,
            bytes: 0,
        }
    }

    pub(super) fn pair(&self) -> &'static Pair {
        self.pair
    }

    /// Bytes and blocks of the lists.
    pub(super) fn sums(&self) -> (u64, u64) {
        (
            self.bytes,
            self.lists.iter().map(Vec::len).sum::<usize>() as u64,
        )
    }

    /// Bytes of the longest block of the lists.
    pub(super) fn largest(&self) -> u64 {
        let longest = self.lists.iter().rposition(|list| !list.is_empty());
        longest.map_or(0, |class| class as u64 * UNIT)
    }

    /// Bytes that the lists keep at most beside so many live ones.
    pub(super) fn most(live: u64) -> u64 {
        BYTES.max(live / SHARE)
    }

    /// Whether the block of a class at an address is in the lists.
    pub(super) fn has(&self, class: u16, addr: u64) -> bool {
        self.lists[usize::from(class)]
            .iter()
            .any(|slot| slot.addr == addr)
    }

    /// Every block of the lists, with its class.
    pub(super) fn each(&self) -> impl Iterator<Item = (u16, Slot)> + '_ {
        let lists = (0u16..).zip(&self.lists);
        lists.flat_map(|(class, list)| list.iter().map(move |slot| (class, *slot)))
    }

    /// A kept block of a class, if the next one fits.
    #[inline]
    pub(super) fn take(&mut self, class: u16, fits: impl FnOnce(Slot) -> bool) -> Option<Slot> {
        let slot = self.lists[usize::from(class)].pop_if(|slot| fits(*slot))?;
        self.bytes -= u64::from(class) * UNIT;
        Some(slot)
    }

    /// A kept larger block of exactly the units that `size` takes, at a multiple of `align`. The second
    /// value is one that must go to the books first, since it is no match: whoever asks for another size may
    /// need its bytes.
    #[inline]
    pub(super) fn take_large(&mut self, size: u64, align: u64) -> (Option<Kept>, Option<Kept>) {
        match self.pair.claim() {
            Some(k) if k.fits(size, align) => {
                let none = self.pair.renew(Some(k));
                (Some(k), none)
            }
            other => (None, other),
        }
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

    /// Keeps a block of a class beside so many live bytes; false if it must go to the books instead.
    #[inline]
    #[must_use]
    pub(super) fn keep(&mut self, class: u16, slot: Slot, live: u64) -> bool {
        let list = &mut self.lists[usize::from(class)];
        let bytes = self.bytes + u64::from(class) * UNIT;
        if list.len() >= DEPTH || bytes > Self::most(live) {
            return false;
        }
        list.push(slot);
        self.bytes = bytes;
        true
    }

    /// Keeps a larger block if it is the latest; false if it must go to the books instead.
    #[inline]
    #[must_use]
    pub(super) fn keep_large(&self, addr: u64) -> bool {
        self.pair.put(seat(), addr, || true)
    }

    /// Every block of the lists, and the larger one, for the books. If it `settles`, also a larger one that is being kept at
    /// this moment.
    pub(super) fn drain(&mut self, settles: bool) -> (Vec<Slot>, Option<Kept>) {
        let lists = self.lists.iter_mut().filter(|_| self.bytes > 0);
        let all = lists.flat_map(|l| l.drain(..)).collect();
        self.bytes = 0;
        let large = match settles {
            true => self.pair.renew(None),
            false => self.pair.claim(),
        };
        self.disturbed();
        (all, large)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(addr: u64, len: u64) -> Kept {
        Kept { addr, len, hint: 0 }
    }

    fn slot(addr: u64) -> Slot {
        Slot { addr, hint: 0 }
    }

    #[test]
    fn the_same_size_comes_back_last_in_first_out() {
        let mut quick = Quick::new(Box::leak(Box::default()));
        assert!(quick.keep(2, slot(2), 0) && quick.keep(2, slot(4), 0));
        assert_eq!((quick.sums(), quick.largest()), ((1024, 2), 512));
        assert!(quick.has(2, 4) && !quick.has(2, 5) && !quick.has(3, 4));
        assert_eq!(quick.take(4, |_| true), None);
        assert_eq!(quick.take(2, |slot| slot.addr == 2), None);
        assert_eq!(quick.take(2, |_| true), Some(slot(4)));
        assert_eq!(quick.sums(), (512, 1));
        let (lists, large) = quick.drain(true);
        assert!(lists == [slot(2)] && large.is_none());
        assert_eq!((quick.sums(), quick.largest()), ((0, 0), 0));
    }

    #[test]
    fn a_larger_block_is_kept_only_while_first_fit_would_give_it_again() {
        let mut quick = Quick::new(Box::leak(Box::default()));
        let large = 1 << 20;
        let found = |found: (Option<Kept>, Option<Kept>)| found.0.map(|k| k.addr);
        assert!(quick.placed(kept(7 * large, large)).is_none());
        assert!(!quick.keep_large(large) && quick.keep_large(7 * large));
        assert_eq!(found(quick.take_large(large, 256)), Some(7 * large));
        assert!(quick.keep_large(7 * large));
        let (none, out) = quick.take_large(2 * large, 256);
        assert!(none.is_none() && out.is_some_and(|k| k.addr == 7 * large));
        assert!(quick.placed(kept(7 * large, large)).is_none());
        quick.disturbed();
        assert!(!quick.keep_large(7 * large));
        assert!(quick.sums().1 == 0 && quick.pair().peek().is_none());
    }

    /// One thread tries, as on the hot path; another comes for looks, then to stay. No count is lost.
    #[test]
    fn a_pair_is_its_threads_until_a_second_one_comes_to_stay() {
        let (bias, count) = (Bias::default(), AtomicU64::new(0));
        let add = |count: &AtomicU64| count.store(count.load(Relaxed) + 1, Relaxed);
        let (looks, stays, done) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
        let mut tried = 0u64;
        let own = seat();
        assert!(bias.gate.claim(own));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    let settles = looks.load(Relaxed) >= 100;
                    if let Some(way) = bias.enter(settles) {
                        add(&count);
                        add(if settles { &stays } else { &looks });
                        bias.leave(way);
                    }
                }
            });
            while tried < 300_000 || stays.load(Relaxed) < 100 {
                if let Some(way) = bias.try_enter(own) {
                    add(&count);
                    bias.leave(way);
                    tried += 1;
                }
            }
            done.store(true, Relaxed);
        });
        assert!(bias.is_shared.load(Relaxed));
        let others = looks.load(Relaxed) + stays.load(Relaxed);
        assert_eq!(count.load(Relaxed), tried + others);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut quick = Quick::new(Box::leak(Box::default()));
        let kept = |quick: &mut Quick, class: u16, live| {
            (0..1000)
                .filter(|i| quick.keep(class, slot(*i), live))
                .count()
        };
        assert_eq!(kept(&mut quick, 1, 0), DEPTH);
        assert!(kept(&mut quick, 256, 0) < 128);
        assert!(quick.sums().0 <= BYTES);
        let live = 4 << 30;
        assert!(kept(&mut quick, 256, live) > 128 && quick.sums().0 > BYTES);
        assert!(quick.sums().0 <= live / SHARE);
    }
}
