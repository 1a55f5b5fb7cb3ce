//! The page: what was live, mapped and reserved over time, and the address space at any moment.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use granule::trace::{Event, EventKind, Trace};
use granule::units::{MIB, round_down};
use granule::{Heap, HeapSnapshot, Pool};

use crate::args::Args;
use crate::core::{Outcome, Rig, Watch, run};
use crate::json::{Object, list, quote};
use crate::report::{Report, time_kind};

/// Points of a curve.
const POINTS: u64 = 1500;
/// Moments at which the address space is kept.
const MOMENTS: u64 = 160;
/// Cells of its picture at most.
const CELLS: u64 = 4096;
/// The finest cell.
const PAGE: u64 = 2 * MIB;
/// Addresses that nothing was ever mapped in are left out of the picture from this many pages on.
const GAP: u64 = 512;

const TEMPLATE: &str = include_str!("page.html");

/// Everything that the page shows of one trace.
pub struct Page {
    name: String,
    data: String,
}

/// One point of the curves: the most within its events.
#[derive(Clone, Copy, Default)]
struct Point {
    event: u64,
    time_us: u64,
    live: u64,
    mapped: u64,
    reserved: u64,
    recorded: Option<u64>,
}

/// The address space at one moment.
struct Moment {
    event: u64,
    /// By page: bytes that are live.
    pages: BTreeMap<u64, u64>,
    live: u64,
    held: u64,
    blocks: u64,
    external: f64,
}

struct Watcher {
    per_point: u64,
    per_moment: u64,
    now: Point,
    points: Vec<Point>,
    moments: Vec<Moment>,
    /// The most that was live so far, and whether a moment is due for it.
    peak: u64,
    peak_at: u64,
}

impl Watch for Watcher {
    fn after(&mut self, nth: u64, event: &Event, live: u64, heap: &Heap, pool: &Pool) -> Outcome {
        let stats = pool.stats();
        let now = &mut self.now;
        if let EventKind::Reserved { bytes } = event.kind {
            now.recorded = now.recorded.max(Some(bytes));
        }
        now.live = now.live.max(live);
        now.mapped = now.mapped.max(stats.mapped);
        now.reserved = now.reserved.max(stats.created);
        if (nth + 1).is_multiple_of(self.per_point) {
            let (event, time_us) = (nth, event.time_us);
            self.points.push(Point {
                event,
                time_us,
                ..*now
            });
            let recorded = now.recorded;
            *now = Point {
                live,
                mapped: stats.mapped,
                reserved: stats.created,
                recorded,
                ..Point::default()
            };
        }
        if nth == self.peak_at || (nth + 1).is_multiple_of(self.per_moment) {
            self.moments.push(Moment::of(nth, &heap.snapshot()));
        }
        self.peak = self.peak.max(live);
        Ok(())
    }
}

impl Moment {
    fn of(event: u64, snapshot: &HeapSnapshot) -> Self {
        let mut pages = BTreeMap::new();
        for stream in &snapshot.streams {
            for granule in &stream.granules {
                let (at, len) = (granule.span.addr.get(), granule.span.len);
                for page in at / PAGE..(at + len).div_ceil(PAGE) {
                    pages.entry(page).or_insert(0);
                }
            }
            for block in &stream.blocks {
                let (mut at, end) = (
                    block.span.addr.get(),
                    block.span.addr.get() + block.span.len,
                );
                while at < end {
                    let next = end.min(round_down(at, PAGE) + PAGE);
                    *pages.entry(at / PAGE).or_insert(0) += next - at;
                    at = next;
                }
            }
        }
        let stats = &snapshot.stats;
        Self {
            event,
            pages,
            live: stats.live,
            held: stats.held,
            blocks: stats.blocks,
            external: stats.external(),
        }
    }

    /// The picture: `.` for nothing mapped, `0` to `9` for tenths that are live, each with how many cells
    /// in a row are like it.
    fn picture(&self, strips: &[(u64, u64)], cell: u64) -> String {
        let (mut out, mut last, mut count) = (String::new(), ' ', 0u64);
        let mut put = |symbol: char| {
            if symbol == last {
                count += 1;
                return;
            }
            if count > 0 {
                let _ = write!(
                    out,
                    "{last}{}",
                    if count > 1 {
                        count.to_string()
                    } else {
                        String::new()
                    } + ";"
                );
            }
            (last, count) = (symbol, 1);
        };
        for (start, end) in strips {
            let mut at = *start;
            while at < *end {
                let pages = self.pages.range(at..at + cell);
                let (mapped, live) = pages.fold((0, 0), |sum, (_, live)| (sum.0 + 1, sum.1 + live));
                let tenths = (live * 9).div_ceil((mapped * PAGE).max(1));
                put(match mapped {
                    0 => '.',
                    _ => char::from(b'0' + tenths.min(9) as u8),
                });
                at += cell;
            }
        }
        put(' ');
        out
    }
}

/// Stretches of pages that something was mapped in at some moment.
fn strips(moments: &[Moment]) -> Vec<(u64, u64)> {
    let mut pages: Vec<u64> = moments
        .iter()
        .flat_map(|moment| moment.pages.keys().copied())
        .collect();
    pages.sort_unstable();
    pages.dedup();
    let mut strips: Vec<(u64, u64)> = Vec::new();
    for page in pages {
        match strips.last_mut() {
            Some((_, end)) if page < *end + GAP => *end = page + 1,
            _ => strips.push((page, page + 1)),
        }
    }
    strips
}

impl Page {
    /// Runs the trace once more and looks on.
    pub fn record(args: &Args, rig: &Rig, report: &Report, trace: &Trace) -> Outcome<Self> {
        let events = trace.events.len() as u64;
        let mut watcher = Watcher {
            per_point: events.div_ceil(POINTS).max(1),
            per_moment: events.div_ceil(MOMENTS).max(1),
            now: Point::default(),
            points: Vec::new(),
            moments: Vec::new(),
            peak: 0,
            peak_at: peak_at(trace),
        };
        let seen = run(rig, trace, &args.setup, report.budget, &mut watcher)?;
        if let Some(last) = trace.events.last()
            && seen.oom.is_none()
            && !events.is_multiple_of(watcher.per_point)
        {
            let (event, time_us) = (events - 1, last.time_us);
            watcher.points.push(Point {
                event,
                time_us,
                ..watcher.now
            });
        }
        Ok(Self {
            name: report.name.clone(),
            data: data(rig, report, &watcher),
        })
    }
}

/// The event after which most is live.
fn peak_at(trace: &Trace) -> u64 {
    let mut sizes = vec![0; trace.slots as usize];
    let (mut live, mut peak, mut at) = (0u64, 0, 0);
    for (nth, event) in (0..).zip(&trace.events) {
        match event.kind {
            EventKind::Alloc { slot, bytes, .. } => {
                sizes[slot as usize] = bytes;
                live += bytes;
                if live > peak {
                    (peak, at) = (live, nth);
                }
            }
            EventKind::Free { slot, .. } => live -= sizes[slot as usize],
            _ => {}
        }
    }
    at
}

fn data(rig: &Rig, report: &Report, watcher: &Watcher) -> String {
    let strips = strips(&watcher.moments);
    let pages: u64 = strips.iter().map(|(start, end)| end - start).sum();
    let cell = pages.div_ceil(CELLS).max(1).next_power_of_two();
    let strips: Vec<(u64, u64)> = strips
        .iter()
        .map(|(start, end)| (start / cell * cell, end.div_ceil(cell) * cell))
        .collect();
    let points = &watcher.points;
    let column = |of: fn(&Point) -> u64| list(points.iter().map(of));
    let recorded = points
        .iter()
        .any(|point| point.recorded.is_some())
        .then(|| column(|point| point.recorded.unwrap_or(0)));
    let moments = watcher.moments.iter().map(|moment| {
        Object::new()
            .raw("event", moment.event)
            .raw("live", moment.live)
            .raw("held", moment.held)
            .raw("blocks", moment.blocks)
            .float("external", moment.external, 4)
            .text("cells", &moment.picture(&strips, cell))
            .end()
    });
    let shortages = report.avoided.iter().map(|one| {
        Object::new()
            .raw("event", one.event)
            .raw("requested", one.requested)
            .raw("reserved", one.reserved)
            .raw("capacity", one.capacity)
            .raw("avoided", one.had)
            .end()
    });
    let run = &report.run;
    Object::new()
        .text("name", &report.name)
        .text("device", &rig.device.info().to_string())
        .text("driver", &rig.device.kind().to_string())
        .text("clock", time_kind(rig.device.kind()))
        .raw("events", report.trace.events)
        .raw("streams", report.trace.streams)
        .raw("initial", report.trace.notes.initial)
        .raw("peak", report.trace.peak)
        .raw("reserved_peak", run.reserved)
        .maybe("recorded_peak", report.trace.recorded_peak)
        .maybe("budget", report.budget)
        .maybe("least", report.least.as_ref().map(|l| l.0))
        .float("driver_ms", run.driver.as_secs_f64() * 1e3, 3)
        .raw("creates", run.stats.creates)
        .raw("remaps", run.stats.remaps)
        .raw("misses", run.stats.misses)
        .raw("allocs", run.stats.allocs)
        .maybe("oom_event", run.oom.as_ref().map(|oom| oom.event))
        .maybe("oom_text", run.oom.as_ref().map(|oom| quote(&oom.error)))
        .raw("shortages_recorded", report.trace.shortages)
        .raw("shortages", list(shortages))
        .raw("event", column(|point| point.event))
        .raw("time_us", column(|point| point.time_us))
        .raw("live", column(|point| point.live))
        .raw("mapped", column(|point| point.mapped))
        .raw("reserved", column(|point| point.reserved))
        .maybe("recorded", recorded)
        .raw("cell_bytes", cell * PAGE)
        .raw(
            "strips",
            list(
                strips
                    .iter()
                    .map(|(start, end)| list([start * PAGE, (end - start) / cell])),
            ),
        )
        .raw("moments", list(moments))
        .end()
}

/// Writes one page of all.
pub fn write(path: &Path, pages: &[Page]) -> Outcome {
    let names: Vec<&str> = pages.iter().map(|page| page.name.as_str()).collect();
    let title = match names.as_slice() {
        [one] => format!("granule replay: {one}"),
        all => format!("granule replay: {} traces", all.len()),
    };
    let title = title.replace('&', "&amp;").replace('<', "&lt;");
    let data = list(pages.iter().map(|page| &page.data));
    let page = TEMPLATE.replace("__TITLE__", &title);
    fs::write(path, page.replacen("__DATA__", &data, 1))?;
    Ok(())
}
