//! What blocks refer to, without counting references.
//!
//! A hub stays where it is for as long as the process runs. It is lent to a lane, and when nobody allocates
//! there any more and the last block is freed, to the next one. So a block holds a plain reference: to count
//! one up and down takes as long as all else that an allocation and a free do.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::*};
use std::sync::{Arc, OnceLock};

use super::block::Parts;
use super::core::UNIT;
use super::hint::LaneKey;
use super::lane::Lane;
use super::magazine::{LONGEST_KEPT, Magazine, Slot};
use super::quick::Pair;
use super::seat::{seat, seat_now};
use super::state::{RAW, State};
use crate::Result;
use crate::sync::{Mutex, MutexGuard};
use crate::units::Va;

/// Threads with a magazine of their own: those on the first seats. More take the lane's lock each time.
pub(super) const SEATS: usize = 64;

/// Times that the hot path looks at the lock before it sleeps: a lock that hands over between sleepers
/// takes a hundred times as long.
const LOOKS: u32 = 40;

/// Times that the magazines of a lane that closes are emptied before it stays as it is.
const TRIES: u32 = 100;

/// Some owned block has a use that was recorded by address, which its owner does not know of.
pub(super) const USED_BY_ADDRESS: u8 = 1;
/// Every block goes to the history.
pub(super) const RECORDED: u8 = 2;
/// Nobody allocates here any more: the last free lets go of the lane.
pub(super) const CLOSING: u8 = 4;

/// A part of a hub that shares no cache line with others.
#[derive(Default)]
#[repr(align(128))]
struct Apart<T>(T);

/// What threads and blocks of a lane meet.
pub(super) struct Hub {
    /// Why no block may be freed without the lock; 0 if any may. All threads read it and hardly anybody writes.
    watched: Apart<AtomicU8>,
    state: Apart<Mutex<State>>,
    pub(super) pair: &'static Pair,
    /// By seat, as threads come. Threads beyond share the last one.
    ports: [OnceLock<Box<Port>>; SEATS + 1],
    /// From when threads first allocate until the last block is freed.
    lane: Mutex<Option<Arc<Lane>>>,
}

/// A thread's way to a lane, so that threads on one stream share no cache line.
pub(super) struct Port {
    hub: &'static Hub,
    /// Opened since the hub was lent, by a thread on its seat.
    is_open: AtomicBool,
    magazine: Magazine,
}

/// Hubs that no lane has.
#[cfg(not(shuttle))]
static IDLE: Mutex<Vec<&'static Hub>> = Mutex::new(Vec::new());

impl Hub {
    /// A hub for a lane, with a state that `make` makes.
    pub(super) fn lend(make: impl FnOnce(&'static Pair) -> State) -> &'static Self {
        match Self::idle() {
            Some(hub) => {
                let state = make(hub.pair);
                *hub.state.0.lock() = state;
                hub
            }
            None => {
                let pair: &Pair = Box::leak(Box::default());
                Box::leak(Box::new(Self {
                    watched: Apart::default(),
                    state: Apart(Mutex::new(make(pair))),
                    pair,
                    ports: [const { OnceLock::new() }; SEATS + 1],
                    lane: Mutex::new(None),
                }))
            }
        }
    }

    #[cfg(not(shuttle))]
    fn idle() -> Option<&'static Self> {
        IDLE.lock().pop()
    }

    /// A model's locks do not outlive its run.
    #[cfg(shuttle)]
    fn idle() -> Option<&'static Self> {
        None
    }

    /// Takes the hub back from a lane that goes, of which no block is left.
    pub(super) fn take_back(&'static self) {
        for port in self.ports.iter().filter_map(OnceLock::get) {
            port.is_open.store(false, Relaxed);
            port.magazine.reset();
        }
        self.pair.reset();
        self.watched.0.store(0, Relaxed);
        #[cfg(not(shuttle))]
        IDLE.lock().push(self);
    }

    /// Threads allocate here from now on.
    pub(super) fn open(&self, lane: &Arc<Lane>) {
        *self.lane.lock() = Some(lane.clone());
    }

    /// Nobody allocates here any more. The lane goes, now or when its last block is freed.
    pub(super) fn close(&self) {
        // Before the magazines are emptied: nobody fills them from here on.
        self.watch(CLOSING);
        {
            let mut state = self.state().lock();
            // Once is enough, unless the system refuses a barrier.
            let is_settled = (0..TRIES).any(|_| {
                state.flush_and_settle();
                state.magazines.iter().all(|magazine| magazine.is_empty())
            });
            match is_settled {
                true => state.left = Some(state.owned()),
                // Who owns what is not known: rather nothing goes than what somebody uses.
                false => tracing::error!("no barrier: what a stream of a heap holds stays"),
            }
        }
        self.let_go();
    }

    /// Lets the lane go if nobody allocates there and no block is left.
    #[cold]
    fn let_go(&self) {
        let lane = {
            let mut state = self.state().lock();
            if state.left != Some(0) || state.empties > 0 {
                return;
            }
            // Whoever comes second finds nothing to let go, or another lane's state.
            state.left = None;
            self.lane.lock().take()
        };
        drop(lane);
    }

    /// The lane. Its blocks keep it here.
    pub(super) fn lane(&self) -> Option<Arc<Lane>> {
        self.lane.lock().clone()
    }

    #[inline]
    pub(super) fn state(&self) -> &Mutex<State> {
        &self.state.0
    }

    /// Why no block may be freed without the lock; 0 if any may.
    #[inline]
    pub(super) fn watched(&self) -> u8 {
        self.watched.0.load(Relaxed)
    }

    /// From now on no block is freed without the lock.
    pub(super) fn watch(&self, why: u8) {
        self.watched.0.fetch_or(why, Relaxed);
    }

    pub(super) fn watch_no_more(&self, why: u8) {
        self.watched.0.fetch_and(!why, Relaxed);
    }

    /// The state, for the hot path.
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        match self.state().try_lock() {
            Some(state) => state,
            None => self.lock_contended(),
        }
    }

    #[cold]
    fn lock_contended(&self) -> MutexGuard<'_, State> {
        for look in 0..LOOKS {
            (0..1 << look.min(6)).for_each(|_| std::hint::spin_loop());
            if let Some(state) = self.state().try_lock() {
                return state;
            }
        }
        self.state().lock()
    }

    /// A block of `size` bytes that the calling thread has at hand. They need not be rounded: there is a block of so many
    /// units only if that is what some size is rounded to, and then it is what `size` is rounded to.
    #[inline]
    pub(super) fn take(&'static self, size: u64) -> Option<Parts> {
        if size.wrapping_sub(1) >= LONGEST_KEPT {
            return None;
        }
        let (seat, class) = (seat_now(), size.div_ceil(UNIT) as usize);
        // Whose it is the magazine looks.
        let port = self.ports[seat as usize % SEATS].get()?;
        let slot = port.magazine.take(seat, class)?;
        Some(Parts::new(port, slot.addr, slot.hint, class as u16))
    }

    /// The port of the calling thread, which sits on `seat`: a miss and a trim empty its magazine.
    #[inline]
    pub(super) fn port(&'static self, seat: u32) -> &'static Port {
        let place = &self.ports[(seat as usize).min(SEATS)];
        match place.get() {
            Some(port) if port.is_open.load(Relaxed) => port,
            _ => self.open_port(seat, place),
        }
    }

    #[cold]
    fn open_port(&'static self, seat: u32, place: &'static OnceLock<Box<Port>>) -> &'static Port {
        let is_own = (seat as usize) < SEATS;
        // Nobody waits in the place for the lane's lock.
        let port = place.get_or_init(|| {
            Box::new(Port {
                hub: self,
                is_open: AtomicBool::new(false),
                magazine: Magazine::new(),
            })
        });
        let mut state = self.state().lock();
        // Nobody else sits on a seat of its own.
        if !port.is_open.swap(true, Relaxed) && is_own {
            port.magazine.claim(seat);
            state.magazines.push(&port.magazine);
        }
        port
    }

    /// Frees an owned block. `hint` saves a look-up and may be wrong.
    pub(super) fn free_owned(&self, addr: Va, hint: u32, is_named: bool) -> Result<()> {
        let freed = self.lock().free(addr, hint, 0, is_named);
        if self.watched() != 0 {
            self.after_free();
        }
        freed.map(drop)
    }

    /// A block without an owner of mapped memory, if the hub is lent to this lane and the history need not hear of it.
    #[inline]
    pub(super) fn hit_raw(&self, key: LaneKey, size: u64, align: u64) -> Option<Va> {
        let mut state = self.lock();
        match state.key == Some(key) {
            true => state.hit_raw(size, align),
            false => None,
        }
    }

    /// Frees a block without an owner; `None` if the hub is not lent to this lane.
    #[inline]
    pub(super) fn free_raw(&self, key: LaneKey, addr: Va) -> Option<Result<()>> {
        let freed = {
            let mut state = self.lock();
            if state.key != Some(key) {
                return None;
            }
            state.free(addr, u32::MAX, RAW, true)
        };
        if self.watched() != 0 {
            self.after_free();
        }
        Some(freed.map(drop))
    }

    #[cold]
    fn after_free(&self) {
        if let Some(lane) = self.lane() {
            lane.say();
        }
        self.let_go();
    }

    /// Frees an owned block of a class that nobody else used, and half of those in `magazine`, which is full.
    fn put(&self, class: u16, slot: Slot, seat: u32, magazine: &Magazine) -> Result<()> {
        let mut state = self.lock();
        if self.watched() != 0 {
            // Since the block's owner looked.
            drop(state);
            return self.free_owned(Va::new(slot.addr), slot.hint, false);
        }
        state.put(class, slot, seat, magazine);
        Ok(())
    }
}

impl Port {
    #[inline]
    pub(super) fn hub(&self) -> &'static Hub {
        self.hub
    }

    #[inline]
    pub(super) fn magazine(&self) -> &Magazine {
        &self.magazine
    }

    /// Keeps a block of this port that nobody else used and that has no name, if it is of a class and the port is the
    /// calling thread's, which sits on `seat`.
    #[inline]
    pub(super) fn keep(&self, seat: u32, addr: u64, hint: u32, class: u16) -> bool {
        let may = || self.hub.watched() == 0;
        self.magazine.put(seat, class, Slot { addr, hint }, may)
    }

    /// As [`keep`](Self::keep), for the latest larger block.
    pub(super) fn keep_large(&self, seat: u32, addr: u64) -> bool {
        let may = || self.hub.watched() == 0;
        self.hub.pair.put(seat, addr, may)
    }

    /// Frees a block of this port that was not kept. Only with its class, if it is of one, may it be kept elsewhere.
    pub(super) fn free(&self, addr: Va, hint: u32, class: u16, is_named: bool) -> Result<()> {
        let hub = self.hub;
        if class == 0 || hub.watched() != 0 {
            return hub.free_owned(addr, hint, is_named);
        }
        let addr = addr.get();
        let (slot, seat) = (Slot { addr, hint }, seat());
        if seat as usize >= SEATS {
            return hub.put(class, slot, seat, &self.magazine);
        }
        // Another thread's block goes to its own magazine.
        let own = hub.port(seat);
        let is_other = !std::ptr::eq(own, self);
        let may = || hub.watched() == 0;
        if is_other && own.magazine.put(seat, class, slot, may) {
            return Ok(());
        }
        hub.put(class, slot, seat, &own.magazine)
    }

    /// A block of no bytes, which keeps the lane as any other.
    pub(super) fn nothing(&'static self) -> Parts {
        self.hub.state().lock().empties += 1;
        Parts::new(self, 0, 0, 0)
    }

    /// Frees a block of no bytes.
    #[cold]
    pub(super) fn free_nothing(&self) {
        {
            let mut state = self.hub.state().lock();
            state.empties = state.empties.saturating_sub(1);
        }
        self.hub.let_go();
    }

    /// Makes an owned block one that may be freed by its address.
    pub(super) fn expose(&self, addr: Va, hint: u32) -> Result<()> {
        let exposed = self.hub.lock().expose(addr, hint);
        if self.hub.watched() & CLOSING != 0 {
            self.hub.let_go();
        }
        exposed
    }
}
