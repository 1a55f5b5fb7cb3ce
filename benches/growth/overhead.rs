//! What the crate adds to the driver calls that it makes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::Criterion;
use granule::driver::record::{Entry, RecordDriver};
use granule::driver::{Access, Call, Driver, GranuleProps, PhysId};
use granule::units::VaRange;
use granule::{Arena, Device};

use super::support::{Outcome, Rig, median, must};
use super::{Scale, dynamic_pool, goal, group, measure, part, rest};
use crate::ensure;

/// A driver call that an arena made, with addresses as offsets from its base.
#[derive(Clone, Copy)]
enum Step {
    Reserve(u64),
    Create(u64),
    /// The granule created longest ago that is not mapped yet.
    Map(u64, u64),
    Access(u64, u64),
    /// The mapping made last.
    Unmap(u64, u64),
    /// The granule unmapped last.
    Release,
    Free,
}

/// An arena's cost beside that of the very driver calls it makes, in turns.
pub fn overhead(criterion: &mut Criterion, rig: &Rig, scale: &Scale) {
    let script = must(record(rig, scale));
    let growing = script
        .iter()
        .position(|s| matches!(s, Step::Unmap(..)))
        .unwrap_or(script.len());
    let mut group = group(criterion, "overhead");
    let (mut ours_grow, mut ours_all) = (Vec::new(), Vec::new());
    let (mut bare_grow, mut bare_all) = (Vec::new(), Vec::new());
    let mut turn = false;
    measure(&mut group, "arena and bare calls in turns", || {
        turn = !turn;
        let mut all = Duration::ZERO;
        for ours in [turn, !turn] {
            rest(rig);
            if ours {
                let (grow, whole) = arena_round(&rig.device, scale)?;
                ours_grow.push(grow);
                ours_all.push(whole);
                all = whole;
            } else {
                let (grow, whole) = replay(&**rig.device.driver(), &script, growing)?;
                bare_grow.push(grow);
                bare_all.push(whole);
            }
        }
        Ok(all)
    });
    for (case, ours, bare) in [
        ("growing, from nothing", ours_grow, bare_grow),
        ("growing and giving back", ours_all, bare_all),
    ] {
        if bare.is_empty() {
            continue;
        }
        let (a, b) = (median(&ours), median(&bare));
        let percent = (a.as_secs_f64() / b.as_secs_f64() - 1.0) * 100.0;
        let verdict = goal(rig, "under 5 %", percent < 5.0);
        let note = format!("{percent:+.1} % over the same calls; {verdict}");
        let case = format!("{}, {case}", scale.growth());
        rig.row(&case, "granule, dynamic pool", ours, note);
        let note = format!("{} driver calls", script.len());
        rig.row(&case, "its driver calls alone", bare, note);
    }
    group.finish();
}

/// Time to reserve and grow, and of that and giving everything back.
fn arena_round(device: &Device, scale: &Scale) -> Outcome<(Duration, Duration)> {
    let pool = dynamic_pool(device, scale.most)?;
    let started = Instant::now();
    let arena = Arena::new(&pool, scale.most)?;
    for to in scale.steps() {
        arena.grow(to)?;
    }
    let grown = started.elapsed();
    ensure!(arena.mapped() == scale.most, "mapped {}", arena.mapped());
    let again = Instant::now();
    arena.close().map_err(|(_, error)| error)?;
    let whole = grown + again.elapsed();
    ensure!(pool.stats().created == 0, "memory was kept");
    Ok((grown, whole))
}

/// The driver calls of one [`arena_round`].
fn record(rig: &Rig, scale: &Scale) -> Outcome<Vec<Step>> {
    let recorder = Arc::new(RecordDriver::with_log(rig.device.driver().clone(), 1 << 16));
    let device = Device::from_driver(recorder.clone());
    arena_round(&device, scale)?;
    let log = recorder.log();
    let base = log.iter().find(|e| e.call == Call::Map).map_or(0, |e| e.at);
    let mut script = Vec::new();
    for Entry {
        call,
        at,
        len,
        code,
        ..
    } in log
    {
        ensure!(code.is_none(), "{call} failed: {code:?}");
        let offset = at.wrapping_sub(base);
        script.push(match call {
            Call::Reserve => Step::Reserve(len),
            Call::Create => Step::Create(len),
            Call::Map => Step::Map(offset, len),
            Call::SetAccess => Step::Access(offset, len),
            Call::Unmap => Step::Unmap(offset, len),
            Call::Release => Step::Release,
            Call::FreeReservation => Step::Free,
            other => return Err(format!("an arena called {other}").into()),
        });
    }
    Ok(script)
}

/// Makes the calls; time of the first `growing` ones and of all.
fn replay(driver: &dyn Driver, script: &[Step], growing: usize) -> Outcome<(Duration, Duration)> {
    let mut range = VaRange::EMPTY;
    let mut created: std::collections::VecDeque<PhysId> = Default::default();
    let mut mapped: Vec<PhysId> = Vec::new();
    let mut unmapped = None;
    let mut grown = Duration::ZERO;
    let started = Instant::now();
    for (i, step) in script.iter().enumerate() {
        if i == growing {
            grown = started.elapsed();
        }
        match *step {
            Step::Reserve(len) => range = driver.reserve(len, 0)?,
            Step::Create(len) => created.push_back(driver.create(len, GranuleProps::default())?),
            Step::Map(offset, len) => {
                let phys = created.pop_front().ok_or("nothing to map")?;
                driver.map(part(range, offset, len)?, phys)?;
                mapped.push(phys);
            }
            Step::Access(offset, len) => {
                driver.set_access(part(range, offset, len)?, Access::ReadWrite)?;
            }
            Step::Unmap(offset, len) => {
                driver.unmap(part(range, offset, len)?)?;
                unmapped = mapped.pop();
            }
            Step::Release => driver.release(unmapped.take().ok_or("nothing to release")?)?,
            Step::Free => driver.free_reservation(range)?,
        }
    }
    let whole = started.elapsed();
    ensure!(mapped.is_empty() && created.is_empty(), "memory was kept");
    Ok((grown, whole))
}
