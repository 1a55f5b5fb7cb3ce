//! Growing one arena or several: all of them, or none.

use super::Shared;
use super::line::{Line, Waiter};
use crate::pool::Effort;
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
    let mut lines: Vec<(&Wish<'_>, MutexGuard<'_, Line>)> = order
        .into_iter()
        .map(|wish| (wish, wish.arena.line.lock()))
        .collect();
    let before: Vec<usize> = lines.iter().map(|(_, line)| line.slots()).collect();
    let done = map_missing(&mut lines, waiter);
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

fn map_missing(lines: &mut [(&Wish<'_>, MutexGuard<'_, Line>)], waiter: Waiter<'_>) -> Result<()> {
    let mut needs = Vec::with_capacity(lines.len());
    for (wish, line) in lines.iter() {
        let bytes = wish
            .arena
            .ladder
            .missing(line.end(), wish.to, line.reservation.len());
        needs.push(line.need(bytes));
    }
    let Some((first, _)) = lines.first() else {
        return Ok(());
    };
    let mut granules = match needs.iter().all(|n| n.bytes == 0) {
        true => needs.iter().map(|_| Vec::new()).collect(),
        false => first.arena.pool.shared().take_all(&needs, Effort::Full)?,
    };
    for ((wish, line), list) in lines.iter_mut().zip(granules.drain(..)) {
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
