//! Where a block that no free run holds should go: windows over gaps and the free runs beside them.

use super::lane::Lane;
use super::runs::State;
use super::{NONE, PAGE};

/// A window that could hold the block once its gaps are filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    /// First unit of the block.
    pub start: u32,
    /// The leftmost node that the window touches.
    pub first: u32,
    /// Pages that must be mapped.
    pub missing: u32,
    /// Wholly free pages in the runs that it touches: not to be had as sources.
    pub inside: u32,
}

impl Lane {
    /// Calls `see` with every site of a line for a block.
    pub(super) fn each_site(&self, line: u8, len: u32, align: u32, mut see: impl FnMut(Site)) {
        let l = &self.lines[line as usize];
        let mut gap = l.first_gap();
        while gap != NONE {
            if let Some(site) = self.site_from(line, gap, len, align) {
                see(site);
            }
            if let Some(site) = self.site_until(line, gap, len, align) {
                see(site);
            }
            gap = l.next_gap(gap);
        }
    }

    /// The window that begins with the free run before `gap`, or with the gap.
    fn site_from(&self, line: u8, gap: u32, len: u32, align: u32) -> Option<Site> {
        let l = &self.lines[line as usize];
        let prev = l.node(gap).prev;
        let mut first = gap;
        let mut start = self.up(line, l.node(gap).start, align)?;
        if prev != NONE && l.node(prev).state == State::Free {
            let run = l.node(prev);
            let at = self.up(line, run.start, align)?;
            if at < run.start + run.len {
                first = prev;
                start = at;
            }
        }
        // alignment may carry the start past the gap; the next gap's windows begin there
        if start >= l.node(gap).start + l.node(gap).len {
            return None;
        }
        self.measure(line, first, start, len)
    }

    /// The window that ends with the free run after `gap`.
    fn site_until(&self, line: u8, gap: u32, len: u32, align: u32) -> Option<Site> {
        let l = &self.lines[line as usize];
        let next = l.node(gap).next;
        if next == NONE || l.node(next).state != State::Free {
            return None;
        }
        let run = l.node(next);
        let start = self.down(line, (run.start + run.len).checked_sub(len)?, align)?;
        // an aligned place inside the run may have been missed by the search, which asks for the worst case
        let mut first = if start >= run.start { next } else { gap };
        while l.node(first).start > start {
            first = l.node(first).prev;
            if first == NONE || !matches!(l.node(first).state, State::Free | State::Gap) {
                return None;
            }
        }
        self.measure(line, first, start, len)
    }

    fn measure(&self, line: u8, first: u32, start: u32, len: u32) -> Option<Site> {
        let l = &self.lines[line as usize];
        let end = start.checked_add(len)?;
        let mut site = Site {
            start,
            first,
            missing: 0,
            inside: 0,
        };
        let mut at = first;
        loop {
            let node = l.node(at);
            let (from, to) = (node.start.max(start), (node.start + node.len).min(end));
            match node.state {
                State::Gap => site.missing += to.div_ceil(PAGE) - from / PAGE,
                State::Free => {
                    if let Some((a, b)) = self.granules.whole(line, node.start, node.len) {
                        site.inside += b - a;
                    }
                }
                _ => return None,
            }
            if node.start + node.len >= end {
                return Some(site);
            }
            at = node.next;
            if at == NONE {
                return None;
            }
        }
    }
}
