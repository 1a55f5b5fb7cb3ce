//! What a kernel that is bound by memory bandwidth loses while passes run without pause beside it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use granule::defrag::{Bound, Goal, MovableBlock, Strategy};
use granule::driver::Kernel;
use granule::units::{Bytes, GIB, MIB, VaRange};
use granule::{Arena, Pool, PoolConfig};
use serde_json::{Value, json};

use crate::output::median;
use crate::scene::{self, Layout, Scene};
use crate::support::{Outcome, progress};
use crate::{Stage, micros};

/// The kernel beside one kind of passes.
pub struct Slow {
    pub name: String,
    pub is_remap: bool,
    /// Median time of a kernel.
    pub kernel: Duration,
    /// And of one with nothing beside it, between.
    pub quiet: Duration,
    pub percent: f64,
    /// A second.
    pub passes: f64,
    pub remaps: f64,
    pub bytes: f64,
}

impl Slow {
    pub fn json(&self) -> Value {
        json!({
            "beside": self.name, "kernel_us": micros(self.kernel), "quiet_us": micros(self.quiet),
            "slower_percent": self.percent, "passes_per_s": self.passes,
            "remapped_per_s": self.remaps, "bytes_per_s": self.bytes,
        })
    }
}

struct Kind {
    strategy: Strategy,
    piece: u64,
}

/// A phase of kernels, with or without passes.
struct Phase {
    rounds: u32,
    /// Kernels between two looks at the clock.
    batch: u32,
    length: Duration,
}

pub fn measure(stage: &mut Stage) -> Outcome<Vec<Slow>> {
    let (read, phase, sizes): (u64, Phase, Vec<u64>) = match stage.is_cuda() {
        true => (
            4 * GIB,
            Phase {
                rounds: if stage.quick { 3 } else { 7 },
                batch: 16,
                length: Duration::from_millis(200),
            },
            vec![256 * MIB, GIB, 4 * GIB],
        ),
        false => (
            8 * MIB,
            Phase {
                rounds: 2,
                batch: 2,
                length: Duration::from_millis(50),
            },
            vec![2 * MIB],
        ),
    };
    let mut kinds: Vec<Kind> = Vec::new();
    for piece in sizes {
        for strategy in [Strategy::Remap, Strategy::Evacuate, Strategy::Hybrid] {
            kinds.push(Kind { strategy, piece });
        }
    }
    let own = Pool::new(&stage.device, PoolConfig::with_budget(read))?;
    let buffer = Arena::new(&own, read)?;
    buffer.grow(read)?;
    let kernels = stage.device.create_stream()?;
    let bar = progress("kernel beside passes", kinds.len() as u64);
    let mut all = Vec::new();
    for kind in kinds {
        all.push(beside(stage, &kind, &phase, buffer.range(), &kernels)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    kernels.synchronize()?;
    Ok(all)
}

fn beside(
    stage: &mut Stage,
    kind: &Kind,
    phase: &Phase,
    buffer: VaRange,
    kernels: &granule::Stream,
) -> Outcome<Slow> {
    let layout = Layout::halved(kind.piece, if stage.is_cuda() { 16 } else { 8 });
    let pool = scene::pool(&stage.device, layout.bytes(), layout.granule)?;
    let passes_on = stage.device.create_stream()?;
    let scene = Scene::build(&pool, &passes_on, &layout, &stage.table, &stage.checker)?;
    let Scene {
        heap, blocks, want, ..
    } = scene;
    let mut blocks: Vec<MovableBlock> = blocks.into_iter().map(|b| b.0).collect();
    // Not the checker's counter, which has to stay zero.
    let sinks = scene::Checker::new(kernels)?;
    let sink = sinks.sink();
    let driver = stage.device.driver().clone();
    let run_kernels = |samples: &mut Vec<Duration>| -> Outcome {
        let start = Instant::now();
        while start.elapsed() < phase.length {
            let first = Instant::now();
            for _ in 0..phase.batch {
                let kernel = Kernel::ReadSum {
                    range: buffer,
                    passes: 1,
                    sink,
                };
                driver.launch(kernel, kernels.id())?;
            }
            kernels.synchronize()?;
            samples.push(first.elapsed() / phase.batch);
        }
        Ok(())
    };
    let (mut quiet, mut loaded) = (Vec::new(), Vec::new());
    let passes = AtomicU64::new(0);
    let mut busy = Duration::ZERO;
    let before = heap.stats();
    run_kernels(&mut Vec::new())?;
    for _ in 0..phase.rounds {
        run_kernels(&mut quiet)?;
        let stop = AtomicBool::new(false);
        let started = Instant::now();
        let outcome = std::thread::scope(|scope| {
            let worker = scope.spawn(|| -> Result<(), String> {
                let mut pass = || -> Outcome {
                    heap.defragment(
                        &passes_on,
                        kind.strategy,
                        Goal::Contiguous(want),
                        Bound::NONE,
                    )?;
                    passes.fetch_add(1, Ordering::Relaxed);
                    if kind.strategy != Strategy::Remap {
                        // Copies are waited for: without that they would only pile up in the queue.
                        passes_on.synchronize()?;
                    }
                    scene::fragment_again(&heap, &passes_on, layout.piece, &mut blocks)
                };
                while !stop.load(Ordering::Relaxed) {
                    pass().map_err(|error| error.to_string())?;
                }
                Ok(())
            });
            let kernels = run_kernels(&mut loaded).map_err(|error| error.to_string());
            stop.store(true, Ordering::Relaxed);
            let worker = worker.join().map_err(|_| "the passes panicked".to_owned());
            kernels.and(worker.and_then(|inner| inner))
        });
        outcome?;
        busy += started.elapsed();
        passes_on.synchronize()?;
    }
    let after = heap.stats();
    let rate = |n: u64| n as f64 / busy.as_secs_f64().max(1e-9);
    let (kernel, still) = (median(&mut loaded), median(&mut quiet));
    // Someone who looks at the blocks still finds them apart and whole.
    heap.audit()?;
    drop(blocks);
    Ok(Slow {
        name: format!("{}, pieces of {}", kind.strategy, Bytes(kind.piece)),
        is_remap: kind.strategy == Strategy::Remap,
        kernel,
        quiet: still,
        percent: (kernel.as_secs_f64() / still.as_secs_f64().max(1e-12) - 1.0) * 100.0,
        passes: rate(passes.load(Ordering::Relaxed)),
        remaps: rate(after.remapped - before.remapped),
        bytes: rate(passes.load(Ordering::Relaxed)) * want as f64,
    })
}
