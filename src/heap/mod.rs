//! General stream-ordered allocation that recycles before it grows and remaps without waiting.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::history::History;
use crate::pool::{Policy, Pool};
use crate::stream::Stream;
use crate::sync::{Mutex, RwLock};
use crate::units::Va;
use crate::{Error, Result};

mod block;
mod callback;
mod config;
mod core;
mod front;
mod gate;
mod hint;
mod hub;
mod lane;
mod lend;
mod magazine;
mod miss;
mod name;
mod on_stream;
mod quick;
mod report;
mod request;
mod retire;
mod room;
mod scope;
mod seat;
mod snapshot;
mod state;
mod stats;

pub use block::Block;
use block::Parts;
use callback::OnOom;
pub use callback::{OomAnswer, OomEvent};
pub use config::{HeapConfig, Rounding};
use front::Front;
use hint::LaneKey;
use lane::Lane;
pub use name::BlockName;
pub use on_stream::StreamHeap;
use request::Request;
pub use scope::CaptureScope;
pub use snapshot::{
    BlockSnapshot, BlockState, GranuleSnapshot, HeapSnapshot, Span, StreamSnapshot,
};
pub use stats::HeapStats;

/// Default alignment of blocks in bytes, and the unit that sizes are rounded up to.
pub const DEFAULT_ALIGN: u64 = core::UNIT;

/// How long a stream may take to say that it has no work when its heap is trimmed.
const TRIM_GRACE: Duration = Duration::from_millis(1);

/// A heap of blocks of any size on one device.
///
/// # Streams
///
/// A block is allocated on a stream and may be used by work queued on it at once. Freed memory is
/// reused by later allocations on the same stream without any wait, since their work is queued
/// behind. Uses by other streams are announced ([`Block::record_use`]); such memory is kept until
/// their work is done, or until the stream has been made to wait for it on the device. Streams are told apart
/// by their keys, which are never used again; the memory of a stream that somebody else is about to destroy
/// is reclaimed after [`Stream::retire`].
///
/// # Cost
///
/// An allocation from mapped memory makes no driver call and takes no event. A miss maps what is
/// missing: granules that lie wholly in free runs are moved there by mapping them a second time,
/// without waiting for their queued work, and their old mapping goes when its fence has passed; only
/// what is still missing is created. Live blocks never move.
///
/// # Graphs
///
/// Memory that a graph uses must stay where it is for as long as the graph may run: a block that is kept as
/// long does, and so does everything of a [`CaptureScope`], freed or not. No call of a heap, on any thread,
/// spoils a capture that is under way.
///
/// # End
///
/// Blocks keep their memory, also when the heap is dropped first. What is dropped last waits for the
/// streams that may still use the memory, then returns it. A block that is never dropped ([`std::mem::forget`])
/// keeps all that its stream has. Some host memory stays for the next heap of the process: for each stream that was in
/// use at a time, 131 KiB for each thread that used it.
///
/// # Threads
///
/// All methods may be called from any thread. Each stream has a lock of its own, held for
/// bookkeeping only, never across a driver call. Most allocations and frees do without, and without
/// any atomic exchange: freed blocks of up to 64 KiB wait for the next
/// of their size in a magazine of the thread and the stream, 4 MiB or 1/128 of what lives at most.
/// 64 threads at a time have magazines, in the order in which they came; more take the lock. A
/// miss and [`trim`](Self::trim) empty the magazines of all threads (on Linux by `membarrier(2)`, some
/// microseconds if other threads keep blocks); in [`HeapStats`] what they hold is free and not idle, as
/// all that is kept for the next of its size. A block with a name takes the lock when it is freed.
///
/// # Example
///
/// ```
/// use granule::{Device, Heap, HeapConfig, Pool, PoolConfig, driver::sim::SimConfig, units::MIB};
///
/// let device = Device::sim(SimConfig::default())?;
/// let pool = Pool::new(&device, PoolConfig::default())?;
/// let heap = Heap::new(&pool, HeapConfig::default())?;
/// let stream = device.create_stream()?;
/// let block = heap.alloc(3 * MIB, &stream)?;
/// let address = block.ptr();
/// drop(block);
/// assert_eq!(heap.alloc(2 * MIB, &stream)?.ptr(), address);
/// # Ok::<(), granule::Error>(())
/// ```
#[derive(Clone)]
pub struct Heap {
    shared: Arc<Shared>,
}

struct Shared {
    /// No other heap's.
    id: u64,
    pool: Pool,
    config: HeapConfig,
    lanes: RwLock<Vec<Arc<Front>>>,
    /// Bytes that the lanes hold or are about to create.
    held: Mutex<u64>,
    /// What lanes did that are gone.
    past: Mutex<HeapStats>,
    on_oom: OnOom,
    /// What new lanes tell of every block. Taken after `lanes`.
    history: Mutex<Option<History>>,
}

impl Heap {
    /// A heap on a pool. Nothing is reserved or created before the first allocation on a stream.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`], also for a pool whose policy is static: a heap needs granules of
    /// many sizes.
    pub fn new(pool: &Pool, config: HeapConfig) -> Result<Self> {
        config.check()?;
        if pool.config().policy == Policy::Static {
            return Err(Error::InvalidConfig {
                what: "policy of a heap's pool",
                value: 0,
                why: "a static pool has granules of one size only",
            });
        }
        if pool.device().info().granularity > core::PAGE_BYTES {
            return Err(Error::InvalidConfig {
                what: "granularity of a heap's device",
                value: pool.device().info().granularity,
                why: "it is above 2 MiB",
            });
        }
        Ok(Self {
            shared: Arc::new(Shared {
                id: hint::next_heap(),
                pool: pool.clone(),
                config,
                lanes: RwLock::new(Vec::new()),
                held: Mutex::new(0),
                past: Mutex::new(HeapStats::default()),
                on_oom: OnOom::default(),
                history: Mutex::new(None),
            }),
        })
    }

    /// The pool.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.shared.pool
    }

    /// A block of at least `size` bytes at a multiple of 256, for use on `stream` at once. No bytes
    /// cost nothing and have address 0. The contents are anything, unless the pool zeroes at
    /// hand-over; then they are anything that was in this heap, or zero.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`], [`Error::TooLarge`] or [`Error::AddressSpaceExhausted`] (no driver
    /// call was made for a size that no device has), [`Error::Foreign`] for a stream of another
    /// device, [`Error::Stale`] for one that is gone, or a driver error. The heap is as before.
    #[inline]
    pub fn alloc(&self, size: u64, stream: &Stream) -> Result<Block> {
        let parts = match self.take(size, stream) {
            Some(parts) => parts,
            None => self.seek(size, DEFAULT_ALIGN, stream)?,
        };
        Ok(Block::new(parts, size))
    }

    /// What most allocations are.
    #[inline]
    fn take(&self, size: u64, stream: &Stream) -> Option<Parts> {
        if stream.is_retired() {
            return None;
        }
        let hint = hint::recall(LaneKey::new(self.shared.id, stream))?;
        hint.hub().take(size)
    }

    #[inline(never)]
    fn seek(&self, size: u64, align: u64, stream: &Stream) -> Result<Parts> {
        check_size(size)?;
        match self.shared.kept(size, align, stream) {
            Some(parts) => Ok(parts),
            None => {
                let lane = self.shared.lane(stream)?;
                self.shared.alloc(&lane, size, align)
            }
        }
    }

    /// As [`alloc`](Self::alloc), at a multiple of `align`, a power of two.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc); [`Error::InvalidConfig`] for another alignment.
    pub fn alloc_aligned(&self, size: u64, align: u64, stream: &Stream) -> Result<Block> {
        let parts = self.seek(size, align, stream)?;
        Ok(Block::new(parts, size))
    }

    /// As [`alloc`](Self::alloc), with a name that snapshots, errors and traces show. Costs a little more
    /// than a block without one, when it is allocated and when it is freed.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc).
    pub fn alloc_named(
        &self,
        size: u64,
        name: impl Into<BlockName>,
        stream: &Stream,
    ) -> Result<Block> {
        check_size(size)?;
        let lane = self.shared.lane(stream)?;
        self.shared.alloc_named(&lane, size, &name.into())
    }

    /// The address of a block without an owner, as [`alloc_aligned`](Self::alloc_aligned) and
    /// [`Block::into_raw`] give it, but quicker: for callers who keep addresses.
    ///
    /// # Errors
    ///
    /// As [`alloc_aligned`](Self::alloc_aligned).
    pub fn alloc_raw(&self, size: u64, align: u64, stream: &Stream) -> Result<Va> {
        check_size(size)?;
        if let Some(addr) = self.shared.kept_raw(size, align, stream) {
            return Ok(addr);
        }
        let lane = self.shared.lane(stream)?;
        self.shared.alloc_raw(&lane, size, align)
    }

    /// The heap's side for one stream: saves the look-up by stream on a hot path.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`], [`Error::AddressSpaceExhausted`] or a driver error.
    pub fn on(&self, stream: &Stream) -> Result<StreamHeap> {
        let lane = self.shared.lane(stream)?;
        Ok(StreamHeap::new(&self.shared, lane))
    }

    /// Frees a block that [`alloc_raw`](Self::alloc_raw) gave or [`Block::into_raw`] gave up, after work of
    /// its own stream; address 0 is accepted and does nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Stale`] if no block is there (any more) or if it has an owner, [`Error::NotAStart`]
    /// for an address inside one. Nothing changed.
    pub fn free_raw(&self, addr: Va) -> Result<()> {
        if addr.get() == 0 {
            return Ok(());
        }
        let hint = hint::recall_at(self.shared.id, addr);
        if let Some(freed) = hint.and_then(|hint| hint.free_raw(addr)) {
            return freed;
        }
        let (freed, watched) = {
            // Counting a reference to the lane would cost more than the free.
            let lanes = self.shared.lanes.read();
            let lane = lanes.iter().find(|lane| lane.contains(addr));
            let lane = lane.ok_or_else(|| stale(addr))?;
            self.shared.remember(lane);
            (lane.free(addr), lane.is_watched().then(|| lane.clone()))
        };
        if let Some(lane) = watched {
            lane.say();
        }
        freed
    }

    /// As [`Block::record_use`], for an address. Prefer that for a block with an owner: once its stream
    /// has such a use by address, frees there take the stream's lock.
    ///
    /// # Errors
    ///
    /// [`Error::Stale`], [`Error::NotAStart`] or [`Error::Foreign`].
    pub fn record_use_raw(&self, addr: Va, stream: &Stream) -> Result<()> {
        self.shared.owner(addr)?.record_use(addr, stream)
    }

    /// Bytes that the block at an address may use.
    ///
    /// # Errors
    ///
    /// [`Error::Stale`] or [`Error::NotAStart`].
    pub fn usable_size(&self, addr: Va) -> Result<u64> {
        self.shared.owner(addr)?.usable(addr)
    }

    /// Gives granules without a live byte back to the pool, as far as their stream's work is done.
    /// Does not wait for work, but gives each stream a millisecond to say that it has none. The bytes
    /// given back. Nothing of a [`CaptureScope`] is.
    pub fn trim(&self) -> u64 {
        let bytes = self.shared.give_back_idle(u64::MAX, TRIM_GRACE);
        self.shared.drop_bare_lanes();
        bytes
    }

    /// Figures of this moment.
    #[must_use]
    pub fn stats(&self) -> HeapStats {
        let lanes = self.shared.lanes.read();
        let mut sum = *self.shared.past.lock();
        lanes.iter().for_each(|lane| lane.add_to(&mut sum));
        sum
    }

    /// Sets where the heap records what it does from now on, instead of where it did before; `None` ends
    /// recording. Blocks and mappings that exist are recorded as if they came at once.
    ///
    /// Operations of other threads that are under way may be missing. See [`History`] for what it costs.
    pub fn set_history(&self, history: Option<&History>) {
        // New lanes wait: each is told once.
        let lanes = self.shared.lanes.write();
        *self.shared.history.lock() = history.cloned();
        for lane in lanes.iter() {
            lane.set_history(history);
        }
        drop(lanes);
        if let Some(history) = history {
            history.say();
        }
    }

    /// Recounts the books and compares. Exact only while no other thread is inside an operation of
    /// this heap.
    ///
    /// # Errors
    ///
    /// [`Error::Inconsistent`].
    pub fn audit(&self) -> Result<HeapStats> {
        let mut held = 0;
        for lane in self.shared.lanes.read().iter() {
            held += lane.audit()?;
        }
        Error::recount("bytes held by a heap", *self.shared.held.lock(), held)?;
        Ok(self.stats())
    }
}

/// No stream's addresses hold this one.
fn stale(addr: Va) -> Error {
    Error::Stale {
        what: "block",
        value: addr.get(),
    }
}

/// Refuses sizes that no lane has addresses for, before a lane is made for them.
fn check_size(size: u64) -> Result<()> {
    match size > config::LINE_MAX {
        true => Err(Error::TooLarge {
            requested: size,
            max: config::LINE_MAX,
        }),
        false => Ok(()),
    }
}

impl Shared {
    /// A kept block, without a reference to the lane that all threads would count in one place.
    fn kept(&self, size: u64, align: u64, stream: &Stream) -> Option<Parts> {
        let rounded = self.config.rounding.round(size)?;
        if size == 0 || !align.is_power_of_two() || stream.is_retired() {
            return None;
        }
        let lanes = self.lanes.read();
        let lane = lanes.iter().find(|l| l.serves(stream))?;
        self.remember(lane);
        lane.take(rounded, align)
    }

    /// A block without an owner, if this thread used the lane a moment ago and it has mapped memory for that.
    fn kept_raw(&self, size: u64, align: u64, stream: &Stream) -> Option<Va> {
        let rounded = self.config.rounding.round(size)?;
        if size == 0 || !align.is_power_of_two() || stream.is_retired() {
            return None;
        }
        let hint = hint::recall(LaneKey::new(self.id, stream))?;
        hint.hit_raw(rounded, align)
    }

    /// Has this thread remember a lane, if it serves its stream.
    fn remember(&self, lane: &Front) {
        if !lane.is_scope() {
            hint::remember(self.id, lane);
        }
    }

    #[inline]
    fn alloc(&self, lane: &Front, size: u64, align: u64) -> Result<Parts> {
        match self.rounded(lane, size, align)? {
            0 => Ok(lane.nothing()),
            rounded => lane.alloc(size, rounded, align),
        }
    }

    #[inline]
    fn alloc_raw(&self, lane: &Front, size: u64, align: u64) -> Result<Va> {
        match self.rounded(lane, size, align)? {
            0 => Ok(Va::new(0)),
            rounded => lane.alloc_raw(size, rounded, align),
        }
    }

    fn alloc_named(&self, lane: &Front, len: u64, name: &BlockName) -> Result<Block> {
        let align = DEFAULT_ALIGN;
        match self.rounded(lane, len, align)? {
            0 => Ok(Block::new(lane.nothing(), 0)),
            size => lane.alloc_named(&Request {
                len,
                size,
                align,
                name: Some(name),
            }),
        }
    }

    /// Bytes that a request takes; 0 for no bytes.
    #[inline]
    fn rounded(&self, lane: &Lane, size: u64, align: u64) -> Result<u64> {
        if !align.is_power_of_two() {
            return Err(Error::InvalidConfig {
                what: "alignment",
                value: align,
                why: "it is not a power of two",
            });
        }
        if size == 0 {
            return Ok(0);
        }
        if lane.stream().is_retired() {
            lane.stream().check_alive()?;
        }
        let max = lane.largest();
        if align > max {
            return Err(Error::TooLarge {
                requested: align,
                max,
            });
        }
        let rounded = self.config.rounding.round(size).filter(|r| *r <= max);
        // Not `ok_or`: for each allocation an error would be made and dropped.
        match rounded {
            Some(rounded) => Ok(rounded),
            None => Err(Error::TooLarge {
                requested: size,
                max,
            }),
        }
    }

    fn lane(self: &Arc<Self>, stream: &Stream) -> Result<Arc<Front>> {
        let find = |lanes: &[Arc<Front>]| lanes.iter().find(|l| l.serves(stream)).cloned();
        if let Some(lane) = find(&self.lanes.read()) {
            self.remember(&lane);
            return Ok(lane);
        }
        // Reserved without the lock; a lane that somebody else was quicker with goes again.
        let fresh = self.new_lane(stream, false)?;
        let mut lanes = self.lanes.write();
        if let Some(lane) = find(&lanes) {
            drop(lanes);
            return Ok(lane);
        }
        let history = self.history.lock().clone();
        if history.is_some() {
            fresh.set_history(history.as_ref());
        }
        lanes.push(fresh.clone());
        self.remember(&fresh);
        Ok(fresh)
    }

    fn new_lane(self: &Arc<Self>, stream: &Stream, is_scope: bool) -> Result<Arc<Front>> {
        if !stream.device().is_same(self.pool.device()) {
            return Err(Error::Foreign {
                what: "stream",
                owner: "device",
            });
        }
        stream.check_alive()?;
        self.drop_bare_lanes();
        let lane = Lane::new(self, &self.pool, &self.config, stream, is_scope)?;
        Ok(Arc::new(Front::new(lane)))
    }

    /// Lets go of lanes whose stream and blocks are gone for everybody else. Programs that use a
    /// stream once would run out of addresses.
    fn drop_bare_lanes(&self) {
        // Nobody comes back to a stream that is gone, or to a scope that has ended.
        let is_orphan = |lane: &&Arc<Front>| {
            let stream = lane.stream();
            let is_over = lane.is_scope() && !lane.is_pinned();
            let is_over = is_over || stream.is_last() || stream.is_retired();
            lane.is_last() && is_over && !lane.is_used()
        };
        if !self.lanes.read().iter().any(|lane| is_orphan(&lane)) {
            return;
        }
        let orphans: Vec<Arc<Front>> = {
            let lanes = self.lanes.read();
            lanes.iter().filter(is_orphan).cloned().collect()
        };
        for lane in &orphans {
            lane.give_back_idle(u64::MAX, retire::GRACE);
        }
        drop(orphans);
        let bare: Vec<Arc<Front>> = {
            let mut lanes = self.lanes.write();
            let (bare, kept) = std::mem::take(&mut *lanes)
                .into_iter()
                .partition(|lane| is_orphan(&lane) && lane.is_bare());
            *lanes = kept;
            let mut past = self.past.lock();
            bare.iter()
                .for_each(|lane: &Arc<Front>| lane.add_to(&mut past));
            bare
        };
        // Without the lock: this calls the driver.
        drop(bare);
    }

    /// Gives idle granules of all lanes back to the pool; the bytes.
    fn give_back_idle(&self, want: u64, grace: Duration) -> u64 {
        let lanes = self.lanes.read().clone();
        let mut got = 0;
        for lane in lanes {
            if got >= want {
                break;
            }
            got += lane.give_back_idle(want - got, grace);
        }
        got
    }

    fn owner(&self, addr: Va) -> Result<Arc<Front>> {
        let lanes = self.lanes.read();
        let lane = lanes.iter().find(|l| l.contains(addr)).cloned();
        lane.ok_or_else(|| stale(addr))
    }
}

impl fmt::Debug for Heap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heap")
            .field("pool", &self.shared.pool)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
