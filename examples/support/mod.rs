//! What the examples share: the device line, checks of device memory, progress, arguments.

#![allow(dead_code)]

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use granule::driver::{DriverKind, Kernel};
use granule::units::{VaRange, round_down};
use granule::{Device, Pool, PoolConfig, Stream, Tensor};
use indicatif::{ProgressBar, ProgressStyle};

/// What an example returns.
pub type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// Fails the example with a formatted text unless the condition holds.
#[macro_export]
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+).into());
        }
    };
}

/// Runs an example; an error becomes one line on standard error and a non-zero exit.
pub fn exit_with(run: impl FnOnce() -> Outcome) -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("failed: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Opens the device that `GRANULE_DRIVER` names, or the best there is, and says which it became.
pub fn open() -> Outcome<Device> {
    let device = Device::auto()?;
    println!("driver: {}, device: {}", device.kind(), device.info());
    if let Some(reason) = device.fallback_reason() {
        println!("        ({reason})");
    }
    ensure!(
        device.info().capabilities.data,
        "the {} driver has no memory to check; use cuda or host",
        device.kind()
    );
    Ok(device)
}

/// The size for this driver, but at most `1 / share` of what the device has free, in whole `unit`s.
pub fn affordable(device: &Device, cuda: u64, host: u64, share: u64, unit: u64) -> Outcome<u64> {
    let wanted = match device.kind() {
        DriverKind::Cuda => cuda,
        _ => host,
    };
    let size = round_down(wanted.min(device.memory_info()?.free / share), unit);
    ensure!(
        size >= unit,
        "not enough free memory on the device to show anything"
    );
    Ok(size)
}

/// Writes patterns to device memory and counts words that differ, on the device.
pub struct Checker {
    counter: Tensor<u64>,
    stream: Stream,
}

impl Checker {
    /// A checker whose kernels run on `stream`. Takes 2 MiB of a pool of its own.
    pub fn new(stream: &Stream) -> Outcome<Self> {
        let device = stream.device();
        let granularity = device.info().granularity;
        let config = PoolConfig::with_budget(granularity).granule(granularity);
        let mut counter = Tensor::new(&Pool::new(device, config)?, &[], 1)?;
        counter.grow_zeroed(1, stream)?;
        Ok(Self {
            counter,
            stream: stream.clone(),
        })
    }

    /// Queues a write of the pattern.
    pub fn write(&self, range: VaRange, seed: u64) -> Outcome {
        let kernel = Kernel::WritePattern { range, seed };
        Ok(self.driver().launch(kernel, self.stream.id())?)
    }

    /// Queues a check of the pattern; [`mismatches`](Self::mismatches) has the result.
    pub fn check(&self, range: VaRange, seed: u64) -> Outcome {
        let kernel = Kernel::CheckPattern {
            range,
            seed,
            mismatches: self.counter.ptr(),
        };
        Ok(self.driver().launch(kernel, self.stream.id())?)
    }

    /// Words found different since the checker was made. Waits for the stream.
    pub fn mismatches(&self) -> Outcome<u64> {
        let mut count = [0];
        self.counter.copy_to_host(0, &mut count, &self.stream)?;
        Ok(count[0])
    }

    fn driver(&self) -> &granule::driver::SharedDriver {
        self.stream.device().driver()
    }
}

/// A bar on standard error that hides itself where that is not a terminal.
pub fn progress(what: &str, steps: u64) -> ProgressBar {
    let bar = ProgressBar::new(steps);
    if let Ok(style) = ProgressStyle::with_template("{msg:<24} [{bar:40}] {pos}/{len} {eta}") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(what.to_owned());
    bar
}

/// Prints a line whether or not a bar is shown.
pub fn say(bar: &ProgressBar, line: &str) {
    bar.suspend(|| println!("{line}"));
}

/// The value of `--name value` among the arguments, if given.
pub fn option(name: &str) -> Outcome<Option<String>> {
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if argument == name {
            let value = arguments.next();
            return match value {
                Some(value) => Ok(Some(value)),
                None => Err(format!("{name} needs a value").into()),
            };
        }
    }
    Ok(None)
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

/// The value that `share` (0 to 1) of the sorted times do not exceed.
pub fn percentile(sorted: &[Duration], share: f64) -> Duration {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted
        .get(rank.clamp(1, sorted.len().max(1)) - 1)
        .copied()
        .unwrap_or_default()
}
