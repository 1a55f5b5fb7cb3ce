//! The heap: placing, streams, remapping, faults, threads.

#![allow(clippy::unwrap_used, clippy::panic)]

mod alias;
mod capture;
mod end;
mod faults;
mod foreign;
mod hint;
mod hot;
mod lend;
mod oom;
mod program;
mod refusals;
mod regressions;
mod snapshot;
mod soak;
mod threads;
mod yard;
