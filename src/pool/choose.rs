//! Which granules serve a need: pure, so that it can be tested without a driver.
//!
//! Rule 2 of the design, recycle before creating, under what mappings cost: one mapping costs the
//! same whatever its size, so a few idle granules are better than a new one, but very many small
//! ones are not.

use std::collections::BTreeMap;

/// Idle granules in a pool: length in bytes to how many.
pub(crate) type Idle = BTreeMap<u64, usize>;

/// What an arena needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Need {
    /// Bytes; a multiple of the device's granularity.
    pub(crate) bytes: u64,
    /// Largest granule wanted; a power of two times the granularity.
    pub(crate) largest: u64,
    /// Bytes that may be mapped at most, if only granules larger than `bytes` are left.
    pub(crate) at_most: u64,
}

/// What a pool may do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Room {
    /// Bytes that may still be created within the budget.
    pub(crate) create: u64,
    /// Bytes of idle granules that may be released to make room (down to the static floor).
    pub(crate) release: u64,
    /// Smallest unit of physical memory.
    pub(crate) granularity: u64,
}

/// How a need is served. Lengths in bytes, in mapping order: first `recycle`, then `create`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Choice {
    pub(crate) recycle: Vec<u64>,
    pub(crate) create: Vec<u64>,
    /// Idle granules to release first, so that `create` fits the budget.
    pub(crate) release: Vec<u64>,
}

impl Choice {
    pub(crate) fn bytes(&self) -> u64 {
        self.recycle.iter().chain(&self.create).sum()
    }
}

/// Serves `need` from `idle`, then by creating within `room`. On success `idle` has lost what is
/// recycled and released, and `room` what is created.
///
/// # Errors
///
/// The bytes still missing; `idle` and `room` are then as they were.
pub(crate) fn choose(idle: &mut Idle, room: &mut Room, need: Need) -> Result<Choice, u64> {
    let mut rest = idle.clone();
    let chosen = match attempt(&mut rest, *room, need) {
        Ok(choice) => choice,
        Err(missing) => {
            rest.clone_from(idle);
            oversized(&mut rest, need).ok_or(missing)?
        }
    };
    settle(room, &chosen);
    *idle = rest;
    Ok(chosen)
}

/// Serves granules of exactly these lengths, as [`choose`].
///
/// # Errors
///
/// As [`choose`].
pub(crate) fn choose_exactly(
    idle: &mut Idle,
    room: &mut Room,
    lens: &[u64],
) -> Result<Choice, u64> {
    let mut rest = idle.clone();
    let mut choice = Choice::default();
    for len in lens {
        match take_largest(&mut rest, *len, *len) {
            Some(len) => choice.recycle.push(len),
            None => choice.create.push(*len),
        }
    }
    let created: u64 = choice.create.iter().sum();
    make_room(&mut rest, *room, created, &mut choice.release)?;
    settle(room, &choice);
    *idle = rest;
    Ok(choice)
}

/// Books a choice.
fn settle(room: &mut Room, choice: &Choice) {
    let created: u64 = choice.create.iter().sum();
    let released: u64 = choice.release.iter().sum();
    room.create = (room.create + released) - created;
    room.release = (room.release + created) - released;
}

/// Recycles a granule if it replaces at least a quarter of the one that would be created, and
/// creates the rest.
fn attempt(idle: &mut Idle, room: Room, need: Need) -> Result<Choice, u64> {
    // Before a list is made that may be as long as the need is large.
    let on_hand: u64 = idle.iter().map(|(len, count)| len * *count as u64).sum();
    let reach = room.create.saturating_add(on_hand);
    if need.bytes > reach {
        return Err(need.bytes - reach);
    }
    let mut choice = Choice::default();
    let mut missing = need.bytes;
    while missing > 0 {
        let wanted = prev_power_of_two_multiple(missing, room.granularity).min(need.largest);
        let most = missing.min(need.largest.max(wanted));
        match take_largest(idle, wanted / 4, most) {
            Some(len) => {
                choice.recycle.push(len);
                missing -= len;
            }
            None => {
                choice.create.push(wanted);
                missing -= wanted;
            }
        }
    }
    let created: u64 = choice.create.iter().sum();
    make_room(idle, room, created, &mut choice.release)?;
    Ok(choice)
}

/// Largest idle granule with `least <= len <= most`, taken out.
fn take_largest(idle: &mut Idle, least: u64, most: u64) -> Option<u64> {
    if least > most {
        return None;
    }
    let len = *idle.range(least..=most).next_back()?.0;
    remove_one(idle, len);
    Some(len)
}

fn remove_one(idle: &mut Idle, len: u64) {
    if let Some(count) = idle.get_mut(&len) {
        *count -= 1;
        if *count == 0 {
            idle.remove(&len);
        }
    }
}

/// Picks idle granules to release until `created` bytes fit: the largest first, because a release
/// costs per call.
fn make_room(idle: &mut Idle, room: Room, created: u64, release: &mut Vec<u64>) -> Result<(), u64> {
    let mut short = created.saturating_sub(room.create);
    // What is created in place of what is released keeps the pool at its floor.
    let mut may = room.release.saturating_add(created);
    while short > 0 {
        let fits = idle.range(..=short.min(may)).next_back();
        let larger = idle.range(short..=may.max(short)).next();
        let len = match (larger, fits) {
            (Some((&len, _)), _) if len <= may => len,
            (_, Some((&len, _))) => len,
            _ => return Err(short),
        };
        remove_one(idle, len);
        release.push(len);
        may -= len;
        short = short.saturating_sub(len);
    }
    Ok(())
}

/// Last resort: granules that may not be released and are larger than what is needed.
fn oversized(idle: &mut Idle, need: Need) -> Option<Choice> {
    let mut choice = Choice::default();
    let mut missing = need.bytes;
    while missing > 0 {
        let room = need.at_most.checked_sub(choice.bytes())?;
        let len = take_largest(idle, 0, missing).or_else(|| {
            let (&len, _) = idle.range(missing..=room.max(missing)).next()?;
            (len <= room).then(|| {
                remove_one(idle, len);
                len
            })
        })?;
        choice.recycle.push(len);
        missing = missing.saturating_sub(len);
    }
    Some(choice)
}

/// Largest `granularity * 2^k` that is not above `bytes` (which is at least `granularity`).
fn prev_power_of_two_multiple(bytes: u64, granularity: u64) -> u64 {
    let units = (bytes / granularity).max(1);
    granularity << units.ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{GIB, MIB};
    use proptest::prelude::*;

    const G: u64 = 2 * MIB;

    fn room(create: u64, release: u64) -> Room {
        Room {
            create,
            release,
            granularity: G,
        }
    }

    fn need(bytes: u64) -> Need {
        Need {
            bytes,
            largest: 256 * MIB,
            at_most: u64::MAX,
        }
    }

    #[test]
    fn creates_largest_first_and_exactly() {
        let choice = choose(&mut Idle::new(), &mut room(GIB, 0), need(300 * MIB)).unwrap();
        assert_eq!(choice.create, [256 * MIB, 32 * MIB, 8 * MIB, 4 * MIB]);
        assert!(choice.recycle.is_empty());
    }

    #[test]
    fn recycles_before_creating() {
        let mut idle = Idle::from([(256 * MIB, 1), (2 * MIB, 8)]);
        let choice = choose(&mut idle, &mut room(GIB, 0), need(258 * MIB)).unwrap();
        assert_eq!(choice.recycle, [256 * MIB, 2 * MIB]);
        assert!(choice.create.is_empty());
        assert_eq!(idle, Idle::from([(2 * MIB, 7)]));
    }

    #[test]
    fn does_not_sew_a_granule_from_crumbs_while_there_is_room() {
        let mut idle = Idle::from([(2 * MIB, 128)]);
        let choice = choose(&mut idle, &mut room(GIB, 0), need(256 * MIB)).unwrap();
        assert_eq!(choice.create, [256 * MIB]);
    }

    #[test]
    fn trades_crumbs_for_a_granule_when_the_budget_is_short() {
        // 128 releases and one mapping cost half of 128 mappings.
        let mut idle = Idle::from([(2 * MIB, 128)]);
        let choice = choose(&mut idle, &mut room(0, 0), need(256 * MIB)).unwrap();
        assert_eq!(choice.release.len(), 128);
        assert_eq!(choice.create, [256 * MIB]);
        assert!(idle.is_empty());
    }

    #[test]
    fn releases_what_does_not_fit_and_creates_what_does() {
        let mut idle = Idle::from([(256 * MIB, 1)]);
        let mut room = room(0, GIB);
        let choice = choose(&mut idle, &mut room, need(32 * MIB)).unwrap();
        assert_eq!(choice.release, [256 * MIB]);
        assert_eq!(choice.create, [32 * MIB]);
        assert_eq!(room.create, 224 * MIB);
    }

    #[test]
    fn a_static_floor_hands_out_the_larger_granule() {
        let mut idle = Idle::from([(256 * MIB, 2)]);
        let choice = choose(&mut idle, &mut room(0, 0), need(32 * MIB)).unwrap();
        assert_eq!(choice.recycle, [256 * MIB]);
        let tight = Need {
            at_most: 64 * MIB,
            ..need(32 * MIB)
        };
        assert_eq!(choose(&mut idle, &mut room(0, 0), tight), Err(32 * MIB));
    }

    #[test]
    fn shortage_names_what_is_missing_and_changes_nothing() {
        let mut idle = Idle::from([(2 * MIB, 1)]);
        let mut r = room(4 * MIB, 0);
        assert_eq!(choose(&mut idle, &mut r, need(64 * MIB)), Err(58 * MIB));
        assert_eq!(idle, Idle::from([(2 * MIB, 1)]));
        assert_eq!(r, room(4 * MIB, 0));
    }

    proptest! {
        #[test]
        fn a_choice_obeys_its_limits(
            sizes in proptest::collection::vec((0u32..9, 1usize..6), 0..6),
            units in 1u64..2000,
            create in 0u64..4000,
            release in 0u64..4000,
            slack in 0u64..500,
        ) {
            let mut idle = Idle::new();
            for (shift, count) in sizes {
                *idle.entry(G << shift).or_default() += count;
            }
            let total = |i: &Idle| i.iter().map(|(l, c)| l * *c as u64).sum::<u64>();
            let (before, had) = (idle.clone(), total(&idle));
            let mut r = room(create * G, release * G);
            let was = r;
            let n = Need { bytes: units * G, largest: 256 * MIB, at_most: (units + slack) * G };
            match choose(&mut idle, &mut r, n) {
                Ok(c) => {
                    let recycled: u64 = c.recycle.iter().sum();
                    let created: u64 = c.create.iter().sum();
                    let released: u64 = c.release.iter().sum();
                    prop_assert!(c.bytes() >= n.bytes && c.bytes() <= n.at_most.max(n.bytes));
                    prop_assert!(c.bytes() == n.bytes || c.create.is_empty());
                    prop_assert_eq!(had - recycled - released, total(&idle));
                    prop_assert!(created <= was.create + released);
                    prop_assert!(released <= was.release + created);
                    prop_assert_eq!(r.create, was.create + released - created);
                }
                Err(missing) => {
                    prop_assert!(missing > 0 && missing <= n.bytes);
                    prop_assert_eq!(&idle, &before);
                    prop_assert_eq!(r, was);
                }
            }
        }
    }
}
