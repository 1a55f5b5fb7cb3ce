//! What every object of one open device shares: the function table, the primary context, and the
//! guard under which each call runs.

use std::marker::PhantomData;
use std::ptr;

use super::bindings as sys;
use super::fork;
use super::kernels::Kernels;
use super::known::Known;
use super::load::{self, Table};
use crate::driver::{Call, DriverCode, DriverError, DriverKind, DriverResult, EventId, StreamId};
use crate::sync::Mutex;
use crate::{Error, Result};

use std::sync::OnceLock;

/// The result of a libcuda call as this crate's error.
pub(super) fn done(call: Call, code: sys::CUresult) -> DriverResult<()> {
    match code {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        sys::CUresult(code) => Err(DriverError::new(call, DriverCode(code))),
    }
}

/// A handle of libcuda from the integer this crate keeps.
pub(super) fn handle<T>(id: u64) -> *mut T {
    ptr::with_exposed_provenance_mut(length(id))
}

/// The integer that stands for a handle of libcuda.
pub(super) fn id<T>(handle: *mut T) -> u64 {
    handle.expose_provenance() as u64
}

pub(super) fn stream_handle(stream: StreamId) -> sys::CUstream {
    handle(stream.0)
}

pub(super) fn event_handle(event: EventId) -> sys::CUevent {
    handle(event.0)
}

/// A length as libcuda takes it. CUDA is 64-bit only; elsewhere too large is refused there.
pub(super) fn length(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}

/// Loads and initialises libcuda, or says why that cannot be done.
pub(super) fn start() -> Result<&'static Table> {
    static OWNER: OnceLock<(u64, u32)> = OnceLock::new();

    let table = load::table()?;
    fork::watch();
    let &(generation, owner) = OWNER.get_or_init(|| (fork::generation(), std::process::id()));
    if generation != fork::generation() {
        return Err(Error::Forked {
            owner,
            child: std::process::id(),
        });
    }
    // SAFETY: any number of calls from any thread is allowed.
    let code = unsafe { (table.cuInit)(0) };
    done(Call::Init, code)?;
    Ok(table)
}

/// How many devices there are. A driver without any says so as an error of its own.
pub(super) fn count(table: &Table) -> DriverResult<u32> {
    let mut count = 0;
    // SAFETY: `start` has initialised the library; the pointer is to a live local.
    let code = unsafe { (table.cuDeviceGetCount)(&raw mut count) };
    done(Call::Init, code)?;
    Ok(u32::try_from(count).unwrap_or(0))
}

/// The table and the device of that number.
pub(super) fn device(ordinal: u32) -> Result<(&'static Table, sys::CUdevice)> {
    let missing = |count| Error::DeviceMissing { ordinal, count };
    let table = start().map_err(|e| match e.driver_error() {
        Some(e) if e.code == DriverCode::NO_DEVICE => missing(0),
        _ => e,
    })?;
    let count = count(table)?;
    let number = i32::try_from(ordinal).map_err(|_| missing(count))?;
    if ordinal >= count {
        return Err(missing(count));
    }
    let mut device = 0;
    // SAFETY: the library is initialised; the pointer is to a live local.
    let code = unsafe { (table.cuDeviceGet)(&raw mut device, number) };
    done(Call::Init, code)?;
    Ok((table, device))
}

#[derive(Debug)]
pub(super) struct Core {
    pub(super) table: &'static Table,
    pub(super) device: sys::CUdevice,
    /// The primary context, as an integer so that it can be shared.
    pub(super) context: u64,
    generation: u64,
    pub(super) granularity: u64,
    pub(super) multiprocessors: u32,
    pub(super) known: Known,
    pub(super) kernels: OnceLock<Kernels>,
    pub(super) kernels_loading: Mutex<()>,
}

impl Core {
    /// Retains the primary context of `device`.
    pub(super) fn open(table: &'static Table, device: sys::CUdevice) -> Result<Self> {
        let _relaxed = Relaxed::enter(table, Call::Init)?;
        let mut context: sys::CUcontext = ptr::null_mut();
        // SAFETY: the device is valid, as libcuda said; the pointer is to a live local.
        let code = unsafe { (table.cuDevicePrimaryCtxRetain)(&raw mut context, device) };
        done(Call::Init, code)?;
        // From here on dropping releases the context.
        let mut core = Self {
            table,
            device,
            context: id(context),
            generation: fork::generation(),
            granularity: 0,
            multiprocessors: 0,
            known: Known::default(),
            kernels: OnceLock::new(),
            kernels_loading: Mutex::new(()),
        };
        let sms =
            core.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        core.multiprocessors = sms.max(1);
        core.granularity = core.ask_granularity()?;
        Ok(core)
    }

    pub(super) fn attribute(&self, which: sys::CUdevice_attribute) -> DriverResult<u32> {
        let mut value = 0;
        // SAFETY: the device is valid; the pointer is to a live local; unknown attributes are refused.
        let code = unsafe { (self.table.cuDeviceGetAttribute)(&raw mut value, which, self.device) };
        done(Call::Init, code)?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    fn ask_granularity(&self) -> Result<u64> {
        let unsupported = |why| Error::Unsupported {
            driver: DriverKind::Cuda,
            feature: "virtual memory management",
            why,
        };
        let bound = self.enter(Call::Init)?;
        let properties = self.properties(crate::driver::GranuleProps::default());
        let mut granularity = 0;
        // SAFETY: both pointers are to live locals.
        let code = unsafe {
            (bound.table.cuMemGetAllocationGranularity)(
                &raw mut granularity,
                &raw const properties,
                sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            )
        };
        done(Call::Init, code).map_err(|e| unsupported(e.to_string()))?;
        if !granularity.is_power_of_two() {
            return Err(unsupported(format!(
                "the granularity is {granularity}, not a power of two"
            )));
        }
        Ok(granularity as u64)
    }

    /// Prepares this thread for a call: not a forked child, relaxed capture, our context. The
    /// guard puts things back.
    pub(super) fn enter(&self, call: Call) -> DriverResult<Bound<'_>> {
        if self.is_forked() {
            return Err(DriverError::new(call, DriverCode::NOT_INITIALIZED));
        }
        let mut bound = Bound {
            table: self.table,
            pushed: false,
            _relaxed: Relaxed::enter(self.table, call)?,
            core: PhantomData,
        };
        let mut current: sys::CUcontext = ptr::null_mut();
        // SAFETY: the pointer is to a live local.
        let code = unsafe { (self.table.cuCtxGetCurrent)(&raw mut current) };
        done(call, code)?;
        if id(current) != self.context {
            // SAFETY: the context is retained for as long as `self` lives, and the guard borrows it.
            let code = unsafe { (self.table.cuCtxPushCurrent_v2)(handle(self.context)) };
            done(call, code)?;
            bound.pushed = true;
        }
        Ok(bound)
    }

    /// Whether this is the child of the process that opened the device.
    pub(super) fn is_forked(&self) -> bool {
        self.generation != fork::generation()
    }

    /// A refusal of our own, in the shape of libcuda's.
    pub(super) fn known<T>(&self, call: Call, looked_up: Result<T, DriverCode>) -> DriverResult<T> {
        looked_up.map_err(|code| DriverError::new(call, code))
    }

    /// Refuses work that ends in a wait for `stream` while it is being captured: libcuda would
    /// refuse the wait after recording the work, and spoil the capture.
    pub(super) fn refuse_capture(
        &self,
        bound: &Bound<'_>,
        call: Call,
        stream: StreamId,
    ) -> DriverResult<()> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream was looked up by the caller; the pointer is to a live local.
        let code =
            unsafe { (bound.table.cuStreamIsCapturing)(stream_handle(stream), &raw mut status) };
        done(call, code)?;
        if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            Ok(())
        } else {
            Err(DriverError::new(
                call,
                DriverCode::STREAM_CAPTURE_UNSUPPORTED,
            ))
        }
    }

    /// Waits on the host for a stream that was looked up.
    pub(super) fn wait(&self, bound: &Bound<'_>, call: Call, stream: StreamId) -> DriverResult<()> {
        // SAFETY: the stream was looked up by the caller.
        let code = unsafe { (bound.table.cuStreamSynchronize)(stream_handle(stream)) };
        done(call, code)
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // Streams, events, granules and reservations that are still known belong to whoever made
        // them; the last reference to the primary context takes them along.
        if self.is_forked() {
            return;
        }
        let _relaxed = Relaxed::enter(self.table, Call::Init);
        // SAFETY: pairs with the retain in `open`. A driver that is gone refuses.
        let code = unsafe { (self.table.cuDevicePrimaryCtxRelease_v2)(self.device) };
        if let Err(e) = done(Call::Init, code)
            && !e.is_driver_gone()
        {
            tracing::warn!(error = %e, "the primary context could not be released");
        }
    }
}

/// This thread in relaxed capture mode, under which no capture forbids a call. Restores the caller's
/// mode when dropped.
struct Relaxed {
    table: &'static Table,
    before: sys::CUstreamCaptureMode,
}

impl Relaxed {
    fn enter(table: &'static Table, call: Call) -> DriverResult<Self> {
        let mut before = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: swaps a setting of this thread; the pointer is to a live local.
        let code = unsafe { (table.cuThreadExchangeStreamCaptureMode)(&raw mut before) };
        done(call, code)?;
        Ok(Self { table, before })
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        let mut mode = self.before;
        // SAFETY: puts back what `enter` found; the pointer is to a live local.
        let _ = unsafe { (self.table.cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
    }
}

/// Proof that this thread may call libcuda on the device. Restores the caller's context and
/// capture mode when dropped.
pub(super) struct Bound<'core> {
    pub(super) table: &'static Table,
    pushed: bool,
    /// Dropped after the context was put back.
    _relaxed: Relaxed,
    /// Not `Send`: it is about this thread.
    core: PhantomData<(&'core Core, *const ())>,
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped: sys::CUcontext = ptr::null_mut();
            // SAFETY: pairs with the push in `enter` on this thread; the pointer is to a live local.
            // A failure leaves nothing to do.
            let _ = unsafe { (self.table.cuCtxPopCurrent_v2)(&raw mut popped) };
        }
    }
}
