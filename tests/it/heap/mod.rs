//! The heap: placing, streams, remapping, faults, threads.

mod alias;
mod faults;
mod program;
mod regressions;
mod threads;
mod yard;
