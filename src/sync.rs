//! The one place that names locks, so that a model checker can stand in for them.

pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
