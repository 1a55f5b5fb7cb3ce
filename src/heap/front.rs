//! A lane as threads meet it: through ports, so that threads on one stream share no cache line.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use super::block::Block;
use super::core::{Block as Found, UNIT};
use super::lane::{Lane, SEATS};
use super::magazine::{Magazine, Slot, class_of};
use super::request::Request;
use super::seat::{NO_SEAT, seat};
use crate::Result;
use crate::units::Va;

/// A thread's way to a lane. Blocks hold the port that they came through, so that no reference count moves
/// between the cores of unrelated threads.
#[repr(align(128))]
pub(super) struct Port {
    lane: Arc<Lane>,
    magazine: Arc<Magazine>,
}

impl Port {
    #[inline]
    pub(super) fn lane(&self) -> &Lane {
        &self.lane
    }

    /// Frees a block of this port; `is_used` says that its owner recorded a use of it, `is_named` that it
    /// has a name.
    #[inline]
    pub(super) fn free(
        &self,
        addr: u64,
        hint: u32,
        class: u16,
        is_used: bool,
        is_named: bool,
    ) -> Result<()> {
        if !is_used && !is_named {
            let seat = seat();
            let may = || !self.lane.is_watched();
            if class != 0 {
                let unit = ((addr - self.lane.base()) / UNIT) as u32;
                let slot = Slot { unit, hint };
                return match self.magazine.put(seat, class, slot, may) {
                    true => Ok(()),
                    false => self.free_aside(seat, class, slot),
                };
            }
            if self.lane.pair.put(seat, addr, may) {
                return Ok(());
            }
        }
        self.lane.free_owned(Va::new(addr), hint, is_named)
    }

    /// Frees a block for which this port's magazine is full, or another thread's.
    #[cold]
    fn free_aside(&self, seat: u32, class: u16, slot: Slot) -> Result<()> {
        if self.lane.is_watched() {
            let addr = Va::new(slot.addr(self.lane.base()));
            return self.lane.free_owned(addr, slot.hint, false);
        }
        let Some(magazine) = self.lane.magazine(seat) else {
            return self.lane.put(class, slot, seat, &self.magazine);
        };
        let is_other = !Arc::ptr_eq(magazine, &self.magazine);
        let may = || !self.lane.is_watched();
        if is_other && magazine.put(seat, class, slot, may) {
            return Ok(());
        }
        self.lane.put(class, slot, seat, magazine)
    }
}

/// A lane and its ports by seat, which are opened as threads come. Threads beyond share the last one.
pub(super) struct Front {
    lane: Arc<Lane>,
    ports: [OnceLock<Arc<Port>>; SEATS + 1],
}

impl Front {
    pub(super) fn new(lane: Arc<Lane>) -> Self {
        Self {
            lane,
            ports: [const { OnceLock::new() }; SEATS + 1],
        }
    }

    /// Whether there are no blocks, and nobody else has this front.
    pub(super) fn is_last(self: &Arc<Self>) -> bool {
        let mut ports = self.ports.iter().filter_map(OnceLock::get);
        Arc::strong_count(self) == 1 && ports.all(|port| Arc::strong_count(port) == 1)
    }

    #[inline]
    fn port(&self, seat: u32) -> &Arc<Port> {
        let place = &self.ports[(seat as usize).min(SEATS)];
        match place.get() {
            Some(port) => port,
            None => self.open(seat, place),
        }
    }

    #[cold]
    fn open<'a>(&self, seat: u32, place: &'a OnceLock<Arc<Port>>) -> &'a Arc<Port> {
        // Nobody waits in the place for the lane's lock.
        let magazine = match self.lane.magazine(seat) {
            Some(magazine) => magazine.clone(),
            None => Arc::new(Magazine::new(NO_SEAT)),
        };
        let lane = self.lane.clone();
        place.get_or_init(|| Arc::new(Port { lane, magazine }))
    }

    /// A block of no bytes.
    pub(super) fn nothing(&self) -> Block {
        Block::new(self.port(seat()).clone(), Va::new(0), 0, 0, 0)
    }

    /// A block of `len` bytes, which are rounded to `size`.
    #[inline]
    pub(super) fn alloc(&self, len: u64, size: u64, align: u64) -> Result<Block> {
        match self.take(len, size, align) {
            Some(block) => Ok(block),
            None => self.alloc_in_books(&Request {
                len,
                size,
                align,
                name: None,
            }),
        }
    }

    /// As [`alloc`](Self::alloc), without an owner.
    #[inline]
    pub(super) fn alloc_raw(&self, len: u64, size: u64, align: u64) -> Result<Va> {
        match self.lane.hit_raw(size, align) {
            Some(addr) => Ok(addr),
            None => self.alloc(len, size, align).map(Block::into_raw),
        }
    }

    /// A block with a name.
    pub(super) fn alloc_named(&self, request: &Request<'_>) -> Result<Block> {
        let block = match self.take(request.len, request.size, request.align) {
            Some(block) => block,
            None => self.alloc_in_books(request)?,
        };
        if let Some(name) = request.name {
            block.set_name(name.clone())?;
        }
        Ok(block)
    }

    /// As [`alloc`](Self::alloc), if a block is kept that fits; takes no lock.
    #[inline]
    pub(super) fn take(&self, len: u64, size: u64, align: u64) -> Option<Block> {
        let seat = seat();
        let port = self.port(seat);
        let class = class_of(size);
        if class == 0 {
            let kept = self.lane.pair.take(seat, size, align)?;
            let addr = Va::new(kept.addr);
            return Some(Block::new(port.clone(), addr, len, kept.hint, 0));
        }
        if align > UNIT {
            return None;
        }
        let slot = port.magazine.take(seat, class)?;
        let addr = Va::new(slot.addr(self.lane.base()));
        Some(Block::new(port.clone(), addr, len, slot.hint, class))
    }

    fn alloc_in_books(&self, request: &Request<'_>) -> Result<Block> {
        let seat = seat();
        let port = self.port(seat);
        let (size, align) = (request.size, request.align);
        let hit = self.lane.hit(size, align, seat, &port.magazine);
        let found = match hit {
            Some(found) => found,
            None => self.lane.miss(request)?,
        };
        if self.lane.is_watched() {
            self.tell_allocated(&found, request);
        }
        let addr = Va::new(found.addr);
        Ok(Block::new(
            port.clone(),
            addr,
            request.len,
            found.hint,
            class_of(found.len),
        ))
    }
}

impl Front {
    /// Tells the history of a block that nobody else knows yet.
    #[cold]
    fn tell_allocated(&self, found: &Found, request: &Request<'_>) {
        if let Some(history) = self.lane.history() {
            let key = self.lane.stream().key();
            history.alloc(key, found.addr, found.len, request.len, request.name);
            history.say();
        }
    }
}

impl Deref for Front {
    type Target = Arc<Lane>;

    #[inline]
    fn deref(&self) -> &Arc<Lane> {
        &self.lane
    }
}

impl fmt::Debug for Front {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lane.fmt(f)
    }
}
