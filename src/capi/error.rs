//! Status codes, and the message of a thread.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use crate::{Error, Limit, OutOfMemory};

/// What a function answers: `GRANULE_OK` or one of the other codes.
pub type granule_status = i32;

/// Done.
pub const GRANULE_OK: i32 = 0;
/// No memory within a limit or on the device; `granule_last_out_of_memory` has the figures.
pub const GRANULE_OUT_OF_MEMORY: i32 = 1;
/// An argument makes no sense: a null pointer, a setting, a size, text that is not UTF-8.
pub const GRANULE_INVALID_ARGUMENT: i32 = 2;
/// A handle or address that names nothing (any more), or something of another kind.
pub const GRANULE_STALE: i32 = 3;
/// The driver refused a call; the message names it and its code.
pub const GRANULE_DRIVER: i32 = 4;
/// There is no such driver, device or ability here.
pub const GRANULE_UNSUPPORTED: i32 = 5;
/// More than there are addresses for, or than can be expressed.
pub const GRANULE_TOO_LARGE: i32 = 6;
/// Something is in use: pins, memory above a new budget, work that took too long.
pub const GRANULE_BUSY: i32 = 7;
/// The books are wrong, or a thread could not be started.
pub const GRANULE_INTERNAL: i32 = 8;
/// A panic was caught. The object it happened in may not be usable any more; nothing else is concerned.
pub const GRANULE_PANIC: i32 = 9;

/// `granule_out_of_memory.limit`: the pool's budget.
pub const GRANULE_LIMIT_BUDGET: u32 = 0;
/// `granule_out_of_memory.limit`: the heap's own limit.
pub const GRANULE_LIMIT_HEAP: u32 = 1;
/// `granule_out_of_memory.limit`: the device, or other processes on it.
pub const GRANULE_LIMIT_DEVICE: u32 = 2;

/// The figures of the last lack of memory of a thread, in bytes.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct granule_out_of_memory {
    /// Asked for.
    pub requested: u64,
    /// Of that, still missing when no more could be had.
    pub missing: u64,
    /// The pool's budget.
    pub budget: u64,
    /// Created by the pool.
    pub created: u64,
    /// Created and mapped.
    pub mapped: u64,
    /// Created and idle in the pool.
    pub idle: u64,
    /// Held back by work that has not finished.
    pub pending: u64,
    /// In live blocks of the heap; 0 without a heap.
    pub heap_live: u64,
    /// Free in the heap; 0 without a heap.
    pub heap_free: u64,
    /// One of `GRANULE_LIMIT_...`.
    pub limit: u32,
}

impl From<&OutOfMemory> for granule_out_of_memory {
    fn from(why: &OutOfMemory) -> Self {
        let heap = why.heap.unwrap_or_default();
        Self {
            requested: why.requested,
            missing: why.missing,
            budget: why.budget,
            created: why.created,
            mapped: why.mapped,
            idle: why.idle,
            pending: why.pending,
            heap_live: heap.live,
            heap_free: heap.free,
            limit: match why.limit {
                Limit::Budget => GRANULE_LIMIT_BUDGET,
                Limit::Heap => GRANULE_LIMIT_HEAP,
                Limit::Device => GRANULE_LIMIT_DEVICE,
            },
        }
    }
}

/// What went wrong last on a thread.
#[derive(Default)]
struct Last {
    status: granule_status,
    message: CString,
    shortage: Option<granule_out_of_memory>,
}

thread_local! {
    static LAST: RefCell<Last> = RefCell::default();
}

/// Something that went wrong on its way to C.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Failure {
    pub(super) status: granule_status,
    pub(super) message: String,
    pub(super) shortage: Option<granule_out_of_memory>,
}

pub(super) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    pub(super) fn new(status: granule_status, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            shortage: None,
        }
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new(GRANULE_INVALID_ARGUMENT, message)
    }

    pub(super) fn panic(what: &(dyn Any + Send)) -> Self {
        let text = what
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| what.downcast_ref::<String>().cloned());
        let text = text.unwrap_or_else(|| "without a text".to_owned());
        Self::new(GRANULE_PANIC, format!("caught a panic: {text}"))
    }

    /// Makes it the thread's last error. A thread that is ending has none any more.
    pub(super) fn keep(self) -> granule_status {
        let status = self.status;
        let mut text = self.message.into_bytes();
        text.retain(|byte| *byte != 0);
        let last = Last {
            status,
            message: CString::new(text).unwrap_or_default(),
            shortage: self.shortage,
        };
        let _ = LAST.try_with(|cell| cell.replace(last));
        status
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = match &error {
            Error::OutOfMemory(_) | Error::Shortfall(_) => GRANULE_OUT_OF_MEMORY,
            Error::Driver(e) if e.is_out_of_memory() => GRANULE_OUT_OF_MEMORY,
            Error::Driver(_) | Error::Forked { .. } => GRANULE_DRIVER,
            Error::TooLarge { .. }
            | Error::ReservationExhausted { .. }
            | Error::AddressSpaceExhausted { .. } => GRANULE_TOO_LARGE,
            Error::Misaligned { .. }
            | Error::InvalidConfig { .. }
            | Error::OutOfBounds { .. }
            | Error::Shape { .. }
            | Error::Foreign { .. }
            | Error::Duplicate { .. }
            | Error::UnknownDriver { .. } => GRANULE_INVALID_ARGUMENT,
            Error::Stale { .. } | Error::NotAStart { .. } => GRANULE_STALE,
            Error::BudgetBelowUse { .. }
            | Error::Pinned { .. }
            | Error::TimedOut { .. }
            | Error::Capturing { .. } => GRANULE_BUSY,
            Error::LibraryMissing { .. }
            | Error::SymbolMissing { .. }
            | Error::DeviceMissing { .. }
            | Error::Unsupported { .. } => GRANULE_UNSUPPORTED,
            Error::Inconsistent { .. } | Error::Thread { .. } => GRANULE_INTERNAL,
        };
        let shortage = match &error {
            Error::OutOfMemory(why) => Some(granule_out_of_memory::from(&**why)),
            _ => None,
        };
        Self {
            status,
            message: error.to_string(),
            shortage,
        }
    }
}

/// Runs the body of an exported function: errors become the thread's last one, panics too.
pub(super) fn guard(body: impl FnOnce() -> Outcome) -> granule_status {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => GRANULE_OK,
        Ok(Err(failure)) => failure.keep(),
        Err(what) => {
            let status = Failure::panic(&*what).keep();
            drop_quietly(what);
            status
        }
    }
}

/// Drops what a panic carried, which may panic itself.
pub(super) fn drop_quietly(what: Box<dyn Any + Send>) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(what))) {
        std::mem::forget(again);
    }
}

/// A pointer that a caller gave for an answer.
pub(super) struct Out<T>(ptr::NonNull<T>);

impl<T> Out<T> {
    /// Refuses null.
    ///
    /// # Safety
    ///
    /// Null, or valid for a write of a `T` until the function that was given it returns.
    pub(super) unsafe fn new(at: *mut T, what: &str) -> Outcome<Self> {
        let at = ptr::NonNull::new(at);
        at.map(Self)
            .ok_or_else(|| Failure::invalid(format!("{what} is a null pointer")))
    }

    pub(super) fn set(self, value: T) {
        // SAFETY: valid for a write, as whoever made it promised; nothing is dropped, `T` is plain data.
        unsafe { self.0.write(value) }
    }
}

/// The message of this thread's last failure, in UTF-8 and ended by a zero; empty if there was none. Valid until
/// the next function of this library fails on this thread. Never null.
#[unsafe(no_mangle)]
pub extern "C" fn granule_last_error() -> *const c_char {
    let message = LAST.try_with(|last| last.borrow().message.as_ptr());
    message.unwrap_or(c"".as_ptr())
}

/// The status of this thread's last failure; `GRANULE_OK` if there was none.
#[unsafe(no_mangle)]
pub extern "C" fn granule_last_status() -> granule_status {
    let status = LAST.try_with(|last| last.borrow().status);
    status.unwrap_or(GRANULE_OK)
}

/// Forgets this thread's last failure.
#[unsafe(no_mangle)]
pub extern "C" fn granule_clear_error() {
    let _ = LAST.try_with(|last| last.replace(Last::default()));
}

/// The figures of this thread's last failure. `GRANULE_INVALID_ARGUMENT` if it was no lack of memory, or the driver
/// said so by itself.
///
/// # Safety
///
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_last_out_of_memory(
    out: *mut granule_out_of_memory,
) -> granule_status {
    let shortage = LAST.try_with(|last| last.borrow().shortage).ok().flatten();
    // Without a trace on the last error unless it fails by itself.
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        let shortage = shortage
            .ok_or_else(|| Failure::invalid("the last failure of this thread has no figures"))?;
        out.set(shortage);
        Ok(())
    })
}

/// A name of a status, ended by a zero; never freed.
#[unsafe(no_mangle)]
pub extern "C" fn granule_status_name(status: granule_status) -> *const c_char {
    let name = match status {
        GRANULE_OK => c"ok",
        GRANULE_OUT_OF_MEMORY => c"out of memory",
        GRANULE_INVALID_ARGUMENT => c"invalid argument",
        GRANULE_STALE => c"stale",
        GRANULE_DRIVER => c"driver",
        GRANULE_UNSUPPORTED => c"unsupported",
        GRANULE_TOO_LARGE => c"too large",
        GRANULE_BUSY => c"busy",
        GRANULE_INTERNAL => c"internal",
        GRANULE_PANIC => c"panic",
        _ => c"unknown",
    };
    name.as_ptr()
}

/// Version of the library, ended by a zero; never freed.
#[unsafe(no_mangle)]
pub extern "C" fn granule_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}
