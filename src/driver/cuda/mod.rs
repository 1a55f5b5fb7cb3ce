//! A CUDA device through libcuda, opened at run time.
//!
//! One binary runs with and without a GPU: libcuda is looked for when a device is first asked for,
//! and its absence is a typed error ([`Error::LibraryMissing`]). Builds that would rather fail to
//! start without it link it instead: feature `linked` together with `--cfg link_libcuda`.
//!
//! # What a call does
//!
//! Every call checks that this is not a forked child of the process that opened the device, sets the
//! thread's capture mode to relaxed, makes the device's primary context current if it is not, calls
//! libcuda, and puts context and mode back. A thread that keeps the context current itself saves
//! the switch. In a forked child every call fails with `NOT_INITIALIZED`, as libcuda's own do, and dropping does nothing.
//!
//! # Ids
//!
//! Granules, events, reservations and streams are known by what this driver made: other ids are
//! refused (`INVALID_VALUE` for granules and addresses, `INVALID_HANDLE` otherwise) instead of
//! passed to libcuda, which may follow them as pointers. A stream that somebody else made is
//! announced with [`CudaDriver::adopt_stream`]. Fills, copies and kernels reach only addresses that
//! this driver reserved or allocated. Destroying something while another thread uses it is the
//! caller's mistake, and not always noticed.
//!
//! Mappings are known too, since libcuda accepts an unmap of addresses behind which nothing is.

/// libcuda's types as checked in: users need neither libclang nor a CUDA toolkit.
#[cfg(not(feature = "bindgen"))]
#[allow(warnings, clippy::all, clippy::pedantic, clippy::restriction)]
#[rustfmt::skip]
mod bindings {
    include!("bindings.rs");
}

/// libcuda's types as the installed cuda.h has them.
#[cfg(feature = "bindgen")]
#[allow(warnings, clippy::all, clippy::pedantic, clippy::restriction)]
mod bindings {
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}

mod batch;
mod context;
mod extras;
mod fork;
mod kernels;
mod known;
mod load;
mod ops;
mod probe;

#[cfg(test)]
mod device_tests;

use std::ffi::{CStr, c_char};
use std::sync::Arc;

use self::context::{Core, count, device, done};
use super::{Call, DeviceInfo, DriverCode, DriverKind, StreamId};
use crate::{Error, Result};

pub use extras::GraphExec;
pub use known::CudaCounts;

/// One CUDA device. Cheap to open again: all drivers of a device share its primary context with
/// each other, with the CUDA runtime and with whatever else uses it.
///
/// Dropping it gives back nothing but its hold on the context; streams, events, granules and
/// reservations are their owners' to give back before.
#[derive(Debug)]
pub struct CudaDriver {
    core: Arc<Core>,
    info: DeviceInfo,
}

/// How many CUDA devices this process can use. A driver without devices counts as 0.
///
/// # Errors
///
/// [`Error::LibraryMissing`], [`Error::SymbolMissing`] or [`Error::Forked`] if CUDA cannot be used
/// at all, [`Error::Driver`] if libcuda does not start.
pub fn device_count() -> Result<u32> {
    let table = match self::context::start() {
        Err(Error::Driver(e)) if e.code == DriverCode::NO_DEVICE => return Ok(0),
        other => other?,
    };
    Ok(count(table)?)
}

impl CudaDriver {
    /// Opens the device of that number and tries out what it can do, which takes about a
    /// millisecond, and a fraction of a second if the process has not used the device before.
    ///
    /// # Errors
    ///
    /// [`Error::LibraryMissing`] and [`Error::SymbolMissing`] if there is no usable libcuda,
    /// [`Error::DeviceMissing`] if there is no such device, [`Error::Unsupported`] if the device cannot
    /// do virtual memory management, [`Error::Forked`] in a forked child of a process that used
    /// CUDA, and [`Error::Driver`] for everything else, such as a device too full for one granule.
    pub fn open(ordinal: u32) -> Result<Self> {
        let (table, device) = device(ordinal)?;
        let core = Core::open(table, device)?;
        let mut info = DeviceInfo {
            name: device_name(&core)?,
            ordinal,
            driver_version: driver_version(&core)?,
            granularity: core.granularity,
            total_memory: total_memory(&core)?,
            capabilities: super::Capabilities::default(),
        };
        info.capabilities.data = true;
        let mut driver = Self {
            core: Arc::new(core),
            info,
        };
        driver.info.capabilities = probe::capabilities(&driver).map_err(|e| {
            // A full device is no reason to call it incapable.
            if e.is_out_of_memory() {
                Error::Driver(e)
            } else {
                Error::Unsupported {
                    driver: DriverKind::Cuda,
                    feature: "virtual memory management",
                    why: e.to_string(),
                }
            }
        })?;
        Ok(driver)
    }

    /// What this driver made and has not given back.
    #[must_use]
    pub fn live(&self) -> CudaCounts {
        self.core.known.counts()
    }

    /// Number of the device.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.info.ordinal
    }

    /// The primary context (a `CUcontext`), for handing to other libraries. Valid as long as the
    /// driver.
    #[must_use]
    pub fn context(&self) -> u64 {
        self.core.context
    }

    /// Lets a stream that this driver did not create be used with it. Costs next to nothing for a
    /// stream that is already known. The default stream need not be adopted.
    ///
    /// # Safety
    ///
    /// `raw` is a `CUstream` of this device's primary context, and stays one until the last call
    /// that names it, or until [`forget_stream`](Self::forget_stream).
    #[must_use]
    pub unsafe fn adopt_stream(&self, raw: u64) -> StreamId {
        let stream = StreamId(raw);
        self.core.known.add_stream(stream);
        stream
    }

    /// Ends what [`adopt_stream`](Self::adopt_stream) began, without destroying the stream. Unknown
    /// streams are ignored.
    pub fn forget_stream(&self, stream: StreamId) {
        let _ = self.core.known.take_stream(stream);
    }
}

fn device_name(core: &Core) -> Result<String> {
    let mut buffer = [0 as c_char; 256];
    // SAFETY: the buffer is as long as said; libcuda ends the name in it with a zero.
    let code = unsafe { (core.table.cuDeviceGetName)(buffer.as_mut_ptr(), 256, core.device) };
    done(Call::Init, code)?;
    // Signed on some targets, unsigned on others.
    let bytes = buffer.map(|c| c.to_ne_bytes()[0]);
    let name = CStr::from_bytes_until_nul(&bytes).unwrap_or(c"unnamed");
    Ok(name.to_string_lossy().into_owned())
}

fn driver_version(core: &Core) -> Result<u32> {
    let mut version = 0;
    // SAFETY: the pointer is to a live local.
    let code = unsafe { (core.table.cuDriverGetVersion)(&raw mut version) };
    done(Call::Init, code)?;
    Ok(u32::try_from(version).unwrap_or(0))
}

fn total_memory(core: &Core) -> Result<u64> {
    let mut total = 0;
    // SAFETY: the pointer is to a live local; the device is valid.
    let code = unsafe { (core.table.cuDeviceTotalMem_v2)(&raw mut total, core.device) };
    done(Call::Init, code)?;
    Ok(total as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_cuda_gets_a_typed_error() {
        match device_count() {
            Ok(count) => {
                let missing = CudaDriver::open(count).unwrap_err();
                assert_eq!(
                    missing,
                    Error::DeviceMissing {
                        ordinal: count,
                        count
                    }
                );
            }
            Err(Error::LibraryMissing { tried, .. }) => assert!(!tried.is_empty()),
            // A stub or a driver that does not match the machine.
            Err(Error::SymbolMissing { .. } | Error::Driver(_)) => {}
            Err(other) => panic!("{other:?}"),
        }
    }
}
