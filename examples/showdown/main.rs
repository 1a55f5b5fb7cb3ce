//! Every way of making free memory contiguous, side by side: a heap is fragmented, a large block is
//! asked for, and for each strategy it is shown how long that took, what was copied and what moved.
//!
//! ```text
//! cargo run --release --example showdown [-- OPTIONS]
//!
//!   --json FILE       every measurement, as JSON
//!   --html FILE       a page with tables and plots, nothing loaded from elsewhere
//!   --rivals FILE     JSON lines of benches/rivals/torch_defrag.py, to be shown beside
//!   --trace FILE      a recorded trace to take a fragmented heap from; may be given again
//!   --costs FILE      the cost table to plan by, instead of measuring one
//!   --save-costs FILE writes the table that was measured
//!   --reps N          repetitions of each case
//!   --quick           fewer cases
//! ```
//!
//! With `GRANULE_DRIVER=sim` nothing is copied and nothing checked: calls and copies take what `--costs`, or
//! else the table of an H200, says, and planning what it takes on this machine at the least.
//!
//! On a GPU of 140 GiB it takes some two minutes and 96 GiB. Every live byte and the new block are
//! checked after each measurement, on the device.

#[path = "../../benches/support/contender.rs"]
#[allow(dead_code)]
mod contender;
mod html;
mod output;
#[path = "../../benches/support/scene.rs"]
#[allow(dead_code, missing_docs, missing_debug_implementations)]
mod scene;
mod slowdown;
#[path = "../support/mod.rs"]
mod support;
mod trace;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use granule::defrag::Strategy;
use granule::driver::cost::CostTable;
use granule::driver::record::RecordDriver;
use granule::driver::sim::SimConfig;
use granule::driver::{DriverKind, Kernel, MeasureConfig};
use granule::units::{GIB, MIB};
use granule::{Device, Stream};
use output::{Case, Row};
use scene::{Checker, Layout, Pattern, Sample, Scene};
use support::{Outcome, exit_with, option, progress, show};

fn main() -> ExitCode {
    exit_with(run)
}

/// What every part of the program needs.
struct Stage {
    pub device: Device,
    pub record: Arc<RecordDriver>,
    pub stream: Stream,
    pub table: CostTable,
    pub checker: Checker,
    pub reps: u32,
    pub quick: bool,
    /// The most memory that one case may take.
    pub most: u64,
}

impl Stage {
    fn open() -> Outcome<Self> {
        let inner = match std::env::var("GRANULE_DRIVER").as_deref() {
            Ok("sim") => simulated()?,
            _ => support::open()?,
        };
        let record = Arc::new(RecordDriver::new(inner.driver().clone()));
        let device = Device::from_driver(record.clone());
        let stream = device.create_stream()?;
        let quick = std::env::args().any(|argument| argument == "--quick");
        let is_host = device.kind() == DriverKind::Host;
        let reps = match option("--reps")? {
            Some(text) => text.parse().map_err(|_| "--reps needs a number")?,
            None if !is_host && !quick => 9,
            None => 3,
        };
        ensure!(reps > 0, "--reps needs a number above 0");
        let free = device.memory_info()?.free;
        let most = match is_host {
            true => (free / 3).min(96 * MIB),
            false => (free / 10 * 7).min(100 * GIB),
        };
        let table = costs(&device)?;
        Ok(Self {
            checker: Checker::new(&stream)?,
            record,
            stream,
            table,
            reps,
            quick,
            most,
            device,
        })
    }

    pub fn is_cuda(&self) -> bool {
        self.device.kind() == DriverKind::Cuda
    }

    pub fn is_sim(&self) -> bool {
        self.device.kind() == DriverKind::Sim
    }

    /// Where memory is this machine's, and slow to touch first.
    pub fn is_host(&self) -> bool {
        self.device.kind() == DriverKind::Host
    }
}

/// A device that takes what a table says.
fn simulated() -> Outcome<Device> {
    let mut config = SimConfig::default();
    if let Some(path) = option("--costs")? {
        config.cost = std::fs::read_to_string(path)?.parse()?;
    }
    Ok(Device::sim(config)?)
}

/// The table from a file, or measured now.
fn costs(device: &Device) -> Outcome<CostTable> {
    let table = match option("--costs")? {
        Some(path) => std::fs::read_to_string(path)?.parse()?,
        None => {
            let driver = &**device.driver();
            let start = Instant::now();
            let table = granule::driver::measure(driver, MeasureConfig::of(driver))?;
            println!("cost table measured in {}", show(start.elapsed()));
            table
        }
    };
    if let Some(path) = option("--save-costs")? {
        std::fs::write(path, table.to_string())?;
    }
    Ok(table)
}

fn run() -> Outcome {
    let start = Instant::now();
    let mut stage = Stage::open()?;
    if stage.is_host() {
        println!(
            "These are figures of the host driver: pages of this machine, copied by its processor. \
             They show that everything works, and say nothing about a GPU."
        );
    }
    println!("\n{}", output::costs(&stage.table));
    let mut rows = Vec::new();
    let layouts = layouts(&stage);
    let bar = progress("fragment and ask", layouts.len() as u64);
    for (case, layout) in layouts {
        let more = case_rows(&mut stage, &case, &layout)?;
        bar.suspend(|| print!("{}", output::table(&case, &more)));
        rows.extend(more);
        bar.inc(1);
    }
    bar.finish_and_clear();
    for path in support_options("--trace")? {
        let more = trace::rows(&mut stage, &path)?;
        if let Some(first) = more.first() {
            print!("{}", output::table(&first.case, &more));
        }
        rows.extend(more);
    }
    let mut slow = Vec::new();
    if !stage.is_sim() {
        slow = slowdown::measure(&mut stage)?;
        print!("{}", output::slowdown(&slow));
    }
    let rivals = match option("--rivals")? {
        Some(path) => output::read_rivals(&path)?,
        None => Vec::new(),
    };
    if !rivals.is_empty() {
        print!("{}", output::rivals(&rivals));
    }
    let verdicts = output::verdicts(&rows, &slow, stage.device.kind());
    let whose = match stage.device.kind() {
        DriverKind::Cuda => "",
        DriverKind::Sim => " (by a table!)",
        DriverKind::Host => " (host figures!)",
    };
    println!("\nAgainst the goals{whose}:");
    verdicts.iter().for_each(|line| println!("  {line}"));
    let all = output::Everything {
        machine: machine(&stage),
        checked: stage.device.info().capabilities.data,
        table: &stage.table,
        rows: &rows,
        slowdown: &slow,
        rivals: &rivals,
        verdicts: &verdicts,
    };
    if let Some(path) = option("--json")? {
        std::fs::write(&path, serde_json::to_string_pretty(&all.json())?)?;
        println!("written: {path}");
    }
    if let Some(path) = option("--html")? {
        std::fs::write(&path, html::page(&all)?)?;
        println!("written: {path}");
    }
    match stage.device.info().capabilities.data {
        true => println!("All checks passed, in {}.", show(start.elapsed())),
        false => println!(
            "Done in {}; the sim has no bytes to check.",
            show(start.elapsed())
        ),
    }
    Ok(())
}

fn machine(stage: &Stage) -> String {
    format!(
        "{}; driver {} {}; granule {}",
        stage.device.info(),
        stage.device.kind(),
        stage.device.info().driver_version,
        env!("CARGO_PKG_VERSION")
    )
}

/// All values of `--name value`.
fn support_options(name: &str) -> Outcome<Vec<String>> {
    let mut found = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if argument == name {
            found.push(arguments.next().ok_or(format!("{name} needs a value"))?);
        }
    }
    Ok(found)
}

/// The cases, with what they are about.
fn layouts(stage: &Stage) -> Vec<(Case, Layout)> {
    let sizes: Vec<u64> = match (!stage.is_host(), stage.quick) {
        (true, false) => (1..=12).map(|log| MIB << log).collect(),
        (true, true) => [2, 32, 256, 1024].map(|n| n * MIB).to_vec(),
        _ => [2, 4].map(|n| n * MIB).to_vec(),
    };
    let pieces = |piece: u64| {
        let most = stage.most / piece * 2 / 3;
        let wanted = match !stage.is_host() {
            true => (4 * GIB / piece).clamp(32, 512),
            false => 16,
        };
        // A power of two, so that the buddy systems have their places.
        1u64 << wanted.min(most).max(8).ilog2()
    };
    let mut cases = Vec::new();
    let mut add = |group, layout: Layout| {
        let fits = layout.bytes() * 3 / 2 <= stage.most.max(48 * MIB);
        if fits && layout.want() > 0 {
            cases.push((Case::of(group, &layout), layout));
        }
    };
    for piece in &sizes {
        add("half free", Layout::halved(*piece, pieces(*piece)));
    }
    let some: &[u64] = match (!stage.is_host(), stage.quick) {
        (true, false) => &[2 * MIB, 32 * MIB, 256 * MIB, GIB],
        (true, true) => &[256 * MIB],
        _ => &[2 * MIB],
    };
    for piece in some {
        let occupancies: &[u64] = if !stage.is_host() {
            &[250, 750, 900]
        } else {
            &[750]
        };
        for permille in occupancies.iter().copied() {
            let layout = Layout {
                permille,
                ..Layout::halved(*piece, pieces(*piece))
            };
            add("other occupancies", layout);
        }
        for seed in 1..=if !stage.is_host() { 2 } else { 1 } {
            let layout = Layout {
                pattern: Pattern::Random(seed),
                ..Layout::halved(*piece, pieces(*piece))
            };
            add("shuffled", layout);
        }
    }
    // Pieces that share granules: no granule is empty, so nothing can be remapped as it is.
    let shared: &[(u64, u64)] = match !stage.is_host() {
        true => &[(2, 32), (8, 256), (64, 256), (256, 1024)],
        false => &[(2, 4)],
    };
    for (piece, granule) in shared {
        let layout = Layout {
            granule: granule * MIB,
            ..Layout::halved(piece * MIB, pieces(piece * MIB))
        };
        add("pieces share granules", layout);
    }
    cases
}

fn case_rows(stage: &mut Stage, case: &Case, layout: &Layout) -> Outcome<Vec<Row>> {
    // The buddy systems may need as much again.
    let budget = layout.bytes() + layout.want().next_power_of_two().max(layout.granule);
    let pool = scene::pool(&stage.device, budget, layout.granule)?;
    // All memory is created now and then only handed round.
    {
        let all = Scene::build(&pool, &stage.stream, layout, &stage.table, &stage.checker)?;
        let spare = budget - layout.bytes();
        all.heap.grow(spare, &stage.stream)?;
    }
    let mut all = Strategy::ALL.map(|strategy| (strategy, Vec::new(), None));
    let is_main =
        layout.permille == 500 && layout.pattern == Pattern::Even && layout.granule == layout.piece;
    // In turns, so that what the machine does meanwhile befalls all of them, and each is first at times.
    let reps = stage.reps + if is_main { stage.reps / 2 } else { 0 };
    for rep in 0..reps {
        let first = rep as usize % all.len();
        let (later, sooner) = all.split_at_mut(first);
        let turns = sooner.iter_mut().chain(later);
        for (strategy, samples, why) in turns.filter(|one| one.2.is_none()) {
            let scene = Scene::build(&pool, &stage.stream, layout, &stage.table, &stage.checker)?;
            match ask(stage, &scene, *strategy)? {
                Ok(sample) => samples.push(sample),
                Err(error) => *why = Some(error),
            }
        }
    }
    let mut rows = Vec::new();
    for (strategy, mut samples, why) in all {
        if stage.is_sim() {
            // They differ only by what disturbed the planner.
            samples.sort_by_key(|sample| sample.usable);
            samples.truncate(1);
        }
        rows.push(Row::of(case, strategy.name(), &samples, why));
    }
    if is_main && !stage.is_sim() {
        busy(stage, &pool, layout, &mut rows)?;
    }
    drop(pool);
    if let Some(row) = plain(stage, case, layout.want())? {
        rows.push(row);
    }
    Ok(rows)
}

/// A sample, or why the strategy cannot serve this.
fn ask(stage: &mut Stage, scene: &Scene, strategy: Strategy) -> Outcome<Result<Sample, String>> {
    let record = stage.record.clone();
    let calls = move || record.snapshot().total().calls;
    match scene.ask(strategy, &mut stage.checker, &calls) {
        Ok(sample) => Ok(Ok(sample)),
        Err(error) => match error.downcast_ref::<granule::Error>() {
            Some(granule::Error::Shortfall(why)) => {
                scene.verify(&mut stage.checker)?;
                Ok(Err(why.to_string()))
            }
            _ => Err(error),
        },
    }
}

/// How long the caller waits, and how much later the stream is done, when it has work queued.
fn busy(stage: &mut Stage, pool: &granule::Pool, layout: &Layout, rows: &mut [Row]) -> Outcome {
    let nanos = 3_000_000;
    let spin = |stream: &Stream| {
        stage
            .device
            .driver()
            .launch(Kernel::Spin { nanos }, stream.id())
    };
    let mut alone = Vec::new();
    for _ in 0..5 {
        let start = Instant::now();
        spin(&stage.stream)?;
        stage.stream.synchronize()?;
        alone.push(start.elapsed());
    }
    alone.sort();
    let alone = alone[alone.len() / 2];
    for row in rows.iter_mut().filter(|row| row.usable.is_some()) {
        let strategy = Strategy::ALL.into_iter().find(|s| s.name() == row.strategy);
        let Some(strategy) = strategy else { continue };
        let mut caller = Vec::new();
        let mut delay = Vec::new();
        for _ in 0..stage.reps.div_ceil(2) {
            let scene = Scene::build(pool, &stage.stream, layout, &stage.table, &stage.checker)?;
            let start = Instant::now();
            spin(&stage.stream)?;
            let asked = Instant::now();
            let made = scene.heap.alloc_by(
                strategy,
                scene.want,
                granule::defrag::Age::Old,
                &stage.stream,
            );
            caller.push(asked.elapsed());
            stage.stream.synchronize()?;
            delay.push(start.elapsed().saturating_sub(alone));
            made?;
        }
        row.busy = Some((output::median(&mut caller), output::median(&mut delay)));
    }
    Ok(())
}

/// What cuMemAlloc takes for the same request: memory that is not the heap's.
fn plain(stage: &Stage, case: &Case, want: u64) -> Outcome<Option<Row>> {
    let Some(cuda) = contender::cuda(&stage.device) else {
        return Ok(None);
    };
    let mut times = Vec::new();
    for _ in 0..stage.reps {
        // Released memory is scrubbed meanwhile, as it would be in a program that runs on.
        stage
            .device
            .driver()
            .launch(Kernel::Spin { nanos: 10_000_000 }, stage.stream.id())?;
        stage.stream.synchronize()?;
        let start = Instant::now();
        let at = cuda.mem_alloc(want)?;
        times.push(start.elapsed());
        cuda.mem_free(at)?;
    }
    let mut row = Row::named(case, "cuMemAlloc, new memory");
    row.usable = Some(output::median(&mut times));
    row.host = row.usable;
    row.extra = want;
    row.calls = 1;
    row.runs = times.len();
    Ok(Some(row))
}

/// A duration in microseconds.
pub fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
