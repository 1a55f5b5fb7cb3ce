//! Windows: stretches of addresses that are to become free and mapped. What each would cost is known
//! from prefix sums before any of them is planned, so that mostly only the cheapest one is.

use std::ops::Range;

use super::cost::Load;
use super::survey::{OfPieces, OfSlots};
use super::{Found, Planner, Remapping, Slot, Source, Step, keep};
use crate::driver::cost::Nanos;

/// Windows of a mode that are planned before giving up.
const TRIES: usize = 16;

/// What may be done to a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Mode {
    /// Granules of other slots may be mapped into holes.
    remap: bool,
    /// Granules of the pool may be.
    grow: bool,
    /// Movable pieces may be copied elsewhere.
    copy: bool,
    /// Only young ones of them.
    pub(super) young: bool,
    /// Movable pieces that are whole granules may be remapped elsewhere.
    shift: bool,
    /// Only windows with holes: others are evacuated just the same without remapping.
    holed: bool,
    /// The window has this length and stands at a multiple of it, and so does each piece that is
    /// copied at a multiple of its size class.
    pub(super) class: Option<u64>,
}

const NOTHING: Mode = Mode {
    remap: false,
    grow: false,
    copy: false,
    young: false,
    shift: false,
    holed: false,
    class: None,
};

impl Mode {
    pub(super) const REMAP: Self = Self {
        remap: true,
        ..NOTHING
    };
    pub(super) const SHIFT: Self = Self {
        remap: true,
        shift: true,
        ..NOTHING
    };
    pub(super) const EVACUATE: Self = Self {
        copy: true,
        ..NOTHING
    };
    pub(super) const MINOR: Self = Self {
        copy: true,
        young: true,
        ..NOTHING
    };
    pub(super) const MIXED: Self = Self {
        remap: true,
        copy: true,
        holed: true,
        ..NOTHING
    };
    pub(super) const GROW: Self = Self {
        remap: true,
        grow: true,
        ..NOTHING
    };
    pub(super) const FRESH: Self = Self {
        grow: true,
        ..NOTHING
    };
    pub(super) const ALL: Self = Self {
        remap: true,
        grow: true,
        copy: true,
        ..NOTHING
    };

    pub(super) fn buddy(class: u64, copy: bool) -> Self {
        Self {
            copy,
            class: Some(class),
            ..NOTHING
        }
    }

    pub(super) fn buddy_growth(class: u64) -> Self {
        Self {
            grow: true,
            class: Some(class),
            ..NOTHING
        }
    }
}

/// A stretch of addresses that may become the run: nothing in it is busy or may not move.
#[derive(Debug)]
pub(super) struct Span {
    at: u64,
    /// The pieces that have a byte in it: from this one, to before that one.
    first: usize,
    last: usize,
    slots: OfSlots,
}

impl Span {
    pub(super) const fn pieces(&self) -> Range<usize> {
        self.first..self.last
    }
}

/// A span that a mode allows, and the least that it can cost: in most cases exactly what it will.
pub(super) struct Candidate {
    at: u64,
    pieces: Range<usize>,
    pub(super) least: Nanos,
    holes: u64,
}

impl Candidate {
    fn key(&self) -> (Nanos, u64, u64) {
        (self.least, self.holes, self.at)
    }
}

/// What a candidate may cost at most, and what that says of it before it is priced.
pub(super) struct Limit {
    time: Nanos,
    /// Granules mapped: that many take so long by themselves.
    maps: u64,
}

/// What copying the load of the window before came to: neighbours mostly have the same.
#[derive(Default)]
pub(super) struct Known {
    load: Load,
    work: Nanos,
    /// If nothing else is to be done.
    least: Nanos,
}

impl Planner<'_> {
    /// Plans the cheapest windows of a mode until no other can be cheaper than the best so far; only
    /// such as take no longer than `most`.
    pub(super) fn windows(
        &self,
        want: u64,
        mode: Mode,
        best: &mut Option<Found>,
        most: Option<Nanos>,
    ) {
        // What the best one takes is too much.
        let below = match best.as_ref().map(|best| best.time().0.checked_sub(1)) {
            Some(None) => return,
            Some(Some(below)) => below,
            None => u64::MAX,
        };
        let limit = self.limit(most.unwrap_or(Nanos(u64::MAX)).min(Nanos(below)));
        let placed;
        let (len, spans) = match mode.class {
            None => (want, self.spans(want)),
            Some(class) => {
                let places = (0..self.state.len() / class.max(1)).map(|i| i * class);
                placed = self.spans_at(places, class);
                (class, &placed[..])
            }
        };
        self.work(spans.len());
        let mut known = Known::default();
        let mut few: Vec<Candidate> = Vec::with_capacity(TRIES);
        for span in spans {
            let Some(one) = self.candidate(span, len, mode, &limit, &mut known) else {
                continue;
            };
            if few.len() == TRIES {
                if few.last().is_some_and(|last| last.key() <= one.key()) {
                    continue;
                }
                few.pop();
            }
            let place = few.partition_point(|other| other.key() <= one.key());
            few.insert(place, one);
        }
        for candidate in &few {
            if best.as_ref().is_some_and(|b| b.time() <= candidate.least) {
                return;
            }
            let found = self.window(candidate, len, mode);
            keep(best, found.filter(|f| most.is_none_or(|m| f.time() <= m)));
        }
    }

    pub(super) fn limit(&self, time: Nanos) -> Limit {
        let maps = match time.0 {
            u64::MAX => u64::MAX,
            time => time / self.least_map().0.max(1),
        };
        Limit { time, maps }
    }

    /// Where a window can start so that none in between is better: behind or before a piece or hole.
    pub(super) fn spans(&self, len: u64) -> &[Span] {
        self.spans.get_or_init(|| {
            let state = self.state;
            let total = state.len();
            let before = |at: u64| at.checked_sub(len);
            let mut slots = Vec::new();
            let mut at = 0;
            for stretch in state.slots.chunk_by(|a, b| a == b) {
                slots.push(at);
                at += stretch.len() as u64 * state.granule;
            }
            // Each of these ascends, which the sort makes use of.
            let mut edges = Vec::with_capacity(2 * (state.pieces.len() + slots.len()) + 2);
            edges.push(0);
            edges.extend(state.pieces.iter().map(super::Piece::end));
            edges.extend(state.pieces.iter().filter_map(|p| before(p.offset)));
            edges.extend(slots.iter().copied());
            edges.extend(slots.iter().copied().filter_map(before));
            edges.extend(before(total));
            edges.sort();
            edges.dedup();
            self.work(edges.len());
            self.spans_at(edges.into_iter(), len)
        })
    }

    /// Windows at ascending places, without those that end behind the end or never can be free.
    fn spans_at(&self, places: impl Iterator<Item = u64>, len: u64) -> Vec<Span> {
        let survey = self.survey();
        let pieces = &self.state.pieces;
        let total = self.state.len();
        let (mut first, mut last) = (0, 0);
        let mut spans = Vec::with_capacity(places.size_hint().0);
        for at in places {
            let Some(end) = at.checked_add(len).filter(|end| *end <= total) else {
                break;
            };
            while pieces.get(first).is_some_and(|p| p.end() <= at) {
                first += 1;
            }
            last = last.max(first);
            while pieces.get(last).is_some_and(|p| p.offset < end) {
                last += 1;
            }
            let slots = survey.of_slots(&self.state.touched(at, len));
            if slots.busy == 0 && survey.all_movable(&(first..last)) {
                spans.push(Span {
                    at,
                    first,
                    last,
                    slots,
                });
            }
        }
        spans
    }

    /// The sums of the pieces that leave a window and how many granules of them are shifted; `None` if the mode
    /// cannot empty it, or only with more mappings than the limit allows.
    fn leaving(&self, span: &Span, len: u64, mode: Mode, limit: &Limit) -> Option<(OfPieces, u64)> {
        let (state, at, pieces) = (self.state, span.at, span.pieces());
        let holes = span.slots.holes;
        let n = pieces.len() as u64;
        match holes {
            0 if mode.holed => return None,
            1.. if !mode.remap && !mode.grow => return None,
            _ => {}
        }
        // Each piece that is shifted is a granule at least.
        let maps = match mode {
            Mode { copy: true, .. } => holes,
            Mode { shift: true, .. } => holes + n,
            _ if n > 0 => return None,
            _ => holes,
        };
        if maps > limit.maps {
            return None;
        }
        let live = self.survey().of_pieces(&pieces);
        let may_leave = match mode {
            Mode {
                copy: true,
                young: true,
                ..
            } => live.movable - live.old,
            Mode { copy: true, .. } => live.movable,
            _ => live.whole,
        };
        if may_leave < n {
            return None;
        }
        let shifts = if mode.copy { 0 } else { live.granules };
        if holes + shifts > limit.maps {
            return None;
        }
        // A piece that is shifted must leave its slots whole, which those at the edges may not.
        if shifts > 0 {
            let edges = [pieces.start, pieces.end - 1].map(|i| state.pieces[i]);
            if edges.iter().any(|p| p.offset < at || p.end() > at + len) {
                return None;
            }
        }
        Some((live, shifts))
    }

    pub(super) fn candidate(
        &self,
        span: &Span,
        len: u64,
        mode: Mode,
        limit: &Limit,
        known: &mut Known,
    ) -> Option<Candidate> {
        let (at, pieces, holes) = (span.at, span.pieces(), span.slots.holes);
        let (live, shifts) = self.leaving(span, len, mode, limit)?;
        let maps = holes + shifts;
        let load = if mode.copy {
            live.load
        } else {
            Load::default()
        };
        if known.load != load {
            let work = self.copying(&load);
            let least = self.outline(&load, work, 0, 0, 0);
            *known = Known { load, work, least };
        }
        if maps == 0 {
            return (known.least <= limit.time).then_some(Candidate {
                at,
                pieces,
                least: known.least,
                holes,
            });
        }
        let (pool, lacking) = self.supply(mode, maps, span.slots.empty);
        let mut work = known.work;
        if lacking > 0 {
            let slots = usize::try_from(lacking).ok();
            let slots = slots.filter(|_| mode.copy && mode.remap)?;
            let more = self.survey().clearable(self.state).bytes.get(slots)?;
            let closer = work.max(self.least_of_kind(load.bytes() + more));
            if self.outline(&load, closer, shifts, maps, pool) > limit.time {
                return None;
            }
            work = work.max(self.least_copy(load.bytes() + more));
        }
        let least = self.outline(&load, work, shifts, maps, pool);
        (least <= limit.time).then_some(Candidate {
            at,
            pieces,
            least,
            holes,
        })
    }

    /// How many of the granules that a window misses come from the pool, and how many from nowhere yet,
    /// if so many empty slots lie inside of it.
    fn supply(&self, mode: Mode, missing: u64, inside: u64) -> (u64, u64) {
        let donors = if mode.remap {
            self.survey().donors(inside)
        } else {
            0
        };
        let lacking = missing.saturating_sub(donors);
        let pool = match mode.grow {
            true => lacking.min(self.state.idle.saturating_add(self.state.creatable)),
            false => 0,
        };
        (pool, lacking - pool)
    }

    pub(super) fn window(&self, candidate: &Candidate, len: u64, mode: Mode) -> Option<Found> {
        let (state, at) = (self.state, candidate.at);
        let slots = state.touched(at, len);
        self.work(slots.len() + candidate.pieces.len());
        let mut evacuees: Vec<usize> = Vec::new();
        let mut shifted: Vec<usize> = Vec::new();
        match mode.copy {
            true => evacuees.extend(candidate.pieces.clone()),
            false => shifted.extend(candidate.pieces.clone()),
        }
        let leaving: u64 = shifted.iter().map(|i| state.pieces[*i].len).sum();
        let missing = candidate.holes + leaving / state.granule;
        let empty = self.survey().of_slots(&slots).empty;
        let (pool, lacking) = self.supply(mode, missing, empty);
        let mut donors = match mode.remap {
            true => self.empty_slots(&slots, missing),
            false => Vec::new(),
        };
        if lacking > 0 {
            for slot in self.clear(&slots, lacking)? {
                donors.push(slot);
                let start = slot as u64 * state.granule;
                evacuees.extend(self.pieces_in(start, state.granule));
            }
        }
        let mut steps = Vec::new();
        if !evacuees.is_empty() {
            steps.push(Step::Copy(self.evacuate(
                (at, len),
                &donors,
                &evacuees,
                mode,
            )?));
        }
        let mut vacated: Vec<usize> = Vec::new();
        if !shifted.is_empty() {
            let moves = self.places_for(&shifted, &slots)?;
            let old = shifted.iter().map(|i| state.pieces[*i]);
            vacated.extend(old.flat_map(|p| state.touched(p.offset, p.len)));
            steps.push(Step::Shift(moves));
            steps.push(Step::Vacate(vacated.clone()));
        }
        if missing > 0 {
            // Pieces ascend, and so do the slots that they leave.
            let is_target =
                |s: &usize| state.slots[*s] == Slot::Hole || vacated.binary_search(s).is_ok();
            let from_pool = usize::try_from(pool).unwrap_or(usize::MAX);
            let sources = donors
                .into_iter()
                .map(Source::Slot)
                .chain(std::iter::repeat_n(Source::Pool, from_pool));
            let targets = slots.filter(is_target);
            let maps = targets.zip(sources);
            steps.push(Step::Map(
                maps.map(|(to, from)| Remapping { to, from }).collect(),
            ));
        }
        let predicted = self.predict(&steps);
        Some(Found {
            at,
            steps,
            predicted,
        })
    }
}
