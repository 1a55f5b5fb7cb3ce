//! Whatever the bytes, reading ends with an error or with a trace that adds up, in bounded memory; and
//! what was read runs through a heap.
#![no_main]

use granule::driver::sim::SimConfig;
use granule::trace::{self, EventKind, ReadOptions, Trace};
use granule::units::GIB;
use granule::{Block, Device, Heap, HeapConfig, Pool, PoolConfig};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((first, rest)) = data.split_last() else {
        return;
    };
    let options = ReadOptions {
        events: 20_000,
        memory: 16 << 20,
        line: 256,
        lenient: first % 2 == 1,
    };
    let Ok(traces) = trace::read(rest, &options) else {
        return;
    };
    let events: usize = traces.iter().map(|trace| trace.events.len()).sum();
    assert!(events as u64 <= options.events);
    for trace in &traces {
        check(trace);
        let part = trace.first(trace.events.len() / 2);
        assert!(part.peak <= trace.peak);
        if trace.events.len() < 300 && trace.streams.len() < 4 {
            replay(trace);
        }
    }
});

/// Slots are taken and freed in turn, and the peak is the most that was live.
fn check(trace: &Trace) {
    let mut live = vec![None; trace.slots as usize];
    let (mut sum, mut peak) = (0u64, 0u64);
    for event in &trace.events {
        match event.kind {
            EventKind::Alloc {
                slot,
                bytes,
                stream,
            } => {
                assert!(usize::from(stream) < trace.streams.len());
                assert!(live[slot as usize].replace(bytes).is_none());
                sum += bytes;
                peak = peak.max(sum);
            }
            EventKind::Free { slot, stream } => {
                assert!(usize::from(stream) < trace.streams.len());
                sum -= live[slot as usize].take().expect("live");
            }
            _ => {}
        }
    }
    assert_eq!(peak, trace.peak);
}

fn replay(trace: &Trace) {
    let device = Device::sim(SimConfig::default()).expect("a device");
    let pool = Pool::new(&device, PoolConfig::with_budget(2 * GIB)).expect("a pool");
    let heap = Heap::new(&pool, HeapConfig::default()).expect("a heap");
    let stream = device.create_stream().expect("a stream");
    let mut blocks: Vec<Option<Block>> = Vec::new();
    blocks.resize_with(trace.slots as usize, || None);
    for event in &trace.events {
        match event.kind {
            EventKind::Alloc { slot, bytes, .. } => {
                blocks[slot as usize] = heap.alloc(bytes, &stream).ok()
            }
            EventKind::Free { slot, .. } => blocks[slot as usize] = None,
            _ => {}
        }
    }
    drop(blocks);
    let left = heap.audit().expect("sound books");
    assert_eq!(left.live, 0);
}
