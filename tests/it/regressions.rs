//! Bugs of other allocators, as tests of this one.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use granule::driver::{Call, DriverCode};
use granule::units::{GIB, MIB};
use granule::{Arena, Device, Error, Policy, PoolConfig, Tensor};

use crate::support::{On, Rig, audit, check_extents, head, small_granules};

const CODES: [DriverCode; 2] = [DriverCode::OUT_OF_MEMORY, DriverCode::UNKNOWN];

/// pytorch#188008: setting access ran out of memory after the maps had succeeded; every later
/// allocation failed until the process was restarted.
fn a_failed_growth_is_undone_and_can_be_repeated(on: On) {
    for call in [Call::Create, Call::Map, Call::SetAccess] {
        for n in 1..=4 {
            let rig = Rig::new(on);
            let pool = rig.pool(small_granules(256 * MIB));
            let arena = Arena::new(&pool, GIB).unwrap();
            arena.grow(64 * MIB).unwrap();
            rig.write(arena.range(), 7);
            let base = arena.base();
            rig.fault.fail(call, n, DriverCode::OUT_OF_MEMORY);
            let grown = arena.grow(128 * MIB);
            if rig.fault.fired() == 1 {
                assert!(grown.unwrap_err().is_out_of_memory());
                assert_eq!(arena.len(), 64 * MIB);
            }
            rig.check(head(&arena, 64 * MIB), 7);
            audit(&pool);
            rig.fault.clear();
            arena.grow(128 * MIB).unwrap();
            assert_eq!((arena.base(), arena.len()), (base, 128 * MIB));
            rig.check(head(&arena, 64 * MIB), 7);
            drop((arena, pool));
            rig.assert_nothing_left();
        }
    }
}

/// invergent-ai/surogate#117: creating failed on V after K had been mapped; K was mapped again later.
fn keys_and_values_grow_together_or_not_at_all(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(PoolConfig::with_budget(64 * MIB).granule(2 * MIB));
    let (k, v) = (
        Arena::new(&pool, 64 * MIB).unwrap(),
        Arena::new(&pool, 64 * MIB).unwrap(),
    );
    rig.fault.fail(Call::Create, 5, DriverCode::OUT_OF_MEMORY);
    let grown = Arena::grow_all(&[(&k, 8 * MIB), (&v, 8 * MIB)]);
    assert!(grown.unwrap_err().is_out_of_memory());
    assert_eq!((k.len(), v.len(), k.mapped(), v.mapped()), (0, 0, 0, 0));
    audit(&pool);
    Arena::grow_all(&[(&k, 8 * MIB), (&v, 8 * MIB)]).unwrap();
    check_extents(&k);
    check_extents(&v);
}

/// cuda-python#2388: a failed growth gave the old range its mapping back but not its access.
fn the_old_range_can_be_written_after_a_failed_growth(on: On) {
    for n in 1..=3 {
        let rig = Rig::new(on);
        let pool = rig.pool(small_granules(256 * MIB));
        let arena = Arena::new(&pool, GIB).unwrap();
        arena.grow(20 * MIB).unwrap();
        rig.fault.fail(Call::SetAccess, n, DriverCode::UNKNOWN);
        let _ = arena.grow(100 * MIB);
        rig.write(head(&arena, 20 * MIB), n);
        rig.check(head(&arena, 20 * MIB), n);
    }
}

/// modelexpress#282, vLLM: the record of a block was dropped before its unmap had succeeded.
fn what_cannot_be_unmapped_is_remembered(on: On) {
    for code in CODES {
        let rig = Rig::new(on);
        let pool = rig.pool(small_granules(64 * MIB));
        let mut arena = Arena::new(&pool, 64 * MIB).unwrap();
        arena.grow(40 * MIB).unwrap();
        rig.fault.fail(Call::Unmap, 2, code);
        arena.shrink(0).unwrap_err();
        let mapped = arena.mapped();
        assert!(arena.is_empty() && mapped > 0 && mapped < 40 * MIB);
        assert_eq!(audit(&pool).mapped, mapped);
        pool.trim(0).unwrap();
        assert_eq!((arena.mapped(), audit(&pool).created), (0, 0));

        arena.grow(40 * MIB).unwrap();
        rig.fault.fail_from(Call::Unmap, 1, code);
        drop(arena);
        assert_eq!(rig.device.quarantined(), 1);
        assert_eq!(audit(&pool).mapped, 40 * MIB);
        rig.fault.clear();
        // The next reservation sweeps.
        let next = Arena::new(&pool, 64 * MIB).unwrap();
        assert_eq!(rig.device.quarantined(), 0);
        next.grow(64 * MIB).unwrap();
        drop((next, pool));
        rig.assert_nothing_left();
    }
}

/// tensorflow#50699: waiting inside an allocation for work that needs a later launch of the same
/// thread never ends.
fn an_allocation_that_may_not_wait_does_not(on: On) {
    let rig = Rig::new(on);
    let config = PoolConfig {
        wait: Duration::ZERO,
        ..small_granules(64 * MIB)
    };
    let pool = rig.pool(config);
    let mut arena = Arena::new(&pool, 64 * MIB).unwrap();
    let stream = rig.device.create_stream().unwrap();
    arena.grow_on(64 * MIB, &stream).unwrap();
    let hold = stream.hold().unwrap();
    arena.shrink_deferred(0).unwrap();
    let other = Arena::new(&pool, 64 * MIB).unwrap();
    let start = Instant::now();
    assert!(other.grow(2 * MIB).unwrap_err().is_out_of_memory());
    assert!(start.elapsed() < Duration::from_secs(2));
    drop(hold);
}

/// pytorch#188110: 60 GiB freed, 70 GiB asked for: the cache was not given up.
fn idle_memory_serves_a_larger_request(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(PoolConfig {
        watermark: Some(u64::MAX),
        ..small_granules(80 * MIB)
    });
    let mut first = Arena::new(&pool, 128 * MIB).unwrap();
    first.grow(60 * MIB).unwrap();
    first.shrink(0).unwrap();
    let second = Arena::new(&pool, 128 * MIB).unwrap();
    second.grow(70 * MIB).unwrap();
    assert!(audit(&pool).peak_created <= 80 * MIB);
}

/// pytorch#196258: emptying the cache waited for the wrong device.
fn each_pool_looks_at_its_own_device(on: On) {
    let (busy, idle) = (
        Rig::new(on),
        Rig::new(if on == On::Cuda { On::Sim } else { on }),
    );
    let pools = [&busy, &idle].map(|rig| rig.pool(small_granules(64 * MIB)));
    let mut arenas = pools
        .each_ref()
        .map(|pool| Arena::new(pool, 64 * MIB).unwrap());
    let stream = busy.device.default_stream().unwrap();
    arenas[0].grow_on(32 * MIB, &stream).unwrap();
    arenas[1].grow(32 * MIB).unwrap();
    let hold = stream.hold().unwrap();
    busy.inner.fill(arenas[0].range(), 1, stream.id()).unwrap();
    for arena in &mut arenas {
        arena.truncate(0).unwrap();
    }
    for pool in &pools {
        pool.trim(0).unwrap();
    }
    assert_eq!((arenas[0].mapped(), arenas[1].mapped()), (32 * MIB, 0));
    drop(hold);
    stream.synchronize().unwrap();
    pools[0].trim(0).unwrap();
    assert_eq!(arenas[0].mapped(), 0);
    assert!(!busy.is_lost());
}

/// kvcached#465: a thread changed the mappings of a range that a kernel was using.
fn pages_in_use_are_never_touched_while_the_rest_grows_and_shrinks(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(PoolConfig::with_budget(GIB).granule(2 * MIB));
    let arena = Arena::new(&pool, 256 * MIB).unwrap();
    arena.grow(16 * MIB).unwrap();
    let stream = rig.device.create_stream().unwrap();
    let hold = stream.hold().unwrap();
    let first = head(&arena, 64);
    rig.inner.fill(first, 3, stream.id()).unwrap();
    let before = rig.counts();
    for round in 0..20 {
        arena.grow((64 + round) * MIB).unwrap();
        check_extents(&arena);
        arena.try_shrink(16 * MIB).unwrap();
        assert_eq!(arena.mapped(), 16 * MIB);
        audit(&pool);
    }
    let since = rig.counts().since(&before);
    assert_eq!(
        since
            .sum(&[Call::SyncStream, Call::SyncEvent, Call::CreateEvent])
            .calls,
        0
    );
    drop(hold);
    stream.synchronize().unwrap();
    assert!(!rig.is_lost());
}

/// kekzl/imp#1652: new pages were zeroed on another stream than the one that wrote them first.
fn zeroing_is_ordered_on_the_callers_stream(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let stream = rig.device.create_stream().unwrap();
    let mut tensor = Tensor::<u64>::new(&pool, &[MIB / 8], 64).unwrap();
    let hold = stream.hold().unwrap();
    tensor.grow_zeroed(20, &stream).unwrap();
    rig.inner
        .fill(head(tensor.arena(), 64), 9, stream.id())
        .unwrap();
    drop(hold);
    stream.synchronize().unwrap();
    if rig.has_data() {
        let mut row = vec![0; (MIB / 8) as usize];
        tensor.copy_to_host(0, &mut row, &stream).unwrap();
        assert!(row[..8].iter().all(|w| *w == u64::from_ne_bytes([9; 8])));
        assert!(row[8..].iter().all(|w| *w == 0));
    }
}

/// cuda-python#2907, #2908, #2887: growth by sizes that are no multiple of the granularity.
fn odd_sizes_in_any_order_leave_nothing(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(GIB));
    let mut arena = Arena::new(&pool, GIB).unwrap();
    let base = arena.base();
    for to in [4096, 3 * MIB, 5 * MIB + 1, 700 * MIB] {
        arena.grow(to).unwrap();
        assert_eq!((arena.base(), arena.len()), (base, to));
        assert!(arena.mapped().is_multiple_of(2 * MIB));
    }
    arena.shrink(700 * MIB - 1).unwrap();
    let mut random = 1;
    for _ in 0..300 {
        random = granule::driver::pattern_word(random, 3);
        let to = random % (150 * MIB);
        match random >> 62 {
            0 => arena.grow(to).unwrap(),
            1 => arena.shrink(to).unwrap(),
            2 => arena.shrink_deferred(to).unwrap(),
            _ => arena.truncate(to).unwrap(),
        }
        assert_eq!(arena.base(), base);
        assert!(arena.mapped().is_multiple_of(2 * MIB) && arena.mapped() >= arena.len());
        check_extents(&arena);
    }
    audit(&pool);
    drop((arena, pool));
    rig.assert_nothing_left();
}

/// cuda-python#2344: the creation reference was never dropped; 64 closes of 64 MiB kept 4 GiB.
fn closing_arenas_returns_their_memory(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(128 * MIB).policy(Policy::Dynamic));
    for _ in 0..64 {
        let arena = Arena::new(&pool, 64 * MIB).unwrap();
        arena.grow(64 * MIB).unwrap();
        arena.close().unwrap();
    }
    let stats = audit(&pool);
    assert_eq!((stats.created, stats.creates), (0, stats.releases));
    drop(pool);
    rig.assert_nothing_left();
}

/// mold#50: unloading left memory cached.
fn trimming_leaves_exactly_the_floor(on: On) {
    let rig = Rig::new(on);
    let config = PoolConfig {
        watermark: Some(u64::MAX),
        ..small_granules(128 * MIB)
    };
    let policies = [
        (Policy::Dynamic, 0),
        (Policy::Hybrid { base: 0 }, 0),
        (Policy::Hybrid { base: 24 * MIB }, 24 * MIB),
        (Policy::Static, 128 * MIB),
    ];
    for (policy, floor) in policies {
        let pool = rig.pool(config.clone().policy(policy));
        let arena = Arena::new(&pool, 128 * MIB).unwrap();
        arena.grow(100 * MIB).unwrap();
        drop(arena);
        pool.trim(0).unwrap();
        assert_eq!(audit(&pool).created, floor, "{policy:?}");
    }
}

/// kvcached#262, HAMi-core#273: the capacity is looked at, then somebody else takes the bytes.
fn creating_decides_and_nothing_else(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(GIB));
    let arenas = [0, 1].map(|_| Arena::new(&pool, GIB).unwrap());
    rig.fault.fail_above(96 * MIB);
    thread::scope(|s| {
        for arena in &arenas {
            s.spawn(move || {
                for to in 1..=10 {
                    if let Err(error) = arena.grow(to * 16 * MIB) {
                        assert!(error.is_out_of_memory());
                    }
                }
            });
        }
    });
    audit(&pool);
    rig.fault.clear();
    for arena in &arenas {
        arena.grow(160 * MIB).unwrap();
    }
}

/// kvcached#377: free minus headroom went below zero and became huge.
fn a_budget_below_what_is_created_leaves_no_room(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB).policy(Policy::Static));
    let arena = Arena::new(&pool, GIB).unwrap();
    arena.grow(16 * MIB).unwrap();
    rig.fault.fail_from(Call::Release, 1, DriverCode::UNKNOWN);
    pool.set_budget(16 * MIB).unwrap_err();
    arena.grow(512 * MIB).unwrap_err();
    rig.fault.clear();
    pool.set_budget(16 * MIB).unwrap();
    let Err(Error::OutOfMemory(oom)) = arena.grow(17 * MIB) else {
        panic!("grown past the budget");
    };
    assert_eq!(oom.missing, 8 * MIB);
    audit(&pool);
}

/// rmm#2366, cudarc#160: what is dropped in the wrong order, or after the driver.
fn any_order_of_drops_is_safe(on: On) {
    let orders: [[usize; 4]; 6] = [
        [0, 1, 2, 3],
        [3, 2, 1, 0],
        [1, 0, 3, 2],
        [2, 3, 0, 1],
        [3, 0, 2, 1],
        [1, 3, 0, 2],
    ];
    for order in orders {
        let rig = Rig::new(on);
        let device: Device = rig.device.clone();
        let pool = rig.pool(small_granules(64 * MIB));
        let tensor = Arc::new(Tensor::<u64>::new(&pool, &[MIB / 8], 64).unwrap());
        tensor.grow(20).unwrap();
        let view = tensor.shared_view(..10).unwrap();
        let range = view.range();
        let mut parts: [Option<Box<dyn std::any::Any>>; 4] = [
            Some(Box::new(device)),
            Some(Box::new(pool)),
            Some(Box::new(tensor)),
            Some(Box::new(view)),
        ];
        for i in order {
            if parts[3].is_some() {
                rig.write(range, i as u64);
            }
            parts[i] = None;
        }
        rig.assert_nothing_left();
    }
}

/// The driver has gone before us, as at process exit: nothing is reported, nothing panics.
fn a_driver_that_is_gone_is_no_error_in_drops(on: On) {
    for code in [DriverCode::DEINITIALIZED, DriverCode::CONTEXT_IS_DESTROYED] {
        let rig = Rig::new(on);
        let pool = rig.pool(small_granules(64 * MIB));
        let mut arena = Arena::new(&pool, 64 * MIB).unwrap();
        let stream = rig.device.create_stream().unwrap();
        arena.grow_on(40 * MIB, &stream).unwrap();
        arena.shrink_deferred(20 * MIB).unwrap();
        for call in Call::ALL {
            rig.fault.fail_from(*call, 1, code);
        }
        drop((arena, pool, stream));
        assert_eq!(rig.device.quarantined(), 0);
    }
}

/// An event could not be had while an arena was dropped: it was unmapped under running work.
fn a_drop_without_a_fence_waits_for_the_stream(on: On) {
    for call in [Call::CreateEvent, Call::RecordEvent, Call::SyncEvent] {
        let rig = Rig::new(on);
        let pool = rig.pool(small_granules(64 * MIB));
        let arena = Arena::new(&pool, 64 * MIB).unwrap();
        let stream = rig.device.create_stream().unwrap();
        arena.grow_on(40 * MIB, &stream).unwrap();
        let hold = stream.hold().unwrap();
        rig.inner.fill(arena.range(), 1, stream.id()).unwrap();
        rig.fault.fail_from(call, 1, DriverCode::UNKNOWN);
        let releaser = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            drop(hold);
        });
        drop(arena);
        releaser.join().unwrap();
        stream.synchronize().unwrap();
        assert!(!rig.is_lost(), "{call}");
        assert_eq!(audit(&pool).mapped, 0);
    }
}

/// Mooncake#2511, nccl#1820: a driver's address query names one granule of many.
fn ranges_list_every_granule(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(256 * MIB));
    let arena = Arena::new(&pool, 256 * MIB).unwrap();
    arena.grow(3 * MIB).unwrap();
    arena.grow(100 * MIB + 1).unwrap();
    let extents = arena.ranges();
    check_extents(&arena);
    let mut granules: Vec<_> = extents.iter().map(|e| e.granule).collect();
    granules.dedup();
    assert_eq!(granules.len(), extents.len());
    assert!(extents.iter().all(|e| e.range.len() <= 16 * MIB));
    assert!(extents.last().unwrap().offset <= 100 * MIB);
}

/// HAMi-core#172: a thread that had never used the device had no context.
fn a_fresh_thread_can_do_everything(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let pool = thread::scope(|s| {
        let (rig, moved) = (&rig, pool);
        let made = s.spawn(move || {
            let arena = Arena::new(&moved, 64 * MIB).unwrap();
            arena.grow(20 * MIB).unwrap();
            rig.write(arena.range(), 1);
            (moved, arena)
        });
        let (moved, mut arena) = made.join().unwrap();
        let gone = s.spawn(move || {
            rig.check(arena.range(), 1);
            arena.shrink(1).unwrap();
            arena.close().unwrap();
            moved
        });
        gone.join().unwrap()
    });
    audit(&pool);
    drop(pool);
    rig.assert_nothing_left();
}

on_each_driver! {
    a_failed_growth_is_undone_and_can_be_repeated
    keys_and_values_grow_together_or_not_at_all
    the_old_range_can_be_written_after_a_failed_growth
    what_cannot_be_unmapped_is_remembered
    an_allocation_that_may_not_wait_does_not
    idle_memory_serves_a_larger_request
    each_pool_looks_at_its_own_device
    pages_in_use_are_never_touched_while_the_rest_grows_and_shrinks
    zeroing_is_ordered_on_the_callers_stream
    odd_sizes_in_any_order_leave_nothing
    closing_arenas_returns_their_memory
    trimming_leaves_exactly_the_floor
    creating_decides_and_nothing_else
    a_budget_below_what_is_created_leaves_no_room
    any_order_of_drops_is_safe
    a_driver_that_is_gone_is_no_error_in_drops
    a_drop_without_a_fence_waits_for_the_stream
    ranges_list_every_granule
    a_fresh_thread_can_do_everything
}
