//! Windows: stretches of addresses that are to become free and mapped. What each would cost is known
//! from prefix sums before any of them is planned, so that mostly only the cheapest one is.

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

use super::cost::Load;
use super::{Found, Move, Planner, Remapping, Slot, Source, State, Step, keep};
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
    young: bool,
    /// Movable pieces that are whole granules may be remapped elsewhere.
    shift: bool,
    /// The window has this length and stands at a multiple of it, and so does each piece that is
    /// copied at a multiple of its size class.
    class: Option<u64>,
}

const NOTHING: Mode = Mode {
    remap: false,
    grow: false,
    copy: false,
    young: false,
    shift: false,
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

/// A stretch of addresses that may become the run, and what stands in it.
#[derive(Debug)]
pub(super) struct Span {
    at: u64,
    /// The pieces that have a byte in it: from this one, to before that one.
    first: usize,
    last: usize,
}

/// A span, what may be done to it, and the least that can cost: in most cases exactly what it will.
struct Candidate {
    at: u64,
    pieces: Range<usize>,
    mode: Mode,
    least: Nanos,
    holes: u64,
}

/// Sums over the pieces before one.
#[derive(Clone, Copy, Default, Debug)]
struct OfPieces {
    /// What copying those that are movable comes to.
    load: Load,
    movable: u64,
    /// Movable and not young.
    old: u64,
    /// Movable and whole granules; and how many granules that are.
    whole: u64,
    granules: u64,
}

/// Sums over the slots before one.
#[derive(Clone, Copy, Default, Debug)]
struct OfSlots {
    holes: u64,
    busy: u64,
    /// Mapped slots in which nothing is live.
    empty: u64,
}

/// What all windows of one state have in common: counted once.
#[derive(Debug)]
pub(super) struct Survey {
    pieces: Vec<OfPieces>,
    slots: Vec<OfSlots>,
    /// Slots that are empty once single pieces are copied away, with the bytes of these; fewest first.
    clearable: Vec<(u64, usize)>,
    /// Sums of those bytes: what emptying so many slots takes at least.
    clearing: Vec<u64>,
    pub(super) runs: Vec<(u64, u64)>,
}

impl Survey {
    pub(super) fn new(state: &State) -> Self {
        const NEVER: u64 = u64::MAX;
        let mut sum = OfPieces::default();
        let mut pieces = Vec::with_capacity(state.pieces.len() + 1);
        pieces.push(sum);
        let mut live = vec![0u64; state.slots.len()];
        for piece in &state.pieces {
            let touched = state.touched(piece.offset, piece.len);
            if piece.movable {
                sum.load.add(piece.len);
                sum.movable += 1;
                sum.old += u64::from(!piece.young);
                if (piece.offset | piece.len) & (state.granule - 1) == 0 {
                    sum.whole += 1;
                    sum.granules += touched.len() as u64;
                }
            }
            pieces.push(sum);
            match piece.movable && touched.len() == 1 {
                true => live[touched.start] = live[touched.start].saturating_add(piece.len),
                false => live[touched].fill(NEVER),
            }
        }
        let mut sum = OfSlots::default();
        let mut slots = Vec::with_capacity(state.slots.len() + 1);
        slots.push(sum);
        for (slot, live) in state.slots.iter().zip(&live) {
            sum.holes += u64::from(*slot == Slot::Hole);
            sum.busy += u64::from(*slot == Slot::Busy);
            sum.empty += u64::from(*slot == Slot::Mapped && *live == 0);
            slots.push(sum);
        }
        let mut clearable: Vec<(u64, usize)> = (live.into_iter().zip(0..))
            .filter(|(live, slot)| {
                // Those with nothing live are donors already.
                *live > 0 && *live != NEVER && state.slots[*slot] == Slot::Mapped
            })
            .collect();
        clearable.sort_unstable();
        let mut bytes = 0;
        let clearing = std::iter::once(0).chain(clearable.iter().map(|(live, _)| {
            bytes += live;
            bytes
        }));
        Self {
            pieces,
            slots,
            clearing: clearing.collect(),
            clearable,
            runs: state.free_runs(),
        }
    }

    fn of_pieces(&self, range: &Range<usize>) -> OfPieces {
        let (a, b) = (&self.pieces[range.start], &self.pieces[range.end]);
        OfPieces {
            load: b.load.since(&a.load),
            movable: b.movable - a.movable,
            old: b.old - a.old,
            whole: b.whole - a.whole,
            granules: b.granules - a.granules,
        }
    }

    fn of_slots(&self, range: &Range<usize>) -> OfSlots {
        let (a, b) = (&self.slots[range.start], &self.slots[range.end]);
        OfSlots {
            holes: b.holes - a.holes,
            busy: b.busy - a.busy,
            empty: b.empty - a.empty,
        }
    }

    fn is_empty(&self, slot: usize) -> bool {
        self.slots[slot].empty < self.slots[slot + 1].empty
    }

    /// Empty slots outside of a window in which so many are.
    fn donors(&self, inside: u64) -> u64 {
        self.slots.last().map_or(0, |all| all.empty) - inside
    }
}

impl Planner<'_> {
    /// Plans the cheapest windows of some modes until no other can be cheaper than the best so far;
    /// only such as take no longer than `most`. Whether all that could be cheaper than what is the best
    /// now were planned.
    pub(super) fn windows(
        &self,
        want: u64,
        modes: &[Mode],
        best: &mut Option<Found>,
        most: Option<Nanos>,
    ) -> bool {
        let key = |c: &Candidate| (c.least, c.holes, c.at);
        let mut candidates: Vec<Candidate> = Vec::new();
        let mut cut = false;
        for mode in modes {
            let placed;
            let (len, spans) = match mode.class {
                None => (want, self.spans(want)),
                Some(class) => {
                    placed = self.spans_at(
                        (0..self.state.len() / class.max(1)).map(|i| i * class),
                        class,
                    );
                    (class, &placed[..])
                }
            };
            self.work(spans.len());
            let worth = |least: Nanos, best: &Option<Found>| {
                most.is_none_or(|most| least <= most)
                    && best.as_ref().is_none_or(|best| least < best.time())
            };
            // Neighbouring windows mostly have as many live bytes.
            let mut known = (Load::default(), Nanos::ZERO);
            let some = spans
                .iter()
                .filter_map(|span| self.candidate(span, len, *mode, &mut known));
            let mut some: Vec<Candidate> = some.filter(|one| worth(one.least, best)).collect();
            if some.len() > TRIES {
                some.select_nth_unstable_by_key(TRIES, key);
                some.truncate(TRIES);
                cut = true;
            }
            candidates.extend(some);
        }
        candidates.sort_unstable_by_key(key);
        let mut all = true;
        for candidate in &candidates {
            if best.as_ref().is_some_and(|b| b.time() <= candidate.least) {
                return all;
            }
            let found = self.window(candidate, candidate.mode.class.unwrap_or(want));
            all &= found.is_some();
            keep(
                best,
                found.filter(|f| most.is_none_or(|most| f.time() <= most)),
            );
        }
        all && !cut
    }

    /// Where a window can start so that none in between is better: behind or before a piece or hole.
    fn spans(&self, len: u64) -> &[Span] {
        self.spans.get_or_init(|| {
            let state = self.state;
            let total = state.len();
            // Each of these ascends, which the sort makes use of.
            let pair = |pair: &[Slot]| pair[0] != pair[1];
            let slots = || {
                let edges = (1u64..).zip(state.slots.windows(2));
                edges
                    .filter(move |(_, two)| pair(two))
                    .map(|(i, _)| i * state.granule)
            };
            let before = |at: u64| at.checked_sub(len);
            let mut edges = vec![0];
            edges.extend(state.pieces.iter().map(super::Piece::end));
            edges.extend(state.pieces.iter().filter_map(|p| before(p.offset)));
            edges.extend(slots());
            edges.extend(slots().filter_map(before));
            edges.extend(before(total));
            edges.sort();
            edges.dedup();
            self.work(edges.len());
            self.spans_at(edges.into_iter(), len)
        })
    }

    /// Windows at ascending places, without those that end behind the end.
    fn spans_at(&self, places: impl Iterator<Item = u64>, len: u64) -> Vec<Span> {
        let pieces = &self.state.pieces;
        let total = self.state.len();
        let (mut first, mut last) = (0, 0);
        let ends = places.map_while(|at| Some((at, at.checked_add(len).filter(|e| *e <= total)?)));
        ends.map(|(at, end)| {
            while pieces.get(first).is_some_and(|p| p.end() <= at) {
                first += 1;
            }
            last = last.max(first);
            while pieces.get(last).is_some_and(|p| p.offset < end) {
                last += 1;
            }
            Span { at, first, last }
        })
        .collect()
    }

    fn candidate(
        &self,
        span: &Span,
        len: u64,
        mode: Mode,
        known: &mut (Load, Nanos),
    ) -> Option<Candidate> {
        let (state, survey) = (self.state, self.survey());
        let at = span.at;
        let pieces = span.first..span.last;
        let inside = survey.of_slots(&state.touched(at, len));
        let live = survey.of_pieces(&pieces);
        let n = pieces.len() as u64;
        let may_leave = match mode {
            Mode {
                copy: true,
                young: true,
                ..
            } => live.movable - live.old,
            Mode { copy: true, .. } => live.movable,
            Mode { shift: true, .. } => live.whole,
            _ => 0,
        };
        let holes = inside.holes;
        if inside.busy > 0 || may_leave < n || (holes > 0 && !mode.remap && !mode.grow) {
            return None;
        }
        let shifts = if mode.copy { 0 } else { live.granules };
        // A piece that is shifted must leave its slots whole, which those at the edges may not.
        if shifts > 0 {
            let edges = [pieces.start, pieces.end - 1].map(|i| state.pieces[i]);
            if edges.iter().any(|p| p.offset < at || p.end() > at + len) {
                return None;
            }
        }
        let load = if mode.copy {
            live.load
        } else {
            Load::default()
        };
        let (pool, lacking) = self.supply(mode, holes + shifts, inside.empty);
        if known.0 != load {
            *known = (load, self.copying(&load));
        }
        let mut work = known.1;
        if lacking > 0 {
            let slots = usize::try_from(lacking).ok();
            let slots = slots.filter(|_| mode.copy && mode.remap)?;
            let more = survey.clearing.get(slots)?;
            work = work.max(self.least_copy(load.small + load.bulk + more));
        }
        Some(Candidate {
            at,
            pieces,
            mode,
            least: self.outline(&load, work, shifts, holes + shifts, pool),
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

    fn window(&self, candidate: &Candidate, len: u64) -> Option<Found> {
        let (state, mode, at) = (self.state, candidate.mode, candidate.at);
        let slots = state.touched(at, len);
        self.work(slots.len() + candidate.pieces.len());
        let mut evacuees: Vec<usize> = Vec::new();
        let mut shifted: Vec<usize> = Vec::new();
        match mode.copy {
            true => evacuees.extend(candidate.pieces.clone()),
            false => shifted.extend(candidate.pieces.clone()),
        }
        let vacated: u64 = shifted.iter().map(|i| state.pieces[*i].len).sum();
        let missing = candidate.holes + vacated / state.granule;
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
        if !shifted.is_empty() {
            let moves = self.places_for(&shifted, &slots)?;
            let old = shifted.iter().map(|i| state.pieces[*i]);
            let old = old.flat_map(|p| state.touched(p.offset, p.len)).collect();
            steps.push(Step::Shift(moves));
            steps.push(Step::Vacate(old));
        }
        let emptied: HashSet<usize> = shifted
            .iter()
            .flat_map(|i| state.touched(state.pieces[*i].offset, state.pieces[*i].len))
            .collect();
        let targets = slots
            .clone()
            .filter(|s| state.slots[*s] == Slot::Hole || emptied.contains(s));
        let from_pool = usize::try_from(pool).unwrap_or(usize::MAX);
        let sources = donors
            .into_iter()
            .map(Source::Slot)
            .chain(std::iter::repeat_n(Source::Pool, from_pool));
        let maps: Vec<Remapping> = targets
            .zip(sources)
            .map(|(to, from)| Remapping { to, from })
            .collect();
        if !maps.is_empty() {
            steps.push(Step::Map(maps));
        }
        let predicted = self.predict(&steps);
        Some(Found {
            at,
            steps,
            predicted,
        })
    }

    /// Indices of the pieces that have a byte there.
    fn pieces_in(&self, at: u64, len: u64) -> Range<usize> {
        let pieces = &self.state.pieces;
        let first = pieces.partition_point(|p| p.end() <= at);
        first..pieces.partition_point(|p| p.offset < at + len).max(first)
    }

    /// Up to `n` mapped slots outside of the window in which nothing is live: those of short runs
    /// first, so that long ones stay, and from the high end.
    fn empty_slots(&self, window: &Range<usize>, n: u64) -> Vec<usize> {
        let n = usize::try_from(n).unwrap_or(usize::MAX);
        if n == 0 {
            return Vec::new();
        }
        self.work(self.state.slots.len());
        let survey = self.survey();
        let is_empty = |i: usize| survey.is_empty(i) && !window.contains(&i);
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for i in (0..self.state.slots.len()).filter(|i| is_empty(*i)) {
            match runs.last_mut() {
                Some((at, len)) if *at + *len == i => *len += 1,
                _ => runs.push((i, 1)),
            }
        }
        runs.sort_by_key(|(at, len)| (*len, usize::MAX - at));
        let slots = runs.into_iter().flat_map(|(at, len)| (at..at + len).rev());
        slots.take(n).collect()
    }

    /// `n` slots outside of the window that become empty when the fewest bytes are copied away.
    fn clear(&self, window: &Range<usize>, n: u64) -> Option<Vec<usize>> {
        let n = usize::try_from(n).ok()?;
        let slots = self.survey().clearable.iter().map(|(_, slot)| *slot);
        let slots: Vec<usize> = slots.filter(|s| !window.contains(s)).take(n).collect();
        self.work(slots.len());
        (slots.len() == n).then_some(slots)
    }

    /// Places outside of the window and of the donors for pieces that are copied away.
    fn evacuate(
        &self,
        (at, len): (u64, u64),
        donors: &[usize],
        evacuees: &[usize],
        mode: Mode,
    ) -> Option<Vec<Move>> {
        let unit = self.state.granule;
        let mut barred: Vec<(u64, u64)> = donors
            .iter()
            .map(|slot| (*slot as u64 * unit, unit))
            .collect();
        barred.push((at, len));
        barred.sort_unstable();
        let runs = &self.survey().runs;
        self.work(runs.len() + evacuees.len());
        let mut places = Places::new(without(runs, &barred), mode.young);
        let mut order = evacuees.to_vec();
        let pieces = &self.state.pieces;
        order.sort_unstable_by_key(|i| (u64::MAX - pieces[*i].len, pieces[*i].offset));
        let mut moves = Vec::with_capacity(order.len());
        for i in order {
            let piece = &pieces[i];
            let class = mode.class.map(|_| piece.len.next_power_of_two());
            let to = places.take(piece.len, class.unwrap_or(1))?;
            moves.push(Move {
                id: piece.id,
                from: piece.offset,
                to,
                len: piece.len,
            });
        }
        moves.sort_unstable_by_key(|one| one.from);
        Some(moves)
    }

    /// Runs of holes outside of the window for pieces of whole granules.
    fn places_for(&self, pieces: &[usize], window: &Range<usize>) -> Option<Vec<Move>> {
        let state = self.state;
        let mut runs: Vec<(usize, usize)> = Vec::new();
        let is_hole = |i: usize| state.slots[i] == Slot::Hole && !window.contains(&i);
        for i in (0..state.slots.len()).filter(|i| is_hole(*i)) {
            match runs.last_mut() {
                Some((at, len)) if *at + *len == i => *len += 1,
                _ => runs.push((i, 1)),
            }
        }
        let unit = state.granule;
        let mut order = pieces.to_vec();
        order.sort_unstable_by_key(|i| (u64::MAX - state.pieces[*i].len, *i));
        let mut moves = Vec::with_capacity(order.len());
        for i in order {
            let piece = &state.pieces[i];
            let slots = usize::try_from(piece.len / unit).ok()?;
            let run = runs.iter_mut().find(|(_, len)| *len >= slots)?;
            moves.push(Move {
                id: piece.id,
                from: piece.offset,
                to: run.0 as u64 * unit,
                len: piece.len,
            });
            *run = (run.0 + slots, run.1 - slots);
        }
        moves.sort_unstable_by_key(|one| one.from);
        Some(moves)
    }
}

/// What is left of runs without the ranges barred; both ascend.
fn without(runs: &[(u64, u64)], barred: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut left = Vec::with_capacity(runs.len());
    let mut skip = 0;
    for &(mut at, len) in runs {
        let end = at + len;
        while skip < barred.len() && barred[skip].0 + barred[skip].1 <= at {
            skip += 1;
        }
        for (from, n) in barred[skip..].iter().take_while(|b| b.0 < end) {
            if at < *from {
                left.push((at, from - at));
            }
            at = at.max(from + n);
        }
        if at < end {
            left.push((at, end - at));
        }
    }
    left
}

/// Free runs that pieces are put into.
struct Places {
    /// By length and place; by place and length if the lowest is wanted.
    runs: BTreeSet<(u64, u64)>,
    lowest: bool,
}

impl Places {
    fn new(runs: Vec<(u64, u64)>, lowest: bool) -> Self {
        let key = |(at, len)| if lowest { (at, len) } else { (len, at) };
        Self {
            runs: runs.into_iter().map(key).collect(),
            lowest,
        }
    }

    /// The tightest run that holds `len` bytes at a multiple of `align`, or the lowest.
    fn take(&mut self, len: u64, align: u64) -> Option<u64> {
        let lowest = self.lowest;
        let turn = |(a, b): (u64, u64)| if lowest { (a, b) } else { (b, a) };
        let start = |at: u64| at.checked_next_multiple_of(align.max(1));
        let fits = |run: &(u64, u64)| {
            let (at, size) = turn(*run);
            start(at).is_some_and(|s| s.checked_add(len).is_some_and(|end| end <= at + size))
        };
        let least = if lowest { (0, 0) } else { (len, 0) };
        let run = self.runs.range(least..).copied().find(fits)?;
        self.runs.remove(&run);
        let (at, size) = turn(run);
        let to = start(at)?;
        if at < to {
            self.runs.insert(turn((at, to - at)));
        }
        if to + len < at + size {
            self.runs.insert(turn((to + len, at + size - to - len)));
        }
        Some(to)
    }
}
