//! The seam's calls on libcuda. Each looks its ids up, enters the context, makes one call and names
//! what it was about if that fails.

use std::any::Any;
use std::ptr;
use std::sync::Arc;

use super::CudaDriver;
use super::bindings as sys;
use super::context::{Core, done, event_handle, id, length, stream_handle};
use super::kernels;
use crate::driver::{
    Access, Call, CopyPart, DeviceInfo, Driver, DriverCode, DriverError, DriverKind, DriverResult,
    EventId, GranuleProps, Graph, Hold, Kernel, MemoryInfo, PhysId, StreamId, StreamKey,
};
use crate::units::{Va, VaRange};

fn refused(call: Call) -> DriverError {
    DriverError::new(call, DriverCode::INVALID_VALUE)
}

impl Core {
    /// The device as a place for memory. `id` moved into a union in CUDA 13; the bytes stayed, and
    /// this is the only code that touches them.
    pub(super) fn location(&self) -> sys::CUmemLocation {
        let kind = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE
            .0
            .cast_signed();
        // SAFETY: the struct is two 32-bit integers, kind and device number, in every CUDA version:
        // the transmute checks the size, the bindings assert the first offset and the alignment.
        unsafe { std::mem::transmute::<[i32; 2], sys::CUmemLocation>([kind, self.device]) }
    }

    pub(super) fn properties(&self, props: GranuleProps) -> sys::CUmemAllocationProp {
        let handle_types = if props.exportable {
            sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        } else {
            sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE
        };
        // SAFETY: integers, an integer in a union, and a pointer that may be null.
        let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.requestedHandleTypes = handle_types;
        properties.location = self.location();
        properties.allocFlags.gpuDirectRDMACapable = u8::from(props.rdma);
        properties
    }

    /// Whether `len` is a length the contract allows.
    fn is_whole(&self, len: u64) -> bool {
        len != 0 && len.is_multiple_of(self.granularity)
    }
}

impl Driver for CudaDriver {
    fn kind(&self) -> DriverKind {
        DriverKind::Cuda
    }

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        let bound = self.core.enter(Call::MemoryInfo)?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are to live locals.
        let code = unsafe { (bound.table.cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        done(Call::MemoryInfo, code)?;
        Ok(MemoryInfo {
            free: free as u64,
            total: total as u64,
        })
    }

    fn reserve(&self, len: u64, align: u64) -> DriverResult<VaRange> {
        let call = Call::Reserve;
        let core = &self.core;
        if !core.is_whole(len) || (align != 0 && !align.is_power_of_two()) {
            return Err(refused(call).about(0, len));
        }
        let align = align.max(core.granularity);
        let bound = core.enter(call)?;
        let mut start = 0;
        // SAFETY: the pointer is to a live local; libcuda picks the address.
        let code = unsafe {
            (bound.table.cuMemAddressReserve)(&raw mut start, length(len), length(align), 0, 0)
        };
        done(call, code).map_err(|e| e.about(0, len))?;
        match VaRange::new(Va::new(start), len) {
            Some(range) if range.start().is_aligned(align) => {
                core.known.add_reservation(range);
                Ok(range)
            }
            // Alignments are documented as hints on some driver versions.
            _ => {
                // SAFETY: reserved above with that length, and nothing was mapped there.
                let _ = unsafe { (bound.table.cuMemAddressFree)(start, length(len)) };
                Err(DriverError::new(call, DriverCode::NOT_SUPPORTED).about(start, len))
            }
        }
    }

    fn free_reservation(&self, range: VaRange) -> DriverResult<()> {
        let call = Call::FreeReservation;
        let (at, len) = (range.start().get(), range.len());
        let core = &self.core;
        let bound = core.enter(call)?;
        // Forgotten first: once freed, another thread may be given the same addresses.
        core.known(call, core.known.take_reservation(range))
            .map_err(|e| e.about(at, len))?;
        // SAFETY: the range is exactly a reservation of ours; libcuda refuses while something is
        // mapped in it.
        let code = unsafe { (bound.table.cuMemAddressFree)(at, length(len)) };
        done(call, code).map_err(|e| {
            core.known.add_reservation(range);
            e.about(at, len)
        })
    }

    fn create(&self, len: u64, props: GranuleProps) -> DriverResult<PhysId> {
        let call = Call::Create;
        let core = &self.core;
        if !core.is_whole(len) {
            return Err(refused(call).about(0, len));
        }
        let bound = core.enter(call)?;
        let properties = core.properties(props);
        let mut phys = 0;
        // SAFETY: the pointers are to live locals.
        let code = unsafe {
            (bound.table.cuMemCreate)(&raw mut phys, length(len), &raw const properties, 0)
        };
        done(call, code).map_err(|e| e.about(0, len))?;
        core.known.add_phys(PhysId(phys), len);
        Ok(PhysId(phys))
    }

    fn release(&self, phys: PhysId) -> DriverResult<()> {
        let call = Call::Release;
        let core = &self.core;
        let bound = core.enter(call)?;
        // Forgotten first: once released, another thread may be given the same handle.
        let len = core
            .known(call, core.known.take_phys(phys))
            .map_err(|e| e.about(phys.0, 0))?;
        // SAFETY: the handle is one of ours that was not released yet.
        let code = unsafe { (bound.table.cuMemRelease)(phys.0) };
        done(call, code).map_err(|e| {
            core.known.add_phys(phys, len);
            e.about(phys.0, len)
        })
    }

    fn map(&self, range: VaRange, phys: PhysId) -> DriverResult<()> {
        let call = Call::Map;
        let (at, len) = (range.start().get(), range.len());
        let core = &self.core;
        let bound = core.enter(call)?;
        core.known(call, core.known.check_map(range, phys))
            .map_err(|e| e.about(at, len))?;
        // SAFETY: the range lies inside one of our reservations, and the handle is one of ours;
        // libcuda refuses where something is mapped already.
        let code = unsafe { (bound.table.cuMemMap)(at, length(len), 0, phys.0, 0) };
        done(call, code).map_err(|e| e.about(at, len))?;
        core.known.add_mapping(range);
        Ok(())
    }

    fn set_access(&self, range: VaRange, access: Access) -> DriverResult<()> {
        let call = Call::SetAccess;
        let (at, len) = (range.start().get(), range.len());
        let core = &self.core;
        if !core.is_whole(len) {
            return Err(refused(call).about(at, len));
        }
        let bound = core.enter(call)?;
        core.known(call, core.known.mappings_of(range))
            .map_err(|e| e.about(at, len))?;
        let flags = match access {
            Access::Read => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
            Access::ReadWrite => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let rights = sys::CUmemAccessDesc {
            location: core.location(),
            flags,
        };
        // SAFETY: one descriptor, alive during the call; the range is whole mappings of ours.
        let code = unsafe { (bound.table.cuMemSetAccess)(at, length(len), &raw const rights, 1) };
        done(call, code).map_err(|e| e.about(at, len))
    }

    fn unmap(&self, range: VaRange) -> DriverResult<()> {
        let call = Call::Unmap;
        let (at, len) = (range.start().get(), range.len());
        let core = &self.core;
        let bound = core.enter(call)?;
        // Forgotten first: once unmapped, another thread may map the same addresses.
        let mappings = core
            .known(call, core.known.take_mappings(range))
            .map_err(|e| e.about(at, len))?;
        // SAFETY: the range is whole mappings of ours. Work that still uses them faults on the
        // device, as the contract says.
        let code = unsafe { (bound.table.cuMemUnmap)(at, length(len)) };
        done(call, code).map_err(|e| {
            mappings
                .into_iter()
                .for_each(|one| core.known.add_mapping(one));
            e.about(at, len)
        })
    }

    fn create_stream(&self) -> DriverResult<StreamId> {
        let call = Call::CreateStream;
        let bound = self.core.enter(call)?;
        let mut stream: sys::CUstream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING.0;
        // SAFETY: the pointer is to a live local.
        let code = unsafe { (bound.table.cuStreamCreate)(&raw mut stream, flags) };
        done(call, code)?;
        let stream = StreamId(id(stream));
        self.core.known.add_stream(stream);
        Ok(stream)
    }

    fn destroy_stream(&self, stream: StreamId) -> DriverResult<()> {
        let call = Call::DestroyStream;
        let core = &self.core;
        let bound = core.enter(call)?;
        // Forgotten first: once destroyed, another thread may be given the same handle.
        core.known(call, core.known.take_stream(stream))
            .map_err(|e| e.about(stream.0, 0))?;
        // SAFETY: the handle is one of ours that was not destroyed yet.
        let code = unsafe { (bound.table.cuStreamDestroy_v2)(stream_handle(stream)) };
        done(call, code).map_err(|e| {
            core.known.add_stream(stream);
            e.about(stream.0, 0)
        })
    }

    fn stream_key(&self, stream: StreamId) -> DriverResult<StreamKey> {
        let call = Call::StreamKey;
        let bound = self.enter_stream(call, stream)?;
        // libcuda refuses this for a captured stream, too, and spoils the capture (seen with driver 580).
        self.core
            .refuse_capture(&bound, call, stream)
            .map_err(|e| match e.code {
                DriverCode::STREAM_CAPTURE_IMPLICIT => {
                    DriverError::new(call, DriverCode::STREAM_CAPTURE_UNSUPPORTED)
                }
                _ => e,
            })
            .map_err(|e| e.about(stream.0, 0))?;
        let mut key = 0;
        // SAFETY: the stream was looked up; the pointer is to a live local.
        let code = unsafe { (bound.table.cuStreamGetId)(stream_handle(stream), &raw mut key) };
        done(call, code).map_err(|e| e.about(stream.0, 0))?;
        Ok(StreamKey(key))
    }

    fn sync_stream(&self, stream: StreamId) -> DriverResult<()> {
        let call = Call::SyncStream;
        let bound = self.enter_stream(call, stream)?;
        self.core
            .refuse_capture(&bound, call, stream)
            .and_then(|()| self.core.wait(&bound, call, stream))
            .map_err(|e| e.about(stream.0, 0))
    }

    fn create_event(&self) -> DriverResult<EventId> {
        self.new_event(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    fn destroy_event(&self, event: EventId) -> DriverResult<()> {
        let call = Call::DestroyEvent;
        let core = &self.core;
        let bound = core.enter(call)?;
        core.known(call, core.known.take_event(event))
            .map_err(|e| e.about(event.0, 0))?;
        // SAFETY: the handle is one of ours that was not destroyed yet.
        let code = unsafe { (bound.table.cuEventDestroy_v2)(event_handle(event)) };
        done(call, code).map_err(|e| {
            core.known.add_event(event);
            e.about(event.0, 0)
        })
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        let call = Call::RecordEvent;
        let bound = self.enter_event(call, event)?;
        self.core.known(call, self.core.known.stream(stream))?;
        // SAFETY: both handles were looked up.
        let code =
            unsafe { (bound.table.cuEventRecord)(event_handle(event), stream_handle(stream)) };
        done(call, code).map_err(|e| e.about(event.0, 0))
    }

    fn query_event(&self, event: EventId) -> DriverResult<bool> {
        let call = Call::QueryEvent;
        let bound = self.enter_event(call, event)?;
        // SAFETY: the handle was looked up.
        let code = unsafe { (bound.table.cuEventQuery)(event_handle(event)) };
        if code.0 == DriverCode::NOT_READY.0 {
            return Ok(false);
        }
        done(call, code).map_err(|e| e.about(event.0, 0))?;
        Ok(true)
    }

    fn sync_event(&self, event: EventId) -> DriverResult<()> {
        let call = Call::SyncEvent;
        let bound = self.enter_event(call, event)?;
        // SAFETY: the handle was looked up.
        let code = unsafe { (bound.table.cuEventSynchronize)(event_handle(event)) };
        done(call, code).map_err(|e| e.about(event.0, 0))
    }

    fn wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()> {
        let call = Call::WaitEvent;
        let bound = self.enter_event(call, event)?;
        self.core.known(call, self.core.known.stream(stream))?;
        // SAFETY: both handles were looked up.
        let code = unsafe {
            (bound.table.cuStreamWaitEvent)(stream_handle(stream), event_handle(event), 0)
        };
        done(call, code).map_err(|e| e.about(event.0, 0))
    }

    fn fill(&self, range: VaRange, byte: u8, stream: StreamId) -> DriverResult<()> {
        let call = Call::Fill;
        let (at, len) = (range.start().get(), range.len());
        let bound = self.enter_stream(call, stream)?;
        if range.is_empty() {
            return Ok(());
        }
        self.device_range(call, range.start(), len)?;
        // SAFETY: the stream was looked up; the range is device memory, or nothing, which libcuda
        // refuses.
        let code =
            unsafe { (bound.table.cuMemsetD8Async)(at, byte, length(len), stream_handle(stream)) };
        done(call, code).map_err(|e| e.about(at, len))
    }

    fn copy(&self, dst: Va, src: VaRange, stream: StreamId) -> DriverResult<()> {
        let call = Call::Copy;
        let (at, len) = (dst.get(), src.len());
        let bound = self.enter_stream(call, stream)?;
        if src.is_empty() {
            return Ok(());
        }
        let target = self.device_range(call, dst, len)?;
        self.device_range(call, src.start(), len)?;
        if target.overlaps(src) {
            return Err(refused(call).about(at, len));
        }
        // SAFETY: the stream was looked up; both ranges are device memory, or nothing, which
        // libcuda refuses.
        let code = unsafe {
            (bound.table.cuMemcpyDtoDAsync_v2)(
                at,
                src.start().get(),
                length(len),
                stream_handle(stream),
            )
        };
        done(call, code).map_err(|e| e.about(at, len))
    }

    fn copy_batch(&self, parts: &[CopyPart], stream: StreamId) -> DriverResult<()> {
        let bound = self.enter_stream(Call::CopyBatch, stream)?;
        self.core.copy_batch(&bound, parts, stream)
    }

    fn copy_from_host(&self, dst: Va, src: &[u8], stream: StreamId) -> DriverResult<()> {
        let call = Call::CopyFromHost;
        let (at, len) = (dst.get(), src.len() as u64);
        let bound = self.enter_stream(call, stream)?;
        if src.is_empty() {
            return Ok(());
        }
        self.device_range(call, dst, len)?;
        let copy = || {
            self.core.refuse_capture(&bound, call, stream)?;
            // SAFETY: the target is device memory; the slice is borrowed until the wait below has ended; if that fails, so has
            // the context, and nothing is copied any more.
            let code = unsafe {
                (bound.table.cuMemcpyHtoDAsync_v2)(
                    at,
                    src.as_ptr().cast(),
                    src.len(),
                    stream_handle(stream),
                )
            };
            done(call, code)?;
            self.core.wait(&bound, call, stream)
        };
        copy().map_err(|e| e.about(at, len))
    }

    fn copy_to_host(&self, dst: &mut [u8], src: VaRange, stream: StreamId) -> DriverResult<()> {
        let call = Call::CopyToHost;
        let (at, len) = (src.start().get(), src.len());
        let bound = self.enter_stream(call, stream)?;
        if dst.len() as u64 != len {
            return Err(refused(call).about(at, len));
        }
        if src.is_empty() {
            return Ok(());
        }
        self.device_range(call, src.start(), len)?;
        let mut copy = || {
            self.core.refuse_capture(&bound, call, stream)?;
            // SAFETY: the source is device memory; the slice is as long and borrowed until the wait below has
            // ended; if that fails, so has the context, and nothing is copied any more.
            let code = unsafe {
                (bound.table.cuMemcpyDtoHAsync_v2)(
                    dst.as_mut_ptr().cast(),
                    at,
                    dst.len(),
                    stream_handle(stream),
                )
            };
            done(call, code)?;
            self.core.wait(&bound, call, stream)
        };
        copy().map_err(|e| e.about(at, len))
    }

    fn launch(&self, kernel: Kernel, stream: StreamId) -> DriverResult<()> {
        self.core.launch(kernel, stream)
    }

    fn hold(&self, stream: StreamId) -> DriverResult<Hold> {
        kernels::hold(&self.core, stream)
    }

    fn begin_capture(&self, stream: StreamId) -> DriverResult<()> {
        Self::begin_capture(self, stream)
    }

    fn end_capture(&self, stream: StreamId) -> DriverResult<Graph> {
        let graph = Self::end_capture(self, stream)?;
        Ok(Graph::new(move |stream| graph.launch(stream)))
    }

    fn is_capturing(&self, stream: StreamId) -> DriverResult<bool> {
        let call = Call::IsCapturing;
        let bound = self.enter_stream(call, stream)?;
        match self.core.refuse_capture(&bound, call, stream) {
            Ok(()) => Ok(false),
            // The second: a captured stream that the default stream would have to wait for.
            Err(error) => match error.code {
                DriverCode::STREAM_CAPTURE_UNSUPPORTED | DriverCode::STREAM_CAPTURE_IMPLICIT => {
                    Ok(true)
                }
                _ => Err(error.about(stream.0, 0)),
            },
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl CudaDriver {
    /// The range, if all of it is this driver's.
    fn device_range(&self, call: Call, at: Va, len: u64) -> DriverResult<VaRange> {
        let range = VaRange::new(at, len).ok_or(DriverCode::INVALID_VALUE);
        let checked = range.and_then(|range| self.core.known.check_ours(range).map(|()| range));
        self.core
            .known(call, checked)
            .map_err(|e| e.about(at.get(), len))
    }

    pub(super) fn enter_stream(
        &self,
        call: Call,
        stream: StreamId,
    ) -> DriverResult<super::context::Bound<'_>> {
        let bound = self.core.enter(call)?;
        self.core
            .known(call, self.core.known.stream(stream))
            .map_err(|e| e.about(stream.0, 0))?;
        Ok(bound)
    }

    pub(super) fn enter_event(
        &self,
        call: Call,
        event: EventId,
    ) -> DriverResult<super::context::Bound<'_>> {
        let bound = self.core.enter(call)?;
        self.core
            .known(call, self.core.known.event(event))
            .map_err(|e| e.about(event.0, 0))?;
        Ok(bound)
    }

    pub(super) fn new_event(&self, flags: sys::CUevent_flags) -> DriverResult<EventId> {
        let call = Call::CreateEvent;
        let bound = self.core.enter(call)?;
        let mut event: sys::CUevent = ptr::null_mut();
        // SAFETY: the pointer is to a live local.
        let code = unsafe { (bound.table.cuEventCreate)(&raw mut event, flags.0) };
        done(call, code)?;
        let event = EventId(id(event));
        self.core.known.add_event(event);
        Ok(event)
    }
}

/// The core is shared with holds and graphs, which may outlive the driver.
pub(super) type SharedCore = Arc<Core>;
