//! Runs recorded traces through a heap. For the example `replay`, the benches and the tests alike.

#![allow(dead_code)]

use std::error::Error as StdError;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use flate2::bufread::MultiGzDecoder;
use granule::driver::cuda::CudaDriver;
use granule::driver::host::{HostConfig, HostDriver};
use granule::driver::record::{Counts, RecordDriver};
use granule::driver::sim::{SimConfig, SimDriver};
use granule::driver::{Call, DriverKind, Kernel, SharedDriver};
use granule::trace::{self, Event, EventKind, ReadOptions, Trace, TraceError};
use granule::units::{GIB, VaRange};
use granule::{
    Block, Device, Error, Heap, HeapConfig, HeapStats, Pool, PoolConfig, Stream, StreamHeap, Tensor,
};

/// What can go wrong here comes from many sides.
pub type Outcome<T = ()> = Result<T, Box<dyn StdError>>;

/// Bytes of the buffers that files are read through.
const BUFFER: usize = 1 << 20;

/// Device memory of drivers without a device of their own. Host pages that nobody touches take none.
const MEMORY: u64 = 140 * GIB;

/// Reads a trace file, compressed with gzip or not.
pub fn open(path: &Path, options: &ReadOptions) -> Result<Vec<Trace>, TraceError> {
    let io = |source| TraceError::Io { at: 0, source };
    let mut file = BufReader::with_capacity(BUFFER, File::open(path).map_err(io)?);
    match file.fill_buf().map_err(io)? {
        [0x1f, ..] => {
            let plain = MultiGzDecoder::new(file);
            trace::read(BufReader::with_capacity(BUFFER, plain), options)
        }
        _ => trace::read(file, options),
    }
}

/// The trace with all sizes divided, and rounded up to 512 bytes: stands for a smaller job.
pub fn shrunk(trace: &Trace, by: f64) -> Trace {
    let less = |bytes: u64| ((bytes as f64 / by) as u64).next_multiple_of(512);
    let mut all = trace.clone();
    for event in &mut all.events {
        match &mut event.kind {
            EventKind::Alloc { bytes, .. }
            | EventKind::Reserved { bytes }
            | EventKind::OutOfMemory { bytes, .. } => *bytes = less(*bytes),
            _ => {}
        }
    }
    // Counts the peaks anew.
    all.first(usize::MAX)
}

/// A device whose calls are counted.
pub struct Rig {
    pub device: Device,
    pub record: Arc<RecordDriver>,
}

impl Rig {
    /// The first device of a kind; with so much memory, if it is not a real one.
    pub fn open(kind: DriverKind, memory: Option<u64>) -> Outcome<Self> {
        let unit = SimConfig::default().granularity;
        let memory = memory.unwrap_or(MEMORY) / unit * unit;
        let inner: SharedDriver = match kind {
            DriverKind::Cuda => Arc::new(CudaDriver::open(0)?),
            DriverKind::Host => Arc::new(HostDriver::new(HostConfig {
                total_memory: memory,
                ..HostConfig::default()
            })?),
            _ => Arc::new(SimDriver::new(SimConfig {
                total_memory: memory,
                ..SimConfig::default()
            })?),
        };
        Ok(Self::over(inner))
    }

    /// Any driver.
    pub fn over(inner: SharedDriver) -> Self {
        let record = Arc::new(RecordDriver::new(inner));
        let device = Device::from_driver(record.clone());
        Self { device, record }
    }

    /// Modelled time of the driver's memory management so far, if there is no device.
    fn modelled(&self) -> Option<Duration> {
        let sim = self.device.driver().as_any().downcast_ref::<SimDriver>();
        sim.map(|sim| sim.driver_time().into())
    }
}

/// How a trace is run.
#[derive(Clone, Default)]
pub struct Setup {
    pub pool: PoolConfig,
    pub heap: HeapConfig,
    /// Write a word of every block when it is allocated, and check it when it is freed.
    pub touch: bool,
    /// Try what the recorded allocator had no memory for.
    pub probe: bool,
}

/// An allocation that a run ended at.
#[derive(Clone, Debug)]
pub struct Oom {
    /// The number of the event, from 0.
    pub event: u64,
    pub time_us: u64,
    pub requested: u64,
    /// Live, as requested.
    pub live: u64,
    /// What the heap said.
    pub error: String,
}

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Run {
    /// Events done.
    pub events: u64,
    /// Most physical memory that existed at once.
    pub reserved: u64,
    pub stats: HeapStats,
    pub calls: Counts,
    /// Time in driver calls: modelled on sim, else measured.
    pub driver: Duration,
    /// Time in driver calls as the host saw it.
    pub in_driver: Duration,
    /// The whole run, without setting up and taking down.
    pub whole: Duration,
    pub oom: Option<Oom>,
    /// Recorded shortages that were tried, and how many had memory here.
    pub probes: (u64, u64),
    /// Whether the last of them had.
    pub last_probe: bool,
    /// Words that were not as they had been written.
    pub mismatches: u64,
}

impl Run {
    pub fn ns_per_event(&self) -> f64 {
        self.whole.as_nanos() as f64 / self.events.max(1) as f64
    }

    /// Without the time in driver calls.
    pub fn own_ns_per_event(&self) -> f64 {
        let own = self.whole.saturating_sub(self.in_driver);
        own.as_nanos() as f64 / self.events.max(1) as f64
    }
}

/// Looks on.
pub trait Watch {
    /// Called after each event, with the bytes that are live as requested.
    fn after(&mut self, nth: u64, event: &Event, live: u64, heap: &Heap, pool: &Pool) -> Outcome;

    /// Called when the heap has been made.
    fn begin(&mut self, _heap: &Heap) -> Outcome {
        Ok(())
    }
}

/// Nobody looks on.
pub struct Unwatched;

impl Watch for Unwatched {
    #[inline]
    fn after(&mut self, _: u64, _: &Event, _: u64, _: &Heap, _: &Pool) -> Outcome {
        Ok(())
    }
}

/// Blocks by slot, and what was written to them.
struct Live {
    blocks: Vec<Option<Block>>,
    bytes: u64,
    touch: Option<Touch>,
}

/// A word of each block.
struct Touch {
    counter: Tensor<u64>,
    seeds: Vec<u64>,
}

impl Touch {
    fn new(device: &Device, stream: &Stream, slots: usize) -> Outcome<Self> {
        let unit = device.info().granularity;
        let pool = Pool::new(device, PoolConfig::with_budget(unit).granule(unit))?;
        let mut counter = Tensor::new(&pool, &[], 1)?;
        counter.grow_zeroed(1, stream)?;
        stream.synchronize()?;
        Ok(Self {
            counter,
            seeds: vec![0; slots],
        })
    }

    fn word(block: &Block) -> Option<VaRange> {
        VaRange::new(block.ptr(), 8).filter(|_| block.len() >= 8)
    }

    fn write(&mut self, slot: usize, seed: u64, block: &Block) -> Outcome {
        let Some(range) = Self::word(block) else {
            return Ok(());
        };
        self.seeds[slot] = seed;
        let stream = block.stream()?;
        let driver = stream.device().driver();
        Ok(driver.launch(Kernel::WritePattern { range, seed }, stream.id())?)
    }

    fn check(&self, slot: usize, block: &Block) -> Outcome {
        let Some(range) = Self::word(block) else {
            return Ok(());
        };
        let kernel = Kernel::CheckPattern {
            range,
            seed: self.seeds[slot],
            mismatches: self.counter.ptr(),
        };
        let stream = block.stream()?;
        let driver = stream.device().driver();
        Ok(driver.launch(kernel, stream.id())?)
    }

    fn mismatches(&self, streams: &[Stream]) -> Outcome<u64> {
        streams.iter().try_for_each(Stream::synchronize)?;
        let mut count = [0];
        self.counter.copy_to_host(0, &mut count, &streams[0])?;
        Ok(count[0])
    }
}

/// Runs a trace on a fresh heap, under a budget or none.
///
/// # Errors
///
/// What the heap answers, but for a lack of memory: the run ends there and says so.
pub fn run(
    rig: &Rig,
    trace: &Trace,
    setup: &Setup,
    budget: Option<u64>,
    watch: &mut impl Watch,
) -> Outcome<Run> {
    let config = PoolConfig {
        budget: budget.or(setup.pool.budget),
        ..setup.pool.clone()
    };
    let pool = Pool::new(&rig.device, config)?;
    let heap = Heap::new(&pool, setup.heap.clone())?;
    let count = trace.streams.len().max(1);
    let streams: Vec<Stream> = (0..count)
        .map(|_| rig.device.create_stream())
        .collect::<Result<_, _>>()?;
    let lanes: Vec<StreamHeap> = streams
        .iter()
        .map(|stream| heap.on(stream))
        .collect::<Result<_, _>>()?;
    let slots = trace.slots as usize;
    let can_touch = setup.touch && rig.device.info().capabilities.data;
    let touch = match can_touch {
        true => Some(Touch::new(&rig.device, &streams[0], slots)?),
        false => None,
    };
    let mut live = Live {
        blocks: Vec::new(),
        bytes: 0,
        touch,
    };
    live.blocks.resize_with(slots, || None);
    watch.begin(&heap)?;
    let (before, modelled) = (rig.record.snapshot(), rig.modelled());
    let started = Instant::now();
    let mut run = Run {
        events: 0,
        reserved: 0,
        stats: HeapStats::default(),
        calls: before.clone(),
        driver: Duration::ZERO,
        in_driver: Duration::ZERO,
        whole: Duration::ZERO,
        oom: None,
        probes: (0, 0),
        last_probe: false,
        mismatches: 0,
    };
    for (nth, event) in (0u64..).zip(&trace.events) {
        match event.kind {
            EventKind::Alloc {
                slot,
                bytes,
                stream,
            } => match lanes[usize::from(stream)].alloc(bytes) {
                Ok(block) => live.put(slot, nth, bytes, block)?,
                Err(error) if is_shortage(&error) => {
                    run.oom = Some(Oom {
                        event: nth,
                        time_us: event.time_us,
                        requested: bytes,
                        live: live.bytes,
                        error: error.to_string(),
                    });
                    break;
                }
                Err(error) => return Err(error.into()),
            },
            EventKind::Free { slot, stream } => live.free(slot, &streams[usize::from(stream)])?,
            EventKind::OutOfMemory { bytes, .. } if setup.probe => {
                run.probes.0 += 1;
                match lanes[0].alloc(bytes) {
                    Ok(_) => {
                        run.probes.1 += 1;
                        run.last_probe = true;
                    }
                    Err(error) if is_shortage(&error) => run.last_probe = false,
                    Err(error) => return Err(error.into()),
                }
            }
            _ => {}
        }
        run.events = nth + 1;
        watch.after(nth, event, live.bytes, &heap, &pool)?;
    }
    run.whole = started.elapsed();
    run.calls = rig.record.snapshot().since(&before);
    run.in_driver = Duration::from_nanos(vmm(&run.calls));
    run.driver = match (modelled, rig.modelled()) {
        (Some(before), Some(after)) => after.saturating_sub(before),
        _ => run.in_driver,
    };
    run.reserved = pool.stats().peak_created;
    if let Some(touch) = &live.touch {
        run.mismatches = touch.mismatches(&streams)?;
    }
    run.stats = heap.audit()?;
    drop(live.blocks);
    Ok(run)
}

/// Whether memory or addresses are lacking.
fn is_shortage(error: &Error) -> bool {
    error.is_out_of_memory()
        || matches!(
            error,
            Error::TooLarge { .. } | Error::AddressSpaceExhausted { .. }
        )
}

impl Live {
    fn put(&mut self, slot: u32, nth: u64, bytes: u64, block: Block) -> Outcome {
        if let Some(touch) = &mut self.touch {
            touch.write(slot as usize, nth, &block)?;
        }
        self.bytes += bytes;
        self.blocks[slot as usize] = Some(block);
        Ok(())
    }

    fn free(&mut self, slot: u32, stream: &Stream) -> Outcome {
        let Some(block) = self.blocks[slot as usize].take() else {
            return Err(format!("slot {slot} is free and freed").into());
        };
        self.bytes -= block.len();
        if let Some(touch) = &self.touch {
            touch.check(slot as usize, &block)?;
        }
        block.free_on(stream)?;
        Ok(())
    }
}

/// Time in calls that are about memory.
fn vmm(calls: &Counts) -> u64 {
    let kinds = [
        Call::Reserve,
        Call::FreeReservation,
        Call::Create,
        Call::Release,
        Call::Map,
        Call::SetAccess,
        Call::Unmap,
        Call::RecordEvent,
        Call::QueryEvent,
        Call::WaitEvent,
        Call::SyncEvent,
        Call::SyncStream,
        Call::MemoryInfo,
    ];
    calls.sum(&kinds).nanos
}

/// The least budget under which a trace completes, within a thousandth of its peak, and that run.
/// `enough` is a run that completed; each try is told to `tell`.
pub fn least_budget(
    rig: &Rig,
    trace: &Trace,
    setup: &Setup,
    enough: &Run,
    mut tell: impl FnMut(u64, bool),
) -> Outcome<(u64, Run)> {
    let setup = Setup {
        touch: false,
        probe: false,
        ..setup.clone()
    };
    let unit = rig.device.info().granularity;
    let (mut low, mut high) = (trace.peak, enough.reserved.max(unit));
    let mut best = enough.clone();
    while high.saturating_sub(low) > (trace.peak / 1000).max(unit) {
        let middle = low + (high - low) / 2;
        let tried = run(rig, trace, &setup, Some(middle), &mut Unwatched)?;
        tell(middle, tried.oom.is_none());
        match tried.oom {
            Some(_) => low = middle,
            None => (high, best) = (middle, tried),
        }
    }
    Ok((high, best))
}
