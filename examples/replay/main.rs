//! What would granule do for my job? Replays recorded allocations through a heap.
//!
//! Reads traces of lines (plain or gzip), RMM's CSV log, and the pickle of
//! `torch.cuda.memory._dump_snapshot`; see [`granule::trace`]. Needs neither Python nor a GPU.
//!
//! ```text
//! cargo run --release --example replay -- snapshot.pickle --html page.html
//! cargo run --release --example replay -- traces/*.csv.gz --json
//! cargo run --release --example replay -- --driver cuda traces/*.csv.gz
//! cargo run --release --example replay -- job.csv.gz --advice
//! cargo run --release --example replay -- --scale
//! ```
//!
//! `--help` lists every option.

mod advice;
mod args;
#[path = "../support/replay.rs"]
mod core;
mod html;
mod json;
mod report;
mod scale;
mod watch;
mod why;

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use args::{Args, Budget, Job};
use core::{Outcome, Rig, Run, Setup, Unwatched};
use granule::trace::{EventKind, Trace};
use granule::units::Bytes;
use report::Report;

fn main() -> ExitCode {
    let args = match Args::parse() {
        Ok(Some(args)) => args,
        Ok(None) => return ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("replay: {error}");
            return ExitCode::from(2);
        }
    };
    let done = match &args.job {
        Job::Scale => scale::run(&args),
        Job::Model(model) => advice::for_model(&args, model),
        Job::Files(_) if args.advice => {
            each(&args, |name, trace| advice::for_trace(&args, name, trace))
        }
        Job::Files(_) => replay(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("replay: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Calls `one` with every trace of every file.
fn each(args: &Args, mut one: impl FnMut(&str, &Trace) -> Outcome) -> Outcome {
    let Job::Files(paths) = &args.job else {
        return Ok(());
    };
    for path in paths {
        let started = Instant::now();
        let traces = core::open(path, &args.read);
        let traces = traces.map_err(|error| format!("{}: {error}", path.display()))?;
        let events: usize = traces.iter().map(|trace| trace.events.len()).sum();
        let took = started.elapsed().as_secs_f64();
        eprintln!("{}: {events} events read in {took:.2} s", path.display());
        for trace in &traces {
            let name = name(path, trace, traces.len());
            match args.shrink {
                1.0 => one(&name, trace)?,
                by => one(&format!("{name}/{by}"), &core::shrunk(trace, by))?,
            }
        }
    }
    Ok(())
}

/// The file's name without its endings, and the device if there are several.
fn name(path: &Path, trace: &Trace, count: usize) -> String {
    let file = path.file_name().unwrap_or(path.as_os_str());
    let file = file.to_string_lossy();
    let mut stem = &*file;
    for ending in [".gz", ".csv", ".pickle", ".pkl"] {
        stem = stem.strip_suffix(ending).unwrap_or(stem);
    }
    match count {
        1 => stem.to_owned(),
        _ => format!("{stem}#{}", trace.device),
    }
}

fn replay(args: &Args) -> Outcome {
    let rig = Rig::open(args.kind, args.memory)?;
    eprintln!(
        "driver: {}, device: {}",
        rig.device.kind(),
        rig.device.info()
    );
    let mut reports = Vec::new();
    let mut pages = Vec::new();
    let mut failed = None;
    each(args, |name, trace| {
        let report = match one(args, &rig, name, trace) {
            Ok(report) => report,
            Err(error) => {
                // The other traces are still worth running.
                eprintln!("{name}: {error}");
                failed.get_or_insert(format!("{name}: {error}"));
                return Ok(());
            }
        };
        if args.json.is_some() {
            report.write_json(args)?;
        }
        if args.html.is_some() {
            pages.push(html::Page::record(args, &rig, &report, trace)?);
        }
        if args.export.is_some() || args.log.is_some() {
            watch::export(args, &rig, trace)?;
        }
        reports.push(report);
        Ok(())
    })?;
    if args.json.as_ref().is_none_or(Option::is_some) {
        report::print_table(&reports, &rig);
    }
    if let Some(path) = &args.html {
        html::write(path, &pages)?;
        eprintln!("wrote {}", path.display());
    }
    match failed {
        Some(error) => Err(error.into()),
        None => Ok(()),
    }
}

/// Runs one trace: with the budget that was asked for, then for the least.
fn one(args: &Args, rig: &Rig, name: &str, trace: &Trace) -> Outcome<Report> {
    let setup = &args.setup;
    let budget = match args.budget {
        Budget::None => None,
        Budget::Bytes(bytes) => Some(bytes),
        Budget::Ratio(ratio) => Some((trace.peak as f64 * ratio) as u64),
    };
    let free = rig.device.memory_info()?.free;
    if budget.is_none() && free < trace.peak {
        let (need, free) = (Bytes(trace.peak), Bytes(free));
        return Err(format!("needs {need}, and the device has {free} free").into());
    }
    if args.why {
        why::explain(rig, name, trace, setup, budget)?;
    }
    let mut runs = Vec::new();
    for nth in 0..args.repeat.max(1) {
        let run = core::run(rig, trace, setup, budget, &mut Unwatched)?;
        eprintln!(
            "{name}: run {} of {}: {:.0} ms, reserved {}",
            nth + 1,
            args.repeat.max(1),
            run.whole.as_secs_f64() * 1e3,
            Bytes(run.reserved)
        );
        runs.push(run);
    }
    runs.sort_by_key(|run| run.whole);
    let middle = (runs.len() - 1) / 2;
    let run = runs.swap_remove(middle);
    if run.mismatches > 0 {
        return Err(format!("{} words changed under a block", run.mismatches).into());
    }
    let least = match args.least && run.oom.is_none() {
        true => Some(core::least_budget(
            rig,
            trace,
            setup,
            &run,
            |budget, fits| {
                let says = if fits { "completes" } else { "out of memory" };
                eprintln!("{name}: budget {}: {says}", Bytes(budget));
            },
        )?),
        false => None,
    };
    let avoided = avoided(args, trace, setup)?;
    Ok(Report {
        name: name.to_owned(),
        trace: report::Facts::of(trace),
        budget,
        run,
        least,
        avoided,
    })
}

/// How many of the recorded shortages had memory here, with as much as that device had then: each by a
/// run of the trace up to there, on the simulated device.
fn avoided(args: &Args, trace: &Trace, setup: &Setup) -> Outcome<Vec<report::Avoided>> {
    let (mut reserved, mut found) = (0, Vec::new());
    for (nth, event) in trace.events.iter().enumerate() {
        match event.kind {
            EventKind::Reserved { bytes } => reserved = bytes,
            EventKind::OutOfMemory { bytes, free } if found.len() < args.shortages => {
                let capacity = reserved.saturating_add(free);
                let had = capacity > 0 && {
                    let part = trace.first(nth + 1);
                    let rig = Rig::open(granule::driver::DriverKind::Sim, args.memory)?;
                    let setup = Setup {
                        probe: true,
                        ..setup.clone()
                    };
                    let run = core::run(&rig, &part, &setup, Some(capacity), &mut Unwatched)?;
                    is_served(&run)
                };
                found.push(report::Avoided {
                    event: nth as u64,
                    time_us: event.time_us,
                    requested: bytes,
                    capacity,
                    reserved,
                    had,
                });
            }
            _ => {}
        }
    }
    Ok(found)
}

/// Whether the last probe, which is the one in question, had memory.
fn is_served(run: &Run) -> bool {
    run.oom.is_none() && run.last_probe
}
