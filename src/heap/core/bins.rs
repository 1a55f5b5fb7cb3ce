//! Size bins over free runs: a two-level bitmap, so that a good fit is found in constant
//! time. The line of small blocks uses them.
//!
//! A bin holds the runs of one size step (32 steps a power of two) as a doubly linked list through the nodes.

use super::NONE;
use super::runs::Node;

/// log2 of the steps in a power of two.
const STEP_BITS: u32 = 5;
const STEPS: usize = 1 << STEP_BITS;
const BINS: usize = (32 - STEP_BITS as usize + 1) * STEPS;
const WORDS: usize = BINS / 64;

/// The bin of a run of `len` units; `len` is not zero.
#[inline]
fn bin_of(len: u32) -> usize {
    if len < STEPS as u32 {
        return len as usize;
    }
    let log = 31 - len.leading_zeros();
    let step = (len >> (log - STEP_BITS)) as usize & (STEPS - 1);
    (log - STEP_BITS + 1) as usize * STEPS + step
}

/// How many runs of a bin are looked at for a closer fit.
const PROBES: u32 = 4;

/// Free runs by size.
#[derive(Debug)]
pub struct Bins {
    heads: [u32; BINS],
    words: [u64; WORDS],
    top: u32,
}

impl Default for Bins {
    fn default() -> Self {
        Self {
            heads: [NONE; BINS],
            words: [0; WORDS],
            top: 0,
        }
    }
}

impl Bins {
    /// Adds a run.
    #[inline]
    pub fn insert(&mut self, nodes: &mut [Node], run: u32) {
        let bin = bin_of(nodes[run as usize].len);
        let head = self.heads[bin];
        if head == NONE {
            self.words[bin / 64] |= 1 << (bin % 64);
            self.top |= 1 << (bin / 64);
        } else {
            nodes[head as usize].bin_prev = run;
        }
        let node = &mut nodes[run as usize];
        node.bin_prev = NONE;
        node.bin_next = head;
        self.heads[bin] = run;
    }

    /// Takes a run out.
    #[inline]
    pub fn remove(&mut self, nodes: &mut [Node], run: u32) {
        let Node {
            len,
            bin_prev,
            bin_next,
            ..
        } = nodes[run as usize];
        if bin_next != NONE {
            nodes[bin_next as usize].bin_prev = bin_prev;
        }
        if bin_prev != NONE {
            nodes[bin_prev as usize].bin_next = bin_next;
            return;
        }
        let bin = bin_of(len);
        self.heads[bin] = bin_next;
        if bin_next == NONE {
            self.words[bin / 64] &= !(1 << (bin % 64));
            if self.words[bin / 64] == 0 {
                self.top &= !(1 << (bin / 64));
            }
        }
    }

    /// Changes where a run starts and how long it is; relinks it only if its bin changes.
    #[inline]
    pub fn resize(&mut self, nodes: &mut [Node], run: u32, start: u32, len: u32) {
        let stays = bin_of(nodes[run as usize].len) == bin_of(len);
        if !stays {
            self.remove(nodes, run);
        }
        let node = &mut nodes[run as usize];
        node.start = start;
        node.len = len;
        if !stays {
            self.insert(nodes, run);
        }
    }

    /// The first bin at or above `bin` that is not empty.
    #[inline]
    fn next_bin(&self, bin: usize) -> Option<usize> {
        if bin >= BINS {
            return None;
        }
        let word = bin / 64;
        let rest = self.words[word] & (!0 << (bin % 64));
        if rest != 0 {
            return Some(word * 64 + rest.trailing_zeros() as usize);
        }
        let above = self.top & (!1u32).checked_shl(word as u32).unwrap_or(0);
        if above == 0 {
            return None;
        }
        let word = above.trailing_zeros() as usize;
        Some(word * 64 + self.words[word].trailing_zeros() as usize)
    }

    /// The closest fit among the first `probes` runs of one bin; lowest address among equals.
    #[inline]
    fn closest(&self, nodes: &[Node], bin: usize, len: u32, probes: u32) -> Option<u32> {
        let mut best: Option<(u32, u32, u32)> = None;
        let mut run = self.heads[bin];
        let mut left = probes;
        while run != NONE && left > 0 {
            let node = &nodes[run as usize];
            let key = (node.len, node.start, run);
            if node.len >= len && best.is_none_or(|b| key < b) {
                best = Some(key);
                if node.len == len {
                    break;
                }
            }
            run = node.bin_next;
            left -= 1;
        }
        best.map(|b| b.2)
    }

    /// A run of at least `len` units that fits well, in constant time. May miss a run of `len`'s own bin.
    #[inline]
    pub fn good_fit(&self, nodes: &[Node], len: u32) -> Option<u32> {
        let own = bin_of(len);
        let head = self.heads[own];
        if head != NONE {
            // bins of one length need no look at their runs
            if own < 2 * STEPS {
                return Some(head);
            }
            if let Some(run) = self.closest(nodes, own, len, PROBES) {
                return Some(run);
            }
        }
        // any run of a higher bin will do: bins are three per cent wide
        Some(self.heads[self.next_bin(own + 1)?])
    }

    /// A run of at least `len` units in `len`'s own bin, however deep: asked before giving up.
    pub fn deep_fit(&self, nodes: &[Node], len: u32) -> Option<u32> {
        self.closest(nodes, bin_of(len), len, u32::MAX)
    }

    /// Calls `see` with every run of at least `len` units' bin and above.
    pub fn each(&self, nodes: &[Node], len: u32, see: &mut dyn FnMut(u32)) {
        let mut bin = self.next_bin(bin_of(len));
        while let Some(at) = bin {
            let mut run = self.heads[at];
            while run != NONE {
                see(run);
                run = nodes[run as usize].bin_next;
            }
            bin = self.next_bin(at + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::runs::State;
    use super::*;

    fn node(start: u32, len: u32) -> Node {
        Node {
            start,
            len,
            prev: NONE,
            next: NONE,
            bin_prev: NONE,
            bin_next: NONE,
            uses: 0,
            state: State::Free,
        }
    }

    #[test]
    fn bins_grow_with_size_and_stay_in_range() {
        let mut last = 0;
        for len in (1..100_000)
            .chain((17..32).map(|b| 1 << b))
            .chain([u32::MAX])
        {
            let bin = bin_of(len);
            assert!(bin >= last && bin < BINS, "{len}");
            last = bin;
        }
    }

    #[test]
    fn the_closest_of_a_bin_is_taken_and_equals_go_by_address() {
        let mut nodes = vec![
            node(900, 1000),
            node(100, 1001),
            node(500, 1000),
            node(0, 4000),
        ];
        let mut bins = Bins::default();
        for run in 0..4 {
            bins.insert(&mut nodes, run);
        }
        assert_eq!(bins.good_fit(&nodes, 1000), Some(2));
        bins.remove(&mut nodes, 2);
        assert_eq!(bins.good_fit(&nodes, 1000), Some(0));
        bins.resize(&mut nodes, 0, 900, 3);
        assert_eq!(bins.good_fit(&nodes, 1000), Some(1));
        assert_eq!(bins.good_fit(&nodes, 1002), Some(3));
        assert_eq!(bins.good_fit(&nodes, 5000), None);
        assert_eq!(bins.good_fit(&nodes, 2), Some(0));
    }
}
