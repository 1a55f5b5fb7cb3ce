//! Making free memory contiguous, by every strategy of the field behind one interface.
//!
//! A [`MovableHeap`] holds blocks whose address is read through a guard, so that they may be moved
//! while nobody looks. When no free run holds an allocation, or when asked to, it runs a *pass*: the
//! [planner](plan()) decides from the state and a cost table what to remap and what to copy, the
//! executor carries it out step by step, each of which leaves everything consistent.
//!
//! ```
//! use granule::defrag::{Goal, Bound, MovableConfig, MovableHeap, Strategy};
//! use granule::driver::{cost::CostTable, sim::SimConfig};
//! use granule::{Device, Pool, PoolConfig, units::MIB};
//!
//! let device = Device::sim(SimConfig::default())?;
//! let pool = Pool::new(&device, PoolConfig::with_budget(64 * MIB))?;
//! let stream = device.create_stream()?;
//! let config = MovableConfig { granule: 8 * MIB, ..MovableConfig::known(CostTable::default()) };
//! let heap = MovableHeap::new(&pool, config)?;
//!
//! // All of the budget in blocks of 8 MiB; then every other one goes.
//! let mut blocks = Vec::new();
//! for _ in 0..8 {
//!     blocks.push(Some(heap.alloc(8 * MIB, &stream)?));
//! }
//! blocks.iter_mut().step_by(2).for_each(|block| *block = None);
//! assert_eq!(heap.stats().largest_free, 8 * MIB);
//!
//! // The free half as one run: four granules are remapped, no byte is copied, no pointer changes.
//! let report = heap.defragment(&stream, Strategy::Remap, Goal::Contiguous(32 * MIB), Bound::NONE)?;
//! assert_eq!((report.bytes_copied, report.pointers_changed), (0, 0));
//! assert_eq!(heap.stats().largest_free, 32 * MIB);
//! let large = heap.alloc(32 * MIB, &stream)?;
//! assert_eq!(large.access(&stream)?.range().len(), 32 * MIB);
//! # Ok::<(), granule::Error>(())
//! ```

#![forbid(unsafe_code)]

use std::time::Duration;

use crate::driver::cost::CostTable;
use crate::units::VaRange;

mod block;
mod books;
mod heap;
mod pass;
mod plan;
mod retire;
mod steps;
mod uses;

pub use block::{BlockGuard, MovableBlock};
pub use heap::MovableHeap;
pub use plan::{
    BATCH_PARTS, BULK, Lazy, Move, Piece, Plan, Prediction, Remapping, Shortfall, Slot, Source,
    State, Step, Strategy, plan,
};

/// How long a block is likely to live.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub enum Age {
    /// Nobody said: young for [`MovableConfig::youth`] after its allocation.
    #[default]
    Unknown,
    /// To be freed soon; placed from the high end of the addresses.
    Young,
    /// To stay.
    Old,
}

/// Settings of a [`MovableHeap`]. Sizes in bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MovableConfig {
    /// The granule: a power of two, at least the device's granularity. What is remapped is whole
    /// granules, so blocks of at least a granule are remapped well and small ones are copied. The
    /// pool's granule if 0, which is the default.
    pub granule: u64,
    /// Addresses to reserve, rounded up to granules. Four times the pool's budget if 0, which is the
    /// default: remapping needs free addresses, and these cost nothing.
    pub addresses: u64,
    /// What sizes and places are multiples of: a power of two, 256 by default.
    pub align: u64,
    /// What a failing allocation and [`MovableHeap::maintain`] use. [`Strategy::Hybrid`] by default.
    pub strategy: Strategy,
    /// Whether an allocation that finds no free run starts a pass; on by default. Without, it only
    /// takes new memory from the pool.
    pub on_failure: bool,
    /// When [`MovableHeap::maintain`], and the lazy buddy system, start one.
    pub lazy: Lazy,
    /// How long a block of [`Age::Unknown`] is young; one second by default.
    pub youth: Duration,
    /// Old mappings that may wait for their fences at a time; a pass that would make more waits for
    /// them. 256 by default; fewer are unmapped by [`MovableHeap::maintain`], by
    /// [`MovableHeap::settle`], and when their addresses are needed.
    pub aliases: usize,
    /// How long a pass may wait on the host for fences, where it has to; one second by default.
    pub wait: Duration,
    /// What calls cost here. `None`, the default, [measures](crate::driver::measure()) that when the
    /// heap is made, which takes a tenth of a second on an H200.
    pub table: Option<CostTable>,
}

impl Default for MovableConfig {
    fn default() -> Self {
        Self {
            granule: 0,
            addresses: 0,
            align: crate::DEFAULT_ALIGN,
            strategy: Strategy::Hybrid,
            on_failure: true,
            lazy: Lazy::default(),
            youth: Duration::from_secs(1),
            aliases: 256,
            wait: Duration::from_secs(1),
            table: None,
        }
    }
}

impl MovableConfig {
    /// The defaults, with a cost table that was measured or loaded before.
    #[must_use]
    pub fn known(table: CostTable) -> Self {
        Self {
            table: Some(table),
            ..Self::default()
        }
    }
}

/// What a pass is to reach.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Goal {
    /// A free run of that many bytes.
    Contiguous(u64),
    /// The longest free run that can be made: of all free bytes, or else of three quarters, a half, or
    /// a quarter of them.
    Largest,
}

/// How far a pass may go. What it has done stays done, and the next pass goes on from there.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Bound {
    /// It ends before a step that would take it past this, by the cost table: host and device time.
    pub time: Option<Duration>,
    /// It ends after so many steps.
    pub steps: Option<u32>,
}

impl Bound {
    /// As far as it goes.
    pub const NONE: Self = Self {
        time: None,
        steps: None,
    };

    /// At most about that long.
    #[must_use]
    pub const fn time(time: Duration) -> Self {
        Self {
            time: Some(time),
            steps: None,
        }
    }

    fn is_none(&self) -> bool {
        *self == Self::NONE
    }
}

/// What a pass did. Sizes in bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// The strategy.
    pub strategy: Strategy,
    /// The run that it made or, if it did not finish, was making.
    pub run: VaRange,
    /// Whether the run is free now, in the order of the stream. False for a pass that was bounded,
    /// stopped, or overtaken by other threads.
    pub finished: bool,
    /// What the whole plan was to cost.
    pub predicted: Prediction,
    /// Host time that the pass took, planning included. The copies that it queued may still run:
    /// synchronize the stream to know when the device is done.
    pub actual: Duration,
    /// Of that, planning.
    pub planning: Duration,
    /// Steps carried out.
    pub steps: u32,
    /// Bytes copied.
    pub bytes_copied: u64,
    /// Blocks whose address changed.
    pub pointers_changed: u64,
    /// Granules mapped at another address.
    pub remapped: u64,
    /// Bytes that came from the pool.
    pub extra_memory: u64,
    /// Driver calls that the pass made itself: map, set access, unmap, copy, events and waits.
    pub calls: Calls,
}

/// Driver calls of a pass.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Calls {
    /// Maps.
    pub map: u64,
    /// Settings of access, one for each stretch of neighbouring mappings.
    pub set_access: u64,
    /// Unmaps, of old addresses of earlier passes too.
    pub unmap: u64,
    /// Copies of single blocks.
    pub copy: u64,
    /// Batches of copies.
    pub batch: u64,
}

/// Figures of a [`MovableHeap`]. Sizes in bytes; `mapped == live + free` while no pass is running.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct MovableStats {
    /// Physical memory behind usable addresses.
    pub mapped: u64,
    /// In live blocks.
    pub live: u64,
    /// Mapped and free.
    pub free: u64,
    /// The longest free run.
    pub largest_free: u64,
    /// Live blocks.
    pub blocks: u64,
    /// Blocks that guards or pins hold still.
    pub still: u64,
    /// Old mappings that wait for a fence.
    pub aliases: u64,
    /// Passes that carried out at least one step.
    pub passes: u64,
    /// Bytes copied by all passes.
    pub bytes_copied: u64,
    /// Granules remapped by all passes.
    pub remapped: u64,
}

impl MovableStats {
    /// `1 - live / mapped`, in thousandths.
    #[must_use]
    pub fn waste_permille(&self) -> u64 {
        permille(self.free, self.mapped)
    }

    /// External fragmentation: `1 - largest free run / free`, in thousandths.
    #[must_use]
    pub fn external_permille(&self) -> u64 {
        permille(self.free - self.largest_free.min(self.free), self.free)
    }
}

fn permille(part: u64, whole: u64) -> u64 {
    let share = (u128::from(part) * 1000).checked_div(u128::from(whole));
    share.map_or(0, |s| u64::try_from(s).unwrap_or(1000))
}
