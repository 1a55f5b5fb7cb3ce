//! The one place that names locks, so that a model checker can stand in for them.
//!
//! With `--cfg shuttle`, locks are shuttle's, and `tests/model.rs` runs threads over the simulated
//! device in thousands of random schedules.

#[cfg(not(shuttle))]
mod real {
    pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

    /// Waits a little for another thread.
    pub(crate) fn pause(time: std::time::Duration) {
        std::thread::sleep(time);
    }

    /// Lets another thread run.
    pub(crate) fn yield_now() {
        std::thread::yield_now();
    }

    pub(crate) use std::sync::atomic;
    pub(crate) use std::thread::ThreadId;

    pub(crate) fn this_thread() -> ThreadId {
        std::thread::current().id()
    }
}

#[cfg(shuttle)]
mod model {
    use std::ops::{Deref, DerefMut};
    use std::sync::PoisonError;
    use std::time::Duration;

    use shuttle::sync;

    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(sync::Mutex<T>);

    #[derive(Debug)]
    pub(crate) struct MutexGuard<'a, T>(Option<sync::MutexGuard<'a, T>>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            let guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            MutexGuard(Some(guard))
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok().map(|guard| MutexGuard(Some(guard)))
        }

        pub(crate) fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        #[allow(clippy::expect_used)]
        fn deref(&self) -> &T {
            self.0.as_ref().expect("taken only inside of a wait")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        #[allow(clippy::expect_used)]
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().expect("taken only inside of a wait")
        }
    }

    #[derive(Debug, Default)]
    pub(crate) struct RwLock<T>(sync::RwLock<T>);

    impl<T> RwLock<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(sync::RwLock::new(value))
        }

        pub(crate) fn read(&self) -> sync::RwLockReadGuard<'_, T> {
            self.0.read().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn write(&self) -> sync::RwLockWriteGuard<'_, T> {
            self.0.write().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
        }
    }

    #[derive(Debug, Default)]
    pub(crate) struct Condvar(sync::Condvar);

    impl Condvar {
        pub(crate) fn new() -> Self {
            Self::default()
        }

        pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            if let Some(inner) = guard.0.take() {
                let inner = self.0.wait(inner).unwrap_or_else(PoisonError::into_inner);
                guard.0 = Some(inner);
            }
        }

        /// Time does not pass in a model: gives others a turn.
        pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _: Duration) -> bool {
            if let Some(inner) = guard.0.take() {
                let timed = self.0.wait_timeout(inner, Duration::ZERO);
                let (inner, _) = timed.unwrap_or_else(PoisonError::into_inner);
                guard.0 = Some(inner);
            }
            true
        }

        pub(crate) fn notify_one(&self) {
            self.0.notify_one();
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }
    }

    pub(crate) fn pause(_: Duration) {
        shuttle::thread::yield_now();
    }

    pub(crate) fn yield_now() {
        shuttle::thread::yield_now();
    }

    pub(crate) use shuttle::sync::atomic;
    pub(crate) use shuttle::thread::ThreadId;

    pub(crate) fn this_thread() -> ThreadId {
        shuttle::thread::current().id()
    }
}

#[cfg(shuttle)]
pub(crate) use model::{
    Condvar, Mutex, MutexGuard, RwLock, ThreadId, atomic, pause, this_thread, yield_now,
};
#[cfg(not(shuttle))]
pub(crate) use real::{
    Condvar, Mutex, MutexGuard, RwLock, ThreadId, atomic, pause, this_thread, yield_now,
};
