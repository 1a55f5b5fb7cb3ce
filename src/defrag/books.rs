//! What is where in a heap of movable blocks. No driver is seen here.

mod bulk;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::time::{Duration, Instant};

use super::plan::{Move, Piece, Slot, State};
use super::uses::Uses;
use super::{Age, MovableStats};
use crate::stream::{Fence, Stream};
use crate::units::round_up;
use crate::{Error, Result};

/// Bytes held for something else than a block; never moved.
pub(super) const HELD: u64 = u64::MAX;

/// Ids are counted by us, so that one multiplication spreads them well enough.
#[derive(Default)]
pub(super) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes
            .iter()
            .for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, id: u64) {
        // 2^64 divided by the golden ratio.
        self.0 = (self.0 ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// A live block.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Guards and pins that keep it where it is.
    pub(super) still: u32,
    /// A pass is moving it just now.
    pub(super) moving: bool,
    pub(super) age: Age,
    pub(super) born: Instant,
    /// Streams that may use it, all of its addresses so far included.
    pub(super) uses: Uses,
    /// Behind the copy that brought it here; other streams wait for it.
    pub(super) ready: Option<Fence>,
}

#[derive(Debug)]
struct Free {
    len: u64,
    uses: Uses,
}

#[derive(Debug)]
pub(super) struct Books {
    pub(super) unit: u64,
    pub(super) align: u64,
    pub(super) slots: Vec<Slot>,
    pub(super) blocks: HashMap<u64, Block, BuildHasherDefault<IdHasher>>,
    by_place: BTreeMap<u64, u64>,
    free: BTreeMap<u64, Free>,
    by_size: BTreeSet<(u64, u64)>,
    /// Places that a pass copies to, by offset.
    held: BTreeMap<u64, u64>,
    /// The window that a pass makes free: not for others.
    pub(super) window: Option<(u64, u64)>,
    next: u64,
    live: u64,
    free_bytes: u64,
}

impl Books {
    pub(super) fn new(unit: u64, align: u64, slots: usize) -> Self {
        Self {
            unit,
            align,
            slots: vec![Slot::Hole; slots],
            blocks: HashMap::default(),
            by_place: BTreeMap::new(),
            free: BTreeMap::new(),
            by_size: BTreeSet::new(),
            held: BTreeMap::new(),
            window: None,
            next: 1,
            live: 0,
            free_bytes: 0,
        }
    }

    pub(super) fn mapped(&self) -> u64 {
        self.live + self.free_bytes + self.held.values().sum::<u64>()
    }

    pub(super) fn slot_at(&self, slot: usize) -> u64 {
        slot as u64 * self.unit
    }

    /// Enters bytes as free, after the streams that used them; joins them with their neighbours.
    pub(super) fn add_free(&mut self, mut offset: u64, mut len: u64, mut uses: Uses) {
        if len == 0 {
            return;
        }
        self.free_bytes += len;
        if let Some((&at, before)) = self.free.range(..offset).next_back()
            && at + before.len == offset
        {
            let before_len = before.len;
            uses.join(&before.uses);
            self.drop_run(at, before_len);
            (offset, len) = (at, len + before_len);
        }
        if let Some(after) = self.free.get(&(offset + len)) {
            let after_len = after.len;
            uses.join(&after.uses);
            self.drop_run(offset + len, after_len);
            len += after_len;
        }
        self.put_run(offset, len, uses);
    }

    /// A run whose neighbours are not free.
    fn put_run(&mut self, offset: u64, len: u64, uses: Uses) {
        self.by_size.insert((len, offset));
        self.free.insert(offset, Free { len, uses });
    }

    fn drop_run(&mut self, offset: u64, len: u64) -> Option<Free> {
        self.by_size.remove(&(len, offset));
        self.free.remove(&offset)
    }

    fn run_around(&self, offset: u64) -> Option<(u64, u64)> {
        let (&at, run) = self.free.range(..=offset).next_back()?;
        (offset < at + run.len).then_some((at, run.len))
    }

    pub(super) fn is_free(&self, offset: u64, len: u64) -> bool {
        self.run_around(offset)
            .is_some_and(|(at, run)| offset + len <= at + run)
    }

    /// Takes bytes out of a free run; who used them. `None` if they are not all free.
    pub(super) fn carve(&mut self, offset: u64, len: u64) -> Option<Uses> {
        let (at, run) = self.run_around(offset)?;
        let (end, run_end) = (offset + len, at + run);
        if end > run_end {
            return None;
        }
        let uses = self.drop_run(at, run)?.uses;
        self.free_bytes -= len;
        if at < offset {
            self.put_run(at, offset - at, uses.clone());
        }
        if end < run_end {
            self.put_run(end, run_end - end, uses.clone());
        }
        Some(uses)
    }

    /// Where the tightest free run for `len` bytes starts; young blocks from the high end.
    pub(super) fn fit(&self, len: u64, young: bool) -> Option<u64> {
        let clear = |(size, at): &&(u64, u64)| {
            self.window
                .is_none_or(|(from, n)| at + size <= from || from + n <= *at)
        };
        let mut runs = self.by_size.range((len, 0)..).filter(clear);
        match young {
            false => runs.next().map(|(_, at)| *at),
            true => runs
                .max_by_key(|(_, at)| *at)
                .map(|(size, at)| at + size - len),
        }
    }

    /// Enters a block at bytes that were carved.
    pub(super) fn add_block(&mut self, offset: u64, len: u64, age: Age, uses: Uses) -> u64 {
        let id = self.next;
        self.next += 1;
        let block = Block {
            offset,
            len,
            still: 0,
            moving: false,
            age,
            born: Instant::now(),
            uses,
            ready: None,
        };
        self.by_place.insert(offset, id);
        self.blocks.insert(id, block);
        self.live += len;
        id
    }

    /// A block at free bytes, for work on `stream`, and who used the bytes before.
    pub(super) fn take(
        &mut self,
        offset: u64,
        len: u64,
        age: Age,
        stream: &Stream,
    ) -> Option<(u64, Uses)> {
        let before = self.carve(offset, len)?;
        let id = self.add_block(offset, len, age, Uses::of(stream));
        Some((id, before))
    }

    pub(super) fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    pub(super) fn remove_block(&mut self, id: u64) {
        if let Some(block) = self.blocks.remove(&id) {
            self.by_place.remove(&block.offset);
            self.live -= block.len;
            self.add_free(block.offset, block.len, block.uses);
        }
    }

    /// Whether a block lies where a plan has it, and nobody holds it there.
    pub(super) fn may_move(&self, one: &Move) -> bool {
        self.blocks.get(&one.id).is_some_and(|block| {
            let is_there = (block.offset, block.len) == (one.from, one.len);
            is_there && block.still == 0 && !block.moving
        })
    }

    /// Marks blocks as on their way, or as arrived.
    pub(super) fn set_moving(&mut self, moves: &[Move], moving: bool) {
        for one in moves {
            if let Some(block) = self.blocks.get_mut(&one.id) {
                block.moving = moving;
            }
        }
    }

    /// Ascending places.
    pub(super) fn hold(&mut self, places: &[(u64, u64)]) {
        let places = places.iter().copied();
        match self.held.is_empty() {
            // Building is several times faster than inserting.
            true => self.held = places.collect(),
            false => self.held.extend(places),
        }
    }

    /// Gives back a place that was held.
    pub(super) fn unhold(&mut self, offset: u64, uses: Uses) {
        if let Some(len) = self.held.remove(&offset) {
            self.add_free(offset, len, uses);
        }
    }

    /// Puts a block at a place that was held, and its old place to `uses`, unless that is no longer
    /// mapped for it.
    pub(super) fn settle(&mut self, id: u64, to: u64, old: Option<Uses>) {
        let Some(block) = self.blocks.get_mut(&id) else {
            return;
        };
        let (from, len) = (block.offset, block.len);
        block.offset = to;
        self.held.remove(&to);
        self.by_place.remove(&from);
        self.by_place.insert(to, id);
        if let Some(uses) = old {
            self.add_free(from, len, uses);
        }
    }

    /// The planner's view. Young by age are blocks younger than `youth`.
    pub(super) fn state(&self, now: Instant, youth: Duration, since_last: Duration) -> State {
        let mut pieces = Vec::with_capacity(self.by_place.len() + self.held.len());
        for (&offset, id) in &self.by_place {
            let Some(block) = self.blocks.get(id) else {
                continue;
            };
            pieces.push(Piece {
                id: *id,
                offset,
                len: block.len,
                movable: block.still == 0 && !block.moving,
                young: match block.age {
                    Age::Young => true,
                    Age::Old => false,
                    Age::Unknown => now.saturating_duration_since(block.born) < youth,
                },
            });
        }
        if !self.held.is_empty() {
            pieces.extend(self.held.iter().map(|(&offset, &len)| Piece {
                id: HELD,
                offset,
                len,
                movable: false,
                young: false,
            }));
            pieces.sort_unstable_by_key(|piece| piece.offset);
        }
        State {
            granule: self.unit,
            slots: self.slots.clone(),
            pieces,
            align: self.align,
            idle: 0,
            creatable: 0,
            peers: 0,
            since_last,
        }
    }

    /// Mapped slots in which nothing is live or held.
    pub(super) fn empty_slots(&self) -> Vec<usize> {
        let runs = self.free.iter().flat_map(|(at, run)| {
            let first = at.div_ceil(self.unit);
            first..((at + run.len) / self.unit).max(first)
        });
        runs.filter_map(|slot| usize::try_from(slot).ok()).collect()
    }

    /// Every stream that may use anything here.
    pub(super) fn all_uses(&self, uses: &mut Uses) {
        self.free.values().for_each(|run| uses.join(&run.uses));
        self.blocks.values().for_each(|b| uses.join(&b.uses));
    }

    pub(super) fn fill_in(&self, stats: &mut MovableStats) {
        stats.mapped = self.mapped();
        stats.live = self.live;
        stats.free = self.free_bytes;
        stats.largest_free = self.by_size.last().map_or(0, |run| run.0);
        stats.blocks = self.blocks.len() as u64;
        stats.still = self.blocks.values().filter(|b| b.still > 0).count() as u64;
    }

    /// Recounts everything.
    ///
    /// # Errors
    ///
    /// [`Error::Inconsistent`] with both figures.
    pub(super) fn audit(&self) -> Result<()> {
        Error::recount(
            "live bytes",
            self.live,
            self.blocks.values().map(|b| b.len).sum(),
        )?;
        Error::recount(
            "free bytes",
            self.free_bytes,
            self.free.values().map(|r| r.len).sum(),
        )?;
        Error::recount(
            "free runs",
            self.free.len() as u64,
            self.by_size.len() as u64,
        )?;
        Error::recount(
            "blocks",
            self.blocks.len() as u64,
            self.by_place.len() as u64,
        )?;
        for (&offset, id) in &self.by_place {
            let at = self.blocks.get(id).map_or(u64::MAX, |b| b.offset);
            Error::recount("place of a block", offset, at)?;
        }
        self.audit_places()
    }

    /// Everything side by side, without overlaps, in mapped slots.
    fn audit_places(&self) -> Result<()> {
        let slots = self.slots.iter().filter(|s| **s == Slot::Mapped).count() as u64;
        Error::recount("mapped bytes", self.mapped(), slots * self.unit)?;
        let mut all: Vec<(u64, u64)> = self.free.iter().map(|(at, r)| (*at, r.len)).collect();
        all.extend(self.blocks.values().map(|b| (b.offset, b.len)));
        all.extend(self.held.iter().map(|(at, len)| (*at, *len)));
        all.sort_unstable();
        let mut end = 0;
        for (at, len) in all {
            Error::recount("overlaps", at.max(end), at)?;
            end = at + len;
            for slot in at / self.unit..end.div_ceil(self.unit) {
                let slot = usize::try_from(slot).ok().and_then(|i| self.slots.get(i));
                Error::recount(
                    "bytes in slots that are not mapped",
                    0,
                    u64::from(slot != Some(&Slot::Mapped)),
                )?;
            }
        }
        let mut last = None;
        for (&at, run) in &self.free {
            Error::recount(
                "neighbours that are not joined",
                0,
                u64::from(last == Some(at)),
            )?;
            last = Some(at + run.len);
        }
        Ok(())
    }

    pub(super) fn rounded(&self, len: u64) -> Option<u64> {
        round_up(len, self.align)
    }
}
