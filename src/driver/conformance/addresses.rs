//! Reservations, creation and release.

use super::rig::{check, range};
use super::{Failure, Outcome};
use crate::driver::{DriverCode, DriverKind, GranuleProps, SharedDriver};
use crate::units::{VaRange, round_up};

/// Lengths that are no multiple of the granularity, zero included.
pub(super) fn bad_lengths(unit: u64) -> [u64; 6] {
    [0, 1, unit - 1, unit + 1, unit / 2, u64::MAX]
}

pub(super) fn a_reservation_starts_at_a_multiple_of_its_alignment(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let unit = rig.unit;
        for align in [0, 1, 8, unit, 2 * unit, 16 * unit, 512 * unit] {
            let made = rig.d.reserve(3 * unit, align)?;
            rig.keep_reservation(made);
            let need = align.max(unit);
            ensure!(
                made.start().is_aligned(need) && made.len() == 3 * unit,
                "asked for {} bytes at a multiple of {need}, got {made}",
                3 * unit
            );
        }
        Ok(())
    })
}

pub(super) fn reserve_refuses_bad_lengths(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let code = DriverCode::INVALID_VALUE;
        for len in bad_lengths(rig.unit) {
            let result = rig.d.reserve(len, 0);
            rig.refused_somehow(&format!("reserving {len} bytes"), result, code)?;
        }
        // The largest multiple of the granularity in 64 bits.
        let huge = !(rig.unit - 1);
        ensure!(
            rig.d.reserve(huge, 0).is_err(),
            "{huge} bytes of addresses were reserved"
        );
        Ok(())
    })
}

pub(super) fn reserve_refuses_an_alignment_that_is_no_power_of_two(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        for align in [3 * rig.unit, rig.unit + 1, u64::MAX] {
            let result = rig.d.reserve(rig.unit, align);
            let what = format!("reserving at a multiple of {align}");
            rig.refused_somehow(&what, result, DriverCode::INVALID_VALUE)?;
        }
        Ok(())
    })
}

pub(super) fn reservations_do_not_overlap(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let mut made: Vec<VaRange> = Vec::new();
        for i in 0..16 {
            let new = rig.reserve(i % 3 + 1)?;
            if let Some(old) = made.iter().find(|old| old.overlaps(new)) {
                return Err(Failure::new(format!("{old} and {new} overlap")));
            }
            made.push(new);
            if i % 4 == 3 {
                let old = made.swap_remove(i as usize / 4);
                rig.free_reservation(old)?;
            }
        }
        Ok(())
    })
}

pub(super) fn a_reservation_is_not_freed_in_part(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let all = rig.reserve(4)?;
        let parts = [
            ("the first half", rig.part(all, 0, 2)?),
            ("the second half", rig.part(all, 2, 2)?),
            ("the middle", rig.part(all, 1, 2)?),
            ("one unit too much", range(all.start(), 5 * rig.unit)?),
        ];
        for (what, part) in parts {
            let result = rig.d.free_reservation(part);
            let what = format!("freeing {what} of a reservation");
            rig.refused_somehow(&what, result, DriverCode::INVALID_VALUE)?;
        }
        let phys = rig.granule(4)?;
        rig.map_open(all, phys)?;
        rig.usable("memory in the reservation after that", all)
    })
}

pub(super) fn a_reservation_is_freed_once(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let all = rig.reserve(2)?;
        rig.free_reservation(all)?;
        let result = rig.d.free_reservation(all);
        let code = DriverCode::INVALID_VALUE;
        rig.refused_somehow("freeing a reservation twice", result, code)?;
        let phys = rig.granule(2)?;
        let result = rig.d.map(all, phys);
        rig.refused_somehow("mapping into a freed reservation", result, code)
    })
}

pub(super) fn a_reservation_is_not_freed_while_mapped(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let all = rig.reserve(3)?;
        let middle = rig.part(all, 1, 1)?;
        let phys = rig.granule(1)?;
        rig.map_open(middle, phys)?;
        let result = rig.d.free_reservation(all);
        let code = DriverCode::INVALID_VALUE;
        rig.refused("freeing a reservation with a mapping", result, code)?;
        rig.usable("the mapping after that", middle)?;
        rig.unmap(middle)?;
        rig.free_reservation(all)
    })
}

pub(super) fn create_refuses_bad_lengths(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        for len in bad_lengths(rig.unit) {
            let result = rig.d.create(len, GranuleProps::default());
            let what = format!("creating {len} bytes");
            rig.refused_somehow(&what, result, DriverCode::INVALID_VALUE)?;
        }
        Ok(())
    })
}

pub(super) fn more_than_the_device_has_is_out_of_memory(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let total = rig.d.info().total_memory;
        let more = round_up(total, rig.unit)
            .and_then(|t| t.checked_add(rig.unit))
            .ok_or_else(|| Failure::new("total memory is near 2^64"))?;
        let result = rig.d.create(more, GranuleProps::default());
        let what = format!("creating {more} bytes of {total}");
        rig.refused(&what, result, DriverCode::OUT_OF_MEMORY)?;
        // The largest multiple of the granularity in 64 bits.
        let huge = !(rig.unit - 1);
        let result = rig.d.create(huge, GranuleProps::default());
        let what = format!("creating {huge} bytes");
        rig.refused_somehow(&what, result, DriverCode::OUT_OF_MEMORY)?;
        let (ok, _) = rig.memory(1)?;
        rig.usable("a granule after that", ok)
    })
}

pub(super) fn created_bytes_are_counted(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let before = rig.d.memory_info()?;
        let total = rig.d.info().total_memory;
        let exact = rig.d.kind() != DriverKind::Cuda;
        ensure!(
            before.free <= before.total && (!exact || before.total == total),
            "{} free of {}, and info() says {total}",
            before.free,
            before.total
        );
        let phys = rig.granule(4)?;
        let during = rig.d.memory_info()?;
        ensure!(
            !exact || during.free + 4 * rig.unit == before.free,
            "{} free before, {} after creating {} bytes",
            before.free,
            during.free,
            4 * rig.unit
        );
        rig.release(phys)
    })
}

pub(super) fn a_granule_is_released_once(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let phys = rig.granule(1)?;
        rig.release(phys)?;
        let result = rig.d.release(phys);
        let code = DriverCode::INVALID_VALUE;
        rig.refused_somehow("releasing a granule twice", result, code)?;
        let (all, mapped) = rig.memory(1)?;
        rig.release(mapped)?;
        let result = rig.d.release(mapped);
        rig.refused_somehow("releasing a mapped granule twice", result, code)?;
        rig.usable("the mapping after that", all)
    })
}
