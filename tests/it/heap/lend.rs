//! Memory of one stream goes to another that waits for it on the device.

use std::time::Duration;

use granule::driver::{Call, DriverCode};
use granule::units::MIB;
use granule::{Block, HeapConfig};

use super::yard::Yard;
use crate::support::{On, eventually};

on_each_driver! {
    another_streams_memory_comes_behind_a_wait_of_the_device
    memory_goes_back_and_forth_under_queued_work
    what_is_not_needed_stays_with_its_stream
    old_mappings_go_before_the_memory_leaves_the_heap
    without_aliases_nothing_is_lent
    a_captured_stream_neither_lends_nor_takes
    a_failure_anywhere_leaves_the_memory_with_its_stream
    threads_of_two_streams_share_a_tight_budget
}

const WAITS: [Call; 2] = [Call::SyncStream, Call::SyncEvent];

fn config(aliases: usize) -> HeapConfig {
    HeapConfig {
        aliases,
        granule_max: 4 * MIB,
        granule_min: 2 * MIB,
        wait: Duration::ZERO,
        ..HeapConfig::default()
    }
}

/// Memory of a stream that nobody has, with work on it that has not begun.
fn leave_pending(yard: &Yard, bytes: u64, stream: usize, seed: u64) {
    let block = yard.filled(bytes, stream, seed);
    yard.check(&block, seed, stream);
}

fn another_streams_memory_comes_behind_a_wait_of_the_device(on: On) {
    let yard = Yard::new(on, 16 * MIB, config(64), 2);
    let live = yard.filled(2 * MIB, 1, 1);
    let hold = yard.streams[1].hold().unwrap();
    leave_pending(&yard, 14 * MIB, 1, 2);
    let before = yard.rig.counts();
    let block = yard.filled(8 * MIB, 0, 3);
    yard.check(&block, 3, 0);
    let calls = yard.rig.counts().since(&before);
    assert_eq!(calls.sum(&WAITS).calls, 0);
    assert_eq!(
        (calls.of(Call::Create).calls, calls.of(Call::Unmap).calls),
        (0, 0)
    );
    assert_eq!(calls.of(Call::WaitEvent).calls, 1);
    let stats = yard.heap.stats();
    assert_eq!((stats.host_waits, stats.device_waits), (0, 1), "{stats:?}");
    assert_eq!((stats.held, stats.remaps), (16 * MIB, stats.aliases));
    assert!(stats.aliases >= 2, "{stats:?}");
    // The taker's work is behind that of the old owner.
    let fence = yard.streams[0].fence().unwrap();
    assert!(!fence.is_done().unwrap());
    yard.audit();
    drop(hold);
    yard.sync();
    yard.check(&live, 1, 1);
    yard.heap.trim();
    assert_eq!(yard.heap.stats().aliases, 0);
    yard.audit();
    drop((live, block, fence));
    yard.end();
}

fn memory_goes_back_and_forth_under_queued_work(on: On) {
    // Each old mapping keeps its addresses.
    let config = HeapConfig {
        addresses: Some(2 << 30),
        ..config(1000)
    };
    let yard = Yard::new(on, 16 * MIB, config, 3);
    let rounds = if on == On::Cuda { 60 } else { 30 };
    let holds: Vec<_> = yard.streams.iter().map(|s| s.hold().unwrap()).collect();
    for round in 0..rounds {
        let stream = (round % 3) as usize;
        let sizes = [[12, 4], [6, 10], [2, 14]][stream];
        let blocks = sizes.map(|n| yard.filled(n * MIB, stream, 10 * round + n));
        for (block, n) in blocks.iter().zip(sizes) {
            yard.check(block, 10 * round + n, stream);
        }
        if round % 5 == 0 {
            yard.audit();
        }
    }
    let stats = yard.heap.stats();
    assert_eq!(stats.host_waits, 0);
    assert!(stats.device_waits >= rounds - 3, "{stats:?}");
    assert_eq!(stats.held, 16 * MIB);
    drop(holds);
    yard.sync();
    yard.audit();
    yard.end();
}

fn what_is_not_needed_stays_with_its_stream(on: On) {
    let yard = Yard::new(on, 16 * MIB, config(64), 2);
    let hold = yard.streams[1].hold().unwrap();
    leave_pending(&yard, 16 * MIB, 1, 1);
    let block = yard.filled(4 * MIB, 0, 2);
    let shown = yard.heap.snapshot();
    super::snapshot::check(&shown);
    let held: Vec<u64> = shown.streams.iter().map(|s| s.stats.held).collect();
    assert_eq!(held, [12 * MIB, 4 * MIB]);
    // Its own stream takes the rest without a wait.
    let before = yard.rig.counts();
    let rest = yard.filled(12 * MIB, 1, 3);
    assert_eq!(yard.rig.calls(&before, Call::WaitEvent), 0);
    drop(hold);
    yard.check(&block, 2, 0);
    yard.check(&rest, 3, 1);
    yard.sync();
    drop((block, rest));
    yard.end();
}

fn old_mappings_go_before_the_memory_leaves_the_heap(on: On) {
    let yard = Yard::new(on, 16 * MIB, config(64), 2);
    let hold = yard.streams[1].hold().unwrap();
    leave_pending(&yard, 16 * MIB, 1, 1);
    let block = yard.filled(16 * MIB, 0, 2);
    assert!(yard.heap.stats().aliases > 0);
    drop(hold);
    yard.sync();
    drop(block);
    // Only the taker is asked, as another holder of the pool would.
    let needs = granule::Arena::new(&yard.pool, 16 * MIB).unwrap();
    eventually(|| needs.grow(16 * MIB).is_ok()).unwrap();
    assert_eq!(yard.heap.stats().aliases, 0);
    assert_eq!(yard.rig.left().granules, 1 + needs.ranges().len());
    drop(needs);
    yard.audit();
    yard.end();
}

fn without_aliases_nothing_is_lent(on: On) {
    let yard = Yard::new(on, 16 * MIB, config(0), 2);
    let hold = yard.streams[1].hold().unwrap();
    leave_pending(&yard, 16 * MIB, 1, 1);
    let error = yard.heap.alloc(8 * MIB, &yard.streams[0]).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert_eq!(yard.heap.stats().device_waits, 0);
    drop(hold);
    yard.sync();
    let block = yard.filled(8 * MIB, 0, 2);
    yard.check(&block, 2, 0);
    drop(block);
    yard.end();
}

fn a_captured_stream_neither_lends_nor_takes(on: On) {
    let yard = Yard::new(on, 16 * MIB, config(64), 2);
    leave_pending(&yard, 16 * MIB, 1, 1);
    yard.sync();
    for captured in [0, 1] {
        let hold = yard.streams[1 - captured].hold().unwrap();
        leave_pending(&yard, 16 * MIB, 1, 2);
        let id = yard.streams[captured].id();
        yard.rig.inner.begin_capture(id).unwrap();
        let error = yard.heap.alloc(8 * MIB, &yard.streams[0]).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        yard.rig.inner.end_capture(id).unwrap();
        assert_eq!(yard.heap.stats().device_waits, 0);
        drop(hold);
        yard.sync();
    }
    yard.audit();
    yard.end();
}

fn a_failure_anywhere_leaves_the_memory_with_its_stream(on: On) {
    for nth in 1..16 {
        for code in [DriverCode::UNKNOWN, DriverCode::OUT_OF_MEMORY] {
            let yard = Yard::new(on, 16 * MIB, config(64), 2);
            let live = yard.filled(2 * MIB, 1, 1);
            let hold = yard.streams[1].hold().unwrap();
            leave_pending(&yard, 14 * MIB, 1, 2);
            yard.rig.fault.fail_nth_overall(nth, code);
            let block = yard.heap.alloc(8 * MIB, &yard.streams[0]);
            yard.audit();
            yard.rig.fault.clear();
            let blocks: Vec<Block> = match block {
                Ok(block) => vec![block],
                Err(_) => vec![yard.filled(14 * MIB, 1, 3)],
            };
            if blocks[0].stream().unwrap() == yard.streams[0] {
                yard.write(&blocks[0], 4, 0);
                yard.check(&blocks[0], 4, 0);
            }
            yard.check(&live, 1, 1);
            drop(hold);
            yard.sync();
            yard.audit();
            drop((blocks, live));
            yard.end();
        }
    }
}

fn threads_of_two_streams_share_a_tight_budget(on: On) {
    let config = HeapConfig {
        wait: Duration::from_secs(5),
        ..config(64)
    };
    let yard = Yard::new(on, 24 * MIB, config, 3);
    std::thread::scope(|scope| {
        for stream in 0..3 {
            let yard = &yard;
            scope.spawn(move || {
                for round in 0..40 {
                    let size = (1 + (round * 7 + stream as u64) % 4) * 2 * MIB;
                    let block = yard.filled(size, stream, round);
                    yard.check(&block, round, stream);
                }
            });
        }
    });
    yard.sync();
    yard.audit();
    yard.end();
}
