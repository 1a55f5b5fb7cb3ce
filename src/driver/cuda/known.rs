//! What this driver made and has not given back.
//!
//! libcuda takes a stale handle for a pointer and may follow it, and it does not promise to refuse
//! every range the seam's contract refuses. So ids are looked up here first. The look-up does not
//! keep another thread from destroying the object between it and the call.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::driver::{DriverCode, EventId, PhysId, StreamId};
use crate::sync::{Mutex, RwLock};
use crate::units::{Va, VaRange};

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`: names for streams that always exist.
const LAST_SPECIAL_STREAM: u64 = 2;

/// A granule. An import in the exporter's own process may answer the handle that is there already,
/// which then has to be released once more.
#[derive(Debug)]
struct Phys {
    len: u64,
    references: u32,
}

/// What a [`CudaDriver`](super::CudaDriver) made or adopted and has not given back at a moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CudaCounts {
    /// Granules, released ones that are still mapped not among them.
    pub granules: usize,
    /// Mappings.
    pub mappings: usize,
    /// Reservations.
    pub reservations: usize,
    /// Plain allocations.
    pub allocations: usize,
    /// Streams besides the default ones.
    pub streams: usize,
    /// Events.
    pub events: usize,
}

#[derive(Debug, Default)]
pub(super) struct Known {
    phys: Mutex<HashMap<PhysId, Phys>>,
    /// Length of each reservation, by its start.
    reservations: Mutex<BTreeMap<Va, u64>>,
    /// Length of each mapping, by its start. libcuda accepts an unmap of addresses behind which
    /// nothing is; the contract does not.
    mappings: Mutex<BTreeMap<Va, u64>>,
    /// Length of each plain allocation, by its start.
    allocations: Mutex<BTreeMap<Va, u64>>,
    streams: RwLock<HashSet<StreamId>>,
    events: RwLock<HashSet<EventId>>,
}

/// The entry that `at` lies in.
fn around(ranges: &BTreeMap<Va, u64>, at: Va) -> Option<VaRange> {
    let (&start, &len) = ranges.range(..=at).next_back()?;
    VaRange::new(start, len).filter(|range| at < range.end())
}

impl Known {
    pub(super) fn counts(&self) -> CudaCounts {
        CudaCounts {
            granules: self.phys.lock().len(),
            mappings: self.mappings.lock().len(),
            reservations: self.reservations.lock().len(),
            allocations: self.allocations.lock().len(),
            streams: self.streams.read().len(),
            events: self.events.read().len(),
        }
    }

    pub(super) fn add_phys(&self, phys: PhysId, len: u64) {
        let mut known = self.phys.lock();
        let phys = known.entry(phys).or_insert(Phys { len, references: 0 });
        phys.references += 1;
    }

    /// Drops one reference; answers the length.
    pub(super) fn take_phys(&self, phys: PhysId) -> Result<u64, DriverCode> {
        let mut known = self.phys.lock();
        let found = known.get_mut(&phys).ok_or(DriverCode::INVALID_VALUE)?;
        let len = found.len;
        found.references -= 1;
        if found.references == 0 {
            known.remove(&phys);
        }
        Ok(len)
    }

    pub(super) fn phys_len(&self, phys: PhysId) -> Result<u64, DriverCode> {
        self.phys
            .lock()
            .get(&phys)
            .map(|phys| phys.len)
            .ok_or(DriverCode::INVALID_VALUE)
    }

    /// Whether `phys` may be mapped at `range`, as far as can be told without the mappings.
    pub(super) fn check_map(&self, range: VaRange, phys: PhysId) -> Result<(), DriverCode> {
        let created = self.phys_len(phys)?;
        let reserved = around(&self.reservations.lock(), range.start())
            .is_some_and(|reserved| reserved.contains(range));
        if range.len() > created || !reserved || self.is_mapped(range) {
            Err(DriverCode::INVALID_VALUE)
        } else if range.len() < created {
            Err(DriverCode::NOT_SUPPORTED)
        } else {
            Ok(())
        }
    }

    /// Whether something is mapped at a byte of `range`.
    fn is_mapped(&self, range: VaRange) -> bool {
        let mappings = self.mappings.lock();
        let below = mappings.range(..range.end()).next_back();
        below.is_some_and(|(start, len)| start.get() + len > range.start().get())
    }

    pub(super) fn add_mapping(&self, range: VaRange) {
        self.mappings.lock().insert(range.start(), range.len());
    }

    /// The mappings that make up `range`, if it is one or more whole ones without a gap.
    pub(super) fn mappings_of(&self, range: VaRange) -> Result<Vec<VaRange>, DriverCode> {
        let mappings = self.mappings.lock();
        let mut found = Vec::new();
        let mut at = range.start();
        while at < range.end() {
            let len = mappings.get(&at).ok_or(DriverCode::INVALID_VALUE)?;
            let one = VaRange::new(at, *len).ok_or(DriverCode::INVALID_VALUE)?;
            found.push(one);
            at = one.end();
        }
        if at == range.end() && !found.is_empty() {
            Ok(found)
        } else {
            Err(DriverCode::INVALID_VALUE)
        }
    }

    /// Forgets the mappings that make up `range`, as [`mappings_of`](Self::mappings_of).
    pub(super) fn take_mappings(&self, range: VaRange) -> Result<Vec<VaRange>, DriverCode> {
        let found = self.mappings_of(range)?;
        let mut mappings = self.mappings.lock();
        for one in &found {
            mappings.remove(&one.start());
        }
        Ok(found)
    }

    pub(super) fn add_reservation(&self, range: VaRange) {
        self.reservations.lock().insert(range.start(), range.len());
    }

    /// Forgets a reservation, if `range` is exactly one and nothing is mapped in it.
    pub(super) fn take_reservation(&self, range: VaRange) -> Result<(), DriverCode> {
        let mut reservations = self.reservations.lock();
        if reservations.get(&range.start()) != Some(&range.len()) {
            return Err(DriverCode::INVALID_VALUE);
        }
        if self.is_mapped(range) {
            return Err(DriverCode::INVALID_VALUE);
        }
        reservations.remove(&range.start());
        Ok(())
    }

    pub(super) fn add_allocation(&self, start: Va, len: u64) {
        self.allocations.lock().insert(start, len);
    }

    pub(super) fn take_allocation(&self, start: Va) -> Result<u64, DriverCode> {
        self.allocations
            .lock()
            .remove(&start)
            .ok_or(DriverCode::INVALID_VALUE)
    }

    /// Whether every byte of `range` is reserved or allocated, that is no memory but the device's.
    /// Where a GPU reaches pageable memory, libcuda would take an address of the host too.
    pub(super) fn check_ours(&self, range: VaRange) -> Result<(), DriverCode> {
        let mut at = range.start();
        let mut reached = {
            // In nearly every case, this is all.
            let reservations = self.reservations.lock();
            while at < range.end() {
                match around(&reservations, at) {
                    Some(reserved) => at = reserved.end(),
                    None => break,
                }
            }
            at >= range.end()
        };
        if !reached {
            reached = around(&self.allocations.lock(), range.start())
                .is_some_and(|allocated| allocated.contains(range));
        }
        if reached {
            Ok(())
        } else {
            Err(DriverCode::INVALID_VALUE)
        }
    }

    pub(super) fn add_stream(&self, stream: StreamId) {
        // A foreign stream is passed in again and again.
        if self.stream(stream).is_err() {
            self.streams.write().insert(stream);
        }
    }

    pub(super) fn take_stream(&self, stream: StreamId) -> Result<(), DriverCode> {
        match self.streams.write().remove(&stream) {
            true => Ok(()),
            false => Err(DriverCode::INVALID_HANDLE),
        }
    }

    pub(super) fn stream(&self, stream: StreamId) -> Result<(), DriverCode> {
        if stream.0 <= LAST_SPECIAL_STREAM || self.streams.read().contains(&stream) {
            Ok(())
        } else {
            Err(DriverCode::INVALID_HANDLE)
        }
    }

    pub(super) fn add_event(&self, event: EventId) {
        self.events.write().insert(event);
    }

    pub(super) fn take_event(&self, event: EventId) -> Result<(), DriverCode> {
        match self.events.write().remove(&event) {
            true => Ok(()),
            false => Err(DriverCode::INVALID_HANDLE),
        }
    }

    pub(super) fn event(&self, event: EventId) -> Result<(), DriverCode> {
        match self.events.read().contains(&event) {
            true => Ok(()),
            false => Err(DriverCode::INVALID_HANDLE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, len: u64) -> VaRange {
        VaRange::new(Va::new(start), len).unwrap()
    }

    #[test]
    fn a_map_must_fit_its_granule_and_one_reservation() {
        let known = Known::default();
        known.add_phys(PhysId(7), 0x200);
        known.add_reservation(range(0x1000, 0x400));
        known.add_reservation(range(0x1400, 0x400));
        assert_eq!(known.check_map(range(0x1200, 0x200), PhysId(7)), Ok(()));
        let refused = |start, len, phys| {
            known
                .check_map(range(start, len), PhysId(phys))
                .unwrap_err()
        };
        assert_eq!(refused(0x1000, 0x100, 7), DriverCode::NOT_SUPPORTED);
        assert_eq!(refused(0x1000, 0x400, 7), DriverCode::INVALID_VALUE);
        assert_eq!(refused(0x1000, 0x200, 8), DriverCode::INVALID_VALUE);
        // Two reservations side by side are not one.
        assert_eq!(refused(0x1300, 0x200, 7), DriverCode::INVALID_VALUE);
        assert_eq!(refused(0xf00, 0x200, 7), DriverCode::INVALID_VALUE);
    }

    #[test]
    fn work_is_confined_to_device_memory() {
        let known = Known::default();
        known.add_reservation(range(0x1000, 0x400));
        known.add_reservation(range(0x1400, 0x400));
        known.add_allocation(Va::new(0x4000), 0x100);
        for (start, len) in [(0x1000, 0x800), (0x17f8, 8), (0x4080, 0x80)] {
            assert!(known.check_ours(range(start, len)).is_ok(), "{start:#x}");
        }
        for (start, len) in [(0xfff, 2), (0x17ff, 2), (0x4080, 0x81), (0x2000, 8)] {
            assert!(known.check_ours(range(start, len)).is_err(), "{start:#x}");
        }
        assert_eq!(known.take_allocation(Va::new(0x4000)), Ok(0x100));
        assert!(known.check_ours(range(0x4080, 0x80)).is_err());
    }

    #[test]
    fn a_granule_imported_beside_its_original_is_released_twice() {
        let known = Known::default();
        known.add_phys(PhysId(7), 0x200);
        known.add_phys(PhysId(7), 0x200);
        assert_eq!(known.take_phys(PhysId(7)), Ok(0x200));
        assert_eq!(known.phys_len(PhysId(7)), Ok(0x200));
        assert_eq!(known.take_phys(PhysId(7)), Ok(0x200));
        assert!(known.take_phys(PhysId(7)).is_err());
    }

    #[test]
    fn ids_are_taken_once() {
        let known = Known::default();
        known.add_event(EventId(9));
        assert!(known.event(EventId(9)).is_ok());
        assert!(known.take_event(EventId(9)).is_ok());
        assert!(known.take_event(EventId(9)).is_err());
        assert!(known.stream(StreamId::DEFAULT).is_ok());
        assert!(known.take_stream(StreamId::DEFAULT).is_err());
        known.add_reservation(range(0x1000, 0x400));
        assert!(known.take_reservation(range(0x1000, 0x200)).is_err());
        assert!(known.take_reservation(range(0x1000, 0x400)).is_ok());
        assert!(known.take_reservation(range(0x1000, 0x400)).is_err());
    }
}
