//! Heaps, and their snapshots.

use std::ffi::{CString, c_char, c_int, c_void};

use super::device::{granule_pool, granule_stream, text};
use super::error::{Failure, Out, Outcome, granule_status, guard};
use super::handle::tables;
use super::json;
use crate::units::Va;
use crate::{BlockName, DEFAULT_ALIGN, Heap, HeapConfig, HeapStats, OomAnswer, Rounding};

/// A heap: blocks of any size in stream order; 0 is none.
pub type granule_heap = u64;

/// `granule_heap_config.rounding`: sizes are rounded to 256 bytes only.
pub const GRANULE_ROUNDING_EXACT: u32 = 0;
/// `granule_heap_config.rounding`: to powers of two. Any other power of two `n`: to `n` equal steps between two powers.
pub const GRANULE_ROUNDING_POWER_OF_TWO: u32 = 1;

/// Settings of a heap. Start from `granule_heap_config_init`. Sizes in bytes.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct granule_heap_config {
    /// Blocks up to this size share granules of 2 MiB.
    pub small: u64,
    /// Largest granule, a multiple of 2 MiB.
    pub granule_max: u64,
    /// Growth takes at least this much where the footprint allows it.
    pub granule_min: u64,
    /// Addresses for each stream; 0 for four times the budget.
    pub addresses: u64,
    /// Most bytes this heap may hold; 0 for the pool's budget.
    pub limit: u64,
    /// Microseconds that an allocation may wait for work to end.
    pub wait_us: u64,
    /// Granules that may be mapped twice at a time for each stream; 0 unmaps at once.
    pub aliases: u64,
    /// Footprint aimed at over the live peak, in 1/10,000.
    pub slack: u32,
    /// `GRANULE_ROUNDING_...`.
    pub rounding: u32,
}

/// Figures of a heap over all its streams. Sizes in bytes. `held == live + free` and `allocs == hits + misses`. Blocks in
/// `limbo`, freed while other streams use them, count as live; `scoped` is what captures keep, or private pools of PyTorch.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[allow(missing_docs)]
pub struct granule_heap_stats {
    pub live: u64,
    pub live_peak: u64,
    pub blocks: u64,
    pub held: u64,
    pub held_peak: u64,
    pub granules: u64,
    pub free: u64,
    pub largest_free: u64,
    pub idle: u64,
    pub limbo: u64,
    pub aliases: u64,
    pub allocs: u64,
    pub hits: u64,
    pub misses: u64,
    pub remaps: u64,
    pub creates: u64,
    pub host_waits: u64,
    pub device_waits: u64,
    pub failures: u64,
    pub broken: u64,
    pub scoped: u64,
}

impl From<HeapStats> for granule_heap_stats {
    fn from(stats: HeapStats) -> Self {
        Self {
            live: stats.live,
            live_peak: stats.live_peak,
            blocks: stats.blocks,
            held: stats.held,
            held_peak: stats.held_peak,
            granules: stats.granules,
            free: stats.free,
            largest_free: stats.largest_free,
            idle: stats.idle,
            limbo: stats.limbo,
            aliases: stats.aliases,
            allocs: stats.allocs,
            hits: stats.hits,
            misses: stats.misses,
            remaps: stats.remaps,
            creates: stats.creates,
            host_waits: stats.host_waits,
            device_waits: stats.device_waits,
            failures: stats.failures,
            broken: stats.broken,
            scoped: stats.scoped,
        }
    }
}

impl Default for granule_heap_config {
    fn default() -> Self {
        let config = HeapConfig::default();
        Self {
            small: config.small,
            granule_max: config.granule_max,
            granule_min: config.granule_min,
            addresses: 0,
            limit: 0,
            wait_us: u64::try_from(config.wait.as_micros()).unwrap_or(u64::MAX),
            aliases: config.aliases as u64,
            slack: config.slack,
            rounding: GRANULE_ROUNDING_EXACT,
        }
    }
}

impl From<&granule_heap_config> for HeapConfig {
    fn from(config: &granule_heap_config) -> Self {
        Self {
            rounding: match config.rounding {
                GRANULE_ROUNDING_EXACT => Rounding::Exact,
                GRANULE_ROUNDING_POWER_OF_TWO => Rounding::PowerOfTwo,
                n => Rounding::Divisions(n),
            },
            small: config.small,
            granule_max: config.granule_max,
            granule_min: config.granule_min,
            slack: config.slack,
            addresses: (config.addresses != 0).then_some(config.addresses),
            aliases: usize::try_from(config.aliases).unwrap_or(usize::MAX),
            wait: std::time::Duration::from_micros(config.wait_us),
            limit: (config.limit != 0).then_some(config.limit),
            ..Self::default()
        }
    }
}

/// The default settings.
///
/// # Safety
///
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_heap_config_init(out: *mut granule_heap_config) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        unsafe { Out::new(out, "out") }?.set(granule_heap_config::default());
        Ok(())
    })
}

/// A heap on a pool; null settings are the default ones.
///
/// # Safety
///
/// `config` is null or points to settings; `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_heap_create(
    pool: granule_pool,
    config: *const granule_heap_config,
    out: *mut granule_heap,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        // SAFETY: the caller's promise.
        let config = unsafe { config.as_ref() };
        let config = config.copied().unwrap_or_default();
        let pool = tables().pools.get(pool)?;
        let heap = Heap::new(&pool, HeapConfig::from(&config))?;
        out.set(tables().heaps.insert(heap)?);
        Ok(())
    })
}

/// Closes the handle. Memory goes back once the streams' work is done. Blocks that were not freed are lost with it.
#[unsafe(no_mangle)]
pub extern "C" fn granule_heap_close(heap: granule_heap) -> granule_status {
    guard(|| tables().heaps.remove(heap).map(drop))
}

/// A block of at least `size` bytes for use on `stream` at once, at a multiple of `align` (a power of two; 0 for 256).
/// No bytes have address 0. `name` (may be null) shows in snapshots and errors.
///
/// # Safety
///
/// `name` is null or a string; `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_heap_alloc(
    heap: granule_heap,
    size: u64,
    align: u64,
    stream: granule_stream,
    name: *const c_char,
    out: *mut u64,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        // SAFETY: the caller's promise.
        let name = unsafe { text(name, "name") }?;
        let heap = tables().heaps.get(heap)?;
        let stream = tables().streams.get(stream)?;
        let align = if align == 0 { DEFAULT_ALIGN } else { align };
        let block = match name {
            None => {
                out.set(heap.alloc_raw(size, align, &stream)?.get());
                return Ok(());
            }
            Some(name) if align <= DEFAULT_ALIGN && align.is_power_of_two() => {
                heap.alloc_named(size, BlockName::from(name.to_owned()), &stream)?
            }
            Some(name) => {
                let block = heap.alloc_aligned(size, align, &stream)?;
                block.set_name(name.to_owned())?;
                block
            }
        };
        out.set(block.into_raw().get());
        Ok(())
    })
}

/// Frees a block behind the work of its own stream, and of those whose use was recorded. Address 0 does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn granule_heap_free(heap: granule_heap, addr: u64) -> granule_status {
    guard(|| Ok(tables().heaps.get(heap)?.free_raw(Va::new(addr))?))
}

/// Says that work queued on `stream` uses the block, now or until it is freed.
#[unsafe(no_mangle)]
pub extern "C" fn granule_heap_record_use(
    heap: granule_heap,
    addr: u64,
    stream: granule_stream,
) -> granule_status {
    guard(|| {
        let stream = tables().streams.get(stream)?;
        Ok(tables()
            .heaps
            .get(heap)?
            .record_use_raw(Va::new(addr), &stream)?)
    })
}

/// Bytes that the block at an address may use.
///
/// # Safety
///
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_heap_usable_size(
    heap: granule_heap,
    addr: u64,
    out: *mut u64,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        out.set(tables().heaps.get(heap)?.usable_size(Va::new(addr))?);
        Ok(())
    })
}

/// Gives granules without a live byte back to the pool; `given_back` (may be null) gets the bytes.
///
/// # Safety
///
/// `given_back` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_heap_trim(
    heap: granule_heap,
    given_back: *mut u64,
) -> granule_status {
    guard(|| {
        let bytes = tables().heaps.get(heap)?.trim();
        if !given_back.is_null() {
            // SAFETY: the caller's promise.
            unsafe { Out::new(given_back, "given_back") }?.set(bytes);
        }
        Ok(())
    })
}

/// Figures of this moment.
///
/// # Safety
///
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_heap_get_stats(
    heap: granule_heap,
    out: *mut granule_heap_stats,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        out.set(tables().heaps.get(heap)?.stats().into());
        Ok(())
    })
}

/// Recounts what the heap has and compares it with its figures: `GRANULE_INTERNAL` if they differ. For tests: exact only
/// while no other thread is inside a call that concerns the heap.
#[unsafe(no_mangle)]
pub extern "C" fn granule_heap_audit(heap: granule_heap) -> granule_status {
    guard(|| Ok(tables().heaps.get(heap)?.audit().map(drop)?))
}

/// All that the heap holds, as JSON: `stats`, and for each of `streams` its `granules`, `blocks`, `free` runs and
/// `aliases`, addresses and bytes as numbers. Free the text with `granule_string_free`.
///
/// # Safety
///
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_heap_snapshot(
    heap: granule_heap,
    out: *mut *mut c_char,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        out.set(snapshot(&*tables().heaps.get(heap)?)?);
        Ok(())
    })
}

/// A snapshot as a text that C owns.
pub(super) fn snapshot(heap: &Heap) -> Outcome<*mut c_char> {
    owned(json::snapshot(&heap.snapshot()))
}

/// A text that C owns.
pub(super) fn owned(text: String) -> Outcome<*mut c_char> {
    let text = CString::new(text).map_err(|_| Failure::invalid("a zero in a text"))?;
    Ok(text.into_raw())
}

/// Frees a text that this library made. Null does nothing.
///
/// # Safety
///
/// `text` is null, or such a text that was not freed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_string_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: made by `CString::into_raw`, as the caller promises, and freed once.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// Called when an allocation is about to fail: `requested` bytes, for the `attempt`-th time (1 at first), and why. Not 0 to
/// try again. It may call any function of this library, and must not unwind.
pub type granule_oom_callback = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        requested: u64,
        attempt: u32,
        message: *const c_char,
    ) -> c_int,
>;

/// What C gave to be given back to it.
struct Context(*mut c_void);

// SAFETY: only handed back to C, which was told that any thread may call.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    fn get(&self) -> *mut c_void {
        self.0
    }
}

/// Sets what is called when an allocation of the heap is about to fail; null takes it away. It runs on the thread that
/// allocates, and no lock is held.
///
/// # Safety
///
/// `callback` with `context` can be called from any thread until it is replaced and no call is under way.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_heap_set_oom_callback(
    heap: granule_heap,
    callback: granule_oom_callback,
    context: *mut c_void,
) -> granule_status {
    guard(|| {
        let heap = tables().heaps.get(heap)?;
        let Some(callback) = callback else {
            heap.clear_oom_callback();
            return Ok(());
        };
        let context = Context(context);
        heap.set_oom_callback(move |event| {
            let mut message = event.error.to_string().into_bytes();
            message.retain(|byte| *byte != 0);
            let message = CString::new(message).unwrap_or_default();
            // SAFETY: callable with this context, as the caller of the setter promised; the text outlives the call.
            let again = unsafe {
                callback(
                    context.get(),
                    event.requested,
                    event.attempt,
                    message.as_ptr(),
                )
            };
            match again {
                0 => OomAnswer::Fail,
                _ => OomAnswer::Retry,
            }
        });
        Ok(())
    })
}
