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
use super::quick::{Kept, Quick};
use crate::driver::PhysId;
use crate::pool::{Granule, Held, Holder, Pool};
use crate::space::Reservation;
use crate::stream::{Fence, Stream};
use crate::sync::Mutex;
use crate::units::{Va, VaRange};
use crate::{Error, Result};

/// Mark of a block in the core that has been freed and waits for other streams.
const FREED: u32 = 1;

pub(super) struct Lane {
    pub(super) pool: Pool,
    pub(super) config: HeapConfig,
    stream: Stream,
    range: VaRange,
    pub(super) state: Mutex<State>,
    this: Weak<Self>,
}

/// Everything that changes. The lock is held for bookkeeping only, never across a driver call.
pub(super) struct State {
    pub(super) core: core::Lane,
    pub(super) granules: Granules,
    pub(super) quick: Quick,
    /// Uses of live blocks by other streams, by address.
    uses: HashMap<u64, Vec<Use>>,
    pub(super) limbo: Vec<Limbo>,
    pub(super) limbo_bytes: u64,
    /// Old addresses of moved granules, oldest first.
    pub(super) stale: VecDeque<Alias>,
    /// Mappings that the driver refused to undo.
    pub(super) broken: Vec<Broken>,
    pub(super) counts: Counts,
    reservation: Option<Reservation>,
}

impl State {
    /// A block from mapped memory.
    #[inline]
    fn hit(&mut self, size: u64, align: u64) -> Option<core::Block> {
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
        self.core.mark(one.addr, 0);
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

/// A mapping at an address that the core counts as a gap.
pub(super) struct Broken {
    pub(super) range: VaRange,
    /// The granule, if nobody else has it.
    pub(super) granule: Option<Granule>,
}

impl Lane {
    pub(super) fn new(pool: &Pool, config: &HeapConfig, stream: &Stream) -> Result<Arc<Self>> {
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
            state: Mutex::new(State {
                core,
                granules: Granules::default(),
                quick: Quick::default(),
                uses: HashMap::new(),
                limbo: Vec::new(),
                limbo_bytes: 0,
                stale: VecDeque::new(),
                broken: Vec::new(),
                counts: Counts::default(),
                reservation: Some(reservation),
            }),
            this: this.clone(),
        });
        let holder: Weak<dyn Holder> = lane.this.clone();
        pool.shared().register(holder);
        Ok(lane)
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Bytes of addresses.
    pub(super) fn range_len(&self) -> u64 {
        self.range.len()
    }

    pub(super) fn contains(&self, addr: Va) -> bool {
        VaRange::new(addr, 1).is_some_and(|byte| self.range.contains(byte))
    }

    /// A block of `len` bytes, which are rounded to `size`.
    pub(super) fn alloc(self: &Arc<Self>, len: u64, size: u64, align: u64) -> Result<Block> {
        let hit = self.state.lock().hit(size, align);
        let found = match hit {
            Some(found) => found,
            None => self.miss(size, align)?,
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
        let Some(found) = state.core.retain(addr.get(), hint, FREED) else {
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
        if !list.iter().any(known) {
            list.push(one);
        }
        Ok(())
    }

    /// Recounts the books.
    pub(super) fn audit(&self) -> Result<()> {
        let state = self.state.lock();
        if let Err(fault) = state.core.audit() {
            tracing::error!(?fault, "heap books");
            return Err(Error::Inconsistent {
                what: "heap lines",
                booked: 0,
                counted: 1,
            });
        }
        let check = |what, booked, counted| match booked == counted {
            true => Ok(()),
            false => Err(Error::Inconsistent {
                what,
                booked,
                counted,
            }),
        };
        let limbo = state.limbo.iter().map(|l| l.len).sum();
        check("limbo bytes", state.limbo_bytes, limbo)?;
        check("held bytes", state.core.held(), state.granules.bytes())
    }
}

impl Holder for Lane {
    fn held(&self) -> Held {
        let state = self.state.lock();
        let broken = state.broken.iter().filter_map(|b| b.granule.as_ref());
        Held {
            mapped: state.granules.bytes() + broken.map(Granule::len).sum::<u64>(),
            pending: 0,
        }
    }

    fn reclaim(&self, want: u64) -> Option<u64> {
        Some(self.give_back_idle(want))
    }

    fn awaited(&self) -> u64 {
        let state = self.state.lock();
        state.core.stats().idle + state.limbo_bytes
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // A device that is lost cannot be waited for, and has nothing left to protect.
        if let Err(error) = self.settle_all() {
            tracing::warn!(%error, "heap dropped without waiting for its streams");
        }
        let state = self.state.get_mut();
        let mut remains = Remains {
            mappings: state.core.mappings().collect(),
            granules: std::mem::take(&mut state.granules),
            reservation: state.reservation.take(),
            broken: std::mem::take(&mut state.broken),
        };
        remains.mappings.extend(
            state
                .stale
                .drain(..)
                .filter_map(|a| VaRange::new(Va::new(a.stale.addr), a.stale.len)),
        );
        let retry = move |driver: &dyn crate::driver::Driver| remains.tear_down(driver);
        self.pool.device().give_back("heap", Box::new(retry));
    }
}

/// What is left of a lane that goes.
struct Remains {
    mappings: Vec<VaRange>,
    granules: Granules,
    broken: Vec<Broken>,
    reservation: Option<Reservation>,
}

impl Remains {
    /// Unmaps everything, then lets the granules and the addresses go. Can be called again.
    fn tear_down(&mut self, driver: &dyn crate::driver::Driver) -> crate::driver::DriverResult<()> {
        let ignore_gone = |result: crate::driver::DriverResult<()>| match result {
            Err(error) if error.is_driver_gone() => Ok(()),
            other => other,
        };
        while let Some(range) = self.mappings.last() {
            ignore_gone(driver.unmap(*range))?;
            self.mappings.pop();
        }
        while let Some(broken) = self.broken.last() {
            ignore_gone(driver.unmap(broken.range))?;
            self.broken.pop();
        }
        self.granules = Granules::default();
        if let Some(reservation) = &mut self.reservation {
            reservation.free()?;
        }
        Ok(())
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lane({:?}, {})", self.stream, self.range)
    }
}
