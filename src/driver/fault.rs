//! A wrapper that makes driver calls fail when told, without making them.

use std::any::Any;
use std::collections::HashMap;

use super::{
    Access, Call, CopyPart, DeviceInfo, Driver, DriverCode, DriverError, DriverKind, DriverResult,
    EventId, GranuleProps, Graph, Hold, Kernel, MemoryInfo, PhysId, SharedDriver, StreamId,
    StreamKey,
};
use crate::sync::Mutex;
use crate::units::{Va, VaRange};

/// Forwards to another driver, except for calls that a rule makes fail.
///
/// Rules count from the moment they are set and stay until [`clear`](Self::clear); several may
/// stand at once, each counts every call it is about, and the one set first decides the code. A
/// call that fails here does not reach the inner driver, so it changed nothing.
///
/// To sweep all failures of an operation: run it once and take the difference of
/// [`calls_seen`](Self::calls_seen), then run it with [`fail_nth_overall`](Self::fail_nth_overall)
/// of 1, 2, 3 and so on.
///
/// # Example: the second map fails
///
/// ```
/// use std::sync::Arc;
/// use granule::driver::fault::FaultDriver;
/// use granule::driver::sim::{SimConfig, SimDriver};
/// use granule::driver::{Call, Driver, DriverCode, SharedDriver};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let sim: SharedDriver = Arc::new(SimDriver::new(SimConfig::default())?);
/// let faulty = FaultDriver::new(sim);
/// faulty.fail(Call::MemoryInfo, 2, DriverCode::UNKNOWN);
/// assert!(faulty.memory_info().is_ok());
/// assert_eq!(faulty.memory_info().unwrap_err().code, DriverCode::UNKNOWN);
/// assert!(faulty.memory_info().is_ok());
/// assert_eq!(faulty.fired(), 1);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct FaultDriver {
    inner: SharedDriver,
    plan: Mutex<Plan>,
}

#[derive(Debug, Default)]
struct Plan {
    rules: Vec<Rule>,
    create_limit: Option<u64>,
    /// Bytes created through this wrapper (or being created) and not released.
    created: u64,
    lens: HashMap<PhysId, u64>,
    seen: u64,
    fired: u64,
}

#[derive(Debug)]
struct Rule {
    /// `None` for every call.
    call: Option<Call>,
    /// Calls until it fires; 0 when it fired.
    left: u64,
    /// Whether it goes on firing.
    stays: bool,
    code: DriverCode,
}

impl Rule {
    /// Counts a call; whether it fails.
    fn hits(&mut self, call: Call) -> bool {
        if self.call.is_some_and(|mine| mine != call) || self.left == 0 {
            return false;
        }
        if self.left == 1 && self.stays {
            return true;
        }
        self.left -= 1;
        self.left == 0
    }
}

impl Plan {
    fn check(&mut self, call: Call, len: u64) -> Result<(), DriverCode> {
        self.seen += 1;
        let mut code = None;
        for rule in &mut self.rules {
            if rule.hits(call) {
                code = code.or(Some(rule.code));
            }
        }
        if call == Call::Create && code.is_none() {
            let after = self.created.saturating_add(len);
            if self.create_limit.is_some_and(|limit| after > limit) {
                code = Some(DriverCode::OUT_OF_MEMORY);
            } else {
                self.created = after;
            }
        }
        match code {
            Some(code) => {
                self.fired += 1;
                Err(code)
            }
            None => Ok(()),
        }
    }
}

impl FaultDriver {
    /// Wraps `inner`; nothing fails yet.
    #[must_use]
    pub fn new(inner: SharedDriver) -> Self {
        Self {
            inner,
            plan: Mutex::new(Plan::default()),
        }
    }

    /// The `nth` call of this kind from now on fails once (1 is the next one; 0 never fails).
    pub fn fail(&self, call: Call, nth: u64, code: DriverCode) {
        self.add(Some(call), nth, false, code);
    }

    /// The `nth` call of this kind from now on, and every later one, fails.
    pub fn fail_from(&self, call: Call, nth: u64, code: DriverCode) {
        self.add(Some(call), nth, true, code);
    }

    /// The `nth` call of any kind from now on fails once. All calls that can fail count together.
    pub fn fail_nth_overall(&self, nth: u64, code: DriverCode) {
        self.add(None, nth, false, code);
    }

    /// Creates fail with `OUT_OF_MEMORY` when they would bring the bytes created through this
    /// wrapper and not yet released above `bytes`.
    pub fn fail_above(&self, bytes: u64) {
        self.plan.lock().create_limit = Some(bytes);
    }

    /// Removes every rule and the limit. The counts stay.
    pub fn clear(&self) {
        let mut plan = self.plan.lock();
        plan.rules.clear();
        plan.create_limit = None;
    }

    /// Calls that can fail, made so far, with the failed ones.
    #[must_use]
    pub fn calls_seen(&self) -> u64 {
        self.plan.lock().seen
    }

    /// Calls that failed because of a rule or the limit.
    #[must_use]
    pub fn fired(&self) -> u64 {
        self.plan.lock().fired
    }

    /// The driver behind this one.
    #[must_use]
    pub fn inner(&self) -> &SharedDriver {
        &self.inner
    }

    fn add(&self, call: Option<Call>, left: u64, stays: bool, code: DriverCode) {
        self.plan.lock().rules.push(Rule {
            call,
            left,
            stays,
            code,
        });
    }

    /// No lock is held while the inner call runs.
    fn pass<T>(
        &self,
        call: Call,
        (at, len): (u64, u64),
        run: impl FnOnce(&dyn Driver) -> DriverResult<T>,
    ) -> DriverResult<T> {
        let checked = self.plan.lock().check(call, len);
        checked.map_err(|code| DriverError::new(call, code).about(at, len))?;
        run(&*self.inner)
    }
}

fn about(range: VaRange) -> (u64, u64) {
    (range.start().get(), range.len())
}

impl Driver for FaultDriver {
    fn kind(&self) -> DriverKind {
        self.inner.kind()
    }

    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        self.pass(Call::MemoryInfo, (0, 0), |d| d.memory_info())
    }

    fn reserve(&self, len: u64, align: u64) -> DriverResult<VaRange> {
        self.pass(Call::Reserve, (0, len), |d| d.reserve(len, align))
    }

    fn free_reservation(&self, range: VaRange) -> DriverResult<()> {
        self.pass(Call::FreeReservation, about(range), |d| {
            d.free_reservation(range)
        })
    }

    fn create(&self, len: u64, props: GranuleProps) -> DriverResult<PhysId> {
        self.pass(Call::Create, (0, len), |d| {
            let result = d.create(len, props);
            let mut plan = self.plan.lock();
            match result {
                Ok(phys) => {
                    plan.lens.insert(phys, len);
                }
                Err(_) => plan.created = plan.created.saturating_sub(len),
            }
            result
        })
    }

    fn release(&self, phys: PhysId) -> DriverResult<()> {
        self.pass(Call::Release, (phys.0, 0), |d| {
            // Taken out first: the driver may hand the handle out again as soon as it is released.
            let len = self.plan.lock().lens.remove(&phys);
            let result = d.release(phys);
            let mut plan = self.plan.lock();
            match (len, &result) {
                (Some(len), Ok(())) => plan.created = plan.created.saturating_sub(len),
                (Some(len), Err(_)) => {
                    plan.lens.insert(phys, len);
                }
                (None, _) => {}
            }
            result
        })
    }

    fn map(&self, range: VaRange, phys: PhysId) -> DriverResult<()> {
        self.pass(Call::Map, about(range), |d| d.map(range, phys))
    }

    fn set_access(&self, range: VaRange, access: Access) -> DriverResult<()> {
        self.pass(Call::SetAccess, about(range), |d| {
            d.set_access(range, access)
        })
    }

    fn unmap(&self, range: VaRange) -> DriverResult<()> {
        self.pass(Call::Unmap, about(range), |d| d.unmap(range))
    }

    fn create_stream(&self) -> DriverResult<StreamId> {
        self.pass(Call::CreateStream, (0, 0), |d| d.create_stream())
    }

    fn destroy_stream(&self, stream: StreamId) -> DriverResult<()> {
        self.pass(Call::DestroyStream, (stream.0, 0), |d| {
            d.destroy_stream(stream)
        })
    }

    fn stream_key(&self, stream: StreamId) -> DriverResult<StreamKey> {
        self.pass(Call::StreamKey, (stream.0, 0), |d| d.stream_key(stream))
    }

    fn sync_stream(&self, stream: StreamId) -> DriverResult<()> {
        self.pass(Call::SyncStream, (stream.0, 0), |d| d.sync_stream(stream))
    }

    fn create_event(&self) -> DriverResult<EventId> {
        self.pass(Call::CreateEvent, (0, 0), |d| d.create_event())
    }

    fn destroy_event(&self, event: EventId) -> DriverResult<()> {
        self.pass(Call::DestroyEvent, (event.0, 0), |d| d.destroy_event(event))
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        self.pass(Call::RecordEvent, (event.0, 0), |d| {
            d.record_event(event, stream)
        })
    }

    fn query_event(&self, event: EventId) -> DriverResult<bool> {
        self.pass(Call::QueryEvent, (event.0, 0), |d| d.query_event(event))
    }

    fn sync_event(&self, event: EventId) -> DriverResult<()> {
        self.pass(Call::SyncEvent, (event.0, 0), |d| d.sync_event(event))
    }

    fn wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()> {
        self.pass(Call::WaitEvent, (event.0, 0), |d| {
            d.wait_event(stream, event)
        })
    }

    fn fill(&self, range: VaRange, byte: u8, stream: StreamId) -> DriverResult<()> {
        self.pass(Call::Fill, about(range), |d| d.fill(range, byte, stream))
    }

    fn copy(&self, dst: Va, src: VaRange, stream: StreamId) -> DriverResult<()> {
        self.pass(Call::Copy, (dst.get(), src.len()), |d| {
            d.copy(dst, src, stream)
        })
    }

    fn copy_batch(&self, parts: &[CopyPart], stream: StreamId) -> DriverResult<()> {
        let at = parts.first().map_or(0, |part| part.dst.get());
        let len = parts.iter().map(|part| part.src.len()).sum();
        self.pass(Call::CopyBatch, (at, len), |d| d.copy_batch(parts, stream))
    }

    fn copy_from_host(&self, dst: Va, src: &[u8], stream: StreamId) -> DriverResult<()> {
        self.pass(Call::CopyFromHost, (dst.get(), src.len() as u64), |d| {
            d.copy_from_host(dst, src, stream)
        })
    }

    fn copy_to_host(&self, dst: &mut [u8], src: VaRange, stream: StreamId) -> DriverResult<()> {
        self.pass(Call::CopyToHost, (src.start().get(), src.len()), |d| {
            d.copy_to_host(dst, src, stream)
        })
    }

    fn launch(&self, kernel: Kernel, stream: StreamId) -> DriverResult<()> {
        self.pass(Call::Launch, (stream.0, 0), |d| d.launch(kernel, stream))
    }

    fn hold(&self, stream: StreamId) -> DriverResult<Hold> {
        self.pass(Call::Hold, (stream.0, 0), |d| d.hold(stream))
    }

    fn begin_capture(&self, stream: StreamId) -> DriverResult<()> {
        self.pass(Call::BeginCapture, (stream.0, 0), |d| {
            d.begin_capture(stream)
        })
    }

    fn end_capture(&self, stream: StreamId) -> DriverResult<Graph> {
        self.pass(Call::EndCapture, (stream.0, 0), |d| d.end_capture(stream))
    }

    fn is_capturing(&self, stream: StreamId) -> DriverResult<bool> {
        self.pass(Call::IsCapturing, (stream.0, 0), |d| d.is_capturing(stream))
    }

    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::driver::sim::{SimConfig, SimDriver};
    use crate::units::MIB;

    fn faulty() -> FaultDriver {
        FaultDriver::new(Arc::new(SimDriver::new(SimConfig::default()).unwrap()))
    }

    #[test]
    fn counts_from_when_the_rule_was_set() {
        let d = faulty();
        d.reserve(2 * MIB, 0).unwrap();
        d.fail(Call::Reserve, 2, DriverCode::OUT_OF_MEMORY);
        d.reserve(2 * MIB, 0).unwrap();
        let error = d.reserve(4 * MIB, 0).unwrap_err();
        assert_eq!(error.code, DriverCode::OUT_OF_MEMORY);
        assert_eq!((error.call, error.len), (Call::Reserve, 4 * MIB));
        d.reserve(2 * MIB, 0).unwrap();
        assert_eq!((d.calls_seen(), d.fired()), (4, 1));
    }

    #[test]
    fn fail_from_goes_on_until_cleared() {
        let d = faulty();
        d.fail_from(Call::CreateEvent, 2, DriverCode::UNKNOWN);
        d.create_event().unwrap();
        for _ in 0..3 {
            d.create_event().unwrap_err();
        }
        d.memory_info().unwrap();
        d.clear();
        d.create_event().unwrap();
        assert_eq!(d.fired(), 3);
    }

    #[test]
    fn a_sweep_reaches_each_call_once() {
        for k in 1..=3 {
            let d = faulty();
            d.fail_nth_overall(k, DriverCode::UNKNOWN);
            let results = [
                d.memory_info().is_err(),
                d.create_stream().is_err(),
                d.stream_key(StreamId::DEFAULT).is_err(),
                d.memory_info().is_err(),
            ];
            let expected: Vec<bool> = (1..=4).map(|n| n == k).collect();
            assert_eq!(results.to_vec(), expected, "k = {k}");
        }
    }

    #[test]
    fn the_byte_limit_follows_releases_and_failed_creates() {
        let d = faulty();
        d.fail_above(4 * MIB);
        let p = d.create(2 * MIB, GranuleProps::default()).unwrap();
        d.create(1, GranuleProps::default()).unwrap_err();
        d.create(2 * MIB, GranuleProps::default()).unwrap();
        let error = d.create(2 * MIB, GranuleProps::default()).unwrap_err();
        assert!(error.is_out_of_memory());
        d.release(p).unwrap();
        d.create(2 * MIB, GranuleProps::default()).unwrap();
        assert_eq!(
            d.fired(),
            1,
            "the bad length was the inner driver's refusal"
        );
    }
}
