//! A heap that is out of memory: its callback, and what its error says.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use granule::driver::{Call, DriverCode};
use granule::units::{GIB, KIB, MIB};
use granule::{
    Arena, Block, Error, Heap, HeapConfig, HeapShortage, Limit, OomAnswer, OutOfMemory, Stream,
};

use super::yard::Yard;
use crate::support::{On, PATIENCE};

on_each_driver! {
    a_callback_is_told_how_much_and_which_try_and_frees_until_it_fits
    a_callback_uses_its_heap_and_is_not_called_from_itself
    a_callback_may_wait_for_a_thread_that_is_allocating
    callbacks_of_two_heaps_that_use_each_other_come_to_an_end
    threads_that_run_out_together_all_go_on
    a_callback_is_asked_a_bounded_number_of_times
    a_panic_in_a_callback_leaves_the_heap_as_it_was
    the_error_says_what_is_free_and_what_keeps_it
    the_error_says_which_limit_was_hit
    a_callback_helps_when_addresses_run_out
}

fn no_wait() -> HeapConfig {
    HeapConfig {
        wait: Duration::ZERO,
        ..HeapConfig::default()
    }
}

#[track_caller]
fn shortage(result: granule::Result<Block>) -> OutOfMemory {
    match result {
        Err(Error::OutOfMemory(shortage)) => *shortage,
        other => panic!("not out of memory: {other:?}"),
    }
}

#[track_caller]
fn heap_shortage(shortage: &OutOfMemory) -> HeapShortage {
    let heap = shortage.heap.unwrap();
    assert_eq!(heap.held, heap.live + heap.free, "{heap:?}");
    assert!(
        heap.idle <= heap.free && heap.largest_free <= heap.free,
        "{heap:?}"
    );
    assert!(
        heap.limbo <= heap.live && heap.pinning <= heap.live,
        "{heap:?}"
    );
    heap
}

/// A callback learned neither how much was needed nor which try it was, and was called too often.
fn a_callback_is_told_how_much_and_which_try_and_frees_until_it_fits(on: On) {
    let yard = Yard::new(on, 64 * MIB, no_wait(), 2);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let stock: Vec<_> = (0..3).map(|i| yard.filled(16 * MIB, 0, i)).collect();
    let stock = Arc::new(Mutex::new(stock));
    let (seen_too, stock_too) = (seen.clone(), stock.clone());
    yard.heap.set_oom_callback(move |event| {
        let name = event.name.map(ToString::to_string);
        let heap = heap_shortage(event.shortage().unwrap());
        let call = (
            event.requested,
            event.attempt,
            event.stream.key(),
            name,
            heap.live,
        );
        seen_too.lock().unwrap().push(call);
        let one = stock_too.lock().unwrap().pop();
        one.map_or(OomAnswer::Fail, |_| OomAnswer::Retry)
    });
    // What is there needs no call.
    drop(yard.filled(16 * MIB, 0, 9));
    assert!(seen.lock().unwrap().is_empty());

    let large = yard
        .heap
        .alloc_named(40 * MIB - 1, "large", &yard.streams[0]);
    let large = large.unwrap();
    yard.write(&large, 7, 0);
    let key = yard.streams[0].key();
    let name = Some("large".to_owned());
    let expected = [
        (40 * MIB - 1, 1, key, name.clone(), 48 * MIB),
        (40 * MIB - 1, 2, key, name, 32 * MIB),
    ];
    assert_eq!(*seen.lock().unwrap(), expected);
    assert_eq!(yard.heap.stats().failures, 0);

    seen.lock().unwrap().clear();
    let failed = shortage(yard.heap.alloc(64 * MIB, &yard.streams[0]));
    assert_eq!((failed.requested, failed.name.is_none()), (64 * MIB, true));
    let tries: Vec<u32> = seen.lock().unwrap().iter().map(|call| call.1).collect();
    assert_eq!(tries, [1, 2]);
    let stats = yard.heap.stats();
    assert_eq!((stats.failures, stats.blocks), (1, 1));
    // Requests that need no memory, or cannot be met, do not call it.
    drop(yard.alloc(0, 0));
    drop(yard.alloc(24 * MIB, 0));
    assert!(yard.heap.alloc(u64::MAX, &yard.streams[0]).is_err());
    assert_eq!(seen.lock().unwrap().len(), 2);
    yard.check(&large, 7, 0);
    drop((large, stock));
    yard.heap.clear_oom_callback();
    yard.audit();
    yard.end();
}

/// Everything that a callback may do, on the thread that called it.
fn a_callback_uses_its_heap_and_is_not_called_from_itself(on: On) {
    let yard = Yard::new(on, 64 * MIB, no_wait(), 2);
    let calls = Arc::new(AtomicU32::new(0));
    let all = Arc::new(Mutex::new(Some(yard.filled(60 * MIB, 0, 1))));
    let kept = Arc::new(Mutex::new(None));
    let (calls_too, all_too, kept_too) = (calls.clone(), all.clone(), kept.clone());
    yard.heap.set_oom_callback(move |event| {
        calls_too.fetch_add(1, Ordering::Relaxed);
        let (heap, stream) = (event.heap, event.stream);
        // From mapped memory, by a miss, and out of memory itself.
        let served = heap.alloc(2 * MIB, stream).unwrap();
        assert!(heap.alloc(62 * MIB, stream).is_err());
        assert!(heap.on(stream).unwrap().alloc(63 * MIB).is_err());
        drop(all_too.lock().unwrap().take());
        heap.trim();
        heap.pool().trim(0).unwrap();
        let _ = (heap.stats(), heap.snapshot(), heap.pool().stats());
        // It may even set another one.
        heap.set_oom_callback(|_| OomAnswer::Fail);
        *kept_too.lock().unwrap() = Some(served);
        OomAnswer::Retry
    });
    let large = yard.filled(50 * MIB, 0, 2);
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    assert!(kept.lock().unwrap().take().is_some());
    assert!(yard.heap.alloc(50 * MIB, &yard.streams[0]).is_err());
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    yard.check(&large, 2, 0);
    drop(large);
    yard.audit();
    yard.end();
}

/// A lock of the allocator was held while the callback waited for a lock whose owner was allocating.
fn a_callback_may_wait_for_a_thread_that_is_allocating(on: On) {
    let yard = Yard::new(on, 64 * MIB, no_wait(), 1);
    let large = yard.filled(48 * MIB, 0, 1);
    let interpreter = Arc::new(Mutex::new(Some(large)));
    let (tell_inside, inside) = channel();
    let (tell_over, over) = channel();
    let user = interpreter.clone();
    yard.heap.set_oom_callback(move |_| {
        tell_inside.send(()).unwrap();
        let freed = user.lock().unwrap().take();
        freed.map_or(OomAnswer::Fail, |_| OomAnswer::Retry)
    });
    let allocate = |heap: &Heap, stream: &Stream, bytes| heap.alloc(bytes, stream).unwrap();
    // This thread holds the lock, and allocates on the same stream while the callback waits for it.
    let guard = interpreter.lock().unwrap();
    let (heap, stream) = (yard.heap.clone(), yard.streams[0].clone());
    let tell = tell_over.clone();
    let first = std::thread::spawn(move || {
        let block = allocate(&heap, &stream, 40 * MIB);
        tell.send("first").unwrap();
        drop(block);
    });
    assert_eq!(inside.recv_timeout(PATIENCE), Ok(()), "no call");
    let (heap, stream) = (yard.heap.clone(), yard.streams[0].clone());
    let second = std::thread::spawn(move || {
        for bytes in [256, 4 * MIB, 256, 16 * KIB, 6 * MIB] {
            drop(allocate(&heap, &stream, bytes));
        }
        heap.trim();
        let _ = (heap.stats(), heap.snapshot());
        tell_over.send("second").unwrap();
    });
    assert_eq!(over.recv_timeout(PATIENCE), Ok("second"), "a deadlock");
    drop(guard);
    assert_eq!(over.recv_timeout(PATIENCE), Ok("first"), "a deadlock");
    first.join().unwrap();
    second.join().unwrap();
    yard.heap.clear_oom_callback();
    yard.audit();
    yard.end();
}

fn callbacks_of_two_heaps_that_use_each_other_come_to_an_end(on: On) {
    let yard = Yard::new(on, 16 * MIB, no_wait(), 1);
    let other = Heap::new(&yard.pool, no_wait()).unwrap();
    let calls = Arc::new(Mutex::new(Vec::new()));
    // Taken out at the end: heaps that hold each other would never go.
    let spill = |from: &Heap, name: &'static str| {
        let (to, calls) = (Arc::new(Mutex::new(Some(from.clone()))), calls.clone());
        let kept = to.clone();
        let callback = move |event: &granule::OomEvent<'_>| {
            calls.lock().unwrap().push(name);
            let heap = to.lock().unwrap().clone().unwrap();
            assert!(heap.alloc(event.requested, event.stream).is_err());
            OomAnswer::Fail
        };
        (kept, callback)
    };
    let (first, callback) = spill(&other, "first");
    yard.heap.set_oom_callback(callback);
    let (second, callback) = spill(&yard.heap, "second");
    other.set_oom_callback(callback);
    shortage(yard.heap.alloc(17 * MIB, &yard.streams[0]));
    assert_eq!(*calls.lock().unwrap(), ["first", "second"]);
    calls.lock().unwrap().clear();
    shortage(other.alloc(17 * MIB, &yard.streams[0]));
    assert_eq!(*calls.lock().unwrap(), ["second", "first"]);
    drop((first.lock().unwrap().take(), second.lock().unwrap().take()));
    drop(other);
    yard.audit();
    yard.end();
}

/// Each thread's callback frees what other threads have put into a common stock.
fn threads_that_run_out_together_all_go_on(on: On) {
    let yard = Yard::new(on, 64 * MIB, no_wait(), 3);
    let stock = Arc::new(Mutex::new(Vec::<Block>::new()));
    let calls = Arc::new(AtomicU32::new(0));
    let (user, count) = (stock.clone(), calls.clone());
    yard.heap.set_oom_callback(move |event| {
        count.fetch_add(1, Ordering::Relaxed);
        let one = user.lock().unwrap().pop();
        let answer = one.as_ref().map_or(OomAnswer::Fail, |_| OomAnswer::Retry);
        drop(one);
        assert!(event.attempt <= 16);
        answer
    });
    let got: usize = std::thread::scope(|s| {
        let work = |thread: usize| {
            let mut got = 0;
            for round in 0..60 {
                let size = (1 + (thread + round) as u64 % 7) * MIB;
                let stream = (thread + round) % yard.streams.len();
                if let Ok(block) = yard.heap.alloc(size, &yard.streams[stream]) {
                    yard.write(&block, round as u64, stream);
                    yard.check(&block, round as u64, stream);
                    stock.lock().unwrap().push(block);
                    got += 1;
                }
            }
            got
        };
        let threads = [0, 1, 2, 3].map(|thread| s.spawn(move || work(thread)));
        let ends = threads.map(|thread| thread.join());
        ends.into_iter().map(|end| end.unwrap()).sum()
    });
    assert!(got > 60, "{got}");
    assert!(calls.load(Ordering::Relaxed) > 0);
    stock.lock().unwrap().clear();
    yard.heap.clear_oom_callback();
    yard.audit();
    yard.end();
}

fn a_callback_is_asked_a_bounded_number_of_times(on: On) {
    for attempts in [0, 1, 3] {
        let config = HeapConfig {
            oom_attempts: attempts,
            ..no_wait()
        };
        let yard = Yard::new(on, 16 * MIB, config, 1);
        let calls = Arc::new(AtomicU32::new(0));
        let count = calls.clone();
        yard.heap.set_oom_callback(move |event| {
            assert_eq!(event.attempt, 1 + count.fetch_add(1, Ordering::Relaxed));
            OomAnswer::Retry
        });
        shortage(yard.heap.alloc(17 * MIB, &yard.streams[0]));
        assert_eq!(calls.load(Ordering::Relaxed), attempts);
        yard.heap.clear_oom_callback();
        shortage(yard.heap.alloc(17 * MIB, &yard.streams[0]));
        assert_eq!(calls.load(Ordering::Relaxed), attempts);
        let stats = yard.heap.stats();
        assert_eq!((stats.allocs, stats.misses, stats.failures), (2, 2, 2));
        yard.audit();
        yard.end();
    }
}

fn a_panic_in_a_callback_leaves_the_heap_as_it_was(on: On) {
    let yard = Yard::new(on, 16 * MIB, no_wait(), 1);
    let kept = yard.filled(8 * MIB, 0, 1);
    yard.heap
        .set_oom_callback(|_| std::panic::resume_unwind(Box::new("a callback's panic")));
    for failures in 1..3 {
        let alloc = || yard.heap.alloc(12 * MIB, &yard.streams[0]);
        assert!(catch_unwind(AssertUnwindSafe(alloc)).is_err());
        assert_eq!(yard.heap.stats().failures, failures);
        yard.audit();
    }
    drop(yard.filled(8 * MIB, 0, 2));
    yard.check(&kept, 1, 0);
    drop(kept);
    yard.end();
}

/// An error said "out of memory" with half of it free.
fn the_error_says_what_is_free_and_what_keeps_it(on: On) {
    let yard = Yard::new(on, 64 * MIB, no_wait(), 2);
    let arena = Arena::new(&yard.pool, 16 * MIB).unwrap();
    arena.grow(16 * MIB).unwrap();
    // Three quarters of a granule keep the rest of it.
    let mut small: Vec<_> = (0..4).map(|i| yard.filled(512 * KIB, 0, i)).collect();
    small.swap_remove(1);
    let large: Vec<_> = (0..2).map(|i| yard.filled(8 * MIB, 0, i)).collect();
    yard.order(0, 1);
    let hold = yard.streams[1].hold().unwrap();
    let limbo = yard.filled(4 * MIB, 0, 5);
    limbo.free_on(&yard.streams[1]).unwrap();
    drop(large);
    let before = yard.heap.stats();

    let name = String::from("gradients");
    let failed = yard.heap.alloc_named(65 * MIB, name, &yard.streams[0]);
    let text = failed.as_ref().unwrap_err().to_string();
    let failed = shortage(failed);
    let heap = heap_shortage(&failed);
    assert_eq!(failed.limit, Limit::Budget);
    assert_eq!(failed.requested, 65 * MIB);
    assert!(failed.missing >= 16 * MIB, "{failed:?}");
    assert_eq!(failed.name.as_deref(), Some("gradients"));
    let sums = (heap.held, heap.free, heap.live);
    assert_eq!(sums, (before.held, before.free, before.live));
    let others = (heap.limbo, heap.others, heap.limit);
    assert_eq!(others, (4 * MIB, 16 * MIB, None));
    assert_eq!(heap.live, 4 * MIB + 3 * 512 * KIB);
    let pinned = heap.free - heap.idle;
    assert!(
        pinned >= 512 * KIB && heap.pinning >= 3 * 512 * KIB,
        "{heap:?}"
    );
    assert!(
        heap.idle >= 14 * MIB && heap.largest_free >= 14 * MIB,
        "{heap:?}"
    );
    for part in [
        "requested 65 MiB for \"gradients\"",
        "limit hit: the pool's budget",
        "5.50 MiB live",
        "4 MiB of it waiting for other streams",
        "others hold 16 MiB",
    ] {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
    assert!(size_of::<Error>() <= 64);
    // Another stream has no run of its own, and sees the same sums.
    let other = heap_shortage(&shortage(yard.heap.alloc(65 * MIB, &yard.streams[1])));
    assert_eq!((other.largest_free, other.live), (0, heap.live));
    // What the device can be made to wait for is no obstacle; what is left are the small blocks.
    let heap = heap_shortage(&shortage(yard.heap.alloc(47 * MIB, &yard.streams[0])));
    assert_eq!((heap.limbo, heap.live), (0, 3 * 512 * KIB), "{heap:?}");
    assert_eq!(heap.pinning, heap.live);
    assert_eq!(heap.free - heap.idle, 512 * KIB);
    // An arena's error has no heap.
    let more = Arena::new(&yard.pool, GIB).unwrap();
    let Err(Error::OutOfMemory(of_arena)) = more.grow(GIB) else {
        panic!("an arena above the budget");
    };
    assert_eq!((of_arena.heap, of_arena.name.is_none()), (None, true));
    drop((hold, small, arena, more));
    yard.audit();
    yard.end();
}

fn the_error_says_which_limit_was_hit(on: On) {
    let config = HeapConfig {
        limit: Some(24 * MIB),
        ..no_wait()
    };
    let yard = Yard::new(on, 64 * MIB, config, 2);
    let kept = yard.filled(16 * MIB, 0, 1);
    for stream in 0..2 {
        let failed = shortage(yard.heap.alloc(12 * MIB, &yard.streams[stream]));
        let heap = heap_shortage(&failed);
        assert_eq!((failed.limit, heap.limit), (Limit::Heap, Some(24 * MIB)));
        assert_eq!((heap.held, heap.others), (16 * MIB, 0));
    }
    let free = Heap::new(&yard.pool, no_wait()).unwrap();
    let failed = shortage(free.alloc(56 * MIB, &yard.streams[0]));
    let heap = heap_shortage(&failed);
    assert_eq!((failed.limit, heap.others), (Limit::Budget, 16 * MIB));
    yard.rig
        .fault
        .fail_from(Call::Create, 1, DriverCode::OUT_OF_MEMORY);
    let failed = shortage(free.alloc(20 * MIB, &yard.streams[0]));
    heap_shortage(&failed);
    assert_eq!((failed.limit, failed.requested), (Limit::Device, 20 * MIB));
    assert_eq!(failed.driver.map(|e| e.call), Some(Call::Create));
    // A driver that runs out while it opens memory is a shortage, too, with all figures.
    yard.rig.fault.clear();
    yard.rig
        .fault
        .fail(Call::SetAccess, 1, DriverCode::OUT_OF_MEMORY);
    let calls = Arc::new(AtomicU32::new(0));
    let count = calls.clone();
    free.set_oom_callback(move |event| {
        let shortage = event.shortage().unwrap();
        assert_eq!(
            (shortage.limit, shortage.requested),
            (Limit::Device, 20 * MIB)
        );
        assert_eq!(heap_shortage(shortage).others, 16 * MIB);
        let error = event.error.driver_error().unwrap();
        assert_eq!(
            (error.call, error.is_out_of_memory()),
            (Call::SetAccess, true)
        );
        assert!(
            event.error.to_string().contains("driver call set_access"),
            "{}",
            event.error
        );
        count.fetch_add(1, Ordering::Relaxed);
        OomAnswer::Retry
    });
    drop(free.alloc(20 * MIB, &yard.streams[0]).unwrap());
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    drop((kept, free));
    yard.audit();
    yard.end();
}

fn a_callback_helps_when_addresses_run_out(on: On) {
    let config = HeapConfig {
        addresses: Some(32 * MIB),
        ..no_wait()
    };
    let yard = Yard::new(on, 256 * MIB, config, 1);
    let all = std::iter::from_fn(|| yard.heap.alloc(8 * MIB, &yard.streams[0]).ok());
    let all: Vec<_> = all.collect();
    let stock = Arc::new(Mutex::new(all));
    let user = stock.clone();
    yard.heap.set_oom_callback(move |event| {
        assert!(matches!(event.error, Error::AddressSpaceExhausted { .. }));
        let freed = user.lock().unwrap().pop();
        freed.map_or(OomAnswer::Fail, |_| OomAnswer::Retry)
    });
    drop(yard.filled(8 * MIB, 0, 1));
    assert_eq!(stock.lock().unwrap().len(), 3);
    stock.lock().unwrap().clear();
    yard.heap.clear_oom_callback();
    yard.audit();
    yard.end();
}
