//! The checked-in bindings are what bindgen makes of the installed `cuda.h`.
//!
//! Runs under the `bindgen` feature only: the build script has made the fresh ones by then. To update
//! the checked-in file after a change of the wrapper or of the header, run this test with
//! `GRANULE_BLESS=1`.

#![cfg(feature = "bindgen")]

use std::path::Path;

const FRESH: &str = include_str!(concat!(env!("OUT_DIR"), "/bindings.rs"));
const CHECKED_IN: &str = include_str!("../src/driver/cuda/bindings.rs");

fn cuda_version(bindings: &str) -> Option<&str> {
    let (_, rest) = bindings.split_once("pub const CUDA_VERSION: u32 = ")?;
    Some(rest.split_once(';')?.0)
}

/// The text without what formatters differ in.
fn tokens(bindings: &str) -> String {
    let kept = |c: &char| !c.is_whitespace() && *c != ',';
    bindings.chars().filter(kept).collect()
}

#[test]
fn the_checked_in_bindings_are_fresh() {
    if std::env::var_os("GRANULE_BLESS").is_some() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/driver/cuda/bindings.rs");
        std::fs::write(path, FRESH).unwrap();
        return;
    }
    let (fresh, checked_in) = (cuda_version(FRESH), cuda_version(CHECKED_IN));
    assert!(fresh.is_some() && checked_in.is_some());
    if fresh != checked_in {
        println!("skipped: cuda.h is {fresh:?}, the checked-in bindings are of {checked_in:?}");
        return;
    }
    assert!(
        tokens(FRESH) == tokens(CHECKED_IN),
        "bindings.rs is stale; run this test with GRANULE_BLESS=1"
    );
}
