//! Settings of a heap.

use std::time::Duration;

use super::core::Policy as Layout;
use crate::units::{KIB, MIB, TIB};
use crate::{Error, Result};

/// How request sizes are rounded before they are placed. Everything is a multiple of 256 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Rounding {
    /// To 256 bytes: least memory.
    #[default]
    Exact,
    /// To a power of two: most reuse of equal sizes.
    PowerOfTwo,
    /// To one of `n` equal steps between two powers of two; `n` is a power of two. What PyTorch calls
    /// `roundup_power2_divisions`.
    Divisions(u32),
}

impl Rounding {
    /// `size` rounded, or `None` if that does not fit in 64 bits.
    #[inline]
    #[must_use]
    pub fn round(self, size: u64) -> Option<u64> {
        match self {
            Self::Exact => Some(size),
            Self::PowerOfTwo => size.checked_next_power_of_two(),
            Self::Divisions(n) => {
                let power = size.checked_next_power_of_two()?;
                let step = (power / 2 / u64::from(n)).max(1);
                size.checked_next_multiple_of(step)
            }
        }
    }
}

/// Settings of a [`Heap`](super::Heap). Sizes in bytes. The defaults reach a footprint within 2 % of
/// the live peak on the traces of `benches/RESULTS.md`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HeapConfig {
    /// How request sizes are rounded.
    pub rounding: Rounding,
    /// Blocks up to this size share granules of 2 MiB; 16 KiB by default and at least.
    pub small: u64,
    /// Largest granule; 64 MiB by default. A multiple of 2 MiB. A stream with less than 12 GiB live at most
    /// since memory last left it creates smaller ones, down to 10 MiB below 4.5 GiB.
    pub granule_max: u64,
    /// Growth takes at least this much where the footprint allows it; 32 MiB by default, half of the largest
    /// granule at most.
    pub granule_min: u64,
    /// New granules are at most one part in so many of what a stream may hold by the limit and the pool's budget;
    /// 2048 by default. More parts fit a job into a smaller budget, for more driver time: see the design page.
    /// 1 turns the rule off.
    pub granules: u32,
    /// Footprint aimed at over the live peak, in 1/10,000; 50 by default. Beyond it every free granule
    /// is used up before one is created.
    pub slack: u32,
    /// Addresses reserved for each stream; four times the pool's budget by default, at most 1 TiB.
    pub addresses: Option<u64>,
    /// Granules that may be mapped at two addresses at once for each stream, waiting for a fence; 1024
    /// by default (one allocation may pass it when there are no others). At the bound an allocation
    /// waits for the oldest, and takes new memory when that lasts too long. 0 waits before every
    /// remap and unmaps at once, so that a use after free faults.
    pub aliases: usize,
    /// How long an allocation may wait for work to finish when nothing else is left; one second by
    /// default. Zero is never, but for 10 ms in which calls of other threads may end. Waiting can deadlock if the work needs something this thread has
    /// yet to launch.
    pub wait: Duration,
    /// Most bytes this heap may hold, over all its streams; the pool's budget by default.
    pub limit: Option<u64>,
    /// How often the callback for lack of memory may be asked for one allocation; 16 by default. See
    /// [`Heap::set_oom_callback`](super::Heap::set_oom_callback).
    pub oom_attempts: u32,
}

impl Default for HeapConfig {
    fn default() -> Self {
        let layout = Layout::default();
        Self {
            rounding: Rounding::default(),
            small: layout.small_max,
            granule_max: layout.granule_max,
            granule_min: layout.granule_min,
            granules: layout.granules_of_limit,
            slack: layout.slack,
            addresses: None,
            aliases: 1024,
            wait: Duration::from_secs(1),
            limit: None,
            oom_attempts: 16,
        }
    }
}

/// A line of the core is addressed in 32 bits of 256-byte units.
pub(super) const LINE_MAX: u64 = TIB - 2 * MIB;

impl HeapConfig {
    pub(super) fn check(&self) -> Result<()> {
        let invalid = |what, value, why| Error::InvalidConfig { what, value, why };
        let granule = |what, value: u64| match value > 0 && value.is_multiple_of(2 * MIB) {
            true if value <= LINE_MAX => Ok(()),
            _ => Err(invalid(
                what,
                value,
                "it must be a multiple of 2 MiB, below 1 TiB",
            )),
        };
        granule("heap granule_max", self.granule_max)?;
        granule("heap granule_min", self.granule_min)?;
        if self.granules == 0 {
            return Err(invalid("heap granules", 0, "it must be 1 at least"));
        }
        if self.small < 16 * KIB {
            return Err(invalid(
                "heap small",
                self.small,
                "it must be 16 KiB at least",
            ));
        }
        match self.rounding {
            Rounding::Divisions(n) if !n.is_power_of_two() => Err(invalid(
                "rounding divisions",
                u64::from(n),
                "it must be a power of two",
            )),
            _ => Ok(()),
        }
    }

    pub(super) fn layout(&self) -> Layout {
        Layout {
            small_max: self.small,
            granule_max: self.granule_max,
            granule_min: self.granule_min,
            granules_of_limit: self.granules,
            slack: self.slack,
            ..Layout::default()
        }
    }

    /// Bytes of addresses of the small and the large line, for a budget.
    pub(super) fn lines(&self, budget: u64) -> (u64, u64) {
        Self::lines_of(self.addresses.unwrap_or(budget.saturating_mul(4)))
    }

    /// Bytes of addresses of the small and the large line of a lane with so many.
    pub(super) fn lines_of(all: u64) -> (u64, u64) {
        let whole = |bytes: u64| (bytes / (2 * MIB)).max(1) * (2 * MIB);
        let large = whole(all.min(LINE_MAX));
        (whole(large / 8), large)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_rules() {
        assert_eq!(Rounding::Exact.round(1000), Some(1000));
        assert_eq!(Rounding::PowerOfTwo.round(1025), Some(2048));
        assert_eq!(Rounding::Divisions(4).round(1025), Some(1280));
        assert_eq!(Rounding::Divisions(4).round(1024), Some(1024));
        assert_eq!(Rounding::PowerOfTwo.round(u64::MAX), None);
        assert_eq!(Rounding::Divisions(8).round(0), Some(0));
    }
}
