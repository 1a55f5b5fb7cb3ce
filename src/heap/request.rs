//! An allocation that mapped memory does not serve: tried, explained, and put to the heap's callback.

use super::core::Block as Found;
use super::lane::Lane;
use super::name::BlockName;
use crate::{Error, Result};

/// What was asked of a lane.
pub(super) struct Request<'a> {
    /// Bytes asked for.
    pub(super) len: u64,
    /// Those, rounded.
    pub(super) size: u64,
    pub(super) align: u64,
    pub(super) name: Option<&'a BlockName>,
}

impl Lane {
    /// A block by way of the driver. Asks the heap's callback where there is none.
    pub(super) fn miss(&self, request: &Request<'_>) -> Result<Found> {
        self.state.lock().counts.misses += 1;
        // Booked on every way out, also when the callback panics.
        let failed = Failed(self);
        let mut attempt = 0u32;
        loop {
            let error = match self.seek(request.size, request.align) {
                Ok(found) => {
                    std::mem::forget(failed);
                    return Ok(found);
                }
                Err(error) => error,
            };
            attempt = attempt.saturating_add(1);
            let heap = self.heap().filter(|_| is_shortage(&error));
            if is_shortage(&error) {
                self.tell_short(request.len);
            }
            let Some(heap) = heap else { return Err(error) };
            let error = heap.explain(error, request, self);
            let name = request.name.map(|name| &**name);
            let requested = request.len;
            tracing::debug!(%error, requested, name, attempt, "heap out of memory");
            if !heap.asks_for_retry(request, self.stream(), attempt, &error) {
                return Err(error);
            }
        }
    }
}

impl Lane {
    /// Tells the history of a request that found no memory.
    fn tell_short(&self, requested: u64) {
        let Some(history) = self.history() else {
            return;
        };
        let info = self.pool.device().memory_info();
        let free = info.map_or(0, |info| info.free);
        history.out_of_memory(self.stream().key(), requested, free);
        history.say();
    }
}

/// Whether a callback that frees memory may help.
fn is_shortage(error: &Error) -> bool {
    error.is_out_of_memory() || matches!(error, Error::AddressSpaceExhausted { .. })
}

/// Books a failure of a lane when dropped.
struct Failed<'a>(&'a Lane);

impl Drop for Failed<'_> {
    fn drop(&mut self) {
        self.0.state.lock().counts.failures += 1;
    }
}
