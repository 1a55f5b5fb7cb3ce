//! Random programs over two heaps and an arena on one pool, with several streams, held work, a tight
//! budget and failing driver calls.
//!
//! The model is naive: which blocks live where, what each holds, and which streams have used it. The
//! program orders its own uses of a block as a correct program must, and leaves to the heap what the
//! heap promises.

use std::time::Duration;

use granule::driver::{DriverCode, Graph, Hold, Kernel};
use granule::units::{KIB, MIB, VaRange};
use granule::{Arena, Block, CaptureScope, Heap, HeapConfig, Rounding};
use proptest::prelude::*;

use super::yard::{Yard, audit, check, write};
use crate::support::{On, eventually};

const STREAMS: usize = 3;
/// The stream that graphs are captured and replayed on.
const CAPTURED: usize = STREAMS;
/// Graphs that are kept.
const GRAPHS: usize = 4;
const CODES: [DriverCode; 3] = [
    DriverCode::UNKNOWN,
    DriverCode::OUT_OF_MEMORY,
    DriverCode(12345),
];

#[derive(Clone, Debug)]
enum Step {
    Alloc {
        heap: usize,
        stream: usize,
        size: u64,
        align: u32,
    },
    Free(usize),
    FreeOn(usize, usize),
    FreeRaw(usize),
    /// Writes or checks a block on a stream; how the use is announced.
    Use(usize, usize, bool, Announce),
    Copy(usize, usize, usize),
    Hold(usize),
    Release(usize),
    Sync,
    Trim(usize),
    PoolTrim,
    Arena(u64),
    /// Captures work over blocks of so many bytes in the first heap's scope; another allocation happens
    /// meanwhile.
    Capture(Vec<u64>, u64),
    Replay(usize),
    EndScope,
    Fail(u64, usize),
    Clear,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Announce {
    Before,
    After,
    Fence,
}

struct Live {
    block: Block,
    heap: usize,
    own: usize,
    seed: Option<u64>,
    /// Other streams that have used it.
    users: Vec<usize>,
}

/// What a case runs on.
#[derive(Clone, Debug)]
struct Setting {
    budget: u64,
    aliases: usize,
    rounding: Rounding,
    small: u64,
    wait_us: u64,
    zero: bool,
    addresses: u64,
}

struct World {
    yard: Yard,
    heaps: Vec<Heap>,
    arena: Arena,
    live: Vec<Live>,
    holds: Vec<Vec<Hold>>,
    scope: Option<CaptureScope>,
    /// Graphs over the scope's memory, and a block of each that is still alive.
    graphs: Vec<(Graph, Option<Block>)>,
    seed: u64,
}

/// Whether blocks of that size are given a name.
fn is_named(size: u64) -> bool {
    size > 0 && size.is_multiple_of(3)
}

impl World {
    fn new(on: On, setting: &Setting) -> Self {
        let config = HeapConfig {
            aliases: setting.aliases,
            rounding: setting.rounding,
            small: setting.small,
            wait: Duration::from_micros(setting.wait_us),
            granule_max: 16 * MIB,
            addresses: Some(setting.addresses),
            granule_min: 4 * MIB,
            ..HeapConfig::default()
        };
        let mut yard = Yard::new(on, setting.budget, config.clone(), STREAMS + 1);
        yard.pool = yard.rig.pool(granule::PoolConfig {
            wait: Duration::ZERO,
            zero_on_handover: setting.zero,
            ..granule::PoolConfig::with_budget(setting.budget).granule(2 * MIB)
        });
        yard.heap = Heap::new(&yard.pool, config.clone()).unwrap();
        // Code of kernels is loaded by the first launch, which is no work to capture.
        let (spin, id) = (Kernel::Spin { nanos: 1_000 }, yard.streams[CAPTURED].id());
        yard.rig.inner.launch(spin, id).unwrap();
        let limited = HeapConfig {
            limit: Some(setting.budget / 2),
            ..config
        };
        let heaps = vec![yard.heap.clone(), Heap::new(&yard.pool, limited).unwrap()];
        Self {
            arena: Arena::new(&yard.pool, 4 * setting.budget).unwrap(),
            yard,
            heaps,
            live: Vec::new(),
            holds: (0..STREAMS).map(|_| Vec::new()).collect(),
            scope: None,
            graphs: Vec::new(),
            seed: 1,
        }
    }

    fn pick(&self, at: usize) -> Option<usize> {
        (!self.live.is_empty()).then(|| at % self.live.len())
    }

    /// Makes a stream wait for everybody who used a block.
    fn order(&self, at: usize, stream: usize) {
        let one = &self.live[at];
        for &user in one.users.iter().chain([&one.own]) {
            if user != stream {
                self.yard.order(user, stream);
            }
        }
    }

    fn announce(&mut self, at: usize, stream: usize, how: Announce) {
        let one = &mut self.live[at];
        if stream == one.own {
            return;
        }
        let on = &self.yard.streams[stream];
        // A fence may be refused, the announcement of a stream may not.
        let fenced = match how {
            Announce::Fence => on.fence().and_then(|f| one.block.record_fence(&f)).is_ok(),
            _ => false,
        };
        if !fenced {
            one.block.record_use(on).unwrap();
        }
        if !one.users.contains(&stream) {
            one.users.push(stream);
        }
    }

    fn touch(&mut self, at: usize, stream: usize, writes: bool, how: Announce) {
        self.order(at, stream);
        if how == Announce::Before {
            self.announce(at, stream, how);
        }
        let rig = &self.yard.rig;
        let one = &mut self.live[at];
        let on = &self.yard.streams[stream];
        match (writes, one.seed) {
            (false, Some(seed)) => {
                check(rig, one.block.range(), seed, on, self.yard.words.of(stream));
            }
            _ => {
                self.seed += 1;
                one.seed = Some(self.seed << 32);
                write(rig, one.block.range(), self.seed << 32, on);
            }
        }
        if how != Announce::Before {
            self.announce(at, stream, how);
        }
    }

    /// A last look at a block on its own stream.
    fn take(&mut self, at: usize, on: usize) -> Live {
        if self.live[at].seed.is_some() {
            self.touch(at, on, false, Announce::Before);
        }
        self.live.swap_remove(at)
    }

    /// A block that never has an owner comes and goes.
    fn raw(&self, heap: usize, own: usize, size: u64) {
        let (heap, stream) = (&self.heaps[heap], &self.yard.streams[own]);
        let Ok(at) = heap.alloc_raw(size, 512, stream) else {
            return;
        };
        if size > 0 {
            let range = VaRange::new(at, heap.usable_size(at).unwrap()).unwrap();
            assert!(at.is_aligned(512) && range.len() >= size);
            let mut others = self.live.iter();
            assert!(!others.any(|other| other.block.range().overlaps(range)));
        }
        heap.free_raw(at).unwrap();
        assert!(size == 0 || heap.free_raw(at).is_err());
    }

    fn alloc(&mut self, heap: usize, own: usize, size: u64, align: u32) {
        let align = 256u64 << align;
        let stream = &self.yard.streams[own];
        let Ok(block) = self.heaps[heap].alloc_aligned(size, align, stream) else {
            return;
        };
        assert!(block.ptr().is_aligned(align) && block.len() == size);
        if size > 0 {
            assert!(self.heaps[heap].usable_size(block.ptr()).unwrap() >= size);
        }
        if is_named(size) {
            block.set_name("named").unwrap();
        }
        for other in &self.live {
            assert!(!other.block.range().overlaps(block.range()));
        }
        self.live.push(Live {
            block,
            heap,
            own,
            seed: None,
            users: Vec::new(),
        });
        let last = self.live.len() - 1;
        self.touch(last, own, true, Announce::Before);
    }

    fn copy(&mut self, from: usize, to: usize, stream: usize) {
        let len = self.live[from].block.len().min(self.live[to].block.len());
        if from == to || len == 0 {
            return;
        }
        for at in [from, to] {
            self.order(at, stream);
            self.announce(at, stream, Announce::Before);
        }
        let source = self.live[from].block.range().sub(0, len).unwrap();
        let target = self.live[to].block.ptr();
        let on = self.yard.streams[stream].id();
        self.yard.rig.inner.copy(target, source, on).unwrap();
        // Patterns are bound to addresses, so the target is written again before it is looked at.
        self.live[to].seed = None;
        self.touch(to, stream, true, Announce::Before);
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Alloc {
                heap,
                stream,
                size,
                align,
            } => self.alloc(heap, stream, size, align),
            Step::Free(at) => {
                if let Some(at) = self.pick(at) {
                    let own = self.live[at].own;
                    drop(self.take(at, own));
                }
            }
            Step::FreeOn(at, stream) => {
                if let Some(at) = self.pick(at) {
                    let one = self.take(at, stream);
                    one.block.free_on(&self.yard.streams[stream]).unwrap();
                }
            }
            Step::FreeRaw(at) => {
                if let Some(at) = self.pick(at) {
                    let own = self.live[at].own;
                    let one = self.take(at, own);
                    let len = one.block.len();
                    let raw = one.block.into_raw();
                    self.heaps[one.heap].free_raw(raw).unwrap();
                    if raw.get() != 0 {
                        self.heaps[one.heap].free_raw(raw).unwrap_err();
                    }
                    self.raw(one.heap, own, len);
                }
            }
            Step::Use(at, stream, writes, how) => {
                if let Some(at) = self.pick(at) {
                    self.touch(at, stream, writes, how);
                }
            }
            Step::Copy(from, to, stream) => {
                if let (Some(from), Some(to)) = (self.pick(from), self.pick(to)) {
                    self.copy(from, to, stream);
                }
            }
            _ => self.around(step),
        }
    }

    /// A graph that writes and checks blocks of a scope, all but the last of which are freed at once.
    fn capture(&mut self, sizes: &[u64], beside: u64) {
        let stream = self.yard.streams[CAPTURED].clone();
        if self.scope.is_none() {
            self.scope = self.heaps[0].capture_scope(&stream).ok();
        }
        let Some(scope) = self.scope.take() else {
            return;
        };
        let word = self.yard.words.of(CAPTURED);
        self.yard.rig.inner.begin_capture(stream.id()).unwrap();
        let mut last = None;
        for &size in sizes {
            let Ok(block) = scope.alloc(size) else {
                continue;
            };
            self.seed += 1;
            write(&self.yard.rig, block.range(), self.seed << 32, &stream);
            check(
                &self.yard.rig,
                block.range(),
                self.seed << 32,
                &stream,
                word,
            );
            last = Some(block);
        }
        self.scope = Some(scope);
        self.alloc(1, 0, beside, 0);
        self.heaps[0].trim();
        let graph = self.yard.rig.inner.end_capture(stream.id()).unwrap();
        if self.graphs.len() == GRAPHS {
            self.graphs.remove(0);
        }
        self.graphs.push((graph, last));
    }

    /// What happens besides allocating and using.
    fn around(&mut self, step: &Step) {
        match *step {
            Step::Hold(stream) => {
                let id = self.yard.streams[stream].id();
                self.holds[stream].push(self.yard.rig.inner.hold(id).unwrap());
            }
            Step::Release(stream) => self.holds[stream].clear(),
            Step::Sync => {
                self.holds.iter_mut().for_each(Vec::clear);
                self.yard.sync();
            }
            Step::Trim(heap) => drop(self.heaps[heap].trim()),
            Step::PoolTrim => drop(self.yard.pool.trim(0)),
            Step::Arena(bytes) => {
                if bytes < self.arena.len() {
                    let _ = self.arena.shrink(bytes);
                } else {
                    let _ = self.arena.grow(bytes);
                }
            }
            Step::Capture(ref sizes, beside) => self.capture(sizes, beside),
            Step::Replay(at) => {
                if let Some((graph, _)) = self.graphs.get(at) {
                    graph.launch(self.yard.streams[CAPTURED].id()).unwrap();
                }
            }
            Step::EndScope => {
                self.graphs.clear();
                self.scope = None;
            }
            Step::Fail(nth, code) => self.yard.rig.fault.fail_nth_overall(nth, CODES[code]),
            Step::Clear => self.yard.rig.fault.clear(),
            _ => {}
        }
    }

    /// The books of everybody agree, with a recount and with the model.
    fn audit(&self) {
        let pool = crate::support::audit(&self.yard.pool);
        assert!(pool.created <= pool.budget, "{pool:?}");
        for (i, heap) in self.heaps.iter().enumerate() {
            let stats = audit(heap);
            let mine = self
                .live
                .iter()
                .filter(|l| l.heap == i && !l.block.is_empty());
            let bytes: u64 = mine
                .clone()
                .map(|l| heap.usable_size(l.block.ptr()).unwrap())
                .sum();
            let kept = self.graphs.iter().filter(|_| i == 0);
            let kept = kept.filter_map(|(_, block)| block.as_ref());
            let kept = kept.filter(|block| !block.is_empty());
            let bytes: u64 = bytes
                + kept
                    .map(|block| heap.usable_size(block.ptr()).unwrap())
                    .sum::<u64>();
            assert_eq!(stats.live, bytes + stats.limbo, "{stats:?}");
            assert!(stats.blocks >= mine.clone().count() as u64);
            for one in mine {
                assert_eq!(one.block.name().is_some(), is_named(one.block.len()));
            }
        }
        assert!(self.heaps[1].stats().held <= pool.budget / 2);
        assert!(!self.yard.rig.is_lost(), "the device was lost");
    }

    fn end(mut self) {
        self.yard.rig.fault.clear();
        self.holds.clear();
        self.graphs.clear();
        self.scope = None;
        for heap in &self.heaps {
            super::snapshot::check(&heap.snapshot());
        }
        while !self.live.is_empty() {
            let own = self.live[0].own;
            drop(self.take(0, own));
        }
        self.yard.sync();
        for heap in &self.heaps {
            eventually(|| {
                heap.trim();
                heap.stats().held == 0 && heap.stats().aliases == 0
            })
            .unwrap_or_else(|()| panic!("{:?}", heap.stats()));
            let stats = audit(heap);
            assert_eq!(
                (stats.live, stats.limbo, stats.broken),
                (0, 0, 0),
                "{stats:?}"
            );
        }
        let Self {
            yard, heaps, arena, ..
        } = self;
        drop((heaps, arena));
        yard.end();
    }
}

fn sizes(largest: u64) -> impl Strategy<Value = u64> {
    prop_oneof![
        1 => Just(0),
        4 => 1..=16 * KIB,
        4 => 16 * KIB..=2 * MIB,
        6 => 2 * MIB..=largest / 8,
        3 => (1..=largest / (2 * MIB)).prop_map(|n| n * 2 * MIB),
        2 => largest / 8..=largest,
    ]
}

fn steps(largest: u64) -> impl Strategy<Value = Step> {
    let stream = 0..STREAMS;
    let announce = prop_oneof![
        Just(Announce::Before),
        Just(Announce::After),
        Just(Announce::Fence)
    ];
    let at = 0usize..64;
    prop_oneof![
        12 => (0usize..2, stream.clone(), sizes(largest), prop_oneof![3 => Just(0u32), 1 => 0u32..16])
            .prop_map(|(heap, stream, size, align)| Step::Alloc { heap, stream, size, align }),
        8 => at.clone().prop_map(Step::Free),
        3 => (at.clone(), stream.clone()).prop_map(|(a, s)| Step::FreeOn(a, s)),
        1 => at.clone().prop_map(Step::FreeRaw),
        6 => (at.clone(), stream.clone(), any::<bool>(), announce)
            .prop_map(|(a, s, w, how)| Step::Use(a, s, w, how)),
        1 => (at.clone(), at, stream.clone()).prop_map(|(a, b, s)| Step::Copy(a, b, s)),
        2 => stream.clone().prop_map(Step::Hold),
        2 => stream.prop_map(Step::Release),
        1 => Just(Step::Sync),
        1 => (0usize..2).prop_map(Step::Trim),
        1 => Just(Step::PoolTrim),
        2 => (prop::collection::vec(sizes(largest), 1..4), sizes(largest))
            .prop_map(|(sizes, beside)| Step::Capture(sizes, beside)),
        3 => (0..GRAPHS).prop_map(Step::Replay),
        1 => Just(Step::EndScope),
        2 => (0..=largest).prop_map(Step::Arena),
        3 => (1u64..40, 0usize..3).prop_map(|(n, c)| Step::Fail(n, c)),
        2 => Just(Step::Clear),
    ]
}

fn settings(unit: u64) -> impl Strategy<Value = Setting> {
    (
        2u64..40,
        prop_oneof![Just(0usize), Just(1), Just(2), Just(64)],
        prop_oneof![
            3 => Just(Rounding::Exact),
            1 => Just(Rounding::PowerOfTwo),
            1 => Just(Rounding::Divisions(4))
        ],
        prop_oneof![Just(16 * KIB), Just(MIB)],
        prop_oneof![3 => Just(0u64), 1 => Just(300)],
        prop_oneof![3 => Just(false), 1 => Just(true)],
        // Few addresses make holes that nothing on hand fits.
        1u64..6,
    )
        .prop_map(
            move |(budget, aliases, rounding, small, wait_us, zero, addresses)| Setting {
                budget: budget * unit,
                aliases,
                rounding,
                small,
                wait_us,
                zero,
                addresses: addresses * budget * unit,
            },
        )
}

fn run(on: On, setting: &Setting, steps: &[Step]) {
    let mut world = World::new(on, setting);
    for step in steps {
        world.step(step);
        world.audit();
    }
    world.end();
}

/// `GRANULE_CASES` asks for more or fewer.
fn cases(usual: u32) -> ProptestConfig {
    let asked = std::env::var("GRANULE_CASES").ok();
    ProptestConfig {
        failure_persistence: None,
        max_shrink_iters: 2000,
        ..ProptestConfig::with_cases(asked.and_then(|n| n.parse().ok()).unwrap_or(usual))
    }
}

mod sim {
    use super::*;

    proptest! {
        #![proptest_config(cases(400))]

        #[test]
        fn any_program_keeps_its_bytes_to_itself(
            setting in settings(16 * MIB),
            steps in prop::collection::vec(steps(300 * MIB), 1..90),
        ) {
            run(On::Sim, &setting, &steps);
        }
    }
}

mod host {
    use super::*;

    proptest! {
        #![proptest_config(cases(40))]

        #[test]
        fn any_program_keeps_its_bytes_to_itself(
            setting in settings(2 * MIB),
            steps in prop::collection::vec(steps(32 * MIB), 1..60),
        ) {
            run(On::Host, &setting, &steps);
        }
    }
}

mod cuda {
    use super::*;

    proptest! {
        #![proptest_config(cases(20))]

        #[test]
        #[ignore = "needs a CUDA device; run with --include-ignored"]
        fn any_program_keeps_its_bytes_to_itself(
            setting in settings(16 * MIB),
            steps in prop::collection::vec(steps(300 * MIB), 1..60),
        ) {
            run(On::Cuda, &setting, &steps);
        }
    }
}
