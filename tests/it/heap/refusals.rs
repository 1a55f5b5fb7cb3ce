//! What a heap refuses, and what it makes of odd sizes.

use std::time::{Duration, Instant};

use granule::driver::Call;
use granule::units::{KIB, MIB, Va};
use granule::{Block, Error, Heap, HeapConfig, Policy, PoolConfig, Rounding};

use super::yard::Yard;
use crate::support::On;

on_each_driver! {
    wrong_frees_are_refused_and_change_nothing
    what_is_freed_is_no_block_wherever_it_is_kept
    sizes_that_wrap_are_too_large_and_reach_no_driver
    no_bytes_cost_nothing
    an_impossible_size_fails_at_once
}

/// A second free, and addresses that are no blocks.
fn wrong_frees_are_refused_and_change_nothing(on: On) {
    let yard = Yard::new(on, 64 * MIB, HeapConfig::default(), 2);
    let other = Heap::new(&yard.pool, HeapConfig::default()).unwrap();
    let foreign = other.alloc(MIB, &yard.streams[0]).unwrap();
    let kept = yard.filled(MIB, 0, 1);
    let small = yard.alloc(256, 0);
    let raw = yard.alloc(4 * MIB, 0).into_raw();
    assert_eq!(yard.heap.usable_size(raw).unwrap(), 4 * MIB);
    yard.heap.free_raw(raw).unwrap();
    let limbo = yard.alloc(4 * MIB, 0);
    let limbo_at = limbo.ptr();
    yard.order(0, 1);
    let hold = yard.streams[1].hold().unwrap();
    limbo.free_on(&yard.streams[1]).unwrap();
    let before = yard.heap.stats();
    let stale = |at: u64| {
        let error = yard.heap.free_raw(Va::new(at)).unwrap_err();
        assert!(matches!(error, Error::Stale { .. }), "{at:#x}: {error}");
        assert!(yard.heap.usable_size(Va::new(at)).is_err());
        assert!(
            yard.heap
                .record_use_raw(Va::new(at), &yard.streams[1])
                .is_err()
        );
    };
    let inside = |at: u64| {
        let error = yard.heap.free_raw(Va::new(at)).unwrap_err();
        assert!(matches!(error, Error::NotAStart { .. }), "{at:#x}: {error}");
    };
    stale(limbo_at.get());
    stale(foreign.ptr().get());
    stale(0xdead_0000);
    stale(u64::MAX);
    stale(1);
    inside(kept.ptr().get() + 256);
    inside(kept.ptr().get() + 1);
    inside(kept.ptr().get() + MIB - 1);
    inside(small.ptr().get() + 255);
    yard.heap.free_raw(Va::new(0)).unwrap();
    assert_eq!(yard.heap.stats(), before);
    drop(hold);
    yard.check(&kept, 1, 0);
    yard.audit();
    drop((foreign, kept, small, other));
    yard.end();
}

/// Freed blocks are kept in a thread's magazine, in the stream's lists, or joined with others: by its
/// address none can be freed again, used or asked about.
fn what_is_freed_is_no_block_wherever_it_is_kept(on: On) {
    let yard = Yard::new(on, 256 * MIB, HeapConfig::default(), 2);
    let heap = &yard.heap;
    for (size, count) in [(256, 700), (64 * KIB, 180), (128 * KIB, 20), (4 * MIB, 3)] {
        for way in 0..3 {
            let places: Vec<Va> = match way {
                0 => {
                    let blocks: Vec<_> = (0..count).map(|_| yard.alloc(size, 0)).collect();
                    blocks.iter().map(Block::ptr).collect()
                }
                1 => {
                    let blocks: Vec<_> = (0..count).map(|_| yard.alloc(size, 0)).collect();
                    blocks.into_iter().map(Block::into_raw).collect()
                }
                _ => (0..count)
                    .map(|_| heap.alloc_raw(size, 256, &yard.streams[0]).unwrap())
                    .collect(),
            };
            if way > 0 {
                assert_eq!(heap.stats().blocks, count);
                places.iter().for_each(|at| heap.free_raw(*at).unwrap());
            }
            let before = heap.stats();
            assert_eq!((before.live, before.blocks), (0, 0));
            for at in places {
                let error = heap.free_raw(at).unwrap_err();
                assert!(matches!(error, Error::Stale { .. }), "{size} {error}");
                assert!(heap.usable_size(at).is_err(), "{size}");
                assert!(heap.record_use_raw(at, &yard.streams[1]).is_err(), "{size}");
            }
            assert_eq!(heap.stats(), before);
            yard.audit();
            // Each is had once.
            let mut again: Vec<_> = (0..count).map(|_| yard.alloc(size, 0)).collect();
            again.sort_by_key(Block::ptr);
            let apart = |pair: &[Block]| pair[0].range().end() <= pair[1].range().start();
            assert!(again.windows(2).all(apart), "{size}");
        }
    }
    yard.audit();
    yard.end();
}

/// Sizes near the end of 64 bits wrapped to nothing and "succeeded".
fn sizes_that_wrap_are_too_large_and_reach_no_driver(on: On) {
    let yard = Yard::new(on, 64 * MIB, HeapConfig::default(), 1);
    let stream = &yard.streams[0];
    let huge = [
        u64::MAX,
        u64::MAX - 3,
        u64::MAX - 2 * MIB + 1,
        1 << 63,
        1 << 48,
    ];
    for first in [true, false] {
        yard.rig.without_calls(|| {
            for size in huge {
                for align in [256, 2 * MIB, 1 << 40] {
                    let error = yard.heap.alloc_aligned(size, align, stream).unwrap_err();
                    assert!(
                        matches!(error, Error::TooLarge { .. }),
                        "{size:#x}: {error}"
                    );
                }
            }
        });
        if first {
            drop(yard.alloc(MIB, 0));
        }
    }
    for align in [1 << 62, 1 << 63] {
        let error = yard.heap.alloc_aligned(MIB, align, stream).unwrap_err();
        assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    }
    for align in [0, 3, 257] {
        let error = yard.heap.alloc_aligned(MIB, align, stream).unwrap_err();
        assert!(matches!(error, Error::InvalidConfig { .. }), "{error}");
    }
    for rounding in [Rounding::PowerOfTwo, Rounding::Divisions(4)] {
        let config = HeapConfig {
            rounding,
            ..HeapConfig::default()
        };
        let heap = Heap::new(&yard.pool, config).unwrap();
        for size in huge {
            assert!(matches!(
                heap.alloc(size, stream),
                Err(Error::TooLarge { .. })
            ));
        }
    }
    yard.audit();
    yard.end();
}

/// Frameworks do ask for no bytes.
fn no_bytes_cost_nothing(on: On) {
    let yard = Yard::new(on, 64 * MIB, HeapConfig::default(), 2);
    let before = yard.rig.counts();
    let blocks = [yard.alloc(0, 0), yard.alloc(0, 0)];
    assert_eq!(yard.rig.calls(&before, Call::Create), 0);
    for block in blocks {
        assert!(block.is_empty() && block.ptr().get() == 0 && block.range().is_empty());
        block.record_use(&yard.streams[1]).unwrap();
        block
            .record_fence(&yard.streams[1].fence().unwrap())
            .unwrap();
        yard.heap.free_raw(block.into_raw()).unwrap();
    }
    let stats = yard.heap.stats();
    assert_eq!((stats.live, stats.held, stats.blocks), (0, 0, 0));
    yard.audit();
    yard.end();
}

/// No wait helps a size above the budget.
fn an_impossible_size_fails_at_once(on: On) {
    let config = HeapConfig {
        wait: Duration::from_secs(60),
        ..HeapConfig::default()
    };
    let yard = Yard::new(on, 64 * MIB, config, 2);
    let a = yard.filled(16 * MIB, 0, 1);
    let hold = yard.streams[1].hold().unwrap();
    a.free_on(&yard.streams[1]).unwrap();
    let started = Instant::now();
    let error = yard.heap.alloc(65 * MIB, &yard.streams[0]).unwrap_err();
    assert!(error.is_out_of_memory());
    assert!(started.elapsed() < Duration::from_secs(5));
    drop(hold);
    // Nor with nothing to wait for.
    let _all = yard.alloc(64 * MIB, 0);
    let started = Instant::now();
    assert!(yard.heap.alloc(1, &yard.streams[0]).is_err());
    assert!(started.elapsed() < Duration::from_secs(5));
    drop(_all);
    yard.end();
}

/// What cannot work is refused when the heap is made, and what belongs elsewhere when it is passed.
#[test]
fn settings_and_strangers_are_refused() {
    let yard = Yard::new(On::Sim, 64 * MIB, HeapConfig::default(), 1);
    let good = HeapConfig::default;
    let bad = [
        HeapConfig {
            small: 8 * KIB,
            ..good()
        },
        HeapConfig {
            granule_max: 0,
            ..good()
        },
        HeapConfig {
            granule_max: 3 * MIB,
            ..good()
        },
        HeapConfig {
            granule_min: MIB,
            ..good()
        },
        HeapConfig {
            granule_min: u64::MAX,
            ..good()
        },
        HeapConfig {
            rounding: Rounding::Divisions(3),
            ..good()
        },
        HeapConfig {
            rounding: Rounding::Divisions(0),
            ..good()
        },
    ];
    for config in bad {
        let made = yard
            .rig
            .without_calls(|| Heap::new(&yard.pool, config.clone()));
        assert!(
            matches!(made, Err(Error::InvalidConfig { .. })),
            "{config:?}"
        );
    }
    let fixed = PoolConfig::with_budget(4 * MIB).granule(2 * MIB);
    let fixed = yard.rig.pool(fixed.policy(Policy::Static));
    assert!(matches!(
        Heap::new(&fixed, good()),
        Err(Error::InvalidConfig { .. })
    ));

    let other = Yard::new(On::Sim, 64 * MIB, HeapConfig::default(), 1);
    let foreign = &other.streams[0];
    let is_foreign = |result: granule::Result<()>| matches!(result, Err(Error::Foreign { .. }));
    let block = yard.alloc(MIB, 0);
    assert!(is_foreign(yard.heap.alloc(1, foreign).map(drop)));
    assert!(is_foreign(yard.heap.on(foreign).map(drop)));
    assert!(is_foreign(block.record_use(foreign)));
    assert!(is_foreign(block.record_fence(&foreign.fence().unwrap())));
    assert!(is_foreign(block.free_on(foreign)));
    assert_eq!(yard.heap.stats().blocks, 0);
    drop(fixed);
    other.end();
    yard.audit();
    yard.end();
}

/// A limit on addresses is no limit on memory, and the error says which it was.
#[test]
fn too_few_addresses_are_told_from_too_little_memory() {
    let config = HeapConfig {
        addresses: Some(32 * MIB),
        wait: Duration::ZERO,
        ..HeapConfig::default()
    };
    let yard = Yard::new(On::Sim, 256 * MIB, config, 1);
    let all: Vec<_> =
        std::iter::from_fn(|| yard.heap.alloc(8 * MIB, &yard.streams[0]).ok()).collect();
    assert_eq!(all.len(), 4);
    let error = yard.heap.alloc(8 * MIB, &yard.streams[0]).unwrap_err();
    assert!(
        matches!(error, Error::AddressSpaceExhausted { .. }),
        "{error}"
    );
    let error = yard.heap.alloc(33 * MIB, &yard.streams[0]).unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    drop(all);
    yard.audit();
    yard.end();
}

/// Rounded sizes are what blocks may use.
#[test]
fn rounding_shows_in_the_usable_size() {
    for (rounding, size, usable) in [
        (Rounding::Exact, 1000, 1024),
        (Rounding::PowerOfTwo, 5 * MIB, 8 * MIB),
        (Rounding::Divisions(4), 5 * MIB, 5 * MIB),
        (Rounding::Divisions(4), 5 * MIB + 1, 6 * MIB),
    ] {
        let config = HeapConfig {
            rounding,
            ..HeapConfig::default()
        };
        let yard = Yard::new(On::Sim, 64 * MIB, config, 1);
        let block = yard.alloc(size, 0);
        assert_eq!(block.len(), size);
        assert_eq!(yard.heap.usable_size(block.ptr()).unwrap(), usable);
        drop(block);
        yard.end();
    }
}
