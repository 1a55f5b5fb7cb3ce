//! The check kernels, and work that ends when told.
//!
//! A [`Hold`] is a kernel of one thread that watches a word of pinned host memory. A host function
//! would do with less, but libcuda may run host functions one after the other, and then one hold
//! keeps the stream of another from going on.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::bindings as sys;
use super::context::{Bound, Core, done, handle, id, stream_handle};
use crate::driver::{Call, DriverCode, DriverError, DriverResult, Hold, Kernel, StreamId};
use crate::sync::Mutex;
use crate::units::VaRange;

/// The PTX text, ended as `cuModuleLoadData` wants it.
const PTX: &str = concat!(include_str!("kernels.ptx"), "\0");

const WRITE_PATTERN: &CStr = c"granule_write_pattern";
const CHECK_PATTERN: &CStr = c"granule_check_pattern";
const READ_SUM: &CStr = c"granule_read_sum";
const SPIN: &CStr = c"granule_spin";
const HOLD: &CStr = c"granule_hold";
const COPY_BATCH: &CStr = c"granule_copy_batch";

/// Words of host memory that holds are released through.
const SLOTS: usize = 512;
const WORD: u64 = 8;

/// A kernel of the module; a `CUfunction` as an integer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Function(u64);

/// The module, loaded into the primary context by the first launch or hold. It and the slots go
/// with the context: unloading may wait for all work of the context, and so for the hold of another
/// driver that is released by the thread that waits.
#[derive(Debug)]
pub(super) struct Kernels {
    write_pattern: Function,
    check_pattern: Function,
    read_sum: Function,
    spin: Function,
    hold: Function,
    copy_batch: Function,
    /// Start of `SLOTS` words of pinned host memory. The device sees them at the same address.
    slots: u64,
    free: Mutex<Slots>,
}

/// Who uses which word. Tickets of one slot only rise, so a slot can be given out again while the
/// device has not yet seen the last release.
#[derive(Debug)]
struct Slots {
    free: Vec<usize>,
    tickets: Vec<u64>,
}

impl Kernels {
    pub(super) fn copy_batch(&self) -> Function {
        self.copy_batch
    }

    fn slot(&self, slot: usize) -> u64 {
        self.slots + slot as u64 * WORD
    }

    /// Lets the kernels go on that wait in `slot` for `ticket`.
    fn release(&self, slot: usize, ticket: u64) {
        let word =
            ptr::with_exposed_provenance::<AtomicU64>(super::context::length(self.slot(slot)));
        // SAFETY: the word lies in the pinned allocation that `load` made and zeroed, which lives as
        // long as the context; a core retains that, and `self` is part of one. All access is
        // atomic; the device only reads.
        let word = unsafe { &*word };
        word.store(ticket, Ordering::Release);
        self.free.lock().free.push(slot);
    }
}

impl Core {
    pub(super) fn kernels(&self, bound: &Bound<'_>, call: Call) -> DriverResult<&Kernels> {
        if let Some(kernels) = self.kernels.get() {
            return Ok(kernels);
        }
        let _alone = self.kernels_loading.lock();
        if let Some(kernels) = self.kernels.get() {
            return Ok(kernels);
        }
        let kernels = self.load(bound, call)?;
        Ok(self.kernels.get_or_init(|| kernels))
    }

    fn load(&self, bound: &Bound<'_>, call: Call) -> DriverResult<Kernels> {
        let mut module: sys::CUmodule = ptr::null_mut();
        // SAFETY: the text ends in a zero byte, as a PTX image must; libcuda copies it.
        let code = unsafe { (bound.table.cuModuleLoadData)(&raw mut module, PTX.as_ptr().cast()) };
        done(call, code)?;
        let loaded = self.load_functions(bound, call, module);
        if loaded.is_err() {
            // SAFETY: the module was loaded above and nothing of it runs.
            let _ = unsafe { (bound.table.cuModuleUnload)(module) };
        }
        loaded
    }

    fn load_functions(
        &self,
        bound: &Bound<'_>,
        call: Call,
        module: sys::CUmodule,
    ) -> DriverResult<Kernels> {
        let function = |name: &CStr| {
            let mut function: sys::CUfunction = ptr::null_mut();
            // SAFETY: the module is loaded; the name is a C string; the pointer is to a live local.
            let code = unsafe {
                (bound.table.cuModuleGetFunction)(&raw mut function, module, name.as_ptr())
            };
            done(call, code)?;
            if let Some(load) = bound.table.cuFuncLoad {
                // Otherwise it is loaded by its first launch, which may wait for running work.
                // SAFETY: the function belongs to the module loaded above.
                let code = unsafe { load(function) };
                done(call, code)?;
            }
            Ok(Function(id(function)))
        };
        let write_pattern = function(WRITE_PATTERN)?;
        let check_pattern = function(CHECK_PATTERN)?;
        let read_sum = function(READ_SUM)?;
        let spin = function(SPIN)?;
        let hold = function(HOLD)?;
        let copy_batch = function(COPY_BATCH)?;

        let mut slots: *mut c_void = ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the pointer is to a live local.
        let code = unsafe {
            (bound.table.cuMemHostAlloc)(&raw mut slots, SLOTS * size_of::<AtomicU64>(), flags)
        };
        done(call, code)?;
        // SAFETY: libcuda answered that many bytes of host memory, page-aligned, ours alone.
        unsafe { slots.write_bytes(0, SLOTS * size_of::<AtomicU64>()) };
        Ok(Kernels {
            write_pattern,
            check_pattern,
            read_sum,
            spin,
            hold,
            copy_batch,
            slots: id(slots),
            free: Mutex::new(Slots {
                free: (0..SLOTS).rev().collect(),
                tickets: vec![0; SLOTS],
            }),
        })
    }

    pub(super) fn launch(&self, kernel: Kernel, stream: StreamId) -> DriverResult<()> {
        let call = Call::Launch;
        let (range, sink) = match kernel {
            Kernel::WritePattern { range, .. } => (Some(range), None),
            Kernel::CheckPattern {
                range, mismatches, ..
            } => (Some(range), Some(mismatches)),
            Kernel::ReadSum { range, sink, .. } => (Some(range), Some(sink)),
            Kernel::Spin { .. } => (None, None),
        };
        let whole_words = range.is_none_or(|r| r.start().is_aligned(WORD) && r.len() % WORD == 0)
            && sink.is_none_or(|sink| sink.is_aligned(WORD));
        let (at, len) = range.map_or((0, 0), |r| (r.start().get(), r.len()));
        if !whole_words {
            return Err(DriverError::new(call, DriverCode::INVALID_VALUE).about(at, len));
        }
        let bound = self.enter(call)?;
        self.known(call, self.known.stream(stream))?;
        let sink = sink.map(|sink| VaRange::new(sink, WORD).ok_or(DriverCode::INVALID_VALUE));
        for touched in range.map(Ok).into_iter().chain(sink) {
            let checked = touched.and_then(|touched| self.known.check_ours(touched));
            self.known(call, checked).map_err(|e| e.about(at, len))?;
        }
        let kernels = self.kernels(&bound, call)?;
        let words = |range: VaRange| range.len() / WORD;

        match kernel {
            Kernel::WritePattern { range, seed } => {
                let grid = self.grid(words(range), 256, 8);
                let arguments = [range.start().get(), words(range), seed];
                self.start(&bound, call, kernels.write_pattern, grid, arguments, stream)
            }
            Kernel::CheckPattern {
                range,
                seed,
                mismatches,
            } => {
                let grid = self.grid(words(range), 256, 8);
                let arguments = [range.start().get(), words(range), seed, mismatches.get()];
                self.start(&bound, call, kernels.check_pattern, grid, arguments, stream)
            }
            Kernel::ReadSum {
                range,
                passes,
                sink,
            } => {
                let grid = self.grid(words(range) / 2, 512, 4);
                let arguments = [
                    range.start().get(),
                    words(range),
                    u64::from(passes),
                    sink.get(),
                ];
                self.start(&bound, call, kernels.read_sum, grid, arguments, stream)
            }
            Kernel::Spin { nanos } => {
                self.start(&bound, call, kernels.spin, (1, 1), [nanos], stream)
            }
        }
        .map_err(|e| e.about(at, len))
    }

    /// Blocks and threads for `items`: no more blocks than the device runs at once.
    fn grid(&self, items: u64, threads: u32, blocks_each: u32) -> (u32, u32) {
        let most = self.multiprocessors.saturating_mul(blocks_each);
        let needed = items.div_ceil(u64::from(threads)).max(1);
        let blocks = u32::try_from(needed).map_or(most, |needed| needed.min(most));
        (blocks, threads)
    }

    fn start<const N: usize>(
        &self,
        bound: &Bound<'_>,
        call: Call,
        function: Function,
        grid: (u32, u32),
        arguments: [u64; N],
        stream: StreamId,
    ) -> DriverResult<()> {
        let mut pointers = arguments
            .each_ref()
            .map(|a| ptr::from_ref(a).cast_mut().cast());
        // SAFETY: the function's parameters are exactly the `N` 64-bit values given: both stand in
        // this file and in kernels.ptx. The addresses among them were checked to be device memory.
        unsafe { self.start_with(bound, call, function, grid, &mut pointers, stream) }
    }

    /// # Safety
    ///
    /// The pointers are to as many values as the function has parameters, each laid out as
    /// kernels.ptx says, and the addresses in them are device memory of this context.
    pub(super) unsafe fn start_with(
        &self,
        bound: &Bound<'_>,
        call: Call,
        function: Function,
        (blocks, threads): (u32, u32),
        pointers: &mut [*mut c_void],
        stream: StreamId,
    ) -> DriverResult<()> {
        // SAFETY: the function is one of the loaded module's, the caller vouches for the
        // parameters, and libcuda copies them before it returns.
        let code = unsafe {
            (bound.table.cuLaunchKernel)(
                handle(function.0),
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream_handle(stream),
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        done(call, code)
    }
}

/// Queues a kernel on `stream` that ends when the hold is dropped. The hold keeps `core` alive.
pub(super) fn hold(core: &Arc<Core>, stream: StreamId) -> DriverResult<Hold> {
    let call = Call::Hold;
    let bound = core.enter(call)?;
    core.known(call, core.known.stream(stream))?;
    core.refuse_capture(&bound, call, stream)?;
    let kernels = core.kernels(&bound, call)?;
    let (slot, ticket) = {
        let mut slots = kernels.free.lock();
        let slot = slots
            .free
            .pop()
            .ok_or(DriverError::new(call, DriverCode::OUT_OF_MEMORY))?;
        slots.tickets[slot] += 1;
        (slot, slots.tickets[slot])
    };
    let arguments = [kernels.slot(slot), ticket];
    let started = core.start(&bound, call, kernels.hold, (1, 1), arguments, stream);
    if let Err(e) = started {
        kernels.free.lock().free.push(slot);
        return Err(e);
    }
    let core = Arc::clone(core);
    Ok(Hold::new(move || {
        // A forked child has neither the device nor, perhaps, the pinned memory.
        if !core.is_forked()
            && let Some(kernels) = core.kernels.get()
        {
            kernels.release(slot, ticket);
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_in_the_text_with_as_many_parameters_as_it_is_given() {
        for (name, parameters) in [
            (WRITE_PATTERN, 3),
            (CHECK_PATTERN, 4),
            (READ_SUM, 4),
            (SPIN, 1),
            (HOLD, 2),
        ] {
            let entry = format!(".visible .entry {}(", name.to_str().unwrap());
            let (_, rest) = PTX.split_once(&entry).expect("an entry of that name");
            let (list, _) = rest.split_once(')').unwrap();
            assert_eq!(list.matches(".param .u64").count(), parameters, "{entry}");
            assert_eq!(list.matches(".param").count(), parameters, "{entry}");
        }
        let block = format!(
            ".param .align 8 .b8 args[{}]",
            super::super::batch::ARGUMENT_BYTES
        );
        assert!(PTX.contains(&block), "{block}");
        assert!(PTX.contains(COPY_BATCH.to_str().unwrap()));
        assert_eq!(PTX.matches(".entry").count(), 6);
        assert!(PTX.is_ascii() && PTX.ends_with('\0'));
        assert_eq!(PTX.matches('\0').count(), 1);
    }

    #[test]
    fn the_text_has_the_constants_of_the_pattern() {
        for constant in [
            "0x9E3779B97F4A7C15",
            "0xBF58476D1CE4E5B9",
            "0x94D049BB133111EB",
        ] {
            let uses = PTX.matches(&format!("%z, %z, {constant};")).count();
            assert_eq!(uses, 2, "{constant}");
        }
    }
}
