//! The checked-in C header is what cbindgen makes of the sources.
//!
//! Runs under the `cbindgen` feature only: the build script has made the fresh one by then. To update the checked-in
//! file, run this test with `GRANULE_BLESS=1`.

#![cfg(feature = "cbindgen")]

use std::path::Path;

const FRESH: &str = include_str!(concat!(env!("OUT_DIR"), "/granule.h"));

#[test]
fn the_checked_in_header_is_fresh() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/capi/granule.h");
    if std::env::var_os("GRANULE_BLESS").is_some() {
        std::fs::write(path, FRESH).unwrap();
        return;
    }
    let checked_in = std::fs::read_to_string(path).unwrap();
    assert!(
        FRESH == checked_in,
        "src/capi/granule.h is stale; run this test with GRANULE_BLESS=1"
    );
}
