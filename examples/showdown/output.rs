//! Rows, tables in the terminal, JSON, and how the figures stand against the goals.

use std::fmt::Write as _;
use std::time::Duration;

use granule::driver::DriverKind;
use granule::driver::cost::CostTable;
use granule::units::{Bytes, GIB, MIB};
use serde_json::{Value, json};

use crate::micros;
use crate::scene::{Layout, Pattern, Sample};
use crate::slowdown::Slow;
use crate::support::{Outcome, show};

/// What a heap was like and what was asked of it.
#[derive(Clone, PartialEq, Debug)]
pub struct Case {
    pub group: &'static str,
    pub name: String,
    pub piece: u64,
    pub granule: u64,
    pub permille: u64,
    pub bytes: u64,
    pub want: u64,
}

impl Case {
    pub fn of(group: &'static str, layout: &Layout) -> Self {
        let granule = match layout.granule == layout.piece {
            true => String::new(),
            false => format!(" in granules of {}", Bytes(layout.granule)),
        };
        let shuffled = match layout.pattern {
            Pattern::Even => String::new(),
            Pattern::Random(seed) => format!(", shuffled (seed {seed})"),
        };
        Self {
            group,
            name: format!(
                "{} x {}{granule}, {} % live{shuffled}",
                layout.pieces,
                Bytes(layout.piece),
                layout.permille / 10
            ),
            piece: layout.piece,
            granule: layout.granule,
            permille: layout.permille,
            bytes: layout.bytes(),
            want: layout.want(),
        }
    }
}

/// One strategy on one case. Medians.
#[derive(Clone, Debug)]
pub struct Row {
    pub case: Case,
    pub strategy: String,
    pub runs: usize,
    /// Until the block could be used and the device had got there; `None` if it could not be done.
    pub usable: Option<Duration>,
    /// Of each repetition, if it could be done.
    pub each: Vec<Duration>,
    pub fastest: Option<Duration>,
    pub host: Option<Duration>,
    pub later: Option<Duration>,
    pub predicted: Option<Duration>,
    /// Of the caller's time.
    pub planning: Option<Duration>,
    pub copied: u64,
    pub calls: u64,
    pub extra: u64,
    pub pointers: u64,
    pub remapped: u64,
    /// On a busy stream: what the caller waited, and by how much the stream was late.
    pub busy: Option<(Duration, Duration)>,
    pub why: Option<String>,
}

impl Row {
    pub fn named(case: &Case, strategy: &str) -> Self {
        Self {
            case: case.clone(),
            strategy: strategy.to_owned(),
            runs: 0,
            usable: None,
            each: Vec::new(),
            fastest: None,
            host: None,
            later: None,
            predicted: None,
            planning: None,
            copied: 0,
            calls: 0,
            extra: 0,
            pointers: 0,
            remapped: 0,
            busy: None,
            why: None,
        }
    }

    pub fn of(case: &Case, strategy: &str, samples: &[Sample], why: Option<String>) -> Self {
        let mut row = Self::named(case, strategy);
        row.why = why;
        let Some(last) = samples.last() else {
            return row;
        };
        let of = |get: &dyn Fn(&Sample) -> Duration| {
            Some(median(&mut samples.iter().map(get).collect::<Vec<_>>()))
        };
        row.runs = samples.len();
        row.usable = of(&|s| s.usable);
        row.each = samples.iter().map(|s| s.usable).collect();
        row.fastest = samples.iter().map(|s| s.usable).min();
        row.host = of(&|s| s.host);
        row.later = of(&|s| s.later);
        row.predicted = of(&|s| s.report.predicted.until_usable.into());
        row.planning = of(&|s| s.report.planning);
        row.copied = last.report.bytes_copied;
        row.calls = last.driver_calls;
        row.extra = last.report.extra_memory;
        row.pointers = last.report.pointers_changed;
        row.remapped = last.report.remapped;
        row
    }

    /// `checked` says whether there were bytes to check.
    pub fn json(&self, checked: bool) -> Value {
        let time = |time: Option<Duration>| time.map(micros);
        json!({
            "group": self.case.group, "case": self.case.name, "strategy": self.strategy,
            "piece": self.case.piece, "granule": self.case.granule,
            "live_permille": self.case.permille, "heap_bytes": self.case.bytes,
            "wanted_bytes": self.case.want, "runs": self.runs,
            "usable_us": time(self.usable), "usable_fastest_us": time(self.fastest),
            "caller_us": time(self.host), "unmapped_later_us": time(self.later),
            "predicted_us": time(self.predicted), "planning_us": time(self.planning),
            "bytes_copied": self.copied,
            "driver_calls": self.calls, "extra_memory": self.extra,
            "pointers_changed": self.pointers, "granules_remapped": self.remapped,
            "busy_caller_us": time(self.busy.map(|b| b.0)),
            "busy_stream_late_us": time(self.busy.map(|b| b.1)),
            "verified": checked && self.usable.is_some(), "why_not": self.why,
        })
    }
}

pub fn median(times: &mut [Duration]) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn shown(time: Option<Duration>) -> String {
    time.map_or_else(|| "-".to_owned(), show)
}

/// The rows of one case.
pub fn table(case: &Case, rows: &[Row]) -> String {
    let mut text = format!(
        "\n{}: {}; {} wanted\n",
        case.group,
        case.name,
        Bytes(case.want)
    );
    let head = "strategy               |   usable | predicted | planning | caller   | unmap later | copied    | calls | extra     | pointers | busy: caller, stream late";
    let _ = writeln!(text, "{head}\n{}", "-".repeat(head.len()));
    for row in rows {
        if let (None, Some(why)) = (row.usable, &row.why) {
            let _ = writeln!(text, "{:<22} | cannot: {why}", row.strategy);
            continue;
        }
        let busy = row.busy.map_or(String::new(), |(caller, late)| {
            format!("{}, {}", show(caller), show(late))
        });
        let _ = writeln!(
            text,
            "{:<22} | {:>8} | {:>9} | {:>8} | {:>8} | {:>11} | {:>9} | {:>5} | {:>9} | {:>8} | {busy}",
            row.strategy,
            shown(row.usable),
            shown(row.predicted),
            shown(row.planning),
            shown(row.host),
            shown(row.later),
            Bytes(row.copied).to_string(),
            row.calls,
            Bytes(row.extra).to_string(),
            row.pointers,
        );
    }
    text
}

/// The cost table, as far as plans depend on it.
pub fn costs(table: &CostTable) -> String {
    let mut text = String::from(
        "us a granule of |  create |    map |  access |   unmap | release | copy it | copy in parts\n",
    );
    for (len, _) in table.copy.points() {
        let us = |time: granule::driver::cost::Nanos| time.0 as f64 / 1e3;
        let _ = writeln!(
            text,
            "{:>15} | {:>7.1} | {:>6.2} | {:>7.1} | {:>7.1} | {:>7.1} | {:>7.1} | {:>7.1}",
            Bytes(*len).to_string(),
            us(table.create(*len)),
            us(table.map(*len)),
            us(table.set_access(*len)),
            us(table.unmap(*len)),
            us(table.release(*len)),
            us(table.copy(*len)),
            us(table.copy_batch(*len)),
        );
    }
    text
}

pub fn slowdown(all: &[Slow]) -> String {
    let mut text = String::from(
        "\nA kernel bound by memory bandwidth, while passes run without pause:\n\
         beside                                   | kernel   | slower   | passes/s | granules/s | GiB/s made contiguous\n",
    );
    for slow in all {
        let _ = writeln!(
            text,
            "{:<40} | {:>8} | {:>6.2} % | {:>8.0} | {:>10.0} | {:>8.0}",
            slow.name,
            show(slow.kernel),
            slow.percent,
            slow.passes,
            slow.remaps,
            slow.bytes / GIB as f64,
        );
    }
    text
}

/// A line of the file of rivals.
pub struct Rival {
    pub contender: String,
    pub case: String,
    pub usable_us: f64,
    pub extra_memory: f64,
    pub note: String,
    all: Value,
}

pub fn read_rivals(path: &str) -> Outcome<Vec<Rival>> {
    let text = std::fs::read_to_string(path)?;
    let mut found = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim().is_empty() {
            continue;
        }
        let all: Value =
            serde_json::from_str(line).map_err(|error| format!("{path}:{number}: {error}"))?;
        let word = |name: &str| all[name].as_str().unwrap_or_default().to_owned();
        found.push(Rival {
            contender: word("contender"),
            case: word("case"),
            usable_us: all["usable_us"].as_f64().unwrap_or(f64::NAN),
            extra_memory: all["extra_memory"].as_f64().unwrap_or(0.0),
            note: word("note"),
            all,
        });
    }
    Ok(found)
}

pub fn rivals(all: &[Rival]) -> String {
    let mut text = String::from("\nRivals, measured by themselves:\n");
    for rival in all {
        let _ = writeln!(
            text,
            "{:<32} | {:<44} | {:>10.1} us | {:>9} more memory | {}",
            rival.contender,
            rival.case,
            rival.usable_us,
            Bytes(rival.extra_memory as u64).to_string(),
            rival.note
        );
    }
    text
}

/// Everything that was measured.
pub struct Everything<'a> {
    pub machine: String,
    /// Whether there were bytes to check.
    pub checked: bool,
    pub table: &'a CostTable,
    pub rows: &'a [Row],
    pub slowdown: &'a [Slow],
    pub rivals: &'a [Rival],
    pub verdicts: &'a [String],
}

impl Everything<'_> {
    pub fn json(&self) -> Value {
        json!({
            "machine": self.machine,
            "costs": self.table.to_string().lines().collect::<Vec<_>>(),
            "cases": self.rows.iter().map(|row| row.json(self.checked)).collect::<Vec<_>>(),
            "slowdown": self.slowdown.iter().map(Slow::json).collect::<Vec<_>>(),
            "rivals": self.rivals.iter().map(|r| r.all.clone()).collect::<Vec<_>>(),
            "verdicts": self.verdicts,
        })
    }
}

/// The time of a strategy on a case of the main group.
pub fn time_of(rows: &[Row], piece: u64, strategy: &str) -> Option<f64> {
    row_of(rows, piece, strategy)?
        .usable
        .map(|time| time.as_secs_f64())
}

fn row_of<'a>(rows: &'a [Row], piece: u64, strategy: &str) -> Option<&'a Row> {
    rows.iter()
        .find(|r| r.case.group == "half free" && r.case.piece == piece && r.strategy == strategy)
}

/// How many times as long one strategy takes as another on a case of the main group: the median of the ratios
/// of the same repetitions, since what the machine does meanwhile befalls both.
pub fn ratio(rows: &[Row], piece: u64, one: &str, other: &str) -> Option<f64> {
    let each = |strategy| Some(&row_of(rows, piece, strategy)?.each);
    let pairs = each(one)?.iter().zip(each(other)?);
    let mut ratios: Vec<f64> = pairs
        .map(|(a, b)| a.as_secs_f64() / b.as_secs_f64())
        .collect();
    ratios.sort_by(f64::total_cmp);
    ratios.get(ratios.len() / 2).copied()
}

/// How the figures stand against what was set out to be reached.
pub fn verdicts(rows: &[Row], slow: &[Slow], kind: DriverKind) -> Vec<String> {
    let mut lines = Vec::new();
    let reached = |yes: bool| match (kind != DriverKind::Host, yes) {
        (false, _) => "set for a GPU",
        (true, true) => "reached",
        (true, false) => "MISSED",
    };
    let mut sizes: Vec<u64> = rows
        .iter()
        .filter(|r| r.case.group == "half free")
        .map(|r| r.case.piece)
        .collect();
    sizes.dedup();
    let against = |piece, other: &str| ratio(rows, piece, other, "remap");
    for piece in &sizes {
        let [slide, evacuate] = ["copy compaction", "copy evacuation"].map(|s| against(*piece, s));
        let (Some(slide), Some(evacuate)) = (slide, evacuate) else {
            continue;
        };
        let least = match *piece {
            n if n == 256 * MIB => Some(3.0),
            n if n == GIB => Some(8.0),
            _ => None,
        };
        let verdict = least.map_or(String::new(), |least| {
            format!(
                ", goal {least:.0} against compaction: {}",
                reached(slide >= least)
            )
        });
        lines.push(format!(
            "{}: remapping is {slide:.2} times sooner than copy compaction, {evacuate:.2} times \
             sooner than the cheapest evacuation{verdict}",
            Bytes(*piece)
        ));
    }
    let mut worst: (f64, u64, &str) = (0.0, 0, "");
    for piece in &sizes {
        for single in [
            "remap",
            "copy compaction",
            "copy evacuation",
            "generational",
        ] {
            let ratio = ratio(rows, *piece, "hybrid", single).unwrap_or(0.0);
            if ratio > worst.0 {
                worst = (ratio, *piece, single);
            }
        }
    }
    if worst.1 > 0 {
        lines.push(format!(
            "hybrid: at worst {:.2} of the best single strategy ({}, {}); goal at most 1.10: {}",
            worst.0,
            Bytes(worst.1),
            worst.2,
            reached(worst.0 <= 1.10)
        ));
    }
    let untouched = rows
        .iter()
        .filter(|r| r.strategy == "remap" && r.usable.is_some())
        .all(|r| r.copied == 0 && r.pointers == 0);
    lines.push(format!(
        "remap: no byte copied, no pointer changed: {}",
        reached(untouched)
    ));
    let remaps = slow
        .iter()
        .filter(|s| s.is_remap)
        .min_by(|a, b| a.percent.total_cmp(&b.percent));
    if let Some(best) = remaps {
        lines.push(format!(
            "beside {}: {:.2} % slower; goal under 3 %: {}",
            best.name,
            best.percent,
            reached(best.percent < 3.0)
        ));
    }
    match kind {
        DriverKind::Cuda => {}
        DriverKind::Sim => {
            lines.push("all of this by a table, with planning as it is here".to_owned())
        }
        DriverKind::Host => {
            lines.push("all of this on the host driver, for which no goals were set".to_owned());
        }
    }
    lines
}
