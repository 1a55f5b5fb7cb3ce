//! Names and snapshots: what they show is what is there.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use granule::units::{KIB, MIB, VaRange};
use granule::{BlockState, Error, HeapConfig, HeapSnapshot, Span, StreamSnapshot};

use super::yard::Yard;
use crate::support::On;

on_each_driver! {
    a_snapshot_lists_every_block_run_and_granule_once
    a_name_goes_with_its_block
    figures_count_hits_and_what_is_free
    snapshots_fit_while_threads_go_on
}

fn range(span: Span) -> VaRange {
    VaRange::new(span.addr, span.len).unwrap()
}

fn sum<'a>(spans: impl IntoIterator<Item = &'a Span>) -> u64 {
    spans.into_iter().map(|span| span.len).sum()
}

#[track_caller]
fn check_stream(one: &StreamSnapshot) {
    assert!(one.stats.is_consistent(), "{:?}", one.stats);
    let granules: Vec<Span> = one.granules.iter().map(|g| g.span).collect();
    let blocks: Vec<Span> = one.blocks.iter().map(|b| b.span).collect();
    assert_eq!(sum(&granules), one.stats.held);
    assert_eq!(granules.len() as u64, one.stats.granules);
    assert_eq!(sum(&blocks), one.stats.live);
    assert_eq!(blocks.len() as u64, one.stats.blocks);
    assert_eq!(sum(&one.free) + one.claimed, one.stats.free);
    let longest = one.free.iter().map(|span| span.len).max().unwrap_or(0);
    assert_eq!(longest, one.stats.largest_free);
    let waiting = one.blocks.iter().filter(|b| b.state == BlockState::Limbo);
    assert_eq!(waiting.map(|b| b.span.len).sum::<u64>(), one.stats.limbo);
    assert_eq!(one.aliases.len() as u64, one.stats.aliases);
    // Those that an operation has in hand have none.
    let names: Vec<_> = one.granules.iter().filter_map(|g| g.phys).collect();
    let distinct: HashSet<_> = names.iter().collect();
    assert_eq!(distinct.len(), names.len());

    let mut used: Vec<Span> = blocks.iter().chain(&one.free).copied().collect();
    used.sort_by_key(|span| span.addr);
    for lists in [&granules, &used, &one.aliases] {
        let apart = |pair: &[Span]| range(pair[0]).end() <= pair[1].addr;
        assert!(lists.windows(2).all(apart), "{one}");
        let inside = |span: &Span| range(one.range).contains(range(*span));
        assert!(lists.iter().all(inside), "{one}");
    }
    // Everything that is used lies on granules.
    for span in &used {
        let behind = granules.iter().map(|g| {
            let end = range(*g).end().min(range(*span).end());
            end.get().saturating_sub(g.addr.max(span.addr).get())
        });
        assert_eq!(behind.sum::<u64>(), span.len, "{one}");
    }
}

/// What a snapshot says fits together, and its table a terminal.
#[track_caller]
pub fn check(snapshot: &HeapSnapshot) {
    snapshot.streams.iter().for_each(check_stream);
    let text = snapshot.to_string();
    let too_long = text.lines().find(|line| line.chars().count() > 80);
    assert_eq!(too_long, None, "{text}");
    let by_name: u64 = snapshot.by_name().iter().map(|(_, bytes)| bytes).sum();
    let live: u64 = snapshot.streams.iter().map(|s| s.stats.live).sum();
    assert_eq!(by_name, live);
}

fn a_snapshot_lists_every_block_run_and_granule_once(on: On) {
    let yard = Yard::new(on, 256 * MIB, HeapConfig::default(), 2);
    assert!(yard.heap.snapshot().streams.is_empty());
    let on = yard.heap.on(&yard.streams[0]).unwrap();
    let weights = on.alloc_named(10 * MIB + 1, "weights").unwrap();
    let middle = yard.alloc(8 * MIB, 0);
    let bias = on.alloc_named(1000, Arc::<str>::from("bias")).unwrap();
    let other = yard.filled(6 * MIB, 1, 1);
    yard.order(0, 1);
    let hold = yard.streams[1].hold().unwrap();
    let shared = on.alloc_named(4 * MIB, String::from("shared")).unwrap();
    shared.free_on(&yard.streams[1]).unwrap();
    drop(middle);
    let snapshot = yard.heap.snapshot();
    check(&snapshot);
    assert_eq!(snapshot.stats, yard.heap.stats());
    let [first, second] = &snapshot.streams[..] else {
        panic!("{snapshot}");
    };
    assert_eq!(first.stream, yard.streams[0].key());
    let shown = first.blocks.iter().map(|block| {
        let name = block.name.as_deref().unwrap_or("");
        (name, block.requested, block.span.len, block.state)
    });
    let shown: Vec<_> = shown.collect();
    let live = BlockState::Live;
    // Small blocks lie below the large ones.
    assert_eq!(
        shown,
        [
            ("bias", Some(1000), KIB, live),
            ("weights", Some(10 * MIB + 1), 10 * MIB + 256, live),
            ("shared", Some(4 * MIB), 4 * MIB, BlockState::Limbo),
        ]
    );
    assert_eq!(first.blocks[1].span.addr, weights.ptr());
    let [block] = &second.blocks[..] else {
        panic!("{second}");
    };
    assert_eq!((block.span.addr, block.span.len), (other.ptr(), 6 * MIB));
    assert_eq!((block.requested, &block.name), (None, &None));
    let text = snapshot.to_string();
    for part in ["weights", "bias", "shared", "limbo", "free", "external"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(snapshot.by_name()[0].0.as_deref(), Some("weights"));
    drop(hold);
    drop((weights, bias, other, on));
    // A moved granule leaves an alias; many blocks are cut short.
    let many: Vec<_> = (0..100).map(|_| yard.alloc(MIB / 2, 0)).collect();
    let large = yard.filled(150 * MIB, 0, 2);
    check(&yard.heap.snapshot());
    assert!(yard.heap.snapshot().to_string().contains("shorter ones"));
    drop((many, large));
    yard.audit();
    yard.end();
}

fn a_name_goes_with_its_block(on: On) {
    let yard = Yard::new(on, 64 * MIB, HeapConfig::default(), 2);
    for size in [512, 3 * MIB] {
        let named = yard.heap.alloc_named(size, "a", &yard.streams[0]).unwrap();
        assert_eq!(named.name().as_deref(), Some("a"));
        assert_eq!(
            (named.len(), yard.heap.usable_size(named.ptr()).unwrap()),
            (size, size)
        );
        named.set_name(String::from("b")).unwrap();
        assert_eq!(named.name().unwrap().to_string(), "b");
        let at = named.ptr();
        drop(named);
        // Whoever comes next has no name.
        let next = yard.alloc(size, 0);
        assert_eq!((next.ptr(), next.name()), (at, None));
        next.set_name("c").unwrap();
        let raw = next.into_raw();
        yard.heap.free_raw(raw).unwrap();
        let again = yard.heap.free_raw(raw);
        assert!(matches!(again, Err(Error::Stale { .. })), "{again:?}");
        let next = yard.alloc(size, 0);
        assert_eq!((next.ptr(), next.name()), (at, None));
        // Through limbo, with and without an end to the other stream's work.
        next.set_name("d").unwrap();
        next.record_use(&yard.streams[1]).unwrap();
        drop(next);
        yard.sync();
        let all = yard.filled(50 * MIB, 0, 1);
        drop(all);
        let next = yard.alloc(size, 0);
        assert_eq!(next.name(), None);
    }
    let long = "a name\nof two lines, longer than any table of eighty columns is wide ".repeat(3);
    let long = yard.heap.alloc_named(MIB, long, &yard.streams[0]).unwrap();
    check(&yard.heap.snapshot());
    drop(long);
    let none = yard.heap.alloc_named(0, "none", &yard.streams[0]).unwrap();
    none.set_name("still none").unwrap();
    assert_eq!((none.name(), none.len()), (None, 0));
    assert!(
        yard.heap
            .alloc_named(u64::MAX, "x", &yard.streams[0])
            .is_err()
    );
    // A name does not make an owned block one that may be freed by its address.
    for size in [512, MIB] {
        let owned = yard.heap.alloc_named(size, "x", &yard.streams[0]).unwrap();
        let freed = yard.heap.free_raw(owned.ptr());
        assert!(matches!(freed, Err(Error::Stale { .. })), "{freed:?}");
        owned.set_name("y").unwrap();
        assert_eq!(owned.name().as_deref(), Some("y"));
        let raw = owned.into_raw();
        assert_eq!(yard.heap.snapshot().by_name()[0].0.as_deref(), Some("y"));
        yard.heap.free_raw(raw).unwrap();
        assert_eq!(yard.heap.stats().blocks, 0);
        yard.audit();
    }
    drop(none);
    check(&yard.heap.snapshot());
    yard.audit();
    yard.end();
}

fn figures_count_hits_and_what_is_free(on: On) {
    let yard = Yard::new(on, 64 * MIB, HeapConfig::default(), 1);
    let blocks: Vec<_> = (0..4).map(|_| yard.alloc(4 * MIB, 0)).collect();
    let stats = yard.heap.stats();
    assert!(stats.is_consistent() && stats.misses > 0, "{stats:?}");
    let mut kept = blocks;
    kept.remove(2);
    kept.remove(0);
    let stats = yard.heap.stats();
    assert_eq!((stats.live, stats.free), (8 * MIB, stats.held - 8 * MIB));
    assert!(
        (4 * MIB..stats.free).contains(&stats.largest_free),
        "{stats:?}"
    );
    let external = 1.0 - stats.largest_free as f64 / stats.free as f64;
    assert!((stats.external() - external).abs() < 1e-9 && external > 0.0);
    assert!(stats.waste() > 0.0 && stats.waste() < 1.0);
    let hits = stats.hits;
    drop(yard.alloc(4 * MIB, 0));
    drop(yard.alloc(4 * MIB, 0));
    let stats = yard.heap.stats();
    assert_eq!(
        (stats.hits, stats.allocs),
        (hits + 2, stats.hits + stats.misses)
    );
    drop(kept);
    let stats = yard.heap.stats();
    assert_eq!((stats.live, stats.free), (0, stats.held));
    assert!(stats.is_consistent(), "{stats:?}");
    assert_eq!(granule::HeapStats::default().external().to_bits(), 0);
    yard.audit();
    yard.end();
}

fn snapshots_fit_while_threads_go_on(on: On) {
    let config = HeapConfig {
        granule_max: 8 * MIB,
        granule_min: 2 * MIB,
        ..HeapConfig::default()
    };
    let yard = Yard::new(on, 96 * MIB, config, 2);
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        let work = |thread: u64| {
            let mut live = Vec::new();
            for round in 0..300 {
                // Half of them of sizes that threads hand on without the lane's lock.
                let most = [6 * MIB, KIB][(round / 2 % 2) as usize];
                let size = 1 + granule::driver::pattern_word(thread, round) % most;
                let stream = &yard.streams[(round % 2) as usize];
                let block = match round % 3 {
                    0 => yard.heap.alloc_named(size, "named", stream),
                    _ => yard.heap.alloc(size, stream),
                };
                live.extend(block);
                if round % 5 == 0 {
                    live.iter().for_each(|b| b.record_use(stream).unwrap());
                }
                while live.len() > 5 {
                    live.swap_remove(round as usize % live.len());
                }
            }
        };
        let threads = [1, 2].map(|thread| s.spawn(move || work(thread)));
        let looks = s.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                check(&yard.heap.snapshot());
                let stats = yard.heap.stats();
                assert!(stats.is_consistent(), "{stats:?}");
            }
        });
        let ends = threads.map(|thread| thread.join());
        over.store(true, Ordering::Relaxed);
        looks.join().unwrap();
        ends.into_iter().for_each(|end| end.unwrap());
    });
    check(&yard.heap.snapshot());
    yard.audit();
    yard.end();
}
