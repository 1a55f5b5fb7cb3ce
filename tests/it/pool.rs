//! Policies, recycling, look-ahead, and threads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use granule::driver::{Call, DriverCode, Kernel};
use granule::units::MIB;
use granule::{Arena, ArenaConfig, Policy, Pool, PoolConfig};

use crate::support::{On, Rig, audit, check_extents, eventually, head, small_granules};

fn a_static_pool_takes_all_at_once_and_never_asks_again(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(68 * MIB).policy(Policy::Static));
    let stats = audit(&pool);
    assert_eq!(
        (stats.floor, stats.created, stats.idle),
        (64 * MIB, 64 * MIB, 64 * MIB)
    );
    let before = rig.counts();
    let mut arena = Arena::new(&pool, 256 * MIB).unwrap();
    for to in [1, 20 * MIB, 64 * MIB] {
        arena.grow(to).unwrap();
        audit(&pool);
    }
    arena.grow(64 * MIB + 1).unwrap_err();
    arena.shrink(0).unwrap();
    assert_eq!(pool.trim(0).unwrap(), 0);
    assert_eq!(
        rig.calls(&before, Call::Create) + rig.calls(&before, Call::Release),
        0
    );
    assert_eq!(audit(&pool).idle, 64 * MIB);
    drop((arena, pool));
    rig.assert_nothing_left();
}

fn a_dynamic_pool_keeps_nothing_idle(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB).policy(Policy::Dynamic));
    let mut arena = Arena::new(&pool, 64 * MIB).unwrap();
    arena.grow(50 * MIB).unwrap();
    arena.shrink(10 * MIB).unwrap();
    let stats = audit(&pool);
    assert_eq!((stats.idle, stats.created), (0, stats.mapped));
    arena.shrink(0).unwrap();
    assert_eq!(audit(&pool).created, 0);
    assert_eq!(rig.left().granules, 0);
}

fn a_hybrid_pool_keeps_its_base_and_idle_up_to_the_watermark(on: On) {
    let rig = Rig::new(on);
    let config = PoolConfig {
        watermark: Some(32 * MIB),
        ..small_granules(128 * MIB).policy(Policy::Hybrid { base: 10 * MIB })
    };
    let pool = rig.pool(config);
    assert_eq!(
        audit(&pool).created,
        16 * MIB,
        "the base is rounded up to granules"
    );
    let mut arena = Arena::new(&pool, 128 * MIB).unwrap();
    arena.grow(128 * MIB).unwrap();
    arena.shrink(0).unwrap();
    let stats = audit(&pool);
    assert!(
        stats.idle <= 32 * MIB && stats.created == stats.idle,
        "{stats:?}"
    );
    assert!(stats.idle >= 16 * MIB);
    pool.trim(0).unwrap();
    assert_eq!(audit(&pool).created, 16 * MIB);
    pool.set_watermark(u64::MAX);
    arena.grow(128 * MIB).unwrap();
    arena.shrink(0).unwrap();
    assert_eq!(audit(&pool).idle, 128 * MIB);
    assert_eq!(
        pool.trim(100 * MIB).unwrap().next_multiple_of(16 * MIB),
        32 * MIB
    );
}

fn memory_that_fits_nobody_makes_way_for_what_does(on: On) {
    for (slack, footprint) in [(None, 96 * MIB), (Some(0), 64 * MIB)] {
        let rig = Rig::new(on);
        let pool = rig.pool(PoolConfig {
            slack,
            watermark: Some(u64::MAX),
            ..small_granules(256 * MIB)
        });
        let mut coarse = Arena::new(&pool, 64 * MIB).unwrap();
        coarse.grow(64 * MIB).unwrap();
        coarse.shrink(0).unwrap();
        assert_eq!(audit(&pool).idle, 64 * MIB);
        // Granules of 16 MiB are no use for steps of 4 MiB.
        let fine = ArenaConfig::new(64 * MIB).granule(4 * MIB);
        let fine = Arena::with_config(&pool, &fine).unwrap();
        fine.grow(32 * MIB).unwrap();
        rig.write(fine.range(), 1);
        rig.check(fine.range(), 1);
        let stats = audit(&pool);
        assert_eq!(stats.created, footprint, "{stats:?}");
        assert_eq!(stats.peak_created, footprint, "{stats:?}");
        drop((coarse, fine, pool));
        rig.assert_nothing_left();
    }
}

fn a_release_that_is_refused_costs_no_growth(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(PoolConfig {
        slack: Some(0),
        ..small_granules(256 * MIB)
    });
    let mut coarse = Arena::new(&pool, 32 * MIB).unwrap();
    coarse.grow(32 * MIB).unwrap();
    coarse.shrink(0).unwrap();
    let fine = ArenaConfig::new(64 * MIB).granule(4 * MIB);
    let fine = Arena::with_config(&pool, &fine).unwrap();
    rig.fault.fail_from(Call::Release, 1, DriverCode::UNKNOWN);
    fine.grow(32 * MIB).unwrap();
    rig.fault.clear();
    let stats = audit(&pool);
    assert_eq!((stats.created, stats.idle), (64 * MIB, 32 * MIB));
    assert!(stats.failed_releases > 0);
    drop((coarse, fine, pool));
    rig.assert_nothing_left();
}

fn what_one_arena_gives_back_another_gets_without_a_create(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB).policy(Policy::Hybrid { base: 64 * MIB }));
    let mut first = Arena::new(&pool, 64 * MIB).unwrap();
    let second = Arena::new(&pool, 64 * MIB).unwrap();
    first.grow(64 * MIB).unwrap();
    rig.write(first.range(), 1);
    let before = rig.counts();
    first.shrink(0).unwrap();
    second.grow(64 * MIB).unwrap();
    assert_eq!(
        rig.calls(&before, Call::Create) + rig.calls(&before, Call::Release),
        0
    );
    let stats = audit(&pool);
    assert_eq!((stats.created, stats.peak_created), (64 * MIB, 64 * MIB));
    assert!(stats.recycled >= 8);
    rig.write(second.range(), 2);
    rig.check(second.range(), 2);
}

fn growth_within_what_is_mapped_makes_no_driver_call(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let mut arena = Arena::new(&pool, 64 * MIB).unwrap();
    arena.grow(33 * MIB).unwrap();
    let mapped = arena.mapped();
    rig.without_calls(|| {
        arena.grow(mapped).unwrap();
        arena.truncate(5).unwrap();
        arena.extend(mapped - 5).unwrap();
    });
    assert_eq!(arena.len(), mapped);
}

fn handed_over_memory_is_zeroed_when_asked(on: On) {
    let rig = Rig::new(on);
    let config = PoolConfig {
        zero_on_handover: true,
        ..small_granules(64 * MIB).policy(Policy::Hybrid { base: 64 * MIB })
    };
    let pool = rig.pool(config);
    let stream = rig.device.create_stream().unwrap();
    for on_stream in [false, true] {
        let mut first = Arena::new(&pool, 64 * MIB).unwrap();
        first.grow(40 * MIB).unwrap();
        rig.write(first.range(), 1);
        first.shrink(0).unwrap();
        let second = Arena::new(&pool, 64 * MIB).unwrap();
        if on_stream {
            second.grow_on(40 * MIB, &stream).unwrap();
            stream.synchronize().unwrap();
        } else {
            second.grow(40 * MIB).unwrap();
        }
        rig.check_zero(second.range());
        rig.write(second.range(), 2);
    }
}

/// What a growth on one stream mapped beyond its length was free for all at once, while the zeroing
/// was still queued on that stream.
fn zeroing_on_one_stream_does_not_hit_the_writes_of_another(on: On) {
    let rig = Rig::new(on);
    let config = PoolConfig {
        zero_on_handover: true,
        watermark: Some(u64::MAX),
        ..small_granules(128 * MIB)
    };
    let pool = rig.pool(config);
    let mut dirty = Arena::new(&pool, 96 * MIB).unwrap();
    dirty.grow(96 * MIB).unwrap();
    dirty.shrink(0).unwrap();
    let (first, second) = (
        rig.device.create_stream().unwrap(),
        rig.device.create_stream().unwrap(),
    );
    let arena = Arena::new(&pool, 96 * MIB).unwrap();
    let hold = first.hold().unwrap();
    arena.grow_on(65 * MIB, &first).unwrap();
    arena.grow_on(66 * MIB, &second).unwrap();
    let late = arena.range().sub(65 * MIB, MIB).unwrap();
    let kernel = Kernel::WritePattern {
        range: late.sub(0, 64).unwrap(),
        seed: 1,
    };
    rig.inner.launch(kernel, second.id()).unwrap();
    thread::sleep(Duration::from_millis(10));
    drop(hold);
    second.synchronize().unwrap();
    first.synchronize().unwrap();
    rig.check(late.sub(0, 64).unwrap(), 1);
}

/// The pool unmapped granules whose zeroing was still queued, where a growth had mapped more than
/// was asked for.
fn memory_is_not_taken_back_under_its_own_zeroing(on: On) {
    let rig = Rig::new(on);
    let config = PoolConfig {
        zero_on_handover: true,
        largest_granule: 2 * MIB,
        ..PoolConfig::with_budget(96 * MIB).granule(2 * MIB)
    };
    let pool = rig.pool(PoolConfig {
        watermark: Some(u64::MAX),
        ..config
    });
    let stream = rig.device.create_stream().unwrap();
    let mut dirty = Arena::new(&pool, 96 * MIB).unwrap();
    dirty.grow(96 * MIB).unwrap();
    dirty.shrink(0).unwrap();
    let mut arena = Arena::new(&pool, 96 * MIB).unwrap();
    arena.grow_on(40 * MIB, &stream).unwrap();
    let hold = stream.hold().unwrap();
    arena.grow_on(60 * MIB, &stream).unwrap();
    // Says that nothing uses the tail; the zeroing does.
    let releaser = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        drop(hold);
    });
    pool.trim(0).unwrap();
    arena.shrink_after(40 * MIB, &[]).unwrap();
    stream.synchronize().unwrap();
    releaser.join().unwrap();
    assert!(!rig.is_lost());
    drop((arena, dirty, pool, stream));
    rig.assert_nothing_left();
}

fn spare_granules_are_made_ahead(on: On) {
    let rig = Rig::new(on);
    let config = PoolConfig {
        spare: 16 * MIB,
        ..small_granules(64 * MIB)
    };
    let pool = rig.pool(config);
    eventually(|| pool.stats().idle == 16 * MIB).unwrap();
    let before = rig.counts();
    let arena = Arena::new(&pool, 64 * MIB).unwrap();
    arena.grow(16 * MIB).unwrap();
    eventually(|| pool.stats().idle == 16 * MIB).unwrap();
    assert_eq!(rig.calls(&before, Call::Create), 2);
    arena.grow(64 * MIB).unwrap();
    assert_eq!(audit(&pool).created, 64 * MIB);
    drop((arena, pool));
    rig.assert_nothing_left();
}

fn a_look_ahead_makes_growth_a_bounds_check(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(256 * MIB));
    let config = ArenaConfig::new(256 * MIB).look_ahead(32 * MIB);
    let arena = Arena::with_config(&pool, &config).unwrap();
    for step in 1..=12 {
        eventually(|| arena.mapped() >= (step * 16 * MIB).min(256 * MIB)).unwrap();
        arena.grow(step * 16 * MIB).unwrap();
        rig.write(arena.range(), step);
        rig.check(arena.range(), step);
    }
    eventually(|| arena.mapped() >= 12 * 16 * MIB + 16 * MIB).unwrap();
    drop((arena, pool));
    rig.assert_nothing_left();
}

fn what_was_mapped_ahead_is_given_up_when_another_needs_it(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let config = ArenaConfig::new(64 * MIB).look_ahead(48 * MIB);
    let greedy = Arena::with_config(&pool, &config).unwrap();
    eventually(|| greedy.mapped() == 48 * MIB).unwrap();
    let other = Arena::new(&pool, 64 * MIB).unwrap();
    other.grow(60 * MIB).unwrap();
    audit(&pool);
}

/// The worker waited for the fence of a deferred tail and kept everybody else from the arena.
fn the_look_ahead_worker_does_not_wait_for_fences(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(128 * MIB));
    let config = ArenaConfig::new(128 * MIB).look_ahead(16 * MIB);
    let mut arena = Arena::with_config(&pool, &config).unwrap();
    let stream = rig.device.create_stream().unwrap();
    let other = rig.device.create_stream().unwrap();
    arena.grow_on(64 * MIB, &stream).unwrap();
    let hold = stream.hold().unwrap();
    arena.shrink_deferred(8 * MIB).unwrap();
    arena.grow_on(9 * MIB, &other).unwrap();
    thread::sleep(Duration::from_millis(30));
    let start = Instant::now();
    arena.grow_on(40 * MIB, &other).unwrap();
    assert!(arena.mapped() >= 40 * MIB);
    assert!(start.elapsed() < Duration::from_secs(5));
    drop(hold);
}

/// Growing, shrinking, dropping, trimming and looking ahead at once.
fn threads_grow_and_shrink_at_once(on: On) {
    let rig = Rig::new(on);
    let config = PoolConfig {
        spare: 16 * MIB,
        wait: Duration::from_millis(1),
        ..small_granules(256 * MIB)
    };
    let pool = rig.pool(config);
    let stop = AtomicBool::new(false);
    thread::scope(|s| {
        for t in 0..4u64 {
            let (pool, rig) = (&pool, &rig);
            s.spawn(move || churn(rig, pool, t));
        }
        s.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                pool.trim(32 * MIB).unwrap();
                let _ = pool.set_budget(200 * MIB);
                let _ = pool.set_budget(256 * MIB);
                assert!(pool.stats().is_consistent());
                thread::sleep(Duration::from_millis(1));
            }
        });
        s.spawn(|| {
            thread::sleep(Duration::from_millis(400));
            stop.store(true, Ordering::Relaxed);
        });
    });
    assert!(pool.stats().peak_created <= 256 * MIB);
    eventually(|| pool.audit().is_ok()).unwrap();
    assert_eq!(audit(&pool).mapped, 0);
    drop(pool);
    rig.assert_nothing_left();
}

fn churn(rig: &Rig, pool: &Pool, t: u64) {
    let start = Instant::now();
    let mut random = t + 1;
    while start.elapsed() < Duration::from_millis(300) {
        let config = ArenaConfig::new(128 * MIB).look_ahead((t % 2) * 8 * MIB);
        let mut arena = Arena::with_config(pool, &config).unwrap();
        let stream = rig.device.create_stream().unwrap();
        for _ in 0..10 {
            random = granule::driver::pattern_word(random, t);
            let to = random % (100 * MIB);
            let grown = match random >> 60 & 1 {
                0 => arena.grow(to),
                _ => arena.grow_on(to, &stream),
            };
            match grown {
                Ok(()) => {
                    let head = head(&arena, arena.len() / 8 * 8);
                    if let Some(first) = head.sub(0, 8.min(head.len())).filter(|r| !r.is_empty()) {
                        rig.inner.fill(first, 1, stream.id()).unwrap();
                    }
                }
                Err(error) => assert!(error.is_out_of_memory(), "{error}"),
            }
            let to = (random >> 32) % (100 * MIB);
            match random >> 61 & 3 {
                0 => arena.shrink(to).unwrap(),
                1 => arena.shrink_deferred(to).unwrap(),
                2 => arena.truncate(to).unwrap(),
                _ => arena.try_shrink(to).unwrap(),
            }
        }
        if random & 1 == 0 {
            arena.close().unwrap();
        }
    }
}

/// Each thread shrinks what another one waits for.
fn transactions_of_several_threads_do_not_lock_each_other(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(512 * MIB));
    let arenas: Vec<Arena> = (0..4)
        .map(|_| Arena::new(&pool, 128 * MIB).unwrap())
        .collect();
    thread::scope(|s| {
        for t in 0..4usize {
            let arenas = &arenas;
            s.spawn(move || {
                for i in 0..100u64 {
                    let (a, b) = (&arenas[t], &arenas[(t + 1) % 4]);
                    let to = (i % 60) * MIB;
                    Arena::grow_all(&[(a, to), (b, to)]).unwrap();
                    Arena::grow_all(&[(b, to + 1), (a, to)]).unwrap();
                    a.try_shrink(to / 2).unwrap();
                }
            });
        }
    });
    arenas.iter().for_each(check_extents);
    audit(&pool);
}

on_each_driver! {
    a_static_pool_takes_all_at_once_and_never_asks_again
    a_dynamic_pool_keeps_nothing_idle
    a_hybrid_pool_keeps_its_base_and_idle_up_to_the_watermark
    memory_that_fits_nobody_makes_way_for_what_does
    a_release_that_is_refused_costs_no_growth
    what_one_arena_gives_back_another_gets_without_a_create
    growth_within_what_is_mapped_makes_no_driver_call
    handed_over_memory_is_zeroed_when_asked
    memory_is_not_taken_back_under_its_own_zeroing
    zeroing_on_one_stream_does_not_hit_the_writes_of_another
    spare_granules_are_made_ahead
    a_look_ahead_makes_growth_a_bounds_check
    what_was_mapped_ahead_is_given_up_when_another_needs_it
    the_look_ahead_worker_does_not_wait_for_fences
    threads_grow_and_shrink_at_once
    transactions_of_several_threads_do_not_lock_each_other
}
