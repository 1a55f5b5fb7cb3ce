//! What leaves later: old mappings once queued work is done with them, empty granules, and the heap
//! itself. What the driver does not take back now is kept and tried again.

use std::time::Instant;

use super::books::Books;
use super::heap::Inner;
use super::plan::Slot;
use super::uses::{Fences, Uses};
use crate::driver::sim::{Nanos, SimDriver};
use crate::driver::{Driver, DriverResult};
use crate::pool::Granule;
use crate::space::Reservation;
use crate::stream::{Fence, Stream};
use crate::units::VaRange;
use crate::{Error, Result};

/// How long fences that were just recorded may take to pass on streams without work.
const GRACE: std::time::Duration = std::time::Duration::from_micros(50);

/// Pause between two looks at fences.
const PAUSE: std::time::Duration = std::time::Duration::from_micros(20);

/// A mapping that is nobody's any more. Its slot is busy until it is gone.
#[derive(Debug)]
pub(super) struct Stale {
    pub(super) slot: usize,
    /// Who may still use it at this address.
    pub(super) uses: Uses,
    /// Fences behind their work; `None` if they are to be taken yet.
    pub(super) fences: Option<Fences>,
    /// The granule, if it is mapped nowhere else.
    pub(super) granule: Option<Granule>,
}

impl Stale {
    pub(super) fn new(slot: usize, uses: Uses) -> Self {
        Self {
            slot,
            uses,
            fences: None,
            granule: None,
        }
    }

    /// Whether all work is done with it. What cannot be asked is not.
    fn is_idle(&mut self) -> bool {
        if self.fences.is_none() {
            self.fences = self.uses.fences().ok();
        }
        self.fences.as_mut().is_some_and(Fences::have_passed)
    }
}

impl Inner {
    /// Takes fences for old mappings that have none, one a stream. The caller has the turn.
    pub(super) fn fence_stale(&self) {
        let mut all = Uses::default();
        let without = |stale: &&mut Stale| stale.fences.is_none();
        for stale in self.heap.lock().stale.iter_mut().filter(without) {
            all.join(&stale.uses);
        }
        let mut taken: Vec<(&Stream, Fence)> = Vec::new();
        for stream in all.iter() {
            if let Ok(fence) = stream.fence() {
                taken.push((stream, fence));
            }
        }
        let fence_of = |stream: &Stream| {
            let found = taken.iter().find(|(other, _)| *other == stream);
            found.map(|(_, fence)| fence.clone())
        };
        // The same ones: the caller has the turn.
        for stale in self.heap.lock().stale.iter_mut().filter(without) {
            stale.fences = stale.uses.iter().map(fence_of).collect();
        }
    }

    /// Unmaps old mappings that no work uses any more, or only those of some slots; neighbours in one
    /// call. How many calls that took. The caller has the turn.
    pub(super) fn retire(&self, only: Option<&[usize]>) -> u64 {
        let mut idle = {
            let mut heap = self.heap.lock();
            if heap.stale.is_empty() {
                return 0;
            }
            std::mem::take(&mut heap.stale)
        };
        let mut kept: Vec<Stale> = Vec::new();
        // Mostly all wait for the same few fences, the oldest first.
        let wanted = |s: &Stale| only.is_none_or(|only| only.contains(&s.slot));
        let mut passed: Vec<Stale> = Vec::with_capacity(idle.len());
        let mut last: Option<(Fence, bool)> = None;
        for mut stale in idle.drain(..) {
            let single = stale.fences.as_ref().and_then(Fences::single).cloned();
            let known = match (&single, &last) {
                (Some(only), Some((fence, done))) if only.is_same(fence) => Some(*done),
                _ => None,
            };
            let done = wanted(&stale) && known.unwrap_or_else(|| stale.is_idle());
            if let (Some(fence), true) = (single, wanted(&stale)) {
                last = Some((fence, done));
            }
            match done {
                true => passed.push(stale),
                false => kept.push(stale),
            }
        }
        passed.sort_unstable_by_key(|stale| stale.slot);
        let mut calls = 0;
        let mut gone: Vec<usize> = Vec::new();
        let mut rest = passed.into_iter().peekable();
        while let Some(first) = rest.next() {
            let mut group = vec![first];
            while let Some(next) = rest.next_if(|s| s.slot == group[0].slot + group.len()) {
                group.push(next);
            }
            calls += 1;
            let unmapped = match self.stretch(group[0].slot, group.len()) {
                Some(range) => self.driver().unmap(range).is_ok(),
                None => false,
            };
            match unmapped {
                true => gone.extend(group.into_iter().map(|stale| stale.slot)),
                false => kept.extend(group),
            }
        }
        let mut heap = self.heap.lock();
        gone.into_iter()
            .for_each(|slot| heap.books.slots[slot] = Slot::Hole);
        heap.stale.extend(kept);
        calls
    }

    /// The addresses of `n` slots.
    pub(super) fn stretch(&self, slot: usize, n: usize) -> Option<VaRange> {
        let unit = self.heap.lock().books.unit;
        let offset = unit.checked_mul(slot as u64)?;
        self.range(offset, unit.checked_mul(n as u64)?)
    }

    /// Waits on the host until the old mappings of these slots, or of all, are gone.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] after the time set, or what the driver answers to one more try.
    pub(super) fn await_gone(&self, slots: Option<&[usize]>) -> Result<u64> {
        let started = Instant::now();
        let mut calls = 0;
        loop {
            calls += self.retire(slots);
            let left = {
                let heap = self.heap.lock();
                let mut left = heap.stale.iter();
                left.find(|s| slots.is_none_or(|some| some.contains(&s.slot)))
                    .map(|s| s.slot)
            };
            let Some(slot) = left else {
                return Ok(calls);
            };
            if started.elapsed() >= self.config.wait {
                let waited = started.elapsed().as_micros();
                tracing::debug!(slot, "an old mapping does not become free");
                return Err(Error::TimedOut {
                    waited_us: u64::try_from(waited).unwrap_or(u64::MAX),
                });
            }
            match self.driver().as_any().downcast_ref::<SimDriver>() {
                // Its clock does not move by itself.
                Some(sim) => {
                    sim.advance(Nanos(20_000));
                    crate::sync::yield_now();
                }
                None => crate::sync::pause(PAUSE),
            }
        }
    }

    pub(super) fn settle_all(&self) -> Result<()> {
        self.await_gone(None).map(drop)
    }

    /// Unmaps up to about `want` bytes of empty granules whose work is done and gives them to the
    /// pool. The caller has the turn.
    pub(super) fn give_back(&self, want: u64) -> u64 {
        let unit = self.heap.lock().books.unit;
        let mut taken: Vec<Stale> = Vec::new();
        {
            let mut heap = self.heap.lock();
            let empty = heap.books.empty_slots();
            // From the high end, where nobody looks first.
            for slot in empty.into_iter().rev() {
                if taken.len() as u64 * unit >= want {
                    break;
                }
                let at = heap.books.slot_at(slot);
                let Some(uses) = heap.books.carve(at, unit) else {
                    continue;
                };
                heap.books.slots[slot] = Slot::Busy;
                let mut stale = Stale::new(slot, uses);
                stale.granule = heap.granules[slot].take();
                taken.push(stale);
            }
        }
        let mut back = 0;
        let started = Instant::now();
        for mut stale in taken {
            let range = self.stretch(stale.slot, 1);
            let mut idle = stale.is_idle();
            while !idle && started.elapsed() < GRACE {
                idle = stale.is_idle();
            }
            let gone = idle && range.is_some_and(|range| self.driver().unmap(range).is_ok());
            let mut heap = self.heap.lock();
            match (gone, stale.granule) {
                (true, granule) => {
                    heap.books.slots[stale.slot] = Slot::Hole;
                    drop(heap);
                    // A refused release keeps the granule idle in the pool.
                    let _ = granule.map(Granule::give_back);
                    back += unit;
                }
                (false, granule) => {
                    let at = heap.books.slot_at(stale.slot);
                    heap.books.slots[stale.slot] = Slot::Mapped;
                    heap.granules[stale.slot] = granule;
                    heap.books.add_free(at, unit, stale.uses);
                }
            }
        }
        back
    }
}

/// What is left of a heap that goes.
pub(super) struct Remains {
    awaited: Vec<Stream>,
    mappings: Vec<VaRange>,
    granules: Vec<Granule>,
    reservation: Option<Reservation>,
}

impl Remains {
    pub(super) fn of(
        books: &mut Books,
        granules: &mut Vec<Option<Granule>>,
        stale: &mut Vec<Stale>,
        reservation: Option<Reservation>,
        addresses: VaRange,
    ) -> Self {
        let unit = books.unit;
        let mut uses = Uses::default();
        let mut slots: Vec<usize> = (0..granules.len())
            .filter(|i| granules[*i].is_some())
            .collect();
        let mut kept: Vec<Granule> = granules.drain(..).flatten().collect();
        for stale in stale.drain(..) {
            uses.join(&stale.uses);
            slots.push(stale.slot);
            kept.extend(stale.granule);
        }
        books.all_uses(&mut uses);
        // Nobody can ask this heap any more what it holds.
        kept.iter_mut().for_each(Granule::set_unmapped);
        let place = |slot: usize| addresses.sub(slot as u64 * unit, unit);
        Self {
            awaited: uses.iter().cloned().collect(),
            mappings: slots.into_iter().filter_map(place).collect(),
            granules: kept,
            reservation,
        }
    }

    /// Waits for the last uses, unmaps everything, then lets the granules and the addresses go. Can be
    /// called again, and goes on where it failed.
    pub(super) fn tear_down(&mut self, driver: &dyn Driver) -> DriverResult<()> {
        let ignore_gone = |result: DriverResult<()>| match result {
            Err(error) if error.is_driver_gone() => Ok(()),
            other => other,
        };
        while let Some(last) = self.awaited.last() {
            last.quiesce()?;
            self.awaited.pop();
        }
        while let Some(range) = self.mappings.last() {
            ignore_gone(driver.unmap(*range))?;
            self.mappings.pop();
        }
        self.granules.clear();
        if let Some(reservation) = &mut self.reservation {
            ignore_gone(reservation.free())?;
        }
        Ok(())
    }
}
