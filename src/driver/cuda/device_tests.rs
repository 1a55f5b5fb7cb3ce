//! Tests that need a device; without one each says so and passes. What every driver must do is in
//! the conformance suite; here is what only this one has.

use std::time::{Duration, Instant};

use super::*;
use crate::driver::{
    Access, Driver, DriverResult, EventId, GranuleProps, Kernel, PhysId, pattern_word,
};
use crate::sync::{Mutex, MutexGuard};
use crate::units::{MIB, Va, VaRange};

/// The first device, or `None` with the reason printed.
/// Tests take turns. `cuMemFree` waits for all work of the process with libcuda's lock held: beside a
/// test that holds a stream and calls libcuda before it lets go, that never ends.
static TURN: Mutex<()> = Mutex::new(());

/// A driver whose turn it is.
struct Turn {
    driver: CudaDriver,
    _guard: MutexGuard<'static, ()>,
}

impl std::ops::Deref for Turn {
    type Target = CudaDriver;

    fn deref(&self) -> &CudaDriver {
        &self.driver
    }
}

fn driver() -> Option<Turn> {
    let guard = TURN.lock();
    match CudaDriver::open(0) {
        Ok(driver) => Some(Turn {
            driver,
            _guard: guard,
        }),
        Err(e) => {
            println!("skipped: {e}");
            None
        }
    }
}

/// One granule, mapped and open.
struct Mapped<'a> {
    driver: &'a CudaDriver,
    range: VaRange,
    phys: PhysId,
}

impl<'a> Mapped<'a> {
    fn new(driver: &'a CudaDriver, len: u64) -> Self {
        let range = driver.reserve(len, 0).unwrap();
        let phys = driver.create(len, GranuleProps::default()).unwrap();
        driver.map(range, phys).unwrap();
        driver.set_access(range, Access::ReadWrite).unwrap();
        Self {
            driver,
            range,
            phys,
        }
    }

    fn words(&self, offset: u64, count: usize) -> Vec<u64> {
        let mut bytes = vec![0; count * 8];
        let range = self.range.sub(offset, bytes.len() as u64).unwrap();
        self.driver
            .copy_to_host(&mut bytes, range, StreamId::DEFAULT)
            .unwrap();
        let words = bytes.chunks_exact(8);
        words
            .map(|w| u64::from_le_bytes(w.try_into().unwrap()))
            .collect()
    }

    fn write_word(&self, offset: u64, word: u64) {
        let at = self.range.start().checked_add(offset).unwrap();
        self.driver
            .copy_from_host(at, &word.to_le_bytes(), StreamId::DEFAULT)
            .unwrap();
    }
}

impl Drop for Mapped<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.driver.sync_stream(StreamId::DEFAULT).unwrap();
            self.driver.unmap(self.range).unwrap();
            self.driver.release(self.phys).unwrap();
            self.driver.free_reservation(self.range).unwrap();
        }
    }
}

fn code<T: std::fmt::Debug>(result: DriverResult<T>) -> DriverCode {
    result.unwrap_err().code
}

#[test]
fn the_device_describes_itself() {
    let Some(driver) = driver() else { return };
    println!("{} {:?}", driver.info(), driver.info().capabilities);
    let info = driver.info();
    assert!(info.granularity.is_power_of_two() && info.driver_version >= 12_000);
    assert!(info.capabilities.vmm && info.capabilities.data);
    assert!(driver.memory_info().unwrap().total <= info.total_memory);
    assert!(driver.context() != 0);
}

#[test]
fn kernels_write_check_and_sum_every_word_at_odd_and_even_places() {
    let Some(driver) = driver() else { return };
    let memory = Mapped::new(&driver, 4 * MIB);
    let (s, seed) = (StreamId::DEFAULT, 0x1234_5678_9abc_def0);
    let sink = memory.range.start();
    // Lengths and starts around every boundary of the vector loop.
    for start in [8, 16] {
        for words in [0, 1, 2, 3, 4, 5, 63, 64, 65, 4095, 262_143, 300_001] {
            memory.write_word(0, 0);
            let range = memory.range.sub(start, words * 8).unwrap();
            driver
                .launch(Kernel::WritePattern { range, seed }, s)
                .unwrap();
            let mismatches = sink;
            let check = |seed| Kernel::CheckPattern {
                range,
                seed,
                mismatches,
            };
            driver.launch(check(seed), s).unwrap();
            assert_eq!(memory.words(0, 1), [0], "{words} words at {start}");
            let expected: Vec<u64> = (0..words).map(|i| pattern_word(seed, i)).collect();
            assert_eq!(memory.words(start, words as usize), expected);
            driver.launch(check(seed + 1), s).unwrap();
            assert_eq!(
                memory.words(0, 1),
                [words],
                "another seed differs everywhere"
            );

            memory.write_word(0, 5);
            let passes = 3;
            driver
                .launch(
                    Kernel::ReadSum {
                        range,
                        passes,
                        sink,
                    },
                    s,
                )
                .unwrap();
            let sum = expected.iter().fold(0u64, |sum, w| sum.wrapping_add(*w));
            let expected = sum.wrapping_mul(3).wrapping_add(5);
            assert_eq!(memory.words(0, 1), [expected], "{words} words at {start}");
        }
    }
    let odd = memory.range.sub(4, 16).unwrap();
    let refused = driver.launch(Kernel::WritePattern { range: odd, seed }, s);
    assert_eq!(code(refused), DriverCode::INVALID_VALUE);
}

fn until(driver: &CudaDriver, event: EventId) {
    let limit = Instant::now() + Duration::from_secs(20);
    while !driver.query_event(event).unwrap() {
        assert!(Instant::now() < limit, "the work does not end");
        std::thread::yield_now();
    }
}

#[test]
fn holds_of_two_streams_end_in_either_order() {
    let Some(driver) = driver() else { return };
    for first in [0, 1] {
        let streams = [(); 2].map(|()| driver.create_stream().unwrap());
        let events = [(); 2].map(|()| driver.create_event().unwrap());
        let mut holds: Vec<_> = streams.iter().map(|&s| driver.hold(s).ok()).collect();
        for (&event, &stream) in events.iter().zip(&streams) {
            driver.record_event(event, stream).unwrap();
        }
        std::thread::sleep(Duration::from_millis(20));
        assert!(!driver.query_event(events[0]).unwrap() && !driver.query_event(events[1]).unwrap());
        // Held work keeps none of these from returning.
        let memory = Mapped::new(&driver, driver.info().granularity);
        driver.fill(memory.range, 7, streams[first]).unwrap();
        holds[first] = None;
        until(&driver, events[first]);
        assert!(!driver.query_event(events[1 - first]).unwrap());
        holds[1 - first] = None;
        until(&driver, events[1 - first]);
        driver.sync_stream(streams[first]).unwrap();
        drop(memory);
        for event in events {
            driver.destroy_event(event).unwrap();
        }
        for stream in streams {
            driver.destroy_stream(stream).unwrap();
        }
    }
}

#[test]
fn a_hold_outlives_its_driver() {
    let Some(driver) = driver() else { return };
    let stream = driver.create_stream().unwrap();
    let hold = driver.hold(stream).unwrap();
    drop(driver);
    drop(hold);
}

#[test]
fn spin_takes_about_its_time() {
    let Some(driver) = driver() else { return };
    let stream = driver.create_stream().unwrap();
    driver.launch(Kernel::Spin { nanos: 1 }, stream).unwrap();
    let [start, end] = [(); 2].map(|()| driver.create_timing_event().unwrap());
    driver.record_event(start, stream).unwrap();
    driver
        .launch(Kernel::Spin { nanos: 20_000_000 }, stream)
        .unwrap();
    driver.record_event(end, stream).unwrap();
    driver.sync_event(end).unwrap();
    let ms = driver.elapsed_ms(start, end).unwrap();
    assert!((19.9..40.0).contains(&ms), "{ms}");
    driver.destroy_event(start).unwrap();
    driver.destroy_event(end).unwrap();
    driver.destroy_stream(stream).unwrap();
}

#[test]
fn stale_and_foreign_ids_are_refused() {
    let Some(driver) = driver() else { return };
    let g = driver.info().granularity;
    let phys = driver.create(g, GranuleProps::default()).unwrap();
    driver.release(phys).unwrap();
    assert_eq!(code(driver.release(phys)), DriverCode::INVALID_VALUE);
    let range = driver.reserve(2 * g, 0).unwrap();
    let half = range.sub(0, g).unwrap();
    assert_eq!(code(driver.map(half, phys)), DriverCode::INVALID_VALUE);
    assert_eq!(
        code(driver.free_reservation(half)),
        DriverCode::INVALID_VALUE
    );
    // libcuda alone would accept the first.
    assert_eq!(code(driver.unmap(half)), DriverCode::INVALID_VALUE);
    assert_eq!(
        code(driver.set_access(half, Access::Read)),
        DriverCode::INVALID_VALUE
    );
    driver.free_reservation(range).unwrap();

    let stream = driver.create_stream().unwrap();
    driver.destroy_stream(stream).unwrap();
    assert_eq!(code(driver.sync_stream(stream)), DriverCode::INVALID_HANDLE);
    let event = driver.create_event().unwrap();
    driver.destroy_event(event).unwrap();
    assert_eq!(code(driver.query_event(event)), DriverCode::INVALID_HANDLE);
    let host = [0u8; 64];
    let host = VaRange::new(Va::new(host.as_ptr() as u64), 64).unwrap();
    assert_eq!(
        code(driver.fill(host, 1, StreamId::DEFAULT)),
        DriverCode::INVALID_VALUE
    );
}

#[test]
fn memory_calls_work_during_a_capture_and_waits_are_refused_without_spoiling_it() {
    let Some(driver) = driver() else { return };
    let memory = Mapped::new(&driver, 2 * driver.info().granularity);
    let stream = driver.create_stream().unwrap();
    let other = driver.create_stream().unwrap();
    driver.begin_capture(stream).unwrap();
    driver.fill(memory.range, 9, stream).unwrap();
    let unsupported = DriverCode::STREAM_CAPTURE_UNSUPPORTED;
    assert_eq!(code(driver.sync_stream(stream)), unsupported);
    let start = memory.range.start();
    assert_eq!(
        code(driver.copy_from_host(start, &[1], stream)),
        unsupported
    );
    drop(Mapped::new(&driver, driver.info().granularity));
    let event = driver.create_event().unwrap();
    driver.record_event(event, other).unwrap();
    until(&driver, event);
    let graph = driver.end_capture(stream).unwrap();

    assert_eq!(memory.words(0, 1), [0], "captured, not run");
    graph.launch(stream).unwrap();
    driver.sync_stream(stream).unwrap();
    assert_eq!(memory.words(0, 1), [0x0909_0909_0909_0909]);
    driver.destroy_event(event).unwrap();
    driver.destroy_stream(stream).unwrap();
    driver.destroy_stream(other).unwrap();
}

#[test]
fn an_exported_granule_comes_back_as_the_same_memory() {
    let Some(driver) = driver() else { return };
    if !driver.info().capabilities.exportable {
        println!("skipped: granules cannot be exported here");
        return;
    }
    use std::os::fd::AsFd;
    let len = driver.info().granularity;
    let props = GranuleProps {
        exportable: true,
        ..GranuleProps::default()
    };
    let phys = driver.create(len, props).unwrap();
    assert!(driver.granted(phys).unwrap().exportable);
    let fd = driver.export_fd(phys).unwrap();
    let imported = driver.import_fd(fd.as_fd(), len).unwrap();
    drop(fd);
    let room = driver.reserve(2 * len, 0).unwrap();
    let halves = [0, len].map(|offset| room.sub(offset, len).unwrap());
    driver.map(halves[0], phys).unwrap();
    driver.map(halves[1], imported).unwrap();
    driver.set_access(room, Access::ReadWrite).unwrap();
    driver.fill(halves[0], 3, StreamId::DEFAULT).unwrap();
    let mut byte = [0];
    let last = halves[1].sub(len - 1, 1).unwrap();
    driver
        .copy_to_host(&mut byte, last, StreamId::DEFAULT)
        .unwrap();
    assert_eq!(byte, [3]);
    driver.unmap(room).unwrap();
    driver.release(phys).unwrap();
    driver.release(imported).unwrap();
    driver.free_reservation(room).unwrap();
}

#[test]
fn plain_allocations_are_device_memory() {
    let Some(driver) = driver() else { return };
    let s = StreamId::DEFAULT;
    let plain = driver.mem_alloc(4096).unwrap();
    let pooled = driver.mem_alloc_async(4096, s).unwrap();
    driver
        .fill(VaRange::new(plain, 4096).unwrap(), 5, s)
        .unwrap();
    driver
        .copy(pooled, VaRange::new(plain, 4096).unwrap(), s)
        .unwrap();
    let mut bytes = [0; 16];
    driver
        .copy_to_host(&mut bytes, VaRange::new(pooled, 16).unwrap(), s)
        .unwrap();
    assert_eq!(bytes, [5; 16]);
    driver.mem_free_async(pooled, s).unwrap();
    driver.mem_free(plain).unwrap();
    assert_eq!(code(driver.mem_free(plain)), DriverCode::INVALID_VALUE);
}

#[test]
fn default_and_own_streams_have_keys_of_their_own() {
    let Some(driver) = driver() else { return };
    let mut keys = vec![driver.stream_key(StreamId::DEFAULT).unwrap()];
    for _ in 0..8 {
        let stream = driver.create_stream().unwrap();
        let key = driver.stream_key(stream).unwrap();
        assert!(!keys.contains(&key), "{key:?}");
        keys.push(key);
        driver.destroy_stream(stream).unwrap();
    }
}

/// Another context stays current across our calls.
#[test]
fn the_callers_context_is_restored() {
    let Some(driver) = driver() else { return };
    let table = driver.core.table;
    let current = || {
        let mut context = std::ptr::null_mut();
        // SAFETY: the pointer is to a live local.
        let code = unsafe { (table.cuCtxGetCurrent)(&raw mut context) };
        done(Call::Init, code).unwrap();
        context::id(context)
    };
    assert_eq!(current(), 0, "opening and probing left a context behind");
    driver.memory_info().unwrap();
    assert_eq!(current(), 0);
    // SAFETY: the context is the driver's, alive during the test.
    let code = unsafe { (table.cuCtxPushCurrent_v2)(context::handle(driver.context())) };
    done(Call::Init, code).unwrap();
    driver.memory_info().unwrap();
    assert_eq!(current(), driver.context());
    let mut popped = std::ptr::null_mut();
    // SAFETY: pairs with the push above.
    let code = unsafe { (table.cuCtxPopCurrent_v2)(&raw mut popped) };
    done(Call::Init, code).unwrap();
}

#[test]
fn a_device_that_is_not_there_is_counted() {
    if driver().is_none() {
        return;
    }
    let count = device_count().unwrap();
    let error = CudaDriver::open(count).unwrap_err();
    assert_eq!(
        error,
        Error::DeviceMissing {
            ordinal: count,
            count
        }
    );
}

/// What a call costs on top of libcuda, printed.
#[test]
fn the_cost_of_entering_is_printed() {
    let Some(driver) = driver() else { return };
    let event = driver.create_event().unwrap();
    let rounds = 10_000;
    let time = |what: &str, mut f: Box<dyn FnMut() + '_>| {
        let start = Instant::now();
        for _ in 0..rounds {
            f();
        }
        println!("{what}: {} ns", start.elapsed().as_nanos() / rounds);
    };
    time(
        "enter, context not current",
        Box::new(|| drop(driver.core.enter(Call::Init).unwrap())),
    );
    let outer = driver.core.enter(Call::Init).unwrap();
    time(
        "enter, context current",
        Box::new(|| drop(driver.core.enter(Call::Init).unwrap())),
    );
    time(
        "query_event",
        Box::new(|| assert!(driver.query_event(event).unwrap())),
    );
    let record = || driver.record_event(event, StreamId::DEFAULT).unwrap();
    time("record_event", Box::new(record));
    drop(outer);
    driver.destroy_event(event).unwrap();
}
