//! Growing and shrinking in place, pins, threads, and the ways in which an arena ends.

use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use granule::driver::Call;
use granule::units::{GIB, MIB, VaRange};
use granule::{Arena, ArenaConfig, Device, Error, Pool, PoolConfig};

use crate::support::{On, Rig, audit, check_extents, head, small_granules};

fn contents_and_base_stay_while_it_grows_and_shrinks(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(512 * MIB));
    let mut arena = Arena::new(&pool, GIB).unwrap();
    let base = arena.base();
    arena.grow(10 * MIB).unwrap();
    rig.write(head(&arena, 10 * MIB), 1);
    for to in [11, 33, 64, 200] {
        arena.grow(to * MIB).unwrap();
        rig.check(head(&arena, 10 * MIB), 1);
        check_extents(&arena);
    }
    for to in [150, 64, 33, 10] {
        arena.shrink(to * MIB).unwrap();
        rig.check(head(&arena, 10 * MIB), 1);
        check_extents(&arena);
        assert_eq!((arena.base(), arena.len()), (base, to * MIB));
    }
    arena.grow(5 * MIB).unwrap();
    assert_eq!(arena.len(), 10 * MIB, "a smaller growth changes nothing");
    arena.shrink(20 * MIB).unwrap();
    assert_eq!(arena.len(), 10 * MIB, "a larger shrink changes no length");
    assert!(arena.mapped() < 20 * MIB);
    arena.close().unwrap();
    audit(&pool);
    drop(pool);
    rig.assert_nothing_left();
}

fn an_arena_has_granules_as_small_as_it_asks_for(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(128 * MIB));
    let config = ArenaConfig::new(128 * MIB).granule(4 * MIB);
    let arena = Arena::with_config(&pool, &config).unwrap();
    arena.grow(62 * MIB).unwrap();
    check_extents(&arena);
    let largest = arena.ranges().iter().map(|e| e.range.len()).max();
    assert_eq!(largest, Some(4 * MIB));
    arena.grow(62 * MIB + 1).unwrap();
    assert_eq!(arena.mapped(), 66 * MIB, "no step is larger than that");
    for wrong in [0, MIB, 3 * MIB, 32 * MIB] {
        let config = ArenaConfig::new(64 * MIB).granule(wrong);
        let refused = Arena::with_config(&pool, &config);
        assert!(
            matches!(&refused, Err(Error::InvalidConfig { value, .. }) if *value == wrong),
            "{refused:?}"
        );
    }
    drop((arena, pool));
    rig.assert_nothing_left();
}

fn a_truncated_tail_keeps_its_bytes(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let mut arena = Arena::new(&pool, 64 * MIB).unwrap();
    arena.grow(40 * MIB).unwrap();
    rig.write(arena.range(), 1);
    arena.truncate(3).unwrap();
    assert_eq!(arena.len(), 3);
    rig.without_calls(|| arena.grow(40 * MIB).unwrap());
    rig.check(arena.range(), 1);
    arena.truncate(0).unwrap();
    arena.shrink_to_fit().unwrap();
    assert_eq!(arena.mapped(), 0);
}

fn a_deferred_tail_is_taken_back_with_its_bytes(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let mut arena = Arena::new(&pool, 64 * MIB).unwrap();
    let (first, second) = (
        rig.device.create_stream().unwrap(),
        rig.device.create_stream().unwrap(),
    );
    arena.grow_on(40 * MIB, &first).unwrap();
    rig.write(arena.range(), 1);
    let hold = first.hold().unwrap();
    arena.shrink_deferred(10 * MIB).unwrap();
    assert!(audit(&pool).pending > 0);
    let before = rig.counts();
    arena.grow_on(40 * MIB, &second).unwrap();
    assert!(
        rig.calls(&before, Call::WaitEvent) > 0,
        "the stream waits, on the device"
    );
    assert_eq!(
        rig.calls(&before, Call::Map) + rig.calls(&before, Call::SyncEvent),
        0
    );
    assert_eq!(audit(&pool).pending, 0);
    drop(hold);
    rig.check(arena.range(), 1);
}

fn a_growth_into_a_deferred_tail_waits_on_the_host_when_no_stream_is_named(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let mut arena = Arena::new(&pool, 64 * MIB).unwrap();
    let stream = rig.device.create_stream().unwrap();
    arena.grow_on(40 * MIB, &stream).unwrap();
    let hold = stream.hold().unwrap();
    arena.shrink_deferred(10 * MIB).unwrap();
    let releaser = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        drop(hold);
    });
    let before = rig.counts();
    arena.grow(40 * MIB).unwrap();
    assert!(rig.calls(&before, Call::SyncEvent) > 0);
    releaser.join().unwrap();
}

fn a_shrink_waits_for_the_recorded_streams(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let mut arena = Arena::new(&pool, 64 * MIB).unwrap();
    arena.grow(40 * MIB).unwrap();
    let stream = rig.device.create_stream().unwrap();
    arena.record_use(&stream).unwrap();
    let hold = stream.hold().unwrap();
    rig.inner.fill(arena.range(), 1, stream.id()).unwrap();
    let releaser = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        drop(hold);
    });
    arena.shrink(0).unwrap();
    stream.synchronize().unwrap();
    releaser.join().unwrap();
    assert!(!rig.is_lost());
    assert_eq!(arena.mapped(), 0);
}

/// Another thread must be able to grow while a shrink waits: the work may need that growth.
fn growth_goes_on_while_a_shrink_waits(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(128 * MIB));
    let arena = Arena::new(&pool, 128 * MIB).unwrap();
    let stream = rig.device.create_stream().unwrap();
    let other = rig.device.create_stream().unwrap();
    arena.grow_on(40 * MIB, &stream).unwrap();
    let hold = stream.hold().unwrap();
    thread::scope(|s| {
        let shrink = s.spawn(|| arena.try_shrink(10 * MIB));
        thread::sleep(Duration::from_millis(20));
        arena.grow_on(80 * MIB, &other).unwrap();
        drop(hold);
        shrink.join().unwrap().unwrap();
    });
    assert_eq!(arena.len(), 10 * MIB);
    audit(&pool);
}

fn threads_that_extend_at_once_get_ranges_of_their_own(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(256 * MIB));
    let config = ArenaConfig::new(256 * MIB).look_ahead(8 * MIB);
    let arena = Arena::with_config(&pool, &config).unwrap();
    let got: Mutex<Vec<VaRange>> = Mutex::new(Vec::new());
    thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                for _ in 0..25 {
                    let range = arena.extend(MIB).unwrap();
                    got.lock().unwrap().push(range);
                }
            });
        }
    });
    let mut got = got.into_inner().unwrap();
    got.sort_by_key(|range| range.start());
    for (i, range) in got.iter().enumerate() {
        assert_eq!(range.start().get(), arena.base().get() + i as u64 * MIB);
        assert_eq!(range.len(), MIB);
        rig.write(*range, i as u64);
    }
    assert_eq!(arena.len(), 100 * MIB);
    for (i, range) in got.iter().enumerate() {
        rig.check(*range, i as u64);
    }
}

fn pinned_bytes_stay(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let mut arena = Arena::new(&pool, 64 * MIB).unwrap();
    arena.grow(40 * MIB).unwrap();
    let pin = arena.pin(10 * MIB, 5 * MIB).unwrap();
    assert_eq!(pin.range(), arena.range().sub(10 * MIB, 5 * MIB).unwrap());
    let refusal = |asked| Error::Pinned {
        asked,
        pinned_end: 15 * MIB,
        pins: 1,
    };
    let short = 15 * MIB - 1;
    rig.without_calls(|| {
        assert_eq!(arena.shrink(short).unwrap_err(), refusal(short));
        assert_eq!(arena.try_shrink(short).unwrap_err(), refusal(short));
        assert_eq!(arena.truncate(short).unwrap_err(), refusal(short));
        assert_eq!(arena.shrink_deferred(short).unwrap_err(), refusal(short));
        assert_eq!(arena.shrink_after(short, &[]).unwrap_err(), refusal(short));
    });
    assert_eq!(arena.len(), 40 * MIB);
    arena.shrink(15 * MIB).unwrap();
    let (arena, error) = arena.close().unwrap_err();
    assert_eq!(error, refusal(0));
    rig.write(pin.range(), 1);
    drop(pin);
    arena.close().unwrap();
    drop(pool);
    rig.assert_nothing_left();
}

fn a_pin_keeps_the_memory_of_an_arena_that_was_dropped(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let config = ArenaConfig::new(64 * MIB).look_ahead(8 * MIB);
    let arena = Arena::with_config(&pool, &config).unwrap();
    arena.grow(40 * MIB).unwrap();
    rig.write(arena.range(), 1);
    let range = arena.range();
    let pin = arena.pin(39 * MIB, MIB).unwrap();
    drop((arena, pool));
    rig.check(range, 1);
    drop(pin);
    rig.assert_nothing_left();
}

fn an_arena_that_is_looked_ahead_for_can_end_at_any_time(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(256 * MIB));
    for i in 0..60 {
        let config = ArenaConfig::new(128 * MIB).look_ahead(64 * MIB);
        let mut arena = Arena::with_config(&pool, &config).unwrap();
        arena.grow(i % 7 * MIB + 1).unwrap();
        match i % 4 {
            0 => drop(arena),
            1 => arena.close().unwrap(),
            2 => {
                arena.shrink(0).unwrap();
                arena.grow(30 * MIB).unwrap();
            }
            _ => {
                thread::sleep(Duration::from_micros(i * 7));
                arena.try_shrink(0).unwrap();
            }
        }
    }
    drop(pool);
    rig.assert_nothing_left();
}

on_each_driver! {
    contents_and_base_stay_while_it_grows_and_shrinks
    an_arena_has_granules_as_small_as_it_asks_for
    a_truncated_tail_keeps_its_bytes
    a_deferred_tail_is_taken_back_with_its_bytes
    a_growth_into_a_deferred_tail_waits_on_the_host_when_no_stream_is_named
    a_shrink_waits_for_the_recorded_streams
    growth_goes_on_while_a_shrink_waits
    threads_that_extend_at_once_get_ranges_of_their_own
    pinned_bytes_stay
    a_pin_keeps_the_memory_of_an_arena_that_was_dropped
    an_arena_that_is_looked_ahead_for_can_end_at_any_time
    an_exit_with_arenas_alive_is_clean
}

/// How the child process ends, and the exit code that is right.
const ENDS: [(&str, i32); 4] = [("exit", 0), ("thread", 0), ("panic", 101), ("fork", 0)];
const END: &str = "GRANULE_TEST_END";
const CHILD: &str = "arena::a_child_process_that_ends";

fn an_exit_with_arenas_alive_is_clean(on: On) {
    let driver = match on {
        On::Sim => "sim",
        On::Host => "host",
        On::Cuda => "cuda",
    };
    for (end, code) in ENDS {
        let child = Command::new(std::env::current_exe().unwrap())
            .args([
                CHILD,
                "--exact",
                "--ignored",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(END, format!("{end} {driver}"))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stderr);
        assert_eq!(child.status.code(), Some(code), "{end} on {driver}: {said}");
        let panics = said.matches("panicked at").count();
        assert_eq!(
            panics,
            usize::from(end == "panic"),
            "{end} on {driver}: {said}"
        );
    }
}

/// Dropped by nobody at exit.
static LEAKED: Mutex<Option<Arena>> = Mutex::new(None);

thread_local! {
    static LOCAL: Mutex<Option<Arena>> = const { Mutex::new(None) };
}

#[test]
#[ignore = "run by an_exit_with_arenas_alive_is_clean as a child process"]
fn a_child_process_that_ends() {
    let Ok(order) = std::env::var(END) else {
        return;
    };
    let (end, driver) = order.split_once(' ').unwrap();
    let device = Device::by_name(driver).unwrap();
    let config = PoolConfig {
        spare: 16 * MIB,
        ..small_granules(256 * MIB)
    };
    let pool = Pool::new(&device, config).unwrap();
    let make = || {
        let config = ArenaConfig::new(256 * MIB).look_ahead(64 * MIB);
        let arena = Arena::with_config(&pool, &config).unwrap();
        arena
            .grow_on(20 * MIB, &device.create_stream().unwrap())
            .unwrap();
        arena
    };
    match end {
        "exit" => {
            *LEAKED.lock().unwrap() = Some(make());
            std::process::exit(0);
        }
        "thread" => {
            let arena = make();
            let thread = thread::spawn(|| LOCAL.with(|l| *l.lock().unwrap() = Some(arena)));
            thread.join().unwrap();
            let arena = make();
            LOCAL.with(|l| *l.lock().unwrap() = Some(arena));
        }
        "panic" => {
            let _arena = make();
            let _pin = make().pin(0, MIB).unwrap();
            panic!("as it should");
        }
        _ => forked::drop_in_child(make(), pool, &device),
    }
}

#[expect(unsafe_code, reason = "there is no other way to fork")]
mod forked {
    use super::*;

    unsafe extern "C" {
        fn fork() -> i32;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
        fn _exit(status: i32) -> !;
    }

    /// The child drops its copies, without reaching the device; the parent's still work.
    pub(super) fn drop_in_child(arena: Arena, pool: Pool, device: &Device) {
        // The worker should be at rest, since a fork does not take it along.
        thread::sleep(Duration::from_millis(100));
        // SAFETY: the child only drops, and ends without running anything else.
        let child = unsafe { fork() };
        if child == 0 {
            let refused =
                device.memory_info().is_err() || device.kind() == granule::driver::DriverKind::Sim;
            drop(arena);
            drop(pool);
            let clean = refused && device.quarantined() == 0;
            // SAFETY: ends the process, nothing more.
            unsafe { _exit(i32::from(!clean)) }
        }
        let mut status = -1;
        // SAFETY: `child` is a child of this process, and `status` is ours.
        unsafe { waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0, "the child was not clean");
        arena.grow(40 * MIB).unwrap();
        arena.close().unwrap();
        assert!(device.memory_info().is_ok());
    }
}
