//! Every driver call of every strategy fails in turn. After each failure all blocks hold their bytes,
//! the books agree with a recount, the same request succeeds, and nothing is left.

use std::time::Duration;

use granule::defrag::{Age, Bound, Goal, Lazy, MovableConfig, Strategy};
use granule::driver::{Call, DriverCode};
use granule::units::KIB;

use super::yard::{UNIT, Yard, config};
use crate::support::On;

const CODES: [DriverCode; 2] = [DriverCode::OUT_OF_MEMORY, DriverCode(12345)];

on_each_driver! {
    remapping
    compaction
    evacuation
    generational
    growing
    lazy_buddy
    hybrid_on_shared_granules
    shifting_live_granules
    a_drop
    a_mapping_that_cannot_be_taken_back
}

type Make = fn(On) -> Yard;
type Run = fn(&Yard) -> granule::Result<()>;

fn sweep(on: On, make: Make, run: Run) {
    let yard = make(on);
    yard.stream.synchronize().unwrap();
    let before = yard.rig.fault.calls_seen();
    run(&yard).unwrap();
    let calls = yard.rig.fault.calls_seen() - before;
    yard.end();
    assert!(calls > 0);
    // On a device each round takes a while.
    let step = if on == On::Cuda { 3 } else { 1 };
    for (nth, code) in (1..=calls)
        .step_by(step)
        .flat_map(|n| CODES.map(|code| (n, code)))
    {
        let yard = make(on);
        yard.stream.synchronize().unwrap();
        yard.rig.fault.fail_nth_overall(nth, code);
        let outcome = run(&yard);
        // Waiting makes calls as long as it takes.
        assert!(yard.rig.fault.fired() <= 1, "call {nth}");
        yard.rig.fault.clear();
        yard.quiet();
        yard.look(&yard.stream);
        yard.audit();
        if outcome.is_err() {
            let again = run(&yard);
            assert!(again.is_ok(), "call {nth} failed with {code:?}: {again:?}");
        }
        yard.quiet();
        yard.look(&yard.other);
        yard.quiet();
        yard.heap.settle().unwrap();
        yard.end();
    }
}

fn ask(yard: &Yard, strategy: Strategy, bytes: u64) -> granule::Result<()> {
    let (block, _) = yard
        .heap
        .alloc_by(strategy, bytes, Age::Old, &yard.stream)?;
    yard.write(&block, 99, &yard.stream);
    let guard = block.access(&yard.stream)?;
    yard.check(guard.range(), 99, &yard.stream);
    Ok(())
}

fn used_by_both(on: On) -> Yard {
    let yard = Yard::halved(on, 6, UNIT, config());
    // Some of what is free and some of what is live was used by another stream last.
    let block = yard.heap.alloc(UNIT, &yard.other).unwrap();
    yard.write(&block, 1, &yard.other);
    yard.stream.wait(&yard.other.fence().unwrap()).unwrap();
    drop(block.access(&yard.stream).unwrap());
    drop(block);
    let (live, seed) = &yard.blocks[1];
    yard.other.wait(&yard.stream.fence().unwrap()).unwrap();
    yard.write(live, *seed, &yard.other);
    yard
}

fn remapping(on: On) {
    sweep(on, used_by_both, |yard| {
        ask(yard, Strategy::Remap, 3 * UNIT)
    });
}

fn compaction(on: On) {
    sweep(on, used_by_both, |yard| {
        ask(yard, Strategy::Compact, 3 * UNIT)
    });
}

fn evacuation(on: On) {
    sweep(on, used_by_both, |yard| {
        ask(yard, Strategy::Evacuate, 3 * UNIT)
    });
}

fn generational(on: On) {
    sweep(on, used_by_both, |yard| {
        ask(yard, Strategy::Generational, 2 * UNIT)
    });
}

fn growing(on: On) {
    let make = |on| Yard::new(on, 6, config());
    sweep(on, make, |yard| {
        ask(yard, Strategy::Buddy, 2 * UNIT)?;
        ask(yard, Strategy::Hybrid, 3 * UNIT)
    });
}

fn lazy_buddy(on: On) {
    let make = |on| {
        let lazy = Lazy {
            interval: Duration::ZERO,
            ..Lazy::default()
        };
        Yard::halved(on, 4, UNIT, MovableConfig { lazy, ..config() })
    };
    sweep(on, make, |yard| ask(yard, Strategy::LazyBuddy, 2 * UNIT));
}

fn hybrid_on_shared_granules(on: On) {
    let make = |on| Yard::halved(on, 4, 512 * KIB, config());
    sweep(on, make, |yard| {
        let goal = Goal::Contiguous(UNIT + UNIT / 2);
        let report = yard
            .heap
            .defragment(&yard.stream, Strategy::Hybrid, goal, Bound::NONE)?;
        assert!(report.finished);
        Ok(())
    });
}

fn shifting_live_granules(on: On) {
    let make = |on| {
        let config = MovableConfig {
            addresses: 7 * UNIT,
            ..config()
        };
        Yard::halved(on, 6, UNIT, config)
    };
    sweep(on, make, |yard| ask(yard, Strategy::Remap, 3 * UNIT));
}

fn a_drop(on: On) {
    for nth in 1..=12 {
        let yard = used_by_both(on);
        ask(&yard, Strategy::Remap, 3 * UNIT).unwrap();
        yard.rig.fault.fail_nth_overall(nth, DriverCode::UNKNOWN);
        let Yard {
            heap,
            pool,
            stream,
            other,
            blocks,
            rig,
        } = yard;
        drop((heap, blocks, pool, stream, other));
        rig.assert_nothing_left();
    }
}

fn a_mapping_that_cannot_be_taken_back(on: On) {
    let yard = Yard::halved(on, 6, UNIT, config());
    yard.stream.synchronize().unwrap();
    // The second map fails, and then nothing can be unmapped.
    yard.rig.fault.fail(Call::Map, 2, DriverCode::OUT_OF_MEMORY);
    yard.rig
        .fault
        .fail_from(Call::Unmap, 1, DriverCode::UNKNOWN);
    assert!(ask(&yard, Strategy::Remap, 3 * UNIT).is_err());
    yard.audit();
    assert_eq!(yard.heap.stats().aliases, 1);
    yard.look(&yard.stream);
    // Elsewhere there is room.
    ask(&yard, Strategy::Remap, 3 * UNIT).unwrap();
    yard.rig.fault.clear();
    yard.heap.settle().unwrap();
    assert_eq!(yard.heap.stats().aliases, 0);
    yard.end();
}
