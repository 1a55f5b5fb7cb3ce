//! What an arena shares with its pins and with the pool: lengths, the line, and what changes them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use super::ladder::Ladder;
use super::line::{Line, Waiter};
use super::pin::Pins;
use super::txn::{self, Needs, Wish};
use crate::driver::DriverError;
use crate::pool::{Effort, Held, Holder, Pool};
use crate::stream::{Fence, Stream};
use crate::sync::{Mutex, MutexGuard};
use crate::units::{Va, VaRange};
use crate::{Error, Result};

/// Whoever keeps the memory alive; the last one gives it back.
pub(super) struct Owner {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub(super) pool: Pool,
    pub(super) base: Va,
    pub(super) capacity: u64,
    pub(super) ladder: Ladder,
    pub(super) look_ahead: u64,
    /// Only ever held for a moment.
    pub(super) meta: Mutex<Meta>,
    /// Held across driver calls; taken before `meta`.
    pub(super) line: Mutex<Line>,
    pub(super) uses: Mutex<Vec<Stream>>,
    pub(super) ahead_asked: AtomicBool,
    pub(super) this: Weak<Self>,
}

#[derive(Default)]
pub(super) struct Meta {
    pub(super) len: u64,
    /// Bytes that can be used without a driver call.
    pub(super) open: u64,
    /// Bytes that were in use at some time since they were mapped, so that work may be queued.
    pub(super) touched: u64,
    pub(super) pins: Pins,
    /// Nobody is left who could use it.
    pub(super) retired: bool,
}

impl Meta {
    pub(super) fn set_len(&mut self, len: u64) {
        self.len = len;
        self.touched = self.touched.max(len);
    }

    pub(super) fn check_pins(&self, to: u64) -> Result<()> {
        match self.pins.past(to) {
            Some((pinned_end, pins)) => Err(Error::Pinned {
                asked: to,
                pinned_end,
                pins,
            }),
            None => Ok(()),
        }
    }
}

impl Shared {
    /// Addresses inside the reservation; empty at the base if they would not be.
    pub(super) fn sub(&self, offset: u64, len: u64) -> VaRange {
        let start = self.base.checked_add(offset).unwrap_or(self.base);
        VaRange::new(start, len).unwrap_or(VaRange::EMPTY)
    }

    pub(super) fn check_fits(&self, to: u64) -> Result<()> {
        if to > self.capacity {
            return Err(Error::ReservationExhausted {
                asked: to,
                reserved: self.capacity,
            });
        }
        Ok(())
    }

    pub(super) fn grow(&self, to: u64, waiter: Waiter<'_>) -> Result<()> {
        {
            let mut meta = self.meta.lock();
            if to <= meta.open {
                let len = meta.len.max(to);
                meta.set_len(len);
                let (len, open) = (meta.len, meta.open);
                drop(meta);
                self.look_ahead_if_due(len, open);
                return Ok(());
            }
        }
        let grown = txn::grow(&[Wish { arena: self, to }], waiter);
        self.say();
        grown?;
        self.look_ahead_now();
        Ok(())
    }

    pub(super) fn extend(&self, bytes: u64) -> Result<VaRange> {
        loop {
            let to = {
                let mut meta = self.meta.lock();
                let offset = meta.len;
                let to = offset.saturating_add(bytes);
                if to <= meta.open {
                    meta.set_len(to);
                    let open = meta.open;
                    drop(meta);
                    self.look_ahead_if_due(to, open);
                    return Ok(self.sub(offset, bytes));
                }
                to
            };
            self.check_fits(to)?;
            self.open_to(to)?;
        }
    }

    /// Maps up to `to` without changing the length.
    fn open_to(&self, to: u64) -> Result<()> {
        let mut line = self.line.lock();
        let done = self.map_to(&mut line, to, Effort::Full);
        self.publish(&line);
        done
    }

    fn map_to(&self, line: &mut Line, to: u64, effort: Effort) -> Result<()> {
        let needs = Needs::of(&[(self, &*line, to)]);
        let mut granules = needs.take(&self.pool, effort, &mut |_| 0)?;
        let before = line.slots();
        let list = granules.pop().unwrap_or_default();
        let done = line
            .reopen(to, Waiter::Host)
            .and_then(|()| line.append(list, Waiter::Host));
        match done {
            Ok(()) => line.settle(to),
            Err(_) => line.undo_to(before),
        }
        done
    }

    /// Tells the fast path what the line is like.
    pub(super) fn publish(&self, line: &Line) {
        let mut meta = self.meta.lock();
        meta.open = line.open();
        meta.touched = meta.touched.min(line.end());
    }

    /// A fence behind the work of each recorded stream.
    pub(super) fn fences(&self) -> Result<Vec<Fence>> {
        let uses = self.uses.lock().clone();
        uses.iter().map(Stream::fence).collect()
    }

    pub(super) fn shrink_after(&self, to: u64, fences: &[Fence]) -> Result<()> {
        let mut line = self.line_after(fences)?;
        let first = {
            let mut meta = self.meta.lock();
            meta.check_pins(to)?;
            meta.len = meta.len.min(to);
            // From here on nobody grows into the tail without taking the line.
            meta.open = meta.open.min(meta.len);
            line.slots_below(meta.len)
        };
        let cut = line.cut_to(first);
        self.publish(&line);
        drop(line);
        self.say();
        Ok(cut?)
    }

    /// Says what was recorded; the caller holds no lock.
    pub(super) fn say(&self) {
        let history = self.line.lock().history();
        if let Some(history) = history {
            history.say();
        }
    }

    pub(super) fn tear_down(&self, fences: &[Fence]) -> Result<()> {
        let mut line = self.line_after(fences)?;
        self.tear_down_line(&mut line)?;
        Ok(())
    }

    /// The line, once these fences and those of its tail have passed. It is not held meanwhile: what
    /// is waited for may need others to grow.
    fn line_after(&self, fences: &[Fence]) -> Result<MutexGuard<'_, Line>> {
        let mut passed: Vec<Fence> = Vec::new();
        let mut next = fences.to_vec();
        loop {
            next.iter().try_for_each(Fence::wait)?;
            passed.append(&mut next);
            let line = self.line.lock();
            next = line.fences_besides(&passed);
            if next.is_empty() {
                return Ok(line);
            }
        }
    }

    /// Waits until nothing uses the memory any more.
    fn quiesce(&self) -> Result<(), DriverError> {
        let uses = self.uses.lock().clone();
        uses.iter().try_for_each(Stream::quiesce)?;
        let fences = self.line.lock().fences_besides(&[]);
        fences.iter().try_for_each(Fence::quiesce)
    }

    fn tear_down_line(&self, line: &mut Line) -> Result<(), DriverError> {
        {
            let mut meta = self.meta.lock();
            meta.len = 0;
            meta.open = 0;
        }
        line.tear_down()
    }

    /// Gives back what lies past the length and past `keep`, as far as nobody uses it, up to about
    /// `want` bytes; the bytes.
    pub(super) fn reclaim_from(&self, line: &mut Line, keep: u64, want: u64) -> u64 {
        let (first, touched) = {
            let mut meta = self.meta.lock();
            let keep = keep.max(meta.len);
            meta.open = meta.open.min(keep);
            let touched = meta.touched.max(keep);
            (line.slots_below(keep), line.slots_below(touched))
        };
        let mut got = line.cut_idle(touched, want);
        // Memory that was truncated away may still have work queued on it.
        let short = got < want && touched > first && line.slots() <= touched;
        if let Some(Ok(fences)) = short.then(|| self.fences()) {
            line.defer(first, touched, &fences);
            let mut meta = self.meta.lock();
            meta.touched = meta.touched.min(keep.max(meta.len));
            drop(meta);
            got += line.cut_idle(first, want - got);
        }
        self.publish(line);
        got
    }

    pub(super) fn look_ahead_now(&self) {
        if self.look_ahead > 0 {
            let (len, open) = {
                let meta = self.meta.lock();
                (meta.len, meta.open)
            };
            self.look_ahead_if_due(len, open);
        }
    }

    /// Asks the worker to map when less than half of the look-ahead is left.
    pub(super) fn look_ahead_if_due(&self, len: u64, open: u64) {
        let due = self.look_ahead > 0
            && open.saturating_sub(len) < self.look_ahead.div_ceil(2)
            && open < self.capacity
            && !self.ahead_asked.swap(true, Ordering::AcqRel);
        if due {
            let this: Weak<dyn Holder> = self.this.clone();
            self.pool.shared().map_ahead_later(this);
        }
    }
}

impl Holder for Shared {
    fn held(&self) -> Held {
        let line = self.line.lock();
        Held {
            mapped: line.end(),
            pending: line.pending(),
        }
    }

    fn reclaim(&self, want: u64) -> Option<u64> {
        // Whoever holds the line is growing or shrinking, perhaps the very thread that asks.
        let mut line = self.line.try_lock()?;
        Some(self.reclaim_from(&mut line, 0, want))
    }

    fn map_ahead(&self) {
        self.ahead_asked.store(false, Ordering::Release);
        loop {
            // One granule at a time, so that a caller who needs the line waits for one at most.
            let mut line = self.line.lock();
            let (len, retired) = {
                let meta = self.meta.lock();
                (meta.len, meta.retired)
            };
            if retired || line.is_torn_down() {
                return;
            }
            let target = len.saturating_add(self.look_ahead).min(self.capacity);
            let open = line.open();
            if open >= target {
                return;
            }
            let step = target.min(open.max(line.end()).saturating_add(self.ladder.largest));
            // A caller who needs the line must not wait for fences that it would not wait for.
            if !line.opens_at_once(step) {
                return;
            }
            let mapped = self.map_to(&mut line, step, Effort::Spare);
            self.publish(&line);
            if let Err(error) = mapped {
                tracing::debug!(%error, "nothing mapped ahead");
                return;
            }
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let shared = self.shared.clone();
        // Nothing is mapped ahead from here on, however long the rest takes.
        shared.meta.lock().retired = true;
        let device = shared.pool.device().clone();
        let mut quiet = shared.line.lock().is_torn_down();
        let retry = move |_: &dyn crate::driver::Driver| {
            if !quiet {
                shared.quiesce()?;
                quiet = true;
            }
            let mut line = shared.line.lock();
            shared.tear_down_line(&mut line)
        };
        device.give_back("arena", Box::new(retry));
    }
}
