//! Where windows can start so that none in between is better: behind or before a piece, or slots of
//! another kind. They are gone through by ascending place, and nothing is searched or sorted.

use std::ops::Range;

use super::survey::Cut;
use super::{Piece, Planner, State};

/// A stretch of addresses that may become the run: nothing in it is busy.
#[derive(Debug)]
pub(super) struct Span {
    pub(super) at: u64,
    /// The pieces that have a byte in it: from this one, to before that one.
    first: usize,
    last: usize,
    pub(super) holes: u64,
}

impl Span {
    pub(super) const fn pieces(&self) -> Range<usize> {
        self.first..self.last
    }
}

/// What stands in a window that is pushed upwards.
struct Sweep<'a> {
    state: &'a State,
    pieces: &'a [Piece],
    cuts: &'a [Cut],
    at: u64,
    end: u64,
    len: u64,
    /// The first piece that ends behind the start, and where.
    first: usize,
    first_end: u64,
    /// The first piece that starts at the end or behind it, and where.
    last: usize,
    last_at: u64,
    /// The cuts of the slots in which it starts and ends, and where the next ones are.
    low: usize,
    low_next: u64,
    high: usize,
    high_next: u64,
}

/// Where there is nothing more to come.
const NEVER: u64 = u64::MAX;

impl Sweep<'_> {
    /// So many pieces, which end before the next place.
    fn skip(&mut self, pieces: usize) {
        (self.first, self.last) = (pieces, pieces);
        self.first_end = self.pieces.get(pieces).map_or(NEVER, Piece::end);
        self.last_at = self.pieces.get(pieces).map_or(NEVER, |p| p.offset);
    }

    /// To a place where it ends within the addresses.
    fn go(&mut self, at: u64) {
        (self.at, self.end) = (at, at + self.len);
        while self.first_end <= at {
            self.first += 1;
            self.first_end = self.pieces.get(self.first).map_or(NEVER, Piece::end);
        }
        while self.last_at < self.end {
            self.last += 1;
            self.last_at = self.pieces.get(self.last).map_or(NEVER, |p| p.offset);
        }
        while self.low_next <= at {
            self.low += 1;
            self.low_next = self.cuts.get(self.low + 1).map_or(NEVER, |c| c.at);
        }
        while self.high_next < self.end {
            self.high += 1;
            self.high_next = self.cuts.get(self.high + 1).map_or(NEVER, |c| c.at);
        }
    }

    /// The next place to look at.
    fn next(&mut self) -> u64 {
        // What starts just behind the window is in it from there on.
        if self.last_at == self.end {
            self.last += 1;
            self.last_at = self.pieces.get(self.last).map_or(NEVER, |p| p.offset);
        }
        if self.high_next == self.end {
            self.high += 1;
            self.high_next = self.cuts.get(self.high + 1).map_or(NEVER, |c| c.at);
        }
        let start = self.first_end.min(self.low_next);
        start.min(self.last_at.min(self.high_next) - self.len)
    }

    fn span(&self) -> Option<Span> {
        let slots = self.state.touched(self.at, self.len);
        let (holes, busy) = self.cuts[self.high].before(slots.end);
        let before = self.cuts[self.low].before(slots.start);
        (busy == before.1).then_some(Span {
            at: self.at,
            first: self.first,
            last: self.last,
            holes: (holes - before.0) as u64,
        })
    }
}

impl Planner<'_> {
    fn sweep(&self, len: u64) -> Sweep<'_> {
        let mut sweep = Sweep {
            state: self.state,
            pieces: &self.state.pieces,
            cuts: &self.survey().cuts,
            at: 0,
            end: 0,
            len,
            first: 0,
            first_end: 0,
            last: 0,
            last_at: 0,
            low: 0,
            low_next: 0,
            high: 0,
            high_next: 0,
        };
        let next = sweep.cuts.get(1).map_or(NEVER, |cut| cut.at);
        (sweep.low_next, sweep.high_next) = (next, next);
        sweep.skip(0);
        sweep
    }

    /// Every window that can be better than its neighbours.
    pub(super) fn spans(&self, len: u64) -> &[Span] {
        self.spans.get_or_init(|| {
            let mut sweep = self.sweep(len);
            let edges = 2 * (sweep.pieces.len() + sweep.cuts.len());
            self.work(edges);
            let mut spans = Vec::with_capacity(edges);
            self.spans_from(&mut sweep, 0, self.state.len(), &mut spans);
            spans
        })
    }

    /// Those of them in which no piece is.
    pub(super) fn spans_between_pieces(&self, len: u64) -> Vec<Span> {
        let mut sweep = self.sweep(len);
        let mut spans = Vec::with_capacity(4);
        self.work(sweep.pieces.len());
        let mut start = 0;
        for i in 0..=sweep.pieces.len() {
            let piece = sweep.pieces.get(i);
            let end = piece.map_or(self.state.len(), |piece| piece.offset);
            if end - start >= len {
                sweep.skip(i);
                self.spans_from(&mut sweep, start, end, &mut spans);
            }
            start = piece.map_or(end, Piece::end);
        }
        self.work(spans.len());
        spans
    }

    /// Those that start at `from` or behind it and end at `to` or before it.
    fn spans_from(&self, sweep: &mut Sweep<'_>, from: u64, to: u64, spans: &mut Vec<Span>) {
        let Some(last) = to.checked_sub(sweep.len) else {
            return;
        };
        let mut at = from;
        while at <= last {
            sweep.go(at);
            if let Some(span) = sweep.span() {
                spans.push(span);
            }
            at = sweep.next();
        }
    }

    /// Windows at all multiples of their length.
    pub(super) fn spans_at_multiples(&self, len: u64) -> Vec<Span> {
        let n = self.state.len() / len.max(1);
        let mut sweep = self.sweep(len);
        let spans = (0..n).filter_map(|i| {
            sweep.go(i * len);
            sweep.span()
        });
        spans.collect()
    }
}
