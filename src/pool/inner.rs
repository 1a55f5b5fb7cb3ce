//! The pool's inner workings: how memory is found, created, released and handed out. No lock is held
//! across a driver call.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::ahead::Ahead;
use super::books::{Admission, Books, Held};
use super::choose::Need;
use super::config::{Policy, PoolConfig};
use super::granule::{Granule, Raw};
use super::{Effort, Holder};
use crate::driver::DriverError;
use crate::stream::Stream;
use crate::sync::Mutex;
use crate::{Device, Error, Limit, Result};

/// How long an allocation that is out of memory gives other threads to end the driver calls they are
/// in, which may give memory back.
pub(crate) const BUSY: Duration = Duration::from_millis(10);

/// Pause between two looks.
const PAUSE: Duration = Duration::from_micros(50);

/// A search for memory.
struct Quest<'a> {
    /// Holders that ask, and so cannot be asked.
    asking: usize,
    /// Gets memory back from those; what one of [`Holder::reclaim`] answers.
    own: &'a mut dyn FnMut(u64) -> u64,
    requested: u64,
    effort: Effort,
    started: Instant,
    /// How long the fences of deferred shrinks are waited for.
    wait: Duration,
}

pub(crate) struct Shared {
    pub(super) device: Device,
    pub(super) config: PoolConfig,
    pub(super) granularity: u64,
    pub(super) books: Mutex<Books>,
    pub(super) holders: Mutex<Vec<Weak<dyn Holder>>>,
    pub(super) ahead: Ahead,
    pub(super) service: Mutex<Option<Stream>>,
}

impl Shared {
    pub(crate) fn zeroes(&self) -> bool {
        self.config.zero_on_handover
    }

    /// The largest granule one growth may take. A static pool has only the ordinary one.
    pub(crate) fn largest_granule(&self) -> u64 {
        match self.config.policy {
            Policy::Static => self.config.granule,
            _ => self.config.largest_granule,
        }
    }

    /// The smallest step an arena grows by.
    pub(crate) fn smallest_step(&self) -> u64 {
        match self.config.policy {
            Policy::Static => self.config.granule,
            _ => self.granularity,
        }
    }

    pub(crate) fn register(&self, holder: Weak<dyn Holder>) {
        let mut holders = self.holders.lock();
        holders.retain(|h| h.strong_count() > 0);
        holders.push(holder);
    }

    pub(super) fn live_holders(&self) -> Vec<Arc<dyn Holder>> {
        let holders = self.holders.lock();
        holders.iter().filter_map(Weak::upgrade).collect()
    }

    /// Asks holders for memory nobody uses; the bytes that came back.
    pub(crate) fn reclaim(&self, want: u64) -> u64 {
        self.ask(want).0
    }

    /// As [`reclaim`](Self::reclaim), and how many holders could not be asked.
    pub(crate) fn ask(&self, want: u64) -> (u64, usize) {
        let (mut got, mut busy) = (0, 0);
        for holder in self.live_holders() {
            if got >= want {
                break;
            }
            match holder.reclaim(want - got) {
                Some(bytes) => got += bytes,
                None => busy += 1,
            }
        }
        (got, busy)
    }

    /// Granules for all needs, one list a need, or nothing. `own` gets memory back from the holders
    /// that ask, which are busy asking.
    pub(crate) fn take_all(
        self: &Arc<Self>,
        needs: &[Need],
        effort: Effort,
        own: &mut dyn FnMut(u64) -> u64,
    ) -> Result<Vec<Vec<Granule>>> {
        let requested = needs
            .iter()
            .fold(0u64, |sum, n| sum.saturating_add(n.bytes));
        let mut quest = Quest {
            asking: needs.len(),
            own,
            requested,
            effort,
            started: Instant::now(),
            wait: self.config.wait,
        };
        let admission = self.admit(needs, &mut quest)?;
        let result = self.carry_out(admission, &mut quest);
        self.top_up_later(self);
        result
    }

    /// Granules of exactly these lengths, in any order, or nothing. Takes from the pool alone.
    pub(crate) fn take_exactly(self: &Arc<Self>, lens: &[u64]) -> Result<Vec<Granule>> {
        let requested = lens.iter().fold(0u64, |sum, l| sum.saturating_add(*l));
        let mut quest = Quest {
            asking: 0,
            own: &mut |_| 0,
            requested,
            effort: Effort::Full,
            started: Instant::now(),
            wait: Duration::ZERO,
        };
        let admission = loop {
            let mut books = self.books.lock();
            let missing = match books.admit_exactly(lens) {
                Ok(admission) => break admission,
                Err(missing) => missing,
            };
            if !books.is_releasing() || quest.started.elapsed() >= BUSY {
                return Err(books.shortage(requested, missing, Limit::Budget));
            }
            drop(books);
            crate::sync::pause(PAUSE);
        };
        let lists = self.carry_out(admission, &mut quest)?;
        Ok(lists.into_iter().flatten().collect())
    }

    /// Bytes that could be had without taking from anybody.
    pub(crate) fn available(&self) -> u64 {
        self.books.lock().available()
    }

    /// The error that says how the pool stands.
    pub(crate) fn shortage(&self, requested: u64, missing: u64) -> Error {
        let books = self.books.lock();
        books.shortage(requested, missing, Limit::Budget)
    }

    /// The error for a driver call that said the device has no more.
    pub(crate) fn refusal(&self, requested: u64, missing: u64, error: DriverError) -> Error {
        self.books.lock().refusal(requested, missing, error)
    }

    /// Bytes that holders would give back once queued work is done.
    pub(crate) fn awaited(&self) -> u64 {
        let heaps: u64 = self.live_holders().iter().map(|h| h.awaited()).sum();
        heaps + self.books.lock().stats().pending
    }

    /// Whether some thread is releasing memory just now.
    pub(crate) fn is_releasing(&self) -> bool {
        self.books.lock().is_releasing()
    }

    pub(crate) fn budget(&self) -> u64 {
        self.books.lock().stats().budget
    }

    fn admit(&self, needs: &[Need], quest: &mut Quest<'_>) -> Result<Admission> {
        loop {
            let missing = match self.books.lock().admit(needs) {
                Ok(admission) => return Ok(admission),
                Err(missing) => missing,
            };
            if !self.recover(missing, quest) {
                let books = self.books.lock();
                return Err(books.shortage(quest.requested, missing, Limit::Budget));
            }
        }
    }

    /// Gets memory back from holders, or lets some time pass in which it may come back; false when
    /// there is no more hope.
    fn recover(&self, missing: u64, quest: &mut Quest<'_>) -> bool {
        if quest.effort == Effort::Spare {
            return false;
        }
        let (got, busy) = self.ask(missing);
        if got > 0 || (quest.own)(missing) > 0 {
            return true;
        }
        let waited = quest.started.elapsed();
        let (pending, releasing) = {
            let books = self.books.lock();
            (books.stats().pending > 0, books.is_releasing())
        };
        let hope = (pending && waited < quest.wait)
            || ((releasing || busy > quest.asking) && waited < BUSY);
        if hope {
            crate::sync::pause(PAUSE);
        }
        hope
    }

    fn carry_out(
        self: &Arc<Self>,
        admission: Admission,
        quest: &mut Quest<'_>,
    ) -> Result<Vec<Vec<Granule>>> {
        let mut promised: u64 = admission.create.iter().flatten().sum();
        // From here on every granule is owned, so that no return can lose one.
        let mut lists: Vec<Vec<Granule>> = admission
            .recycle
            .into_iter()
            .map(|list| list.into_iter().map(|raw| self.own(raw)).collect())
            .collect();
        // What the driver refuses is idle again, and nothing depends on it.
        let _ = self.release_all(admission.trade);
        let mut outcome = self.release_all(admission.release).map_err(Error::from);
        if outcome.is_ok() {
            let wanted = admission.create.iter().enumerate();
            for (list, len) in wanted.flat_map(|(i, lens)| lens.iter().map(move |l| (i, *l))) {
                match self.create(len, quest) {
                    Ok(granule) => lists[list].push(granule),
                    Err(error) => {
                        outcome = Err(error);
                        break;
                    }
                }
                promised -= len;
            }
        }
        if let Err(error) = outcome {
            self.books.lock().unpromise(promised);
            return Err(error);
        }
        Ok(lists)
    }

    fn own(self: &Arc<Self>, raw: Raw) -> Granule {
        Granule::new(self.clone(), raw)
    }

    /// Creates a granule whose bytes are promised; makes room on the device if it must.
    fn create(self: &Arc<Self>, len: u64, quest: &mut Quest<'_>) -> Result<Granule> {
        loop {
            let error = match self.device.driver().create(len, self.config.props) {
                Ok(phys) => {
                    self.books.lock().created(len);
                    let dirty = false;
                    return Ok(self.own(Raw { phys, len, dirty }));
                }
                Err(error) => error,
            };
            if !error.is_out_of_memory() {
                return Err(error.into());
            }
            let victims = match quest.effort {
                Effort::Full => self.books.lock().evict(len),
                Effort::Spare => Vec::new(),
            };
            if !victims.is_empty() {
                self.release_all(victims)?;
            } else if !self.recover(len, quest) {
                let books = self.books.lock();
                return Err(books.refusal(quest.requested, len, error));
            }
        }
    }

    /// Releases granules that the books count as being released. All are tried; the first error is
    /// reported and what failed is idle again.
    pub(super) fn release_all(&self, victims: Vec<Raw>) -> Result<(), DriverError> {
        let mut first = Ok(());
        for raw in victims {
            first = first.and(self.release(raw));
        }
        first
    }

    fn release(&self, raw: Raw) -> Result<(), DriverError> {
        match self.device.driver().release(raw.phys) {
            Ok(()) => {
                self.books.lock().released(raw.len);
                Ok(())
            }
            Err(error) if error.is_driver_gone() => {
                self.books.lock().released(raw.len);
                Ok(())
            }
            Err(error) => {
                tracing::warn!(%error, "release refused; granule kept idle");
                self.books.lock().release_failed(raw);
                Err(error)
            }
        }
    }

    pub(crate) fn put(&self, raw: Raw) -> Result<(), DriverError> {
        let release = self.books.lock().put(raw);
        if release { self.release(raw) } else { Ok(()) }
    }

    pub(crate) fn note_mapped(&self, len: u64) {
        self.books.lock().mapped(len);
    }

    pub(crate) fn note_unmapped(&self, len: u64) {
        self.books.lock().unmapped(len);
    }

    pub(crate) fn note_pending(&self, more: u64, less: u64) {
        self.books.lock().pending(more, less);
    }

    /// The pool's own stream, for zeroing when the caller named none.
    pub(crate) fn service_stream(&self) -> Result<Stream> {
        if let Some(stream) = &*self.service.lock() {
            return Ok(stream.clone());
        }
        let fresh = self.device.create_stream()?;
        Ok(self.service.lock().get_or_insert(fresh).clone())
    }

    /// Creates what the static floor lacks, as idle granules; all of it or nothing.
    pub(super) fn fill_floor(self: &Arc<Self>, floor: u64, granule: u64) -> Result<()> {
        let missing = floor.saturating_sub(self.books.lock().stats().created);
        let mut made = Vec::new();
        for _ in 0..missing / granule {
            if !self.books.lock().promise(granule) {
                break;
            }
            let mut quest = Quest {
                asking: 0,
                own: &mut |_| 0,
                requested: missing,
                effort: Effort::Full,
                started: Instant::now(),
                wait: self.config.wait,
            };
            match self.create(granule, &mut quest) {
                Ok(one) => made.push(one),
                Err(error) => {
                    self.books.lock().unpromise(granule);
                    for one in made {
                        let raw = one.into_raw();
                        self.books.lock().begin_release(raw);
                        // The first error is the one to report; a refused release is counted.
                        let _ = self.release(raw);
                    }
                    return Err(error);
                }
            }
        }
        for one in made {
            self.books.lock().shelve(one.into_raw());
        }
        Ok(())
    }

    pub(super) fn set_budget(self: &Arc<Self>, bytes: u64) -> Result<()> {
        let before = self.books.lock().stats();
        let floor = match self.config.policy {
            Policy::Static => bytes - bytes % self.config.granule,
            _ => before.floor,
        };
        if floor > bytes {
            return Err(Error::InvalidConfig {
                what: "budget",
                value: bytes,
                why: "it is below the static base",
            });
        }
        if self.books.lock().in_use() > bytes {
            self.reclaim(u64::MAX);
        }
        let victims = {
            let mut books = self.books.lock();
            let in_use = books.in_use();
            if in_use > bytes {
                return Err(Error::BudgetBelowUse {
                    budget: bytes,
                    in_use,
                });
            }
            books.set_limits(bytes, floor);
            books.evict_over(bytes)
        };
        let done = self
            .release_all(victims)
            .map_err(Error::from)
            .and_then(|()| self.fill_floor(floor, self.config.granule));
        if done.is_err() {
            self.books.lock().set_limits(before.budget, before.floor);
            // What a static pool has lost on the way; a device that refuses is not asked again.
            if let Err(error) = self.fill_floor(before.floor, self.config.granule) {
                tracing::warn!(%error, "below the static floor after a failed change of budget");
            }
        }
        done
    }

    /// Has the worker map ahead for a growing arena.
    pub(crate) fn map_ahead_later(&self, holder: Weak<dyn Holder>) {
        self.ahead.submit(holder);
    }

    pub(super) fn top_up_later(&self, this: &Arc<Self>) {
        if self.config.spare > 0 && self.books.lock().stats().idle < self.config.spare {
            let spare: Arc<dyn Holder> = Arc::new(Spare(Arc::downgrade(this)));
            self.ahead.submit_owned(spare);
        }
    }

    /// Creates idle granules up to the configured spare bytes; stops at any shortage.
    fn top_up(self: &Arc<Self>) {
        let granule = self.config.granule;
        loop {
            {
                let mut books = self.books.lock();
                if books.stats().idle + granule > self.config.spare || !books.promise(granule) {
                    return;
                }
            }
            match self.device.driver().create(granule, self.config.props) {
                Ok(phys) => {
                    let mut books = self.books.lock();
                    books.created(granule);
                    books.shelve(Raw {
                        phys,
                        len: granule,
                        dirty: false,
                    });
                }
                Err(error) => {
                    tracing::debug!(%error, "no spare granule");
                    self.books.lock().unpromise(granule);
                    return;
                }
            }
        }
    }
}

/// The worker's job of keeping spare granules.
struct Spare(Weak<Shared>);

impl Holder for Spare {
    fn held(&self) -> Held {
        Held::default()
    }

    fn reclaim(&self, _: u64) -> Option<u64> {
        Some(0)
    }

    fn map_ahead(&self) {
        if let Some(shared) = self.0.upgrade() {
            shared.top_up();
        }
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("device", &self.device)
            .field("stats", &self.books.lock().stats())
            .finish_non_exhaustive()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.ahead.close();
        for raw in self.books.get_mut().drain() {
            let phys = raw.phys;
            self.device
                .give_back("granule", Box::new(move |d| d.release(phys)));
        }
    }
}
