//! Errors that callers branch on, with the numbers in them.

use crate::defrag::Shortfall;
use crate::driver::{DriverError, DriverKind};
use crate::heap::BlockName;
use crate::units::{Bytes, Va};

/// What this crate's operations return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Which limit an out-of-memory error ran into.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Limit {
    /// The pool's own budget.
    Budget,
    /// The heap's own limit ([`HeapConfig::limit`](crate::HeapConfig::limit)).
    Heap,
    /// The device, or other processes on it.
    Device,
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Budget => "the pool's budget",
            Self::Heap => "the heap's limit",
            Self::Device => "the device",
        })
    }
}

/// What stood where when memory ran out. All figures in bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OutOfMemory {
    /// Bytes of the operation that failed, as they were asked for.
    pub requested: u64,
    /// Bytes of that still missing when no more could be had: what would have had to be created beyond
    /// the limit, in whole granules.
    pub missing: u64,
    /// The limit that was hit.
    pub limit: Limit,
    /// The pool's budget.
    pub budget: u64,
    /// Bytes created by the pool, wherever they are now.
    pub created: u64,
    /// Bytes created and mapped.
    pub mapped: u64,
    /// Bytes created and idle in the pool.
    pub idle: u64,
    /// Bytes held back by work that has not finished (deferred shrinks).
    pub pending: u64,
    /// What the driver said, if the device refused.
    pub driver: Option<DriverError>,
    /// The name that the block was to have; `None` without one, and for arenas.
    pub name: Option<BlockName>,
    /// How the heap stood; `None` for arenas and pools.
    pub heap: Option<HeapShortage>,
}

/// How a heap stood when memory ran out, over all its streams. All figures in bytes but `aliases`.
///
/// `held == live + free`. Of `free`, `idle` bytes lie in granules without a live byte and could move once queued
/// work allows it; the rest lies beside the `pinning` bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HeapShortage {
    /// Physical memory that the heap holds.
    pub held: u64,
    /// The most it may hold, if it has a limit of its own.
    pub limit: Option<u64>,
    /// In live blocks, with `limbo`.
    pub live: u64,
    /// Mapped and free.
    pub free: u64,
    /// The longest free run on the stream that asked.
    pub largest_free: u64,
    /// Free in granules without a live byte: whole granules that could be moved or given back.
    pub idle: u64,
    /// In use in granules that also hold free bytes: what keeps `free - idle` from moving.
    pub pinning: u64,
    /// Held by capture scopes: nothing of it moves or leaves.
    pub scoped: u64,
    /// Freed, and waiting for work of other streams.
    pub limbo: u64,
    /// How many old mappings wait for a fence.
    pub aliases: u64,
    /// Mapped by other holders of the pool: arenas and other heaps.
    pub others: u64,
}

impl std::fmt::Display for HeapShortage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the heap holds {}", Bytes(self.held))?;
        if let Some(limit) = self.limit {
            write!(f, " of at most {}", Bytes(limit))?;
        }
        if self.scoped > 0 {
            write!(f, " ({} of it for graphs)", Bytes(self.scoped))?;
        }
        write!(f, ": {} live", Bytes(self.live))?;
        if self.limbo > 0 {
            write!(
                f,
                " ({} of it waiting for other streams)",
                Bytes(self.limbo)
            )?;
        }
        write!(f, ", {} free", Bytes(self.free))?;
        if self.free > 0 {
            write!(
                f,
                " (longest run {}, {} in whole granules",
                Bytes(self.largest_free),
                Bytes(self.idle),
            )?;
            if self.free > self.idle {
                write!(
                    f,
                    ", {} beside {} in use",
                    Bytes(self.free - self.idle),
                    Bytes(self.pinning),
                )?;
            }
            write!(f, ")")?;
        }
        match self.others {
            0 => Ok(()),
            others => write!(f, "; others hold {}", Bytes(others)),
        }
    }
}

impl std::fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "requested {}", Bytes(self.requested))?;
        if let Some(name) = &self.name {
            write!(f, " for {:?}", &**name)?;
        }
        write!(
            f,
            ", missing {}; limit hit: {}; budget {}, created {}, mapped {}, idle {}, pending {}",
            Bytes(self.missing),
            self.limit,
            Bytes(self.budget),
            Bytes(self.created),
            Bytes(self.mapped),
            Bytes(self.idle),
            Bytes(self.pending),
        )?;
        if let Some(heap) = &self.heap {
            write!(f, "; {heap}")?;
        }
        match &self.driver {
            Some(error) => write!(f, "; {error}"),
            None => Ok(()),
        }
    }
}

/// Everything that can go wrong. An operation that returns an error left its object as it was,
/// unless its documentation says which part was done.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A driver call failed; nothing else explains it.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// No physical memory within the budget or on the device.
    #[error("out of memory: {0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// No such run of contiguous bytes can be made in a heap of movable blocks.
    #[error("out of memory: {0}")]
    Shortfall(Box<Shortfall>),
    /// A size is larger than can be expressed after rounding, or than the limit given.
    #[error("size {requested} is too large (at most {max} bytes)")]
    TooLarge {
        /// Bytes (or elements, where the operation counts in them) asked for.
        requested: u64,
        /// The most that could have been asked for.
        max: u64,
    },
    /// A size or offset is not a multiple of what it must be a multiple of.
    #[error("{what} {value} is not a multiple of {multiple_of}")]
    Misaligned {
        /// What the value is.
        what: &'static str,
        /// The value.
        value: u64,
        /// What it must be a multiple of.
        multiple_of: u64,
    },
    /// A setting makes no sense, alone or with the device.
    #[error("{what} of {value} is not allowed: {why}")]
    InvalidConfig {
        /// Which setting.
        what: &'static str,
        /// Its value.
        value: u64,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Growth past the reserved address range.
    #[error("asked for {asked} bytes, but only {reserved} bytes of addresses are reserved")]
    ReservationExhausted {
        /// Length asked for.
        asked: u64,
        /// Length reserved.
        reserved: u64,
    },
    /// No addresses to reserve: the driver has none, or the bound on all reservations was reached.
    #[error(
        "cannot reserve {requested} bytes of addresses: {reserved} bytes are reserved, the bound is {bound}"
    )]
    AddressSpaceExhausted {
        /// Bytes of addresses asked for.
        requested: u64,
        /// Bytes reserved through this device so far.
        reserved: u64,
        /// The device's bound on reservations.
        bound: u64,
    },
    /// The new budget is below what cannot be given back now.
    #[error("a budget of {budget} bytes is below the {in_use} bytes in use")]
    BudgetBelowUse {
        /// Budget asked for.
        budget: u64,
        /// Bytes that could not be given back.
        in_use: u64,
    },
    /// A range is outside of the object.
    #[error("range of {len} bytes at offset {offset} is outside of {end} bytes")]
    OutOfBounds {
        /// Offset in bytes.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// Length of the object in bytes.
        end: u64,
    },
    /// Views or pins keep the range from being given back.
    #[error("bytes up to {pinned_end} are pinned {pins} times; cannot shrink to {asked}")]
    Pinned {
        /// Length asked for.
        asked: u64,
        /// End of the pinned bytes.
        pinned_end: u64,
        /// How many pins reach past the length asked for.
        pins: usize,
    },
    /// A shape does not fit: wrong number of dimensions, or of elements.
    #[error("shape mismatch in {what}: expected {expected}, got {got}")]
    Shape {
        /// What was compared.
        what: &'static str,
        /// Number expected.
        expected: u64,
        /// Number given.
        got: u64,
    },
    /// An object of another device or pool was passed.
    #[error("{what} belongs to another {owner}")]
    Foreign {
        /// The object passed.
        what: &'static str,
        /// What it should have in common with the callee.
        owner: &'static str,
    },
    /// The same object was passed twice to an operation that needs distinct ones.
    #[error("{what} was given twice")]
    Duplicate {
        /// The object passed.
        what: &'static str,
    },
    /// A handle or address that names nothing (any more).
    #[error("{what} {value:#x} is not known here, or not any more")]
    Stale {
        /// What the handle should be.
        what: &'static str,
        /// The handle or address.
        value: u64,
    },
    /// An address lies inside of something, but is not its start.
    #[error("{at} is not the start of a block")]
    NotAStart {
        /// The address given.
        at: Va,
    },
    /// The driver library could not be opened.
    #[error("no CUDA driver: {tried} could not be opened ({reason})")]
    LibraryMissing {
        /// File names tried.
        tried: String,
        /// What the loader said last.
        reason: String,
    },
    /// The driver library lacks a function this crate needs.
    #[error("the CUDA driver has no {symbol}; it is too old")]
    SymbolMissing {
        /// The function.
        symbol: &'static str,
    },
    /// No device of that number.
    #[error("no device {ordinal}: {count} present")]
    DeviceMissing {
        /// Number asked for.
        ordinal: u32,
        /// Devices present.
        count: u32,
    },
    /// The device or driver cannot do that.
    #[error("{driver} driver: {feature} is not supported ({why})")]
    Unsupported {
        /// The driver asked.
        driver: DriverKind,
        /// What was asked.
        feature: &'static str,
        /// How that was found out.
        why: String,
    },
    /// `GRANULE_DRIVER` holds something else than `cuda`, `host` or `sim`.
    #[error("GRANULE_DRIVER is {value:?}; use cuda, host or sim")]
    UnknownDriver {
        /// The value found.
        value: String,
    },
    /// CUDA cannot be used in a forked child; the object belongs to the parent.
    #[error("made in process {owner}, used in its forked child {child}")]
    Forked {
        /// The process that made the object.
        owner: u32,
        /// This process.
        child: u32,
    },
    /// Waiting took longer than allowed.
    #[error("gave up after {waited_us} us of waiting")]
    TimedOut {
        /// Microseconds waited.
        waited_us: u64,
    },
    /// The stream is being captured into a graph: nothing can wait for its work, nor it for other work.
    #[error("stream {stream} is being captured into a graph")]
    Capturing {
        /// The stream's key.
        stream: u64,
    },
    /// A recount of the books does not give what they say: a bug in this crate, or memory changed
    /// behind its back.
    #[error("books say {booked} for {what}, a recount says {counted}")]
    Inconsistent {
        /// What was recounted.
        what: &'static str,
        /// The figure in the books.
        booked: u64,
        /// The figure recounted.
        counted: u64,
    },
    /// Internal thread could not be started.
    #[error("cannot start the {what} thread: {reason}")]
    Thread {
        /// Which thread.
        what: &'static str,
        /// What the system said.
        reason: String,
    },
}

impl Error {
    /// An error if a figure of some books is not what a recount gives.
    pub(crate) fn recount(what: &'static str, booked: u64, counted: u64) -> crate::Result<()> {
        match booked == counted {
            true => Ok(()),
            false => Err(Self::Inconsistent {
                what,
                booked,
                counted,
            }),
        }
    }

    /// Whether freeing memory and trying again may help.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory(_) | Self::Shortfall(_) => true,
            Self::Driver(e) => e.is_out_of_memory(),
            _ => false,
        }
    }

    /// The driver's error, if there is one behind this.
    #[must_use]
    pub fn driver_error(&self) -> Option<&DriverError> {
        match self {
            Self::Driver(e) => Some(e),
            Self::OutOfMemory(shortage) => shortage.driver.as_ref(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_stay_small() {
        // Results travel by value on hot paths; larger payloads are boxed.
        assert!(size_of::<Error>() <= 64, "{}", size_of::<Error>());
    }

    #[test]
    fn a_shortage_reads_well() {
        use crate::units::MIB;
        let mut why = OutOfMemory {
            requested: 40 * MIB,
            missing: 8 * MIB,
            limit: Limit::Heap,
            budget: 128 * MIB,
            created: 64 * MIB,
            mapped: 62 * MIB,
            idle: 2 * MIB,
            pending: 0,
            driver: None,
            name: None,
            heap: None,
        };
        let pool = "budget 128 MiB, created 64 MiB, mapped 62 MiB, idle 2 MiB, pending 0 B";
        let start = "missing 8 MiB; limit hit: the heap's limit";
        let bare = format!("requested 40 MiB, {start}; {pool}");
        assert_eq!(why.to_string(), bare);
        let mut heap = HeapShortage {
            held: 40 * MIB,
            live: 40 * MIB,
            ..HeapShortage::default()
        };
        why.heap = Some(heap);
        let heaps = "the heap holds 40 MiB: 40 MiB live, 0 B free";
        assert_eq!(why.to_string(), format!("{bare}; {heaps}"));
        heap = HeapShortage {
            limit: Some(48 * MIB),
            live: 30 * MIB,
            free: 10 * MIB,
            largest_free: 6 * MIB,
            idle: 4 * MIB,
            pinning: 12 * MIB,
            limbo: MIB,
            others: 22 * MIB,
            ..heap
        };
        why.heap = Some(heap);
        why.name = Some("weights".into());
        let heaps = "the heap holds 40 MiB of at most 48 MiB: 30 MiB live \
                     (1 MiB of it waiting for other streams), 10 MiB free (longest run 6 MiB, \
                     4 MiB in whole granules, 6 MiB beside 12 MiB in use); others hold 22 MiB";
        let all = format!("requested 40 MiB for \"weights\", {start}; {pool}; {heaps}");
        assert_eq!(why.to_string(), all);
    }
}
