//! Free runs by address: the lowest run that is long enough, found by a 16-way tree of bounds.
//!
//! First fit by address kept the footprint lower in every trace than best fit did (see the study): it leaves the
//! high end of the line free, where whole granules come loose. A leaf stands for 1 MiB of addresses and holds the
//! list of the runs that start in it, so that the whole tree of a busy lane stays in the cache.

use super::NONE;
use super::runs::Node;

/// Units of a leaf.
const LEAF: u32 = 4096;
const WAYS: usize = 16;

/// The tree of bounds on lengths; every level is a multiple of 16 entries long, the top level is 16.
#[derive(Debug)]
pub struct FirstFit {
    levels: Vec<Vec<u32>>,
    runs: Vec<u32>,
}

/// The first entry of a family that is at least `len`, or more than there are. Without branches, since what fits
/// where is not predictable; a function of its own, since only so compilers compare several at once.
#[inline(never)]
fn first_of(family: &[u32; WAYS], len: u32) -> usize {
    let mut fits = 0u32;
    for (i, bound) in family.iter().enumerate() {
        fits |= u32::from(*bound >= len) << i;
    }
    fits.trailing_zeros() as usize
}

/// The largest entry of a family.
#[inline]
fn most_of(family: &[u32]) -> u32 {
    let mut most = [0u32; 4];
    for four in family.chunks_exact(4) {
        for (m, &v) in most.iter_mut().zip(four) {
            *m = if v > *m { v } else { *m };
        }
    }
    most[0].max(most[1]).max(most[2].max(most[3]))
}

impl FirstFit {
    /// An empty index.
    pub fn new() -> Self {
        Self {
            levels: vec![vec![0; WAYS]],
            runs: vec![NONE; WAYS],
        }
    }

    /// Adds a run.
    #[inline]
    pub fn insert(&mut self, nodes: &mut [Node], run: u32) {
        let Node { start, len, .. } = nodes[run as usize];
        let leaf = (start / LEAF) as usize;
        if leaf >= self.runs.len() {
            self.grow(leaf);
        }
        let head = std::mem::replace(&mut self.runs[leaf], run);
        if head != NONE {
            nodes[head as usize].bin_prev = run;
        }
        nodes[run as usize].bin_prev = NONE;
        nodes[run as usize].bin_next = head;
        self.raise(leaf, len);
    }

    /// Takes a run out.
    #[inline]
    pub fn remove(&mut self, nodes: &mut [Node], run: u32) {
        let Node {
            start,
            bin_prev,
            bin_next,
            ..
        } = nodes[run as usize];
        if bin_next != NONE {
            nodes[bin_next as usize].bin_prev = bin_prev;
        }
        if bin_prev == NONE {
            self.runs[(start / LEAF) as usize] = bin_next;
        } else {
            nodes[bin_prev as usize].bin_next = bin_next;
        }
    }

    /// Changes where a run starts and how long it is.
    #[inline]
    pub fn resize(&mut self, nodes: &mut [Node], run: u32, start: u32, len: u32) {
        let stays = nodes[run as usize].start / LEAF == start / LEAF;
        if !stays {
            self.remove(nodes, run);
        }
        nodes[run as usize].start = start;
        nodes[run as usize].len = len;
        if stays {
            self.raise((start / LEAF) as usize, len);
        } else {
            self.insert(nodes, run);
        }
    }

    /// Raises the bounds of a leaf and above where `len` passes them. They are never lowered here: `find` does that.
    #[inline]
    fn raise(&mut self, leaf: usize, len: u32) {
        let mut at = leaf;
        for level in &mut self.levels {
            if level[at] >= len {
                return;
            }
            level[at] = len;
            at /= WAYS;
        }
    }

    /// The lowest run of a leaf of at least `len` units, or the longest length there is.
    #[inline]
    fn lowest(&self, nodes: &[Node], leaf: usize, len: u32) -> Result<u32, u32> {
        let (mut best, mut lowest, mut longest) = (NONE, NONE, 0);
        let mut run = self.runs[leaf];
        while run != NONE {
            let n = &nodes[run as usize];
            longest = longest.max(n.len);
            if n.len >= len && n.start < lowest {
                (best, lowest) = (run, n.start);
            }
            run = n.bin_next;
        }
        if best == NONE { Err(longest) } else { Ok(best) }
    }

    /// The lowest run of at least `len` units. Where a bound promised more than there is, it is lowered: each
    /// time, that pays for an earlier raise.
    #[inline]
    pub fn find(&mut self, nodes: &[Node], len: u32) -> Option<u32> {
        let top = self.levels.len() - 1;
        let (mut level, mut family) = (top, 0);
        loop {
            let (families, _) = self.levels[level].as_chunks::<WAYS>();
            let entries = &families[family];
            let way = first_of(entries, len);
            if way < WAYS {
                family = family * WAYS + way;
                if level > 0 {
                    level -= 1;
                    continue;
                }
                match self.lowest(nodes, family, len) {
                    Ok(run) => return Some(run),
                    Err(longest) => self.levels[0][family] = longest,
                }
                family /= WAYS;
            } else if level == top {
                return None;
            } else {
                let most = most_of(entries);
                level += 1;
                self.levels[level][family] = most;
                family /= WAYS;
            }
        }
    }

    /// Calls `see` with every run of at least `len` units, nearly in order of address.
    pub fn each(&self, nodes: &[Node], len: u32, see: &mut dyn FnMut(u32)) {
        self.walk(nodes, self.levels.len() - 1, 0, len, see);
    }

    fn walk(
        &self,
        nodes: &[Node],
        level: usize,
        family: usize,
        len: u32,
        see: &mut dyn FnMut(u32),
    ) {
        for at in family * WAYS..(family + 1) * WAYS {
            if self.levels[level][at] < len {
                continue;
            }
            if level == 0 {
                let mut run = self.runs[at];
                while run != NONE {
                    let n = &nodes[run as usize];
                    if n.len >= len {
                        see(run);
                    }
                    run = n.bin_next;
                }
            } else {
                self.walk(nodes, level - 1, at, len, see);
            }
        }
    }

    #[cold]
    fn grow(&mut self, leaf: usize) {
        let mut need = (leaf + 1 + leaf / 4).next_multiple_of(WAYS);
        self.runs.resize(need, NONE);
        for level in 0.. {
            if level == self.levels.len() {
                let below = &self.levels[level - 1];
                let mut maxima: Vec<u32> = below.chunks_exact(WAYS).map(most_of).collect();
                maxima.resize(need, 0);
                self.levels.push(maxima);
            } else {
                self.levels[level].resize(need, 0);
            }
            if need == WAYS {
                return;
            }
            need = (need / WAYS).next_multiple_of(WAYS);
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
    fn the_lowest_run_that_fits_is_found() {
        let mut nodes = vec![
            node(0, 70),
            node(2560, 200),
            node(256 * 70_000, 5000),
            node(256 * 900, 200),
        ];
        let mut f = FirstFit::new();
        for run in 0..4 {
            f.insert(&mut nodes, run);
        }
        assert_eq!(f.find(&nodes, 65), Some(0));
        assert_eq!(f.find(&nodes, 71), Some(1));
        assert_eq!(f.find(&nodes, 201), Some(2));
        assert_eq!(f.find(&nodes, 5001), None);
        f.remove(&mut nodes, 1);
        assert_eq!(f.find(&nodes, 71), Some(3));
        f.remove(&mut nodes, 2);
        assert_eq!(f.find(&nodes, 201), None);
        let mut seen = Vec::new();
        f.each(&nodes, 1, &mut |run| seen.push(run));
        assert_eq!(seen, [0, 3]);
    }
}
