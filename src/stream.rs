//! Streams and fences: who may touch memory after whom.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};

use crate::driver::{
    Call, Driver, DriverCode, DriverError, DriverResult, EventId, Hold, StreamId, StreamKey,
};
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
    /// The driver's, or one of ours if that gave none when the stream was first met.
    key: StreamKey,
    /// No other handle's but its clones', on any device.
    serial: u64,
    /// The driver's, once it is known.
    named: OnceLock<StreamKey>,
    owned: bool,
    /// Behind its last work, once it was retired.
    end: OnceLock<Fence>,
    /// What keeps another library's stream from being destroyed.
    keep: OnceLock<Arc<dyn Any + Send + Sync>>,
}

/// A stream that is not kept alive.
pub(crate) struct WeakStream(Weak<StreamInner>);

impl WeakStream {
    pub(crate) fn upgrade(&self) -> Option<Stream> {
        self.0.upgrade().map(|inner| Stream { inner })
    }
}

/// Something of another library that must not go before our handle.
pub(crate) type Keep = Option<Arc<dyn Any + Send + Sync>>;

impl Stream {
    pub(crate) fn create(device: &Device) -> Result<Self> {
        let id = device.driver().create_stream()?;
        match device.driver().stream_key(id) {
            Ok(key) => Ok(Self::wrap(device, id, Some(key), true)),
            Err(error) => {
                device.give_back("stream", Box::new(move |d| d.destroy_stream(id)));
                Err(error.into())
            }
        }
    }

    pub(crate) fn default_of(device: &Device) -> Result<Self> {
        Self::foreign(device, StreamId::DEFAULT, None)
    }

    /// A stream that is not destroyed with its last handle. The same one for the same key, so that all
    /// know when it ends; `keep` lives as long as that.
    pub(crate) fn foreign(device: &Device, id: StreamId, keep: Keep) -> Result<Self> {
        let key = match device.driver().stream_key(id) {
            Ok(key) => Some(key),
            Err(error) if error.code == DriverCode::INVALID_HANDLE => return Err(stale(id.0)),
            Err(error) if is_captured(&error) => None,
            Err(error) => return Err(error.into()),
        };
        let stream = device.known_stream(id, key, || Self::wrap(device, id, key, false));
        if let Some(keep) = keep {
            // What was set before keeps the same stream.
            let _ = stream.inner.keep.set(keep);
        }
        Ok(stream)
    }

    pub(crate) fn downgrade(&self) -> WeakStream {
        WeakStream(Arc::downgrade(&self.inner))
    }

    /// Says that its owner, not this crate, is about to destroy the stream: call it before that. From then
    /// on the stream takes no work and no allocation ([`Error::Stale`]); memory that its work may use waits
    /// for what was queued so far. Does nothing the second time.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`] for the default stream, which is never destroyed; as
    /// [`fence`](Self::fence). Nothing changed then.
    pub fn retire(&self) -> Result<()> {
        if self.id() == StreamId::DEFAULT {
            return Err(Error::InvalidConfig {
                what: "stream to retire",
                value: 0,
                why: "the default stream is never destroyed",
            });
        }
        let end = self.fence()?;
        // Another thread may have been quicker.
        let _ = self.inner.end.set(end);
        Ok(())
    }

    /// Whether [`retire`](Self::retire) was called.
    #[inline]
    #[must_use]
    pub fn is_retired(&self) -> bool {
        self.inner.end.get().is_some()
    }

    /// Whether the handle still names this stream: somebody else may have destroyed a stream that was not
    /// retired. Asks the driver about foreign streams.
    ///
    /// # Errors
    ///
    /// [`Error::Stale`], or a driver error.
    pub(crate) fn check_alive(&self) -> Result<()> {
        let dead = || Err(stale(self.key().0));
        if self.is_retired() {
            return dead();
        }
        if self.inner.owned || self.id() == StreamId::DEFAULT {
            return Ok(());
        }
        match self.driver().stream_key(self.id()) {
            Ok(key) if self.is_named(key) => Ok(()),
            Ok(_) => dead(),
            Err(error) if error.code == DriverCode::INVALID_HANDLE => dead(),
            // It is there, then.
            Err(error) if is_captured(&error) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether this is the driver's key of the stream. If that has given none yet, it is from now on.
    pub(crate) fn is_named(&self, key: StreamKey) -> bool {
        *self.inner.named.get_or_init(|| key) == key
    }

    /// Whether the driver has not given the stream's key yet.
    pub(crate) fn is_unnamed(&self) -> bool {
        self.inner.named.get().is_none()
    }

    fn wrap(device: &Device, id: StreamId, key: Option<StreamKey>, owned: bool) -> Self {
        // From the far end: the driver counts up from 1.
        static OURS: AtomicU64 = AtomicU64::new(u64::MAX);
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        Self {
            inner: Arc::new(StreamInner {
                device: device.clone(),
                id,
                key: key.unwrap_or_else(|| StreamKey(OURS.fetch_sub(1, Relaxed))),
                serial: SERIAL.fetch_add(1, Relaxed),
                named: key.map_or_else(OnceLock::new, OnceLock::from),
                owned,
                end: OnceLock::new(),
                keep: OnceLock::new(),
            }),
        }
    }

    /// The driver's handle, which drivers reuse after the stream is gone.
    #[must_use]
    pub fn id(&self) -> StreamId {
        self.inner.id
    }

    /// The key that no other stream of this process ever has: the driver's, or, of a foreign stream first met while
    /// it was being captured, one of ours, since drivers give none then.
    #[must_use]
    pub fn key(&self) -> StreamKey {
        self.inner.key
    }

    /// A number that no other stream has, of any device; but a foreign stream that is met again after its last handle
    /// was dropped has another one.
    #[inline]
    pub(crate) fn serial(&self) -> u64 {
        self.inner.serial
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

    /// Whether the stream is being captured into a graph: then its work does not run, and nothing can
    /// wait for it.
    ///
    /// # Errors
    ///
    /// [`Error::Stale`] for a stream that is gone, or a driver error.
    pub fn is_capturing(&self) -> Result<bool> {
        self.check_alive()?;
        match self.driver().is_capturing(self.id()) {
            // Gone since.
            Err(error) if error.code == DriverCode::INVALID_HANDLE => Err(stale(self.key().0)),
            other => Ok(other?),
        }
    }

    /// Refuses what a capture forbids, before it is spoiled. Nobody may start one at this moment.
    fn check_running(&self) -> Result<()> {
        match self.is_capturing()? {
            true => Err(Error::Capturing {
                stream: self.key().0,
            }),
            false => Ok(()),
        }
    }

    /// A fence behind all work queued so far; of a retired stream behind its last. Does not block.
    ///
    /// # Errors
    ///
    /// [`Error::Stale`] for a stream that is gone without having been retired, [`Error::Capturing`] while the stream is being captured: the fence would be part of the graph,
    /// and never pass. A driver error.
    pub fn fence(&self) -> Result<Fence> {
        if let Some(end) = self.inner.end.get() {
            return Ok(end.clone());
        }
        self.check_running()?;
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
    /// [`Error::Foreign`] for a fence of another device, [`Error::Stale`] for a stream that is gone,
    /// [`Error::Capturing`] while the stream is being
    /// captured, or a driver error.
    pub fn wait(&self, fence: &Fence) -> Result<()> {
        if !fence.device().is_same(self.device()) {
            return Err(Error::Foreign {
                what: "fence",
                owner: "device",
            });
        }
        self.check_running()?;
        Ok(self.driver().wait_event(self.id(), fence.inner.event)?)
    }

    /// Blocks the calling thread until all queued work is done.
    ///
    /// # Errors
    ///
    /// [`Error::Stale`] for a stream that is gone, [`Error::Capturing`] while it is being captured, or a
    /// driver error, also one of the work itself.
    pub fn synchronize(&self) -> Result<()> {
        self.check_running()?;
        Ok(self.driver().sync_stream(self.id())?)
    }

    /// Waits for the work queued so far: behind a fence, or, if none can be had, for all of it. A
    /// device that is lost has no work left. Fails while the stream is being captured.
    pub(crate) fn quiesce(&self) -> DriverResult<()> {
        if let Some(end) = self.inner.end.get() {
            return end.quiesce();
        }
        if self.driver().is_capturing(self.id()) == Ok(true) {
            let code = DriverCode::STREAM_CAPTURE_UNSUPPORTED;
            return Err(DriverError::new(Call::SyncStream, code).about(self.id().0, 0));
        }
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

/// Whether the driver gives no key because the stream is being captured.
fn is_captured(error: &DriverError) -> bool {
    error.code == DriverCode::STREAM_CAPTURE_UNSUPPORTED
}

fn stale(value: u64) -> Error {
    Error::Stale {
        what: "stream",
        value,
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
