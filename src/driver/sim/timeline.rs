//! Streams and events on a virtual clock.
//!
//! A stream that waits for nothing unknown is just the time at which it becomes free: queued work
//! moves that time on and is forgotten. Behind a hold, operations are kept in order until the
//! hold ends, and are then given their times.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::Nanos;
use super::space::{Space, Use};
use crate::driver::{DriverCode, StreamId, StreamKey};

/// A time that may not be known yet: set once.
pub(super) type Moment = Arc<OnceLock<Nanos>>;

/// When something passes.
#[derive(Clone, Debug)]
pub(super) enum Point {
    At(Nanos),
    Later(Moment),
}

impl Point {
    pub fn known(&self) -> Option<Nanos> {
        match self {
            Self::At(time) => Some(*time),
            Self::Later(moment) => moment.get().copied(),
        }
    }
}

/// Work for a stream: how long it takes, and up to two ranges it uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    pub cost: Nanos,
    pub uses: [Option<Use>; 2],
    /// The memory was not there when the work was queued; it must be when it runs.
    pub unproven: bool,
}

#[derive(Debug)]
enum Op {
    Work { work: Work, queued_at: Nanos },
    Record(Moment),
    Wait(Point),
}

#[derive(Debug, Default)]
struct Stream {
    free_at: Nanos,
    /// Operations behind the first one whose time is not known; that one is at the front.
    queue: VecDeque<Op>,
    destroyed: bool,
}

#[derive(Debug)]
pub(super) struct Timeline {
    ids: HashMap<StreamId, StreamKey>,
    free_ids: BinaryHeap<Reverse<u64>>,
    next_id: u64,
    streams: BTreeMap<StreamKey, Stream>,
    blocked: BTreeSet<StreamKey>,
    /// Work touched memory that was not there.
    pub faulted: bool,
}

/// Keys differ between all sims of the process.
fn new_key() -> StreamKey {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    StreamKey(NEXT.fetch_add(1, Ordering::Relaxed))
}

impl Timeline {
    pub fn new() -> Self {
        let key = new_key();
        Self {
            ids: HashMap::from([(StreamId::DEFAULT, key)]),
            free_ids: BinaryHeap::new(),
            next_id: StreamId::DEFAULT.0 + 1,
            streams: BTreeMap::from([(key, Stream::default())]),
            blocked: BTreeSet::new(),
            faulted: false,
        }
    }

    /// Streams besides the default one.
    pub fn created(&self) -> usize {
        self.ids.len() - 1
    }

    pub fn key(&self, id: StreamId) -> Result<StreamKey, DriverCode> {
        self.ids.get(&id).copied().ok_or(DriverCode::INVALID_HANDLE)
    }

    pub fn create(&mut self) -> StreamId {
        let id = match self.free_ids.pop() {
            Some(Reverse(id)) => id,
            None => {
                self.next_id += 1;
                self.next_id - 1
            }
        };
        let key = new_key();
        self.ids.insert(StreamId(id), key);
        self.streams.insert(key, Stream::default());
        StreamId(id)
    }

    pub fn destroy(&mut self, id: StreamId) -> Result<StreamKey, DriverCode> {
        if id == StreamId::DEFAULT {
            return Err(DriverCode::INVALID_HANDLE);
        }
        let key = self.ids.remove(&id).ok_or(DriverCode::INVALID_HANDLE)?;
        self.free_ids.push(Reverse(id.0));
        if self.blocked.contains(&key) {
            if let Some(stream) = self.streams.get_mut(&key) {
                stream.destroyed = true;
            }
        } else {
            self.streams.remove(&key);
        }
        Ok(key)
    }

    /// Queues work; `now` is when the host did.
    pub fn work(&mut self, key: StreamKey, work: Work, now: Nanos, space: &mut Space) {
        if self.blocked.contains(&key) && !work.unproven {
            work.uses.iter().flatten().for_each(|&u| space.hold(u));
        }
        let op = Op::Work {
            work,
            queued_at: now,
        };
        self.push(key, op, space);
    }

    /// A point after everything queued on the stream so far.
    pub fn record(&mut self, key: StreamKey, now: Nanos) -> Point {
        match self.streams.get_mut(&key) {
            Some(stream) if stream.queue.is_empty() => Point::At(stream.free_at.max(now)),
            Some(stream) => {
                let moment = Moment::default();
                stream.queue.push_back(Op::Record(Arc::clone(&moment)));
                Point::Later(moment)
            }
            None => Point::At(now),
        }
    }

    /// Later work of the stream starts after `point`.
    pub fn wait(&mut self, key: StreamKey, point: Point, space: &mut Space) {
        self.push(key, Op::Wait(point), space);
    }

    fn push(&mut self, key: StreamKey, op: Op, space: &mut Space) {
        let Some(stream) = self.streams.get_mut(&key) else {
            return;
        };
        stream.queue.push_back(op);
        if !self.blocked.contains(&key) {
            let fault = &mut self.faulted;
            let (_, open) = run(stream, space, false, fault);
            if !open {
                self.blocked.insert(key);
            }
        }
    }

    /// Gives times to what waited for a moment that is known now.
    pub fn settle(&mut self, space: &mut Space) {
        let mut moved = true;
        while moved {
            moved = false;
            for key in self.blocked.iter().copied().collect::<Vec<_>>() {
                let Some(stream) = self.streams.get_mut(&key) else {
                    continue;
                };
                let (ran, open) = run(stream, space, true, &mut self.faulted);
                moved |= ran;
                if open {
                    let destroyed = stream.destroyed;
                    self.blocked.remove(&key);
                    if destroyed {
                        self.streams.remove(&key);
                    }
                }
            }
        }
    }
}

/// Runs a stream as far as times are known. `were_held` says that its queued work was counted by
/// [`Space::hold`]. Answers whether anything ran and whether the queue is empty.
fn run(stream: &mut Stream, space: &mut Space, were_held: bool, fault: &mut bool) -> (bool, bool) {
    let mut ran = false;
    while let Some(op) = stream.queue.front() {
        match op {
            Op::Wait(point) => match point.known() {
                Some(time) => stream.free_at = stream.free_at.max(time),
                None => return (ran, false),
            },
            Op::Record(moment) => {
                // Set once by construction: the operation is popped below.
                let _ = moment.set(stream.free_at);
            }
            Op::Work { work, queued_at } => {
                stream.free_at = stream.free_at.max(*queued_at) + work.cost;
                for &used in work.uses.iter().flatten() {
                    if work.unproven {
                        *fault |= !space.allows(used);
                    } else if were_held {
                        space.unhold(used);
                    }
                    space.use_until(used, stream.free_at);
                }
            }
        }
        stream.queue.pop_front();
        ran = true;
    }
    (ran, true)
}
