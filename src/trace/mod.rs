//! Recorded allocations: read from a file, written for other tools.
//!
//! [`read`] takes what a job wrote while it ran, and answers one [`Trace`] for each device in it:
//!
//! * lines `a,<id>,<bytes>,<stream>,<microseconds>` (allocate) and `f,<id>,<microseconds>` (free), with
//!   `#` before a comment. [`History::write_log`](crate::History::write_log) writes these, and three more:
//!   `m,<address>,<bytes>,<microseconds>` and `u,<address>,<bytes>,<microseconds>` (memory was mapped,
//!   unmapped) and `o,<bytes>,<free>,<microseconds>` (out of memory).
//! * the CSV log of RMM (`Thread,Time,Action,Pointer,Size,Stream`).
//! * the pickle of `torch.cuda.memory._dump_snapshot`, versions 2.1 to 2.11. No Python and no PyTorch
//!   is needed, and nothing in the file is ever run: opcodes that name classes or call functions are
//!   refused.
//!
//! Files are read as a stream, and what is kept of them is bounded by [`ReadOptions`]. The example
//! `replay` runs a trace through a [`Heap`](crate::Heap).
//!
//! # Example
//!
//! ```
//! use granule::trace::{self, ReadOptions};
//!
//! let lines = "# two blocks\na,1,4096,0,10\na,2,100,0,12\nf,1,15\n";
//! let traces = trace::read(lines.as_bytes(), &ReadOptions::default())?;
//! assert_eq!((traces[0].peak, traces[0].slots), (4196, 2));
//!
//! let wrong = trace::read("a,1,-5,0,10".as_bytes(), &ReadOptions::default());
//! assert_eq!(wrong.unwrap_err().to_string(), "line 1: bytes is -5, below zero");
//! # Ok::<(), trace::TraceError>(())
//! ```

use std::io::BufRead;

mod build;
mod error;
mod export;
mod lines;
mod pickle;
mod rmm;
mod torch;
mod write;

pub use error::{LineFault, PickleFault, Place, TraceError};
pub use export::TorchSnapshot;

use build::Builder;
use pickle::Source;

/// What is read at most, and how strictly.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadOptions {
    /// Events kept at most, over all devices; 50,000,000 by default (32 bytes each).
    pub events: u64,
    /// Bytes that the contents of a pickle may take in memory while it is read; 4 GiB by default.
    pub memory: u64,
    /// Bytes of the longest line; 4,096 by default.
    pub line: usize,
    /// Leave out frees of unknown blocks, and end a block at whose address another begins, instead of
    /// refusing the file; [`Notes`] counts them. PyTorch's snapshots are always read like this, since
    /// they keep the latest events only.
    pub lenient: bool,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            events: 50_000_000,
            memory: 4 << 30,
            line: 4096,
            lenient: false,
        }
    }
}

/// One device's allocations and frees in the order in which they happened.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Trace {
    /// The device's number where it was recorded.
    pub device: u32,
    /// What happened.
    pub events: Vec<Event>,
    /// Most blocks that were live at once: events name blocks by a slot below this.
    pub slots: u32,
    /// The streams that events name by index, as the file names them.
    pub streams: Vec<u64>,
    /// Most bytes that were live at once, as requested.
    pub peak: u64,
    /// Most bytes that the recorded allocator had reserved, if the file says.
    pub recorded_peak: Option<u64>,
    /// What in the file was not as it should be.
    pub notes: Notes,
}

impl Trace {
    /// The first so many events, as a trace of its own.
    #[must_use]
    pub fn first(&self, events: usize) -> Self {
        let mut part = Self {
            events: self.events.get(..events).unwrap_or(&self.events).to_vec(),
            peak: 0,
            recorded_peak: None,
            streams: self.streams.clone(),
            ..*self
        };
        let (mut live, mut sizes) = (0, vec![0; self.slots as usize]);
        for event in &part.events {
            match event.kind {
                EventKind::Alloc { slot, bytes, .. } => {
                    sizes[slot as usize] = bytes;
                    live += bytes;
                    part.peak = part.peak.max(live);
                }
                EventKind::Free { slot, .. } => live -= sizes[slot as usize],
                EventKind::Reserved { bytes } => {
                    part.recorded_peak = part.recorded_peak.max(Some(bytes));
                }
                EventKind::OutOfMemory { .. } => {}
            }
        }
        part
    }
}

/// Counts of what a trace lacks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Notes {
    /// Blocks that were live before the first event; they are allocated first.
    pub initial: u64,
    /// Frees of blocks that nobody allocated, left out.
    pub unknown_frees: u64,
    /// Blocks that ended without a free, because another began at their address.
    pub replaced: u64,
}

/// Something that happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// When, in microseconds; only differences mean anything, and files without times say 0.
    pub time_us: u64,
    /// What.
    pub kind: EventKind,
}

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EventKind {
    /// A block was allocated.
    Alloc {
        /// Its slot: free before, taken until the block is freed.
        slot: u32,
        /// Bytes asked for.
        bytes: u64,
        /// Index of the stream.
        stream: u16,
    },
    /// The block in a slot was freed.
    Free {
        /// The slot.
        slot: u32,
        /// Index of the stream whose work used it last.
        stream: u16,
    },
    /// The recorded allocator's reserved memory became this much.
    Reserved {
        /// Bytes.
        bytes: u64,
    },
    /// The recorded allocator was out of memory.
    OutOfMemory {
        /// Bytes asked for.
        bytes: u64,
        /// What the device had free.
        free: u64,
    },
}

/// Reads a trace in any of the formats. One [`Trace`] for each device with events, by number.
///
/// # Errors
///
/// [`TraceError`] with the line or byte; [`TraceError::Compressed`] for gzip, which the caller unpacks.
pub fn read(mut input: impl BufRead, options: &ReadOptions) -> Result<Vec<Trace>, TraceError> {
    let head = input
        .fill_buf()
        .map_err(|source| TraceError::Io { at: 0, source })?;
    match head {
        [] => Err(TraceError::Empty),
        [0x1f, ..] => Err(TraceError::Compressed),
        [0x80, ..] => {
            let mut source = Source::new(input);
            let found = pickle::load(&mut source, options)?;
            torch::traces(&found, options)
        }
        [b'T', ..] => rmm::read(input, options),
        _ => lines::read(input, options),
    }
}
