//! Memory that goes from one stream's lane to another's: mapped there first, behind a wait of the
//! taking stream on the device. The host waits for nobody.

use std::sync::{Arc, Weak};

use super::core::Idle;
use super::lane::{Alias, Lane};
use crate::Result;
use crate::driver::PhysId;
use crate::pool::Granule;
use crate::stream::Fence;

/// A granule without a live byte that another stream's lane holds ready; goes back there when dropped.
pub(super) struct Offer {
    lane: Arc<Lane>,
    /// `None` once it was taken.
    idle: Option<Idle>,
    pub(super) phys: PhysId,
    pub(super) len: u64,
}

impl Offer {
    /// The granule, for another lane, whose stream waits for `fence`. Its old mapping goes once that
    /// has passed.
    pub(super) fn take(mut self, fence: Fence, taker: &Lane) -> Option<Granule> {
        let idle = self.idle.take()?;
        taker.add_lender(&self.lane);
        let mut state = self.lane.state.lock();
        state.in_hand -= 1;
        let granule = state.granules.remove(idle.id);
        let stale = state.core.lent(idle);
        state.stale.push_back(Alias {
            stale,
            fence: Some(fence),
        });
        granule
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        if let Some(idle) = self.idle.take() {
            let mut state = self.lane.state.lock();
            state.in_hand -= 1;
            state.quick.disturbed();
            state.core.kept(idle, &mut ());
        }
    }
}

/// The waits of a stream for others, one for each.
#[derive(Default)]
pub(super) struct Waits(Vec<(Arc<Lane>, Fence)>);

impl Waits {
    /// Makes a stream wait for whatever may still use an offer.
    pub(super) fn wait(&mut self, taker: &Lane, offer: &Offer) -> Result<()> {
        if self.of(offer).is_none() {
            // What is free in a lane is ordered before whatever its stream does next.
            let fence = offer.lane.stream().fence()?;
            taker.stream().wait(&fence)?;
            self.0.push((offer.lane.clone(), fence));
        }
        Ok(())
    }

    pub(super) fn of(&self, offer: &Offer) -> Option<Fence> {
        let mut known = self.0.iter();
        let known = known.find(|(lane, _)| Arc::ptr_eq(lane, &offer.lane));
        known.map(|(_, fence)| fence.clone())
    }

    pub(super) fn count(&self) -> usize {
        self.0.len()
    }
}

impl Lane {
    /// What other streams of this heap have without a live byte. Held for this lane while it looks.
    pub(super) fn ask_other_streams(&self) -> Vec<Offer> {
        let runs = |lane: &Lane| lane.stream().is_capturing() == Ok(false);
        let may = |lane: &Lane| lane.stream().is_retired() || runs(lane);
        let Some(heap) = self
            .heap()
            .filter(|_| self.config.aliases > 0 && runs(self))
        else {
            return Vec::new();
        };
        let lanes = heap.lanes.read().clone();
        let mut offers = Vec::new();
        for lane in lanes {
            if std::ptr::eq(Arc::as_ptr(&**lane), self) || lane.is_pinned() || !may(&lane) {
                continue;
            }
            lane.offer(&mut offers);
        }
        offers
    }

    fn offer(self: &Arc<Self>, offers: &mut Vec<Offer>) {
        let mut state = self.state.lock();
        state.flush();
        // As many as may be mapped twice; one allocation may pass the bound when there are no others.
        let room = match state.stale.len() {
            0 => usize::MAX,
            old => self.config.aliases.saturating_sub(old),
        };
        let mut idle = state.core.trim(u64::MAX, &mut |_, _| true);
        for one in idle.drain(room.min(idle.len())..) {
            state.quick.disturbed();
            state.core.kept(one, &mut ());
        }
        for one in idle {
            let Some(phys) = state.granules.phys(one.id) else {
                state.core.kept(one, &mut ());
                continue;
            };
            state.in_hand += 1;
            offers.push(Offer {
                lane: self.clone(),
                phys,
                len: one.len,
                idle: Some(one),
            });
        }
    }

    /// Notes that another lane has old mappings of granules which are here now.
    fn add_lender(&self, lender: &Arc<Self>) {
        let mut state = self.state.lock();
        let known = |one: &Weak<Self>| std::ptr::eq(one.as_ptr(), Arc::as_ptr(lender));
        if !state.lenders.iter().any(known) {
            state.lenders.push(Arc::downgrade(lender));
        }
    }

    /// Has other lanes unmap old mappings of what is here now.
    pub(super) fn retire_lent(&self) {
        let lenders = std::mem::take(&mut self.state.lock().lenders);
        if lenders.is_empty() {
            return;
        }
        let still = |lender: &Weak<Self>| {
            lender.upgrade().is_some_and(|lane| {
                lane.retire_own_aliases();
                !lane.state.lock().stale.is_empty()
            })
        };
        let kept: Vec<Weak<Self>> = lenders.into_iter().filter(still).collect();
        self.state.lock().lenders.extend(kept);
    }
}
