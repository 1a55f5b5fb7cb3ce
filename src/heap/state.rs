//! What a lane's lock guards.

use std::collections::{HashMap, VecDeque};
use std::sync::Weak;

use super::block::no_block;
use super::core::{self, Stale, UNIT};
use super::gate::Stop;
use super::hint::LaneKey;
use super::lane::Lane;
use super::magazine::{Magazine, Slot, class_of};
use super::name::Named;
use super::quick::{Kept, Pair, Quick};
use super::seat::seat;
use crate::Result;
use crate::driver::PhysId;
use crate::history::History;
use crate::pool::Granule;
use crate::space::Reservation;
use crate::stream::{Fence, Stream};
use crate::units::{Va, VaRange};

/// Mark of a block in the core that has been freed and waits for other streams.
pub(super) const FREED: u32 = 1;
/// Mark of a block without an owner: only such a block may be freed by its address. One that is owned has no
/// mark, nor has one that is freed and kept for the next allocation of its size.
pub(super) const RAW: u32 = 2;

/// Everything that changes. The lock is held for bookkeeping only, never across a driver call.
pub(super) struct State {
    /// `None` for one that serves no stream by itself.
    pub(super) key: Option<LaneKey>,
    pub(super) core: core::Lane,
    pub(super) granules: Granules,
    pub(super) quick: Quick,
    /// Freed blocks that the books show as live.
    pub(super) magazines: Vec<&'static Magazine>,
    /// Uses of live blocks by other streams, by address.
    pub(super) uses: HashMap<u64, Vec<Use>>,
    /// Other streams that replay graphs over this memory.
    pub(super) replays: Vec<Stream>,
    /// Names of live blocks and of blocks in limbo, by address.
    pub(super) names: HashMap<u64, Named>,
    pub(super) limbo: Vec<Limbo>,
    pub(super) limbo_bytes: u64,
    /// Old addresses of moved granules, oldest first.
    pub(super) stale: VecDeque<Alias>,
    /// Lanes that may have old mappings of granules which are here now.
    pub(super) lenders: Vec<Weak<Lane>>,
    /// Places with mappings that could not be undone.
    pub(super) broken: Vec<Broken>,
    /// Times that some thread has something of this lane in hand which the lists above do not show:
    /// an order under way, or limbo being looked at.
    pub(super) in_hand: usize,
    /// Orders under way for small blocks.
    pub(super) small_orders: usize,
    /// Times that memory became free.
    pub(super) frees: u64,
    /// A fence behind all use of what was free after so many frees.
    pub(super) calm: Option<(Fence, u64)>,
    pub(super) counts: Counts,
    pub(super) reservation: Option<Reservation>,
    /// What is told of every block, if anything is: then none is kept outside of the lock.
    pub(super) history: Option<History>,
    /// Blocks of no bytes, which are not in the books.
    pub(super) empties: u64,
    /// Owned blocks that are still to be freed, once nobody allocates any more.
    pub(super) left: Option<u64>,
}

impl State {
    /// The state of a lane that holds nothing.
    pub(super) fn new(
        key: Option<LaneKey>,
        core: core::Lane,
        pair: &'static Pair,
        reservation: Option<Reservation>,
    ) -> Self {
        Self {
            key,
            core,
            granules: Granules::default(),
            quick: Quick::new(pair),
            magazines: Vec::new(),
            uses: HashMap::new(),
            replays: Vec::new(),
            names: HashMap::new(),
            limbo: Vec::new(),
            limbo_bytes: 0,
            stale: VecDeque::new(),
            lenders: Vec::new(),
            broken: Vec::new(),
            in_hand: 0,
            small_orders: 0,
            frees: 0,
            calm: None,
            counts: Counts::default(),
            reservation,
            history: None,
            empties: 0,
            left: None,
        }
    }

    /// Drops everything: nobody is left who could ask.
    pub(super) fn strip(&mut self) {
        let page = core::PAGE_BYTES;
        if let Some(core) = core::Lane::new(core::Policy::default(), 0, page, page) {
            *self = Self::new(None, core, self.quick.pair(), None);
        }
    }

    /// Blocks with an owner, if none is kept.
    pub(super) fn owned(&self) -> u64 {
        match self.core.stats().blocks {
            0 => 0,
            _ => {
                let is_owned = |piece: &core::Piece| piece.mark == Some(0);
                self.core.pieces().iter().filter(|p| is_owned(p)).count() as u64
            }
        }
    }

    /// A block from mapped memory. More of its length that are kept go to `magazine`.
    #[inline]
    pub(super) fn hit(
        &mut self,
        size: u64,
        align: u64,
        seat: u32,
        magazine: &Magazine,
    ) -> Option<core::Block> {
        self.counts.allocs += 1;
        if let Some(kept) = self.take_kept(size, align) {
            let class = class_of(size);
            if class != 0 && self.history.is_none() {
                magazine.refill(seat, class, self.kept_aside(), || {
                    self.quick.take(class, |_| true)
                });
            }
            return Some(core::Block {
                addr: kept.addr,
                len: kept.len,
                uses: 0,
                hint: kept.hint,
            });
        }
        self.place(size, align)
    }

    /// As [`hit`](Self::hit), without an owner, and not if the history has to hear of it.
    #[inline]
    pub(super) fn hit_raw(&mut self, size: u64, align: u64) -> Option<Va> {
        if self.history.is_some() {
            return None;
        }
        let (addr, hint) = match self.take_kept(size, align) {
            Some(kept) => (kept.addr, kept.hint),
            None => {
                let found = self.place(size, align)?;
                (found.addr, found.hint)
            }
        };
        self.counts.allocs += 1;
        let found = self.core.retain(addr, hint, 0, RAW);
        found.map(|block| Va::new(block.addr))
    }

    /// A block from the books.
    #[inline]
    fn place(&mut self, size: u64, align: u64) -> Option<core::Block> {
        let found = self.core.alloc(size, align)?;
        let placed = Kept {
            addr: found.addr,
            len: found.len,
            hint: found.hint,
        };
        if let Some(out) = self.quick.placed(placed) {
            self.file(out.addr, out.hint);
        }
        Some(found)
    }

    /// A block of this size that was kept.
    #[inline]
    fn take_kept(&mut self, size: u64, align: u64) -> Option<Kept> {
        let class = class_of(size);
        if class == 0 {
            let (kept, out) = self.quick.take_large(size, align);
            if let Some(out) = out {
                self.file(out.addr, out.hint);
            }
            return kept;
        }
        let fits = |slot: Slot| slot.addr & (align - 1) == 0;
        let slot = self.quick.take(class, fits)?;
        Some(Kept {
            addr: slot.addr,
            len: u64::from(class) * UNIT,
            hint: slot.hint,
        })
    }

    /// Nothing goes into a magazine or out of one while it lives.
    pub(super) fn stop_magazines(&self) -> Option<Stop<'_>> {
        Magazine::stop(self.magazines.iter().copied(), seat())
    }

    /// Bytes that each magazine may keep.
    fn kept_aside(&self) -> u64 {
        Quick::most(self.core.live()) / self.magazines.len().max(1) as u64
    }

    /// Frees a kept block in the books.
    fn file(&mut self, addr: u64, hint: u32) {
        self.tell_freed(addr);
        self.frees += 1;
        self.quick.disturbed();
        if self.core.free_hinted(addr, hint, &mut ()).is_none() {
            tracing::error!(addr, "block lost");
        }
    }

    /// Frees the block at an address that has a mark; its bytes. `is_named` says that it may have a name.
    #[inline]
    pub(super) fn free(&mut self, addr: Va, hint: u32, mark: u32, is_named: bool) -> Result<u64> {
        // Nearly always empty: only memory shared between streams has entries.
        let is_used = !self.uses.is_empty() && self.uses.contains_key(&addr.get());
        // Without the mark by which it could be freed a second time.
        let next = if is_used { FREED } else { 0 };
        let Some(found) = self.core.retain(addr.get(), hint, mark, next) else {
            let inside = self.core.block(addr.get()).is_none();
            return Err(no_block(addr, inside && self.core.is_inside(addr.get())));
        };
        if mark == 0 {
            self.one_less();
        }
        let uses = match is_used {
            true => self.uses.remove(&addr.get()),
            false => None,
        };
        match uses {
            None => {
                if is_named {
                    self.unname(addr.get());
                }
                self.frees += 1;
                self.tell_freed(found.addr);
                self.keep(found);
            }
            Some(uses) => {
                self.tell(found.addr, false);
                self.limbo_bytes += found.len;
                self.limbo.push(Limbo {
                    addr: addr.get(),
                    hint: found.hint,
                    len: found.len,
                    uses,
                });
            }
        }
        Ok(found.len)
    }

    /// Makes an owned block one that may be freed by its address.
    pub(super) fn expose(&mut self, addr: Va, hint: u32) -> Result<()> {
        let found = self.core.retain(addr.get(), hint, 0, RAW);
        found.ok_or_else(|| no_block(addr, false))?;
        self.one_less();
        Ok(())
    }

    /// An owned block is no more.
    #[inline]
    fn one_less(&mut self) {
        if let Some(left) = &mut self.left {
            *left = left.saturating_sub(1);
        }
    }

    /// Tells the history that a block may be used again.
    #[inline]
    fn tell_freed(&self, addr: u64) {
        if self.history.is_some() {
            self.tell(addr, true);
        }
    }

    #[cold]
    #[inline(never)]
    fn tell(&self, addr: u64, is_complete: bool) {
        if let Some(history) = &self.history {
            history.free(addr, is_complete);
        }
    }

    /// Frees every kept block in the books.
    pub(super) fn flush(&mut self) {
        // What is put into the others from now on was not free when this was called.
        self.flush_from(|magazine| !magazine.is_empty(), false);
    }

    /// As [`flush`](Self::flush). What makes owners keep nothing, said before this, holds after it.
    pub(super) fn flush_and_settle(&mut self) {
        self.flush_from(|_| true, true);
    }

    fn flush_from(&mut self, of: impl Fn(&Magazine) -> bool, settles: bool) {
        let magazines = std::mem::take(&mut self.magazines);
        let filled: Vec<_> = magazines.iter().copied().filter(|one| of(one)).collect();
        if let Some(_stop) = Magazine::stop(filled.iter().copied(), seat()) {
            for magazine in filled {
                magazine.drain(|_, slot| self.file(slot.addr, slot.hint));
            }
        }
        self.magazines = magazines;
        let (lists, large) = self.quick.drain(settles);
        for slot in lists {
            self.file(slot.addr, slot.hint);
        }
        if let Some(kept) = large {
            self.file(kept.addr, kept.hint);
        }
    }

    /// Frees the block of a class at a place, whose owner gave it up and recorded no use of it, and half of
    /// the blocks of its length in `magazine`, which is full. The books are not looked at.
    #[inline]
    pub(super) fn put(&mut self, class: u16, slot: Slot, seat: u32, magazine: &Magazine) {
        self.put_one(class, slot);
        let most = self.kept_aside();
        magazine.spill(seat, class, most, |slot| self.put_one(class, slot));
    }

    #[inline]
    fn put_one(&mut self, class: u16, slot: Slot) {
        self.frees += 1;
        if !self.quick.keep(class, slot, self.core.live()) {
            self.file(slot.addr, slot.hint);
        }
    }

    /// Keeps a freed block of the books, or frees it.
    #[inline]
    fn keep(&mut self, freed: core::Block) {
        let class = class_of(freed.len);
        let is_kept = match class {
            0 => self.history.is_none() && self.quick.keep_large(freed.addr),
            _ => {
                let (addr, hint) = (freed.addr, freed.hint);
                self.quick
                    .keep(class, Slot { addr, hint }, self.core.live())
            }
        };
        if !is_kept {
            self.file(freed.addr, freed.hint);
        }
    }

    /// Whether a block is freed, though the books show it as live.
    fn is_kept(&self, block: &core::Block) -> bool {
        let class = class_of(block.len);
        if class == 0 {
            let kept = self.quick.pair().peek();
            return kept.is_some_and(|k| k.addr == block.addr);
        }
        self.quick.has(class, block.addr) || {
            let _stop = self.stop_magazines();
            self.magazines.iter().any(|m| m.has(class, block.addr))
        }
    }

    /// Whether the books show a kept block as one that is live and owned.
    pub(super) fn is_known(&self, class: u16, slot: Slot) -> bool {
        let block = self.core.block(slot.addr);
        block.is_some_and(|b| b.uses == 0 && b.len == u64::from(class) * UNIT)
    }

    /// The live block at an address.
    pub(super) fn live(&self, addr: u64) -> Option<core::Block> {
        let block = self.core.block(addr)?;
        (block.uses == RAW || block.uses == 0 && !self.is_kept(&block)).then_some(block)
    }

    /// Files a freed block that no other stream uses any more.
    pub(super) fn unlimbo(&mut self, one: &Limbo) {
        self.limbo_bytes -= one.len;
        self.quick.disturbed();
        self.tell_freed(one.addr);
        self.frees += 1;
        self.core.mark(one.addr, 0);
        self.unname(one.addr);
        self.core.free_hinted(one.addr, one.hint, &mut ());
    }
}

/// What happened so far.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Counts {
    pub(super) allocs: u64,
    pub(super) misses: u64,
    pub(super) remaps: u64,
    pub(super) creates: u64,
    pub(super) host_waits: u64,
    pub(super) device_waits: u64,
    pub(super) failures: u64,
    pub(super) held_peak: u64,
}

/// Granules by the name that the core knows them by.
#[derive(Default)]
pub(super) struct Granules {
    pub(super) slots: Vec<Option<Granule>>,
    vacant: Vec<usize>,
}

impl Granules {
    pub(super) fn insert(&mut self, granule: Granule) -> u64 {
        match self.vacant.pop() {
            Some(slot) => {
                self.slots[slot] = Some(granule);
                slot as u64
            }
            None => {
                self.slots.push(Some(granule));
                self.slots.len() as u64 - 1
            }
        }
    }

    pub(super) fn phys(&self, name: u64) -> Option<PhysId> {
        let slot = self.slots.get(usize::try_from(name).ok()?)?;
        slot.as_ref().map(Granule::phys)
    }

    pub(super) fn remove(&mut self, name: u64) -> Option<Granule> {
        let slot = usize::try_from(name).ok()?;
        let granule = self.slots.get_mut(slot)?.take()?;
        self.vacant.push(slot);
        Some(granule)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.slots.iter().flatten().map(Granule::len).sum()
    }
}

/// Use of a block by another stream: up to the fence, or up to wherever the stream is when that is
/// asked first.
#[derive(Clone, Debug)]
pub(super) enum Use {
    Stream(Stream),
    Fence(Fence),
}

/// A freed block that other streams may still use.
pub(super) struct Limbo {
    pub(super) addr: u64,
    pub(super) hint: u32,
    pub(super) len: u64,
    pub(super) uses: Vec<Use>,
}

/// An old mapping of a moved granule.
pub(super) struct Alias {
    pub(super) stale: Stale,
    /// Behind the last use of the old address; `None` until it could be recorded.
    pub(super) fence: Option<Fence>,
}

/// A held place with mappings that could not be undone yet.
pub(super) struct Broken {
    pub(super) place: Stale,
    pub(super) stuck: Vec<Stuck>,
    pub(super) after: After,
}

/// A mapping that could not be undone, and the granule behind it if nobody else has that.
pub(super) struct Stuck {
    pub(super) range: VaRange,
    pub(super) granule: Option<Granule>,
}

/// When something may be unmapped.
#[derive(Clone)]
pub(super) enum After {
    /// Nothing uses it.
    Now,
    /// When work queued on the stream so far is done; the fence could not be recorded yet.
    Unrecorded(Stream),
    /// When the fence has passed.
    Fence(Fence),
}
