//! A few freed blocks of up to 64 KiB that a thread hands on without the lane's lock.
//!
//! Everything is an atomic that is only loaded and stored, behind a gate: its owner, who finds it shut, goes
//! to the lane instead of waiting, and those who come for all that is kept, with the lane's lock, stop it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::core::UNIT;
use super::gate::{Gate, Stop};
use crate::sync::atomic::AtomicU32;

/// Blocks of up to this many units are kept, by length: 64 KiB.
pub(super) const CLASSES: usize = 256;
/// Bytes of the longest block that is kept.
pub(super) const LONGEST_KEPT: u64 = CLASSES as u64 * UNIT;
/// Blocks of one length. A model makes magazines by the thousand, which stay.
const DEPTH: usize = if cfg!(shuttle) { 4 } else { 32 };
/// Bytes that a magazine keeps, until its lane says how many it may.
const MOST: u64 = 4 << 20;

/// The class of blocks of so many bytes; 0 if they are not kept.
#[inline]
pub(super) fn class_of(bytes: u64) -> u16 {
    match bytes.div_ceil(UNIT) {
        units if units <= CLASSES as u64 => units as u16,
        _ => 0,
    }
}

/// A block of a class. The books show it as live.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Slot {
    pub(super) addr: u64,
    /// Where the books have it, if nothing has changed since.
    pub(super) hint: u32,
}

/// A slot that one thread writes while others may look.
#[derive(Default)]
struct Place {
    addr: AtomicU64,
    hint: AtomicU32,
}

impl Place {
    #[inline]
    fn get(&self) -> Slot {
        Slot {
            addr: self.addr.load(Relaxed),
            hint: self.hint.load(Relaxed),
        }
    }

    #[inline]
    fn set(&self, slot: Slot) {
        self.addr.store(slot.addr, Relaxed);
        self.hint.store(slot.hint, Relaxed);
    }
}

type Stack = [Place; DEPTH];

/// A thread's stacks of blocks, one for each length. Aligned, so that two threads share no cache line.
#[repr(align(128))]
pub(super) struct Magazine {
    gate: Gate,
    /// Units that may be added.
    room: AtomicU32,
    /// Units kept at most.
    most: AtomicU32,
    allocs: AtomicU64,
    counts: [AtomicU32; CLASSES + 1],
    /// Apart: 128 KiB would not fit every stack on the way here.
    stacks: Box<[Stack; CLASSES + 1]>,
}

impl Magazine {
    /// A magazine of nobody.
    pub(super) fn new() -> Self {
        const ROOM: u32 = (MOST / UNIT) as u32;
        let empty = || std::array::from_fn(|_| Place::default());
        let stacks: Box<[Stack]> = (0..=CLASSES).map(|_| empty()).collect();
        Self {
            gate: Gate::new(),
            room: AtomicU32::new(ROOM),
            most: AtomicU32::new(ROOM),
            allocs: AtomicU64::new(0),
            counts: std::array::from_fn(|_| AtomicU32::new(0)),
            stacks: stacks
                .try_into()
                .unwrap_or_else(|_| Box::new(std::array::from_fn(|_| empty()))),
        }
    }

    /// From now on it is of the threads that sit on a seat. Only while nobody else has it.
    pub(super) fn claim(&self, seat: u32) {
        self.gate.claim(seat);
    }

    /// Keeps owners out of their magazines, for one who sits on `seat` and has their lane's lock.
    pub(super) fn stop<'a>(
        magazines: impl Iterator<Item = &'a Self>,
        seat: u32,
    ) -> Option<Stop<'a>> {
        Stop::new(magazines.map(|one| &one.gate), seat)
    }

    /// Whether nothing is kept, which its owner may change at any time. Only with the lane's lock.
    pub(super) fn is_empty(&self) -> bool {
        self.room.load(Relaxed) == self.most.load(Relaxed)
    }

    /// A block of a class, for a caller on `seat` that asked for one.
    #[inline]
    pub(super) fn take(&self, seat: u32, class: usize) -> Option<Slot> {
        // Also for the compiler, which need not look again.
        if class > CLASSES || !self.gate.enter(seat) {
            return None;
        }
        let found = self.pop(class);
        if found.is_some() {
            let allocs = self.allocs.load(Relaxed).wrapping_add(1);
            self.allocs.store(allocs, Relaxed);
        }
        self.gate.leave();
        found
    }

    /// Keeps a block unless there are enough, or `may` says no, or it has no class.
    #[inline]
    pub(super) fn put(
        &self,
        seat: u32,
        class: u16,
        slot: Slot,
        may: impl FnOnce() -> bool,
    ) -> bool {
        let class = usize::from(class);
        class.wrapping_sub(1) < CLASSES && self.gate.enter(seat) && {
            // Inside: who wants nothing to be kept from now on, and says so first, finds what was kept before.
            let kept = may() && self.push(class, slot);
            self.gate.leave();
            kept
        }
    }

    #[inline]
    fn pop(&self, class: usize) -> Option<Slot> {
        let count = &self.counts[class];
        let left = count.load(Relaxed).checked_sub(1)?;
        let slot = self.stacks[class][left as usize % DEPTH].get();
        count.store(left, Relaxed);
        let room = self.room.load(Relaxed).wrapping_add(class as u32);
        self.room.store(room, Relaxed);
        Some(slot)
    }

    #[inline]
    fn push(&self, class: usize, slot: Slot) -> bool {
        let count = &self.counts[class];
        let at = count.load(Relaxed);
        let (room, is_short) = self.room.load(Relaxed).overflowing_sub(class as u32);
        if at as usize >= DEPTH || is_short {
            return false;
        }
        self.stacks[class][at as usize % DEPTH].set(slot);
        count.store(at + 1, Relaxed);
        self.room.store(room, Relaxed);
        true
    }

    /// Fills a class to the half from `next`, which is asked only for what there is room for. The magazine
    /// may keep `most` bytes from now on.
    pub(super) fn refill(
        &self,
        seat: u32,
        class: u16,
        most: u64,
        mut next: impl FnMut() -> Option<Slot>,
    ) {
        if !self.gate.enter(seat) {
            return;
        }
        self.allow(most);
        let class = usize::from(class);
        let has_room = || {
            let count = self.counts[class].load(Relaxed) as usize;
            count < DEPTH / 2 && class as u32 <= self.room.load(Relaxed)
        };
        while has_room()
            && let Some(slot) = next()
        {
            self.push(class, slot);
        }
        self.gate.leave();
    }

    /// Sets the bytes that it may keep, from what it keeps now on. Only inside, with the lane's lock.
    #[inline]
    fn allow(&self, most: u64) {
        let used = self.most.load(Relaxed) - self.room.load(Relaxed);
        let units = u32::try_from(most.max(MOST) / UNIT).unwrap_or(u32::MAX / 2);
        let most = units.max(used);
        self.most.store(most, Relaxed);
        self.room.store(most - used, Relaxed);
    }

    /// Takes blocks of a class until half are left. The magazine may keep `most` bytes from now on.
    pub(super) fn spill(&self, seat: u32, class: u16, most: u64, mut out: impl FnMut(Slot)) {
        if !self.gate.enter(seat) {
            return;
        }
        self.allow(most);
        let class = usize::from(class);
        while self.counts[class].load(Relaxed) as usize > DEPTH / 2
            && let Some(slot) = self.pop(class)
        {
            out(slot);
        }
        self.gate.leave();
    }

    /// Takes everything. Only for one who stopped its owner.
    pub(super) fn drain(&self, mut out: impl FnMut(u16, Slot)) {
        if !self.is_empty() {
            for class in 1..=CLASSES {
                while let Some(slot) = self.pop(class) {
                    out(class as u16, slot);
                }
            }
        }
    }

    /// Calls `see` with every block. Exact only if its owner is stopped.
    pub(super) fn each(&self, mut see: impl FnMut(u16, Slot)) {
        for class in 1..=CLASSES {
            self.of(class).for_each(|slot| see(class as u16, slot));
        }
    }

    /// Whether the block of a class at an address is here. As exact as [`each`](Self::each).
    pub(super) fn has(&self, class: u16, addr: u64) -> bool {
        self.of(usize::from(class)).any(|slot| slot.addr == addr)
    }

    fn of(&self, class: usize) -> impl Iterator<Item = Slot> + '_ {
        let count = self.counts[class].load(Relaxed) as usize;
        self.stacks[class].iter().take(count).map(Place::get)
    }

    /// Allocations served.
    pub(super) fn allocs(&self) -> u64 {
        self.allocs.load(Relaxed)
    }

    /// As new. Only while nobody else has it.
    pub(super) fn reset(&self) {
        self.drain(|_, _| ());
        self.allow(MOST);
        self.allocs.store(0, Relaxed);
        self.gate.disown();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(addr: u32) -> Slot {
        Slot {
            addr: addr.into(),
            hint: !addr,
        }
    }

    fn magazine() -> Magazine {
        let magazine = Magazine::new();
        magazine.claim(SEAT);
        magazine
    }

    const SEAT: u32 = 5;

    fn put(magazine: &Magazine, class: u16, addr: u32) -> bool {
        magazine.put(SEAT, class, slot(addr), || true)
    }

    /// Bytes and blocks kept.
    fn sums(magazine: &Magazine) -> (u64, u64) {
        let (mut bytes, mut blocks) = (0, 0);
        magazine.each(|class, _| {
            bytes += u64::from(class) * UNIT;
            blocks += 1;
        });
        (bytes, blocks)
    }

    #[test]
    fn blocks_come_back_by_length_last_in_first_out() {
        let magazine = magazine();
        assert_eq!((class_of(0), class_of(257), class_of(65536)), (0, 2, 256));
        assert_eq!(class_of(65537), 0);
        assert!(put(&magazine, 2, 4) && put(&magazine, 2, 8) && put(&magazine, 3, 20));
        assert!(magazine.has(2, 8) && !magazine.has(2, 9) && !magazine.has(3, 8));
        assert_eq!(sums(&magazine), (7 * UNIT, 3));
        assert_eq!(magazine.take(SEAT, 2), Some(slot(8)));
        assert_eq!(magazine.take(SEAT, 4), None);
        assert_eq!(magazine.allocs(), 1);
        let mut all = Vec::new();
        magazine.drain(|class, slot| all.push((class, slot)));
        assert_eq!(all, [(2, slot(4)), (3, slot(20))]);
        assert_eq!(sums(&magazine), (0, 0));
    }

    #[test]
    fn what_is_kept_is_bounded_and_spills_to_the_half() {
        let magazine = magazine();
        let kept = (0..100).filter(|i| put(&magazine, 1, *i)).count();
        assert_eq!(kept, DEPTH);
        let mut out = 0;
        magazine.spill(SEAT, 1, 0, |_| out += 1);
        assert_eq!(out, DEPTH / 2);
        magazine.refill(SEAT, 1, 0, || Some(slot(7)));
        assert_eq!(sums(&magazine).1, DEPTH as u64 / 2);
        for class in 1..=CLASSES as u16 {
            (0..100).for_each(|i| {
                put(&magazine, class, i);
            });
        }
        assert!(sums(&magazine).0 <= MOST);
        magazine.refill(SEAT, 256, 4 * MOST, || None);
        (0..100).for_each(|i| {
            put(&magazine, 256, i);
        });
        let bytes = sums(&magazine).0;
        assert!(bytes > MOST && bytes <= 4 * MOST);
    }

    #[test]
    fn nobody_but_its_owner_gets_in_and_not_while_it_is_stopped() {
        let magazine = magazine();
        assert!(!magazine.put(SEAT + 1, 1, slot(4), || true));
        assert!(!magazine.put(SEAT, 1, slot(4), || false));
        assert!(put(&magazine, 1, 4) && magazine.take(SEAT + 1, 1).is_none());
        let stop = Magazine::stop([&magazine].into_iter(), SEAT);
        assert!(stop.is_some() && magazine.take(SEAT, 1).is_none() && !put(&magazine, 1, 5));
        drop(stop);
        assert_eq!(magazine.take(SEAT, 1), Some(slot(4)));
    }

    #[test]
    fn no_block_is_lost_or_had_twice_between_threads() {
        let magazine = magazine();
        (0..8).for_each(|i| assert!(put(&magazine, 1, i)));
        let mut away = Vec::new();
        std::thread::scope(|scope| {
            let owner = scope.spawn(|| {
                for _ in 0..100_000 {
                    if let Some(one) = magazine.take(SEAT, 1) {
                        while !magazine.put(SEAT, 1, one, || true) {}
                    }
                }
            });
            while !owner.is_finished() {
                let Some(stop) = Magazine::stop([&magazine].into_iter(), SEAT + 1) else {
                    continue;
                };
                magazine.drain(|_, slot| away.push(slot));
                for slot in away.drain(..) {
                    assert!(magazine.push(1, slot));
                }
                drop(stop);
            }
        });
        let mut all = Vec::new();
        magazine.drain(|_, slot| all.push(slot.addr));
        all.sort_unstable();
        assert_eq!(all, (0..8).collect::<Vec<_>>());
    }
}
