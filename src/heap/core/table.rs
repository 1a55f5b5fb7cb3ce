//! From an address to the block that starts there, in constant time and without hashing.

use super::NONE;

/// Entries of a chunk, made when first used.
const CHUNK: usize = 8192;

/// One entry for every `1 << shift` units, for lines whose blocks are all longer than that (or `shift` 0). An entry
/// is a hint: who reads it compares the block's start.
#[derive(Debug)]
pub struct Table {
    shift: u32,
    chunks: Vec<Option<Box<[u32]>>>,
}

impl Table {
    /// An empty table.
    pub fn new(shift: u32) -> Self {
        Self {
            shift,
            chunks: Vec::new(),
        }
    }

    /// Enters a block's node.
    #[inline]
    pub fn set(&mut self, start: u32, node: u32) {
        let at = (start >> self.shift) as usize;
        if let Some(Some(chunk)) = self.chunks.get_mut(at / CHUNK) {
            chunk[at % CHUNK] = node;
        } else {
            self.grow(at / CHUNK)[at % CHUNK] = node;
        }
    }

    #[cold]
    fn grow(&mut self, chunk: usize) -> &mut [u32] {
        if chunk >= self.chunks.len() {
            self.chunks.resize(chunk + 1, None);
        }
        self.chunks[chunk].get_or_insert_with(|| vec![NONE; CHUNK].into_boxed_slice())
    }

    /// The node last entered for this place, or `NONE`.
    #[inline]
    pub fn get(&self, start: u32) -> u32 {
        let at = (start >> self.shift) as usize;
        match self.chunks.get(at / CHUNK) {
            Some(Some(chunk)) => chunk[at % CHUNK],
            _ => NONE,
        }
    }
}

/// The tables of a line, for blocks of so many units and more each, longest first: where blocks are long, few
/// entries cover many addresses, and stay in the cache.
#[derive(Debug)]
pub struct Tables {
    by_len: Vec<Table>,
}

impl Tables {
    /// Empty tables for blocks from `1 << shift` units on, for each shift; the last one is for all blocks.
    pub fn new(shifts: &[u32]) -> Self {
        Self {
            by_len: shifts.iter().map(|shift| Table::new(*shift)).collect(),
        }
    }

    /// The table for blocks of a length.
    #[inline]
    fn of(&self, len: u32) -> usize {
        let found = self.by_len.iter().position(|table| len >> table.shift > 0);
        found.unwrap_or(self.by_len.len() - 1)
    }

    /// Enters a block's node.
    #[inline]
    pub fn set(&mut self, start: u32, len: u32, node: u32) {
        let at = self.of(len);
        self.by_len[at].set(start, node);
    }

    /// The node last entered for a block of this length at this place, or `NONE`.
    pub fn get(&self, start: u32, len: u32) -> u32 {
        self.by_len[self.of(len)].get(start)
    }

    /// The node that was entered for this place and is what the caller looks for.
    #[inline]
    pub fn find(&self, start: u32, mut is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        let mut entered = self.by_len.iter().map(|table| table.get(start));
        entered.find(|node| *node != NONE && is_it(*node))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_each_length_are_found_in_their_own_table() {
        let mut tables = Tables::new(&[12, 6]);
        tables.set(4096, 4096, 1);
        tables.set(4096, 64, 2);
        tables.set(8192, 63, 3);
        let lengths = [5000, 4096, 4095, 64];
        assert_eq!(lengths.map(|len| tables.get(4096, len)), [1, 1, 2, 2]);
        assert_eq!(tables.find(4096, |_| true), Some(1));
        assert_eq!(tables.find(4096, |node| node == 2), Some(2));
        assert_eq!(tables.find(8192, |_| true), Some(3));
        assert_eq!(tables.find(4096, |node| node == 3), None);
        assert_eq!(tables.find(64, |_| true), None);
    }

    #[test]
    fn what_is_entered_is_found_and_nothing_else() {
        let mut fine = Table::new(0);
        fine.set(70_001, 5);
        assert_eq!(
            (fine.get(70_001), fine.get(70_000), fine.get(1 << 30)),
            (5, NONE, NONE)
        );
        let mut coarse = Table::new(6);
        coarse.set(640, 7);
        assert_eq!(
            (
                coarse.get(640),
                coarse.get(703),
                coarse.get(704),
                coarse.get(1 << 30)
            ),
            (7, 7, NONE, NONE)
        );
    }
}
