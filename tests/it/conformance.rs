//! Every driver and every wrapper passes the conformance suite: one test per check and driver.

mod liar;

use std::error::Error;
use std::sync::Arc;

use granule::driver::conformance::{CHECKS, Check, DESTRUCTIVE};
use granule::driver::fault::FaultDriver;
use granule::driver::record::RecordDriver;
use granule::driver::sim::{SimConfig, SimDriver};
use granule::driver::{Call, DriverCode, SharedDriver};

type Outcome = Result<(), Box<dyn Error>>;

fn all() -> impl Iterator<Item = &'static Check> {
    CHECKS.iter().chain(DESTRUCTIVE)
}

fn run(name: &str, driver: SharedDriver) -> Outcome {
    let check = all().find(|check| check.name == name);
    let check = check.ok_or_else(|| format!("there is no check {name}"))?;
    (check.run)(&driver).map_err(|failure| format!("{name}: {failure}").into())
}

/// One test per name, on a driver of its own from `$make`.
macro_rules! one_test_each {
    ($make:expr; $($name:ident)+) => {
        $(
            #[test]
            fn $name() -> super::Outcome {
                super::run(stringify!($name), $make?)
            }
        )+
    };
}

/// The names of `CHECKS`, handed on; `no_check_is_missing` compares.
macro_rules! checks {
    ($to:ident! $($first:tt)*) => {
        $to! { $($first)*;
            a_reservation_starts_at_a_multiple_of_its_alignment
            reserve_refuses_bad_lengths
            reserve_refuses_an_alignment_that_is_no_power_of_two
            reservations_do_not_overlap
            a_reservation_is_not_freed_in_part
            a_reservation_is_freed_once
            a_reservation_is_not_freed_while_mapped
            create_refuses_bad_lengths
            more_than_the_device_has_is_out_of_memory
            created_bytes_are_counted
            a_granule_is_released_once
            part_of_a_granule_cannot_be_mapped
            more_than_a_granule_cannot_be_mapped
            a_mapping_starts_at_a_multiple_of_the_granularity
            a_mapped_range_cannot_be_mapped_again
            a_mapping_lies_inside_one_reservation
            a_released_granule_cannot_be_mapped
            access_covers_whole_mappings
            access_refuses_gaps
            access_changes_in_place
            unmap_covers_whole_mappings
            unmap_refuses_gaps
            bad_lengths_of_access_and_unmap_are_refused
            a_released_granule_lives_until_its_last_unmap
            granules_of_different_lengths_lie_side_by_side
            alias_sees_the_same_bytes
            one_alias_may_go_while_another_stays
            contents_survive_a_remap
            fresh_memory_reads_zero
            threads_map_at_once_in_one_reservation
            work_on_one_stream_runs_in_order
            streams_have_no_order_of_their_own
            the_default_stream_has_no_implicit_order
            sync_waits_for_a_hold_that_ends_elsewhere
            two_holds_end_in_any_order
            spinning_keeps_a_stream_busy
            a_destroyed_stream_finishes_its_work
            stream_keys_differ_when_ids_are_used_again
            memory_calls_do_not_wait_for_held_work
            an_event_never_recorded_has_passed
            an_event_passes_after_the_work_before_it
            an_event_answers_for_its_last_record
            a_wait_orders_two_streams
            a_wait_is_for_the_record_before_it
            a_wait_outlives_its_event
            captured_work_runs_when_the_graph_does
            memory_calls_and_other_streams_leave_a_capture_whole
            waits_of_the_host_for_a_captured_stream_are_refused
            a_captured_stream_has_no_key_meanwhile
            a_captured_stream_cannot_wait_for_others
            a_record_on_a_captured_stream_never_passes
            the_default_stream_and_a_captured_one_are_not_captured
            reading_is_refused_without_data
            fills_span_mappings
            batches_copy_every_part_exactly
            copies_span_mappings
            odd_offsets_and_lengths_copy_exactly
            host_copies_round_trip
            a_host_slice_may_change_after_the_copy
            a_written_pattern_checks_out
            one_corrupt_byte_is_one_mismatch
            read_sum_adds_up_the_words
        }
    };
}

/// The names of `DESTRUCTIVE`, handed on.
macro_rules! destructive {
    ($to:ident! $($first:tt)*) => {
        $to! { $($first)*;
            a_new_mapping_cannot_be_accessed
            a_read_only_mapping_cannot_be_written
            a_kernel_over_nothing_loses_the_device
            unmapping_under_held_work_loses_the_device
            a_lost_device_stays_lost
            unknown_handles_are_refused
        }
    };
}

/// A module of tests for a driver that can be made anew for each.
macro_rules! suite {
    ($module:ident, $make:expr) => {
        mod $module {
            use super::*;
            checks!(one_test_each! $make);
            destructive!(one_test_each! $make);
        }
    };
}

macro_rules! names {
    (; $($name:ident)+) => {
        [$(stringify!($name)),+]
    };
}

#[test]
fn no_check_is_missing() {
    let listed: Vec<&str> = checks!(names!)
        .into_iter()
        .chain(destructive!(names!))
        .collect();
    let known: Vec<&str> = all().map(|check| check.name).collect();
    assert_eq!(listed, known);
}

type Made = Result<SharedDriver, granule::Error>;

fn make_sim() -> Made {
    // With races looked for, so that the suite also runs through the detector.
    let config = SimConfig {
        races: true,
        ..SimConfig::default()
    };
    Ok(Arc::new(SimDriver::new(config)?))
}

fn fault(inner: Made) -> Made {
    Ok(Arc::new(FaultDriver::new(inner?)))
}

fn record(inner: Made) -> Made {
    Ok(Arc::new(RecordDriver::with_log(inner?, 64)))
}

suite!(sim, make_sim());
suite!(fault_over_sim, fault(make_sim()));
suite!(record_over_sim, record(make_sim()));
suite!(record_over_fault_over_sim, record(fault(make_sim())));

#[cfg(target_os = "linux")]
fn make_host() -> Made {
    use granule::driver::host::{HostConfig, HostDriver};
    Ok(Arc::new(HostDriver::new(HostConfig::default())?))
}

#[cfg(target_os = "linux")]
suite!(host, make_host());
#[cfg(target_os = "linux")]
suite!(fault_over_host, fault(make_host()));
#[cfg(target_os = "linux")]
suite!(record_over_host, record(make_host()));

/// Tests take turns: some name handles and addresses that were given back, which another test could
/// have got meanwhile.
mod cuda {
    use granule::driver::cuda::CudaDriver;

    fn run(name: &str) -> super::Outcome {
        let _turn = crate::CUDA_TURN.lock();
        super::run(name, std::sync::Arc::new(CudaDriver::open(0)?))
    }

    macro_rules! gpu_tests {
        (; $($name:ident)+) => {
            $(
                #[test]
                #[ignore = "needs a CUDA device; run with --include-ignored"]
                fn $name() -> super::Outcome {
                    run(stringify!($name))
                }
            )+
        };
    }
    checks!(gpu_tests!);
}

#[test]
fn the_suite_notices_a_call_that_fails_for_no_reason() -> Outcome {
    for &call in Call::ALL.iter().filter(|&&call| call != Call::Init) {
        let mut noticed = 0;
        for check in CHECKS {
            let faulty = Arc::new(FaultDriver::new(make_sim()?));
            faulty.fail_from(call, 1, DriverCode::UNKNOWN);
            let driver: SharedDriver = faulty;
            noticed += usize::from((check.run)(&driver).is_err());
        }
        assert!(noticed > 0, "no check notices that {call} always fails");
    }
    Ok(())
}
