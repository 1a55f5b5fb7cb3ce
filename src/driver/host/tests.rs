//! The host driver against its contract. Pages as granules keep the memory small; every test has a
//! device of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::driver::pattern_word;

const G: u64 = 64 * KIB;
const DEFAULT: StreamId = StreamId::DEFAULT;
const PLAIN: GranuleProps = GranuleProps {
    exportable: false,
    rdma: false,
};

fn device() -> HostDriver {
    HostDriver::new(HostConfig {
        total_memory: 1024 * G,
        granularity: G,
        address_space: 4096 * G,
        ordinal: 3,
    })
    .unwrap()
}

/// `n` granules from the `from`-th on.
fn part(range: VaRange, from: u64, n: u64) -> VaRange {
    range.sub(from * G, n * G).unwrap()
}

/// A reservation of `n` granules, with one granule of one unit in each place.
fn mapped(d: &HostDriver, n: u64) -> (VaRange, Vec<PhysId>) {
    let range = d.reserve(n * G, 0).unwrap();
    let granules = (0..n)
        .map(|i| {
            let phys = d.create(G, PLAIN).unwrap();
            d.map(part(range, i, 1), phys).unwrap();
            phys
        })
        .collect();
    d.set_access(range, Access::ReadWrite).unwrap();
    (range, granules)
}

fn read(d: &HostDriver, range: VaRange) -> Vec<u8> {
    let mut bytes = vec![0xAA; range.len() as usize];
    d.copy_to_host(&mut bytes, range, DEFAULT).unwrap();
    bytes
}

fn all(d: &HostDriver, range: VaRange, byte: u8) -> bool {
    read(d, range).iter().all(|b| *b == byte)
}

#[track_caller]
fn refused<T: fmt::Debug>(result: DriverResult<T>, code: DriverCode) {
    assert_eq!(result.unwrap_err().code, code);
}

use DriverCode as C;

#[test]
fn an_alias_shows_the_same_bytes() {
    let d = device();
    let (range, _) = mapped(&d, 2);
    let other = d.reserve(2 * G, 0).unwrap();
    let phys = d.create(2 * G, PLAIN).unwrap();
    d.unmap(range).unwrap();
    d.map(range, phys).unwrap();
    d.map(other, phys).unwrap();
    d.set_access(range, Access::ReadWrite).unwrap();
    d.set_access(other, Access::Read).unwrap();
    let bytes: Vec<u8> = (0..2 * G).map(|i| (i * 7) as u8).collect();
    d.copy_from_host(range.start(), &bytes, DEFAULT).unwrap();
    assert_eq!(read(&d, other), bytes);
    d.fill(range.sub(5, 10).unwrap(), 9, DEFAULT).unwrap();
    assert!(all(&d, other.sub(5, 10).unwrap(), 9));
}

#[test]
fn bytes_survive_being_unmapped_and_mapped_elsewhere() {
    let d = device();
    let (range, granules) = mapped(&d, 3);
    for i in 0..3 {
        d.fill(part(range, i, 1), i as u8 + 1, DEFAULT).unwrap();
    }
    d.sync_stream(DEFAULT).unwrap();
    d.unmap(range).unwrap();
    for (i, phys) in granules.iter().rev().enumerate() {
        d.map(part(range, i as u64, 1), *phys).unwrap();
    }
    d.set_access(range, Access::Read).unwrap();
    for i in 0..3 {
        assert!(all(&d, part(range, i, 1), 3 - i as u8));
    }
}

#[test]
fn fresh_memory_reads_zero_even_where_an_old_granule_was() {
    let d = device();
    let range = d.reserve(G, 0).unwrap();
    let mut ids = Vec::new();
    for _ in 0..5 {
        let phys = d.create(G, PLAIN).unwrap();
        d.map(range, phys).unwrap();
        d.release(phys).unwrap();
        d.set_access(range, Access::ReadWrite).unwrap();
        assert!(all(&d, range, 0));
        d.fill(range, 0xFF, DEFAULT).unwrap();
        d.sync_stream(DEFAULT).unwrap();
        d.unmap(range).unwrap();
        ids.push(phys);
    }
    ids.dedup();
    assert_eq!(ids.len(), 5, "ids are not used again");
}

#[test]
fn pages_go_back_to_the_system_with_the_last_reference() {
    let d = device();
    let (range, granules) = mapped(&d, 8);
    assert_eq!(d.resident_bytes(), 0);
    d.fill(range, 1, DEFAULT).unwrap();
    d.sync_stream(DEFAULT).unwrap();
    assert_eq!(d.resident_bytes(), 8 * G);
    for phys in &granules {
        d.release(*phys).unwrap();
    }
    assert_eq!(d.resident_bytes(), 8 * G, "still mapped");
    d.unmap(part(range, 0, 4)).unwrap();
    assert_eq!(d.resident_bytes(), 4 * G);
    d.unmap(part(range, 4, 4)).unwrap();
    assert_eq!(d.resident_bytes(), 0);
    assert_eq!(d.memory_info().unwrap().free, 1024 * G);
}

#[test]
fn memory_is_counted_while_created_or_mapped() {
    let d = device();
    let free = || d.memory_info().unwrap().free / G;
    let (range, granules) = mapped(&d, 2);
    assert_eq!(free(), 1022);
    d.release(granules[0]).unwrap();
    assert_eq!(free(), 1022);
    d.unmap(range).unwrap();
    assert_eq!(free(), 1023);
    refused(d.create(1024 * G, PLAIN), C::OUT_OF_MEMORY);
    d.create(1023 * G, PLAIN).unwrap();
    refused(d.create(G, PLAIN), C::OUT_OF_MEMORY);
}

#[test]
fn reservations_are_aligned_bounded_and_freed_as_they_were_made() {
    let d = device();
    for align in [0, 1, G, 16 * MIB, GIB] {
        let range = d.reserve(3 * G, align).unwrap();
        assert!(range.start().is_aligned(align.max(G)));
        assert_eq!(range.len(), 3 * G);
    }
    refused(d.reserve(0, 0), C::INVALID_VALUE);
    refused(d.reserve(G + 1, 0), C::INVALID_VALUE);
    refused(d.reserve(G, 3 * G), C::INVALID_VALUE);
    refused(d.reserve(4082 * G, 0), C::OUT_OF_MEMORY);
    refused(d.reserve(u64::MAX - G + 1, 0), C::OUT_OF_MEMORY);
    refused(d.reserve(G, 1 << 63), C::OUT_OF_MEMORY);
    let range = d.reserve(4081 * G, 0).unwrap();
    refused(d.free_reservation(part(range, 0, 1)), C::INVALID_VALUE);
    refused(d.free_reservation(part(range, 1, 4080)), C::INVALID_VALUE);
    let phys = d.create(G, PLAIN).unwrap();
    d.map(part(range, 9, 1), phys).unwrap();
    refused(d.free_reservation(range), C::INVALID_VALUE);
    d.unmap(part(range, 9, 1)).unwrap();
    d.free_reservation(range).unwrap();
    refused(d.free_reservation(range), C::INVALID_VALUE);
}

#[test]
fn the_default_address_space_can_be_reserved_at_once() {
    let d = HostDriver::new(HostConfig::default()).unwrap();
    assert_eq!(d.info().granularity, 2 * MIB);
    assert!(d.info().total_memory >= GIB);
    let range = d.reserve(16 * TIB, 2 * MIB).unwrap();
    refused(d.reserve(2 * MIB, 0), C::OUT_OF_MEMORY);
    d.free_reservation(range).unwrap();
}

#[test]
fn wrong_creations_are_refused() {
    let d = device();
    refused(d.create(0, PLAIN), C::INVALID_VALUE);
    refused(d.create(G / 2, PLAIN), C::INVALID_VALUE);
    refused(d.create(u64::MAX - G + 1, PLAIN), C::OUT_OF_MEMORY);
    let rdma = GranuleProps {
        rdma: true,
        ..PLAIN
    };
    refused(d.create(G, rdma), C::NOT_SUPPORTED);
    let phys = d.create(G, PLAIN).unwrap();
    d.release(phys).unwrap();
    refused(d.release(phys), C::INVALID_VALUE);
    refused(d.release(PhysId(99)), C::INVALID_VALUE);
}

#[test]
fn a_granule_is_mapped_whole_into_a_free_place_of_one_reservation() {
    let d = device();
    let range = d.reserve(8 * G, 0).unwrap();
    let two = d.create(2 * G, PLAIN).unwrap();
    refused(d.map(part(range, 0, 1), two), C::NOT_SUPPORTED);
    refused(d.map(part(range, 0, 3), two), C::INVALID_VALUE);
    refused(d.map(range.sub(0, 0).unwrap(), two), C::INVALID_VALUE);
    refused(d.map(range.sub(0, G + 8).unwrap(), two), C::INVALID_VALUE);
    refused(
        d.map(range.sub(4096, 2 * G).unwrap(), two),
        C::INVALID_VALUE,
    );
    refused(d.map(part(range, 0, 2), PhysId(77)), C::INVALID_VALUE);
    let past = VaRange::new(part(range, 7, 1).start(), 2 * G).unwrap();
    refused(d.map(past, two), C::INVALID_VALUE);
    d.map(part(range, 2, 2), two).unwrap();
    for from in 1..=3 {
        refused(d.map(part(range, from, 2), two), C::INVALID_VALUE);
    }
    d.map(part(range, 4, 2), two).unwrap();
    d.release(two).unwrap();
    refused(d.map(part(range, 6, 2), two), C::INVALID_VALUE);
    assert_eq!(d.live().mappings, 2);
}

#[test]
fn access_and_unmap_cover_whole_mappings_without_a_gap() {
    let d = device();
    let range = d.reserve(8 * G, 0).unwrap();
    let two = d.create(2 * G, PLAIN).unwrap();
    for at in [0, 2, 6] {
        d.map(part(range, at, 2), two).unwrap();
    }
    for (from, n) in [
        (0, 1),
        (1, 1),
        (1, 2),
        (0, 3),
        (0, 6),
        (0, 8),
        (4, 2),
        (4, 4),
    ] {
        let wrong = part(range, from, n);
        refused(d.set_access(wrong, Access::Read), C::INVALID_VALUE);
        refused(d.unmap(wrong), C::INVALID_VALUE);
    }
    let empty = range.sub(0, 0).unwrap();
    refused(d.set_access(empty, Access::Read), C::INVALID_VALUE);
    refused(d.unmap(empty), C::INVALID_VALUE);
    d.set_access(part(range, 0, 4), Access::ReadWrite).unwrap();
    d.set_access(part(range, 2, 2), Access::Read).unwrap();
    d.unmap(part(range, 0, 4)).unwrap();
    d.unmap(part(range, 6, 2)).unwrap();
    refused(d.unmap(part(range, 6, 2)), C::INVALID_VALUE);
}

#[test]
fn bad_arguments_of_work_are_refused_when_queued() {
    let d = device();
    let (range, _) = mapped(&d, 2);
    let at = |offset, len| range.sub(offset, len).unwrap();
    refused(
        d.copy(at(8, 0).start(), at(0, 16), DEFAULT),
        C::INVALID_VALUE,
    );
    d.copy(at(16, 0).start(), at(0, 16), DEFAULT).unwrap();
    d.copy(at(4, 0).start(), at(4, 0), DEFAULT).unwrap();
    refused(
        d.copy(Va::new(u64::MAX), at(0, 16), DEFAULT),
        C::INVALID_VALUE,
    );
    for wrong in [at(4, 8), at(8, 12)] {
        let kernel = Kernel::WritePattern {
            range: wrong,
            seed: 1,
        };
        refused(d.launch(kernel, DEFAULT), C::INVALID_VALUE);
    }
    let kernel = Kernel::ReadSum {
        range: at(0, 8),
        passes: 1,
        sink: at(12, 0).start(),
    };
    refused(d.launch(kernel, DEFAULT), C::INVALID_VALUE);
    refused(
        d.copy_to_host(&mut [0; 3], at(0, 4), DEFAULT),
        C::INVALID_VALUE,
    );
    let none = StreamId(9);
    refused(d.fill(range, 0, none), C::INVALID_HANDLE);
    refused(
        d.copy_from_host(range.start(), &[1], none),
        C::INVALID_HANDLE,
    );
    refused(d.sync_stream(none), C::INVALID_HANDLE);
    refused(d.stream_key(none), C::INVALID_HANDLE);
    refused(d.destroy_stream(none), C::INVALID_HANDLE);
    refused(d.destroy_stream(DEFAULT), C::INVALID_HANDLE);
    refused(d.hold(none), C::INVALID_HANDLE);
    let event = d.create_event().unwrap();
    refused(d.record_event(event, none), C::INVALID_HANDLE);
    refused(d.wait_event(none, event), C::INVALID_HANDLE);
    d.destroy_event(event).unwrap();
    refused(d.destroy_event(event), C::INVALID_HANDLE);
    refused(d.query_event(event), C::INVALID_HANDLE);
    refused(d.sync_event(event), C::INVALID_HANDLE);
    refused(d.record_event(event, DEFAULT), C::INVALID_HANDLE);
    refused(d.wait_event(DEFAULT, event), C::INVALID_HANDLE);
    d.sync_stream(DEFAULT).unwrap();
    assert!(!d.is_lost());
}

#[test]
fn memory_without_access_loses_the_device_which_can_still_be_cleaned_up() {
    let d = device();
    let range = d.reserve(2 * G, 0).unwrap();
    let phys = d.create(G, PLAIN).unwrap();
    let stream = d.create_stream().unwrap();
    let event = d.create_event().unwrap();
    let place = part(range, 0, 1);
    d.map(place, phys).unwrap();
    d.fill(place, 1, stream).unwrap();
    refused(d.sync_stream(stream), C::ILLEGAL_ADDRESS);
    assert!(d.is_lost());

    let lost = C::ILLEGAL_ADDRESS;
    refused(d.sync_stream(DEFAULT), lost);
    refused(d.fill(place, 1, DEFAULT), lost);
    refused(d.copy(place.start(), part(range, 1, 1), DEFAULT), lost);
    refused(d.launch(Kernel::Spin { nanos: 1 }, DEFAULT), lost);
    refused(d.copy_from_host(place.start(), &[1], DEFAULT), lost);
    refused(
        d.copy_to_host(&mut [0], place.sub(0, 1).unwrap(), DEFAULT),
        lost,
    );
    refused(d.record_event(event, DEFAULT), lost);
    refused(d.query_event(event), lost);
    refused(d.sync_event(event), lost);
    refused(d.wait_event(stream, event), lost);
    refused(d.hold(stream), lost);
    refused(d.create(G, PLAIN), lost);
    refused(d.map(part(range, 1, 1), phys), lost);
    refused(d.set_access(place, Access::Read), lost);

    d.unmap(place).unwrap();
    d.release(phys).unwrap();
    d.free_reservation(range).unwrap();
    d.destroy_event(event).unwrap();
    d.destroy_stream(stream).unwrap();
    assert_eq!(d.live(), HostCounts::default());
}

#[test]
fn a_write_through_a_read_only_mapping_is_illegal_and_a_read_is_not() {
    let d = device();
    let (range, _) = mapped(&d, 1);
    d.set_access(range, Access::Read).unwrap();
    assert!(all(&d, range, 0));
    refused(
        d.copy_from_host(range.start(), &[1], DEFAULT),
        C::ILLEGAL_ADDRESS,
    );
    assert!(d.is_lost());
}

#[test]
fn work_past_the_end_of_a_mapping_is_illegal() {
    let d = device();
    let (range, _) = mapped(&d, 2);
    d.unmap(part(range, 1, 1)).unwrap();
    let mut byte = [0; 2];
    let over = range.sub(G - 1, 2).unwrap();
    refused(d.copy_to_host(&mut byte, over, DEFAULT), C::ILLEGAL_ADDRESS);
}

#[test]
fn memory_unmapped_before_held_work_runs_is_an_illegal_address_not_a_crash() {
    let d = device();
    let (range, _) = mapped(&d, 4);
    let hold = d.hold(DEFAULT).unwrap();
    d.fill(range, 1, DEFAULT).unwrap();
    d.unmap(part(range, 2, 1)).unwrap();
    hold.release();
    refused(d.sync_stream(DEFAULT), C::ILLEGAL_ADDRESS);
}

#[test]
fn work_on_a_stream_runs_in_order_behind_a_hold() {
    let d = device();
    let (range, _) = mapped(&d, 2);
    let (a, b) = (part(range, 0, 1), part(range, 1, 1));
    let stream = d.create_stream().unwrap();
    let hold = d.hold(stream).unwrap();
    d.fill(a, 1, stream).unwrap();
    d.copy(b.start(), a, stream).unwrap();
    d.fill(a, 2, stream).unwrap();
    thread::sleep(Duration::from_millis(10));
    assert!(all(&d, range, 0), "held, and the default stream is not");
    drop(hold);
    d.sync_stream(stream).unwrap();
    assert!(all(&d, a, 2));
    assert!(all(&d, b, 1));
}

#[test]
fn a_stream_waits_for_the_most_recent_record_before_the_wait() {
    let d = device();
    let (range, _) = mapped(&d, 1);
    let (a, b) = (d.create_stream().unwrap(), d.create_stream().unwrap());
    let event = d.create_event().unwrap();
    assert!(d.query_event(event).unwrap(), "never recorded");
    d.sync_event(event).unwrap();
    d.wait_event(b, event).unwrap();

    let first = d.hold(a).unwrap();
    d.fill(range, 1, a).unwrap();
    d.record_event(event, a).unwrap();
    d.wait_event(b, event).unwrap();
    d.fill(range.sub(0, 8).unwrap(), 2, b).unwrap();
    let second = d.hold(a).unwrap();
    d.record_event(event, a).unwrap();
    assert!(!d.query_event(event).unwrap());
    // Destroyed events still order what was queued on them.
    let other = d.create_event().unwrap();
    d.record_event(other, b).unwrap();
    d.destroy_event(other).unwrap();

    first.release();
    d.sync_stream(b).unwrap();
    assert!(all(&d, range.sub(0, 8).unwrap(), 2));
    assert!(all(&d, range.sub(8, 8).unwrap(), 1));
    assert!(!d.query_event(event).unwrap(), "the second record counts");
    second.release();
    d.sync_event(event).unwrap();
    assert!(d.query_event(event).unwrap());
}

#[test]
fn a_record_that_passes_before_an_older_one_decides() {
    let d = device();
    let (a, b) = (d.create_stream().unwrap(), d.create_stream().unwrap());
    let event = d.create_event().unwrap();
    let hold = d.hold(a).unwrap();
    d.record_event(event, a).unwrap();
    d.wait_event(b, event).unwrap();
    d.record_event(event, DEFAULT).unwrap();
    assert!(d.query_event(event).unwrap());
    let after = d.create_event().unwrap();
    d.record_event(after, b).unwrap();
    thread::sleep(Duration::from_millis(5));
    assert!(!d.query_event(after).unwrap(), "b waits for the older one");
    hold.release();
    d.sync_stream(b).unwrap();
}

#[test]
fn stream_values_are_used_again_and_keys_are_not() {
    let d = device();
    let (a, b) = (d.create_stream().unwrap(), d.create_stream().unwrap());
    let key = d.stream_key(a).unwrap();
    assert_ne!(key, d.stream_key(b).unwrap());
    let hold = d.hold(a).unwrap();
    let (range, _) = mapped(&d, 1);
    d.fill(range, 5, a).unwrap();
    d.destroy_stream(a).unwrap();
    let again = d.create_stream().unwrap();
    assert_eq!(a, again);
    assert_ne!(key, d.stream_key(again).unwrap());
    d.sync_stream(again).unwrap();
    assert!(all(&d, range, 0), "the old stream's work is not this one's");
    hold.release();
    let end = Instant::now() + Duration::from_secs(10);
    while !all(&d, range, 5) {
        assert!(Instant::now() < end, "queued work of a destroyed stream");
        thread::yield_now();
    }
    let elsewhere = device();
    assert_ne!(
        elsewhere.stream_key(DEFAULT).unwrap(),
        d.stream_key(DEFAULT).unwrap()
    );
}

#[test]
fn kernels_write_check_and_sum_across_granules() {
    let d = device();
    let (range, _) = mapped(&d, 64);
    let sink = range.sub(0, 8).unwrap();
    let body = range.sub(8, 63 * G).unwrap();
    let check = |seed| {
        d.fill(sink, 0, DEFAULT).unwrap();
        let kernel = Kernel::CheckPattern {
            range: body,
            seed,
            mismatches: sink.start(),
        };
        d.launch(kernel, DEFAULT).unwrap();
        u64::from_le_bytes(read(&d, sink).try_into().unwrap())
    };
    let kernel = Kernel::WritePattern {
        range: body,
        seed: 4,
    };
    d.launch(kernel, DEFAULT).unwrap();
    assert_eq!(check(4), 0);
    assert_eq!(check(5), body.len() / 8);
    d.fill(body.sub(30 * G, 80).unwrap(), 0, DEFAULT).unwrap();
    assert_eq!(check(4), 10);
    let last = body.sub(body.len() - 8, 8).unwrap();
    let word = pattern_word(4, body.len() / 8 - 1);
    assert_eq!(read(&d, last), word.to_le_bytes());

    d.fill(range, 1, DEFAULT).unwrap();
    d.fill(sink, 0, DEFAULT).unwrap();
    let kernel = Kernel::ReadSum {
        range: body,
        passes: 3,
        sink: sink.start(),
    };
    d.launch(kernel, DEFAULT).unwrap();
    let sum = (body.len() / 8 * 3).wrapping_mul(0x0101_0101_0101_0101);
    assert_eq!(read(&d, sink), sum.to_le_bytes());
}

#[test]
fn a_lost_device_lets_everybody_who_waits_go() {
    let d = device();
    let (range, _) = mapped(&d, 1);
    d.unmap(range).unwrap();
    let stream = d.create_stream().unwrap();
    let event = d.create_event().unwrap();
    let hold = d.hold(stream).unwrap();
    d.launch(
        Kernel::Spin {
            nanos: 60_000_000_000,
        },
        stream,
    )
    .unwrap();
    d.record_event(event, stream).unwrap();
    thread::scope(|s| {
        let waits = [
            s.spawn(|| d.sync_stream(stream)),
            s.spawn(|| d.sync_event(event)),
            s.spawn(|| d.copy_from_host(range.start(), &[1], stream)),
        ];
        thread::sleep(Duration::from_millis(10));
        d.fill(range, 1, DEFAULT).unwrap();
        for wait in waits {
            refused(wait.join().unwrap(), C::ILLEGAL_ADDRESS);
        }
    });
    drop(hold);
}

fn mappings_of_this_process(range: VaRange) -> bool {
    let text = std::fs::read_to_string("/proc/self/maps").unwrap();
    text.lines().any(|line| {
        let (start, rest) = line.split_once('-').unwrap();
        let (end, _) = rest.split_once(' ').unwrap();
        let start = u64::from_str_radix(start, 16).unwrap();
        let end = u64::from_str_radix(end, 16).unwrap();
        let found = VaRange::new(Va::new(start), end - start).unwrap();
        line.contains("granule-host") && found.overlaps(range)
    })
}

#[test]
fn dropping_the_driver_does_the_queued_work_and_frees_everything() {
    let d = device();
    let (range, _) = mapped(&d, 2);
    let stream = d.create_stream().unwrap();
    d.launch(Kernel::Spin { nanos: 3_000_000 }, stream).unwrap();
    d.fill(range, 1, stream).unwrap();
    let shared = Arc::downgrade(&d.shared);
    assert!(mappings_of_this_process(range));
    drop(d);
    assert!(shared.upgrade().is_none());
    assert!(!mappings_of_this_process(range));
}

#[test]
fn dropping_the_driver_under_a_hold_does_not_wait_and_frees_after_it() {
    let d = device();
    let (range, _) = mapped(&d, 2);
    let stream = d.create_stream().unwrap();
    let hold = d.hold(stream).unwrap();
    d.fill(range, 1, stream).unwrap();
    d.destroy_stream(stream).unwrap();
    let shared = Arc::downgrade(&d.shared);
    drop(d);
    assert!(shared.upgrade().is_some());
    drop(hold);
    let end = Instant::now() + Duration::from_secs(10);
    while shared.strong_count() > 0 {
        assert!(Instant::now() < end);
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_hold_may_outlive_its_stream_and_device_loss() {
    let d = device();
    let stream = d.create_stream().unwrap();
    let hold = d.hold(stream).unwrap();
    d.destroy_stream(stream).unwrap();
    let free = d.reserve(G, 0).unwrap();
    d.fill(free, 0, DEFAULT).unwrap();
    refused(d.sync_stream(DEFAULT), C::ILLEGAL_ADDRESS);
    let shared = Arc::downgrade(&d.shared);
    drop(d);
    assert!(shared.upgrade().is_none(), "the loss ended the hold");
    drop(hold);
}

#[test]
fn mappings_change_beside_running_copies() {
    let d = device();
    let (steady, _) = mapped(&d, 64);
    d.fill(steady, 3, DEFAULT).unwrap();
    d.sync_stream(DEFAULT).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                let stream = d.create_stream().unwrap();
                while !stop.load(Ordering::Relaxed) {
                    let half = 32 * G;
                    let (a, b) = (steady.sub(0, half), steady.sub(half, half));
                    d.copy(b.unwrap().start(), a.unwrap(), stream).unwrap();
                    d.sync_stream(stream).unwrap();
                }
                d.destroy_stream(stream).unwrap();
            });
        }
        let changers: Vec<_> = (0..2_u8)
            .map(|id| {
                let d = &d;
                s.spawn(move || {
                    let range = d.reserve(8 * G, 0).unwrap();
                    let stream = d.create_stream().unwrap();
                    for round in 0..150_u8 {
                        let byte = round.wrapping_mul(2).wrapping_add(id);
                        let phys = d.create(4 * G, PLAIN).unwrap();
                        let (a, b) = (part(range, 0, 4), part(range, 4, 4));
                        d.map(a, phys).unwrap();
                        d.set_access(a, Access::ReadWrite).unwrap();
                        d.fill(a, byte, stream).unwrap();
                        d.map(b, phys).unwrap();
                        d.set_access(b, Access::Read).unwrap();
                        d.sync_stream(stream).unwrap();
                        d.unmap(a).unwrap();
                        let mut got = vec![0; 4 * G as usize];
                        d.copy_to_host(&mut got, b, stream).unwrap();
                        assert!(got.iter().all(|g| *g == byte));
                        d.release(phys).unwrap();
                        d.unmap(b).unwrap();
                    }
                    d.free_reservation(range).unwrap();
                    d.destroy_stream(stream).unwrap();
                })
            })
            .collect();
        for changer in changers {
            changer.join().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(all(&d, steady, 3));
    assert_eq!(d.live().mappings, 64);
    assert_eq!(d.live().streams, 0);
}

#[test]
fn unmapping_under_running_work_never_crashes() {
    for round in 0..30 {
        let d = device();
        let (range, _) = mapped(&d, 256);
        let kernel = Kernel::WritePattern { range, seed: 1 };
        for _ in 0..4 {
            d.launch(kernel, DEFAULT).unwrap();
        }
        thread::sleep(Duration::from_micros(round * 100));
        d.unmap(part(range, round, 256 - round)).unwrap();
        // Lost, unless all work had finished.
        let _ = d.sync_stream(DEFAULT);
    }
}

#[test]
fn wrong_configurations_say_what_is_wrong() {
    for (granularity, total_memory) in [(0, GIB), (3 * MIB, GIB), (512, GIB), (MIB, MIB - 1)] {
        let config = HostConfig {
            granularity,
            total_memory,
            ..HostConfig::default()
        };
        let error = HostDriver::new(config).unwrap_err();
        assert!(matches!(error, Error::InvalidConfig { .. }), "{error}");
    }
}

#[test]
fn errors_name_the_call_and_the_range() {
    let d = device();
    let range = d.reserve(G, 0).unwrap();
    let error = d.unmap(range).unwrap_err();
    assert_eq!(error.call, Call::Unmap);
    assert_eq!((error.at, error.len), (range.start().get(), G));
}

/// Uses up `vm.max_map_count`, so it runs alone in a process of its own.
#[test]
fn running_out_of_mappings_is_out_of_memory_and_changes_nothing() {
    let name = "driver::host::tests::exhaust_mappings";
    let test = std::env::current_exe().unwrap();
    let status = std::process::Command::new(test)
        .args(["--exact", name, "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&status.stdout);
    assert!(
        status.status.success() && text.contains("1 passed"),
        "{text}"
    );
}

#[test]
#[ignore = "run by running_out_of_mappings_is_out_of_memory_and_changes_nothing"]
fn exhaust_mappings() {
    const PAGE: u64 = 4096;
    const N: u64 = 200_000;
    let d = HostDriver::new(HostConfig {
        granularity: PAGE,
        total_memory: GIB,
        ..HostConfig::default()
    })
    .unwrap();
    let range = d.reserve(N * PAGE, 0).unwrap();
    let at = |i: u64| range.sub(i * PAGE, PAGE).unwrap();
    let phys = d.create(PAGE, PLAIN).unwrap();
    // The same page everywhere: no two mappings can be merged. In steps, so that a whole lot of
    // mappings is set at once near the limit.
    let mut n = 0;
    let error = loop {
        match d.map(at(n), phys) {
            Ok(()) => n += 1,
            Err(e) => break e,
        }
    };
    assert_eq!(error.code, C::OUT_OF_MEMORY);
    assert!(n > 1000);
    assert_eq!(d.live().mappings as u64, n);
    // The place is still free and reserved: it can be mapped once there is room.
    d.unmap(at(0)).unwrap();
    d.unmap(at(1)).unwrap();
    d.map(at(n), phys).unwrap();
    d.set_access(
        range.sub(2 * PAGE, (n - 1) * PAGE).unwrap(),
        Access::ReadWrite,
    )
    .unwrap();
    d.fill(at(2), 9, DEFAULT).unwrap();
    assert!(all(&d, at(n), 9));

    // One large mapping next to its neighbours' pages merges with them while rights are equal;
    // splitting off single ones runs into the limit half-way.
    let wide = HostDriver::new(HostConfig {
        granularity: PAGE,
        total_memory: GIB,
        ..HostConfig::default()
    })
    .unwrap();
    d.unmap(range.sub(2 * PAGE, 40 * PAGE).unwrap()).unwrap();
    let merged = wide.reserve(600 * PAGE, 0).unwrap();
    for i in 0..600 {
        let phys = wide.create(PAGE, PLAIN).unwrap();
        wide.map(merged.sub(i * PAGE, PAGE).unwrap(), phys).unwrap();
    }
    wide.set_access(merged, Access::ReadWrite).unwrap();
    let mut refusals = 0;
    for i in (0..600).step_by(2) {
        let one = merged.sub(i * PAGE, PAGE).unwrap();
        if let Err(e) = wide.set_access(one, Access::Read) {
            assert_eq!(e.code, C::OUT_OF_MEMORY);
            refusals += 1;
        }
    }
    assert!(refusals > 0);
    // Refused ones kept their rights.
    wide.fill(merged.sub(599 * PAGE, 8).unwrap(), 1, DEFAULT)
        .unwrap();
    wide.fill(merged.sub(598 * PAGE, 8).unwrap(), 1, DEFAULT)
        .unwrap();
    wide.sync_stream(DEFAULT).unwrap();
}
