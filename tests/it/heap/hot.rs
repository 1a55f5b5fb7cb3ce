//! Small blocks that go from hand to hand without the lane's lock.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Barrier, Mutex, mpsc};

use granule::driver::pattern_word;
use granule::units::{KIB, MIB, Va};
use granule::{Block, Error, HeapConfig, History, HistoryConfig};

use super::yard::Yard;
use crate::support::{On, eventually};

on_each_driver! {
    only_a_block_without_an_owner_is_freed_by_its_address
    a_use_recorded_by_address_is_heeded_when_the_owner_frees
    a_recorded_use_keeps_a_small_block_from_the_next
    what_threads_leave_behind_is_given_back
    blocks_may_be_freed_by_any_thread
    more_threads_than_have_magazines_share_a_stream
    a_thread_that_ends_may_still_drop_blocks
    no_block_is_had_twice_while_threads_come_and_go_and_others_look
}

fn yard(on: On) -> Yard {
    Yard::new(on, 64 * MIB, HeapConfig::default(), 2)
}

fn is_stale(yard: &Yard, at: Va) -> bool {
    let freed = yard.heap.free_raw(at);
    matches!(freed, Err(Error::Stale { .. }))
}

fn only_a_block_without_an_owner_is_freed_by_its_address(on: On) {
    let yard = yard(on);
    for size in [256, 4 * KIB, 64 * KIB, 4 * MIB] {
        let block = yard.alloc(size, 0);
        let at = block.ptr();
        assert_eq!(yard.heap.usable_size(at).unwrap(), size);
        assert!(is_stale(&yard, at), "it has an owner");
        assert_eq!(yard.heap.usable_size(at).unwrap(), size);
        drop(block);
        assert!(is_stale(&yard, at), "it is freed");
        assert!(yard.heap.usable_size(at).is_err());
        assert!(yard.heap.record_use_raw(at, &yard.streams[1]).is_err());
        let stats = yard.heap.stats();
        assert_eq!((stats.live, stats.blocks), (0, 0));
        let raw = yard.alloc(size, 0).into_raw();
        assert_eq!(raw, at);
        yard.heap.free_raw(raw).unwrap();
        assert!(is_stale(&yard, at), "a second free");
        yard.audit();
    }
    assert_eq!(yard.heap.stats().allocs, 8);
    yard.end();
}

fn a_use_recorded_by_address_is_heeded_when_the_owner_frees(on: On) {
    let yard = yard(on);
    let block = yard.filled(4 * KIB, 0, 1);
    let at = block.ptr();
    yard.order(0, 1);
    let hold = yard.streams[1].hold().unwrap();
    yard.check(&block, 1, 1);
    yard.heap.record_use_raw(at, &yard.streams[1]).unwrap();
    drop(block);
    assert_eq!(yard.heap.stats().limbo, 4 * KIB);
    let next = yard.filled(4 * KIB, 0, 2);
    assert_ne!(next.ptr(), at);
    drop(hold);
    yard.check(&next, 2, 0);
    drop(next);
    yard.audit();
    yard.end();
}

fn a_recorded_use_keeps_a_small_block_from_the_next(on: On) {
    let yard = yard(on);
    drop(yard.alloc(4 * KIB, 0));
    let block = yard.filled(4 * KIB, 0, 1);
    let at = block.ptr();
    yard.order(0, 1);
    let hold = yard.streams[1].hold().unwrap();
    yard.check(&block, 1, 1);
    block.record_use(&yard.streams[1]).unwrap();
    drop(block);
    let next = yard.filled(4 * KIB, 0, 2);
    assert_ne!(next.ptr(), at);
    drop(hold);
    yard.check(&next, 2, 0);
    drop(next);
    yard.audit();
    yard.end();
}

fn what_threads_leave_behind_is_given_back(on: On) {
    let yard = yard(on);
    let on_stream = yard.heap.on(&yard.streams[0]).unwrap();
    std::thread::scope(|scope| {
        for thread in 1..=20 {
            let on_stream = &on_stream;
            scope.spawn(move || {
                for size in [256, 3 * KIB, 16 * KIB, 40 * KIB] {
                    let blocks: Vec<_> = (0..thread)
                        .map(|_| on_stream.alloc(size).unwrap())
                        .collect();
                    drop(blocks);
                }
            });
        }
    });
    let stats = yard.heap.stats();
    assert_eq!((stats.live, stats.blocks), (0, 0), "{stats:?}");
    assert_eq!(stats.allocs, 4 * 20 * 21 / 2);
    yard.audit();
    yard.sync();
    eventually(|| {
        yard.heap.trim();
        yard.heap.stats().held == 0
    })
    .unwrap();
    drop(on_stream);
    yard.audit();
    yard.end();
}

fn blocks_may_be_freed_by_any_thread(on: On) {
    let yard = yard(on);
    let on_stream = yard.heap.on(&yard.streams[0]).unwrap();
    let (to, from) = mpsc::sync_channel(40);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut kept = Vec::new();
            for block in from {
                kept.push(block);
                if kept.len() == 37 {
                    kept.clear();
                }
            }
        });
        for i in 0..2000u64 {
            let block = on_stream.alloc(256 << (i % 7)).unwrap();
            super::yard::write(&yard.rig, block.range(), i, &yard.streams[0]);
            yard.check(&block, i, 0);
            assert!(to.send(block).is_ok());
        }
        drop(to);
    });
    let stats = yard.heap.stats();
    assert_eq!((stats.live, stats.blocks), (0, 0), "{stats:?}");
    assert_eq!(stats.misses, 1, "{stats:?}");
    drop(on_stream);
    yard.audit();
    yard.end();
}

fn more_threads_than_have_magazines_share_a_stream(on: On) {
    const THREADS: usize = 80;
    let yard = yard(on);
    let on_stream = yard.heap.on(&yard.streams[0]).unwrap();
    let together = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for thread in 0..THREADS as u64 {
            let (yard, on_stream, together) = (&yard, &on_stream, &together);
            scope.spawn(move || {
                together.wait();
                for round in 0..3 {
                    let block = on_stream.alloc(4 * KIB).unwrap();
                    let seed = thread << 8 | round;
                    super::yard::write(&yard.rig, block.range(), seed, &yard.streams[0]);
                    yard.check(&block, seed, 0);
                }
                // Nobody's number is given to another before all have had theirs.
                together.wait();
            });
        }
    });
    let stats = yard.heap.stats();
    assert_eq!((stats.live, stats.blocks), (0, 0), "{stats:?}");
    assert_eq!(stats.allocs, 3 * THREADS as u64);
    drop(on_stream);
    yard.audit();
    yard.end();
}

fn a_thread_that_ends_may_still_drop_blocks(on: On) {
    thread_local!(static LAST: RefCell<Vec<Block>> = const { RefCell::new(Vec::new()) });
    let yard = yard(on);
    let on_stream = yard.heap.on(&yard.streams[0]).unwrap();
    for _ in 0..4 {
        let on_stream = on_stream.clone();
        // What is first used last goes first, or the other way round: one of both orders each.
        let keep = |block| LAST.with_borrow_mut(|last| last.push(block));
        let threads = [
            std::thread::spawn({
                let on_stream = on_stream.clone();
                move || {
                    LAST.with_borrow(Vec::len);
                    keep(on_stream.alloc(4 * KIB).unwrap());
                }
            }),
            std::thread::spawn(move || keep(on_stream.alloc(4 * KIB).unwrap())),
        ];
        threads.into_iter().for_each(|t| t.join().unwrap());
    }
    let stats = yard.heap.stats();
    assert_eq!(
        (stats.live, stats.blocks, stats.allocs),
        (0, 0, 8),
        "{stats:?}"
    );
    drop(on_stream);
    yard.audit();
    yard.end();
}

/// Six threads at a time, two of which free what others allocated, beside one that trims, counts, takes snapshots and turns
/// the history on and off.
fn no_block_is_had_twice_while_threads_come_and_go_and_others_look(on: On) {
    const THREADS: usize = 6;
    let yard = yard(on);
    let had: Vec<Mutex<HashSet<Va>>> = (0..64).map(|_| Mutex::default()).collect();
    let of = |block: &Block| had[(block.ptr().get() >> 8) as usize % 64].lock().unwrap();
    let passed: Mutex<Vec<Block>> = Mutex::default();
    let free = |block: Block| {
        // Before it may be another's.
        assert!(of(&block).remove(&block.ptr()));
        drop(block);
    };
    let live = AtomicUsize::new(THREADS);
    let work = |thread: u64| {
        let on_stream = yard.heap.on(&yard.streams[0]).unwrap();
        let mut mine: Vec<Block> = Vec::new();
        for round in 0..3_000 {
            let random = pattern_word(thread, round);
            match random % 8 {
                0..4 => {
                    let block = on_stream.alloc(256 << (random >> 8 & 7)).unwrap();
                    assert!(of(&block).insert(block.ptr()), "{block:?} is had twice");
                    mine.push(block);
                }
                4..6 => mine.pop().map(free).unwrap_or(()),
                6 => passed.lock().unwrap().extend(mine.pop()),
                _ => {
                    let other = passed.lock().unwrap().pop();
                    other.map(free).unwrap_or(());
                }
            }
            if mine.len() > 200 {
                mine.drain(..).for_each(free);
            }
        }
        mine.drain(..).for_each(free);
    };
    std::thread::scope(|scope| {
        for line in 0..THREADS as u64 {
            let (live, work) = (&live, &work);
            scope.spawn(move || {
                for generation in 0..5 {
                    let one = || work(line << 8 | generation);
                    std::thread::scope(|inner| inner.spawn(one).join()).unwrap();
                }
                live.fetch_sub(1, Relaxed);
            });
        }
        let history = History::new(HistoryConfig::default());
        while live.load(Relaxed) > 0 {
            yard.heap.trim();
            let stats = yard.heap.stats();
            assert!(stats.live <= stats.held, "{stats:?}");
            assert!(yard.heap.snapshot().streams.len() <= 1);
            yard.heap.set_history(Some(&history));
            std::thread::yield_now();
            yard.heap.set_history(None);
        }
    });
    passed.into_inner().unwrap().drain(..).for_each(free);
    let stats = yard.heap.stats();
    assert_eq!((stats.live, stats.blocks), (0, 0), "{stats:?}");
    yard.audit();
    yard.end();
}
