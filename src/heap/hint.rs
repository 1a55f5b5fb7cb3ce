//! Which lanes a thread used last, so that it need not look for them in a list that all threads lock.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::Front;
use super::hub::Hub;
use crate::Result;
use crate::stream::Stream;
use crate::units::{Va, VaRange};

/// Lanes that a thread remembers.
const PLACES: usize = 4;

/// A lane that serves a heap's stream. No two ever have the same, but for one that comes when the first has gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LaneKey {
    heap: u64,
    stream: u64,
}

impl LaneKey {
    #[inline]
    pub(super) fn new(heap: u64, stream: &Stream) -> Self {
        Self {
            heap,
            stream: stream.serial(),
        }
    }
}

/// A number for a heap that no other has.
pub(super) fn next_heap() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Relaxed)
}

#[derive(Clone, Copy)]
pub(super) struct Hint {
    key: LaneKey,
    hub: &'static Hub,
    range: VaRange,
    largest: u64,
}

thread_local! {
    static LAST: [Cell<Option<Hint>>; PLACES] = const { [const { Cell::new(None) }; PLACES] };
    /// The very last.
    static LATEST: Cell<Option<Hint>> = const { Cell::new(None) };
}

#[inline]
fn place(stream: u64) -> usize {
    stream as usize % PLACES
}

/// Remembers a lane that serves its stream.
pub(super) fn remember(heap: u64, front: &Front) {
    let hint = Hint {
        key: LaneKey::new(heap, front.stream()),
        hub: front.hub(),
        range: front.range(),
        largest: front.largest(),
    };
    LAST.with(|last| last[place(hint.key.stream)].set(Some(hint)));
    LATEST.set(Some(hint));
}

/// The lane of a heap for a stream, if this thread remembers it.
#[inline]
pub(super) fn recall(key: LaneKey) -> Option<Hint> {
    let hint = LAST.with(|last| last[place(key.stream)].get())?;
    (hint.key == key).then_some(hint)
}

/// The lane of a heap that an address is of, if this thread looked for that one last.
#[inline]
pub(super) fn recall_at(heap: u64, addr: Va) -> Option<Hint> {
    let hint = LATEST.get()?;
    let inside = addr.get().wrapping_sub(hint.range.start().get());
    (hint.key.heap == heap && inside < hint.range.len()).then_some(hint)
}

impl Hint {
    /// What threads and blocks of the lane meet. Only for one who has the heap and the stream at hand and then saw that
    /// the stream was not retired: so the lane was there. If another thread retires the stream meanwhile, and the hub
    /// is lent on, then no magazine of it is this thread's before this thread opens one.
    #[inline]
    pub(super) fn hub(self) -> &'static Hub {
        self.hub
    }

    /// As [`Front::alloc_raw`], if the lane is still there and has mapped memory for that.
    #[inline]
    pub(super) fn hit_raw(self, size: u64, align: u64) -> Option<Va> {
        if size > self.largest || align > self.largest {
            return None;
        }
        self.hub.hit_raw(self.key, size, align)
    }

    /// Frees a block without an owner; `None` if the lane is not there any more.
    #[inline]
    pub(super) fn free_raw(self, addr: Va) -> Option<Result<()>> {
        self.hub.free_raw(self.key, addr)
    }
}

#[cfg(all(test, not(shuttle)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::{DEFAULT_ALIGN, Heap, HeapConfig};
    use super::*;
    use crate::driver::sim::SimConfig;
    use crate::pool::{Pool, PoolConfig};
    use crate::{Device, units::MIB};

    /// A heap with a stream, an address of its own, and what this thread remembers of the lane.
    fn used(device: &Device) -> (Heap, Stream, Va, Hint) {
        let pool = Pool::new(device, PoolConfig::with_budget(64 * MIB)).unwrap();
        let heap = Heap::new(&pool, HeapConfig::default()).unwrap();
        let stream = device.create_stream().unwrap();
        let addr = heap.alloc_raw(512, DEFAULT_ALIGN, &stream).unwrap();
        let hint = recall(LaneKey::new(heap.shared.id, &stream)).unwrap();
        (heap, stream, addr, hint)
    }

    #[test]
    fn a_hint_of_a_lane_that_went_gives_and_frees_nothing_of_the_next() {
        let device = Device::sim(SimConfig::default()).unwrap();
        let (heap, stream, _, old) = used(&device);
        drop((heap, stream));
        // Other tests' threads may be lent the hub first, and give it back.
        let (began, mut others) = (Instant::now(), Vec::new());
        let (heap, _stream, addr, new) = loop {
            let next = used(&device);
            if std::ptr::eq(next.3.hub, old.hub) {
                break next;
            }
            others.push(next);
            assert!(began.elapsed() < Duration::from_secs(60));
        };
        assert!(old.hit_raw(512, DEFAULT_ALIGN).is_none() && old.free_raw(addr).is_none());
        assert_eq!((heap.stats().blocks, heap.stats().allocs), (1, 1));
        let more = new.hit_raw(512, DEFAULT_ALIGN).unwrap();
        assert!(more != addr && new.free_raw(addr).unwrap().is_ok());
        heap.free_raw(more).unwrap();
        assert_eq!(heap.audit().unwrap().blocks, 0);
    }
}
