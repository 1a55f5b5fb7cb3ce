//! Memory of CUDA graphs: what a graph uses stays where it is for as long as the graph may run.

use std::fmt;
use std::sync::Arc;

use super::block::Block;
use super::front::Front;
use super::name::BlockName;
use super::retire::GRACE;
use super::{DEFAULT_ALIGN, Heap, HeapStats, Shared, check_size};
use crate::Result;
use crate::stream::Stream;

/// A private part of a [`Heap`] for work that is captured into graphs on one stream, made by
/// [`Heap::capture_scope`].
///
/// # What stays
///
/// The scope's blocks come from addresses and granules of its own. Freed blocks are reused by later
/// allocations of the scope, in stream order, which a capture keeps. Until the scope is dropped no
/// granule of it moves or leaves, whether blocks live in it or not: a graph may be replayed although
/// the blocks that it was captured with are freed, as PyTorch's private pools allow. Graphs that share a
/// scope share its memory, so that what one leaves in freed blocks the next one overwrites.
///
/// # While capturing
///
/// Allocating and freeing queue nothing on the stream, record no event on it and do not wait for it,
/// so that a capture stays whole. New memory that must be zeroed
/// ([`PoolConfig::zero_on_handover`](crate::PoolConfig::zero_on_handover)) is zeroed on another stream, and
/// waited for. An allocation that finds no memory waits for work of other streams, up to
/// [`HeapConfig::wait`](super::HeapConfig::wait), as any other.
///
/// # End
///
/// Dropping it lets its memory go once the stream's work is done, and that of every stream announced by
/// [`record_replay`](Self::record_replay); what still runs then goes back at a later
/// [`Heap::trim`] or shortage. Blocks that outlive it stay where they are until they are dropped.
///
/// All methods may be called from any thread. A scope keeps its heap alive.
///
/// # Example
///
/// ```
/// use granule::driver::Driver;
/// use granule::{Device, Heap, HeapConfig, Pool, PoolConfig, driver::sim::SimConfig, units::MIB};
///
/// let device = Device::sim(SimConfig::default())?;
/// let pool = Pool::new(&device, PoolConfig::default())?;
/// let heap = Heap::new(&pool, HeapConfig::default())?;
/// let stream = device.create_stream()?;
/// let scope = heap.capture_scope(&stream)?;
///
/// device.driver().begin_capture(stream.id())?;
/// let block = scope.alloc(8 * MIB)?;
/// device.driver().fill(block.range(), 1, stream.id())?;
/// drop(block);
/// let graph = device.driver().end_capture(stream.id())?;
///
/// heap.trim();
/// assert_eq!(scope.stats().held, 8 * MIB);
/// graph.launch(stream.id())?;
/// # Ok::<(), granule::Error>(())
/// ```
pub struct CaptureScope {
    lane: Arc<Front>,
    shared: Arc<Shared>,
}

impl Heap {
    /// A scope for captures of a stream. It may be made before or during a capture, several captures may
    /// use it, and a stream may have several.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`](crate::Error::Foreign) for a stream of another device,
    /// [`Error::AddressSpaceExhausted`](crate::Error::AddressSpaceExhausted), or a driver error.
    pub fn capture_scope(&self, stream: &Stream) -> Result<CaptureScope> {
        let lane = self.shared.new_lane(stream, true)?;
        self.shared.lanes.write().push(lane.clone());
        Ok(CaptureScope {
            lane,
            shared: self.shared.clone(),
        })
    }
}

impl CaptureScope {
    /// As [`Heap::alloc`], of this scope's own memory.
    ///
    /// # Errors
    ///
    /// As [`Heap::alloc`].
    pub fn alloc(&self, size: u64) -> Result<Block> {
        self.alloc_aligned(size, DEFAULT_ALIGN)
    }

    /// As [`Heap::alloc_aligned`], of this scope's own memory.
    ///
    /// # Errors
    ///
    /// As [`Heap::alloc_aligned`].
    pub fn alloc_aligned(&self, size: u64, align: u64) -> Result<Block> {
        check_size(size)?;
        let parts = self.shared.alloc(&self.lane, size, align)?;
        Ok(Block::new(parts, size))
    }

    /// As [`Heap::alloc_named`], of this scope's own memory.
    ///
    /// # Errors
    ///
    /// As [`Heap::alloc_named`].
    pub fn alloc_named(&self, size: u64, name: impl Into<BlockName>) -> Result<Block> {
        check_size(size)?;
        self.shared.alloc_named(&self.lane, size, &name.into())
    }

    /// Says that graphs over this memory are replayed on `stream`, too: its work queued until the scope is
    /// dropped is waited for before the memory goes to others.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`](crate::Error::Foreign) for a stream of another device.
    pub fn record_replay(&self, stream: &Stream) -> Result<()> {
        self.lane.record_replay(stream)
    }

    /// The stream.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        self.lane.stream()
    }

    /// Figures of this scope alone; those of the heap contain them.
    #[must_use]
    pub fn stats(&self) -> HeapStats {
        let mut stats = HeapStats::default();
        self.lane.add_to(&mut stats);
        stats
    }
}

impl Drop for CaptureScope {
    fn drop(&mut self) {
        self.lane.unpin();
        self.lane.give_back_idle(u64::MAX, GRACE);
    }
}

impl fmt::Debug for CaptureScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CaptureScope").field(&self.lane).finish()
    }
}
