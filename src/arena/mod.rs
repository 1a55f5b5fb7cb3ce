//! Growable contiguous memory with a fixed base address.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crate::driver::DriverError;
use crate::pool::{Effort, Held, Holder, Pool};
use crate::space::Reservation;
use crate::stream::{Fence, Stream};
use crate::sync::{Mutex, MutexGuard};
use crate::units::{Va, VaRange};
use crate::{Device, Error, Result};

mod config;
mod ladder;
mod line;
mod pin;
mod txn;

pub use config::ArenaConfig;
use ladder::Ladder;
pub use line::Extent;
use line::{Line, Waiter};
pub use pin::Pin;
use pin::Pins;
use txn::{Needs, Wish};

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

/// Whoever keeps the memory alive; the last one gives it back.
struct Owner {
    shared: Arc<Shared>,
}

struct Shared {
    pool: Pool,
    base: Va,
    capacity: u64,
    ladder: Ladder,
    look_ahead: u64,
    /// Only ever held for a moment.
    meta: Mutex<Meta>,
    /// Held across driver calls; taken before `meta`.
    line: Mutex<Line>,
    uses: Mutex<Vec<Stream>>,
    ahead_asked: AtomicBool,
    this: Weak<Self>,
}

#[derive(Default)]
struct Meta {
    len: u64,
    /// Bytes that can be used without a driver call.
    open: u64,
    /// Bytes that were in use at some time since they were mapped, so that work may be queued.
    touched: u64,
    pins: Pins,
    /// Nobody is left who could use it.
    retired: bool,
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
        let capacity = config.capacity.max(1);
        let at_least = config.min_capacity.unwrap_or(capacity).max(1);
        let reservation = Reservation::new(device, capacity, at_least, smallest)?;
        let ladder = Ladder {
            smallest,
            largest: shared.largest_granule(),
        };
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

impl Meta {
    fn set_len(&mut self, len: u64) {
        self.len = len;
        self.touched = self.touched.max(len);
    }

    fn check_pins(&self, to: u64) -> Result<()> {
        match self.pins.past(to) {
            Some((pinned_end, pins)) => Err(Error::Pinned {
                asked: to,
                pinned_end,
                pins,
            }),
            None => Ok(()),
        }
    }
}

impl Shared {
    /// Addresses inside the reservation; empty at the base if they would not be.
    fn sub(&self, offset: u64, len: u64) -> VaRange {
        let start = self.base.checked_add(offset).unwrap_or(self.base);
        VaRange::new(start, len).unwrap_or(VaRange::EMPTY)
    }

    fn check_fits(&self, to: u64) -> Result<()> {
        if to > self.capacity {
            return Err(Error::ReservationExhausted {
                asked: to,
                reserved: self.capacity,
            });
        }
        Ok(())
    }

    fn grow(&self, to: u64, waiter: Waiter<'_>) -> Result<()> {
        {
            let mut meta = self.meta.lock();
            if to <= meta.open {
                let len = meta.len.max(to);
                meta.set_len(len);
                let (len, open) = (meta.len, meta.open);
                drop(meta);
                self.look_ahead_if_due(len, open);
                return Ok(());
            }
        }
        txn::grow(&[Wish { arena: self, to }], waiter)?;
        self.look_ahead_now();
        Ok(())
    }

    fn extend(&self, bytes: u64) -> Result<VaRange> {
        loop {
            let to = {
                let mut meta = self.meta.lock();
                let offset = meta.len;
                let to = offset.saturating_add(bytes);
                if to <= meta.open {
                    meta.set_len(to);
                    let open = meta.open;
                    drop(meta);
                    self.look_ahead_if_due(to, open);
                    return Ok(self.sub(offset, bytes));
                }
                to
            };
            self.check_fits(to)?;
            self.open_to(to)?;
        }
    }

    /// Maps up to `to` without changing the length.
    fn open_to(&self, to: u64) -> Result<()> {
        let mut line = self.line.lock();
        let done = self.map_to(&mut line, to, Effort::Full);
        self.publish(&line);
        done
    }

    fn map_to(&self, line: &mut Line, to: u64, effort: Effort) -> Result<()> {
        let needs = Needs::of(&[(self, &*line, to)]);
        let mut granules = needs.take(&self.pool, effort, &mut |_| 0)?;
        let before = line.slots();
        let list = granules.pop().unwrap_or_default();
        let done = line
            .reopen(to, Waiter::Host)
            .and_then(|()| line.append(list, Waiter::Host));
        match done {
            Ok(()) => line.settle(to),
            Err(_) => line.undo_to(before),
        }
        done
    }

    /// Tells the fast path what the line is like.
    fn publish(&self, line: &Line) {
        let mut meta = self.meta.lock();
        meta.open = line.open();
        meta.touched = meta.touched.min(line.end());
    }

    /// A fence behind the work of each recorded stream.
    fn fences(&self) -> Result<Vec<Fence>> {
        let uses = self.uses.lock().clone();
        uses.iter().map(Stream::fence).collect()
    }

    fn shrink_after(&self, to: u64, fences: &[Fence]) -> Result<()> {
        let mut line = self.line_after(fences)?;
        let first = {
            let mut meta = self.meta.lock();
            meta.check_pins(to)?;
            meta.len = meta.len.min(to);
            // From here on nobody grows into the tail without taking the line.
            meta.open = meta.open.min(meta.len);
            line.slots_below(meta.len)
        };
        let cut = line.cut_to(first);
        self.publish(&line);
        Ok(cut?)
    }

    fn tear_down(&self, fences: &[Fence]) -> Result<()> {
        let mut line = self.line_after(fences)?;
        self.tear_down_line(&mut line)?;
        Ok(())
    }

    /// The line, once these fences and those of its tail have passed. It is not held meanwhile: what
    /// is waited for may need others to grow.
    fn line_after(&self, fences: &[Fence]) -> Result<MutexGuard<'_, Line>> {
        let mut passed: Vec<Fence> = Vec::new();
        let mut next = fences.to_vec();
        loop {
            next.iter().try_for_each(Fence::wait)?;
            passed.append(&mut next);
            let line = self.line.lock();
            next = line.fences_besides(&passed);
            if next.is_empty() {
                return Ok(line);
            }
        }
    }

    /// Waits until nothing uses the memory any more.
    fn quiesce(&self) -> Result<(), DriverError> {
        let uses = self.uses.lock().clone();
        uses.iter().try_for_each(Stream::quiesce)?;
        let fences = self.line.lock().fences_besides(&[]);
        fences.iter().try_for_each(Fence::quiesce)
    }

    fn tear_down_line(&self, line: &mut Line) -> Result<(), DriverError> {
        {
            let mut meta = self.meta.lock();
            meta.len = 0;
            meta.open = 0;
        }
        line.tear_down()
    }

    /// Gives back what lies past the length and past `keep`, as far as nobody uses it, up to about
    /// `want` bytes; the bytes.
    fn reclaim_from(&self, line: &mut Line, keep: u64, want: u64) -> u64 {
        let (first, touched) = {
            let mut meta = self.meta.lock();
            let keep = keep.max(meta.len);
            meta.open = meta.open.min(keep);
            let touched = meta.touched.max(keep);
            (line.slots_below(keep), line.slots_below(touched))
        };
        let mut got = line.cut_idle(touched, want);
        // Memory that was truncated away may still have work queued on it.
        let short = got < want && touched > first && line.slots() <= touched;
        if let Some(Ok(fences)) = short.then(|| self.fences()) {
            line.defer(first, touched, &fences);
            let mut meta = self.meta.lock();
            meta.touched = meta.touched.min(keep.max(meta.len));
            drop(meta);
            got += line.cut_idle(first, want - got);
        }
        self.publish(line);
        got
    }

    fn look_ahead_now(&self) {
        if self.look_ahead > 0 {
            let (len, open) = {
                let meta = self.meta.lock();
                (meta.len, meta.open)
            };
            self.look_ahead_if_due(len, open);
        }
    }

    /// Asks the worker to map when less than half of the look-ahead is left.
    fn look_ahead_if_due(&self, len: u64, open: u64) {
        let due = self.look_ahead > 0
            && open.saturating_sub(len) < self.look_ahead.div_ceil(2)
            && open < self.capacity
            && !self.ahead_asked.swap(true, Ordering::AcqRel);
        if due {
            let this: Weak<dyn Holder> = self.this.clone();
            self.pool.shared().map_ahead_later(this);
        }
    }
}

impl Holder for Shared {
    fn held(&self) -> Held {
        let line = self.line.lock();
        Held {
            mapped: line.end(),
            pending: line.pending(),
        }
    }

    fn reclaim(&self, want: u64) -> Option<u64> {
        // Whoever holds the line is growing or shrinking, perhaps the very thread that asks.
        let mut line = self.line.try_lock()?;
        Some(self.reclaim_from(&mut line, 0, want))
    }

    fn map_ahead(&self) {
        self.ahead_asked.store(false, Ordering::Release);
        loop {
            // One granule at a time, so that a caller who needs the line waits for one at most.
            let mut line = self.line.lock();
            let (len, retired) = {
                let meta = self.meta.lock();
                (meta.len, meta.retired)
            };
            if retired || line.is_torn_down() {
                return;
            }
            let target = len.saturating_add(self.look_ahead).min(self.capacity);
            let open = line.open();
            if open >= target {
                return;
            }
            let step = target.min(open.max(line.end()).saturating_add(self.ladder.largest));
            // A caller who needs the line must not wait for fences that it would not wait for.
            if !line.opens_at_once(step) {
                return;
            }
            let mapped = self.map_to(&mut line, step, Effort::Spare);
            self.publish(&line);
            if let Err(error) = mapped {
                tracing::debug!(%error, "nothing mapped ahead");
                return;
            }
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let shared = self.shared.clone();
        // Nothing is mapped ahead from here on, however long the rest takes.
        shared.meta.lock().retired = true;
        let device = shared.pool.device().clone();
        let mut quiet = shared.line.lock().is_torn_down();
        let retry = move |_: &dyn crate::driver::Driver| {
            if !quiet {
                shared.quiesce()?;
                quiet = true;
            }
            let mut line = shared.line.lock();
            shared.tear_down_line(&mut line)
        };
        device.give_back("arena", Box::new(retry));
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
