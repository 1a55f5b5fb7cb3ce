//! Streams and fences: who may touch memory after whom.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::driver::{Driver, DriverResult, EventId, Hold, StreamId, StreamKey};
use crate::{Device, Error, Result};

/// A stream of device work. Cheap to clone; the driver's stream is destroyed with the last clone
/// (its queued work still finishes). The default stream is never destroyed.
#[derive(Clone)]
pub struct Stream {
    inner: Arc<StreamInner>,
}

struct StreamInner {
    device: Device,
    id: StreamId,
    key: StreamKey,
    owned: bool,
    /// What keeps another library's stream from being destroyed.
    _keep: Keep,
}

/// Something of another library that must not go before our handle.
pub(crate) type Keep = Option<Arc<dyn Any + Send + Sync>>;

impl Stream {
    pub(crate) fn create(device: &Device) -> Result<Self> {
        let id = device.driver().create_stream()?;
        match device.driver().stream_key(id) {
            Ok(key) => Ok(Self::wrap(device, id, key, true, None)),
            Err(error) => {
                device.give_back("stream", Box::new(move |d| d.destroy_stream(id)));
                Err(error.into())
            }
        }
    }

    pub(crate) fn default_of(device: &Device) -> Result<Self> {
        Self::foreign(device, StreamId::DEFAULT, None)
    }

    /// A stream that is not destroyed with its last handle; `keep` lives as long as that.
    pub(crate) fn foreign(device: &Device, id: StreamId, keep: Keep) -> Result<Self> {
        let key = device.driver().stream_key(id)?;
        Ok(Self::wrap(device, id, key, false, keep))
    }

    fn wrap(device: &Device, id: StreamId, key: StreamKey, owned: bool, keep: Keep) -> Self {
        Self {
            inner: Arc::new(StreamInner {
                device: device.clone(),
                id,
                key,
                owned,
                _keep: keep,
            }),
        }
    }

    /// The driver's handle, which drivers reuse after the stream is gone.
    #[must_use]
    pub fn id(&self) -> StreamId {
        self.inner.id
    }

    /// The key that no other stream of this process ever has.
    #[must_use]
    pub fn key(&self) -> StreamKey {
        self.inner.key
    }

    /// The stream's device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    fn driver(&self) -> &dyn Driver {
        &**self.inner.device.driver()
    }

    /// Whether this is the only handle left.
    pub(crate) fn is_last(&self) -> bool {
        Arc::strong_count(&self.inner) == 1
    }

    /// A fence behind all work queued so far. Does not block.
    ///
    /// # Errors
    ///
    /// A driver error.
    pub fn fence(&self) -> Result<Fence> {
        let event = self.driver().create_event()?;
        let fence = Fence {
            inner: Arc::new(FenceInner {
                device: self.inner.device.clone(),
                event,
            }),
        };
        self.driver().record_event(event, self.id())?;
        Ok(fence)
    }

    /// Makes later work of this stream wait for the fence, on the device. The host does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for a fence of another device, or a driver error.
    pub fn wait(&self, fence: &Fence) -> Result<()> {
        if !fence.device().is_same(self.device()) {
            return Err(Error::Foreign {
                what: "fence",
                owner: "device",
            });
        }
        Ok(self.driver().wait_event(self.id(), fence.inner.event)?)
    }

    /// Blocks the calling thread until all queued work is done.
    ///
    /// # Errors
    ///
    /// A driver error, also one of the work itself.
    pub fn synchronize(&self) -> Result<()> {
        Ok(self.driver().sync_stream(self.id())?)
    }

    /// Waits for the work queued so far: behind a fence, or, if none can be had, for all of it. A
    /// device that is lost has no work left.
    pub(crate) fn quiesce(&self) -> DriverResult<()> {
        let behind_fence = self.fence().and_then(|fence| fence.wait());
        if behind_fence.is_ok() {
            return Ok(());
        }
        unless_lost(self.driver().sync_stream(self.id()))
    }

    /// Queues work that ends when the [`Hold`] is dropped; for tests of ordering.
    ///
    /// # Errors
    ///
    /// A driver error.
    pub fn hold(&self) -> Result<Hold> {
        Ok(self.driver().hold(self.id())?)
    }
}

/// Success if the error says that nothing can run any more.
fn unless_lost(waited: DriverResult<()>) -> DriverResult<()> {
    match waited {
        Err(error) if error.is_device_lost() => {
            tracing::warn!(%error, "nothing to wait for");
            Ok(())
        }
        other => other,
    }
}

impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key() && self.inner.device.is_same(&other.inner.device)
    }
}

impl Eq for Stream {}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:#x}, key {})", self.id().0, self.key().0)
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        if self.owned {
            let id = self.id;
            self.device
                .give_back("stream", Box::new(move |d| d.destroy_stream(id)));
        }
    }
}

/// A point in a stream after which memory used before it may be touched by others. Cheap to clone.
#[derive(Clone)]
pub struct Fence {
    inner: Arc<FenceInner>,
}

struct FenceInner {
    device: Device,
    event: EventId,
}

impl Fence {
    /// Whether the work before the fence is done. Does not block.
    ///
    /// # Errors
    ///
    /// A driver error, also one of the work itself.
    pub fn is_done(&self) -> Result<bool> {
        Ok(self.inner.device.driver().query_event(self.inner.event)?)
    }

    /// Blocks the calling thread until the work before the fence is done.
    ///
    /// # Errors
    ///
    /// A driver error, also one of the work itself.
    pub fn wait(&self) -> Result<()> {
        Ok(self.inner.device.driver().sync_event(self.inner.event)?)
    }

    /// As [`wait`](Self::wait); a device that is lost has no work left.
    pub(crate) fn quiesce(&self) -> DriverResult<()> {
        unless_lost(self.inner.device.driver().sync_event(self.inner.event))
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// The fence's device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fence({:#x})", self.inner.event.0)
    }
}

impl Drop for FenceInner {
    fn drop(&mut self) {
        let event = self.event;
        self.device
            .give_back("event", Box::new(move |d| d.destroy_event(event)));
    }
}
