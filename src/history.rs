//! What heaps and arenas did, kept as a bounded list of events.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use crate::driver::StreamKey;
use crate::heap::BlockName;
use crate::sync::Mutex;
use crate::units::Va;

/// The latest events of the heaps and arenas that record into it, on one time line. Off unless one is
/// set with [`Heap::set_history`](crate::Heap::set_history) or
/// [`Arena::set_history`](crate::Arena::set_history). Cheap to clone; clones are the same list.
///
/// # Cost
///
/// A heap that records makes each allocation and free under its stream's lock and takes one more lock for
/// the list: a pair takes about ten times as long. A heap that does not record pays nothing where a
/// freed block is handed on, and one comparison where its books are touched.
///
/// # Order
///
/// An event is listed before what it made possible can happen: a free before the memory is allocated
/// again, a mapping before a block lies on it. Events of different threads that do not depend on each
/// other may be listed either way.
///
/// # Example: a log that can be replayed
///
/// ```
/// use granule::{Device, Heap, HeapConfig, History, HistoryConfig, Pool, PoolConfig, units::MIB};
/// use granule::{driver::sim::SimConfig, trace::{self, ReadOptions}};
///
/// let device = Device::sim(SimConfig::default())?;
/// let heap = Heap::new(&Pool::new(&device, PoolConfig::default())?, HeapConfig::default())?;
/// let history = History::new(HistoryConfig::default());
/// heap.set_history(Some(&history));
/// let stream = device.create_stream()?;
/// drop(heap.alloc(3 * MIB, &stream)?);
/// let mut log = Vec::new();
/// history.write_log(&mut log)?;
/// let traces = trace::read(&log[..], &ReadOptions::default())?;
/// assert_eq!(traces[0].peak, 3 * MIB);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct History {
    shared: Arc<Shared>,
}

/// Settings of a [`History`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HistoryConfig {
    /// Events kept; the oldest go first. 100,000 by default, about 100 bytes each.
    pub events: usize,
    /// Whether each event is also one of `tracing`, at level `TRACE` with target `granule::history`. Off
    /// by default. They are emitted when no lock is held, at the end of the operation or of the next one.
    pub tracing: bool,
}

impl Default for HistoryConfig {
    fn default() -> Self {
        Self {
            events: 100_000,
            tracing: false,
        }
    }
}

/// Something that a heap or an arena did.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HistoryEvent {
    /// Its number among all since recording began, from 0.
    pub nth: u64,
    /// Microseconds since recording began.
    pub at_us: u64,
    /// The stream whose memory it is; 0 for an arena.
    pub stream: StreamKey,
    /// What was done.
    pub kind: HistoryKind,
    /// Where; 0 for a lack of memory.
    pub addr: Va,
    /// Bytes it takes, rounded up.
    pub len: u64,
    /// Bytes asked for. Where that is not known, the same as `len`.
    pub requested: u64,
    /// The block's name, if it was given one when it was allocated.
    pub name: Option<BlockName>,
}

/// What was done.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum HistoryKind {
    /// A block was allocated, or was live when recording began. Of an arena: memory came into use.
    Alloc,
    /// A block was freed, and waits for other streams.
    FreeRequested,
    /// A block was freed, and its memory may be used again.
    Free,
    /// Memory was mapped.
    Map,
    /// Memory was unmapped, or has moved away to be unmapped when its fence has passed.
    Unmap,
    /// An allocation found no memory.
    OutOfMemory {
        /// Bytes the device had free.
        free: u64,
    },
}

/// The events of a [`History`] at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct HistoryEvents {
    /// Events, oldest first.
    pub events: Vec<HistoryEvent>,
    /// Events that were dropped to make room.
    pub lost: u64,
    /// When recording began, in microseconds since 1970.
    pub started_us: u64,
}

/// A live block, for what its free will say.
struct Live {
    stream: StreamKey,
    len: u64,
    requested: u64,
    name: Option<BlockName>,
}

struct Ring {
    events: VecDeque<HistoryEvent>,
    next: u64,
    live: HashMap<u64, Live>,
    /// Events to emit when no lock is held.
    unsaid: Vec<HistoryEvent>,
}

struct Shared {
    config: HistoryConfig,
    started: Instant,
    started_us: u64,
    ring: Mutex<Ring>,
}

impl History {
    /// An empty list.
    #[must_use]
    pub fn new(config: HistoryConfig) -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let since = since.map_or(0, |time| time.as_micros());
        Self {
            shared: Arc::new(Shared {
                config,
                started: Instant::now(),
                started_us: u64::try_from(since).unwrap_or(u64::MAX),
                ring: Mutex::new(Ring {
                    events: VecDeque::new(),
                    next: 0,
                    live: HashMap::new(),
                    unsaid: Vec::new(),
                }),
            }),
        }
    }

    /// A copy of what is in the list.
    #[must_use]
    pub fn events(&self) -> HistoryEvents {
        self.snapshot(&self.shared.ring.lock())
    }

    /// Writes the events as lines that [`trace::read`](crate::trace::read) reads: sizes as requested,
    /// streams by key. Blocks whose allocation is no longer in the list come first, at the time of the first event;
    /// memory that is no longer in the list is not listed as mapped.
    ///
    /// # Errors
    ///
    /// Those of the writer.
    pub fn write_log(&self, mut out: impl io::Write) -> io::Result<()> {
        let (known, before) = {
            let ring = self.shared.ring.lock();
            (self.snapshot(&ring), ring.before())
        };
        writeln!(out, "# granule {}", env!("CARGO_PKG_VERSION"))?;
        if known.lost > 0 {
            writeln!(out, "# {} older events are lost", known.lost)?;
        }
        let start = known.events.first().map_or(0, |event| event.at_us);
        for (addr, bytes, stream) in before {
            writeln!(out, "a,{addr},{bytes},{stream},{start}")?;
        }
        for event in &known.events {
            let (addr, len, time) = (event.addr.get(), event.len, event.at_us);
            let (requested, stream) = (event.requested, event.stream.0);
            match event.kind {
                HistoryKind::Alloc => writeln!(out, "a,{addr},{requested},{stream},{time}")?,
                HistoryKind::Free => writeln!(out, "f,{addr},{time}")?,
                HistoryKind::FreeRequested => {}
                HistoryKind::Map => writeln!(out, "m,{addr},{len},{time}")?,
                HistoryKind::Unmap => writeln!(out, "u,{addr},{len},{time}")?,
                HistoryKind::OutOfMemory { free } => {
                    writeln!(out, "o,{requested},{free},{time}")?;
                }
            }
        }
        out.flush()
    }

    fn snapshot(&self, ring: &Ring) -> HistoryEvents {
        let events: Vec<HistoryEvent> = ring.events.iter().cloned().collect();
        HistoryEvents {
            lost: ring.next - events.len() as u64,
            events,
            started_us: self.shared.started_us,
        }
    }

    /// A block was allocated. Its memory is not given to anybody else before it is freed.
    pub(crate) fn alloc(
        &self,
        stream: StreamKey,
        addr: u64,
        len: u64,
        requested: u64,
        name: Option<&BlockName>,
    ) {
        let mut ring = self.shared.ring.lock();
        // The free was not seen, since it was under way when recording began.
        self.end(&mut ring, addr, HistoryKind::Free, true);
        let live = Live {
            stream,
            len,
            requested,
            name: name.cloned(),
        };
        ring.live.insert(addr, live);
        let event = self.event(stream, HistoryKind::Alloc, addr, len);
        let name = name.cloned();
        self.push(
            &mut ring,
            HistoryEvent {
                requested,
                name,
                ..event
            },
        );
    }

    /// The block at an address was freed, or asked to be. Says nothing of one that is free already.
    pub(crate) fn free(&self, addr: u64, is_complete: bool) {
        let kind = match is_complete {
            true => HistoryKind::Free,
            false => HistoryKind::FreeRequested,
        };
        self.end(&mut self.shared.ring.lock(), addr, kind, is_complete);
    }

    fn end(&self, ring: &mut Ring, addr: u64, kind: HistoryKind, is_complete: bool) {
        let live = match (is_complete, ring.live.get(&addr)) {
            (_, None) => return,
            (true, _) => ring.live.remove(&addr),
            (false, Some(live)) => Some(Live {
                name: live.name.clone(),
                ..*live
            }),
        };
        if let Some(live) = live {
            let event = self.event(live.stream, kind, addr, live.len);
            self.push(
                ring,
                HistoryEvent {
                    requested: live.requested,
                    name: live.name,
                    ..event
                },
            );
        }
    }

    /// Memory was mapped.
    pub(crate) fn map(&self, stream: StreamKey, addr: u64, len: u64) {
        let event = self.event(stream, HistoryKind::Map, addr, len);
        self.push(&mut self.shared.ring.lock(), event);
    }

    /// Memory was unmapped.
    pub(crate) fn unmap(&self, stream: StreamKey, addr: u64, len: u64) {
        let event = self.event(stream, HistoryKind::Unmap, addr, len);
        self.push(&mut self.shared.ring.lock(), event);
    }

    /// An allocation found no memory.
    pub(crate) fn out_of_memory(&self, stream: StreamKey, requested: u64, free: u64) {
        let kind = HistoryKind::OutOfMemory { free };
        let event = self.event(stream, kind, 0, requested);
        self.push(&mut self.shared.ring.lock(), event);
    }

    fn event(&self, stream: StreamKey, kind: HistoryKind, addr: u64, len: u64) -> HistoryEvent {
        let at = self.shared.started.elapsed().as_micros();
        HistoryEvent {
            nth: 0,
            at_us: u64::try_from(at).unwrap_or(u64::MAX),
            stream,
            kind,
            addr: Va::new(addr),
            len,
            requested: len,
            name: None,
        }
    }

    fn push(&self, ring: &mut Ring, mut event: HistoryEvent) {
        event.nth = ring.next;
        ring.next += 1;
        if self.shared.config.tracing {
            ring.unsaid.push(event.clone());
        }
        if ring.events.len() >= self.shared.config.events {
            ring.events.pop_front();
        }
        if self.shared.config.events > 0 {
            ring.events.push_back(event);
        }
    }

    /// Emits what was recorded. Called without a lock, since subscribers are other people's code.
    pub(crate) fn say(&self) {
        if !self.shared.config.tracing {
            return;
        }
        let unsaid = std::mem::take(&mut self.shared.ring.lock().unsaid);
        for event in unsaid {
            let (stream, addr, len) = (event.stream.0, event.addr.get(), event.len);
            let (nth, requested, name) = (event.nth, event.requested, event.name.as_deref());
            let what = event.kind.name();
            tracing::trace!(
                target: "granule::history",
                nth, at_us = event.at_us, stream, addr, len, requested, name, "{what}"
            );
        }
    }
}

impl Ring {
    /// Blocks that were allocated before the first event of the list: address, bytes, stream. They are
    /// live still, or their free is in the list.
    fn before(&self) -> Vec<(u64, u64, u64)> {
        let mut seen = HashSet::new();
        let mut before = Vec::new();
        for event in &self.events {
            let addr = event.addr.get();
            match event.kind {
                HistoryKind::Alloc => {
                    seen.insert(addr);
                }
                HistoryKind::Free if seen.insert(addr) => {
                    before.push((addr, event.requested, event.stream.0));
                }
                _ => {}
            }
        }
        let unseen = self.live.iter().filter(|(addr, _)| !seen.contains(*addr));
        before.extend(unseen.map(|(addr, live)| (*addr, live.requested, live.stream.0)));
        before.sort_unstable();
        before
    }
}

impl HistoryKind {
    /// What it is called in traces.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Alloc => "alloc",
            Self::FreeRequested => "free requested",
            Self::Free => "free",
            Self::Map => "map",
            Self::Unmap => "unmap",
            Self::OutOfMemory { .. } => "out of memory",
        }
    }
}

impl fmt::Debug for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ring = self.shared.ring.lock();
        f.debug_struct("History")
            .field("config", &self.shared.config)
            .field("recorded", &ring.next)
            .finish_non_exhaustive()
    }
}
