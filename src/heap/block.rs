//! One allocation of a heap, owned.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

use super::hub::Port;
use super::lane::Lane;
use super::name::BlockName;
use super::seat::seat_now;
use crate::stream::{Fence, Stream};
use crate::units::{Va, VaRange};
use crate::{Error, Result};

/// A block of a [`Heap`](super::Heap), freed on its own stream when dropped: work queued on that
/// stream before still may use it, and whoever gets the memory next is ordered behind.
///
/// Use on other streams is announced with [`record_use`](Self::record_use).
// A list of blocks costs its owner one cache line for each, not two for every second one.
#[repr(align(32))]
pub struct Block {
    port: &'static Port,
    addr: Va,
    /// Bytes asked for.
    len: u64,
    hint: u32,
    /// Its class in a magazine, 0 for a larger one; and the marks below, with which it is of no class.
    class: AtomicU16,
}

/// A use by another stream was recorded.
const USED: u16 = 1 << 15;
/// It was given a name.
const NAMED: u16 = 1 << 14;

/// What a block is made of. A block that is passed on whole is copied in two halves, and the processor waits before
/// it reads a half that was written in parts a moment ago; so the hot path passes on the parts.
#[must_use = "a block that nobody makes of these is lost"]
#[derive(Clone, Copy)]
pub(super) struct Parts {
    port: &'static Port,
    addr: u64,
    /// The hint, and above it the class: one word, as they are read in one where parts come from memory.
    tail: u64,
}

impl Parts {
    #[inline]
    pub(super) fn new(port: &'static Port, addr: u64, hint: u32, class: u16) -> Self {
        Self {
            port,
            addr,
            tail: u64::from(class) << 32 | u64::from(hint),
        }
    }
}

impl Block {
    #[inline]
    pub(super) fn new(parts: Parts, len: u64) -> Self {
        Self {
            port: parts.port,
            addr: Va::new(parts.addr),
            len,
            hint: parts.tail as u32,
            class: AtomicU16::new((parts.tail >> 32) as u16),
        }
    }

    /// The address of the first byte; 0 for a block of no bytes.
    #[inline]
    #[must_use]
    pub fn ptr(&self) -> Va {
        self.addr
    }

    /// Bytes asked for.
    #[inline]
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The addresses.
    #[inline]
    #[must_use]
    pub fn range(&self) -> VaRange {
        VaRange::new(self.addr, self.len).unwrap_or(VaRange::EMPTY)
    }

    /// The stream it was allocated on.
    ///
    /// # Errors
    ///
    /// [`Error::Stale`] if the heap has lost the block, which its owner alone can free.
    pub fn stream(&self) -> Result<Stream> {
        Ok(self.lane()?.stream().clone())
    }

    fn lane(&self) -> Result<Arc<Lane>> {
        self.port
            .hub()
            .lane()
            .ok_or_else(|| no_block(self.addr, false))
    }

    /// Names the block, or names it anew. Does nothing to a block of no bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Stale`] if the heap has lost the block, which its owner alone can free.
    pub fn set_name(&self, name: impl Into<BlockName>) -> Result<()> {
        match self.is_empty() {
            true => Ok(()),
            false => {
                self.class.fetch_or(NAMED, Relaxed);
                self.lane()?.set_name(self.addr, self.len, name.into())
            }
        }
    }

    /// Its name, if it was given one.
    #[must_use]
    pub fn name(&self) -> Option<BlockName> {
        match self.class.load(Relaxed) & NAMED {
            0 => None,
            _ => self.lane().ok()?.name(self.addr),
        }
    }

    /// Says that work queued on `stream` so far, or from now until the block is freed, uses the
    /// block: after the free, the memory is kept from others until that work is done.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for a stream of another device.
    pub fn record_use(&self, stream: &Stream) -> Result<()> {
        match self.is_empty() {
            true => Ok(()),
            false => {
                self.class.fetch_or(USED, Relaxed);
                self.lane()?.record_owned_use(self.addr, stream)
            }
        }
    }

    /// As [`record_use`](Self::record_use), with a fence taken right after the last use: the memory
    /// is free for others when the fence has passed, whatever its stream does later.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for a fence of another device.
    pub fn record_fence(&self, fence: &Fence) -> Result<()> {
        match self.is_empty() {
            true => Ok(()),
            false => {
                self.class.fetch_or(USED, Relaxed);
                self.lane()?.record_fence(self.addr, fence)
            }
        }
    }

    /// Frees the block after work of `stream`, which used it last. Dropping frees it after work of
    /// its own stream.
    ///
    /// # Errors
    ///
    /// As [`record_use`](Self::record_use); the block is freed on its own stream then.
    pub fn free_on(self, stream: &Stream) -> Result<()> {
        if *stream != self.stream()? {
            self.record_use(stream)?;
        }
        drop(self);
        Ok(())
    }

    /// Gives up ownership; free the address with [`Heap::free_raw`](super::Heap::free_raw).
    #[inline]
    #[must_use]
    pub fn into_raw(self) -> Va {
        let addr = self.addr;
        if !self.is_empty() {
            if let Err(error) = self.port.expose(addr, self.hint) {
                tracing::error!(%error, "block lost");
            }
            std::mem::forget(self);
        }
        addr
    }
}

impl Drop for Block {
    // By value: a block whose address nobody takes need not lie in memory.
    #[inline(always)]
    fn drop(&mut self) {
        // Whoever recorded a use or gave a name was ordered before this by whatever shared the block.
        let class = *self.class.get_mut();
        free(seat_now(), self.port, self.addr.get(), self.hint, class);
    }
}

/// Frees a block, for the thread on `seat`.
#[inline(never)]
fn free(seat: u32, port: &'static Port, addr: u64, hint: u32, class: u16) {
    if !port.keep(seat, addr, hint, class) {
        free_elsewhere(seat, port, addr, hint, class);
    }
}

/// Frees a block that its thread's magazine does not take as it is.
#[inline(never)]
fn free_elsewhere(seat: u32, port: &'static Port, addr: u64, hint: u32, class: u16) {
    if addr == 0 {
        return port.free_nothing();
    }
    let (class, is_named) = match class {
        0 if port.keep_large(seat, addr) => return,
        class if class & (USED | NAMED) != 0 => (0, class & NAMED != 0),
        class => (class, false),
    };
    if let Err(error) = port.free(Va::new(addr), hint, class, is_named) {
        tracing::error!(%error, "block lost");
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({}, {} bytes)", self.addr, self.len)
    }
}

/// Why an address cannot be freed.
pub(super) fn no_block(addr: Va, inside: bool) -> Error {
    match inside {
        true => Error::NotAStart { at: addr },
        false => Error::Stale {
            what: "block",
            value: addr.get(),
        },
    }
}
