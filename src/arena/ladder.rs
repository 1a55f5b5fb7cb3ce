//! How far an arena maps when it grows: pure.
//!
//! An arena that grows little by little maps a step that follows its size, so that at most an
//! eighth is mapped in vain and the number of mappings stays logarithmic until steps reach the
//! largest granule; from there on it is bytes / granule.

use crate::units::{round_down, round_up};

/// Mapped in vain at most: one part in this many.
pub(crate) const WASTE: u64 = 8;

/// Bounds of the steps, in bytes; powers of two times the device's granularity.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ladder {
    pub(crate) smallest: u64,
    pub(crate) largest: u64,
}

impl Ladder {
    /// Step of an arena with `mapped` bytes.
    fn step(self, mapped: u64) -> u64 {
        let mut step = self.largest;
        while step > self.smallest && step > mapped / WASTE {
            step /= 2;
        }
        step
    }

    /// As [`missing`](Self::missing), without looking further than `to`: for a pool that is short.
    pub(crate) fn exactly(self, mapped: u64, to: u64) -> u64 {
        let exact = to.saturating_sub(mapped);
        round_up(exact, self.smallest).unwrap_or(u64::MAX)
    }

    /// Bytes to map, beyond the `mapped` ones, for a length of `to`, without passing `capacity`.
    /// Zero if `to` is mapped already.
    ///
    /// `mapped` and `capacity` are multiples of the smallest step and `to <= capacity`.
    pub(crate) fn missing(self, mapped: u64, to: u64, capacity: u64) -> u64 {
        if to <= mapped {
            return 0;
        }
        let step = self.step(mapped);
        let exact = to - mapped;
        let stepped = round_up(exact, step).unwrap_or(u64::MAX);
        stepped.min(round_down(capacity, self.smallest) - mapped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{GIB, MIB};
    use proptest::prelude::*;

    const LADDER: Ladder = Ladder {
        smallest: 2 * MIB,
        largest: GIB,
    };

    #[test]
    fn small_arenas_take_small_steps_and_large_ones_whole_granules() {
        assert_eq!(LADDER.missing(0, 1, GIB), 2 * MIB);
        assert_eq!(LADDER.missing(64 * MIB, 64 * MIB + 1, GIB), 8 * MIB);
        assert_eq!(LADDER.missing(8 * GIB, 8 * GIB + 1, 16 * GIB), GIB);
        assert_eq!(LADDER.missing(64 * GIB, 64 * GIB + 1, 99 * GIB), GIB);
        assert_eq!(LADDER.missing(0, GIB, GIB), GIB);
        assert_eq!(LADDER.exactly(8 * GIB, 8 * GIB + 1), 2 * MIB);
        assert_eq!(LADDER.missing(GIB, GIB, 2 * GIB), 0);
    }

    #[test]
    fn the_reservation_bounds_the_last_step() {
        assert_eq!(
            LADDER.missing(8 * GIB, 8 * GIB + 1, 8 * GIB + 6 * MIB),
            6 * MIB
        );
    }

    #[test]
    fn growth_by_small_steps_needs_few_mappings() {
        let (mut mapped, mut mappings) = (0, 0);
        while mapped < 16 * GIB {
            mapped += LADDER.missing(mapped, mapped + 1, 64 * GIB);
            mappings += 1;
        }
        // 8 steps for the first 16 MiB and for each of the 9 doublings up to 8 GiB, then one a GiB.
        assert!(mappings <= 8 + 9 * 8 + 8, "{mappings}");
    }

    proptest! {
        #[test]
        fn covers_without_waste(mapped in 0u64..8192, more in 1u64..(4 * GIB), spare in 0u64..4096) {
            let mapped = mapped * 2 * MIB;
            let to = mapped + more;
            let capacity = (to + spare * 2 * MIB).next_multiple_of(2 * MIB);
            let bytes = LADDER.missing(mapped, to, capacity);
            prop_assert!(mapped + bytes >= to && mapped + bytes <= capacity);
            prop_assert!(bytes.is_multiple_of(2 * MIB));
            let waste = mapped + bytes - to;
            prop_assert!(waste < (mapped / WASTE).max(2 * MIB));
        }
    }
}
