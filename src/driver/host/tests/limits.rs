//! The kernel's limit on mappings.

use super::*;

const ALONE: &str = "GRANULE_TEST_ALONE_IN_PROCESS";

/// Uses up `vm.max_map_count`, so it runs alone in a process of its own.
#[test]
fn running_out_of_mappings_is_out_of_memory_and_changes_nothing() {
    let name = "driver::host::tests::limits::exhaust_mappings";
    let test = std::env::current_exe().unwrap();
    let status = std::process::Command::new(test)
        .args(["--exact", name, "--ignored", "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&status.stdout);
    assert!(
        status.status.success() && text.contains("1 passed"),
        "{text}"
    );
}

#[test]
#[ignore = "run by running_out_of_mappings_is_out_of_memory_and_changes_nothing"]
fn exhaust_mappings() {
    const PAGE: u64 = 4096;
    const N: u64 = 200_000;
    if std::env::var_os(ALONE).is_none() {
        return;
    }
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    if limit.trim().parse::<u64>().unwrap() > N / 2 || memory::page_size() != PAGE {
        println!("skipped: the limit on mappings is {limit}");
        return;
    }
    let d = HostDriver::new(HostConfig {
        granularity: PAGE,
        total_memory: GIB,
        ..HostConfig::default()
    })
    .unwrap();
    let range = d.reserve(N * PAGE, 0).unwrap();
    let at = |i: u64| range.sub(i * PAGE, PAGE).unwrap();
    let phys = d.create(PAGE, PLAIN).unwrap();
    // The same page everywhere: no two mappings can be merged. In steps, so that a whole lot of
    // mappings is set at once near the limit.
    let mut n = 0;
    let error = loop {
        match d.map(at(n), phys) {
            Ok(()) => n += 1,
            Err(e) => break e,
        }
    };
    assert_eq!(error.code, C::OUT_OF_MEMORY);
    assert!(n > 1000);
    assert_eq!(d.live().mappings as u64, n);
    // Undoing works at the limit, and changes of rights do.
    let mid = range.sub(7 * PAGE, 9 * PAGE).unwrap();
    d.set_access(mid, Access::ReadWrite).unwrap();
    d.unmap(mid).unwrap();
    refused(d.unmap(mid), C::INVALID_VALUE);
    d.set_access(at(2), Access::ReadWrite).unwrap();
    assert_eq!(d.live().mappings as u64, n - 9);
    d.unmap(range.sub(16 * PAGE, (n - 16) * PAGE).unwrap())
        .unwrap();
    // A reservation given back makes room again.
    for i in 0..16 {
        let _ = d.unmap(at(i));
    }
    d.free_reservation(range).unwrap();
    let range = d.reserve(N * PAGE, 0).unwrap();
    let at = |i: u64| range.sub(i * PAGE, PAGE).unwrap();
    d.map(at(0), phys).unwrap();
    d.set_access(at(0), Access::ReadWrite).unwrap();
    d.fill(at(0), 9, DEFAULT).unwrap();
    assert!(all(&d, at(0), 9));

    // Granules that follow each other in the file and in memory become one mapping of the kernel's
    // while their rights are equal. Rights for every second one split it until the limit.
    let wide = d.reserve(N * PAGE, 0).unwrap();
    let many = 100_000;
    for i in 0..many {
        let phys = d.create(PAGE, PLAIN).unwrap();
        d.map(wide.sub(i * PAGE, PAGE).unwrap(), phys).unwrap();
    }
    let one = |i: u64| wide.sub(i * PAGE, PAGE).unwrap();
    let whole = wide.sub(0, many * PAGE).unwrap();
    d.set_access(whole, Access::ReadWrite).unwrap();
    // And groups of a granule from elsewhere in the file and two that become one mapping.
    let groups = (1..9).map(|i| many + 10 * i);
    for group in groups.clone() {
        d.map(one(group), phys).unwrap();
        for i in 1..3 {
            let phys = d.create(PAGE, PLAIN).unwrap();
            d.map(one(group + i), phys).unwrap();
        }
        let group = wide.sub(group * PAGE, 3 * PAGE).unwrap();
        d.set_access(group, Access::ReadWrite).unwrap();
    }
    let limit = (0..many)
        .step_by(2)
        .find(|i| d.set_access(one(*i), Access::Read).is_err())
        .unwrap();
    // The kernel's calls stop within a few mappings of each other.
    let kept = (limit + 1..many)
        .step_by(2)
        .find(|i| d.unmap(one(*i)).is_err())
        .unwrap();
    refused(d.set_access(one(kept), Access::Read), C::OUT_OF_MEMORY);
    refused(d.unmap(one(kept)), C::OUT_OF_MEMORY);
    // The first mapping of a pair can change, the second would have to be split: neither did.
    let pair = |group: u64| wide.sub(group * PAGE, 2 * PAGE).unwrap();
    let stray = groups
        .clone()
        .find(|group| d.set_access(pair(*group), Access::Read).is_err())
        .unwrap();
    refused(d.set_access(pair(stray), Access::Read), C::OUT_OF_MEMORY);
    for i in [kept, many - 1, stray, stray + 1, stray + 2] {
        d.fill(one(i), 1, DEFAULT).unwrap();
    }
    d.sync_stream(DEFAULT).unwrap();
}
