//! DLPack: tensors handed to and taken from other libraries without a copy, in the legacy form and the
//! versioned one.
//!
//! The structures are those of DLPack 1.1 (`dlpack.h`), as C lays them out. [`Managed`] owns one of them:
//! dropping it calls the producer's deleter, as a consumer has to, and [`Managed::into_raw`] passes it on,
//! in Python inside of a capsule named `dltensor` or `dltensor_versioned`.
//!
//! # Example
//!
//! ```
//! use std::sync::Arc;
//! use granule::{Device, Pool, PoolConfig, Tensor, dlpack, units::MIB};
//!
//! let device = Device::by_name("host")?;
//! let pool = Pool::new(&device, PoolConfig::with_budget(64 * MIB))?;
//! let tensor = Arc::new(Tensor::<f32>::new(&pool, &[16], 1000)?);
//! tensor.grow(10)?;
//! let exported: dlpack::Managed<dlpack::Versioned> = tensor.shared_view(..)?.into_dlpack()?;
//! let raw = exported.into_raw();
//! // SAFETY: made by the line above and not consumed yet.
//! let imported = unsafe { dlpack::Managed::from_raw(raw) }?;
//! assert_eq!((imported.ptr(), imported.shape()), (tensor.ptr(), &[10, 16][..]));
//! # Ok::<(), granule::Error>(())
//! ```

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use bytemuck::Pod;

use crate::driver::DriverKind;
use crate::tensor::SharedView;
use crate::units::Va;
use crate::{Device, Error, Result};

/// The version of the structures here.
pub const VERSION: Version = Version { major: 1, minor: 1 };

/// Flag of [`Versioned`]: consumers must not write.
pub const FLAG_READ_ONLY: u64 = 1;

/// Which kind of device memory is on, and its number. `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DlDevice {
    /// [`CPU`](Self::CPU), [`CUDA`](Self::CUDA) or another of DLPack's numbers.
    pub device_type: i32,
    /// Number of the device.
    pub device_id: i32,
}

impl DlDevice {
    /// Memory of the host.
    pub const CPU: i32 = 1;
    /// A CUDA device.
    pub const CUDA: i32 = 2;

    /// The device as DLPack names it.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for a driver without memory.
    pub fn of(device: &Device) -> Result<Self> {
        let (device_type, id) = match device.kind() {
            DriverKind::Cuda => (Self::CUDA, device.info().ordinal),
            // Real memory of this process, at the same addresses.
            DriverKind::Host => (Self::CPU, 0),
            driver => {
                return Err(Error::Unsupported {
                    driver,
                    feature: "DLPack",
                    why: "there is no memory behind its addresses".to_owned(),
                });
            }
        };
        Ok(Self {
            device_type,
            device_id: i32::try_from(id).unwrap_or(i32::MAX),
        })
    }
}

/// Type of an element. `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DataType {
    /// 0 signed, 1 unsigned, 2 float, 4 bfloat, 5 complex, 6 bool.
    pub code: u8,
    /// Bits of an element, or of one lane.
    pub bits: u8,
    /// Lanes of a vector; 1 for a scalar.
    pub lanes: u16,
}

impl DataType {
    /// A scalar type.
    #[must_use]
    pub const fn scalar(code: u8, bits: u8) -> Self {
        Self {
            code,
            bits,
            lanes: 1,
        }
    }

    /// Bytes of an element, rounded up.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        (self.bits as u64 * self.lanes as u64).div_ceil(8)
    }
}

/// Rust types that DLPack has a name for.
pub trait Element: Pod {
    /// DLPack's name.
    const TYPE: DataType;
}

macro_rules! elements {
    ($($type:ty: $code:literal $bits:literal,)+) => {
        $(impl Element for $type {
            const TYPE: DataType = DataType::scalar($code, $bits);
        })+
    };
}

elements! {
    i8: 0 8, i16: 0 16, i32: 0 32, i64: 0 64,
    u8: 1 8, u16: 1 16, u32: 1 32, u64: 1 64,
    f32: 2 32, f64: 2 64,
}

/// A strided array. `DLTensor`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DlTensor {
    /// Start of the memory.
    pub data: *mut c_void,
    /// Where it is.
    pub device: DlDevice,
    /// Number of dimensions.
    pub ndim: i32,
    /// Type of an element.
    pub dtype: DataType,
    /// Elements of each dimension.
    pub shape: *mut i64,
    /// Elements between neighbours in each dimension; null for a dense row-major array.
    pub strides: *mut i64,
    /// Bytes from `data` to the first element.
    pub byte_offset: u64,
}

/// Version of the structures. `DLPackVersion`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Version {
    /// Structures of another major version cannot be read.
    pub major: u32,
    /// Additions.
    pub minor: u32,
}

/// The legacy form. `DLManagedTensor`.
#[repr(C)]
#[derive(Debug)]
pub struct Legacy {
    /// The array.
    pub dl_tensor: DlTensor,
    /// The producer's.
    pub manager_ctx: *mut c_void,
    /// Called once by the consumer when it is done.
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// The versioned form. `DLManagedTensorVersioned`.
#[repr(C)]
#[derive(Debug)]
pub struct Versioned {
    /// Version of what follows.
    pub version: Version,
    /// The producer's.
    pub manager_ctx: *mut c_void,
    /// Called once by the consumer when it is done.
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
    /// [`FLAG_READ_ONLY`] and others.
    pub flags: u64,
    /// The array.
    pub dl_tensor: DlTensor,
}

// As `dlpack.h` lays them out where pointers have 64 bits.
#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<DlTensor>() == 48);
    assert!(size_of::<Legacy>() == 64);
    assert!(size_of::<Versioned>() == 80);
    assert!(std::mem::offset_of!(Versioned, dl_tensor) == 32);
};

/// One of the two forms.
pub trait Form: sealed::Sealed + Sized + 'static {
    #[doc(hidden)]
    fn build(array: DlTensor, flags: u64, ctx: *mut c_void) -> Self;
    #[doc(hidden)]
    fn array(&self) -> &DlTensor;
    #[doc(hidden)]
    fn check(&self) -> Result<()>;
    #[doc(hidden)]
    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)>;
    /// Flags of the versioned form; 0 for the legacy one, which has none.
    fn flags(&self) -> u64;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Legacy {}
    impl Sealed for super::Versioned {}
}

impl Form for Legacy {
    fn build(dl_tensor: DlTensor, _: u64, manager_ctx: *mut c_void) -> Self {
        Self {
            dl_tensor,
            manager_ctx,
            deleter: Some(delete::<Self>),
        }
    }

    fn array(&self) -> &DlTensor {
        &self.dl_tensor
    }

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }

    fn flags(&self) -> u64 {
        0
    }
}

impl Form for Versioned {
    fn build(dl_tensor: DlTensor, flags: u64, manager_ctx: *mut c_void) -> Self {
        Self {
            version: VERSION,
            manager_ctx,
            deleter: Some(delete::<Self>),
            flags,
            dl_tensor,
        }
    }

    fn array(&self) -> &DlTensor {
        &self.dl_tensor
    }

    fn check(&self) -> Result<()> {
        match self.version.major {
            major if major == VERSION.major => Ok(()),
            major => Err(Error::InvalidConfig {
                what: "major version of a DLPack tensor",
                value: u64::from(major),
                why: "it is another than 1, so nothing else in it can be read",
            }),
        }
    }

    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }

    fn flags(&self) -> u64 {
        self.flags
    }
}

/// What an exported tensor points into; the structure is its first field, so that the pointer to the one
/// is the pointer to the other.
#[repr(C)]
struct Exported<F> {
    form: F,
    dims: Vec<i64>,
    _owner: Box<dyn Any + Send>,
}

/// The deleter of what is exported here.
unsafe extern "C" fn delete<F: Form>(this: *mut F) {
    // SAFETY: only put into structures that `export` allocated as the first field of an `Exported`; a consumer
    // calls it once.
    let exported = unsafe { Box::from_raw(this.cast::<Exported<F>>()) };
    // What the owner does when it goes may panic in a driver of the user's; C must not see that.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(exported)));
}

/// What is to be exported.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Layout {
    /// The address of the first element.
    pub ptr: Va,
    /// Where it is.
    pub device: DlDevice,
    /// Type of an element.
    pub dtype: DataType,
    /// Elements of each dimension.
    pub shape: Vec<i64>,
    /// Elements between neighbours in each dimension; dense and row-major if `None`.
    pub strides: Option<Vec<i64>>,
    /// Consumers must not write. Only the versioned form can say so.
    pub read_only: bool,
}

/// Makes a tensor for others of memory that lives as long as `owner`.
///
/// # Errors
///
/// [`Error::Shape`] if there are not as many strides as dimensions, or a dimension is negative.
pub fn export<F: Form>(layout: Layout, owner: impl Send + 'static) -> Result<Managed<F>> {
    let ndim = layout.shape.len();
    let dense = || dense_strides(&layout.shape);
    let strides = layout.strides.clone().unwrap_or_else(dense);
    let shape = |what, expected: usize, got: usize| Error::Shape {
        what,
        expected: expected as u64,
        got: got as u64,
    };
    if strides.len() != ndim {
        return Err(shape("strides of a DLPack tensor", ndim, strides.len()));
    }
    if layout.shape.iter().any(|dim| *dim < 0) || i32::try_from(ndim).is_err() {
        return Err(shape("dimensions of a DLPack tensor", 0, ndim));
    }
    let mut dims: Vec<i64> = layout.shape.iter().chain(&strides).copied().collect();
    let start = dims.as_mut_ptr();
    let array = DlTensor {
        data: ptr::with_exposed_provenance_mut(address(layout.ptr)?),
        device: layout.device,
        ndim: i32::try_from(ndim).unwrap_or(0),
        dtype: layout.dtype,
        shape: start,
        strides: start.wrapping_add(ndim),
        byte_offset: 0,
    };
    let flags = if layout.read_only { FLAG_READ_ONLY } else { 0 };
    let exported = Box::new(Exported {
        form: F::build(array, flags, ptr::null_mut()),
        dims,
        _owner: Box::new(owner),
    });
    debug_assert!(exported.dims.len() == 2 * ndim);
    let raw = NonNull::from(Box::leak(exported)).cast::<F>();
    Ok(Managed {
        raw,
        owns: PhantomData,
    })
}

fn address(va: Va) -> Result<usize> {
    usize::try_from(va.get()).map_err(|_| Error::TooLarge {
        requested: va.get(),
        max: usize::MAX as u64,
    })
}

/// Strides of a dense row-major array.
fn dense_strides(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1i64; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i].saturating_mul(shape[i].max(1));
    }
    strides
}

/// A DLPack tensor that is ours to delete, made here or elsewhere.
pub struct Managed<F: Form> {
    raw: NonNull<F>,
    owns: PhantomData<F>,
}

// SAFETY: what is exported here owns `Send` things only, and DLPack lets a consumer call the deleter from any
// thread.
unsafe impl<F: Form> Send for Managed<F> {}
// SAFETY: shared access only reads the structure, which nobody writes.
unsafe impl<F: Form> Sync for Managed<F> {}

impl<F: Form> Managed<F> {
    /// Takes over a tensor that somebody else made. Whoever held the pointer must not delete it any more.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] for null or missing dimensions, and [`Error::InvalidConfig`] for another major version: then
    /// the tensor has been deleted.
    ///
    /// # Safety
    ///
    /// `raw` is null or points to a structure of this form that a producer made, and nobody else consumes it.
    pub unsafe fn from_raw(raw: *mut F) -> Result<Self> {
        let bad = |what| Error::Shape {
            what,
            expected: 1,
            got: 0,
        };
        let raw = NonNull::new(raw).ok_or(bad("DLPack tensors given"))?;
        let managed = Self {
            raw,
            owns: PhantomData,
        };
        managed.form().check()?;
        let array = managed.array();
        if array.ndim < 0 || array.ndim > 0 && array.shape.is_null() {
            return Err(bad("dimensions of a DLPack tensor"));
        }
        Ok(managed)
    }

    /// Passes it on: the consumer calls the deleter.
    #[must_use]
    pub fn into_raw(self) -> *mut F {
        let raw = self.raw.as_ptr();
        std::mem::forget(self);
        raw
    }

    fn form(&self) -> &F {
        // SAFETY: valid until the deleter is called, which is in `drop` only.
        unsafe { self.raw.as_ref() }
    }

    /// The array as the producer describes it.
    #[must_use]
    pub fn array(&self) -> &DlTensor {
        self.form().array()
    }

    /// The address of the first element.
    #[must_use]
    pub fn ptr(&self) -> Va {
        let array = self.array();
        let start = array.data.expose_provenance() as u64;
        Va::new(start.saturating_add(array.byte_offset))
    }

    /// Elements of each dimension, the outermost first.
    #[must_use]
    pub fn shape(&self) -> &[i64] {
        self.dims(self.array().shape).unwrap_or_default()
    }

    /// Elements between neighbours in each dimension.
    #[must_use]
    pub fn strides(&self) -> Vec<i64> {
        match self.dims(self.array().strides) {
            Some(strides) => strides.to_vec(),
            None => dense_strides(self.shape()),
        }
    }

    fn dims(&self, at: *const i64) -> Option<&[i64]> {
        let count = usize::try_from(self.array().ndim).ok()?;
        if at.is_null() || count == 0 {
            return None;
        }
        // SAFETY: not null, and as long as `ndim` says for as long as the structure lives; DLPack's contract.
        Some(unsafe { std::slice::from_raw_parts(at, count) })
    }

    /// Type of an element.
    #[must_use]
    pub fn dtype(&self) -> DataType {
        self.array().dtype
    }

    /// Where the memory is.
    #[must_use]
    pub fn device(&self) -> DlDevice {
        self.array().device
    }

    /// Whether it must not be written to.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.form().flags() & FLAG_READ_ONLY != 0
    }

    /// Whether the elements lie without gaps in row-major order.
    #[must_use]
    pub fn is_dense(&self) -> bool {
        let shape = self.shape();
        let strides = self.strides();
        let dense = dense_strides(shape);
        // The stride of a dimension of one element says nothing.
        shape
            .iter()
            .zip(strides.iter().zip(&dense))
            .all(|(dim, (is, should))| *dim <= 1 || is == should)
    }
}

impl<F: Form> Drop for Managed<F> {
    fn drop(&mut self) {
        if let Some(deleter) = self.form().deleter() {
            // SAFETY: ours to delete, and only once: nobody has this value any more.
            unsafe { deleter(self.raw.as_ptr()) };
        }
    }
}

impl<F: Form> fmt::Debug for Managed<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Managed")
            .field("ptr", &self.ptr())
            .field("shape", &self.shape())
            .field("strides", &self.strides())
            .field("dtype", &self.dtype())
            .field("device", &self.device())
            .finish()
    }
}

impl<T: Element> SharedView<T> {
    /// The rows as a tensor for others; they stay mapped until its consumer deletes it.
    ///
    /// Streams are not part of DLPack's structures: announce the consumer's with
    /// [`Arena::record_use`](crate::Arena::record_use).
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for the sim driver, [`Error::TooLarge`] for a dimension above 63 bits.
    pub fn into_dlpack<F: Form>(self) -> Result<Managed<F>> {
        let dims = |dims: Vec<u64>| {
            let dim = |dim| {
                i64::try_from(dim).map_err(|_| Error::TooLarge {
                    requested: dim,
                    max: i64::MAX as u64,
                })
            };
            dims.into_iter().map(dim).collect::<Result<Vec<i64>>>()
        };
        let layout = Layout {
            ptr: self.ptr(),
            device: DlDevice::of(self.tensor().arena().device())?,
            dtype: T::TYPE,
            shape: dims(self.shape())?,
            strides: Some(dims(self.strides())?),
            read_only: false,
        };
        export(layout, self)
    }
}
