//! Growable contiguous memory with a fixed base address.

use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use crate::history::History;
use crate::pool::{Holder, Pool};
use crate::space::Reservation;
use crate::stream::{Fence, Stream};
use crate::sync::Mutex;
use crate::units::{Va, VaRange};
use crate::{Device, Error, Result};

mod config;
mod inner;
mod ladder;
mod line;
mod pin;
mod txn;

pub use config::ArenaConfig;
use inner::{Meta, Owner, Shared};
use ladder::Ladder;
pub use line::Extent;
use line::{Line, Waiter};
pub use pin::Pin;
use txn::Wish;

/// One contiguous range of device memory that grows and shrinks in place: its base address never
/// changes and its bytes are never copied.
///
/// # Units and rounding
///
/// Lengths are bytes and exact. What is mapped is rounded up: to the device's granularity (2 MiB)
/// at first, to an eighth of the arena as it gets larger, to the pool's granule in the end. Memory
/// is given back in whole granules.
///
/// # Threads and blocking
///
/// All methods may be called from any thread. Growing takes the `&self` of a shared arena, since no
/// byte moves; shrinking takes `&mut self`, so that the compiler keeps borrowed views from
/// outliving it ([`try_shrink`](Self::try_shrink) checks at run time instead). Growth within what is
/// mapped is a bounds check under a lock that is never held across a driver call.
///
/// # Streams
///
/// Growth needs no synchronisation. Memory is given back only when the work that uses it is done:
/// tell the arena which streams do with [`record_use`](Self::record_use) (tensors do so by
/// themselves). Dropping an arena waits for them.
///
/// # Example
///
/// ```
/// use granule::{Arena, Device, Pool, PoolConfig, driver::sim::SimConfig, units::{GIB, MIB}};
///
/// let device = Device::sim(SimConfig::default())?;
/// let pool = Pool::new(&device, PoolConfig::default())?;
/// let mut arena = Arena::new(&pool, 64 * GIB)?;
/// let base = arena.base();
/// arena.grow(3 * GIB)?;
/// arena.grow(5 * GIB)?;
/// assert_eq!((arena.base(), arena.len()), (base, 5 * GIB));
/// arena.shrink(100 * MIB)?;
/// arena.close().map_err(|(_, error)| error)?;
/// # Ok::<(), granule::Error>(())
/// ```
pub struct Arena {
    owner: Arc<Owner>,
}

impl Arena {
    /// An empty arena that can grow to `capacity` bytes.
    ///
    /// # Errors
    ///
    /// As [`with_config`](Self::with_config).
    pub fn new(pool: &Pool, capacity: u64) -> Result<Self> {
        Self::with_config(pool, &ArenaConfig::new(capacity))
    }

    /// An empty arena. Reserves addresses (1 to 5 us on an H200) and no memory.
    ///
    /// # Errors
    ///
    /// [`Error::TooLarge`], [`Error::AddressSpaceExhausted`], or a driver error.
    pub fn with_config(pool: &Pool, config: &ArenaConfig) -> Result<Self> {
        let device = pool.device();
        let shared = pool.shared();
        let smallest = shared.smallest_step();
        let largest = config.granule.unwrap_or(shared.largest_granule());
        let steps = largest / smallest;
        if !largest.is_multiple_of(smallest)
            || !steps.is_power_of_two()
            || largest > shared.largest_granule()
        {
            return Err(Error::InvalidConfig {
                what: "arena granule",
                value: largest,
                why: "it must be the smallest step times a power of two, and no larger than the pool's",
            });
        }
        let capacity = config.capacity.max(1);
        let at_least = config.min_capacity.unwrap_or(capacity).max(1);
        let reservation = Reservation::new(device, capacity, at_least, smallest)?;
        let ladder = Ladder { smallest, largest };
        let shared = Arc::new_cyclic(|this| Shared {
            pool: pool.clone(),
            base: reservation.base(),
            capacity: reservation.len(),
            ladder,
            look_ahead: config.look_ahead,
            meta: Mutex::new(Meta::default()),
            line: Mutex::new(Line::new(reservation, shared.clone(), device.clone())),
            uses: Mutex::new(Vec::new()),
            ahead_asked: AtomicBool::new(false),
            this: this.clone(),
        });
        let holder: Weak<dyn Holder> = shared.this.clone();
        pool.shared().register(holder);
        shared.look_ahead_if_due(0, 0);
        Ok(Self {
            owner: Arc::new(Owner { shared }),
        })
    }

    fn shared(&self) -> &Shared {
        &self.owner.shared
    }

    /// The address of the first byte. Never changes.
    #[must_use]
    pub fn base(&self) -> Va {
        self.shared().base
    }

    /// Bytes in use.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.shared().meta.lock().len
    }

    /// Whether no byte is in use.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of addresses: the most the arena can grow to.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.shared().capacity
    }

    /// Bytes with memory behind them, in use or not. Waits for a driver call in progress.
    #[must_use]
    pub fn mapped(&self) -> u64 {
        self.shared().line.lock().end()
    }

    /// The addresses in use now.
    #[must_use]
    pub fn range(&self) -> VaRange {
        self.shared().sub(0, self.len())
    }

    /// The pool that the memory comes from.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.shared().pool
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.shared().pool.device()
    }

    /// Grows to at least `to` bytes; a smaller `to` changes nothing. New bytes that were mapped
    /// before in this arena keep what was there; others are zero in fresh granules and anything in
    /// recycled ones, unless the pool zeroes at hand-over. Blocks for the driver calls (about 43 us
    /// a new granule on an H200), and for the fences of a deferred shrink that it grows into.
    ///
    /// # Errors
    ///
    /// [`Error::ReservationExhausted`] (no driver call was made), [`Error::OutOfMemory`], or a
    /// driver error. Length, contents and addresses are as before.
    pub fn grow(&self, to: u64) -> Result<()> {
        self.shared().grow(to, Waiter::Host)
    }

    /// As [`grow`](Self::grow), for memory that `stream` uses first: fences of a deferred shrink
    /// are waited for by the stream, on the device, and zeroing is queued on it. Nothing blocks
    /// the host but the driver calls.
    ///
    /// # Errors
    ///
    /// As [`grow`](Self::grow), and [`Error::Foreign`] for a stream of another device.
    pub fn grow_on(&self, to: u64, stream: &Stream) -> Result<()> {
        self.record_use(stream)?;
        self.shared().grow(to, Waiter::Stream(stream))
    }

    /// Grows by `bytes` and returns the addresses added. Threads that extend at once get ranges
    /// that do not overlap.
    ///
    /// # Errors
    ///
    /// As [`grow`](Self::grow).
    pub fn extend(&self, bytes: u64) -> Result<VaRange> {
        self.shared().extend(bytes)
    }

    /// Grows every arena to at least its length, or none: K and V of every layer in one step. All
    /// belong to one pool.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for arenas of different pools and [`Error::Duplicate`] for an arena named
    /// twice (no driver call was made), else as [`grow`](Self::grow). All arenas are as before.
    pub fn grow_all(wishes: &[(&Self, u64)]) -> Result<()> {
        Self::grow_all_for(wishes, Waiter::Host)
    }

    /// As [`grow_all`](Self::grow_all), for memory that `stream` uses first; see
    /// [`grow_on`](Self::grow_on).
    ///
    /// # Errors
    ///
    /// As [`grow_all`](Self::grow_all) and [`grow_on`](Self::grow_on).
    pub fn grow_all_on(wishes: &[(&Self, u64)], stream: &Stream) -> Result<()> {
        for (arena, _) in wishes {
            arena.record_use(stream)?;
        }
        Self::grow_all_for(wishes, Waiter::Stream(stream))
    }

    fn grow_all_for(wishes: &[(&Self, u64)], waiter: Waiter<'_>) -> Result<()> {
        let wishes: Vec<Wish<'_>> = wishes
            .iter()
            .map(|(arena, to)| Wish {
                arena: arena.shared(),
                to: *to,
            })
            .collect();
        txn::grow(&wishes, waiter)?;
        for wish in &wishes {
            wish.arena.say();
            wish.arena.look_ahead_now();
        }
        Ok(())
    }

    /// Says that work on `stream` uses this memory, from now until the arena goes: giving memory
    /// back waits for it. Costs nothing on the device.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for a stream of another device.
    pub fn record_use(&self, stream: &Stream) -> Result<()> {
        if !stream.device().is_same(self.device()) {
            return Err(Error::Foreign {
                what: "stream",
                owner: "device",
            });
        }
        let mut uses = self.shared().uses.lock();
        if !uses.contains(stream) {
            uses.push(stream.clone());
        }
        Ok(())
    }

    /// Sets the length to `to` bytes if it is larger, and keeps the memory. No driver call.
    ///
    /// # Errors
    ///
    /// [`Error::Pinned`].
    pub fn truncate(&mut self, to: u64) -> Result<()> {
        let mut meta = self.shared().meta.lock();
        meta.check_pins(to)?;
        meta.len = meta.len.min(to);
        Ok(())
    }

    /// Shrinks to `to` bytes if the length is larger, and gives whole granules past it back to the
    /// pool, also those mapped ahead. Blocks until the work queued so far on the recorded streams
    /// is done, and for the driver calls.
    ///
    /// # Errors
    ///
    /// [`Error::Pinned`] (nothing changed), or a driver error: of the wait (nothing changed), of an
    /// unmap (the length is `to`; what could not be unmapped stays mapped and another shrink tries
    /// again), or of a release by the pool (all is done; the granule is kept idle).
    pub fn shrink(&mut self, to: u64) -> Result<()> {
        self.try_shrink(to)
    }

    /// As [`shrink`](Self::shrink) for a shared arena: views are protected by their pins only.
    ///
    /// # Errors
    ///
    /// As [`shrink`](Self::shrink).
    pub fn try_shrink(&self, to: u64) -> Result<()> {
        let shared = self.shared();
        shared.meta.lock().check_pins(to)?;
        let fences = shared.fences()?;
        shared.shrink_after(to, &fences)
    }

    /// As [`shrink`](Self::shrink), but waits for these fences instead of the recorded streams: for
    /// a caller who knows the last use of the tail, perhaps on another device. An empty list says
    /// that nothing uses it.
    ///
    /// # Errors
    ///
    /// As [`shrink`](Self::shrink).
    pub fn shrink_after(&mut self, to: u64, fences: &[Fence]) -> Result<()> {
        self.shared().shrink_after(to, fences)
    }

    /// As [`shrink`](Self::shrink), without waiting: the tail goes back to the pool once the work
    /// queued so far on the recorded streams is done. That is looked at when the pool is short, at
    /// [`Pool::trim`], and at the next shrink. Growing into the tail before takes it back.
    ///
    /// # Errors
    ///
    /// [`Error::Pinned`] or a driver error; nothing changed.
    pub fn shrink_deferred(&mut self, to: u64) -> Result<()> {
        let shared = self.shared();
        let fences = shared.fences()?;
        let mut line = shared.line.lock();
        let mut meta = shared.meta.lock();
        meta.check_pins(to)?;
        meta.len = meta.len.min(to);
        let first = line.slots_below(meta.len);
        let touched = line.slots_below(meta.touched);
        line.defer(first, touched, &fences);
        meta.open = line.open();
        meta.touched = meta.len;
        drop(meta);
        line.cut_idle(first, u64::MAX);
        shared.publish(&line);
        Ok(())
    }

    /// Gives memory past the length back to the pool; as [`shrink`](Self::shrink) to the length.
    ///
    /// # Errors
    ///
    /// As [`shrink`](Self::shrink).
    pub fn shrink_to_fit(&mut self) -> Result<()> {
        let len = self.len();
        self.shrink(len)
    }

    /// Which granule lies where, for the bytes in use, in address order. Libraries that register
    /// memory need this: a driver's address query answers with one granule's range only.
    #[must_use]
    pub fn ranges(&self) -> Vec<Extent> {
        let line = self.shared().line.lock();
        let len = self.shared().meta.lock().len;
        line.extents(len)
    }

    /// Sets where the arena records what is mapped and unmapped from now on, instead of where it did
    /// before; `None` ends recording. What is mapped is recorded as if it came at once. Waits for a
    /// driver call in progress. Costs nothing where no driver call is made.
    pub fn set_history(&self, history: Option<&History>) {
        self.shared().line.lock().set_history(history);
        self.shared().say();
    }

    /// Keeps `len` bytes from `offset` on from being given back while the [`Pin`] lives.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`] if they are not in use.
    pub fn pin(&self, offset: u64, len: u64) -> Result<Pin> {
        let shared = self.shared();
        let mut meta = shared.meta.lock();
        let out_of_bounds = Error::OutOfBounds {
            offset,
            len,
            end: meta.len,
        };
        let end = offset.checked_add(len).filter(|end| *end <= meta.len);
        let end = end.ok_or(out_of_bounds)?;
        meta.pins.add(end);
        drop(meta);
        Ok(Pin::new(self.owner.clone(), shared.sub(offset, len), end))
    }

    /// Gives everything back and reports what went wrong. Dropping does the same silently; what the
    /// driver refuses then is quarantined in the [`Device`]. Blocks as [`shrink`](Self::shrink).
    ///
    /// # Errors
    ///
    /// The arena, as far as it still exists, with [`Error::Pinned`] or the first driver error.
    pub fn close(self) -> Result<(), (Self, Error)> {
        let shared = self.shared();
        let pinned = shared.meta.lock().check_pins(0);
        let closed = pinned
            .and_then(|()| shared.fences())
            .and_then(|fences| shared.tear_down(&fences));
        closed.map_err(|error| (self, error))
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let meta = self.shared().meta.lock();
        f.debug_struct("Arena")
            .field("base", &self.base())
            .field("len", &meta.len)
            .field("open", &meta.open)
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}
