//! PyTorch's side of the library, which has one device for as long as the process lives.

use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use granule::capi::*;

use crate::world::{Kind, MIB, TORCH, World, size};

/// Opens the device, and two streams of it; the handles that are open then.
pub fn baseline() -> u64 {
    static BASELINE: OnceLock<u64> = OnceLock::new();
    *BASELINE.get_or_init(|| {
        let conf = c"driver:host,budget:256MiB,wait_ms:1";
        assert_eq!(
            unsafe { granule_torch_configure(conf.as_ptr()) },
            GRANULE_OK
        );
        streams();
        granule_open_handles()
    })
}

/// Raw streams that are never destroyed.
fn streams() -> &'static [usize; 3] {
    static STREAMS: OnceLock<[usize; 3]> = OnceLock::new();
    STREAMS.get_or_init(|| {
        let (mut device, mut raw) = (0, [0; 3]);
        assert_eq!(
            unsafe { granule_torch_device(0, &raw mut device) },
            GRANULE_OK
        );
        for slot in &mut raw[1..] {
            let (mut stream, mut at) = (0, null_mut());
            assert_eq!(
                unsafe { granule_stream_create(device, &raw mut stream) },
                GRANULE_OK
            );
            assert_eq!(
                unsafe { granule_stream_raw(stream, &raw mut at) },
                GRANULE_OK
            );
            *slot = at.expose_provenance();
        }
        raw
    })
}

pub fn is_empty() {
    let (mut stats, mut pool) = (granule_torch_stats::default(), 0);
    granule_torch_empty_cache();
    // A program may have had a handle of this pool.
    unsafe {
        assert_eq!(granule_torch_pool(0, &raw mut pool), GRANULE_OK);
        assert_eq!(granule_pool_set_budget(pool, 256 * MIB), GRANULE_OK);
        assert_eq!(granule_pool_close(pool), GRANULE_OK);
    }
    assert_eq!(
        unsafe { granule_torch_get_stats(0, &raw mut stats) },
        GRANULE_OK
    );
    assert_eq!(
        (stats.requested, stats.heap.live, stats.heap.blocks),
        (0, 0, 0)
    );
    assert_eq!(stats.heap.broken, 0);
}

fn raw_stream(a: u8) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(streams()[usize::from(a) % 3])
}

pub fn alloc(w: &mut World, a: u8, c: u8, d: u8) {
    let bytes = size(c, d) as isize;
    let device = [0, 0, 0, -1, 64, i32::MAX][usize::from(d) % 6];
    granule_clear_error();
    let at = unsafe { granule_torch_alloc(bytes, device, raw_stream(a)) };
    let addr = at.expose_provenance() as u64;
    let status = granule_last_status();
    assert_eq!(addr == 0, bytes == 0 || status != GRANULE_OK);
    if addr != 0 {
        assert!(device == 0);
        w.torch.push((addr, bytes));
    } else if bytes != 0 {
        let too_much = matches!(status, GRANULE_OUT_OF_MEMORY | GRANULE_TOO_LARGE);
        let wrong = status == GRANULE_INVALID_ARGUMENT && (bytes < 0 || device != 0);
        assert!(too_much || wrong, "status {status}");
    }
}

pub fn free(w: &mut World, a: u8, c: u8, d: u8) {
    granule_clear_error();
    if d % 4 == 0 || w.torch.is_empty() {
        // Nothing that is a block.
        let inside = w.torch.get(usize::from(c) % w.torch.len().max(1));
        let addr = inside.map_or(size(c, d) | 1, |(addr, _)| addr + 1);
        let at = std::ptr::with_exposed_provenance_mut(addr as usize);
        unsafe { granule_torch_free(at, 100, 0, raw_stream(a)) };
        assert_eq!(granule_last_status(), GRANULE_STALE, "{addr:#x}");
        return;
    }
    let (addr, bytes) = w.torch.swap_remove(usize::from(c) % w.torch.len());
    let at = std::ptr::with_exposed_provenance_mut(addr as usize);
    unsafe { granule_torch_free(at, bytes, 0, raw_stream(a)) };
    assert_eq!(granule_last_status(), GRANULE_OK);
}

pub fn more(w: &mut World, a: u8, b: u8, c: u8, d: u8) {
    let block = w
        .torch
        .get(usize::from(c) % w.torch.len().max(1))
        .map(|(addr, _)| *addr);
    let at = std::ptr::with_exposed_provenance_mut(block.unwrap_or(size(c, d)) as usize);
    let id = (u64::from(b % 3), 7);
    granule_clear_error();
    match d % 12 {
        0 => unsafe { granule_torch_record_stream(at, raw_stream(a)) },
        1 => {
            let mut bytes = 0;
            assert_eq!(unsafe { granule_torch_base_alloc(at, &raw mut bytes) }, at);
            assert_eq!(unsafe { granule_torch_base_alloc(at, null_mut()) }, at);
        }
        2 => {
            unsafe { granule_torch_begin_pool(0, id.0, id.1, null()) };
            if granule_last_status() == GRANULE_OK {
                w.begun.push(id);
            }
        }
        3 => granule_torch_end_pool(0, id.0, id.1),
        4 => {
            granule_torch_release_pool(0, id.0, id.1);
            if let Some(i) = w.begun.iter().position(|other| *other == id) {
                w.begun.swap_remove(i);
            }
        }
        5 => granule_torch_memory_fraction([f64::NAN, -1.0, 2.0, 1e300][usize::from(c) % 4], 0),
        6 => granule_torch_empty_cache(),
        7 => {
            let mut text = null_mut();
            assert_eq!(
                unsafe { granule_torch_snapshot(0, &raw mut text) },
                GRANULE_OK
            );
            unsafe { granule_string_free(text) };
            assert_eq!(
                unsafe { granule_torch_costs(0, &raw mut text) },
                GRANULE_UNSUPPORTED
            );
        }
        8 => {
            let mut pool = 0;
            assert_eq!(unsafe { granule_torch_pool(0, &raw mut pool) }, GRANULE_OK);
            w.made(Kind::Pool, GRANULE_OK, pool, TORCH);
        }
        9 => {
            let mut stream = 0;
            assert_eq!(
                unsafe { granule_torch_stream(0, raw_stream(a), &raw mut stream) },
                GRANULE_OK
            );
            w.made(Kind::Stream, GRANULE_OK, stream, TORCH);
        }
        10 => {
            let conf = [c"budget:1GiB", c"nonsense", c"\xff"][usize::from(c) % 3];
            assert_ne!(
                unsafe { granule_torch_configure(conf.as_ptr()) },
                GRANULE_OK
            );
        }
        _ => {
            let mut stats = granule_torch_stats::default();
            let device = [0, -1, 64][usize::from(c) % 3];
            let status = unsafe { granule_torch_get_stats(device, &raw mut stats) };
            assert_eq!(status == GRANULE_OK, device == 0);
            assert!(
                stats.requested <= stats.requested_peak
                    && stats.heap.held == stats.heap.live + stats.heap.free
            );
            granule_torch_reset_peaks(0);
        }
    }
}
