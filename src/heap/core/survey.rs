//! What lies where, and what keeps free memory from moving: for snapshots and reports, off every hot path.

use std::collections::HashMap;

use super::lane::Lane;
use super::runs::State;
use super::{NONE, PAGE, PAGE_BYTES, UNIT};

/// A block or a free run, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Its address.
    pub addr: u64,
    /// Its bytes.
    pub len: u64,
    /// The mark of a block; `None` for a free run.
    pub mark: Option<u32>,
}

/// A granule and where it is mapped, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The caller's name for it.
    pub id: u64,
    /// Its address.
    pub addr: u64,
    /// Its bytes.
    pub len: u64,
}

impl Lane {
    /// Bytes of the longest free run. Looks at runs of the longest lengths only.
    #[must_use]
    pub fn largest_free(&self) -> u64 {
        let longest = self.lines.iter().map(|line| {
            let mut most = 0;
            for log in (0..u32::BITS).rev() {
                line.each_run(1 << log, &mut |run| most = line.node(run).len.max(most));
                if most > 0 {
                    break;
                }
            }
            u64::from(most)
        });
        longest.max().unwrap_or(0) * UNIT
    }

    /// Bytes in use of granules that also hold free bytes: what keeps those from moving. Walks the free runs.
    #[must_use]
    pub fn pinning(&self) -> u64 {
        // Free units by granule, of those that are in part free: only the granules at the ends of a run can be.
        let mut free: HashMap<u32, u64> = HashMap::new();
        for (k, line) in (0u8..).zip(&self.lines) {
            line.each_run(1, &mut |run| {
                let n = line.node(run);
                let (from, end) = (u64::from(n.start), u64::from(n.start + n.len));
                let first = self.granules.behind(k, n.start / PAGE);
                let last = self.granules.behind(k, (n.start + n.len - 1) / PAGE);
                let ends = [Some(first), (last != first).then_some(last)];
                for slot in ends.into_iter().flatten().filter(|slot| *slot != NONE) {
                    let Some(g) = self.granules.get(slot) else {
                        continue;
                    };
                    let page = u64::from(PAGE);
                    let (start, stop) = (u64::from(g.at) * page, u64::from(g.at + g.len) * page);
                    let inside = stop.min(end) - start.max(from);
                    *free.entry(slot).or_default() += inside;
                }
            });
        }
        let used = free.into_iter().filter_map(|(slot, units)| {
            let g = self.granules.get(slot)?;
            Some(u64::from(g.len) * PAGE_BYTES - units * UNIT)
        });
        used.sum()
    }

    /// All blocks and free runs, by address.
    #[must_use]
    pub fn pieces(&self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (k, line) in (0u8..).zip(&self.lines) {
            let shown = line.nodes().iter().filter_map(|n| {
                let mark = match n.state {
                    State::Live => Some(n.uses),
                    State::Free => None,
                    State::Vacant | State::Gap | State::Busy => return None,
                };
                Some(Piece {
                    addr: self.addr(k, n.start),
                    len: u64::from(n.len) * UNIT,
                    mark,
                })
            });
            pieces.extend(shown);
        }
        pieces.sort_unstable_by_key(|piece| piece.addr);
        pieces
    }

    /// All granules, by address.
    #[must_use]
    pub fn placed(&self) -> Vec<Placed> {
        let placed = self.granules.iter().map(|(_, g)| Placed {
            id: g.id,
            addr: self.addr(g.line, g.at * PAGE),
            len: u64::from(g.len) * PAGE_BYTES,
        });
        let mut placed: Vec<Placed> = placed.collect();
        placed.sort_unstable_by_key(|one| one.addr);
        placed
    }
}
