//! What happens when no free run holds a block: the driver's work, done without the lane's lock.

use std::sync::Arc;
use std::time::Instant;

use super::core::{Block as Found, Fill, OutOfMemory, PAGE_BYTES, Plan};
use super::lane::{Alias, Broken, Lane, Limbo, Use};
use crate::driver::{Access, PhysId};
use crate::pool::Granule;
use crate::stream::Fence;
use crate::units::{Va, VaRange};
use crate::{Error, Result};

/// Pause between two looks at fences while an allocation waits for memory.
const PAUSE: std::time::Duration = std::time::Duration::from_micros(50);

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

impl Lane {
    pub(super) fn miss(self: &Arc<Self>, size: u64, align: u64) -> Result<Found> {
        let started = Instant::now();
        self.state.lock().counts.misses += 1;
        // What may be held, once the device has said that it has no more.
        let mut ceiling = u64::MAX;
        loop {
            self.retire();
            let order = match self.order(size, align, ceiling)? {
                Outcome::Found(found) => return Ok(found),
                Outcome::Order(order) => order,
                Outcome::Short(short) => {
                    self.make_room(size, short, started)?;
                    ceiling = u64::MAX;
                    continue;
                }
            };
            let moves = order.sources.iter().flatten().count();
            let mut done = Done::default();
            let carried = self
                .bound_aliases(moves)
                .and_then(|()| self.carry_out(&order, &mut done));
            match carried {
                Ok(()) => return Ok(self.commit(*order, done)),
                Err(error) => {
                    self.undo(*order, done);
                    match error {
                        Error::OutOfMemory(_) if ceiling == u64::MAX => {
                            ceiling = self.state.lock().core.held();
                        }
                        Error::OutOfMemory(_) => self.wait_or_give_up(error, started)?,
                        other => {
                            self.state.lock().counts.failures += 1;
                            return Err(other);
                        }
                    }
                }
            }
        }
    }

    /// Looks once more, or plans.
    fn order(&self, size: u64, align: u64, ceiling: u64) -> Result<Outcome> {
        let available = self.pool.shared().available();
        let mut state = self.state.lock();
        state.flush();
        if let Some(found) = state.core.alloc(size, align) {
            return Ok(Outcome::Found(found));
        }
        let held = state.core.held();
        let limit = held.saturating_add(available).min(ceiling);
        let limit = limit.min(self.config.limit.unwrap_or(u64::MAX));
        let plan = match state
            .core
            .plan(size, align, limit, &mut (), &mut |_, _| true)
        {
            Ok(plan) => plan,
            Err(short) => return Ok(Outcome::Short(short)),
        };
        // A place that an earlier undo could not clear cannot be mapped.
        let blocked = |fill: &Fill| {
            let place = VaRange::new(Va::new(fill.addr), fill.len);
            state
                .broken
                .iter()
                .any(|b| place.is_some_and(|p| p.overlaps(b.range)))
        };
        if let Some(fill) = plan.fills.iter().find(|f| blocked(f)) {
            let error = Error::Stale {
                what: "mapping that the driver refused to undo",
                value: fill.addr,
            };
            state.core.abandon(plan, 0, &mut ());
            return Err(error);
        }
        let sources = plan
            .fills
            .iter()
            .map(|f| f.old.and_then(|(name, ..)| state.granules.phys(name)))
            .collect();
        Ok(Outcome::Order(Box::new(Order { plan, sources })))
    }

    fn carry_out(&self, order: &Order, done: &mut Done) -> Result<()> {
        self.release_first(order, done)?;
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
    fn release_first(&self, order: &Order, done: &mut Done) -> Result<()> {
        if order.plan.releases.is_empty() {
            return Ok(());
        }
        self.stream().fence()?.wait()?;
        self.state.lock().counts.host_waits += 1;
        for release in &order.plan.releases {
            let Some(range) = VaRange::new(Va::new(release.addr), release.len) else {
                continue;
            };
            self.pool.device().driver().unmap(range)?;
            done.released += 1;
            let granule = self.state.lock().granules.remove(release.id);
            if let Some(granule) = granule {
                granule.give_back()?;
            }
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
        // Behind all work on the old addresses: any use by other streams was waited for before the
        // memory became free. If the fence cannot be had now, it is asked for again later.
        let fence = match moved {
            0 => None,
            _ => self.stream().fence().ok(),
        };
        let mut state = self.state.lock();
        let state = &mut *state;
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
        let aliases = stale.into_iter().map(|stale| Alias {
            stale,
            fence: fence.clone(),
        });
        state.stale.extend(aliases);
        state.counts.remaps += moved;
        state.counts.creates += created;
        state.counts.held_peak = state.counts.held_peak.max(state.core.held());
        found
    }

    /// Takes back what was mapped for an order that failed, and gives up its places.
    fn undo(&self, order: Order, done: Done) {
        if done.zeroing {
            // Memory is not unmapped under a queued fill. A lost device has none.
            let _ = self.stream().synchronize();
        }
        let driver = self.pool.device().driver();
        let mut granules: Vec<Option<Granule>> = done.granules.into_iter().map(Some).collect();
        let mut broken = Vec::new();
        for (range, fresh) in done.mapped.into_iter().rev() {
            if driver.unmap(range).is_err() && driver.unmap(range).is_err() {
                let mut granule = fresh.and_then(|i| granules.get_mut(i)?.take());
                if let Some(granule) = &mut granule {
                    granule.set_mapped();
                }
                broken.push(Broken { range, granule });
            }
        }
        let mut state = self.state.lock();
        state.quick.disturbed();
        state.core.abandon(order.plan, done.released, &mut ());
        state.broken.extend(broken);
    }

    /// At the bound on aliases, waits for the oldest ones.
    fn bound_aliases(&self, more: usize) -> Result<()> {
        if more == 0 {
            return Ok(());
        }
        if self.config.aliases == 0 {
            // Nothing is pending on the old address when it is unmapped right after the move.
            self.stream().fence()?.wait()?;
            self.state.lock().counts.host_waits += 1;
            return Ok(());
        }
        loop {
            let oldest = {
                let state = self.state.lock();
                if state.stale.len() + more <= self.config.aliases.max(more) {
                    return Ok(());
                }
                state.stale.front().and_then(|a| a.fence.clone())
            };
            match oldest {
                Some(fence) => fence.wait()?,
                None => self.stream().synchronize()?,
            }
            self.state.lock().counts.host_waits += 1;
            if self.retire() == 0 {
                return Ok(());
            }
        }
    }

    /// Files what has become free: limbo whose fences have passed, old mappings nobody uses. Waits
    /// for nothing; what cannot be asked or undone now is kept. Returns how much was filed.
    pub(super) fn retire(&self) -> usize {
        self.retire_limbo() + self.retire_aliases() + self.retire_broken()
    }

    fn retire_limbo(&self) -> usize {
        let waiting = std::mem::take(&mut self.state.lock().limbo);
        let (done, left): (Vec<Limbo>, Vec<Limbo>) = waiting
            .into_iter()
            .map(fence_uses)
            .partition(|l| l.uses.iter().all(has_passed));
        let count = done.len();
        let mut state = self.state.lock();
        state.limbo.extend(left);
        done.iter().for_each(|one| state.unlimbo(one));
        count
    }

    fn retire_aliases(&self) -> usize {
        let mut filed = 0;
        loop {
            let Some(mut alias) = self.state.lock().stale.pop_front() else {
                return filed;
            };
            if alias.fence.is_none() {
                alias.fence = self.stream().fence().ok();
            }
            let passed = alias
                .fence
                .as_ref()
                .is_some_and(|f| f.is_done().unwrap_or(false));
            let range = VaRange::new(Va::new(alias.stale.addr), alias.stale.len);
            let unmapped =
                passed && range.is_some_and(|r| self.pool.device().driver().unmap(r).is_ok());
            let mut state = self.state.lock();
            if !unmapped {
                state.stale.push_front(alias);
                return filed;
            }
            state.core.unmapped(alias.stale);
            filed += 1;
        }
    }

    fn retire_broken(&self) -> usize {
        let broken = std::mem::take(&mut self.state.lock().broken);
        if broken.is_empty() {
            return 0;
        }
        let driver = self.pool.device().driver();
        let all = broken.len();
        let left: Vec<Broken> = broken
            .into_iter()
            .filter(|b| driver.unmap(b.range).is_err())
            .collect();
        let filed = all - left.len();
        self.state.lock().broken.extend(left);
        filed
    }

    /// Finds memory elsewhere for a plan that is short, in the order that hurts least; an error if
    /// there is none.
    fn make_room(&self, size: u64, short: OutOfMemory, started: Instant) -> Result<()> {
        if short.lacking > 0 && self.pool.shared().reclaim(short.lacking.max(PAGE_BYTES)) > 0 {
            return Ok(());
        }
        if self.wait_on_device()? > 0 {
            return Ok(());
        }
        let error = match short.lacking {
            0 => Error::AddressSpaceExhausted {
                requested: size,
                reserved: self.range_len(),
                bound: self.range_len(),
            },
            lacking => self.pool.shared().shortage(size, lacking),
        };
        self.wait_or_give_up(error, started)
    }

    /// Orders this stream behind every other stream whose freed memory is in limbo here, without a
    /// wait of the host; the blocks that became free.
    fn wait_on_device(&self) -> Result<usize> {
        let waiting = std::mem::take(&mut self.state.lock().limbo);
        let mut freed = Vec::new();
        let mut kept = Vec::new();
        let mut outcome = Ok(());
        for one in waiting.into_iter().map(fence_uses) {
            let ordered = one.uses.iter().try_for_each(|used| match used {
                Use::Fence(fence) => self.stream().wait(fence),
                Use::Stream(stream) => self.stream().wait(&stream.fence()?),
            });
            match ordered {
                Ok(()) => freed.push(one),
                Err(error) => {
                    outcome = outcome.and(Err(error));
                    kept.push(one);
                }
            }
        }
        let count = freed.len();
        let mut state = self.state.lock();
        state.limbo.extend(kept);
        state.counts.device_waits += count as u64;
        freed.iter().for_each(|one| state.unlimbo(one));
        outcome.map(|()| count)
    }

    /// Pauses while there is something to wait for and time left; the error otherwise.
    fn wait_or_give_up(&self, error: Error, started: Instant) -> Result<()> {
        let pending = {
            let state = self.state.lock();
            !state.limbo.is_empty() || !state.stale.is_empty()
        };
        let pending = pending || self.pool.shared().awaited() > 0;
        if !pending || started.elapsed() >= self.config.wait {
            self.state.lock().counts.failures += 1;
            return Err(error);
        }
        self.state.lock().counts.host_waits += 1;
        std::thread::sleep(PAUSE);
        Ok(())
    }

    /// Unmaps wholly free granules and gives them to the pool, if this stream's work so far is done.
    pub(super) fn give_back_idle(&self, want: u64) -> u64 {
        self.retire();
        let idle = match self.state.try_lock() {
            Some(mut state) => {
                state.flush();
                state.core.trim(want, &mut |_, _| true)
            }
            None => return 0,
        };
        if idle.is_empty() {
            return 0;
        }
        let fence = self.stream().fence();
        let passed = fence.is_ok_and(|f| f.is_done().unwrap_or(false));
        let mut bytes = 0;
        for one in idle {
            let range = VaRange::new(Va::new(one.addr), one.len);
            let unmapped =
                passed && range.is_some_and(|r| self.pool.device().driver().unmap(r).is_ok());
            let mut state = self.state.lock();
            if !unmapped {
                state.quick.disturbed();
                state.core.kept(one, &mut ());
                continue;
            }
            bytes += one.len;
            let granule = state.granules.remove(one.id);
            state.core.dropped(one);
            drop(state);
            // A refused release keeps the granule idle in the pool, which is as good.
            let _ = granule.map(Granule::give_back);
        }
        bytes
    }

    /// Waits on the host for everything that could still use this lane's memory.
    pub(super) fn settle_all(&self) -> Result<()> {
        let limbo: Vec<Use> = {
            let state = self.state.lock();
            state.limbo.iter().flat_map(|l| l.uses.clone()).collect()
        };
        for used in limbo {
            match used {
                Use::Fence(fence) => fence.wait()?,
                Use::Stream(stream) => stream.fence()?.wait()?,
            }
        }
        self.stream().fence()?.wait()
    }
}

enum Outcome {
    Found(Found),
    Order(Box<Order>),
    Short(OutOfMemory),
}

/// Takes the fences that are still to be taken. Lazily, here and not at the free: most memory is
/// never asked for.
fn fence_uses(mut limbo: Limbo) -> Limbo {
    for used in &mut limbo.uses {
        if let Use::Stream(stream) = used
            && let Ok(fence) = stream.fence()
        {
            *used = Use::Fence(fence);
        }
    }
    limbo
}

fn has_passed(used: &Use) -> bool {
    match used {
        Use::Fence(fence) => Fence::is_done(fence).unwrap_or(false),
        Use::Stream(_) => false,
    }
}
