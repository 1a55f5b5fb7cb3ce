//! Growing one arena or several: all of them, or none.

use super::Shared;
use super::line::{Line, Waiter};
use crate::pool::{Effort, Granule, Need};
use crate::sync::MutexGuard;
use crate::{Error, Result};

/// One arena of a growth.
#[derive(Clone, Copy)]
pub(super) struct Wish<'a> {
    pub(super) arena: &'a Shared,
    pub(super) to: u64,
}

/// Grows every arena to its length or leaves all as they were.
pub(super) fn grow(wishes: &[Wish<'_>], waiter: Waiter<'_>) -> Result<()> {
    check(wishes)?;
    let mut order: Vec<&Wish<'_>> = wishes.iter().collect();
    // Every thread locks in the same order, by address.
    order.sort_by_key(|w| std::ptr::from_ref(w.arena));
    let mut lines: Vec<Locked<'_, '_>> = order
        .into_iter()
        .map(|wish| (wish, wish.arena.line.lock()))
        .collect();
    let granules = take(&mut lines)?;
    let before: Vec<usize> = lines.iter().map(|(_, line)| line.slots()).collect();
    let done = map(&mut lines, granules, waiter);
    for ((wish, line), before) in lines.iter_mut().zip(before) {
        match done {
            Ok(()) => line.settle(wish.to),
            Err(_) => line.undo_to(before),
        }
        let mut meta = wish.arena.meta.lock();
        meta.open = line.open();
        if done.is_ok() {
            let len = meta.len.max(wish.to);
            meta.set_len(len);
        }
    }
    done
}

type Locked<'w, 'a> = (&'w Wish<'a>, MutexGuard<'a, Line>);

/// Granules for what is not mapped yet. Tails of these very arenas, which the pool cannot ask for
/// while they are locked, are given up when it is short.
fn take(lines: &mut [Locked<'_, '_>]) -> Result<Vec<Vec<Granule>>> {
    let needs: Vec<Need> = lines.iter().map(need).collect();
    let Some((first, _)) = lines.first().filter(|_| needs.iter().any(|n| n.bytes > 0)) else {
        return Ok(needs.iter().map(|_| Vec::new()).collect());
    };
    let pool = first.arena.pool.shared();
    // No need changes by it: what is cut lies past the length wished for.
    let mut own = |want: u64| {
        let given_up = |got: u64, (wish, line): &mut Locked<'_, '_>| {
            got + wish
                .arena
                .reclaim_from(line, wish.to, want.saturating_sub(got))
        };
        lines.iter_mut().fold(0, given_up)
    };
    pool.take_all(&needs, Effort::Full, &mut own)
}

fn need((wish, line): &Locked<'_, '_>) -> Need {
    let ladder = wish.arena.ladder;
    line.need(ladder.missing(line.end(), wish.to, line.reservation.len()))
}

fn map(
    lines: &mut [Locked<'_, '_>],
    granules: Vec<Vec<Granule>>,
    waiter: Waiter<'_>,
) -> Result<()> {
    for ((wish, line), list) in lines.iter_mut().zip(granules) {
        line.reopen(wish.to, waiter)?;
        line.append(list, waiter)?;
    }
    Ok(())
}

/// Everything that can be refused before any driver call.
fn check(wishes: &[Wish<'_>]) -> Result<()> {
    for (i, wish) in wishes.iter().enumerate() {
        wish.arena.check_fits(wish.to)?;
        if !wish.arena.pool.is_same(&wishes[0].arena.pool) {
            return Err(Error::Foreign {
                what: "arena",
                owner: "pool",
            });
        }
        if wishes[..i]
            .iter()
            .any(|w| std::ptr::eq(w.arena, wish.arena))
        {
            return Err(Error::Duplicate { what: "arena" });
        }
    }
    Ok(())
}
