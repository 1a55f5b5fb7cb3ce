//! How a heap ends: with the last of its blocks, wherever that is.

use std::sync::Barrier;

use granule::units::{KIB, MIB};
use granule::{Block, Heap, HeapConfig, HeapStats, History, HistoryConfig, Stream};

use super::yard::Yard;
use crate::support::On;

on_each_driver! {
    threads_free_the_last_blocks_while_their_heap_ends
    a_block_of_no_bytes_keeps_its_stream
    an_owner_who_gives_up_the_last_block_gives_up_the_memory
    a_heap_after_another_counts_its_own
    a_history_hears_of_blocks_that_outlive_their_heap
}

/// Enough for a device that took it long ago to be done.
const TURNS: u64 = 20;

fn yard(on: On) -> Yard {
    Yard::new(on, 256 * MIB, HeapConfig::default(), 2)
}

/// Drops the heap of a yard, which has another from then on.
fn end_heap(yard: &mut Yard) {
    yard.heap = Heap::new(&yard.pool, HeapConfig::default()).unwrap();
}

/// Blocks of every kind: of no bytes, kept by length, handed on, from the books, named, used elsewhere.
fn some_of_each(heap: &Heap, streams: &[Stream]) -> Vec<Block> {
    let alloc = |size| heap.alloc(size, &streams[0]).unwrap();
    let mut blocks: Vec<Block> = [0, 512, 64 * KIB, 512, 2 * MIB, 4 * MIB, 4 * KIB]
        .map(alloc)
        .into();
    let named = heap.alloc_named(4 * KIB, "one", &streams[0]);
    blocks.push(named.unwrap());
    let used = alloc(MIB);
    used.record_use(&streams[1]).unwrap();
    blocks.push(used);
    // What magazines and lists keep is nobody's.
    drop([alloc(512), alloc(3 * MIB)]);
    blocks
}

fn threads_free_the_last_blocks_while_their_heap_ends(on: On) {
    let mut yard = yard(on);
    for turn in 0..TURNS {
        let barrier = Barrier::new(4);
        let heap = yard.heap.clone();
        end_heap(&mut yard);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                let (heap, streams, barrier) = (heap.clone(), &yard.streams, &barrier);
                scope.spawn(move || {
                    let blocks = some_of_each(&heap, streams);
                    drop(heap);
                    barrier.wait();
                    blocks.into_iter().for_each(drop);
                });
            }
            barrier.wait();
            (0..turn).for_each(|_| std::thread::yield_now());
            drop(heap);
        });
        assert_eq!(yard.pool.stats().mapped, 0, "turn {turn}");
    }
    yard.audit();
    yard.end();
}

fn a_block_of_no_bytes_keeps_its_stream(on: On) {
    let mut yard = yard(on);
    let nothing = yard.alloc(0, 1);
    let block = yard.alloc(MIB, 0);
    end_heap(&mut yard);
    drop(block);
    let other = yard.alloc(MIB, 0);
    assert!(nothing.stream().unwrap() == yard.streams[1]);
    assert!(other.stream().unwrap() == yard.streams[0]);
    assert_eq!(nothing.into_raw().get(), 0);
    drop(other);
    yard.audit();
    yard.end();
}

fn an_owner_who_gives_up_the_last_block_gives_up_the_memory(on: On) {
    let mut yard = yard(on);
    let blocks = [yard.alloc(512, 0), yard.alloc(4 * MIB, 0)];
    end_heap(&mut yard);
    let mut raw = Vec::new();
    for block in blocks {
        assert!(yard.pool.stats().mapped >= 4 * MIB);
        raw.push(block.into_raw());
    }
    assert_eq!(yard.pool.stats().mapped, 0);
    assert!(yard.heap.free_raw(raw[0]).is_err());
    yard.end();
}

/// What stays for the next heap says nothing of the last one.
fn a_heap_after_another_counts_its_own(on: On) {
    let mut yard = yard(on);
    for _ in 0..TURNS {
        let blocks = some_of_each(&yard.heap, &yard.streams);
        // The next heap's blocks are handed on without the lock again, although these were not.
        let history = History::new(HistoryConfig::default());
        yard.heap.set_history(Some(&history));
        drop(blocks);
        assert!(yard.heap.stats().allocs > 8);
        end_heap(&mut yard);
        assert_eq!(yard.heap.stats(), HeapStats::default());
        for _ in 0..10 {
            drop(yard.alloc(512, 0));
        }
        let stats = yard.heap.stats();
        assert_eq!((stats.allocs, stats.misses, stats.live), (10, 1, 0));
        yard.audit();
        end_heap(&mut yard);
    }
    yard.end();
}

fn a_history_hears_of_blocks_that_outlive_their_heap(on: On) {
    let mut yard = yard(on);
    let history = History::new(HistoryConfig::default());
    yard.heap.set_history(Some(&history));
    let blocks = [yard.alloc(512, 0), yard.alloc(4 * MIB, 0)];
    end_heap(&mut yard);
    let before = history.events().events.len();
    drop(blocks);
    assert!(history.events().events.len() >= before + 2);
    yard.end();
}
