//! The heap's books: what is live, what is free, what is mapped. No driver, no memory, no clock.
//!
//! A [`Lane`] has two lines of addresses: one for small blocks, one for the rest. Inside, places and lengths are
//! counted in units of 256 bytes (blocks) or pages of 2 MiB (granules) from the start of a line; bytes appear only
//! at the surface.

mod audit;
mod bins;
mod first;
mod granules;
mod index;
mod lane;
#[cfg(test)]
mod model;
mod place;
mod plan;
mod policy;
mod runs;
mod survey;
mod table;
mod tile;
mod trim;

pub use lane::{Block, Lane};
pub use plan::{OutOfMemory, Plan, Stale};
pub use policy::Policy;
pub use survey::Piece;
pub use trim::Idle;

/// Bytes in a unit: the least size and alignment of a block.
pub const UNIT: u64 = 256;
/// Bytes in a page, the grain of physical memory.
pub const PAGE_BYTES: u64 = 2 << 20;
/// Units in a page.
const PAGE: u32 = 8192;
/// No node, no granule.
const NONE: u32 = u32::MAX;
