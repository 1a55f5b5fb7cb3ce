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

/// Where slots of another kind start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// Its first byte and slot.
    pub(super) at: u64,
    slot: usize,
    kind: Slot,
    /// Holes and busy slots before it.
    holes: usize,
    busy: usize,
}

impl Cut {
    /// Holes and busy slots before a slot that is not before this cut, nor behind the next one.
    pub(super) fn before(&self, slot: usize) -> (usize, usize) {
        let more = slot - self.slot;
        match self.kind {
            Slot::Hole => (self.holes + more, self.busy),
            Slot::Busy => (self.holes, self.busy + more),
            Slot::Mapped => (self.holes, self.busy),
        }
    }
}

/// Mapped slots side by side in which nothing is live.
#[derive(Clone, Copy, Debug)]
pub(super) struct Empty {
    pub(super) slot: usize,
    pub(super) n: usize,
    /// Such slots before it.
    before: usize,
}

#[derive(Debug)]
pub(super) struct Survey {
    /// Ascending; the last one is the end of all slots.
    pub(super) cuts: Vec<Cut>,
    /// Free runs by ascending place.
    pub(super) runs: Vec<(u64, u64)>,
    /// Those that have whole slots, by ascending place.
    pub(super) empty: Vec<Empty>,
    /// Remapping looks at no piece, so needs none of these; and few plans need the other.
    pieces: OnceCell<Vec<OfPieces>>,
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
        let runs = state.free_runs();
        let mut empty = Vec::with_capacity(runs.len());
        let mut before = 0;
        for (at, len) in &runs {
            let slots = state.within(*at, *len);
            if !slots.is_empty() {
                let (slot, n) = (slots.start, slots.len());
                empty.push(Empty { slot, n, before });
                before += n;
            }
        }
        Self {
            cuts: cuts(state),
            runs,
            empty,
            pieces: OnceCell::new(),
            clearable: OnceCell::new(),
        }
    }

    fn pieces(&self, state: &State) -> &[OfPieces] {
        self.pieces.get_or_init(|| of_pieces(state))
    }

    /// The sums before the first of some pieces and behind the last.
    pub(super) fn around(&self, state: &State, range: &Range<usize>) -> (&OfPieces, &OfPieces) {
        let pieces = self.pieces(state);
        (&pieces[range.start], &pieces[range.end])
    }

    /// What all movable pieces come to.
    pub(super) fn all(&self, state: &State) -> Load {
        let all = self.pieces(state).last();
        all.map_or_else(Load::default, |all| all.load)
    }

    /// How many of `n` empty slots are not to be had outside of a window with so many holes.
    pub(super) fn lacking(&self, n: u64, window: &Range<usize>, holes: u64) -> u64 {
        let all = self.empty.last().map_or(0, |last| last.before + last.n) as u64;
        let most = window.len() as u64 - holes;
        // Mostly there are enough, whichever of those in the window are empty.
        if all >= n + most {
            return 0;
        }
        let inside = self.empty_before(window.end) - self.empty_before(window.start);
        n.saturating_sub(all - inside as u64)
    }

    fn empty_before(&self, slot: usize) -> usize {
        let before = self.empty.partition_point(|empty| empty.slot < slot);
        let last = self.empty[..before].last();
        last.map_or(0, |last| last.before + last.n.min(slot - last.slot))
    }

    pub(super) fn clearable(&self, state: &State) -> &Clearable {
        self.clearable.get_or_init(|| clearable(state))
    }
}

fn cuts(state: &State) -> Vec<Cut> {
    let mut cuts = Vec::with_capacity(8);
    let mut cut = Cut {
        at: 0,
        slot: 0,
        kind: Slot::Mapped,
        holes: 0,
        busy: 0,
    };
    for (kind, slots) in state.stretches() {
        cut.kind = kind;
        cuts.push(cut);
        (cut.holes, cut.busy) = cut.before(slots.end);
        (cut.slot, cut.at) = (slots.end, slots.end as u64 * state.granule);
    }
    cuts.push(cut);
    cuts
}

fn of_pieces(state: &State) -> Vec<OfPieces> {
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
    pieces
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
