//! Which addresses are reserved, which granule lies behind which of them, and how long queued
//! work needs each mapping. Pure bookkeeping: every refusal of the driver contract is here.

use std::collections::{BTreeMap, HashMap};

use super::Nanos;
use crate::driver::{Access, DriverCode, PhysId};
use crate::units::{TIB, Va, VaRange, round_up};

/// Where the simulated address space begins.
const BASE: u64 = TIB;

type Refusal<T> = Result<T, DriverCode>;

/// A range of a granule that a range of addresses leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Piece {
    pub phys: PhysId,
    pub offset: u64,
    pub len: u64,
}

/// What queued work does with a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Use {
    pub range: VaRange,
    pub write: bool,
}

/// How long queued work needs a mapping. Work whose end is not known (behind a hold) is counted.
#[derive(Clone, Copy, Default, Debug)]
struct Busy {
    until: Nanos,
    held: u32,
}

impl Busy {
    fn at(self, now: Nanos) -> bool {
        self.held > 0 || self.until > now
    }
}

#[derive(Debug)]
struct Mapping {
    len: u64,
    phys: PhysId,
    access: Option<Access>,
    any: Busy,
    writes: Busy,
}

#[derive(Debug)]
struct Granule {
    len: u64,
    released: bool,
    mapped: u32,
}

/// Mappings that a call went over, for charging it, and whether unfinished work needed them.
#[derive(Debug)]
pub(super) struct Went {
    pub lens: Vec<u64>,
    pub under_work: bool,
    /// Granules that ceased to exist.
    pub gone: Vec<PhysId>,
}

#[derive(Debug)]
pub(super) struct Space {
    granularity: u64,
    total: u64,
    used: u64,
    next_phys: u64,
    /// Addresses that are not reserved: start to length, never adjacent.
    gaps: BTreeMap<u64, u64>,
    reservations: BTreeMap<u64, u64>,
    mappings: BTreeMap<u64, Mapping>,
    granules: HashMap<PhysId, Granule>,
}

impl Space {
    /// `None` when the address space does not fit in 64 bits.
    pub fn new(granularity: u64, total: u64, address_space: u64) -> Option<Self> {
        BASE.checked_add(address_space)?;
        Some(Self {
            granularity,
            total,
            used: 0,
            next_phys: 1,
            gaps: BTreeMap::from([(BASE, address_space)]),
            reservations: BTreeMap::new(),
            mappings: BTreeMap::new(),
            granules: HashMap::new(),
        })
    }

    pub fn free(&self) -> u64 {
        self.total - self.used
    }

    /// Granules, mappings, reservations that exist.
    pub fn counts(&self) -> (usize, usize, usize) {
        (
            self.granules.len(),
            self.mappings.len(),
            self.reservations.len(),
        )
    }

    fn whole(&self, len: u64) -> Refusal<()> {
        if len == 0 || !len.is_multiple_of(self.granularity) {
            return Err(DriverCode::INVALID_VALUE);
        }
        Ok(())
    }

    pub fn reserve(&mut self, len: u64, align: u64) -> Refusal<VaRange> {
        self.whole(len)?;
        if align != 0 && !align.is_power_of_two() {
            return Err(DriverCode::INVALID_VALUE);
        }
        let align = align.max(self.granularity);
        let (gap, size, start) = self
            .gaps
            .iter()
            .find_map(|(&gap, &size)| {
                let start = round_up(gap, align)?;
                (start.checked_add(len)? <= gap + size).then_some((gap, size, start))
            })
            .ok_or(DriverCode::OUT_OF_MEMORY)?;
        let range = VaRange::new(Va::new(start), len).ok_or(DriverCode::OUT_OF_MEMORY)?;
        self.gaps.remove(&gap);
        if start > gap {
            self.gaps.insert(gap, start - gap);
        }
        if start + len < gap + size {
            self.gaps.insert(start + len, gap + size - (start + len));
        }
        self.reservations.insert(start, len);
        Ok(range)
    }

    pub fn free_reservation(&mut self, range: VaRange) -> Refusal<()> {
        let (mut start, mut len) = (range.start().get(), range.len());
        let known = self.reservations.get(&start) == Some(&len);
        let end = range.end().get();
        if !known || self.mappings.range(start..end).next().is_some() {
            return Err(DriverCode::INVALID_VALUE);
        }
        self.reservations.remove(&start);
        if let Some(size) = self.gaps.remove(&end) {
            len += size;
        }
        if let Some((&gap, &size)) = self.gaps.range(..start).next_back()
            && gap + size == start
        {
            self.gaps.remove(&gap);
            (start, len) = (gap, size + len);
        }
        self.gaps.insert(start, len);
        Ok(())
    }

    pub fn create(&mut self, len: u64) -> Refusal<PhysId> {
        self.whole(len)?;
        if len > self.free() {
            return Err(DriverCode::OUT_OF_MEMORY);
        }
        let phys = PhysId(self.next_phys);
        self.next_phys += 1;
        self.used += len;
        self.granules.insert(
            phys,
            Granule {
                len,
                released: false,
                mapped: 0,
            },
        );
        Ok(phys)
    }

    /// The granule's length, and whether it is gone with this.
    pub fn release(&mut self, phys: PhysId) -> Refusal<(u64, bool)> {
        match self.granules.get_mut(&phys) {
            Some(granule) if !granule.released => {
                granule.released = true;
                let len = granule.len;
                Ok((len, self.drop_if_unused(phys)))
            }
            _ => Err(DriverCode::INVALID_VALUE),
        }
    }

    fn drop_if_unused(&mut self, phys: PhysId) -> bool {
        match self.granules.get(&phys) {
            Some(granule) if granule.released && granule.mapped == 0 => {
                self.used -= granule.len;
                self.granules.remove(&phys);
                true
            }
            _ => false,
        }
    }

    pub fn map(&mut self, range: VaRange, phys: PhysId) -> Refusal<()> {
        let (start, end) = (range.start().get(), range.end().get());
        self.whole(range.len())?;
        if !range.start().is_aligned(self.granularity)
            || !self.inside_one_reservation(range)
            || self.first_from(start).is_some_and(|next| next < end)
        {
            return Err(DriverCode::INVALID_VALUE);
        }
        let granule = self
            .granules
            .get_mut(&phys)
            .filter(|granule| !granule.released && range.len() <= granule.len)
            .ok_or(DriverCode::INVALID_VALUE)?;
        if range.len() < granule.len {
            return Err(DriverCode::NOT_SUPPORTED);
        }
        granule.mapped += 1;
        self.mappings.insert(
            start,
            Mapping {
                len: range.len(),
                phys,
                access: None,
                any: Busy::default(),
                writes: Busy::default(),
            },
        );
        Ok(())
    }

    fn inside_one_reservation(&self, range: VaRange) -> bool {
        let (start, end) = (range.start().get(), range.end().get());
        self.reservations
            .range(..=start)
            .next_back()
            .is_some_and(|(at, len)| end <= at + len)
    }

    /// Start of the first mapping with a byte at `at` or above.
    fn first_from(&self, at: u64) -> Option<u64> {
        let below = self.mappings.range(..=at).next_back();
        match below {
            Some((&start, m)) if start + m.len > at => Some(start),
            _ => self.mappings.range(at..).next().map(|(&start, _)| start),
        }
    }

    /// Starts of the mappings that make up exactly `range`.
    fn whole_mappings(&self, range: VaRange) -> Refusal<Vec<u64>> {
        self.whole(range.len())?;
        let (mut at, end) = (range.start().get(), range.end().get());
        let mut starts = Vec::new();
        for (&start, mapping) in self.mappings.range(at..end) {
            if start != at {
                return Err(DriverCode::INVALID_VALUE);
            }
            starts.push(start);
            at = start + mapping.len;
        }
        if at != end {
            return Err(DriverCode::INVALID_VALUE);
        }
        Ok(starts)
    }

    pub fn set_access(&mut self, range: VaRange, access: Access, now: Nanos) -> Refusal<Went> {
        let mut went = Went {
            lens: Vec::new(),
            under_work: false,
            gone: Vec::new(),
        };
        for start in self.whole_mappings(range)? {
            if let Some(mapping) = self.mappings.get_mut(&start) {
                went.under_work |= access == Access::Read && mapping.writes.at(now);
                went.lens.push(mapping.len);
                mapping.access = Some(access);
            }
        }
        Ok(went)
    }

    pub fn unmap(&mut self, range: VaRange, now: Nanos) -> Refusal<Went> {
        let mut went = Went {
            lens: Vec::new(),
            under_work: false,
            gone: Vec::new(),
        };
        for start in self.whole_mappings(range)? {
            let Some(mapping) = self.mappings.remove(&start) else {
                continue;
            };
            went.under_work |= mapping.any.at(now);
            went.lens.push(mapping.len);
            if let Some(granule) = self.granules.get_mut(&mapping.phys) {
                granule.mapped -= 1;
            }
            if self.drop_if_unused(mapping.phys) {
                went.gone.push(mapping.phys);
            }
        }
        Ok(went)
    }

    /// Whether every byte is mapped with the rights needed.
    pub fn allows(&self, need: Use) -> bool {
        let (mut at, end) = (need.range.start().get(), need.range.end().get());
        while at < end {
            let Some((&start, mapping)) = self.mappings.range(..=at).next_back() else {
                return false;
            };
            let allowed = match mapping.access {
                None => false,
                Some(Access::Read) => !need.write,
                Some(Access::ReadWrite) => true,
            };
            if !allowed || start + mapping.len <= at {
                return false;
            }
            at = start + mapping.len;
        }
        true
    }

    fn each_mapping(&mut self, range: VaRange, mut f: impl FnMut(&mut Mapping)) {
        if let Some(first) = self.first_from(range.start().get()) {
            let end = range.end().get();
            if first < end {
                self.mappings.range_mut(first..end).for_each(|(_, m)| f(m));
            }
        }
    }

    /// Notes work that ends at a known time.
    pub fn use_until(&mut self, used: Use, finish: Nanos) {
        self.each_mapping(used.range, |m| {
            m.any.until = m.any.until.max(finish);
            if used.write {
                m.writes.until = m.writes.until.max(finish);
            }
        });
    }

    /// Notes work whose end is not known yet.
    pub fn hold(&mut self, used: Use) {
        self.each_mapping(used.range, |m| {
            m.any.held += 1;
            m.writes.held += u32::from(used.write);
        });
    }

    /// Takes back [`hold`](Self::hold).
    pub fn unhold(&mut self, used: Use) {
        self.each_mapping(used.range, |m| {
            m.any.held = m.any.held.saturating_sub(1);
            m.writes.held = m.writes.held.saturating_sub(u32::from(used.write));
        });
    }

    /// The physical bytes behind a range that is mapped without a gap.
    pub fn pieces(&self, range: VaRange) -> Vec<Piece> {
        let (from, end) = (range.start().get(), range.end().get());
        let Some(first) = self.first_from(from).filter(|&first| first < end) else {
            return Vec::new();
        };
        self.mappings
            .range(first..end)
            .map(|(&start, m)| {
                let lo = from.max(start);
                Piece {
                    phys: m.phys,
                    offset: lo - start,
                    len: end.min(start + m.len) - lo,
                }
            })
            .collect()
    }
}
