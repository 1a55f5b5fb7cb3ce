//! Choices that trade memory against driver time. The defaults come from the study over recorded traces.

use super::PAGE_BYTES;

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
    /// New granules are at most one part in so many of the live peak, if that is `peak_unit`. For other peaks they
    /// grow with its square.
    pub granules_of_peak: u32,
    /// The peak at which new granules are one part in `granules_of_peak` of it.
    pub peak_unit: u64,
    /// How long they may be in any case.
    pub granule_floor: u64,
    /// And in a block as long as this many of them: what is large is mapped in few calls, whatever the peak.
    pub granules_of_block: u32,
    /// New granules are at most one part in so many of the limit.
    pub granules_of_limit: u32,
    /// Free runs shorter than this are left whole if moving their granules would leave more of them behind than
    /// `crumbs`: 0 moves all.
    pub short_run: u64,
    /// What may be left behind of a short run, in 1/100 of it.
    pub crumbs: u32,
    /// Short runs are spared only while the footprint stays within so many 1/10,000 over the live peak.
    pub spared: u32,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            small_max: 16 << 10,
            granule_max: 64 << 20,
            granule_min: 32 << 20,
            slack: 50,
            granules_of_peak: 256,
            peak_unit: 8 << 30,
            granule_floor: 10 << 20,
            granules_of_block: 32,
            granules_of_limit: 2048,
            short_run: 24 << 20,
            crumbs: 15,
            spared: 500,
        }
    }
}

/// Lengths of new granules, in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// The longest.
    pub max: u32,
    /// The least that growth takes at once.
    pub step: u32,
}

impl Policy {
    /// Sizes for a block of `block` pages in a lane that holds `held` pages, whose live peak is `peak` pages and which
    /// may hold `limit` pages.
    ///
    /// What is free in a granule that also holds a block cannot move, so what a hole costs grows with the granules
    /// around it. A small heap has as many holes as a large one: its granules are smaller. A limit says what
    /// memory is worth: near it, granules are so small that a hole costs next to nothing.
    pub fn sizes(&self, block: u64, held: u64, peak: u64, limit: u64) -> Sizes {
        let pages = |bytes: u64| (bytes / PAGE_BYTES).max(1);
        let unit = pages(self.peak_unit).saturating_mul(u64::from(self.granules_of_peak.max(1)));
        let of_peak = (peak.saturating_mul(peak) / unit).max(pages(self.granule_floor));
        let of_limit = (limit / u64::from(self.granules_of_limit.max(1))).max(1);
        let of_block = block / u64::from(self.granules_of_block.max(1));
        let max = pages(self.granule_max)
            .min(of_peak.max(of_block))
            .min(of_limit);
        // Steps grow with the lane, so that a small one wastes little.
        let half = (max / 2).max(1);
        let step = pages(self.granule_min).min(half).min(held / 4).max(1);
        let short = |pages: u64| u32::try_from(pages).unwrap_or(u32::MAX);
        Sizes {
            max: short(max),
            step: short(step),
        }
    }

    /// Whether taking `whole` units of granules out of a free run of `run` units leaves too much of it behind.
    pub fn breaks(&self, run: u32, whole: u32) -> bool {
        let left = u64::from(run.saturating_sub(whole));
        u64::from(run) * super::UNIT < self.short_run
            && left * 100 > u64::from(run) * u64::from(self.crumbs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = (1 << 30) / PAGE_BYTES;
    const NONE: u64 = u64::MAX;

    fn sizes(peak: u64, limit: u64) -> (u32, u32) {
        let sizes = Policy::default().sizes(1, peak, peak, limit);
        (sizes.max * 2, sizes.step * 2)
    }

    #[test]
    fn granules_grow_with_the_square_of_the_peak() {
        let all = [1, 5, 6, 8, 10, 12, 100].map(|gib| sizes(gib * GIB, NONE).0);
        assert_eq!(all, [10, 12, 18, 32, 50, 64, 64]);
        assert_eq!(sizes(4 * GIB, NONE).1, 4);
        assert_eq!(sizes(100 * GIB, NONE).1, 32);
    }

    #[test]
    fn a_large_block_has_long_granules_where_no_limit_is_near() {
        let of = |block, limit| Policy::default().sizes(block, 0, block, limit).max * 2;
        let all = [GIB / 4, GIB / 2, GIB, 2 * GIB, 4 * GIB].map(|block| of(block, NONE));
        assert_eq!(all, [10, 16, 32, 64, 64]);
        assert_eq!(of(4 * GIB, 8 * GIB), 4);
    }

    #[test]
    fn a_limit_bounds_granules_by_its_part() {
        assert_eq!(sizes(100 * GIB, 140 * GIB), (64, 32));
        assert_eq!(sizes(30 * GIB, 32 * GIB), (16, 8));
        assert_eq!(sizes(9 * GIB, 10 * GIB), (4, 2));
        assert_eq!(sizes(1, 2), (2, 2));
    }

    #[test]
    fn the_settings_bound_what_the_rules_give() {
        let policy = Policy {
            granule_max: 8 << 20,
            granule_min: 6 << 20,
            ..Policy::default()
        };
        let one = |held, peak, limit| policy.sizes(1, held, peak, limit);
        assert_eq!(one(GIB, GIB, NONE), Sizes { max: 4, step: 2 });
        // small heaps grow in small steps
        assert_eq!(one(0, 1, NONE), Sizes { max: 4, step: 1 });
        let off = Policy {
            granules_of_limit: 1,
            ..Policy::default()
        };
        assert_eq!(off.sizes(1, GIB, 20 * GIB, 21 * GIB).max, 32);
    }

    #[test]
    fn extreme_settings_give_some_size() {
        for (peak, limit) in [(0, 0), (u64::MAX, u64::MAX), (u64::MAX, 0)] {
            for granules in [0, 1, u32::MAX] {
                let policy = Policy {
                    granules_of_limit: granules,
                    granules_of_peak: granules,
                    granules_of_block: granules,
                    peak_unit: 0,
                    granule_floor: 0,
                    ..Policy::default()
                };
                let sizes = policy.sizes(peak, peak, peak, limit);
                assert!(
                    sizes.step >= 1 && sizes.max >= sizes.step.min(2),
                    "{sizes:?}"
                );
                assert!(sizes.max <= 32);
            }
        }
    }

    #[test]
    fn only_short_runs_that_leave_much_behind_are_spared() {
        let policy = Policy::default();
        let mib = 4096;
        assert!(policy.breaks(20 * mib, 16 * mib));
        assert!(!policy.breaks(18 * mib, 16 * mib));
        assert!(!policy.breaks(24 * mib, 16 * mib));
        assert!(!policy.breaks(16 * mib, 16 * mib));
        assert!(
            !Policy {
                short_run: 0,
                ..policy
            }
            .breaks(20 * mib, 2 * mib)
        );
    }
}
