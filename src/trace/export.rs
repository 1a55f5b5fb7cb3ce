//! Snapshots and histories as the pickle that PyTorch's tools read.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write};

use super::write::Writer;
use crate::driver::StreamKey;
use crate::units::Va;
use crate::{
    Arena, BlockState, HeapSnapshot, HistoryEvent, HistoryEvents, HistoryKind, StreamSnapshot,
};

/// Memory of heaps and arenas, and what happened to it, in the form of
/// `torch.cuda.memory._dump_snapshot`. Its file opens in <https://pytorch.org/memory_viz> and in
/// `torch/cuda/_memory_viz.py`.
///
/// Granules that lie beside each other become one expandable segment of their stream. A block's name is
/// the top frame of its stack. In an arena each granule is a block.
///
/// Take the snapshots before the history's events, while no other thread uses the heaps and arenas:
/// the page goes back in time from the one by the other.
///
/// # Example
///
/// ```
/// use granule::{Device, Heap, HeapConfig, History, HistoryConfig, Pool, PoolConfig, units::MIB};
/// use granule::{driver::sim::SimConfig, trace::TorchSnapshot};
///
/// let device = Device::sim(SimConfig::default())?;
/// let heap = Heap::new(&Pool::new(&device, PoolConfig::default())?, HeapConfig::default())?;
/// let history = History::new(HistoryConfig::default());
/// heap.set_history(Some(&history));
/// let stream = device.create_stream()?;
/// let weights = heap.alloc_named(3 * MIB, "weights", &stream)?;
///
/// let mut file = Vec::new();
/// let mut snapshot = TorchSnapshot::new(device.info().ordinal);
/// snapshot.heap(&heap.snapshot());
/// snapshot.history(&history.events());
/// snapshot.write(&mut file)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Debug, Default)]
pub struct TorchSnapshot {
    device: u32,
    segments: Vec<Segment>,
    events: Vec<HistoryEvent>,
    start_us: u64,
}

/// A stretch of mapped memory.
#[derive(Clone, PartialEq, Debug)]
struct Segment {
    addr: u64,
    len: u64,
    stream: StreamKey,
    /// Blocks and free runs, without a gap.
    blocks: Vec<Piece>,
}

#[derive(Clone, PartialEq, Debug)]
struct Piece {
    addr: u64,
    len: u64,
    requested: u64,
    state: &'static str,
    name: Option<String>,
}

const LIVE: &str = "active_allocated";
const LIMBO: &str = "active_pending_free";
const FREE: &str = "inactive";

impl TorchSnapshot {
    /// An empty snapshot of the device of that number.
    #[must_use]
    pub fn new(device: u32) -> Self {
        Self {
            device,
            ..Self::default()
        }
    }

    /// Adds what a heap holds.
    pub fn heap(&mut self, heap: &HeapSnapshot) {
        heap.streams.iter().for_each(|stream| self.stream(stream));
    }

    fn stream(&mut self, stream: &StreamSnapshot) {
        let granules = stream.granules.iter().map(|g| (g.span.addr, g.span.len));
        let blocks = stream.blocks.iter().map(|block| Piece {
            addr: block.span.addr.get(),
            len: block.span.len,
            requested: block.requested.unwrap_or(block.span.len),
            state: match block.state {
                BlockState::Live => LIVE,
                BlockState::Limbo => LIMBO,
            },
            name: block.name.as_deref().map(str::to_owned),
        });
        let blocks: Vec<Piece> = blocks.collect();
        let mut blocks = blocks.into_iter().peekable();
        for (addr, len) in joined(granules) {
            let end = addr + len;
            let mut segment = Segment {
                addr,
                len,
                stream: stream.stream,
                blocks: Vec::new(),
            };
            let mut at = addr;
            while let Some(block) = blocks.next_if(|b| b.addr + b.len <= end) {
                segment.fill_to(at, block.addr);
                at = block.addr + block.len;
                segment.blocks.push(block);
            }
            segment.fill_to(at, end);
            self.segments.push(segment);
        }
    }

    /// Adds the memory of an arena in use.
    pub fn arena(&mut self, arena: &Arena) {
        for extent in arena.ranges() {
            let (addr, len) = (extent.range.start().get(), extent.range.len());
            let follows = |last: &&mut Segment| {
                last.addr + last.len == addr && last.stream == StreamKey(0) && extent.offset > 0
            };
            let block = Piece {
                addr,
                len,
                requested: len,
                state: LIVE,
                name: None,
            };
            match self.segments.last_mut().filter(follows) {
                Some(last) => {
                    last.len += len;
                    last.blocks.push(block);
                }
                None => self.segments.push(Segment {
                    addr,
                    len,
                    stream: StreamKey(0),
                    blocks: vec![block],
                }),
            }
        }
    }

    /// Adds what happened. Sizes as requested of the blocks that are live still are taken from it.
    pub fn history(&mut self, history: &HistoryEvents) {
        let mut latest: HashMap<u64, &HistoryEvent> = HashMap::new();
        for event in &history.events {
            match event.kind {
                HistoryKind::Alloc => {
                    latest.insert(event.addr.get(), event);
                }
                HistoryKind::Free => {
                    latest.remove(&event.addr.get());
                }
                _ => {}
            }
        }
        for block in self.segments.iter_mut().flat_map(|s| &mut s.blocks) {
            if let Some(event) = latest.get(&block.addr)
                && block.state != FREE
                && event.len == block.len
            {
                block.requested = event.requested;
            }
        }
        // These tools list a free as two events.
        let mut asked = HashSet::new();
        for event in &history.events {
            match event.kind {
                HistoryKind::FreeRequested => {
                    asked.insert(event.addr);
                }
                HistoryKind::Free if !asked.remove(&event.addr) => {
                    let kind = HistoryKind::FreeRequested;
                    self.events.push(HistoryEvent {
                        kind,
                        ..event.clone()
                    });
                }
                _ => {}
            }
            self.events.push(event.clone());
        }
        self.start_us = history.started_us;
    }

    /// Writes the pickle.
    ///
    /// # Errors
    ///
    /// Those of the writer.
    pub fn write(&self, out: impl Write) -> io::Result<()> {
        let mut out = Writer::new(io::BufWriter::new(out))?;
        out.dict(|out| {
            out.text("segments")?;
            out.list(&self.segments, |out, segment| self.segment(out, segment))?;
            out.text("device_traces")?;
            let devices: Vec<u32> = (0..=self.device).collect();
            out.list(&devices, |out, device| {
                let events: &[HistoryEvent] = match *device == self.device {
                    true => &self.events,
                    false => &[],
                };
                out.list(events, |out, event| self.event(out, event))
            })?;
            out.text("allocator_settings")?;
            out.dict(|out| {
                out.text("expandable_segments")?;
                out.bool(true)
            })?;
            out.text("external_annotations")?;
            out.list::<()>(&[], |_, ()| Ok(()))
        })?;
        out.finish()
    }

    fn segment<W: Write>(&self, out: &mut Writer<W>, segment: &Segment) -> io::Result<()> {
        let sum = |states: &[&str], of: fn(&Piece) -> u64| -> u64 {
            let blocks = segment.blocks.iter();
            let counted = blocks.filter(|block| states.contains(&block.state));
            counted.map(of).sum()
        };
        out.dict(|out| {
            out.int_field("device", self.device.into())?;
            out.int_field("address", segment.addr)?;
            out.int_field("total_size", segment.len)?;
            out.int_field("allocated_size", sum(&[LIVE], |b| b.len))?;
            out.int_field("active_size", sum(&[LIVE, LIMBO], |b| b.len))?;
            out.int_field("requested_size", sum(&[LIVE, LIMBO], |b| b.requested))?;
            out.int_field("stream", segment.stream.0)?;
            out.text_field("segment_type", "large")?;
            out.text("segment_pool_id")?;
            out.pair(0, 0)?;
            out.text("is_expandable")?;
            out.bool(true)?;
            frames(out, None)?;
            out.text("blocks")?;
            out.list(&segment.blocks, |out, block| {
                out.dict(|out| {
                    out.int_field("address", block.addr)?;
                    out.int_field("size", block.len)?;
                    out.int_field("requested_size", block.requested)?;
                    out.text_field("state", block.state)?;
                    frames(out, block.name.as_deref())
                })
            })
        })
    }

    fn event<W: Write>(&self, out: &mut Writer<W>, event: &HistoryEvent) -> io::Result<()> {
        let (action, size) = match event.kind {
            HistoryKind::Alloc => ("alloc", event.requested),
            HistoryKind::FreeRequested => ("free_requested", event.requested),
            HistoryKind::Free => ("free_completed", event.requested),
            HistoryKind::Map => ("segment_map", event.len),
            HistoryKind::Unmap => ("segment_unmap", event.len),
            HistoryKind::OutOfMemory { .. } => ("oom", event.requested),
        };
        out.dict(|out| {
            out.text_field("action", action)?;
            match event.kind {
                HistoryKind::OutOfMemory { free } => out.int_field("device_free", free)?,
                _ => out.int_field("addr", event.addr.get())?,
            }
            out.int_field("size", size)?;
            out.int_field("stream", event.stream.0)?;
            out.int_field("time_us", self.start_us.saturating_add(event.at_us))?;
            frames(out, event.name.as_deref())
        })
    }
}

impl Segment {
    /// Adds the free run before `to`, if there is one.
    fn fill_to(&mut self, at: u64, to: u64) {
        if to > at {
            self.blocks.push(Piece {
                addr: at,
                len: to - at,
                requested: 0,
                state: FREE,
                name: None,
            });
        }
    }
}

/// The stack of a block: its name, in place of the place in a program.
fn frames<W: Write>(out: &mut Writer<W>, name: Option<&str>) -> io::Result<()> {
    out.text("frames")?;
    let names: Vec<&str> = name.into_iter().collect();
    out.list(&names, |out, name| {
        out.dict(|out| {
            out.text_field("filename", "granule")?;
            out.int_field("line", 0)?;
            out.text_field("name", name)
        })
    })
}

/// Stretches of granules that lie beside each other; given in order of address.
fn joined(granules: impl Iterator<Item = (Va, u64)>) -> Vec<(u64, u64)> {
    let mut all: Vec<(u64, u64)> = Vec::new();
    for (addr, len) in granules {
        match all.last_mut() {
            Some((start, sum)) if *start + *sum == addr.get() => *sum += len,
            _ => all.push((addr.get(), len)),
        }
    }
    all
}
