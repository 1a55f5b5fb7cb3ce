//! Settings of a pool, and what they default to.

use std::time::Duration;

use crate::driver::GranuleProps;
use crate::units::{GIB, MIB};
use crate::{Device, Error, Result};

/// Default granule: 256 MiB, where mapping costs a third of copying as many bytes.
pub const DEFAULT_GRANULE: u64 = 256 * MIB;

/// Default for the largest granule: one growth of a gibibyte or more takes granules of 1 GiB.
pub const DEFAULT_LARGEST_GRANULE: u64 = GIB;

/// When a pool takes memory from the device and when it gives it back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// The whole budget is created up front, in granules of [`PoolConfig::granule`], and never
    /// returned. Nothing can fail for want of device memory later.
    Static,
    /// Created when needed; returned as soon as it is idle, beyond the watermark (0 by default).
    Dynamic,
    /// `base` bytes are created up front and never returned; the rest is elastic and kept idle up
    /// to the watermark (an eighth of the budget by default).
    Hybrid {
        /// Bytes that are static; rounded up to whole granules.
        base: u64,
    },
}

impl Default for Policy {
    /// A hybrid without a static base.
    fn default() -> Self {
        Self::Hybrid { base: 0 }
    }
}

/// Settings of a [`Pool`](crate::Pool). All sizes in bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolConfig {
    /// The most that may be created at a time; the device's whole memory by default.
    pub budget: Option<u64>,
    /// The granule: the unit of static memory and of spares. A multiple of the device's granularity
    /// by a power of two; [`DEFAULT_GRANULE`] by default.
    pub granule: u64,
    /// The largest granule. Mappings cost per granule and not per byte, so one growth of this size or
    /// more takes granules of this size, and so do the steps of an arena eight times as large. Memory
    /// is given back in whole granules: set it to `granule` for arenas that grow at once and shrink in
    /// steps. [`DEFAULT_LARGEST_GRANULE`] by default; at least `granule`; a power of two times it.
    pub largest_granule: u64,
    /// See [`Policy`].
    pub policy: Policy,
    /// Idle bytes kept for reuse; what is beyond is released. The policy's default if `None`.
    pub watermark: Option<u64>,
    /// Footprint aimed at over the highest `mapped` so far, in 1/10,000. Memory that is created beyond it
    /// takes the place of idle granules, which do not fit the need and are released first. `None` (the
    /// default) lets the pool grow beside them, up to the budget. For pools whose takers want many
    /// different sizes, such as a heap beside arenas; a release costs 10 to 170 us (H200).
    pub slack: Option<u32>,
    /// Zero memory of one arena before another gets it. The device zeroes only fresh memory.
    pub zero_on_handover: bool,
    /// Idle bytes that a thread of the pool keeps created ahead of need; 0 (off) by default.
    pub spare: u64,
    /// How long an allocation may wait for the fences of deferred shrinks when nothing else is
    /// left; one second by default. Zero turns that off (driver calls of other threads are still
    /// given 10 ms to end): a wait can deadlock when the awaited
    /// work needs something this thread has yet to launch, such as a collective.
    pub wait: Duration,
    /// How granules are created.
    pub props: GranuleProps,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            budget: None,
            granule: DEFAULT_GRANULE,
            largest_granule: DEFAULT_LARGEST_GRANULE,
            policy: Policy::default(),
            watermark: None,
            slack: None,
            zero_on_handover: false,
            spare: 0,
            wait: Duration::from_secs(1),
            props: GranuleProps::default(),
        }
    }
}

impl PoolConfig {
    /// The defaults with another budget.
    #[must_use]
    pub fn with_budget(bytes: u64) -> Self {
        Self {
            budget: Some(bytes),
            ..Self::default()
        }
    }

    /// The settings with a granule of that many bytes, for small growths and large ones alike.
    #[must_use]
    pub fn granule(self, bytes: u64) -> Self {
        Self {
            granule: bytes,
            largest_granule: bytes,
            ..self
        }
    }

    /// The settings with that policy.
    #[must_use]
    pub fn policy(self, policy: Policy) -> Self {
        Self { policy, ..self }
    }

    pub(super) fn check(&self, device: &Device) -> Result<Checked> {
        let granularity = device.info().granularity;
        let invalid = |what, value, why| Error::InvalidConfig { what, value, why };
        let multiple = |value: u64, of: u64| {
            value != 0 && value.is_multiple_of(of) && (value / of).is_power_of_two()
        };
        if !multiple(self.granule, granularity) {
            return Err(invalid(
                "granule",
                self.granule,
                "it must be the device's granularity times a power of two",
            ));
        }
        if !multiple(self.largest_granule, self.granule) {
            return Err(invalid(
                "largest granule",
                self.largest_granule,
                "it must be the granule times a power of two",
            ));
        }
        let budget = match self.budget {
            Some(bytes) => bytes,
            None => device.info().total_memory,
        };
        let floor = match self.policy {
            Policy::Static => budget - budget % self.granule,
            Policy::Dynamic => 0,
            Policy::Hybrid { base } => base
                .checked_next_multiple_of(self.granule)
                .filter(|base| *base <= budget)
                .ok_or(invalid("static base", base, "it is larger than the budget"))?,
        };
        let watermark = self.watermark.unwrap_or(match self.policy {
            Policy::Static => u64::MAX,
            Policy::Dynamic => 0,
            Policy::Hybrid { .. } => budget / 8,
        });
        Ok(Checked {
            budget,
            floor,
            watermark,
            slack: self.slack,
            granularity,
        })
    }
}

/// What the settings come to on a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Checked {
    pub(super) budget: u64,
    pub(super) floor: u64,
    pub(super) watermark: u64,
    pub(super) slack: Option<u32>,
    pub(super) granularity: u64,
}
