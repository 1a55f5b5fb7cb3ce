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

#[cfg(test)]
mod tests {
    use super::*;

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
