//! Threads by number: no two that live have the same, and the least free one is given next.

#[cfg(not(shuttle))]
pub(super) use real::{seat, seat_now};

/// The seat of a thread that has none, and of nobody else.
pub(super) const NO_SEAT: u32 = u32::MAX;
/// No thread's.
pub(super) const NOBODYS: u32 = NO_SEAT - 2;

#[cfg(not(shuttle))]
mod real {
    use std::cell::Cell;
    use std::collections::BTreeSet;

    use super::NO_SEAT;
    use crate::sync::Mutex;

    /// Not asked yet.
    const STANDING: u32 = NO_SEAT - 1;

    /// The calling thread's seat.
    #[inline]
    pub(crate) fn seat() -> u32 {
        match SEAT.get() {
            STANDING => sit(),
            seat => seat,
        }
    }

    /// As [`seat`], but a thread that has not asked yet stands.
    #[inline]
    pub(crate) fn seat_now() -> u32 {
        SEAT.get()
    }

    struct Seats {
        free: BTreeSet<u32>,
        /// Seats that anybody ever had.
        count: u32,
    }

    static SEATS: Mutex<Seats> = Mutex::new(Seats {
        free: BTreeSet::new(),
        count: 0,
    });

    thread_local! {
        // Apart from what gives it back: to read a number that needs no destructor is one instruction.
        static SEAT: Cell<u32> = const { Cell::new(STANDING) };
        static HELD: Held = const { Held };
    }

    struct Held;

    impl Drop for Held {
        fn drop(&mut self) {
            let seat = SEAT.replace(NO_SEAT);
            // Whoever sits there next comes, by this lock, after all that this thread did.
            SEATS.lock().free.insert(seat);
        }
    }

    #[cold]
    fn sit() -> u32 {
        // A thread that is ending stands.
        if HELD.try_with(|_| ()).is_err() {
            SEAT.set(NO_SEAT);
            return NO_SEAT;
        }
        let mut seats = SEATS.lock();
        let seat = seats.free.pop_first().unwrap_or_else(|| {
            seats.count += 1;
            seats.count - 1
        });
        SEAT.set(seat);
        seat
    }
}

/// A model's threads all run on one of the system's.
#[cfg(shuttle)]
pub(super) fn seat() -> u32 {
    usize::from(crate::sync::this_thread()) as u32
}

#[cfg(shuttle)]
pub(super) use seat as seat_now;

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn no_two_threads_have_one_seat_and_seats_come_back() {
        let own = seat();
        assert!(own != NO_SEAT && seat() == own);
        for _ in 0..50 {
            let barrier = Barrier::new(4);
            let mut seats: Vec<u32> = std::thread::scope(|scope| {
                let sit = || {
                    let seat = seat();
                    barrier.wait();
                    seat
                };
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(sit)).collect();
                threads.into_iter().map(|t| t.join().unwrap()).collect()
            });
            seats.push(own);
            seats.sort_unstable();
            seats.dedup();
            assert_eq!(seats.len(), 5);
            // Other tests' threads sit here too.
            assert!(seats[4] < 200, "{seats:?}");
        }
    }
}
