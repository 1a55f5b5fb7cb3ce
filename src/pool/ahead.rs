//! The look-ahead worker: one thread a pool that does the slow part of growth before it is asked
//! for, so that growing is a bounds check.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::Holder;
use crate::sync::{Condvar, Mutex};

/// How long the worker looks for the next job by itself before it sleeps until told. While it
/// looks, handing it a job costs the caller no system call.
const ALERT: Duration = Duration::from_millis(20);
/// Pause between two looks.
const PAUSE: Duration = Duration::from_micros(20);

enum Job {
    Weak(Weak<dyn Holder>),
    Owned(Arc<dyn Holder>),
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    started: bool,
    closed: bool,
}

#[derive(Default)]
struct Inbox {
    queue: Mutex<Queue>,
    wake: Condvar,
    asleep: AtomicBool,
}

/// Handle of the worker. The thread starts with the first job and ends when the pool goes.
#[derive(Default)]
pub(super) struct Ahead {
    inbox: Arc<Inbox>,
}

impl Ahead {
    pub(super) fn new() -> Self {
        Self::default()
    }

    pub(super) fn submit(&self, holder: Weak<dyn Holder>) {
        self.push(Job::Weak(holder));
    }

    pub(super) fn submit_owned(&self, holder: Arc<dyn Holder>) {
        self.push(Job::Owned(holder));
    }

    fn push(&self, job: Job) {
        let mut queue = self.inbox.queue.lock();
        queue.jobs.push_back(job);
        if !queue.started {
            let inbox = self.inbox.clone();
            let thread = std::thread::Builder::new().name("granule-ahead".to_owned());
            match thread.spawn(move || inbox.work()) {
                Ok(_) => queue.started = true,
                // Looking ahead is a convenience: growth does the work itself.
                Err(error) => {
                    tracing::warn!(%error, "no look-ahead thread");
                    queue.jobs.clear();
                }
            }
            return;
        }
        drop(queue);
        if self.inbox.asleep.load(Ordering::Acquire) {
            self.inbox.wake.notify_one();
        }
    }

    pub(super) fn close(&self) {
        self.inbox.queue.lock().closed = true;
        self.inbox.wake.notify_one();
    }
}

impl Inbox {
    fn work(&self) {
        let mut last = Instant::now();
        loop {
            match self.next(last) {
                Next::Job(job) => {
                    // Nothing is locked: the job calls the driver and may drop the pool.
                    match job {
                        Job::Weak(holder) => {
                            if let Some(holder) = holder.upgrade() {
                                holder.map_ahead();
                            }
                        }
                        Job::Owned(holder) => holder.map_ahead(),
                    }
                    last = Instant::now();
                }
                Next::Look => {}
                Next::End => return,
            }
        }
    }

    fn next(&self, last: Instant) -> Next {
        let mut queue = self.queue.lock();
        if let Some(job) = queue.jobs.pop_front() {
            return Next::Job(job);
        }
        if queue.closed {
            return Next::End;
        }
        if last.elapsed() < ALERT {
            self.wake.wait_for(&mut queue, PAUSE);
        } else {
            // Set under the lock: a job pushed before is seen above, one pushed after sees it.
            self.asleep.store(true, Ordering::Release);
            self.wake.wait(&mut queue);
            self.asleep.store(false, Ordering::Release);
        }
        Next::Look
    }
}

enum Next {
    Job(Job),
    Look,
    End,
}
