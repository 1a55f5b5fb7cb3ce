//! What a program of calls has made so far, and what its next call may answer.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};

use granule::capi::*;

pub const MIB: u64 = 1 << 20;

/// The device under PyTorch, among the devices of a program.
pub const TORCH: u64 = u64::MAX;

/// Kinds of handles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Device,
    Stream,
    Pool,
    Arena,
    Heap,
    Import,
}

/// What a call may answer.
#[derive(Clone, Copy)]
pub struct Allowed {
    handles: bool,
    args: bool,
    only_ok: bool,
    never_ok: bool,
    unable: bool,
}

impl Allowed {
    /// Of a call without handles; `ok` if nothing can be wrong.
    pub fn of(ok: bool) -> Self {
        let unsure = Self::handles(true, true);
        if ok { unsure.only_ok() } else { unsure }
    }

    /// Whether all handles are open ones of the right kind, and no pointer is null that may not be.
    pub fn handles(handles: bool, args: bool) -> Self {
        Self {
            handles,
            args,
            only_ok: false,
            never_ok: false,
            unable: false,
        }
    }

    /// The driver may be unable to do that at all: sim has no memory to copy.
    pub fn or_unable(self) -> Self {
        Self {
            unable: true,
            ..self
        }
    }

    /// With these it cannot fail.
    pub fn only_ok(self) -> Self {
        Self {
            only_ok: true,
            ..self
        }
    }

    /// As [`only_ok`](Self::only_ok) if that holds; else it has to fail.
    pub fn only_ok_if(self, holds: bool) -> Self {
        Self {
            only_ok: holds,
            never_ok: !holds,
            ..self
        }
    }
}

/// Sizes around everything that is special, and some in between.
pub fn size(c: u8, d: u8) -> u64 {
    const SIZES: [u64; 26] = [
        0,
        1,
        255,
        256,
        257,
        4096,
        65536,
        MIB - 1,
        MIB,
        MIB + 1,
        2 * MIB,
        2 * MIB + 1,
        3 * MIB,
        5 * MIB,
        8 * MIB,
        17 * MIB,
        32 * MIB,
        64 * MIB,
        100 * MIB,
        257 * MIB,
        1 << 30,
        6 << 30,
        1 << 40,
        i64::MAX as u64,
        u64::MAX - 255,
        u64::MAX,
    ];
    let base = SIZES[usize::from(c) % 26];
    match c / 26 {
        0..=5 => base,
        _ => base.saturating_add(u64::from(d) * 4096),
    }
}

/// A program's things.
pub struct World {
    pub driver: &'static CStr,
    pub is_sim: bool,
    pub calls: u64,
    /// Whether the program may make a device fail for good.
    pub may_break: bool,
    /// It has: any call may fail from here on, and what the driver refuses to take back is left.
    pub broken: bool,
    handles: [Vec<u64>; 6],
    closed: Vec<u64>,
    /// Device that a handle belongs to.
    devices: HashMap<u64, u64>,
    /// Live blocks by heap: address to bytes.
    blocks: HashMap<u64, BTreeMap<u64, u64>>,
    exported: Vec<(*mut c_void, u32, granule_tensor)>,
    /// Blocks of PyTorch.
    pub torch: Vec<(u64, isize)>,
    /// Private pools that were begun and not released.
    pub begun: Vec<(u64, u64)>,
}

impl World {
    /// With a device, a pool, a stream, an arena and a heap.
    pub fn new(on_host: bool) -> Self {
        let mut world = Self {
            driver: if on_host { c"host" } else { c"sim" },
            is_sim: !on_host,
            calls: 0,
            may_break: false,
            broken: false,
            handles: Default::default(),
            closed: Vec::new(),
            devices: HashMap::new(),
            blocks: HashMap::new(),
            exported: Vec::new(),
            torch: Vec::new(),
            begun: Vec::new(),
        };
        let (mut device, mut stream, mut pool, mut arena, mut heap) = (0, 0, 0, 0, 0);
        let config = granule_arena_config {
            capacity: 96 * MIB,
            ..granule_arena_config::default()
        };
        unsafe {
            assert_eq!(
                granule_device_open(world.driver.as_ptr(), &raw mut device),
                GRANULE_OK
            );
            assert_eq!(granule_stream_create(device, &raw mut stream), GRANULE_OK);
            let mut settings = std::mem::MaybeUninit::uninit();
            assert_eq!(granule_pool_config_init(settings.as_mut_ptr()), GRANULE_OK);
            let mut settings = settings.assume_init();
            (settings.budget, settings.wait_us) = (128 * MIB, 500);
            assert_eq!(
                granule_pool_create(device, &raw const settings, &raw mut pool),
                GRANULE_OK
            );
            assert_eq!(
                granule_arena_create(pool, &raw const config, &raw mut arena),
                GRANULE_OK
            );
            assert_eq!(granule_heap_create(pool, null(), &raw mut heap), GRANULE_OK);
        }
        world.made(Kind::Device, GRANULE_OK, device, device);
        for (kind, handle) in [
            (Kind::Stream, stream),
            (Kind::Pool, pool),
            (Kind::Arena, arena),
            (Kind::Heap, heap),
        ] {
            world.made(kind, GRANULE_OK, handle, device);
        }
        world
    }

    /// Open handles of a kind.
    pub fn open(&self, kind: Kind) -> &[u64] {
        &self.handles[kind as usize]
    }

    /// The device that a handle belongs to; 0 for none.
    pub fn device(&self, handle: u64) -> u64 {
        self.devices.get(&handle).copied().unwrap_or(0)
    }

    /// A handle for a call that wants that kind, and whether it is an open one.
    pub fn pick(&self, kind: Kind, selector: u8) -> (u64, bool) {
        let open = self.open(kind);
        let nth =
            |list: &[u64]| (!list.is_empty()).then(|| list[usize::from(selector) % list.len()]);
        let wrong = Kind::Device as usize + (kind as usize + 1 + usize::from(selector) % 5) % 6;
        let handle = match selector {
            0..=199 => nth(open),
            200..=219 => nth(&self.closed),
            220..=229 => nth(&self.handles[wrong]),
            230..=244 => nth(open).map(|handle| handle ^ (1 << (selector % 64))),
            245..=249 => Some(u64::from(selector) - 245),
            _ => Some(u64::MAX << (selector - 250)),
        };
        let handle = handle.unwrap_or(0);
        (handle, open.contains(&handle))
    }

    /// As [`pick`](Self::pick), mostly of the device that another handle belongs to.
    pub fn pick_beside(&self, kind: Kind, selector: u8, other: u64) -> (u64, bool) {
        let device = self.device(other);
        let open = self.open(kind).iter();
        let beside: Vec<u64> = open
            .filter(|one| self.device(**one) == device)
            .copied()
            .collect();
        match selector < 180 && !beside.is_empty() {
            true => (beside[usize::from(selector) % beside.len()], true),
            false => self.pick(kind, selector),
        }
    }

    /// Looks at what a call answered.
    #[track_caller]
    pub fn answer(&self, status: i32, allowed: Allowed) {
        assert!(
            (0..=GRANULE_BUSY).contains(&status),
            "status {status}: {}",
            message()
        );
        if status != GRANULE_OK {
            assert_eq!(granule_last_status(), status);
            assert!(!message().is_empty());
        }
        match (allowed.handles, allowed.args) {
            (true, true) if self.broken => {}
            (true, true) if allowed.unable && message().contains("NOT_SUPPORTED") => {
                assert!(
                    matches!(status, GRANULE_OK | GRANULE_DRIVER),
                    "status {status}"
                );
            }
            (true, true) => {
                assert_ne!(status, GRANULE_STALE, "{}", message());
                assert!(
                    !allowed.only_ok || status == GRANULE_OK,
                    "status {status}: {}",
                    message()
                );
                assert!(!allowed.never_ok || status != GRANULE_OK);
                assert_ne!(status, GRANULE_DRIVER, "{}", message());
            }
            (false, true) => assert!(
                matches!(status, GRANULE_STALE | GRANULE_INVALID_ARGUMENT),
                "status {status}"
            ),
            (true, false) => assert_eq!(status, GRANULE_INVALID_ARGUMENT),
            (false, false) => assert!(
                matches!(status, GRANULE_STALE | GRANULE_INVALID_ARGUMENT),
                "status {status}"
            ),
        }
    }

    /// Notes a new handle.
    pub fn made(&mut self, kind: Kind, status: i32, handle: u64, device: u64) {
        if status != GRANULE_OK {
            return;
        }
        assert!(
            handle != 0 && !self.closed.contains(&handle),
            "{handle:#x} had another owner"
        );
        assert!(self.handles.iter().all(|list| !list.contains(&handle)));
        self.handles[kind as usize].push(handle);
        self.devices.insert(handle, device);
    }

    /// Closes a handle.
    pub fn close(&mut self, kind: Kind, handle: u64, ok: bool) {
        let status = match kind {
            Kind::Device => granule_device_close(handle),
            Kind::Stream => granule_stream_close(handle),
            Kind::Pool => granule_pool_close(handle),
            Kind::Arena => granule_arena_close(handle),
            Kind::Heap => granule_heap_close(handle),
            Kind::Import => granule_import_close(handle),
        };
        self.answer(status, Allowed::handles(ok, true).only_ok());
        if status == GRANULE_OK {
            self.handles[kind as usize].retain(|other| *other != handle);
            self.closed.push(handle);
            self.blocks.remove(&handle);
        }
    }

    /// Figures of an arena; zeros if it is none.
    pub fn info(&self, arena: u64) -> granule_arena_info {
        let mut info = granule_arena_info::default();
        if self.open(Kind::Arena).contains(&arena) {
            assert_eq!(
                unsafe { granule_arena_get_info(arena, &raw mut info) },
                GRANULE_OK
            );
        }
        info
    }

    /// Notes a new block, which lies in no other one.
    pub fn block(&mut self, heap: u64, addr: u64, bytes: u64) {
        if addr == 0 {
            return;
        }
        for (other, blocks) in &self.blocks {
            if self.device(*other) == self.device(heap) {
                let before = blocks.range(..addr + bytes).next_back();
                assert!(
                    before.is_none_or(|(at, len)| at + len <= addr),
                    "blocks overlap"
                );
            }
        }
        assert!(addr.checked_add(bytes).is_some());
        self.blocks.entry(heap).or_default().insert(addr, bytes);
    }

    pub fn freed(&mut self, heap: u64, addr: u64) {
        if let Some(blocks) = self.blocks.get_mut(&heap) {
            blocks.remove(&addr);
        }
    }

    pub fn bytes(&self, heap: u64, addr: u64) -> u64 {
        self.blocks
            .get(&heap)
            .and_then(|blocks| blocks.get(&addr))
            .copied()
            .unwrap_or(0)
    }

    /// An address to give to a heap, and whether it is a live block of it.
    pub fn address(&self, heap: u64, c: u8, d: u8) -> (u64, bool) {
        let none = BTreeMap::new();
        let blocks = self.blocks.get(&heap).unwrap_or(&none);
        let nth = blocks
            .keys()
            .nth(usize::from(c) % blocks.len().max(1))
            .copied();
        let foreign = self
            .blocks
            .iter()
            .filter(|(other, _)| **other != heap)
            .find_map(|(_, blocks)| blocks.keys().next());
        let addr = match d {
            0..=199 => nth,
            200..=219 => nth.map(|addr| addr + u64::from(d)),
            220..=234 => foreign.copied(),
            235..=239 => Some(0),
            _ => Some(size(c, d)),
        };
        let addr = addr.unwrap_or(0);
        (addr, blocks.contains_key(&addr))
    }

    /// Memory that a stream may touch: an arena that waits for it, of its device.
    pub fn place(&self, stream: u64, b: u8) -> Option<(u64, u64)> {
        let arenas = self.open(Kind::Arena);
        let arena = *arenas.get(usize::from(b) % arenas.len().max(1))?;
        let info = self.info(arena);
        if self.device(arena) != self.device(stream)
            || granule_arena_record_use(arena, stream) != GRANULE_OK
        {
            return None;
        }
        let from = info.len / 256 * u64::from(b);
        Some((info.base + from, info.len - from))
    }

    /// Exports a part of an arena.
    pub fn export(&mut self, a: u8, b: u8, c: u8, d: u8, nowhere: bool) {
        let (arena, ok) = self.pick(Kind::Arena, a);
        let mut tensor = granule_tensor {
            shape: [0; GRANULE_DIMS],
            strides: [0; GRANULE_DIMS],
            start: if d % 2 == 1 { size(b, d) } else { 0 },
            ndim: [1, 2, 0, 16, 17, u32::MAX, 3, 1][usize::from(b) % 8],
            device_type: 0,
            device_id: 0,
            code: [2, 0, 4, 77][usize::from(c) % 4],
            bits: [8, 16, 32, 0, 64, 1, 255, 8][usize::from(d / 4) % 8],
            lanes: [1, 2, 0, u16::MAX][usize::from(d / 32) % 4],
            read_only: u32::from(d % 8 == 3),
        };
        for (i, dim) in tensor.shape.iter_mut().enumerate() {
            *dim = if i == 0 {
                size(c, b) as i64
            } else {
                i64::from(b % 3)
            };
        }
        if d % 16 == 9 {
            tensor.strides = [i64::from(c) - 8; GRANULE_DIMS];
        }
        let mut managed = null_mut();
        let (at, versioned) = (
            if nowhere {
                null_mut()
            } else {
                &raw mut managed
            },
            u32::from(d / 64 % 2),
        );
        let from = if d == 253 { null() } else { &raw const tensor };
        let status = unsafe { granule_arena_export_dlpack(arena, from, versioned, at) };
        self.answer(status, Allowed::handles(ok, !nowhere && d != 253));
        if status == GRANULE_OK {
            self.exported.push((managed, versioned, tensor));
        }
    }

    /// Gives an exported tensor back to the library as somebody else's.
    pub fn import(&mut self, a: u8, d: u8, nowhere: bool) {
        let (mut tensor, mut import) = (std::mem::MaybeUninit::<granule_tensor>::uninit(), 0);
        if nowhere || self.exported.is_empty() {
            let refused = unsafe {
                granule_import_dlpack(
                    null_mut(),
                    u32::from(d % 2),
                    tensor.as_mut_ptr(),
                    &raw mut import,
                )
            };
            assert_eq!(refused, GRANULE_INVALID_ARGUMENT);
            return;
        }
        let (managed, versioned, wanted) = self
            .exported
            .swap_remove(usize::from(a) % self.exported.len());
        let status = unsafe {
            granule_import_dlpack(managed, versioned, tensor.as_mut_ptr(), &raw mut import)
        };
        self.answer(status, Allowed::of(true));
        let tensor = unsafe { tensor.assume_init() };
        let ndim = wanted.ndim as usize;
        assert_eq!(
            (tensor.ndim, &tensor.shape[..ndim]),
            (wanted.ndim, &wanted.shape[..ndim])
        );
        assert_eq!(
            (tensor.code, tensor.bits, tensor.lanes),
            (wanted.code, wanted.bits, wanted.lanes)
        );
        self.made(Kind::Import, status, import, 0);
    }

    /// What a consumer of an exported tensor does at last.
    pub fn delete_exported(&mut self, a: u8) {
        if self.exported.is_empty() {
            return;
        }
        let (managed, versioned, _) = self
            .exported
            .swap_remove(usize::from(a) % self.exported.len());
        delete(managed, versioned);
    }

    /// Recounts every pool and heap.
    pub fn audit(&self) {
        for heap in self.open(Kind::Heap) {
            assert_eq!(granule_heap_audit(*heap), GRANULE_OK, "{}", message());
            let mut stats = granule_heap_stats::default();
            assert_eq!(
                unsafe { granule_heap_get_stats(*heap, &raw mut stats) },
                GRANULE_OK
            );
            assert_eq!(stats.held, stats.live + stats.free);
            assert_eq!(stats.allocs, stats.hits + stats.misses);
            let live = self
                .blocks
                .get(heap)
                .map_or(0, |blocks| blocks.len() as u64);
            // What other streams still use counts as live.
            assert!(
                stats.blocks == live || stats.blocks > live && stats.limbo > 0,
                "{live} blocks are live: {stats:?}"
            );
        }
        for pool in self.open(Kind::Pool) {
            let mut stats = granule_pool_stats::default();
            assert_eq!(
                unsafe { granule_pool_get_stats(*pool, &raw mut stats) },
                GRANULE_OK
            );
            assert_eq!(stats.created, stats.mapped + stats.idle + stats.in_flight);
            assert!(stats.pending <= stats.mapped && stats.created <= stats.peak_created);
        }
    }

    /// What has to work on a device that does.
    #[track_caller]
    fn works(&self, status: i32) {
        assert!(self.broken || status == GRANULE_OK, "{}", message());
    }

    /// Bytes of a device that are not free.
    fn lost(&self, device: u64) -> u64 {
        let (mut free, mut total) = (0, 0);
        self.works(unsafe { granule_device_memory(device, &raw mut free, &raw mut total) });
        total - free
    }

    /// Closes everything; the devices have all of their memory then.
    pub fn close_all(&mut self) {
        for (addr, bytes) in std::mem::take(&mut self.torch) {
            let at = std::ptr::with_exposed_provenance_mut(addr as usize);
            unsafe { granule_torch_free(at, bytes, 0, null_mut()) };
        }
        for id in 0..3 {
            for _ in 0..=self.begun.len() {
                granule_torch_end_pool(0, id, 7);
            }
        }
        for (a, b) in std::mem::take(&mut self.begun) {
            granule_torch_release_pool(0, a, b);
        }
        while !self.exported.is_empty() {
            self.delete_exported(0);
        }
        for stream in self.open(Kind::Stream).to_vec() {
            self.works(granule_stream_synchronize(stream));
        }
        for heap in self.open(Kind::Heap).to_vec() {
            for (addr, _) in self.blocks.remove(&heap).unwrap_or_default() {
                self.works(granule_heap_free(heap, addr));
            }
            assert_eq!(granule_heap_audit(heap), GRANULE_OK, "{}", message());
        }
        // A heap that was closed with blocks in it has given its memory back all the same.
        for kind in [
            Kind::Import,
            Kind::Arena,
            Kind::Heap,
            Kind::Pool,
            Kind::Stream,
        ] {
            while let Some(handle) = self.open(kind).last().copied() {
                self.close(kind, handle, true);
            }
        }
        while let Some(device) = self.open(Kind::Device).last().copied() {
            // A thread that looks ahead may be in a call yet, and takes the last of its pool with it.
            let mut lost = self.lost(device);
            for _ in 0..2000 {
                if self.broken || lost == 0 {
                    break;
                }
                std::thread::sleep(std::time::Duration::from_millis(1));
                lost = self.lost(device);
            }
            assert!(self.broken || lost == 0, "{lost} bytes are lost");
            self.close(Kind::Device, device, true);
        }
    }
}

fn delete(managed: *mut c_void, versioned: u32) {
    use granule::dlpack::{Legacy, Managed, Versioned};
    match versioned {
        0 => drop(unsafe { Managed::<Legacy>::from_raw(managed.cast()) }),
        _ => drop(unsafe { Managed::<Versioned>::from_raw(managed.cast()) }),
    }
}

fn message() -> String {
    unsafe { CStr::from_ptr(granule_last_error()) }
        .to_string_lossy()
        .into_owned()
}
