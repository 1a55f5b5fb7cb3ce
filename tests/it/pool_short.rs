//! A pool that is short: tails, waiting, and changes of the budget.

use std::thread;
use std::time::{Duration, Instant};

use granule::driver::{Call, DriverCode};
use granule::units::{GIB, MIB};
use granule::{Arena, Error, Limit, Policy, PoolConfig};

use crate::support::{On, Rig, audit, check_extents, head, small_granules};

fn impatient(budget: u64) -> PoolConfig {
    PoolConfig {
        wait: Duration::ZERO,
        ..small_granules(budget)
    }
}

fn a_truncated_tail_is_another_arenas_memory_when_it_is_needed(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(impatient(64 * MIB));
    let mut first = Arena::new(&pool, 64 * MIB).unwrap();
    let second = Arena::new(&pool, 64 * MIB).unwrap();
    first.grow(64 * MIB).unwrap();
    rig.write(first.range(), 1);
    first.truncate(20 * MIB).unwrap();
    assert_eq!(audit(&pool).mapped, 64 * MIB, "truncating keeps the memory");
    second.grow(32 * MIB).unwrap();
    rig.write(second.range(), 2);
    rig.check(head(&first, 20 * MIB), 1);
    audit(&pool);
    check_extents(&first);
    second.grow(50 * MIB).unwrap_err();
    first.grow(30 * MIB).unwrap();
    rig.check(head(&first, 20 * MIB), 1);
}

fn a_truncated_tail_with_queued_work_stays_until_the_work_is_done(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(impatient(64 * MIB));
    let mut first = Arena::new(&pool, 64 * MIB).unwrap();
    let second = Arena::new(&pool, 64 * MIB).unwrap();
    let stream = rig.device.create_stream().unwrap();
    first.grow_on(64 * MIB, &stream).unwrap();
    let hold = stream.hold().unwrap();
    let last = first.range().sub(63 * MIB, MIB).unwrap();
    rig.inner.fill(last, 1, stream.id()).unwrap();
    first.truncate(0).unwrap();
    let Err(Error::OutOfMemory(oom)) = second.grow(32 * MIB) else {
        panic!("memory was taken from under queued work");
    };
    assert_eq!((oom.limit, oom.pending), (Limit::Budget, 64 * MIB));
    assert_eq!(audit(&pool).pending, 64 * MIB);
    drop(hold);
    stream.synchronize().unwrap();
    second.grow(32 * MIB).unwrap();
    assert_eq!(
        audit(&pool).pending,
        32 * MIB,
        "no more is taken than is needed"
    );
    pool.trim(0).unwrap();
    assert_eq!(audit(&pool).pending, 0);
    assert!(!rig.is_lost());
}

fn a_deferred_tail_comes_back_after_its_work(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(impatient(64 * MIB));
    let mut first = Arena::new(&pool, 64 * MIB).unwrap();
    let second = Arena::new(&pool, 64 * MIB).unwrap();
    let stream = rig.device.create_stream().unwrap();
    first.grow_on(64 * MIB, &stream).unwrap();
    let hold = stream.hold().unwrap();
    rig.inner.fill(first.range(), 1, stream.id()).unwrap();
    let before = rig.counts();
    for to in [48 * MIB, 32 * MIB, 16 * MIB, 16 * MIB, 8 * MIB] {
        first.shrink_deferred(to).unwrap();
        audit(&pool);
    }
    assert_eq!(rig.calls(&before, Call::Unmap), 0);
    let stats = audit(&pool);
    assert!(
        stats.pending >= 48 * MIB && stats.mapped == 64 * MIB,
        "{stats:?}"
    );
    let start = Instant::now();
    let Err(Error::OutOfMemory(oom)) = second.grow(32 * MIB) else {
        panic!("memory was taken from under queued work");
    };
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(oom.pending, stats.pending);
    assert_eq!(pool.trim(0).unwrap(), 0);
    drop(hold);
    stream.synchronize().unwrap();
    second.grow(48 * MIB).unwrap();
    assert_eq!(audit(&pool).pending, 0);
}

fn an_allocation_waits_for_a_deferred_tail_when_allowed(on: On) {
    let rig = Rig::new(on);
    let config = PoolConfig {
        wait: Duration::from_secs(20),
        ..small_granules(64 * MIB)
    };
    one_waits_for_what_another_shrinks(&rig, config, u64::MAX);
}

/// The other one has queued work, which ends while the first waits.
fn one_waits_for_what_another_shrinks(rig: &Rig, config: PoolConfig, device: u64) {
    let pool = rig.pool(config);
    let mut first = Arena::new(&pool, 64 * MIB).unwrap();
    let second = Arena::new(&pool, 64 * MIB).unwrap();
    let stream = rig.device.create_stream().unwrap();
    first.grow_on(64 * MIB, &stream).unwrap();
    rig.fault.fail_above(device);
    let hold = stream.hold().unwrap();
    first.shrink_deferred(0).unwrap();
    let releaser = thread::spawn(move || {
        thread::sleep(Duration::from_millis(30));
        drop(hold);
    });
    second.grow(64 * MIB).unwrap();
    releaser.join().unwrap();
    audit(&pool);
}

/// The device, not the budget, was short: the pool gave up without waiting.
fn an_allocation_waits_for_a_deferred_tail_when_the_device_is_full(on: On) {
    let rig = Rig::new(on);
    let config = PoolConfig {
        wait: Duration::from_secs(20),
        ..small_granules(GIB).policy(Policy::Dynamic)
    };
    // The device has what the first takes, and no more.
    one_waits_for_what_another_shrinks(&rig, config, 64 * MIB);
}

fn a_wait_for_memory_ends(on: On) {
    let rig = Rig::new(on);
    let config = PoolConfig {
        wait: Duration::from_millis(50),
        ..small_granules(64 * MIB)
    };
    let pool = rig.pool(config);
    let mut first = Arena::new(&pool, 64 * MIB).unwrap();
    let second = Arena::new(&pool, 64 * MIB).unwrap();
    let stream = rig.device.create_stream().unwrap();
    first.grow_on(64 * MIB, &stream).unwrap();
    // Released by this thread only, after the allocation has returned.
    let hold = stream.hold().unwrap();
    first.shrink_deferred(0).unwrap();
    let start = Instant::now();
    assert!(second.grow(64 * MIB).unwrap_err().is_out_of_memory());
    let took = start.elapsed();
    assert!(
        took >= Duration::from_millis(50) && took < Duration::from_secs(10),
        "{took:?}"
    );
    drop(hold);
    second.grow(64 * MIB).unwrap();
}

fn a_lower_budget_releases_idle_memory_and_tails(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(PoolConfig {
        watermark: Some(u64::MAX),
        ..small_granules(128 * MIB)
    });
    let mut arena = Arena::new(&pool, 128 * MIB).unwrap();
    arena.grow(128 * MIB).unwrap();
    rig.write(head(&arena, 24 * MIB), 1);
    arena.shrink(64 * MIB).unwrap();
    arena.truncate(24 * MIB).unwrap();
    pool.set_budget(32 * MIB).unwrap();
    let stats = audit(&pool);
    assert!(
        stats.created <= 32 * MIB && stats.budget == 32 * MIB,
        "{stats:?}"
    );
    rig.check(head(&arena, 24 * MIB), 1);
    arena.grow(64 * MIB).unwrap_err();
    pool.set_budget(128 * MIB).unwrap();
    arena.grow(128 * MIB).unwrap();
    rig.check(head(&arena, 24 * MIB), 1);
    assert_eq!(audit(&pool).peak_created, 128 * MIB);
}

fn the_floor_of_a_static_pool_follows_its_budget(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB).policy(Policy::Static));
    for budget in [96, 20, 0, 8, 64] {
        pool.set_budget(budget * MIB).unwrap();
        let stats = audit(&pool);
        assert_eq!(stats.floor, (budget - budget % 8) * MIB);
        assert_eq!(stats.created, stats.floor);
    }
}

fn a_failed_change_of_budget_leaves_a_static_pool_filled(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB).policy(Policy::Static));
    rig.fault.fail(Call::Release, 3, DriverCode::UNKNOWN);
    pool.set_budget(16 * MIB).unwrap_err();
    rig.fault.fail_above(80 * MIB);
    assert!(pool.set_budget(128 * MIB).unwrap_err().is_out_of_memory());
    let stats = audit(&pool);
    assert_eq!(
        (stats.budget, stats.floor, stats.created),
        (64 * MIB, 64 * MIB, 64 * MIB)
    );
}

fn what_the_device_refuses_is_told_from_what_the_budget_refuses(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(impatient(GIB));
    let arena = Arena::new(&pool, GIB).unwrap();
    rig.fault.fail_above(48 * MIB);
    let Err(Error::OutOfMemory(oom)) = arena.grow(100 * MIB) else {
        panic!("not out of memory");
    };
    assert_eq!((oom.limit, oom.requested), (Limit::Device, 100 * MIB));
    assert_eq!(arena.mapped(), 0);
    audit(&pool);
    arena.grow(48 * MIB).unwrap();
    rig.fault.clear();
    arena.grow(100 * MIB).unwrap();
}

fn idle_memory_is_released_for_what_does_not_fit_it(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(PoolConfig {
        watermark: Some(u64::MAX),
        ..small_granules(64 * MIB)
    });
    let mut small = Arena::new(&pool, 64 * MIB).unwrap();
    for to in 1..=32 {
        small.grow(to * 2 * MIB).unwrap();
    }
    small.shrink(0).unwrap();
    let large = Arena::new(&pool, 64 * MIB).unwrap();
    large.grow(64 * MIB).unwrap();
    let stats = audit(&pool);
    assert_eq!((stats.created, stats.peak_created), (64 * MIB, 64 * MIB));
}

on_each_driver! {
    a_truncated_tail_is_another_arenas_memory_when_it_is_needed
    a_truncated_tail_with_queued_work_stays_until_the_work_is_done
    a_deferred_tail_comes_back_after_its_work
    an_allocation_waits_for_a_deferred_tail_when_allowed
    an_allocation_waits_for_a_deferred_tail_when_the_device_is_full
    a_wait_for_memory_ends
    a_lower_budget_releases_idle_memory_and_tails
    the_floor_of_a_static_pool_follows_its_budget
    a_failed_change_of_budget_leaves_a_static_pool_filled
    what_the_device_refuses_is_told_from_what_the_budget_refuses
    idle_memory_is_released_for_what_does_not_fit_it
}
