//! Capabilities, found by doing. Attribute bits say yes where virtual GPUs, WSL or containers then
//! refuse.

use super::CudaDriver;
use super::bindings::CUdevice_attribute;
use crate::driver::{Access, Capabilities, Driver, DriverResult, GranuleProps};
use crate::units::VaRange;

/// Tries each capability with one granule of the smallest size. Only a failure of the first, a
/// plain granule, is an error.
pub(super) fn capabilities(driver: &CudaDriver) -> DriverResult<Capabilities> {
    let granularity = driver.info().granularity;
    let room = driver.reserve(2 * granularity, 0)?;
    let found = try_all(driver, room);
    // Nothing is mapped in it any more, unless the driver refused to undo a mapping; then the
    // addresses stay reserved.
    let freed = driver.free_reservation(room);
    let found = found?;
    freed?;
    Ok(found)
}

fn try_all(driver: &CudaDriver, room: VaRange) -> DriverResult<Capabilities> {
    let halves: Vec<VaRange> = [0, room.len() / 2]
        .into_iter()
        .filter_map(|offset| room.sub(offset, room.len() / 2))
        .collect();
    let one = halves.get(..1).unwrap_or_default();

    try_granule(driver, one, GranuleProps::default(), false)?;
    let alias = try_granule(driver, &halves, GranuleProps::default(), false).is_ok();
    let exportable = GranuleProps {
        exportable: true,
        ..GranuleProps::default()
    };
    let exportable = try_granule(driver, one, exportable, true).is_ok();
    // Here the bit at least says no reliably. Where it says yes, the access may still fail.
    let bit = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
    let rdma = GranuleProps {
        rdma: true,
        ..GranuleProps::default()
    };
    let rdma = driver.core.attribute(bit).is_ok_and(|value| value != 0)
        && try_granule(driver, one, rdma, false).is_ok();
    Ok(Capabilities {
        vmm: true,
        alias,
        data: true,
        exportable,
        rdma,
    })
}

/// Creates a granule, opens it at each of `places`, and takes all of it back.
fn try_granule(
    driver: &CudaDriver,
    places: &[VaRange],
    props: GranuleProps,
    export: bool,
) -> DriverResult<()> {
    let phys = driver.create(driver.info().granularity, props)?;
    let mut first_error = Ok(());
    if export {
        first_error = driver.try_export(phys);
    }
    let mut mapped = Vec::with_capacity(places.len());
    for &place in places {
        first_error = first_error
            .and_then(|()| driver.map(place, phys))
            .and_then(|()| {
                mapped.push(place);
                driver.set_access(place, Access::ReadWrite)
            });
    }
    for place in mapped {
        first_error = first_error.and(driver.unmap(place));
    }
    first_error.and(driver.release(phys))
}
