//! What is mapped where in an arena, and the driver calls that change it.
//!
//! The mapped part is always a prefix of the reservation without holes:
//!
//! ```text
//! base        len            open                              end     capacity
//!  | used      | mapped,      | fenced: given back, waiting     |       |
//!  |           | accessible   | or closed: no access yet        |       |
//! ```

use std::sync::Arc;

use crate::driver::{Access, DriverError, DriverResult, PhysId, StreamKey};
use crate::history::History;
use crate::pool::{Granule, Need, Shared as PoolShared};
use crate::space::Reservation;
use crate::stream::{Fence, Stream};
use crate::units::VaRange;
use crate::{Device, Error, Result};

/// One granule in its place.
#[derive(Debug)]
struct Slot {
    offset: u64,
    granule: Granule,
    /// Access has been set.
    open: bool,
    /// Had another owner and was not zeroed since.
    unclean: bool,
    /// Zeroing that may still be running.
    zeroing: Option<Zeroing>,
    /// Work that may still use it after it was given back.
    fences: Vec<Fence>,
}

/// A fill that was queued; memory is not unmapped under it.
#[derive(Clone, Debug)]
enum Zeroing {
    /// Somewhere in this stream.
    On(Stream),
    /// Before this fence.
    Before(Fence),
}

impl Zeroing {
    fn quiesce(&self) -> DriverResult<()> {
        match self {
            Self::On(stream) => stream.quiesce(),
            Self::Before(fence) => fence.quiesce(),
        }
    }

    /// Without waiting; what cannot be asked counts as running.
    fn is_done(&mut self) -> bool {
        if let Self::On(stream) = self {
            match stream.fence() {
                Ok(fence) => *self = Self::Before(fence),
                Err(_) => return false,
            }
        }
        matches!(self, Self::Before(fence) if fence.is_done().unwrap_or(false))
    }
}

impl Slot {
    /// Whether nothing has to be waited for. A fence that cannot be asked counts as not passed.
    fn is_idle(&mut self) -> bool {
        self.fences.iter().all(|f| f.is_done().unwrap_or(false))
            && self.zeroing.as_mut().is_none_or(Zeroing::is_done)
    }

    /// Orders whoever takes the memory behind the zeroing that is still queued.
    fn outlast_zeroing(&mut self, waiter: Waiter<'_>) -> Result<()> {
        let Some(zeroing) = &mut self.zeroing else {
            return Ok(());
        };
        if !zeroing.is_done() {
            match (waiter, &*zeroing) {
                (Waiter::Stream(taker), Zeroing::Before(fence)) => return taker.wait(fence),
                (Waiter::Stream(taker), Zeroing::On(stream)) => {
                    return taker.wait(&stream.fence()?);
                }
                (Waiter::Host, Zeroing::Before(fence)) => fence.wait()?,
                (Waiter::Host, Zeroing::On(stream)) => stream.synchronize()?,
            }
        }
        self.zeroing = None;
        Ok(())
    }

    fn end(&self) -> u64 {
        self.offset + self.granule.len()
    }
}

/// A granule of an arena is one block in the history.
fn tell_mapped(history: &History, range: VaRange) {
    let (at, len) = (range.start().get(), range.len());
    history.map(NO_STREAM, at, len);
    history.alloc(NO_STREAM, at, len, len, None);
}

/// Where one granule lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// The addresses it is mapped at.
    pub range: VaRange,
    /// The physical allocation.
    pub granule: PhysId,
    /// Offset of the range in the arena, in bytes.
    pub offset: u64,
}

/// Who is to wait for memory that was given back and is wanted again.
#[derive(Clone, Copy, Debug)]
pub(super) enum Waiter<'a> {
    /// The calling thread.
    Host,
    /// This stream, on the device.
    Stream(&'a Stream),
}

#[derive(Debug)]
pub(super) struct Line {
    pub(super) reservation: Reservation,
    pool: Arc<PoolShared>,
    device: Device,
    slots: Vec<Slot>,
    /// Bytes whose takers know the stream that zeroes them.
    granted: u64,
    /// What is told of every mapping.
    history: Option<History>,
}

/// The stream that an arena's memory is listed under.
const NO_STREAM: StreamKey = StreamKey(0);

impl Line {
    pub(super) fn new(reservation: Reservation, pool: Arc<PoolShared>, device: Device) -> Self {
        Self {
            reservation,
            pool,
            device,
            slots: Vec::new(),
            granted: 0,
            history: None,
        }
    }

    /// Sets what is told of every mapping from now on. What is mapped is told at once.
    pub(super) fn set_history(&mut self, history: Option<&History>) {
        self.history = history.cloned();
        if let Some(history) = history {
            for slot in &self.slots {
                if let Ok(range) = self.range(slot.offset, slot.granule.len()) {
                    tell_mapped(history, range);
                }
            }
        }
    }

    /// What is told of every mapping.
    pub(super) fn history(&self) -> Option<History> {
        self.history.clone()
    }

    /// Bytes mapped, in whatever state.
    pub(super) fn end(&self) -> u64 {
        self.slots.last().map_or(0, Slot::end)
    }

    /// Bytes that can be used at once: accessible, and nobody to wait for.
    pub(super) fn open(&self) -> u64 {
        let closed = self
            .slots
            .iter()
            .rev()
            .take_while(|s| !s.open || !s.fences.is_empty());
        let open = closed.last().map_or_else(|| self.end(), |s| s.offset);
        let granted = self.slots.partition_point(|s| s.end() <= self.granted);
        let zeroing = self.slots[granted..].iter().find(|s| s.zeroing.is_some());
        zeroing.map_or(open, |s| open.min(s.offset.max(self.granted)))
    }

    pub(super) fn extents(&self, len: u64) -> Vec<Extent> {
        let used = self.slots.iter().take_while(|s| s.offset < len);
        used.filter_map(|slot| {
            Some(Extent {
                range: self.range(slot.offset, slot.granule.len()).ok()?,
                granule: slot.granule.phys(),
                offset: slot.offset,
            })
        })
        .collect()
    }

    fn range(&self, offset: u64, len: u64) -> Result<VaRange> {
        let whole = self.reservation.range();
        whole.sub(offset, len).ok_or(Error::ReservationExhausted {
            asked: offset.saturating_add(len),
            reserved: whole.len(),
        })
    }

    /// Opens what is mapped already up to `to`: waits for fences and sets access that is missing.
    /// The fences stay until [`settle`](Self::settle), since a wait of one stream is nobody else's.
    pub(super) fn reopen(&mut self, to: u64, waiter: Waiter<'_>) -> Result<()> {
        let open = self.open();
        let first = self.slots.partition_point(|s| s.end() <= open);
        for i in first..self.slots_below(to) {
            for fence in &self.slots[i].fences {
                match waiter {
                    Waiter::Host => fence.wait()?,
                    Waiter::Stream(stream) => stream.wait(fence)?,
                }
            }
            self.slots[i].outlast_zeroing(waiter)?;
            if !self.slots[i].open {
                let (offset, len) = (self.slots[i].offset, self.slots[i].granule.len());
                self.set_access(offset, len)?;
                self.clean(i, waiter)?;
                self.slots[i].open = true;
            }
        }
        self.fence_zeroing(first, waiter)
    }

    /// Forgets the fences of what is in use again up to `to`; somebody has waited for them.
    pub(super) fn settle(&mut self, to: u64) {
        self.granted = self.granted.max(to);
        let below = self.slots_below(to);
        for slot in &mut self.slots[..below] {
            if !slot.fences.is_empty() {
                slot.fences.clear();
                self.pool.note_pending(0, slot.granule.len());
            }
        }
    }

    fn set_access(&self, offset: u64, len: u64) -> Result<()> {
        let range = self.range(offset, len)?;
        let driver = self.device.driver();
        Ok(driver.set_access(range, Access::ReadWrite)?)
    }

    /// Zeroes a granule that had another owner, if the pool is to do that.
    fn clean(&mut self, i: usize, waiter: Waiter<'_>) -> Result<()> {
        if !self.slots[i].unclean || !self.pool.zeroes() {
            return Ok(());
        }
        let range = self.range(self.slots[i].offset, self.slots[i].granule.len())?;
        let driver = self.device.driver();
        let stream = match waiter {
            Waiter::Stream(stream) => stream.clone(),
            Waiter::Host => self.pool.service_stream()?,
        };
        driver.fill(range, 0, stream.id())?;
        self.slots[i].unclean = false;
        self.slots[i].zeroing = Some(Zeroing::On(stream.clone()));
        if let Waiter::Host = waiter {
            stream.synchronize()?;
            self.slots[i].zeroing = None;
        }
        Ok(())
    }

    /// What the pool is asked for to map `bytes` more, in granules of up to `largest`.
    pub(super) fn need(&self, bytes: u64, largest: u64) -> Need {
        Need {
            bytes,
            largest,
            at_most: self.reservation.len() - self.end(),
        }
    }

    /// Maps the granules at the end and opens them. After an error, [`undo_to`](Self::undo_to).
    pub(super) fn append(&mut self, granules: Vec<Granule>, waiter: Waiter<'_>) -> Result<()> {
        let first = self.slots.len();
        for mut granule in granules {
            let offset = self.end();
            let range = self.range(offset, granule.len())?;
            self.device.driver().map(range, granule.phys())?;
            if let Some(history) = &self.history {
                tell_mapped(history, range);
            }
            let unclean = granule.is_dirty();
            granule.set_mapped();
            self.slots.push(Slot {
                offset,
                granule,
                open: false,
                unclean,
                zeroing: None,
                fences: Vec::new(),
            });
        }
        let Some(offset) = self.slots.get(first).map(|s| s.offset) else {
            return Ok(());
        };
        // One call for all: it costs as much as one for each, but less bookkeeping.
        self.set_access(offset, self.end() - offset)?;
        for i in first..self.slots.len() {
            self.clean(i, waiter)?;
            self.slots[i].open = true;
        }
        self.fence_zeroing(first, waiter)
    }

    /// One fence behind the zeroing that was queued on the caller's stream from slot `first` on.
    fn fence_zeroing(&mut self, first: usize, waiter: Waiter<'_>) -> Result<()> {
        let queued = |slot: &Slot| matches!(slot.zeroing, Some(Zeroing::On(_)));
        let Waiter::Stream(stream) = waiter else {
            return Ok(());
        };
        if !self.slots[first..].iter().any(queued) {
            return Ok(());
        }
        let fence = stream.fence()?;
        for slot in self.slots[first..].iter_mut().filter(|slot| queued(slot)) {
            slot.zeroing = Some(Zeroing::Before(fence.clone()));
        }
        Ok(())
    }

    /// Takes back what was appended after there were `first` slots, without waiting. A slot that is
    /// still being zeroed, or that the driver refuses to unmap, stays at the end, closed or open, for
    /// the next growth to use or the next shrink to give back.
    pub(super) fn undo_to(&mut self, first: usize) {
        // Zeroing may be queued behind work that needs this very thread: it is not waited for.
        self.cut_idle(first, u64::MAX);
    }

    pub(super) fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Number of slots that hold a byte below `len`.
    pub(super) fn slots_below(&self, len: u64) -> usize {
        self.slots.partition_point(|s| s.offset < len)
    }

    /// Unmaps the slots from `first` on, last one first, and gives their granules back. Stops at the
    /// first refusal, so that what is left is a prefix; bytes given back so far are gone from it.
    pub(super) fn cut_to(&mut self, first: usize) -> Result<(), DriverError> {
        let mut outcome = Ok(());
        while self.slots.len() > first {
            outcome = outcome.and(self.pop()?);
        }
        outcome
    }

    /// Unmaps the last slot. The inner result is that of a release the pool made; the granule is
    /// out of the line then.
    fn pop(&mut self) -> Result<Result<(), DriverError>, DriverError> {
        let Some(slot) = self.slots.last() else {
            return Ok(Ok(()));
        };
        if let Some(zeroing) = &slot.zeroing {
            zeroing.quiesce()?;
        }
        if let Ok(range) = self.range(slot.offset, slot.granule.len()) {
            match self.device.driver().unmap(range) {
                Err(error) if !error.is_driver_gone() => return Err(error),
                _ => {}
            }
            if let Some(history) = &self.history {
                let at = range.start().get();
                history.free(at, true);
                history.unmap(NO_STREAM, at, range.len());
            }
        }
        let Some(slot) = self.slots.pop() else {
            return Ok(Ok(()));
        };
        self.granted = self.granted.min(slot.offset);
        if !slot.fences.is_empty() {
            self.pool.note_pending(0, slot.granule.len());
        }
        Ok(slot.granule.give_back())
    }

    /// Marks the slots from `first` on as given back once the fences have passed. Nobody has used
    /// those from `touched` on since they were marked before.
    pub(super) fn defer(&mut self, first: usize, touched: usize, fences: &[Fence]) {
        if fences.is_empty() {
            return;
        }
        let mut bytes = 0;
        for (i, slot) in self.slots.iter_mut().enumerate().skip(first) {
            if slot.fences.is_empty() {
                bytes += slot.granule.len();
            } else if i >= touched {
                continue;
            }
            slot.fences.extend_from_slice(fences);
        }
        self.pool.note_pending(bytes, 0);
    }

    /// Unmaps slots from the end on down to `first`, as long as nobody has to be waited for, until
    /// `want` bytes have come back; the bytes.
    pub(super) fn cut_idle(&mut self, first: usize, want: u64) -> u64 {
        let mut got = 0;
        while self.slots.len() > first && got < want {
            let Some(slot) = self.slots.last_mut() else {
                break;
            };
            if !slot.is_idle() {
                break;
            }
            let bytes = slot.granule.len();
            match self.pop() {
                Ok(_) => got += bytes,
                Err(_) => break,
            }
        }
        got
    }

    /// Fences of the tail that are not among these, each once.
    pub(super) fn fences_besides(&self, known: &[Fence]) -> Vec<Fence> {
        let mut others: Vec<Fence> = Vec::new();
        for fence in self.slots.iter().flat_map(|s| &s.fences) {
            let is_new = |list: &[Fence]| !list.iter().any(|f| f.is_same(fence));
            if is_new(&others) && is_new(known) {
                others.push(fence.clone());
            }
        }
        others
    }

    /// Whether all up to `to` can be opened without waiting.
    pub(super) fn opens_at_once(&mut self, to: u64) -> bool {
        let below = self.slots_below(to);
        self.slots[..below]
            .iter_mut()
            .rev()
            .take_while(|s| !s.open || !s.fences.is_empty() || s.zeroing.is_some())
            .all(Slot::is_idle)
    }

    /// Bytes that wait for fences.
    pub(super) fn pending(&self) -> u64 {
        let fenced = self.slots.iter().filter(|s| !s.fences.is_empty());
        fenced.map(|s| s.granule.len()).sum()
    }

    /// Unmaps everything and frees the reservation. Can be called again after an error.
    pub(super) fn tear_down(&mut self) -> Result<(), DriverError> {
        let released = self.cut_to(0);
        if !self.slots.is_empty() {
            return released;
        }
        let freed = self.reservation.free();
        released.and(freed)
    }

    pub(super) fn is_torn_down(&self) -> bool {
        self.slots.is_empty() && !self.reservation.is_live()
    }
}
