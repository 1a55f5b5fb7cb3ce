//! What the sim does for calls that queue work, record and wait.

use super::races::{AccessKind, Seen};
use super::space::Use;
use super::timeline::{Moment, Point, Work};
use super::{Nanos, Refusal, Shared, SimDriver, State};
use crate::driver::{
    Call, CopyPart, DriverCode, DriverError, DriverResult, EventId, Kernel, StreamId, StreamKey,
};
use crate::sync::MutexGuard;
use crate::units::{Va, VaRange};

type Touch = (VaRange, AccessKind);

const WORD: u64 = 8;

/// Address and length that errors of a launch are about.
pub(super) fn about_kernel(kernel: &Kernel) -> (u64, u64) {
    match kernel {
        Kernel::WritePattern { range, .. }
        | Kernel::CheckPattern { range, .. }
        | Kernel::ReadSum { range, .. } => super::about(*range),
        Kernel::Spin { .. } => (0, 0),
    }
}

fn words(range: VaRange) -> Refusal<VaRange> {
    if range.start().is_aligned(WORD) && range.len().is_multiple_of(WORD) {
        return Ok(range);
    }
    Err(DriverCode::INVALID_VALUE)
}

fn range_at(start: Va, len: u64) -> Refusal<VaRange> {
    VaRange::new(start, len).ok_or(DriverCode::INVALID_VALUE)
}

impl Shared {
    pub(super) fn end_hold(&self, moment: &Moment) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        // A hold ends once: its closure runs once.
        let _ = moment.set(state.now);
        state.time.settle(&mut state.space);
        state.lost |= state.time.faulted;
        self.changed.notify_all();
    }
}

impl State {
    /// Queues work that touches up to two ranges. `refuse` says whether memory that is not there
    /// is an error now (copies) or when the work runs (kernels).
    fn queue(
        &mut self,
        (call, key): (Call, StreamKey),
        cost: Nanos,
        touches: [Option<Touch>; 2],
        refuse: bool,
    ) -> Refusal<()> {
        let uses = touches.map(|touch| {
            touch.map(|(range, kind)| Use {
                range,
                write: kind != AccessKind::Read,
            })
        });
        let unproven = !uses.iter().flatten().all(|&used| self.space.allows(used));
        if unproven && refuse {
            return Err(DriverCode::INVALID_VALUE);
        }
        self.now += self.cost.launch;
        if let Some(races) = self.races.as_mut().filter(|_| !unproven) {
            let tick = races.tick(key);
            for &touch in touches.iter().flatten() {
                let pieces = self.space.pieces(touch.0);
                races.access(tick, (key, call), touch, &pieces);
            }
        }
        let work = Work {
            cost,
            uses,
            unproven,
        };
        self.time.work(key, work, self.now, &mut self.space);
        self.lost |= self.time.faulted;
        Ok(())
    }

    pub(super) fn fill(&mut self, range: VaRange, stream: StreamId) -> Refusal<()> {
        let key = self.time.key(stream)?;
        let cost = self.cost.fill(range.len());
        let touch = (range, AccessKind::Write);
        self.queue((Call::Fill, key), cost, [Some(touch), None], true)
    }

    pub(super) fn copy(&mut self, dst: Va, src: VaRange, stream: StreamId) -> Refusal<()> {
        let key = self.time.key(stream)?;
        let dst = range_at(dst, src.len())?;
        if dst.overlaps(src) {
            return Err(DriverCode::INVALID_VALUE);
        }
        let cost = self.cost.copy(src.len());
        let touches = [(src, AccessKind::Read), (dst, AccessKind::Write)];
        self.queue((Call::Copy, key), cost, touches.map(Some), true)
    }

    /// One launch; its time on the stream is shared out by length.
    pub(super) fn copy_batch(&mut self, parts: &[CopyPart], stream: StreamId) -> Refusal<()> {
        let key = self.time.key(stream)?;
        CopyPart::check(parts).map_err(|error| error.code)?;
        let parts = parts.iter().filter(|part| !part.src.is_empty());
        let uses = parts.map(|part| {
            let dst = part.target().ok_or(DriverCode::INVALID_VALUE)?;
            Ok((part.src, dst))
        });
        let uses = uses.collect::<Refusal<Vec<_>>>()?;
        let read = |range| Use {
            range,
            write: false,
        };
        let write = |range| Use { range, write: true };
        let allowed = |(src, dst): &(VaRange, VaRange)| {
            self.space.allows(read(*src)) && self.space.allows(write(*dst))
        };
        if !uses.iter().all(allowed) {
            return Err(DriverCode::INVALID_VALUE);
        }
        let total: u64 = uses.iter().map(|(src, _)| src.len()).sum();
        let whole = self.cost.copy_batch(total);
        let host = self.now + self.cost.launch;
        for (src, dst) in uses {
            let share = u128::from(whole.0) * u128::from(src.len()) / u128::from(total.max(1));
            let cost = Nanos(u64::try_from(share).unwrap_or(u64::MAX));
            let touches = [(src, AccessKind::Read), (dst, AccessKind::Write)];
            self.queue((Call::CopyBatch, key), cost, touches.map(Some), true)?;
            // The parts are one launch.
            self.now = host;
        }
        Ok(())
    }

    pub(super) fn launch(&mut self, kernel: Kernel, stream: StreamId) -> Refusal<()> {
        let key = self.time.key(stream)?;
        let add = |word| Ok((words(range_at(word, WORD)?)?, AccessKind::Add));
        let (cost, touches) = match kernel {
            Kernel::WritePattern { range, .. } => (
                self.cost.fill(range.len()),
                [Some((words(range)?, AccessKind::Write)), None],
            ),
            Kernel::CheckPattern {
                range, mismatches, ..
            } => (
                self.cost.read(range.len()),
                [
                    Some((words(range)?, AccessKind::Read)),
                    Some(add(mismatches)?),
                ],
            ),
            Kernel::ReadSum {
                range,
                passes,
                sink,
            } => (
                self.cost
                    .read(range.len().saturating_mul(u64::from(passes))),
                [Some((words(range)?, AccessKind::Read)), Some(add(sink)?)],
            ),
            Kernel::Spin { nanos } => (Nanos(nanos), [None, None]),
        };
        self.queue((Call::Launch, key), cost, touches, false)
    }

    pub(super) fn hold(&mut self, stream: StreamId) -> Refusal<Moment> {
        let key = self.time.key(stream)?;
        let moment = Moment::default();
        self.now += self.cost.launch;
        let point = Point::Later(Moment::clone(&moment));
        self.time.wait(key, point, &mut self.space);
        Ok(moment)
    }

    pub(super) fn record(&mut self, event: EventId, stream: StreamId) -> Refusal<()> {
        let key = self.time.key(stream)?;
        self.event(event)?;
        self.now += self.cost.event_record;
        let point = self.time.record(key, self.now);
        self.events.insert(event, Some(point));
        if let Some(races) = &mut self.races {
            races.record(event, key);
        }
        Ok(())
    }

    pub(super) fn query(&mut self, event: EventId) -> Refusal<bool> {
        self.event(event)?;
        self.now += self.cost.event_query;
        let passed = match self.event(event)? {
            None => true,
            Some(point) => point.known().is_some_and(|time| time <= self.now),
        };
        if let Some(races) = self.races.as_mut().filter(|_| passed) {
            let seen = races.event(event);
            races.host_saw(&seen);
        }
        Ok(passed)
    }

    pub(super) fn wait(&mut self, stream: StreamId, event: EventId) -> Refusal<()> {
        let key = self.time.key(stream)?;
        let point = self.event(event)?.clone();
        self.now += self.cost.wait_event;
        if let Some(point) = point {
            self.time.wait(key, point, &mut self.space);
        }
        if let Some(races) = &mut self.races {
            races.wait(key, event);
        }
        Ok(())
    }
}

impl SimDriver {
    /// Moves the host's time to `point`; blocks while that time is not known.
    fn reach(
        &self,
        mut state: MutexGuard<'_, State>,
        point: Option<Point>,
        seen: Option<Seen>,
    ) -> Refusal<()> {
        let cost = state.cost.event_query;
        state.now += cost;
        loop {
            state.alive()?;
            let time = match &point {
                None => Some(Nanos::ZERO),
                Some(point) => point.known(),
            };
            if let Some(time) = time {
                state.now = state.now.max(time);
                if let (Some(races), Some(seen)) = (&mut state.races, seen) {
                    races.host_saw(&seen);
                }
                return Ok(());
            }
            self.shared.changed.wait(&mut state);
        }
    }

    pub(super) fn sync_stream_for(&self, call: Call, stream: StreamId) -> DriverResult<()> {
        let run = || {
            let mut state = self.shared.state.lock();
            state.alive()?;
            let key = state.time.key(stream)?;
            self.shared.captures.refuse_wait(key)?;
            let now = state.now;
            let point = state.time.record(key, now);
            let seen = state.races.as_mut().map(|races| races.now(key));
            self.reach(state, Some(point), seen)
        };
        run().map_err(|code| DriverError::new(call, code).about(stream.0, 0))
    }

    pub(super) fn sync_event_for(&self, event: EventId) -> DriverResult<()> {
        let run = || {
            let state = self.shared.state.lock();
            state.alive()?;
            let point = state.event(event)?.clone();
            self.shared.captures.refuse_event(event)?;
            let seen = state.races.as_ref().map(|races| races.event(event));
            self.reach(state, point, seen)
        };
        run().map_err(|code| DriverError::new(Call::SyncEvent, code).about(event.0, 0))
    }

    pub(super) fn copy_from_host_len(
        &self,
        dst: Va,
        len: u64,
        stream: StreamId,
    ) -> DriverResult<()> {
        let run = || {
            let mut state = self.shared.state.lock();
            state.alive()?;
            let key = state.time.key(stream)?;
            self.shared.captures.refuse_wait(key)?;
            let range = range_at(dst, len)?;
            // Earlier work of the stream is over when the call returns; the bytes need not have
            // arrived for other streams.
            let seen = state.races.as_mut().map(|races| races.now(key));
            let cost = state.cost.host_copy(len);
            let touch = Some((range, AccessKind::Write));
            state.queue((Call::CopyFromHost, key), cost, [touch, None], true)?;
            let now = state.now;
            let point = state.time.record(key, now);
            self.reach(state, Some(point), seen)
        };
        run().map_err(|code| DriverError::new(Call::CopyFromHost, code).about(dst.get(), len))
    }
}
