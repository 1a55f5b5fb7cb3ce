//! What happens when no free run holds a block: the driver's work, done without the lane's lock.

use std::time::Instant;

use super::core::{Block as Found, OutOfMemory, PAGE_BYTES, Plan};
use super::lane::{After, Alias, Broken, Lane, State, Stuck, Use};
use super::retire::{GRACE, fence_uses};
use crate::driver::sim::{Nanos, SimDriver};
use crate::driver::{Access, PhysId};
use crate::pool::{BUSY, Granule};
use crate::stream::Fence;
use crate::units::{Va, VaRange};
use crate::{Error, Limit, Result};

/// Pause between two looks at fences while an allocation waits.
const PAUSE: std::time::Duration = std::time::Duration::from_micros(50);

/// What a miss has learned so far.
struct Attempt {
    started: Instant,
    /// Why the device gave no more memory, and what was held then: no more is asked for.
    refused: Option<(Error, u64)>,
    /// The stream's work does not end in time: nothing that waits for it.
    frozen: bool,
}

/// A plan in hand, with what its driver calls need to know.
struct Order {
    plan: Plan,
    /// Physical memory behind each fill that moves; `None` where one is new.
    sources: Vec<Option<PhysId>>,
}

/// What of an order has been carried out.
#[derive(Default)]
struct Done {
    released: usize,
    granules: Vec<Granule>,
    /// Fills mapped so far, in order; the index of the granule if it is new.
    mapped: Vec<(VaRange, Option<usize>)>,
    zeroing: bool,
}

enum Outcome {
    Found(Found),
    Order(Box<Order>),
    Short(Short),
}

/// A plan that is not to be had.
struct Short {
    why: OutOfMemory,
    /// It is the heap's own limit that is hit.
    own: bool,
}

impl Lane {
    /// A block by way of the driver.
    pub(super) fn seek(&self, size: u64, align: u64) -> Result<Found> {
        let mut attempt = Attempt {
            started: Instant::now(),
            refused: None,
            frozen: false,
        };
        loop {
            self.retire();
            let order = match self.order(size, align, &attempt) {
                Outcome::Found(found) => return Ok(found),
                Outcome::Order(order) => order,
                Outcome::Short(short) => {
                    self.make_room(size, &short, &attempt)?;
                    (attempt.refused, attempt.frozen) = (None, false);
                    continue;
                }
            };
            let mut done = Done::default();
            let error = match self.carry_out(&order, &mut done, attempt.started) {
                Ok(()) => return Ok(self.commit(*order, done)),
                Err(error) => error,
            };
            self.undo(*order, done);
            match error {
                Error::OutOfMemory(_) if attempt.refused.is_none() => {
                    let held = self.state.lock().core.held();
                    attempt.refused = Some((error, held));
                }
                Error::OutOfMemory(_) => self.wait_or_give_up(error, attempt.started)?,
                Error::TimedOut { .. } if !attempt.frozen => attempt.frozen = true,
                other => return Err(other),
            }
        }
    }

    /// Looks once more, or plans.
    fn order(&self, size: u64, align: u64, attempt: &Attempt) -> Outcome {
        let available = self.pool.shared().available();
        let ceiling = attempt.refused.as_ref().map_or(u64::MAX, |r| r.1);
        let heap = self.heap();
        let mut state = self.state.lock();
        state.flush();
        if let Some(found) = state.core.alloc(size, align) {
            return Outcome::Found(found);
        }
        let held = state.core.held();
        let limit = held.saturating_add(available).min(ceiling);
        let mut total = heap.as_ref().map(|heap| heap.held.lock());
        let others = total.as_ref().map_or(0, |t| t.saturating_sub(held));
        let own = self.config.limit.unwrap_or(u64::MAX).saturating_sub(others);
        let may_move = &mut |_, _| !attempt.frozen;
        let plan = state
            .core
            .plan(size, align, limit.min(own), &mut (), may_move);
        let plan = match plan {
            Ok(plan) => plan,
            Err(why) => {
                let own = own < limit;
                return Outcome::Short(Short { why, own });
            }
        };
        if let Some(total) = &mut total {
            **total += plan.created();
        }
        state.in_hand += 1;
        let sources = plan
            .fills
            .iter()
            .map(|f| f.old.and_then(|(name, ..)| state.granules.phys(name)))
            .collect();
        Outcome::Order(Box::new(Order { plan, sources }))
    }

    fn carry_out(&self, order: &Order, done: &mut Done, started: Instant) -> Result<()> {
        self.bound_aliases(order.sources.iter().flatten().count(), started)?;
        self.release_first(order, done, started)?;
        let fresh = order.plan.fills.iter().filter(|f| f.old.is_none());
        let lens: Vec<u64> = fresh.map(|f| f.len).collect();
        if !lens.is_empty() {
            done.granules = self.pool.shared().take_exactly(&lens)?;
            // In the order of the fills.
            let mut ordered = Vec::with_capacity(lens.len());
            for len in lens {
                let found = done.granules.iter().position(|g| g.len() == len);
                ordered.extend(found.map(|i| done.granules.swap_remove(i)));
            }
            done.granules = ordered;
        }
        self.map_all(order, done)?;
        self.open_all(done)?;
        self.zero_dirty(done)
    }

    /// Unmaps and returns what did not fit, once this stream's work on it is done. The host waits:
    /// memory that leaves the heap has no stream order.
    fn release_first(&self, order: &Order, done: &mut Done, started: Instant) -> Result<()> {
        if order.plan.releases.is_empty() {
            return Ok(());
        }
        self.wait_for(&self.stream().fence()?, started)?;
        // An old mapping would keep the memory alive.
        self.retire_aliases();
        for release in &order.plan.releases {
            let Some(range) = VaRange::new(Va::new(release.addr), release.len) else {
                continue;
            };
            self.pool.device().driver().unmap(range)?;
            done.released += 1;
            if let Some(history) = self.history() {
                history.unmap(self.stream().key(), release.addr, release.len);
            }
            let granule = self.state.lock().granules.remove(release.id);
            self.no_longer_held(release.len);
            // A refused release keeps the granule idle in the pool, which tries again when it must.
            let _ = granule.map(Granule::give_back);
        }
        Ok(())
    }

    fn map_all(&self, order: &Order, done: &mut Done) -> Result<()> {
        let driver = self.pool.device().driver();
        let mut fresh = 0;
        for (fill, source) in order.plan.fills.iter().zip(&order.sources) {
            let place = VaRange::new(Va::new(fill.addr), fill.len);
            let place = place.ok_or(Error::TooLarge {
                requested: fill.len,
                max: u64::MAX - fill.addr,
            })?;
            match source {
                Some(phys) => {
                    driver.map(place, *phys)?;
                    done.mapped.push((place, None));
                }
                None => {
                    let granule = done.granules.get(fresh).ok_or(Error::Inconsistent {
                        what: "granules for a plan",
                        booked: fresh as u64 + 1,
                        counted: done.granules.len() as u64,
                    })?;
                    driver.map(place, granule.phys())?;
                    done.mapped.push((place, Some(fresh)));
                    fresh += 1;
                }
            }
        }
        Ok(())
    }

    /// Sets access, one call for each stretch of neighbouring fills.
    fn open_all(&self, done: &Done) -> Result<()> {
        let driver = self.pool.device().driver();
        let mut at = 0;
        while at < done.mapped.len() {
            let start = done.mapped[at].0;
            let mut end = start.end();
            at += 1;
            while let Some((next, _)) = done.mapped.get(at).filter(|m| m.0.start() == end) {
                end = next.end();
                at += 1;
            }
            let len = end.get() - start.start().get();
            if let Some(stretch) = VaRange::new(start.start(), len) {
                driver.set_access(stretch, Access::ReadWrite)?;
            }
        }
        Ok(())
    }

    /// Zeroes granules that another owner had, on this stream, if the pool is to do that.
    fn zero_dirty(&self, done: &mut Done) -> Result<()> {
        if !self.pool.config().zero_on_handover {
            return Ok(());
        }
        for (place, fresh) in &done.mapped {
            let granule = fresh.and_then(|i| done.granules.get(i));
            if granule.is_some_and(Granule::is_dirty) {
                done.zeroing = true;
                let driver = self.pool.device().driver();
                driver.fill(*place, 0, self.stream().id())?;
            }
        }
        Ok(())
    }

    /// Books what has been done. Nothing can fail from here on.
    fn commit(&self, order: Order, done: Done) -> Found {
        let moved = order.sources.iter().flatten().count() as u64;
        let created = done.granules.len() as u64;
        let eager = self.config.aliases == 0;
        // Behind all work on the old addresses: any use by other streams was waited for before the
        // memory became free. If the fence cannot be had now, it is asked for again later.
        let fence = match moved {
            0 => None,
            _ if eager => None,
            _ => self.stream().fence().ok(),
        };
        if let Some(history) = self.history() {
            let key = self.stream().key();
            for fill in &order.plan.fills {
                if let Some((_, old, _)) = fill.old {
                    history.unmap(key, old, fill.len);
                }
                history.map(key, fill.addr, fill.len);
            }
        }
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.quick.disturbed();
        let mut fresh = done.granules.into_iter();
        let mut stale = Vec::new();
        let granules = &mut state.granules;
        let mut name = || match fresh.next() {
            Some(mut granule) => {
                granule.set_mapped();
                granules.insert(granule)
            }
            None => u64::MAX,
        };
        let found = state
            .core
            .commit(order.plan, &mut name, &mut (), &mut stale);
        state.in_hand -= 1;
        state.frees += 1;
        state.counts.remaps += moved;
        state.counts.creates += created;
        state.counts.held_peak = state.counts.held_peak.max(state.core.held());
        let fence = fence.as_ref();
        let aliases = stale.into_iter().map(|stale| Alias {
            stale,
            fence: fence.cloned(),
        });
        if eager {
            let aliases: Vec<Alias> = aliases.collect();
            drop(guard);
            aliases.into_iter().for_each(|a| self.unmap_old(a));
        } else {
            state.stale.extend(aliases);
        }
        found
    }

    /// Takes back what was mapped for an order that failed, and gives up its places.
    fn undo(&self, order: Order, done: Done) {
        self.no_longer_held(order.plan.created());
        // Memory is not unmapped under a queued fill.
        let after = match done.zeroing {
            false => After::Now,
            true => self
                .stream()
                .fence()
                .map_or(After::Unrecorded, After::Fence),
        };
        let driver = self.pool.device().driver();
        let mut granules: Vec<Option<Granule>> = done.granules.into_iter().map(Some).collect();
        let mut stuck = Vec::new();
        for (range, fresh) in done.mapped.into_iter().rev() {
            let gone =
                !done.zeroing && (driver.unmap(range).is_ok() || driver.unmap(range).is_ok());
            if !gone {
                let mut granule = fresh.and_then(|i| granules.get_mut(i)?.take());
                if let Some(granule) = &mut granule {
                    granule.set_mapped();
                }
                stuck.push(Stuck { range, granule });
            }
        }
        drop(granules);
        self.state
            .lock()
            .abandon(order.plan, done.released, stuck, &after);
    }

    /// At the bound on aliases, waits for the oldest ones.
    fn bound_aliases(&self, more: usize, started: Instant) -> Result<()> {
        if more == 0 {
            return Ok(());
        }
        if self.config.aliases == 0 {
            // Nothing is pending on the old address when it is unmapped right after the move.
            return self.wait_for(&self.stream().fence()?, started);
        }
        loop {
            let oldest = {
                let state = self.state.lock();
                if state.stale.len() + more <= self.config.aliases.max(more) {
                    return Ok(());
                }
                state.stale.front().and_then(|a| a.fence.clone())
            };
            let oldest = oldest.map_or_else(|| self.stream().fence(), Ok)?;
            self.wait_for(&oldest, started)?;
            if self.retire_aliases() == 0 {
                return Ok(());
            }
        }
    }

    /// Waits on the host until a fence has passed.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] once an allocation has taken as long as it may.
    fn wait_for(&self, fence: &Fence, started: Instant) -> Result<()> {
        if fence.is_done()? {
            return Ok(());
        }
        if self.config.wait.is_zero() {
            return Err(Error::TimedOut { waited_us: 0 });
        }
        self.state.lock().counts.host_waits += 1;
        while started.elapsed() < self.config.wait {
            self.pause();
            if fence.is_done()? {
                return Ok(());
            }
        }
        let waited = started.elapsed().as_micros();
        Err(Error::TimedOut {
            waited_us: u64::try_from(waited).unwrap_or(u64::MAX),
        })
    }

    fn pause(&self) {
        let driver = self.pool.device().driver().as_any();
        match driver.downcast_ref::<SimDriver>() {
            // Its clock does not move by itself.
            Some(sim) => {
                sim.advance(Nanos(50_000));
                crate::sync::yield_now();
            }
            None => crate::sync::pause(PAUSE),
        }
    }

    /// Books that the heap holds less, or will not create what it meant to.
    pub(super) fn no_longer_held(&self, bytes: u64) {
        if let Some(heap) = self.heap() {
            let mut held = heap.held.lock();
            *held = held.saturating_sub(bytes);
        }
    }

    /// Finds memory elsewhere for a plan that is short, in the order that hurts least; an error if
    /// there is none.
    fn make_room(&self, size: u64, short: &Short, attempt: &Attempt) -> Result<()> {
        let lacking = short.why.lacking;
        let error = match (&attempt.refused, lacking) {
            (Some((error, _)), _) => error.clone(),
            (None, 0) => Error::AddressSpaceExhausted {
                requested: size,
                reserved: self.range_len(),
                bound: self.range_len(),
            },
            (None, _) => self.short_of(size, short),
        };
        let budget = self.pool.shared().budget();
        if size > budget.min(self.config.limit.unwrap_or(u64::MAX)) {
            return Err(error);
        }
        if lacking > 0 {
            let want = lacking.max(PAGE_BYTES);
            let got = match self.heap().filter(|_| short.own) {
                Some(heap) => heap.give_back_idle(want, GRACE),
                None => self.pool.shared().reclaim(want),
            };
            if got > 0 {
                return Ok(());
            }
        }
        // Fences that were taken just now may be about to pass.
        if self.retire_limbo(GRACE) > 0 || self.wait_on_device(lacking)? > 0 {
            return Ok(());
        }
        self.wait_or_give_up(error, attempt.started)
    }

    /// The error for a plan that is short within the budget or the heap's limit.
    fn short_of(&self, size: u64, short: &Short) -> Error {
        let mut error = self.pool.shared().shortage(size, short.why.lacking);
        if let Error::OutOfMemory(shortage) = &mut error
            && short.own
        {
            shortage.limit = Limit::Heap;
        }
        error
    }

    /// Orders this stream behind other streams whose freed memory is in limbo here, without a wait
    /// of the host, until that much has become free; how many blocks.
    fn wait_on_device(&self, lacking: u64) -> Result<usize> {
        let waiting = self.take_limbo();
        let mut freed = Vec::new();
        let mut kept = Vec::new();
        let mut outcome = Ok(());
        let mut bytes = 0;
        for one in fence_uses(waiting) {
            if bytes >= lacking.max(1) {
                kept.push(one);
                continue;
            }
            let ordered = one.uses.iter().try_for_each(|used| match used {
                Use::Fence(fence) => self.stream().wait(fence),
                Use::Stream(stream) => self.stream().wait(&stream.fence()?),
            });
            match ordered {
                Ok(()) => {
                    bytes += one.len;
                    freed.push(one);
                }
                Err(error) => {
                    outcome = outcome.and(Err(error));
                    kept.push(one);
                }
            }
        }
        let count = freed.len();
        self.put_limbo(&freed, kept);
        self.state.lock().counts.device_waits += count as u64;
        match count {
            0 => outcome.map(|()| 0),
            count => Ok(count),
        }
    }

    /// Pauses while there is something to wait for and time left; the error otherwise.
    fn wait_or_give_up(&self, error: Error, started: Instant) -> Result<()> {
        use crate::pool::Holder;
        let (pending, busy) = {
            let state = self.state.lock();
            let pending = state.limbo_bytes > 0 || !state.stale.is_empty();
            (pending, state.in_hand > 0)
        };
        let shared = self.pool.shared();
        // What is idle here could be used at once, so it is not waited for.
        let pending = pending || shared.awaited() > self.awaited();
        let busy = busy || shared.is_releasing();
        let waited = started.elapsed();
        if !(pending && waited < self.config.wait || busy && waited < BUSY.max(self.config.wait)) {
            return Err(error);
        }
        self.state.lock().counts.host_waits += 1;
        self.pause();
        Ok(())
    }
}

impl State {
    /// Gives up the places of an order. Those with something stuck are kept until that is gone.
    fn abandon(&mut self, plan: Plan, released: usize, mut stuck: Vec<Stuck>, after: &After) {
        self.in_hand -= 1;
        self.frees += 1;
        self.quick.disturbed();
        let mut held = Vec::new();
        let is_in = |one: &Stuck, addr: u64, len: u64| {
            let place = VaRange::new(Va::new(addr), len);
            place.is_some_and(|place| place.overlaps(one.range))
        };
        let mut holds = |addr, len| stuck.iter().any(|one| is_in(one, addr, len));
        self.core
            .abandon_but(plan, released, &mut (), &mut holds, &mut held);
        for place in held {
            let (mine, others) = stuck
                .into_iter()
                .partition(|one| is_in(one, place.addr, place.len));
            stuck = others;
            self.broken.push(Broken {
                place,
                stuck: mine,
                after: after.clone(),
            });
        }
    }
}
