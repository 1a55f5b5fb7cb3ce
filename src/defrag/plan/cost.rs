//! What steps cost by the table.

use super::{Planner, Source, State, Step};
use crate::driver::cost::{CostTable, Curve, Nanos};
use crate::units::MIB;

/// Blocks of at least this many bytes are copied by a call each, which reaches full bandwidth; the
/// others of a step go in one batch.
pub const BULK: u64 = 64 * MIB;

/// Parts that one launch of a batch takes.
pub const BATCH_PARTS: u64 = 119;

/// What booking a moved block or granule costs the host before its driver call. Estimated: on the sim,
/// moving 128 blocks takes some 80 us besides the calls, about half of it behind them, where the
/// device copies meanwhile.
const BOOKING: Nanos = Nanos(300);

/// How much longer mapping takes while the device copies, in thousandths. Measured on an H200 with
/// plans that did both, against plans that only mapped: 1.2 times at 256 MiB, 1.4 at 64 MiB and 1 GiB,
/// 1.5 at 32 MiB.
const BESIDE_PERMILLE: u64 = 1400;

/// Copies of a step.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Load {
    /// Bytes of blocks that are copied by a call each, and their number.
    pub(super) bulk: u64,
    pub(super) bulks: u64,
    /// Bytes of blocks that go in batches, and their number.
    pub(super) small: u64,
    pub(super) smalls: u64,
}

impl Load {
    pub(super) fn add(&mut self, len: u64) {
        if len >= BULK {
            self.bulk += len;
            self.bulks += 1;
        } else {
            self.small += len;
            self.smalls += 1;
        }
    }

    fn and(&self, other: &Self) -> Self {
        Self {
            bulk: self.bulk + other.bulk,
            bulks: self.bulks + other.bulks,
            small: self.small + other.small,
            smalls: self.smalls + other.smalls,
        }
    }

    pub(super) fn remove(&mut self, len: u64) {
        if len >= BULK {
            self.bulk -= len;
            self.bulks -= 1;
        } else {
            self.small -= len;
            self.smalls -= 1;
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bulk + self.small
    }

    pub(super) fn since(&self, before: &Self) -> Self {
        Self {
            bulk: self.bulk - before.bulk,
            bulks: self.bulks - before.bulks,
            small: self.small - before.small,
            smalls: self.smalls - before.smalls,
        }
    }

    fn is_empty(&self) -> bool {
        self.bytes() == 0
    }

    fn pieces(&self) -> u64 {
        self.bulks + self.smalls
    }

    fn calls(&self) -> u64 {
        self.bulks + self.smalls.div_ceil(BATCH_PARTS)
    }
}

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

/// What is done to one granule costs: the same all over a state.
#[derive(Clone, Copy, Debug)]
pub(super) struct Calls {
    /// Making it usable at another address.
    open: Nanos,
    close: Nanos,
}

impl Calls {
    pub(super) fn new(state: &State, table: &CostTable) -> Self {
        Self {
            open: table.open(state.granule, state.peers),
            close: table.close(state.granule, state.peers),
        }
    }
}

impl Planner<'_> {
    /// Mapping one granule takes no less, wherever it comes from.
    pub(super) fn least_map(&self) -> Nanos {
        self.calls.open + BOOKING
    }

    /// No copying of that many bytes takes less.
    pub(super) fn least_copy(&self, bytes: u64) -> Nanos {
        match bytes {
            0 => Nanos::ZERO,
            _ => self.table.copy(bytes).min(self.table.copy_batch(bytes)),
        }
    }

    /// No copying of these blocks takes less, in however many steps, and by way of whatever other
    /// places.
    pub(super) fn least_slide(&self, load: &Load) -> Nanos {
        let host = self.times(BOOKING, load.pieces()) + self.times(self.table.launch, load.calls());
        // The device starts when a first block is booked.
        let start = self.times(BOOKING, load.pieces().min(1));
        host.max(start + from(&self.table.copy, load.bulk) + from(&self.table.batch, load.small))
    }

    /// The same for whatever pieces of the state of so many bytes or more.
    pub(super) fn least_slide_of(&self, bytes: u64) -> Nanos {
        self.times(BOOKING, bytes.min(1)) + self.least_of_kind(bytes)
    }

    /// The device takes no less for whatever pieces of the state of so many bytes or more; zero if
    /// there are such of both kinds, of which each takes its share.
    pub(super) fn least_of_kind(&self, bytes: u64) -> Nanos {
        let all = self.survey().all(self.state);
        match (all.bulks, all.smalls) {
            (_, 0) => from(&self.table.copy, bytes),
            (0, _) => from(&self.table.batch, bytes),
            _ => Nanos::ZERO,
        }
    }

    pub(super) fn times(&self, time: Nanos, n: u64) -> Nanos {
        Nanos(time.0.saturating_mul(n))
    }

    /// What so many granules cost to come from the pool.
    fn fetched(&self, n: u64) -> Nanos {
        match n.saturating_sub(self.state.idle) {
            0 => Nanos::ZERO,
            created => self.times(self.table.create(self.state.granule), created),
        }
    }

    /// What [`predict`](Self::predict) says of a window without planning it: a load that takes the
    /// device `work` is copied, live granules are shifted and their slots vacated, and granules mapped,
    /// some of them from the pool. Never more than the plan's own prediction.
    pub(super) fn outline(
        &self,
        load: &Load,
        work: Nanos,
        shifts: u64,
        maps: u64,
        pool: u64,
    ) -> Nanos {
        self.priced.set(self.priced.get() + 1);
        let mut host = self.times(BOOKING, load.pieces());
        let device_free = if work == Nanos::ZERO {
            Nanos::ZERO
        } else {
            host + work
        };
        host += self.times(self.table.launch, load.calls());
        if shifts > 0 {
            host += self.times(self.calls.open + self.calls.close, shifts)
                + self.times(BOOKING, shifts);
        }
        if maps > 0 {
            let calls = self.fetched(pool) + self.times(self.calls.open, maps);
            host = beside(host + self.times(BOOKING, maps), device_free, calls);
        }
        host.max(device_free)
    }

    pub(super) fn predict(&self, steps: &[Step]) -> Prediction {
        let mut sum = Prediction::default();
        let mut device_free = Nanos::ZERO;
        let mut copied = Load::default();
        let mut pool = 0;
        for step in steps {
            match step {
                Step::Copy(moves) => {
                    let mut load = Load::default();
                    moves.iter().for_each(|one| load.add(one.len));
                    let before = self.copying(&copied);
                    let gap = match copied.is_empty() {
                        true => Nanos::ZERO,
                        false => self.table.kernel,
                    };
                    copied = copied.and(&load);
                    let work = self.copying(&copied).since(before) + gap;
                    sum.host += self.times(BOOKING, load.pieces());
                    device_free = device_free.max(sum.host) + work;
                    sum.host += self.times(self.table.launch, load.calls());
                    sum.device += work;
                    sum.pointers_changed += moves.len() as u64;
                }
                Step::Map(list) => {
                    let n = list.len() as u64;
                    let from_pool = list.iter().filter(|one| one.from == Source::Pool);
                    let from_pool = from_pool.count() as u64;
                    let fetching = self.fetched(pool + from_pool).since(self.fetched(pool));
                    pool += from_pool;
                    let calls = fetching + self.times(self.calls.open, n);
                    let booked = sum.host + self.times(BOOKING, n);
                    sum.host = beside(booked, device_free, calls);
                    sum.later += self.times(self.calls.close, n - from_pool);
                    sum.remapped += n;
                }
                Step::Shift(moves) => {
                    let slots = moves.iter().map(|one| one.len / self.state.granule).sum();
                    sum.host += self.times(self.calls.open + BOOKING, slots);
                    sum.remapped += slots;
                    sum.pointers_changed += moves.len() as u64;
                }
                Step::Vacate(slots) => {
                    sum.host += self.times(self.calls.close, slots.len() as u64);
                }
            }
        }
        sum.bytes_copied = copied.bytes();
        sum.extra_memory = pool.saturating_mul(self.state.granule);
        sum.until_usable = sum.host.max(device_free);
        sum
    }

    /// The device's time for copying a load.
    pub(super) fn copying(&self, load: &Load) -> Nanos {
        let some = |bytes, time: &dyn Fn(u64) -> Nanos| match bytes {
            0 => Nanos::ZERO,
            bytes => time(bytes),
        };
        some(load.bulk, &|bytes| self.table.copy(bytes))
            + some(load.small, &|bytes| self.table.copy_batch(bytes))
    }
}

/// The least time for that many bytes or more: what was measured need not ascend. None for none.
fn from(curve: &Curve, bytes: u64) -> Nanos {
    if bytes == 0 {
        return Nanos::ZERO;
    }
    let longer = curve.points().iter().filter(|point| point.0 > bytes);
    longer
        .map(|point| point.1)
        .fold(curve.at(bytes), Nanos::min)
}

/// When driver calls are done that take `calls` alone and start at `host`, if the device copies until
/// `device_free`.
fn beside(host: Nanos, device_free: Nanos, calls: Nanos) -> Nanos {
    let room = device_free.since(host);
    let done_beside = Nanos(room.0.saturating_mul(1000) / BESIDE_PERMILLE);
    match calls <= done_beside {
        true => host + Nanos(calls.0.saturating_mul(BESIDE_PERMILLE) / 1000),
        false => host + room + calls.since(done_beside),
    }
}
