//! Work, order, waiting, and what happens when work goes wrong or the driver is dropped.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::driver::pattern_word;

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

/// Lines of this process's mappings that end with a memory file of this driver, by inode: other
/// tests may get the same addresses.
fn mapped_inodes() -> Vec<(u64, String)> {
    let text = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ours = text.lines().filter(|line| line.contains("granule-host"));
    ours.map(|line| {
        let start = line.split('-').next().unwrap();
        let inode = line.split_whitespace().nth(4).unwrap();
        (u64::from_str_radix(start, 16).unwrap(), inode.to_owned())
    })
    .collect()
}

#[test]
fn dropping_the_driver_does_the_queued_work_and_frees_everything() {
    let d = device();
    let (range, _) = mapped(&d, 2);
    let stream = d.create_stream().unwrap();
    d.launch(Kernel::Spin { nanos: 3_000_000 }, stream).unwrap();
    d.fill(range, 1, stream).unwrap();
    let shared = Arc::downgrade(&d.shared);
    let start = range.start().get();
    let before = mapped_inodes();
    let (_, inode) = before.iter().find(|(at, _)| *at == start).unwrap();
    drop(d);
    assert!(shared.upgrade().is_none());
    assert!(mapped_inodes().iter().all(|(_, other)| other != inode));
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
