//! Streams, events and holds: queues, each with a worker of its own.
//!
//! Everything that can be waited for is a [`Fence`]: a record of an event, the end of a hold, the
//! turn of a copy from the host. One lock guards all queues and the setting of fences; it is never
//! held while work runs or while the table of mappings is locked.
//!
//! A fence is set by an item that was queued before every item that waits for it, or by a
//! [`Hold`]. So without holds all queues run empty, and a lost device ends all holds.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{Builder, JoinHandle};

use super::memory::Space;
use super::table::Fault;
use super::work::Work;
use crate::driver::capture::{Captures, Step};
use crate::driver::{DriverCode, EventId, Hold, StreamId, StreamKey};
use crate::sync::{Condvar, Mutex};

type Outcome<T> = Result<T, DriverCode>;

/// Keys are unique in the process, not only in one driver.
static NEXT_KEY: AtomicU64 = AtomicU64::new(1);

fn next_key() -> StreamKey {
    StreamKey(NEXT_KEY.fetch_add(1, Ordering::Relaxed))
}

/// Something that happens once. Set only while [`Shared::state`] is locked.
#[derive(Debug, Default)]
struct Fence {
    passed: AtomicBool,
    changed: Condvar,
}

impl Fence {
    fn passed(&self) -> bool {
        self.passed.load(Ordering::Acquire)
    }
}

#[derive(Debug)]
enum Item {
    Work(Work),
    /// Sets the fence: all earlier items are done.
    Set(Arc<Fence>),
    /// Waits for the fence.
    Wait(Arc<Fence>),
}

#[derive(Debug, Default)]
struct Queue {
    items: VecDeque<Item>,
    /// The worker has taken an item and not come back for the next.
    busy: bool,
    started: bool,
    closed: bool,
    wake: Arc<Condvar>,
}

impl Queue {
    fn is_idle(&self) -> bool {
        self.items.is_empty() && !self.busy
    }
}

#[derive(Debug)]
struct State {
    /// Index is the stream's id. Slot 0 is the default stream.
    slots: Vec<Option<StreamKey>>,
    /// Also queues of destroyed streams that have not run empty.
    queues: BTreeMap<StreamKey, Queue>,
    /// The fence of the most recent record; none if it has passed or there was none.
    events: BTreeMap<EventId, Option<Arc<Fence>>>,
    next_event: u64,
    /// Holds that have not ended, by their fence.
    holds: BTreeMap<u64, Arc<Fence>>,
    next_hold: u64,
    workers: Vec<JoinHandle<()>>,
}

impl State {
    fn key(&self, stream: StreamId) -> Outcome<StreamKey> {
        usize::try_from(stream.0)
            .ok()
            .and_then(|slot| self.slots.get(slot).copied().flatten())
            .ok_or(DriverCode::INVALID_HANDLE)
    }
}

/// What the driver and its workers own together. Memory goes with the last of them.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) space: Space,
    pub(super) captures: Captures,
    state: Mutex<State>,
    lost: AtomicBool,
}

impl Shared {
    pub(super) fn new(space: Space) -> Self {
        let key = next_key();
        Self {
            space,
            captures: Captures::default(),
            state: Mutex::new(State {
                slots: vec![Some(key)],
                queues: BTreeMap::from([(key, Queue::default())]),
                events: BTreeMap::new(),
                next_event: 1,
                holds: BTreeMap::new(),
                next_hold: 0,
                workers: Vec::new(),
            }),
            lost: AtomicBool::new(false),
        }
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Nothing of the device answers any more: queued work is skipped, holds end.
    pub(super) fn lose(&self, fault: Fault) {
        let mut state = self.state.lock();
        if !self.lost.swap(true, Ordering::AcqRel) {
            tracing::error!(
                address = format_args!("{:#x}", fault.0),
                "host device lost: work touched an address without the mapping or rights for it"
            );
        }
        for (_, fence) in std::mem::take(&mut state.holds) {
            set(&fence);
        }
    }

    /// Streams besides the default one, and events.
    pub(super) fn counts(&self) -> (usize, usize) {
        let state = self.state.lock();
        let streams = state.slots.iter().skip(1).flatten().count();
        (streams, state.events.len())
    }

    pub(super) fn create_stream(&self) -> StreamId {
        let key = next_key();
        let mut state = self.state.lock();
        state.queues.insert(key, Queue::default());
        let free = state.slots.iter().position(Option::is_none);
        let slot = free.unwrap_or(state.slots.len());
        match state.slots.get_mut(slot) {
            Some(free) => *free = Some(key),
            None => state.slots.push(Some(key)),
        }
        StreamId(slot as u64)
    }

    pub(super) fn destroy_stream(&self, stream: StreamId) -> Outcome<()> {
        if stream == StreamId::DEFAULT {
            return Err(DriverCode::INVALID_HANDLE);
        }
        let mut state = self.state.lock();
        let key = state.key(stream)?;
        if let Some(slot) = usize::try_from(stream.0)
            .ok()
            .and_then(|slot| state.slots.get_mut(slot))
        {
            *slot = None;
        }
        close(&mut state, key);
        self.captures.forget_stream(key);
        Ok(())
    }

    pub(super) fn stream_key(&self, stream: StreamId) -> Outcome<StreamKey> {
        self.state.lock().key(stream)
    }

    pub(super) fn create_event(&self) -> EventId {
        let mut state = self.state.lock();
        let event = EventId(state.next_event);
        state.next_event += 1;
        state.events.insert(event, None);
        event
    }

    pub(super) fn destroy_event(&self, event: EventId) -> Outcome<()> {
        self.captures.forget_event(event);
        let removed = self.state.lock().events.remove(&event);
        removed.map(drop).ok_or(DriverCode::INVALID_HANDLE)
    }

    pub(super) fn record_event(self: &Arc<Self>, event: EventId, stream: StreamId) -> Outcome<()> {
        let mut state = self.state.lock();
        if !state.events.contains_key(&event) {
            return Err(DriverCode::INVALID_HANDLE);
        }
        if self.captures.takes_record(event, state.key(stream)?) {
            return Ok(());
        }
        let fence = self.mark(&mut state, stream)?;
        state.events.insert(event, fence);
        Ok(())
    }

    pub(super) fn query_event(&self, event: EventId) -> Outcome<bool> {
        self.captures.refuse_event(event)?;
        let passed = match self.state.lock().events.get(&event) {
            Some(fence) => fence.as_ref().is_none_or(|fence| fence.passed()),
            None => return Err(DriverCode::INVALID_HANDLE),
        };
        // After the look at the fence: it passes also when the work before it was skipped.
        if self.is_lost() {
            return Err(DriverCode::ILLEGAL_ADDRESS);
        }
        Ok(passed)
    }

    pub(super) fn sync_event(&self, event: EventId) -> Outcome<()> {
        self.captures.refuse_event(event)?;
        let fence = match self.state.lock().events.get(&event) {
            Some(fence) => fence.clone(),
            None => return Err(DriverCode::INVALID_HANDLE),
        };
        self.wait(fence.as_deref())
    }

    pub(super) fn wait_event(self: &Arc<Self>, stream: StreamId, event: EventId) -> Outcome<()> {
        let mut state = self.state.lock();
        let fence = match state.events.get(&event) {
            Some(fence) => fence.clone(),
            None => return Err(DriverCode::INVALID_HANDLE),
        };
        if self.captures.takes_wait(state.key(stream)?, event)? {
            return Ok(());
        }
        match fence {
            Some(fence) if !fence.passed() => self.push(&mut state, stream, Item::Wait(fence)),
            _ => state.key(stream).map(drop),
        }
    }

    pub(super) fn sync_stream(self: &Arc<Self>, stream: StreamId) -> Outcome<()> {
        self.captures.refuse_wait(self.stream_key(stream)?)?;
        let fence = self.mark(&mut self.state.lock(), stream)?;
        self.wait(fence.as_deref())
    }

    pub(super) fn submit(self: &Arc<Self>, stream: StreamId, work: Work) -> Outcome<()> {
        let mut state = self.state.lock();
        let step = match work {
            Work::Fill { range, byte } => Step::Fill { range, byte },
            Work::Copy { dst, src } => Step::Copy { dst, src },
            Work::Kernel(kernel) => Step::Launch(kernel),
        };
        if self.captures.takes(state.key(stream)?, step) {
            return Ok(());
        }
        self.push(&mut state, stream, Item::Work(work))
    }

    /// Queues all of it or, if the stream is not known or its worker cannot be started, nothing.
    pub(super) fn submit_all(
        self: &Arc<Self>,
        stream: StreamId,
        works: impl Iterator<Item = Work>,
    ) -> Outcome<()> {
        let mut state = self.state.lock();
        state.key(stream)?;
        // Only the first can fail: it starts the worker.
        for work in works {
            self.push(&mut state, stream, Item::Work(work))?;
        }
        Ok(())
    }

    pub(super) fn hold(self: &Arc<Self>, stream: StreamId) -> Outcome<Hold> {
        let mut state = self.state.lock();
        // Checked under the lock, so that `lose` ends this hold or it is not made.
        if self.is_lost() {
            return Err(DriverCode::ILLEGAL_ADDRESS);
        }
        self.captures.refuse_wait(state.key(stream)?)?;
        let fence = Arc::new(Fence::default());
        self.push(&mut state, stream, Item::Wait(Arc::clone(&fence)))?;
        let id = state.next_hold;
        state.next_hold += 1;
        state.holds.insert(id, fence);
        // Weak: a worker that waits for the hold keeps `Shared`; without one nobody waits.
        let shared = Arc::downgrade(self);
        Ok(Hold::new(move || {
            let Some(shared) = shared.upgrade().filter(|s| !s.space.is_forked()) else {
                return;
            };
            let mut state = shared.state.lock();
            if let Some(fence) = state.holds.remove(&id) {
                set(&fence);
            }
        }))
    }

    /// Runs `work` on the caller's thread when it is the caller's turn on `stream`, which goes on
    /// when it returns. So the caller's slices never leave its thread.
    pub(super) fn in_turn(
        self: &Arc<Self>,
        stream: StreamId,
        work: impl FnOnce() -> Result<(), Fault>,
    ) -> Outcome<()> {
        let (turn, end) = (Arc::new(Fence::default()), Arc::new(Fence::default()));
        let mut state = self.state.lock();
        self.captures.refuse_wait(state.key(stream)?)?;
        self.push(&mut state, stream, Item::Set(Arc::clone(&turn)))?;
        self.push(&mut state, stream, Item::Wait(Arc::clone(&end)))?;
        drop(state);
        let outcome = self.wait(Some(&turn)).and_then(|()| {
            work().map_err(|fault| {
                self.lose(fault);
                DriverCode::ILLEGAL_ADDRESS
            })
        });
        self.set(&end);
        outcome?;
        if self.is_lost() {
            return Err(DriverCode::ILLEGAL_ADDRESS);
        }
        Ok(())
    }

    /// Closes every stream and waits for their work, unless a [`Hold`] keeps it from ending: then
    /// the workers end after it does.
    pub(super) fn shut_down(&self) {
        let mut state = self.state.lock();
        let keys: Vec<_> = state.queues.keys().copied().collect();
        for key in keys {
            close(&mut state, key);
        }
        let workers = std::mem::take(&mut state.workers);
        let held = !state.holds.is_empty();
        drop(state);
        if held {
            return;
        }
        for worker in workers {
            if worker.join().is_err() {
                tracing::error!("a stream worker of the host driver panicked");
            }
        }
    }

    /// A fence for all work queued on `stream` so far; none if there is none.
    fn mark(self: &Arc<Self>, state: &mut State, stream: StreamId) -> Outcome<Option<Arc<Fence>>> {
        let key = state.key(stream)?;
        if state.queues.get(&key).is_none_or(Queue::is_idle) {
            return Ok(None);
        }
        let fence = Arc::new(Fence::default());
        self.push(state, stream, Item::Set(Arc::clone(&fence)))?;
        Ok(Some(fence))
    }

    fn push(self: &Arc<Self>, state: &mut State, stream: StreamId, item: Item) -> Outcome<()> {
        let key = state.key(stream)?;
        let State {
            queues, workers, ..
        } = state;
        let queue = queues.get_mut(&key).ok_or(DriverCode::INVALID_HANDLE)?;
        if !queue.started {
            let shared = Arc::clone(self);
            let worker = Builder::new()
                .name(format!("granule-host-{}", stream.0))
                .spawn(move || shared.run(key))
                .map_err(|_| DriverCode::OUT_OF_MEMORY)?;
            workers.retain(|worker| !worker.is_finished());
            workers.push(worker);
            queue.started = true;
        }
        queue.items.push_back(item);
        queue.wake.notify_one();
        Ok(())
    }

    /// Waits on the calling host thread.
    fn wait(&self, fence: Option<&Fence>) -> Outcome<()> {
        if let Some(fence) = fence {
            self.block_on(fence);
        }
        if self.is_lost() {
            return Err(DriverCode::ILLEGAL_ADDRESS);
        }
        Ok(())
    }

    fn block_on(&self, fence: &Fence) {
        if fence.passed() {
            return;
        }
        let mut state = self.state.lock();
        while !fence.passed() {
            fence.changed.wait(&mut state);
        }
    }

    fn set(&self, fence: &Fence) {
        let _state = self.state.lock();
        set(fence);
    }

    /// A worker's life.
    fn run(&self, key: StreamKey) {
        while let Some(item) = self.next(key) {
            match item {
                Item::Set(fence) => self.set(&fence),
                Item::Wait(fence) => self.block_on(&fence),
                Item::Work(_) if self.is_lost() => {}
                Item::Work(work) => {
                    if let Err(fault) = work.run(&self.space, || self.is_lost()) {
                        self.lose(fault);
                    }
                }
            }
        }
    }

    /// The next item of a queue; none when it is closed and empty.
    fn next(&self, key: StreamKey) -> Option<Item> {
        let mut state = self.state.lock();
        loop {
            let queue = state.queues.get_mut(&key)?;
            queue.busy = false;
            if let Some(item) = queue.items.pop_front() {
                queue.busy = true;
                return Some(item);
            }
            if queue.closed {
                state.queues.remove(&key);
                return None;
            }
            let wake = Arc::clone(&queue.wake);
            wake.wait(&mut state);
        }
    }
}

/// The caller holds the lock of the state.
fn set(fence: &Fence) {
    fence.passed.store(true, Ordering::Release);
    fence.changed.notify_all();
}

fn close(state: &mut State, key: StreamKey) {
    if let Some(queue) = state.queues.get_mut(&key) {
        queue.closed = true;
        queue.wake.notify_one();
        if !queue.started {
            state.queues.remove(&key);
        }
    }
}
