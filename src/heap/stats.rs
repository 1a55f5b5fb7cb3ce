//! Figures of a heap, and how a lane adds its own.

use super::core::UNIT;
use super::lane::State;

/// Figures of a heap at one moment, over all its streams. Sizes in bytes.
///
/// At every moment `held == live + free` and `allocs == hits + misses`;
/// [`is_consistent`](Self::is_consistent) has them all.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HeapStats {
    /// In live blocks, rounded up to 256 bytes each; with what is in limbo.
    pub live: u64,
    /// Sum over streams of the most that was live on each, with what was kept for the next of its size.
    pub live_peak: u64,
    /// How many blocks are live; with those in limbo.
    pub blocks: u64,
    /// Physical memory held.
    pub held: u64,
    /// Sum over streams of the most that was held for each.
    pub held_peak: u64,
    /// How many granules that is.
    pub granules: u64,
    /// Mapped and not live, with what an allocation under way has claimed of it.
    pub free: u64,
    /// The longest free run. Freed blocks kept whole for the next of their size count by themselves.
    pub largest_free: u64,
    /// Held in granules without a live byte.
    pub idle: u64,
    /// Held by capture scopes: nothing of it moves or leaves.
    pub scoped: u64,
    /// Freed and waiting for other streams.
    pub limbo: u64,
    /// Old mappings that wait for a fence.
    pub aliases: u64,
    /// Allocations.
    pub allocs: u64,
    /// Of those, served from mapped memory.
    pub hits: u64,
    /// Of those, not served from mapped memory.
    pub misses: u64,
    /// Granules moved without a copy.
    pub remaps: u64,
    /// Granules taken from the pool.
    pub creates: u64,
    /// Waits of the host.
    pub host_waits: u64,
    /// Freed blocks and streams that a stream was made to wait for on the device, to get memory.
    pub device_waits: u64,
    /// Allocations that failed.
    pub failures: u64,
    /// Mappings the driver refused to undo so far.
    pub broken: u64,
}

impl HeapStats {
    /// Part of the held memory that holds no live byte, 0 to 1.
    #[must_use]
    pub fn waste(&self) -> f64 {
        match self.held {
            0 => 0.0,
            held => 1.0 - self.live as f64 / held as f64,
        }
    }

    /// Part of the free memory that is not in the longest free run, 0 to 1. Memory that is free on several
    /// streams counts as split between them.
    #[must_use]
    pub fn external(&self) -> f64 {
        match self.free {
            0 => 0.0,
            free => 1.0 - self.largest_free as f64 / free as f64,
        }
    }

    /// Whether the identities hold.
    #[must_use]
    pub fn is_consistent(&self) -> bool {
        self.held == self.live + self.free
            && self.allocs == self.hits + self.misses
            && self.failures <= self.misses
            && self.live <= self.live_peak
            && self.held <= self.held_peak
            && self.limbo <= self.live
            && self.scoped <= self.held
            && self.idle <= self.free
            && self.largest_free <= self.free
            && (self.blocks == 0) == (self.live == 0)
    }
}

/// Freed blocks that the books show as live, as they stood at one moment under the lane's lock.
///
/// Other threads go on taking and keeping them, so that two looks may differ; but what one look found
/// was free when it looked, and no other block went from or to the books meanwhile.
#[derive(Default)]
pub(super) struct Aside {
    /// Addresses of those that are kept outside of the lock.
    pub(super) addrs: Vec<u64>,
    bytes: u64,
    blocks: u64,
    largest: u64,
    /// Allocations served outside of the lock.
    allocs: u64,
}

impl Aside {
    fn add(&mut self, addr: u64, len: u64) {
        self.addrs.push(addr);
        self.bytes += len;
        self.blocks += 1;
        self.largest = self.largest.max(len);
    }
}

impl State {
    /// What is kept aside.
    pub(super) fn aside(&self) -> Aside {
        let (bytes, blocks) = self.quick.sums();
        let mut aside = Aside {
            addrs: Vec::new(),
            bytes,
            blocks,
            largest: self.quick.largest(),
            allocs: self.quick.pair().allocs(),
        };
        let _stop = self.stop_magazines();
        for magazine in &self.magazines {
            magazine.each(|class, slot| {
                aside.add(slot.addr, u64::from(class) * UNIT);
            });
            aside.allocs += magazine.allocs();
        }
        if let Some(kept) = self.quick.pair().peek() {
            aside.add(kept.addr, kept.len);
        }
        aside
    }

    /// Adds this stream's figures.
    pub(super) fn add_to(&self, sum: &mut HeapStats) {
        self.add_with(&self.aside(), sum);
    }

    /// As [`add_to`](Self::add_to), by one look at what is kept aside.
    pub(super) fn add_with(&self, aside: &Aside, sum: &mut HeapStats) {
        let core = self.core.stats();
        let live = core.live.saturating_sub(aside.bytes);
        let allocs = self.counts.allocs + aside.allocs;
        sum.live += live;
        sum.live_peak += core.live_peak;
        sum.blocks += core.blocks.saturating_sub(aside.blocks);
        sum.held += core.held;
        sum.held_peak += self.counts.held_peak;
        sum.granules += core.granules;
        sum.free += core.held - live;
        let largest = self.core.largest_free().max(aside.largest);
        sum.largest_free = sum.largest_free.max(largest);
        sum.idle += core.idle;
        sum.limbo += self.limbo_bytes;
        sum.aliases += self.stale.len() as u64;
        sum.allocs += allocs;
        sum.hits += allocs - self.counts.misses;
        sum.misses += self.counts.misses;
        sum.remaps += self.counts.remaps;
        sum.creates += self.counts.creates;
        sum.host_waits += self.counts.host_waits;
        sum.device_waits += self.counts.device_waits;
        sum.failures += self.counts.failures;
        let stuck = self.broken.iter().map(|b| b.stuck.len() as u64);
        sum.broken += stuck.sum::<u64>();
    }
}
