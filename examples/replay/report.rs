//! What a replay came to: as an object a line, or as a table.

use std::fs::OpenOptions;
use std::io::Write as _;

use granule::driver::DriverKind;
use granule::trace::{EventKind, Notes, Trace};
use granule::units::Bytes;

use crate::args::Args;
use crate::core::{Outcome, Rig, Run};
use crate::json::{Object, list};

/// What is said of a trace itself.
pub struct Facts {
    pub device: u32,
    pub events: usize,
    pub streams: usize,
    pub peak: u64,
    pub recorded_peak: Option<u64>,
    pub shortages: u64,
    pub notes: Notes,
}

impl Facts {
    pub fn of(trace: &Trace) -> Self {
        let count = |what: fn(&EventKind) -> bool| {
            let found = trace.events.iter().filter(|event| what(&event.kind));
            found.count() as u64
        };
        Self {
            device: trace.device,
            events: trace.events.len(),
            streams: trace.streams.len(),
            peak: trace.peak,
            recorded_peak: trace.recorded_peak,
            shortages: count(|kind| matches!(kind, EventKind::OutOfMemory { .. })),
            notes: trace.notes,
        }
    }
}

/// A shortage of the recorded allocator, tried again.
pub struct Avoided {
    pub event: u64,
    pub time_us: u64,
    pub requested: u64,
    /// What that process could have: its reserved memory and what the device had free.
    pub capacity: u64,
    pub reserved: u64,
    /// Whether there was memory here.
    pub had: bool,
}

pub struct Report {
    pub name: String,
    pub trace: Facts,
    pub budget: Option<u64>,
    pub run: Run,
    /// The least budget, and the run under it.
    pub least: Option<(u64, Run)>,
    pub avoided: Vec<Avoided>,
}

impl Report {
    pub fn ratio(&self, bytes: u64) -> f64 {
        bytes as f64 / self.trace.peak.max(1) as f64
    }

    /// Appends the line to the file, or prints it.
    pub fn write_json(&self, args: &Args) -> Outcome {
        emit(args, &self.json(args.kind))
    }

    fn json(&self, kind: DriverKind) -> String {
        let (run, trace) = (&self.run, &self.trace);
        let calls = run.calls.iter();
        let calls = calls.fold(Object::new(), |all, (call, count)| {
            all.raw(call.name(), count.calls)
        });
        let oom = run.oom.as_ref().map(|oom| {
            Object::new()
                .raw("event", oom.event)
                .raw("time_us", oom.time_us)
                .raw("requested", oom.requested)
                .raw("live", oom.live)
                .text("error", &oom.error)
                .end()
        });
        let avoided = self.avoided.iter().map(|one| {
            Object::new()
                .raw("event", one.event)
                .raw("time_us", one.time_us)
                .raw("requested", one.requested)
                .raw("capacity", one.capacity)
                .raw("reserved", one.reserved)
                .raw("avoided", one.had)
                .end()
        });
        let micros = |run: &Run| run.driver.as_nanos() as f64 / 1e3;
        let mut all = Object::new()
            .text("trace", &self.name)
            .raw("device", trace.device)
            .text("driver", &kind.to_string())
            .raw("events", trace.events)
            .raw("streams", trace.streams)
            .raw("initial_blocks", trace.notes.initial)
            .raw("unknown_frees", trace.notes.unknown_frees)
            .raw("replaced_blocks", trace.notes.replaced)
            .raw("peak_requested", trace.peak)
            .raw("peak_reserved", run.reserved)
            .float("reserved_ratio", self.ratio(run.reserved), 5)
            .maybe("recorded_peak_reserved", trace.recorded_peak)
            .maybe(
                "recorded_ratio",
                trace.recorded_peak.map(|p| format!("{:.5}", self.ratio(p))),
            )
            .maybe("budget", self.budget)
            .maybe("least_budget", self.least.as_ref().map(|l| l.0))
            .maybe(
                "least_budget_ratio",
                self.least
                    .as_ref()
                    .map(|l| format!("{:.5}", self.ratio(l.0))),
            )
            .raw("driver_calls", calls.end())
            .float("driver_us", micros(run), 1)
            .text("driver_time", time_kind(kind))
            .float("ns_per_event", run.ns_per_event(), 1)
            .float("own_ns_per_event", run.own_ns_per_event(), 1)
            .raw("allocs", run.stats.allocs)
            .raw("hits", run.stats.hits)
            .raw("misses", run.stats.misses)
            .raw("creates", run.stats.creates)
            .raw("remaps", run.stats.remaps)
            .raw("host_waits", run.stats.host_waits)
            // A heap moves mappings; a copy would be in the driver calls.
            .raw("bytes_copied", 0)
            .maybe("oom", oom)
            .raw("shortages_recorded", trace.shortages)
            .raw("shortages_tried", list(avoided));
        if let Some((_, least)) = &self.least {
            all = all
                .float("least_driver_us", micros(least), 1)
                .float("least_ns_per_event", least.ns_per_event(), 1)
                .raw("least_remaps", least.stats.remaps);
        }
        all.end()
    }
}

/// Where times in driver calls come from.
pub fn time_kind(kind: DriverKind) -> &'static str {
    match kind {
        DriverKind::Sim => "modelled",
        _ => "measured",
    }
}

/// Writes a line of JSON to where `--json` says.
pub fn emit(args: &Args, line: &str) -> Outcome {
    match &args.json {
        Some(Some(path)) => {
            let mut file = OpenOptions::new().create(true).append(true).open(path)?;
            writeln!(file, "{line}")?;
        }
        _ => println!("{line}"),
    }
    Ok(())
}

/// Prints a table that can be pasted.
pub fn print_table(reports: &[Report], rig: &Rig) {
    let kind = rig.device.kind();
    println!("{} on {}\n", rig.device.info(), kind);
    println!(
        "| trace | events | peak requested | reserved / peak | recorded / peak | least budget / peak | creates + remaps | driver ms ({}) | at least budget | ns an event |",
        time_kind(kind)
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for report in reports {
        let (run, trace) = (&report.run, &report.trace);
        let ratio = |bytes| format!("{:.4}", report.ratio(bytes));
        let millis = |run: &Run| format!("{:.2}", run.driver.as_secs_f64() * 1e3);
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        println!(
            "| {} | {} | {} | {} | {} | {} | {} + {} | {} | {} | {:.0} |",
            report.name,
            trace.events,
            Bytes(trace.peak),
            ratio(run.reserved),
            or_dash(trace.recorded_peak.map(ratio)),
            or_dash(report.least.as_ref().map(|l| ratio(l.0))),
            run.stats.creates,
            run.stats.remaps,
            millis(run),
            or_dash(report.least.as_ref().map(|l| millis(&l.1))),
            run.ns_per_event()
        );
    }
    println!();
    for report in reports {
        let name = &report.name;
        let notes = &report.trace.notes;
        if notes.initial > 0 {
            let count = notes.initial;
            println!(
                "{name}: {count} blocks were live before the first event and are allocated first"
            );
        }
        if notes.unknown_frees + notes.replaced > 0 {
            println!(
                "{name}: {} frees of unknown blocks left out, {} blocks ended where another began",
                notes.unknown_frees, notes.replaced
            );
        }
        if let Some(oom) = &report.run.oom {
            println!(
                "{name}: out of memory at event {} ({} asked, {} live): {}",
                oom.event,
                Bytes(oom.requested),
                Bytes(oom.live),
                oom.error
            );
        }
        for one in &report.avoided {
            println!(
                "{name}: at event {} the recorded allocator had no {} with {} reserved of {}: {}",
                one.event,
                Bytes(one.requested),
                Bytes(one.reserved),
                Bytes(one.capacity),
                if one.had {
                    "granule has it"
                } else {
                    "granule has not either"
                }
            );
        }
    }
}
