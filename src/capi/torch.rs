//! PyTorch: the functions that `torch.cuda.memory.CUDAPluggableAllocator` calls.
//!
//! PyTorch checks no answer of an allocator: a null pointer would become a tensor at address 0. An allocation that fails
//! therefore calls one of the [hooks](granule_torch_set_raise), which throws a C++ exception through this library to PyTorch.

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use super::conf::Conf;
use super::device::{granule_device, granule_pool, granule_stream, text};
use super::error::{
    Failure, GRANULE_OUT_OF_MEMORY, GRANULE_TOO_LARGE, GRANULE_UNSUPPORTED, Out, Outcome,
    drop_quietly, granule_last_error, granule_status, guard,
};
use super::handle::tables;
use super::heap::{granule_heap, granule_heap_stats, owned, snapshot};
use super::json;
use super::scopes::{Begun, Filter};
use super::torch_site::{Site, sites};
use crate::sync::Mutex;
use crate::units::Va;

/// Throws a C++ exception with that message: function, file, line, message. `c10::detail::torchCheckFail` is one.
pub type granule_raise =
    Option<unsafe extern "C-unwind" fn(*const c_char, *const c_char, u32, *const c_char)>;

/// Whether an allocation on `stream` belongs to a private pool.
pub type granule_filter =
    Option<unsafe extern "C" fn(context: *mut c_void, stream: *mut c_void) -> bool>;

/// Ends a filter.
pub type granule_drop = Option<unsafe extern "C" fn(context: *mut c_void)>;

/// What throws, for lack of memory and for everything else.
fn raise() -> &'static Mutex<(granule_raise, granule_raise)> {
    static RAISE: OnceLock<Mutex<(granule_raise, granule_raise)>> = OnceLock::new();
    RAISE.get_or_init(Mutex::default)
}

/// Memory under PyTorch on one device. Sizes in bytes.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct granule_torch_stats {
    /// Asked for and not freed.
    pub requested: u64,
    /// The most of that since the last reset.
    pub requested_peak: u64,
    /// Physical memory of the device's pool, with what arenas hold.
    pub reserved: u64,
    /// The most of that since the last reset.
    pub reserved_peak: u64,
    /// The budget.
    pub budget: u64,
    /// The heap's figures.
    pub heap: granule_heap_stats,
}

/// Sets what a failed allocation calls: `out_of_memory` for lack of memory, `other` for the rest. Null is none, and the
/// allocation answers null then.
///
/// # Safety
///
/// Both are null or functions of that type which throw a C++ exception, and may be called from any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_torch_set_raise(
    out_of_memory: granule_raise,
    other: granule_raise,
) {
    *raise().lock() = (out_of_memory, other);
}

/// Reads settings (`GRANULE_CONF`) for devices that have not been used yet. Unknown keys are refused; `GRANULE_BUSY` once
/// memory was allocated.
///
/// # Safety
///
/// `conf` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_torch_configure(conf: *const c_char) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let conf = unsafe { text(conf, "conf") }?.unwrap_or_default();
        let conf: Conf = conf
            .parse()
            .map_err(|e: super::ConfError| Failure::invalid(format!("GRANULE_CONF: {e}")))?;
        sites().configure(conf)
    })
}

/// # Safety
///
/// As for [`granule_torch_alloc`].
unsafe fn allocate(size: isize, device: c_int, stream: *mut c_void) -> Outcome<u64> {
    let bytes = u64::try_from(size)
        .map_err(|_| Failure::invalid(format!("a size of {size} bytes is negative")))?;
    if bytes == 0 {
        return Ok(0);
    }
    let site = sites().get(device)?;
    // SAFETY: the caller's promise.
    Ok(unsafe { site.alloc(bytes, stream.expose_provenance() as u64) }?)
}

/// `malloc_fn` of PyTorch: `size` bytes for use on `stream` at once; null for no bytes. Without memory it throws, see
/// `granule_torch_set_raise`.
///
/// # Safety
///
/// `stream` is a stream of the device's primary context that is never destroyed, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn granule_torch_alloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    let body = || unsafe { allocate(size, device, stream) };
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(addr)) => return pointer(addr),
        Ok(Err(failure)) => failure,
        Err(what) => {
            let failure = Failure::panic(&*what);
            drop_quietly(what);
            failure
        }
    };
    let is_shortage = matches!(failure.status, GRANULE_OUT_OF_MEMORY | GRANULE_TOO_LARGE);
    let (shortage, other) = *raise().lock();
    let raise = if is_shortage { shortage } else { other };
    Failure {
        message: match is_shortage {
            // What programs look for that know PyTorch's own text.
            true => format!("CUDA out of memory. granule: {}", failure.message),
            false => format!("granule: {}", failure.message),
        },
        ..failure
    }
    .keep();
    if let Some(raise) = raise {
        let here = (c"granule_torch_alloc", c"granule");
        // Nothing that would have to be dropped is alive here when it unwinds.
        // SAFETY: such a function, as the setter's caller promised; the texts live until the next failure.
        unsafe { raise(here.0.as_ptr(), here.1.as_ptr(), 0, granule_last_error()) };
    }
    std::ptr::null_mut()
}

fn pointer(addr: u64) -> *mut c_void {
    // CUDA is 64-bit only.
    std::ptr::with_exposed_provenance_mut(usize::try_from(addr).unwrap_or(0))
}

/// `free_fn` of PyTorch. An address that is not known leaves a message for the thread and changes nothing.
///
/// # Safety
///
/// Work that uses the block is queued on the stream it was allocated on, or was recorded.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_torch_free(
    ptr: *mut c_void,
    size: isize,
    device: c_int,
    _stream: *mut c_void,
) {
    guard(|| {
        if ptr.is_null() {
            return Ok(());
        }
        let size = u64::try_from(size).unwrap_or(0);
        Ok(sites()
            .get(device)?
            .free(ptr.expose_provenance() as u64, size)?)
    });
}

/// `record_stream_fn` of PyTorch: work on `stream` uses the block, or the arena if it is the start of a growable tensor.
///
/// # Safety
///
/// `stream` is a stream of the block's device that is never destroyed, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_torch_record_stream(ptr: *mut c_void, stream: *mut c_void) {
    guard(|| {
        let addr = ptr.expose_provenance() as u64;
        if addr == 0 {
            return Ok(());
        }
        let raw = stream.expose_provenance() as u64;
        let Some(site) = sites().owner(addr) else {
            // SAFETY: the caller's promise.
            return unsafe { record_arena(addr, raw) };
        };
        // SAFETY: the caller's promise.
        let used = unsafe { site.on(raw) }?;
        // Within a private pool the next block on its stream must not come too early either.
        if let Some(block) = site.scopes.block(addr) {
            return Ok(block.record_use(used.stream())?);
        }
        Ok(site.heap.record_use_raw(Va::new(addr), used.stream())?)
    });
}

/// Records a use of a growable tensor, whose storage starts in an arena.
///
/// # Safety
///
/// As for [`granule_torch_record_stream`].
unsafe fn record_arena(addr: u64, stream: u64) -> Outcome {
    for arena in tables().arenas.all() {
        let arena = arena.read();
        let offset = Va::new(addr).checked_offset_from(arena.base());
        if offset.is_none_or(|offset| offset >= arena.capacity()) {
            continue;
        }
        for site in sites().open() {
            if site.device.is_same(arena.device()) {
                // SAFETY: the caller's promise.
                let used = unsafe { site.on(stream) }?;
                return Ok(arena.record_use(used.stream())?);
            }
        }
    }
    Err(Failure::invalid(format!("no block or arena at {addr:#x}")))
}

/// `base_alloc_fn` of PyTorch: the start and size of the allocation at `ptr`. An address that is not the start of a block
/// is answered as it is, with size 0.
///
/// # Safety
///
/// `size` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_torch_base_alloc(
    ptr: *mut c_void,
    size: *mut usize,
) -> *mut c_void {
    guard(|| {
        if size.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(size, "size") }?;
        let addr = ptr.expose_provenance() as u64;
        let usable = sites()
            .open()
            .find_map(|site| site.heap.usable_size(Va::new(addr)).ok());
        out.set(usize::try_from(usable.unwrap_or(0)).unwrap_or(usize::MAX));
        Ok(())
    });
    ptr
}

/// `memory_fraction_fn` of PyTorch: the budget as a part of the device's memory. A part below what is in use changes
/// nothing and leaves a message.
#[unsafe(no_mangle)]
pub extern "C" fn granule_torch_memory_fraction(fraction: f64, device: c_int) {
    guard(|| match (0.0..=1.0).contains(&fraction) {
        true => Ok(sites().get(device)?.set_fraction(fraction)?),
        false => Err(Failure::invalid(format!("{fraction} is not from 0 to 1"))),
    });
}

/// `reset_fn` of PyTorch, behind `torch.cuda.empty_cache`: gives idle memory back to the device.
#[unsafe(no_mangle)]
pub extern "C" fn granule_torch_empty_cache() {
    guard(|| {
        for site in sites().open() {
            site.empty()?;
        }
        Ok(())
    });
}

fn begin(device: c_int, id: (u64, u64), filter: Option<Filter>) -> Outcome {
    let site = sites().get(device)?;
    match site.scopes.begin(id, filter) {
        Begun::Yes => Ok(()),
        Begun::Ambiguous => Err(Failure::invalid(
            "two private pools at a time need a filter each",
        )),
    }
}

/// `begin_allocate_to_pool_fn` of PyTorch, whose last argument, a C++ object, is not looked at: all allocations of the
/// device go to the pool until the end. Only one pool at a time; `granule_torch_begin_filtered` can do more.
///
/// # Safety
///
/// None of its own: it is unsafe for being called with C++'s arguments.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_torch_begin_pool(
    device: c_int,
    id_0: u64,
    id_1: u64,
    _filter: *const c_void,
) {
    guard(|| begin(device, (id_0, id_1), None));
}

/// A filter that C gave.
struct Foreign {
    filter: unsafe extern "C" fn(*mut c_void, *mut c_void) -> bool,
    drop: granule_drop,
    context: *mut c_void,
}

// SAFETY: C was told that any thread may call.
unsafe impl Send for Foreign {}
// SAFETY: as above.
unsafe impl Sync for Foreign {}

impl Foreign {
    fn applies(&self, stream: u64) -> bool {
        // SAFETY: callable with this context until it is dropped, as C promised.
        unsafe { (self.filter)(self.context, pointer(stream)) }
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if let Some(drop) = self.drop {
            // SAFETY: called once, after the last call of the filter.
            unsafe { drop(self.context) }
        }
    }
}

/// As `granule_torch_begin_pool`, for allocations on streams that pass the filter. `drop` (may be null) ends it.
///
/// # Safety
///
/// `filter` with `context` can be called from any thread until `drop` is called with it, and does not unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_torch_begin_filtered(
    device: c_int,
    id_0: u64,
    id_1: u64,
    filter: granule_filter,
    context: *mut c_void,
    drop: granule_drop,
) {
    guard(|| {
        let filter = filter.ok_or_else(|| Failure::invalid("filter is a null pointer"))?;
        let foreign = Foreign {
            filter,
            drop,
            context,
        };
        let filter = move |stream| foreign.applies(stream);
        begin(device, (id_0, id_1), Some(std::sync::Arc::new(filter)))
    });
}

/// `end_allocate_to_pool_fn` of PyTorch: allocations go to the heap again.
#[unsafe(no_mangle)]
pub extern "C" fn granule_torch_end_pool(device: c_int, id_0: u64, id_1: u64) {
    guard(|| {
        sites().get(device)?.scopes.end((id_0, id_1));
        Ok(())
    });
}

/// `release_pool_fn` of PyTorch: nothing will replay what the pool's memory was captured for. It goes back to the heap
/// once the streams that PyTorch allocated on have done what is queued on them now.
#[unsafe(no_mangle)]
pub extern "C" fn granule_torch_release_pool(device: c_int, id_0: u64, id_1: u64) {
    guard(|| {
        let site = sites().get(device)?;
        site.scopes.release((id_0, id_1), || site.known_streams());
        Ok(())
    });
}

/// Figures of a device.
///
/// # Safety
///
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_torch_get_stats(
    device: c_int,
    out: *mut granule_torch_stats,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        out.set(stats(sites().get(device)?));
        Ok(())
    })
}

fn stats(site: &Site) -> granule_torch_stats {
    let (requested, requested_peak) = site.requested();
    let pool = site.pool.stats();
    granule_torch_stats {
        requested,
        requested_peak,
        reserved: pool.created,
        reserved_peak: pool.peak_created,
        budget: pool.budget,
        heap: site.heap.stats().into(),
    }
}

/// What serving PyTorch on a device has cost so far, as JSON: calls and nanoseconds of `allocs` and `frees`, driver calls
/// included, and calls, failures and nanoseconds of each call of the `driver`. `GRANULE_UNSUPPORTED` unless the settings say
/// `timing:True`. Free the text with `granule_string_free`.
///
/// # Safety
///
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_torch_costs(
    device: c_int,
    out: *mut *mut c_char,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        let timing = sites().get(device)?.timing().ok_or_else(|| {
            Failure::new(
                GRANULE_UNSUPPORTED,
                "costs are counted with timing:True only",
            )
        })?;
        out.set(owned(json::costs(timing))?);
        Ok(())
    })
}

/// Sets the peaks of a device to what there is now.
#[unsafe(no_mangle)]
pub extern "C" fn granule_torch_reset_peaks(device: c_int) -> granule_status {
    guard(|| {
        sites().get(device)?.reset_peaks();
        Ok(())
    })
}

/// A handle of the pool that serves a device, for arenas under the same budget. Close it as any other.
///
/// # Safety
///
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_torch_pool(
    device: c_int,
    out: *mut granule_pool,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        out.set(tables().pools.insert(sites().get(device)?.pool.clone())?);
        Ok(())
    })
}

/// A handle of a device as PyTorch's memory is on it. Close it as any other.
///
/// # Safety
///
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_torch_device(
    device: c_int,
    out: *mut granule_device,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        out.set(
            tables()
                .devices
                .insert(sites().get(device)?.device.clone())?,
        );
        Ok(())
    })
}

/// A handle of the heap that serves a device. Close it as any other.
///
/// # Safety
///
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_torch_heap(
    device: c_int,
    out: *mut granule_heap,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        out.set(tables().heaps.insert(sites().get(device)?.heap.clone())?);
        Ok(())
    })
}

/// A handle of a stream of PyTorch on a device, to grow arenas with. Close it as any other.
///
/// # Safety
///
/// `raw` as for `granule_torch_alloc`; `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_torch_stream(
    device: c_int,
    raw: *mut c_void,
    out: *mut granule_stream,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        // SAFETY: the caller's promise.
        let heap = unsafe { sites().get(device)?.on(raw.expose_provenance() as u64) }?;
        out.set(tables().streams.insert(heap.stream().clone())?);
        Ok(())
    })
}

/// A snapshot of the heap that serves a device, as `granule_heap_snapshot`.
///
/// # Safety
///
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_torch_snapshot(
    device: c_int,
    out: *mut *mut c_char,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        out.set(snapshot(&sites().get(device)?.heap)?);
        Ok(())
    })
}
