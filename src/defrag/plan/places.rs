//! Places that pieces and granules go to, outside of a window.

use std::collections::BTreeSet;
use std::ops::Range;

use super::window::Mode;
use super::{Move, Planner, Slot};

impl Planner<'_> {
    /// Indices of the pieces that have a byte there.
    pub(super) fn pieces_in(&self, at: u64, len: u64) -> Range<usize> {
        let pieces = &self.state.pieces;
        let first = pieces.partition_point(|p| p.end() <= at);
        first..pieces.partition_point(|p| p.offset < at + len).max(first)
    }

    /// Up to `n` mapped slots outside of the window in which nothing is live: those of short runs
    /// first, so that long ones stay, and from the high end.
    pub(super) fn empty_slots(&self, window: &Range<usize>, n: u64) -> Vec<usize> {
        let n = usize::try_from(n).unwrap_or(usize::MAX);
        if n == 0 {
            return Vec::new();
        }
        let empty = &self.survey().empty;
        self.work(empty.len());
        let mut runs = Vec::with_capacity(empty.len() + 1);
        for run in empty.iter().rev() {
            let (at, end) = (run.slot, run.slot + run.n);
            let parts = [(at.max(window.end), end), (at, end.min(window.start))];
            let parts = parts.into_iter().filter(|(at, end)| at < end);
            runs.extend(parts.map(|(at, end)| (at, end - at)));
        }
        let key = |run: &(usize, usize)| (run.1, usize::MAX - run.0);
        // Mostly they are of one length, and in order.
        if !runs.is_sorted_by_key(key) {
            runs.sort_unstable_by_key(key);
        }
        let mut slots = Vec::with_capacity(n.min(self.state.slots.len()));
        for (at, len) in runs {
            let some = len.min(n - slots.len());
            slots.extend((at + len - some..at + len).rev());
        }
        slots
    }

    /// `n` slots outside of the window that become empty when the fewest bytes are copied away.
    pub(super) fn clear(&self, window: &Range<usize>, n: u64) -> Option<Vec<usize>> {
        let n = usize::try_from(n).ok()?;
        let slots = self.survey().clearable(self.state).slots.iter().copied();
        let slots: Vec<usize> = slots.filter(|s| !window.contains(s)).take(n).collect();
        self.work(slots.len());
        (slots.len() == n).then_some(slots)
    }

    /// Places outside of the window and of the donors for pieces that are copied away.
    pub(super) fn evacuate(
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
    pub(super) fn places_for(&self, pieces: &[usize], window: &Range<usize>) -> Option<Vec<Move>> {
        let state = self.state;
        let is_hole = |i: usize| state.slots[i] == Slot::Hole && !window.contains(&i);
        let mut runs = runs_of(state.slots.len(), is_hole);
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

/// Runs of the indices below `n` that are such: where each starts, and how many it has.
fn runs_of(n: usize, is_such: impl Fn(usize) -> bool) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for i in (0..n).filter(|i| is_such(*i)) {
        match runs.last_mut() {
            Some((at, len)) if *at + *len == i => *len += 1,
            _ => runs.push((i, 1)),
        }
    }
    runs
}

/// What is left of runs without the ranges barred; both ascend.
fn without(runs: &[(u64, u64)], barred: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut left = Vec::with_capacity(runs.len() + 1);
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

/// Free runs that pieces are put into, each as a pair: by length and place; by place and length if the
/// lowest is wanted.
struct Places {
    /// As they were, ascending.
    runs: Vec<(u64, u64)>,
    /// The first of the runs at or behind each that may still be whole: itself where it is.
    next: Vec<usize>,
    /// What is left of runs that were taken from.
    rests: BTreeSet<(u64, u64)>,
    lowest: bool,
    /// What was looked for last, and the first run that may hold another such.
    last: (u64, u64, usize),
}

impl Places {
    fn new(mut runs: Vec<(u64, u64)>, lowest: bool) -> Self {
        if !lowest {
            runs.iter_mut().for_each(|run| *run = (run.1, run.0));
            runs.sort_unstable();
        }
        Self {
            next: (0..=runs.len()).collect(),
            runs,
            rests: BTreeSet::new(),
            lowest,
            last: (0, 0, 0),
        }
    }

    /// The first run at or behind the `i`-th that is whole.
    fn whole(&mut self, mut i: usize) -> usize {
        while self.next[i] != i {
            // Halves the way for those who come later.
            self.next[i] = self.next[self.next[i]];
            i = self.next[i];
        }
        i
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
        let rest = self.rests.range(least..).copied().find(fits);
        // Mostly many of one length are looked for in turn, and none before the last one's run holds one.
        let mut i = match self.last {
            (last, aligned, i) if (last, aligned) == (len, align) => i,
            _ => self.runs.partition_point(|run| *run < least),
        };
        let run = loop {
            i = self.whole(i);
            self.last = (len, align, i);
            match self.runs.get(i) {
                Some(run) if rest.is_some_and(|rest| rest < *run) => break rest?,
                Some(run) if fits(run) => {
                    self.next[i] = i + 1;
                    break *run;
                }
                Some(_) => i += 1,
                None => break rest?,
            }
        };
        if rest == Some(run) {
            self.rests.remove(&run);
        }
        let (at, size) = turn(run);
        let to = start(at)?;
        if at < to {
            self.rests.insert(turn((at, to - at)));
        }
        if to + len < at + size {
            self.rests.insert(turn((to + len, at + size - to - len)));
        }
        Some(to)
    }
}
