//! Capture into graphs, and what others may do meanwhile.

use super::Outcome;
use super::rig::{MAIN, Rig, check};
use crate::driver::StreamId;
use crate::driver::{
    Access, DriverCode, DriverKind, DriverResult, GranuleProps, Graph, Kernel, SharedDriver,
};

/// Captures what `body` queues; the capture is over whatever happens.
fn capture(
    rig: &mut Rig<'_>,
    stream: StreamId,
    body: impl FnOnce(&mut Rig<'_>) -> Outcome,
) -> Outcome<DriverResult<Graph>> {
    rig.d.begin_capture(stream)?;
    let outcome = body(rig);
    let graph = rig.d.end_capture(stream);
    outcome.map(|()| graph)
}

fn refused<T>(d: &SharedDriver, what: &str, code: DriverCode, result: DriverResult<T>) -> Outcome {
    match result {
        Err(error) if error.code == code || d.kind() == DriverKind::Cuda => Ok(()),
        Err(error) => Err(super::Failure::new(format!("{what}: {error}, not {code}"))),
        Ok(_) => Err(super::Failure::new(format!("{what} was not refused"))),
    }
}

pub(super) fn captured_work_runs_when_the_graph_does(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (all, _) = rig.memory(1)?;
        let (copy, _) = rig.memory(1)?;
        let stream = rig.stream()?;
        rig.d.fill(all, 0x11, stream)?;
        let is = rig.d.is_capturing(stream)?;
        ensure!(!is, "a stream is being captured before that began");
        let graph = capture(rig, stream, |rig| {
            let is = rig.d.is_capturing(stream)?;
            ensure!(is, "a stream is not being captured though that began");
            let is = rig.d.is_capturing(MAIN)?;
            ensure!(!is, "the default stream is being captured");
            rig.d.fill(all, 0x22, stream)?;
            rig.d.copy(copy.start(), all, stream)?;
            Ok(())
        })??;
        let is = rig.d.is_capturing(stream)?;
        ensure!(!is, "a stream is being captured after the end");
        rig.filled("before the graph ran", all, 0x11, stream)?;
        for byte in [0x33, 0x44] {
            rig.d.fill(copy, byte, stream)?;
            graph.launch(stream)?;
            rig.filled("what the graph copied", copy, 0x22, stream)?;
        }
        let other = rig.stream()?;
        rig.d.fill(all, 0x55, other)?;
        graph.launch(other)?;
        rig.filled("what the graph wrote on another stream", all, 0x22, other)
    })
}

pub(super) fn memory_calls_and_other_streams_leave_a_capture_whole(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (all, phys) = rig.memory(1)?;
        let (stream, other) = (rig.stream()?, rig.stream()?);
        let before = rig.mark(other)?;
        let pending = rig.event()?;
        let graph = capture(rig, stream, |rig| {
            rig.d.fill(all, 0x21, stream)?;
            let alias = rig.reserve(1)?;
            rig.d.map(alias, phys)?;
            rig.d.set_access(alias, Access::ReadWrite)?;
            rig.d.unmap(alias)?;
            let fresh = rig.d.create(rig.unit, GranuleProps::default())?;
            rig.d.release(fresh)?;
            rig.d.memory_info()?;
            // Events of other streams, also on other threads.
            rig.d.record_event(pending, other)?;
            rig.d.query_event(pending)?;
            let d = rig.d;
            let elsewhere = std::thread::scope(|scope| {
                let asked = scope.spawn(|| {
                    d.query_event(before)?;
                    d.record_event(before, other)?;
                    d.sync_event(before)?;
                    d.fill(all, 0x31, other)?;
                    d.sync_stream(other)
                });
                asked.join()
            });
            let died = |_| super::Failure::new("another thread panicked");
            Ok(elsewhere.map_err(died)??)
        })??;
        rig.filled("what ran beside a capture", all, 0x31, stream)?;
        graph.launch(stream)?;
        rig.filled("what was captured", all, 0x21, stream)
    })
}

pub(super) fn waits_of_the_host_for_a_captured_stream_are_refused(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (all, _) = rig.memory(1)?;
        let stream = rig.stream()?;
        let code = DriverCode::STREAM_CAPTURE_UNSUPPORTED;
        // Code of kernels is loaded by the first launch.
        rig.d.launch(Kernel::Spin { nanos: 1_000 }, stream)?;
        rig.d.sync_stream(stream)?;
        let graph = capture(rig, stream, |rig| {
            rig.d.fill(all, 0x41, stream)?;
            refused(rig.d, "a sync", code, rig.d.sync_stream(stream))?;
            let copied = rig.d.copy_from_host(all.start(), &[1; 16], stream);
            refused(rig.d, "a copy from the host", code, copied)?;
            refused(rig.d, "a hold", code, rig.d.hold(stream))
        })??;
        graph.launch(stream)?;
        rig.filled("what was captured", all, 0x41, stream)
    })
}

pub(super) fn a_captured_stream_has_no_key_meanwhile(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (all, _) = rig.memory(1)?;
        let (stream, other) = (rig.stream()?, rig.stream()?);
        let before = rig.d.stream_key(stream)?;
        let code = DriverCode::STREAM_CAPTURE_UNSUPPORTED;
        let graph = capture(rig, stream, |rig| {
            rig.d.fill(all, 0x43, stream)?;
            refused(rig.d, "a key", code, rig.d.stream_key(stream))?;
            rig.d.stream_key(other)?;
            Ok(())
        })??;
        graph.launch(stream)?;
        rig.filled("what was captured", all, 0x43, stream)?;
        let after = rig.d.stream_key(stream)?;
        ensure!(after == before, "another key after a capture");
        Ok(())
    })
}

pub(super) fn a_captured_stream_cannot_wait_for_others(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (stream, other) = (rig.stream()?, rig.stream()?);
        let event = rig.mark(other)?;
        let code = DriverCode::STREAM_CAPTURE_ISOLATION;
        let graph = capture(rig, stream, |rig| {
            refused(rig.d, "a wait", code, rig.d.wait_event(stream, event))?;
            let is = rig.d.is_capturing(stream)?;
            ensure!(is, "a spoiled capture is over before its end");
            Ok(())
        })?;
        refused(
            rig.d,
            "a spoiled capture",
            DriverCode::STREAM_CAPTURE_INVALIDATED,
            graph,
        )?;
        let again = capture(rig, stream, |_| Ok(()))?;
        ensure!(again.is_ok(), "no capture after a spoiled one");
        Ok(())
    })
}

pub(super) fn a_record_on_a_captured_stream_never_passes(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let stream = rig.stream()?;
        let event = rig.event()?;
        rig.d.begin_capture(stream)?;
        let recorded = rig.d.record_event(event, stream);
        let asked = rig.d.query_event(event);
        // It may be spoiled by the question.
        let _ = rig.d.end_capture(stream);
        recorded?;
        refused(rig.d, "a query", DriverCode::CAPTURED_EVENT, asked)?;
        rig.d.record_event(event, stream)?;
        rig.passes("an event recorded again", event)
    })
}

pub(super) fn the_default_stream_and_a_captured_one_are_not_captured(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let stream = rig.stream()?;
        let main = rig.d.begin_capture(MAIN);
        ensure!(main.is_err(), "the default stream is captured");
        let ended = rig.d.end_capture(stream);
        ensure!(ended.is_err(), "a capture ended that did not begin");
        rig.d.begin_capture(stream)?;
        let twice = rig.d.begin_capture(stream);
        let ended = rig.d.end_capture(stream);
        ensure!(twice.is_err(), "a stream is captured twice");
        let unsure = d.kind() == DriverKind::Cuda;
        ensure!(
            unsure || ended.is_ok(),
            "a refused capture ended the one before"
        );
        Ok(())
    })
}
