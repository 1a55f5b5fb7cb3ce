//! PyTorch's memory snapshot as traces.
//!
//! A snapshot holds the latest events of each device, as many as its ring kept, and what was live and
//! reserved when it was taken. What was live before the first event follows from both: it is what the
//! last state has, with every event undone from the last to the first.

use std::collections::HashMap;

use super::build::Found;
use super::pickle::{Contents, Value, Word};
use super::{Builder, Place, ReadOptions, Trace, TraceError};

/// The most devices a snapshot may have.
const DEVICES: u64 = 1024;

/// A block that is live when the snapshot is taken.
#[derive(Clone, Copy)]
struct Block {
    bytes: u64,
    stream: u64,
}

/// What is there when the snapshot is taken, of one device.
#[derive(Default)]
struct State {
    blocks: HashMap<u64, Block>,
    reserved: u64,
    events: Option<Value>,
}

/// The traces of a snapshot.
pub(super) fn traces(contents: &Contents, options: &ReadOptions) -> Result<Vec<Trace>, TraceError> {
    let root = contents.root;
    let mut states: Vec<State> = Vec::new();
    let wrong = |what, why| TraceError::Snapshot {
        what,
        part: "snapshot",
        nth: 0,
        why,
    };
    if !contents.is_dict(root) {
        return Err(wrong("type", "not a dict"));
    }
    let (segments, events) = (
        contents.field(root, Word::Segments),
        contents.field(root, Word::DeviceTraces),
    );
    if segments.is_none() && events.is_none() {
        return Err(wrong("device_traces", "missing"));
    }
    if let Some(segments) = segments {
        let segments = contents.items(segments);
        let segments = segments.ok_or(wrong("segments", "not a list"))?;
        for (nth, segment) in segments.iter().enumerate() {
            Reader {
                contents,
                part: "segment",
                nth: nth as u64,
                value: *segment,
            }
            .segment(&mut states)?;
        }
    }
    if let Some(events) = events {
        let devices = contents.items(events);
        let devices = devices.ok_or(wrong("device_traces", "not a list"))?;
        for (device, events) in devices.iter().enumerate() {
            if contents.items(*events).is_none() {
                return Err(wrong("device_traces", "not a list of lists"));
            }
            state(&mut states, device as u64)
                .ok_or(wrong("device_traces", "longer than 1024"))?
                .events = Some(*events);
        }
    }
    let mut traces = Vec::new();
    let mut left = *options;
    for (device, state) in (0..).zip(states) {
        if let Some(trace) = one(contents, device, state, &left)? {
            left.events = left.events.saturating_sub(trace.events.len() as u64);
            traces.push(trace);
        }
    }
    match traces.is_empty() {
        true => Err(TraceError::NoEvents),
        false => Ok(traces),
    }
}

fn state(states: &mut Vec<State>, device: u64) -> Option<&mut State> {
    let place = usize::try_from(device).ok().filter(|_| device < DEVICES)?;
    if states.len() <= place {
        states.resize_with(place + 1, State::default);
    }
    states.get_mut(place)
}

/// An event as it stands in the file.
#[derive(Clone, Copy)]
struct Entry {
    action: Word,
    addr: u64,
    size: u64,
    stream: u64,
    time_us: u64,
    free: u64,
}

/// One dict of a snapshot.
struct Reader<'a> {
    contents: &'a Contents,
    part: &'static str,
    nth: u64,
    value: Value,
}

impl Reader<'_> {
    fn wrong(&self, what: &'static str, why: &'static str) -> TraceError {
        TraceError::Snapshot {
            what,
            part: self.part,
            nth: self.nth,
            why,
        }
    }

    /// A number that is there or is 0.
    fn number(&self, word: Word, what: &'static str) -> Result<Option<u64>, TraceError> {
        match self.contents.field(self.value, word) {
            None | Some(Value::None) => Ok(None),
            Some(Value::Int(value)) => match u64::try_from(value) {
                Ok(value) => Ok(Some(value)),
                Err(_) => Err(self.wrong(what, "below zero")),
            },
            Some(Value::Large(value)) => Ok(Some(value)),
            Some(_) => Err(self.wrong(what, "not an integer")),
        }
    }

    fn needed(&self, word: Word, what: &'static str) -> Result<u64, TraceError> {
        self.number(word, what)?.ok_or(self.wrong(what, "missing"))
    }

    fn segment(&self, states: &mut Vec<State>) -> Result<(), TraceError> {
        let device = self.number(Word::Device, "device")?.unwrap_or(0);
        let state = state(states, device).ok_or(self.wrong("device", "above 1023"))?;
        let total = self.needed(Word::TotalSize, "total_size")?;
        let stream = self.number(Word::Stream, "stream")?.unwrap_or(0);
        let mut address = self.needed(Word::Address, "address")?;
        let sum = state.reserved.checked_add(total);
        state.reserved = sum.ok_or(self.wrong("total_size", "too large"))?;
        let Some(blocks) = self.contents.field(self.value, Word::Blocks) else {
            return Ok(());
        };
        let blocks = self.contents.items(blocks);
        for block in blocks.ok_or(self.wrong("blocks", "not a list"))? {
            let block = Reader {
                part: "segment (a block)",
                value: *block,
                ..*self
            };
            let size = block.needed(Word::Size, "size")?;
            let at = block.number(Word::Address, "address")?.unwrap_or(address);
            let is_live = match self.contents.field(block.value, Word::State) {
                Some(Value::Text(Word::Inactive)) => false,
                Some(Value::Text(
                    Word::ActiveAllocated | Word::ActivePendingFree | Word::ActiveAwaitingFree,
                )) => true,
                _ => return Err(block.wrong("state", "not one that PyTorch has")),
            };
            if is_live {
                let bytes = block.requested()?.unwrap_or(size);
                state.blocks.insert(at, Block { bytes, stream });
            }
            let next = at.checked_add(size);
            address = next.ok_or(block.wrong("size", "too large"))?;
        }
        Ok(())
    }

    /// What was asked for; older versions keep it in the block's history.
    fn requested(&self) -> Result<Option<u64>, TraceError> {
        if let Some(bytes) = self.number(Word::RequestedSize, "requested_size")? {
            return Ok(Some(bytes));
        }
        let history = self.contents.field(self.value, Word::History);
        let latest = history.and_then(|h| self.contents.items(h)?.first().copied());
        match latest {
            Some(value) => Reader { value, ..*self }.number(Word::RealSize, "real_size"),
            None => Ok(None),
        }
    }

    fn entry(&self) -> Result<Entry, TraceError> {
        let action = match self.contents.field(self.value, Word::Action) {
            Some(Value::Text(word)) => word,
            Some(_) => return Err(self.wrong("action", "not a string")),
            None => return Err(self.wrong("action", "missing")),
        };
        let mut entry = Entry {
            action,
            addr: 0,
            size: 0,
            stream: self.number(Word::Stream, "stream")?.unwrap_or(0),
            time_us: self.number(Word::TimeUs, "time_us")?.unwrap_or(0),
            free: 0,
        };
        match action {
            Word::Alloc
            | Word::FreeRequested
            | Word::FreeCompleted
            | Word::Free
            | Word::SegmentAlloc
            | Word::SegmentFree
            | Word::SegmentMap
            | Word::SegmentUnmap => {
                entry.addr = self.needed(Word::Addr, "addr")?;
                entry.size = self.needed(Word::Size, "size")?;
            }
            Word::Oom => {
                entry.size = self.needed(Word::Size, "size")?;
                entry.free = self.number(Word::DeviceFree, "device_free")?.unwrap_or(0);
            }
            // Snapshots, and what later versions may add.
            _ => {}
        }
        Ok(entry)
    }
}

/// The trace of one device, if anything was ever allocated on it.
fn one(
    contents: &Contents,
    device: u32,
    state: State,
    options: &ReadOptions,
) -> Result<Option<Trace>, TraceError> {
    let events = state.events.and_then(|events| contents.items(events));
    let events = events.unwrap_or_default();
    let entry = |nth: usize| {
        Reader {
            contents,
            part: "event",
            nth: nth as u64,
            value: events[nth],
        }
        .entry()
    };
    // From the last to the first: what was there before.
    let (mut blocks, mut reserved) = (state.blocks, i128::from(state.reserved));
    for nth in (0..events.len()).rev() {
        let entry = entry(nth)?;
        match entry.action {
            Word::Alloc => {
                blocks.remove(&entry.addr);
            }
            // Old versions free in one step.
            Word::FreeCompleted | Word::Free => {
                let block = Block {
                    bytes: entry.size,
                    stream: entry.stream,
                };
                blocks.insert(entry.addr, block);
            }
            Word::SegmentAlloc | Word::SegmentMap => reserved -= i128::from(entry.size),
            Word::SegmentFree | Word::SegmentUnmap => reserved += i128::from(entry.size),
            _ => {}
        }
    }
    let mut builder = Builder::new(device, options);
    let start = match events.is_empty() {
        true => 0,
        false => entry(0)?.time_us,
    };
    // The order in which they came is not known; by address is what they have.
    let mut blocks: Vec<(u64, Block)> = blocks.into_iter().collect();
    blocks.sort_unstable_by_key(|(addr, _)| *addr);
    let first = Place::Event(0);
    let too_large = |nth| TraceError::Snapshot {
        what: "size",
        part: "event",
        nth,
        why: "too large beside what is live",
    };
    // Below zero where segments are missing from the state.
    let known = |reserved: i128| u64::try_from(reserved.max(0)).unwrap_or(u64::MAX);
    builder.reserved(known(reserved), start, first)?;
    for (addr, block) in blocks {
        builder.notes().initial += 1;
        if !builder.alloc(addr, block.bytes, block.stream, start, first)? {
            return Err(too_large(0));
        }
    }
    for nth in 0..events.len() {
        let entry = entry(nth)?;
        let (place, time) = (Place::Event(nth as u64), entry.time_us);
        match entry.action {
            Word::Alloc => {
                if builder.is_live(entry.addr) {
                    builder.free(entry.addr, None, time, place)?;
                    builder.notes().replaced += 1;
                }
                if !builder.alloc(entry.addr, entry.size, entry.stream, time, place)? {
                    return Err(too_large(nth as u64));
                }
            }
            Word::FreeCompleted | Word::Free => {
                match builder.free(entry.addr, None, time, place)? {
                    Found::Block => {}
                    Found::Nothing => builder.notes().unknown_frees += 1,
                }
            }
            Word::SegmentAlloc | Word::SegmentMap => {
                reserved += i128::from(entry.size);
                builder.reserved(known(reserved), time, place)?;
            }
            Word::SegmentFree | Word::SegmentUnmap => {
                reserved -= i128::from(entry.size);
                builder.reserved(known(reserved), time, place)?;
            }
            Word::Oom => builder.out_of_memory(entry.size, entry.free, time, place)?,
            _ => {}
        }
    }
    Ok(builder.finish())
}
