//! Memory of graphs stays where it is, and nothing that a heap calls spoils a capture.

use std::time::Duration;

use granule::driver::{Call, DriverCode, Graph, Kernel};
use granule::units::MIB;
use granule::{Block, CaptureScope, Error, HeapConfig, PoolConfig};

use super::yard::Yard;
use crate::support::{On, eventually};

on_each_driver! {
    graphs_replay_over_freed_blocks_while_the_heap_remaps_around_them
    nothing_illegal_is_called_while_a_capture_is_under_way
    waits_for_a_captured_stream_are_refused_and_leave_it_whole
    a_block_that_is_kept_serves_a_graph_without_a_scope
    memory_is_zeroed_now_and_not_by_the_graph
    a_scope_is_made_while_its_stream_is_captured
    a_stream_that_is_first_met_under_capture_is_itself_afterwards
    a_scope_ends_and_its_live_blocks_stay
    a_scope_waits_for_replays_on_other_streams
    a_scope_that_ends_during_its_capture_gives_back_later
    a_heap_that_goes_during_a_capture_leaves_it_whole
    a_scope_runs_out_with_its_figures_in_the_error
    any_failure_in_a_scope_leaves_the_capture_whole
}

fn config() -> HeapConfig {
    HeapConfig {
        granule_max: 4 * MIB,
        granule_min: 2 * MIB,
        wait: Duration::ZERO,
        ..HeapConfig::default()
    }
}

/// A capture on a stream of a yard.
struct Capture<'a>(&'a Yard, usize);

impl<'a> Capture<'a> {
    fn begin(yard: &'a Yard, stream: usize) -> Self {
        // Code of kernels is loaded by the first launch, which is no work to capture.
        let id = yard.streams[stream].id();
        let spin = Kernel::Spin { nanos: 1_000 };
        yard.rig.inner.launch(spin, id).unwrap();
        yard.sync();
        yard.rig.inner.begin_capture(id).unwrap();
        Self(yard, stream)
    }

    #[track_caller]
    fn end(self) -> Graph {
        let id = self.0.streams[self.1].id();
        self.0.rig.inner.end_capture(id).unwrap()
    }
}

/// Replays a graph on a stream.
fn replay(yard: &Yard, graph: &Graph, stream: usize) {
    graph.launch(yard.streams[stream].id()).unwrap();
}

/// Captures blocks that come and go: each is written and checked by the graph. The last one is kept.
fn captured(yard: &Yard, scope: &CaptureScope, stream: usize) -> (Graph, Block) {
    let capture = Capture::begin(yard, stream);
    for (size, seed) in [(4 * MIB, 50), (6 * MIB, 51), (3000, 52), (2 * MIB, 53)] {
        let block = scope.alloc(size).unwrap();
        yard.write(&block, seed, stream);
        yard.check(&block, seed, stream);
    }
    let kept = scope.alloc(2 * MIB).unwrap();
    yard.write(&kept, 54, stream);
    (capture.end(), kept)
}

/// Moves granules and gives some back, on a stream; data checked.
fn churn(yard: &Yard, stream: usize, seed: u64) {
    let sizes = [2, 4, 6, 2, 8];
    let blocks: Vec<Block> = sizes
        .iter()
        .map(|n| yard.filled(n * MIB, stream, seed))
        .collect();
    let mut kept = Vec::new();
    for (i, block) in blocks.into_iter().enumerate() {
        yard.check(&block, seed, stream);
        if i % 2 == 0 {
            kept.push(block);
        }
    }
    let large = yard.filled(10 * MIB, stream, seed + 1);
    yard.check(&large, seed + 1, stream);
    kept.iter().for_each(|one| yard.check(one, seed, stream));
}

fn graphs_replay_over_freed_blocks_while_the_heap_remaps_around_them(on: On) {
    let yard = Yard::new(on, 64 * MIB, config(), 2);
    yard.filled(2 * MIB, 0, 1);
    let scope = yard.heap.capture_scope(&yard.streams[0]).unwrap();
    let (graph, kept) = captured(&yard, &scope, 0);
    let held = scope.stats().held;
    assert!(held >= 8 * MIB, "{held}");
    let rounds = if on == On::Cuda { 300 } else { 30 };
    for round in 0..rounds {
        replay(&yard, &graph, 0);
        churn(&yard, 1, 1000 + 10 * round);
        // Of the same stream, too: its ordinary memory is as movable as ever.
        churn(&yard, 0, 5000 + 10 * round);
        if round % 8 == 0 {
            yard.sync();
            yard.heap.trim();
            yard.pool.trim(0).unwrap();
            yard.audit();
        }
        yard.check(&kept, 54, 0);
    }
    let stats = yard.heap.stats();
    assert!(stats.remaps >= rounds, "{stats:?}");
    assert_eq!((scope.stats().held, stats.scoped), (held, held));
    assert_eq!(scope.stats().remaps, 0);
    let shown = yard.heap.snapshot();
    super::snapshot::check(&shown);
    assert_eq!(shown.streams.iter().filter(|s| s.is_scope).count(), 1);
    // Another capture of the scope uses the same memory.
    let again = captured(&yard, &scope, 0);
    assert_eq!(scope.stats().held, held.max(scope.stats().held_peak));
    replay(&yard, &again.0, 0);
    yard.check(&again.1, 54, 0);
    yard.sync();
    drop((kept, again, graph, scope));
    eventually(|| {
        yard.heap.trim();
        yard.heap.stats().held == 0
    })
    .unwrap();
    assert_eq!(yard.heap.stats().scoped, 0);
    yard.audit();
    yard.end();
}

fn nothing_illegal_is_called_while_a_capture_is_under_way(on: On) {
    let yard = Yard::new(on, 96 * MIB, config(), 3);
    let scope = yard.heap.capture_scope(&yard.streams[0]).unwrap();
    // Old mappings, limbo and idle memory of the captured stream, all before the capture.
    churn(&yard, 0, 1);
    churn(&yard, 1, 5);
    let shared = yard.filled(2 * MIB, 0, 9);
    yard.order(0, 2);
    yard.check(&shared, 9, 2);
    shared.record_use(&yard.streams[2]).unwrap();
    let other = yard.filled(2 * MIB, 1, 10);
    other.record_use(&yard.streams[0]).unwrap();
    let capture = Capture::begin(&yard, 0);
    let before = yard.rig.counts();
    let block = scope.alloc(4 * MIB).unwrap();
    yard.write(&block, 20, 0);
    drop((shared, other));
    let elsewhere = || {
        for round in 0..4 {
            churn(&yard, 1, 100 + 10 * round);
            yard.rig.inner.sync_stream(yard.streams[1].id()).unwrap();
            yard.heap.trim();
            yard.pool.trim(0).unwrap();
        }
        super::snapshot::check(&yard.heap.snapshot());
        yard.heap.audit().unwrap();
    };
    std::thread::scope(|threads| {
        threads.spawn(elsewhere);
    });
    // On the thread that captures, too; also blocks of the captured stream's ordinary memory.
    churn(&yard, 1, 200);
    let plain: Vec<_> = (1..6).map(|n| yard.alloc(n * 2 * MIB, 0)).collect();
    drop(plain);
    let mut all = Vec::new();
    while let Ok(block) = yard.heap.alloc(4 * MIB, &yard.streams[0]) {
        all.push(block);
    }
    drop(all);
    yard.heap.trim();
    let graph = capture.end();
    let calls = yard.rig.counts().since(&before);
    assert_eq!(calls.of(Call::SyncStream).calls, 0);
    replay(&yard, &graph, 0);
    yard.check(&block, 20, 0);
    yard.sync();
    drop((block, graph, scope));
    yard.audit();
    yard.end();
}

fn waits_for_a_captured_stream_are_refused_and_leave_it_whole(on: On) {
    let yard = Yard::new(on, 16 * MIB, config(), 2);
    let block = yard.filled(2 * MIB, 0, 1);
    let fence = yard.streams[1].fence().unwrap();
    let capture = Capture::begin(&yard, 0);
    let stream = &yard.streams[0];
    assert_eq!(stream.is_capturing(), Ok(true));
    let refused = Error::Capturing {
        stream: stream.key().0,
    };
    assert_eq!(stream.fence().map(drop), Err(refused.clone()));
    assert_eq!(stream.wait(&fence), Err(refused.clone()));
    assert_eq!(stream.synchronize(), Err(refused));
    assert_eq!(yard.streams[1].is_capturing(), Ok(false));
    yard.streams[1].synchronize().unwrap();
    yard.write(&block, 2, 0);
    let graph = capture.end();
    assert_eq!(stream.is_capturing(), Ok(false));
    stream.wait(&fence).unwrap();
    yard.check(&block, 1, 0);
    replay(&yard, &graph, 0);
    yard.check(&block, 2, 0);
    stream.synchronize().unwrap();
    drop((block, fence));
    yard.end();
}

fn a_block_that_is_kept_serves_a_graph_without_a_scope(on: On) {
    let yard = Yard::new(on, 48 * MIB, config(), 1);
    churn(&yard, 0, 1);
    let capture = Capture::begin(&yard, 0);
    let kept = yard.alloc(6 * MIB, 0);
    yard.write(&kept, 2, 0);
    yard.check(&kept, 2, 0);
    let graph = capture.end();
    for round in 0..10 {
        replay(&yard, &graph, 0);
        churn(&yard, 0, 100 + 10 * round);
        yard.check(&kept, 2, 0);
        yard.heap.trim();
    }
    yard.sync();
    drop((kept, graph));
    yard.end();
}

fn memory_is_zeroed_now_and_not_by_the_graph(on: On) {
    let mut yard = Yard::new(on, 16 * MIB, config(), 1);
    yard.pool = yard.rig.pool(PoolConfig {
        zero_on_handover: true,
        ..PoolConfig::with_budget(16 * MIB)
    });
    yard.pool.set_watermark(u64::MAX);
    yard.heap = granule::Heap::new(&yard.pool, config()).unwrap();
    // What the scope gets is another's old memory.
    drop(yard.filled(16 * MIB, 0, 1));
    yard.sync();
    eventually(|| {
        yard.heap.trim();
        yard.pool.stats().idle == 16 * MIB
    })
    .unwrap();
    let scope = yard.heap.capture_scope(&yard.streams[0]).unwrap();
    let capture = Capture::begin(&yard, 0);
    let block = scope.alloc(8 * MIB).unwrap();
    yard.rig.check_zero(block.range());
    let graph = capture.end();
    yard.write(&block, 3, 0);
    replay(&yard, &graph, 0);
    yard.check(&block, 3, 0);
    yard.sync();
    drop((block, graph, scope));
    yard.end();
}

/// Frameworks learn of a stream when the first tensor of a capture is allocated there.
fn a_scope_is_made_while_its_stream_is_captured(on: On) {
    let yard = Yard::new(on, 64 * MIB, config(), 2);
    let capture = Capture::begin(&yard, 0);
    // Of the captured stream, and of one that is not.
    let made = [0, 1].map(|stream| {
        let scope = yard.heap.capture_scope(&yard.streams[stream]).unwrap();
        let freed = scope.alloc(4 * MIB).unwrap();
        yard.write(&freed, 60, stream);
        yard.check(&freed, 60, stream);
        drop(freed);
        let kept = scope.alloc(6 * MIB).unwrap();
        yard.write(&kept, 61 + stream as u64, stream);
        (scope, kept)
    });
    let graph = capture.end();
    for round in 0..4 {
        replay(&yard, &graph, 0);
        for (stream, (_, kept)) in made.iter().enumerate() {
            yard.check(kept, 61 + stream as u64, stream);
            churn(&yard, stream, 2000 + 10 * round);
        }
    }
    yard.sync();
    drop((graph, made));
    eventually(|| {
        yard.heap.trim();
        yard.heap.stats().held == 0
    })
    .unwrap();
    yard.audit();
    yard.end();
}

/// As PyTorch's: made by somebody else, and nobody told us of it before the capture began.
fn a_stream_that_is_first_met_under_capture_is_itself_afterwards(on: On) {
    let yard = Yard::new(on, 64 * MIB, config(), 1);
    let driver = &yard.rig.inner;
    let device = &yard.rig.device;
    let spin = Kernel::Spin { nanos: 1_000 };
    let [known, unknown] = [(); 2].map(|()| {
        let id = driver.create_stream().unwrap();
        driver.launch(spin, id).unwrap();
        driver.sync_stream(id).unwrap();
        id
    });
    let before = device.foreign_stream(known).unwrap();
    let word = yard.words.of(9);
    for id in [known, unknown] {
        driver.begin_capture(id).unwrap();
        let stream = device.foreign_stream(id).unwrap();
        assert_eq!(stream == before, id == known);
        assert!(stream.is_capturing().unwrap());
        assert!(matches!(stream.fence(), Err(Error::Capturing { .. })));
        assert!(matches!(stream.retire(), Err(Error::Capturing { .. })));
        let again = device.foreign_stream(id).unwrap();
        assert_eq!((again.key(), again), (stream.key(), stream.clone()));
        let scope = yard.heap.capture_scope(&stream).unwrap();
        let freed = scope.alloc(4 * MIB).unwrap();
        super::yard::write(&yard.rig, freed.range(), 70, &stream);
        super::yard::check(&yard.rig, freed.range(), 70, &stream, word);
        drop(freed);
        let kept = scope.alloc(6 * MIB).unwrap();
        super::yard::write(&yard.rig, kept.range(), 71, &stream);
        let graph = driver.end_capture(id).unwrap();
        // The driver names it now, and it is the same.
        let key = stream.key();
        let after = device.foreign_stream(id).unwrap();
        assert_eq!((after.key(), &after), (key, &stream));
        assert!(!stream.is_capturing().unwrap());
        for round in 0..3 {
            graph.launch(id).unwrap();
            super::yard::check(&yard.rig, kept.range(), 71, &stream, word);
            churn(&yard, 0, 3000 + 10 * round);
            let block = yard.heap.alloc(2 * MIB, &after).unwrap();
            super::yard::write(&yard.rig, block.range(), 72, &after);
        }
        drop((graph, kept, scope));
        stream.retire().unwrap();
        assert!(after.is_retired());
        driver.destroy_stream(id).unwrap();
        drop((stream, after));
        eventually(|| {
            yard.heap.trim();
            yard.heap.stats().held == 0
        })
        .unwrap();
    }
    drop(before);
    yard.audit();
    yard.end();
}

fn a_scope_ends_and_its_live_blocks_stay(on: On) {
    let yard = Yard::new(on, 32 * MIB, config(), 2);
    let scope = yard.heap.capture_scope(&yard.streams[0]).unwrap();
    let (graph, kept) = captured(&yard, &scope, 0);
    replay(&yard, &graph, 0);
    yard.sync();
    let place = kept.range();
    drop((scope, graph));
    let stats = yard.heap.stats();
    assert_eq!((stats.scoped, stats.live), (0, 2 * MIB));
    for round in 0..4 {
        churn(&yard, 1, 10 * round);
        yard.heap.trim();
    }
    assert_eq!(kept.range(), place);
    yard.check(&kept, 54, 0);
    yard.sync();
    // The addresses go with the last block.
    let reserved = yard.rig.device.reserved_addresses();
    drop(kept);
    eventually(|| {
        yard.heap.trim();
        yard.rig.device.reserved_addresses() < reserved
    })
    .unwrap();
    yard.audit();
    yard.end();
}

fn a_scope_waits_for_replays_on_other_streams(on: On) {
    let yard = Yard::new(on, 32 * MIB, config(), 2);
    let scope = yard.heap.capture_scope(&yard.streams[0]).unwrap();
    let (graph, kept) = captured(&yard, &scope, 0);
    scope.record_replay(&yard.streams[1]).unwrap();
    let hold = yard.streams[1].hold().unwrap();
    replay(&yard, &graph, 1);
    drop((kept, scope));
    yard.heap.trim();
    let held = yard.heap.stats().held;
    assert!(held > 0);
    // It is not for others, either.
    yard.pool.trim(0).unwrap();
    assert_eq!(yard.heap.stats().held, held);
    drop(hold);
    yard.sync();
    yard.heap.trim();
    assert_eq!(yard.heap.stats().held, 0);
    drop(graph);
    yard.end();
}

fn a_scope_that_ends_during_its_capture_gives_back_later(on: On) {
    let yard = Yard::new(on, 32 * MIB, config(), 2);
    let capture = Capture::begin(&yard, 0);
    let scope = yard.heap.capture_scope(&yard.streams[0]).unwrap();
    drop(scope.alloc(4 * MIB).unwrap());
    drop(scope);
    yard.heap.trim();
    assert!(yard.heap.stats().held >= 4 * MIB);
    drop(capture.end());
    eventually(|| {
        yard.heap.trim();
        yard.heap.stats().held == 0
    })
    .unwrap();
    yard.end();
}

fn a_heap_that_goes_during_a_capture_leaves_it_whole(on: On) {
    let mut yard = Yard::new(on, 32 * MIB, config(), 2);
    let block = yard.filled(4 * MIB, 1, 7);
    let capture = Capture::begin(&yard, 0);
    let other = granule::Heap::new(&yard.pool, config()).unwrap();
    let scope = other.capture_scope(&yard.streams[0]).unwrap();
    let (one, two) = (
        scope.alloc(MIB).unwrap(),
        other.alloc(MIB, &yard.streams[0]),
    );
    yard.write(&block, 8, 0);
    drop((one, two, scope, other));
    // Their memory waits for the stream.
    assert!(yard.rig.device.quarantined() > 0);
    let graph = capture.end();
    assert_eq!(yard.rig.device.sweep(), 0);
    yard.order(1, 0);
    replay(&yard, &graph, 0);
    yard.check(&block, 8, 0);
    yard.sync();
    drop((block, graph));
    yard.heap = granule::Heap::new(&yard.pool, config()).unwrap();
    yard.end();
}

fn a_scope_runs_out_with_its_figures_in_the_error(on: On) {
    let yard = Yard::new(on, 16 * MIB, config(), 2);
    let live = yard.filled(4 * MIB, 1, 1);
    let scope = yard.heap.capture_scope(&yard.streams[0]).unwrap();
    let capture = Capture::begin(&yard, 0);
    let block = scope.alloc(8 * MIB).unwrap();
    drop(block);
    let error = scope.alloc(14 * MIB).unwrap_err();
    let Error::OutOfMemory(why) = &error else {
        panic!("{error}");
    };
    let heap = why.heap.unwrap();
    assert_eq!((heap.scoped, heap.held), (8 * MIB, 12 * MIB));
    assert_eq!(heap.largest_free, 8 * MIB);
    assert!(
        error.to_string().contains("8 MiB of it for graphs"),
        "{error}"
    );
    // Nor can anybody else have it.
    let error = yard.heap.alloc(6 * MIB, &yard.streams[1]).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    drop(capture.end());
    drop(scope);
    eventually(|| yard.heap.alloc(6 * MIB, &yard.streams[1]).is_ok()).unwrap();
    yard.check(&live, 1, 1);
    drop(live);
    yard.end();
}

fn any_failure_in_a_scope_leaves_the_capture_whole(on: On) {
    for nth in 1..12 {
        for code in [DriverCode::UNKNOWN, DriverCode::OUT_OF_MEMORY] {
            let yard = Yard::new(on, 32 * MIB, config(), 2);
            churn(&yard, 0, 1);
            let scope = yard.heap.capture_scope(&yard.streams[0]).unwrap();
            let capture = Capture::begin(&yard, 0);
            yard.rig.fault.fail_nth_overall(nth, code);
            let blocks: Vec<_> = [6 * MIB, 100, 2 * MIB]
                .iter()
                .filter_map(|size| scope.alloc(*size).ok())
                .collect();
            yard.audit();
            blocks.iter().for_each(|one| yard.write(one, 5, 0));
            let graph = capture.end();
            yard.rig.fault.clear();
            replay(&yard, &graph, 0);
            blocks.iter().for_each(|one| yard.check(one, 5, 0));
            yard.sync();
            drop((blocks, graph, scope));
            yard.audit();
            yard.end();
        }
    }
}
