//! Arenas.

use std::sync::Arc;

use super::device::{granule_pool, granule_stream};
use super::error::{Failure, Out, Outcome, granule_status, guard};
use super::handle::tables;
use crate::sync::RwLock;
use crate::{Arena, ArenaConfig, Error};

/// An arena: one range of addresses whose length changes in place; 0 is none.
pub type granule_arena = u64;

/// Settings of an arena. Sizes in bytes.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct granule_arena_config {
    /// Addresses to reserve: the most it can ever hold. Addresses cost no memory.
    pub capacity: u64,
    /// Smaller reservations are tried down to this; 0 for none but `capacity`.
    pub min_capacity: u64,
    /// Kept mapped ahead of the length by the pool's thread; 0 for nothing.
    pub look_ahead: u64,
    /// Largest granule and growth step; 0 for the pool's.
    pub granule: u64,
}

/// Figures of an arena. Sizes in bytes.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct granule_arena_info {
    /// Address of the first byte; never changes.
    pub base: u64,
    /// In use.
    pub len: u64,
    /// Addresses reserved.
    pub capacity: u64,
    /// With memory behind them.
    pub mapped: u64,
}

pub(super) fn get(arena: granule_arena) -> Outcome<Arc<RwLock<Arena>>> {
    tables().arenas.get(arena)
}

/// Makes an empty arena: addresses and no memory.
///
/// # Safety
///
/// `config` points to settings; `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_arena_create(
    pool: granule_pool,
    config: *const granule_arena_config,
    out: *mut granule_arena,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        // SAFETY: the caller's promise.
        let config = unsafe { config.as_ref() };
        let config = config.ok_or_else(|| Failure::invalid("config is a null pointer"))?;
        let pool = tables().pools.get(pool)?;
        let settings = ArenaConfig {
            capacity: config.capacity,
            min_capacity: (config.min_capacity != 0).then_some(config.min_capacity),
            look_ahead: config.look_ahead,
            granule: (config.granule != 0).then_some(config.granule),
        };
        let arena = Arena::with_config(&pool, &settings)?;
        out.set(tables().arenas.insert(RwLock::new(arena))?);
        Ok(())
    })
}

/// Gives the memory back and closes the handle. Waits for the work of the streams that used it. Memory that DLPack
/// tensors point into stays until they are deleted.
#[unsafe(no_mangle)]
pub extern "C" fn granule_arena_close(arena: granule_arena) -> granule_status {
    guard(|| tables().arenas.remove(arena).map(drop))
}

/// Address, length and what is mapped.
///
/// # Safety
///
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_arena_get_info(
    arena: granule_arena,
    out: *mut granule_arena_info,
) -> granule_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(out, "out") }?;
        let arena = get(arena)?;
        let arena = arena.read();
        out.set(granule_arena_info {
            base: arena.base().get(),
            len: arena.len(),
            capacity: arena.capacity(),
            mapped: arena.mapped(),
        });
        Ok(())
    })
}

/// Grows to at least `to` bytes in place. `stream` is the one that uses the new memory first: it waits where the host
/// would have to; 0 for none, and the host waits.
#[unsafe(no_mangle)]
pub extern "C" fn granule_arena_grow(
    arena: granule_arena,
    to: u64,
    stream: granule_stream,
) -> granule_status {
    guard(|| {
        let arena = get(arena)?;
        let arena = arena.read();
        match stream {
            0 => Ok(arena.grow(to)?),
            stream => Ok(arena.grow_on(to, &*tables().streams.get(stream)?)?),
        }
    })
}

/// Grows each of `count` arenas of one pool to at least its length, or none; `stream` as for `granule_arena_grow`.
///
/// # Safety
///
/// `arenas` and `to` point to `count` values each.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn granule_arena_grow_all(
    arenas: *const granule_arena,
    to: *const u64,
    count: usize,
    stream: granule_stream,
) -> granule_status {
    guard(|| {
        if count == 0 {
            return Ok(());
        }
        if arenas.is_null() || to.is_null() {
            return Err(Failure::invalid("arenas or to is a null pointer"));
        }
        // SAFETY: not null; the rest is the caller's promise.
        let handles = unsafe { std::slice::from_raw_parts(arenas, count) };
        // SAFETY: not null; the rest is the caller's promise.
        let lens = unsafe { std::slice::from_raw_parts(to, count) };
        // In one order for all callers: a waiting writer holds new readers up, so two that go crosswise could wait for
        // each other.
        let mut sorted: Vec<(u64, u64)> =
            handles.iter().copied().zip(lens.iter().copied()).collect();
        sorted.sort_unstable();
        if sorted.windows(2).any(|pair| pair[0].0 == pair[1].0) {
            return Err(Error::Duplicate { what: "arena" }.into());
        }
        let held: Outcome<Vec<_>> = sorted.iter().map(|(handle, _)| get(*handle)).collect();
        let held = held?;
        let locked: Vec<_> = held.iter().map(|arena| arena.read()).collect();
        let wishes: Vec<(&Arena, u64)> = locked
            .iter()
            .zip(&sorted)
            .map(|(arena, (_, to))| (&**arena, *to))
            .collect();
        match stream {
            0 => Ok(Arena::grow_all(&wishes)?),
            stream => {
                let stream = tables().streams.get(stream)?;
                Ok(Arena::grow_all_on(&wishes, &stream)?)
            }
        }
    })
}

/// Shrinks to `to` bytes and gives whole granules past it back to the pool. Waits for the work of the streams that use
/// it. `GRANULE_BUSY` if pins, such as DLPack tensors, reach past `to`.
#[unsafe(no_mangle)]
pub extern "C" fn granule_arena_shrink(arena: granule_arena, to: u64) -> granule_status {
    guard(|| Ok(get(arena)?.read().try_shrink(to)?))
}

/// As `granule_arena_shrink`, without a wait: the memory goes back once the work queued so far is done.
#[unsafe(no_mangle)]
pub extern "C" fn granule_arena_shrink_deferred(arena: granule_arena, to: u64) -> granule_status {
    guard(|| Ok(get(arena)?.write().shrink_deferred(to)?))
}

/// Sets a smaller length and keeps the memory.
#[unsafe(no_mangle)]
pub extern "C" fn granule_arena_truncate(arena: granule_arena, to: u64) -> granule_status {
    guard(|| Ok(get(arena)?.write().truncate(to)?))
}

/// Says that work on `stream` uses this memory, from now until the arena goes.
#[unsafe(no_mangle)]
pub extern "C" fn granule_arena_record_use(
    arena: granule_arena,
    stream: granule_stream,
) -> granule_status {
    guard(|| {
        let stream = tables().streams.get(stream)?;
        Ok(get(arena)?.read().record_use(&stream)?)
    })
}
