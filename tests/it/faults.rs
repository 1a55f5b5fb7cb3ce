//! Every driver call of every operation fails in turn. After each failure the object is as before or
//! as after, the books agree with a recount, the same operation succeeds, and nothing is left.

use std::time::Duration;

use granule::driver::{Call, DriverCode, Hold};
use granule::units::{MIB, VaRange};
use granule::{Arena, Error, Policy, Pool, PoolConfig, PoolStats, Result, Stream, Tensor};

use crate::support::{On, Rig, audit, check_extents, head, small_granules};

const CODES: [DriverCode; 3] = [
    DriverCode::UNKNOWN,
    DriverCode::OUT_OF_MEMORY,
    DriverCode(12345),
];

/// What an operation works on. Arenas that are gone are `None`.
struct World {
    pool: Option<Pool>,
    arenas: Vec<Option<Arena>>,
    tensor: Option<Tensor<u64>>,
    stream: Stream,
    other: Stream,
    hold: Option<Hold>,
}

/// What must be as before or as after.
#[derive(Clone, PartialEq, Debug)]
struct Visible {
    arenas: Vec<Option<(VaRange, u64)>>,
    rows: Option<u64>,
    budget: Option<u64>,
}

impl World {
    /// Two arenas of 12 MiB, and a tensor of 3 MiB, with patterns in them.
    fn new(rig: &Rig, config: PoolConfig) -> Self {
        let pool = rig.pool(config);
        let arenas: Vec<_> = (0..2)
            .map(|_| Arena::new(&pool, 256 * MIB).unwrap())
            .collect();
        let tensor = Tensor::new(&pool, &[MIB / 8], 100).unwrap();
        for arena in &arenas {
            arena.grow(12 * MIB).unwrap();
        }
        tensor.grow(3).unwrap();
        let world = Self {
            pool: Some(pool),
            arenas: arenas.into_iter().map(Some).collect(),
            tensor: Some(tensor),
            stream: rig.device.create_stream().unwrap(),
            other: rig.device.create_stream().unwrap(),
            hold: None,
        };
        world.each(|seed, range| rig.write(range, seed));
        world
    }

    fn pool(&self) -> &Pool {
        self.pool.as_ref().unwrap()
    }

    fn arena(&mut self, i: usize) -> &mut Arena {
        self.arenas[i].as_mut().unwrap()
    }

    fn tensor(&mut self) -> &mut Tensor<u64> {
        self.tensor.as_mut().unwrap()
    }

    fn visible(&self) -> Visible {
        let one = |arena: &Arena| (arena.range(), arena.capacity());
        Visible {
            arenas: self.arenas.iter().map(|a| a.as_ref().map(one)).collect(),
            rows: self.tensor.as_ref().map(Tensor::rows),
            budget: self.pool.as_ref().map(|p| p.stats().budget),
        }
    }

    /// The bytes that hold patterns, as far as they are in use now.
    fn each(&self, look: impl Fn(u64, VaRange)) {
        for (seed, arena) in (1..).zip(&self.arenas) {
            if let Some(arena) = arena {
                look(seed, head(arena, arena.len().min(12 * MIB)));
            }
        }
        if let Some(tensor) = &self.tensor {
            look(99, head(tensor.arena(), tensor.arena().len().min(3 * MIB)));
        }
    }

    fn check(&self, rig: &Rig) {
        self.each(|seed, range| rig.check(range, seed));
        self.arenas.iter().flatten().for_each(check_extents);
        if let Some(pool) = &self.pool {
            audit(pool);
        }
    }
}

struct Case {
    name: &'static str,
    config: PoolConfig,
    /// On a driver that works.
    prepare: fn(&mut World),
    /// On a driver that fails once. Can be called again after an error.
    run: fn(&mut World) -> Result<()>,
}

/// Fails the calls of an operation one after the other, with each code.
fn sweep(on: On, case: &Case) {
    let after = {
        let rig = Rig::new(on);
        let mut world = World::new(&rig, case.config.clone());
        (case.prepare)(&mut world);
        (case.run)(&mut world).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        world.hold = None;
        world.check(&rig);
        lens(&world.visible())
    };
    // One code fewer where each round makes a memory file.
    for code in CODES.into_iter().skip(usize::from(on != On::Sim)) {
        let mut k = 1;
        while fail_nth(on, case, code, k, &after) {
            k += 1;
            assert!(k < 1000, "{}: too many calls", case.name);
        }
        assert!(k > 1, "{}: no driver call is made", case.name);
    }
}

/// Lengths without addresses, which differ from device to device.
fn lens(visible: &Visible) -> (Vec<Option<u64>>, Option<u64>, Option<u64>) {
    let lens = visible.arenas.iter();
    let lens = lens.map(|a| a.map(|(range, _)| range.len())).collect();
    (lens, visible.rows, visible.budget)
}

/// Whether the operation made at least `k` calls.
fn fail_nth(
    on: On,
    case: &Case,
    code: DriverCode,
    k: u64,
    after: &(Vec<Option<u64>>, Option<u64>, Option<u64>),
) -> bool {
    let at = format!("{}, call {k}, {code}", case.name);
    let rig = Rig::new(on);
    let mut world = World::new(&rig, case.config.clone());
    (case.prepare)(&mut world);
    let before = world.visible();
    let fired = rig.fault.fired();
    rig.fault.fail_nth_overall(k, code);
    let outcome = (case.run)(&mut world);
    let fired = rig.fault.fired() > fired;
    rig.fault.clear();
    world.hold = None;

    let now = world.visible();
    for (was, is) in before.arenas.iter().zip(&now.arenas) {
        if let (Some((was, capacity)), Some((is, same))) = (was, is) {
            assert_eq!((was.start(), capacity), (is.start(), same), "{at}");
        }
    }
    if outcome.is_ok() {
        assert_eq!(&lens(&now), after, "{at}: succeeded");
    } else {
        assert!(fired, "{at}: {outcome:?}");
        // A close that failed half-way leaves what is left of the object, empty.
        let closing = case.name.starts_with("close");
        let done = closing || &lens(&now) == after;
        assert!(
            now == before || done,
            "{at}: {now:?} is neither {before:?} nor {after:?}"
        );
    }
    if let Err(error) = &outcome {
        let explained = match error {
            Error::Driver(e) => e.code == code,
            Error::OutOfMemory(_) | Error::AddressSpaceExhausted { .. } => {
                code == DriverCode::OUT_OF_MEMORY
            }
            _ => false,
        };
        assert!(explained, "{at}: {error}");
    }
    world.check(&rig);
    if outcome.is_err() {
        (case.run)(&mut world).unwrap_or_else(|e| panic!("{at}: the retry failed: {e}"));
        assert_eq!(&lens(&world.visible()), after, "{at}: retry");
        world.check(&rig);
    }
    drop(world);
    rig.assert_nothing_left();
    fired
}

fn config() -> PoolConfig {
    small_granules(512 * MIB)
}

fn dynamic() -> PoolConfig {
    config().policy(Policy::Dynamic)
}

fn zeroing() -> PoolConfig {
    PoolConfig {
        zero_on_handover: true,
        ..config()
    }
}

fn nothing(_: &mut World) {}

/// A third arena has left dirty granules in the pool.
fn leave_idle(w: &mut World) {
    let mut gone = Arena::new(w.pool(), 256 * MIB).unwrap();
    gone.grow(40 * MIB).unwrap();
    gone.shrink(0).unwrap();
}

fn use_both_on_stream(w: &mut World) {
    for i in 0..2 {
        let stream = w.stream.clone();
        w.arena(i).grow(60 * MIB).unwrap();
        w.arena(i).record_use(&stream).unwrap();
    }
}

/// The tail of the first arena waits for held work.
fn defer_behind_hold(w: &mut World) {
    use_both_on_stream(w);
    w.hold = Some(w.stream.hold().unwrap());
    w.arena(0).shrink_deferred(10 * MIB).unwrap();
}

macro_rules! sweeps {
    ($($name:ident: $config:expr, $prepare:expr, $run:expr;)+) => {
        $(
            fn $name(on: On) {
                let name = stringify!($name);
                let prepare: fn(&mut World) = $prepare;
                let run: fn(&mut World) -> Result<()> = $run;
                sweep(on, &Case { name, config: $config, prepare, run });
            }
        )+
        mod each {
            use super::{$($name),+};
            on_each_driver!($($name)+);
        }
    };
}

sweeps! {
    grow: config(), nothing, |w| w.arena(0).grow(70 * MIB);
    grow_in_a_dynamic_pool: dynamic(), nothing, |w| w.arena(0).grow(70 * MIB);
    grow_into_recycled_granules: config(), leave_idle, |w| w.arena(0).grow(70 * MIB);
    grow_into_zeroed_granules: zeroing(), leave_idle, |w| w.arena(0).grow(70 * MIB);
    grow_on_a_stream: config(), leave_idle, |w| {
        let stream = w.stream.clone();
        w.arena(0).grow_on(70 * MIB, &stream)
    };
    grow_on_a_stream_that_zeroes: zeroing(), leave_idle, |w| {
        let stream = w.stream.clone();
        w.arena(0).grow_on(45 * MIB, &stream)
    };
    grow_on_into_a_deferred_tail: config(), defer_behind_hold, |w| {
        let other = w.other.clone();
        w.arena(0).grow_on(90 * MIB, &other)
    };
    grow_where_another_tail_must_be_reclaimed: small_granules(160 * MIB), |w| {
        use_both_on_stream(w);
        w.arena(1).truncate(20 * MIB).unwrap();
    }, |w| w.arena(0).grow(90 * MIB);
    extend: config(), nothing, |w| w.arena(0).extend(50 * MIB).map(drop);
    grow_all: config(), leave_idle, |w| {
        let [Some(k), Some(v)] = &w.arenas[..] else { unreachable!() };
        Arena::grow_all(&[(k, 50 * MIB), (v, 45 * MIB)])
    };
    grow_all_on: zeroing(), leave_idle, |w| {
        let [Some(k), Some(v)] = &w.arenas[..] else { unreachable!() };
        Arena::grow_all_on(&[(k, 50 * MIB), (v, 45 * MIB)], &w.stream)
    };
    shrink: config(), use_both_on_stream, |w| w.arena(0).shrink(5 * MIB);
    shrink_in_a_dynamic_pool: dynamic(), use_both_on_stream, |w| w.arena(0).shrink(5 * MIB);
    try_shrink: config(), use_both_on_stream, |w| w.arena(0).try_shrink(5 * MIB);
    shrink_after: config(), use_both_on_stream, |w| {
        let fence = w.stream.fence()?;
        w.arena(0).shrink_after(5 * MIB, &[fence])
    };
    shrink_deferred: config(), use_both_on_stream, |w| w.arena(0).shrink_deferred(5 * MIB);
    shrink_deferred_behind_a_hold: config(), |w| {
        use_both_on_stream(w);
        w.hold = Some(w.stream.hold().unwrap());
    }, |w| w.arena(0).shrink_deferred(5 * MIB);
    trim: config(), leave_idle, |w| w.pool().trim(0).map(drop);
    lower_the_budget: config(), leave_idle, |w| w.pool().set_budget(48 * MIB);
    lower_the_budget_of_a_static_pool: config().policy(Policy::Static), nothing,
        |w| w.pool().set_budget(64 * MIB);
    raise_the_budget_of_a_static_pool: small_granules(64 * MIB).policy(Policy::Static), nothing,
        |w| w.pool().set_budget(96 * MIB);
    make_an_arena: config(), nothing, |w| {
        let arena = Arena::new(w.pool(), 64 * MIB)?;
        w.arenas.push(Some(arena));
        Ok(())
    };
    tensor_grow: config(), nothing, |w| w.tensor().grow(41);
    tensor_grow_on: config(), leave_idle, |w| {
        let stream = w.stream.clone();
        w.tensor().grow_on(41, &stream)
    };
    tensor_grow_zeroed: config(), leave_idle, |w| {
        let stream = w.stream.clone();
        w.tensor().grow_zeroed(41, &stream)
    };
    tensor_shrink: config(), |w| {
        let stream = w.stream.clone();
        w.tensor().grow_on(41, &stream).unwrap();
    }, |w| w.tensor().shrink(1);
    close: config(), use_both_on_stream, |w| {
        let Some(arena) = w.arenas[0].take() else { return Ok(()) };
        arena.close().map_err(|(arena, error)| {
            w.arenas[0] = Some(arena);
            error
        })
    };
    close_a_tensor: config(), nothing, |w| {
        let Some(tensor) = w.tensor.take() else { return Ok(()) };
        tensor.close().map_err(|(tensor, error)| {
            w.tensor = Some(tensor);
            error
        })
    };
    drop_an_arena: config(), use_both_on_stream, |w| {
        w.arenas[0] = None;
        Ok(())
    };
    drop_everything: config(), defer_behind_hold_briefly, |w| {
        w.hold = None;
        w.arenas.clear();
        w.tensor = None;
        w.pool = None;
        Ok(())
    };
}

fn defer_behind_hold_briefly(w: &mut World) {
    leave_idle(w);
    defer_behind_hold(w);
}

fn a_pool_with_a_static_floor_is_made_or_leaves_nothing(on: On) {
    for policy in [Policy::Static, Policy::Hybrid { base: 48 * MIB }] {
        for code in CODES {
            for k in 1.. {
                let rig = Rig::new(on);
                rig.fault.fail_nth_overall(k, code);
                let made = Pool::new(&rig.device, small_granules(64 * MIB).policy(policy));
                let Err(error) = made else {
                    assert!(rig.fault.fired() == 0 && k > 6);
                    break;
                };
                assert_eq!(error.is_out_of_memory(), code == DriverCode::OUT_OF_MEMORY);
                rig.assert_nothing_left();
                let pool = rig.pool(small_granules(64 * MIB).policy(policy));
                let stats: PoolStats = audit(&pool);
                assert_eq!(stats.created, stats.floor);
                drop(pool);
                rig.assert_nothing_left();
            }
        }
    }
}

/// Two calls fail in one operation: the second one while the first is being undone.
fn two_failures_in_one_growth_leave_it_whole(on: On) {
    for first in 1..14 {
        for second in first + 1..first + 7 {
            let rig = Rig::new(on);
            let mut world = World::new(&rig, zeroing());
            leave_idle(&mut world);
            let before = world.visible();
            rig.fault.fail_nth_overall(first, DriverCode::UNKNOWN);
            rig.fault
                .fail_nth_overall(second, DriverCode::OUT_OF_MEMORY);
            let stream = world.stream.clone();
            let outcome = world.arena(0).grow_on(45 * MIB, &stream);
            rig.fault.clear();
            if outcome.is_err() {
                assert_eq!(world.visible(), before);
            }
            world.check(&rig);
            world.arena(0).grow_on(45 * MIB, &stream).unwrap();
            world.check(&rig);
            drop((world, stream));
            rig.assert_nothing_left();
        }
    }
}

/// A kind of call fails for good while work is queued: whatever is dropped meanwhile is not
/// unmapped under the work, and comes back once the driver works again.
fn what_a_broken_driver_keeps_comes_back_when_it_works_again(on: On) {
    for &call in Call::ALL.iter().filter(|call| **call != Call::Init) {
        for code in CODES {
            let rig = Rig::new(on);
            let mut world = World::new(&rig, zeroing());
            leave_idle(&mut world);
            use_both_on_stream(&mut world);
            let hold = world.stream.hold().unwrap();
            let range = world.arena(0).range().sub(59 * MIB, 4096).unwrap();
            let kernel = granule::driver::Kernel::WritePattern { range, seed: 5 };
            rig.inner.launch(kernel, world.stream.id()).unwrap();
            rig.fault.fail_from(call, 1, code);
            let other = world.other.clone();
            let _ = world.arena(0).grow_on(150 * MIB, &other);
            let _ = world.arena(1).shrink_deferred(10 * MIB);
            let _ = world.pool().trim(0);
            let _ = world.tensor().grow_zeroed(50, &other);
            let _ = Arena::new(world.pool(), 64 * MIB);
            audit(world.pool());
            let releaser = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(3));
                drop(hold);
            });
            drop((world, other));
            releaser.join().unwrap();
            assert!(!rig.is_lost(), "{call} {code}");
            rig.assert_nothing_left();
        }
    }
}

on_each_driver! {
    a_pool_with_a_static_floor_is_made_or_leaves_nothing
    two_failures_in_one_growth_leave_it_whole
    what_a_broken_driver_keeps_comes_back_when_it_works_again
}
