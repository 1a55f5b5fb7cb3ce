//! The callback of a heap that is out of memory.

use std::fmt;
use std::sync::Arc;

use super::name::BlockName;
use super::request::Request;
use super::{Heap, Shared};
use crate::stream::Stream;
use crate::sync::{Mutex, ThreadId, this_thread};
use crate::{Error, OutOfMemory};

/// An allocation that is about to fail, as the heap's callback sees it.
#[derive(Debug)]
#[non_exhaustive]
pub struct OomEvent<'a> {
    /// The heap. A callback that keeps a clone of its own keeps the heap alive for ever.
    pub heap: &'a Heap,
    /// Bytes asked for.
    pub requested: u64,
    /// Alignment asked for, in bytes.
    pub align: u64,
    /// How often memory has run out for this allocation, this time included: 1 at first.
    pub attempt: u32,
    /// The stream the block is for.
    pub stream: &'a Stream,
    /// The name the block is to have.
    pub name: Option<&'a BlockName>,
    /// What the allocation will answer.
    pub error: &'a Error,
}

impl OomEvent<'_> {
    /// The figures, unless it was addresses that ran out, or the driver that said so by itself.
    #[must_use]
    pub fn shortage(&self) -> Option<&OutOfMemory> {
        match self.error {
            Error::OutOfMemory(shortage) => Some(shortage),
            _ => None,
        }
    }
}

/// What is to become of an allocation that found no memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OomAnswer {
    /// Try again: something was freed.
    Retry,
    /// Answer with the error.
    Fail,
}

/// What a heap calls when an allocation is about to fail.
type Callback = Arc<dyn Fn(&OomEvent<'_>) -> OomAnswer + Send + Sync>;

/// A heap's callback.
#[derive(Default)]
pub(super) struct OnOom {
    callback: Mutex<Option<Callback>>,
    /// The threads that are in it.
    inside: Mutex<Vec<ThreadId>>,
}

impl OnOom {
    /// Marks that this thread is in the callback; `None` if it is already.
    fn enter(&self) -> Option<Inside<'_>> {
        let thread = this_thread();
        let mut inside = self.inside.lock();
        let fresh = !inside.contains(&thread);
        fresh.then(|| {
            inside.push(thread);
            Inside(self, thread)
        })
    }
}

/// A thread in the callback, until dropped; also by a panic.
struct Inside<'a>(&'a OnOom, ThreadId);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.inside.lock().retain(|thread| *thread != self.1);
    }
}

impl Shared {
    /// Asks the callback whether to try again. The caller holds no lock.
    pub(super) fn asks_for_retry(
        self: &Arc<Self>,
        request: &Request<'_>,
        stream: &Stream,
        attempt: u32,
        error: &Error,
    ) -> bool {
        if attempt > self.config.oom_attempts {
            return false;
        }
        // A clone, so that no lock is held: the callback may allocate, free, trim, and set another.
        let Some(callback) = self.on_oom.callback.lock().clone() else {
            return false;
        };
        let Some(_inside) = self.on_oom.enter() else {
            return false;
        };
        let heap = Heap {
            shared: self.clone(),
        };
        let event = OomEvent {
            heap: &heap,
            requested: request.len,
            align: request.align,
            attempt,
            stream,
            name: request.name,
            error,
        };
        callback(&event) == OomAnswer::Retry
    }
}

impl Heap {
    /// Sets what is called when an allocation is about to fail for want of memory or addresses: after idle
    /// memory was recycled, and waited for as long as [`HeapConfig::wait`](super::HeapConfig::wait) says.
    /// Allocations that are served never call it. It replaces the one before.
    ///
    /// The callback runs on the thread that allocates, and no lock of this crate is held: it may free
    /// blocks, allocate from any heap, trim, change the pool's budget, or wait for another thread that does.
    /// It is called at most [`HeapConfig::oom_attempts`](super::HeapConfig::oom_attempts) times for an
    /// allocation. An allocation that runs out inside the callback fails without calling it again, on the
    /// same thread; the callback must not wait for another thread's allocation that calls it in turn without end.
    /// A panic in it goes to the caller of the allocation; the heap is as before.
    ///
    /// # Example
    ///
    /// ```
    /// use std::sync::{Arc, Mutex};
    /// use granule::{Device, Heap, HeapConfig, OomAnswer, Pool, PoolConfig, driver::sim::SimConfig, units::MIB};
    ///
    /// let device = Device::sim(SimConfig::default())?;
    /// let pool = Pool::new(&device, PoolConfig::with_budget(64 * MIB))?;
    /// let heap = Heap::new(&pool, HeapConfig::default())?;
    /// let stream = device.create_stream()?;
    /// let cache = Arc::new(Mutex::new(vec![heap.alloc_named(48 * MIB, "cache", &stream)?]));
    /// let victims = cache.clone();
    /// heap.set_oom_callback(move |event| {
    ///     let free = event.shortage().and_then(|s| s.heap).map_or(0, |h| h.free);
    ///     println!("{} asked, {free} free, attempt {}", event.requested, event.attempt);
    ///     let victim = victims.lock().unwrap_or_else(|e| e.into_inner()).pop();
    ///     victim.map_or(OomAnswer::Fail, |_| OomAnswer::Retry)
    /// });
    /// let block = heap.alloc(40 * MIB, &stream)?;
    /// # Ok::<(), granule::Error>(())
    /// ```
    pub fn set_oom_callback(
        &self,
        callback: impl Fn(&OomEvent<'_>) -> OomAnswer + Send + Sync + 'static,
    ) {
        let old = self
            .shared
            .on_oom
            .callback
            .lock()
            .replace(Arc::new(callback));
        // Without the lock: what it captured may free blocks.
        drop(old);
    }

    /// Takes the callback away. One that is running goes on.
    pub fn clear_oom_callback(&self) {
        let old = self.shared.on_oom.callback.lock().take();
        drop(old);
    }
}

impl fmt::Display for OomEvent<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "attempt {}: {}", self.attempt, self.error)
    }
}
