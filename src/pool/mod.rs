//! A device's physical budget: granules, idle and in use, limits and policy.

use std::sync::Arc;

#[cfg(doc)]
use crate::Error;
use crate::sync::Mutex;
use crate::{Device, Result};

mod ahead;
mod books;
mod choose;
mod config;
mod granule;
mod inner;

use ahead::Ahead;
use books::Books;
pub(crate) use books::Held;
pub use books::PoolStats;
pub(crate) use choose::Need;
pub use config::{DEFAULT_GRANULE, DEFAULT_LARGEST_GRANULE, Policy, PoolConfig};
pub(crate) use granule::Granule;
pub(crate) use inner::{BUSY, Shared};

/// Physical memory shared by arenas: what one gives back another gets without a driver create.
/// Cheap to clone; clones are the same pool.
///
/// # Threads
///
/// All methods may be called from any thread. No lock is held across a driver call.
///
/// # Example
///
/// ```
/// use granule::{Arena, Device, Pool, PoolConfig, driver::sim::SimConfig, units::MIB};
///
/// let device = Device::sim(SimConfig::default())?;
/// let pool = Pool::new(&device, PoolConfig::with_budget(64 * MIB))?;
/// let mut first = Arena::new(&pool, 64 * MIB)?;
/// let second = Arena::new(&pool, 64 * MIB)?;
/// first.grow(64 * MIB)?;
/// assert!(second.grow(1).is_err_and(|e| e.is_out_of_memory()));
/// first.shrink(0)?;
/// second.grow(64 * MIB)?;
/// # Ok::<(), granule::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Pool {
    shared: Arc<Shared>,
}

/// Whoever holds granules of a pool and can give some back when it is short.
pub(crate) trait Holder: Send + Sync {
    /// What is held mapped.
    fn held(&self) -> Held;

    /// Gives back up to about `want` bytes that nobody uses, without waiting for anything; the
    /// bytes given back. `None` if another thread is changing it just now.
    fn reclaim(&self, want: u64) -> Option<u64>;

    /// Bytes that could be reclaimed once queued work is done.
    fn awaited(&self) -> u64 {
        0
    }

    /// Maps what will be needed next.
    fn map_ahead(&self) {}
}

/// How hard to try for memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Effort {
    /// Take back what others do not use, and wait for fences as long as the settings allow.
    Full,
    /// Only what costs nobody anything: somebody looks ahead.
    Spare,
}

impl Pool {
    /// A pool of the device's memory. Static memory is created here; this takes about 43 us a
    /// granule on an H200.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`] (no driver call was made), [`Error::OutOfMemory`] if the static
    /// part cannot be created, or a driver error. Nothing is left behind.
    pub fn new(device: &Device, config: PoolConfig) -> Result<Self> {
        let checked = config.check(device)?;
        let granule = config.granule;
        let shared = Arc::new(Shared {
            device: device.clone(),
            granularity: checked.granularity,
            books: Mutex::new(Books::new(checked)),
            holders: Mutex::new(Vec::new()),
            ahead: Ahead::new(),
            service: Mutex::new(None),
            config,
        });
        shared.fill_floor(checked.floor, granule)?;
        let pool = Self { shared };
        pool.shared.top_up_later(&pool.shared);
        Ok(pool)
    }

    /// The pool's device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// The settings it was made with (the budget may have changed since).
    #[must_use]
    pub fn config(&self) -> &PoolConfig {
        &self.shared.config
    }

    /// Figures of this moment.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.shared.books.lock().stats()
    }

    /// Sets the peaks of [`stats`](Self::stats) to what there is now, to measure a phase by itself.
    pub fn reset_peaks(&self) {
        self.shared.books.lock().reset_peaks();
    }

    /// Whether two handles name the same pool.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Changes the budget. A lower one releases idle granules and unused tails at once; a static
    /// pool's floor follows it, and a higher budget is then created at once.
    ///
    /// # Errors
    ///
    /// [`Error::BudgetBelowUse`] if more is in use; [`Error::InvalidConfig`] if it is below a
    /// hybrid's static base; a driver error or [`Error::OutOfMemory`] if the device refuses. The
    /// budget is then as before.
    pub fn set_budget(&self, bytes: u64) -> Result<()> {
        self.shared.set_budget(bytes)
    }

    /// Sets how many idle bytes are kept for reuse. What is idle beyond that now stays until
    /// [`trim`](Self::trim).
    pub fn set_watermark(&self, bytes: u64) {
        self.shared.books.lock().set_watermark(bytes);
    }

    /// Returns idle memory to the device until at most `keep` idle bytes are left (more, where the
    /// static floor asks for it). Tails of arenas that nobody uses count as idle. Does not wait for
    /// fences. Returns the bytes released.
    ///
    /// # Errors
    ///
    /// The first driver error; what was released before stays released, the rest is kept idle.
    pub fn trim(&self, keep: u64) -> Result<u64> {
        self.shared.reclaim(u64::MAX);
        let victims = {
            let mut books = self.shared.books.lock();
            let beyond = books.beyond(keep);
            books.evict(beyond)
        };
        let bytes = victims.iter().map(|raw| raw.len).sum();
        self.shared.release_all(victims)?;
        Ok(bytes)
    }

    /// Recounts everything and compares with the counters. Exact only while no other thread is
    /// inside an operation of this pool or its arenas.
    ///
    /// # Errors
    ///
    /// [`Error::Inconsistent`] with both figures.
    pub fn audit(&self) -> Result<PoolStats> {
        let mut held = Held::default();
        for one in self.shared.live_holders().iter().map(|h| h.held()) {
            held.mapped += one.mapped;
            held.pending += one.pending;
        }
        let books = self.shared.books.lock();
        books.audit(held)?;
        Ok(books.stats())
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}
