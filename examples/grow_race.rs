//! Growing in place against allocate, copy, free: time and memory at every size, as a table and as a
//! plot.
//!
//! ```text
//! cargo run --release --example grow_race [-- --svg PATH] [--most MIB] [--step MIB]
//! ```
//!
//! `torch.cat` allocates the new size, copies the old bytes, appends and frees; the contenders do
//! the same over the driver's own allocators. Each step ends when the device has written the new
//! bytes.

#[path = "../benches/support/contender.rs"]
mod contender;
mod support;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use contender::{Contender, InPlace};
use granule::units::{Bytes, GIB, MIB, VaRange};
use granule::{Device, Stream};
use plotters::prelude::*;
use support::{
    Checker, Outcome, affordable, exit_with, open, option, percentile, progress, say, show,
};

fn main() -> ExitCode {
    exit_with(run)
}

/// What one contender did, step by step.
struct Run {
    name: &'static str,
    /// Size, time since the start, most memory taken in this step.
    points: Vec<(u64, Duration, u64)>,
    copied: u64,
}

impl Run {
    fn time(&self) -> Duration {
        self.points.last().map_or(Duration::ZERO, |p| p.1)
    }

    fn peak(&self) -> u64 {
        self.points.iter().map(|p| p.2).max().unwrap_or(0)
    }
}

fn run() -> Outcome {
    let device = open()?;
    let step = mib_option("--step")?.unwrap_or(64 * MIB);
    let plan = affordable(&device, 8 * GIB, GIB, 3, step)?;
    let most = mib_option("--most")?.unwrap_or(plan).min(plan) / step * step;
    ensure!(most >= step, "--most is less than one step");
    let svg = option("--svg")?.unwrap_or_else(|| "target/grow_race.svg".to_owned());
    println!(
        "growing to {} in steps of {}, each step written by the device\n",
        Bytes(most),
        Bytes(step)
    );

    let stream = device.create_stream()?;
    let checker = Checker::new(&stream)?;
    // The first kernel of a process and the first touch of memory cost extra; nobody pays for that.
    warm_up(&device, &stream, &checker, step)?;
    let mut runs = Vec::new();
    for contender in contender::all(&device, &stream, most)? {
        runs.push(race(&device, contender, &stream, &checker, step, most)?);
    }
    table(&runs);
    look_ahead(&device, &stream, &checker, step, most)?;
    plot(&svg, &device, &runs)?;
    println!("\nplot: {svg}");
    verdict(&runs, most)?;
    println!("All checks passed.");
    Ok(())
}

fn mib_option(name: &str) -> Outcome<Option<u64>> {
    let Some(text) = option(name)? else {
        return Ok(None);
    };
    let mib: u64 = text
        .parse()
        .map_err(|_| format!("{name} needs a number of MiB"))?;
    ensure!(mib > 0 && mib < 1 << 20, "{name} {mib} is out of range");
    Ok(Some(mib * MIB))
}

fn warm_up(device: &Device, stream: &Stream, checker: &Checker, step: u64) -> Outcome {
    for mut contender in contender::all(device, stream, 2 * step)? {
        for to in [step, 2 * step] {
            checker.write(contender.enlarge(to)?, 1)?;
            contender.settle()?;
        }
        stream.synchronize()?;
        contender.close()?;
    }
    ensure!(checker.mismatches()? == 0, "a fresh counter is not zero");
    Ok(())
}

fn race(
    device: &Device,
    mut contender: Box<dyn Contender>,
    stream: &Stream,
    checker: &Checker,
    step: u64,
    most: u64,
) -> Outcome<Run> {
    let free = device.memory_info()?.free;
    let bar = progress(contender.name(), most / step);
    let mut points = Vec::new();
    let mut range = VaRange::EMPTY;
    let mut time = Duration::ZERO;
    for i in 1..=most / step {
        let started = Instant::now();
        range = contender.enlarge(i * step)?;
        let fresh = range.sub((i - 1) * step, step).ok_or("range too short")?;
        checker.write(fresh, i)?;
        stream.synchronize()?;
        time += started.elapsed();
        // Old and new buffer are both there now, if there are two. Looking is nobody's time.
        let taken = free.saturating_sub(device.memory_info()?.free);
        let started = Instant::now();
        contender.settle()?;
        time += started.elapsed();
        points.push((i * step, time, taken));
        bar.inc(1);
    }
    for i in 1..=most / step {
        let part = range.sub((i - 1) * step, step).ok_or("range too short")?;
        checker.check(part, i)?;
    }
    let wrong = checker.mismatches()?;
    ensure!(wrong == 0, "{}: {wrong} words differ", contender.name());
    let (name, copied) = (contender.name(), contender.copied());
    contender.close()?;
    bar.finish_and_clear();
    say(&bar, &format!("{name}: {}", show(time)));
    Ok(Run {
        name,
        points,
        copied,
    })
}

fn table(runs: &[Run]) {
    println!("\n| contender            |    total | against ours |     copied | peak memory |");
    println!("|----------------------|----------|--------------|------------|-------------|");
    let ours = runs.first().map_or(Duration::ZERO, Run::time);
    for run in runs {
        println!(
            "| {:<20} | {:>8} | {:>11.1}x | {:>10} | {:>11} |",
            run.name,
            show(run.time()),
            run.time().as_secs_f64() / ours.as_secs_f64().max(1e-9),
            Bytes(run.copied).to_string(),
            Bytes(run.peak()).to_string(),
        );
    }
    println!("\n| size       | {} |", names(runs));
    println!(
        "|------------|{}",
        "----------------------|".repeat(runs.len())
    );
    let steps = runs.first().map_or(0, |run| run.points.len());
    let mut shown = 1;
    while shown <= steps {
        let cells: Vec<String> = runs
            .iter()
            .map(|run| {
                let (_, time, peak) = run.points[shown - 1];
                format!("{:>20}", format!("{}, {}", show(time), Bytes(peak)))
            })
            .collect();
        let size = Bytes(runs[0].points[shown - 1].0).to_string();
        println!("| {size:<10} | {} |", cells.join(" | "));
        shown *= 2;
    }
}

fn names(runs: &[Run]) -> String {
    let names: Vec<String> = runs.iter().map(|run| format!("{:>20}", run.name)).collect();
    names.join(" | ")
}

/// Growth with a quarter of the size mapped ahead: what the caller waits for in each step.
fn look_ahead(
    device: &Device,
    stream: &Stream,
    checker: &Checker,
    step: u64,
    most: u64,
) -> Outcome {
    let ahead = (most / 4).max(2 * step).min(most);
    let contender = InPlace::new(device, stream, most, ahead)?;
    let arena = &contender.arena;
    let patience = Instant::now();
    while arena.mapped() < ahead && patience.elapsed() < Duration::from_secs(5) {
        std::thread::yield_now();
    }
    ensure!(
        arena.mapped() >= ahead,
        "only {} mapped ahead",
        Bytes(arena.mapped())
    );
    arena.record_use(stream)?;
    let mut times = Vec::new();
    for i in 1..=most / step {
        let started = Instant::now();
        arena.grow(i * step)?;
        times.push(started.elapsed());
        let fresh = arena.range().sub((i - 1) * step, step);
        checker.write(fresh.ok_or("range too short")?, i)?;
        // The device's writing sets the pace, as the work on new memory does in a real job.
        stream.synchronize()?;
    }
    for i in 1..=most / step {
        let part = arena.range().sub((i - 1) * step, step);
        checker.check(part.ok_or("range too short")?, i)?;
    }
    let wrong = checker.mismatches()?;
    ensure!(wrong == 0, "look-ahead: {wrong} words differ");
    Box::new(contender).close()?;
    times.sort();
    println!(
        "\nlook-ahead of {}: a step costs the caller p50 {}, p99 {}, most {}",
        Bytes(ahead),
        show(percentile(&times, 0.5)),
        show(percentile(&times, 0.99)),
        show(percentile(&times, 1.0)),
    );
    Ok(())
}

fn verdict(runs: &[Run], most: u64) -> Outcome {
    let Some((ours, rivals)) = runs.split_first() else {
        return Err("nobody ran".into());
    };
    ensure!(ours.copied == 0, "growing in place copied {}", ours.copied);
    let granularity = 2 * MIB;
    ensure!(
        ours.peak() <= most + granularity || rivals.iter().all(|r| r.peak() > ours.peak()),
        "growing in place took {} for {}",
        Bytes(ours.peak()),
        Bytes(most)
    );
    for rival in rivals {
        ensure!(
            rival.copied > 0 || rival.points.len() == 1,
            "{} copied nothing",
            rival.name
        );
    }
    Ok(())
}

/// Two panels, time and memory over size, as one self-contained SVG file.
fn plot(path: &str, device: &Device, runs: &[Run]) -> Outcome {
    if let Some(folder) = std::path::Path::new(path).parent() {
        std::fs::create_dir_all(folder)?;
    }
    let area = SVGBackend::new(path, (960, 440)).into_drawing_area();
    area.fill(&WHITE)?;
    let title = format!("Growing a buffer on {}", device.info().name);
    let area = area.titled(&title, ("sans-serif", 20))?;
    let panels = area.split_evenly((1, 2));
    let time = |p: &(u64, Duration, u64)| (gib(p.0), p.1.as_secs_f64() * 1e3);
    panel(&panels[0], "time so far (ms)", runs, time)?;
    let memory = |p: &(u64, Duration, u64)| (gib(p.0), gib(p.2));
    panel(&panels[1], "memory taken (GiB)", runs, memory)?;
    area.present()?;
    Ok(())
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / GIB as f64
}

fn panel<F>(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    label: &str,
    runs: &[Run],
    point: F,
) -> Outcome
where
    F: Fn(&(u64, Duration, u64)) -> (f64, f64),
{
    const COLOURS: [RGBColor; 4] = [
        RGBColor(0, 114, 178),
        RGBColor(213, 94, 0),
        RGBColor(0, 158, 115),
        RGBColor(204, 121, 167),
    ];
    let all: Vec<(f64, f64)> = runs
        .iter()
        .flat_map(|r| r.points.iter().map(&point))
        .collect();
    let width = all.iter().map(|p| p.0).fold(0.0, f64::max);
    let height = all.iter().map(|p| p.1).fold(0.0, f64::max) * 1.25;
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..width, 0.0..height.max(1e-3))?;
    chart
        .configure_mesh()
        .x_desc("size (GiB)")
        .y_desc(label)
        .light_line_style(WHITE)
        .draw()?;
    for (run, colour) in runs.iter().zip(COLOURS) {
        let line = LineSeries::new(run.points.iter().map(&point), colour.stroke_width(2));
        chart
            .draw_series(line)?
            .label(run.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    Ok(())
}
