//! The seam to the machine: one trait, three implementations, two wrappers.
//!
//! * [`cuda`]: a CUDA device through libcuda, opened at run time.
//! * [`host`]: real memory on a machine without a GPU, with CUDA's refusals.
//! * [`sim`]: bookkeeping and a virtual clock charged from a measured cost table.
//! * [`fault`]: wraps any driver and fails the n-th call of a kind.
//! * [`record`]: wraps any driver and keeps a call log, counts and times.
//! * [`cost`]: what calls and work cost, measured or known; the sim and planners share it.
//! * [`conformance`]: the checks that each of them passes.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::units::{Va, VaRange};

mod capture;
pub mod conformance;
pub mod cost;
#[allow(unsafe_code)]
pub mod cuda;
pub mod fault;
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
pub mod host;
mod measure;
pub mod record;
pub mod sim;
mod types;

pub use measure::{MeasureConfig, measure};
pub use types::{
    Access, Call, Capabilities, DeviceInfo, DriverCode, DriverError, DriverKind, EventId,
    GranuleProps, MemoryInfo, PhysId, StreamId, StreamKey,
};

/// What every driver call returns.
pub type DriverResult<T> = Result<T, DriverError>;

/// Virtual memory management and streams of one device.
///
/// # Contract
///
/// **Threads.** Every method may be called from any thread at any time. A caller's current CUDA
/// context and stream-capture mode are as before when the call returns.
///
/// **Failure.** A call that returns an error changed nothing. Codes are CUDA's. After an
/// `ILLEGAL_ADDRESS` in queued work the device is lost: every later call that reaches the device
/// fails with that code (bookkeeping calls such as [`unmap`](Self::unmap) may still succeed).
///
/// **Addresses.** [`reserve`](Self::reserve) answers a range that starts at a multiple of
/// `max(align, granularity)`. Lengths of reserve, create, map and access are non-zero multiples of
/// [`DeviceInfo::granularity`], otherwise `INVALID_VALUE`. A reservation is freed exactly as it was
/// reserved and only when nothing is mapped in it, otherwise `INVALID_VALUE`.
///
/// **Mapping.** A granule is mapped whole: `range.len()` is the length it was created with
/// (`NOT_SUPPORTED` when less, `INVALID_VALUE` when more), the range lies inside one reservation,
/// and nothing is mapped there (`INVALID_VALUE` otherwise). One granule may be mapped at several
/// addresses at once: all see the same bytes, ordered at operation boundaries. A new mapping
/// cannot be accessed until [`set_access`](Self::set_access). Access and unmap cover one or more
/// whole mappings without a gap, otherwise `INVALID_VALUE`. Releasing a granule that is mapped is
/// allowed: its memory lives until the last unmap. Mapping a released granule is `INVALID_VALUE`.
///
/// **No waiting.** Create, map, set access, unmap and release do not wait for queued work, and do
/// not keep it from running. Unmapping memory under running work is the caller's fault: the work
/// gets `ILLEGAL_ADDRESS`.
///
/// **Contents.** Memory of a fresh granule reads zero. A granule that is unmapped and mapped
/// again keeps its bytes.
///
/// **Streams.** Work on one stream runs in order. Work on two streams has no order except through
/// events. [`StreamId::DEFAULT`] always exists; the others are created non-blocking, that is
/// without implicit order against the default stream. An event that was never recorded counts as
/// passed. [`wait_event`](Self::wait_event) waits for the most recent record before the call.
/// Destroying a stream lets its queued work finish. [`stream_key`](Self::stream_key) never answers
/// the same key for two streams, even when the driver reuses a [`StreamId`].
///
/// **Ids.** A granule or address that this driver does not know (any more) is `INVALID_VALUE`, a
/// stream or event `INVALID_HANDLE`; the default stream cannot be destroyed. A stream that another
/// library made is announced to the concrete driver first.
///
/// **Undoing may fail too.** Unmap, release and the rest may answer any code, `OUT_OF_MEMORY`
/// included; callers keep what they could not give back and try again.
///
/// **Copies.** [`fill`](Self::fill), [`copy`](Self::copy) and [`launch`](Self::launch) are queued
/// and return at once; ranges may span mappings; all bytes must be mapped with the rights needed
/// when the work runs. Source and target of a copy may not overlap, and a host slice is as long as
/// the device's range (`INVALID_VALUE`). The parts of a [`copy_batch`](Self::copy_batch) have no order
/// among themselves: no target may overlap any other part's source or target. Copies from and to the host return when the host slice may
/// be used again, after all earlier work on that stream.
///
/// **Captures.** From [`begin_capture`](Self::begin_capture) to [`end_capture`](Self::end_capture) on
/// the same thread, fills, copies and launches on a stream do not run but are recorded into a
/// [`Graph`]. Memory calls, and calls about other streams and their events, are as ever on all threads
/// and leave the capture whole. A wait of the host for a captured stream, also at the end of a copy
/// from or to the host, and a hold, are refused with `STREAM_CAPTURE_UNSUPPORTED` and leave it whole. A record on a
/// captured stream becomes part of the capture: the event may not be asked about or waited for on the
/// host (`CAPTURED_EVENT`), and other streams may not wait for it here. A captured stream that waits
/// for an event of another is refused (`STREAM_CAPTURE_ISOLATION`), and the capture is spoiled: ending
/// it answers `STREAM_CAPTURE_INVALIDATED`. The default stream cannot be captured.
pub trait Driver: fmt::Debug + Send + Sync + 'static {
    /// Which implementation this is; wrappers answer for the driver they wrap.
    fn kind(&self) -> DriverKind;

    /// Facts about the device. Constant.
    fn info(&self) -> &DeviceInfo;

    /// Free and total memory now. Other processes change it too.
    fn memory_info(&self) -> DriverResult<MemoryInfo>;

    /// Reserves `len` bytes of addresses at a multiple of `align` (0 or a power of two).
    fn reserve(&self, len: u64, align: u64) -> DriverResult<VaRange>;

    /// Gives a whole reservation back.
    fn free_reservation(&self, range: VaRange) -> DriverResult<()>;

    /// Creates `len` bytes of physical memory.
    fn create(&self, len: u64, props: GranuleProps) -> DriverResult<PhysId>;

    /// Drops the creation reference.
    fn release(&self, phys: PhysId) -> DriverResult<()>;

    /// Puts all of `phys` behind `range`.
    fn map(&self, range: VaRange, phys: PhysId) -> DriverResult<()>;

    /// Sets the rights of every mapping in `range`.
    fn set_access(&self, range: VaRange, access: Access) -> DriverResult<()>;

    /// Removes every mapping in `range`.
    fn unmap(&self, range: VaRange) -> DriverResult<()>;

    /// Creates a non-blocking stream.
    fn create_stream(&self) -> DriverResult<StreamId>;

    /// Destroys a stream; queued work finishes first, without a wait here where the driver can.
    fn destroy_stream(&self, stream: StreamId) -> DriverResult<()>;

    /// The key that tells this stream from every other of the process. Refused (`STREAM_CAPTURE_UNSUPPORTED`) for a
    /// stream under capture, which it leaves whole, and on CUDA for the default stream beside one that it would wait for.
    fn stream_key(&self, stream: StreamId) -> DriverResult<StreamKey>;

    /// Waits on the host until the stream is empty. Reports errors of its work.
    fn sync_stream(&self, stream: StreamId) -> DriverResult<()>;

    /// Creates an event without timing.
    fn create_event(&self) -> DriverResult<EventId>;

    /// Destroys an event; waits already queued on it stay valid.
    fn destroy_event(&self, event: EventId) -> DriverResult<()>;

    /// Records the event after all work queued on the stream so far.
    fn record_event(&self, event: EventId, stream: StreamId) -> DriverResult<()>;

    /// Whether the work before the last record has finished.
    fn query_event(&self, event: EventId) -> DriverResult<bool>;

    /// Waits on the host for the event.
    fn sync_event(&self, event: EventId) -> DriverResult<()>;

    /// Makes later work of `stream` wait for the event, without a wait on the host.
    fn wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()>;

    /// Queues a fill of `range` with `byte`.
    fn fill(&self, range: VaRange, byte: u8, stream: StreamId) -> DriverResult<()>;

    /// Queues a copy of `src.len()` bytes to `dst` within the device.
    fn copy(&self, dst: Va, src: VaRange, stream: StreamId) -> DriverResult<()>;

    /// Queues many copies within the device as one piece of work, in no order among themselves. On
    /// CUDA one kernel moves some hundred parts, where a call for each would cost microseconds each.
    /// No parts: nothing is queued.
    ///
    /// The default queues one [`copy`](Self::copy) for each part. After an error some parts may
    /// have been queued all the same.
    fn copy_batch(&self, parts: &[CopyPart], stream: StreamId) -> DriverResult<()> {
        CopyPart::check(parts)?;
        parts
            .iter()
            .try_for_each(|part| self.copy(part.dst, part.src, stream))
    }

    /// Copies a host slice to the device; returns when `src` may change again.
    fn copy_from_host(&self, dst: Va, src: &[u8], stream: StreamId) -> DriverResult<()>;

    /// Copies device memory to a host slice; returns when the bytes are there. `NOT_SUPPORTED` on
    /// a driver without [`Capabilities::data`].
    fn copy_to_host(&self, dst: &mut [u8], src: VaRange, stream: StreamId) -> DriverResult<()>;

    /// Queues one of the check kernels.
    fn launch(&self, kernel: Kernel, stream: StreamId) -> DriverResult<()>;

    /// Queues work that ends when the returned [`Hold`] is dropped: a stand-in for a long kernel.
    fn hold(&self, stream: StreamId) -> DriverResult<Hold>;

    /// Starts to record work queued on `stream` instead of running it. On CUDA in global mode, under
    /// which calls that others make of libcuda by themselves are refused the most.
    fn begin_capture(&self, stream: StreamId) -> DriverResult<()>;

    /// Ends a capture, also a spoiled one, and makes the recorded work ready to run.
    fn end_capture(&self, stream: StreamId) -> DriverResult<Graph>;

    /// Whether work queued on `stream` is being recorded; also if that capture was spoiled.
    fn is_capturing(&self, stream: StreamId) -> DriverResult<bool>;

    /// For reaching methods of a concrete driver, such as the sim's clock. Wrappers answer for the
    /// driver they wrap.
    fn as_any(&self) -> &dyn Any;
}

/// One copy of a [`Driver::copy_batch`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopyPart {
    /// Where the bytes go.
    pub dst: Va,
    /// Where they are.
    pub src: VaRange,
}

impl CopyPart {
    /// The range written, or `None` if it does not fit in 64 bits.
    #[must_use]
    pub const fn target(&self) -> Option<VaRange> {
        VaRange::new(self.dst, self.src.len())
    }

    /// Refuses parts that overlap themselves or each other, as the contract of drivers asks.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` about the part's target.
    pub fn check(parts: &[Self]) -> DriverResult<()> {
        let refused = |at: Va, len| {
            DriverError::new(Call::CopyBatch, DriverCode::INVALID_VALUE).about(at.get(), len)
        };
        // Sweep over all ranges by address: a target must not overlap its neighbours.
        let mut ranges = Vec::with_capacity(parts.len() * 2);
        let some = || parts.iter().filter(|part| !part.src.is_empty());
        for part in some() {
            let target = part.target();
            ranges.push((target.ok_or(refused(part.dst, part.src.len()))?, true));
        }
        ranges.extend(some().map(|part| (part.src, false)));
        // Mostly both ascend, which this sort makes use of.
        ranges.sort_by_key(|(range, _)| range.start());
        let (mut written, mut read) = (Va::default(), Va::default());
        for (range, is_target) in ranges {
            let clash = range.start() < written || (is_target && range.start() < read);
            if clash {
                return Err(refused(range.start(), range.len()));
            }
            let end = if is_target { &mut written } else { &mut read };
            *end = (*end).max(range.end());
        }
        Ok(())
    }
}

/// Small kernels that tests, benches, examples and debug modes check memory with. On CUDA they are
/// PTX; on the host driver the stream's worker runs them; sim charges their time.
///
/// Ranges are multiples of 8 bytes at multiples of 8.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kernel {
    /// Writes [`pattern_word`]`(seed, i)` to the i-th 64-bit word.
    WritePattern {
        /// Where.
        range: VaRange,
        /// Which pattern.
        seed: u64,
    },
    /// Adds to the 64-bit word at `mismatches` the number of words that differ from the pattern.
    CheckPattern {
        /// Where.
        range: VaRange,
        /// Which pattern.
        seed: u64,
        /// A mapped, zeroed 64-bit word.
        mismatches: Va,
    },
    /// Reads every word `passes` times and adds their sum to the word at `sink`: bound by memory
    /// bandwidth.
    ReadSum {
        /// Where.
        range: VaRange,
        /// How often.
        passes: u32,
        /// A mapped 64-bit word.
        sink: Va,
    },
    /// Occupies the stream for about that long.
    Spin {
        /// Nanoseconds.
        nanos: u64,
    },
}

/// The i-th word of the check pattern: one step of `SplitMix64`, so that neighbouring words,
/// shifted ranges and other seeds all differ.
#[must_use]
pub const fn pattern_word(seed: u64, i: u64) -> u64 {
    let mut z = seed ^ i.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Keeps the work queued by [`Driver::hold`] from ending. Dropping it lets the stream go on.
#[must_use = "dropping a hold ends it"]
pub struct Hold {
    release: Option<Box<dyn FnOnce() + Send>>,
}

impl Hold {
    /// For drivers: `release` runs once, when the hold is dropped.
    pub fn new(release: impl FnOnce() + Send + 'static) -> Self {
        Self {
            release: Some(Box::new(release)),
        }
    }

    /// Ends the held work; the same as dropping.
    pub fn release(self) {}
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(release) = self.release.take() {
            release();
        }
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hold")
    }
}

/// Recorded work, ready to run any number of times. Does not keep the memory alive that the work uses.
pub struct Graph {
    replay: Box<dyn Fn(StreamId) -> DriverResult<()> + Send + Sync>,
}

impl Graph {
    /// For drivers: `replay` queues the recorded work on a stream.
    pub fn new(replay: impl Fn(StreamId) -> DriverResult<()> + Send + Sync + 'static) -> Self {
        Self {
            replay: Box::new(replay),
        }
    }

    /// Queues the recorded work on `stream`, in the order in which it was recorded.
    ///
    /// # Errors
    ///
    /// `INVALID_HANDLE` for a stream that is not known, and the driver's.
    pub fn launch(&self, stream: StreamId) -> DriverResult<()> {
        (self.replay)(stream)
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Graph")
    }
}

/// A driver shared by everything that was made from it.
pub type SharedDriver = Arc<dyn Driver>;
