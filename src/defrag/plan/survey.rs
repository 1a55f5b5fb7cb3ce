//! What all windows of one state have in common, counted once: sums of which two make up what stands
//! in any window.

use std::cell::OnceCell;
use std::ops::Range;

use super::cost::Load;
use super::{Slot, State};

/// Sums over the pieces before one.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct OfPieces {
    /// What copying those that are movable comes to.
    pub(super) load: Load,
    pub(super) movable: u64,
    /// Movable and not young.
    pub(super) old: u64,
    /// Movable and whole granules; and how many granules that are.
    pub(super) whole: u64,
    pub(super) granules: u64,
}

/// Sums over the slots before one.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct OfSlots {
    pub(super) holes: u64,
    pub(super) busy: u64,
    /// Mapped slots in which nothing is live.
    pub(super) empty: u64,
}

#[derive(Debug)]
pub(super) struct Survey {
    pieces: Vec<OfPieces>,
    slots: Vec<OfSlots>,
    /// Free runs by ascending place.
    pub(super) runs: Vec<(u64, u64)>,
    /// Few plans need it.
    clearable: OnceCell<Clearable>,
}

/// Slots that are empty once single pieces are copied away.
#[derive(Debug)]
pub(super) struct Clearable {
    /// Those with the fewest bytes in them first.
    pub(super) slots: Vec<usize>,
    /// Sums of these bytes: what emptying so many slots takes at least.
    pub(super) bytes: Vec<u64>,
}

impl Survey {
    pub(super) fn new(state: &State) -> Self {
        let mut sum = OfPieces::default();
        let mut pieces = Vec::with_capacity(state.pieces.len() + 1);
        pieces.push(sum);
        let unaligned = state.granule - 1;
        for piece in &state.pieces {
            if piece.movable {
                sum.load.add(piece.len);
                sum.movable += 1;
                sum.old += u64::from(!piece.young);
                if (piece.offset | piece.len) & unaligned == 0 {
                    sum.whole += 1;
                    sum.granules += state.touched(piece.offset, piece.len).len() as u64;
                }
            }
            pieces.push(sum);
        }
        Self {
            pieces,
            slots: of_slots(state),
            runs: state.free_runs(),
            clearable: OnceCell::new(),
        }
    }

    pub(super) fn of_pieces(&self, range: &Range<usize>) -> OfPieces {
        let (a, b) = (&self.pieces[range.start], &self.pieces[range.end]);
        OfPieces {
            load: b.load.since(&a.load),
            movable: b.movable - a.movable,
            old: b.old - a.old,
            whole: b.whole - a.whole,
            granules: b.granules - a.granules,
        }
    }

    /// Whether every piece of the range may be moved.
    pub(super) fn all_movable(&self, range: &Range<usize>) -> bool {
        let (a, b) = (&self.pieces[range.start], &self.pieces[range.end]);
        b.movable - a.movable == range.len() as u64
    }

    pub(super) fn of_slots(&self, range: &Range<usize>) -> OfSlots {
        let (a, b) = (&self.slots[range.start], &self.slots[range.end]);
        OfSlots {
            holes: b.holes - a.holes,
            busy: b.busy - a.busy,
            empty: b.empty - a.empty,
        }
    }

    pub(super) fn is_empty(&self, slot: usize) -> bool {
        self.slots[slot].empty < self.slots[slot + 1].empty
    }

    /// Empty slots outside of a window in which so many are.
    pub(super) fn donors(&self, inside: u64) -> u64 {
        self.slots.last().map_or(0, |all| all.empty) - inside
    }

    /// What all movable pieces come to.
    pub(super) fn all(&self) -> Load {
        self.pieces
            .last()
            .map_or_else(Load::default, |all| all.load)
    }

    pub(super) fn clearable(&self, state: &State) -> &Clearable {
        self.clearable.get_or_init(|| clearable(state))
    }
}

/// Stretch by stretch, since a heap has far fewer of them than slots.
fn of_slots(state: &State) -> Vec<OfSlots> {
    let mut all = Vec::with_capacity(state.slots.len() + 1);
    let mut sum = OfSlots::default();
    all.push(sum);
    let mut fill = |end: usize, each: OfSlots| {
        let (more, from) = ((end + 1).saturating_sub(all.len()), sum);
        let after = |n: u64| OfSlots {
            holes: from.holes + n * each.holes,
            busy: from.busy + n * each.busy,
            empty: from.empty + n * each.empty,
        };
        all.extend((0..more as u64).map(|i| after(i + 1)));
        sum = after(more as u64);
    };
    let [holes, busy, empty] = [(1, 0, 0), (0, 1, 0), (0, 0, 1)].map(|n| OfSlots {
        holes: n.0,
        busy: n.1,
        empty: n.2,
    });
    let mut pieces = state.pieces.iter().map(|p| state.touched(p.offset, p.len));
    let mut next = pieces.next();
    let mut end = 0;
    for stretch in state.slots.chunk_by(|a, b| a == b) {
        end += stretch.len();
        match stretch.first() {
            Some(Slot::Hole) => fill(end, holes),
            Some(Slot::Busy) => fill(end, busy),
            _ => {
                while let Some(touched) = next.take_if(|touched| touched.start < end) {
                    fill(touched.start, empty);
                    fill(touched.end, OfSlots::default());
                    next = pieces.next();
                }
                fill(end, empty);
            }
        }
    }
    all
}

fn clearable(state: &State) -> Clearable {
    const NEVER: u64 = u64::MAX;
    let mut live = vec![0u64; state.slots.len()];
    for piece in &state.pieces {
        let touched = state.touched(piece.offset, piece.len);
        match piece.movable && touched.len() == 1 {
            true => live[touched.start] = live[touched.start].saturating_add(piece.len),
            false => live[touched].fill(NEVER),
        }
    }
    // Those with nothing live are donors already.
    let is_clearable = |live: u64, slot: &Slot| live > 0 && live != NEVER && *slot == Slot::Mapped;
    let mut found: Vec<(u64, usize)> = (live.into_iter().zip(&state.slots).zip(0..))
        .filter(|((live, slot), _)| is_clearable(*live, slot))
        .map(|((live, _), i)| (live, i))
        .collect();
    found.sort_unstable();
    let mut bytes = 0;
    let sums = found.iter().map(|(live, _)| {
        bytes += live;
        bytes
    });
    Clearable {
        bytes: std::iter::once(0).chain(sums).collect(),
        slots: found.into_iter().map(|(_, slot)| slot).collect(),
    }
}
