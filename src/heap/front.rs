//! A lane as threads meet it: what allocates from it keeps this.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use super::block::{Block, Parts};
use super::core::{Block as Found, UNIT};
use super::lane::Lane;
use super::magazine::class_of;
use super::request::Request;
use super::seat::seat;
use crate::Result;
use crate::units::Va;

/// A lane in use. When nobody allocates from it any more it closes, and goes with its last block.
pub(super) struct Front {
    lane: Arc<Lane>,
}

impl Front {
    pub(super) fn new(lane: Arc<Lane>) -> Self {
        lane.hub().open(&lane);
        Self { lane }
    }

    /// Whether nobody else has this front.
    pub(super) fn is_last(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) == 1
    }

    /// A block of no bytes.
    pub(super) fn nothing(&self) -> Parts {
        self.lane.hub().port(seat()).nothing()
    }

    /// A block of `len` bytes, which are rounded to `size`.
    #[inline]
    pub(super) fn alloc(&self, len: u64, size: u64, align: u64) -> Result<Parts> {
        match self.take(size, align) {
            Some(parts) => Ok(parts),
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
            None => Ok(Block::new(self.alloc(len, size, align)?, len).into_raw()),
        }
    }

    /// A block with a name.
    pub(super) fn alloc_named(&self, request: &Request<'_>) -> Result<Block> {
        let parts = match self.take(request.size, request.align) {
            Some(parts) => parts,
            None => self.alloc_in_books(request)?,
        };
        let block = Block::new(parts, request.len);
        if let Some(name) = request.name {
            block.set_name(name.clone())?;
        }
        Ok(block)
    }

    /// As [`alloc`](Self::alloc), if a block is kept that fits; takes no lock.
    #[inline]
    pub(super) fn take(&self, size: u64, align: u64) -> Option<Parts> {
        let hub = self.lane.hub();
        match class_of(size) {
            0 => {
                let seat = seat();
                let port = hub.port(seat);
                let kept = hub.pair.take(seat, size, align)?;
                Some(Parts::new(port, kept.addr, kept.hint, 0))
            }
            _ if align > UNIT => None,
            _ => hub.take(size),
        }
    }

    fn alloc_in_books(&self, request: &Request<'_>) -> Result<Parts> {
        let seat = seat();
        let port = self.lane.hub().port(seat);
        let (size, align) = (request.size, request.align);
        let hit = self.lane.hit(size, align, seat, port.magazine());
        let found = match hit {
            Some(found) => found,
            None => self.lane.miss(request)?,
        };
        if self.lane.is_watched() {
            self.tell_allocated(&found, request);
        }
        let class = class_of(found.len);
        Ok(Parts::new(port, found.addr, found.hint, class))
    }

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

impl Drop for Front {
    fn drop(&mut self) {
        self.lane.hub().close();
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
