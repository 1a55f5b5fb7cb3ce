//! Recorded traces: read, run, recorded anew, and exported.

#[path = "../../../examples/support/replay.rs"]
mod core;
mod history;
mod read;
mod run;

use granule::trace::{self, ReadOptions, Trace, TraceError};

/// A snapshot of `tests/data`.
fn data(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/data/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(path).unwrap()
}

const SNAPSHOTS: [&str; 5] = [
    "snapshot_oom.pickle",
    "snapshot_2_1.pickle",
    "snapshot_2_11.pickle",
    "snapshot_wrapped.pickle",
    "snapshot_devices.pickle",
];

fn read(bytes: &[u8]) -> Result<Vec<Trace>, TraceError> {
    trace::read(bytes, &ReadOptions::default())
}
