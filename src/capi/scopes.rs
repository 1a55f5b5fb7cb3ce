//! Private pools of PyTorch: what CUDA graphs and `torch.cuda.MemPool` allocate.
//!
//! A captured graph writes to the addresses that its tensors had, also long after these were freed. So memory of a private
//! pool goes to nobody else until PyTorch releases the pool. Each stream that allocates for a pool has a [`CaptureScope`] for
//! it: what is freed there is handed out again in the order of that stream, no granule of it moves, and
//! nothing is queued on a stream under capture.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::sync::Mutex;
use crate::{Block, CaptureScope, Heap, Result, Stream};

/// PyTorch's name of a private pool.
pub(super) type PoolId = (u64, u64);

/// Whether an allocation on a stream belongs to a pool.
pub(super) type Filter = Arc<dyn Fn(u64) -> bool + Send + Sync>;

/// The private pools of one device.
#[derive(Default)]
pub(super) struct Scopes {
    /// Pools that exist and blocks of released ones: while it is 0, nothing here is looked at.
    known: AtomicUsize,
    /// Pools that allocations may belong to just now.
    active: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Between begin and end, the newest last.
    active: Vec<(PoolId, Option<Filter>)>,
    scopes: HashMap<PoolId, Scope>,
    /// Live blocks, by address.
    live: HashMap<u64, Live>,
}

#[derive(Default)]
struct Scope {
    /// Its memory, by stream.
    parts: HashMap<u64, Arc<CaptureScope>>,
    /// How many begins are not released.
    uses: usize,
}

struct Live {
    block: Arc<Block>,
    pool: PoolId,
}

/// What came of a begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Begun {
    Yes,
    /// Another pool is active, and without a filter nobody can tell whose an allocation is.
    Ambiguous,
}

impl Scopes {
    /// Allocations that pass the filter go to the pool from now on; all of them without one.
    pub(super) fn begin(&self, pool: PoolId, filter: Option<Filter>) -> Begun {
        let mut state = self.state.lock();
        let other = |(id, other): &(PoolId, Option<Filter>)| {
            *id != pool && (filter.is_none() || other.is_none())
        };
        if state.active.iter().any(other) {
            return Begun::Ambiguous;
        }
        let scope = state.scopes.entry(pool).or_default();
        scope.uses += 1;
        if scope.uses == 1 {
            self.known.fetch_add(1, Relaxed);
        }
        state.active.push((pool, filter));
        self.active.store(state.active.len(), Relaxed);
        Begun::Yes
    }

    /// Allocations go to the heap again.
    pub(super) fn end(&self, pool: PoolId) {
        let ended = {
            let mut state = self.state.lock();
            let at = state.active.iter().rposition(|(id, _)| *id == pool);
            let ended = at.map(|at| state.active.remove(at));
            self.active.store(state.active.len(), Relaxed);
            ended
        };
        // Without the lock: the filter is somebody else's.
        drop(ended);
    }

    /// Gives the memory of a pool up for good, as often as it was begun. `streams` may still run its graphs.
    pub(super) fn release(&self, pool: PoolId, streams: impl FnOnce() -> Vec<Stream>) {
        let scope = {
            let mut state = self.state.lock();
            let Some(scope) = state.scopes.get_mut(&pool) else {
                return;
            };
            scope.uses = scope.uses.saturating_sub(1);
            if scope.uses > 0 {
                return;
            }
            let scope = state.scopes.remove(&pool);
            if !state.live.values().any(|live| live.pool == pool) {
                self.known.fetch_sub(1, Relaxed);
            }
            scope
        };
        let streams = streams();
        for part in scope.iter().flat_map(|scope| scope.parts.values()) {
            for stream in &streams {
                if let Err(error) = part.record_replay(stream) {
                    tracing::warn!(%error, "a use of a private pool is not known");
                }
            }
        }
    }

    /// A block of the pool that an allocation belongs to; `None` if it belongs to none. `stream` makes the stream out of its
    /// raw handle.
    pub(super) fn alloc(
        &self,
        heap: &Heap,
        size: u64,
        raw: u64,
        stream: impl FnOnce() -> Result<Stream>,
    ) -> Result<Option<u64>> {
        if self.active.load(Relaxed) == 0 {
            return Ok(None);
        }
        let active = self.state.lock().active.clone();
        // Filters ask the driver about the stream, so without the lock.
        let applies = |(id, filter): &(PoolId, Option<Filter>)| {
            filter.as_ref().is_none_or(|f| f(raw)).then_some(*id)
        };
        let Some(pool) = active.iter().rev().find_map(applies) else {
            return Ok(None);
        };
        let known = match self.state.lock().scopes.get(&pool) {
            Some(scope) => scope.parts.get(&raw).cloned(),
            None => return Ok(None),
        };
        let part = match known {
            Some(part) => part,
            None => {
                // Calls the driver, so without the lock.
                let fresh = Arc::new(heap.capture_scope(&stream()?)?);
                let mut state = self.state.lock();
                match state.scopes.get_mut(&pool) {
                    Some(scope) => scope.parts.entry(raw).or_insert(fresh.clone()).clone(),
                    // Released meanwhile: it goes with its last block.
                    None => fresh.clone(),
                }
            }
        };
        let block = Arc::new(part.alloc(size)?);
        let addr = block.ptr().get();
        let mut state = self.state.lock();
        let is_known =
            state.scopes.contains_key(&pool) || state.live.values().any(|other| other.pool == pool);
        if !is_known {
            // Released meanwhile: the block is what is left of it.
            self.known.fetch_add(1, Relaxed);
        }
        state.live.insert(addr, Live { block, pool });
        Ok(Some(addr))
    }

    /// Frees a block of a pool; false if it is none. `streams` may still run graphs of a pool that is gone.
    pub(super) fn free(&self, addr: u64, streams: impl FnOnce() -> Vec<Stream>) -> bool {
        if self.known.load(Relaxed) == 0 {
            return false;
        }
        let (live, is_orphan) = {
            let mut state = self.state.lock();
            let Some(live) = state.live.remove(&addr) else {
                return false;
            };
            let is_orphan = !state.scopes.contains_key(&live.pool);
            if is_orphan && !state.live.values().any(|other| other.pool == live.pool) {
                self.known.fetch_sub(1, Relaxed);
            }
            (live, is_orphan)
        };
        if is_orphan {
            for stream in streams() {
                if let Err(error) = live.block.record_use(&stream) {
                    tracing::warn!(%error, "a use of a private pool is not known");
                }
            }
        }
        // Without the lock: the heap may have work with it.
        drop(live);
        true
    }

    /// Whether a block is one of a pool.
    pub(super) fn holds(&self, addr: u64) -> bool {
        self.known.load(Relaxed) > 0 && self.state.lock().live.contains_key(&addr)
    }

    /// A block of a pool.
    pub(super) fn block(&self, addr: u64) -> Option<Arc<Block>> {
        if self.known.load(Relaxed) == 0 {
            return None;
        }
        let state = self.state.lock();
        state.live.get(&addr).map(|live| live.block.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::sim::SimConfig;
    use crate::units::MIB;
    use crate::{Device, HeapConfig, Pool, PoolConfig};

    const POOL: PoolId = (3, 4);

    fn heap() -> Heap {
        let device = Device::sim(SimConfig::default()).unwrap();
        let pool = Pool::new(&device, PoolConfig::with_budget(64 * MIB)).unwrap();
        Heap::new(&pool, HeapConfig::default()).unwrap()
    }

    /// An allocation on a stream of that number; the default stream stands for each of them.
    fn take(scopes: &Scopes, heap: &Heap, size: u64, raw: u64) -> Option<u64> {
        let stream = || heap.pool().device().default_stream();
        scopes.alloc(heap, size, raw, stream).unwrap()
    }

    #[test]
    fn memory_of_a_pool_goes_to_nobody_else_until_its_release() {
        let (heap, scopes) = (heap(), Scopes::default());
        let stream = heap.pool().device().default_stream().unwrap();
        assert_eq!(scopes.begin(POOL, None), Begun::Yes);
        let kept: Vec<u64> = (0..12)
            .map(|_| take(&scopes, &heap, 4 * MIB, 0).unwrap())
            .collect();
        assert!(kept.iter().all(|addr| scopes.free(*addr, Vec::new)));
        scopes.end(POOL);
        assert_eq!(take(&scopes, &heap, MIB, 0), None);
        assert!(!scopes.free(kept[0], Vec::new), "freed twice");
        // 48 of 64 MiB are kept, also from somebody in need.
        assert!(
            heap.alloc(32 * MIB, &stream)
                .unwrap_err()
                .is_out_of_memory()
        );
        assert_eq!(heap.trim(), 0);
        scopes.release(POOL, || vec![stream.clone()]);
        drop(heap.alloc(32 * MIB, &stream).unwrap());
        assert_eq!(scopes.known.load(Relaxed), 0);
        assert_eq!(heap.audit().unwrap().blocks, 0);
    }

    #[test]
    fn only_what_passes_the_filter_belongs_to_a_pool() {
        let (heap, scopes) = (heap(), Scopes::default());
        let on = |wanted: u64| -> Filter { Arc::new(move |stream| stream == wanted) };
        assert_eq!(scopes.begin(POOL, Some(on(1))), Begun::Yes);
        assert_eq!(scopes.begin((9, 9), Some(on(2))), Begun::Yes);
        assert_eq!(scopes.begin((5, 5), None), Begun::Ambiguous);
        let (a, b) = (
            take(&scopes, &heap, 100, 1).unwrap(),
            take(&scopes, &heap, 100, 2).unwrap(),
        );
        assert_eq!(take(&scopes, &heap, 100, 3), None);
        scopes.release(POOL, Vec::new);
        // A block that outlives its pool.
        assert!(scopes.holds(a));
        assert!(scopes.free(a, Vec::new) && scopes.free(b, Vec::new));
        assert_eq!(scopes.known.load(Relaxed), 1);
        scopes.end((9, 9));
        scopes.end(POOL);
        scopes.release((9, 9), Vec::new);
        assert_eq!(scopes.known.load(Relaxed), 0);
        assert_eq!(heap.audit().unwrap().blocks, 0);
    }

    #[test]
    fn what_is_freed_in_a_pool_is_used_again_on_its_stream() {
        let (heap, scopes) = (heap(), Scopes::default());
        scopes.begin(POOL, None);
        let a = take(&scopes, &heap, 8 * MIB, 1).unwrap();
        scopes.free(a, Vec::new);
        let b = take(&scopes, &heap, 8 * MIB, 2).unwrap();
        assert_ne!(a, b, "another stream");
        let parts = [4 * MIB, 4 * MIB].map(|size| take(&scopes, &heap, size, 1).unwrap());
        assert_eq!(parts, [a, a + 4 * MIB]);
    }

    #[test]
    fn a_recorded_use_keeps_a_block_from_its_own_pool() {
        let (heap, scopes) = (heap(), Scopes::default());
        let device = heap.pool().device().clone();
        let other = device.create_stream().unwrap();
        scopes.begin(POOL, None);
        let a = take(&scopes, &heap, 8 * MIB, 1).unwrap();
        let block = scopes.block(a).unwrap();
        block.record_use(&other).unwrap();
        let driver = device.driver();
        driver.fill(block.range(), 1, other.id()).unwrap();
        drop(block);
        scopes.free(a, Vec::new);
        assert_ne!(take(&scopes, &heap, 8 * MIB, 1), Some(a), "still in use");
        other.synchronize().unwrap();
        assert_eq!(take(&scopes, &heap, 8 * MIB, 1), Some(a));
    }

    #[test]
    fn a_stream_that_is_first_met_under_capture_has_its_memory_in_the_pool() {
        let (heap, scopes) = (heap(), Scopes::default());
        let device = heap.pool().device().clone();
        let driver = device.driver();
        let id = driver.create_stream().unwrap();
        let take = |size| {
            let stream = || device.foreign_stream(id);
            scopes.alloc(&heap, size, id.0, stream).unwrap().unwrap()
        };
        scopes.begin(POOL, None);
        driver.begin_capture(id).unwrap();
        let a = take(4 * MIB);
        driver
            .fill(scopes.block(a).unwrap().range(), 7, id)
            .unwrap();
        scopes.free(a, Vec::new);
        let b = take(2 * MIB);
        assert_eq!(a, b);
        let graph = driver.end_capture(id).unwrap();
        scopes.end(POOL);
        let stream = device.foreign_stream(id).unwrap();
        graph.launch(id).unwrap();
        scopes.release(POOL, || vec![stream.clone()]);
        assert!(scopes.free(b, || vec![stream.clone()]));
        stream.synchronize().unwrap();
        heap.trim();
        assert_eq!(heap.audit().unwrap().held, 0);
        assert_eq!(scopes.known.load(Relaxed), 0);
    }
}
