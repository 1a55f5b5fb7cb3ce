//! Advice.
use crate::args::{Args, Model};
use crate::core::Outcome;
use granule::trace::Trace;
pub fn for_trace(_: &Args, _: &str, _: &Trace) -> Outcome {
    Ok(())
}
pub fn for_model(_: &Args, _: &Model) -> Outcome {
    Ok(())
}
