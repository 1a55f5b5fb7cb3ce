//! What serves PyTorch on one device.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::conf::{Conf, fraction_of};
use super::error::{Failure, GRANULE_BUSY, Outcome};
use super::scopes::Scopes;
use crate::driver::record::RecordDriver;
use crate::sync::{Mutex, RwLock};
use crate::units::Va;
use crate::{DEFAULT_ALIGN, Device, Error, Heap, Pool, Stream, StreamHeap};

/// The most devices of a process.
const DEVICES: usize = 64;

/// One device under PyTorch.
pub(super) struct Site {
    pub(super) device: Device,
    pub(super) pool: Pool,
    pub(super) heap: Heap,
    pub(super) scopes: Scopes,
    /// By raw handle. PyTorch uses some dozens of streams and never destroys them.
    streams: RwLock<Vec<(u64, StreamHeap)>>,
    /// Bytes that PyTorch asked for and did not free.
    requested: AtomicU64,
    requested_peak: AtomicU64,
    timing: Option<Timing>,
}

/// What serving PyTorch costs, counted only on demand.
pub(super) struct Timing {
    pub(super) record: Arc<RecordDriver>,
    pub(super) allocs: Cost,
    pub(super) frees: Cost,
}

/// Calls of one kind, and the time in them.
#[derive(Default)]
pub(super) struct Cost {
    pub(super) calls: AtomicU64,
    pub(super) nanos: AtomicU64,
}

impl Cost {
    fn add(&self, start: Instant) {
        let nanos = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.calls.fetch_add(1, Relaxed);
        self.nanos.fetch_add(nanos, Relaxed);
    }
}

/// All devices, and the settings they are opened with.
pub(super) struct Sites {
    conf: Mutex<Conf>,
    sites: [OnceLock<Site>; DEVICES],
    making: Mutex<()>,
}

/// Never dropped: PyTorch frees until the process ends.
pub(super) fn sites() -> &'static Sites {
    static SITES: OnceLock<Sites> = OnceLock::new();
    SITES.get_or_init(|| Sites {
        conf: Mutex::default(),
        sites: std::array::from_fn(|_| OnceLock::new()),
        making: Mutex::default(),
    })
}

impl Sites {
    /// The settings of devices that are not open yet.
    pub(super) fn configure(&self, conf: Conf) -> Outcome {
        let _making = self.making.lock();
        if self.open().next().is_some() {
            let message = "memory has been allocated already; configure before that";
            return Err(Failure::new(GRANULE_BUSY, message));
        }
        *self.conf.lock() = conf;
        Ok(())
    }

    /// Devices in use.
    pub(super) fn open(&self) -> impl Iterator<Item = &Site> {
        self.sites.iter().filter_map(OnceLock::get)
    }

    /// The device of a number, opened at its first use.
    #[inline]
    pub(super) fn get(&self, device: i32) -> Outcome<&Site> {
        let slot = usize::try_from(device).ok().and_then(|d| self.sites.get(d));
        let slot = slot.ok_or_else(|| Failure::invalid(format!("{device} is no device")))?;
        if let Some(site) = slot.get() {
            return Ok(site);
        }
        let _making = self.making.lock();
        if let Some(site) = slot.get() {
            return Ok(site);
        }
        let conf = self.conf.lock().clone();
        let site = Site::open(&conf, u32::try_from(device).unwrap_or(0))?;
        Ok(slot.get_or_init(|| site))
    }

    /// The device that a block is on.
    pub(super) fn owner(&self, addr: u64) -> Option<&Site> {
        self.open().find(|site| site.knows(addr))
    }
}

impl Site {
    fn open(conf: &Conf, ordinal: u32) -> Outcome<Self> {
        let (device, record) = conf.open(ordinal)?;
        let pool = Pool::new(&device, conf.pool(&device))?;
        let heap = Heap::new(&pool, conf.heap(device.info().total_memory))?;
        Ok(Self {
            device,
            pool,
            heap,
            scopes: Scopes::default(),
            streams: RwLock::default(),
            requested: AtomicU64::new(0),
            requested_peak: AtomicU64::new(0),
            timing: record.map(|record| Timing {
                record,
                allocs: Cost::default(),
                frees: Cost::default(),
            }),
        })
    }

    /// The heap's side for a stream of PyTorch.
    ///
    /// # Safety
    ///
    /// `raw` is a stream of this device that is never destroyed, or whose memory has been freed before.
    pub(super) unsafe fn on(&self, raw: u64) -> Result<StreamHeap, Error> {
        let find = |streams: &[(u64, StreamHeap)]| {
            let found = streams.iter().find(|(other, _)| *other == raw);
            found.map(|(_, heap)| heap.clone())
        };
        if let Some(heap) = find(&self.streams.read()) {
            return Ok(heap);
        }
        // SAFETY: the caller's promise.
        let stream = unsafe { self.device.adopt_stream(raw) }?;
        let heap = self.heap.on(&stream)?;
        let mut streams = self.streams.write();
        if find(&streams).is_none() {
            streams.push((raw, heap.clone()));
        }
        Ok(heap)
    }

    /// An allocation on a stream.
    ///
    /// # Safety
    ///
    /// As [`on`](Self::on).
    #[inline]
    pub(super) unsafe fn alloc(&self, size: u64, raw: u64) -> Result<u64, Error> {
        let Some(timing) = &self.timing else {
            // SAFETY: the caller's promise.
            return unsafe { self.take(size, raw) };
        };
        let start = Instant::now();
        // SAFETY: the caller's promise.
        let addr = unsafe { self.take(size, raw) };
        timing.allocs.add(start);
        addr
    }

    /// # Safety
    ///
    /// As [`on`](Self::on).
    #[inline]
    unsafe fn take(&self, size: u64, raw: u64) -> Result<u64, Error> {
        // SAFETY: the caller's promise.
        let stream = || unsafe { self.device.adopt_stream(raw) };
        let addr = match self.scopes.alloc(&self.heap, size, raw, stream)? {
            Some(addr) => addr,
            None => {
                let streams = self.streams.read();
                let found = streams.iter().find(|(other, _)| *other == raw);
                let heap = match found {
                    Some((_, heap)) => {
                        if let Some(addr) = heap.kept_raw(size)? {
                            return Ok(self.count(addr.get(), size));
                        }
                        // A miss calls the driver, and new streams must not wait for that.
                        let heap = heap.clone();
                        drop(streams);
                        heap
                    }
                    None => {
                        drop(streams);
                        // SAFETY: the caller's promise.
                        unsafe { self.on(raw) }?
                    }
                };
                heap.alloc_raw(size, DEFAULT_ALIGN)?.get()
            }
        };
        Ok(self.count(addr, size))
    }

    /// Adds to what was asked for.
    #[inline]
    fn count(&self, addr: u64, size: u64) -> u64 {
        let now = self.requested.fetch_add(size, Relaxed) + size;
        // Most allocations are no peak, and need not write to what all threads look at.
        if now > self.requested_peak.load(Relaxed) {
            self.requested_peak.fetch_max(now, Relaxed);
        }
        addr
    }

    /// Frees a block of `size` bytes as they were asked for.
    #[inline]
    pub(super) fn free(&self, addr: u64, size: u64) -> Result<(), Error> {
        let Some(timing) = &self.timing else {
            return self.give(addr, size);
        };
        let start = Instant::now();
        let freed = self.give(addr, size);
        timing.frees.add(start);
        freed
    }

    #[inline]
    fn give(&self, addr: u64, size: u64) -> Result<(), Error> {
        if !self.scopes.free(addr, || self.known_streams()) {
            self.heap.free_raw(Va::new(addr))?;
        }
        // Never below zero, whatever size was named.
        let less = |now: u64| Some(now.saturating_sub(size));
        let _ = self.requested.fetch_update(Relaxed, Relaxed, less);
        Ok(())
    }

    /// All streams that memory was allocated or used on.
    pub(super) fn known_streams(&self) -> Vec<Stream> {
        let streams = self.streams.read();
        streams
            .iter()
            .map(|(_, heap)| heap.stream().clone())
            .collect()
    }

    fn knows(&self, addr: u64) -> bool {
        self.scopes.holds(addr) || self.heap.usable_size(Va::new(addr)).is_ok()
    }

    /// Gives everything idle back to the device.
    pub(super) fn empty(&self) -> Result<u64, Error> {
        self.heap.trim();
        self.pool.trim(0)
    }

    /// The budget as a part of the device's memory. Refused below what is in use.
    pub(super) fn set_fraction(&self, fraction: f64) -> Result<(), Error> {
        let budget = fraction_of(fraction, self.device.info().total_memory);
        self.pool.set_budget(budget)
    }

    /// Bytes asked for and not freed, and the most of them since the last reset.
    pub(super) fn requested(&self) -> (u64, u64) {
        (
            self.requested.load(Relaxed),
            self.requested_peak.load(Relaxed),
        )
    }

    /// What serving costs, if that is counted.
    pub(super) fn timing(&self) -> Option<&Timing> {
        self.timing.as_ref()
    }

    /// Peaks are what there is now.
    pub(super) fn reset_peaks(&self) {
        self.pool.reset_peaks();
        let now = self.requested.load(Relaxed);
        self.requested_peak.store(now, Relaxed);
    }
}
