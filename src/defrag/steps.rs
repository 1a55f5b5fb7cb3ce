//! The steps of a plan, each done wholly or not at all. Before a step its plan is compared with what
//! is there, since other threads go on meanwhile; behind its last driver call the books change.

use super::books::Books;
use super::heap::{HeapState, Inner};
use super::pass::Tally;
use super::plan::{BULK, Move, Remapping, Slot, Source, Step};
use super::retire::Stale;
use super::uses::Uses;
use crate::driver::{Access, CopyPart, PhysId};
use crate::pool::Granule;
use crate::stream::{Fence, Stream};
use crate::units::VaRange;
use crate::{Error, Result};

/// How a step went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Went {
    Done,
    /// The state is no longer what it was when the plan was made. Nothing was done.
    Outdated,
}

/// One granule on its way.
struct Leg {
    to: usize,
    from: Source,
    phys: PhysId,
    /// Who used it at its old address.
    uses: Uses,
    /// From the pool.
    granule: Option<Granule>,
    range: VaRange,
}

impl Leg {
    /// Both of its slots as they were.
    fn unbook(&self, books: &mut Books) {
        books.slots[self.to] = Slot::Hole;
        if let Source::Slot(from) = self.from {
            books.slots[from] = Slot::Mapped;
        }
    }
}

impl Inner {
    pub(super) fn step(&self, stream: &Stream, step: &Step, tally: &mut Tally) -> Result<Went> {
        match step {
            Step::Copy(moves) => self.copy_step(stream, moves, tally),
            Step::Map(list) => self.map_step(stream, list, tally),
            Step::Shift(moves) => self.shift_step(moves, tally),
            Step::Vacate(slots) => {
                tally.calls.unmap += self.await_gone(Some(slots))?;
                Ok(Went::Done)
            }
        }
    }

    /// Copies blocks to free places, behind everything that used either.
    fn copy_step(&self, stream: &Stream, moves: &[Move], tally: &mut Tally) -> Result<Went> {
        let mut waits = Uses::default();
        let mut ready: Vec<Fence> = Vec::new();
        let mut places: Vec<(u64, u64)> = moves.iter().map(|one| (one.to, one.len)).collect();
        places.sort_unstable();
        let targets;
        {
            let mut heap = self.heap.lock();
            let books = &mut heap.books;
            let as_planned = moves.iter().all(|one| books.may_move(one));
            let carved = as_planned.then(|| books.carve_all(&places)).flatten();
            let Some(uses) = carved else {
                return Ok(Went::Outdated);
            };
            targets = uses;
            targets.iter().for_each(|uses| waits.join(uses));
            books.hold(&places);
            books.set_moving(moves, true);
            for one in moves {
                if let Some(block) = books.blocks.get(&one.id) {
                    waits.join(&block.uses);
                    if let Some(fence) = &block.ready
                        && !ready.iter().any(|known| known.is_same(fence))
                    {
                        ready.push(fence.clone());
                    }
                }
            }
        }
        let copied = self.queue_copies(stream, moves, &waits, &ready, tally);
        let mut heap = self.heap.lock();
        let outcome = match copied {
            Ok(fence) => {
                heap.books.settle_all(moves, &Uses::of(stream), &fence);
                let bytes: u64 = moves.iter().map(|one| one.len).sum();
                heap.bytes_copied += bytes;
                tally.bytes_copied += bytes;
                tally.pointers_changed += moves.len() as u64;
                Ok(Went::Done)
            }
            Err(error) => {
                // Some may have been queued: they read the blocks and write to the places.
                for ((to, _), mut uses) in places.into_iter().zip(targets) {
                    uses.add(stream);
                    heap.books.unhold(to, uses);
                }
                heap.books.set_moving(moves, false);
                for one in moves {
                    if let Some(block) = heap.books.blocks.get_mut(&one.id) {
                        block.uses.add(stream);
                    }
                }
                Err(error)
            }
        };
        drop(heap);
        self.moved.notify_all();
        outcome
    }

    fn queue_copies(
        &self,
        stream: &Stream,
        moves: &[Move],
        waits: &Uses,
        ready: &[Fence],
        tally: &mut Tally,
    ) -> Result<Fence> {
        waits.wait_on(stream)?;
        ready.iter().try_for_each(|fence| stream.wait(fence))?;
        let driver = self.driver();
        let mut batch = Vec::new();
        for one in moves {
            let outside = Error::OutOfBounds {
                offset: one.from.max(one.to),
                len: one.len,
                end: self.addresses().len(),
            };
            let [src, dst] = [one.from, one.to].map(|at| self.range(at, one.len));
            let (Some(src), Some(dst)) = (src, dst) else {
                return Err(outside);
            };
            if one.len >= BULK {
                driver.copy(dst.start(), src, stream.id())?;
                tally.calls.copy += 1;
            } else {
                let dst = dst.start();
                batch.push(CopyPart { dst, src });
            }
        }
        if !batch.is_empty() {
            driver.copy_batch(&batch, stream.id())?;
            tally.calls.batch += 1;
        }
        stream.fence()
    }

    /// Maps granules at holes: their old mappings stay until queued work is done.
    fn map_step(&self, stream: &Stream, list: &[Remapping], tally: &mut Tally) -> Result<Went> {
        // The pool first: it may ask everybody for memory.
        let mut fresh = match list.iter().filter(|one| one.from == Source::Pool).count() {
            0 => Vec::new(),
            n => {
                let unit = self.heap.lock().books.unit;
                self.pool.shared().take_exactly(&vec![unit; n])?
            }
        };
        let Some(legs) = self.start_legs(list, &mut fresh) else {
            return Ok(Went::Outdated);
        };
        let mut mapped = 0;
        let mut zeroed = false;
        let done = self.map_legs(stream, &legs, &mut mapped, &mut zeroed, tally);
        if let Err(error) = done {
            self.undo_legs(stream, legs, mapped, zeroed);
            return Err(error);
        }
        self.enter_legs(stream, legs, zeroed, tally);
        Ok(Went::Done)
    }

    /// Books granules as mapped at their new addresses, and free.
    fn enter_legs(&self, stream: &Stream, legs: Vec<Leg>, zeroed: bool, tally: &mut Tally) {
        tally.remapped += legs.len() as u64;
        let mut heap = self.heap.lock();
        let unit = heap.books.unit;
        heap.remapped += legs.len() as u64;
        heap.stale.reserve(legs.len());
        // Neighbours are entered as one.
        let mut run: Option<(u64, u64, Uses)> = None;
        for mut leg in legs {
            if leg.from == Source::Pool {
                if zeroed {
                    leg.uses.add(stream);
                }
                leg.granule.iter_mut().for_each(Granule::set_mapped);
                tally.extra_memory += unit;
            }
            heap.books.slots[leg.to] = Slot::Mapped;
            let at = heap.books.slot_at(leg.to);
            match &mut run {
                Some((start, len, uses)) if *start + *len == at => {
                    *len += unit;
                    uses.join(&leg.uses);
                }
                other => {
                    if let Some((at, len, uses)) = other.replace((at, unit, leg.uses.clone())) {
                        heap.books.add_free(at, len, uses);
                    }
                }
            }
            heap.granules[leg.to] = match leg.from {
                Source::Slot(from) => {
                    heap.stale.push(Stale::new(from, leg.uses));
                    heap.granules[from].take()
                }
                Source::Pool => leg.granule,
            };
        }
        if let Some((at, len, uses)) = run {
            heap.books.add_free(at, len, uses);
        }
    }

    /// Takes all granules of a step out of the books, or none.
    fn start_legs(&self, list: &[Remapping], fresh: &mut Vec<Granule>) -> Option<Vec<Leg>> {
        let mut heap = self.heap.lock();
        let HeapState {
            books, granules, ..
        } = &mut *heap;
        let unit = books.unit;
        let mut legs = Vec::with_capacity(list.len());
        // Where they are, and whose they are.
        let mut sources: Vec<(u64, usize)> = Vec::with_capacity(list.len());
        let as_planned = list.iter().all(|one| {
            let Some(leg) = self.book_leg(one, books, granules, fresh) else {
                return false;
            };
            if let Source::Slot(from) = one.from {
                sources.push((books.slot_at(from), legs.len()));
            }
            legs.push(leg);
            true
        });
        // The planner takes them from the high end.
        sources.reverse();
        sources.sort_unstable();
        let places: Vec<(u64, u64)> = sources.iter().map(|(at, _)| (*at, unit)).collect();
        match as_planned.then(|| books.carve_all(&places)).flatten() {
            Some(uses) => {
                for ((_, leg), uses) in sources.into_iter().zip(uses) {
                    legs[leg].uses = uses;
                }
                Some(legs)
            }
            None => {
                legs.iter().for_each(|leg: &Leg| leg.unbook(books));
                drop(heap);
                // What came from the pool goes back with them.
                None
            }
        }
    }

    /// Books both slots of a granule as busy, so that none is taken twice, if it can go from one to the other.
    fn book_leg(
        &self,
        one: &Remapping,
        books: &mut Books,
        granules: &[Option<Granule>],
        fresh: &mut Vec<Granule>,
    ) -> Option<Leg> {
        let hole = books.slots.get(one.to) == Some(&Slot::Hole);
        let range = self.range(books.slot_at(one.to), books.unit);
        let range = range.filter(|_| hole)?;
        let (phys, granule) = match one.from {
            Source::Slot(from) => {
                let mapped = books.slots.get(from) == Some(&Slot::Mapped);
                let granule = granules.get(from)?.as_ref().filter(|_| mapped)?;
                books.slots[from] = Slot::Busy;
                (granule.phys(), None)
            }
            Source::Pool => {
                let granule = fresh.pop()?;
                (granule.phys(), Some(granule))
            }
        };
        books.slots[one.to] = Slot::Busy;
        Some(Leg {
            to: one.to,
            from: one.from,
            phys,
            uses: Uses::default(),
            granule,
            range,
        })
    }

    fn map_legs(
        &self,
        stream: &Stream,
        legs: &[Leg],
        mapped: &mut usize,
        zeroed: &mut bool,
        tally: &mut Tally,
    ) -> Result<()> {
        let driver = self.driver();
        for leg in legs {
            driver.map(leg.range, leg.phys)?;
            tally.calls.map += 1;
            *mapped += 1;
        }
        self.open(legs.iter().map(|leg| leg.range).collect(), tally)?;
        if self.pool.shared().zeroes() {
            let dirty = legs
                .iter()
                .filter(|leg| leg.granule.as_ref().is_some_and(Granule::is_dirty));
            for leg in dirty {
                *zeroed = true;
                driver.fill(leg.range, 0, stream.id())?;
            }
        }
        Ok(())
    }

    /// Sets access, one call for each stretch of neighbours.
    fn open(&self, mut ranges: Vec<VaRange>, tally: &mut Tally) -> Result<()> {
        // As a window's holes are.
        if !ranges.is_sorted_by_key(|range| range.start()) {
            ranges.sort_unstable_by_key(|range| range.start());
        }
        let mut rest = ranges.into_iter().peekable();
        while let Some(first) = rest.next() {
            let mut len = first.len();
            let mut end = first.end();
            while let Some(next) = rest.next_if(|range| range.start() == end) {
                len += next.len();
                end = next.end();
            }
            if let Some(stretch) = VaRange::new(first.start(), len) {
                self.driver().set_access(stretch, Access::ReadWrite)?;
                tally.calls.set_access += 1;
            }
        }
        Ok(())
    }

    /// Unmaps what a failed step mapped, and books everything as it was. A mapping that cannot be taken
    /// away now goes to the old ones.
    fn undo_legs(&self, stream: &Stream, mut legs: Vec<Leg>, mapped: usize, zeroed: bool) {
        let mut stuck = Vec::new();
        for leg in legs.iter_mut().take(mapped) {
            // Nothing is unmapped under a queued fill.
            let gone = !zeroed && {
                let driver = self.driver();
                driver.unmap(leg.range).is_ok() || driver.unmap(leg.range).is_ok()
            };
            if !gone {
                let uses = match zeroed {
                    true => Uses::of(stream),
                    false => Uses::default(),
                };
                let mut stale = Stale::new(leg.to, uses);
                stale.granule = leg.granule.take().map(|mut granule| {
                    granule.set_mapped();
                    granule
                });
                stuck.push(stale);
            }
        }
        let held: Vec<usize> = stuck.iter().map(|stale| stale.slot).collect();
        self.return_legs(legs);
        let mut heap = self.heap.lock();
        held.into_iter()
            .for_each(|slot| heap.books.slots[slot] = Slot::Busy);
        heap.stale.extend(stuck);
    }

    /// Books granules that did not move as they were.
    fn return_legs(&self, legs: Vec<Leg>) {
        let mut heap = self.heap.lock();
        let unit = heap.books.unit;
        let mut back = Vec::new();
        for leg in legs {
            leg.unbook(&mut heap.books);
            if let Source::Slot(from) = leg.from {
                let at = heap.books.slot_at(from);
                heap.books.add_free(at, unit, leg.uses);
            }
            back.extend(leg.granule);
        }
        drop(heap);
        // Dropping gives it to the pool.
        drop(back);
    }

    /// Remaps live blocks of whole granules. Work that was queued on the old addresses goes on there.
    fn shift_step(&self, moves: &[Move], tally: &mut Tally) -> Result<Went> {
        let legs = {
            let mut heap = self.heap.lock();
            let Some(legs) = legs_of(&heap, moves) else {
                return Ok(Went::Outdated);
            };
            heap.books.set_moving(moves, true);
            for leg in &legs {
                heap.books.slots[leg.1] = Slot::Busy;
            }
            legs
        };
        let mut mapped: Vec<(usize, VaRange)> = Vec::new();
        let done = self.map_live(&legs, &mut mapped, tally);
        let stuck = match done {
            Ok(()) => Vec::new(),
            Err(_) => self.unmap_live(&mapped),
        };
        let mut heap = self.heap.lock();
        heap.books.set_moving(moves, false);
        if done.is_err() {
            for leg in &legs {
                heap.books.slots[leg.1] = Slot::Hole;
            }
            for stale in &stuck {
                heap.books.slots[stale.slot] = Slot::Busy;
            }
            heap.stale.extend(stuck);
        } else {
            settle_shift(&mut heap, moves, &legs);
            tally.remapped += legs.len() as u64;
            tally.pointers_changed += moves.len() as u64;
        }
        drop(heap);
        self.moved.notify_all();
        done.map(|()| Went::Done)
    }

    /// Undoes mappings that nobody knows of yet; those that stay.
    fn unmap_live(&self, mapped: &[(usize, VaRange)]) -> Vec<Stale> {
        let driver = self.driver();
        let stays =
            |range: &VaRange| driver.unmap(*range).is_err() && driver.unmap(*range).is_err();
        let stuck = mapped.iter().filter(|(_, range)| stays(range));
        stuck
            .map(|(slot, _)| Stale::new(*slot, Uses::default()))
            .collect()
    }

    fn map_live(
        &self,
        legs: &[(usize, usize, PhysId)],
        mapped: &mut Vec<(usize, VaRange)>,
        tally: &mut Tally,
    ) -> Result<()> {
        for (_, to, phys) in legs {
            let Some(range) = self.stretch(*to, 1) else {
                continue;
            };
            self.driver().map(range, *phys)?;
            tally.calls.map += 1;
            mapped.push((*to, range));
        }
        self.open(mapped.iter().map(|m| m.1).collect(), tally)
    }
}

/// Granules of live blocks on their way from slots to slots; `None` if it is not as planned.
fn legs_of(heap: &HeapState, moves: &[Move]) -> Option<Vec<(usize, usize, PhysId)>> {
    let unit = heap.books.unit;
    let slot = |at: u64| usize::try_from(at / unit).unwrap_or(usize::MAX);
    let mut legs = Vec::new();
    for one in moves {
        let is_whole = [one.from, one.to, one.len].iter().all(|n| n % unit == 0);
        if !(is_whole && heap.books.may_move(one)) {
            return None;
        }
        let (from, to) = (slot(one.from), slot(one.to));
        for i in 0..slot(one.len) {
            let granule = heap.granules.get(from + i)?.as_ref()?;
            if heap.books.slots.get(to + i) != Some(&Slot::Hole) {
                return None;
            }
            legs.push((from + i, to + i, granule.phys()));
        }
    }
    Some(legs)
}

/// Books blocks and their granules at their new places; the old ones stay until their uses have passed.
fn settle_shift(heap: &mut HeapState, moves: &[Move], legs: &[(usize, usize, PhysId)]) {
    let unit = heap.books.unit;
    for one in moves {
        let uses = heap.books.blocks.get(&one.id).map(|b| b.uses.clone());
        let first = usize::try_from(one.from / unit).unwrap_or(usize::MAX);
        for i in 0..usize::try_from(one.len / unit).unwrap_or(0) {
            let stale = Stale::new(first + i, uses.clone().unwrap_or_default());
            heap.stale.push(stale);
        }
        heap.books.settle(one.id, one.to, None);
    }
    for (from, to, _) in legs {
        heap.granules[*to] = heap.granules[*from].take();
        heap.books.slots[*to] = Slot::Mapped;
        heap.books.slots[*from] = Slot::Busy;
    }
    heap.remapped += legs.len() as u64;
}
