//! Real memory on a machine without a GPU, with CUDA's rules.
//!
//! Physical memory is one sparse memory file. A granule is a range of it; mapping a granule maps
//! that range at a fixed address of a reservation, so aliases and remapping are real: bytes do not
//! move, addresses do. Device addresses are addresses of this process, but only the driver's own
//! work may use them: another access races with unmapping.
//!
//! | CUDA                    | here                                                             |
//! |-------------------------|------------------------------------------------------------------|
//! | reservation             | `PROT_NONE` anonymous mapping                                    |
//! | create, last reference  | a range of the file, a hole punched into it                      |
//! | map, set access, unmap  | `mmap` of the file, `mprotect`, `mmap` back to `PROT_NONE`       |
//! | stream                  | a queue with a worker thread, started by the first work          |
//! | illegal address         | work checks the books piece by piece; a violation loses the device |
//!
//! What the driver refuses, and with which code, is the contract of [`Driver`]. Beyond it:
//!
//! * A lost device answers `ILLEGAL_ADDRESS` to everything except [`Driver::stream_key`] and what
//!   gives things back: unmap, release, free reservation, destroy stream and event.
//! * In a forked child every call that could lock or wait answers `NOT_INITIALIZED` (as CUDA does),
//!   and dropping the driver does nothing. The child shares the mapped memory with its parent.
//! * Memory is taken from the system when it is first touched. If the system has less than
//!   [`HostConfig::total_memory`] then, it kills processes, as for any other memory.
//! * Dropping the driver waits for queued work, unless a [`Hold`] keeps it from ending. Then the
//!   workers end, and the memory goes, after the hold is dropped.
//! * Each mapping with other rights or contents than its neighbours counts against
//!   `vm.max_map_count` (usually 65,530 a process): `OUT_OF_MEMORY` past it.

#![deny(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use self::memory::Space;
use self::stream::Shared;
use self::table::Table;
use self::work::Work;
use super::capture::Step;
use super::{
    Access, Call, Capabilities, CopyPart, DeviceInfo, Driver, DriverCode, DriverError, DriverKind,
    DriverResult, EventId, GranuleProps, Graph, Hold, Kernel, MemoryInfo, PhysId, StreamId,
    StreamKey,
};
use crate::units::{GIB, KIB, MIB, TIB, Va, VaRange, round_down};
use crate::{Error, Result};

#[allow(unsafe_code)]
mod memory;
mod stream;
mod table;
#[cfg(test)]
mod tests;
mod work;

/// How large a [`HostDriver`] is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostConfig {
    /// Bytes of physical memory, rounded down to the granularity. By default three quarters of the
    /// machine's, at least 1 GiB.
    pub total_memory: u64,
    /// Smallest unit of memory and mapping in bytes: a power of two, at least a page. By default
    /// 2 MiB, as on CUDA.
    pub granularity: u64,
    /// Bytes of addresses that may be reserved at a time. By default 16 TiB.
    pub address_space: u64,
    /// Number of the device.
    pub ordinal: u32,
}

impl Default for HostConfig {
    fn default() -> Self {
        let granularity = 2 * MIB;
        let share = machine_memory().unwrap_or(0) / 4 * 3;
        Self {
            total_memory: round_down(share.max(GIB), granularity),
            granularity,
            address_space: 16 * TIB,
            ordinal: 0,
        }
    }
}

/// Bytes of memory of the machine.
fn machine_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(KIB)
}

/// What a [`HostDriver`] holds at a moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HostCounts {
    /// Granules created or still mapped.
    pub granules: usize,
    /// Mappings.
    pub mappings: usize,
    /// Reservations.
    pub reservations: usize,
    /// Streams besides the default one.
    pub streams: usize,
    /// Events.
    pub events: usize,
}

/// A device made of host memory. See the [module documentation](self).
///
/// # Example: one granule at two addresses
///
/// ```
/// use granule::driver::host::{HostConfig, HostDriver};
/// use granule::driver::{Access, Driver, GranuleProps, StreamId};
/// use granule::units::MIB;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = HostDriver::new(HostConfig::default())?;
/// let range = device.reserve(4 * MIB, 0)?;
/// let (a, b) = (range.sub(0, 2 * MIB).unwrap(), range.sub(2 * MIB, 2 * MIB).unwrap());
/// let granule = device.create(2 * MIB, GranuleProps::default())?;
/// device.map(a, granule)?;
/// device.map(b, granule)?;
/// device.set_access(range, Access::ReadWrite)?;
///
/// device.fill(a, 7, StreamId::DEFAULT)?;
/// let mut byte = [0];
/// device.copy_to_host(&mut byte, b.sub(100, 1).unwrap(), StreamId::DEFAULT)?;
/// assert_eq!(byte, [7]);
/// # Ok(())
/// # }
/// ```
pub struct HostDriver {
    info: DeviceInfo,
    shared: Arc<Shared>,
}

impl HostDriver {
    /// Makes a device.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`] if the granularity is not a power of two or less than a page, or if
    /// the memory is less than one granule. [`Error::Driver`] if the system refuses a memory file.
    pub fn new(config: HostConfig) -> Result<Self> {
        let HostConfig {
            granularity,
            address_space,
            ordinal,
            ..
        } = config;
        if !granularity.is_power_of_two() || granularity < memory::page_size() {
            return Err(Error::InvalidConfig {
                what: "granularity",
                value: granularity,
                why: "it must be a power of two and at least a page",
            });
        }
        let total_memory = round_down(config.total_memory, granularity);
        if total_memory == 0 {
            return Err(Error::InvalidConfig {
                what: "total memory",
                value: config.total_memory,
                why: "it must be at least the granularity",
            });
        }
        let table = Table::new(granularity, total_memory, address_space);
        let space = Space::new(table).map_err(|code| DriverError::new(Call::Init, code))?;
        Ok(Self {
            info: DeviceInfo {
                name: "host memory".to_owned(),
                ordinal,
                driver_version: 0,
                granularity,
                total_memory,
                capabilities: Capabilities {
                    vmm: true,
                    alias: true,
                    data: true,
                    exportable: false,
                    rdma: false,
                },
            },
            shared: Arc::new(Shared::new(space)),
        })
    }

    /// Bytes of memory taken from the system for granules: those touched since they were created.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        self.shared.space.resident()
    }

    /// What is there now.
    #[must_use]
    pub fn live(&self) -> HostCounts {
        let (granules, mappings, reservations) = self.shared.space.counts();
        let (streams, events) = self.shared.counts();
        HostCounts {
            granules,
            mappings,
            reservations,
            streams,
            events,
        }
    }

    /// Whether work touched an illegal address, so that the device does not work any more.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.shared.is_lost()
    }

    /// For calls that only give back: works on a lost device.
    fn tidy<T>(&self, f: impl FnOnce(&Arc<Shared>) -> Outcome<T>) -> Outcome<T> {
        if self.shared.space.is_forked() {
            return Err(DriverCode::NOT_INITIALIZED);
        }
        f(&self.shared)
    }

    /// For calls that reach the device.
    fn reach<T>(&self, f: impl FnOnce(&Arc<Shared>) -> Outcome<T>) -> Outcome<T> {
        self.tidy(|shared| {
            if shared.is_lost() {
                return Err(DriverCode::ILLEGAL_ADDRESS);
            }
            f(shared)
        })
    }

    fn submit(&self, work: Work, stream: StreamId) -> Outcome<()> {
        self.reach(|shared| {
            shared.stream_key(stream)?;
            work.validate()?;
            shared.submit(stream, work)
        })
    }
}

impl Drop for HostDriver {
    fn drop(&mut self) {
        if !self.shared.space.is_forked() {
            self.shared.shut_down();
        }
    }
}

impl fmt::Debug for HostDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostDriver")
            .field("ordinal", &self.info.ordinal)
            .field("total_memory", &self.info.total_memory)
            .field("granularity", &self.info.granularity)
            .finish_non_exhaustive()
    }
}

type Outcome<T> = std::result::Result<T, DriverCode>;

/// Says which call failed, over what.
trait Named<T> {
    fn named(self, call: Call, at: u64, len: u64) -> DriverResult<T>;
}

impl<T> Named<T> for Outcome<T> {
    fn named(self, call: Call, at: u64, len: u64) -> DriverResult<T> {
        self.map_err(|code| DriverError::new(call, code).about(at, len))
    }
}

impl Driver for HostDriver {
    fn kind(&self) -> DriverKind {
        DriverKind::Host
    }

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        self.reach(|shared| {
            Ok(MemoryInfo {
                free: shared.space.free(),
                total: self.info.total_memory,
            })
        })
        .named(Call::MemoryInfo, 0, 0)
    }

    fn reserve(&self, len: u64, align: u64) -> DriverResult<VaRange> {
        self.reach(|shared| shared.space.reserve(len, align))
            .named(Call::Reserve, 0, len)
    }

    fn free_reservation(&self, range: VaRange) -> DriverResult<()> {
        self.tidy(|shared| shared.space.free_reservation(range))
            .named(Call::FreeReservation, range.start().get(), range.len())
    }

    fn create(&self, len: u64, props: GranuleProps) -> DriverResult<PhysId> {
        self.reach(|shared| {
            if props.exportable || props.rdma {
                return Err(DriverCode::NOT_SUPPORTED);
            }
            shared.space.create(len)
        })
        .named(Call::Create, 0, len)
    }

    fn release(&self, phys: PhysId) -> DriverResult<()> {
        self.tidy(|shared| shared.space.release(phys))
            .named(Call::Release, phys.0, 0)
    }

    fn map(&self, range: VaRange, phys: PhysId) -> DriverResult<()> {
        self.reach(|shared| shared.space.map(range, phys)).named(
            Call::Map,
            range.start().get(),
            range.len(),
        )
    }

    fn set_access(&self, range: VaRange, access: Access) -> DriverResult<()> {
        self.reach(|shared| shared.space.set_access(range, access))
            .named(Call::SetAccess, range.start().get(), range.len())
    }

    fn unmap(&self, range: VaRange) -> DriverResult<()> {
        self.tidy(|shared| shared.space.unmap(range)).named(
            Call::Unmap,
            range.start().get(),
            range.len(),
        )
    }

    fn create_stream(&self) -> DriverResult<StreamId> {
        self.reach(|shared| Ok(shared.create_stream()))
            .named(Call::CreateStream, 0, 0)
    }

    fn destroy_stream(&self, stream: StreamId) -> DriverResult<()> {
        self.tidy(|shared| shared.destroy_stream(stream))
            .named(Call::DestroyStream, stream.0, 0)
    }

    fn stream_key(&self, stream: StreamId) -> DriverResult<StreamKey> {
        let named = |shared: &Shared| {
            let key = shared.stream_key(stream)?;
            shared.captures.refuse_wait(key).map(|()| key)
        };
        self.tidy(|shared| named(shared))
            .named(Call::StreamKey, stream.0, 0)
    }

    fn sync_stream(&self, stream: StreamId) -> DriverResult<()> {
        self.reach(|shared| shared.sync_stream(stream))
            .named(Call::SyncStream, stream.0, 0)
    }

    fn create_event(&self) -> DriverResult<EventId> {
        self.reach(|shared| Ok(shared.create_event()))
            .named(Call::CreateEvent, 0, 0)
    }

    fn destroy_event(&self, event: EventId) -> DriverResult<()> {
        self.tidy(|shared| shared.destroy_event(event))
            .named(Call::DestroyEvent, event.0, 0)
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        self.reach(|shared| shared.record_event(event, stream))
            .named(Call::RecordEvent, event.0, 0)
    }

    fn query_event(&self, event: EventId) -> DriverResult<bool> {
        self.reach(|shared| shared.query_event(event))
            .named(Call::QueryEvent, event.0, 0)
    }

    fn sync_event(&self, event: EventId) -> DriverResult<()> {
        self.reach(|shared| shared.sync_event(event))
            .named(Call::SyncEvent, event.0, 0)
    }

    fn wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()> {
        self.reach(|shared| shared.wait_event(stream, event))
            .named(Call::WaitEvent, event.0, 0)
    }

    fn fill(&self, range: VaRange, byte: u8, stream: StreamId) -> DriverResult<()> {
        self.submit(Work::Fill { range, byte }, stream).named(
            Call::Fill,
            range.start().get(),
            range.len(),
        )
    }

    fn copy(&self, dst: Va, src: VaRange, stream: StreamId) -> DriverResult<()> {
        self.submit(Work::Copy { dst, src }, stream)
            .named(Call::Copy, dst.get(), src.len())
    }

    fn copy_batch(&self, parts: &[CopyPart], stream: StreamId) -> DriverResult<()> {
        if self.is_capturing(stream)? {
            let mut parts = parts.iter();
            return parts.try_for_each(|part| self.copy(part.dst, part.src, stream));
        }
        CopyPart::check(parts)?;
        let works = parts.iter().filter(|part| !part.src.is_empty());
        let works = works.map(|&CopyPart { dst, src }| Work::Copy { dst, src });
        self.reach(|shared| shared.submit_all(stream, works))
            .named(Call::CopyBatch, 0, 0)
    }

    fn copy_from_host(&self, dst: Va, src: &[u8], stream: StreamId) -> DriverResult<()> {
        let len = src.len() as u64;
        self.reach(|shared| {
            shared.stream_key(stream)?;
            VaRange::new(dst, len).ok_or(DriverCode::INVALID_VALUE)?;
            shared.in_turn(stream, || {
                work::store(&shared.space, dst, src, || shared.is_lost())
            })
        })
        .named(Call::CopyFromHost, dst.get(), len)
    }

    fn copy_to_host(&self, dst: &mut [u8], src: VaRange, stream: StreamId) -> DriverResult<()> {
        self.reach(|shared| {
            shared.stream_key(stream)?;
            if dst.len() as u64 != src.len() {
                return Err(DriverCode::INVALID_VALUE);
            }
            shared.in_turn(stream, || {
                work::load(&shared.space, dst, src.start(), || shared.is_lost())
            })
        })
        .named(Call::CopyToHost, src.start().get(), src.len())
    }

    fn launch(&self, kernel: Kernel, stream: StreamId) -> DriverResult<()> {
        let (at, len) = match kernel {
            Kernel::WritePattern { range, .. }
            | Kernel::CheckPattern { range, .. }
            | Kernel::ReadSum { range, .. } => (range.start().get(), range.len()),
            Kernel::Spin { .. } => (0, 0),
        };
        self.submit(Work::Kernel(kernel), stream)
            .named(Call::Launch, at, len)
    }

    fn hold(&self, stream: StreamId) -> DriverResult<Hold> {
        self.reach(|shared| shared.hold(stream))
            .named(Call::Hold, stream.0, 0)
    }

    fn begin_capture(&self, stream: StreamId) -> DriverResult<()> {
        self.reach(|shared| shared.captures.begin(stream, shared.stream_key(stream)?))
            .named(Call::BeginCapture, stream.0, 0)
    }

    fn end_capture(&self, stream: StreamId) -> DriverResult<Graph> {
        let steps = self
            .reach(|shared| shared.captures.end(shared.stream_key(stream)?))
            .named(Call::EndCapture, stream.0, 0)?;
        let shared = Arc::downgrade(&self.shared);
        Ok(Graph::new(move |stream| {
            let launch = || {
                let shared = shared.upgrade().ok_or(DriverCode::DEINITIALIZED)?;
                if shared.space.is_forked() {
                    return Err(DriverCode::NOT_INITIALIZED);
                }
                if shared.is_lost() {
                    return Err(DriverCode::ILLEGAL_ADDRESS);
                }
                steps.iter().try_for_each(|step| {
                    let work = match *step {
                        Step::Fill { range, byte } => Work::Fill { range, byte },
                        Step::Copy { dst, src } => Work::Copy { dst, src },
                        Step::Launch(kernel) => Work::Kernel(kernel),
                    };
                    shared.submit(stream, work)
                })
            };
            launch().named(Call::Launch, stream.0, 0)
        }))
    }

    fn is_capturing(&self, stream: StreamId) -> DriverResult<bool> {
        self.reach(|shared| Ok(shared.captures.is_capturing(shared.stream_key(stream)?)))
            .named(Call::IsCapturing, stream.0, 0)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
