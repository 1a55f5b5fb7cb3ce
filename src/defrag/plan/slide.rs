//! Sliding compaction: the blocks between two gaps slide to the low end, so that the gaps join.

use super::cost::Load;
use super::{Found, Move, Piece, Planner, Slot, Step, keep};

/// Intervals that are looked at closely before giving up.
const TRIES: usize = 16;

/// A stretch of mapped addresses without barriers: the pieces to slide, and where the free run starts
/// and ends.
pub(super) struct Interval {
    /// Indices of the pieces that move.
    first: usize,
    last: usize,
    /// Start of the first gap.
    low: u64,
    /// End of the last gap.
    high: u64,
    /// What these pieces come to.
    pub(super) load: Load,
}

impl Planner<'_> {
    pub(super) fn slide(&self, want: u64, best: &mut Option<Found>) {
        if let Some(best) = best {
            let least = self.least_between(want);
            if least.is_none_or(|bytes| best.time() <= self.least_slide_of(bytes)) {
                return;
            }
        }
        self.work(self.state.pieces.len() + self.state.slots.len());
        let mut intervals = self.intervals(want);
        intervals.sort_by_key(|i| (i.load.bytes(), i.low));
        for interval in intervals.iter().take(TRIES) {
            let cannot = |best: &Found| best.time() <= self.least_slide(&interval.load);
            if best.as_ref().is_some_and(cannot) {
                continue;
            }
            self.work(interval.last - interval.first);
            keep(best, self.slide_within(interval, want));
        }
    }

    /// No interval has fewer bytes to slide: the fewest between free runs that have `want` bytes in
    /// all, be these bytes live or not. `None` if there are no such runs.
    pub(super) fn least_between(&self, want: u64) -> Option<u64> {
        let runs = &self.survey().runs;
        self.work(runs.len());
        let (mut end, mut free) = (0, 0);
        let rows = runs.iter().map_while(|(at, len)| {
            while end < runs.len() && free < want {
                free += runs[end].1;
                end += 1;
            }
            let last = runs[..end].last().filter(|_| free >= want)?;
            let between = last.0 + last.1 - at - free;
            free -= len;
            Some(between)
        });
        rows.min()
    }

    /// For every gap the shortest row of gaps from it on that has `want` bytes in all.
    pub(super) fn intervals(&self, want: u64) -> Vec<Interval> {
        let mut found = Vec::new();
        for (low, high, pieces) in self.stretches() {
            // The gap before each piece of the stretch, and the one after the last.
            let mut gaps = Vec::with_capacity(pieces.len() + 1);
            let mut at = low;
            for piece in &self.state.pieces[pieces.clone()] {
                gaps.push((at, piece.offset));
                at = piece.end();
            }
            gaps.push((at, high));
            let (mut end, mut free, mut load) = (0, 0, Load::default());
            for start in 0..gaps.len() {
                while end < gaps.len() && free < want {
                    free += gaps[end].1 - gaps[end].0;
                    if end > start {
                        load.add(self.state.pieces[pieces.start + end - 1].len);
                    }
                    end += 1;
                }
                if free < want {
                    break;
                }
                if gaps[start].0 < gaps[start].1 {
                    found.push(Interval {
                        first: pieces.start + start,
                        last: pieces.start + end - 1,
                        low: gaps[start].0,
                        high: gaps[end - 1].1,
                        load,
                    });
                }
                free -= gaps[start].1 - gaps[start].0;
                // The piece behind this gap is no longer between gaps.
                if end > start + 1 {
                    load.remove(self.state.pieces[pieces.start + start].len);
                } else {
                    (end, free, load) = (start + 1, 0, Load::default());
                }
            }
        }
        found
    }

    /// Stretches of mapped addresses between holes and pieces that may not move.
    fn stretches(&self) -> Vec<(u64, u64, std::ops::Range<usize>)> {
        let state = self.state;
        let mut barriers: Vec<(u64, u64)> = Vec::new();
        for (slot, slots) in state.stretches() {
            if slot != Slot::Mapped {
                let edges = [slots.start, slots.end].map(|slot| slot as u64 * state.granule);
                barriers.push(edges.into());
            }
        }
        let fixed = state.pieces.iter().filter(|p| !p.movable);
        barriers.extend(fixed.map(|p| (p.offset, p.end())));
        barriers.sort_unstable();
        barriers.push((state.len(), state.len()));
        let mut stretches = Vec::new();
        let mut low = 0;
        for (start, end) in barriers {
            if low < start {
                let from = state.pieces.partition_point(|p| p.offset < low);
                let to = state.pieces.partition_point(|p| p.offset < start);
                stretches.push((low, start, from..to));
            }
            low = low.max(end);
        }
        stretches
    }

    pub(super) fn slide_within(&self, interval: &Interval, want: u64) -> Option<Found> {
        let pieces = &self.state.pieces[interval.first..interval.last];
        let mut moves: Vec<Move> = Vec::with_capacity(pieces.len());
        let mut cursor = interval.low;
        for piece in pieces {
            let step = |from: u64, to: u64| Move {
                id: piece.id,
                from,
                to,
                len: piece.len,
            };
            if piece.offset - cursor >= piece.len {
                moves.push(step(piece.offset, cursor));
            } else {
                // It would overlap itself: by way of a free place, so that at every moment one whole
                // copy of it stands somewhere.
                let hop = self.hop(interval, piece)?;
                moves.push(step(piece.offset, hop));
                moves.push(step(hop, cursor));
            }
            cursor += piece.len;
        }
        (interval.high - cursor >= want).then(|| {
            let steps = levels(moves);
            let predicted = self.predict(&steps);
            Found {
                at: cursor,
                steps,
                predicted,
            }
        })
    }

    /// A free place of a piece's length that no part of the interval's sliding uses: in the last gap,
    /// from its high end, or outside of the interval.
    fn hop(&self, interval: &Interval, piece: &Piece) -> Option<u64> {
        let last_gap = self.state.pieces[..interval.last].last()?.end();
        if interval.high - last_gap >= piece.len {
            return Some(interval.high - piece.len);
        }
        let outside = |at: u64, len: u64| at + len <= interval.low || at >= interval.high;
        let runs = &self.survey().runs;
        self.work(runs.len());
        let fits = runs
            .iter()
            .filter(|(at, len)| outside(*at, *len) && *len >= piece.len);
        fits.min_by_key(|run| run.1).map(|run| run.0)
    }
}

/// Steps whose copies have no order among themselves, in an order that keeps every copy behind those
/// that it depends on.
fn levels(moves: Vec<Move>) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut level: Vec<Move> = Vec::new();
    // Sliding goes by ascending address, so what a level has read and written are two bounds, but for
    // hops.
    let clash = |a: u64, b: u64, x: u64, y: u64| a < y && x < b;
    let (mut read, mut written) = ((u64::MAX, 0), (u64::MAX, 0));
    for one in moves {
        let (from, to) = ((one.from, one.from + one.len), (one.to, one.to + one.len));
        let depends = !level.is_empty()
            && (clash(to.0, to.1, read.0, read.1)
                || clash(to.0, to.1, written.0, written.1)
                || clash(from.0, from.1, written.0, written.1));
        if depends {
            steps.push(Step::Copy(std::mem::take(&mut level)));
            (read, written) = ((u64::MAX, 0), (u64::MAX, 0));
        }
        read = (read.0.min(from.0), read.1.max(from.1));
        written = (written.0.min(to.0), written.1.max(to.1));
        level.push(one);
    }
    if !level.is_empty() {
        steps.push(Step::Copy(level));
    }
    steps
}
