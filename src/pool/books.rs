//! What a pool has and where it is: counters that obey identities, changed only under the lock.

use std::collections::BTreeMap;

use super::choose::{Choice, Idle, Need, Room, choose, choose_exactly};
use super::config::Checked;
use super::granule::Raw;
use crate::driver::DriverError;
use crate::{Error, Limit, OutOfMemory};

/// Figures of a pool at one moment. Sizes in bytes.
///
/// At every moment `created == mapped + idle + in_flight`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PoolStats {
    /// The most that may be created.
    pub budget: u64,
    /// Never released below this.
    pub floor: u64,
    /// Physical memory that exists now.
    pub created: u64,
    /// Of that, mapped into an arena or heap.
    pub mapped: u64,
    /// Of that, unmapped and waiting for the next taker.
    pub idle: u64,
    /// Of that, on the way: taken and not mapped yet, or about to be released.
    pub in_flight: u64,
    /// Of `mapped`, given back already but still waiting for a fence.
    pub pending: u64,
    /// Highest `created` so far.
    pub peak_created: u64,
    /// Highest `mapped` so far.
    pub peak_mapped: u64,
    /// Granules created by the driver.
    pub creates: u64,
    /// Granules released to the driver.
    pub releases: u64,
    /// Granules handed over without a driver create.
    pub recycled: u64,
    /// Releases that the driver refused; the granules were kept idle.
    pub failed_releases: u64,
}

impl PoolStats {
    /// Whether the identities hold.
    #[must_use]
    pub fn is_consistent(&self) -> bool {
        self.created == self.mapped + self.idle + self.in_flight
            && self.pending <= self.mapped
            && self.created <= self.peak_created
            && self.mapped <= self.peak_mapped
    }
}

/// What holders have, counted by themselves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Held {
    /// Bytes mapped.
    pub(crate) mapped: u64,
    /// Of that, bytes that wait for a fence.
    pub(crate) pending: u64,
}

#[derive(Debug)]
pub(super) struct Books {
    stats: PoolStats,
    watermark: u64,
    slack: Option<u32>,
    granularity: u64,
    /// Admitted and not created yet.
    promised: u64,
    /// Part of `in_flight` that is about to be released.
    releasing: u64,
    idle: BTreeMap<u64, Vec<Raw>>,
}

/// Granules taken out of the books for some needs, and what is to be done for the rest.
#[derive(Debug, Default)]
pub(super) struct Admission {
    pub(super) recycle: Vec<Vec<Raw>>,
    pub(super) create: Vec<Vec<u64>>,
    pub(super) release: Vec<Raw>,
    /// Idle granules that make way for what is created, although the budget has room for both.
    pub(super) trade: Vec<Raw>,
}

impl Books {
    pub(super) fn new(config: Checked) -> Self {
        Self {
            stats: PoolStats {
                budget: config.budget,
                floor: config.floor,
                ..PoolStats::default()
            },
            watermark: config.watermark,
            slack: config.slack,
            granularity: config.granularity,
            promised: 0,
            releasing: 0,
            idle: BTreeMap::new(),
        }
    }

    pub(super) fn stats(&self) -> PoolStats {
        self.stats
    }

    /// Bytes created that stay, with those promised.
    fn committed(&self) -> u64 {
        (self.stats.created - self.releasing) + self.promised
    }

    fn room(&self) -> Room {
        let committed = self.committed();
        Room {
            // What others are about to release is there until they have.
            create: (self.stats.budget).saturating_sub(self.stats.created + self.promised),
            release: committed.saturating_sub(self.stats.floor),
            granularity: self.granularity,
        }
    }

    /// Takes what serves all needs, or nothing.
    ///
    /// # Errors
    ///
    /// The bytes missing within the budget.
    pub(super) fn admit(&mut self, needs: &[Need]) -> Result<Admission, u64> {
        let mut counts: Idle = self.idle.iter().map(|(l, v)| (*l, v.len())).collect();
        let mut room = self.room();
        let choices = needs
            .iter()
            .map(|need| choose(&mut counts, &mut room, *need))
            .collect::<Result<Vec<Choice>, u64>>()?;
        Ok(self.take(choices))
    }

    /// As [`admit`](Self::admit), for granules of exactly these lengths.
    pub(super) fn admit_exactly(&mut self, lens: &[u64]) -> Result<Admission, u64> {
        let mut counts: Idle = self.idle.iter().map(|(l, v)| (*l, v.len())).collect();
        let mut room = self.room();
        let choice = choose_exactly(&mut counts, &mut room, lens)?;
        Ok(self.take(vec![choice]))
    }

    /// Bytes that could be had: what the budget leaves, and what is idle.
    pub(super) fn available(&self) -> u64 {
        self.room().create + self.stats.idle
    }

    fn take(&mut self, choices: Vec<Choice>) -> Admission {
        let mut admission = Admission::default();
        for choice in choices {
            let recycle = choice.recycle.iter().filter_map(|len| self.pop(*len));
            let recycle: Vec<Raw> = recycle.collect();
            self.stats.recycled += recycle.len() as u64;
            admission.recycle.push(recycle);
            for len in &choice.release {
                admission.release.extend(self.pop_for_release(*len));
            }
            self.promised += choice.create.iter().sum::<u64>();
            admission.create.push(choice.create);
        }
        if admission.create.iter().any(|lens| !lens.is_empty()) {
            self.trade(&mut admission);
        }
        admission
    }

    /// Picks idle granules to release, so that what is promised does not take the pool past its slack.
    /// None that is larger than what is over: the next taker may want it, and little stays over.
    fn trade(&mut self, admission: &mut Admission) {
        let Some(slack) = self.slack else {
            return;
        };
        let base = self.stats.peak_mapped.max(self.in_use());
        let more = u128::from(base) * u128::from(slack) / 10_000;
        let ceiling = base.saturating_add(u64::try_from(more).unwrap_or(u64::MAX));
        loop {
            let over = self.committed().saturating_sub(ceiling);
            let most = over.min(self.room().release);
            let Some((&len, _)) = self.idle.range(..=most).next_back() else {
                break;
            };
            admission.trade.extend(self.pop_for_release(len));
        }
    }

    /// Moves one idle granule of that length in flight.
    fn pop(&mut self, len: u64) -> Option<Raw> {
        let list = self.idle.get_mut(&len)?;
        let raw = list.pop();
        if list.is_empty() {
            self.idle.remove(&len);
        }
        if raw.is_some() {
            self.stats.idle -= len;
            self.stats.in_flight += len;
        }
        raw
    }

    fn pop_for_release(&mut self, len: u64) -> Option<Raw> {
        let raw = self.pop(len)?;
        self.releasing += raw.len;
        Some(raw)
    }

    /// Takes idle granules to release, largest first, until `bytes` are gone or the floor is
    /// reached.
    pub(super) fn evict(&mut self, bytes: u64) -> Vec<Raw> {
        let mut out = Vec::new();
        let mut left = bytes;
        let mut may = self.room().release;
        while left > 0 {
            let Some((&len, _)) = self.idle.range(..=may).next_back() else {
                break;
            };
            out.extend(self.pop_for_release(len));
            left = left.saturating_sub(len);
            may -= len;
        }
        out
    }

    /// Bytes that evicting cannot bring back.
    pub(super) fn in_use(&self) -> u64 {
        self.committed() - self.stats.idle
    }

    /// Whether a release is under way, so that there will be more room in a moment.
    pub(super) fn is_releasing(&self) -> bool {
        self.releasing > 0
    }

    /// Evicts what a budget of that many bytes has no room for.
    pub(super) fn evict_over(&mut self, budget: u64) -> Vec<Raw> {
        self.evict(self.committed().saturating_sub(budget))
    }

    /// Idle bytes beyond `keep` that the floor allows to release.
    pub(super) fn beyond(&self, keep: u64) -> u64 {
        self.stats.idle.saturating_sub(keep)
    }

    pub(super) fn created(&mut self, len: u64) {
        self.promised -= len;
        self.stats.created += len;
        self.stats.in_flight += len;
        self.stats.creates += 1;
        self.stats.peak_created = self.stats.peak_created.max(self.stats.created);
    }

    pub(super) fn promise(&mut self, len: u64) -> bool {
        let fits = len <= self.room().create;
        if fits {
            self.promised += len;
        }
        fits
    }

    pub(super) fn unpromise(&mut self, len: u64) {
        self.promised -= len;
    }

    /// Marks a granule in flight as about to be released.
    pub(super) fn begin_release(&mut self, raw: Raw) {
        self.releasing += raw.len;
    }

    pub(super) fn released(&mut self, len: u64) {
        self.releasing -= len;
        self.stats.created -= len;
        self.stats.in_flight -= len;
        self.stats.releases += 1;
    }

    pub(super) fn release_failed(&mut self, raw: Raw) {
        self.releasing -= raw.len;
        self.stats.failed_releases += 1;
        self.shelve(raw);
    }

    /// Moves a granule from in flight to idle.
    pub(super) fn shelve(&mut self, raw: Raw) {
        self.stats.in_flight -= raw.len;
        self.stats.idle += raw.len;
        self.idle.entry(raw.len).or_default().push(raw);
    }

    /// Takes back a granule in flight: true if it is to be released rather than shelved.
    pub(super) fn put(&mut self, raw: Raw) -> bool {
        let over = self.stats.idle.saturating_add(raw.len) > self.watermark
            || self.committed() > self.stats.budget;
        if over && self.room().release >= raw.len {
            self.begin_release(raw);
            true
        } else {
            self.shelve(raw);
            false
        }
    }

    pub(super) fn mapped(&mut self, len: u64) {
        self.stats.in_flight -= len;
        self.stats.mapped += len;
        self.stats.peak_mapped = self.stats.peak_mapped.max(self.stats.mapped);
    }

    pub(super) fn unmapped(&mut self, len: u64) {
        self.stats.mapped -= len;
        self.stats.in_flight += len;
    }

    pub(super) fn pending(&mut self, more: u64, less: u64) {
        self.stats.pending = (self.stats.pending + more) - less;
    }

    pub(super) fn set_limits(&mut self, budget: u64, floor: u64) {
        self.stats.budget = budget;
        self.stats.floor = floor;
    }

    /// The peaks are what there is now.
    pub(super) fn reset_peaks(&mut self) {
        self.stats.peak_created = self.stats.created;
        self.stats.peak_mapped = self.stats.mapped;
    }

    pub(super) fn set_watermark(&mut self, bytes: u64) {
        self.watermark = bytes;
    }

    pub(super) fn drain(&mut self) -> Vec<Raw> {
        std::mem::take(&mut self.idle)
            .into_values()
            .flatten()
            .collect()
    }

    pub(super) fn shortage(&self, requested: u64, missing: u64, limit: Limit) -> Error {
        Error::OutOfMemory(Box::new(OutOfMemory {
            requested,
            missing,
            limit,
            budget: self.stats.budget,
            created: self.stats.created,
            mapped: self.stats.mapped,
            idle: self.stats.idle,
            pending: self.stats.pending,
            driver: None,
            name: None,
            heap: None,
        }))
    }

    /// The same for a driver call that said the device has no more.
    pub(super) fn refusal(&self, requested: u64, missing: u64, error: DriverError) -> Error {
        let mut shortage = self.shortage(requested, missing, Limit::Device);
        if let Error::OutOfMemory(shortage) = &mut shortage {
            shortage.driver = Some(error);
        }
        shortage
    }

    /// Recounts idle granules and checks the identities against what holders say they have.
    pub(super) fn audit(&self, held: Held) -> Result<(), Error> {
        let check = Error::recount;
        let idle = self.idle.values().flatten().map(|raw| raw.len).sum();
        check("idle bytes", self.stats.idle, idle)?;
        check("mapped bytes", self.stats.mapped, held.mapped)?;
        check("pending bytes", self.stats.pending, held.pending)?;
        check("promised bytes", self.promised, 0)?;
        check("bytes in release", self.releasing, 0)?;
        let s = self.stats;
        let parts = s.mapped + s.idle + s.in_flight;
        check("created bytes", s.created, parts)
    }
}
