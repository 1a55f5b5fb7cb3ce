//! Remapping while work is queued: a granule is mapped at its new place first, and its old mapping
//! goes when nothing uses it any more.

use std::time::Duration;

use granule::driver::{Access, Call, Kernel};
use granule::units::MIB;
use granule::{Block, HeapConfig};

use super::yard::Yard;
use crate::support::{On, PATIENCE};

const WAITS: [Call; 2] = [Call::SyncStream, Call::SyncEvent];

on_each_driver! {
    granules_move_under_queued_work_and_nobody_waits
    old_mappings_go_once_their_work_is_done
    the_bound_on_aliases_holds_and_new_memory_serves_instead
    without_aliases_a_use_after_free_finds_nothing_mapped
    without_aliases_an_allocation_waits_before_it_remaps
    memory_changes_hands_many_times_behind_one_hold
    a_granule_that_moved_can_move_again_behind_the_same_hold
    memory_that_must_leave_waits_for_its_work_first
    an_allocation_that_must_fail_does_not_wait_for_old_mappings
}

/// Small granules, and no wait.
fn config(aliases: usize) -> HeapConfig {
    HeapConfig {
        aliases,
        granule_max: 4 * MIB,
        granule_min: 2 * MIB,
        wait: Duration::ZERO,
        ..HeapConfig::default()
    }
}

/// Holes of so many bytes, as blocks still, between live blocks of 2 MiB.
fn holes(yard: &Yard, sizes: &[u64]) -> (Vec<Block>, Vec<Block>) {
    let mut seed = 0;
    let pairs = sizes.iter().map(|&size| {
        seed += 1;
        (
            yard.filled(size, 0, seed),
            yard.filled(2 * MIB, 0, 100 + seed),
        )
    });
    pairs.unzip()
}

fn check_kept(yard: &Yard, kept: &[Block]) {
    for (block, seed) in kept.iter().zip(101..) {
        yard.check(block, seed, 0);
    }
}

fn granules_move_under_queued_work_and_nobody_waits(on: On) {
    let yard = Yard::new(on, 16 * MIB, config(64), 1);
    let (old, kept) = holes(&yard, &[6 * MIB, 6 * MIB]);
    yard.sync();
    let hold = yard.streams[0].hold().unwrap();
    // Work of the old owners that has not begun when their memory changes hands.
    for (block, seed) in old.iter().zip([11, 12]) {
        yard.write(block, seed, 0);
        yard.check(block, seed, 0);
    }
    let before = yard.rig.counts();
    drop(old);
    let new = yard.filled(12 * MIB, 0, 13);
    yard.check(&new, 13, 0);
    let calls = yard.rig.counts().since(&before);
    assert_eq!(calls.sum(&WAITS).calls, 0);
    assert_eq!(calls.of(Call::Create).calls, 0);
    assert_eq!(calls.of(Call::Unmap).calls, 0);
    let stats = yard.heap.stats();
    assert!(
        stats.remaps >= 4 && stats.aliases == stats.remaps,
        "{stats:?}"
    );
    assert_eq!((stats.host_waits, stats.device_waits), (0, 0));
    assert_eq!(stats.held, 16 * MIB);
    check_kept(&yard, &kept);
    yard.audit();
    drop(hold);
    drop((new, kept));
    yard.audit();
    yard.end();
}

fn old_mappings_go_once_their_work_is_done(on: On) {
    let yard = Yard::new(on, 16 * MIB, config(64), 1);
    let (old, kept) = holes(&yard, &[6 * MIB, 6 * MIB]);
    let hold = yard.streams[0].hold().unwrap();
    drop(old);
    let new = yard.filled(12 * MIB, 0, 13);
    let aliases = yard.heap.stats().aliases;
    assert!(aliases > 0);
    yard.heap.trim();
    assert_eq!(yard.heap.stats().aliases, aliases);
    drop(hold);
    yard.sync();
    let before = yard.rig.counts();
    yard.heap.trim();
    assert_eq!(yard.heap.stats().aliases, 0);
    assert_eq!(yard.rig.calls(&before, Call::Unmap), aliases);
    yard.check(&new, 13, 0);
    check_kept(&yard, &kept);
    drop((new, kept));
    yard.end();
}

fn the_bound_on_aliases_holds_and_new_memory_serves_instead(on: On) {
    let yard = Yard::new(on, 64 * MIB, config(2), 1);
    let (old, kept) = holes(&yard, &[2 * MIB; 8]);
    let hold = yard.streams[0].hold().unwrap();
    drop(old);
    let mut blocks = Vec::new();
    let mut created = Vec::new();
    let before = yard.rig.counts();
    for seed in 0..4 {
        let block = yard.filled(4 * MIB, 0, 200 + seed);
        yard.check(&block, 200 + seed, 0);
        blocks.push(block);
        created.push(yard.rig.calls(&before, Call::Create));
        assert!(yard.heap.stats().aliases <= 2);
        yard.audit();
    }
    // The first one took the two granules that may move; the others got new memory.
    assert_eq!(created[0], 0);
    assert!(created[3] > 0);
    assert_eq!(yard.rig.counts().since(&before).sum(&WAITS).calls, 0);
    // With the budget used up there is neither: an error, no wait.
    while let Ok(block) = yard.heap.alloc(4 * MIB, &yard.streams[0]) {
        blocks.push(block);
        assert!(yard.heap.stats().aliases <= 2);
    }
    drop(hold);
    yard.sync();
    // Now the rest may move.
    let last = yard.filled(4 * MIB, 0, 300);
    yard.check(&last, 300, 0);
    check_kept(&yard, &kept);
    yard.audit();
    drop((last, blocks, kept));
    yard.end();
}

fn without_aliases_a_use_after_free_finds_nothing_mapped(on: On) {
    let config = HeapConfig {
        wait: PATIENCE,
        ..config(0)
    };
    let yard = Yard::new(on, 16 * MIB, config, 1);
    let (old, kept) = holes(&yard, &[6 * MIB, 6 * MIB]);
    let places: Vec<_> = old.iter().map(Block::range).collect();
    drop(old);
    let new = yard.filled(12 * MIB, 0, 13);
    assert_eq!(yard.heap.stats().aliases, 0);
    for place in places {
        let first = place.sub(0, 2 * MIB).unwrap();
        assert!(yard.rig.inner.set_access(first, Access::ReadWrite).is_err());
    }
    yard.check(&new, 13, 0);
    check_kept(&yard, &kept);
    drop((new, kept));
    yard.audit();
    yard.end();
}

fn without_aliases_an_allocation_waits_before_it_remaps(on: On) {
    let config = HeapConfig {
        wait: PATIENCE,
        ..config(0)
    };
    let yard = Yard::new(on, 16 * MIB, config, 1);
    let (old, kept) = holes(&yard, &[6 * MIB, 6 * MIB]);
    let spin = Kernel::Spin { nanos: 5_000_000 };
    yard.rig.inner.launch(spin, yard.streams[0].id()).unwrap();
    for (block, seed) in old.iter().zip([11, 12]) {
        yard.write(block, seed, 0);
        yard.check(block, seed, 0);
    }
    drop(old);
    let new = yard.filled(12 * MIB, 0, 13);
    assert!(yard.heap.stats().host_waits > 0);
    assert_eq!(yard.heap.stats().aliases, 0);
    yard.check(&new, 13, 0);
    check_kept(&yard, &kept);
    drop((new, kept));
    yard.audit();
    yard.end();
}

/// Sizes that fit into no hole of the round before.
fn memory_changes_hands_many_times_behind_one_hold(on: On) {
    // Each alias keeps its addresses.
    let config = HeapConfig {
        addresses: Some(2 << 30),
        ..config(1000)
    };
    let yard = Yard::new(on, 48 * MIB, config, 1);
    let hold = yard.streams[0].hold().unwrap();
    let before = yard.rig.counts();
    let mut live: Vec<(Block, u64)> = Vec::new();
    // A CUDA stream takes about a thousand pieces of work; one more launch waits for the hold.
    let (rounds, moves) = if on == On::Cuda { (6, 6) } else { (30, 50) };
    for round in 0..rounds {
        let size = (2 + round % 5 * 2) * MIB;
        let mut at = 0;
        // Every other one goes.
        live.retain(|(block, seed)| {
            at += 1;
            yard.check(block, *seed, 0);
            at % 2 == 0
        });
        while live.iter().map(|(b, _)| b.len()).sum::<u64>() + size <= 40 * MIB {
            let seed = 1000 * round + live.len() as u64;
            live.push((yard.filled(size, 0, seed), seed));
        }
        yard.audit();
    }
    let stats = yard.heap.stats();
    assert!(stats.remaps > moves, "{stats:?}");
    let calls = yard.rig.counts().since(&before);
    assert_eq!(calls.sum(&WAITS).calls, 0);
    assert_eq!(calls.of(Call::Unmap).calls, 0);
    drop(hold);
    for (block, seed) in &live {
        yard.check(block, *seed, 0);
    }
    drop(live);
    yard.audit();
    yard.end();
}

fn a_granule_that_moved_can_move_again_behind_the_same_hold(on: On) {
    let yard = Yard::new(on, 10 * MIB, config(64), 1);
    let a = yard.filled(2 * MIB, 0, 1);
    let k = yard.filled(2 * MIB, 0, 2);
    let b = yard.filled(2 * MIB, 0, 3);
    let m = yard.filled(2 * MIB, 0, 4);
    let hold = yard.streams[0].hold().unwrap();
    drop((a, b));
    let c = yard.filled(4 * MIB, 0, 5);
    yard.check(&c, 5, 0);
    drop(c);
    // Beside `m`, or beyond: the granules of `c` are not enough for six.
    let d = yard.filled(6 * MIB, 0, 6);
    yard.check(&d, 6, 0);
    yard.check(&k, 2, 0);
    yard.check(&m, 4, 0);
    yard.audit();
    drop((hold, d, k, m));
    yard.end();
}

/// A hole of 6 MiB and a free granule of 8: it must be released before its bytes can fill the hole.
fn memory_that_must_leave_waits_for_its_work_first(on: On) {
    for (wait, hold) in [(Duration::ZERO, true), (Duration::from_secs(10), false)] {
        let config = HeapConfig {
            granule_max: 16 * MIB,
            granules: 1,
            wait,
            ..config(64)
        };
        let yard = Yard::new(on, 26 * MIB, config, 1);
        let run = yard.filled(8 * MIB, 0, 1);
        let hole = yard.filled(6 * MIB, 0, 2);
        let kept = yard.filled(2 * MIB, 0, 3);
        drop(hole);
        let moved = yard.filled(8 * MIB, 0, 4);
        yard.sync();
        let long = yard.filled(8 * MIB, 0, 5);
        let spin = Kernel::Spin { nanos: 5_000_000 };
        yard.rig.inner.launch(spin, yard.streams[0].id()).unwrap();
        let hold = hold.then(|| yard.streams[0].hold().unwrap());
        for (block, seed) in [(&run, 11), (&long, 12)] {
            yard.write(block, seed, 0);
            yard.check(block, seed, 0);
        }
        drop((run, long));
        let before = yard.rig.counts();
        let new = yard.heap.alloc(14 * MIB, &yard.streams[0]);
        let releases = yard.rig.calls(&before, Call::Release);
        match (&hold, &new) {
            (Some(_), Err(error)) => {
                assert!(error.is_out_of_memory(), "{error}");
                assert_eq!(releases, 0);
            }
            (None, Ok(block)) => {
                assert!(releases > 0);
                assert!(yard.heap.stats().host_waits > 0);
                yard.write(block, 13, 0);
                yard.check(block, 13, 0);
            }
            other => panic!("{other:?}"),
        }
        yard.check(&kept, 3, 0);
        yard.check(&moved, 4, 0);
        yard.audit();
        drop((hold, new, kept, moved));
        yard.end();
    }
}

/// Old mappings hold nothing of the budget: no memory comes of waiting for them.
fn an_allocation_that_must_fail_does_not_wait_for_old_mappings(on: On) {
    let config = HeapConfig {
        granule_max: 2 * MIB,
        wait: Duration::from_secs(5),
        ..config(64)
    };
    let yard = Yard::new(on, 16 * MIB, config, 1);
    let (old, kept) = holes(&yard, &[6 * MIB, 6 * MIB]);
    yard.sync();
    let hold = yard.streams[0].hold().unwrap();
    drop(old);
    let new = yard.filled(12 * MIB, 0, 13);
    assert!(yard.heap.stats().aliases > 0);
    let error = yard.heap.alloc(2 * MIB, &yard.streams[0]).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert_eq!(yard.heap.stats().host_waits, 0);
    hold.release();
    yard.check(&new, 13, 0);
    check_kept(&yard, &kept);
    drop((new, kept));
    yard.end();
}
