//! One stream's side of a heap: its addresses, its blocks, its granules.
//!
//! Memory that is free here is ordered before whatever the lane's stream does next. Memory that
//! other streams used is kept in limbo after its free until their fences have passed, or until this
//! stream has been made to wait for them.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Weak};

use super::block::{Block, no_block};
use super::config::HeapConfig;
use super::core::{self, Stale};
use super::name::Named;
use super::quick::{Kept, Quick};
use super::request::Request;
use super::retire::GRACE;
use super::{HeapStats, Shared};
use crate::driver::{DriverResult, PhysId};
use crate::pool::{Granule, Held, Holder, Pool};
use crate::space::Reservation;
use crate::stream::{Fence, Stream};
use crate::sync::Mutex;
use crate::units::{Va, VaRange};
use crate::{Error, Result};

/// Recorded uses of one block from which on it is seen which have passed.
const CROWD: usize = 16;

/// Mark of a block in the core that has been freed and waits for other streams.
pub(super) const FREED: u32 = 1;

pub(super) struct Lane {
    pub(super) pool: Pool,
    pub(super) config: HeapConfig,
    stream: Stream,
    range: VaRange,
    /// Bytes of the longest block that could ever be placed.
    largest: u64,
    pub(super) state: Mutex<State>,
    heap: Weak<Shared>,
    this: Weak<Self>,
}

/// Everything that changes. The lock is held for bookkeeping only, never across a driver call.
pub(super) struct State {
    pub(super) core: core::Lane,
    pub(super) granules: Granules,
    pub(super) quick: Quick,
    /// Uses of live blocks by other streams, by address.
    pub(super) uses: HashMap<u64, Vec<Use>>,
    /// Names of live blocks and of blocks in limbo, by address.
    pub(super) names: HashMap<u64, Named>,
    pub(super) limbo: Vec<Limbo>,
    pub(super) limbo_bytes: u64,
    /// Old addresses of moved granules, oldest first.
    pub(super) stale: VecDeque<Alias>,
    /// Places with mappings that could not be undone.
    pub(super) broken: Vec<Broken>,
    /// Times that some thread has something of this lane in hand which the lists above do not show:
    /// an order under way, or limbo being looked at.
    pub(super) in_hand: usize,
    /// Times that memory became free.
    pub(super) frees: u64,
    /// A fence behind all use of what was free after so many frees.
    pub(super) calm: Option<(Fence, u64)>,
    pub(super) counts: Counts,
    reservation: Option<Reservation>,
}

impl State {
    /// A block from mapped memory.
    #[inline]
    pub(super) fn hit(&mut self, size: u64, align: u64) -> Option<core::Block> {
        self.counts.allocs += 1;
        let (kept, out) = self.quick.take(size, align);
        if let Some(kept) = kept {
            self.core.revive(kept.hint, kept.addr);
            return Some(core::Block {
                addr: kept.addr,
                len: kept.len,
                uses: 0,
                hint: kept.hint,
            });
        }
        if let Some(out) = out {
            self.file(out);
        }
        let found = self.core.alloc(size, align)?;
        self.quick.placed(found.len, found.addr);
        Some(found)
    }

    /// Frees a kept block in the books.
    fn file(&mut self, kept: Kept) {
        self.quick.disturbed();
        self.core.revive(kept.hint, kept.addr);
        self.core.free_hinted(kept.addr, kept.hint, &mut ());
    }

    /// Frees every kept block in the books.
    pub(super) fn flush(&mut self) {
        for kept in self.quick.drain() {
            self.file(kept);
        }
    }

    /// Files a freed block that no other stream uses any more.
    pub(super) fn unlimbo(&mut self, one: &Limbo) {
        self.limbo_bytes -= one.len;
        self.quick.disturbed();
        self.frees += 1;
        self.core.mark(one.addr, 0);
        self.names.remove(&one.addr);
        self.core.free_hinted(one.addr, one.hint, &mut ());
    }
}

/// What happened so far.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Counts {
    pub(super) allocs: u64,
    pub(super) misses: u64,
    pub(super) remaps: u64,
    pub(super) creates: u64,
    pub(super) host_waits: u64,
    pub(super) device_waits: u64,
    pub(super) failures: u64,
    pub(super) held_peak: u64,
}

/// Granules by the name that the core knows them by.
#[derive(Default)]
pub(super) struct Granules {
    slots: Vec<Option<Granule>>,
    vacant: Vec<usize>,
}

impl Granules {
    pub(super) fn insert(&mut self, granule: Granule) -> u64 {
        match self.vacant.pop() {
            Some(slot) => {
                self.slots[slot] = Some(granule);
                slot as u64
            }
            None => {
                self.slots.push(Some(granule));
                self.slots.len() as u64 - 1
            }
        }
    }

    pub(super) fn phys(&self, name: u64) -> Option<PhysId> {
        let slot = self.slots.get(usize::try_from(name).ok()?)?;
        slot.as_ref().map(Granule::phys)
    }

    pub(super) fn remove(&mut self, name: u64) -> Option<Granule> {
        let slot = usize::try_from(name).ok()?;
        let granule = self.slots.get_mut(slot)?.take()?;
        self.vacant.push(slot);
        Some(granule)
    }

    fn bytes(&self) -> u64 {
        self.slots.iter().flatten().map(Granule::len).sum()
    }
}

/// Use of a block by another stream: up to the fence, or up to wherever the stream is when that is
/// asked first.
#[derive(Clone, Debug)]
pub(super) enum Use {
    Stream(Stream),
    Fence(Fence),
}

/// A freed block that other streams may still use.
pub(super) struct Limbo {
    pub(super) addr: u64,
    pub(super) hint: u32,
    pub(super) len: u64,
    pub(super) uses: Vec<Use>,
}

/// An old mapping of a moved granule.
pub(super) struct Alias {
    pub(super) stale: Stale,
    /// Behind the last use of the old address; `None` until it could be recorded.
    pub(super) fence: Option<Fence>,
}

/// A held place with mappings that could not be undone yet.
pub(super) struct Broken {
    pub(super) place: Stale,
    pub(super) stuck: Vec<Stuck>,
    pub(super) after: After,
}

/// A mapping that could not be undone, and the granule behind it if nobody else has that.
pub(super) struct Stuck {
    pub(super) range: VaRange,
    pub(super) granule: Option<Granule>,
}

/// When something may be unmapped.
#[derive(Clone)]
pub(super) enum After {
    /// Nothing uses it.
    Now,
    /// When work queued so far is done; the fence could not be recorded yet.
    Unrecorded,
    /// When the fence has passed.
    Fence(Fence),
}

impl Lane {
    pub(super) fn new(
        heap: &Arc<Shared>,
        pool: &Pool,
        config: &HeapConfig,
        stream: &Stream,
    ) -> Result<Arc<Self>> {
        let budget = pool.stats().budget.max(1);
        let (small, large) = config.lines(budget);
        let unit = core::PAGE_BYTES;
        let reservation = Reservation::new(pool.device(), small + large, 16 * unit, unit)?;
        let range = reservation.range();
        // A smaller reservation than asked for keeps the proportion.
        let small = (range.len() / 9 / unit).max(1) * unit;
        let base = range.start().get();
        let layout = config.layout();
        let core = core::Lane::new(layout, base, small, range.len() - small).ok_or(
            Error::InvalidConfig {
                what: "heap addresses",
                value: range.len(),
                why: "the layout does not fit",
            },
        )?;
        let lane = Arc::new_cyclic(|this| Self {
            pool: pool.clone(),
            config: config.clone(),
            stream: stream.clone(),
            range,
            largest: range.len() - small,
            state: Mutex::new(State {
                core,
                granules: Granules::default(),
                quick: Quick::default(),
                uses: HashMap::new(),
                names: HashMap::new(),
                limbo: Vec::new(),
                limbo_bytes: 0,
                stale: VecDeque::new(),
                broken: Vec::new(),
                in_hand: 0,
                frees: 0,
                calm: None,
                counts: Counts::default(),
                reservation: Some(reservation),
            }),
            heap: Arc::downgrade(heap),
            this: this.clone(),
        });
        let holder: Weak<dyn Holder> = lane.this.clone();
        pool.shared().register(holder);
        Ok(lane)
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The first address.
    pub(super) fn base(&self) -> Va {
        self.range.start()
    }

    /// Bytes of addresses.
    pub(super) fn range_len(&self) -> u64 {
        self.range.len()
    }

    /// Bytes of the longest block that could ever be placed.
    pub(super) fn largest(&self) -> u64 {
        self.largest
    }

    /// The heap that this is a part of, unless it is gone.
    pub(super) fn heap(&self) -> Option<Arc<Shared>> {
        self.heap.upgrade()
    }

    pub(super) fn contains(&self, addr: Va) -> bool {
        VaRange::new(addr, 1).is_some_and(|byte| self.range.contains(byte))
    }

    /// A block of `len` bytes, which are rounded to `size`.
    pub(super) fn alloc(self: &Arc<Self>, len: u64, size: u64, align: u64) -> Result<Block> {
        let hit = self.state.lock().hit(size, align);
        let found = match hit {
            Some(found) => found,
            None => self.miss(&Request {
                len,
                size,
                align,
                name: None,
            })?,
        };
        Ok(Block::new(
            self.clone(),
            Va::new(found.addr),
            len,
            found.hint,
        ))
    }

    /// Frees the block at an address. `hint` saves a look-up and may be wrong.
    pub(super) fn free(&self, addr: Va, hint: u32) -> Result<()> {
        let mut state = self.state.lock();
        // Marked as freed in the books, where a second free will see it.
        let mut retained = state.core.retain(addr.get(), hint, FREED);
        if retained.is_none() && state.unname(addr.get()) {
            retained = state.core.retain(addr.get(), hint, FREED);
        }
        let Some(found) = retained else {
            let inside = state.core.block(addr.get()).is_none();
            return Err(no_block(addr, inside && state.core.is_inside(addr.get())));
        };
        // Nearly always empty: only memory shared between streams has entries.
        let uses = match state.uses.is_empty() {
            true => None,
            false => state.uses.remove(&addr.get()),
        };
        match uses {
            None => {
                state.frees += 1;
                let kept = Kept {
                    addr: found.addr,
                    len: found.len,
                    hint: found.hint,
                };
                if let Some(out) = state.quick.keep(kept) {
                    state.file(out);
                }
            }
            Some(uses) => {
                state.limbo_bytes += found.len;
                state.limbo.push(Limbo {
                    addr: addr.get(),
                    hint: found.hint,
                    len: found.len,
                    uses,
                });
            }
        }
        Ok(())
    }

    /// Rounded length of the live block at an address.
    pub(super) fn usable(&self, addr: Va) -> Result<u64> {
        let state = self.state.lock();
        match state.core.block(addr.get()).filter(|b| b.uses != FREED) {
            Some(block) => Ok(block.len),
            None => Err(no_block(addr, state.core.is_inside(addr.get()))),
        }
    }

    pub(super) fn record_use(&self, addr: Va, stream: &Stream) -> Result<()> {
        self.check_device(stream.device().is_same(self.pool.device()), "stream")?;
        if *stream == self.stream {
            return Ok(());
        }
        self.add_use(addr, Use::Stream(stream.clone()))
    }

    pub(super) fn record_fence(&self, addr: Va, fence: &Fence) -> Result<()> {
        self.check_device(fence.device().is_same(self.pool.device()), "fence")?;
        self.add_use(addr, Use::Fence(fence.clone()))
    }

    fn check_device(&self, same: bool, what: &'static str) -> Result<()> {
        match same {
            true => Ok(()),
            false => Err(Error::Foreign {
                what,
                owner: "device",
            }),
        }
    }

    fn add_use(&self, addr: Va, one: Use) -> Result<()> {
        let mut state = self.state.lock();
        if state.core.block(addr.get()).is_none_or(|b| b.uses == FREED) {
            return Err(no_block(addr, state.core.is_inside(addr.get())));
        }
        let list = state.uses.entry(addr.get()).or_default();
        let known = |other: &Use| match (other, &one) {
            (Use::Stream(a), Use::Stream(b)) => a == b,
            _ => false,
        };
        if list.iter().any(known) {
            return Ok(());
        }
        list.push(one);
        let crowded = list.len() >= CROWD && list.len().is_power_of_two();
        drop(state);
        if crowded {
            self.prune_uses(addr.get());
        }
        Ok(())
    }

    /// Adds this lane's figures.
    pub(super) fn add_to(&self, sum: &mut HeapStats) {
        self.state.lock().add_to(sum);
    }

    /// Recounts the books; the bytes held.
    pub(super) fn audit(&self) -> Result<u64> {
        let state = self.state.lock();
        if let Err(fault) = state.core.audit() {
            tracing::error!(?fault, "heap books");
            return Err(Error::Inconsistent {
                what: "heap lines",
                booked: 0,
                counted: 1,
            });
        }
        let limbo = state.limbo.iter().map(|l| l.len).sum();
        check("limbo bytes", state.limbo_bytes, limbo)?;
        check("orders under way", state.in_hand as u64, 0)?;
        check("held bytes", state.core.held(), state.granules.bytes())?;
        Ok(state.core.held())
    }
}

/// An error if a figure of the books is not what a recount gives.
pub(super) fn check(what: &'static str, booked: u64, counted: u64) -> Result<()> {
    match booked == counted {
        true => Ok(()),
        false => Err(Error::Inconsistent {
            what,
            booked,
            counted,
        }),
    }
}

impl Holder for Lane {
    fn held(&self) -> Held {
        let state = self.state.lock();
        let stuck = state.broken.iter().flat_map(|b| &b.stuck);
        let stuck = stuck.filter_map(|s| s.granule.as_ref());
        Held {
            mapped: state.granules.bytes() + stuck.map(Granule::len).sum::<u64>(),
            pending: 0,
        }
    }

    fn reclaim(&self, want: u64) -> Option<u64> {
        Some(self.give_back_idle(want, GRACE))
    }

    fn awaited(&self) -> u64 {
        let state = self.state.lock();
        state.core.stats().idle + state.limbo_bytes
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let mut broken = std::mem::take(&mut state.broken);
        let mut granules = std::mem::take(&mut state.granules);
        // Nobody can ask this lane any more what it holds.
        let stuck = broken.iter_mut().flat_map(|b| &mut b.stuck);
        let stuck = stuck.filter_map(|s| s.granule.as_mut());
        let all = granules.slots.iter_mut().flatten().chain(stuck);
        all.for_each(Granule::set_unmapped);
        let limbo = state.limbo.drain(..).flat_map(|l| l.uses);
        let live = state.uses.drain().flat_map(|(_, uses)| uses);
        let old = state.stale.drain(..);
        let old = old.filter_map(|a| VaRange::new(Va::new(a.stale.addr), a.stale.len));
        let mut remains = Remains {
            awaited: limbo.chain(live).collect(),
            mappings: state.core.mappings().chain(old).collect(),
            granules,
            broken,
            reservation: state.reservation.take(),
        };
        remains.awaited.push(Use::Stream(self.stream.clone()));
        let retry = move |driver: &dyn crate::driver::Driver| remains.tear_down(driver);
        self.pool.device().give_back("heap", Box::new(retry));
    }
}

/// What is left of a lane that goes.
struct Remains {
    /// What may still use the memory.
    awaited: Vec<Use>,
    mappings: Vec<VaRange>,
    granules: Granules,
    broken: Vec<Broken>,
    reservation: Option<Reservation>,
}

impl Remains {
    /// Waits for the last uses, unmaps everything, then lets the granules and the addresses go. Can be
    /// called again, and goes on where it failed.
    fn tear_down(&mut self, driver: &dyn crate::driver::Driver) -> DriverResult<()> {
        let ignore_gone = |result: DriverResult<()>| match result {
            Err(error) if error.is_driver_gone() => Ok(()),
            other => other,
        };
        while let Some(last) = self.awaited.last() {
            match last {
                Use::Fence(fence) => fence.quiesce()?,
                Use::Stream(stream) => stream.quiesce()?,
            }
            self.awaited.pop();
        }
        while let Some(range) = self.mappings.last() {
            ignore_gone(driver.unmap(*range))?;
            self.mappings.pop();
        }
        while let Some(broken) = self.broken.last_mut() {
            while let Some(stuck) = broken.stuck.last() {
                ignore_gone(driver.unmap(stuck.range))?;
                broken.stuck.pop();
            }
            self.broken.pop();
        }
        self.granules = Granules::default();
        if let Some(reservation) = &mut self.reservation {
            ignore_gone(reservation.free())?;
        }
        Ok(())
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lane({:?}, {})", self.stream, self.range)
    }
}
