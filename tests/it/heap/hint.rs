//! What a thread remembers of the lanes that it used last is never taken for another lane.

use std::sync::atomic::{AtomicBool, Ordering::*};

use granule::units::{KIB, MIB};
use granule::{DEFAULT_ALIGN, Error, Heap, HeapConfig, Rounding};

use super::yard::Yard;
use crate::support::On;

on_each_driver! {
    an_address_of_a_heap_that_ended_is_refused_by_the_next
    two_heaps_on_a_stream_know_their_own_blocks
    a_stream_that_a_thread_used_is_refused_once_it_is_retired
    streams_are_retired_under_threads_that_allocate_there
    a_scope_is_not_taken_for_its_streams_own_side
}

const SIZES: [u64; 4] = [512, 64 * KIB, 80 * KIB, 3 * MIB];

fn yard(on: On) -> Yard {
    Yard::new(on, 256 * MIB, HeapConfig::default(), 2)
}

fn is_stale<T>(result: granule::Result<T>) -> bool {
    matches!(result, Err(Error::Stale { .. }))
}

fn an_address_of_a_heap_that_ended_is_refused_by_the_next(on: On) {
    let mut yard = yard(on);
    for _ in 0..20 {
        let stream = &yard.streams[0];
        let old = SIZES.map(|size| yard.heap.alloc_raw(size, DEFAULT_ALIGN, stream).unwrap());
        yard.heap.free_raw(old[1]).unwrap();
        // The same stream's side comes back with nothing in it.
        yard.heap = Heap::new(&yard.pool, HeapConfig::default()).unwrap();
        let other = yard.alloc(512, 1);
        assert!(old.iter().all(|at| is_stale(yard.heap.free_raw(*at))));
        let new = SIZES.map(|size| yard.heap.alloc_raw(size, DEFAULT_ALIGN, stream).unwrap());
        let stats = yard.heap.stats();
        assert_eq!((stats.allocs, stats.blocks), (5, 5));
        for at in new {
            yard.heap.free_raw(at).unwrap();
            assert!(is_stale(yard.heap.free_raw(at)));
        }
        drop(other);
        yard.audit();
    }
    yard.end();
}

fn two_heaps_on_a_stream_know_their_own_blocks(on: On) {
    let yard = yard(on);
    let second = Heap::new(&yard.pool, HeapConfig::default()).unwrap();
    let stream = &yard.streams[0];
    for size in SIZES.into_iter().cycle().take(40) {
        let blocks = [&yard.heap, &second].map(|heap| heap.alloc(size, stream).unwrap());
        let raw =
            [&yard.heap, &second].map(|heap| heap.alloc_raw(size, DEFAULT_ALIGN, stream).unwrap());
        assert!(is_stale(yard.heap.free_raw(raw[1])) && is_stale(second.free_raw(raw[0])));
        // These have an owner.
        assert!(is_stale(yard.heap.free_raw(blocks[0].ptr())));
        for heap in [&yard.heap, &second] {
            assert_eq!(heap.stats().blocks, 2);
        }
        yard.heap.free_raw(raw[0]).unwrap();
        second.free_raw(raw[1]).unwrap();
    }
    for heap in [&yard.heap, &second] {
        assert_eq!(heap.audit().unwrap().blocks, 0);
    }
    drop(second);
    yard.end();
}

fn a_stream_that_a_thread_used_is_refused_once_it_is_retired(on: On) {
    let yard = yard(on);
    let (id, stream) = yard.adopt();
    let on_stream = yard.heap.on(&stream).unwrap();
    let alloc_raw = || yard.heap.alloc_raw(512, DEFAULT_ALIGN, &stream);
    drop([512, 512].map(|size| yard.heap.alloc(size, &stream).unwrap()));
    let raw = [alloc_raw().unwrap(), alloc_raw().unwrap()];
    yard.heap.free_raw(raw[0]).unwrap();
    stream.retire().unwrap();
    assert!(is_stale(yard.heap.alloc(512, &stream)) && is_stale(on_stream.alloc(512)));
    assert!(is_stale(alloc_raw()) && is_stale(on_stream.alloc_raw(512, DEFAULT_ALIGN)));
    yard.rig.inner.destroy_stream(id).unwrap();
    // What it had outlives it.
    yard.heap.free_raw(raw[1]).unwrap();
    assert!(is_stale(yard.heap.free_raw(raw[1])));
    drop(on_stream);
    let (id, next) = yard.adopt();
    drop(yard.heap.alloc(512, &next).unwrap());
    assert!(is_stale(yard.heap.alloc(512, &stream)) && is_stale(alloc_raw()));
    drop(stream);
    next.retire().unwrap();
    yard.rig.inner.destroy_stream(id).unwrap();
    drop(next);
    yard.audit();
    yard.end();
}

/// A thread that freed an address of a scope was there last.
fn a_scope_is_not_taken_for_its_streams_own_side(on: On) {
    let yard = yard(on);
    let stream = &yard.streams[0];
    drop(yard.alloc(512, 0));
    let scope = yard.heap.capture_scope(stream).unwrap();
    let blocks = [scope.alloc(512).unwrap(), scope.alloc(512).unwrap()];
    let places = blocks.each_ref().map(|block| block.ptr());
    let [kept, raw] = blocks;
    yard.heap.free_raw(raw.into_raw()).unwrap();
    drop(kept);
    let held: Vec<_> = (0..4).map(|_| yard.alloc(512, 0)).collect();
    let raw: Vec<_> = (0..4)
        .map(|_| yard.heap.alloc_raw(512, DEFAULT_ALIGN, stream).unwrap())
        .collect();
    let strays = held
        .iter()
        .map(|block| block.ptr())
        .chain(raw.iter().copied());
    assert_eq!(strays.filter(|at| places.contains(at)).count(), 0);
    raw.into_iter()
        .for_each(|at| yard.heap.free_raw(at).unwrap());
    drop((held, scope));
    yard.audit();
    yard.end();
}

/// A lane goes with its stream, and what it leaves serves the next one, while a thread is on its way in.
fn streams_are_retired_under_threads_that_allocate_there(on: On) {
    let yard = yard(on);
    for turn in 0..20 {
        let (id, stream) = yard.adopt();
        let (seen, done) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for raw in [false, true] {
                let (heap, stream, seen) = (&yard.heap, &stream, &seen);
                scope.spawn(move || {
                    let mut held = Vec::new();
                    loop {
                        let made = match raw {
                            false => heap.alloc(512, stream),
                            // The owner of an address is whoever remembers it.
                            true => match heap.alloc_raw(512, DEFAULT_ALIGN, stream) {
                                Ok(addr) => {
                                    heap.free_raw(addr).unwrap();
                                    continue;
                                }
                                Err(error) => Err(error),
                            },
                        };
                        seen.store(true, Relaxed);
                        match made {
                            Ok(block) => held.push(block),
                            Err(error) => break assert!(is_stale::<()>(Err(error))),
                        }
                        held.truncate(2);
                    }
                });
            }
            // Others come and go, and take what a lane that went leaves.
            let others = scope.spawn(|| {
                while !done.load(Relaxed) {
                    let (id, other) = yard.adopt();
                    drop(SIZES.map(|size| yard.heap.alloc(size, &other).unwrap()));
                    other.retire().unwrap();
                    yard.rig.inner.destroy_stream(id).unwrap();
                }
            });
            while !seen.load(Relaxed) {
                std::thread::yield_now();
            }
            (0..turn).for_each(|_| std::thread::yield_now());
            stream.retire().unwrap();
            done.store(true, Relaxed);
            others.join().unwrap();
        });
        drop(stream);
        yard.rig.inner.destroy_stream(id).unwrap();
        yard.audit();
    }
    yard.end();
}

#[test]
fn a_stream_of_another_device_is_refused_however_often_it_was_used_there() {
    let yards = [yard(On::Sim), yard(On::Sim)];
    let [one, two] = yards.each_ref().map(|yard| &yard.streams[0]);
    for _ in 0..3 {
        for yard in &yards {
            drop(yard.alloc(512, 0));
        }
        assert!(matches!(
            yards[0].heap.alloc(512, two),
            Err(Error::Foreign { .. })
        ));
        let raw = yards[1].heap.alloc_raw(512, DEFAULT_ALIGN, one);
        assert!(matches!(raw, Err(Error::Foreign { .. })));
    }
    yards.into_iter().for_each(Yard::end);
}

/// Small sizes are rounded too, also where a block is at hand: never one that is shorter or longer.
#[test]
fn blocks_at_hand_are_as_long_as_rounding_says() {
    let roundings = [1, 2, 4, 8, 16].map(Rounding::Divisions);
    for rounding in [Rounding::Exact, Rounding::PowerOfTwo]
        .into_iter()
        .chain(roundings)
    {
        let config = HeapConfig {
            rounding,
            ..HeapConfig::default()
        };
        let yard = Yard::new(On::Sim, 64 * MIB, config, 1);
        let on = yard.heap.on(&yard.streams[0]).unwrap();
        // Two turns: in the second, blocks of all lengths that there are lie at hand.
        for _ in 0..2 {
            for size in (1..70 * KIB).step_by(37) {
                let usable = rounding.round(size).unwrap().next_multiple_of(256);
                for block in [yard.alloc(size, 0), on.alloc(size).unwrap()] {
                    assert_eq!(block.len(), size);
                    let found = yard.heap.usable_size(block.ptr()).unwrap();
                    assert_eq!(found, usable, "{rounding:?} of {size}");
                }
            }
        }
        drop(on);
        yard.audit();
        yard.end();
    }
}
