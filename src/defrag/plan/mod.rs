//! The planner: what moves where, and what that will cost. Pure: the same state, question and cost
//! table give the same plan, and no driver is seen here.

use std::cell::{Cell, OnceCell};
use std::fmt;
use std::time::Duration;

use crate::driver::cost::{CostTable, Nanos};

mod cost;
mod places;
mod slide;
mod state;
mod survey;
mod sweep;
#[cfg(test)]
mod tests;
mod window;

pub use cost::{BATCH_PARTS, BULK, Prediction};
pub use state::{Piece, Slot, State};

use cost::Calls;
use survey::Survey;
use sweep::Span;
use window::Mode;

/// A way to make free memory contiguous.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Strategy {
    /// Free granules are mapped behind one another at addresses that are free. Nothing live moves and
    /// nothing is copied. Only where no stretch of addresses is left, whole granules of movable
    /// blocks are remapped too.
    Remap,
    /// Sliding compaction: live blocks between two gaps slide to the low end, by copying.
    Compact,
    /// Evacuation: the window with the fewest live bytes is emptied by copying its blocks to free
    /// places elsewhere. What compaction comes to when it knows how much is wanted.
    Evacuate,
    /// As [`Evacuate`](Self::Evacuate), but old blocks stay; [`Compact`](Self::Compact) if that is
    /// not enough.
    Generational,
    /// Nothing moves: a free place at a multiple of its size, which is a power of two, or new memory.
    Buddy,
    /// A buddy system that empties such a place by copying when the waste is over a threshold and the
    /// last pass is long enough ago.
    LazyBuddy,
    /// Whatever is cheapest by the cost table: remapping, copying, or both at the same time.
    Hybrid,
}

impl Strategy {
    /// Every strategy, in the order of tables.
    pub const ALL: [Self; 7] = [
        Self::Remap,
        Self::Compact,
        Self::Evacuate,
        Self::Generational,
        Self::Buddy,
        Self::LazyBuddy,
        Self::Hybrid,
    ];

    /// What it is called in tables and arguments.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Remap => "remap",
            Self::Compact => "copy compaction",
            Self::Evacuate => "copy evacuation",
            Self::Generational => "generational",
            Self::Buddy => "buddy",
            Self::LazyBuddy => "lazy buddy",
            Self::Hybrid => "hybrid",
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// When a pass is worth it without a failing allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lazy {
    /// Waste in thousandths above which a pass runs; 300 by default.
    pub waste_permille: u64,
    /// Time that must have gone by since the last one; 5 s by default.
    pub interval: Duration,
}

impl Default for Lazy {
    fn default() -> Self {
        Self {
            waste_permille: 300,
            interval: Duration::from_secs(5),
        }
    }
}

impl Lazy {
    /// Whether a pass is due.
    #[must_use]
    pub fn is_due(&self, state: &State) -> bool {
        state.waste_permille() > self.waste_permille && state.since_last >= self.interval
    }
}

/// A block that is copied.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Move {
    /// The piece.
    pub id: u64,
    /// Its offset when its turn comes.
    pub from: u64,
    /// Its new offset.
    pub to: u64,
    /// Its bytes.
    pub len: u64,
}

/// Where a granule comes from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Source {
    /// Another slot, in which nothing is live. It becomes free once queued work is done.
    Slot(usize),
    /// The pool.
    Pool,
}

/// A granule that gets another address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Remapping {
    /// The slot it comes to, a hole.
    pub to: usize,
    /// Where it comes from.
    pub from: Source,
}

/// A step of a plan. After each step everything is consistent, so a pass may end behind any.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Step {
    /// Copies these blocks, in no order among themselves, to places that are free.
    Copy(Vec<Move>),
    /// Maps granules at new addresses.
    Map(Vec<Remapping>),
    /// Remaps live blocks that are whole granules. Old addresses stay valid for queued work.
    Shift(Vec<Move>),
    /// Waits until queued work is done with what was at these slots, and unmaps it.
    Vacate(Vec<usize>),
}

/// What to do, and what it will cost.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// The strategy that made it.
    pub strategy: Strategy,
    /// First byte of the run of free bytes that it makes.
    pub at: u64,
    /// Bytes of that run.
    pub len: u64,
    /// In this order.
    pub steps: Vec<Step>,
    /// What it costs by the table.
    pub predicted: Prediction,
}

/// Why a strategy cannot make a run of that many bytes. All figures in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{strategy} cannot make {wanted} contiguous bytes: {free} free (longest run {largest}, {whole} in \
     whole granules), {pinned} pinned, {obtainable} to be had from the pool"
)]
pub struct Shortfall {
    /// The strategy.
    pub strategy: Strategy,
    /// Bytes wanted.
    pub wanted: u64,
    /// Mapped and not live.
    pub free: u64,
    /// The longest free run.
    pub largest: u64,
    /// Free in granules in which nothing is live.
    pub whole: u64,
    /// In blocks that may not move.
    pub pinned: u64,
    /// What the pool could give.
    pub obtainable: u64,
}

/// A plan for `want` contiguous free bytes; an empty one where they are free already. The steps of a
/// plan for no bytes are none.
///
/// # Errors
///
/// [`Shortfall`] with the figures when the strategy cannot do it, or the state is not
/// [sound](State::is_sound).
pub fn plan(
    state: &State,
    strategy: Strategy,
    want: u64,
    table: &CostTable,
    lazy: &Lazy,
) -> Result<Plan, Shortfall> {
    match state.is_sound() {
        true => plan_sound(state, strategy, want, table, lazy),
        false => Err(shortfall(state, strategy, want)),
    }
}

/// The same for a state that is sound, as that of books is.
pub(super) fn plan_sound(
    state: &State,
    strategy: Strategy,
    want: u64,
    table: &CostTable,
    lazy: &Lazy,
) -> Result<Plan, Shortfall> {
    debug_assert!(state.is_sound());
    let planner = Planner::new(state, table);
    let rounded = crate::units::round_up(want.max(1), state.align.max(1));
    let made = match rounded {
        Some(want) if want <= state.len() => planner.by(strategy, want, lazy),
        _ => None,
    };
    made.map(|found| Plan {
        strategy,
        at: found.at,
        len: rounded.unwrap_or(want),
        steps: found.steps,
        predicted: found.predicted,
    })
    .ok_or_else(|| shortfall(state, strategy, want))
}

pub(super) fn shortfall(state: &State, strategy: Strategy, wanted: u64) -> Shortfall {
    let runs = state.free_runs();
    let unit = state.granule.max(1);
    let whole = runs.iter().map(|(at, len)| {
        let first = at.div_ceil(unit);
        ((at + len) / unit).saturating_sub(first) * unit
    });
    let pinned = state.pieces.iter().filter(|p| !p.movable);
    Shortfall {
        strategy,
        wanted,
        free: state.free(),
        largest: runs.iter().map(|r| r.1).max().unwrap_or(0),
        whole: whole.sum(),
        pinned: pinned.map(|p| p.len).sum(),
        obtainable: (state.idle.saturating_add(state.creatable)).saturating_mul(unit),
    }
}

/// What one step costs by the table.
pub(super) fn price(state: &State, table: &CostTable, step: &Step) -> Prediction {
    Planner::new(state, table).predict(std::slice::from_ref(step))
}

/// What remapping and copying at the same time may take of what the better one takes alone, in
/// thousandths: it makes work for both host and device, so a gain within the noise is none.
const MIX_PERMILLE: u64 = 900;

struct Planner<'a> {
    state: &'a State,
    table: &'a CostTable,
    calls: Calls,
    /// Of the state, once a window is looked at.
    survey: OnceCell<Survey>,
    /// Windows of the length wanted.
    spans: OnceCell<Vec<Span>>,
    /// Pieces, slots and windows that were looked at, for the test that it stays near linear.
    looked_at: Cell<usize>,
    /// Windows whose price was worked out, for the test that few are.
    priced: Cell<usize>,
}

impl<'a> Planner<'a> {
    fn new(state: &'a State, table: &'a CostTable) -> Self {
        Self {
            state,
            table,
            calls: Calls::new(state, table),
            survey: OnceCell::new(),
            spans: OnceCell::new(),
            looked_at: Cell::new(0),
            priced: Cell::new(0),
        }
    }

    fn survey(&self) -> &Survey {
        self.survey.get_or_init(|| {
            self.work(self.state.pieces.len() + self.state.slots.len());
            Survey::new(self.state)
        })
    }

    fn work(&self, n: usize) {
        self.looked_at.set(self.looked_at.get().saturating_add(n));
    }
}

/// A plan without its name.
#[derive(Debug)]
struct Found {
    at: u64,
    steps: Vec<Step>,
    predicted: Prediction,
}

impl Found {
    fn time(&self) -> Nanos {
        self.predicted.until_usable
    }
}

/// Keeps the cheaper one; the earlier at a tie.
fn keep(best: &mut Option<Found>, other: Option<Found>) {
    let better = match (&*best, &other) {
        (Some(best), Some(other)) => other.time() < best.time(),
        (None, _) => true,
        (_, None) => false,
    };
    if better {
        *best = other;
    }
}

impl Planner<'_> {
    fn by(&self, strategy: Strategy, want: u64, lazy: &Lazy) -> Option<Found> {
        let mut best = None;
        match strategy {
            Strategy::Remap => {
                self.windows(want, Mode::REMAP, &mut best, None);
                if best.is_none() {
                    self.windows(want, Mode::SHIFT, &mut best, None);
                }
            }
            Strategy::Compact => self.slide(want, &mut best),
            Strategy::Evacuate => {
                self.windows(want, Mode::EVACUATE, &mut best, None);
            }
            Strategy::Generational => {
                self.windows(want, Mode::MINOR, &mut best, None);
                if best.is_none() {
                    self.slide(want, &mut best);
                }
            }
            Strategy::Buddy | Strategy::LazyBuddy => {
                let class = want.checked_next_power_of_two()?;
                self.windows(want, Mode::buddy(class, false), &mut best, None);
                if best.is_none() && strategy == Strategy::LazyBuddy && lazy.is_due(self.state) {
                    self.windows(want, Mode::buddy(class, true), &mut best, None);
                }
                if best.is_none() {
                    self.windows(want, Mode::buddy_growth(class), &mut best, None);
                }
                return best;
            }
            Strategy::Hybrid => best = self.hybrid(want),
        }
        if best.is_none() {
            // Footprint last: new memory only where what is there does not do.
            let remaps = matches!(strategy, Strategy::Remap | Strategy::Hybrid);
            let mode = if remaps { Mode::GROW } else { Mode::FRESH };
            self.windows(want, mode, &mut best, None);
        }
        if best.is_none() && strategy == Strategy::Hybrid {
            self.windows(want, Mode::ALL, &mut best, None);
        }
        best
    }

    /// The cheapest without new memory.
    fn hybrid(&self, want: u64) -> Option<Found> {
        let mut best = None;
        // In this order: what one found is a bound that spares the next most of its work, and
        // what there are many of, small pieces, is copied. What remapping takes is known exactly
        // before it is planned, and few windows are without pieces: so it is the first bound.
        let remaps = self.cheapest(want, Mode::REMAP, &self.limit(Nanos(u64::MAX)));
        let most = remaps.first().map(|one| one.least);
        self.windows(want, Mode::EVACUATE, &mut best, most);
        self.attempt(&remaps, want, Mode::REMAP, &mut best, None);
        // Sliding an interval never copies less than emptying the window in it; but it finds
        // room where that does not, and the device starts while later levels are booked.
        self.slide(want, &mut best);
        // Where addresses are short.
        self.windows(want, Mode::SHIFT, &mut best, None);
        // Windows that are remapped in one part and emptied in another, at the same time.
        let most = best
            .as_ref()
            .map(|single| Nanos(single.time().0.saturating_mul(MIX_PERMILLE) / 1000));
        let mut mixed = None;
        self.windows(want, Mode::MIXED, &mut mixed, most);
        mixed.or(best)
    }
}
