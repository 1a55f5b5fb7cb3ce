//! A race detector over physical bytes.
//!
//! Every stream and the host have a vector clock. Queueing joins the host's clock into the
//! stream's (the host did what it did before); a wait joins the clock of the event's record; a
//! query that answers "passed" and a sync join into the host's. Two accesses of overlapping bytes
//! of one granule, at least one of them a write, race when neither is ordered before the other by
//! these rules, whatever the virtual times were. All host threads count as one: an order between
//! them that the program does not enforce is taken for granted, so nothing is reported falsely
//! because of threads, but something may be missed.

use std::collections::{BTreeMap, HashMap};

use super::space::Piece;
use crate::driver::{Call, EventId, PhysId, StreamKey};
use crate::units::VaRange;

/// Races kept; later ones are only counted.
pub(super) const MAX_RACES: usize = 1024;

/// What an access does to the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum AccessKind {
    /// Reads them.
    Read,
    /// Writes them.
    Write,
    /// Adds to a word atomically: no race with other adds.
    Add,
}

/// One side of a race.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RaceSide {
    /// The stream that the work was queued on.
    pub stream: StreamKey,
    /// The call that queued it.
    pub call: Call,
    /// The addresses the work used.
    pub range: VaRange,
    /// What it did there.
    pub kind: AccessKind,
    /// Number of the access among all of the driver, from 1.
    pub nth: u64,
}

/// Two accesses without order between them to the same physical bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Race {
    /// The granule.
    pub phys: PhysId,
    /// Offset of the first byte in it that both touch.
    pub offset: u64,
    /// The access queued first.
    pub first: RaceSide,
    /// The access queued later.
    pub second: RaceSide,
}

#[derive(Clone, Default, Debug)]
struct Clock(HashMap<StreamKey, u64>);

impl Clock {
    fn join(&mut self, other: &Self) {
        for (&key, &tick) in &other.0 {
            let mine = self.0.entry(key).or_default();
            *mine = tick.max(*mine);
        }
    }

    fn has_seen(&self, access: &Past) -> bool {
        self.0.get(&access.side.stream).copied().unwrap_or(0) >= access.tick
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Past {
    tick: u64,
    side: RaceSide,
}

/// Last accesses of a run of bytes: the last write, and what came after it.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
struct Bytes {
    len: u64,
    write: Option<Past>,
    since: Vec<Past>,
}

type History = BTreeMap<u64, Bytes>;

#[derive(Default, Debug)]
pub(super) struct Detector {
    host: Clock,
    streams: HashMap<StreamKey, Clock>,
    events: HashMap<EventId, Clock>,
    granules: HashMap<PhysId, History>,
    found: Vec<Race>,
    accesses: u64,
}

/// The clock of an event's last record.
#[derive(Clone, Default, Debug)]
pub(super) struct Seen(Clock);

impl Detector {
    pub fn found(&self) -> &[Race] {
        &self.found
    }

    fn stream(&mut self, key: StreamKey) -> &mut Clock {
        let clock = self.streams.entry(key).or_default();
        clock.join(&self.host);
        clock
    }

    pub fn record(&mut self, event: EventId, key: StreamKey) {
        let clock = self.stream(key).clone();
        self.events.insert(event, clock);
    }

    pub fn wait(&mut self, key: StreamKey, event: EventId) {
        let seen = self.event(event);
        self.stream(key).join(&seen.0);
    }

    pub fn event(&self, event: EventId) -> Seen {
        Seen(self.events.get(&event).cloned().unwrap_or_default())
    }

    pub fn now(&mut self, key: StreamKey) -> Seen {
        Seen(self.stream(key).clone())
    }

    /// The host knows that everything in `seen` has finished.
    pub fn host_saw(&mut self, seen: &Seen) {
        self.host.join(&seen.0);
    }

    pub fn forget_event(&mut self, event: EventId) {
        self.events.remove(&event);
    }

    pub fn forget_stream(&mut self, key: StreamKey) {
        self.streams.remove(&key);
    }

    pub fn forget_granule(&mut self, phys: PhysId) {
        self.granules.remove(&phys);
    }

    /// Starts an operation of the stream; its accesses follow with the tick answered.
    pub fn tick(&mut self, key: StreamKey) -> u64 {
        let tick = self.stream(key).0.entry(key).or_default();
        *tick += 1;
        *tick
    }

    pub fn access(
        &mut self,
        tick: u64,
        (key, call): (StreamKey, Call),
        (range, kind): (VaRange, AccessKind),
        pieces: &[Piece],
    ) {
        self.accesses += 1;
        let past = Past {
            tick,
            side: RaceSide {
                stream: key,
                call,
                range,
                kind,
                nth: self.accesses,
            },
        };
        let clock = self.streams.entry(key).or_default();
        let mut reported: Vec<u64> = Vec::new();
        for piece in pieces {
            let history = self.granules.entry(piece.phys).or_default();
            history_access(history, piece, clock, past, |offset, first| {
                let known = reported.contains(&first.nth);
                if !known && self.found.len() < MAX_RACES {
                    reported.push(first.nth);
                    self.found.push(Race {
                        phys: piece.phys,
                        offset,
                        first,
                        second: past.side,
                    });
                }
            });
        }
    }
}

fn conflict(one: AccessKind, other: AccessKind) -> bool {
    one == AccessKind::Write || other == AccessKind::Write || one != other
}

fn history_access(
    history: &mut History,
    piece: &Piece,
    clock: &Clock,
    new: Past,
    mut report: impl FnMut(u64, RaceSide),
) {
    let (start, end) = (piece.offset, piece.offset + piece.len);
    split(history, start);
    split(history, end);
    let mut at = start;
    let mut runs: Vec<(u64, Bytes)> = Vec::new();
    for (&run, old) in history.range(start..end) {
        for past in old.write.iter().chain(&old.since) {
            if conflict(past.side.kind, new.side.kind) && !clock.has_seen(past) {
                report(run, past.side);
            }
        }
        if at < run {
            runs.push((at, after(&Bytes::default(), run - at, clock, new)));
        }
        runs.push((run, after(old, old.len, clock, new)));
        at = run + old.len;
    }
    if at < end {
        runs.push((at, after(&Bytes::default(), end - at, clock, new)));
    }
    let old: Vec<u64> = history.range(start..end).map(|(&at, _)| at).collect();
    for at in old {
        history.remove(&at);
    }
    let mut merged: Vec<(u64, Bytes)> = Vec::with_capacity(runs.len());
    for (at, run) in runs {
        match merged.last_mut() {
            Some((_, last)) if last.write == run.write && last.since == run.since => {
                last.len += run.len;
            }
            _ => merged.push((at, run)),
        }
    }
    history.extend(merged);
}

/// The state of `len` bytes after one more access.
fn after(old: &Bytes, len: u64, clock: &Clock, new: Past) -> Bytes {
    if new.side.kind == AccessKind::Write {
        return Bytes {
            len,
            write: Some(new),
            since: Vec::new(),
        };
    }
    // An access that this one is ordered after is covered by it, for every later one that could
    // conflict with either. So at most one of each kind and stream stays.
    let covered = |past: &Past| past.side.kind == new.side.kind && clock.has_seen(past);
    let since = old.since.iter().filter(|past| !covered(past)).copied();
    Bytes {
        len,
        write: old.write,
        since: since.chain([new]).collect(),
    }
}

/// Makes `at` a border between two runs.
fn split(history: &mut History, at: u64) {
    if let Some((&start, run)) = history.range_mut(..at).next_back()
        && start + run.len > at
    {
        let mut right = run.clone();
        right.len = start + run.len - at;
        run.len = at - start;
        history.insert(at, right);
    }
}
