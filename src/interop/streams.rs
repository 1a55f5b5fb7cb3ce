//! Streams that another library made.

use crate::driver::StreamId;
use crate::driver::cuda::CudaDriver;
use crate::stream::{Keep, Stream};
use crate::{Device, Result};

impl Device {
    /// A stream that another library made, such as PyTorch or cudarc: memory of this crate is then allocated,
    /// freed and kept in its order. 0 is the default stream. It is not destroyed with the [`Stream`], whose
    /// [key](Stream::key) is the one that the driver gives it; it may be under capture.
    ///
    /// # Errors
    ///
    /// A driver error if it is no stream, as far as the driver notices.
    ///
    /// # Safety
    ///
    /// `raw` is a stream of this device: on CUDA a `CUstream` of its primary context. It stays one until the
    /// last clone of the answer, and the last [`Heap`](crate::Heap) and [`Arena`](crate::Arena) that used it, are gone.
    pub unsafe fn adopt_stream(&self, raw: u64) -> Result<Stream> {
        // SAFETY: the caller's promise.
        unsafe { adopt(self, raw, None) }
    }
}

/// As [`Device::adopt_stream`]; `keep` lives as long as the answer and its clones.
///
/// # Safety
///
/// `raw` is a stream of the device, for as long as `keep` lives at least.
pub(super) unsafe fn adopt(device: &Device, raw: u64, keep: Keep) -> Result<Stream> {
    let id = match device.driver().as_any().downcast_ref::<CudaDriver>() {
        // SAFETY: a `CUstream` of the primary context for as long as it is named, as the caller promises.
        Some(cuda) if raw != 0 => unsafe { cuda.adopt_stream(raw) },
        _ => StreamId(raw),
    };
    Stream::foreign(device, id, keep)
}
