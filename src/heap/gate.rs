//! A lock that costs its owner no atomic exchange.
//!
//! One thread comes all the time, others rarely. The owner says that it is inside, then looks whether
//! somebody wants it to stay out; the others say so, then look whether it is inside. Both orders need a
//! barrier between the store and the load (Dekker). The others' is one of all threads of the process
//! (`membarrier(2)`), which stands for the owner's as well: what is left of that is an order for the
//! compiler. Where the system has no such call the owner makes its own.

use std::sync::atomic::Ordering::*;

use super::seat::{NO_SEAT, NOBODYS};
use crate::sync::atomic::{AtomicBool, AtomicU32, fence};

/// Whose it is by seat, and who is inside.
#[derive(Debug)]
pub(super) struct Gate {
    owner: AtomicU32,
    /// The owner is inside.
    inside: AtomicBool,
    /// Others that want it to stay out, and [`FENCED`].
    stops: AtomicU32,
}

/// The owner makes its barriers itself.
const FENCED: u32 = 1 << 31;

impl Gate {
    /// Nobody's gate.
    pub(super) fn new() -> Self {
        Self {
            owner: AtomicU32::new(NOBODYS),
            inside: AtomicBool::new(false),
            stops: AtomicU32::new(match barrier::is_there() {
                true => 0,
                false => FENCED,
            }),
        }
    }

    /// Lets its owner in, who sits on `seat`, unless others keep it out. Nobody else ever gets in.
    #[inline]
    pub(super) fn enter(&self, seat: u32) -> bool {
        if seat != self.owner.load(Relaxed) {
            return false;
        }
        self.inside.store(true, Relaxed);
        std::sync::atomic::compiler_fence(SeqCst);
        self.stops.load(Acquire) == 0 || self.enter_fenced()
    }

    /// Lets its owner in, who said that it is inside, if that takes a barrier and no more.
    #[cold]
    fn enter_fenced(&self) -> bool {
        fence(SeqCst);
        let is_in = self.stops.load(Acquire) == FENCED;
        if !is_in {
            self.leave();
        }
        is_in
    }

    /// Whether it is of those who sit on `seat`: from now on, if it was nobody's. Only for one who may stop it.
    pub(super) fn claim(&self, seat: u32) -> bool {
        if seat == NO_SEAT {
            return false;
        }
        let owner = self.owner.load(Relaxed);
        if owner == NOBODYS {
            self.owner.store(seat, Relaxed);
        }
        owner == seat || owner == NOBODYS
    }

    /// Makes it nobody's. Only while nobody else has it.
    pub(super) fn disown(&self) {
        self.owner.store(NOBODYS, Relaxed);
    }

    /// Only after [`enter`](Self::enter), which let the caller in.
    #[inline]
    pub(super) fn leave(&self) {
        self.inside.store(false, Release);
    }
}

/// Looks until it is so, which takes others some instructions.
pub(super) fn look_until(mut so: impl FnMut() -> bool) {
    let mut looks = 0u32;
    while !so() {
        looks += 1;
        match looks % 64 {
            // Who is inside may have lost its core.
            0 => crate::sync::yield_now(),
            _ => std::hint::spin_loop(),
        }
    }
}

/// Owners stay out of their gates while it lives.
#[derive(Debug)]
pub(super) struct Stop<'a> {
    gates: Vec<&'a Gate>,
}

impl<'a> Stop<'a> {
    /// Waits until all owners are out, some instructions of each. The caller, who sits on `seat`, is in none
    /// itself. `None`, and nobody is kept out, if the system refuses the barrier that it gave before.
    pub(super) fn new(gates: impl Iterator<Item = &'a Gate>, seat: u32) -> Option<Self> {
        let stop = Self {
            gates: gates.collect(),
        };
        for gate in &stop.gates {
            gate.stops.fetch_add(1, SeqCst);
        }
        let is_other = |gate: &&&Gate| gate.owner.load(Relaxed) != seat;
        let others = || stop.gates.iter().filter(is_other);
        if others().next().is_some() && !barrier::everywhere() {
            return None;
        }
        for gate in others() {
            look_until(|| !gate.inside.load(Acquire));
        }
        Some(stop)
    }
}

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        for gate in &self.gates {
            gate.stops.fetch_sub(1, Release);
        }
    }
}

mod barrier {
    use crate::sync::atomic::{Ordering::SeqCst, fence};

    /// Whether one thread can make a barrier for all of the process. Asked once: it stays so.
    #[cfg(all(target_os = "linux", not(shuttle)))]
    pub(super) fn is_there() -> bool {
        use std::sync::OnceLock;

        use rustix::thread::{MembarrierCommand, membarrier};

        static THERE: OnceLock<bool> = OnceLock::new();
        *THERE.get_or_init(|| membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok())
    }

    #[cfg(not(all(target_os = "linux", not(shuttle))))]
    pub(super) fn is_there() -> bool {
        false
    }

    /// A barrier of all threads, or of this one where owners make their own.
    pub(super) fn everywhere() -> bool {
        fence(SeqCst);
        #[cfg(all(target_os = "linux", not(shuttle)))]
        if is_there() {
            use rustix::thread::{MembarrierCommand, membarrier};

            // Short of memory it may fail.
            return (0..100).any(|_| membarrier(MembarrierCommand::PrivateExpedited).is_ok());
        }
        true
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::sync::atomic::AtomicBool as Flag;
    use std::sync::atomic::AtomicU64;

    use super::*;

    fn of(seat: u32) -> Gate {
        let gate = Gate::new();
        assert!(gate.claim(seat));
        gate
    }

    /// The owner counts inside, others count when it is out: no count is lost, though none is an exchange.
    fn count_together(gate: &Gate) {
        let (count, outside, done) = (AtomicU64::new(0), AtomicU64::new(0), Flag::new(false));
        let add = |count: &AtomicU64| count.store(count.load(Relaxed) + 1, Relaxed);
        let mut inside = 0u64;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    if let Some(_stop) = Stop::new([gate].into_iter(), 8) {
                        add(&count);
                        add(&outside);
                    }
                }
            });
            // Until both have come often, however the machine shares its cores between them.
            while inside < 300_000 || outside.load(Relaxed) < 100 {
                if gate.enter(7) {
                    add(&count);
                    gate.leave();
                    inside += 1;
                }
            }
            done.store(true, Relaxed);
        });
        assert_eq!(count.load(Relaxed), inside + outside.load(Relaxed));
    }

    #[test]
    fn the_owner_and_others_are_never_inside_together() {
        count_together(&of(7));
        let fenced = of(7);
        fenced.stops.store(FENCED, Relaxed);
        count_together(&fenced);
    }

    #[test]
    fn only_its_owner_enters_and_not_while_it_is_stopped() {
        let gate = of(3);
        assert!(!gate.enter(4) && !gate.enter(NO_SEAT));
        let stops = [
            Stop::new([&gate].into_iter(), 3),
            Stop::new([&gate].into_iter(), 4),
        ];
        assert!(stops.iter().all(Option::is_some) && !gate.enter(3));
        drop(stops);
        assert!(gate.enter(3));
        gate.leave();
        assert!(!Gate::new().enter(NO_SEAT) && !Gate::new().claim(NO_SEAT));
    }
}
