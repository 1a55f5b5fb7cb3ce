//! Steps that move a large share of all blocks: the books are gone through once and built anew, instead
//! of being searched for each block.

use std::collections::BTreeMap;

use super::{Books, Free, Uses};
use crate::defrag::plan::Move;
use crate::stream::Fence;

/// Building anew costs about an eighth of a search, for each entry there is.
const SHARE: usize = 8;

impl Books {
    /// Whether so many changes are better made in one go.
    fn are_many(&self, n: usize) -> bool {
        n >= SHARE && n >= (self.free.len() + self.by_place.len()) / SHARE
    }

    /// Takes ascending places, by offset and length, out of free runs; who used each. `None`, and
    /// nothing was changed, if they are not all free, or overlap.
    pub(in crate::defrag) fn carve_all(&mut self, places: &[(u64, u64)]) -> Option<Vec<Uses>> {
        if places.windows(2).any(|w| w[0].0 + w[0].1 > w[1].0) {
            return None;
        }
        if !self.are_many(places.len()) {
            let all = places.iter().all(|(at, len)| self.is_free(*at, *len));
            let carved = places.iter().map(|(at, len)| self.carve(*at, *len));
            return if all { carved.collect() } else { None };
        }
        let mut runs = self.free.iter().peekable();
        let all = places.iter().all(|(at, len)| {
            while runs
                .next_if(|(from, run)| **from + run.len <= *at)
                .is_some()
            {}
            runs.peek()
                .is_some_and(|(from, run)| **from <= *at && at + len <= **from + run.len)
        });
        if !all {
            return None;
        }
        let mut uses = Vec::with_capacity(places.len());
        let mut left: Vec<(u64, Free)> = Vec::with_capacity(self.free.len() + places.len());
        let mut places = places.iter().peekable();
        for (from, run) in std::mem::take(&mut self.free) {
            let (mut at, end) = (from, from + run.len);
            while let Some((place, len)) = places.next_if(|place| place.0 < end) {
                uses.push(run.uses.clone());
                self.free_bytes -= len;
                if at < *place {
                    let len = place - at;
                    let uses = run.uses.clone();
                    left.push((at, Free { len, uses }));
                }
                at = place + len;
            }
            if at < end {
                let len = end - at;
                left.push((at, Free { len, ..run }));
            }
        }
        self.set_free(left);
        Some(uses)
    }

    /// Ascending runs that are not neighbours.
    fn set_free(&mut self, runs: Vec<(u64, Free)>) {
        self.by_size = runs.iter().map(|(at, run)| (run.len, *at)).collect();
        self.free = runs.into_iter().collect();
    }

    /// Puts blocks at places that were held, where a copy brings them behind which `fence` is; their
    /// old places become free in the order of `uses`.
    pub(in crate::defrag) fn settle_all(&mut self, moves: &[Move], uses: &Uses, fence: &Fence) {
        for one in moves {
            if let Some(block) = self.blocks.get_mut(&one.id) {
                // All earlier uses are before the copy.
                block.uses = uses.clone();
                block.ready = Some(fence.clone());
                block.moving = false;
            }
        }
        self.replace_all(moves, uses);
    }

    fn replace_all(&mut self, moves: &[Move], uses: &Uses) {
        if !self.are_many(moves.len()) {
            for one in moves {
                self.settle(one.id, one.to, Some(uses.clone()));
            }
            return;
        }
        let mut old: Vec<(u64, u64)> = Vec::with_capacity(moves.len());
        let mut new: Vec<(u64, u64)> = Vec::with_capacity(moves.len());
        for one in moves {
            if let Some(block) = self.blocks.get_mut(&one.id) {
                old.push((block.offset, block.len));
                new.push((one.to, one.id));
                block.offset = one.to;
            }
        }
        old.sort_unstable();
        new.sort_unstable();
        let mut taken = new.iter().peekable();
        let held = std::mem::take(&mut self.held).into_iter();
        self.held = held
            .filter(|(at, _)| {
                while taken.next_if(|new| new.0 < *at).is_some() {}
                taken.next_if(|new| new.0 == *at).is_none()
            })
            .collect();
        // A new place was free, so it is nobody's old one.
        let mut leaving = old.iter().peekable();
        let mut stay: Vec<(u64, u64)> = std::mem::take(&mut self.by_place).into_iter().collect();
        stay.retain(|(at, _)| leaving.next_if(|old| old.0 == *at).is_none());
        stay.extend(new);
        // Two ascending parts, which collecting merges.
        self.by_place = stay.into_iter().collect::<BTreeMap<_, _>>();

        let mut runs: Vec<(u64, Free)> = Vec::with_capacity(self.free.len() + old.len());
        let mut old = old.into_iter().peekable();
        let mut add = |at: u64, more: Free| match runs.last_mut() {
            Some((from, run)) if *from + run.len == at => {
                run.len += more.len;
                run.uses.join(&more.uses);
            }
            _ => runs.push((at, more)),
        };
        let freed = |len: u64| Free {
            len,
            uses: uses.clone(),
        };
        for (at, run) in std::mem::take(&mut self.free) {
            while let Some((from, len)) = old.next_if(|old| old.0 < at) {
                self.free_bytes += len;
                add(from, freed(len));
            }
            add(at, run);
        }
        for (from, len) in old {
            self.free_bytes += len;
            add(from, freed(len));
        }
        self.set_free(runs);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::*;
    use super::*;
    use crate::Device;
    use crate::driver::sim::{SimConfig, SimDriver};

    /// `n` slots with a block and a free place in each, as if mapped; every third is free altogether.
    fn books(n: u64, stream: &Stream) -> Books {
        let mut books = Books::new(64, 8, usize::try_from(n).unwrap());
        books.slots.fill(Slot::Mapped);
        books.add_free(0, 64 * n, Uses::of(stream));
        for i in (0..n).filter(|i| i % 3 != 1) {
            books.take(64 * i + 16, 32, Age::Old, stream).unwrap();
        }
        books
    }

    /// Free runs with how many streams used them, places of blocks, and free bytes.
    type Shape = (Vec<(u64, u64, usize)>, Vec<(u64, u64)>, u64);

    fn shape(books: &Books) -> Shape {
        let free = books.free.iter();
        let free = free.map(|(at, run)| (*at, run.len, run.uses.iter().count()));
        let places = books.by_place.iter().map(|(at, id)| (*at, *id));
        (free.collect(), places.collect(), books.free_bytes)
    }

    #[test]
    fn in_one_go_comes_to_the_same_as_one_by_one() {
        let device = Device::from_driver(Arc::new(SimDriver::new(SimConfig::default()).unwrap()));
        let [one, two] = [(); 2].map(|()| device.create_stream().unwrap());
        for n in [36u64, 60, 301] {
            let (mut all, mut each) = (books(n, &one), books(n, &one));
            // Into every slot that is free, from the other end: two blocks each.
            let from: Vec<(u64, u64)> = all.by_place.iter().map(|(at, id)| (*at, *id)).collect();
            let targets = (0..n)
                .filter(|i| i % 3 == 1)
                .flat_map(|i| [64 * i, 64 * i + 32]);
            let moves: Vec<Move> = (targets.zip(from.iter().rev()))
                .map(|(to, (from, id))| Move {
                    id: *id,
                    from: *from,
                    to,
                    len: 32,
                })
                .take(from.len() / 2)
                .collect();
            let mut places: Vec<(u64, u64)> = moves.iter().map(|m| (m.to, m.len)).collect();
            places.sort_unstable();
            assert!(all.are_many(places.len()), "{n}");
            assert_eq!(all.carve_all(&places).unwrap().len(), places.len());
            for (at, len) in &places {
                each.carve(*at, *len).unwrap();
            }
            assert_eq!(shape(&all), shape(&each));
            assert!(all.carve_all(&places).is_none(), "they are taken");
            for books in [&mut all, &mut each] {
                books.hold(&places);
                books.audit().unwrap();
            }
            all.replace_all(&moves, &Uses::of(&two));
            for one in &moves {
                each.settle(one.id, one.to, Some(Uses::of(&two)));
            }
            assert_eq!(shape(&all), shape(&each));
            all.audit().unwrap();
            each.audit().unwrap();
            let twice = [places[0], places[0]].repeat(n as usize);
            assert!(all.carve_all(&twice).is_none(), "a place named twice");
        }
    }
}
