//! What is reserved, created and mapped, and every refusal: bookkeeping without memory.
//!
//! Each change comes as a pair. `can_...` decides from the books alone whether the contract allows
//! it; the caller then does the system call; the second half books it. A system call that fails in
//! between therefore leaves the books as they were.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use crate::driver::{Access, DriverCode, PhysId};
use crate::units::{Va, VaRange};

/// A range of the memory file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Extent {
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Extent {
    pub(super) const fn end(self) -> u64 {
        self.offset + self.len
    }
}

/// The first address of an access that is not covered by a mapping with the rights needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Fault(pub(super) u64);

#[derive(Clone, Copy, Debug)]
struct Mapping {
    len: u64,
    phys: PhysId,
    access: Option<Access>,
}

#[derive(Clone, Copy, Debug)]
struct Granule {
    extent: Extent,
    created: bool,
    mappings: u64,
}

/// The books of one device. Ranges in `reservations` are disjoint, mappings are disjoint and each
/// lies inside one reservation; a granule is in `granules` while it is created or mapped, and its
/// extent overlaps no other's.
#[derive(Debug)]
pub(super) struct Table {
    granularity: u64,
    total: u64,
    address_space: u64,
    reserved: u64,
    used: u64,
    reservations: BTreeMap<u64, u64>,
    mappings: BTreeMap<u64, Mapping>,
    granules: BTreeMap<PhysId, Granule>,
    next_phys: u64,
    file_end: u64,
    idle_extents: BTreeMap<u64, Vec<u64>>,
}

type Verdict<T> = Result<T, DriverCode>;

impl Table {
    pub(super) const fn new(granularity: u64, total: u64, address_space: u64) -> Self {
        Self {
            granularity,
            total,
            address_space,
            reserved: 0,
            used: 0,
            reservations: BTreeMap::new(),
            mappings: BTreeMap::new(),
            granules: BTreeMap::new(),
            next_phys: 1,
            file_end: 0,
            idle_extents: BTreeMap::new(),
        }
    }

    /// Bytes that may still be created.
    pub(super) const fn free(&self) -> u64 {
        self.total - self.used
    }

    /// Granules, mappings and reservations.
    pub(super) fn counts(&self) -> (usize, usize, usize) {
        (
            self.granules.len(),
            self.mappings.len(),
            self.reservations.len(),
        )
    }

    /// Every reservation.
    pub(super) fn reservations(&self) -> impl Iterator<Item = VaRange> + '_ {
        self.reservations
            .iter()
            .filter_map(|(&start, &len)| VaRange::new(Va::new(start), len))
    }

    fn whole_granules(&self, len: u64) -> Verdict<()> {
        if len == 0 || !len.is_multiple_of(self.granularity) {
            return Err(DriverCode::INVALID_VALUE);
        }
        Ok(())
    }

    /// The alignment that a reservation of `len` bytes must get.
    pub(super) fn can_reserve(&self, len: u64, align: u64) -> Verdict<u64> {
        self.whole_granules(len)?;
        if align != 0 && !align.is_power_of_two() {
            return Err(DriverCode::INVALID_VALUE);
        }
        match self.reserved.checked_add(len) {
            Some(sum) if sum <= self.address_space => Ok(align.max(self.granularity)),
            _ => Err(DriverCode::OUT_OF_MEMORY),
        }
    }

    pub(super) fn book_reservation(&mut self, range: VaRange) {
        self.reserved += range.len();
        self.reservations.insert(range.start().get(), range.len());
    }

    pub(super) fn can_free_reservation(&self, range: VaRange) -> Verdict<()> {
        let known = self.reservations.get(&range.start().get()) == Some(&range.len());
        if known && !self.any_mapping_in(range) {
            Ok(())
        } else {
            Err(DriverCode::INVALID_VALUE)
        }
    }

    pub(super) fn book_freed_reservation(&mut self, range: VaRange) {
        if let Some(len) = self.reservations.remove(&range.start().get()) {
            self.reserved -= len;
        }
    }

    /// Where in the file `len` bytes would go: in an idle extent of that length, or at the end.
    pub(super) fn can_create(&self, len: u64) -> Verdict<Extent> {
        self.whole_granules(len)?;
        if len > self.free() {
            return Err(DriverCode::OUT_OF_MEMORY);
        }
        let idle = self.idle_extents.get(&len).and_then(|v| v.last());
        let offset = idle.copied().unwrap_or(self.file_end);
        // File offsets are signed.
        match offset.checked_add(len) {
            Some(end) if i64::try_from(end).is_ok() => Ok(Extent { offset, len }),
            _ => Err(DriverCode::OUT_OF_MEMORY),
        }
    }

    /// Length that the file must at least have for `extent` to be behind mapped memory.
    pub(super) const fn file_must_grow_to(&self, extent: Extent) -> Option<u64> {
        if extent.end() > self.file_end {
            Some(extent.end())
        } else {
            None
        }
    }

    /// Books what [`can_create`](Self::can_create) answered under the same lock.
    pub(super) fn book_created(&mut self, extent: Extent) -> PhysId {
        if extent.offset == self.file_end {
            self.file_end = extent.end();
        } else if let Some(idle) = self.idle_extents.get_mut(&extent.len) {
            idle.pop();
        }
        self.used += extent.len;
        let phys = PhysId(self.next_phys);
        self.next_phys += 1;
        let granule = Granule {
            extent,
            created: true,
            mappings: 0,
        };
        self.granules.insert(phys, granule);
        phys
    }

    /// Drops the creation reference. Answers the extent if that was the last reference: it counts
    /// as used until [`recycle`](Self::recycle).
    pub(super) fn release(&mut self, phys: PhysId) -> Verdict<Option<Extent>> {
        match self.granules.get_mut(&phys) {
            Some(granule) if granule.created => {
                granule.created = false;
                Ok(self.retire(phys))
            }
            _ => Err(DriverCode::INVALID_VALUE),
        }
    }

    fn retire(&mut self, phys: PhysId) -> Option<Extent> {
        let granule = self.granules.get(&phys)?;
        if granule.created || granule.mappings > 0 {
            return None;
        }
        self.granules.remove(&phys).map(|g| g.extent)
    }

    /// Makes an extent whose pages were given back available again.
    pub(super) fn recycle(&mut self, extent: Extent) {
        self.used -= extent.len;
        let idle = self.idle_extents.entry(extent.len).or_default();
        idle.push(extent.offset);
    }

    /// The extent to map at `range`.
    pub(super) fn can_map(&self, range: VaRange, phys: PhysId) -> Verdict<Extent> {
        self.whole_granules(range.len())?;
        if !range.start().is_aligned(self.granularity) {
            return Err(DriverCode::INVALID_VALUE);
        }
        let granule = match self.granules.get(&phys) {
            Some(granule) if granule.created => granule,
            _ => return Err(DriverCode::INVALID_VALUE),
        };
        if range.len() < granule.extent.len {
            return Err(DriverCode::NOT_SUPPORTED);
        }
        let fits = range.len() == granule.extent.len && self.is_reserved(range);
        if fits && !self.any_mapping_in(range) {
            Ok(granule.extent)
        } else {
            Err(DriverCode::INVALID_VALUE)
        }
    }

    pub(super) fn book_mapped(&mut self, range: VaRange, phys: PhysId) {
        if let Some(granule) = self.granules.get_mut(&phys) {
            granule.mappings += 1;
        }
        let mapping = Mapping {
            len: range.len(),
            phys,
            access: None,
        };
        self.mappings.insert(range.start().get(), mapping);
    }

    /// The mappings that `range` covers whole and without a gap, with their rights: what access and
    /// unmap may be called for.
    pub(super) fn covered(&self, range: VaRange) -> Verdict<Vec<(VaRange, Option<Access>)>> {
        self.whole_granules(range.len())?;
        let mut next = range.start().get();
        let end = range.end().get();
        let mut covered = Vec::new();
        for (&start, mapping) in self.mappings.range(next..end) {
            if start != next {
                break;
            }
            next += mapping.len;
            if let Some(whole) = VaRange::new(Va::new(start), mapping.len) {
                covered.push((whole, mapping.access));
            }
        }
        if next == end {
            Ok(covered)
        } else {
            Err(DriverCode::INVALID_VALUE)
        }
    }

    pub(super) fn book_access(&mut self, at: Va, access: Option<Access>) {
        if let Some(mapping) = self.mappings.get_mut(&at.get()) {
            mapping.access = access;
        }
    }

    /// Books an unmap. Answers the extents without a reference left, which count as used until
    /// [`recycle`](Self::recycle).
    pub(super) fn book_unmapped(&mut self, range: VaRange) -> Vec<Extent> {
        let mut unused = Vec::new();
        let bounds = range.start().get()..range.end().get();
        for (_, mapping) in self.mappings.extract_if(bounds, |_, _| true) {
            if let Some(granule) = self.granules.get_mut(&mapping.phys) {
                granule.mappings -= 1;
                unused.push(mapping.phys);
            }
        }
        unused.into_iter().filter_map(|p| self.retire(p)).collect()
    }

    /// Whether every byte of `range` may be used with the rights `need`.
    pub(super) fn check(&self, range: VaRange, need: Access) -> Result<(), Fault> {
        let mut next = range.start().get();
        let end = range.end().get();
        while next < end {
            let (&start, mapping) = self
                .mappings
                .range(..=next)
                .next_back()
                .ok_or(Fault(next))?;
            let allowed = match need {
                Access::Read => mapping.access.is_some(),
                Access::ReadWrite => mapping.access == Some(Access::ReadWrite),
            };
            if !allowed || next - start >= mapping.len {
                return Err(Fault(next));
            }
            next = start + mapping.len;
        }
        Ok(())
    }

    fn is_reserved(&self, range: VaRange) -> bool {
        self.reservations
            .range(..=range.start().get())
            .next_back()
            .and_then(|(&start, &len)| VaRange::new(Va::new(start), len))
            .is_some_and(|reservation| reservation.contains(range))
    }

    fn any_mapping_in(&self, range: VaRange) -> bool {
        self.mappings
            .range(..range.end().get())
            .next_back()
            .is_some_and(|(&start, mapping)| start + mapping.len > range.start().get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = 4096;

    fn range(start: u64, len: u64) -> VaRange {
        VaRange::new(Va::new(start * G), len * G).unwrap()
    }

    fn create(table: &mut Table, len: u64) -> PhysId {
        let extent = table.can_create(len * G).unwrap();
        table.book_created(extent)
    }

    fn table() -> Table {
        let mut table = Table::new(G, 64 * G, 256 * G);
        table.book_reservation(range(16, 16));
        table
    }

    #[test]
    fn an_extent_is_used_again_only_after_it_was_recycled() {
        let mut table = table();
        let a = create(&mut table, 2);
        create(&mut table, 2);
        let extent = table.release(a).unwrap().unwrap();
        assert_eq!(table.can_create(2 * G).unwrap().offset, 4 * G);
        assert_eq!(table.free(), 60 * G);
        table.recycle(extent);
        assert_eq!(table.free(), 62 * G);
        assert_eq!(table.can_create(2 * G), Ok(extent));
        assert_eq!(table.file_must_grow_to(extent), None);
    }

    #[test]
    fn a_released_granule_lives_until_its_last_mapping_goes() {
        let mut table = table();
        let a = create(&mut table, 1);
        table.book_mapped(range(16, 1), a);
        table.book_mapped(range(18, 1), a);
        assert_eq!(table.release(a), Ok(None));
        assert_eq!(table.release(a), Err(DriverCode::INVALID_VALUE));
        assert_eq!(
            table.can_map(range(20, 1), a),
            Err(DriverCode::INVALID_VALUE)
        );
        assert!(table.book_unmapped(range(16, 1)).is_empty());
        assert_eq!(table.book_unmapped(range(18, 1)).len(), 1);
        assert_eq!(table.counts(), (0, 0, 1));
    }

    #[test]
    fn two_aliases_unmapped_at_once_retire_their_granule_once() {
        let mut table = table();
        let a = create(&mut table, 1);
        table.book_mapped(range(16, 1), a);
        table.book_mapped(range(17, 1), a);
        table.release(a).unwrap();
        assert_eq!(table.book_unmapped(range(16, 2)).len(), 1);
    }

    #[test]
    fn a_check_names_the_first_byte_at_fault() {
        let mut table = table();
        let a = create(&mut table, 1);
        let b = create(&mut table, 1);
        table.book_mapped(range(16, 1), a);
        table.book_mapped(range(17, 1), b);
        table.book_access(Va::new(16 * G), Some(Access::ReadWrite));
        let both = VaRange::new(Va::new(16 * G + 5), G).unwrap();
        assert_eq!(table.check(both, Access::Read), Err(Fault(17 * G)));
        table.book_access(Va::new(17 * G), Some(Access::Read));
        assert_eq!(table.check(both, Access::Read), Ok(()));
        assert_eq!(table.check(both, Access::ReadWrite), Err(Fault(17 * G)));
        assert_eq!(
            table.check(range(17, 2), Access::Read),
            Err(Fault(18 * G)),
            "the end of a mapping"
        );
    }
}
