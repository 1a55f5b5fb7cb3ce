//! What happens when no free run holds a block: the driver's work, done without the lane's lock.

use std::time::{Duration, Instant};

use super::core::{Block as Found, OutOfMemory, Plan};
use super::lane::{After, Alias, Broken, Lane, State, Stuck};
use super::lend::{Offer, Waits};
use crate::driver::sim::{Nanos, SimDriver};
use crate::driver::{Access, PhysId};
use crate::pool::{BUSY, Granule};
use crate::stream::{Fence, Stream};
use crate::units::{Va, VaRange};
use crate::{Error, Result};

/// Pause between two looks at fences while an allocation waits.
const PAUSE: Duration = Duration::from_micros(50);

/// How long zeroing may take that nothing else is in the way of, at least.
const ZEROING: Duration = Duration::from_secs(1);

/// What a miss has learned so far.
pub(super) struct Attempt {
    pub(super) started: Instant,
    /// Why the device gave no more memory, and what was held then: no more is asked for.
    pub(super) refused: Option<(Error, u64)>,
    /// The stream's work does not end in time: nothing that waits for it.
    pub(super) frozen: bool,
    /// What other streams hold ready for this allocation.
    pub(super) offers: Vec<Offer>,
    /// They have been asked since the last wait.
    pub(super) asked: bool,
}

/// A plan in hand, with what its driver calls need to know.
struct Order {
    plan: Plan,
    /// What is behind each fill.
    sources: Vec<Source>,
}

/// Where a fill's granule comes from.
#[derive(Clone, Copy)]
enum Source {
    /// Another place of this lane.
    Own(PhysId),
    /// Another lane, by the number of the offer.
    Offer(usize),
    /// It is new here.
    New,
}

impl Order {
    fn moves(&self) -> usize {
        let moves = self.sources.iter().filter(|s| matches!(s, Source::Own(_)));
        moves.count()
    }
}

/// What of an order has been carried out.
#[derive(Default)]
struct Done {
    released: usize,
    granules: Vec<Granule>,
    /// Fills mapped so far, in order; the index of the granule if it is new.
    mapped: Vec<(VaRange, Option<usize>)>,
    waits: Waits,
    /// The stream that zeroes some of them.
    zeroing: Option<Stream>,
}

enum Outcome {
    Found(Found),
    Order(Box<Order>),
    Short(Short),
    /// Another thread is about to bring more than is needed here.
    Coming,
}

/// A plan that is not to be had.
pub(super) struct Short {
    pub(super) why: OutOfMemory,
    /// It is the heap's own limit that is hit.
    pub(super) own: bool,
    /// Times that memory had become free in the lane.
    pub(super) frees: u64,
}

impl Lane {
    /// A block by way of the driver.
    pub(super) fn seek(&self, size: u64, align: u64) -> Result<Found> {
        let mut attempt = Attempt {
            started: Instant::now(),
            refused: None,
            frozen: false,
            offers: Vec::new(),
            asked: false,
        };
        self.stream().check_alive()?;
        loop {
            self.retire();
            let order = match self.order(size, align, &attempt) {
                Outcome::Found(found) => return Ok(found),
                Outcome::Order(order) => order,
                Outcome::Short(short) => {
                    self.make_room(size, &short, &mut attempt)?;
                    (attempt.refused, attempt.frozen) = (None, false);
                    continue;
                }
                Outcome::Coming => {
                    self.pause();
                    continue;
                }
            };
            let mut done = Done::default();
            let error = match self.carry_out(&order, &mut done, &attempt) {
                Ok(()) => return Ok(self.commit(*order, done, attempt.offers)),
                Err(error) => error,
            };
            let missing = order.plan.created();
            self.undo(*order, done);
            let error = match error {
                // Tables of addresses take memory of the device, too.
                Error::Driver(e) if e.is_out_of_memory() => {
                    self.pool.shared().refusal(size, missing, e)
                }
                other => other,
            };
            match error {
                Error::OutOfMemory(_) if attempt.refused.is_none() => {
                    let held = self.state.lock().core.held();
                    attempt.refused = Some((error, held));
                }
                Error::OutOfMemory(_) => {
                    self.wait_or_give_up(error, true, attempt.started, None)?
                }
                Error::TimedOut { .. } | Error::Capturing { .. } if !attempt.frozen => {
                    attempt.frozen = true
                }
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
        // A granule holds many small blocks: threads that start together need one, not one each.
        let is_small = size <= self.config.small;
        if is_small && state.small_orders > 0 && attempt.started.elapsed() < BUSY {
            return Outcome::Coming;
        }
        let held = state.core.held();
        let limit = held.saturating_add(available).min(ceiling);
        let mut total = heap.as_ref().map(|heap| heap.held.lock());
        let others = total.as_ref().map_or(0, |t| t.saturating_sub(held));
        let own = self.config.limit.unwrap_or(u64::MAX).saturating_sub(others);
        let frozen = attempt.frozen || self.is_pinned();
        let may_move = &mut |_, _| !frozen;
        let offered: Vec<u64> = attempt.offers.iter().map(|offer| offer.len).collect();
        let limit_here = limit.min(own);
        let plan = state
            .core
            .plan(size, align, limit_here, &mut (), may_move, &offered);
        let plan = match plan {
            Ok(plan) => plan,
            Err(why) => {
                let (own, frees) = (own < limit, state.frees);
                return Outcome::Short(Short { why, own, frees });
            }
        };
        if let Some(total) = &mut total {
            **total += plan.created();
        }
        state.in_hand += 1;
        state.small_orders += usize::from(plan.is_small());
        let sources = plan
            .fills
            .iter()
            .map(|f| match (f.old, f.foreign) {
                (Some((name, ..)), _) => {
                    let phys = state.granules.phys(name);
                    phys.map_or(Source::New, Source::Own)
                }
                (None, Some(offer)) => Source::Offer(offer),
                (None, None) => Source::New,
            })
            .collect();
        Outcome::Order(Box::new(Order { plan, sources }))
    }

    fn carry_out(&self, order: &Order, done: &mut Done, attempt: &Attempt) -> Result<()> {
        let started = attempt.started;
        self.bound_aliases(order.moves(), started)?;
        self.release_first(order, done, started)?;
        let fresh = order.plan.fills.iter().filter(|f| f.is_new());
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
        self.map_all(order, done, &attempt.offers)?;
        self.open_all(done)?;
        self.zero_dirty(done, started)
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

    fn map_all(&self, order: &Order, done: &mut Done, offers: &[Offer]) -> Result<()> {
        let driver = self.pool.device().driver();
        let mut fresh = 0;
        for (fill, source) in order.plan.fills.iter().zip(&order.sources) {
            let place = VaRange::new(Va::new(fill.addr), fill.len);
            let place = place.ok_or(Error::TooLarge {
                requested: fill.len,
                max: u64::MAX - fill.addr,
            })?;
            let missing = |what, booked: usize, counted: usize| Error::Inconsistent {
                what,
                booked: booked as u64 + 1,
                counted: counted as u64,
            };
            match source {
                Source::Own(phys) => {
                    driver.map(place, *phys)?;
                    done.mapped.push((place, None));
                }
                Source::Offer(i) => {
                    let offer = offers.get(*i);
                    let offer = offer.ok_or_else(|| missing("offers", *i, offers.len()))?;
                    done.waits.wait(self, offer)?;
                    driver.map(place, offer.phys)?;
                    done.mapped.push((place, None));
                }
                Source::New => {
                    let there = done.granules.len();
                    let granule = done.granules.get(fresh);
                    let granule =
                        granule.ok_or_else(|| missing("granules for a plan", fresh, there))?;
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

    /// Zeroes granules that another owner had, on this stream, if the pool is to do that. A captured
    /// stream would do it at each replay, and not now: then it is done beside it, and waited for.
    fn zero_dirty(&self, done: &mut Done, started: Instant) -> Result<()> {
        if !self.pool.config().zero_on_handover {
            return Ok(());
        }
        let is_dirty = |(_, fresh): &&(VaRange, Option<usize>)| {
            let granule = fresh.and_then(|i| done.granules.get(i));
            granule.is_some_and(Granule::is_dirty)
        };
        let dirty: Vec<VaRange> = done.mapped.iter().filter(is_dirty).map(|m| m.0).collect();
        if dirty.is_empty() {
            return Ok(());
        }
        let captured = self.stream().is_capturing()?;
        let stream = match captured {
            true => self.pool.shared().service_stream()?,
            false => self.stream().clone(),
        };
        done.zeroing = Some(stream.clone());
        let driver = self.pool.device().driver();
        for place in dirty {
            driver.fill(place, 0, stream.id())?;
        }
        match captured {
            // Nothing that the caller has yet to launch is in its way.
            true => self.wait_up_to(&stream.fence()?, started, self.config.wait.max(ZEROING)),
            false => Ok(()),
        }
    }

    /// Tells the history what a plan has mapped, and from where.
    fn tell_fills(&self, plan: &Plan) {
        let Some(history) = self.history() else {
            return;
        };
        let key = self.stream().key();
        for fill in &plan.fills {
            if let Some((_, old, _)) = fill.old {
                history.unmap(key, old, fill.len);
            }
            history.map(key, fill.addr, fill.len);
        }
    }

    /// Books what has been done. Nothing can fail from here on.
    fn commit(&self, order: Order, done: Done, offers: Vec<Offer>) -> Found {
        let moved = order.moves() as u64;
        let (waits, taken) = (done.waits.count() as u64, order.takes(&done, offers, self));
        let created = done.granules.len() as u64;
        let eager = self.config.aliases == 0;
        // Behind all work on the old addresses: any use by other streams was waited for before the
        // memory became free. If the fence cannot be had now, it is asked for again later.
        let fence = match moved {
            0 => None,
            _ if eager => None,
            _ => self.stream().fence().ok(),
        };
        self.tell_fills(&order.plan);
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.quick.disturbed();
        let mut fresh = done.granules.into_iter();
        let mut stale = Vec::new();
        let granules = &mut state.granules;
        let come = taken.iter().flatten().count() as u64;
        let mut named = order.sources.iter().zip(taken);
        let mut name = || {
            let next = named.find(|(source, _)| !matches!(source, Source::Own(_)));
            let granule = match next {
                Some((Source::Offer(_), taken)) => taken,
                _ => fresh.next(),
            };
            granule.map_or(u64::MAX, |mut granule| {
                granule.set_mapped();
                granules.insert(granule)
            })
        };
        state.small_orders -= usize::from(order.plan.is_small());
        let found = state
            .core
            .commit(order.plan, &mut name, &mut (), &mut stale);
        state.in_hand -= 1;
        state.frees += 1;
        state.counts.remaps += moved + come;
        state.counts.device_waits += waits;
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
        let zeroing = done.zeroing.is_some();
        let after = match done.zeroing {
            None => After::Now,
            Some(stream) => match stream.fence() {
                Ok(fence) => After::Fence(fence),
                Err(_) => After::Unrecorded(stream),
            },
        };
        let driver = self.pool.device().driver();
        let mut granules: Vec<Option<Granule>> = done.granules.into_iter().map(Some).collect();
        let mut stuck = Vec::new();
        for (range, fresh) in done.mapped.into_iter().rev() {
            let gone = !zeroing && (driver.unmap(range).is_ok() || driver.unmap(range).is_ok());
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
        self.wait_up_to(fence, started, self.config.wait)
    }

    fn wait_up_to(&self, fence: &Fence, started: Instant, limit: Duration) -> Result<()> {
        if fence.is_done()? {
            return Ok(());
        }
        if limit.is_zero() {
            return Err(Error::TimedOut { waited_us: 0 });
        }
        self.state.lock().counts.host_waits += 1;
        while started.elapsed() < limit {
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

    pub(super) fn pause(&self) {
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
}

impl Order {
    /// Takes the granules of other lanes, for the fills that they are behind.
    fn takes(&self, done: &Done, offers: Vec<Offer>, lane: &Lane) -> Vec<Option<Granule>> {
        let mut offers: Vec<Option<Offer>> = offers.into_iter().map(Some).collect();
        let takes = self.sources.iter().map(|source| match source {
            Source::Offer(i) => {
                let offer = offers.get_mut(*i).and_then(Option::take)?;
                let fence = done.waits.of(&offer)?;
                offer.take(fence, lane)
            }
            _ => None,
        });
        takes.collect()
    }
}

impl State {
    /// Gives up the places of an order. Those with something stuck are kept until that is gone.
    fn abandon(&mut self, plan: Plan, released: usize, mut stuck: Vec<Stuck>, after: &After) {
        self.in_hand -= 1;
        self.small_orders -= usize::from(plan.is_small());
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
