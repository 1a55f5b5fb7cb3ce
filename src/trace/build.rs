//! Events of one device become a trace: blocks by slot, streams by index, peaks.

use std::collections::HashMap;

use super::{Event, EventKind, Notes, Place, ReadOptions, Trace, TraceError};

/// Streams that are told apart; further ones share.
const STREAMS: usize = 64;

/// What a free found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Found {
    /// The block.
    Block,
    /// No block.
    Nothing,
}

struct Live {
    slot: u32,
    bytes: u64,
    stream: u16,
}

/// Collects the events of a device.
pub(super) struct Builder<'a> {
    trace: Trace,
    live: HashMap<u64, Live>,
    vacant: Vec<u32>,
    streams: HashMap<u64, u16>,
    bytes: u64,
    options: &'a ReadOptions,
}

impl<'a> Builder<'a> {
    pub(super) fn new(device: u32, options: &'a ReadOptions) -> Self {
        Self {
            trace: Trace {
                device,
                ..Trace::default()
            },
            live: HashMap::new(),
            vacant: Vec::new(),
            streams: HashMap::new(),
            bytes: 0,
            options,
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.trace.events.len() as u64
    }

    pub(super) fn notes(&mut self) -> &mut Notes {
        &mut self.trace.notes
    }

    pub(super) fn is_live(&self, id: u64) -> bool {
        self.live.contains_key(&id)
    }

    fn push(&mut self, time_us: u64, kind: EventKind, place: Place) -> Result<(), TraceError> {
        if self.len() >= self.options.events {
            return Err(TraceError::TooMuch {
                what: "events",
                limit: self.options.events,
                place,
            });
        }
        self.trace.events.push(Event { time_us, kind });
        Ok(())
    }

    fn stream(&mut self, key: u64) -> u16 {
        let next = self.streams.len();
        *self.streams.entry(key).or_insert_with(|| {
            if next < STREAMS {
                self.trace.streams.push(key);
            }
            (next % STREAMS) as u16
        })
    }

    /// Allocates; `false` if the live bytes would pass 64 bits. The id is not live.
    pub(super) fn alloc(
        &mut self,
        id: u64,
        bytes: u64,
        stream: u64,
        time_us: u64,
        place: Place,
    ) -> Result<bool, TraceError> {
        let Some(sum) = self.bytes.checked_add(bytes) else {
            return Ok(false);
        };
        let stream = self.stream(stream);
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.trace.slots += 1;
            self.trace.slots - 1
        });
        let kind = EventKind::Alloc {
            slot,
            bytes,
            stream,
        };
        self.push(time_us, kind, place)?;
        self.bytes = sum;
        self.trace.peak = self.trace.peak.max(sum);
        let live = Live {
            slot,
            bytes,
            stream,
        };
        self.live.insert(id, live);
        Ok(true)
    }

    /// Frees on a stream, or on the block's own.
    pub(super) fn free(
        &mut self,
        id: u64,
        stream: Option<u64>,
        time_us: u64,
        place: Place,
    ) -> Result<Found, TraceError> {
        let Some(live) = self.live.remove(&id) else {
            return Ok(Found::Nothing);
        };
        let stream = stream.map_or(live.stream, |key| self.stream(key));
        let slot = live.slot;
        self.push(time_us, EventKind::Free { slot, stream }, place)?;
        self.bytes -= live.bytes;
        self.vacant.push(slot);
        Ok(Found::Block)
    }

    pub(super) fn reserved(
        &mut self,
        bytes: u64,
        time_us: u64,
        place: Place,
    ) -> Result<(), TraceError> {
        let peak = self.trace.recorded_peak.get_or_insert(0);
        *peak = bytes.max(*peak);
        self.push(time_us, EventKind::Reserved { bytes }, place)
    }

    pub(super) fn out_of_memory(
        &mut self,
        bytes: u64,
        free: u64,
        time_us: u64,
        place: Place,
    ) -> Result<(), TraceError> {
        self.push(time_us, EventKind::OutOfMemory { bytes, free }, place)
    }

    /// The trace, unless nothing is allocated in it.
    pub(super) fn finish(self) -> Option<Trace> {
        (self.trace.slots > 0).then_some(self.trace)
    }
}
