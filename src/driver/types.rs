//! The nouns of the driver seam: identifiers, calls, result codes and facts about a device.

use std::fmt;

use crate::units::Bytes;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub struct $name(pub u64);
    };
}

id! {
    /// A physical allocation (a CUDA `CUmemGenericAllocationHandle`).
    PhysId
}
id! {
    /// A stream as the driver names it (a CUDA `CUstream`). Drivers reuse the value after the
    /// stream is destroyed; tell streams apart by [`StreamKey`].
    StreamId
}
id! {
    /// A stream for as long as the process lives; never reused (CUDA's `cuStreamGetId`).
    StreamKey
}
id! {
    /// An event (a CUDA `CUevent`).
    EventId
}

impl StreamId {
    /// The device's default stream.
    pub const DEFAULT: Self = Self(0);
}

/// Which implementation answers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DriverKind {
    /// A CUDA device through libcuda.
    Cuda,
    /// Host memory that obeys CUDA's rules.
    Host,
    /// Bookkeeping and a virtual clock, no memory.
    Sim,
}

impl fmt::Display for DriverKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cuda => "cuda",
            Self::Host => "host",
            Self::Sim => "sim",
        })
    }
}

macro_rules! calls {
    ($($(#[$doc:meta])* $variant:ident => $name:literal),+ $(,)?) => {
        /// One operation of the [`Driver`](super::Driver) trait; what the fault and record
        /// wrappers count by and what errors name.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[repr(u8)]
        pub enum Call { $($(#[$doc])* $variant),+ }

        impl Call {
            /// Every call, in declaration order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The call's name in reports.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }
        }
    };
}

calls! {
    /// Reserve addresses.
    Reserve => "reserve",
    /// Give a reservation back.
    FreeReservation => "free_reservation",
    /// Create physical memory.
    Create => "create",
    /// Drop the creation reference of physical memory.
    Release => "release",
    /// Put physical memory behind addresses.
    Map => "map",
    /// Set the access rights of mapped addresses.
    SetAccess => "set_access",
    /// Take physical memory from behind addresses.
    Unmap => "unmap",
    /// Ask for free and total memory.
    MemoryInfo => "memory_info",
    /// Create a stream.
    CreateStream => "create_stream",
    /// Destroy a stream.
    DestroyStream => "destroy_stream",
    /// Ask for a stream's unique key.
    StreamKey => "stream_key",
    /// Wait on the host for a stream.
    SyncStream => "sync_stream",
    /// Create an event.
    CreateEvent => "create_event",
    /// Destroy an event.
    DestroyEvent => "destroy_event",
    /// Record an event on a stream.
    RecordEvent => "record_event",
    /// Ask whether an event has passed.
    QueryEvent => "query_event",
    /// Wait on the host for an event.
    SyncEvent => "sync_event",
    /// Make a stream wait for an event.
    WaitEvent => "wait_event",
    /// Fill device memory.
    Fill => "fill",
    /// Copy within the device.
    Copy => "copy",
    /// Copy many parts within the device at once.
    CopyBatch => "copy_batch",
    /// Copy from the host.
    CopyFromHost => "copy_from_host",
    /// Copy to the host.
    CopyToHost => "copy_to_host",
    /// Run one of the check kernels.
    Launch => "launch",
    /// Enqueue work that ends when told.
    Hold => "hold",
    /// Start to record a stream's work into a graph.
    BeginCapture => "begin_capture",
    /// End that, and make the graph.
    EndCapture => "end_capture",
    /// Ask whether a stream's work is being recorded.
    IsCapturing => "is_capturing",
    /// Load or start the driver (never counted by wrappers).
    Init => "init",
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A driver's result code: CUDA's `CUresult` as an integer, so that a code newer than this crate
/// is a value and not undefined behaviour. The host and sim drivers use the same numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DriverCode(pub u32);

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $value:literal => $cuda:literal),+ $(,)?) => {
        impl DriverCode {
            $($(#[$doc])* pub const $name: Self = Self($value);)+

            /// CUDA's name for the code, if this crate knows it.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self.0 { $($value => Some($cuda),)+ _ => None }
            }
        }
    };
}

codes! {
    /// An argument was refused.
    INVALID_VALUE = 1 => "CUDA_ERROR_INVALID_VALUE",
    /// No memory for data, page tables or addresses.
    OUT_OF_MEMORY = 2 => "CUDA_ERROR_OUT_OF_MEMORY",
    /// `cuInit` has not run or failed.
    NOT_INITIALIZED = 3 => "CUDA_ERROR_NOT_INITIALIZED",
    /// The driver is shutting down.
    DEINITIALIZED = 4 => "CUDA_ERROR_DEINITIALIZED",
    /// No CUDA device at all.
    NO_DEVICE = 100 => "CUDA_ERROR_NO_DEVICE",
    /// No device of that number.
    INVALID_DEVICE = 101 => "CUDA_ERROR_INVALID_DEVICE",
    /// No context or a dead one.
    INVALID_CONTEXT = 201 => "CUDA_ERROR_INVALID_CONTEXT",
    /// A handle that names nothing.
    INVALID_HANDLE = 400 => "CUDA_ERROR_INVALID_HANDLE",
    /// The work has not finished.
    NOT_READY = 600 => "CUDA_ERROR_NOT_READY",
    /// Device code touched an address that is not mapped or not accessible. The context is lost.
    ILLEGAL_ADDRESS = 700 => "CUDA_ERROR_ILLEGAL_ADDRESS",
    /// The context was destroyed.
    CONTEXT_IS_DESTROYED = 709 => "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    /// The operation is not permitted.
    NOT_PERMITTED = 800 => "CUDA_ERROR_NOT_PERMITTED",
    /// The device or driver cannot do that.
    NOT_SUPPORTED = 801 => "CUDA_ERROR_NOT_SUPPORTED",
    /// Not allowed while a stream is being captured.
    STREAM_CAPTURE_UNSUPPORTED = 900 => "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
    /// Something spoiled the capture.
    STREAM_CAPTURE_INVALIDATED = 901 => "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
    /// A dependency between captured and other work.
    STREAM_CAPTURE_ISOLATION = 905 => "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
    /// The default stream was used beside a captured stream that it waits for.
    STREAM_CAPTURE_IMPLICIT = 906 => "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
    /// The event's last record is part of a capture.
    CAPTURED_EVENT = 907 => "CUDA_ERROR_CAPTURED_EVENT",
    /// The driver does not know either.
    UNKNOWN = 999 => "CUDA_ERROR_UNKNOWN",
}

impl fmt::Debug for DriverCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for DriverCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "code {}", self.0),
        }
    }
}

/// A driver call that was refused or failed: which one, with what code, over which addresses or
/// bytes (0 where the call has none).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("driver call {call} failed with {code} (at {at:#x}, {len} bytes)")]
pub struct DriverError {
    /// The call.
    pub call: Call,
    /// The driver's own code.
    pub code: DriverCode,
    /// Address or handle the call was about.
    pub at: u64,
    /// Bytes the call was about.
    pub len: u64,
}

impl DriverError {
    /// An error without an address.
    #[must_use]
    pub const fn new(call: Call, code: DriverCode) -> Self {
        Self {
            call,
            code,
            at: 0,
            len: 0,
        }
    }

    /// The same error with the address or handle and the length it was about.
    #[must_use]
    pub const fn about(self, at: u64, len: u64) -> Self {
        Self { at, len, ..self }
    }

    /// Whether the driver said that it is out of memory.
    #[must_use]
    pub const fn is_out_of_memory(&self) -> bool {
        self.code.0 == DriverCode::OUT_OF_MEMORY.0
    }

    /// Whether the driver is gone (process exit, context destroyed, forked child): nothing is left
    /// to undo here.
    #[must_use]
    pub const fn is_driver_gone(&self) -> bool {
        matches!(
            self.code,
            DriverCode::NOT_INITIALIZED
                | DriverCode::DEINITIALIZED
                | DriverCode::CONTEXT_IS_DESTROYED
        )
    }

    /// Whether work can run on the device no more, so that there is none to wait for: the driver is
    /// gone, or a fault in queued work or in the hardware stopped the device for good.
    #[must_use]
    pub const fn is_device_lost(&self) -> bool {
        // ECC error, illegal address, launch timeout, assert, and the kernel faults 714 to 719.
        self.is_driver_gone() || matches!(self.code.0, 214 | 700 | 702 | 710 | 714..=719)
    }
}

/// Rights of a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// Kernels and copies may read; a write faults.
    Read,
    /// Kernels and copies may read and write.
    ReadWrite,
}

/// How a granule is created.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct GranuleProps {
    /// Can be exported to another process as a file descriptor.
    pub exportable: bool,
    /// Asks for GPUDirect RDMA. Off by default: some platforms report it and then fail.
    pub rdma: bool,
}

/// Free and total bytes of the device, as the driver counts them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryInfo {
    /// Bytes that may still be created.
    pub free: u64,
    /// All bytes of the device.
    pub total: u64,
}

/// What a probe found to work by doing it, not by asking an attribute.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Capabilities {
    /// A create, map, set access, unmap, release round works.
    pub vmm: bool,
    /// One granule can be mapped at two addresses at once.
    pub alias: bool,
    /// Device memory holds bytes that can be read back (false on sim).
    pub data: bool,
    /// Granules created with [`GranuleProps::exportable`] work.
    pub exportable: bool,
    /// Granules created with [`GranuleProps::rdma`] work.
    pub rdma: bool,
}

/// Facts about one device that do not change while it is open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// The device's name, for people.
    pub name: String,
    /// Number of the device among its kind.
    pub ordinal: u32,
    /// Driver version as CUDA encodes it (13000 is 13.0); 0 for host and sim.
    pub driver_version: u32,
    /// Smallest unit of physical memory and of mapping, in bytes; a power of two.
    pub granularity: u64,
    /// All bytes of the device.
    pub total_memory: u64,
    /// What works.
    pub capabilities: Capabilities,
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} #{} ({}, granularity {})",
            self.name,
            self.ordinal,
            Bytes(self.total_memory),
            Bytes(self.granularity)
        )
    }
}
