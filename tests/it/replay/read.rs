//! Every format is read as it is meant, and everything else is refused with its place.

use granule::trace::{
    self, Event, EventKind, LineFault, PickleFault, Place, ReadOptions, Trace, TraceError,
};
use granule::units::MIB;

use super::{SNAPSHOTS, data, read};

/// Slots are taken and freed in turn; the bytes live at the end.
#[track_caller]
fn live_at_end(trace: &Trace) -> u64 {
    let mut live = vec![None; trace.slots as usize];
    let (mut sum, mut peak) = (0, 0);
    for event in &trace.events {
        match event.kind {
            EventKind::Alloc { slot, bytes, .. } => {
                assert_eq!(live[slot as usize].replace(bytes), None);
                sum += bytes;
                peak = peak.max(sum);
            }
            EventKind::Free { slot, .. } => sum -= live[slot as usize].take().unwrap(),
            _ => {}
        }
    }
    assert_eq!(peak, trace.peak);
    sum
}

fn fault(text: &str) -> (u64, LineFault) {
    match read(text.as_bytes()).unwrap_err() {
        TraceError::Line { line, fault } => (line, fault),
        other => panic!("{other:?}"),
    }
}

#[test]
fn snapshots_of_every_version_add_up() {
    for name in SNAPSHOTS {
        for trace in read(&data(name)).unwrap() {
            live_at_end(&trace);
            assert_eq!(
                trace.notes.unknown_frees + trace.notes.replaced,
                0,
                "{name}"
            );
            assert!(trace.recorded_peak.unwrap() >= trace.peak, "{name}");
            let times: Vec<u64> = trace.events.iter().map(|event| event.time_us).collect();
            assert!(times.is_sorted(), "{name}");
        }
    }
}

#[test]
fn what_was_live_before_a_ring_begins_is_allocated_first() {
    let traces = read(&data("snapshot_wrapped.pickle")).unwrap();
    let trace = &traces[0];
    assert!(trace.notes.initial > 20);
    let first = trace
        .events
        .iter()
        .skip(1)
        .take(trace.notes.initial as usize);
    assert!(
        first
            .into_iter()
            .all(|e| matches!(e.kind, EventKind::Alloc { .. }))
    );
    let plain = read(&data("snapshot_2_1.pickle")).unwrap();
    assert_eq!(plain[0].notes.initial, 0);
}

#[test]
fn devices_streams_and_shortages_are_kept_apart() {
    let traces = read(&data("snapshot_devices.pickle")).unwrap();
    let devices: Vec<u32> = traces.iter().map(|trace| trace.device).collect();
    assert_eq!(devices, [0, 2]);
    let traces = read(&data("snapshot_2_11.pickle")).unwrap();
    assert_eq!(traces[0].streams, [0, 0x55D5_C0DE_0010]);
    let short = traces[0].events.last().unwrap().kind;
    let (bytes, free) = (64 * MIB, 24 * MIB);
    assert_eq!(short, EventKind::OutOfMemory { bytes, free });
}

#[test]
fn the_log_of_rmm_is_read() {
    let log = "Thread,Time,Action,Pointer,Size,Stream\n\
        1,15:47:02:841961,allocate,0x7f00,1024,0\r\n\
        1,15:47:02.841971,allocate,0x8f00,2048,0x55d0\n\
        1,15:47:03.000001,allocate failure,(nil),99,0\n\
        1,15:47:03.000001,free,0x7f00,1024,0x55d0\n";
    let traces = read(log.as_bytes()).unwrap();
    let trace = &traces[0];
    assert_eq!(
        (trace.peak, trace.slots, live_at_end(trace)),
        (3072, 2, 2048)
    );
    assert_eq!(trace.streams, [0, 0x55D0]);
    let last = trace.events[3];
    let kind = EventKind::Free { slot: 0, stream: 1 };
    let time_us = 56_823_000_001;
    assert_eq!(last, Event { time_us, kind });
    let header = "Thread,Time,Action,Pointer,Size,Stream\n";
    assert_eq!(
        fault(&format!("{header}1,1:2:3.4,grow,0x1,5,0")),
        (2, LineFault::Action)
    );
    let (found, expected) = (2, 6);
    assert_eq!(
        fault(&format!("{header}\n1,2")),
        (3, LineFault::Fields { found, expected })
    );
    assert_eq!(
        fault(&format!("{header}1,1:2:3.4,free,0x1,5,0")),
        (2, LineFault::UnknownId { id: 1 })
    );
}

#[test]
fn wrong_lines_are_named_by_number() {
    let (found, expected) = (4, 5);
    let field = "bytes";
    assert_eq!(
        fault("#\na,1,2,3"),
        (2, LineFault::Fields { found, expected })
    );
    assert_eq!(
        fault("a,1,-7,0,0"),
        (1, LineFault::Negative { field, value: -7 })
    );
    assert_eq!(fault("a,1,7e,0,0"), (1, LineFault::Number { field }));
    assert_eq!(
        fault("a,1,99999999999999999999,0,0"),
        (1, LineFault::Number { field })
    );
    assert_eq!(
        fault("a,1,7,0,0\n\nf,2,0"),
        (3, LineFault::UnknownId { id: 2 })
    );
    assert_eq!(
        fault("a,1,7,0,0\na,1,7,0,0"),
        (2, LineFault::LiveId { id: 1 })
    );
    assert_eq!(fault("alloc,1,7,0,0"), (1, LineFault::Kind));
    assert_eq!(fault("x"), (1, LineFault::Kind));
    let max = u64::MAX;
    assert_eq!(
        fault(&format!("a,1,{max},0,0\na,2,1,0,0")),
        (2, LineFault::Overflow)
    );
    let long = format!("a,1,1,0,0\n{}", "#".repeat(5000));
    assert_eq!(fault(&long), (2, LineFault::TooLong { limit: 4096 }));
    let wrong = read(b"a,1,1,0,0\n\xff\n").unwrap_err();
    assert!(matches!(
        wrong,
        TraceError::Line {
            line: 2,
            fault: LineFault::NotText
        }
    ));
    assert!(matches!(read(b""), Err(TraceError::Empty)));
    assert!(matches!(read(b"# nothing\n"), Err(TraceError::NoEvents)));
    assert!(matches!(
        read(&[0x1f, 0x8b, 8]),
        Err(TraceError::Compressed)
    ));
}

#[test]
fn lenient_reading_counts_what_it_leaves_out() {
    let options = ReadOptions {
        lenient: true,
        ..ReadOptions::default()
    };
    let text = "f,9,0\na,1,10,0,1\na,1,30,0,2\nf,1,3\nf,1,4\n";
    let traces = trace::read(text.as_bytes(), &options).unwrap();
    let notes = traces[0].notes;
    assert_eq!((notes.unknown_frees, notes.replaced), (2, 1));
    assert_eq!((traces[0].peak, live_at_end(&traces[0])), (30, 0));
}

#[test]
fn a_truncated_archive_says_where_it_ends() {
    let whole = data("segmentation_head.csv.gz");
    let file = std::env::temp_dir().join(format!("granule-cut-{}.csv.gz", std::process::id()));
    std::fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    let cut = super::core::open(&file, &ReadOptions::default()).unwrap_err();
    std::fs::remove_file(&file).unwrap();
    assert!(
        matches!(cut, TraceError::Io { at, .. } if at > 1000),
        "{cut}"
    );
}

#[test]
fn limits_hold() {
    let options = ReadOptions {
        events: 10,
        memory: 4096,
        ..ReadOptions::default()
    };
    let lines: String = (0..20).map(|i| format!("a,{i},1,0,0\n")).collect();
    let place = Place::Line(11);
    let error = trace::read(lines.as_bytes(), &options).unwrap_err();
    assert!(matches!(error, TraceError::TooMuch { limit: 10, place: p, .. } if p == place));
    let error = trace::read(&data("snapshot_2_1.pickle")[..], &options).unwrap_err();
    assert!(matches!(
        error,
        TraceError::TooMuch {
            limit: 4096,
            place: Place::Byte(_),
            ..
        }
    ));
    // Endless text that is refused with a line's worth of memory, not kept.
    let endless = std::io::BufReader::new(std::io::repeat(b'a'));
    let error = trace::read(endless, &options).unwrap_err();
    assert!(matches!(error, TraceError::Line { line: 1, .. }));
    // Lists in lists, each of them twice the one before, take nothing: they are names.
    let mut bomb = b"\x80\x04]\x94".to_vec();
    (0..200).for_each(|_| bomb.extend_from_slice(b"(h\x00h\x00e"));
    bomb.push(b'.');
    assert!(matches!(read(&bomb), Err(TraceError::Snapshot { .. })));
}

#[test]
fn no_pickle_runs_anything() {
    let at_fault = |bytes: &[u8]| match read(bytes).unwrap_err() {
        TraceError::Pickle { at, fault } => (at, fault),
        other => panic!("{other:?}"),
    };
    let (name, code) = ("GLOBAL", b'c');
    let shell = b"\x80\x04cos\nsystem\nX\x04\x00\x00\x00true\x85R.";
    assert_eq!(at_fault(shell), (2, PickleFault::Foreign { name, code }));
    let (name, code) = ("STACK_GLOBAL", 0x93);
    let stack = b"\x80\x04\x8c\x02os\x8c\x06system\x93.";
    assert_eq!(at_fault(stack), (14, PickleFault::Foreign { name, code }));
    for code in [
        b'R', b'b', b'i', b'o', b'P', b'Q', 0x81, 0x82, 0x83, 0x84, 0x92,
    ] {
        let (at, fault) = at_fault(&[0x80, 4, b'N', b'N', code, b'.']);
        assert!(
            matches!(fault, PickleFault::Foreign { code: c, .. } if c == code),
            "{fault}"
        );
        assert_eq!(at, 4);
    }
    assert_eq!(
        at_fault(b"\x80\x01."),
        (0, PickleFault::Protocol { version: 1 })
    );
    assert_eq!(at_fault(b"\x80\x04]"), (3, PickleFault::Truncated));
    assert_eq!(
        at_fault(b"\x80\x04X\xff\xff\xff\xffab"),
        (2, PickleFault::Truncated)
    );
    assert_eq!(at_fault(b"\x80\x04a"), (2, PickleFault::Stack));
    assert_eq!(at_fault(b"\x80\x04K\x01K\x02a"), (6, PickleFault::Kind));
    assert_eq!(
        at_fault(b"\x80\x04h\x07"),
        (2, PickleFault::Memo { index: 7 })
    );
    let far = u32::MAX.into();
    assert_eq!(
        at_fault(b"\x80\x04Nr\xff\xff\xff\xff"),
        (3, PickleFault::Memo { index: far })
    );
    assert_eq!(
        at_fault(b"\x80\x04\x8a\x20"),
        (2, PickleFault::Integer { bytes: 32 })
    );
    assert_eq!(
        at_fault(b"\x80\x04I7\n."),
        (2, PickleFault::Unknown { code: b'I' })
    );
}

#[test]
fn pickles_that_are_no_snapshot_are_told_apart() {
    let what = |bytes: &[u8]| match read(bytes).unwrap_err() {
        TraceError::Snapshot { what, why, nth, .. } => (what, why, nth),
        other => panic!("{other:?}"),
    };
    assert_eq!(what(b"\x80\x04K\x01."), ("type", "not a dict", 0));
    assert_eq!(what(b"\x80\x04}."), ("device_traces", "missing", 0));
    let text = |text: &str| {
        let mut bytes = vec![0x8c, text.len() as u8];
        bytes.extend_from_slice(text.as_bytes());
        bytes
    };
    let event = |size: &[u8]| {
        let mut all = b"\x80\x04}".to_vec();
        all.extend(text("device_traces"));
        all.extend_from_slice(b"]](}(");
        for (key, value) in [
            ("action", text("alloc")),
            ("addr", b"K\x10".to_vec()),
            ("size", size.to_vec()),
        ] {
            all.extend(text(key));
            all.extend(value);
        }
        all.extend_from_slice(b"ueas.");
        all
    };
    assert_eq!(read(&event(b"K\x09")).unwrap()[0].peak, 9);
    assert_eq!(
        what(&event(b"J\xff\xff\xff\xff")),
        ("size", "below zero", 0)
    );
    assert_eq!(what(&event(b"N")), ("size", "missing", 0));
    assert_eq!(
        what(&event(b"G\0\0\0\0\0\0\0\0")),
        ("size", "not an integer", 0)
    );
    let none = b"\x80\x04}\x8c\x08segments]s.";
    assert!(matches!(read(none), Err(TraceError::NoEvents)));
}

#[test]
fn every_prefix_and_thousands_of_changes_end_with_an_answer() {
    let options = ReadOptions {
        events: 10_000,
        memory: 8 << 20,
        ..ReadOptions::default()
    };
    let mut state = 7u64;
    let mut random = move |n: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) as usize % n
    };
    for name in SNAPSHOTS {
        let whole = data(name);
        for end in (0..whole.len()).step_by(97) {
            assert!(
                trace::read(&whole[..end], &options).is_err(),
                "{name} up to {end}"
            );
        }
        for _ in 0..300 {
            let mut changed = whole.clone();
            for _ in 0..=random(4) {
                let at = random(changed.len());
                match random(3) {
                    0 => changed[at] = random(256) as u8,
                    1 => drop(
                        changed.drain(at..(at + random(40)).min(whole.len()).min(changed.len())),
                    ),
                    _ => changed.insert(at, random(256) as u8),
                }
            }
            if let Ok(traces) = trace::read(&changed[..], &options) {
                for trace in &traces {
                    live_at_end(trace);
                }
            }
        }
    }
}
