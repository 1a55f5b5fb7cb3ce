//! What an out-of-memory error of a heap says besides the pool's figures.

use std::sync::Arc;

use super::lane::Lane;
use super::request::Request;
use super::{HeapStats, Shared};
use crate::{Error, HeapShortage, OutOfMemory};

impl Shared {
    /// How this heap stands, as a stream that found no memory sees it. Streams are looked at one after
    /// another.
    fn shortage(&self, asking: &Lane) -> HeapShortage {
        let lanes = self.lanes.read().clone();
        let mut stats = HeapStats::default();
        let (mut pinning, mut largest_free, mut scoped) = (0, 0, 0);
        for lane in lanes {
            let mut state = lane.state.lock();
            state.flush();
            state.add_to(&mut stats);
            pinning += state.core.pinning();
            if lane.is_pinned() {
                scoped += state.core.held();
            }
            if std::ptr::eq(Arc::as_ptr(&**lane), asking) {
                largest_free = state.core.largest_free();
            }
        }
        let mapped = self.pool.stats().mapped;
        HeapShortage {
            held: stats.held,
            limit: self.config.limit,
            live: stats.live,
            free: stats.free,
            largest_free,
            idle: stats.idle,
            // Blocks that other threads freed just now are no longer live.
            pinning: pinning.min(stats.live),
            limbo: stats.limbo,
            scoped,
            aliases: stats.aliases,
            others: mapped.saturating_sub(stats.held),
        }
    }

    /// Adds what is known of the request and of this heap to an error that says memory ran out.
    pub(super) fn explain(&self, error: Error, request: &Request<'_>, asking: &Lane) -> Error {
        match error {
            Error::OutOfMemory(shortage) => Error::OutOfMemory(Box::new(OutOfMemory {
                requested: request.len,
                name: request.name.cloned(),
                heap: Some(self.shortage(asking)),
                ..*shortage
            })),
            other => other,
        }
    }
}
