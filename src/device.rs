//! One device, whichever driver answers for it.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use crate::driver::{
    DeviceInfo, Driver, DriverError, DriverKind, DriverResult, MemoryInfo, SharedDriver, StreamId,
    StreamKey, cuda, sim,
};
use crate::stream::{Stream, WeakStream};
use crate::sync::Mutex;
use crate::units::TIB;
use crate::{Error, Result};

#[cfg(target_os = "linux")]
use crate::driver::host;

/// Environment variable that overrides [`Device::auto`]: `cuda`, `host` or `sim`.
pub const DRIVER_VARIABLE: &str = "GRANULE_DRIVER";

/// Default bound on all addresses reserved through one device, in bytes. A process has about
/// 126 TiB on an H200; half of that leaves room for other libraries.
pub const DEFAULT_ADDRESS_BOUND: u64 = 64 * TIB;

/// A device and the driver that reaches it. Cheap to clone; clones are the same device.
#[derive(Clone)]
pub struct Device {
    shared: Arc<Shared>,
}

struct Shared {
    driver: SharedDriver,
    fallback: Option<Error>,
    addresses: Mutex<Addresses>,
    quarantine: Mutex<Vec<Remains>>,
    /// Streams that others made.
    foreign: Mutex<HashMap<StreamKey, WeakStream>>,
}

/// Something that could not be given back when it should have been, and how to try again.
struct Remains {
    what: &'static str,
    retry: Retry,
}

/// Tries to give something back; true or an error of the last driver call.
pub(crate) type Retry = Box<dyn FnMut(&dyn Driver) -> DriverResult<()> + Send>;

#[derive(Clone, Copy)]
struct Addresses {
    reserved: u64,
    bound: u64,
}

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: StreamId = StreamId(2);

impl Device {
    /// The first CUDA device if there is one, else the host driver; `GRANULE_DRIVER` set to `cuda`,
    /// `host` or `sim` decides instead. [`kind`](Self::kind) tells which one it became, and
    /// [`fallback_reason`](Self::fallback_reason) why it is not CUDA.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownDriver`] for another value of the variable; whatever the driver asked for by
    /// name answers; without the variable, the host driver's error.
    pub fn auto() -> Result<Self> {
        match std::env::var(DRIVER_VARIABLE) {
            Ok(value) => Self::by_name(&value),
            Err(std::env::VarError::NotUnicode(value)) => Err(Error::UnknownDriver {
                value: value.to_string_lossy().into_owned(),
            }),
            Err(std::env::VarError::NotPresent) => match Self::cuda(0) {
                Ok(device) => Ok(device),
                Err(reason) => {
                    tracing::info!(%reason, "no CUDA device; using the host driver");
                    let host = Self::default_host()?;
                    Ok(Self::build(host.driver().clone(), Some(reason)))
                }
            },
        }
    }

    /// The device that `GRANULE_DRIVER` would name by this value.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownDriver`], or the error of the driver named.
    pub fn by_name(name: &str) -> Result<Self> {
        match name {
            "cuda" => Self::cuda(0),
            "host" => Self::default_host(),
            "sim" => Self::sim(sim::SimConfig::default()),
            other => Err(Error::UnknownDriver {
                value: other.to_owned(),
            }),
        }
    }

    /// The CUDA device of that number.
    ///
    /// # Errors
    ///
    /// [`Error::LibraryMissing`], [`Error::SymbolMissing`], [`Error::DeviceMissing`],
    /// [`Error::Unsupported`] if the probe of virtual memory management fails, or a driver error.
    pub fn cuda(ordinal: u32) -> Result<Self> {
        Ok(Self::from_driver(Arc::new(cuda::CudaDriver::open(
            ordinal,
        )?)))
    }

    /// Host memory that obeys CUDA's rules.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`], or a driver error when the system refuses memory or addresses.
    #[cfg(target_os = "linux")]
    pub fn host(config: host::HostConfig) -> Result<Self> {
        Ok(Self::from_driver(Arc::new(host::HostDriver::new(config)?)))
    }

    /// Bookkeeping with a virtual clock.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`].
    pub fn sim(config: sim::SimConfig) -> Result<Self> {
        Ok(Self::from_driver(Arc::new(sim::SimDriver::new(config)?)))
    }

    /// Any driver, such as one in a fault or record wrapper.
    #[must_use]
    pub fn from_driver(driver: SharedDriver) -> Self {
        Self::build(driver, None)
    }

    #[cfg(target_os = "linux")]
    fn default_host() -> Result<Self> {
        Self::host(host::HostConfig::default())
    }

    #[cfg(not(target_os = "linux"))]
    fn default_host() -> Result<Self> {
        Err(Error::Unsupported {
            driver: DriverKind::Host,
            feature: "the host driver",
            why: "it needs Linux (memfd)".to_owned(),
        })
    }

    fn build(driver: SharedDriver, fallback: Option<Error>) -> Self {
        Self {
            shared: Arc::new(Shared {
                driver,
                fallback,
                addresses: Mutex::new(Addresses {
                    reserved: 0,
                    bound: DEFAULT_ADDRESS_BOUND,
                }),
                quarantine: Mutex::new(Vec::new()),
                foreign: Mutex::new(HashMap::new()),
            }),
        }
    }

    /// The driver, for calls that this crate has no wrapper for.
    #[must_use]
    pub fn driver(&self) -> &SharedDriver {
        &self.shared.driver
    }

    /// Which driver is live.
    #[must_use]
    pub fn kind(&self) -> DriverKind {
        self.shared.driver.kind()
    }

    /// Facts about the device.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        self.shared.driver.info()
    }

    /// Why [`auto`](Self::auto) did not take a CUDA device, if it did not.
    #[must_use]
    pub fn fallback_reason(&self) -> Option<&Error> {
        self.shared.fallback.as_ref()
    }

    /// Free and total bytes now, as the driver counts them.
    ///
    /// # Errors
    ///
    /// A driver error.
    pub fn memory_info(&self) -> Result<MemoryInfo> {
        Ok(self.shared.driver.memory_info()?)
    }

    /// A new stream without implicit order against any other.
    ///
    /// # Errors
    ///
    /// A driver error.
    pub fn create_stream(&self) -> Result<Stream> {
        Stream::create(self)
    }

    /// The device's default stream.
    ///
    /// # Errors
    ///
    /// A driver error.
    pub fn default_stream(&self) -> Result<Stream> {
        Stream::default_of(self)
    }

    /// A stream that somebody else made and destroys, and that the driver knows: on CUDA it is adopted
    /// first ([`CudaDriver::adopt_stream`](crate::driver::cuda::CudaDriver::adopt_stream)). It is told
    /// from others by its key, so that a handle which is used again is another stream. Before it is
    /// destroyed, [`Stream::retire`] takes note of its last work, and whoever adopted it has the driver
    /// [forget](crate::driver::cuda::CudaDriver::forget_stream) it. Memory used on a stream that was destroyed
    /// without is kept until the device goes, as nobody can say when its work is done.
    ///
    /// # Errors
    ///
    /// [`Error::Stale`] if the driver knows no such stream, or a driver error.
    pub fn foreign_stream(&self, id: StreamId) -> Result<Stream> {
        Stream::foreign(self, id, None)
    }

    /// The foreign stream of a key, or a new one. The driver gives no key of a captured stream: then it is told by
    /// its handle, which names the same stream for as long as somebody here has it.
    pub(crate) fn known_stream(
        &self,
        id: StreamId,
        key: Option<StreamKey>,
        make: impl FnOnce() -> Stream,
    ) -> Stream {
        // Dropped without the lock: what keeps a stream alive is somebody else's.
        let alive: Vec<Stream>;
        let mut known = self.shared.foreign.lock();
        let named = key.and_then(|key| known.get(&key));
        if let Some(stream) = named.and_then(WeakStream::upgrade) {
            return stream;
        }
        alive = known.values().filter_map(WeakStream::upgrade).collect();
        let same = alive.iter().find(|stream| {
            stream.id() == id && !stream.is_retired() && (key.is_none() || stream.is_unnamed())
        });
        // One handle for a stream of each thread.
        let is_of_thread = self.kind() == DriverKind::Cuda && id == PER_THREAD;
        let same = same.filter(|_| !is_of_thread);
        let stream = match same {
            Some(stream) => stream.clone(),
            None => make(),
        };
        if let Some(key) = key {
            stream.is_named(key);
        }
        if known.len() >= 64 && known.len().is_power_of_two() {
            known.retain(|_, weak| weak.upgrade().is_some());
        }
        known.insert(key.unwrap_or(stream.key()), stream.downgrade());
        stream
    }

    /// Whether two handles name the same opened device.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Bytes of addresses reserved through this device.
    #[must_use]
    pub fn reserved_addresses(&self) -> u64 {
        self.shared.addresses.lock().reserved
    }

    /// Sets the bound on [`reserved_addresses`](Self::reserved_addresses), in bytes
    /// ([`DEFAULT_ADDRESS_BOUND`] at first). Reservations that exist already stay.
    pub fn set_address_bound(&self, bytes: u64) {
        self.shared.addresses.lock().bound = bytes;
    }

    /// Things the driver refused to take back when they were dropped. They are kept, tried again
    /// with every new reservation and by [`sweep`](Self::sweep), and hurt nobody else.
    #[must_use]
    pub fn quarantined(&self) -> usize {
        self.shared.quarantine.lock().len()
    }

    /// Tries once more to give back what is quarantined, and answers how much is left. Blocks on
    /// work that still uses an arena that was dropped while the driver refused to wait for it.
    pub fn sweep(&self) -> usize {
        let waiting = std::mem::take(&mut *self.shared.quarantine.lock());
        if waiting.is_empty() {
            return 0;
        }
        // No lock is held here: a retry calls the driver and may drop the last user of this device.
        let driver = self.shared.driver.clone();
        let left: Vec<_> = waiting
            .into_iter()
            .filter_map(|mut remains| remains.stay(&*driver).map(|_| remains))
            .collect();
        let mut quarantine = self.shared.quarantine.lock();
        quarantine.extend(left);
        quarantine.len()
    }

    /// Gives something back now, at the second try, or some time later. A driver that is gone has
    /// taken everything back itself.
    pub(crate) fn give_back(&self, what: &'static str, retry: Retry) {
        let driver = &**self.driver();
        let mut remains = Remains { what, retry };
        let Some(first) = remains.stay(driver) else {
            return;
        };
        if remains.stay(driver).is_some() {
            tracing::error!(error = %first, what, "quarantined");
            self.shared.quarantine.lock().push(remains);
        }
    }

    /// Counts `bytes` of addresses against the bound.
    pub(crate) fn admit_addresses(&self, bytes: u64) -> Result<()> {
        let mut a = self.shared.addresses.lock();
        match a.reserved.checked_add(bytes) {
            Some(sum) if sum <= a.bound => {
                a.reserved = sum;
                Ok(())
            }
            _ => Err(Error::AddressSpaceExhausted {
                requested: bytes,
                reserved: a.reserved,
                bound: a.bound,
            }),
        }
    }

    /// Takes back what [`admit_addresses`](Self::admit_addresses) counted.
    pub(crate) fn discharge_addresses(&self, bytes: u64) {
        let mut a = self.shared.addresses.lock();
        a.reserved = a.reserved.saturating_sub(bytes);
    }

    /// The error for a reservation the driver refused.
    pub(crate) fn no_addresses(&self, requested: u64) -> Error {
        let a = *self.shared.addresses.lock();
        Error::AddressSpaceExhausted {
            requested,
            reserved: a.reserved,
            bound: a.bound,
        }
    }
}

impl Remains {
    /// Tries again; why it has to stay, if it has to. A driver that is gone has taken it back.
    fn stay(&mut self, driver: &dyn Driver) -> Option<DriverError> {
        let refused = (self.retry)(driver).err()?;
        (!refused.is_driver_gone()).then_some(refused)
    }
}

impl fmt::Debug for Remains {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.what)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        for mut remains in std::mem::take(self.quarantine.get_mut()) {
            if let Some(error) = remains.stay(&*self.driver) {
                tracing::error!(%error, what = remains.what, "leaked");
            }
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}: {})", self.kind(), self.info())
    }
}
