//! The index of a line's free runs: by size for small blocks, by address for large ones.

use super::bins::Bins;
use super::first::FirstFit;
use super::runs::Node;

/// How free runs are found.
#[derive(Debug)]
pub enum Index {
    /// Good fit by size.
    Bins(Box<Bins>),
    /// Lowest address that fits.
    First(FirstFit),
}

impl Index {
    /// Adds a run.
    #[inline]
    pub fn insert(&mut self, nodes: &mut [Node], run: u32) {
        match self {
            Self::Bins(b) => b.insert(nodes, run),
            Self::First(f) => f.insert(nodes, run),
        }
    }

    /// Takes a run out.
    #[inline]
    pub fn remove(&mut self, nodes: &mut [Node], run: u32) {
        match self {
            Self::Bins(b) => b.remove(nodes, run),
            Self::First(f) => f.remove(nodes, run),
        }
    }

    /// Changes where a run starts and how long it is.
    #[inline]
    pub fn resize(&mut self, nodes: &mut [Node], run: u32, start: u32, len: u32) {
        match self {
            Self::Bins(b) => b.resize(nodes, run, start, len),
            Self::First(f) => f.resize(nodes, run, start, len),
        }
    }

    /// A run of at least `len` units.
    #[inline]
    pub fn find(&mut self, nodes: &[Node], len: u32) -> Option<u32> {
        match self {
            Self::Bins(b) => b.good_fit(nodes, len).or_else(|| b.deep_fit(nodes, len)),
            Self::First(f) => f.find(nodes, len),
        }
    }

    /// Calls `see` with every run of at least `len` units (and perhaps some a little shorter).
    pub fn each(&self, nodes: &[Node], len: u32, see: &mut dyn FnMut(u32)) {
        match self {
            Self::Bins(b) => b.each(nodes, len, see),
            Self::First(f) => f.each(nodes, len, see),
        }
    }
}
