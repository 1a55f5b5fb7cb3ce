//! Movable blocks, and the guards through which their addresses are read.

use std::fmt;
use std::sync::Arc;

use super::heap::Inner;
use crate::stream::Stream;
use crate::units::VaRange;
use crate::{Error, Result};

/// A block that may be moved while no guard of it lives. Dropping it frees it; its bytes go to others
/// in the order of the streams that used it. Keeps its heap alive.
///
/// # Threads
///
/// May be used and freed from any thread.
pub struct MovableBlock {
    inner: Arc<Inner>,
    /// `None` for a block of no bytes.
    id: Option<u64>,
    len: u64,
}

impl MovableBlock {
    pub(super) fn new(inner: Arc<Inner>, id: Option<u64>, len: u64) -> Self {
        Self { inner, id, len }
    }

    /// Bytes asked for.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reads the address for work on `stream`. The block stays where it is while the guard lives;
    /// work that was queued by then may go on after it, also when the block moves.
    ///
    /// Does not wait for the device; waits on the host only while a pass is queueing the move of this
    /// block. If a pass of another stream copied the block, `stream` waits for that on the device.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for a stream of another device, or a driver error.
    pub fn access(&self, stream: &Stream) -> Result<BlockGuard<'_>> {
        let guard = self.pin()?;
        guard.record_use(stream)?;
        Ok(guard)
    }

    /// Keeps the block where it is, for as long as the guard lives: a barrier to every pass. Say with
    /// [`BlockGuard::record_use`] who uses it.
    ///
    /// # Errors
    ///
    /// [`Error::Stale`] cannot happen while the block lives; kept for the future.
    pub fn pin(&self) -> Result<BlockGuard<'_>> {
        let offset = match self.id {
            Some(id) => self.inner.hold_still(id)?,
            None => 0,
        };
        let range = self.inner.range(offset, self.len);
        match range {
            Some(range) => Ok(BlockGuard { block: self, range }),
            None => {
                if let Some(id) = self.id {
                    self.inner.let_go(id);
                }
                Err(Error::OutOfBounds {
                    offset,
                    len: self.len,
                    end: self.inner.addresses().len(),
                })
            }
        }
    }
}

impl fmt::Debug for MovableBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MovableBlock")
            .field("id", &self.id)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl Drop for MovableBlock {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.inner.free(id);
        }
    }
}

/// Holds a [`MovableBlock`] still.
#[derive(Debug)]
pub struct BlockGuard<'a> {
    block: &'a MovableBlock,
    range: VaRange,
}

impl BlockGuard<'_> {
    /// Where the block is now, as many bytes as were asked for.
    #[must_use]
    pub fn range(&self) -> VaRange {
        self.range
    }

    /// Says that work on `stream` uses the block, and makes it wait for the copy that brought the block
    /// here, if a pass of another stream made one. Call it before the work is queued.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for a stream of another device, or a driver error.
    pub fn record_use(&self, stream: &Stream) -> Result<()> {
        match self.block.id {
            Some(id) => self.block.inner.record_use(id, stream),
            None => Ok(()),
        }
    }
}

impl Drop for BlockGuard<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.block.id {
            self.block.inner.let_go(id);
        }
    }
}
