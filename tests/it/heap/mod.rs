//! The heap: placing, streams, remapping, faults, threads.

#![allow(clippy::unwrap_used, clippy::panic)]

mod alias;
mod faults;
mod program;
mod regressions;
mod soak;
mod threads;
mod yard;
