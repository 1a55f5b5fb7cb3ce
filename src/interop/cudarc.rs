//! cudarc: our memory as its device pointers, allocated on its streams.
//!
//! The application chooses cudarc's CUDA version with one of its features, such as `cuda-13000`. Both libraries use the primary
//! context of a device, so pointers and streams of the one are valid in the other. With any of cudarc's libraries,
//! [`CudaView`] and [`CudaBlock`] take the place of a `CudaSlice`:
//!
//! ```no_run
//! use std::sync::Arc;
//! use cudarc::driver::CudaContext;
//! use granule::{Heap, HeapConfig, Pool, PoolConfig, Tensor, cudarc as ours};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let context = CudaContext::new(0)?;
//! let stream = context.new_stream()?;
//! let device = ours::device(&context)?;
//! let pool = Pool::new(&device, PoolConfig::default())?;
//!
//! let rows = Tensor::<f32>::new(&pool, &[256], 1_000_000)?;
//! rows.grow(100)?;
//! let mut view = ours::CudaView::new(rows.view(), &stream)?;
//! stream.memset_zeros(&mut view)?;
//!
//! let heap = Heap::new(&pool, HeapConfig::default())?;
//! let block = ours::alloc::<f32>(&heap, 1000, &stream)?;
//! let back: Vec<f32> = stream.clone_dtoh(&view)?;
//! # Ok(()) }
//! ```
//!
//! # Order
//!
//! A view has a home stream. As a `CudaSlice` does, it makes another stream wait for earlier writes before it is used there, and
//! for earlier reads too before it is written there, as far as the context manages that (it does by default, once there are several
//! streams). Memory is given back behind the home stream, which waits for the uses on others when the view is dropped. Whoever
//! turns cudarc's event tracking off orders uses on other streams before that by hand.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{
    CudaContext, CudaEvent, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice,
    DriverError as CudarcError, SyncOnDrop,
};

use super::streams::adopt;
use crate::driver::cuda::CudaDriver;
use crate::driver::{Call, DriverCode, DriverError, DriverKind};
use crate::stream::Stream;
use crate::tensor::{SharedView, TensorView};
use crate::units::VaRange;
use crate::{Block, Device, Error, Heap, Result};

fn failed(call: Call, error: CudarcError) -> Error {
    // The discriminant is libcuda's number.
    DriverError::new(call, DriverCode(error.0 as u32)).into()
}

/// The device of a context of cudarc.
///
/// # Errors
///
/// As [`Device::cuda`].
pub fn device(context: &CudaContext) -> Result<Device> {
    let ordinal = u32::try_from(context.ordinal()).unwrap_or(u32::MAX);
    Device::cuda(ordinal)
}

/// A stream of cudarc as ours. It lives as long as the answer and what remembers it.
///
/// # Errors
///
/// [`Error::Foreign`] if it is of another device or another context than its device's primary one, [`Error::Unsupported`] for a
/// driver other than CUDA, or a driver error.
pub fn stream(device: &Device, stream: &Arc<CudaStream>) -> Result<Stream> {
    let cuda = device.driver().as_any().downcast_ref::<CudaDriver>();
    let cuda = cuda.ok_or_else(|| Error::Unsupported {
        driver: device.kind(),
        feature: "streams of cudarc",
        why: format!("they are of {}", DriverKind::Cuda),
    })?;
    if stream.context().cu_ctx().expose_provenance() as u64 != cuda.context() {
        return Err(Error::Foreign {
            what: "stream",
            owner: "device",
        });
    }
    let raw = stream.cu_stream().expose_provenance() as u64;
    let keep: Arc<CudaStream> = stream.clone();
    // SAFETY: a stream of the device's primary context, destroyed with the last reference, of which one is kept.
    unsafe { adopt(device, raw, Some(keep)) }
}

/// The stream that memory belongs to, and the last uses on others.
struct Home {
    stream: Arc<CudaStream>,
    read: Option<CudaEvent>,
    write: Option<CudaEvent>,
}

impl Home {
    fn new(stream: &Arc<CudaStream>) -> Result<Self> {
        let event = || {
            let event = stream.context().new_event(None);
            event.map(Some).map_err(|e| failed(Call::CreateEvent, e))
        };
        Ok(Self {
            stream: stream.clone(),
            read: event()?,
            write: event()?,
        })
    }

    /// Makes a stream wait for uses so far; an event that was never recorded is none.
    fn wait(on: &CudaStream, event: Option<&CudaEvent>) {
        if let Some(event) = event
            && on.context().is_managing_stream_synchronization()
        {
            on.context().record_err(on.wait(event));
        }
    }

    fn reading<'a>(&'a self, on: &'a CudaStream) -> SyncOnDrop<'a> {
        Self::wait(on, self.write.as_ref());
        SyncOnDrop::record_event(&self.read, on)
    }

    fn writing<'a>(&'a self, on: &'a CudaStream) -> SyncOnDrop<'a> {
        Self::wait(on, self.read.as_ref());
        Self::wait(on, self.write.as_ref());
        SyncOnDrop::record_event(&self.write, on)
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        // What gives the memory back knows of this stream only.
        Self::wait(&self.stream, self.read.as_ref());
        Self::wait(&self.stream, self.write.as_ref());
    }
}

/// Rows of a tensor as a device pointer of cudarc: of a [`TensorView`] that is borrowed, or a [`SharedView`] that is not.
pub struct CudaView<T, V> {
    // Before the view: its streams are ordered first.
    home: Home,
    range: VaRange,
    _view: V,
    element: PhantomData<fn() -> T>,
}

/// A view of rows of a tensor.
pub trait Rows<T>: sealed::Sealed {
    #[doc(hidden)]
    fn parts(&self) -> (VaRange, &crate::Arena);
}

mod sealed {
    pub trait Sealed {}
    impl<T> Sealed for super::TensorView<'_, T> {}
    impl<T> Sealed for super::SharedView<T> {}
}

impl<T: Pod> Rows<T> for TensorView<'_, T> {
    fn parts(&self) -> (VaRange, &crate::Arena) {
        (self.range(), self.tensor().arena())
    }
}

impl<T: Pod> Rows<T> for SharedView<T> {
    fn parts(&self) -> (VaRange, &crate::Arena) {
        (self.range(), self.tensor().arena())
    }
}

impl<T: Pod, V: Rows<T>> CudaView<T, V> {
    /// The rows of a view, at home on `stream`, which the tensor remembers.
    ///
    /// # Errors
    ///
    /// As [`stream`], or a driver error.
    pub fn new(view: V, home: &Arc<CudaStream>) -> Result<Self> {
        let (range, arena) = view.parts();
        arena.record_use(&stream(arena.device(), home)?)?;
        Ok(Self {
            home: Home::new(home)?,
            range,
            _view: view,
            element: PhantomData,
        })
    }
}

/// A block of a heap as a device pointer of cudarc, freed behind its stream when dropped.
pub struct CudaBlock<T> {
    // Before the block: its streams are ordered first.
    home: Home,
    block: Block,
    element: PhantomData<fn() -> T>,
}

/// Room for `len` elements on a heap, for use on a stream of cudarc at once. What is in it is anything.
///
/// # Errors
///
/// [`Error::TooLarge`], else as [`stream`] and [`Heap::alloc`].
pub fn alloc<T: Pod>(heap: &Heap, len: usize, home: &Arc<CudaStream>) -> Result<CudaBlock<T>> {
    let bytes = (len as u64).checked_mul(size_of::<T>() as u64);
    let bytes = bytes.ok_or(Error::TooLarge {
        requested: len as u64,
        max: u64::MAX / (size_of::<T>() as u64).max(1),
    })?;
    let ours = stream(heap.pool().device(), home)?;
    Ok(CudaBlock {
        home: Home::new(home)?,
        block: heap.alloc_aligned(
            bytes,
            crate::DEFAULT_ALIGN.max(align_of::<T>() as u64),
            &ours,
        )?,
        element: PhantomData,
    })
}

impl<T> CudaBlock<T> {
    /// The block.
    #[must_use]
    pub fn block(&self) -> &Block {
        &self.block
    }
}

/// Elements in so many bytes.
fn elements<T>(bytes: u64) -> usize {
    usize::try_from(bytes / (size_of::<T>() as u64).max(1)).unwrap_or(usize::MAX)
}

impl<T, V> CudaView<T, V> {
    fn range(&self) -> VaRange {
        self.range
    }
}

impl<T> CudaBlock<T> {
    fn range(&self) -> VaRange {
        self.block.range()
    }
}

macro_rules! device_pointers {
    ($($type:ty, [$($generics:tt)*];)+) => {
        $(
            impl<$($generics)*> DeviceSlice<T> for $type {
                fn len(&self) -> usize {
                    elements::<T>(self.range().len())
                }

                fn stream(&self) -> &Arc<CudaStream> {
                    &self.home.stream
                }
            }

            impl<$($generics)*> DevicePtr<T> for $type {
                fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
                    (self.range().start().get(), self.home.reading(stream))
                }
            }

            impl<$($generics)*> DevicePtrMut<T> for $type {
                fn device_ptr_mut<'a>(
                    &'a mut self,
                    stream: &'a CudaStream,
                ) -> (CUdeviceptr, SyncOnDrop<'a>) {
                    (self.range().start().get(), self.home.writing(stream))
                }
            }

            impl<$($generics)*> fmt::Debug for $type {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    write!(f, "{} on {:?}", self.range(), self.home.stream)
                }
            }
        )+
    };
}

device_pointers! {
    CudaView<T, V>, [T, V];
    CudaBlock<T>, [T];
}
