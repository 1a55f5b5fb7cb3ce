//! The C ABI: what `libgranule.so` exports with the feature `capi`. The header is `src/capi/granule.h`; this is
//! where it is generated from, and compared with in CI.
//!
//! Every function answers with a [status](GRANULE_OK); what went wrong is then told by
//! [`granule_last_error`], for each thread by itself. Objects are named by handles, integers that carry a
//! generation and a kind: one that was closed, or is of another kind, is [`GRANULE_STALE`] and never anything
//! else's. No panic crosses. Rules about streams, blocking and order are those of the Rust items that the functions
//! stand for.

#![allow(unsafe_code, non_camel_case_types)]

mod arena;
mod conf;
mod device;
mod dlpack;
mod error;
mod handle;
mod heap;
mod json;
mod scopes;
mod torch;
mod torch_site;

pub use arena::*;
pub use conf::{Conf, ConfError};
pub use device::*;
pub use dlpack::*;
pub use error::*;
pub use heap::*;
pub use torch::*;
