//! Order on streams and between them, holds, keys.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::rig::{MAIN, PATIENCE, check};
use super::{Failure, Outcome};
use crate::driver::{Access, GranuleProps, Kernel, SharedDriver};
use crate::units::VaRange;

pub(super) fn work_on_one_stream_runs_in_order(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (all, _) = rig.memory(1)?;
        let (copy, _) = rig.memory(1)?;
        let stream = rig.stream()?;
        let before = rig.mark(stream)?;
        let hold = rig.d.hold(stream)?;
        let mut marks = Vec::new();
        for byte in 1..=8 {
            rig.d.fill(all, byte, stream)?;
            marks.push(rig.mark(stream)?);
        }
        rig.d.copy(copy.start(), all, stream)?;
        rig.d.fill(all, 0xAA, stream)?;
        rig.passes("an event before the hold", before)?;
        rig.pending("the first event behind a hold", marks[0])?;
        drop(hold);
        rig.d.sync_stream(stream)?;
        for mark in marks {
            let passed = rig.d.query_event(mark)?;
            ensure!(passed, "an event is pending though its stream was synced");
        }
        rig.filled("a copy between two fills", copy, 8, stream)?;
        rig.filled("the fill after it", all, 0xAA, stream)
    })
}

pub(super) fn streams_have_no_order_of_their_own(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (all, _) = rig.memory(1)?;
        let (held, free) = (rig.stream()?, rig.stream()?);
        let hold = rig.d.hold(held)?;
        let behind = rig.mark(held)?;
        rig.d.fill(all, 0x61, free)?;
        let beside = rig.mark(free)?;
        rig.passes("work beside a held stream", beside)?;
        rig.d.sync_stream(free)?;
        rig.d.sync_event(beside)?;
        rig.filled("work beside a held stream", all, 0x61, free)?;
        rig.pending("work behind the hold", behind)?;
        drop(hold);
        rig.passes("work behind the hold that ended", behind)
    })
}

pub(super) fn the_default_stream_has_no_implicit_order(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let other = rig.stream()?;
        let pairs = [
            ("the default stream", MAIN, other),
            ("another", other, MAIN),
        ];
        for (what, held, free) in pairs {
            let hold = rig.d.hold(held)?;
            let behind = rig.mark(held)?;
            rig.d.launch(Kernel::Spin { nanos: 1_000 }, free)?;
            let beside = rig.mark(free)?;
            rig.passes(&format!("work while {what} is held"), beside)?;
            rig.pending(&format!("work on {what}, held"), behind)?;
            drop(hold);
            rig.passes(&format!("work on {what} after the hold"), behind)?;
        }
        Ok(())
    })
}

pub(super) fn sync_waits_for_a_hold_that_ends_elsewhere(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let stream = rig.stream()?;
        let hold = rig.d.hold(stream)?;
        let event = rig.mark(stream)?;
        let (ending, ended) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(move || {
                thread::sleep(Duration::from_millis(20));
                // Sent first: once the hold is dropped, the other thread may look at once.
                let sent = ending.send(());
                drop(hold);
                sent
            });
            rig.d.sync_stream(stream)?;
            let in_time = ended.try_recv().is_ok();
            ensure!(in_time, "sync_stream returned while the stream was held");
            let passed = rig.d.query_event(event)?;
            ensure!(passed, "an event is pending though its stream was synced");
            Ok(rig.d.sync_event(event)?)
        })
    })
}

pub(super) fn two_holds_end_in_any_order(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let stream = rig.stream()?;
        let first = rig.d.hold(stream)?;
        let between = rig.mark(stream)?;
        let second = rig.d.hold(stream)?;
        let behind = rig.mark(stream)?;
        drop(second);
        rig.pending("between two holds, the second ended", between)?;
        rig.pending("behind two holds, the second ended", behind)?;
        drop(first);
        rig.passes("between two holds, both ended", between)?;
        rig.passes("behind two holds, both ended", behind)?;
        let again = rig.d.hold(stream)?;
        let last = rig.mark(stream)?;
        rig.pending("behind a later hold", last)?;
        again.release();
        rig.passes("behind a later hold that ended", last)
    })
}

pub(super) fn spinning_keeps_a_stream_busy(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let stream = rig.stream()?;
        // Whatever the first launch costs, loading code included, is over after this one.
        rig.d.launch(Kernel::Spin { nanos: 1_000 }, stream)?;
        rig.d.sync_stream(stream)?;
        let nanos = 100_000_000;
        rig.d.launch(Kernel::Spin { nanos }, stream)?;
        let event = rig.mark(stream)?;
        let early = rig.d.query_event(event)?;
        ensure!(!early, "{nanos} ns of spinning were over at once");
        rig.d.sync_event(event)?;
        let passed = rig.d.query_event(event)?;
        ensure!(passed, "an event is pending though it was synced");
        Ok(())
    })
}

pub(super) fn a_destroyed_stream_finishes_its_work(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (all, _) = rig.memory(1)?;
        let other = rig.stream()?;
        let stream = rig.d.create_stream()?;
        let hold = rig.d.hold(stream)?;
        rig.d.fill(all, 0x71, stream)?;
        let event = rig.mark(stream)?;
        rig.d.wait_event(other, event)?;
        let result = thread::scope(|scope| {
            // A driver that cannot destroy a busy stream without waiting may wait here.
            let destroying = scope.spawn(|| rig.d.destroy_stream(stream));
            thread::sleep(Duration::from_millis(5));
            let held = rig.pending("work of a destroyed stream, held", event);
            drop(hold);
            let died = |_| Err(Failure::new("destroy_stream panicked"));
            let destroyed = destroying.join().map(|r| r.map_err(Failure::from));
            held.and(destroyed.unwrap_or_else(died))
        });
        result?;
        rig.passes("work of a destroyed stream", event)?;
        rig.filled("what a destroyed stream wrote", all, 0x71, other)
    })
}

pub(super) fn stream_keys_differ_when_ids_are_used_again(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let mut keys = vec![rig.d.stream_key(MAIN)?];
        let kept = rig.stream()?;
        keys.push(rig.d.stream_key(kept)?);
        for _ in 0..32 {
            let stream = rig.stream()?;
            let key = rig.d.stream_key(stream)?;
            let again = rig.d.stream_key(stream)?;
            ensure!(key == again, "one stream answered {key:?} and {again:?}");
            ensure!(!keys.contains(&key), "{key:?} was answered for two streams");
            keys.push(key);
            rig.forget_stream(stream);
            rig.d.destroy_stream(stream)?;
        }
        let main = rig.d.stream_key(MAIN)?;
        ensure!(main == keys[0], "the default stream's key changed");
        Ok(())
    })
}

/// Every memory call once, in addresses of its own.
fn memory_calls(d: &SharedDriver, len: u64) -> Outcome<VaRange> {
    let range = d.reserve(len, 0)?;
    let phys = d.create(len, GranuleProps::default())?;
    d.map(range, phys)?;
    d.set_access(range, Access::Read)?;
    d.set_access(range, Access::ReadWrite)?;
    d.unmap(range)?;
    d.release(phys)?;
    d.free_reservation(range)?;
    Ok(range)
}

pub(super) fn memory_calls_do_not_wait_for_held_work(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (all, phys) = rig.memory(1)?;
        let alias = rig.reserve(1)?;
        let stream = rig.stream()?;
        let hold = rig.d.hold(stream)?;
        rig.d.fill(all, 0x81, stream)?;
        let event = rig.mark(stream)?;
        let (sender, done) = mpsc::channel();
        let (driver, unit) = (rig.d, rig.unit);
        thread::scope(|scope| {
            scope.spawn(move || {
                let calls = memory_calls(driver, unit).map(drop);
                // Of a granule that held work uses, at another address.
                let remap = || -> Outcome {
                    driver.map(alias, phys)?;
                    driver.set_access(alias, Access::ReadWrite)?;
                    Ok(driver.unmap(alias)?)
                };
                // Nobody receives any more if this took too long.
                let _ = sender.send(calls.and_then(|()| remap()));
            });
            let answer = done.recv_timeout(PATIENCE);
            let still = rig.pending("held work during memory calls", event);
            drop(hold);
            let late = |_| Err(Failure::new(format!("they took over {PATIENCE:?}")));
            answer.unwrap_or_else(late).and(still)
        })?;
        rig.passes("held work after memory calls", event)?;
        rig.filled("what held work wrote", all, 0x81, stream)
    })
}
