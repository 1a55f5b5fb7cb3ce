//! Serving simulated at scale: several devices with a million live blocks each, for a day.
//!
//! Sequences come, grow block by block and go, more of them at noon than at night. Each device is a
//! simulated one with a thread of its own, so that what takes time and memory here is the heap's books.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use granule::driver::DriverKind;
use granule::units::{Bytes, GIB, KIB};
use granule::{Block, Heap, Pool, Stream, StreamHeap};

use crate::args::Args;
use crate::core::{Outcome, Rig};
use crate::json::Object;
use crate::report::emit;

/// Memory of a device: 192 GB.
const MEMORY: u64 = 192_000_000_000;
/// Blocks of a sequence on average.
const SEQUENCE: u64 = 64;
/// Sequences that grow at once.
const GROWING: usize = 64;
/// Allocations in ten minutes for each block that is live at noon, in 1/1000: a sequence is there for
/// most of an hour.
const TURNOVER: u64 = 200;

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n.max(1)
    }
}

#[derive(Default)]
struct Sequence {
    blocks: Vec<Block>,
    target: usize,
}

/// One device under load.
struct Device {
    rig: Rig,
    pool: Pool,
    heap: Heap,
    on: StreamHeap,
    _stream: Stream,
    random: Random,
    /// Sequences that get more blocks.
    growing: Vec<Sequence>,
    whole: Vec<Sequence>,
    live: u64,
    mean: u64,
    short: u64,
}

impl Device {
    fn new(args: &Args, number: u64) -> Outcome<Self> {
        let memory = args.memory.unwrap_or(MEMORY);
        let rig = Rig::open(DriverKind::Sim, Some(memory))?;
        let pool = Pool::new(&rig.device, args.setup.pool.clone())?;
        let heap = Heap::new(&pool, args.setup.heap.clone())?;
        let stream = rig.device.create_stream()?;
        Ok(Self {
            on: heap.on(&stream)?,
            _stream: stream,
            rig,
            pool,
            heap,
            random: Random(0x9E37_79B9_7F4A_7C15 ^ (number + 1)),
            growing: Vec::new(),
            whole: Vec::new(),
            live: 0,
            mean: (memory / 100 * 80 / args.scale.live.max(1)).clamp(512, GIB),
            short: 0,
        })
    }

    /// So many allocations, and the frees that keep about `target` blocks live.
    fn work(&mut self, ops: u64, target: u64) -> Outcome {
        for _ in 0..ops {
            while self.live > target && self.drop_one() {}
            if self.growing.len() < GROWING {
                self.open();
            }
            let at = self.random.below(self.growing.len() as u64) as usize;
            let size = self.mean / 4 + self.random.below(self.mean * 3 / 2);
            match self.on.alloc(size) {
                Ok(block) => {
                    let one = &mut self.growing[at];
                    one.blocks.push(block);
                    self.live += 1;
                    if one.blocks.len() >= one.target {
                        self.whole.push(self.growing.swap_remove(at));
                    }
                }
                Err(error) if error.is_out_of_memory() => {
                    self.short += 1;
                    self.drop_one();
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn open(&mut self) {
        let length = 1 + self.random.below(SEQUENCE) + self.random.below(SEQUENCE);
        let target = length as usize;
        self.growing.push(Sequence {
            blocks: Vec::with_capacity(target),
            target,
        });
    }

    /// Ends a sequence, any of those that are whole if there are some.
    fn drop_one(&mut self) -> bool {
        let from = match self.whole.is_empty() {
            true => &mut self.growing,
            false => &mut self.whole,
        };
        if from.is_empty() {
            return false;
        }
        let at = self.random.below(from.len() as u64) as usize;
        let gone = from.swap_remove(at);
        self.live -= gone.blocks.len() as u64;
        true
    }
}

/// Resident memory of this process.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok());
    pages.unwrap_or(0) * 4 * KIB
}

pub fn run(args: &Args) -> Outcome {
    let scale = &args.scale;
    println!(
        "{} simulated devices of {}, up to {} live blocks each\n",
        scale.devices,
        Bytes(args.memory.unwrap_or(MEMORY)),
        scale.live
    );
    growth(args)?;
    day(args)
}

/// One device with more and more live blocks.
fn growth(args: &Args) -> Outcome {
    println!(
        "| live blocks, one device | ns an allocation + free | host memory | bytes of it a block | reserved / live | driver ms |"
    );
    println!("|---|---|---|---|---|---|");
    let mut live = 1000.min(args.scale.live);
    // Kept until the end, so that none gets memory of another.
    let mut all = Vec::new();
    loop {
        let before = resident();
        let mut small = Device::new(args, live)?;
        // The same bytes whatever the count, so that the driver does the same.
        small.mean = (small.rig.device.info().total_memory / 100 * 80 / live).min(GIB);
        small.work(live, live)?;
        small.work(live.max(20_000), live)?;
        let ops = live.clamp(100_000, 1_000_000);
        let started = Instant::now();
        small.work(ops, live)?;
        let ns = started.elapsed().as_nanos() as f64 / ops as f64;
        let stats = small.heap.stats();
        let memory = resident().saturating_sub(before);
        let ratio = small.pool.stats().peak_created as f64 / stats.live_peak.max(1) as f64;
        let driver = small.driver_time().as_secs_f64() * 1e3;
        println!(
            "| {live} | {ns:.0} | {} | {:.0} | {ratio:.4} | {driver:.1} |",
            Bytes(memory),
            memory as f64 / live as f64
        );
        if args.json.is_some() {
            let line = Object::new()
                .text("what", "growth")
                .raw("live", live)
                .float("ns_per_pair", ns, 1)
                .raw("host_bytes", memory)
                .float("reserved_ratio", ratio, 5)
                .float("driver_us", driver * 1e3, 1);
            emit(args, &line.end())?;
        }
        all.push(small);
        if live >= args.scale.live {
            println!();
            return Ok(());
        }
        live = (live * 10).min(args.scale.live);
    }
}

impl Device {
    fn driver_time(&self) -> Duration {
        let sim = self.rig.device.driver().as_any();
        let sim = sim.downcast_ref::<granule::driver::sim::SimDriver>();
        sim.map_or(Duration::ZERO, |sim| sim.driver_time().into())
    }
}

/// All devices for a day.
fn day(args: &Args) -> Outcome {
    let scale = &args.scale;
    let before = resident();
    let devices: Vec<Mutex<Device>> = (0..u64::from(scale.devices))
        .map(|number| Ok(Mutex::new(Device::new(args, number)?)))
        .collect::<Outcome<_>>()?;
    let steps = scale.hours * 60 / scale.step_minutes.max(1);
    let ops = scale.live * TURNOVER * scale.step_minutes / 10 / 1000;
    println!(
        "| hour | allocations so far | live blocks | ns each | live | reserved / live peak | remaps | driver s in all | host memory |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let mut done = 0u64;
    for step in 0..=steps {
        let hour = step as f64 * scale.step_minutes as f64 / 60.0;
        // Least at night, most at noon.
        let load = 0.7 - 0.3 * (hour / 24.0 * std::f64::consts::TAU).cos();
        let target = (scale.live as f64 * load) as u64;
        // The first step fills the devices.
        let ops = if step == 0 { target } else { ops };
        let started = Instant::now();
        let threads = std::thread::available_parallelism()?.get();
        let next = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads.min(devices.len()))
                .map(|_| {
                    scope.spawn(|| -> Result<Duration, String> {
                        let mut busy = Duration::ZERO;
                        loop {
                            let at = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                            let Some(device) = devices.get(at) else {
                                return Ok(busy);
                            };
                            let started = Instant::now();
                            let mut device = device.lock().map_err(|e| e.to_string())?;
                            device.work(ops, target).map_err(|e| e.to_string())?;
                            busy += started.elapsed();
                        }
                    })
                })
                .collect();
            let mut busy = Duration::ZERO;
            for worker in workers {
                busy += worker.join().map_err(|_| "a thread panicked")??;
            }
            done += ops * u64::from(scale.devices);
            if step % (steps / 12).max(1) == 0 {
                let each = busy.as_nanos() as f64 / (ops * u64::from(scale.devices)).max(1) as f64;
                row(args, &devices, hour, done, each, before)?;
            }
            Outcome::Ok(())
        })?;
        eprintln!("hour {hour:.1}: {:.1} s", started.elapsed().as_secs_f64());
    }
    let short: u64 = devices.iter().flat_map(|d| d.lock()).map(|d| d.short).sum();
    for device in &devices {
        device.lock().map_err(|e| e.to_string())?.heap.audit()?;
    }
    println!("\nout of memory: {short} times");
    Ok(())
}

fn row(
    args: &Args,
    devices: &[Mutex<Device>],
    hour: f64,
    done: u64,
    each: f64,
    before: u64,
) -> Outcome {
    let (mut blocks, mut live, mut remaps, mut worst, mut driver) =
        (0, 0, 0, 0.0f64, Duration::ZERO);
    for device in devices {
        let device = device.lock().map_err(|e| e.to_string())?;
        let stats = device.heap.stats();
        blocks += stats.blocks;
        live += stats.live;
        remaps += stats.remaps;
        let ratio = device.pool.stats().peak_created as f64 / stats.live_peak.max(1) as f64;
        worst = worst.max(ratio);
        driver += device.driver_time();
    }
    let memory = resident().saturating_sub(before);
    println!(
        "| {hour:.1} | {done} | {blocks} | {each:.0} | {} | {worst:.4} | {remaps} | {:.3} | {} |",
        Bytes(live),
        driver.as_secs_f64(),
        Bytes(memory)
    );
    if args.json.is_some() {
        let line = Object::new()
            .text("what", "day")
            .float("hour", hour, 2)
            .raw("allocations", done)
            .raw("blocks", blocks)
            .float("ns_per_alloc", each, 1)
            .raw("live", live)
            .float("reserved_ratio", worst, 5)
            .raw("remaps", remaps)
            .float("driver_us", driver.as_secs_f64() * 1e6, 1)
            .raw("host_bytes", memory);
        emit(args, &line.end())?;
    }
    Ok(())
}
