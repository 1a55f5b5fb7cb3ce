//! What the tests share: devices behind a fault and a record wrapper, patterns, and a look at what
//! is left at the end.

use std::sync::{Arc, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use granule::driver::cuda::CudaDriver;
use granule::driver::fault::FaultDriver;
use granule::driver::host::{HostConfig, HostDriver};
use granule::driver::record::{Counts, RecordDriver};
use granule::driver::sim::{SimConfig, SimDriver};
use granule::driver::{Access, Call, GranuleProps, Kernel, PhysId, SharedDriver, StreamId};
use granule::units::{MIB, Va, VaRange};
use granule::{Arena, Device, Pool, PoolConfig, PoolStats};

/// How long a test waits for what must happen.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The driver that a test runs on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum On {
    Sim,
    Host,
    Cuda,
}

/// Lists each test once a driver, by name.
#[macro_export]
macro_rules! on_each_driver {
    ($($name:ident)+) => {
        mod sim {
            $(#[test] fn $name() { super::$name($crate::support::On::Sim); })+
        }
        mod host {
            $(#[test] fn $name() { super::$name($crate::support::On::Host); })+
        }
        mod cuda {
            $(
                #[test]
                #[ignore = "needs a CUDA device; run with --include-ignored"]
                fn $name() { super::$name($crate::support::On::Cuda); }
            )+
        }
    };
}

static CUDA: OnceLock<CudaDriver> = OnceLock::new();

/// A device of its own for one test: record wrapper, fault wrapper, driver.
pub struct Rig {
    pub device: Device,
    pub fault: Arc<FaultDriver>,
    pub record: Arc<RecordDriver>,
    pub inner: SharedDriver,
    scratch: VaRange,
    scratch_granule: PhysId,
    before: Left,
    _turn: Option<MutexGuard<'static, ()>>,
}

/// What exists in a driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Left {
    pub granules: usize,
    pub mappings: usize,
    pub reservations: usize,
    pub streams: usize,
    pub events: usize,
}

impl Rig {
    pub fn new(on: On) -> Self {
        let turn = (on == On::Cuda).then(|| {
            crate::CUDA_TURN
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        });
        let inner: SharedDriver = match on {
            On::Sim => Arc::new(SimDriver::new(SimConfig::default()).unwrap()),
            On::Host => Arc::new(HostDriver::new(HostConfig::default()).unwrap()),
            On::Cuda => {
                // The context is kept alive between tests: making one takes a third of a second.
                let kept = CUDA.get_or_init(|| CudaDriver::open(0).unwrap());
                Arc::new(CudaDriver::open(kept.ordinal()).unwrap())
            }
        };
        Self::over(inner, turn)
    }

    /// As [`new`](Self::new), but the simulated device looks for races.
    pub fn racing(on: On) -> Self {
        let config = SimConfig {
            races: true,
            ..SimConfig::default()
        };
        match on {
            On::Sim => Self::over(Arc::new(SimDriver::new(config).unwrap()), None),
            other => Self::new(other),
        }
    }

    /// A device of any driver, behind the wrappers.
    pub fn around(inner: SharedDriver) -> Self {
        Self::over(inner, None)
    }

    /// Asserts that no two accesses were without an order, as far as the device looks at that.
    #[track_caller]
    pub fn assert_no_races(&self) {
        let sim = self.inner.as_any().downcast_ref::<SimDriver>();
        let races = sim.map(SimDriver::races).unwrap_or_default();
        assert!(races.is_empty(), "{races:?}");
    }

    fn over(inner: SharedDriver, turn: Option<MutexGuard<'static, ()>>) -> Self {
        let unit = inner.info().granularity;
        let scratch = inner.reserve(unit, 0).unwrap();
        let scratch_granule = inner.create(unit, GranuleProps::default()).unwrap();
        inner.map(scratch, scratch_granule).unwrap();
        inner.set_access(scratch, Access::ReadWrite).unwrap();
        let fault = Arc::new(FaultDriver::new(inner.clone()));
        let record = Arc::new(RecordDriver::new(fault.clone()));
        let before = left(&inner);
        Self {
            device: Device::from_driver(record.clone()),
            fault,
            record,
            inner,
            scratch,
            scratch_granule,
            before,
            _turn: turn,
        }
    }

    pub fn pool(&self, config: PoolConfig) -> Pool {
        Pool::new(&self.device, config).unwrap()
    }

    /// Whether bytes can be looked at.
    pub fn has_data(&self) -> bool {
        self.inner.info().capabilities.data
    }

    pub fn counts(&self) -> Counts {
        self.record.snapshot()
    }

    /// Calls of one kind since `before`.
    pub fn calls(&self, before: &Counts, call: Call) -> u64 {
        self.counts().since(before).of(call).calls
    }

    /// Asserts that `run` makes no driver call, and answers what it answers.
    #[track_caller]
    pub fn without_calls<T>(&self, run: impl FnOnce() -> T) -> T {
        let before = self.counts();
        let answer = run();
        let made: Vec<_> = self.counts().since(&before).iter().collect();
        assert!(made.is_empty(), "driver calls were made: {made:?}");
        answer
    }

    /// Writes a pattern at the start of each half mebibyte, and waits. On sim it only shows that
    /// the bytes can be written.
    #[track_caller]
    pub fn write(&self, range: VaRange, seed: u64) {
        for (piece, offset) in samples(range) {
            let seed = seed.wrapping_add(offset);
            let kernel = Kernel::WritePattern { range: piece, seed };
            self.inner.launch(kernel, StreamId::DEFAULT).unwrap();
        }
        self.inner.sync_stream(StreamId::DEFAULT).unwrap();
    }

    /// Asserts that the pattern is still there; on sim, that the bytes can be read.
    #[track_caller]
    pub fn check(&self, range: VaRange, seed: u64) {
        self.probe(range, |piece, offset, sink| Kernel::CheckPattern {
            range: piece,
            seed: seed.wrapping_add(offset),
            mismatches: sink,
        })
        .unwrap_or_else(|n| panic!("{n} words in {range} differ from pattern {seed}"));
    }

    /// Asserts that the samples are zero, where bytes can be looked at.
    #[track_caller]
    pub fn check_zero(&self, range: VaRange) {
        self.probe(range, |piece, _, sink| Kernel::ReadSum {
            range: piece,
            passes: 1,
            sink,
        })
        .unwrap_or_else(|n| panic!("{range} does not read zero: sum {n}"));
    }

    /// Runs a kernel on each sample that adds to a word; the word if it is not zero.
    #[track_caller]
    fn probe(
        &self,
        range: VaRange,
        kernel: impl Fn(VaRange, u64, Va) -> Kernel,
    ) -> Result<(), u64> {
        let sink = self.scratch.sub(0, 8).unwrap();
        self.inner.fill(sink, 0, StreamId::DEFAULT).unwrap();
        for (piece, offset) in samples(range) {
            let kernel = kernel(piece, offset, self.scratch.start());
            self.inner.launch(kernel, StreamId::DEFAULT).unwrap();
        }
        self.inner.sync_stream(StreamId::DEFAULT).unwrap();
        match self.has_data().then(|| self.word()) {
            None | Some(0) => Ok(()),
            Some(sum) => Err(sum),
        }
    }

    fn word(&self) -> u64 {
        let mut word = [0; 8];
        let source = self.scratch.sub(0, 8).unwrap();
        let copied = self
            .inner
            .copy_to_host(&mut word, source, StreamId::DEFAULT);
        copied.unwrap();
        u64::from_ne_bytes(word)
    }

    /// What exists now besides the rig's own.
    pub fn left(&self) -> Left {
        let now = left(&self.inner);
        let b = self.before;
        Left {
            granules: now.granules - b.granules,
            mappings: now.mappings - b.mappings,
            reservations: now.reservations - b.reservations,
            streams: now.streams - b.streams,
            events: now.events - b.events,
        }
    }

    /// Asserts that the device lives and that all was given back; a look-ahead worker may need a
    /// moment for that.
    #[track_caller]
    pub fn assert_nothing_left(&self) {
        self.fault.clear();
        assert!(!self.is_lost(), "the device was lost");
        let nothing = Left {
            granules: 0,
            mappings: 0,
            reservations: 0,
            streams: 0,
            events: 0,
        };
        let mut quarantined = self.device.sweep();
        eventually(|| {
            quarantined = self.device.sweep();
            quarantined == 0 && self.left() == nothing && self.device.reserved_addresses() == 0
        })
        .unwrap_or_else(|()| panic!("left: {:?}, quarantined: {quarantined}", self.left()));
    }

    pub fn is_lost(&self) -> bool {
        let any = self.inner.as_any();
        any.downcast_ref::<SimDriver>()
            .is_some_and(SimDriver::is_lost)
            || any
                .downcast_ref::<HostDriver>()
                .is_some_and(HostDriver::is_lost)
            || self.inner.memory_info().is_err()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let unmapped = self.inner.unmap(self.scratch);
        let released = self.inner.release(self.scratch_granule);
        let freed = self.inner.free_reservation(self.scratch);
        if !std::thread::panicking() {
            unmapped.and(released).and(freed).unwrap();
        }
    }
}

/// A few words in each half mebibyte, with their offset.
fn samples(range: VaRange) -> impl Iterator<Item = (VaRange, u64)> {
    let starts = (0..range.len()).step_by(1 << 19);
    starts.filter_map(move |offset| Some((range.sub(offset, 64)?, offset)))
}

fn left(driver: &SharedDriver) -> Left {
    let any = driver.as_any();
    if let Some(sim) = any.downcast_ref::<SimDriver>() {
        let live = sim.live();
        return Left {
            granules: live.granules,
            mappings: live.mappings,
            reservations: live.reservations,
            streams: live.streams,
            events: live.events,
        };
    }
    if let Some(host) = any.downcast_ref::<HostDriver>() {
        let live = host.live();
        return Left {
            granules: live.granules,
            mappings: live.mappings,
            reservations: live.reservations,
            streams: live.streams,
            events: live.events,
        };
    }
    let live = any.downcast_ref::<CudaDriver>().map(CudaDriver::live);
    let live = live.unwrap_or_default();
    Left {
        granules: live.granules,
        mappings: live.mappings,
        reservations: live.reservations,
        streams: live.streams,
        events: live.events,
    }
}

/// Waits until `is_so`, with a deadline.
pub fn eventually(mut is_so: impl FnMut() -> bool) -> Result<(), ()> {
    let start = Instant::now();
    while !is_so() {
        if start.elapsed() > PATIENCE {
            return Err(());
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

/// Recounts, checks the identities, and answers the figures.
#[track_caller]
pub fn audit(pool: &Pool) -> PoolStats {
    let stats = pool.audit().unwrap();
    assert!(stats.is_consistent(), "{stats:?}");
    stats
}

/// Asserts that the extents of an arena lie side by side from its base on and cover its length.
#[track_caller]
pub fn check_extents(arena: &Arena) {
    let mut end = 0;
    for extent in arena.ranges() {
        assert_eq!(extent.offset, end);
        assert_eq!(extent.range.start().get(), arena.base().get() + end);
        end += extent.range.len();
    }
    assert!(end >= arena.len() && end <= arena.mapped());
}

/// A dynamic pool of small granules, so that little memory makes many mappings.
pub fn small_granules(budget: u64) -> PoolConfig {
    PoolConfig {
        largest_granule: 16 * MIB,
        ..PoolConfig::with_budget(budget).granule(8 * MIB)
    }
}

/// The first `len` bytes of an arena.
#[track_caller]
pub fn head(arena: &Arena, len: u64) -> VaRange {
    VaRange::new(arena.base(), len).unwrap()
}
