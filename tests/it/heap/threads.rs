//! Many threads on one heap.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::time::Duration;

use granule::driver::sim::{SimConfig, SimDriver};
use granule::driver::{
    Access, Call, DeviceInfo, Driver, DriverCode, DriverKind, DriverResult, EventId, GranuleProps,
    Graph, Hold, Kernel, MemoryInfo, PhysId, SharedDriver, StreamId, StreamKey,
};
use granule::units::{KIB, MIB, Va, VaRange};
use granule::{Block, Error, HeapConfig};

use super::yard::Yard;
use crate::support::{On, PATIENCE, Rig, eventually};

on_each_driver! {
    eight_threads_with_a_stream_each
    eight_threads_on_one_stream
    threads_that_trim_and_stop_disturb_nobody
    failing_calls_of_one_thread_hurt_no_other
}

/// The code that tests make calls fail with.
const INJECTED: DriverCode = DriverCode(12345);

/// A generator that needs no state but a number.
fn next(state: &mut u64) -> u64 {
    *state = granule::driver::pattern_word(*state, 1);
    *state >> 8
}

/// Allocates and frees at random, and checks each block before it goes; how often memory ran out.
fn churn(yard: &Yard, stream: usize, thread: u64, rounds: u64) -> usize {
    let mut state = thread + 1;
    let mut live: Vec<(Block, u64)> = Vec::new();
    let mut failures = 0;
    for round in 0..rounds {
        let size = match next(&mut state) % 10 {
            0..4 => 1 + next(&mut state) % (16 * KIB),
            4..8 => 1 + next(&mut state) % (2 * MIB),
            _ => 1 + next(&mut state) % (8 * MIB),
        };
        let seed = (thread << 32) + round;
        match yard.heap.alloc(size, &yard.streams[stream]) {
            Ok(block) => {
                yard.write(&block, seed, stream);
                live.push((block, seed));
            }
            Err(error) => {
                let injected = error.driver_error().is_some_and(|e| e.code == INJECTED);
                assert!(error.is_out_of_memory() || injected, "{error}");
                failures += 1;
            }
        }
        while live.len() > 6 {
            let at = next(&mut state) as usize % live.len();
            let (block, seed) = live.swap_remove(at);
            yard.check(&block, seed, stream);
        }
    }
    for (block, seed) in &live {
        yard.check(block, *seed, stream);
    }
    failures
}

fn config() -> HeapConfig {
    HeapConfig {
        granule_max: 16 * MIB,
        granule_min: 4 * MIB,
        ..HeapConfig::default()
    }
}

fn run_threads(on: On, budget: u64, streams: usize) -> usize {
    let yard = Yard::new(on, budget, config(), streams);
    let barrier = Barrier::new(8);
    let failures = std::thread::scope(|s| {
        let threads: Vec<_> = (0..8)
            .map(|i| {
                let (yard, barrier) = (&yard, &barrier);
                s.spawn(move || {
                    barrier.wait();
                    churn(yard, i % streams, i as u64, 120)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).sum()
    });
    yard.audit();
    let stats = yard.heap.stats();
    assert_eq!((stats.live, stats.blocks), (0, 0), "{stats:?}");
    yard.end();
    failures
}

fn eight_threads_with_a_stream_each(on: On) {
    assert_eq!(run_threads(on, 1024 * MIB, 8), 0);
    // So little that they must take from each other, and sometimes fail.
    run_threads(on, 96 * MIB, 8);
}

fn eight_threads_on_one_stream(on: On) {
    assert_eq!(run_threads(on, 1024 * MIB, 1), 0);
    run_threads(on, 96 * MIB, 1);
}

fn threads_that_trim_and_stop_disturb_nobody(on: On) {
    let yard = Yard::new(on, 512 * MIB, config(), 4);
    std::thread::scope(|s| {
        for i in 0..4 {
            let yard = &yard;
            s.spawn(move || assert_eq!(churn(yard, i, i as u64, 120), 0));
        }
        for _ in 0..2 {
            let yard = &yard;
            s.spawn(move || {
                for _ in 0..50 {
                    yard.heap.trim();
                    yard.pool.trim(0).unwrap();
                    let _ = yard.heap.stats();
                    std::thread::yield_now();
                }
            });
        }
    });
    yard.audit();
    yard.end();
}

/// Calls fail now and then while six threads on three streams go on. Every block keeps its bytes, and
/// the books are right when all is over.
fn failing_calls_of_one_thread_hurt_no_other(on: On) {
    let yard = Yard::new(on, 192 * MIB, config(), 3);
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        let threads: Vec<_> = (0..6)
            .map(|i| {
                let yard = &yard;
                // On a busy machine one round can end before the first call fails.
                let goes_on = |round: &usize| *round == 0 || yard.rig.fault.fired() == 0;
                let rounds = (0..1000).take_while(goes_on);
                s.spawn(move || {
                    let failures = rounds.map(|_| churn(yard, i % 3, i as u64, 150));
                    failures.fold((0, 0), |sum, f| (sum.0 + 150, sum.1 + f))
                })
            })
            .collect();
        s.spawn(|| {
            let mut state = 77;
            while !over.load(Ordering::Relaxed) {
                let nth = 1 + next(&mut state) % 20;
                yard.rig.fault.fail_nth_overall(nth, INJECTED);
                std::thread::sleep(Duration::from_micros(200));
                if next(&mut state).is_multiple_of(4) {
                    yard.heap.trim();
                }
                yard.rig.fault.clear();
            }
        });
        let ends: Vec<_> = threads.into_iter().map(|t| t.join()).collect();
        over.store(true, Ordering::Relaxed);
        let ends = ends.into_iter().map(|end| end.unwrap());
        let (tries, failures) = ends.fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
        assert!(failures < tries, "nothing succeeded");
    });
    yard.rig.fault.clear();
    assert!(yard.rig.fault.fired() > 0);
    yard.sync();
    let settled = eventually(|| {
        yard.heap.trim();
        yard.heap.stats().broken == 0
    });
    settled.unwrap_or_else(|()| panic!("{:?}", yard.heap.stats()));
    yard.audit();
    yard.end();
}

/// Whatever call of a miss or trim is slow, blocks that fit in mapped memory are had and freed, on
/// the same stream and on another, and another stream can miss.
#[test]
fn no_hit_waits_for_a_driver_call_of_another_thread() {
    for call in [
        Call::Create,
        Call::Map,
        Call::SetAccess,
        Call::Unmap,
        Call::CreateEvent,
        Call::RecordEvent,
        Call::QueryEvent,
    ] {
        let sim: SharedDriver = Arc::new(SimDriver::new(SimConfig::default()).unwrap());
        let gate = Arc::new(Gate::new(sim));
        let yard = Yard::on(Rig::around(gate.clone()), 256 * MIB, config(), 2);
        let kept = [yard.alloc(MIB, 0), yard.alloc(MIB, 1)];
        drop([yard.alloc(MIB, 0), yard.alloc(MIB, 1)]);
        let hole = yard.alloc(6 * MIB, 0);
        let end = yard.alloc(MIB, 0);
        drop(hole);
        let (tell, told) = channel();
        std::thread::scope(|s| {
            gate.close(call);
            let yard = &yard;
            let slow = s.spawn(move || {
                let block = yard.heap.alloc(32 * MIB, &yard.streams[0]);
                yard.heap.trim();
                drop(block);
                yard.heap.trim();
            });
            assert!(gate.wait_until_blocked(), "no {call:?} was made");
            s.spawn(move || {
                for _ in 0..1000 {
                    for stream in 0..2 {
                        drop(yard.heap.alloc(MIB / 2, &yard.streams[stream]).unwrap());
                    }
                }
                let miss = yard.heap.alloc(32 * MIB, &yard.streams[1]);
                tell.send(miss.is_ok()).unwrap();
            });
            let done = told.recv_timeout(PATIENCE);
            gate.open();
            assert_eq!(done, Ok(true), "{call:?} held others up");
            slow.join().unwrap();
        });
        yard.audit();
        drop((kept, end));
        yard.end();
    }
}

/// The same size from two threads with room for one: one gets it, the other an error in time.
#[test]
fn of_two_threads_with_room_for_one_exactly_one_fails() {
    for round in 0..50 {
        let config = HeapConfig {
            wait: Duration::from_millis(1),
            ..config()
        };
        let yard = Yard::new(On::Sim, 32 * MIB, config, 2);
        let barrier = Barrier::new(2);
        let got: Vec<Result<Block, Error>> = std::thread::scope(|s| {
            let threads = [0, 1].map(|i| {
                let (yard, barrier) = (&yard, &barrier);
                s.spawn(move || {
                    barrier.wait();
                    yard.heap.alloc(20 * MIB, &yard.streams[i * (round % 2)])
                })
            });
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        let served = got.iter().filter(|r| r.is_ok()).count();
        assert_eq!(served, 1, "{got:?}");
        yard.audit();
        drop(got);
        yard.end();
    }
}

/// Passes everything on, but keeps the next call of one kind until it is opened.
#[derive(Debug)]
struct Gate {
    inner: SharedDriver,
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    closed: Option<Call>,
    blocked: bool,
}

impl Gate {
    fn new(inner: SharedDriver) -> Self {
        Self {
            inner,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn close(&self, call: Call) {
        self.state.lock().unwrap().closed = Some(call);
    }

    fn open(&self) {
        let mut state = self.state.lock().unwrap();
        *state = GateState::default();
        self.changed.notify_all();
    }

    /// Whether a call came to the gate in time.
    fn wait_until_blocked(&self) -> bool {
        let state = self.state.lock().unwrap();
        let (state, _) = self
            .changed
            .wait_timeout_while(state, PATIENCE, |s| !s.blocked)
            .unwrap();
        state.blocked
    }

    fn pass(&self, call: Call) -> &dyn Driver {
        let mut state = self.state.lock().unwrap();
        if state.closed == Some(call) && !state.blocked {
            state.blocked = true;
            self.changed.notify_all();
            drop(self.changed.wait_while(state, |s| s.blocked).unwrap());
        }
        &*self.inner
    }
}

impl Driver for Gate {
    fn kind(&self) -> DriverKind {
        self.inner.kind()
    }
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }
    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        self.inner.memory_info()
    }
    fn reserve(&self, len: u64, align: u64) -> DriverResult<VaRange> {
        self.pass(Call::Reserve).reserve(len, align)
    }
    fn free_reservation(&self, range: VaRange) -> DriverResult<()> {
        self.inner.free_reservation(range)
    }
    fn create(&self, len: u64, props: GranuleProps) -> DriverResult<PhysId> {
        self.pass(Call::Create).create(len, props)
    }
    fn release(&self, phys: PhysId) -> DriverResult<()> {
        self.pass(Call::Release).release(phys)
    }
    fn map(&self, range: VaRange, phys: PhysId) -> DriverResult<()> {
        self.pass(Call::Map).map(range, phys)
    }
    fn set_access(&self, range: VaRange, access: Access) -> DriverResult<()> {
        self.pass(Call::SetAccess).set_access(range, access)
    }
    fn unmap(&self, range: VaRange) -> DriverResult<()> {
        self.pass(Call::Unmap).unmap(range)
    }
    fn create_stream(&self) -> DriverResult<StreamId> {
        self.inner.create_stream()
    }
    fn destroy_stream(&self, stream: StreamId) -> DriverResult<()> {
        self.inner.destroy_stream(stream)
    }
    fn stream_key(&self, stream: StreamId) -> DriverResult<StreamKey> {
        self.inner.stream_key(stream)
    }
    fn sync_stream(&self, stream: StreamId) -> DriverResult<()> {
        self.inner.sync_stream(stream)
    }
    fn create_event(&self) -> DriverResult<EventId> {
        self.pass(Call::CreateEvent).create_event()
    }
    fn destroy_event(&self, event: EventId) -> DriverResult<()> {
        self.inner.destroy_event(event)
    }
    fn record_event(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        self.pass(Call::RecordEvent).record_event(event, stream)
    }
    fn query_event(&self, event: EventId) -> DriverResult<bool> {
        self.pass(Call::QueryEvent).query_event(event)
    }
    fn sync_event(&self, event: EventId) -> DriverResult<()> {
        self.inner.sync_event(event)
    }
    fn wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()> {
        self.inner.wait_event(stream, event)
    }
    fn fill(&self, range: VaRange, byte: u8, stream: StreamId) -> DriverResult<()> {
        self.inner.fill(range, byte, stream)
    }
    fn copy(&self, dst: Va, src: VaRange, stream: StreamId) -> DriverResult<()> {
        self.inner.copy(dst, src, stream)
    }
    fn copy_from_host(&self, dst: Va, src: &[u8], stream: StreamId) -> DriverResult<()> {
        self.inner.copy_from_host(dst, src, stream)
    }
    fn copy_to_host(&self, dst: &mut [u8], src: VaRange, stream: StreamId) -> DriverResult<()> {
        self.inner.copy_to_host(dst, src, stream)
    }
    fn launch(&self, kernel: Kernel, stream: StreamId) -> DriverResult<()> {
        self.inner.launch(kernel, stream)
    }
    fn hold(&self, stream: StreamId) -> DriverResult<Hold> {
        self.inner.hold(stream)
    }
    fn begin_capture(&self, stream: StreamId) -> DriverResult<()> {
        self.inner.begin_capture(stream)
    }
    fn end_capture(&self, stream: StreamId) -> DriverResult<Graph> {
        self.inner.end_capture(stream)
    }
    fn is_capturing(&self, stream: StreamId) -> DriverResult<bool> {
        self.inner.is_capturing(stream)
    }
    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }
}
