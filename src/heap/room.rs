//! Memory for a plan that is short: who is asked, in the order that hurts least.

use std::sync::Arc;
use std::time::Instant;

use super::core::PAGE_BYTES;
use super::front::Front;
use super::lane::{Lane, Use};
use super::miss::{Attempt, Short};
use super::retire::{GRACE, fence_uses};
use crate::pool::BUSY;
use crate::{Error, Limit, Result};

impl Lane {
    /// Finds memory elsewhere for a plan that is short, in the order that hurts least; an error if
    /// there is none.
    pub(super) fn make_room(&self, size: u64, short: &Short, attempt: &mut Attempt) -> Result<()> {
        let lacking = short.why.lacking;
        let error = match (&attempt.refused, lacking) {
            (Some((error, _)), _) => error.clone(),
            (None, 0) => Error::AddressSpaceExhausted {
                requested: size,
                reserved: self.range().len(),
                bound: self.range().len(),
            },
            (None, _) => self.short_of(size, short),
        };
        let budget = self.pool.shared().budget();
        if size > budget.min(self.config.limit.unwrap_or(u64::MAX)) {
            return Err(error);
        }
        if lacking > 0 {
            let want = lacking.max(PAGE_BYTES);
            let got = match self.heap().filter(|_| short.own) {
                Some(heap) => heap.give_back_idle(want, GRACE),
                None => self.pool.shared().reclaim(want),
            };
            if got > 0 {
                return Ok(());
            }
        }
        // Fences that were taken just now may be about to pass.
        if self.retire_limbo(GRACE) > 0 || self.wait_on_device(lacking)? > 0 {
            return Ok(());
        }
        if !std::mem::replace(&mut attempt.asked, true) {
            attempt.offers = self.ask_other_streams();
            if !attempt.offers.is_empty() {
                return Ok(());
            }
        }
        // Not kept from their own streams while this one waits.
        attempt.offers.clear();
        attempt.asked = false;
        let frees = Some(short.frees);
        self.wait_or_give_up(error, lacking == 0, attempt.started, frees)
    }

    /// The error for a plan that is short within the budget or the heap's limit.
    fn short_of(&self, size: u64, short: &Short) -> Error {
        let mut error = self.pool.shared().shortage(size, short.why.lacking);
        if let Error::OutOfMemory(shortage) = &mut error
            && short.own
        {
            shortage.limit = Limit::Heap;
        }
        error
    }

    /// Orders this stream behind other streams whose freed memory is in limbo here, without a wait
    /// of the host, until that much has become free; how many blocks.
    fn wait_on_device(&self, lacking: u64) -> Result<usize> {
        let waiting = self.take_limbo();
        let mut freed = Vec::new();
        let mut kept = Vec::new();
        let mut outcome = Ok(());
        let mut bytes = 0;
        for one in fence_uses(waiting) {
            if bytes >= lacking.max(1) {
                kept.push(one);
                continue;
            }
            let ordered = one.uses.iter().try_for_each(|used| match used {
                Use::Fence(fence) => self.stream().wait(fence),
                Use::Stream(stream) => self.stream().wait(&stream.fence()?),
            });
            match ordered {
                Ok(()) => {
                    bytes += one.len;
                    freed.push(one);
                }
                // A graph's stream waits for nobody, nor anybody for it.
                Err(Error::Capturing { .. }) => kept.push(one),
                Err(error) => {
                    outcome = outcome.and(Err(error));
                    kept.push(one);
                }
            }
        }
        let count = freed.len();
        self.put_limbo(&freed, kept);
        self.state.lock().counts.device_waits += count as u64;
        match count {
            0 => outcome.map(|()| 0),
            count => Ok(count),
        }
    }

    /// Pauses while there is something to wait for and time left; the error otherwise. Old mappings of
    /// moved granules hold addresses, and memory of the device once a granule has left, but nothing of
    /// the budget. If memory became free more than `frees` times, somebody was quicker than this look, and the next
    /// one may find it.
    pub(super) fn wait_or_give_up(
        &self,
        error: Error,
        aliases: bool,
        started: Instant,
        frees: Option<u64>,
    ) -> Result<()> {
        use crate::pool::Holder;
        let (pending, busy) = {
            let state = self.state.lock();
            let pending = state.limbo_bytes > 0 || aliases && !state.stale.is_empty();
            if frees.is_some_and(|frees| frees != state.frees) && started.elapsed() < BUSY {
                return Ok(());
            }
            (pending, state.in_hand > 0)
        };
        let shared = self.pool.shared();
        // What is idle here could be used at once, so it is not waited for.
        let pending = pending || shared.awaited() > self.awaited();
        let is_busy = |lane: &Arc<Front>| lane.state.lock().in_hand > 0;
        let heap = self.heap();
        let busy = busy
            || shared.is_releasing()
            || heap.is_some_and(|heap| heap.lanes.read().clone().iter().any(is_busy));
        let waited = started.elapsed();
        if !(pending && waited < self.config.wait || busy && waited < BUSY.max(self.config.wait)) {
            return Err(error);
        }
        self.state.lock().counts.host_waits += 1;
        self.pause();
        Ok(())
    }
}
