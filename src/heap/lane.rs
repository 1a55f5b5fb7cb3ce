//! One stream's side of a heap: its addresses, its blocks, its granules.
//!
//! Memory that is free here is ordered before whatever the lane's stream does next. Memory that
//! other streams used is kept in limbo after its free until their fences have passed, or until this
//! stream has been made to wait for them.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Arc, Weak};

use super::block::no_block;
use super::config::HeapConfig;
use super::core;
use super::hint::LaneKey;
use super::hub::{Hub, RECORDED, USED_BY_ADDRESS};
use super::magazine::Magazine;
use super::retire::GRACE;
pub(super) use super::state::{After, Alias, Broken, Limbo, State, Stuck, Use};
use super::state::{FREED, Granules, RAW};
use super::{HeapStats, Shared};
use crate::driver::DriverResult;
use crate::history::History;
use crate::pool::{Granule, Held, Holder, Pool};
use crate::space::Reservation;
use crate::stream::{Fence, Stream};
use crate::sync::Mutex;
use crate::units::{Va, VaRange};
use crate::{Error, Result};

/// Recorded uses of one block from which on it is seen which have passed.
const CROWD: usize = 16;

pub(super) struct Lane {
    pub(super) pool: Pool,
    pub(super) config: HeapConfig,
    stream: Stream,
    range: VaRange,
    /// Bytes of the longest block that could ever be placed.
    largest: u64,
    hub: &'static Hub,
    /// The hub's.
    pub(super) state: &'static Mutex<State>,
    /// Belongs to a capture scope, and serves nobody else.
    is_scope: bool,
    /// Nothing may move or leave: the scope is alive.
    pinned: AtomicBool,
    heap: Weak<Shared>,
    this: Weak<Self>,
}

impl Lane {
    pub(super) fn new(
        heap: &Arc<Shared>,
        pool: &Pool,
        config: &HeapConfig,
        stream: &Stream,
        is_scope: bool,
    ) -> Result<Arc<Self>> {
        let budget = pool.stats().budget.max(1);
        // What never moves needs fewer addresses.
        let (small, large) = match is_scope {
            true => HeapConfig::lines_of(config.addresses.unwrap_or(budget.saturating_mul(2))),
            false => config.lines(budget),
        };
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
        let key = (!is_scope).then(|| LaneKey::new(heap.id, stream));
        let hub = Hub::lend(|pair| State::new(key, core, pair, Some(reservation)));
        let lane = Arc::new_cyclic(|this| Self {
            pool: pool.clone(),
            config: config.clone(),
            stream: stream.clone(),
            range,
            largest: range.len() - small,
            hub,
            state: hub.state(),
            is_scope,
            pinned: AtomicBool::new(is_scope),
            heap: Arc::downgrade(heap),
            this: this.clone(),
        });
        let holder: Weak<dyn Holder> = lane.this.clone();
        pool.shared().register(holder);
        Ok(lane)
    }

    /// What threads and blocks meet.
    #[inline]
    pub(super) fn hub(&self) -> &'static Hub {
        self.hub
    }

    #[inline]
    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Whether it belongs to a capture scope, or did.
    #[inline]
    pub(super) fn is_scope(&self) -> bool {
        self.is_scope
    }

    /// Whether nothing of it may move or leave.
    pub(super) fn is_pinned(&self) -> bool {
        self.pinned.load(Acquire)
    }

    /// Lets granules without a live byte go from now on.
    pub(super) fn unpin(&self) {
        self.pinned.store(false, Release);
    }

    /// Whether it serves allocations of a stream.
    #[inline]
    pub(super) fn serves(&self, stream: &Stream) -> bool {
        self.stream == *stream && !self.is_scope
    }

    /// The addresses.
    pub(super) fn range(&self) -> VaRange {
        self.range
    }

    /// Bytes of the longest block that could ever be placed.
    #[inline]
    pub(super) fn largest(&self) -> u64 {
        self.largest
    }

    /// The heap that this is a part of, unless it is gone.
    pub(super) fn heap(&self) -> Option<Arc<Shared>> {
        self.heap.upgrade()
    }

    #[inline]
    pub(super) fn contains(&self, addr: Va) -> bool {
        VaRange::new(addr, 1).is_some_and(|byte| self.range.contains(byte))
    }

    /// The first address.
    #[inline]
    pub(super) fn base(&self) -> u64 {
        self.range.start().get()
    }

    /// Whether no block may be freed without the lock.
    #[inline]
    pub(super) fn is_watched(&self) -> bool {
        self.hub.watched() != 0
    }

    /// What is told of every block, if anything is.
    pub(super) fn history(&self) -> Option<History> {
        match self.hub.watched() & RECORDED {
            0 => None,
            _ => self.state.lock().history.clone(),
        }
    }

    /// Sets what is told of every block from now on. What is there already is told at once.
    pub(super) fn set_history(&self, history: Option<&History>) {
        if history.is_some() {
            // Before the magazines are emptied: nobody fills them from here on.
            self.hub.watch(RECORDED);
        }
        let mut state = self.state.lock();
        state.flush_and_settle();
        state.history = history.cloned();
        match history {
            Some(history) => {
                let key = self.stream.key();
                for one in state.core.placed() {
                    history.map(key, one.addr, one.len);
                }
                let in_limbo = |mark| mark == FREED;
                for piece in state.core.pieces() {
                    let Some(mark) = piece.mark else { continue };
                    let named = state.names.get(&piece.addr);
                    let requested = named.map_or(piece.len, |named| named.requested);
                    let name = named.map(|named| &named.name);
                    history.alloc(key, piece.addr, piece.len, requested, name);
                    if in_limbo(mark) {
                        history.free(piece.addr, false);
                    }
                }
            }
            None => {
                self.hub.watch_no_more(RECORDED);
            }
        }
    }

    /// Says what was recorded, where subscribers may be called.
    pub(super) fn say(&self) {
        if let Some(history) = self.history() {
            history.say();
        }
    }

    /// A block from mapped memory.
    #[inline]
    pub(super) fn hit(
        &self,
        size: u64,
        align: u64,
        seat: u32,
        magazine: &Magazine,
    ) -> Option<core::Block> {
        self.hub.lock().hit(size, align, seat, magazine)
    }

    /// A block without an owner from mapped memory that no thread keeps for itself. Not one that the history
    /// has to hear of.
    #[inline]
    pub(super) fn hit_raw(&self, size: u64, align: u64) -> Option<Va> {
        self.hub.lock().hit_raw(size, align)
    }

    /// Frees the block without an owner at an address. The history hears of it when the caller says so.
    pub(super) fn free(&self, addr: Va) -> Result<()> {
        self.hub.lock().free(addr, u32::MAX, RAW, true).map(drop)
    }

    /// Rounded length of the live block at an address.
    pub(super) fn usable(&self, addr: Va) -> Result<u64> {
        let state = self.state.lock();
        match state.live(addr.get()) {
            Some(block) => Ok(block.len),
            None => Err(no_block(addr, state.core.is_inside(addr.get()))),
        }
    }

    /// As [`record_owned_use`](Self::record_owned_use), for an address. If the block has an owner, that
    /// does not know: from then on no block of this lane is freed without a look at the uses.
    pub(super) fn record_use(&self, addr: Va, stream: &Stream) -> Result<()> {
        {
            let state = self.state.lock();
            let Some(block) = state.live(addr.get()) else {
                return Err(no_block(addr, state.core.is_inside(addr.get())));
            };
            if block.uses != RAW && *stream != self.stream {
                self.hub.watch(USED_BY_ADDRESS);
            }
        }
        self.record_owned_use(addr, stream)
    }

    pub(super) fn record_owned_use(&self, addr: Va, stream: &Stream) -> Result<()> {
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

    /// Says that a stream replays graphs which use this memory.
    pub(super) fn record_replay(&self, stream: &Stream) -> Result<()> {
        self.check_device(stream.device().is_same(self.pool.device()), "stream")?;
        let mut state = self.state.lock();
        if *stream != self.stream && !state.replays.contains(stream) {
            state.replays.push(stream.clone());
            state.calm = None;
        }
        Ok(())
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
        let before = sum.held;
        self.state.lock().add_to(sum);
        if self.is_pinned() {
            sum.scoped += sum.held - before;
        }
    }

    /// Recounts the books; the bytes held.
    pub(super) fn audit(&self) -> Result<u64> {
        let state = self.state.lock();
        if let Err(fault) = state.core.audit() {
            tracing::error!(?fault, "heap books");
            Error::recount("heap lines", 0, 1)?;
        }
        let mut lost = 0;
        let _stop = state.stop_magazines();
        for magazine in &state.magazines {
            magazine.each(|class, slot| {
                lost += u64::from(!state.is_known(class, slot));
            });
        }
        let kept = state.quick.each();
        lost += kept
            .filter(|(class, slot)| !state.is_known(*class, *slot))
            .count() as u64;
        if let Some(kept) = state.quick.pair().peek() {
            let block = state.core.block(kept.addr);
            let known = |b: core::Block| b.uses == 0 && b.len == kept.len;
            lost += u64::from(!block.is_some_and(known));
        }
        Error::recount("blocks kept", 0, lost)?;
        Error::recount("names of freed blocks", 0, state.orphaned_names())?;
        let limbo = state.limbo.iter().map(|l| l.len).sum();
        Error::recount("limbo bytes", state.limbo_bytes, limbo)?;
        Error::recount("orders under way", state.in_hand as u64, 0)?;
        Error::recount("held bytes", state.core.held(), state.granules.bytes())?;
        Ok(state.core.held())
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
        if self.is_pinned() {
            return 0;
        }
        let state = self.state.lock();
        state.core.stats().idle + state.limbo_bytes
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
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
        let replays = state.replays.drain(..).map(Use::Stream);
        remains.awaited.extend(replays);
        remains.awaited.push(Use::Stream(self.stream.clone()));
        if remains.mappings.is_empty() && remains.broken.is_empty() {
            // Nothing is mapped that work could use.
            remains.awaited.clear();
        }
        state.strip();
        drop(guard);
        self.hub.take_back();
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
