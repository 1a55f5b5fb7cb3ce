//! DLPack over the C ABI.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use super::arena::{self, granule_arena};
use super::error::{Failure, Out, Outcome, granule_status, guard};
use super::handle::tables;
use crate::Pin;
use crate::arena::Arena;
use crate::dlpack::{DataType, DlDevice, Form, Layout, Legacy, Managed, Versioned, export};
use crate::sync::RwLock;

/// An imported DLPack tensor; 0 is none.
pub type granule_import = u64;

/// The most dimensions of a tensor here.
pub const GRANULE_DIMS: usize = 16;

/// A tensor as DLPack describes it. Strides are in elements.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct granule_tensor {
    /// Of each dimension, the outermost first.
    pub shape: [i64; GRANULE_DIMS],
    /// Of each dimension. On export, all zero for a dense row-major tensor.
    pub strides: [i64; GRANULE_DIMS],
    /// Address of the first element; on export, bytes from the start of the arena.
    pub start: u64,
    /// How many dimensions.
    pub ndim: u32,
    /// `DLDeviceType`: 1 host, 2 CUDA. Ignored on export.
    pub device_type: i32,
    /// Number of the device. Ignored on export.
    pub device_id: i32,
    /// `DLDataTypeCode`: 0 signed, 1 unsigned, 2 float, 4 bfloat, 5 complex, 6 bool.
    pub code: u8,
    /// Bits of an element.
    pub bits: u8,
    /// Lanes; 1 for a scalar.
    pub lanes: u16,
    /// Not 0 if it must not be written to.
    pub read_only: u32,
}

/// What an exported tensor keeps alive.
struct Kept {
    _pin: Option<Pin>,
    _arena: Arc<RwLock<Arena>>,
}

/// A tensor of somebody else.
pub(super) struct Import {
    _managed: Box<dyn Any + Send + Sync>,
}

impl Import {
    fn new(managed: impl Any + Send + Sync) -> Self {
        Self {
            _managed: Box::new(managed),
        }
    }
}

fn layout(arena: &Arena, tensor: &granule_tensor) -> Outcome<(Layout, u64)> {
    let ndim = usize::try_from(tensor.ndim).unwrap_or(usize::MAX);
    if ndim > GRANULE_DIMS {
        let message = format!("{ndim} dimensions are more than {GRANULE_DIMS}");
        return Err(Failure::invalid(message));
    }
    let shape = tensor.shape[..ndim].to_vec();
    let strides = tensor.strides[..ndim].to_vec();
    let dense = strides.iter().all(|stride| *stride == 0);
    let dtype = DataType {
        code: tensor.code,
        bits: tensor.bits,
        lanes: tensor.lanes,
    };
    let too_far = || Failure::invalid("the tensor reaches past the addresses of the arena");
    // The last element of each dimension, in elements from the first.
    let mut last = 0u64;
    let mut step = 1u64;
    for i in (0..ndim).rev() {
        let dim = u64::try_from(shape[i]).map_err(|_| too_far())?;
        let stride = match dense {
            true => step,
            false => u64::try_from(strides[i]).map_err(|_| too_far())?,
        };
        let reach = dim.saturating_sub(1).checked_mul(stride);
        last = reach
            .and_then(|r| last.checked_add(r))
            .ok_or_else(too_far)?;
        step = step.checked_mul(dim.max(1)).ok_or_else(too_far)?;
    }
    let none = shape.contains(&0);
    let elements = if none { Some(0) } else { last.checked_add(1) };
    let end = elements
        .and_then(|n| n.checked_mul(dtype.bytes()))
        .and_then(|bytes| bytes.checked_add(tensor.start))
        .filter(|end| *end <= arena.capacity())
        .ok_or_else(too_far)?;
    let ptr = arena.base().checked_add(tensor.start).ok_or_else(too_far)?;
    let layout = Layout {
        ptr,
        device: DlDevice::of(arena.device())?,
        dtype,
        shape,
        strides: (!dense).then_some(strides),
        read_only: tensor.read_only != 0,
    };
    Ok((layout, end))
}

fn exported<F: Form>(handle: granule_arena, tensor: &granule_tensor) -> Outcome<*mut c_void> {
    let arena = arena::get(handle)?;
    let locked = arena.read();
    let (layout, end) = layout(&locked, tensor)?;
    // Within the length it is pinned; beyond, the caller says what may be touched.
    let used = end.min(locked.len()).saturating_sub(tensor.start.min(end));
    let pin = match used {
        0 => None,
        used if end <= locked.len() => Some(locked.pin(tensor.start, used)?),
        _ => None,
    };
    drop(locked);
    let kept = Kept {
        _pin: pin,
        _arena: arena,
    };
    Ok(export::<F>(layout, kept)?.into_raw().cast())
}

/// Exports part of an arena as a DLPack tensor, a `DLManagedTensor`, or a `DLManagedTensorVersioned` if `versioned` is not 0.
/// The consumer calls its deleter; until then the memory stays, also when the arena is closed.
///
/// The tensor may reach past the arena's length, up to its capacity: a tensor that is to grow in place is exported once at
/// its largest. Then only elements below the length may be touched, and nothing keeps the arena from shrinking below them.
/// A tensor within the length is pinned.
///
/// # Safety
///
/// `tensor` points to a description; `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_arena_export_dlpack(
    arena: granule_arena,
    tensor: *const granule_tensor,
    versioned: u32,
    out: *mut *mut c_void,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        // SAFETY: the caller's promise.
        let tensor = unsafe { tensor.as_ref() };
        let tensor = tensor.ok_or_else(|| Failure::invalid("tensor is a null pointer"))?;
        out.set(match versioned {
            0 => exported::<Legacy>(arena, tensor)?,
            _ => exported::<Versioned>(arena, tensor)?,
        });
        Ok(())
    })
}

fn describe<F: Form>(managed: &Managed<F>) -> Outcome<granule_tensor> {
    let (from_shape, from_strides) = (managed.shape(), managed.strides());
    let ndim = from_shape.len();
    if ndim > GRANULE_DIMS {
        let message = format!("{ndim} dimensions are more than {GRANULE_DIMS}");
        return Err(Failure::invalid(message));
    }
    let mut shape = [0; GRANULE_DIMS];
    let mut strides = [0; GRANULE_DIMS];
    shape[..ndim].copy_from_slice(from_shape);
    strides[..ndim].copy_from_slice(&from_strides);
    let (device, dtype, at) = (managed.device(), managed.dtype(), managed.ptr());
    Ok(granule_tensor {
        shape,
        strides,
        start: at.get(),
        ndim: u32::try_from(ndim).unwrap_or(u32::MAX),
        device_type: device.device_type,
        device_id: device.device_id,
        code: dtype.code,
        bits: dtype.bits,
        lanes: dtype.lanes,
        read_only: u32::from(managed.is_read_only()),
    })
}

/// Takes over a DLPack tensor (`versioned` as for the export) and describes it. It is deleted when the handle is closed.
/// After a failure it has been deleted, unless an argument was null.
///
/// # Safety
///
/// `managed` is null or such a tensor that nobody else consumes; `tensor` and `out` are null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_import_dlpack(
    managed: *mut c_void,
    versioned: u32,
    tensor: *mut granule_tensor,
    out: *mut granule_import,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        // SAFETY: the caller's promise.
        let tensor = unsafe { Out::new(tensor, "tensor") }?;
        let (import, described) = match versioned {
            0 => {
                // SAFETY: the caller's promise.
                let managed = unsafe { Managed::<Legacy>::from_raw(managed.cast()) }?;
                let described = describe(&managed)?;
                (Import::new(managed), described)
            }
            _ => {
                // SAFETY: the caller's promise.
                let managed = unsafe { Managed::<Versioned>::from_raw(managed.cast()) }?;
                let described = describe(&managed)?;
                (Import::new(managed), described)
            }
        };
        out.set(tables().imports.insert(import)?);
        tensor.set(described);
        Ok(())
    })
}

/// Deletes an imported tensor.
#[unsafe(no_mangle)]
pub extern "C" fn granule_import_close(import: granule_import) -> granule_status {
    guard(|| tables().imports.remove(import).map(drop))
}
