//! What benches share: the device and its line, samples, and a table at the end.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::process;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use granule::driver::{DriverKind, Kernel};
use granule::units::VaRange;
use granule::{Device, Pool, PoolConfig, Stream, Tensor};

#[allow(dead_code)]
pub mod contender;
#[allow(dead_code)]
pub mod scene;

/// What a bench's setup and checks return.
pub type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Fails the bench with a formatted text unless the condition holds.
#[macro_export]
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+).into());
        }
    };
}

/// The value, or the end of the program with a line that says why: a bench that measured the wrong
/// thing must not print a figure.
pub fn must<T>(result: Outcome<T>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => {
            eprintln!("failed: {error}");
            process::exit(1)
        }
    }
}

/// The device under test and where the figures go.
pub struct Rig {
    pub device: Device,
    pub stream: Stream,
    counter: Tensor<u64>,
    rows: RefCell<Vec<Row>>,
}

struct Row {
    case: String,
    contender: String,
    samples: Vec<Duration>,
    note: String,
}

impl Rig {
    /// Opens the device that `GRANULE_DRIVER` names, or the best there is.
    pub fn open() -> Outcome<Self> {
        let device = Device::auto()?;
        let stream = device.create_stream()?;
        let unit = device.info().granularity;
        let own = Pool::new(&device, PoolConfig::with_budget(unit).granule(unit))?;
        let mut counter = Tensor::new(&own, &[], 1)?;
        counter.grow_zeroed(1, &stream)?;
        stream.synchronize()?;
        let rig = Self {
            device,
            stream,
            counter,
            rows: RefCell::default(),
        };
        println!("{}", rig.machine());
        Ok(rig)
    }

    /// Device, driver, version and date in one line.
    pub fn machine(&self) -> String {
        let info = self.device.info();
        let version = match info.driver_version {
            0 => String::new(),
            v => format!(" {}.{}", v / 1000, v % 1000 / 10),
        };
        format!(
            "{}; driver {}{version}; granule {}; {}",
            info,
            self.device.kind(),
            env!("CARGO_PKG_VERSION"),
            today()
        )
    }

    pub fn is_cuda(&self) -> bool {
        self.device.kind() == DriverKind::Cuda
    }

    /// Queues a write of the pattern.
    pub fn write(&self, range: VaRange, seed: u64) -> Outcome {
        let kernel = Kernel::WritePattern { range, seed };
        Ok(self.device.driver().launch(kernel, self.stream.id())?)
    }

    /// Checks the pattern and waits for the answer. The sim has no bytes to compare.
    pub fn check(&self, range: VaRange, seed: u64) -> Outcome {
        if !self.device.info().capabilities.data {
            return Ok(self.stream.synchronize()?);
        }
        let kernel = Kernel::CheckPattern {
            range,
            seed,
            mismatches: self.counter.ptr(),
        };
        self.device.driver().launch(kernel, self.stream.id())?;
        let mut wrong = [0];
        self.counter.copy_to_host(0, &mut wrong, &self.stream)?;
        ensure!(wrong[0] == 0, "{} words differ", wrong[0]);
        Ok(())
    }

    /// Adds a row to the table at the end.
    pub fn row(&self, case: &str, contender: &str, samples: Vec<Duration>, note: String) {
        if !samples.is_empty() {
            self.rows.borrow_mut().push(Row {
                case: case.to_owned(),
                contender: contender.to_owned(),
                samples,
                note,
            });
        }
    }

    /// Prints the table, ready to be pasted.
    pub fn print(&self) {
        let mut text = format!("\n{}\n\n", self.machine());
        text += "| case | contender | runs | p50 | p99 | most | note |\n";
        text += "|------|-----------|-----:|----:|----:|-----:|------|\n";
        for row in &mut *self.rows.borrow_mut() {
            row.samples.sort();
            let at = |share| show(percentile(&row.samples, share));
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {} | {} | {} |",
                row.case,
                row.contender,
                row.samples.len(),
                at(0.5),
                at(0.99),
                at(1.0),
                row.note
            );
        }
        println!("{text}");
    }
}

/// The value that `share` (0 to 1) of the sorted times do not exceed.
pub fn percentile(sorted: &[Duration], share: f64) -> Duration {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    let last = sorted.len().saturating_sub(1);
    let at = rank.saturating_sub(1).min(last);
    sorted.get(at).copied().unwrap_or_default()
}

/// The median of times in any order.
pub fn median(samples: &[Duration]) -> Duration {
    let mut sorted = samples.to_vec();
    sorted.sort();
    percentile(&sorted, 0.5)
}

/// A duration in the unit that reads best.
pub fn show(time: Duration) -> String {
    let nanos = time.as_nanos() as f64;
    match nanos {
        n if n < 1e4 => format!("{n:.0} ns"),
        n if n < 1e6 => format!("{:.1} us", n / 1e3),
        n if n < 1e9 => format!("{:.2} ms", n / 1e6),
        n => format!("{:.2} s", n / 1e9),
    }
}

/// Today's date in UTC.
fn today() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let days = since.map_or(0, |t| t.as_secs() / 86_400);
    // Counted from 1 March of year 0, so that leap days come last; 400 years are an era.
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
}
