//! Where memory of this crate meets other libraries: foreign streams, DLPack, cudarc.
//!
//! With the drivers and the C ABI, the only places with `unsafe`.

#![allow(unsafe_code)]

#[cfg(feature = "cudarc")]
pub mod cudarc;
pub mod dlpack;
mod streams;
