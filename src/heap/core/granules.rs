//! Which granule lies behind which pages of which line. Lengths and places are in pages of 2 MiB.

use super::{NONE, PAGE};

/// One physical granule that is mapped in a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granule {
    /// The caller's name for it.
    pub id: u64,
    /// The line it is mapped in.
    pub line: u8,
    /// First page.
    pub at: u32,
    /// Pages.
    pub len: u32,
}

/// The granules of a lane and, per line, the granule behind each page.
#[derive(Debug, Default)]
pub struct Granules {
    slots: Vec<Option<Granule>>,
    vacant: Vec<u32>,
    cover: Vec<Vec<u32>>,
    pages: u64,
    count: usize,
}

impl Granules {
    /// No granules, `lines` lines.
    pub fn new(lines: usize) -> Self {
        Self {
            cover: vec![Vec::new(); lines],
            ..Self::default()
        }
    }

    /// Pages of all granules.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// How many granules.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The granule in a slot.
    pub fn get(&self, slot: u32) -> Option<Granule> {
        self.slots.get(slot as usize).copied().flatten()
    }

    /// The slot of the granule behind a page, or `NONE`.
    pub fn behind(&self, line: u8, page: u32) -> u32 {
        self.cover[line as usize]
            .get(page as usize)
            .copied()
            .unwrap_or(NONE)
    }

    /// Pages of a line from which on none was ever mapped.
    pub fn known(&self, line: u8) -> u32 {
        self.cover[line as usize].len() as u32
    }

    /// All granules with their slots.
    pub fn iter(&self) -> impl Iterator<Item = (u32, Granule)> + '_ {
        self.slots
            .iter()
            .enumerate()
            .filter_map(|(i, g)| g.map(|g| (i as u32, g)))
    }

    fn paint(&mut self, g: Granule, slot: u32) {
        let cover = &mut self.cover[g.line as usize];
        let end = (g.at + g.len) as usize;
        if cover.len() < end {
            cover.resize(end, NONE);
        }
        cover[g.at as usize..end].fill(slot);
    }

    /// Enters a new granule.
    pub fn add(&mut self, g: Granule) -> u32 {
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as u32
        });
        self.slots[slot as usize] = Some(g);
        self.pages += u64::from(g.len);
        self.count += 1;
        self.paint(g, slot);
        slot
    }

    /// Strikes a granule out.
    pub fn remove(&mut self, slot: u32) -> Option<Granule> {
        let g = self.slots.get_mut(slot as usize)?.take()?;
        self.paint(g, NONE);
        self.vacant.push(slot);
        self.pages -= u64::from(g.len);
        self.count -= 1;
        Some(g)
    }

    /// Moves a granule.
    pub fn shift(&mut self, slot: u32, line: u8, at: u32) {
        if let Some(g) = self.get(slot) {
            self.paint(g, NONE);
            let g = Granule { line, at, ..g };
            self.slots[slot as usize] = Some(g);
            self.paint(g, slot);
        }
    }

    /// The pages of `[start, start + len)` units whose granules lie wholly inside it: all but the ends' halves.
    /// The range must be mapped throughout.
    pub fn whole(&self, line: u8, start: u32, len: u32) -> Option<(u32, u32)> {
        let mut first = start.div_ceil(PAGE);
        let mut last = (start + len) / PAGE;
        if first >= last {
            return None;
        }
        let g = self.get(self.behind(line, first))?;
        if g.at < first {
            first = g.at + g.len;
        }
        let g = self.get(self.behind(line, last - 1))?;
        if g.at + g.len > last {
            last = g.at;
        }
        (first < last).then_some((first, last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_granules_wholly_inside_a_run_count() {
        let mut g = Granules::new(1);
        for (id, at, len) in [(1, 0, 4), (2, 4, 2), (3, 6, 8)] {
            g.add(Granule {
                id,
                line: 0,
                at,
                len,
            });
        }
        assert_eq!(g.whole(0, 0, 14 * PAGE), Some((0, 14)));
        assert_eq!(g.whole(0, 1, 14 * PAGE - 1), Some((4, 14)));
        assert_eq!(g.whole(0, 0, 13 * PAGE), Some((0, 6)));
        assert_eq!(g.whole(0, 3 * PAGE, 4 * PAGE), Some((4, 6)));
        assert_eq!(g.whole(0, 7 * PAGE, 5 * PAGE), None);
        assert_eq!(g.whole(0, 1, PAGE), None);
        assert_eq!((g.pages(), g.count()), (14, 3));
    }

    #[test]
    fn a_moved_granule_leaves_its_old_pages() {
        let mut g = Granules::new(2);
        let slot = g.add(Granule {
            id: 9,
            line: 0,
            at: 0,
            len: 3,
        });
        g.shift(slot, 1, 10);
        assert_eq!((g.behind(0, 1), g.behind(1, 12)), (NONE, slot));
        assert_eq!(g.remove(slot).map(|g| g.at), Some(10));
        assert_eq!((g.behind(1, 12), g.pages()), (NONE, 0));
    }
}
