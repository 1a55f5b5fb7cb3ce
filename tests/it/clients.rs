//! Memory shared with other libraries: foreign streams and DLPack.

#![allow(unsafe_code)]

use std::sync::Arc;

use granule::dlpack::{self, DataType, DlDevice, Layout, Legacy, Managed, Versioned, export};
use granule::driver::sim::SimConfig;
use granule::units::{MIB, Va};
use granule::{Device, Error, Heap, HeapConfig, Pool, PoolConfig, Tensor};

use crate::support::{On, Rig, small_granules};

on_each_driver! {
    a_foreign_stream_orders_memory_as_our_own
}

/// Streams of another library are the same stream each time they are named, and are not destroyed here.
fn a_foreign_stream_orders_memory_as_our_own(on: On) {
    let rig = Rig::new(on);
    let pool = rig.pool(small_granules(64 * MIB));
    let heap = Heap::new(&pool, HeapConfig::default()).unwrap();
    let theirs = rig.inner.create_stream().unwrap();
    // SAFETY: a stream of this device until the end of the test.
    let adopt = || unsafe { rig.device.adopt_stream(theirs.0) }.unwrap();
    let (first, second) = (adopt(), adopt());
    assert_eq!(first, second);
    assert_eq!(first.key(), rig.inner.stream_key(theirs).unwrap());
    let block = heap.alloc(3 * MIB, &first).unwrap();
    let address = block.ptr();
    rig.write(block.range(), 5);
    rig.check(block.range(), 5);
    drop(block);
    let again = heap.alloc(3 * MIB, &second).unwrap();
    assert_eq!(again.ptr(), address);
    // SAFETY: the default stream is one of every device.
    let default = unsafe { rig.device.adopt_stream(0) }.unwrap();
    assert_eq!(default, rig.device.default_stream().unwrap());
    again.record_use(&default).unwrap();
    drop((again, first, second, heap));
    rig.inner.sync_stream(theirs).unwrap();
    rig.inner.destroy_stream(theirs).unwrap();
    drop((pool, default));
    rig.assert_nothing_left();
}

fn host_pool() -> Pool {
    let device = Device::by_name("host").unwrap();
    Pool::new(&device, PoolConfig::with_budget(64 * MIB)).unwrap()
}

#[test]
fn an_exported_tensor_keeps_its_rows_mapped() {
    let pool = host_pool();
    let tensor = Arc::new(Tensor::<u16>::new(&pool, &[3, 4], 1000).unwrap());
    tensor.grow(20).unwrap();
    let view = tensor.shared_view(5..15).unwrap();
    let at = view.ptr();
    let exported: Managed<Legacy> = view.into_dlpack().unwrap();
    assert_eq!(exported.shape(), [10, 3, 4]);
    assert_eq!(exported.strides(), [12, 4, 1]);
    assert_eq!(
        (exported.ptr(), exported.dtype()),
        (at, DataType::scalar(1, 16))
    );
    assert_eq!(exported.device().device_type, DlDevice::CPU);
    assert!(exported.is_dense() && !exported.is_read_only());
    assert!(matches!(tensor.try_shrink(10), Err(Error::Pinned { .. })));
    // Consumed by somebody else, on another thread.
    let raw = exported.into_raw() as usize;
    let consumer = std::thread::spawn(move || {
        let raw = std::ptr::with_exposed_provenance_mut::<Legacy>(raw);
        // SAFETY: exported above and consumed only here.
        drop(unsafe { Managed::from_raw(raw) }.unwrap());
    });
    consumer.join().unwrap();
    tensor.try_shrink(10).unwrap();
}

#[test]
fn an_exported_tensor_outlives_everything_else() {
    let pool = host_pool();
    let tensor = Arc::new(Tensor::<f32>::new(&pool, &[8], 1000).unwrap());
    tensor.grow(100).unwrap();
    let stream = pool.device().create_stream().unwrap();
    tensor.copy_from_host(99, &[2.5; 8], &stream).unwrap();
    let exported: Managed<Versioned> = tensor.shared_view(..).unwrap().into_dlpack().unwrap();
    drop((tensor, pool, stream));
    let last = exported.ptr().get() + 99 * 32;
    // SAFETY: memory of the host driver, kept mapped by the exported tensor.
    let value = unsafe { *std::ptr::with_exposed_provenance::<f32>(last as usize) };
    assert_eq!(value, 2.5);
}

#[test]
fn what_makes_no_tensor_is_refused() {
    let layout = Layout {
        ptr: Va::new(4096),
        device: DlDevice {
            device_type: DlDevice::CPU,
            device_id: 0,
        },
        dtype: DataType::scalar(2, 32),
        shape: vec![2, 0, 5],
        strides: None,
        read_only: true,
    };
    let empty: Managed<Versioned> = export(layout.clone(), ()).unwrap();
    assert!(empty.is_read_only() && empty.is_dense());
    assert_eq!(empty.strides(), [5, 5, 1]);
    let scalar = Layout {
        shape: vec![],
        ..layout.clone()
    };
    let scalar: Managed<Legacy> = export(scalar, ()).unwrap();
    assert_eq!((scalar.shape(), scalar.strides()), (&[][..], vec![]));
    let short = Layout {
        strides: Some(vec![1]),
        ..layout.clone()
    };
    assert!(matches!(
        export::<Legacy>(short, ()),
        Err(Error::Shape { .. })
    ));
    let negative = Layout {
        shape: vec![-1],
        ..layout
    };
    assert!(matches!(
        export::<Legacy>(negative, ()),
        Err(Error::Shape { .. })
    ));
    // SAFETY: null is refused.
    let null = unsafe { Managed::<Legacy>::from_raw(std::ptr::null_mut()) };
    assert!(matches!(null, Err(Error::Shape { .. })));

    let device = Device::sim(SimConfig::default()).unwrap();
    let pool = Pool::new(&device, PoolConfig::with_budget(64 * MIB)).unwrap();
    let tensor = Arc::new(Tensor::<f32>::new(&pool, &[8], 1000).unwrap());
    let view = tensor.shared_view(..).unwrap();
    let refused = view.into_dlpack::<dlpack::Legacy>();
    assert!(
        matches!(refused, Err(Error::Unsupported { .. })),
        "{refused:?}"
    );
}
