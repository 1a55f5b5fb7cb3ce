//! A heap as one stream sees it, and its hot path.

use std::fmt;
use std::sync::Arc;

use super::block::{Block, Parts};
use super::front::Front;
use super::hub::Hub;
use super::name::BlockName;
use super::{DEFAULT_ALIGN, Shared};
use crate::Result;
use crate::stream::Stream;
use crate::units::Va;

/// A [`Heap`](super::Heap) as one stream sees it. Cheap to clone.
#[derive(Clone)]
pub struct StreamHeap {
    hub: &'static Hub,
    stream: Stream,
    lane: Arc<Front>,
    shared: Arc<Shared>,
}

impl StreamHeap {
    pub(super) fn new(shared: &Arc<Shared>, lane: Arc<Front>) -> Self {
        Self {
            hub: lane.hub(),
            stream: lane.stream().clone(),
            lane,
            shared: shared.clone(),
        }
    }

    /// As [`Heap::alloc`](super::Heap::alloc).
    ///
    /// # Errors
    ///
    /// As [`Heap::alloc`](super::Heap::alloc).
    #[inline(always)]
    pub fn alloc(&self, size: u64) -> Result<Block> {
        let parts = match self.take(size) {
            Some(parts) => parts,
            None => self.seek(size)?,
        };
        Ok(Block::new(parts, size))
    }

    /// What most allocations are, in few enough instructions to be a part of the caller.
    #[inline]
    fn take(&self, size: u64) -> Option<Parts> {
        match self.stream.is_retired() {
            true => None,
            false => self.hub.take(size),
        }
    }

    #[inline(never)]
    fn seek(&self, size: u64) -> Result<Parts> {
        self.shared.alloc(&self.lane, size, DEFAULT_ALIGN)
    }

    /// As [`Heap::alloc_aligned`](super::Heap::alloc_aligned).
    ///
    /// # Errors
    ///
    /// As [`Heap::alloc_aligned`](super::Heap::alloc_aligned).
    pub fn alloc_aligned(&self, size: u64, align: u64) -> Result<Block> {
        let parts = self.shared.alloc(&self.lane, size, align)?;
        Ok(Block::new(parts, size))
    }

    /// As [`alloc_raw`](Self::alloc_raw) if that takes no driver call and no lock but this stream's.
    #[cfg(feature = "capi")]
    #[inline]
    pub(crate) fn kept_raw(&self, size: u64) -> Result<Option<Va>> {
        match self.shared.rounded(&self.lane, size, DEFAULT_ALIGN)? {
            0 => Ok(None),
            rounded => Ok(self.lane.hit_raw(rounded, DEFAULT_ALIGN)),
        }
    }

    /// As [`Heap::alloc_raw`](super::Heap::alloc_raw).
    ///
    /// # Errors
    ///
    /// As [`Heap::alloc_raw`](super::Heap::alloc_raw).
    #[inline]
    pub fn alloc_raw(&self, size: u64, align: u64) -> Result<Va> {
        self.shared.alloc_raw(&self.lane, size, align)
    }

    /// As [`Heap::alloc_named`](super::Heap::alloc_named).
    ///
    /// # Errors
    ///
    /// As [`Heap::alloc`](super::Heap::alloc).
    pub fn alloc_named(&self, size: u64, name: impl Into<BlockName>) -> Result<Block> {
        self.shared.alloc_named(&self.lane, size, &name.into())
    }

    /// The stream.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }
}

impl fmt::Debug for StreamHeap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StreamHeap").field(&self.lane).finish()
    }
}
