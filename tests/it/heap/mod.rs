//! The heap: placing, streams, remapping, faults, threads.

#![allow(clippy::unwrap_used, clippy::panic)]

mod alias;
mod faults;
mod hot;
mod program;
mod regressions;
mod threads;
mod yard;
