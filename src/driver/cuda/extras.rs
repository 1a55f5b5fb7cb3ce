//! What libcuda offers beside the seam: plain allocation and graphs to compare with and test
//! against, export and import, timing.
//!
//! None of it is in the table's required part: a driver without answers `NOT_SUPPORTED`. Errors
//! name the seam's call that comes nearest.

#[cfg(unix)]
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use super::CudaDriver;
use super::bindings as sys;
use super::context::{done, event_handle, handle, id, length, stream_handle};
use super::ops::SharedCore;
use crate::driver::{
    Call, DriverCode, DriverError, DriverResult, EventId, GranuleProps, PhysId, StreamId,
};
use crate::units::Va;

/// An optional entry of the table, or `NOT_SUPPORTED`.
fn optional<F>(call: Call, entry: Option<F>) -> DriverResult<F> {
    entry.ok_or(DriverError::new(call, DriverCode::NOT_SUPPORTED))
}

/// Plain and stream-ordered allocation, for comparisons.
impl CudaDriver {
    /// `cuMemAlloc`. The memory lives until [`mem_free`](Self::mem_free), past the driver if need be.
    ///
    /// # Errors
    ///
    /// libcuda's, such as `OUT_OF_MEMORY`.
    pub fn mem_alloc(&self, len: u64) -> DriverResult<Va> {
        let call = Call::Create;
        let bound = self.core.enter(call)?;
        let alloc = optional(call, bound.table.cuMemAlloc_v2)?;
        let mut start = 0;
        // SAFETY: the pointer is to a live local.
        let code = unsafe { alloc(&raw mut start, length(len)) };
        done(call, code).map_err(|e| e.about(0, len))?;
        self.core.known.add_allocation(Va::new(start), len);
        Ok(Va::new(start))
    }

    /// `cuMemFree`. Waits for all work of the device.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` if `at` is not the start of a live allocation of this driver.
    pub fn mem_free(&self, at: Va) -> DriverResult<()> {
        let call = Call::Release;
        let bound = self.core.enter(call)?;
        let free = optional(call, bound.table.cuMemFree_v2)?;
        let len = self.take_allocation(call, at)?;
        // SAFETY: the address is the start of an allocation of ours.
        let code = unsafe { free(at.get()) };
        self.freed(call, code, at, len)
    }

    /// `cuMemAllocAsync` from the device's default pool. Usable by work after it on `stream`.
    ///
    /// # Errors
    ///
    /// libcuda's, such as `OUT_OF_MEMORY`; `INVALID_HANDLE` for a stream that is not known.
    pub fn mem_alloc_async(&self, len: u64, stream: StreamId) -> DriverResult<Va> {
        let call = Call::Create;
        let bound = self.enter_stream(call, stream)?;
        let alloc = optional(call, bound.table.cuMemAllocAsync)?;
        let mut start = 0;
        // SAFETY: the stream was looked up; the pointer is to a live local.
        let code = unsafe { alloc(&raw mut start, length(len), stream_handle(stream)) };
        done(call, code).map_err(|e| e.about(0, len))?;
        self.core.known.add_allocation(Va::new(start), len);
        Ok(Va::new(start))
    }

    /// `cuMemFreeAsync`: freed after the work queued on `stream` so far.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` if `at` is not the start of a live allocation of this driver.
    pub fn mem_free_async(&self, at: Va, stream: StreamId) -> DriverResult<()> {
        let call = Call::Release;
        let bound = self.enter_stream(call, stream)?;
        let free = optional(call, bound.table.cuMemFreeAsync)?;
        let len = self.take_allocation(call, at)?;
        // SAFETY: the address is the start of an allocation of ours; the stream was looked up.
        let code = unsafe { free(at.get(), stream_handle(stream)) };
        self.freed(call, code, at, len)
    }

    fn take_allocation(&self, call: Call, at: Va) -> DriverResult<u64> {
        self.core
            .known(call, self.core.known.take_allocation(at))
            .map_err(|e| e.about(at.get(), 0))
    }

    fn freed(&self, call: Call, code: sys::CUresult, at: Va, len: u64) -> DriverResult<()> {
        done(call, code).map_err(|e| {
            self.core.known.add_allocation(at, len);
            e.about(at.get(), len)
        })
    }
}

/// Export and import of granules.
impl CudaDriver {
    /// A file descriptor that stands for `phys`, for another process. The granule must have been
    /// created with [`GranuleProps::exportable`].
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` for a granule that is not known; libcuda's for one that is not exportable.
    #[cfg(unix)]
    pub fn export_fd(&self, phys: PhysId) -> DriverResult<OwnedFd> {
        let call = Call::Create;
        let bound = self.core.enter(call)?;
        let export = optional(call, bound.table.cuMemExportToShareableHandle)?;
        self.core
            .known(call, self.core.known.phys_len(phys))
            .map_err(|e| e.about(phys.0, 0))?;
        let mut fd: std::ffi::c_int = -1;
        let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        // SAFETY: the handle is one of ours; for this kind libcuda writes an int.
        let code = unsafe { export((&raw mut fd).cast(), phys.0, kind, 0) };
        done(call, code).map_err(|e| e.about(phys.0, 0))?;
        if fd < 0 {
            return Err(DriverError::new(call, DriverCode::UNKNOWN).about(phys.0, 0));
        }
        // SAFETY: a descriptor that libcuda made for this call and left to us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The granule of `len` bytes behind a descriptor of [`export_fd`](Self::export_fd), also of
    /// another process. It is released like one created here; the descriptor may be closed.
    ///
    /// libcuda does not say how long an imported granule is, so the exporter has to. With a wrong
    /// length mapping it fails.
    ///
    /// # Errors
    ///
    /// libcuda's, if the descriptor is not a granule of this device's kind.
    #[cfg(unix)]
    pub fn import_fd(&self, fd: BorrowedFd<'_>, len: u64) -> DriverResult<PhysId> {
        let call = Call::Create;
        let bound = self.core.enter(call)?;
        let import = optional(call, bound.table.cuMemImportFromShareableHandle)?;
        let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let os_handle = ptr::without_provenance_mut(usize::try_from(fd.as_raw_fd()).unwrap_or(0));
        let mut phys = 0;
        // SAFETY: the pointer is to a live local; for this kind the handle is the descriptor itself,
        // open while it is borrowed.
        let code = unsafe { import(&raw mut phys, os_handle, kind) };
        done(call, code).map_err(|e| e.about(0, len))?;
        self.core.known.add_phys(PhysId(phys), len);
        Ok(PhysId(phys))
    }

    /// Whether an export works; the descriptor is closed at once.
    pub(super) fn try_export(&self, phys: PhysId) -> DriverResult<()> {
        #[cfg(unix)]
        return self.export_fd(phys).map(drop);
        #[cfg(not(unix))]
        Err(DriverError::new(Call::Create, DriverCode::NOT_SUPPORTED).about(phys.0, 0))
    }

    /// The properties that `phys` really has: what was asked for may be silently not granted.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` for a granule that is not known.
    pub fn granted(&self, phys: PhysId) -> DriverResult<GranuleProps> {
        let call = Call::Create;
        let bound = self.core.enter(call)?;
        let ask = optional(call, bound.table.cuMemGetAllocationPropertiesFromHandle)?;
        self.core
            .known(call, self.core.known.phys_len(phys))
            .map_err(|e| e.about(phys.0, 0))?;
        let mut properties = self.core.properties(GranuleProps::default());
        // SAFETY: the handle is one of ours; the pointer is to a live local.
        let code = unsafe { ask(&raw mut properties, phys.0) };
        done(call, code).map_err(|e| e.about(phys.0, 0))?;
        let none = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE;
        Ok(GranuleProps {
            exportable: properties.requestedHandleTypes != none,
            rdma: properties.allocFlags.gpuDirectRDMACapable != 0,
        })
    }
}

/// Timing.
impl CudaDriver {
    /// An event that [`elapsed_ms`](Self::elapsed_ms) takes.
    ///
    /// # Errors
    ///
    /// libcuda's.
    pub fn create_timing_event(&self) -> DriverResult<EventId> {
        self.new_event(sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    /// Milliseconds on the device between the last records of two timing events, both passed.
    ///
    /// # Errors
    ///
    /// `NOT_READY` if one has not passed; `INVALID_HANDLE` if one was not recorded or has no timing.
    pub fn elapsed_ms(&self, start: EventId, end: EventId) -> DriverResult<f32> {
        let call = Call::QueryEvent;
        let bound = self.enter_event(call, start)?;
        self.core.known(call, self.core.known.event(end))?;
        let elapsed = optional(call, bound.table.cuEventElapsedTime)?;
        let mut ms = 0.0;
        // SAFETY: both handles were looked up; the pointer is to a live local.
        let code = unsafe { elapsed(&raw mut ms, event_handle(start), event_handle(end)) };
        done(call, code).map_err(|e| e.about(start.0, 0))?;
        Ok(ms)
    }
}

/// Graph capture.
impl CudaDriver {
    /// Starts to record work queued on `stream` instead of running it, in global mode: the mode
    /// under which other threads' calls are refused the most. End it on the same thread.
    ///
    /// # Errors
    ///
    /// libcuda's; the default stream cannot be captured.
    pub fn begin_capture(&self, stream: StreamId) -> DriverResult<()> {
        let call = Call::BeginCapture;
        let bound = self.enter_stream(call, stream)?;
        let begin = optional(call, bound.table.cuStreamBeginCapture_v2)?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: the stream was looked up.
        let code = unsafe { begin(stream_handle(stream), mode) };
        done(call, code).map_err(|e| e.about(stream.0, 0))
    }

    /// Ends a capture and makes the recorded work ready to run.
    ///
    /// # Errors
    ///
    /// libcuda's, such as code 901 when something spoiled the capture; it is over then too.
    pub fn end_capture(&self, stream: StreamId) -> DriverResult<GraphExec> {
        let call = Call::EndCapture;
        let bound = self.enter_stream(call, stream)?;
        let end = optional(call, bound.table.cuStreamEndCapture)?;
        let instantiate = optional(call, bound.table.cuGraphInstantiateWithFlags)?;
        let destroy = optional(call, bound.table.cuGraphDestroy)?;
        let mut graph: sys::CUgraph = ptr::null_mut();
        // SAFETY: the stream was looked up; the pointer is to a live local.
        let code = unsafe { end(stream_handle(stream), &raw mut graph) };
        done(call, code).map_err(|e| e.about(stream.0, 0))?;

        let mut exec: sys::CUgraphExec = ptr::null_mut();
        // SAFETY: the capture ended well, so the graph is valid; the pointer is to a live local.
        let code = unsafe { instantiate(&raw mut exec, graph, 0) };
        let instantiated = done(call, code);
        // SAFETY: the graph is ours, and an executable graph does not need it.
        let _ = unsafe { destroy(graph) };
        instantiated?;
        Ok(GraphExec {
            exec: id(exec),
            core: Arc::clone(&self.core),
        })
    }
}

/// Recorded work, ready to run any number of times. Keeps the device's context alive, but not the
/// memory that the work uses.
#[derive(Debug)]
pub struct GraphExec {
    exec: u64,
    core: SharedCore,
}

impl GraphExec {
    /// Queues the recorded work on `stream`.
    ///
    /// # Errors
    ///
    /// `INVALID_HANDLE` for a stream that is not known, and libcuda's.
    pub fn launch(&self, stream: StreamId) -> DriverResult<()> {
        let call = Call::Launch;
        let bound = self.core.enter(call)?;
        self.core.known(call, self.core.known.stream(stream))?;
        let launch = optional(call, bound.table.cuGraphLaunch)?;
        // SAFETY: the graph lives as long as `self`; the stream was looked up.
        let code = unsafe { launch(handle(self.exec), stream_handle(stream)) };
        done(call, code).map_err(|e| e.about(stream.0, 0))
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        let Ok(bound) = self.core.enter(Call::Release) else {
            return;
        };
        if let Some(destroy) = bound.table.cuGraphExecDestroy {
            // SAFETY: instantiated by `end_capture` and destroyed only here. libcuda lets queued
            // runs finish.
            let _ = unsafe { destroy(handle(self.exec)) };
        }
    }
}
