//! Drivers that break one promise each: the suite must notice, by the check meant for it.

use std::any::Any;
use std::sync::Arc;

use granule::driver::conformance::CHECKS;
use granule::driver::{
    Access, DeviceInfo, Driver, DriverCode, DriverKind, DriverResult, EventId, GranuleProps, Graph,
    Hold, Kernel, MemoryInfo, PhysId, SharedDriver, StreamId, StreamKey,
};
use granule::units::{Va, VaRange};

use super::{Made, Outcome};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lie {
    None,
    AlignmentIsIgnored,
    LengthsAreRoundedUp,
    ReleaseDoesNothing,
    PartsAreMappedWhole,
    RefusedAccessIsAccepted,
    RefusedUnmapIsAccepted,
    FailedUnmapTakesTheFirstUnit,
    WaitsDoNothing,
    QueriesAreAlwaysTrue,
    SyncReturnsAtOnce,
    AllStreamsAreOne,
    KeysAreIds,
    FillsStopEarly,
    CopiesStopEarly,
    HoldsDoNothing,
    CorruptionIsOverlooked,
}

#[derive(Debug)]
struct Liar {
    inner: SharedDriver,
    lie: Lie,
}

impl Liar {
    fn on(&self, stream: StreamId) -> StreamId {
        match self.lie {
            Lie::AllStreamsAreOne => StreamId::DEFAULT,
            _ => stream,
        }
    }

    fn pardon(&self, lie: Lie, result: DriverResult<()>) -> DriverResult<()> {
        match result {
            Err(e) if self.lie == lie && e.code == DriverCode::INVALID_VALUE => Ok(()),
            result => result,
        }
    }

    fn shortened(&self, lie: Lie, range: VaRange) -> VaRange {
        let short = range.sub(0, range.len().saturating_sub(1));
        short.filter(|_| self.lie == lie).unwrap_or(range)
    }
}

macro_rules! forward {
    ($($name:ident($($arg:ident: $type:ty),*) -> $answer:ty;)+) => {
        $(
            fn $name(&self, $($arg: $type),*) -> DriverResult<$answer> {
                self.inner.$name($($arg),*)
            }
        )+
    };
}

impl Driver for Liar {
    fn kind(&self) -> DriverKind {
        self.inner.kind()
    }

    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }

    forward! {
        memory_info() -> MemoryInfo;
        free_reservation(range: VaRange) -> ();
        create_stream() -> StreamId;
        destroy_stream(stream: StreamId) -> ();
        create_event() -> EventId;
        destroy_event(event: EventId) -> ();
        sync_event(event: EventId) -> ();
        begin_capture(stream: StreamId) -> ();
        end_capture(stream: StreamId) -> Graph;
        is_capturing(stream: StreamId) -> bool;
        copy_from_host(dst: Va, src: &[u8], stream: StreamId) -> ();
        copy_to_host(dst: &mut [u8], src: VaRange, stream: StreamId) -> ();
    }

    fn reserve(&self, len: u64, align: u64) -> DriverResult<VaRange> {
        let ignore = self.lie == Lie::AlignmentIsIgnored;
        self.inner.reserve(len, if ignore { 0 } else { align })
    }

    fn create(&self, len: u64, props: GranuleProps) -> DriverResult<PhysId> {
        let unit = self.info().granularity;
        let round = self.lie == Lie::LengthsAreRoundedUp;
        let up = len.checked_next_multiple_of(unit).filter(|_| round);
        self.inner.create(up.unwrap_or(len), props)
    }

    fn release(&self, phys: PhysId) -> DriverResult<()> {
        match self.lie {
            Lie::ReleaseDoesNothing => Ok(()),
            _ => self.inner.release(phys),
        }
    }

    fn map(&self, range: VaRange, phys: PhysId) -> DriverResult<()> {
        match self.inner.map(range, phys) {
            Err(e)
                if self.lie == Lie::PartsAreMappedWhole && e.code == DriverCode::NOT_SUPPORTED =>
            {
                Ok(())
            }
            result => result,
        }
    }

    fn set_access(&self, range: VaRange, access: Access) -> DriverResult<()> {
        let result = self.inner.set_access(range, access);
        self.pardon(Lie::RefusedAccessIsAccepted, result)
    }

    fn unmap(&self, range: VaRange) -> DriverResult<()> {
        let result = self.inner.unmap(range);
        if self.lie == Lie::FailedUnmapTakesTheFirstUnit && result.is_err() {
            let unit = self.info().granularity;
            for part in (1..4).filter_map(|n| range.sub(0, n * unit)) {
                let _ = self.inner.unmap(part);
            }
        }
        self.pardon(Lie::RefusedUnmapIsAccepted, result)
    }

    fn stream_key(&self, stream: StreamId) -> DriverResult<StreamKey> {
        match self.lie {
            Lie::KeysAreIds => Ok(StreamKey(stream.0)),
            _ => self.inner.stream_key(stream),
        }
    }

    fn sync_stream(&self, stream: StreamId) -> DriverResult<()> {
        match self.lie {
            Lie::SyncReturnsAtOnce => Ok(()),
            _ => self.inner.sync_stream(self.on(stream)),
        }
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        self.inner.record_event(event, self.on(stream))
    }

    fn query_event(&self, event: EventId) -> DriverResult<bool> {
        let passed = self.inner.query_event(event)?;
        Ok(passed || self.lie == Lie::QueriesAreAlwaysTrue)
    }

    fn wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()> {
        match self.lie {
            Lie::WaitsDoNothing => Ok(()),
            _ => self.inner.wait_event(self.on(stream), event),
        }
    }

    fn fill(&self, range: VaRange, byte: u8, stream: StreamId) -> DriverResult<()> {
        let range = self.shortened(Lie::FillsStopEarly, range);
        self.inner.fill(range, byte, self.on(stream))
    }

    fn copy(&self, dst: Va, src: VaRange, stream: StreamId) -> DriverResult<()> {
        let src = self.shortened(Lie::CopiesStopEarly, src);
        self.inner.copy(dst, src, self.on(stream))
    }

    fn launch(&self, kernel: Kernel, stream: StreamId) -> DriverResult<()> {
        match kernel {
            Kernel::CheckPattern { .. } if self.lie == Lie::CorruptionIsOverlooked => Ok(()),
            kernel => self.inner.launch(kernel, self.on(stream)),
        }
    }

    fn hold(&self, stream: StreamId) -> DriverResult<Hold> {
        match self.lie {
            Lie::HoldsDoNothing => Ok(Hold::new(|| {})),
            _ => self.inner.hold(self.on(stream)),
        }
    }
}

/// The checks that fail on a driver with that lie.
fn noticed(inner: Made, lie: Lie, only: &[&str]) -> Result<Vec<&'static str>, granule::Error> {
    let inner = inner?;
    let driver: SharedDriver = Arc::new(Liar { inner, lie });
    let chosen = CHECKS
        .iter()
        .filter(|check| only.is_empty() || only.contains(&check.name));
    let failed = chosen.filter(|check| (check.run)(&driver).is_err());
    Ok(failed.map(|check| check.name).collect())
}

/// What each lie must be noticed by, on a driver without data too.
const BOOKKEEPING: &[(Lie, &str)] = &[
    (
        Lie::AlignmentIsIgnored,
        "reserve_refuses_an_alignment_that_is_no_power_of_two",
    ),
    (Lie::LengthsAreRoundedUp, "create_refuses_bad_lengths"),
    (Lie::ReleaseDoesNothing, "created_bytes_are_counted"),
    (
        Lie::PartsAreMappedWhole,
        "part_of_a_granule_cannot_be_mapped",
    ),
    (Lie::RefusedAccessIsAccepted, "access_refuses_gaps"),
    (Lie::RefusedUnmapIsAccepted, "unmap_covers_whole_mappings"),
    (Lie::FailedUnmapTakesTheFirstUnit, "unmap_refuses_gaps"),
    (Lie::WaitsDoNothing, "a_wait_orders_two_streams"),
    (
        Lie::QueriesAreAlwaysTrue,
        "an_event_answers_for_its_last_record",
    ),
    (
        Lie::SyncReturnsAtOnce,
        "sync_waits_for_a_hold_that_ends_elsewhere",
    ),
    (
        Lie::KeysAreIds,
        "stream_keys_differ_when_ids_are_used_again",
    ),
    (Lie::HoldsDoNothing, "work_on_one_stream_runs_in_order"),
];

/// What only a driver with data can be caught at.
#[cfg(target_os = "linux")]
const DATA: &[(Lie, &str)] = &[
    (Lie::FillsStopEarly, "fills_span_mappings"),
    (Lie::CopiesStopEarly, "copies_span_mappings"),
    (
        Lie::CorruptionIsOverlooked,
        "one_corrupt_byte_is_one_mismatch",
    ),
];

fn all_noticed(make: fn() -> Made, lies: &[(Lie, &str)]) -> Outcome {
    for &(lie, name) in lies {
        let honest = noticed(make(), Lie::None, &[name])?;
        assert_eq!(honest, [""; 0], "an honest driver fails");
        let found = noticed(make(), lie, &[name])?;
        assert_eq!(found, [name], "{lie:?} goes unnoticed");
    }
    Ok(())
}

#[test]
fn the_suite_catches_lies_about_books_and_order() -> Outcome {
    all_noticed(super::make_sim, BOOKKEEPING)
}

#[cfg(target_os = "linux")]
#[test]
fn the_suite_catches_lies_of_a_driver_with_data() -> Outcome {
    all_noticed(super::make_host, BOOKKEEPING)?;
    all_noticed(super::make_host, DATA)
}

/// One queue behind all streams keeps every promise about order on a stream, and none about
/// streams being apart. The check waits its ten seconds for work beside a held stream.
#[test]
fn the_suite_catches_streams_that_are_one() -> Outcome {
    let name = "streams_have_no_order_of_their_own";
    let found = noticed(super::make_sim(), Lie::AllStreamsAreOne, &[name])?;
    assert_eq!(found, [name]);
    Ok(())
}

#[test]
fn an_honest_driver_passes_them_all() -> Outcome {
    let found = noticed(super::make_sim(), Lie::None, &[])?;
    assert_eq!(found, [""; 0]);
    Ok(())
}
