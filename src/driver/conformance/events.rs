//! Records, queries, syncs and waits.

use super::Outcome;
use super::rig::{MAIN, check};
use crate::driver::SharedDriver;

pub(super) fn an_event_never_recorded_has_passed(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let event = rig.event()?;
        let passed = rig.d.query_event(event)?;
        ensure!(passed, "an event that was never recorded is pending");
        rig.d.sync_event(event)?;
        let stream = rig.stream()?;
        rig.d.wait_event(stream, event)?;
        let after = rig.mark(stream)?;
        rig.passes("work after a wait for it", after)
    })
}

pub(super) fn an_event_passes_after_the_work_before_it(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (all, _) = rig.memory(1)?;
        let stream = rig.stream()?;
        let hold = rig.d.hold(stream)?;
        rig.d.fill(all, 0x12, stream)?;
        let event = rig.mark(stream)?;
        rig.pending("an event behind a hold", event)?;
        drop(hold);
        rig.d.sync_event(event)?;
        let passed = rig.d.query_event(event)?;
        ensure!(passed, "an event is pending though it was synced");
        // The host saw the event pass, so another stream may read.
        rig.filled("work before an event", all, 0x12, MAIN)
    })
}

pub(super) fn an_event_answers_for_its_last_record(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (held, free) = (rig.stream()?, rig.stream()?);
        let event = rig.mark(free)?;
        rig.passes("an event on a free stream", event)?;
        let hold = rig.d.hold(held)?;
        rig.d.record_event(event, held)?;
        rig.pending("the event recorded again behind a hold", event)?;
        rig.d.record_event(event, free)?;
        rig.passes("the event recorded a third time", event)?;
        drop(hold);
        rig.d.sync_stream(held)?;
        rig.passes("the event at the end", event)
    })
}

pub(super) fn a_wait_orders_two_streams(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (from, _) = rig.memory(1)?;
        let (to, _) = rig.memory(1)?;
        let streams = [rig.stream()?, rig.stream()?, rig.stream()?];
        let hold = rig.d.hold(streams[0])?;
        rig.d.fill(from, 0x22, streams[0])?;
        let written = rig.mark(streams[0])?;
        rig.d.wait_event(streams[1], written)?;
        rig.d.copy(to.start(), from, streams[1])?;
        let copied = rig.mark(streams[1])?;
        rig.d.wait_event(streams[2], copied)?;
        rig.d.fill(from, 0x33, streams[2])?;
        let last = rig.mark(streams[2])?;
        rig.pending("a stream that waits for a held one", copied)?;
        rig.pending("a stream that waits for that", last)?;
        drop(hold);
        rig.passes("the last of three streams", last)?;
        rig.passes("the second of three streams", copied)?;
        rig.filled("the copy", to, 0x22, streams[2])?;
        rig.filled("the fill after the copy", from, 0x33, streams[2])
    })
}

pub(super) fn a_wait_is_for_the_record_before_it(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (held, free) = (rig.stream()?, rig.stream()?);
        let (early, late) = (rig.stream()?, rig.stream()?);
        let hold = rig.d.hold(held)?;
        let event = rig.mark(free)?;
        rig.d.wait_event(early, event)?;
        rig.d.record_event(event, held)?;
        rig.d.wait_event(late, event)?;
        let (after_early, after_late) = (rig.mark(early)?, rig.mark(late)?);
        rig.passes("a wait before the second record", after_early)?;
        rig.pending("a wait after the second record", after_late)?;
        // The wait stays for the held record, though the event is recorded once more.
        rig.d.record_event(event, free)?;
        rig.passes("the event itself, recorded on a free stream", event)?;
        rig.pending("a wait after the second record", after_late)?;
        drop(hold);
        rig.passes("the later wait after the hold", after_late)
    })
}

pub(super) fn a_wait_outlives_its_event(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (held, waiting) = (rig.stream()?, rig.stream()?);
        let hold = rig.d.hold(held)?;
        let event = rig.mark(held)?;
        rig.d.wait_event(waiting, event)?;
        rig.destroy_event(event)?;
        let after = rig.mark(waiting)?;
        rig.pending("a wait for an event that was destroyed", after)?;
        drop(hold);
        rig.passes("that wait after the hold", after)
    })
}
