//! Capture of streams into graphs, for drivers that run their work themselves.
//!
//! The rules are CUDA's, as far as one captured stream at a time needs them: forks of a capture to
//! other streams are refused.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::{DriverCode, EventId, Kernel, StreamId, StreamKey};
use crate::sync::Mutex;
use crate::units::{Va, VaRange};

type Refusal<T> = Result<T, DriverCode>;

/// Work of a graph.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    Fill { range: VaRange, byte: u8 },
    Copy { dst: Va, src: VaRange },
    Launch(Kernel),
}

/// What has been captured of one stream so far.
#[derive(Default, Debug)]
struct Tape {
    steps: Vec<Step>,
    spoiled: bool,
}

#[derive(Default, Debug)]
struct Books {
    tapes: BTreeMap<StreamKey, Tape>,
    /// Events whose last record is part of a capture.
    events: BTreeSet<EventId>,
}

impl Books {
    fn spoil(&mut self, key: StreamKey) {
        if let Some(tape) = self.tapes.get_mut(&key) {
            tape.spoiled = true;
        }
    }
}

/// The captures of a driver.
#[derive(Default, Debug)]
pub(super) struct Captures {
    /// Captures under way and events that belong to one: while there are none, nothing is looked up.
    count: AtomicUsize,
    books: Mutex<Books>,
}

impl Captures {
    fn with<T>(&self, idle: T, run: impl FnOnce(&mut Books) -> T) -> T {
        if self.count.load(Relaxed) == 0 {
            return idle;
        }
        self.change(run)
    }

    fn change<T>(&self, run: impl FnOnce(&mut Books) -> T) -> T {
        let mut books = self.books.lock();
        let answer = run(&mut books);
        let count = books.tapes.len() + books.events.len();
        self.count.store(count, Relaxed);
        answer
    }

    /// Starts a capture. The default stream cannot be captured, and no stream twice.
    pub fn begin(&self, stream: StreamId, key: StreamKey) -> Refusal<()> {
        if stream == StreamId::DEFAULT {
            return Err(DriverCode::STREAM_CAPTURE_UNSUPPORTED);
        }
        self.change(|books| match books.tapes.contains_key(&key) {
            true => Err(DriverCode::INVALID_VALUE),
            false => {
                books.tapes.insert(key, Tape::default());
                Ok(())
            }
        })
    }

    /// Ends a capture; its work.
    pub fn end(&self, key: StreamKey) -> Refusal<Vec<Step>> {
        self.change(|books| match books.tapes.remove(&key) {
            None => Err(DriverCode::INVALID_VALUE),
            Some(tape) if tape.spoiled => Err(DriverCode::STREAM_CAPTURE_INVALIDATED),
            Some(tape) => Ok(tape.steps),
        })
    }

    /// The stream is gone, and what was captured of it.
    pub fn forget_stream(&self, key: StreamKey) {
        self.with((), |books| drop(books.tapes.remove(&key)));
    }

    pub fn is_capturing(&self, key: StreamKey) -> bool {
        self.with(false, |books| books.tapes.contains_key(&key))
    }

    /// Takes work for a captured stream; false if the stream runs it itself.
    pub fn takes(&self, key: StreamKey, step: Step) -> bool {
        self.with(false, |books| {
            let tape = books.tapes.get_mut(&key);
            tape.map(|tape| tape.steps.push(step)).is_some()
        })
    }

    /// Refuses a wait of the host for a captured stream, what ends in one, and its key.
    pub fn refuse_wait(&self, key: StreamKey) -> Refusal<()> {
        match self.is_capturing(key) {
            true => Err(DriverCode::STREAM_CAPTURE_UNSUPPORTED),
            false => Ok(()),
        }
    }

    /// Books a record; whether it is part of a capture, so that the event never passes.
    pub fn takes_record(&self, event: EventId, key: StreamKey) -> bool {
        self.with(false, |books| {
            let captured = books.tapes.contains_key(&key);
            match captured {
                true => books.events.insert(event),
                false => books.events.remove(&event),
            };
            captured
        })
    }

    pub fn forget_event(&self, event: EventId) {
        self.with((), |books| {
            books.events.remove(&event);
        });
    }

    /// Refuses to ask for an event that is part of a capture, which that spoils.
    pub fn refuse_event(&self, event: EventId) -> Refusal<()> {
        self.with(Ok(()), |books| {
            if !books.events.contains(&event) {
                return Ok(());
            }
            books.tapes.values_mut().for_each(|t| t.spoiled = true);
            Err(DriverCode::CAPTURED_EVENT)
        })
    }

    /// Whether a wait of a stream is within its capture, and so in order anyway. A wait that crosses
    /// the bound of a capture is refused, and spoils it.
    pub fn takes_wait(&self, key: StreamKey, event: EventId) -> Refusal<bool> {
        self.with(Ok(false), |books| {
            let stream = books.tapes.contains_key(&key);
            let event = books.events.contains(&event);
            if stream != event {
                books.spoil(key);
                return Err(DriverCode::STREAM_CAPTURE_ISOLATION);
            }
            Ok(stream)
        })
    }
}
