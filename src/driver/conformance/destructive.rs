//! What loses the device, and handles that a real driver would follow into nowhere.

use super::rig::{MAIN, Rig, risk};
use super::{Failure, Outcome};
use crate::driver::{
    Access, Call, DriverCode, DriverResult, EventId, GranuleProps, Kernel, PhysId, SharedDriver,
    StreamId,
};

/// Requires that work which may not run is refused, or loses the device when it runs.
fn refused_or_lost(rig: &Rig<'_>, what: &str, queued: DriverResult<()>) -> Outcome {
    match (queued, rig.d.sync_stream(MAIN)) {
        (Err(_), Ok(())) => Ok(()),
        (_, Err(error)) if error.code == DriverCode::ILLEGAL_ADDRESS => Ok(()),
        (_, Err(error)) => Err(Failure::new(format!("{what}: the sync said {error}"))),
        (Ok(()), Ok(())) => Err(Failure::new(format!("{what}: went through"))),
    }
}

pub(super) fn a_new_mapping_cannot_be_accessed(d: &SharedDriver) -> Outcome {
    risk(d, |rig| {
        let range = rig.reserve(1)?;
        let phys = rig.granule(1)?;
        rig.map(range, phys)?;
        let queued = rig.d.fill(range, 1, MAIN);
        refused_or_lost(rig, "a fill without access", queued)
    })
}

pub(super) fn a_read_only_mapping_cannot_be_written(d: &SharedDriver) -> Outcome {
    risk(d, |rig| {
        let (range, _) = rig.memory(1)?;
        rig.d.set_access(range, Access::Read)?;
        let queued = rig.d.launch(Kernel::WritePattern { range, seed: 1 }, MAIN);
        refused_or_lost(rig, "a write to read-only memory", queued)
    })
}

pub(super) fn a_kernel_over_nothing_loses_the_device(d: &SharedDriver) -> Outcome {
    risk(d, |rig| {
        let range = rig.reserve(2)?;
        let half = rig.part(range, 0, 1)?;
        let phys = rig.granule(1)?;
        rig.map_open(half, phys)?;
        let queued = rig.d.launch(Kernel::WritePattern { range, seed: 1 }, MAIN);
        refused_or_lost(rig, "a kernel that runs off a mapping", queued)
    })
}

pub(super) fn unmapping_under_held_work_loses_the_device(d: &SharedDriver) -> Outcome {
    risk(d, |rig| {
        let (range, _) = rig.memory(1)?;
        let stream = rig.stream()?;
        let hold = rig.d.hold(stream)?;
        rig.d.fill(range, 1, stream)?;
        rig.unmap(range)?;
        drop(hold);
        let result = rig.d.sync_stream(stream);
        rig.refused(
            "a sync after unmapping under work",
            result,
            DriverCode::ILLEGAL_ADDRESS,
        )
    })
}

fn lose(rig: &mut Rig<'_>) -> Outcome {
    let (range, _) = rig.memory(1)?;
    let hold = rig.d.hold(MAIN)?;
    rig.d.fill(range, 1, MAIN)?;
    rig.unmap(range)?;
    drop(hold);
    let result = rig.d.sync_stream(MAIN);
    let what = "a sync after unmapping under work";
    rig.refused(what, result, DriverCode::ILLEGAL_ADDRESS)
}

pub(super) fn a_lost_device_stays_lost(d: &SharedDriver) -> Outcome {
    risk(d, |rig| {
        let event = rig.mark(MAIN)?;
        let (other, _) = rig.memory(1)?;
        let stream = rig.stream()?;
        lose(rig)?;
        let bytes = [0; 8];
        for _ in 0..2 {
            let results = [
                (Call::SyncStream, rig.d.sync_stream(stream)),
                (Call::RecordEvent, rig.d.record_event(event, stream)),
                (Call::SyncEvent, rig.d.sync_event(event)),
                (Call::QueryEvent, rig.d.query_event(event).map(drop)),
                (Call::WaitEvent, rig.d.wait_event(stream, event)),
                (Call::Fill, rig.d.fill(other, 1, stream)),
                (
                    Call::CopyFromHost,
                    rig.d.copy_from_host(other.start(), &bytes, stream),
                ),
                (
                    Call::Launch,
                    rig.d.launch(Kernel::Spin { nanos: 1 }, stream),
                ),
                (Call::Hold, rig.d.hold(stream).map(drop)),
                (
                    Call::Create,
                    rig.d.create(rig.unit, GranuleProps::default()).map(drop),
                ),
            ];
            for (call, result) in results {
                let what = format!("{call} on a lost device");
                rig.refused(&what, result, DriverCode::ILLEGAL_ADDRESS)?;
            }
        }
        Ok(())
    })
}

pub(super) fn unknown_handles_are_refused(d: &SharedDriver) -> Outcome {
    risk(d, |rig| {
        let range = rig.reserve(1)?;
        let (memory, _) = rig.memory(1)?;
        let stale_stream = rig.d.create_stream()?;
        rig.d.destroy_stream(stale_stream)?;
        let stale_event = rig.d.create_event()?;
        rig.d.destroy_event(stale_event)?;
        let phys = PhysId(u64::MAX - 7);
        let invalid = DriverCode::INVALID_VALUE;
        rig.refused("mapping garbage", rig.d.map(range, phys), invalid)?;
        rig.refused("releasing garbage", rig.d.release(phys), invalid)?;
        let handle = DriverCode::INVALID_HANDLE;
        for s in [stale_stream, StreamId(u64::MAX - 7)] {
            let event = rig.event()?;
            rig.refused("key", rig.d.stream_key(s), handle)?;
            rig.refused("sync", rig.d.sync_stream(s), handle)?;
            rig.refused("destroy", rig.d.destroy_stream(s), handle)?;
            rig.refused("record", rig.d.record_event(event, s), handle)?;
            rig.refused("wait", rig.d.wait_event(s, event), handle)?;
            rig.refused("fill", rig.d.fill(memory, 1, s), handle)?;
            rig.refused("hold", rig.d.hold(s), handle)?;
        }
        for e in [stale_event, EventId(u64::MAX - 7)] {
            rig.refused("query", rig.d.query_event(e), handle)?;
            rig.refused("sync", rig.d.sync_event(e), handle)?;
            rig.refused("record", rig.d.record_event(e, MAIN), handle)?;
            rig.refused("wait", rig.d.wait_event(MAIN, e), handle)?;
            rig.refused("destroy", rig.d.destroy_event(e), handle)?;
        }
        rig.usable("memory after that", memory)
    })
}
