//! A wrapper that counts and times driver calls, and keeps a log of them when asked to.

use std::any::Any;
use std::array;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::{
    Access, Call, CopyPart, DeviceInfo, Driver, DriverCode, DriverKind, DriverResult, EventId,
    GranuleProps, Graph, Hold, Kernel, MemoryInfo, PhysId, SharedDriver, StreamId, StreamKey,
};
use crate::sync::Mutex;
use crate::units::{Va, VaRange};

const KINDS: usize = Call::ALL.len();

/// Forwards to another driver and counts.
///
/// Times are real time on the calling thread around the inner call, waits included; on sim that is
/// the time of its bookkeeping, not of its virtual clock. Without a log a call costs two clock
/// reads and two or three relaxed atomic additions more than the inner driver.
///
/// # Example: what an operation cost
///
/// ```
/// use std::sync::Arc;
/// use granule::driver::record::RecordDriver;
/// use granule::driver::sim::{SimConfig, SimDriver};
/// use granule::driver::{Call, Driver, SharedDriver};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let sim: SharedDriver = Arc::new(SimDriver::new(SimConfig::default())?);
/// let driver = RecordDriver::new(sim);
/// let before = driver.snapshot();
/// let range = driver.reserve(64 << 20, 0)?;
/// driver.free_reservation(range)?;
/// assert!(driver.reserve(1, 0).is_err());
/// let cost = driver.snapshot().since(&before);
/// assert_eq!(cost.of(Call::Reserve).calls, 2);
/// assert_eq!(cost.of(Call::Reserve).failures, 1);
/// assert_eq!(cost.total().calls, 3);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RecordDriver {
    inner: SharedDriver,
    cells: [Cell; KINDS],
    log: Option<Mutex<Log>>,
}

#[derive(Debug, Default)]
struct Cell {
    calls: AtomicU64,
    failures: AtomicU64,
    nanos: AtomicU64,
}

/// Counts of one kind of call.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct CallCount {
    /// Calls made, failed ones included.
    pub calls: u64,
    /// Calls that returned an error.
    pub failures: u64,
    /// Time spent in them.
    pub nanos: u64,
}

/// Counts of every kind of call at one moment, or between two.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Counts([CallCount; KINDS]);

impl Counts {
    /// The counts of one kind.
    #[must_use]
    pub fn of(&self, call: Call) -> CallCount {
        self.0[call as usize]
    }

    /// The sum over several kinds.
    #[must_use]
    pub fn sum(&self, calls: &[Call]) -> CallCount {
        let mut sum = CallCount::default();
        for &call in calls {
            let one = self.of(call);
            sum.calls += one.calls;
            sum.failures += one.failures;
            sum.nanos += one.nanos;
        }
        sum
    }

    /// The sum over all kinds.
    #[must_use]
    pub fn total(&self) -> CallCount {
        self.sum(Call::ALL)
    }

    /// Kinds that were called, in declaration order.
    pub fn iter(&self) -> impl Iterator<Item = (Call, CallCount)> + '_ {
        let all = Call::ALL.iter().map(|&call| (call, self.of(call)));
        all.filter(|(_, count)| count.calls > 0)
    }

    /// What was counted after `earlier`; zero where a reset came between.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self(array::from_fn(|i| CallCount {
            calls: self.0[i].calls.saturating_sub(earlier.0[i].calls),
            failures: self.0[i].failures.saturating_sub(earlier.0[i].failures),
            nanos: self.0[i].nanos.saturating_sub(earlier.0[i].nanos),
        }))
    }
}

/// One call in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Number of the call among all that were logged since the last reset, from 0.
    pub nth: u64,
    /// The kind.
    pub call: Call,
    /// Address or handle it was about (of a copy the target); what it answered is not kept.
    pub at: u64,
    /// Bytes it was about.
    pub len: u64,
    /// The code it failed with, or `None`.
    pub code: Option<DriverCode>,
    /// Time it took.
    pub nanos: u64,
}

#[derive(Debug)]
struct Log {
    entries: VecDeque<Entry>,
    capacity: usize,
    next: u64,
}

impl RecordDriver {
    /// Wraps `inner`, without a log.
    #[must_use]
    pub fn new(inner: SharedDriver) -> Self {
        Self {
            inner,
            cells: array::from_fn(|_| Cell::default()),
            log: None,
        }
    }

    /// Wraps `inner` and keeps the newest `capacity` calls, in the order in which they returned.
    #[must_use]
    pub fn with_log(inner: SharedDriver, capacity: usize) -> Self {
        Self {
            log: Some(Mutex::new(Log {
                entries: VecDeque::new(),
                capacity,
                next: 0,
            })),
            ..Self::new(inner)
        }
    }

    /// The counts now. Calls that run meanwhile may be counted in part.
    #[must_use]
    pub fn snapshot(&self) -> Counts {
        Counts(array::from_fn(|i| CallCount {
            calls: self.cells[i].calls.load(Ordering::Relaxed),
            failures: self.cells[i].failures.load(Ordering::Relaxed),
            nanos: self.cells[i].nanos.load(Ordering::Relaxed),
        }))
    }

    /// Sets all counts to zero and empties the log.
    pub fn reset(&self) {
        for cell in &self.cells {
            cell.calls.store(0, Ordering::Relaxed);
            cell.failures.store(0, Ordering::Relaxed);
            cell.nanos.store(0, Ordering::Relaxed);
        }
        if let Some(log) = &self.log {
            let mut log = log.lock();
            log.entries.clear();
            log.next = 0;
        }
    }

    /// The calls kept, oldest first; empty without a log. A gap before the first
    /// [`Entry::nth`] is what no longer fitted.
    #[must_use]
    pub fn log(&self) -> Vec<Entry> {
        match &self.log {
            Some(log) => log.lock().entries.iter().copied().collect(),
            None => Vec::new(),
        }
    }

    /// The driver behind this one.
    #[must_use]
    pub fn inner(&self) -> &SharedDriver {
        &self.inner
    }

    fn pass<T>(
        &self,
        call: Call,
        (at, len): (u64, u64),
        run: impl FnOnce(&dyn Driver) -> DriverResult<T>,
    ) -> DriverResult<T> {
        let start = Instant::now();
        let result = run(&*self.inner);
        let nanos = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let cell = &self.cells[call as usize];
        cell.calls.fetch_add(1, Ordering::Relaxed);
        cell.nanos.fetch_add(nanos, Ordering::Relaxed);
        let code = result.as_ref().err().map(|error| error.code);
        if code.is_some() {
            cell.failures.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(log) = &self.log {
            log.lock().push(Entry {
                nth: 0,
                call,
                at,
                len,
                code,
                nanos,
            });
        }
        result
    }
}

impl Log {
    fn push(&mut self, entry: Entry) {
        let nth = self.next;
        self.next += 1;
        if self.capacity == 0 {
            return;
        }
        if self.entries.len() == self.capacity {
            self.entries.pop_front();
        }
        self.entries.push_back(Entry { nth, ..entry });
    }
}

fn about(range: VaRange) -> (u64, u64) {
    (range.start().get(), range.len())
}

impl Driver for RecordDriver {
    fn kind(&self) -> DriverKind {
        self.inner.kind()
    }

    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        self.pass(Call::MemoryInfo, (0, 0), |d| d.memory_info())
    }

    fn reserve(&self, len: u64, align: u64) -> DriverResult<VaRange> {
        self.pass(Call::Reserve, (0, len), |d| d.reserve(len, align))
    }

    fn free_reservation(&self, range: VaRange) -> DriverResult<()> {
        self.pass(Call::FreeReservation, about(range), |d| {
            d.free_reservation(range)
        })
    }

    fn create(&self, len: u64, props: GranuleProps) -> DriverResult<PhysId> {
        self.pass(Call::Create, (0, len), |d| d.create(len, props))
    }

    fn release(&self, phys: PhysId) -> DriverResult<()> {
        self.pass(Call::Release, (phys.0, 0), |d| d.release(phys))
    }

    fn map(&self, range: VaRange, phys: PhysId) -> DriverResult<()> {
        self.pass(Call::Map, about(range), |d| d.map(range, phys))
    }

    fn set_access(&self, range: VaRange, access: Access) -> DriverResult<()> {
        self.pass(Call::SetAccess, about(range), |d| {
            d.set_access(range, access)
        })
    }

    fn unmap(&self, range: VaRange) -> DriverResult<()> {
        self.pass(Call::Unmap, about(range), |d| d.unmap(range))
    }

    fn create_stream(&self) -> DriverResult<StreamId> {
        self.pass(Call::CreateStream, (0, 0), |d| d.create_stream())
    }

    fn destroy_stream(&self, stream: StreamId) -> DriverResult<()> {
        self.pass(Call::DestroyStream, (stream.0, 0), |d| {
            d.destroy_stream(stream)
        })
    }

    fn stream_key(&self, stream: StreamId) -> DriverResult<StreamKey> {
        self.pass(Call::StreamKey, (stream.0, 0), |d| d.stream_key(stream))
    }

    fn sync_stream(&self, stream: StreamId) -> DriverResult<()> {
        self.pass(Call::SyncStream, (stream.0, 0), |d| d.sync_stream(stream))
    }

    fn create_event(&self) -> DriverResult<EventId> {
        self.pass(Call::CreateEvent, (0, 0), |d| d.create_event())
    }

    fn destroy_event(&self, event: EventId) -> DriverResult<()> {
        self.pass(Call::DestroyEvent, (event.0, 0), |d| d.destroy_event(event))
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        self.pass(Call::RecordEvent, (event.0, 0), |d| {
            d.record_event(event, stream)
        })
    }

    fn query_event(&self, event: EventId) -> DriverResult<bool> {
        self.pass(Call::QueryEvent, (event.0, 0), |d| d.query_event(event))
    }

    fn sync_event(&self, event: EventId) -> DriverResult<()> {
        self.pass(Call::SyncEvent, (event.0, 0), |d| d.sync_event(event))
    }

    fn wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()> {
        self.pass(Call::WaitEvent, (event.0, 0), |d| {
            d.wait_event(stream, event)
        })
    }

    fn fill(&self, range: VaRange, byte: u8, stream: StreamId) -> DriverResult<()> {
        self.pass(Call::Fill, about(range), |d| d.fill(range, byte, stream))
    }

    fn copy(&self, dst: Va, src: VaRange, stream: StreamId) -> DriverResult<()> {
        self.pass(Call::Copy, (dst.get(), src.len()), |d| {
            d.copy(dst, src, stream)
        })
    }

    fn copy_batch(&self, parts: &[CopyPart], stream: StreamId) -> DriverResult<()> {
        let at = parts.first().map_or(0, |part| part.dst.get());
        let len = parts.iter().map(|part| part.src.len()).sum();
        self.pass(Call::CopyBatch, (at, len), |d| d.copy_batch(parts, stream))
    }

    fn copy_from_host(&self, dst: Va, src: &[u8], stream: StreamId) -> DriverResult<()> {
        self.pass(Call::CopyFromHost, (dst.get(), src.len() as u64), |d| {
            d.copy_from_host(dst, src, stream)
        })
    }

    fn copy_to_host(&self, dst: &mut [u8], src: VaRange, stream: StreamId) -> DriverResult<()> {
        self.pass(Call::CopyToHost, (src.start().get(), src.len()), |d| {
            d.copy_to_host(dst, src, stream)
        })
    }

    fn launch(&self, kernel: Kernel, stream: StreamId) -> DriverResult<()> {
        self.pass(Call::Launch, (stream.0, 0), |d| d.launch(kernel, stream))
    }

    fn hold(&self, stream: StreamId) -> DriverResult<Hold> {
        self.pass(Call::Hold, (stream.0, 0), |d| d.hold(stream))
    }

    fn begin_capture(&self, stream: StreamId) -> DriverResult<()> {
        self.pass(Call::BeginCapture, (stream.0, 0), |d| {
            d.begin_capture(stream)
        })
    }

    fn end_capture(&self, stream: StreamId) -> DriverResult<Graph> {
        self.pass(Call::EndCapture, (stream.0, 0), |d| d.end_capture(stream))
    }

    fn is_capturing(&self, stream: StreamId) -> DriverResult<bool> {
        self.pass(Call::IsCapturing, (stream.0, 0), |d| d.is_capturing(stream))
    }

    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::driver::sim::{SimConfig, SimDriver};
    use crate::units::MIB;

    fn sim() -> SharedDriver {
        Arc::new(SimDriver::new(SimConfig::default()).unwrap())
    }

    #[test]
    fn the_log_keeps_the_newest() {
        let d = RecordDriver::with_log(sim(), 2);
        let range = d.reserve(4 * MIB, 0).unwrap();
        d.unmap(range).unwrap_err();
        d.free_reservation(range).unwrap();
        let log = d.log();
        assert_eq!(log.len(), 2);
        assert_eq!((log[0].nth, log[0].call), (1, Call::Unmap));
        assert_eq!(log[0].code, Some(DriverCode::INVALID_VALUE));
        assert_eq!((log[0].at, log[0].len), (range.start().get(), 4 * MIB));
        assert_eq!((log[1].nth, log[1].code), (2, None));
        d.reset();
        assert!(d.log().is_empty());
        assert_eq!(d.snapshot().total(), CallCount::default());
    }

    #[test]
    fn counts_from_many_threads_are_whole() {
        let d = RecordDriver::new(sim());
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| (0..50).for_each(|_| assert!(d.memory_info().is_ok())));
            }
        });
        assert_eq!(d.snapshot().of(Call::MemoryInfo).calls, 200);
        assert_eq!(d.snapshot().iter().count(), 1);
    }
}
