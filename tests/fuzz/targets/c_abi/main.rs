//! Programs of calls of the C ABI, with handles and addresses that are open, closed, null, of another kind or made up, and sizes
//! from nothing to the last address. Whatever the program: no panic, no crash, an answer that the header allows, sound
//! books in between, and nothing left once everything is closed.
//!
//! An input is a byte for the driver and five bytes for each call: which one, two selectors of handles, a size, and
//! whatever else the call takes.
#![no_main]

mod torch;
mod world;

use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null, null_mut};

use granule::capi::*;
use libfuzzer_sys::fuzz_target;
use world::{Allowed, Kind, MIB, World, size};

fuzz_target!(|data: &[u8]| {
    let before = torch::baseline();
    let Some((first, program)) = data.split_first() else {
        return;
    };
    let mut world = World::new(first % 4 == 3);
    world.may_break = first % 16 == 7;
    for call in program.as_chunks::<5>().0.iter().take(300) {
        run(&mut world, *call);
        if world.calls % 16 == 0 {
            world.audit();
        }
    }
    world.audit();
    world.close_all();
    torch::is_empty();
    assert_eq!(granule_open_handles(), before, "handles are lost");
});

/// What a caller of the callback for lack of memory does.
unsafe extern "C" fn out_of_memory(
    context: *mut c_void,
    requested: u64,
    attempt: u32,
    message: *const c_char,
) -> i32 {
    assert!(requested > 0 && attempt > 0);
    assert!(!unsafe { CStr::from_ptr(message) }.is_empty());
    // Any function may be called from here.
    let heap = context.expose_provenance() as u64;
    granule_heap_trim_quietly(heap);
    i32::from(attempt < 3)
}

fn granule_heap_trim_quietly(heap: u64) {
    let mut bytes = 0;
    let status = unsafe { granule_heap_trim(heap, &raw mut bytes) };
    assert!(status == GRANULE_OK || status == GRANULE_STALE);
}

fn run(w: &mut World, [op, a, b, c, d]: [u8; 5]) {
    use Kind::{Arena, Device, Heap, Import, Pool, Stream};
    w.calls += 1;
    // Memory is what matters: more of that.
    let op = match op % 64 {
        48..=53 => 26,
        54..=57 => 27,
        58..=60 => 45,
        61..=62 => 46,
        63 => 19,
        op => op,
    };
    // One in sixteen gets no place for its answer.
    let nowhere = d % 16 == 15;
    let mut out = 0u64;
    let at = if nowhere { null_mut() } else { &raw mut out };
    let given = !nowhere;
    match op {
        0 => {
            let names: [&CStr; 8] = [
                w.driver, c"sim", c"host", w.driver, c"rocm", c"\xff", c"host:1", c"",
            ];
            let name = names[usize::from(c) % 8];
            let status = unsafe { granule_device_open(name.as_ptr(), at) };
            let known = matches!(name.to_bytes(), b"sim" | b"host") && given;
            w.answer(status, Allowed::of(known && w.open(Device).len() < 4));
            w.made(Device, status, out, out);
        }
        1 => {
            let (device, ok) = w.pick(Device, a);
            let mut info = std::mem::MaybeUninit::uninit();
            let at = if nowhere {
                null_mut()
            } else {
                info.as_mut_ptr()
            };
            let status = unsafe { granule_device_get_info(device, at) };
            w.answer(status, Allowed::handles(ok, given).only_ok());
        }
        2 => {
            let (device, ok) = w.pick(Device, a);
            let mut total = 0;
            let status = unsafe { granule_device_memory(device, at, &raw mut total) };
            w.answer(status, Allowed::handles(ok, given).only_ok());
            assert!(out <= total);
        }
        3 => {
            let (device, ok) = w.pick(Device, a);
            let status = unsafe { granule_stream_create(device, at) };
            w.answer(status, Allowed::handles(ok, given).only_ok());
            w.made(Stream, status, out, w.device(device));
        }
        4 => {
            let (device, ok) = w.pick(Device, a);
            let status = unsafe { granule_stream_adopt(device, null_mut(), at) };
            w.answer(status, Allowed::handles(ok, given).only_ok());
            w.made(Stream, status, out, w.device(device));
        }
        5 => {
            let (stream, ok) = w.pick(Stream, a);
            let mut raw = null_mut();
            let at = if nowhere { null_mut() } else { &raw mut raw };
            let status = unsafe { granule_stream_raw(stream, at) };
            w.answer(status, Allowed::handles(ok, given).only_ok());
        }
        6 => {
            let (stream, ok) = w.pick(Stream, a);
            let status = granule_stream_synchronize(stream);
            w.answer(status, Allowed::handles(ok, true).only_ok());
        }
        7 => {
            let ((stream, ok), (other, too)) = (w.pick(Stream, a), w.pick(Stream, b));
            let status = granule_stream_wait(stream, other);
            let same = w.device(stream) == w.device(other);
            w.answer(status, Allowed::handles(ok && too, true).only_ok_if(same));
        }
        8..=10 => copies(w, op, a, b, c, d),
        11 => pool(w, a, b, c, d, given, at),
        12 => {
            let (pool, ok) = w.pick(Pool, a);
            // Never all of a large device, one small granule at a time.
            let status = granule_pool_set_budget(pool, size(c, d).min(512 * MIB));
            w.answer(status, Allowed::handles(ok, true));
        }
        13 => {
            let (pool, ok) = w.pick(Pool, a);
            let status = unsafe { granule_pool_trim(pool, size(c, d), at) };
            w.answer(status, Allowed::handles(ok, true).only_ok());
        }
        14 => {
            let (pool, ok) = w.pick(Pool, a);
            let mut stats = granule_pool_stats::default();
            let at = if nowhere { null_mut() } else { &raw mut stats };
            let status = unsafe { granule_pool_get_stats(pool, at) };
            w.answer(status, Allowed::handles(ok, given).only_ok());
        }
        15 => {
            let (pool, ok) = w.pick(Pool, a);
            w.answer(
                granule_pool_reset_peaks(pool),
                Allowed::handles(ok, true).only_ok(),
            );
        }
        16 => {
            let (pool, ok) = w.pick(Pool, a);
            let status = granule_pool_audit(pool);
            w.answer(status, Allowed::handles(ok, true));
        }
        17 => {
            let (pool, ok) = w.pick(Pool, a);
            let config = granule_arena_config {
                capacity: size(c, d),
                min_capacity: if b % 4 == 1 { size(b, d) } else { 0 },
                look_ahead: if b % 32 == 2 { 4 * MIB } else { 0 },
                granule: [0, 2 * MIB, 8 * MIB, 3][usize::from(d) % 4],
            };
            let from = if b == 255 { null() } else { &raw const config };
            let status = unsafe { granule_arena_create(pool, from, at) };
            w.answer(status, Allowed::handles(ok, given && b != 255));
            w.made(Arena, status, out, w.device(pool));
        }
        18 => {
            let (arena, ok) = w.pick(Arena, a);
            let mut info = granule_arena_info::default();
            let at = if nowhere { null_mut() } else { &raw mut info };
            let status = unsafe { granule_arena_get_info(arena, at) };
            w.answer(status, Allowed::handles(ok, given).only_ok());
            assert!(info.len <= info.mapped.max(info.len) && info.mapped <= info.capacity);
        }
        19 => {
            let (arena, ok) = w.pick(Arena, a);
            let (stream, too) = match b % 3 {
                0 => (0, true),
                _ => w.pick_beside(Stream, b, arena),
            };
            let to = size(c, d);
            let status = granule_arena_grow(arena, to, stream);
            // 0 is no stream here, not a wrong one.
            w.answer(status, Allowed::handles(ok && (too || stream == 0), true));
            if status == GRANULE_OK {
                assert!(w.info(arena).len >= to && w.info(arena).mapped >= to);
                assert!(stream == 0 || w.device(stream) == w.device(arena));
            }
        }
        20 => grow_all(w, a, b, c, d),
        21..=23 => {
            let (arena, ok) = w.pick(Arena, a);
            let to = size(c, d);
            let status = match op {
                21 => granule_arena_shrink(arena, to),
                22 => granule_arena_shrink_deferred(arena, to),
                _ => granule_arena_truncate(arena, to),
            };
            w.answer(status, Allowed::handles(ok, true));
            assert!(status != GRANULE_OK || w.info(arena).len <= to);
        }
        24 => {
            let ((arena, ok), (stream, too)) = (w.pick(Arena, a), w.pick(Stream, b));
            let status = granule_arena_record_use(arena, stream);
            let same = w.device(arena) == w.device(stream);
            w.answer(status, Allowed::handles(ok && too, true).only_ok_if(same));
        }
        25 => {
            let (pool, ok) = w.pick(Pool, a);
            let mut config = granule_heap_config {
                small: [1 << 20, 16 << 10, 100, MIB][usize::from(d) % 4],
                granule_max: [64 * MIB, 2 * MIB, 8 * MIB, 3][usize::from(b) % 4],
                granule_min: [32 * MIB, 2 * MIB, 0, 64 * MIB][usize::from(b / 4) % 4],
                addresses: if c % 2 == 1 { size(c, d) } else { 0 },
                limit: if d % 8 == 5 { size(c, d) } else { 0 },
                wait_us: [0, 500][usize::from(d) / 16 % 2],
                aliases: [64, 0, 1, 2][usize::from(b / 16) % 4],
                slack: u32::from(c) * 64,
                rounding: [0, 1, 4, 3][usize::from(d / 64)],
            };
            if c == 0 {
                assert_eq!(
                    unsafe { granule_heap_config_init(&raw mut config) },
                    GRANULE_OK
                );
                config.wait_us = 500;
            }
            let status = unsafe { granule_heap_create(pool, &raw const config, at) };
            w.answer(status, Allowed::handles(ok, given));
            w.made(Heap, status, out, w.device(pool));
        }
        26 => {
            let (heap, ok) = w.pick(Heap, a);
            let (stream, too) = w.pick_beside(Stream, b, heap);
            let names: [*const c_char; 4] =
                [null(), c"a block".as_ptr(), c"\xff\xfe".as_ptr(), null()];
            let (name, align) = (
                names[usize::from(d) % 4],
                [0, 256, 4096, 0, 3, MIB, 1 << 63, 0][usize::from(d / 4) % 8],
            );
            let bytes = size(c, d);
            let status = unsafe { granule_heap_alloc(heap, bytes, align, stream, name, at) };
            w.answer(status, Allowed::handles(ok && too, given && d % 4 != 2));
            if status == GRANULE_OK {
                assert_eq!(w.device(stream), w.device(heap));
                assert!(out.is_multiple_of(align.max(1)) && (out == 0) == (bytes == 0));
                w.block(heap, out, bytes);
            }
        }
        27..=29 => {
            let (heap, ok) = w.pick(Heap, a);
            let (addr, live) = w.address(heap, c, d);
            let (stream, too) = if op == 28 {
                w.pick(Stream, b)
            } else {
                (0, true)
            };
            let status = match op {
                27 => granule_heap_free(heap, addr),
                28 => granule_heap_record_use(heap, addr, stream),
                _ => unsafe { granule_heap_usable_size(heap, addr, at) },
            };
            let args = op != 29 || given;
            let same = op != 28 || w.device(stream) == w.device(heap);
            if !(ok && too) || !args {
                w.answer(status, Allowed::handles(ok && too, args));
            } else if live && same {
                w.answer(status, Allowed::handles(true, true).only_ok());
                if op == 27 {
                    w.freed(heap, addr);
                }
                assert!(op != 29 || out >= w.bytes(heap, addr));
            } else if addr != 0 && same {
                assert_eq!(status, GRANULE_STALE, "{addr:#x} is no block");
            }
        }
        30 => {
            let (heap, ok) = w.pick(Heap, a);
            let status = unsafe { granule_heap_trim(heap, at) };
            w.answer(status, Allowed::handles(ok, true).only_ok());
        }
        31 => {
            let (heap, ok) = w.pick(Heap, a);
            let mut stats = granule_heap_stats::default();
            let at = if nowhere { null_mut() } else { &raw mut stats };
            let status = unsafe { granule_heap_get_stats(heap, at) };
            w.answer(status, Allowed::handles(ok, given).only_ok());
        }
        32 => {
            let (heap, ok) = w.pick(Heap, a);
            w.answer(
                granule_heap_audit(heap),
                Allowed::handles(ok, true).only_ok(),
            );
        }
        33 => {
            let (heap, ok) = w.pick(Heap, a);
            let mut text = null_mut();
            let at = if nowhere { null_mut() } else { &raw mut text };
            let status = unsafe { granule_heap_snapshot(heap, at) };
            w.answer(status, Allowed::handles(ok, given).only_ok());
            if status == GRANULE_OK {
                assert!(unsafe { CStr::from_ptr(text) }.to_bytes().ends_with(b"}"));
            }
            unsafe { granule_string_free(text) };
        }
        34 => {
            let (heap, ok) = w.pick(Heap, a);
            let callback: granule_oom_callback = if d % 2 == 0 {
                Some(out_of_memory)
            } else {
                None
            };
            let context = std::ptr::without_provenance_mut(heap as usize);
            let status = unsafe { granule_heap_set_oom_callback(heap, callback, context) };
            w.answer(status, Allowed::handles(ok, true).only_ok());
        }
        35 => w.export(a, b, c, d, nowhere),
        36 => w.import(a, d, nowhere),
        37 => w.delete_exported(a),
        38..=43 => {
            let kind = [Device, Stream, Pool, Arena, Heap, Import][usize::from(op - 38)];
            let (handle, ok) = w.pick(kind, a);
            w.close(kind, handle, ok);
        }
        44 => errors(d),
        45 => torch::alloc(w, a, c, d),
        46 => torch::free(w, a, c, d),
        _ => torch::more(w, a, b, c, d),
    }
}

/// Fills and copies, within memory of the stream's device that is in use and waits for that stream. Rarely elsewhere: then the
/// device fails from there on, as a CUDA device does.
fn copies(w: &mut World, op: u8, a: u8, b: u8, c: u8, d: u8) {
    let (stream, ok) = w.pick(Kind::Stream, a);
    if w.may_break && ok && d == 251 && w.device(stream) != world::TORCH {
        w.broken = true;
        let status = granule_fill(stream, size(c, b), 1, 64);
        assert!(matches!(
            status,
            GRANULE_OK | GRANULE_DRIVER | GRANULE_INVALID_ARGUMENT
        ));
        return;
    }
    let place = if ok { w.place(stream, b) } else { Some((0, 0)) };
    let Some((addr, room)) = place else {
        return;
    };
    let len = size(c, d).min(room).min(1 << 16) as usize;
    let mut bytes = vec![d; len];
    let status = match op {
        8 => granule_fill(stream, addr, d, len),
        9 => unsafe { granule_copy_from_host(stream, addr, bytes.as_ptr().cast(), len) },
        _ => unsafe { granule_copy_to_host(stream, bytes.as_mut_ptr().cast(), addr, len) },
    };
    // Nothing to do is nothing to look anything up for.
    if len > 0 {
        w.answer(status, Allowed::handles(ok, true).only_ok().or_unable());
    }
    if d == 255 && ok {
        // Null, and past the last address.
        assert_eq!(
            unsafe { granule_copy_from_host(stream, addr, null(), 9) },
            GRANULE_INVALID_ARGUMENT
        );
        assert_eq!(
            unsafe { granule_copy_to_host(stream, null_mut(), addr, 9) },
            GRANULE_INVALID_ARGUMENT
        );
        assert_eq!(
            granule_fill(stream, u64::MAX - 3, 1, 9),
            GRANULE_INVALID_ARGUMENT
        );
    }
}

fn pool(w: &mut World, a: u8, b: u8, c: u8, d: u8, given: bool, at: *mut u64) {
    let (device, ok) = w.pick(Kind::Device, a);
    let mut config = unsafe {
        let mut config = std::mem::MaybeUninit::uninit();
        assert_eq!(granule_pool_config_init(config.as_mut_ptr()), GRANULE_OK);
        config.assume_init()
    };
    config.budget = size(c, d).clamp(1, 512 * MIB);
    config.wait_us = [0, 500][usize::from(d) % 2];
    config.granule = [
        256 * MIB,
        2 * MIB,
        8 * MIB,
        2 * MIB,
        32 * MIB,
        3,
        0,
        8 * MIB,
    ][usize::from(b) % 8];
    config.largest_granule =
        [1 << 30, config.granule, config.granule * 2, 5][usize::from(b / 8) % 4];
    config.policy = u32::from(b / 32) % 4;
    config.base = if d % 4 == 1 { 16 * MIB } else { 0 };
    config.watermark = [u64::MAX, 0, 8 * MIB, 64 * MIB][usize::from(d / 4) % 4];
    config.slack = [u32::MAX, 0, 75, 10_000][usize::from(d / 16) % 4];
    config.spare = if d % 32 == 7 { 4 * MIB } else { 0 };
    // Zeroing touches memory, which is slow on the host.
    config.zero_on_handover = u32::from(d / 64 == 3 && w.is_sim);
    let from = if b == 254 { null() } else { &raw const config };
    let status = unsafe { granule_pool_create(device, from, at) };
    w.answer(status, Allowed::handles(ok, given));
    let made = if at.is_null() { 0 } else { unsafe { *at } };
    w.made(Kind::Pool, status, made, w.device(device));
}

fn grow_all(w: &mut World, a: u8, b: u8, c: u8, d: u8) {
    let count = usize::from(d % 4);
    let picked: Vec<(u64, bool)> = (0..count)
        .map(|i| w.pick(Kind::Arena, a.wrapping_add((i * 37) as u8)))
        .collect();
    let arenas: Vec<u64> = picked.iter().map(|(arena, _)| *arena).collect();
    let to: Vec<u64> = (0..count)
        .map(|i| size(c, d.wrapping_add(i as u8)))
        .collect();
    let before: Vec<u64> = arenas.iter().map(|arena| w.info(*arena).len).collect();
    let (stream, too) = if b % 3 == 0 {
        (0, true)
    } else {
        w.pick(Kind::Stream, b)
    };
    let is_null = d == 254;
    let from = if is_null { null() } else { arenas.as_ptr() };
    let status = unsafe { granule_arena_grow_all(from, to.as_ptr(), count, stream) };
    let ok = picked.iter().all(|(_, ok)| *ok) && (too || stream == 0);
    if count == 0 {
        assert_eq!(status, GRANULE_OK);
        return;
    }
    let mut sorted = arenas.clone();
    sorted.sort_unstable();
    sorted.dedup();
    w.answer(
        status,
        Allowed::handles(ok, !is_null && sorted.len() == count),
    );
    for ((arena, to), before) in arenas.iter().zip(&to).zip(&before) {
        let len = w.info(*arena).len;
        // All of them or none.
        assert!(if status == GRANULE_OK {
            len >= *to
        } else {
            len == *before
        });
    }
}

fn errors(d: u8) {
    let mut figures = granule_out_of_memory::default();
    let last = granule_last_status();
    let status = unsafe { granule_last_out_of_memory(&raw mut figures) };
    assert!(matches!(status, GRANULE_OK | GRANULE_INVALID_ARGUMENT));
    assert!(status != GRANULE_OK || last == GRANULE_OUT_OF_MEMORY && figures.requested > 0);
    assert_eq!(
        unsafe { granule_last_out_of_memory(null_mut()) },
        GRANULE_INVALID_ARGUMENT
    );
    let code = i32::from(d) - 20;
    for text in [
        granule_status_name(code),
        granule_last_error(),
        granule_version(),
    ] {
        assert!(unsafe { CStr::from_ptr(text) }.to_str().is_ok());
    }
    granule_clear_error();
    assert_eq!(granule_last_status(), GRANULE_OK);
    unsafe { granule_string_free(null_mut()) };
}
