//! What passes do, byte for byte, beside kernels and other threads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use granule::defrag::{Age, Bound, Goal, Lazy, MovableConfig, MovableHeap, Strategy};
use granule::driver::cost::CostTable;
use granule::driver::{Call, Kernel};
use granule::units::{KIB, MIB};
use granule::{Error, Pool, PoolConfig};

use super::yard::{UNIT, Yard, config};
use crate::support::{On, eventually};

on_each_driver! {
    remapping_copies_nothing_and_moves_no_pointer
    every_strategy_keeps_every_byte
    pieces_that_share_granules_are_copied_out_of_the_way
    pins_are_barriers
    a_guard_holds_a_block_still
    queued_work_on_old_addresses_goes_on
    another_stream_waits_for_the_copy
    whole_live_granules_are_remapped_when_addresses_are_short
    a_pass_stops_half_way_and_goes_on
    a_pass_is_bounded_in_time
    maintaining_follows_threshold_and_interval
    an_allocation_takes_from_the_pool_what_is_missing
    memory_goes_back_to_the_pool
    a_copying_strategy_takes_new_memory_if_it_may
    blocks_of_no_bytes_and_of_too_many
    threads_allocate_and_access_beside_passes
    sliding_hops_where_it_would_overlap
}

fn remapping_copies_nothing_and_moves_no_pointer(on: On) {
    let mut yard = Yard::halved(on, 16, UNIT, config());
    let places: Vec<_> = yard
        .blocks
        .iter()
        .map(|b| b.0.pin().unwrap().range())
        .collect();
    let before = yard.rig.counts();
    let (block, report) = yard
        .heap
        .alloc_by(Strategy::Remap, 8 * UNIT, Age::Old, &yard.stream)
        .unwrap();
    let report = report.unwrap();
    assert!(report.finished);
    assert_eq!((report.bytes_copied, report.pointers_changed), (0, 0));
    // The last free one stands beside the holes already.
    assert_eq!((report.remapped, report.extra_memory), (7, 0));
    for call in [
        Call::Copy,
        Call::CopyBatch,
        Call::Create,
        Call::Unmap,
        Call::SyncStream,
    ] {
        assert_eq!(yard.rig.calls(&before, call), 0, "{call}");
    }
    assert_eq!(yard.rig.calls(&before, Call::SetAccess), 1);
    let now: Vec<_> = yard
        .blocks
        .iter()
        .map(|b| b.0.pin().unwrap().range())
        .collect();
    assert_eq!(places, now);
    yard.write(&block, 99, &yard.stream);
    yard.blocks.push((block, 99));
    yard.look(&yard.stream);
    assert_eq!(yard.heap.stats().aliases, 7);
    yard.heap.settle().unwrap();
    assert_eq!(yard.heap.stats().aliases, 0);
    yard.end();
}

fn every_strategy_keeps_every_byte(on: On) {
    for strategy in Strategy::ALL {
        for size in [UNIT, UNIT / 4] {
            let lazy = Lazy {
                interval: Duration::ZERO,
                ..Lazy::default()
            };
            let mut yard = Yard::halved(on, 8, size, MovableConfig { lazy, ..config() });
            let want = 4 * UNIT;
            // What moves from here on, the other stream has to wait for by itself.
            yard.other.wait(&yard.stream.fence().unwrap()).unwrap();
            let mut made = None;
            match yard.heap.alloc_by(strategy, want, Age::Old, &yard.stream) {
                Ok((block, _)) => {
                    yard.write(&block, 99, &yard.stream);
                    made = Some(block);
                }
                Err(error) => {
                    // Nothing is empty to be remapped, and a buddy system moves nothing.
                    assert!(
                        matches!(strategy, Strategy::Remap | Strategy::Buddy),
                        "{error}"
                    );
                    assert!(error.is_out_of_memory());
                    assert!(size < UNIT || strategy == Strategy::Buddy);
                }
            }
            yard.look(&yard.other);
            yard.audit();
            yard.blocks.extend(made.map(|block| (block, 99)));
            yard.end();
        }
    }
}

fn pieces_that_share_granules_are_copied_out_of_the_way(on: On) {
    let yard = Yard::halved(on, 8, 256 * KIB, config());
    let report = yard
        .heap
        .defragment(
            &yard.stream,
            Strategy::Hybrid,
            Goal::Contiguous(3 * UNIT),
            Bound::NONE,
        )
        .unwrap();
    assert!(report.finished && report.bytes_copied > 0);
    assert_eq!(report.calls.batch, 1, "one launch: {report:?}");
    assert!(yard.heap.stats().largest_free >= 3 * UNIT);
    yard.end();
}

fn pins_are_barriers(on: On) {
    let yard = Yard::halved(on, 8, 256 * KIB, config());
    let pins: Vec<_> = yard
        .blocks
        .iter()
        .step_by(8)
        .map(|b| b.0.pin().unwrap())
        .collect();
    let places: Vec<_> = pins.iter().map(|p| p.range()).collect();
    for strategy in Strategy::ALL {
        for goal in [
            Goal::Contiguous(UNIT),
            Goal::Contiguous(2 * UNIT),
            Goal::Largest,
        ] {
            let done = yard
                .heap
                .defragment(&yard.stream, strategy, goal, Bound::NONE);
            if let Err(error) = done {
                assert!(matches!(error, Error::Shortfall(_)), "{error}");
            }
        }
    }
    assert_eq!(places, pins.iter().map(|p| p.range()).collect::<Vec<_>>());
    drop(pins);
    yard.end();
}

fn a_guard_holds_a_block_still(on: On) {
    let yard = Yard::halved(on, 4, UNIT, config());
    let guards: Vec<_> = yard
        .blocks
        .iter()
        .map(|b| b.0.access(&yard.stream).unwrap())
        .collect();
    let copying = |strategy| {
        yard.heap.defragment(
            &yard.stream,
            strategy,
            Goal::Contiguous(2 * UNIT),
            Bound::NONE,
        )
    };
    let why = copying(Strategy::Evacuate).unwrap_err();
    let Error::Shortfall(why) = why else {
        panic!("{why}")
    };
    assert_eq!(
        (why.pinned, why.free, why.largest),
        (2 * UNIT, 2 * UNIT, UNIT)
    );
    assert_eq!(why.whole, 2 * UNIT);
    drop(guards);
    let report = copying(Strategy::Evacuate).unwrap();
    assert_eq!(report.bytes_copied, UNIT);
    yard.end();
}

fn queued_work_on_old_addresses_goes_on(on: On) {
    let mut yard = Yard::halved(on, 8, UNIT, config());
    yard.stream.synchronize().unwrap();
    // A block that is freed while its last work has not run.
    let last = yard.heap.alloc_aged(UNIT, Age::Old, &yard.stream).unwrap();
    let hold = yard.stream.hold().unwrap();
    yard.write(&last, 7, &yard.stream);
    drop(last);
    let (block, report) = yard
        .heap
        .alloc_by(Strategy::Remap, 4 * UNIT, Age::Old, &yard.stream)
        .unwrap();
    assert_eq!(report.unwrap().remapped, 3);
    yard.write(&block, 8, &yard.stream);
    // Not before its work is done.
    yard.heap.maintain(&yard.other).unwrap();
    assert!(yard.heap.stats().aliases > 0);
    hold.release();
    yard.blocks.push((block, 8));
    yard.look(&yard.stream);
    yard.heap.settle().unwrap();
    yard.end();
}

fn another_stream_waits_for_the_copy(on: On) {
    let yard = Yard::halved(on, 8, UNIT, config());
    yard.other.wait(&yard.stream.fence().unwrap()).unwrap();
    let hold = yard.stream.hold().unwrap();
    let report = yard
        .heap
        .defragment(
            &yard.stream,
            Strategy::Compact,
            Goal::Contiguous(4 * UNIT),
            Bound::NONE,
        )
        .unwrap();
    assert!(report.finished && report.bytes_copied > 0);
    // Queued on the other stream while the copies wait for the hold.
    for (block, seed) in &yard.blocks {
        yard.write(block, *seed, &yard.other);
    }
    hold.release();
    yard.look(&yard.other);
    // And memory that was copied from goes to another stream in order.
    let block = yard.heap.alloc(3 * UNIT, &yard.other).unwrap();
    yard.write(&block, 5, &yard.other);
    yard.stream.wait(&yard.other.fence().unwrap()).unwrap();
    drop(block);
    yard.end();
}

fn whole_live_granules_are_remapped_when_addresses_are_short(on: On) {
    let config = MovableConfig {
        addresses: 10 * UNIT,
        ..config()
    };
    let mut yard = Yard::halved(on, 8, UNIT, config);
    let (block, report) = yard
        .heap
        .alloc_by(Strategy::Remap, 4 * UNIT, Age::Old, &yard.stream)
        .unwrap();
    let report = report.unwrap();
    assert_eq!(report.bytes_copied, 0);
    assert!(report.pointers_changed > 0, "{report:?}");
    yard.write(&block, 9, &yard.stream);
    yard.blocks.push((block, 9));
    yard.look(&yard.stream);
    yard.heap.settle().unwrap();
    yard.end();
}

fn a_pass_stops_half_way_and_goes_on(on: On) {
    for strategy in [Strategy::Remap, Strategy::Compact, Strategy::Hybrid] {
        let yard = Yard::halved(on, 16, UNIT, config());
        let bound = Bound {
            steps: Some(1),
            ..Bound::NONE
        };
        let goal = Goal::Contiguous(8 * UNIT);
        let mut passes = 0;
        loop {
            let report = yard
                .heap
                .defragment(&yard.stream, strategy, goal, bound)
                .unwrap();
            yard.look(&yard.stream);
            yard.audit();
            passes += 1;
            assert!(passes < 20);
            if report.finished {
                break;
            }
            assert_eq!(report.steps, 1);
        }
        assert!(passes > 1 || strategy == Strategy::Hybrid, "{strategy}");
        assert!(yard.heap.stats().largest_free >= 8 * UNIT);
        yard.end();
    }
}

fn a_pass_is_bounded_in_time(on: On) {
    let yard = Yard::halved(on, 8, UNIT, config());
    let goal = Goal::Contiguous(4 * UNIT);
    let none = Bound::time(Duration::ZERO);
    let report = yard
        .heap
        .defragment(&yard.stream, Strategy::Remap, goal, none)
        .unwrap();
    assert!(!report.finished);
    assert_eq!((report.steps, report.remapped), (0, 0));
    let much = Bound::time(Duration::from_secs(60));
    let report = yard
        .heap
        .defragment(&yard.stream, Strategy::Remap, goal, much)
        .unwrap();
    assert!(report.finished);
    yard.end();
}

fn maintaining_follows_threshold_and_interval(on: On) {
    let wasteful = |interval| {
        let lazy = Lazy {
            interval,
            waste_permille: 300,
        };
        let yard = Yard::halved(on, 8, 256 * KIB, MovableConfig { lazy, ..config() });
        assert_eq!(yard.heap.stats().waste_permille(), 500);
        yard
    };
    let yard = wasteful(Duration::from_secs(3600));
    assert_eq!(yard.heap.maintain(&yard.stream).unwrap(), None, "too soon");
    yard.end();
    let yard = wasteful(Duration::from_millis(30));
    std::thread::sleep(Duration::from_millis(31));
    yard.stream.synchronize().unwrap();
    let report = yard.heap.maintain(&yard.stream).unwrap().unwrap();
    assert!(report.finished && report.bytes_copied > 0);
    yard.look(&yard.stream);
    yard.stream.synchronize().unwrap();
    yard.heap.settle().unwrap();
    eventually(|| {
        yard.heap.trim(0);
        yard.heap.stats().waste_permille() <= 300
    })
    .unwrap();
    yard.end();
}

fn an_allocation_takes_from_the_pool_what_is_missing(on: On) {
    let mut yard = Yard::new(on, 8, config());
    for seed in 1..=3 {
        let block = yard.heap.alloc(2 * UNIT + 100, &yard.stream).unwrap();
        assert_eq!(block.len(), 2 * UNIT + 100);
        yard.write(&block, seed, &yard.stream);
        yard.blocks.push((block, seed));
    }
    assert!(yard.heap.stats().mapped <= 7 * UNIT);
    let why = yard.heap.alloc(3 * UNIT, &yard.stream).unwrap_err();
    assert!(
        matches!(why, Error::Shortfall(_)) && why.is_out_of_memory(),
        "{why}"
    );
    yard.look(&yard.stream);
    yard.end();
}

fn memory_goes_back_to_the_pool(on: On) {
    let mut yard = Yard::halved(on, 8, UNIT, config());
    yard.stream.synchronize().unwrap();
    eventually(|| {
        yard.heap.trim(UNIT);
        yard.heap.stats().free == UNIT
    })
    .unwrap();
    yard.audit();
    // Another holder of the pool takes what is free here, whether it was given back or not.
    let arena = granule::Arena::new(&yard.pool, 4 * UNIT).unwrap();
    eventually(|| arena.grow(4 * UNIT).is_ok()).unwrap();
    assert_eq!(yard.heap.stats().free, 0);
    drop(arena);
    let block = yard.heap.alloc(2 * UNIT, &yard.stream).unwrap();
    yard.write(&block, 70, &yard.stream);
    yard.blocks.push((block, 70));
    yard.end();
}

fn a_copying_strategy_takes_new_memory_if_it_may(on: On) {
    let yard = Yard::halved(on, 8, UNIT, config());
    yard.pool.set_budget(16 * UNIT).unwrap();
    let (block, report) = yard
        .heap
        .alloc_by(Strategy::Buddy, 4 * UNIT, Age::Old, &yard.stream)
        .unwrap();
    assert_eq!(report.unwrap().extra_memory, 4 * UNIT);
    drop(block);
    yard.end();
}

fn blocks_of_no_bytes_and_of_too_many(on: On) {
    let yard = Yard::new(on, 4, config());
    let none = yard
        .rig
        .without_calls(|| yard.heap.alloc(0, &yard.stream).unwrap());
    assert!(none.is_empty() && none.pin().unwrap().range().is_empty());
    for size in [u64::MAX, u64::MAX / 2, 49 * UNIT] {
        let refused = yard
            .rig
            .without_calls(|| yard.heap.alloc(size, &yard.stream));
        assert!(
            matches!(refused, Err(Error::TooLarge { .. })),
            "{refused:?}"
        );
    }
    let pool = Pool::new(&yard.rig.device, PoolConfig::with_budget(8 * MIB)).unwrap();
    for (granule, align) in [
        (3 * MIB, 256),
        (MIB, 256),
        (UNIT, 3),
        (UNIT, 2 * UNIT),
        (UNIT, 0),
    ] {
        let bad = MovableConfig {
            granule,
            align,
            ..MovableConfig::known(CostTable::default())
        };
        let refused = MovableHeap::new(&pool, bad);
        assert!(
            matches!(refused, Err(Error::InvalidConfig { .. })),
            "{refused:?}"
        );
    }
    drop((none, pool));
    yard.end();
}

fn threads_allocate_and_access_beside_passes(on: On) {
    let yard = Yard::halved(on, 16, UNIT / 2, config());
    yard.stream.synchronize().unwrap();
    let stop = AtomicBool::new(false);
    let heap = &yard.heap;
    std::thread::scope(|scope| {
        let passes = scope.spawn(|| {
            let mut done = 0;
            for round in 0..30 {
                let strategy = Strategy::ALL[round % Strategy::ALL.len()];
                let goal = Goal::Contiguous((2 + round as u64 % 5) * UNIT);
                match heap.defragment(&yard.stream, strategy, goal, Bound::NONE) {
                    Ok(_) | Err(Error::Shortfall(_)) => done += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            stop.store(true, Ordering::Release);
            done
        });
        let users = scope.spawn(|| {
            let mut mine: Vec<(granule::defrag::MovableBlock, u64)> = Vec::new();
            let mut n = 1000;
            while !stop.load(Ordering::Acquire) {
                n += 1;
                if let Ok(block) = heap.alloc(300 * KIB, &yard.other) {
                    yard.write(&block, n, &yard.other);
                    mine.push((block, n));
                }
                if mine.len() > 6 {
                    let (block, seed) = mine.remove(0);
                    let guard = block.access(&yard.other).unwrap();
                    yard.check(guard.range(), seed, &yard.other);
                }
            }
            mine
        });
        // The blocks that were there before, read all the while by yet another stream.
        let third = yard.rig.device.create_stream().unwrap();
        while !stop.load(Ordering::Acquire) {
            for (block, _) in yard.blocks.iter().take(4) {
                let guard = block.access(&third).unwrap();
                let kernel = Kernel::Spin { nanos: 1000 };
                yard.rig.inner.launch(kernel, third.id()).unwrap();
                drop(guard);
            }
            std::thread::yield_now();
        }
        assert_eq!(passes.join().unwrap(), 30);
        let mine = users.join().unwrap();
        third.synchronize().unwrap();
        drop(mine);
    });
    yard.other.synchronize().unwrap();
    yard.look(&yard.stream);

    yard.end();
}

fn sliding_hops_where_it_would_overlap(on: On) {
    let mut yard = Yard::new(on, 8, config());
    yard.heap.grow(8 * UNIT, &yard.stream).unwrap();
    // Small gaps before large blocks: each slides by less than its length.
    let mut gaps = Vec::new();
    for seed in 1..=4 {
        gaps.push(yard.heap.alloc(UNIT / 4, &yard.stream).unwrap());
        let block = yard.heap.alloc(UNIT, &yard.stream).unwrap();
        yard.write(&block, seed, &yard.stream);
        yard.blocks.push((block, seed));
    }
    // Beyond them a run that a block can hop by way of, then a barrier.
    gaps.push(yard.heap.alloc(UNIT, &yard.stream).unwrap());
    let rest = yard
        .heap
        .alloc(yard.heap.stats().largest_free, &yard.stream)
        .unwrap();
    let still = rest.pin().unwrap();
    drop(gaps);
    let report = yard
        .heap
        .defragment(
            &yard.stream,
            Strategy::Compact,
            Goal::Contiguous(UNIT + UNIT / 2),
            Bound::NONE,
        )
        .unwrap();
    assert!(report.finished && report.bytes_copied > 0, "{report:?}");
    yard.look(&yard.stream);
    drop(still);
    drop(rest);
    yard.end();
}
