//! Scale.
use crate::args::Args;
use crate::core::Outcome;
pub fn run(_: &Args) -> Outcome {
    Ok(())
}
