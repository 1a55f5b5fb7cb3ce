//! What a lane's lock guards.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};

use super::block::no_block;
use super::core::{self, Stale, UNIT};
use super::lane::Lane;
use super::magazine::{Magazine, Slot, class_of};
use super::name::Named;
use super::quick::{Kept, Quick};
use crate::Result;
use crate::driver::PhysId;
use crate::history::History;
use crate::pool::Granule;
use crate::space::Reservation;
use crate::stream::{Fence, Stream};
use crate::units::{Va, VaRange};

/// Mark of a block in the core that has been freed and waits for other streams.
pub(super) const FREED: u32 = 1;
/// Mark of a block without an owner: only such a block may be freed by its address.
pub(super) const RAW: u32 = 2;

/// Everything that changes. The lock is held for bookkeeping only, never across a driver call.
pub(super) struct State {
    pub(super) core: core::Lane,
    pub(super) granules: Granules,
    pub(super) quick: Quick,
    /// Freed blocks that the books show as live.
    pub(super) magazines: Vec<Arc<Magazine>>,
    /// The first address.
    pub(super) base: u64,
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
    /// Times that memory became free.
    pub(super) frees: u64,
    /// A fence behind all use of what was free after so many frees.
    pub(super) calm: Option<(Fence, u64)>,
    pub(super) counts: Counts,
    pub(super) reservation: Option<Reservation>,
    /// What is told of every block, if anything is: then none is kept outside of the lock.
    pub(super) history: Option<History>,
}

impl State {
    /// A block from mapped memory. More of its length that are kept go to `magazine`.
    #[inline]
    pub(super) fn hit(
        &mut self,
        size: u64,
        align: u64,
        magazine: &Magazine,
    ) -> Option<core::Block> {
        self.counts.allocs += 1;
        let (kept, out) = self.quick.take(size, align);
        if let Some(kept) = kept {
            if class_of(kept.len) != 0 {
                self.core.revive(kept.hint, kept.addr);
                self.refill(kept.len, magazine);
            }
            return Some(core::Block {
                addr: kept.addr,
                len: kept.len,
                uses: 0,
                hint: kept.hint,
            });
        }
        if let Some(out) = out {
            self.file(out);
        }
        let found = self.core.alloc(size, align)?;
        let placed = Kept {
            addr: found.addr,
            len: found.len,
            hint: found.hint,
        };
        if let Some(out) = self.quick.placed(placed) {
            self.file(out);
        }
        Some(found)
    }

    fn refill(&mut self, len: u64, magazine: &Magazine) {
        if self.history.is_some() {
            return;
        }
        magazine.refill(class_of(len), || {
            let kept = self.quick.take(len, UNIT).0?;
            self.core.revive(kept.hint, kept.addr);
            let unit = ((kept.addr - self.base) / UNIT) as u32;
            let hint = kept.hint;
            Some(Slot { unit, hint })
        });
    }

    /// Frees a kept block in the books.
    fn file(&mut self, kept: Kept) {
        self.tell_freed(kept.addr);
        self.frees += 1;
        self.quick.disturbed();
        self.core.revive(kept.hint, kept.addr);
        self.core.free_hinted(kept.addr, kept.hint, &mut ());
    }

    /// Frees the block at an address that has a mark; its bytes. `is_named` says that it may have a name.
    #[inline]
    pub(super) fn free(&mut self, addr: Va, hint: u32, mark: u32, is_named: bool) -> Result<u64> {
        // Marked as freed in the books, where a second free will see it.
        let Some(found) = self.core.retain(addr.get(), hint, mark, FREED) else {
            let inside = self.core.block(addr.get()).is_none();
            return Err(no_block(addr, inside && self.core.is_inside(addr.get())));
        };
        // Nearly always empty: only memory shared between streams has entries.
        let uses = match self.uses.is_empty() {
            true => None,
            false => self.uses.remove(&addr.get()),
        };
        match uses {
            None => {
                if is_named {
                    self.unname(addr.get());
                }
                self.frees += 1;
                self.tell_freed(found.addr);
                self.keep(Kept {
                    addr: found.addr,
                    len: found.len,
                    hint: found.hint,
                });
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
        for magazine in std::mem::take(&mut self.magazines) {
            magazine.drain(|_, slot| {
                if let Some(kept) = self.keep_in_books(slot) {
                    self.file(kept);
                }
            });
            self.magazines.push(magazine);
        }
        for kept in self.quick.drain() {
            self.file(kept);
        }
    }

    /// Marks a block from a magazine as freed.
    pub(super) fn keep_in_books(&mut self, slot: Slot) -> Option<Kept> {
        let addr = self.base + u64::from(slot.unit) * UNIT;
        let Some(found) = self.core.retain(addr, slot.hint, 0, FREED) else {
            tracing::error!(addr, "block lost");
            return None;
        };
        self.frees += 1;
        self.tell_freed(addr);
        Some(Kept {
            addr,
            len: found.len,
            hint: found.hint,
        })
    }

    /// Keeps a freed block of the books, or frees it.
    #[inline]
    pub(super) fn keep(&mut self, kept: Kept) {
        if class_of(kept.len) == 0 {
            // Whoever takes it does not look at the books.
            self.core.revive(kept.hint, kept.addr);
            if self.history.is_some() {
                return self.file(kept);
            }
        }
        if let Some(out) = self.quick.keep(kept) {
            self.file(out);
        }
    }

    /// Whether the block at an address is freed, though the books show it as live.
    fn is_in_magazine(&self, addr: u64) -> bool {
        let unit = u32::try_from((addr - self.base) / UNIT);
        unit.is_ok_and(|unit| self.magazines.iter().any(|m| m.has(unit)))
            || self.quick.pair().peek().is_some_and(|k| k.addr == addr)
    }

    /// The live block at an address.
    pub(super) fn live(&self, addr: u64) -> Option<core::Block> {
        let block = self.core.block(addr)?;
        (block.uses == RAW || block.uses == 0 && !self.is_in_magazine(addr)).then_some(block)
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
