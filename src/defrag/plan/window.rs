//! Windows: stretches of addresses that are to become free and mapped. What each would cost is known
//! from prefix sums before any of them is planned, so that mostly only the cheapest one is.

use std::ops::Range;

use super::cost::Load;
use super::sweep::Span;
use super::{Found, Piece, Planner, Remapping, Slot, Source, Step, keep};
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
        let few = self.cheapest(want, mode, &limit);
        self.attempt(&few, want, mode, best, most);
    }

    /// The windows of a mode that are to be planned, the cheapest first.
    pub(super) fn cheapest(&self, want: u64, mode: Mode, limit: &Limit) -> Vec<Candidate> {
        let len = mode.class.unwrap_or(want);
        let some;
        let spans = match mode {
            Mode { class: Some(_), .. } => {
                some = self.spans_at_multiples(len);
                &some[..]
            }
            // Most windows have pieces.
            Mode {
                copy: false,
                shift: false,
                ..
            } => {
                some = self.spans_between_pieces(len);
                &some[..]
            }
            _ => self.spans(len),
        };
        self.work(spans.len());
        let mut known = Known::default();
        let mut few: Vec<Candidate> = Vec::with_capacity(TRIES);
        for span in spans {
            let Some(one) = self.candidate(span, len, mode, limit, &mut known) else {
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
        few
    }

    /// Plans them in this order, until no other can be cheaper than the best so far.
    pub(super) fn attempt(
        &self,
        few: &[Candidate],
        want: u64,
        mode: Mode,
        best: &mut Option<Found>,
        most: Option<Nanos>,
    ) {
        for candidate in few {
            if best.as_ref().is_some_and(|b| b.time() <= candidate.least) {
                return;
            }
            let found = self.window(candidate, mode.class.unwrap_or(want), mode);
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

    /// What is copied out of a window, and how many granules are shifted out of it; `None` if the mode cannot
    /// empty it, or only with more mappings than the limit allows.
    fn leaving(&self, span: &Span, len: u64, mode: Mode, limit: &Limit) -> Option<(Load, u64)> {
        let (state, at, pieces) = (self.state, span.at, span.pieces());
        let holes = span.holes;
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
        if n == 0 {
            return Some((Load::default(), 0));
        }
        let (before, behind) = self.survey().around(state, &pieces);
        if mode.copy {
            let may_leave = match mode.young {
                true => (behind.movable - before.movable) - (behind.old - before.old),
                false => behind.movable - before.movable,
            };
            return (may_leave == n).then(|| (behind.load.since(&before.load), 0));
        }
        let shifts = behind.granules - before.granules;
        if behind.whole - before.whole < n || holes + shifts > limit.maps {
            return None;
        }
        // A piece that is shifted must leave its slots whole, which those at the edges may not.
        let edges = [pieces.start, pieces.end - 1].map(|i| state.pieces[i]);
        let inside = |p: &Piece| p.offset >= at && p.end() <= at + len;
        edges
            .iter()
            .all(inside)
            .then_some((Load::default(), shifts))
    }

    pub(super) fn candidate(
        &self,
        span: &Span,
        len: u64,
        mode: Mode,
        limit: &Limit,
        known: &mut Known,
    ) -> Option<Candidate> {
        let (at, pieces, holes) = (span.at, span.pieces(), span.holes);
        let (load, shifts) = self.leaving(span, len, mode, limit)?;
        let maps = holes + shifts;
        if known.load != load {
            let work = self.copying(&load);
            let least = self.outline(&load, work, 0, 0, 0);
            *known = Known { load, work, least };
        }
        let priced = |least: Nanos| {
            (least <= limit.time).then_some(Candidate {
                at,
                pieces,
                least,
                holes,
            })
        };
        if maps == 0 || known.least > limit.time {
            return priced(known.least);
        }
        let enough = self.outline(&load, known.work, shifts, maps, 0);
        if enough > limit.time {
            return None;
        }
        let mut lacking = maps;
        if mode.remap {
            let slots = self.state.touched(at, len);
            lacking = self.survey().lacking(maps, &slots, holes);
        }
        if lacking == 0 {
            return priced(enough);
        }
        let pool = self.supply(mode, lacking);
        let mut work = known.work;
        if lacking > pool {
            let slots = usize::try_from(lacking - pool).ok();
            let slots = slots.filter(|_| mode.copy && mode.remap)?;
            let more = self.survey().clearable(self.state).bytes.get(slots)?;
            let closer = work.max(self.least_of_kind(load.bytes() + more));
            if self.outline(&load, closer, shifts, maps, pool) > limit.time {
                return None;
            }
            work = work.max(self.least_copy(load.bytes() + more));
        }
        priced(self.outline(&load, work, shifts, maps, pool))
    }

    /// How many of the granules that a window lacks come from the pool.
    fn supply(&self, mode: Mode, lacking: u64) -> u64 {
        match mode.grow {
            true => lacking.min(self.state.idle.saturating_add(self.state.creatable)),
            false => 0,
        }
    }

    pub(super) fn window(&self, candidate: &Candidate, len: u64, mode: Mode) -> Option<Found> {
        let slots = self.state.touched(candidate.at, len);
        self.work(slots.len() + candidate.pieces.len());
        if candidate.pieces.is_empty() {
            let missing = candidate.holes;
            let (donors, pool) = self.donors(&slots, missing, mode);
            if donors.len() as u64 + pool == missing {
                let filled = (missing > 0).then(|| self.filling(slots, &[], &donors));
                return Some(self.found(candidate.at, filled.into_iter().collect()));
            }
        }
        self.emptied(candidate, len, mode)
    }

    /// The same for a window that something has to leave, or for which something leaves its place.
    fn emptied(&self, candidate: &Candidate, len: u64, mode: Mode) -> Option<Found> {
        let (state, at) = (self.state, candidate.at);
        let slots = state.touched(at, len);
        let mut evacuees: Vec<usize> = Vec::new();
        let mut shifted: Vec<usize> = Vec::new();
        match mode.copy {
            true => evacuees.extend(candidate.pieces.clone()),
            false => shifted.extend(candidate.pieces.clone()),
        }
        let leaving: u64 = shifted.iter().map(|i| state.pieces[*i].len).sum();
        let missing = candidate.holes + leaving / state.granule;
        let (mut donors, pool) = self.donors(&slots, missing, mode);
        let lacking = missing - donors.len() as u64 - pool;
        if lacking > 0 {
            for slot in self.clear(&slots, lacking)? {
                donors.push(slot);
                let start = slot as u64 * state.granule;
                evacuees.extend(self.pieces_in(start, state.granule));
            }
        }
        let mut steps = Vec::new();
        if !evacuees.is_empty() {
            let moves = self.evacuate((at, len), &donors, &evacuees, mode)?;
            steps.push(Step::Copy(moves));
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
            steps.push(self.filling(slots, &vacated, &donors));
        }
        Some(self.found(at, steps))
    }

    /// The slots that fill a window which misses so many, and how many granules of the pool do.
    fn donors(&self, slots: &Range<usize>, missing: u64, mode: Mode) -> (Vec<usize>, u64) {
        let donors = match mode.remap {
            true => self.empty_slots(slots, missing),
            false => Vec::new(),
        };
        let pool = self.supply(mode, missing - donors.len() as u64);
        (donors, pool)
    }

    /// Donors are mapped at all holes of a window and at what is vacated, and granules of the pool once
    /// there are no more of them.
    fn filling(&self, slots: Range<usize>, vacated: &[usize], donors: &[usize]) -> Step {
        // Pieces ascend, and so do the slots that they leave.
        let is_target = |slot: usize| {
            self.state.slots[slot] == Slot::Hole || vacated.binary_search(&slot).is_ok()
        };
        let mut donors = donors.iter();
        let mut list = Vec::with_capacity(slots.len());
        for to in slots {
            if is_target(to) {
                let from = donors
                    .next()
                    .map_or(Source::Pool, |slot| Source::Slot(*slot));
                list.push(Remapping { to, from });
            }
        }
        Step::Map(list)
    }

    fn found(&self, at: u64, steps: Vec<Step>) -> Found {
        let predicted = self.predict(&steps);
        Found {
            at,
            steps,
            predicted,
        }
    }
}
