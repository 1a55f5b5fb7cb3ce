//! What checks share: things that are cleaned up whatever happens, and expectations.

use std::thread;
use std::time::{Duration, Instant};

use super::{Failure, Outcome};
use crate::driver::{
    Access, DriverCode, DriverKind, DriverResult, EventId, GranuleProps, PhysId, SharedDriver,
    StreamId,
};
use crate::units::{Va, VaRange};

/// How long a check waits for work that must end.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// The stream that checks use when it does not matter which.
pub(super) const MAIN: StreamId = StreamId::DEFAULT;

/// A driver and everything that a check made with it.
pub(super) struct Rig<'d> {
    pub d: &'d SharedDriver,
    /// The granularity.
    pub unit: u64,
    reservations: Vec<VaRange>,
    mappings: Vec<VaRange>,
    granules: Vec<PhysId>,
    streams: Vec<StreamId>,
    events: Vec<EventId>,
}

/// Runs a check, takes down what it made, and looks whether all memory came back.
pub(super) fn check(d: &SharedDriver, body: impl FnOnce(&mut Rig<'_>) -> Outcome) -> Outcome {
    let before = d.memory_info()?;
    let mut rig = Rig::new(d);
    let outcome = body(&mut rig);
    let down = rig.take_down();
    outcome?;
    down?;
    if d.kind() != DriverKind::Cuda {
        let after = d.memory_info()?;
        ensure!(
            after == before,
            "{} bytes were free before the check and {} after it",
            before.free,
            after.free
        );
    }
    Ok(())
}

/// The same for a check that may lose the device.
pub(super) fn risk(d: &SharedDriver, body: impl FnOnce(&mut Rig<'_>) -> Outcome) -> Outcome {
    let mut rig = Rig::new(d);
    let outcome = body(&mut rig);
    // The device may be lost: what can still be taken down is, the rest goes with the driver.
    let _ = rig.take_down();
    outcome
}

impl<'d> Rig<'d> {
    fn new(d: &'d SharedDriver) -> Self {
        Self {
            d,
            unit: d.info().granularity,
            reservations: Vec::new(),
            mappings: Vec::new(),
            granules: Vec::new(),
            streams: Vec::new(),
            events: Vec::new(),
        }
    }

    /// Goes on after an error, and reports the first.
    fn take_down(&mut self) -> Outcome {
        let d = self.d;
        let mut results: Vec<DriverResult<()>> = Vec::new();
        results.push(d.sync_stream(MAIN));
        results.extend(self.streams.iter().map(|&s| d.sync_stream(s)));
        results.extend(self.events.drain(..).map(|e| d.destroy_event(e)));
        results.extend(self.streams.drain(..).map(|s| d.destroy_stream(s)));
        results.extend(self.mappings.drain(..).map(|r| d.unmap(r)));
        results.extend(self.granules.drain(..).map(|p| d.release(p)));
        results.extend(self.reservations.drain(..).map(|r| d.free_reservation(r)));
        let first = results.into_iter().find_map(Result::err);
        match first {
            Some(error) => Err(Failure::new(format!("cleaning up: {error}"))),
            None => Ok(()),
        }
    }

    pub fn reserve(&mut self, units: u64) -> Outcome<VaRange> {
        let range = self.d.reserve(units * self.unit, 0)?;
        self.reservations.push(range);
        Ok(range)
    }

    /// For a reservation that the check made itself.
    pub fn keep_reservation(&mut self, range: VaRange) {
        self.reservations.push(range);
    }

    pub fn free_reservation(&mut self, range: VaRange) -> Outcome {
        self.d.free_reservation(range)?;
        self.reservations.retain(|&r| r != range);
        Ok(())
    }

    pub fn granule(&mut self, units: u64) -> Outcome<PhysId> {
        let len = units * self.unit;
        let phys = self.d.create(len, GranuleProps::default())?;
        self.granules.push(phys);
        Ok(phys)
    }

    pub fn release(&mut self, phys: PhysId) -> Outcome {
        self.granules.retain(|&p| p != phys);
        Ok(self.d.release(phys)?)
    }

    /// Maps without access.
    pub fn map(&mut self, range: VaRange, phys: PhysId) -> Outcome {
        self.d.map(range, phys)?;
        self.mappings.push(range);
        Ok(())
    }

    pub fn map_open(&mut self, range: VaRange, phys: PhysId) -> Outcome {
        self.map(range, phys)?;
        Ok(self.d.set_access(range, Access::ReadWrite)?)
    }

    pub fn unmap(&mut self, range: VaRange) -> Outcome {
        self.d.unmap(range)?;
        self.mappings.retain(|m| !range.contains(*m));
        Ok(())
    }

    /// Fresh memory of `units` in one granule at addresses of its own, open for reads and writes.
    pub fn memory(&mut self, units: u64) -> Outcome<(VaRange, PhysId)> {
        let range = self.reserve(units)?;
        let phys = self.granule(units)?;
        self.map_open(range, phys)?;
        Ok((range, phys))
    }

    /// Fresh memory of one granule per unit, at adjacent addresses.
    pub fn pieces(&mut self, units: u64) -> Outcome<VaRange> {
        let range = self.reserve(units)?;
        for i in 0..units {
            let phys = self.granule(1)?;
            self.map_open(self.part(range, i, 1)?, phys)?;
        }
        Ok(range)
    }

    /// `units` of a range, from the `from`-th on.
    pub fn part(&self, range: VaRange, from: u64, units: u64) -> Outcome<VaRange> {
        sub(range, from * self.unit, units * self.unit)
    }

    pub fn stream(&mut self) -> Outcome<StreamId> {
        let stream = self.d.create_stream()?;
        self.streams.push(stream);
        Ok(stream)
    }

    /// The check destroys that stream itself.
    pub fn forget_stream(&mut self, stream: StreamId) {
        self.streams.retain(|&s| s != stream);
    }

    pub fn event(&mut self) -> Outcome<EventId> {
        let event = self.d.create_event()?;
        self.events.push(event);
        Ok(event)
    }

    pub fn destroy_event(&mut self, event: EventId) -> Outcome {
        self.events.retain(|&e| e != event);
        Ok(self.d.destroy_event(event)?)
    }

    /// A new event, recorded.
    pub fn mark(&mut self, stream: StreamId) -> Outcome<EventId> {
        let event = self.event()?;
        self.d.record_event(event, stream)?;
        Ok(event)
    }

    /// Requires a refusal whose code was measured on CUDA.
    pub fn refused<T>(&self, what: &str, result: DriverResult<T>, code: DriverCode) -> Outcome {
        match result {
            Ok(_) => Err(Failure::new(format!("{what}: was accepted, not refused"))),
            Err(error) if error.code == code => Ok(()),
            Err(error) => Err(Failure::new(format!(
                "{what}: expected {code}, got {error}"
            ))),
        }
    }

    /// Requires a refusal; on CUDA with whatever code.
    pub fn refused_somehow<T>(
        &self,
        what: &str,
        result: DriverResult<T>,
        code: DriverCode,
    ) -> Outcome {
        match result {
            Err(_) if self.d.kind() == DriverKind::Cuda => Ok(()),
            result => self.refused(what, result, code),
        }
    }

    /// Requires that the event has not passed and stays so for a moment: long enough for a worker
    /// thread on a busy machine to do what it should not.
    pub fn pending(&self, what: &str, event: EventId) -> Outcome {
        for _ in 0..20 {
            ensure!(!self.d.query_event(event)?, "{what}: passed too early");
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Requires that the event passes before long.
    pub fn passes(&self, what: &str, event: EventId) -> Outcome {
        let start = Instant::now();
        while !self.d.query_event(event)? {
            ensure!(
                start.elapsed() < PATIENCE,
                "{what}: still pending after {PATIENCE:?}"
            );
            thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    /// The bytes there after all work queued on the stream; `None` on a driver without data, which
    /// must refuse.
    pub fn bytes(&self, range: VaRange, stream: StreamId) -> Outcome<Option<Vec<u8>>> {
        let len = usize::try_from(range.len()).map_err(|e| Failure::new(e.to_string()))?;
        let mut bytes = vec![0xEE; len];
        let result = self.d.copy_to_host(&mut bytes, range, stream);
        if self.d.info().capabilities.data {
            result?;
            return Ok(Some(bytes));
        }
        self.refused(
            "copy_to_host without data",
            result,
            DriverCode::NOT_SUPPORTED,
        )?;
        Ok(None)
    }

    /// Requires that every byte there is `byte`.
    pub fn filled(&self, what: &str, range: VaRange, byte: u8, stream: StreamId) -> Outcome {
        if let Some(bytes) = self.bytes(range, stream)? {
            let wrong = bytes.iter().position(|&b| b != byte);
            if let Some(at) = wrong {
                let found = bytes[at];
                let count = bytes.iter().filter(|&&b| b != byte).count();
                return Err(Failure::new(format!(
                    "{what}: expected {byte:#04x} everywhere in {range}, found {found:#04x} at \
                     offset {at} and {count} wrong bytes in all"
                )));
            }
        }
        Ok(())
    }

    /// The 64-bit word there, on a driver with data.
    pub fn word(&self, at: Va, stream: StreamId) -> Outcome<Option<u64>> {
        let range = VaRange::new(at, 8).ok_or_else(|| Failure::new("address wraps"))?;
        let bytes = self.bytes(range, stream)?;
        let word = bytes.and_then(|bytes| bytes.try_into().ok());
        Ok(word.map(u64::from_le_bytes))
    }

    /// Requires that memory there works: can be filled and reads back.
    pub fn usable(&self, what: &str, range: VaRange) -> Outcome {
        self.d.fill(range, 0x3C, MAIN)?;
        self.d.sync_stream(MAIN)?;
        self.filled(what, range, 0x3C, MAIN)
    }
}

/// A part of a range in bytes.
pub(super) fn sub(range: VaRange, offset: u64, len: u64) -> Outcome<VaRange> {
    range.sub(offset, len).ok_or_else(|| {
        Failure::new(format!(
            "the check wants {len} bytes at {offset} of {range}: range too short"
        ))
    })
}

/// A range that need not exist.
pub(super) fn range(start: Va, len: u64) -> Outcome<VaRange> {
    VaRange::new(start, len)
        .ok_or_else(|| Failure::new(format!("{len} bytes from {start} wrap around")))
}
