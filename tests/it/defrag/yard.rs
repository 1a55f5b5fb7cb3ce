//! A heap of movable blocks with known contents.

use granule::defrag::{Age, MovableBlock, MovableConfig, MovableHeap};
use granule::driver::cost::CostTable;
use granule::driver::{Driver, Kernel};
use granule::units::{MIB, VaRange};
use granule::{Pool, PoolConfig, Stream};

use crate::support::{On, PATIENCE, Rig, audit};

/// Small enough for the host driver.
pub const UNIT: u64 = 2 * MIB;

pub struct Yard {
    pub heap: MovableHeap,
    pub pool: Pool,
    pub stream: Stream,
    pub other: Stream,
    pub blocks: Vec<(MovableBlock, u64)>,
    pub rig: Rig,
}

pub fn config() -> MovableConfig {
    MovableConfig {
        granule: UNIT,
        addresses: 48 * UNIT,
        wait: PATIENCE,
        ..MovableConfig::known(CostTable::default())
    }
}

impl Yard {
    /// A heap without memory, over a pool of so many granules.
    pub fn new(on: On, granules: u64, config: MovableConfig) -> Self {
        let rig = Rig::racing(on);
        let pool = rig.pool(PoolConfig {
            watermark: Some(u64::MAX),
            ..PoolConfig::with_budget(granules * UNIT).granule(UNIT)
        });
        let heap = MovableHeap::new(&pool, config).unwrap();
        let stream = rig.device.create_stream().unwrap();
        let other = rig.device.create_stream().unwrap();
        Self {
            heap,
            pool,
            stream,
            other,
            blocks: Vec::new(),
            rig,
        }
    }

    /// All granules full of blocks of that size, every other one of which goes again.
    pub fn halved(on: On, granules: u64, size: u64, config: MovableConfig) -> Self {
        let mut yard = Self::new(on, granules, config);
        yard.heap.grow(granules * UNIT, &yard.stream).unwrap();
        let n = granules * UNIT / size;
        let all: Vec<_> = (0..n)
            .map(|_| yard.heap.alloc_aged(size, Age::Old, &yard.stream).unwrap())
            .collect();
        let kept = all.into_iter().step_by(2).enumerate();
        yard.blocks = kept.map(|(i, block)| (block, i as u64 + 1)).collect();
        for (block, seed) in &yard.blocks {
            yard.write(block, *seed, &yard.stream);
        }
        yard
    }

    /// Writes the pattern to all of a block, in the stream's order.
    pub fn write(&self, block: &MovableBlock, seed: u64, stream: &Stream) {
        let guard = block.access(stream).unwrap();
        let range = words(guard.range());
        let kernel = Kernel::WritePattern { range, seed };
        self.rig.inner.launch(kernel, stream.id()).unwrap();
    }

    /// Lets all work end.
    pub fn quiet(&self) {
        self.stream.synchronize().unwrap();
        self.other.synchronize().unwrap();
    }

    /// Every byte of every block, in the order of a stream.
    #[track_caller]
    pub fn look(&self, stream: &Stream) {
        for (block, seed) in &self.blocks {
            let guard = block.access(stream).unwrap();
            self.check(words(guard.range()), *seed, stream);
        }
    }

    #[track_caller]
    pub fn check(&self, range: VaRange, seed: u64, stream: &Stream) {
        if self.rig.has_data() {
            let mut bytes = vec![0; range.len() as usize];
            let read = self.rig.inner.copy_to_host(&mut bytes, range, stream.id());
            read.unwrap();
            let wrong = bytes.chunks(8).zip(0..).filter(|(word, i)| {
                **word != granule::driver::pattern_word(seed, *i).to_ne_bytes()
            });
            assert_eq!(
                wrong.count(),
                0,
                "words of pattern {seed} in {range} differ"
            );
        } else {
            let driver: &dyn Driver = &*self.rig.inner;
            let sink = range.start();
            let rest = range.sub(8, range.len() - 8).unwrap();
            let kernel = Kernel::ReadSum {
                range: rest,
                passes: 1,
                sink,
            };
            driver.launch(kernel, stream.id()).unwrap();
        }
    }

    #[track_caller]
    pub fn audit(&self) {
        self.heap.audit().unwrap();
        let stats = self.heap.stats();
        assert_eq!(stats.mapped, stats.live + stats.free, "{stats:?}");
        audit(&self.pool);
    }

    /// Everything holds what it should, and nothing is left.
    #[track_caller]
    pub fn end(mut self) {
        self.rig.fault.clear();
        self.quiet();
        self.look(&self.stream);
        self.audit();
        self.blocks.clear();
        self.audit();
        self.stream.synchronize().unwrap();
        self.other.synchronize().unwrap();
        self.rig.assert_no_races();
        drop((self.heap, self.pool, self.stream, self.other));
        self.rig.assert_nothing_left();
    }
}

pub fn words(range: VaRange) -> VaRange {
    range.sub(0, range.len() / 8 * 8).unwrap()
}
