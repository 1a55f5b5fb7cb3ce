//! The cost table of the device at hand: measured in a moment, written down, read back.

use std::fmt::{self, Display};
use std::str::FromStr;
use std::time::Instant;

use super::cost::{CostTable, Curve, Nanos};
use super::sim::SimDriver;
use super::{
    Access, Call, CopyPart, Driver, DriverCode, DriverError, DriverKind, DriverResult,
    GranuleProps, PhysId, StreamId,
};
use crate::units::{GIB, MIB, VaRange};
use crate::{Error, Result};

/// How [`measure`] goes about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MeasureConfig {
    /// The longest granule to try, in bytes; twice as much memory is taken for a moment. Longer ones
    /// are extrapolated.
    pub most: u64,
    /// Rounds for each length; the median counts.
    pub rounds: u32,
}

impl MeasureConfig {
    /// Lengths up to 4 GiB on CUDA and the sim, up to 8 MiB on the host driver, whose memory is slow
    /// to touch first, and at most a sixteenth of the device's memory; five rounds. That takes some
    /// 0.1 s on an H200.
    #[must_use]
    pub fn of(driver: &dyn Driver) -> Self {
        let most = match driver.kind() {
            DriverKind::Host => 8 * MIB,
            _ => 4 * GIB,
        };
        Self {
            most: most.min(driver.info().total_memory / 16),
            rounds: 5,
        }
    }
}

/// Times of one length, in nanoseconds.
#[derive(Default)]
struct Samples {
    create: Vec<u64>,
    map: Vec<u64>,
    set_access: Vec<u64>,
    unmap: Vec<u64>,
    release: Vec<u64>,
    copy: Vec<u64>,
    batch: Vec<u64>,
    launch: Vec<u64>,
}

/// A clock that is right for the driver.
struct Clock<'a> {
    sim: Option<&'a SimDriver>,
    start: Instant,
}

impl<'a> Clock<'a> {
    fn of(driver: &'a dyn Driver) -> Self {
        Self {
            sim: driver.as_any().downcast_ref(),
            start: Instant::now(),
        }
    }

    fn now(&self) -> u64 {
        match self.sim {
            Some(sim) => sim.now().0,
            None => u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX),
        }
    }

    fn time<T>(
        &self,
        samples: &mut Vec<u64>,
        run: impl FnOnce() -> DriverResult<T>,
    ) -> DriverResult<T> {
        let start = self.now();
        let answer = run()?;
        samples.push(self.now().saturating_sub(start));
        Ok(answer)
    }
}

/// Measures what calls and copies cost on this device: create, map, set access, unmap, release, and
/// copies by length. What is not measured is as in [`CostTable::default`]: the costs of peers, of
/// events and of reservations, the rates of kernels.
///
/// Blocks the thread until its copies are done. Memory and addresses are given back; memory that was
/// released is scrubbed by a CUDA driver before it is created again, so creation counts by its
/// fastest round.
///
/// # Errors
///
/// The first driver error. Everything that the driver takes back has been given back then.
pub fn measure(driver: &dyn Driver, config: MeasureConfig) -> DriverResult<CostTable> {
    let unit = driver.info().granularity;
    let mut lens: Vec<u64> = [2 * MIB, 8 * MIB, 32 * MIB, 256 * MIB, GIB, 4 * GIB]
        .into_iter()
        .map(|len| len.max(unit))
        .filter(|len| *len == unit || *len <= config.most)
        .collect();
    lens.dedup();
    let clock = Clock::of(driver);
    let stream = driver.create_stream()?;
    let mut all = Vec::new();
    let mut outcome = Ok(());
    for len in lens {
        let mut samples = Samples::default();
        for _ in 0..config.rounds.max(1) {
            outcome = outcome.and_then(|()| round(driver, &clock, stream, len, &mut samples));
        }
        all.push((len, samples));
    }
    // The first error is the one to report.
    outcome.and(driver.destroy_stream(stream))?;
    Ok(table(all))
}

fn round(
    driver: &dyn Driver,
    clock: &Clock<'_>,
    stream: StreamId,
    len: u64,
    samples: &mut Samples,
) -> DriverResult<()> {
    let both = len
        .checked_mul(2)
        .ok_or(DriverError::new(Call::Reserve, DriverCode::INVALID_VALUE))?;
    let range = driver.reserve(both, 0)?;
    let mut made: Vec<(PhysId, Option<VaRange>)> = Vec::new();
    let outcome = use_both(driver, clock, stream, range, samples, &mut made);
    // Nothing may run on memory that goes away.
    let outcome = outcome.and(driver.sync_stream(stream));
    let mut undone = Ok(());
    for (phys, at) in made {
        if let Some(at) = at {
            undone = undone.and(clock.time(&mut samples.unmap, || driver.unmap(at)));
        }
        undone = undone.and(clock.time(&mut samples.release, || driver.release(phys)));
    }
    outcome.and(undone).and(driver.free_reservation(range))
}

fn use_both(
    driver: &dyn Driver,
    clock: &Clock<'_>,
    stream: StreamId,
    range: VaRange,
    samples: &mut Samples,
    made: &mut Vec<(PhysId, Option<VaRange>)>,
) -> DriverResult<()> {
    let len = range.len() / 2;
    let outside = DriverError::new(Call::Map, DriverCode::INVALID_VALUE);
    let halves = [
        range.sub(0, len).ok_or(outside)?,
        range.sub(len, len).ok_or(outside)?,
    ];
    for half in halves {
        let props = GranuleProps::default();
        let phys = clock.time(&mut samples.create, || driver.create(len, props))?;
        made.push((phys, None));
        clock.time(&mut samples.map, || driver.map(half, phys))?;
        if let Some(last) = made.last_mut() {
            last.1 = Some(half);
        }
        let open = || driver.set_access(half, Access::ReadWrite);
        clock.time(&mut samples.set_access, open)?;
    }
    let [src, dst] = halves;
    // Not timed: the first touch of memory, and the loading of the kernels.
    driver.fill(range, 0, stream)?;
    let part = |at: u64, len: u64| CopyPart {
        dst: dst.sub(at, len).map_or(dst.start(), VaRange::start),
        src: src.sub(at, len).unwrap_or(VaRange::EMPTY),
    };
    driver.copy_batch(&[part(0, 4096)], stream)?;
    driver.sync_stream(stream)?;
    clock.time(&mut samples.copy, || {
        driver.copy(dst.start(), src, stream)?;
        driver.sync_stream(stream)
    })?;
    let piece = (len / 64).max(MIB).min(len);
    let parts: Vec<CopyPart> = (0..len / piece).map(|i| part(i * piece, piece)).collect();
    clock.time(&mut samples.batch, || {
        clock.time(&mut samples.launch, || driver.copy_batch(&parts, stream))?;
        driver.sync_stream(stream)
    })
}

fn median(samples: &mut [u64]) -> u64 {
    samples.sort_unstable();
    samples.get(samples.len() / 2).copied().unwrap_or(0)
}

fn table(mut all: Vec<(u64, Samples)>) -> CostTable {
    let mut table = CostTable::default();
    let mut curve = |into: &mut Curve, of: &dyn Fn(&mut Samples) -> u64| {
        let points: Vec<(u64, Nanos)> = all.iter_mut().map(|(l, s)| (*l, Nanos(of(s)))).collect();
        // Lengths ascend, so it is only refused when nothing was measured.
        if let Ok(curve) = Curve::new(points) {
            *into = curve;
        }
    };
    curve(&mut table.create, &|s| {
        s.create.iter().copied().min().unwrap_or(0)
    });
    curve(&mut table.map, &|s| median(&mut s.map));
    curve(&mut table.set_access, &|s| median(&mut s.set_access));
    curve(&mut table.unmap, &|s| median(&mut s.unmap));
    curve(&mut table.release, &|s| median(&mut s.release));
    curve(&mut table.copy, &|s| median(&mut s.copy));
    curve(&mut table.batch, &|s| median(&mut s.batch));
    if let Some((_, first)) = all.first_mut() {
        table.launch = Nanos(median(&mut first.launch));
    }
    table
}

macro_rules! written {
    (curves: $($curve:ident)+; times: $($time:ident)+; rates: $($rate:ident)+;) => {
        /// One entry a line: a name, for curves a length in bytes, and nanoseconds (bytes a second
        /// for rates). [`FromStr`] reads it back.
        impl Display for CostTable {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                $(for (len, time) in self.$curve.points() {
                    writeln!(f, concat!(stringify!($curve), " {} {}"), len, time.0)?;
                })+
                $(writeln!(f, concat!(stringify!($time), " {}"), self.$time.0)?;)+
                $(writeln!(f, concat!(stringify!($rate), " {}"), self.$rate.0)?;)+
                Ok(())
            }
        }

        /// Reads what [`Display`] writes. Empty lines and lines that start with `#` are passed over;
        /// what is not given is as in [`CostTable::default`].
        impl FromStr for CostTable {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self> {
                let mut table = Self::default();
                $(let mut $curve: Vec<(u64, Nanos)> = Vec::new();)+
                for (number, line) in (1u64..).zip(text.lines()) {
                    let refused = |why| Error::InvalidConfig {
                        what: "line of a cost table",
                        value: number,
                        why,
                    };
                    let words: Vec<&str> = line.split_whitespace().collect();
                    let Some((name, values)) = words.split_first() else {
                        continue;
                    };
                    if name.starts_with('#') {
                        continue;
                    }
                    let values: Vec<u64> = values
                        .iter()
                        .map(|word| word.parse().map_err(|_| refused("not a number")))
                        .collect::<Result<_>>()?;
                    match (*name, values.as_slice()) {
                        $((stringify!($curve), [len, time]) => {
                            $curve.push((*len, Nanos(*time)));
                        })+
                        $((stringify!($time), [time]) => table.$time.0 = *time,)+
                        $((stringify!($rate), [rate]) => table.$rate.0 = *rate,)+
                        _ => return Err(refused("unknown name or wrong number of values")),
                    }
                }
                $(if !$curve.is_empty() {
                    table.$curve = Curve::new($curve)?;
                })+
                Ok(table)
            }
        }
    };
}

written! {
    curves: create map set_access unmap release copy batch;
    times: peer_access peer_unmap reserve free_reservation memory_info stream event event_record
        event_query wait_event launch kernel;
    rates: fill read host;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::sim::SimConfig;

    #[test]
    fn the_sim_is_measured_to_cost_what_it_charges() {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        let (table, known) = (
            measure(&sim, MeasureConfig::of(&sim)).unwrap(),
            CostTable::default(),
        );
        for len in [2 * MIB, 32 * MIB, 256 * MIB, GIB, 4 * GIB] {
            assert_eq!(table.create(len), known.create(len));
            assert_eq!(table.map(len), known.map(len));
            assert_eq!(table.set_access(len), known.set_access(len));
            assert_eq!(table.unmap(len), known.unmap(len));
            assert_eq!(table.release(len), known.release(len));
            let launching = known.launch + known.event_query;
            assert!(table.copy(len).0 >= known.copy(len).0, "{len}");
            assert!(table.copy(len).0 <= (known.copy(len) + launching).0);
        }
        assert_eq!(
            sim.live().granules + sim.live().reservations + sim.live().streams,
            0
        );
    }

    #[test]
    fn a_table_that_is_written_is_read_back() {
        let table = CostTable {
            create: Curve::flat(Nanos(17)),
            peer_access: Nanos(3),
            ..CostTable::default()
        };
        let text = format!("# a comment\n\n{table}");
        assert_eq!(text.parse::<CostTable>().unwrap(), table);
        assert!("create 5".parse::<CostTable>().is_err());
        assert!("kernel x".parse::<CostTable>().is_err());
        assert!("creates 5 5".parse::<CostTable>().is_err());
        assert!("copy 5 1\ncopy 5 2".parse::<CostTable>().is_err());
    }
}
