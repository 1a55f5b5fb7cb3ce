//! Memory that changes hands thousands of times while the old owner's work is queued: kernels, copies
//! and fills as old and as new owner, a second stream behind device-side waits, and on CUDA a graph
//! that replays beside it. Every byte looked at is checked on the device.
//!
//! Each burst of work begins with a kernel that only spins. On CUDA, remaps count while it runs: all the
//! work of the granules' old owners is then queued behind it.
//!
//! `GRANULE_REMAPS=n` sets how many granules must have moved: 300 by default, 10,000 on CUDA.

use granule::driver::cuda::{CudaDriver, GraphExec};
use granule::driver::{Call, Kernel, StreamId};
use granule::units::MIB;
use granule::{Arena, Block, HeapConfig, PoolConfig};

use super::yard::{Yard, check, write};
use crate::support::On;

on_each_driver! {
    memory_changes_hands_thousands_of_times_under_queued_work
}

/// Steps between two waits: a CUDA stream takes about a thousand pieces of work.
const BURST: u64 = 8;
/// What a burst of steps takes on the host, and more.
const SPIN: u64 = 1_500_000;
const BUDGET: u64 = 96 * MIB;

/// A block, and the pattern that it holds.
struct Owned {
    block: Block,
    seed: u64,
}

struct Soak {
    yard: Yard,
    live: Vec<Owned>,
    /// A block that never moves, with pattern 1: what copies are made from.
    master: Block,
    random: u64,
}

impl Soak {
    fn next(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    /// Keeps a stream busy.
    fn spin(&self, stream: usize) {
        let spin = Kernel::Spin { nanos: SPIN };
        let id = self.yard.streams[stream].id();
        self.yard.rig.inner.launch(spin, id).unwrap();
    }

    /// A burst of steps behind one spinning kernel; the remaps made before that ended.
    fn burst(&mut self) -> u64 {
        let event = self.yard.rig.inner.create_event().unwrap();
        let stream = self.yard.streams[0].id();
        self.spin(0);
        self.yard.rig.inner.record_event(event, stream).unwrap();
        let mut busy = 0;
        for _ in 0..BURST {
            let before = self.yard.heap.stats().remaps;
            self.step();
            if !self.yard.rig.inner.query_event(event).unwrap() {
                busy += self.yard.heap.stats().remaps - before;
            }
        }
        self.yard.rig.inner.destroy_event(event).unwrap();
        busy
    }

    /// A new owner's first work on a block is one of all kinds that there are.
    fn fill_in(&mut self, block: Block, stream: usize) {
        let size = block.len();
        let rig = &self.yard.rig;
        let id = self.yard.streams[stream].id();
        let kind = self.random % 3;
        let seed = match kind {
            0 => self.random,
            1 => {
                let source = self.master.range().sub(0, size).unwrap();
                rig.inner.copy(block.ptr(), source, id).unwrap();
                1
            }
            _ => {
                rig.inner.fill(block.range(), 0xAB, id).unwrap();
                self.random
            }
        };
        // A copy moves the master's words, which were written from its own address.
        if kind == 1 {
            let copied = block.range();
            self.check_copied(copied, stream);
        }
        self.yard.write(&block, seed, stream);
        self.live.push(Owned { block, seed });
    }

    /// The copy's first words are the master's first words, whose pattern has the master's address in
    /// its seed.
    fn check_copied(&self, copied: granule::units::VaRange, stream: usize) {
        let seed = 1 ^ self.master.ptr().get();
        let kernel = Kernel::CheckPattern {
            range: copied.sub(0, 64).unwrap(),
            seed,
            mismatches: self.yard.words.of(stream),
        };
        let id = self.yard.streams[stream].id();
        self.yard.rig.inner.launch(kernel, id).unwrap();
    }

    /// The old owner's last work, on its own stream or on the other one.
    fn let_go(&mut self, at: usize) {
        let Owned { block, seed } = self.live.swap_remove(at);
        let elsewhere = self.next(4) == 0;
        if elsewhere {
            self.yard.order(0, 1);
            // Long enough that the memory is wanted while the other stream still uses it.
            self.spin(1);
            block.record_use(&self.yard.streams[1]).unwrap();
            self.yard.check(&block, seed, 1);
            self.yard.write(&block, seed + 1, 1);
            self.yard.check(&block, seed + 1, 1);
        } else {
            self.yard.check(&block, seed, 0);
            self.yard.write(&block, seed + 1, 0);
            self.yard.check(&block, seed + 1, 0);
        }
    }

    fn step(&mut self) {
        let size = (1 + self.next(8)) * 2 * MIB;
        loop {
            match self.yard.heap.alloc(size, &self.yard.streams[0]) {
                Ok(block) => return self.fill_in(block, 0),
                Err(error) => {
                    assert!(error.is_out_of_memory(), "{error}");
                    let at = self.next(self.live.len() as u64);
                    self.let_go(at as usize);
                }
            }
        }
    }
}

/// On CUDA, a graph over an arena of its own: checks the arena's pattern and writes it again.
fn graph(yard: &Yard, arena: &Arena) -> Option<GraphExec> {
    let cuda = yard.rig.inner.as_any().downcast_ref::<CudaDriver>()?;
    let stream = &yard.streams[2];
    write(&yard.rig, arena.range(), 7, stream);
    yard.rig.inner.sync_stream(stream.id()).unwrap();
    cuda.begin_capture(stream.id()).unwrap();
    check(&yard.rig, arena.range(), 7, stream, yard.words.of(2));
    write(&yard.rig, arena.range(), 7, stream);
    Some(cuda.end_capture(stream.id()).unwrap())
}

fn memory_changes_hands_thousands_of_times_under_queued_work(on: On) {
    let default = if on == On::Cuda { 10_000 } else { 300 };
    let wanted = std::env::var("GRANULE_REMAPS").ok();
    let wanted: u64 = wanted.map_or(default, |n| n.parse().unwrap());
    let config = HeapConfig {
        // One size: a granule of a size that fits nowhere would have to leave, which the host waits for.
        granule_max: 2 * MIB,
        granule_min: 2 * MIB,
        aliases: 4096,
        ..HeapConfig::default()
    };
    let yard = Yard::new(on, BUDGET, config, 3);
    let own = yard
        .rig
        .pool(PoolConfig::with_budget(8 * MIB).granule(2 * MIB));
    let beside = Arena::new(&own, 8 * MIB).unwrap();
    beside.grow_on(8 * MIB, &yard.streams[2]).unwrap();
    let replayed = graph(&yard, &beside);
    let master = yard.filled(16 * MIB, 0, 1);
    let mut soak = Soak {
        yard,
        live: Vec::new(),
        master,
        random: 0x9E37_79B9_7F4A_7C15,
    };
    let before = soak.yard.rig.counts();
    let (mut bursts, mut busy) = (0, 0);
    let done = |soak: &Soak, busy| match on {
        On::Cuda => busy >= wanted,
        _ => soak.yard.heap.stats().remaps >= wanted,
    };
    while !done(&soak, busy) {
        if let Some(graph) = &replayed {
            graph.launch(soak.yard.streams[2].id()).unwrap();
        }
        busy += soak.burst();
        bursts += 1;
        soak.yard.sync();
        if bursts % 64 == 0 {
            soak.yard.words.assert_zero(&soak.yard.rig);
            soak.yard.audit();
        }
    }
    let stats = soak.yard.heap.stats();
    let calls = soak.yard.rig.counts().since(&before);
    // The test itself waits through the driver beneath.
    assert_eq!(calls.of(Call::SyncStream).calls, 0, "{stats:?}");
    assert_eq!(stats.host_waits, 0, "{stats:?}");
    assert!(stats.device_waits > 0, "{stats:?}");
    println!("{busy} remaps under queued work, {bursts} bursts: {stats:?}");
    let Soak {
        yard, live, master, ..
    } = soak;
    for one in &live {
        yard.check(&one.block, one.seed, 0);
    }
    drop((live, master, replayed));
    beside.close().map_err(|(_, error)| error).unwrap();
    drop(own);
    yard.rig.inner.sync_stream(StreamId::DEFAULT).unwrap();
    yard.end();
}
