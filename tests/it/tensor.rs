//! Shapes, rows, copies and views.

use std::sync::Arc;

use granule::driver::{Call, DriverCode};
use granule::units::MIB;
use granule::{Error, Tensor};

use crate::support::{On, Rig, audit, small_granules};

fn shape_and_strides_follow_the_rows(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let tensor = Tensor::<f32>::new(&pool, &[3, 5], 100).unwrap();
    assert_eq!(
        (tensor.shape(), tensor.strides()),
        (vec![0, 3, 5], vec![15, 5, 1])
    );
    let ptr = tensor.ptr();
    tensor.grow(7).unwrap();
    assert_eq!((tensor.shape(), tensor.ptr()), (vec![7, 3, 5], ptr));
    assert_eq!(
        (tensor.rows(), tensor.max_rows(), tensor.row_bytes()),
        (7, 100, 60)
    );
    let some = tensor.rows_view(2..=4).unwrap();
    assert_eq!((some.shape(), some.elements()), (vec![3, 3, 5], 45));
    assert_eq!(some.ptr().get(), ptr.get() + 120);
    let vector = Tensor::<u8>::new(&pool, &[], 9).unwrap();
    vector.grow(9).unwrap();
    assert_eq!((vector.shape(), vector.strides()), (vec![9], vec![1]));
}

fn rows_survive_growth_and_shrinking(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(128 * MIB));
    let stream = rig.device.create_stream().unwrap();
    let mut tensor = Tensor::<u32>::new(&pool, &[1000], 20_000).unwrap();
    tensor.grow(10).unwrap();
    let rows: Vec<u32> = (0..10_000).collect();
    tensor.copy_from_host(0, &rows, &stream).unwrap();
    for to in [11, 1000, 20_000] {
        tensor.grow(to).unwrap();
    }
    tensor.copy_from_host(19_990, &rows, &stream).unwrap();
    for to in [9_000, 500, 10] {
        tensor.shrink(to).unwrap();
    }
    if rig.has_data() {
        let mut back = vec![0; 3000];
        tensor.copy_to_host(4, &mut back, &stream).unwrap();
        assert_eq!(back, rows[4000..7000]);
    }
    tensor.close().unwrap();
    audit(&pool);
    drop((pool, stream));
    rig.assert_nothing_left();
}

fn new_rows_are_zero_when_asked(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(128 * MIB));
    let stream = rig.device.create_stream().unwrap();
    let mut tensor = Tensor::<u64>::new(&pool, &[MIB / 8], 100).unwrap();
    tensor.grow(50).unwrap();
    rig.write(tensor.arena().range(), 1);
    tensor.truncate(20).unwrap();
    tensor.grow_zeroed(60, &stream).unwrap();
    stream.synchronize().unwrap();
    rig.check(tensor.rows_view(..20).unwrap().range(), 1);
    rig.check_zero(tensor.rows_view(20..).unwrap().range());
    tensor.zero(5..7, &stream).unwrap();
    stream.synchronize().unwrap();
    rig.check(tensor.rows_view(..5).unwrap().range(), 1);
    rig.check_zero(tensor.rows_view(5..7).unwrap().range());
}

fn a_failed_fill_leaves_the_rows_as_they_were(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(128 * MIB));
    let stream = rig.device.create_stream().unwrap();
    let mut tensor = Tensor::<u64>::new(&pool, &[MIB / 8], 100).unwrap();
    tensor.grow(5).unwrap();
    rig.write(tensor.arena().range(), 1);
    rig.fault.fail(Call::Fill, 1, DriverCode::UNKNOWN);
    tensor.grow_zeroed(60, &stream).unwrap_err();
    assert_eq!(tensor.rows(), 5);
    rig.check(tensor.view().range(), 1);
    tensor.grow_zeroed(60, &stream).unwrap();
    stream.synchronize().unwrap();
    rig.check_zero(tensor.rows_view(5..).unwrap().range());
}

fn a_view_stays_valid_while_the_tensor_grows(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(128 * MIB));
    let tensor = Tensor::<u64>::new(&pool, &[MIB / 8], 100).unwrap();
    tensor.grow(5).unwrap();
    let view = tensor.view();
    rig.write(view.range(), 1);
    tensor.grow(100).unwrap();
    rig.check(view.range(), 1);
    assert_eq!((view.shape()[0], view.ptr()), (5, tensor.ptr()));
}

fn a_shared_view_keeps_its_rows(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(128 * MIB));
    let tensor = Arc::new(Tensor::<u64>::new(&pool, &[MIB / 8], 100).unwrap());
    tensor.grow(50).unwrap();
    let view = tensor.shared_view(10..20).unwrap();
    rig.write(view.range(), 1);
    let refused = tensor.try_shrink(19).unwrap_err();
    let expected = Error::Pinned {
        asked: 19 * MIB,
        pinned_end: 20 * MIB,
        pins: 1,
    };
    assert_eq!(refused, expected);
    tensor.try_shrink(20).unwrap();
    drop((tensor, pool));
    rig.check(view.range(), 1);
    drop(view);
    rig.assert_nothing_left();
}

/// The stream of a copy is remembered, so that the drop waits for it.
fn dropping_waits_for_the_streams_that_were_used(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(128 * MIB));
    let stream = rig.device.create_stream().unwrap();
    let tensor = Tensor::<u64>::new(&pool, &[MIB / 8], 100).unwrap();
    tensor.grow(50).unwrap();
    let hold = stream.hold().unwrap();
    tensor.zero(.., &stream).unwrap();
    let releaser = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(20));
        drop(hold);
    });
    drop(tensor);
    releaser.join().unwrap();
    stream.synchronize().unwrap();
    drop((pool, stream));
    rig.assert_nothing_left();
}

on_each_driver! {
    shape_and_strides_follow_the_rows
    rows_survive_growth_and_shrinking
    new_rows_are_zero_when_asked
    a_failed_fill_leaves_the_rows_as_they_were
    a_view_stays_valid_while_the_tensor_grows
    a_shared_view_keeps_its_rows
    dropping_waits_for_the_streams_that_were_used
}
