//! The host driver against its contract. Pages as granules keep the memory small; every test has a
//! device of its own.

use DriverCode as C;

use super::*;

mod limits;
mod streams;

const G: u64 = 64 * KIB;
const DEFAULT: StreamId = StreamId::DEFAULT;
const PLAIN: GranuleProps = GranuleProps {
    exportable: false,
    rdma: false,
};

fn device() -> HostDriver {
    HostDriver::new(HostConfig {
        total_memory: 1024 * G,
        granularity: G,
        address_space: 4096 * G,
        ordinal: 3,
    })
    .unwrap()
}

/// `n` granules from the `from`-th on.
fn part(range: VaRange, from: u64, n: u64) -> VaRange {
    range.sub(from * G, n * G).unwrap()
}

/// A reservation of `n` granules, with one granule of one unit in each place.
fn mapped(d: &HostDriver, n: u64) -> (VaRange, Vec<PhysId>) {
    let range = d.reserve(n * G, 0).unwrap();
    let granules = (0..n)
        .map(|i| {
            let phys = d.create(G, PLAIN).unwrap();
            d.map(part(range, i, 1), phys).unwrap();
            phys
        })
        .collect();
    d.set_access(range, Access::ReadWrite).unwrap();
    (range, granules)
}

fn read(d: &HostDriver, range: VaRange) -> Vec<u8> {
    let mut bytes = vec![0xAA; range.len() as usize];
    d.copy_to_host(&mut bytes, range, DEFAULT).unwrap();
    bytes
}

fn all(d: &HostDriver, range: VaRange, byte: u8) -> bool {
    read(d, range).iter().all(|b| *b == byte)
}

#[track_caller]
fn refused<T: fmt::Debug>(result: DriverResult<T>, code: DriverCode) {
    assert_eq!(result.unwrap_err().code, code);
}

#[test]
fn an_alias_shows_the_same_bytes() {
    let d = device();
    let (range, _) = mapped(&d, 2);
    let other = d.reserve(2 * G, 0).unwrap();
    let phys = d.create(2 * G, PLAIN).unwrap();
    d.unmap(range).unwrap();
    d.map(range, phys).unwrap();
    d.map(other, phys).unwrap();
    d.set_access(range, Access::ReadWrite).unwrap();
    d.set_access(other, Access::Read).unwrap();
    let bytes: Vec<u8> = (0..2 * G).map(|i| (i * 7) as u8).collect();
    d.copy_from_host(range.start(), &bytes, DEFAULT).unwrap();
    assert_eq!(read(&d, other), bytes);
    d.fill(range.sub(5, 10).unwrap(), 9, DEFAULT).unwrap();
    assert!(all(&d, other.sub(5, 10).unwrap(), 9));
}

#[test]
fn bytes_survive_being_unmapped_and_mapped_elsewhere() {
    let d = device();
    let (range, granules) = mapped(&d, 3);
    for i in 0..3 {
        d.fill(part(range, i, 1), i as u8 + 1, DEFAULT).unwrap();
    }
    d.sync_stream(DEFAULT).unwrap();
    d.unmap(range).unwrap();
    for (i, phys) in granules.iter().rev().enumerate() {
        d.map(part(range, i as u64, 1), *phys).unwrap();
    }
    d.set_access(range, Access::Read).unwrap();
    for i in 0..3 {
        assert!(all(&d, part(range, i, 1), 3 - i as u8));
    }
}

#[test]
fn fresh_memory_reads_zero_even_where_an_old_granule_was() {
    let d = device();
    let range = d.reserve(G, 0).unwrap();
    let mut ids = Vec::new();
    for _ in 0..5 {
        let phys = d.create(G, PLAIN).unwrap();
        d.map(range, phys).unwrap();
        d.release(phys).unwrap();
        d.set_access(range, Access::ReadWrite).unwrap();
        assert!(all(&d, range, 0));
        d.fill(range, 0xFF, DEFAULT).unwrap();
        d.sync_stream(DEFAULT).unwrap();
        d.unmap(range).unwrap();
        ids.push(phys);
    }
    ids.dedup();
    assert_eq!(ids.len(), 5, "ids are not used again");
}

#[test]
fn pages_go_back_to_the_system_with_the_last_reference() {
    let d = device();
    let (range, granules) = mapped(&d, 8);
    assert_eq!(d.resident_bytes(), 0);
    d.fill(range, 1, DEFAULT).unwrap();
    d.sync_stream(DEFAULT).unwrap();
    assert_eq!(d.resident_bytes(), 8 * G);
    for phys in &granules {
        d.release(*phys).unwrap();
    }
    assert_eq!(d.resident_bytes(), 8 * G, "still mapped");
    d.unmap(part(range, 0, 4)).unwrap();
    assert_eq!(d.resident_bytes(), 4 * G);
    d.unmap(part(range, 4, 4)).unwrap();
    assert_eq!(d.resident_bytes(), 0);
    assert_eq!(d.memory_info().unwrap().free, 1024 * G);
}

#[test]
fn memory_is_counted_while_created_or_mapped() {
    let d = device();
    let free = || d.memory_info().unwrap().free / G;
    let (range, granules) = mapped(&d, 2);
    assert_eq!(free(), 1022);
    d.release(granules[0]).unwrap();
    assert_eq!(free(), 1022);
    d.unmap(range).unwrap();
    assert_eq!(free(), 1023);
    refused(d.create(1024 * G, PLAIN), C::OUT_OF_MEMORY);
    d.create(1023 * G, PLAIN).unwrap();
    refused(d.create(G, PLAIN), C::OUT_OF_MEMORY);
}

#[test]
fn reservations_are_aligned_bounded_and_freed_as_they_were_made() {
    let d = device();
    for align in [0, 1, G, 16 * MIB, GIB] {
        let range = d.reserve(3 * G, align).unwrap();
        assert!(range.start().is_aligned(align.max(G)));
        assert_eq!(range.len(), 3 * G);
    }
    refused(d.reserve(0, 0), C::INVALID_VALUE);
    refused(d.reserve(G + 1, 0), C::INVALID_VALUE);
    refused(d.reserve(G, 3 * G), C::INVALID_VALUE);
    refused(d.reserve(4082 * G, 0), C::OUT_OF_MEMORY);
    refused(d.reserve(u64::MAX - G + 1, 0), C::OUT_OF_MEMORY);
    refused(d.reserve(G, 1 << 63), C::OUT_OF_MEMORY);
    let range = d.reserve(4081 * G, 0).unwrap();
    refused(d.free_reservation(part(range, 0, 1)), C::INVALID_VALUE);
    refused(d.free_reservation(part(range, 1, 4080)), C::INVALID_VALUE);
    let phys = d.create(G, PLAIN).unwrap();
    d.map(part(range, 9, 1), phys).unwrap();
    refused(d.free_reservation(range), C::INVALID_VALUE);
    d.unmap(part(range, 9, 1)).unwrap();
    d.free_reservation(range).unwrap();
    refused(d.free_reservation(range), C::INVALID_VALUE);
}

#[test]
fn the_default_address_space_can_be_reserved_at_once() {
    let d = HostDriver::new(HostConfig::default()).unwrap();
    assert_eq!(d.info().granularity, 2 * MIB);
    assert!(d.info().total_memory >= GIB);
    let range = d.reserve(16 * TIB, 2 * MIB).unwrap();
    refused(d.reserve(2 * MIB, 0), C::OUT_OF_MEMORY);
    d.free_reservation(range).unwrap();
}

#[test]
fn wrong_creations_are_refused() {
    let d = device();
    refused(d.create(0, PLAIN), C::INVALID_VALUE);
    refused(d.create(G / 2, PLAIN), C::INVALID_VALUE);
    refused(d.create(u64::MAX - G + 1, PLAIN), C::OUT_OF_MEMORY);
    let rdma = GranuleProps {
        rdma: true,
        ..PLAIN
    };
    refused(d.create(G, rdma), C::NOT_SUPPORTED);
    let phys = d.create(G, PLAIN).unwrap();
    d.release(phys).unwrap();
    refused(d.release(phys), C::INVALID_VALUE);
    refused(d.release(PhysId(99)), C::INVALID_VALUE);
}

#[test]
fn a_granule_is_mapped_whole_into_a_free_place_of_one_reservation() {
    let d = device();
    let range = d.reserve(8 * G, 0).unwrap();
    let two = d.create(2 * G, PLAIN).unwrap();
    refused(d.map(part(range, 0, 1), two), C::NOT_SUPPORTED);
    refused(d.map(part(range, 0, 3), two), C::INVALID_VALUE);
    refused(d.map(range.sub(0, 0).unwrap(), two), C::INVALID_VALUE);
    refused(d.map(range.sub(0, G + 8).unwrap(), two), C::INVALID_VALUE);
    refused(
        d.map(range.sub(4096, 2 * G).unwrap(), two),
        C::INVALID_VALUE,
    );
    refused(d.map(part(range, 0, 2), PhysId(77)), C::INVALID_VALUE);
    let past = VaRange::new(part(range, 7, 1).start(), 2 * G).unwrap();
    refused(d.map(past, two), C::INVALID_VALUE);
    d.map(part(range, 2, 2), two).unwrap();
    for from in 1..=3 {
        refused(d.map(part(range, from, 2), two), C::INVALID_VALUE);
    }
    d.map(part(range, 4, 2), two).unwrap();
    d.release(two).unwrap();
    refused(d.map(part(range, 6, 2), two), C::INVALID_VALUE);
    assert_eq!(d.live().mappings, 2);
}

#[test]
fn access_and_unmap_cover_whole_mappings_without_a_gap() {
    let d = device();
    let range = d.reserve(8 * G, 0).unwrap();
    let two = d.create(2 * G, PLAIN).unwrap();
    for at in [0, 2, 6] {
        d.map(part(range, at, 2), two).unwrap();
    }
    for (from, n) in [
        (0, 1),
        (1, 1),
        (1, 2),
        (0, 3),
        (0, 6),
        (0, 8),
        (4, 2),
        (4, 4),
    ] {
        let wrong = part(range, from, n);
        refused(d.set_access(wrong, Access::Read), C::INVALID_VALUE);
        refused(d.unmap(wrong), C::INVALID_VALUE);
    }
    let empty = range.sub(0, 0).unwrap();
    refused(d.set_access(empty, Access::Read), C::INVALID_VALUE);
    refused(d.unmap(empty), C::INVALID_VALUE);
    d.set_access(part(range, 0, 4), Access::ReadWrite).unwrap();
    d.set_access(part(range, 2, 2), Access::Read).unwrap();
    d.unmap(part(range, 0, 4)).unwrap();
    d.unmap(part(range, 6, 2)).unwrap();
    refused(d.unmap(part(range, 6, 2)), C::INVALID_VALUE);
}

#[test]
fn wrong_configurations_say_what_is_wrong() {
    for (granularity, total_memory) in [(0, GIB), (3 * MIB, GIB), (512, GIB), (MIB, MIB - 1)] {
        let config = HostConfig {
            granularity,
            total_memory,
            ..HostConfig::default()
        };
        let error = HostDriver::new(config).unwrap_err();
        assert!(matches!(error, Error::InvalidConfig { .. }), "{error}");
    }
}

#[test]
fn errors_name_the_call_and_the_range() {
    let d = device();
    let range = d.reserve(G, 0).unwrap();
    let error = d.unmap(range).unwrap_err();
    assert_eq!(error.call, Call::Unmap);
    assert_eq!((error.at, error.len), (range.start().get(), G));
}

#[test]
fn a_forked_child_is_told_so_and_leaves_the_memory_alone() {
    let mut d = device();
    let (range, granules) = mapped(&d, 1);
    Arc::get_mut(&mut d.shared).unwrap().space.pretend_forked();
    refused(d.create(G, PLAIN), C::NOT_INITIALIZED);
    refused(d.unmap(range), C::NOT_INITIALIZED);
    refused(d.release(granules[0]), C::NOT_INITIALIZED);
    refused(d.sync_stream(DEFAULT), C::NOT_INITIALIZED);
    refused(d.stream_key(DEFAULT), C::NOT_INITIALIZED);
    drop(d);
    // The kernel still lists the mapping (which this test leaks).
    let start = format!("{:x}-", range.start().get());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.lines().any(|line| line.starts_with(&start)));
}
