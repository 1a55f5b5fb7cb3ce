//! Map, access, unmap, aliases, and what memory holds.

use std::sync::Barrier;
use std::thread;

use super::addresses::bad_lengths;
use super::rig::{MAIN, Rig, check, range, sub};
use super::{Failure, Outcome};
use crate::driver::{Access, DriverCode, DriverKind, DriverResult, GranuleProps, SharedDriver};
use crate::units::VaRange;

const INVALID: DriverCode = DriverCode::INVALID_VALUE;

pub(super) fn part_of_a_granule_cannot_be_mapped(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let all = rig.reserve(4)?;
        let phys = rig.granule(4)?;
        for units in [1, 2, 3] {
            let result = rig.d.map(rig.part(all, 0, units)?, phys);
            let what = format!("mapping {units} units of a granule of 4");
            rig.refused(&what, result, DriverCode::NOT_SUPPORTED)?;
        }
        rig.map_open(all, phys)?;
        rig.usable("the whole granule after that", all)
    })
}

pub(super) fn more_than_a_granule_cannot_be_mapped(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let all = rig.reserve(4)?;
        let phys = rig.granule(2)?;
        for units in [3, 4] {
            let result = rig.d.map(rig.part(all, 0, units)?, phys);
            let what = format!("mapping {units} units of a granule of 2");
            rig.refused_somehow(&what, result, INVALID)?;
        }
        for len in bad_lengths(rig.unit)
            .into_iter()
            .filter(|&len| len != u64::MAX)
        {
            let result = rig.d.map(range(all.start(), len)?, phys);
            let what = format!("mapping {len} bytes");
            rig.refused_somehow(&what, result, INVALID)?;
        }
        let part = rig.part(all, 1, 2)?;
        rig.map_open(part, phys)?;
        rig.usable("the granule after that", part)
    })
}

pub(super) fn a_mapping_starts_at_a_multiple_of_the_granularity(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let all = rig.reserve(2)?;
        let phys = rig.granule(1)?;
        for offset in [1, rig.unit / 2, rig.unit - 1] {
            let result = rig.d.map(sub(all, offset, rig.unit)?, phys);
            let what = format!("mapping at offset {offset}");
            rig.refused_somehow(&what, result, INVALID)?;
        }
        Ok(())
    })
}

pub(super) fn a_mapped_range_cannot_be_mapped_again(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let all = rig.reserve(4)?;
        let middle = rig.part(all, 1, 2)?;
        let old = rig.granule(2)?;
        rig.map_open(middle, old)?;
        rig.d.fill(middle, 0x11, MAIN)?;
        let new = rig.granule(2)?;
        for from in [0, 1, 2] {
            let result = rig.d.map(rig.part(all, from, 2)?, new);
            let what = format!("mapping units {from}.. over a mapping of units 1..3");
            rig.refused(&what, result, INVALID)?;
        }
        let result = rig.d.map(middle, old);
        rig.refused("mapping a granule over itself", result, INVALID)?;
        let whole = rig.granule(4)?;
        let result = rig.d.map(all, whole);
        rig.refused("mapping around a mapping", result, INVALID)?;
        rig.filled("the old mapping after that", middle, 0x11, MAIN)
    })
}

pub(super) fn a_mapping_lies_inside_one_reservation(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let all = rig.reserve(2)?;
        let phys = rig.granule(2)?;
        let before = all.start().get() - rig.unit;
        let outside = [
            ("across the end", rig.part(all, 1, 1)?.start()),
            ("across the start", crate::units::Va::new(before)),
        ];
        for (what, start) in outside {
            let result = rig.d.map(range(start, 2 * rig.unit)?, phys);
            let what = format!("mapping {what} of a reservation");
            rig.refused_somehow(&what, result, INVALID)?;
        }
        rig.map_open(all, phys)?;
        rig.usable("the granule after that", all)
    })
}

pub(super) fn a_released_granule_cannot_be_mapped(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let all = rig.reserve(2)?;
        let (first, second) = (rig.part(all, 0, 1)?, rig.part(all, 1, 1)?);
        let gone = rig.granule(1)?;
        rig.release(gone)?;
        let result = rig.d.map(first, gone);
        rig.refused_somehow("mapping a released granule", result, INVALID)?;
        let mapped = rig.granule(1)?;
        rig.map_open(first, mapped)?;
        rig.release(mapped)?;
        let result = rig.d.map(second, mapped);
        rig.refused_somehow("mapping a released, mapped granule", result, INVALID)
    })
}

/// Two granules of 2 units and a gap of 1 after them; the range has 5 units.
fn two_and_a_gap(rig: &mut Rig<'_>) -> Outcome<VaRange> {
    let all = rig.reserve(5)?;
    for from in [0, 2] {
        let phys = rig.granule(2)?;
        rig.map_open(rig.part(all, from, 2)?, phys)?;
    }
    Ok(all)
}

/// Tries a call on ranges that are not whole mappings.
fn whole_only(rig: &Rig<'_>, all: VaRange, call: impl Fn(VaRange) -> DriverResult<()>) -> Outcome {
    for (from, units) in [(0, 1), (1, 1), (0, 3), (1, 3), (1, 2)] {
        let what = format!("units {from}..{} of mappings 0..2 and 2..4", from + units);
        rig.refused(&what, call(rig.part(all, from, units)?), INVALID)?;
    }
    Ok(())
}

pub(super) fn access_covers_whole_mappings(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let all = two_and_a_gap(rig)?;
        whole_only(rig, all, |r| rig.d.set_access(r, Access::Read))?;
        let both = rig.part(all, 0, 4)?;
        rig.usable("memory whose access could not be changed", both)?;
        rig.d.set_access(both, Access::ReadWrite)?;
        rig.usable("memory after access to both mappings at once", both)
    })
}

pub(super) fn access_refuses_gaps(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let all = two_and_a_gap(rig)?;
        let gap = rig.part(all, 4, 1)?;
        let last = rig.granule(1)?;
        let result = rig.d.set_access(all, Access::Read);
        rig.refused_somehow("access with a gap at the end", result, INVALID)?;
        let result = rig.d.set_access(gap, Access::ReadWrite);
        rig.refused_somehow("access to a gap", result, INVALID)?;
        let middle = rig.part(all, 2, 2)?;
        rig.unmap(middle)?;
        rig.map_open(gap, last)?;
        let result = rig.d.set_access(all, Access::Read);
        rig.refused_somehow("access with a gap in the middle", result, INVALID)?;
        rig.usable("memory before the gap", rig.part(all, 0, 2)?)?;
        rig.usable("memory after the gap", gap)
    })
}

pub(super) fn access_changes_in_place(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (all, _) = rig.memory(1)?;
        let (copy, _) = rig.memory(1)?;
        rig.d.fill(all, 0x21, MAIN)?;
        rig.d.sync_stream(MAIN)?;
        rig.d.set_access(all, Access::Read)?;
        rig.d.copy(copy.start(), all, MAIN)?;
        rig.filled("a copy of read-only memory", copy, 0x21, MAIN)?;
        rig.d.sync_stream(MAIN)?;
        rig.d.set_access(all, Access::ReadWrite)?;
        rig.usable("memory that was read-only for a while", all)
    })
}

pub(super) fn unmap_covers_whole_mappings(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let all = two_and_a_gap(rig)?;
        whole_only(rig, all, |r| rig.d.unmap(r))?;
        let both = rig.part(all, 0, 4)?;
        rig.usable("memory that could not be unmapped", both)?;
        rig.unmap(both)?;
        let result = rig.d.unmap(both);
        rig.refused_somehow("unmapping twice", result, INVALID)
    })
}

pub(super) fn unmap_refuses_gaps(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let all = two_and_a_gap(rig)?;
        let gap = rig.part(all, 4, 1)?;
        let last = rig.granule(1)?;
        rig.refused_somehow("unmapping a gap", rig.d.unmap(gap), INVALID)?;
        let result = rig.d.unmap(all);
        rig.refused_somehow("unmapping with a gap at the end", result, INVALID)?;
        rig.usable("memory before the gap", rig.part(all, 0, 4)?)?;
        let middle = rig.part(all, 2, 2)?;
        rig.unmap(middle)?;
        rig.map_open(gap, last)?;
        let result = rig.d.unmap(all);
        rig.refused_somehow("unmapping with a gap in the middle", result, INVALID)?;
        rig.usable("memory before the gap", rig.part(all, 0, 2)?)?;
        rig.usable("memory after the gap", gap)
    })
}

pub(super) fn bad_lengths_of_access_and_unmap_are_refused(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (all, _) = rig.memory(2)?;
        let far = u64::MAX - all.start().get();
        for len in [0, 1, rig.unit - 1, rig.unit + 1, 3 * rig.unit, far] {
            let bad = range(all.start(), len)?;
            let result = rig.d.set_access(bad, Access::Read);
            rig.refused_somehow(&format!("access to {len} bytes"), result, INVALID)?;
            let result = rig.d.unmap(bad);
            rig.refused_somehow(&format!("unmapping {len} bytes"), result, INVALID)?;
        }
        rig.usable("memory after that", all)
    })
}

pub(super) fn a_released_granule_lives_until_its_last_unmap(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (one, phys) = rig.memory(2)?;
        let two = rig.reserve(2)?;
        rig.map_open(two, phys)?;
        rig.d.fill(one, 0x31, MAIN)?;
        let before = rig.d.memory_info()?.free;
        rig.release(phys)?;
        rig.filled("a released granule", one, 0x31, MAIN)?;
        rig.d.sync_stream(MAIN)?;
        rig.unmap(one)?;
        rig.filled("a released granule, mapped once", two, 0x31, MAIN)?;
        let exact = rig.d.kind() != DriverKind::Cuda;
        let during = rig.d.memory_info()?.free;
        ensure!(
            !exact || during == before,
            "free memory went from {before} to {during} though the granule was mapped"
        );
        rig.unmap(two)?;
        let after = rig.d.memory_info()?.free;
        ensure!(
            !exact || after == before + 2 * rig.unit,
            "free memory went from {before} to {after}; {} bytes were due",
            2 * rig.unit
        );
        Ok(())
    })
}

pub(super) fn granules_of_different_lengths_lie_side_by_side(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let all = rig.reserve(6)?;
        for (from, units) in [(3, 3), (0, 1), (1, 2)] {
            let phys = rig.granule(units)?;
            rig.map(rig.part(all, from, units)?, phys)?;
        }
        rig.d.set_access(all, Access::ReadWrite)?;
        rig.usable("three granules in a row", all)?;
        rig.unmap(all)
    })
}

pub(super) fn alias_sees_the_same_bytes(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (one, phys) = rig.memory(2)?;
        let (two, three) = (rig.reserve(2)?, rig.reserve(2)?);
        rig.d.fill(one, 0x41, MAIN)?;
        rig.map_open(two, phys)?;
        rig.map_open(three, phys)?;
        rig.filled("an alias made after the write", two, 0x41, MAIN)?;
        rig.d.fill(rig.part(two, 1, 1)?, 0x42, MAIN)?;
        for (what, alias) in [("first", one), ("second", two), ("third", three)] {
            let (same, new) = (rig.part(alias, 0, 1)?, rig.part(alias, 1, 1)?);
            rig.filled(
                &format!("the {what} alias, unwritten half"),
                same,
                0x41,
                MAIN,
            )?;
            rig.filled(&format!("the {what} alias, written half"), new, 0x42, MAIN)?;
        }
        Ok(())
    })
}

pub(super) fn one_alias_may_go_while_another_stays(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (one, phys) = rig.memory(1)?;
        let two = rig.reserve(1)?;
        for round in 0..8 {
            let (old, new) = if round % 2 == 0 {
                (one, two)
            } else {
                (two, one)
            };
            rig.d.fill(old, round, MAIN)?;
            rig.map_open(new, phys)?;
            rig.d.sync_stream(MAIN)?;
            rig.unmap(old)?;
            rig.filled("the alias that stayed", new, round, MAIN)?;
        }
        Ok(())
    })
}

pub(super) fn contents_survive_a_remap(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (one, phys) = rig.memory(2)?;
        rig.d.fill(one, 0x51, MAIN)?;
        rig.d.sync_stream(MAIN)?;
        rig.unmap(one)?;
        // Somebody else's memory in between, at the same addresses.
        let other = rig.granule(2)?;
        rig.map_open(one, other)?;
        rig.usable("other memory at those addresses", one)?;
        let two = rig.reserve(2)?;
        rig.map_open(two, phys)?;
        rig.filled("a granule mapped again elsewhere", two, 0x51, MAIN)
    })
}

pub(super) fn fresh_memory_reads_zero(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        for round in 0..3 {
            let (all, phys) = rig.memory(2)?;
            rig.filled(&format!("fresh memory, round {round}"), all, 0, MAIN)?;
            rig.d.fill(all, 0xFF, MAIN)?;
            rig.d.sync_stream(MAIN)?;
            rig.unmap(all)?;
            rig.release(phys)?;
        }
        Ok(())
    })
}

/// One thread's part: its own place in a shared reservation, mapped anew a few times.
fn map_rounds(d: &SharedDriver, place: VaRange, byte: u8) -> Outcome {
    let stream = d.create_stream()?;
    for _ in 0..4 {
        let phys = d.create(place.len(), GranuleProps::default())?;
        d.map(place, phys)?;
        d.set_access(place, Access::ReadWrite)?;
        d.fill(place, byte, stream)?;
        if d.info().capabilities.data {
            let mut bytes = [0; 64];
            d.copy_to_host(&mut bytes, sub(place, place.len() - 64, 64)?, stream)?;
            ensure!(bytes == [byte; 64], "thread {byte} read {bytes:02x?}");
        }
        d.sync_stream(stream)?;
        d.unmap(place)?;
        d.release(phys)?;
    }
    Ok(d.destroy_stream(stream)?)
}

pub(super) fn threads_map_at_once_in_one_reservation(d: &SharedDriver) -> Outcome {
    const THREADS: u8 = 32;
    check(d, |rig| {
        let all = rig.reserve(u64::from(THREADS))?;
        let mut places = Vec::new();
        for i in 0..THREADS {
            places.push((i, rig.part(all, i.into(), 1)?));
        }
        let start = Barrier::new(THREADS.into());
        let (start, d) = (&start, rig.d);
        thread::scope(|scope| {
            let threads: Vec<_> = places
                .into_iter()
                .map(|(i, place)| {
                    scope.spawn(move || {
                        start.wait();
                        map_rounds(d, place, i)
                    })
                })
                .collect();
            threads.into_iter().try_for_each(|thread| {
                let died = |_| Err(Failure::new("the driver panicked in a thread"));
                thread.join().unwrap_or_else(died)
            })
        })
    })
}
