//! How to fill a hole of so many pages: with granules on hand, longest first, then with new ones.

use super::NONE;

/// A wholly free granule that may be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spare {
    /// Its slot; of another lane's granule its index among those offered.
    pub slot: u32,
    /// The free run that it lies in; `NONE` for another lane's.
    pub run: u32,
    /// Its first page.
    pub at: u32,
    /// Its pages.
    pub len: u32,
    /// Whether moving it leaves much of a short run behind.
    pub breaks: bool,
}

impl Spare {
    /// Whether it is of another lane.
    pub fn is_foreign(&self) -> bool {
        self.run == NONE
    }
}

/// What fills a part of a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// A granule on hand.
    Old(Spare),
    /// A granule of so many pages to create.
    New(u32),
}

impl Part {
    /// Its pages.
    pub fn len(&self) -> u32 {
        match self {
            Self::Old(s) => s.len,
            Self::New(n) => *n,
        }
    }
}

/// Bounds of new granules, in pages.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Longest new granule.
    pub max: u32,
    /// Shortest new granule where there is room and ease for it.
    pub min: u32,
    /// What may be created before the footprint aimed at is passed.
    pub ease: u32,
}

/// Fills `hole` pages; up to `room` more may be covered beyond it. Takes what it uses out of `spares`, which are
/// sorted by length, longest last.
pub fn fill(hole: u32, room: u32, spares: &mut Vec<Spare>, rules: &mut Rules, out: &mut Vec<Part>) {
    let mut left = hole;
    while left > 0 {
        let at = spares.partition_point(|s| s.len <= left);
        let fits = at.checked_sub(1);
        let exact = fits.is_some_and(|i| spares[i].len == left);
        // one granule a little too long beats many short ones, and any beats passing the footprint aimed at
        let beyond = spares
            .get(at)
            .map(|s| s.len - left)
            .filter(|&more| more <= room);
        if !exact
            && let Some(more) = beyond
            && (more <= left / 4 || (fits.is_none() && rules.ease < left))
        {
            out.push(Part::Old(spares.remove(at)));
            return;
        }
        if let Some(i) = fits {
            left -= spares[i].len;
            out.push(Part::Old(spares.remove(i)));
            continue;
        }
        let want = left.min(rules.max);
        let more = rules
            .min
            .saturating_sub(want)
            .min(room)
            .min(rules.ease.saturating_sub(want));
        let more = if want == left { more } else { 0 };
        out.push(Part::New(want + more));
        rules.ease = rules.ease.saturating_sub(want + more);
        left -= want;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spares(lens: &[u32]) -> Vec<Spare> {
        lens.iter()
            .map(|&len| Spare {
                slot: len,
                run: 0,
                at: 0,
                len,
                breaks: false,
            })
            .collect()
    }

    fn lens(hole: u32, room: u32, have: &[u32], ease: u32) -> (Vec<i64>, usize) {
        let mut spares = spares(have);
        let mut out = Vec::new();
        fill(
            hole,
            room,
            &mut spares,
            &mut Rules {
                max: 32,
                min: 16,
                ease,
            },
            &mut out,
        );
        let show = |p: &Part| match p {
            Part::Old(s) => i64::from(s.len),
            Part::New(n) => -i64::from(*n),
        };
        (out.iter().map(show).collect(), spares.len())
    }

    #[test]
    fn holes_are_filled_exactly_when_there_is_no_room_beyond() {
        assert_eq!(lens(20, 0, &[3, 16, 32], 0), (vec![16, 3, -1], 1));
        assert_eq!(lens(70, 0, &[], 1000), (vec![-32, -32, -6], 0));
    }

    #[test]
    fn growth_takes_its_least_step_only_with_ease_and_room() {
        assert_eq!(lens(2, 100, &[], 1000).0, [-16]);
        assert_eq!(lens(2, 100, &[], 0).0, [-2]);
        assert_eq!(lens(2, 5, &[], 1000).0, [-7]);
    }

    #[test]
    fn a_longer_granule_serves_when_little_is_wasted_or_memory_is_short() {
        assert_eq!(lens(14, 100, &[2, 2, 16], 100).0, [16]);
        assert_eq!(lens(4, 100, &[32], 100).0, [-16]);
        assert_eq!(lens(4, 100, &[32], 0).0, [32]);
    }
}
