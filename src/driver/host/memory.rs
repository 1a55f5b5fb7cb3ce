//! The memory itself: one memory file, its mappings, and accesses to them. All unsafe code of the
//! host driver is here.
//!
//! Why the functions of [`Space`] are safe to call:
//!
//! * **Ours.** Addresses that are unmapped, mapped over or protected lie in a reservation of the
//!   [`Table`], that is in a range that the kernel gave to this driver and that has not been given
//!   back. No Rust object lives there.
//! * **There.** An access happens under the read lock of the table, after
//!   [`Table::check`] found every byte mapped with the rights needed. Mappings and rights change
//!   only under the write lock, so they stay for the whole access. The rights in the table are
//!   never more than those of the page tables, and the file reaches past every extent in the
//!   table, so that no access can fault.
//! * **Shared.** Device memory is never behind a Rust reference, except as `&[AtomicU64]` for the
//!   time of one access. Two streams that touch the same bytes without an order are a bug of the
//!   caller, as on CUDA: which bytes result is not defined. The kernels' accesses are atomic. The
//!   compiler knows no other pointer to this memory to draw conclusions about: addresses come from
//!   system calls and go through integers.
//! * **One process.** A forked child shares the mappings, but neither the books nor the workers.
//!   Nothing here is called in it ([`Space::is_forked`]); its copy is left to its exit.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::AtomicU64;

use rustix::fd::OwnedFd;
use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

use super::table::{Extent, Fault, Table};
use crate::driver::{Access, DriverCode, PhysId};
use crate::sync::RwLock;
use crate::units::{Va, VaRange, round_up};

type Outcome<T> = Result<T, DriverCode>;

/// Reservations, granules and mappings of one device, and the memory behind them.
#[derive(Debug)]
pub(super) struct Space {
    table: RwLock<Table>,
    file: OwnedFd,
    page: u64,
    owner: u32,
}

impl Space {
    /// `table` must be empty.
    pub(super) fn new(table: Table) -> Outcome<Self> {
        let file = rustix::fs::memfd_create(c"granule-host", MemfdFlags::CLOEXEC).map_err(code)?;
        Ok(Self {
            table: RwLock::new(table),
            file,
            page: page_size(),
            owner: std::process::id(),
        })
    }

    /// Whether this process is a forked child of the one that made the space.
    pub(super) fn is_forked(&self) -> bool {
        std::process::id() != self.owner
    }

    /// Makes this process look like a child.
    #[cfg(test)]
    pub(super) fn pretend_forked(&mut self) {
        self.owner = self.owner.wrapping_add(1);
    }

    /// Bytes that may still be created.
    pub(super) fn free(&self) -> u64 {
        self.table.read().free()
    }

    /// Granules, mappings and reservations.
    pub(super) fn counts(&self) -> (usize, usize, usize) {
        self.table.read().counts()
    }

    /// Bytes of memory that the file holds.
    pub(super) fn resident(&self) -> u64 {
        let blocks = rustix::fs::fstat(&self.file).map_or(0, |stat| stat.st_blocks);
        u64::try_from(blocks).map_or(0, |blocks| blocks * 512)
    }

    pub(super) fn reserve(&self, len: u64, align: u64) -> Outcome<VaRange> {
        let mut table = self.table.write();
        let align = table.can_reserve(len, align)?;
        // Room to cut an aligned range out: mmap aligns to pages only.
        let room = len
            .checked_add(align - self.page)
            .ok_or(DriverCode::OUT_OF_MEMORY)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: without FIXED the kernel picks addresses that nothing else uses.
        let base = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), size(room)?, ProtFlags::empty(), flags)
        };
        let base = base.map_err(code)?.expose_provenance() as u64;
        let start = round_up(base, align).ok_or(DriverCode::UNKNOWN)?;
        let (head, tail) = (start - base, base + room - start - len);
        // Cutting off can fail at the limit on mappings. What is left then goes as a whole.
        if let Err(e) = self.drop_addresses(base, head) {
            let _ = self.drop_addresses(base, room);
            return Err(e);
        }
        if let Err(e) = self.drop_addresses(start + len, tail) {
            let _ = self.drop_addresses(start, len + tail);
            return Err(e);
        }
        let range = VaRange::new(Va::new(start), len).ok_or(DriverCode::UNKNOWN)?;
        table.book_reservation(range);
        Ok(range)
    }

    /// Gives addresses back to the kernel. They must be ours, with nothing of value in them.
    fn drop_addresses(&self, start: u64, len: u64) -> Outcome<()> {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: callers pass parts of a range that the kernel gave to this driver and that the
        // table does not (any more) hold with a mapping in it: ours, and no access can be under
        // way (module documentation).
        unsafe { rustix::mm::munmap(address(start), size(len)?) }.map_err(code)
    }

    pub(super) fn free_reservation(&self, range: VaRange) -> Outcome<()> {
        let mut table = self.table.write();
        table.can_free_reservation(range)?;
        self.drop_addresses(range.start().get(), range.len())?;
        table.book_freed_reservation(range);
        Ok(())
    }

    pub(super) fn create(&self, len: u64) -> Outcome<PhysId> {
        let mut table = self.table.write();
        let extent = table.can_create(len)?;
        if let Some(end) = table.file_must_grow_to(extent) {
            retry(|| rustix::fs::ftruncate(&self.file, end)).map_err(code)?;
        }
        Ok(table.book_created(extent))
    }

    pub(super) fn release(&self, phys: PhysId) -> Outcome<()> {
        let unused = self.table.write().release(phys)?;
        self.give_back(unused);
        Ok(())
    }

    /// Returns the pages of extents that nothing refers to, without a lock: that takes time.
    fn give_back(&self, extents: impl IntoIterator<Item = Extent>) {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for extent in extents {
            match retry(|| rustix::fs::fallocate(&self.file, hole, extent.offset, extent.len)) {
                Ok(()) => self.table.write().recycle(extent),
                // The caller's reference is gone either way. Handing the extent out again would
                // show old bytes, so it stays out of use and counted as used.
                Err(e) => tracing::warn!(?extent, error = %e, "host memory was not given back"),
            }
        }
    }

    pub(super) fn map(&self, range: VaRange, phys: PhysId) -> Outcome<()> {
        let mut table = self.table.write();
        let extent = table.can_map(range, phys)?;
        // SAFETY: the range lies in a reservation and nothing is mapped there (can_map): it is
        // ours, and no access is under way.
        let mapped = unsafe {
            rustix::mm::mmap(
                address(range.start().get()),
                size(range.len())?,
                ProtFlags::empty(),
                MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE,
                &self.file,
                extent.offset,
            )
        };
        mapped.map_err(code)?;
        table.book_mapped(range, phys);
        Ok(())
    }

    pub(super) fn set_access(&self, range: VaRange, access: Access) -> Outcome<()> {
        let mut table = self.table.write();
        let mappings = table.covered(range)?;
        protect_all(&mut table, range, &mappings, Some(access))
    }

    pub(super) fn unmap(&self, range: VaRange) -> Outcome<()> {
        let mut table = self.table.write();
        let mappings = table.covered(range)?;
        // One call for all mappings, so that it cannot stop half-way: the kernel checks the limit
        // on mappings before it takes the old ones away.
        // SAFETY: the range consists of whole mappings (covered): it is ours, and no access is
        // under way, since the table is locked for writing.
        let replaced = unsafe {
            rustix::mm::mmap_anonymous(
                address(range.start().get()),
                size(range.len())?,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE,
            )
        };
        match replaced {
            Ok(_) => {}
            // At the limit on mappings the kernel refuses even a call that would lower their
            // number, and whoever undoes a refused map must be able to unmap. Without rights the
            // old mapping is as good as the `PROT_NONE` one of a reservation, and goes with it.
            Err(Errno::NOMEM) => protect_all(&mut table, range, &mappings, None)?,
            Err(e) => return Err(code(e)),
        }
        let unused = table.book_unmapped(range);
        drop(table);
        self.give_back(unused);
        Ok(())
    }

    /// Runs `access` with a pointer to `range` while it is certain to be mapped with the rights
    /// `need`. The pointer may be used for such accesses until `access` returns.
    fn access<R>(
        &self,
        range: VaRange,
        need: Access,
        access: impl FnOnce(*mut u8, usize) -> R,
    ) -> Result<R, Fault> {
        let table = self.table.read();
        table.check(range, need)?;
        let len = usize::try_from(range.len()).map_err(|_| Fault(range.start().get()))?;
        Ok(access(address(range.start().get()).cast(), len))
    }

    /// Sets every byte of `range`.
    pub(super) fn fill(&self, range: VaRange, byte: u8) -> Result<(), Fault> {
        self.access(range, Access::ReadWrite, |to, len| {
            // SAFETY: `len` bytes at `to` are mapped and writable now ("There").
            unsafe { to.write_bytes(byte, len) }
        })
    }

    /// Copies `src` to `dst`.
    pub(super) fn copy(&self, dst: Va, src: VaRange) -> Result<(), Fault> {
        let target = VaRange::new(dst, src.len()).ok_or(Fault(dst.get()))?;
        let table = self.table.read();
        table.check(src, Access::Read)?;
        table.check(target, Access::ReadWrite)?;
        let len = usize::try_from(src.len()).map_err(|_| Fault(dst.get()))?;
        let (to, from) = (address(dst.get()), address(src.start().get()));
        // SAFETY: `len` bytes are mapped and readable at `from`, writable at `to`, for as long as
        // `table` is locked ("There"); ptr::copy allows any overlap.
        unsafe { ptr::copy(from.cast::<u8>(), to.cast::<u8>(), len) };
        drop(table);
        Ok(())
    }

    /// Copies host bytes to `dst`.
    pub(super) fn store(&self, dst: Va, src: &[u8]) -> Result<(), Fault> {
        let range = VaRange::new(dst, src.len() as u64).ok_or(Fault(dst.get()))?;
        self.access(range, Access::ReadWrite, |to, len| {
            // SAFETY: `len`, the length of `src`, bytes at `to` are mapped and writable now
            // ("There"); ptr::copy allows any overlap.
            unsafe { ptr::copy(src.as_ptr(), to, len) }
        })
    }

    /// Copies device bytes from `src` on to the host.
    pub(super) fn load(&self, dst: &mut [u8], src: Va) -> Result<(), Fault> {
        let range = VaRange::new(src, dst.len() as u64).ok_or(Fault(src.get()))?;
        self.access(range, Access::Read, |from, len| {
            // SAFETY: `len`, the length of `dst`, bytes at `from` are mapped and readable now
            // ("There"); ptr::copy allows any overlap.
            unsafe { ptr::copy(from, dst.as_mut_ptr(), len) }
        })
    }

    /// Runs `work` on the words of `range`, which must start at a multiple of 8. With
    /// [`Access::Read`] the words may only be loaded, relaxed.
    pub(super) fn words<R>(
        &self,
        range: VaRange,
        need: Access,
        work: impl FnOnce(&[AtomicU64]) -> R,
    ) -> Result<R, Fault> {
        if !range.start().is_aligned(8) {
            return Err(Fault(range.start().get()));
        }
        self.access(range, need, |at, len| {
            // SAFETY: `len` bytes at `at` are mapped now and until the end of this closure
            // ("There"), aligned for u64, and every bit pattern is a valid one. The slice lets
            // others change the words (they are atomics). Loads of up to 8 bytes with relaxed
            // order are allowed on read-only memory (std::sync::atomic, "Atomic accesses to
            // read-only memory").
            work(unsafe { std::slice::from_raw_parts(at.cast::<AtomicU64>(), len / 8) })
        })
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        if self.is_forked() {
            return;
        }
        let reservations: Vec<_> = self.table.get_mut().reservations().collect();
        for range in reservations {
            // Mappings lie inside of reservations, so they go with them. `&mut self`: nobody else
            // can access them.
            if let Err(e) = self.drop_addresses(range.start().get(), range.len()) {
                tracing::warn!(%range, error = %e, "host addresses were not given back");
            }
        }
    }
}

/// Sets the rights of the mappings that `range` consists of and books them, of all or of none.
fn protect_all(
    table: &mut Table,
    range: VaRange,
    mappings: &[(VaRange, Option<Access>)],
    access: Option<Access>,
) -> Outcome<()> {
    // One call, which does not have to split what the kernel sees as one mapping.
    if let Err(e) = protect(range, access) {
        // It may have stopped half-way. Setting rights that are there already does nothing.
        for &(mapping, before) in mappings {
            if protect(mapping, before).is_err() {
                // Going back may have to split mappings as well. The books must not promise more
                // than the page tables do.
                table.book_access(mapping.start(), weaker(before, access));
            }
        }
        return Err(e);
    }
    for (mapping, _) in mappings {
        table.book_access(mapping.start(), access);
    }
    Ok(())
}

/// Sets the rights of mappings. On failure those of a part may be set.
fn protect(range: VaRange, access: Option<Access>) -> Outcome<()> {
    let flags = match access {
        None => MprotectFlags::empty(),
        Some(Access::Read) => MprotectFlags::READ,
        Some(Access::ReadWrite) => MprotectFlags::READ | MprotectFlags::WRITE,
    };
    // SAFETY: the callers pass whole mappings of the table, which they hold locked for writing:
    // ours, and no access is under way.
    unsafe { rustix::mm::mprotect(address(range.start().get()), size(range.len())?, flags) }
        .map_err(code)
}

/// The rights that both allow.
const fn weaker(a: Option<Access>, b: Option<Access>) -> Option<Access> {
    match (a, b) {
        (None, _) | (_, None) => None,
        (Some(Access::ReadWrite), Some(Access::ReadWrite)) => Some(Access::ReadWrite),
        (Some(_), Some(_)) => Some(Access::Read),
    }
}

fn address(raw: u64) -> *mut c_void {
    // Addresses in the table come from `usize` pointers, so nothing is cut off for them.
    ptr::with_exposed_provenance_mut(raw as usize)
}

fn size(len: u64) -> Outcome<usize> {
    usize::try_from(len).map_err(|_| DriverCode::OUT_OF_MEMORY)
}

fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

const fn code(errno: Errno) -> DriverCode {
    match errno {
        Errno::NOMEM | Errno::NOSPC | Errno::MFILE | Errno::NFILE => DriverCode::OUT_OF_MEMORY,
        _ => DriverCode::UNKNOWN,
    }
}

/// Bytes of a page.
pub(super) fn page_size() -> u64 {
    rustix::param::page_size() as u64
}
