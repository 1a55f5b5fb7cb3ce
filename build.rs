//! Nothing to do yet.
fn main() {}
