//! What driver calls and device work cost, as a table of measured points and pure functions of
//! it. The sim charges its clock from here; planners ask the same table what a step would cost.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign};
use std::time::Duration;

use crate::units::{GIB, MIB};
use crate::{Error, Result};

/// A point in virtual time, or a span of it, in nanoseconds. Sums saturate (after 584 years).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Nanos(pub u64);

impl Nanos {
    /// No time.
    pub const ZERO: Self = Self(0);

    /// That many microseconds; saturates.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros.saturating_mul(1000))
    }

    /// `self - earlier`, or zero when `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }
}

impl Add for Nanos {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Nanos {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for Nanos {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::ZERO, Add::add)
    }
}

impl From<Nanos> for Duration {
    fn from(nanos: Nanos) -> Self {
        Self::from_nanos(nanos.0)
    }
}

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&Duration::from(*self), f)
    }
}

/// Time as a function of a length in bytes: straight lines between measured points, the first
/// point's time below it, the last segment's slope (if it rises) above the last.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Curve {
    points: Vec<(u64, Nanos)>,
}

impl Curve {
    /// A curve through points of ascending length.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`] without points, or when lengths do not ascend.
    pub fn new(points: impl Into<Vec<(u64, Nanos)>>) -> Result<Self> {
        let points = points.into();
        let refuse = |value, why| Error::InvalidConfig {
            what: "cost curve",
            value,
            why,
        };
        if points.is_empty() {
            return Err(refuse(0, "it has no points"));
        }
        match points.windows(2).find(|w| w[0].0 >= w[1].0) {
            Some(w) => Err(refuse(w[1].0, "lengths must ascend")),
            None => Ok(Self { points }),
        }
    }

    /// The same time for every length.
    #[must_use]
    pub fn flat(nanos: Nanos) -> Self {
        Self {
            points: vec![(0, nanos)],
        }
    }

    /// Times measured at the five lengths of the H200 table.
    fn measured(nanos: [u64; 5]) -> Self {
        let lens = [2 * MIB, 32 * MIB, 256 * MIB, GIB, 4 * GIB];
        Self {
            points: lens.into_iter().zip(nanos.map(Nanos)).collect(),
        }
    }

    /// The points, by ascending length.
    #[must_use]
    pub fn points(&self) -> &[(u64, Nanos)] {
        &self.points
    }

    /// The time for `len` bytes.
    #[must_use]
    pub fn at(&self, len: u64) -> Nanos {
        let after = self.points.partition_point(|p| p.0 <= len);
        let (left, right) = match (after, self.points.as_slice()) {
            (_, []) => return Nanos::ZERO,
            (0, [first, ..]) => return first.1,
            (_, [only]) => return only.1,
            (n, all) if n == all.len() => (all[n - 2], all[n - 1]),
            (n, all) => (all[n - 1], all[n]),
        };
        let (run, steps) = (u128::from(right.0 - left.0), u128::from(len - left.0));
        if right.1 >= left.1 {
            let rise = right.1.0 - left.1.0;
            // Mostly it fits into 64 bits, which divide much faster.
            let rise = match rise.checked_mul(len - left.0) {
                Some(product) => product / (right.0 - left.0),
                None => u64::try_from(u128::from(rise) * steps / run).unwrap_or(u64::MAX),
            };
            left.1 + Nanos(rise)
        } else {
            let fall = u128::from(left.1.0 - right.1.0) * steps.min(run) / run;
            Nanos(left.1.0 - u64::try_from(fall).unwrap_or(left.1.0))
        }
    }
}

/// Bytes per second.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Rate(pub u64);

impl Rate {
    /// That many GB (10^9 bytes) per second; saturates.
    #[must_use]
    pub const fn gb_per_s(gb: u64) -> Self {
        Self(gb.saturating_mul(1_000_000_000))
    }

    /// The time that `len` bytes take, rounded down; for ever at a rate of zero.
    #[must_use]
    pub fn time(self, len: u64) -> Nanos {
        let nanos = (u128::from(len) * 1_000_000_000).checked_div(u128::from(self.0));
        Nanos(nanos.map_or(u64::MAX, |n| u64::try_from(n).unwrap_or(u64::MAX)))
    }
}

/// The cost of every driver call (host time) and of device work (time on the stream).
///
/// [`Default`] is one H200 with driver 580: the curves, `reserve`, `event_record` and
/// `event_query` are measured there, `read` is the measured bandwidth of a reading kernel. The
/// other fields are estimates of the right order and marked as such.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CostTable {
    /// `create`, by length.
    pub create: Curve,
    /// `map`, by length.
    pub map: Curve,
    /// `set_access`, by length of each mapping.
    pub set_access: Curve,
    /// `unmap`, by length of each mapping.
    pub unmap: Curve,
    /// `release`, by length.
    pub release: Curve,
    /// Copying within the device, time on the stream.
    pub copy: Curve,
    /// Copying many parts as one batch, time on the stream, by their total length (estimate).
    pub batch: Curve,
    /// What `set_access` costs more for each peer that also gets access, a mapping.
    pub peer_access: Nanos,
    /// What `unmap` costs more for each peer that has access, a mapping.
    pub peer_unmap: Nanos,
    /// `reserve`, whatever the length.
    pub reserve: Nanos,
    /// `free_reservation`, whatever the length.
    pub free_reservation: Nanos,
    /// `memory_info` (estimate).
    pub memory_info: Nanos,
    /// `create_stream` and `destroy_stream` (estimate).
    pub stream: Nanos,
    /// `create_event` and `destroy_event` (estimate).
    pub event: Nanos,
    /// `record_event`.
    pub event_record: Nanos,
    /// `query_event`, and the host's part of a sync.
    pub event_query: Nanos,
    /// `wait_event` (estimate).
    pub wait_event: Nanos,
    /// Host time of queueing a fill, a copy, a kernel or a hold (estimate).
    pub launch: Nanos,
    /// Shortest time of a kernel or fill on the stream (estimate).
    pub kernel: Nanos,
    /// Filling and writing kernels (estimate: as fast as reading).
    pub fill: Rate,
    /// Reading kernels.
    pub read: Rate,
    /// Copies from and to the host (estimate).
    pub host: Rate,
}

impl Default for CostTable {
    fn default() -> Self {
        Self {
            create: Curve::measured([8_000, 8_000, 11_000, 20_000, 88_000]),
            map: Curve::measured([500, 500, 500, 600, 900]),
            set_access: Curve::measured([22_000, 22_000, 35_000, 50_000, 130_000]),
            unmap: Curve::measured([16_000, 15_000, 20_000, 25_000, 51_000]),
            release: Curve::measured([10_000, 16_000, 125_000, 285_000, 1_100_000]),
            copy: Curve::measured([14_000, 23_000, 144_000, 565_000, 2_240_000]),
            batch: Curve::measured([7_000, 22_000, 141_000, 555_000, 2_210_000]),
            peer_access: Nanos(2_500_000),
            peer_unmap: Nanos(900_000),
            reserve: Nanos(3_000),
            free_reservation: Nanos(3_000),
            memory_info: Nanos(1_000),
            stream: Nanos(5_000),
            event: Nanos(500),
            event_record: Nanos(250),
            event_query: Nanos(300),
            wait_event: Nanos(250),
            launch: Nanos(2_000),
            kernel: Nanos(2_000),
            fill: Rate::gb_per_s(4_600),
            read: Rate::gb_per_s(4_600),
            host: Rate::gb_per_s(50),
        }
    }
}

impl CostTable {
    /// Creating a granule of `len` bytes.
    #[must_use]
    pub fn create(&self, len: u64) -> Nanos {
        self.create.at(len)
    }

    /// Mapping a granule of `len` bytes.
    #[must_use]
    pub fn map(&self, len: u64) -> Nanos {
        self.map.at(len)
    }

    /// Setting access of one mapping of `len` bytes.
    #[must_use]
    pub fn set_access(&self, len: u64) -> Nanos {
        self.set_access.at(len)
    }

    /// Removing one mapping of `len` bytes.
    #[must_use]
    pub fn unmap(&self, len: u64) -> Nanos {
        self.unmap.at(len)
    }

    /// Releasing a granule of `len` bytes.
    #[must_use]
    pub fn release(&self, len: u64) -> Nanos {
        self.release.at(len)
    }

    /// Making a mapping of `len` bytes usable here and by `peers` other devices: map, set access.
    #[must_use]
    pub fn open(&self, len: u64, peers: u32) -> Nanos {
        let peers = self.peer_access.0.saturating_mul(u64::from(peers));
        self.map(len) + self.set_access(len) + Nanos(peers)
    }

    /// Removing a mapping of `len` bytes that `peers` other devices have access to.
    #[must_use]
    pub fn close(&self, len: u64, peers: u32) -> Nanos {
        self.unmap(len) + Nanos(self.peer_unmap.0.saturating_mul(u64::from(peers)))
    }

    /// Stream time of copying parts of `len` bytes in all as one batch.
    #[must_use]
    pub fn copy_batch(&self, len: u64) -> Nanos {
        self.batch.at(len)
    }

    /// Host time of moving a granule of `len` bytes by remapping: map, set access, unmap.
    #[must_use]
    pub fn remap(&self, len: u64) -> Nanos {
        self.map(len) + self.set_access(len) + self.unmap(len)
    }

    /// Stream time of copying `len` bytes within the device.
    #[must_use]
    pub fn copy(&self, len: u64) -> Nanos {
        self.copy.at(len)
    }

    /// Stream time of filling, or writing by a kernel, `len` bytes.
    #[must_use]
    pub fn fill(&self, len: u64) -> Nanos {
        self.kernel.max(self.fill.time(len))
    }

    /// Stream time of a kernel that reads `len` bytes.
    #[must_use]
    pub fn read(&self, len: u64) -> Nanos {
        self.kernel.max(self.read.time(len))
    }

    /// Stream time of copying `len` bytes from or to the host.
    #[must_use]
    pub fn host_copy(&self, len: u64) -> Nanos {
        self.kernel.max(self.host.time(len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_meet_their_points_and_run_straight_between() {
        let t = CostTable::default();
        assert_eq!(t.create(2 * MIB), Nanos(8_000));
        assert_eq!(t.create(1), Nanos(8_000));
        assert_eq!(t.set_access(256 * MIB), Nanos(35_000));
        assert_eq!(t.release(144 * MIB), Nanos(70_500));
        assert_eq!(t.unmap(17 * MIB), Nanos(15_500), "a falling segment");
        assert_eq!(t.copy(7 * GIB), Nanos(2_240_000 + 1_675_000));
        assert!(t.copy(u64::MAX) > t.copy(1 << 60));
    }

    #[test]
    fn the_break_even_of_remapping_is_where_it_was_measured() {
        // "About 80 MiB per handle": copying 32 MiB is cheaper than remapping it, 256 MiB is not.
        let t = CostTable::default();
        assert!(t.copy(32 * MIB) < t.remap(32 * MIB));
        assert!(t.remap(128 * MIB) < t.copy(128 * MIB));
        assert!(t.remap(256 * MIB).0 * 2 < t.copy(256 * MIB).0);
    }

    #[test]
    fn curves_refuse_disorder() {
        assert!(Curve::new([]).is_err());
        assert!(Curve::new([(5, Nanos(1)), (5, Nanos(2))]).is_err());
        let falling = Curve::new([(0, Nanos(10)), (10, Nanos(0))]).unwrap();
        assert_eq!(falling.at(5), Nanos(5));
        assert_eq!(falling.at(1000), Nanos(0), "never below the last point");
        assert_eq!(Curve::flat(Nanos(7)).at(u64::MAX), Nanos(7));
        assert_eq!(Rate(0).time(1), Nanos(u64::MAX));
    }
}
