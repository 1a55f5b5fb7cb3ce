//! The heap's hot path, churn, threads and recorded traces, beside the driver's own allocators.
//!
//! `cargo bench --bench heap` measures; `-- --test` only checks, quickly; `-- --traces DIR` also
//! replays every trace in a directory, in the formats of [`granule::trace`]. `GRANULE_DRIVER` chooses the
//! driver.

use std::hint::black_box;
use std::path::PathBuf;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use granule::driver::DriverKind;
use granule::driver::cuda::CudaDriver;
use granule::trace::ReadOptions;
use granule::units::{Bytes, GIB, KIB, MIB};
use granule::{
    Block, Device, Error, Heap, HeapConfig, History, HistoryConfig, Pool, PoolConfig, StreamHeap,
};

#[path = "../examples/support/replay.rs"]
mod replay;

use replay::{Outcome, Rig, Setup, Unwatched};

struct Settings {
    quick: bool,
    traces: Option<PathBuf>,
}

fn main() -> Outcome {
    let mut settings = Settings {
        quick: false,
        traces: None,
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--test" => settings.quick = true,
            "--traces" => settings.traces = args.next().map(PathBuf::from),
            _ => {}
        }
    }
    let device = Device::auto()?;
    println!("heap on {device:?}\n");
    println!("| case | ns per alloc + free |\n|---|---|");
    hot(&device, &settings)?;
    churns(&device, &settings)?;
    threads(&device, &settings)?;
    rivals(&device, &settings)?;
    cold(&device, &settings)?;
    traces(&device, &settings)
}

/// Best of several runs, in nanoseconds an iteration: what the machine can do when left alone.
fn best(settings: &Settings, n: u32, mut run: impl FnMut(u32) -> Outcome) -> Outcome<f64> {
    let (n, runs) = if settings.quick {
        (n / 100 + 1, 1)
    } else {
        (n, 7)
    };
    let mut best = Duration::MAX;
    for _ in 0..runs {
        let started = Instant::now();
        run(n)?;
        best = best.min(started.elapsed());
    }
    Ok(best.as_nanos() as f64 / f64::from(n))
}

fn heap_on(device: &Device) -> Outcome<Heap> {
    let pool = Pool::new(device, PoolConfig::default())?;
    Ok(Heap::new(&pool, HeapConfig::default())?)
}

fn hot(device: &Device, settings: &Settings) -> Outcome {
    let heap = heap_on(device)?;
    let stream = device.create_stream()?;
    let on = heap.on(&stream)?;
    for size in [512, 64 * KIB, MIB, 64 * MIB] {
        drop(on.alloc(size)?);
        let ns = best(settings, 200_000, |n| {
            for _ in 0..n {
                black_box(on.alloc(black_box(size))?.ptr());
            }
            Ok(())
        })?;
        println!("| hot, {} | {ns:.1} |", Bytes(size));
    }
    let ns = best(settings, 200_000, |n| {
        for _ in 0..n {
            black_box(heap.alloc(black_box(512), &stream)?.ptr());
        }
        Ok(())
    })?;
    println!("| hot, 512 B, stream looked up | {ns:.1} |");
    let ns = best(settings, 200_000, |n| {
        for _ in 0..n {
            heap.free_raw(on.alloc_raw(black_box(512), 256)?)?;
        }
        Ok(())
    })?;
    println!("| hot, 512 B, by address | {ns:.1} |");
    assert!(heap.stats().misses < 10, "{:?}", heap.stats());
    heap.set_history(Some(&History::new(HistoryConfig::default())));
    let ns = best(settings, 200_000, |n| {
        for _ in 0..n {
            black_box(on.alloc(black_box(512))?.ptr());
        }
        Ok(())
    })?;
    println!("| hot, 512 B, with a history | {ns:.1} |");
    Ok(())
}

struct Random(u64);

impl Default for Random {
    fn default() -> Self {
        Self(0x9E37_79B9_7F4A_7C15)
    }
}

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A size of `low` to `high - 1` bits.
    fn size(&mut self, low: u64, high: u64) -> u64 {
        1 << (low + self.next() % (high - low))
    }
}

fn churns(device: &Device, settings: &Settings) -> Outcome {
    let large = if settings.quick { 1_000 } else { 10_000 };
    let mix = Mix {
        what: "512 B to 16 MiB",
        live: large,
        bits: (9, 25),
    };
    churn(device, settings, &mix, "", any)?;
    let lives: &[usize] = match settings.quick {
        true => &[10_000],
        false => &[1_000, 10_000, 100_000, 1_000_000],
    };
    for &live in lives {
        bare_loop(settings, live)?;
        hot_beside_loop(device, settings, live)?;
        let mix = Mix {
            what: "256 B to 64 KiB",
            live,
            bits: (8, 17),
        };
        churn(device, settings, &mix, "", any)?;
        // The misses come together.
        let (mut at, mut picked) = (0, [0; 16]);
        let sixteen = |random: &mut Random, blocks: &[Option<Block>]| {
            at = (at + 1) % picked.len();
            if at == 0 {
                picked = std::array::from_fn(|_| any(random, blocks));
                black_box(picked.map(|at| blocks[at].as_ref().map(Block::ptr)));
            }
            picked[at]
        };
        let how = ", sixteen picked at once";
        churn(device, settings, &mix, how, sixteen)?;
        // The processor has the handle at hand, and what is left is the allocator's.
        let mut turn = 0;
        let next = |_: &mut Random, blocks: &[Option<Block>]| {
            turn = if turn + 1 == blocks.len() {
                0
            } else {
                turn + 1
            };
            turn
        };
        let how = ", in the list's order";
        churn(device, settings, &mix, how, next)?;
    }
    Ok(())
}

/// Any block: with many, the caller's own handle is a cache miss each time, in every allocator's figure.
fn any(random: &mut Random, blocks: &[Option<Block>]) -> usize {
    (random.next() % blocks.len() as u64) as usize
}

/// What a block is to its owner's loop: as long, and at as round addresses.
#[derive(Clone, Copy)]
#[repr(align(32))]
struct Handle([u64; size_of::<Block>() / 8]);

/// What the loop around an allocator costs: the same picks from a list of blocks, without one.
fn bare_loop(settings: &Settings, live: usize) -> Outcome {
    let mut random = Random::default();
    let mut blocks = vec![Handle([1; size_of::<Block>() / 8]); live];
    let ns = best(settings, 200_000, |n| {
        let mut sum = 0;
        for _ in 0..n {
            let at = (random.next() % live as u64) as usize;
            let len = random.size(8, 17);
            // An allocator reads of the old one what it has to know, and the new one does not depend on it.
            sum ^= blocks[at].0[0] ^ blocks[at].0[1];
            blocks[at] = black_box(Handle([len; size_of::<Block>() / 8]));
        }
        black_box(sum);
        Ok(())
    })?;
    println!("| the loop of the next row, {live} live, without an allocator | {ns:.1} |");
    Ok(())
}

fn stock(
    on: &StreamHeap,
    live: usize,
    mut size: impl FnMut() -> u64,
) -> Outcome<Vec<Option<Block>>> {
    let mut blocks = Vec::with_capacity(live);
    for _ in 0..live {
        blocks.push(Some(on.alloc(size())?));
    }
    Ok(blocks)
}

/// The same picks, and an allocation and a free of memory that is at hand: what churn of so many would take if
/// the allocator did not know how many there are.
fn hot_beside_loop(device: &Device, settings: &Settings, live: usize) -> Outcome {
    let heap = heap_on(device)?;
    let stream = device.create_stream()?;
    let on = heap.on(&stream)?;
    let mut random = Random::default();
    let mut blocks = stock(&on, live, || 512)?;
    let ns = best(settings, 200_000, |n| {
        for _ in 0..n {
            let at = (random.next() % live as u64) as usize;
            let len = random.size(8, 17);
            let block = black_box(blocks[at].take());
            black_box(on.alloc(len)?.ptr());
            blocks[at] = block;
        }
        Ok(())
    })?;
    println!("| the loop of the next row, {live} live, and hot memory | {ns:.1} |");
    Ok(())
}

/// So many blocks, of lengths of so many bits at least and fewer than so many.
struct Mix {
    what: &'static str,
    live: usize,
    bits: (u64, u64),
}

/// Replaces one block after another, that `pick` chooses, by one of another size.
fn churn(
    device: &Device,
    settings: &Settings,
    mix: &Mix,
    how: &str,
    mut pick: impl FnMut(&mut Random, &[Option<Block>]) -> usize,
) -> Outcome {
    let (live, what, (low, high)) = (mix.live, mix.what, mix.bits);
    let heap = heap_on(device)?;
    let stream = device.create_stream()?;
    let on = heap.on(&stream)?;
    let mut random = Random::default();
    let mut blocks = stock(&on, live, || random.size(low, high))?;
    for at in 0..live {
        blocks.swap(at, (random.next() % live as u64) as usize);
    }
    let mut step = |n: u32, blocks: &mut [Option<Block>]| -> Outcome {
        for _ in 0..n {
            let at = pick(&mut random, blocks);
            let len = random.size(low, high);
            // Freed before the next is taken, as a framework does.
            blocks[at] = None;
            blocks[at] = Some(on.alloc(len)?);
        }
        Ok(())
    };
    step(
        if settings.quick {
            100
        } else {
            (live as u32).max(20_000)
        },
        &mut blocks,
    )?;
    let before = heap.stats();
    let ns = best(settings, 200_000, |n| step(n, &mut blocks))?;
    let after = heap.stats();
    println!(
        "| churn, {live} live, {what}{how} ({} misses) | {ns:.1} |",
        after.misses - before.misses
    );
    drop(blocks);
    let left = heap.audit()?;
    assert_eq!((left.blocks, left.live), (0, 0));
    Ok(())
}

fn threads(device: &Device, settings: &Settings) -> Outcome {
    let cores = std::thread::available_parallelism()?.get();
    for (what, shared) in [("a stream each", false), ("one stream", true)] {
        for count in [1, 2, 4, 8, 16].into_iter().filter(|c| *c <= cores) {
            let heap = heap_on(device)?;
            let one = device.create_stream()?;
            let n = if settings.quick { 1_000 } else { 200_000 };
            let barrier = Barrier::new(count);
            let worst = std::thread::scope(|scope| -> Outcome<Duration> {
                let workers: Vec<_> = (0..count)
                    .map(|_| {
                        let (heap, barrier, one) = (&heap, &barrier, &one);
                        scope.spawn(move || -> Result<Duration, Error> {
                            let own = match shared {
                                true => one.clone(),
                                false => one.device().create_stream()?,
                            };
                            let on = heap.on(&own)?;
                            drop(on.alloc(4 * KIB)?);
                            barrier.wait();
                            let started = Instant::now();
                            for _ in 0..n {
                                black_box(on.alloc(black_box(4 * KIB))?.ptr());
                            }
                            Ok(started.elapsed())
                        })
                    })
                    .collect();
                let mut worst = Duration::ZERO;
                for worker in workers {
                    worst = worst.max(worker.join().map_err(|_| "a thread panicked")??);
                }
                Ok(worst)
            })?;
            let ns = worst.as_nanos() as f64 / f64::from(n);
            println!("| hot, 4 KiB, {count} threads, {what} | {ns:.1} |");
        }
    }
    Ok(())
}

/// The driver's own allocators on the same device in the same run.
fn rivals(device: &Device, settings: &Settings) -> Outcome {
    let Some(cuda) = device.driver().as_any().downcast_ref::<CudaDriver>() else {
        return Ok(());
    };
    let stream = device.create_stream()?;
    for size in [512, MIB, 64 * MIB] {
        let ns = best(settings, 20_000, |n| {
            for _ in 0..n {
                let at = cuda.mem_alloc_async(size, stream.id())?;
                cuda.mem_free_async(at, stream.id())?;
            }
            Ok(())
        })?;
        println!("| cuMemAllocAsync, {} | {ns:.1} |", Bytes(size));
    }
    stream.synchronize()?;
    let ns = best(settings, 500, |n| {
        for _ in 0..n {
            let at = cuda.mem_alloc(64 * MIB)?;
            cuda.mem_free(at)?;
        }
        Ok(())
    })?;
    println!("| cuMemAlloc, 64 MiB | {ns:.1} |");
    Ok(())
}

fn cold(device: &Device, settings: &Settings) -> Outcome {
    println!("\n| first allocation of an empty heap | us, median |\n|---|---|");
    let sizes: &[u64] = match device.kind() {
        DriverKind::Host => &[64 * MIB],
        _ => &[256 * MIB, GIB, 4 * GIB],
    };
    for size in sizes {
        let mut times = Vec::new();
        for _ in 0..if settings.quick { 1 } else { 7 } {
            let pool = Pool::new(device, PoolConfig::default())?;
            let heap = Heap::new(&pool, HeapConfig::default())?;
            let stream = device.create_stream()?;
            let on = heap.on(&stream)?;
            let started = Instant::now();
            let block = on.alloc(*size)?;
            times.push(started.elapsed());
            drop(block);
        }
        times.sort();
        let median = times[times.len() / 2].as_nanos() as f64 / 1e3;
        println!("| {} | {median:.1} |", Bytes(*size));
    }
    Ok(())
}

fn traces(device: &Device, settings: &Settings) -> Outcome {
    let mut paths = vec![PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/data/segmentation_head.csv.gz"
    ))];
    if let Some(dir) = &settings.traces {
        paths.clear();
        for entry in std::fs::read_dir(dir)? {
            paths.push(entry?.path());
        }
        paths.sort();
    } else if !paths[0].exists() {
        println!("\nno traces: give a directory with --traces");
        return Ok(());
    }
    let modelled = device.kind() == DriverKind::Sim;
    println!(
        "\n| trace | peak | reserved / peak | least budget / peak | creates + remaps | host waits | driver ms ({}) | ns an event |\n|---|---|---|---|---|---|---|---|",
        if modelled { "modelled" } else { "measured" }
    );
    let rig = Rig::over(device.driver().clone());
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        for trace in replay::open(&path, &ReadOptions::default())? {
            let there = device.memory_info()?.free;
            if there / 10 < trace.peak / 9 {
                let (need, there) = (Bytes(trace.peak), Bytes(there));
                println!("| {name}: skipped, it needs {need} and {there} are free |");
                continue;
            }
            let setup = Setup::default();
            let free = replay::run(&rig, &trace, &setup, None, &mut Unwatched)?;
            if let Some(oom) = &free.oom {
                return Err(format!("{name}: out of memory with no limit: {}", oom.error).into());
            }
            let ratio = |bytes: u64| bytes as f64 / trace.peak as f64;
            let (least, _) = replay::least_budget(&rig, &trace, &setup, &free, |_, _| {})?;
            println!(
                "| {name} | {} | {:.3} | {:.3} | {} + {} in {} misses | {} | {:.1} | {:.0} |",
                Bytes(trace.peak),
                ratio(free.reserved),
                ratio(least),
                free.stats.creates,
                free.stats.remaps,
                free.stats.misses,
                free.stats.host_waits,
                free.driver.as_nanos() as f64 / 1e6,
                free.ns_per_event(),
            );
            assert!(ratio(free.reserved) < 1.10, "{name}");
        }
    }
    Ok(())
}
