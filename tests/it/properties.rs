//! Random programs over the arenas of a pool, with faults now and then, against a model that knows
//! lengths and bytes only.

use std::collections::BTreeMap;
use std::time::Duration;

use granule::driver::{Call, DriverCode, Hold};
use granule::units::{MIB, Va};
use granule::{Arena, Error, Policy, Pool, PoolConfig, Result, Stream};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::support::{On, Rig, audit, check_extents, head, small_granules};

const ARENAS: usize = 3;
const STREAMS: usize = 2;
const BUDGET: u64 = 160 * MIB;
const CAPACITY: u64 = 96 * MIB;
/// What may be mapped beyond the lengths: the rest of the last granule and a step of each arena.
const SLACK: u64 = ARENAS as u64 * (16 + 12) * MIB;

#[derive(Clone, Copy, Debug)]
enum Op {
    Grow(usize, u64),
    GrowOn(usize, usize, u64),
    GrowAll(u64, u64),
    Extend(usize, u64),
    Shrink(usize, u64),
    ShrinkDeferred(usize, u64),
    Truncate(usize, u64),
    Write(usize, u64),
    Close(usize),
    Drop(usize),
    Trim(u64),
    SetBudget(u64),
    Hold(usize),
    Release(usize),
    Fail(usize, u64, u32),
    Works,
}

fn op() -> impl Strategy<Value = Op> {
    let arena = 0..ARENAS;
    let stream = 0..STREAMS;
    let size = prop_oneof![
        (0..100 * MIB),
        (0..50u64).prop_map(|n| n * 2 * MIB),
        Just(0),
        (0..200u64)
    ];
    prop_oneof![
        4 => (arena.clone(), size.clone()).prop_map(|(a, n)| Op::Grow(a, n)),
        4 => (arena.clone(), stream.clone(), size.clone()).prop_map(|(a, s, n)| Op::GrowOn(a, s, n)),
        2 => (size.clone(), size.clone()).prop_map(|(n, m)| Op::GrowAll(n, m)),
        2 => (arena.clone(), 0..20 * MIB).prop_map(|(a, n)| Op::Extend(a, n)),
        2 => (arena.clone(), size.clone()).prop_map(|(a, n)| Op::Shrink(a, n)),
        3 => (arena.clone(), size.clone()).prop_map(|(a, n)| Op::ShrinkDeferred(a, n)),
        3 => (arena.clone(), size.clone()).prop_map(|(a, n)| Op::Truncate(a, n)),
        4 => (arena.clone(), any::<u64>()).prop_map(|(a, seed)| Op::Write(a, seed)),
        1 => arena.clone().prop_map(Op::Close),
        1 => arena.prop_map(Op::Drop),
        1 => size.prop_map(Op::Trim),
        1 => (0..BUDGET).prop_map(Op::SetBudget),
        2 => stream.clone().prop_map(Op::Hold),
        2 => stream.prop_map(Op::Release),
        2 => (0..Call::ALL.len(), 1..6u64, prop_oneof![Just(2u32), Just(999), Just(12345)])
            .prop_map(|(call, nth, code)| Op::Fail(call, nth, code)),
        2 => Just(Op::Works),
    ]
}

/// An arena as its user sees it.
struct Model {
    arena: Arena,
    base: Va,
    len: u64,
    /// Seed of the samples below this length.
    written: Option<(u64, u64)>,
}

impl Model {
    fn new(pool: &Pool) -> Self {
        let arena = Arena::new(pool, CAPACITY).unwrap();
        let base = arena.base();
        Self {
            arena,
            base,
            len: 0,
            written: None,
        }
    }

    fn shorten(&mut self, to: u64) {
        self.len = self.len.min(to);
        self.written = self.written.map(|(seed, len)| (seed, len.min(self.len)));
    }
}

struct World<'r> {
    rig: &'r Rig,
    pool: Pool,
    models: Vec<Model>,
    streams: Vec<Stream>,
    holds: BTreeMap<usize, Hold>,
    fired: u64,
}

impl<'r> World<'r> {
    fn new(rig: &'r Rig, config: PoolConfig) -> Self {
        let pool = rig.pool(config);
        Self {
            rig,
            models: (0..ARENAS).map(|_| Model::new(&pool)).collect(),
            pool,
            streams: (0..STREAMS)
                .map(|_| rig.device.create_stream().unwrap())
                .collect(),
            holds: BTreeMap::new(),
            fired: 0,
        }
    }

    fn step(&mut self, op: Op) {
        self.fired = self.rig.fault.fired();
        match op {
            Op::Grow(a, to) => {
                self.holds.clear();
                let result = self.models[a].arena.grow(to);
                self.grown(&[(a, to)], &result);
            }
            Op::GrowOn(a, s, to) => {
                let result = self.models[a].arena.grow_on(to, &self.streams[s]);
                self.grown(&[(a, to)], &result);
                self.queue_work(a, s);
            }
            Op::GrowAll(to, and) => {
                self.holds.clear();
                let wishes = [(&self.models[0].arena, to), (&self.models[1].arena, and)];
                let result = Arena::grow_all(&wishes);
                self.grown(&[(0, to), (1, and)], &result);
            }
            Op::Extend(a, bytes) => {
                self.holds.clear();
                let to = self.models[a].len + bytes;
                let result = self.models[a].arena.extend(bytes);
                if let Ok(range) = &result {
                    let start = self.models[a].base.get() + self.models[a].len;
                    assert_eq!((range.start().get(), range.len()), (start, bytes));
                }
                self.grown(&[(a, to)], &result.map(drop));
            }
            Op::Shrink(a, to) => {
                self.holds.clear();
                let result = self.models[a].arena.shrink(to);
                self.shrunk(a, to, &result);
            }
            Op::ShrinkDeferred(a, to) => {
                let result = self.models[a].arena.shrink_deferred(to);
                self.shrunk(a, to, &result);
            }
            Op::Truncate(a, to) => {
                self.models[a].arena.truncate(to).unwrap();
                self.models[a].shorten(to);
            }
            Op::Write(a, seed) => {
                // The write is on a stream of its own, and memory may be zeroed on another.
                self.holds.clear();
                for stream in &self.streams {
                    self.rig.inner.sync_stream(stream.id()).unwrap();
                }
                let model = &mut self.models[a];
                model.written = Some((seed, model.len));
                self.rig.write(model.arena.range(), seed);
            }
            Op::Close(a) => self.close(a),
            Op::Drop(a) => {
                self.holds.clear();
                // Whatever the driver refuses while this one drops is for the quarantine.
                let gone = self.models.remove(a);
                drop(gone);
                self.rig.fault.clear();
                self.models.insert(a, Model::new(&self.pool));
            }
            Op::Trim(keep) => {
                let result = self.pool.trim(keep);
                self.explained(&result.map(drop));
            }
            Op::SetBudget(bytes) => self.set_budget(bytes),
            Op::Hold(s) => {
                if !self.holds.contains_key(&s) {
                    let id = self.streams[s].id();
                    self.holds.insert(s, self.rig.inner.hold(id).unwrap());
                }
            }
            Op::Release(s) => drop(self.holds.remove(&s)),
            Op::Fail(call, nth, code) => {
                self.rig.fault.fail(Call::ALL[call], nth, DriverCode(code));
            }
            Op::Works => self.rig.fault.clear(),
        }
        self.look();
    }

    /// A write at the end of an arena, behind whatever holds its stream.
    fn queue_work(&self, a: usize, s: usize) {
        let model = &self.models[a];
        let at = model.len.saturating_sub(1) >> 19 << 19;
        if let Some(range) = head(&model.arena, model.len).sub(at + 4096, 64) {
            self.rig.inner.fill(range, 1, self.streams[s].id()).unwrap();
        }
    }

    fn has_failed(&self) -> bool {
        self.rig.fault.fired() > self.fired
    }

    fn explained(&self, result: &Result<()>) {
        assert!(
            result.is_ok() || self.has_failed(),
            "{result:?} without a fault"
        );
    }

    fn grown(&mut self, wishes: &[(usize, u64)], result: &Result<()>) {
        match result {
            Ok(()) => {
                for &(a, to) in wishes {
                    self.models[a].len = self.models[a].len.max(to);
                }
            }
            Err(Error::ReservationExhausted { asked, .. }) => assert!(*asked > CAPACITY),
            Err(error) if !self.has_failed() => {
                assert!(error.is_out_of_memory(), "{error}");
                let asked = |(a, m): (usize, &Model)| {
                    let wish = wishes.iter().find(|(b, _)| a == *b);
                    wish.map_or(m.len, |(_, to)| m.len.max(*to))
                };
                let all: u64 = self.models.iter().enumerate().map(asked).sum();
                let room = self.pool.stats().budget.saturating_sub(SLACK);
                // Work that was queued may not be done yet, and the pool does not wait.
                let pending = matches!(error, Error::OutOfMemory(oom) if oom.pending > 0);
                let held = pending || self.rig.device.quarantined() > 0;
                assert!(all > room || held, "{all} bytes do not fit {room}: {error}");
            }
            Err(_) => {}
        }
    }

    fn shrunk(&mut self, a: usize, to: u64, result: &Result<()>) {
        self.explained(result);
        if result.is_ok() || self.models[a].arena.len() == self.models[a].len.min(to) {
            self.models[a].shorten(to);
        }
    }

    fn close(&mut self, a: usize) {
        self.holds.clear();
        let model = self.models.remove(a);
        if let Err((left, error)) = model.arena.close() {
            self.explained(&Err(error));
            assert!(left.is_empty() || left.len() == model.len);
            self.rig.fault.clear();
            left.close().unwrap();
        }
        self.rig.fault.clear();
        self.models.insert(a, Model::new(&self.pool));
    }

    fn set_budget(&mut self, bytes: u64) {
        let before = self.pool.stats().budget;
        match self.pool.set_budget(bytes) {
            Ok(()) => assert_eq!(self.pool.stats().budget, bytes),
            Err(Error::BudgetBelowUse { in_use, .. }) => assert!(in_use > bytes),
            Err(Error::InvalidConfig { .. }) => assert!(bytes < self.pool.stats().floor),
            Err(error) => {
                self.explained(&Err(error));
                assert_eq!(self.pool.stats().budget, before);
            }
        }
        let _ = self.pool.set_budget(BUDGET);
    }

    fn look(&self) {
        let stats = audit(&self.pool);
        assert!(stats.peak_created <= BUDGET, "{stats:?}");
        for model in &self.models {
            let arena = &model.arena;
            assert_eq!((arena.len(), arena.base()), (model.len, model.base));
            check_extents(arena);
            // Without bytes, the driver looks at each access by itself.
            if let Some((seed, len)) = model.written.filter(|_| self.rig.has_data()) {
                self.rig.check(head(arena, len), seed);
            }
        }
    }
}

fn config() -> impl Strategy<Value = PoolConfig> {
    let policy = prop_oneof![
        Just(Policy::Dynamic),
        Just(Policy::Hybrid { base: 0 }),
        Just(Policy::Hybrid { base: 48 * MIB }),
        Just(Policy::Static),
    ];
    let watermark = prop_oneof![Just(None), Just(Some(0)), Just(Some(u64::MAX))];
    (policy, watermark, any::<bool>()).prop_map(|(policy, watermark, zero_on_handover)| {
        PoolConfig {
            watermark,
            zero_on_handover,
            wait: Duration::ZERO,
            ..small_granules(BUDGET).policy(policy)
        }
    })
}

fn check_programs(on: On, cases: u32) {
    let mut runner = TestRunner::new(Config {
        cases,
        failure_persistence: None,
        max_shrink_iters: 2000,
        ..Config::default()
    });
    let program = (config(), proptest::collection::vec(op(), 1..50));
    let outcome = runner.run(&program, |(config, ops)| {
        let rig = Rig::new(on);
        let mut world = World::new(&rig, config);
        for op in ops {
            world.step(op);
        }
        world.holds.clear();
        drop(world);
        rig.assert_nothing_left();
        Ok(())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn random_programs_agree_with_the_model_on_sim() {
    check_programs(On::Sim, 1000);
}

#[test]
fn random_programs_agree_with_the_model_on_host() {
    check_programs(On::Host, 40);
}

#[test]
#[ignore = "needs a CUDA device; run with --include-ignored"]
fn random_programs_agree_with_the_model_on_cuda() {
    check_programs(On::Cuda, 100);
}
