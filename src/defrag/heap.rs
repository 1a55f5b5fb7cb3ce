//! The heap of movable blocks: allocation, freeing, figures.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::block::MovableBlock;
use super::books::Books;
use super::plan::{Slot, State, Strategy};
use super::retire::{Remains, Stale};
use super::uses::Uses;
use super::{Age, Bound, Goal, MovableConfig, MovableStats, Report};
use crate::driver::cost::CostTable;
use crate::driver::{Driver, MeasureConfig};
use crate::pool::{Granule, Held, Holder, Pool};
use crate::space::Reservation;
use crate::stream::Stream;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::units::{VaRange, round_up};
use crate::{Error, Result};

/// A heap of blocks that may be moved; see the [module](super). Cheap to clone; clones are the same
/// heap.
///
/// # Threads
///
/// All methods may be called from any thread. Passes take turns; allocations that find a free run,
/// frees and accesses never wait for a pass, except for the moment in which it moves their block.
#[derive(Clone)]
pub struct MovableHeap {
    inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) pool: Pool,
    pub(super) config: MovableConfig,
    pub(super) table: CostTable,
    addresses: VaRange,
    pub(super) heap: Mutex<HeapState>,
    /// A block has stopped moving.
    pub(super) moved: Condvar,
    /// Held for a whole pass.
    pub(super) turn: Mutex<()>,
    pub(super) stop: AtomicBool,
}

pub(super) struct HeapState {
    pub(super) books: Books,
    /// The granule at each slot that is mapped or leaving.
    pub(super) granules: Vec<Option<Granule>>,
    pub(super) stale: Vec<Stale>,
    reservation: Option<Reservation>,
    pub(super) last_lazy: Instant,
    pub(super) passes: u64,
    pub(super) bytes_copied: u64,
    pub(super) remapped: u64,
}

impl MovableHeap {
    /// A heap without memory. Reserves addresses and, without a table in the settings, measures what
    /// calls cost.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`] for a granule or alignment that cannot be;
    /// [`Error::AddressSpaceExhausted`]; a driver error.
    pub fn new(pool: &Pool, config: MovableConfig) -> Result<Self> {
        let device = pool.device();
        let unit = match config.granule {
            0 => pool.config().granule,
            bytes => bytes,
        };
        let invalid = |what, value, why| Err(Error::InvalidConfig { what, value, why });
        if !unit.is_power_of_two() || unit < device.info().granularity {
            let why = "it must be a power of two and at least the device's granularity";
            return invalid("granule", unit, why);
        }
        if !config.align.is_power_of_two() || config.align > unit {
            let why = "it must be a power of two and at most the granule";
            return invalid("alignment", config.align, why);
        }
        let addresses = match config.addresses {
            0 => pool.stats().budget.saturating_mul(4).max(unit),
            bytes => bytes,
        };
        let table = match &config.table {
            Some(table) => table.clone(),
            None => {
                let driver: &dyn Driver = &**device.driver();
                crate::driver::measure(driver, MeasureConfig::of(driver))?
            }
        };
        let at_least = round_up(addresses, unit).unwrap_or(addresses);
        let reservation = Reservation::new(device, addresses, at_least.min(unit), unit)?;
        let range = reservation.range();
        let slots = usize::try_from(range.len() / unit).unwrap_or(usize::MAX);
        let inner = Arc::new(Inner {
            pool: pool.clone(),
            table,
            addresses: range,
            heap: Mutex::new(HeapState {
                books: Books::new(unit, config.align, slots),
                granules: std::iter::repeat_with(|| None).take(slots).collect(),
                stale: Vec::new(),
                reservation: Some(reservation),
                last_lazy: Instant::now(),
                passes: 0,
                bytes_copied: 0,
                remapped: 0,
            }),
            moved: Condvar::new(),
            turn: Mutex::new(()),
            stop: AtomicBool::new(false),
            config,
        });
        let holder: Arc<dyn Holder> = inner.clone();
        pool.shared().register(Arc::downgrade(&holder));
        Ok(Self { inner })
    }

    /// A block of at least `size` bytes for work on `stream`. A free run serves it without a driver
    /// call, unless other streams used that: `stream` then waits for them on the device. Otherwise a
    /// pass makes one, by the strategy of the settings. No bytes: a block without an address.
    ///
    /// # Errors
    ///
    /// [`Error::Shortfall`] if there is not that much to be had contiguous; [`Error::TooLarge`]; a
    /// driver error. Nothing has been lost then; blocks may have moved.
    pub fn alloc(&self, size: u64, stream: &Stream) -> Result<MovableBlock> {
        self.alloc_aged(size, Age::Unknown, stream)
    }

    /// As [`alloc`](Self::alloc), with a hint.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc).
    pub fn alloc_aged(&self, size: u64, age: Age, stream: &Stream) -> Result<MovableBlock> {
        let strategy = self.inner.config.strategy;
        self.alloc_by(strategy, size, age, stream)
            .map(|found| found.0)
    }

    /// As [`alloc_aged`](Self::alloc_aged), by a strategy of one's own; and what the pass did, if one
    /// was needed.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc).
    pub fn alloc_by(
        &self,
        strategy: Strategy,
        size: u64,
        age: Age,
        stream: &Stream,
    ) -> Result<(MovableBlock, Option<Report>)> {
        let inner = &self.inner;
        inner.check(stream)?;
        if size == 0 {
            return Ok((MovableBlock::new(inner.clone(), None, 0), None));
        }
        let len = {
            let heap = inner.heap.lock();
            heap.books.rounded(size)
        };
        let len = len.filter(|len| *len <= inner.addresses.len());
        let len = len.ok_or(Error::TooLarge {
            requested: size,
            max: inner.addresses.len(),
        })?;
        let (id, report) = match inner.hit(len, age, stream)? {
            Some(id) => (id, None),
            None => {
                let (id, report) = inner.miss(strategy, len, age, stream)?;
                (id, Some(report))
            }
        };
        Ok((MovableBlock::new(inner.clone(), Some(id), size), report))
    }

    /// Runs a pass: makes a free run of the bytes wanted, for work on `stream`, behind what is queued
    /// there. Copies run on `stream`; it waits on the device for other streams that used what is
    /// copied. Does not wait for the device, except at the bound on old mappings.
    ///
    /// # Errors
    ///
    /// [`Error::Shortfall`] if the strategy cannot do it, or a driver error. What was done before is
    /// consistent and stays.
    pub fn defragment(
        &self,
        stream: &Stream,
        strategy: Strategy,
        goal: Goal,
        bound: Bound,
    ) -> Result<Report> {
        self.inner.check(stream)?;
        self.inner.defragment(stream, strategy, goal, bound)
    }

    /// Unmaps old addresses whose fences have passed and, if the waste is over the threshold and the
    /// last such pass long enough ago, runs a pass for the longest run and gives empty granules to the
    /// pool. Call it now and then, from any thread; work on `stream` orders the copies.
    ///
    /// # Errors
    ///
    /// A driver error.
    pub fn maintain(&self, stream: &Stream) -> Result<Option<Report>> {
        self.inner.check(stream)?;
        self.inner.maintain(stream)
    }

    /// Makes the pass that is running, if one is, end behind its current step.
    pub fn stop(&self) {
        self.inner.stop.store(true, Ordering::Release);
    }

    /// Takes `bytes`, rounded up to granules, from the pool as one free run, without moving anything.
    ///
    /// # Errors
    ///
    /// [`Error::Shortfall`] or [`Error::OutOfMemory`], or a driver error.
    pub fn grow(&self, bytes: u64, stream: &Stream) -> Result<()> {
        self.inner.check(stream)?;
        self.inner.grow(bytes, stream)
    }

    /// Gives empty granules back to the pool whose last work is done, until at most `keep` free bytes
    /// are left; the bytes given back. Does not wait for work.
    pub fn trim(&self, keep: u64) -> u64 {
        let _turn = self.inner.turn.lock();
        self.inner.retire(None);
        let free = self.inner.heap.lock().books.free_bytes();
        self.inner.give_back(free.saturating_sub(keep))
    }

    /// Waits until the queued work on old addresses is done, and unmaps them.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] after the time set, or a driver error.
    pub fn settle(&self) -> Result<()> {
        let _turn = self.inner.turn.lock();
        self.inner.settle_all()
    }

    /// Figures of this moment.
    #[must_use]
    pub fn stats(&self) -> MovableStats {
        let heap = self.inner.heap.lock();
        let mut stats = MovableStats {
            aliases: heap.stale.len() as u64,
            passes: heap.passes,
            bytes_copied: heap.bytes_copied,
            remapped: heap.remapped,
            ..MovableStats::default()
        };
        heap.books.fill_in(&mut stats);
        stats
    }

    /// What the planner would see now.
    #[must_use]
    pub fn state(&self) -> State {
        self.inner.state(Instant::now())
    }

    /// What calls cost, as measured or given.
    #[must_use]
    pub fn table(&self) -> &CostTable {
        &self.inner.table
    }

    /// All its addresses.
    #[must_use]
    pub fn addresses(&self) -> VaRange {
        self.inner.addresses
    }

    /// The pool.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.inner.pool
    }

    /// Recounts everything. Exact only while no pass is running.
    ///
    /// # Errors
    ///
    /// [`Error::Inconsistent`] with both figures.
    pub fn audit(&self) -> Result<()> {
        let heap = self.inner.heap.lock();
        heap.books.audit()?;
        let slots = heap.books.slots.iter();
        let without = slots
            .zip(&heap.granules)
            .filter(|(slot, granule)| (**slot == Slot::Mapped) != granule.is_some());
        Error::recount("granules of slots", 0, without.count() as u64)
    }
}

impl Inner {
    pub(super) fn check(&self, stream: &Stream) -> Result<()> {
        match stream.device().is_same(self.pool.device()) {
            true => Ok(()),
            false => Err(Error::Foreign {
                what: "stream",
                owner: "device",
            }),
        }
    }

    pub(super) fn addresses(&self) -> VaRange {
        self.addresses
    }

    pub(super) fn range(&self, offset: u64, len: u64) -> Option<VaRange> {
        self.addresses.sub(offset, len)
    }

    pub(super) fn driver(&self) -> &dyn Driver {
        &**self.pool.device().driver()
    }

    /// The planner's view at that time.
    pub(super) fn state(&self, now: Instant) -> State {
        let pool = self.pool.stats();
        let available = self.pool.shared().available();
        let heap = self.heap.lock();
        let since = now.saturating_duration_since(heap.last_lazy);
        let mut state = heap.books.state(now, self.config.youth, since);
        let unit = heap.books.unit;
        state.idle = pool.idle.min(available) / unit;
        state.creatable = available / unit - state.idle;
        state
    }

    /// A block from a free run, if there is one.
    fn hit(&self, len: u64, age: Age, stream: &Stream) -> Result<Option<u64>> {
        let found = {
            let mut heap = self.heap.lock();
            let at = heap.books.fit(len, age == Age::Young);
            at.and_then(|at| heap.books.take(at, len, age, stream))
        };
        match found {
            Some((id, before)) => self.order(id, &before, stream).map(Some),
            None => Ok(None),
        }
    }

    /// Makes the owner of a new block wait for who used its bytes before.
    pub(super) fn order(&self, id: u64, before: &Uses, stream: &Stream) -> Result<u64> {
        match before.wait_on(stream) {
            Ok(()) => Ok(id),
            Err(error) => {
                let mut heap = self.heap.lock();
                if let Some(block) = heap.books.blocks.get_mut(&id) {
                    block.uses.join(before);
                }
                heap.books.remove_block(id);
                Err(error)
            }
        }
    }

    /// Waits while a pass is moving the block, then keeps it where it is.
    pub(super) fn hold_still(&self, id: u64) -> Result<u64> {
        let mut heap = self.at_rest(id);
        let block = heap.books.blocks.get_mut(&id).ok_or(Error::Stale {
            what: "block",
            value: id,
        })?;
        block.still += 1;
        Ok(block.offset)
    }

    pub(super) fn let_go(&self, id: u64) {
        if let Some(block) = self.heap.lock().books.blocks.get_mut(&id) {
            block.still = block.still.saturating_sub(1);
        }
    }

    pub(super) fn record_use(&self, id: u64, stream: &Stream) -> Result<()> {
        self.check(stream)?;
        let ready = {
            let mut heap = self.heap.lock();
            let block = heap.books.blocks.get_mut(&id).ok_or(Error::Stale {
                what: "block",
                value: id,
            })?;
            block.uses.add(stream);
            block.ready.clone()
        };
        let Some(fence) = ready else {
            return Ok(());
        };
        if !fence.is_done()? {
            return stream.wait(&fence);
        }
        let mut heap = self.heap.lock();
        if let Some(block) = heap.books.blocks.get_mut(&id)
            && block.ready.as_ref().is_some_and(|now| now.is_same(&fence))
        {
            block.ready = None;
        }
        Ok(())
    }

    pub(super) fn free(&self, id: u64) {
        self.at_rest(id).books.remove_block(id);
    }

    fn at_rest(&self, id: u64) -> MutexGuard<'_, HeapState> {
        let mut heap = self.heap.lock();
        while heap.books.blocks.get(&id).is_some_and(|b| b.moving) {
            self.moved.wait(&mut heap);
        }
        heap
    }
}

impl Holder for Inner {
    fn held(&self) -> Held {
        let heap = self.heap.lock();
        let stuck = heap.stale.iter().filter_map(|s| s.granule.as_ref());
        let mapped = heap.granules.iter().flatten().chain(stuck);
        Held {
            mapped: mapped.map(Granule::len).sum(),
            pending: 0,
        }
    }

    fn reclaim(&self, want: u64) -> Option<u64> {
        let _turn = self.turn.try_lock()?;
        Some(self.give_back(want))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let heap = self.heap.get_mut();
        let remains = Remains::of(
            &mut heap.books,
            &mut heap.granules,
            &mut heap.stale,
            heap.reservation.take(),
            self.addresses,
        );
        let mut remains = remains;
        let retry = move |driver: &dyn Driver| remains.tear_down(driver);
        self.pool
            .device()
            .give_back("movable heap", Box::new(retry));
    }
}

impl fmt::Debug for MovableHeap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MovableHeap")
            .field("addresses", &self.inner.addresses)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
