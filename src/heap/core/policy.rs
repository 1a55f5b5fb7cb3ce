//! Choices that trade memory against driver time. The defaults come from the study over recorded traces.

/// How a lane lays out its memory. Sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Blocks up to this size go to the line of small blocks. At least 16 KiB.
    pub small_max: u64,
    /// The largest granule that is created: a multiple of 2 MiB.
    pub granule_max: u64,
    /// Growth takes at least this much at once, where the footprint allows it: a multiple of 2 MiB.
    pub granule_min: u64,
    /// The footprint aimed at, in 1/10,000 over the live peak. `granule_min` is granted on top.
    /// Beyond it, a miss first uses up every free granule, however small, and creates only what is missing.
    pub slack: u32,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            small_max: 16 << 10,
            granule_max: 64 << 20,
            granule_min: 32 << 20,
            slack: 75,
        }
    }
}
