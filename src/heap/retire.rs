//! What becomes free later: memory that other streams used, old mappings, idle granules.
//!
//! Nothing here waits for work, and what cannot be asked or undone now is kept.

use std::time::{Duration, Instant};

use super::lane::{After, Alias, Broken, Lane, Limbo, Use};
use crate::driver::DriverKind;
use crate::pool::Granule;
use crate::stream::{Fence, Stream};
use crate::units::{Va, VaRange};

/// How long a fence that was just recorded may take to pass on a stream without work.
pub(super) const GRACE: Duration = Duration::from_micros(50);

impl Lane {
    /// Files what has become free: limbo whose fences have passed, old mappings nobody uses.
    pub(super) fn retire(&self) {
        self.retire_limbo(Duration::ZERO);
        self.retire_aliases();
        self.retire_broken();
    }

    /// All of the limbo, to look at without the lock; [`put_limbo`](Self::put_limbo) ends that.
    pub(super) fn take_limbo(&self) -> Vec<Limbo> {
        let mut state = self.state.lock();
        state.in_hand += 1;
        std::mem::take(&mut state.limbo)
    }

    pub(super) fn put_limbo(&self, freed: &[Limbo], kept: Vec<Limbo>) {
        let mut state = self.state.lock();
        state.in_hand -= 1;
        state.limbo.extend(kept);
        freed.iter().for_each(|one| state.unlimbo(one));
    }

    /// Files limbo whose fences have passed, or pass within `grace`; how much.
    pub(super) fn retire_limbo(&self, grace: Duration) -> usize {
        if self.state.lock().limbo.is_empty() {
            return 0;
        }
        let waiting = fence_uses(self.take_limbo());
        let started = Instant::now();
        let grace = self.grace(grace);
        // Blocks freed one after another mostly wait for the same fence.
        let mut last: Option<(Fence, bool)> = None;
        let mut has_passed = |fence: &Fence| match &last {
            Some((known, passed)) if known.is_same(fence) => *passed,
            _ => {
                let passed = passes_within(fence, grace.saturating_sub(started.elapsed()));
                last = Some((fence.clone(), passed));
                passed
            }
        };
        let passed = |one: &Limbo| {
            one.uses.iter().all(|used| match used {
                Use::Fence(fence) => has_passed(fence),
                Use::Stream(_) => false,
            })
        };
        let (freed, kept): (Vec<Limbo>, Vec<Limbo>) = waiting.into_iter().partition(passed);
        self.put_limbo(&freed, kept);
        freed.len()
    }

    /// Forgets recorded fences of a live block that have passed.
    pub(super) fn prune_uses(&self, addr: u64) {
        let passed: Vec<Fence> = {
            let state = self.state.lock();
            let uses = state.uses.get(&addr).into_iter().flatten();
            let fences = uses.filter_map(|used| match used {
                Use::Fence(fence) => Some(fence.clone()),
                Use::Stream(_) => None,
            });
            fences.collect()
        };
        let passed: Vec<Fence> = passed.into_iter().filter(is_done).collect();
        let keeps = |used: &Use| match used {
            Use::Fence(fence) => !passed.iter().any(|p| p.is_same(fence)),
            Use::Stream(_) => true,
        };
        if let Some(uses) = self.state.lock().uses.get_mut(&addr) {
            uses.retain(keeps);
        }
    }

    /// Whether blocks with an owner are left.
    pub(super) fn is_used(&self) -> bool {
        let mut state = self.state.lock();
        state.flush();
        state.owned() > 0 || state.empties > 0
    }

    /// Whether nothing is held here, so that nobody would miss this lane.
    pub(super) fn is_bare(&self) -> bool {
        let state = self.state.lock();
        let core = state.core.stats();
        core.held == 0
            && state.limbo.is_empty()
            && state.stale.is_empty()
            && state.broken.is_empty()
    }

    /// Unmaps old mappings whose fences have passed, also of granules that came from other lanes; how many
    /// of this lane's.
    pub(super) fn retire_aliases(&self) -> usize {
        self.retire_lent();
        self.retire_own_aliases()
    }

    pub(super) fn retire_own_aliases(&self) -> usize {
        let mut filed = 0;
        let mut refused = Vec::new();
        loop {
            let mut state = self.state.lock();
            let Some(mut alias) = state.stale.pop_front() else {
                break;
            };
            state.in_hand += 1;
            drop(state);
            if alias.fence.is_none() {
                alias.fence = self.stream().fence().ok();
            }
            let passed = alias.fence.as_ref().is_some_and(is_done);
            let unmapped = passed && self.unmap(alias.stale.addr, alias.stale.len);
            let mut state = self.state.lock();
            state.in_hand -= 1;
            match (passed, unmapped) {
                (_, true) => {
                    state.core.unmapped(alias.stale);
                    filed += 1;
                }
                // The others are behind it on the stream.
                (false, false) => {
                    state.stale.push_front(alias);
                    break;
                }
                (true, false) => refused.push(alias),
            }
        }
        if !refused.is_empty() {
            self.state.lock().stale.extend(refused);
        }
        filed
    }

    /// Unmaps the old mapping of a granule that moved, of which nothing is pending.
    pub(super) fn unmap_old(&self, alias: Alias) {
        let unmapped = self.unmap(alias.stale.addr, alias.stale.len);
        let mut state = self.state.lock();
        match unmapped {
            true => state.core.unmapped(alias.stale),
            false => state.stale.push_back(alias),
        }
    }

    fn retire_broken(&self) {
        let waiting = {
            let mut state = self.state.lock();
            if state.broken.is_empty() {
                return;
            }
            state.in_hand += 1;
            std::mem::take(&mut state.broken)
        };
        let mut kept = Vec::new();
        let mut free = Vec::new();
        for mut one in waiting {
            if self.may_unmap(&mut one) {
                let driver = self.pool.device().driver();
                one.stuck.retain(|s| driver.unmap(s.range).is_err());
            }
            match one.stuck.is_empty() {
                true => free.push(one.place),
                false => kept.push(one),
            }
        }
        let mut state = self.state.lock();
        state.in_hand -= 1;
        state.broken.extend(kept);
        free.into_iter()
            .for_each(|place| state.core.unmapped(place));
    }

    fn may_unmap(&self, broken: &mut Broken) -> bool {
        if let After::Unrecorded(stream) = &broken.after
            && let Ok(fence) = stream.fence()
        {
            broken.after = After::Fence(fence);
        }
        match &broken.after {
            After::Now => true,
            After::Unrecorded(_) => false,
            After::Fence(fence) => is_done(fence),
        }
    }

    /// How long to look at a fence again and again. On the simulated device looking is what moves the
    /// clock, and a stream without work says so at once.
    fn grace(&self, grace: Duration) -> Duration {
        match self.pool.device().kind() {
            DriverKind::Sim => Duration::ZERO,
            _ => grace,
        }
    }

    fn unmap(&self, addr: u64, len: u64) -> bool {
        let range = VaRange::new(Va::new(addr), len);
        range.is_some_and(|range| self.pool.device().driver().unmap(range).is_ok())
    }

    /// Unmaps wholly free granules and gives them to the pool, if this stream's work on them is done;
    /// `grace` is how long the device may take to say so.
    pub(super) fn give_back_idle(&self, want: u64, grace: Duration) -> u64 {
        self.retire();
        if self.is_pinned() {
            return 0;
        }
        let (idle, frees, known, replays) = {
            let mut state = self.state.lock();
            state.flush();
            let frees = state.frees;
            // Nothing was freed since, so all that is free was free before that fence.
            let known = state.calm.take().filter(|(_, at)| *at == frees);
            let idle = state.core.trim(want, &mut |_, _| true);
            (idle, frees, known, state.replays.clone())
        };
        if idle.is_empty() {
            return 0;
        }
        let grace = self.grace(grace);
        let fence = match known {
            Some((fence, _)) => Some(fence),
            None => self.stream().fence().ok(),
        };
        let mut others = replays.iter().map(Stream::fence);
        let passed = fence.as_ref().is_some_and(|f| passes_within(f, grace))
            && others.all(|f| f.is_ok_and(|f| passes_within(&f, grace)));
        if passed {
            // An old mapping would keep the memory alive.
            self.retire_aliases();
        }
        let mut bytes = 0;
        for one in idle {
            let unmapped = passed && self.unmap(one.addr, one.len);
            let mut state = self.state.lock();
            if !unmapped {
                state.quick.disturbed();
                state.core.kept(one, &mut ());
                continue;
            }
            bytes += one.len;
            if let Some(history) = &state.history {
                history.unmap(self.stream().key(), one.addr, one.len);
            }
            let granule = state.granules.remove(one.id);
            state.core.dropped(one);
            drop(state);
            // A refused release keeps the granule idle in the pool, which is as good.
            let _ = granule.map(Granule::give_back);
        }
        self.state.lock().calm = fence.map(|fence| (fence, frees));
        self.no_longer_held(bytes);
        bytes
    }
}

/// Takes the fences that are still to be taken, one for each stream. Lazily, here and not at the
/// free: most memory is never asked for.
pub(super) fn fence_uses(mut waiting: Vec<Limbo>) -> Vec<Limbo> {
    let mut taken: Vec<(Stream, Fence)> = Vec::new();
    for used in waiting.iter_mut().flat_map(|one| &mut one.uses) {
        let Use::Stream(stream) = used else { continue };
        let known = taken.iter().find(|(of, _)| of == stream);
        let fence = match known {
            Some((_, fence)) => fence.clone(),
            None => match stream.fence() {
                Ok(fence) => {
                    taken.push((stream.clone(), fence.clone()));
                    fence
                }
                Err(_) => continue,
            },
        };
        *used = Use::Fence(fence);
    }
    waiting
}

fn is_done(fence: &Fence) -> bool {
    fence.is_done().unwrap_or(false)
}

/// Whether a fence has passed, or passes as soon as the device has seen it.
fn passes_within(fence: &Fence, grace: Duration) -> bool {
    let started = Instant::now();
    loop {
        match fence.is_done() {
            Ok(true) => return true,
            Ok(false) if started.elapsed() < grace => crate::sync::yield_now(),
            _ => return false,
        }
    }
}
