//! One granule in somebody's hands.

use std::fmt;
use std::sync::Arc;

use super::Shared;
use crate::driver::{DriverError, PhysId};

/// A granule that an arena or heap holds; goes back to its pool's idle ones when dropped, so that
/// no path can lose it. Whoever maps it unmaps it first.
pub(crate) struct Granule {
    pool: Arc<Shared>,
    raw: Raw,
    mapped: bool,
    held: bool,
}

/// A granule as the pool's books keep it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Raw {
    pub(crate) phys: PhysId,
    pub(crate) len: u64,
    /// Somebody may have written to it, so it need not read zero.
    pub(crate) dirty: bool,
}

impl Granule {
    /// Takes over a granule that the books count as in flight.
    pub(super) fn new(pool: Arc<Shared>, raw: Raw) -> Self {
        Self {
            pool,
            raw,
            mapped: false,
            held: true,
        }
    }

    pub(crate) fn phys(&self) -> PhysId {
        self.raw.phys
    }

    pub(crate) fn len(&self) -> u64 {
        self.raw.len
    }

    pub(crate) fn is_dirty(&self) -> bool {
        self.raw.dirty
    }

    /// Tells the books that it is mapped now (and may be written from now on).
    pub(crate) fn set_mapped(&mut self) {
        if !self.mapped {
            self.mapped = true;
            self.raw.dirty = true;
            self.pool.note_mapped(self.raw.len);
        }
    }

    /// Tells the books that it is mapped nowhere now.
    pub(crate) fn set_unmapped(&mut self) {
        if self.mapped {
            self.mapped = false;
            self.pool.note_unmapped(self.raw.len);
        }
    }
}

impl Granule {
    /// Gives it back to the pool and reports a failed release (the granule is then kept idle).
    pub(crate) fn give_back(mut self) -> Result<(), DriverError> {
        self.put()
    }

    /// Leaves the granule in flight, for the pool to file it itself.
    pub(super) fn into_raw(mut self) -> Raw {
        self.set_unmapped();
        self.held = false;
        self.raw
    }

    fn put(&mut self) -> Result<(), DriverError> {
        self.set_unmapped();
        match std::mem::replace(&mut self.held, false) {
            true => self.pool.put(self.raw),
            false => Ok(()),
        }
    }
}

impl Drop for Granule {
    fn drop(&mut self) {
        // A failed release has been counted and logged by the pool, which keeps the granule.
        let _ = self.put();
    }
}

impl fmt::Debug for Granule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Granule")
            .field("raw", &self.raw)
            .field("mapped", &self.mapped)
            .finish_non_exhaustive()
    }
}
