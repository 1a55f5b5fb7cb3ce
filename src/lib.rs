//! GPU memory on CUDA's virtual memory calls.

pub mod driver;
mod error;
mod sync;
pub mod units;

pub use error::{Error, Limit, OutOfMemory, Result};
