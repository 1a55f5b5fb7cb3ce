//! Integration tests: one binary, a module per subject.

#[cfg(target_os = "linux")]
#[macro_use]
mod support;

mod conformance;
#[cfg(target_os = "linux")]
mod heap;
