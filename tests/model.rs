//! Threads over the simulated device, model-checked: shuttle runs them one at a time and picks the
//! next one at every lock, at random and by priorities (PCT), thousands of times. A failure prints a
//! schedule that replays it.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test --test model`; nothing is here otherwise.
#![cfg(shuttle)]
#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use granule::driver::sim::{SimConfig, SimDriver};
use granule::driver::{Kernel, SharedDriver};
use granule::units::MIB;
use granule::{Arena, Block, Device, Heap, HeapConfig, OomAnswer, Pool, PoolConfig, Stream};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, Runner, thread};

const SCHEDULES: usize = 2_000;

fn explore(program: fn()) {
    let mut config = Config::new();
    // Without optimization, frames are larger than it expects.
    config.stack_size = 1 << 18;
    Runner::new(RandomScheduler::new(SCHEDULES), config.clone()).run(program);
    Runner::new(PctScheduler::new(3, SCHEDULES), config).run(program);
}

/// A device that notices memory unmapped under queued work, and races.
struct Bench {
    driver: Arc<SimDriver>,
    device: Device,
    pool: Pool,
}

impl Bench {
    fn new(budget: u64) -> Self {
        let config = SimConfig {
            races: true,
            ..SimConfig::default()
        };
        let driver = Arc::new(SimDriver::new(config).unwrap());
        let shared: SharedDriver = driver.clone();
        let device = Device::from_driver(shared);
        let config = PoolConfig {
            wait: Duration::ZERO,
            ..PoolConfig::with_budget(budget)
        };
        let pool = Pool::new(&device, config).unwrap();
        Self {
            driver,
            device,
            pool,
        }
    }

    fn heap(&self) -> Heap {
        let config = HeapConfig {
            granule_max: 4 * MIB,
            granule_min: 2 * MIB,
            wait: Duration::ZERO,
            ..HeapConfig::default()
        };
        Heap::new(&self.pool, config).unwrap()
    }

    /// All is given back, nothing was touched that should not be, and the books say so.
    fn end(self) {
        self.pool.audit().unwrap();
        self.pool.trim(0).unwrap();
        let Self {
            driver,
            device,
            pool,
        } = self;
        drop(pool);
        assert!(!driver.is_lost());
        assert!(driver.races().is_empty(), "{:?}", driver.races());
        assert_eq!(device.quarantined(), 0);
        drop(device);
        let left = driver.live();
        assert_eq!((left.granules, left.mappings, left.reservations), (0, 0, 0));
    }
}

/// Work on a block that ends some time later.
fn use_block(block: &Block, stream: &Stream) {
    let range = block.range();
    let kernel = Kernel::WritePattern { range, seed: 1 };
    stream
        .device()
        .driver()
        .launch(kernel, stream.id())
        .unwrap();
}

/// Allocates and frees; running out is allowed, since the budget is tight.
fn churn(heap: &Heap, stream: &Stream, sizes: &[u64]) {
    let mut kept = None;
    for &size in sizes {
        match heap.alloc(size, stream) {
            Ok(block) => {
                use_block(&block, stream);
                kept = Some(block);
            }
            Err(error) => {
                assert!(error.is_out_of_memory(), "{error}");
                kept = None;
            }
        }
    }
    drop(kept);
}

#[test]
fn threads_of_one_stream_share_a_lane() {
    explore(|| {
        let bench = Bench::new(16 * MIB);
        let heap = bench.heap();
        let stream = bench.device.create_stream().unwrap();
        let threads: Vec<_> = [[4 * MIB, 6 * MIB, 512], [6 * MIB, 2 * MIB, 8 * MIB]]
            .into_iter()
            .map(|sizes| {
                let (heap, stream) = (heap.clone(), stream.clone());
                thread::spawn(move || churn(&heap, &stream, &sizes))
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        heap.audit().unwrap();
        drop((heap, stream));
        bench.end();
    });
}

/// Threads hand small blocks on without the lock, and to each other, while one takes all that is kept.
#[test]
fn small_blocks_are_had_by_one_while_others_look_at_all() {
    explore(|| {
        let bench = Bench::new(16 * MIB);
        let heap = bench.heap();
        let stream = bench.device.create_stream().unwrap();
        let had: Arc<Mutex<HashSet<u64>>> = Arc::default();
        let passed: Arc<Mutex<Vec<Block>>> = Arc::default();
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (heap, stream) = (heap.clone(), stream.clone());
                let (had, passed) = (had.clone(), passed.clone());
                thread::spawn(move || {
                    for size in [512, 512, 1024, 512] {
                        let block = heap.alloc(size, &stream).unwrap();
                        assert!(had.lock().unwrap().insert(block.ptr().get()));
                        // Frees what the other passed on, if anything, half of the time its own.
                        let other = {
                            let mut passed = passed.lock().unwrap();
                            passed.push(block);
                            passed.swap_remove(0)
                        };
                        assert!(had.lock().unwrap().remove(&other.ptr().get()));
                        drop(other);
                    }
                })
            })
            .collect();
        for _ in 0..4 {
            heap.trim();
            assert!(heap.stats().blocks <= 4);
        }
        threads.into_iter().for_each(|t| t.join().unwrap());
        let left = heap.audit().unwrap();
        assert_eq!((left.blocks, left.live), (0, 0));
        assert!(had.lock().unwrap().is_empty());
        drop((heap, stream, passed));
        bench.end();
    });
}

/// One granule's addresses for small blocks: whoever comes second has to find what the first one brought.
#[test]
fn threads_that_need_little_at_once_share_a_granule() {
    explore(|| {
        let bench = Bench::new(16 * MIB);
        let config = HeapConfig {
            addresses: Some(16 * MIB),
            wait: Duration::ZERO,
            ..HeapConfig::default()
        };
        let heap = Heap::new(&bench.pool, config).unwrap();
        let stream = bench.device.create_stream().unwrap();
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (heap, stream) = (heap.clone(), stream.clone());
                thread::spawn(move || heap.alloc(4096, &stream).unwrap())
            })
            .collect();
        let blocks: Vec<Block> = threads.into_iter().map(|t| t.join().unwrap()).collect();
        assert_eq!(heap.stats().held, 2 * MIB);
        drop(blocks);
        heap.audit().unwrap();
        drop((heap, stream));
        bench.end();
    });
}

/// Blocks of every way to be freed go on two threads, while a third lets go of the heap.
#[test]
fn the_last_of_a_heap_and_its_blocks_lets_all_go() {
    explore(|| {
        let bench = Bench::new(16 * MIB);
        let heap = bench.heap();
        let stream = bench.device.create_stream().unwrap();
        let threads: Vec<_> = [[512, 0, 2 * MIB], [512, 6 * MIB, 512]]
            .into_iter()
            .map(|sizes| {
                let alloc = |size| heap.alloc(size, &stream).unwrap();
                let blocks = sizes.map(alloc);
                // Freed by the thread that may keep them: it has a block of its own before.
                let (heap, stream) = (heap.clone(), stream.clone());
                thread::spawn(move || {
                    drop(heap.alloc(512, &stream).unwrap());
                    drop((heap, stream));
                    blocks.into_iter().for_each(drop);
                })
            })
            .collect();
        drop((heap, stream));
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(bench.pool.stats().mapped, 0);
        bench.end();
    });
}

#[test]
fn streams_take_memory_from_each_other() {
    explore(|| {
        let bench = Bench::new(12 * MIB);
        let heap = bench.heap();
        let threads: Vec<_> = [[4 * MIB, 8 * MIB], [6 * MIB, 4 * MIB], [2 * MIB, 2 * MIB]]
            .into_iter()
            .map(|sizes| {
                let heap = heap.clone();
                let stream = bench.device.create_stream().unwrap();
                thread::spawn(move || churn(&heap, &stream, &sizes))
            })
            .collect();
        heap.trim();
        threads.into_iter().for_each(|t| t.join().unwrap());
        heap.audit().unwrap();
        drop(heap);
        bench.end();
    });
}

/// The callback frees, allocates and trims while other threads allocate, free, and run out as well.
#[test]
fn a_callback_frees_for_threads_that_run_out() {
    explore(|| {
        let bench = Bench::new(12 * MIB);
        let heap = bench.heap();
        let streams: Vec<Stream> = (0..2)
            .map(|_| bench.device.create_stream().unwrap())
            .collect();
        let cache: Arc<Mutex<Vec<Block>>> = Arc::default();
        for stream in &streams {
            let block = heap.alloc(4 * MIB, stream).unwrap();
            use_block(&block, stream);
            cache.lock().unwrap().push(block);
        }
        let victims = cache.clone();
        heap.set_oom_callback(move |event| {
            assert!(event.attempt <= 16, "{event}");
            // The lock is left before the block goes.
            let victim = victims.lock().unwrap().pop();
            // Whatever the program does elsewhere; what it runs out of here is no call of its own.
            drop(event.heap.alloc(2 * MIB, event.stream));
            event.heap.trim();
            victim.map_or(OomAnswer::Fail, |_| OomAnswer::Retry)
        });
        let threads: Vec<_> = streams
            .iter()
            .zip([[6 * MIB, 2 * MIB], [4 * MIB, 8 * MIB]])
            .map(|(stream, sizes)| {
                let (heap, stream) = (heap.clone(), stream.clone());
                thread::spawn(move || churn(&heap, &stream, &sizes))
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        heap.clear_oom_callback();
        cache.lock().unwrap().clear();
        heap.audit().unwrap();
        drop((heap, streams, cache));
        bench.end();
    });
}

/// A graph's memory stays, and its capture stays whole, whatever others do meanwhile.
#[test]
fn a_capture_is_whole_beside_threads_that_take_memory() {
    explore(|| {
        let bench = Bench::new(16 * MIB);
        let heap = bench.heap();
        let streams: Vec<Stream> = (0..2)
            .map(|_| bench.device.create_stream().unwrap())
            .collect();
        let (theirs, stream) = (heap.clone(), streams[1].clone());
        let taking = thread::spawn(move || {
            churn(&theirs, &stream, &[6 * MIB, 4 * MIB]);
            theirs.trim();
        });
        let driver = bench.device.driver();
        let id = streams[0].id();
        driver.begin_capture(id).unwrap();
        let scope = heap.capture_scope(&streams[0]).unwrap();
        for size in [2 * MIB, 4 * MIB] {
            if let Ok(block) = scope.alloc(size) {
                use_block(&block, &streams[0]);
            }
        }
        let graph = driver.end_capture(id).unwrap();
        graph.launch(id).unwrap();
        let held = scope.stats().held;
        taking.join().unwrap();
        assert_eq!(scope.stats().held, held);
        graph.launch(id).unwrap();
        drop((graph, scope));
        heap.audit().unwrap();
        drop((heap, streams));
        bench.end();
    });
}

#[test]
fn a_block_used_by_two_streams_is_freed_by_a_third_thread() {
    explore(|| {
        let bench = Bench::new(8 * MIB);
        let heap = bench.heap();
        let one = bench.device.create_stream().unwrap();
        let other = bench.device.create_stream().unwrap();
        let block = heap.alloc(4 * MIB, &one).unwrap();
        use_block(&block, &one);
        other.wait(&one.fence().unwrap()).unwrap();
        block.record_use(&other).unwrap();
        use_block(&block, &other);
        let freeing = thread::spawn(move || drop(block));
        let (theirs, stream) = (heap.clone(), one.clone());
        let taking = thread::spawn(move || churn(&theirs, &stream, &[4 * MIB, 8 * MIB]));
        churn(&heap, &other, &[2 * MIB]);
        freeing.join().unwrap();
        taking.join().unwrap();
        heap.audit().unwrap();
        drop((heap, one, other));
        bench.end();
    });
}

#[test]
fn arenas_grow_together_and_shrink_under_one_budget() {
    explore(|| {
        let bench = Bench::new(8 * MIB);
        let arenas: Arc<Vec<Arena>> = Arc::new(
            (0..2)
                .map(|_| Arena::new(&bench.pool, 16 * MIB).unwrap())
                .collect(),
        );
        let threads: Vec<_> = (0..3u64)
            .map(|i| {
                let arenas = arenas.clone();
                thread::spawn(move || {
                    let both = [(&arenas[0], 4 * MIB), (&arenas[1], 2 * MIB)];
                    let grown = match i {
                        0 => Arena::grow_all(&both),
                        1 => arenas[1].extend(2 * MIB).map(drop),
                        _ => arenas[0].grow(6 * MIB),
                    };
                    assert!(grown.is_ok() || grown.is_err_and(|e| e.is_out_of_memory()));
                    arenas[(i % 2) as usize].try_shrink(2 * MIB).unwrap();
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        bench.pool.audit().unwrap();
        drop(arenas);
        bench.end();
    });
}
