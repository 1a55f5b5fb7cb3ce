//! Private pools of PyTorch: what CUDA graphs and `torch.cuda.MemPool` allocate.
//!
//! A captured graph writes to the addresses that its tensors had, also long after these were freed. So memory of a private
//! pool goes to nobody else until PyTorch releases the pool: a freed block is kept, and handed out again only to the same
//! pool on the same stream. All of it is allocated on a stream of the pool's own, on which no work is ever queued, so that
//! no event is recorded on a stream under capture.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::sync::Mutex;
use crate::{Block, Heap, Result, Stream, StreamHeap};

/// PyTorch's name of a private pool.
pub(super) type PoolId = (u64, u64);

/// Whether an allocation on a stream belongs to a pool.
pub(super) type Filter = Arc<dyn Fn(u64) -> bool + Send + Sync>;

/// A kept block may be so much larger than what is asked, in eighths of it.
const SPARE_EIGHTHS: u64 = 1;

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

struct Scope {
    /// The heap's side for the pool's own stream.
    heap: StreamHeap,
    /// Freed blocks by stream and size.
    kept: BTreeMap<(u64, u64), Vec<Block>>,
    /// How many begins are not released.
    uses: usize,
}

struct Live {
    block: Block,
    stream: u64,
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
    pub(super) fn begin(&self, heap: &Heap, pool: PoolId, filter: Option<Filter>) -> Result<Begun> {
        let is_fresh = !self.state.lock().scopes.contains_key(&pool);
        // Calls the driver, so without the lock.
        let fresh = match is_fresh {
            true => Some(heap.on(&heap.pool().device().create_stream()?)?),
            false => None,
        };
        let mut state = self.state.lock();
        let other = |(id, other): &(PoolId, Option<Filter>)| {
            *id != pool && (filter.is_none() || other.is_none())
        };
        if state.active.iter().any(other) {
            return Ok(Begun::Ambiguous);
        }
        if let Some(heap) = fresh
            && !state.scopes.contains_key(&pool)
        {
            let scope = Scope {
                heap,
                kept: BTreeMap::new(),
                uses: 0,
            };
            state.scopes.insert(pool, scope);
            self.known.fetch_add(1, Relaxed);
        }
        if let Some(scope) = state.scopes.get_mut(&pool) {
            scope.uses += 1;
        }
        state.active.push((pool, filter));
        self.active.store(state.active.len(), Relaxed);
        Ok(Begun::Yes)
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
    pub(super) fn release(&self, pool: PoolId, streams: &[Stream]) {
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
        let kept = scope.into_iter().flat_map(|scope| scope.kept);
        for block in kept.flat_map(|(_, blocks)| blocks) {
            free_behind(block, streams);
        }
    }

    /// A block of the pool that an allocation belongs to; `None` if it belongs to none.
    pub(super) fn alloc(&self, size: u64, stream: u64) -> Result<Option<u64>> {
        if self.active.load(Relaxed) == 0 {
            return Ok(None);
        }
        let active = self.state.lock().active.clone();
        // Filters ask the driver about the stream, so without the lock.
        let applies = |(id, filter): &(PoolId, Option<Filter>)| {
            filter.as_ref().is_none_or(|f| f(stream)).then_some(*id)
        };
        let Some(pool) = active.iter().rev().find_map(applies) else {
            return Ok(None);
        };
        let (kept, heap) = {
            let mut state = self.state.lock();
            let Some(scope) = state.scopes.get_mut(&pool) else {
                return Ok(None);
            };
            (scope.take(size, stream), scope.heap.clone())
        };
        let block = match kept {
            Some(block) => block,
            None => heap.alloc(size)?,
        };
        let addr = block.ptr().get();
        let live = Live {
            block,
            stream,
            pool,
        };
        self.state.lock().live.insert(addr, live);
        Ok(Some(addr))
    }

    /// Frees a block of a pool; false if it is none.
    pub(super) fn free(&self, addr: u64, streams: impl FnOnce() -> Vec<Stream>) -> bool {
        if self.known.load(Relaxed) == 0 {
            return false;
        }
        let orphan = {
            let mut state = self.state.lock();
            let Some(live) = state.live.remove(&addr) else {
                return false;
            };
            match state.scopes.get_mut(&live.pool) {
                Some(scope) => {
                    let key = (live.stream, live.block.len());
                    scope.kept.entry(key).or_default().push(live.block);
                    return true;
                }
                None => {
                    if !state.live.values().any(|other| other.pool == live.pool) {
                        self.known.fetch_sub(1, Relaxed);
                    }
                    live.block
                }
            }
        };
        free_behind(orphan, &streams());
        true
    }

    /// Whether a block is one of a pool.
    pub(super) fn holds(&self, addr: u64) -> bool {
        self.known.load(Relaxed) > 0 && self.state.lock().live.contains_key(&addr)
    }
}

impl Scope {
    /// The smallest kept block that fits without much waste.
    fn take(&mut self, size: u64, stream: u64) -> Option<Block> {
        let most = size.saturating_add(size / 8 * SPARE_EIGHTHS);
        let found = self.kept.range((stream, size)..=(stream, most)).next();
        let key = *found?.0;
        let blocks = self.kept.get_mut(&key)?;
        let block = blocks.pop();
        if blocks.is_empty() {
            self.kept.remove(&key);
        }
        block
    }
}

/// Frees a block after all that these streams have queued.
fn free_behind(block: Block, streams: &[Stream]) {
    for stream in streams {
        if let Err(error) = block.record_use(stream) {
            tracing::warn!(%error, "a use of a private pool is not known");
        }
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

    #[test]
    fn memory_of_a_pool_goes_to_nobody_else_until_its_release() {
        let (heap, scopes) = (heap(), Scopes::default());
        let stream = heap.pool().device().default_stream().unwrap();
        assert_eq!(scopes.begin(&heap, POOL, None).unwrap(), Begun::Yes);
        let kept: Vec<u64> = (0..12)
            .map(|_| scopes.alloc(4 * MIB, 0).unwrap().unwrap())
            .collect();
        assert!(kept.iter().all(|addr| scopes.free(*addr, Vec::new)));
        scopes.end(POOL);
        assert_eq!(scopes.alloc(MIB, 0).unwrap(), None);
        assert!(!scopes.free(kept[0], Vec::new), "freed twice");
        // 48 of 64 MiB are kept, also from somebody in need.
        assert!(
            heap.alloc(32 * MIB, &stream)
                .unwrap_err()
                .is_out_of_memory()
        );
        assert_eq!(heap.trim(), 0);
        scopes.release(POOL, std::slice::from_ref(&stream));
        drop(heap.alloc(32 * MIB, &stream).unwrap());
        assert_eq!(scopes.known.load(Relaxed), 0);
        assert_eq!(heap.audit().unwrap().blocks, 0);
    }

    #[test]
    fn only_what_passes_the_filter_belongs_to_a_pool() {
        let (heap, scopes) = (heap(), Scopes::default());
        let on = |wanted: u64| -> Filter { Arc::new(move |stream| stream == wanted) };
        assert_eq!(scopes.begin(&heap, POOL, Some(on(1))).unwrap(), Begun::Yes);
        assert_eq!(
            scopes.begin(&heap, (9, 9), Some(on(2))).unwrap(),
            Begun::Yes
        );
        assert_eq!(scopes.begin(&heap, (5, 5), None).unwrap(), Begun::Ambiguous);
        let (a, b) = (scopes.alloc(100, 1).unwrap(), scopes.alloc(100, 2).unwrap());
        assert_eq!(scopes.alloc(100, 3).unwrap(), None);
        scopes.release(POOL, &[]);
        // A block that outlives its pool.
        assert!(scopes.holds(a.unwrap()));
        assert!(scopes.free(a.unwrap(), Vec::new) && scopes.free(b.unwrap(), Vec::new));
        assert_eq!(scopes.known.load(Relaxed), 1);
        scopes.end((9, 9));
        scopes.end(POOL);
        scopes.release((9, 9), &[]);
        assert_eq!(scopes.known.load(Relaxed), 0);
        assert_eq!(heap.audit().unwrap().blocks, 0);
    }

    #[test]
    fn a_kept_block_serves_what_nearly_fills_it() {
        let (heap, scopes) = (heap(), Scopes::default());
        scopes.begin(&heap, POOL, None).unwrap();
        let a = scopes.alloc(8 * MIB, 1).unwrap().unwrap();
        scopes.free(a, Vec::new);
        assert_ne!(
            scopes.alloc(4 * MIB, 1).unwrap(),
            Some(a),
            "half of it would be lost"
        );
        assert_ne!(scopes.alloc(8 * MIB, 2).unwrap(), Some(a), "another stream");
        assert_eq!(scopes.alloc(15 * MIB / 2, 1).unwrap(), Some(a));
    }
}
