//! What the planner looks at.

use std::time::Duration;

use crate::units::round_up;

/// What stands at one granule's worth of addresses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Slot {
    /// Nothing: a granule may be mapped here.
    Hole,
    /// A granule.
    Mapped,
    /// Something that waits for a fence or for the driver: nothing may be mapped here, and what is
    /// here belongs to nobody.
    Busy,
}

/// One live block, or anything else that occupies bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Piece {
    /// What it is called in [`Move`](super::Move).
    pub id: u64,
    /// First byte, counted from the start of the addresses.
    pub offset: u64,
    /// Bytes; not zero.
    pub len: u64,
    /// Whether it may be moved in this pass. Pinned blocks are barriers.
    pub movable: bool,
    /// Likely to be freed soon, by hint or by age.
    pub young: bool,
}

impl Piece {
    /// One past the last byte.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.offset + self.len
    }
}

/// The state of a region of movable blocks: all that a plan depends on, besides the cost table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct State {
    /// Bytes of a granule, a power of two. All granules of a region are of one size.
    pub granule: u64,
    /// What stands where; the i-th entry is about the addresses from `i * granule` on.
    pub slots: Vec<Slot>,
    /// What is live, by ascending offset, without overlaps, in mapped slots only.
    pub pieces: Vec<Piece>,
    /// What sizes and places are multiples of; a power of two, at most the granule.
    pub align: u64,
    /// Granules that the pool has idle.
    pub idle: u64,
    /// Granules that the pool may create besides.
    pub creatable: u64,
    /// Other devices that have access to the region.
    pub peers: u32,
    /// Time since the last pass that ran because of the waste.
    pub since_last: Duration,
}

impl State {
    /// Bytes of addresses.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.granule.saturating_mul(self.slots.len() as u64)
    }

    /// Whether there are no addresses at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Bytes mapped.
    #[must_use]
    pub fn mapped(&self) -> u64 {
        let mapped = self.slots.iter().filter(|s| **s == Slot::Mapped);
        self.granule.saturating_mul(mapped.count() as u64)
    }

    /// Bytes live.
    #[must_use]
    pub fn live(&self) -> u64 {
        self.pieces.iter().map(|p| p.len).sum()
    }

    /// Bytes mapped and not live.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.mapped().saturating_sub(self.live())
    }

    /// `1 - live / mapped`, in thousandths.
    #[must_use]
    pub fn waste_permille(&self) -> u64 {
        match self.mapped() {
            0 => 0,
            mapped => {
                u64::try_from(u128::from(self.free()) * 1000 / u128::from(mapped)).unwrap_or(1000)
            }
        }
    }

    /// Free runs: mapped, not live, as long as can be; offset and length, ascending.
    #[must_use]
    pub fn free_runs(&self) -> Vec<(u64, u64)> {
        let mut runs = Vec::with_capacity(self.pieces.len() + 1);
        let mut pieces = self.pieces.iter().peekable();
        for (slot, slots) in self.stretches() {
            let mut free = slots.start as u64 * self.granule;
            let end = slots.end as u64 * self.granule;
            if slot != Slot::Mapped {
                continue;
            }
            while let Some(piece) = pieces.next_if(|p| p.offset < end) {
                if free < piece.offset {
                    runs.push((free, piece.offset - free));
                }
                free = free.max(piece.end());
            }
            if free < end {
                runs.push((free, end - free));
            }
        }
        runs
    }

    /// The longest free run in bytes.
    #[must_use]
    pub fn largest_run(&self) -> u64 {
        self.free_runs().iter().map(|r| r.1).max().unwrap_or(0)
    }

    /// Whether the state is one that a plan can be made for: sizes and places are multiples of
    /// `align`, pieces ascend without overlaps and lie in mapped slots.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let sound = self.granule.is_power_of_two()
            && self.align.is_power_of_two()
            && self.align <= self.granule
            && self.granule.checked_mul(self.slots.len() as u64).is_some();
        if !sound {
            return false;
        }
        let mut last = 0;
        self.pieces.iter().all(|piece| {
            let fits = piece.len > 0
                && piece.offset >= last
                && piece.offset % self.align == 0
                && round_up(piece.len, self.align) == Some(piece.len)
                && piece
                    .offset
                    .checked_add(piece.len)
                    .is_some_and(|e| e <= self.len());
            if !fits {
                return false;
            }
            last = piece.end();
            self.touched(piece.offset, piece.len)
                .all(|slot| self.slots[slot] == Slot::Mapped)
        })
    }

    /// Slots of one kind side by side, as many as can be.
    pub(super) fn stretches(&self) -> impl Iterator<Item = (Slot, std::ops::Range<usize>)> {
        let mut start = 0;
        std::iter::from_fn(move || {
            let rest = &self.slots[start..];
            let kind = *rest.first()?;
            let slots = start..start + same(rest, kind);
            start = slots.end;
            Some((kind, slots))
        })
    }

    /// The slots that lie in some bytes.
    pub(super) fn within(&self, offset: u64, len: u64) -> std::ops::Range<usize> {
        let first = self.slot(offset + (self.granule - 1));
        first..self.slot(offset + len).max(first)
    }

    fn slot(&self, at: u64) -> usize {
        // A power of two; a division for each piece would be most of the planner's time.
        let shift = self.granule.trailing_zeros() & 63;
        usize::try_from(at >> shift).unwrap_or(usize::MAX)
    }

    /// The slots that some bytes lie in.
    pub(super) fn touched(&self, offset: u64, len: u64) -> std::ops::Range<usize> {
        match len {
            0 => 0..0,
            _ => self.slot(offset)..self.slot(offset + (len - 1)).saturating_add(1),
        }
    }
}

/// How many slots at the front are of that kind.
fn same(slots: &[Slot], kind: Slot) -> usize {
    // A heap has far fewer stretches than slots: without a way out of a row, rows are compared at once.
    let is_same = |row: &&[Slot]| row.iter().fold(true, |all, slot| all & (*slot == kind));
    let rows = slots.chunks_exact(ROW).take_while(is_same).count() * ROW;
    let more = slots[rows..].iter().take_while(|slot| **slot == kind);
    rows + more.count()
}

/// Slots compared at once.
const ROW: usize = 32;
