//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use granule::driver::DriverKind;
use granule::trace::ReadOptions;
use granule::{Policy, Rounding};
use lexopt::prelude::*;

use crate::core::{Outcome, Setup};

const HELP: &str = "\
replay: runs recorded allocations through a granule heap

    replay [OPTIONS] FILE...     lines (.csv, .csv.gz), RMM's log, PyTorch's snapshot pickle
    replay [OPTIONS] --model parameters=7e9,activations=8e9,kv=131072,tokens=200000
    replay [OPTIONS] --scale

What to run on
    --driver sim|host|cuda   default: GRANULE_DRIVER, else sim
    --device-memory BYTES    memory of the sim and host device; 140GiB
    --touch                  write a word of each block, check it at the free (host, cuda)
    --repeat N               runs of each trace; the median by time is reported; 1

What to find
    --budget BYTES|RATIOx    budget of the pool, or times the trace's peak; none by default
    --no-least               do not look for the least budget
    --shrink N               divide all sizes by N, rounded up to 512 B
    --why                    what the reserved memory over the requests is, where they peak
    --shortages N            recorded shortages to try again; 4

The heap
    --rounding exact|power2|divisions:N
    --small, --granule-min, --granule-max, --limit BYTES
    --slack N                1/10,000 over the live peak
    --granules N             new granules are at most one part in N of the budget
    --aliases N, --wait MILLISECONDS
    --policy dynamic|hybrid:BYTES, --watermark BYTES

What to write
    --json[=FILE]            one object a line, instead of the table or beside it
    --html FILE              a page that needs nothing else
    --log FILE               what the heap did, to be read by this program again
    --export FILE            the same as a pickle for PyTorch's memory_viz
    --history N              events kept for these two; 1,000,000

Advice
    --advice                 settings for each trace; with --json as objects
    --margin PERCENT         what the static base has over the peak; 15
    --model FIELDS           settings from sizes in bytes: parameters, activations, kv (a token),
                             tokens (at most), sequences
    --scale                  serving simulated on devices: how time and memory grow
    --devices N, --live N, --hours N, --step-minutes N
                             of --scale: 8, 1,000,000 blocks a device, 24, 10

Reading
    --max-events N, --max-memory BYTES, --max-line BYTES, --lenient

BYTES may end in KiB, MiB, GiB, TiB.
";

/// Everything that was asked for.
pub struct Args {
    pub job: Job,
    pub kind: DriverKind,
    pub memory: Option<u64>,
    pub budget: Budget,
    pub least: bool,
    pub repeat: u32,
    /// All sizes are divided by this much.
    pub shrink: f64,
    /// Say what the memory over the requests is.
    pub why: bool,
    pub shortages: usize,
    pub setup: Setup,
    /// To standard output if there is no path.
    pub json: Option<Option<PathBuf>>,
    pub html: Option<PathBuf>,
    pub log: Option<PathBuf>,
    pub export: Option<PathBuf>,
    pub history: usize,
    pub advice: bool,
    pub margin: f64,
    pub scale: Scale,
    pub read: ReadOptions,
}

pub enum Job {
    Files(Vec<PathBuf>),
    Model(Model),
    Scale,
}

/// Sizes of a model in bytes.
#[derive(Default)]
pub struct Model {
    pub parameters: u64,
    pub activations: u64,
    pub kv: u64,
    pub tokens: u64,
    pub sequences: u64,
}

#[derive(Clone, Copy)]
pub enum Budget {
    None,
    Bytes(u64),
    /// Times the peak.
    Ratio(f64),
}

pub struct Scale {
    pub devices: u32,
    pub live: u64,
    pub hours: u64,
    pub step_minutes: u64,
}

impl Args {
    /// `None` if there is nothing to do but to print the help.
    pub fn parse() -> Outcome<Option<Self>> {
        let mut args = Self {
            job: Job::Files(Vec::new()),
            kind: match std::env::var(granule::DRIVER_VARIABLE) {
                Ok(name) => driver(&name)?,
                Err(_) => DriverKind::Sim,
            },
            memory: None,
            budget: Budget::None,
            least: true,
            repeat: 1,
            shrink: 1.0,
            why: false,
            shortages: 4,
            setup: Setup::default(),
            json: None,
            html: None,
            log: None,
            export: None,
            history: 1_000_000,
            advice: false,
            margin: 15.0,
            scale: Scale {
                devices: 8,
                live: 1_000_000,
                hours: 24,
                step_minutes: 10,
            },
            read: ReadOptions::default(),
        };
        let mut files = Vec::new();
        let mut parser = lexopt::Parser::from_env();
        while let Some(arg) = parser.next()? {
            match arg {
                Value(path) => files.push(PathBuf::from(path)),
                Short('h') | Long("help") => {
                    print!("{HELP}");
                    return Ok(None);
                }
                Long(name) => {
                    let name = name.to_owned();
                    args.option(&name, &mut parser)?;
                }
                other => return Err(other.unexpected().into()),
            }
        }
        match &mut args.job {
            Job::Files(_) if files.is_empty() => Err("no file given; see --help".into()),
            Job::Files(all) => {
                *all = files;
                Ok(Some(args))
            }
            _ if files.is_empty() => Ok(Some(args)),
            _ => Err("--model and --scale take no file".into()),
        }
    }

    fn option(&mut self, name: &str, parser: &mut lexopt::Parser) -> Outcome {
        let heap = &mut self.setup.heap;
        match name {
            "driver" => self.kind = driver(&text(parser.value()?)?)?,
            "device-memory" => self.memory = Some(bytes(parser.value()?)?),
            "touch" => self.setup.touch = true,
            "repeat" => self.repeat = parser.value()?.parse()?,
            "budget" => self.budget = budget(parser.value()?)?,
            "no-least" => self.least = false,
            "shortages" => self.shortages = parser.value()?.parse()?,
            "rounding" => heap.rounding = rounding(&text(parser.value()?)?)?,
            "small" => heap.small = bytes(parser.value()?)?,
            "granule-min" => heap.granule_min = bytes(parser.value()?)?,
            "granule-max" => heap.granule_max = bytes(parser.value()?)?,
            "limit" => heap.limit = Some(bytes(parser.value()?)?),
            "granules" => heap.granules = parser.value()?.parse()?,
            "shrink" => self.shrink = parser.value()?.parse()?,
            "why" => self.why = true,
            "slack" => heap.slack = parser.value()?.parse()?,
            "aliases" => heap.aliases = parser.value()?.parse()?,
            "wait" => heap.wait = Duration::from_millis(parser.value()?.parse()?),
            "policy" => self.setup.pool.policy = policy(&text(parser.value()?)?)?,
            "watermark" => self.setup.pool.watermark = Some(bytes(parser.value()?)?),
            "json" => self.json = Some(parser.optional_value().map(PathBuf::from)),
            "html" => self.html = Some(parser.value()?.into()),
            "log" => self.log = Some(parser.value()?.into()),
            "export" => self.export = Some(parser.value()?.into()),
            "history" => self.history = parser.value()?.parse()?,
            "advice" => self.advice = true,
            "margin" => self.margin = parser.value()?.parse()?,
            "model" => self.job = Job::Model(model(&text(parser.value()?)?)?),
            "scale" => self.job = Job::Scale,
            "devices" => self.scale.devices = parser.value()?.parse()?,
            "live" => self.scale.live = parser.value()?.parse()?,
            "hours" => self.scale.hours = parser.value()?.parse()?,
            "step-minutes" => self.scale.step_minutes = parser.value()?.parse()?,
            "max-events" => self.read.events = parser.value()?.parse()?,
            "max-memory" => self.read.memory = bytes(parser.value()?)?,
            "max-line" => self.read.line = parser.value()?.parse()?,
            "lenient" => self.read.lenient = true,
            _ => return Err(format!("unknown option --{name}; see --help").into()),
        }
        Ok(())
    }
}

fn text(value: OsString) -> Outcome<String> {
    value
        .into_string()
        .map_err(|value| format!("{} is not text", value.to_string_lossy()).into())
}

/// A number of bytes, with a unit or none.
fn bytes(value: OsString) -> Outcome<u64> {
    amount(&text(value)?)
}

fn amount(text: &str) -> Outcome<u64> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];
    let unit = units.iter().find(|(name, _)| text.ends_with(name));
    let (digits, shift) = match unit {
        Some((name, shift)) => (text.trim_end_matches(name), *shift),
        None => (text, 0),
    };
    let number: f64 = digits
        .trim()
        .parse()
        .map_err(|_| format!("{text} is no number of bytes"))?;
    let product = number * f64::from(1u32 << shift.min(30)) * if shift > 30 { 1024.0 } else { 1.0 };
    match product.is_finite() && (0.0..9e18).contains(&product) {
        true => Ok(product as u64),
        false => Err(format!("{text} is no number of bytes").into()),
    }
}

fn driver(name: &str) -> Outcome<DriverKind> {
    match name {
        "sim" => Ok(DriverKind::Sim),
        "host" => Ok(DriverKind::Host),
        "cuda" => Ok(DriverKind::Cuda),
        _ => Err(format!("driver {name} is none of sim, host and cuda").into()),
    }
}

fn budget(value: OsString) -> Outcome<Budget> {
    let text = text(value)?;
    match text.strip_suffix('x') {
        Some(ratio) => Ok(Budget::Ratio(ratio.parse()?)),
        None if text == "none" => Ok(Budget::None),
        None => Ok(Budget::Bytes(amount(&text)?)),
    }
}

fn rounding(name: &str) -> Outcome<Rounding> {
    match name.split_once(':') {
        Some(("divisions", n)) => Ok(Rounding::Divisions(n.parse()?)),
        _ if name == "exact" => Ok(Rounding::Exact),
        _ if name == "power2" => Ok(Rounding::PowerOfTwo),
        _ => Err(format!("rounding {name} is none of exact, power2 and divisions:N").into()),
    }
}

fn policy(name: &str) -> Outcome<Policy> {
    match name.split_once(':') {
        Some(("hybrid", base)) => Ok(Policy::Hybrid {
            base: amount(base)?,
        }),
        _ if name == "dynamic" => Ok(Policy::Dynamic),
        _ => Err(format!("policy {name} is none of dynamic and hybrid:BYTES").into()),
    }
}

fn model(text: &str) -> Outcome<Model> {
    let mut model = Model::default();
    for field in text.split(',') {
        let (name, value) = field
            .split_once('=')
            .ok_or_else(|| format!("{field} is not NAME=VALUE"))?;
        let place = match name.trim() {
            "parameters" => &mut model.parameters,
            "activations" => &mut model.activations,
            "kv" => &mut model.kv,
            "tokens" => &mut model.tokens,
            "sequences" => &mut model.sequences,
            _ => return Err(format!("a model has no {name}").into()),
        };
        *place = amount(value)?;
    }
    Ok(model)
}
