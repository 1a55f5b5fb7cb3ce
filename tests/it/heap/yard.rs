//! A device with streams and check words, for tests that look at what blocks hold.

use granule::driver::{Kernel, StreamId};
use granule::units::{MIB, Va, VaRange};
use granule::{Arena, Block, Heap, HeapConfig, Pool, PoolConfig, Stream};

use crate::support::{On, Rig};

/// Words that kernels count mismatches in, one for each stream.
pub struct Words {
    arena: Arena,
    base: Va,
}

/// How many streams have a word.
const STREAMS: usize = 64;

impl Words {
    pub fn new(rig: &Rig) -> Self {
        let pool = rig.pool(PoolConfig::with_budget(2 * MIB).granule(2 * MIB));
        let arena = Arena::new(&pool, 2 * MIB).unwrap();
        arena.grow(2 * MIB).unwrap();
        let base = arena.base();
        let all = VaRange::new(base, 8 * STREAMS as u64).unwrap();
        rig.inner.fill(all, 0, StreamId::DEFAULT).unwrap();
        rig.inner.sync_stream(StreamId::DEFAULT).unwrap();
        Self { arena, base }
    }

    /// The word of a stream, by number.
    pub fn of(&self, stream: usize) -> Va {
        assert!(stream < STREAMS);
        VaRange::new(self.base, self.arena.len())
            .and_then(|all| all.sub(8 * stream as u64, 8))
            .unwrap()
            .start()
    }

    /// Asserts that no check has failed; every stream must have been waited for.
    #[track_caller]
    pub fn assert_zero(&self, rig: &Rig) {
        if !rig.has_data() {
            return;
        }
        for stream in 0..STREAMS {
            let mut word = [0; 8];
            let range = VaRange::new(self.of(stream), 8).unwrap();
            let copied = rig.inner.copy_to_host(&mut word, range, StreamId::DEFAULT);
            copied.unwrap();
            let mismatches = u64::from_ne_bytes(word);
            assert_eq!(mismatches, 0, "words that differ, checked on {stream}");
        }
    }
}

/// The parts of a range that kernels look at: all of it on sim, where that costs nothing.
fn parts(rig: &Rig, range: VaRange) -> Vec<VaRange> {
    let len = range.len() & !7;
    if !rig.has_data() {
        return range
            .sub(0, len)
            .into_iter()
            .filter(|r| !r.is_empty())
            .collect();
    }
    let starts = (0..len).step_by(MIB as usize);
    let last = len.saturating_sub(64) & !63;
    let last = (!last.is_multiple_of(MIB)).then_some(last);
    let parts = starts.chain(last);
    parts
        .filter_map(|at| range.sub(at, 64.min(len - at)))
        .collect()
}

/// Queues the writing of a pattern.
pub fn write(rig: &Rig, range: VaRange, seed: u64, stream: &Stream) {
    for range in parts(rig, range) {
        let offset = range.start().get();
        let seed = seed ^ offset;
        let kernel = Kernel::WritePattern { range, seed };
        rig.inner.launch(kernel, stream.id()).unwrap();
    }
}

/// Queues a check that the pattern is there; mismatches are added to a word.
pub fn check(rig: &Rig, range: VaRange, seed: u64, stream: &Stream, mismatches: Va) {
    for range in parts(rig, range) {
        let seed = seed ^ range.start().get();
        let kernel = Kernel::CheckPattern {
            range,
            seed,
            mismatches,
        };
        rig.inner.launch(kernel, stream.id()).unwrap();
    }
}

/// A rig, a pool of that budget, a heap on it, and some streams.
pub struct Yard {
    pub streams: Vec<Stream>,
    pub heap: Heap,
    pub pool: Pool,
    pub words: Words,
    pub rig: Rig,
}

impl Yard {
    pub fn new(on: On, budget: u64, config: HeapConfig, streams: usize) -> Self {
        Self::on(Rig::racing(on), budget, config, streams)
    }

    pub fn on(rig: Rig, budget: u64, config: HeapConfig, streams: usize) -> Self {
        let words = Words::new(&rig);
        let pool = rig.pool(PoolConfig::with_budget(budget));
        let heap = Heap::new(&pool, config).unwrap();
        let streams = (0..streams)
            .map(|_| rig.device.create_stream().unwrap())
            .collect();
        Self {
            streams,
            heap,
            pool,
            words,
            rig,
        }
    }

    /// A stream that another library makes with the driver.
    pub fn adopt(&self) -> (StreamId, Stream) {
        let id = self.rig.inner.create_stream().unwrap();
        let stream = self.rig.device.foreign_stream(id).unwrap();
        assert_eq!(self.rig.device.foreign_stream(id).unwrap(), stream);
        (id, stream)
    }

    #[track_caller]
    pub fn alloc(&self, size: u64, stream: usize) -> Block {
        self.heap.alloc(size, &self.streams[stream]).unwrap()
    }

    /// A block with a pattern, written on its stream.
    #[track_caller]
    pub fn filled(&self, size: u64, stream: usize, seed: u64) -> Block {
        let block = self.alloc(size, stream);
        self.write(&block, seed, stream);
        block
    }

    pub fn write(&self, block: &Block, seed: u64, stream: usize) {
        write(&self.rig, block.range(), seed, &self.streams[stream]);
    }

    /// Queues a check on a stream.
    pub fn check(&self, block: &Block, seed: u64, stream: usize) {
        let word = self.words.of(stream);
        check(&self.rig, block.range(), seed, &self.streams[stream], word);
    }

    /// Makes one stream wait for another, without the heap's knowing.
    pub fn order(&self, first: usize, then: usize) {
        let event = self.rig.inner.create_event().unwrap();
        let (first, then) = (self.streams[first].id(), self.streams[then].id());
        self.rig.inner.record_event(event, first).unwrap();
        self.rig.inner.wait_event(then, event).unwrap();
        self.rig.inner.destroy_event(event).unwrap();
    }

    /// Waits for all streams.
    pub fn sync(&self) {
        for stream in &self.streams {
            self.rig.inner.sync_stream(stream.id()).unwrap();
        }
    }

    /// The books of heap and pool agree with a recount.
    #[track_caller]
    pub fn audit(&self) {
        audit(&self.heap);
        crate::support::audit(&self.pool);
    }

    /// Waits for all work, looks at what it found, drops everything, and asserts that nothing is
    /// left.
    #[track_caller]
    pub fn end(self) {
        self.rig.fault.clear();
        self.sync();
        self.words.assert_zero(&self.rig);
        self.rig.assert_no_races();
        let Self {
            streams,
            heap,
            pool,
            words,
            rig,
        } = self;
        drop((heap, pool, words, streams));
        rig.assert_nothing_left();
    }
}

/// Recounts a heap and checks that its figures fit each other.
#[track_caller]
pub fn audit(heap: &Heap) -> granule::HeapStats {
    let s = heap.audit().unwrap();
    assert!(s.is_consistent(), "{s:?}");
    s
}
