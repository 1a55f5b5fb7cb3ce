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

/// The tree of longest lengths; every level is a multiple of 16 entries long, the top level is 16.
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
            len,
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
        self.lower(nodes, (start / LEAF) as usize, len);
    }

    /// Changes where a run starts and how long it is.
    #[inline]
    pub fn resize(&mut self, nodes: &mut [Node], run: u32, start: u32, len: u32) {
        let before = &mut nodes[run as usize];
        let was = before.len;
        if before.start / LEAF != start / LEAF {
            self.remove(nodes, run);
            nodes[run as usize].start = start;
            nodes[run as usize].len = len;
            return self.insert(nodes, run);
        }
        before.start = start;
        before.len = len;
        match len >= was {
            true => self.raise((start / LEAF) as usize, len),
            false => self.lower(nodes, (start / LEAF) as usize, was),
        }
    }

    /// Raises the bounds of a leaf and above where `len` passes them.
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

    /// Lowers the bounds of a leaf and above where `was`, a length that left, was the longest. At once, since a
    /// search that follows a bound in vain costs more than all of this: with bounds lowered by searches, these
    /// came to three times as many families.
    #[inline]
    fn lower(&mut self, nodes: &[Node], leaf: usize, was: u32) {
        if self.levels[0][leaf] > was {
            return;
        }
        let mut most = 0;
        let mut run = self.runs[leaf];
        while run != NONE {
            let n = &nodes[run as usize];
            most = most.max(n.len);
            run = n.bin_next;
        }
        let mut at = leaf;
        for level in 0.. {
            if most == was {
                return;
            }
            self.levels[level][at] = most;
            at /= WAYS;
            match self.levels.get(level + 1) {
                Some(above) if above[at] == was => {
                    most = most_of(&self.levels[level][at * WAYS..][..WAYS]);
                }
                _ => return,
            }
        }
    }

    /// The lowest run of a leaf of at least `len` units.
    #[inline]
    fn lowest(&self, nodes: &[Node], leaf: usize, len: u32) -> Option<u32> {
        let (mut best, mut lowest) = (None, NONE);
        let mut run = self.runs[leaf];
        while run != NONE {
            let n = &nodes[run as usize];
            if n.len >= len && n.start < lowest {
                (best, lowest) = (Some(run), n.start);
            }
            run = n.bin_next;
        }
        best
    }

    /// The lowest run of at least `len` units.
    #[inline]
    pub fn find(&self, nodes: &[Node], len: u32) -> Option<u32> {
        let mut family = 0;
        for level in self.levels.iter().rev() {
            let (families, _) = level.as_chunks::<WAYS>();
            let way = first_of(&families[family], len);
            if way >= WAYS {
                return None;
            }
            family = family * WAYS + way;
        }
        self.lowest(nodes, family, len)
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

    /// Every entry is the longest of what is below it.
    fn check(f: &FirstFit, nodes: &[Node]) {
        for (leaf, bound) in f.levels[0].iter().enumerate() {
            let mut longest = 0;
            let mut run = f.runs[leaf];
            while run != NONE {
                longest = longest.max(nodes[run as usize].len);
                run = nodes[run as usize].bin_next;
            }
            assert_eq!(*bound, longest, "leaf {leaf}");
        }
        for pair in f.levels.windows(2) {
            let mut below: Vec<u32> = pair[0].chunks_exact(WAYS).map(most_of).collect();
            below.resize(pair[1].len(), 0);
            assert_eq!(below, pair[1]);
        }
    }

    #[test]
    fn bounds_are_exact_after_any_change() {
        let mut seed = 1u64;
        let mut random = move |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % below
        };
        let mut nodes: Vec<Node> = (0..400)
            .map(|i| node(i * 3000, 1 + random(4) as u32 * 700))
            .collect();
        let mut f = FirstFit::new();
        let mut is_in = vec![false; nodes.len()];
        for _ in 0..20_000 {
            let at = random(400);
            let run = at as u32;
            match (is_in[at as usize], random(3)) {
                (false, _) => {
                    f.insert(&mut nodes, run);
                    is_in[at as usize] = true;
                }
                (true, 0) => {
                    f.remove(&mut nodes, run);
                    is_in[at as usize] = false;
                }
                (true, _) => {
                    let start = run * 3000 + random(3000) as u32;
                    f.resize(&mut nodes, run, start, 1 + random(4) as u32 * 700);
                }
            }
            let len = 1 + random(2200) as u32;
            let fits = |i: &usize| is_in[*i] && nodes[*i].len >= len;
            let lowest = (0..nodes.len())
                .filter(fits)
                .min_by_key(|i| nodes[*i].start);
            assert_eq!(f.find(&nodes, len), lowest.map(|i| i as u32));
        }
        check(&f, &nodes);
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
