//! A pass: plan, carry out, plan again if other threads have changed what the plan was about.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::heap::Inner;
use super::plan::{self, Plan, Prediction, Shortfall, Source, State, Step, Strategy};
use super::steps::Went;
use super::{Age, Bound, Calls, Goal, Report};
use crate::driver::cost::Nanos;
use crate::stream::Stream;
use crate::units::VaRange;
use crate::{Error, Result};

/// Plans that may be overtaken by other threads before a pass gives up.
const ATTEMPTS: u32 = 16;

/// A bounded pass copies at most so many bytes, and maps so many granules, before it looks at the time.
const BITE: u64 = 256 << 20;
const BITE_MAPS: usize = 4;

/// What a pass has done so far.
#[derive(Default)]
pub(super) struct Tally {
    pub(super) calls: Calls,
    pub(super) bytes_copied: u64,
    pub(super) pointers_changed: u64,
    pub(super) remapped: u64,
    pub(super) extra_memory: u64,
    steps: u32,
    planning: Duration,
}

/// What the pass was for.
struct Order<'a> {
    stream: &'a Stream,
    strategy: Strategy,
    goal: Goal,
    bound: Bound,
    /// A block of that many bytes is made of the run.
    take: Option<(u64, Age)>,
}

/// What came of it.
struct Outcome {
    report: Report,
    id: Option<u64>,
}

impl Inner {
    pub(super) fn miss(
        &self,
        strategy: Strategy,
        len: u64,
        age: Age,
        stream: &Stream,
    ) -> Result<(u64, Report)> {
        let order = Order {
            stream,
            strategy,
            goal: Goal::Contiguous(len),
            bound: Bound::NONE,
            take: Some((len, age)),
        };
        let first = match self.config.on_failure {
            true => self.pass(&order),
            false => self.grow_for(len, stream).and_then(|()| self.pass(&order)),
        };
        let outcome = match first {
            // Others may hold what the pool lacks.
            Err(Error::Shortfall(why)) if self.pool.shared().reclaim(why.wanted) > 0 => {
                self.pass(&order)?
            }
            other => other?,
        };
        match outcome.id {
            Some(id) => Ok((id, outcome.report)),
            // Overtaken time and again.
            None => {
                let waited = outcome.report.actual.as_micros();
                Err(Error::TimedOut {
                    waited_us: u64::try_from(waited).unwrap_or(u64::MAX),
                })
            }
        }
    }

    pub(super) fn defragment(
        &self,
        stream: &Stream,
        strategy: Strategy,
        goal: Goal,
        bound: Bound,
    ) -> Result<Report> {
        let order = Order {
            stream,
            strategy,
            goal,
            bound,
            take: None,
        };
        self.pass(&order).map(|outcome| outcome.report)
    }

    pub(super) fn maintain(&self, stream: &Stream) -> Result<Option<Report>> {
        {
            let Some(_turn) = self.turn.try_lock() else {
                return Ok(None);
            };
            self.retire(None);
        }
        if !self.config.lazy.is_due(&self.state(Instant::now())) {
            return Ok(None);
        }
        let done = self.defragment(stream, self.config.strategy, Goal::Largest, Bound::NONE);
        self.heap.lock().last_lazy = Instant::now();
        let report = match done {
            Ok(report) => Some(report),
            // All is pinned, or as good as it gets.
            Err(Error::Shortfall(_)) => None,
            Err(error) => return Err(error),
        };
        let _turn = self.turn.lock();
        self.give_back(u64::MAX);
        Ok(report)
    }

    pub(super) fn grow(&self, bytes: u64, stream: &Stream) -> Result<()> {
        let _turn = self.turn.lock();
        let mut tally = Tally::default();
        self.retire(None);
        let state = self.state(Instant::now());
        let n = usize::try_from(bytes.div_ceil(state.granule)).unwrap_or(usize::MAX);
        let hole = |i: usize| state.slots.get(i) == Some(&plan::Slot::Hole);
        let mut start = None;
        let mut length = 0;
        for i in (0..state.slots.len()).filter(|_| n > 0) {
            length = if hole(i) { length + 1 } else { 0 };
            if length == n {
                start = Some(i + 1 - n);
                break;
            }
        }
        let Some(start) = start.or((n == 0).then_some(0)) else {
            return Err(Error::ReservationExhausted {
                asked: bytes,
                reserved: state.len(),
            });
        };
        let list = (start..start + n).map(|to| plan::Remapping {
            to,
            from: Source::Pool,
        });
        let step = Step::Map(list.collect());
        match self.step(stream, &step, &mut tally)? {
            Went::Done => Ok(()),
            Went::Outdated => Err(Error::Inconsistent {
                what: "holes that only a pass may fill",
                booked: n as u64,
                counted: 0,
            }),
        }
    }

    /// New memory for one block, where passes are not to be started by allocations.
    fn grow_for(&self, len: u64, stream: &Stream) -> Result<()> {
        match self.grow(len, stream) {
            Err(error) if error.is_out_of_memory() => {
                let state = self.state(Instant::now());
                Err(Error::Shortfall(Box::new(plan::shortfall(
                    &state,
                    self.config.strategy,
                    len,
                ))))
            }
            other => other,
        }
    }

    fn pass(&self, order: &Order<'_>) -> Result<Outcome> {
        let _turn = self.turn.lock();
        self.stop.store(false, Ordering::Release);
        let started = Instant::now();
        let mut tally = Tally::default();
        let mut first: Option<(u64, Prediction)> = None;
        let done = self.attempts(order, started, &mut tally, &mut first);
        {
            let mut heap = self.heap.lock();
            heap.books.window = None;
            heap.passes += u64::from(tally.steps > 0);
        }
        if tally.steps > 0 {
            self.fence_stale();
        }
        let (finished, at, id) = done?;
        let (len, predicted) = first.unwrap_or_default();
        let report = Report {
            strategy: order.strategy,
            run: self.range(at, len).unwrap_or(VaRange::EMPTY),
            finished,
            predicted,
            actual: started.elapsed(),
            planning: tally.planning,
            steps: tally.steps,
            bytes_copied: tally.bytes_copied,
            pointers_changed: tally.pointers_changed,
            remapped: tally.remapped,
            extra_memory: tally.extra_memory,
            calls: tally.calls,
        };
        Ok(Outcome { report, id })
    }

    /// Whether the run is there, where, and the block made of it.
    fn attempts(
        &self,
        order: &Order<'_>,
        started: Instant,
        tally: &mut Tally,
        first: &mut Option<(u64, Prediction)>,
    ) -> Result<(bool, u64, Option<u64>)> {
        // Addresses of earlier passes come free here, and only what is in the way is waited for.
        self.bound_aliases(tally)?;
        let mut at = 0;
        for _ in 0..ATTEMPTS {
            let planning = Instant::now();
            let mut state = self.state(planning);
            let mut planned = self.plan(order, &state);
            // Old mappings may stand where the run could.
            if planned.is_err() && !self.heap.lock().stale.is_empty() {
                tally.calls.unmap += self.retire(None);
                state = self.state(Instant::now());
                planned = self.plan(order, &state);
            }
            if planned.is_err() && !self.heap.lock().stale.is_empty() {
                tally.calls.unmap += self.await_gone(None).unwrap_or(0);
                state = self.state(Instant::now());
                planned = self.plan(order, &state);
            }
            let plan = planned.map_err(|why| Error::Shortfall(Box::new(why)))?;
            tally.planning += planning.elapsed();
            at = plan.at;
            first.get_or_insert((plan.len, plan.predicted));
            self.heap.lock().books.window = Some((plan.at, plan.len));
            match self.carry_out(order, &plan, &state, started, tally)? {
                Carried::Out => {}
                Carried::Stopped => return Ok((false, at, None)),
                Carried::Overtaken => continue,
            }
            let Some((len, age)) = order.take else {
                return Ok((true, at, None));
            };
            let taken = self.heap.lock().books.take(at, len, age, order.stream);
            if let Some((id, before)) = taken {
                return self
                    .order(id, &before, order.stream)
                    .map(|id| (true, at, Some(id)));
            }
        }
        Ok((false, at, None))
    }

    fn plan(&self, order: &Order<'_>, state: &State) -> Result<Plan, Shortfall> {
        let by =
            |want| plan::plan_sound(state, order.strategy, want, &self.table, &self.config.lazy);
        match order.goal {
            Goal::Contiguous(want) => by(want),
            Goal::Largest => {
                let (free, now) = (state.free(), state.largest_run());
                let mut why = None;
                for quarters in (1..=4).rev() {
                    let want = free / 4 * quarters / state.align * state.align;
                    if want <= now {
                        break;
                    }
                    match by(want) {
                        Ok(plan) if plan.predicted.extra_memory == 0 => return Ok(plan),
                        Ok(_) => {}
                        Err(error) => why = Some(error),
                    }
                }
                Err(why.unwrap_or_else(|| plan::shortfall(state, order.strategy, free)))
            }
        }
    }

    fn carry_out(
        &self,
        order: &Order<'_>,
        plan: &Plan,
        state: &State,
        started: Instant,
        tally: &mut Tally,
    ) -> Result<Carried> {
        let bites;
        let steps = match order.bound.is_none() {
            true => &plan.steps,
            false => {
                bites = in_bites(&plan.steps);
                &bites
            }
        };
        let mut device = Nanos::ZERO;
        for step in steps {
            if self.stop.load(Ordering::Acquire) {
                return Ok(Carried::Stopped);
            }
            if order.bound.steps.is_some_and(|most| tally.steps >= most) {
                return Ok(Carried::Stopped);
            }
            if let Some(most) = order.bound.time {
                let price = plan::price(state, &self.table, step);
                device += price.device;
                let host = started.elapsed() + Duration::from(price.host);
                if host.max(Duration::from(device)) > most {
                    return Ok(Carried::Stopped);
                }
            }
            if self.step(order.stream, step, tally)? == Went::Outdated {
                return Ok(Carried::Overtaken);
            }
            tally.steps += 1;
        }
        Ok(Carried::Out)
    }

    /// Unmaps what can be, and waits where there are too many old mappings.
    fn bound_aliases(&self, tally: &mut Tally) -> Result<()> {
        let many = |inner: &Self| inner.heap.lock().stale.len() > inner.config.aliases;
        if many(self) {
            tally.calls.unmap += self.retire(None);
            if many(self) {
                tally.calls.unmap += self.await_gone(None)?;
            }
        }
        Ok(())
    }
}

enum Carried {
    Out,
    Stopped,
    Overtaken,
}

/// The same steps, cut so that a pass can end between them.
fn in_bites(steps: &[Step]) -> Vec<Step> {
    let mut cut = Vec::new();
    for step in steps {
        match step {
            Step::Copy(moves) => {
                let mut bite = Vec::new();
                let mut bytes = 0;
                for one in moves {
                    if bytes > 0 && bytes + one.len > BITE {
                        cut.push(Step::Copy(std::mem::take(&mut bite)));
                        bytes = 0;
                    }
                    bytes += one.len;
                    bite.push(*one);
                }
                cut.push(Step::Copy(bite));
            }
            Step::Map(list) => {
                cut.extend(list.chunks(BITE_MAPS).map(|some| Step::Map(some.to_vec())));
            }
            other => cut.push(other.clone()),
        }
    }
    cut
}
