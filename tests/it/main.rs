//! Integration tests: one binary, a module per subject.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "that is how a test fails, in its helpers too"
)]

/// Tests on a CUDA device take turns, whatever their subject: they compare its free memory, and some
/// name handles that another test could have got meanwhile.
static CUDA_TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[cfg(target_os = "linux")]
#[macro_use]
mod support;

#[cfg(target_os = "linux")]
mod arena;
#[cfg(target_os = "linux")]
mod bad_input;
#[cfg(all(target_os = "linux", feature = "capi"))]
mod capi;
#[cfg(target_os = "linux")]
mod clients;
mod conformance;
#[cfg(target_os = "linux")]
mod defrag;
#[cfg(target_os = "linux")]
mod faults;
#[cfg(target_os = "linux")]
mod heap;
#[cfg(target_os = "linux")]
mod pool;
#[cfg(target_os = "linux")]
mod pool_short;
#[cfg(target_os = "linux")]
mod properties;
#[cfg(target_os = "linux")]
mod regressions;
#[cfg(target_os = "linux")]
mod replay;
#[cfg(target_os = "linux")]
mod tensor;
