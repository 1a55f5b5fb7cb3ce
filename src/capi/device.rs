//! Devices, streams and pools.

use std::ffi::{CStr, c_char, c_void};

use super::error::{Failure, GRANULE_UNSUPPORTED, Out, Outcome, granule_status, guard};
use super::handle::tables;
use crate::driver::DriverKind;
use crate::units::{Va, VaRange};
use crate::{Device, Policy, Pool, PoolConfig, Stream};

/// A device; 0 is none. Close it with `granule_device_close`; what was made of it lives on.
pub type granule_device = u64;
/// A stream; 0 is none.
pub type granule_stream = u64;
/// A pool; 0 is none.
pub type granule_pool = u64;

/// `granule_device_info.driver`.
pub const GRANULE_DRIVER_CUDA: u32 = 1;
/// `granule_device_info.driver`.
pub const GRANULE_DRIVER_HOST: u32 = 2;
/// `granule_device_info.driver`.
pub const GRANULE_DRIVER_SIM: u32 = 3;

/// Facts about a device. Sizes in bytes.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct granule_device_info {
    /// Name, ended by a zero, cut if it is longer.
    pub name: [c_char; 64],
    /// All of its memory.
    pub total_memory: u64,
    /// Smallest granule.
    pub granularity: u64,
    /// One of `GRANULE_DRIVER_...`.
    pub driver: u32,
    /// Number of the device.
    pub ordinal: u32,
}

/// `granule_pool_config.policy`: by need, the rest kept idle up to the watermark; `base` bytes are static.
pub const GRANULE_POLICY_HYBRID: u32 = 0;
/// `granule_pool_config.policy`: all created up front, never returned.
pub const GRANULE_POLICY_STATIC: u32 = 1;
/// `granule_pool_config.policy`: returned as soon as it is idle.
pub const GRANULE_POLICY_DYNAMIC: u32 = 2;

/// Settings of a pool. Start from `granule_pool_config_init`. Sizes in bytes.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct granule_pool_config {
    /// The most that may be created at a time; 0 for all of the device's memory.
    pub budget: u64,
    /// The granule.
    pub granule: u64,
    /// The largest granule; at least `granule`.
    pub largest_granule: u64,
    /// Static bytes of the hybrid policy.
    pub base: u64,
    /// Idle bytes kept; `UINT64_MAX` for the policy's default.
    pub watermark: u64,
    /// Idle bytes created ahead of need by a thread.
    pub spare: u64,
    /// Microseconds that an allocation may wait for work to end.
    pub wait_us: u64,
    /// One of `GRANULE_POLICY_...`.
    pub policy: u32,
    /// Not 0: zero memory of one owner before another gets it.
    pub zero_on_handover: u32,
    /// Created beyond the highest `mapped` and so much more, in 1/10,000, memory takes the place of idle granules;
    /// `UINT32_MAX` for never.
    pub slack: u32,
}

/// Figures of a pool. Sizes in bytes. `created == mapped + idle + in_flight` at every moment.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[allow(missing_docs)]
pub struct granule_pool_stats {
    pub budget: u64,
    pub created: u64,
    pub mapped: u64,
    pub idle: u64,
    pub in_flight: u64,
    pub pending: u64,
    pub peak_created: u64,
    pub peak_mapped: u64,
    pub creates: u64,
    pub releases: u64,
    pub recycled: u64,
}

/// A text that C gave.
///
/// # Safety
///
/// Null, or a string that ends with a zero and lives as long as the answer is used.
pub(super) unsafe fn text<'a>(at: *const c_char, what: &str) -> Outcome<Option<&'a str>> {
    if at.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, and the caller's promise.
    let text = unsafe { CStr::from_ptr(at) };
    let text = text.to_str();
    text.map(Some)
        .map_err(|_| Failure::invalid(format!("{what} is not UTF-8")))
}

fn named(name: &str) -> Outcome<Device> {
    Ok(match name.split_once(':') {
        None => Device::by_name(name)?,
        Some(("cuda", number)) => {
            let number = number.parse();
            let number = number
                .map_err(|_| Failure::invalid(format!("{name:?} has no number after the colon")))?;
            Device::cuda(number)?
        }
        Some(_) => {
            let message = format!("{name:?} is no device; use cuda, cuda:N, host or sim");
            return Err(Failure::new(GRANULE_UNSUPPORTED, message));
        }
    })
}

/// Opens a device: `cuda`, `cuda:N`, `host` (host memory under CUDA's rules) or `sim`; null for the one that
/// `GRANULE_DRIVER` names, else the first CUDA device, else `host`.
///
/// # Safety
///
/// `name` is null or a string; `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_device_open(
    name: *const c_char,
    out: *mut granule_device,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        // SAFETY: the caller's promise.
        let device = match unsafe { text(name, "name") }? {
            None => Device::auto()?,
            Some(name) => named(name)?,
        };
        out.set(tables().devices.insert(device)?);
        Ok(())
    })
}

/// Closes the handle. Pools, heaps and arenas of the device live on.
#[unsafe(no_mangle)]
pub extern "C" fn granule_device_close(device: granule_device) -> granule_status {
    guard(|| tables().devices.remove(device).map(drop))
}

/// Facts about a device.
///
/// # Safety
///
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_device_get_info(
    device: granule_device,
    out: *mut granule_device_info,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        let device = tables().devices.get(device)?;
        let info = device.info();
        let mut name = [0; 64];
        // The last one stays zero.
        for (to, from) in name.iter_mut().take(63).zip(info.name.bytes()) {
            *to = c_char::from_ne_bytes([from]);
        }
        out.set(granule_device_info {
            name,
            total_memory: info.total_memory,
            granularity: info.granularity,
            driver: match device.kind() {
                DriverKind::Cuda => GRANULE_DRIVER_CUDA,
                DriverKind::Host => GRANULE_DRIVER_HOST,
                DriverKind::Sim => GRANULE_DRIVER_SIM,
            },
            ordinal: info.ordinal,
        });
        Ok(())
    })
}

/// Free and total bytes now, as the driver counts them.
///
/// # Safety
///
/// `free` and `total` are null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_device_memory(
    device: granule_device,
    free: *mut u64,
    total: *mut u64,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let free = unsafe { Out::new(free, "free") }?;
        // SAFETY: the caller's promise.
        let total = unsafe { Out::new(total, "total") }?;
        let info = tables().devices.get(device)?.memory_info()?;
        free.set(info.free);
        total.set(info.total);
        Ok(())
    })
}

/// Makes a stream without implicit order against others.
///
/// # Safety
///
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_stream_create(
    device: granule_device,
    out: *mut granule_stream,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        let stream = tables().devices.get(device)?.create_stream()?;
        out.set(tables().streams.insert(stream)?);
        Ok(())
    })
}

/// Takes a stream of another library: on CUDA a `CUstream` or `cudaStream_t` of the device's primary context; null is
/// the default stream. It is not destroyed when the handle is closed.
///
/// # Safety
///
/// `out` is null or valid for a write. `raw` is such a stream, until the handle is closed and whatever used it is gone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_stream_adopt(
    device: granule_device,
    raw: *mut c_void,
    out: *mut granule_stream,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        let device = tables().devices.get(device)?;
        // SAFETY: the caller's promise.
        let stream = unsafe { device.adopt_stream(raw.expose_provenance() as u64) }?;
        out.set(tables().streams.insert(stream)?);
        Ok(())
    })
}

/// The driver's handle of a stream: on CUDA a `CUstream`.
///
/// # Safety
///
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_stream_raw(
    stream: granule_stream,
    out: *mut *mut c_void,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        let id = tables().streams.get(stream)?.id().0;
        let id = usize::try_from(id).map_err(|_| Failure::invalid("no pointer"))?;
        out.set(std::ptr::with_exposed_provenance_mut(id));
        Ok(())
    })
}

/// Closes the handle. A stream made here is destroyed when nothing uses it any more; its work finishes.
#[unsafe(no_mangle)]
pub extern "C" fn granule_stream_close(stream: granule_stream) -> granule_status {
    guard(|| tables().streams.remove(stream).map(drop))
}

/// Waits until all work queued on the stream is done.
#[unsafe(no_mangle)]
pub extern "C" fn granule_stream_synchronize(stream: granule_stream) -> granule_status {
    guard(|| Ok(tables().streams.get(stream)?.synchronize()?))
}

/// Makes later work of `stream` wait, on the device, for what is queued on `other` so far.
#[unsafe(no_mangle)]
pub extern "C" fn granule_stream_wait(
    stream: granule_stream,
    other: granule_stream,
) -> granule_status {
    guard(|| {
        let fence = tables().streams.get(other)?.fence()?;
        Ok(tables().streams.get(stream)?.wait(&fence)?)
    })
}

fn range(addr: u64, len: usize) -> Outcome<VaRange> {
    let range = VaRange::new(Va::new(addr), len as u64);
    range.ok_or_else(|| Failure::invalid(format!("{len} bytes at {addr:#x} pass the last address")))
}

fn on(stream: granule_stream) -> Outcome<std::sync::Arc<Stream>> {
    tables().streams.get(stream)
}

/// Queues a fill of `len` bytes at `addr`.
#[unsafe(no_mangle)]
pub extern "C" fn granule_fill(
    stream: granule_stream,
    addr: u64,
    byte: u8,
    len: usize,
) -> granule_status {
    guard(|| {
        let (stream, range) = (on(stream)?, range(addr, len)?);
        let driver = stream.device().driver();
        driver
            .fill(range, byte, stream.id())
            .map_err(crate::Error::from)?;
        Ok(())
    })
}

/// Copies from the host to the device in stream order; returns when `from` may change again.
///
/// # Safety
///
/// `from` is valid for reads of `len` bytes, or `len` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_copy_from_host(
    stream: granule_stream,
    to: u64,
    from: *const c_void,
    len: usize,
) -> granule_status {
    guard(|| {
        if len == 0 {
            return Ok(());
        }
        if from.is_null() {
            return Err(Failure::invalid("from is a null pointer"));
        }
        let stream = on(stream)?;
        // SAFETY: not null; the rest is the caller's promise.
        let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len) };
        let driver = stream.device().driver();
        let copied = driver.copy_from_host(Va::new(to), bytes, stream.id());
        Ok(copied.map_err(crate::Error::from)?)
    })
}

/// Copies from the device to the host, behind what is queued on the stream; returns when the bytes are there.
///
/// # Safety
///
/// `to` is valid for writes of `len` bytes, which have been written before, or `len` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_copy_to_host(
    stream: granule_stream,
    to: *mut c_void,
    from: u64,
    len: usize,
) -> granule_status {
    guard(|| {
        if len == 0 {
            return Ok(());
        }
        if to.is_null() {
            return Err(Failure::invalid("to is a null pointer"));
        }
        let (stream, range) = (on(stream)?, range(from, len)?);
        // SAFETY: not null; the rest is the caller's promise.
        let bytes = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), len) };
        let driver = stream.device().driver();
        let copied = driver.copy_to_host(bytes, range, stream.id());
        Ok(copied.map_err(crate::Error::from)?)
    })
}

impl Default for granule_pool_config {
    fn default() -> Self {
        let config = PoolConfig::default();
        Self {
            budget: config.budget.unwrap_or(0),
            granule: config.granule,
            largest_granule: config.largest_granule,
            base: 0,
            watermark: u64::MAX,
            spare: config.spare,
            wait_us: u64::try_from(config.wait.as_micros()).unwrap_or(u64::MAX),
            policy: GRANULE_POLICY_HYBRID,
            zero_on_handover: u32::from(config.zero_on_handover),
            slack: config.slack.unwrap_or(u32::MAX),
        }
    }
}

impl granule_pool_config {
    fn settings(&self) -> Outcome<PoolConfig> {
        let config = self;
        Ok(PoolConfig {
            budget: (config.budget != 0).then_some(config.budget),
            granule: config.granule,
            largest_granule: config.largest_granule,
            policy: match config.policy {
                GRANULE_POLICY_HYBRID => Policy::Hybrid { base: config.base },
                GRANULE_POLICY_STATIC => Policy::Static,
                GRANULE_POLICY_DYNAMIC => Policy::Dynamic,
                other => return Err(Failure::invalid(format!("{other} is no policy"))),
            },
            watermark: (config.watermark != u64::MAX).then_some(config.watermark),
            zero_on_handover: config.zero_on_handover != 0,
            slack: (config.slack != u32::MAX).then_some(config.slack),
            spare: config.spare,
            wait: std::time::Duration::from_micros(config.wait_us),
            ..PoolConfig::default()
        })
    }
}

/// The default settings.
///
/// # Safety
///
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_pool_config_init(out: *mut granule_pool_config) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        unsafe { Out::new(out, "out") }?.set(granule_pool_config::default());
        Ok(())
    })
}

/// A pool of the device's memory; null settings are the default ones.
///
/// # Safety
///
/// `config` is null or points to settings; `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_pool_create(
    device: granule_device,
    config: *const granule_pool_config,
    out: *mut granule_pool,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        // SAFETY: the caller's promise.
        let config = unsafe { config.as_ref() };
        let config = config.copied().unwrap_or_default();
        let device = tables().devices.get(device)?;
        let pool = Pool::new(&device, config.settings()?)?;
        out.set(tables().pools.insert(pool)?);
        Ok(())
    })
}

/// Closes the handle. Arenas and heaps of the pool keep it alive. Its thread, if memory is made or mapped ahead, ends the call
/// it is in first; nobody waits for that.
#[unsafe(no_mangle)]
pub extern "C" fn granule_pool_close(pool: granule_pool) -> granule_status {
    guard(|| tables().pools.remove(pool).map(drop))
}

/// Changes the budget, in bytes. `GRANULE_BUSY` if more is in use.
#[unsafe(no_mangle)]
pub extern "C" fn granule_pool_set_budget(pool: granule_pool, bytes: u64) -> granule_status {
    guard(|| Ok(tables().pools.get(pool)?.set_budget(bytes)?))
}

/// Returns idle memory to the device until at most `keep` idle bytes are left; `released` (may be null) gets the bytes.
///
/// # Safety
///
/// `released` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_pool_trim(
    pool: granule_pool,
    keep: u64,
    released: *mut u64,
) -> granule_status {
    guard(|| {
        let bytes = tables().pools.get(pool)?.trim(keep)?;
        if !released.is_null() {
            // SAFETY: the caller's promise.
            unsafe { Out::new(released, "released") }?.set(bytes);
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
pub unsafe extern "C" fn granule_pool_get_stats(
    pool: granule_pool,
    out: *mut granule_pool_stats,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        let stats = tables().pools.get(pool)?.stats();
        out.set(granule_pool_stats {
            budget: stats.budget,
            created: stats.created,
            mapped: stats.mapped,
            idle: stats.idle,
            in_flight: stats.in_flight,
            pending: stats.pending,
            peak_created: stats.peak_created,
            peak_mapped: stats.peak_mapped,
            creates: stats.creates,
            releases: stats.releases,
            recycled: stats.recycled,
        });
        Ok(())
    })
}

/// Sets the peaks of a pool to what there is now.
#[unsafe(no_mangle)]
pub extern "C" fn granule_pool_reset_peaks(pool: granule_pool) -> granule_status {
    guard(|| {
        tables().pools.get(pool)?.reset_peaks();
        Ok(())
    })
}

/// Recounts what the pool has and compares it with its figures: `GRANULE_INTERNAL` if they differ. For tests: exact only
/// while no other thread is inside a call that concerns the pool.
#[unsafe(no_mangle)]
pub extern "C" fn granule_pool_audit(pool: granule_pool) -> granule_status {
    guard(|| Ok(tables().pools.get(pool)?.audit().map(drop)?))
}

/// How many handles of all kinds are open in this process. For tests that look for lost ones.
#[unsafe(no_mangle)]
pub extern "C" fn granule_open_handles() -> u64 {
    tables().open() as u64
}
