//! Growing one arena or several: all of them, or none.

use super::Shared;
use super::line::{Line, Waiter};
use crate::pool::{Effort, Granule, Need, Pool};
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
    let all: Vec<_> = lines
        .iter()
        .map(|(w, line)| (w.arena, &**line, w.to))
        .collect();
    let needs = Needs::of(&all);
    let Some(pool) = lines.first().map(|(w, _)| w.arena.pool.clone()) else {
        return Ok(Vec::new());
    };
    // No need changes by it: what is cut lies past the length wished for.
    let mut own = |want: u64| {
        let given_up = |got: u64, (wish, line): &mut Locked<'_, '_>| {
            got + wish
                .arena
                .reclaim_from(line, wish.to, want.saturating_sub(got))
        };
        lines.iter_mut().fold(0, given_up)
    };
    needs.take(&pool, Effort::Full, &mut own)
}

/// What arenas need to reach their lengths: with the step that their size allows, and at least.
pub(super) struct Needs {
    stepped: Vec<Need>,
    least: Vec<Need>,
}

impl Needs {
    pub(super) fn of(all: &[(&Shared, &Line, u64)]) -> Self {
        let stepped = all.iter().map(|(arena, line, to)| {
            let (end, capacity) = (line.end(), line.reservation.len());
            line.need(
                arena.ladder.missing(end, *to, capacity),
                arena.ladder.largest,
            )
        });
        let least = all.iter().map(|(arena, line, to)| {
            line.need(arena.ladder.exactly(line.end(), *to), arena.ladder.largest)
        });
        Self {
            stepped: stepped.collect(),
            least: least.collect(),
        }
    }

    /// Granules for the steps if that takes nothing from anybody; else for what is needed at least.
    pub(super) fn take(
        &self,
        pool: &Pool,
        effort: Effort,
        own: &mut dyn FnMut(u64) -> u64,
    ) -> Result<Vec<Vec<Granule>>> {
        if self.least.iter().all(|need| need.bytes == 0) {
            return Ok(self.least.iter().map(|_| Vec::new()).collect());
        }
        if self.stepped != self.least {
            match pool.shared().take_all(&self.stepped, Effort::Spare, own) {
                Err(error) if error.is_out_of_memory() => {}
                other => return other,
            }
        }
        pool.shared().take_all(&self.least, effort, own)
    }
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
