//! Recomputes everything from the lines and compares.

use super::lane::Lane;
use super::runs::{Node, State};
use super::{NONE, PAGE};

/// What an audit found wrong: which rule, in which line, at which unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The rule that is broken.
    pub rule: &'static str,
    /// The line.
    pub line: u8,
    /// The first unit of the piece in question.
    pub unit: u32,
}

/// What an audit adds up.
#[derive(Default)]
struct Sums {
    live: u64,
    blocks: u64,
    mapped: u64,
    busy: u64,
}

impl Lane {
    /// Checks that each line is tiled without overlap, that free runs and blocks lie over granules and gaps do not,
    /// that neighbours are joined, that indexes and tables know exactly what there is, and that the sums are right.
    ///
    /// # Errors
    /// The first [`Fault`] found.
    pub fn audit(&self) -> Result<(), Fault> {
        let mut sums = Sums::default();
        for line in 0..2u8 {
            self.audit_line(line, &mut sums)?;
            self.audit_lists(line)?;
        }
        let pages: u64 = self.granules.iter().map(|(_, g)| u64::from(g.len)).sum();
        let held = pages * u64::from(PAGE);
        let check = |ok: bool, rule| {
            if ok {
                Ok(())
            } else {
                Err(Fault {
                    rule,
                    line: 0,
                    unit: 0,
                })
            }
        };
        check(pages == self.granules.pages(), "granule pages add up")?;
        check(
            self.granules.iter().count() == self.granules.count(),
            "granules are counted",
        )?;
        check(sums.live == self.live_units, "live units add up")?;
        check(sums.blocks == self.live_blocks, "live blocks are counted")?;
        check(self.peak_units >= self.live_units, "the peak is the most")?;
        check(
            sums.mapped <= held && held <= sums.mapped + sums.busy,
            "blocks and runs fill the granules",
        )?;
        for (slot, g) in self.granules.iter() {
            let own = (g.at..g.at + g.len).all(|p| self.granules.behind(g.line, p) == slot);
            check(own, "a granule is behind its pages")?;
        }
        Ok(())
    }

    fn audit_line(&self, line: u8, sums: &mut Sums) -> Result<(), Fault> {
        let l = &self.lines[line as usize];
        let fault = |rule, n: &Node| Fault {
            rule,
            line,
            unit: n.start,
        };
        let mut heads = (0u32..)
            .zip(l.nodes())
            .filter(|(_, n)| n.state != State::Vacant && n.prev == NONE);
        let (mut at, head) = heads.next().ok_or(Fault {
            rule: "a line has a head",
            line,
            unit: 0,
        })?;
        if heads.next().is_some() {
            return Err(fault("a line has one head", head));
        }
        let (mut end, mut before, mut last) = (0u64, NONE, State::Vacant);
        while at != NONE {
            let n = l.node(at);
            if u64::from(n.start) != end || n.len == 0 || n.prev != before {
                return Err(fault("pieces follow each other", n));
            }
            if n.state == last && matches!(last, State::Free | State::Gap) {
                return Err(fault("neighbours are joined", n));
            }
            self.audit_piece(line, at, sums)?;
            end += u64::from(n.len);
            (before, last, at) = (at, n.state, n.next);
        }
        let (from, to) = self.units[line as usize];
        if end != to - from {
            return Err(Fault {
                rule: "pieces fill the line",
                line,
                unit: end as u32,
            });
        }
        Ok(())
    }

    fn audit_piece(&self, line: u8, at: u32, sums: &mut Sums) -> Result<(), Fault> {
        let n = self.lines[line as usize].node(at);
        let fault = |rule| Fault {
            rule,
            line,
            unit: n.start,
        };
        let behind = |p: u32| self.granules.behind(line, p) != NONE;
        let (first, last) = (n.start / PAGE, (n.start + n.len - 1) / PAGE);
        match n.state {
            State::Vacant => return Err(fault("no vacant node is in a line")),
            State::Live | State::Free => {
                let span = last - first;
                let ends = behind(first) && behind(last);
                if !ends || !(first..=first + span).all(behind) {
                    return Err(fault("blocks and runs are mapped"));
                }
                sums.mapped += u64::from(n.len);
            }
            State::Gap => {
                // beyond the last granule ever mapped no page is entered, so only a bounded part is walked
                let known = (first..=last).take_while(|&p| p < self.granules.known(line));
                if !n.start.is_multiple_of(PAGE)
                    || !n.len.is_multiple_of(PAGE)
                    || known.into_iter().any(behind)
                {
                    return Err(fault("gaps are whole pages and not mapped"));
                }
            }
            State::Busy => sums.busy += u64::from(n.len),
        }
        if n.state == State::Live {
            sums.live += u64::from(n.len);
            sums.blocks += 1;
            if self.tables[line as usize].get(n.start, n.len) != at {
                return Err(fault("the table knows each block"));
            }
        }
        Ok(())
    }

    /// The index holds each free run once, the list of gaps each gap once.
    fn audit_lists(&self, line: u8) -> Result<(), Fault> {
        let l = &self.lines[line as usize];
        let mut seen = Vec::new();
        l.each_run(1, &mut |run| seen.push(run));
        let mut gap = l.first_gap();
        while gap != NONE && seen.len() <= l.nodes().len() {
            seen.push(gap);
            gap = l.next_gap(gap);
        }
        seen.sort_unstable();
        let listed = |n: &Node| matches!(n.state, State::Free | State::Gap);
        let want: Vec<u32> = (0u32..)
            .zip(l.nodes())
            .filter(|(_, n)| listed(n))
            .map(|(i, _)| i)
            .collect();
        if seen == want {
            Ok(())
        } else {
            Err(Fault {
                rule: "each run and gap is listed once",
                line,
                unit: 0,
            })
        }
    }
}
