//! What the reserved memory over the requests is, where it matters: at the peak of the requests, and at the
//! allocation that a budget just too small refuses.

use std::collections::BTreeMap;

use granule::trace::{Event, Trace};
use granule::units::MIB;
use granule::{Heap, HeapSnapshot, Pool, StreamSnapshot};

use crate::core::{self, Outcome, Rig, Setup, Watch};

/// Keeps what the heap held when the requests were at their peak, or at the last event.
struct Look {
    /// Bytes of requests to look at; the last event if it is never reached.
    at: u64,
    found: Option<(u64, u64, HeapSnapshot)>,
    /// The event to look at, instead.
    event: Option<u64>,
}

impl Watch for Look {
    fn after(&mut self, nth: u64, _: &Event, live: u64, heap: &Heap, _: &Pool) -> Outcome {
        let here = match self.event {
            Some(event) => event == nth,
            None => live == self.at,
        };
        if here && self.found.is_none() {
            self.found = Some((nth, live, heap.snapshot()));
        }
        Ok(())
    }
}

/// Prints the two tables.
pub fn explain(
    rig: &Rig,
    name: &str,
    trace: &Trace,
    setup: &Setup,
    budget: Option<u64>,
) -> Outcome {
    let mut look = Look {
        at: trace.peak,
        found: None,
        event: None,
    };
    let run = core::run(rig, trace, setup, budget, &mut look)?;
    if let Some((nth, live, snapshot)) = &look.found {
        println!("{name}, at the peak of requests, event {nth}");
        table(*live, snapshot);
    }
    if run.oom.is_some() {
        return Ok(());
    }
    let (least, _) = core::least_budget(rig, trace, setup, &run, |_, _| {})?;
    let under = least.saturating_sub((trace.peak / 1000).max(2 * MIB));
    let refused = core::run(rig, trace, setup, Some(under), &mut core::Unwatched)?;
    let Some(oom) = refused.oom else {
        return Ok(());
    };
    let mut look = Look {
        at: 0,
        found: None,
        event: Some(oom.event.saturating_sub(1)),
    };
    core::run(rig, trace, setup, Some(under), &mut look)?;
    if let Some((_, live, snapshot)) = &look.found {
        println!(
            "{name}, under a budget of {:.1} MiB, before event {} asks for {:.1} MiB in vain",
            mib(under),
            oom.event,
            mib(oom.requested)
        );
        table(*live, snapshot);
    }
    Ok(())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB as f64
}

fn table(live: u64, snapshot: &HeapSnapshot) {
    let held: u64 = snapshot.streams.iter().map(|s| s.stats.held).sum();
    let taken: u64 = snapshot
        .streams
        .iter()
        .flat_map(|s| &s.blocks)
        .map(|b| b.span.len)
        .sum();
    println!(
        "  reserved {:.1} MiB, requested {:.1}: over by {:.1} ({:.4})",
        mib(held),
        mib(live),
        mib(held.saturating_sub(live)),
        held as f64 / live.max(1) as f64
    );
    println!(
        "  rounding, limbo and magazines {:.2}",
        mib(taken.saturating_sub(live))
    );
    for stream in &snapshot.streams {
        println!(
            "  stream {:?}: free {:.1} of {:.1}",
            stream.stream,
            mib(stream.stats.free),
            mib(stream.stats.held)
        );
        rows(stream);
    }
}

/// One line for each class of granules, and one for each class of free runs.
fn rows(stream: &StreamSnapshot) {
    let mut classes: BTreeMap<u64, [u64; 4]> = BTreeMap::new();
    let mut runs: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    let start = |g: &granule::GranuleSnapshot| g.span.addr.get();
    let mut free = vec![0; stream.granules.len()];
    for run in &stream.free {
        let (from, end) = (run.addr.get(), run.addr.get() + run.len);
        let first = stream
            .granules
            .partition_point(|g| start(g) + g.span.len <= from);
        for (i, g) in stream.granules.iter().enumerate().skip(first) {
            if start(g) >= end {
                break;
            }
            free[i] += end.min(start(g) + g.span.len) - from.max(start(g));
        }
        let class = runs.entry(run.len.next_power_of_two()).or_default();
        *class = (class.0 + 1, class.1 + run.len);
    }
    for (g, free) in stream.granules.iter().zip(free) {
        let len = g.span.len;
        let class = classes.entry(len.next_power_of_two()).or_default();
        let (whole, part) = if free == len { (free, 0) } else { (0, free) };
        *class = [
            class[0] + 1,
            class[1] + len,
            class[2] + whole,
            class[3] + part,
        ];
    }
    for (class, [count, bytes, whole, part]) in classes {
        println!(
            "    granules up to {:4} MiB: {count:4} of {:8.1} MiB, wholly free {:7.1}, free beside a block {:7.1}",
            class / MIB,
            mib(bytes),
            mib(whole),
            mib(part)
        );
    }
    for (class, (count, bytes)) in runs.into_iter().filter(|(_, r)| mib(r.1) >= 0.5) {
        println!(
            "    free runs up to {:8.2} MiB: {count:4} of {:8.1} MiB",
            mib(class),
            mib(bytes)
        );
    }
}
