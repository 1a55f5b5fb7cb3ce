//! Pins: bytes that may not be given back while somebody looks at them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::Owner;
use crate::units::VaRange;

/// How many pins end where, so that the furthest is known at once.
#[derive(Default, Debug)]
pub(super) struct Pins {
    ends: BTreeMap<u64, usize>,
}

impl Pins {
    pub(super) fn add(&mut self, end: u64) {
        *self.ends.entry(end).or_default() += 1;
    }

    pub(super) fn remove(&mut self, end: u64) {
        if let Some(count) = self.ends.get_mut(&end) {
            *count -= 1;
            if *count == 0 {
                self.ends.remove(&end);
            }
        }
    }

    /// End of the furthest pin past `len`, and how many reach past it.
    pub(super) fn past(&self, len: u64) -> Option<(u64, usize)> {
        let mut past = self.ends.range(len.checked_add(1)?..);
        let pins = past.clone().map(|(_, count)| count).sum();
        past.next_back().map(|(end, _)| (*end, pins))
    }
}

/// Keeps bytes of an [`Arena`](super::Arena) mapped: shrinking below their end is refused while
/// the pin lives, and the memory outlives the arena's own handle.
pub struct Pin {
    owner: Arc<Owner>,
    range: VaRange,
    end: u64,
}

impl Pin {
    /// For bytes up to offset `end` that have been added to the pins already.
    pub(super) fn new(owner: Arc<Owner>, range: VaRange, end: u64) -> Self {
        Self { owner, range, end }
    }

    /// The pinned addresses.
    #[must_use]
    pub fn range(&self) -> VaRange {
        self.range
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.owner.shared.meta.lock().pins.remove(self.end);
    }
}

impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pin({})", self.range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_are_counted_by_their_end() {
        let mut pins = Pins::default();
        pins.add(10);
        pins.add(10);
        pins.add(20);
        assert_eq!(pins.past(5), Some((20, 3)));
        assert_eq!(pins.past(10), Some((20, 1)));
        assert_eq!(pins.past(20), None);
        pins.remove(20);
        pins.remove(10);
        assert_eq!(pins.past(5), Some((10, 1)));
        assert_eq!(pins.past(u64::MAX), None);
    }
}
