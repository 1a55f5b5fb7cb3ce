//! What growing, shrinking and handing over memory cost, against the bare driver calls and against
//! other ways of getting the same memory.
//!
//! ```text
//! GRANULE_DRIVER=cuda cargo bench --bench growth            # figures; under a minute on an H200
//! cargo bench --bench growth -- --test                      # each case once, checked
//! ```
//!
//! Every case checks its result. Criterion reports each by itself; the table at the end has all of
//! them (warm-up runs included) and is what `RESULTS.md` holds.

#[path = "growth/overhead.rs"]
mod overhead;
mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, SamplingMode};
use granule::driver::record::RecordDriver;
use granule::driver::{Call, Kernel};
use granule::units::{Bytes, GIB, MIB, VaRange};
use granule::{Arena, ArenaConfig, Device, Policy, Pool, PoolConfig};

use support::contender::{self, Contender, Fresh, Ordered, Plain, Source};
use support::{Outcome, Rig, median, must, percentile, show};

/// How much memory the cases use.
struct Scale {
    most: u64,
    step: u64,
    cold: &'static [u64],
}

impl Scale {
    fn of(rig: &Rig) -> Outcome<Self> {
        let (most, step, cold): (_, _, &[u64]) = match rig.is_cuda() {
            true => (8 * GIB, 64 * MIB, &[64 * MIB, 256 * MIB, GIB, 4 * GIB]),
            false => (64 * MIB, 4 * MIB, &[64 * MIB, 256 * MIB]),
        };
        let free = rig.device.memory_info()?.free;
        let need = 3 * most.max(cold.iter().copied().max().unwrap_or(0));
        ensure!(
            free >= need,
            "{} free, but the benches need {}",
            Bytes(free),
            Bytes(need)
        );
        Ok(Self { most, step, cold })
    }

    fn steps(&self) -> impl Iterator<Item = u64> + '_ {
        (1..=self.most / self.step).map(|i| i * self.step)
    }

    fn growth(&self) -> String {
        format!("grow to {} by {}", Bytes(self.most), Bytes(self.step))
    }
}

fn main() {
    let mut criterion = Criterion::default()
        .without_plots()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(500))
        .configure_from_args();
    let rig = must(Rig::open());
    let scale = must(Scale::of(&rig));
    untouched(&rig, &scale);
    growth(&mut criterion, &rig, &scale);
    look_ahead(&mut criterion, &rig, &scale);
    overhead::overhead(&mut criterion, &rig, &scale);
    cold(&rig, &scale);
    shrink(&mut criterion, &rig, &scale);
    hand_over(&mut criterion, &rig, &scale);
    criterion.final_summary();
    rig.print();
    // Everything the benches made is gone; what the driver refused to take back would show here.
    assert_eq!(rig.device.quarantined(), 0);
}

fn group<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.sampling_mode(SamplingMode::Flat);
    group
}

/// Runs one case, which times itself; all times it gave.
fn measure(
    group: &mut BenchmarkGroup<'_, WallTime>,
    id: &str,
    mut once: impl FnMut() -> Outcome<Duration>,
) -> Vec<Duration> {
    let mut samples = Vec::new();
    group.bench_function(id, |bencher| {
        bencher.iter_custom(|iterations| {
            let mut total = Duration::ZERO;
            for _ in 0..iterations {
                let time = must(once());
                samples.push(time);
                total += time;
            }
            total
        });
    });
    samples
}

/// Lets memory that was just released come to rest, with the device kept awake by a kernel. The driver
/// scrubs it in the background, and who creates memory at once waits for that: a few milliseconds for
/// some GiB. After a sleep, the first call wakes the device, which costs some 250 us.
fn rest(rig: &Rig) {
    if rig.is_cuda() {
        let spin = Kernel::Spin { nanos: 10_000_000 };
        let driver = rig.device.driver();
        must(driver.launch(spin, rig.stream.id()).map_err(Into::into));
        must(rig.stream.synchronize().map_err(Into::into));
    }
}

/// As [`measure`], with memory at rest before each run and few runs, since rest takes time.
fn at_rest(rig: &Rig, mut once: impl FnMut() -> Outcome<Duration>) -> Vec<Duration> {
    let runs = if std::env::args().any(|a| a == "--bench") {
        21
    } else {
        1
    };
    let run = |_| {
        rest(rig);
        must(once())
    };
    (0..runs).map(run).collect()
}

fn growth(criterion: &mut Criterion, rig: &Rig, scale: &Scale) {
    let mut group = group(criterion, "growth");
    let case = scale.growth();

    let mut creates = 0;
    let times = measure(&mut group, "granule, fresh memory", || {
        rest(rig);
        let pool = Pool::new(&rig.device, PoolConfig::with_budget(scale.most))?;
        let arena = Arena::new(&pool, scale.most)?;
        let time = grow_in_steps(&arena, scale)?;
        creates = pool.stats().creates;
        arena.close().map_err(|(_, error)| error)?;
        Ok(time)
    });
    let note = format!("{} mapped, {creates} granules", Bytes(scale.most));
    rig.row(&case, "granule, released memory created anew", times, note);

    let pool = must(keeping_pool(&rig.device, scale.most));
    let mut arena = must(Arena::new(&pool, scale.most).map_err(Into::into));
    must(grow_in_steps(&arena, scale));
    let times = measure(&mut group, "granule, recycled memory", || {
        arena.shrink(0)?;
        let before = pool.stats().creates;
        let time = grow_in_steps(&arena, scale)?;
        ensure!(pool.stats().creates == before, "memory was created");
        Ok(time)
    });
    let note = format!("{} mapped, no driver create", Bytes(scale.most));
    rig.row(&case, "granule, recycled memory", times, note);
    drop(arena);
    drop(pool);

    for written in [false, true] {
        let case = match written {
            true => format!("{case}, each step written"),
            false => case.clone(),
        };
        rivals(&mut group, rig, scale, &case, written);
    }
    group.finish();
}

/// Growth of one arena by steps; the time of the calls.
fn grow_in_steps(arena: &Arena, scale: &Scale) -> Outcome<Duration> {
    let started = Instant::now();
    for to in scale.steps() {
        arena.grow(to)?;
    }
    let time = started.elapsed();
    ensure!(
        arena.len() == scale.most && arena.mapped() == scale.most,
        "{} mapped for {}",
        Bytes(arena.mapped()),
        Bytes(scale.most)
    );
    Ok(time)
}

/// A pool that keeps all idle memory.
fn keeping_pool(device: &Device, budget: u64) -> Outcome<Pool> {
    let config = PoolConfig {
        watermark: Some(u64::MAX),
        ..PoolConfig::with_budget(budget)
    };
    Ok(Pool::new(device, config)?)
}

/// Allocate, copy, free over what else allocates, and ours on the same terms: the clock stops when
/// the device is done.
fn rivals(
    group: &mut BenchmarkGroup<'_, WallTime>,
    rig: &Rig,
    scale: &Scale,
    case: &str,
    written: bool,
) {
    let names: Vec<&'static str> = must(contenders(rig, scale))
        .iter()
        .map(|c| c.name())
        .collect();
    for (i, name) in names.into_iter().enumerate() {
        if i == 0 && !written {
            continue;
        }
        let mut copied = 0;
        let id = format!("{name}{}", if written { ", written" } else { "" });
        let times = measure(group, &id, || {
            let mut contender = contenders(rig, scale)?.remove(i);
            let mut range = VaRange::EMPTY;
            let started = Instant::now();
            for to in scale.steps() {
                range = contender.enlarge(to)?;
                if written {
                    rig.write(part(range, to - scale.step, scale.step)?, to)?;
                }
                contender.settle()?;
            }
            rig.stream.synchronize()?;
            let time = started.elapsed();
            ensure!(range.len() == scale.most, "grew to {}", range.len());
            if written {
                for to in [scale.step, scale.most] {
                    rig.check(part(range, to - scale.step, scale.step)?, to)?;
                }
            }
            copied = contender.copied();
            contender.close()?;
            Ok(time)
        });
        rig.row(case, name, times, format!("{} copied", Bytes(copied)));
    }
}

fn contenders(rig: &Rig, scale: &Scale) -> Outcome<Vec<Box<dyn Contender>>> {
    let mut all = contender::all(&rig.device, &rig.stream, scale.most)?;
    if rig.is_cuda() {
        // Slower than the others there; the example `grow_race` shows it.
        all.remove(1);
    }
    Ok(all)
}

fn part(range: VaRange, offset: u64, len: u64) -> Outcome<VaRange> {
    range.sub(offset, len).ok_or_else(|| "no such part".into())
}

fn look_ahead(criterion: &mut Criterion, rig: &Rig, scale: &Scale) {
    let mut group = group(criterion, "look-ahead");
    let ahead = scale.most / 4;
    for kept in [true, false] {
        let what = if kept {
            "recycled memory"
        } else {
            "fresh memory"
        };
        let watermark = if kept { u64::MAX } else { 0 };
        let config = PoolConfig {
            watermark: Some(watermark),
            ..PoolConfig::with_budget(scale.most)
        };
        let pool = must(Pool::new(&rig.device, config).map_err(Into::into));
        if kept {
            let first = must(Arena::new(&pool, scale.most).map_err(Into::into));
            must(grow_in_steps(&first, scale));
        }
        let mut steps = Vec::new();
        measure(&mut group, what, || {
            rest(rig);
            paced_steps(rig, scale, &pool, ahead, &mut steps)
        });
        steps.sort();
        let p99 = percentile(&steps, 0.99);
        let note = format!(
            "{}; of that the clock {}",
            goal(rig, "p99 under 1 us", p99 < Duration::from_micros(1)),
            show(clock())
        );
        let case = format!("one step of {}, paced by device writes", Bytes(scale.step));
        let name = format!("granule, {} ahead, {what}", Bytes(ahead));
        rig.row(&case, &name, steps, note);
    }
    group.finish();
}

/// Grows an arena that is mapped ahead, step by step, each written by the device; the time of the
/// growing calls.
fn paced_steps(
    rig: &Rig,
    scale: &Scale,
    pool: &Pool,
    ahead: u64,
    steps: &mut Vec<Duration>,
) -> Outcome<Duration> {
    let config = ArenaConfig::new(scale.most).look_ahead(ahead);
    let arena = Arena::with_config(pool, &config)?;
    arena.record_use(&rig.stream)?;
    let patience = Instant::now();
    while arena.mapped() < ahead {
        ensure!(
            patience.elapsed() < Duration::from_secs(5),
            "nothing was mapped ahead"
        );
        std::thread::yield_now();
    }
    let mut total = Duration::ZERO;
    for to in scale.steps() {
        let started = Instant::now();
        arena.grow(to)?;
        let time = started.elapsed();
        total += time;
        steps.push(time);
        // The device's writing sets the pace.
        rig.write(part(arena.range(), to - scale.step, scale.step)?, to)?;
        rig.stream.synchronize()?;
    }
    for to in [scale.step, scale.most] {
        rig.check(part(arena.range(), to - scale.step, scale.step)?, to)?;
    }
    ensure!(arena.mapped() == scale.most, "mapped {}", arena.mapped());
    arena.close().map_err(|(_, error)| error)?;
    Ok(total)
}

/// What timing nothing gives: two readings of the clock.
fn clock() -> Duration {
    let times: Vec<Duration> = (0..1001).map(|_| Instant::now().elapsed()).collect();
    median(&times)
}

/// The goals are for a GPU; other drivers are only named.
fn goal(rig: &Rig, what: &str, met: bool) -> String {
    match (rig.is_cuda(), met) {
        (true, true) => format!("goal {what}: met"),
        (true, false) => format!("goal {what}: missed"),
        (false, _) => format!("goal on a GPU: {what}"),
    }
}

fn dynamic_pool(device: &Device, budget: u64) -> Outcome<Pool> {
    let config = PoolConfig::with_budget(budget).policy(Policy::Dynamic);
    Ok(Pool::new(device, config)?)
}

/// The first memory of arenas, none of it ever released before, so that there is nothing to scrub: to
/// be measured before anything else, call after call.
fn untouched(rig: &Rig, scale: &Scale) {
    // Kept to the end, or one size would get the memory of another.
    let mut kept = Vec::new();
    for &size in scale.cold {
        let count = (4 * scale.most / size).clamp(2, 16);
        let recorded = Arc::new(RecordDriver::new(rig.device.driver().clone()));
        let device = Device::from_driver(recorded.clone());
        let pool = must(dynamic_pool(&device, count * size));
        let mut times = Vec::new();
        for _ in 0..count {
            let arena = must(Arena::new(&pool, size).map_err(Into::into));
            let started = Instant::now();
            must(arena.grow(size).map_err(Into::into));
            times.push(started.elapsed());
            kept.push(arena);
        }
        let counts = recorded.snapshot();
        let mean = |call| {
            let nanos = counts.of(call).nanos / count;
            format!("{call} {}", show(Duration::from_nanos(nanos)))
        };
        let calls = [Call::Create, Call::Map, Call::SetAccess].map(mean);
        let case = format!("cold {}, memory never used", Bytes(size));
        let note = format!("means: {}", calls.join(", "));
        rig.row(&case, "granule, dynamic pool", times, note);
    }
    let pool = must(dynamic_pool(&rig.device, 4 * scale.most));
    let mut times = Vec::new();
    for _ in 0..4 {
        let arena = must(Arena::new(&pool, scale.most).map_err(Into::into));
        times.push(must(grow_in_steps(&arena, scale)));
        kept.push(arena);
    }
    let case = scale.growth();
    let note = format!("{} mapped", Bytes(scale.most));
    rig.row(&case, "granule, memory never used", times, note);
    for arena in &kept {
        must(touch_end(rig, arena.range()));
    }
}

/// The first memory of an arena, with nothing idle in its pool, and giving it back.
fn cold(rig: &Rig, scale: &Scale) {
    for &size in scale.cold {
        let mut closing = Vec::new();
        let opening = at_rest(rig, || {
            let pool = dynamic_pool(&rig.device, size)?;
            let arena = Arena::new(&pool, size)?;
            let started = Instant::now();
            arena.grow(size)?;
            let time = started.elapsed();
            ensure!(arena.mapped() == size, "mapped {}", arena.mapped());
            touch_end(rig, arena.range())?;
            let started = Instant::now();
            arena.close().map_err(|(_, error)| error)?;
            closing.push(started.elapsed());
            ensure!(pool.stats().created == 0, "memory was kept");
            Ok(time)
        });
        cold_rows(rig, size, "granule, dynamic pool", opening, closing);
        let driver = rig.device.driver().clone();
        cold_rival(rig, size, "bare calls, one granule", &Fresh(driver));
        if rig.is_cuda() {
            cold_rival(rig, size, "cuMemAlloc", &Plain(rig.device.clone()));
            cold_rival(rig, size, "cuMemAllocAsync", &Ordered(rig.device.clone()));
        }
    }
}

fn cold_rival<S: Source>(rig: &Rig, size: u64, name: &str, source: &S) {
    let mut closing = Vec::new();
    let opening = at_rest(rig, || {
        let started = Instant::now();
        let (block, range) = source.alloc(size, &rig.stream)?;
        let time = started.elapsed();
        touch_end(rig, range)?;
        let started = Instant::now();
        source.free(block, range, &rig.stream)?;
        // An asynchronous free gives the memory back at the next wait.
        rig.stream.synchronize()?;
        closing.push(started.elapsed());
        Ok(time)
    });
    cold_rows(rig, size, name, opening, closing);
}

fn cold_rows(rig: &Rig, size: u64, name: &str, opening: Vec<Duration>, closing: Vec<Duration>) {
    let none = String::new();
    rig.row(
        &format!("cold {}", Bytes(size)),
        name,
        opening,
        none.clone(),
    );
    rig.row(&format!("return {}", Bytes(size)), name, closing, none);
}

/// Writes and checks the last 2 MiB, which proves that the memory reaches to its end.
fn touch_end(rig: &Rig, range: VaRange) -> Outcome {
    let tail = part(range, range.len() - 2 * MIB, 2 * MIB)?;
    rig.write(tail, 7)?;
    rig.check(tail, 7)
}

fn shrink(criterion: &mut Criterion, rig: &Rig, scale: &Scale) {
    let mut group = group(criterion, "shrink");
    let pool = must(keeping_pool(&rig.device, scale.most));
    let mut arena = must(Arena::new(&pool, scale.most).map_err(Into::into));
    let half = scale.most / 2;
    let times = measure(&mut group, "half", || {
        for to in scale.steps() {
            arena.grow(to)?;
        }
        rig.write(part(arena.range(), 0, scale.step)?, 3)?;
        rig.stream.synchronize()?;
        let before = arena.mapped();
        let started = Instant::now();
        arena.shrink(half)?;
        let time = started.elapsed();
        ensure!(
            arena.mapped() == half && pool.stats().idle == before - half,
            "{} mapped, {} idle",
            arena.mapped(),
            pool.stats().idle
        );
        rig.check(part(arena.range(), 0, scale.step)?, 3)?;
        Ok(time)
    });
    let case = format!("shrink {} to {}", Bytes(scale.most), Bytes(half));
    let note = "kept idle in the pool".to_owned();
    rig.row(&case, "granule", times, note);
    group.finish();
}

fn hand_over(criterion: &mut Criterion, rig: &Rig, scale: &Scale) {
    let mut group = group(criterion, "hand-over");
    let size = scale.most / 4;
    let case = format!("one gives {} back, another gets it", Bytes(size));
    let pool = must(keeping_pool(&rig.device, size));
    let config = ArenaConfig::new(size);
    let new = || must(Arena::with_config(&pool, &config).map_err(Into::into));
    let (mut giver, mut taker) = (new(), new());
    must(taker.grow(size).map_err(Into::into));
    let times = measure(&mut group, "granule", || {
        std::mem::swap(&mut giver, &mut taker);
        let before = pool.stats();
        let started = Instant::now();
        giver.shrink(0)?;
        taker.grow(size)?;
        let time = started.elapsed();
        let after = pool.stats();
        ensure!(after.creates == before.creates, "memory was created");
        ensure!(after.mapped == size, "mapped {}", after.mapped);
        touch_end(rig, taker.range())?;
        Ok(time)
    });
    rig.row(&case, "granule", times, "no driver create".to_owned());
    drop((giver, taker));
    if rig.is_cuda() {
        let plain = Plain(rig.device.clone());
        hand_over_rival(
            &mut group,
            rig,
            size,
            &case,
            "cuMemFree, cuMemAlloc",
            &plain,
        );
        let ordered = Ordered(rig.device.clone());
        let name = "cuMemFreeAsync, cuMemAllocAsync";
        hand_over_rival(&mut group, rig, size, &case, name, &ordered);
    }
    group.finish();
}

fn hand_over_rival<S: Source>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    rig: &Rig,
    size: u64,
    case: &str,
    name: &str,
    source: &S,
) {
    let mut held = must(source.alloc(size, &rig.stream).map_err(Into::into));
    let times = measure(group, name, || {
        let started = Instant::now();
        source.free(held.0, held.1, &rig.stream)?;
        held = source.alloc(size, &rig.stream)?;
        let time = started.elapsed();
        touch_end(rig, held.1)?;
        Ok(time)
    });
    must(source.free(held.0, held.1, &rig.stream).map_err(Into::into));
    must(rig.stream.synchronize().map_err(Into::into));
    rig.row(case, name, times, String::new());
}
