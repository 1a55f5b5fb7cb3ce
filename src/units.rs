//! Addresses and lengths as types, with checked arithmetic only.

use std::fmt;

/// One kibibyte.
pub const KIB: u64 = 1 << 10;
/// One mebibyte.
pub const MIB: u64 = 1 << 20;
/// One gibibyte.
pub const GIB: u64 = 1 << 30;
/// One tebibyte.
pub const TIB: u64 = 1 << 40;

/// A device virtual address.
///
/// On the host driver it is also an address of this process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Va(u64);

impl Va {
    /// Wraps a raw device address.
    #[inline]
    #[must_use]
    pub const fn new(raw: u64) -> Self {
        Self(raw)
    }

    /// The raw device address.
    #[inline]
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// `self + bytes`, or `None` past the end of the address space.
    #[must_use]
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(raw) => Some(Self(raw)),
            None => None,
        }
    }

    /// Bytes from `base` up to `self`, or `None` if `self` lies below `base`.
    #[must_use]
    pub const fn checked_offset_from(self, base: Self) -> Option<u64> {
        self.0.checked_sub(base.0)
    }

    /// Whether the address is a multiple of `align` (a power of two).
    #[must_use]
    pub const fn is_aligned(self, align: u64) -> bool {
        self.0 & (align - 1) == 0
    }
}

impl fmt::Debug for Va {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Va({:#x})", self.0)
    }
}

impl fmt::Display for Va {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A half-open range of device addresses that never wraps around.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct VaRange {
    start: Va,
    len: u64,
}

impl VaRange {
    /// No byte, at address 0.
    pub const EMPTY: Self = Self {
        start: Va(0),
        len: 0,
    };

    /// `len` bytes from `start`, or `None` if the end does not fit in 64 bits.
    #[inline]
    #[must_use]
    pub const fn new(start: Va, len: u64) -> Option<Self> {
        match start.checked_add(len) {
            Some(_) => Some(Self { start, len }),
            None => None,
        }
    }

    /// First address.
    #[inline]
    #[must_use]
    pub const fn start(self) -> Va {
        self.start
    }

    /// One past the last address.
    #[inline]
    #[must_use]
    pub const fn end(self) -> Va {
        Va(self.start.0 + self.len)
    }

    /// Length in bytes.
    #[inline]
    #[must_use]
    pub const fn len(self) -> u64 {
        self.len
    }

    /// Whether the range holds no byte.
    #[inline]
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Whether all of `other` lies inside.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.start.0 <= other.start.0 && other.end().0 <= self.end().0
    }

    /// Whether at least one byte is in both.
    #[must_use]
    pub const fn overlaps(self, other: Self) -> bool {
        self.start.0 < other.end().0 && other.start.0 < self.end().0
    }

    /// The `len` bytes from `offset` on, or `None` if they do not lie inside.
    #[must_use]
    pub const fn sub(self, offset: u64, len: u64) -> Option<Self> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Some(Self {
                start: Va(self.start.0 + offset),
                len,
            }),
            _ => None,
        }
    }
}

impl fmt::Display for VaRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end())
    }
}

/// `value` rounded up to a multiple of `unit` (a power of two), or `None` on overflow.
#[must_use]
pub const fn round_up(value: u64, unit: u64) -> Option<u64> {
    debug_assert!(unit.is_power_of_two());
    match value.checked_add(unit - 1) {
        Some(v) => Some(v & !(unit - 1)),
        None => None,
    }
}

/// `value` rounded down to a multiple of `unit` (a power of two).
#[must_use]
pub const fn round_down(value: u64, unit: u64) -> u64 {
    debug_assert!(unit.is_power_of_two());
    value & !(unit - 1)
}

/// Shows a byte count in the largest binary unit that keeps it readable: `64 MiB`, `1.50 GiB`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = match self.0 {
            n if n >= TIB => (TIB, "TiB"),
            n if n >= GIB => (GIB, "GiB"),
            n if n >= MIB => (MIB, "MiB"),
            n if n >= KIB => (KIB, "KiB"),
            n => return write!(f, "{n} B"),
        };
        if self.0.is_multiple_of(unit) {
            write!(f, "{} {name}", self.0 / unit)
        } else {
            write!(f, "{:.2} {name}", self.0 as f64 / unit as f64)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_refuse_to_wrap() {
        assert!(VaRange::new(Va::new(u64::MAX), 1).is_none());
        assert!(VaRange::new(Va::new(u64::MAX), 0).is_some());
        let r = VaRange::new(Va::new(0x1000), 0x1000).unwrap();
        assert!(r.sub(0x800, 0x800).is_some());
        assert!(r.sub(0x800, 0x801).is_none());
        assert!(r.sub(1, u64::MAX).is_none());
    }

    #[test]
    fn overlap_is_half_open() {
        let r = |s, l| VaRange::new(Va::new(s), l).unwrap();
        assert!(!r(0, 10).overlaps(r(10, 5)));
        assert!(r(0, 10).overlaps(r(9, 5)));
        assert!(r(0, 10).contains(r(10, 0)));
        assert!(!r(0, 10).contains(r(5, 6)));
    }

    #[test]
    fn rounding_is_checked() {
        assert_eq!(round_up(1, 4096), Some(4096));
        assert_eq!(round_up(4096, 4096), Some(4096));
        assert_eq!(round_up(u64::MAX, 4096), None);
        assert_eq!(round_down(8191, 4096), 4096);
    }

    #[test]
    fn bytes_read_well() {
        assert_eq!(Bytes(64 * MIB).to_string(), "64 MiB");
        assert_eq!(Bytes(3 * GIB / 2).to_string(), "1.50 GiB");
        assert_eq!(Bytes(7).to_string(), "7 B");
    }
}
