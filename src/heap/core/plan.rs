//! A miss in two steps: `plan` holds what it needs, `commit` or `abandon` settles it. The driver calls between the
//! two may fail, and other threads may allocate meanwhile.

use super::granules::Granule;
use super::lane::{Block, Lane, SMALL, Uses};
use super::place::Site;
use super::runs::State;
use super::tile::{Part, Rules, Spare, fill};
use super::{NONE, PAGE, PAGE_BYTES, UNIT};

/// A granule to map at a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// Where.
    pub addr: u64,
    /// Its bytes.
    pub len: u64,
    /// The name and old address of the granule to move there, and who else may still use it; `None`: another
    /// lane's, or a new one.
    pub old: Option<(u64, u64, u32)>,
    /// Which of the offered granules of other lanes is to come there.
    pub foreign: Option<usize>,
    at: u32,
    slot: u32,
    stale: u32,
}

impl Fill {
    /// Whether it takes a granule that is to be created.
    pub fn is_new(&self) -> bool {
        self.old.is_none() && self.foreign.is_none()
    }
}

/// A granule to unmap and return to the device first, since the sizes on hand did not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release {
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
    stale: u32,
}

/// The old mapping of a moved granule. Its place is held until `Lane::unmapped` is told that it is gone.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct Stale {
    /// The granule's name.
    pub id: u64,
    /// Where it was mapped.
    pub addr: u64,
    /// Its bytes.
    pub len: u64,
    pub(super) line: u8,
    pub(super) node: u32,
}

/// Why no plan was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Bytes asked for.
    pub requested: u64,
    /// Bytes that would have had to be created over the limit; 0 if it was addresses that ran out.
    pub lacking: u64,
    /// Bytes held.
    pub held: u64,
    /// Bytes held that were wholly free and could be moved.
    pub idle: u64,
    /// The limit.
    pub limit: u64,
}

/// What a miss needs. Settle it by `Lane::commit` or `Lane::abandon`; dropping it leaks what it holds.
#[derive(Debug)]
#[must_use]
pub struct Plan {
    /// What to map, in order of address.
    pub fills: Vec<Fill>,
    /// What to unmap and release before anything is created.
    pub releases: Vec<Release>,
    line: u8,
    start: u32,
    len: u32,
    /// Pieces of the window in order of address, and whether each was free.
    pieces: Vec<(u32, bool)>,
}

impl Plan {
    /// Bytes to create.
    pub fn created(&self) -> u64 {
        let new = self.fills.iter().filter(|f| f.is_new());
        new.map(|f| f.len).sum()
    }

    /// Whether it is for a small block.
    pub fn is_small(&self) -> bool {
        self.line == SMALL
    }
}

/// A gap in a window: index of its piece, its node, first page and pages to fill, and the pages before or after
/// those that may be covered too.
struct Hole {
    piece: usize,
    gap: u32,
    at: u32,
    pages: u32,
    before: u32,
    after: u32,
}

/// Granules of other lanes as spares, by their index.
fn offered_spares(offered: &[u64]) -> Vec<Spare> {
    let spare = |(slot, bytes): (u32, &u64)| Spare {
        slot,
        run: NONE,
        at: 0,
        len: (bytes / PAGE_BYTES) as u32,
        breaks: false,
    };
    (0..).zip(offered).map(spare).collect()
}

impl Lane {
    /// Plans how to make room for a block that `alloc` found no run for. The lane may hold `limit` bytes
    /// afterwards. `may_move` says of a granule by name, with the mark of the run it lies in, whether it may be
    /// taken away. `offered` are the bytes of granules of other lanes that may come here, above the limit.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the limit would be passed even with every free granule moved or released, or if no range
    /// of addresses is left. Nothing has changed then.
    pub fn plan(
        &mut self,
        size: u64,
        align: u64,
        limit: u64,
        uses: &mut impl Uses,
        may_move: &mut dyn FnMut(u64, u32) -> bool,
        offered: &[u64],
    ) -> Result<Plan, OutOfMemory> {
        let held = self.granules.pages();
        let hard = (limit / PAGE_BYTES)
            .saturating_sub(held)
            .min(u64::from(u32::MAX)) as u32;
        let free = self.free_pages();
        let fail = |lacking: u32| OutOfMemory {
            requested: size,
            lacking: u64::from(lacking) * PAGE_BYTES,
            held: held * PAGE_BYTES,
            idle: u64::from(free) * PAGE_BYTES,
            limit,
        };
        let (line, len, align) = self.shape(size, align).ok_or(fail(0))?;
        let more: u64 = offered.iter().map(|bytes| bytes / PAGE_BYTES).sum();
        let have = free.saturating_add(u32::try_from(more).unwrap_or(u32::MAX));
        let mut best: Option<((bool, u32, u32, u32), Site)> = None;
        self.each_site(line, len, align, |s| {
            let new = s.missing.saturating_sub(have - s.inside);
            // the fewest pages to map, unless only another place keeps within the limit
            let key = (
                new > hard,
                if new > hard { new } else { s.missing },
                new,
                s.start,
            );
            if best.is_none_or(|b| key < b.0) {
                best = Some((key, s));
            }
        });
        let (_, site) = best.ok_or(fail(0))?;
        let mut spares = offered_spares(offered);
        self.claim(line, len, site, hard, uses, &mut |lane: &Self| {
            spares.extend(lane.spares(may_move));
            spares.sort_unstable_by_key(|s| (s.len, s.at));
            std::mem::take(&mut spares)
        })
        .map_err(fail)
    }

    /// The live peak since memory last left in pages, with `len` more units.
    fn peak_with(&self, len: u32) -> u64 {
        let units = (self.live_units + u64::from(len)).max(self.peak_units);
        units.div_ceil(u64::from(PAGE))
    }

    /// Bounds of new granules for a request.
    fn rules(&self, line: u8, len: u32, hard: u32) -> Rules {
        let held = self.granules.pages();
        let peak = self.peak_with(len);
        let (block, limit) = (u64::from(len / PAGE), held + u64::from(hard));
        let sizes = self.policy.sizes(block, held, peak, limit);
        let goal = peak + peak * u64::from(self.policy.slack) / 10_000 + u64::from(sizes.step);
        let ease = goal.saturating_sub(held).min(u64::from(hard)) as u32;
        let (max, min) = match line {
            SMALL => (1, 1),
            _ => (sizes.max, sizes.step),
        };
        Rules { max, min, ease }
    }

    /// Leaves short runs whole if enough comes loose elsewhere or may be created: `missing` pages are.
    fn spare_runs(&self, spares: &mut Vec<Spare>, missing: u32, len: u32, hard: u32) {
        let held = self.granules.pages();
        let peak = self.peak_with(len);
        let most = peak + peak * u64::from(self.policy.spared) / 10_000;
        let room = most.saturating_sub(held).min(u64::from(hard));
        let loose = spares.iter().filter(|s| !s.breaks);
        let loose: u64 = loose.map(|s| u64::from(s.len)).sum();
        if loose + room >= u64::from(missing) {
            spares.retain(|s| !s.breaks);
        }
    }

    /// Wholly free pages of both lines.
    pub(super) fn free_pages(&self) -> u32 {
        let mut sum = 0;
        for (k, l) in self.lines.iter().enumerate() {
            l.each_run(PAGE, &mut |run| {
                let n = l.node(run);
                if let Some((a, b)) = self.granules.whole(k as u8, n.start, n.len) {
                    sum += b - a;
                }
            });
        }
        sum
    }

    /// Wholly free granules that may move, shortest first; among equals those at high addresses come last, and are
    /// taken first.
    pub(super) fn spares(&self, may_move: &mut dyn FnMut(u64, u32) -> bool) -> Vec<Spare> {
        let mut out = Vec::new();
        for (k, l) in self.lines.iter().enumerate() {
            l.each_run(PAGE, &mut |run| {
                let n = l.node(run);
                let Some((mut at, end)) = self.granules.whole(k as u8, n.start, n.len) else {
                    return;
                };
                let breaks = self.policy.breaks(n.len, (end - at) * PAGE);
                while at < end {
                    let slot = self.granules.behind(k as u8, at);
                    let Some(g) = self.granules.get(slot) else {
                        return;
                    };
                    if may_move(g.id, n.uses) {
                        out.push(Spare {
                            slot,
                            run,
                            at,
                            len: g.len,
                            breaks,
                        });
                    }
                    at += g.len;
                }
            });
        }
        out.sort_unstable_by_key(|s| (s.len, s.at));
        out
    }

    /// Holds the window and what fills it. `Err` gives the pages lacking.
    fn claim(
        &mut self,
        line: u8,
        len: u32,
        site: Site,
        hard: u32,
        uses: &mut impl Uses,
        spares: &mut dyn FnMut(&Self) -> Vec<Spare>,
    ) -> Result<Plan, u32> {
        let mut plan = Plan {
            line,
            start: site.start,
            len,
            fills: vec![],
            releases: vec![],
            pieces: vec![],
        };
        // the window first: its free parts are no sources once held
        let holes = self.claim_window(&mut plan, site);
        let mut spares = spares(self);
        self.spare_runs(&mut spares, site.missing, len, hard);
        if line == SMALL && site.missing <= hard {
            // one small block would pin all of a long granule
            let small = self.granules.iter().filter(|(_, g)| g.line == SMALL);
            let most = small.map(|(_, g)| g.len).sum::<u32>() / 4;
            spares.retain(|s| s.len <= most.max(1));
        }
        let mut rules = self.rules(line, len, hard);
        let mut held = Vec::new();
        for hole in holes {
            self.claim_hole(&mut plan, &hole, &mut spares, &mut rules, &mut held);
        }
        // what the limit does not allow is made room for by releasing spares whose size did not fit
        let new = plan.created() / PAGE_BYTES;
        let moved: u64 = held.iter().map(|(_, s)| u64::from(s.len)).sum();
        let mut over = ((new - moved) as u32).saturating_sub(hard);
        spares.retain(|s| !s.is_foreign());
        let mut out = Vec::new();
        while over > 0 && !spares.is_empty() {
            let pick = spares
                .partition_point(|s| s.len < over)
                .min(spares.len() - 1);
            let s = spares.remove(pick);
            over = over.saturating_sub(s.len);
            out.push(s);
        }
        self.hold(&mut plan, held, out);
        if over > 0 {
            self.abandon(plan, 0, uses);
            return Err(over);
        }
        Ok(plan)
    }

    /// Holds the free parts of the window; the gaps are returned, still open.
    fn claim_window(&mut self, plan: &mut Plan, site: Site) -> Vec<Hole> {
        let l = &mut self.lines[plan.line as usize];
        let end = site.start + plan.len;
        let mut holes = Vec::new();
        let mut at = site.first;
        loop {
            let n = *l.node(at);
            let (from, to) = (n.start.max(site.start), (n.start + n.len).min(end));
            let piece = if n.state == State::Free {
                l.claim_run(at, from, to - from)
            } else {
                let (a, b) = (from / PAGE, to.div_ceil(PAGE));
                let before = if from == site.start {
                    a - n.start / PAGE
                } else {
                    0
                };
                let after = if to == end {
                    (n.start + n.len) / PAGE - b
                } else {
                    0
                };
                holes.push(Hole {
                    piece: plan.pieces.len(),
                    gap: at,
                    at: a,
                    pages: b - a,
                    before,
                    after,
                });
                at
            };
            plan.pieces.push((piece, n.state == State::Free));
            if n.start + n.len >= end {
                return holes;
            }
            at = l.node(piece).next;
        }
    }

    /// Tiles one hole and holds its place; the granules to move are noted in `held` with the fill they serve.
    fn claim_hole(
        &mut self,
        plan: &mut Plan,
        hole: &Hole,
        spares: &mut Vec<Spare>,
        rules: &mut Rules,
        held: &mut Vec<(usize, Spare)>,
    ) {
        let mut parts = Vec::new();
        let room = if hole.after > 0 {
            hole.after
        } else {
            hole.before
        };
        fill(hole.pages, room, spares, rules, &mut parts);
        let total: u32 = parts.iter().map(Part::len).sum();
        let first = if hole.after > 0 {
            hole.at
        } else {
            hole.at + hole.pages - total
        };
        plan.pieces[hole.piece].0 =
            self.lines[plan.line as usize].claim_gap(hole.gap, first * PAGE, total * PAGE);
        let mut at = first;
        for part in parts {
            let mut foreign = None;
            match part {
                Part::Old(s) if s.is_foreign() => foreign = Some(s.slot as usize),
                Part::Old(s) => held.push((plan.fills.len(), s)),
                Part::New(_) => {}
            }
            plan.fills.push(Fill {
                addr: self.addr(plan.line, at * PAGE),
                len: u64::from(part.len()) * PAGE_BYTES,
                old: None,
                foreign,
                at,
                slot: NONE,
                stale: NONE,
            });
            at += part.len();
        }
    }

    /// Takes the ranges of granules to move or release out of their runs. From the highest address down, so that
    /// what is left below keeps its node.
    fn hold(&mut self, plan: &mut Plan, moved: Vec<(usize, Spare)>, released: Vec<Spare>) {
        let released = released.into_iter().map(|s| (usize::MAX, s));
        let mut all: Vec<(usize, Spare)> = moved.into_iter().chain(released).collect();
        all.sort_unstable_by_key(|(_, s)| std::cmp::Reverse(s.at));
        for (index, s) in all {
            let Some(g) = self.granules.get(s.slot) else {
                continue;
            };
            let l = &mut self.lines[g.line as usize];
            let stale = l.claim_run(s.run, g.at * PAGE, g.len * PAGE);
            let uses = l.node(stale).uses;
            let addr = self.addr(g.line, g.at * PAGE);
            if let Some(f) = plan.fills.get_mut(index) {
                (f.old, f.slot, f.stale) = (Some((g.id, addr, uses)), s.slot, stale);
            } else {
                let len = u64::from(g.len) * PAGE_BYTES;
                plan.releases.push(Release {
                    id: g.id,
                    addr,
                    len,
                    uses,
                    slot: s.slot,
                    line: g.line,
                    stale,
                });
            }
        }
    }

    /// Enters a plan whose driver calls are done, and gives the block. `id` names each new granule, in the order of
    /// `fills`. The places that granules were moved from are added to `stale`; they are held until `unmapped`.
    pub fn commit(
        &mut self,
        plan: Plan,
        id: &mut dyn FnMut() -> u64,
        uses: &mut impl Uses,
        stale: &mut Vec<Stale>,
    ) -> Block {
        for f in &plan.fills {
            let moved = self.granules.get(f.slot);
            if let (Some((id, addr, _)), Some(g)) = (f.old, moved) {
                self.granules.shift(f.slot, plan.line, f.at);
                stale.push(Stale {
                    id,
                    addr,
                    len: f.len,
                    line: g.line,
                    node: f.stale,
                });
            } else {
                let len = (f.len / PAGE_BYTES) as u32;
                self.granules.add(Granule {
                    id: id(),
                    line: plan.line,
                    at: f.at,
                    len,
                });
            }
        }
        for r in &plan.releases {
            self.granules.remove(r.slot);
            self.lines[r.line as usize].give_gap(r.stale);
        }
        let line = &mut self.lines[plan.line as usize];
        let (first, last) = (plan.pieces[0].0, plan.pieces[plan.pieces.len() - 1].0);
        let piece = line.join_busy(first, last, uses);
        let node = line.settle(piece, plan.start, plan.len, uses);
        self.enter(plan.line, node)
    }

    /// Gives back what a plan holds, as if it had never been made, but for its first `released` releases: those have
    /// been carried out.
    pub fn abandon(&mut self, plan: Plan, released: usize, uses: &mut impl Uses) {
        self.abandon_but(plan, released, uses, &mut |_, _| false, &mut Vec::new());
    }

    /// As `abandon`, for driver calls that could not all be undone. Places in which something is `stuck`, by address
    /// and bytes, stay held and are added to `held`, until `unmapped` is told that nothing is there any more.
    pub fn abandon_but(
        &mut self,
        plan: Plan,
        released: usize,
        uses: &mut impl Uses,
        stuck: &mut dyn FnMut(u64, u64) -> bool,
        held: &mut Vec<Stale>,
    ) {
        for f in plan.fills.iter().filter(|f| f.old.is_some()) {
            if let Some(g) = self.granules.get(f.slot) {
                self.lines[g.line as usize].give(f.stale, uses);
            }
        }
        for (i, r) in plan.releases.iter().enumerate() {
            if i < released {
                self.granules.remove(r.slot);
                self.lines[r.line as usize].give_gap(r.stale);
            } else {
                self.lines[r.line as usize].give(r.stale, uses);
            }
        }
        for (piece, free) in plan.pieces {
            let n = *self.lines[plan.line as usize].node(piece);
            let (addr, len) = (self.addr(plan.line, n.start), u64::from(n.len) * UNIT);
            if free {
                self.lines[plan.line as usize].give(piece, uses);
            } else if stuck(addr, len) {
                held.push(Stale {
                    id: u64::MAX,
                    addr,
                    len,
                    line: plan.line,
                    node: piece,
                });
            } else {
                self.lines[plan.line as usize].give_gap(piece);
            }
        }
    }

    /// An old mapping is gone: its place may be used again.
    pub fn unmapped(&mut self, stale: Stale) {
        self.lines[stale.line as usize].give_gap(stale.node);
    }
}
