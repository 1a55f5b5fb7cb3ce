//! Fragmented heaps of movable blocks with known contents: for the bench and the example that make
//! free memory contiguous in them.

use std::time::{Duration, Instant};

use granule::defrag::{Age, MovableBlock, MovableConfig, MovableHeap, Report, Strategy};
use granule::driver::Kernel;
use granule::driver::cost::CostTable;
use granule::driver::sim::SimDriver;
use granule::units::{MIB, VaRange};
use granule::{Device, Policy, Pool, PoolConfig, Stream, Tensor};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Which pieces are live.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pattern {
    /// Spread evenly; at half occupancy every other one.
    Even,
    /// Shuffled by a seed.
    Random(u64),
}

/// What a heap is to look like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Bytes of a piece.
    pub piece: u64,
    /// Bytes of a granule; a multiple or a part of the piece.
    pub granule: u64,
    /// How many pieces fill it.
    pub pieces: u64,
    /// Live pieces in thousandths.
    pub permille: u64,
    /// Which.
    pub pattern: Pattern,
}

impl Layout {
    /// Granules as large as the pieces, half of them free, every other one.
    pub fn halved(piece: u64, pieces: u64) -> Self {
        Self {
            piece,
            granule: piece,
            pieces,
            permille: 500,
            pattern: Pattern::Even,
        }
    }

    /// Bytes that it fills.
    pub fn bytes(&self) -> u64 {
        self.piece * self.pieces
    }

    /// Which pieces are live.
    pub fn live(&self) -> Vec<bool> {
        let before = |i: u64| (i * self.permille).div_ceil(1000);
        let mut live: Vec<bool> = (0..self.pieces)
            .map(|i| before(i + 1) > before(i))
            .collect();
        if let Pattern::Random(seed) = self.pattern {
            for i in (1..live.len()).rev() {
                let word = granule::driver::pattern_word(seed, i as u64);
                live.swap(i, (word % (i as u64 + 1)) as usize);
            }
        }
        live
    }

    /// The pieces with their hints in an order in which each gets its place: young ones, the upper
    /// half, are placed from the high end.
    fn order(&self) -> impl Iterator<Item = (u64, Age)> {
        let half = self.pieces / 2;
        let old = (0..half).map(|i| (i, Age::Old));
        old.chain((half..self.pieces).rev().map(|i| (i, Age::Young)))
    }

    /// What is asked for: as many pieces as the largest power of two that are free. (A power of two
    /// because a buddy system cannot give anything else.)
    pub fn want(&self) -> u64 {
        let free = self.live().iter().filter(|live| !**live).count() as u64;
        match free.checked_ilog2() {
            Some(log) => self.piece << log,
            None => 0,
        }
    }
}

/// A pool of granules that keeps all it ever created.
pub fn pool(device: &Device, budget: u64, granule: u64) -> Outcome<Pool> {
    let config = PoolConfig {
        watermark: Some(u64::MAX),
        policy: Policy::Hybrid { base: 0 },
        ..PoolConfig::with_budget(budget).granule(granule)
    };
    Ok(Pool::new(device, config)?)
}

/// Checks of device memory by kernels on one stream.
pub struct Checker {
    counter: Tensor<u64>,
    stream: Stream,
}

impl Checker {
    /// Takes one smallest granule.
    pub fn new(stream: &Stream) -> Outcome<Self> {
        let device = stream.device();
        let unit = device.info().granularity;
        let own = Pool::new(device, PoolConfig::with_budget(unit).granule(unit))?;
        let mut counter = Tensor::new(&own, &[], 1)?;
        counter.grow_zeroed(1, stream)?;
        Ok(Self {
            counter,
            stream: stream.clone(),
        })
    }

    /// A word that kernels may add to.
    pub fn sink(&self) -> granule::units::Va {
        self.counter.ptr()
    }

    /// Queues a write of a pattern.
    pub fn write(&self, range: VaRange, seed: u64) -> Outcome {
        let kernel = Kernel::WritePattern { range, seed };
        Ok(self
            .stream
            .device()
            .driver()
            .launch(kernel, self.stream.id())?)
    }

    /// Queues a check of it.
    pub fn check(&self, range: VaRange, seed: u64) -> Outcome {
        if !self.stream.device().info().capabilities.data {
            return Ok(());
        }
        let kernel = Kernel::CheckPattern {
            range,
            seed,
            mismatches: self.counter.ptr(),
        };
        Ok(self
            .stream
            .device()
            .driver()
            .launch(kernel, self.stream.id())?)
    }

    /// Words that differed in all checks so far. Waits for the stream.
    pub fn mismatches(&mut self) -> Outcome<u64> {
        let mut count = [0];
        if self.stream.device().info().capabilities.data {
            self.counter.copy_to_host(0, &mut count, &self.stream)?;
        } else {
            self.stream.synchronize()?;
        }
        Ok(count[0])
    }
}

/// A fragmented heap, with a pattern in each live block.
pub struct Scene {
    pub heap: MovableHeap,
    pub blocks: Vec<(MovableBlock, u64)>,
    pub want: u64,
    stream: Stream,
}

/// What came of asking for one large block.
pub struct Sample {
    /// Until the call came back.
    pub host: Duration,
    /// Until the device had got there too.
    pub usable: Duration,
    /// Unmapping of old addresses afterwards.
    pub later: Duration,
    pub report: Report,
    pub driver_calls: u64,
}

impl Scene {
    /// Fragments a new heap over granules of `pool` as the layout says. `lazy` says that a lazy pass
    /// is due at once.
    pub fn build(
        pool: &Pool,
        stream: &Stream,
        layout: &Layout,
        table: &CostTable,
        checker: &Checker,
    ) -> Outcome<Self> {
        let config = MovableConfig {
            granule: layout.granule,
            addresses: layout.bytes().max(layout.granule) * 4,
            lazy: granule::defrag::Lazy {
                // The last pass is never long ago here, and the interval is not what is looked at.
                interval: Duration::ZERO,
                ..granule::defrag::Lazy::default()
            },
            ..MovableConfig::known(table.clone())
        };
        let heap = MovableHeap::new(pool, config)?;
        heap.grow(layout.bytes(), stream)?;
        let live = layout.live();
        let mut all = Vec::with_capacity(live.len());
        for (i, age) in layout.order() {
            all.push((i, heap.alloc_aged(layout.piece, age, stream)?));
        }
        let mut blocks = Vec::new();
        for (i, block) in all {
            if live[i as usize] {
                checker.write(block.access(stream)?.range(), i + 1)?;
                blocks.push((block, i + 1));
            }
        }
        stream.synchronize()?;
        Ok(Self {
            heap,
            blocks,
            want: layout.want(),
            stream: stream.clone(),
        })
    }

    /// A scene from a heap that was fragmented some other way.
    pub fn of(
        heap: MovableHeap,
        blocks: Vec<MovableBlock>,
        want: u64,
        stream: &Stream,
        checker: &Checker,
    ) -> Outcome<Self> {
        let blocks: Vec<(MovableBlock, u64)> = blocks.into_iter().zip(1..).collect();
        for (block, seed) in &blocks {
            let guard = block.access(stream)?;
            if let Some(words) = words(guard.range()) {
                checker.write(words, *seed)?;
            }
        }
        stream.synchronize()?;
        Ok(Self {
            heap,
            blocks,
            want,
            stream: stream.clone(),
        })
    }

    /// Asks for the block, times it, writes to all of it, and checks every live byte.
    pub fn ask(
        &self,
        strategy: Strategy,
        checker: &mut Checker,
        calls: &dyn Fn() -> u64,
    ) -> Outcome<Sample> {
        let before = calls();
        let clock = Clock::start(self.stream.device());
        let made = self
            .heap
            .alloc_by(strategy, self.want, Age::Old, &self.stream);
        let host = clock.elapsed();
        self.stream.synchronize()?;
        let usable = clock.elapsed();
        // Without the synchronization just made.
        let driver_calls = (calls() - before).saturating_sub(1);
        let (block, report) = made?;
        let report = report.ok_or("nothing was fragmented")?;
        // The sim's clock stands still while the host plans.
        let planning = match clock.is_real() {
            true => Duration::ZERO,
            false => report.planning,
        };
        let [host, usable] = [host, usable].map(|time| time + planning);
        let clock = Clock::start(self.stream.device());
        self.heap.settle()?;
        let later = clock.elapsed();
        {
            let guard = block.access(&self.stream)?;
            let words = words(guard.range()).ok_or("an empty block")?;
            checker.write(words, u64::MAX)?;
            checker.check(words, u64::MAX)?;
        }
        self.verify(checker)?;
        self.heap.audit()?;
        Ok(Sample {
            host,
            usable,
            later,
            report,
            driver_calls,
        })
    }

    /// Every byte of every live block.
    pub fn verify(&self, checker: &mut Checker) -> Outcome {
        for (block, seed) in &self.blocks {
            let guard = block.access(&self.stream)?;
            if let Some(words) = words(guard.range()) {
                checker.check(words, *seed)?;
            }
        }
        match checker.mismatches()? {
            0 => Ok(()),
            wrong => Err(format!("{wrong} words differ").into()),
        }
    }
}

/// Real time, or the sim's.
enum Clock<'a> {
    Real(Instant),
    Sim(&'a SimDriver, Duration),
}

impl<'a> Clock<'a> {
    fn start(device: &'a Device) -> Self {
        match device.driver().as_any().downcast_ref::<SimDriver>() {
            Some(sim) => Self::Sim(sim, sim.now().into()),
            None => Self::Real(Instant::now()),
        }
    }

    fn elapsed(&self) -> Duration {
        match self {
            Self::Real(start) => start.elapsed(),
            Self::Sim(sim, start) => Duration::from(sim.now()).saturating_sub(*start),
        }
    }

    fn is_real(&self) -> bool {
        matches!(self, Self::Real(_))
    }
}

/// The whole words of a range.
fn words(range: VaRange) -> Option<VaRange> {
    range.sub(0, range.len() / 8 * 8).filter(|r| !r.is_empty())
}

/// Makes the first free run again what it was: blocks everywhere, then every other one goes.
pub fn fragment_again(
    heap: &MovableHeap,
    stream: &Stream,
    piece: u64,
    blocks: &mut Vec<MovableBlock>,
) -> Outcome {
    while heap.stats().largest_free >= piece {
        blocks.push(heap.alloc_aged(piece, Age::Old, stream)?);
    }
    let mut placed = Vec::with_capacity(blocks.len());
    for block in blocks.drain(..) {
        let at = block.pin()?.range().start();
        placed.push((at, block));
    }
    placed.sort_by_key(|(at, _)| *at);
    let kept = placed.into_iter().step_by(2).map(|(_, block)| block);
    *blocks = kept.collect();
    Ok(())
}

/// A size that is small enough for a test run.
pub const SMALL: u64 = 2 * MIB;
