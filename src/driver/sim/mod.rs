//! A driver without memory: bookkeeping and a virtual clock.
//!
//! [`SimDriver`] makes every refusal of the [`Driver`] contract and charges each call from a
//! [`CostTable`], so that a job for a whole GPU replays on a laptop in the time the bookkeeping
//! takes. There is no thread and no unsafe code in it.
//!
//! # The clock
//!
//! The host's time moves on by the cost of each call that succeeds, by [`SimDriver::advance`],
//! and when it waits. Each stream has a time at which it becomes free; queued work moves that
//! on. An event is a point in time and has passed once the host's time has reached it. Calls of
//! several threads share the one host clock, as if they were made one after another.
//!
//! # Holds
//!
//! What is behind a [`Hold`] has no time until the hold is dropped. A sync on such work blocks the
//! calling thread, really, until another thread drops the hold or the device is lost: a thread
//! that holds and syncs never returns, as on a GPU.
//!
//! # Faults
//!
//! A fill or copy over memory that is not mapped with the rights needed is refused with
//! `INVALID_VALUE`. A kernel is queued, and the device is lost when it would run. Taking a
//! mapping, or its rights, from under work that has not finished loses the device at once, even if
//! that work is held: correct programs never do it, whenever the work runs.
//!
//! # Races
//!
//! With [`SimConfig::races`] every access is checked for an order against earlier ones to the same
//! physical bytes, through whatever addresses: see [`SimDriver::races`].

#![forbid(unsafe_code)]

mod queue;
mod races;
mod space;
#[cfg(test)]
mod tests;
mod timeline;

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

pub use super::cost::{CostTable, Curve, Nanos, Rate};
pub use races::{AccessKind, Race, RaceSide};

use crate::driver::capture::{Captures, Step};
use crate::driver::{
    Access, Call, Capabilities, CopyPart, DeviceInfo, Driver, DriverCode, DriverError, DriverKind,
    DriverResult, EventId, GranuleProps, Graph, Hold, Kernel, MemoryInfo, PhysId, StreamId,
    StreamKey,
};
use crate::sync::{Condvar, Mutex};
use crate::units::{GIB, MIB, TIB, Va, VaRange};
use crate::{Error, Result};

use races::Detector;
use space::{Space, Went};
use timeline::{Point, Timeline};

/// What a [`SimDriver`] pretends to be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SimConfig {
    /// Bytes of device memory; a multiple of the granularity. 140 GiB by default.
    pub total_memory: u64,
    /// Unit of memory and mapping, a power of two. 2 MiB by default.
    pub granularity: u64,
    /// Bytes of addresses; a multiple of the granularity. 126 TiB by default.
    pub address_space: u64,
    /// What calls and work cost.
    pub cost: CostTable,
    /// The device's number.
    pub ordinal: u32,
    /// Whether to look for races. Costs time and memory for every access; off by default.
    pub races: bool,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            total_memory: 140 * GIB,
            granularity: 2 * MIB,
            address_space: 126 * TIB,
            cost: CostTable::default(),
            ordinal: 0,
            races: false,
        }
    }
}

impl SimConfig {
    fn check(&self) -> Result<()> {
        let refuse = |what, value, why| Err(Error::InvalidConfig { what, value, why });
        let unit = self.granularity;
        if !unit.is_power_of_two() {
            return refuse("granularity", unit, "it is not a power of two");
        }
        for (what, value) in [
            ("total memory", self.total_memory),
            ("address space", self.address_space),
        ] {
            if value == 0 || !value.is_multiple_of(unit) {
                return refuse(what, value, "not a non-zero multiple of the granularity");
            }
        }
        Ok(())
    }
}

/// How many of each thing exist.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Live {
    /// Granules whose memory is taken (also released ones that are still mapped).
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

/// Bookkeeping and a virtual clock; see the [module](self).
#[derive(Debug)]
pub struct SimDriver {
    info: DeviceInfo,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    captures: Captures,
    state: Mutex<State>,
    /// A hold ended or the device was lost.
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    cost: CostTable,
    total: u64,
    now: Nanos,
    vmm: Nanos,
    space: Space,
    time: Timeline,
    events: HashMap<EventId, Option<Point>>,
    next_event: u64,
    races: Option<Detector>,
    lost: bool,
}

type Refusal<T> = std::result::Result<T, DriverCode>;

impl State {
    /// Time of a memory management call.
    fn charge_vmm(&mut self, cost: Nanos) {
        self.now += cost;
        self.vmm += cost;
    }

    fn alive(&self) -> Refusal<()> {
        if self.lost {
            return Err(DriverCode::ILLEGAL_ADDRESS);
        }
        Ok(())
    }

    fn event(&self, event: EventId) -> Refusal<&Option<Point>> {
        self.events.get(&event).ok_or(DriverCode::INVALID_HANDLE)
    }

    /// Granules that are gone have no history.
    fn forget(&mut self, gone: &[PhysId]) {
        if let Some(races) = &mut self.races {
            gone.iter().for_each(|&phys| races.forget_granule(phys));
        }
    }

    fn went_over(&mut self, went: &Went, cost: fn(&CostTable, u64) -> Nanos) {
        let cost = went.lens.iter().map(|&len| cost(&self.cost, len)).sum();
        self.charge_vmm(cost);
        self.lost |= went.under_work;
        self.forget(&went.gone);
    }
}

impl SimDriver {
    /// A device as configured, with its clock at zero.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`] when the granularity is no power of two, or memory or address space
    /// are no multiple of it or do not fit in 64 bits.
    pub fn new(config: SimConfig) -> Result<Self> {
        config.check()?;
        let space = Space::new(
            config.granularity,
            config.total_memory,
            config.address_space,
        )
        .ok_or(Error::InvalidConfig {
            what: "address space",
            value: config.address_space,
            why: "it does not fit in 64 bits",
        })?;
        let info = DeviceInfo {
            name: "simulated device".to_owned(),
            ordinal: config.ordinal,
            driver_version: 0,
            granularity: config.granularity,
            total_memory: config.total_memory,
            capabilities: Capabilities {
                vmm: true,
                alias: true,
                data: false,
                exportable: true,
                rdma: false,
            },
        };
        let state = State {
            cost: config.cost,
            total: config.total_memory,
            now: Nanos::ZERO,
            vmm: Nanos::ZERO,
            space,
            time: Timeline::new(),
            events: HashMap::new(),
            next_event: 1,
            races: config.races.then(Detector::default),
            lost: false,
        };
        let shared = Arc::new(Shared {
            captures: Captures::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        Ok(Self { info, shared })
    }

    /// The host's virtual time since the driver was made.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.shared.state.lock().now
    }

    /// Lets the host do something else for that long.
    pub fn advance(&self, nanos: Nanos) {
        self.shared.state.lock().now += nanos;
    }

    /// Time charged to memory management calls so far: reserve, free, create, release, map, set
    /// access, unmap.
    #[must_use]
    pub fn driver_time(&self) -> Nanos {
        self.shared.state.lock().vmm
    }

    /// How many of each thing exist now.
    #[must_use]
    pub fn live(&self) -> Live {
        let state = self.shared.state.lock();
        let (granules, mappings, reservations) = state.space.counts();
        Live {
            granules,
            mappings,
            reservations,
            streams: state.time.created(),
            events: state.events.len(),
        }
    }

    /// Whether work touched memory that was not there. Nothing brings the device back.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.shared.state.lock().lost
    }

    /// Accesses of different streams to the same physical bytes, at least one a write, without an
    /// order between them: each pair once, the first 1,024 of them, in the order of the later
    /// access. Empty unless [`SimConfig::races`] is set.
    ///
    /// Only records that streams wait for, and that the host saw passed by a query or a sync,
    /// make an order; that work happened to be over in virtual time does not. The end of
    /// [`copy_from_host`](Driver::copy_from_host) says that earlier work of its stream is over, not
    /// that the bytes are there. A kernel that was queued before its memory was mapped is not
    /// looked at. History is kept for granules that exist, of the last write and the last read per
    /// stream of each byte run; clocks keep one number per stream ever created.
    #[must_use]
    pub fn races(&self) -> Vec<Race> {
        let state = self.shared.state.lock();
        let found = state.races.as_ref().map(Detector::found);
        found.unwrap_or_default().to_vec()
    }

    /// Runs one call on the state; codes become errors about `at` and `len`.
    fn call<T>(
        &self,
        call: Call,
        (at, len): (u64, u64),
        run: impl FnOnce(&mut State) -> Refusal<T>,
    ) -> DriverResult<T> {
        let mut state = self.shared.state.lock();
        let lost_before = state.lost;
        let result = run(&mut state);
        if state.lost && !lost_before {
            self.shared.changed.notify_all();
        }
        result.map_err(|code| DriverError::new(call, code).about(at, len))
    }

    /// The same for calls that reach the device.
    fn device<T>(
        &self,
        call: Call,
        about: (u64, u64),
        run: impl FnOnce(&mut State) -> Refusal<T>,
    ) -> DriverResult<T> {
        self.call(call, about, |state| {
            state.alive()?;
            run(state)
        })
    }

    /// Queues work, or leaves it to the capture of its stream.
    fn work(&self, call: Call, step: Step, stream: StreamId) -> DriverResult<()> {
        let about = match &step {
            Step::Fill { range, .. } => about(*range),
            Step::Copy { src, .. } => about(*src),
            Step::Launch(kernel) => queue::about_kernel(kernel),
        };
        self.device(call, about, |s| {
            if self.shared.captures.takes(s.time.key(stream)?, step) {
                return Ok(());
            }
            match step {
                Step::Fill { range, .. } => s.fill(range, stream),
                Step::Copy { dst, src } => s.copy(dst, src, stream),
                Step::Launch(kernel) => s.launch(kernel, stream),
            }
        })
    }
}

fn about(range: VaRange) -> (u64, u64) {
    (range.start().get(), range.len())
}

impl Driver for SimDriver {
    fn kind(&self) -> DriverKind {
        DriverKind::Sim
    }

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        self.device(Call::MemoryInfo, (0, 0), |s| {
            s.now += s.cost.memory_info;
            Ok(MemoryInfo {
                free: s.space.free(),
                total: s.total,
            })
        })
    }

    fn reserve(&self, len: u64, align: u64) -> DriverResult<VaRange> {
        self.device(Call::Reserve, (0, len), |s| {
            let range = s.space.reserve(len, align)?;
            s.charge_vmm(s.cost.reserve);
            Ok(range)
        })
    }

    fn free_reservation(&self, range: VaRange) -> DriverResult<()> {
        self.call(Call::FreeReservation, about(range), |s| {
            s.space.free_reservation(range)?;
            s.charge_vmm(s.cost.free_reservation);
            Ok(())
        })
    }

    fn create(&self, len: u64, props: GranuleProps) -> DriverResult<PhysId> {
        self.device(Call::Create, (0, len), |s| {
            if props.rdma {
                return Err(DriverCode::NOT_SUPPORTED);
            }
            let phys = s.space.create(len)?;
            s.charge_vmm(s.cost.create(len));
            Ok(phys)
        })
    }

    fn release(&self, phys: PhysId) -> DriverResult<()> {
        self.call(Call::Release, (phys.0, 0), |s| {
            let (len, gone) = s.space.release(phys)?;
            s.charge_vmm(s.cost.release(len));
            if gone {
                s.forget(&[phys]);
            }
            Ok(())
        })
    }

    fn map(&self, range: VaRange, phys: PhysId) -> DriverResult<()> {
        self.device(Call::Map, about(range), |s| {
            s.space.map(range, phys)?;
            s.charge_vmm(s.cost.map(range.len()));
            Ok(())
        })
    }

    fn set_access(&self, range: VaRange, access: Access) -> DriverResult<()> {
        self.device(Call::SetAccess, about(range), |s| {
            let went = s.space.set_access(range, access, s.now)?;
            s.went_over(&went, CostTable::set_access);
            Ok(())
        })
    }

    fn unmap(&self, range: VaRange) -> DriverResult<()> {
        self.call(Call::Unmap, about(range), |s| {
            let went = s.space.unmap(range, s.now)?;
            s.went_over(&went, CostTable::unmap);
            Ok(())
        })
    }

    fn create_stream(&self) -> DriverResult<StreamId> {
        self.device(Call::CreateStream, (0, 0), |s| {
            s.now += s.cost.stream;
            Ok(s.time.create())
        })
    }

    fn destroy_stream(&self, stream: StreamId) -> DriverResult<()> {
        self.call(Call::DestroyStream, (stream.0, 0), |s| {
            let key = s.time.destroy(stream)?;
            self.shared.captures.forget_stream(key);
            if let Some(races) = &mut s.races {
                races.forget_stream(key);
            }
            s.now += s.cost.stream;
            Ok(())
        })
    }

    fn stream_key(&self, stream: StreamId) -> DriverResult<StreamKey> {
        self.call(Call::StreamKey, (stream.0, 0), |s| {
            let key = s.time.key(stream)?;
            self.shared.captures.refuse_wait(key).map(|()| key)
        })
    }

    fn sync_stream(&self, stream: StreamId) -> DriverResult<()> {
        self.sync_stream_for(Call::SyncStream, stream)
    }

    fn create_event(&self) -> DriverResult<EventId> {
        self.device(Call::CreateEvent, (0, 0), |s| {
            let event = EventId(s.next_event);
            s.next_event += 1;
            s.events.insert(event, None);
            s.now += s.cost.event;
            Ok(event)
        })
    }

    fn destroy_event(&self, event: EventId) -> DriverResult<()> {
        self.call(Call::DestroyEvent, (event.0, 0), |s| {
            s.event(event)?;
            s.events.remove(&event);
            self.shared.captures.forget_event(event);
            if let Some(races) = &mut s.races {
                races.forget_event(event);
            }
            s.now += s.cost.event;
            Ok(())
        })
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        self.device(Call::RecordEvent, (event.0, 0), |s| {
            s.event(event)?;
            let key = s.time.key(stream)?;
            match self.shared.captures.takes_record(event, key) {
                true => Ok(()),
                false => s.record(event, stream),
            }
        })
    }

    fn query_event(&self, event: EventId) -> DriverResult<bool> {
        self.device(Call::QueryEvent, (event.0, 0), |s| {
            self.shared.captures.refuse_event(event)?;
            s.query(event)
        })
    }

    fn sync_event(&self, event: EventId) -> DriverResult<()> {
        self.sync_event_for(event)
    }

    fn wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()> {
        self.device(Call::WaitEvent, (event.0, 0), |s| {
            s.event(event)?;
            let key = s.time.key(stream)?;
            match self.shared.captures.takes_wait(key, event)? {
                true => Ok(()),
                false => s.wait(stream, event),
            }
        })
    }

    fn fill(&self, range: VaRange, byte: u8, stream: StreamId) -> DriverResult<()> {
        self.work(Call::Fill, Step::Fill { range, byte }, stream)
    }

    fn copy(&self, dst: Va, src: VaRange, stream: StreamId) -> DriverResult<()> {
        self.work(Call::Copy, Step::Copy { dst, src }, stream)
    }

    fn copy_batch(&self, parts: &[CopyPart], stream: StreamId) -> DriverResult<()> {
        if self.is_capturing(stream)? {
            let mut parts = parts.iter();
            return parts.try_for_each(|part| self.copy(part.dst, part.src, stream));
        }
        self.device(Call::CopyBatch, (0, 0), |s| s.copy_batch(parts, stream))
    }

    fn copy_from_host(&self, dst: Va, src: &[u8], stream: StreamId) -> DriverResult<()> {
        self.copy_from_host_len(dst, src.len() as u64, stream)
    }

    fn copy_to_host(&self, _dst: &mut [u8], src: VaRange, _: StreamId) -> DriverResult<()> {
        self.device(Call::CopyToHost, about(src), |_| {
            Err(DriverCode::NOT_SUPPORTED)
        })
    }

    fn launch(&self, kernel: Kernel, stream: StreamId) -> DriverResult<()> {
        self.work(Call::Launch, Step::Launch(kernel), stream)
    }

    fn hold(&self, stream: StreamId) -> DriverResult<Hold> {
        let moment = self.device(Call::Hold, (stream.0, 0), |s| {
            self.shared.captures.refuse_wait(s.time.key(stream)?)?;
            s.hold(stream)
        })?;
        let shared = Arc::clone(&self.shared);
        Ok(Hold::new(move || shared.end_hold(&moment)))
    }

    fn begin_capture(&self, stream: StreamId) -> DriverResult<()> {
        self.device(Call::BeginCapture, (stream.0, 0), |s| {
            let key = s.time.key(stream)?;
            self.shared.captures.begin(stream, key)
        })
    }

    fn end_capture(&self, stream: StreamId) -> DriverResult<Graph> {
        let steps = self.device(Call::EndCapture, (stream.0, 0), |s| {
            self.shared.captures.end(s.time.key(stream)?)
        })?;
        let sim = Self {
            info: self.info.clone(),
            shared: Arc::clone(&self.shared),
        };
        Ok(Graph::new(move |stream| {
            let mut steps = steps.iter();
            steps.try_for_each(|step| sim.work(Call::Launch, *step, stream))
        }))
    }

    fn is_capturing(&self, stream: StreamId) -> DriverResult<bool> {
        self.device(Call::IsCapturing, (stream.0, 0), |s| {
            Ok(self.shared.captures.is_capturing(s.time.key(stream)?))
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
