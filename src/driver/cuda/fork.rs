//! Noticing that this process is a forked child, where CUDA must not be touched.
//!
//! Asking the system for the process id costs a system call on each driver call. A fork hook that
//! counts costs one load.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How many forks lie between the process that first called [`watch`] and this one.
static FORKS: AtomicU64 = AtomicU64::new(0);
static HOOKED: AtomicBool = AtomicBool::new(false);

/// Installs the hook, once.
pub(super) fn watch() {
    #[cfg(unix)]
    {
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| HOOKED.store(install(), Ordering::Release));
    }
}

/// A number that is the same for as long as the process is the same; differs in a forked child.
pub(super) fn generation() -> u64 {
    if cfg!(not(unix)) || HOOKED.load(Ordering::Acquire) {
        FORKS.load(Ordering::Relaxed)
    } else {
        // No hook, for lack of memory: pay for the system call. Never equal to a count.
        u64::from(std::process::id()) | 1 << 63
    }
}

#[cfg(unix)]
fn install() -> bool {
    use std::ffi::c_int;

    type Hook = Option<unsafe extern "C" fn()>;

    unsafe extern "C" {
        fn pthread_atfork(prepare: Hook, parent: Hook, child: Hook) -> c_int;
    }

    unsafe extern "C" fn in_child() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }

    // SAFETY: the hook is a static function that only counts, so it may run in the child of a
    // process with threads.
    let code = unsafe { pthread_atfork(None, None, Some(in_child)) };
    code == 0
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::ffi::c_int;

    unsafe extern "C" {
        fn fork() -> c_int;
        fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
        fn _exit(status: c_int) -> !;
    }

    #[test]
    fn a_child_differs_and_the_parent_does_not() {
        watch();
        let before = generation();
        // SAFETY: the child below only reads an atomic and leaves by _exit.
        let pid = unsafe { fork() };
        if pid == 0 {
            let code = c_int::from(generation() == before);
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { _exit(code) };
        }
        assert!(pid > 0);
        let mut status = -1;
        // SAFETY: waits for the child made above; the pointer is to a live local.
        let waited = unsafe { waitpid(pid, &raw mut status, 0) };
        assert_eq!(waited, pid);
        assert_eq!(status, 0, "the child saw its parent's generation");
        assert_eq!(generation(), before);
    }
}
