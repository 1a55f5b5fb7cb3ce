//! Tests of what only the sim has: its clock, faults and race detector.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::*;

const G: u64 = 2 * MIB;

fn sim() -> SimDriver {
    SimDriver::new(SimConfig::default()).unwrap()
}

fn racy() -> SimDriver {
    SimDriver::new(SimConfig {
        races: true,
        ..SimConfig::default()
    })
    .unwrap()
}

/// Addresses with one granule of `len` bytes behind them.
fn mapped(d: &SimDriver, len: u64) -> (VaRange, PhysId) {
    let range = d.reserve(len, 0).unwrap();
    let phys = d.create(len, GranuleProps::default()).unwrap();
    d.map(range, phys).unwrap();
    d.set_access(range, Access::ReadWrite).unwrap();
    (range, phys)
}

#[test]
fn each_call_costs_what_the_table_says() {
    let d = sim();
    let cost = CostTable::default();
    let (range, phys) = mapped(&d, 256 * MIB);
    let made = cost.reserve + cost.create(256 * MIB) + cost.map(256 * MIB);
    assert_eq!(d.driver_time(), made + cost.set_access(256 * MIB));
    assert_eq!(d.now(), d.driver_time());
    d.unmap(range).unwrap();
    d.release(phys).unwrap();
    d.free_reservation(range).unwrap();
    let ended = cost.unmap(256 * MIB) + cost.release(256 * MIB) + cost.free_reservation;
    d.unmap(range).unwrap_err();
    let all = made + cost.set_access(256 * MIB) + ended;
    assert_eq!(d.driver_time(), all, "a refused call is not charged");
    assert_eq!(d.live(), Live::default());
}

#[test]
fn access_over_many_mappings_costs_one_call_for_each() {
    let d = sim();
    let range = d.reserve(8 * G, 0).unwrap();
    for i in 0..8 {
        let phys = d.create(G, GranuleProps::default()).unwrap();
        d.map(range.sub(i * G, G).unwrap(), phys).unwrap();
    }
    let before = d.now();
    d.set_access(range, Access::ReadWrite).unwrap();
    assert_eq!(d.now().since(before), Nanos(8 * 22_000));
    let before = d.now();
    d.unmap(range).unwrap();
    assert_eq!(d.now().since(before), Nanos(8 * 16_000));
}

#[test]
fn work_runs_beside_the_host_until_it_waits() {
    let d = sim();
    let e = d.create_event().unwrap();
    d.launch(Kernel::Spin { nanos: 1_000_000 }, StreamId::DEFAULT)
        .unwrap();
    d.record_event(e, StreamId::DEFAULT).unwrap();
    assert!(!d.query_event(e).unwrap());
    assert!(d.now() < Nanos(100_000), "{}", d.now());
    d.advance(Nanos(500_000));
    assert!(!d.query_event(e).unwrap());
    d.sync_event(e).unwrap();
    assert!(d.now() >= Nanos(1_000_000) && d.now() < Nanos(1_100_000));
    assert!(d.query_event(e).unwrap());
}

#[test]
fn held_work_gets_its_time_when_the_hold_ends() {
    let d = sim();
    let (a, b) = (d.create_stream().unwrap(), d.create_stream().unwrap());
    let (ea, eb) = (d.create_event().unwrap(), d.create_event().unwrap());
    let hold = d.hold(a).unwrap();
    d.launch(Kernel::Spin { nanos: 1_000 }, a).unwrap();
    d.record_event(ea, a).unwrap();
    d.wait_event(b, ea).unwrap();
    d.launch(Kernel::Spin { nanos: 1_000 }, b).unwrap();
    d.record_event(eb, b).unwrap();
    d.advance(Nanos(1_000_000_000));
    assert!(!d.query_event(ea).unwrap() && !d.query_event(eb).unwrap());
    drop(hold);
    let released = d.now();
    d.sync_event(eb).unwrap();
    assert!(d.now().since(released) >= Nanos(2_000));
    assert!(d.query_event(ea).unwrap());
}

#[test]
fn a_destroyed_stream_is_forgotten_once_its_queue_is_empty() {
    let d = sim();
    let a = d.create_stream().unwrap();
    let e = d.create_event().unwrap();
    let hold = d.hold(a).unwrap();
    d.record_event(e, a).unwrap();
    let old = d.stream_key(a).unwrap();
    d.destroy_stream(a).unwrap();
    assert_eq!(d.live().streams, 0);
    let b = d.create_stream().unwrap();
    assert_eq!(a, b, "the lowest free id is used again");
    assert_ne!(d.stream_key(b).unwrap(), old);
    assert!(!d.query_event(e).unwrap());
    drop(hold);
    assert!(d.query_event(e).unwrap());
}

#[test]
fn sync_blocks_until_another_thread_ends_the_hold() {
    let d = Arc::new(sim());
    let hold = d.hold(StreamId::DEFAULT).unwrap();
    let other = Arc::clone(&d);
    let waiter = thread::spawn(move || other.sync_stream(StreamId::DEFAULT));
    thread::sleep(Duration::from_millis(20));
    assert!(!waiter.is_finished());
    drop(hold);
    waiter.join().unwrap().unwrap();
}

#[test]
fn a_hold_may_outlive_the_driver() {
    let hold = sim().hold(StreamId::DEFAULT).unwrap();
    drop(hold);
}

#[test]
fn unmapping_under_unfinished_work_loses_the_device() {
    let d = sim();
    let (range, phys) = mapped(&d, 256 * MIB);
    d.fill(range, 1, StreamId::DEFAULT).unwrap();
    d.unmap(range).unwrap();
    assert!(d.is_lost());
    let error = d.sync_stream(StreamId::DEFAULT).unwrap_err();
    assert_eq!(error.code, DriverCode::ILLEGAL_ADDRESS);
    d.release(phys).unwrap();
    d.free_reservation(range).unwrap();
    assert_eq!(d.live().granules, 0);
}

#[test]
fn unmapping_after_the_work_is_fine() {
    for held in [false, true] {
        let d = sim();
        let (range, _) = mapped(&d, 256 * MIB);
        let hold = held.then(|| d.hold(StreamId::DEFAULT).unwrap());
        d.fill(range, 1, StreamId::DEFAULT).unwrap();
        drop(hold);
        d.sync_stream(StreamId::DEFAULT).unwrap();
        d.unmap(range).unwrap();
        assert!(!d.is_lost(), "held: {held}");
    }
}

#[test]
fn unmapping_one_alias_leaves_work_on_the_other_alone() {
    let d = sim();
    let (old, phys) = mapped(&d, G);
    let new = d.reserve(G, 0).unwrap();
    d.fill(old, 1, StreamId::DEFAULT).unwrap();
    d.sync_stream(StreamId::DEFAULT).unwrap();
    d.map(new, phys).unwrap();
    d.set_access(new, Access::ReadWrite).unwrap();
    let hold = d.hold(StreamId::DEFAULT).unwrap();
    d.fill(new, 2, StreamId::DEFAULT).unwrap();
    d.unmap(old).unwrap();
    assert!(!d.is_lost());
    drop(hold);
}

#[test]
fn taking_write_access_from_under_a_write_loses_the_device() {
    let d = sim();
    let (range, _) = mapped(&d, G);
    let hold = d.hold(StreamId::DEFAULT).unwrap();
    let kernel = Kernel::WritePattern { range, seed: 1 };
    d.launch(kernel, StreamId::DEFAULT).unwrap();
    d.set_access(range, Access::ReadWrite).unwrap();
    assert!(!d.is_lost());
    d.set_access(range, Access::Read).unwrap();
    assert!(d.is_lost());
    drop(hold);
}

#[test]
fn a_kernel_may_be_queued_before_its_memory_is_there() {
    for in_time in [true, false] {
        let d = sim();
        let range = d.reserve(G, 0).unwrap();
        let hold = d.hold(StreamId::DEFAULT).unwrap();
        let kernel = Kernel::WritePattern { range, seed: 1 };
        d.launch(kernel, StreamId::DEFAULT).unwrap();
        if in_time {
            let phys = d.create(G, GranuleProps::default()).unwrap();
            d.map(range, phys).unwrap();
            d.set_access(range, Access::ReadWrite).unwrap();
        }
        drop(hold);
        assert_eq!(d.is_lost(), !in_time);
    }
}

#[test]
fn losing_the_device_wakes_those_who_wait() {
    let d = Arc::new(sim());
    let (range, _) = mapped(&d, G);
    let hold = d.hold(StreamId::DEFAULT).unwrap();
    d.fill(range, 1, StreamId::DEFAULT).unwrap();
    let other = Arc::clone(&d);
    let waiter = thread::spawn(move || other.sync_stream(StreamId::DEFAULT));
    thread::sleep(Duration::from_millis(10));
    d.unmap(range).unwrap();
    let error = waiter.join().unwrap().unwrap_err();
    assert_eq!(error.code, DriverCode::ILLEGAL_ADDRESS);
    drop(hold);
}

#[test]
fn addresses_run_out_and_come_back() {
    let d = sim();
    let half = d.reserve(64 * TIB, 0).unwrap();
    assert!(d.reserve(64 * TIB, 0).unwrap_err().is_out_of_memory());
    let rest = d.reserve(62 * TIB, 0).unwrap();
    assert!(d.reserve(G, 0).unwrap_err().is_out_of_memory());
    d.free_reservation(half).unwrap();
    d.free_reservation(rest).unwrap();
    d.reserve(126 * TIB, 0).unwrap();
}

#[test]
fn bad_configurations_are_refused() {
    let refused = |config| SimDriver::new(config).unwrap_err();
    let base = SimConfig::default();
    for granularity in [0, 3 * MIB] {
        refused(SimConfig {
            granularity,
            ..base.clone()
        });
    }
    for total_memory in [0, G + 1] {
        refused(SimConfig {
            total_memory,
            ..base.clone()
        });
    }
    refused(SimConfig {
        address_space: !(G - 1),
        ..base
    });
}

#[test]
fn a_write_through_an_alias_on_another_stream_is_a_race() {
    let d = racy();
    let (old, phys) = mapped(&d, 2 * G);
    let new = d.reserve(2 * G, 0).unwrap();
    d.map(new, phys).unwrap();
    d.set_access(new, Access::ReadWrite).unwrap();
    let (a, b) = (d.create_stream().unwrap(), d.create_stream().unwrap());
    d.fill(old.sub(0, G).unwrap(), 1, a).unwrap();
    d.fill(new.sub(G, G).unwrap(), 1, b).unwrap();
    assert_eq!(d.races(), [], "different bytes");
    // Virtual time passes, but nothing orders the streams.
    d.advance(Nanos(1_000_000_000));
    let late = new.sub(G - 64, 128).unwrap();
    d.fill(late, 2, b).unwrap();
    let races = d.races();
    assert_eq!(races.len(), 1, "{races:?}");
    let race = &races[0];
    assert_eq!((race.phys, race.offset), (phys, G - 64));
    assert_eq!(race.first.stream, d.stream_key(a).unwrap());
    assert_eq!(race.second.stream, d.stream_key(b).unwrap());
    assert_eq!(race.second.range, late);
}

#[test]
fn waits_queries_and_syncs_make_an_order() {
    type Order = fn(&SimDriver, StreamId, StreamId, EventId);
    let orders: [(&str, Order, bool); 6] = [
        ("nothing", |_, _, _, _| {}, false),
        (
            "a wait",
            |d, a, b, e| {
                d.record_event(e, a).unwrap();
                d.wait_event(b, e).unwrap();
            },
            true,
        ),
        (
            "a query that says passed",
            |d, a, _, e| {
                d.record_event(e, a).unwrap();
                while !d.query_event(e).unwrap() {}
            },
            true,
        ),
        (
            "a query that says pending",
            |d, a, _, e| {
                d.launch(Kernel::Spin { nanos: 1_000_000 }, a).unwrap();
                d.record_event(e, a).unwrap();
                assert!(!d.query_event(e).unwrap());
            },
            false,
        ),
        ("a sync", |d, a, _, _| d.sync_stream(a).unwrap(), true),
        (
            "a sync of the other stream",
            |d, _, b, _| d.sync_stream(b).unwrap(),
            false,
        ),
    ];
    for (name, order, ordered) in orders {
        let d = racy();
        let (range, _) = mapped(&d, G);
        let (a, b) = (d.create_stream().unwrap(), d.create_stream().unwrap());
        let e = d.create_event().unwrap();
        d.fill(range, 1, a).unwrap();
        order(&d, a, b, e);
        d.fill(range, 2, b).unwrap();
        assert_eq!(d.races().is_empty(), ordered, "{name}: {:?}", d.races());
    }
}

#[test]
fn reads_race_with_writes_only() {
    let d = racy();
    let (range, _) = mapped(&d, G);
    let (out, _) = mapped(&d, 2 * G);
    let streams = [(); 2].map(|()| d.create_stream().unwrap());
    for (i, s) in streams.into_iter().enumerate() {
        let to = out.sub(i as u64 * G, G).unwrap();
        d.copy(to.start(), range, s).unwrap();
    }
    assert_eq!(d.races(), []);
    d.fill(range.sub(8, 8).unwrap(), 0, StreamId::DEFAULT)
        .unwrap();
    let races = d.races();
    assert_eq!(races.len(), 2, "one with each reader: {races:?}");
    assert!(races.iter().all(|r| r.offset == 8));
}

#[test]
fn atomic_adds_do_not_race_with_each_other() {
    let d = racy();
    let (range, _) = mapped(&d, G);
    let (words, _) = mapped(&d, G);
    let add = |s| {
        let sink = words.start();
        let passes = 1;
        d.launch(
            Kernel::ReadSum {
                range,
                passes,
                sink,
            },
            s,
        )
        .unwrap();
    };
    add(StreamId::DEFAULT);
    add(d.create_stream().unwrap());
    assert_eq!(d.races(), []);
    d.fill(words, 0, d.create_stream().unwrap()).unwrap();
    assert_eq!(d.races().len(), 2);
}

#[test]
fn a_granule_that_is_gone_has_no_history() {
    let d = racy();
    let (range, phys) = mapped(&d, G);
    d.fill(range, 1, StreamId::DEFAULT).unwrap();
    d.sync_stream(StreamId::DEFAULT).unwrap();
    d.unmap(range).unwrap();
    d.release(phys).unwrap();
    let (again, other) = mapped(&d, G);
    assert_ne!(phys, other);
    d.fill(again, 1, d.create_stream().unwrap()).unwrap();
    assert_eq!(d.races(), []);
}

/// 70,000 calls over 4,096 mappings: in a test that takes long, a call has become linear in them.
#[test]
fn many_mappings_stay_fast() {
    let d = sim();
    let n: u64 = if cfg!(miri) { 16 } else { 4096 };
    let range = d.reserve(n * G, 0).unwrap();
    let part = |i: u64| range.sub((i * 1664525 % n) * G, G).unwrap();
    let e = d.create_event().unwrap();
    for i in 0..n {
        let phys = d.create(G, GranuleProps::default()).unwrap();
        d.map(part(i), phys).unwrap();
        d.release(phys).unwrap();
    }
    d.set_access(range, Access::ReadWrite).unwrap();
    for i in 0..n * 8 {
        d.fill(part(i), 0, StreamId::DEFAULT).unwrap();
        d.record_event(e, StreamId::DEFAULT).unwrap();
    }
    d.sync_event(e).unwrap();
    for i in 0..n {
        d.unmap(part(i)).unwrap();
    }
    assert!(!d.is_lost());
    assert_eq!(d.live().granules, 0);
}
