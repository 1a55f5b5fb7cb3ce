//! What a history lists is what happened, in an order that can be run again.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use granule::trace::TorchSnapshot;
use granule::units::{KIB, MIB};
use granule::{Arena, Heap, HeapConfig, History, HistoryConfig, HistoryKind, Pool, PoolConfig};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};

use super::read;
use crate::support::{On, Rig};

on_each_driver! {
    what_a_heap_did_reads_back
    recording_may_begin_and_end_at_any_time
    threads_list_frees_before_what_they_made_possible
    an_arena_lists_what_is_mapped
}

fn heap_on(rig: &Rig, budget: u64) -> Heap {
    let pool = Pool::new(&rig.device, PoolConfig::with_budget(budget)).unwrap();
    Heap::new(&pool, HeapConfig::default()).unwrap()
}

fn exported(heap: &Heap, history: &History) -> Vec<u8> {
    let mut snapshot = TorchSnapshot::new(0);
    snapshot.heap(&heap.snapshot());
    snapshot.history(&history.events());
    let mut file = Vec::new();
    snapshot.write(&mut file).unwrap();
    file
}

fn log(history: &History) -> Vec<u8> {
    let mut log = Vec::new();
    history.write_log(&mut log).unwrap();
    log
}

fn count(history: &History, kind: HistoryKind) -> usize {
    let events = history.events().events;
    events.iter().filter(|event| event.kind == kind).count()
}

fn what_a_heap_did_reads_back(on: On) {
    let rig = Rig::new(on);
    let heap = heap_on(&rig, 128 * MIB);
    let history = History::new(HistoryConfig::default());
    heap.set_history(Some(&history));
    let (a, b) = (
        rig.device.create_stream().unwrap(),
        rig.device.create_stream().unwrap(),
    );
    let weights = heap.alloc_named(3 * MIB + 5, "weights", &a).unwrap();
    for size in [1, 300, 16 * KIB, MIB, 300, 1, 5 * MIB] {
        drop(heap.alloc(size, &a).unwrap());
    }
    let shared = heap.alloc(2 * MIB, &a).unwrap();
    shared.record_use(&b).unwrap();
    drop(shared);
    assert_eq!(count(&history, HistoryKind::FreeRequested), 1);
    b.synchronize().unwrap();
    // A miss looks at what waits.
    let large = heap.alloc(20 * MIB, &a).unwrap();
    assert_eq!(count(&history, HistoryKind::Alloc), 10);
    assert_eq!(count(&history, HistoryKind::Free), 8);
    assert!(heap.alloc(500 * MIB, &a).is_err());
    let events = history.events();
    assert_eq!(events.lost, 0);
    assert!(
        events
            .events
            .iter()
            .map(|event| event.nth)
            .eq(0..events.events.len() as u64)
    );
    let short = &events.events.last().unwrap();
    assert!(matches!(short.kind, HistoryKind::OutOfMemory { .. }));
    assert_eq!(short.requested, 500 * MIB);
    let named = events
        .events
        .iter()
        .find(|event| event.name.is_some())
        .unwrap();
    assert_eq!(named.name.as_deref(), Some("weights"));
    assert_eq!((named.len, named.requested), (3 * MIB + 256, 3 * MIB + 5));

    for file in [log(&history), exported(&heap, &history)] {
        let traces = read(&file).unwrap();
        let trace = &traces[0];
        assert_eq!(trace.notes, Default::default());
        assert_eq!(trace.peak, 23 * MIB + 5);
        assert_eq!(trace.recorded_peak, Some(heap.stats().held_peak));
    }
    drop((weights, large));
    heap.trim();
    assert_eq!(
        count(&history, HistoryKind::Alloc),
        count(&history, HistoryKind::Free)
    );
    heap.audit().unwrap();
}

fn recording_may_begin_and_end_at_any_time(on: On) {
    let rig = Rig::new(on);
    let heap = heap_on(&rig, 128 * MIB);
    let stream = rig.device.create_stream().unwrap();
    let early: Vec<_> = (1..20)
        .map(|i| heap.alloc(i * 700, &stream).unwrap())
        .collect();
    // Kept in a magazine and beside the lock when recording begins.
    drop(heap.alloc(512, &stream).unwrap());
    drop(heap.alloc(MIB, &stream).unwrap());
    let history = History::new(HistoryConfig {
        events: 50,
        ..HistoryConfig::default()
    });
    heap.set_history(Some(&history));
    assert_eq!(count(&history, HistoryKind::Alloc), 19);
    for _ in 0..40 {
        drop(heap.alloc(512, &stream).unwrap());
        drop(heap.alloc(MIB, &stream).unwrap());
    }
    let events = history.events();
    assert_eq!(events.events.len(), 50);
    assert!(events.lost > 100);
    // The early ones are no longer in the list, and live.
    let live: u64 = early.iter().map(|block| block.len()).sum();
    let peak = read(&log(&history)).unwrap()[0].peak;
    assert!(
        peak >= live + MIB && peak < live + MIB + 200 * 256,
        "{peak} {live}"
    );
    let traces = read(&exported(&heap, &history)).unwrap();
    assert_eq!(traces[0].notes.initial, 19);
    heap.set_history(None);
    drop(early);
    drop(heap.alloc(512, &stream).unwrap());
    assert_eq!(history.events(), events);
    heap.audit().unwrap();
}

fn threads_list_frees_before_what_they_made_possible(on: On) {
    let rig = Rig::new(on);
    let heap = heap_on(&rig, 256 * MIB);
    let stream = rig.device.create_stream().unwrap();
    let history = History::new(HistoryConfig::default());
    // Recording begins while all four are at work, and each does 300 rounds after it.
    let recording = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (heap, stream, history, recording) = (&heap, &stream, &history, &recording);
            scope.spawn(move || {
                let (mut before, mut after) = (0u64, 0u64);
                while after < 300 {
                    if recording.load(Ordering::Acquire) {
                        after += 1;
                    } else {
                        before += 1;
                    }
                    let i = before + after;
                    let kept = heap.alloc(256 + 97 * (i % 40), stream).unwrap();
                    let large = heap.alloc(MIB + thread * 256, stream).unwrap();
                    drop(kept);
                    drop(large);
                    if thread == 0 && before == 100 && after == 0 {
                        heap.set_history(Some(history));
                        recording.store(true, Ordering::Release);
                    }
                }
            });
        }
    });
    // Strictly: no block is freed twice or allocated where another is.
    let traces = read(&log(&history)).unwrap();
    assert!(traces[0].peak <= 4 * (2 * MIB + 8 * KIB));
    let events = history.events().events;
    let ends = events
        .iter()
        .filter(|event| event.kind == HistoryKind::Free)
        .count();
    assert!(ends >= 4 * 300 * 2, "{ends}");
    heap.set_history(None);
    heap.audit().unwrap();
}

fn an_arena_lists_what_is_mapped(on: On) {
    let rig = Rig::new(on);
    let pool = Pool::new(
        &rig.device,
        PoolConfig::with_budget(64 * MIB).granule(2 * MIB),
    )
    .unwrap();
    let history = History::new(HistoryConfig::default());
    let mut arena = Arena::new(&pool, 64 * MIB).unwrap();
    arena.grow(3 * MIB).unwrap();
    arena.set_history(Some(&history));
    arena.grow(20 * MIB).unwrap();
    arena.shrink(9 * MIB).unwrap();
    let mut snapshot = TorchSnapshot::new(1);
    snapshot.arena(&arena);
    snapshot.history(&history.events());
    let mut file = Vec::new();
    snapshot.write(&mut file).unwrap();
    for file in [file, log(&history)] {
        let traces = read(&file).unwrap();
        let trace = &traces[0];
        assert_eq!(trace.notes, Default::default());
        assert!(trace.peak >= 20 * MIB && Some(trace.peak) == trace.recorded_peak);
    }
}

/// Collects the fields of events.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Collector {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        if event.metadata().target() == "granule::history" {
            let mut text = Fields(String::new());
            event.record(&mut text);
            self.0.lock().unwrap().push(text.0);
        }
    }
}

struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if matches!(field.name(), "message" | "requested" | "name") {
            self.0 += &format!("{value:?} ");
        }
    }
}

#[test]
fn the_same_events_are_traced() {
    let rig = Rig::new(On::Sim);
    let heap = heap_on(&rig, 64 * MIB);
    let stream = rig.device.create_stream().unwrap();
    let collector = Collector::default();
    let history = History::new(HistoryConfig {
        tracing: true,
        ..HistoryConfig::default()
    });
    tracing::subscriber::with_default(collector.clone(), || {
        heap.set_history(Some(&history));
        let block = heap.alloc_named(1000, "one", &stream).unwrap();
        drop(block);
    });
    heap.set_history(None);
    let said = collector.0.lock().unwrap().clone();
    let listed = history.events().events;
    assert_eq!(said.len(), listed.len());
    assert!(
        said.iter()
            .any(|text| text.contains("alloc") && text.contains("1000") && text.contains("one")),
        "{said:?}"
    );
    assert!(said.last().unwrap().contains("free"), "{said:?}");
}
