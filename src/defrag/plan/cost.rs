//! What steps cost by the table.

use super::{Move, Planner, Source, Step};
use crate::driver::cost::Nanos;
use crate::units::MIB;

/// Blocks of at least this many bytes are copied by a call each, which reaches full bandwidth; the
/// others of a step go in one batch.
pub const BULK: u64 = 64 * MIB;

/// Parts that one launch of a batch takes.
pub const BATCH_PARTS: u64 = 119;

/// What a plan costs by the table.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Prediction {
    /// From the start until the run can be used and the device has got there, if it is idle at the
    /// start: host and device work at the same time.
    pub until_usable: Nanos,
    /// The host's part of it.
    pub host: Nanos,
    /// The device's part of it.
    pub device: Nanos,
    /// What comes later, off the critical path: unmapping old addresses.
    pub later: Nanos,
    /// Bytes copied.
    pub bytes_copied: u64,
    /// Blocks whose address changes.
    pub pointers_changed: u64,
    /// Granules mapped at another address.
    pub remapped: u64,
    /// Bytes of memory that the pool gives.
    pub extra_memory: u64,
}

impl Planner<'_> {
    /// Time to make one granule usable at another address.
    pub(super) fn open(&self) -> Nanos {
        self.table.open(self.state.granule, self.state.peers)
    }

    fn close(&self) -> Nanos {
        self.table.close(self.state.granule, self.state.peers)
    }

    /// No copy of that many bytes takes less.
    pub(super) fn least_copy(&self, bytes: u64) -> Nanos {
        match bytes {
            0 => Nanos::ZERO,
            _ => self.table.copy(bytes).min(self.table.copy_batch(bytes)),
        }
    }

    pub(super) fn times(&self, time: Nanos, n: u64) -> Nanos {
        Nanos(time.0.saturating_mul(n))
    }

    /// What so many granules cost to come from the pool.
    fn fetched(&self, n: u64) -> Nanos {
        let created = n.saturating_sub(self.state.idle);
        self.times(self.table.create(self.state.granule), created)
    }

    /// The host's least time for a window with so many holes and whole live slots to be shifted.
    pub(super) fn at_least(&self, holes: u64, shifts: u64) -> Nanos {
        if holes + shifts == 0 {
            return Nanos::ZERO;
        }
        let twice = self.open() + self.open() + self.close();
        self.times(self.open(), holes) + self.times(twice, shifts)
    }

    pub(super) fn predict(&self, steps: &[Step]) -> Prediction {
        let mut sum = Prediction::default();
        let mut device_free = Nanos::ZERO;
        let (mut bulk, mut small, mut launches) = (0u64, 0u64, 0u64);
        let mut pool = 0;
        for step in steps {
            match step {
                Step::Copy(moves) => {
                    let (large, rest): (Vec<&Move>, Vec<&Move>) =
                        moves.iter().partition(|one| one.len >= BULK);
                    let calls = large.len() as u64 + (rest.len() as u64).div_ceil(BATCH_PARTS);
                    let before = self.copying(bulk, small);
                    bulk += large.iter().map(|one| one.len).sum::<u64>();
                    small += rest.iter().map(|one| one.len).sum::<u64>();
                    let gap = if launches > 0 {
                        self.table.kernel
                    } else {
                        Nanos::ZERO
                    };
                    launches += calls;
                    let work = self.copying(bulk, small).since(before) + gap;
                    device_free = device_free.max(sum.host) + work;
                    sum.host += self.times(self.table.launch, calls);
                    sum.device += work;
                    sum.pointers_changed += moves.len() as u64;
                }
                Step::Map(list) => {
                    let n = list.len() as u64;
                    let from_pool = list.iter().filter(|one| one.from == Source::Pool);
                    let from_pool = from_pool.count() as u64;
                    let fetching = self.fetched(pool + from_pool).since(self.fetched(pool));
                    pool += from_pool;
                    sum.host += fetching + self.times(self.open(), n);
                    sum.later += self.times(self.close(), n - from_pool);
                    sum.remapped += n;
                }
                Step::Shift(moves) => {
                    let slots = moves.iter().map(|one| one.len / self.state.granule).sum();
                    sum.host += self.times(self.open(), slots);
                    sum.remapped += slots;
                    sum.pointers_changed += moves.len() as u64;
                }
                Step::Vacate(slots) => {
                    sum.host += self.times(self.close(), slots.len() as u64);
                }
            }
        }
        sum.bytes_copied = bulk + small;
        sum.extra_memory = pool.saturating_mul(self.state.granule);
        sum.until_usable = sum.host.max(device_free);
        sum
    }

    fn copying(&self, bulk: u64, small: u64) -> Nanos {
        let some = |bytes, time: Nanos| if bytes == 0 { Nanos::ZERO } else { time };
        some(bulk, self.table.copy(bulk)) + some(small, self.table.copy_batch(small))
    }
}
