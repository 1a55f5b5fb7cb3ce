//! What a heap holds, block by block.

use std::collections::HashMap;
use std::fmt;

use super::lane::{Lane, State};
use super::name::BlockName;
use super::state::FREED;
use super::stats::Aside;
use super::{Heap, HeapStats};
use crate::driver::{PhysId, StreamKey};
use crate::units::{Bytes, Va};

/// Blocks and free runs that the table shows for each stream.
const ROWS: usize = 40;

/// All that a heap holds at one moment. Plain data: it holds no memory, and stays as it is.
///
/// Each stream is looked at under its lock, so that its lists fit each other; the streams one after another.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct HeapSnapshot {
    /// Figures over all streams, also those that are gone.
    pub stats: HeapStats,
    /// The streams that the heap knows, in the order they were first used.
    pub streams: Vec<StreamSnapshot>,
}

/// What one stream holds of a heap. Lists are in order of address.
///
/// The lengths of `granules` add up to `stats.held`, those of `blocks` to `stats.live`, and those of `free` to
/// `stats.free`, less what allocations under way have claimed (`claimed`).
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct StreamSnapshot {
    /// The stream, by the key that is never used again.
    pub stream: StreamKey,
    /// Whether this is the memory of a [`CaptureScope`](super::CaptureScope) for the stream.
    pub is_scope: bool,
    /// The addresses reserved for it.
    pub range: Span,
    /// Figures of this stream alone.
    pub stats: HeapStats,
    /// Physical memory, and where it is mapped.
    pub granules: Vec<GranuleSnapshot>,
    /// Blocks, live ones and those in limbo.
    pub blocks: Vec<BlockSnapshot>,
    /// Free runs of mapped memory. Freed blocks that were kept whole have been joined to their neighbours,
    /// but for those that another thread freed at that moment.
    pub free: Vec<Span>,
    /// Old mappings of granules that moved, waiting for a fence.
    pub aliases: Vec<Span>,
    /// Mapped bytes that allocations under way have claimed.
    pub claimed: u64,
}

/// A stretch of addresses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Span {
    /// First address.
    pub addr: Va,
    /// Bytes.
    pub len: u64,
}

/// A granule of a heap.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct GranuleSnapshot {
    /// Where it is mapped.
    pub span: Span,
    /// The physical memory, as the driver names it; `None` while an operation has it in hand.
    pub phys: Option<PhysId>,
}

/// Whether a block is in use.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BlockState {
    /// It is.
    Live,
    /// It was freed, and waits for work of other streams.
    Limbo,
}

/// A block of a heap.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct BlockSnapshot {
    /// Its addresses; the length is what the block takes, rounded up.
    pub span: Span,
    /// Bytes asked for; known of named blocks only.
    pub requested: Option<u64>,
    /// Its name, if it was given one.
    pub name: Option<BlockName>,
    /// Whether it is in use.
    pub state: BlockState,
}

impl Heap {
    /// All that the heap holds, for tools and people. Takes time in proportion to the number of blocks, and
    /// holds each stream's lock for as long as its own blocks take.
    ///
    /// # Example
    ///
    /// ```
    /// use granule::{Device, Heap, HeapConfig, Pool, PoolConfig, driver::sim::SimConfig, units::MIB};
    ///
    /// let device = Device::sim(SimConfig::default())?;
    /// let pool = Pool::new(&device, PoolConfig::default())?;
    /// let heap = Heap::new(&pool, HeapConfig::default())?;
    /// let stream = device.create_stream()?;
    /// let weights = heap.alloc_named(3 * MIB, "weights", &stream)?;
    /// let snapshot = heap.snapshot();
    /// assert_eq!(snapshot.streams[0].blocks[0].span.addr, weights.ptr());
    /// println!("{snapshot}");
    /// # Ok::<(), granule::Error>(())
    /// ```
    #[must_use]
    pub fn snapshot(&self) -> HeapSnapshot {
        let lanes = self.shared.lanes.read().clone();
        HeapSnapshot {
            streams: lanes.iter().map(|lane| lane.snapshot()).collect(),
            stats: self.stats(),
        }
    }
}

impl Lane {
    fn snapshot(&self) -> StreamSnapshot {
        let mut state = self.state.lock();
        state.flush();
        // Other threads may have kept some since; one look, so that figures and lists fit each other.
        let mut aside = state.aside();
        aside.addrs.sort_unstable();
        let mut stats = HeapStats::default();
        state.add_with(&aside, &mut stats);
        let (blocks, free) = state.pieces(&aside);
        let aliases = state.stale.iter().map(|alias| Span {
            addr: Va::new(alias.stale.addr),
            len: alias.stale.len,
        });
        let mut aliases: Vec<Span> = aliases.collect();
        aliases.sort_unstable_by_key(|span| span.addr);
        let placed = state.core.placed();
        let granules = placed.into_iter().map(|one| GranuleSnapshot {
            span: Span {
                addr: Va::new(one.addr),
                len: one.len,
            },
            phys: state.granules.phys(one.id),
        });
        let granules = granules.collect();
        drop(state);
        let claimed = stats.free - free.iter().map(|span| span.len).sum::<u64>();
        StreamSnapshot {
            stream: self.stream().key(),
            is_scope: self.is_scope(),
            range: Span {
                addr: Va::new(self.base()),
                len: self.range().len(),
            },
            stats,
            granules,
            blocks,
            free,
            aliases,
            claimed,
        }
    }
}

impl State {
    /// Blocks and free runs; those that are kept aside, by address, are free.
    fn pieces(&self, aside: &Aside) -> (Vec<BlockSnapshot>, Vec<Span>) {
        let (mut blocks, mut free) = (Vec::new(), Vec::new());
        for piece in self.core.pieces() {
            let span = Span {
                addr: Va::new(piece.addr),
                len: piece.len,
            };
            let is_kept = || aside.addrs.binary_search(&piece.addr).is_ok();
            let mark = piece.mark.filter(|mark| *mark != 0 || !is_kept());
            let Some(mark) = mark else {
                free.push(span);
                continue;
            };
            let named = self.names.get(&piece.addr);
            blocks.push(BlockSnapshot {
                span,
                requested: named.map(|named| named.requested),
                name: named.map(|named| named.name.clone()),
                state: match mark {
                    FREED => BlockState::Limbo,
                    _ => BlockState::Live,
                },
            });
        }
        (blocks, free)
    }
}

impl HeapSnapshot {
    /// Live bytes of the named blocks, by name, most first; blocks without a name count as `None`.
    #[must_use]
    pub fn by_name(&self) -> Vec<(Option<BlockName>, u64)> {
        let mut sums: HashMap<Option<&str>, (Option<BlockName>, u64)> = HashMap::new();
        for block in self.streams.iter().flat_map(|stream| &stream.blocks) {
            let key = block.name.as_deref();
            let sum = sums.entry(key).or_insert((block.name.clone(), 0));
            sum.1 += block.span.len;
        }
        let mut sums: Vec<_> = sums.into_values().collect();
        sums.sort_by(|a, b| (b.1, a.0.as_deref()).cmp(&(a.1, b.0.as_deref())));
        sums
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:#014x}  {:>10}",
            self.addr.get(),
            Bytes(self.len).to_string()
        )
    }
}

/// The line of figures above a table.
fn figures(stats: &HeapStats, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    writeln!(
        f,
        "  held {} in {} granules; live {} in {} blocks",
        Bytes(stats.held),
        stats.granules,
        Bytes(stats.live),
        stats.blocks,
    )?;
    writeln!(
        f,
        "  free {}, longest run {}, idle {}; in limbo {}",
        Bytes(stats.free),
        Bytes(stats.largest_free),
        Bytes(stats.idle),
        Bytes(stats.limbo),
    )?;
    writeln!(
        f,
        "  waste {:.1} %, external {:.1} %",
        100.0 * stats.waste(),
        100.0 * stats.external(),
    )
}

impl fmt::Display for HeapSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "heap on {} streams", self.streams.len())?;
        figures(&self.stats, f)?;
        self.streams.iter().try_for_each(|stream| stream.fmt(f))
    }
}

impl fmt::Display for StreamSnapshot {
    /// A table of at most 80 columns; of many blocks and runs, the longest are shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses = Bytes(self.range.len);
        let at = self.range.addr;
        writeln!(
            f,
            "stream {}: {addresses} of addresses at {at}",
            self.stream.0
        )?;
        figures(&self.stats, f)?;
        let blocks = self.blocks.iter().map(|block| {
            let state = match block.state {
                BlockState::Live => "live",
                BlockState::Limbo => "limbo",
            };
            (block.span, state, block.name.as_deref().unwrap_or(""))
        });
        let free = self.free.iter().map(|span| (*span, "free", ""));
        let aliases = self.aliases.iter().map(|span| (*span, "alias", ""));
        let mut rows: Vec<_> = blocks.chain(free).chain(aliases).collect();
        let more = rows.len().saturating_sub(ROWS);
        if more > 0 {
            rows.sort_by_key(|(span, ..)| std::cmp::Reverse(span.len));
            rows.truncate(ROWS);
        }
        rows.sort_by_key(|(span, ..)| span.addr);
        for (span, what, name) in rows {
            let name = name.escape_debug().to_string();
            let row = format!("  {span}  {what:5}  {name:.40}");
            writeln!(f, "{}", row.trim_end())?;
        }
        match more {
            0 => Ok(()),
            more => writeln!(f, "  and {more} shorter ones"),
        }
    }
}
