//! A few freed blocks of up to 64 KiB that threads hand on without the lane's lock.
//!
//! Everything is an atomic, guarded by a flag that is only ever tried: taking it is one exchange, giving
//! it up is a plain store, and whoever finds it taken goes to the lane instead of waiting.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};

use super::core::UNIT;

/// Blocks of up to this many units are kept, by length: 64 KiB.
pub(super) const CLASSES: usize = 256;
/// Blocks of one length.
const DEPTH: usize = 32;
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

/// A block of a class: its unit in the lane's addresses, and its hint. The books show it as live.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Slot {
    pub(super) unit: u32,
    pub(super) hint: u32,
}

impl Slot {
    /// Its address in a lane that begins at `base`.
    #[inline]
    pub(super) fn addr(self, base: u64) -> u64 {
        base + u64::from(self.unit) * UNIT
    }

    #[inline]
    fn pack(self) -> u64 {
        u64::from(self.unit) << 32 | u64::from(self.hint)
    }

    #[inline]
    fn unpack(packed: u64) -> Self {
        Self {
            unit: (packed >> 32) as u32,
            hint: packed as u32,
        }
    }
}

/// A lock that is only tried on the hot path.
#[derive(Default, Debug)]
pub(super) struct Flag(AtomicBool);

impl Flag {
    #[inline]
    pub(super) fn try_enter(&self) -> bool {
        !self.0.load(Relaxed) && !self.0.swap(true, Acquire)
    }

    /// For those who must know: the flag is held for a few instructions.
    pub(super) fn enter(&self) {
        let mut looks = 0u32;
        while !self.try_enter() {
            looks += 1;
            match looks % 64 {
                // Its holder may have lost its core.
                0 => std::thread::yield_now(),
                _ => std::hint::spin_loop(),
            }
        }
    }

    #[inline]
    pub(super) fn leave(&self) {
        self.0.store(false, Release);
    }
}

/// Stacks of blocks, one for each length. Aligned, so that two threads share no cache line.
#[repr(align(128))]
pub(super) struct Magazine {
    flag: Flag,
    units: AtomicU32,
    /// Units kept at most.
    most: AtomicU32,
    allocs: AtomicU64,
    counts: [AtomicU32; CLASSES + 1],
    /// Apart: 64 KiB would not fit every stack on the way here.
    slots: Box<[[AtomicU64; DEPTH]]>,
}

impl Default for Magazine {
    fn default() -> Self {
        Self {
            flag: Flag::default(),
            units: AtomicU32::new(0),
            most: AtomicU32::new((MOST / UNIT) as u32),
            allocs: AtomicU64::new(0),
            counts: std::array::from_fn(|_| AtomicU32::new(0)),
            slots: (0..=CLASSES)
                .map(|_| std::array::from_fn(|_| AtomicU64::new(0)))
                .collect(),
        }
    }
}

impl Magazine {
    /// A block of a class, for a caller that asked for one.
    #[inline]
    pub(super) fn take(&self, class: u16) -> Option<Slot> {
        if !self.flag.try_enter() {
            return None;
        }
        let found = self.pop(class);
        if found.is_some() {
            self.allocs
                .store(self.allocs.load(Relaxed).wrapping_add(1), Relaxed);
        }
        self.flag.leave();
        found
    }

    /// Keeps a block unless there are enough.
    #[inline]
    pub(super) fn put(&self, class: u16, slot: Slot) -> bool {
        self.flag.try_enter() && {
            let kept = self.push(class, slot);
            self.flag.leave();
            kept
        }
    }

    #[inline]
    fn pop(&self, class: u16) -> Option<Slot> {
        let count = &self.counts[usize::from(class)];
        let left = count.load(Relaxed).checked_sub(1)?;
        let slot = self.slots[usize::from(class)][left as usize % DEPTH].load(Relaxed);
        count.store(left, Relaxed);
        self.units
            .store(self.units.load(Relaxed) - u32::from(class), Relaxed);
        Some(Slot::unpack(slot))
    }

    #[inline]
    fn push(&self, class: u16, slot: Slot) -> bool {
        let count = &self.counts[usize::from(class)];
        let at = count.load(Relaxed) as usize;
        let units = self.units.load(Relaxed) + u32::from(class);
        if at >= DEPTH || units > self.most.load(Relaxed) {
            return false;
        }
        self.slots[usize::from(class)][at % DEPTH].store(slot.pack(), Relaxed);
        count.store(at as u32 + 1, Relaxed);
        self.units.store(units, Relaxed);
        true
    }

    /// Fills a class to the half from `next`, which is asked only for what there is room for. The magazine
    /// may keep `most` bytes from now on.
    pub(super) fn refill(&self, class: u16, most: u64, mut next: impl FnMut() -> Option<Slot>) {
        if !self.flag.try_enter() {
            return;
        }
        self.allow(most);
        let room = |_: &()| {
            let count = self.counts[usize::from(class)].load(Relaxed) as usize;
            let units = self.units.load(Relaxed) + u32::from(class);
            count < DEPTH / 2 && units <= self.most.load(Relaxed)
        };
        while room(&())
            && let Some(slot) = next()
        {
            self.push(class, slot);
        }
        self.flag.leave();
    }

    /// Only with the flag.
    #[inline]
    fn allow(&self, most: u64) {
        let units = u32::try_from(most.max(MOST) / UNIT).unwrap_or(u32::MAX / 2);
        self.most.store(units, Relaxed);
    }

    /// Takes blocks of a class until half are left. The magazine may keep `most` bytes from now on.
    pub(super) fn spill(&self, class: u16, most: u64, mut out: impl FnMut(Slot)) {
        if !self.flag.try_enter() {
            return;
        }
        self.allow(most);
        while self.counts[usize::from(class)].load(Relaxed) as usize > DEPTH / 2
            && let Some(slot) = self.pop(class)
        {
            out(slot);
        }
        self.flag.leave();
    }

    /// Takes everything.
    pub(super) fn drain(&self, mut out: impl FnMut(u16, Slot)) {
        self.flag.enter();
        if self.units.load(Relaxed) > 0 {
            for class in 1..=CLASSES as u16 {
                while let Some(slot) = self.pop(class) {
                    out(class, slot);
                }
            }
        }
        self.flag.leave();
    }

    /// Calls `see` with every block.
    pub(super) fn each(&self, mut see: impl FnMut(u16, Slot)) {
        self.flag.enter();
        for class in 1..=CLASSES as u16 {
            let count = self.counts[usize::from(class)].load(Relaxed) as usize;
            for slot in &self.slots[usize::from(class)][..count.min(DEPTH)] {
                see(class, Slot::unpack(slot.load(Relaxed)));
            }
        }
        self.flag.leave();
    }

    /// Whether the block of a class at a unit is here.
    pub(super) fn has(&self, class: u16, unit: u32) -> bool {
        self.flag.enter();
        let count = self.counts[usize::from(class)].load(Relaxed) as usize;
        let slots = &self.slots[usize::from(class)][..count.min(DEPTH)];
        let found = slots
            .iter()
            .any(|slot| Slot::unpack(slot.load(Relaxed)).unit == unit);
        self.flag.leave();
        found
    }

    /// Allocations served.
    pub(super) fn allocs(&self) -> u64 {
        self.allocs.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(unit: u32) -> Slot {
        Slot { unit, hint: !unit }
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
        let magazine = Magazine::default();
        assert_eq!((class_of(0), class_of(257), class_of(65536)), (0, 2, 256));
        assert_eq!(class_of(65537), 0);
        assert!(magazine.put(2, slot(4)) && magazine.put(2, slot(8)) && magazine.put(3, slot(20)));
        assert!(magazine.has(2, 8) && !magazine.has(2, 9) && !magazine.has(3, 8));
        assert_eq!(sums(&magazine), (7 * UNIT, 3));
        assert_eq!(magazine.take(2), Some(slot(8)));
        assert_eq!(magazine.take(4), None);
        assert_eq!(magazine.allocs(), 1);
        let mut all = Vec::new();
        magazine.drain(|class, slot| all.push((class, slot)));
        assert_eq!(all, [(2, slot(4)), (3, slot(20))]);
        assert_eq!(sums(&magazine), (0, 0));
    }

    #[test]
    fn what_is_kept_is_bounded_and_spills_to_the_half() {
        let magazine = Magazine::default();
        let kept = (0..100).filter(|i| magazine.put(1, slot(*i))).count();
        assert_eq!(kept, DEPTH);
        let mut out = 0;
        magazine.spill(1, 0, |_| out += 1);
        assert_eq!(out, DEPTH / 2);
        magazine.refill(1, 0, || Some(slot(7)));
        assert_eq!(sums(&magazine).1, DEPTH as u64 / 2);
        for class in 1..=CLASSES as u16 {
            (0..100).for_each(|i| {
                magazine.put(class, slot(i));
            });
        }
        assert!(sums(&magazine).0 <= MOST);
        magazine.refill(256, 4 * MOST, || None);
        (0..100).for_each(|i| {
            magazine.put(256, slot(i));
        });
        let bytes = sums(&magazine).0;
        assert!(bytes > MOST && bytes <= 4 * MOST);
    }

    #[test]
    fn no_block_is_lost_or_had_twice_between_threads() {
        let magazine = Magazine::default();
        (0..8).for_each(|i| assert!(magazine.put(1, slot(i))));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        if let Some(one) = magazine.take(1) {
                            while !magazine.put(1, one) {}
                        }
                    }
                });
            }
        });
        let mut all = Vec::new();
        magazine.drain(|_, slot| all.push(slot.unit));
        all.sort_unstable();
        assert_eq!(all, (0..8).collect::<Vec<_>>());
    }
}
