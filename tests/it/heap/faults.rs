//! Every driver call of every way through the heap fails in turn. After each failure live blocks
//! hold their bytes, the books agree with a recount, the same request succeeds, and nothing is left.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use granule::driver::record::Counts;
use granule::driver::{Call, DriverCode, Kernel, StreamId};
use granule::units::{MIB, Va, VaRange};
use granule::{Block, HeapConfig, HeapStats};

use super::yard::Yard;
use crate::support::{On, PATIENCE, eventually};

const CODES: [DriverCode; 3] = [
    DriverCode::OUT_OF_MEMORY,
    DriverCode::UNKNOWN,
    DriverCode(12345),
];

on_each_driver! {
    a_miss_that_creates
    a_miss_that_remaps
    a_miss_that_remaps_eagerly
    a_miss_that_releases_and_creates
    a_miss_at_the_bound_on_aliases
    a_miss_that_waits_for_another_stream
    a_miss_that_takes_from_another_stream
    a_miss_that_zeroes
    a_trim
    a_drop
    a_place_that_cannot_be_cleared_is_passed_over
    a_device_that_is_full_gives_what_is_idle
}

/// What an operation starts from.
struct World {
    yard: Yard,
    live: Vec<(Block, u64, usize)>,
}

impl World {
    fn new(on: On, budget: u64, config: HeapConfig) -> Self {
        let yard = Yard::new(on, budget, config, 3);
        Self {
            yard,
            live: Vec::new(),
        }
    }

    fn keep(&mut self, size: u64, stream: usize) {
        let seed = self.live.len() as u64 + 100;
        let block = self.yard.filled(size, stream, seed);
        self.live.push((block, seed, stream));
    }

    /// Queues a check of each live block.
    fn look(&self) {
        for (block, seed, stream) in &self.live {
            self.yard.check(block, *seed, *stream);
        }
    }

    fn try_alloc_bare(&self, size: u64) -> granule::Result<Block> {
        self.yard.heap.alloc(size, &self.yard.streams[0])
    }

    fn try_alloc(&mut self, size: u64, stream: usize) -> granule::Result<()> {
        let block = self.yard.heap.alloc(size, &self.yard.streams[stream])?;
        let seed = self.live.len() as u64 + 100;
        self.yard.write(&block, seed, stream);
        self.live.push((block, seed, stream));
        Ok(())
    }
}

/// Sizes and limits that are small enough for the host driver, and make many granules.
fn config() -> HeapConfig {
    HeapConfig {
        granule_max: 4 * MIB,
        granules: 1,
        granule_min: 2 * MIB,
        wait: Duration::from_millis(2),
        ..HeapConfig::default()
    }
}

/// Fails each driver call of `run` in turn, with each code.
///
/// `shows` says of the calls of a run without failures, and the heap's figures, whether that is what
/// the test is about.
fn sweep(
    make: impl Fn() -> World,
    run: impl Fn(&mut World) -> granule::Result<()>,
    shows: impl Fn(&Counts, &HeapStats) -> bool,
) {
    let mut world = make();
    world.yard.sync();
    let before = world.yard.rig.fault.calls_seen();
    let counts = world.yard.rig.counts();
    run(&mut world).unwrap();
    let calls = world.yard.rig.fault.calls_seen() - before;
    let counts = world.yard.rig.counts().since(&counts);
    let stats = world.yard.heap.stats();
    let made: Vec<_> = counts.iter().collect();
    assert!(shows(&counts, &stats), "{stats:?}, {made:?}");
    end(world);
    assert!(calls > 0);
    // Waiting makes calls as long as it takes, which tells nothing new.
    for (nth, code) in (1..=calls.min(60)).flat_map(|n| CODES.map(|code| (n, code))) {
        let mut world = make();
        world.yard.sync();
        let had = world.live.len();
        world.yard.rig.fault.fail_nth_overall(nth, code);
        let outcome = run(&mut world);
        world.look();
        world.yard.audit();
        world.yard.rig.fault.clear();
        if outcome.is_err() {
            assert_eq!(world.live.len(), had);
            let again = run(&mut world);
            assert!(again.is_ok(), "call {nth} failed with {code:?}: {again:?}");
        }
        world.look();
        world.yard.audit();
        end(world);
    }
}

/// Nothing is wrong with the bytes, and nothing is left.
#[track_caller]
fn end(mut world: World) {
    world.look();
    world.live.clear();
    world.yard.audit();
    world.yard.end();
}

fn a_miss_that_creates(on: On) {
    sweep(
        || {
            let mut world = World::new(on, 64 * MIB, config());
            world.keep(3 * MIB, 0);
            world
        },
        |world| world.try_alloc(21 * MIB, 0),
        |calls, _| calls.of(Call::Create).calls > 1,
    );
}

/// Two holes of 6 MiB between live blocks, and nothing left in the budget.
fn holes(on: On, config: HeapConfig) -> World {
    let mut world = World::new(on, 20 * MIB, config);
    let holes: Vec<_> = (0..2)
        .map(|_| {
            let hole = world.yard.filled(6 * MIB, 0, 1);
            world.keep(4 * MIB, 0);
            hole
        })
        .collect();
    drop(holes);
    world
}

fn a_miss_that_remaps(on: On) {
    sweep(
        || holes(on, config()),
        |world| world.try_alloc(12 * MIB, 0),
        |_, stats| stats.remaps > 1 && stats.aliases > 1,
    );
}

fn a_miss_that_remaps_eagerly(on: On) {
    let config = HeapConfig {
        aliases: 0,
        wait: PATIENCE,
        ..config()
    };
    sweep(
        || holes(on, config.clone()),
        |world| {
            world.try_alloc(12 * MIB, 0)?;
            world.yard.audit();
            Ok(())
        },
        |calls, stats| stats.remaps > 1 && calls.of(Call::Unmap).calls > 1 && stats.aliases == 0,
    );
}

/// Runs something while the first stream's work cannot end before the heap waits for it, however slow the machine is.
fn held_until_it_waits(
    world: &mut World,
    run: impl FnOnce(&mut World) -> granule::Result<()>,
) -> granule::Result<()> {
    let hold = world
        .yard
        .rig
        .inner
        .hold(world.yard.streams[0].id())
        .unwrap();
    let heap = world.yard.heap.clone();
    let waits = heap.stats().host_waits;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while heap.stats().host_waits == waits && !is_over.load(Relaxed) {
                std::thread::sleep(Duration::from_micros(50));
            }
            drop(hold);
        });
        let outcome = run(world);
        is_over.store(true, Relaxed);
        outcome
    })
}

fn a_miss_at_the_bound_on_aliases(on: On) {
    let config = HeapConfig {
        aliases: 1,
        wait: PATIENCE,
        ..config()
    };
    sweep(
        || {
            let mut world = World::new(on, 24 * MIB, config.clone());
            let holes: Vec<_> = (0..4)
                .map(|_| {
                    let hole = world.yard.filled(4 * MIB, 0, 1);
                    world.keep(2 * MIB, 0);
                    hole
                })
                .collect();
            drop(holes);
            world
        },
        |world| {
            let before = world.live.len();
            held_until_it_waits(world, |world| {
                world.try_alloc(8 * MIB, 0)?;
                let second = world.try_alloc(8 * MIB, 0);
                second.inspect_err(|_| world.live.truncate(before))
            })
        },
        |_, stats| stats.remaps == 4 && stats.host_waits > 0 && stats.aliases == 2,
    );
}

/// A hole between a free run and a live block, and a free granule that is too long for it.
fn a_miss_that_releases_and_creates(on: On) {
    let config = HeapConfig {
        granule_max: 16 * MIB,
        granules: 1,
        wait: PATIENCE,
        ..config()
    };
    sweep(
        || {
            let mut world = World::new(on, 26 * MIB, config.clone());
            let run = world.yard.filled(8 * MIB, 0, 1);
            let hole = world.yard.filled(6 * MIB, 0, 2);
            world.keep(2 * MIB, 0);
            drop(hole);
            world.keep(8 * MIB, 0);
            world.yard.sync();
            let long = world.yard.filled(8 * MIB, 0, 3);
            drop((run, long));
            world
        },
        |world| world.try_alloc(14 * MIB, 0),
        |calls, _| calls.of(Call::Release).calls > 0 && calls.of(Call::Create).calls > 0,
    );
}

fn a_miss_that_waits_for_another_stream(on: On) {
    let config = HeapConfig {
        wait: PATIENCE,
        ..config()
    };
    sweep(
        || {
            let mut world = World::new(on, 20 * MIB, config.clone());
            world.keep(2 * MIB, 0);
            let shared = world.yard.filled(16 * MIB, 0, 1);
            world.yard.order(0, 1);
            world.yard.check(&shared, 1, 1);
            shared.free_on(&world.yard.streams[1]).unwrap();
            world
        },
        |world| world.try_alloc(15 * MIB, 0),
        |_, stats| stats.device_waits > 0 || stats.limbo == 0,
    );
}

fn a_miss_that_takes_from_another_stream(on: On) {
    let config = HeapConfig {
        wait: PATIENCE,
        ..config()
    };
    sweep(
        || {
            let mut world = World::new(on, 24 * MIB, config.clone());
            world.keep(2 * MIB, 1);
            drop(world.yard.filled(18 * MIB, 1, 1));
            world
        },
        |world| {
            world.try_alloc(20 * MIB, 0)?;
            // The lender's old mappings go when its work is done, at the latest now.
            world.yard.sync();
            world.yard.heap.trim();
            Ok(())
        },
        |calls, _| calls.of(Call::Unmap).calls > 0 && calls.of(Call::Map).calls > 0,
    );
}

fn a_miss_that_zeroes(on: On) {
    sweep(
        || {
            let mut world = World::new(on, 24 * MIB, config());
            world.yard.pool = world.yard.rig.pool(granule::PoolConfig {
                zero_on_handover: true,
                watermark: Some(u64::MAX),
                ..granule::PoolConfig::with_budget(24 * MIB).granule(2 * MIB)
            });
            world.yard.heap = granule::Heap::new(&world.yard.pool, config()).unwrap();
            drop(world.yard.filled(10 * MIB, 1, 1));
            world.yard.sync();
            eventually(|| {
                world.yard.heap.trim();
                world.yard.heap.stats().held == 0
            })
            .unwrap();
            world
        },
        |world| world.try_alloc(10 * MIB, 0),
        |calls, _| calls.of(Call::Fill).calls > 0 && calls.of(Call::Create).calls == 0,
    );
}

fn a_trim(on: On) {
    sweep(
        || {
            let mut world = World::new(on, 64 * MIB, config());
            for _ in 0..3 {
                let hole = world.yard.filled(6 * MIB, 0, 1);
                world.keep(2 * MIB, 0);
                drop(hole);
            }
            let used = world.yard.filled(4 * MIB, 1, 1);
            world.yard.order(1, 2);
            used.free_on(&world.yard.streams[2]).unwrap();
            world
        },
        |world| {
            world.yard.heap.trim();
            Ok(())
        },
        |calls, _| calls.of(Call::Unmap).calls > 1,
    );
}

/// Dropping cannot report anything, so what it could not do is done later.
fn a_drop(on: On) {
    sweep(
        || {
            let mut world = holes(on, config());
            world.try_alloc(12 * MIB, 0).unwrap();
            let (used, ..) = world.live.pop().unwrap();
            world.yard.order(0, 1);
            world.yard.check(&used, 102, 1);
            used.free_on(&world.yard.streams[1]).unwrap();
            world
        },
        |world| {
            let live = std::mem::take(&mut world.live);
            for (block, seed, stream) in &live {
                world.yard.check(block, *seed, *stream);
            }
            drop(live);
            let fresh = granule::Heap::new(&world.yard.pool, config())?;
            world.yard.heap = fresh;
            Ok(())
        },
        |calls, _| calls.of(Call::Unmap).calls > 1 && calls.of(Call::FreeReservation).calls > 0,
    );
}

/// A mapping that the driver would not undo made every later miss fail at the same place.
fn a_place_that_cannot_be_cleared_is_passed_over(on: On) {
    let mut world = World::new(on, 64 * MIB, config());
    world.keep(2 * MIB, 0);
    let fault = world.yard.rig.fault.clone();
    fault.fail(Call::SetAccess, 1, DriverCode::UNKNOWN);
    fault.fail_from(Call::Unmap, 1, DriverCode::UNKNOWN);
    world.try_alloc(8 * MIB, 0).unwrap_err();
    world.yard.audit();
    assert!(world.yard.heap.stats().broken > 0);
    // The driver goes on refusing.
    for _ in 0..3 {
        world.try_alloc(8 * MIB, 0).unwrap();
    }
    world.look();
    world.yard.audit();
    fault.clear();
    world.try_alloc(24 * MIB, 0).unwrap();
    assert_eq!(world.yard.heap.stats().broken, 0);
    end(world);
}

/// The device has less than the budget says.
fn a_device_that_is_full_gives_what_is_idle(on: On) {
    let config = HeapConfig {
        wait: PATIENCE,
        ..config()
    };
    let mut world = World::new(on, 256 * MIB, config);
    let fault = world.yard.rig.fault.clone();
    fault.fail_above(34 * MIB);
    world.keep(2 * MIB, 0);
    drop(world.yard.filled(24 * MIB, 0, 1));
    // By remapping all of the idle memory and creating the rest.
    world.try_alloc(28 * MIB, 0).unwrap();
    world.live.pop();
    world.look();
    // Another stream's idle memory.
    world.yard.sync();
    world.try_alloc(28 * MIB, 1).unwrap();
    let error = world.try_alloc(8 * MIB, 2).unwrap_err();
    assert!(error.is_out_of_memory());
    assert!(
        format!("{error}").contains("limit hit: the device"),
        "{error}"
    );
    world.look();
    world.yard.audit();
    end(world);
}

/// Queued work hit memory that was not there, and nothing on the device works any more.
fn lose(on: On) {
    let mut world = World::new(on, 64 * MIB, config());
    world.keep(8 * MIB, 0);
    world.keep(2 * MIB, 1);
    let (shared, ..) = world.live.pop().unwrap();
    let range = VaRange::new(Va::new(0x6000_0000), 64).unwrap();
    let rig = &world.yard.rig;
    let bad = Kernel::WritePattern { range, seed: 0 };
    rig.inner.launch(bad, StreamId::DEFAULT).unwrap();
    assert!(rig.inner.sync_stream(StreamId::DEFAULT).is_err());
    assert!(rig.is_lost());
    shared.free_on(&world.yard.streams[2]).unwrap();
    world.try_alloc_bare(16 * MIB).unwrap_err();
    world.live.clear();
    world.yard.heap.trim();
    let Yard {
        streams,
        heap,
        pool,
        words,
        rig,
    } = world.yard;
    drop((heap, pool, words, streams));
    rig.device.sweep();
    let left = rig.left();
    assert_eq!((left.granules, left.mappings, left.reservations), (0, 0, 0));
}

#[test]
fn a_lost_device_gets_everything_back_on_sim() {
    lose(On::Sim);
}

#[test]
fn a_lost_device_gets_everything_back_on_host() {
    lose(On::Host);
}
