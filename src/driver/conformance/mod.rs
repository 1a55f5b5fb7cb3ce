//! The driver contract as checks, for every driver and wrapper, also ones written elsewhere.
//!
//! ```
//! use std::sync::Arc;
//! use granule::driver::SharedDriver;
//! use granule::driver::conformance::CHECKS;
//! use granule::driver::sim::{SimConfig, SimDriver};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let driver: SharedDriver = Arc::new(SimDriver::new(SimConfig::default())?);
//! for check in CHECKS {
//!     (check.run)(&driver).map_err(|failure| format!("{}: {failure}", check.name))?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Checks assume that nobody else uses the driver meanwhile, clean up after themselves and
//! compare free memory before and after (not on CUDA, where other processes change it). None uses
//! more than a few dozen granules of the smallest size. A driver without
//! [`Capabilities::data`](super::Capabilities::data) is held to refuse reads, and to everything
//! else. Where CUDA's code for a refusal was not measured, a CUDA driver may answer any error;
//! the others answer the contract's. A check never panics; one that waits for work gives up after
//! ten seconds, but a driver whose sync never returns hangs it.

use std::fmt;

use super::{DriverError, SharedDriver};

/// Fails the check with a formatted text unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err($crate::driver::conformance::Failure::new(format!($($text)+)));
        }
    };
}

mod addresses;
mod captures;
mod data;
mod destructive;
mod events;
mod mapping;
mod rig;
mod streams;

/// What a check returns.
pub type Outcome<T = ()> = Result<T, Failure>;

/// Why a driver does not conform, in words and numbers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure(String);

impl Failure {
    /// A failure with that text.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failure {}

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Self {
        Self(format!("a call that must succeed: {error}"))
    }
}

/// One sentence of the contract.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// The sentence, as an identifier.
    pub name: &'static str,
    /// Tries it on a driver that nobody else uses meanwhile.
    pub run: fn(&SharedDriver) -> Outcome,
}

macro_rules! checks {
    ($($module:ident :: { $($name:ident),+ $(,)? }),+ $(,)?) => {
        &[$($(Check { name: stringify!($name), run: $module::$name }),+),+]
    };
}

/// Every check that leaves the device usable.
pub const CHECKS: &[Check] = checks! {
    addresses::{
        a_reservation_starts_at_a_multiple_of_its_alignment,
        reserve_refuses_bad_lengths,
        reserve_refuses_an_alignment_that_is_no_power_of_two,
        reservations_do_not_overlap,
        a_reservation_is_not_freed_in_part,
        a_reservation_is_freed_once,
        a_reservation_is_not_freed_while_mapped,
        create_refuses_bad_lengths,
        more_than_the_device_has_is_out_of_memory,
        created_bytes_are_counted,
        a_granule_is_released_once,
    },
    mapping::{
        part_of_a_granule_cannot_be_mapped,
        more_than_a_granule_cannot_be_mapped,
        a_mapping_starts_at_a_multiple_of_the_granularity,
        a_mapped_range_cannot_be_mapped_again,
        a_mapping_lies_inside_one_reservation,
        a_released_granule_cannot_be_mapped,
        access_covers_whole_mappings,
        access_refuses_gaps,
        access_changes_in_place,
        unmap_covers_whole_mappings,
        unmap_refuses_gaps,
        bad_lengths_of_access_and_unmap_are_refused,
        a_released_granule_lives_until_its_last_unmap,
        granules_of_different_lengths_lie_side_by_side,
        alias_sees_the_same_bytes,
        one_alias_may_go_while_another_stays,
        contents_survive_a_remap,
        fresh_memory_reads_zero,
        threads_map_at_once_in_one_reservation,
    },
    streams::{
        work_on_one_stream_runs_in_order,
        streams_have_no_order_of_their_own,
        the_default_stream_has_no_implicit_order,
        sync_waits_for_a_hold_that_ends_elsewhere,
        two_holds_end_in_any_order,
        spinning_keeps_a_stream_busy,
        a_destroyed_stream_finishes_its_work,
        stream_keys_differ_when_ids_are_used_again,
        memory_calls_do_not_wait_for_held_work,
    },
    events::{
        an_event_never_recorded_has_passed,
        an_event_passes_after_the_work_before_it,
        an_event_answers_for_its_last_record,
        a_wait_orders_two_streams,
        a_wait_is_for_the_record_before_it,
        a_wait_outlives_its_event,
    },
    captures::{
        captured_work_runs_when_the_graph_does,
        memory_calls_and_other_streams_leave_a_capture_whole,
        waits_of_the_host_for_a_captured_stream_are_refused,
        a_captured_stream_has_no_key_meanwhile,
        a_captured_stream_cannot_wait_for_others,
        a_record_on_a_captured_stream_never_passes,
        the_default_stream_and_a_captured_one_are_not_captured,
    },
    data::{
        reading_is_refused_without_data,
        fills_span_mappings,
        batches_copy_every_part_exactly,
        copies_span_mappings,
        odd_offsets_and_lengths_copy_exactly,
        host_copies_round_trip,
        a_host_slice_may_change_after_the_copy,
        a_written_pattern_checks_out,
        one_corrupt_byte_is_one_mismatch,
        read_sum_adds_up_the_words,
    },
};

/// Checks that may lose the device: for drivers that can be made anew. Each needs a fresh one.
pub const DESTRUCTIVE: &[Check] = checks! {
    destructive::{
        a_new_mapping_cannot_be_accessed,
        a_read_only_mapping_cannot_be_written,
        a_kernel_over_nothing_loses_the_device,
        unmapping_under_held_work_loses_the_device,
        a_lost_device_stays_lost,
        unknown_handles_are_refused,
    },
};
