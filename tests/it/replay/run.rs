//! Traces run on every driver, and what a block holds is its own.

use granule::driver::sim::SimConfig;
use granule::driver::{Call, DriverKind};
use granule::trace::{EventKind, ReadOptions};
use granule::units::MIB;
use granule::{Block, Device, Heap, HeapConfig, Pool, PoolConfig, Rounding};

use super::core::{Rig, Setup, Unwatched, least_budget, open, run};
use super::{SNAPSHOTS, data, read};
use crate::support::On;

on_each_driver! {
    every_snapshot_runs_and_no_word_changes
    the_least_budget_is_the_least
    a_budget_that_is_too_small_says_where_it_ends
    a_recorded_shortage_for_want_of_a_hole_is_served
    settings_reach_the_heap
}

fn rig(on: On) -> Rig {
    let kind = match on {
        On::Sim => DriverKind::Sim,
        On::Host => DriverKind::Host,
        On::Cuda => DriverKind::Cuda,
    };
    Rig::open(kind, None).unwrap()
}

fn every_snapshot_runs_and_no_word_changes(on: On) {
    let rig = rig(on);
    let setup = Setup {
        touch: true,
        ..Setup::default()
    };
    for name in SNAPSHOTS {
        for trace in read(&data(name)).unwrap() {
            let run = run(&rig, &trace, &setup, None, &mut Unwatched).unwrap();
            assert!(run.oom.is_none() && run.mismatches == 0, "{name}: {run:?}");
            assert_eq!(run.events, trace.events.len() as u64);
            assert!(
                run.reserved >= trace.peak && run.reserved <= trace.peak + 64 * MIB,
                "{name}"
            );
            assert_eq!(run.stats.hits + run.stats.misses, run.stats.allocs);
            assert_eq!(run.calls.of(Call::Copy).calls, 0);
        }
    }
}

fn the_least_budget_is_the_least(on: On) {
    let rig = rig(on);
    let traces = read(&data("snapshot_2_1.pickle")).unwrap();
    let (trace, setup) = (&traces[0], Setup::default());
    let enough = run(&rig, trace, &setup, None, &mut Unwatched).unwrap();
    let mut tried = Vec::new();
    let tell = |budget, fits| tried.push((budget, fits));
    let (least, best) = least_budget(&rig, trace, &setup, &enough, tell).unwrap();
    assert!(best.oom.is_none() && best.reserved <= least);
    assert!(least >= trace.peak && least <= enough.reserved);
    assert!(
        tried
            .iter()
            .all(|(budget, fits)| *fits == (*budget >= least))
    );
}

fn a_budget_that_is_too_small_says_where_it_ends(on: On) {
    let rig = rig(on);
    let traces = read(&data("snapshot_2_1.pickle")).unwrap();
    let trace = &traces[0];
    let budget = trace.peak / 4 / MIB * MIB;
    let run = run(&rig, trace, &Setup::default(), Some(budget), &mut Unwatched).unwrap();
    let oom = run.oom.unwrap();
    assert_eq!(oom.event, run.events);
    assert!(oom.live <= budget && oom.live + oom.requested + 32 * MIB > budget);
    assert!(run.reserved <= budget);
}

fn a_recorded_shortage_for_want_of_a_hole_is_served(on: On) {
    let rig = rig(on);
    let traces = read(&data("snapshot_oom.pickle")).unwrap();
    let setup = Setup {
        probe: true,
        ..Setup::default()
    };
    // What that process had: its segment and what the device had free.
    let capacity = Some(2688 * MIB);
    let run = run(&rig, &traces[0], &setup, capacity, &mut Unwatched).unwrap();
    assert!(run.oom.is_none());
    assert_eq!((run.probes, run.last_probe), ((1, 1), true));
}

fn settings_reach_the_heap(on: On) {
    let rig = rig(on);
    let traces = read(&data("snapshot_2_11.pickle")).unwrap();
    let setup = Setup {
        heap: HeapConfig {
            rounding: Rounding::PowerOfTwo,
            ..HeapConfig::default()
        },
        ..Setup::default()
    };
    let wide = run(&rig, &traces[0], &setup, None, &mut Unwatched).unwrap();
    let exact = run(&rig, &traces[0], &Setup::default(), None, &mut Unwatched).unwrap();
    assert!(wide.stats.live_peak > exact.stats.live_peak);
    // The shortage that was recorded is tried, and has memory here.
    let probing = Setup {
        probe: true,
        ..Setup::default()
    };
    let probed = run(&rig, &traces[0], &probing, None, &mut Unwatched).unwrap();
    assert_eq!((probed.probes, probed.last_probe), ((1, 1), true));
}

/// The measure of a job is its own peak, not that of a larger one before it in the process. This one reserved 1.044 times
/// what it asks for on an H200 when it was.
#[test]
fn a_recorded_job_after_a_larger_one_reserves_little() {
    let device = Device::sim(SimConfig::default()).unwrap();
    let pool = Pool::new(&device, PoolConfig::default()).unwrap();
    let heap = Heap::new(&pool, HeapConfig::default()).unwrap();
    let stream = device.create_stream().unwrap();
    let large: Vec<Block> = (0..26)
        .map(|_| heap.alloc(512 * MIB, &stream).unwrap())
        .collect();
    drop(large);
    stream.synchronize().unwrap();
    heap.trim();
    assert_eq!(heap.stats().held, 0);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/unet_steps.csv.gz");
    let trace = open(path.as_ref(), &ReadOptions::default())
        .unwrap()
        .remove(0);
    let mut live: Vec<Option<Block>> = Vec::new();
    let (mut most, mut misses) = (0, heap.stats().misses);
    for event in &trace.events {
        match event.kind {
            EventKind::Alloc { slot, bytes, .. } => {
                live.resize_with(live.len().max(slot as usize + 1), || None);
                live[slot as usize] = Some(heap.alloc(bytes, &stream).unwrap());
                let stats = heap.stats();
                if stats.misses != misses {
                    (most, misses) = (stats.held.max(most), stats.misses);
                }
            }
            EventKind::Free { slot, .. } => live[slot as usize] = None,
            _ => {}
        }
    }
    let ratio = most as f64 / trace.peak as f64;
    assert!((1.0..1.03).contains(&ratio), "{ratio}");
}
