//! Bad input is a typed error with the numbers in it, or a documented success for 0; no driver call
//! is made and nothing changes.

use std::time::Duration;

use granule::driver::host::HostConfig;
use granule::driver::sim::SimConfig;
use granule::driver::{Call, DriverCode};
use granule::units::{GIB, MIB, TIB};
use granule::{Arena, ArenaConfig, Device, Error, Limit, Policy, Pool, PoolConfig, Tensor};

use crate::support::{On, Rig, audit, small_granules};

/// Sizes that wrap around when they are rounded or added to.
const HUGE: [u64; 6] = [
    u64::MAX,
    u64::MAX - 3,
    u64::MAX - 2 * MIB + 1,
    u64::MAX - 2 * MIB,
    1 << 63,
    u64::MAX / 2 + 1,
];

fn zero_bytes_cost_nothing(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let mut arena = Arena::new(&pool, 64 * MIB).unwrap();
    let mut tensor = Tensor::<u32>::new(&pool, &[4], 100).unwrap();
    let stream = rig.device.create_stream().unwrap();
    rig.without_calls(|| {
        arena.grow(0).unwrap();
        arena.grow_on(0, &stream).unwrap();
        assert!(arena.extend(0).unwrap().is_empty());
        Arena::grow_all(&[]).unwrap();
        arena.truncate(0).unwrap();
        arena.shrink_after(0, &[]).unwrap();
        assert_eq!(arena.pin(0, 0).unwrap().range().len(), 0);
        assert!(arena.ranges().is_empty() && arena.is_empty());
        tensor.grow(0).unwrap();
        tensor.grow_zeroed(0, &stream).unwrap();
        tensor.zero(.., &stream).unwrap();
        tensor.copy_from_host(0, &[], &stream).unwrap();
        tensor.copy_to_host(0, &mut [], &stream).unwrap();
        assert_eq!(tensor.view().elements(), 0);
        pool.trim(0).unwrap();
        pool.set_budget(64 * MIB).unwrap();
        Arena::grow_all(&[(&arena, 0)]).unwrap();
    });
    assert_eq!(audit(&pool).created, 0);
}

fn an_arena_of_no_bytes_can_be_made_and_hold_a_granule_at_most(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let arena = Arena::new(&pool, 0).unwrap();
    assert_eq!(arena.capacity(), rig.device.info().granularity);
    let tensor = Tensor::<f32>::new(&pool, &[], 0).unwrap();
    let refused = rig.without_calls(|| tensor.grow(1).unwrap_err());
    assert_eq!(
        refused,
        Error::ReservationExhausted {
            asked: 4,
            reserved: 0
        }
    );
    drop((arena, tensor, pool));
    rig.assert_nothing_left();
}

fn sizes_that_wrap_are_refused(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let arena = Arena::new(&pool, 64 * MIB).unwrap();
    arena.grow(3 * MIB).unwrap();
    let other = Arena::new(&pool, 64 * MIB).unwrap();
    let stream = rig.device.create_stream().unwrap();
    let before = audit(&pool);
    rig.without_calls(|| {
        for size in HUGE {
            let too_far = |asked| Error::ReservationExhausted {
                asked,
                reserved: 64 * MIB,
            };
            assert_eq!(arena.grow(size).unwrap_err(), too_far(size));
            assert_eq!(arena.grow_on(size, &stream).unwrap_err(), too_far(size));
            let sum = size.saturating_add(3 * MIB);
            assert_eq!(arena.extend(size).unwrap_err(), too_far(sum));
            let all = Arena::grow_all(&[(&other, 5 * MIB), (&arena, size)]);
            assert_eq!(all.unwrap_err(), too_far(size));
            let expected = Error::OutOfBounds {
                offset: MIB,
                len: size,
                end: 3 * MIB,
            };
            assert_eq!(arena.pin(MIB, size).unwrap_err(), expected);
            arena.pin(size, 0).unwrap_err();
            let made = Arena::new(&pool, size);
            if size > u64::MAX - 2 * MIB + 1 {
                assert!(
                    matches!(made, Err(Error::TooLarge { requested, .. }) if requested == size)
                );
            } else {
                assert!(
                    matches!(made, Err(Error::AddressSpaceExhausted { .. })),
                    "{made:?}"
                );
            }
            Tensor::<u64>::new(&pool, &[2], size).unwrap_err();
            Tensor::<u64>::new(&pool, &[size], 2).unwrap_err();
        }
    });
    assert_eq!(audit(&pool), before);
    assert_eq!((arena.len(), other.len()), (3 * MIB, 0));
}

fn one_byte_past_the_reservation_is_refused(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let arena = Arena::new(&pool, 8 * MIB).unwrap();
    let refused = rig.without_calls(|| arena.grow(8 * MIB + 1).unwrap_err());
    let expected = Error::ReservationExhausted {
        asked: 8 * MIB + 1,
        reserved: 8 * MIB,
    };
    assert_eq!(refused, expected);
    arena.grow(8 * MIB).unwrap();
    assert_eq!(arena.mapped(), 8 * MIB);
}

fn more_than_the_budget_is_refused_with_the_figures(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(32 * MIB));
    let arena = Arena::new(&pool, 64 * MIB).unwrap();
    arena.grow(16 * MIB).unwrap();
    let Error::OutOfMemory(oom) = rig.without_calls(|| arena.grow(50 * MIB).unwrap_err()) else {
        panic!("not out of memory");
    };
    assert_eq!((oom.limit, oom.budget), (Limit::Budget, 32 * MIB));
    assert_eq!((oom.created, oom.mapped, oom.idle), (16 * MIB, 16 * MIB, 0));
    assert_eq!((oom.requested, oom.missing), (34 * MIB, 18 * MIB));
    assert_eq!(arena.len(), 16 * MIB);
    audit(&pool);
}

/// A list of the granules that such a growth needs would take gigabytes itself.
fn far_more_than_the_budget_is_refused_at_once(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(PoolConfig::with_budget(32 * MIB).granule(2 * MIB));
    let arena = Arena::new(&pool, 8 * TIB).unwrap();
    // The least of some, since other programs may have the processor.
    let took = (0..9).map(|_| {
        let start = std::time::Instant::now();
        let refused = rig.without_calls(|| arena.grow(8 * TIB).unwrap_err());
        assert!(refused.is_out_of_memory());
        start.elapsed()
    });
    assert!(took.min() < Some(Duration::from_millis(100)));
}

fn a_budget_below_use_is_refused(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let arena = Arena::new(&pool, 64 * MIB).unwrap();
    arena.grow(24 * MIB).unwrap();
    let before = audit(&pool);
    let refused = rig.without_calls(|| pool.set_budget(23 * MIB).unwrap_err());
    assert_eq!(
        refused,
        Error::BudgetBelowUse {
            budget: 23 * MIB,
            in_use: 24 * MIB
        }
    );
    assert_eq!(audit(&pool), before);
    pool.set_budget(24 * MIB).unwrap();
    pool.set_budget(0).unwrap_err();

    let hybrid = rig.pool(small_granules(64 * MIB).policy(Policy::Hybrid { base: 16 * MIB }));
    let refused = rig.without_calls(|| hybrid.set_budget(15 * MIB).unwrap_err());
    assert!(matches!(refused, Error::InvalidConfig { value, .. } if value == 15 * MIB));
}

fn settings_without_sense_are_refused(on: On) {
    let rig = Rig::new(on);
    let good = small_granules(64 * MIB);
    let bad = [
        (
            0,
            PoolConfig {
                granule: 0,
                ..good.clone()
            },
        ),
        (
            3 * MIB,
            PoolConfig {
                granule: 3 * MIB,
                ..good.clone()
            },
        ),
        (
            MIB,
            PoolConfig {
                granule: MIB,
                ..good.clone()
            },
        ),
        (
            6 * MIB,
            PoolConfig {
                granule: 6 * MIB,
                ..good.clone()
            },
        ),
        (
            u64::MAX,
            PoolConfig {
                granule: u64::MAX,
                ..good.clone()
            },
        ),
        (
            4 * MIB,
            PoolConfig {
                largest_granule: 4 * MIB,
                ..good.clone()
            },
        ),
        (
            24 * MIB,
            PoolConfig {
                largest_granule: 24 * MIB,
                ..good.clone()
            },
        ),
        (
            65 * MIB,
            good.clone().policy(Policy::Hybrid { base: 65 * MIB }),
        ),
        (
            u64::MAX,
            good.clone().policy(Policy::Hybrid { base: u64::MAX }),
        ),
    ];
    for (number, config) in bad {
        let refused = rig.without_calls(|| Pool::new(&rig.device, config).unwrap_err());
        assert!(
            matches!(refused, Error::InvalidConfig { value, .. } if value == number),
            "{refused}"
        );
    }
    Pool::new(
        &rig.device,
        PoolConfig {
            budget: Some(0),
            ..good
        },
    )
    .unwrap();
}

fn what_belongs_elsewhere_is_refused(on: On) {
    // Another device of the same kind where that is cheap.
    let elsewhere = Rig::new(if on == On::Cuda { On::Sim } else { on });
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let twin = rig.pool(small_granules(64 * MIB));
    let ours = Arena::new(&pool, 64 * MIB).unwrap();
    let theirs = Arena::new(&twin, 64 * MIB).unwrap();
    let stream = elsewhere.device.create_stream().unwrap();
    let mut tensor = Tensor::<u32>::new(&pool, &[4], 100).unwrap();
    tensor.grow(2).unwrap();
    let foreign_stream = Error::Foreign {
        what: "stream",
        owner: "device",
    };
    rig.without_calls(|| {
        let both = Arena::grow_all(&[(&ours, MIB), (&theirs, MIB)]);
        assert_eq!(
            both.unwrap_err(),
            Error::Foreign {
                what: "arena",
                owner: "pool"
            }
        );
        let twice = Arena::grow_all(&[(&ours, MIB), (&ours, 2 * MIB)]);
        assert_eq!(twice.unwrap_err(), Error::Duplicate { what: "arena" });
        assert_eq!(ours.grow_on(MIB, &stream).unwrap_err(), foreign_stream);
        assert_eq!(ours.record_use(&stream).unwrap_err(), foreign_stream);
        let all = Arena::grow_all_on(&[(&ours, MIB)], &stream);
        assert_eq!(all.unwrap_err(), foreign_stream);
        assert_eq!(tensor.grow_on(1, &stream).unwrap_err(), foreign_stream);
        assert_eq!(tensor.grow_zeroed(1, &stream).unwrap_err(), foreign_stream);
        assert_eq!(tensor.zero(.., &stream).unwrap_err(), foreign_stream);
        assert_eq!(
            tensor.copy_from_host(0, &[1; 4], &stream).unwrap_err(),
            foreign_stream
        );
        assert_eq!(
            tensor.copy_to_host(0, &mut [1; 4], &stream).unwrap_err(),
            foreign_stream
        );
    });
    assert_eq!((ours.len(), theirs.len(), tensor.rows()), (0, 0, 2));
}

/// Its number could name another event here. A host may wait for it.
fn a_fence_of_another_device_is_refused(on: On) {
    let elsewhere = Rig::new(if on == On::Cuda { On::Sim } else { on });
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let mut arena = Arena::new(&pool, 64 * MIB).unwrap();
    arena.grow(16 * MIB).unwrap();
    let fence = elsewhere.device.create_stream().unwrap().fence().unwrap();
    let stream = rig.device.create_stream().unwrap();
    rig.without_calls(|| {
        let foreign = Error::Foreign {
            what: "fence",
            owner: "device",
        };
        assert_eq!(stream.wait(&fence).unwrap_err(), foreign);
    });
    arena.shrink_after(0, &[fence]).unwrap();
    assert!(arena.is_empty());
}

fn rows_and_shapes_that_do_not_fit_are_refused(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let tensor = Tensor::<u32>::new(&pool, &[4], 100).unwrap();
    let stream = rig.device.create_stream().unwrap();
    tensor.grow(10).unwrap();
    rig.without_calls(|| {
        let shape = |got| Error::Shape {
            what: "bytes of the last row",
            expected: 16,
            got,
        };
        assert_eq!(
            tensor.copy_from_host(0, &[0; 5], &stream).unwrap_err(),
            shape(4)
        );
        assert_eq!(
            tensor.copy_to_host(0, &mut [0; 3], &stream).unwrap_err(),
            shape(12)
        );
        let outside = |offset, len| Error::OutOfBounds {
            offset,
            len,
            end: 160,
        };
        assert_eq!(
            tensor.copy_from_host(10, &[0; 4], &stream).unwrap_err(),
            outside(160, 16)
        );
        assert_eq!(
            tensor.copy_to_host(9, &mut [0; 8], &stream).unwrap_err(),
            outside(144, 32)
        );
        assert_eq!(tensor.zero(..11, &stream).unwrap_err(), outside(0, 176));
        assert_eq!(tensor.rows_view(11..).unwrap_err(), outside(176, 0));
        for first in HUGE {
            tensor.copy_from_host(first, &[0; 4], &stream).unwrap_err();
            tensor.zero(first.., &stream).unwrap_err();
            tensor.rows_view(0..=first).unwrap_err();
            tensor.grow(first).unwrap_err();
        }
        #[expect(clippy::reversed_empty_ranges, reason = "what is tested")]
        let reversed = tensor.rows_view(5..3);
        reversed.unwrap_err();
        let empty = Tensor::<u32>::new(&pool, &[4, 0], 100).unwrap_err();
        assert!(matches!(
            empty,
            Error::Shape {
                expected: 1,
                got: 0,
                ..
            }
        ));
        assert!(matches!(
            Tensor::<()>::new(&pool, &[], 1),
            Err(Error::Shape { .. })
        ));
    });
    assert_eq!(tensor.rows(), 10);
}

fn a_reservation_falls_back_to_smaller_ones(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let config = ArenaConfig::new(512 * MIB).min_capacity(100 * MIB);
    for failures in 1..=2 {
        for n in 1..=failures {
            rig.fault.fail(Call::Reserve, n, DriverCode::OUT_OF_MEMORY);
        }
        let arena = Arena::with_config(&pool, &config).unwrap();
        rig.fault.clear();
        assert_eq!(arena.capacity(), (512 * MIB) >> failures);
        arena.grow(20 * MIB).unwrap();
        rig.write(arena.range(), 1);
        rig.check(arena.range(), 1);
    }
    rig.fault
        .fail_from(Call::Reserve, 1, DriverCode::OUT_OF_MEMORY);
    let before = rig.counts();
    let refused = Arena::with_config(&pool, &config).unwrap_err();
    assert_eq!(rig.calls(&before, Call::Reserve), 4);
    assert_eq!(rig.calls(&before, Call::FreeReservation), 0);
    assert!(!refused.is_out_of_memory(), "addresses are not memory");
    let expected = Error::AddressSpaceExhausted {
        requested: 100 * MIB,
        reserved: 0,
        bound: granule::DEFAULT_ADDRESS_BOUND,
    };
    assert_eq!(refused, expected);
}

fn the_bound_on_addresses_holds(on: On) {
    let rig = Rig::new(on);
    rig.device.set_address_bound(GIB);
    let pool = rig.pool(small_granules(64 * MIB));
    let first = Arena::new(&pool, 700 * MIB).unwrap();
    let refused = rig.without_calls(|| Arena::new(&pool, 512 * MIB).unwrap_err());
    let expected = Error::AddressSpaceExhausted {
        requested: 512 * MIB,
        reserved: 700 * MIB,
        bound: GIB,
    };
    assert_eq!(refused, expected);
    let smaller = ArenaConfig::new(512 * MIB).min_capacity(MIB);
    assert_eq!(
        Arena::with_config(&pool, &smaller).unwrap().capacity(),
        256 * MIB
    );
    drop(first);
    Arena::new(&pool, GIB).unwrap();
}

on_each_driver! {
    zero_bytes_cost_nothing
    an_arena_of_no_bytes_can_be_made_and_hold_a_granule_at_most
    sizes_that_wrap_are_refused
    one_byte_past_the_reservation_is_refused
    more_than_the_budget_is_refused_with_the_figures
    far_more_than_the_budget_is_refused_at_once
    a_budget_below_use_is_refused
    settings_without_sense_are_refused
    what_belongs_elsewhere_is_refused
    a_fence_of_another_device_is_refused
    rows_and_shapes_that_do_not_fit_are_refused
    a_reservation_falls_back_to_smaller_ones
    the_bound_on_addresses_holds
}

#[test]
fn a_missing_driver_is_a_typed_error() {
    match Device::cuda(0) {
        Ok(device) => drop(device),
        Err(error) => assert!(
            matches!(
                error,
                Error::LibraryMissing { .. }
                    | Error::SymbolMissing { .. }
                    | Error::DeviceMissing { .. }
                    | Error::Unsupported { .. }
                    | Error::Driver(_)
            ),
            "{error}"
        ),
    }
    let unknown = Device::by_name("gpu").unwrap_err();
    assert_eq!(
        unknown,
        Error::UnknownDriver {
            value: "gpu".to_owned()
        }
    );
}

#[test]
#[ignore = "needs a CUDA device; run with --include-ignored"]
fn an_absent_device_is_a_typed_error() {
    let Err(Error::DeviceMissing { ordinal, count }) = Device::cuda(1000) else {
        panic!("there is no device 1000");
    };
    assert!(ordinal == 1000 && count > 0);
}

#[test]
fn devices_without_sense_are_refused() {
    let sim = SimConfig {
        total_memory: 3,
        ..SimConfig::default()
    };
    assert!(matches!(
        Device::sim(sim),
        Err(Error::InvalidConfig { value: 3, .. })
    ));
    let host = HostConfig {
        granularity: 3,
        ..HostConfig::default()
    };
    assert!(matches!(
        Device::host(host),
        Err(Error::InvalidConfig { value: 3, .. })
    ));
}
