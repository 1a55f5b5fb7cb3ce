//! Windows: stretches of addresses that are to become free and mapped. What each would cost is known
//! from prefix sums before any of them is planned, so that the cheapest are looked at first.

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

use super::{Found, Move, Planner, Remapping, Slot, Source, State, Step, keep};
use crate::driver::cost::Nanos;

/// Windows that are planned before giving up.
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

/// A window and the least it can cost.
struct Candidate {
    at: u64,
    least: Nanos,
    holes: u64,
}

/// Prefix sums over pieces and slots.
struct Sums {
    /// Bytes of pieces that may be copied, before the i-th.
    live: Vec<u64>,
    /// Slots of pieces that may be shifted.
    shifted: Vec<u64>,
    /// How many may not move at all.
    fixed: Vec<u64>,
    holes: Vec<u64>,
    busy: Vec<u64>,
    /// Mapped slots in which nothing is live.
    empty: Vec<u64>,
}

impl Sums {
    fn new(state: &State, mode: Mode) -> Self {
        let n = state.pieces.len();
        let mut sums = Self {
            live: Vec::with_capacity(n + 1),
            shifted: Vec::with_capacity(n + 1),
            fixed: Vec::with_capacity(n + 1),
            holes: Vec::new(),
            busy: Vec::new(),
            empty: Vec::new(),
        };
        let (mut live, mut shifted, mut fixed) = (0, 0, 0);
        let mut used = vec![false; state.slots.len()];
        for piece in &state.pieces {
            sums.live.push(live);
            sums.shifted.push(shifted);
            sums.fixed.push(fixed);
            let whole = piece.offset % state.granule == 0 && piece.len % state.granule == 0;
            if piece.movable && mode.copy && (piece.young || !mode.young) {
                live += piece.len;
            } else if piece.movable && mode.shift && whole {
                shifted += piece.len / state.granule;
            } else {
                fixed += 1;
            }
            used[state.touched(piece.offset, piece.len)].fill(true);
        }
        sums.live.push(live);
        sums.shifted.push(shifted);
        sums.fixed.push(fixed);
        let prefix = |is: &dyn Fn(usize) -> bool| {
            let mut sum = 0;
            let mut all = vec![0];
            all.extend((0..state.slots.len()).map(|i| {
                sum += u64::from(is(i));
                sum
            }));
            all
        };
        sums.holes = prefix(&|i| state.slots[i] == Slot::Hole);
        sums.busy = prefix(&|i| state.slots[i] == Slot::Busy);
        sums.empty = prefix(&|i| state.slots[i] == Slot::Mapped && !used[i]);
        sums
    }
}

fn within(sums: &[u64], range: &Range<usize>) -> u64 {
    sums[range.end] - sums[range.start]
}

impl Planner<'_> {
    /// Plans the cheapest windows of a mode until no other can be cheaper than the best so far. Whether
    /// all that could be cheaper than what is the best now were planned.
    pub(super) fn windows(&self, want: u64, mode: Mode, best: &mut Option<Found>) -> bool {
        let sums = Sums::new(self.state, mode);
        let len = mode.class.unwrap_or(want);
        // Neighbouring windows mostly have as many live bytes.
        let mut known = (0, Nanos::ZERO);
        let mut candidates: Vec<Candidate> = self
            .starts(len, mode)
            .into_iter()
            .filter_map(|at| self.candidate(at, len, mode, &sums, &mut known))
            .collect();
        let key = |c: &Candidate| (c.least, c.holes, c.at);
        if candidates.len() > TRIES {
            candidates.select_nth_unstable_by_key(TRIES, key);
        }
        let tried = candidates.len().min(TRIES);
        candidates[..tried].sort_unstable_by_key(key);
        let mut all = true;
        for candidate in &candidates[..tried] {
            if best.as_ref().is_some_and(|b| b.time() <= candidate.least) {
                return all;
            }
            let found = self.window(candidate, len, mode, &sums);
            all &= found.is_some();
            keep(best, found);
        }
        all && tried == candidates.len()
    }

    /// Where a window can start so that none in between is better: behind or before a piece or hole.
    fn starts(&self, len: u64, mode: Mode) -> Vec<u64> {
        let state = self.state;
        let total = state.len();
        if let Some(class) = mode.class {
            return (0..total / class.max(1)).map(|i| i * class).collect();
        }
        let mut edges = Vec::with_capacity(2 * state.pieces.len() + 16);
        let mut add = |left: u64, right: u64| {
            edges.push(left);
            edges.extend(right.checked_sub(len));
        };
        add(0, total);
        state.pieces.iter().for_each(|p| add(p.end(), p.offset));
        let slots = (1u64..).zip(state.slots.windows(2));
        for (i, pair) in slots.filter(|(_, pair)| pair[0] != pair[1]) {
            // Where holes or granules begin; both a left and a right edge.
            debug_assert!(pair.len() == 2);
            add(i * state.granule, i * state.granule);
        }
        edges.sort_unstable();
        edges.dedup();
        edges.retain(|at| at.checked_add(len).is_some_and(|end| end <= total));
        edges
    }

    fn candidate(
        &self,
        at: u64,
        len: u64,
        mode: Mode,
        sums: &Sums,
        known: &mut (u64, Nanos),
    ) -> Option<Candidate> {
        let state = self.state;
        let slots = state.touched(at, len);
        let pieces = self.pieces_in(at, len);
        let holes = within(&sums.holes, &slots);
        let shifts = within(&sums.shifted, &pieces);
        let live = within(&sums.live, &pieces);
        let moves = mode.remap || mode.grow;
        if within(&sums.busy, &slots) > 0
            || within(&sums.fixed, &pieces) > 0
            || (holes > 0 && !moves)
        {
            return None;
        }
        // A piece that is shifted must leave its slots whole, which those at the edges may not.
        if shifts > 0 {
            let edges = [pieces.start, pieces.end - 1].map(|i| state.pieces[i]);
            if edges.iter().any(|p| p.offset < at || p.end() > at + len) {
                return None;
            }
        }
        if known.0 != live {
            *known = (live, self.least_copy(live));
        }
        Some(Candidate {
            at,
            least: self.at_least(holes, shifts).max(known.1),
            holes,
        })
    }

    /// Indices of the pieces that have a byte in the window.
    fn pieces_in(&self, at: u64, len: u64) -> Range<usize> {
        let pieces = &self.state.pieces;
        let first = pieces.partition_point(|p| p.end() <= at);
        first..pieces.partition_point(|p| p.offset < at + len).max(first)
    }

    fn window(&self, candidate: &Candidate, len: u64, mode: Mode, sums: &Sums) -> Option<Found> {
        let state = self.state;
        let at = candidate.at;
        let slots = state.touched(at, len);
        let mut evacuees: Vec<usize> = Vec::new();
        let mut shifted: Vec<usize> = Vec::new();
        for i in self.pieces_in(at, len) {
            match mode.copy {
                true => evacuees.push(i),
                false => shifted.push(i),
            }
        }
        let vacated: u64 = shifted.iter().map(|i| state.pieces[*i].len).sum();
        let missing = candidate.holes + vacated / state.granule;
        let mut donors = match mode.remap {
            true => self.empty_slots(&slots, missing, sums),
            false => Vec::new(),
        };
        let mut lacking = missing - donors.len() as u64;
        let pool = match mode.grow {
            true => lacking.min(state.idle.saturating_add(state.creatable)),
            false => 0,
        };
        lacking -= pool;
        if lacking > 0 {
            if !(mode.copy && mode.remap) {
                return None;
            }
            let cleared = self.clear(&slots, lacking)?;
            for (slot, pieces) in cleared {
                donors.push(slot);
                evacuees.extend(pieces);
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

    /// Up to `n` mapped slots outside of the window in which nothing is live: those of short runs
    /// first, so that long ones stay, and from the high end.
    fn empty_slots(&self, window: &Range<usize>, n: u64, sums: &Sums) -> Vec<usize> {
        let n = usize::try_from(n).unwrap_or(usize::MAX);
        let is_empty = |i: usize| within(&sums.empty, &(i..i + 1)) > 0 && !window.contains(&i);
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

    /// `n` slots outside of the window that become empty when the fewest bytes are copied away, with
    /// the pieces that are in them.
    fn clear(&self, window: &Range<usize>, n: u64) -> Option<Vec<(usize, Vec<usize>)>> {
        let state = self.state;
        let n = usize::try_from(n).ok()?;
        let mut inside: Vec<Option<(u64, Vec<usize>)>> =
            vec![Some((0, Vec::new())); state.slots.len()];
        for (i, piece) in state.pieces.iter().enumerate() {
            let slots = state.touched(piece.offset, piece.len);
            let alone = piece.movable && slots.len() == 1;
            for slot in slots {
                match &mut inside[slot] {
                    Some((live, list)) if alone => {
                        *live += piece.len;
                        list.push(i);
                    }
                    other => *other = None,
                }
            }
        }
        let mut slots: Vec<(u64, usize, Vec<usize>)> = inside
            .into_iter()
            .enumerate()
            .filter(|(slot, _)| state.slots[*slot] == Slot::Mapped && !window.contains(slot))
            .filter_map(|(slot, inside)| inside.map(|(live, list)| (live, slot, list)))
            // Those with nothing live are donors already.
            .filter(|(live, ..)| *live > 0)
            .collect();
        slots.sort_unstable_by_key(|(live, slot, _)| (*live, *slot));
        slots.truncate(n);
        (slots.len() == n).then(|| slots.into_iter().map(|(_, s, list)| (s, list)).collect())
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
        let mut places = Places::new(without(self.state.free_runs(), &barred));
        let mut order = evacuees.to_vec();
        let pieces = &self.state.pieces;
        order.sort_unstable_by_key(|i| (u64::MAX - pieces[*i].len, pieces[*i].offset));
        let mut moves = Vec::with_capacity(order.len());
        for i in order {
            let piece = &pieces[i];
            let class = mode.class.map(|_| piece.len.next_power_of_two());
            let to = places.take(piece.len, class.unwrap_or(1), mode.young)?;
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
fn without(runs: Vec<(u64, u64)>, barred: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut left = Vec::with_capacity(runs.len());
    let mut skip = 0;
    for (mut at, len) in runs {
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
    by_size: BTreeSet<(u64, u64)>,
}

impl Places {
    fn new(runs: Vec<(u64, u64)>) -> Self {
        Self {
            by_size: runs.into_iter().map(|(at, len)| (len, at)).collect(),
        }
    }

    /// The tightest run that holds `len` bytes at a multiple of `align`, or the lowest.
    fn take(&mut self, len: u64, align: u64, lowest: bool) -> Option<u64> {
        let start = |at: u64| at.checked_next_multiple_of(align.max(1));
        let fits = |(size, at): &(u64, u64)| {
            start(*at).is_some_and(|s| s.checked_add(len).is_some_and(|end| end <= at + size))
        };
        let mut range = self.by_size.range((len, 0)..).copied();
        let (size, at) = match lowest {
            true => range.filter(fits).min_by_key(|run| run.1)?,
            false => range.find(fits)?,
        };
        self.by_size.remove(&(size, at));
        let to = start(at)?;
        if at < to {
            self.by_size.insert((to - at, at));
        }
        if to + len < at + size {
            self.by_size.insert((at + size - to - len, to + len));
        }
        Some(to)
    }
}
