//! One lane's books: a line of small blocks, a line of large ones, and the granules behind both.

use super::first::FirstFit;
use super::granules::Granules;
use super::index::Index;
use super::policy::Policy;
use super::runs::{Line, State};
use super::table::Tables;
use super::{PAGE_BYTES, UNIT};

/// The line of small blocks.
pub(super) const SMALL: u8 = 0;
/// The line of large blocks.
pub(super) const LARGE: u8 = 1;

/// The line of large blocks has a table with an entry for every 16 KiB: its blocks are all longer. Those of
/// 128 KiB and of 1 MiB and more have their own.
const LARGE_SHIFT: u32 = 6;
const LARGE_SHIFTS: [u32; 3] = [LARGE_SHIFT + 6, LARGE_SHIFT + 3, LARGE_SHIFT];

/// How the caller's marks of who else may use some memory are joined. 0 means nobody but the lane's own stream.
pub trait Uses {
    /// The mark of memory to which both marks apply. Asked only for two different marks, neither 0.
    fn join(&mut self, a: u32, b: u32) -> u32;
}

/// For lanes without marks.
impl Uses for () {
    fn join(&mut self, a: u32, b: u32) -> u32 {
        a.max(b)
    }
}

/// A block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its address.
    pub addr: u64,
    /// Its bytes, rounded up to units.
    pub len: u64,
    /// Who else may still use its memory.
    pub uses: u32,
    /// What `free_hinted` wants to see again: it saves a look into the table.
    pub hint: u32,
}

/// A block that was freed.
pub type Freed = Block;

/// A lane's figures, in bytes unless they say otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of live blocks, rounded up to units.
    pub live: u64,
    /// The most that `live` has been.
    pub live_peak: u64,
    /// How many blocks are live.
    pub blocks: u64,
    /// Bytes of all granules.
    pub held: u64,
    /// How many granules.
    pub granules: u64,
    /// Bytes of granules that lie wholly in free runs: what trimming could return.
    pub idle: u64,
}

/// The books of one lane.
#[derive(Debug)]
pub struct Lane {
    pub(super) lines: [Line; 2],
    pub(super) tables: [Tables; 2],
    pub(super) granules: Granules,
    pub(super) policy: Policy,
    /// First unit and end of each line in the process' addresses.
    pub(super) units: [(u64, u64); 2],
    pub(super) live_units: u64,
    /// The most that was live since memory last left, which says what the lane needs now.
    pub(super) peak_units: u64,
    /// The most that was live before.
    pub(super) past_peak_units: u64,
    pub(super) live_blocks: u64,
}

impl Lane {
    /// Books over the addresses from `base`: `small` bytes for the line of small blocks, then `large` bytes.
    /// All three are multiples of 2 MiB; a line is at most 1 TiB less 2 MiB. `None` otherwise.
    #[must_use]
    pub fn new(policy: Policy, base: u64, small: u64, large: u64) -> Option<Self> {
        let whole = |bytes: u64| bytes.is_multiple_of(PAGE_BYTES);
        let units = |bytes: u64| u32::try_from(bytes / UNIT).ok();
        let granule = |bytes: u64| whole(bytes) && bytes > 0 && bytes <= 1 << 40;
        let rules = granule(policy.granule_max)
            && granule(policy.granule_min)
            && policy.small_max >= UNIT << LARGE_SHIFT;
        if !(rules && whole(base) && whole(small) && whole(large) && small > 0 && large > 0) {
            return None;
        }
        let (middle, end) = (
            base.checked_add(small)?,
            base.checked_add(small)?.checked_add(large)?,
        );
        Some(Self {
            lines: [
                Line::new(units(small)?, Index::Bins(Box::default())),
                Line::new(units(large)?, Index::First(FirstFit::new())),
            ],
            tables: [Tables::new(&[0]), Tables::new(&LARGE_SHIFTS)],
            granules: Granules::new(2),
            policy,
            units: [(base / UNIT, middle / UNIT), (middle / UNIT, end / UNIT)],
            live_units: 0,
            peak_units: 0,
            past_peak_units: 0,
            live_blocks: 0,
        })
    }

    /// The line, units and alignment in units of a request; `None` if it cannot be met by any lane.
    #[inline]
    pub(super) fn shape(&self, size: u64, align: u64) -> Option<(u8, u32, u32)> {
        let len = u32::try_from(size.div_ceil(UNIT).max(1)).ok()?;
        let align = if align <= UNIT {
            1
        } else {
            u32::try_from(align / UNIT).ok()?
        };
        if !align.is_power_of_two() {
            return None;
        }
        Some((u8::from(size > self.policy.small_max), len, align))
    }

    /// The first place at or after a unit of a line whose address is aligned.
    #[inline]
    pub(super) fn up(&self, line: u8, start: u32, align: u32) -> Option<u32> {
        if align == 1 {
            return Some(start);
        }
        let base = self.units[line as usize].0;
        let at = (base + u64::from(start)).checked_next_multiple_of(u64::from(align))?;
        u32::try_from(at - base).ok()
    }

    /// The last place at or before a unit of a line whose address is aligned.
    pub(super) fn down(&self, line: u8, start: u32, align: u32) -> Option<u32> {
        let base = self.units[line as usize].0;
        let at = (base + u64::from(start)) & !(u64::from(align) - 1);
        u32::try_from(at.checked_sub(base)?).ok()
    }

    /// The address of a unit of a line.
    #[inline]
    pub(super) fn addr(&self, line: u8, start: u32) -> u64 {
        (self.units[line as usize].0 + u64::from(start)) * UNIT
    }

    /// The line and unit of an address.
    #[inline]
    fn locate(&self, addr: u64) -> Option<(u8, u32)> {
        let (unit, rest) = (addr / UNIT, addr % UNIT);
        let line = if unit < self.units[0].1 { SMALL } else { LARGE };
        let (from, end) = self.units[line as usize];
        (rest == 0 && unit >= from && unit < end).then(|| (line, (unit - from) as u32))
    }

    /// Enters a node that has become live.
    #[inline]
    pub(super) fn enter(&mut self, line: u8, node: u32) -> Block {
        let n = self.lines[line as usize].node(node);
        let (start, len, uses) = (n.start, n.len, n.uses);
        self.tables[line as usize].set(start, len, node);
        self.live_units += u64::from(len);
        self.live_blocks += 1;
        self.peak_units = self.peak_units.max(self.live_units);
        Block {
            addr: self.addr(line, start),
            len: u64::from(len) * UNIT,
            uses,
            hint: node,
        }
    }

    /// A block of at least `size` bytes from mapped memory, its address a multiple of `align` (a power of two).
    /// `None` if no free run holds it: then `plan` says what to map.
    #[inline]
    pub fn alloc(&mut self, size: u64, align: u64) -> Option<Block> {
        let (line, len, align) = self.shape(size, align)?;
        let run = self.lines[line as usize].find(len.checked_add(align - 1)?)?;
        let start = self.up(line, self.lines[line as usize].node(run).start, align)?;
        let node = self.lines[line as usize].take(run, start, len);
        Some(self.enter(line, node))
    }

    #[inline]
    fn node_at(&self, addr: u64) -> Option<(u8, u32)> {
        let (line, start) = self.locate(addr)?;
        let nodes = &self.lines[line as usize];
        let node = self.tables[line as usize].find(start, |node| {
            let n = nodes.node(node);
            n.start == start && n.state == State::Live
        })?;
        Some((line, node))
    }

    /// The live block that starts at an address; `None` for any other address.
    #[inline]
    #[must_use]
    pub fn block(&self, addr: u64) -> Option<Block> {
        let (line, node) = self.node_at(addr)?;
        let n = self.lines[line as usize].node(node);
        Some(Block {
            addr,
            len: u64::from(n.len) * UNIT,
            uses: n.uses,
            hint: node,
        })
    }

    /// Whether an address lies inside a live block.
    #[must_use]
    pub fn is_inside(&self, addr: u64) -> bool {
        let Some((line, start)) = self.locate(addr & !(UNIT - 1)) else {
            return false;
        };
        let mut live = self.lines[line as usize].nodes().iter();
        live.any(|n| n.state == State::Live && (n.start..n.start + n.len).contains(&start))
    }

    /// Changes the mark of the live block that starts at an address; `None` if there is none or its mark
    /// is not `from`.
    #[inline]
    pub fn retain(&mut self, addr: u64, hint: u32, from: u32, mark: u32) -> Option<Block> {
        let (line, start) = self.locate(addr)?;
        let at = match self.lines[line as usize].nodes().get(hint as usize) {
            Some(n) if n.start == start && n.state == State::Live => hint,
            _ => self.node_at(addr)?.1,
        };
        let n = self.lines[line as usize].node(at);
        if n.uses != from {
            return None;
        }
        let len = u64::from(n.len) * UNIT;
        self.lines[line as usize].set_uses(at, mark);
        Some(Block {
            addr,
            len,
            uses: mark,
            hint: at,
        })
    }

    /// Marks who else may use a live block. False if no block starts there.
    #[inline]
    pub fn mark(&mut self, addr: u64, uses: u32) -> bool {
        let Some((line, node)) = self.node_at(addr) else {
            return false;
        };
        self.lines[line as usize].set_uses(node, uses);
        true
    }

    /// Frees the block that starts at an address. `None` if there is none: a wrong address or a second free.
    #[inline]
    pub fn free(&mut self, addr: u64, uses: &mut impl Uses) -> Option<Freed> {
        let (line, node) = self.node_at(addr)?;
        Some(self.give(line, node, addr, uses))
    }

    /// As `free`, with the hint that came with the block. A wrong hint does no harm.
    #[inline]
    pub fn free_hinted(&mut self, addr: u64, hint: u32, uses: &mut impl Uses) -> Option<Freed> {
        let (line, start) = self.locate(addr)?;
        let known = self.lines[line as usize].nodes().get(hint as usize);
        if known.is_some_and(|n| n.start == start && n.state == State::Live) {
            return Some(self.give(line, hint, addr, uses));
        }
        self.free(addr, uses)
    }

    #[inline]
    fn give(&mut self, line: u8, node: u32, addr: u64, uses: &mut impl Uses) -> Freed {
        let l = &mut self.lines[line as usize];
        let n = l.node(node);
        let freed = Block {
            addr,
            len: u64::from(n.len) * UNIT,
            uses: n.uses,
            hint: node,
        };
        l.give(node, uses);
        self.live_units -= freed.len / UNIT;
        self.live_blocks -= 1;
        freed
    }

    /// Bytes of live blocks, rounded up to units.
    #[inline]
    #[must_use]
    pub fn live(&self) -> u64 {
        self.live_units * UNIT
    }

    /// Bytes of all granules.
    #[inline]
    #[must_use]
    pub fn held(&self) -> u64 {
        self.granules.pages() * PAGE_BYTES
    }

    /// The lane's figures. Walks the free runs longer than 2 MiB.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats {
            live: self.live_units * UNIT,
            live_peak: self.peak_units.max(self.past_peak_units) * UNIT,
            blocks: self.live_blocks,
            held: self.held(),
            granules: self.granules.count() as u64,
            idle: u64::from(self.free_pages()) * PAGE_BYTES,
        }
    }

    /// Where each granule is mapped.
    pub fn mappings(&self) -> impl Iterator<Item = crate::units::VaRange> + '_ {
        self.granules.iter().filter_map(|(_, g)| {
            let addr = self.addr(g.line, g.at * super::PAGE);
            crate::units::VaRange::new(crate::units::Va::new(addr), u64::from(g.len) * PAGE_BYTES)
        })
    }
}
