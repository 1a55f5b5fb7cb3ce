//! Returning wholly free granules.

use super::lane::{Lane, Uses};
use super::plan::Stale;
use super::{PAGE, PAGE_BYTES};

/// A wholly free granule held for return. Settle it by `Lane::dropped` or `Lane::kept`.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct Idle {
    /// Its name.
    pub id: u64,
    /// Where it is mapped.
    pub addr: u64,
    /// Its bytes.
    pub len: u64,
    /// Who else may still use it.
    pub uses: u32,
    slot: u32,
    line: u8,
    node: u32,
}

impl Lane {
    /// Holds wholly free granules, highest addresses first, until they come to at least `bytes` or none is left.
    pub fn trim(&mut self, bytes: u64, may_move: &mut dyn FnMut(u64, u32) -> bool) -> Vec<Idle> {
        let mut spares = self.spares(may_move);
        spares.sort_unstable_by_key(|s| std::cmp::Reverse(s.at));
        let mut sum = 0;
        let mut out = Vec::new();
        for s in spares {
            let Some(g) = self.granules.get(s.slot).filter(|_| sum < bytes) else {
                break;
            };
            let l = &mut self.lines[g.line as usize];
            let node = l.claim_run(s.run, g.at * PAGE, g.len * PAGE);
            let uses = l.node(node).uses;
            let len = u64::from(g.len) * PAGE_BYTES;
            sum += len;
            let addr = self.addr(g.line, g.at * PAGE);
            out.push(Idle {
                id: g.id,
                addr,
                len,
                uses,
                slot: s.slot,
                line: g.line,
                node,
            });
        }
        out
    }

    /// Memory leaves: what was needed before is no measure any more.
    fn leave(&mut self, slot: u32) {
        self.granules.remove(slot);
        self.past_peak_units = self.past_peak_units.max(self.peak_units);
        self.peak_units = self.live_units;
    }

    /// An idle granule is unmapped and gone.
    pub fn dropped(&mut self, idle: Idle) {
        self.leave(idle.slot);
        self.lines[idle.line as usize].give_gap(idle.node);
    }

    /// An idle granule goes to another lane. Its place is held until `unmapped` is told that the mapping is gone.
    pub fn lent(&mut self, idle: Idle) -> Stale {
        self.leave(idle.slot);
        Stale {
            id: idle.id,
            addr: idle.addr,
            len: idle.len,
            line: idle.line,
            node: idle.node,
        }
    }

    /// An idle granule stays.
    pub fn kept(&mut self, idle: Idle, uses: &mut impl Uses) {
        self.lines[idle.line as usize].give(idle.node, uses);
    }
}
