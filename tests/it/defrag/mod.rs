//! Movable blocks, and passes that make free memory contiguous.

mod faults;
mod passes;
mod yard;
