//! Streams that somebody else makes and destroys.

use std::time::Duration;

use granule::driver::StreamId;
use granule::units::MIB;
use granule::{Error, HeapConfig, Stream};

use super::yard::{Yard, check, write};
use crate::support::{On, eventually};

on_each_driver! {
    memory_of_a_destroyed_stream_comes_back_after_its_work
    a_handle_that_is_used_again_is_another_stream
    a_retired_stream_is_a_typed_error
    many_streams_come_and_go_without_using_up_addresses
    blocks_outlive_their_stream
}

fn yard(on: On) -> Yard {
    let config = HeapConfig {
        granule_max: 4 * MIB,
        granule_min: 2 * MIB,
        wait: Duration::ZERO,
        ..HeapConfig::default()
    };
    Yard::new(on, 32 * MIB, config, 2)
}

fn memory_of_a_destroyed_stream_comes_back_after_its_work(on: On) {
    let yard = yard(on);
    let before = yard.rig.device.reserved_addresses();
    let (id, stream) = yard.adopt();
    let block = yard.heap.alloc(32 * MIB, &stream).unwrap();
    // The owner's work is behind a hold on another stream, since holding a stream that is destroyed may wait.
    let hold = yard.streams[1].hold().unwrap();
    stream.wait(&yard.streams[1].fence().unwrap()).unwrap();
    write(&yard.rig, block.range(), 1, &stream);
    drop(block);
    stream.retire().unwrap();
    yard.rig.inner.destroy_stream(id).unwrap();
    yard.heap.trim();
    assert_eq!(yard.heap.stats().held, 32 * MIB);
    // Another stream may have it behind that work at once.
    let taken = yard.filled(16 * MIB, 0, 2);
    yard.check(&taken, 2, 0);
    drop(hold);
    yard.sync();
    eventually(|| {
        yard.heap.trim();
        yard.heap.stats().held == 16 * MIB
    })
    .unwrap();
    drop(taken);
    yard.sync();
    yard.heap.trim();
    // Its addresses too, though the handle is still there.
    let own = yard.heap.snapshot().streams.len();
    assert_eq!(own, 1);
    assert!(yard.rig.device.reserved_addresses() > before);
    yard.audit();
    drop(stream);
    yard.end();
}

fn a_handle_that_is_used_again_is_another_stream(on: On) {
    let yard = yard(on);
    let mut old: Vec<Stream> = Vec::new();
    for round in 0..8 {
        let (id, stream) = yard.adopt();
        assert!(!old.contains(&stream));
        let block = yard.heap.alloc(12 * MIB, &stream).unwrap();
        write(&yard.rig, block.range(), round, &stream);
        check(
            &yard.rig,
            block.range(),
            round,
            &stream,
            yard.words.of(round as usize),
        );
        drop(block);
        stream.retire().unwrap();
        yard.rig.inner.destroy_stream(id).unwrap();
        old.push(stream);
    }
    yard.audit();
    drop(old);
    // What they did is over before it is looked at.
    eventually(|| {
        yard.heap.trim();
        yard.heap.stats().held == 0
    })
    .unwrap();
    yard.end();
}

fn a_retired_stream_is_a_typed_error(on: On) {
    let yard = yard(on);
    let (id, stream) = yard.adopt();
    let theirs = yard.heap.on(&stream).unwrap();
    let block = theirs.alloc(2 * MIB).unwrap();
    let small = theirs.alloc(512).unwrap();
    drop(small);
    let fence = yard.streams[0].fence().unwrap();
    stream.retire().unwrap();
    stream.retire().unwrap();
    assert!(stream.is_retired());
    let stale = Error::Stale {
        what: "stream",
        value: stream.key().0,
    };
    let before = yard.heap.stats();
    let results = [
        yard.heap.alloc(512, &stream).map(drop),
        yard.heap.alloc(4 * MIB, &stream).map(drop),
        yard.heap.alloc_named(4 * MIB, "name", &stream).map(drop),
        theirs.alloc(512).map(drop),
        theirs.alloc(2 * MIB).map(drop),
        yard.heap.capture_scope(&stream).map(drop),
        stream.wait(&fence),
        stream.synchronize(),
        stream.is_capturing().map(drop),
    ];
    for result in results {
        assert_eq!(result, Err(stale.clone()));
    }
    assert_eq!(yard.heap.stats(), before);
    // Its end can still be waited for.
    yard.streams[0].wait(&stream.fence().unwrap()).unwrap();
    let other = yard.filled(2 * MIB, 0, 1);
    other.record_use(&stream).unwrap();
    drop(other);
    assert!(yard.streams[0].retire().is_ok());
    let main = yard.rig.device.default_stream().unwrap();
    assert!(matches!(main.retire(), Err(Error::InvalidConfig { .. })));
    assert!(matches!(
        yard.rig.device.foreign_stream(StreamId(1 << 40)),
        Err(Error::Stale { what: "stream", .. })
    ));
    yard.rig.inner.destroy_stream(id).unwrap();
    drop((block, fence, theirs, stream));
    yard.audit();
    yard.end();
}

fn many_streams_come_and_go_without_using_up_addresses(on: On) {
    let yard = yard(on);
    let mut most = 0;
    let mut handles = Vec::new();
    for round in 0..40 {
        let (id, stream) = yard.adopt();
        drop(yard.heap.alloc(4 * MIB, &stream).unwrap());
        stream.retire().unwrap();
        yard.rig.inner.destroy_stream(id).unwrap();
        // Somebody keeps the handles.
        handles.push(stream);
        if round == 8 {
            most = yard.rig.device.reserved_addresses();
        }
    }
    assert!(yard.rig.device.reserved_addresses() <= most);
    drop(handles);
    yard.end();
}

fn blocks_outlive_their_stream(on: On) {
    let yard = yard(on);
    let (id, stream) = yard.adopt();
    let block = yard.heap.alloc(4 * MIB, &stream).unwrap();
    write(&yard.rig, block.range(), 5, &stream);
    yard.streams[0].wait(&stream.fence().unwrap()).unwrap();
    stream.retire().unwrap();
    yard.rig.inner.destroy_stream(id).unwrap();
    drop(stream);
    yard.check(&block, 5, 0);
    block.free_on(&yard.streams[0]).unwrap();
    yard.sync();
    eventually(|| {
        yard.heap.trim();
        yard.heap.stats().held == 0
    })
    .unwrap();
    assert!(yard.heap.snapshot().streams.is_empty());
    yard.end();
}
