//! Settings of an arena.

/// Settings of an [`Arena`](super::Arena). All sizes in bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ArenaConfig {
    /// Bytes of addresses to reserve: the most the arena can ever hold. Addresses cost nothing, so
    /// ask for what it might become. Rounded up to the smallest growth step.
    pub capacity: u64,
    /// If the addresses cannot be had, smaller reservations are tried down to this; `capacity` by
    /// default. [`Arena::capacity`](super::Arena::capacity) says what was got.
    pub min_capacity: Option<u64>,
    /// Bytes that the pool's worker keeps mapped ahead of the length, so that growing does not wait
    /// for the driver; 0 (off) by default. It costs that much memory while the arena may grow; a
    /// pool that is short takes it back.
    pub look_ahead: u64,
    /// The largest granule and growth step of this arena: the device's granularity by a power of two, at
    /// most the pool's largest granule, which is the default. Where several arenas and heaps come and
    /// go in one pool, small ones (32 MiB, as a heap takes) waste less at each end and fit the next taker.
    pub granule: Option<u64>,
}

impl ArenaConfig {
    /// The defaults for that many bytes of addresses.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        Self {
            capacity,
            min_capacity: None,
            look_ahead: 0,
            granule: None,
        }
    }

    /// The settings with that largest granule.
    #[must_use]
    pub fn granule(self, bytes: u64) -> Self {
        Self {
            granule: Some(bytes),
            ..self
        }
    }

    /// The settings with that look-ahead.
    #[must_use]
    pub fn look_ahead(self, bytes: u64) -> Self {
        Self {
            look_ahead: bytes,
            ..self
        }
    }

    /// The settings with that smallest reservation.
    #[must_use]
    pub fn min_capacity(self, bytes: u64) -> Self {
        Self {
            min_capacity: Some(bytes),
            ..self
        }
    }
}
